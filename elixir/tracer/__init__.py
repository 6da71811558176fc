"""Traces of training steps on meta tensors: what a step needs, without a GPU."""

from elixir.step_trace import StepTrace
from elixir.tracer.copied_functions import deep_copied
from elixir.tracer.trace import trace_step
from elixir.tracer.user_objects import user_objects_restored
from elixir.tracer.values import BalancedRouting, RecordedRouting, RoutingRecorder, is_user_code

__all__ = [
    "BalancedRouting",
    "RecordedRouting",
    "RoutingRecorder",
    "StepTrace",
    "deep_copied",
    "is_user_code",
    "trace_step",
    "user_objects_restored",
]
