"""Traces of training steps on meta tensors: what a step needs, without a GPU."""

from elixir.step_trace import StepTrace
from elixir.tracer.trace import trace_step
from elixir.tracer.values import BalancedRouting, RecordedRouting, RoutingRecorder

__all__ = ["BalancedRouting", "RecordedRouting", "RoutingRecorder", "StepTrace", "trace_step"]
