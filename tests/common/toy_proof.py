"""The proof on a GPU at toy size: its real jobs, not the rehearsed ones, on the pretended device.

The jobs are those of a real run with small models, few tokens and budgets to match.
`python tests/common/toy_proof.py` takes the arguments of `benchmark/gpu_proof.py`, and its workers are separate
processes of it. `benchmark/gpu_quarter.sh --emulated` runs it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmark.proof import memory, runner, worker
from benchmark.proof.contenders import MAX_NORM
from benchmark.proof.jobs import Job
from benchmark.proof.memory import MemoryCase
from benchmark.proof.models import numel_of, shape_of
from elixir.microbench import bench as bench_module
from elixir.microbench import compute
from elixir.models.model_shape import ModelShape
from elixir.tracer.device import cuda_target
from elixir.units import MIB

_TOY = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "vocabulary": 512, "positions": 64}
_SEQ = 16
_HOST_BYTES = 10**9
_CAPACITY_BYTES = 3_000_000
_MEMORY_JOBS = 6
_all_memory_cases = memory.memory_cases


def toy(job: Job) -> Job:
    """A real run's job, made small; it is called the same."""
    options = job.options
    if job.work == "measure":
        options = {**options, "quick": True}
    elif job.work == "capacity":
        ladder = [{**_TOY, "hidden": hidden, "ffn": 4 * hidden, "layers": 2} for hidden in (32, 64, 128)]
        budgets = {"budget_bytes": _CAPACITY_BYTES, "host_bytes": _CAPACITY_BYTES}
        options = {**options, "seq": _SEQ, "ladder": ladder, **budgets}
    elif job.work == "speed":
        changed = {**options, "changes": _TOY, "seq": _SEQ, "measure_s": 0.05, "compile": False}
        if "budget_bytes" in options:
            # As large compared with weights, gradients and states as it is for the real model.
            share = numel_of(shape_of(changed)) / numel_of(shape_of(options))
            changed["budget_bytes"] = int(options["budget_bytes"] * share)
        if options["kind"] == "elixir":
            changed["host_bytes"] = options.get("host_bytes", _HOST_BYTES)
            if job.part == "offload" and options.get("max_norm", MAX_NORM):
                changed["early_states"] = True
        options = changed
    elif job.work == "tests":
        options = {**options, "seconds": 300, "tests": ["tests/gpu/test_pinning.py"]}
    elif job.work in ("cores and link", "adam bits"):
        options = {"numel": 10**4, "copied_bytes": MIB, "steps": 2}
    return dataclasses.replace(job, options=options, expected_s=1.0, limit_s=600.0)


@dataclasses.dataclass(frozen=True)
class _ToyMemoryCase(MemoryCase):
    called: str = ""

    @property
    def label(self) -> str:
        return self.called

    @property
    def shape(self) -> ModelShape:
        small: dict[str, Any] = {**_TOY, "layers": 2}
        if self.model.startswith("vit"):
            small |= {"image_size": 32, "patch_size": 8, "positions": 17}
        elif self.model.startswith("t5"):
            small["positions"] = None
        return super().shape.changed(**small)


def toy_memory_cases() -> tuple[MemoryCase, ...]:
    """The memory cases of a real run in small, under the same names."""
    small = []
    for case in _all_memory_cases():
        fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
        fields |= {"batch": 2, "seq": case.seq and _SEQ, "called": case.label}
        small.append(_ToyMemoryCase(**fields))
    return tuple(small)


class ToyWorkers(runner.ForkedWorkers):
    """The first in a new process, as in a real run; the others forked, since importing takes longer than a toy."""

    preload = (*runner.ForkedWorkers.preload, "tests.common.toy_proof")

    @property
    def life(self) -> Callable[[str, str], None]:
        return forked


def forked(line: str, log: str) -> None:
    """A forked worker's life."""
    prepare()
    worker.forked(line, log)


def prepare() -> None:
    """Prepares a process before its first job: the pretended device, and the small cases."""
    from tests.cuda_emulator import install_nccl

    install_nccl()
    cuda_target.CUBLAS_HOPPER_WORKSPACE_BYTES = 0  # the CPU's kernels need none, and they would be more than a toy
    cuda_target.CUBLASLT_WORKSPACE_BYTES = 0
    # What a GPU does in a moment takes the CPU minutes.
    bench_module._EFFORTS["cuda", True] = bench_module.Effort(2, 2, 0.01, 4, 8 * MIB, 10**5, 0.002)
    compute._SMALLEST["cuda"] = 32
    memory.memory_cases = toy_memory_cases  # found by their names


def main(given: list[str]) -> int:
    """A proof, a part of a quarter of an hour of it, its plans beforehand, or a worker."""
    prepare()
    from benchmark import gpu_proof
    from benchmark.proof import cases, quarter

    jobs_of, jobs_of_quarter = cases.jobs_of, quarter.jobs_of_quarter

    def toys(part: str, **options: Any) -> list[Job]:
        jobs = [toy(job) for job in jobs_of(part, **options)]
        return jobs[:_MEMORY_JOBS] if part == "memory" else jobs

    def toys_of_quarter(number: int, card: str) -> dict[str, list[Job]]:
        return {how: [toy(job) for job in jobs] for how, jobs in jobs_of_quarter(number, card).items()}

    cases.jobs_of, quarter.jobs_of_quarter = toys, toys_of_quarter
    runner.ENTRY, runner.Workers = Path(__file__), ToyWorkers  # type: ignore[misc]
    return gpu_proof.main(given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
