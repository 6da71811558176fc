"""Memory of the host that checkpointed regions take: states of PyTorch's generator, which no dispatch shows.

A checkpoint keeps the state of the generator for the CPU, and another one while its region runs again. They are seen in
objects that belong to one call of `torch.utils.checkpoint.checkpoint`: the cells of the closure that it will run, or
the context of its autograd function. Where a version of PyTorch names them otherwise, they are not counted.
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


def _unseen(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """`function`, which asks each saved tensor for its metadata, unseen by the mode that sees torch functions."""

    def unseen(tensor: torch.Tensor) -> Any:
        with DisableTorchFunction():
            return function(tensor)

    return unseen


class CheckpointedRegions:
    """Finds the regions of a step.

    Args:
        count_state: is called for each state that a checkpoint keeps.
    """

    def __init__(self, count_state: Callable[[torch.Tensor], None]) -> None:
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
            context.run_function = self._recomputed(context.run_function)
        else:
            region = names.get("new_frame")
            if region is None:
                return False
            state, recompute = names["fwd_cpu_state"], names["recompute_fn"]
            cells = dict(zip(recompute.__code__.co_freevars, recompute.__closure__, strict=True))
            cells["fn"].cell_contents = self._recomputed(cells["fn"].cell_contents)
            region.metadata_fn = _unseen(region.metadata_fn)
        self._count_state(state)
        return True

    def _recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as it will run again: meanwhile a checkpoint keeps the state that there is then, too."""

        @functools.wraps(function, updated=())
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            with DisableTorchDispatch():  # it is no operator of the step
                present = torch.empty(STATE_BYTES, dtype=torch.uint8)
            self._count_state(present)
            return function(*args, **kwargs)

        return recomputed
