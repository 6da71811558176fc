"""Explains errors of code that takes the address of a weight's elements without calling an operator."""

from __future__ import annotations

from torch import nn

from elixir.access.placeholders import is_absent
from elixir.errors import InputError, few

_NOT_ALLOCATED = "its data is not allocated yet"
"""PyTorch's message when a kernel asks a tensor without memory for its elements."""


def refuse_addresses(model: nn.Module, error: BaseException) -> None:
    """Raises an `InputError` with the weights' names if `error` came from a weight without memory."""
    if not isinstance(error, RuntimeError) or _NOT_ALLOCATED not in str(error):
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    module, trace = model, error.__traceback__
    while trace is not None:  # to the innermost module that was running
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and any(parameter in names for parameter in owner.parameters()):
            module = owner
        trace = trace.tb_next
    # Those of the module come first: that it reads another's is rare.
    absent = dict.fromkeys(each for each in (*module.parameters(), *names) if is_absent(each) and each in names)
    raise InputError(
        "code that calls no operator, such as a compiled extension, reads a weight that is not there: one of "
        f"{few([names[each] for each in absent])}. Call weight.data_ptr() in the same module's forward before it, "
        "which fetches the weight until that module returns, or register the code as an operator "
        "(torch.library.custom_op)"
    ) from error
