"""Whatever touches the same memory is ordered by streams, events and waits: on the pretended device, which writes down
all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir.access import activations as swapping
from elixir.chunk.gradients.chunk_gradient import GradientBlocks, OpenChunk
from elixir.chunk.lanes import Lane, StreamLane
from elixir.chunk.memory import Arena, Memory, Ticket
from elixir.chunk.weight_files import FileShard
from elixir.models.step import default_input
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import inside
from tests.common.early import HOMES, updating_early
from tests.common.gpu import needs_pretended_gpu
from tests.common.in_files import frozen_model, plan_in_files, save_frozen
from tests.common.parity import MODES, Case, case, hf_loss, make_plan, mixed, take_step
from tests.cuda_emulator import install
from tests.cuda_emulator.races import HostAccesses, Races, watching
from tests.unit.wrapper import test_swapping
from tests.unit.wrapper.step.test_muon import optimizers as optimizers_with_muon
from tests.unit.wrapper.step.test_overlap import states_on_host

pytestmark = needs_pretended_gpu

Between = Callable[[ElixirModule, ElixirOptimizer, Case], object]
"""Do what a caller does after a step."""


def train(
    it: Case, plan: Plan, *, steps: int = 3, batches: int = 1, max_norm: float = 1.0, between: Between | None = None
) -> None:
    module = ElixirModule(it.model, plan, device="cuda")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(it.model.parameters(), lr=1e-3), max_norm=max_norm)
    for _ in range(steps):
        for _ in range(batches):
            optimizer.backward(it.loss(module, it.inp))
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(module, optimizer, it)
    module.close()


def on_cuda(name: str, checkpoint: str = "none") -> Case:
    it = case(name, checkpoint)
    return replace(it, inp={key: value.cuda() for key, value in it.inp.items()})


def plan_of(it: Case, mode: str, **options: Any) -> Plan:
    if mode == "states":
        return states_on_host(make_plan(it, "resident", **options))
    return make_plan(it, mode, **options)


_EVERY = [
    (mode, batches, dtype)
    for mode in (*MODES, "states")
    for batches in (1, 2)
    for dtype in (None, "bfloat16", "float16")
]
_SAMPLE = [
    ("streamed", 1, None),
    ("streamed", 2, "bfloat16"),
    ("mixed", 2, None),
    ("mixed", 1, "float16"),
    ("states", 2, "bfloat16"),
    ("resident", 1, "bfloat16"),
]


@pytest.mark.parametrize(
    ("mode", "batches", "dtype"),
    [it if it in _SAMPLE else pytest.param(*it, marks=pytest.mark.slow) for it in _EVERY],
)
def test_training(mode: str, batches: int, dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    it = on_cuda("opt")
    with watching(monkeypatch) as races:
        train(it, replace(plan_of(it, mode, unified_dtype=dtype), accumulation=batches), batches=batches)
    assert not races.found


@pytest.mark.parametrize(
    ("name", "checkpoint", "mode"),
    [
        ("t5", "reentrant", "mixed"),
        ("mixtral", "none", "streamed"),
        ("albert", "none", "streamed"),
        ("cnn", "none", "mixed"),
        ("llama", "non-reentrant", "streamed"),
    ],
)
def test_models(name: str, checkpoint: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = on_cuda(name, checkpoint)
    with watching(monkeypatch) as races:
        train(it, plan_of(it, mode), steps=2)
    assert not races.found


@pytest.mark.parametrize(("swapped", "mode"), [("inputs", "mixed"), ("all that is saved", "streamed")])
def test_activations_that_move(swapped: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "SMALLEST_BYTES", 256)
    plan = test_swapping.plan_of(test_swapping.traced(case("llama"), swapped), mode)
    with watching(monkeypatch) as races:
        train(on_cuda("llama"), plan, batches=2)
    assert not races.found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("max_norm", [1e9, 1e-3])
@pytest.mark.parametrize("homes", HOMES)
def test_new_states_in_backward(homes: str, max_norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    it = on_cuda("opt")
    with watching(monkeypatch) as races:
        train(it, updating_early(it, homes, unified_dtype="bfloat16"), steps=4, max_norm=max_norm)
    assert not races.found


@pytest.mark.parametrize("mode", ["streamed", "mixed"])
def test_matrices_share_a_room(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the host and compute both make matrices orthogonal in it."""
    it = on_cuda("llama")
    plan = plan_of(it, mode, optimizer_type="Muon")
    with watching(monkeypatch) as races:
        module = ElixirModule(it.model, plan, device="cuda")
        optimizers = [ElixirOptimizer(module, each) for each in optimizers_with_muon(it.model, plan.matrices)]
        for _ in range(2):
            optimizers[0].backward(it.loss(module, it.inp))
            for each in optimizers:
                each.step()
            for each in optimizers:
                each.zero_grad()
        module.close()
    assert not races.found


@pytest.mark.parametrize("moments", ["bfloat16", "8bit"])
def test_moments(moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = on_cuda("opt")
    with watching(monkeypatch) as races:
        train(it, plan_of(it, "mixed", moments=moments), steps=2)
    assert not races.found


def evaluate(module: ElixirModule, optimizer: ElixirOptimizer, it: Case) -> None:
    with torch.no_grad():
        it.loss(module, it.inp)


def save_and_load(module: ElixirModule, optimizer: ElixirOptimizer, it: Case) -> None:
    module.load_state_dict(module.state_dict())


def write(module: ElixirModule, optimizer: ElixirOptimizer, it: Case) -> None:
    some = list(module.parameters())[::4]
    with module.gathered(some, write=True), torch.no_grad():
        for parameter in some:
            parameter.mul_(0.99)


def drop(module: ElixirModule, optimizer: ElixirOptimizer, it: Case) -> None:
    optimizer.backward(it.loss(module, it.inp))
    for parameter in list(module.parameters())[::3]:
        parameter.grad = None


def move(module: ElixirModule, optimizer: ElixirOptimizer, it: Case) -> None:
    module.rehome(mixed(module.plan))


_CALLS = (evaluate, save_and_load, write, drop, move)


@pytest.mark.parametrize(
    ("mode", "between"),
    [
        pytest.param(mode, call, id=f"{mode}-{call.__name__}", marks=[] if (i + j) % 2 else [pytest.mark.slow])
        for i, mode in enumerate(("streamed", "mixed"))
        for j, call in enumerate(_CALLS)
    ],
)
def test_what_callers_do_between_steps(mode: str, between: Between, monkeypatch: pytest.MonkeyPatch) -> None:
    it = on_cuda("opt")
    with watching(monkeypatch) as races:
        train(it, plan_of(it, mode, unified_dtype="bfloat16"), between=between)
    assert not races.found


@pytest.mark.parametrize("every", [1, 2])
def test_frozen_weights_in_files(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen_model()
    inp = default_input(model, batch=2, seq=16)
    plan = plan_in_files(model, inp, every=every)
    inp = {key: value.cuda() for key, value in inp.items()}
    read = FileShard.read_into

    def watched(shard: FileShard, memory: torch.Tensor) -> None:
        """Writes down which memory the operating system fills from a file: no operator of torch does."""
        read(shard, memory)
        install().note("where", 0, [], [], "from the file")
        install().note("host", 0, [], [(memory.data_ptr(), memory.data_ptr() + memory.nbytes)], "pread")

    monkeypatch.setattr(FileShard, "read_into", watched)
    with watching(monkeypatch) as races:
        module = ElixirModule(model, plan, device="cuda", weights=save_frozen(model, tmp_path), strict=False)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(trained), max_norm=1.0)
        for _ in range(3):
            take_step(optimizer, hf_loss(module, inp))
        report = module.last_report
        module.close()
    assert report is not None
    assert report.observed["disk_read"] == report.predicted["disk_read"] > 0
    assert not races.found


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("mode", [*MODES, "states"])
def test_forward_and_backward_are_submitted_without_waiting(
    mode: str, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the device has still to do, the thread that gives it work goes on."""
    device, it = install(), on_cuda("opt")
    far_behind(monkeypatch)
    plan = replace(plan_of(it, mode, unified_dtype="bfloat16"), accumulation=batches)
    module = ElixirModule(it.model, plan, device="cuda")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()), max_norm=1.0)
    for step in range(3):
        for batch in range(batches):
            device.start_log()
            with HostAccesses():
                optimizer.backward(it.loss(module, it.inp))
            log = device.stop_log()
            # Lanes' threads wait for what they build on; the engine's and this one submit operators.
            submitting = {entry[2] for entry in log if entry[0] == "operator"} | {threading.get_ident()}
            waits = [e for e in log if e[0].startswith("synchronize") and e[2] in submitting - issuers(log)]
            assert not waits, (step, batch, waits)
        waits = waits_of_step(optimizer)
        # One number, the norm, for the host to multiply by; none where nobody but the device needs it, or the host has
        # summed.
        assert len(waits) <= (mode != "resident" and (batches == 1 or mode == "mixed")), (step, waits)


def far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the device has been given is done yet: code that needs it has to wait."""
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: False)


def waits_of_step(optimizer: ElixirOptimizer) -> list[tuple[Any, ...]]:
    """Places where this thread waits for the device, from the step to the next forward."""
    device = install()
    device.start_log()
    optimizer.step()
    optimizer.zero_grad()
    log = device.stop_log()
    return [entry for entry in log if entry[0].startswith("synchronize") and entry[2] == threading.get_ident()]


@pytest.mark.parametrize(("mode", "moments"), [(m, "float32") for m in (*MODES, "states")] + [("mixed", "bfloat16")])
def test_a_step_without_clipping_waits_for_nothing(mode: str, moments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    it = on_cuda("opt")
    far_behind(monkeypatch)
    module = ElixirModule(it.model, plan_of(it, mode, unified_dtype="bfloat16", moments=moments), device="cuda")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
    for step in range(3):
        optimizer.backward(it.loss(module, it.inp))
        assert not waits_of_step(optimizer), step


def tickets_of(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> list[Ticket]:
    """A list that fills with the tickets of what a lane is given."""
    submit, found = lane.submit, list[Ticket]()

    def noted(work: Any, **options: Any) -> Ticket:
        found.append(submit(work, **options))
        return found[-1]

    monkeypatch.setattr(lane, "submit", noted)
    return found


def test_gradients_of_a_later_batch_are_copied_while_others_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through two buffers that are there before the first backward; each is written again only after its sum."""
    it, gate = on_cuda("opt"), threading.Event()
    plan = replace(plan_of(it, "streamed"), accumulation=2)
    module = ElixirModule(it.model, plan, device="cuda")
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
    before = inside.bytes_by_kind(module, "host")["gradients"]
    shards = [chunk.weight_bytes for chunk in plan.chunks if chunk.reduce_order is not None]
    assert len(shards) > 2
    assert before == sum(shards) + 2 * max(shards)
    optimizer.backward(it.loss(module, it.inp))
    inside.lane(module, "host_adam").submit(gate.wait)
    gone, added = (tickets_of(inside.lane(module, name), monkeypatch) for name in ("offload", "host_adam"))
    # In a thread: once both buffers are full, backward waits for a gradient block that has left.
    backward = threading.Thread(target=optimizer.backward, args=(it.loss(module, it.inp),))
    backward.start()
    try:
        until = time.monotonic() + 60
        while len(added) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        for ticket in gone[:2]:
            ticket.synchronize()
        assert not any(ticket.done() for ticket in (*gone[2:], *added))
    finally:
        gate.set()
        backward.join()
    assert len(gone) == len(added) == len(shards)
    optimizer.step()
    module.settle()
    assert inside.bytes_by_kind(module, "host")["gradients"] == before
    module.close()


def issuers(log: list[tuple[Any, ...]]) -> set[int]:
    """Threads that issue nothing but copies: of lanes."""
    by_thread: dict[int, set[str]] = {}
    for kind, name, thread, *_ in log:
        if kind == "operator":
            by_thread.setdefault(thread, set()).add(name)
    return {thread for thread, names in by_thread.items() if all(name.startswith("copy_") for name in names)}


def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: two streams, one buffer, with and without an event between them."""
    for waits in (True, False):
        with watching(monkeypatch) as races:
            buffer, other = torch.zeros(100, device="cuda"), torch.cuda.Stream()
            if waits:
                other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                buffer.add_(1.0)
            if waits:
                torch.cuda.current_stream().wait_stream(other)
            del buffer
        assert bool(races.found) is not waits


def test_memory_that_another_stream_still_reads_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: freed while a stream that was not recorded reads it."""

    def read(recorded: bool) -> Races:
        with watching(monkeypatch) as races:
            buffer, other = torch.zeros(100, device="cuda"), torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                total = buffer.sum()
            if recorded:
                buffer.record_stream(other)
            del buffer
            torch.cuda.current_stream().wait_stream(other)
            del total
        return races

    assert not read(recorded=True).found
    assert read(recorded=False).found


def test_an_adopted_gradient_is_not_free_for_the_stream_that_made_it_while_a_lane_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node that takes a gradient may be of an older graph, and then runs on that one's stream."""
    device = torch.device("cuda", 0)
    lane = StreamLane(device)
    for takes in ("give_back", "wait_for_last"):
        arena, older = Arena(device), torch.cuda.Stream()
        blocks = GradientBlocks(arena, 0, 64)
        with watching(monkeypatch) as races:
            gradient, home = torch.ones(100, device="cuda"), torch.empty(100, pin_memory=True)
            older.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(older):
                memory = Memory(gradient.view(torch.uint8), arena.count, "device", "gradient_blocks")
                ticket = lane.submit(lambda to=home, of=gradient: to.copy_(of, non_blocking=True), reads=[memory])
                blocks.leave(OpenChunk(gradient, memory, 0, is_extra=True))
                del memory
                (blocks.reclaim_extra if takes == "give_back" else blocks.wait_for_last)()
            del gradient
            torch.ones(100, device="cuda")
            lane.close() if takes == "wait_for_last" else ticket.synchronize()
        assert not races.found
