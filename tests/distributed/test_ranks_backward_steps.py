"""Steps that begin during backward on several ranks: the bits are those without, whatever a rank's data uses."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elixir.chunk.lanes import Emulation
from elixir.errors import InputError
from elixir.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common.ddp import LossFn, batch_of, plan_for
from tests.common.debug import debugged
from tests.common.early import HOMES, begun, planned, rehomed, without
from tests.common.parity import hf_loss
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny

WIDTH = 16


def early_plan(model: nn.Module, inp: dict[str, Any], homes: str, *, loss: LossFn, **options: Any) -> Plan:
    """A plan of rank 0 for all ranks that steps in backward."""
    return rehomed(plan_for(model, inp, "host", loss=loss, step_in_backward=True, **options), homes)


class Run:
    """A copy of a model under a plan."""

    def __init__(self, model: nn.Module, plan: Plan, loss: LossFn, **options: Any) -> None:
        self.loss = loss
        self.module = ElixirModule(copy.deepcopy(model), plan, device="cpu", **debugged(options, poison=True))
        self.optimizer = ElixirOptimizer(self.module, torch.optim.AdamW(self.module.parameters(), lr=1e-3))

    def backward(self, inp: dict[str, Any]) -> list[int]:
        """Forward and backward; chunks whose step has begun."""
        self.optimizer.backward(self.loss(self.module, inp))
        return begun(self.module)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def both(model: nn.Module, plan: Plan, loss: LossFn, **options: Any) -> tuple[Run, Run]:
    """With steps in backward, and without."""
    return Run(model, plan, loss, **options), Run(model, without(plan), loss, **options)


def assert_same(runs: tuple[Run, Run]) -> None:
    mine, plain = (run.module.state_dict() for run in runs)
    assert not [name for name in plain if not torch.equal(mine[name], plain[name])]
    reports = [run.module.last_report for run in runs]
    assert reports[0] is not None
    assert reports[1] is not None
    assert reports[0].observed == reports[1].observed
    assert reports[0].refreshed_bytes == reports[1].refreshed_bytes
    for run in runs:
        run.module.close()


def _parity(rank: int, world_size: int, family: str, homes: str, form: str, options: dict[str, Any]) -> None:
    if "emulation" in options:
        options = {"emulation": Emulation(delay_s=1e-3, seed=rank)}
    model = tiny(family, checkpoint=form)
    inp = batch_of(model, rank, world_size)
    plan = early_plan(model, inp, homes, loss=hf_loss)
    runs = both(model, plan, hf_loss, **options)
    for _ in range(3):
        assert runs[0].backward(inp) == planned(plan) != []
        assert not runs[1].backward(inp)
        for run in runs:
            run.step()
    assert_same(runs)


@pytest.mark.parametrize("homes", HOMES)
def test_same_bits_as_without(homes: str) -> None:
    run_ranks(2, _parity, "gpt2", homes, "none", {})


@pytest.mark.parametrize("options", [{"evict_always": True}, {"prefetch": False}, {"emulation": None}])
def test_same_bits_under_other_conditions(options: dict[str, Any]) -> None:
    run_ranks(2, _parity, "opt", "streamed", "non-reentrant", options)


@pytest.mark.slow
@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("form", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
def test_same_bits_of_other_families(family: str, form: str, homes: str) -> None:
    run_ranks(2, _parity, family, homes, form, {})


# --- data that differs
# ---------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer in front, experts that run only if the batch says so, and a layer after them."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x).tanh()
        x = x + sum(expert(x).tanh() for index, expert in enumerate(self.experts) if index in chosen)  # type: ignore[arg-type]
        return self.last(x)  # type: ignore[no-any-return]


def _square(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = model(**inp).square().mean()
    return result


_CHOICES = (  # per step and rank
    ((0, 1, 2, 3), (0, 1, 2, 3)),
    ((0, 1), (2, 3)),
    ((), (1,)),
    ((3,), (3,)),
    ((0, 1, 2, 3), ()),
)


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))


def _routing(rank: int, world_size: int, homes: str) -> None:
    x = _batch(rank)
    model = Experts()
    inp: dict[str, Any] = {"x": x, "chosen": (0, 1, 2, 3)}
    plan = early_plan(model, inp, homes, loss=_square, split_number=6)
    runs = both(model, plan, _square, emulation=Emulation(delay_s=1e-3, seed=rank))
    seen: set[tuple[int, ...]] = set()
    for choices in _CHOICES * 2:
        inp = {"x": x, "chosen": choices[rank]}
        mine = runs[0].backward(inp)
        runs[1].backward(inp)
        answers: list[Any] = [None] * world_size
        dist.all_gather_object(answers, mine)
        seen.add(tuple(map(len, answers)))
        for run in runs:
            run.step()
    assert any(one != other for one, other in seen)  # some have begun on one rank only
    assert_same(runs)


@pytest.mark.parametrize("homes", HOMES)
def test_experts_without_tokens_step_on_one_rank_in_backward_and_behind_it_on_another(homes: str) -> None:
    run_ranks(2, _routing, homes)


def _added_up(rank: int, world_size: int, homes: str) -> None:
    x = _batch(rank)
    model = Experts()
    inp: dict[str, Any] = {"x": x, "chosen": (0, 1, 2, 3)}
    plan = early_plan(model, inp, homes, loss=_square, split_number=6)
    runs = both(model, plan, _square)
    for choices in _CHOICES:
        for run in runs:
            with run.module.no_sync():
                assert not run.backward({"x": x, "chosen": choices[rank]})
            assert bool(run.backward(inp)) == (run is runs[0])
            run.step()
    assert_same(runs)


@pytest.mark.parametrize("homes", HOMES)
def test_batches_that_a_rank_keeps_to_itself(homes: str) -> None:
    run_ranks(2, _added_up, homes)


# --- gradients that come late
# ----------------------------------------------------------------------------------------------


class Late(nn.Module):
    """A chain whose last bias is used in front, too, if told so: its gradient then comes at the end of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        last: Any = self.layers[-1]
        x = x + last.bias if again else x
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _late_plan(model: nn.Module, inp: dict[str, Any]) -> Plan:
    """The last layer is resident, with its states on the host: its use in front needs no gather, so a rank may be alone
    with it. All others are streamed, so that the place of its reduction comes before others are fetched."""
    plan = early_plan(model, inp, "streamed", loss=_square, split_number=6)
    resident = [any(slot.name == "layers.5.bias" for slot in chunk.parameters) for chunk in plan.chunks]
    changed = [
        replace(c, resident=True, weight_home="device") if r else c for c, r in zip(plan.chunks, resident, strict=True)
    ]
    assert all(chunk.steps_in_backward for chunk, r in zip(plan.chunks, resident, strict=True) if r)
    return replace(plan, chunks=tuple(changed))


def _late(rank: int, world_size: int, everywhere: bool) -> None:
    x = _batch(rank).requires_grad_()  # or the first weight would be read in backward by who is late alone
    model = Late()
    plan = _late_plan(model, {"x": x})
    runs = both(model, plan, _square)
    for run in runs:
        run.backward({"x": x})
        run.step()
    inp = {"x": x, "again": everywhere or rank == 1}
    mine = runs[0].backward(inp)
    runs[1].backward(inp)
    late = next(i for i, chunk in enumerate(plan.chunks) if any(s.name == "layers.5.bias" for s in chunk.parameters))
    assert (late in mine) == (not inp["again"])
    if not everywhere:  # one rank has stepped without what comes late to the other
        with pytest.raises(
            InputError, match=r"on some rank gradients came after the step of chunk.*step_in_backward=False"
        ):
            runs[0].optimizer.step()
        runs[0].optimizer.step()  # all ranks go on without it
        runs[1].step()
        state = runs[0].module.state_dict()
        answers: list[Any] = [None] * world_size
        dist.all_gather_object(answers, state)
        assert not [name for name in state if not torch.equal(answers[0][name], answers[1][name])]
        for run in runs:
            run.module.close()
        return
    for run in runs:
        run.step()
    assert_same(runs)


def test_a_gradient_that_comes_late_to_all_ranks_waits_for_step() -> None:
    run_ranks(2, _late, True)


def test_a_gradient_that_comes_late_to_one_rank_is_refused_on_all() -> None:
    run_ranks(2, _late, False)


def _clipped(rank: int, world_size: int) -> None:
    x = _batch(rank).requires_grad_()
    model = Late()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "layers.5.bias")
    plan = _late_plan(model, {"x": x})
    runs = both(model, plan, _square)
    for _ in range(2):
        for run in runs:
            assert not run.backward({"x": x, "again": True})
            run.optimizer.clip_grad_norm_(1e-4)
            assert not begun(run.module)
            run.step()
    assert_same(runs)


def test_a_chunk_that_comes_late_as_a_whole_is_clipped_before_it_steps() -> None:
    run_ranks(2, _clipped)


# --- failures
# --------------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    pass


def _fails(rank: int, world_size: int, homes: str) -> None:
    x = _batch(rank)
    model = Late()
    plan = early_plan(model, {"x": x}, homes, loss=_square, split_number=6)
    runs = both(model, plan, _square)

    def stop(gradient: torch.Tensor) -> None:
        raise _Stop

    for run in runs:
        layers: Any = run.module.module.layers  # type: ignore[union-attr]
        handle = layers[2].register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)
        loss = _square(run.module, {"x": x})
        handle.remove()
        with pytest.raises(_Stop):
            run.optimizer.backward(loss)
        assert bool(begun(run.module)) == (run is runs[0])
        run.step()  # finishes what began
    for _ in range(2):
        for run in runs:
            run.backward({"x": x})
            run.step()
    assert_same(runs)


@pytest.mark.parametrize("homes", ["streamed", "mixed"])
def test_a_backward_that_fails_on_all_ranks_is_finished_by_step(homes: str) -> None:
    run_ranks(2, _fails, homes)


# --- a graph that is kept
# ------------------------------------------------------------------------------------------------


def _kept(rank: int, world_size: int, homes: str, early: bool) -> None:
    # All in one chunk. Backward reads the last weight alone, and that lies on rank 1.
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    inp = {"input": _batch(rank)}
    plan = early_plan(model, inp, homes, loss=_square, split_number=1)
    run = Run(model, plan if early else without(plan), _square)
    loss = _square(run.module, inp)
    loss.backward(retain_graph=True)
    run.step()
    with pytest.raises(RuntimeError, match="at version"):
        loss.backward()
    dist.barrier()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("homes", ["streamed", "states"])
def test_a_graph_that_is_kept_is_not_run_again_over_other_weights(homes: str, early: bool) -> None:
    run_ranks(2, _kept, homes, early)
