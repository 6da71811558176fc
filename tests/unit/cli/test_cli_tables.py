"""Tables on a terminal of 80 columns: no number or word is broken over two lines."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable

import pytest

from elixir.cli import main


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(show: Callable[[], object]) -> list[str]:
    """The lines that `show` prints on a terminal, without empty ones and styles."""
    with contextlib.redirect_stdout(Terminal()) as terminal:
        show()
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    return [line for line in text.splitlines() if line.strip()]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "command",
    [
        "models",
        "hardware",
        "plan opt-125m --hardware t4 --host-budget 64GiB --seq 64 --assume nominal",
        "sweep opt-125m gpt2 --hardware t4,a100-40gb --seq 64 --assume nominal",
    ],
)
def test_commands_keep_to_the_width_of_a_terminal(command: str) -> None:
    lines = shown(lambda: main(command.split()))
    table = [index for index, line in enumerate(lines) if set(line) <= {" ", "\N{BOX DRAWINGS LIGHT HORIZONTAL}"}]
    assert table
    assert max(len(line) for line in lines[table[0] :] if line.startswith(" ")) <= 80
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)
