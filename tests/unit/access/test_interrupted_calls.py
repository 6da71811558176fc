"""Interrupts wait for the end of the runtime's calls, and for nothing else."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elixir.access.interrupts import hold_back, hold_back_no_more, raise_waiting, run_user_code

done: list[str] = []

RUNTIME: dict[str, Any] = {
    "__name__": "elixir.wrapper.made_up",
    "contextlib": contextlib,
    "raise_waiting": raise_waiting,
    "done": done,
    "run_user_code": run_user_code,
}
"""Names of a module that counts as the runtime's."""

exec(
    """
def call(function):
    try:
        function()
        raise ValueError  # which is handled
    except ValueError:
        done.append("call")
    return 3

def call_user_code(function):
    try:
        run_user_code(function)
    finally:
        done.append("call")

def call_with_turns(function):
    function()
    raise_waiting()
    done.append("call")

@contextlib.contextmanager
def context(entering, leaving):
    entering()
    done.append("entered")
    try:
        yield
    finally:
        leaving()
        done.append("left")

class Context:
    def __init__(self, entering, leaving):
        self.entering, self.leaving = entering, leaving

    def __enter__(self):
        self.entering()
        done.append("entered")

    def __exit__(self, *_):
        self.leaving()
        done.append("left")
""",
    RUNTIME,
)
call: Callable[..., int] = RUNTIME["call"]


@pytest.fixture(autouse=True)
def held_back() -> Iterator[None]:
    done.clear()
    hold_back()
    yield
    hold_back_no_more()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)
    done.append("interrupted")


def nothing() -> None:
    pass


def test_an_interrupt_of_user_code_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert done == []


def test_user_code_inside_of_the_runtime_is_user_code() -> None:
    with pytest.raises(KeyboardInterrupt):
        RUNTIME["call_user_code"](interrupt)
    assert done == ["call"]
    with pytest.raises(KeyboardInterrupt):
        RUNTIME["call_user_code"](lambda: call(interrupt))
    assert done == ["call", "interrupted", "call", "call"]


def test_a_second_interrupt_does_not_wait() -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        call(twice)
    assert done == ["interrupted"]
    assert call(nothing) == 3


@pytest.mark.parametrize("kind", ["context", "Context"])
def test_a_context_that_is_entered_is_left(kind: str) -> None:
    with pytest.raises(KeyboardInterrupt), RUNTIME[kind](interrupt, nothing):
        done.append("inside")
    assert done == ["interrupted", "entered", "left"]
    done.clear()
    with pytest.raises(KeyboardInterrupt), RUNTIME[kind](nothing, interrupt):
        done.append("inside")
    assert done == ["entered", "inside", "interrupted", "left"]
    done.clear()

    def calls() -> int:
        with RUNTIME[kind](nothing, nothing):
            return call(interrupt)  # `__exit__` is called after it, where nothing would leave it any more

    with pytest.raises(KeyboardInterrupt):
        calls()
    assert done == ["entered", "interrupted", "call", "left"]


def test_the_runtime_may_raise_one_that_waits() -> None:
    with pytest.raises(KeyboardInterrupt):
        RUNTIME["call_with_turns"](interrupt)
    assert done == ["interrupted"]
    RUNTIME["call_with_turns"](nothing)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert callable(before)
    hold_back_no_more()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        hold_back()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_wait_that_never_ends_can_be_left() -> None:
    stuck = threading.Event()

    def send() -> None:
        for _ in range(2):
            assert not stuck.wait(0.05)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        call(stuck.wait)
    sender.join()
    assert done == []
