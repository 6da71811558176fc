"""Gains of one change of a machine: the same step planned and simulated again with more, or with faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elixir.errors import PlanError
from elixir.hardware import HardwareProfile, RateFit
from elixir.plan import Plan
from elixir.search.planner import plan_or_shortage
from elixir.search.request import SearchRequest
from elixir.search.simulator import simulate_step
from elixir.step_trace import StepTrace
from elixir.units import format_bytes

FACTOR = 2
"""How much of a thing a lever gives."""

_FIELDS = {
    "host_link": ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "host_memory_bytes_per_s"),
    "host_adam": ("host_adam_numel_per_s",),
    "peers": ("device_to_device_bytes_per_s", "network_bytes_per_s"),
    "device": ("device_memory_bytes_per_s", "device_adam_numel_per_s"),
    "disk": ("disk_read_bytes_per_s", "disk_write_bytes_per_s"),
}
"""Part that gets faster -> plain rates of the profile. Host memory goes with the link, which it feeds."""
_FITS = {
    "host_link": ("host_to_device", "device_to_host", "host_memory"),
    "host_adam": ("host_adam",),
    "peers": ("device_to_device", "all_gather", "reduce_scatter"),
    "device": ("matmul", "attention", "elementwise", "activation", "reduction", "device_adam"),
    "disk": ("disk_read", "disk_write"),
}
"""Part that gets faster -> families of fits."""


@dataclass(frozen=True)
class LeverEffect:
    """One change, and the step after it."""

    action: str
    step_s: float
    change_s: float
    """Negative where the step gets shorter."""


def faster(hardware: HardwareProfile, what: str, factor: float = FACTOR) -> HardwareProfile:
    """The machine with some of its rates `factor` times as high; latencies stay.

    Args:
        what: ``host_link``, ``host_adam``, ``peers`` (devices of one machine, and machines), ``disk`` or ``device``
            (all that it computes, its own memory included).
    """
    changes: dict[str, object] = {}
    for name in _FIELDS[what]:
        value = getattr(hardware, name, None)
        if value is not None:
            changes[name] = value * factor
    if what == "device":
        changes["flops_per_s"] = {dtype: rate * factor for dtype, rate in hardware.flops_per_s.items()}
    changes["fits"] = {
        key: RateFit(fit.latency_s, fit.per_s * factor, fit.error) if key.split(".")[0] in _FITS[what] else fit
        for key, fit in hardware.fits.items()
    }
    return replace(hardware, name=f"{hardware.name} with {factor:g} x {what}", **changes)  # type: ignore[arg-type]


def lever_effects(
    plan: Plan,
    trace: StepTrace,
    hardware: HardwareProfile,
    *,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[LeverEffect, ...]:
    """Gains of planning again as things are, and with `FACTOR` times each part of the machine.

    A lever never makes the step longer: the plan as it is remains a choice. Sorted by what each brings.

    Args:
        plan: of `trace`.
        trace: the step.
        hardware: what the plan runs on.
        progress: told before each lever.
    """
    device, host = plan.device_budget_bytes, plan.host_budget_bytes
    cases: list[tuple[str, HardwareProfile, int, int]] = [
        ("plan again, nothing changed", hardware, device, host),
        (f"device memory of {format_bytes(FACTOR * device)}", hardware, FACTOR * device, host),
    ]
    if plan.predicted.host_step_bytes:
        cases.append((f"host memory of {format_bytes(FACTOR * host)}", hardware, device, FACTOR * host))
        cases.append((f"{FACTOR} x the link to the host", faster(hardware, "host_link"), device, host))
    if plan.uses_disk:
        cases.append((f"{FACTOR} x the disk", faster(hardware, "disk"), device, host))
    if any(chunk.trainable and chunk.state_home != "device" for chunk in plan.chunks):
        cases.append((f"{FACTOR} x the host's Adam", faster(hardware, "host_adam"), device, host))
    if plan.world_size > 1:
        cases.append((f"{FACTOR} x the network between devices", faster(hardware, "peers"), device, host))
    cases.append((f"{FACTOR} x the device's compute and memory bandwidth", faster(hardware, "device"), device, host))
    now_s = simulate_step(plan, trace, hardware).step_s
    found = []
    for done, (action, machine, device_bytes, host_bytes) in enumerate(cases):
        if progress is not None:
            progress(action, done, len(cases))
        step_s = min(now_s, _planned_s(plan, trace, machine, device_bytes, host_bytes))
        if machine is not hardware:
            step_s = min(step_s, simulate_step(plan, trace, machine).step_s)
        found.append(LeverEffect(action, step_s, step_s - now_s))
    return tuple(sorted(found, key=lambda lever: (lever.change_s, lever.action)))


def request_of(plan: Plan, hardware: HardwareProfile) -> SearchRequest:
    """The question that `plan` answers, asked for this machine."""
    return SearchRequest(
        world_size=plan.world_size,
        optimizer_type=plan.optimizer,
        overlap=plan.overlap,
        device_memory=plan.device_budget_bytes,
        host_memory=plan.host_budget_bytes,
        disk_memory=plan.disk_budget_bytes if hardware.knows_disk else None,
        placement=plan.placement,
        accumulation=plan.accumulation,
        moments=plan.moments,
        speculate=plan.may_speculate,
        clipping=plan.clipping,
    )


def _planned_s(plan: Plan, trace: StepTrace, hardware: HardwareProfile, device_bytes: int, host_bytes: int) -> float:
    """Seconds of the step under the plan that would be made for this machine."""
    request = replace(request_of(plan, hardware), device_memory=device_bytes, host_memory=host_bytes)
    try:
        found = plan_or_shortage(trace, hardware, request)
    except PlanError:  # the budgets are those of a plan made elsewhere, by hand for example
        return float("inf")
    return simulate_step(found, trace, hardware).step_s
