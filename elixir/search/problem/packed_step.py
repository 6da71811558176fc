"""A traced step seen through a packing: the order in chunk ids, what each chunk needs, and when its gradient comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from operator import itemgetter

import numpy as np

from elixir.plan.chunk_plan import ChunkUse, Phase
from elixir.schedule import Schedule, required_chunks
from elixir.search.problem.packing import Packing
from elixir.search.problem.placement import Floats, Ints
from elixir.step_trace import StepTrace, enclosing
from elixir.units import dtype_bytes

OrderEntry = tuple[Phase, tuple[int, ...], int]
"""Phase, chunks and pin of one entry of the order."""

RESIDENTS_KEPT = 64
"""Sets of resident chunks whose schedules are kept, per packing. A search looks at thousands, and comes back to few."""


class StepFacts:
    """Facts of a trace that do not depend on the packing. Made once per search.

    Time is cut into *stretches* of accesses between which no gradient arrives, and one last stretch for the
    optimizer step. `live_bytes[s]` is the highest live amount within the stretch.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        accesses = trace.accesses
        first_backward = next((i for i, access in enumerate(accesses) if access.phase != "forward"), len(accesses))
        self._grad_access = [param.grad_access for param in trace.parameters]
        arrivals = sorted({access for access in self._grad_access if access is not None})
        edges = {0, first_backward, *arrivals, *(access + 1 for access in arrivals)}
        self.edges: Ints = np.array(sorted(edge for edge in edges if edge < len(accesses)), dtype=np.int64)
        live = np.array([access.live_bytes for access in accesses], dtype=np.int64)
        at_step = trace.input_bytes + trace.workspace_bytes
        self.live_bytes: Ints = np.concatenate((np.maximum.reduceat(live, self.edges), [at_step]))
        self.stretches = len(self.live_bytes)
        self.first_backward_stretch = int(np.searchsorted(self.edges, first_backward))
        self.stretch_of: dict[int, int] = dict(
            zip(arrivals, (np.searchsorted(self.edges, arrivals, side="right") - 1).tolist(), strict=True)
        )
        self.gradients: Ints = np.array(
            [
                (index, self.stretch_of[param.grad_access], param.numel * dtype_bytes(param.dtype))
                for index, param in enumerate(trace.parameters)
                if param.grad_access is not None
            ],
            dtype=np.int64,
        ).reshape(-1, 3)
        """A row for each parameter that gets one: its index, the stretch in which the gradient arrives, its bytes."""
        self.arriving_bytes = self._arriving(live)
        """By stretch, how much higher `live_bytes` is with the gradients that autograd holds."""

        # Accesses without parameters count for the live bytes above, but there is nothing to fetch for them.
        sets: dict[tuple[int, ...], int] = {}
        reads = [bool(access.parameters) for access in accesses]
        self.reading: Ints = np.flatnonzero(reads)
        """Accesses with parameters."""
        self._uses_until: list[int] = np.cumsum(reads).tolist()
        self.uses: list[tuple[Phase, int, int]] = [
            (
                access.phase,
                sets.setdefault(access.parameters, len(sets)),
                self._uses_until[min(access.pin_until, len(accesses) - 1)] - 1,
            )
            for access in accesses
            if access.parameters
        ]
        """Per access that has any: phase, index into `parameter_sets`, and the last access it is pinned through."""
        self.parameter_sets = tuple(sets)
        self.last_access: dict[int, int] = {
            parameter: index for index, access in enumerate(accesses) for parameter in access.parameters
        }
        """Parameter -> the last access that reads it."""

    def _arriving(self, live: Ints) -> Ints:
        known = [access.arriving_bytes for access in self.trace.accesses]
        if None in known:
            return self.largest_arriving_bytes
        found: Ints = np.zeros(self.stretches, dtype=np.int64)
        with_them = np.maximum.reduceat(live + np.array(known, dtype=np.int64), self.edges)
        found[:-1] = with_them - self.live_bytes[:-1]
        return found

    @property
    def largest_arriving_bytes(self) -> Ints:
        """By stretch, the largest gradient as if autograd had it through all of backward."""
        found: Ints = np.zeros(self.stretches, dtype=np.int64)
        found[self.first_backward_stretch : -1] = _largest_arrival(self.trace)  # the step begins without
        return found

    def last_use(self, access: int) -> int:
        """Index into `uses` of the last access with parameters up to `access`; 0 before the first."""
        return max(0, self._uses_until[access] - 1)

    def arrivals(self, parameters: Sequence[int]) -> tuple[int, int] | None:
        """Accesses at which the first and the last of their gradients arrive; None if they get none."""
        found = [access for index in parameters if (access := self._grad_access[index]) is not None]
        return (min(found), max(found)) if found else None


@dataclass(frozen=True)
class ChunkFacts:
    """One chunk as the memory and the cost model see it. Bytes and elements are those of the gathered chunk."""

    bytes: int
    numel: int
    low_precision: bool
    """Its weights have fewer bits than fp32, so that an optimizer keeps a master copy."""
    trainable: bool
    outsized: bool
    grad_bytes: int
    """0 where no parameter of it gets a gradient."""
    grad_stretches: tuple[int, int] | None
    """Stretches in which its first and its last gradient arrive."""
    matrices: tuple[tuple[int, int], ...] = ()
    """Rows and columns of its parameters, if they are stepped as whole matrices."""
    offsets: tuple[int, ...] = ()
    """The first element of each parameter in the chunk."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of one element."""
        return self.bytes // self.numel


class PackedStep:
    """One packing of one trace.

    Attributes:
        entries: the recorded order in chunk ids; consecutive accesses of the same chunks in one phase are one entry.
        required: per entry of `order`, the chunks that lie on the device while it runs: used by it or pinned from
            before.
        first_backward: the first entry that is not forward.
    """

    def __init__(self, facts: StepFacts, packing: Packing) -> None:
        self.facts = facts
        self.packing = packing
        self.arrivals = tuple(facts.arrivals(chunk.parameters) for chunk in packing.chunks)
        """The accesses at which first and last gradient of each chunk arrive; None if it gets none."""
        self.chunks = tuple(self._chunk_facts(index) for index in range(len(packing.chunks)))
        self.entries, self.entry_of = _collapse(facts, packing)
        self.required = required_chunks((chunks, pin_until) for _, chunks, pin_until in self.entries)
        self.first_backward = next(
            (entry for entry, (phase, _, _) in enumerate(self.entries) if phase != "forward"), len(self.entries)
        )
        self._schedules: dict[frozenset[int], dict[int, Schedule]] = {}  # by resident chunks, and by depth

    @property
    def order(self) -> tuple[ChunkUse, ...]:
        """The entries as a plan has them."""
        return tuple(ChunkUse(phase=phase, chunks=chunks, pin_until=until) for phase, chunks, until in self.entries)

    def schedule(self, residents: frozenset[int], prefetch_depth: int) -> Schedule:
        """The order with resident chunks left out; positions stay those of `order`."""
        by_depth = self._schedules.get(residents)
        if by_depth is None:
            if len(self._schedules) == RESIDENTS_KEPT:
                del self._schedules[next(iter(self._schedules))]
            by_depth = self._schedules[residents] = {}
        found = by_depth.get(prefetch_depth)
        if found is None:
            of_another = next((schedule.policy for schedule in by_depth.values()), None)
            found = by_depth[prefetch_depth] = Schedule(of_another or self._without(residents), prefetch_depth)
        return found

    def _without(self, residents: frozenset[int]) -> list[tuple[int, ...]]:
        return [
            chunks if residents.isdisjoint(chunks) else tuple(chunk for chunk in chunks if chunk not in residents)
            for chunks in self.required
        ]

    def arrived_grad_bytes(self, stretches: Ints) -> Floats:
        """[chunk, stretch]: bytes of its gradients that have arrived by each of `stretches`, which rise to the last."""
        chunks = self.packing.chunks
        members = list(chain.from_iterable(chunk.parameters for chunk in chunks))
        chunk_of = np.zeros(len(members), dtype=np.int64)
        chunk_of[members] = np.repeat(np.arange(len(chunks)), [len(chunk.parameters) for chunk in chunks])
        parameters, arrival, nbytes = self.facts.gradients.T
        arrived: Floats = np.zeros((len(chunks), len(stretches)))
        np.add.at(arrived, (chunk_of[parameters], np.searchsorted(stretches, arrival)), nbytes)
        return np.cumsum(arrived, axis=1, out=arrived)

    def grad_entry(self, index: int) -> int | None:
        """The entry of `order` during which a chunk's last gradient arrives; None where it gets none."""
        arrivals = self.arrivals[index]
        return None if arrivals is None else self.entry_of[self.facts.last_use(arrivals[1])]

    @cached_property
    def early_able(self) -> tuple[bool, ...]:
        """Whether all gradients of each chunk come, each at once, and nothing reads its weights after the last of them;
        not of matrices, which the device has to make orthogonal."""
        parameters, last_access = self.facts.trace.parameters, self.facts.last_access
        once = [info.grad_access if info.grad_arrivals == 1 else None for info in parameters]

        def able(members: Sequence[int]) -> bool:
            arrivals = [access for access in map(once.__getitem__, members) if access is not None]
            last_read = max(last_access.get(member, -1) for member in members)
            return len(arrivals) == len(members) and last_read <= max(arrivals)

        return tuple(not chunk.matrices and able(chunk.parameters) for chunk in self.packing.chunks)

    def _chunk_facts(self, index: int) -> ChunkFacts:
        chunk, arrivals, stretch_of = self.packing.chunks[index], self.arrivals[index], self.facts.stretch_of
        itemsize, parameters = dtype_bytes(chunk.dtype), self.facts.trace.parameters
        shapes = [parameters[member].shape for member in chunk.parameters] if chunk.matrices else []
        return ChunkFacts(
            bytes=chunk.bytes,
            numel=chunk.bytes // itemsize,
            low_precision=itemsize < 4,
            trainable=chunk.trainable,
            outsized=chunk.outsized,
            grad_bytes=chunk.bytes if arrivals else 0,
            grad_stretches=(stretch_of[arrivals[0]], stretch_of[arrivals[1]]) if arrivals else None,
            matrices=tuple((rows, columns) for rows, columns in shapes),
            offsets=tuple(offset // itemsize for offset in chunk.offset_bytes),
        )


def _largest_arrival(trace: StepTrace) -> int:
    """Bytes of the largest gradient, or of all that a compiled module gives at once."""
    arrivals: dict[tuple[bool, int], int] = {}
    compiled = frozenset(trace.step.compiled)
    for index, param in enumerate(trace.parameters):
        if param.grad_access is not None:
            names = (param.name, *param.aliases)
            together = any(enclosing(name, compiled) for name in names)
            key = (together, param.grad_access if together else index)
            arrivals[key] = arrivals.get(key, 0) + param.numel * dtype_bytes(param.dtype)
    return max(arrivals.values(), default=0)


def _collapse(facts: StepFacts, packing: Packing) -> tuple[list[OrderEntry], list[int]]:
    """The trace's accesses in chunk ids, equal neighbours in one entry, pins translated to entries; entry per access.

    Entries that were joined share the latest of their pins: their chunks are the same, so nothing more is held.
    """
    chunk_of = {member: index for index, chunk in enumerate(packing.chunks) for member in chunk.parameters}
    chunks_of = [
        (chunk_of[members[0]],) if len(members) == 1 else tuple(sorted({chunk_of[member] for member in members}))
        for members in facts.parameter_sets
    ]
    uses = [((phase, chunks_of[used]), pin_until) for phase, used, pin_until in facts.uses]
    runs = [(key, [pin_until for _, pin_until in run]) for key, run in groupby(uses, itemgetter(0))]
    entry_of = [entry for entry, (_, pins) in enumerate(runs) for _ in pins]
    entries = [(phase, chunks, max(entry, entry_of[max(pins)])) for entry, ((phase, chunks), pins) in enumerate(runs)]
    return entries, entry_of
