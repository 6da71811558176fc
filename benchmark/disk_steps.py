"""Seconds of a step with states on a disk as simulated, compared with seconds as measured.

    python benchmark/disk_steps.py FOLDER [--models opt llama] [--rounds 6] [--no-record]

As `simulated_vs_measured.py`, whose calibration it shares, but the links are as fast as memory, and the disk is the one
of FOLDER, or emulated at four speeds: those at which all reads and writes of a step would take 0.4 to 2.5 of forward's
and backward's seconds, or longer, as the emulated disk is on that of FOLDER and must be the slower one. Judged are
plans with all states on the disk: weights resident, and weights streamed from the host.

Disks have fast and slow minutes. So before and after each turn of a case the real disk moves extents as a run does, and
the case of the real disk is simulated with the median of these speeds; rows have those of both looks. Run it on a quiet
machine. Appends to ``results/disk_steps.csv``; fails if a bar is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import append_rows, conditions, percentiles
from benchmark.emulated_runs import (
    SHAPES,
    Case,
    Run,
    Timed,
    calibrate,
    compute_seconds,
    judge_errors,
    mixed_plans,
    run_apart,
    take_turns,
    traced,
    with_error,
)
from elixir.hardware.profile import HardwareProfile
from elixir.microbench.disk import InTurns, measured_file, with_disk
from elixir.search.simulator.simulation import simulate_step

SHARES = (0.4, 2.5)
"""Seconds of all transfers of the fastest emulated disk, and of the slowest, over those of forward and backward."""
SPEEDS, LEAST_RANGE, SLOWER = 4, 2.0, 0.7
"""Emulated speeds; the slowest takes at least so many times as long as the fastest, whose speed is at most this part of
the real disk's."""
FILE_EXTENTS, LOOK_S = 8, 0.3
"""Extents in the file whose speed is looked at before and after each turn, and for how long."""
MIXES = ("states on disk", "streamed, states on disk")
CALIBRATING = ("resident", "streamed")
MEAN_BAR, WORST_BAR = 0.05, 0.12
"""Mean of the absolute errors, and the largest."""


@dataclasses.dataclass(frozen=True)
class DiskSpeed:
    """Bytes a second that a disk reads and writes in turns."""

    read: float
    write: float

    @staticmethod
    def of(seconds: InTurns, nbytes: int) -> DiskSpeed:
        """Makes the rates from the seconds of a transfer each way."""
        return DiskSpeed(nbytes / seconds.read_s, nbytes / seconds.write_s)

    @staticmethod
    def median(speeds: Sequence[DiskSpeed]) -> DiskSpeed:
        """The median of each direction."""
        return DiskSpeed(*(statistics.median(getattr(speed, way) for speed in speeds) for way in ("read", "write")))

    @property
    def both(self) -> float:
        """Both ways together, for as many bytes each way."""
        return 2 / (1 / self.read + 1 / self.write)


def looked(speeds: Sequence[DiskSpeed]) -> int:
    """The median over turns, both ways together."""
    return round(DiskSpeed.median(speeds).both)


def with_disk_speed(profile: HardwareProfile, speed: DiskSpeed) -> HardwareProfile:
    """The profile with a disk of this speed."""
    fits = {key: fit for key, fit in profile.fits.items() if not key.startswith("disk_")}
    return dataclasses.replace(profile, fits=fits, disk_read_bytes_per_s=speed.read, disk_write_bytes_per_s=speed.write)


def emulated_speeds(moved_bytes: float, compute_s: float, hardware: HardwareProfile) -> list[float]:
    """Bytes a second of the disks that are emulated, evenly spaced by their ratios.

    Args:
        moved_bytes: by the disk in a step, both ways.
        compute_s: seconds of forward and backward.
        hardware: knows the real disk.
    """
    real = 2 / sum(1 / hardware.rate(way).per_s for way in ("disk_read", "disk_write"))
    fastest = max(SHARES[0], moved_bytes / (SLOWER * real * compute_s))
    slowest = max(SHARES[1], LEAST_RANGE * fastest)
    shares = [fastest * (slowest / fastest) ** (index / (SPEEDS - 1)) for index in range(SPEEDS)]
    return [moved_bytes / (share * compute_s) for share in shares]


def work(folder: str, model: str, rounds: int) -> dict[str, Any]:
    """Every case of one model: measured seconds, and what was simulated."""
    from elixir.microbench import measure

    torch.set_num_threads(1)
    hardware = with_disk(measure(quick=True), folder)
    shape, inp, trace = traced(model, hardware)
    names = (*CALIBRATING, *MIXES)
    plans = dict(zip(names, mixed_plans(trace, hardware, names), strict=True))
    runs = {name: Run(shape, inp, plan, disk_folder=folder) for name, plan in plans.items()}
    compute_s = compute_seconds(runs["resident"])
    moved = plans[MIXES[0]].predicted.moved_bytes
    both_bytes = moved["disk_read"] + moved["disk_write"]
    speeds = (*emulated_speeds(both_bytes, compute_s, hardware), None)
    judged = [(mix, speed) for mix in MIXES for speed in speeds]
    extent_bytes = max(plans[MIXES[0]].extent_bytes(chunk) for chunk in plans[MIXES[0]].chunks)
    around: dict[Case, list[DiskSpeed]] = {case: [] for case in judged}
    with measured_file([folder], FILE_EXTENTS * extent_bytes) as file:

        def speed_now() -> DiskSpeed:
            return DiskSpeed.of(file.in_turns(extent_bytes, LOOK_S), extent_bytes)

        def turn(case: Case) -> list[Timed]:
            name, speed = case
            runs[name].disk(speed)
            before = speed_now() if case in around else None
            steps = runs[name].turn()
            if before is not None:
                runs[name].module.settle()  # nothing else moves while the disk is looked at
                around[case] += [before, speed_now()]
            return steps

        seen = take_turns([(name, None) for name in CALIBRATING], judged, rounds, turn)
    known = calibrate(
        trace, hardware, plans["resident"], seen["resident", None], plans["streamed"], seen["streamed", None]
    )
    found = []
    for mix, speed in judged:
        steps, looks = seen[mix, speed], around[mix, speed]
        found_speed = DiskSpeed.median(looks)
        machine = with_disk_speed(known.machine, found_speed if speed is None else DiskSpeed(speed, speed))
        simulated = simulate_step(plans[mix], known.trace_for(plans[mix]), machine)
        p20, p50, p80 = percentiles([step.step_s for step in steps])
        case = {"homes": mix, "disk": "real" if speed is None else f"emulated {speeds.index(speed) + 1}"}
        case["disk_bytes_per_s"] = round(machine.disk_read_bytes_per_s or 0)
        case |= {f"real_{when}_bytes_per_s": looked(looks[first::2]) for first, when in enumerate(("before", "after"))}
        case |= {"measured_s": p50, "p20_s": p20, "p80_s": p80, "simulated_s": simulated.step_s, "n": len(steps)}
        found.append(case)
    for run in runs.values():
        run.module.close()
    return {"model": shape.name, "tokens": inp["input_ids"].numel(), "cases": found}


def main() -> int:
    """Runs, records, and compares with the bars; 1 if one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="on the disk")
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", nargs=3, metavar=("FOLDER", "MODEL", "ROUNDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.work[0], args.work[1], int(args.work[2]))))
        return 0
    if args.folder is None:
        parser.error("name a folder on the disk")
    rows = []
    for model in args.models:
        before = conditions() | {"threads": 1}
        answer = run_apart(__file__, args.folder, model, str(args.rounds))
        for case in answer["cases"]:
            rows.append(with_error({**before, "model": answer["model"], "tokens": answer["tokens"], **case}))
    missed = judge_errors(
        "Steps with states on a disk", ("model", "homes", "disk", "disk_bytes_per_s"), rows, MEAN_BAR, WORST_BAR
    )
    if not args.no_record:
        print(append_rows("disk_steps", rows))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
