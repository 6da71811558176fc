"""`MicroBatch`: one micro-batch's call of the user's function, on a thread of which only one runs at a time.

Threads, since the user's function may stop anywhere inside of the model's forward, and PyTorch keeps its modes, hooks
and autograd's numbering per thread.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import torch

from elixir.wrapper.one_pass.settings import RandomState, ThreadSettings

_here = threading.local()
GLUE = (0, -1)  # comes before every call of a layer
TAIL = (1 << 62, 0)  # comes after them


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
        self.is_over = False
        self.result: Any = None
        self.wants: tuple[int, int] | None = None
        """Call and number of the layer at which it is parked, which rise in most models; None if it runs."""
        self.has_left_layer = False
        """Whether it has used no weights since the last layer."""
        self.is_early: Callable[[], bool] = lambda: False
        """Whether micro-batches before this one have layers before them that this one has skipped."""
        self.at_backward: Callable[[], None] = lambda: None
        """Called before its backward begins."""
        self._function, self._settings, self._device = function, settings, device
        self._random = self._random_at_first = random
        self._error: BaseException | None = None
        self._cancelled = self._runs = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name=f"micro-batch {index}", daemon=True)

    @staticmethod
    def here() -> MicroBatch | None:
        """The micro-batch whose thread this is."""
        found: MicroBatch | None = getattr(_here, "micro_batch", None)
        return found

    @property
    def has_drawn(self) -> bool:
        """Whether it has used random numbers of its state."""
        first, now = self._random_at_first, self._random
        return first is not None and now is not None and not now.is_same(first)

    def resume(self) -> None:
        """Lets it run until it parks or is over; raises what it raises. The caller waits meanwhile."""
        outside = None
        if self._random is not None:
            outside = RandomState(self._device)
            self._random.restore()
        self._start()
        if outside is not None:
            self._random = RandomState(self._device)
            outside.restore()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def park(self, wants: tuple[int, int]) -> None:
        """Gives the turn back, on its own thread, and goes on once it is resumed."""
        self.wants = wants
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise CancelledError
        self.wants = None

    @classmethod
    def waits_after_layer(cls) -> None:
        """Waits until the others have run the layer that this thread's micro-batch has left, since what follows uses
        weights, or is no part of the model's forward.

        Nobody holds what the layer was called with by then, unlike right after the layer.
        """
        here = cls.here()
        if here is not None and here.has_left_layer:
            here.has_left_layer = False
            here.park(GLUE)

    @classmethod
    def begins_backward(cls) -> None:
        """Waits for the others if this thread's micro-batch has skipped the last layers, as LayerDrop does: a loop sums
        the gradients of the tail in order."""
        cls.waits_after_layer()
        here = cls.here()
        if here is not None:
            here.at_backward()
            if here.is_early():
                here.park(TAIL)

    def cancel(self) -> None:
        """Ends it, if it has begun, wherever it is parked."""
        if self._runs:  # the waiting thread was interrupted
            self._back.acquire()
            self._runs = False
        self._cancelled = True
        if self._thread.ident is not None and not self.is_over:
            self._start()

    def _start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._runs = True
        self._go.release()
        self._back.acquire()
        self._runs = False

    def _run(self) -> None:
        self._go.acquire()
        _here.micro_batch = self
        try:
            with self._settings.restored():
                self.result = self._function()
        except CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.is_over, self.wants = True, None
            del self._function
            self._back.release()
