"""New states that the host makes while backward still runs, before anybody knows whether they are right.

A chunk whose gradients are home is stepped at once, into a second set of states next to the one of now. Until
`ElixirOptimizer.step` nothing else has changed: weights are shown, saved, loaded, evaluated and differentiated as if
nothing had begun. Then the norm of all gradients and the loss scale are known. If the gradients are to be multiplied by
the factor with which the new states were made, and neither they nor the old states nor any option has changed since,
the chunk exchanges its states for the new ones. Otherwise it is stepped as it would have been. Both give the same bits,
so ranks may differ in what they kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.lanes import Ticket, settled
from elixir.kernels.adam import begin_kernel
from elixir.wrapper.engine import Engine
from elixir.wrapper.step.chunk_optimizer import ChunkOptimizer
from elixir.wrapper.step.elementwise import same_options
from elixir.wrapper.step.forecast import Forecast
from elixir.wrapper.step.segments import Arrived
from elixir.wrapper.step.states import States
from elixir.wrapper.step.updates import failed_step, return_weights
from elixir.wrapper.step.user_class import UserOptimizer, copies_states

EARLY = "early"
"""Name of the reader in `MemoryUses`."""


@dataclass(frozen=True)
class Premises:
    """All that new states of a chunk depend on; they are right if it is the same in `step`."""

    factor: float
    """The gradients are multiplied by it."""
    hyperparameters: list[dict[str, Any]]
    writes: int
    """`Chunk.writes`."""
    changes: int
    """`ChunkGradient.changes`."""
    segments: tuple[str, ...]
    """Names of the parameters with a gradient."""

    def hold(self, now: Premises) -> bool:
        """Whether nothing has changed until `now`."""
        mine = self.factor, self.writes, self.changes, self.segments
        theirs = now.factor, now.writes, now.changes, now.segments
        return mine == theirs and same_options(self.hyperparameters, now.hyperparameters)


@dataclass
class Attempt:
    """New states of one chunk that are being made.

    Args:
        chunk: whose states they are.
        old: its states of now.
        new: takes the new ones.
        arrived: the segments of `old` with their gradients.
        gradients: of the whole shard.
        premises: what they are made of.
        after: work that brings what they are made of, and frees the memory that they take.
    """

    chunk: Chunk
    old: States
    new: States
    arrived: Arrived
    gradients: torch.Tensor | None
    premises: Premises
    after: list[Ticket]
    made: Ticket | None = None
    given_up: bool = False
    """Nobody wants it: if it has not begun, it need not."""
    weights: torch.Tensor | None = field(init=False)
    """Takes the rounded weights; as of now, since an exchange of the states may come before the work."""
    old_weights: torch.Tensor | None = field(init=False)
    _kept: bool = False
    _error: Exception | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.weights, self.old_weights = self.new.weights, self.old.weights

    def run(self, release: Callable[[], None] | None, forms: deque[str]) -> None:
        """Make the new states, on the lane of CPU Adam; `forms` gets those of the step."""
        if self.given_up:
            return
        try:
            for ticket in self.after:
                ticket.synchronize()  # over by now; raises what it raised, as the step of such a chunk would
            if release is not None:
                release()  # once the states are exchanged, a checkpoint would read others than it has to
            premises = self.premises
            for states in (self.old, self.new):
                states.set_options(premises.hyperparameters)
            made = self.old.step(self.arrived, self.gradients, premises.factor, self.weights, self.new)
            forms.extend(made)
        except Exception as error:
            with self._lock:
                self._error = error
                if not self._kept:
                    return  # the chunk is stepped as it would have been, which raises the same if it must
            self.new.copy(self.old)
            if self.weights is not None and self.old_weights is not None:
                self.weights.copy_(self.old_weights)
            raise failed_step(self.chunk, error) from error

    def keep(self) -> bool:
        """Whether the new states can be those of the chunk from here on; not if they could not be made."""
        with self._lock:
            self._kept = self._error is None
        return self._kept


class Speculation:
    """Attempts of one optimizer, from backward until its `step`.

    Args:
        engine: of the chunks.
        user: the optimizer whose options count.
        parts: steps each chunk, by index.
    """

    def __init__(self, engine: Engine, user: UserOptimizer, parts: Mapping[int, ChunkOptimizer]) -> None:
        self._engine, self._user, self._parts = engine, user, parts
        self._spares: dict[int, States] = {}
        self._attempts: dict[int, Attempt] = {}
        self._backwards = 0  # of the last step, where there was one
        self.forecast = Forecast()
        """Whether attempts are likely to be kept."""
        self.made = self.kept = 0
        """Chunks that had new states in the last step, and those whose new states were right."""

    def make_spares(self) -> None:
        """Makes the second set of states now, as far as the optimizer has states, so that no step makes memory, and
        begins to compile the kernel that fills them, on which plans count."""
        given, plan = self._user.given, self._engine.plan
        copies = copies_states(given, fused_kernels=self._user.fuses, moments=plan.moments)
        for index, part in self._parts.items():
            chunk = part.chunk
            if chunk.plan.speculates:
                self._spare(index, part)
                if not copies:
                    begin_kernel(chunk.dtype, chunk.dtype if chunk.low_precision else None, plan.moments)

    def begin(self, chunk: Chunk, scale: float) -> None:
        """Makes new states of a chunk all of whose gradients are on their way home.

        Args:
            chunk: one that the plan lets speculate.
            scale: of the loss, by which its gradients are divided.
        """
        self._give_up(chunk.index)
        engine, part = self._engine, self._parts[chunk.index]
        backwards = self._backwards or engine.plan.accumulation
        if engine.gradients.backward_count < backwards or not self.forecast.expects_to_keep(scale):
            return
        spare = None if part.were_written else self._spare(chunk.index, part)
        if spare is None:
            return
        arrived = part.gradients({slot.name for slot in chunk.slots})
        premises = self._premises(part, arrived, 1.0 / scale, self._user.hyperparameters())
        # The gradients arrive. The step before writes the old states, or brings weights out of the memory that the new
        # ones take; the fetch before may read that memory as well.
        after = [*part.gradient_uses.to_read(), *chunk.home_uses.to_write()]
        attempt = Attempt(chunk, part.states, spare, arrived, part.shard_gradients, premises, after)
        self._attempts[chunk.index] = attempt
        run = partial(attempt.run, chunk.before_write, engine.host_forms)
        # Of work that has failed `run` tells, so that what was never made is not kept.
        attempt.made = engine.lanes.host_adam.submit(run, after=settled(after))
        part.gradient_uses.read_by(EARLY, chunk.home_uses.read_by(EARLY, attempt.made))

    def keep(
        self, part: ChunkOptimizer, arrived: Arrived, factor: float | torch.Tensor, options: list[dict[str, Any]]
    ) -> bool:
        """Whether a chunk has been stepped by keeping its new states.

        Args:
            part: of the chunk.
            arrived: the segments that got a gradient.
            factor: the gradients are multiplied by it.
            options: hyperparameters by group.
        """
        chunk = part.chunk
        attempt = self._attempts.get(chunk.index)
        if attempt is None or attempt.made is None or isinstance(factor, torch.Tensor):
            return False
        if not attempt.premises.hold(self._premises(part, arrived, factor, options)) or not attempt.keep():
            self._give_up(chunk.index)
            return False
        del self._attempts[chunk.index]
        self._spares[chunk.index] = part.exchange(attempt.new)
        self.kept += 1
        self._engine.kept_chunks = self.kept
        chunk.home_uses.written_by(attempt.made)
        if chunk.plan.weight_home == "device":
            return_weights(self._engine, chunk, part.writing(arrived, attempt.weights), returns=True)
        if self._engine.options.debug.poison:
            self._poison(chunk, self._spares[chunk.index])
        return True

    def stepping(self) -> None:
        """The optimizer's step begins."""
        self._backwards = self._engine.gradients.backward_count
        self.made, self.kept = len(self._attempts), 0
        self._engine.speculated_chunks = self.made

    def stepped(self, *, other_factor: bool, scale: float) -> None:
        """The optimizer's step is over.

        Args:
            other_factor: gradients were clipped.
            scale: of the loss, by which they were made.
        """
        self.give_up()
        self.forecast.stepped(other_factor=other_factor, scale=scale, made=self.made, kept=self.kept)

    def give_up(self) -> None:
        """New states that have been made and not been kept are wrong; those that are not begun need not be made."""
        for index in list(self._attempts):
            self._give_up(index)

    def forget(self) -> None:
        """The chunks get other states, as under another plan."""
        self.give_up()
        self._spares.clear()

    def _give_up(self, index: int) -> None:
        attempt = self._attempts.pop(index, None)
        if attempt is not None:
            attempt.given_up = True

    def _spare(self, index: int, part: ChunkOptimizer) -> States | None:
        found = self._spares.get(index)
        if found is None:
            found = part.make_spare()
            if found is not None:
                self._spares[index] = found
        return found

    def _premises(
        self, part: ChunkOptimizer, arrived: Arrived, factor: float, options: list[dict[str, Any]]
    ) -> Premises:
        chunk = part.chunk
        changes = self._engine.gradients.by_chunk[chunk.index].changes
        return Premises(factor, options, chunk.writes, changes, tuple(segment.name for segment, _ in arrived))

    def _poison(self, chunk: Chunk, spare: States) -> None:
        """Have what still looks at the memory of the old states see NaN."""
        memory = spare.master.untyped_storage()
        tensors = [torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory)]
        if spare.weights is not None and chunk.plan.weight_home == "host":
            tensors.append(spare.weights.view(torch.uint8))
        states = [tensor for _, tensor, _ in spare.memory()]

        def fill() -> None:
            for tensor in (*tensors, *states):
                tensor.view(torch.uint8).fill_(0xFF)

        # The new states are made of the old ones, and a fetch may still read the weights that lay there.
        filled = self._engine.lanes.host_adam.submit(fill, after=chunk.home_uses.to_write())
        chunk.home_uses.read_by(EARLY, filled)
