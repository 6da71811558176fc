"""`ElixirTrainer`: transformers' Trainer under a plan. `with_elixir` does it to any class derived from Trainer.

    trainer = ElixirTrainer(model, args, train_dataset=data, elixir={"device_memory": "20GiB"})
    print(trainer.plan())
    trainer.train()

A mixin: `_wrap_model`, where Trainer would wrap for DDP, plans and wraps. By then the optimizer is made. As with DDP,
``trainer.model`` stays the plain model and ``trainer.model_wrapped`` is ours: callbacks, PEFT and ``generate`` see what
they know.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn

from elixir.errors import InputError
from elixir.hardware.process_memory import give_back_freed
from elixir.integrations.accelerate import SETTLED as OF_ACCELERATOR
from elixir.integrations.accelerate import ElixirAccelerator, logger
from elixir.integrations.optimizer_list import OptimizerList, as_one
from elixir.integrations.run import Options, Planned, Run, plan_made, read_options, refuse_all
from elixir.models.step import generation_step, planning_batch
from elixir.models.together import Together, together
from elixir.models.user_code import GENERATORS, restored
from elixir.plan.plan import Plan
from elixir.tracer.use_order import memory_alone
from elixir.wrapper.account.plan_promise import state_dict_bytes

try:
    from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
except ImportError as error:
    raise ImportError("this needs the package transformers: pip install 'transformers>=5.0'") from error

SETTLED = OF_ACCELERATOR | {
    "accumulation": "gradient_accumulation_steps",
    "dtype": "bf16 or fp16",
    "device": "TrainingArguments",
    "max_norm": "max_grad_norm",
    "clipping": "max_grad_norm",
    "step_fn": "Trainer.compute_loss",
}
"""Arguments of `elixir.wrap` that a Trainer settles -> the training argument that does."""


OWN = ("log",)
"""Options next to those of `elixir.wrap`: ``log="all"`` logs the whole report of a step, not `LOGGED` alone."""
LOGGED = ("elixir/step_s", "elixir/tokens_per_s", "elixir/device_peak_bytes")
"""Numbers of the last step in each line of the log. The last is measured on CUDA only."""

_METRICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"nanmin": torch.amin, "nanmax": torch.amax}
"""Functions of TRL's module -> functions of the same shape that ask for no value."""


@dataclass
class ElixirTrainingArguments(TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` with `elixir`, so that a script takes ``--elixir options.json``."""

    # HfArgumentParser takes no dict[str, Any].
    elixir: dict | str | None = field(  # type: ignore[type-arg]
        default=None,
        metadata={"help": 'Arguments of elixir.wrap: JSON such as \'{"device_memory": "20GiB"}\', or a JSON file.'},
    )

    def __post_init__(self) -> None:
        self.elixir = read_options(self.elixir, SETTLED, OWN)
        super().__post_init__()


_Base: Any = Trainer if TYPE_CHECKING else object


class ElixirMixin(_Base):  # type: ignore[misc]
    """Comes before a Trainer among the bases of a class.

    Args:
        args, kwargs: of the Trainer. ``optimizers=([muon, adamw], scheduler)`` may have several optimizers in a list,
            and so may what a factory in ``optimizer_cls_and_kwargs`` returns.
        elixir: arguments of `elixir.wrap`, on top of those in `ElixirTrainingArguments`, and `OWN`. ``inp`` is the
            batch to plan for; otherwise it is made of the longest samples of the training data.

    Raises:
        InputError: an option repeats a training argument, or something is configured that cannot run under a plan.
    """

    elixir: Run | None = None
    """The wrapped model and its optimizer; None before `train`."""
    optimizer: Any
    _elixir_only_plan = False

    def __init__(self, *args: Any, elixir: Options = None, **kwargs: Any) -> None:
        self._elixir_options = read_options(elixir, SETTLED, OWN)
        self._elixir_loader: Any = None
        self._elixir_weights: Path | None = None
        self._elixir_batches: list[Any] = []  # the micro-batches of the step that Trainer takes now
        self._elixir_losses: list[Any] = []  # of those that have run before Trainer asks for them
        super().__init__(*args, **kwargs)

    def plan(self) -> Plan:
        """The plan that `train` would run, found by preparing for it up to there; nothing is loaded or trained.

        Raises:
            PlanError: nothing fits; says what is needed and what would help.
        """
        if self.elixir is not None:
            return self.elixir.module.plan
        try:
            with patch.object(self, "_elixir_only_plan", True), restored(*GENERATORS):
                return plan_made(self.train, "train()")
        finally:
            self.is_in_train = False
            if getattr(self, "neftune_noise_alpha", None) is not None:
                self.neftune_hook_handle.remove()

    # --- Where the model lives ----------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the Accelerator as Trainer does, then turns it into an `ElixirAccelerator`."""
        super().create_accelerator_and_postprocess()
        options = {**(getattr(self.args, "elixir", None) or {}), **self._elixir_options}
        self._elixir_log = options.pop("log", "brief")
        if self._elixir_log not in ("brief", "all"):
            raise InputError(f"elixir={{'log': {self._elixir_log!r}}}: log is 'brief', or 'all' for the whole report")
        self._elixir_refuse(options)
        ElixirAccelerator.adopt(self.accelerator, options)
        if self.args.n_gpu > 1:
            logger.warning("%d GPUs are visible, one is used: start one process for each, by torchrun", self.args.n_gpu)
            self.args._n_gpu = 1

    def _elixir_refuse(self, options: dict[str, Any]) -> None:
        args = self.args
        dtype = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        optim = str(getattr(args.optim, "value", args.optim))
        refused = {
            "auto_find_batch_size would try batches that are not planned for; ask `elixir fit`, or trainer.plan()": (
                args.auto_find_batch_size
            ),
            "bf16_full_eval and fp16_full_eval: evaluation runs in the plan's dtype; set bf16 or fp16 instead": (
                (args.bf16_full_eval and dtype != "bf16") or (args.fp16_full_eval and dtype != "fp16")
            ),
            "sync_ref_model writes to the reference, whose weights the plan holds; leave it out": getattr(
                args, "sync_ref_model", False
            ),
            "use_vllm would generate with a second copy of the weights, which no plan counts; leave it out, so that "
            "transformers generates under the plan": getattr(args, "use_vllm", False),
            f"optim={optim!r} keeps states by itself; use optim='adamw_torch', whose states the plan places, with "
            "elixir={'moments': '8bit'} for moments in 8 bits, which round to other bits than bitsandbytes'": any(
                word in optim for word in ("8bit", "paged")
            ),
        }
        refuse_all(refused)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Does nothing: the plan says where weights go, and a model that is too big, or on meta, must not be moved."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the optimizer as Trainer does; a list of several, given or made by a factory, becomes one."""
        made = super().create_optimizer(*args, **kwargs)
        if isinstance(made, (list, tuple)):
            self.optimizer = OptimizerList(made)
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        """Returns the loader that Trainer makes, and keeps it for planning."""
        self._elixir_loader = super().get_train_dataloader()
        return self._elixir_loader

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self.elixir is not None and self.elixir.model is self.model:
            return self.elixir.module
        if not training:
            if any(parameter.is_meta for parameter in model.parameters()):
                raise InputError("evaluation needs weights, but the model is on meta until train() wraps it")
            return super()._wrap_model(model, training=False)
        if self.elixir is not None:
            self.elixir.module.close()  # a new model has come from model_init
        more: dict[str, Any] = {
            "accumulation": self.args.gradient_accumulation_steps,
            "inp": lambda: rows_of(self, self._elixir_loader),
            "step_fn": self._elixir_step,
            "between_steps": self._elixir_saved_bytes(),
            **({"max_norm": self.args.max_grad_norm} if self.args.max_grad_norm > 0 else {}),
            **({"weights": self._elixir_weights} if self._elixir_weights is not None else {}),
        }
        self.model.train()
        planned, trainable = self._elixir_models(), []
        for other in self._elixir_others().values():
            trainable += [each for each in other.parameters() if each.requires_grad]
            other.requires_grad_(False)  # no optimizer has it
        if self._elixir_only_plan:
            try:
                raise Planned(self.accelerator.dry_run(planned, self.optimizer, **more))
            finally:
                for each in trainable:
                    each.requires_grad_(True)
        self.elixir = self.accelerator.wrap(planned, self.optimizer, **more)
        if not isinstance(self.optimizer, OptimizerList):
            self.optimizer = self.elixir.optimizers[0]
        return self.elixir.module

    def _elixir_others(self) -> dict[str, nn.Module]:
        """Models that the trainer runs next to the one it trains, by attribute, such as ``ref_model``."""
        own = set(self.model.modules())
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, nn.Module)
            and name not in ("model", "model_wrapped")
            and value not in own
            and next(value.parameters(), None) is not None
        }

    def _elixir_models(self) -> nn.Module:
        """The model; together with the others if there are any, or if it is its own reference, without adapters."""
        own: nn.Module = self.model
        others = self._elixir_others()
        if not others and not hasattr(self, "ref_model"):
            return own
        if self._elixir_weights is not None or "weights" in self.accelerator._elixir_options:
            if not others:
                return own
            raise InputError(
                f"weights= cannot be read into a model next to {', '.join(others)}; load all models before the Trainer "
                "is made"
            )
        return together(model=own, **others)

    def _elixir_step(self, model: Any, batch: Any) -> None:
        """The step that is traced, as `training_step` runs it."""
        twins = dict(model.models()) if isinstance(model, Together) else {"model": model}
        twin = twins["model"]
        with twin_shown(self, {**twins, "model_wrapped": twin}):
            if not isinstance(batch, Mapping):  # samples, of which the trainer makes its batch
                batch = batch_made(self, batch, twin)
            labels = batch.get("labels")
            # Counted without Trainer's collective: only rank 0 traces.
            items = labels.ne(-100).sum() if isinstance(labels, torch.Tensor) else None
            self.compute_loss(twin, dict(batch), num_items_in_batch=items).backward()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the micro-batches of a step, and keeps them for `training_step`."""
        found = super().get_batch_samples(*args, **kwargs)
        self._elixir_batches, self._elixir_losses = list(found[0]), []
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Trains on one micro-batch; if the plan takes several in a pass, the first of a step runs all of them."""
        step, batches = super().training_step, self._elixir_batches
        if self.elixir is None or model is not self.elixir.module or model.plan.pass_size == 1 or not batches:
            return step(model, inputs, num_items_in_batch)
        if inputs is batches[0]:
            self._elixir_losses = self.elixir.optimizers[0].accumulate(
                lambda module, batch: step(module, batch, num_items_in_batch), batches
            )
        return self._elixir_losses.pop(0)

    def _has_mixed_mesh_grads(self, model: Any) -> bool:
        return False

    # --- Weights and states -------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # All ranks come here, and Trainer's own leaves at once on those that do not save: so this gathers.
        if state_dict is None and self.elixir is not None:
            only = self._elixir_adapters if hasattr(self.model, "peft_config") else None
            rank0_only = not self.args.save_on_each_node
            state_dict = self.elixir.state_dict(rank0_only=rank0_only, only=only)
            self.elixir.save_plan(self.args.output_dir)
        super()._save(output_dir, state_dict=state_dict)

    def _elixir_saved_bytes(self) -> int:
        """Bytes of the weights that this rank has together while Trainer saves them."""
        args = self.args
        if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no" or not args.should_save:
            return 0
        has_adapters = hasattr(self.model, "peft_config")
        return state_dict_bytes(self.model, only=partial(self._elixir_adapters, "") if has_adapters else None)

    def _elixir_adapters(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether PEFT may save a parameter: one that is trained, or an embedding, which it saves if it was resized."""
        around = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        embeddings = [each for part in around if part is not None for each in part.parameters()]
        return parameter.requires_grad or any(each is parameter for each in embeddings)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.elixir is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.elixir.save(output_dir, frozen=False)  # what is frozen is in the model's file, or in its base's
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.elixir is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._elixir_weights = None
        whole = os.path.join(checkpoint, "optimizer.pt")
        if not self.elixir.load(checkpoint):
            if os.path.isfile(whole):  # a plain Trainer's
                states = torch.load(whole, map_location="cpu", weights_only=True)
                as_one(self.elixir.optimizers).load_state_dict(states)
            else:
                logger.warning("%s has no optimizer states, so they begin anew", checkpoint)
        scheduler = os.path.join(checkpoint, "scheduler.pt")
        if os.path.isfile(scheduler):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        into = self.model if model is None else model
        give_back_freed()  # of steps before, since Trainer has all weights in memory while it loads them
        if self.elixir is not None or not any(parameter.is_meta for parameter in into.parameters()):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        if hasattr(into, "peft_config"):
            raise InputError("adapters cannot be resumed over a base on meta; load the base with from_pretrained()")
        # What is loaded into meta parameters would be lost without a word; wrapping reads it chunk by chunk.
        self._elixir_weights = Path(resume_from_checkpoint)

    # --- The log ------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs as Trainer does; the log of training also gets numbers of the last step's report, under ``elixir/``."""
        if self.elixir is not None and "loss" in logs:
            numbers = self.elixir.numbers()
            brief = {name: numbers[name] for name in LOGGED if name in numbers}
            logs |= numbers if self._elixir_log == "all" else brief
        super().log(logs, *args, **kwargs)


class ElixirTrainer(ElixirMixin, Trainer):  # type: ignore[misc]
    """transformers.Trainer under a plan; see `ElixirMixin`."""


class ElixirSeq2SeqTrainer(ElixirMixin, Seq2SeqTrainer):  # type: ignore[misc]
    """transformers.Seq2SeqTrainer under a plan; generation goes on until all ranks have ended."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as Seq2SeqTrainer does, with ranks in step."""
        return super().evaluate(*args, **self._elixir_synced(kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predicts as Seq2SeqTrainer does, with ranks in step."""
        return super().predict(*args, **self._elixir_synced(kwargs))

    def _elixir_synced(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"synced_gpus": True, **kwargs} if self.args.world_size > 1 else kwargs


def with_elixir(trainer: type) -> type:
    """A class derived from Trainer, such as TRL's ``SFTTrainer``, that trains under a plan and takes ``elixir=``.

    Raises:
        InputError: it is no class derived from Trainer.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise InputError(f"with_elixir() takes a class derived from transformers.Trainer, got {trainer!r}")
    base = ElixirSeq2SeqTrainer if issubclass(trainer, Seq2SeqTrainer) else ElixirMixin
    return type(f"Elixir{trainer.__name__}", (base, trainer), {"__doc__": trainer.__doc__})


def rows_of(trainer: Any, loader: Any) -> Any:
    """The batch to plan for: the longest samples; for a trainer that generates, each as often as it will be there."""
    rank_rows = trainer.args.train_batch_size
    per_sample = getattr(trainer, "num_generations", None)
    if per_sample is None:
        return planning_batch(loader, batch_size=rank_rows)
    rows = rank_rows * (getattr(trainer.args, "steps_per_generation", None) or 1)
    samples = planning_batch(loader, batch_size=-(-rows // per_sample))
    return [dict(samples[number // per_sample % len(samples)]) for number in range(rows)]


@contextmanager
def generation_traced(trainer: Any, model: nn.Module) -> Iterator[None]:
    """While open, `model` generates the most tokens that it may in two calls, and rewards are zeros.

    A trace knows no token that follows from weights, so it cannot run the loop; rewards are functions of the user's,
    which may be slow or write somewhere.
    """

    def generate(input_ids: torch.Tensor, *, generation_config: Any, **_: Any) -> torch.Tensor:
        new = generation_config.max_new_tokens
        generation_step(input_ids.shape[1], new)(model, {"input_ids": input_ids})
        ends = set(getattr(trainer, "eos_token_ids", ()))
        token = next(number for number in range(len(ends) + 1) if number not in ends)
        return torch.cat([input_ids, torch.full_like(input_ids[:, :1], token).expand(-1, new)], dim=1)

    def rewards(inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(len(inputs), len(trainer.reward_funcs))

    has_rewards = hasattr(trainer, "_calculate_rewards")
    scored = patch.object(trainer, "_calculate_rewards", rewards) if has_rewards else nullcontext()
    with patch.object(model, "generate", generate), scored:
        yield


def batch_made(trainer: Any, samples: Any, model: nn.Module) -> dict[str, Any]:
    """The batch that the trainer makes of samples, where the traced model is; calls of the model for it count by their
    memory."""
    with memory_alone(), generation_traced(trainer, model):
        batch = trainer._prepare_inputs(samples)
    device = next(model.parameters()).device
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@contextmanager
def twin_shown(trainer: Any, models: dict[str, nn.Module]) -> Iterator[None]:
    """While open, the trainer's attributes of these names are the traced models, in a step of a whole accumulation.

    The least and the most of metrics, which TRL finds by asking for values, are those of tensors without NaN.
    """
    shown: dict[str, Any] = {**models, "current_gradient_accumulation_steps": trainer.args.gradient_accumulation_steps}
    with ExitStack() as patched:
        patched.enter_context(patch.multiple(trainer, create=True, **shown))
        for name, least in _METRICS.items():
            for owner in {kind.__module__ for kind in type(trainer).__mro__} & sys.modules.keys():
                if hasattr(sys.modules[owner], name):
                    patched.enter_context(patch.object(sys.modules[owner], name, least))
        yield
