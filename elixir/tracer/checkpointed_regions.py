"""Checkpointed regions of a step: the generator's states that they keep, and what they do to the process's generator.

A checkpoint keeps the state of PyTorch's one generator for the CPU, and sets it back to run its region again. Another
thread may be drawing from that generator, and a trace leaves it alone: what a step draws on the CPU comes from a
generator of the trace (`HostRandom`). So that is what a region that runs again sets back, and nothing else.

All of it is done to objects that belong to one call of `torch.utils.checkpoint.checkpoint`: the cells of the closure
that it will run, or the context of its autograd function. Where a version of PyTorch names them otherwise, it does as
always.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint

from elixir.torch_private import DisableTorchDispatch, DisableTorchFunction

CHECKPOINT_FILE = torch.utils.checkpoint.__file__
STATE_BYTES = torch.get_rng_state().nbytes


class HostRandom:
    """Random numbers for real tensors of a trace: those that PyTorch's generator would give, which stays as it is."""

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None
        # None until something draws, which most regions never do.
        self._state: torch.Tensor | None = None

    @property
    def generator(self) -> torch.Generator:
        """Begins where PyTorch's generator is when it is first asked for."""
        if self._generator is None:
            self._generator = torch.Generator()
            self._generator.set_state(torch.get_rng_state())
        return self._generator

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator that draws, on real tensors."""
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        self._state = None
        seeded = _with_generator(func)
        if seeded is not None:
            return seeded(*args, **{**kwargs, "generator": self.generator})
        # Not even an overload takes a generator: PyTorch's is borrowed for this one call.
        own, state = self.generator, torch.get_rng_state()
        torch.set_rng_state(own.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            own.set_state(torch.get_rng_state())
            torch.set_rng_state(state)

    def replaying(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as it will run later: it draws what it would draw now."""
        state = self._present()

        @functools.wraps(function, updated=())
        def again(*args: Any, **kwargs: Any) -> Any:
            present = self._present()
            self._return_to(state)
            try:
                return function(*args, **kwargs)
            finally:
                self._return_to(present)

        return again

    def _present(self) -> torch.Tensor:
        """The generator's state: the same object as long as it is the same state."""
        if self._state is None:
            self._state = self.generator.get_state()
        return self._state

    def _return_to(self, state: torch.Tensor) -> None:
        if self._state is not state:
            self.generator.set_state(state)
            self._state = state


def _unseen(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """`function`, which asks each saved tensor for its metadata, unseen by the mode that sees torch functions."""

    def unseen(tensor: torch.Tensor) -> Any:
        with DisableTorchFunction():
            return function(tensor)

    return unseen


@functools.cache
def _with_generator(func: Any) -> Any:
    """The overload of an operator that also takes a generator; None if there is none."""
    names = [argument.name for argument in func._schema.arguments]
    if "generator" in names:
        return func
    packet = func._overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        other = [argument.name for argument in overload._schema.arguments]
        if "generator" in other and [argument for argument in other if argument != "generator"] == names:
            return overload
    return None


class CheckpointedRegions:
    """Keeps checkpoints from the process's generator.

    Args:
        random: where a step draws from instead.
        count_state: is called for each state that a checkpoint keeps, which no dispatch shows.
    """

    def __init__(self, random: HostRandom, count_state: Callable[[torch.Tensor], None]) -> None:
        self._random = random
        self._count_state = count_state
        self.beginning: list[FrameType] = []
        """Frames of checkpointed regions that have begun, and will have taken the state when the next operator runs."""

    def begins(self, frame: FrameType) -> None:
        """A checkpoint asks for the devices of its arguments, just before it takes the generator's state."""
        caller: FrameType | None = frame
        while caller is not None and "preserve_rng_state" not in caller.f_code.co_varnames + caller.f_code.co_cellvars:
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename == CHECKPOINT_FILE and caller not in self.beginning:
            self.beginning.append(caller)

    def settle(self) -> None:
        """An operator runs: checkpoints have by now taken what they wanted."""
        self.beginning = [frame for frame in self.beginning if not self._settled(frame.f_locals)]

    def _settled(self, names: dict[str, Any]) -> bool:
        if not names.get("preserve_rng_state"):
            return True
        context = names.get("ctx")
        if context is not None:
            state = getattr(context, "fwd_cpu_state", None)
            if state is None:
                return False
            context.run_function = self._again(context.run_function)
            context.preserve_rng_state = False
        else:
            region = names.get("new_frame")
            if region is None:
                return False
            state, again = names["fwd_cpu_state"], names["recompute_fn"]
            cells = dict(zip(again.__code__.co_freevars, again.__closure__, strict=True))
            cells["fn"].cell_contents = self._again(cells["fn"].cell_contents)
            cells["preserve_rng_state"].cell_contents = False
            region.metadata_fn = _unseen(region.metadata_fn)
        self._count_state(state)
        return True

    def _again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as it will run again: meanwhile a checkpoint keeps the state that there is then, too."""
        replayed = self._random.replaying(function)

        @functools.wraps(function, updated=())
        def again(*args: Any, **kwargs: Any) -> Any:
            with DisableTorchDispatch():  # it is no operator of the step
                present = torch.empty(STATE_BYTES, dtype=torch.uint8)
            self._count_state(present)
            return replayed(*args, **kwargs)

        return again
