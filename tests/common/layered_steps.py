"""Made-up steps of repeated layers, with all that a trace says of layers: what a search may do with them needs no model.

A layer has some matrices and a vector, uses each once in forward and once in backward, and keeps a part of what each
use makes, or runs again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from elixir.step_trace import (
    Access,
    Fetch,
    Form,
    OperatorKind,
    Phase,
    StepShape,
    StepTrace,
    Transfer,
    Unit,
    UnitForward,
    UnitOperator,
)  # fmt: skip
from elixir.units import MIB
from tests.common.synthetic_trace import TraceBuilder

KINDS = ("mm", "addmm")
"""Operators of the uses of a layer, by turns."""
WORK: tuple[OperatorKind, ...] = ("square", "elementwise", "attention", "tall", "deep", "reduction")
"""Work of the operators of a step, by turns."""


@dataclass(frozen=True)
class Layers:
    """The layers of a step."""

    count: int
    uses: int
    """Matrices of each, with one use each; the last has the layer's vector as well."""
    form: Form
    width: int
    made_bytes: int
    """Bytes that a use makes; half of them are kept for backward."""
    flops: int
    """FLOPs of a use in forward."""
    input_bytes: int
    """Bytes that each layer gets and leaves."""


def some_layers(draw: random.Random, form: Form) -> Layers:
    """Layers of random sizes."""
    return Layers(
        count=draw.randint(2, 3),
        uses=2,
        form=form,
        width=draw.choice((1024, 1536, 2048)),
        made_bytes=draw.randint(1, 32) * MIB,
        flops=draw.randint(1, 300) * 10**9,
        input_bytes=draw.randint(1, 24) * MIB,
    )


def layered_step(layers: Layers, *, trained: bool = True, adapters: bool = False, copies: bool = False) -> StepTrace:
    """The trace of a step: an embedding, the layers, and a head that has the embedding's weight.

    Args:
        layers: between both.
        trained: otherwise the step evaluates the model.
        adapters: the weights are frozen but for two small matrices next to the first of each layer.
        copies: the step itself copies what the first layer keeps to the host, and back.
    """
    build, uses = TraceBuilder(), range(layers.uses)
    weights = {"trainable": trained and not adapters}
    embedding = build.parameter("embed.weight", 4 * layers.width, layers.width, aliases=("head.weight",), **weights)
    members: list[list[list[int]]] = []
    for number in range(layers.count):
        of_layer = [
            [build.parameter(f"layers.{number}.{use}.weight", layers.width, layers.width, **weights)] for use in uses
        ]
        of_layer[-1].append(build.parameter(f"layers.{number}.bias", layers.width, **weights))
        for part in "ab" if adapters else "":
            of_layer[0].append(build.parameter(f"layers.{number}.0.{part}", 16, layers.width, trainable=trained))
        members.append(of_layer)
    kept: list[int] = []
    """`kept_bytes` of each access."""

    def use(
        phase: Phase, parameters: list[int], held: int, made: int, layer: int | None = None, flops: int = 0
    ) -> None:
        module = "" if layer is None else f"layers.{layer}"
        kept.append(held)
        build.use(phase, *parameters, flops=flops or layers.flops, moved=4 * made, live=held + made, module=module)

    def run(layer: int, phase: Phase, held: int) -> Iterator[int]:
        """The uses of a layer in forward; gives what is held after each."""
        for number, parameters in enumerate(members[layer]):
            use(phase, parameters, held, layers.made_bytes, layer, layers.flops * (number + 1))
            held += layers.made_bytes // 2
            yield held

    again, held = layers.form == "checkpointed", layers.input_bytes
    use("forward", [embedding], layers.input_bytes, layers.input_bytes)
    for number in range(layers.count):
        *_, after = run(number, "forward", held)
        held = (held if again or not trained else after) + layers.input_bytes
    use("forward", [embedding], held, 4 * layers.input_bytes)
    if trained:
        use("backward", [embedding], held, 8 * layers.input_bytes, flops=2 * layers.flops)
        for number in reversed(range(layers.count)):
            held -= layers.input_bytes
            if again:
                *_, held = run(number, "recompute", held)
            for parameters in members[number][::-1]:
                use("backward", parameters, held, layers.made_bytes, number, 2 * layers.flops)
                held -= layers.made_bytes // 2
        if not adapters:
            use("backward", [embedding], layers.input_bytes, layers.input_bytes)
    checkpointed = tuple(f"layers.{number}" for number in range(layers.count)) if again else ()
    trace = build.build("layered", checkpointed=checkpointed, input_bytes=layers.input_bytes)
    fetch: Fetch = "one" if layers.form == "compiled" else "either"
    units = tuple(Unit(f"layers.{number}", layers.form, "Layer", fetch) for number in range(layers.count))
    accesses = tuple(replace(access, kept_bytes=held) for access, held in zip(trace.accesses, kept, strict=True))
    operations = tuple(replace(each, kind=WORK[number % len(WORK)]) for number, each in enumerate(trace.operations))
    return replace(
        trace,
        accesses=accesses,
        operations=operations,
        forwards=(_forward(layers, accesses),) if layers.form == "plain" and trained else (),
        step=StepShape(samples=2, tokens=2048, units=units, forward=not trained),
        transfers=_copies(accesses, layers) if copies and trained else (),
        host_peak_bytes=layers.made_bytes if copies and trained else 0,
        buffer_bytes=MIB,
        workspace_bytes=MIB // 2,
    )


def taken_piecewise(trace: StepTrace) -> StepTrace:
    """The step with layers whose weights can only be fetched when they are read."""
    units = tuple(replace(unit, fetch="parameters") for unit in trace.units)
    return replace(trace, step=replace(trace.step, units=units))


def compiled_step(layers: Layers) -> StepTrace:
    """The trace of a step whose layers, which are ``plain`` otherwise, are compiled."""
    trace = layered_step(replace(layers, form="plain"))
    units = tuple(replace(unit, form="compiled", fetch="one") for unit in trace.units)
    return replace(trace, step=replace(trace.step, units=units))


def _forward(layers: Layers, accesses: tuple[Access, ...]) -> UnitForward:
    """The forward of all layers; the second use draws random numbers."""
    made = layers.made_bytes
    operators = [
        UnitOperator(
            f"aten.{KINDS[use % 2]}.default", use // 2, use, accesses[1 + use].operations[0], made, made // 2, use != 1
        )
        for use in range(layers.uses)
    ]
    names = tuple(f"layers.{number}" for number in range(layers.count))
    return UnitForward(names, tuple(operators), layers.uses, layers.uses)


def _copies(accesses: tuple[Access, ...], layers: Layers) -> tuple[Transfer, ...]:
    """The first layer's results go to the host when they are made, and return before its backward."""
    back = next(i for i, each in enumerate(accesses) if each.phase == "backward" and each.module == "layers.0")
    return (
        Transfer("device_to_host", layers.made_bytes, layers.uses, layers.uses),
        Transfer("host_to_device", layers.made_bytes, back, back),
    )
