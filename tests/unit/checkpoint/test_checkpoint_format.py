"""The format of checkpoints: what is saved comes back, whole or in parts, exactly; others read it; memory stays
bounded."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elixir import checkpoint_format
from elixir.checkpoint_format.folders import find_checkpoints, next_sequence, read_index, remove_checkpoint
from elixir.checkpoint_format.index import encode, merge_tensors
from elixir.checkpoint_format.slice_reader import OPEN_FILES, SliceReader, open_checkpoint, verify
from elixir.checkpoint_format.slices import SAFETENSORS_NAMES, SPAN_BYTES, SavedTensor, Slice, SliceWriter
from elixir.errors import (
    CheckpointCorrupt,
    CheckpointError,
    ElixirError,
    InputError,
    StateError,
)
from elixir.kernels.adam.moments import make_moments, read_moments, write_moments
from tests.common.checkpoints import group, same, save
from tests.common.file_faults import RecordingFiles, ShortFiles


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits that the dtype takes, NaN included."""
    numel = int(np.prod(shape, dtype=np.int64))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.bool)
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def every_dtype() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"weight/{i}": random_tensor((5, 1 + i), dtype) for i, dtype in enumerate(SAFETENSORS_NAMES)}
    return tensors | {"weight/scalar": torch.tensor(2.5), "weight/empty": torch.empty(3, 0)}


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path: Path, world_size: int) -> None:
    tensors = every_dtype()
    save(tmp_path, tensors, world_size=world_size)
    assert verify(tmp_path) == ()
    with open_checkpoint(tmp_path) as saved:
        assert saved.keys() == tuple(tensors) or set(saved.keys()) == set(tensors)
        for key, tensor in tensors.items():
            found = saved.read_whole(key)
            assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor))


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_range_is_read_across_spans_and_files(tmp_path: Path, world_size: int) -> None:
    numel = 3 * SPAN_BYTES // 4 + 12345
    tensor = torch.arange(numel, dtype=torch.int32)
    save(tmp_path, {"weight/w": tensor}, world_size=world_size)
    edges = sorted({0, numel, SPAN_BYTES // 4, SPAN_BYTES // 4 - 1, -(-numel // 3), -(-numel // 3) + 1, numel - 1})
    dice = random.Random(0)
    ranges = [
        *itertools.combinations(edges, 2),
        *(tuple(sorted(dice.sample(range(numel), 2))) for _ in range(10)),
        (5, 5),
    ]
    with SliceReader(tmp_path, files=ShortFiles()) as reader:
        for start, stop in ranges[:3]:
            assert torch.equal(reader.read("weight/w", start, stop), tensor[start:stop])
    with SliceReader(tmp_path) as reader:
        for start, stop in ranges:
            assert torch.equal(reader.read("weight/w", start, stop), tensor[start:stop])
        for start, stop in ((-1, 3), (0, numel + 1), (4, 3)):
            with pytest.raises(InputError, match="elements"):
                reader.read("weight/w", start, stop)
        with pytest.raises(CheckpointError, match="holds no"):
            reader.read("weight/v")
        with pytest.raises(InputError, match="float32"):
            reader.read_into("weight/w", 0, torch.empty(3))
        for start in (-1, numel - 2):
            with pytest.raises(InputError, match=f"asked for {start} to {start + 3} of"):
                reader.read_into("weight/w", start, torch.empty(3, dtype=tensor.dtype))
        with pytest.raises(InputError, match=r"contiguous tensor in host memory is needed, found cpu, strides \(2,\)"):
            reader.read_into("weight/w", 0, torch.empty(6, dtype=tensor.dtype)[::2])


def test_a_flipped_bit_is_found_by_whoever_reads_its_span_and_by_no_other(tmp_path: Path) -> None:
    index = save(tmp_path, {"weight/w": torch.zeros(SPAN_BYTES // 2 + 3)}, world_size=1)  # two spans and a short one
    (piece,) = index.tensors["weight/w"].pieces
    path = tmp_path / piece.file
    raw = bytearray(path.read_bytes())
    raw[piece.offset + SPAN_BYTES + 7] ^= 1
    path.write_bytes(raw)
    with open_checkpoint(tmp_path) as saved:
        assert not saved.read("weight/w", 0, SPAN_BYTES // 4).any()
        with pytest.raises(CheckpointCorrupt, match="checksum") as caught:
            saved.read("weight/w", SPAN_BYTES // 4, SPAN_BYTES // 4 + 1)
    assert (caught.value.path, caught.value.key) == (str(path), "weight/w")
    (problem,) = verify(tmp_path)
    assert str(problem) == str(caught.value)


def test_spans_come_in_any_order_and_once(tmp_path: Path) -> None:
    tensor = torch.arange(SPAN_BYTES * 5 // 8, dtype=torch.int16)  # a span and a quarter
    view = tensor.view(torch.uint8).numpy().data
    writer = SliceWriter(tmp_path / "a", [Slice("k", (tensor.numel(),), torch.int16, 0, tensor.numel())])
    spans = list(writer.spans("k"))
    assert spans == [(0, SPAN_BYTES), (1, SPAN_BYTES // 4)]
    for number, nbytes in reversed(spans):
        with pytest.raises(StateError, match="bytes"):
            writer.write_span("k", number, bytes(nbytes - 1))
        writer.write_span("k", number, view[number * SPAN_BYTES : number * SPAN_BYTES + nbytes])
        with pytest.raises(StateError, match="once"):
            writer.write_span("k", number, bytes(nbytes))
        if number == 1:
            with pytest.raises(StateError, match="1 spans of k were never written"):
                writer.finish()
            assert list(writer.spans("k")) == [(0, SPAN_BYTES)]
    assert writer.finish().nbytes == (tmp_path / "a").stat().st_size == writer.nbytes
    other = SliceWriter(tmp_path / "b", [Slice("k", (4,), torch.int16, 0, 4)])
    with pytest.raises(StateError, match="expected 4 elements"):
        other.write_tensor("k", torch.zeros(4))
    other.abandon()
    assert not (tmp_path / "b").exists()


def test_slices_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="complex128"):
        Slice("k", (4,), torch.complex128, 0, 4)
    with pytest.raises(InputError, match="elements 2 to 6 of 4"):
        Slice("k", (4,), torch.int8, 2, 4)
    with pytest.raises(InputError, match="blocks of 0 elements"):
        SavedTensor("int8", (2,), None, 0, ())
    assert SavedTensor("int8", (2,), None, 1, ()).uncovered() == "pieces end at element 0, the tensor has 2"
    with pytest.raises(InputError, match="twice"):
        SliceWriter(tmp_path / "a", [Slice("k", (4,), torch.int8, 0, 2), Slice("k", (4,), torch.int8, 2, 2)])
    assert list(tmp_path.iterdir()) == []


def test_what_a_header_cannot_hold_is_refused_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elixir.checkpoint_format import slices

    monkeypatch.setattr(slices, "LARGEST_HEADER_BYTES", 10_000)
    with pytest.raises(InputError, match="shorten them"):
        SliceWriter(tmp_path / "a", [Slice("k" * 6000, (4,), torch.int8, 0, 4)])
    assert list(tmp_path.iterdir()) == []
    fits = slices.slice_header([Slice("k", (4,), torch.int8, 0, 4)])
    monkeypatch.setattr(slices, "LARGEST_HEADER_BYTES", len(fits) - 8)
    assert slices.slice_header([Slice("k", (4,), torch.int8, 0, 4)]) == fits


def test_ranks_that_do_not_agree_are_found(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape("'a': int8 [4] and int8 [5]")):
        merge_tensors(
            SliceWriter(tmp_path / str(size), [Slice("a", (size,), torch.int8, 0, 0)]).finish().tensors
            for size in (4, 5)
        )


# --- other readers ---------------------------------------------------------------------------------------------------


def test_torchs_own_reader_reads_and_reshards_the_files(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    tensors = {"weight/a": torch.randn(31, 7), "exp_avg/a": torch.randn(31, 7).bfloat16(), "weight/b": torch.randn(5)}
    save(tmp_path, tensors, world_size=3)
    flat = {key: torch.zeros(tensor.numel(), dtype=tensor.dtype) for key, tensor in tensors.items()}
    dcp.load(flat, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for key, tensor in tensors.items():
        assert torch.equal(flat[key], tensor.view(-1))


def test_safetensors_reads_every_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = every_dtype()
    index = save(tmp_path, tensors, world_size=2)
    parts: dict[str, bytes] = {}
    for name in sorted(index.files):
        for key, part in load_file(tmp_path / name).items():
            parts[key] = parts.get(key, b"") + bits(part)
    assert parts == {key: bits(tensor) for key, tensor in tensors.items() if tensor.numel()}


# --- moments in 8 bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("numel", "world_size"), [(1000, 1), (5 * 256, 3), (2000, 2), (100, 1)])
def test_moments_in_8_bits_come_back_as_codes_and_as_values(tmp_path: Path, numel: int, world_size: int) -> None:
    torch.manual_seed(0)
    moments = make_moments(numel, "8bit")
    write_moments(moments, 0, torch.randn(numel), torch.rand(numel))
    assert moments.exp_avg_scale is not None
    assert moments.exp_avg_sq_scale is not None
    tensors = {
        "exp_avg/w": moments.exp_avg[:numel],
        "exp_avg_scale/w": moments.exp_avg_scale,
        "exp_avg_sq/w": moments.exp_avg_sq[:numel],
        "exp_avg_sq_scale/w": moments.exp_avg_sq_scale,
        "weight/w": torch.zeros(numel),
    }
    options: dict[str, Any] = {"blocks": {"exp_avg/w": 256, "exp_avg_sq/w": 256}, "world_size": world_size}
    if world_size > 1:
        with pytest.raises(ElixirError, match="inside of a block"):
            save(tmp_path, tensors, **options, cut_to=128)
    options["cut_to"] = 256
    save(tmp_path, tensors, moments="8bit", param_groups=(group(["w"], lr=0.1),), steps={"w": 3}, **options)
    avg, square = read_moments(moments, numel, 0)
    with open_checkpoint(tmp_path) as saved:
        for key, expected in (("exp_avg/w", avg), ("exp_avg_sq/w", square)):
            assert torch.equal(saved.read(key), tensors[key])
            for start, stop in ((0, numel), (numel // 3, numel // 2), (numel - 1, numel), (4, 4)):
                assert torch.equal(saved.read_float32(key, start, stop), expected[start:stop])
        state = saved.optimizer_state_dict()["state"]
    assert set(state) == {0}
    assert set(state[0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert torch.equal(state[0]["exp_avg_sq"], square)
    assert state[0]["step"] == 3


def test_codes_without_their_scales_are_refused(tmp_path: Path) -> None:
    codes = {"exp_avg/w": torch.zeros(300, dtype=torch.int8)}
    blocks = {"exp_avg/w": 256}
    for scales in ({}, {"exp_avg_scale/w": torch.zeros(1)}, {"exp_avg_scale/w": torch.zeros(2).half()}):
        with pytest.raises(ElixirError, match="expected 2 scales in float32"):
            save(tmp_path, codes | scales, blocks=blocks, world_size=1)
    with pytest.raises(ElixirError, match="int8 or uint8"):
        save(tmp_path, {"exp_avg/w": torch.zeros(3), "exp_avg_scale/w": torch.zeros(1)}, blocks=blocks, world_size=1)


def test_codes_of_a_state_whose_scale_is_unknown_are_refused(tmp_path: Path) -> None:
    codes = {"momentum/w": torch.zeros(300, dtype=torch.int8), "momentum_scale/w": torch.zeros(2)}
    save(tmp_path, codes, blocks={"momentum/w": 256}, world_size=1)
    with open_checkpoint(tmp_path) as saved, pytest.raises(CheckpointError, match="codes of momentum are unknown"):
        saved.read_float32("momentum/w")


# --- without ranks or a model ----------------------------------------------------------------------------------------


def test_an_optimizer_comes_back_in_torchs_own_layout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    parameters = dict(model.named_parameters())
    groups = [["1.weight", "0.bias"], ["0.weight", "1.bias"]]

    def optimizer_of() -> torch.optim.Optimizer:
        kinds = [
            {"params": [parameters[name] for name in names], "lr": 0.1 / (i + 1)} for i, names in enumerate(groups)
        ]
        return torch.optim.AdamW(kinds)

    optimizer = optimizer_of()
    (model[0](torch.randn(5, 4)).sum() + parameters["1.weight"].sum()).backward()  # 1.bias has no states
    optimizer.step()
    expected = optimizer.state_dict()
    tensors, steps = {}, {}
    for name, parameter in parameters.items():
        tensors[f"weight/{name}"] = parameter
        if state := optimizer.state.get(parameter):
            tensors |= {f"{key}/{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
            steps[name] = int(state["step"])
    names_and_options = [
        group(names, **{key: value for key, value in options.items() if key != "params"})
        for names, options in zip(groups, expected["param_groups"], strict=True)
    ]
    save(tmp_path, tensors, param_groups=tuple(names_and_options), steps=steps, values={"w": torch.ones(2)})
    with open_checkpoint(tmp_path) as saved:
        found = saved.optimizer_state_dict()
        with pytest.raises(InputError, match="unknown optimizer"):
            saved.optimizer_state_dict("other")
    assert same(found["param_groups"], expected["param_groups"]) or found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert found["state"][number].keys() == state.keys()
        assert all(torch.equal(found["state"][number][key], value) for key, value in state.items())
    optimizer_of().load_state_dict(found)


def test_numbers_of_a_state_have_the_dtypes_that_they_were_saved_in(tmp_path: Path) -> None:
    """Counts of a class are often whole numbers, in which nothing is trained."""
    numbers = {"count": ("int64", 3), "done": ("bool", True), "mean": ("float64", 0.5), "last": 7}
    scalars = {"w": encode(numbers, "w")[0]}
    save(tmp_path, {"weight/w": torch.ones(3)}, param_groups=(group(["w"]),), scalars=scalars)
    with open_checkpoint(tmp_path) as saved:
        (state,) = saved.optimizer_state_dict()["state"].values()
    expected = {"count": torch.tensor(3), "done": torch.tensor(True), "mean": torch.tensor(0.5, dtype=torch.float64)}
    assert same(state, expected | {"last": 7})


def test_states_in_bfloat16_are_given_as_float32_and_wider_ones_as_they_are(tmp_path: Path) -> None:
    tensors = {
        "weight/w": torch.ones(3),
        "exp_avg/w": torch.randn(3).bfloat16(),
        "sum/w": torch.randn(3).double(),
        "mu_product/w": torch.tensor(0.5),
    }
    save(tmp_path, tensors, param_groups=(group(["w"], optimizer="o"), group([], optimizer="p")))
    with open_checkpoint(tmp_path) as saved:
        with pytest.raises(InputError, match="2 optimizers"):
            saved.optimizer_state_dict()
        (state,) = saved.optimizer_state_dict("o")["state"].values()
    assert {key: value.dtype for key, value in state.items()} == {
        "exp_avg": torch.float32, "sum": torch.float64, "mu_product": torch.float32,
    }  # fmt: skip
    assert torch.equal(state["exp_avg"], tensors["exp_avg/w"].float())
    assert state["mu_product"].shape == ()


def test_weights_are_a_state_dict_of_the_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model[2].weight = model[0].weight
    tensors: dict[str, torch.Tensor] = {f"weight/{name}": tensor for name, tensor in model.named_parameters()}
    tensors |= {f"buffer/{name}": tensor for name, tensor in model.named_buffers()}
    save(tmp_path, tensors | {"exp_avg/0.weight": torch.zeros(16)}, aliases={"2.weight": "0.weight"})
    with open_checkpoint(tmp_path) as saved:
        weights, rounded = saved.weights(), saved.weights("bf16")
        assert set(weights) == set(model.state_dict())
        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
        assert rounded["2.weight"].dtype == torch.bfloat16
        assert rounded["1.num_batches_tracked"].dtype == torch.int64
        model.load_state_dict(weights)
        with pytest.raises(InputError, match="dtype"):
            saved.weights("int3")


def test_the_latest_is_what_was_saved_last_whatever_its_step(tmp_path: Path) -> None:
    """A run resumed from step 500 while 1000 lies there."""
    assert find_checkpoints(tmp_path / "absent") == ((), ())
    for step in (500, 1000, 600):
        save(tmp_path / f"step-{step:08}", {"weight/w": torch.ones(1)}, step=step)
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").touch()
    damaged = tmp_path / "step-00001100"
    damaged.mkdir()
    (damaged / "index.json").write_text("{}")
    found, errors = find_checkpoints(tmp_path)
    indexes = [read_index(each) for each in found]
    assert [(each.step, each.sequence) for each in indexes] == [(600, 3), (1000, 2), (500, 1)]
    assert [error.path for error in errors if isinstance(error, CheckpointCorrupt)] == [str(damaged / "index.json")]
    assert next_sequence(tmp_path / "step-00000700") == 4
    save(tmp_path / "step-00000500", {"weight/w": torch.ones(1)}, step=500)
    assert read_index(find_checkpoints(tmp_path)[0][0]).step == 500


def test_a_removed_checkpoint_is_gone_index_first_and_foreign_files_stay(tmp_path: Path) -> None:
    for foreign in (False, True):
        folder = tmp_path / str(foreign)
        save(folder, {"weight/w": torch.ones(1)})
        if foreign:
            (folder / "config.json").write_text("{}")
            (folder / "model.safetensors").touch()
        files = RecordingFiles()
        remove_checkpoint(folder, files=files)
        removed = [each.path for each in files.log if each.name == "remove"]
        assert removed[0].endswith("index.json")
        assert files.log[1].name == "sync_folder"
        assert len(removed) == 4 - foreign  # the index, two files, the folder
        assert folder.exists() == foreign
    assert sorted(entry.name for entry in folder.iterdir()) == ["config.json", "model.safetensors"]


# --- the index -------------------------------------------------------------------------------------------------------


def test_nothing_in_the_package_can_run_what_it_reads() -> None:
    """No pickle, by whatever name, and no evaluation."""
    for path in Path(checkpoint_format.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = re.findall(
            r"pickle|torch\.load|torch\.save|\beval\(|\bexec\(|marshal|shelve|dill|yaml|allow_|import_module", text
        )
        assert found in ([], ["allow_"]), (path.name, found)  # json's allow_nan


def test_small_and_large_reads_of_several_files_are_done_by_any_number_of_threads(tmp_path: Path) -> None:
    """More files than are kept open; a damaged one is told of, and what comes after an error is right again."""
    tensors = {f"weight/{i}": torch.randn(60_000 if i % 3 else 7) for i in range(2 * OPEN_FILES)}
    tensors["weight/large"] = torch.randn(3 * SPAN_BYTES // 4 + 11)
    index = save(tmp_path, tensors, world_size=2 * OPEN_FILES + 1)
    with SliceReader(tmp_path) as reader:
        for _ in range(2):
            out = {key: torch.empty(each.numel()) for key, each in tensors.items()}
            for key, each in out.items():
                reader.begin_to_read(key, 0, each)
            reader.finish()
            assert all(torch.equal(out[key], each) for key, each in tensors.items())
        piece = index.tensors["weight/3"].pieces[0]
        raw = bytearray((tmp_path / piece.file).read_bytes())
        raw[piece.offset] ^= 1
        (tmp_path / piece.file).write_bytes(raw)
        for key, each in out.items():
            reader.begin_to_read(key, 0, each)
        with pytest.raises(CheckpointCorrupt, match="checksum") as caught:
            reader.finish()
        assert caught.value.key == "weight/3"
        assert torch.equal(reader.read("weight/large"), tensors["weight/large"])


# --- memory ----------------------------------------------------------------------------------------------------------


def test_a_large_file_is_flushed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dirty pages count as memory of a container."""
    from elixir.checkpoint_format import slices

    monkeypatch.setattr(slices, "FLUSH_EVERY_BYTES", 2 * SPAN_BYTES)
    files = RecordingFiles()
    writer = SliceWriter(tmp_path / "a", [Slice("k", (6 * SPAN_BYTES,), torch.int8, 0, 6 * SPAN_BYTES)], files=files)
    writer.write_tensor("k", torch.zeros(6 * SPAN_BYTES, dtype=torch.int8))
    writer.finish()
    written = 0
    for operation in files.log:
        written = 0 if operation.name == "sync" else written + len(operation.data)
        assert written < 3 * SPAN_BYTES
    assert [each.name for each in files.log].count("sync") == 4
