"""Ranks whose data uses other parameters: nobody hangs, nobody differs, and what a rank did not use counts as zero."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from elixir.chunk.lanes import Emulation
from elixir.plan.chunk_plan import MemoryHome
from elixir.plan.plan import Plan
from elixir.search import optimal_search
from elixir.wrapper import ElixirModule
from tests.common import inside
from tests.common.ddp import Twins, batch_of
from tests.common.parity import hf_loss, report_of
from tests.common.spawn import on_each_rank, run_ranks, run_to_end
from tests.common.tiny_models import tiny

WIDTH = 32


class Experts(nn.Module):
    """Layers of experts that run only if the batch says so, each with separate parameters.

    `chosen` names the experts that this rank's batch needs; the traced step needs all.
    """

    def __init__(self, layers: int = 2, experts: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
                for _ in range(experts)
            )
            for _ in range(layers)
        )
        # Their gradients come without a use in backward, so nothing tells how far backward is when they do.
        self.tables = nn.ModuleList(nn.Embedding(128, WIDTH) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...], extra: bool = True) -> torch.Tensor:
        x = self.first(x).tanh()
        for table, norm, experts in zip(self.tables, self.norms, self.layers, strict=True):
            x = x + table(torch.arange(len(x)))
            x = x + sum(expert(norm(x)) for index, expert in enumerate(experts) if index in chosen)  # type: ignore[arg-type]
        result: torch.Tensor = self.last(x)
        return result + self.extra(x) if extra else result


def _loss(model: nn.Module, inp: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = model(**inp).square().mean()
    return result


def _twins(rank: int, kind: str, *, frozen: bool = False, **options: Any) -> tuple[Twins, torch.Tensor]:
    torch.manual_seed(0)
    model = Experts()
    model.layers.requires_grad_(not frozen)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))
    return Twins(model, {"x": x, "chosen": (0, 1, 2, 3)}, kind, loss=_loss, unused=True, **options), x


_CHOICES = (  # per step and rank
    ((0, 1, 2, 3), (0, 1, 2, 3)),
    ((0, 1), (2, 3)),
    ((), (1,)),
    ((0, 1, 2, 3), ()),
    ((3,), (3,)),
    ((0, 2), (0, 2, 3)),
)
"""Also experts that nobody uses, which AdamW must not even decay."""


def _routing(
    rank: int, world_size: int, kind: str, wrap: dict[str, Any], frozen: bool = False, steps: int = len(_CHOICES) + 2
) -> None:
    if "emulation" in wrap:
        wrap = {"emulation": Emulation(delay_s=2e-3, seed=rank)}
    twins, x = _twins(rank, kind, split_number=12, wrap=wrap, frozen=frozen)
    for choices in (_CHOICES * 2)[:steps]:  # two more, with states of all
        chosen = choices[rank % len(choices)]
        twins.backward({"x": x, "chosen": chosen, "extra": rank == 0 or 1 in chosen})
        twins.step()
    twins.check()
    # In every step the network carried what the plan says, whatever each rank used.
    assert twins.module.last_report is not None
    assert twins.module.last_report.deviations == 0
    twins.close()


@pytest.mark.parametrize("kind", ["host", "device", "mixed", "resident"])
def test_experts_that_differ_between_ranks(kind: str) -> None:
    run_ranks(2, _routing, kind, {})


@pytest.mark.slow
def test_frozen_experts_that_differ_between_ranks() -> None:
    # Experts are gathered, but have no reductions that others would wait for.
    run_ranks(2, _routing, "host", {}, True)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [{"evict_always": True}, {"prefetch": False}, {"emulation": None}])
def test_experts_that_differ_under_other_conditions(wrap: dict[str, Any]) -> None:
    run_ranks(2, _routing, "host", wrap)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "mixed", "resident"])
def test_experts_that_differ_between_four_ranks(kind: str) -> None:
    run_ranks(4, _routing, kind, {}, False, 2 * len(_CHOICES))


_HOME: dict[str, MemoryHome] = {"resident": "device", "host": "host", "mixed": "host"}


def _state_bytes(stepper: Any, plan: Plan, home: MemoryHome) -> int:
    """Bytes of masters and states of all chunks whose states live there."""
    parts = [part for part in stepper.shards if part.chunk.plan.update_home == home]
    kept = sum(tensor.nbytes for part in parts for tensor in part.states.tensors.values())
    return kept + sum(part.chunk.masters.nbytes for part in parts if part.chunk.masters is not None)


def _check_told(twins: Twins, told: list[str], kind: str) -> None:
    """The run says that its plan has no memory for what came, and the report shows how much it took."""
    report = report_of(twins.module)
    assert {"device": "device_buffers", "host": "host_peak"}[_HOME[kind]] in report.surprises()
    if kind != "mixed":  # whose homes are no planner's, so that the first step differs already
        (message,) = told
        assert "gradients came to" in message
        assert "that got none in the traced step" in message


@pytest.mark.parametrize("kind", ["resident", "host", "mixed"])
@on_each_rank(2)
def test_gradients_come_to_chunks_that_had_none_in_the_traced_step(rank: int, world_size: int, kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))
    traced = {"x": x, "chosen": (0,), "extra": False}
    twins = Twins(Experts(), traced, kind, loss=_loss, unused=True, split_number=20)
    flow = inside.gradients(twins.module)
    foreseen = {index for index, own in flow.by_chunk.items() if own.chunk.plan.reduce_order is not None}
    assert foreseen < set(flow.by_chunk)
    for _ in range(2):
        twins.backward()
        twins.step()
    moved = report_of(twins.module)
    assert moved.observed["network"] == moved.predicted["network"]
    assert not any(own.memory.tensor.numel() for index, own in flow.by_chunk.items() if index not in foreseen)
    told: list[str] = []
    logger = logging.getLogger("elixir.wrapper.account.step_account")
    logger.addFilter(lambda record: told.append(record.getMessage()) or True)
    for choices in (_CHOICES[0], *_CHOICES):
        chosen = choices[rank if kind == "resident" else 0]  # what is gathered must be so on all ranks alike
        for _ in range(2):
            twins.backward({"x": x, "chosen": chosen, "extra": 1 in chosen}, scale=0.5)
            # What the plan does not foresee leaves the gradient blocks, too, and makes room for what it does.
            assert not any(own.opened for own in flow.by_chunk.values())
        twins.step()
        assert flow.extra_blocks == 0 or choices is not _CHOICES[0]
        seen, stepper = inside.arena(twins.module), inside.stepper(twins.module)
        assert seen.parts(_HOME[kind])["optimizer_states"] == _state_bytes(stepper, twins.plan, _HOME[kind])
    _check_told(twins, told, kind)
    twins.backward()  # as traced; what has had a gradient once is reduced in each step, and the report knows
    twins.step()
    moved = twins.module.last_report
    assert moved.observed["network"] == moved.predicted["network"]
    twins.finish()


def _evaluation(rank: int, world_size: int) -> None:
    twins, x = _twins(rank, "host", split_number=12)
    for choices in _CHOICES[1:5]:
        inp = {"x": x, "chosen": choices[rank]}
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(twins.module(**inp), twins.plain.module(**inp))
        twins.backward(inp)
        twins.step()
    twins.close()


def test_experts_that_differ_in_evaluation() -> None:
    run_ranks(2, _evaluation)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["host", "mixed"])
@on_each_rank(2)
def test_mixtral_with_tokens_for_other_experts(rank: int, world_size: int, kind: str) -> None:
    model = tiny("mixtral", layers=2)
    inp = batch_of(model, rank, world_size)
    if rank == 1:
        # One token over and over: its router picks two of the four experts in each layer, the others get no tokens.
        inp = {name: torch.full_like(value, 7) for name, value in inp.items()}
    twins = Twins(model, inp, kind, loss=hf_loss, unused=True)
    twins.train()
    twins.finish()


class _Twice(nn.Module):
    """Uses its first layer again at the end if told to, which the traced step does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.layers[0](x) if again else x  # type: ignore[no-any-return]


@on_each_rank(2)
def test_what_the_plan_does_not_foresee_may_happen_on_all_ranks_alike(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))
    twins = Twins(_Twice(), {"x": x}, "host", loss=_loss)
    for step in range(6):
        twins.backward({"x": x, "again": step % 2 == 1})
        twins.step()
        assert twins.module.last_report is not None
        assert (twins.module.last_report.deviations > 0) == (step % 2 == 1)
    twins.finish()


def _generation(rank: int, world_size: int, kind: str, longer: int) -> None:
    model = tiny("opt")
    twins = Twins(model, batch_of(model, rank, world_size), kind)
    ids = twins.inp["input_ids"][:, :6]
    for _ in range(2):
        twins.train(1)
        options = {"input_ids": ids, "max_new_tokens": 4 + longer * rank, "do_sample": False}
        assert torch.equal(twins.module.generate(**options), twins.plain.module.generate(**options))
    twins.finish()


@pytest.mark.parametrize("kind", ["host", "mixed"])
def test_generation_between_steps(kind: str) -> None:
    run_ranks(2, _generation, kind, 0)


def test_generation_that_is_longer_on_one_rank_is_refused() -> None:
    for outcome in run_to_end(2, _generation, "host", 1, group_timeout_s=6.0):
        assert outcome.error is not None
        assert "RankError" in outcome.error
        assert "on all ranks alike" in outcome.error


@pytest.mark.slow
def test_generation_may_be_longer_on_one_rank_where_nothing_is_gathered() -> None:
    run_ranks(2, _generation, "resident", 1)


def _evaluation(rank: int, world_size: int) -> None:
    model = tiny("llama").eval()
    ids = batch_of(model, rank, world_size)["input_ids"][:, :6]
    options = {"input_ids": ids, "max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    expected = model.generate(**options)
    plan = optimal_search(
        model, world_size, generate=(6, 8), hardware="cpu", device_memory="400KiB", host_budget="64MiB", placement="cpu"
    )
    wrapped = ElixirModule(model, plan)
    assert torch.equal(wrapped.generate(**options), expected)
    counts = inside.counts(wrapped)
    assert counts.loads > 0
    assert counts.demand_loads == 0
    wrapped.close()


def test_a_forward_plan_generates() -> None:
    run_ranks(2, _evaluation)
