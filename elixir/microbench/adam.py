"""How many elements per second an Adam step updates."""

from __future__ import annotations

import torch

from elixir.microbench.measurement import Measurement, check_device, effort, median_seconds, threads_text


def adam_rate(device: torch.device | str = "cpu", *, quick: bool = False) -> Measurement:
    """Elements per second of ``torch.optim.AdamW(fused=True)`` over one flat fp32 parameter with fp32 states.

    The step of a sharded optimizer looks like this: a long flat buffer, nothing to launch twice. Reads and writes
    28 bytes per element, so it is bound by memory unless cores are slow.
    """
    target = check_device(device)
    plan = effort(target, quick)
    numel = plan.adam_numel
    parameter = torch.nn.Parameter(torch.ones(numel, device=target))
    parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    seconds, repeats = median_seconds(optimizer.step, target, plan)
    how = f"torch AdamW(fused=True) on {target}, {numel / 1e6:.0f} M fp32 elements"
    if target.type == "cpu":
        how += f", {threads_text()}"
    return Measurement(f"adam {target}", numel / seconds, "elements/s", repeats, how)
