"""`trace_step`: run one training step on meta tensors and write down what it needs."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elixir.access import ParameterAccess
from elixir.errors import ElixirError, InputTypeError, TraceError
from elixir.fingerprint import fingerprint
from elixir.hardware import HardwareProfile
from elixir.kernels.fused_modules import FusedKernels
from elixir.tracer.accumulation import references_when_alone
from elixir.tracer.assemble import Observed, assemble
from elixir.tracer.autocast import autocast_emulated
from elixir.tracer.experts import BalancedRouting, Routing
from elixir.tracer.ledger import Ledger
from elixir.tracer.optimizer import run_optimizer
from elixir.tracer.order import UseOrder
from elixir.tracer.recorder import Recorder
from elixir.tracer.routing import routed
from elixir.tracer.shadows import Shadows
from elixir.tracer.step_trace import StepTrace
from elixir.tracer.targets import OptimizerKernel, Target, target_for
from elixir.tracer.twin import Twin, meta_input, meta_twin
from elixir.tracer.unknowns import is_user_code, user_location

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

StepFn = Callable[[nn.Module, dict[Any, Any]], Any]


@contextlib.contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Collections in the middle of a step cost as much as the step, and would free cycles at random moments."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_garbage_collection_paused()
def trace_step(
    model: nn.Module,
    inp: dict[Any, Any],
    step_fn: StepFn,
    *,
    dtype: torch.dtype | None = None,
    hardware: HardwareProfile,
    optimizer: str | None = "AdamW",
    optimizer_kernel: OptimizerKernel | None = None,
    model_name: str | None = None,
    routing: Routing | None = None,
    cache: bool = True,
    use_fused_kernels: bool | Mapping[str, str] = False,
) -> StepTrace:
    """Trace one training step of `model` as `hardware` would run it. Needs no GPU and allocates no weights.

    The model is copied to the meta device first, so it is neither changed nor moved, and may be of any size.

    Args:
        model: any `nn.Module`, real or on meta.
        inp: what `step_fn` gets beside the model. Integer and bool tensors keep their values for control flow.
        step_fn: ``step_fn(model, inp)`` runs forward, loss and backward.
        dtype: cast floating parameters and inputs to this; None leaves them.
        hardware: whose kernels and allocator to assume.
        optimizer: name of a class in `torch.optim`, or None for a step without one.
        optimizer_kernel: None for what `torch.optim` would choose on that device.
        model_name: how the trace calls the model; its class by default.
        routing: which experts tokens go to where that follows from weights; balanced by default.
        cache: remember shape propagation; the result is the same without, only later.
        use_fused_kernels: as `ElixirModule` will be given it: the memory of what runs then.

    Raises:
        InputError, InputTypeError: an argument makes no sense, or the model has nothing to train.
        TraceError: the step raised, never called backward, or decided by a value that a trace does not have.
    """
    if not callable(step_fn):
        raise InputTypeError(f"step_fn must be callable as step_fn(model, inp), got {type(step_fn).__name__}")
    started = time.perf_counter()
    target = target_for(hardware)
    twin = meta_twin(model, dtype)
    batch, inputs = meta_input(inp, dtype)
    parameters = twin.parameters
    ledger = Ledger(target.round_bytes)
    shadows = Shadows(ledger)
    for parameter in parameters:
        ledger.add(parameter, "parameters", "", None)
    for kind, pairs in (("buffers", twin.buffers), ("inputs", inputs)):
        for tensor, real in pairs:
            ledger.add(tensor, kind, "", None)  # type: ignore[arg-type]
            if not real.is_meta and (kind == "buffers" or not real.is_floating_point()):
                shadows.attach(tensor, real)
    step_begin = len(ledger)
    order = UseOrder(twin, lambda: len(ledger))
    routing = routing if routing is not None else BalancedRouting()
    recorder = Recorder(target, ledger, order, shadows, routing, cache)

    def count_host_tensor(tensor: torch.Tensor) -> None:
        if target.counts_host_tensors:
            ledger.add(tensor, "activations", order.module(order.phase()), "generator state")

    references_when_alone()
    fused = FusedKernels(twin.model, use_fused_kernels, target.kind)
    try:
        with (
            _one_thread(),
            routed(target, count_host_tensor),
            autocast_emulated(target),
            _compiled_regions_run_eagerly(),
        ):
            _run_step(twin, batch, step_fn, recorder, order, ledger)
        order.finish()
        step_end, operators = len(ledger), ledger.operators
        phase = run_optimizer(optimizer, optimizer_kernel, parameters, recorder, ledger, target)
        ledger.stop()
        observed = Observed(
            twin=twin,
            model_name=model_name or type(model).__name__,
            model_fingerprint=fingerprint(model),
            device=hardware.name,
            dtype=dtype,
            optimizer=phase,
            step_begin=step_begin,
            step_end=step_end,
            operators=operators,
            assumptions=_assumptions(twin, target, routing, fused),
        )
        return assemble(observed, ledger, order, started)
    finally:
        fused.remove()
        for parameter in parameters:
            parameter.grad = None  # the twin may be the caller's own meta model


def _run_step(
    twin: Twin, inp: dict[Any, Any], step_fn: StepFn, recorder: Recorder, order: UseOrder, ledger: Ledger
) -> None:
    access = ParameterAccess(twin.model, order)
    handles = [
        parameter.register_post_accumulate_grad_hook(order.gradient_ready)
        for parameter in twin.parameters
        if parameter.requires_grad
    ]
    try:
        with recorder, _printable_unknowns():
            step_fn(twin.model, inp)
    except ElixirError:
        raise
    except Exception as error:
        raise _explained(error) from error
    finally:
        access.remove()
        for handle in handles:
            handle.remove()
    if not order.uses:
        raise TraceError("step_fn used no parameter of the model it was given; it must run the model it gets")
    if order.backward_position > len(ledger):
        raise TraceError("step_fn never called backward, so there is no training step; call loss.backward() in it")
    for index, parameter in enumerate(twin.parameters):
        record = None if parameter.grad is None else ledger.find(parameter.grad)
        if record is not None:
            if index not in order.grad_use:
                order.gradient_ready(parameter)  # set by step_fn itself, as with torch.autograd.grad
            record.kind = "gradients"
            record.complete_at = order.uses[order.grad_use[index]].log_position


def _assumptions(twin: Twin, target: Target, routing: Routing, fused: FusedKernels) -> tuple[str, ...]:
    """What the numbers rest on beside the rules: said, so that nobody takes it for measured."""
    found = [routing.assumption] if routing.assumption else []
    if fused.counts:
        found.append(str(fused))
    modules = list(twin.modules)
    if any(isinstance(module, nn.RNNBase) for module in modules):
        found.append("recurrent layers in their composed form; what cuDNN or oneDNN would keep instead is not known")
    if target.kind == "cpu" and sum(isinstance(module, _CONVOLUTIONS) for module in modules) > 1:
        found.append("convolutions without the copies that oneDNN makes to reorder them")
    return tuple(found)


def _explained(error: Exception) -> TraceError:
    text = str(error).split("\n")[0]
    frame = error.__traceback__
    location = user_location()
    while frame is not None:
        if is_user_code(frame.tb_frame.f_code.co_filename):
            location = f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    hint = ""
    if "not compiled with CUDA" in text or "No CUDA GPUs" in text:
        hint = "; take the device from a tensor or parameter (x.device) instead of naming cuda"
    elif ".cpu()" in text or "meta tensor" in text.lower():
        hint = "; a trace has no values of what follows from weights, so nothing can be read out of it here"
    elif isinstance(error, NotImplementedError):
        hint = "; the operator has no meta kernel, register one with torch.library.register_fake"
    return TraceError(f"{location}: step_fn raised {type(error).__name__}: {text}{hint}")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Known values are small tensors; on a busy machine, starting threads for each takes longer than the trace."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _compiled_regions_run_eagerly() -> Iterator[None]:
    """Compiled code cannot run on meta, and what it will fuse is not known here."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _printable_unknowns() -> Iterator[None]:
    """Let a log line format a number that nobody knows: ``f"{loss.item():.3f}"``."""

    def as_text(self: Any, spec: str) -> str:
        return str(self)

    patched = [cls for cls in (torch.SymFloat, torch.SymInt) if "__format__" not in vars(cls)]
    original: Callable[[torch.Tensor, str], str] = torch.Tensor.__format__

    def tensor_format(self: torch.Tensor, spec: str) -> str:
        return "unknown" if self.is_meta and self.dim() == 0 else original(self, spec)

    for cls in patched:
        cls.__format__ = as_text  # type: ignore[method-assign]
    torch.Tensor.__format__ = tensor_format  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.__format__ = original  # type: ignore[method-assign]
        for cls in patched:
            del cls.__format__
