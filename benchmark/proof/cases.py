"""Every job, in the order in which they are worth running.

Seconds are guesses until a GPU has been seen; they only decide what is still begun.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

from benchmark.proof.contenders import BYTES_PER_NUMEL, CLIPPED_NORM
from benchmark.proof.jobs import PARTS, Job
from benchmark.proof.memory import memory_cases, rehearsal_memory_cases
from benchmark.proof.models import numel_of, shape_of
from benchmark.proof.ours import PLAIN_LOSS, RESERVE_SHARE
from benchmark.proof.place import Place
from elixir.units import format_bytes

GB = 10**9

_TOY = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 256, "vocabulary": 512, "positions": 64}
_TOY_BUDGET_BYTES = 2_600_000
"""Budget for the toy's 4 MB with states, so that some of them have to live on the host."""
_TOY_LADDER = [{**_TOY, "hidden": hidden, "ffn": 4 * hidden, "layers": 2} for hidden in (32, 64, 128)]

_BUDGETS_GB = (20, 80, 40)
_OFFLOAD = (
    ("gpt2-4b", 16, 1024),
    ("opt-6.7b", 16, 1024),
    ("gpt2-10b", 16, 1024),
)
"""Model, samples per optimizer step, tokens per sample: the largest batch and the sequence of the original's grid.

What is out of the question on the machine at hand, such as 160 GB of GPT-2 10B in 40 GB and 106 GiB, costs no process:
see `impossible`. """
_OTHER_NORMS = ("gpt2-4b", 20)
"""Model and budget in GB of the pairs with other norms than `MAX_NORM`."""
CLIPPED, UNCLIPPED = ", clipped in every step", ", no clipping"
"""The endings of their cases. With the first, new states that the host has made before the norm are made again; with
the second, the host may update while backward runs."""

_START_S = 30.0
"""Time of a timed job: libraries, tracing, planning, a few steps."""
_HOST_S_PER_GB = 0.6
"""Seconds for host memory that a job fills, pins and gives back, with its steps. A guess."""
_CAPACITY_HOST_BYTES = 120 * GB
"""Memory that part `capacity` is expected to fill."""
_LIMIT = 3.0
"""A job is ended after so many times what was expected."""

ON_DEVICE = "elixir, on the device"
"""Contender of `resident` whose plan has no host memory to use."""
_SHOWN = (ON_DEVICE, "plain-bf16")
"""Contenders of `resident` that are run last, since they are not judged."""

_RESIDENT = (
    ("gpt2-medium", 16, 1024, "none", "bf16"),
    ("opt-1.3b", 8, 1024, "non-reentrant", "bf16"),
    ("opt-1.3b", 4, 1024, "none", "fp32"),
)
"""Model, samples per step, tokens per sample, checkpointing, precision."""


def jobs_of(part: str, *, rehearse: bool) -> list[Job]:
    """The jobs of a part, in order.

    Args:
        part: one of `PARTS`.
        rehearse: toys for the CPU instead.
    """
    table = {
        "links": _links,
        "memory": _memory,
        "resident": _resident,
        "offload": _offload,
        "capacity": _capacity,
    }
    if part not in PARTS:
        raise ValueError(f"a part is one of {', '.join(PARTS)}, found {part!r}")
    return _paced(table[part](rehearse), rehearse)


def _paced(jobs: list[Job], rehearse: bool) -> list[Job]:
    """Toys take a moment, on a busy machine a long one; how long says nothing."""
    return [dataclasses.replace(job, expected_s=1.0, limit_s=300.0) for job in jobs] if rehearse else jobs


def closing_jobs(*, rehearse: bool) -> list[Job]:
    """Jobs that are done last, whatever time is left: they need little."""
    return [
        Job(
            part="links",
            case="simulated against measured",
            contender="elixir",
            work="compare",
            expected_s=0.0 if rehearse else 10.0,
            limit_s=120.0,
        )
    ]


def _links(rehearse: bool) -> list[Job]:
    options = {"quick": rehearse}
    common: dict[str, Any] = {"part": "links", "case": "this machine", "contender": "elixir", "work": "measure"}
    return [Job(**common, options=options, expected_s=60.0, limit_s=180.0)]


def _memory(rehearse: bool) -> list[Job]:
    cases = rehearsal_memory_cases() if rehearse else memory_cases()
    return [
        Job(
            part="memory",
            case=case.label,
            contender="plain",
            work="memory",
            options={"label": case.label},
            expected_s=12.0,
            limit_s=90.0,
        )
        for case in cases
    ]


def speed_job(part: str, case: str, contender: str, kind: str, shared: dict[str, Any], **more: Any) -> Job:
    """A contender that is timed; `more` are options of this one, and times of `Job`."""
    timing = {key: more.pop(key) for key in ("expected_s", "limit_s", "unless") if key in more}
    options = {**shared, "part": part, "case": case, "contender": contender, "kind": kind, **more}
    return Job(part=part, case=case, contender=contender, work="speed", options=options, **timing)


def _resident(rehearse: bool) -> list[Job]:
    jobs = []
    grid: Any = (("opt-125m", 2, 32, "none", "fp32"),) if rehearse else _RESIDENT
    for model, batch, seq, checkpoint, precision in grid:
        case = f"{model} {precision} {batch}x{seq} {'checkpointed' if checkpoint != 'none' else 'plain'}"
        shared: dict[str, Any] = {
            "model": model,
            "changes": _TOY if rehearse else {},
            "batch": batch,
            "seq": seq,
            "micro": batch,
            "checkpoint": checkpoint,
            "precision": precision,
            "measure_s": 0.05 if rehearse else 3.0,
        }
        if rehearse:
            shared["budget_bytes"], shared["host_bytes"] = 10**9, 10**9
        # With room for all logits, making them twice would only cost time; the peers keep them, too.
        ours = {key: value for key, value in shared.items() if key != "micro"}
        ours |= {"micros": [batch], "fused_kernels": PLAIN_LOSS}
        jobs.append(speed_job("resident", case, "elixir", "elixir", ours, expected_s=20.0))
        for kind in ("plain", "ddp", *(("plain-bf16",) if precision == "bf16" else ())):
            jobs.append(speed_job("resident", case, kind, kind, shared, expected_s=20.0))
        # The automatic plan may have the host step some chunks next to the device, where that is faster by its rates.
        jobs.append(speed_job("resident", case, ON_DEVICE, "elixir", {**ours, "host_bytes": 1}, expected_s=20.0))
    return sorted(jobs, key=lambda job: _SHOWN.index(job.contender) if job.contender in _SHOWN else -1)


def _offload(rehearse: bool) -> list[Job]:
    return [job for jobs in _offload_rounds(rehearse) for job in jobs]


def _offload_rounds(rehearse: bool) -> list[list[Job]]:
    """First what every pair needs for an answer, small models before large ones; then what may make either side
    better."""
    grid: Any = (("opt-125m", 4, 32),) if rehearse else _OFFLOAD
    budgets = (_TOY_BUDGET_BYTES,) if rehearse else tuple(size * GB for size in _BUDGETS_GB)
    rounds: list[list[Job]] = [[], [], []]
    for model, batch, seq in grid:
        shared: dict[str, Any] = {
            "model": model,
            "changes": _TOY if rehearse else {},
            "batch": batch,
            "seq": seq,
            "checkpoint": "non-reentrant",
            "precision": "fp32" if rehearse else "bf16",
            "measure_s": 0.05 if rehearse else 6.0,
        }
        if rehearse:
            shared |= {"host_bytes": 10**9, "early_states": True}
        name = f"{model} {batch}x{seq}"
        cases = {budget: f"{name} in {f'{budget} B' if rehearse else f'{budget / GB:g} GB'}" for budget in budgets}
        for index, (budget, case) in enumerate(cases.items()):
            smaller = [cases[other] for other in budgets[:index] if other < budget]
            for number, jobs in enumerate(_pair(case, {**shared, "budget_bytes": budget}, smaller, rehearse)):
                rounds[number] += jobs
            if rehearse or (model, budget) == (_OTHER_NORMS[0], _OTHER_NORMS[1] * GB):
                other = {**shared, "budget_bytes": budget}
                rounds[0] += _short_pair(f"{case}{CLIPPED}", {**other, "max_norm": CLIPPED_NORM}, rehearse)
                rounds[1] += _short_pair(f"{case}{UNCLIPPED}", {**other, "max_norm": None}, rehearse)
        free = {**shared, "micros": [batch, max(batch // 2, 1)], **({"budget_bytes": 10**9} if rehearse else {})}
        times = _times(_states_bytes(shared) - max(budgets))
        rounds[0].append(speed_job("offload", name, "elixir, no budget", "elixir", free, **times))
    return rounds


def _states_bytes(options: dict[str, Any]) -> int:
    """Weights, gradients and states of a job's model."""
    return numel_of(shape_of(options)) * BYTES_PER_NUMEL


def _times(host_bytes: float) -> dict[str, float]:
    """Time of a job that fills so much host memory."""
    expected_s = _START_S + _HOST_S_PER_GB * max(host_bytes, 0) / GB
    return {"expected_s": expected_s, "limit_s": _LIMIT * expected_s}


class _Pair:
    """Jobs of one model in one budget.

    Args:
        case: what they are called.
        shared: options of all.
        smaller: cases of the model that come before, in smaller budgets.
        rehearse: of toys.
    """

    def __init__(self, case: str, shared: dict[str, Any], smaller: list[str], rehearse: bool) -> None:
        self._case, self._shared, self._smaller, self._rehearse = case, shared, smaller, rehearse
        self._states_bytes = _states_bytes(shared)
        batch = shared["batch"]
        self._micros = [batch, batch // 2, batch // 4]
        # A rehearsal lists them all the same, and sees them leave themselves out.
        self.fits = rehearse or self._states_bytes <= shared["budget_bytes"]

    def elixir(self, contender: str, **more: Any) -> Job:
        """A run of ours."""
        times = _times(self._states_bytes - self._shared["budget_bytes"])
        options = {**self._shared, "micros": self._micros}
        return speed_job("offload", self._case, contender, "elixir", options, **times, **more)

    def resident(self, name: str, kind: str, **options: Any) -> list[Job]:
        """A peer that keeps everything, with the largest micro-batch that fits; once more with the chunked loss."""
        found: list[Job] = []
        for micro in self._micros[: 1 if self._rehearse else None]:
            found.append(self._peer(name, kind, micro, found, **options))
        return [*found, self._peer(f"{name} chunked-loss", kind, self._micros[0], found[:1], loss="chunked", **options)]

    def offloading(self, name: str, kind: str, **options: Any) -> list[Job]:
        """A peer that offloads everything, with the largest micro-batch that fits: with less, weights travel more
        often.

        The chunked loss comes before a smaller micro-batch, since it costs less. A peer that took the whole batch in a
        smaller budget does the same in a larger one, unless that has room for the plain loss at last. FSDP2 moves and
        adds gradients after every part, or keeps them on the device until the last.
        """
        found: list[Job] = []
        times = _times(self._states_bytes)
        keeping = [False, True] if kind == "fsdp2" else [False]
        # Of a rehearsal one peer goes through all settings; the others go the same ways.
        whole = not self._rehearse or (name == "fsdp2 offload keep" and "max_norm" not in self._shared)
        for micro in self._micros[: (2 if whole else 1) if self._rehearse else None]:
            for loss in ("plain", "chunked") if whole else ("plain",):
                for sync_last in keeping if micro < self._shared["batch"] else [False]:
                    called = f"{name}{' chunked-loss' * (loss == 'chunked')}{' sync-last' * sync_last}"
                    more = {**options, **({"loss": loss} if loss == "chunked" else {})}
                    # The two ways to treat gradients are tried alike, so that the better one counts.
                    before = [
                        job
                        for job in found
                        if job.options["micro"] > micro or job.options.get("loss") != more.get("loss")
                    ]
                    more |= {"sync_last": True} if sync_last else {}
                    found.append(self._peer(called, kind, micro, before, wholes=True, **more, **times))
        return found

    def _peer(
        self, called: str, kind: str, micro: int, before: list[Job], *, wholes: bool = False, **options: Any
    ) -> Job:
        """One setting of a peer, needless if one of those before had room."""
        whole = [*dict.fromkeys(job.contender for job in before if job.options["micro"] == self._shared["batch"])]
        contender = f"{called}, micro-batch {micro}"
        whole += [contender] if micro == self._shared["batch"] else []
        elsewhere = [f"offload/{other}/{name}" for other in self._smaller for name in whole] if wholes else []
        unless = () if self._rehearse else (*elsewhere, *(job.id for job in before))
        more = {**_times(0), **options}
        return speed_job("offload", self._case, contender, kind, self._shared, micro=micro, unless=unless, **more)


def _pair(
    case: str, shared: dict[str, Any], smaller: list[str], rehearse: bool
) -> tuple[list[Job], list[Job], list[Job]]:
    """Jobs of one model in one budget, by how soon they are wanted; the arguments are those of `_Pair`."""
    pair = _Pair(case, shared, smaller, rehearse)
    ours = pair.elixir("elixir")
    first = [
        ours,
        pair.elixir("elixir, more room", share=0.85, unless=(ours.id,)),
        # Keeping what was gathered for backward is faster where it has room.
        *(pair.resident("fsdp2 keep", "fsdp2", offload=False, keep=True) if pair.fits else []),
        *pair.offloading("fsdp2 offload keep", "fsdp2", offload=True, keep=True),
    ]
    second = [
        *(pair.resident("fsdp2", "fsdp2", offload=False, keep=False) if pair.fits else []),
        *pair.offloading("fsdp2 offload", "fsdp2", offload=True, keep=False),
        *_deepspeed(pair, rehearse),
        *(pair.resident("plain", "plain") if pair.fits else []),
    ]
    third = [
        pair.elixir("elixir, activations chosen", checkpoint="none", activations="auto"),
        pair.elixir("elixir, plan corrected", wrap=True),
        pair.elixir("elixir, torch's Adam", fused_kernels=False),
    ]
    return first, second, third


def _short_pair(case: str, shared: dict[str, Any], rehearse: bool) -> list[Job]:
    """Ours and the best settings of the peers that offload everything, with another norm than elsewhere or none."""
    pair = _Pair(case, shared, [], rehearse)
    ours = pair.elixir("elixir")
    return [ours, *pair.offloading("fsdp2 offload keep", "fsdp2", offload=True, keep=True), *_deepspeed(pair, rehearse)]


def _deepspeed(pair: _Pair, rehearse: bool) -> list[Job]:
    if not rehearse and importlib.util.find_spec("deepspeed") is None:
        return []
    zero_3 = pair.offloading("zero-3 offload", "deepspeed", stage=3)
    return [*zero_3, *pair.offloading("zero-offload", "deepspeed", stage=2)]


def impossible(job: Job, place: Place) -> str | None:
    """The arithmetic reason why a job cannot fit, so that no process starts for it; None if it may.

    States alone are counted here. A job counts better, once it has the model and the device.
    """
    options = job.options
    if job.work != "speed" or "model" not in options:
        return None
    numel, budget = numel_of(shape_of(options)), options.get("budget_bytes")
    kind = options["kind"]
    per_numel = BYTES_PER_NUMEL // 2 if kind in ("plain-bf16", "torchao") else BYTES_PER_NUMEL
    host = options.get("host_bytes") or place.free_host_bytes()
    if kind == "elixir":
        if budget is None:
            return None
        room, where = int(budget * options.get("share", RESERVE_SHARE)) + host, "device and host"
    elif kind == "deepspeed" or options.get("offload"):
        room, where = host, "the host"
    elif budget is not None:
        room, where = budget, "the budget"
    else:
        return None
    if numel * per_numel <= room:
        return None
    taken = f"{numel:,} parameters at {per_numel} bytes each are {format_bytes(numel * per_numel)}"
    return f"{taken}, {where} may take {format_bytes(room)}"


def _capacity(rehearse: bool) -> list[Job]:
    shared: dict[str, Any] = {
        "part": "capacity", "batch": 1, "seq": 32 if rehearse else 1024, "micros": [1], "checkpoint": "non-reentrant",
        "precision": "bf16", "ladder": _TOY_LADDER if rehearse else [], "fused_kernels": True,
    }  # fmt: skip
    if rehearse:
        shared |= {"budget_bytes": 3_000_000, "host_bytes": 3_000_000}
    jobs: list[Job] = []
    # Less room only where more of it was too much, which the row of the first then says.
    for name, share, host_share in (
        ("elixir", 0.96, 0.96),
        ("elixir, more room", 0.92, 0.93),
        ("elixir, much more room", 0.85, 0.85),
    ):
        options = {**shared, "case": "opt-like", "contender": name, "share": share, "host_share": host_share}
        jobs.append(
            Job(
                part="capacity",
                case="opt-like",
                contender=name,
                work="capacity",
                options=options,
                **_times(_CAPACITY_HOST_BYTES),
                unless=tuple(job.id for job in jobs),
            )
        )
    return jobs
