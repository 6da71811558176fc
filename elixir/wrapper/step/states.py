"""`States`: what one optimizer keeps for one shard of a chunk, and the one way to read and write it.

Elementwise states of a kind, such as ``exp_avg``, lie in one flat tensor, in the order in which the shard has the
elements, wherever the shard's states live. Counts of steps and other numbers belong to a parameter as a whole. A rule
(`elixir.wrapper.step.rules`) says which kinds there are, and steps them. All that saves, loads, moves or copies states
does it here, whatever the rule. An average of the weights (`AVERAGE`) is one more kind, next to those of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from elixir.checkpoint_format.slices import scalar_state
from elixir.chunk.chunk import ShardPart
from elixir.chunk.memory import Count, Memory
from elixir.chunk.state_window import MASTERS, StoredStates
from elixir.errors import InputError
from elixir.kernels.adam.moments import Moments, read_moments, write_moments
from elixir.memory_order import Order
from elixir.optimizer_states import AVERAGE, check_kind
from elixir.units import dtype_name
from elixir.wrapper.step.segments import Segment

SCALE_SUFFIX = "_scale"
"""Kind of the scales of 8-bit codes: ``exp_avg`` -> ``exp_avg_scale``."""
ADAM_KINDS = ("exp_avg", "exp_avg_sq")
_PIECE_NUMEL = 2**20
"""Elements that are encoded at once: 4 MiB of float32, whole blocks of codes."""

NO_AVERAGE_SAVED = "no average of the weights was saved, so that it begins with the weights before the next step"
NO_AVERAGE_KEPT = "the average of the weights that was saved is left out, since this run keeps none (ema=)"
"""Notes of a load if one side alone has an average."""

MakeMemory = Callable[[int, torch.dtype], Memory]
"""Allocates a flat tensor of zeros, given number of elements and dtype."""


class Kind(NamedTuple):
    """A kind of elementwise state."""

    dtype: torch.dtype
    width: int = 1
    """Elements of the shard per element of this kind: more than one for scales."""
    block: int = 1
    """Elements that share a scale; of codes, which are padded to whole blocks, more than one."""

    def numel(self, numel: int) -> int:
        """Elements of this kind for so many elements of the shard."""
        return -(-numel // (self.width * self.block)) * self.block


@dataclass(frozen=True)
class StateTensor:
    """This rank's part of one tensor of a parameter: an elementwise state, scales of 8-bit codes, or weights."""

    kind: str
    held: ShardPart
    """The part of the parameter."""
    tensor: torch.Tensor
    """The live elements, flat; of a tensor on a disk only while the chunk is in memory."""
    region: str = MASTERS
    """The name of its region in an extent, if it lives on a disk."""
    start: int = 0
    """Its first element in that region."""
    extent: StoredStates | None = None
    """The extent that holds it, if it lives on a disk."""
    has_codes: bool = False
    """Whether these are 8-bit codes, in blocks that count from the beginning of the parameter."""
    width: int = 1
    """See `Kind`."""

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.held.slot.name

    @property
    def order(self) -> Order | None:
        """The order of the elements in the parameter."""
        return self.held.slot.order if self.width == 1 else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor over all ranks."""
        slot = self.held.slot
        return tuple(slot.shape) if self.width == 1 else (-(-slot.numel // self.width),)

    @property
    def first(self) -> int:
        """Its first element in the whole flattened tensor."""
        return self.held.first // self.width

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is saved."""
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes in a checkpoint."""
        return self.tensor.nbytes

    def values(self, first: int, stop: int) -> torch.Tensor:
        """The elements from `first` to `stop`: a view, or for a tensor on a disk a copy."""
        if self.extent is None:
            return self.tensor[first:stop]
        return self.extent.read(self.region, self.start + first, self.start + stop)


@dataclass
class SmallStates:
    """The states of a parameter that are not elementwise: counts and other numbers."""

    step: int | None = None
    others: dict[str, Any] = field(default_factory=dict)
    """Kind -> number, or (dtype, number) for a tensor without dimensions."""


class SavedState(NamedTuple):
    """An elementwise state of a parameter, as it was saved."""

    dtype: torch.dtype
    """The dtype of the elements, or of their codes."""
    fill: Callable[[int, torch.Tensor], None]
    """Begins to fill a flat tensor with the elements from a first one on, in the order in which the chunk has them and
    in the dtype of the tensor; codes only if there are `scales`."""
    has_codes: bool = False
    """Whether it was saved as codes of 8 bits."""
    scales: Callable[[int, torch.Tensor], None] | None = None
    """Fills the scales of codes that lie in the order of the chunk, so that they can go on as they are."""

    @property
    def form(self) -> str:
        """How it was saved, in words: a dtype, or 8bit."""
        return "8bit" if self.has_codes else dtype_name(self.dtype)


class SavedStates(NamedTuple):
    """The states of a parameter, as they were saved."""

    tensors: Mapping[str, SavedState]
    """By kind."""
    numbers: SmallStates


Find = Callable[[str], SavedStates | None]
"""Finds the saved states of a parameter; None if it has none."""


class States:
    """States of one optimizer for one shard. Use them while masters and states are in memory (`Chunk.in_memory`).

    Args:
        master: the flat shard that is stepped: masters or the weights themselves.
        segments: the parts of the shard that this optimizer steps, in order.
        kinds: the kinds of elementwise states; more may be added.
        ranges: the ranges of the shard that have states, in order.
        make: allocates the flat tensor of a kind.
        stored: has the states, if they live on a disk.
        number: of the optimizer: those of a chunk share its extent.
        weights: takes the rounded weights of the whole shard, if a step writes them.
    """

    def __init__(
        self,
        master: torch.Tensor,
        segments: list[Segment],
        kinds: Mapping[str, Kind],
        ranges: Sequence[slice],
        make: MakeMemory,
        *,
        stored: StoredStates | None = None,
        number: int = 0,
        weights: torch.Tensor | None = None,
    ) -> None:
        self.master, self.segments, self.weights = master, segments, weights
        self.kinds, self._ranges, self._make = dict(kinds), ranges, make
        self._stored, self._number = stored, number
        self._numel = sum(each.stop - each.start for each in ranges)
        # Place of a segment -> how many elements of the shard before it have no states.
        self._without_states = {segment.place: _numel_outside(ranges, segment.start) for segment in segments}
        self.tensors: dict[str, torch.Tensor] = {}
        """Kind -> all its elements; only those that exist by now."""
        self._memories: list[Memory] = []
        self._views: dict[tuple[str, int], torch.Tensor] = {}  # by kind and place, what a class finds
        self.optimizer: torch.optim.Optimizer | None = None
        """The optimizer of the user's class that steps the segments, if one does."""
        self.by_weights: MutableMapping[torch.Tensor, dict[str, Any]] = {}
        """Weights of a segment -> its numbers, and for a class its elementwise states, in torch's form."""
        self.averaged: set[int] = set()
        """Places of the segments that have an average of their weights."""
        if stored is not None:
            for segment in segments:
                stored.show(self, segment.weights, MASTERS, segment.start)

    # --- memory ----------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Allocates all kinds, as zeros, that are not there yet."""
        for kind in self.kinds if self.segments else ():
            self.tensor(kind)

    def tensor(self, kind: str) -> torch.Tensor:
        """All elements of a kind, flat; allocated at the first use."""
        found = self.tensors.get(kind)
        if found is None:
            each = self.kinds[kind]
            numel = each.numel(self._numel)
            if self._stored is None:
                self._memories.append(self._make(numel, each.dtype))
                found = self._memories[-1].tensor
            else:
                found = self._stored.region(self._region(kind), numel, each.dtype)
                self._stored.show(self, found, self._region(kind))
            self.tensors[kind] = found
        return found

    def place(self, kind: str, segment: Segment) -> slice:
        """The part of `tensor` that belongs to a segment."""
        first, width = segment.start - self._without_states[segment.place], self.kinds[kind].width
        return slice(first // width, -(-(first + segment.held.numel) // width))

    def part(self, kind: str, segment: Segment) -> torch.Tensor:
        """The elements of a kind that belong to a segment, flat."""
        return self.tensor(kind)[self.place(kind, segment)]

    def moments(self, segment: Segment) -> Moments:
        """Adam's moments, in which a segment and its neighbours of the same range have their positions in the shard."""
        kind = self.kinds["exp_avg"]
        form = check_kind("8bit" if kind.block > 1 else dtype_name(kind.dtype))
        return Moments(
            form,
            **{each: self.tensor(each) for each in self.kinds if each != AVERAGE},
            first=self._without_states[segment.place],
        )

    def _region(self, kind: str) -> str:
        """The name of a region. Each optimizer has separate regions, with the states of its parameters alone."""
        own = f" of optimizer {self._number}" if self._number else ""
        return f"{kind}{own} {dtype_name(self.kinds[kind].dtype)}"

    def count_in(self, make: MakeMemory, count: Count) -> None:
        """Allocates and counts the memory elsewhere from here on, as under another plan."""
        self._make = make
        for memory in self._memories:
            memory.count_by(count, "optimizer_states")  # it may have been a second set

    def point_to(self, master: torch.Tensor | None, weights: torch.Tensor | None = None) -> None:
        """Steps other memory from here on; none, so that it can be freed, if there is no master."""
        self.master, self.weights = self.master.new_empty(0) if master is None else master, weights
        for segment in self.segments if self._stored is None else ():
            segment.weights.data = self.master if master is None else master[segment.part]

    def forget(self) -> None:
        """Takes its tensors out of an extent, and out of an optimizer that steps other shards, too."""
        if self._stored is not None:
            self._stored.forget(self)
        for segment in self.segments:
            self.by_weights.pop(segment.weights, None)

    def like(self, master: torch.Tensor, segments: list[Segment], make: MakeMemory) -> States:
        """Another set of such states over other memory, which `copy_from` or a step fills."""
        return States(master, segments, self.kinds, self._ranges, make)

    # --- what there is ---------------------------------------------------------------------------------------------

    def state_of(self, segment: Segment) -> dict[str, Any]:
        """The state of a segment, in torch's form; empty if there is none."""
        return self.by_weights.get(segment.weights, {})

    def has_stepped(self, segment: Segment) -> bool:
        """Whether a segment has been stepped; states that were only created ahead do not count."""
        if segment.place in self.averaged:
            return True
        state = self.state_of(segment)
        step = state.get("step")
        return bool(state) and (step is None or bool(step > 0))

    def kinds_of(self, segment: Segment) -> list[str]:
        """The kinds of elementwise states of a segment."""
        state, average = self.state_of(segment), [AVERAGE] if segment.place in self.averaged else []
        if self.optimizer is None:
            return [kind for kind in self.kinds if state and kind != AVERAGE] + average
        views = {kind: self._views.get((kind, segment.place)) for kind in self.kinds}
        return [kind for kind, view in views.items() if view is not None and state.get(kind) is view] + average

    @property
    def can_copy(self) -> bool:
        """Whether all states can be copied."""
        kinds = (torch.Tensor, bool, int, float, type(None))
        return all(isinstance(value, kinds) for each in self.segments for value in self.state_of(each).values())

    def numbers(self, segment: Segment) -> dict[str, Any]:
        """The states of a segment that are not elementwise."""
        mine = self.kinds_of(segment)
        return {kind: value for kind, value in self.state_of(segment).items() if kind not in mine}

    def to_save(self) -> Iterator[StateTensor]:
        """The elementwise states of stepped segments, as views of live memory."""
        for segment in filter(self.has_stepped, self.segments):
            for kind in self.kinds_of(segment):
                place, each = self.place(kind, segment), self.kinds[kind]
                where = self._region(kind), place.start, self._stored
                tensor = self.tensor(kind)[place]
                yield StateTensor(kind, segment.held, tensor, *where, has_codes=each.block > 1, width=each.width)

    def read(self, kind: str, segment: Segment) -> torch.Tensor:
        """The elements of a kind, but no scales: codes as what they stand for."""
        if self.kinds[kind].block == 1:
            return self.part(kind, segment)
        both = read_moments(self.moments(segment), segment.held.numel, segment.start)
        return both[ADAM_KINDS.index(kind)]

    # --- writing ---------------------------------------------------------------------------------------------------

    def put(self, segment: Segment, kinds: Collection[str], numbers: Mapping[str, Any]) -> None:
        """Gives a segment states: those of some kinds, with what lies in their memory, and numbers."""
        mine = [kind for kind in kinds if kind != AVERAGE]  # no class finds the average
        if AVERAGE in kinds:
            self.averaged.add(segment.place)
        state = {kind: self._view(kind, segment) for kind in mine} if self.optimizer is not None else {}
        group = {} if self.optimizer is None else self.optimizer.param_groups[segment.group]
        for kind, value in numbers.items():
            state[kind] = value
            if isinstance(value, torch.Tensor):  # a fused step reads numbers on the device
                there = value.dim() or not value.is_cpu or group.get("fused")
                state[kind] = value.to(segment.weights.device if there else "cpu", copy=True)
        self.by_weights[segment.weights] = state

    def _view(self, kind: str, segment: Segment) -> torch.Tensor:
        """The tensor that a class finds as a state of a segment, always the same one."""
        found = self._views.get((kind, segment.place))
        if found is None:
            found = self._views[kind, segment.place] = self.part(kind, segment)
            if self._stored is not None:
                self._stored.show(self, found, self._region(kind), self.place(kind, segment).start)
        return found

    def adopt(self, segment: Segment) -> None:
        """Moves elementwise states that a class has made elsewhere to their place."""
        state = self.state_of(segment)
        moved = {
            kind: value
            for kind, value in state.items()
            if self._views.get((kind, segment.place)) is not value and is_elementwise(kind, value, segment.weights)
        }
        if not moved:
            return
        own = {tensor.untyped_storage().data_ptr() for tensor in self.tensors.values()}
        for kind, value in moved.items():  # a class may have given one kind the tensor of another
            moved[kind] = value.clone() if value.untyped_storage().data_ptr() in own else value
        for kind, value in moved.items():
            self.take(kind, segment, value, 0)
            state[kind] = self._view(kind, segment)

    def take(self, kind: str, segment: Segment, values: torch.Tensor, first: int) -> None:
        """Takes values that a class has made, for the elements of a segment from `first` on."""
        mine = self.kinds.setdefault(kind, Kind(values.dtype))
        if mine.dtype != values.dtype:
            raise InputError(
                f"state {kind!r} of {segment.name} is {dtype_name(values.dtype)}, of other weights "
                f"{dtype_name(mine.dtype)}; a class keeps each kind of state in one dtype"
            )
        self.part(kind, segment)[first : first + values.numel()].copy_(values.detach())

    def copy_from(self, other: States) -> None:
        """Takes the states of another set over the same part of a chunk, in any home and form."""
        if any(self.kinds.get(kind, each) != each for kind, each in other.kinds.items()):
            self.load(other.saved(), lambda: None)
            return
        self.kinds |= other.kinds
        for kind in other.tensors:
            self.tensor(kind).copy_(other.tensor(kind))
        theirs = {segment.place: segment for segment in other.segments}
        for segment in self.segments:
            source = theirs.get(segment.place)
            self._drop(segment)
            if source is not None and (source.weights in other.by_weights or source.place in other.averaged):
                self.put(segment, other.kinds_of(source), other.numbers(source))

    def _drop(self, segment: Segment) -> None:
        """Forgets the states of a segment, whose memory stays."""
        self.by_weights.pop(segment.weights, None)
        self.averaged.discard(segment.place)

    def begin_average(self, segments: Iterable[Segment]) -> None:
        """Gives segments that have none an average: their weights, before a step changes them."""
        for segment in segments:
            if segment.place not in self.averaged:
                self.part(AVERAGE, segment).copy_(segment.weights.detach())
                self.averaged.add(segment.place)

    def average(self, decay: float, old: States | None = None) -> None:
        """Takes new weights into their averages, parameter by parameter, as `torch.optim.swa_utils` does.

        Args:
            decay: the share of the average that stays.
            old: the set before an early update, whose averages stay as they are; None: these.
        """
        before = self if old is None else old
        for mine, theirs in zip(self.segments, before.segments, strict=True):
            begun = theirs.place in before.averaged
            if begun or old is not None:
                average = before.part(AVERAGE, theirs) if begun else theirs.weights.detach()
                torch.lerp(average, mine.weights.detach(), 1.0 - decay, out=self.part(AVERAGE, mine))
                self.averaged.add(mine.place)

    def become(self, other: States) -> None:
        """Takes master and states of another set, in memory of the same form."""
        self.master.copy_(other.master)
        self.copy_from(other)

    def saved(self) -> Find:
        """These states as saved ones."""
        small, by_name = small_states(self), {segment.name: segment for segment in self.segments}

        def fill(kind: str, segment: Segment, first: int, out: torch.Tensor) -> None:
            own = first - segment.first
            out.copy_(self.read(kind, segment)[own : own + out.numel()])

        def find(name: str) -> SavedStates | None:
            if name not in small:
                return None
            segment, tensors = by_name[name], {}
            for kind in self.kinds_of(segment):
                mine = self.kinds[kind]
                if mine.width == 1:
                    tensors[kind] = SavedState(mine.dtype, partial(fill, kind, segment), mine.block > 1)
            return SavedStates(tensors, small[name])

        return find

    def load(self, find: Find, wait: Callable[[], None]) -> set[str]:
        """Takes saved states, and forgets all others; returns notes on inexact ones.

        Args:
            find: finds them.
            wait: waits for all that `SavedState.fill` has begun; raises what went wrong with it.
        """
        notes: set[str] = set()
        found = {segment.place: self._average_noted(find(segment.name), notes) for segment in self.segments}
        for tensor in self.tensors.values():
            tensor.zero_()
        for segment in self.segments:
            self._drop(segment)
            saved = found[segment.place]
            if saved is None:
                continue
            for kind, each in saved.tensors.items() if self.optimizer is not None else ():
                # A class takes what it does not make itself: other options may have made it.
                self.kinds.setdefault(kind, Kind(torch.float32 if each.has_codes else each.dtype))
            notes |= self._fill(segment, saved.tensors, wait)
            if saved.tensors or self.optimizer is not None:
                self.put(segment, saved.tensors, self._as_kept(segment, saved.numbers))
        wait()
        return notes

    def _average_noted(self, saved: SavedStates | None, notes: set[str]) -> SavedStates | None:
        """Saved states without an average that is not kept here; notes that, and an average that is not there."""
        kept, there = AVERAGE in self.kinds, saved is not None and AVERAGE in saved.tensors
        if saved is None or kept == there:
            return saved
        if kept:
            notes.add(NO_AVERAGE_SAVED)
            return saved
        notes.add(NO_AVERAGE_KEPT)
        return saved._replace(tensors={kind: each for kind, each in saved.tensors.items() if kind != AVERAGE})

    def _fill(self, segment: Segment, saved: Mapping[str, SavedState], wait: Callable[[], None]) -> set[str]:
        """Fills the states of a segment; returns notes on those that are kept in another form."""
        mine = {kind: saved[kind] for kind in self.kinds if kind in saved}
        notes = set()
        for kind, each in mine.items():
            own = self.kinds[kind]
            form = "8bit" if own.block > 1 else dtype_name(own.dtype)
            encodes = own.block > 1 and each.scales is None
            if each.form != form or encodes:
                what = "moments" if kind in ADAM_KINDS else f"states '{kind}'"
                notes.add(f"{what} saved in {each.form} are kept in {form} here, to the nearest value")
            if encodes:
                if kind == ADAM_KINDS[0]:  # both moments together
                    self._encode(segment, mine, wait)
                continue
            each.fill(segment.first, self.part(kind, segment))
            if own.block > 1 and each.scales is not None:
                scales = kind + SCALE_SUFFIX
                each.scales(segment.first // self.kinds[scales].width, self.part(scales, segment))
        return notes

    def _encode(self, segment: Segment, saved: Mapping[str, SavedState], wait: Callable[[], None]) -> None:
        """Fills Adam's moments in 8 bits from others, in pieces that end between blocks: each is rounded once."""
        moments, at, stop = self.moments(segment), segment.start, segment.part.stop
        while at < stop:
            end = min(stop, (at // _PIECE_NUMEL + 1) * _PIECE_NUMEL)
            pair = [torch.empty(end - at, dtype=torch.float32, device="cpu") for _ in ADAM_KINDS]
            for kind, values in zip(ADAM_KINDS, pair, strict=True):
                saved[kind].fill(segment.first + at - segment.start, values)
            wait()
            avg, square = (values.to(self.master.device) for values in pair)
            write_moments(moments, at, avg, square)
            at = end

    def _as_kept(self, segment: Segment, small: SmallStates) -> dict[str, Any]:
        """Saved numbers as an optimizer keeps them."""
        found = {kind: scalar_state(value) for kind, value in small.others.items()}
        if self.optimizer is None:
            return {"step": torch.tensor(float(small.step or 0), dtype=torch.float32, device="cpu")}
        if small.step is not None and "step" not in found:
            fused = self.optimizer.param_groups[segment.group].get("fused")
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not fused else torch.float32
            found["step"] = torch.tensor(float(small.step), dtype=dtype, device="cpu")
        return found


def is_elementwise(kind: str, value: Any, weights: torch.Tensor) -> bool:
    """Whether a state that a class has made has an element for each one of the weights."""
    return kind != "step" and isinstance(value, torch.Tensor) and value.shape == weights.shape


def wide_dtype(kind: Kind) -> torch.dtype:
    """The dtype of states in a state dict: at least float32."""
    if kind.block > 1:
        return torch.float32
    wide = kind.dtype.is_floating_point and kind.dtype.itemsize < torch.float32.itemsize
    return torch.float32 if wide else kind.dtype


def _numel_outside(ranges: Sequence[slice], start: int) -> int:
    """The number of elements before `start` that are in none of the ranges."""
    return start - sum(int(min(start, each.stop) - min(start, each.start)) for each in ranges)


def small_states(states: States) -> dict[str, SmallStates]:
    """Returns the current counts of steps and other scalars, by parameter.

    Raises:
        InputError: a state is neither elementwise nor a number.
    """
    return {segment.name: _small(states, segment) for segment in states.segments if states.has_stepped(segment)}


def _small(states: States, segment: Segment) -> SmallStates:
    small = SmallStates()
    for kind, value in states.numbers(segment).items():
        if kind == "step":
            small.step = _count(value, segment.name)
            if isinstance(value, torch.Tensor):
                continue
            value = small.step
        if value is not None:
            small.others[kind] = _saved_scalar(kind, value, segment.name)
    return small


def _saved_scalar(kind: str, value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and value.dim():
        raise InputError(
            f"state {kind!r} of {name} has shape {list(value.shape)}, neither that of its weights nor a number, so it "
            "cannot be saved"
        )
    if isinstance(value, torch.Tensor):
        return dtype_name(value.dtype), value.item()
    if not isinstance(value, (bool, int, float)):
        raise InputError(
            f"state {kind!r} of {name} is a {type(value).__name__}, which cannot be saved; states are tensors and "
            "numbers"
        )
    return value


def _count(value: Any, name: str) -> int:
    number = float(value)
    if number != int(number):
        raise InputError(f"state 'step' of {name} is {number}, expected a whole number")
    return int(number)
