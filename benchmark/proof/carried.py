"""Plans made beforehand: a lent GPU does not have the seconds that tracing and planning take.

A plan is found by everything that it depends on: the job's options, the machine's rates, the memory to plan with, the
versions of torch and transformers, and the code that plans. What is not found is planned where it runs.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmark.proof import ours
from benchmark.proof.jobs import Job, NotRun
from benchmark.proof.place import HARDWARE_FILE, Place
from elixir.errors import PlanError
from elixir.hardware.profile import HardwareProfile, preset
from elixir.plan.plan import Plan
from elixir.step_trace import StepTrace

ROOT = Path(__file__).resolve().parents[2]
CARDS: dict[str, Callable[[], HardwareProfile]] = {
    "h200": lambda: HardwareProfile.load(ROOT / "benchmark" / "results" / "hardware_h200.json"),
    "h100": lambda: preset("h100"),
}
"""Kinds of GPUs that are prepared for, and their rates: those that were measured, where they were."""
_NO_PLANNERS = ("wrapper", "chunk", "checkpoint", "cli", "show", "integrations", "microbench")
"""Packages that no plan depends on."""
_NAMES = ("part", "case", "contender", "kind", "measure_s")
"""Options that do not change a plan."""

_T = TypeVar("_T", Plan, StepTrace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ahead(Place):
    """A machine that is not at hand."""

    profile: HardwareProfile

    def hardware(self) -> HardwareProfile:
        return self.profile

    def free_device_bytes(self) -> int:
        return self.profile.device_memory_bytes


def hardware_file(carried: Path, card: str) -> Path:
    """The file of a card's rates, which become those of a run's folder until the machine is measured."""
    return carried / card / HARDWARE_FILE


def choice_for(options: dict[str, Any], place: Place) -> ours.Choice | None:
    """The plan that was made for a job on this machine, if there is one."""
    if place.carried is None or options.get("wrap"):
        return None
    path = place.carried / "plans" / _key(options, place)
    if not path.with_suffix(".json").exists():
        return None
    known = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return ours.Choice(_load(Plan, path), _load(StepTrace, path), **known, made="before")


def prepare(carried: Path, jobs: Sequence[Job], host_bytes: int | None) -> int:
    """Plans every run of Elixir among the jobs for every card; what is there and not outdated stays. Gives their number.

    Args:
        carried: the folder to fill.
        jobs: of either card.
        host_bytes: what jobs may plan with, as in the run that will use the plans.
    """
    plans = carried / "plans"
    plans.mkdir(parents=True, exist_ok=True)
    kept: set[str] = set()
    for card, profile in CARDS.items():
        hardware_file(carried, card).parent.mkdir(exist_ok=True)
        profile().save(hardware_file(carried, card))
        place = _Ahead(folder=carried, host_bytes=host_bytes, carried=carried, profile=profile())
        for job in jobs:
            if job.options.get("kind") != "elixir":
                continue
            key, began = _key(job.options, place), time.monotonic()
            if key not in kept and choice_for(job.options, place) is None:
                try:
                    choice = ours.choose(job.options, place.profile, *ours.budgets(job.options, place))
                except (PlanError, NotRun) as error:  # the run will say so
                    print(f"{card} {job.id}: {str(error).splitlines()[0]}", flush=True)
                    continue
                _save(choice.plan, plans / key)
                _save(choice.trace, plans / key)
                known = {"micro": choice.micro, "kernels": choice.kernels, "tried": choice.tried}
                (plans / f"{key}.json").write_text(
                    json.dumps(known), encoding="utf-8"
                )  # last: it says that all are there
                print(f"{card} {job.id}: planned in {time.monotonic() - began:.0f} s", flush=True)
            kept.add(key)
    for path in plans.iterdir():
        if path.name.partition(".")[0] not in kept:
            path.unlink()
    return len(kept)


def _key(options: dict[str, Any], place: Place) -> str:
    wanted = {name: value for name, value in options.items() if name not in _NAMES}
    depends = [wanted, ours.budgets(options, place), place.hardware().to_dict(), _planners()]
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def _planners() -> str:
    """The code that plans, and the libraries that it traces with."""
    sources = [
        path
        for path in (ROOT / "elixir").rglob("*.py")
        if path.relative_to(ROOT / "elixir").parts[0] not in _NO_PLANNERS
    ]
    sources += [ROOT / "benchmark" / "proof" / name for name in ("ours.py", "models.py")]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    versions = [importlib.metadata.version(name).partition("+")[0] for name in ("torch", "transformers")]
    return " ".join([digest.hexdigest(), *versions])


def _file(kind: type[Plan] | type[StepTrace], path: Path) -> Path:
    return path.with_name(f"{path.name}.{'plan' if kind is Plan else 'trace'}.gz")


def _save(made: Plan | StepTrace, path: Path) -> None:
    _file(type(made), path).write_bytes(gzip.compress(made.to_json().encode(), mtime=0))


def _load(kind: type[_T], path: Path) -> _T:
    return kind.from_json(gzip.decompress(_file(kind, path).read_bytes()).decode())
