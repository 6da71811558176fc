"""`MicroBatch`: one micro-batch's call of the user's function, on a thread of which only one runs at a time.

Threads, since the user's function may stop anywhere inside of the model's forward, and PyTorch keeps its modes, hooks
and autograd's numbering per thread.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from elixir.wrapper.one_pass.regions import Glue, Region
from elixir.wrapper.one_pass.settings import RandomState, ThreadSettings

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
