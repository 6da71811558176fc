"""Interrupts, as by Ctrl-C, at chosen lines of Elixir's code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import elixir
from elixir.access import interrupts

_ELIXIR = str(Path(elixir.__file__).parent)


class Interrupting:
    """A context that sends this process SIGINT before the so many-th line that the main thread runs of Elixir's code.

    Args:
        line: its number; 0 for none, to count the lines.
    """

    def __init__(self, line: int = 0) -> None:
        self._line = line
        self.lines = 0
        """The lines that have run."""

    @property
    def came(self) -> bool:
        """Whether the signal was sent."""
        return 0 < self._line <= self.lines

    def __enter__(self) -> Interrupting:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        return self._goes_on if file.startswith(_ELIXIR) and file != interrupts.__file__ and not self.came else None

    def _goes_on(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.came:
            self.lines += 1
            if self.came:
                signal.raise_signal(signal.SIGINT)
                return frame.f_trace  # the handler may have set another
        return self._goes_on


def moments(step: Callable[[], object], count: int) -> list[int]:
    """Numbers of lines of Elixir's code in `step`, evenly spread."""
    with Interrupting() as counted:
        step()
    return [1 + place * (counted.lines - 1) // count for place in range(count)]
