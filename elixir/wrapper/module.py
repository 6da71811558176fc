"""`ElixirModule`: runs a model under a plan."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir.access.autograd import hooks_were_refused
from elixir.access.compiled_units import compiled_in_place
from elixir.access.interception import WEIGHTS_ARE_LOST
from elixir.access.interrupts import run_user_code
from elixir.access.placeholders import is_absent
from elixir.chunk.group import GivenGroup, Group
from elixir.errors import InputError, InputTypeError, few
from elixir.files import PathLike
from elixir.hardware import promises
from elixir.kernels.model.fused_kernels import FusedKernels
from elixir.models.model_tensors import casts_buffers
from elixir.models.quantised import flat, ready_to_move
from elixir.models.together import Together
from elixir.plan.plan import HasPlan, Plan, same_packing
from elixir.torch_private import DisableTorchFunctionSubclass, tree_flatten, tree_map, tree_unflatten
from elixir.units import parse_bytes, parse_dtype
from elixir.wrapper.account.plan_promise import PlanPromise
from elixir.wrapper.account.step_account import StepAccount
from elixir.wrapper.account.step_report import StepReport
from elixir.wrapper.assemble.chunks import (
    agree_on_plan,
    agree_on_weights,
    build_chunks,
    compute_device,
    move_chunks,
    warn_if_made_elsewhere,
)
from elixir.wrapper.assemble.frozen_weights import open_frozen
from elixir.wrapper.assemble.origins import Origins, SharedBuffers
from elixir.wrapper.assemble.weight_source import Weights
from elixir.wrapper.calls import Calls, prepare_forward, refuse_addresses, refuse_compiled_around
from elixir.wrapper.engine import Engine
from elixir.wrapper.run_options import Debug, RunOptions, folders_of
from elixir.wrapper.weights_io import ModelState, SharedWeights, in_use, shown

logger = logging.getLogger(__name__)

PUBLIC = "module plan device last_report gathered rehome no_sync clip_grad_norm_ settle release close".split()
"""Names that `ElixirModule` adds to `torch.nn.Module`. All others are looked up in the model."""


class ElixirModule(nn.Module):
    """A model whose weights live where a plan puts them. It computes the same numbers as the model itself: on one rank
    in float32 the same bits, if the optimizer step runs on the same kind of device.

    Chunks that the plan streams come into a few blocks on the device just before they are used; resident chunks stay.
    Parameters keep their identity, so an optimizer may be built before or after. Attributes that this class lacks, such
    as ``config`` or ``generate``, are the model's; one that it has (`PUBLIC`) is reached as ``wrapped.module.name``.

    Everything that can be refused is refused before the model changes. A later failure, such as too little memory, a
    disk, a lost rank or an interrupt, may come after weights have begun to move. The error then says in a note that the
    model must be built again, and the model cannot be wrapped any more.

    Args:
        module: the model; from now on use it only through the wrapper.
        plan: the plan for this model and this number of ranks, or the answer of a search.
        group: the process group; None means the default group, or a single rank if there is none. A device mesh with
            the dimensions ``replicate`` and ``shard`` says which ranks form a replica; otherwise neighbours do.
        prefetch: fetch chunks before they are used, as the plan says; False fetches on demand.
        dtype: the dtype of parameters and floating inputs; None takes the plan's. Buffers follow if the whole model is
            cast (`casts_buffers`).
        reduce_always_fp32: average gradients over the ranks in float32.
        output_fp32: cast floating outputs to float32.
        use_fused_kernels: step Adam over whole shards in one pass, compute the model's loss without all logits and, on
            CUDA, run its layers by Liger-Kernel where that is installed (docs/design/kernels.md). This rounds
            differently and, in training, gives no logits along with a loss. A dict names providers by kind, such as
            ``{"cross_entropy": "plain"}``.
        weights: values that replace the model's own: a state dict, safetensors (a file, several, a folder), or the
            folder of a checkpoint. The model's modules initialise whatever is on meta and gets no value. Where the plan
            has ``frozen_weights="files"``, safetensors in which frozen weights stay.
        strict: refuse `weights` that lack some of the model's names or have others. Otherwise missing values come from
            the model, others are ignored, and both are logged.
        device: the device of compute; by default the current CUDA device, or the CPU without one.
        disk_folder: a folder on the disk for optimizer states, if the plan puts some on a disk. Several folders stripe
            states over several disks. Nothing stays there when the process ends.
        reserve: host memory that the program takes later in each process, such as ``"2GiB"`` for the workers of a data
            loader. What the process holds now is measured.
        between_steps: host memory that this rank's program takes while no step runs, such as for a full state dict.
        debug: switches for tests of the runtime.

    Raises:
        ArtifactError: the plan is for another model or another number of ranks.
        InputError: an argument contradicts the plan, weights on meta have no value, or another ElixirModule runs the
            model.
        InputTypeError: `module` is no plain module, or `plan` no plan.
        DiskError: the disk has no room for the states, or fails.
        NoMemoryError: this machine lacks the memory that the plan takes.
        RankError: another rank has raised.
    """

    def __init__(  # noqa: PLR0913 - the first eight are the original Elixir's
        self,
        module: nn.Module,
        plan: Plan | HasPlan | None = None,
        group: GivenGroup = None,
        prefetch: bool = True,
        dtype: torch.dtype | str | None = None,
        reduce_always_fp32: bool = False,
        output_fp32: bool = False,
        use_fused_kernels: bool | Mapping[str, str] = False,
        *,
        weights: Weights | None = None,
        strict: bool = True,
        device: torch.device | str | None = None,
        disk_folder: PathLike | Sequence[PathLike] | None = None,
        reserve: str | int | None = None,
        between_steps: str | int | None = None,
        debug: Debug | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise InputTypeError(f"module must be an nn.Module, got {type(module).__name__}")
        refuse_wrapped(module)
        dtype = None if dtype is None else parse_dtype(dtype)
        debug = debug or Debug()
        self._output_fp32 = output_fp32
        folders, where = folders_of(disk_folder), compute_device(device)
        options = RunOptions(
            prefetch=prefetch,
            reduce_fp32=reduce_always_fp32,
            fused_kernels=bool(use_fused_kernels),
            disk_folders=folders,
            debug=debug,
        )
        with compiled_in_place(module, keep=True), contextlib.ExitStack() as undone:
            self._put_back = ready_to_move(module)
            undone.callback(self._put_back)
            self._origins = Origins(module)
            undone.callback(self._origins.undo)
            ranks = Group(group, data=False)
            undone.callback(ranks.close)
            made = agree_on_plan(ranks, module, plan, dtype, folders)
            ranks.divide(made.replicas)
            self._shared_weights = SharedWeights(module)
            if ranks.rank == 0:
                if debug.emulation is None:
                    warn_if_made_elsewhere(made, where)
                _warn_if_hidden(module)
            self._cast = dtype if made.dtype == "as built" else parse_dtype(made.dtype)
            follow = casts_buffers(module, self._cast)
            self._fused = FusedKernels(module, use_fused_kernels, where.type)
            undone.callback(self._fused.remove)
            self._engine = engine = Engine(module, ranks, where, options)
            undone.push(partial(_undo, engine))
            self._promise = PlanPromise(
                module,
                engine,
                reserve_bytes=parse_bytes(reserve or 0),
                between_steps_bytes=parse_bytes(between_steps or 0),
            )
            with ranks.together("have the memory that the plan takes"):
                self._promise.refuse_exceeded(made)
            kept = self._cast if follow else None
            self._frozen = frozen = open_frozen(ranks, module, made, weights, debug.files)
            if frozen is not None:
                undone.callback(frozen.files.close)
            source = agree_on_weights(ranks, module, weights, strict=strict)
            build = partial(build_chunks, source=source, frozen=frozen, buffer_dtype=kept)
            with engine.window.file.without_loss("the model was not wrapped"):
                engine.install(made, build)
            if self._fused.counts:
                logger.info("%s", self._fused)
            self._shared_buffers = SharedBuffers(module, ranks, engine.lanes)
            self._shared_buffers.take()
            self._state = ModelState(engine, self._shared_buffers.of_rank_0)
            undone.callback(self._state.remove)
            self._account = engine.observer = StepAccount(engine, self._promise)
            self._shared_weights.attach(engine)
            promises.enter(self._promise)
            self._calls = Calls(module.children(), self._call) if isinstance(module, Together) else None
            undone.pop_all()
        module._apply = self._apply_inside  # type: ignore[method-assign]
        # torch's own method reads gradients, which lie elsewhere.
        module.zero_grad = self.zero_grad  # type: ignore[method-assign]
        self.module = module

    @property
    def plan(self) -> Plan:
        """The plan at work."""
        return self._engine.plan

    @property
    def last_report(self) -> StepReport | None:
        """The last step, compared with its prediction; None before the first."""
        return self._account.last_report

    @property
    def device(self) -> torch.device:
        """The device of compute."""
        return self._engine.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if self._calls is not None:
            refuse_compiled_around(self._engine)
            with self._engine.phase.alone():
                prepare_forward(self._engine)  # for all calls of models inside, before the whole is entered
            return run_user_code(self.module, *args, **kwargs)
        with self._call(None, args, kwargs) as ((args, kwargs), finished):
            output = run_user_code(self.module, *args, **kwargs)
        return finished(output)

    @contextlib.contextmanager
    def _call(self, part: nn.Module | None, args: Any, kwargs: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
        """A forward of the model, or of one of several models under the plan; see `Calls`."""
        engine, buffers = self._engine, self._shared_buffers
        refuse_compiled_around(engine, part)
        with engine.phase.alone():
            prepare_forward(engine)
            begins = self._account.forward(args, kwargs, part)
            buffers.before_forward()
            engine.forward_begins(of_part=part is not None)
            try:
                yield cast_inputs((args, kwargs), engine.device, self._cast), self._finished
                engine.refuse_stale()
            except BaseException as error:
                engine.forward_failed()
                self._account.explain(error)
                if begins:
                    self._account.begin_anew()
                refuse_addresses(self.module, error)
                refused = hooks_were_refused(error)
                if refused is not None:
                    raise refused from error
                raise
            engine.forward_over(of_part=part is not None)
            buffers.after_forward()

    def _finished(self, output: Any) -> Any:
        tree_map(self._engine.watch_output, output)
        return tree_map(_as_float32, output) if self._output_fp32 else output

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model itself, such as ``config`` or ``generate``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @contextlib.contextmanager
    def gathered(
        self,
        parameters: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None,
        *,
        write: bool = False,
        ema: bool = False,
    ) -> Iterator[None]:
        """Shows full weights in ``parameter.data``, outside of a forward. `parameters` are a module, one, several, or
        by default all.

        Inside of the context they lie in separate memory. With `write`, writes become the weights when the context ends
        without an exception; every rank must write the same. All other writes are refused or undone. More than the
        device's budget leaves is logged, once, as a warning.

        With `ema` they are the averages that an `ElixirOptimizer` keeps, and the weights of parameters that have none,
        frozen ones and those not stepped yet. ``state_dict()``, ``save_pretrained()`` and, under `torch.no_grad`, the
        model itself use them; afterwards the weights are as before. ``gathered([], ema=True)`` does the same but shows
        no streamed parameter: their averages are loaded as weights are, from a copy where the weights live. Resident
        weights are on the device twice.

        Raises:
            InputError: `parameters` are not all parameters of this model; or with `ema`, nobody keeps an average, or it
                would be written to.
            DiskError, NoMemoryError: averages on a disk cannot be read.
        """
        with shown(self._engine, parameters, write, ema):
            yield

    def rehome(self, plan: Plan | HasPlan) -> None:
        """Switches to a plan with the same chunks in other homes.

        Call it on all ranks with the same plan, between a step and the next forward, without gradients.

        The move changes no bit of weights, masters and states (if the plans keep moments in the same form). Later steps
        of a chunk give the same bits as without it, unless another kernel steps the chunk and rounds differently. That
        happens between the CPU and a CUDA device. It also happens with `use_fused_kernels` and float32 moments if the
        chunk becomes ordinary (weights, gradients and states all on the device of one rank), or ceases to be, since the
        optimizer's own class steps ordinary chunks.

        Args:
            plan: a plan that packs parameters as the current one does.

        Raises:
            InputError: the plan packs differently, or this is not the moment.
            DiskError, NoMemoryError, RankError: chunks cannot be moved, on this rank or another. They return to their
                old homes, and training can go on. If even that fails, `close` is called, which is logged.
        """
        engine = self._engine
        engine.refuse_unusable()
        engine.refuse_inside("rehome()")
        if engine.uses.shows_other_memory or engine.holds_gradients():
            raise InputError("rehome() is for between zero_grad() and the next forward, outside of gathered()")
        # Runs on the network's lane, after its pending work, which is the same on all ranks. This thread waits for all
        # answers.
        folders = engine.options.disk_folders
        agree = partial(agree_on_plan, engine.group, self.module, plan, None, folders, runs=True)
        agreed = engine.lanes.network.ask(agree)
        for stepper in engine.steppers:
            stepper.check_plan(agreed)
        if not same_packing(self.plan, agreed):
            raise InputError("rehome() moves chunks, it does not repack them; plan with the chunks of the present plan")
        engine.settle()
        engine.take_back()
        coming = engine.group.exchange("memory that the plan takes", self._promise.coming_bytes(agreed))
        with engine.group.together("have the memory that the plan takes"):
            self._promise.refuse_exceeded(agreed, coming)
        if engine.state_reader is not None:
            engine.state_reader.let_go()  # a checkpoint may still be written from memory that is freed next
        before = self.plan
        try:
            self._move(agreed)
        except BaseException as error:
            logger.warning("chunks go back to their homes, since they cannot be moved: %s", error)
            try:
                self._move(before)
            except Exception as again:
                logger.error("chunks cannot go back either, so the model is given back as by close(): %s", again)
                self.close()
            raise

    def _move(self, plan: Plan) -> None:
        """Moves chunks and states to the homes of a plan; also used after a failed move."""
        engine = self._engine
        self._state.remove()
        with engine.window.file.without_loss("the chunks are where they were, and the training can go on"):
            for stepper in engine.steppers:
                stepper.give_up_states()
            moved = partial(move_chunks, before=engine.chunks, leaving=engine.leaving, frozen=self._frozen)
            engine.change_plan(plan, moved)
            with engine.group.together("move its optimizer states"):
                for stepper in engine.steppers:
                    stepper.take_states()
            engine.plan_installed()
        self._state = ModelState(engine, self._shared_buffers.of_rank_0)
        self._shared_weights.attach(engine)
        self._account.another_plan()

    def settle(self) -> None:
        """Waits for all lanes and empties the blocks.

        Raises:
            StepError: work on a lane has failed, now or before.
        """
        self._engine.settle()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context that changes nothing, for scripts written for DistributedDataParallel: every backward reduces.

        Adding up whole gradients on each rank would take memory that no plan counts. `ElixirOptimizer.accumulate`
        makes micro-batches cheaper.
        """
        self._engine.phase.refuse_closed()
        return contextlib.nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, those at the home of the states too.

        Raises:
            InputError: `set_to_none` is False before `close`.
        """
        engine = self._engine
        if engine.phase.closed:  # the gradients are those of an ordinary model
            super().zero_grad(set_to_none)
            return
        engine.before_zero_grad(set_to_none=set_to_none)
        engine.unstepped.clear()
        engine.gradients.clear()
        for stepper in engine.steppers:
            stepper.gradients_cleared()
        if engine.group.size > 1:
            engine.lanes.network.submit(lambda: engine.group.note("zero_grad()"))
        with DisableTorchFunctionSubclass():
            super().zero_grad()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Returns the norm of all gradients; the next step clips to `max_norm`, that of every optimizer of the module.
        Call it instead of torch's function.

        Raises:
            InputError: there is no `ElixirOptimizer`, or `norm_type` is not 2.
        """
        if norm_type != 2.0:
            raise InputError(f"only the 2-norm of sharded gradients is known, norm_type is {norm_type}")
        if not self._engine.steppers:
            raise InputError("clip_grad_norm_ needs an ElixirOptimizer, this module has none")
        first, *others = self._engine.steppers
        return first.clip_grad_norm_(max_norm, error_if_nonfinite, others)

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        rank0_only: bool = False,
        only: Callable[[str, nn.Parameter], bool] | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The model's state dict on the CPU: full weights under the model's own names, in float32 or wider.

        For weights of low precision it has the master weights. It gathers one chunk at a time; with several ranks all
        must call it.

        Args:
            rank0_only: other ranks get an empty dict, and need no memory for it.
            only: ``only(name, parameter)`` selects parameters, the same on all ranks; buffers are always included.
                ``lambda name, parameter: parameter.requires_grad`` takes trained parameters, and gathers no others.
            dtype: the dtype of weights, instead.
        """
        self._engine.refuse_unusable()
        wanted = not rank0_only or self._engine.group.rank == 0
        return self._state.full(*args, wanted=wanted, only=only, dtype=dtype, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads weights and buffers into their homes; master weights take the values unrounded.

        With several ranks all must load the same values. Names may have ``_orig_mod.``, as `torch.compile` gives them.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, like `torch.nn.Module.load_state_dict`, which also raises the
            errors.
        """
        if assign:
            raise InputError("assign=True would give the parameters other memory; leave it out")
        self._engine.exchange("load_state_dict()", None)
        if any("_orig_mod." in name for name in state_dict):
            state_dict = {name.replace("_orig_mod.", ""): value for name, value in state_dict.items()}
        with self._engine.window.keeping():
            return self.module.load_state_dict(state_dict, strict=strict)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        # Called if this is part of another module: `state_dict` gives the names of the model inside.
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._engine.phase.refuse_closed()
        if not self._changes_nothing(fn):
            raise InputError(
                "the plan says where an ElixirModule lives and in which dtype: leave out to(), cuda(), half() and the "
                "like, and plan with unified_dtype= for another dtype"
            )
        return self

    def _apply_inside(self, fn: Any, recurse: bool = True) -> Any:
        self._apply(fn, recurse)
        return self.module

    def _changes_nothing(self, fn: Any) -> bool:
        """Whether `fn` leaves tensors like the model's unchanged, such as `to()` with their own device and dtype."""
        like = {(chunk.dtype, self.device) for chunk in self._engine.chunks}
        like |= {(buffer.dtype, buffer.device) for buffer in self.module.buffers()}
        for dtype, device in like:
            probe = torch.zeros(2, 2, 2, 2, dtype=dtype, device=device)  # four dimensions: a memory format would show
            if fn(probe) is not probe or probe._version or probe.is_shared() != (device.type == "cuda"):
                return False
        return True

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Refuses `DistributedDataParallel`, which reads this attribute first."""
        raise InputError("an ElixirModule reduces its gradients itself: leave out DistributedDataParallel")

    def __deepcopy__(self, memo: Any) -> Any:
        raise InputError("an ElixirModule cannot be copied: its weights live in shared chunks; wrap a second model")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError("an ElixirModule cannot be pickled; save state_dict() instead")

    def release(self) -> nn.Module:
        """Calls `close` and returns the model: an ordinary module, as before wrapping, with the current weights."""
        self.close()
        return self.module

    def close(self) -> None:
        """Stops the lanes and gives the model back as an ordinary module; this wrapper cannot run afterwards.

        Parameters and buffers get separate memory, on their original devices and in their original dtypes, with full
        weights: master weights if it has any. With several ranks all must call this, and get the same. If a rank is
        gone, or its last forward or backward has raised, weights that are sharded over ranks are left on meta, with a
        warning. A second call does nothing.

        Raises:
            InputError: inside `gathered`, or in a forward or backward.
            CheckpointError: the last checkpoint could not be saved, which was not reported before; the model is given
                back.
            DiskError, NoMemoryError, RankError: master weights of some rank could not be read; the model is given back
                with these weights in the dtype in which it ran.
        """
        engine = self._engine
        if engine.phase.closed:
            return
        if engine.has_plan:
            engine.refuse_inside("close()")
            engine.refuse_in_pass("close()")
            if engine.uses.shows_other_memory:
                raise InputError("close() is for outside of gathered(); leave it first")
        unsaved: Exception | None = None if engine.state_reader is None else engine.state_reader.close()
        with contextlib.ExitStack() as after:
            after.callback(partial(promises.leave, self._promise))  # the memory belongs to the plan until it is free
            with contextlib.ExitStack() as ends:  # all of these run, whatever fails
                ends.callback(self._put_back)
                ends.callback(self._fused.remove)
                ends.callback(lambda: vars(self.module).pop("zero_grad"))
                ends.callback(lambda: vars(self.module).pop("_apply"))
                if self._frozen is not None:
                    ends.callback(self._frozen.files.close)
                ends.callback(engine.stop)
                if self._calls is not None:
                    ends.callback(self._calls.remove)
                ends.callback(self._state.remove)
                unread = self._origins.give_back(engine, alone=not engine.end())
                self._shared_weights.give_back()
            engine.drop_memory()  # not if the model lacks weights, of which the chunks have the only copy
        failed = unsaved or unread
        if failed is not None:
            raise failed


def _undo(engine: Engine, kind: Any, error: BaseException | None, trace: Any) -> None:
    """Ends a failed wrapping, and notes in its error if weights are lost; Python prints notes from version 3.11 on."""
    engine.abandon()
    if error is not None and lacks_weights(engine.model):
        vars(error).setdefault("__notes__", []).append(WEIGHTS_ARE_LOST)


def lacks_weights(module: nn.Module) -> bool:
    """Whether parameters are placeholders: a plan has the weights, or had them when wrapping failed."""
    return any(is_absent(each) for parameter in module.parameters() for _, each in flat("", parameter))


def refuse_wrapped(module: nn.Module) -> None:
    """Raises `InputError` if an ElixirModule runs this model already, or modules of it, or if it lost its weights."""
    if isinstance(getattr(module._apply, "__self__", None), ElixirModule):
        raise InputError(
            f"this {type(module).__name__} is run by an ElixirModule already; use that one, close() it first, or "
            "build the model anew"
        )
    shared = [name for name, part in module.named_modules() if in_use(part)]
    if shared:
        raise InputError(
            f"modules of this {type(module).__name__} are run by another ElixirModule already ({few(shared)}), "
            "whose plan has their weights; close() that one first"
        )
    if lacks_weights(module):
        raise InputError(f"this {type(module).__name__} cannot be wrapped: {WEIGHTS_ARE_LOST}")


def cast_inputs(arguments: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Moves tensors to `device` and casts floating ones to `dtype`. Returns the caller's own containers if nothing
    changes."""
    given, form = tree_flatten(arguments)
    moved = [_moved(item, device, dtype) for item in given]
    if all(new is old for new, old in zip(moved, given, strict=True)):
        return arguments  # the model may write into the caller's lists and dicts
    return tree_unflatten(moved, form)


def _moved(item: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return item.to(device, dtype) if dtype is not None and item.is_floating_point() else item.to(device)


def _as_float32(item: Any) -> Any:
    return item.float() if isinstance(item, torch.Tensor) and item.is_floating_point() else item


def _warn_if_hidden(model: nn.Module) -> None:
    """Warns about attributes of the model that the wrapper hides, because it has the same names."""
    names = dir(model)
    hidden = [name for name in PUBLIC if name in names]
    if "device" in hidden and isinstance(getattr(model, "device", None), torch.device):
        hidden.remove("device")  # it means the same in transformers' models
    if hidden:
        logger.warning(
            "%s has attributes that an ElixirModule has too (%s): reach the model's as wrapped.module.%s",
            type(model).__name__,
            ", ".join(hidden),
            hidden[0],
        )
