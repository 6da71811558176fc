"""The three searches as users call them: a model (traced here) or a `StepTrace`, in; a `Plan`, out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.hardware import (
    HardwareProfile,
    load_hardware,
    preset,
    preset_names,
    warn_if_doubtful,
    warn_if_other_device,
)
from elixir.plan import Plan
from elixir.search.budgets import host_memory_here, warn_if_disk_full
from elixir.search.planner import HomeChoice, SearchName, plan_from_trace, simple_plan
from elixir.tracer.step_trace import StepTrace
from elixir.units import dtype_name, parse_dtype

logger = logging.getLogger(__name__)

StepFn = Callable[[nn.Module, dict[str, Any]], Any]
DEFAULT_HARDWARE = "h200"
"""Machine planned for where none is named and no known GPU is found here."""


def optimal_search(
    model: nn.Module | StepTrace,
    world_size: int,
    unified_dtype: str | torch.dtype | None = None,
    optimizer_type: str = "Adam",
    overlap: bool = True,
    verbose: bool = False,
    inp: Mapping[str, Any] | None = None,
    step_fn: StepFn | None = None,
    hardware: HardwareProfile | str | None = None,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    placement: HomeChoice = "auto",
    use_fused_kernels: bool | Mapping[str, str] = False,
    accumulation: int = 1,
    disk_memory: str | int | None = None,
    moments: str = "float32",
    step_in_backward: bool = False,
) -> Plan:
    """Find chunk size, packing, rCache blocks and homes: the fastest plan that fits both budgets.

    Args:
        model: what is trained, real or on meta; or a trace of its step.
        world_size: number of ranks, one device each.
        unified_dtype: dtype that floating parameters and inputs are cast to, such as ``torch.bfloat16``; None leaves
            them as built.
        optimizer_type: family whose states are counted, such as ``Adam`` or ``SGD``.
        overlap: transfers run beside compute.
        verbose: log the plan at level INFO rather than DEBUG.
        inp: one rank's batch, as a dict; None takes `elixir.models.default_input` (Hugging Face models only).
        step_fn: ``step_fn(model, inp)`` runs forward, loss and backward; None takes `elixir.models.default_step`.
        hardware: a profile, or the name of a preset; None takes the GPU found here, for a trace the machine it was made
            for, and else `DEFAULT_HARDWARE`, whose rates also stand for those of a GPU that no preset knows.
        device_memory: budget of one device, bytes or text such as ``"80GiB"``.
        host_memory: budget of one machine, all its ranks together. None: what the profile says; where it knows none and
            `hardware` is None too, what is free on this machine.
        placement: ``auto``, or ``cuda`` / ``cpu`` to keep every chunk's weights and states there.
        use_fused_kernels: as `ElixirModule` will be given it, so that the plan knows their memory. A trace has it already.
        accumulation: batches per optimizer step, each like `inp`; `search_batches` finds how many are best.
        disk_memory: budget of the disk of one machine, for states that neither device nor host can hold; None: they may not
            live there. Such a plan can be looked at and simulated; `ElixirModule` does not run it yet.
        moments: how Adam's are kept, wherever they live: ``float32``, ``bfloat16`` (half the bytes) or ``8bit`` (a
            quarter). The run steps with these; docs/kernels.md says how far weights differ.
        step_in_backward: the host updates chunks while backward still runs, where the step has one backward, no clipping and
            no loss scaling; see `elixir.search.plan_from_trace`.

    Raises:
        InputError, InputTypeError: an argument makes no sense.
        TraceError: the step cannot be traced.
        PlanError: nothing fits; carries what would, and what to change.
    """
    return _searched("optimal", **locals())


def minimum_waste_search(
    model: nn.Module | StepTrace,
    world_size: int,
    unified_dtype: str | torch.dtype | None = None,
    optimizer_type: str = "Adam",
    overlap: bool = True,
    verbose: bool = False,
    inp: Mapping[str, Any] | None = None,
    step_fn: StepFn | None = None,
    hardware: HardwareProfile | str | None = None,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    placement: HomeChoice = "auto",
    use_fused_kernels: bool | Mapping[str, str] = False,
    disk_memory: str | int | None = None,
    moments: str = "float32",
    step_in_backward: bool = False,
) -> Plan:
    """As `optimal_search`, but with the one chunk size that pads least; blocks and homes are searched for it alone."""
    return _searched("minimum_waste", **locals())


def simple_search(
    model: nn.Module | StepTrace,
    world_size: int,
    split_number: int = 10,
    allocate_factor: float = 0.6,
    unified_dtype: str | torch.dtype | None = None,
    shard_device: Literal["cuda", "cpu"] = "cuda",
    optimizer_type: str = "Adam",
    overlap: bool = True,
    verbose: bool = False,
    inp: Mapping[str, Any] | None = None,
    step_fn: StepFn | None = None,
    hardware: HardwareProfile | str | None = None,
    device_memory: str | int | None = None,
    host_memory: str | int | None = None,
    placement: HomeChoice = "auto",
    use_fused_kernels: bool | Mapping[str, str] = False,
    moments: str = "float32",
    step_in_backward: bool = False,
) -> Plan:
    """A plan by hand, without a search: for tests, and for people who know what they want.

    Args:
        split_number: about so many chunks; fewer where the largest parameter needs larger ones.
        allocate_factor: share of the streamed chunks that have an rCache block, above 0 and at most 1.
        shard_device: home of all weights and states, unless `placement` says otherwise. With one rank ``cuda`` makes
            every chunk resident, so that nothing is streamed.

    The other arguments are those of `optimal_search`; a budget is checked only where it is given.
    """
    profile = profile_for(hardware, model)
    trace = _traced(model, unified_dtype, inp, step_fn, profile, use_fused_kernels)
    plan = simple_plan(
        trace,
        profile,
        world_size,
        split_number=split_number,
        allocate_factor=allocate_factor,
        shard_device=shard_device,
        optimizer_type=optimizer_type,
        overlap=overlap,
        device_memory=device_memory,
        host_memory=host_memory,
        placement=placement,
        moments=moments,
        step_in_backward=step_in_backward,
    )
    logger.log(logging.INFO if verbose else logging.DEBUG, "%s", plan)
    return plan


def _searched(
    search: SearchName,
    *,
    model: nn.Module | StepTrace,
    world_size: int,
    unified_dtype: str | torch.dtype | None,
    optimizer_type: str,
    overlap: bool,
    verbose: bool,
    inp: Mapping[str, Any] | None,
    step_fn: StepFn | None,
    hardware: HardwareProfile | str | None,
    device_memory: str | int | None,
    host_memory: str | int | None,
    placement: HomeChoice,
    use_fused_kernels: bool | Mapping[str, str],
    disk_memory: str | int | None,
    moments: str,
    step_in_backward: bool,
    accumulation: int = 1,
) -> Plan:
    profile = profile_for(hardware, model)
    warn_if_other_device(profile)
    warn_if_doubtful(profile)
    warn_if_disk_full(profile, disk_memory)
    if hardware is None and host_memory is None:
        host_memory = host_memory_here(profile)
    trace = _traced(model, unified_dtype, inp, step_fn, profile, use_fused_kernels)
    plan = plan_from_trace(
        trace,
        profile,
        world_size,
        optimizer_type=optimizer_type,
        overlap=overlap,
        device_memory=device_memory,
        host_memory=host_memory,
        placement=placement,
        search=search,
        accumulation=accumulation,
        disk_memory=disk_memory,
        moments=moments,
        step_in_backward=step_in_backward,
    )
    logger.log(logging.INFO if verbose else logging.DEBUG, "%s", plan)
    return plan


def profile_for(hardware: HardwareProfile | str | None, model: nn.Module | StepTrace | None = None) -> HardwareProfile:
    """The machine that is meant: as given, by a preset's name or a file's, that of a trace, or else the one found here."""
    if isinstance(hardware, HardwareProfile):
        return hardware
    if isinstance(hardware, str):
        return load_hardware(hardware)
    if hardware is not None:
        raise InputTypeError(f"hardware is a HardwareProfile or a preset's name, got {type(hardware).__name__}")
    if isinstance(model, StepTrace) and model.device in preset_names():
        return preset(model.device)
    if torch.cuda.is_available():
        found = torch.cuda.get_device_name()
        for name in preset_names():
            profile = preset(name)
            if profile.device_name == found:
                return profile
        logger.warning(
            "no preset for %r: planning with its memory and the rates of %s; measure it with "
            "`elixir hardware --measure --out hw.json` and pass hardware='hw.json'",
            found,
            DEFAULT_HARDWARE,
        )
        return _with_memory_of(found)
    return preset(DEFAULT_HARDWARE)


def _with_memory_of(device_name: str) -> HardwareProfile:
    """`DEFAULT_HARDWARE` with what the driver says of the GPU at hand: a plan for more memory than it has would not run."""
    return dataclasses.replace(
        preset(DEFAULT_HARDWARE),
        name=f"rates-of-{DEFAULT_HARDWARE}",
        device_name=device_name,
        compute_capability=torch.cuda.get_device_capability(),
        device_memory_bytes=torch.cuda.get_device_properties(0).total_memory,
        devices_per_host=torch.cuda.device_count(),
    )


def _traced(
    model: nn.Module | StepTrace,
    unified_dtype: str | torch.dtype | None,
    inp: Mapping[str, Any] | None,
    step_fn: StepFn | None,
    hardware: HardwareProfile,
    use_fused_kernels: bool | Mapping[str, str],
) -> StepTrace:
    dtype = None if unified_dtype is None else parse_dtype(unified_dtype)
    if isinstance(model, StepTrace):
        if dtype is not None and model.dtype != dtype_name(dtype):
            raise InputError(
                f"the trace is of dtype {model.dtype}, unified_dtype asks for {dtype_name(dtype)}; trace the model again"
            )
        return model
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model must be an nn.Module or a StepTrace, got {type(model).__name__}")
    if inp is not None and not isinstance(inp, Mapping):
        raise InputTypeError(f"inp must be a dict of the model's inputs, got {type(inp).__name__}")
    # Late, because they load what planning from a trace does not need.
    from elixir.default_step import default_input, default_step
    from elixir.tracer import trace_step

    batch = default_input(model) if inp is None else dict(inp)
    # Without an optimizer: its states and temporaries follow from the placement, not from plain PyTorch.
    return trace_step(
        model,
        batch,
        step_fn or default_step,
        dtype=dtype,
        hardware=hardware,
        optimizer=None,
        use_fused_kernels=use_fused_kernels,
    )
