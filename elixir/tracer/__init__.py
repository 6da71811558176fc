"""What does this training step need? Traced on meta tensors, without a GPU."""

from elixir.tracer.experts import BalancedRouting, RecordedRouting, RoutingRecorder
from elixir.tracer.step_trace import StepTrace
from elixir.tracer.trace import trace_step

__all__ = ["BalancedRouting", "RecordedRouting", "RoutingRecorder", "StepTrace", "trace_step"]
