"""`PlanPromise`: the memory of this machine that one plan at work may take, for the ledger of the process."""

from __future__ import annotations

import math

from torch import nn

from elixir.errors import InputError
from elixir.hardware import promises
from elixir.hardware.memory import free_device_bytes, free_host_bytes
from elixir.hardware.promises import Memory
from elixir.plan.plan import Plan
from elixir.wrapper.engine import Engine


class PlanPromise:
    """The promise to one model, whichever plan it runs under; on the ledger while the plan is at work.

    Args:
        engine: of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.ranks = engine.host_share.ranks
        self.device = str(engine.device)
        promises.enter(self)

    @property
    def promised(self) -> Memory:
        """The peaks of the plan."""
        predicted = self._engine.plan.predicted
        return Memory(predicted.device_peak_bytes, predicted.host_peak_bytes)

    @property
    def taken(self) -> Memory:
        """Buffers of the runtime and of the model; those of the host for all ranks of the machine."""
        engine = self._engine
        buffers = sum(each.nbytes for each in engine.model.buffers() if each.device.type == engine.device.type)
        held = engine.arena.live_bytes
        return Memory(held("device") + buffers, held("host") * self.ranks)


def refuse_exceeded(plan: Plan, model: nn.Module, engine: Engine) -> None:
    """Refuses a plan for which the promises to other models of this process leave too little memory.

    Raises:
        InputError: says what is needed, what is left, and what to do.
    """
    predicted = plan.predicted
    try:
        on_host = free_host_bytes()
    except InputError:  # this operating system does not tell it
        return
    on_device = math.inf if engine.device.type == "cpu" else free_device_bytes(engine.device)
    own = [(each.device.type, each.nbytes) for each in (*model.parameters(), *model.buffers()) if not each.is_meta]
    promises.refuse_exceeded(
        Memory(predicted.device_peak_bytes, predicted.host_peak_bytes),
        Memory(int(min(on_device, 2**62)), on_host),
        str(engine.device),
        engine.host_share.ranks,
        name=type(model).__name__,
        own=own,
    )
