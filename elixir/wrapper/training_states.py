"""`TrainingStates`: all that a checkpoint reads of a running module and its optimizers, and writes when it is loaded.

The one door between the runtime and checkpoints: what lies where, in which order it is stepped next, and how it is put
back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.disk import MASTERS, StoredStates
from elixir.chunk.host_buffers import BufferKind
from elixir.errors import InputError
from elixir.memory_order import Order
from elixir.models import buffer_places
from elixir.plan import CHECKPOINT_PART, Plan
from elixir.wrapper.engine import engine_of
from elixir.wrapper.module import ElixirModule
from elixir.wrapper.optimizer import ElixirOptimizer, stepper_of
from elixir.wrapper.run_errors import Call, ErrorKind, changed_in_part
from elixir.wrapper.state_reader import StateReader
from elixir.wrapper.step.chunk_optimizer import ChunkOptimizer
from elixir.wrapper.step.states import SCALE_SUFFIX, SavedStates, SmallStates, StateTensor, small_states

__all__ = ["SCALE_SUFFIX", "WEIGHT", "ChunkStates", "SavedStates", "SmallStates", "Stretch", "TrainingStates"]

_COPIES = "copies for a checkpoint"
WEIGHT = "weight"
"""Kind of the tensors that are weights: masters, if there are any."""


@dataclass(frozen=True)
class _OnDisk:
    """Where the elements of a stretch are on a disk."""

    stored: StoredStates
    region: str
    start: int
    """First element of the stretch in the region."""


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
    on_disk: _OnDisk | None = None
    """Where they are read from, if they live on a disk; `tensor` then only says how many there are."""

    @classmethod
    def of(cls, state: StateTensor, stored: StoredStates | None) -> Stretch:
        """An optimizer's state, which may lie on a disk."""
        slot, width = state.segment.slot, state.width
        shape = tuple(slot.shape) if width == 1 else (-(-slot.numel // width),)
        on_disk = None if stored is None else _OnDisk(stored, state.region, state.start)
        first = state.segment.first // width
        return cls(state.kind, slot.name, shape, state.order, first, state.tensor, state.has_codes, on_disk)

    @property
    def is_state(self) -> bool:
        """Whether it is the state of an optimizer, and no weight."""
        return self.kind != WEIGHT

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
        disk = self.on_disk
        if disk is None:
            return self.tensor[first:stop]
        return disk.stored.read(disk.region, disk.start + first, disk.start + stop)


class ChunkStates:
    """This rank's part of one chunk: weights, or their masters, and the states of what steps them.

    What is read is the memory that held them when this was made: a step may give the chunk other memory, in which it
    has made new states, before anybody has come to read the old ones.

    Args:
        chunk: the chunk.
        parts: its optimizers.
    """

    def __init__(self, chunk: Chunk, parts: Sequence[ChunkOptimizer]) -> None:
        self.chunk, self.parts = chunk, tuple(parts)
        self._updated = chunk.home_uses.to_read()
        self._written = [] if chunk.stored is None else chunk.stored.extent_uses.to_read()
        self._weights_of_then = self.target
        self._states_of_then = [part.states for part in self.parts]

    @property
    def is_settled(self) -> bool:
        """Whether no update is still under way that could make states which are not there yet.

        Classes that are not torch's may make more of them in any step.
        """
        return all(ticket.done() for ticket in self._updated) or all(part.has_all_states for part in self.parts)

    def wait(self) -> None:
        """Wait for the update that was under way when this was made; raises what it raised."""
        for ticket in (*self._updated, *self._written):
            ticket.synchronize()  # it still writes the weights, masters and states that are read next

    def stretches(self) -> list[Stretch]:
        """Everything to save, as it lies in live memory; call this when no update is under way."""
        found = list(self._weights())
        for states in self._states_of_then:
            found += [Stretch.of(each, self.chunk.stored) for each in states.tensors()]
        return found

    def small(self) -> dict[str, SmallStates]:
        """Counts of steps and other scalars, by parameter, as of now."""
        found: dict[str, SmallStates] = {}
        for states in self._states_of_then:
            found |= small_states(states)
        return found

    def _weights(self) -> Iterator[Stretch]:
        memory = self._weights_of_then
        for slot, start, stop in self.cuts():
            at = slot.offset + start - self.chunk.shard_start
            on_disk = None if self.chunk.stored is None else _OnDisk(self.chunk.stored, MASTERS, at)
            values = memory[at : at + stop - start]
            yield Stretch(WEIGHT, slot.name, tuple(slot.shape), slot.order, start, values, on_disk=on_disk)

    @property
    def target(self) -> torch.Tensor:
        """The flat shard of the weights as they are saved and loaded: masters if there are any, while they are at
        hand."""
        return self.chunk.shard_weights if self.chunk.masters is None else self.chunk.masters

    def cuts(self) -> Iterator[tuple[Slot, int, int]]:
        """(parameter, first, stop) of the elements of each flattened parameter that this rank has."""
        first, last = self.chunk.shard_start, self.chunk.shard_start + self.chunk.shard_numel
        for slot in self.chunk.slots:
            start, stop = max(slot.offset, first), min(slot.offset + slot.numel, last)
            if start < stop:
                yield slot, start - slot.offset, stop - slot.offset

    def load_states(self, saved: SavedStates) -> set[str]:
        """Goes on from saved states; notes on what is not exact."""
        return set().union(*(part.load(saved) for part in self.parts))


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
        """Raise `InputError` after `close`."""
        self._engine.phase.refuse_closed()

    def begin_to_load(self, why: str) -> None:
        """From here on the module refuses to run because of `why`, until `show`."""
        self._engine.settle_quietly()
        self._engine.take_back()
        self._engine.errors.record(ErrorKind.CHANGE, changed_in_part(why))

    def refuse(self, what: str, *, loading: bool = False) -> None:
        """Raise where weights and states are not those between two steps.

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
        first: dict[int, int] = {}
        for position, use in enumerate(self.plan.order):
            for index in use.chunks:
                first.setdefault(index, position)
        ordered = sorted(self._engine.chunks, key=lambda chunk: (first.get(chunk.index, len(first)), chunk.index))
        found = []
        for chunk in ordered:
            if frozen or chunk.plan.trainable:
                parts = [stepper.parts[chunk.index] for stepper in self._steppers.values() if chunk.plan.trainable]
                found.append(ChunkStates(chunk, parts))
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
        found: dict[str, str] = {}
        for names in (
            self._model.named_parameters(remove_duplicate=False),
            self._model.named_buffers(remove_duplicate=False),
        ):
            for name, tensor in names:
                known = first.setdefault(id(tensor), name)
                if known != name:
                    found[name] = known
        persistent = set(self.buffers())
        parameters = self.parameters()
        return {name: target for name, target in found.items() if target in persistent or target in parameters}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Persistent buffers by name, each once."""
        first: dict[torch.Tensor, str] = {}
        for place in buffer_places(self._model):
            if place.is_persistent:
                first.setdefault(place.buffer, place.name)
        return {name: buffer for buffer, name in first.items()}

    def orders(self) -> dict[str, Order]:
        """Name -> order of the elements of those parameters that are not contiguous."""
        return {slot.name: slot.order for _, slot in self._engine.places.values() if slot.order is not None}

    def parameters(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Name -> shape, and whether it is trained."""
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

    def said_of(self, name: str) -> dict[str, Any]:
        """Other values from which an optimizer goes on."""
        stepper = self._steppers[name]
        return {"class": type(stepper.user.given).__name__, "asked_for_norm": stepper.asked_for_norm}

    def load_said(self, name: str, said: Mapping[str, Any]) -> None:
        """Go on from what `said_of` gave."""
        self._steppers[name].asked_for_norm = bool(said.get("asked_for_norm"))

    @torch.no_grad()
    def load(
        self,
        fill_weights: Callable[[str, int, torch.Tensor], set[str]],
        saved: SavedStates,
        *,
        skipped: frozenset[str] = frozenset(),
    ) -> set[str]:
        """Write this rank's weights and states of all chunks; notes on what is not exact. After `begin_to_load`, and
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
                    for slot, start, stop in states.cuts():
                        if slot.name not in skipped:
                            at = slot.offset + start - chunk.shard_start
                            notes |= fill_weights(slot.name, start, target[at : at + stop - start])
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
        """Give up what `make_pool` has made, once nothing reads it."""
        self._engine.host_buffers.drop(_COPIES)

    def loss_scale_state(self) -> dict[str, float | int] | None:
        """The loss scale of float16; None where losses are not scaled."""
        scale = self._engine.loss_scale
        return scale.state() if scale.used else None

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved one."""
        self._engine.loss_scale.load(state)
