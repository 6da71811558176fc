"""Explains where every chunk of a plan is: what the step would take if it lived elsewhere, and whether that would fit.

One chunk is moved at a time, all else staying as it is, and the changed plan is simulated by the same model as the
search's. So a number here answers "what if only this were different", not "what if the search had begun elsewhere"; for
that there are the levers, which plan again.

A search passes over a shorter step that loses more in another scenario than the plan does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.plan.chunk_plan import ChunkPlan, Home, StateHome
from elixir.plan.plan import HasPlan, Plan, plan_of
from elixir.plan.prediction import Judgement
from elixir.search.advise.answer import Answer, Effect
from elixir.search.planner import PREFETCH_DEPTH
from elixir.search.problem.from_plan import packed_step_of, placement_of, setting_of
from elixir.search.problem.memory_model import MemoryModel
from elixir.search.problem.placement import Placement
from elixir.search.propose.candidate import Candidate, weigh
from elixir.search.propose.family import levels_of
from elixir.search.propose.judge import tie
from elixir.search.propose.sizes import SearchSpace
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace
from elixir.units import format_bytes

Weights = Literal["resident", "device", "host", "files"]
"""Gathered on the device for the whole step; streamed from a shard there; from the host; from files."""
States = StateHome | Literal["none"]
"""The memory of gradients, master weights and optimizer states; a frozen chunk has none."""
NEGLIGIBLE_SHARE = 1e-3
"""Share of the step: a smaller change of one chunk is called no difference. Rates are not known nearly as well."""


@dataclass(frozen=True)
class Spot:
    """A place in which a chunk may live."""

    weights: Weights
    states: States

    @classmethod
    def of(cls, home: Home, trainable: bool) -> Spot:
        """The spot that a home is for a chunk, which has states if it is trainable."""
        return cls(home.weights, home.states if trainable else "none")

    def __str__(self) -> str:
        weights = {
            "resident": "weights resident on the device",
            "device": "weights streamed from the device",
            "host": "weights streamed from the host",
            "files": "weights streamed from their files",
        }[self.weights]
        return weights if self.states == "none" else f"{weights}, states on the {self.states}"

    @property
    def short(self) -> str:
        """The text for tables, such as ``from host / host``."""
        weights = self.weights if self.weights == "resident" else f"from {self.weights}"
        return weights if self.states == "none" else f"{weights} / {self.states}"


@dataclass(frozen=True)
class Difference:
    """A plan with one thing changed, against the plan as it is."""

    step_s: float
    change_s: float
    """Negative where the step gets shorter."""
    moved_change_bytes: int
    """Over all links, per rank and step."""
    device_change_bytes: int
    """Difference of the peak."""
    host_change_bytes: int
    lacks_device_bytes: int
    """Bytes by which the peak exceeds the budget; 0 if it fits."""
    lacks_host_bytes: int
    lacks_disk_bytes: int
    block_count: int
    passed_over: Judgement | None = None
    """The scenario for which a search leaves a faster one that fits: it loses more there than the plan anywhere."""

    @property
    def fits(self) -> bool:
        """Whether all budgets hold it."""
        return not (self.lacks_device_bytes or self.lacks_host_bytes or self.lacks_disk_bytes)


@dataclass(frozen=True)
class Elsewhere:
    """One chunk in another spot."""

    spot: Spot
    change: Difference


@dataclass(frozen=True)
class ChunkReasons:
    """One chunk: what it is, where it is, and what every other spot would change."""

    chunk: int
    first_parameter: str
    last_parameter: str
    weight_bytes: int
    spot: Spot
    elsewhere: tuple[Elsewhere, ...]
    early: bool = False
    """Whether it is updated early."""


@dataclass(frozen=True)
class Explanation:
    """All of a plan; see the fields."""

    step_s: float
    bound_by: str
    critical_s: dict[str, float]
    """Seconds by resource on the longest chain of work of the step; sums to `step_s`."""
    chunks: tuple[ChunkReasons, ...]
    blocks: tuple[Difference, ...]
    """One rCache block fewer and one more, where that is possible."""
    levers: tuple[Effect, ...]
    """Changes of the machine; empty where they were not asked for."""
    after_norm: Difference | None = None
    """The plan without early updates; None if it has none."""
    changes: tuple[Effect, ...] = ()
    """Changes of the training, those of `Answer.levers`; likewise."""


def explain(
    plan: Plan | HasPlan,
    trace: StepTrace,
    hardware: HardwareProfile,
    *,
    levers: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> Explanation:
    """Explains what every chunk, one block, and each of the machine's resources mean to the step.

    Args:
        plan: made from `trace`, alone or in the answer of a search.
        trace: the step that was planned.
        hardware: the machine whose rates count.
        levers: also plan again with more of what the machine is made of (`Answer.machine_levers`), and with changes
            of the training (`Answer.levers`).
        progress: called with what comes next, how much is done, and of how much.

    Raises:
        InputError, InputTypeError: the plan is not of this trace.
    """
    plan = plan_of(plan)
    step = simulate_step(plan, trace, hardware)
    variants = _Variants(plan, trace, hardware)
    chunks = []
    for index in range(len(plan.chunks)):
        if progress is not None:
            progress(f"chunk {index}", index, len(plan.chunks))
        chunks.append(variants.reasons(index))
    again = Answer.of(plan, trace, hardware)
    return Explanation(
        step_s=step.step_s,
        bound_by=step.bound_by,
        critical_s=step.critical_s,
        chunks=tuple(chunks),
        blocks=tuple(variants.blocks()),
        after_norm=variants.after_norm(),
        levers=again.machine_levers(progress) if levers else (),
        changes=again.levers() if levers else (),
    )


class _Variants:
    """The plan in the forms of the search, ready to be weighed with something changed."""

    def __init__(self, plan: Plan, trace: StepTrace, hardware: HardwareProfile) -> None:
        self._plan, self._placement = plan, placement_of(plan)
        setting = setting_of(plan, hardware.ranks_per_host(plan.world_size), hardware.device_kind)
        self._model = MemoryModel(packed_step_of(plan, trace), setting)
        self._check(trace)
        if not plan.block_bytes:
            # Nothing is streamed; a variant that does needs blocks that hold any chunk.
            largest = max(chunk.weight_bytes for chunk in plan.chunks)
            self._model = MemoryModel(packed_step_of(replace(plan, block_bytes=largest), trace), setting)
        self._space = SearchSpace(self._model.work.facts.trace, hardware, setting)  # the step as it runs under the plan
        self._gathered = setting.world_size > 1 and all(chunk.resident for chunk in plan.chunks)
        self._depth = plan.prefetch_depth if plan.block_count else PREFETCH_DEPTH * plan.overlap
        self._base = self._weighed(self._placement, plan.block_count)

    def reasons(self, index: int) -> ChunkReasons:
        """One chunk, and what every other home that a search could have given it would change."""
        chunk = self._plan.chunks[index]
        named = chunk.parameters or (None,)
        return ChunkReasons(
            chunk=index,
            first_parameter=named[0].name if named[0] else "",
            last_parameter=named[-1].name if named[-1] else "",
            weight_bytes=chunk.weight_bytes,
            spot=Spot.of(chunk.home, chunk.trainable),
            elsewhere=tuple(self._elsewhere(index, chunk)),
            early=chunk.home.early,
        )

    def _elsewhere(self, index: int, chunk: ChunkPlan) -> Iterator[Elsewhere]:
        """The chunk at other homes, updated early if it is, and can be there."""
        possible, homes = list(levels_of(self._model, index, gathered=self._gathered)), self._placement.homes
        if self._plan.disk_budget_bytes and chunk.trainable:
            possible += [home.having("disk") for home in possible if home.states == "host"]
        for home in Home:
            if home in possible and home != chunk.home.having():
                there = home.having(update="early") if chunk.home.early and home.states == "host" else home
                moved = Placement((*homes[:index], there, *homes[index + 1 :]))
                change = self._against(self._weighed(moved, self._plan.block_count))
                yield Elsewhere(Spot.of(home, chunk.trainable), change)

    def after_norm(self) -> Difference | None:
        """The difference that it makes to have no early updates; None if there are none."""
        if not self._plan.has_early_updates:
            return None
        return self._against(self._weighed(self._placement.updated_early(()), self._plan.block_count))

    def blocks(self) -> Iterator[Difference]:
        """One block fewer, one more."""
        now = self._plan.block_count
        for count in (now - 1, now + 1):
            found = self._weighed(self._placement, count)
            if found.schedule.blocks == count:
                yield self._against(found)

    def _weighed(self, placement: Placement, wanted_blocks: int) -> Candidate:
        streamed = placement.resident.count(False)
        depth = self._depth if streamed else 0
        schedule = self._model.work.schedule(placement.residents, depth)
        # Below the first the schedule cannot be walked, beyond the second a block would never be used.
        blocks = max(min(wanted_blocks, streamed), schedule.min_blocks)
        return weigh(self._model, placement, blocks, depth, self._space.cost)

    def _against(self, other: Candidate) -> Difference:
        base, plan = self._base, self._plan
        change = Difference(
            step_s=other.seconds["total"],
            change_s=other.seconds["total"] - base.seconds["total"],
            moved_change_bytes=_moved_bytes(other) - _moved_bytes(base),
            device_change_bytes=other.need.device_bytes - base.need.device_bytes,
            host_change_bytes=other.need.host_bytes - base.need.host_bytes,
            lacks_device_bytes=max(other.need.device_bytes - plan.device_budget_bytes, 0),
            lacks_host_bytes=max(other.need.host_bytes - plan.host_budget_bytes, 0),
            lacks_disk_bytes=max(other.need.disk_bytes - plan.disk_budget_bytes, 0),
            block_count=other.schedule.blocks,
        )
        faster = change.fits and change.change_s < -NEGLIGIBLE_SHARE * base.seconds["total"]
        return replace(change, passed_over=self._loses_more(other)) if faster else change

    def _loses_more(self, other: Candidate) -> Judgement | None:
        """The scenario in which it has its worst regret, unless that is clearly less than the plan's own."""
        known = self._plan.predicted.judgements
        found = [replace(it, step_s=other.seconds_by(self._space.on(it.scenario).cost)["total"]) for it in known]
        worst = max(found, key=lambda it: it.regret, default=None)
        own = max((it.regret for it in known), default=0.0)
        return worst if worst is not None and worst.regret > own - tie(self._base) else None

    def _check(self, trace: StepTrace) -> None:
        """The order of use does not depend on the batch, but memory and time do; so they must agree."""
        plan = self._plan
        expected = plan.predicted.device_parts
        found = self._model.need(self._placement, plan.block_count).device_parts
        for part, amount in expected.items():
            if found.get(part, 0) != amount:
                raise InputError(
                    f"the plan counts {format_bytes(amount)} of {part.replace('_', ' ')} at its device peak, this "
                    f"trace of {trace.model_name} gives {format_bytes(found.get(part, 0))}; give the trace the plan "
                    "was made from, or the same batch, sequence length and checkpointing"
                )


def _moved_bytes(candidate: Candidate) -> int:
    moved = candidate.moved
    return moved.link_bytes + moved.network_bytes + moved.replicas_bytes + 2 * moved.disk_bytes
