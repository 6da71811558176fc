"""`Shard`: one optimizer's part of one chunk on this rank: states, a second set, gradients, writes to weights."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Container, Sequence
from functools import partial

import torch
from torch import nn

from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.gradients.chunk_gradient import ChunkGradient
from elixir.chunk.memory import Memory
from elixir.chunk.state_window import MASTERS
from elixir.errors import StateError
from elixir.memory_order import shaped
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.early_update import EarlyUpdate, Inputs, second_set
from elixir.wrapper.step.segments import Arrived, Segment, cut_segments
from elixir.wrapper.step.states import BY_CLASS, MovedStates, SavedStates, States
from elixir.wrapper.step.user_optimizer import UserOptimizer


class ShardState(enum.Enum):
    """The current set of states. `Shard.begin_early`, `end_early`, `load` and `leave` change it.

    Two questions are left to others, since this thread would have to wait for the answer: `Chunk.states` knows whether
    work on the states is over, and `Chunk.stored` whether states on a disk are in memory.
    """

    AWAITED = "awaited"
    """The shard is new under this plan, and the chunk's states under the previous plan come next. States that a class
    has created meanwhile are dropped."""
    STEADY = "steady"
    """`states` will hold the result of the last submitted update."""
    EARLY = "early"
    """The state `STEADY` while an early update computes new states in `second`, which nothing else reads."""
    LEFT = "left"
    """The states belong to another shard of the chunk."""


_NEXT = {
    ShardState.AWAITED: (ShardState.STEADY, ShardState.LEFT),
    ShardState.STEADY: (ShardState.EARLY, ShardState.STEADY, ShardState.LEFT),
    ShardState.EARLY: (ShardState.STEADY,),
    ShardState.LEFT: (),
}


class ShardGradients:
    """The gradients of one shard, held by autograd or brought by the runtime to the home of the states.

    Args:
        chunk: the chunk of the shard.
        brought: the gradient that the runtime brings home; None if gradients stay with autograd.
        slots: the parameters that the optimizer steps.
    """

    def __init__(self, chunk: Chunk, brought: ChunkGradient | None, slots: Sequence[Slot]) -> None:
        self._chunk, self._brought = chunk, brought
        self._empty = [slot for slot in slots if not slot.numel]
        self.memory = Memory() if brought is None else brought.memory
        """Memory of the gradients at their home; no lane uses that of autograd."""

    @property
    def are_at_home(self) -> bool:
        """Whether they lie at the home of the states, not with autograd."""
        return self._brought is not None

    @property
    def whole(self) -> torch.Tensor | None:
        """The gradients of the whole shard, if they lie in one tensor."""
        return None if self._brought is None else self.memory.tensor

    @property
    def changes(self) -> int:
        """Version counter of the gradients."""
        return 0 if self._brought is None else self._brought.changes

    def of(self, segments: Sequence[Segment], used: Collection[str]) -> Arrived:
        """The segments that got a gradient, each with its flat gradient.

        Args:
            segments: the segments to look at.
            used: the parameters that got a gradient on any rank; read only if gradients are brought home.
        """
        if self._brought is not None:
            memory = self.memory.tensor
            return [(segment, memory[segment.part]) for segment in segments if segment.name in used]
        found = []
        for segment in segments:
            gradient, slot = segment.source.grad, segment.slot
            if gradient is not None:
                flat = slot.flattened(gradient)
                if flat.data_ptr() != gradient.data_ptr():  # set by hand in another layout; clipping must write to it
                    segment.source.grad = shaped(flat, slot.shape, slot.order)
                found.append((segment, flat))
        return found

    def empty_with_gradient(self, used: Collection[str]) -> list[nn.Parameter]:
        """The parameters without elements that got a gradient; `used` as in `of`."""
        return [
            slot.parameter
            for slot in self._empty
            if (slot.parameter.grad is not None if self._brought is None else slot.name in used)
        ]

    def with_norms(self, arrived: Arrived) -> list[tuple[tuple[Segment, torch.Tensor], torch.Tensor | None]]:
        """Each gradient with its norm, or with None if the norm was not summed while it arrived. Waits until compute
        and this thread may read them."""
        norms = None if self._brought is None else self._brought.norms
        if norms is not None:
            norms.wait()  # the lane that sums them writes their values
            return [(item, norms.of(item[0].place)) for item in arrived]
        # The previous step may still multiply it in place, if no zero_grad() came in between.
        self.memory.wait()  # compute reads the shard of gradients, which the work of a lane writes
        if self._chunk.plan.update_home == "host":
            self.memory.synchronize()  # this thread reads it
        return [(item, None) for item in arrived]

    def forget_norms(self) -> None:
        """Drops the norms, since the gradients have changed."""
        if self._brought is not None:
            self._brought.norms = None


class WrittenWeights:
    """The writes to the weights of one shard.

    Anyone may write to ordinary weights; other resident weights only the model's own forward.

    Args:
        chunk: the chunk of the shard.
        segments: the parts of the shard.
        elsewhere: the parameters that other ranks may step in part.
    """

    def __init__(self, chunk: Chunk, segments: Sequence[Segment], elsewhere: Container[nn.Parameter]) -> None:
        self._chunk, self._elsewhere = chunk, elsewhere
        self._slots = [segment.slot for segment in segments]
        self._seen = {segment.name: segment.version for segment in segments}  # versions of the parameters
        self._data_writes = chunk.data_writes

    def record_step(self, arrived: Arrived, used: Collection[str]) -> None:
        """Records a step's writes, and tells autograd, which then refuses a backward over the old weights.

        Args:
            arrived: the segments that this rank steps.
            used: the parameters that got a gradient on any rank.
        """
        mine = {segment.name: segment for segment, _ in arrived}
        for slot in self._chunk.slots:
            segment = mine.get(slot.name)
            if segment is not None:
                torch.autograd.graph.increment_version(slot.parameter)
                self._seen[slot.name] = slot.parameter._version
            elif slot.name in used and slot.parameter in self._elsewhere:
                torch.autograd.graph.increment_version(slot.parameter)

    @property
    def exist(self) -> bool:
        """Whether resident weights were written to since the last step."""
        if self._chunk.weights is None:
            return False
        written = self._chunk.data_writes != self._data_writes
        return written or any(slot.parameter._version != self._seen[slot.name] for slot in self._slots)

    def copy_to_masters(self) -> None:
        """Copies weights that were written to into the masters."""
        if not self.exist:
            return
        # Another optimizer over this chunk may have stepped it: a lane then writes masters, and copies the new weights.
        self._chunk.synchronize_weights()
        self._chunk.follow_writes()
        # Parameters that are never stepped count, too; otherwise masters would be copied in every step.
        self._seen = {slot.name: slot.parameter._version for slot in self._slots}
        self._data_writes = self._chunk.data_writes


class Shard:
    """One optimizer's part of one chunk. Create it while masters and states are at hand (`Chunk.in_memory`).

    Args:
        engine: the engine of the chunk.
        user: the optimizer.
        chunk: the chunk.
    """

    def __init__(self, engine: Engine, user: UserOptimizer, chunk: Chunk) -> None:
        self._engine, self._user, self.chunk = engine, user, chunk
        brought = engine.gradients.by_chunk.get(chunk.index)
        self.gradients = ShardGradients(chunk, brought, [s for s in chunk.slots if s.parameter in user.group_of])
        self.is_concerned = any(slot.parameter in user.group_of for slot in chunk.slots)
        """Whether the optimizer steps any parameter of the chunk, on any rank."""
        self._separate = chunk.masters is not None
        chunk.follow_writes()  # writes between wrapping and now
        master = chunk.shard_weights if chunk.masters is None else chunk.masters
        # One function steps moments in fewer bits, wherever gradients lie; float32 ones only if gradients lie together.
        gathered = brought is not None or engine.plan.moments != "float32"
        fuses = user.fuses and gathered and master.dtype == torch.float32
        ordinary = not self._separate and not fuses and engine.is_ordinary(chunk)
        segments = cut_segments(chunk, master, user.group_of, ordinary=ordinary)
        self.state = ShardState.AWAITED if chunk.index in engine.leaving else ShardState.STEADY
        weights = chunk.shard if self._separate and chunk.plan.weight_home == "host" else None
        empty = self.state is ShardState.AWAITED
        self.states: States = user.states_over(chunk, master, segments, weights=weights, fuses=fuses, empty=empty)
        """The current states."""
        self.second: States | None = None
        """The states of early updates, allocated once there are states to copy."""
        self._early: EarlyUpdate | None = None
        self._counted_states = chunk.stored is not None  # the extent counts them
        self._counted_bytes = 0
        self.writes = WrittenWeights(chunk, segments, user.group_of if self.gradients.are_at_home else ())
        copied = {segment.place for segment in segments if segment.weights is not segment.source}
        self.copied = [chunk.slots[place] for place in sorted(copied)]
        """The parameters of which a copy is stepped, so that they must lie where their chunk does."""
        self.move_to_extent()

    def to(self, state: ShardState) -> None:
        """Changes the state.

        Raises:
            StateError: the change is not allowed.
        """
        if state not in _NEXT[self.state]:
            raise StateError(
                f"rank {self.chunk.rank}: the shard of {self.chunk} cannot go from '{self.state.value}' to "
                f"'{state.value}'"
            )
        self.state = state

    @property
    def segments(self) -> list[Segment]:
        """The parts of the shard that are stepped."""
        return self.states.segments

    @property
    def has_stepped(self) -> bool:
        """Whether it has states of a step, not only zeros for the first."""
        return any(self.states.has_stepped(segment) for segment in self.segments)

    @property
    def has_all_states(self) -> bool:
        """Whether every segment has states of a step, and no step creates others."""
        return self.states.is_predictable and all(self.states.has_stepped(segment) for segment in self.segments)

    @property
    def skips_without_gradients(self) -> bool:
        """Whether a step without gradients does nothing."""
        return self.states.is_predictable or not self.segments

    @property
    def accepts_tensor_factor(self) -> bool:
        """Whether the clip factor may be a tensor: the user's class steps autograd's gradients, all on the device."""
        return not self.gradients.are_at_home and self.states.accepts_tensor_factor

    def make_states(self, moved: MovedStates | None = None) -> bool:
        """Allocates zero moments and counts of 0 now, as the first step would, but not if those that come next go on in
        the memory that they have.

        Returns False for a class that creates its states itself.
        """
        stay = moved is not None and moved.stay_for(self.states) is not None
        made = self.states.make(allocate=not stay)
        if made and self.segments and not stay:
            self.count_states()
        return made

    def move_to_extent(self) -> None:
        """Moves masters and states into the chunk's extent, if they live on a disk.

        Tensors that lie there stay. States that a class has created have no place in the extent before this.
        """
        stored = self.chunk.stored
        if stored is None:
            return
        stored.forget(self)
        for segment in self.segments:
            stored.show(self, segment.weights, MASTERS, segment.start)
        for region, tensor, start in () if self.state is ShardState.AWAITED else self.states.memory():
            if region is not None:
                if not stored.has(region):
                    stored.region(region, self.chunk.shard_numel, tensor.dtype)
                stored.keep(self, tensor, region, start)

    def leave(self) -> dict[str, tuple[States, Segment]]:
        """Gives up the states: states and segment by parameter, for `MovedStates`. The shard lets go of the weights,
        too."""
        self.end_early(None)
        self.to(ShardState.LEFT)
        states, self.second = self.states, None
        states.let_go()
        del self.states
        lacking = {segment.name for segment in states.without_states()}
        return {segment.name: (states, segment) for segment in states.segments if segment.name not in lacking}

    def load(self, saved: SavedStates) -> set[str]:
        """Loads other states; returns notes on inexact ones.

        Nothing else may read or step the chunk meanwhile. It must be at hand (`Chunk.in_memory`).
        """
        self.end_early(None)
        notes = self.states.load(saved)
        self.to(ShardState.STEADY)
        self.move_to_extent()
        self.count_states()
        return notes

    def count_states(self) -> None:
        """Counts the memory of the states that exist by now."""
        if self._counted_states:
            return
        # Other segments may get a gradient later, and an unknown class may make more states in any step.
        self._counted_states = self.states.is_predictable and not self.states.without_states()
        nbytes = self.states.nbytes
        self._engine.arena.count(nbytes - self._counted_bytes, self.chunk.plan.update_home, "optimizer_states")
        self._counted_bytes = nbytes

    def inputs(
        self, used: Collection[str], factor: float | torch.Tensor, options: list[dict[str, object]], *, in_place: bool
    ) -> Inputs:
        """The inputs of an update, as they are now: later, other parameters may have gradients. For arguments see
        `Inputs`."""
        arrived = self.gradients.of(self.segments, used)
        writes, changes = self.chunk.writes, self.gradients.changes
        return Inputs(arrived, self.gradients.whole, factor, options, writes, changes, in_place)

    def begin(self, states: States, inputs: Inputs) -> None:
        """Runs the first part of a step that has a `States.turn`; for arguments see `step`."""
        states.set_options(inputs.options)
        states.begin(inputs.arrived, inputs.multiply_in_place(states.master.dtype))

    def begin_and_turn(self, states: States, inputs: Inputs) -> None:
        """Runs all but the last part of such a step; for arguments see `step`."""
        self.begin(states, inputs)
        if states.turn is not None:
            states.turn()

    def step(self, states: States, inputs: Inputs, staged: torch.Tensor | None = None) -> None:
        """Steps in place; the caller runs `copy_out` afterwards.

        Args:
            states: the current states when the step was submitted.
            inputs: the inputs of the step.
            staged: takes the shard's new weights in their dtype, from where a lane copies them to the device.
        """
        arrived, factor = inputs.arrived, inputs.factor
        if states.turn is None:  # otherwise `begin` has read the gradients
            factor = inputs.multiply_in_place(states.master.dtype)
            states.set_options(inputs.options)
        out = staged
        if self._writes_itself:
            out = self.chunk.shard_weights if states.weights is None else states.weights
        forms = states.step(arrived, inputs.gradients, factor, out)
        if BY_CLASS in forms:
            if out is not None:
                self._copy(arrived, states.master, out)
            self.move_to_extent()  # the first step of some classes creates states
        if self.chunk.plan.update_home == "host":
            self._engine.host_forms.extend(forms)
        self.count_states()

    def rewrite(self, method: str, options: list[dict[str, object]]) -> None:
        """Rewrites the weights by a method of the user's class, such as schedule-free's ``eval``.

        Nothing else may read or step the chunk meanwhile.

        Args:
            method: a method of the class.
            options: hyperparameters by group.
        """
        self.writes.copy_to_masters()
        self.chunk.about_to_write()
        with self.chunk.in_memory(write=True):
            self.states.set_options(options)
            self.states.call(method)
            arrived = [(segment, segment.weights.detach()) for segment in self.segments]
            if self._separate:
                self._copy(arrived, self.states.master, self.chunk.shard_weights)
        self.writes.record_step(arrived, {slot.name for slot in self.chunk.slots})

    @property
    def _writes_itself(self) -> bool:
        """Whether the step itself writes the weights, since they lie where their masters do."""
        plan = self.chunk.plan
        able = plan.update_home == "host" or not self.states.accepts_tensor_factor
        return able and self._separate and plan.weight_home == plan.update_home

    def copy_out(self, arrived: Arrived, rounded: torch.Tensor | None = None) -> Callable[[], None]:
        """Returns work that copies new weights to their home, in their dtype: from `rounded`, which has that dtype,
        otherwise from the masters. Source and target are read now, since an early update may swap the memory later."""
        if not self._separate or self._writes_itself:
            return lambda: None
        return partial(
            self._copy, arrived, self.states.master if rounded is None else rounded, self.chunk.shard_weights
        )

    def _copy(self, arrived: Arrived, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies the new weights of a shard; nothing writes to `source` until they have arrived."""
        asynchronous = target.is_cuda and target.dtype == source.dtype
        if len(arrived) == len(self.chunk.slots):
            target.copy_(source, non_blocking=asynchronous)
            return
        for segment, _ in arrived:  # other segments may be another optimizer's
            target[segment.part].copy_(source[segment.part], non_blocking=asynchronous)

    def make_second(self) -> bool:
        """Allocates the second set of states if it can; whether it exists. It cannot before the first states exist, nor
        if another optimizer steps a part of the shard."""
        chunk = self.chunk
        whole = bool(chunk.held) and len(chunk.held) == len(self.segments)
        if self.second is None and whole and self.states.can_copy:
            self.second = second_set(chunk, self.states, self._engine.arena, self._user.group_of)
        return self.second is not None

    def begin_early(self, inputs: Inputs) -> EarlyUpdate:
        """Begins an early update, which the caller submits. `make_second` must have returned True."""
        if self.second is None:
            raise StateError(f"rank {self.chunk.rank}: chunk {self.chunk.index} has no second set of states")
        self.to(ShardState.EARLY)
        self._early = EarlyUpdate(inputs, self.states, self.second, (self.gradients.memory, self.chunk.states))
        return self._early

    def end_early(self, inputs: Inputs | None) -> EarlyUpdate | None:
        """Ends an early update, if one has begun. Returns it, with its states kept, if a step with `inputs` gives the
        same."""
        early, self._early = self._early, None
        if early is None or self.second is None:
            return None
        self.to(ShardState.STEADY)
        if inputs is None or not early.inputs.equal(inputs) or not early.keep():
            early.discard()
            return None
        old, self.states = self.states, self.second
        self.second, shown = old, early.rounded
        if old.weights is None:  # rounded weights always leave for the device from the same memory
            old.weights, self.states.weights, shown = shown, None, None
        self.chunk.exchange_state(self.states.master, shown)
        return early
