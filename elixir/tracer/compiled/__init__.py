"""Compiled layers in a trace: the code that inductor generates for them or, without it, the layers as written.

The only place that knows inductor: `PRIVATE_NAMES` of `generated_code` lists every private name of the compiler that is
used. If one is missing, or the compiler raises, the trace is made anew with the layers as written: they take at least
the memory of compiled ones, and `StepTrace.assumptions` says so.
"""

from elixir.tracer.compiled.compiled_layers import CompiledLayers, FusedCosts, Kinds

__all__ = ["CompiledLayers", "FusedCosts", "Kinds"]
