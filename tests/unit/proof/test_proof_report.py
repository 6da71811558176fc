"""The proof judges by its bars, and says what is missing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from benchmark import gpu_proof
from benchmark.proof.jobs import Job
from benchmark.proof.report import markdown, verdicts
from tests.common.proof_rows import memory_row, speed_row

ROOT = Path(__file__).parents[3]


def judged(rows: list[dict[str, Any]], part: str, text: str = "") -> bool | None:
    found = [verdict for verdict in verdicts(rows) if verdict.part == part and text in verdict.promise]
    assert len(found) == 1, found
    return found[0].met


def test_memory_needs_enough_cases_to_be_met_but_one_to_be_missed() -> None:
    assert judged([], "memory") is None
    assert judged([memory_row("a", 0.1)], "memory", "worst") is None
    assert judged([memory_row("a", -2.5)], "memory", "worst") is False
    many = [memory_row(str(index), 0.1) for index in range(16)]
    assert judged(many, "memory", "worst") is True
    assert judged(many, "memory", "mean") is True
    assert judged([*many, memory_row("x", 1.9)], "memory", "worst") is True
    assert judged([memory_row(str(index), 0.6) for index in range(16)], "memory", "mean") is False


def test_resident_is_held_against_the_faster_peer_with_masters() -> None:
    ours = speed_row("elixir", 98.0, "resident")
    peers = [speed_row("plain", 90.0, "resident"), speed_row("ddp", 100.0, "resident")]
    other = speed_row("plain-bf16", 500.0, "resident")
    assert judged([ours, *peers, other], "resident") is True
    assert judged([{**ours, "tokens_per_s": 97.0}, *peers], "resident") is False
    assert judged([ours, other], "resident") is None, "other numbers are no peer"


def test_offload_is_held_against_the_best_peer_of_all() -> None:
    ours = speed_row("elixir", 150.0)
    slow, fast = speed_row("fsdp2 offload, micro-batch 8", 40.0), speed_row("zero-3 offload, micro-batch 8", 100.0)
    assert judged([ours, slow, fast], "offload", "pair") is True
    assert judged([{**ours, "tokens_per_s": 149.0}, slow, fast], "offload", "pair") is False
    assert judged([ours, slow], "offload", "somewhere") is True, "3.75 of the best"
    assert judged([ours, slow, fast], "offload", "somewhere") is False
    fits = speed_row("fsdp2, micro-batch 16", 140.0)
    assert judged([ours, slow, fits], "offload", "pair") is True, "1.0 where a peer fits"
    assert judged([{**ours, "tokens_per_s": 139.0}, slow, fits], "offload", "pair") is False
    keeps = speed_row("fsdp2 keep, micro-batch 16", 160.0)
    assert judged([ours, slow, fits, keeps], "offload", "pair") is False, "0.94 of the better of those that fit"
    assert judged([ours], "offload", "pair") is None
    assert judged([slow], "offload", "pair") is None
    corrected = speed_row("elixir, plan corrected", 900.0)
    assert judged([{**ours, "tokens_per_s": 90.0}, corrected, slow, fast], "offload", "pair") is False, "the first plan"


def test_the_report_says_what_was_not_run_and_why() -> None:
    row = {"part": "offload", "case": "pair", "contender": "zero|3", "status": "not run", "why": "not installed"}
    text = markdown([row], ["offload/other/elixir"])
    assert "not installed" in text
    assert "zero\\|3" in text, "a bar would break the table"
    assert "* offload/other/elixir" in text


def test_documented_bars_are_those_that_judge() -> None:
    text = (ROOT / "benchmark" / "proof" / "README.md").read_text(encoding="utf-8")
    for shown in ("within 2 %", "0.5 %", "0.98", "1.5", "3 somewhere", "80 %", "15 B", "10 %"):
        assert shown in text
    options = re.findall(r"gpu_proof\.py ([^\n`]*)", text)
    for call in options:
        args = gpu_proof.arguments([word for word in call.split("#")[0].split() if word])
        assert dataclasses.is_dataclass(Job)
        assert args.minutes > 0
