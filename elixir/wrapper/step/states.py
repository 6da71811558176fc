"""`States`: the optimizer states of one shard, and the step over them.

`ClassStates` belong to an optimizer class of the user and are kept by parameter; `FusedStates` are those of Adam in one
pass over the shard. Code that moves, saves, loads or copies states uses this interface for both.

A kind is a key of torch's per-parameter state, such as ``exp_avg``. Elementwise states are tensors over a part of the
flattened parameter. Counts of steps and other scalars belong to the parameter as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch

from elixir.chunk.chunk import Held
from elixir.chunk.state_window import StoredStates
from elixir.errors import InputError
from elixir.memory_order import Order, flattened, shaped
from elixir.units import dtype_name
from elixir.wrapper.step.segments import Arrived, Segment

SCALE_SUFFIX = "_scale"
"""Kind of the scales of 8-bit codes: ``exp_avg`` -> ``exp_avg_scale``."""
ADAM_KINDS = ("exp_avg", "exp_avg_sq")
BY_CLASS = "by its class"
"""The form of a step by the user's own class."""

MakeMemory = Callable[[int, torch.dtype], torch.Tensor]
"""Allocates a flat tensor, given number of elements and dtype."""


@dataclass(frozen=True)
class StateTensor:
    """This rank's part of one tensor of a parameter: an elementwise state, scales of 8-bit codes, or weights."""

    kind: str
    held: Held
    """The part of the parameter."""
    tensor: torch.Tensor
    """The live elements, flat; of a tensor on a disk only while the chunk is at hand."""
    order: Order | None
    """The order of the elements in the parameter."""
    region: str
    """The name of its region in an extent, if it lives on a disk."""
    start: int
    """Its first element in that region."""
    extent: StoredStates | None = None
    """The extent that holds it, if it lives on a disk."""
    has_codes: bool = False
    """Whether these are 8-bit codes, in blocks that count from the beginning of the parameter."""
    width: int = 1
    """Elements of the parameter per element of this tensor: more than one for scales."""
    keeps_dtype: bool = True
    """Whether the state keeps its dtype in every home. For Adam in one pass the plan gives the dtype."""

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.held.slot.name

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

    def in_chunk(self, values: torch.Tensor) -> torch.Tensor:
        """`values` of this tensor, flat, in the element order of the chunk."""
        slot = self.held.slot
        if self.order == slot.order or self.width > 1:
            return values
        return flattened(shaped(values, slot.shape, self.order), slot.order)  # such a tensor covers the whole parameter


@dataclass
class SmallStates:
    """The states of a parameter that are not elementwise: counts and other scalars."""

    step: int | None = None
    others: dict[str, Any] = field(default_factory=dict)
    """Kind -> number, or (dtype, number) for a tensor without dimensions."""
    are_live: bool = False
    """Whether `others` holds the optimizer's own objects instead."""


class StateForm(NamedTuple):
    """The form in which an elementwise state of a parameter is saved."""

    dtype: torch.dtype
    """The dtype of the state, or of its codes if it has any."""
    order: Order | None
    """The order of its elements, whatever the order in which the parameter has them here."""
    has_codes: bool = False
    """Whether it is saved as codes of 8 bits."""
    held: Callable[[], torch.Tensor] | None = None
    """Gives the elements of this rank, flat, in memory to keep: the state goes on in its dtype. If None,
    `SavedStates.fill` copies it."""

    @property
    def name(self) -> str:
        """The form in words: a dtype, or 8bit."""
        return "8bit" if self.has_codes else dtype_name(self.dtype)

    def rounded_to(self, mine: str) -> str:
        """The note on a state that is kept in the form `mine` here."""
        return f"moments saved in {self.name} are kept in {mine} here, to the nearest value"

    def dtype_in(self, segment: Segment) -> torch.dtype:
        """The dtype in which the state goes on: its own if held, otherwise at least as wide as that of the weights."""
        if self.held is not None:
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


class States(Protocol):
    """The states of one optimizer for one shard. Use them while masters and states are at hand (`Chunk.in_memory`).

    An implementation inherits from it.
    """

    master: torch.Tensor
    """The flat shard that is stepped: masters or the weights themselves."""
    segments: list[Segment]
    """The parts of the shard that this optimizer steps, in order."""
    weights: torch.Tensor | None
    """The rounded weights of the whole shard, if a step writes them; otherwise None."""
    accepts_tensor_factor: bool
    """Whether the factor of a step may be a tensor on the device."""

    is_predictable: bool
    """Whether a step without a gradient does nothing, and the first one with a gradient creates all states of a
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
        """Runs one step.

        Args:
            arrived: the segments that got a gradient, each with its flat gradient.
            gradients: the gradients of the whole shard, if they lie in one tensor.
            factor: multiplies the gradients first; a tensor only if `accepts_tensor_factor`.
            weight_out: takes the new weights of the shard, flat, in its dtype, if the same pass can write them.
            into: takes the new states, and these stay unchanged; made by `empty_like`. `arrived` then has all segments.

        Returns:
            The forms of the step (`elixir.kernels.adam`). With `BY_CLASS` nothing was written to `weight_out`.
        """

    exchanged_bytes: int = 0
    """Bytes that this rank receives from others in each step."""
    turn: Callable[[], None] | None = None
    """Work between `begin` and `step`, on the lane of the network; None if `step` does it all."""

    def begin(self, arrived: Arrived, factor: float | torch.Tensor) -> None:
        """Runs the first part of a step with a `turn`, before which `factor` multiplies the gradients."""
        return

    shares_call: bool = False
    """Whether one call of the class may step several shards."""

    def with_gradients(self, arrived: Arrived) -> AbstractContextManager[None]:
        """Sets the gradients for a call of the class. If `shares_call`, several may be entered before one call."""
        return nullcontext()

    def call(self, method: str) -> None:
        """Calls a method of the class, such as schedule-free's ``eval``; does nothing if no class steps."""
        return

    memory_kind: tuple[object, ...] | None = None
    """The kind of memory and the form of all states of the shard. Those of an equal kind may go on in their memory, but
    not with None."""

    def make(self, *, allocate: bool = True) -> bool:
        """Creates the states of zero steps now; returns False if only the first step of a class can.

        Without `allocate` only notes it: `load` brings states that go on in their memory (`MovedStates.stay_for`).
        """

    @property
    def can_copy(self) -> bool:
        """Whether states exist by now, and all of them can be copied."""
        return True

    def empty_like(self, master: torch.Tensor, segments: list[Segment], memory: MakeMemory) -> Self:
        """Returns another set of such states over other memory, which `step` or `copy_from` fills. Needs `can_copy`."""

    def copy_from(self, other: Self) -> None:
        """Copies the values of another set over the same segments, and its master."""

    def tensors(self, *, moving: bool = False) -> Iterator[StateTensor]:
        """The elementwise states of stepped segments, as views of live memory. With `moving`, also states that were
        created before the first step, and copies of expanded tensors."""

    def widened(self, each: StateTensor) -> torch.Tensor:
        """The values of one of `tensors`, except scales, in float32 or wider."""

    def scalars(self, segment: Segment) -> dict[str, Any]:
        """The other states of a segment; empty if it has not been stepped."""

    def memory(self) -> Iterator[tuple[str | None, torch.Tensor, int]]:
        """Every elementwise tensor that is kept: its region in an extent (None if no extent takes it), the tensor, its
        first element there."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of `memory`."""
        return sum(tensor.nbytes for _, tensor, _ in self.memory())

    def has_stepped(self, segment: Segment) -> bool:
        """Whether a segment has been stepped; states that were only created ahead do not count."""

    def without_states(self) -> list[Segment]:
        """The segments that have no states."""
        return []

    def load(self, saved: SavedStates) -> set[str]:
        """Loads saved states and clears the others; returns notes on inexact ones."""

    def let_go(self) -> None:
        """Lets go of weights and masters; `tensors` and `scalars` still show the states."""
        self.master, self.weights = self.master.new_empty(0), None
        for segment in self.segments:
            if segment.weights is not segment.source:  # the shape stays, since it tells which states are elementwise
                segment.weights.data = segment.weights.new_empty(()).expand(segment.weights.shape)


def small_states(states: States) -> dict[str, SmallStates]:
    """Returns the current counts of steps and other scalars, by parameter.

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
    """States that move to another home of their chunk.

    Args:
        left: by parameter, the states after `States.let_go`, and their segment.
        passes: parameters whose states lie in buffers that other chunks use next, so that they must be copied.
    """

    def __init__(self, left: Mapping[str, tuple[States, Segment]], passes: Collection[str]) -> None:
        self._left, self._passes = left, passes
        self._found: dict[str, dict[str, StateTensor]] = {}
        self._wide: dict[str, tuple[str, torch.Tensor]] = {}  # by kind, the last parameter and its values

    def stay_for(self, states: States) -> States | None:
        """The states that go on in their memory as all those of `states`; None if others have to be allocated."""
        found = [self._left[each.name][0] for each in states.segments if each.name in self._left]
        if len(found) < len(states.segments) or any(each is not found[0] for each in found) or not found:
            return None
        passes = any(each.name in self._passes for each in states.segments)
        same = states.memory_kind is not None and found[0].memory_kind == states.memory_kind
        return found[0] if same and not passes else None

    def _tensors(self, name: str) -> dict[str, StateTensor]:
        if name not in self._found and name in self._left:
            for each in self._left[name][0].tensors(moving=True):
                self._found.setdefault(each.name, {})[each.kind] = each
        return self._found.get(name, {})

    def forms(self, name: str) -> Mapping[str, StateForm]:
        """See `SavedStates`."""
        return {
            kind: StateForm(
                each.dtype, each.order, each.has_codes, partial(self._held, each) if each.keeps_dtype else None
            )
            for kind, each in self._tensors(name).items()
            if each.width == 1
        }

    def small(self, name: str) -> SmallStates:
        """See `SavedStates`; tensors stay tensors."""
        left = self._left.get(name)
        scalars = {} if left is None else left[0].scalars(left[1])
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

    def _held(self, each: StateTensor) -> torch.Tensor:
        return each.in_chunk(each.tensor.clone() if each.name in self._passes else each.tensor)

    def filled(self) -> None:
        """See `SavedStates`; `fill` waits."""
