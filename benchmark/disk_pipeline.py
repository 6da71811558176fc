"""CPU Adam over states on a disk, pipelined as a run has it, compared with the bare transfers of the same bytes.

    python benchmark/disk_pipeline.py FOLDER            1 GiB of states, 5 rounds
    python benchmark/disk_pipeline.py FOLDER --toy      a few MiB, to see that it runs

The two take turns. Prints the medians, and appends them to ``results/disk_pipeline.csv``; fails if one misses its bar.
Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.common import append_rows, conditions, percentiles, print_table
from elixir.chunk.arena import Arena
from elixir.chunk.host_buffers import WINDOW, BufferKind, HostBuffers
from elixir.chunk.lanes import ThreadLane
from elixir.chunk.state_window import MASTERS, StateWindow, StoredStates
from elixir.extents.extent_file import ExtentFile, whole_blocks
from elixir.files import file_system
from elixir.kernels.adam.adam_rule import AdamOptions
from elixir.kernels.adam.moments import Moments
from elixir.kernels.adam.step import adam_step
from elixir.plan.plan import WINDOW_CHUNKS
from elixir.units import MIB

SHARE_BAR, CPU_BAR = 0.95, 0.12
"""Least share of the bare transfers' speed, and most CPU seconds per GB that they take."""
OPTIONS = AdamOptions(1e-3, 0.9, 0.999, 1e-8, 0.1, True, False)


class Pipeline:
    """Chunks of masters and two moments, all float32, through a window.

    Args:
        folder: on the disk.
        chunks: how many.
        chunk_bytes: of states, of each.
    """

    def __init__(self, folder: str, chunks: int, chunk_bytes: int) -> None:
        self.numel = chunk_bytes // 12
        self.file = ExtentFile([folder])
        self.disk, self.adam = ThreadLane("disk"), ThreadLane("host adam")
        buffers = HostBuffers(Arena(torch.device("cpu")))
        size = whole_blocks(12 * self.numel)
        buffers.add(BufferKind(WINDOW, "state_window", size, WINDOW_CHUNKS, paged=True))
        self.window = StateWindow(self.disk, buffers, lambda nbytes: self.file)
        self.gradient = torch.randn(self.numel, generator=torch.Generator().manual_seed(0))
        self.states, self.parts = [], []
        for index in range(chunks):
            states = StoredStates(self.window, f"chunk {index}", size)
            with states.in_memory(write=True):
                part = [states.region(name, self.numel, torch.float32) for name in (MASTERS, "exp_avg", "exp_avg_sq")]
                for name, tensor in zip((MASTERS, "exp_avg", "exp_avg_sq"), part, strict=True):
                    states.show(self, tensor, name)
            self.states.append(states)
            self.parts.append(part)
        self.extent, self.scratch = self.file.extent(size), buffers.of(WINDOW)[0].memory

    @property
    def moved_bytes(self) -> int:
        """Both ways, of a step."""
        return 2 * sum(states.nbytes for states in self.states)

    def step(self) -> None:
        """One optimizer step, until the drive has all states."""
        for states, part in zip(self.states, self.parts, strict=True):
            buffer, read = self.window.begin_step(states)
            work = partial(states.step, buffer, read, partial(self._adam, part))
            self.window.end_step(states, buffer, self.adam.submit(work, after=[read]))
        self.window.settle()
        self.file.sync()

    def _adam(self, part: list[torch.Tensor]) -> None:
        adam_step(self.gradient, part[0], None, Moments("float32", part[1], part[2]), OPTIONS, 1, 1.0)

    def bare(self) -> None:
        """The transfers of a step, one after the other."""
        view = self.scratch[: self.extent.nbytes].numpy().data
        for _ in self.states:
            self.file.read(self.extent, view)
            self.file.write(self.extent, view)
        self.file.sync()

    def close(self) -> None:
        """Stops the lanes and gives the file back."""
        self.disk.close()
        self.adam.close()
        self.file.close()


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """(seconds, CPU seconds of the process) of `work`."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began_s, time.process_time() - cpu_s


def main() -> int:
    """Measures, records, and compares with the bars; 1 if p50 misses one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="on the disk to be measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--toy", action="store_true", help="a few MiB; nothing is recorded")
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    before = conditions() | {"threads": torch.get_num_threads()}
    chunks, chunk_bytes = (4, MIB) if args.toy else (12, 1024 * MIB // 12)
    pipeline = Pipeline(args.folder, chunks, chunk_bytes)
    pipeline.step()
    rounds = [(timed(pipeline.bare), timed(pipeline.step)) for _ in range(args.rounds)]
    moved_bytes = pipeline.moved_bytes
    pipeline.close()
    figures = {
        "bare transfers over the pipeline": [bare[0] / step[0] for bare, step in rounds],
        "CPU seconds per GB of bare transfers": [bare[1] / moved_bytes * 1e9 for bare, _ in rounds],
        "GB/s of bare transfers": [moved_bytes / bare[0] / 1e9 for bare, _ in rounds],
    }
    rows = []
    for name, values in figures.items():
        p20, p50, p80 = (round(value, 4) for value in percentiles(values))
        row = {**before, "file_system": file_system(args.folder), "states_bytes": moved_bytes // 2, "figure": name}
        rows.append(row | {"p20": p20, "p50": p50, "p80": p80, "values": len(values)})
    columns = ("figure", "p20", "p50", "p80")
    print_table("States through the window", columns, [[row[column] for column in columns] for row in rows])
    if not (args.toy or args.no_record):
        print(append_rows("disk_pipeline", rows))
    return int(rows[0]["p50"] < SHARE_BAR or rows[1]["p50"] > CPU_BAR)


if __name__ == "__main__":
    sys.exit(main())
