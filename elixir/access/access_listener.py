"""The listener to uses of parameters: the tracer and the runtime each have one."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn


class Place(Protocol):
    """Where a view lies; all but the parameter is its listener's own affair."""

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter whose memory it is."""


class AccessListener(Protocol):
    """Hears when parameters are used; the tracer and the runtime each have one."""

    claims_saved: bool
    """Whether it may claim tensors that autograd saves. Otherwise `pack` and `unpack` are never called, and autograd
    saves as it does in plain PyTorch, without a call of Python for each tensor."""

    def used(self, parameters: list[nn.Parameter], function: str) -> None:
        """`function` is about to read `parameters` (each once, in argument order), in forward or in recompute."""

    def writes(self, parameters: list[nn.Parameter], function: str, *, of_weights: bool) -> None:
        """`function` is about to write to `parameters`; comes before `used`.

        Args:
            parameters: each once.
            function: its name.
            of_weights: it gets no tensor but weights and views of them.
        """

    def wrote(self, parameters: list[nn.Parameter]) -> None:
        """The function of the last `writes` on this thread has returned, or ``data`` has been set after `replaces`."""

    def view(self, tensor: torch.Tensor) -> Place | None:
        """Where a result lies if its memory is a parameter's, so that it is to be tracked; else None."""

    def lends(self, parameter: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
        """The tensor that the caller gets instead of `data`, which is ``parameter.data`` or that of a view of it."""

    def has_room_for(self, parameters: list[nn.Parameter]) -> bool:
        """Whether one operator may read all of them."""

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether what runs now has announced `parameter`, so that reading a view of it is no new use."""

    def renew(self, view: Any) -> None:
        """`view` is about to be read, its parameter is in use: see that it shows the values it was made of."""

    def reads_gradient(self, parameter: nn.Parameter) -> None:
        """``parameter.grad`` is about to be read."""

    def drops_gradient(self, parameter: nn.Parameter) -> None:
        """``parameter.grad`` is about to be set to None, or deleted."""

    def replaces(self, parameter: nn.Parameter) -> None:
        """``parameter.data`` is about to be set to another tensor, or ``parameter.set_`` was called."""

    def entered(self, module: nn.Module) -> None:
        """`module` starts to run."""

    def left(self, module: nn.Module, output: Any) -> Any:
        """`module` has returned `output`, or raised (None). Gives what it returns instead."""

    def pack(self, tensor: torch.Tensor) -> Any | None:
        """A handle that stands for `tensor` until backward if it is (a view of) a weight, else None."""

    def unpack(self, handle: Any) -> torch.Tensor:
        """The tensor of a handle of `pack`; the autograd node now running is about to read it."""
