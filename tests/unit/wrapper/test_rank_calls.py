"""Calls of a wrapped model on two ranks, each a thread: what every rank gets, and what an error on one does to both."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch

from elixir.errors import InputError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.audit import audit
from tests.common.parity import report_of, take_step
from tests.common.rank_threads import results
from tests.unit.wrapper.test_rank_threads import Rank, Situation, batch_of, loss_of, model_of, plan_of

HOMES = ("host", "device", "mixed")


def mean_gradients(numbers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss of both ranks, summed over the batches with these numbers."""
    model = model_of().eval()
    for number in numbers:
        for rank in range(2):
            (loss_of(model, batch_of(rank, number)) / 2).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return torch.cat([each.flatten() for each in gradients.values()]).norm().item()


def end_right(run: Rank, gradients: dict[str, torch.Tensor]) -> None:
    """Compares the norm of what has come with that of these gradients, steps, and closes the model."""
    assert run.module.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(gradients), rel=1e-5)
    run.optimizer.step()
    run.optimizer.zero_grad()
    audit(run.module)
    run.module.close()


@pytest.mark.parametrize("homes", HOMES)
def test_state_dicts_are_whole_on_all_ranks_or_on_the_first(homes: str) -> None:
    expected = model_of().state_dict()

    def work(rank: int) -> None:
        run = Rank(Situation(homes=homes), rank)
        found = run.module.state_dict()
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        inner: Any = run.module.module
        inner[5].running_mean.add_(1.0 + rank)
        assert torch.equal(found["5.running_mean"], expected["5.running_mean"]), "what was given is the caller's"
        found = run.module.state_dict()
        assert torch.equal(found["5.running_mean"], expected["5.running_mean"] + 1.0), "all get the buffers of rank 0"
        inner[5].running_mean.sub_(1.0 + rank)
        first = run.module.state_dict(rank0_only=True)
        assert list(first) == (list(expected) if rank == 0 else [])
        some = run.module.state_dict(only=lambda name, parameter: parameter.requires_grad, dtype=torch.float64)
        assert [name for name in expected if name not in some] == ["0.bias"]
        assert some["0.weight"].dtype == torch.float64
        assert torch.equal(some["4.bias"].float(), expected["4.bias"])
        other = {f"_orig_mod.{name}": each + 1 for name, each in expected.items()}
        assert not any(run.module.load_state_dict(other))
        assert all(torch.equal(each, expected[name] + 1) for name, each in run.module.state_dict().items())
        with pytest.raises(InputError, match="assign=True"):
            run.module.load_state_dict(expected, assign=True)
        audit(run.module)
        run.module.close()

    results(2, work)


@pytest.mark.parametrize("homes", HOMES)
def test_gradients_are_the_mean_and_their_norm_is_that_of_all(homes: str) -> None:
    once, twice = mean_gradients((0,)), mean_gradients((0, 1))

    def work(rank: int) -> None:
        run = Rank(Situation(homes=homes), rank)
        run.optimizer.backward(loss_of(run.module, batch_of(rank, 0)))
        assert run.module.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(once), rel=1e-5)
        run.optimizer.backward(loss_of(run.module, batch_of(rank, 1)))
        assert run.module.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(twice), rel=1e-5)
        with pytest.raises(InputError, match="norm_type is 1"):
            run.module.clip_grad_norm_(1.0, norm_type=1.0)
        run.module.zero_grad()
        assert run.module.clip_grad_norm_(1e9).item() == 0.0
        run.optimizer.backward(loss_of(run.module, batch_of(rank, 0)))
        assert run.module.clip_grad_norm_(1e9).item() == pytest.approx(norm_of(once), rel=1e-5)
        run.optimizer.zero_grad()
        assert not inside.holds_gradients(run.module)
        audit(run.module)
        run.module.close()

    results(2, work)


def test_an_overflow_on_one_rank_leaves_out_the_step_on_both() -> None:
    plan = plan_of(2, "host", torch.float32, unified_dtype=torch.float16)

    def work(rank: int) -> list[float]:
        run = Rank(Situation(homes="host"), rank, plan)
        optimizer = run.optimizer
        scales = []
        for number in range(3):
            before = run.weights()
            loss = loss_of(run.module, batch_of(rank, number))
            take_step(optimizer, loss * float("inf") if number == rank == 1 else loss)
            scales.append(optimizer.loss_scale)
            same = all(torch.equal(each, before[name]) for name, each in run.weights().items())
            assert same == (number == 1)
            report = report_of(run.module)
            assert report.observed["device_to_host"] == report.predicted["device_to_host"]
        run.module.close()
        return scales

    one, two = results(2, work)
    assert one == two
    assert one[1] == one[0] / 2 == one[2]


@pytest.mark.parametrize("homes", HOMES)
def test_gathered_weights_are_whole_and_what_rank_0_writes_is_that_of_all(homes: str) -> None:
    expected = model_of().state_dict()

    def work(rank: int) -> None:
        run = Rank(Situation(homes=homes), rank)
        inner: Any = run.module.module
        with run.module.gathered([inner[2].weight]):
            assert torch.equal(inner[2].weight, expected["2.weight"])
        with run.module.gathered(run.module):
            assert all(torch.equal(each, expected[name]) for name, each in inner.named_parameters())
        with run.module.gathered([inner[2].weight, inner[4].bias], write=True), torch.no_grad():
            inner[2].weight.fill_(3.0)
            inner[4].bias.add_(1.0)
        found = run.module.state_dict()
        changed = {"2.weight": torch.full_like(expected["2.weight"], 3.0), "4.bias": expected["4.bias"] + 1}
        assert all(torch.equal(found[name], changed.get(name, expected[name])) for name in expected)
        audit(run.module)
        run.step(0)
        run.module.close()

    results(2, work)


def test_a_forward_that_raises_on_both_ranks_is_over_and_the_next_step_is_right() -> None:
    """Hooks raise once in a forward and once in a backward."""
    expected = mean_gradients((2,))

    def work(rank: int) -> None:
        run = Rank(Situation(homes="host"), rank)
        run.step(7)
        fresh = copy.deepcopy(model_of().state_dict())
        run.module.load_state_dict(fresh)
        inner: Any = run.module.module

        def fails(*_: object) -> None:
            raise ZeroDivisionError

        for register in (inner[2].register_forward_pre_hook, inner[2].register_full_backward_pre_hook):
            handle = register(fails)
            with pytest.raises(ZeroDivisionError):
                run.optimizer.backward(loss_of(run.module, batch_of(rank, 1)))
            handle.remove()
            run.optimizer.zero_grad()
        run.optimizer.backward(loss_of(run.module, batch_of(rank, 2)))
        end_right(run, expected)

    results(2, work)


def test_a_rank_may_use_fewer_layers_than_the_others() -> None:
    """The layers that its data skips count as zero, and loads are the same on all."""
    plain = model_of().eval()
    both = loss_of(plain, batch_of(0, 0)) / 2 + plain[:2](batch_of(1, 0)).pow(2).mean() / 2
    both.backward()
    expected = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}

    def work(rank: int) -> None:
        run = Rank(Situation(homes="host"), rank)
        inner: Any = run.module.module
        if rank:
            inner.forward = lambda batch: inner[:2](batch)
        loss = run.module(batch_of(rank, 0)).pow(2).mean()
        run.optimizer.backward(loss)
        end_right(run, expected)

    results(2, work)


def test_a_rank_may_replace_an_attribute_in_the_memory_of_a_weight() -> None:
    """The weight is gathered for the other rank's attribute, which takes both."""

    def work(rank: int) -> bool:
        inner: Any = model_of().eval()
        inner[4].kept = inner[4].weight.detach()
        module = ElixirModule(inner, plan_of(2, "host", torch.float32), device="cpu")
        optimizer = ElixirOptimizer(module, torch.optim.SGD([*inner[4].parameters()], lr=1.0))
        if rank == 0:
            inner[4].kept = None
        optimizer.backward(loss_of(module, batch_of(rank, 0)))
        optimizer.step()
        weight = module.state_dict()["4.weight"]
        module.close()
        return rank == 0 or torch.equal(inner[4].kept, weight)

    assert results(2, work) == [True, True]


@pytest.mark.parametrize("homes", HOMES)
def test_no_sync_is_a_context_that_changes_nothing(homes: str) -> None:
    """Gradients, their norm, buffers, weights and what is moved are the same bits and bytes as outside of it."""

    def work(rank: int, silent: bool) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int]]:
        run = Rank(Situation(homes=homes), rank)
        run.module.module[5].train()  # type: ignore[index]
        norms = []
        with run.module.no_sync() if silent else contextlib.nullcontext():
            for number in range(2):
                for micro in range(2):
                    run.optimizer.backward(loss_of(run.module, batch_of(rank, 2 * number + micro)))
                norms.append(run.module.clip_grad_norm_(1e9).item())
                run.optimizer.step()
                run.optimizer.zero_grad()
        report = report_of(run.module)
        moved = {key: report.observed[key] for key in ("host_to_device", "device_to_host", "network")}
        assert moved == {key: report.predicted[key] for key in moved}
        audit(run.module)
        weights = run.weights()
        run.module.close()
        with pytest.raises(InputError, match="closed"):
            run.module.no_sync()
        return norms, weights, moved

    inside_of_it, outside = (results(2, functools.partial(work, silent=silent)) for silent in (True, False))
    for (norms, weights, moved), (their_norms, their_weights, their_moved) in zip(inside_of_it, outside, strict=True):
        assert (norms, moved) == (their_norms, their_moved)
        assert all(torch.equal(each, their_weights[name]) for name, each in weights.items())
