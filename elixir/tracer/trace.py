"""`trace_step`: run one training step on meta tensors and write down what it needs."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elixir.access.activations import Swapping, recomputing
from elixir.access.autograd import hooks_were_refused
from elixir.access.compiled_units import compiled_in_place, compiled_units, inductor_settings
from elixir.access.interception import Interception
from elixir.errors import ElixirError, TraceError
from elixir.garbage import garbage_collection_paused
from elixir.hardware.profile import HardwareProfile
from elixir.kernels.model.fused_kernels import FusedKernels
from elixir.models.flash_attention import flash_attention_on_meta
from elixir.models.layer_units import layer_units
from elixir.models.model_tensors import ModuleState, fingerprint
from elixir.models.packing import Packing, documents_in
from elixir.models.quantised import unwrapped_subclasses
from elixir.models.step import check_step
from elixir.models.user_code import COMPUTATION, FILTERS, GENERATORS, restored
from elixir.step_trace import Form, StepShape, StepTrace, Unit
from elixir.tracer.compiled import CompiledLayers, Kinds
from elixir.tracer.device import target_for
from elixir.tracer.device.autograd_in_place import references_when_alone
from elixir.tracer.device.routed_functions import routed
from elixir.tracer.device.target import OptimizerKernel, Target, run_optimizer
from elixir.tracer.ledger import Ledger
from elixir.tracer.meta import TracedModel, meta_input, on_meta
from elixir.tracer.recorder import Recorder
from elixir.tracer.report import assemble
from elixir.tracer.step_functions import NAMES_CUDA
from elixir.tracer.use_order import UseOrder
from elixir.tracer.user_objects import user_objects_restored
from elixir.tracer.values.expert_choice import BalancedRouting, Routing
from elixir.tracer.values.shadows import Shadows
from elixir.tracer.values.unknown_number import raised_in, user_location
from elixir.units import dtype_name

StepFn = Callable[[nn.Module, Any], Any]


_TRACING = threading.RLock()
_HEARD = "elixir.tracer"
"""Key of a trace among the hooks of a parameter, whose others have numbers."""


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """The kernels that a trace replaces for meta tensors are the process's: a trace in another thread waits."""
    with _TRACING:
        yield


@_one_at_a_time()
@garbage_collection_paused()  # collections in the middle of a step cost as much as the step
def trace_step(  # noqa: PLR0913 - a public entry point
    model: nn.Module,
    inp: Any,
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
    compile: bool = False,
    generated_code: bool = True,
    shape: StepShape = StepShape(),  # noqa: B008 - frozen
    kinds: Kinds | None = None,
) -> StepTrace:
    """Traces one training step of `model` as `hardware` would run it. Needs no GPU and allocates no weights.

    The model's own tensors are on the meta device meanwhile, with their values kept aside: a model may be of any size,
    and is afterwards as it was, also if the step raises or is interrupted. No other thread may use it meanwhile.

    Args:
        model: any `nn.Module`, real or on meta.
        inp: what `step_fn` gets next to the model, of any kind. Its tensors keep their values for control flow.
        step_fn: ``step_fn(model, inp)`` runs forward, loss and backward; forward alone where nothing is trained.
        dtype: cast floating parameters, buffers (see `casts_buffers`) and inputs to this; None leaves them.
        hardware: whose kernels and allocator to assume.
        optimizer: name of a class in `torch.optim`, or None for a step without one.
        optimizer_kernel: None for what `torch.optim` would choose on that device.
        model_name: how the trace calls the model; its class by default.
        routing: which experts tokens go to where that follows from weights; balanced by default.
        cache: remember shape propagation; the result is the same without, only later.
        use_fused_kernels: as `ElixirModule` will be given it: the memory of what runs then.
        compile: whether the layers that the model repeats will be compiled; those compiled already count anyway.
        generated_code: whether layers that inductor compiles are traced as the code that it generates, if it
            can. Otherwise they are traced uncompiled, which takes a few seconds less for each kind of layer.
        shape: how the step was asked for; the trace fills in its size. Three fields change what is traced. With
            `forward`, `step_fn` runs without gradients, and no optimizer steps. With `generate`, `step_fn` is
            `elixir.models.step.generation_step` of these numbers, and the trace is of its last call of the
            model, with the memory of both. `activations` of units are kept, made again or moved, whatever the model
            does.
        kinds: a dict that traces of the same step share, so that each kind of compiled layer is compiled once.

    Raises:
        InputError, InputTypeError: an argument makes no sense, or the model has no parameters that can be planned.
        TraceError: the step raised, never called backward, or decided by a value that a trace does not have.
    """
    asked = dict(locals())
    check_step(step_fn)
    started = time.perf_counter()
    target = target_for(hardware)
    with compiled_in_place(model), unwrapped_subclasses(model), on_meta(model, dtype) as traced:
        layers = layer_units(model, compile=compile)
        compiled = _compiled(model, layers)
        batch, inputs = meta_input(inp, dtype)
        known_by = fingerprint(model, forward=shape.forward)  # a step may freeze weights
        parameters = traced.parameters
        ledger = Ledger(target.round_bytes)
        shadows = Shadows(ledger)
        for parameter in parameters:
            ledger.add(parameter, "parameters", "", None)
        for kind, pairs in (("buffers", traced.buffers), ("inputs", inputs)):
            for tensor, real in pairs:
                ledger.add(tensor, kind, "", None)  # type: ignore[arg-type]
                if not real.is_meta:
                    shadows.attach(tensor, real)
        step_begin = len(ledger)
        order = UseOrder(traced, ledger, {module: unit.name for module, unit in layers.items()})
        routing = routing if routing is not None else BalancedRouting()
        recorder = Recorder(target, ledger, order, shadows, routing, cache)

        swapping = Swapping(model, replace(shape, units=tuple(layers.values())), recorder.host)
        references_when_alone()
        fused = FusedKernels(model, use_fused_kernels, target.kind, traced=True)
        code = CompiledLayers(
            model,
            compiled,
            recorder.kernel,
            {} if kinds is None else kinds,
            target.capability,
            as_written=not generated_code,
        )
        recorder.fused_costs = code.fused_costs
        state = None if shape.forward else ModuleState(model)
        try:
            with user_objects_restored(model, step_fn, inp) as recorder.user_objects:
                with (
                    routed(target),
                    flash_attention_on_meta(),
                    recomputing(model, shape.activations, swapping),
                    restored(*COMPUTATION, *GENERATORS, shared=(FILTERS,)),
                    _compiled_regions_run_eagerly(),
                    torch.set_grad_enabled(torch.is_grad_enabled() and not shape.forward),
                ):
                    _run_step(traced, batch, step_fn, recorder, order, ledger, code.generated, trains=not shape.forward)
                changed = None if state is None else state.changed()
                order.finish()
                order.join_units(compiled)
                regions = order.checkpointed()
                if not {unit.name for unit in layers.values()}.issuperset(regions):
                    layers = layer_units(model, compile=compile, checkpointed=regions)
                units = _units_of(layers.values(), order, regions)
                step_end = len(ledger)
                trained = any(parameter.grad is not None for parameter in parameters)
                phase = run_optimizer(optimizer if trained else None, optimizer_kernel, parameters, ledger, target)
                ledger.stop()
            return assemble(
                traced,
                ledger,
                order,
                span=(step_begin, step_end),
                optimizer=phase,
                started=started,
                model_name=model_name or type(model).__name__,
                model_fingerprint=known_by,
                device=hardware.name,
                dtype="as built" if dtype is None else dtype_name(dtype),
                assumptions=_assumptions(traced, target, shadows, fused) + code.assumption,
                uncounted=target.uncounted,
                # Memory that is freed in a heap leaves gaps; the eager form of compiled code does not say when.
                hears_gradients=target.kind != "cpu" and not compiled,
                step=replace(
                    _sized(shape, inp, [real for _, real in inputs if real.dim()]),
                    fused_kernels=bool(fused.counts),
                    units=units,
                    changed_state=changed,
                    activations=tuple(
                        replace(each, swap_bytes=swapping.moved_bytes[each.unit]) if each.swap else each
                        for each in shape.activations
                    ),
                ),
            )
        except TraceError as error:
            if not code.generated:
                raise
            refused = str(error)
        finally:
            code.remove()
            fused.remove()
            for parameter in parameters:
                parameter.grad = None  # the model may have been on meta before
    without = trace_step(**asked | {"generated_code": False})
    return replace(without, assumptions=(*without.assumptions, refused))


def _run_step(
    traced: TracedModel,
    inp: Any,
    step_fn: StepFn,
    recorder: Recorder,
    order: UseOrder,
    ledger: Ledger,
    generated: Sequence[nn.Module],
    *,
    trains: bool,
) -> None:
    unheard = _gradients_heard(traced.parameters, order)  # hooks are set before the parameters announce their uses
    access = Interception(traced.model, order, scripts=False, units=generated)
    try:
        with recorder:
            step_fn(traced.model, inp)
    except ElixirError:
        raise
    except Exception as error:
        raise _explained(error) from error
    finally:
        access.remove()
        unheard()
    if not order.uses:
        raise TraceError("step_fn used no parameter of the model it was given; it must run the model it gets")
    trains = trains and any(parameter.requires_grad for parameter in traced.parameters)
    if trains and order.backward_position == sys.maxsize:
        raise TraceError("step_fn never called backward, so there is no training step; call loss.backward() in it")
    of_matrices = sorted(at for index, at in order.grad_position.items() if traced.parameters[index].dim() > 1)
    for index, parameter in enumerate(traced.parameters):
        record = None if parameter.grad is None else ledger.find(parameter.grad)
        if record is not None:
            if index not in order.grad_use:
                order.gradient_ready(parameter)  # set by step_fn itself, as with torch.autograd.grad
            record.kind = "gradients"
            record.complete_at = order.uses[order.grad_use[index]].log_position
            record.arrived_at = order.grad_position[index]
            if parameter.dim() < 2:  # it may wait for a matrix, see `Arrivals`
                after = bisect_right(of_matrices, record.arrived_at)
                record.arrived_at = of_matrices[after] if after < len(of_matrices) else len(ledger)


def _gradients_heard(parameters: list[nn.Parameter], order: UseOrder) -> Callable[[], None]:
    """Reports gradients that autograd has accumulated to `order`, until the function that this returns is called.

    Does what `register_post_accumulate_grad_hook` does, without a handle for each of thousands of parameters.
    """
    ready, heard = order.gradient_ready, []
    for parameter in parameters:
        if parameter.requires_grad:
            hooks = parameter._post_accumulate_grad_hooks or OrderedDict()
            hooks[_HEARD] = ready
            parameter._post_accumulate_grad_hooks = hooks
            heard.append(hooks)

    def unheard() -> None:
        for hooks in heard:
            hooks.pop(_HEARD, None)

    return unheard


def _compiled(model: nn.Module, layers: Mapping[nn.Module, Unit]) -> dict[str, Mapping[str, Any] | None]:
    """The units that are compiled, or will be -> the settings of inductor, None of another compiler."""
    before = compiled_units(model)
    return {
        unit.name: inductor_settings(module) if module in before else {}
        for module, unit in layers.items()
        if unit.form == "compiled"
    }


def _units_of(layers: Collection[Unit], order: UseOrder, regions: Collection[str]) -> tuple[Unit, ...]:
    """The units, those that ran again as checkpointed; if weights are read piece by piece, they are not fetched as
    one."""
    piecewise = order.units_read_piecewise({unit.name for unit in layers})

    def found(unit: Unit) -> Unit:
        form: Form = "checkpointed" if unit.name in regions else unit.form
        return replace(unit, form=form, fetch="parameters" if unit.name in piecewise else unit.fetch)

    return tuple(unit if unit.form == "compiled" else found(unit) for unit in layers)


def _sized(shape: StepShape, inp: Any, tensors: Sequence[torch.Tensor]) -> StepShape:
    """The shape with the size of the input, by its `tensors` that have a first dimension."""
    while isinstance(inp, Mapping) and len(inp) == 1 and isinstance(found := next(iter(inp.values())), Mapping):
        inp = found  # the batch of a framework, under one name
    ids = inp.get("input_ids") if isinstance(inp, Mapping) else None
    tokens = ids.numel() if isinstance(ids, torch.Tensor) else None
    first = ids if tokens is not None else next(iter(tensors), None)
    samples = None if first is None else len(first)
    documents = documents_in(inp)
    if documents and shape.packed:  # the row has all samples
        samples = documents // Packing.read(shape.packed).documents
    elif documents and samples:
        shape = replace(shape, packed=str(round(documents / samples)))
    return replace(shape, samples=samples, tokens=tokens if shape.generate is None else samples)


def _assumptions(traced: TracedModel, target: Target, shadows: Shadows, fused: FusedKernels) -> tuple[str, ...]:
    """Assumptions of the numbers, said so that nobody takes them for measured."""
    found = list(shadows.supposed)
    if fused.counts:
        found.append(str(fused))
    if any(isinstance(module, nn.RNNBase) for module in traced.modules):
        library = "cuDNN" if target.kind == "cuda" else "oneDNN"
        found.append(f"recurrent layers in their composed form; what {library} would keep instead is not known")
    return tuple(found)


def _explained(error: Exception) -> TraceError:
    refused = hooks_were_refused(error)
    text = str(refused or error).split("\n")[0]
    location = raised_in(error) or user_location()
    hint = ""
    if any(said in text for said in ("not compiled with CUDA", "No CUDA GPUs", "NVIDIA driver", NAMES_CUDA)):
        hint = "; take the device from a tensor or parameter (x.device) instead of naming cuda"
    elif "does not require grad" in text:
        hint = "; no trained weight takes part: set requires_grad, or leave backward out of step_fn to evaluate"
    elif "fake impl" in text:
        hint = "; the operator has no meta kernel, register one with torch.library.register_fake"
    elif any(said in text.lower() for said in (".cpu()", "meta tensor", "unallocated storage", "'meta' device")):
        hint = "; a trace has no values of what follows from weights, so nothing can be read out of it here"
    if refused is not None:
        return TraceError(f"{location}: {text}")
    return TraceError(f"{location}: step_fn raised {type(error).__name__}: {text}{hint}")


def _compiled_regions_run_eagerly() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled regions uncompiled: compiled code cannot run on meta, and its fusions are not known here."""
    if "torch._dynamo" not in sys.modules:  # without this import nothing is compiled, and it takes a second
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
