"""`AccessListener`: the interface through which tracer and runtime learn of uses of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

Pins = Sequence[int]
"""Chunks that are held for one function."""


class AccessListener(Protocol):
    """Learns of uses of parameters; tracer and runtime each implement it.

    One that inherits it need not define what it has no use for: its weights stay where they are.
    """

    claims_saved: bool
    """Whether it may claim tensors that autograd saves. Otherwise `pack` and `unpack` are never called, and autograd
    saves tensors without a Python call, as in plain PyTorch."""

    def used(self, parameters: list[nn.Parameter], function: str) -> Pins:
        """Called before `function` reads `parameters` (each once, in argument order). Returns what `give_back` gets
        after it; nothing where a module or a node that runs says how long they are needed."""

    def give_back(self, pins: Pins) -> None:
        """Called with what `used` has returned, when the function has returned or raised."""
        return

    def writes(self, parameters: list[nn.Parameter], function: str, *, of_weights: bool) -> None:
        """Called before `function` writes to `parameters`, and before `used`.

        Args:
            parameters: the parameters, each once.
            function: the name of the function.
            of_weights: whether all its tensors are weights or views of them.
        """

    def wrote(self, parameters: list[nn.Parameter]) -> None:
        """Called when the function of the last `writes` has returned, or ``data`` was set after `replaces`."""

    storages: Iterable[int] = ()
    """Numbers of the storages of weights that come and go, see `storage_of`."""

    def parameter_of(self, view: torch.Tensor) -> nn.Parameter | None:
        """The parameter in whose memory a function's result begins, so that it must be tracked; otherwise None."""

    def used_through(self, parameter: nn.Parameter) -> None:
        """Called before a view is read whose storage has no memory, though its parameter is in use: that is shown
        elsewhere."""
        return

    def lends(self, parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
        """The tensor to return instead of `data`: ``parameter.data``, or the ``data`` of a view."""
        return data

    def has_room_for(self, parameters: list[nn.Parameter]) -> bool:
        """Whether one operator may read all of them at once."""
        return False

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the running module or node has announced `parameter`, so that reading a view of it is no new use."""

    def reads_gradient(self, parameter: nn.Parameter) -> None:
        """Called before ``parameter.grad`` is read."""
        return

    def drops_gradient(self, parameter: nn.Parameter) -> None:
        """Called before ``parameter.grad`` is set to None, or deleted."""
        return

    def replaces(self, parameter: nn.Parameter) -> None:
        """Called before ``parameter.data`` is set to another tensor, or ``parameter.set_`` runs."""
        return

    def entered(self, module: nn.Module) -> None:
        """Called when `module` starts to run."""

    def left(self, module: nn.Module, output: Any) -> Any:
        """Called when `module` has returned `output`, or raised (None). Returns the output to use instead."""

    def pack(self, tensor: torch.Tensor) -> Any | None:
        """A handle that replaces `tensor` until backward if it is (a view of) a weight, otherwise None."""

    def stays(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that `pack` leaves alone is (a view of) a weight, so that no other hooks may move it."""
        return False

    def unpack(self, handle: Any) -> torch.Tensor:
        """The tensor of a handle of `pack`, which the running autograd node is about to read."""

    def again(self, handle: Any) -> torch.Tensor:
        """The tensor of a handle of `pack`, for a function in a checkpoint that runs again and announces its reads."""
        return self.unpack(handle)
