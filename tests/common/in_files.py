"""Models most of whose weights are frozen and stay in safetensors files, and plans for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from elixir.hardware import preset
from elixir.plan.plan import Plan
from elixir.search import simple_search
from tests.common.parity import hf_loss
from tests.common.tiny_models import tiny

HARDWARE = replace(preset("cpu"), disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=1e9)
"""A CPU whose disk is known."""


def frozen_model() -> nn.Module:
    """A tiny model whose matrices are frozen: biases and norms are trained, as adapters would be."""
    model = tiny("opt", layers=3)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() < 2)
    return model


def save_frozen(model: nn.Module, folder: Path) -> Path:
    """Saves the frozen weights in two files."""
    frozen = {name: each.detach() for name, each in model.named_parameters() if not each.requires_grad}
    for part in (0, 1):
        save_file(dict(list(frozen.items())[part::2]), folder / f"part-{part}.safetensors")
    return folder


def on_meta(model: nn.Module) -> nn.Module:
    """Moves the frozen weights to meta, so that only the files have them."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    model.tie_weights()  # type: ignore[operator]
    return model


def plan_in_files(
    model: nn.Module, inp: dict[str, Any], world_size: int = 1, *, every: int = 1, loss: Any = hf_loss, **options: Any
) -> Plan:
    """A plan with the frozen weights of every so many-th chunk in files, and of the others resident."""

    def step(model: nn.Module, inp: dict[str, Any]) -> None:
        loss(model, inp).backward()

    options = {"inp": inp, "step_fn": step, "hardware": HARDWARE, "frozen_weights": "files"} | options
    plan = simple_search(model, world_size, split_number=8, allocate_factor=0.01, shard_device="cpu", **options).plan
    chunks = []
    for index, chunk in enumerate(plan.chunks):
        if chunk.weight_home == "files" and index % every:
            chunk = replace(chunk, resident=True, weight_home="device", state_home="device")
        chunks.append(chunk)
    return replace(plan, chunks=tuple(chunks))


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts are equal to the bit."""
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
