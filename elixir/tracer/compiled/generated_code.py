"""The code that inductor generates for one kind of compiled layer, run in a trace: its buffers, kernels and products.

Inductor is given the layer once, on fake tensors, and asked for its code. No kernel is built: in a trace they only cost
what they read and write. The rest of the code allocates, frees and multiplies on meta, under the trace's dispatch mode,
and PyTorch's own wrapper keeps what it saves for backward. So peaks and lifetimes are those of the real compiled step.
"""

from __future__ import annotations

import contextvars
import functools
import os
import pkgutil
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.func import functional_call

from elixir.step_trace import Operation
from elixir.torch_private import tree_unflatten, while_nothing_compiles
from elixir.tracer.compiled.emulated_cuda import RANDOM_STATE_BYTES, compiled_for_cuda, emulated_cuda, without_driver
from elixir.tracer.compiled.layer_graph import Layout, checkpoints_in_the_graph, layer_graph
from elixir.tracer.operation_kinds import passing

ATOMS = (int, float, bool, str, type(None), torch.dtype, torch.device)
"""Types of arguments and settings that hold no tensors."""
Cost = Callable[[Operation], None]
"""Gets what a kernel costs."""
_TENSOR = object()
"""Takes the place of a tensor among the arguments of a layer."""

_CHOSEN_BY_RUNNING = (
    "max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "benchmark_fusion", "cpp_wrapper",
    "triton.cudagraphs",
)  # fmt: skip
_BUILDS_KERNELS = "async_compile = AsyncCompile()"
"""The line of generated code after which its kernels are defined."""
_HOST_STATE_BYTES = torch.get_rng_state().nbytes
"""Bytes of the state of the CPU's generator."""
_DRAWS = "torch.ops.higher_order."
"""The place of operators that set the generator's state around another operator, so that it draws alike again."""
_FRESH = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1, "cpp.simdlen": 1}
"""Settings of inductor under which code without kernels reaches no cache, no worker process starts, and kernels are
written without vectors: buffers are the same, and a quarter of the time is saved."""
_AHEAD = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
"""Settings of AOTAutograd: backward is compiled together with forward, and not when a trace calls it."""

PRIVATE_NAMES: dict[str, str] = {
    # Generating code.
    "torch._inductor.compile_fx:compile_fx": "generates code for a graph of forward and for that of its backward",
    "torch._inductor.compile_fx:compile_fx_inner": "does it for one of the two",
    "torch._inductor.graph:GraphLowering.compile_to_module": "replaced: it would write code and build its kernels",
    "torch._inductor.graph:GraphLowering.codegen": "called instead: gives the code as text",
    "torch._inductor.config:fx_graph_cache": "off: code without kernels reaches no cache",
    "torch._inductor.config:fx_graph_remote_cache": "off, likewise",
    "torch._inductor.config:compile_threads": "one: no worker process starts",
    "torch._inductor.config:cpp.simdlen": "kernels without vectors, which take three quarters of the time to write",
    "torch._functorch.config:force_non_lazy_backward_lowering": "backward is compiled together with forward",
    "torch._functorch.config:enable_autograd_cache": "off: code without kernels reaches no cache",
    # The graph of a layer, as Dynamo would give it.
    "torch._subclasses:FakeTensorMode": "tensors without memory, of which the graph is recorded",
    "torch._subclasses:FakeTensor": "its methods that ask for a driver are replaced",
    "torch._dynamo.source:LocalSource": "says of an input of a graph that it is an argument",
    # A CUDA device that is not there.
    "torch._dynamo.device_interface:CudaInterface": "its methods that ask the driver what the device is are replaced",
    "torch._inductor.runtime.hints:DeviceProperties.create": "replaced, likewise",
    "torch._inductor.utils:is_big_gpu": "its cache forgets the emulated device",
    "torch._inductor.scheduler:has_triton": "replaced: kernels are written, not built",
    "torch._inductor.codegen.triton:TMACompatibilityChecker.can_use_tma": "replaced: off unless asked for",
    "torch._inductor.codegen.triton:TritonKernel.inductor_meta_common": "replaced: says whether code in a cache holds",
    "torch._inductor.compile_fx:get_inputs_devices": "replaced: patterns are prepared for the device that is there",
    "torch._inductor.compile_fx:get_cuda_device_context": "replaced: asks the driver, which begins a context",
    "torch._inductor.compile_fx:_warn_tf32_disabled": "replaced, likewise",
    "torch._inductor.fx_passes.joint_graph:constant_fold_uniform_value": "around it, meta is said to be the CPU",
    "torch._inductor.fx_passes.joint_graph:replace_random_passes": "likewise",
    "torch._decomp:global_decomposition_table": "operators that are composed of others",
}
"""Every private name of PyTorch's compiler that this folder leans on, ``module:name`` -> what it is used for.

There is one fallback for all: if a name is missing, layers are traced as written. So predicted memory is too high then,
never too low, and the trace says why. Attributes of objects that these names make, and the form of generated code, are
not listed: where they differ, an error is raised with the same outcome.
"""


class GeneratedCode:
    """Runs layers of one kind on meta tensors.

    Args:
        layer: one of the kind.
        settings: of inductor, in place of those that it has now.
        leaves, spec: flattened arguments of the layer, tensors on meta among them.
        capability: compute capability of the CUDA device that is planned for; None for a CPU.

    Raises:
        Exception: there is no such code, or inductor raises.
    """

    def __init__(
        self,
        layer: nn.Module,
        settings: Mapping[str, Any],
        leaves: list[Any],
        spec: Any,
        capability: tuple[int, int] | None,
    ) -> None:
        _check(leaves, settings)
        self._settings, self._capability = settings, capability
        self._cost: Cost = lambda _: None
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._layouts = [layout_of(item) for item in (*tensors_of(layer).values(), *tensors)]
        # Code is kept for as long as the step is asked about: it must hold no tensor of the step, nor the layer.
        others = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        work = partial(self._compiled, layer, others, spec, torch.is_grad_enabled())
        compiling = _compiler().submit(contextvars.copy_context().run, work)
        try:
            self._run, self._order, self._form = compiling.result()
        finally:
            wait([compiling])  # after an interrupt too: it works with the layer's own tensors

    def __call__(self, cost: Cost, tensors: Sequence[torch.Tensor]) -> Any:
        """Runs the layer over its weights, buffers and tensor arguments.

        Args:
            cost: gets what each kernel costs, until the next call.
            tensors: those of the layer (`tensors_of`) and its arguments.
        """
        self._cost = cost
        return tree_unflatten(list(self._run(*[tensors[place] for place in self._order])), self._form)

    def forget(self) -> None:
        """Lets go of what gets the cost, and with it of a trace that is over."""
        self._cost = lambda _: None

    def _compiled(
        self, layer: nn.Module, leaves: list[Any], spec: Any, grad: bool
    ) -> tuple[Callable[..., Any], list[int], Any]:
        import torch._functorch.config as aot_config  # the compiler takes a second to import
        import torch._inductor.config as inductor_config
        from torch._inductor.compile_fx import compile_fx

        names, device = list(tensors_of(layer)), "cpu" if self._capability is None else "meta"
        call = partial(_uncompiled, weakref.ref(layer), names, leaves, spec)  # inductor keeps what a graph calls
        ours = {name: value for name, value in self._settings.items() if getattr(inductor_config, name, value) != value}
        with (
            torch.set_grad_enabled(grad),
            checkpoints_in_the_graph(layer),
            while_nothing_compiles(),
            inductor_config.patch(ours | _FRESH),
            aot_config.patch(_AHEAD),
            _code_without_kernels(self._cost_now),
        ):
            graph, inputs, order, form = layer_graph(call, self._layouts, len(names), device)
            if self._capability is None:
                return compile_fx(graph, inputs), order, form  # type: ignore[return-value]
            with emulated_cuda(self._capability):
                return compile_fx(graph, inputs, inner_compile=compiled_for_cuda), order, form  # type: ignore

    def _cost_now(self, operation: Operation) -> None:
        self._cost(operation)


def missing_name() -> str | None:
    """The first of `PRIVATE_NAMES` that the installed PyTorch lacks."""
    for name in PRIVATE_NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            return name
    return None


def _check(leaves: Sequence[Any], settings: Mapping[str, Any]) -> None:
    import torch._inductor.config as inductor_config

    if (name := missing_name()) is not None:
        raise NotImplementedError(f"this version of PyTorch has no {name}")
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *ATOMS)):
            raise NotImplementedError("an object among its arguments, which may hold tensors")
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            raise NotImplementedError("a tensor on the host among its arguments")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise NotImplementedError("autocast")
    if any(settings.get(name, getattr(inductor_config, name, None)) for name in _CHOSEN_BY_RUNNING):
        raise NotImplementedError("code that is chosen by running it")


def _uncompiled(
    layer: Callable[[], Any], names: Sequence[str], leaves: Sequence[Any], spec: Any, tensors: Sequence[torch.Tensor]
) -> Any:
    """Runs the layer without its compiled call, over its own tensors and those of its arguments."""
    given = iter(tensors[len(names) :])
    args, kwargs = tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in leaves], spec)
    own = {f"layer.{name}": tensor for name, tensor in zip(names, tensors, strict=False)}
    return functional_call(_Uncompiled(layer()), own, args, kwargs)


class _Uncompiled(nn.Module):
    """Calls a layer past its compiled call."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer._call_impl(*args, **kwargs)


@functools.cache
def _compiler() -> ThreadPoolExecutor:
    """The thread that compiles: no mode, hook or autocast of the trace is on there, all of which belong to a thread.

    It never ends: a build with CUDA of PyTorch 2.11, on a machine without a device, frees its guard for tensors that
    are said to lie on one at the end of the thread that first compiles, and the next one that does ends the process.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="elixir-generated-code")


os.register_at_fork(after_in_child=_compiler.cache_clear)  # a forked process has no other threads


def _code_without_kernels(cost: Cost) -> AbstractContextManager[Any]:
    """Makes inductor return its code on this thread before it is written to a file and its kernels are built."""
    from torch._inductor.graph import GraphLowering

    real, thread = GraphLowering.compile_to_module, threading.get_ident()

    def loaded(graph: Any) -> Any:
        return _loaded(graph, cost) if threading.get_ident() == thread else real(graph)

    return patch.object(GraphLowering, "compile_to_module", loaded)


def _loaded(graph: Any, cost: Cost) -> Any:
    """Runs a module of generated code; its buffers will lie on meta, and its kernels only cost what they touch."""
    source: str = graph.codegen()[0].value
    kind = "cuda" if "cuda" in graph.device_types else "cpu"
    if _BUILDS_KERNELS not in source or f"empty_strided_{kind}" not in source or graph.constants:
        raise NotImplementedError("generated code of another form")

    def kernel(*arguments: Any) -> None:
        touched = {id(item): item for item in arguments if isinstance(item, torch.Tensor)}
        if touched:
            last = list(touched.values())[-1]
            cost(passing(last.dtype, sum(_touched_bytes(item) for item in touched.values())))

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    nbytes, place = (_HOST_STATE_BYTES, "meta") if kind == "cpu" else (RANDOM_STATE_BYTES, "cpu")

    def saving(operator: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        return torch.empty(nbytes, dtype=torch.uint8, device=place), operator(*args, **kwargs)

    def restoring(_: torch.Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return saving(operator, *args, **kwargs)[1]  # it saves the present state, too

    names: dict[str, Any] = {"__name__": "elixir_generated_code"}
    source = source.replace(_BUILDS_KERNELS, "").replace(_DRAWS, "elixir_draws.")
    if kind == "cuda":
        source = without_driver(source, names)
    names["async_compile"] = SimpleNamespace(
        cpp_pybinding=lambda *_: kernel,
        triton=lambda *_, **__: SimpleNamespace(run=lambda *arguments, **_: kernel(*arguments)),
        wait=lambda _: None,
    )
    exec(compile(source, "<generated code>", "exec"), names)
    names |= {f"empty_strided_{kind}": empty, "device": lambda *_, **__: torch.device("meta")}
    # Seeds of attention on CUDA have another shape than in the graph, and nothing has an address.
    names |= {"assert_size_stride": lambda *_: None, "copy_if_misaligned": lambda tensor: tensor}
    names["elixir_draws"] = SimpleNamespace(run_and_save_rng_state=saving, run_with_rng_state=restoring)
    return SimpleNamespace(call=names["call"], runner=names.get("runner"), __file__="<generated code>")


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of distinct elements: an expanded tensor is read once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride else 1
    return numel * tensor.itemsize


def layout_of(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def tensors_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
