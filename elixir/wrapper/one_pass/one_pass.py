"""`OnePass`: takes several micro-batches through each layer before the next layer's weights are fetched.

Each micro-batch is a call of the user's function on a thread (`MicroBatch`); one thread runs at a time, and they take
turns at layers. All of them call the same layers in the same order:

* forward: the first layer for micro-batch 0, 1, ... (a `Region` each); the operators between it and the second layer
  (*glue*) for 0, 1, ...; and so on;
* tail: what follows the last layer, the loss, and the backward that the user's function calls, which stops at the
  outputs of the last layer, since graphs end at layers;
* sweep: from the last layer to the first, for micro-batch 0, 1, ...: run the layer again and differentiate it; then
  the glue before it for 0, 1, ...

So the weights of each layer come twice per pass, whatever the number of micro-batches is, and its gradients leave once.
`GradientStages` sums gradients in the order of a loop over the micro-batches, which have their own random numbers.
A model that does anything else between its layers is refused by a sentence, before a gradient could be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from elixir.access.autograd import backward_is_running
from elixir.access.compiled_units import is_compiled
from elixir.access.interrupts import raise_waiting
from elixir.access.module_call import without_checkpoint
from elixir.errors import InputError
from elixir.models.model_tensors import ModuleState
from elixir.plan.activations import keeps_state
from elixir.torch_private import seeing_backwards
from elixir.wrapper.calls import follow_changes
from elixir.wrapper.engine import Engine
from elixir.wrapper.one_pass.micro_batch import GLUE, GradientStages, MicroBatch
from elixir.wrapper.one_pass.regions import RandomState, Region, Root, ThreadSettings

_SEEDS = 2**62
"""Number of seeds from which the random states of micro-batches are drawn."""


class OnePass:
    """Runs the micro-batches of one pass.

    Args:
        engine: of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._device = engine, engine.device
        self._names = engine.plan.step.checkpointed
        self._layers = [engine.model.get_submodule(name) for name in self._names]
        self._micro_batches: list[MicroBatch] = []
        self._stages = GradientStages(engine)

    def run(self, step_fn: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
        """Calls ``step_fn(batch)`` for each batch; returns the results in the order of the batches.

        Raises:
            InputError: this model cannot take several micro-batches through its layers together.
        """
        settings, alone = ThreadSettings(self._device), len(batches) == 1
        # A copy: the user may draw batches from the process's generator, which a loop moves only if something draws.
        seeds = torch.Generator("cpu").set_state(torch.get_rng_state())
        for index, batch in enumerate(batches):
            seed = None if alone else int(torch.randint(_SEEDS, (), device="cpu", generator=seeds))
            random = None if seed is None else RandomState(self._device, seed)
            self._micro_batches.append(MicroBatch(index, partial(step_fn, batch), settings, random, self._device))
        state = ModuleState(self._engine.model)
        follow_changes(self._engine)
        self._engine.pass_begins(self._stages)
        try:
            with self._taking_turns():
                self._forward()
                if not alone and (changed := state.changed()) is not None:
                    raise keeps_state(changed)
                self._sweep()
        except BaseException:
            for each in self._micro_batches:
                each.cancel()
            self._engine.pass_over(failed=True)
            raise
        self._engine.pass_over()
        if any(each.has_drawn for each in self._micro_batches):
            torch.set_rng_state(seeds.get_state())  # the next pass has other numbers
        return [each.result for each in self._micro_batches]

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        """Makes layers give the turn to other micro-batches, and modules between them announce their parameters."""
        inside = {module for layer in self._layers for module in layer.modules()}
        with ExitStack() as stack:
            for module in self._engine.model.modules():
                if module._parameters and module not in inside and not is_compiled(module):
                    stack.callback(module.register_forward_pre_hook(self._announce).remove)
            stack.enter_context(self._stages.watching())
            for number, layer in enumerate(self._layers):
                before = layer._compiled_call_impl
                stack.callback(setattr, layer, "_compiled_call_impl", before)
                layer._compiled_call_impl = partial(self._called, number, before or layer._call_impl)
            stack.enter_context(seeing_backwards(self._backward_begins))
            for module in inside:
                stack.enter_context(without_checkpoint(module))
            yield

    def _announce(self, module: torch.nn.Module, args: Any) -> None:
        self._stages.used(module._parameters.values())

    def _here(self) -> MicroBatch | None:
        """The micro-batch of this pass whose thread this is."""
        here = MicroBatch.here()
        return here if here in self._micro_batches else None

    def _called(self, number: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a layer, on the thread of a micro-batch once it is its turn; elsewhere at once."""
        here = self._here()
        if here is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if backward_is_running():
            raise InputError(
                f"the layer {self._names[number]} runs again in backward inside of a pass, as under a reentrant "
                "checkpoint of the model's own; take that out, or plan with pass_size=1"
            )
        here.park(number)
        self._stages.now += 1
        layer = self._layers[number]
        self._stages.use(layer.parameters())
        region = Region(self._names[number], layer, call, self._device, self._engine.swapping)
        output = region.forward(here.glue, args, kwargs)
        here.has_run(region)
        self._stages.now += 1
        return output

    def _backward_begins(self, outputs: Sequence[Any], asks: bool) -> None:
        """Code runs a backward, on some thread."""
        here = self._here()
        if here is None:
            return
        if asks:
            raise InputError(
                "gradients are asked for inside of accumulate(), by torch.autograd.grad, backward(inputs=) or "
                "create_graph=True, but graphs end at layers while several micro-batches pass them together; leave "
                "that out, or plan with pass_size=1"
            )
        MicroBatch.waits_after_layer()
        here.glue.ends_of(outputs)

    # --- called on the thread of the pass -----------------------------------------------------------------------

    def _forward(self) -> None:
        """Runs all calls of the user's function to their ends."""
        while True:
            for each in self._micro_batches:  # from the beginning, or from where it uses weights after a layer
                if each.wants == GLUE:
                    self._resume(each)
            wants, *others = dict.fromkeys(each.wants for each in self._micro_batches)
            if others:
                calls = ["no more layers" if layer is None else self._names[layer] for layer in (wants, others[0])]
                raise InputError(
                    f"some micro-batches call {calls[0]} where others call {calls[1]}, as with LayerDrop, but in a "
                    "pass all call the same layers in the same order; leave such skips out, or plan with pass_size=1"
                )
            if wants is None:
                return
            for each in self._micro_batches:  # the layer, and on until it uses weights
                self._resume(each)

    def _resume(self, micro_batch: MicroBatch) -> None:
        raise_waiting()
        self._stages.micro_batch, self._stages.now = micro_batch.index, 2 * len(micro_batch.regions)
        micro_batch.resume()
        self._engine.uses.backward_done()  # the weights of the last node stay pinned otherwise

    def _sweep(self) -> None:
        """The backward of everything before the tail."""
        turns = len(self._micro_batches[0].regions)
        order = [each.regions[number] for number in reversed(range(turns)) for each in self._micro_batches]
        self._stages.swept(2 * turns)
        for number in reversed(range(turns)):
            turn = [each.regions.pop() for each in self._micro_batches]
            for index, region in enumerate(turn):
                order.pop(0)
                for following in order[:1]:  # while this one computes
                    following.fetch()
                self._stages.micro_batch, self._stages.now = index, 2 * number + 1
                self._differentiate(region.roots())
            self._stages.swept(2 * number + 1)
            for index, region in enumerate(turn):
                self._stages.micro_batch, self._stages.now = index, 2 * number
                self._differentiate(region.glue_roots)
            self._stages.swept(2 * number)

    def _differentiate(self, roots: Sequence[Root]) -> None:
        """Calls autograd once, from the roots that have a gradient."""
        raise_waiting()
        edges, gradients = [], []
        for edge, slot in roots:
            gradient, slot.gradient = slot.gradient, None
            if gradient is not None:
                edges.append(edge)
                gradients.append(gradient)
        if edges:
            torch.autograd.backward(edges, gradients)
            self._engine.uses.backward_done()  # the weights of the last node stay pinned otherwise
