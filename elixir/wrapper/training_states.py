"""`TrainingStates`: all that a checkpoint reads of a running module and its optimizers, and writes when it is loaded.

The one door between the runtime and checkpoints: what lies where, in which order it is stepped next, and how it is put
back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.host_buffers import BufferKind
from elixir.chunk.state_window import MASTERS
from elixir.errors import InputError
from elixir.memory_order import Order
from elixir.models.buffer_place import buffer_places
from elixir.plan.plan import Plan
from elixir.plan.prediction import CHECKPOINT_PART
from elixir.wrapper.engine import engine_of
from elixir.wrapper.module import ElixirModule
from elixir.wrapper.optimizer import ElixirOptimizer, stepper_of
from elixir.wrapper.run_errors import Call, ErrorKind, changed_in_part
from elixir.wrapper.state_reader import StateReader
from elixir.wrapper.step.shard import Shard
from elixir.wrapper.step.states import SCALE_SUFFIX, SavedStates, SmallStates, StateForm, StateTensor, small_states

__all__ = ["SCALE_SUFFIX", "WEIGHT", "ChunkStates", "SavedStates", "SmallStates", "StateForm", "TrainingStates"]

_COPIES = "copies for a checkpoint"
WEIGHT = "weight"
"""Kind of the tensors that are weights: masters, if there are any."""


class ChunkStates:
    """This rank's part of one chunk: weights, or their masters, and the states of what steps them.

    What is read is the memory that held them when this was made: a step may give the chunk other memory, in which it
    has made new states, before anybody has come to read the old ones.

    Args:
        chunk: the chunk.
        shards: its optimizers' parts of it.
    """

    def __init__(self, chunk: Chunk, shards: Sequence[Shard]) -> None:
        self.chunk, self.shards = chunk, tuple(shards)
        self._updated = chunk.home_uses.to_read()
        self._written = [] if chunk.stored is None else chunk.stored.extent_uses.to_read()
        self._weights_of_then = self.target
        self._states_of_then = [shard.states for shard in self.shards]

    @property
    def is_settled(self) -> bool:
        """Whether no update is still under way that could make states which are not there yet.

        Classes that are not torch's may make more of them in any step.
        """
        return all(ticket.done() for ticket in self._updated) or all(shard.has_all_states for shard in self.shards)

    def wait(self) -> None:
        """Waits for the update that was under way when this was made; raises what it raised."""
        for ticket in (*self._updated, *self._written):
            ticket.synchronize()  # it still writes the weights, masters and states that are read next

    def tensors(self) -> list[StateTensor]:
        """Everything to save, as it lies in live memory; call this when no update is under way."""
        memory, stored = self._weights_of_then, self.chunk.stored
        found = [
            StateTensor(WEIGHT, held, memory[held.part], held.slot.order, MASTERS, held.part.start, stored)
            for held in self.chunk.held.values()
        ]
        for states in self._states_of_then:
            found += states.tensors()
        return found

    def small(self) -> dict[str, SmallStates]:
        """Counts of steps and other scalars, by parameter, as of now."""
        found: dict[str, SmallStates] = {}
        for states in self._states_of_then:
            found |= small_states(states)
        return found

    @property
    def target(self) -> torch.Tensor:
        """The flat shard of the weights as they are saved and loaded: masters if there are any, while they are at
        hand."""
        return self.chunk.shard_weights if self.chunk.masters is None else self.chunk.masters

    def load_states(self, saved: SavedStates) -> set[str]:
        """Goes on from saved states; notes on what is not exact."""
        return set().union(*(shard.load(saved) for shard in self.shards))


class TrainingStates:
    """A module and some of its optimizers, seen by code that saves and loads them.

    Args:
        module: the module.
        optimizers: those of its optimizers whose states are meant, by name.

    Raises:
        InputError: an optimizer steps another module.
    """

    def __init__(self, module: ElixirModule, optimizers: Mapping[str, ElixirOptimizer]) -> None:
        for name, optimizer in optimizers.items():
            if optimizer.module is not module:
                raise InputError(f"{name!r} is an optimizer of another ElixirModule; save each module with its own")
        self._engine = engine = engine_of(module)
        self._model = module.module
        self.group = engine.group
        """The ranks that share the chunks; its collectives belong to the network lane."""
        self.device = engine.device
        """Where compute runs."""
        self.optimizers = dict(optimizers)
        self._steppers = {name: stepper_of(optimizer) for name, optimizer in optimizers.items()}

    @property
    def plan(self) -> Plan:
        """The plan at work."""
        return self._engine.plan

    @property
    def reader(self) -> StateReader | None:
        """The reader of the checkpoints of this module."""
        return self._engine.state_reader

    @reader.setter
    def reader(self, reader: StateReader) -> None:
        self._engine.state_reader = reader

    def refuse_closed(self) -> None:
        """Raises `InputError` after `close`."""
        self._engine.phase.refuse_closed()

    def begin_to_load(self, why: str) -> None:
        """From here on the module refuses to run because of `why`, until `show`."""
        self._engine.settle_quietly()
        self._engine.take_back()
        self._engine.errors.record(ErrorKind.CHANGE, changed_in_part(why))

    def refuse(self, what: str, *, loading: bool = False) -> None:
        """Raises where weights and states are not those between two steps.

        Raises:
            InputError: inside `gathered`, in a forward or backward, between backward and `step`, or the module is
                closed.
            ElixirError: a step has failed, or a disk, so that states are not all of one step; what a lane has raised
                comes as it is.
        """
        engine = self._engine
        engine.forget_failed_backward()
        if not loading:
            engine.refuse_unusable()
            if self.optimizers:  # weights can be had whatever has failed
                engine.errors.report(Call.ONE_STEP)
        engine.uses.refuse_inside(what)
        if engine.uses.gathered:
            raise InputError(f"{what} is for outside of gathered(); leave it first")
        if engine.unstepped:
            raise InputError(
                f"{what} between backward and step() would lose the gradients that have come since the last step: call "
                "step() first, or zero_grad() to give them up"
            )

    def chunks(self, *, frozen: bool = True) -> list[ChunkStates]:
        """The chunks, in the order in which they are updated next; without `frozen` only those that are trained."""
        found = []
        for chunk in self._engine.chunks_by_use():
            if frozen or chunk.plan.trainable:
                shards = [stepper.shards[chunk.index] for stepper in self._steppers.values() if chunk.plan.trainable]
                found.append(ChunkStates(chunk, shards))
        return found

    def follow_writes(self) -> None:
        """Copies to the masters what was written to resident weights since the last step, as the next step would."""
        self._engine.take_back()
        for stepper in self._steppers.values():
            stepper.follow_writes()
        self._engine.renew_shared()

    def aliases(self) -> dict[str, str]:
        """Other names of tied parameters and buffers -> their first name."""
        first: dict[int, str] = {}
        saved = {*self.buffers(), *self.parameters()}
        parameters = self._model.named_parameters(remove_duplicate=False)
        named = [*parameters, *self._model.named_buffers(remove_duplicate=False)]
        targets = {name: first.setdefault(id(tensor), name) for name, tensor in named}
        return {name: target for name, target in targets.items() if name != target and target in saved}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers by name, each once."""
        first: dict[torch.Tensor, str] = {}
        for place in buffer_places(self._model):
            if place.is_persistent:
                first.setdefault(place.buffer, place.name)
        return {name: buffer for buffer, name in first.items()}

    def orders(self) -> dict[str, Order]:
        """Names -> order of the elements of those parameters that are not contiguous."""
        return {slot.name: slot.order for _, slot in self._engine.places.values() if slot.order is not None}

    def parameters(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Names -> shape, and whether it is trained."""
        places = self._engine.places.values()
        return {slot.name: (tuple(slot.shape), chunk.plan.trainable) for chunk, slot in places}

    def groups(self, optimizer: ElixirOptimizer) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
        """(names, options) of an optimizer's groups; the options are the live ones."""
        return [
            (self.names_of(group), {key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]

    def loaded_options(self, name: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """The options that a group of an optimizer has once the saved ones are loaded; `InputError` if it cannot."""
        return self._steppers[name].user.loaded_options(group, saved)

    def names_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the parameters of a group of an optimizer."""
        return tuple(self._engine.places[parameter][1].name for parameter in group["params"])

    def optimizer_values(self, name: str) -> dict[str, Any]:
        """Other values from which an optimizer goes on."""
        stepper = self._steppers[name]
        return {"class": type(stepper.user.given).__name__, "asked_for_norm": stepper.norm.was_asked_for}

    def load_optimizer_values(self, name: str, said: Mapping[str, Any]) -> None:
        """Goes on from what `optimizer_values` gave."""
        self._steppers[name].norm.was_asked_for = bool(said.get("asked_for_norm"))

    @torch.no_grad()
    def load(
        self,
        fill_weights: Callable[[str, int, torch.Tensor], set[str]],
        saved: SavedStates,
        *,
        skipped: frozenset[str] = frozenset(),
    ) -> set[str]:
        """Writes this rank's weights and states of all chunks; notes on what is not exact. After `begin_to_load`, and
        before `show`.

        Args:
            fill_weights: has a flat tensor filled with the elements of a named parameter from one on; gives notes.
            saved: the states of the optimizers; its `filled` waits for `fill_weights` as well.
            skipped: parameters that are left as they are.
        """
        notes: set[str] = set()
        for states in self.chunks():
            chunk = states.chunk
            chunk.about_to_write()
            with chunk.at_hand(write=True):
                target = states.target
                try:
                    for name, held in chunk.held.items():
                        if name not in skipped:
                            notes |= fill_weights(name, held.first, target[held.part])
                    notes |= states.load_states(saved)
                finally:
                    saved.filled()  # masters are read next, and nothing may fill the window's buffer later
                if chunk.masters is not None:
                    chunk.shard_weights.copy_(chunk.masters)  # as after every step, weights are the rounded masters
        return notes

    @torch.no_grad()
    def show(self) -> None:
        """Have what was loaded be what the model reads, on all ranks; all of them have loaded."""
        lanes, group = self._engine.lanes, self.group
        for chunk in self._engine.chunks:
            if chunk.whole is not None and group.size > 1:
                whole, mine = chunk.whole, chunk.shard_weights
                # Who reads the resident weights next, on this thread or in compute, must find those of all ranks.
                lanes.network.submit(partial(group.gather, whole, mine, "loaded weights")).synchronize()
        self._engine.cache.invalidate()
        self._engine.errors.end(ErrorKind.CHANGE)

    @property
    def pool_bytes(self) -> int:
        """Host memory of this rank that the plan has for copies while a checkpoint is written."""
        return self.plan.predicted.checkpoint_bytes // max(1, self._engine.host_share.ranks)

    def make_pool(self, nbytes: int) -> torch.Tensor:
        """Host memory for copies, counted with the runtime's other buffers; pinned next to a CUDA device."""
        buffers = self._engine.host_buffers
        buffers.add(BufferKind(_COPIES, CHECKPOINT_PART, nbytes, count=1, at_once=False))
        return buffers.take(_COPIES, nbytes).memory

    def drop_pool(self) -> None:
        """Gives up what `make_pool` has made, once nothing reads it."""
        self._engine.host_buffers.drop(_COPIES)

    def loss_scale_state(self) -> dict[str, float | int] | None:
        """The loss scale of float16; None where losses are not scaled."""
        scale = self._engine.loss_scale
        return scale.state() if scale.used else None

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved one."""
        self._engine.loss_scale.load(state)
