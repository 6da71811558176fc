"""`ElixirAccelerator`: an Accelerator whose model runs under a plan.

    accelerator = ElixirAccelerator(gradient_accumulation_steps=4, elixir={"device_memory": "20GiB"})
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Accelerate has no registry of backends: `Accelerator.distributed_type` is a closed enumeration. So this is a subclass.
`transformers.Trainer` makes its Accelerator itself; `ElixirAccelerator.adopt` turns that instance into one of these.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from elixir.api import dry_run, wrap
from elixir.errors import InputError
from elixir.integrations.optimizer_list import OptimizerList, as_several
from elixir.integrations.run import Options, Run, as_inp, read_options
from elixir.models.step import default_step, planning_batch
from elixir.models.together import Together
from elixir.plan.plan import Plan
from elixir.torch_private import tree_map
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.plan_promise import state_dict_bytes

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType, TorchDynamoPlugin, is_datasets_available
except ImportError as error:
    raise ImportError("this needs the package accelerate: pip install 'accelerate>=1.3'") from error

logger = logging.getLogger(__name__)

DTYPES = {"no": None, "bf16": "bfloat16", "fp16": "float16"}
"""Mixed precision -> the plan's dtype."""

SETTLED = {
    "accumulation": "gradient_accumulation_steps=",
    "dtype": "mixed_precision=",
    "device": "the Accelerator",
    "group": "the default process group",
    "max_norm": "accelerator.clip_grad_norm_(...)",
}
"""Arguments of `elixir.wrap` that an Accelerator settles -> the setting that does."""

_OTHERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


class PreparedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An `ElixirOptimizer`, or a list of them, as accelerate prepares optimizers: steps end an accumulation."""

    def __init__(self, optimizer: ElixirOptimizer | OptimizerList, accelerator: ElixirAccelerator) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._is_accelerate_prepared = True
        self._elixir_accelerator = accelerator

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because float16 gradients overflowed."""
        return bool(self.optimizer.step_was_skipped)

    def state_dict(self) -> dict[str, Any]:
        """The states, whole, on rank 0; all ranks call this."""
        return {} if self._elixir_accelerator._elixir_moves_states else self.optimizer.state_dict(rank0_only=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states in torch's layout, the same on all ranks."""
        if not self._elixir_accelerator._elixir_moves_states:
            self.optimizer.load_state_dict(state_dict)


def _is_prepared(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is wrapped, or prepared."""
    return isinstance(as_several(optimizer)[0], (ElixirOptimizer, AcceleratedOptimizer))


class ElixirAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that plans and wraps in `prepare`, from the model, its optimizers and the training DataLoader.

    Mixed precision becomes the plan's dtype, with float32 master weights: there is no autocast, and no GradScaler.
    Micro-batches of an accumulation are reduced one by one, into shards. A plugin for torch.compile compiles the layers
    that the model repeats, whether it says ``use_regional_compilation`` or not.

    Args:
        args, kwargs: of `accelerate.Accelerator`.
        elixir: arguments of `elixir.wrap`, such as ``{"device_memory": "20GiB"}``; JSON, or the path of a JSON file.
            ``step_fn(model, batch)`` runs forward, loss and backward; by default ``model(**batch).loss.backward()``.

    Raises:
        InputError: an option repeats a setting of the Accelerator; or DeepSpeed, FSDP, Megatron, fp8 or another kind of
            parallelism is configured.
    """

    elixir: Run | None = None
    """The wrapped model and its optimizers; None before `prepare`."""

    def __init__(self, *args: Any, elixir: Options = None, **kwargs: Any) -> None:
        options = read_options(elixir, SETTLED)
        super().__init__(*args, **kwargs)
        self._elixir_adopted(options)

    @classmethod
    def adopt(cls, accelerator: Accelerator, options: dict[str, Any]) -> None:
        """Turns an Accelerator that somebody else has made into one of these, in place."""
        accelerator.__class__ = cls
        accelerator._elixir_adopted(options)
        accelerator._elixir_places_all = True

    _elixir_places_all = False
    """Whether models that are only evaluated stay where they are until a plan places them."""
    _elixir_moves_states = False
    """Whether states are saved or loaded chunk by chunk now, so that optimizers leave them out."""

    def _elixir_adopted(self, options: dict[str, Any]) -> None:
        self._elixir_options = options
        self._elixir_tracing = False
        self._elixir_refuse_others()
        if self.mixed_precision != "no":
            what = "weights are in it, with float32 masters; no autocast"
            logger.info("mixed precision %s: %s", self.mixed_precision, what)
        # Only of this instance: the state that all Accelerators of a process share stays as it is.
        self.native_amp, self.scaler = False, None

    def _elixir_refuse_others(self) -> None:
        kind = self.distributed_type
        if kind in {getattr(DistributedType, name, None) for name in _OTHERS}:
            raise InputError(
                f"{kind.value} is configured (by a plugin, or by `accelerate config`), but Elixir places and shards "
                "the model itself; remove one of the two"
            )
        if getattr(self, "parallelism_config", None) is not None and self.parallelism_config.total_size > 1:
            raise InputError("Elixir trains data-parallel ranks only; leave parallelism_config out")
        if (given := self.mixed_precision) not in DTYPES:
            raise InputError(f"mixed_precision={given!r} is not known here; choose one of {list(DTYPES)}")

    @property
    def _elixir_compile(self) -> dict[str, Any]:
        """``compile=`` for `elixir.wrap`, from the plugin for torch.compile; {} if that is not configured."""
        plugin = getattr(self.state, "dynamo_plugin", None)
        backend = str(getattr(getattr(plugin, "backend", "NO"), "value", "NO")).lower()
        if plugin is None or backend == "no":
            return {}
        # mode="default" may not be given next to options.
        given = {name: value for name, value in plugin.to_dict().items() if value is not None and value != "default"}
        given.pop("use_regional_compilation", None)
        return {"compile": {**given, "backend": backend}}

    def wrap(self, model: torch.nn.Module, optimizers: Any, **more: Any) -> Run:
        """Plans, and wraps a plain model and its optimizers.

        Args:
            model: plain.
            optimizers: one, or a list; an `OptimizerList` has the wrapped ones afterwards.
            more: arguments of `elixir.wrap` on top of the options; here ``inp`` is a batch of any kind, or
                a function that gives it, and ``step_fn(model, batch)`` gets it.
        """
        if self.num_processes > 1 and is_datasets_available():
            with contextlib.suppress(ImportError):  # Accelerate says so itself, if it needs it
                importlib.import_module("datasets")  # as Accelerate does with a loader: 50 MB that were not counted
        module, made = wrap(model, as_several(optimizers), **self._elixir_arguments(**more))
        self.elixir = Run(module, made, is_main=self.is_main_process)
        if isinstance(optimizers, OptimizerList):  # the same object, for schedulers know it
            optimizers.optimizers = list(made)
        return self.elixir

    def dry_run(self, model: torch.nn.Module, optimizers: Any, **more: Any) -> Plan:
        """The plan that `wrap` would make with these arguments; nothing is wrapped."""
        return dry_run(model, as_several(optimizers), **self._elixir_arguments(**more))

    def plan(self, *args: Any) -> Plan:
        """The plan that ``prepare(*args)`` would make; nothing is prepared."""
        model, optimizers, inp = self._elixir_found(args)
        return self.dry_run(model, optimizers, inp=inp)

    def _elixir_arguments(self, **more: Any) -> dict[str, Any]:
        settled = {"device": self.device, "dtype": DTYPES[self.mixed_precision], **self._elixir_compile}
        options = {**settled, **more, **self._elixir_options}
        if "plan" in options:
            return {name: value for name, value in options.items() if name not in ("accumulation", "inp", "step_fn")}
        options.setdefault("accumulation", self.gradient_accumulation_steps)
        options.setdefault("clipping", True)
        inp = options["inp"]() if callable(options.get("inp")) else options.get("inp")
        options["inp"], traced = as_inp(inp, options.get("step_fn", default_step))

        def step(twin: Any, batch: Any) -> None:
            with patch.object(self, "_elixir_tracing", True):
                traced(twin, batch)

        return {**options, "step_fn": step}

    def _elixir_found(self, args: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """The model, its optimizer or optimizers, and the batch to plan for, among what is prepared."""
        models = [each for each in args if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if len(models) != 1 or not optimizers or self.elixir is not None:
            raise InputError(
                f"an ElixirAccelerator wraps one model together with its optimizers, found {len(models)} and "
                f"{len(optimizers)}, {'after' if self.elixir is not None else 'without'} another one; make one for each"
            )

        def batch() -> Any:
            for each in args:
                if isinstance(each, torch.utils.data.DataLoader):
                    return planning_batch(each)
            raise InputError(
                "a batch is what is planned for: give prepare() the training DataLoader together with model and "
                'optimizer, or elixir={"inp": batch}'
            )

        return models[0], optimizers[0] if len(optimizers) == 1 else optimizers, batch

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepares as Accelerator does; plans and wraps a model with optimizers first."""
        if any(isinstance(each, torch.optim.Optimizer) and not _is_prepared(each) for each in args):
            model, optimizers, inp = self._elixir_found(args)
            plain = [model, *as_several(optimizers)]
            saved = state_dict_bytes(model) if self.is_main_process else 0  # by `save_state`
            run = self.wrap(model, optimizers, inp=inp, between_steps=saved)
            made = dict(zip(map(id, plain), [run.module, *run.optimizers], strict=True))
            args = tuple(made.get(id(each), each) for each in args)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares as Accelerator does; a wrapped model is not moved, and reduces its gradients itself."""
        if isinstance(model, ElixirModule):
            vars(model)["_is_accelerate_prepared"] = True
            # Its layers are compiled. A model whose whole forward is compiled cannot fetch weights.
            with patch.object(self.state, "dynamo_plugin", TorchDynamoPlugin(backend="no")):
                # Older versions do not look at it: without these they would move the model, and wrap it in DDP.
                return super().prepare_model(model, device_placement=False, evaluation_mode=True)
        if self._elixir_places_all and self.elixir is None and kwargs.get("evaluation_mode"):
            kwargs.setdefault("device_placement", False)
        return super().prepare_model(model, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """Prepares as Accelerator does; see `PreparedOptimizer`."""
        if not _is_prepared(optimizer) or isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        return super().prepare_optimizer(PreparedOptimizer(optimizer, self), device_placement)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs backward as Accelerator does; with float16 the loss is scaled."""
        if self.elixir is None:
            super().backward(loss, **kwargs)
        else:
            self.elixir.optimizers[0].backward(loss / self.gradient_accumulation_steps, **kwargs)

    def one_pass(self, step_fn: Callable[[Any, Any], Any], batches: Iterable[Any]) -> list[Any]:
        """Runs all micro-batches of an optimizer step, as `ElixirOptimizer.accumulate` does; `step` comes next.

        Args:
            step_fn: ``step_fn(model, batch)`` computes the loss, calls `backward` of this Accelerator, and may return
                anything.
            batches: as many as `gradient_accumulation_steps`, which divide each loss.

        Returns:
            what the calls have returned, in order.

        Raises:
            InputError: before `prepare`.
        """
        if self.elixir is None:
            raise InputError("one_pass() runs a model under a plan; call prepare() with it and its optimizer first")
        self.gradient_state.sync_gradients = True  # so that the optimizer steps
        return self.elixir.optimizers[0].accumulate(step_fn, batches)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of all gradients; the next step clips to `max_norm`."""
        run = self.elixir
        if run is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return run.module.clip_grad_norm_(max_norm, float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Refuses a wrapped model: gradients are sharded, and clipped by their norm only."""
        if self.elixir is not None:
            raise InputError("gradients are sharded and can be clipped by their norm only: use clip_grad_norm_()")
        super().clip_grad_value_(parameters, clip_value)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The plain model; it runs under the plan nevertheless. Of several models under the plan it is the first."""
        if not isinstance(model, ElixirModule):
            return super().unwrap_model(model, *args, **kwargs)
        return model.module.first if isinstance(model.module, Together) else model.module

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Full weights in float32 on rank 0, an empty dict on the others; all ranks call this."""
        if self.elixir is not None and model in (self.elixir.module, self.elixir.module.module, self.elixir.model):
            return self.elixir.state_dict(rank0_only=True)
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Saves as Accelerator does; states go chunk by chunk into the folder ``elixir``, for any number of ranks."""
        with patch.object(self, "_elixir_moves_states", self.elixir is not None):
            location = super().save_state(output_dir, *args, **kwargs)
        if self.elixir is not None:
            self.elixir.save(location)
            self.elixir.save_plan(Path(location).parent)
        return location

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Loads a folder of this or of a plain Accelerator."""

        def hook(models: list[Any], folder: str) -> None:
            if self.elixir is not None and self.elixir.load(folder):
                models.remove(self.elixir.module)
                self._elixir_moves_states = True

        with patch.object(self, "_elixir_moves_states", False), contextlib.ExitStack() as undone:
            undone.callback(self.register_load_state_pre_hook(hook).remove)
            super().load_state(input_dir, *args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """Gathers as Accelerator does; while only rank 0 traces a step, as if all ranks had the same."""
        if not (self._elixir_tracing and self.use_distributed):
            return super().gather(tensor)
        return tree_map(lambda item: torch.cat([torch.atleast_1d(item.detach())] * self.num_processes), tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces as Accelerator does; while only rank 0 traces a step, as if all ranks had the same."""
        if not (self._elixir_tracing and self.use_distributed):
            return super().reduce(tensor, reduction, scale)
        factor = self.num_processes if reduction == "sum" else 1
        return tree_map(lambda item: item.detach() * factor * scale, tensor)
