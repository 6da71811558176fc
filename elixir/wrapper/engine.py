"""`Engine`: runs one plan on one model. It holds chunks, memory and lanes, and knows the phase of the step.

Users call `ElixirModule` and `ElixirOptimizer`, which both hold it. It imports neither; an optimizer is `AnyStepper`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.access.activations import Recomputation, Swapping
from elixir.access.autograd import backward_is_running
from elixir.access.counted_parameter import CountedParameter
from elixir.access.interception import Interception
from elixir.access.interrupts import hold_back, hold_back_no_more
from elixir.chunk import host_buffers as kinds
from elixir.chunk.chunk import Chunk, Slot, take_back
from elixir.chunk.gradients.gradient_flow import FlowOptions, GradientFlow, send_positions
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import HostMover
from elixir.chunk.lanes import make_lanes
from elixir.chunk.memory import Arena, BlockPool
from elixir.chunk.rcache import RCache
from elixir.chunk.state_window import StateWindow, StoredStates
from elixir.errors import ElixirError, InputError, InputTypeError
from elixir.extents.extent_file import ExtentFile
from elixir.hardware.host_share import host_share, host_view
from elixir.hardware.process_memory import HEAP, give_back_freed, share_heap
from elixir.models.layer_units import fetched_as_one
from elixir.plan.plan import Plan
from elixir.torch_private import DisableTorchFunctionSubclass, call_after_backward
from elixir.units import LARGEST_BYTES
from elixir.wrapper.arrivals import Arrivals, weakly
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.phase import Phase, RunErrors, StepPhase
from elixir.wrapper.run_options import RunOptions
from elixir.wrapper.views_of_engine import AnyStepper, RunningPass, StateReader, StepObserver
from elixir.wrapper.weight_uses import ForwardOnly, WeightUses, ignored

logger = logging.getLogger(__name__)

_FORMS_KEPT = 4096
"""The most forms of steps that are kept if no report takes them."""

Build = Callable[[nn.Module, Plan, Arena, Group, StateWindow], Iterator[Chunk]]
"""Yields the filled chunks of a model under a plan. One alone has its weights: `Engine.chunks` takes it at once."""


class Engine:
    """Runs one plan on one model, from `install` on.

    Args:
        model: the model inside of the wrapper.
        group: the ranks over which chunks are sharded.
        device: the device of compute.
        options: how the plan is run.
    """

    plan: Plan
    arena: Arena

    def __init__(self, model: nn.Module, group: Group, device: torch.device, options: RunOptions) -> None:
        self.model, self.group, self.device, self.options = model, group, device, options
        self.host_share = host_share(group.exchange("cores", host_view()), group.rank)
        """This rank's part of its machine's cores."""
        if device.type == "cpu":
            share_heap()
        with contextlib.ExitStack() as started:
            with group.together("start its lanes"):
                self.lanes = make_lanes(device, options.debug.emulation)
                started.callback(self.lanes.close)
            started.pop_all()
        self.host_buffers = kinds.HostBuffers(Arena(device))
        """All host memory of this rank that no chunk owns. Kinds that are not the plan's survive a change of plan."""
        open_file = partial(ExtentFile, options.disk_folders, files=options.debug.files)
        self.mover = HostMover(self.lanes, self.host_buffers)
        self.window = StateWindow(self.lanes, self.host_buffers, open_file)
        """The buffers through which masters and states on a disk pass."""
        # Runs even if `close` is never called: the interpreter must not end with threads inside of torch.
        stop = contextlib.ExitStack()
        stop.callback(self.window.close)  # after the last transfer of its lane
        stop.callback(self.lanes.close)
        self._stop_lanes = weakref.finalize(self, stop.close)
        self.errors = RunErrors(self.lanes.fate, group.size)
        """The errors that end the run."""
        self.phase = StepPhase(group.rank)
        self.steppers: list[AnyStepper] = []
        """The optimizers that step this model."""
        self.loss_scale = LossScale(False, 1.0, 1)
        """The loss scale of all optimizers; see `add_stepper`."""
        self.observer: StepObserver | None = None
        """Learns when an optimizer has stepped; None: nobody does."""
        self.before_forward: Callable[[], bool] | None = None
        """Called by `forward_comes`; says whether it wants to be called again."""
        self.read_unannounced: list[Chunk] = []
        """Resident chunks that attributes of modules are views of. Reads of these do not wait for updates; steps do."""
        self.settled = 0
        """How often the blocks have been emptied outside of a step."""
        self.host_forms: deque[str] = deque(maxlen=_FORMS_KEPT)
        """The forms of CPU Adam's steps since the last report."""
        self._pass: RunningPass | None = None  # that takes several micro-batches through each layer
        self.unstepped: list[AnyStepper] = []
        """Optimizers that have not stepped since the last backward."""
        self.state_reader: StateReader | None = None  # of checkpoints; None before the first
        self._is_after_step = False  # no forward has ended since
        self.leaving: dict[int, StoredStates] = {}
        """By chunk, states on a disk under the previous plan, until the optimizers have taken them over."""
        self.chunks: list[Chunk] = []
        self.access: Interception | None = None
        self._handles: list[ForwardOnly] = []
        self.recomputation = Recomputation(model, ())

    # --- the plan ----------------------------------------------------------------------------------------------

    def install(self, plan: Plan, build: Build) -> None:
        """Puts the model under a plan. A failure is raised on all ranks."""
        self.plan, self.arena = plan, Arena(self.device)
        self.host_buffers.count_in(self.arena)
        self.window.count_in(self.arena)
        with self.group.together("have buffers for states on a disk"):
            if plan.uses_disk:
                self.host_buffers.replace(kinds.window_kind(plan))
        for chunk in build(self.model, plan, self.arena, self.group, self.window):
            self.chunks[chunk.index : chunk.index + 1] = [chunk]
        give_back_freed()  # copies of weights
        with self.group.together("have its blocks and buffers"):
            self._make_memory(plan)
        for chunk in self.chunks:
            chunk.attach()
        self.places: dict[torch.Tensor, tuple[Chunk, Slot]] = {
            slot.parameter: (chunk, slot) for chunk in self.chunks for slot in chunk.slots
        }
        """The chunk and the slot of every parameter."""
        self.tracked = [chunk for chunk in self.chunks if not self.is_ordinary(chunk)]
        """The chunks whose parameters may be placeholders, or whose weights an update may still be writing."""
        of_model, backward_runs = (self.chunks, self.places, self.gradients), weakly(self.backward_runs)
        self.uses = WeightUses(self.cache, *of_model, self.device, backward_runs, moves=plan.moves_activations)
        self.swapping = Swapping(self.model, plan.step, self.mover)
        self.recomputation = Recomputation(self.model, plan.activations, self.swapping)
        self.listen()
        self.arrivals = Arrivals(
            self.chunks,
            self.gradients,
            fetched_as_one(self.model, plan.step) if plan.pass_size == 1 else (),
            order_compute=weakly(self.uses.order_compute),
            backward_runs=backward_runs,
            keeps=weakly(self._kept_by_pass),
        )
        self._handles = [ForwardOnly(self.model)] if plan.step.forward else []
        for parameter, chunk in self._counted():
            parameter.__class__ = CountedParameter
            parameter.elixir_lends = chunk.lend  # type: ignore[attr-defined]
            parameter.elixir_gradient_is_scaled = plan.dtype == "float16"  # type: ignore[attr-defined]

    def listen(self) -> None:
        """Notifies `uses` of every use of a tracked weight; modules that are compiled by now use theirs together."""
        self.stop_listening()
        self.recomputation.renew_compiled()
        units = fetched_as_one(self.model, self.plan.step)
        parameters = {slot.parameter for chunk in self.tracked for slot in chunk.slots}
        heard = bool(self.tracked) or self.plan.moves_activations  # of which weights must be no part
        self.access = Interception(self.model, self.uses, parameters, units=units) if heard else None
        self.uses.join(units)

    def stop_listening(self) -> None:
        """Takes hooks and classes off the model."""
        if self.access is not None:
            self.access.remove()
            self.access = None

    def _make_memory(self, plan: Plan) -> None:
        """Allocates what a plan needs next to the chunks."""
        debug = self.options.debug
        pool = BlockPool(self.arena, plan.block_count, plan.block_bytes, poison=debug.poison)
        self.schedule = (plan if self.options.prefetch else replace(plan, prefetch_depth=0)).schedule()
        wide = self.options.reduce_fp32 and self.group.size > 1
        summands = kinds.summands_kind(plan, self.device.type, backwards=plan.passes, wide=wide)
        for kind in (kinds.staging_kind(plan), kinds.file_window_kind(plan), summands, kinds.swapped_kind(plan)):
            self.host_buffers.add(kind)
        self.gradients = self._gradient_flow()
        self.cache = RCache(
            self.chunks,
            self.schedule,
            pool,
            self.lanes,
            self.host_buffers,
            self.group,
            self.gradients,
            evict_always=debug.evict_always,
            backward_from=next((i for i, use in enumerate(plan.order) if use.phase != "forward"), len(plan.order)),
        )

    @property
    def has_plan(self) -> bool:
        """Whether `install` has come to its end."""
        return "uses" in vars(self)

    def _counted(self) -> list[tuple[nn.Parameter, Chunk]]:
        """Plain parameters with masters; writes through ``data`` must reach the masters."""
        return [
            (slot.parameter, chunk)
            for chunk in self.chunks
            if self.is_ordinary(chunk) and chunk.masters is not None
            for slot in chunk.slots
            if type(slot.parameter) in (nn.Parameter, CountedParameter)
        ]

    def uninstall(self) -> None:
        """Takes hooks and classes off the model; the chunks keep their memory, and parameters point to it."""
        for parameter, _ in self._counted():
            parameter.__class__ = nn.Parameter
            for name in ("elixir_lends", "elixir_gradient_is_scaled"):
                vars(parameter).pop(name, None)
        self.stop_listening()
        if "arrivals" in vars(self):  # `install` may have failed before
            self.arrivals.remove()
        while self._handles:
            self._handles.pop().remove()
        self.recomputation.remove()

    def release_memory(self) -> None:
        """Calls `uninstall`, and frees all memory except the chunks and the window of the disk."""
        self.uninstall()
        for kind in (kinds.STAGING, kinds.SUMMANDS, kinds.FILE_WINDOW, kinds.SWAPPED):
            self.host_buffers.drop(kind)
        if "uses" in vars(self):
            self.uses.is_over = True
            self.cache.empty()
        for name in ("cache", "uses", "gradients", "arrivals"):  # `install` may have failed before it created all
            vars(self).pop(name, None)

    def drop_memory(self) -> None:
        """Frees everything, once the model has its weights back: the program may keep the wrapper and its optimizer."""
        self.release_memory()
        self.host_buffers.clear()
        for stepper in self.steppers:
            stepper.drop_states()
        for chunk in self.chunks:
            chunk.drop_memory()
        give_back_freed()

    def abandon(self) -> None:
        """Frees everything after a failed wrapping, and stops. Parameters that point into chunks become placeholders:
        their weights are nowhere else."""
        try:
            self.release_memory()
            with DisableTorchFunctionSubclass():
                for chunk in self.chunks:
                    for slot in filter(chunk.shows, chunk.slots):
                        slot.parameter.data = slot.placeholder
            self.drop_memory()
        finally:
            self.stop()

    def change_plan(self, plan: Plan, build: Build) -> None:
        """Replaces this plan by another."""
        self.leaving |= {chunk.index: chunk.stored for chunk in self.chunks if chunk.stored is not None}
        self.release_memory()  # before new memory is allocated
        give_back_freed()
        self.install(plan, build)

    def plan_installed(self) -> None:
        """Frees the extents of the previous plan, once the optimizers have taken over their states."""
        leaving, self.leaving = self.leaving, {}
        for index, states in leaving.items():
            if self.chunks[index].stored is not states:
                states.give_back()
        if not self.plan.uses_disk:
            self.host_buffers.drop(kinds.WINDOW)
            try:
                self.window.close()
            except ElixirError as error:  # chunks have moved; going back would separate this rank from the others
                logger.warning("a file that nothing uses any more could not be closed: %s", error)

    def is_ordinary(self, chunk: Chunk) -> bool:
        """Whether a chunk is ordinary: weights, gradients and states all on the device of one rank."""
        return chunk.plan.resident and chunk.plan.state_home == "device" and self.group.size == 1

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value`, in order of rank: `Group.exchange`, after the pending work of the network."""
        return self.lanes.network.ask(lambda: self.group.exchange(what, value))

    def chunks_by_use(self) -> list[Chunk]:
        """The chunks in the order in which the next forward asks for them; those that it never uses come last."""
        used = dict.fromkeys(index for use in self.plan.order for index in sorted(use.chunks))
        return [self.chunks[index] for index in dict.fromkeys([*used, *range(len(self.chunks))])]

    def holds_gradients(self) -> bool:
        """Whether this rank has gradients that no step or `zero_grad` has cleared."""
        ordinary = (slot.parameter for chunk in self.chunks if self.is_ordinary(chunk) for slot in chunk.slots)
        return self.gradients.any_held() or any(parameter.grad is not None for parameter in ordinary)

    def refuse_inside(self, what: str) -> None:
        """Raises `InputError` after `close`, and while one of the model's modules, or backward, runs on this thread."""
        self.phase.refuse_closed()
        self.uses.refuse_inside(what)

    # --- optimizers ------------------------------------------------------------------------------------------------

    def add_stepper(self, stepper: AnyStepper, scale: LossScale) -> None:
        """Adds an optimizer; the last one sets the loss scale of all."""
        self.steppers.append(stepper)
        self.loss_scale = scale

    def has_used_gradients(self, stepper: AnyStepper) -> None:
        """Notes that an optimizer has stepped since the last backward."""
        self.unstepped = [each for each in self.unstepped if each is not stepper]

    def spare_host_bytes(self) -> int:
        """The host memory of this rank that is free and that no step takes."""
        return LARGEST_BYTES if self.observer is None else self.observer.spare_host_bytes()

    # --- forward and backward ----------------------------------------------------------------------------------

    def forward_comes(self) -> None:
        """Calls `before_forward`, for the last time if that says so."""
        if self.before_forward is not None and not self.before_forward():
            self.before_forward = None

    def forward_begins(self, *, of_part: bool = False) -> None:
        """Notes that the model's forward starts; modules of a part report their call (`RCache.begin_call`)."""
        if self.joins_pass:
            return
        HEAP.forward_begins(self.plan.predicted.activation_bytes if torch.is_grad_enabled() and not of_part else 0)
        if not of_part:
            self.cache.begin()
        self.phase.enter_forward()

    def forward_over(self, *, of_part: bool = False) -> None:
        """Notes that it has returned."""
        if self._pass is not None:
            self._pass.used(())
            return
        self.phase.leave_forward()
        if not of_part:
            self.cache.end_forward()

    def forward_failed(self) -> None:
        """Notes that it has raised."""
        self.phase.leave_forward()
        self._failed()

    def watch_output(self, output: Any) -> None:
        """Makes backward known at the model's output, before any of the model's nodes run."""
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            begins = weakly(self.backward_runs)
            # In a pass, tensors that have entered a layer refuse other hooks.
            torch.Tensor.register_hook(output, lambda gradient: begins())  # type: ignore[no-untyped-call]

    def backward_runs(self) -> None:
        """Notes that backward runs; the first call makes autograd report its end."""
        if self.phase.closed:
            return
        if not self.phase.in_backward:
            hold_back()
            self.phase.to(Phase.BACKWARD)
            self.unstepped = list(self.steppers)
            if self.group.size > 1:
                self.cache.enter_backward()
            else:
                self.gradients.begin()
            if self._pass is None:
                call_after_backward(self._backward_over)
        HEAP.trim_if_over()
        self.arrivals.take_waiting()

    def forget_failed_backward(self) -> None:
        """Cleans up after a backward that has raised: releases its pins. Its gradients count, as in plain PyTorch."""
        if self.phase.in_backward and self._pass is None and not backward_is_running():
            try:
                self.arrivals.take_waiting()
                self._failed()
                if self.group.size == 1 and self.lanes.fate.error is None:
                    self.gradients.flush()
            finally:
                self.phase.leave_backward()

    def _failed(self) -> None:
        """Releases the pins of a forward or backward that has raised."""
        self.uses.backward_done()
        self.cache.disturbed()
        if self.group.size == 1:  # several may wait for each other
            self.drain()

    def _backward_over(self) -> None:
        try:
            self.arrivals.take_waiting()
            self.uses.backward_done()
            self.cache.end_backward()
            self.gradients.flush()
        finally:
            self.phase.leave_backward()

    # --- several micro-batches in a pass ---

    @property
    def joins_pass(self) -> bool:
        """Whether a forward that begins now is part of a pass whose first forward has begun."""
        return self._pass is not None and self.phase.now is not Phase.IDLE

    def pass_begins(self, running: RunningPass) -> None:
        """Notes that forwards from here on are micro-batches of one pass, which has one backward."""
        self.refuse_unusable()
        self.forget_failed_backward()
        self._set_pass(running)

    def _set_pass(self, running: RunningPass | None) -> None:
        self._pass = running
        self.phase.takes_turns = self.swapping.paused = running is not None
        self.uses.used_in_pass = ignored if running is None else running.used
        self.gradients.hold_until(None if running is None else running.is_done)

    def refuse_in_pass(self, what: str) -> None:
        """Raises `InputError` after `close`, and in a pass of several micro-batches, whose gradients come later."""
        self.phase.refuse_closed()
        if self._pass is not None:
            raise InputError(
                f"{what} inside of accumulate(), whose micro-batches get most gradients after step_fn; call it "
                "afterwards, or plan with pass_size=1"
            )

    def before_zero_grad(self, *, set_to_none: bool) -> None:
        """Raises `InputError` for zeros, after `close` and in a pass; cleans up after a backward that has raised."""
        if not set_to_none:
            raise InputError(
                "zero_grad(set_to_none=False) would keep gradients of zeros under a plan; call zero_grad(), which "
                "drops gradients: a parameter without a gradient is not stepped"
            )
        self.refuse_in_pass("zero_grad()")
        self.forget_failed_backward()

    def pass_over(self, *, failed: bool = False) -> None:
        """Notes that all micro-batches of a pass have had their backward, or that one has raised: then the gradients
        that have come count, as after any backward that raises."""
        self._set_pass(None)
        if failed:
            self.forget_failed_backward()
            self.forward_failed()
            return
        self.cache.end_forward()
        if self.phase.in_backward:
            self._backward_over()
        self.phase.leave_forward()

    # --- errors and settling -----------------------------------------------------------------------------------

    def refuse_unusable(self) -> None:
        """Raises `InputError` after `close`, and if a checkpoint was loaded in part."""
        self.phase.refuse_closed()
        self.errors.refuse_changed()

    def refuse_step(self) -> None:
        """Refuses a step that cannot be right.

        Raises:
            InputError: inside `gathered`, which would still show the old weights, or in a pass of micro-batches.
        """
        self.refuse_unusable()
        self.refuse_in_pass("step()")
        self.forget_failed_backward()
        self.errors.refuse_failed()
        if self.uses.shows_other_memory:
            raise InputError("an optimizer cannot step inside gathered(); leave it first")

    def refuse_stale(self) -> None:
        """Raises on all ranks if a forward has read old weights, because a rank's disk has failed in the last step."""
        after_step, self._is_after_step = self._is_after_step, False
        if self.group.size == 1:
            self.errors.refuse_failed()
        elif after_step and self.plan.uses_disk:
            self.errors.agree(self.exchange("states on disks", self.errors.of_disk))

    def settle_together(self, what: str) -> None:
        """Calls `settle_quietly` once all ranks have called `what`; a rank alone would get answers to other questions.

        Errors of lanes are raised by the next forward or step.
        """
        self.refuse_unusable()
        self.exchange(what, None)
        self.settle_quietly()

    def settle(self) -> None:
        """Waits for all lanes and empties the blocks.

        Raises:
            StepError: an update on a lane has failed.
        """
        self.settle_quietly()
        self.errors.refuse_failed()

    def settle_quietly(self) -> None:
        """Like `settle`, but raises no errors of lanes."""
        self.phase.refuse_closed()
        self.forget_failed_backward()
        self.drain()  # after this, shards may be written to
        self.gradients.settle()
        self.cache.invalidate(pinned=False)  # a hook of a layer that runs may ask
        self.settled += 1

    def take_back(self, wanted: Iterable[tuple[Chunk, Sequence[Slot]]] | None = None) -> None:
        """Copies the values of plain parameters whose ``data`` was set back to the memory of the plan."""
        if wanted is None:
            wanted = [(chunk, chunk.slots) for chunk in self.chunks]
        take_back(
            (chunk, chunk.weights, slots)
            for chunk, slots in wanted
            if slots and chunk.weights is not None and self.is_ordinary(chunk)
        )

    def weights_changed(self) -> None:
        """Notes a step: blocks hold old weights."""
        self._is_after_step = True
        self.cache.invalidate()
        for chunk in self.read_unannounced:
            chunk.synchronize_weights()

    def drain(self) -> None:
        """Waits until all lanes are done; nobody who waits for work that has failed learns of it any more."""
        self.window.flush()
        self.lanes.drain()

    def end(self) -> bool:
        """Ends the run; weights can still be read. Returns whether other ranks can still be asked for theirs."""
        if not self.has_plan:  # nothing has started under it
            self.phase.close()
            return not self.group.is_broken
        together = not (self.phase.in_backward or self.cache.is_disturbed)
        self.phase.close()
        self.uses.backward_done()
        self.drain()
        if self.lanes.fate.error is not None:
            logger.error("the model is given back after an error: %s", self.lanes.fate.error)
        return together

    def stop(self) -> None:
        """Takes hooks and classes off the model and stops the lanes."""
        self.uninstall()
        hold_back_no_more()
        try:
            self._stop_lanes()
        finally:
            self.group.close()

    def _gradient_flow(self) -> GradientFlow:
        gathering = [chunk for chunk in self.chunks if chunk.plan.trainable and not self.is_ordinary(chunk)]
        # Chunks that got no gradient in the traced step come last, so that no other chunk waits for them.
        last = len(self.chunks)
        gathering.sort(key=lambda it: (last if it.plan.reduce_order is None else it.plan.reduce_order, it.index))
        return GradientFlow(
            gathering,
            self.arena,
            self.lanes,
            self.group,
            self.host_buffers,
            FlowOptions(
                block_count=self.plan.grad_block_count,
                block_bytes=self.plan.block_bytes,
                reduce_fp32=self.options.reduce_fp32,
                overlap=self.plan.overlap,
                places=send_positions(gathering, self.schedule),
                accumulation=self.plan.passes,
            ),
            weakly(self._complete) if self.plan.has_early_updates else None,
            weakly(self._wants_norms),
        )

    def _complete(self, chunk: Chunk) -> None:
        """Begins an early update, since all gradients of a chunk are on their way home."""
        if chunk.plan.home.early:
            for stepper in self.steppers:
                stepper.update_early(chunk)

    def _wants_norms(self) -> bool:
        """Whether a step will ask for the norm of the gradients that come now."""
        return any(stepper.wants_norm for stepper in self.steppers)

    def _kept_by_pass(self, parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
        return self._pass is not None and self._pass.keeps(parameter, gradient)


def engine_of(module: nn.Module) -> Engine:
    """The engine of an `ElixirModule`, for tests, benchmarks and packages built on the runtime.

    Raises:
        InputTypeError: `module` is no `ElixirModule`.
    """
    engine = vars(module).get("_engine")
    if not isinstance(engine, Engine):
        raise InputTypeError(f"only an ElixirModule has an engine, this is a {type(module).__name__}")
    return engine
