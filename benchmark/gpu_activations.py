"""Steps on a CUDA device whose layers keep, make again or move their activations, and compiled ones: bits, speed, peaks.

    python benchmark/gpu_activations.py [--out DIR] [--only again,kept] [--seconds 125]
    python benchmark/gpu_activations.py --rehearse      # toys on the CPU

``DIR`` is the folder of `benchmark/gpu_proof.py`, whose ``hardware.json`` plans are made for. The cases trace and plan
side by side, each in its own process, and then have the device one after the other. All are of one model on one long
sequence, in two budgets: states on the device, where moving pays little, and on the host. Those of one budget train the
same weights on the same tokens: see `unequal`. Case `t5` compares compiled with other layers: gradients with those in
float64, and peaks with those predicted. Appends a row for each case to ``DIR/activations.jsonl``, a failed one with the
reason; fails if one failed or losses differ.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import Row, conditions, print_table
from benchmark.proof import ours, speed
from benchmark.proof.lifetime import end_with
from benchmark.proof.models import Filling, micro_batches, on_meta
from benchmark.proof.place import SETTINGS, Place
from elixir.hardware.profile import HardwareProfile
from elixir.models.layer_units import layers_compiled
from elixir.models.step import default_step
from elixir.plan.activations import activations_text
from elixir.plan.chunk_plan import Home
from elixir.search.advise import activations
from elixir.search.simulator.simulation import simulate_step
from elixir.tracer.trace import trace_step
from elixir.units import GIB

ROWS_FILE = "activations.jsonl"
ALIKE_STEPS, ALIKE = 4, 0.01
"""The number of losses of the cases of a budget that are near each other, and how near. Attention's backward on a GPU adds in any
order, so that only the first are equal to the bit; without some gradients they soon differ by a tenth."""
_TOY = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 224, "vocabulary": 512}
_GROUPS = {"states on the device": {"placement": "cuda"}, "states on the host": {"placement": "cpu"}}
_BUDGETS = {True: (38 * 10**9, 15 * 10**9), False: (5_600_000, 1_600_000)}
"""Memory of the device for the groups, by whether it is a real run."""
_WAYS: dict[str, dict[str, Any]] = {
    "again": {"checkpoint": "non-reentrant"},
    "kept": {"activations": "auto", "ways": 0},
    "auto": {"activations": "auto"},
    "compiled": {"activations": "auto", "compile": True},
}
"""Every layer runs again; what is kept is chosen; what is kept or moved is chosen; the same of compiled layers."""
_CASES = (("again", 0), ("kept", 0), ("auto", 1), ("compiled", 0), ("kept", 1), ("again", 1))
TOLERANCE = 1e-3
"""The part of its norm by which a gradient of compiled layers in float32 may differ from that in float64; or twice as
much as without compiled layers."""


def cases(place: Place) -> dict[str, dict[str, Any]]:
    """The options of each case, by its name, in the order in which they are worth running."""
    seq = 32768 if place.cuda else 128
    sizes = {"layers": 6, "vocabulary": 32000} if place.cuda else _TOY
    shared: dict[str, Any] = {"model": "llama-3-8b", "changes": {**sizes, "positions": seq}, "batch": 1, "seq": seq}
    shared |= {"precision": "bf16", "host_bytes": 100 * GIB if place.cuda else 10**9}
    shared["measure_s"] = 4.0 if place.cuda else 0.05
    found = {}
    for way, number in _CASES:
        group = list(_GROUPS)[number]
        budget = _BUDGETS[place.cuda][number]
        own = {"budget_bytes": budget, "planned_device_bytes": int(budget * ours.RESERVE_SHARE), "group": group}
        found[f"{way}, {group}"] = {**shared, **_GROUPS[group], **_WAYS[way], **own}
    t5: dict[str, Any] = {"layers": 2, "dropout_rate": 0.0}  # compiled layers would draw other numbers
    t5 |= {} if place.cuda else {"hidden": 64, "heads": 4, "ffn": 256, "vocabulary": 512}
    names = list(found)
    rest = {"t5": {"model": "t5-large", "changes": t5, "batch": 4, "seq": 512 if place.cuda else 32}}
    return {**{name: found[name] for name in names[:4]}, **rest, **{name: found[name] for name in names[4:]}}


def chosen(options: dict[str, Any], hardware: HardwareProfile) -> ours.Choice:
    """The plan of a case, and its trace."""
    with patch.object(activations, "MOST_WAYS", options.get("ways", activations.MOST_WAYS)):
        answer = ours.answer_for(options, 1, hardware, True, options["planned_device_bytes"], options["host_bytes"])
    return ours.Choice(answer.plan, answer.question.trace, 1, True, {})


def timed(options: dict[str, Any], place: Place, ready: Callable[[], None]) -> Row:
    """A row of a case of Elixir."""
    hardware = place.hardware()
    started = time.perf_counter()
    choice = chosen(options, hardware)
    planned_s = time.perf_counter() - started
    plan = choice.plan
    simulated_s = simulate_step(plan, choice.trace, hardware).step_s
    row: Row = {
        "group": options["group"],
        "compiled": bool(options.get("compile")),
        "activations": activations_text(plan.activations),
        "swap_bytes": plan.step.swap_bytes,
        "resident_chunks": sum(chunk.home is Home.RESIDENT for chunk in plan.chunks),
        "planning_s": round(planned_s, 2),
        "assumptions": list(choice.trace.assumptions),
        "simulated_s": simulated_s,
    }
    ready()
    started = time.perf_counter()
    running = ours.run(options, place, place.folder / "plans" / options["name"], choice)
    row["building_s"] = round(time.perf_counter() - started, 2)
    started = time.perf_counter()
    first = float(running.step())
    row["first_steps_s"] = round(time.perf_counter() - started, 2)
    place.limit_reserved(options["budget_bytes"])
    found = speed.timed(running, place, warm_up=speed.WARM_UP_STEPS, measure_s=options["measure_s"])
    running.keep()
    found["losses"] = [first, *found["losses"]]
    mean_s, measured = found["mean_s"], found.get("max_allocated_bytes")
    row |= {"budget_bytes": options["budget_bytes"], "seq": options["seq"], "tokens_per_s": options["seq"] / mean_s}
    row |= {**found, **running.facts, "simulated_percent": 100 * (simulated_s / mean_s - 1)}
    if measured:
        row["device_percent"] = 100 * (plan.predicted.device_peak_bytes / measured - 1)
    return row


def compared(options: dict[str, Any], place: Place, ready: Callable[[], None]) -> Row:
    """A row of a model's plain steps with compiled layers, and without."""
    hardware, names = place.hardware(), {False: "plain", True: "compiled"}
    meta = on_meta(options)
    batch = micro_batches(meta, options, options["batch"], "cpu")[0]
    row: Row = {}
    started = time.perf_counter()
    for compile in (False, True):
        try:
            trace = trace_step(meta, batch, default_step, hardware=hardware, optimizer=None, compile=compile)
        except Exception as error:  # the steps are worth a comparison without
            traceback.print_exc()
            row[f"{names[compile]}_trace"] = f"{type(error).__name__}: {error}"
            continue
        row[f"{names[compile]}_predicted_bytes"] = trace.backward_peak_bytes
        row[f"{names[compile]}_assumptions"] = list(trace.assumptions)
    row["planning_s"] = round(time.perf_counter() - started, 2)
    ready()
    torch.set_float32_matmul_precision("highest")
    model = on_meta(options)
    Filling(model, place.device, torch.float32).fill(model, place.device)
    batch = {key: value.to(place.device) for key, value in batch.items()}

    exact = _gradients(copy.deepcopy(model).double(), batch)
    off: dict[bool, dict[str, float]] = {}
    for compile in (False, True):
        started = time.perf_counter()
        with layers_compiled(model, compile, keep=True):
            for _ in range(2):
                _gradients(model, batch)
        row[f"{names[compile]}_first_steps_s"] = round(time.perf_counter() - started, 2)
        place.reset_peaks()
        found = _gradients(model, batch)
        measured = place.peaks().get("max_allocated_bytes")
        if measured:
            row[f"{names[compile]}_measured_bytes"] = measured
            predicted = row.get(f"{names[compile]}_predicted_bytes", 0)
            row[f"{names[compile]}_percent"] = 100 * (predicted / measured - 1)
        off[compile] = {name: float((found[name].double() - each).norm() / each.norm()) for name, each in exact.items()}
    worst = max(exact, key=lambda name: off[True][name])
    row |= {"worst_gradient": worst, "worst_gradient_off": off[True][worst], "plain_gradient_off": off[False][worst]}
    far = {name: each for name, each in off[True].items() if not each <= max(TOLERANCE, 2 * off[False][name])}
    return {**row, "status": "differs", "why": f"gradients are far from those in float64: {far}"} if far else row


def _gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of one step, on the host; the model has none afterwards."""
    default_step(model, batch)
    found = {name: parameter.grad.cpu() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def run_case(name: str, place: Place, ready: Callable[[], None]) -> Row:
    """The row of a case, whatever becomes of it."""
    options = {**cases(place)[name], "name": name.replace(", ", "_").replace(" ", "_")}
    row: Row = {"case": name, "status": "ok"}
    try:
        place.prepare(expandable_segments=name != "t5")
        row |= conditions()
        row |= (compared if name == "t5" else timed)(options, place, ready)
        row |= place.facts()
    except Exception as error:
        traceback.print_exc()
        row |= {"status": "failed", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"}
    return row


def work(name: str, place: Place, parent: int) -> None:
    """A case in its process: says when its plan is there, waits for a line, writes its row."""
    end_with(parent)
    started = time.monotonic()

    def ready() -> None:
        (place.folder / f"{name}.planned").touch()
        sys.stdin.readline()

    row = run_case(name, place, ready)
    partial = place.folder / f"{name}.part"
    partial.write_text(json.dumps({**row, "wall_s": round(time.monotonic() - started, 2)}), encoding="utf-8")
    partial.replace(place.folder / f"{name}.row.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the kernel gives memory back faster than destructors do


def all_rows(names: list[str], place: Place, extra: list[str], until_s: float) -> Iterator[Row]:
    """Starts all cases, has them use the device one after the other as soon as they have plans, and gives their
    rows."""
    for old in itertools.chain(place.folder.glob("*.planned"), place.folder.glob("*.row.json")):
        old.unlink()
    environment = {**SETTINGS, "PYTHONWARNINGS": "ignore", **os.environ}
    waiting: dict[str, subprocess.Popen[str]] = {}
    for name in names:
        command = [sys.executable, __file__, *extra, "--out", str(place.folder), "--case", name, str(os.getpid())]
        log = (place.folder / f"{name}.log").open("w", encoding="utf-8")
        waiting[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env=environment
        )
    while waiting:
        able = [
            name
            for name, process in waiting.items()
            if (place.folder / f"{name}.planned").exists() or process.poll() is not None
        ]
        name = able[0] if able else next(iter(waiting))
        process, left_s = waiting[name], until_s - time.monotonic()
        if not able and left_s > 0:
            time.sleep(0.1)
            continue
        del waiting[name]
        try:
            if process.poll() is None:
                process.communicate("go\n", timeout=max(left_s, 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        result = place.folder / f"{name}.row.json"
        if result.exists():
            yield json.loads(result.read_text(encoding="utf-8"))
        else:
            tail = (place.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-400:]
            yield {"case": name, "status": "cut", "why": f"no row, exit code {process.returncode}: {tail}"}


def unequal(rows: list[Row]) -> list[str]:
    """The cases of one budget whose losses differ: the first to the bit, without compiled layers, or a later one by more
    than `ALIKE`."""
    found = []
    for group in _GROUPS:
        ok = [row for row in rows if row["status"] == "ok" and row.get("group") == group]
        losses = {row["case"]: row["losses"][:ALIKE_STEPS] for row in ok}
        apart = any(max(step) > min(step) * (1 + ALIKE) for step in zip(*losses.values(), strict=True))
        if apart or len({row["losses"][0] for row in ok if not row["compiled"]}) > 1:
            found.append(f"{group}: {losses}")
    return found


def main(given: list[str] | None = None) -> int:
    """Runs, appends rows, summarises; 1 if a case failed or losses differ, 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="beginnings of names of cases")
    parser.add_argument("--seconds", type=float, default=125.0)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--case", nargs=2, metavar=("NAME", "PARENT"), help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    until_s = time.monotonic() + args.seconds
    if args.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("ELIXIR_COMPILE", "0")  # compiling takes longer than all toys
    if not args.rehearse and not args.case and not torch.cuda.is_available():
        print("no CUDA device here; --rehearse runs toys on the CPU", file=sys.stderr)
        return 2
    temporary = tempfile.mkdtemp(prefix="elixir-activations-") if args.rehearse else "out/gpu_proof"
    place = Place(args.out or Path(temporary), args.rehearse)
    place.folder.mkdir(parents=True, exist_ok=True)
    if args.case:
        work(args.case[0], place, int(args.case[1]))
    names = [name for name in cases(place) if not args.only or name.startswith(tuple(args.only))]
    rows = []
    for row in all_rows(names, place, ["--rehearse"] if args.rehearse else [], until_s):
        rows.append(row)
        with (place.folder / ROWS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    columns = ("case", "status", "mean_s", "simulated_percent", "device_percent", "activations")
    print_table("activations", columns, [[row.get(name) for name in columns] for row in rows])
    problems = unequal(rows)
    print("\n".join(problems) or "losses are alike")
    return int(bool(problems) or any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
