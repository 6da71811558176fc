"""Plans that let the host step chunks during backward, and what a run of one shows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elixir.plan import ChunkPlan, Plan
from elixir.wrapper import ElixirModule
from elixir.wrapper.engine import engine_of
from tests.common.parity import Case, Pair, make_plan, mixed, square_loss

HOMES = ("streamed", "states", "mixed")
"""Everything on the host; weights on the device and states on the host; chunks of every kind in turn."""


class Chain(nn.Module):
    """Layers of one chunk each, used one after the other."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x).tanh()
        return x


def chain(layers: int = 4) -> Case:
    torch.manual_seed(0)
    return Case(Chain(layers), {"x": torch.randn(4, 8)}, square_loss)


def backward_watched(pair: Pair, look: Callable[[torch.Tensor], None]) -> None:
    """Forward and backward of a `chain` under its plan; `look` is called when backward has come to the first layer."""

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(look)

    layers: Any = pair.module.module.layers
    handle = layers[0].register_forward_hook(watch)
    loss = pair.case.loss(pair.module, pair.case.inp)
    handle.remove()
    pair.optimizer.backward(loss)


def early_plan(case: Case, homes: str = "streamed", **options: Any) -> Plan:
    """A plan of one rank that steps in backward what the planner would, with other homes."""
    return rehomed(make_plan(case, "streamed", step_in_backward=True, **options), homes)


def rehomed(plan: Plan, homes: str) -> Plan:
    """The packing of a streamed plan with other homes; what can step in backward does where its states stay on the
    host."""
    early = [chunk.steps_in_backward for chunk in plan.chunks]
    plan = without(plan)
    if homes == "states":
        resident: dict[str, Any] = {"resident": True, "weight_home": "device"}
        states = [{"state_home": "host" if chunk.trainable else "device"} for chunk in plan.chunks]
        plan = replace(
            plan, chunks=tuple(replace(c, **resident, **s) for c, s in zip(plan.chunks, states, strict=True))
        )
    elif homes == "mixed":
        plan = mixed(plan)
    return with_steps(plan, early)


def with_steps(plan: Plan, early: list[bool]) -> Plan:
    """The plan with the chunks in `early` stepped in backward, of those with states on the host."""
    chunks: list[ChunkPlan] = [
        replace(chunk, steps_in_backward=flag and chunk.state_home == "host")
        for chunk, flag in zip(plan.chunks, early, strict=True)
    ]
    return replace(plan, chunks=tuple(chunks), may_step_in_backward=any(chunk.steps_in_backward for chunk in chunks))


def all_early(plan: Plan) -> Plan:
    """The plan by the hand of someone who thinks that every chunk with a gradient may step in backward."""
    return with_steps(plan, [chunk.trainable and chunk.grad_entry is not None for chunk in plan.chunks])


def without(plan: Plan) -> Plan:
    """The same plan with all steps after backward."""
    return with_steps(plan, [False] * len(plan.chunks))


def begun(module: ElixirModule) -> list[int]:
    """Chunks whose step has begun and that no `step` has finished."""
    return [chunk.index for chunk in engine_of(module).chunks if chunk.stepping]


def planned(plan: Plan) -> list[int]:
    """Chunks that the plan steps in backward."""
    return [index for index, chunk in enumerate(plan.chunks) if chunk.steps_in_backward]


def speculating(case: Case, homes: str = "streamed", **options: Any) -> Plan:
    """A plan of one rank under which every chunk that the host steps speculates, with other homes."""
    plan = rehomed(make_plan(case, "streamed", **options), homes)
    return all_speculating(plan)


def all_speculating(plan: Plan) -> Plan:
    """The plan with every chunk that the host steps speculating."""
    chunks = [
        replace(chunk, speculates=chunk.trainable and chunk.state_home == "host" and chunk.grad_entry is not None)
        for chunk in plan.chunks
    ]
    return replace(plan, chunks=tuple(chunks), may_speculate=True)


def attempts(module: ElixirModule) -> list[int]:
    """Chunks with new states that no `step` has looked at."""
    (stepper,) = engine_of(module).steppers
    return sorted(stepper.speculation._attempts)  # type: ignore[attr-defined]
