"""Settings that PyTorch keeps per thread, and states of its generators, to be set again on another thread or later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from elixir.access.autograd import innermost_saved_tensors_hooks
from elixir.errors import InputError
from elixir.torch_private import dispatch_mode_count, function_mode_count


class Autocast:
    """The state of autocast on this thread.

    Args:
        device: the device of compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._cached = torch.is_autocast_cache_enabled()
        self._kinds = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets this state, meanwhile; keeps no casts of weights, which will change."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._kinds:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cached))
            stack.callback(torch.clear_autocast_cache)
            yield


class ThreadSettings:
    """Everything that a thread of a micro-batch takes over from the thread that calls `accumulate`.

    Args:
        device: the device of compute.

    Raises:
        InputError: a mode or hooks for saved tensors are active here, which other threads would escape.
    """

    def __init__(self, device: torch.device) -> None:
        default = torch.get_default_device()
        self._default = contextlib.nullcontext() if default.type == "cpu" else default
        modes = dispatch_mode_count() or function_mode_count() > (self._default is default)
        if modes or innermost_saved_tensors_hooks() is not None:
            raise InputError(
                "a mode that watches operators (TorchDispatchMode or TorchFunctionMode), or hooks for saved tensors "
                "such as save_on_cpu, are active around accumulate(), whose micro-batches run on other threads; enter "
                "a mode inside of step_fn, leave out the hooks, or plan with pass_size=1"
            )
        self._autocast = Autocast(device)
        self._grad = torch.is_grad_enabled()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets them on this thread, meanwhile."""
        grad = torch.set_grad_enabled(self._grad)
        with torch.cuda.stream(self._stream), self._default, self._autocast.restored(), grad:
            yield


class RandomState:
    """The states of PyTorch's generators of the CPU and of the device of compute.

    Args:
        device: the device of compute.
        seed: the states that follow from this seed; None: the present ones.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._device, cuda = device, [device] if device.type == "cuda" else []
        if seed is None:
            self._states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda)]
        else:
            devices = [torch.device("cpu"), *cuda]
            self._states = [torch.Generator(each).manual_seed(seed).get_state() for each in devices]

    def is_same(self, other: RandomState) -> bool:
        """Whether the states of all generators are those of `other`."""
        return all(map(torch.equal, self._states, other._states))

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Makes these the present states, meanwhile."""
        present = RandomState(self._device)
        self._restore()
        try:
            yield
        finally:
            present._restore()

    def _restore(self) -> None:
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            torch.cuda.set_rng_state(self._states[1], self._device)
