"""`MicroBatch`: one micro-batch's call of the user's function, on a thread of which only one runs at a time.
`GradientStages`: when a gradient is whole in a pass.

Threads, since the user's function may stop anywhere inside of the model's forward, and PyTorch keeps its modes, hooks
and autograd's numbering per thread.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from elixir.access.autograd import backward_is_running
from elixir.access.counted_parameter import GRADIENT, CountedParameter
from elixir.errors import InputError
from elixir.torch_private import DisableTorchFunctionSubclass
from elixir.wrapper.engine import Engine
from elixir.wrapper.one_pass.regions import Glue, RandomState, Region, ThreadSettings
from elixir.wrapper.weight_uses import incomplete_gradient

# --- gradient stages -------------------------------------------------------------------------------------------------
# `GradientStages`: when the last gradient of a parameter comes in a pass, and sums of parameters that come twice.


def _read(parameter: nn.Parameter) -> Any:
    if MicroBatch.here() is not None and not backward_is_running():
        raise incomplete_gradient(f"A parameter of shape {list(parameter.shape)}")
    return GRADIENT.__get__(parameter)


_KINDS: tuple[Any, ...] = (nn.Parameter, CountedParameter)
_STAYING: dict[Any, Any] = {
    kind: type(kind)(f"Staying{kind.__name__}", (kind,), {"grad": property(_read, GRADIENT.__set__)}) for kind in _KINDS
}
"""Class -> that of parameters whose gradient stays with them, and is not complete while micro-batches of a pass run."""


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
        self.now = self.micro_batch = 0
        """The stage and the micro-batch that run."""
        self._first: dict[nn.Parameter, int] = {}  # the first stage that uses a parameter
        self._done = 2**62  # the lowest stage all of whose gradients have come
        self._parts: dict[nn.Parameter, dict[int, torch.Tensor]] = {}  # by parameter and micro-batch
        self._before: dict[nn.Parameter, torch.Tensor | None] = {}
        """The gradients so far, such as those of earlier passes, of parameters with which gradients stay."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the parameters with which gradients stay, meanwhile."""
        staying: list[Any] = [each for each in self._engine.places if each.requires_grad and not self._leaves(each)]
        kinds = [type(parameter) for parameter in staying]
        self._before = {parameter: parameter.grad for parameter in staying}
        handles = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in staying]
        try:
            for parameter, kind in zip(staying, kinds, strict=True):
                parameter.grad = None
                parameter.__class__ = _STAYING.get(kind, kind)
            yield
        finally:
            for parameter, kind, handle in zip(staying, kinds, handles, strict=True):
                handle.remove()
                parameter.__class__ = kind
            for parameter, before in self._before.items():  # those that got no more gradient
                parameter.grad = before

    def use(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Notes that the present stage uses parameters."""
        for parameter in parameters:
            if parameter is not None:
                self._first.setdefault(parameter, self.now)

    def used(self, parameters: Iterable[nn.Parameter | None]) -> None:
        """Notes that operators between layers use parameters, after the layer before for all micro-batches."""
        MicroBatch.waits_after_layer()
        self.use(parameters)

    def is_done(self, parameter: nn.Parameter) -> bool:
        """Whether all its gradients have come, and none waits here; no for one that no stage is known to use."""
        return parameter not in self._parts and self._first.get(parameter, -1) >= self._done

    def keeps(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Takes a part of a gradient that earlier stages give parts of, too; returns whether it is one.

        Raises:
            InputError: all parts were thought to have come, or the user's hooks would get parts.
        """
        if self.is_done(parameter):
            raise InputError(
                f"operators before a layer read {self._name(parameter)}, which belongs to a later module, without "
                "calling that; call the module, or plan with pass_size=1"
            )
        if self._first.setdefault(parameter, self.now) == self.now and parameter not in self._parts:
            return False
        with DisableTorchFunctionSubclass():  # no use of a weight
            hooks = parameter._backward_hooks
        if hooks:
            raise InputError(
                f"a hook on {self._name(parameter)} gets the gradients of several modules that share it one by one in "
                "a pass, instead of their sum; leave the hook out, or plan with pass_size=1"
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
            parts = self._parts.pop(parameter)
            with DisableTorchFunctionSubclass():
                self._give(parameter, (parts[index].to(parameter.device) for index in sorted(parts)))
        self._engine.gradients.release()

    def _name(self, parameter: nn.Parameter) -> str:
        return self._engine.places[parameter][1].name

    def _leaves(self, parameter: torch.Tensor) -> bool:
        """Whether its gradients go through gradient blocks, rather than stay with it."""
        return self._engine.places[parameter][0].index in self._engine.gradients.by_chunk

    def _arrived(self, parameter: Any) -> None:
        if self.keeps(parameter, parameter.grad):
            parameter.grad = None
        else:
            self._give(parameter, [parameter.grad])

    def _give(self, parameter: nn.Parameter, parts: Iterable[torch.Tensor]) -> None:
        """Adds parts up in order, to the gradient so far if it stays with the parameter, and lets the sum go there."""
        before = self._before.pop(parameter, None)
        total = functools.reduce(torch.Tensor.add_, parts if before is None else itertools.chain([before], parts))
        if self._leaves(parameter):
            self._engine.gradients.take(*self._engine.places[parameter], total)
        else:
            parameter.grad = total


# --- micro batch -----------------------------------------------------------------------------------------------------


_here = threading.local()
GLUE = -1


class CancelledError(BaseException):
    """Ends the call of a micro-batch, since another one has raised. No user code should catch it."""


class MicroBatch:
    """One call, which the pass resumes and which parks at every layer.

    Args:
        index: its number in the pass.
        function: what it calls.
        settings: of the calling thread.
        random: its random state at the beginning; None: it shares the process's state.
        device: the device of compute.
    """

    def __init__(
        self,
        index: int,
        function: Callable[[], Any],
        settings: ThreadSettings,
        random: RandomState | None,
        device: torch.device,
    ) -> None:
        self.index = index
        self.result: Any = None
        self.wants: int | None = GLUE
        """The number of the layer that it runs next; `GLUE`: operators before a layer or after the last one; None: it
        is over."""
        self.has_drawn = False
        """Whether it has used random numbers of its state."""
        self.regions: list[Region] = []
        """Its calls of layers so far, in order."""
        self.has_left_layer = False
        """Whether it has used no weights since its last layer."""
        self._function, self._settings, self._random, self._device = function, settings, random, device
        self._runs = False
        self._go = queue.SimpleQueue[bool]()  # whether it goes on, rather than ends
        self._back = queue.SimpleQueue[BaseException | None]()  # what it has raised, if it has
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name=f"micro-batch {index}", daemon=True)

    @staticmethod
    def here() -> MicroBatch | None:
        """The micro-batch whose thread this is."""
        found: MicroBatch | None = getattr(_here, "micro_batch", None)
        return found

    def resume(self) -> None:
        """Lets it run until it parks or is over; raises what it raises. The caller waits meanwhile."""
        with nullcontext() if self._random is None else self._random.restored():
            error = self._turn(goes_on=True)
            if self._random is not None:
                before, self._random = self._random, RandomState(self._device)
                self.has_drawn = self.has_drawn or not self._random.is_same(before)
        if error is not None:
            raise error

    def park(self, wants: int) -> None:
        """Gives the turn back, on its own thread, and goes on once it is resumed."""
        self.wants, self.has_left_layer = wants, False
        self._back.put(None)
        if not self._go.get():
            raise CancelledError

    def has_run(self, region: Region) -> None:
        """Notes a call of a layer. It goes on until it uses weights, or its forward ends."""
        self.regions.append(region)
        self.has_left_layer = True

    @classmethod
    def waits_after_layer(cls) -> None:
        """Waits until the others have run the layer that this thread's micro-batch has left, since what follows uses
        weights, or is no part of the model's forward.

        Nobody holds what the layer was called with by then, unlike right after the layer.
        """
        here = cls.here()
        if here is not None and here.has_left_layer:
            here.park(GLUE)

    def cancel(self) -> None:
        """Ends it, if it has begun, wherever it is parked."""
        if self._runs:  # the waiting thread was interrupted
            self._back.get()
        if self._thread.ident is not None and self.wants is not None:
            self._turn(goes_on=False)

    def _turn(self, *, goes_on: bool) -> BaseException | None:
        if self._thread.ident is None:
            self._thread.start()
        self._runs = True
        self._go.put(goes_on)
        error = self._back.get()
        self._runs = False
        return error

    def _run(self) -> None:
        self._go.get()
        _here.micro_batch = self
        self.glue = Glue()  # on this thread, since each numbers autograd's nodes anew
        raised: BaseException | None = None
        try:
            with self._settings.restored():
                self.result = self._function()
        except CancelledError:
            pass
        except BaseException as error:
            raised = error
        self.wants = None
        del self._function, self.glue
        self._back.put(raised)
