"""Settings that PyTorch keeps per thread, and states of its generators, to be set again on another thread or later."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch

from elixir.access.autograd import innermost_saved_tensors_hooks
from elixir.errors import InputError
from elixir.torch_private import dispatch_mode_count, function_mode_count

_SEEDS = 2**62
"""Number of seeds from which the random states of micro-batches are drawn."""


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
        """Sets this state, meanwhile."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._kinds:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self._cached))
            yield

    @staticmethod
    def forget_casts() -> None:
        """Frees the casts of weights that autocast keeps on this thread until its outermost context ends."""
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()


class ThreadSettings:
    """Everything that a thread of a micro-batch takes over from the thread that calls `accumulate`.

    Args:
        device: the device of compute.

    Raises:
        InputError: a mode or hooks for saved tensors are active here, which other threads would escape.
    """

    def __init__(self, device: torch.device) -> None:
        default = torch.get_default_device()
        self._default = None if default.type == "cpu" else default
        if dispatch_mode_count() or function_mode_count() > (self._default is not None):
            raise InputError(
                "a mode that watches operators (TorchDispatchMode or TorchFunctionMode) is active around accumulate(), "
                "whose micro-batches run on other threads; enter it inside of step_fn"
            )
        hooks = innermost_saved_tensors_hooks()
        if hooks is not None:
            pack = inspect.unwrap(hooks[0])
            name = f"{getattr(pack, '__module__', '')}.{getattr(pack, '__qualname__', repr(pack))}"
            raise InputError(
                f"hooks for saved tensors, such as save_on_cpu, are active around accumulate() ({name}), whose "
                "micro-batches run on other threads; leave them out, or plan with pass_size=1"
            )
        self._autocast = Autocast(device)
        self._grad = torch.is_grad_enabled()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Sets them on this thread, meanwhile."""
        with contextlib.ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            if self._default is not None:
                stack.enter_context(self._default)
            stack.enter_context(self._autocast.restored())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            yield


class RandomState:
    """The states of PyTorch's generators of the CPU and of the device of compute.

    Args:
        device: the device of compute.
        seed: the states that follow from this seed; None: the present ones.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._device, self._other, cuda = device, None, device.type == "cuda"
        if seed is None:
            self._cpu = torch.get_rng_state()
            self._other = torch.cuda.get_rng_state(device) if cuda else None
        else:
            self._cpu = torch.Generator("cpu").manual_seed(seed).get_state()
            self._other = torch.Generator(device).manual_seed(seed).get_state() if cuda else None

    @classmethod
    def drawn(cls, device: torch.device, seeds: torch.Generator) -> RandomState:
        """States of a seed that is drawn from `seeds`."""
        return cls(device, int(torch.randint(_SEEDS, (), device="cpu", generator=seeds)))

    def is_same(self, other: RandomState) -> bool:
        """Whether the states of all generators are those of `other`."""
        pairs = ((self._cpu, other._cpu), (self._other, other._other))
        return all(one is two or (one is not None and two is not None and one.equal(two)) for one, two in pairs)

    def restore(self) -> None:
        """Makes these the present states."""
        torch.set_rng_state(self._cpu)
        if self._other is not None:
            torch.cuda.set_rng_state(self._other, self._device)
