"""An emulated CUDA device, for which inductor generates code on a machine that has none, nor Triton.

A layer's graph is recorded on meta tensors, for which a trace takes the target's attention and dropout; autograd knows
tensors of a CUDA device only in a build with CUDA. Once forward and backward are apart, their tensors are said to lie
on that device. Inductor then fuses, allocates and frees for it, and gets the device's properties from here, not from
the driver. On an H200, steps that run what it writes there took as many bytes as were predicted from what it writes
here (docs/appendix/gpu_bars.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from elixir.torch_private import DispatchKey, OpOverload, tree_leaves, tree_map
from elixir.tracer.device.cuda_target import PROCESSORS, THREADS

aten = torch.ops.aten

RANDOM_STATE_BYTES = 16
"""Bytes of the state of a CUDA generator, which lie on the host (`CUDAGeneratorImpl::get_state`)."""
_CUDA, _META = torch.device("cuda", 0), torch.device("meta")
_CPU = torch.device("cpu", 0)
"""The CPU for tensors that are otherwise on meta; those that stay on the CPU have no number there."""

_IMPORTS = ("import triton", "from torch._inductor.runtime.triton_heuristics", "from torch._C import _cuda_getCurrent")
"""Beginnings of the lines by which generated code imports what a machine without a GPU does not have."""
_CALLS = {"torch.cuda._DeviceGuard(": "elixir_device(", "torch.cuda.set_device(": "get_raw_stream("}
"""Calls of the driver in generated code, and what takes their place."""


@contextmanager
def emulated_cuda(capability: tuple[int, int]) -> Iterator[None]:
    """Makes inductor believe that there is a CUDA device of this compute capability, and Triton."""
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.fx_passes.joint_graph as joint_graph
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.codegen import triton
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.utils import is_big_gpu
    from torch._subclasses import FakeTensor

    major, minor = capability
    properties = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=PROCESSORS.get(major, PROCESSORS[8]),
        cc=10 * major + minor,
        major=major,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=THREADS.get(capability, 2048),
        warp_size=32,
    )
    there = torch.cuda.is_available()
    replaced: dict[Any, dict[str, Any]] = {
        DeviceProperties: {"create": staticmethod(lambda device: properties)},
        CudaInterface: {
            "get_device_properties": staticmethod(lambda device=None: properties),
            "get_compute_capability": staticmethod(lambda device=None: properties.cc),
            "current_device": staticmethod(lambda: 0),
            "is_bf16_supported": staticmethod(lambda including_emulation=False: major >= 8),
        },
        scheduler: {"has_triton": lambda: True},
        triton.TMACompatibilityChecker: {"can_use_tma": lambda _: False},  # off unless asked for
        triton.TritonKernel: {"inductor_meta_common": staticmethod(dict)},  # says whether code in a cache is valid
        # Patterns are prepared once for each device; those of the CPU look for the same operators.
        compile_fx: {
            "get_inputs_devices": lambda *_: {_CUDA if there else torch.device("cpu")},
            # These two ask a driver that is there, which begins a context: processes that are forked later have none.
            "get_cuda_device_context": lambda _: nullcontext(),
            "_warn_tf32_disabled": lambda: None,
        },
        # One takes results on meta for tensors without values, the other leaves what draws random numbers there.
        joint_graph: {
            name: partial(_on_the_cpu, getattr(joint_graph, name))
            for name in ("constant_fold_uniform_value", "replace_random_passes")
        },
        # In place of methods that ask for the device's driver before anything else.
        FakeTensor: {
            "copy_": _copied,
            "__getitem__": _picked,
            "__invert__": lambda self: aten.bitwise_not.default(self),
        },
        torch.cuda: {} if there else {"get_rng_state": _no_state, "set_rng_state": _no_state},
    }
    with ExitStack() as stack:
        stack.callback(is_big_gpu.cache_clear)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("error", message=".*an autograd kernel was not registered")  # it leaves out a gradient
        stack.enter_context(_composed_on_meta())
        for owner, names in replaced.items():
            for name, ours in names.items():
                stack.enter_context(patch.object(owner, name, ours))
        yield


@contextmanager
def _composed_on_meta() -> Iterator[None]:
    """Gives operators that PyTorch composes of others their gradients on meta.

    Each of them has a kernel for shapes on meta in Python, which the compiler's dispatcher takes for a whole one: it
    leaves out the operators of which the other is composed, and with them its gradient.
    """
    from torch._decomp import global_decomposition_table

    autograd: Any = DispatchKey.AutogradMeta
    composed: Any = DispatchKey.CompositeImplicitAutograd
    changed = [
        operator
        for operator in {each: None for table in global_decomposition_table.values() for each in table}
        if isinstance(operator, OpOverload)
        and operator.has_kernel_for_dispatch_key(composed)
        and not any(map(operator.has_kernel_for_dispatch_key, (autograd, DispatchKey.Autograd)))
    ]
    try:
        for operator in changed:
            operator.py_impl(autograd)(operator.py_kernels.get(composed, composed))
        yield
    finally:
        for operator in changed:
            operator.py_kernels.pop(autograd, None)
            operator._dispatch_cache.clear()  # as `py_impl` does


def _copied(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    return aten.copy_.default(self, source, non_blocking)


def _picked(self: torch.Tensor, index: Any) -> Any:
    return aten.select.int(self, 0, index) if type(index) is int else torch.Tensor.__getitem__(self, index)


def _no_state(*_: Any) -> torch.Tensor:
    return torch.empty(RANDOM_STATE_BYTES, dtype=torch.uint8)


def _on_the_cpu(graph_pass: Callable[[torch.fx.GraphModule], Any], module: torch.fx.GraphModule) -> Any:
    """Runs a pass over a graph, which looks at the devices of its tensors and meets the CPU in place of meta."""
    _move(module, _META, _CPU)
    result = graph_pass(module)
    _move(module, _CPU, _META)
    return result


def compiled_for_cuda(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Does what inductor does with one graph, whose tensors on meta it takes for those of the CUDA device."""
    from torch._inductor.compile_fx import compile_fx_inner

    _move(module, _META, _CUDA)
    with torch.no_grad():  # autograd asks for the device's driver
        return compile_fx_inner(module, tree_map(partial(_moved, _META, _CUDA), inputs), **options)


def _move(module: torch.fx.GraphModule, source: torch.device, target: torch.device) -> None:
    """Says of the tensors of a graph that lie on one device that they lie on another."""
    for node in module.graph.nodes:
        node.args = tuple(target if each == source else each for each in node.args)
        node.kwargs = {name: target if each == source else each for name, each in node.kwargs.items()}
        for value in tree_leaves(node.meta.get("val")):
            _moved(source, target, value)


def _moved(source: torch.device, target: torch.device, value: Any) -> Any:
    if getattr(value, "fake_device", None) == source:
        value.fake_device = target
    return value


def without_driver(source: str, names: dict[str, Any]) -> str:
    """Generated code that neither imports what a machine without a GPU lacks nor calls the driver.

    Args:
        source: the code.
        names: those that the code finds, to which what it calls in place of the driver is added.
    """
    names |= {"get_raw_stream": lambda _: 0, "elixir_device": lambda _: nullcontext()}
    for call, ours in _CALLS.items():
        source = source.replace(call, ours)
    return "\n".join(line for line in source.split("\n") if not line.startswith(_IMPORTS))
