"""The gradient of one chunk on one rank: who holds it, and the only ways from one holder to the next."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from elixir.chunk.arena import Arena
from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.lanes import Lane
from elixir.chunk.memory import Memory
from elixir.chunk.part_norms import PartNorms
from elixir.errors import StateError


class GradState(enum.Enum):
    """Holder of a chunk's gradient on this rank."""

    NONE = "nowhere"
    """No memory holds it. A shard on the host keeps its memory, whose values mean nothing, unless the plan foresees no
    gradient and none has come; one on the device has none, so that activations have room."""
    ARRIVING = "arriving"
    """A gradient block holds what has come in this backward. Nothing is at home."""
    HOME = "at home"
    """The shard holds the sum of all backwards since gradients were cleared, once it has arrived. Until then lanes
    read the block that it came in, which `GradientBlocks` keeps."""
    ADDING = "at home, with more arriving"
    """The shard holds gradients as in `HOME`; a gradient block holds those of this backward, to be added when it
    leaves."""


_NEXT = {
    # At home at once are zeros, for a chunk that other ranks have gradients of.
    GradState.NONE: (GradState.ARRIVING, GradState.HOME),
    GradState.ARRIVING: (GradState.NONE,),
    GradState.HOME: (GradState.ADDING, GradState.NONE),
    GradState.ADDING: (GradState.HOME, GradState.ARRIVING),
}


@dataclass
class OpenChunk:
    """A gradient block in which a chunk's gradients are arriving, and from which they leave."""

    block: torch.Tensor
    """The gradients, one element for each of the chunk."""
    memory: Memory
    """The memory that `block` lies in."""
    number: int
    """Number of the block in the order of opening."""
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Views of `block` in the shape of a parameter, by its name, as far as they have been made."""
    arrived: set[str] = field(default_factory=set)
    kept_alive: tuple[torch.Tensor, ...] = ()
    """Temporary tensors of the reduction. If they were let go while gradients leave, compute would get their memory
    while it is read."""
    is_extra: bool = False
    """Whether any of this is memory beyond the gradient blocks, which the next forward needs for activations."""

    def part_of(self, slot: Slot) -> torch.Tensor:
        """The part of a parameter."""
        part = self.parts.get(slot.name)
        if part is None:
            part = self.parts[slot.name] = slot.part_of(self.block)
        return part

    def fill_gaps(self, chunk: Chunk) -> None:
        """Fills zeros in for the gradients that did not come."""
        for slot in chunk.slots:
            if slot.name not in self.arrived:
                self.block[slot.offset : slot.offset + slot.numel].zero_()


@dataclass
class KeptGradients:
    """A whole chunk's gradients that came late, which this rank has not shared yet, at the home of the states."""

    memory: Memory
    """Each backward adds to it."""
    arrived: set[str] = field(default_factory=set)


class ChunkGradient:
    """The gradient of one chunk: its state, this rank's shard at home, and what is on its way there.

    Args:
        chunk: whose gradient it is.
        arena: makes and counts the memory.
    """

    def __init__(self, chunk: Chunk, arena: Arena) -> None:
        self.chunk, self._arena = chunk, arena
        self.state = GradState.NONE
        self.memory = Memory(count=arena.count, home=chunk.plan.update_home, kind="gradients")
        """This rank's shard, where the optimizer states live; empty if there is none now. A gradient's arrival and the
        optimizer's step on the host write it, since a step may clip in place; early updates read it."""
        self.arrived: set[str] = set()
        """Names of the parameters that got a gradient on this rank since the last step."""
        self.dropped: set[str] = set()
        """Names of the parameters whose part counts as zero, and is made so when the next gradient is added."""
        self.is_partial: bool | None = None
        """Whether what is at home is the sum of this replica alone; None before any came. The same on all ranks."""
        self.norms: PartNorms | None = None
        """Norms of what `memory` holds once it has arrived; None if they were not summed on the way. A change of the
        gradients replaces them."""
        self.changes = 0
        """Version counter of the gradient that `memory` holds, or will hold once it has arrived."""
        self.opened: OpenChunk | None = None
        self.kept: KeptGradients | None = None
        if chunk.plan.update_home == "host" and chunk.plan.reduce_order is not None:
            self.make_memory()

    def to(self, state: GradState) -> None:
        """Changes state.

        Raises:
            StateError: the change is not allowed.
        """
        if state not in _NEXT[self.state]:
            raise StateError(
                f"rank {self.chunk.rank}: the gradient of {self.chunk} cannot go from '{self.state.value}' to "
                f"'{state.value}'"
            )
        self.state = state

    @property
    def holds(self) -> bool:
        """Whether a gradient is at home, so that the next one is added."""
        return self.state in (GradState.HOME, GradState.ADDING)

    def ends_partial(self, over_replicas: bool) -> bool:
        """Whether what comes next is summed over the replicas together with what is at home."""
        return over_replicas and self.is_partial is True

    @property
    def is_complete(self) -> bool:
        """Whether all parameters of the chunk have a gradient in the open block."""
        return self.opened is not None and len(self.opened.arrived) == len(self.chunk.slots)

    def open(self, opened: OpenChunk) -> OpenChunk:
        """Gradients begin to arrive in a block."""
        self.to(GradState.ADDING if self.holds else GradState.ARRIVING)
        self.opened = opened
        return opened

    def close(self) -> OpenChunk | None:
        """Closes the open block and returns it, if there is one; the caller owns it from here on."""
        opened, self.opened = self.opened, None
        if opened is not None:
            self.to(GradState.HOME if self.holds else GradState.NONE)
        return opened

    def has(self, name: str) -> bool:
        """Whether this rank got a gradient of a parameter since they were last cleared."""
        return any(part is not None and name in part.arrived for part in (self, self.opened, self.kept))

    def make_memory(self) -> None:
        """Makes memory for the shard, zeros, unless it is there."""
        if not self.memory.tensor.numel():
            chunk = self.chunk
            home = chunk.plan.update_home
            made = self._arena.make(chunk.shard_numel, chunk.dtype, home, "gradients", passing=home == "device")
            self.memory.tensor = made.tensor

    def parts_of(self, names: Collection[str]) -> list[torch.Tensor]:
        """The parts of the shard that are some parameters'."""
        return [self.memory.tensor[held.part] for name, held in self.chunk.held.items() if name in names]

    def keep(self, opened: OpenChunk, device: torch.device) -> KeptGradients:
        """Returns the memory in which this rank keeps whole gradients to itself, and enters those in `opened`."""
        if self.kept is None:
            home = self.chunk.plan.update_home
            zeros = torch.zeros_like(opened.block, device=device if home == "device" else torch.device("cpu"))
            self.kept = KeptGradients(Memory(zeros, self._arena.count, home, "gradients"))
        self.kept.arrived |= opened.arrived
        return self.kept

    def forget_kept(self) -> None:
        """Drops what this rank has kept to itself."""
        kept, self.kept = self.kept, None
        if kept is None:
            return
        kept.memory.wait()  # a gradient must not be added to memory that compute uses for something else
        kept.memory.free()

    def clear(self) -> None:
        """Forgets the gradient, no block of which is open."""
        self.forget_kept()
        self.changes += 1
        self._forget()

    def hold_zeros(self) -> None:
        """Puts zeros at home if nothing is there: other ranks have a gradient of the chunk, and this rank's part is
        zero."""
        if self.holds:
            return
        self.norms = None
        self.changes += 1
        if self.memory.tensor.numel():
            # The last gradient must not arrive in `memory` after the zeros, and the step before may still read it.
            self.memory.synchronize(taking=True)
            self.memory.tensor.zero_()
        self.make_memory()
        self.to(GradState.HOME)

    def drop(self, name: str, offload: Lane, *, one_rank: bool) -> None:
        """Forgets the gradient of one parameter where it is kept or at home.

        Nothing is waited for: its part of the shard is made zero before the next gradient is added there, and nobody
        reads it until then.

        Args:
            name: of the parameter.
            offload: writes to what is kept.
            one_rank: there are no other ranks, which may hold parts of it.
        """
        kept = self.kept
        if kept is not None and name in kept.arrived:
            kept.arrived.remove(name)
            if kept.arrived:
                part = next(slot for slot in self.chunk.slots if slot.name == name).part_of(kept.memory.tensor)
                offload.submit(part.zero_, reads=[kept.memory], writes=[kept.memory])  # after the last addition
            else:
                self.forget_kept()
        if not self.holds:
            return
        self.changes += 1
        self.arrived.discard(name)
        self.dropped.add(name)  # where other ranks got a gradient of it this one holds a part of that
        if (one_rank and not self.arrived) or all(slot.name in self.dropped for slot in self.chunk.slots):
            self._forget()

    def _forget(self) -> None:
        """Forgets the gradient at home. Memory on the device is freed, since it exists only while gradients do."""
        self.arrived = set()
        self.is_partial = self.norms = None
        self.dropped.clear()
        if self.holds:
            self.to(GradState.NONE if self.state is GradState.HOME else GradState.ARRIVING)
        if self.memory.tensor.numel() and self.chunk.plan.update_home == "device":
            self.memory.wait()  # a gradient must not arrive in `memory` once compute uses it for something else
            self.memory.free()
