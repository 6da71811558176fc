"""`ClassStates`: the states that an optimizer of the user's class keeps for the segments of a shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from elixir.checkpoint_format.saved_tensor import scalar_state
from elixir.chunk.pages import host_zeros
from elixir.chunk.state_window import StoredStates
from elixir.errors import InputError
from elixir.hardware.process_memory import HEAP
from elixir.kernels import HybridAdam
from elixir.kernels.adam.step import COPIED
from elixir.kernels.adam.step_like import Kept, can_step_like, step_like
from elixir.memory_order import Order, flattened, is_dense, order_of, shaped
from elixir.torch_private import while_nothing_compiles
from elixir.units import dtype_name
from elixir.wrapper.step.elementwise import set_options
from elixir.wrapper.step.segments import Arrived, Segment
from elixir.wrapper.step.states import BY_CLASS, MakeMemory, SavedStates, StateForm, States, StateTensor

_ALIGNED_NUMEL = 16
"""Alignment of a float32 moment in a shared buffer: 64 bytes, as PyTorch's allocator aligns separate tensors."""


class MakesOptimizer(Protocol):
    """Makes optimizers of the user's class; see `elixir.wrapper.step.user_optimizer.UserOptimizer`."""

    begins_with_states: bool
    """Whether the constructor of the class creates states."""
    is_predictable: bool
    """See `States`."""

    def over(self, segments: Sequence[Segment]) -> torch.optim.Optimizer:
        """Creates an optimizer of the class over segments, with their groups' options."""


class ClassStates(States):
    """See `States`.

    Args:
        user: creates optimizers of the class.
        master: the flat shard of weights or masters.
        segments: its parts.
        extent: holds the states if they live on a disk.
        on_host: whether they live in host memory, which child processes must not inherit.
        shared: an optimizer that steps several shards; its groups have parameters only during a call.
    """

    accepts_tensor_factor = True

    def __init__(
        self,
        user: MakesOptimizer,
        master: torch.Tensor,
        segments: list[Segment],
        *,
        weights: torch.Tensor | None = None,
        extent: StoredStates | None = None,
        on_host: bool = False,
        shared: torch.optim.Optimizer | None = None,
    ) -> None:
        self.master, self.segments, self.weights = master, segments, weights
        self._user, self._extent, self._on_host = user, extent, on_host
        self._made_ahead = False  # by `make`; then resetting a segment means zeroing its states
        self._is_second = False  # in memory that is counted as a second set
        self.optimizer, self.is_predictable = shared or user.over(segments), user.is_predictable
        self.shares_call = shared is not None
        self._all_states: MutableMapping[torch.Tensor, dict[str, Any]] = self.optimizer.state

    def set_options(self, options: list[dict[str, Any]]) -> None:
        """See `States`."""
        for group, values in zip(self.optimizer.param_groups, options, strict=True):
            set_options(group, values)

    def step(
        self,
        arrived: Arrived,
        gradients: torch.Tensor | None,
        factor: float | torch.Tensor,
        weight_out: torch.Tensor | None,
        into: ClassStates | None = None,
    ) -> set[str]:
        """See `States`."""
        if into is not None:
            return _step_into(self, into, arrived, float(factor), weight_out)
        return _step_in_place(self, arrived, factor, weight_out)

    def with_gradients(self, arrived: Arrived) -> AbstractContextManager[None]:
        """See `States`."""
        return _with_gradients(self, arrived)

    def call(self, method: str) -> None:
        """See `States`."""
        getattr(self.optimizer, method)()

    @property
    def memory_kind(self) -> tuple[object, ...] | None:  # type: ignore[override]
        """See `States`."""
        if self._extent is not None or self._is_second:
            return None
        return ClassStates, self.master.dtype, self.master.device, self._on_host

    def make(self, *, allocate: bool = True) -> bool:
        """See `States`. Only torch's Adams and `HybridAdam` can.

        On the host they lie in memory that child processes do not inherit. If the first step created them, page by
        page, it could run out of memory halfway.
        """
        if self.segments and isinstance(self.optimizer, HybridAdam) and self._extent is None:
            if allocate:
                self.optimizer.make_states()
        elif self.segments and type(self.optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            if allocate:
                self._make_moments(self.optimizer)
        else:
            return not self.segments
        self._made_ahead = True
        return True

    def _make_moments(self, optimizer: torch.optim.Optimizer) -> None:
        """Creates the state with which torch's Adam begins, each moment of all segments in one buffer."""
        places, numel = [], 0
        for segment in self.segments:
            places.append(numel)
            numel += -(-segment.weights.numel() // _ALIGNED_NUMEL) * _ALIGNED_NUMEL
        if self._extent is not None:  # at the offsets of the weights
            places, numel = [segment.start for segment in self.segments], self.master.numel()
        amsgrad = any(group["amsgrad"] for group in optimizer.param_groups)
        names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))
        device, dtype = self.master.device, self.master.dtype

        def zeros(name: str) -> torch.Tensor:
            if self._extent is not None:
                return self._extent.region(_region(name, dtype), numel, dtype)
            return host_zeros(numel, dtype) if self._on_host else torch.zeros(numel, dtype=dtype, device=device)

        buffers = {name: zeros(name) for name in names}
        for segment, place in zip(self.segments, places, strict=True):
            weights, group = segment.weights, optimizer.param_groups[segment.group]
            state: dict[str, Any] = {"step": _new_count(segment, group)}
            for name in names if group["amsgrad"] else names[:2]:
                state[name] = shaped(buffers[name][place : place + weights.numel()], weights.shape, segment.order)
            optimizer.state[weights] = state

    @property
    def can_copy(self) -> bool:
        """See `States`."""
        kinds = (torch.Tensor, bool, int, float, type(None))
        states = [self.state_of(segment) for segment in self.segments]
        return all(state and all(isinstance(value, kinds) for value in state.values()) for state in states)

    def empty_like(self, master: torch.Tensor, segments: list[Segment], memory: MakeMemory) -> ClassStates:
        """See `States`."""
        other = ClassStates(self._user, master, segments)
        other._is_second = True
        for mine, theirs in zip(self.segments, segments, strict=True):
            other.optimizer.state[theirs.weights] = {
                kind: memory(value.numel(), value.dtype).view(value.shape)
                if isinstance(value, torch.Tensor) and value.dim()
                else _copied_scalar(value)
                for kind, value in self.state_of(mine).items()
            }
        return other

    def copy_from(self, other: ClassStates) -> None:
        """See `States`."""
        self.master.copy_(other.master)
        for mine, theirs in zip(self.segments, other.segments, strict=True):
            _copy_state(other.state_of(theirs), self.optimizer.state[mine.weights])

    def state_of(self, segment: Segment) -> dict[str, Any]:
        """The state that the class keeps for a segment."""
        found: dict[str, Any] = self._all_states.get(segment.weights, {})
        return found

    def let_go(self) -> None:
        """See `States`."""
        # The optimizer lives on if other shards use it, so it must not keep these states alive.
        pop, state = self.optimizer.state.pop, self.optimizer.state
        self._all_states = {each.weights: pop(each.weights) for each in self.segments if each.weights in state}
        super().let_go()

    def has_stepped(self, segment: Segment) -> bool:
        """See `States`."""
        state = self.state_of(segment)
        step = state.get("step")
        return bool(state) and (step is None or bool(step > 0))

    def without_states(self) -> list[Segment]:
        """See `States`."""
        return [segment for segment in self.segments if not self.state_of(segment)]

    def tensors(self, *, moving: bool = False) -> Iterator[StateTensor]:
        """See `States`."""
        for segment in self.segments:
            for kind, value in self.state_of(segment).items() if moving or self.has_stepped(segment) else ():
                if not _is_elementwise(kind, value, segment):
                    continue
                order, flat = segment.slot.order, value.detach()
                if self._extent is None:
                    if moving and not is_dense(flat.shape, flat.stride()):
                        flat = flat.contiguous()
                    own = _order_in_memory(flat, kind, segment)
                    order = order if own == segment.order else own  # a class may choose the layout of its states
                    flat = flattened(flat, own)
                region = _region(kind, value.dtype)
                yield StateTensor(kind, segment.held, flat, order, region, segment.start, self._extent)

    def widened(self, each: StateTensor) -> torch.Tensor:
        """See `States`."""
        return each.tensor.to(wide_dtype(each.tensor.dtype))

    def scalars(self, segment: Segment) -> dict[str, Any]:
        """See `States`."""
        state = self.state_of(segment)
        return {kind: value for kind, value in state.items() if not _is_elementwise(kind, value, segment)}

    def memory(self) -> Iterator[tuple[str | None, torch.Tensor, int]]:
        """See `States`."""
        for segment in self.segments:
            for kind, value in self.state_of(segment).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    fits = value.shape == segment.weights.shape
                    yield _region(kind, value.dtype) if fits else None, value, segment.start

    def load(self, saved: SavedStates) -> set[str]:
        """See `States`."""
        notes: set[str] = set()
        if self._extent is not None:
            saved.filled()  # creating a region may move the others in memory
            for segment in self.segments:
                for kind, form in saved.forms(segment.name).items():
                    self._new(kind, segment, form.dtype_in(segment))
        for segment in self.segments:
            notes |= self._load(segment, saved)
        saved.filled()  # states that were created here may be moved now
        lacking = self.without_states() if self._user.begins_with_states else []
        if lacking:
            self.optimizer.state.update(self._user.over(lacking).state)
        return notes

    def _load(self, segment: Segment, saved: SavedStates) -> set[str]:
        name, made, group = segment.name, self.state_of(segment), self.optimizer.param_groups[segment.group]
        forms, small = saved.forms(name), saved.small(name)
        if not forms and small.step is None and not small.others:
            self._reset(segment)
            return set()
        notes: set[str] = set()
        state: dict[str, Any] = {}
        if small.step is not None and "step" not in small.others:
            count = made.get("step")
            own = count if isinstance(count, torch.Tensor) else _new_count(segment, group)
            state["step"] = own.fill_(float(small.step))
        for kind, form in forms.items():
            if form.held is not None:
                state[kind] = _take(form.held(), made.get(kind), segment)
            else:
                state[kind] = self._filled(kind, segment, saved, form)
                mine = dtype_name(form.dtype_in(segment))
                if form.name != mine:
                    notes.add(form.rounded_to(mine))
        device = _counts_on(segment, group)
        for kind, value in small.others.items():
            found = value if small.are_live else scalar_state(value)
            if isinstance(found, torch.Tensor):
                found = found.to(segment.weights.device if found.numel() == segment.weights.numel() > 1 else device)
            state[kind] = found
        self.optimizer.state[segment.weights] = state
        return notes

    def _reset(self, segment: Segment) -> None:
        """Resets a segment to its state before the first step; keeps memory that `make` has allocated."""
        if not self._made_ahead:
            # `load` creates the states anew for a class that begins with some.
            self.optimizer.state.pop(segment.weights, None)
            return
        for value in self.state_of(segment).values():
            if isinstance(value, torch.Tensor):
                value.zero_()

    def _filled(self, kind: str, segment: Segment, saved: SavedStates, form: StateForm) -> torch.Tensor:
        mine = self._to_fill(kind, segment, form)
        if order_of(mine.shape, mine.stride()) == segment.order:
            saved.fill(kind, segment.name, segment.first, flattened(mine.detach(), segment.order))
        else:
            flat = mine.new_empty(mine.numel())
            saved.fill(kind, segment.name, segment.first, flat)
            saved.filled()  # `flat` is copied next
            mine.copy_(shaped(flat, mine.shape, segment.order))
        return mine

    def _to_fill(self, kind: str, segment: Segment, form: StateForm) -> torch.Tensor:
        """The state that the class has created if its shape, dtype and layout fit, otherwise a new one."""
        weights, wanted, made = segment.weights, form.dtype_in(segment), self.state_of(segment).get(kind)
        fits = isinstance(made, torch.Tensor) and (made.shape, made.dtype) == (weights.shape, wanted)
        if isinstance(made, torch.Tensor) and fits and is_dense(made.shape, made.stride()):
            return made
        if weights is segment.source and form.order != segment.order:  # plain PyTorch, too, keeps the order it loads
            return shaped(weights.new_zeros(weights.numel(), dtype=wanted), weights.shape, form.order)
        return self._new(kind, segment, wanted)

    def _new(self, kind: str, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """Allocates a state of a segment, in the extent if there is one."""
        if self._extent is None:
            return torch.zeros_like(segment.weights, dtype=dtype, requires_grad=False)
        region = self._extent.region(_region(kind, dtype), self.master.numel(), dtype)
        return region[segment.part].view(segment.weights.shape)


def _counts_on(segment: Segment, group: Mapping[str, Any]) -> torch.device:
    """The device on which torch keeps the count of steps of a segment: a fused step reads it there."""
    return segment.weights.device if group.get("fused") else torch.device("cpu")


def _new_count(segment: Segment, group: Mapping[str, Any]) -> torch.Tensor:
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=_counts_on(segment, group))


def _step_in_place(
    states: ClassStates, arrived: Arrived, factor: float | torch.Tensor, weight_out: torch.Tensor | None
) -> set[str]:
    """Runs one step; for arguments and result see `States.step`."""
    kept = [_kept(states, segment) for segment, _ in arrived]
    if weight_out is None or states.master.device.type != "cpu" or not can_step_like(states.optimizer, kept):
        _step_by_class(states, arrived, factor)
        return {BY_CLASS}
    forms = set()
    for each, (segment, gradient) in zip(kept, arrived, strict=True):
        group, out = states.optimizer.param_groups[segment.group], weight_out[segment.part]
        forms.add(step_like(states.optimizer, group, gradient, each, out, float(factor)))
    return forms


def _step_into(
    old: ClassStates, new: ClassStates, arrived: Arrived, factor: float, weight_out: torch.Tensor | None
) -> set[str]:
    """Runs one step from `old` into `new`; for arguments and result see `States.step`."""
    before, after = ([_kept(states, segment) for segment in states.segments] for states in (old, new))
    if can_step_like(new.optimizer, (*before, *after)):
        forms = set()
        for segment, kept, made, (_, gradient) in zip(new.segments, before, after, arrived, strict=True):
            out = None if weight_out is None else weight_out[segment.part]
            group = new.optimizer.param_groups[segment.group]
            forms.add(step_like(new.optimizer, group, gradient, kept, out, factor, made))
        return forms
    new.copy_from(old)
    mine = {segment.place: segment for segment in new.segments}
    _step_by_class(new, [(mine[segment.place], gradient) for segment, gradient in arrived], factor)
    if weight_out is not None:
        weight_out.copy_(new.master)
    return {COPIED}


@contextlib.contextmanager
def _with_gradients(states: ClassStates, arrived: Arrived, factor: float | torch.Tensor = 1.0) -> Iterator[None]:
    """Sets the gradients, multiplied by `factor`, for a call of the class, and clears them afterwards."""
    segments = [segment for segment, _ in arrived] if states.shares_call else states.segments
    before = [segment.weights.grad for segment in segments]  # ordinary parameters keep their own gradients
    try:  # an error must leave nothing for the next call
        for segment in segments:
            segment.weights.grad = None
            if states.shares_call:
                states.optimizer.param_groups[segment.group]["params"].append(segment.weights)
        HEAP.trim_if_over(sum(gradient.numel() for _, gradient in arrived) * states.master.itemsize)  # at most
        for segment, gradient in arrived:
            # In float32 without a factor this is the gradient itself, as in plain PyTorch.
            value = gradient.to(segment.weights.dtype)
            if isinstance(factor, torch.Tensor) or factor != 1.0:
                value = value * factor if value is gradient else value.mul_(factor)
            segment.weights.grad = shaped(value, segment.weights.shape, segment.order)
        yield
    finally:
        for group in states.optimizer.param_groups if states.shares_call else ():
            group["params"] = []
        for segment, kept in zip(segments, before, strict=True):
            segment.weights.grad = kept


def _step_by_class(states: ClassStates, arrived: Arrived, factor: float | torch.Tensor) -> None:
    with _with_gradients(states, arrived, factor), while_nothing_compiles():
        states.optimizer.step()


def _kept(states: ClassStates, segment: Segment) -> Kept:
    return Kept(segment.weights, states.state_of(segment))


def _take(held: torch.Tensor, made: Any, segment: Segment) -> torch.Tensor:
    """Puts a flat state of another home into memory that the class has created for it, otherwise keeps its own
    memory."""
    weights = segment.weights
    if isinstance(made, torch.Tensor) and made.dim() and made.dtype == held.dtype and made.numel() == held.numel():
        return made.copy_(shaped(held, made.shape, segment.order))
    return shaped(held.to(weights.device).detach(), weights.shape, segment.order)


def _region(kind: str, dtype: torch.dtype) -> str:
    """The name of the region of an extent that holds an elementwise state."""
    return f"{kind} {dtype_name(dtype)}"


def _is_elementwise(kind: str, value: Any, segment: Segment) -> bool:
    return kind != "step" and isinstance(value, torch.Tensor) and value.shape == segment.weights.shape


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states in a state dict: at least float32."""
    return max(dtype, torch.float32, key=lambda each: each.itemsize) if dtype.is_floating_point else dtype


def _order_in_memory(value: torch.Tensor, kind: str, segment: Segment) -> Order | None:
    if not is_dense(value.shape, value.stride()):
        raise InputError(
            f"state {kind!r} of {segment.name} has gaps between its elements in memory, or several in one place, so it "
            "cannot be saved; have the class keep state.contiguous()"
        )
    return order_of(value.shape, value.stride())


def _copied_scalar(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _copy_state(source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Copies one parameter's state to another, in place for tensors of the same shape."""
    for kind in [kind for kind in target if kind not in source]:
        del target[kind]
    for kind, value in source.items():
        mine = target.get(kind)
        if isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor) and mine.shape == value.shape:
            mine.copy_(value)
        else:
            target[kind] = _copied_scalar(value)
