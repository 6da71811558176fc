"""Surrounds calls of the model: `Calls` enters a context around each outermost one, `prepare_forward` is the door
of every forward, `refuse_addresses` explains errors of code that calls no operator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from elixir.access.autograd import backward_is_running
from elixir.access.compiled_units import compiled_units, is_compiled
from elixir.access.interrupts import run_user_code
from elixir.access.module_call import ModuleCall
from elixir.access.placeholders import is_absent
from elixir.errors import InputError, few
from elixir.models.plannable import compiled_over_moving_weights, refuse_compiled
from elixir.step_trace import is_inside
from elixir.torch_private import backward_is_compiled, compiling
from elixir.wrapper.engine import Engine

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Around = AbstractContextManager[tuple[Arguments, Callable[[Any], Any]]]
"""Gives the arguments as the model gets them, and a function that finishes its output."""


class Calls:
    """Enters a context when a model is called outside of another call, and leaves it with the call, until `remove`.

    `generate`, or any other method of a model, enters it for each call of the model that it contains.

    Args:
        models: those under the plan.
        begin: ``begin(model, args, kwargs)`` makes the context.
    """

    def __init__(self, models: Iterable[nn.Module], begin: Callable[[nn.Module, Any, Any], Around]) -> None:
        self._begin, self._threads = begin, set[int]()  # on which a model runs
        self._calls = [ModuleCall(model, self._run, outermost=True) for model in models]

    def remove(self) -> None:
        """Lets the models be called as before."""
        while self._calls:
            self._calls.pop().remove()

    def _run(self, model: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        if thread in self._threads or backward_is_running():
            return run_user_code(call, *args, **kwargs)
        self._threads.add(thread)
        try:
            with self._begin(model, args, kwargs) as ((args, kwargs), finished):
                output = run_user_code(call, *args, **kwargs)
            return finished(output)
        finally:
            self._threads.discard(thread)


# --- before a forward ------------------------------------------------------------------------------------------------
# Before a forward: refuses one that cannot run, and brings changes of the plan or of the model into force.


logger = logging.getLogger(__name__)


def refuse_compiled_around(engine: Engine, part: nn.Module | None = None) -> None:
    """Refuses a forward or backward of the whole model, or one of several, that torch.compile runs.

    Raises:
        InputError: the plan moves weights, and a compiler is at work.
    """
    # The first question is the one that a compiler can answer while it traces this; then it leaves the frame.
    around = torch.compiler.is_compiling() or compiling() or (part is not None and is_compiled(part))
    if around and engine.tracked:
        raise compiled_over_moving_weights("the ElixirModule, or a function around it,")
    if backward_is_compiled():
        raise InputError(
            "compiled autograd makes one graph of all of backward, in which no weight can be fetched; leave it out, "
            "and compile layers (elixir.wrap with compile=True), whose backward is compiled with them"
        )


def prepare_forward(engine: Engine) -> None:
    """Refuses a forward that cannot run. Corrects the plan if that is due, and follows changes of the model; not while
    one of its modules runs, since both replace the hooks by which a module ends.

    Raises:
        InputError: the model cannot run now, or the plan cannot run it.
        StateError: an earlier error has left it unusable.
    """
    engine.refuse_unusable()
    if engine.uses.averaged is False or (engine.uses.averaged and torch.is_grad_enabled()):
        raise InputError(
            "inside of gathered(ema=True) the model runs for evaluation only: under torch.no_grad(), and with the "
            "averages of all its parameters"
        )
    if engine.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "a CUDA graph would replay with the addresses that weights had when it was captured, but streamed weights "
            "move; run an ElixirModule without capturing it"
        )
    engine.forget_failed_backward()
    engine.errors.refuse_failed()
    # `OnePass` has asked already, and replaces calls of layers as a compiler does.
    if engine.phase.takes_turns or (engine.access is not None and engine.access.is_entered):
        return
    engine.forward_comes()
    follow_changes(engine)


def follow_changes(engine: Engine) -> None:
    """Makes modules that were compiled since the last forward into units; all ranks must have compiled the same.

    Units whose activations are planned keep the plan's checkpoints, if others were switched on or off.

    Raises:
        InputError: the plan cannot run them.
    """
    if engine.recomputation.renew():
        logger.warning(
            "activation checkpointing was switched on or off after wrapping; layers keep what the plan says instead. "
            "Plan without activations= to choose it yourself"
        )
    if engine.access is None:
        engine.recomputation.renew_compiled()
    if engine.access is None or not engine.access.was_changed_since:
        return
    refuse_compiled(engine.model, engine.plan, runs=True)
    units = sorted(compiled_units(engine.model).values())
    engine.exchange(f"compiled modules {units}", None)
    plain = [each for each in engine.plan.activations if each.unit not in engine.recomputation.compiled]
    kept = [each.unit for each in plain if each.keep is not None or each.swap]
    for name in units:
        if any(is_inside(name, unit) or is_inside(unit, name) for unit in kept):
            raise InputError(
                f"{name} was compiled after the plan was made, which keeps or moves results of its operators one by "
                "one; compile before wrapping (elixir.wrap with compile=True), without activations="
            )
    late = set(units) - set(engine.plan.step.compiled)
    if late:
        logger.warning(
            "%d modules were compiled after the plan was made, which counts less memory for them: all weights of one "
            "come at once; compile before wrapping (elixir.wrap with compile=True)",
            len(late),
        )
    engine.listen()


# --- errors of a forward ---------------------------------------------------------------------------------------------
# Explains errors of code that takes the address of a weight's elements without calling an operator.


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
