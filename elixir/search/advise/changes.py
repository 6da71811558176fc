"""Changes that a user may make: of the step, of what is asked of its plan, and of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from elixir.errors import readable_bytes
from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import PRODUCTS
from elixir.hardware.scenario import scaled
from elixir.optimizer_states import is_adam, optimizer_name
from elixir.plan.activations import passes_together
from elixir.plan.plan import Plan
from elixir.plan.process_need import must_be_free_bytes
from elixir.search.advise.activations import trace_that_keeps
from elixir.search.budgets import CUDA_CONTEXT_BYTES
from elixir.search.question import Question, StepQuestion
from elixir.search.request import FREE_HERE
from elixir.units import format_bytes, parse_bytes

Kind = Literal["moments", "kernels", "batch", "accumulation", "checkpointing", "activations", "placement", "machine"]
MORE_BATCHES = 4
"""How many times as many batches a step that accumulates has."""
LARGER = (4, 2)
"""How many times as large a micro-batch is; the first that fits."""
LESS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Parts of the memory that a plan takes, with less of which another may be as fast."""
FACTOR = 2
"""A change of the machine multiplies one part of it by this."""


@dataclass(frozen=True)
class Change:
    """One thing, or several, done differently."""

    kinds: tuple[Kind, ...]
    action: str
    """In the imperative."""
    options: tuple[tuple[str, str], ...] = ()
    """Arguments that do it, with their values; a switch has none."""
    request: tuple[tuple[str, Any], ...] = ()
    """Fields of `SearchRequest`."""
    step: tuple[tuple[str, Any], ...] = ()
    """Fields of `StepQuestion`, which take another trace."""
    hardware: HardwareProfile | None = None
    """Another machine; None: the same."""

    def __add__(self, other: Change) -> Change:
        """Both changes at once; neither may bring another machine."""
        return Change(
            self.kinds + other.kinds,
            f"{self.action}, and {other.action}",
            self.options + other.options,
            self.request + other.request,
            self.step + other.step,
        )

    def applied(self, question: Question) -> Question:
        """The question with the change made.

        Raises:
            InputError: the change contradicts something else that is asked.
            TraceError: the changed step cannot be traced.
        """
        trace, hardware = question.trace, self.hardware or question.hardware
        if self.step:
            trace = replace(StepQuestion.again(trace), **dict(self.step)).trace(hardware)
        request = replace(question.request, **dict(self.request))
        if "activations" in self.kinds:
            trace = trace_that_keeps(StepQuestion(model=trace), hardware, request, exact=False)
        return Question(trace, hardware, request)


CHOOSE_ACTIVATIONS = Change(
    ("activations",), "choose for each layer which activations are kept", (("activations", "auto"),)
)


def of_the_training(question: Question) -> Iterator[Change]:
    """Changes of the training, not of the machine, that are not in effect already."""
    trace, request = question.trace, question.request
    if request.moments == "float32" and is_adam(optimizer_name(request.optimizer_type)):
        for moments in ("bfloat16", "8bit"):
            action = f"keep Adam's moments in {'8 bits' if moments == '8bit' else moments}"
            yield Change(("moments",), action, (("moments", moments),), (("moments", moments),))
    if trace.step.checkpoint is None:
        return  # it cannot be traced again
    if not trace.step.fused_kernels:
        yield Change(("kernels",), "use fused kernels", (("fused_kernels", ""),), step=(("use_fused_kernels", True),))
    if trace.step.forward:
        return  # nothing is kept for a backward
    forms = ["none", "non-reentrant"]
    if len(trace.checkpointed_modules) > 1:
        forms.append(f"non-reentrant:{len(trace.checkpointed_modules) // 2}")
    if trace.checkpointed_modules and request.pass_size == 1 and not trace.step.activations:
        yield CHOOSE_ACTIVATIONS
    for form in forms:
        if form != trace.step.checkpoint:
            action = "checkpoint no activations" if form == "none" else "checkpoint activations"
            action += f" of the first {form.partition(':')[2]} layers" if ":" in form else ""
            yield Change(("checkpointing",), action, (("checkpoint", form),), step=(("checkpoint", form),))


def for_speed(question: Question) -> Iterator[Change]:
    """Changes of the training, some of which have more samples a step, so that weights move and updates are made less
    often."""
    trace, request = question.trace, question.request
    yield from of_the_training(question)
    if trace.step.forward:
        return
    count = request.accumulation
    if count > 1 and request.pass_size == 1 and passes_together(trace.step):
        action = f"fetch each layer once for all {count} micro-batches"
        yield Change(("accumulation",), action, (("pass_size", str(count)),), (("pass_size", count),))
    count *= MORE_BATCHES
    action = f"accumulate {count} batches a step"
    yield Change(("accumulation",), action, (("accumulation", str(count)),), (("accumulation", count),))


def larger_batches(question: Question) -> list[Change]:
    """Larger micro-batches, the largest first."""
    step = question.trace.step
    if not step.samples or step.checkpoint is None or step.forward:
        return []
    sizes = (factor * step.samples for factor in LARGER)
    return [
        Change(("batch",), f"compute micro-batches of {n}", (("batch", str(n)),), step=(("batch", n),)) for n in sizes
    ]


def with_less(plan: Plan, question: Question) -> Iterator[list[Change]]:
    """Less of the device's memory, and less of the host's: changes of each, the one that saves most first."""
    request, host, others = question.request, "host_budget", 0
    free: tuple[tuple[str, Any], ...] = (("host_memory", None),)
    if request.host_memory not in (None, FREE_HERE):
        host, free = "host_memory", ()
        others = must_be_free_bytes(plan, question.hardware) - plan.predicted.host_peak_bytes
    for which, option, taken, rest, also in (
        ("device", "device_memory", plan.predicted.device_peak_bytes, 0, ()),
        ("host", host, plan.predicted.host_step_bytes, others, free),
    ):
        if not taken or getattr(request, f"{which}_reserve") is not None:  # a size goes with no reserve
            continue
        sizes = (readable_bytes(int(part * taken) + rest, up=True).replace(" ", "") for part in LESS)
        action = f"plan with less of the {which}"
        yield [Change(("machine",), action, ((option, size),), ((option, size), *also)) for size in sizes]


def for_memory(question: Question) -> Iterator[Change]:
    """Changes of the training that may take less memory, and leave its samples a step."""
    yield from (change for change in of_the_training(question) if ("checkpoint", "none") not in change.step)
    trace, request = question.trace, question.request
    if trace.forwards and request.pass_size == 1 and not trace.checkpointed_modules:
        yield CHOOSE_ACTIVATIONS
    yield from in_parts(question, 2)
    if request.placement != "auto":
        action = f"let weights and states live on host and device (instead of placement '{request.placement}')"
        yield Change(("placement",), action, (("placement", "auto"),), (("placement", "auto"),))
    if request.replicas not in (1, "auto"):
        action = f"shard over all {request.world_size} ranks (instead of {request.replicas} replicas)"
        yield Change(("placement",), action, (("replicas", "1"),), (("replicas", 1),))


def in_parts(question: Question, parts: int) -> Iterator[Change]:
    """The samples of a step in `parts` times as many micro-batches, if they can be cut so."""
    step = question.trace.step
    if step.samples and step.samples % parts == 0 and step.checkpoint is not None and not step.forward:
        count, size = parts * question.request.accumulation, step.samples // parts
        options = (("batch", str(size)), ("accumulation", str(count)))
        action = f"cut the step into {count} batches of {size}"
        yield Change(("accumulation",), action, options, (("accumulation", count),), (("batch", size),))


def more_machine(question: Question, which: Literal["device", "host"], size: str, size_bytes: int) -> Iterator[Change]:
    """The lever of more of the memory that is short, as far as one can ask for it, and that of twice the ranks."""
    hardware, ranks = question.hardware, FACTOR * question.request.world_size
    there = hardware.device_memory_bytes - CUDA_CONTEXT_BYTES
    if which == "host" or size_bytes <= there or hardware.device_kind == "cpu":
        action = "give the host more memory" if which == "host" else "let the plan have more of the device"
        option = question.request.host_option if which == "host" else "device_memory"
        # A budget that is given leaves no reserve to ask for.
        yield Change(("machine",), action, ((option, size),), ((option, size), (f"{which}_reserve", None)))
    if ranks <= hardware.devices_per_host or hardware.network_bytes_per_s is not None:
        yield Change(("machine",), f"run on {ranks} ranks", (("world_size", str(ranks)),), (("world_size", ranks),))


def better_machine(plan: Plan, question: Question) -> Iterator[Change]:
    """`FACTOR` times each part of the machine that the plan of a question uses; first, nothing."""
    hardware, option, given = question.hardware, question.request.host_option, question.request.host_memory
    device, host = FACTOR * plan.device_budget_bytes, FACTOR * plan.host_budget_bytes
    free: tuple[tuple[str, Any], ...] = ()
    if given is None or given == FREE_HERE:
        option, free = "host_budget", (("host_memory", None), ("host_reserve", None))
    else:
        host = FACTOR * parse_bytes(given)
    yield Change(("machine",), "plan again, nothing changed")
    yield Change(("machine",), f"device memory of {format_bytes(device)}", request=(("device_memory", device),))
    hosted = plan.predicted.host_step_bytes > 0
    if hosted:
        action = f"{option.replace('_', ' ')} of {format_bytes(host)}"
        yield Change(("machine",), action, request=((option, host), *free))
    for what, name, used in (
        ("host_link", "the link to the host", hosted),
        ("disk", "the disk", plan.uses_disk or plan.reads_files),
        ("host_adam", "the host's Adam", any(c.trainable and c.state_home != "device" for c in plan.chunks)),
        ("peers", "the network between devices", plan.world_size > 1),
        ("device", "the device's compute and memory bandwidth", True),
    ):
        if used:
            yield Change(("machine",), f"{FACTOR} x {name}", hardware=faster(hardware, what))


_PARTS = {
    "host_link": ("host_to_device", "device_to_host", "host_memory"),
    "host_adam": ("host_adam",),
    "peers": ("device_to_device", "all_gather", "reduce_scatter"),
    "device": (*PRODUCTS, "elementwise", "activation", "reduction", "device_adam"),
    "disk": ("disk_read", "disk_write"),
}
"""Part that gets faster -> families of rates. Host memory goes with the link, which it feeds."""


def faster(hardware: HardwareProfile, what: str, factor: float = FACTOR) -> HardwareProfile:
    """The machine with some of its rates `factor` times as high; latencies stay.

    Args:
        what: ``host_link``, ``host_adam``, ``peers`` (devices of one machine, and machines), ``disk`` or ``device``
            (all that it computes, its own memory included).
    """
    found = scaled(hardware, dict.fromkeys(_PARTS[what], factor))
    if what == "device":
        found = replace(found, flops_per_s={dtype: rate * factor for dtype, rate in hardware.flops_per_s.items()})
    if what == "peers" and hardware.network_bytes_per_s is not None:
        found = replace(found, network_bytes_per_s=hardware.network_bytes_per_s * factor)
    return replace(found, name=f"{hardware.name} with {factor:g} x {what}")
