"""Finds the fastest settings of a runtime that fit a machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elixir.errors import unknown_name
from elixir.runtimes import ddp, deepspeed, fsdp2
from elixir.runtimes.estimate import with_margin
from elixir.runtimes.work import Prediction, Setting, Work

_MODULES: dict[str, tuple[Callable[..., list[Setting]], Callable[[Work, Setting], Prediction]]] = {
    "ddp": (ddp.settings, ddp.predict),
    "fsdp2": (fsdp2.settings, fsdp2.predict),
    "deepspeed": (deepspeed.settings, deepspeed.predict),
}
RUNTIMES = tuple(_MODULES)
WorkOf = Callable[[str, int, bool], Work]
"""``work_of(runtime, micro, checkpoint)``: the step of one micro-batch as that runtime computes it."""


def predict(work: Work, setting: Setting) -> Prediction:
    """Predicts a step under a setting.

    Args:
        work: for FSDP2 and DeepSpeed of a model in the dtype of compute, for DDP of the step as it runs.
        setting: of any of `RUNTIMES`.
    """
    if setting.runtime not in _MODULES:
        raise unknown_name("runtime", setting.runtime, RUNTIMES)
    return _MODULES[setting.runtime][1](work, setting)


@dataclass(frozen=True)
class Choice:
    """A setting that was tried on a machine."""

    prediction: Prediction
    device_short: int
    """Bytes that one device lacks, margin included; at most 0 if it has enough."""
    host_short: int
    """Bytes that a host lacks."""

    @property
    def fits(self) -> bool:
        """Whether both have enough."""
        return self.device_short <= 0 and self.host_short <= 0


def choices(
    runtime: str, work_of: WorkOf, *, samples: int, world_size: int, device_bytes: int, host_bytes: int
) -> list[Choice]:
    """The settings of a runtime for a step of `samples` on each rank: those that fit, the fastest first; then others,
    those that lack least first.

    Of micro-batches the largest with which anything fits is taken, with checkpointing and without.

    Args:
        runtime: one of `RUNTIMES`.
        work_of: makes the work of a micro-batch.
        samples: of one rank and optimizer step.
        world_size: ranks.
        device_bytes: memory of one device.
        host_bytes: memory of one machine that may be used.
    """
    found: list[Choice] = []
    for checkpoint in (False, True):
        micro = samples
        while micro >= 1:
            work = work_of(runtime, micro, checkpoint)
            asked = {"checkpoint": checkpoint, "micro": micro, "accumulation": samples // micro}
            tried = [
                _choice(predict(work, setting), work, device_bytes, host_bytes)
                for setting in _MODULES[runtime][0](**asked, world_size=world_size)
            ]
            found += tried
            if any(each.fits for each in tried) or all(map(_is_hopeless, tried)):
                break
            micro = next((size for size in range(micro // 2, 0, -1) if samples % size == 0), 0)
    return sorted(found, key=_order)


def _is_hopeless(choice: Choice) -> bool:
    """Whether no smaller micro-batch would help: even without activations it lacks memory."""
    return choice.device_short > choice.prediction.parts.get("activations", 0) or choice.host_short > 0


def _order(choice: Choice) -> tuple[bool, float]:
    lacks = max(choice.device_short, 0) + max(choice.host_short, 0)
    return not choice.fits, choice.prediction.step_s if choice.fits else lacks


def _choice(prediction: Prediction, work: Work, device_bytes: int, host_bytes: int) -> Choice:
    needed = with_margin(prediction.device_bytes, work.hardware.device_kind)
    return Choice(prediction, needed - device_bytes, prediction.host_bytes - host_bytes)
