"""From a model and a plan to chunks that hold its weights, chunk by chunk, so that nothing is held twice."""

from __future__ import annotations

import torch
from torch import nn

from elixir.chunk.buffers import Arena
from elixir.chunk.chunk import Chunk, ChunkState
from elixir.chunk.group import Group
from elixir.errors import InputError
from elixir.fingerprint import fingerprint
from elixir.plan import Plan
from elixir.units import dtype_name


def build_chunks(model: nn.Module, plan: Plan, arena: Arena, group: Group) -> list[Chunk]:
    """Chunks with the model's weights at their homes; the model's parameters no longer own memory.

    Raises:
        InputError: the model is on meta, so it has no weights.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    if any(parameter.is_meta for parameter in by_name.values()):
        raise InputError("the model is on the meta device and has no weights; build it on the CPU")
    chunks = []
    for index, chunk_plan in enumerate(plan.chunks):
        parameters = [by_name[slot.name] for slot in chunk_plan.parameters]
        chunk = Chunk(index, chunk_plan, parameters, rank=group.rank, world_size=group.size, device=arena.device)
        _load_weights(chunk, arena)
        chunks.append(chunk)
    return chunks


def _load_weights(chunk: Chunk, arena: Arena) -> None:
    plan = chunk.plan
    if plan.trainable and chunk.low_precision:
        # Master weights start from what the model came with, before it is rounded.
        chunk.masters = arena.make(chunk.shard_numel, torch.float32, plan.state_home, "optimizer_states")
        _copy_shard(chunk, chunk.masters)
    if plan.resident:
        chunk.whole = arena.make(plan.numel, chunk.dtype, "device", "resident_weights")
        for slot in chunk.slots:
            chunk.whole[slot.offset : slot.offset + slot.numel].copy_(slot.parameter.data.flatten())
        chunk.to(ChunkState.RESIDENT, chunk.whole)
        return
    kind = "weight_shards" if plan.weight_home == "device" else "weights"
    chunk.shard = arena.make(chunk.shard_numel, chunk.dtype, plan.weight_home, kind)
    _copy_shard(chunk, chunk.shard)
    chunk.hold_placeholders()


def _copy_shard(chunk: Chunk, target: torch.Tensor) -> None:
    """This rank's part of the model's own weights, in the dtype of `target`."""
    start, end = chunk.shard_start, chunk.shard_start + chunk.shard_numel
    for slot in chunk.slots:
        begin, stop = max(slot.offset, start), min(slot.offset + slot.numel, end)
        if begin < stop:
            values = slot.parameter.data.flatten()[begin - slot.offset : stop - slot.offset]
            target[begin - start : stop - start].copy_(values)


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers live on the device, in their own dtype; modules that share one go on sharing it."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]


def agree_on_plan(group: Group, module: nn.Module, plan: Plan, dtype: torch.dtype | None) -> None:
    """Refuse, on all ranks at once, a plan that one of them cannot run or that differs between them."""
    error: Exception | None = None
    try:
        plan.check(fingerprint(module), group.size)
        if dtype is not None and plan.dtype not in ("as built", dtype_name(dtype)):
            raise InputError(f"the plan is for {plan.dtype}, dtype asks for {dtype_name(dtype)}; plan with that dtype")
    except ValueError as refused:
        error = refused
    answers = group.exchange("plan", (plan.fingerprint, None if error is None else str(error)))
    if error is not None:
        raise error
    for rank, (theirs, problem) in enumerate(answers):
        if problem is not None:
            raise InputError(f"rank {rank} cannot run its plan: {problem}")
        if theirs != plan.fingerprint:
            raise InputError(
                f"rank {rank} has plan {theirs}, rank {group.rank} has {plan.fingerprint}; plan on one rank and send "
                "the plan to the others"
            )


def compute_device(device: torch.device | str | None) -> torch.device:
    """The device asked for; else the current CUDA device, else the CPU."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
