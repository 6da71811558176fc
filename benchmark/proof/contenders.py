"""The peers of the timed parts: plain PyTorch, DDP of one, FSDP2 with and without offload, DeepSpeed, torchao.

All train the same model on the same batch with the same clipping. float32 master weights are kept by all but
``plain-bf16``, which says so in its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmark.proof.jobs import NotRun
from benchmark.proof.models import Filling, blocks, micro_batches, on_meta
from benchmark.proof.place import Place
from elixir.kernels.model.fused_kernels import PLAIN, PROVIDERS, FusedKernels
from elixir.runtimes.fsdp2 import pinned_bytes
from elixir.units import format_bytes

MAX_NORM = 1e3
"""The norm to which everybody clips: all have to compute it and wait for it, and no gradient is ever as large, as in
most steps of a training that goes well. Random weights give norms of 0.4 to 24."""
CLIPPED_NORM = 0.01
"""... in the pair that is clipped in every step, in which nothing that the host makes before the norm is right."""
LEARNING_RATE = 1e-4
BYTES_PER_NUMEL = 16
"""Bytes per parameter of a contender with float32 weights, gradients and two moments; with bf16 weights and gradients
and float32 masters it is the same sum."""


@dataclasses.dataclass(frozen=True)
class Running:
    """A contender that has been built."""

    step: Callable[[], torch.Tensor]
    """One optimizer step over the whole batch; gives the loss of its last part, on the device."""
    keep: Callable[[], None] = lambda: None
    """Writes what stays of the run. Nothing is taken down: the process ends once its row is written."""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    account: Callable[[int], dict[str, Any]] = lambda steps: {}
    """Columns of a row about the last so many steps, once they are over."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The fastest that torch has, on either device."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def _precision(options: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if options["precision"] == "bf16" else torch.float32


def max_norm(options: dict[str, Any]) -> float | None:
    """The norm to which all contenders of a pair clip gradients; None for a pair that does not clip."""
    limit: float | None = options.get("max_norm", MAX_NORM)
    return limit


def _stepper(
    model: nn.Module,
    batches: list[dict[str, torch.Tensor]],
    cast: Callable[[], Any],
    options: dict[str, Any],
    optimizer: Any = None,
) -> Running:
    """
    Args:
        model: built, on its device.
        batches: the parts of an optimizer step.
        cast: autocast around forward, or nothing.
        optimizer: `adamw` unless it is given.
        options: ``loss`` may be ``chunked``; ``sync_last`` has FSDP2 keep whole gradients on the device until the last
    part.
    """
    optimizer = optimizer or adamw(model.parameters())
    limit = max_norm(options)
    if options.get("loss", PLAIN) == "chunked":
        chunk_the_loss(model, batches[0]["input_ids"].device.type)

    def step() -> torch.Tensor:
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            if options.get("sync_last"):
                model.set_requires_gradient_sync(last)
            # DDP would reduce after every part; all but the last leave it out, as one does.
            quiet = contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()
            with quiet:
                with cast():
                    loss = model(**batch).loss / len(batches)
                loss.backward()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Running(step)


def _needs_device(model: nn.Module, options: dict[str, Any], bytes_per_numel: int = BYTES_PER_NUMEL) -> None:
    """Leaves out what cannot fit: weights, gradients and states alone are more than the budget."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    budget = options.get("budget_bytes")
    if budget is not None and numel * bytes_per_numel > budget:
        raise NotRun(
            f"weights, gradients and states of {numel:,} parameters take {format_bytes(numel * bytes_per_numel)}, "
            f"the budget is {format_bytes(budget)}"
        )


def chunk_the_loss(model: nn.Module, device_type: str) -> None:
    """The loss of Elixir, which never holds all logits, in a peer's model, and none of its other kernels.

    Raises:
        NotRun: the model's last layer and loss are none that it knows.
    """
    fused = FusedKernels(model, {**dict.fromkeys(PROVIDERS, PLAIN), "cross_entropy": "elixir"}, device_type)
    if "cross_entropy" not in fused.counts:
        raise NotRun(f"{type(model).__name__} has no loss that can be taken in parts of the vocabulary")


def _needs_host(model: nn.Module, place: Place, *, pins_each: bool) -> None:
    """Leaves out what the host cannot hold.

    Args:
        model: its parameters are counted.
        place: has the host.
        pins_each: weights and gradients, float32, are pinned parameter by parameter, and moments are not pinned.
    """
    sizes = [parameter.numel() for parameter in model.parameters()]
    taken = sum(sizes) * BYTES_PER_NUMEL
    if pins_each and place.cuda:
        taken = sum(2 * pinned_bytes(4 * numel) + 8 * numel for numel in sizes)
    free = place.free_host_bytes()
    if taken > free:
        raise NotRun(
            f"{sum(sizes):,} parameters take {format_bytes(taken)} of host memory, {format_bytes(free)} may be used"
        )


def _plain_model(
    options: dict[str, Any], place: Place, dtype: torch.dtype, bytes_per_numel: int = BYTES_PER_NUMEL
) -> nn.Module:
    model = on_meta(options)
    _needs_device(model, options, bytes_per_numel)
    Filling(model, place.device, dtype).fill(model, place.device)
    if options.get("compile"):
        model.compile()
    return model


def _autocast(options: dict[str, Any], place: Place) -> Callable[[], Any]:
    if options["precision"] == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(place.device.type, dtype=torch.bfloat16)


def plain(options: dict[str, Any], place: Place) -> Running:
    """float32 weights; in bf16 under autocast; with option ``compile`` as one graph of `torch.compile`."""
    model = _plain_model(options, place, torch.float32)
    return _stepper(
        model, micro_batches(model, options, options["micro"], place.device), _autocast(options, place), options
    )


def plain_bf16(options: dict[str, Any], place: Place) -> Running:
    """Weights, gradients and moments in bf16, no masters: half the memory, and other numbers."""
    model = _plain_model(options, place, torch.bfloat16, BYTES_PER_NUMEL // 2)
    batches = micro_batches(model, options, options["micro"], place.device)
    return _stepper(model, batches, contextlib.nullcontext, options)


def ddp(options: dict[str, Any], place: Place) -> Running:
    """`plain` in DistributedDataParallel with one rank."""
    from torch.nn.parallel import DistributedDataParallel

    _join_group(place)
    inner = _plain_model(options, place, torch.float32)
    batches = micro_batches(inner, options, options["micro"], place.device)
    model = DistributedDataParallel(inner, device_ids=[0] if place.cuda else None, gradient_as_bucket_view=True)
    return _stepper(model, batches, _autocast(options, place), options)


def fsdp2(options: dict[str, Any], place: Place) -> Running:
    """`fully_shard` on every block; options ``offload``, ``keep`` (weights from forward to backward), and `_stepper`'s.

    Raises:
        NotRun: the host, or the budget, cannot hold what it needs.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = on_meta(options)
    if options["offload"]:
        _needs_host(model, place, pins_each=True)
        if options.get("sync_last"):  # gradients wait on the device, whole and in the dtype of compute
            _needs_device(model, options, 4 if options["precision"] == "fp32" else 2)
    else:
        _needs_device(model, options)
    _join_group(place)
    batches = micro_batches(model, options, options["micro"], place.device)
    offload = CPUOffloadPolicy(pin_memory=place.cuda) if options["offload"] else OffloadPolicy()
    common: dict[str, Any] = {
        "mesh": init_device_mesh(place.device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=None if options["precision"] == "fp32" else torch.bfloat16),
        "offload_policy": offload,
        "reshard_after_forward": not options["keep"],
    }
    filling = Filling(model, "cpu", torch.float32)
    # Block by block, so that the device never holds more than one block in float32.
    for block in blocks(model):
        filling.fill(block, place.device)
        fully_shard(block, **common)
    filling.fill(model, place.device)
    del filling
    fully_shard(model, **common)
    return _stepper(model, batches, contextlib.nullcontext, options)


def deepspeed(options: dict[str, Any], place: Place) -> Running:
    """ZeRO of ``stage`` 2 or 3 with the optimizer on the host, and with stage 3 the weights as well.

    Options ``ratio`` (of the states that are on the host), ``super_offload`` and ``sub_group_size`` go to its
    configuration; with ``all_threads`` its Adam has a thread for each core.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise NotRun("DeepSpeed is not installed")
    if place.rehearse:
        raise NotRun("DeepSpeed is not rehearsed: it wants a CUDA device")
    import deepspeed as ds

    os.environ.setdefault("LOCAL_RANK", "0")  # which it asks for, next to the group that there is
    model = on_meta(options)
    _needs_host(model, place, pins_each=False)
    _join_group(place)
    batches = micro_batches(model, options, options["micro"], place.device)
    Filling(model, "cpu", torch.bfloat16).fill(model, "cpu")
    if options.get("loss", PLAIN) == "chunked":
        chunk_the_loss(model, place.device.type)
    if options.get("all_threads"):
        torch.set_num_threads(os.cpu_count() or 1)
    on_host = {name: options[name] for name in ("ratio", "super_offload") if name in options}
    zero: dict[str, Any] = {
        "stage": options["stage"],
        "offload_optimizer": {"device": "cpu", "pin_memory": True, **on_host},
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if options["stage"] == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if "sub_group_size" in options:
        zero["sub_group_size"] = options["sub_group_size"]
    config = {
        "train_micro_batch_size_per_gpu": options["micro"],
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": max_norm(options) or 0.0,
        "bf16": {"enabled": options["precision"] == "bf16"},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
    }
    # All parameters in one group: its super_offload fails with several (deepspeedai/DeepSpeed#7905).
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> torch.Tensor:
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)  # divides by the number of parts
            engine.step()  # acts after the last part only
        return loss.detach()

    return Running(step, facts={"deepspeed": ds.__version__})


def torchao(options: dict[str, Any], place: Place) -> Running:
    """float32 weights and gradients on the device under autocast, moments and their step on the host."""
    if importlib.util.find_spec("torchao") is None:
        raise NotRun("torchao is not installed")
    from torchao.optim import CPUOffloadOptimizer

    model = _plain_model(options, place, torch.float32, BYTES_PER_NUMEL // 2)
    batches = micro_batches(model, options, options["micro"], place.device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    return _stepper(model, batches, _autocast(options, place), options, optimizer)


def _join_group(place: Place) -> None:
    """One rank; the host's tensors go over gloo, since FSDP2 with offload sums norms there.

    It needs no address and no file, and lasts as long as the process, which has one job.
    """
    backend = "cpu:gloo,cuda:nccl" if place.cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


PEERS: dict[str, Callable[[dict[str, Any], Place], Running]] = {
    "plain": plain,
    "plain-bf16": plain_bf16,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "torchao": torchao,
}
