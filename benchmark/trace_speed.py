"""How long a trace takes, compared with torch's MemTracker, and how long planning takes.

    python benchmark/trace_speed.py [--quick] [--only trace peer plan] [--peer-limit 300] [--no-record]

Three parts, each in separate processes, nothing else being loaded there:

* ``trace``: `trace_step` of one step (forward, recompute, backward, AdamW) after imports, with the operator cache and
  without;
* ``peer``: `torch.distributed._tools.mem_tracker.MemTracker` over the same forward and backward on fake tensors,
  without an optimizer, and the peak of either. Fake tensors on a GPU need a build for one, so both pretend to be a CPU;
* ``plan``: `plan_from_trace` once the trace is there, and whether the plan's JSON is the same under three hash seeds.

Appends to ``results/trace_speed.csv``. Fails if a bar of `BARS` is missed, peaks differ with the cache off, or plans
differ. On a busy machine compare processor time (``cpu_p50_s``), which waits for nobody.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BATCH, SEQUENCE, DTYPE = 8, 2048, "bfloat16"
TRACED = ("opt-175b", "opt-13b", "llama-2-70b", "mixtral-8x7b")
PEER_MODELS = {"opt-1.3b": 3, "opt-175b": 1}
"""Model -> runs of the peer, which takes minutes for the largest."""
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)
HOST_MEMORY = "64TiB"
"""Host memory of one machine: enough for the states of any of the plans, which are about time and not about fitting."""
HASH_SEEDS = ("0", "1", "31337")
BARS = {"trace": 0.5, "plan": 2.0}
"""Seconds, for OPT-175B."""

Result = dict[str, Any]


# Workers: each runs in a separate process and prints one JSON object as its last line ---------------------------


def _model(name: str, device: str = "meta") -> Any:
    import torch

    from elixir.models.loading import build

    return build(name, dtype=torch.bfloat16, checkpoint="non-reentrant", device=device)


def _traced(model: Any, inp: Any, name: str, **options: Any) -> Any:
    import torch

    from elixir.models.step import default_step
    from elixir.tracer.trace import trace_step

    return trace_step(model, inp, default_step, dtype=torch.bfloat16, model_name=name, **options)


def work_trace(name: str, hardware: str, optimizer: str, runs: str, uncached_runs: str) -> Result:
    """Seconds of each trace, with the cache and without, and whether all gave the same."""
    from elixir.hardware.profile import preset
    from elixir.models.step import default_input

    model = _model(name)
    inp = default_input(model, batch=BATCH, seq=SEQUENCE)
    found: Result = {"cached": [], "uncached": []}
    traces = []
    for kind, count in (("cached", int(runs)), ("uncached", int(uncached_runs))):
        for _ in range(count):
            wall, cpu = time.perf_counter(), time.process_time()
            traces.append(
                _traced(
                    model,
                    inp,
                    name,
                    hardware=preset(hardware),
                    cache=kind == "cached",
                    optimizer=None if optimizer == "none" else optimizer,
                )
            )
            found[kind].append([time.perf_counter() - wall, time.process_time() - cpu])
    return found | {
        "same": all(_facts(trace) == _facts(traces[0]) for trace in traces),
        "peak_bytes": traces[0].backward_peak_bytes,
        "operators": traces[0].operators,
    }


def _facts(trace: Any) -> Result:
    """All of a trace that does not depend on how long it took."""
    facts = {field.name: getattr(trace, field.name) for field in dataclasses.fields(trace)}
    del facts["trace_s"]
    return facts


def work_peer(name: str) -> Result:
    """MemTracker over forward and backward on fake CPU tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from elixir.models.step import default_input, default_step

    inp = default_input(_model(name), batch=BATCH, seq=SEQUENCE)
    rand = torch.rand

    def rand_with_known_scalars(*size: Any, **options: Any) -> Any:
        # OPT draws a number per layer and decides by it whether to drop the layer, which a fake tensor cannot answer.
        return 1.0 if size == ([],) else rand(*size, **options)

    torch.rand = rand_with_known_scalars
    with FakeTensorMode() as mode:
        model = _model(name, "cpu")
        fake = {key: mode.from_tensor(value) for key, value in inp.items()}
        wall, cpu = time.perf_counter(), time.process_time()
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            default_step(model, fake)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {"wall_s": wall, "cpu_s": cpu, "peak_bytes": snapshot["Total"]}


def work_plan(name: str, runs: str, *world_sizes: str) -> Result:
    """Seconds of each search and a digest of each plan, by world size."""
    from elixir.hardware.profile import preset
    from elixir.models.step import default_input
    from elixir.search import plan_from_trace

    model, hardware = _model(name), preset("h200")
    trace = _traced(model, default_input(model, batch=BATCH, seq=SEQUENCE), name, hardware=hardware)
    found: Result = {}
    for world_size in world_sizes:
        times, texts = [], []
        for _ in range(int(runs)):
            wall, cpu = time.perf_counter(), time.process_time()
            plan = plan_from_trace(trace, hardware, int(world_size), host_budget=HOST_MEMORY).plan
            times.append([time.perf_counter() - wall, time.process_time() - cpu])
            texts.append(_json_of(plan))
        found[world_size] = {"times": times, "digests": [hashlib.sha256(text).hexdigest() for text in texts]}
    return found


def _json_of(plan: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        return path.read_bytes()


WORKERS = {"trace": work_trace, "peer": work_peer, "plan": work_plan}


def in_process(worker: str, *arguments: str, limit_s: float = 600, **environment: str) -> Result | None:
    """The output of a worker; None if it takes longer than `limit_s`, which is shown while it runs."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", worker, *arguments]
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, env={**os.environ, **environment})
        while True:
            try:
                status = process.wait(timeout=10)
                break
            except subprocess.TimeoutExpired:
                elapsed = time.perf_counter() - started
                print(f"  {worker} {arguments[0]}: {elapsed:.0f} s of at most {limit_s:.0f} s", flush=True)
                if elapsed > limit_s:
                    process.kill()
                    process.wait()
                    return None
        if status != 0:
            raise SystemExit(f"{' '.join(command)} ended with status {status}")
        output.seek(0)
        result: Result = json.loads(output.read().splitlines()[-1])
        return result


# Parts: each gives rows -------------------------------------------------------------------------------------------


def row(part: str, model: str, what: str, times: list[list[float]], **more: Any) -> Result:
    """One line of the results; `times` are pairs of wall and processor seconds."""
    from benchmark.common import conditions, percentiles

    p20, p50, p80 = percentiles([wall for wall, _ in times]) if times else (None, None, None)
    cpu = percentiles([cpu for _, cpu in times])[1] if times else None
    columns: Result = {
        "part": part,
        "model": model,
        "what": what,
        "batch": BATCH,
        "seq": SEQUENCE,
        "dtype": DTYPE,
        "runs": len(times),
        "wall_p20_s": _rounded(p20),
        "wall_p50_s": _rounded(p50),
        "wall_p80_s": _rounded(p80),
        "cpu_p50_s": _rounded(cpu),
        "bar_s": None,
        "ratio": None,
        "peak_bytes": None,
        "resident_bytes": None,  # of parts that are gone
        "note": "",
    }
    return columns | more | conditions()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def part_trace(quick: bool) -> Iterator[Result]:
    """Ours on the H200, with the cache and without; the ratio is what the cache saves."""
    for model in TRACED[:2] if quick else TRACED:
        found = in_process("trace", model, "h200", "AdamW", "3" if quick else "9", "1" if quick else "3")
        assert found is not None
        bar = BARS["trace"] if model == "opt-175b" else None
        note = f"{found['operators']} operators; " + ("same without cache" if found["same"] else "DIFFERS")
        cached = row("trace", model, "cache", found["cached"], bar_s=bar, peak_bytes=found["peak_bytes"], note=note)
        yield cached
        uncached = row("trace", model, "no cache", found["uncached"], peak_bytes=found["peak_bytes"], note=note)
        uncached["ratio"] = round(uncached["wall_p50_s"] / cached["wall_p50_s"], 2)
        yield uncached


def part_peer(quick: bool, limit_s: float) -> Iterator[Result]:
    """MemTracker and ours on the same pretended CPU, forward and backward only; the ratio is theirs over ours."""
    for model, runs in {"opt-125m": 2}.items() if quick else PEER_MODELS.items():
        ours = in_process("trace", model, "cpu", "none", "5", "0")
        assert ours is not None
        mine = row("peer", model, "elixir", ours["cached"], peak_bytes=ours["peak_bytes"])
        yield mine
        theirs = []
        for _ in range(runs):
            print(f"  MemTracker on {model} ...", flush=True)
            found = in_process("peer", model, limit_s=limit_s)
            if found is None:
                break
            theirs.append(found)
        times = [[found["wall_s"], found["cpu_s"]] for found in theirs]
        peer = row("peer", model, "MemTracker", times)
        if times:
            peak = theirs[0]["peak_bytes"]
            peer |= {"ratio": round(peer["wall_p50_s"] / mine["wall_p50_s"], 1), "peak_bytes": peak}
            peer["note"] = f"peak {100 * (peak / ours['peak_bytes'] - 1):+.3f} % against ours"
        else:
            peer |= {"ratio": round(limit_s / mine["wall_p50_s"], 1), "note": f"stopped after {limit_s:.0f} s"}
        yield peer


def part_plan(quick: bool) -> Iterator[Result]:
    """The search alone, in one process per hash seed; the note says whether all of them wrote the same plan."""
    sizes = [str(size) for size in (WORLD_SIZES[1:2] if quick else WORLD_SIZES)]
    runs = "2" if quick else "5"
    by_seed = [in_process("plan", "opt-175b", runs, *sizes, PYTHONHASHSEED=seed) for seed in HASH_SEEDS]
    for size in sizes:
        found = [result[size] for result in by_seed if result is not None]
        times = [pair for result in found for pair in result["times"]]
        digests = {digest for result in found for digest in result["digests"]}
        same = f"same plan under {len(found)} hash seeds" if len(digests) == 1 else "plans DIFFER"
        yield row("plan", "opt-175b", f"world size {size}", times, bar_s=BARS["plan"], note=same)


def failures(rows: list[Result]) -> list[str]:
    """The rows that miss their bar or are not as they must be."""
    found = []
    for line in rows:
        label = f"{line['part']} {line['model']} {line['what']}"
        if line["bar_s"] is not None and line["wall_p50_s"] > line["bar_s"]:
            found.append(f"{label}: {line['wall_p50_s']} s, the bar is {line['bar_s']} s")
        if "DIFFER" in line["note"]:
            found.append(f"{label}: {line['note']}")
    return found


def main() -> int:
    """Measures the chosen parts, appends rows, prints a table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer models and runs, the peer on a small model")
    parser.add_argument("--only", nargs="+", choices=("trace", "peer", "plan"))
    parser.add_argument("--peer-limit", type=float, default=300, metavar="S", help="give up on a run of the peer")
    parser.add_argument("--no-record", action="store_true", help="append nothing to the results")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, *rest = arguments.worker
        print(json.dumps(WORKERS[name](*rest)))
        return 0
    from benchmark.common import append_rows, print_table

    chosen = arguments.only or ["trace", "plan", "peer"]
    parts = {
        "trace": lambda: part_trace(arguments.quick),
        "plan": lambda: part_plan(arguments.quick),
        "peer": lambda: part_peer(arguments.quick, arguments.peer_limit),
    }
    rows: list[Result] = []
    for part in chosen:
        for line in parts[part]():
            rows.append(line)
            print(f"{line['part']} {line['model']} {line['what']}: {line['wall_p50_s']} s {line['note']}", flush=True)
    columns = ("part", "model", "what", "runs", "wall_p20_s", "wall_p50_s", "wall_p80_s", "cpu_p50_s", "bar_s", "ratio")
    columns += ("peak_bytes", "note")
    cells = [["" if line[key] is None else line[key] for key in columns] for line in rows]
    print_table("seconds; ratio: no cache over cache, MemTracker over Elixir", columns, cells)
    if not arguments.no_record:
        append_rows("trace_speed", rows)
    missed = failures(rows)
    for text in missed:
        print("missed:", text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
