"""`cuda_memory_profiling`: what one step takes of a GPU's memory, by kind, without the GPU.

The four first keys are those of the original Elixir's function of this name; the others are additions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from elixir.hardware.profile import HardwareProfile, preset
from elixir.tracer.trace import StepFn, trace_step


def cuda_memory_profiling(
    model: nn.Module,
    inp: Any,
    step_fn: StepFn,
    dtype: torch.dtype | None = torch.float,
    device: str | HardwareProfile = "h200",
    **options: Any,
) -> dict[str, Any]:
    """Bytes that one training step takes on `device`, by kind.

    Args:
        model: any `nn.Module`, real or on meta; it is not changed.
        inp: batch, of any kind, that `step_fn` gets with the model.
        step_fn: ``step_fn(model, inp)`` runs forward, loss and backward.
        dtype: floating parameters and inputs are cast to it; None leaves them.
        device: name of a known machine (``elixir hardware --list``) or a profile.
        options: of `trace_step`: `optimizer`, ``"AdamW"`` by default and None for none, `optimizer_kernel`, `routing`,
            `use_fused_kernels`.

    Returns:
        ``param_occ``, ``buffer_occ``, ``grad_occ``: bytes of parameters, buffers, gradients.
        ``activation_occ``: peak during `step_fn` less what was there before it (parameters, buffers, inputs).
        ``input_occ``: bytes of the inputs. ``optimizer_occ``: bytes of the optimizer's states.
        ``peak_occ``: highest total during `step_fn`, with parameters, buffers and inputs, without optimizer states.
        ``step_peak_occ``: highest total of a whole step, with the optimizer's states and temporaries.
        ``peak_module``, ``peak_operator``: where `peak_occ` is reached. ``peak_breakdown``: what is alive then, a list
        of dicts with ``kind``, ``module``, ``operator``, ``count`` and ``bytes``, largest first.

    Raises:
        InputError, InputTypeError, TraceError: as `trace_step`.

    Example:
        >>> from elixir.models.loading import build
        >>> from elixir.models.step import default_input, default_step
        >>> model = build("opt-125m")
        >>> occ = cuda_memory_profiling(model, default_input(model, seq=128), default_step, torch.bfloat16)
        >>> occ["param_occ"]
        250478592
    """
    hardware = preset(device) if isinstance(device, str) else device
    trace = trace_step(model, inp, step_fn, dtype=dtype, hardware=hardware, **options)
    return {
        "param_occ": trace.param_bytes,
        "buffer_occ": trace.buffer_bytes,
        "grad_occ": trace.grad_bytes,
        "activation_occ": trace.backward_peak_bytes - trace.resting_bytes,
        "input_occ": trace.input_bytes,
        "optimizer_occ": trace.optimizer_bytes,
        "peak_occ": trace.backward_peak_bytes,
        "step_peak_occ": trace.step_peak_bytes,
        "peak_module": trace.peak_module,
        "peak_operator": trace.peak_operator,
        "peak_breakdown": list(map(asdict, trace.peak_contributors)),
    }
