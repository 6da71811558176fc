"""Small traces, plans and profiles for tests that need one of each and care little what is in it."""

from __future__ import annotations

import math

from elixir.hardware.profile import HardwareProfile
from elixir.optimizer_states import StateSize
from elixir.plan.chunk_plan import PARAM_ALIGNMENT_BYTES, ChunkPlan, ChunkUse, ParamSlot
from elixir.plan.plan import Plan
from elixir.plan.prediction import LINKS, Prediction
from elixir.step_trace import Access, Contributor, CurveSample, Operation, ParamInfo, StepTrace
from elixir.units import GIB


def make_hardware(name: str = "h200") -> HardwareProfile:
    """A machine with round numbers."""
    return HardwareProfile(
        name=name,
        device_kind="cuda",
        device_name="Sample device",
        compute_capability=(9, 0),
        devices_per_host=8,
        device_memory_bytes=140 * GIB,
        device_memory_bytes_per_s=4e12,
        flops_per_s={"bfloat16": 9e14},
        matmul_efficiency=0.6,
        host_memory_bytes=None,
        host_memory_bytes_per_s=3e11,
        host_to_device_bytes_per_s=5e10,
        device_to_host_bytes_per_s=5e10,
        device_to_device_bytes_per_s=4e11,
        host_adam_numel_per_s=2e9,
        device_adam_numel_per_s=1e11,
        sources={"device_memory_bytes": "made up"},
    )


def make_curve(layers: int = 24, *, checkpoint: bool = True, unit: int = GIB // 8) -> tuple[CurveSample, ...]:
    """A curve shaped like a transformer's: up in forward, down in backward, a hump in the optimizer."""
    samples: list[CurveSample] = []

    def add(phase: str, gradients: float, activations: float, workspace: float = 0.25) -> None:
        samples.append(
            CurveSample(
                operator=len(samples) * 30,
                phase=phase,  # type: ignore[arg-type]
                parameters=2 * layers * unit,
                gradients=int(gradients * unit),
                optimizer=4 * layers * unit,
                buffers=unit // 10,
                inputs=unit // 50,
                activations=int(activations * unit),
                workspace=int(workspace * unit),
            )
        )

    kept = 0.3 if checkpoint else 4.0
    for layer in range(layers):
        for part in range(4):
            add("forward", 0, kept * (layer + part / 4) + 1.5 * (part in (1, 2)))
    for layer in reversed(range(layers)):
        done = 2 * (layers - layer - 1)
        if checkpoint:
            for part in range(4):
                add("recompute", done, kept * layer + 4 * part / 4)
        for part in range(8):
            add("backward", done + 2 * part / 8, kept * layer + 4 * (8 - part) / 8 + math.sin(part) ** 2)
    for part in range(3):
        add("optimizer", 2 * layers, 0, workspace=(0.5, 2 * layers, 0.5)[part])
    return tuple(samples)


def make_trace(
    name: str = "sample-1b", layers: int = 24, *, checkpoint: bool = True, unit: int = GIB // 8
) -> StepTrace:
    """A trace of `layers` layers with one matrix each."""
    curve = make_curve(layers, checkpoint=checkpoint, unit=unit)
    numel = unit
    params = tuple(
        ParamInfo(
            f"layers.{i}.weight", ("head.weight",) if i == 0 else (), (numel // 64, 64), "bfloat16", True, layers + i
        )
        for i in range(layers)
    )
    order = [("forward", i) for i in range(layers)] + [("backward", i) for i in reversed(range(layers))]
    accesses = tuple(
        Access(phase, (i,), event, f"layers.{i}", "aten.linear", (0,), unit)  # type: ignore[arg-type]
        for event, (phase, i) in enumerate(order)
    )
    ran = [sample for sample in curve if sample.phase != "optimizer"]
    return StepTrace(
        model_name=name,
        model_fingerprint="0123456789abcdef",
        device="h200",
        dtype="bfloat16",
        optimizer="AdamW (foreach)",
        parameters=params,
        param_bytes=2 * layers * unit,
        grad_bytes=2 * layers * unit,
        optimizer_bytes=4 * layers * unit,
        buffer_bytes=unit // 10,
        input_bytes=unit // 50,
        resting_bytes=unit,
        workspace_bytes=unit // 4,
        activation_peak_bytes=max(sample.activations + sample.inputs + sample.workspace for sample in ran),
        backward_peak_bytes=max(sample.total - sample.optimizer for sample in ran),
        step_peak_bytes=max(sample.total for sample in curve),
        peak_module=f"model.decoder.layers.{layers - 1}.self_attn.out_proj",
        peak_operator="aten._scaled_dot_product_flash_attention_backward",
        operations=(Operation("square", "bfloat16", 10**9, 10**6),),
        peak_contributors=tuple(
            Contributor("activations", f"layers.{i}", "aten.mm", 3, unit - i) for i in range(min(layers, 12))
        ),
        accesses=accesses,
        curve=curve,
        operators=len(curve) * 30,
        checkpointed_modules=tuple(f"layers.{i}" for i in range(layers)) if checkpoint else (),
        unused_parameters=(),
        unused_modules=(),
        assumptions=(),
        trace_s=0.25,
    )


def make_plan(chunks: int = 24, *, world_size: int = 1, resident: float = 0.3, frozen: float = 0.0) -> Plan:
    """A plan whose first chunks are resident, the middle ones streamed from the host, the last ones frozen."""
    numel = 2**24
    built = []
    for index in range(chunks):
        on_device = index < resident * chunks
        trainable = index < (1 - frozen) * chunks
        home = "device" if on_device else "host"
        built.append(
            ChunkPlan(
                dtype="bfloat16",
                trainable=trainable,
                numel=numel * (3 if index == 0 else 1),
                parameters=(ParamSlot(f"layers.{index}.weight", 0, numel),),
                weight_home=home,  # type: ignore[arg-type]
                state_home="device" if index < resident * chunks / 2 else "host" if trainable else home,  # type: ignore[arg-type]
                resident=on_device,
            )
        )
    order = [*range(chunks), *reversed(range(chunks))]
    uses = tuple(
        ChunkUse("forward" if event < chunks else "backward", (chunk,), event) for event, chunk in enumerate(order)
    )
    weights = 2 * numel * chunks
    device_parts = {
        "resident weights": int(weights * resident), "rCache blocks": 8 * 2 * numel, "gradients": 4 * 2 * numel,
        "optimizer states": int(6 * weights * resident / 2), "activations": weights // 4, "buffers": 2**20,
    }  # fmt: skip
    host_parts = {
        "weights": int(weights * (1 - resident)),
        "master weights": weights * 2,
        "optimizer states": weights * 4,
    }
    device, host = sum(device_parts.values()), sum(host_parts.values())
    return Plan(
        model_name="sample-1b",
        model_fingerprint="0123456789abcdef",
        hardware_name="h200",
        hardware_fingerprint="fedcba9876543210",
        world_size=world_size,
        dtype="bfloat16",
        optimizer="Adam",
        state_size=StateSize(8),
        overlap=True,
        placement="auto",
        block_numel=numel,
        block_bytes=2 * numel,
        block_count=8,
        prefetch_depth=2,
        grad_block_count=4,
        chunks=tuple(built),
        order=uses,
        alignment_bytes=PARAM_ALIGNMENT_BYTES,
        device_budget_bytes=int(device * 1.1),
        host_budget_bytes=int(host * 1.4),
        predicted=Prediction(
            device_peak_bytes=device,
            device_parts=device_parts,
            host_peak_bytes=host,
            host_parts=host_parts,
            moved_bytes=dict.fromkeys(LINKS, 0) | {"host_to_device": 3 * weights, "device_to_host": 2 * weights},
            loads=2 * chunks,
            hits=3,
            seconds={"compute": 0.5, "total": 0.9},
        ),
    )
