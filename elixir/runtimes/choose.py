"""Finds the fastest settings of a runtime that fit a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elixir.errors import InputError, unknown_name
from elixir.runtimes import ddp, deepspeed, fsdp2
from elixir.runtimes.estimate import with_margin
from elixir.runtimes.work import Prediction, Setting, Work

_MODULES: dict[str, tuple[Callable[..., list[Setting]], Callable[[Work, Setting], Prediction]]] = {
    "ddp": (ddp.settings, ddp.predict),
    "fsdp2": (fsdp2.settings, fsdp2.predict),
    "deepspeed": (deepspeed.settings, deepspeed.predict),
}
RUNTIMES = tuple(_MODULES)
ALIKE = 1.01
"""Two settings take as long if their seconds differ by no more; the one with less of the device comes first then."""
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
    runtime: str,
    work_of: WorkOf,
    *,
    samples: int,
    micro: int | None = None,
    world_size: int,
    device_bytes: int,
    host_bytes: int,
    checkpoints: Sequence[bool] = (False, True),
) -> list[Choice]:
    """The settings of a runtime for a step of `samples` on each rank: those that fit, the fastest first (`ALIKE`); then
    others, those that lack least first. Each has the largest micro-batch with which it fits, or one sample.

    Args:
        runtime: one of `RUNTIMES`.
        work_of: makes the work of a micro-batch; an `InputError` says that the model cannot run so.
        samples: of one rank and optimizer step.
        micro: the most samples of a micro-batch; None: all of them.
        world_size: ranks.
        device_bytes: memory of one device.
        host_bytes: memory of one machine that may be used.
        checkpoints: whether layers run again in backward.

    Raises:
        InputError: the model can run in no way that was asked for.
    """
    if runtime not in _MODULES:
        raise unknown_name("runtime", runtime, RUNTIMES)
    settings_of, _ = _MODULES[runtime]
    found, problem = dict[Setting, Choice](), InputError("no form of checkpointing was asked for")
    sizes = [size for size in range(micro or samples, 0, -1) if samples % size == 0]
    for checkpoint in checkpoints:
        for size in sizes:
            try:
                work = work_of(runtime, size, checkpoint)
            except InputError as error:
                problem = error
                break
            left = False
            counts: dict[str, Any] = {"checkpoint": checkpoint, "micro": size, "accumulation": samples // size}
            for setting in settings_of(**counts, world_size=world_size):
                key = replace(setting, micro=0, accumulation=0)
                if key in found and (found[key].fits or _is_hopeless(found[key])):
                    continue
                found[key] = _choice(predict(work, setting), work, device_bytes, host_bytes)
                left |= not (found[key].fits or _is_hopeless(found[key]))
            if not left:
                break
    if not found:
        raise problem
    ranked = sorted(found.values(), key=_order)
    near_s = ranked[0].prediction.step_s * ALIKE
    near = [each for each in ranked if each.fits and each.prediction.step_s <= near_s]
    return [*sorted(near, key=lambda each: each.prediction.device_bytes), *ranked[len(near) :]]


def _is_hopeless(choice: Choice) -> bool:
    """Whether no smaller micro-batch would help: even without activations it lacks memory."""
    moving = choice.prediction.parts.get("activations", 0) + choice.prediction.parts.get("gradients", 0)
    return choice.device_short > moving or choice.host_short > 0


def _order(choice: Choice) -> tuple[bool, float]:
    lacks = max(choice.device_short, 0) + max(choice.host_short, 0)
    return not choice.fits, choice.prediction.step_s if choice.fits else lacks


def _choice(prediction: Prediction, work: Work, device_bytes: int, host_bytes: int) -> Choice:
    needed = with_margin(prediction.device_bytes, work.hardware.device_kind, work.world_size)
    return Choice(prediction, needed - device_bytes, prediction.host_bytes - host_bytes)
