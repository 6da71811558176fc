"""`WeightUses`: fetches the chunk of a parameter that a step uses, and pins it while it may be read."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from elixir.access.access_listener import RENORMALISE, AccessListener, Pins
from elixir.access.autograd import backward_is_running, current_node_number
from elixir.access.interception import TRACKED_PARAMETERS
from elixir.access.interrupts import hold_back
from elixir.access.placeholders import storage_of, unmarked
from elixir.chunk.chunk import Chunk, Slot
from elixir.chunk.gradients.gradient_flow import GradientFlow
from elixir.chunk.rcache import RCache
from elixir.errors import InputError
from elixir.hardware.process_memory import HEAP
from elixir.models.plannable import compiled_over_moving_weights
from elixir.torch_private import (
    DisableTorchDispatch,
    DisableTorchFunctionSubclass,
    compiling,
    current_graph_task_id,
    dispatch_mode_count,
    forward_mode_runs,
    functorch_level,
)
from elixir.wrapper.scope_uses import ScopeUses, ThreadUses

_ALIKE_ON_ALL_RANKS = frozenset("abs_ add_ clamp_ clamp_max_ clamp_min_ clip_ copy_ lerp_ mul_ relu_ zero_".split())
"""Functions that write the same on all ranks if they get only weights and constants: clamps, moving averages."""


_TAKE_MEMORY = frozenset("data_ptr untyped_storage storage _typed_storage numpy __array__ __dlpack__ set_".split())
"""Functions that give a caller memory that is no tensor, which shows other weights once these have left."""


_FRAMES_TO_APPLY = 8
"""The frames that are searched for `torch.nn.Module._apply`, which reads gradients; the interception takes five."""


def ignored(parameters: list[nn.Parameter]) -> None:
    """Outside of a pass, nobody wants to know of uses."""


class _Saved(NamedTuple):
    """The place in its chunk of a weight, or a view of one, that autograd has saved."""

    chunk: int
    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    parameter: nn.Parameter
    version: int
    """The parameter's version, so that a later change of the weights is noticed."""

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The view over `memory`, which holds the chunk's weights."""
        if memory.dtype != self.dtype:
            memory = memory.view(self.dtype)
        return memory.as_strided(self.size, self.stride, memory.storage_offset() + self.offset)


def incomplete_gradient(name: str) -> InputError:
    """The error about a gradient that is read in a pass of several micro-batches."""
    return InputError(
        f"{name}.grad is read inside of accumulate(), whose micro-batches get most gradients after step_fn; read it "
        "afterwards, or plan with pass_size=1"
    )


class ForwardOnly:
    """Freezes a model that only runs forward, until `remove`: a graph would keep activations that no plan counts."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        for parameter in self._parameters:
            parameter.requires_grad_(False)

    def remove(self) -> None:
        """Lets the parameters be trained again."""
        for parameter in self._parameters:
            parameter.requires_grad_(True)


class _Unit(NamedTuple):
    """A layer whose weights are fetched as one."""

    chunks: tuple[Chunk, ...]
    streamed: tuple[int, ...]
    """The streamed ones among its chunks."""
    parameters: frozenset[int]
    """The `id`s of its parameters."""


class WeightUses(AccessListener):
    """The runtime's listener to uses of weights.

    A used chunk stays pinned until the innermost running module returns; in backward, until another autograd node asks
    for a weight. Pins are per thread, since backward runs on threads of autograd.

    Args:
        cache: the blocks.
        chunks: all chunks of the plan, by index.
        places: the chunk and the slot of every parameter.
        gradients: knows which gradients have left for their home.
        device: the device of compute.
        backward_runs: called for every node of a backward, which need not have begun at an output of the model.
        moves: whether the step moves what autograd saves to the host, which it must not do with weights.
    """

    def __init__(
        self,
        cache: RCache,
        chunks: Sequence[Chunk],
        places: Mapping[torch.Tensor, tuple[Chunk, Slot]],
        gradients: GradientFlow,
        device: torch.device,
        backward_runs: Callable[[], None],
        *,
        moves: bool = False,
    ) -> None:
        self._cache, self._gradients, self._device = cache, gradients, device
        self._backward_runs = backward_runs
        self._device_type = device.type
        self._compute: torch.cuda.Stream | None = None  # the stream that last used memory here
        self._chunks = chunks
        self._places = places
        self._together: dict[int, _Unit] = {}
        """The unit that is fetched as one, by the `id` of a parameter; any of those that have the parameter."""
        self._units: dict[frozenset[int], _Unit] = {}
        """The units by the `id`s of their parameters."""
        self.claims_saved = moves or not all(chunk.plan.resident for chunk in chunks)
        """False if all chunks are resident and nobody moves what autograd saves: their weights stay in place until the
        optimizer's step, which autograd notices."""
        self._latest: dict[int, _Saved] = {}
        """The place that was last saved of a parameter, by its `id`. Most are the same in all steps: thousands of
        objects that live from forward to backward would keep the garbage collector at work."""
        self.storages = self._lies_in = {
            storage_of(it.block.flat): it for it in chunks if it.block is not None and not it.plan.resident
        }
        """The chunk of each storage that is filled and emptied, by its number."""
        self._streamed: dict[nn.Module, frozenset[int]] = {}  # of modules that were outermost ones
        self._threads: dict[int, ThreadUses] = {}
        self._main = threading.get_ident()  # the thread of the last forward
        self.gathered: dict[int, frozenset[nn.Parameter]] = {}
        """By chunk that `ElixirModule.gathered` shows, the parameters that may be written to."""
        self.averaged: bool | None = None
        """Whether the model runs with averages of weights in their place, or shows only some; None: neither."""
        self.warned_of_size = False
        """Whether it was said that `ElixirModule.gathered` took more than the device's budget."""
        self.saving = False
        """Whether a state dict is being built from placeholders, which are replaced before anyone sees it."""
        self.loading = False
        """Whether parameters have separate memory, into which a state dict is loaded."""
        self.is_over = False
        """Whether the plan is no longer at work: graphs and views of before are refused."""
        self.used_in_pass: Callable[[list[nn.Parameter]], None] = ignored
        """Told of all uses while several micro-batches run in a pass."""

    def join(self, units: Iterable[nn.Module]) -> None:
        """Notes the units that are fetched as one: in backward, all weights of one come with the first, and stay until
        a weight of another is read."""
        self._together.clear()
        self._units.clear()
        for unit in units:
            members = [parameter for parameter in unit.parameters() if type(parameter) in TRACKED_PARAMETERS]
            chunks = tuple(dict.fromkeys(self._places[parameter][0] for parameter in members))
            streamed = tuple(chunk.index for chunk in chunks if not chunk.plan.resident)
            found = _Unit(chunks, streamed, frozenset(map(id, members)))
            self._units[found.parameters] = found
            self._together.update(dict.fromkeys(found.parameters, found))

    def used(self, parameters: list[nn.Parameter], function: str) -> Pins:
        """Fetches the chunks, and pins them until the running module returns; outside of all, until `give_back`."""
        if self.loading or (self.saving and function == "detach"):
            return ()
        self._refuse_over()
        if compiling():
            raise compiled_over_moving_weights(f"what reads a weight of shape {list(parameters[0].shape)}")
        self.order_compute()
        self.used_in_pass(parameters)
        state = self._state()
        # A unit announces all its weights at once; a node of its backward, which reads only some, is no unit.
        unit = self._units.get(frozenset(map(id, parameters))) if self._units else None
        chunks = unit.chunks if unit else dict.fromkeys(self._places[parameter][0] for parameter in parameters)
        streamed: list[int] = []
        for chunk in chunks:
            if chunk.index in self.gathered:
                continue
            if chunk.plan.resident:
                self._wait_for_update(chunk)
            else:
                self._refuse_unbounded(chunk, parameters[0], function)
                streamed.append(chunk.index)
        if unit and state.scopes:
            state.scopes[-1].watch(chunks)
        if not streamed:
            return ()
        if not state.scopes and not backward_is_running():
            if not self._cache.has_room_for(set(streamed)):
                raise InputError(
                    f"{function} reads more weights at once outside of the model's forward than the plan's blocks "
                    "hold; do it inside `with model.gathered(parameters)`"
                )
            self._acquire(streamed, outside=True)
            return streamed
        self._acquire(streamed)
        if not state.scopes:
            self._enter_node(state, id(parameters[0]))
        scope = state.scopes[-1] if state.scopes else state.at_node
        scope.pins.extend(streamed)
        scope.parameters.update(unit.parameters if unit else map(id, parameters))
        return ()

    def give_back(self, pins: Pins) -> None:
        """Unpins what a function has read outside of all modules and nodes."""
        if pins:
            self._cache.unpin(pins)

    @property
    def shows_other_memory(self) -> bool:
        """Whether weights, or averages, are shown by `ElixirModule.gathered`."""
        return bool(self.gathered) or self.averaged is not None

    def _acquire(self, streamed: list[int], *, outside: bool = False) -> None:
        if functorch_level() is not None:
            _refuse_forward_mode()
        HEAP.trim_if_over()
        with _hidden_from_modes():
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):  # tensors that it creates could not be written to in training
                    self._cache.acquire(streamed, outside=outside)
            else:
                self._cache.acquire(streamed, outside=outside)

    def _refuse_unbounded(self, chunk: Chunk, parameter: nn.Parameter, function: str) -> None:
        """Refuses a use of a streamed chunk that nothing bounds, or of which autograd would keep copies."""
        outside = not self._state().scopes and not backward_is_running()
        elsewhere = threading.get_ident() != self._main
        if outside and (function in _TAKE_MEMORY or elsewhere or not chunk.on_one_rank):
            why = "no rank may gather it alone" if not chunk.on_one_rank else "nothing says how long it is needed"
            why = "another thread may step it meanwhile" if elsewhere else why
            raise InputError(
                f"{function} reads {self._places[parameter][1].name} outside of the model's forward, where {why}; do "
                "it inside `with model.gathered(parameters)`"
            )
        if chunk.dtype == torch.float32 and torch.is_autocast_enabled(self._device_type):
            raise InputError(
                "torch.autocast over weights that are streamed keeps a cast copy of every weight until backward, "
                "which is the memory that streaming saves; leave autocast out and plan with unified_dtype="
                f"{torch.get_autocast_dtype(self._device.type)}, which casts the weights once"
            )

    def order_compute(self) -> None:
        """Makes the caller's CUDA stream wait for the stream that used weights before, if it is another one.

        In plain PyTorch, readers of weights need no order. Here they share blocks, and a lane that fills a block waits
        for one stream only.
        """
        if self._device_type == "cuda":
            now = torch.cuda.current_stream(self._device)
            if self._compute is not None and now != self._compute:
                # `now` may evict a block that the other stream still reads, and a lane would fill it.
                now.wait_stream(self._compute)
            self._compute = now

    def used_through(self, parameter: nn.Parameter) -> None:
        """Fetches the weights of a view while `gathered` shows its parameter in other memory."""
        index, state = self._places[parameter][0].index, self._state()
        if not state.scopes and not backward_is_running():
            raise InputError(
                f"a view of {self._places[parameter][1].name} that was made before is read inside of gathered(), where "
                "only the parameter itself has its values"
            )
        self._acquire([index])
        if not state.scopes:
            self._enter_node(state, id(parameter))
        (state.scopes[-1] if state.scopes else state.at_node).pins.append(index)

    def parameter_of(self, view: torch.Tensor) -> nn.Parameter | None:
        """The parameter in whose memory a tensor begins, if that comes and goes."""
        chunk = self._lies_in.get(storage_of(view))
        return None if chunk is None else _parameter_at(chunk, view)

    def _saved(self, tensor: torch.Tensor) -> _Saved | None:
        """The place that is saved instead of a tensor that lies in a chunk's storage; None of all others."""
        chunk = self._lies_in.get(storage_of(tensor))
        if chunk is None or tensor.is_conj() or tensor.is_neg():  # autograd then keeps the marked view itself
            return None
        offset, size, stride = int(tensor.storage_offset()), tensor.size(), tensor.stride()
        parameter = _parameter_at(chunk, tensor)
        version = parameter._version
        saved = self._latest.get(id(parameter))
        if saved is None or saved[1:5] != (offset, tensor.dtype, size, stride) or saved.version != version:
            saved = _Saved(chunk.index, offset, tensor.dtype, size, stride, parameter, version)
            self._latest[id(parameter)] = saved
        return saved

    def lends(self, parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
        """Counts writes through ``data`` of resident weights; writes to blocks are announced."""
        return self._places[parameter][0].lend(data)

    def has_room_for(self, parameters: list[nn.Parameter]) -> bool:
        """Whether unpinned blocks can hold the chunks of all parameters at once."""
        chunks = [self._places[each][0] for each in parameters if each in self._places]
        return self._cache.has_room_for({chunk.index for chunk in chunks if not chunk.plan.resident})

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether a running module, or the running autograd node, keeps the parameter's chunk pinned."""
        state = self._state()
        if state.scopes:
            return any(id(parameter) in scope.parameters for scope in state.scopes)
        if not backward_is_running():
            return False
        self._enter_node(state, id(parameter))
        return id(parameter) in state.at_node.parameters

    def refuse_inside(self, what: str) -> None:
        """Raises if one of the model's modules, or backward, runs on this thread."""
        if backward_is_running() or self._state().scopes:
            raise InputError(f"{what} is for outside of the model's forward and backward, where weights come and go")

    def writes(self, parameters: list[nn.Parameter], function: str, *, of_weights: bool) -> None:
        """Refuses writes that would be lost. Parameters that are gathered for writing may be written to. The model's
        own forward may write if all ranks write the same, as Gemma-3n does when it clamps a weight."""
        if self.loading:
            return
        inside = bool(self._state().scopes) or backward_is_running()
        alike = self._chunks[0].on_one_rank or (of_weights and function in _ALIKE_ON_ALL_RANKS)
        for parameter in parameters:
            chunk, _ = self._places[parameter]
            if parameter in self.gathered.get(chunk.index, ()):
                continue
            stays = chunk.index in self.gathered or self.averaged is not None
            if not (inside and alike) or stays or not chunk.may_be_written_inside:
                way = "do it inside `with model.gathered(parameters, write=True)`"
                if function in RENORMALISE:
                    way = f"leave max_norm= out, and between steps {way}: weight.copy_(weight.renorm(2, 0, max_norm))"
                raise InputError(
                    f"{function} writes in place to a parameter of shape {list(parameter.shape)} whose home is "
                    f"elsewhere, so it would be lost; {way}"
                )
            chunk.about_to_write()

    def wrote(self, parameters: list[nn.Parameter]) -> None:
        """Copies writes to a block home at once, since the next fetch reads there."""
        for parameter in parameters:
            chunk, _ = self._places[parameter]
            if not self.loading and chunk.index not in self.gathered:
                chunk.take_written(parameter)

    def replaces(self, parameter: nn.Parameter) -> None:
        """Refuses other memory for a parameter, which the next step would drop or ignore."""
        raise InputError(
            f"setting the .data of a parameter of shape {list(parameter.shape)}, or set_(), gives it memory that the "
            "plan does not know; copy the values with parameter.copy_(tensor), inside torch.no_grad() and "
            "`with model.gathered(parameters, write=True)`"
        )

    def reads_gradient(self, parameter: nn.Parameter) -> None:
        """Refuses to return None for a gradient that is at home: the caller would take it for no gradient."""
        chunk, slot = self._places[parameter]
        if self.used_in_pass is not ignored and not backward_is_running():
            raise incomplete_gradient(slot.name)
        if parameter.grad is None and self._gradients.holds(chunk, slot.name) and not _is_applied():
            raise InputError(
                f"{slot.name}.grad is None because its gradient lies sharded at the home of its optimizer states: "
                "clip with max_norm= or model.clip_grad_norm_(), which gives the norm, step and zero_grad() with the "
                "ElixirOptimizer, and change gradients in a hook (parameter.register_hook)"
            )

    def drops_gradient(self, parameter: nn.Parameter) -> None:
        """Drops the gradient at its home."""
        chunk, slot = self._places[parameter]
        self._gradients.drop(chunk, slot.name)

    def entered(self, module: nn.Module) -> None:
        """Opens a scope for a module. Inside backward it begins a recompute, which ends the scope of the last node."""
        state = self._state()
        if not state.scopes:
            if backward_is_running():
                self._enter_node(state)
            else:
                hold_back()
                self._main = threading.get_ident()
                self._cache.begin_call(self.streamed_of(module))
        state.scopes.append(ScopeUses())

    def left(self, module: nn.Module, output: Any) -> Any:
        """Closes a module's scope and unpins its chunks. Outputs that lie in a block are cloned first."""
        kept = _map_tensors(self._outside, output)
        scopes = self._state().scopes
        ended = scopes.pop()
        self._cache.unpin(ended.pins)
        for chunk in ended.unannounced:
            chunk.check_unwritten()
        if not scopes and not backward_is_running():
            self._cache.end_call()
        return kept

    def streamed_of(self, module: nn.Module) -> frozenset[int]:
        """The chunks of a module's weights that pass through blocks."""
        found = self._streamed.get(module)
        if found is None:
            chunks = [self._places[each][0] for each in module.parameters() if each in self._places]
            found = frozenset(chunk.index for chunk in chunks if not chunk.plan.resident)
            self._streamed[module] = found
        return found

    def pack(self, tensor: torch.Tensor) -> Any | None:
        """Claims tensors in blocks and weights. Weights may not be in a block: activation checkpointing saves the
        arguments of its function before they are read."""
        if functorch_level() is not None:  # asked here to save a Python call: this runs for every saved tensor
            _refuse_forward_mode()
        place = self._places.get(tensor) if type(tensor) in TRACKED_PARAMETERS else None
        if place is None or place[0].plan.resident:
            return self._saved(tensor)
        chunk, slot = place
        version = slot.parameter._version
        return _Saved(chunk.index, slot.offset, tensor.dtype, slot.shape, slot.stride, slot.parameter, version)

    def _refuse_over(self) -> None:
        if self.is_over:
            raise InputError(
                "a graph is read that was made before rehome(), or before the ElixirModule was closed, when weights "
                "were elsewhere; call the model again"
            )

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the memory of a resident weight."""
        return storage_of(tensor) in self._resident

    @cached_property
    def _resident(self) -> frozenset[int]:
        """Numbers of the storages of resident weights."""
        with DisableTorchFunctionSubclass():  # this asks for their places, not their values
            return frozenset(storage_of(each) for each, (chunk, _) in self._places.items() if chunk.plan.resident)

    def unpack(self, handle: Any) -> torch.Tensor:
        """Fetches a saved weight for the running node."""
        part: _Saved = handle
        self._refuse_over()
        self.order_compute()
        self._refuse_changed(part)
        if (gathered := self._chunks[part.chunk].shown) is not None:
            return part.of(gathered)
        if not backward_is_running():  # user code looks at what a node has saved
            self._cache.acquire([part.chunk])
            try:
                return part.of(self._chunks[part.chunk].filled).clone()
            finally:
                self._cache.unpin([part.chunk])
        state, key = self._state(), id(part.parameter)
        # A node of a unit whose weights are pinned goes on with them.
        if key not in state.at_node.unit or state.node is None or state.node[0] != current_graph_task_id():
            self._enter_node(state, key)
            if key not in state.at_node.parameters:  # otherwise the node has pinned it
                self._acquire_for_node(state.at_node, part)
        there = part.of(self._chunks[part.chunk].filled)
        # A backward that makes a graph of itself (create_graph=True) saves the weight once more, by its mark.
        return self._marked(part, there) if torch.is_grad_enabled() else there

    def again(self, handle: Any) -> torch.Tensor:
        """A saved weight for a function that runs again, where it announces its reads."""
        return self._marked(handle, self.unpack(handle))

    def _marked(self, part: _Saved, there: torch.Tensor) -> torch.Tensor:
        """A saved weight that is there, marked if its memory comes and goes."""
        block = self._chunks[part.chunk].block
        if block is None or storage_of(there) != storage_of(block.flat):
            return there
        with unmarked():
            return part.of(block.marked)

    def _acquire_for_node(self, uses: ScopeUses, part: _Saved) -> None:
        """Fetches a saved weight for the running node, or all weights of its unit."""
        key = id(part.parameter)
        unit = self._together.get(key)
        chunks, keys = ((part.chunk,), frozenset((key,))) if unit is None else (unit.streamed, unit.parameters)
        uses.unit = frozenset() if unit is None else keys
        self._cache.acquire(chunks)
        uses.pins.extend(chunks)
        uses.parameters.update(keys)

    def backward_done(self) -> None:
        """Unpins the chunks of the last node on every thread, once backward is over."""
        for state in self._threads.values():
            self._cache.unpin(state.at_node.pins)
            state.node, state.at_node = None, ScopeUses()

    @staticmethod
    def _wait_for_update(chunk: Chunk) -> None:
        if chunk.whole.writer is not None:
            chunk.whole.wait(taking=True)  # the step before writes the weights that are read next
            if chunk.weights is not None:  # see `publish`
                with _hidden_from_modes():
                    chunk.point_into(chunk.weights)

    def _enter_node(self, state: ThreadUses, reads: int = 0) -> None:
        """Ends the uses of the node before, unless the one that runs now `reads` a parameter of the same unit."""
        node = current_graph_task_id(), current_node_number()
        if node != state.node:
            self._backward_runs()  # makes sure that the last node's pins are released at the end of backward
            if reads in state.at_node.unit:
                state.node = node
                return
            self._cache.unpin(state.at_node.pins)
            state.node, state.at_node = node, ScopeUses()

    def _state(self) -> ThreadUses:
        thread = threading.get_ident()
        state = self._threads.get(thread)
        if state is None:
            state = self._threads[thread] = ThreadUses()
        return state

    @staticmethod
    def _refuse_changed(part: _Saved) -> None:
        if part.parameter._version != part.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"weight of shape {list(part.parameter.shape)} is at version {part.parameter._version}, it was saved "
                f"at version {part.version}; an optimizer step in between does this"
            )

    def _outside(self, tensor: torch.Tensor) -> torch.Tensor:
        place = self._places.get(tensor) if type(tensor) in TRACKED_PARAMETERS else None
        if place is not None:
            # A module around this one announces its reads. Outside of all modules the weight is copied, which is a use.
            stays = len(self._state().scopes) > 1 or place[0].plan.resident
            return tensor if stays else _copied(tensor)
        # Reading a view is a use: the module that made it may have returned long ago.
        return _copied(tensor) if storage_of(tensor) in self._lies_in else tensor


def _hidden_from_modes() -> AbstractContextManager[Any]:
    """Hides our own operators from dispatch modes: a selective checkpoint counts calls, and a run again fetches other
    weights than the first."""
    return DisableTorchDispatch() if dispatch_mode_count() else nullcontext()


def _is_applied() -> bool:
    """Whether `torch.nn.Module.to` or the like asks, which changes gradients only with their weights, which stay."""
    frame = inspect.currentframe()
    for _ in range(_FRAMES_TO_APPLY):
        if frame is None or frame.f_code is nn.Module._apply.__code__:
            return frame is not None
        frame = frame.f_back
    return False


def _refuse_forward_mode() -> None:
    """Raises `InputError` in forward-mode transforms: their tensors die at the end, and those of weights would not."""
    if forward_mode_runs():
        raise InputError(
            "torch.func.jvp and jacfwd cannot run over streamed weights; use torch.autograd.functional.jvp without "
            "create_graph, or plan with every chunk on the device (placement='cuda')"
        )


def _parameter_at(chunk: Chunk, tensor: torch.Tensor) -> nn.Parameter:
    return chunk.parameter_at(int(tensor.storage_offset()) * tensor.itemsize // chunk.dtype.itemsize)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor but keeps expanded dimensions: `clone` would write them out, and another layout selects kernels
    with other bits."""
    expanded = [dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[dim]]
    once = tensor
    for dim in expanded:
        once = once.narrow(dim, 0, 1)
    return once.clone().expand(tensor.shape) if expanded else tensor.clone()


def _map_tensors(change: Any, output: Any) -> Any:
    """Applies `change` to the tensors in a module's output, in any container that modules return."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, (tuple, list)):
        changed = [_map_tensors(change, item) for item in output]
        if all(new is old for new, old in zip(changed, output, strict=True)):
            return output
        # A named tuple takes its fields one by one, all others take an iterable.
        return type(output)(*changed) if hasattr(output, "_fields") else type(output)(changed)
    if isinstance(output, dict):
        for key, value in output.items():
            new = _map_tensors(change, value)
            if new is not value:
                output[key] = new
    return output
