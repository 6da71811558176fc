"""States of the segments of one chunk's optimizer, by kind and parameter: what a checkpoint saves, and how it comes
back.

A kind is a key of torch's per-parameter state, such as ``exp_avg``. Elementwise states are tensors over a stretch of
the flattened parameter. Counts of steps and other scalars belong to the parameter as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from elixir.checkpoint_format.tensors import scalar_state
from elixir.chunk.chunk import Slot
from elixir.chunk.disk import StoredStates
from elixir.errors import InputError
from elixir.kernels.adam import Moments, write_moments
from elixir.memory_order import Order, flattened, is_dense, order_of, shaped
from elixir.optimizer_states import BLOCK_NUMEL
from elixir.units import dtype_name
from elixir.wrapper.step.chunk_optimizer import ChunkOptimizer
from elixir.wrapper.step.fused_adam import FusedAdam
from elixir.wrapper.step.segments import Segment
from elixir.wrapper.step.shard_states import ShardStates

SCALE_SUFFIX = "_scale"
"""Kind of the scales of 8-bit codes: ``exp_avg`` -> ``exp_avg_scale``."""
PIECE_NUMEL = 2**20
"""Elements that are converted at once where states come in another form: 4 MiB of float32, whole blocks of codes."""
ADAM_KINDS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OnDisk:
    """Where the elements of a stretch are on a disk."""

    stored: StoredStates
    region: str
    start: int
    """First element of the stretch in the region."""

    def read(self, first: int, stop: int) -> torch.Tensor:
        """Elements from `first` to `stop` of the stretch, in separate memory."""
        return self.stored.read(self.region, self.start + first, self.start + stop)


@dataclass(frozen=True)
class Stretch:
    """Elements of one saved tensor that this rank has."""

    kind: str
    name: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    order: Order | None
    """In which its elements lie."""
    start: int
    """First element in the flattened tensor."""
    tensor: torch.Tensor
    """The live elements, flat."""
    has_codes: bool = False
    """Whether these are codes of 8 bits, in blocks of which the first begins where the parameter begins."""
    is_state: bool = True
    """Whether it is the state of an optimizer, and no weight."""
    on_disk: OnDisk | None = None
    """Where they are read from, if they live on a disk; `tensor` then only says how many there are."""

    @property
    def dtype(self) -> torch.dtype:
        """In which it is saved."""
        return self.tensor.dtype

    @property
    def numel(self) -> int:
        """Elements of the stretch."""
        return self.tensor.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of the stretch as it is saved."""
        return self.tensor.nbytes

    def values(self, first: int, stop: int) -> torch.Tensor:
        """Elements from `first` to `stop` of the stretch, where they lie; of those on a disk, in separate memory."""
        return self.tensor[first:stop] if self.on_disk is None else self.on_disk.read(first, stop)


@dataclass
class SmallStates:
    """States of a parameter that are no tensors over its elements."""

    step: int | None = None
    others: dict[str, Any] = field(default_factory=dict)
    """Kind -> a number, or (dtype, number) of a tensor without dimensions."""


class SavedStates(Protocol):
    """States to go on from, by parameter."""

    def kinds(self, name: str) -> Collection[str]:
        """Elementwise states of a parameter, scales of codes not among them; none where it has no state."""

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """In which a state is saved; that of its codes where it has any."""

    def has_codes(self, kind: str, name: str) -> bool:
        """Whether it is saved as codes of 8 bits."""

    def order(self, kind: str, name: str) -> Order | None:
        """In which its elements lie, whatever the order in which the parameter has them here."""

    def small(self, name: str) -> SmallStates:
        """Its other states."""

    def fill(self, kind: str, name: str, start: int, out: torch.Tensor) -> None:
        """Have `out`, flat, filled with the elements from `start` on, in the order in which the parameter has them
        here, and in its dtype; codes only into their own. It is after `filled`."""

    def filled(self) -> None:
        """Wait for all that `fill` has begun; raises what went wrong with it."""


def first_element(part: ChunkOptimizer, segment: Segment) -> int:
    """The element of its flattened parameter with which a segment begins."""
    return part.chunk.shard_start + segment.start - part.chunk.slots[segment.place].offset


def stretches(part: ChunkOptimizer, states: ShardStates) -> Iterator[Stretch]:
    """All elementwise `states` of a chunk's shard, as views of live memory; of segments that have been stepped."""
    optimizer = states.optimizer
    for segment in states.segments:
        slot, start, numel = part.chunk.slots[segment.place], first_element(part, segment), segment.weights.numel()
        if isinstance(optimizer, FusedAdam):
            if optimizer.steps_of(segment):
                yield from _of_moments(part, optimizer.moments, slot, start, segment, numel)
            continue
        state = optimizer.state.get(segment.weights, {})
        if not _has_begun(state):
            continue
        for kind, value in state.items():
            if kind != "step" and isinstance(value, torch.Tensor) and value.shape == segment.weights.shape:
                on_disk = _on_disk(part, kind, value, segment.start)
                order, flat = slot.order, value.detach()
                if on_disk is None:
                    own = _order_in_memory(value, kind, segment)
                    order = slot.order if own == segment.order else own  # a class may lay out its states as it likes
                    flat = flattened(flat, own)
                yield Stretch(kind, segment.name, tuple(slot.shape), order, start, flat, on_disk=on_disk)


def _of_moments(
    part: ChunkOptimizer, moments: Moments, slot: Slot, start: int, segment: Segment, numel: int
) -> Iterator[Stretch]:
    first, stop, name, shape = segment.start, segment.start + numel, slot.name, tuple(slot.shape)
    for kind, values, scales in (
        ("exp_avg", moments.exp_avg, moments.exp_avg_scale),
        ("exp_avg_sq", moments.exp_avg_sq, moments.exp_avg_sq_scale),
    ):
        on_disk = _on_disk(part, kind, values, first)
        has_codes = scales is not None
        yield Stretch(kind, name, shape, slot.order, start, values[first:stop], has_codes=has_codes, on_disk=on_disk)
        if scales is not None:
            # By `Plan.alignment_bytes` no block has elements of another parameter or rank.
            blocks = slice(first // BLOCK_NUMEL, -(-stop // BLOCK_NUMEL))
            on_disk = _on_disk(part, kind + SCALE_SUFFIX, scales, blocks.start)
            whole = (-(-slot.numel // BLOCK_NUMEL),)
            yield Stretch(kind + SCALE_SUFFIX, name, whole, None, start // BLOCK_NUMEL, scales[blocks], on_disk=on_disk)


def _on_disk(part: ChunkOptimizer, kind: str, tensor: torch.Tensor, start: int) -> OnDisk | None:
    stored = part.chunk.stored
    return None if stored is None else OnDisk(stored, part.where_stored(kind, tensor.dtype), start)


def have_begun(part: ChunkOptimizer) -> bool:
    """Whether every segment has states, and no step makes others."""
    optimizer = part.optimizer
    if not part.is_known:
        return False
    if isinstance(optimizer, FusedAdam):
        return all(optimizer.steps_of(segment) for segment in part.segments)
    return all(_has_begun(optimizer.state.get(segment.weights, {})) for segment in part.segments)


def small_states(states: ShardStates) -> dict[str, SmallStates]:
    """Counts of steps and other scalars of a chunk's parameters, as of now.

    Raises:
        InputError: a state is neither elementwise nor a number.
    """
    found: dict[str, SmallStates] = {}
    optimizer = states.optimizer
    for segment in states.segments:
        if isinstance(optimizer, FusedAdam):
            steps = optimizer.steps_of(segment)
            if steps:
                found[segment.name] = SmallStates(steps)
            continue
        state = optimizer.state.get(segment.weights, {})
        if not _has_begun(state):
            continue
        small = found[segment.name] = SmallStates()
        for kind, value in state.items():
            if kind == "step":
                small.step = _count(value, segment.name)
                if not isinstance(value, torch.Tensor):
                    small.others[kind] = small.step
            elif isinstance(value, torch.Tensor) and value.shape != segment.weights.shape:
                if value.dim():
                    raise InputError(
                        f"state {kind!r} of {segment.name} has shape {list(value.shape)}, neither that of its weights "
                        "nor a "
                        "number, so it cannot be saved"
                    )
                small.others[kind] = (dtype_name(value.dtype), value.item())
            elif isinstance(value, (bool, int, float)):
                small.others[kind] = value
            elif value is not None and not isinstance(value, torch.Tensor):
                raise InputError(
                    f"state {kind!r} of {segment.name} is a {type(value).__name__}, which cannot be saved; states are "
                    "tensors and numbers"
                )
    return found


def load_states(part: ChunkOptimizer, saved: SavedStates) -> set[str]:
    """Have the states of a chunk's shard be those that are saved, and none where none are; notes on what is not exact.

    Nothing else may read or step the chunk meanwhile, and it is at hand (`Chunk.at_hand`).
    """
    notes: set[str] = set()
    optimizer = part.optimizer
    if isinstance(optimizer, FusedAdam):
        for tensor in optimizer.moments.tensors():
            tensor.zero_()
        optimizer.state.clear()
        for segment in part.segments:
            if saved.kinds(segment.name):
                notes |= _load_moments(part, optimizer.moments, segment, saved)
                optimizer.set_steps(segment, saved.small(segment.name).step or 0)
        return notes
    if part.chunk.stored is not None:
        saved.filled()  # regions that are made may move the others in memory
        for segment in part.segments:
            for kind in saved.kinds(segment.name):
                part.new_state(kind, segment, _loaded_dtype(saved, kind, segment))
    for segment in part.segments:
        notes |= _load_state(part, optimizer, segment, saved)
    saved.filled()  # states that were made here may be moved now
    part.states_were_made()
    return notes


def _load_moments(part: ChunkOptimizer, moments: Moments, segment: Segment, saved: SavedStates) -> set[str]:
    start, numel, at, name = first_element(part, segment), segment.weights.numel(), segment.start, segment.name
    if moments.kind != "8bit":
        for kind, target in zip(ADAM_KINDS, moments.tensors(), strict=True):
            saved.fill(kind, name, start, target[at : at + numel])
        return _other_form(saved, name, moments.kind)
    order = part.chunk.slots[segment.place].order
    if all(saved.has_codes(kind, name) and saved.order(kind, name) == order for kind in ADAM_KINDS):
        blocks = slice(at // BLOCK_NUMEL, -(-(at + numel) // BLOCK_NUMEL))
        saved.fill("exp_avg", name, start, moments.exp_avg[at : at + numel])
        saved.fill("exp_avg_sq", name, start, moments.exp_avg_sq[at : at + numel])
        for kind, scales in zip(ADAM_KINDS, (moments.exp_avg_scale, moments.exp_avg_sq_scale), strict=True):
            if scales is not None:
                saved.fill(kind + SCALE_SUFFIX, name, start // BLOCK_NUMEL, scales[blocks])
        return set()
    for first, stop in _pieces(at, at + numel):
        avg, square = (torch.empty(stop - first, dtype=torch.float32, device="cpu") for _ in ADAM_KINDS)
        saved.fill("exp_avg", name, start + first - at, avg)
        saved.fill("exp_avg_sq", name, start + first - at, square)
        saved.filled()
        device = moments.exp_avg.device
        write_moments(moments, first, avg.to(device), square.to(device))
    return {_changed(dtype_name(saved.dtype("exp_avg", name)), "8bit")}


def _load_state(
    part: ChunkOptimizer, optimizer: torch.optim.Optimizer, segment: Segment, saved: SavedStates
) -> set[str]:
    weights, name = segment.weights, segment.name
    made, kinds, small = optimizer.state.get(weights, {}), saved.kinds(name), saved.small(name)
    if not kinds and small.step is None and not small.others:
        # As before its first step: what lies ready for that is kept.
        if "step" in made and isinstance(made["step"], torch.Tensor):
            for value in made.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        else:
            optimizer.state.pop(weights, None)
        return set()
    notes, state = set(), {}
    if small.step is not None and "step" not in small.others:
        state["step"] = _step_tensor(made.get("step"), small.step, weights, optimizer.param_groups[segment.group])
    for kind in kinds:
        wanted = _loaded_dtype(saved, kind, segment)
        state[kind] = mine = _state_to_fill(part, kind, segment, saved)
        first = first_element(part, segment)
        if order_of(mine.shape, mine.stride()) == segment.order:
            saved.fill(kind, name, first, flattened(mine.detach(), segment.order))
        else:
            flat = mine.new_empty(mine.numel())
            saved.fill(kind, name, first, flat)
            saved.filled()  # what it reads is copied next
            mine.copy_(shaped(flat, mine.shape, segment.order))
        if saved.has_codes(kind, name) or saved.dtype(kind, name) != wanted:
            notes |= _other_form(saved, name, dtype_name(wanted), kind)
    state |= {kind: scalar_state(value) for kind, value in small.others.items()}
    optimizer.state[weights] = state
    return notes


def _state_to_fill(part: ChunkOptimizer, kind: str, segment: Segment, saved: SavedStates) -> torch.Tensor:
    """The state that the class has made if it is one to go on with, otherwise another."""
    weights, wanted = segment.weights, _loaded_dtype(saved, kind, segment)
    made = part.optimizer.state.get(weights, {}).get(kind)
    if (
        isinstance(made, torch.Tensor)
        and (made.shape, made.dtype) == (weights.shape, wanted)
        and is_dense(made.shape, made.stride())
    ):
        return made
    order = saved.order(kind, segment.name)
    if weights is segment.source and order != segment.order:  # as plain PyTorch, which keeps what is loaded
        return shaped(weights.new_zeros(weights.numel(), dtype=wanted), weights.shape, order)
    return part.new_state(kind, segment, wanted)


def _loaded_dtype(saved: SavedStates, kind: str, segment: Segment) -> torch.dtype:
    """The dtype in which a state goes on: in no fewer bits than the weights."""
    dtype, weights = saved.dtype(kind, segment.name), segment.weights
    narrow = saved.has_codes(kind, segment.name) or (
        dtype.is_floating_point and dtype.itemsize < weights.dtype.itemsize
    )
    return weights.dtype if narrow else dtype


def _step_tensor(made: Any, step: int, weights: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    if isinstance(made, torch.Tensor):
        return made.fill_(float(step))
    # As torch.optim makes them: a fused step counts on the device of its weights.
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    device = weights.device if group.get("fused") else torch.device("cpu")
    return torch.tensor(float(step), dtype=torch.float64 if wide else torch.float32, device=device)


def _has_begun(state: Mapping[str, Any]) -> bool:
    """Whether a state is more than what was allocated ahead of the first step."""
    if not state:
        return False
    step = state.get("step")
    return step is None or bool(step > 0)


def _count(value: Any, name: str) -> int:
    number = float(value)
    if number != int(number):
        raise InputError(f"state 'step' of {name} is {number}, expected a whole number")
    return int(number)


def _order_in_memory(value: torch.Tensor, kind: str, segment: Segment) -> Order | None:
    if not is_dense(value.shape, value.stride()):
        raise InputError(
            f"state {kind!r} of {segment.name} has gaps between its elements in memory, or several in one place, so it "
            "cannot be saved; have the class keep state.contiguous()"
        )
    return order_of(value.shape, value.stride())


def _pieces(first: int, stop: int) -> Iterable[tuple[int, int]]:
    """Stretches of at most `PIECE_NUMEL`, parted between blocks so that each block is rounded once."""
    while first < stop:
        end = min(stop, (first // PIECE_NUMEL + 1) * PIECE_NUMEL)
        yield first, end
        first = end


def _other_form(saved: SavedStates, name: str, mine: str, kind: str = "exp_avg") -> set[str]:
    form = "8bit" if saved.has_codes(kind, name) else dtype_name(saved.dtype(kind, name))
    return set() if form == mine else {_changed(form, mine)}


def _changed(form: str, mine: str) -> str:
    return f"moments saved in {form} are kept in {mine} here, to the nearest that it has"
