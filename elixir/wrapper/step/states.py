"""`States`: what one optimizer keeps of one shard, and the step that it makes with it.

`ClassStates` are those of a class of optimizers, by parameter; `FusedStates` those of Adam over the whole shard. What
moves, saves, loads, copies or stores states walks over what `States` shows, whichever of the two it has.

A kind is a key of torch's per-parameter state, such as ``exp_avg``. Elementwise states are tensors over a part of the
flattened parameter. Counts of steps and other scalars belong to the parameter as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import torch

from elixir.chunk.chunk import Held
from elixir.chunk.state_window import StoredStates
from elixir.errors import InputError, StateError
from elixir.memory_order import Order, flattened, shaped
from elixir.units import dtype_name
from elixir.wrapper.step.segments import Arrived, Segment

SCALE_SUFFIX = "_scale"
"""Kind of the scales of 8-bit codes: ``exp_avg`` -> ``exp_avg_scale``."""
ADAM_KINDS = ("exp_avg", "exp_avg_sq")
BY_CLASS = "by its class"
"""The form of a step that the user's own class makes."""

MakeMemory = Callable[[int, torch.dtype], torch.Tensor]
"""Makes a flat tensor, given elements and dtype."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor that this rank has of a parameter: a state of each element, scales of 8-bit codes, or weights."""

    kind: str
    held: Held
    """The part of the parameter."""
    tensor: torch.Tensor
    """The live elements, flat; on a disk they are there only while the chunk is at hand."""
    order: Order | None
    """In which the elements lie in the parameter."""
    region: str
    """Name of the region of an extent in which it lies, where it lives on a disk."""
    start: int
    """Its first element in that region."""
    extent: StoredStates | None = None
    """Has it, if it lives on a disk."""
    has_codes: bool = False
    """Whether these are codes of 8 bits, in blocks of which the first begins where the parameter begins."""
    width: int = 1
    """Elements of the parameter for each of these: more than one for scales."""
    keeps_dtype: bool = True
    """Whether the state goes on in its dtype in any home. That of Adam in one pass follows from the plan."""

    @property
    def name(self) -> str:
        """That of the parameter."""
        return self.held.slot.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, of which all ranks have parts."""
        slot = self.held.slot
        return tuple(slot.shape) if self.width == 1 else (-(-slot.numel // self.width),)

    @property
    def first(self) -> int:
        """First element in the whole flattened tensor."""
        return self.held.first // self.width

    @property
    def dtype(self) -> torch.dtype:
        """In which it is saved."""
        return self.tensor.dtype

    @property
    def nbytes(self) -> int:
        """Bytes as it is saved."""
        return self.tensor.nbytes

    def values(self, first: int, stop: int) -> torch.Tensor:
        """Elements from `first` to `stop`, where they lie; of those on a disk, in separate memory."""
        if self.extent is None:
            return self.tensor[first:stop]
        return self.extent.read(self.region, self.start + first, self.start + stop)

    def in_chunk(self, values: torch.Tensor) -> torch.Tensor:
        """Its values, flat, in the order in which the chunk has the elements of the parameter."""
        slot = self.held.slot
        if self.order == slot.order or self.width > 1:
            return values
        return flattened(shaped(values, slot.shape, self.order), slot.order)  # it is all of the parameter's


@dataclass
class SmallStates:
    """States of a parameter that are no tensors over its elements."""

    step: int | None = None
    others: dict[str, Any] = field(default_factory=dict)
    """Kind -> a number, or (dtype, number) of a tensor without dimensions."""
    are_live: bool = False
    """Whether `others` are as the optimizer keeps them instead."""


class StateForm(NamedTuple):
    """The form in which an elementwise state of a parameter is saved."""

    dtype: torch.dtype
    """That of its codes if it has any."""
    order: Order | None
    """The order of its elements, whatever the order in which the parameter has them here."""
    has_codes: bool = False
    """Whether it is saved as codes of 8 bits."""
    is_held: bool = False
    """Whether `SavedStates.held` gives it, so that it goes on in its dtype; otherwise `SavedStates.fill` copies it."""

    @property
    def name(self) -> str:
        """The form in words: a dtype, or 8bit."""
        return "8bit" if self.has_codes else dtype_name(self.dtype)

    def rounded_to(self, mine: str) -> str:
        """The note on a state that is kept in the form `mine` here."""
        return f"moments saved in {self.name} are kept in {mine} here, to the nearest value"

    def dtype_in(self, segment: Segment) -> torch.dtype:
        """The dtype in which the state goes on: its own if held, otherwise at least as wide as that of the weights."""
        if self.is_held:
            return self.dtype
        weights = segment.weights.dtype
        narrow = self.dtype.is_floating_point and self.dtype.itemsize < weights.itemsize
        return weights if narrow or self.has_codes else self.dtype


class SavedStates(Protocol):
    """Saved states to go on from, by parameter. An implementation inherits from it."""

    def forms(self, name: str) -> Mapping[str, StateForm]:
        """The elementwise states of a parameter by kind, without the scales of codes; empty if it has no state."""

    def small(self, name: str) -> SmallStates:
        """The other states of a parameter."""

    def fill(self, kind: str, name: str, start: int, out: torch.Tensor) -> None:
        """Begins to fill `out`, flat, with the elements from `start` on, in the order in which the parameter has them
        here and in the dtype of `out`; codes only in their own dtype. `filled` ends it."""

    def filled(self) -> None:
        """Waits for all that `fill` has begun; raises what went wrong with it."""

    def held(self, kind: str, name: str) -> torch.Tensor:
        """The elements of this rank, flat, in memory that the caller may keep; only if `StateForm.is_held`."""
        raise StateError(f"state {kind!r} of {name} is not held")


class States(Protocol):
    """The states of one optimizer for one shard. Use them while masters and states are at hand (`Chunk.at_hand`).

    An implementation inherits from it.
    """

    master: torch.Tensor
    """The flat shard that is stepped: masters, or the weights themselves."""
    segments: list[Segment]
    """Its parts that this optimizer steps, in order."""
    weights: torch.Tensor | None
    """Takes the weights that the master rounds to, of the whole shard; None where nothing takes them in a step."""
    accepts_tensor_factor: bool
    """Whether a step takes the factor as a tensor on the device, too."""

    is_predictable: bool
    """Whether a step does nothing without a gradient, and the first one with a gradient makes all states of a
    segment."""

    def set_options(self, options: list[dict[str, Any]]) -> None:
        """Sets hyperparameters, by group."""

    def step(
        self,
        arrived: Arrived,
        gradients: torch.Tensor | None,
        factor: float | torch.Tensor,
        weight_out: torch.Tensor | None,
        into: Self | None = None,
    ) -> set[str]:
        """Makes one step.

        Args:
            arrived: the segments that got a gradient, with it, flat.
            gradients: those of the whole shard, where they lie in one tensor.
            factor: gradients are multiplied by it first; a tensor only where `accepts_tensor_factor`.
            weight_out: flat, of the shard; takes the new weights in its dtype where that can be done in the same pass.
            into: takes the new states, and these stay unchanged; made by `empty_like`. `arrived` then has all segments.

        Returns:
            The forms of the step (`elixir.kernels.adam`). With `BY_CLASS` nothing was written to `weight_out`.
        """

    shares_call: bool = False
    """Whether one call of the class may step these and the states of other shards."""

    def with_gradients(self, arrived: Arrived) -> AbstractContextManager[None]:
        """Sets the gradients for a call of the class inside of it; where `shares_call`, several may be entered before
        one call."""
        return nullcontext()

    def call(self, method: str) -> None:
        """Calls a method of the class, such as schedule-free's ``eval``; does nothing where no class steps."""
        return

    def make(self) -> bool:
        """Makes the states of zero steps now; False where only the first step of a class can."""

    @property
    def can_copy(self) -> bool:
        """Whether there are states by now, and all of them can be copied."""
        return True

    def empty_like(self, master: torch.Tensor, segments: list[Segment], memory: MakeMemory) -> Self:
        """Another set of such states over other memory, to be filled by `step` or `copy_from`; where `can_copy`."""

    def copy_from(self, other: Self) -> None:
        """Takes the values of another set over the same segments, its master too."""

    def tensors(self, *, moving: bool = False) -> Iterator[StateTensor]:
        """The elementwise states of the segments that have been stepped, as views of live memory; `moving` also those
        that were made ahead of the first step, and copies of what has no memory for each element."""

    def widened(self, each: StateTensor) -> torch.Tensor:
        """The values of one of `tensors`, no scales, in float32 or wider."""

    def scalars(self, segment: Segment) -> dict[str, Any]:
        """The other states of a segment, as they are; empty if it has not been stepped."""

    def memory(self) -> Iterator[tuple[str | None, torch.Tensor, int]]:
        """Every tensor over elements that is kept: the region of an extent in which it belongs, it, and where it begins
        there. None for one that no extent takes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of `memory`."""
        return sum(tensor.nbytes for _, tensor, _ in self.memory())

    def has_stepped(self, segment: Segment) -> bool:
        """Whether a segment has been stepped, rather than got states ahead of its first step."""

    def without_states(self) -> list[Segment]:
        """The segments without any states."""
        return []

    def load(self, saved: SavedStates) -> set[str]:
        """Takes the states that are saved, and none where none are; notes on what is not exact."""

    def let_go(self) -> None:
        """Holds no weights and masters any more; `tensors` and `scalars` still show the states."""
        self.master, self.weights = self.master.new_empty(0), None
        for segment in self.segments:
            if segment.weights is not segment.source:  # the shape stays: it says which states are elementwise
                segment.weights.data = segment.weights.new_empty(()).expand(segment.weights.shape)


def small_states(states: States) -> dict[str, SmallStates]:
    """Counts of steps and other scalars by parameter, as of now.

    Raises:
        InputError: a state is neither elementwise nor a number.
    """
    return {segment.name: _small(states, segment) for segment in states.segments if states.has_stepped(segment)}


def _small(states: States, segment: Segment) -> SmallStates:
    small = SmallStates()
    for kind, value in states.scalars(segment).items():
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


class MovedStates(SavedStates):
    """States that leave the shard of a chunk for another home of the chunk.

    Args:
        left: by parameter, the states that it has, after `States.let_go`, and the segment that they are of.
        passes: parameters whose states lie in buffers that other chunks use next, so that nobody may keep them.
    """

    def __init__(self, left: Mapping[str, tuple[States, Segment]], passes: Collection[str]) -> None:
        self._left, self._passes = left, passes
        self._found: dict[str, dict[str, StateTensor]] = {}
        self._wide: dict[str, tuple[str, torch.Tensor]] = {}  # by kind, the values of the last parameter

    def _tensors(self, name: str) -> dict[str, StateTensor]:
        if name not in self._found and name in self._left:
            for each in self._left[name][0].tensors(moving=True):
                self._found.setdefault(each.name, {})[each.kind] = each
        return self._found.get(name, {})

    def forms(self, name: str) -> Mapping[str, StateForm]:
        """See `SavedStates`."""
        return {
            kind: StateForm(each.dtype, each.order, each.has_codes, each.keeps_dtype)
            for kind, each in self._tensors(name).items()
            if each.width == 1
        }

    def small(self, name: str) -> SmallStates:
        """See `SavedStates`; what is a tensor stays one."""
        states, segment = self._left.get(name, (None, None))
        scalars = {} if states is None or segment is None else states.scalars(segment)
        step = scalars.get("step")
        return SmallStates(None if step is None else int(step), scalars, are_live=True)

    def fill(self, kind: str, name: str, start: int, out: torch.Tensor) -> None:
        """See `SavedStates`."""
        each = self._tensors(name)[kind]
        values = each.tensor
        if values.dtype != out.dtype:
            known, values = self._wide.get(kind, ("", values))
            if known != name:
                values = self._left[name][0].widened(each)
                self._wide[kind] = name, values
        first = start - each.first
        out.copy_(each.in_chunk(values)[first : first + out.numel()])

    def held(self, kind: str, name: str) -> torch.Tensor:
        """See `SavedStates`."""
        each = self._tensors(name)[kind]
        return each.in_chunk(each.tensor.clone() if name in self._passes else each.tensor)

    def filled(self) -> None:
        """See `SavedStates`; `fill` waits."""
