"""Traces of transformer stacks written down by formula, for tests of the search that need no model.

Shapes are exact (OPT and GPT-2, as published); costs and activations follow the usual counts: 2 FLOPs per weight and
token in forward, twice that in backward, one boundary activation kept per checkpointed layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elixir.artifact import digest
from elixir.step_trace import Access, Operation, ParamInfo, Phase, StepTrace

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class StackShape:
    """A decoder stack: hidden width, layers, feed-forward width, vocabulary, positions."""

    hidden: int
    layers: int
    ffn: int
    vocab: int = 50272
    positions: int = 2050


def _gpt2(hidden: int, layers: int) -> StackShape:
    return StackShape(hidden, layers, 4 * hidden, 50257, 1024)


SHAPES = {
    "opt-1.3b": StackShape(2048, 24, 8192),
    "opt-2.7b": StackShape(2560, 32, 10240),
    "opt-6.7b": StackShape(4096, 32, 16384),
    "opt-13b": StackShape(5120, 40, 20480),
    "opt-30b": StackShape(7168, 48, 28672),
    "opt-66b": StackShape(9216, 64, 36864),
    "opt-175b": StackShape(12288, 96, 49152),
    "gpt2-4b": _gpt2(3072, 32),
    "gpt2-10b": _gpt2(4096, 48),
    "gpt2-15b": _gpt2(8192, 18),
    "gpt2-20b": _gpt2(8192, 24),
}


class TraceBuilder:
    """Collects parameters and accesses, then gives the `StepTrace`."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        self.dtype = dtype
        self.infos: list[tuple[str, tuple[str, ...], tuple[int, ...], str, bool]] = []
        self.events: list[Access] = []
        self.operations: dict[Operation, int] = {}

    def parameter(
        self, name: str, *shape: int, dtype: str | None = None, trainable: bool = True, aliases: tuple[str, ...] = ()
    ) -> int:
        """Registers a parameter; its index."""
        self.infos.append((name, aliases, shape, dtype or self.dtype, trainable))
        return len(self.infos) - 1

    def use(
        self,
        phase: Phase,
        *parameters: int,
        flops: int = 0,
        moved: int = 0,
        live: int = 0,
        pin: int = 0,
        module: str = "",
    ) -> int:
        """Records an access that stays pinned for `pin` further events; its index."""
        index = len(self.events)
        operation = Operation("square", self.dtype, flops, moved)
        known = self.operations.setdefault(operation, len(self.operations))
        self.events.append(Access(phase, parameters, index + pin, module, "linear", (known,), live))
        return index

    def build(self, name: str, *, checkpointed: tuple[str, ...] = (), input_bytes: int = 0) -> StepTrace:
        """The trace; a trainable parameter's gradient is complete at its last use in backward."""
        last = len(self.events) - 1
        events = [
            Access(
                e.phase,
                e.parameters,
                min(e.pin_until, last),
                e.module,
                e.operator,
                e.operations,
                e.live_bytes,
            )
            for e in self.events
        ]
        grad_access: dict[int, int] = {}
        for index, event in enumerate(events):
            if event.phase == "backward":
                grad_access.update(dict.fromkeys(event.parameters, index))
        infos = tuple(
            ParamInfo(
                name=param,
                aliases=aliases,
                shape=shape,
                dtype=dtype,
                trainable=trainable,
                grad_access=grad_access.get(index) if trainable else None,
            )
            for index, (param, aliases, shape, dtype, trainable) in enumerate(self.infos)
        )
        param_bytes = sum(p.numel * ITEMSIZE[p.dtype] for p in infos)
        grad_bytes = sum(p.numel * ITEMSIZE[p.dtype] for p in infos if p.grad_access is not None)
        live = max((e.live_bytes for e in events), default=0)
        return StepTrace(
            model_name=name,
            model_fingerprint=digest([(p.name, p.shape, p.trainable, p.aliases) for p in infos]),
            device="h200",
            dtype=self.dtype,
            optimizer="AdamW (fused)",
            parameters=infos,
            param_bytes=param_bytes,
            grad_bytes=grad_bytes,
            optimizer_bytes=2 * grad_bytes,
            buffer_bytes=0,
            input_bytes=input_bytes,
            resting_bytes=param_bytes,
            workspace_bytes=0,
            activation_peak_bytes=live,
            backward_peak_bytes=param_bytes + grad_bytes + live,
            step_peak_bytes=param_bytes + 3 * grad_bytes + live,
            peak_module="",
            peak_operator="",
            peak_contributors=(),
            operations=tuple(self.operations),
            accesses=tuple(events),
            curve=(),
            operators=6 * len(events),
            checkpointed_modules=checkpointed,
            unused_parameters=tuple(p.name for p in infos if p.trainable and p.grad_access is None),
            unused_modules=(),
            assumptions=("synthetic",),
            trace_s=0.0,
        )


def stack_trace(
    shape: StackShape | str,
    *,
    batch: int = 8,
    seq: int = 1024,
    dtype: str = "bfloat16",
    checkpoint: bool = True,
    frozen_layers: int = 0,
) -> StepTrace:
    """One training step of a decoder stack whose head is tied to its token embedding.

    Args:
        shape: the shape, or its name in `SHAPES`.
        checkpoint: each layer runs again in backward.
        frozen_layers: so many layers from the bottom are not trained (the embeddings then neither).
    """
    name = shape if isinstance(shape, str) else f"stack-{shape.hidden}x{shape.layers}"
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    hidden, item, tokens = shape.hidden, ITEMSIZE[dtype], batch * seq
    build = TraceBuilder(dtype)
    trained = frozen_layers == 0
    tied = build.parameter("embed_tokens.weight", shape.vocab, hidden, trainable=trained, aliases=("lm_head.weight",))
    positions = build.parameter("embed_positions.weight", shape.positions, hidden, trainable=trained)
    layers: list[list[tuple[str, int, int, int]]] = []
    parts = [("q", hidden, hidden), ("k", hidden, hidden), ("v", hidden, hidden), ("out", hidden, hidden)]
    parts = [("norm1", 0, 0), *parts, ("norm2", 0, 0), ("fc1", shape.ffn, hidden), ("fc2", hidden, shape.ffn)]
    for layer in range(shape.layers):
        entries = []
        for part, rows, columns in parts:
            sizes = (rows, columns) if rows else (hidden,)
            options = {"trainable": layer >= frozen_layers}
            weight = build.parameter(f"layers.{layer}.{part}.weight", *sizes, **options)
            bias = build.parameter(f"layers.{layer}.{part}.bias", sizes[0], **options)
            entries.append((part, weight, bias, math.prod(sizes)))
        layers.append(entries)
    norm_weight, norm_bias = (build.parameter(f"final_norm.{part}", hidden) for part in ("weight", "bias"))

    boundary = tokens * hidden * item
    inner = boundary * 16 + 2 * boundary * shape.ffn // hidden
    kept = boundary if checkpoint else inner

    def run_layer(layer: int, phase: Phase, live: int) -> None:
        entries = layers[layer] if phase != "backward" else layers[layer][::-1]
        for position, (part, weight, bias, numel) in enumerate(entries):
            grown = (position + 1) if phase != "backward" else len(entries)
            factor = 4 if phase == "backward" else 2
            build.use(
                phase,
                weight,
                bias,
                flops=factor * numel * tokens,
                moved=numel * item + 4 * boundary,
                live=live + inner * grown // len(entries),
                module=f"layers.{layer}.{part}",
            )

    build.use("forward", tied, moved=2 * boundary, live=boundary)
    build.use("forward", positions, moved=2 * boundary, live=boundary)
    for layer in range(shape.layers):
        run_layer(layer, "forward", layer * kept)
    logits = tokens * shape.vocab * item
    top = shape.layers * kept
    head = shape.vocab * hidden
    build.use("forward", norm_weight, norm_bias, live=top + 2 * boundary)
    build.use("forward", tied, flops=2 * head * tokens, moved=head * item + logits, live=top + 3 * logits)
    build.use("backward", tied, flops=4 * head * tokens, moved=head * item + logits, live=top + 3 * logits)
    build.use("backward", norm_weight, norm_bias, live=top + 3 * boundary)
    for layer in reversed(range(shape.layers)):
        if checkpoint and layer >= frozen_layers:
            run_layer(layer, "recompute", layer * kept)
        if layer >= frozen_layers:
            run_layer(layer, "backward", layer * kept)
    if trained:
        build.use("backward", positions, live=boundary)
        build.use("backward", tied, live=boundary)
    checkpointed = tuple(f"layers.{layer}" for layer in range(shape.layers)) if checkpoint else ()
    return build.build(name, checkpointed=checkpointed, input_bytes=3 * tokens * 8)
