"""How long a step takes under a plan, compared with plain PyTorch, with itself without overlap, and with FSDP2.

    python benchmark/runtime_speed.py [--only resident streamed link ranks replicas access units] [--rounds 15] [--no-record]

Each part runs in a separate process and compares runs that take turns, so that a slow minute of the machine meets all
of them; the ratio is the median of the ratios of neighbours. OPT-125m with 4 x 256 tokens in float32 and
`AdamW(fused=True)` on all sides, but for `ranks`, where each of two ranks has 2 x 256:

* ``resident``: everything on the device of one rank, over plain PyTorch;
* ``streamed``: every chunk and state on the host, few blocks, no emulated link, over plain PyTorch;
* ``link``: streamed with emulated links on which all transfers of a step take 0.8 of its compute time, over
  everything resident without links, and over the same run without prefetch, every transfer and host step waited for.
  The vocabulary is that of bytes: in 50,272 words the embedding is a third of the weights, and no chunk can be smaller
  than it;
* ``ranks``: two ranks over gloo, weights sharded, over FSDP2 with `fully_shard` on every layer; once keeping gathered
  weights from forward to backward (`reshard_after_forward=False` there), once gathering them again;
* ``replicas``: four ranks over gloo, two replicas of two, over FSDP2 on the same mesh of ranks, with four layers, the
  vocabulary of bytes, and 1 x 256 tokens on each rank;
* ``access``: what one access to a parameter costs apart from its use: forward and backward of a chain of tiny layers
  whose chunks are all in blocks, less plain PyTorch's, over the number of parameters that functions read in forward and
  nodes in backward. Gradients, which are no access, are sent home in that time, too;
* ``units``: the same for a chain in lists of eight such layers, which have as many parameters as a layer of OPT: with
  each list fetched as one, over with each parameter fetched when it is read. Plain PyTorch's time is taken off both.

Appends to ``results/runtime_speed.csv``; fails where a bar of `BARS` is missed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elixir.wrapper import Debug
from elixir.wrapper.engine import engine_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MODEL, BATCH, SEQUENCE = "opt-125m", 4, 256
BYTES = 256
"""Vocabulary in `link`."""
FEW_LAYERS = 4
"""Layers in `replicas`, of which a machine holds eight models."""
TRANSFER_SHARE = 0.8
"""Share of compute time that all transfers of a step take together in `link`."""
WARM_UP = 2
BARS = {
    "resident over plain": 1.02,
    "streamed over plain": 1.15,
    "link: streamed over resident": 1.15,
    "link: overlapped over not": 0.65,
    "ranks: sharded over FSDP2, gathered once": 1.0,
    "ranks: sharded over FSDP2, gathered twice": 1.0,
    "replicas: two of two over FSDP2, gathered once": 1.0,
    "replicas: two of two over FSDP2, gathered twice": 1.0,
    "access, us": 20.0,
    "units: fetched as one over by parameter": 0.4,
}

Result = dict[str, list[float]]
Step = Callable[[], float]


# Workers: each runs in a separate process and prints one JSON object as its last line ---------------------------


def _case(batch: int = BATCH, vocabulary: int | None = None, layers: int | None = None) -> tuple[Any, Any]:

    import torch

    from elixir.models.loading import build
    from elixir.models.model_shape import describe
    from elixir.models.step import default_input

    torch.manual_seed(0)
    shape = describe(MODEL)
    if vocabulary is not None:
        shape = shape.changed(vocabulary=vocabulary)
    if layers is not None:
        shape = shape.changed(layers=layers)
    model = build(shape, dtype=torch.float32, device="cpu")
    return model, default_input(model, batch=batch, seq=SEQUENCE)


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _plain(model: Any, inp: Any, optimizer: Any = None) -> Step:
    optimizer = optimizer or _adamw(model)

    def step() -> float:
        started = time.perf_counter()
        model(**inp).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    return step


def _planned(
    model: Any, inp: Any, plan: Any, *, clock: Callable[[], float] = time.perf_counter, **options: Any
) -> tuple[Step, Any]:
    from elixir.wrapper import ElixirModule, ElixirOptimizer

    module = ElixirModule(model, plan, device="cpu", **options)
    optimizer = ElixirOptimizer(module, _adamw(module))

    def step() -> float:
        started = clock()
        optimizer.backward(module(**inp).loss)
        optimizer.step()
        optimizer.zero_grad()
        if clock is not time.perf_counter:
            module.settle()  # what lanes still do belongs to this step
        return clock() - started

    return step, module


def _plan(model: Any, inp: Any, world_size: int, **memory: Any) -> Any:
    from elixir.models.step import default_step
    from elixir.search import optimal_search

    common = {"inp": inp, "step_fn": default_step, "hardware": "cpu", "host_budget": "64GiB"}
    return optimal_search(model, world_size, **common, **memory).plan


def _streamed_plan(model: Any, inp: Any) -> Any:
    """Everything on the host; blocks for about a quarter of the weights, one chunk fetched ahead."""
    from elixir.models.step import default_step
    from elixir.search import simple_search

    common = {"inp": inp, "step_fn": default_step, "hardware": "cpu"}
    return simple_search(model, 1, 24, 0.25, shard_device="cpu", **common).plan


def _take_turns(steps: Sequence[Step], rounds: int) -> list[list[float]]:
    """Seconds of each; every round begins with another one."""
    for step in [step for step in steps for _ in range(WARM_UP)]:
        step()
    seconds: list[list[float]] = [[] for _ in steps]
    for turn in range(rounds):
        for index in range(len(steps)):
            chosen = (index + turn) % len(steps)
            seconds[chosen].append(steps[chosen]())
    return seconds


def work_resident(rounds: int) -> Result:
    """Everything resident, and plain PyTorch."""
    model, inp = _case()
    mine, module = _planned(copy.deepcopy(model), inp, _plan(model, inp, 1, device_memory="16GiB"))
    assert all(chunk.resident for chunk in module.plan.chunks)
    ours, plain = _take_turns((mine, _plain(model, inp)), rounds)
    module.close()
    return {"resident": ours, "plain": plain}


def work_streamed(rounds: int) -> Result:
    """Everything streamed, and plain PyTorch."""
    model, inp = _case()
    mine, module = _planned(copy.deepcopy(model), inp, _streamed_plan(model, inp))
    ours, plain = _take_turns((mine, _plain(model, inp)), rounds)
    module.close()
    return {"streamed": ours, "plain": plain}


def work_link(rounds: int) -> Result:
    """Resident without links; streamed over links; the same without overlap."""
    from elixir.chunk.lanes import Emulation

    model, inp = _case(vocabulary=BYTES)
    plan = _streamed_plan(model, inp)
    resident, module = _planned(copy.deepcopy(model), inp, _plan(model, inp, 1, device_memory="16GiB"))
    for _ in range(WARM_UP):
        resident()

    def computed() -> float:
        started = time.perf_counter()
        module(**inp).loss.backward()
        return time.perf_counter() - started

    compute_s = statistics.median(computed() for _ in range(5))
    module.zero_grad()
    moved = plan.predicted.moved_bytes
    speed = (moved["host_to_device"] + moved["device_to_host"]) / (TRANSFER_SHARE * compute_s)
    overlapped, second = _planned(copy.deepcopy(model), inp, plan, debug=Debug(emulation=Emulation(speed)))
    waiting, third = _planned(model, inp, plan, prefetch=False, debug=Debug(emulation=Emulation(speed, blocking=True)))
    names = ("resident", "overlapped", "waiting")
    seconds = _take_turns((resident, overlapped, waiting), rounds)
    print(f"link of {speed / 1e9:.3f} GB/s, {compute_s:.2f} s of compute", file=sys.stderr)
    print(second.last_report, file=sys.stderr)
    for wrapped in (module, second, third):
        wrapped.close()
    return dict(zip(names, seconds, strict=True))


def work_access(rounds: int) -> Result:
    """Microseconds of one use of a parameter, without the use itself."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(300)))
    (ours, theirs), per_step = _accesses(model, ("parameters",), rounds)
    extra = [(mine - plain_s) / per_step * 1e6 for mine, plain_s in zip(ours, theirs, strict=True)]
    return {"extra_us": extra, "uses": [float(per_step)]}


def work_units(rounds: int) -> Result:
    """Seconds beyond plain PyTorch's, by how layers are fetched."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))) for _ in range(37)))
    (by_parameter, as_one, plain), per_step = _accesses(model, ("parameters", "units"), rounds)
    found = {"by parameter": by_parameter, "as one": as_one}
    extra = {name: [a - b for a, b in zip(took, plain, strict=True)] for name, took in found.items()}
    for name, beyond in extra.items():
        print(f"{name}: {statistics.median(beyond) / per_step * 1e6:.2f} us a read", file=sys.stderr)
    return extra


def _accesses(model: Any, fetches: Sequence[str], rounds: int) -> tuple[list[list[float]], int]:
    """Seconds of a streamed step for each way of fetching, then plain PyTorch's; and the reads of weights in one."""
    import torch

    from elixir.hardware.profile import preset
    from elixir.search import simple_search
    from elixir.tracer.trace import trace_step
    from elixir.wrapper import ElixirModule

    x = torch.randn(2, 4)

    def run(model: Any, inp: Any) -> None:
        model(inp["input"]).sum().backward()

    trace = trace_step(model, {"input": x}, run, hardware=preset("cpu"), optimizer=None)
    modules = []
    for fetch in fetches:
        as_one = fetch == "units"
        units = tuple(replace(unit, fetch="either" if as_one else "parameters") for unit in trace.units)
        step = replace(trace, step=replace(trace.step, units=units))
        plan = simple_search(step, 1, 20, 1.0, shard_device="cpu", hardware="cpu").plan
        assert bool(plan.step.fetched_whole) == as_one
        modules.append(ElixirModule(copy.deepcopy(model), plan, device="cpu"))
    module, plain = modules[0], copy.deepcopy(model)
    uses = [0]
    for name in ("used", "unpack"):
        called = getattr(engine_of(module).uses, name)

        def count(*args: Any, called: Any = called) -> Any:
            uses[0] += len(args[0]) if isinstance(args[0], list) else 1
            return called(*args)

        setattr(engine_of(module).uses, name, count)
    run(module, {"input": x})
    for name in ("used", "unpack"):
        delattr(engine_of(module).uses, name)
    per_step = uses[0]

    def timed(model: Any) -> Step:
        def step() -> float:
            started = time.perf_counter()
            run(model, {"input": x})
            return time.perf_counter() - started

        return step

    seconds = _take_turns([timed(each) for each in (*modules, plain)], 20 * rounds)
    for each in modules:
        each.close()
    return seconds, per_step


def work_ranks(rounds: int) -> Result:
    """Two processes of `_rank`."""
    return _of_ranks(2, 1, rounds)


def work_replicas(rounds: int) -> Result:
    """Four processes of `_rank`."""
    return _of_ranks(4, 2, rounds)


def _of_ranks(world_size: int, replicas: int, rounds: int) -> Result:
    context = __import__("multiprocessing").get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, replicas, folder, rounds)
        ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found: Result = json.loads((Path(folder) / "seconds.json").read_text())
    return found


def _rank(rank: int, world_size: int, replicas: int, folder: str, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from elixir.plan.plan import Plan

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    mesh = None
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicate", "shard"))
    model, inp = _case(BATCH // world_size, *((BYTES, FEW_LAYERS) if replicas > 1 else ()))
    inp = {name: value.roll(rank, -1) for name, value in inp.items()}
    seconds: Result = {}
    for name, once in (("once", True), ("twice", False)):
        texts = [_sharded_plan(model, inp, once, world_size, replicas).to_json() if rank == 0 else ""]
        dist.broadcast_object_list(texts)
        mine, module = _planned(copy.deepcopy(model), inp, Plan.from_json(texts[0]))
        peer = copy.deepcopy(model)
        for layer in peer.model.decoder.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=not once)
        fully_shard(peer, mesh=mesh, reshard_after_forward=not once)
        steps = [mine, _plain(peer, inp)]
        # All ranks begin a step together, and the slowest of them counts.
        ours, theirs = _take_turns([lambda step=step: _slowest(step) for step in steps], rounds)
        seconds |= {f"{name}, sharded": ours, f"{name}, FSDP2": theirs}
        module.close()
        del mine, module, peer, steps
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def _slowest(step: Step) -> float:
    import torch
    import torch.distributed as dist

    dist.barrier()
    seconds = torch.tensor([step()])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _sharded_plan(model: Any, inp: Any, once: bool, world_size: int, replicas: int) -> Any:
    from elixir.models.step import default_step
    from elixir.search import simple_search

    common = {"inp": inp, "step_fn": default_step, "hardware": "cpu", "replicas": replicas}
    return simple_search(model, world_size, 16, 1.0 if once else 0.2, shard_device="cuda", **common).plan


WORKERS: dict[str, Callable[[int], Result]] = {
    "resident": work_resident,
    "streamed": work_streamed,
    "link": work_link,
    "ranks": work_ranks,
    "replicas": work_replicas,
    "access": work_access,
    "units": work_units,
}


# The parent ---------------------------------------------------------------------------------------------------------


def run_apart(part: str, rounds: int) -> Result:
    """A worker's answer, from a process in which nothing else has run."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--work", part, "--rounds", str(rounds)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part} failed")
    answer: Result = json.loads(done.stdout.splitlines()[-1])
    return answer


def figures(part: str, seconds: Result) -> dict[str, list[float]]:
    """Figures that are compared with a bar: ratios of neighbours, or microseconds."""

    def over(mine: str, other: str) -> list[float]:
        return [a / b for a, b in zip(seconds[mine], seconds[other], strict=True)]

    if part == "resident":
        return {"resident over plain": over("resident", "plain")}
    if part == "streamed":
        return {"streamed over plain": over("streamed", "plain")}
    if part == "link":
        return {
            "link: streamed over resident": over("overlapped", "resident"),
            "link: overlapped over not": over("overlapped", "waiting"),
        }
    if part in ("ranks", "replicas"):
        what = "ranks: sharded" if part == "ranks" else "replicas: two of two"
        names = ("once", "twice")
        return {f"{what} over FSDP2, gathered {n}": over(f"{n}, sharded", f"{n}, FSDP2") for n in names}
    if part == "units":
        return {"units: fetched as one over by parameter": over("as one", "by parameter")}
    return {"access, us": seconds["extra_us"]}


def main() -> int:
    from benchmark.common import append_rows, conditions, percentiles, print_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(WORKERS), default=list(WORKERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(WORKERS[args.work](args.rounds)))
        return 0
    rows, missed = [], []
    for part in args.only:
        before = conditions()
        for name, values in figures(part, run_apart(part, args.rounds)).items():
            p20, p50, p80 = (round(value, 4) for value in percentiles(values))
            bar = BARS[name]
            rows.append({**before, "figure": name, "p20": p20, "p50": p50, "p80": p80, "n": len(values), "bar": bar})
            missed += [name] if p50 > bar else []
            print(f"{name}: {p50:.3f} (bar {bar})", flush=True)
    columns = ("figure", "p20", "p50", "p80", "n", "bar")
    print_table("Steps under a plan", columns, [[row[column] for column in columns] for row in rows])
    if not args.no_record:
        print(append_rows("runtime_speed", rows))
    if missed:
        print(f"missed: {', '.join(missed)}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
