"""Frozen weights that stay in their files: the bits of plain PyTorch, bytes as planned, and refusals by name."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import elixir
from elixir.errors import FileError, InputError, StepError
from elixir.models.step import default_input
from elixir.plan.plan import Plan
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.assemble.frozen_weights import weight_records
from tests.common import inside
from tests.common.in_files import HARDWARE, frozen_model, on_meta, plan_in_files, same, save_frozen
from tests.common.on_disk import BrokenDisk
from tests.common.parity import hf_loss, report_of, take_step


class Pair:
    """A model under a plan, its frozen weights in files, and the same model in plain PyTorch."""

    def __init__(self, folder: Path, every: int = 1, plan: Plan | None = None, **wrap: Any) -> None:
        self.plain = frozen_model()
        self.folder = save_frozen(self.plain, folder)
        model = copy.deepcopy(self.plain)
        self.inp = default_input(model, batch=2, seq=16)
        self.plan = plan_in_files(model, self.inp, every=every) if plan is None else plan
        options = {"device": "cpu", "weights": folder, "strict": False, "debug": Debug(poison=True)} | wrap
        self.module = ElixirModule(on_meta(model), self.plan, **options)
        self.optimizer = ElixirOptimizer(self.module, adamw(model))
        self.plain_optimizer = adamw(self.plain)

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            loss, plain = hf_loss(self.module, self.inp), hf_loss(self.plain, self.inp)
            assert loss.item() == plain.item()
            self.optimizer.backward(loss)
            plain.backward()
            self.optimizer.step()
            self.plain_optimizer.step()
            self.optimizer.zero_grad()
            self.plain_optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.module, "optimizer": self.optimizer}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


@pytest.mark.parametrize("every", [1, 2], ids=["streamed", "mixed"])
def test_bits_bytes_and_resume(tmp_path: Path, every: int) -> None:
    (tmp_path / "weights").mkdir()
    pair = Pair(tmp_path / "weights", every)
    pair.train()
    report = report_of(pair.module)
    assert report.observed["disk_read"] == report.predicted["disk_read"] > 0
    assert not report.surprises()
    assert report.demand_loads == 0
    frozen = sum(each.nbytes for each in pair.plain.parameters() if not each.requires_grad)
    assert report.observed["host_peak"] <= report.predicted["host_peak"] < frozen / 2
    shards = [chunk for chunk in inside.chunks(pair.module) if chunk.plan.weight_home == "files"]
    assert len(shards) > 2
    assert all(chunk.shard is None for chunk in shards)

    elixir.save_checkpoint(tmp_path / "saved", pair.state(), wait=True)
    saved = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*"))
    assert saved < frozen or every > 1, "what stays in its files is not saved"
    other = Pair(tmp_path / "weights", 3 - every)  # with other homes
    elixir.load_checkpoint(tmp_path / "saved", other.state())
    other.plain, other.plain_optimizer = pair.plain, pair.plain_optimizer
    other.train()
    assert same(other.module.state_dict(), pair.plain.state_dict())
    model = other.module.module
    other.module.close()
    assert same(model.state_dict(), pair.plain.state_dict())


def test_moves_between_files_and_memory(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    mixed = plan_in_files(pair.plain, pair.inp, every=2)
    for plan in (mixed, plan_in_files(pair.plain, pair.inp, frozen_weights="host"), pair.plan):
        pair.train(1)
        pair.module.rehome(plan)
    pair.train(1)
    assert same(pair.module.state_dict(), pair.plain.state_dict())


def _removed(file: Path) -> None:
    file.unlink()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])


def _other_values(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-4096:] = bytes(4096)
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "text"),
    [(_removed, "part-1.safetensors is not among"), (_cut, "part-1.*no whole"), (_other_values, "part-1.*has changed")],
)
def test_a_file_that_is_missing_or_changed_is_named(tmp_path: Path, change: Callable[[Path], None], text: str) -> None:
    model = frozen_model()
    save_frozen(model, tmp_path)
    plan = plan_in_files(model, default_input(model, batch=2, seq=16))
    plan = Plan.from_json(replace(plan, weight_files=weight_records(tmp_path)).to_json())
    change(tmp_path / "part-1.safetensors")
    with pytest.raises(InputError, match=text):
        ElixirModule(model, plan, device="cpu", weights=tmp_path, strict=False)
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_file_that_was_replaced_is_not_mapped(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.train(1)
    for part in ("part-0.safetensors", "part-1.safetensors"):
        (tmp_path / part).rename(tmp_path / "old")
        (tmp_path / part).write_bytes((tmp_path / "old").read_bytes())
    pair.train(1)  # the files that were opened are still there
    with pytest.raises(FileError, match="another file took its place"):
        pair.module.state_dict()
    model = pair.module.module
    pair.module.close()  # nothing maps the other files' values
    assert all(parameter.is_meta != parameter.requires_grad for parameter in model.parameters())


def test_what_cannot_stay_in_files_is_refused_by_name(tmp_path: Path) -> None:
    model = frozen_model()
    inp = default_input(model, batch=2, seq=16)
    plan = plan_in_files(model, inp)
    name = "model.decoder.layers.1.fc1.weight"
    values = {key: each for key, each in model.named_parameters() if not each.requires_grad}

    def refused(**weights: Any) -> str:
        if not weights:
            save_file({key: each.detach() for key, each in values.items()}, tmp_path / "all.safetensors")
        with pytest.raises(InputError) as caught:
            ElixirModule(model, plan, device="cpu", strict=False, **(weights or {"weights": tmp_path}))
        return str(caught.value)

    assert "weights=; found nothing" in refused(weights=None)
    assert "found a state dict" in refused(weights=model.state_dict())
    whole = values[name]
    values[name] = whole.bfloat16()
    assert f"{name} is of bfloat16 in its file and of float32 in the run" in refused()
    del values[name]
    assert f"no values of {name} in the files" in refused()
    values[name] = whole[:-1]
    assert f"{name} must have shape" in refused()
    values[name] = whole.detach().clone()
    whole.data = whole.data.t().contiguous().t()
    assert f"{name} lies in memory in another order than in its file (strides [1, " in refused()
    with pytest.raises(InputError, match="does not say how fast its disk is"):
        plan_in_files(model, inp, hardware="cpu")
    with pytest.raises(InputError, match="frozen_weights must be one of"):
        plan_in_files(model, inp, frozen_weights="disk")


def test_weights_do_not_move_to_files_that_were_not_given() -> None:
    model = frozen_model()
    inp = default_input(model, batch=2, seq=16)
    plan = plan_in_files(model, inp)
    module = ElixirModule(model, plan_in_files(model, inp, frozen_weights="host"), device="cpu")
    with pytest.raises(InputError, match=r"leaves .* in its files, which the model was not wrapped with; wrap it with"):
        module.rehome(plan)
    hf_loss(module, inp).backward()


def test_writes_that_files_would_lose_are_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    state = pair.module.state_dict()
    pair.module.load_state_dict(state)  # the same values
    name = "model.decoder.layers.1.fc1.weight"
    with pytest.raises(InputError, match=f"{name} lives in .*safetensors"):
        pair.module.module.load_state_dict(state | {name: state[name] + 1})
    weight = pair.module.module.get_parameter(name)
    with pytest.raises(InputError, match=f"{name} lives in"), pair.module.gathered(weight, write=True):
        weight.data.zero_()
    pair.train(1)


def test_a_failing_or_changing_file_is_named_in_the_step(tmp_path: Path) -> None:
    disk = BrokenDisk(errno.EIO, ("read",))
    pair = Pair(tmp_path, debug=Debug(files=disk))
    pair.train(1)
    disk.break_it()
    with pytest.raises(FileError, match=r"cannot read .*part-\d.safetensors"):
        pair.train(1)
    disk.broken = False
    with pytest.raises(StepError, match=r"training has ended.*cannot read .*part-\d.safetensors"):
        pair.train(1)
    pair.module.close()
    pair = Pair(tmp_path)
    pair.train(1)
    _other_values(tmp_path / "part-0.safetensors")
    with pytest.raises(FileError, match="part-0.safetensors: the file has changed since the run began"):
        pair.train(1)


def test_wrap_remembers_the_files(tmp_path: Path) -> None:
    model = frozen_model()
    folder = save_frozen(model, tmp_path)
    inp = default_input(model, batch=2, seq=16)
    small = {"device_memory": "1MiB", "host_budget": "2MiB", "placement": "cpu", "hardware": HARDWARE}
    common: dict[str, Any] = {"weights": folder, "strict": False}
    module, optimizer = elixir.wrap(model, adamw(model), inp=inp, frozen_weights="files", **small, **common)
    for _ in range(7):  # the plan is compared with the first steps
        take_step(optimizer, hf_loss(module, inp))
    plan = module.plan
    assert plan.reads_files
    assert [file.name for file in plan.weight_files] == ["part-0.safetensors", "part-1.safetensors"]
    module.close()
    again, _ = elixir.wrap(model, adamw(model), plan=plan, **common)
    again.close()
    _other_values(folder / "part-0.safetensors")
    with pytest.raises(InputError, match="part-0.safetensors has changed"):
        elixir.wrap(model, adamw(model), plan=plan, **common)
