"""A plan that exists can be run: any other is refused with the name of the field that is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from elixir.errors import ArtifactError
from elixir.hardware.scenario import Scenario
from elixir.optimizer_states import BLOCK_NUMEL, moments_size
from elixir.plan.chunk_plan import (
    PARAM_ALIGNMENT_BYTES,
    ParamSlot,
    Weight,
    WeightFile,
    alignment_bytes,
    packed_text,
)
from elixir.plan.plan import Plan, same_packing
from elixir.plan.prediction import Judgement
from elixir.step_trace import INPUT, SAVED, Form, Result, Unit, UnitActivations
from tests.common.samples import make_plan

EIGHT_BITS: dict[str, Any] = {"moments": "8bit", "state_size": moments_size("8bit")}
IN_FILES: dict[str, Any] = {"weight_home": "files", "state_home": "files"}
KEEPS_ALL = UnitActivations("layers.0", None)
ON_DEVICE: dict[str, Any] = {"weight_home": "device", "state_home": "device"}
STREAMED = 12
"""A chunk of the sample that is streamed from the host; the first eight are resident."""


def with_chunk(plan: Plan, index: int, **changes: Any) -> Plan:
    """The plan with one chunk changed."""
    chunks = list(plan.chunks)
    chunks[index] = dataclasses.replace(chunks[index], **changes)
    return dataclasses.replace(plan, chunks=tuple(chunks))


def with_use(plan: Plan, index: int, **changes: Any) -> Plan:
    """The plan with one entry of its order changed."""
    order = list(plan.order)
    order[index] = dataclasses.replace(order[index], **changes)
    return dataclasses.replace(plan, order=tuple(order))


def with_prediction(plan: Plan, **changes: Any) -> Plan:
    """The plan with its prediction changed."""
    return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, **changes))


def with_activations(plan: Plan, *activations: UnitActivations, form: Form = "plain") -> Plan:
    """The plan of a step with one unit, and these activations."""
    step = dataclasses.replace(plan.step, units=(Unit("layers.0", form, "Layer", "one"),), activations=activations)
    return dataclasses.replace(plan, step=step)


def slots(*places: tuple[str, int, int]) -> tuple[ParamSlot, ...]:
    """Parameter slots by name, offset, numel."""
    return tuple(ParamSlot(*place) for place in places)


BAD: list[tuple[str, Callable[[Plan], Plan]]] = [
    ("world_size", lambda plan: dataclasses.replace(plan, world_size=0)),
    ("world_size", lambda plan: dataclasses.replace(plan, world_size=-8)),
    ("dtype", lambda plan: dataclasses.replace(plan, dtype="bf17")),
    *(
        (name, lambda plan, name=name: dataclasses.replace(plan, **{name: -1}))  # type: ignore[misc]
        for name in (
            "block_numel",
            "block_bytes",
            "block_count",
            "prefetch_depth",
            "grad_block_count",
            "device_budget_bytes",
            "host_budget_bytes",
            "disk_budget_bytes",
            "device_reserve_bytes",
            "host_reserve_bytes",
            "reserve_bytes",
            "start_up_s",
            "host_threads",
            "pass_size",
            "accumulation",
        )
    ),
    *(
        (name, lambda plan, name=name: dataclasses.replace(plan, **{name: 0}))  # type: ignore[misc]
        for name in ("host_threads", "pass_size", "accumulation")
    ),
    ("nbytes", lambda plan: dataclasses.replace(plan, weight_files=(WeightFile("a.safetensors", -1, ""),))),
    # Chunk 0 of the sample has 3 * 2**24 elements, which 9 ranks cannot share evenly.
    (r"chunks\[0\].numel", lambda plan: dataclasses.replace(plan, world_size=9)),
    ("numel", lambda plan: with_chunk(plan, STREAMED, numel=0, parameters=())),
    ("dtype", lambda plan: with_chunk(plan, STREAMED, dtype="bf17")),
    ("block_bytes", lambda plan: with_chunk(plan, STREAMED, numel=2 * plan.chunks[STREAMED].numel)),
    ("block_bytes", lambda plan: with_chunk(plan, STREAMED, dtype="float32")),
    (r"parameters\[0\].offset", lambda plan: with_chunk(plan, STREAMED, parameters=slots(("w", 255, 1)))),
    (
        r"parameters\[1\].offset",
        lambda plan: with_chunk(plan, STREAMED, parameters=slots(("v", 0, 257), ("w", 256, 1))),
    ),
    (r"parameters\[0\].offset", lambda plan: with_chunk(plan, STREAMED, parameters=slots(("w", 256, 2**24)))),
    (r"chunks\[0\].numel", lambda plan: dataclasses.replace(plan, world_size=2**17)),
    ("alignment_bytes", lambda plan: dataclasses.replace(plan, alignment_bytes=0)),
    ("alignment_bytes", lambda plan: dataclasses.replace(plan, alignment_bytes=256)),
    (
        r"chunks\[12\].parameters\[0\].offset",
        lambda plan: dataclasses.replace(
            with_chunk(plan, STREAMED, parameters=slots(("w", 256, 1))), alignment_bytes=1024
        ),
    ),
    ("alignment_bytes", lambda plan: dataclasses.replace(with_chunk(plan, 0, dtype="float32"), **EIGHT_BITS)),
    ("already", lambda plan: with_chunk(plan, STREAMED, parameters=plan.chunks[1].parameters)),
    ("already", lambda plan: with_chunk(plan, STREAMED, parameters=slots(("w", 0, 1), ("w", 256, 1)))),
    ("offset", lambda plan: with_chunk(plan, STREAMED, parameters=slots(("w", -256, 1)))),
    ("numel", lambda plan: with_chunk(plan, STREAMED, parameters=slots(("w", 0, -1)))),
    ("weight_home", lambda plan: with_chunk(plan, STREAMED, resident=True)),
    ("weight_home", lambda plan: with_chunk(plan, STREAMED, state_home="device")),
    ("state_home", lambda plan: with_chunk(plan, STREAMED, trainable=False, weight_home="device", state_home="host")),
    (r"order\[1\].chunks", lambda plan: with_use(plan, 1, chunks=(99,))),
    (r"order\[1\].chunks", lambda plan: with_use(plan, 1, chunks=(-1,))),
    (r"order\[1\].pin_until", lambda plan: with_use(plan, 1, pin_until=0)),
    (r"order\[1\].pin_until", lambda plan: with_use(plan, 1, pin_until=len(plan.order))),
    ("block_count", lambda plan: dataclasses.replace(plan, block_count=2)),
    ("block_count", lambda plan: with_use(plan, 8, chunks=tuple(range(8, 17)))),
    ("block_count", lambda plan: with_use(plan, 8, pin_until=len(plan.order) - 1, chunks=tuple(range(8, 15)))),
    ("device_parts", lambda plan: with_prediction(plan, device_peak_bytes=1)),
    ("host_parts", lambda plan: with_prediction(plan, host_parts={})),
    ("host_parts.weights", lambda plan: with_prediction(plan, host_parts={"weights": -1}, host_peak_bytes=-1)),
    ("moved_bytes", lambda plan: with_prediction(plan, moved_bytes={"network": 0})),
    (
        "moved_bytes.network",
        lambda plan: with_prediction(plan, moved_bytes=plan.predicted.moved_bytes | {"network": -1}),
    ),
    ("loads", lambda plan: with_prediction(plan, loads=-1)),
    ("hits", lambda plan: with_prediction(plan, hits=-1)),
    ("seconds", lambda plan: with_prediction(plan, seconds={"forward": 1.0})),
    ("seconds.total", lambda plan: with_prediction(plan, seconds={"total": -1.0})),
    ("judgements.best_s", lambda plan: with_prediction(plan, judgements=(Judgement(Scenario(), 1.0, -1.0),))),
    ("'update' may be 'early' for states on the host", lambda plan: with_chunk(plan, 0, update="early")),
    (
        "'update' may be 'early' for trainable chunks",
        lambda plan: with_chunk(plan, STREAMED, update="early", grad_entry=None),
    ),
    ("'weight_home' may be 'files' for a streamed", lambda plan: with_chunk(plan, STREAMED, weight_home="files")),
    ("'weight_home' may be 'files' for frozen chunks", lambda plan: with_chunk(plan, STREAMED, **IN_FILES)),
    (
        "'frozen_weights' must be 'files'",
        lambda plan: with_chunk(plan, STREAMED, trainable=False, grad_entry=None, **IN_FILES),
    ),
    (
        "'matrices' is for trainable chunks",
        lambda plan: with_chunk(plan, STREAMED, update="early", grad_entry=0, matrices=((1, 1),)),
    ),
    ("'matrices' must have rows and columns", lambda plan: with_chunk(plan, STREAMED, matrices=((1, 1),))),
    (
        "'optimizer' must name an optimizer of whole matrices",
        lambda plan: with_chunk(
            plan, STREAMED, matrices=tuple((1, slot.numel) for slot in plan.chunks[STREAMED].parameters)
        ),
    ),
    ("'pass_size' above 1 takes units .*, found 2 and none", lambda plan: dataclasses.replace(plan, pass_size=2)),
    (
        "'pass_size' above 1 takes units that are made again",
        lambda plan: dataclasses.replace(
            plan,
            pass_size=2,
            step=dataclasses.replace(
                plan.step,
                units=(Unit("layers.0", "checkpointed", "Layer", "one"),),
                activations=(UnitActivations("layers.0", (Result("aten.mm.default", 0),)),),
            ),
        ),
    ),
    *(
        (
            f"field '{field}' of unit 'layers.0' must name {expected}",
            lambda plan, activations=activations: with_activations(plan, activations),  # type: ignore[misc]
        )
        for field, expected, activations in (
            ("keep", "results of operators", UnitActivations("layers.0", (Result("aten.mm.default", -1),))),
            ("keep", "results of operators", UnitActivations("layers.0", (Result(INPUT, 0),))),
            ("keep", "results of operators", UnitActivations("layers.0", (Result(SAVED, 0),))),
            ("swap", f"'{INPUT}'", UnitActivations("layers.0", (), (Result("aten.mm.default", 0),))),
            ("swap", f"'{INPUT}'", UnitActivations("layers.0", (), (Result(SAVED, 0),))),
            ("swap", f"'{SAVED}'", UnitActivations("layers.0", None, (Result(INPUT, 0),))),
        )
    ),
    ("'layers.0' twice", lambda plan: with_activations(plan, UnitActivations("layers.0", ()), KEEPS_ALL)),
    ("'layers.1' is no unit", lambda plan: with_activations(plan, UnitActivations("layers.1", ()))),
    *(
        ("kept or recomputed whole", lambda plan, each=each: with_activations(plan, each, form="compiled"))  # type: ignore[misc]
        for each in (
            UnitActivations("layers.0", (Result("aten.mm.default", 0),)),
            UnitActivations("layers.0", (), (Result(INPUT, 0),)),
            dataclasses.replace(KEEPS_ALL, swap=(Result(SAVED, 0),)),
        )
    ),
    (
        "must name each result once",
        lambda plan: with_activations(plan, UnitActivations("layers.0", (Result("aten.mm.default", 0),) * 2)),
    ),
    (
        "'may_update_early' must be true",
        lambda plan: dataclasses.replace(
            with_chunk(plan, STREAMED, update="early", grad_entry=0), may_update_early=False
        ),
    ),
    ("'state_size' must be", lambda plan: dataclasses.replace(plan, moments="8bit")),
    ("exist only for Adam", lambda plan: dataclasses.replace(plan, optimizer="SGD", **EIGHT_BITS)),
    (
        "go with float32 master weights",
        lambda plan: dataclasses.replace(with_chunk(plan, 0, dtype="float64"), **EIGHT_BITS),
    ),
    (r"chunks\[12\].grad_entry' must be from 0", lambda plan: with_chunk(plan, STREAMED, grad_entry=10**6)),
    (
        "'nbytes' must be finite and at least 0",
        lambda plan: dataclasses.replace(plan, weight_files=(WeightFile("x", -1, ""),)),
    ),
    ("'replicas'", lambda plan: dataclasses.replace(plan, replicas=2)),
]


@pytest.mark.parametrize(("field", "spoil"), BAD)
def test_what_could_not_be_run_is_refused_by_the_name_of_the_field(field: str, spoil: Callable[[Plan], Plan]) -> None:
    with pytest.raises(ValueError, match=field):
        spoil(make_plan())


def test_a_bad_value_in_a_file_is_named_by_its_path() -> None:
    data = make_plan().to_dict()
    data["chunks"][STREAMED]["resident"] = True
    with pytest.raises(ArtifactError, match=r"plan.json: field 'chunks\[12\]': field 'weight_home' must be 'device'"):
        Plan.from_dict(data, source="plan.json")


def test_plans_pack_alike_by_ranks_replicas_and_chunks_alone() -> None:
    plan = make_plan(4, world_size=4)
    assert same_packing(plan, dataclasses.replace(with_chunk(plan, 3, resident=True, **ON_DEVICE), block_count=9))
    assert not same_packing(plan, make_plan(4, world_size=2))
    assert not same_packing(plan, dataclasses.replace(plan, replicas=2))
    assert not same_packing(plan, with_chunk(plan, 3, parameters=slots(("w", 0, 256))))
    assert not same_packing(plan, with_chunk(plan, 3, trainable=False, state_home="host"))


def test_parameters_begin_with_whole_blocks_of_the_widest_dtype() -> None:
    assert alignment_bytes("float32", ["float64"]) == PARAM_ALIGNMENT_BYTES
    assert alignment_bytes("8bit", ["bfloat16", "float32"]) == 4 * BLOCK_NUMEL > PARAM_ALIGNMENT_BYTES
    assert alignment_bytes("8bit", []) == max(BLOCK_NUMEL, PARAM_ALIGNMENT_BYTES)


@pytest.mark.parametrize(
    ("dtype", "numel", "form", "said"),
    [  # of the weights of experts, next to 200 bytes of others, a packed KiB, and what trains
        ("bfloat16", 101, "nf4", "1.00 KiB in 4 bits (nf4), 402 B in bfloat16; expert weights are 3-D parameters"),
        ("bfloat16", 100, "nf4", "1.00 KiB in 4 bits (nf4), 400 B in bfloat16"),
        ("bfloat16", 101, None, "1.00 KiB in uint8, 402 B in bfloat16"),
        ("int8", 1024, "nf4", "2.00 KiB in 4 bits (nf4), 200 B in bfloat16"),
        ("int8", 2048, None, "2.00 KiB in int8, 1.00 KiB in uint8, 200 B in bfloat16"),
    ],
)
def test_frozen_weights_are_counted_by_how_they_are_held(dtype: str, numel: int, form: str | None, said: str) -> None:
    experts = Weight("experts.up", dtype, numel, False)
    rest = [Weight("attention", "bfloat16", 100, False), Weight("experts.lora", "bfloat16", 999, True)]
    text = packed_text([experts, *rest, Weight("packed", "uint8", 1024, False)], form)
    assert text.partition(", which")[0] == f"frozen: {said}"
    assert packed_text(rest, None) == ""
