"""Masters and states on a disk on their way through the window: in which order, how many bytes, and what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from elixir.chunk.host_buffers import WINDOW, BufferKind, HostBuffers
from elixir.chunk.lanes import ThreadLane, make_lanes
from elixir.chunk.memory import Arena
from elixir.chunk.state_window import MASTERS, StateWindow, StoredStates
from elixir.errors import DiskError
from elixir.extents.extent_file import ExtentFile
from elixir.files import Files
from tests.common.file_faults import FailingFiles, UnsyncedFiles

CPU = torch.device("cpu")
BLOCK, NUMEL = 4096, 1000


class Window:
    """A window of two buffers, and three chunks with masters and one state each, on a real disk."""

    def __init__(self, folder: Path, files: Files, states: bool = True, chunks: int = 3) -> None:
        self.arena, self.lanes = Arena(CPU), make_lanes(CPU)
        self.lane = self.lanes.disk
        buffers = HostBuffers(self.arena)
        buffers.add(BufferKind(WINDOW, "state_window", 2 * BLOCK, 2, at_once=False, pin=False, paged=True))
        self.log: list[tuple[str, int]] = []
        """Transfers in order: what, bytes that the lane was given."""
        self.submitted: list[int] = []
        self._submit, self.lane.submit = self.lane.submit, self._noted  # type: ignore[method-assign]
        self.window = StateWindow(self.lanes, buffers, lambda: ExtentFile([str(folder)], files=files))
        self.window.count_in(self.arena)
        self.chunks = [StoredStates(self.window, f"chunk {index}", 2 * BLOCK) for index in range(chunks)]
        self.masters, self.states = list[torch.Tensor](), list[torch.Tensor]()
        for index, chunk in enumerate(self.chunks):
            for name, tensors in ((MASTERS, self.masters), ("exp_avg", self.states))[: 1 + states]:
                tensors.append(chunk.region(name, NUMEL, torch.float32))
                chunk.show(self, tensors[-1], name)
            for what in ("fill", "store"):
                setattr(chunk, what, self._logged(f"{what} {index}", getattr(chunk, what)))
            with chunk.in_memory(write=True):
                for tensor in (self.masters[index], *self.states[index : index + 1]):
                    tensor.fill_(float(index))
        self.log.clear()
        self.submitted.clear()
        self.lanes.counts.reset()

    def _noted(self, work: Any, **options: Any) -> Any:
        self.submitted.append(options.get("nbytes", 0))
        return self._submit(work, **options)

    def _logged(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(memory: torch.Tensor) -> None:
            self.log.append((what, 0))
            work(memory)

        return run

    def step(self, index: int, work: Callable[[], Any], adam: ThreadLane) -> None:
        buffer, read = self.window.begin_step(self.chunks[index])
        stepped = adam.submit(lambda: self.chunks[index].step(buffer, read, work), writes=[buffer])
        self.window.end_step(self.chunks[index], buffer, stepped)

    def moved(self) -> tuple[int, int]:
        """Bytes that steps have read and written."""
        return self.lanes.counts.disk_read_bytes, self.lanes.counts.disk_written_bytes

    def values(self) -> list[float]:
        """The masters, all elements of each the same."""
        found = []
        for index, chunk in enumerate(self.chunks):
            with chunk.in_memory():
                (value,) = set(self.masters[index].tolist())
                found.append(value)
        return found

    def settle(self) -> None:
        """Waits until all states are back on the disk, or cannot be."""
        self.window.flush()
        self.lane.drain()

    def close(self) -> None:
        for chunk in self.chunks:
            chunk.give_back()
        self.window.close()
        self.lanes.close()


def test_a_chunk_that_is_stepped_again_is_written_before_it_is_read(tmp_path: Path) -> None:
    it, adam = Window(tmp_path, UnsyncedFiles()), ThreadLane("adam")
    for _ in range(2):
        it.step(0, lambda: it.masters[0].add_(1), adam)
    it.settle()
    assert [what for what, _ in it.log] == ["fill 0", "store 0", "fill 0", "store 0"]
    assert it.values() == [2.0, 1.0, 2.0]
    it.close()
    adam.close()


def test_states_that_are_still_to_be_written_count_as_read_next(tmp_path: Path) -> None:
    it, adam, gate = Window(tmp_path, UnsyncedFiles(), states=False), ThreadLane("adam"), threading.Event()
    it.chunks[0].show(it, it.chunks[0].region("exp_avg", NUMEL, torch.float32), "exp_avg")
    for _ in range(2):
        it.step(0, gate.wait, adam)
    gate.set()
    it.settle()
    assert it.moved() == (3 * BLOCK, 4 * BLOCK)
    it.close()
    adam.close()


def test_a_buffer_is_in_use_while_states_are_read_into_it(tmp_path: Path) -> None:
    it, gate = Window(tmp_path, UnsyncedFiles()), threading.Event()
    it.lane.submit(gate.wait)
    buffer, read = it.window.begin_step(it.chunks[0])
    assert buffer.users == [read]
    assert not read.done()
    gate.set()
    read.synchronize()
    it.close()


def test_a_disk_that_fails_stops_all_further_steps(tmp_path: Path) -> None:
    files = FailingFiles(10**9, only=("write",))
    it, adam = Window(tmp_path, files), ThreadLane("adam")
    files.at, files.forever = files.count + 1, True
    ran: list[int] = []
    for index in range(3):
        it.step(index, lambda index=index: ran.append(index), adam)
    it.settle()
    assert isinstance(it.window.lost, DiskError)
    assert [what for what, _ in it.log].count("store 0") == 1
    assert "store 2" not in [what for what, _ in it.log]
    adam.close()
    it.lane.close()


def test_states_that_no_plan_foresaw_get_room_while_they_are_at_hand(tmp_path: Path) -> None:
    """The extent grows, and with it the buffer that holds it; masters and states stay what they are."""
    it = Window(tmp_path, UnsyncedFiles())
    chunk, more = it.chunks[1], list[torch.Tensor]()
    with chunk.in_memory(write=True):
        more.append(chunk.region("max_exp_avg_sq", NUMEL, torch.float32))
        chunk.show(it, more[0], "max_exp_avg_sq")
        more[0].fill_(7.0)
        assert (it.masters[1] == 1.0).all()
        assert (it.states[1] == 1.0).all()
    assert chunk.used_bytes > 2 * BLOCK
    assert it.arena.parts("disk") == {"optimizer_states": 2 * 2 * BLOCK + 3 * BLOCK}
    with it.chunks[0].in_memory():
        assert (it.masters[0] == 0.0).all()
    with chunk.in_memory():
        assert (more[0] == 7.0).all()
        assert (it.masters[1] == 1.0).all()
        assert (it.states[1] == 1.0).all()
    it.close()
