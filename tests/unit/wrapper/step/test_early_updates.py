"""New states that are made while backward runs: kept or made again, no bit of what is trained changes."""

from __future__ import annotations

import contextlib
import math
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.lanes import Emulation
from elixir.kernels import HybridAdam
from elixir.kernels.adam import step as native
from elixir.kernels.adam.step import ONE_PASS
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.step.states import States
from tests.common import gpu, inside
from tests.common.debug import debugged
from tests.common.early import (
    HOMES,
    attempts,
    backward_watched,
    chain,
    needs_kernel,
    updating_early,
)
from tests.common.parity import Case, Pair, assert_as_planned, case
from tests.common.tiny_models import FAMILIES

_QUICK = {("gpt2", "mixed"), ("mixtral", "streamed")}
_EVERY = [
    pytest.param(family, homes, marks=() if (family, homes) in _QUICK else pytest.mark.slow)
    for family in FAMILIES
    for homes in HOMES
]
every_home = pytest.mark.parametrize("homes", HOMES)


def chain_plan(it: Case, homes: str = "streamed", **options: Any) -> Any:
    return updating_early(it, homes, split_number=len(it.model.layers), **options)  # type: ignore[arg-type]


def settled(pair: Pair) -> None:  # all new states are made, before the step
    for ticket in inside.updates(pair.module):
        ticket.synchronize()


def train(pair: Pair, norms: list[float | None], steps: int = 1) -> None:
    for norm in norms:
        for _ in range(steps):
            pair.max_norm = norm
            pair.optimizer.max_norm = norm
            pair.train(1)


@pytest.mark.parametrize(("family", "homes"), _EVERY)
def test_same_bits_as_plain_pytorch(family: str, homes: str) -> None:
    it = case(family, "non-reentrant")
    with Pair(it, updating_early(it, homes)) as pair:
        train(pair, [None, 1e9])
        for norm, kept in ((1e9, True), (1e-3, False), (1e9, True), (None, True)):
            pair.max_norm = pair.optimizer.max_norm = norm
            pair.backward()
            assert attempts(pair.module)
            pair.step()
            made = inside.early_counts(pair.module)
            assert made[0]
            assert made[1] == (made[0] if kept else 0)
            assert not attempts(pair.module)
        pair.assert_same_weights()
        assert_as_planned(pair.module, ())


@every_home
@pytest.mark.parametrize(
    "options",
    [
        {"evict_always": True},
        {"prefetch": False},
        {"emulation": Emulation(delay_s=1e-3, seed=1)},
        {"emulation": Emulation(blocking=True)},
    ],
)
def test_same_bits_under_other_conditions(homes: str, options: dict[str, Any]) -> None:
    it = chain()
    with Pair(it, chain_plan(it, homes), **options) as pair:
        train(pair, [1e9, 1e-3, 1e9, 0.5])


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 2 else pytest.mark.slow) for s in range(200)])
def test_norms_that_cross_the_limit_under_random_delays(seed: int) -> None:
    chance = random.Random(seed)
    it = chain()
    emulation = Emulation(delay_s=chance.choice([0, 3e-4, 2e-3]), seed=seed)
    with Pair(it, chain_plan(it, HOMES[seed % 3]), emulation=emulation) as pair:
        for _ in range(8):
            train(pair, [chance.choice([None, 1e9, 1e-3, 0.02, 0.05])])
            if chance.random() < 0.2:
                pair.assert_same_weights()


@every_home
def test_new_states_are_there_before_backward_is_over(homes: str) -> None:
    it = chain(5)
    with Pair(it, chain_plan(it, homes), max_norm=1e9) as pair:
        pair.train(1)
        last = max(inside.chunks(pair.module), key=lambda chunk: chunk.index if chunk.plan.home.early else -1)
        seen: list[bool] = []

        def look(gradient: torch.Tensor) -> None:
            for ticket in last.states.users:
                ticket.synchronize()
            seen.append(last.index in attempts(pair.module))

        backward_watched(pair, look)
        assert seen == [True]
        it.loss(pair.plain, pair.case.inp).backward()
        pair.step()


# --- what happens between backward and step -----------------------------------------------------------------------------


def _looks(pair: Pair) -> None:
    """Weights are those before the step."""
    pair.assert_same_weights()
    with pair.module.gathered():
        for mine, plain in zip(pair.module.module.parameters(), pair.plain.parameters(), strict=True):
            assert torch.equal(mine, plain)


def _evaluates(pair: Pair) -> None:
    with torch.no_grad():
        mine = pair.case.loss(pair.module, pair.case.inp)
        assert torch.equal(mine, pair.case.loss(pair.plain, pair.case.inp))


def _saves(pair: Pair) -> None:
    mine, plain = pair.optimizer.state_dict()["state"], pair.plain_optimizer.state_dict()["state"]
    for number, state in plain.items():
        for kind, value in state.items():
            assert torch.equal(mine[number][kind], value.cpu())


def _fails(pair: Pair) -> None:
    with contextlib.suppress(ZeroDivisionError):
        pair.module.module.layers[0].register_forward_pre_hook(_raise_once())
        pair.module(**pair.case.inp)


def _raise_once() -> Callable[..., None]:
    left = [1]

    def hook(*_: Any) -> None:
        if left:
            left.pop()
            raise ZeroDivisionError

    return hook


KEEPS: dict[str, Callable[[Pair], None]] = {
    "weights are looked at": _looks,
    "an evaluation": _evaluates,
    "the states are saved": _saves,
    "an exception": _fails,
    "nothing": lambda pair: None,
}


def _lr(pair: Pair) -> None:
    for each in (pair.optimizer, pair.plain_optimizer):
        each.param_groups[0]["lr"] = 5e-3


def _decay(pair: Pair) -> None:
    for each in (pair.optimizer, pair.plain_optimizer):
        each.param_groups[0]["weight_decay"] = 0.3


def _clips(pair: Pair) -> None:
    mine = pair.module.clip_grad_norm_(1e-3)
    assert torch.allclose(mine.cpu(), torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 1e-3).cpu())


def _writes(pair: Pair) -> None:
    with torch.no_grad(), pair.module.gathered(write=True):
        for mine, plain in zip(pair.module.module.parameters(), pair.plain.parameters(), strict=True):
            mine.mul_(0.5)
            plain.mul_(0.5)


def _loads(pair: Pair) -> None:
    state = {name: value * 0.5 for name, value in pair.plain.state_dict().items()}
    pair.module.load_state_dict(state)
    pair.plain.load_state_dict(state)


def _loads_states(pair: Pair) -> None:
    state = pair.plain_optimizer.state_dict()
    for each in state["state"].values():
        each["step"] = each["step"] + 3
        each["exp_avg"] = each["exp_avg"] * 0.5
    pair.optimizer.load_state_dict(state)
    pair.plain_optimizer.load_state_dict(state)


def _again(pair: Pair) -> None:
    pair.backward()


def _part_again(pair: Pair) -> None:
    """Another backward, in which only some chunks get gradients."""
    pair.backward({**pair.case.inp, "skip": 1})


def _without_one(pair: Pair) -> None:
    for model in (pair.module.module, pair.plain):
        model.layers[1].weight.grad = None  # type: ignore[index, union-attr]


REDOES: dict[str, Callable[[Pair], None]] = {
    "another learning rate": _lr,
    "another option": _decay,
    "a limit": _clips,
    "weights are written": _writes,
    "weights are loaded": _loads,
    "states are loaded": _loads_states,
    "a gradient is dropped": _without_one,
    "another backward": _again,
    "another backward of a part": _part_again,
}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("homes", "early"),
    [
        pytest.param(homes, early, marks=() if early or homes == "mixed" else pytest.mark.slow)
        for early in (True, False)
        for homes in HOMES
    ],
)
@pytest.mark.parametrize("what", [*KEEPS, *REDOES])
def test_between_backward_and_step(what: str, homes: str, early: bool) -> None:
    it = chain()
    emulation = Emulation(delay_s=0 if early else 3e-3)
    with Pair(it, chain_plan(it, homes), max_norm=1e9, emulation=emulation) as pair:
        pair.train(1)
        pair.backward()
        begun = attempts(pair.module)
        assert begun
        if early:
            settled(pair)
        (KEEPS | REDOES)[what](pair)
        if what not in ("an exception",):
            pair.step()
            kept = inside.early_counts(pair.module)[1]
            if what in KEEPS:
                assert kept == len(begun)
            elif what not in ("a gradient is dropped", "another backward", "another backward of a part"):
                assert not kept
            elif what == "a gradient is dropped":
                assert kept == len(begun) - 1
        pair.optimizer.zero_grad()
        pair.plain_optimizer.zero_grad()
        pair.train(2)


@every_home
def test_what_writes_gradients_or_states_waits_for_early_steps_that_read_them(homes: str) -> None:
    it = chain()
    with Pair(it, chain_plan(it, homes), max_norm=1e9) as pair:
        pair.train(1)
        gate = threading.Event()
        inside.lane(pair.module, "host_adam").submit(gate.wait)
        pair.backward()
        early = attempts(pair.module)
        assert early
        try:
            for index in early:
                for memory in (
                    inside.chunks(pair.module)[index].states,
                    inside.gradients(pair.module).by_chunk[index].memory,
                ):
                    assert not all(ticket.done() for ticket in memory.users)
        finally:
            gate.set()
        pair.step()


@every_home
def test_no_step_after_backward(homes: str) -> None:
    it = chain()
    with Pair(it, chain_plan(it, homes), max_norm=1e9) as pair:
        pair.train(1)
        for _ in range(2):
            pair.backward()
            assert attempts(pair.module)
            pair.optimizer.zero_grad()
            pair.plain_optimizer.zero_grad()
        pair.train(1)
        pair.backward()
        state = pair.plain.state_dict()
        released = pair.module.release()
        found = released.state_dict()  # on the host, whatever the device
        assert not [name for name, value in found.items() if not torch.equal(value.cpu(), state[name].cpu())]


@every_home
@pytest.mark.parametrize("max_norm", [None, 1e9])
def test_losses_that_are_nan(max_norm: float | None, homes: str) -> None:
    """New states of NaN are right without a limit; with one, the norm is NaN, so they are discarded."""
    it = chain()
    with Pair(it, chain_plan(it, homes), max_norm=max_norm) as pair:
        pair.train(2)
        pair.optimizer.backward(it.loss(pair.module, pair.case.inp) * math.nan)
        (it.loss(pair.plain, pair.case.inp) * math.nan).backward()
        begun = attempts(pair.module)
        assert begun
        pair.step()
        assert inside.early_counts(pair.module)[1] == (0 if max_norm else len(begun))
        mine, plain = pair.module.state_dict(), pair.plain.state_dict()
        assert all(value.isnan().any() for value in plain.values())
        for name, value in plain.items():
            torch.testing.assert_close(mine[name].cpu(), value.cpu(), rtol=0, atol=0, equal_nan=True)
        states = pair.optimizer.state_dict()["state"]
        for number, state in pair.plain_optimizer.state_dict()["state"].items():
            for kind, value in state.items():
                torch.testing.assert_close(states[number][kind].cpu(), value.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(every=2)
@every_home
@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_accumulation(batches: int, homes: str) -> None:
    it = chain()
    with Pair(it, replace(chain_plan(it, homes), accumulation=batches), max_norm=1e9) as pair:
        for step in range(4):
            pair.max_norm = pair.optimizer.max_norm = 1e9 if step % 2 else 1e-3
            for batch in range(batches):
                pair.backward(scale=1 / batches)
                assert bool(attempts(pair.module)) == (batch == batches - 1)
            pair.step()
            assert inside.early_counts(pair.module)[1] == (inside.early_counts(pair.module)[0] if step % 2 else 0)
        for other in (5, 1):  # as many as no plan has foreseen
            for _ in range(other):
                pair.backward(scale=1 / other)
            pair.step()


def make_ordinary(plan: Any) -> Any:
    return replace(plan, chunks=tuple(replace(chunk, update="after_norm") for chunk in plan.chunks))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)


def _rms(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True, momentum=0.5)


def _amsgrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)


@every_home
@pytest.mark.parametrize("make", [_sgd, _rms, _amsgrad])
def test_other_optimizers(make: Any, homes: str) -> None:
    it = chain()
    with Pair(it, chain_plan(it, homes), optimizer=make) as pair:
        train(pair, [1e9, 1e9, 1e-3, 1e9])
        assert inside.early_counts(pair.module)[1]


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def _hybrid(model: nn.Module) -> torch.optim.Optimizer:
    return HybridAdam(model.parameters(), lr=1e-3, weight_decay=0.1)


@pytest.mark.sampled(every=2)
@needs_kernel
@every_home
@pytest.mark.parametrize("make", [_fused, _hybrid])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_classes_need_no_copy(make: Any, dtype: str, homes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")
    norms = [1e9, 1e9, 1e-3, 1e9, 1e9]
    plan = chain_plan(chain(), homes, unified_dtype=dtype)
    (theirs, their_states), _ = steps(chain(), make_ordinary(plan), norms, {}, make)
    monkeypatch.setattr(States, "copy_from", lambda *_: pytest.fail("states were copied"))
    (mine, mine_states), kept = steps(chain(), plan, norms, {}, make)
    assert all(kept[:2])
    assert kept[4]
    assert not [key for key in theirs if not torch.equal(mine[key], theirs[key])]
    for number, state in their_states.items():
        assert not [kind for kind in state if not torch.equal(mine_states[number][kind], state[kind])]


def steps(it: Case, plan: Any, norms: list[float], running: dict[str, Any], make: Any = _adamw) -> Any:
    """Weights and states after some steps, and how many chunks' new states were kept."""
    options = debugged({k: v for k, v in running.items() if k != "initial_scale"}, poison=True)
    module = ElixirModule(it.model, plan, device=gpu.DEVICE, **options)
    optimizer = ElixirOptimizer(
        module,
        make(module.module),
        initial_scale=running.get("initial_scale", 2**10),
    )
    kept = []
    for norm in norms:
        optimizer.max_norm = norm
        optimizer.backward(it.loss(module, it.inp))
        optimizer.step()
        kept.append(module.last_report.early.kept)
        optimizer.zero_grad()
    state = module.state_dict(), optimizer.state_dict()["state"]
    module.close()
    return state, kept


_OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bfloat16": ({"unified_dtype": "bfloat16"}, {}),
    "fused": ({}, {"use_fused_kernels": {"cross_entropy": "plain"}}),
    "fused bfloat16": ({"unified_dtype": "bfloat16"}, {"use_fused_kernels": {"cross_entropy": "plain"}}),
    "8bit": ({"moments": "8bit"}, {}),
    "bfloat16 moments": ({"moments": "bfloat16", "unified_dtype": "bfloat16"}, {}),
    "float16": ({"unified_dtype": "float16"}, {}),
    "float16 that overflows": ({"unified_dtype": "float16"}, {"initial_scale": 2.0**40}),
}


@pytest.mark.sampled(every=4)
@every_home
@pytest.mark.parametrize(
    ("name", "kernel"), [(name, kernel) for name in _OTHERS for kernel in {False, "fused" in name}]
)
def test_same_bits_as_without(name: str, homes: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_COMPILE", "wait")
    if not kernel:
        inside.forget(monkeypatch, "Adam kernels")
        monkeypatch.setenv("CXX", "no-such-compiler")
    planning, running = _OTHERS[name]
    norms = [1e9, 1e9, 1e-3, 1e9, 1e9]
    plan = chain_plan(chain(), homes, **planning)
    (mine, mine_states), kept = steps(chain(), plan, norms, running)
    (theirs, their_states), none = steps(chain(), make_ordinary(plan), norms, running)
    assert not any(none)
    if "overflows" not in name:
        assert all(kept[:2])
        assert not kept[2]
        assert kept[4]
    assert not [key for key in theirs if not torch.equal(mine[key], theirs[key])]
    for number, state in their_states.items():
        assert not [kind for kind in state if not torch.equal(mine_states[number][kind], state[kind])]


@needs_kernel
@pytest.mark.parametrize("mode", ["0", "1"])
@pytest.mark.parametrize("options", [{}, {"use_fused_kernels": True}])
def test_wrapping_begins_the_kernel_and_reports_say_what_stepped(
    options: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELIXIR_COMPILE", mode)
    inside.forget(monkeypatch, "Adam kernels")
    built, build = list[Any](), native.build_kernel
    monkeypatch.setattr(native, "build_kernel", lambda one: built.append(one) or build(one))
    it = chain()
    module = ElixirModule(it.model, chain_plan(it, unified_dtype="bfloat16"), device=gpu.DEVICE, **options)
    optimizer = ElixirOptimizer(module, _fused(module.module), max_norm=1e9)
    assert native.absent_kernels() == []
    assert built, "a plan with early updates counts on the kernel"
    found, forms = [], set[str]()
    for _ in range(3):
        optimizer.backward(it.loss(module, it.inp))
        optimizer.step()
        module.settle()  # CPU Adam is done with what it was given
        report = module.last_report or pytest.fail("nothing was reported")
        found.append((report.early.made, report.early.kept))
        forms |= set(report.host_forms)
        optimizer.zero_grad()
    early = found[-1][0]
    assert found[1:] == [(early, early)] * 2 != [(0, 0)] * 2
    assert forms == {ONE_PASS}
