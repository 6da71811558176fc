"""Lets interrupts (Ctrl-C) wait for the end of the runtime's calls.

Python raises `KeyboardInterrupt` between any two instructions of the main thread. Inside of the runtime that would
separate what belongs together: a chunk from its state, a lock from its release, one chunk's step from the others'. So
the handler of SIGINT looks at the frames of the main thread. If none of them is the runtime's, as in user code, the
interrupt is raised at once. Otherwise the runtime's outermost call raises it once it has done its work: for the runtime
it is an exception of user code, and for its caller one of that call. A second interrupt does not wait.

Calls ask nothing at their end, since there is one for every use of a weight. The handler sets a trace function for the
frame of the call, as a debugger does to stop when a function returns.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without enums
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_RUNTIME = tuple(f"elixir.{room}." for room in ("access", "checkpoint", "chunk", "wrapper"))
"""Modules whose calls an interrupt must not end. Others, such as `elixir.integrations`, run whole trainings."""

_handler_of: Callable[[int], Any] = _signal.getsignal
"""`signal.getsignal` looks each function up in an enum, which takes longer than all the rest."""


def run_user_code(function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
    """Calls a function of the user's inside of a call of the runtime: interrupts are raised in it as in user code."""
    return function(*args, **kwargs)


def hold_back() -> None:
    """Lets interrupts wait for the runtime's calls from now on, on top of the handler that is there now.

    A notebook sets its handler anew for each cell, so this is called whenever the runtime begins to work. Only the main
    thread can set a handler; on others, which Python does not interrupt, nothing happens.
    """
    before = _handler_of(signal.SIGINT)
    if callable(before) and not isinstance(before, _Handler):  # the system ends the process, or ignores interrupts
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, _Handler(before))


def hold_back_no_more() -> None:
    """Puts back the handler that `hold_back` has found, unless somebody has set another since."""
    handler = _handler_of(signal.SIGINT)
    if isinstance(handler, _Handler):
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, handler.before)


def raise_waiting() -> None:
    """Raises an interrupt that waits, where the runtime can bear it as it bears an exception of user code."""
    handler = _handler_of(signal.SIGINT)
    if isinstance(handler, _Handler) and handler.waits and threading.current_thread() is threading.main_thread():
        handler.raise_now()


class _Handler:
    """A handler of SIGINT.

    Args:
        before: the handler that it replaces, called for each interrupt at once or later.
    """

    def __init__(self, before: Callable[[int, FrameType | None], Any]) -> None:
        self.before = before
        self._frame: FrameType | None = None  # whose trace function raises the interrupt that waits
        self._traced: Any = None  # the thread's trace function meanwhile

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._frame is not None:
            caller = self._frame.f_back
            self.raise_now()  # the first; unless it raises, this one is passed on as well
            self.before(number, caller)
            return
        call = _call_of_runtime(frame)
        enters = call is not None and call.f_code.co_name == "__enter__"
        # Nobody would leave a context whose `__enter__` raises; its caller's next instruction is inside of it.
        call = call.f_back if call is not None and enters else call
        if call is None:
            self.before(number, frame)
            return
        self._frame, self._traced = call, sys.gettrace()
        call.f_trace, call.f_trace_lines, call.f_trace_opcodes = self._goes_on, False, enters
        sys.settrace(_of_no_other_frame)

    @property
    def waits(self) -> bool:
        """Whether an interrupt waits for the end of a call."""
        return self._frame is not None

    def raise_now(self) -> None:
        """Calls the handler before this one, which by default raises `KeyboardInterrupt`, for the one that waits."""
        if self._frame is None:
            return
        # Of the caller: a handler of the user's may pass it on to another one of these, which would wait again.
        frame = self._frame.f_back
        self._frame.f_trace, self._frame.f_trace_lines, self._frame.f_trace_opcodes = None, True, False
        self._frame = None
        sys.settrace(self._traced)  # which Python drops if this raises
        self.before(signal.SIGINT, frame)

    def _goes_on(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The call returns, or the context that it has entered is open, or has raised."""
        # A call may handle its exception. That of a context is the caller's, whose first instruction afterwards is too
        # late: Python would keep the exception as the one that the thread handles, with all that its frames hold.
        if event == "exception" and not frame.f_trace_opcodes:
            return self._goes_on
        self.raise_now()
        return None  # as another result would be the frame's trace function again


def _of_no_other_frame(frame: FrameType, event: str, arg: Any) -> None:
    return None


def _call_of_runtime(frame: FrameType | None) -> FrameType | None:
    """The frame of the runtime's outermost call, inside of the user code that the runtime calls; None if there is
    none."""
    outermost: FrameType | None = None
    inner: FrameType | None = None
    while frame is not None and frame.f_code is not run_user_code.__code__:
        name = str(frame.f_globals.get("__name__"))
        # Python's own code enters and leaves a context of the runtime; `inner` calls a function with a context around.
        enters = name == contextlib.__name__ and frame.f_code.co_name != "inner"
        if name.startswith(_RUNTIME) or (enters and outermost is not None and outermost is inner):
            outermost = frame
        inner, frame = frame, frame.f_back
    return outermost
