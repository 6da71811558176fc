"""Every private name of PyTorch that Elixir leans on: why, and what happens where a version lacks it.

Names without a public counterpart are taken from here and nowhere else, but for private attributes of tensors, modules
and operators, which are read where they are needed: pyproject.toml lists them for the linter.
`tests/unit/artifacts/test_torch_private.py` holds what each name is used for against the installed version, so that a
version that drops or changes one is noticed there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch._prims_common
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint

# --- Modes ------------------------------------------------------------------------------------------------------------

DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Inside, a tensor subclass is asked about itself without announcing a use. PyTorch's notes on extending it name it."""

DisableTorchFunction = torch._C.DisableTorchFunction
"""The same, for modes too. PyTorch's notes on extending it name it."""

DisableTorchDispatch = torch._C._DisableTorchDispatch
"""Inside, operators run past every dispatch mode: a trace looks at real values without recording that it does."""

TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
"""Sees every operator. Documented, but the module that holds it has a private name."""


dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack
without_dispatch_modes: Callable[[], Any] = torch.utils._python_dispatch._disable_current_modes
"""How many dispatch modes this thread has, and a context without them. Tensor subclasses are dispatched as before,
which `DisableTorchDispatch` would prevent."""

function_mode_count: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 0)
"""How many torch function modes this thread has. None, where PyTorch cannot say."""

TopDispatch: Any = torch._C._disabled_torch_dispatch_impl
"""The `__torch_dispatch__` of a class that does not define one: a plain tensor to the operator cache."""


torch_function_is_enabled: Callable[[], bool] = getattr(torch._C, "_is_torch_function_enabled", lambda: True)
"""Whether a use of a tensor subclass would be announced now. Always, where PyTorch cannot say."""

_functorch: Any = getattr(torch._C, "_functorch", None)
functorch_level: Callable[[], int | None] = getattr(_functorch, "maybe_current_level", lambda: None)
"""Level of the innermost `torch.func` transform that runs; None outside of all, and where PyTorch cannot say."""

compiling: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
"""True-valued while code runs that was given to `torch.compile`, compiled or, after a graph break, as it is. Where
PyTorch cannot say, compiled layers over streamed weights are not refused after wrapping."""


def _of_loaded(module: str, name: str, otherwise: Any) -> Any:
    """A name in a module of PyTorch, which is not imported for it."""
    return getattr(sys.modules.get(module), name, otherwise)


def backward_is_compiled() -> bool:
    """Whether a backward that began now would run under compiled autograd. False where PyTorch cannot say."""
    return bool(_of_loaded("torch._dynamo.compiled_autograd", "compiled_autograd_enabled", False))


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether a compiler records what is done with a tensor. False where PyTorch cannot say."""
    return isinstance(tensor, _of_loaded("torch._subclasses.functional_tensor", "FunctionalTensor", ()))


def process_groups() -> Any:
    """All process groups, with `group_count`, after which the next one is named. None where PyTorch has none, or keeps
    them elsewhere: groups that some ranks make alone are then made as PyTorch makes them."""
    return _of_loaded("torch.distributed.distributed_c10d", "_world", None)


def while_nothing_compiles() -> Any:
    """A context in which no other thread has `torch.compiler.is_compiling`, which is one flag for all threads.

    While it is set, torch's optimizers take other code, with other bits. The compiler sets it under this lock, for
    graphs of forward. The context is empty if the compiler is not loaded, or PyTorch has no such lock.
    """
    return _of_loaded("torch._dynamo.convert_frame", "compile_lock", None) or nullcontext()


_transforms: Callable[[], Any] = getattr(_functorch, "get_interpreter_stack", lambda: None)


def forward_mode_runs() -> bool:
    """Whether `torch.func.jvp` or `jacfwd` runs. False outside of all transforms, and where PyTorch cannot say."""
    return functorch_level() is not None and any(each.key().name == "Jvp" for each in _transforms() or ())


# --- Dispatch keys ----------------------------------------------------------------------------------------------------

DispatchKey = torch._C.DispatchKey
DispatchKeySet = torch._C.DispatchKeySet
"""One or several places on an operator's way to its kernel. A placeholder has one more, which sends it to Elixir
first."""

dispatch_key: Callable[[str], Any] = torch._C._dispatch_key_parse
dispatch_keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_keys
key_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
exclude_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
"""Asked and set for this thread only; together several times faster than the guards below."""

include_key: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_included
ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard
"""Autocast for a missing device is a separate key, included while a traced step has autocast on."""

below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd
"""Inside, an operator goes past autograd: a derivative of ours calls the very operator that it replaces."""

has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
"""The operators that autocast treats on the target device, read from PyTorch instead of a list that grows old."""

MEMORY_MOVES = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether memory can move from one storage to another. Without it (before torch 2.13) it is given up and taken anew."""


def move_memory(source: torch.UntypedStorage, target: torch.UntypedStorage) -> None:
    """Moves the memory of a storage to an empty one, whose tensors show it from then on. Its contents may be lost."""
    if MEMORY_MOVES:
        target._swap_data_ptr_(source)  # type: ignore[attr-defined]
        return
    nbytes = source.nbytes()
    source.resize_(0)
    target.resize_(nbytes)


make_wrapper_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
"""A tensor with shape and keys and without memory. The documented way to write a subclass that wraps."""

# --- Autograd ---------------------------------------------------------------------------------------------------------

saved_tensors_hooks_are_enabled: Callable[[], bool] = getattr(
    torch._C._autograd, "_saved_tensors_hooks_is_enabled", lambda: True
)
"""Whether hooks for saved tensors may be set now; `torch.func` forbids it. Always, where PyTorch cannot say."""

top_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""The innermost pair of hooks, so that ours can hand on what is no weight to the pair around them."""

current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""-1 unless backward runs on this thread."""

current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node that backward executes; its `_sequence_nr()` says when forward made it."""

sequence_number: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)
"""Number of the next node that autograd makes. Without it accesses in backward carry no module's name."""


def call_after_backward(function: Callable[[], None]) -> None:
    """Makes autograd call `function` after the running backward, as DDP and FSDP do."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


@contextmanager
def seeing_backwards(look: Callable[[Sequence[Any], bool], None]) -> Iterator[None]:
    """Calls ``look(outputs, asks)`` before Python code on any thread begins a backward, meanwhile; `asks` says whether
    it asks for the gradients of some inputs alone, or for a graph of gradients.

    No torch function sees plain tensors, and code may have imported `torch.autograd.grad` under another name.
    Nothing is seen where PyTorch runs backward by another name. A function that a library has put there instead of
    PyTorch's is called, and is there again afterwards; one that it puts there meanwhile stays.
    """
    before: Any = getattr(torch.autograd, "_engine_run_backward", None)

    def seen(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        look(outputs, bool(len(args) > 3 and (args[2] or args[3])))
        return before(outputs, *args, **kwargs)

    module: Any = torch.autograd
    if before is not None:
        module._engine_run_backward = seen
    try:
        yield
    finally:
        if getattr(module, "_engine_run_backward", None) is seen:
            module._engine_run_backward = before


version_counter_kept: Callable[..., Any] = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
"""Inside, a write does not count as one: values that are broadcast as DDP does it leave what autograd saved valid."""

# --- Kernels of the CPU -----------------------------------------------------------------------------------------------

onednn_is_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
"""Whether operators are sent to oneDNN; the public flag is a property of a module that cannot be read cheaply."""


def allocations(call: Callable[[], Any]) -> tuple[Any, list[int]] | None:
    """`call`, and the bytes of each allocation (freed: negative) of this thread on the CPU meanwhile, in order.

    None where PyTorch cannot say or something else is profiling this thread. The public profiler takes a hundred times
    as long to start and writes to the standard error.
    """
    try:
        config = torch.autograd.ProfilerConfig(  # type: ignore[attr-defined]
            torch.autograd.ProfilerState.CPU,  # type: ignore[attr-defined]
            *(False, True, False, False, False),  # profiles shapes, memory, stacks, FLOPs, modules
            torch._C._profiler._ExperimentalConfig(),
        )
        torch.autograd._enable_profiler_legacy(config)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, TypeError):
        return None
    try:
        result = call()
    finally:
        threads = torch.autograd._disable_profiler_legacy()  # type: ignore[attr-defined]
    return result, [e.cpu_memory_usage() for events in threads for e in events if str(e.kind()) == "memory_alloc"]


# --- TorchScript ------------------------------------------------------------------------------------------------------

ScriptMethod: Any = torch._C.ScriptMethod
"""The class of the methods of TorchScript modules: a call of ``forward``, or of an exported one, calls one of them."""


def script_parameters(owner: Any) -> list[torch.Tensor]:
    """The parameters of the module that is a `ScriptMethod`'s ``owner``, and of all modules in it; none of the instance
    of a TorchScript class."""
    own: Any = torch._C.ParameterDict(owner)
    try:
        found = [parameter for _, parameter in own.items()]
    except RuntimeError:  # it is no module
        return []
    inner: Any = torch._C.ModuleDict(owner)
    return found + [parameter for _, module in inner.items() for parameter in script_parameters(module)]


# --- Tensors ----------------------------------------------------------------------------------------------------------

swap_tensors: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
"""Exchanges the memory of two tensors in place. The public one exchanges classes too, and refuses weak references."""

parsed_to: Callable[..., Any] = torch._C._nn._parse_to
"""Device and dtype, first of all, that arguments of `torch.Tensor.to` name; what `torch.nn.Module.to` asks."""

default_device_context: Any = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
"""Holds the device of `torch.set_default_device`; the public getter names that of a ``with`` around it instead."""


has_internal_overlap: Callable[[torch.Tensor], int] = torch._debug_has_internal_overlap
"""Whether two elements of a tensor share memory, or may; 0 if not."""

suggest_memory_format: Callable[[torch.Tensor], torch.memory_format] = torch._prims_common.suggest_memory_format
"""Whether kernels take a tensor for one with channels last, which its strides do not always say."""


def references(tensor: torch.Tensor) -> tuple[int, int]:
    """How many C++ owners a tensor has, and its storage: autograd keeps a gradient in place of a copy if it is the only
    one."""
    storage = tensor.untyped_storage()
    return int(tensor._use_count()), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]


foreach_norm: Callable[..., Any] = torch._foreach_norm
fused_adam: Callable[..., Any] = torch._fused_adam_
fused_adamw: Callable[..., Any] = torch._fused_adamw_
"""One launch for many tensors. `torch.nn.utils` and `torch.optim` call them."""

_F = TypeVar("_F", bound=Callable[..., Any])


not_compiled: Callable[[_F], _F] = torch._disable_dynamo  # type: ignore[attr-defined, assignment]
"""Makes `torch.compile` call a function as it is. The public one imports the compiler when a class is defined."""


def share_hooks(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Makes two optimizers run the same hooks, also those that are registered or removed later.

    An optimizer keeps each kind of hooks in a dict, which the two then share.
    """
    for name, hooks in vars(source).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(target, name, hooks)


def hooks_of(optimizer: torch.optim.Optimizer, name: str) -> list[Callable[..., Any]]:
    """The hooks of a kind, such as ``state_dict_pre``, in the order in which they run."""
    return list(getattr(optimizer, f"_optimizer_{name}_hooks", {}).values())


OpOverload = torch._ops.OpOverload
"""An operator with its argument types chosen. Documented, but the module that holds it has a private name."""

tree_flatten = torch.utils._pytree.tree_flatten
tree_leaves = torch.utils._pytree.tree_leaves
tree_map = torch.utils._pytree.tree_map
tree_unflatten = torch.utils._pytree.tree_unflatten
"""Tensors inside of nested arguments. `torch.utils.pytree` came with 2.9 and is not in all supported versions."""

checks_of_checkpoints: dict[str, Callable[[torch.Tensor], Any]] = getattr(
    torch.utils.checkpoint, "_allowed_determinism_checks_to_fns", {}
)
"""By name, what a checkpoint asks each tensor that its region saves. Where PyTorch has none, modes see the questions,
which takes longer."""
