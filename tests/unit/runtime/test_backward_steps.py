"""The host's steps begin during backward, and no bit of what is trained changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import elixir.api
from elixir.chunk.lanes import Emulation
from elixir.errors import InputError
from elixir.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu
from tests.common.debug import debugged
from tests.common.early import HOMES, all_early, backward_watched, begun, chain, early_plan, planned, rehomed, without
from tests.common.parity import Case, Pair, case, square_loss
from tests.common.tiny_models import FAMILIES
from tests.unit.runtime import test_runtime_views as views

CHECKPOINTS = ("none", "reentrant", "non-reentrant")
_QUICK = {("gpt2", "none"), ("opt", "reentrant"), ("llama", "non-reentrant"), ("mixtral", "none")}
_EVERY = [
    pytest.param(family, form, marks=() if (family, form) in _QUICK else pytest.mark.slow)
    for family in FAMILIES
    for form in CHECKPOINTS
]


def chain_plan(it: Case, homes: str = "streamed", **options: Any) -> Plan:
    return early_plan(it, homes, split_number=len(it.model.layers), **options)  # type: ignore[arg-type]


def train(it: Case, plan: Plan, steps: int = 4, make: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after so many steps under a plan."""
    make = make or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    module = ElixirModule(it.model, plan, device=gpu.DEVICE, **debugged(options, poison=True))
    optimizer = ElixirOptimizer(module, make(module.module))
    for _ in range(steps):
        optimizer.backward(it.loss(module, it.inp))
        assert bool(begun(module)) == plan.steps_in_backward
        optimizer.step()
        optimizer.zero_grad()
    state = module.state_dict()
    module.close()
    return state


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize(("family", "form"), _EVERY)
def test_same_bits_as_plain_pytorch(family: str, form: str, homes: str) -> None:
    it = case(family, form)
    plan = early_plan(it, homes)
    with Pair(it, plan) as pair:
        for _ in range(4):
            pair.backward()
            assert begun(pair.module) == planned(plan) != []
            pair.step()
            assert not begun(pair.module)
        pair.assert_same_weights()
        report = pair.module.last_report
        assert report is not None
        assert report.demand_loads == report.deviations == 0


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("homes", HOMES)
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
    it = case("gpt2", "non-reentrant")
    with Pair(it, early_plan(it, homes), **options) as pair:
        pair.train(3)
        pair.assert_same_weights()


@pytest.mark.parametrize("homes", HOMES)
def test_steps_are_over_before_backward_is(homes: str) -> None:
    # The last chunk is stepped while the first layer's backward has yet to run: seen from a hook that waits for it.
    it = chain(5)
    plan = chain_plan(it, homes)
    seen: list[bool] = []
    with Pair(it, plan) as pair:
        last = pair.engine.chunks[planned(plan)[-1]]
        before = last.shard_weights.clone()

        def look(gradient: torch.Tensor) -> None:
            assert last.updated is not None
            last.updated.synchronize()
            seen.append(last.stepping and not torch.equal(last.shard_weights, before))

        backward_watched(pair, look)
        assert seen == [True]
        it.loss(pair.plain, pair.case.inp).backward()
        pair.step()
        pair.train(1)
        pair.assert_same_weights()


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": other, "lr": 5e-3, "betas": (0.5, 0.9)}]
    return torch.optim.AdamW(groups, lr=1e-3)


@pytest.mark.parametrize("homes", HOMES)
def test_two_groups_and_a_scheduler_after_every_step(homes: str) -> None:
    it = case("gpt2")
    with Pair(it, early_plan(it, homes), optimizer=_groups) as pair:
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1.0 / (1 + step))
            for each in (pair.optimizer, pair.plain_optimizer)
        ]
        for _ in range(4):
            pair.train(1)
            for scheduler in schedulers:
                scheduler.step()
        pair.assert_same_weights()


def test_a_learning_rate_that_is_a_tensor_is_taken_as_it_was_in_backward() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))

    it = chain()
    with Pair(it, chain_plan(it), optimizer=make, emulation=Emulation(delay_s=2e-3)) as pair:
        for _ in range(3):
            pair.train(1)
            for each in (pair.optimizer, pair.plain_optimizer):
                each.param_groups[0]["lr"].mul_(0.5)  # in place, while the host may still be stepping
        pair.assert_same_weights()


@pytest.mark.parametrize("homes", HOMES)
def test_frozen_parameters_do_not_step(homes: str) -> None:
    it = chain(6)
    for name, parameter in it.model.named_parameters():
        parameter.requires_grad_("2" not in name and name != "layers.4.bias")
    plan = chain_plan(it, homes)
    assert not any(plan.chunks[index].trainable is False for index in planned(plan))
    with Pair(it, plan) as pair:
        pair.train(3)
        pair.assert_same_weights()


def test_other_optimizers() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)

    for homes in HOMES:
        it = chain()
        with Pair(it, chain_plan(it, homes), optimizer=make) as pair:
            pair.train(4)
            pair.assert_same_weights()


@pytest.mark.parametrize("homes", HOMES)
def test_a_chunk_that_gets_no_gradient_waits_for_step(homes: str) -> None:
    it = chain(6)
    plan = chain_plan(it, homes)
    with Pair(it, plan) as pair:
        for step in range(4):
            skip = planned(plan)[-1] if step % 2 else None
            pair.backward({**it.inp, "skip": skip})
            without_gradient = [
                chunk.index
                for chunk in pair.engine.chunks
                if any(slot.name.startswith(f"layers.{skip}.") for slot in chunk.slots)
            ]
            assert begun(pair.module) == [index for index in planned(plan) if index not in without_gradient]
            pair.step()
        pair.assert_same_weights()


@pytest.mark.parametrize("homes", HOMES)
def test_no_step_without_the_parameters_own_optimizer(homes: str) -> None:
    # Of two layers, one of which is not given to the optimizer, in one chunk.
    def make(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.layers[0].parameters(), lr=1e-2)

    it = chain(2)
    with Pair(it, early_plan(it, homes, split_number=1), optimizer=make) as pair:
        for _ in range(3):
            pair.backward()
            pair.step()
            pair.plain.zero_grad()
        pair.assert_same_weights()


# --- several gradients of one parameter in a backward
# ------------------------------------------------------------------


class Shared(nn.Module):
    """Checkpoints a layer twice: reentrant backwards give two gradients of it, with other layers' between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, middle, last = self.layers
        x = checkpoint(lambda y: first(y).tanh(), x, use_reentrant=True)
        x = middle(x).tanh()
        return last(checkpoint(lambda y: first(y).tanh(), x, use_reentrant=True))  # type: ignore[no-any-return]


def shared() -> Case:
    torch.manual_seed(0)
    return Case(Shared(), {"x": torch.randn(4, 8, requires_grad=True)}, square_loss)


@pytest.mark.parametrize("homes", HOMES)
def test_the_planner_waits_for_parameters_with_several_gradients(homes: str) -> None:
    it = shared()
    plan = chain_plan(it, homes)
    twice = [i for i, c in enumerate(plan.chunks) if any(slot.name.startswith("layers.0.") for slot in c.parameters)]
    assert planned(plan)
    assert not set(twice) & set(planned(plan))
    with Pair(it, plan) as pair:
        pair.train(3)
        pair.assert_same_weights()


@pytest.mark.parametrize("homes", ["streamed", "states"])
def test_a_second_gradient_is_refused_under_a_plan_by_hand(homes: str) -> None:
    it = shared()
    plan = all_early(chain_plan(it, homes))
    with Pair(it, plan) as pair:
        loss = it.loss(pair.module, it.inp)
        with pytest.raises(InputError, match=r"(another gradient|weights are read).*step_in_backward=False"):
            pair.optimizer.backward(loss)
        pair.optimizer.step()  # finishes what began
        pair.optimizer.zero_grad()
        pair.module.load_state_dict(pair.plain.state_dict())
        pair.assert_same_weights()


@pytest.mark.parametrize("homes", HOMES)
def test_tied_parameters(homes: str) -> None:
    it = case("gpt2", tie_word_embeddings=True)
    plan = early_plan(it, homes)
    with Pair(it, plan) as pair:
        assert pair.plain.lm_head.weight is pair.plain.transformer.wte.weight  # type: ignore[union-attr]
        pair.train(3)
        pair.assert_same_weights()


# --- other numbers than plain PyTorch's: the same as without
# ------------------------------------------------------------


def _fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


_OTHERS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any], Any]]] = {
    "bfloat16": lambda: ({"unified_dtype": "bfloat16"}, {}, None),
    "fused": lambda: ({}, {"use_fused_kernels": {"cross_entropy": "plain"}}, _fused),
    "8bit": lambda: ({"moments": "8bit"}, {}, None),
    "bfloat16 moments": lambda: ({"moments": "bfloat16", "unified_dtype": "bfloat16"}, {}, _groups),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("name", _OTHERS)
def test_same_bits_as_without(name: str, homes: str) -> None:
    planning, running, make = _OTHERS[name]()
    plan = early_plan(case("gpt2"), homes, **planning)
    assert planned(plan)
    assert_same(
        train(case("gpt2"), plan, make=make, **running), train(case("gpt2"), without(plan), make=make, **running)
    )


# --- around a step
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("homes", HOMES)
def test_batches_that_keep_their_gradients_add_up_before_the_step_begins(homes: str) -> None:
    it = chain()
    plan = chain_plan(it, homes)
    with Pair(it, plan) as pair:
        for _ in range(3):
            with pair.module.no_sync():
                pair.backward(scale=0.5)
                assert not begun(pair.module)
            pair.backward(scale=0.5)
            assert begun(pair.module) == planned(plan)
            pair.step()
        pair.assert_same_weights()


def test_moving_to_and_from_such_a_plan() -> None:
    it = case("gpt2")
    plan = early_plan(it)
    with Pair(it, plan) as pair:
        for homes in ("states", "mixed", "streamed"):
            for early in (False, True):
                pair.train(1)
                there = rehomed(plan, homes)
                pair.module.rehome(there if early else without(there))
                pair.backward()
                assert begun(pair.module) == (planned(there) if early else [])
                pair.step()
        pair.assert_same_weights()


@pytest.mark.parametrize("homes", HOMES)
def test_evaluation_and_reading_weights_after_a_step(homes: str) -> None:
    it = case("gpt2")
    with Pair(it, early_plan(it, homes), emulation=Emulation(delay_s=1e-3)) as pair:
        for _ in range(2):
            pair.train(1)
            with torch.no_grad():
                assert torch.equal(it.loss(pair.module, it.inp), it.loss(pair.plain, pair.case.inp))
            with pair.module.gathered():
                for mine, plain in zip(pair.module.module.parameters(), pair.plain.parameters(), strict=True):
                    assert torch.equal(mine, plain)


def test_nothing_begins_inside_gathered() -> None:
    it = chain()
    with Pair(it, chain_plan(it)) as pair:
        with pair.module.gathered():
            pair.backward()
            assert not begun(pair.module)
        pair.step()
        pair.train(1)
        pair.assert_same_weights()


def test_a_closure_runs_the_backward_in_which_steps_begin() -> None:
    it = chain()
    plan = chain_plan(it)
    with Pair(it, plan) as pair:
        for _ in range(3):

            def closure() -> float:
                pair.optimizer.zero_grad()
                pair.plain_optimizer.zero_grad()
                loss = pair.backward()
                assert begun(pair.module) == planned(plan)
                return loss

            assert pair.optimizer.step(closure) > 0
            pair.plain_optimizer.step()
        pair.assert_same_weights()


def test_two_steps_with_the_same_gradients() -> None:
    it = chain()
    with Pair(it, chain_plan(it)) as pair:
        pair.backward()
        for each in (pair.optimizer, pair.plain_optimizer) * 2:
            each.step()
        pair.assert_same_weights()
        pair.backward()  # adds to what is there
        pair.step()
        pair.assert_same_weights()


@pytest.mark.parametrize("homes", HOMES)
def test_the_same_bytes_and_loads_as_without(homes: str) -> None:
    it = case("gpt2")
    plan = early_plan(it, homes)
    found = []
    for each in (plan, without(plan)):
        with Pair(case("gpt2"), replace(each)) as pair:
            pair.train(3)
            pair.module.settle()
            report = pair.module.last_report
            assert report is not None
            found.append(
                (report.observed, report.refreshed_bytes, dict(pair.engine.arena.peak_bytes), report.surprises())
            )
    assert found[0] == found[1]
    if homes == "streamed":
        observed, _, peaks, _ = found[0]
        assert peaks["host"] <= plan.predicted.host_step_bytes
        assert observed["device_buffers"] == report.predicted["device_buffers"]


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_that_are_larger_than_a_block_leave_as_they_are(overlap: bool) -> None:
    peaks = []
    for early in (True, False):
        it = chain()
        for layer in it.model.layers:  # type: ignore[union-attr]
            layer.bias = None  # type: ignore[assignment]
        plan = replace(chain_plan(it, "states"), block_bytes=64, overlap=overlap)
        with Pair(it, plan if early else without(plan), emulation=Emulation(delay_s=1e-3)) as pair:
            pair.backward()
            assert bool(begun(pair.module)) == early
            pair.step()
            pair.train(2)
            pair.assert_same_weights()
            peaks.append(dict(pair.engine.arena.peak_bytes))
    assert peaks[0] == peaks[1]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("homes", HOMES)
@pytest.mark.parametrize("forward", views.FORWARDS, ids=lambda forward: forward.__name__)
def test_views_of_weights_that_outlive_their_module(forward: views.Forward, homes: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    plan = early_plan(views.case_of(forward), homes, split_number=12)
    assert planned(plan)
    with Pair(views.case_of(forward), plan, optimizer=make) as pair:
        pair.train(2)
        pair.assert_same_weights()
    with Pair(views.case_of(forward), all_early(plan), optimizer=make, evict_always=True) as pair:
        try:  # a plan by hand may be wrong, its numbers may not
            pair.train(2)
        except InputError as error:
            assert "step_in_backward=False" in str(error)  # noqa: PT017  refused or right, either will do
        else:
            pair.assert_same_weights()


def test_fused_kernels_of_the_model_too() -> None:
    for homes in HOMES:
        plan = early_plan(case("llama", "reentrant"), homes, use_fused_kernels=True)
        options: dict[str, Any] = {"make": _fused, "use_fused_kernels": True}
        early, late = (train(case("llama", "reentrant"), each, **options) for each in (plan, without(plan)))
        assert_same(early, late)


def test_all_of_it_in_one_call() -> None:
    it = case("gpt2")
    plain, inp = copy.deepcopy(it.model).to(gpu.DEVICE), gpu.there(it.inp)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (it.model, plain)]
    module, optimizer = elixir.wrap(it.model, optimizers[0], inp=it.inp, placement="cpu", step_in_backward=True)
    assert planned(module.plan)
    for _ in range(elixir.api.WARM_UP_STEPS + elixir.api.MEASURED_STEPS + 2):  # past the correction of the plan
        loss, expected = it.loss(module, inp), it.loss(plain, inp)
        assert torch.equal(loss, expected)
        optimizer.backward(loss)
        expected.backward()
        assert begun(module) == planned(module.plan)
        for each in (optimizer, optimizers[1]):
            each.step()
            each.zero_grad()
    state = module.state_dict()
    assert not [name for name, value in plain.state_dict().items() if not torch.equal(state[name], value.cpu())]
    module.close()
