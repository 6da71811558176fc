"""`ElixirModule`: runs a model under a plan."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from elixir.access import backward_is_running
from elixir.chunk.buffers import Arena
from elixir.chunk.cache import RCache
from elixir.chunk.chunk import Chunk
from elixir.chunk.gradients import GradientFlow
from elixir.chunk.group import Group
from elixir.chunk.lanes import Emulation, Ticket, make_lanes
from elixir.chunk.staging import Staging
from elixir.errors import InputError, InputTypeError
from elixir.host_threads import host_share, host_view
from elixir.kernels.fused_modules import FusedKernels
from elixir.plan import Plan, same_packing
from elixir.units import parse_dtype
from elixir.wrapper.backward_steps import STEP_OR_ACCUMULATE, STEP_OR_LEAVE_OUT
from elixir.wrapper.build import agree_on_plan, build_chunks, compute_device, move_chunks, place_buffers
from elixir.wrapper.gathering import shown
from elixir.wrapper.inputs import cast_inputs
from elixir.wrapper.loss_scale import LossScale
from elixir.wrapper.report import StepReport
from elixir.wrapper.running import RunningPlan, RunOptions
from elixir.wrapper.shared_buffers import SharedBuffers
from elixir.wrapper.step_account import StepAccount
from elixir.wrapper.uses import WeightUses
from elixir.wrapper.weights import Weights

if TYPE_CHECKING:
    from elixir.wrapper.optimizer import ElixirOptimizer

logger = logging.getLogger(__name__)


class ElixirModule(nn.Module):
    """A model whose weights live where a plan says, with the same numbers as the model itself.

    Chunks that the plan streams come into a few blocks on the device just before they are used; resident chunks stay.
    Parameters keep their identity, so an optimizer may be built before or after.

    Args:
        module: the model; it is taken over, and must not be used except through this.
        plan: made for this model and this number of ranks.
        group: process group; None means the default one, or a single rank where there is none.
        prefetch: fetch chunks before they are used, as the plan says; False fetches on demand.
        dtype: parameters and floating inputs are cast to it; None takes the plan's. Buffers keep theirs.
        reduce_always_fp32: average gradients over the ranks in float32.
        output_fp32: floating outputs are cast to float32.
        use_fused_kernels: step Adam over whole shards in one pass, and run the model's norms, SwiGLU blocks, rotations and
            its loss by the best kernels present (docs/kernels.md), which rounds differently and, in training, gives no
            logits beside a loss. A dict names providers by kind, such as ``{"cross_entropy": "plain"}``.
        weights: values in the place of the model's own: a state dict, or safetensors (a file, several, a folder). What is
            on meta and gets none is initialised by its own modules.
        device: where compute runs; the current CUDA device by default, else the CPU.
        emulation: of the links, on the CPU.
        poison: fill blocks that are given back with NaN; for tests.
        evict_always: evict whatever is not pinned after every use; for tests.

    Raises:
        ArtifactError: the plan is for another model or another number of ranks.
        InputError: an argument makes no sense with the plan, weights on meta have no value, or the model is run by another
            ElixirModule.
        InputTypeError: `module` is no plain module, or `plan` no plan.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        group: dist.ProcessGroup | None = None,
        prefetch: bool = True,
        dtype: torch.dtype | str | None = None,
        reduce_always_fp32: bool = False,
        output_fp32: bool = False,
        use_fused_kernels: bool | Mapping[str, str] = False,
        *,
        weights: Weights | None = None,
        device: torch.device | str | None = None,
        emulation: Emulation | None = None,
        poison: bool = False,
        evict_always: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module) or isinstance(module, ElixirModule):
            raise InputTypeError(f"module must be a plain nn.Module, got {type(module).__name__}")
        if isinstance(getattr(module._apply, "__self__", None), ElixirModule):
            raise InputError(
                f"this {type(module).__name__} is run by an ElixirModule already; use that one, or build the model anew"
            )
        dtype = None if dtype is None else parse_dtype(dtype)
        self._group = Group(group)
        agree_on_plan(self._group, module, plan, dtype)
        self.host_share = host_share(self._group.exchange("cores", host_view()), self._group.rank)
        """This rank's part of its machine's cores."""
        self._device = compute_device(device)
        self._cast = dtype if plan.dtype == "as built" else parse_dtype(plan.dtype)
        self._output_fp32 = output_fp32
        self.use_fused_kernels = bool(use_fused_kernels)
        self._options = RunOptions(prefetch, reduce_always_fp32, poison, evict_always)
        self._lanes = make_lanes(self._device, emulation)
        # Also where nobody calls `close`: the interpreter must not end with threads inside of torch.
        self._stop = weakref.finalize(self, self._lanes.close)
        self.optimizers: list[ElixirOptimizer] = []
        """Those that step this module."""
        self.loss_scale = LossScale(False, 1.0, 1)
        """Of the loss, for all of them; the last one that is made says."""
        self.account = StepAccount(self._lanes, self._device)
        """Of what each step does."""
        self.before_forward: Callable[[], None] | None = None
        """Called when a forward begins."""
        self._in_backward = False
        self._pending_updates: list[Ticket] = []
        build = partial(build_chunks, weights=weights)
        self._fused = FusedKernels(module, use_fused_kernels, self._device.type)
        try:
            self._running = RunningPlan(
                self, module, plan, self._group, self._lanes, self._device, self._options, build
            )
        except BaseException:
            self._fused.remove()
            raise
        if self._fused.counts:
            logger.info("%s", self._fused)
        place_buffers(module, self._device)
        self.shared_buffers = SharedBuffers(module)
        module._apply = self._apply  # type: ignore[method-assign]
        self.module = module

    @property
    def plan(self) -> Plan:
        """The plan at work."""
        return self._running.plan

    @property
    def last_report(self) -> StepReport | None:
        """What the last step did, beside what the plan predicted; None before the first."""
        return self.account.last_report

    @property
    def device(self) -> torch.device:
        """Where compute runs."""
        return self._device

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks of the plan, by index."""
        return self._running.chunks

    @property
    def cache(self) -> RCache:
        """The rCache blocks."""
        return self._running.cache

    @property
    def uses(self) -> WeightUses:
        """What listens to uses of weights."""
        return self._running.uses

    @property
    def gradients(self) -> GradientFlow:
        """Gradients on their way home."""
        return self._running.gradients

    @property
    def staging(self) -> Staging:
        """Where new weights of low precision wait to return to the device."""
        return self._running.staging

    @property
    def arena(self) -> Arena:
        """Where the runtime's buffers come from and are counted."""
        return self._running.arena

    def is_ordinary(self, chunk: Chunk) -> bool:
        """Whether its parameters are plain ones: weights, gradients and states all on the device of one rank."""
        return self._running.is_ordinary(chunk)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError(
                "a CUDA graph would replay with the addresses that weights had when it was captured, but streamed "
                "weights move; run an ElixirModule without capturing it"
            )
        self._refuse_begun("a forward", STEP_OR_ACCUMULATE)
        if self.before_forward is not None:
            self.before_forward()
        self.forget_failed_backward()
        begins = self.account.forward(self._running)
        self.cache.begin()
        args, kwargs = cast_inputs((args, kwargs), self._device, self._cast)
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self.uses.reset()
            self.cache.disturbed()
            if begins:
                self.account.begin_anew()
            raise
        self.cache.end_forward()
        tree_map(self._watch_backward, output)
        return tree_map(self._output, output) if self._output_fp32 else output

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model itself, such as ``config`` or ``generate``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @contextlib.contextmanager
    def gathered(
        self, parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None, *, write: bool = False
    ) -> Iterator[None]:
        """Full weights of `parameters` (of a module, one, several; all by default) in `parameter.data`, outside of a forward.

        They lie in memory of their own for as long as this lasts. With `write`, what was written to them becomes the
        weights; every rank must write the same.

        Raises:
            InputError: something among `parameters` is no parameter of this model.
        """
        with shown(self._running, self.settle_together, parameters, write):
            yield

    def rehome(self, plan: Plan) -> None:
        """Go on under another plan with the same chunks in other homes.

        Between a step and the next forward, with no gradients held. All ranks must call this with the same plan.

        The move changes no bit of weights, masters and states (where the plans keep moments alike). Later steps of a chunk
        then give the bits that they would have given, unless something else steps it: the CPU in the place of a CUDA device,
        or the other way round; or, with `use_fused_kernels` and float32 moments, because it begins or ceases to be ordinary
        (weights, gradients and states all on the device of one rank), where the optimizer's own class steps. Such differ by
        rounding.

        Args:
            plan: packs parameters as the present one does.

        Raises:
            InputError: it does not, or this is not the moment.
        """
        self.uses.refuse_inside("rehome()")
        if self.uses.gathered or self.holds_gradients():
            raise InputError("rehome() is for between zero_grad() and the next forward, outside of gathered()")
        # Behind what the network is still doing, the same on all ranks.
        self._lanes.network.submit(lambda: agree_on_plan(self._group, self.module, plan, None)).synchronize()
        for optimizer in self.optimizers:
            optimizer.check_plan(plan)
        if not same_packing(self.plan, plan):
            raise InputError("rehome() moves chunks, it does not repack them; plan with the chunks of the present plan")
        self.settle()
        states = [optimizer.give_up_states() for optimizer in self.optimizers]
        before = self.chunks
        self._running.remove()
        del self._running  # its blocks go before others are made
        build = partial(move_chunks, before=before)
        self._running = RunningPlan(
            self, self.module, plan, self._group, self._lanes, self._device, self._options, build
        )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.take_states(state)
        self.account.another_plan()

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value`, in order of rank, behind what the network is doing; see `Group.exchange`."""
        answers: list[Any] = []
        self._lanes.network.submit(lambda: answers.extend(self._group.exchange(what, value))).synchronize()
        return answers

    def share_buffers(self, changed: list[str]) -> None:
        """Have rank 0's values of buffers that some rank has written to; all ranks must name the same."""
        if changed:
            work = partial(self.shared_buffers.take_from_rank_0, self._group, changed)
            self._lanes.network.submit(work).synchronize()

    def holds_gradients(self) -> bool:
        """Whether this rank has gradients that no step or `zero_grad` has cleared."""
        ordinary = (slot.parameter for chunk in self.chunks if self.is_ordinary(chunk) for slot in chunk.slots)
        return self.gradients.any_held() or any(parameter.grad is not None for parameter in ordinary)

    def settle_together(self, what: str) -> None:
        """`settle`, where all ranks have called `what`: one that is alone would get answers to other questions."""
        self.exchange(what, None)
        self.settle()

    def settle(self) -> None:
        """Wait for everything that runs beside compute, and empty the blocks."""
        self._refuse_begun("looking at weights")
        self.forget_failed_backward()
        self.gradients.settle()
        for chunk in self.chunks:
            for ticket in (chunk.updated, chunk.fetched):  # shards may be written to after this
                if ticket is not None:
                    ticket.synchronize()
        for ticket in self._pending_updates:
            ticket.wait()
        self._pending_updates.clear()
        self.cache.invalidate()

    def refuse_step(self) -> None:
        """An optimizer is about to step.

        Raises:
            InputError: inside `gathered`, which would go on showing the weights before the step.
        """
        if self.uses.gathered:
            raise InputError("an optimizer cannot step inside gathered(); leave it first")

    def weights_changed(self, updates: Iterable[Ticket]) -> None:
        """An optimizer has stepped: what the blocks hold is old, and resident weights are new once `updates` are done."""
        self._pending_updates = [*(ticket for ticket in self._pending_updates if not ticket.done()), *updates]
        self.cache.invalidate()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here reduce nothing: each rank adds up its own gradients, until the next backward outside.

        For accumulation over micro-batches. It saves the network and costs memory that the plan knows nothing of: a
        whole gradient per rank, at the home of the states. All ranks must do the same.
        """
        before, self.gradients.reducing = self.gradients.reducing, False
        try:
            yield
        finally:
            self.gradients.reducing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, those that have left for their home too; or have zeros in their place."""
        self._refuse_begun("zero_grad()", STEP_OR_LEAVE_OUT)
        self.forget_failed_backward()
        self.gradients.clear(to_none=set_to_none)
        for optimizer in self.optimizers:
            optimizer.gradients_cleared(set_to_none)
        if self._group.size > 1:
            self._lanes.network.submit(lambda: self._group.note("zero_grad()"))
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """The norm of all gradients; the next step clips it to `max_norm`. In the place of torch's function.

        Raises:
            InputError: there is not exactly one `ElixirOptimizer`, or another norm than the second is asked for.
        """
        if norm_type != 2.0:
            raise InputError(f"only the 2-norm of sharded gradients is known, norm_type is {norm_type}")
        if len(self.optimizers) != 1:
            raise InputError(f"clip_grad_norm_ needs one ElixirOptimizer, this module has {len(self.optimizers)}")
        return self.optimizers[0].clip_grad_norm_(max_norm, error_if_nonfinite)

    def step_over(self, *, skipped: bool = False) -> None:
        """An optimizer has stepped, or, after an overflow, has left its step out."""
        self.account.step_over(self._running, skipped=skipped)

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's state dict on the CPU: full weights under the model's own names, in float32 or wider.

        Weights of low precision are given as their master weights. One chunk is gathered at a time; with several ranks
        all must call this.

        Args:
            rank0_only: the other ranks get an empty dict, and need no memory for it.
        """
        return self._running.state.full(*args, wanted=not rank0_only or self._group.rank == 0, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load weights and buffers into their homes; master weights take what is given unrounded.

        With several ranks each loads on its own, and all must be given the same.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as of `torch.nn.Module.load_state_dict`, which also raises as it does.
        """
        if assign:
            raise InputError("assign=True would give the parameters other memory; leave it out")
        self.exchange("load_state_dict()", None)
        return self.module.load_state_dict(state_dict, strict=strict)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # Where this is part of another module: names are those of the model inside, as `state_dict` gives them.
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise InputError(
            "the plan says where an ElixirModule lives and in which dtype: leave out to(), cuda(), half() and the like, "
            "and plan with unified_dtype= for another dtype"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """The first thing that `DistributedDataParallel` asks a module for."""
        raise InputError("an ElixirModule reduces its gradients itself: leave out DistributedDataParallel")

    def __deepcopy__(self, memo: Any) -> Any:
        raise InputError("an ElixirModule cannot be copied: its weights live in shared chunks; wrap a second model")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError("an ElixirModule cannot be pickled; save state_dict() instead")

    def close(self) -> None:
        """Stop the lanes and give the model its own code back. The module cannot run afterwards."""
        self._fused.remove()
        self._stop()
        self._group.close()

    # --- inside ------------------------------------------------------------------------------------------------

    def _refuse_begun(self, what: str, instead: str = "call step() first") -> None:
        """Where weights are stepped in part; see `BackwardSteps.refuse`."""
        for optimizer in self.optimizers:
            optimizer.in_backward.refuse(what, instead)

    @staticmethod
    def _output(item: Any) -> Any:
        return item.float() if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    def _watch_backward(self, output: Any) -> None:
        """Notice the beginning of backward at what it begins with, before any of the model's nodes run."""
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            output.register_hook(partial(_begins, weakref.ref(self)))

    def backward_runs(self) -> None:
        """Backward is running; the first time, have the engine call when it is over."""
        if not self._in_backward:
            self._refuse_begun("another backward", STEP_OR_ACCUMULATE)
            self._in_backward = True
            if self._group.size > 1:
                self.cache.enter_backward()
            else:
                self.gradients.begin()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def forget_failed_backward(self) -> None:
        """If a backward has raised: it left its pins, and gradients that count as they do in plain PyTorch."""
        if self._in_backward and not backward_is_running():
            self._in_backward = False
            self.uses.reset()
            self.cache.disturbed()
            if self._group.size == 1:
                self.gradients.flush()

    def _backward_over(self) -> None:
        self._in_backward = False
        self.uses.backward_done()
        self.cache.end_backward()
        self.gradients.flush()


def _begins(weak: weakref.ref[ElixirModule], gradient: torch.Tensor) -> None:
    """Backward has come to an output of the model."""
    module = weak()
    if module is not None:
        module.backward_runs()
