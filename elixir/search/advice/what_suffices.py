"""Where nothing fits: the changes that suffice, found by planning with each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from elixir.errors import InputError, Lever, PlanError, TraceError, readable_bytes
from elixir.hardware import HardwareProfile
from elixir.plan import Plan
from elixir.search.advice.changes import Change, job_changes, smaller_batch
from elixir.search.budgets import CUDA_CONTEXT_BYTES
from elixir.search.problem import Setting
from elixir.search.propose import Budgets
from elixir.search.request import SearchRequest
from elixir.search.simulator import main_dtype
from elixir.step_trace import StepTrace
from elixir.units import dtype_bytes, format_bytes


class Tries(Protocol):
    """Plans with something changed, and gives no advice itself."""

    def lacking_bytes(self, trace: StepTrace, request: SearchRequest) -> int:
        """By how much weights and states exceed all memory together, whatever a batch takes; 0 if they do not."""

    def least_host_bytes(self, trace: StepTrace, request: SearchRequest) -> int | None:
        """Host memory of a machine for a plan with overlap and chunks of a sensible size; None where none is enough."""

    def plan(self, trace: StepTrace, request: SearchRequest, *, briefly: bool) -> Plan | None:
        """The plan; None where nothing fits. `briefly`, without the sizes that are tried when nothing else fits."""


MOST_PAIRS = 8


def with_what_suffices(
    error: PlanError,
    trace: StepTrace,
    hardware: HardwareProfile,
    request: SearchRequest,
    budgets: Budgets,
    tries: Tries,
) -> PlanError:
    """The error with the levers that suffice first, the fastest step first; then what is not enough alone.

    Args:
        error: what was found to be missing.
        trace: the step that does not fit.
        hardware: the machine.
        request: as asked.
        budgets: what it came to.
        tries: plans with each change.
    """
    lacks_device = error.available_bytes == budgets.device_bytes and error.available_bytes != budgets.host_bytes
    needed_bytes = error.needed_bytes
    if not lacks_device:  # the least host memory without overlap is hardly less than with it, and makes slow steps
        needed_bytes = max(needed_bytes, tries.least_host_bytes(trace, request) or 0)
    of_the_machine = _of_the_machine(hardware, request, needed_bytes, lacks_device=lacks_device)
    changes = [*_of_the_job(trace, request), *of_the_machine]
    tried = {change: _step_s(change, trace, hardware, request, tries) for change in changes}
    enough = {change: step_s for change, step_s in tried.items() if step_s is not None}
    if not enough:
        several = _pairs(_of_the_job(trace, request))
        found = {pair: _step_s(pair, trace, hardware, request, tries) for pair in several}
        enough = {pair: step_s for pair, step_s in found.items() if step_s is not None}
    first = [
        Lever(c.action, 0, argument=c.options[0][0], value=c.options[0][1], options=c.options, step_s=step_s)
        for c, step_s in enough.items()
    ]
    settled = {name for change in tried for name, _ in change.options}
    fewer_bits = any(change.kinds == ("moments",) for change in enough)
    rest = [
        replace(lever, comes_last=lever.comes_last or (fewer_bits and lever.argument == "disk_memory"))
        for lever in error.levers
        if lever.argument not in settled
    ]
    short = [
        Lever(change.action, 0, argument=change.options[0][0], options=change.options, enough=False)
        for change, step_s in tried.items()
        if step_s is None
    ]
    lacking = tries.lacking_bytes(trace, request) if lacks_device and not enough else 0
    if lacking:  # or one would cut the batch until the device does, and then hear of the host
        action = "give the host more memory as well, for weights and optimizer states"
        rest.append(Lever(action, lacking, "adds", argument="host_memory"))
    return PlanError(
        error.what,
        needed_bytes=error.needed_bytes,
        available_bytes=error.available_bytes,
        levers=(*first, *short, *rest, *_lora(trace, budgets)),
    )


def settled_arguments(trace: StepTrace, hardware: HardwareProfile, request: SearchRequest) -> frozenset[str]:
    """Arguments that `with_what_suffices` tries, whatever is missing."""
    changes = (*_of_the_job(trace, request), *_more_ranks(hardware, request))
    return frozenset(name for change in changes for name, _ in change.options)


def _of_the_job(trace: StepTrace, request: SearchRequest) -> list[Change]:
    found = [change for change in job_changes(trace, request) if change.checkpoint != "none"]
    found += smaller_batch(trace, request)
    if request.placement != "auto":
        action = f"let weights and states live on host and device (instead of placement '{request.placement}')"
        found.append(Change(("placement",), action, (("placement", "auto"),), (("placement", "auto"),)))
    return found


def _of_the_machine(
    hardware: HardwareProfile, request: SearchRequest, needed_bytes: int, *, lacks_device: bool
) -> Iterator[Change]:
    """So much of what is short, the device or the host, as far as one can ask for it, and twice the ranks."""
    needed = readable_bytes(needed_bytes, up=True).replace(" ", "")
    if not lacks_device:
        yield Change(("machine",), "give the host more memory", (("host_memory", needed),), _sized("host", needed))
    elif needed_bytes <= hardware.device_memory_bytes - CUDA_CONTEXT_BYTES or hardware.device_kind == "cpu":
        action = "let the plan have more of the device"
        yield Change(("machine",), action, (("device_memory", needed),), _sized("device", needed))
    yield from _more_ranks(hardware, request)


def _more_ranks(hardware: HardwareProfile, request: SearchRequest) -> Iterator[Change]:
    ranks = 2 * request.world_size
    if ranks <= hardware.devices_per_host or hardware.network_bytes_per_s is not None:
        yield Change(("machine",), f"run on {ranks} ranks", (("world_size", str(ranks)),), (("world_size", ranks),))


def _sized(which: str, size: str) -> tuple[tuple[str, str | None], ...]:
    """A budget that is given leaves no reserve to ask for."""
    return ((f"{which}_memory", size), (f"{which}_reserve", None))


def _pairs(changes: Sequence[Change]) -> list[Change]:
    """Two changes of different kinds at once, those that save most of each kind first."""
    strongest = [change for change in changes if dict(change.options).get("moments") != "bfloat16"]
    pairs = (one + other for one, other in itertools.combinations(strongest, 2) if one.kinds != other.kinds)
    return list(itertools.islice(pairs, MOST_PAIRS))


def _step_s(
    change: Change, trace: StepTrace, hardware: HardwareProfile, request: SearchRequest, tries: Tries
) -> float | None:
    """Seconds for as many samples as the step has, all ranks together; None where it does not fit or cannot be."""
    try:
        if tries.lacking_bytes(trace, replace(request, **dict(change.request))):
            return None  # nothing that a trace shows could change that
        other, asked = change.applied(trace, hardware, request)
        found = tries.plan(other, asked, briefly=change.kinds != ("machine",))
    except (InputError, PlanError, TraceError):
        return None
    return None if found is None else found.predicted.step_s


def _lora(trace: StepTrace, budgets: Budgets) -> Iterator[Lever]:
    """Training a few added weights leaves the weights, once, and what a batch takes."""
    if not any(param.trainable for param in trace.parameters):
        return
    width = dtype_bytes(main_dtype(trace))
    takes = trace.numel * width
    live = _live_bytes(trace)
    if live <= budgets.device_bytes and takes + live <= budgets.device_bytes + budgets.host_bytes:
        action = (
            f"train with LoRA (a model of peft, not planned here): frozen weights take {format_bytes(takes)} of device "
            f"and host together, activations {format_bytes(live)} of the device"
        )
        yield Lever(action, 0)


def lacks_room(trace: StepTrace, setting: Setting, budgets: Budgets) -> int:
    """Bytes by which weights, master weights and states exceed all devices, hosts and disks; 0 where they do not.

    Each lies somewhere, once, wherever that is.
    """
    machines = math.ceil(setting.world_size / setting.ranks_per_host)
    there = setting.world_size * budgets.device_bytes + machines * (budgets.host_bytes + budgets.disk_bytes)
    return max(trace.param_bytes + trace.state_bytes(setting.states) - there, 0)


def lacks_device(trace: StepTrace, budgets: Budgets) -> int:
    """Bytes by which what a batch takes exceeds a device, wherever weights are; 0 where it does not."""
    return max(_live_bytes(trace) - budgets.device_bytes, 0)


def _live_bytes(trace: StepTrace) -> int:
    return max((access.live_bytes for access in trace.accesses), default=0) + trace.buffer_bytes
