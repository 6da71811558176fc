"""Weights of a checkpoint for Hugging Face: equal, or rounded once; in files of the size asked for; all of them or
none."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from elixir.checkpoint_format.export import export_hf
from elixir.checkpoint_format.folders import commit
from elixir.checkpoint_format.slice_reader import SliceReader, open_checkpoint
from elixir.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, InputError, InputTypeError
from elixir.files import Files
from elixir.optimizer_states import AVERAGE
from tests.common.checkpoints import save, write
from tests.common.file_faults import FailingFiles, RecordingFiles


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers.models.opt.configuration_opt import OPTConfig
    from transformers.models.opt.modeling_opt import OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=101, word_embed_proj_dim=32,
        max_position_embeddings=32,
    )  # fmt: skip
    return OPTForCausalLM(config).float()


@pytest.fixture(scope="module")
def folder(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    tensors: dict[str, torch.Tensor] = {f"weight/{name}": tensor for name, tensor in model.named_parameters()}
    tensors |= {f"exp_avg/{name}": torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    save(path, tensors, world_size=3, aliases={"lm_head.weight": "model.decoder.embed_tokens.weight"})
    return path


def loaded(out: Path, **options: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    found: torch.nn.Module = AutoModelForCausalLM.from_pretrained(out, **options)
    return found


def test_of_a_folder_of_checkpoints_the_newest_is_exported(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    for step, value in ((2, 1.0), (1, 2.0), (3, 3.0)):
        (run / f"step-{step:08}").mkdir(parents=True)
        save(run / f"step-{step:08}", {"weight/w": torch.full((4,), value)}, step=step)
    (run / "best").symlink_to(run / "step-00000002", target_is_directory=True)
    damaged = run / "step-00000003" / "index.json"
    damaged.write_text(damaged.read_text()[:-10])
    out = export_hf(run, tmp_path / "out")
    assert torch.equal(load_file(out / "model.safetensors")["w"], torch.full((4,), 2.0))
    assert "step-00000003" in caplog.text
    with pytest.raises(CheckpointNotFound):
        export_hf(tmp_path / "out", tmp_path / "other")
    for step in (1, 2):
        (run / f"step-{step:08}" / "index.json").write_text("{")
    with pytest.raises(CheckpointCorrupt):
        export_hf(run, tmp_path / "other")


@pytest.mark.parametrize("size", ["5GB", "20KiB", 1])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_from_pretrained_gives_the_same_model(
    model: Any, folder: Path, tmp_path: Path, size: str | int, dtype: str | None
) -> None:
    out = export_hf(folder, tmp_path / "new" / "out", dtype=dtype, max_shard_size=size, config=model.config)
    found, wanted = loaded(out), torch.bfloat16 if dtype else torch.float32
    assert dict(found.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(found.named_parameters())[name], parameter.to(wanted)), name
    assert found.lm_head.weight is found.model.decoder.embed_tokens.weight  # type: ignore[union-attr]
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    index = out / "model.safetensors.index.json"
    if size == "5GB":
        assert shards == ["model.safetensors"]
        assert not index.exists()
    else:
        assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
        listed = json.loads(index.read_text())
        assert sorted(set(listed["weight_map"].values())) == shards
        assert listed["metadata"]["total_size"] == sum(p.numel() for p in model.parameters()) * wanted.itemsize
        if size == 1:
            assert len(shards) == len(listed["weight_map"])
        else:
            assert all(path.stat().st_size <= 20 * 1024 + 4104 for path in out.glob("*.safetensors"))
    assert json.loads((out / "config.json").read_text())["dtype"] == str(wanted).removeprefix("torch.")
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_a_config_that_says_another_dtype_does_not_round_the_weights(model: Any, folder: Path, tmp_path: Path) -> None:
    config = model.config.to_dict() | {"dtype": "bfloat16"}
    found = loaded(export_hf(folder, tmp_path / "out", config=config))
    assert next(found.parameters()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_lie_in_another_order_are_exported_by_position(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"weight/w": torch.randn(6, 4), "weight/v": torch.randn(3)}
    index = write(tmp_path, tensors | {"weight/w": tensors["weight/w"].t()}, world_size=3)
    turned = replace(index.tensors["weight/w"], shape=(6, 4), order=(1, 0))
    commit(tmp_path, replace(index, tensors=index.tensors | {"weight/w": turned}))
    size = dtype.itemsize * (24 + 3)
    out = export_hf(tmp_path, tmp_path / "out", dtype=dtype, max_shard_size=size)
    found = load_file(out / "model.safetensors")
    assert {f"weight/{name}": each.tolist() for name, each in found.items()} == {
        key: each.to(dtype).tolist() for key, each in tensors.items()
    }
    export_hf(tmp_path, tmp_path / "two", dtype=dtype, max_shard_size=size - 1)
    assert len(list((tmp_path / "two").glob("*.safetensors"))) == 2


def test_what_makes_no_sense_is_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for options, kind in (
        ({"dtype": "int8"}, InputError),
        ({"max_shard_size": "much"}, InputError),
        ({"max_shard_size": 0}, InputError),
        ({"config": 3}, InputTypeError),
        ({"config": {"a": object()}}, InputError),
        ({"config": tmp_path / "absent.json"}, InputError),
    ):
        with pytest.raises(kind):
            export_hf(folder, out, **options)  # type: ignore[arg-type]
        assert not out.exists()
    with pytest.raises(CheckpointNotFound):
        export_hf(tmp_path, out)
    save(tmp_path / "empty", {"exp_avg/w": torch.ones(1)})
    with pytest.raises(CheckpointError, match="no weights"):
        export_hf(tmp_path / "empty", out)
    export_hf(folder, out)
    with pytest.raises(InputError, match="already"):
        export_hf(folder, out)


def test_a_failed_export_leaves_nothing_new(folder: Path, tmp_path: Path) -> None:
    at, failed = 0, True
    while failed:
        at += 3
        out = tmp_path / str(at)
        out.mkdir()
        (out / "tokenizer.json").touch()
        try:
            export_hf(folder, out, max_shard_size="20KiB", config={}, files=FailingFiles(at, errno.ENOSPC))
            failed = False
        except CheckpointError as error:
            assert "No space left" in str(error)  # noqa: PT017
            assert [path.name for path in out.iterdir()] == ["tokenizer.json"]
    assert at > 30


def test_an_export_is_on_the_disk_before_its_files_have_their_names(folder: Path, tmp_path: Path) -> None:
    files = RecordingFiles()
    export_hf(folder, tmp_path / "out", max_shard_size="20KiB", config={}, files=files)
    done = {
        name: [at for at, each in enumerate(files.log) if each.name == name] for name in ("write", "sync", "rename")
    }
    assert {files.log[at].path for at in done["write"]} == {files.log[at].path for at in done["sync"]}
    assert max(done["sync"]) < min(done["rename"])
    assert files.log[-1].name == "sync_folder"


class Killed(BaseException):
    """The process has ended: nothing of it cleans up."""


class KilledFiles(Files):
    """Ends at its second write, and does nothing afterwards."""

    writes = 0

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        self.writes += operation == "write"
        if self.writes > 1 and operation != "close":
            raise Killed
        return super().call(operation, path, function, *args)


def test_what_a_killed_export_left_is_removed_by_the_next(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        export_hf(folder, tmp_path, files=KilledFiles())
    (left,) = (path.name for path in tmp_path.iterdir())
    (tmp_path / ".mine.0123456789ab").touch()
    export_hf(folder, tmp_path)
    assert left.startswith(".model.safetensors.")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.0123456789ab", "model.safetensors"]


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    index = save(tmp_path / "in", {"weight/w": torch.ones(1000)})
    path = tmp_path / "in" / sorted(index.files)[1]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointCorrupt):
        export_hf(tmp_path / "in", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    with open_checkpoint(tmp_path / "in") as saved:
        assert saved.read("weight/w", 0, 500).all()


def test_an_export_reads_no_more_at_once_than_a_span(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read_into = SliceReader.read_into

    def noted(self: SliceReader, key: str, start: int, out: torch.Tensor) -> None:
        sizes.append(out.nbytes)
        read_into(self, key, start, out)

    export_hf(folder, tmp_path / "whole")
    monkeypatch.setattr("elixir.checkpoint_format.export.SPAN_BYTES", 1000)
    monkeypatch.setattr(SliceReader, "read_into", noted)
    export_hf(folder, tmp_path / "pieces")
    assert max(sizes) == 1000
    (whole,), (pieces,) = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("whole", "pieces"))
    assert whole.read_bytes() == pieces.read_bytes()


def test_an_average_takes_the_place_of_weights_that_have_one(tmp_path: Path) -> None:
    values = {"weight/w": 1.0, f"{AVERAGE}/w": 2.0, "weight/frozen": 3.0, "buffer/b": 4.0, "exp_avg/w": 5.0}
    save(tmp_path / "run", {name: torch.full((4,), value) for name, value in values.items()})
    for ema, expected in ((True, 2.0), (False, 1.0)):
        found = load_file(export_hf(tmp_path / "run", tmp_path / f"out {ema}", ema=ema) / "model.safetensors")
        assert {name: value.tolist() for name, value in found.items()} == {
            "w": [expected] * 4, "frozen": [3.0] * 4, "b": [4.0] * 4
        }  # fmt: skip
