"""`GradientStages`: when the last gradient of a parameter comes in a pass, and sums of parameters that come twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from elixir.access.autograd import backward_is_running
from elixir.access.counted_parameter import CountedParameter
from elixir.errors import InputError
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.engine import Engine
from elixir.wrapper.one_pass.late_hooks import hooks_of
from elixir.wrapper.one_pass.micro_batch import MicroBatch
from elixir.wrapper.weight_uses import incomplete_gradient

_GRADIENT: Any = torch.Tensor.grad


class _Staying(nn.Parameter):
    """A parameter whose gradient stays with it, and is not complete while micro-batches of a pass run."""

    def _read(self) -> Any:
        if MicroBatch.here() is not None and not backward_is_running():
            raise incomplete_gradient(f"A parameter of shape {list(self.shape)}")
        return _GRADIENT.__get__(self)

    def _write(self, value: torch.Tensor | None) -> None:
        _GRADIENT.__set__(self, value)

    grad = property(_read, _write)


class _CountedStaying(_Staying, CountedParameter):
    """The same, whose writes are counted."""


_STAYING: dict[Any, Any] = {nn.Parameter: _Staying, CountedParameter: _CountedStaying}


class GradientStages:
    """The stages of a pass: layers, and what lies between them, counted in the order of forward.

    A loop sums what all stages give for one micro-batch before the next micro-batch. Here a stage gives for all
    micro-batches, so the parts of a parameter that several stages use, such as tied embeddings, wait on the host, one
    per micro-batch, and are summed in the loop's order once the first stage has given its part.

    Args:
        engine: takes the sums.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.now = 0
        """The stage that runs."""
        self.micro_batch = 0
        """The micro-batch that runs."""
        self._first: dict[nn.Parameter, int] = {}  # the first stage that uses a parameter
        self._done = 2**62  # the lowest stage all of whose gradients have come
        self._parts: dict[nn.Parameter, dict[int, torch.Tensor]] = {}  # by parameter and micro-batch
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}
        """The gradients so far, such as those of earlier passes, of parameters with which gradients stay."""
        self._handles: list[Any] = []
        self._classes: list[tuple[Any, Any]] = []

    def open(self) -> None:
        """Watches the parameters with which gradients stay, until `close`."""
        places = self._engine.places
        staying = [parameter for parameter in places if parameter.requires_grad and not self._leaves(parameter)]
        self._before = {parameter: parameter.grad for parameter in staying}
        self._handles = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in staying]
        self._classes = [(parameter, type(parameter)) for parameter in staying]
        for parameter, own in self._classes:
            parameter.grad = None
            parameter.__class__ = _STAYING.get(own, own)

    def use(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Notes that the present stage uses parameters."""
        for parameter in parameters:
            if parameter is not None:
                self._first.setdefault(parameter, self.now)

    def begins_with(self, parameter: torch.Tensor) -> bool:
        """Whether the present stage is the first that uses a parameter."""
        return isinstance(parameter, nn.Parameter) and self._first.get(parameter) == self.now

    def forward_over(self) -> None:
        """A micro-batch has run the model's forward."""
        MicroBatch.waits_after_layer()

    def set_aside(self) -> None:
        """Keeps what micro-batches that skip the next layers have given, ahead of the parts that the others give."""
        with DisableTorchFunctionSubclass():
            for parameter, _ in self._classes:
                if parameter.grad is not None:
                    self._before[parameter], parameter.grad = parameter.grad, None

    def is_done(self, parameter: nn.Parameter) -> bool:
        """Whether all its gradients have come, and none waits here; no for one that no stage is known to use."""
        return parameter not in self._parts and self._first.get(parameter, -1) >= self._done

    def keeps(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Takes a part of a gradient that earlier stages give parts of, too; returns whether it is one.

        Raises:
            InputError: all parts were thought to have come, or the user's hooks would get parts.
        """
        if self.is_done(parameter):
            name = self._engine.places[parameter][1].name
            raise InputError(
                f"operators before a layer read {name}, which belongs to a later module, without calling that; "
                "call the module, or plan with pass_size=1"
            )
        if self._first.setdefault(parameter, self.now) == self.now and parameter not in self._parts:
            return False
        if hooks_of(parameter):
            raise InputError(
                f"a hook on {self._engine.places[parameter][1].name} gets the gradients of several modules that share "
                "it one by one in a pass, instead of their sum; leave the hook out, or plan with pass_size=1"
            )
        parts = self._parts.setdefault(parameter, {})
        had = parts.get(self.micro_batch)
        if had is None:
            parts[self.micro_batch] = gradient.detach().to("cpu", copy=True)
        else:
            had.add_(gradient.to("cpu"))
        return True

    def swept(self, stage: int) -> None:
        """Notes that no more gradients come in a stage and those after it; what is complete leaves."""
        self._done = stage
        for parameter in [parameter for parameter in self._parts if self._first[parameter] >= stage]:
            parts = self._parts[parameter]
            in_order = [parts[index].to(parameter.device) for index in sorted(parts)]
            with DisableTorchFunctionSubclass():
                if self._leaves(parameter):
                    # Each is added to what is there, in which micro-batches that skip the last layers come first. The
                    # chunk leaves with the last one.
                    for part in in_order[:-1]:
                        self._engine.gradients.take(*self._engine.places[parameter], part)
                    del self._parts[parameter]
                    self._engine.gradients.take(*self._engine.places[parameter], in_order[-1])
                else:
                    del self._parts[parameter]
                    parameter.grad = _sum([*self._earlier(parameter), *in_order])
        self._engine.gradients.release()

    def close(self) -> None:
        """Takes the hooks off the parameters, and gives those that got no more gradient the one that they had."""
        for handle in self._handles:
            handle.remove()
        for parameter, own in self._classes:
            parameter.__class__ = own
        for parameter, before in self._before.items():
            parameter.grad = before

    def _leaves(self, parameter: torch.Tensor) -> bool:
        """Whether its gradients go through gradient blocks, rather than stay with it."""
        return self._engine.places[parameter][0].index in self._engine.gradients.by_chunk

    def _earlier(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Gives away its gradient so far, if it has one."""
        before = self._before.pop(parameter, None)
        return [] if before is None else [before]

    def _arrived(self, parameter: Any) -> None:
        if self.keeps(parameter, parameter.grad):
            parameter.grad = None
        elif parameter in self._before:
            parameter.grad = _sum([*self._earlier(parameter), parameter.grad])


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Adds parts to the first, in order."""
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]
