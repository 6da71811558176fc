"""Parts that searches are made of give what was recorded: rates of machines, collectives, and traces of a choice.

A commit that means to change them records them anew and says why:

    python -m tests.unit.search.test_recorded_parts

Plans tell little of a rate that none of their resources uses, or of a choice that was not taken.
"""

from __future__ import annotations

import itertools
import json
import operator
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elixir.artifact import digest
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import RateFit
from elixir.optimizer_states import MomentKind, state_size
from elixir.plan.chunk_plan import Home
from elixir.search.advise.changes import better_machine, for_memory, for_speed, more_machine
from elixir.search.budgets import CUDA_CONTEXT_BYTES
from elixir.search.problem.activation_trace import (
    FIRST_INPUT,
    SMALLEST_BYTES,
    WHOLE,
    StepUnits,
    kept_trace,
    movable_inputs,
    swapped_trace,
    with_inputs_on_host,
)
from elixir.search.problem.coarse_trace import pass_trace
from elixir.search.problem.placement import Placement, Spill
from elixir.search.propose.activation_choices import KeptResults, SwappedUnits
from elixir.search.propose.candidate import spilled
from elixir.search.propose.sizes import SearchSpace
from elixir.search.question import Question
from elixir.search.request import SearchRequest
from elixir.search.simulator.rates import Cluster, Line, Rates, all_reduce_s, gather_s
from elixir.search.whatif.explanation import Spot
from elixir.step_trace import Operation, Result, StepTrace, UnitActivations
from elixir.units import MIB
from tests.common.layered_steps import compiled_step, layered_step, some_layers
from tests.common.samples import make_hardware, make_plan
from tests.common.situations import made_up_machine
from tests.common.small_searches import small_search
from tests.unit.search.test_recorded_plans import rounded

RECORDED = Path(__file__).with_suffix(".json")
NAMES = (
    *(f"rates {seed}" for seed in range(24)),
    *(f"kept {seed}" for seed in range(12)),
    "collectives",
    *(f"spilled {seed}" for seed in range(40)),
    "words",
    "changes",
)
AMOUNTS = (0, 1, 10**6, 10**9)
KEYS = (
    *(
        "host_adam.all_ranks",
        "device_adam",
        "device_adam.bfloat16",
        "disk_read",
        "disk_write",
        "matmul.bfloat16.square",
    ),
    *("attention.bfloat16", "elementwise.bfloat16", "reduction.bfloat16", "all_gather.2", "reduce_scatter.4"),
    *("host_to_device", "device_to_host", "host_to_device.both", "device_to_host.both"),
    *("host_to_device.all_ranks", "host_to_device.both.all_ranks", "device_to_host.all_ranks"),
)
OPERATIONS = tuple(
    Operation(kind, dtype, flops, 10**7)
    for kind in ("square", "attention", "activation", "reduction", "elementwise")
    for dtype in ("bfloat16", "int64")
    for flops in (0, 10**11)
)


def measured_machine(draw: random.Random) -> HardwareProfile:
    """A machine of which some rates were measured, of Adam by the number of threads."""
    machine = made_up_machine(draw)
    some = lambda least: RateFit(draw.choice((0.0, 1e-5)), least * 10 ** draw.uniform(-0.5, 0.5), 0.1)  # noqa: E731
    least = {"host_adam": 3e9, "device_adam": 3e10, "disk": 2e9, "matmul": 1e14, "attention": 8e13, "elementwise": 1e12}
    fits = dict(machine.fits)
    for key in KEYS:
        if draw.random() < 0.4:
            family = re.sub("_(read|write).*", "", key.split(".")[0])
            fits[key] = some(least.get(family, 1e10))
    if draw.random() < 0.6:
        for threads, ending in itertools.product((1, 4, 16), ("", ".bfloat16", ".all_ranks", ".bfloat16.all_ranks")):
            if not ending or draw.random() < 0.4:
                fits[f"host_adam.{threads}{ending}"] = some(1e9 * threads**0.7)
    attention = draw.choice((None, 0.4))
    return replace(machine, fits=fits, sustained_attention_share=attention)


def line(found: Line) -> list[float]:
    return found(AMOUNTS).tolist()  # type: ignore[no-any-return]


def rates_of(draw: random.Random) -> list[Any]:
    """All rates of a machine, for ranks and replicas, with moments of each kind."""
    machine, found = measured_machine(draw), []
    layers = some_layers(draw, "plain")
    trace = replace(layered_step(layers), operations=OPERATIONS)
    accesses = tuple(
        replace(each, operations=tuple(draw.choices(range(len(OPERATIONS)), k=4)), parts=draw.choice(((1, 3), ())))
        for each in trace.accesses
    )
    trace = replace(trace, accesses=accesses)
    moments: tuple[MomentKind, ...] = ("float32", "bfloat16", "8bit")
    for kind, (ranks, replicas, on_host) in itertools.product(
        moments, ((1, 1, 1), (2, 1, 2), (4, 1, 2), (8, 2, 8), (8, 4, 2), (6, 3, 4))
    ):
        rates = Rates(machine, "bfloat16", ranks, on_host, moments=kind, replicas=replicas)
        found.append(
            [
                *map(line, (rates.fetch, rates.offload, rates.host_adam, rates.device_adam, rates.device_memory)),
                *map(line, (rates.host_memory, rates.disk_read, rates.disk_write)),
                *(rates.fetch_slowdown, rates.offload_slowdown, rates.contention, rates.host_threads, rates.number_s),
                *(rates.device_step(AMOUNTS, wide).tolist() for wide in (True, False, [True, False, True, False])),
                *(rates.host_step(AMOUNTS, moved).tolist() for moved in (0, 10**9)),
                *(rates.matrix_step(AMOUNTS, on_host=host).tolist() for host in (True, False)),
                *(each(AMOUNTS).tolist() for each in (rates.gather, rates.reduce, rates.sum_replicas)),
                *(each(AMOUNTS).tolist() for each in (rates.device_copy, rates.host_add)),
                *(rates.orthogonal_s([(512, 2048), (64, 64)]), rates.accesses_s(trace).tolist()),
                rates.operations_s(trace).tolist(),
            ]
        )
    return found


def kept_of(draw: random.Random) -> list[Any]:
    """The step in which units keep this or that, move it, or have other budgets, and in which batches pass them."""
    plain = shaken(layered_step(some_layers(draw, "plain")), draw)
    units = tuple(replace(each, fetch=draw.choice(("either", "parameters"))) for each in plain.units)
    plain = replace(plain, step=replace(plain.step, units=units))
    names = [name for forward in plain.forwards for name in forward.units]
    made = [Result(each.operator, each.occurrence) for forward in plain.forwards for each in forward.operators]
    found: list[StepTrace] = []
    for _ in range(8):
        some = draw.sample(names, draw.randint(0, len(names)))
        keep = [draw.choice((None, tuple(draw.sample(made, draw.randint(0, len(made)))))) for _ in some]
        ways = [UnitActivations(*each) for each in zip(some, keep, strict=True)]
        step = StepUnits(plain)
        swap = [draw.random() < 0.7 and step.able(each.unit) for each in ways]
        ways = [
            replace(each, swap=WHOLE if each.keep is None else FIRST_INPUT) if moves else each
            for each, moves in zip(ways, swap, strict=True)
        ]
        found.append(swapped_trace(kept_trace(plain, ways), step))
    with pytest.raises(InputError, match="does not say what 'x' makes"):
        kept_trace(plain, [UnitActivations("x", ())])
    with pytest.raises(InputError, match="does not say what"):
        kept_trace(replace(plain, forwards=()), [UnitActivations(names[0], ())])
    for nbytes in (SMALLEST_BYTES, SMALLEST_BYTES - 1):
        few = replace(some_layers(draw, "checkpointed"), input_bytes=nbytes)
        found.append(with_inputs_on_host(layered_step(few), movable_inputs(layered_step(few))))
    compiled = compiled_step(replace(some_layers(draw, "compiled"), uses=draw.choice((1, 2))))
    found += [
        kept_trace(compiled, [UnitActivations(u.name, draw.choice((None, ()))) for u in compiled.units])
        for _ in range(6)
    ]
    again = replace(layered_step(some_layers(draw, "checkpointed"), copies=True), input_bytes=3 * MIB)
    moved = with_inputs_on_host(again, movable_inputs(again)[draw.randint(0, 1) :])
    last = f"layers.{len(again.units) - 1}"
    inside = tuple(
        replace(access, module=last) if access.phase == "backward" and not access.module else access
        for access in moved.accesses
    )
    pinned = tuple(replace(each, pin_until=len(inside) - 1) for each in again.accesses)
    turn = next(at for at, access in enumerate(again.accesses) if access.phase != "forward")
    bare = (*inside[:turn], replace(inside[turn], parameters=()), *inside[turn + 1 :])
    ends = (*again.accesses[: turn - 1], replace(again.accesses[turn - 1], module=last), *again.accesses[turn:])
    mixed = (*bare[: turn - 1], replace(bare[turn - 1], parameters=()), *again.accesses[turn:])
    steps = (again, moved, *(replace(moved, accesses=each) for each in (inside, pinned, bare, ends, mixed)))
    found += [pass_trace(each, size) for each in steps for size in (1, 2, 3)]
    more = [list(StepUnits(compiled).input_bytes)]
    return [
        more,
        moved_of(plain),
        KeptResults(compiled, Rates(make_hardware(), "bfloat16", 1, 1)).changes,
        *([each.accesses, each.parameters, each.transfers, each.operations, each.step] for each in found),
        *([each.input_bytes, each.host_peak_bytes, each.pass_size] for each in found),
    ]


def moved_of(trace: StepTrace) -> list[Any]:
    """Fillings of a device with what units keep, and ways to move it over slow links, whatever room there is."""
    links = {"host_to_device_bytes_per_s": 1.2e9, "device_to_host_bytes_per_s": 1e9}
    rates = Rates(replace(make_hardware(), **links), "bfloat16", 1, 1)  # type: ignore[arg-type]
    fillings = KeptResults(trace, rates)
    units, compute_s = SwappedUnits(fillings, rates), float(rates.accesses_s(fillings.filled(0)).sum())
    found: list[Any] = [
        fillings.changes,
        list(itertools.accumulate((each.saved_s for each in fillings.changes), initial=0.0)),
    ]
    for spare, host in itertools.product((0, 2**25, 2**27, 2**31), (0, 2**24, 2**26, 2**28, 2**40)):
        ways = list(units.ways(spare, host, compute_s))
        found.append([[way, units.activations(way)] for way in ways])
    return found


def shaken(trace: StepTrace, draw: random.Random) -> StepTrace:
    """The trace with other bytes, and with results that units make at other moments."""
    accesses = tuple(
        replace(
            access,
            live_bytes=access.live_bytes + draw.randint(0, 2**28),
            kept_bytes=access.kept_bytes + draw.randint(0, 2**26) * (access.phase == "forward"),
            pin_until=min(access.pin_until + draw.choice((0, 0, 1, 3)), len(trace.accesses) - 1),
        )
        for access in trace.accesses
    )
    forwards = tuple(
        replace(
            forward,
            operators=tuple(
                replace(each, access=draw.randint(0, 3), saved_bytes=draw.choice((each.saved_bytes, SMALLEST_BYTES)))
                for each in forward.operators * 2
            ),
            again=draw.randint(1, 4),
            accesses_again=draw.randint(1, 2),
        )
        for forward in trace.forwards
    )
    return replace(trace, accesses=accesses, forwards=forwards)


def collectives() -> list[Any]:
    """Gathers and sums among ranks of one machine and of several."""
    found: list[Any] = []
    for ranks, of_host, network, latency in itertools.product((1, 2, 5, 8, 16), (1, 2, 4, 8), (1e9, 1e12), (0, 3e-6)):
        cluster = Cluster(ranks, of_host, 1e11, network, call_s=8e-6, host_step_s=latency, network_step_s=9e-6)
        found.append([[gather_s(n, cluster), all_reduce_s(n, cluster)] for n in (0, 1, 10**8)])
    return found


def spilled_of(draw: random.Random) -> list[Any]:
    """The states that leave for the disk, with budgets that are met exactly, and with one byte less."""
    search = small_search(draw.randrange(1000), most_chunks=16)
    setting = replace(search.space.setting, spill=Spill(1, draw.choice((1 << 50, 1 << 50, 300 * MIB))))
    # Some parameters get no gradient, so that no update needs their states.
    parameters = tuple(
        replace(each, grad_access=draw.choice((each.grad_access, each.grad_access, None)))
        for each in search.space.trace.parameters
    )
    trace = replace(search.space.trace, parameters=parameters)
    space = SearchSpace(trace, search.space.hardware, setting)
    model = space.model(min(search.sizes))
    homes = (Home.HOST, Home.HOST, Home.HOST, Home.DEVICE)
    placement = Placement(tuple(draw.choice(homes) for _ in model.work.chunks))
    whole, lacking, found = sum(model.host_parts(placement).values()), 0, list[Any]()
    for _ in range(8):
        result = spilled(model, placement, host_bytes=whole - lacking)
        saved = whole - sum(model.host_parts(result).values())
        found.append([lacking, saved, sorted(result.state_on_disk)])
        used = model.need(result, 0).disk_bytes
        for disk in (used, used - 1):
            exact = replace(setting, spill=Spill(1, disk))
            there = SearchSpace(space.trace, space.hardware, exact).model(min(search.sizes))
            found.append(sorted(spilled(there, placement, host_bytes=whole - lacking).state_on_disk))
        lacking = saved if saved > lacking else lacking + 1 + draw.choice((0, 0, MIB))
    return found


def words_of(_: random.Random) -> list[Any]:
    """The words of homes, and the bytes of chunks in a checkpoint."""
    spots = [Spot.of(home, trainable) for home in Home for trainable in (True, False)]
    chunks = [
        replace(chunk, dtype=dtype) for chunk in make_plan(3, frozen=0.4).chunks for dtype in ("float32", "bfloat16")
    ]
    kinds = [state_size("Adam", moments) for moments in ("float32", "bfloat16", "8bit")]
    saved = [chunk.saved_bytes(ranks, kind) for chunk in chunks for ranks in (1, 4) for kind in kinds]
    return [[[str(each), each.short] for each in spots], saved]


def changes_of(draw: random.Random) -> list[Any]:
    """All that a user may change, of steps of which some changes are made already, and with memory that is just enough."""
    found: list[Any] = []
    layers = some_layers(draw, "plain")
    machine = replace(measured_machine(draw), devices_per_host=4, device_kind="cuda", compute_capability=(9, 0))
    forms = (None, "none", "non-reentrant", "non-reentrant:1")
    for trained, form, samples, modules in itertools.product((True, False), forms, (None, 1, 2, 3), range(4)):
        whole = layered_step(replace(layers, form=draw.choice(("plain", "compiled"))), trained=trained)
        names = tuple(f"layers.{number}" for number in range(modules))
        kept = draw.choice(((), (UnitActivations("layers.0", ()),)))
        fused = draw.random() < 0.3
        step = replace(whole.step, checkpoint=form, samples=samples, fused_kernels=fused, activations=kept)
        forwards = draw.choice((whole.forwards, ()))
        trace = replace(whole, step=step, checkpointed_modules=names, forwards=forwards)
        ranks = draw.choice((1, 2, 4))
        request = SearchRequest(
            world_size=ranks,
            moments=draw.choice(("float32", "8bit")),
            accumulation=draw.choice((2, 4)),
            pass_size=draw.choice((1, 2)),
            placement=draw.choice(("auto", "cpu")),
            replicas=draw.choice((1, "auto", ranks // 2 or 1)),
        )
        question = Question(trace, machine, request)
        some = [*for_speed(question), *for_memory(question)]
        found += [some, *map(operator.add, some, some[1:])]
        found += [each.applied(question).request for each in some if not each.step and each.kinds != ("activations",)]
    all_bytes = machine.device_memory_bytes - CUDA_CONTEXT_BYTES
    for ranks, network, more in itertools.product((1, 2, 3, 4), (None, 1e9), (0, 1)):
        there = replace(machine, network_bytes_per_s=network)
        question = Question(layered_step(layers), there, SearchRequest(world_size=ranks))
        found += [list(more_machine(question, "device", "1GiB", all_bytes + more))]
        found += [list(more_machine(question, "host", "1GiB", all_bytes + more))]
    for resident, ranks in itertools.product((0.3, 0.5, 1.0), (1, 2)):
        plan = make_plan(4, resident=resident, world_size=ranks)
        alone = replace(plan, predicted=replace(plan.predicted, host_parts={}, host_peak_bytes=0))
        homes: list[dict[str, Any]] = [
            {"state_home": "device"} if chunk.resident else {"state_home": chunk.weight_home, "trainable": False}
            for chunk in plan.chunks
        ]
        chunks = (replace(chunk, **home) for chunk, home in zip(plan.chunks, homes, strict=True))
        frozen = replace(plan, chunks=tuple(chunks))
        on_disk = replace(plan, chunks=(*plan.chunks[:-1], replace(plan.chunks[-1], state_home="disk")))
        question = Question(layered_step(layers), machine, SearchRequest(world_size=ranks))
        for one in (plan, alone, frozen, on_disk):
            found += [[change.action, change.hardware] for change in better_machine(one, question)]
        found += [change.applied(question) for change in better_machine(plan, question)]
    return [str(each) for each in found]


WAYS = {
    "changes": changes_of,
    "rates": rates_of,
    "kept": kept_of,
    "spilled": spilled_of,
    "words": words_of,
}


def outcome(name: str) -> str:
    """The digest of one family of results."""
    family = name.partition(" ")[0]
    draw = random.Random(name)
    if family == "collectives":
        return digest(rounded(collectives()))
    return digest(rounded(WAYS[family](draw)))


@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_as_recorded(name: str) -> None:
    assert outcome(name) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    rows = [f" {json.dumps(name)}: {json.dumps(outcome(name))}" for name in NAMES]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
