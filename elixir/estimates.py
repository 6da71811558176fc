"""`estimate` and `guard`: what one training step takes on a device, and whether it will run there, in one call each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.errors import ElixirError, InputError, InputTypeError, Lever, PlanError
from elixir.hardware.memory import CONTEXT_AND_KERNELS_BYTES, free_device_bytes
from elixir.hardware.profile import HardwareProfile
from elixir.models.activation_checkpointing import enable_checkpointing
from elixir.models.step import default_step
from elixir.runtimes.estimate import Estimate, with_margin, without_margin
from elixir.search import plan_from_trace
from elixir.search.question import StepQuestion
from elixir.search.searches import profile_for
from elixir.search.whatif.sweep import HOST_PER_DEVICE_BYTE
from elixir.units import GIB, format_bytes, format_seconds, parse_bytes

StepFn = Callable[[nn.Module, Any], Any]
Optimizer = torch.optim.Optimizer | type[torch.optim.Optimizer] | str | None
PAPER = "h200"
"""The preset whose kernels and allocator are assumed if there is no GPU and none is named."""


def estimate(
    model: nn.Module | str,
    batch: Any = None,
    optimizer: Optimizer = "AdamW",
    *,
    step_fn: StepFn | None = None,
    hardware: HardwareProfile | str | None = None,
    dtype: str | torch.dtype | None = None,
) -> Estimate:
    """Finds what one training step takes in plain PyTorch. Needs no GPU, and trains nothing. Each rank of DDP takes a
    copy of the gradients more.

    >>> print(elixir.estimate(model, batch, torch.optim.AdamW))  # doctest: +SKIP

    Args:
        model: real or on meta, left as it is; or a name (``elixir models``).
        batch: what the step gets next to the model: a dict of the model's inputs, or anything with a `step_fn`. None
            takes a default input (Hugging Face models).
        optimizer: one of `torch.optim`, its class or its name, of which all trainable parameters count, and no options
            but ``fused`` and ``foreach``; None: nothing is stepped.
        step_fn: ``step_fn(model, batch)`` runs forward, loss and backward as your script does, autocast included. None:
            backward of the output's ``loss``, while the output is kept.
        hardware: the device to assume: a preset's name, a profile or its file. None: the GPU at hand, without one an
            H200.
        dtype: floating parameters and inputs count as cast to it; None leaves them.

    Raises:
        TraceError, InputError, InputTypeError: the step cannot be traced; an argument makes no sense.
    """
    profile = _profile(hardware)
    name, kernel = _stepped(optimizer)
    question = StepQuestion(
        model=model, inp=batch, step_fn=step_fn, dtype=dtype, optimizer=name, optimizer_kernel=kernel
    )
    return Estimate(question.trace(profile), profile.device_kind)


def guard(
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer = "AdamW",
    *,
    step_fn: StepFn | None = None,
    memory: str | int | None = None,
    hardware: HardwareProfile | str | None = None,
) -> Estimate:
    """Raises before the first step where it would run out of memory, and says what would fit.

    >>> elixir.guard(model, batch, optimizer)  # doctest: +SKIP

    Args:
        model, batch, optimizer, step_fn, hardware: as of `estimate`.
        memory: of the device, such as ``"24GiB"``. None: what is free on the GPU at hand, with what the model and this
            process hold there already; without a GPU what the profile says.

    Raises:
        PlanError: it does not fit; its levers are changes that were tried. Others as of `estimate`.
    """
    found = estimate(model, batch, optimizer, step_fn=step_fn, hardware=hardware)
    available = _available(memory, hardware)
    if found.fits(available):
        return found
    tried = {"optimizer": optimizer, "hardware": hardware}
    smaller = _smaller(model, batch, step_fn or default_step, found, available, tried)
    raise PlanError(
        f"a step of {found.trace.model_name} takes {format_bytes(found.peak_bytes)} in {found.when}: it will not fit",
        needed_bytes=found.needed_bytes,
        available_bytes=available,
        levers=[*smaller, *_planned(found, available, hardware)],
    )


def _stepped(optimizer: Optimizer) -> tuple[str | None, Any]:
    """The class in `torch.optim`, and how it steps; None for torch's choice."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer, None
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        raise InputTypeError(f"optimizer is one of torch.optim, its class or its name, got {kind.__name__}")
    if kind.__module__.partition(".")[0] != "torch":
        raise InputError(
            f"{kind.__name__} is none of torch.optim, so its states are not known; give its nearest kin there"
        )
    options = {} if isinstance(optimizer, type) else optimizer.defaults
    kernel = next((name for name in ("fused", "foreach") if options.get(name)), None)
    return kind.__name__, "for-loop" if options.get("foreach") is False and kernel is None else kernel


def _available(memory: str | int | None, hardware: HardwareProfile | str | None) -> int:
    """Bytes of the device: given, free here with what this process holds, or of the profile."""
    if memory is not None:
        return parse_bytes(memory)
    if hardware is None and torch.cuda.is_available():
        # An estimate counts the context, without which this is free.
        return free_device_bytes("cuda") + torch.cuda.memory_reserved() + CONTEXT_AND_KERNELS_BYTES
    return _profile(hardware).device_memory_bytes


def _profile(hardware: HardwareProfile | str | None) -> HardwareProfile:
    """The device to assume."""
    return profile_for(PAPER if hardware is None and not torch.cuda.is_available() else hardware)


def _smaller(
    model: nn.Module, batch: Any, step: StepFn, found: Estimate, available: int, asked: dict[str, Any]
) -> Iterator[Lever]:
    """Activation checkpointing, and the largest part of the batch that fits, with and without."""
    twice = partial(_two_steps, step)
    for form, tried in (("", model), ("activation checkpointing", _checkpointed(model))):
        for samples in [None, *_halves(batch)] if tried is not None else ():
            if samples is None and not form:
                continue
            part = batch if samples is None else _first(batch, samples)
            try:
                # Of several micro-batches the later ones find the gradients of those before.
                now = estimate(tried, part, **asked, step_fn=step if samples is None else twice)  # type: ignore[arg-type]
            except ElixirError:
                break
            if now.fits(available):
                action = form if samples is None else f"micro-batches of {samples}" + (form and f" with {form}")
                yield Lever(f"use {action}", found.needed_bytes - now.needed_bytes)
                break


def _two_steps(step: StepFn, model: nn.Module, batch: Any) -> None:
    """Two micro-batches."""
    step(model, batch)
    step(model, batch)


def _checkpointed(model: nn.Module) -> nn.Module | None:
    """A copy on meta of a model of transformers, whose layers checkpoint; None if they do already, or cannot."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    if not model.training or next((getattr(model, name) for name in names if hasattr(model, name)), True):
        return None
    on_meta = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad) for each in model.parameters()
    }
    try:
        copied = copy.deepcopy(model, on_meta)
        enable_checkpointing(copied, "non-reentrant")
    except Exception:  # whatever a model's own code raises when it is copied
        return None
    return copied


def _halves(batch: Any) -> Iterator[int]:
    """Half of the samples, a quarter, and so on; none if a batch is no dict, tuple or list of tensors of as many."""
    tensors = _tensors(batch)
    sizes = {each.shape[0] for each in tensors if isinstance(each, torch.Tensor) and each.dim()}
    samples = sizes.pop() if len(sizes) == 1 and all(isinstance(each, torch.Tensor) for each in tensors) else 1
    while samples > 1:
        samples = samples // 2
        yield samples


def _tensors(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return list(batch.values())
    return list(batch) if type(batch) in (tuple, list) else [batch]


def _first(batch: Any, samples: int) -> Any:
    """The first samples of a batch."""
    parts = [each[:samples] if each.dim() else each for each in _tensors(batch)]
    if isinstance(batch, dict):
        return dict(zip(batch, parts, strict=True))
    return type(batch)(parts) if type(batch) in (tuple, list) else parts[0]


def _planned(found: Estimate, available: int, hardware: HardwareProfile | str | None) -> Iterator[Lever]:
    """The same step under a plan of Elixir, if one fits."""
    profile = _profile(hardware)
    host = profile.host_memory_bytes or HOST_PER_DEVICE_BYTE * profile.device_memory_bytes
    optimizer = found.trace.optimizer.split(" ")[0]
    try:
        plan = plan_from_trace(
            found.trace,
            profile,
            1,
            optimizer_type=optimizer,
            device_memory=without_margin(available, profile.device_kind),
            host_budget=host,
        ).plan
    except ElixirError:
        return
    predicted = plan.predicted
    took = "" if predicted.step_s is None else f", {format_seconds(predicted.step_s)} a step"
    yield Lever(
        f"train with elixir.wrap(model, optimizer, device_memory='{plan.device_budget_bytes / GIB:.2f}GiB'): "
        f"{format_bytes(predicted.device_peak_bytes)} of the device, {format_bytes(predicted.host_peak_bytes)} of the "
        f"host{took}",
        found.needed_bytes - with_margin(predicted.device_peak_bytes, profile.device_kind),
    )
