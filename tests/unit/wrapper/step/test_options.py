"""Options and numbers that a step copies, compares and rounds."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.kernels import HybridAdam
from elixir.wrapper.step.elementwise import Rehearsal, options_of, set_options
from elixir.wrapper.step.gradient_norm import Factor, GradientNorm, KnownNorms, clip_factor, each_norm, norm_of_norms
from elixir.wrapper.step.states import Kind, wide_dtype
from elixir.wrapper.step.user_optimizer import (
    accepted_options,
    has_stepped,
    refuse_different_options,
    shard_options,
    take_options,
)
from tests.common.one_shard import user_of


@pytest.mark.parametrize(
    ("kept", "saved"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32)]
    + [(kind, kind) for kind in (torch.float32, torch.float64, torch.int64, torch.int16, torch.uint8, torch.bool)],
)
def test_saved_states_are_floats_of_at_least_32_bits(kept: torch.dtype, saved: torch.dtype) -> None:
    assert wide_dtype(Kind(kept)) is saved


@pytest.mark.parametrize("captured", [False, True])
def test_shards_are_stepped_with_copies_and_without_graphs(captured: bool) -> None:
    lr, betas = torch.tensor(0.5), torch.tensor([0.9, 0.99])
    given = {"lr": lr, "betas": (betas, 0.5), "params": [1]} | ({"capturable": True} if captured else {})
    found = shard_options(given)
    assert found.keys() == given.keys() - {"params"}
    assert found.get("capturable", False) is False
    assert type(found["lr"]) is (float if captured else torch.Tensor)  # the host cannot step with a captured number
    assert found["lr"] == 0.5
    assert found["lr"] is not lr
    assert found["betas"][0] is not betas
    assert torch.equal(found["betas"][0], betas)
    assert found["betas"][1] == 0.5


def test_options_are_copied_but_for_the_parameters() -> None:
    lr, shape, mixed = torch.tensor(0.5), (1, 2.0, None), (1, torch.ones(2))
    given: dict[str, Any] = {"params": [1], "lr": lr, "shape": shape, "mixed": mixed, "many": [3]}
    found = options_of(given)
    assert list(found) == ["lr", "shape", "mixed", "many"]
    lr += 1
    mixed[1].add_(1)  # type: ignore[union-attr]
    given["many"].append(4)
    assert found["lr"] == 0.5
    assert found["mixed"][1].tolist() == [1, 1]
    assert (found["shape"], found["many"]) == (shape, [3])
    group: dict[str, Any] = {"params": [2], "lr": 1.0, "old": 1}
    set_options(group, {"lr": 2.0})
    assert group == {"params": [2], "lr": 2.0, "old": 1}
    set_options(group, {"lr": 3.0}, exactly=True)
    assert group == {"params": [2], "lr": 3.0}


def test_loaded_numbers_go_into_the_tensors_of_the_group() -> None:
    lr, name = torch.tensor(0.5), "before"
    group = {"lr": lr, "name": name, "odd": torch.ones(2)}
    take_options(group, {"lr": torch.tensor(2.0), "name": "after", "odd": "text"})
    assert group == {"lr": lr, "name": "after", "odd": "text"}
    assert group["lr"] is lr
    assert lr == 2.0
    take_options(group, {"lr": 3})
    assert group["lr"] is lr
    assert lr == 3.0
    take_options({"lr": 1.0}, {"lr": lr})  # a plain number is replaced
    assert accepted_options(torch.optim.SGD, {"lr": 1, "betas": 2}) == {"lr": 1}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("0.1", "0.1", True),
        ("0.1", str(0.1 * (1 + 1e-12)), True),
        ("0.1", str(0.1 * (1 + 1e-6)), False),
        ("True", "False", False),
        ("[1]", "[1]", True),
        ("[1]", "None", False),
    ],
)
def test_a_step_with_other_options_on_another_rank_is_refused(one: str, other: str, same: bool) -> None:
    said = [{"lr": one}, {"lr": one}, {"lr": other}]
    if same:
        refuse_different_options(said)
        return
    with pytest.raises(InputError, match=re.escape(f"lr is {one} on rank 0, {other} on rank 2")):
        refuse_different_options(said)
    for lacks in ([{"lr": one}, {}], [{}, {"lr": one}]):
        with pytest.raises(InputError, match="ranks step with different options"):
            refuse_different_options(lacks)


@pytest.mark.parametrize(
    ("state", "stepped"),
    [
        ({}, False),
        ({"step": 0}, False),
        ({"step": torch.tensor(1.0)}, True),
        ({"step": 0, "sum": torch.ones(1)}, False),
        ({"sum": torch.ones(1)}, True),
        ({"name": "of a constructor"}, False),
        (None, False),
        ([1], True),
    ],
)
def test_states_of_a_step_are_known(state: Any, stepped: bool) -> None:
    assert has_stepped(state) is stepped


def test_the_limit_of_a_norm_is_the_one_of_torch() -> None:
    gradients = [torch.full((3,), 2.0), torch.full((4,), 3.0)]
    known = [None, torch.tensor(6.0)]
    norms = each_norm(gradients, torch.get_num_threads(), known)
    assert [round(float(norm), 4) for norm in norms] == [3.4641, 6.0]
    norm = norm_of_norms(norms)
    assert float(norm) == pytest.approx(math.sqrt(48))
    assert float(norm_of_norms([])) == 0.0
    assert norm_of_norms([torch.empty((), device="meta")]).device.type == "meta"
    assert [float(each) for each in each_norm([torch.ones(4)], 0)] == [2.0]
    assert float(clip_factor(torch.tensor(1e-6), 1e-6)) == pytest.approx(0.5)
    parameter = nn.Parameter(torch.ones(7))
    for limit in (1.0, 100.0):
        parameter.grad = torch.cat(gradients)
        nn.utils.clip_grad_norm_(parameter, limit)
        torch.testing.assert_close(torch.cat(gradients) * clip_factor(norm, limit), parameter.grad, rtol=1e-6, atol=0.0)


def test_norms_are_summed_by_more_threads_if_these_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to, before = [], torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    for threads in (before - 1, before):
        each_norm([torch.ones(4)], threads)
    assert set_to == []
    each_norm([torch.ones(4)], before + 1)
    assert set_to == [before + 1, before]


def test_a_factor_is_read_once_and_only_if_asked_for() -> None:
    read: list[None] = []
    waits = Factor(torch.tensor(2.0), number=lambda: read.append(None) or 3.0)  # type: ignore[func-returns-value]
    assert not waits.is_other_than(2.5)  # a tensor that the device may still compute
    assert [waits.number(), waits.number()] == [3.0, 3.0]
    assert len(read) == 1
    assert waits.is_other_than(1.0)
    assert not waits.is_other_than(3.0)
    assert Factor(torch.tensor(2.0)).number() == 2.0


def test_a_norm_is_known_until_its_gradient_changes() -> None:
    known, parameter = KnownNorms(), nn.Parameter(torch.ones(2))
    gradient, norm = torch.ones(2), torch.tensor(1.5)
    known.add(parameter, None, norm)
    assert known.of(parameter, gradient) is None
    known.add(parameter, gradient, norm)
    assert known.of(parameter, gradient) is norm
    assert known.of(parameter, None) is None
    assert known.of(parameter, torch.ones(2)) is None
    gradient += 1
    assert known.of(parameter, gradient) is None
    known.add(parameter, gradient, norm)
    known.clear()
    assert known.of(parameter, gradient) is None
    assert known.of(nn.Parameter(torch.ones(2)), None) is None


def norm_over(model: nn.Module, *shards: Any, max_norm: float = 0.0) -> GradientNorm:
    """The norm of the gradients of a model on one rank."""
    engine: Any = SimpleNamespace(
        model=model, loss_scale=SimpleNamespace(used=False), group=SimpleNamespace(size=1), device=torch.device("cpu")
    )
    return GradientNorm(engine, shards, max_norm, 1)  # type: ignore[arg-type]


def test_a_factor_is_a_number_only_if_some_shard_needs_one() -> None:
    norm = norm_over(nn.Linear(1, 1), max_norm=2.0)
    for needs_number in (False, True):
        factor = norm.factor(4.0, torch.tensor(16.0), needs_number=needs_number)
        assert isinstance(factor.value, float) == needs_number
        assert float(factor.value) == pytest.approx(0.25 * 0.5)
        assert factor.clips
    for given, limit in ((None, 2.0), (torch.tensor(16.0), 0.0)):
        norm.max_norm = limit
        plain = norm.factor(4.0, given, needs_number=False)
        assert (plain.value, plain.clips) == (0.25, False)


def test_limits_are_for_the_next_step_and_the_smallest_holds() -> None:
    norm = norm_over(nn.Linear(1, 1))
    assert (norm.limit, norm.is_wanted) == (None, False)
    for limit, holds in ((3.0, 3.0), (5.0, 3.0), (2.0, 2.0)):
        norm.ask(limit)
        assert (norm.limit, norm.is_wanted) == (holds, True)
    norm.refuse_stale()
    norm.of_all = torch.ones(())
    with pytest.raises(InputError, match="took the norm of several optimizers"):
        norm.refuse_stale()
    norm.forget_limit()
    norm.refuse_stale()
    assert (norm.limit, norm.is_wanted) == (None, True)  # asked for once: later norms are summed the same way
    norm.max_norm = 4.0
    norm.ask(9.0)
    assert norm.limit == 4.0


def test_ranks_compare_numbers_of_the_class_and_which_parameters_are_in_which_group() -> None:
    def said(*groups: tuple[int, ...], **options: Any) -> dict[str, str]:
        weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
        given = torch.optim.AdamW([{"params": [weights[at] for at in group], **options} for group in groups], lr=0.5)
        return user_of(given).options_to_compare(2.0)

    one = said((0, 1, 2), lr=torch.tensor(0.25), note="mine", foreach=False)
    assert {what.removesuffix(" of group 0"): value for what, value in one.items() if "groups" not in what} == {
        "the limit of the norm": "2.0", "lr": "0.25", "betas": "(0.9, 0.999)", "eps": "1e-08", "weight_decay": "0.01",
        "amsgrad": "False", "maximize": "False", "foreach": "False", "capturable": "False", "differentiable": "False",
        "decoupled_weight_decay": "True",
    }  # fmt: skip
    members = "the groups of its parameters"
    assert one[members].startswith("AdamW ")
    assert one[members] == said((0, 1, 2))[members] != said((0, 1), (2,))[members]


def test_loaded_options_are_those_of_the_class_and_how_it_steps_stays() -> None:
    given = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.5, foreach=False)
    saved = {**given.param_groups[0], "params": [0], "lr": 0.25, "foreach": True, "decoupled_weight_decay": False}
    betas = saved["betas"] = [torch.tensor(0.5), 0.75]
    del saved["maximize"]
    loaded = user_of(given).loaded_options(given.param_groups[0], saved)
    assert "params" not in loaded
    assert (loaded["lr"], loaded["foreach"], loaded["maximize"]) == (0.25, False, False)
    assert loaded["decoupled_weight_decay"]
    assert loaded["betas"] == betas
    assert loaded["betas"][0] is not betas[0]
    saved["amsgrad"] = True
    assert user_of(given).loaded_options(given.param_groups[0], saved)["amsgrad"]
    for options in ({"fused_kernels": True}, {"moments": "8bit"}):
        with pytest.raises(InputError, match=r"\(amsgrad=True\) are none with which Adam steps over whole shards"):
            user_of(given, **options).loaded_options(given.param_groups[0], saved)


@pytest.mark.parametrize(
    ("make", "predictable"),
    [(torch.optim.SGD, True), (HybridAdam, True), (type("Mine", (torch.optim.SGD,), {}), False)],
)
def test_steps_of_known_classes_are_predictable(make: Any, predictable: bool) -> None:
    assert user_of(make([nn.Parameter(torch.ones(1))], lr=0.5)).is_predictable is predictable


class Needing(torch.optim.SGD):
    """Cannot be made without a learning rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


def test_shards_get_an_optimizer_made_with_the_arguments_of_the_given_one() -> None:
    made = user_of(Needing([nn.Parameter(torch.ones(1))], 0.5)).over([])
    assert type(made) is Needing
    assert [group["lr"] for group in made.param_groups] == [0.5]


class Watching(torch.optim.Optimizer):
    """Notes in its groups what it has found, and makes a state in each step, and others in its constructor if asked."""

    def __init__(self, groups: Any, begins_with_states: bool) -> None:
        super().__init__(groups, {})
        for group in self.param_groups if begins_with_states else ():
            for weight in group["params"]:
                self.state[weight]["made"] = 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                group["found"] = (weight.item(), weight.grad is not None, sorted(self.state[weight]))
                self.state[weight]["stepped"] = weight.add_(1)


@pytest.mark.parametrize("begins_with_states", [False, True])
def test_a_rehearsal_is_always_of_a_first_step_with_the_given_options(begins_with_states: bool) -> None:
    states = ["made"] if begins_with_states else []
    rehearsal = Rehearsal(lambda groups: Watching([{"params": each} for each in groups], begins_with_states), 2)
    for stepped in (1, 0):
        given = [{"lr": 1.0, "more": 2}, {"lr": 2.0}]
        found = rehearsal.after(given, {stepped})
        assert found == [{**each, "found": (0.0, index == stepped, states)} for index, each in enumerate(given)]
    assert rehearsal.after([{}, {}], ())[0] == {"found": (0.0, False, states)}
