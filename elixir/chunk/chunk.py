"""One chunk while it runs: its parameters, where its weights are, and the only ways from one state to the next."""

from __future__ import annotations

import contextlib
import enum
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from elixir.access.placeholders import absent, storage_of, unmarked
from elixir.chunk.lanes import closed
from elixir.chunk.memory import ChunkStorage, Memory, Ticket, written
from elixir.chunk.state_window import StoredStates
from elixir.chunk.weight_files import FileShard
from elixir.errors import InputError, StateError, few
from elixir.memory_order import Order, flattened, is_dense, order_of
from elixir.plan.chunk_plan import ChunkPlan, ParamSlot
from elixir.torch_private import DisableTorchFunctionSubclass, swap_tensors


class ChunkState(enum.Enum):
    """Holder of a chunk's weights, and what its parameters point to."""

    HOME = "home"
    """The shards hold the weights, and nothing else does.

    Parameters are placeholders: right shape, no memory, marked (`elixir.access.placeholders`).
    """
    FETCHING = "fetching"
    """A block is taken and being filled while compute goes on. Parameters are still placeholders."""
    CACHED = "cached"
    """A block holds the gathered weights, and parameters are marked views of it."""
    RESIDENT = "resident"
    """The chunk's own device buffer holds the gathered weights for good, and parameters are views of it; but
    placeholders from the optimizer's step until a use waits for the new weights."""


_ALLOWED = {
    ChunkState.HOME: (ChunkState.FETCHING, ChunkState.RESIDENT),
    ChunkState.FETCHING: (ChunkState.CACHED, ChunkState.HOME),
    ChunkState.CACHED: (ChunkState.HOME,),
    ChunkState.RESIDENT: (),
}


@dataclass(frozen=True)
class Slot:
    """A parameter inside its chunk."""

    parameter: nn.Parameter
    name: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    """The parameter's own: kernels are chosen by it, and with them the bits."""
    order: Order | None
    """Order of the dimensions in which its elements lie in the chunk."""
    placeholder: torch.Tensor
    """The placeholder of a parameter while its chunk is at home: right shape, strides, dtype, device, marked, without
    memory."""

    @classmethod
    def of(cls, parameter: nn.Parameter, place: ParamSlot, dtype: torch.dtype, device: torch.device | str) -> Slot:
        """Makes a slot. A parameter keeps its layout if that is dense; one with gaps or overlaps becomes contiguous."""
        with DisableTorchFunctionSubclass():  # where it lies is asked, not what it holds
            shape, stride = parameter.shape, parameter.stride()
        if not is_dense(shape, stride):
            stride = torch.empty(shape, device="meta").stride()
        order = order_of(shape, stride)
        return cls(parameter, place.name, place.offset, shape, stride, order, absent(shape, dtype, device, stride))

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()

    def part_of(self, memory: torch.Tensor) -> torch.Tensor:
        """The parameter's part of a flat tensor of its chunk's elements, in its shape."""
        return memory.as_strided(self.shape, self.stride, memory.storage_offset() + self.offset)

    def flattened(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the parameter's shape as they lie in the chunk, flat: a view, or a copy if they lie otherwise."""
        return flattened(values, self.order)


@dataclass(frozen=True)
class ShardPart:
    """The part of a parameter that this rank's shard has."""

    slot: Slot
    place: int
    """Position of the parameter among those of the chunk."""
    first: int
    """First element of the part in the flattened parameter."""
    part: slice
    """Range of the part in the shard."""

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return int(self.part.stop - self.part.start)


@dataclass(frozen=True)
class Attribute:
    """An attribute of a module that is a view of a weight."""

    tensor: weakref.ref[torch.Tensor]
    of: Callable[[torch.Tensor], torch.Tensor]
    """Gives the view over memory that holds the gathered weights."""
    home: torch.Tensor
    """The view over the memory that holds them once they are gathered."""


def become_real(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Gives a parameter on meta a `value`; it keeps its identity, its attributes and whether it is trained."""
    with unmarked():  # `value` may be a placeholder, which nothing reads here
        real = nn.Parameter(value, parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    # Hooks live in dicts of the object and are called by what is swapped: they have to be entered there again.
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    parameter._backward_hooks = parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    # Weak references, which nn.RNN keeps, stay valid: the object is the same before and after.
    swap_tensors(parameter, real)
    if before is not None:
        parameter._backward_hooks = before
    if after is not None:
        parameter._post_accumulate_grad_hooks = after


def _follow(masters: torch.Tensor, weights: torch.Tensor) -> None:
    """Copies weights into masters wherever the masters do not round to them."""
    if masters.dtype == weights.dtype:
        masters.copy_(weights)
        return
    here = weights.to(masters.device)
    masters.copy_(torch.where(masters.to(here.dtype) != here, here.to(masters.dtype), masters))


class Chunk:
    """A chunk of one rank.

    Args:
        index: position in `Plan.chunks`.
        plan: its part of the plan.
        parameters: the model's parameters, in the order of `plan.parameters`.
        device: where compute runs, and so where the parameters say they are.
        rank: this rank; for messages.
        world_size: over how many ranks it is sharded.
        shard: which of the shards is this rank's; None: that of its number.
    """

    def __init__(
        self,
        index: int,
        plan: ChunkPlan,
        parameters: Sequence[nn.Parameter],
        *,
        rank: int,
        world_size: int,
        shard: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.index = index
        self.plan = plan
        self.rank = rank
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.slots = tuple(
            Slot.of(parameter, slot, self.dtype, device)
            for parameter, slot in zip(parameters, plan.parameters, strict=True)
        )
        self.shard_numel = plan.numel // world_size
        self.shard_start = (rank if shard is None else shard) * self.shard_numel
        """First element of this rank's shard."""
        self.mine = slice(self.shard_start, self.shard_start + self.shard_numel)
        """This rank's shard, in the chunk."""
        self.held = {held.slot.name: held for held in self._held()}
        """Name -> the part of the parameter that this rank's shard has; parameters without such a part are left out."""
        self.state = ChunkState.HOME
        self.pins = 0
        """How many scopes and autograd nodes are using the block; it cannot be evicted meanwhile."""
        self.block: ChunkStorage | None = None
        """The storage of a streamed chunk's gathered weights, filled while they are in the cache. A chunk that has
        become resident keeps it empty, for views that are alive."""
        self.states, self.second = Memory(), Memory()
        """This rank's masters and states, which the optimizer steps, and the second set of them, if there is one."""
        self.at_home = Memory() if self.needs_masters else self.states
        """This rank's part of the weights where they live: what is stepped, if there are no masters."""
        self.rounded = Memory()
        """New weights of an early update, in their dtype, until they are at home."""
        self.whole = self.at_home if plan.resident and world_size == 1 else Memory()
        """The gathered weights, of a resident chunk or in a block."""
        self.writes = 0
        """Number of times that its weights, masters or states were about to be written to, other than by a step on the
        host."""
        self.shard: torch.Tensor | None = None
        """This rank's part of the weights, at their home; None where a resident chunk's own buffer is the home."""
        self.weights: torch.Tensor | None = None
        """The gathered weights of a resident chunk."""
        self.shown: torch.Tensor | None = None
        """Memory that the parameters point to, in any state, while they are shown outside of a step."""
        self.kept: torch.Tensor | None = None
        """The shard of weights while `shard` has other values, which are only read; see `stand_in`."""
        self.masters: torch.Tensor | None = None
        """Master weights, which the optimizer steps instead of the weights: this rank's shard, at the home of the
        states, in float32 or wider. None where the weights themselves are there and no less precise. Look at the values
        inside of `in_memory` only: on a disk they are in memory at no other time."""
        self.filed: FileShard | None = None
        """This rank's part of frozen weights that live in files; `shard` is None then."""
        self.stored: StoredStates | None = None
        """Masters and optimizer states on a disk; None where they are in memory."""
        self.attributes: list[Attribute] = []
        """The attributes of modules that are views of its weights."""
        self.before_write: Callable[[], None] | None = None
        """Hook that is set while a checkpoint reads this rank's shard, masters and states.

        A step calls it before it writes to them.
        """
        self.taken_back = 0
        """Number of times that values of parameters with other memory were taken; see `take_back`."""
        self.dropped = False
        """Whether `drop_memory` was called."""
        self._lent: torch.Tensor | None = None  # the resident weights, with a count of what is written through `data`
        self._offsets = [slot.offset for slot in self.slots]
        self._versions: list[int] = []  # of the parameters when they came into the block

    def __str__(self) -> str:
        return f"chunk {self.index} ({few([slot.name for slot in self.slots])})"

    @property
    def low_precision(self) -> bool:
        """Whether its weights have fewer bits than float32, so that an optimizer keeps master weights."""
        return self.dtype.itemsize < torch.float32.itemsize

    @property
    def needs_masters(self) -> bool:
        """Whether an optimizer steps master weights rather than the weights, which are elsewhere or have fewer bits."""
        plan = self.plan
        return plan.trainable and (self.low_precision or plan.state_home != plan.weight_home)

    @property
    def shard_weights(self) -> torch.Tensor:
        """This rank's part of the weights, wherever they are; if in files, a copy that is read each time."""
        if self.shard is not None:
            return self.shard
        if self.filed is not None:
            return self.filed.read()
        if self.weights is None:
            raise StateError(f"rank {self.rank}: chunk {self.index} has no weights yet")
        return self.weights[self.mine]

    def _held(self) -> Iterator[ShardPart]:
        for place, slot in enumerate(self.slots):
            begin = max(slot.offset - self.shard_start, 0)
            stop = min(slot.offset + slot.numel - self.shard_start, self.shard_numel)
            if begin < stop:
                yield ShardPart(slot, place, self.shard_start + begin - slot.offset, slice(begin, stop))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the gathered weights."""
        return self.plan.numel * self.dtype.itemsize

    def to(self, state: ChunkState, memory: torch.Tensor | None = None) -> None:
        """Changes state; parameters point into `memory` where the new state has any.

        Raises:
            StateError: the change is not allowed, or the chunk is pinned where it would lose its block.
        """
        if state not in _ALLOWED[self.state] or (state is ChunkState.HOME and self.pins):
            raise StateError(
                f"rank {self.rank}: {self} cannot go from {self.state.value} to {state.value} with {self.pins} pins"
            )
        with DisableTorchFunctionSubclass():  # no listener sees that parameters move, and it is faster
            if self.state is ChunkState.CACHED:
                self.check_unwritten()
            self.state = state
            if memory is not None:
                self.point_into(memory)
                self.watch_writes()
            elif state is ChunkState.HOME and self.shown is None:
                self.hold_placeholders()

    @property
    def filled(self) -> torch.Tensor:
        """The gathered weights of a streamed chunk, which are in the cache or on their way there.

        Raises:
            StateError: they are not; InputError after `close`.
        """
        if self.block is not None and self.block.is_filled:
            return self.block.flat
        if self.dropped:
            raise closed()
        raise StateError(f"rank {self.rank}: chunk {self.index} is {self.state.value}, it has no block")

    def point_into(self, memory: torch.Tensor) -> None:
        """Makes the parameters views of `memory`, which holds the gathered weights."""
        with DisableTorchFunctionSubclass(), unmarked():
            for slot in self.slots:
                slot.parameter.data = slot.part_of(memory)

    def show_attributes(self, memory: torch.Tensor | None) -> None:
        """Makes attributes views of `memory`, which holds the gathered weights; None: of where these are otherwise."""
        with DisableTorchFunctionSubclass(), unmarked():
            for attribute in self.attributes:
                tensor = attribute.tensor()
                if tensor is not None:
                    tensor.data = attribute.home if memory is None else attribute.of(memory)

    def hold_placeholders(self) -> None:
        """Takes their memory from the parameters; nobody may read it unannounced from here on."""
        with DisableTorchFunctionSubclass():
            for slot in self.slots:
                slot.parameter.data = slot.placeholder

    def drop_memory(self) -> None:
        """Lets go of weights, masters and gathered weights; nothing can use the chunk afterwards."""
        self.shard = self.weights = self.masters = self.block = self.shown = self._lent = None
        self.filed = self.stored = None
        self.dropped = True

    def wants(self, slot: Slot) -> bool:
        """Whether this rank keeps any element of a parameter."""
        return self.weights is not None or slot.name in self.held

    @contextlib.contextmanager
    def in_memory(self, *, write: bool = False) -> Iterator[None]:
        """Inside, masters and states that are kept on a disk are in memory; others always are. One chunk at a time.

        Args:
            write: they are changed.

        Raises:
            DiskError: they are on a disk that has failed.
        """
        if self.stored is None:
            yield
        else:
            with self.stored.in_memory(write):
                yield

    def about_to_write(self) -> None:
        """Waits until no checkpoint reads this rank's shard, masters and states from where they lie."""
        self.writes += 1
        if self.before_write is not None:
            self.before_write()

    def exchange_state(self, master: torch.Tensor, weights: torch.Tensor | None) -> None:
        """Replaces the states of this rank's shard by other memory, in which a step has made new ones.

        Whatever else views the states belongs to the chunk's optimizer (`SteppedShard.end_early`), which calls this.

        Args:
            master: holds what the optimizer steps: masters, or the weights themselves.
            weights: holds the shard of weights where these live on the host and have masters; None otherwise.
        """
        self.states, self.second = self.second, self.states
        if self.masters is None:
            self.shard, self.at_home = master, self.states
            return
        self.masters = master
        if weights is not None:
            self.shard = weights
            self.at_home, self.rounded = self.rounded, self.at_home

    def write(self, slot: Slot, values: torch.Tensor) -> None:
        """Takes `values` for one parameter's weights, in its shape and any floating dtype: masters are not rounded."""
        self.about_to_write()
        flat, held = slot.flattened(values), self.held.get(slot.name)
        if self.weights is not None:
            self.weights[slot.offset : slot.offset + slot.numel].copy_(flat)
        if held is None:
            return
        own = flat[held.first : held.first + held.numel]
        self.refuse_unlike_file(slot, own)
        if self.shard is not None:
            self.shard[held.part].copy_(own)
        if self.masters is not None:
            with self.in_memory(write=True):
                self.masters[held.part].copy_(own)

    def refuse_unlike_file(self, slot: Slot, own: torch.Tensor) -> None:
        """Raises `InputError` if weights that live in a file are to be written, unless `own`, this rank's part, is what
        the file has."""
        if self.filed is not None and not self.filed.has(slot.name, own):
            raise InputError(
                f"{slot.name} lives in {self.filed.files.file_of(self.filed.names[slot.name])}, which is not written "
                "to: other values would be lost; save them as safetensors and wrap the model with these, or plan with "
                "frozen_weights='host'"
            )

    def synchronize_weights(self) -> None:
        """Blocks until the weights at home, and the gathered ones of a resident chunk, are those of the last step."""
        for ticket in self.updates if self.weights is None else written(self.states, self.at_home, self.whole):
            ticket.synchronize()  # this thread reads what the step writes

    @property
    def updates(self) -> list[Ticket]:
        """The last work that writes masters, states, and weights at home."""
        return written(self.states, self.at_home)

    def follow_writes(self) -> None:
        """Lets masters take the weights that were written to, which are no longer what their masters round to."""
        if self.masters is None or self.kept is not None:
            return
        if self.stored is None and self.masters.device.type == "cpu" and not self._were_written(self.masters).any():
            return  # new states that are being made of the masters stay right
        self.about_to_write()
        with self.in_memory():
            if self.stored is not None and not self._were_written(self.masters).any():
                return  # nothing to write back to the disk
            with self.in_memory(write=True):
                _follow(self.masters, self.shard_weights)

    def stand_in(self, shard: torch.Tensor | None) -> None:
        """Makes loads read `shard`, such as averages of the weights, in place of the shard at home; None ends it. Lanes
        must be at rest, and blocks empty."""
        self.kept, self.shard = (None, self.kept) if shard is None else (self.shard, shard)

    def _were_written(self, masters: torch.Tensor) -> torch.Tensor:
        """Compares by element: whether the shard of weights is not what the masters round to."""
        return masters.to(self.dtype) != self.shard_weights.to(masters.device)

    def take(self, memory: torch.Tensor, slots: Sequence[Slot]) -> None:
        """Writes the gathered weights of some parameters from `memory` into their home."""
        self.about_to_write()
        for slot in slots:
            if self.weights is not None:
                begin, stop = slot.offset, slot.offset + slot.numel
                self.weights[begin:stop].copy_(memory[begin:stop])
            if slot.name in self.held:
                part = self.held[slot.name].part
                self.refuse_unlike_file(slot, memory[self.mine][part])
                if self.shard is not None:
                    self.shard[part].copy_(memory[self.mine][part])
        self.follow_writes()

    @property
    def on_one_rank(self) -> bool:
        """Whether no other rank has a part of it."""
        return self.shard_numel == self.plan.numel

    @property
    def may_be_written_inside(self) -> bool:
        """Whether a forward may write to its weights, see `take_written`: not to files, and masters have to be in
        memory, or to follow in the next step."""
        in_memory = self.stored is None and self.filed is None
        return in_memory or (self.weights is not None and self.on_one_rank)

    def take_written(self, parameter: nn.Parameter) -> None:
        """Keeps what was written to a parameter while the gathered weights are there."""
        place, slot = next((at, slot) for at, slot in enumerate(self.slots) if slot.parameter is parameter)
        memory = self.filled if self.weights is None else self.weights
        if slot.name in self.held:
            part = self.held[slot.name].part
            own = memory[self.mine][part]
            if self.shard is not None:
                self.shard[part].copy_(own)
            if self.masters is not None and self.stored is None:
                _follow(self.masters[part], own)
        if self._versions:  # see `check_unwritten`
            self._versions[place] = parameter._version

    def lend(self, data: torch.Tensor) -> torch.Tensor:
        """Returns ``data`` of a parameter; `data_writes` counts what is written through it if it lies in the resident
        weights. PyTorch gives the tensor another count each time."""
        if self.weights is None or data.dtype != self.dtype or storage_of(data) != storage_of(self.weights):
            return data
        if self._lent is None:
            with torch.inference_mode(False):  # otherwise it would have no count
                self._lent = self.weights.data
        return self._lent.as_strided(data.shape, data.stride(), data.storage_offset())

    @property
    def data_writes(self) -> int:
        """How often resident weights were written to through ``data`` of a parameter, or taken from other memory."""
        return self.taken_back + (0 if self._lent is None else self._lent._version)

    def moved(self, memory: torch.Tensor, slots: Sequence[Slot] | None = None) -> list[Slot]:
        """The parameters, all or those in `slots`, that are no views of `memory` any more, since somebody has set their
        ``data``."""
        first, slots = memory.data_ptr(), self.slots if slots is None else slots
        with DisableTorchFunctionSubclass():
            return [slot for slot in slots if not self._is_at(slot, first + slot.offset * memory.itemsize)]

    def _is_at(self, slot: Slot, address: int) -> bool:
        parameter = slot.parameter
        alike = parameter.stride() == slot.stride and parameter.shape == slot.shape and parameter.dtype == self.dtype
        return alike and (parameter.data_ptr() == address or not slot.numel)

    def refuse_other(self, slot: Slot) -> None:
        """Raises `InputError` if a parameter was given values of another shape or dtype."""
        parameter = slot.parameter
        if parameter.shape != slot.shape or parameter.dtype != self.dtype:
            raise InputError(
                f"{slot.name} was given {list(parameter.shape)} values of {parameter.dtype}, its weights are "
                f"{list(slot.shape)} of {self.dtype}: copy values with parameter.copy_(tensor)"
            )

    def with_moved(self, weights: torch.Tensor) -> torch.Tensor:
        """`weights`, gathered or masters of them, with the values of parameters that have other memory now: a copy, if
        there are any. What somebody keeps of their memory before stays as it is."""
        moved = [] if self.weights is None else self.moved(self.weights)
        if not moved:
            return weights
        found = weights.clone()
        with DisableTorchFunctionSubclass(), torch.no_grad():
            for slot in moved:
                self.refuse_other(slot)
                _follow(found[slot.offset : slot.offset + slot.numel], slot.flattened(slot.parameter.detach()))
        return found

    def show(self, slot: Slot) -> None:
        """Lets the parameter point to where it does while no block holds the chunk."""
        with DisableTorchFunctionSubclass():
            slot.parameter.data = slot.placeholder if self.weights is None else slot.part_of(self.weights)

    def shows(self, slot: Slot) -> bool:
        """Whether the parameter points into the chunk, so that only the chunk has its weights."""
        with DisableTorchFunctionSubclass():
            memory = slot.placeholder if self.weights is None else self.weights
            return storage_of(slot.parameter) == storage_of(memory)

    def attach(self) -> None:
        """Points all parameters into the chunk, and makes it resident if the plan says so. It repeats no work."""
        for slot in self.slots:
            if slot.parameter.is_meta:
                become_real(slot.parameter, slot.placeholder)
            if not self.shows(slot):
                self.show(slot)
        if self.weights is not None and self.state is ChunkState.HOME:
            self.to(ChunkState.RESIDENT, self.weights)

    def let_go(self) -> None:
        """Gives up all memory, because others have the weights now."""
        self.shard = self.weights = self.masters = self.filed = None

    def parameter_at(self, offset: int) -> nn.Parameter:
        """The parameter that lies at this element of the chunk."""
        return self.slots[max(bisect_right(self._offsets, offset) - 1, 0)].parameter

    def watch_writes(self) -> None:
        """Notes what the weights are, for `check_unwritten`."""
        self._versions = self._versions_now()

    def check_unwritten(self) -> None:
        """Refuses what a forward wrote to a weight since and nothing announced: it would be lost, since blocks never go
        back home, nor do gathered weights to their shard."""
        before, self._versions = self._versions, self._versions_now()  # said once
        for slot, old, new in zip(self.slots, before, self._versions, strict=True):
            if new != old:
                raise InputError(
                    f"rank {self.rank}: the forward wrote to {slot.name} in place, by a function whose name does not "
                    "say so, or in a layer that is fetched as one and did not when it was traced, which would be lost "
                    "when its memory is given to another chunk; write to it inside `with model.gathered(parameters, "
                    "write=True)`, between steps"
                )

    def _versions_now(self) -> list[int]:
        return [slot.parameter._version for slot in self.slots]


def take_back(places: Iterable[tuple[Chunk, torch.Tensor, Sequence[Slot]]]) -> None:
    """Copies parameters that were given other memory back to where they were views, and makes them views again.

    Args:
        places: chunks with the memory in question and the parameters.

    Raises:
        InputError: one was given values of another shape or dtype.
    """
    found = [(chunk, memory, slot) for chunk, memory, slots in places for slot in chunk.moved(memory, slots)]
    with DisableTorchFunctionSubclass(), torch.no_grad():
        for chunk, _, slot in found:
            chunk.refuse_other(slot)
        # All of them first: parameters may have exchanged their memory.
        values = [slot.parameter.detach().clone() for _, _, slot in found]
        for (chunk, memory, slot), value in zip(found, values, strict=True):
            chunk.about_to_write()
            chunk.taken_back += 1
            slot.parameter.data = slot.part_of(memory).copy_(value)
