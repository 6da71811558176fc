"""Training with several micro-batches in a pass, next to the same accumulation in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elixir.models.layer_units import repeated_layers
from elixir.plan.plan import Plan
from elixir.search.planner import simple_plan
from elixir.search.request import SearchRequest
from elixir.search.searches import profile_for
from elixir.step_trace import INPUT, Result, StepShape, StepTrace, UnitActivations
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.step_report import StepReport
from tests.common.tiny_models import tiny

Make = Callable[[], nn.Module]
LossFn = Callable[[nn.Module, dict[str, Any]], torch.Tensor]
Steps = list[list[dict[str, Any]]]


def hf_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of a Hugging Face model; its random numbers follow from ``seed``, if the batch has one."""
    given = dict(batch)
    if "seed" in given:
        torch.manual_seed(given.pop("seed"))
    loss: torch.Tensor = model(**given).loss
    return loss


def family(name: str, **overrides: Any) -> Make:
    """Makes tiny members of a family whose layers run again in backward."""
    more = {"vocabulary": 10} if name == "vit" else {}
    return lambda: tiny(name, checkpoint="non-reentrant", **({"layers": 3} | more | overrides)).train()


def batches(name: str, count: int, steps: int = 2, *, seeds: bool = False) -> Steps:
    """Different micro-batches, every second one with padding, and with a seed each if asked."""
    generator = torch.Generator().manual_seed(1)
    made: list[dict[str, Any]] = []
    for number in range(steps * count):
        ids = torch.randint(3, 128, (2, 24), generator=generator)
        if name == "vit":
            pixels = torch.randn(2, 3, 32, 32, generator=generator)
            made.append({"pixel_values": pixels, "labels": ids[:, 0] % 10})
            continue
        batch: dict[str, Any] = {"input_ids": ids, "labels": ids[:, : 12 if name == "t5" else 24].clone()}
        if number % 2:
            batch["attention_mask"] = torch.ones(2, 24, dtype=torch.long)
            batch["attention_mask"][0, 19:] = 0
        made.append(batch | ({"seed": 100 + number} if seeds else {}))
    return [made[step * count : (step + 1) * count] for step in range(steps)]


def plan_for(
    model: nn.Module,
    batch: dict[str, Any],
    loss: LossFn = hf_loss,
    *,
    accumulation: int,
    pass_size: int | None = None,
    home: str = "cpu",
    on_host: bool = False,
    again: bool = False,
    **options: Any,
) -> Plan:
    """A plan by hand, all of it on the host or on the device, for passes of all micro-batches unless said otherwise.

    With `on_host`, what each repeated layer is called with waits on the host. With `again`, the plan makes layers run
    again, not the model.
    """
    profile = profile_for("cpu")

    def traced(*activations: UnitActivations) -> StepTrace:
        return trace_step(
            model, batch, lambda m, b: loss(m, b).backward(), hardware=profile, shape=StepShape(activations=activations)
        )

    trace = traced(*(UnitActivations(name, ()) for name in repeated_layers(model).values() if again))
    if on_host:
        able = set(repeated_layers(model).values()) & set(trace.step.checkpointed)
        trace = traced(*(UnitActivations(name, (), (Result(INPUT, 0),)) for name in sorted(able)))
    size = accumulation if pass_size is None else pass_size
    options = {"world_size": 1, "host_budget": "64GiB"} | options
    request = SearchRequest(accumulation=accumulation, pass_size=size, **options)
    by_hand = {"split_number": 8, "allocate_factor": 0.5, "shard_device": home}
    return simple_plan(trace, profile, request, **by_hand)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Trained:
    """The outcome of a short training."""

    losses: list[torch.Tensor]
    weights: dict[str, torch.Tensor]
    reports: tuple[StepReport, ...] = ()

    def same_as(self, other: Trained) -> bool:
        """Whether all losses and weights have the same bits."""
        same = all(torch.equal(one, two) for one, two in zip(self.losses, other.losses, strict=True))
        return same and all(torch.equal(value, other.weights[name]) for name, value in self.weights.items())


def plainly(make: Make, steps: Steps, loss: LossFn = hf_loss, max_norm: float = 0.0) -> Trained:
    """Accumulates in plain PyTorch."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        for batch in step:
            found = loss(model, batch) / len(step)
            found.backward()
            losses.append(found.detach())
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, {name: value.clone() for name, value in model.state_dict().items()})


def in_passes(
    make: Make,
    steps: Steps,
    plan: Plan | None = None,
    loss: LossFn = hf_loss,
    max_norm: float = 0.0,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> Trained:
    """Trains under a plan, by default all on the host and in one pass per step, with `ElixirOptimizer.accumulate`."""
    model = make()
    made = plan or plan_for(model, steps[0][0], loss, accumulation=len(steps[0]))
    module = ElixirModule(model, made, device="cpu", **options)
    try:
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters(), lr=1e-2), max_norm=max_norm)
        losses, reports = [], []
        for step in steps:
            with around():
                losses += optimizer.accumulate(stepping(optimizer, loss, len(step)), step)
            optimizer.step()
            reports.append(module.last_report)
            optimizer.zero_grad()
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        return Trained(losses, weights, tuple(report for report in reports if report is not None))
    finally:
        module.close()


def stepping(optimizer: ElixirOptimizer, loss: LossFn, count: int) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Forward and backward of one of `count` micro-batches."""

    def step_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        found = loss(model, batch) / count
        optimizer.backward(found)
        return found.detach()

    return step_fn


class Stack(nn.Module):
    """Layers between an input and an output layer, each run again in backward.

    Args:
        layers: called one after the other.
    """

    def __init__(self, layers: Sequence[nn.Module], width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = self.between(number, self.run(layer, x))
        out: torch.Tensor = self.last(x)
        return out

    def run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Calls a layer, with activation checkpointing."""
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return out

    def between(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Runs after each layer."""
        return x


def square_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The mean of the squared output."""
    loss: torch.Tensor = model(batch["x"]).square().mean()
    return loss


def vectors(count: int, steps: int = 2, width: int = 8) -> Steps:
    """Micro-batches for `Stack`."""
    generator = torch.Generator().manual_seed(2)
    return [[{"x": torch.randn(4, width, generator=generator)} for _ in range(count)] for _ in range(steps)]


def seeded(build: Make) -> Make:
    """`build` with the same weights each time."""

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build().train()

    return make


class Layer(nn.Module):
    """A layer that may read more than its input."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        for each in more:
            x = x * each + each.sin()
        return torch.tanh(self.linear(x)) + x


def three() -> list[nn.Module]:
    return [Layer() for _ in range(3)]
