"""The jobs of `benchmark/gpu_quarter.sh`: two runs on a GPU that is lent for a quarter of an hour, most decisive first.

Expected seconds are those of earlier rows, on an H200.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmark.proof.cases import CLIPPED, GB, UNCLIPPED, jobs_of, speed_job
from benchmark.proof.contenders import CLIPPED_NORM
from benchmark.proof.jobs import Job
from elixir.units import GIB, MIB

CARDS = ("h200", "h100")
_SLACK, _SLACK_S = 1.5, 20.0
"""A job is ended after so many times what was expected, and so much more."""
_4B = "gpt2-4b 16x1024 in {} GB"
_6_7B = "opt-6.7b 16x1024 in 20 GB"
_MOST_HOST_BYTES = 118 * GIB
"""Host memory for OPT-6.7B on a machine that has 126 GiB: its states leave little for early updates in less."""
_RESIDENT_BYTES = 64 * GB
"""Device memory to plan resident runs with, on either card: known before the card is seen."""
_TUNED = {"stage": 3, "loss": "chunked", "sub_group_size": 10**8, "all_threads": True}
"""Settings of DeepSpeed in which it was fastest, or should be: groups of 1e9, the default, leave 4 for `ratio` to share."""


def jobs_of_quarter(number: int, card: str) -> dict[str, list[Job]]:
    """The jobs of one of the two runs, by how they are run; all are run in this order.

    Args:
        number: 1 or 2.
        card: one of `CARDS`. An H100 has no measured rates yet, and measures them in place of a pair.
    """
    if (number, card) not in {(run, known) for run in (1, 2) for known in CARDS}:
        raise ValueError(f"a quarter of an hour has runs 1 and 2, on {' or '.join(CARDS)}; found {number!r}, {card!r}")
    known = {job.id: job for part in ("offload", "resident", "links") for job in jobs_of(part, rehearse=False)}

    def again(name: str, seconds: float, **options: Any) -> Job:
        job = known[name]
        return _paced(dataclasses.replace(job, options={**job.options, **options}, unless=()), seconds)

    if number == 1:
        ours, clipped = (
            again(f"offload/{_4B.format(20)}/elixir", 30),
            again(f"offload/{_4B.format(20)}{CLIPPED}/elixir", 30),
        )
        large = again(f"offload/{_6_7B}/elixir", 35, host_bytes=_MOST_HOST_BYTES)
        less = dataclasses.replace(again(f"offload/{_6_7B}/elixir, more room", 35), unless=(large.id,))
        fsdp2 = again(f"offload/{_6_7B}/fsdp2 offload keep chunked-loss, micro-batch 8", 130)
        peers = [_zero(20, 75), _zero(40, 75, ratio=0.65)]
        peers.append(dataclasses.replace(_zero(40, 75, ratio=0.8), unless=(peers[-1].id,)))
        pairs = [
            job
            for name in ("gpt2-medium bf16 16x1024 plain", "opt-1.3b bf16 8x1024 checkpointed")
            for job in _compiled(known, name)
        ]
        decisive = [ours, *peers, fsdp2, large, less, clipped, *pairs]
        return {"probes": [_cores_and_link()], "side by side": _probes(), "decisive": decisive, "more": _more(again)}
    tests = {
        "seconds": 40,
        "flags": ["--cuda"],
        "all": ["tests"],
        "tests": ["tests/gpu", "--ignore=tests/gpu/test_peaks.py"],
    }
    unclipped = _zero(20, 70, UNCLIPPED, super_offload=True, max_norm=None)
    pair = [unclipped, again(f"offload/{_4B.format(20)}{UNCLIPPED}/elixir", 25)]
    last = [again("links/this machine/elixir", 73)] if card == "h100" else pair
    return {"tests": [_paced(_job("tests", "tests that failed last", tests), 45)], "last": last}


def every_job() -> list[Job]:
    """The jobs of both runs on all cards, each once."""
    runs = (jobs_of_quarter(number, card) for card in CARDS for number in (1, 2))
    return [*{job.id: job for run in runs for jobs in run.values() for job in jobs}.values()]


def _paced(job: Job, seconds: float) -> Job:
    return dataclasses.replace(job, expected_s=seconds, limit_s=_SLACK * seconds + _SLACK_S)


def _job(work: str, case: str, options: dict[str, Any], contender: str = "elixir") -> Job:
    part = "tests" if work == "tests" else "probes"
    return Job(part=part, case=case, contender=contender, work=work, options=options)


def _cores_and_link() -> Job:
    return _paced(
        _job("cores and link", "CPU Adam next to copies", {"numel": 10**9, "copied_bytes": GIB, "steps": 5}), 25
    )


def _probes() -> list[Job]:
    bits = _job("adam bits", "bits of torch's fused Adam", {"numel": 10**6, "steps": 3}, "torch")
    sizes = {"nbytes": 118 * MIB, "count": 16, "cycles": 2000, "sleep_cycles": 10**9}
    plain = _job("storages", "storages in a pool", {**sizes, "expandable": False}, "fixed segments")
    return [
        _paced(bits, 15),
        *(_paced(job, 20) for job in (plain, _job("storages", plain.case, sizes, "expandable segments"))),
    ]


def _zero(size_gb: int, seconds: float, ending: str = "", **knobs: Any) -> Job:
    """DeepSpeed with GPT-2 4B in so much memory; its name says what it is set to."""
    options: dict[str, Any] = {**_TUNED, **knobs}
    shown = {"ratio": "ratio-{:g}", "super_offload": "super-offload"}
    names = [text.format(knobs[name]) for name, text in shown.items() if name in knobs]
    zero = "zero-3 offload" if options["stage"] == 3 else "zero-offload"
    return _peer(size_gb, seconds, " ".join([zero, "chunked-loss", "tuned", *names]), "deepspeed", ending, **options)


def _peer(size_gb: int, seconds: float, name: str, kind: str, ending: str = "", **options: Any) -> Job:
    ours = next(job for job in jobs_of("offload", rehearse=False) if job.id == f"offload/{_4B.format(size_gb)}/elixir")
    shared = {name: value for name, value in ours.options.items() if name not in ("micros", "kind")}
    micro = shared["batch"]
    contender = f"{name}, micro-batch {micro}"
    return _paced(
        speed_job("offload", f"{ours.case}{ending}", contender, kind, {**shared, "micro": micro}, **options), seconds
    )


def _compiled(known: dict[str, Job], name: str) -> Sequence[Job]:
    """Layers compiled, against the whole model compiled."""
    found = []
    for contender, seconds in (("elixir", 30), ("plain", 45)):
        job = known[f"resident/{name}/{contender}"]
        more = {"planned_device_bytes": _RESIDENT_BYTES} if contender == "elixir" else {}
        options = {**job.options, "case": f"{name}, compiled", "compile": True, **more}
        found.append(_paced(dataclasses.replace(job, case=f"{name}, compiled", options=options), seconds))
    return found


def _more(again: Any) -> list[Job]:
    """Jobs that may make a peer faster, or give it a row, for time that is left and for another day."""
    return [
        again(f"offload/{_4B.format(40)}/elixir", 30),
        _zero(40, 75, ratio=0.5),
        _peer(40, 60, "torchao offload chunked-loss", "torchao", loss="chunked"),
        _zero(20, 70, stage=2),
        _zero(20, 70, CLIPPED, max_norm=CLIPPED_NORM),
    ]
