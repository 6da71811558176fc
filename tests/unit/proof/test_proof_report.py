"""The proof judges by its bars, and says what is missing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from benchmark import gpu_proof
from benchmark.proof.cases import jobs_of
from benchmark.proof.jobs import PARTS, Job
from benchmark.proof.report import markdown, missing, verdicts
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


def test_a_peer_that_took_a_whole_batch_in_less_memory_stands_for_itself_in_more() -> None:
    ours = speed_row("elixir", 149.0, case="large", budget_bytes=200)
    small = speed_row("fsdp2 offload, micro-batch 8", 100.0, case="small", budget_bytes=100, micro=8, batch=8)
    assert judged([ours, small], "offload", "large") is False
    assert judged([{**ours, "tokens_per_s": 151.0}, small], "offload", "large") is True
    assert judged([ours, {**small, "micro": 4}], "offload", "large") is None, "it might do better with more"
    assert judged([ours, {**small, "budget_bytes": 300}], "offload", "large") is None
    assert judged([ours, {**small, "model": "other"}], "offload", "large") is None


def test_runs_of_different_steps_are_not_compared() -> None:
    other = speed_row("fsdp2 offload, micro-batch 8", 40.0, tokens_per_step=128)
    with pytest.raises(ValueError, match="tokens a step"):
        verdicts([speed_row("elixir", 150.0), other])


def test_states_alone_on_the_host_are_held_against_the_resident_run() -> None:
    ours = speed_row("elixir", 80.0, budget_bytes=600)
    resident = speed_row("elixir, no budget", 100.0, case="free", budget_bytes=None, planned_device_bytes=900)
    assert judged([ours, resident], "offload", "only the states") is True
    assert judged([{**ours, "tokens_per_s": 79.0}, resident], "offload", "only the states") is False
    offloaded = {**resident, "planned_device_bytes": 899}
    tight = {**ours, "budget_bytes": 400}
    for rows in ([ours, offloaded], [tight, resident]):
        assert not [verdict for verdict in verdicts(rows) if "only the states" in verdict.promise]


def test_capacity_is_not_missed_on_a_smaller_machine() -> None:
    row = {
        "part": "capacity", "case": "opt-like", "contender": "elixir", "status": "ok", "parameters": 14e9, "layers": 1,
        "hidden": 2, "device_total_bytes": 139 * 2**30, "host_total_bytes": 128 * 2**30, "losses": [1.0],
    }  # fmt: skip
    assert judged([row], "capacity") is False
    assert judged([{**row, "host_total_bytes": 64 * 2**30}], "capacity") is None
    assert judged([{**row, "parameters": 15e9, "host_total_bytes": 64 * 2**30}], "capacity") is True
    # Of 128 GiB a process may have 106, and a system that gets its memory as it is touched says even less.
    assert judged([{**row, "host_total_bytes": 114 * 2**30}], "capacity") is False
    assert judged([{**row, "host_total_bytes": 9 * 2**30, "host_given_bytes": 106 * 2**30}], "capacity") is False
    assert judged([{**row, "host_given_bytes": 64 * 2**30}], "capacity") is None


def test_the_report_says_what_was_not_run_and_why() -> None:
    row = {"part": "offload", "case": "pair", "contender": "zero|3", "status": "not run", "why": "not installed"}
    text = markdown([row], ["offload/other/elixir"])
    assert "not installed" in text
    assert "zero\\|3" in text, "a bar would break the table"
    assert "* offload/other/elixir" in text


def test_the_report_says_part_by_part_what_is_missing() -> None:
    every = {part: jobs_of(part, rehearse=False) for part in PARTS}
    nothing = missing([], every)
    assert all(nothing[part] for part in PARTS)
    assert nothing["memory"][0].startswith("16 more cases")
    case = "gpt2-4b 16x1024 in 20 GB"
    mine = speed_row("elixir", 150.0, case=case)
    failed = {
        "part": "offload",
        "case": case,
        "contender": "fsdp2 offload, micro-batch 16",
        "status": "cut",
        "why": "slow",
    }
    lines = [line for line in missing([mine, failed], every)["offload"] if line.startswith(f"{case}:")]
    assert lines == [f"{case}: no run of a peer; fsdp2 offload, micro-batch 16: cut (slow)"]
    peer = speed_row("fsdp2 offload chunked-loss, micro-batch 16", 50.0, case=case)
    assert not [line for line in missing([mine, peer], every)["offload"] if line.startswith(f"{case}:")]
    text = markdown([mine, failed], [], every)
    assert "* memory:\n    * 16 more cases" in text
    assert f"    * {lines[0]}" in text


def test_a_row_says_where_its_time_went_and_what_a_probe_found() -> None:
    waits = {
        "waited_s_per_step": {"fetch": 0.2, "disk": 0.0},
        "stream_waited_s_per_step": {"offload": 0.3, "fetch": 0.1},
    }
    probe = {"part": "probes", "case": "a", "contender": "torch", "status": "ok", "outcome": "2.0 GB/s"}
    text = markdown([speed_row("elixir", 150.0, **waits), probe])
    assert "the host waited for fetch 0.200 s a step, the device waited for offload 0.300 s and fetch 0.100 s" in text
    assert "| ok | 2.0 GB/s |" in text


def test_a_pair_without_clipping_is_shown_and_not_judged() -> None:
    """It suits us: it must not be what makes the best ratio."""
    slow = {"case": "free", "max_norm": None}
    pair = [speed_row("elixir", 900.0, **slow), speed_row("fsdp2 offload, micro-batch 8", 100.0, **slow)]
    found = {verdict.promise: verdict for verdict in verdicts(pair)}
    assert found["free"].met is None
    assert found["free"].measured.startswith("9.00 of fsdp2 offload")
    assert found["somewhere"].met is None
    assert "| shown |" in markdown(pair)
    clipped = speed_row("elixir", 100.0, case="large", budget_bytes=200)
    other = {**pair[1], "micro": 8, "batch": 8}
    assert judged([clipped, other], "offload", "large") is None, "its peer clips, that one does not"


def test_chunked_losses_are_peers_like_others() -> None:
    mine = speed_row("elixir", 150.0)
    for name in ("fsdp2 chunked-loss", "plain chunked-loss", "fsdp2 keep chunked-loss"):
        assert judged([mine, speed_row(f"{name}, micro-batch 16", 151.0)], "offload", "pair") is False, (
            "1.0 where it fits"
        )
    assert (
        judged([mine, speed_row("fsdp2 offload chunked-loss sync-last, micro-batch 8", 101.0)], "offload", "pair")
        is False
    )


def test_documented_bars_are_those_that_judge() -> None:
    text = (ROOT / "benchmark" / "proof" / "README.md").read_text(encoding="utf-8")
    for shown in ("within 2 %", "0.5 %", "0.98", "1.5", "3 somewhere", "80 %", "15 B", "10 %"):
        assert shown in text
    options = re.findall(r"gpu_proof\.py ([^\n`]*)", text)
    for call in options:
        args = gpu_proof.arguments([word for word in call.split("#")[0].split() if word])
        assert dataclasses.is_dataclass(Job)
        assert args.minutes > 0
