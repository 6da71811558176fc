"""The gradient of one chunk on one rank: who holds it, and the only ways from one holder to the next.

`PartNorms` are the norms of its parts; `GradientBlocks` is the memory in which gradients arrive.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.lanes import Lane
from elixir.chunk.memory import Arena, Memory
from elixir.errors import StateError
from elixir.torch_private import foreach_norm

# --- norms of its parts ----------------------------------------------------------------------------------------------
# Norms of single gradients: summed where a gradient is, and for what leaves for the host, before it leaves.
#
# Clipping needs the norm of all gradients. Read from the host after backward, they would keep the device, the link and
# the host's Adam waiting for as long as that takes. So each parameter's part of a chunk is summed while the rest of
# backward runs, and the step has only to sum one number per parameter.


ROW_NUMEL = 2**14
"""Elements of low precision on the host that are summed at once; the norms of rows are added as in a tree."""
PIECE_NUMEL = 2**17
"""Elements per thread that are in float32 at a time: 512 KiB, so that they stay in a core's cache."""


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm of gradients in `dtype`: float32 or wider, as `torch.nn.utils.get_total_norm` has it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each flat tensor, in float32 (of float64 in that), where it is. All are on one device.

    float32 gets the bits of `torch.nn.utils.get_total_norm`, however tensors are grouped into calls. In float16 a large
    tensor's norm would overflow though none of its elements does.
    """
    if not gradients:
        return []
    if gradients[0].device.type == "cpu":
        return [_host_norm(gradient) for gradient in gradients]
    if any(gradient.dtype == torch.float64 for gradient in gradients):
        return [torch.linalg.vector_norm(gradient, dtype=norm_dtype(gradient.dtype)) for gradient in gradients]
    return list(foreach_norm(list(gradients), 2.0, dtype=torch.float32))


def _host_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Sums in pieces: torch's CPU kernel converts element by element, in one thread and into one sum: 1 GB/s of
    bfloat16, and 0.4 % off for 5e7 elements."""
    norm: torch.Tensor
    if gradient.dtype in (torch.float32, torch.float64) or gradient.numel() <= ROW_NUMEL:
        norm = torch.linalg.vector_norm(gradient, dtype=norm_dtype(gradient.dtype))
        return norm
    whole = gradient.numel() - gradient.numel() % ROW_NUMEL
    piece_numel = min(PIECE_NUMEL * torch.get_num_threads(), whole)
    wide = torch.empty(piece_numel, device="cpu")
    norms = []
    for piece in gradient[:whole].split(piece_numel):
        rows = wide[: piece.numel()].copy_(piece).view(-1, ROW_NUMEL)
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    norms.append(torch.linalg.vector_norm(gradient[whole:].float()).view(1))
    norm = torch.linalg.vector_norm(torch.cat(norms))
    return norm


class PartNorms:
    """The norms of the parameters' parts of one shard of gradients, as of one moment.

    Code that changes the gradients makes a new one, or none: this one is never brought up to date.

    Args:
        chunk: whose shard it is.
        device: where the norms are kept.
    """

    def __init__(self, chunk: Chunk, device: torch.device | str) -> None:
        self._parts = [held.part for held in chunk.held.values()]
        self._index = {held.place: index for index, held in enumerate(chunk.held.values())}
        self.values = torch.zeros(len(self._parts), dtype=norm_dtype(chunk.dtype), device=device)
        """One per parameter of which the shard has a part."""
        self.memory = Memory(self.values)
        """The same, with the work that fills it, unless compute does."""

    @torch.no_grad()
    def measure(self, shard: torch.Tensor) -> None:
        """Fills in the norms of what `shard` holds."""
        if self._parts:
            torch.stack(norms_of([shard[part] for part in self._parts]), out=self.values)

    def add_and_measure(self, home: torch.Tensor, gradients: torch.Tensor) -> None:
        """Adds `gradients` to `home`, both on the host, and fills in the norms of the sums while they are cached."""
        for index, part in enumerate(self._parts):  # the gaps between them are nobody's
            self.values[index] = _host_norm(home[part].add_(gradients[part]))

    def of(self, place: int) -> torch.Tensor:
        """The norm of the part of the parameter at this place of the chunk; valid once `wait` has returned."""
        return self.values[self._index[place]]

    def wait(self) -> None:
        """Lets compute that reads norms on a device, or this thread, wait for their sums."""
        self.memory.wait()  # a lane writes `values`


# --- chunk gradient --------------------------------------------------------------------------------------------------


class GradState(enum.Enum):
    """Holder of a chunk's gradient on this rank."""

    NONE = "nowhere"
    """No memory holds it. A shard on the device has no memory then, so that activations have room. A shard on the host
    keeps its memory, whose values mean nothing; it has none if the plan foresees no gradient and none has come."""
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


# --- gradient blocks -------------------------------------------------------------------------------------------------
# The blocks on the device in which gradients arrive, and memory that lanes still read.


class GradientBlocks:
    """The gradient blocks of one rank.

    Args:
        arena: makes them.
        count: how many the plan has.
        block_bytes: size of one.
    """

    def __init__(self, arena: Arena, count: int, block_bytes: int) -> None:
        self._arena, self.block_bytes = arena, block_bytes
        self._free = deque(self._made(block_bytes) for _ in range(count))
        self._parts: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        """Views of a block as `OpenChunk.parts`, by its `id` and the index of the chunk: each is made once."""
        self._leaving: deque[OpenChunk] = deque()
        self._numbers = itertools.count()
        self.extra = 0
        """Blocks beyond the plan's, made because a chunk that others wait for never got its gradients."""

    @property
    def are_taken(self) -> bool:
        """Whether gradients are arriving in all blocks, so that none will be free."""
        return not self._free and not self._leaving

    def open(self, chunk: Chunk) -> OpenChunk:
        """Opens a block for a chunk, or separate memory if the chunk is resident and larger than any block."""
        parts: dict[str, torch.Tensor] = {}
        if chunk.weight_bytes > self.block_bytes:
            self._let_outsized_leave()
            memory = self._made(chunk.weight_bytes)
        else:
            memory = self._free_block()
            parts = self._parts.setdefault((id(memory), chunk.index), parts)
        return OpenChunk(memory.view(chunk.plan.numel, chunk.dtype), memory, next(self._numbers), parts)

    def adopt(self, chunk: Chunk, gradient: torch.Tensor, *, counted: bool) -> OpenChunk | None:
        """Takes a gradient that is larger than any block as autograd made it; None if it must be copied.

        Args:
            chunk: all of which it is the gradient of.
            gradient: as autograd made it.
            counted: whether the next one may be made before it has left. Otherwise it is the one in flight, which the
                plan counts with autograd's.
        """
        block = None if chunk.weight_bytes <= self.block_bytes else as_block(chunk, gradient)
        if block is None:
            return None
        self._let_outsized_leave()
        memory = Memory(block, self._arena.count if counted else None, "device", "gradient_blocks")
        return OpenChunk(block, memory, next(self._numbers))

    def leave(self, leaving: OpenChunk) -> None:
        """Keeps memory that lanes are reading from here on, until compute may write there again."""
        leaving.is_extra |= leaving.memory.tensor.nbytes != self.block_bytes
        self._leaving.append(leaving)

    def wait_for_last(self) -> None:
        """Lets compute wait for the memory that left last, which was adopted and not counted."""
        leaving = self._leaving.pop()
        leaving.memory.wait(taking=True)  # autograd frees the gradient next, and compute would write there
        _record(leaving.memory.tensor)

    def give_back(self, memory: Memory) -> None:
        """Frees `memory`, which nobody reads or writes any more."""
        if memory.tensor.nbytes == self.block_bytes:
            self._free.append(memory)
        else:
            _record(memory.tensor)
            memory.free()

    def reclaim_extra(self) -> None:
        """Gives compute all memory beyond the blocks, once it has left. Blocks go on leaving until one is needed."""
        while any(leaving.is_extra for leaving in self._leaving):
            self._reclaim()

    def reclaim_all(self) -> None:
        """Lets compute have all memory."""
        while self._leaving:
            self._reclaim()

    def _made(self, nbytes: int) -> Memory:
        return self._arena.make(nbytes, torch.uint8, "device", "gradient_blocks")

    def _let_outsized_leave(self) -> None:
        """The plan has room for one gradient that is larger than a block, next to the one in flight."""
        while any(leaving.memory.tensor.nbytes > self.block_bytes for leaving in self._leaving):
            self._reclaim()

    def _free_block(self) -> Memory:
        while not self._free and self._leaving:
            self._reclaim()
        if not self._free:
            self.extra += 1
            self._free.append(self._made(self.block_bytes))
        return self._free.popleft()

    def _reclaim(self) -> None:
        """Lets compute have the memory that has been leaving longest."""
        leaving = self._leaving.popleft()
        leaving.memory.wait(taking=True)  # compute would overwrite gradients in `memory` that lanes still read
        self.give_back(leaving.memory)


def _record(memory: torch.Tensor) -> None:
    """Keeps adopted memory from reuse, once it is freed, until the stream that has waited for its lane has come here.

    It returns to the stream that made it. That is another one where a node of an older graph took the gradient on its
    stream; on the same one this does nothing.
    """
    if memory.is_cuda:
        memory.record_stream(torch.cuda.current_stream(memory.device))


def as_block(chunk: Chunk, gradient: torch.Tensor) -> torch.Tensor | None:
    """Returns a gradient that is all of its chunk's, as the block that it would be copied into; None for any other.

    Nobody else holds it: `AccumulateGrad` copies a gradient that has another owner.
    """
    if len(chunk.slots) > 1 or gradient.layout != torch.strided or gradient.dtype != chunk.dtype:
        return None
    slot = chunk.slots[0]
    # Otherwise its weights lie in another order.
    return slot.flattened(gradient.detach()) if gradient.stride() == slot.stride else None
