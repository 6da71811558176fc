"""Steps in backward refuse what they would silently get wrong, with a sentence that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import elixir
from elixir.errors import ArtifactError, InputError, StepError
from elixir.plan import Plan
from elixir.search import simple_search
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu
from tests.common.early import HOMES, begun, early_plan, planned, without
from tests.common.parity import Case, Pair, square_loss


class Net(nn.Module):
    """Three layers of one chunk each, and a place for a test to do something before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.early: Callable[[Net, torch.Tensor], torch.Tensor] = lambda net, x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.early(self, self.first(x).tanh())
        return self.last(self.second(x).tanh())  # type: ignore[no-any-return]


def net_case(early: Any = None) -> Case:
    torch.manual_seed(0)
    model = Net()
    if early is not None:
        model.early = early
    return Case(model, {"x": torch.randn(4, 8)}, square_loss)


def net_plan(it: Case, homes: str = "streamed", **options: Any) -> Plan:
    return early_plan(it, homes, split_number=3, **options)


def _step_of(it: Case, backwards: int = 1) -> Callable[[nn.Module, Any], None]:
    def step(model: nn.Module, inp: Any) -> None:
        for _ in range(backwards):
            it.loss(model, inp).backward()

    return step


@pytest.fixture(params=["streamed", "states"])
def between(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """After backward, before step()."""
    it = net_case()
    with Pair(it, net_plan(it, request.param)) as pair:
        pair.train(1)
        pair.backward()
        assert begun(pair.module)
        yield pair
        pair.step()  # goes on as if nothing had been asked
        pair.train(1)
        pair.assert_same_weights()


def _weight(pair: Pair) -> nn.Parameter:
    last: Any = pair.module.module.last
    return last.weight  # type: ignore[no-any-return]


def _no_gradient(pair: Pair) -> None:
    _weight(pair).grad = None


def _evaluates(pair: Pair) -> None:
    with torch.no_grad():
        pair.module.eval()(**pair.case.inp)


def _gathers(pair: Pair) -> None:
    with pair.module.gathered():
        pass


def _inner_state_dict(pair: Pair) -> None:
    last: Any = pair.module.module.last
    last.state_dict()


_REFUSED: dict[str, Callable[[Pair], Any]] = {
    "a forward": lambda pair: pair.module(**pair.case.inp),
    "a forward in evaluation": _evaluates,
    "zero_grad of the module": lambda pair: pair.module.zero_grad(),
    "zero_grad of the optimizer": lambda pair: pair.optimizer.zero_grad(),
    "zeros for gradients": lambda pair: pair.optimizer.zero_grad(set_to_none=False),
    "a gradient set to None": _no_gradient,
    "the module's clip_grad_norm_": lambda pair: pair.module.clip_grad_norm_(1.0),
    "the optimizer's clip_grad_norm_": lambda pair: pair.optimizer.clip_grad_norm_(1.0),
    "gathered": _gathers,
    "state_dict": lambda pair: pair.module.state_dict(),
    "state_dict of a layer": _inner_state_dict,
    "load_state_dict": lambda pair: pair.module.load_state_dict(pair.plain.state_dict()),
    "rehome": lambda pair: pair.module.rehome(without(pair.plan)),
}


@pytest.mark.parametrize("what", _REFUSED)
def test_between_backward_and_step(what: str, between: Pair) -> None:
    before = begun(between.module)
    with pytest.raises(InputError, match=r"step\(\)|step_in_backward=False|zero_grad"):
        _REFUSED[what](between)
    between.module.train()
    assert begun(between.module) == before


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("a forward", r"all backwards but the last inside no_sync\(\)"),
        ("zero_grad of the module", "left out before its backward"),
        ("zero_grad of the optimizer", "left out before its backward"),
        ("the module's clip_grad_norm_", r"during backward: leave clipping out"),
        ("the optimizer's clip_grad_norm_", r"during backward: leave clipping out"),
    ],
)
def test_what_is_refused_there_says_what_to_do_about_it(what: str, instead: str, between: Pair) -> None:
    with pytest.raises(InputError, match=instead):
        _REFUSED[what](between)


def test_a_weight_that_is_read_between_backward_and_step(between: Pair) -> None:
    weight = _weight(between)
    for read in (lambda: weight.norm(), lambda: weight.data.sum(), lambda: weight.detach().clone()):
        with torch.no_grad(), pytest.raises(InputError, match="step_in_backward=False|outside of the model's forward"):
            read()


@pytest.mark.parametrize("homes", HOMES)
def test_a_second_backward(homes: str) -> None:
    it = net_case()
    with Pair(it, net_plan(it, homes)) as pair:
        one, two = it.loss(pair.module, it.inp), it.loss(pair.module, it.inp)
        pair.optimizer.backward(one)
        with pytest.raises(InputError, match=r"another backward between backward and step\(\)"):
            pair.optimizer.backward(two)
        it.loss(pair.plain, pair.case.inp).backward()
        pair.step()
        pair.train(1)
        pair.assert_same_weights()


@pytest.mark.parametrize("homes", HOMES)
def test_a_second_backward_over_a_graph_that_was_kept(homes: str) -> None:
    it = net_case()
    with Pair(it, net_plan(it, homes)) as pair:
        loss = it.loss(pair.module, it.inp)
        loss.backward(retain_graph=True)
        with pytest.raises(InputError, match=r"another backward"):
            loss.backward(retain_graph=True)
        it.loss(pair.plain, pair.case.inp).backward()
        pair.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation|at version"):
            loss.backward()


def test_options_that_are_changed_between_backward_and_step(between: Pair) -> None:
    group = between.optimizer.param_groups[0]
    for name, value in (("lr", 0.5), ("betas", (0.1, 0.2)), ("weight_decay", 0.3)):
        old = group[name]
        group[name] = value
        with pytest.raises(InputError, match=r"changed between backward and step\(\).*after step\(\)"):
            between.optimizer.step()
        group[name] = old


def test_clipping_that_is_asked_for_between_backward_and_step(between: Pair) -> None:
    between.optimizer.max_norm = 1.0
    with pytest.raises(InputError, match=r"clipping between backward and step\(\).*: leave it out"):
        between.optimizer.step()
    between.optimizer.max_norm = 0.0


def test_clipping_that_is_asked_for_before_backward_comes_first() -> None:
    it = net_case()
    with Pair(it, net_plan(it)) as pair:
        pair.optimizer.max_norm = pair.max_norm = 1e-3
        pair.backward()
        assert not begun(pair.module)
        pair.step()
        pair.assert_same_weights()
        pair.optimizer.max_norm = pair.max_norm = None
        pair.train(1)
        pair.assert_same_weights()


def test_a_gradient_that_is_set_by_hand_can_be_taken_back(between: Pair) -> None:
    weight = _weight(between)
    weight.grad = torch.ones(8, 8, device=between.module.device)
    with pytest.raises(InputError, match="set by hand"):
        between.optimizer.step()
    weight.grad = None


# --- when something is built ---------------------------------------------------------------------------------------


def test_clipping_at_construction() -> None:
    it = net_case()
    with pytest.raises(InputError, match="leave max_norm out, or plan with step_in_backward=False"):
        Pair(it, net_plan(it), max_norm=1.0)
    it = net_case()
    optimizer = torch.optim.AdamW(it.model.parameters())
    with pytest.raises(InputError, match="leave max_norm out, or plan with step_in_backward=False"):
        elixir.wrap(it.model, optimizer, inp=it.inp, max_norm=1.0, step_in_backward=True)


def test_clipping_under_a_plan_that_is_taken_over() -> None:
    it = net_case()
    plan = net_plan(it)
    with Pair(it, without(plan), max_norm=1.0) as pair:
        pair.train(1)
        with pytest.raises(InputError, match="leave max_norm out, or plan with step_in_backward=False"):
            pair.module.rehome(plan)
        pair.train(1)
        pair.assert_same_weights()


def test_a_second_optimizer() -> None:
    it = net_case()
    module = ElixirModule(it.model, net_plan(it), device=gpu.DEVICE)
    layers: Any = it.model
    ElixirOptimizer(module, torch.optim.AdamW(layers.first.parameters()))
    with pytest.raises(InputError, match="one optimizer; give that one all parameters"):
        ElixirOptimizer(module, torch.optim.AdamW(layers.second.parameters()))
    module.close()


def test_float16_and_accumulation() -> None:
    it = net_case()
    with pytest.raises(InputError, match=r"float16.*step_in_backward=False, or in bfloat16"):
        net_plan(it, unified_dtype="float16")
    plan = net_plan(it)
    with pytest.raises(InputError, match="accumulation=1"):
        replace(plan, accumulation=2)
    for change in ({"accumulation": 2}, {"dtype": "float16"}):
        with pytest.raises((ArtifactError, InputError), match="step_in_backward=False"):
            Plan.from_dict(plan.to_dict() | change)
    optimizer = torch.optim.AdamW(it.model.parameters())
    with pytest.raises(InputError, match="accumulation=1"):
        elixir.wrap(it.model, optimizer, inp=it.inp, step_fn=_step_of(it), accumulation=2, step_in_backward=True)


def test_a_plan_file_with_the_flag_where_states_are_on_the_device() -> None:
    plan = net_plan(net_case(), "states")
    data = plan.to_dict()
    data["chunks"][planned(plan)[0]]["state_home"] = "device"
    with pytest.raises((ArtifactError, InputError), match="steps_in_backward.*device"):
        Plan.from_dict(data)


def test_a_step_of_two_backwards() -> None:
    it = net_case()
    options: dict[str, Any] = {"split_number": 3, "allocate_factor": 0.01, "hardware": "cpu", "shard_device": "cpu"}
    with pytest.raises(InputError, match=r"step_in_backward=False"):
        simple_search(it.model, 1, inp=it.inp, step_fn=_step_of(it, 2), step_in_backward=True, **options)


# --- weights that backward reads after their own gradients have come -----------------------------------------------


def _reads(how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    """Before the last layer: something that needs its weight again in backward, and gives it no gradient."""
    return lambda net, x: F.linear(x, how(net.last.weight)).tanh()


class _KeepsOnItself(torch.autograd.Function):
    """Keeps a weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] @ ctx.weight, None


def _recomputes(net: Net, x: torch.Tensor) -> torch.Tensor:
    hoisted = net.last.weight.detach().t()
    return checkpoint(lambda y: (y @ hoisted).tanh() @ hoisted, x, use_reentrant=False)  # type: ignore[no-any-return]


def _hooked(net: Net, x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * (1 + net.last.weight.norm()))
    return x


LATER: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "detach": _reads(lambda weight: weight.detach()),
    "data": _reads(lambda weight: weight.data),
    "a view of data": _reads(lambda weight: weight.data.t().t()),
    "a function's own": lambda net, x: _KeepsOnItself.apply(x, net.last.weight.detach()).tanh(),  # type: ignore[no-untyped-call]
    "a recompute of a view": _recomputes,
    "a hook": _hooked,
}


@pytest.mark.parametrize("homes", ["streamed", "states"])
@pytest.mark.parametrize("how", LATER)
def test_the_planner_leaves_weights_alone_that_are_read_later(how: str, homes: str) -> None:
    it = net_case(LATER[how])
    plan = net_plan(it, homes)
    last = [i for i, chunk in enumerate(plan.chunks) if any(slot.name == "last.weight" for slot in chunk.parameters)]
    assert planned(plan)
    assert not set(last) & set(planned(plan))
    with Pair(it, plan) as pair:
        pair.train(3)
        pair.assert_same_weights()


_CONDITIONS = {"streamed": ("streamed", False), "evicted": ("streamed", True), "states": ("states", False)}
"""While a block still holds the weights, which are those of before the step, nothing is wrong with reading them."""


def _right_or_refused(pair: Pair, refused: bool) -> None:
    """One step that reads weights late: refused, or with the bits of plain PyTorch."""
    losses = pair.case.loss(pair.module, pair.case.inp), pair.case.loss(pair.plain, pair.case.inp)
    losses[1].backward()
    if not refused:
        losses[0].backward()
        pair.step()
        pair.assert_same_weights()
        return
    with pytest.raises(InputError, match=r"weights are read after the step of chunk.*step_in_backward=False"):
        losses[0].backward()
    pair.optimizer.step()  # and what has begun is finished


@pytest.mark.parametrize("condition", _CONDITIONS)
@pytest.mark.parametrize("how", LATER)
def test_a_weight_that_is_read_later_where_no_trace_said_so(how: str, condition: str) -> None:
    homes, evict_always = _CONDITIONS[condition]
    it = net_case()
    plan = net_plan(it, homes)
    model: Any = it.model
    model.early = LATER[how]
    with Pair(it, plan, evict_always=evict_always) as pair:
        _right_or_refused(pair, refused=condition != "streamed")


@pytest.mark.parametrize("condition", _CONDITIONS)
def test_a_hook_of_backward_that_reads_a_weight_after_its_step_began(condition: str) -> None:
    homes, evict_always = _CONDITIONS[condition]
    it = net_case()
    plan = net_plan(it, homes)
    with Pair(it, plan, evict_always=evict_always) as pair:
        seen: dict[bool, float] = {}
        models: Any = {True: pair.module.module, False: pair.plain}
        for mine, model in models.items():

            def look(*rest: Any, mine: bool = mine, model: Any = model) -> None:
                seen[mine] = model.last.weight.norm().item()

            model.second.register_full_backward_hook(look)
        _right_or_refused(pair, refused=condition != "streamed")
        assert len(seen) == 1 + (condition == "streamed")
        assert seen.get(True, seen[False]) == seen[False]


# --- failures ------------------------------------------------------------------------------------------------------


class _Stop(Exception):
    pass


@pytest.mark.parametrize("homes", HOMES)
def test_after_a_backward_that_fails_half_way_step_is_that_of_plain_pytorch(homes: str) -> None:
    # What came before the failure counts, as gradients of a failed backward do.
    def fail(gradient: torch.Tensor) -> None:
        raise _Stop

    def early(net: Net, x: torch.Tensor) -> torch.Tensor:
        if failing:
            x.register_hook(fail)
        return x

    failing = False
    it = net_case(early)
    with Pair(it, net_plan(it, homes)) as pair:
        pair.train(1)
        failing = True
        losses = it.loss(pair.module, it.inp), it.loss(pair.plain, pair.case.inp)
        for loss in losses:
            with pytest.raises(_Stop):
                loss.backward()
        assert begun(pair.module)
        with pytest.raises(InputError, match=re.escape("call step() first")):
            pair.module(**it.inp)
        failing = False
        pair.step()
        pair.assert_same_weights()
        pair.train(1)
        pair.assert_same_weights()


@gpu.on_the_cpu("a stream that is given work may raise at once what it builds on")
@pytest.mark.parametrize("homes", ["streamed", "states"])
def test_a_step_on_the_host_that_fails_is_heard_of(homes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = net_case()
    plan = net_plan(it, homes)
    with Pair(it, plan) as pair:
        pair.train(1)
        pair.module.settle()  # its update is over
        part = pair.engine.steppers[0].parts[planned(plan)[0]]

        def fail(*rest: Any, **options: Any) -> None:
            raise _Stop

        monkeypatch.setattr(part, "step", fail)
        pair.optimizer.backward(it.loss(pair.module, it.inp))

        def to_the_next_forward() -> None:
            pair.optimizer.step()  # waits for nothing
            pair.optimizer.zero_grad()
            it.loss(pair.module, it.inp)

        with pytest.raises(StepError, match="_Stop"):
            to_the_next_forward()
        assert pair.module.state_dict().keys() == pair.plain.state_dict().keys()  # told once, weights can be had
