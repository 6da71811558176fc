"""Every private name of PyTorch's compiler that this folder leans on, and what for.

There is one fallback for all: if a name is missing, layers are traced as written. So predicted memory is too high then,
never too low, and the trace says why. Attributes of objects that these names make, and the form of generated code, are
not listed: where they differ, an error is raised with the same outcome.
"""

from __future__ import annotations

import pkgutil

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
"""``module:name`` -> what it is used for."""


def missing() -> str | None:
    """The first of `PRIVATE_NAMES` that the installed PyTorch lacks."""
    for name in PRIVATE_NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            return name
    return None
