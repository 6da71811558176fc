"""Tables on a terminal of 80 columns: no number or word is broken over two lines."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from elixir.cli import main, output
from elixir.show.tables import list_table, record_of, record_table, show_value
from tests.common.samples import make_hardware, make_plan, make_trace


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


def test_text_gives_way_to_numbers_and_breaks_between_words() -> None:
    text = "several words that together are much longer than what a terminal has left for them"
    table = list_table("title", ("text", "size"), [[text, "1,234.50 GiB"], ["more", "2.00 MiB"]])
    lines = shown(lambda: output.say(table, sys.stdout))
    assert max(map(len, lines)) <= 80
    first, second = lines[3:5]
    assert first.endswith("1,234.50 GiB")
    assert [*first.removesuffix("1,234.50 GiB").split(), *second.split()] == text.split()


def test_words_that_need_more_than_the_terminal_stay_whole() -> None:
    words = [letter * 30 for letter in "abcd"]
    lines = shown(lambda: output.say(list_table("title", words, [words]), sys.stdout))
    assert lines[-1].split() == words


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


def test_signed_numbers_keep_their_units_and_headings_that_cannot_wrap_are_whole() -> None:
    rows = [["text " * 20, "+27.04 MiB", "1"], ["more", "-1.00 GiB", "2"]]
    table = list_table("title", ("text", "moved", "a heading that cannot wrap"), rows)
    table.columns[2].no_wrap = True
    lines = shown(lambda: output.say(table, sys.stdout))
    assert sum("+27.04 MiB" in line or "-1.00 GiB" in line for line in lines) == 2
    assert any("a heading that cannot wrap" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("param_bytes", 2**31, "2.00 GiB"),
        ("link_bytes_per_s", 55.3e9, "55.3 GB/s"),
        ("bfloat16_flops_per_s", 989e12, "989.0 TFLOP/s"),
        ("float16_flops_per_s", 2.5e9, "2.5 GFLOP/s"),
        ("host_adam_numel_per_s", 1.5e9, "1.50 G elements/s"),
        ("total_s", 0.5, "0.500 s"),
        ("tokens_per_s", 3951.4, "3,951"),
        ("parameters", 1234567, "1,234,567"),
        ("overlap", True, "yes"),
        ("measured_at", None, "-"),
        ("unused", [], "none"),
    ],
)
def test_values_are_shown_in_the_unit_of_their_name(name: str, value: Any, text: str) -> None:
    assert show_value(name, value) == text


def test_no_two_fields_of_a_table_have_one_label() -> None:
    for artifact in (make_hardware(), make_plan(2), make_trace(layers=1)):
        labels = list(record_table("title", record_of(artifact)).columns[0].cells)
        assert len(set(labels)) == len(labels)
