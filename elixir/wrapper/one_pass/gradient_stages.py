"""`GradientStages`: when the last gradient of a parameter comes in a pass, and sums of parameters that come twice."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.engine import Engine


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
        """The stage whose forward runs."""
        self.micro_batch = 0
        """The micro-batch that runs."""
        self._used: dict[nn.Parameter, list[int]] = {}  # the stages of each parameter, rising
        self._done = 2**62  # the lowest stage all of whose gradients have come
        self._parts: dict[nn.Parameter, dict[int, torch.Tensor]] = {}  # by parameter and micro-batch
        self._stays: dict[nn.Parameter, tuple[torch.Tensor | None, RemovableHandle]] = {}
        """Parameters of several stages whose gradients stay with them: those of earlier passes, and our hook."""

    def use(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Notes that the present stage uses parameters."""
        for parameter in parameters:
            if parameter is None:
                continue
            stages = self._used.setdefault(parameter, [])
            if self.now not in stages:
                stages.append(self.now)
                if len(stages) == 2 and parameter.requires_grad and not self._leaves(parameter):
                    handle = parameter.register_post_accumulate_grad_hook(self._arrived)
                    self._stays[parameter] = parameter.grad, handle
                    parameter.grad = None

    def is_done(self, parameter: nn.Parameter) -> bool:
        """Whether all its gradients have come; no for one that no module is known to use."""
        stages = self._used.get(parameter)
        return stages is not None and min(stages) >= self._done

    def keeps(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Takes a part of a gradient that other stages give parts of, too; returns whether it is one."""
        if len(self._used.get(parameter, ())) < 2:
            return False
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
        for parameter in [parameter for parameter in self._parts if self.is_done(parameter)]:
            parts = self._parts.pop(parameter)
            in_order = [parts[index].to(parameter.device) for index in sorted(parts)]
            with DisableTorchFunctionSubclass():
                if parameter in self._stays:
                    before = self._give_back(parameter)
                    parameter.grad = _sum(in_order if before is None else [before, *in_order])
                else:
                    self._engine.gradients.take(*self._engine.places[parameter], _sum(in_order))
        self._engine.gradients.release()

    def close(self) -> None:
        """Takes the hooks off the parameters, which have the gradients of earlier passes if this one has failed."""
        for parameter in list(self._stays):
            parameter.grad = self._give_back(parameter)

    def _leaves(self, parameter: nn.Parameter) -> bool:
        """Whether its gradients go through gradient blocks, rather than stay with it."""
        return self._engine.places[parameter][0].index in self._engine.gradients.by_chunk

    def _give_back(self, parameter: nn.Parameter) -> torch.Tensor | None:
        before, handle = self._stays.pop(parameter)
        handle.remove()
        return before

    def _arrived(self, parameter: torch.Tensor) -> None:
        if isinstance(parameter, nn.Parameter) and parameter.grad is not None:
            self.keeps(parameter, parameter.grad)
            parameter.grad = None


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Adds parts to the first, in order."""
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]
