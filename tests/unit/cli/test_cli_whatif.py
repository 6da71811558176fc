"""``elixir sweep | fit | explain | timeline``: what they print and write, and how they fail."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from elixir.cli import main
from elixir.plan.plan import Plan
from elixir.search.request import SearchRequest
from elixir.search.whatif.sweep import SweepRow
from tests.common.asked_once import steps_are_traced_once  # noqa: F401
from tests.common.command_line import fails, run

PLAN = "plan opt-125m --hardware rtx4090 --batch 2 --seq 64 --device-memory 700MiB --host-budget 4GiB --brief"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, a plan from it, and a plan from the model's name."""
    folder = tmp_path_factory.mktemp("questions")
    trace = ["profile", "opt-125m", "--device", "rtx4090", "--batch", "2", "--seq", "64", "--brief"]
    assert main([*trace, "--out", str(folder / "trace.json")]) == 0
    assert main([*PLAN.split(), "--out", str(folder / "plan.json")]) == 0
    return folder


# ------------------------------------------------------------------------------------------------------ sweep and fit


def test_sweep_prints_a_line_per_combination_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, picture = tmp_path / "rows.csv", tmp_path / "map.pdf"
    argv = "sweep opt-125m --hardware t4,h200 --world-sizes 1,8 --seq 64 --assume nominal".split()
    status, out, _ = run(capsys, *argv, "--csv", str(table), "--plot", str(picture))
    assert status == 0
    assert all(out.count(f" {ranks} x {machine} ") == 1 for ranks in (1, 8) for machine in ("t4", "h200"))
    assert "[1] t4 has 4 devices a machine" in out
    assert "host memory is assumed to be 2 x" in out
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["machine"], row["world_size"], row["fits"]) for row in rows] == [
        ("t4", "1", "True"), ("t4", "8", "False"), ("h200", "1", "True"), ("h200", "8", "True"),
    ]  # fmt: skip
    assert picture.read_bytes().startswith(b"%PDF")


def test_packed_documents_are_planned_and_traced_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for packed documents says so; flash attention takes less time than a mask; sweeps take them, too."""
    asked = "plan gpt2 --hardware a100 --host-memory 64GiB --batch 2 --seq 512 --assume nominal".split()
    steps_s = {}
    for packed in ("4", "4:flash"):
        file = tmp_path / f"{packed}.json"
        status, out, _ = run(capsys, *asked, "--packed", packed, "--no-levers", "--out", str(file))
        assert status == 0
        assert "micro-batches of 2 x 512 tokens, 4 documents packed into each sample" in out
        assert ("for flash attention" in out) == (packed == "4:flash")
        plan = Plan.load(file)
        assert (plan.step.packed, plan.step.samples, plan.step.tokens) == (packed, 2, 1024)
        steps_s[packed] = plan.predicted.step_s
        status, out, _ = run(capsys, "timeline", str(file), "--out", str(tmp_path / "step.json"))
        assert status == 0  # its step was traced again
        shown = json.loads(run(capsys, "show", str(file), "--json")[1])
        assert shown["packed"] == packed
    assert steps_s["4:flash"] < 0.98 * steps_s["4"]
    sweep = "sweep gpt2 --hardware a100 --packed 4:flash --seq 512 --batches 1 --assume nominal --json"
    (row,) = json.loads(run(capsys, *sweep.split())[1])["rows"]
    assert (row["batch"], row["seq"], row["fits"]) == (1, 512, True)


def test_fit_names_the_smallest_and_lists_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "fit opt-125m --seq 64 --batch 2 --hardware h200,t4 --assume nominal --methods full".split()
    status, out, _ = run(capsys, *argv)
    assert status == 0
    assert out.startswith("opt-125m, 64 tokens a sample")
    assert out.index("1 x t4") < out.index("1 x h200")
    assert out.count("TrainingArguments(") == 2
    brief = run(capsys, *argv, "--brief")[1]
    assert out.startswith(brief)
    assert "TrainingArguments(" not in brief
    status, out, _ = run(capsys, *argv, "--json")
    assert status == 0
    assert json.loads(out)["best"]["machine"] == "t4"


@pytest.mark.parametrize("command", ["fit", "sweep"])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_rows_come_one_by_one_and_an_interrupt_loses_none(
    command: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []
    shown: list[str] = []

    def try_out(_: object, request: SearchRequest, case: Any) -> Any:
        shown.append(capsys.readouterr().err)
        if len(tried) in (2, 3):
            raise KeyboardInterrupt
        tried.append(case.hardware.name)
        asked = case.step.model, case.hardware.name, request.world_size, case.step.batch
        return SweepRow(*asked, 8, "bfloat16", True, "", 1, 1, step_s=2.5), None

    monkeypatch.setattr("elixir.search.whatif.sweep.try_out", try_out)
    argv = (command, "opt-125m", "--hardware", "t4,rtx3090,h200", "--world-sizes", "1", "--host-memory", "8GiB", *more)
    argv += ("--methods", "full") if command == "fit" else ()
    status, out, err = run(capsys, *argv)
    assert status == 130
    assert shown == ["", *(f"opt-125m, batch 1, 1 x {machine}: 2.500 s a step, - per s\n" for machine in tried)]
    assert err.endswith("interrupted after 2 of 3 combinations; all rows so far are printed\n")
    assert all(machine in out for machine in tried)
    assert "h200" not in out
    assert not more or len(json.loads(out)["rows"]) == 2
    tried.append("")
    status, out, err = run(capsys, *argv)
    assert (status, out, err) == (130, "", "elixir: interrupted\n")  # nothing had been tried


def test_fit_says_what_an_hour_and_a_run_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "prices.csv"
    table.write_text(
        "# a comment\nmachine,devices,per_hour,currency,source,read_on\nt4,1,0.5,EUR,a shop,2026-11-09\n"
        "t4,4,1.2,EUR,another,2026-11-10\nh200,8,80,EUR,a third,2026-11-11\n"
    )
    argv = "fit opt-125m --seq 64 --batch 2 --hardware h200,t4 --assume nominal --methods full".split()
    argv += ["--prices", str(table)]
    status, out, _ = run(capsys, *argv, "--json")
    assert status == 0
    found = json.loads(out)
    assert [row["machine"] for row in found["rows"]] == ["t4", "h200"]
    assert [row["cost"]["per_hour"] for row in found["rows"]] == [0.5, 80.0]  # an H200 is rented with seven others
    speed = found["rows"][0]["tokens_per_s"]
    assert found["rows"][0]["cost"]["per_million_tokens"] == pytest.approx(0.5 / 3600 / speed * 1e6)
    status, out, _ = run(capsys, *argv, "--tokens", "3.6e9")
    assert status == 0
    assert "1 x t4: 0.50 EUR an hour (a shop, read on 2026-11-09)" in out
    assert f"{0.5 * 1e6 / speed:,.2f} EUR and {1e6 / speed / 24:,.1f} days for 3,600,000,000 tokens" in out
    assert out.index("the cheapest of these for a run") < out.rindex("1 x t4: 0.50 EUR an hour")


def test_an_offer_whose_host_memory_is_unknown_is_named_with_what_must_be_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "prices.csv"
    argv = "fit opt-125m --seq 64 --hardware t4 --assume nominal --brief --tokens 1e6 --methods full".split()
    for host, says in (("", " for 1,000,000 tokens; see that "), ("900", ""), ("1", "no offer of t4 with")):
        table.write_text(
            f"machine,devices,per_hour,currency,source,read_on,host_memory\nt4,1,0.5,EUR,a,2026-11-09,{host}\n"
        )
        status, out, err = run(capsys, *argv, "--prices", str(table))
        assert status == 0
        assert says in out + err
        assert ("which must be free" in out + err or "are free on each" in out + err) == bool(says)


def test_the_length_of_a_run_needs_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tokens needs --prices" in fails(capsys, "fit", "opt-125m", "--tokens", "1e9")
    for tokens in ("-1", "inf", "many"):
        assert "a positive number such as 1e9" in fails(capsys, "fit", "opt-125m", f"--tokens={tokens}")


def test_fit_ends_with_2_where_nothing_does_and_still_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "fit opt-13b --seq 64 --hardware t4 --methods full".split()
    status, out, err = run(capsys, *argv)
    assert status == 2
    assert "[1] opt-13b" in out
    row, advice = err.splitlines()
    assert row.startswith("full: opt-13b, batch 1, 1 x t4: does not fit: opt-13b: weights and optimizer states exceed")
    assert "`elixir plan opt-13b`" in advice
    assert re.search(r"--host-(memory|budget) \S+ suffices", out)
    status, out, _ = run(capsys, *argv, "--json")
    assert status == 2
    assert json.loads(out)["best"] is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sweep", "MODEL"),
        ("sweep opt-125n", "opt-125m"),
        ("sweep opt-125m --hardware h2000", "h200"),
        ("sweep opt-125m --hardware h200,,t4", "between commas"),
        ("sweep opt-125m --world-sizes 0", "at least 1"),
        ("sweep opt-125m --batches 1,x", "whole number"),
        ("sweep opt-125m --optimizer adamm", "adam"),
        ("sweep opt-125m --dtype bf17", "bf16"),
        ("sweep opt-125m --seq 99999", "2048 positions"),
        ("sweep opt-125m --network 0", "network_bytes_per_s"),
        ("sweep opt-125m --plot map.txt", ".png"),
        ("sweep opt-125m --csv no/such/folder.csv", "cannot write"),
        ("fit opt-125m --seq 99999 --hardware t4", "2048 positions"),
        ("fit opt-125m --inp nosuch:thing --batch 3", "--batch"),
        ("fit opt-125m --inp nosuch:thing", "nosuch"),
        ("fit no.such:model", "no.such"),
    ],
)
def test_mistakes_get_one_line(
    line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in fails(capsys, *line.split())
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------- explain, timeline


def test_a_plan_remembers_its_step_so_that_explain_needs_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(folder / "plan.json")
    with_trace = run(capsys, "explain", plan, str(folder / "trace.json"), "--json", "--no-levers")
    by_flags = run(capsys, "explain", plan, "--batch", "2", "--seq", "64", "--json", "--no-levers")
    by_plan = run(capsys, "explain", plan, "--json", "--no-levers")
    assert with_trace[0] == by_flags[0] == by_plan[0] == 0
    assert json.loads(with_trace[1]) == json.loads(by_flags[1]) == json.loads(by_plan[1])
    record = json.loads(with_trace[1])
    planned = Plan.load(plan)
    assert len(record["chunks"]) == len(planned.chunks)
    assert record["plan"] == planned.fingerprint


def test_another_machine_is_said_aloud(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(folder / "plan.json"), str(folder / "trace.json")]
    status, _, err = run(capsys, "explain", *paths, "--hardware", "l4", "--brief", "--no-levers")
    assert status == 0
    assert "planned for rtx4090; times here are those of l4" in err


def test_timeline_draws_and_exports(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(folder / "plan.json"), str(folder / "trace.json")]
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    status, out, _ = run(capsys, "timeline", *paths, "--out", str(picture))
    assert status == 0
    assert "a step (forward" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    status, out, _ = run(capsys, "timeline", *paths, "--out", str(trace), "--json")
    assert status == 0
    record = json.loads(out)
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    ends_us = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert ends_us == pytest.approx(record["step_s"] * 1e6)
    status, out, _ = run(capsys, "timeline", *paths, "--out", str(trace), "--json", "--accumulation", "2")
    assert json.loads(out)["step_s"] > record["step_s"]
    several = Plan.load(folder / "plan.json")
    dataclasses.replace(several, accumulation=2).save(tmp_path / "several.json")
    paths[0] = str(tmp_path / "several.json")
    status, again, _ = run(capsys, "timeline", *paths, "--out", str(trace), "--json")
    assert json.loads(again)["step_s"] == json.loads(out)["step_s"]


def test_wrong_files_and_steps_get_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, trace = str(folder / "plan.json"), str(folder / "trace.json")
    assert "expected a plan, found a step trace" in fails(capsys, "explain", trace)
    assert "expected a trace" in fails(capsys, "explain", plan, plan)
    assert "same batch, sequence length" in fails(capsys, "explain", plan, "--batch", "3", "--seq", "64")
    assert "settled --batch" in fails(capsys, "explain", plan, trace, "--batch", "3")
    assert "another order" in fails(capsys, "explain", plan, "--batch", "2", "--seq", "64", "--checkpoint")
    assert ".png" in fails(capsys, "timeline", plan, trace, "--out", str(tmp_path / "t.txt"))
    assert "--out" in fails(capsys, "timeline", plan, trace)
    assert "cannot be read" in fails(capsys, "timeline", str(tmp_path / "no.json"), "--out", str(tmp_path / "t.png"))
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_the_users_is_not_taken_for_the_default_one(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(folder / "plan.json")
    dataclasses.replace(plan, step=dataclasses.replace(plan.step, checkpoint=None)).save(tmp_path / "plan.json")
    assert "give the trace" in fails(capsys, "explain", str(tmp_path / "plan.json"))


def test_a_plan_for_an_unknown_machine_asks_for_its_profile(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(folder / "plan.json")
    dataclasses.replace(plan, hardware_name="mine").save(tmp_path / "mine.json")
    assert "--hardware" in fails(capsys, "explain", str(tmp_path / "mine.json"))
    dataclasses.replace(plan, hardware_fingerprint="0" * 16).save(tmp_path / "old.json")
    assert "other numbers" in fails(capsys, "explain", str(tmp_path / "old.json"))
