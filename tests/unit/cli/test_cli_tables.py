"""Tables on a terminal of 80 columns: no number or word is broken over two lines."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elixir.cli import main, output, peers
from elixir.show import tables
from elixir.show.style import part_label
from elixir.step_trace import peak_holders
from elixir.units import GIB, format_bytes
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


def test_values_are_shown_in_the_unit_of_their_name() -> None:
    shown: dict[tuple[str, Any], str] = {
        ("param_bytes", 2**31): "2.00 GiB", ("link_bytes_per_s", 55.3e9): "55.3 GB/s", ("tokens_per_s", 3951.4): "3,951",
        ("bf16_flops_per_s", 989e12): "989.0 TFLOP/s", ("fp16_flops_per_s", 2.5e9): "2.5 GFLOP/s", ("total_s", 0.5): "0.500 s",
        ("host_adam_numel_per_s", 1.5e9): "1.50 G elements/s", ("parameters", 1234567): "1,234,567", ("overlap", True): "yes",
        ("measured_at", None): "-", ("unused", ()): "none",
    }  # fmt: skip
    assert {each: tables.show_value(*each) for each in shown} == shown


def cells(table: Any) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_tables_hold_every_number_of_their_artifacts_once() -> None:
    plan, trace = make_plan(24, frozen=0.25), make_trace(layers=3)
    for artifact in (make_hardware(), plan, trace):
        shown = cells(tables.record_table("title", tables.record_of(artifact)))
        assert len({label for label, _ in shown}) == len(shown)
        assert [value for _, value in shown] == [
            tables.show_value(*each) for each in tables.record_of(artifact).items()
        ]
    parts = [(memory, part_label(name), format_bytes(size)) for memory, found in
             (("device", plan.predicted.device_parts), ("host", plan.predicted.host_parts))
             for name, size in sorted(found.items(), key=lambda each: (-each[1], each[0]))]  # fmt: skip
    assert cells(tables.parts_table(plan)) == parts
    homes: dict[tuple[str, str], list[int]] = {}
    for chunk in plan.chunks:
        weights = "device, resident" if chunk.resident else f"{chunk.weight_home}, streamed"
        states = chunk.state_home if chunk.trainable else "none (frozen)"
        homes.setdefault((weights, states), []).append(chunk.weight_bytes)
    expected = {(*key, str(len(found)), format_bytes(sum(found))) for key, found in homes.items()}
    assert {(*row[:3], row[4]) for row in cells(tables.homes_table(plan))} == expected
    held = [(each.kind, each.module, f"{each.count:,}", format_bytes(each.bytes)) for each in peak_holders(trace)[:10]]
    assert [(*row[:2], *row[3:]) for row in cells(tables.contributors_table(trace)) if row[0] != "others"] == held
    other = dataclasses.replace(plan, block_count=9, device_budget_bytes=plan.device_budget_bytes - GIB)
    changes = {
        row[1]: row[2:] for row in cells(tables.comparison_table("title", tables.compare(plan, other))) if row[0] == "*"
    }
    assert changes["rCache blocks"] == ("8", "9", "+1")
    assert changes["device budget"][2] == "-1.00 GiB"
    assert set(changes) == {"rCache blocks", "device budget", "plan fingerprint"}
    report = {"predicted_step_s": 2.0, "step_s": 2.5, "predicted_peak_bytes": GIB, "peak_bytes": GIB // 2, "loads": 3}
    assert cells(tables.measured_table("title", tables.report_figures(report))) == [
        ("step", "2.000 s", "2.500 s", "+25.0%"), ("peak", "1.00 GiB", "512.00 MiB", "-50.0%"),
    ]  # fmt: skip
    assert tables.range_cell(0.5, (0.4, 0.75)) == "0.500 s\n0.400 to 0.750"
    assert (
        tables.flags_of({"checkpoint": "reentrant", "lora": ""}.items())
        == "--activation-checkpointing reentrant --lora"
    )


def test_text_gives_way_to_numbers_and_words_and_headings_stay_whole() -> None:
    text = "several words that together are much longer than what a terminal has left for them " * 2
    rows = [[text, "+1,234.50 GiB", "1"], ["more", "-2.00 MiB", "2"]]
    table = tables.list_table("title", ("text", "moved", "a heading that cannot wrap"), rows)
    table.columns[2].no_wrap = True
    lines = shown(lambda: output.say(table, sys.stdout))
    assert max(map(len, lines)) <= 80
    assert lines[1].endswith("a heading that cannot wrap")
    assert "  ".join(lines[3].split()[-3:]) == "+1,234.50  GiB  1"
    assert "  ".join(lines[-1].split()) == "more  -2.00  MiB  2"
    assert [word for line in lines[3:-1] for word in line.split() if word.isalpha() and word != "GiB"] == text.split()
    assert max(map(len, lines[4:-1])) > 80 - 2 * 26 - 13  # what is left is used
    words = [letter * 30 for letter in "abcd"]
    assert shown(lambda: output.say(tables.list_table("title", words, [words]), sys.stdout))[-1].split() == words


def test_rows_of_runtimes_say_what_they_take_or_lack() -> None:
    row = peers.Row("h200", 2, "ddp", "DDP", True, 0.5, 1234.5, GIB, 2 * GIB, times_elixir=1.25)
    of_elixir = "1.25 times the seconds of Elixir's plan"
    assert row.cells() == ["DDP", "0.500 s", "1,234", "1.00 GiB", "2.00 GiB", of_elixir]
    lacks = dataclasses.replace(row, fits=False, tokens_per_s=None, why="a device lacks 1.00 GiB")
    assert lacks.cells()[2:] == ["-", "1.00 GiB", "2.00 GiB", "a device lacks 1.00 GiB"]
    assert dataclasses.replace(lacks, step_s=None).cells() == ["DDP", *"----", "a device lacks 1.00 GiB"]
    step = SimpleNamespace(step=SimpleNamespace(tokens=512))
    steps: Any = SimpleNamespace(world_size=2, trace=lambda *_: step)
    setting = SimpleNamespace(runtime="ddp", micro=1, checkpoint=False, accumulation=4)
    prediction: Any = SimpleNamespace(setting=setting, step_s=0.5)
    assert peers._tokens_per_s(steps, prediction) == 512 * 4 * 2 / 0.5
