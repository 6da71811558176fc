"""`ModelState`: state dicts with full values under the model's names, gathering one chunk at a time.

Every module of a wrapped model, and so its ``save_pretrained``, saves and loads full values in the weights' dtype. The
wrapper's own state dict has float32: master weights if there are any.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from elixir.access.placeholders import unmarked
from elixir.chunk.chunk import Attribute, Chunk, Slot, take_back
from elixir.chunk.memory import separate_copy
from elixir.errors import DiskError, ElixirError, InputError, NoMemoryError, readable_bytes
from elixir.hardware.process_memory import give_back_freed
from elixir.models.model_tensors import cast_dtype
from elixir.models.quantised import flat
from elixir.models.shared_memory import find_shared_memory, plain_tensors
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.engine import Engine

# --- whole weights ---------------------------------------------------------------------------------------------------
# The weights of one chunk as a whole, outside of a step: gathered from all ranks, or from where one rank has them.


logger = logging.getLogger(__name__)


def whole(engine: Engine, chunk: Chunk, precise: bool = False, copy: bool = True) -> torch.Tensor:
    """The gathered weights of a chunk on the device; with `precise`, its masters if it has any. See `gathered`."""
    if precise and engine.uses.averaged and chunk.plan.trainable:
        return averaged(engine, chunk, precise=True)
    if chunk.shown is not None:
        return chunk.shown
    found = precisely(engine, chunk, copy)[0] if precise else gathered(engine, chunk, copy=copy)
    return chunk.with_moved(found) if engine.is_ordinary(chunk) else found


def precisely(engine: Engine, chunk: Chunk, copy: bool = True) -> tuple[torch.Tensor, ElixirError | None]:
    """The gathered weights of a chunk in the precision of its masters. If this rank's disk cannot read them, the
    weights in memory and the error."""
    if not has_wide_masters(chunk):
        return gathered(engine, chunk, copy=copy), None
    found: torch.Tensor | None = None
    try:
        with chunk.in_memory():
            chunk.follow_writes()
            found = gathered(engine, chunk, chunk.masters, copy)
    except (DiskError, NoMemoryError) as error:
        if found is None:  # otherwise all ranks have gathered, and only the write back has failed
            logger.error("weights are given as they are in memory, in %s: %s", chunk.plan.dtype, error)
            return gathered(engine, chunk, chunk.shard_weights.to(torch.float32)), error
    return found, None


def has_wide_masters(chunk: Chunk) -> bool:
    """Whether the masters of a chunk have more bits than its weights."""
    return chunk.masters is not None and chunk.masters.dtype != chunk.dtype


def gathered(engine: Engine, chunk: Chunk, shard: torch.Tensor | None = None, copy: bool = True) -> torch.Tensor:
    """The gathered weights of a chunk on the device, or the gathered `shard` of all ranks. Without `copy` a rank that
    has all of them in memory gives what it has, on the host too: to be read, before the next step."""
    if shard is None:
        if chunk.weights is not None:
            return chunk.weights
        shard = chunk.shard_weights
    if not copy and chunk.on_one_rank and chunk.stored is None:
        return shard
    together = torch.empty(chunk.plan.numel, dtype=shard.dtype, device=engine.device)
    mine = shard.to(engine.device)
    # This thread reads it next, which the network writes.
    engine.lanes.network.submit(lambda: engine.group.gather(together, mine)).synchronize()
    return together


def averaged(engine: Engine, chunk: Chunk, *, precise: bool = False) -> torch.Tensor:
    """The gathered averages of a chunk's weights on the device, in separate memory, with the weights of parameters that
    have none: in the dtype of the weights, or with `precise` in that of the masters."""
    mine = _averaged_shard(engine, chunk)
    mine = mine if precise else mine.to(chunk.dtype)
    return gathered(engine, chunk, mine, copy=not chunk.on_one_rank).to(engine.device)


def _averaged_shard(engine: Engine, chunk: Chunk) -> torch.Tensor:
    """This rank's part of `averaged`, where and as its masters are.

    Raises:
        DiskError, NoMemoryError: they live on a disk, and cannot be read.
    """
    with chunk.in_memory():
        chunk.follow_writes()
        mine = (chunk.shard_weights if chunk.masters is None else chunk.masters).clone()
        for stepper in engine.steppers:
            stepper.fill_averages(chunk, mine)
    return mine


# --- gathered --------------------------------------------------------------------------------------------------------
# `shown`: shows full weights in their parameters, outside of a step; see `ElixirModule.gathered`.


Wanted = nn.Module | nn.Parameter | Iterable[nn.Parameter] | None
"""The parameters of a module, one parameter, several, or None for all."""


@contextlib.contextmanager
def shown(engine: Engine, wanted: Wanted, write: bool, ema: bool = False) -> Iterator[None]:
    """See `ElixirModule.gathered`.

    Args:
        engine: the engine of the chunks.
        wanted: the parameters to show.
        write: whether writes become the weights, unless an exception ends the context.
        ema: whether averages of the weights are shown in their place.
    """
    engine.refuse_inside("gathered()")
    engine.refuse_in_pass("gathered()")
    uses, parameters = engine.uses, _of_model(engine, wanted)
    _check_average(engine, write=write, ema=ema)
    engine.settle_together("gathered()")
    stand_ins: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if ema and parameters is not None and not parameters:
        stand_ins = _averages_standing_in(engine)
        parameters = {slot.parameter for chunk in engine.chunks if _is_resident(chunk) for slot in chunk.slots}
    by_chunk = [
        (chunk, [slot for slot in chunk.slots if parameters is None or slot.parameter in parameters])
        for chunk in engine.chunks
    ]
    asked = [(chunk, slots) for chunk, slots in by_chunk if slots]
    _warn_of_size(engine, [chunk for chunk, _ in asked if chunk.shown is None])
    with stand_ins, _shown(engine, asked, write=write, ema=ema):
        if ema:
            trained = (each for each in by_chunk if each[0].plan.trainable and each[0].kept is None)
            uses.averaged = all(len(slots) == len(chunk.slots) for chunk, slots in trained)
        yield


@contextlib.contextmanager
def _shown(engine: Engine, asked: Sequence[tuple[Chunk, list[Slot]]], *, write: bool, ema: bool) -> Iterator[None]:
    opened: list[tuple[Chunk, torch.Tensor, list[Slot]]] = []
    uses = engine.uses
    before, averaged_before = dict(uses.gathered), uses.averaged
    moved = _moved_by_user(engine)
    try:
        for chunk, slots in asked:
            if write:
                chunk.about_to_write()  # before versions change, at which a checkpoint would raise
            memory = chunk.shown
            if memory is None:  # otherwise another `gathered` around this one holds it
                memory = _with_averages(engine, chunk, slots) if ema else whole(engine, chunk)
                if memory is chunk.weights:
                    # Writes must not reach the weights before the end, and without `write` never; writes through `data`
                    # are not announced.
                    memory = memory.clone()
                chunk.point_into(memory)
                chunk.show_attributes(memory)
                chunk.shown = memory
            opened.append((chunk, memory, slots))
            writable = {slot.parameter for slot in slots} if write else set()
            uses.gathered[chunk.index] = before.get(chunk.index, frozenset()) | writable
        yield
        if write:
            engine.cache.invalidate()  # a forward inside of the context may have fetched old weights
            take_back(opened)
            for chunk, memory, slots in opened:
                chunk.take(memory, slots)
                for slot in slots:
                    moved.pop(slot.parameter, None)
    finally:
        uses.gathered, uses.averaged = before, averaged_before
        _hide(chunk for chunk, _, _ in opened if chunk.index not in before)
        for parameter, data in moved.items():
            parameter.data = data


def _is_resident(chunk: Chunk) -> bool:
    """Whether a trained chunk has no home but its gathered weights."""
    return chunk.plan.trainable and chunk.shard is None


@contextlib.contextmanager
def _averages_standing_in(engine: Engine) -> Iterator[None]:
    """Streamed weights that are trained are loaded from copies of their averages, at the home of the weights."""
    try:
        for chunk in engine.chunks:
            if chunk.plan.trainable and chunk.shard is not None:
                pinned = chunk.shard.device.type == "cpu" and chunk.shard.is_pinned()
                averages = torch.empty_like(chunk.shard, pin_memory=pinned).copy_(_averaged_shard(engine, chunk))
                chunk.stand_in(averages)
        yield
    finally:
        engine.settle_quietly()  # blocks have averages, and loads may be reading them
        for chunk in engine.chunks:
            if chunk.kept is not None:
                chunk.stand_in(None)


def _check_average(engine: Engine, *, write: bool, ema: bool) -> None:
    """Raises `InputError` if weights and their averages would be taken for each other."""
    if write and (ema or engine.uses.averaged is not None):
        raise InputError("gathered(ema=True) shows averages for reading, and write=True would make them the weights")
    if ema and engine.uses.shows_other_memory:
        raise InputError("gathered(ema=True) is for outside of another gathered(), whose values it would replace")
    if ema and not any(stepper.averages for stepper in engine.steppers):
        raise InputError(
            "no optimizer of this model keeps an average of the weights: give elixir.wrap or ElixirOptimizer "
            "ema=0.999 before training"
        )


def _with_averages(engine: Engine, chunk: Chunk, asked: Sequence[Slot]) -> torch.Tensor:
    """Memory that shows the averages of some parameters, and the weights of the others."""
    if not chunk.plan.trainable:
        return whole(engine, chunk)
    found = averaged(engine, chunk)
    if len(asked) < len(chunk.slots):
        averages, found = found, whole(engine, chunk).clone()
        for slot in asked:
            part = slice(slot.offset, slot.offset + slot.numel)
            found[part].copy_(averages[part])
    return found


def _warn_of_size(engine: Engine, chunks: Sequence[Chunk]) -> None:
    """Warns, once, if chunks that are shown together take more of the device than its budget leaves."""
    plan, nbytes = engine.plan, sum(chunk.weight_bytes for chunk in chunks)
    left = plan.device_budget_bytes - engine.arena.live_bytes("device")
    limits = plan.device_budget_bytes != plan.predicted.device_peak_bytes  # as plans have it that were given no budget
    if len(chunks) > 1 and nbytes > left and limits and not engine.uses.warned_of_size:
        engine.uses.warned_of_size = True
        if engine.group.rank == 0:
            logger.warning(
                "gathered() shows %s of weights at once, and the device budget of %s leaves %s: show them in parts, "
                "`for name, p in model.named_parameters(): with model.gathered([p]): ...`, or run the model with "
                "averages by gathered([], ema=True) (said once)",
                readable_bytes(nbytes, up=True),
                readable_bytes(plan.device_budget_bytes),
                readable_bytes(max(left, 0)),
            )


def _hide(chunks: Iterable[Chunk]) -> None:
    """Points the parameters of chunks back to where they pointed before, and frees the shown memory."""
    for chunk in chunks:
        chunk.shown = None
        chunk.show_attributes(None)
        if chunk.weights is None:
            chunk.hold_placeholders()
        else:
            chunk.point_into(chunk.weights)


def _moved_by_user(engine: Engine) -> dict[nn.Parameter, torch.Tensor]:
    """The memory that the user has given to plain parameters, which get it back afterwards."""
    plain = [chunk for chunk in engine.chunks if chunk.shown is None and engine.is_ordinary(chunk)]
    return {
        slot.parameter: slot.parameter.data
        for chunk in plain
        if chunk.weights is not None
        for slot in chunk.moved(chunk.weights)
    }


def _of_model(engine: Engine, wanted: Wanted) -> set[nn.Parameter] | None:
    if wanted is None:
        return None
    if isinstance(wanted, nn.Module):
        wanted = wanted.parameters()
    given = [wanted] if isinstance(wanted, nn.Parameter) else list(wanted)
    found = [part for each in given for _, part in flat("", each)]
    foreign = [item for item in found if not (isinstance(item, nn.Parameter) and item in engine.places)]
    if foreign:
        raise InputError(
            f"gathered() takes parameters of this model, or modules of it; {len(foreign)} of {len(found)} are none"
        )
    return {part for part in found if isinstance(part, nn.Parameter)}


# --- model state -----------------------------------------------------------------------------------------------------


class _Replaced:
    """Replaces a method of one module. Models that share a module may stack their replacements.

    Args:
        module: the module.
        name: the name of the method.
        over: the replacement; its first argument is the replaced method.
    """

    def __init__(self, module: nn.Module, name: str, over: Callable[..., Any]) -> None:
        self._module, self._name, self._over = module, name, over
        self.own = vars(module).get(name)  # None if it is the method of the class
        self.original: Callable[..., Any] = getattr(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._over(self.original, *args, **kwargs)

    def remove(self) -> None:
        """Undoes the replacement, even if others have been stacked on it."""
        above = vars(self._module).get(self._name)
        if above is self:
            if self.own is None:
                delattr(self._module, self._name)
            else:
                setattr(self._module, self._name, self.own)
            return
        while isinstance(above, _Replaced):
            if above.own is self:
                above.own, above.original = self.own, self.original
                return
            above = above.own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module runs under no plan: it has the method of its class.
        return MethodType(getattr(type(self._module), self._name), copy.deepcopy(self._module, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError("a module that runs under a plan cannot be pickled; save its state_dict()")


def in_use(module: nn.Module) -> bool:
    """Whether this module, with its parameters, belongs to a model that runs under a plan."""
    return bool(module._parameters) and isinstance(vars(module).get("_save_to_state_dict"), _Replaced)


class ModelState:
    """Makes ``state_dict`` and ``load_state_dict`` of every module of a model full and strict.

    Args:
        engine: the engine of the model. With several ranks all must ask for a state dict together.
        buffers: returns rank 0's values for this rank's buffers, if they may differ.
    """

    def __init__(self, engine: Engine, buffers: Callable[[], dict[torch.Tensor, torch.Tensor]]) -> None:
        self._engine, self._model, self._buffers = engine, engine.model, buffers
        self._uses = engine.uses
        self._places = engine.places
        self._full: bool | None = None
        """Whether this rank wants the wrapper's state dict; None unless that is being built."""
        self._only: Callable[[str, nn.Parameter], bool] | None = None
        self._dtype: torch.dtype | None = None
        self._given: dict[nn.Parameter, torch.Tensor] = {}
        """Values in the state dict that is being built: the names of a tied parameter share one tensor, as in torch.
        """
        self._gathered: tuple[int, torch.Tensor] | None = None
        """The last chunk that was gathered for a state dict, and its values."""
        self._shared: dict[torch.Tensor, torch.Tensor] = {}
        """Rank 0's buffers for the state dict that is being built, so that it does not depend on the saving rank.
        """
        self._replaced: list[_Replaced] = []
        for module in self._model.modules():
            if module._parameters or module._buffers:
                self._replace(module, "_save_to_state_dict", partial(self._give, module))
            if next(module.parameters(), None) is not None:  # modules without parameters may belong to several models
                self._replace(module, "state_dict", self._together)
                self._replace(module, "_load_from_state_dict", partial(self._take, module))

    def _replace(self, module: nn.Module, name: str, over: Callable[..., Any]) -> None:
        replaced = _Replaced(module, name, over)
        setattr(module, name, replaced)
        self._replaced.append(replaced)

    def remove(self) -> None:
        """Gives modules their own methods back, and lets go of the plan's blocks, which another plan may replace."""
        while self._replaced:
            self._replaced.pop().remove()
        for name in ("_uses", "_places"):
            vars(self).pop(name, None)

    def full(
        self,
        *args: Any,
        wanted: bool = True,
        only: Callable[[str, nn.Parameter], bool] | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Builds the model's state dict on the CPU, in separate memory, with weights in float32 or wider.

        Args:
            wanted: False takes part in gathering but keeps nothing.
            only: whether a parameter, given its name and itself, is included; the same on all ranks.
            dtype: the dtype of floating weights, instead.
        """
        self._full, self._only, self._dtype = wanted, only, dtype
        try:
            state = self._model.state_dict(*args, **kwargs)
        finally:
            self._full = self._only = self._dtype = None
        return state if wanted else {}

    def _together(self, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Builds a module's state dict; with several ranks it first checks that all of them want one."""
        if self._uses.saving:  # called for a module around this one
            return original(*args, **kwargs)
        self._engine.settle_together("state_dict()")
        give_back_freed()  # of the last step
        self._uses.saving = True
        try:
            self._shared = self._buffers()
            return original(*args, **kwargs)
        finally:
            self._uses.saving = False
            in_memory = (value for key, value in self._given.items() if self._places[key][0].filed is None)
            given = self._engine.arena.given_bytes
            given["weights"] = max(given["weights"], sum(value.nbytes for value in in_memory))
            self._gathered = None
            self._given.clear()
            self._shared = {}

    def _give(
        self,
        module: nn.Module,
        original: Callable[..., None],
        destination: dict[str, Any],
        prefix: str,
        keep_vars: bool,
    ) -> None:
        """Saves a module without its children, with values instead of placeholders, before any hook sees it."""
        original(destination, prefix, keep_vars)
        for name, parameter in module._parameters.items():
            key = prefix + name
            if parameter not in self._places or not isinstance(destination.get(key), torch.Tensor):
                continue
            chunk, slot = self._places[parameter]
            if self._full is None and (keep_vars or self._engine.is_ordinary(chunk)):
                continue
            if self._only is not None and not self._only(key, parameter):
                del destination[key]
                continue
            if parameter not in self._given:
                self._given[parameter] = self._value(parameter, chunk, slot)
            destination[key] = self._given[parameter]
        for name, buffer in module._buffers.items():
            if buffer is None or not isinstance(value := destination.get(prefix + name), torch.Tensor):
                continue
            if not keep_vars:
                value = self._shared.get(buffer, value)
            if self._full is not None:
                value = value.detach().to("cpu", copy=True)  # the model goes on changing its own
            destination[prefix + name] = value

    def _value(self, parameter: nn.Parameter, chunk: Chunk, slot: Slot) -> torch.Tensor:
        filed = chunk.filed  # not gathered: values in files are mapped, and may be more than memory holds
        part = filed.mapped(slot.name) if filed else slot.part_of(self._whole_of(chunk)).detach()
        own = self._full is None or part.itemsize == 1  # float8 has no wider type in torch's table
        dtype = cast_dtype(
            parameter, self._dtype or (part.dtype if own else torch.promote_types(part.dtype, torch.float32))
        )
        if self._full is False:
            return torch.empty(0, device="cpu")
        return part.to("cpu", dtype) if filed else separate_copy(part, dtype)

    def _whole_of(self, chunk: Chunk) -> torch.Tensor:
        if self._gathered is None or self._gathered[0] != chunk.index:
            self._gathered = None  # frees the last one before the next is gathered
            give_back_freed()  # it stays in the heap, where one of another size may not fit
            self._gathered = (chunk.index, whole(self._engine, chunk, precise=self._full is not None, copy=False))
        return self._gathered[1]

    def _take(
        self,
        module: nn.Module,
        original: Callable[..., None],
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *rest: Any,
    ) -> None:
        """Loads one module: gives its parameters separate memory, then copies what was loaded home."""
        if metadata.pop("assign_to_params_buffers", None):  # the caller's dict has it, and may be loaded again
            raise InputError("assign=True would give the parameters other memory; leave it out")
        own = [
            self._places[parameter]
            for parameter in dict.fromkeys(module._parameters.values())
            if parameter in self._places and self._places[parameter][0].index not in self._uses.gathered
        ]
        self._refuse_shown(module, state, prefix)
        if not own:
            original(state, prefix, metadata, *rest)
            return
        self._engine.refuse_inside("load_state_dict()")
        self._engine.settle_quietly()
        self._engine.take_back((chunk, chunk.slots) for chunk in {chunk.index: chunk for chunk, _ in own}.values())
        memory: list[torch.Tensor] = []
        for chunk, slot in own:
            chunk.about_to_write()  # before versions change, at which a checkpoint would raise
            wide = torch.promote_types(chunk.dtype, torch.float32) if chunk.masters is not None else chunk.dtype
            memory.append(torch.empty_strided(slot.shape, slot.stride, dtype=wide, device="cpu"))
            with DisableTorchFunctionSubclass():
                slot.parameter.data = memory[-1]
        before = [slot.parameter._version for _, slot in own]
        self._uses.loading = True
        try:
            original(state, prefix, metadata, *rest)
        finally:
            self._uses.loading = False
            given = list(zip(own, before, memory, strict=True))
            given.sort(key=lambda each: each[0][0].index)
            with self._engine.window.keeping():  # masters of a chunk on a disk are read once
                for (chunk, slot), version, values in given:
                    if slot.parameter._version != version:
                        chunk.write(slot, values)
                    chunk.show(slot)

    def _refuse_shown(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Raises if values would be loaded into memory that `ElixirModule.gathered` shows without `write`."""
        for name, parameter in module._parameters.items():
            if parameter in self._places and prefix + name in state:
                writable = self._uses.gathered.get(self._places[parameter][0].index)
                if self._uses.averaged is not None or (writable is not None and parameter not in writable):
                    raise InputError(
                        f"load_state_dict() writes to {prefix + name}, which gathered() shows for reading: use "
                        "gathered(parameters, write=True), or load outside of it"
                    )


# --- shared weights --------------------------------------------------------------------------------------------------
# `SharedWeights`: attributes of modules that lie in the memory of a trained weight stay views of it under a plan.


class SharedWeights:
    """The attributes of a model that share memory with weights.

    Args:
        model: the model inside of the wrapper, before it is wrapped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = dict(model.named_parameters())
        found = {shared.name: shared for shared in find_shared_memory(model)}
        tensors = plain_tensors(model) if found else ()
        # Weakly: `torch.nn.utils.spectral_norm` replaces its attribute in each forward.
        self._found = [(found[name], weakref.ref(tensor)) for name, tensor in tensors if name in found]

    def attach(self, engine: Engine) -> None:
        """Makes them views of where the engine's present plan has the weights."""
        engine.read_unannounced.clear()
        for chunk in engine.chunks:
            chunk.attributes.clear()
        for shared, attribute in self._found:
            tensor = attribute()
            if tensor is not None:
                chunk, slot = engine.places[self._weights[shared.weight]]
                of = partial(shared.of, offset=slot.offset)
                with DisableTorchFunctionSubclass(), unmarked(), engine.cache.memory_of(chunk) as memory:
                    chunk.attributes.append(Attribute(attribute, of, of(memory)))
                chunk.show_attributes(None)
                if chunk.plan.resident:
                    engine.read_unannounced.append(chunk)

    def give_back(self) -> None:
        """Puts them back into the memory of their weights, unless that is on meta."""
        with DisableTorchFunctionSubclass():
            for shared, attribute in self._found:
                tensor, weight = attribute(), self._weights[shared.weight]
                if tensor is not None and not weight.is_meta:
                    tensor.data = shared.of(weight.data, 0)
