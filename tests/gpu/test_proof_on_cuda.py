"""The proof's real jobs, not the rehearsed ones, run through at toy size on the pretended device.

A GPU is there for minutes. None of them is to go into a call that does not exist or a tensor on the wrong side.
What the toys measure means nothing, and is not looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark import gpu_proof
from benchmark.proof import cases, runner
from benchmark.proof.jobs import PARTS, Job
from benchmark.proof.links import read_rows
from benchmark.proof.place import HARDWARE_FILE, Place
from benchmark.proof.report import MEMORY_CASES, missing, verdicts
from elixir.hardware.profile import HardwareProfile
from tests.common import toy_proof
from tests.common.gpu import needs_pretended_gpu
from tests.common.proof_rows import assert_early_states_are_kept_unless_clipped

pytestmark = [needs_pretended_gpu, pytest.mark.slow]  # compiles a process group, too

CHOSEN = (
    "links/",
    "memory/",
    "resident/gpt2-medium bf16",
    "offload/gpt2-4b 16x1024 in 20 GB/elixir",
    "offload/gpt2-4b 16x1024 in 20 GB/fsdp2 offload keep, micro-batch 16",
    "offload/gpt2-4b 16x1024 in 20 GB, clipped in every step/elixir",
    "offload/gpt2-4b 16x1024 in 20 GB, clipped in every step/fsdp2 offload keep, micro-batch 16",
    "offload/gpt2-4b 16x1024 in 20 GB, no clipping/elixir",
    "offload/gpt2-4b 16x1024 in 20 GB, no clipping/fsdp2 offload keep, micro-batch 16",
    "offload/gpt2-4b 16x1024 in 80 GB/fsdp2, micro-batch 16",
    "offload/gpt2-4b 16x1024 in 80 GB/fsdp2 keep, micro-batch 16",
    "offload/gpt2-4b 16x1024 in 80 GB/plain, micro-batch 16",
    "offload/gpt2-4b 16x1024/elixir, no budget",
    "capacity/",
)
"""How the jobs begin that are run: of every part and every contender; of peaks, as many as the bar wants."""


def test_every_part_runs_on_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows, report and plots are there, on tensors of the device, and no job ended in an error."""
    jobs_of = cases.jobs_of

    def toys(part: str, **options: Any) -> list[Job]:
        chosen = [toy_proof.toy(job) for job in jobs_of(part, **options) if job.id.startswith(CHOSEN)]
        return chosen[:MEMORY_CASES] if part == "memory" else chosen

    monkeypatch.setattr(cases, "jobs_of", toys)
    monkeypatch.setattr(runner, "ENTRY", Path(toy_proof.__file__))
    monkeypatch.setattr(runner, "Workers", toy_proof.ToyWorkers)
    gpu_proof.main(["--out", str(tmp_path), "--minutes", "20"])
    place = Place(tmp_path)
    rows = {f"{row['part']}/{row['case']}/{row['contender']}": row for row in read_rows(place)}
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert {name: row.get("why") for name, row in rows.items() if row["status"] != "ok"} == {}, log
    assert all(any(name.startswith(start) for name in rows) for start in CHOSEN), sorted(rows)
    early = [row for row in rows.values() if row["in_share"]]
    lacks = missing(early, {part: toys(part, rehearse=False) for part in PARTS})
    assert lacks["memory"] == lacks["capacity"] == lacks["links"] == []
    judged = {verdict.part for verdict in verdicts(early) if verdict.met is not None}
    assert judged >= {"links", "memory", "resident", "offload"}, "a part has no answer inside its share"
    timed = [row for row in rows.values() if row["part"] in ("resident", "offload", "capacity")]
    assert all(row["max_allocated_bytes"] > row["parameters"] for row in timed), "the model was not on the device"
    tight = rows["offload/gpt2-4b 16x1024 in 20 GB/elixir"]
    assert 0 < tight["host_state_chunks"] <= tight["chunks"], "the toy's budget must make it offload"
    assert_early_states_are_kept_unless_clipped([*rows.values()])
    assert HardwareProfile.load(tmp_path / HARDWARE_FILE).device_kind == "cuda"
    compared = rows["links/simulated against measured/elixir"]["cases"]
    assert {case["case"].split("/")[0] for case in compared} == {"resident", "offload"}
    assert {path.name for path in tmp_path.glob("*.png")} == {"memory.png", "resident.png", "offload.png", "links.png"}
    assert "pretended device" in capsys.readouterr().out
