"""Made-up situations for a search: a step, a machine, and what is asked, by the name of the family and a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from elixir.hardware.profile import HardwareProfile
from elixir.hardware.rate_fit import RateFit
from elixir.search.advise.activations import trace_that_keeps
from elixir.search.question import StepQuestion
from elixir.search.request import SearchRequest
from elixir.step_trace import Form, StepTrace
from elixir.units import GIB
from tests.common.layered_steps import layered_step, some_layers, taken_piecewise
from tests.common.samples import make_hardware
from tests.common.small_searches import small_trace


def made_up_machine(draw: random.Random) -> HardwareProfile:
    """A machine with random speeds, of which some are known as fits."""
    some = lambda: 10 ** draw.uniform(-0.7, 0.7)  # noqa: E731
    maybe = lambda value: draw.choice((None, value))  # noqa: E731
    kind = draw.choice(("cuda", "cuda", "cuda", "cpu"))
    link, fits = 1e10 * some(), {}
    if draw.random() < 0.4:
        fits = {
            "host_adam": RateFit(2e-5, 3e9 * some(), 0.1),
            "host_to_device": RateFit(1e-5, link, 0.02),
            "device_to_host": RateFit(1e-5, link * 0.9, 0.02),
            "host_to_device.both": RateFit(1e-5, link * 0.7, 0.02),
        }
    return replace(
        make_hardware(),
        device_kind=kind,
        compute_capability=(9, 0) if kind == "cuda" else None,
        devices_per_host=draw.choice((1, 2, 8)),
        flops_per_s={"bfloat16": 1.7e14 * some()},
        device_memory_bytes_per_s=1e12 * some(),
        host_memory_bytes_per_s=1e11 * some(),
        host_to_device_bytes_per_s=link,
        device_to_host_bytes_per_s=link * draw.choice((1.0, 0.8)),
        device_to_device_bytes_per_s=3e10 * some(),
        host_adam_numel_per_s=3e9 * some(),
        device_adam_numel_per_s=3e10 * some(),
        host_memory_bytes=512 * GIB,
        network_bytes_per_s=5e9 * some(),
        network_latency_s=2e-5,
        disk_read_bytes_per_s=3e9 * some(),
        disk_write_bytes_per_s=2e9 * some(),
        disk_free_bytes=100 * GIB,
        launch_s=maybe(5e-6),
        contention=maybe(0.2),
        sustained_flops_share=maybe(0.5),
        sustained_memory_share=maybe(0.8),
        host_adam_least=maybe(0.5),
        link_least=maybe(0.7),
        early_kept=maybe(0.9),
        fits=fits,
    )


def asked(draw: random.Random, param_bytes: int) -> dict[str, Any]:
    """Options of a search; the budgets are between too little and enough."""
    world_size = draw.choice((1, 1, 2, 4, 8))
    options: dict[str, Any] = {
        "asked": world_size,
        "device_memory": int(param_bytes * draw.uniform(0.5, 8)) + 64 * 2**20,
        "host_budget": int(param_bytes * draw.uniform(2, 20)),
        "optimizer_type": draw.choice(("Adam", "Adam", "AdamW", "SGD")),
        "overlap": draw.random() < 0.9,
        "accumulation": draw.choice((1, 1, 2, 4)),
        "clipping": draw.choice((None, True, False)),
        "early_updates": draw.choice((None, None, True, False)),
        "assume": draw.choice(("scenarios", "nominal")),
    }
    if options["optimizer_type"] != "SGD":
        options["moments"] = draw.choice(("float32", "float32", "bfloat16", "8bit"))
    if draw.random() < 0.3:
        options |= {"disk_memory": 50 * GIB, "host_budget": int(param_bytes * draw.uniform(1, 6))}
    if draw.random() < 0.3:
        options["frozen_weights"] = "files"
    if world_size >= 4 and draw.random() < 0.5:
        options["replicas"] = draw.choice(("auto", 2))
    if options["accumulation"] > 1 and draw.random() < 0.5:
        options["pass_size"] = "auto"
    return options


def layered(draw: random.Random) -> tuple[StepTrace, HardwareProfile, dict[str, Any]]:
    """A step of layers, and more options: activations moved or made again, passes, other optimizers, layers as one."""
    form: Form = draw.choice(("plain", "plain", "checkpointed", "checkpointed", "compiled"))
    layers, kind = (
        some_layers(draw, form),
        draw.choice(("", "", "", "", "adapters", "adapters", "copies", "copies", "untrained")),
    )
    trace = layered_step(layers, trained=kind != "untrained", adapters=kind == "adapters", copies=kind == "copies")
    machine, options = made_up_machine(draw), asked(draw, trace.param_bytes)
    options["device_memory"] = int(trace.activation_peak_bytes + trace.param_bytes * draw.uniform(0.2, 3)) + 2**26
    options["host_budget"] *= draw.choice((1, 3, 3, 3))
    options["search"] = draw.choice(("optimal", "optimal", "optimal", "optimal", "minimum_waste"))
    if kind == "untrained":
        return (
            trace,
            machine,
            options | {"optimizer_type": None, "accumulation": 1, "pass_size": 1, "moments": "float32"},
        )
    trace = trace if draw.choice((True, False, True)) else taken_piecewise(trace)
    if draw.random() < 0.25:
        options |= {"optimizer_type": "Muon + AdamW", "moments": "float32"}
    if draw.random() < 0.2:
        options["placement"] = draw.choice(("cpu", "cuda"))
    if draw.random() < 0.2:
        options["reserve"] = 10**8
    if form == "checkpointed":
        options |= {"accumulation": 4, "pass_size": draw.choice((1, 2, "auto", "auto"))}
    elif "pass_size" in options:
        options["pass_size"] = 1
    if trace.forwards and draw.random() < 0.7:
        asked_for = {name: value for name, value in options.items() if name != "asked"} | {"pass_size": 1}
        request = SearchRequest.of(options["asked"], **asked_for)
        trace = trace_that_keeps(StepQuestion(model=trace), machine, request, exact=False)
    return trace, machine, options


def situation(name: str) -> tuple[StepTrace, HardwareProfile, dict[str, Any]]:
    """A step, a machine, and what is asked."""
    family, _, seed = name.rpartition(" ")
    draw = random.Random(int(seed))
    if family:
        return layered(draw)
    trace, machine = small_trace(draw, draw.randint(2, 7)), made_up_machine(draw)
    return trace, machine, asked(draw, trace.param_bytes)
