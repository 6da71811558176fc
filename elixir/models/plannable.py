"""Refuses models that cannot be planned, and says why."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elixir.access.compiled_units import compiled_in_place, compiled_units, has_cuda_graphs, is_compiled
from elixir.access.interception import TRACKED_PARAMETERS
from elixir.access.whole import holds_others
from elixir.errors import InputError
from elixir.models.quantised import PACKED_CLASSES, InnerTensor, is_packed, packed_for_cpu
from elixir.models.shared_memory import find_shared_memory
from elixir.models.together import Together
from elixir.plan.plan import Plan
from elixir.step_trace import is_inside
from elixir.torch_private import DisableTorchFunctionSubclass, TopDispatch
from elixir.units import dtype_name


def refuse_unplannable(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Chunks are flat buffers of numbers: every parameter must be dense and real, and floating where it is trained.

    Packed weights of bitsandbytes pass where they are frozen.

    Args:
        model: real, or on meta.
        dtype: what floating tensors will be cast to; None leaves them.

    Raises:
        InputError: a parameter or buffer is something else, or `dtype` would unpack it, or two share memory; the
            error says its name and what to do.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with DisableTorchFunctionSubclass():  # only the form of a parameter is read, not its values, which may be elsewhere
        for name, tensor in tensors:
            found, way = _of_another_kind(tensor) or _not_dense(tensor) or _packed(tensor, dtype) or ("", "")
            if found:
                raise InputError(f"{name} is {found}, which cannot be planned: {way}")
    find_shared_memory(model)


def refuse_passes(model: nn.Module) -> None:
    """Refuses models whose micro-batches have to go one by one, with ``pass_size=1``: when planning, and in the run.

    Raises:
        InputError: there are several models, or a module in training mode tracks statistics.
    """
    if isinstance(model, Together):
        raise InputError("several models under one plan cannot share a pass yet; plan with pass_size=1")
    for name, module in model.named_modules():
        if module.training and getattr(module, "track_running_stats", False):
            raise InputError(
                f"{name or 'the model'} updates running statistics in forward, which several micro-batches in one pass "
                "do in another order than a loop; call eval() on that module, or plan with pass_size=1"
            )


def refuse_compiled(model: nn.Module, plan: Plan, *, runs: bool = False) -> None:
    """Refuses compiled layers that a plan cannot run: each needs all its weights at once.

    Args:
        model: with layers that are compiled, or not.
        plan: what it runs under, or will.
        runs: whether the model runs under a plan already, so that layers may have been compiled since.

    Raises:
        InputError: the plan moves weights, and the whole model was given to torch.compile, or a module with CUDA
            graphs, or other modules than the plan has as units; of one that runs, some with more chunks than blocks.
    """
    moving = {
        slot.name: chunk
        for chunk in plan.chunks
        if plan.world_size > 1 or not chunk.resident or chunk.state_home != "device"
        for slot in chunk.parameters
    }
    with compiled_in_place(model):
        if moving and is_compiled(model):
            raise compiled_over_moving_weights("the model")
        compiled = {name: module for module, name in compiled_units(model).items()}
        for name in sorted({*compiled, *plan.step.compiled}):
            chunks = [chunk for each, chunk in moving.items() if is_inside(each, name)]
            if chunks and name in compiled and has_cuda_graphs(compiled[name]):
                raise InputError(
                    f"{name} is compiled with CUDA graphs, which replay fixed addresses, and streamed weights have "
                    "none; compile it with mode='default' or 'max-autotune-no-cudagraphs'"
                )
            streamed = len({id(chunk) for chunk in chunks if not chunk.resident})
            as_planned = (name in compiled) == (name in plan.step.compiled)
            if not chunks or as_planned or (runs and streamed <= plan.block_count):
                continue
            was, now = ("not", "is") if name in compiled else ("was", "is not")
            raise InputError(
                f"{name} {now} given to torch.compile, and {was} when the plan was made; compile layers before "
                "planning and before wrapping alike (elixir.wrap with compile=True does both)"
                + (f": all its weights are {streamed} chunks, and the plan has {plan.block_count} blocks" * runs)
            )


def compiled_over_moving_weights(what: str) -> InputError:
    """The error for compiled code that reads weights of chunks that come and go."""
    return InputError(
        f"{what} was given to torch.compile, which cannot run with weights that are streamed or partitioned; compile "
        "its layers instead (elixir.wrap with compile=True), or plan with memory enough that everything stays on one "
        "device"
    )


_REFUSED_CLASSES = {
    "DTensor": ("a DTensor", "give ordinary tensors (full_tensor()), which the plan partitions itself"),
    "Int8Params": (
        "of Int8Params, whose scales bitsandbytes moves in forward",
        "load the model with load_in_4bit (nf4), or with torchao's 8 bits",
    ),
}


def _of_another_kind(tensor: torch.Tensor) -> tuple[str, str] | None:
    """A tensor whose class does more than hold numbers, and the way out."""
    kind = type(tensor)
    if kind in (nn.Parameter, torch.Tensor, InnerTensor) or tensor.is_nested or is_lazy(tensor):
        return None
    names = {each.__name__ for each in kind.__mro__}  # the class may be a tracked one
    packs = not names.isdisjoint(PACKED_CLASSES)
    for name in names & _REFUSED_CLASSES.keys():
        return _REFUSED_CLASSES[name]
    if packs and not is_packed(tensor):
        return f"a {kind.__name__} that is not quantised yet", "move the model to a device first, model.to('cpu')"
    if packs and packed_for_cpu(tensor):
        return f"a {kind.__name__} that an evaluation has reordered", "plan and wrap before evaluating on the CPU"
    if packs and not tensor.requires_grad:
        return None
    if packs or (holds_others(tensor) and isinstance(tensor, nn.Parameter)):
        return f"a trained {kind.__name__}", "freeze it (requires_grad_(False)) and train adapters over it"
    if kind.__torch_dispatch__ is not TopDispatch or nn.Parameter not in kind.__mro__:
        found = f"a {kind.__module__}.{kind.__qualname__}, a tensor subclass of unknown memory"
        return found, "give ordinary tensors, such as the model before it is quantised"
    if kind.__torch_function__ is not nn.Parameter.__torch_function__ and kind not in TRACKED_PARAMETERS:
        return f"a {kind.__qualname__} with a __torch_function__", "leave that out, since the plan needs it"
    return None


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _not_dense(tensor: torch.Tensor) -> tuple[str, str] | None:
    """A parameter that is sparse, nested or complex, or a buffer in compressed rows or columns, and the way out."""
    if tensor.layout in _COMPRESSED and not isinstance(tensor, nn.Parameter):
        return f"a {tensor.layout} buffer", "make it sparse otherwise (to_sparse()), or dense (to_dense())"
    if not isinstance(tensor, nn.Parameter):
        return None
    if tensor.is_nested:
        return "a nested tensor", "pad it to a dense one, or make each part a parameter"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor", "make it dense (to_dense()), or a buffer if it is not trained"
    if tensor.is_complex():
        return f"of {tensor.dtype}", "keep torch.view_as_real of it, and torch.view_as_complex in forward"
    return None


def _packed(tensor: torch.Tensor, dtype: torch.dtype | None) -> tuple[str, str] | None:
    """Numbers of a byte or less, whose scale is elsewhere, before a cast of the whole model; and the way out."""
    if dtype is None or not tensor.is_floating_point() or tensor.itemsize > 1 or is_packed(tensor):
        return None
    return f"of {tensor.dtype}, packed", f"leave out the cast to {dtype_name(dtype)}, or unpack it with its scale first"
