"""Checkpoints against writers that do nothing else, against torch's, and against what a disk allows.

    python benchmark/checkpoint_speed.py [--model opt-125m] [--layers N] [--rounds 5] [--folder DIR] [--no-record]

*Save and load*: a model in float32 with AdamW, states on the host, on two ranks that stay alive. In turns, round after
round: `save_checkpoint`; two *bare writers*, one process for each rank, that write as many bytes in pieces of 4 MiB
and synchronise; torch's `HuggingFaceStorageWriter` with the same tensors. Then, likewise, `load_checkpoint` and
processes that read as many bytes from the page cache. A first round is left out: it makes groups and pools. Times are
from a barrier to a barrier; memory is what the resident set of a rank grows by at most, its pool left out.

*Stall*: one rank and a disk that is emulated by sleeping, S bytes in 4 s. A save is followed by an update after T
seconds. Updates may wait for max(0, (S - P) / D - T), for copying P bytes, and for one piece, where P is the pool and
the rates are measured in the same run. *Steps*: the seconds of steps between two saves over those of steps without,
where the disk keeps up.

*Bytes*: those of all files of a checkpoint beyond 12, 8 and 6.03 for a parameter: a master in float32 and Adam's two
moments in float32, bfloat16 and 8 bits with a scale for every 256.

Each figure has a bar. Misses of p80 are printed; the exit status is 1 if p50 misses one. Appends to
``results/checkpoint_speed.csv``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from benchmark.common import append_rows, conditions, percentiles, print_table
from benchmark.emulated_runs import run_apart
from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.checkpoint.saving import SaveOptions, Saves, Saving
from elixir.checkpoint.user_state import UserState
from elixir.checkpoint_format.slices import SPAN_BYTES
from elixir.files import Files
from elixir.models.loading import build
from elixir.models.model_shape import ModelShape, describe
from elixir.models.step import default_input, default_step
from elixir.search import optimal_search
from elixir.units import MIB
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.training_states import TrainingStates
from tests.common.peaks import resident_growth

RANKS = 2
BATCH, SEQUENCE = 1, 64
DISK_S = 4.0
"""Seconds in which the emulated disk writes all states."""
POOLS, TIMES = (0.0, 0.25, 0.5, 1.0), (0.1, 0.5, 1.0)
"""Shares of the states that the pool holds; seconds until the next update, by those of the disk."""
SLACK_S = 0.05
BYTES_FOR_A_PARAMETER = {"float32": 12.0, "bfloat16": 8.0, "8bit": 4 + 2 * (1 + 4 / 256)}
"""Results by kind of moments."""
BARS = {
    "save over two bare writers": 1.15,
    "CPU seconds per GB saved": 2.0,
    "MiB next to states and pool while saving": 16.0,
    "seconds until save_checkpoint returns": 0.05,
    "save over DCP's HF writer": 0.5,
    "memory while saving over DCP's HF writer": 0.1,
    "load over a bare read": 1.5,
    "load over a bare read to where it stays": 1.5,
    "MiB next to states while loading": 16.0,
    "stall beyond its bound, over 1.1 of the bound + 50 ms": 1.0,
    "step between saves over step without": 1.05,
    "per cent of bytes beyond weights and moments": 0.1,
}


class Training:
    """A model under a plan that keeps all states on the host, stepped once."""

    def __init__(self, shape: ModelShape, world_size: int, **options: Any) -> None:
        torch.manual_seed(0)
        inp = default_input(build(shape, device="meta"), batch=BATCH, seq=SEQUENCE)
        plan = optimal_search(
            build(shape, device="meta"), world_size, inp=inp, step_fn=default_step, hardware="cpu",
            device_memory="64GiB", host_budget="64GiB", placement="cpu", **options,
        ).plan  # fmt: skip
        self.module, self.inp = ElixirModule(build(shape), plan, device="cpu"), inp
        self.optimizer = ElixirOptimizer(self.module, torch.optim.AdamW(self.module.parameters(), lr=1e-4))
        self.state = {"model": self.module, "optimizer": self.optimizer}
        self.forward_and_backward()
        self.update()

    def forward_and_backward(self) -> None:
        self.optimizer.backward(self.module(**self.inp).loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.module.settle()

    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's slices, where they lie."""
        chunks = TrainingStates(self.module, {"optimizer": self.optimizer}).chunks()
        return {f"{each.kind}/{each.name}": each.tensor for chunk in chunks for each in chunk.tensors()}


# --- save and load ---------------------------------------------------------------------------------------------------


@contextmanager
def measured(into: dict[str, float]) -> Iterator[None]:
    """Seconds from barrier to barrier, CPU seconds of this rank, and growth of its resident set."""
    with resident_growth() as growth:
        dist.barrier()
        cpu, started = time.process_time(), time.perf_counter()
        yield
        into["cpu_s"] = time.process_time() - cpu
        dist.barrier()
        into["s"] = time.perf_counter() - started
    into["grown_bytes"] = growth.peak_bytes


def bare_write(path: Path, nbytes: int) -> None:
    """Writes and synchronises."""
    piece = memoryview(bytearray(os.urandom(SPAN_BYTES)))
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    for at in range(0, nbytes, SPAN_BYTES):
        os.pwrite(handle, piece[: min(SPAN_BYTES, nbytes - at)], at)
    os.fsync(handle)
    os.close(handle)


def bare_read(path: Path) -> None:
    """Reads a file from the page cache."""
    piece = bytearray(SPAN_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(piece):
            pass


def bare_read_into(path: Path, memory: memoryview) -> None:
    """Reads a file from the page cache to where it stays."""
    with open(path, "rb", buffering=0) as file:
        at = 0
        while count := file.readinto(memory[at : at + SPAN_BYTES]):
            at += count


def rank_main(rank: int, folder: str, shape: ModelShape, rounds: int) -> None:
    """One of the ranks; writes down its measurements, round by round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    training, place = Training(shape, RANKS), Path(folder)
    found: list[dict[str, dict[str, float]]] = []
    nbytes = sum(tensor.nbytes for tensor in training.tensors().values())

    def ours(target: Path, into: dict[str, float]) -> None:
        started = time.perf_counter()
        saving = save_checkpoint(target, training.state)
        into["returned_s"] = time.perf_counter() - started
        saving.wait()

    def bare(target: Path, into: dict[str, float]) -> None:
        bare_write(target.with_suffix(f".{rank}"), nbytes)

    def peer(target: Path, into: dict[str, float]) -> None:
        slices = {f"{rank}/{key}": tensor for key, tensor in training.tensors().items()}
        dcp.save(slices, storage_writer=dcp.HuggingFaceStorageWriter(str(target), save_distributed=True))

    def load(target: Path, into: dict[str, float]) -> None:
        load_checkpoint(place / "loaded", training.state)

    def read(target: Path, into: dict[str, float]) -> None:
        bare_read(next((place / "loaded").glob(f"*-rank-{rank:05}-*")))

    def take(ways: dict[str, Callable[[Path, dict[str, float]], None]]) -> None:
        for number in range(rounds + 1):
            here: dict[str, dict[str, float]] = {}
            for index in range(len(ways)):
                name, way = list(ways.items())[(number + index) % len(ways)]
                here[name] = {}
                with measured(here[name]):
                    way(place / f"{name}-{number}", here[name])
                if rank == 0:
                    remove(place, f"{name}-{number}*")
                dist.barrier()
            if number:
                found.append(here)

    take({"ours": ours, "bare": bare, "peer": peer})
    save_checkpoint(place / "loaded", training.state, wait=True)
    path = next((place / "loaded").glob(f"*-rank-{rank:05}-*"))
    memory = memoryview(bytearray(path.stat().st_size))

    def read_into(target: Path, into: dict[str, float]) -> None:
        bare_read_into(path, memory)

    take({"load": load, "read": read, "read into": read_into})
    (place / f"{rank}.json").write_text(json.dumps({"nbytes": nbytes, "rounds": found}))
    training.module.close()
    dist.destroy_process_group()


def remove(place: Path, pattern: str) -> None:
    """Removes what a way has written."""
    for path in place.glob(pattern):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def save_and_load(folder: str, shape: ModelShape, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Bytes of all ranks, and the figures of every round."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        ranks = [context.Process(target=rank_main, args=(rank, place, shape, rounds)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")
        answers = [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    nbytes = sum(answer["nbytes"] for answer in answers)

    def each(name: str, what: str, joined: Callable[[Any], float] = max) -> list[float]:
        rounds = zip(*(answer["rounds"] for answer in answers), strict=True)
        return [joined([rank[name][what] for rank in here]) for here in rounds if name in here[0]]

    def over(mine: list[float], theirs: list[float]) -> list[float]:
        return [a / b for a, b in zip(mine, theirs, strict=True)]

    return nbytes, {
        "save over two bare writers": over(each("ours", "s"), each("bare", "s")),
        "CPU seconds per GB saved": [cpu_s / nbytes * 1e9 for cpu_s in each("ours", "cpu_s", sum)],
        "MiB next to states and pool while saving": [grown / MIB for grown in each("ours", "grown_bytes")],
        "seconds until save_checkpoint returns": each("ours", "returned_s"),
        "save over DCP's HF writer": over(each("ours", "s"), each("peer", "s")),
        "memory while saving over DCP's HF writer": over(each("ours", "grown_bytes"), each("peer", "grown_bytes")),
        "load over a bare read": over(each("load", "s"), each("read", "s")),
        "load over a bare read to where it stays": over(each("load", "s"), each("read into", "s")),
        "MiB next to states while loading": [grown / MIB for grown in each("load", "grown_bytes")],
    }


# --- stall -----------------------------------------------------------------------------------------------------------


class SlowDisk(Files):
    """Takes so many bytes a second, and forgets nothing: a write that comes early waits for those before it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0

    def call(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        if operation == "sync":
            return None
        if operation == "write":
            self._free_at = max(self._free_at, time.perf_counter()) + len(args[1]) / self._bytes_per_s
            time.sleep(max(0.0, self._free_at - time.perf_counter()))
        return super().call(operation, path, function, *args)


def stalls(folder: str, shape: ModelShape, rounds: int) -> dict[str, list[float]]:
    """Stalls over what they may be, and steps with saves over steps without."""
    torch.set_num_threads(1)
    training = Training(shape, 1)
    user = UserState.of(training.state)
    total = sum(tensor.nbytes for tensor in training.tensors().values())
    source = torch.ones(total, dtype=torch.uint8)
    started = time.perf_counter()
    source.clone()
    memory_bytes_per_s = total / (time.perf_counter() - started)
    disk = SlowDisk(total / DISK_S)
    with tempfile.TemporaryDirectory(dir=folder) as place:

        def begin(pool_bytes: int) -> Saving:
            options = SaveOptions(Path(place) / "run", files=disk, pool_bytes=pool_bytes)
            return Saves.of(user.states).start(user, options)

        started = time.perf_counter()
        begin(0).wait()
        disk_bytes_per_s = total / (time.perf_counter() - started)
        beyond, slowed = [], []
        for pool_share in POOLS:
            for time_share in TIMES:
                for _ in range(rounds):
                    pool_bytes = int(pool_share * total)
                    saving, began = begin(pool_bytes), time.perf_counter()
                    training.forward_and_backward()
                    left_s = time_share * DISK_S - (time.perf_counter() - began)
                    time.sleep(max(0.0, left_s))
                    until_s = time.perf_counter() - began
                    training.update()
                    saving.wait()
                    bound_s = max(0.0, (total - pool_bytes) / disk_bytes_per_s - until_s)
                    bound_s += pool_bytes / memory_bytes_per_s + SPAN_BYTES / disk_bytes_per_s
                    beyond.append(saving.stall_s / (1.1 * bound_s + SLACK_S))
        for saves in [False, True] * rounds:
            began = time.perf_counter()
            saving = begin(total // 4) if saves else None
            training.forward_and_backward()
            time.sleep(max(0.0, 1.1 * DISK_S - (time.perf_counter() - began)))
            training.update()
            slowed.append(time.perf_counter() - began)
            if saving is not None:
                saving.wait()
    training.module.close()
    return {
        "stall beyond its bound, over 1.1 of the bound + 50 ms": beyond,
        "step between saves over step without": [b / a for a, b in zip(slowed[::2], slowed[1::2], strict=True)],
    }


def bytes_beyond(folder: str, shape: ModelShape) -> dict[str, list[float]]:
    """Per cent by which checkpoints are larger than what they hold, with every kind of moments."""
    found = []
    for moments, least in BYTES_FOR_A_PARAMETER.items():
        training = Training(shape, 1, unified_dtype="bfloat16", moments=moments)
        numel = sum(parameter.numel() for parameter in training.module.parameters())
        with tempfile.TemporaryDirectory(dir=folder) as place:
            save_checkpoint(place, training.state, wait=True)
            nbytes = sum(path.stat().st_size for path in Path(place).iterdir())
        training.module.close()
        found.append(100 * (nbytes / (least * numel) - 1))
    return {"per cent of bytes beyond weights and moments": found}


def shape_of(model: str, layers: int | None) -> ModelShape:
    """The model, or its first layers with a small vocabulary."""
    shape = describe(model)
    return shape.changed(layers=layers, vocabulary=8192) if layers else shape


def main() -> int:
    """Measures, records, and compares with the bars; 1 if p50 misses one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--layers", type=int, help="keep only so many layers, and a small vocabulary")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--work", nargs=4, metavar=("FOLDER", "MODEL", "LAYERS", "ROUNDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        folder, model, layers, rounds = args.work
        # The disk is emulated, so a few layers tell as much as all.
        figures = stalls(folder, shape_of(model, int(layers) or 2), int(rounds))
        print(json.dumps(figures | bytes_beyond(folder, shape_of(model, int(layers)))))
        return 0
    before = conditions() | {"threads": 1}
    os.environ["OMP_NUM_THREADS"] = "1"
    nbytes, figures = save_and_load(args.folder, shape_of(args.model, args.layers), args.rounds)
    figures |= run_apart(__file__, args.folder, args.model, str(args.layers or 0), str(max(1, args.rounds // 2)))
    rows, missed = [], False
    for name, values in figures.items():
        p20, p50, p80 = (round(value, 4) for value in percentiles(values))
        row = {**before, "model": args.model, "layers": args.layers or 0, "ranks": RANKS, "saved_bytes": nbytes}
        row |= {"figure": name, "p20": p20, "p50": p50, "p80": p80, "largest": round(max(values), 4), "bar": BARS[name]}
        rows.append(row | {"values": len(values)})
        missed = missed or p50 > BARS[name]
        if p80 > BARS[name]:
            print(f"p80 of {name} is {p80}, the bar {BARS[name]}")
    columns = ("figure", "p20", "p50", "p80", "bar")
    print_table(f"Checkpoints of {nbytes / 1e9:.2f} GB", columns, [[row[column] for column in columns] for row in rows])
    if not args.no_record:
        print(append_rows("checkpoint_speed", rows))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
