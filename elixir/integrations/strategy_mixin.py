"""A Lightning strategy under a plan, for both packages in which it comes; see `elixir.integrations.lightning`."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from elixir.api import dry_run, wrap
from elixir.errors import InputError
from elixir.files import FILES
from elixir.integrations.run import Planned, Run, as_inp, plan_made, read_options, refuse_all
from elixir.models.step import planning_batch
from elixir.plan.plan import Plan
from elixir.torch_private import tree_map
from elixir.wrapper.account.plan_promise import state_dict_bytes
from elixir.wrapper.engine import engine_of
from elixir.wrapper.optimizer import stepper_of

_BF16, _FP16 = ("bf16-true", "bf16-mixed"), ("16-true", "16-mixed")
DTYPES = {"32-true": None, **dict.fromkeys(_BF16, "bfloat16"), **dict.fromkeys(_FP16, "float16")}
"""Lightning's precision -> the plan's dtype."""

SETTLED = {
    "accumulation": "Trainer(accumulate_grad_batches=)",
    "clipping": "Trainer(gradient_clip_val=)",
    "device": "Trainer(accelerator=, devices=)",
    "dtype": "Trainer(precision=)",
    "group": "the default process group",
    "inp": "ElixirStrategy(batch=)",
    "max_norm": "Trainer(gradient_clip_val=)",
    "strict": "`elixir check` of a step function, since training_step needs Lightning around it",
}
"""Arguments of `elixir.wrap` that a Trainer settles -> the setting that does."""

_COPIES = {"StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging"}


class PrecisionMixin:
    """Comes before Lightning's Precision: the plan casts; the loss scale and clipping are the ElixirOptimizer's."""

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in DTYPES:
            raise InputError(f"precision={precision!r} is not known here; choose one of {', '.join(DTYPES)}")
        self.precision = precision
        self.elixir: Run | None = None

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """The LightningModule's own hook; with float16 of the scaled loss."""
        if self.elixir is not None and self.elixir.module.plan.dtype == "float16":
            self.elixir.optimizers[0].backward(tensor, *args, **kwargs)
        else:
            model.backward(tensor, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """The next step clips."""
        plain(optimizer).clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Refuses, since gradients are sharded."""
        raise InputError("gradients are sharded and can be clipped by norm only: gradient_clip_algorithm='norm'")

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, for Lightning's checkpoints."""
        return {} if self.elixir is None else engine_of(self.elixir.module).loss_scale.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with a loss scale."""
        if self.elixir is not None and state_dict:
            engine_of(self.elixir.module).loss_scale.load(state_dict)


_MAPPED = ("state_dict", "optimizer_states")
"""Parts of a checkpoint that are copied to where they belong when they are loaded."""

_Base: Any = object
"""A base for type checkers, which must not look for Lightning's methods here."""


class StrategyMixin(_Base):  # type: ignore[misc]
    """Comes before Lightning's DDPStrategy: trains under a plan, made from the data and `training_step`.

    Args:
        step_fn: ``step_fn(lightning_module, batch)`` runs forward, loss and backward, where `training_step` cannot be
            traced or optimization is manual.
        batch: the batch to plan for; by default the longest samples of the training data.
        init_on_meta: `configure_model` builds on the meta device, and wrapping fills the model chunk by chunk.
        options: arguments of `elixir.wrap`, such as ``device_memory``, and of DDPStrategy, such as ``start_method``.
            ``placement_policy`` is another name for ``placement``: auto, cuda or cpu. With ``pass_size``, each batch
            of the loader is a list of the micro-batches of a step, whose mean loss is that of the batch.

    Raises:
        InputError: an option repeats a setting of the Trainer.
    """

    elixir: Any = None
    """The `Run`: the wrapped model and its optimizers; None before `fit`."""
    optimizers: Any
    precision_class: type
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = True
    _elixir_only_plan = False

    def __init__(self, step_fn: Any = None, batch: Any = None, init_on_meta: bool = False, **options: Any) -> None:
        of_ddp = set(signature(super().__init__).parameters) - {"kwargs"}
        if "placement_policy" in options:
            options["placement"] = options.pop("placement_policy")
        own = {name: value for name, value in options.items() if name not in of_ddp}
        self._elixir_options = read_options(own, SETTLED)
        self._elixir_step_fn, self._elixir_batch, self._elixir_meta = step_fn, batch, init_on_meta
        self._elixir_report: Any = None  # the one that was logged last
        super().__init__(**{name: value for name, value in options.items() if name in of_ddp})

    def dry_run(self, trainer: Any, model: Any, **data: Any) -> Plan:
        """The plan that ``trainer.fit(model, **data)`` would run, found by preparing for it up to there."""
        with patch.object(self, "_elixir_only_plan", True):
            return plan_made(partial(trainer.fit, model, **data), "fit()")

    # --- Setting up ---------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        """Ours, whichever the Trainer made."""
        return self._precision_plugin or self.precision_class()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        # The Trainer makes one by the type of the strategy, and does not know this one.
        known = plugin is None or isinstance(plugin, PrecisionMixin)
        self._precision_plugin = plugin if known else self.precision_class(plugin.precision)

    def model_sharded_context(self) -> Any:
        """Wraps `configure_model`, on the meta device if asked to."""
        return torch.device("meta") if self._elixir_meta else contextlib.nullcontext()

    def setup(self, trainer: Any) -> None:
        """Sets up optimizers on the plain model first, then the plan, then the wrapped model."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        ours = self.elixir is not None and self.elixir.module.module is self.lightning_module
        if fitting:
            if ours:
                self.elixir.module.close()  # a second fit makes new optimizers
            self._elixir_refuse(trainer)
            self.setup_optimizers(trainer)
            self._elixir_wrap(trainer)
        if ours or fitting:
            self.model = self.elixir.module
        else:
            self.model_to_device()  # there is no plan without training
        self.setup_precision_plugin()

    def _elixir_refuse(self, trainer: Any) -> None:
        copies = [
            name for each in trainer.callbacks for kind in type(each).__mro__ if (name := kind.__name__) in _COPIES
        ]
        is_compiled = getattr(self.lightning_module, "_compiler_ctx", None) is not None
        refused = {
            "gradients are sharded and can be clipped by norm only: gradient_clip_algorithm='norm'": (
                trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "norm").lower().endswith("value")
            ),
            f"{min(copies, default='')} copies the model, whose weights lie in shared chunks; leave it out": copies,
            "torch.compile of the whole LightningModule cannot run with weights that are streamed; give the module "
            "itself, and ElixirStrategy(compile=True), which compiles its layers": is_compiled,
            "sync_batchnorm is not done here; convert the model with torch.nn.SyncBatchNorm": self._layer_sync,
        }
        refuse_all(refused)

    def _elixir_wrap(self, trainer: Any) -> None:
        options = {"dtype": DTYPES[self.precision_plugin.precision], "device": self.root_device, **self._elixir_options}
        clips = bool(trainer.gradient_clip_val) or not self.lightning_module.automatic_optimization
        if "plan" not in options:
            batch = self._elixir_batch
            if batch is None:
                trainer.fit_loop.setup_data()  # as Trainer.estimated_stepping_batches does
                batch = tree_map(planning_batch, trainer.train_dataloader)
            accumulation = trainer.accumulate_grad_batches
            if self._elixir_takes_lists:
                if accumulation > 1 or not isinstance(batch, list):
                    raise InputError(
                        "with pass_size= each batch of the loader is a list of the micro-batches of a step, found "
                        f"{type(batch).__name__} and accumulate_grad_batches={accumulation}; give lists, and 1"
                    )
                batch, accumulation = batch[0], len(batch)
            inp, step_fn = as_inp(batch, self._elixir_traced)
            options |= {"inp": inp, "step_fn": step_fn, "accumulation": accumulation}
            options["clipping"] = clips
        options.setdefault("between_steps", self._elixir_saved_bytes(trainer))
        self.lightning_module.train()
        if self._elixir_only_plan:
            raise Planned(dry_run(self.lightning_module, self.optimizers, **options))
        module, optimizers = wrap(self.lightning_module, self.optimizers, **options)
        for each in optimizers:
            stepper_of(each).norm.was_asked_for = clips  # so from the first step on
        self.elixir = self.precision_plugin.elixir = Run(module, optimizers, is_main=self.is_global_zero)
        self.optimizers = optimizers

    def _elixir_traced(self, twin: Any, batch: Any) -> None:
        """`training_step` in a trace: it logs nowhere and measures nothing."""
        with contextlib.ExitStack() as changed:
            quiet = {"log": _nowhere, "log_dict": _nowhere, "_device": torch.device("meta")}
            changed.enter_context(patch.dict(vars(twin), quiet))
            for part in twin.modules():
                if any(kind.__module__.startswith("torchmetrics.") for kind in type(part).__mro__):
                    changed.enter_context(patch.dict(vars(part), forward=_nowhere, update=_nowhere))
            if self._elixir_step_fn is not None:
                self._elixir_step_fn(twin, batch)
                return
            if not twin.automatic_optimization:
                raise InputError("manual optimization cannot be traced; give ElixirStrategy(step_fn=...)")
            output = twin.training_step(batch, 0)
            (output["loss"] if isinstance(output, Mapping) else output).backward()

    # --- Steps --------------------------------------------------------------------------------------------------------

    @property
    def _elixir_takes_lists(self) -> bool:
        """Whether a batch is a list of micro-batches, which pass the layers together; their backward runs with them."""
        several = self._elixir_options.get("pass_size", 1) != 1
        several = several or (self.elixir is not None and self.elixir.module.plan.pass_size > 1)
        return several and bool(self.lightning_module.automatic_optimization)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps as DDPStrategy does. With manual optimization backward and step run inside, so outside of the wrapper's
        forward."""
        if not self.lightning_module.automatic_optimization:
            return self.lightning_module.training_step(batch, *args, **kwargs)
        if not self._elixir_takes_lists:
            return super().training_step(batch, *args, **kwargs)

        def step(module: Any, micro_batch: Any) -> torch.Tensor:
            output = super(StrategyMixin, self).training_step(micro_batch, *args, **kwargs)
            loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output
            super(StrategyMixin, self).backward(loss / len(batch), self.optimizers[0])
            return loss.detach()

        return torch.stack(self.optimizers[0].accumulate(step, batch)).mean()

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs backward as DDPStrategy does, unless it has run with `training_step`."""
        if self._elixir_takes_lists:
            return closure_loss
        loss: torch.Tensor = super().backward(closure_loss, *args, **kwargs)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Steps as DDPStrategy does, then frees gradients, which Lightning would hold during the next forward."""
        # Lightning clears gradients after training_step, where those of lists have come.
        has_run = self._elixir_takes_lists
        with patch.object(plain(optimizer), "zero_grad") if has_run else contextlib.nullcontext():
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.lightning_module.automatic_optimization:
            optimizer.zero_grad()
        trainer, report = self.lightning_module.trainer, self.elixir.module.last_report
        # Several optimizers have one report, made when all of them have stepped.
        is_new, self._elixir_report = report is not self._elixir_report, report
        for logger in trainer.loggers if is_new and (trainer.global_step + 1) % trainer.log_every_n_steps == 0 else ():
            logger.log_metrics(self.elixir.numbers(), step=trainer.global_step)
        return result

    def block_backward_sync(self) -> Any:
        """Does nothing: each micro-batch is reduced into shards, since the plan counts no more."""
        return contextlib.nullcontext()

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> Any:
        """Full weights under the LightningModule's names, in float32, on rank 0."""
        return (
            self.elixir.module.state_dict(rank0_only=True) if self._elixir_runs else self.lightning_module.state_dict()
        )

    def optimizer_state(self, optimizer: Any) -> Any:
        """States in torch's layout, on rank 0."""
        return plain(optimizer).state_dict(rank0_only=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads as DDPStrategy does, but a local file of Lightning's default kind is mapped: every rank reads it, and
        a machine need not hold it once for each."""
        load = self.checkpoint_io.load_checkpoint
        same = type(self.checkpoint_io).__name__ == "TorchCheckpointIO" and "weights_only" in signature(load).parameters
        if same and zipfile.is_zipfile(Path(checkpoint_path)):
            found = torch.load(checkpoint_path, map_location="cpu", weights_only=weights_only, mmap=True)
            # Others keep what they load, such as ModelCheckpoint its scores; one of them would keep the whole file.
            return {name: each if name in _MAPPED else tree_map(_copied, each) for name, each in found.items()}
        return dict(super().load_checkpoint(checkpoint_path, *(() if weights_only is None else (weights_only,))))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """States of this strategy or any other that saves torch's layout."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            plain(optimizer).load_state_dict(state)

    def _elixir_saved_bytes(self, trainer: Any) -> int:
        """Bytes of the weights and states that this rank has together while Lightning saves them."""
        weights_only = [getattr(each, "save_weights_only", False) for each in trainer.checkpoint_callbacks]
        if not weights_only or not self.is_global_zero:
            return 0
        averaged = self._elixir_options.get("ema") is not None
        return state_dict_bytes(self.lightning_module, () if all(weights_only) else self.optimizers, averaged=averaged)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves as DDPStrategy does, and writes the plan next to the checkpoint.

        Under a plan Lightning's default file is written as it is made: Lightning would first have a copy in memory.
        """
        copies = type(self.checkpoint_io).__name__ == "TorchCheckpointIO" and storage_options is None
        if not (self._elixir_runs and copies and "://" not in str(filepath)):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        elif self.is_global_zero:
            FILES.make_folder(Path(filepath).parent)
            FILES.write_new(filepath, partial(torch.save, checkpoint))
        if self._elixir_runs:
            self.elixir.save_plan(Path(filepath).parent)

    def teardown(self) -> None:
        """Tears down as DDPStrategy does, but the model stays where the plan has it, for a validation after
        training."""
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            part.teardown()

    @property
    def _elixir_runs(self) -> bool:
        return self.elixir is not None and self.elixir.module.module is self.lightning_module


def plain(optimizer: Any) -> Any:
    """The ElixirOptimizer in a LightningOptimizer, which inherits its methods but not what they work on."""
    return getattr(optimizer, "optimizer", optimizer)


def _copied(item: Any) -> Any:
    return item.clone() if isinstance(item, torch.Tensor) else item


def _nowhere(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros((), device="meta")
