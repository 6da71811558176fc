"""Host memory of a process apart from what a plan counts."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elixir.hardware import process_memory
from elixir.hardware.process_memory import HEAP_LOOK_SHARE, HeapLimit, Resident, estimated_bytes, resident
from elixir.optimizer_states import MASTER_BYTES
from elixir.plan.process_need import LIBRARIES_PART, process_need
from elixir.search import optimal_search
from elixir.units import LARGEST_BYTES, MIB
from tests.common.samples import make_plan
from tests.common.searching import HARDWARE, PLENTY, SMALL
from tests.common.synthetic_trace import stack_trace


def test_freed_memory_is_given_back_once_more_is_held_than_expected() -> None:
    if resident() is None or not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("only the C library of Linux gives back")

    def held_bytes() -> int:
        now = resident()
        return 0 if now is None else now.own_bytes

    limit = HeapLimit()
    pieces = [torch.zeros(96 << 8) for _ in range(640)]  # of 96 KiB, which are never mapped one by one
    kept = pieces[::16]
    del pieces[:]
    before = held_bytes()
    limit.trim_if_over()  # nothing is expected yet
    limit.set(LARGEST_BYTES)
    limit.trim_if_over()
    assert held_bytes() > before - MIB
    assert limit.held_bytes() == pytest.approx(held_bytes(), rel=0.5)  # all but what processes share
    shared = torch.full((64 << 18,), 1.0).share_memory_()  # part of what is held, and cannot be given back
    limit.set(before + 64 * MIB)  # less a share
    limit.trim_if_over()
    assert held_bytes() < before + 32 * MIB
    more = torch.zeros(int(HEAP_LOOK_SHARE * before) // 8)  # half of what it may grow by; all of it is in use
    after = held_bytes()
    limit.trim_if_over()
    assert held_bytes() == pytest.approx(after, abs=MIB)
    assert len(kept) + len(more) + len(shared) > 40


def test_resident_memory_is_read_as_linux_tells_it(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t 500 kB\nRssAnon:\t 300 kB\nRssFile:\t 100 kB\nRssShmem:\t 20 kB\n")
    assert resident(status) == Resident(320 * 1024, 100 * 1024, 500 * 1024)
    status.write_text("Name:\tpython\nVmHWM:\t 500 kB\n")
    assert resident(status) is None is resident(tmp_path / "none")


def test_threads_that_start_later_share_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[tuple[int, ...]] = []
    library = SimpleNamespace(mallopt=lambda *option: options.append(option), malloc_trim=None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    process_memory.share_heap()
    assert options == [(-8, 1)]  # M_ARENA_MAX of malloc.h
    del library.malloc_trim  # another C library
    process_memory.share_heap()
    assert len(options) == 1


@pytest.mark.parametrize("room_bytes", [0, MIB])
def test_with_room_a_forward_uses_freed_memory_again_until_it_does_not(
    monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """1,000 MiB are expected, 700 last, and 100 come with each forward."""
    if resident() is None:
        pytest.skip("this operating system does not tell what is resident")
    held, given = [0], [0]

    def give_back() -> None:
        held[0], given[0] = 700, given[0] + 1

    monkeypatch.setattr(process_memory, "give_back_freed", give_back)
    monkeypatch.setattr(process_memory, "resident", lambda: None)
    monkeypatch.setattr(HeapLimit, "held_bytes", lambda limit: held[0] * MIB)
    monkeypatch.setattr(process_memory, "LOOKS_APART_S", 0.0)
    limit = HeapLimit()

    def expect(more: int = 0) -> None:
        limit.set(int(1001 * MIB / (1 - HEAP_LOOK_SHARE)) + more, room_bytes=room_bytes)

    def step(begins: int, most: int) -> tuple[int, int]:
        """How often is given back at the beginning of a forward, and afterwards."""
        expect()  # every report does
        before = given[0]
        held[0] = begins
        limit.forward_begins(100 * MIB)
        middle = given[0]
        held[0] = most
        limit.trim_if_over()
        return middle - before, given[0] - middle

    assert step(850, 950) == (0, 0)
    assert step(950, 980) == (1, 0)  # now it is known what lasts
    assert step(980, 980) == (0 if room_bytes else 1, 0)
    assert step(980, 1080) == (0 if room_bytes else 1, 1)  # nothing was used again
    for _ in range(3):
        assert step(980, 980) == (1, 0)
    expect(MIB)  # of another plan
    assert step(980, 980) == (0 if room_bytes else 1, 0)
    limit.forget()


def test_the_peak_of_a_process_has_its_parts_and_code_is_shared_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Resident(own_bytes=300 * MIB, file_bytes=200 * MIB, peak_bytes=600 * MIB)
    made = optimal_search(stack_trace(SMALL), 2, hardware=HARDWARE, device_memory=PLENTY, host_budget=PLENTY).plan
    parts = {"host_bytes": 70 * MIB, "replaced_bytes": 50 * MIB, "reserve_bytes": 5 * MIB, "given_bytes": MIB}
    need = process_need(made, "cuda", held=held, **parts)
    assert need.own_bytes == (300 - 50 + 70 + 5 + 1) * MIB + need.parts["first_use"]
    assert need.peak_bytes == need.own_bytes + need.parts[LIBRARIES_PART] == sum(need.parts.values())
    assert need.machine_bytes(4) == 4 * need.own_bytes + need.parts[LIBRARIES_PART]
    # A CPU's memory is the host's: activations leave gaps in it, and are not there while a state dict is made.
    on_cpu, mapped = (process_need(made, "cpu", held=held, in_heap=heap, **parts).parts for heap in (True, False))
    assert on_cpu["device"] == made.predicted.device_peak_bytes
    assert on_cpu["heap"] > 0
    with monkeypatch.context() as few:
        few.setattr("elixir.plan.process_need.HEAP_OF_RANKS", 0.01)
        most = made.predicted.device_peak_bytes
        least, more, all_of_it = (
            process_need(made, "cpu", held=held, room_bytes=room, **parts).parts["heap"] for room in (0, 1000, most)
        )
    assert more - least == 1000 < all_of_it - least
    assert made.predicted.device_parts["activations"] <= all_of_it < most  # what a step makes and frees
    assert "heap" not in mapped
    gathered = max(chunk.numel for chunk in made.chunks) * 4  # the chunk of which a state dict is made now
    assert on_cpu.get("state_dicts", 0) < MIB + gathered
    chunks = tuple(replace(chunk, numel=64 * chunk.numel, dtype="float32") for chunk in made.chunks)
    whole, weights = replace(made, chunks=chunks), 4 * sum(chunk.numel for chunk in chunks)
    for plan, share in ((whole, 1.5), (replace(whole, world_size=1), 1)):  # of a chunk: gloo's copy, and a rank's part
        only_weights, with_states = (
            process_need(plan, "cpu", host_bytes=0, held=held, given_bytes=given).peak_bytes
            for given in (weights, weights + 1)
        )
        assert with_states - only_weights == share * 64 * gathered + 1  # weights are copied from where they lie
    assert on_cpu["collectives"] == max(chunk.weight_bytes for chunk in made.chunks)
    assert estimated_bytes("cpu", 2) > estimated_bytes("cpu", 2, running=True) > estimated_bytes("cpu", 1, running=True)


def test_a_state_dict_gathers_only_what_does_not_lie_whole_in_memory() -> None:
    plan = make_plan()
    chunk = plan.chunks[12]
    given = MASTER_BYTES * sum(each.numel for each in plan.chunks)
    peaks = []
    for home in ("host", "disk"):
        chunks = (*plan.chunks[:12], replace(chunk, state_home=home), *plan.chunks[13:])
        there = replace(plan, chunks=chunks)  # type: ignore[arg-type]
        peaks.append(process_need(there, "cpu", host_bytes=0, given_bytes=given, in_heap=False).peak_bytes)
    assert peaks[1] - peaks[0] == MASTER_BYTES * chunk.numel
