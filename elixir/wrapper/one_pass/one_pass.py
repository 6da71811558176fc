"""`OnePass`: takes several micro-batches through each layer before the next layer's weights are fetched.

Each micro-batch is a call of the user's function on a thread; one thread runs at a time, and they take turns at layers:

* forward: the first layer for micro-batch 0, 1, ...; the operators between it and the second layer for 0, 1, ...; and
  so on;
* tail: what follows the last layer, the loss, and the backward that the user's function calls, which stops at the
  outputs of the last layer, since the graph is cut there;
* sweep: from the last layer to the first, for micro-batch 0, 1, ...: run the layer again and differentiate it; then
  the operators before it for 0, 1, ...

So the weights of each layer come twice per pass, whatever the number of micro-batches is, and its gradients leave once.
Gradients are summed in the order of a loop over the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from elixir.access.compiled_units import is_compiled
from elixir.access.interrupts import raise_waiting
from elixir.access.own_checkpoint import without_checkpoint
from elixir.access.recomputation import with_own_caches
from elixir.models.module_state import ModuleState
from elixir.plan.activations import keeps_state
from elixir.torch_private import seeing_asked_gradients
from elixir.wrapper.engine import Engine
from elixir.wrapper.late_units import follow_changes
from elixir.wrapper.one_pass.asked_gradients import refuse_incomplete
from elixir.wrapper.one_pass.gradient_stages import GradientStages
from elixir.wrapper.one_pass.micro_batch import GLUE, TAIL, MicroBatch
from elixir.wrapper.one_pass.regions import Region, Roots, Trail, beginnings
from elixir.wrapper.one_pass.settings import RandomState, ThreadSettings
from elixir.wrapper.weight_uses import ignored


class _Course:
    """One micro-batch's way through the layers.

    Args:
        index: its number in the pass.
        function: the user's, with the batch.
        settings: of the calling thread.
        random: its random state at the beginning; None: the process's.
        device: the device of compute.
    """

    def __init__(
        self,
        index: int,
        function: Callable[[], Any],
        settings: ThreadSettings,
        random: RandomState | None,
        device: torch.device,
    ) -> None:
        self._function = function
        self.call = MicroBatch(index, self._begin, settings, random, device)
        self.call.at_backward = self.refuse_hooked
        self.regions: dict[int, Region] = {}
        """By turn, in rising order."""
        self.times: dict[int, int] = {}
        """By layer, how often it was called."""

    def _begin(self) -> Any:
        self.trail = Trail()  # on the micro-batch's thread, since each numbers autograd's nodes anew
        function, self._function = self._function, lambda: None
        return function()

    def refuse_hooked(self) -> None:
        """See `Trail.refuse_hooked`."""
        self.trail.refuse_hooked()

    def glue_before(self, turn: int) -> int | None:
        """Number of the glue whose backward comes right after that of `turn`, the latest that it had a region in, if
        there is one. A micro-batch may skip layers, as LayerDrop does; its glue is then where that of the others is."""
        return len(self.regions) if max(self.regions, default=-1) == turn - 1 else None


def _with_own_caches(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = with_own_caches(args, kwargs)
    return call(*args, **kwargs)


class OnePass:
    """Runs the micro-batches of one pass.

    Args:
        engine: of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._device = engine, engine.device
        self._names = engine.plan.step.checkpointed
        self._layers = [engine.model.get_submodule(name) for name in self._names]
        self._courses: list[_Course] = []
        self._turns = 0  # that have begun: in each, some micro-batches run one layer
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
            random = None if alone else RandomState.drawn(self._device, seeds)
            course = _Course(index, partial(step_fn, batch), settings, random, self._device)
            course.call.is_early = partial(self._waits_for_earlier, index)
            self._courses.append(course)
        state = ModuleState(self._engine.model)
        follow_changes(self._engine)
        self._engine.pass_begins(self._stages)
        try:
            with self._taking_turns():
                self._forward()
                for course in self._courses:
                    course.refuse_hooked()
                if not alone and (changed := state.changed()) is not None:
                    raise keeps_state(changed)
                self._sweep()
        except BaseException:
            for course in self._courses:
                course.call.cancel()
            self._engine.pass_over(failed=True)
            raise
        self._engine.pass_over()
        if any(course.call.has_drawn for course in self._courses):
            torch.set_rng_state(seeds.get_state())  # the next pass has other numbers
        return [course.call.result for course in self._courses]

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        """Makes layers give the turn to other micro-batches, and modules between them announce their parameters."""
        before = [layer._compiled_call_impl for layer in self._layers]
        inside = {module for layer in self._layers for module in layer.modules()}
        handles = [
            module.register_forward_pre_hook(lambda module, args: self._used(module._parameters.values()))
            for module in self._engine.model.modules()
            if module._parameters and module not in inside and not is_compiled(module)
        ]
        self._engine.uses.used_in_pass = self._used
        self._engine.swapping.paused = True
        self._stages.open()
        try:
            for number, layer in enumerate(self._layers):
                layer._compiled_call_impl = partial(self._called, number, before[number] or layer._call_impl)
            with ExitStack() as stack:
                stack.enter_context(seeing_asked_gradients(self._asked))
                for module in inside:
                    stack.enter_context(without_checkpoint(module))
                yield
        finally:
            for layer, call in zip(self._layers, before, strict=True):
                layer._compiled_call_impl = call
            for handle in handles:
                handle.remove()
            self._engine.uses.used_in_pass = ignored
            self._engine.swapping.paused = False
            self._stages.close()

    def _called(self, number: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a layer, on the thread of a micro-batch once it is its turn; elsewhere at once."""
        course = next((course for course in self._courses if course.call is MicroBatch.here()), None)
        if course is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        here = course.call
        args, kwargs = with_own_caches(args, kwargs)
        times = course.times[number] = course.times.get(number, 0) + 1
        here.has_left_layer = False
        here.park((times, number))
        self._stages.use(self._layers[number].parameters())
        region = Region(
            self._names[number], partial(_with_own_caches, call), course.trail, self._device, self._engine.swapping
        )
        output = region.forward(args, kwargs)
        course.regions[self._turns - 1] = region
        self._stages.now += 1
        here.has_left_layer = True  # and it goes on, until it uses weights
        return output

    def _used(self, parameters: Iterable[torch.nn.Parameter | None]) -> None:
        MicroBatch.waits_after_layer()
        self._stages.use(parameters)

    def _asked(self, outputs: Sequence[Any], inputs: Sequence[Any], kept: bool) -> None:
        """User code asks for gradients, on some thread."""
        here = MicroBatch.here()
        if any(course.call is here for course in self._courses):
            refuse_incomplete(outputs, inputs, kept, self._stages.begins_with)

    # --- called on the thread of the pass -----------------------------------------------------------------------

    def _forward(self) -> None:
        """Runs all calls of the user's function to their ends."""
        turn = list(self._courses)
        while True:
            for course in turn:  # from the beginning, or from where it uses weights after a layer, up to the next layer
                self._resume(course)
            waiting = [course.call.wants for course in self._courses if course.call.wants is not None]
            if not waiting:
                return
            # Those that have skipped a layer wait for the others.
            layer = min(waiting)
            turn = [course for course in self._courses if course.call.wants == layer]
            if layer == TAIL:
                continue
            self._turns += 1
            if any(course.call.is_over for course in self._courses):
                self._stages.set_aside()
            for course in turn:
                self._stages.now = 2 * self._turns - 1
                self._resume(course)
            self._stages.now = 2 * self._turns
            turn = [course for course in turn if course.call.wants == GLUE]

    def _waits_for_earlier(self, index: int) -> bool:
        """Whether a micro-batch before this one has not come to the tail yet."""
        return not all(course.call.is_over for course in self._courses[:index])

    def _resume(self, course: _Course) -> None:
        raise_waiting()
        self._stages.micro_batch = course.call.index
        course.call.resume()
        self._engine.uses.backward_done()  # the weights of the last node stay pinned otherwise

    def _sweep(self) -> None:
        """The backward of everything before the tail."""
        self._stages.swept(2 * self._turns)
        left = [
            (course, turn)
            for turn in reversed(range(self._turns))
            for course in self._courses
            if turn in course.regions
        ]
        for turn in reversed(range(self._turns)):
            self._stages.now = 2 * turn + 1
            for course in self._courses:
                region = course.regions.pop(turn, None)
                if region is not None:
                    left.pop(0)
                    for following, its_turn in left[:1]:  # while this one computes
                        following.regions[its_turn].fetch()
                    self._stages.micro_batch = course.call.index
                    region.backward(self._differentiate)
            self._stages.swept(2 * turn + 1)
            self._stages.now = 2 * turn
            for course in self._courses:
                glue = course.glue_before(turn)
                if glue is not None:
                    self._stages.micro_batch = course.call.index
                    self._differentiate(course.trail.roots(glue))
            self._stages.swept(2 * turn)

    def _differentiate(self, roots: Roots) -> None:
        """One call of autograd, which takes `roots` over."""
        raise_waiting()
        if roots:
            torch.autograd.backward(*beginnings(roots))
            self._engine.uses.backward_done()  # the weights of the last node stay pinned otherwise
