"""Part `links`: measure this machine, and hold simulated steps against the measured ones of `resident` and `offload`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from benchmark.proof.jobs import NotRun, Row
from benchmark.proof.place import HARDWARE_FILE, Place
from benchmark.proof.speed import saved_at
from elixir.hardware.profile import HardwareProfile
from elixir.microbench import measure as measure_machine
from elixir.plan.plan import Plan
from elixir.search.simulator.simulation import simulate_step
from elixir.step_trace import StepTrace

SPEED_PARTS = ("resident", "offload")
ROWS_FILE = "rows.jsonl"


def measure(options: dict[str, Any], place: Place) -> Row:
    """Measures this machine into ``hardware.json``, which plans from then on use."""
    profile = measure_machine(quick=bool(options["quick"]))
    if place.cuda and profile.device_kind != "cuda":
        raise RuntimeError(f"measured {profile.device_name!r}, which is no CUDA device")
    profile.save(place.folder / HARDWARE_FILE)
    return {
        "kind": "measure",
        "hardware": profile.name,
        "measured_at": profile.measured_at,
        "host_to_device_bytes_per_s": profile.host_to_device_bytes_per_s,
        "device_to_host_bytes_per_s": profile.device_to_host_bytes_per_s,
        "host_adam_numel_per_s": profile.host_adam_numel_per_s,
        "device_adam_numel_per_s": profile.device_adam_numel_per_s,
        "device_memory_bytes_per_s": profile.device_memory_bytes_per_s,
        "flops_per_s": dict(profile.flops_per_s),
    }


def compare(options: dict[str, Any], place: Place) -> Row:
    """Simulates every case that Elixir ran, on the machine as it was measured.

    Args:
        options: with ``again``, steps are traced again, as today's tracer sees them.
        place: its folder has the rows, the plans and the machine.

    Raises:
        NotRun: there is nothing to compare, or the machine has not been measured.
    """
    if not (place.folder / HARDWARE_FILE).exists():
        raise NotRun("the machine has not been measured: links has to come first")
    hardware = HardwareProfile.load(place.folder / HARDWARE_FILE)
    cases, skipped = [], []
    for row in read_rows(place):
        if row["part"] not in SPEED_PARTS or row["status"] != "ok" or row.get("kind") != "elixir":
            continue
        saved = saved_at(place, row["part"], row["case"], row["contender"])
        try:
            plan = Plan.load(saved.with_name(f"{saved.name}.plan.json"))
            if options.get("again"):
                trace = _traced_again(row, plan, hardware)
            else:
                trace = StepTrace.load(saved.with_name(f"{saved.name}.trace.json"))
        except ValueError as error:  # an ArtifactError: the folder has rows of another version
            skipped.append(f"{row['part']}/{row['case']}/{row['contender']}: {error}")
            continue
        if row.get("clipped_steps") == row.get("steps"):  # a run soon makes no new states that are never kept
            plan = dataclasses.replace(
                plan, chunks=tuple(dataclasses.replace(chunk, update="after_norm") for chunk in plan.chunks)
            )
        simulated = simulate_step(plan, trace, hardware, accumulation=row["batch"] // row["micro"])
        cases.append(
            {
                "case": f"{row['part']}/{row['case']}",
                "contender": row["contender"],
                "measured_s": row["mean_s"],
                "simulated_s": simulated.step_s,
                "percent": 100 * (simulated.step_s / row["mean_s"] - 1),
                "bound_by": simulated.bound_by,
                "busy_s": simulated.busy_s,
                "early": sum(chunk.home.early for chunk in plan.chunks),
            }
        )
    if not cases:
        raise NotRun(f"no case of {' and '.join(SPEED_PARTS)} has been run by Elixir yet; {'; '.join(skipped)}")
    errors = [abs(case["percent"]) for case in cases]
    return {
        "kind": "compare",
        "hardware": hardware.name,
        "cases": cases,
        "mean_percent": sum(errors) / len(errors),
        "worst_percent": max(errors),
        "unreadable": skipped,
    }


def _traced_again(row: Row, plan: Plan, hardware: HardwareProfile) -> StepTrace:
    """The step of a row that ran under this plan."""
    from benchmark.proof.cases import jobs_of
    from benchmark.proof.ours import step_of
    from benchmark.proof.quarter import every_job

    name = f"{row['part']}/{row['case']}/{row['contender']}"
    jobs = [*jobs_of(row["part"], rehearse=bool(row.get("rehearsal"))), *every_job()]
    job = next(job for job in jobs if job.id == name)
    return step_of(job.options, row["micro"], row["fused_kernels"], plan.activations).trace(hardware)


def read_rows(place: Place) -> list[Row]:
    """The last row of each job in the folder, in the order of the file; a line that was cut off is left out."""
    path = place.folder / ROWS_FILE
    rows: dict[str, Row] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            rows[f"{row['part']}/{row['case']}/{row['contender']}"] = row
    return list(rows.values())
