"""The tests' one door into the runtime.

Tests use public names, the classes of the package they test, and this file. Everything that a test of a whole run sees
or disturbs below the public names goes through here, so that a runtime of another shape changes this file and no test.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elixir.chunk.arena import Arena
from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients.chunk_gradient import ChunkGradient
from elixir.chunk.gradients.gradient_flow import GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.lanes import Lane, Lanes, Ticket
from elixir.chunk.rcache import RCache
from elixir.chunk.state_window import StateWindow
from elixir.hardware.host_share import HostShare
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.plan_promise import PlanPromise
from elixir.wrapper.engine import Engine, engine_of
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.optimizer import stepper_of
from elixir.wrapper.phase import Phase
from elixir.wrapper.step.shard import Shard

# --- memory ----------------------------------------------------------------------------------------------------------


def arena(module: ElixirModule) -> Arena:
    """The account of all memory, where a test reads it again and again."""
    return engine_of(module).arena


def bytes_by_kind(module: ElixirModule, home: str) -> dict[str, int]:
    """Bytes that are taken now on the ``device``, ``host`` or ``disk``, by what they hold."""
    return dict(engine_of(module).arena.parts(home))


def live_bytes(module: ElixirModule, home: str) -> int:
    """Bytes that are taken now."""
    return engine_of(module).arena.live_bytes(home)


def peak_bytes(module: ElixirModule, home: str) -> int:
    """The most bytes that were taken at a time."""
    return engine_of(module).arena.peak_bytes[home]


def host_buffers(module: ElixirModule, kind: str) -> Any:
    """The host buffers of a kind of `elixir.chunk.host_buffers`."""
    return engine_of(module).host_buffers.of(kind)


def spare_host_bytes(module: ElixirModule) -> int:
    """Host memory that the plan leaves for copies of a checkpoint."""
    return engine_of(module).spare_host_bytes()


# --- chunks, and the states of their shards --------------------------------------------------------------------------


def chunks(module: ElixirModule) -> list[Chunk]:
    """The chunks of a running plan."""
    return engine_of(module).chunks


def chunk_of(module: ElixirModule, weight: str | torch.Tensor) -> Chunk:
    """The chunk with a weight, given by its name or itself."""
    return next(
        chunk
        for chunk in chunks(module)
        if any(slot.name == weight if isinstance(weight, str) else slot.parameter is weight for slot in chunk.slots)
    )


def is_ordinary(module: ElixirModule, chunk: Chunk) -> bool:
    """Whether the weights of a chunk are ordinary parameters, resident and of one rank."""
    return engine_of(module).is_ordinary(chunk)


def shards(of: ElixirModule | ElixirOptimizer) -> list[Shard]:
    """The shards that an optimizer steps; of a module, those of its first optimizer."""
    stepper: Any = stepper_of(of) if isinstance(of, ElixirOptimizer) else engine_of(of).steppers[0]
    return list(stepper.shards)


def stepper(of: ElixirModule | ElixirOptimizer) -> Any:
    """The stepper of an optimizer; of a module, that of its only one."""
    if isinstance(of, ElixirOptimizer):
        return stepper_of(of)
    (found,) = engine_of(of).steppers
    return found


def optimizers(module: ElixirModule) -> int:
    """How many optimizers step a module."""
    return len(engine_of(module).steppers)


def forget_optimizers(module: ElixirModule) -> None:
    """Takes all optimizers off, as before the first was made."""
    engine_of(module).steppers.clear()


# --- the rCache, gradients, ranks ------------------------------------------------------------------------------------


def cache(module: ElixirModule) -> RCache:
    """The rCache."""
    return engine_of(module).cache


def gradients(module: ElixirModule) -> GradientFlow:
    """The way of gradients to where they live."""
    return engine_of(module).gradients


def gradient_of(module: ElixirModule, chunk: Chunk) -> ChunkGradient:
    """The gradients of a chunk."""
    return engine_of(module).gradients.by_chunk[chunk.index]


def holds_gradients(module: ElixirModule) -> bool:
    """Whether any gradients wait for a step."""
    return engine_of(module).holds_gradients()


def group(module: ElixirModule) -> Group:
    """The ranks of a module."""
    return engine_of(module).group


# --- lanes and phases ------------------------------------------------------------------------------------------------


def lane(module: ElixirModule, name: str) -> Lane:
    """A lane: ``fetch``, ``network``, ``offload``, ``host_adam``, ``refresh`` or ``disk``."""
    return engine_of(module).lanes.by_name()[name]


def lanes(module: ElixirModule) -> list[Lane]:
    """All lanes."""
    return list(engine_of(module).lanes.all())


def lane_set(module: ElixirModule) -> Lanes:
    """All lanes, by name."""
    return engine_of(module).lanes


def replace_lane(monkeypatch: pytest.MonkeyPatch, module: ElixirModule, name: str, other: Any) -> None:
    """Puts something in place of a lane."""
    monkeypatch.setitem(vars(engine_of(module).lanes), name, other)


def updates(module: ElixirModule) -> list[Ticket]:
    """Work that writes to weights or states of chunks at home, such as updates."""
    return [ticket for chunk in chunks(module) for ticket in chunk.home_uses.to_write()]


def phase(module: ElixirModule) -> Phase:
    """The phase of the step that the module is in."""
    return engine_of(module).phase.now


def loss_scale(module: ElixirModule) -> LossScale:
    """The scale of losses."""
    return engine_of(module).loss_scale


def window(module: ElixirModule) -> StateWindow:
    """The way of states between a disk and the host."""
    return engine_of(module).window


# --- plans and machines ----------------------------------------------------------------------------------------------


def may_replan(module: ElixirModule) -> bool:
    """Whether the plan is still corrected by what the first steps show."""
    return engine_of(module).before_forward is not None


def promise(module: ElixirModule) -> PlanPromise:
    """The module's promise about memory."""
    found: PlanPromise = vars(module)["_promise"]
    return found


def other_promise(module: ElixirModule, **options: Any) -> PlanPromise:
    """A second promise for the same module, as another model of the process makes it."""
    return PlanPromise(module.module, engine_of(module), **options)


def host_share(module: ElixirModule) -> HostShare:
    """The rank's share of its machine's cores."""
    return engine_of(module).host_share


def pretend_device(monkeypatch: pytest.MonkeyPatch, module: ElixirModule, device: torch.device) -> None:
    """Makes the runtime believe that the module computes there."""
    monkeypatch.setattr(engine_of(module), "device", device)


def engine(module: ElixirModule) -> Engine:
    """The whole runtime of a module, for the few tests of how its parts work together."""
    return engine_of(module)
