"""Views of saved artifacts for a page: a plan's step over time is there if the step can be traced again."""

from __future__ import annotations

from typing import Any

from elixir.artifact import Artifact
from elixir.errors import InputError
from elixir.hardware.profile import HardwareProfile, preset, preset_names
from elixir.models.model_shape import find
from elixir.plan.plan import Plan
from elixir.search.question import StepQuestion
from elixir.show.page import View, plan_view, trace_view
from elixir.step_trace import StepTrace


def view_of(artifact: Artifact, hardware: HardwareProfile | None = None, **more: Any) -> View:
    """The view of a plan or a trace.

    Args:
        artifact: the plan or the trace.
        hardware: the machine of a plan; None: the preset that it was made for, if it is one.
        more: arguments of `plan_view`.

    Raises:
        InputError: it is a hardware profile.
    """
    if isinstance(artifact, StepTrace):
        return trace_view(artifact)
    if not isinstance(artifact, Plan):
        raise InputError(f"--plot draws plans and traces, found a {type(artifact).__name__}")
    known = None
    if hardware is None and artifact.hardware_name in preset_names():
        known = preset(artifact.hardware_name)
        known = known if known.fingerprint == artifact.hardware_fingerprint else None
    hardware = hardware or known
    if hardware is None or find(artifact.model_name) is None or artifact.step.checkpoint is None:
        return plan_view(artifact, **more)  # its step does not follow from its name
    return plan_view(artifact, StepQuestion.again(artifact).trace(hardware), hardware, **more)
