"""The engine: one plan at work on one model. It holds the chunks, the memory and the lanes, and knows the step's phase.

`ElixirModule` and `ElixirOptimizer` are what users call. Both hold the engine; it imports neither, and of an optimizer
it knows what `AnyStepper` says.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elixir.access.autograd import backward_is_running
from elixir.access.interception import CountedParameter, Interception
from elixir.chunk.arena import Arena
from elixir.chunk.block_pool import BlockPool
from elixir.chunk.chunk import Chunk, Slot, take_back
from elixir.chunk.gradients.gradient_flow import FlowOptions, GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.host_buffers import STAGING, SUMMANDS, WINDOW, HostBuffers, staging_kind, summands_kind, window_kind
from elixir.chunk.lanes import Lanes, Ticket, failure, make_lanes
from elixir.chunk.rcache import RCache
from elixir.chunk.state_window import StateWindow, StoredStates
from elixir.errors import DiskError, ElixirError, InputError, InputTypeError, NoMemoryError
from elixir.extents.extent_file import open_extents
from elixir.hardware.threads import host_share, host_view
from elixir.plan.plan import Plan
from elixir.schedule import Schedule
from elixir.torch_private import DisableTorchFunctionSubclass, call_after_backward
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.phase import Phase, StepPhase
from elixir.wrapper.run_errors import Call, ErrorKind, RunErrors
from elixir.wrapper.run_options import RunOptions
from elixir.wrapper.state_reader import StateReader
from elixir.wrapper.weight_uses import WeightUses

logger = logging.getLogger(__name__)

_FORMS_KEPT = 4096
"""Forms of steps that are kept at most if no report is made."""

Build = Callable[[nn.Module, Plan, Arena, Group, StateWindow], Iterator[Chunk]]
"""Chunks of a model under a plan, filled, one after the other. A chunk that was given is the only one that has its
weights, so it takes its place in `Engine.chunks` at once, whatever fails after that."""


class AnyStepper(Protocol):
    """An optimizer as the engine sees it; see `elixir.wrapper.step.stepper.Stepper`."""

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The parameters that it steps."""

    @property
    def wants_norm(self) -> bool:
        """Whether the next step needs the norm of the gradients, as far as can be known during backward."""

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """Global norm of the last step's gradients, before clipping; None if the step needed none."""

    def check_plan(self, plan: Plan) -> None:
        """Refuses a plan that this cannot step by."""

    def update_early(self, chunk: Chunk) -> None:
        """Makes new states of a chunk in backward next to the old ones; its gradients are on their way home."""

    def give_up_states(self) -> None:
        """Takes the states off the chunks; none is stepped until `take_states`."""

    def take_states(self) -> None:
        """Continues from the states that were given up, under the engine's present plan."""

    def gradients_scaled(self, by: float) -> None:
        """The gradients that come now are multiplied by a loss scale, and are added to those there are."""

    def gradients_cleared(self, scale: float | None) -> None:
        """No gradients are there, nor a limit for them; or, of this loss scale, zeros."""

    def clip_grad_norm_(self, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
        """The norm of the gradients; the next step clips to `max_norm`."""


class Engine:
    """One plan at work on one model, which it is put under by `install`.

    Args:
        model: the model inside of the wrapper.
        group: over which chunks are sharded.
        device: where compute runs.
        options: how.
    """

    plan: Plan
    arena: Arena

    def __init__(self, model: nn.Module, group: Group, device: torch.device, options: RunOptions) -> None:
        self.model, self.group, self.device, self.options = model, group, device, options
        self.host_share = host_share(group.exchange("cores", host_view()), group.rank)
        """This rank's part of its machine's cores."""
        with contextlib.ExitStack() as started:
            with group.together("start its lanes"):
                self.lanes = make_lanes(device, options.debug.emulation)
                started.callback(self.lanes.close)
            started.pop_all()
        self.host_buffers = HostBuffers(Arena(device))
        """All host memory of this rank that no chunk owns. Kinds that are not the plan's stay when that changes."""
        open_file = partial(open_extents, options.disk_folders, files=options.debug.files)
        self.window = StateWindow(self.lanes.disk, self.host_buffers, open_file)
        """Through which masters and states on a disk come and go."""
        # Also where nobody calls `close`: the interpreter must not end with threads inside of torch.
        self._stop_lanes = weakref.finalize(self, _stop, self.lanes, self.window)
        self.errors = RunErrors(self.window, group.size)
        """Errors that no call has reported yet, and those that stop the run."""
        self.phase = StepPhase(group.rank)
        self.steppers: list[AnyStepper] = []
        """The optimizers that step this model."""
        self.loss_scale = LossScale(False, 1.0, 1)
        """The scale of the loss, for all of them; the last one that is made sets it."""
        self.before_forward: Callable[[], None] | None = None
        """Called when a forward begins."""
        self.renew_shared: Callable[[], None] = lambda: None
        """Called when weights have changed: what shares memory with them follows."""
        self.stepped: Callable[[bool], None] = lambda skipped: None
        """Called when an optimizer has stepped, or, after an overflow, has left its step out."""
        self.emptied = False
        """Whether the blocks have been emptied since the account of the step looked last."""
        self.refreshed_bytes = 0
        """Host to device since the last report, for weights on the device that the host has updated."""
        self.regathered_bytes = 0
        """Network, likewise, for resident weights whose shards have been updated."""
        self.early_chunks = self.kept_chunks = 0
        """In the last step: chunks whose new states were made in backward, and those whose were kept."""
        self.host_forms: deque[str] = deque(maxlen=_FORMS_KEPT)
        """Forms of the steps that CPU Adam has made since the last report."""
        self.unstepped: list[AnyStepper] = []
        """Optimizers that have not stepped since the last backward."""
        self.state_reader: StateReader | None = None
        """The reader of checkpoints; None before the first."""
        self._pending_updates: list[Ticket] = []
        self._is_after_step = False  # no forward has ended since
        self.leaving: dict[int, StoredStates] = {}
        """By chunk, the states on a disk under the plan before, until the optimizers have taken theirs over."""
        self.chunks: list[Chunk] = []
        self._access: Interception | None = None
        self._handles: list[RemovableHandle] = []

    # --- the plan ----------------------------------------------------------------------------------------------

    def install(self, plan: Plan, build: Build) -> None:
        """Puts the model under a plan. If that fails it does so on all ranks, and `chunks` are those that have the
        weights."""
        self.plan, self.arena = plan, Arena(self.device)
        self.host_buffers.count_in(self.arena)
        self.window.count_in(self.arena, plan.disk_bytes(self.group.rank))
        with self.group.together("have buffers for states on a disk"):
            if plan.uses_disk:
                self.host_buffers.replace(window_kind(plan))
        for chunk in build(self.model, plan, self.arena, self.group, self.window):
            self.chunks[chunk.index : chunk.index + 1] = [chunk]
        with self.group.together("have its blocks and buffers"):
            self._make_memory(plan)
        for chunk in self.chunks:
            chunk.attach()
        self.places: dict[torch.Tensor, tuple[Chunk, Slot]] = {
            slot.parameter: (chunk, slot) for chunk in self.chunks for slot in chunk.slots
        }
        """The chunk and the slot of every parameter."""
        self.tracked = [chunk for chunk in self.chunks if not self.is_ordinary(chunk)]
        """Chunks whose parameters may be placeholders, or whose weights may still be being updated."""
        self.uses = WeightUses(
            self.cache, self.chunks, self.places, self.gradients, self.device, _weakly(self.backward_runs)
        )
        parameters = {slot.parameter for chunk in self.tracked for slot in chunk.slots}
        self._access = Interception(self.model, self.uses, parameters) if self.tracked else None
        arrived = _weakly(self._arrived)
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(partial(arrived, chunk.index, place))
            for chunk in self.chunks
            if chunk.index in self.gradients.by_chunk
            for place, slot in enumerate(chunk.slots)
            if slot.parameter.requires_grad
        ]
        for parameter, chunk in self._counted():
            parameter.__class__ = CountedParameter
            parameter.elixir_lends = chunk.lend  # type: ignore[attr-defined]

    def _make_memory(self, plan: Plan) -> None:
        """Makes all that a plan needs next to the chunks."""
        debug = self.options.debug
        pool = BlockPool(self.arena, plan.block_count, plan.block_bytes, poison=debug.poison)
        self.schedule = (plan if self.options.prefetch else replace(plan, prefetch_depth=0)).schedule()
        wide = self.options.reduce_fp32 and self.group.size > 1
        self.host_buffers.add(staging_kind(plan))
        self.host_buffers.add(summands_kind(plan, self.device.type, backwards=plan.accumulation, wide=wide))
        self.gradients = self._gradient_flow()
        self.cache = RCache(
            self.chunks,
            self.schedule,
            pool,
            self.lanes,
            self.group,
            self.gradients,
            evict_always=debug.evict_always,
            backward_from=next((i for i, use in enumerate(plan.order) if use.phase != "forward"), len(plan.order)),
        )

    @property
    def has_plan(self) -> bool:
        """Whether the plan could be taken up to its end."""
        return "uses" in vars(self)

    def _counted(self) -> list[tuple[nn.Parameter, Chunk]]:
        """Plain parameters with masters, which have to follow what is written through ``data``."""
        return [
            (slot.parameter, chunk)
            for chunk in self.chunks
            if self.is_ordinary(chunk) and chunk.masters is not None
            for slot in chunk.slots
            if type(slot.parameter) in (nn.Parameter, CountedParameter)
        ]

    def uninstall(self) -> None:
        """Takes everything off the model; the chunks keep their memory, and parameters point to it."""
        for parameter, _ in self._counted():
            parameter.__class__ = nn.Parameter
            vars(parameter).pop("elixir_lends", None)
        if self._access is not None:
            self._access.remove()
            self._access = None
        while self._handles:
            self._handles.pop().remove()

    def release_memory(self) -> None:
        """`uninstall`, and give up all memory but that of the chunks, and that through which states on a disk pass."""
        self.uninstall()
        for kind in (STAGING, SUMMANDS):
            self.host_buffers.drop(kind)
        for name in ("cache", "uses", "gradients"):  # not all are there where making them has failed
            vars(self).pop(name, None)

    def change_plan(self, plan: Plan, build: Build) -> None:
        """Replaces this plan by another."""
        self.leaving |= {chunk.index: chunk.stored for chunk in self.chunks if chunk.stored is not None}
        self.release_memory()  # before there is new
        self.install(plan, build)

    def plan_installed(self) -> None:
        """Optimizers have taken over their states, too: nobody needs extents of the plan before any more."""
        leaving, self.leaving = self.leaving, {}
        for index, states in leaving.items():
            if self.chunks[index].stored is not states:
                states.give_back()
        if not self.plan.uses_disk:
            self.host_buffers.drop(WINDOW)
            try:
                self.window.close()
            except ElixirError as error:  # chunks have moved; to go back would part this rank from the others
                logger.warning("a file that nothing uses any more could not be closed: %s", error)

    def is_ordinary(self, chunk: Chunk) -> bool:
        """Whether its parameters are plain ones: weights, gradients and states all on the device of one rank."""
        return chunk.plan.resident and chunk.plan.state_home == "device" and self.group.size == 1

    def whole(self, chunk: Chunk, precise: bool = False) -> torch.Tensor:
        """The gathered weights of a chunk on the device; with `precise`, its masters where it has any."""
        if chunk.gathered is not None:
            return chunk.gathered
        found = self.precise(chunk)[0] if precise else self.gathered(chunk)
        return chunk.with_moved(found) if self.is_ordinary(chunk) else found

    def precise(self, chunk: Chunk) -> tuple[torch.Tensor, ElixirError | None]:
        """The gathered weights of a chunk in the precision of its masters; the error of this rank's disk where it could
        not read them, and gives the weights in memory instead."""
        if not self.has_wide_masters(chunk):
            return self.gathered(chunk), None
        found: torch.Tensor | None = None
        try:
            with chunk.at_hand():
                chunk.follow_writes()
                found = self.gathered(chunk, chunk.masters)
        except (DiskError, NoMemoryError) as error:
            if found is None:  # otherwise all ranks have gathered already, and masters could not be written back
                logger.error("weights are given as they are in memory, in %s: %s", chunk.plan.dtype, error)
                return self.gathered(chunk, chunk.shard_weights.to(torch.float32)), error
        return found, None

    @staticmethod
    def has_wide_masters(chunk: Chunk) -> bool:
        """Whether the masters of a chunk have more bits than its weights, which otherwise are the same."""
        return chunk.masters is not None and chunk.masters.dtype != chunk.dtype

    def gathered(self, chunk: Chunk, shard: torch.Tensor | None = None) -> torch.Tensor:
        """The gathered weights of a chunk on the device, of each rank's `shard` if that is given."""
        if shard is None:
            if chunk.whole is not None:
                return chunk.whole
            shard = chunk.shard_weights
        whole = torch.empty(chunk.plan.numel, dtype=shard.dtype, device=self.device)
        mine = shard.to(self.device)
        # This thread reads `whole` next, which the network writes.
        self.lanes.network.submit(lambda: self.group.gather(whole, mine)).synchronize()
        return whole

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value`, in order of rank, after what the network is doing; see `Group.exchange`."""
        return self.lanes.network.ask(lambda: self.group.exchange(what, value))

    def chunks_by_use(self) -> list[Chunk]:
        """The chunks in the order in which the next forward asks for them; those that it never uses come last."""
        used = dict.fromkeys(index for use in self.plan.order for index in sorted(use.chunks))
        return [self.chunks[index] for index in dict.fromkeys([*used, *range(len(self.chunks))])]

    def holds_gradients(self) -> bool:
        """Whether this rank has gradients that no step or `zero_grad` has cleared."""
        ordinary = (slot.parameter for chunk in self.chunks if self.is_ordinary(chunk) for slot in chunk.slots)
        return self.gradients.any_held() or any(parameter.grad is not None for parameter in ordinary)

    # --- forward and backward ----------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """The model's forward starts."""
        self.cache.begin()
        self.phase.enter_forward()

    def forward_over(self) -> None:
        """The model's forward has returned."""
        self.phase.leave_forward()
        self.cache.end_forward()

    def forward_failed(self) -> None:
        """The model's forward has raised."""
        self.phase.leave_forward()
        self._failed("a forward")

    def watch_output(self, output: Any) -> None:
        """Notices the beginning of backward at what it begins with, before any of the model's nodes run."""
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            begins = _weakly(self.backward_runs)
            output.register_hook(lambda gradient: begins())

    def backward_runs(self) -> None:
        """Backward is running; the first time, have autograd call when it is over."""
        if not (self.phase.in_backward or self.phase.closed):
            self.phase.to(Phase.BACKWARD)
            self.unstepped = list(self.steppers)
            if self.group.size > 1:
                self.cache.enter_backward()
            else:
                self.gradients.begin()
            call_after_backward(self._backward_over)

    def forget_failed_backward(self) -> None:
        """If a backward has raised: it left its pins, and gradients that count as they do in plain PyTorch."""
        if self.phase.in_backward and not backward_is_running():
            try:
                self._failed("a backward")
                if self.group.size == 1:
                    self.gradients.flush()
            finally:
                self.phase.leave_backward()

    def _failed(self, what: str) -> None:
        """A forward or backward has raised: its pins go, and errors of lanes are raised by the next forward, step or
        `settle`."""
        self.uses.reset()
        self.cache.disturbed()
        self.errors.record_next_to(what, self._failures())

    def _backward_over(self) -> None:
        try:
            self.uses.backward_done()
            self.cache.end_backward()
            self.gradients.flush()
        finally:
            self.phase.leave_backward()

    # --- errors and settling -----------------------------------------------------------------------------------

    def refuse_unusable(self) -> None:
        """Raises `InputError` after `close`, and where a checkpoint was loaded in part."""
        self.phase.refuse_closed()
        self.errors.report(Call.USE)

    def refuse_step(self) -> None:
        """An optimizer is about to step.

        Raises:
            InputError: inside `gathered`, which would go on showing the weights before the step.
        """
        self.refuse_unusable()
        self.errors.report(Call.STEP)
        self.forget_failed_backward()
        self.errors.report(Call.GRADIENTS)
        if any(chunk.home_uses.has_failed for chunk in self.chunks):
            raise self._failures()[0]
        if self.uses.gathered:
            raise InputError("an optimizer cannot step inside gathered(); leave it first")

    def refuse_stale(self) -> None:
        """Raises, on all ranks, where a forward has read weights of the step before the last, since the disk of one of
        them has failed in the last."""
        after_step, self._is_after_step = self._is_after_step, False
        if self.group.size == 1:
            self.errors.report(Call.STEP)
        elif after_step and self.plan.uses_disk:
            self.errors.agree(self.exchange("states on disks", self.errors.of_disk))

    def settle_together(self, what: str) -> None:
        """`settle`, where all ranks have called `what`: one that is alone would get answers to other questions.

        Weights can be had whatever has failed: that is logged here, and raised by the next forward or step.
        """
        self.refuse_unusable()
        self.exchange(what, None)
        self.settle_quietly()

    def settle(self) -> None:
        """Waits for all lanes, and empty the blocks.

        Raises:
            StepError: an optimizer has failed there; it is raised once.
        """
        self.settle_quietly()
        self.errors.report(Call.RUN)

    def settle_quietly(self) -> None:
        """`settle` for who needs weights in whatever state they are."""
        self.phase.refuse_closed()
        self.forget_failed_backward()
        failed = self._failures()  # shards may be written to after this
        if failed:
            self.errors.record(ErrorKind.LANE, failed[0])
            logger.error("weights are looked at after an error that is not reported yet: %s", failed[0])
        self.gradients.settle()
        self.cache.invalidate()
        self.emptied = True

    def take_back(self, wanted: Iterable[tuple[Chunk, Sequence[Slot]]] | None = None) -> None:
        """Copies to the memory of the plan the values that plain parameters were given by setting ``data``."""
        if wanted is None:
            wanted = [(chunk, chunk.slots) for chunk in self.chunks]
        take_back(
            (chunk, chunk.whole, slots)
            for chunk, slots in wanted
            if slots and chunk.whole is not None and self.is_ordinary(chunk)
        )

    def weights_changed(self, updates: Iterable[Ticket]) -> None:
        """An optimizer has stepped: blocks hold old weights, and resident ones are new once `updates` are done."""
        self._is_after_step = True
        self._pending_updates = [*(ticket for ticket in self._pending_updates if not ticket.done()), *updates]
        self.cache.invalidate()
        self.renew_shared()

    def _failures(self) -> list[Exception]:
        """Waits for all that lanes do; what has failed, which nothing waits for afterwards."""
        self.window.settle()
        found = self.cache.failures()
        for chunk in self.chunks:
            found += chunk.failures()
        found += [*self.gradients.failures(), *self.host_buffers.failures()]
        found += filter(None, map(failure, self._pending_updates))
        self._pending_updates.clear()
        return list(dict.fromkeys(found))  # several tickets may have met one error

    def end(self) -> bool:
        """Nothing may run from here on; weights can still be had. Whether the other ranks can be asked for theirs."""
        if not self.has_plan:  # nothing has been begun under it
            self.phase.close()
            return not self.group.is_broken
        together = not (self.phase.in_backward or self.cache.is_disturbed)
        self.phase.close()
        self.uses.reset()
        for error in [*self._failures(), *self.errors.end(ErrorKind.LANE)]:
            logger.error("the model is given back after an error: %s", error)
        return together

    def stop(self) -> None:
        """Takes everything off the model and stops the lanes."""
        self.uninstall()
        try:
            self._stop_lanes()
        finally:
            self.group.close()

    def _gradient_flow(self) -> GradientFlow:
        gathering = [chunk for chunk in self.chunks if chunk.plan.trainable and not self.is_ordinary(chunk)]
        # Those that got no gradient in the traced step come last: nobody must wait for them.
        last = len(self.chunks)
        gathering.sort(
            key=lambda chunk: (last if chunk.plan.reduce_order is None else chunk.plan.reduce_order, chunk.index)
        )
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
                places=_places(gathering, self.schedule),
                accumulation=self.plan.accumulation,
            ),
            _weakly(self._complete) if self.plan.has_early_updates else None,
            _weakly(self._wants_norms),
        )

    def _complete(self, chunk: Chunk) -> None:
        """All gradients of a chunk are on their way home."""
        if chunk.plan.home.early:
            for stepper in self.steppers:
                stepper.update_early(chunk)

    def _wants_norms(self) -> bool:
        """Whether a step is going to ask for the norm of the gradients that come now."""
        return any(stepper.wants_norm for stepper in self.steppers)

    def _arrived(self, index: int, place: int, parameter: nn.Parameter) -> None:
        """Autograd has accumulated a gradient: it leaves for its home.

        The hook holds numbers, not the chunk: the garbage collector cannot see through autograd.
        """
        chunk = self.chunks[index]
        slot = chunk.slots[place]
        self.backward_runs()
        with DisableTorchFunctionSubclass():  # nobody else is reading gradients here
            if parameter.grad is not None:
                self.uses.order_compute()
                try:
                    self.gradients.take(chunk, slot, parameter.grad)
                finally:  # one that was refused must not stay where `step` takes it for one that was set by hand
                    parameter.grad = None


def _stop(lanes: Lanes, window: StateWindow) -> None:
    try:
        lanes.close()
    finally:
        window.close()  # after the last transfer of its lane


def engine_of(module: nn.Module) -> Engine:
    """The engine of an `ElixirModule`, for tests, benchmarks and packages built on the runtime.

    Raises:
        InputTypeError: `module` is no `ElixirModule`.
    """
    engine = vars(module).get("_engine")
    if not isinstance(engine, Engine):
        raise InputTypeError(f"only an ElixirModule has an engine, this is a {type(module).__name__}")
    return engine


def _places(chunks: list[Chunk], schedule: Schedule) -> dict[int, int]:
    """By chunk, the position after whose loads it is reduced: the last gathers before its last gradient; -1 if none
    are."""
    loading = schedule.loading
    return {
        chunk.index: ([-1, *loading])[bisect_right(loading, chunk.plan.grad_entry)]
        for chunk in chunks
        if chunk.plan.grad_entry is not None
    }


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of an engine's method, or nothing once the engine is gone.

    What autograd and parameters hold must not hold the engine: the garbage collector cannot see through autograd.
    """
    # Apart, since a WeakMethod makes the method anew at every call, of which there is one for each gradient.
    bound = cast(MethodType, method)
    weak, function = weakref.ref(bound.__self__), bound.__func__

    def call(*args: Any) -> Any:
        engine = weak()
        return None if engine is None else function(engine, *args)

    return call
