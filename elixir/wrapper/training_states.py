"""`TrainingStates`: the view of a running module and its optimizers that checkpoints save and load.

Checkpoints read and write the states and weights of a run through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from elixir.chunk.chunk import Chunk
from elixir.chunk.memory import written
from elixir.errors import InputError
from elixir.memory_order import Order
from elixir.models.model_tensors import buffer_places
from elixir.models.quantised import first_inside
from elixir.wrapper.engine import engine_of
from elixir.wrapper.module import ElixirModule
from elixir.wrapper.optimizer import ElixirOptimizer, stepper_of
from elixir.wrapper.step.shard import SteppedShard
from elixir.wrapper.step.states import (
    SCALE_SUFFIX,
    Find,
    SavedState,
    SavedStates,
    SmallStates,
    StateTensor,
    small_states,
)
from elixir.wrapper.views_of_engine import StateReader

__all__ = ["SCALE_SUFFIX", "SavedState", "SavedStates", "SmallStates", "StateTensor"]

WEIGHT = "weight"
"""The kind of tensors that are weights: masters if there are any."""


class ChunkStates:
    """This rank's part of one chunk: weights, or their masters, and optimizer states.

    It reads the memory that held them when it was created: a kept early update swaps the memory of a chunk, while a
    checkpoint may still be reading the old states.

    Args:
        chunk: the chunk.
        shards: the shards of the chunk, one per optimizer.
    """

    def __init__(self, chunk: Chunk, shards: Sequence[SteppedShard]) -> None:
        self.chunk, self.shards = chunk, tuple(shards)
        self._updated = chunk.updates
        self._written = [] if chunk.stored is None else written(chunk.stored.on_disk)
        self._weights_of_then = self.target
        self._states_of_then = [shard.states for shard in self.shards]

    @property
    def is_settled(self) -> bool:
        """Whether no running update can create more states.

        Classes outside of torch may create states in any step.
        """
        return all(ticket.done() for ticket in self._updated) or all(shard.has_all_states for shard in self.shards)

    def wait(self) -> None:
        """Waits for the update that was running when this was created; raises its error."""
        for ticket in (*self._updated, *self._written):
            ticket.synchronize()  # the update still writes the weights, masters and states that are read next

    def tensors(self) -> list[StateTensor]:
        """Everything to save, weights first, as views of live memory; call it when no update is running."""
        memory, stored = self._weights_of_then, self.chunk.stored
        found = [
            StateTensor(WEIGHT, held, memory[held.part], start=held.part.start, extent=stored)
            for held in self.chunk.held.values()
        ]
        for states in self._states_of_then:
            found += states.to_save()
        return found

    def small(self) -> dict[str, SmallStates]:
        """The current counts of steps and other scalars, by parameter."""
        found: dict[str, SmallStates] = {}
        for states in self._states_of_then:
            found |= small_states(states)
        return found

    @property
    def target(self) -> torch.Tensor:
        """The flat shard of weights that is saved and loaded: masters if there are any, while they are at hand."""
        return self.chunk.shard_weights if self.chunk.masters is None else self.chunk.masters


class TrainingStates:
    """A module and some of its optimizers, as checkpoints see them.

    Args:
        module: the module.
        optimizers: the optimizers whose states are included, by name.

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
        """The ranks that share the chunks; its collectives run on the network lane."""
        self.device = engine.device
        """The device of compute."""
        self.plan = engine.plan
        """The plan at work."""
        self.host_buffers = engine.host_buffers
        """The host memory of this rank that no chunk owns."""
        self.loss_scale = engine.loss_scale
        """The scale of losses."""
        self.optimizers = dict(optimizers)
        self._steppers = {name: stepper_of(optimizer) for name, optimizer in optimizers.items()}

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
        """Makes the module refuse to run because of `why`, until `show`."""
        self._engine.settle_quietly()
        self._engine.take_back()
        self._engine.errors.changed_in_part(why)

    def refuse(self, what: str, *, loading: bool = False) -> None:
        """Refuses `what` if weights and states are not those between two steps.

        Raises:
            InputError: inside `gathered`, in a forward or backward, between backward and `step`, or after `close`.
            ElixirError: a step or a disk has failed, so that states belong to different steps; errors of lanes are
                raised unchanged.
        """
        engine = self._engine
        engine.forget_failed_backward()
        if not loading:
            engine.refuse_unusable()
            if self.optimizers:
                engine.errors.refuse_failed(alone=True)
            else:
                engine.drain()  # only weights are read, which any failure allows
        engine.refuse_inside(what)
        if engine.uses.shows_other_memory:
            raise InputError(f"{what} is for outside of gathered(); leave it first")
        if engine.unstepped:
            raise InputError(
                f"{what} between backward and step() would lose the gradients that have come since the last step: call "
                "step() first, or zero_grad() to give them up"
            )

    def chunks(self, *, frozen: bool = True) -> list[ChunkStates]:
        """The chunks in the order of their next updates; without `frozen` only trained ones. Those in files stay there,
        and are none of these."""
        found = []
        for chunk in self._engine.chunks_by_use():
            if chunk.plan.trainable or (frozen and chunk.filed is None):
                shards = [stepper.shards[chunk.index] for stepper in self._steppers.values() if chunk.plan.trainable]
                found.append(ChunkStates(chunk, shards))
        return found

    def follow_writes(self) -> None:
        """Copies writes to resident weights since the last step to the masters, as the next step would."""
        self._engine.take_back()
        for stepper in self._steppers.values():
            stepper.follow_writes()

    def aliases(self) -> dict[str, str]:
        """Other names of tied parameters and buffers -> first name."""
        first: dict[int, str] = {}
        saved = {*self.buffers(), *self.parameters()}
        parameters = self._model.named_parameters(remove_duplicate=False)
        named = [*parameters, *self._model.named_buffers(remove_duplicate=False)]
        targets = {name: first.setdefault(id(tensor), name) for name, tensor in named}
        return {name: target for name, target in targets.items() if name != target and target in saved}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers by name, each once."""
        first: dict[torch.Tensor, str] = {}
        for place in buffer_places(self._model):
            if place.is_persistent:
                first.setdefault(place.buffer, place.name)
        return {name: buffer for buffer, name in first.items()}

    def orders(self) -> dict[str, Order]:
        """Name -> order of elements, for parameters that are not contiguous."""
        return {slot.name: slot.order for _, slot in self._engine.places.values() if slot.order is not None}

    def parameters(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Name -> shape, and whether the parameter is trained."""
        places = self._engine.places.values()
        return {slot.name: (tuple(slot.shape), chunk.plan.trainable) for chunk, slot in places}

    def groups(self, optimizer: ElixirOptimizer) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
        """(names, live options) of an optimizer's groups."""
        return [
            (self.names_of(group), {key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ]

    def loaded_options(self, name: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
        """The options of an optimizer's group after loading saved ones; raises `InputError` if that is impossible."""
        return self._steppers[name].user.loaded_options(group, saved)

    def names_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the parameters of an optimizer's group."""
        return tuple(self._engine.places[first_inside(parameter)][1].name for parameter in group["params"])

    def optimizer_values(self, name: str) -> dict[str, Any]:
        """The other values of an optimizer to save."""
        stepper = self._steppers[name]
        return {"class": type(stepper.user.given).__name__, "asked_for_norm": stepper.norm.was_asked_for}

    def load_optimizer_values(self, name: str, said: Mapping[str, Any]) -> None:
        """Loads what `optimizer_values` returned."""
        self._steppers[name].norm.was_asked_for = bool(said.get("asked_for_norm"))

    @torch.no_grad()
    def load(
        self,
        fill_weights: Callable[[str, int, torch.Tensor], set[str]],
        find: Find,
        wait: Callable[[], None],
        *,
        skipped: frozenset[str] = frozenset(),
    ) -> set[str]:
        """Writes this rank's weights and states of all chunks; returns notes on inexact ones. Call it between
        `begin_to_load` and `show`.

        Args:
            fill_weights: begins to fill a flat tensor with a parameter's elements, given its name and the first one;
                returns notes.
            find: finds the saved states of a parameter.
            wait: waits for what `fill_weights` and `find` have begun.
            skipped: parameters that stay unchanged.
        """
        notes: set[str] = set()
        for states in self.chunks():
            chunk = states.chunk
            chunk.about_to_write()
            with chunk.in_memory(write=True):
                target = states.target
                try:
                    for name, held in chunk.held.items():
                        if name not in skipped:
                            notes |= fill_weights(name, held.first, target[held.part])
                    notes = notes.union(*(shard.load(find, wait) for shard in states.shards))
                finally:
                    wait()  # masters are read next, and the window's buffer goes to another chunk
                if chunk.masters is not None:
                    chunk.shard_weights.copy_(chunk.masters)  # as after every step, weights are rounded masters
        for chunk in self._engine.chunks:  # saved with another home
            for name, held in chunk.held.items() if chunk.filed is not None else ():
                if name not in skipped:
                    own = torch.empty(held.numel, dtype=chunk.dtype, device="cpu")
                    notes |= fill_weights(name, held.first, own)
                    wait()
                    chunk.refuse_unlike_file(held.slot, own)
        return notes

    @torch.no_grad()
    def show(self) -> None:
        """Makes the model read the loaded weights, once all ranks have loaded."""
        lanes, group = self._engine.lanes, self.group
        for chunk in self._engine.chunks:
            if chunk.weights is not None and group.size > 1:
                whole, mine = chunk.weights, chunk.shard_weights
                # This thread or compute reads the resident weights next, and must find those of all ranks.
                lanes.network.submit(partial(group.gather, whole, mine, "loaded weights")).synchronize()
        self._engine.cache.invalidate()
        self._engine.errors.changed = None

    @property
    def pool_bytes(self) -> int:
        """The host memory of this rank for copies while a checkpoint is written: what the plan gives, if it is free."""
        planned = self.plan.predicted.checkpoint_bytes // self._engine.host_share.on_machine
        return min(planned, self._engine.spare_host_bytes()) if planned else 0
