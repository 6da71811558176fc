"""Traces of training steps on meta tensors: what a step needs, without a GPU."""

from elixir.tracer.trace import trace_step
from elixir.tracer.values.expert_choice import BalancedRouting, RecordedRouting, RoutingRecorder

__all__ = ["BalancedRouting", "RecordedRouting", "RoutingRecorder", "trace_step"]
