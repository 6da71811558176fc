"""Values that few programs have: outputs without numbers, options that are tensors, states that are None."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elixir.chunk.lanes import Emulation
from elixir.errors import InputError
from elixir.optimizer_states import DIRECTION_BYTES
from elixir.search import optimal_search, simple_search
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.assemble.chunks import compute_device
from tests.common.failing import Fault, net, plan_of, rehoming_for_good
from tests.common.parity import Case, make_plan
from tests.common.rank_threads import on_ranks
from tests.unit.wrapper.step.test_muon import optimizers as with_muon
from tests.unit.wrapper.test_one_pass_traps import Layer


def test_a_device_is_the_one_that_was_named_or_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for given, found in ((None, 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)):
        assert compute_device(given) == torch.device("cuda", found)
    assert compute_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match="'cuda:2' was asked for, but there are 2, from 'cuda:0' on"):
        compute_device("cuda:2")


def linear() -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Case(nn.Linear(8, 8), {"input": torch.ones(2, 8)}, lambda model, inp: model(**inp).square().mean())


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_zeros_before_the_first_step_are_no_states(mode: str) -> None:
    it = linear()
    module = ElixirModule(it.model, make_plan(it, mode), device="cpu", use_fused_kernels=True)
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()), init_step=True)
    assert optimizer.state_dict()["state"] == {}
    assert len(optimizer.state) == 0
    optimizer.backward(it.loss(module, it.inp))
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {1.0}


def test_matrices_of_the_host_cross_an_emulated_link_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    it, speed = linear(), 1e9
    plan = make_plan(it, "streamed", optimizer_type="Muon")
    module = ElixirModule(it.model, plan, device="cpu", debug=Debug(emulation=Emulation(bytes_per_s=speed)))
    optimizers = [ElixirOptimizer(module, each) for each in with_muon(it.model, plan.matrices)]
    it.loss(module, it.inp).backward()
    module.settle()
    slept.clear()
    for each in optimizers:
        each.step()
    module.settle()
    assert plan.matrices == ("weight",)
    assert slept.count(2 * 8 * 8 * DIRECTION_BYTES / speed) == 1, slept


def test_a_model_that_can_move_neither_way_is_given_back(tmp_path: Path) -> None:
    rehoming_for_good(tmp_path, 0, 1, "zeros", ("disk", "memory"))


def test_ranks_with_different_options_step_nothing() -> None:
    def work(rank: int) -> list[str]:
        it = linear()
        plan = simple_search(it.model, 2, inp=it.inp, step_fn=lambda m, inp: it.loss(m, inp).backward()).plan
        module = ElixirModule(it.model, plan, device="cpu")
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=0.1))
        said = []
        for lr in (0.1 + rank * 1e-12, 0.1 + rank * 1e-6):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.backward(it.loss(module, it.inp))
            before = module.state_dict()
            try:
                optimizer.step()
            except InputError as error:
                said.append(str(error))
            said.append(str(all(torch.equal(each, before[name]) for name, each in module.state_dict().items())))
            module.zero_grad()
        module.close()
        return said

    for found in on_ranks(2, work):
        stepped, message, same = found
        assert (stepped, same) == ("False", "True")
        assert "lr of group 0 is 0.1 on rank 0, 0.100001 on rank 1; nothing was stepped" in message, message


def test_a_model_that_only_runs_forward_is_frozen_meanwhile() -> None:
    model = linear().model
    step = {"inp": {"input": torch.ones(2, 8)}, "step_fn": lambda m, inp: m(**inp), "hardware": "cpu"}
    module = ElixirModule(model, optimal_search(model, 1, optimizer_type=None, **step), device="cpu")  # type: ignore[arg-type]
    assert not any(each.requires_grad for each in model.parameters())
    assert module(torch.ones(2, 8)).grad_fn is None
    module.close()
    assert all(each.requires_grad for each in model.parameters())


def test_masters_that_cannot_be_read_are_given_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, fault = net(), Fault("read")
    files = Debug(files=fault)
    module = ElixirModule(model, plan_of(1, "disk", "bfloat16"), device="cpu", disk_folder=tmp_path, debug=files)
    before = module.state_dict()
    with fault.armed(1, forever=True), caplog.at_level(logging.ERROR):
        after = module.state_dict()
    assert "weights are given as they are in memory, in bfloat16" in caplog.text
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert changed
    assert all(torch.equal(before[name].bfloat16().float(), after[name]) for name in changed)


class Sparse(nn.Module):
    """Has a buffer that is no part of a message."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("table", torch.eye(8).mul_(scale).to_sparse())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(input)
        return found


def test_ranks_exchange_buffers_that_are_sparse() -> None:
    def work(rank: int) -> torch.Tensor:
        model, inp = Sparse(3.0), {"input": torch.ones(2, 8)}
        plan = simple_search(model, 2, inp=inp, step_fn=lambda m, inp: m(**inp).sum().backward()).plan
        module = ElixirModule(model, plan, device="cpu")
        model.table = Sparse(5.0 + rank).table
        module(**inp)
        table: torch.Tensor = model.table
        module.close()
        return table.to_dense()

    for found in on_ranks(2, work):
        assert isinstance(found, torch.Tensor), found
        assert torch.equal(found, 5.0 * torch.eye(8))


def made_mkldnn(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = tensor.to_mkldnn()
    return made


@pytest.mark.parametrize("how", [made_mkldnn, torch.Tensor.to_sparse_csr])
def test_buffers_of_other_layouts_are_taken_or_refused_by_name(how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, inp = Sparse(3.0), {"input": torch.ones(2, 8)}
    table = how(torch.eye(8))
    model.register_buffer("table", table)
    refused = pytest.raises(InputError, match=r"table is a torch.sparse_csr buffer.*to_sparse\(\)")
    with nullcontext() if how is made_mkldnn else refused:
        plan = simple_search(model, 1, inp=inp, step_fn=lambda m, inp: m(**inp).sum().backward()).plan
        module = ElixirModule(model, plan, device="cpu")
        module(**inp)
        assert model.table is table
        module.close()


class Casting(Layer):
    """Counts its calls, and the casts of its weight that they make."""

    calls = casts = 0

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        with Casts(self):
            return super().forward(x, *more)


class Casts(TorchDispatchMode):
    def __init__(self, layer: Casting) -> None:
        super().__init__()
        self._layer = layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._layer.casts += func is torch.ops.aten._to_copy.default and args[0].shape == (8, 8)
        return func(*args, **(kwargs or {}))
