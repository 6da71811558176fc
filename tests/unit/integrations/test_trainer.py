"""transformers.Trainer under a plan logs, predicts, saves and resumes as without one, to the bit."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import DataCollatorWithFlattening, HfArgumentParser, LlamaForCausalLM, Trainer

import elixir
from elixir.errors import ArtifactError, InputError, InputTypeError, TraceError
from elixir.integrations import accelerate
from elixir.integrations.optimizer_list import OptimizerList
from elixir.integrations.transformers import ElixirTrainer, ElixirTrainingArguments, with_elixir
from elixir.plan.plan import Plan
from tests.common.trainers import PLAIN, Trained, arguments, llama, logged, make, muon_and_adamw, rows, train

ROOMY = {"device_memory": "64MiB", "host_budget": "64MiB"}
ON_HOST = {**ROOMY, "placement": "cpu"}
PLANS = {
    "resident": {**ROOMY, "placement": "cuda"},
    "on the host": ON_HOST,
    "tight": {**ROOMY, "device_memory": "90KiB"},
}
SHORT_ARGUMENTS = {
    "num_train_epochs": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": False,
}
SHORT = {**SHORT_ARGUMENTS, "samples": 5}


def same(one: Path, other: Path, name: str = "model.safetensors") -> bool:
    """Whether two saved files have the same bits."""
    first, second = load_file(one / name), load_file(other / name)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def drawn_next() -> list[Any]:
    """States of the global generators, in short."""
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002


def assert_same(plain: Trained, ours: Trained) -> None:
    assert ours.history == plain.history
    assert np.array_equal(ours.predictions, plain.predictions)


def test_logs_predicts_and_saves_what_trainer_does(tmp_path: Path) -> None:
    plain = train(PLAIN, tmp_path / "plain", samples=5, num_train_epochs=1)
    ours = train(ElixirTrainer, tmp_path / "ours", samples=5, num_train_epochs=1, elixir=ON_HOST)
    assert_same(plain, ours)
    assert same(tmp_path / "plain" / "final", tmp_path / "ours" / "final")
    first = ours.trainer.state.log_history[0]
    assert first["elixir/tokens_per_s"] > 0
    assert {name for name in first if name.startswith("elixir/")} == {"elixir/step_s", "elixir/tokens_per_s"}
    assert Plan.load(tmp_path / "ours" / "elixir_plan.json").placement == "cpu"
    module = ours.trainer.elixir.module
    assert all(chunk.state_home == "host" for chunk in module.plan.chunks)
    assert not module.last_report.surprises()  # accumulation is planned for
    ours.trainer.model.zero_grad()  # the plain model's own, which some callbacks call
    module.close()


def test_muon_and_adamw_in_a_list_train_and_are_resumed(tmp_path: Path) -> None:
    def several(kind: type) -> dict[str, Any]:
        model = llama()
        made = muon_and_adamw(model)
        return {"model": model, "optimizers": (OptimizerList(made) if kind is PLAIN else made, None), "samples": 10,
                "num_train_epochs": 1, "load_best_model_at_end": False, "lr_scheduler_type": "linear"}  # fmt: skip

    averaging = {**ON_HOST, "ema": 0.9}  # changes no weight; a checkpoint of plain PyTorch has no average
    plain = train(PLAIN, tmp_path / "plain", **several(PLAIN))
    ours = train(ElixirTrainer, tmp_path / "ours", elixir=averaging, **several(ElixirTrainer))
    assert_same(plain, ours)
    assert same(tmp_path / "plain" / "final", tmp_path / "ours" / "final")
    assert ours.trainer.elixir.module.plan.optimizer.startswith("Muon + AdamW")
    assert ours.trainer.elixir.module.plan.optimizer.endswith(" + EMA")
    assert [group["lr"] for group in ours.trainer.optimizer.param_groups] == [0.0, 0.0]  # both were scheduled
    ours.trainer.elixir.module.close()
    for part in ("plain", "ours"):
        shutil.copytree(tmp_path / part / "checkpoint-2", tmp_path / f"from-{part}" / "checkpoint-2")
        checkpoint = str(tmp_path / f"from-{part}" / "checkpoint-2")
        resumed = train(
            ElixirTrainer, tmp_path / f"from-{part}", elixir=averaging, resume=checkpoint, **several(ElixirTrainer)
        )
        assert same(tmp_path / "plain" / "final", tmp_path / f"from-{part}" / "final")
        resumed.trainer.elixir.module.close()


def test_micro_batches_of_a_step_pass_each_layer_together(tmp_path: Path) -> None:
    more: dict[str, Any] = {"samples": 5, "num_train_epochs": 1, "gradient_checkpointing": True}
    plain = train(PLAIN, tmp_path / "plain", **more)
    ours = train(ElixirTrainer, tmp_path / "ours", elixir={**ON_HOST, "pass_size": 2, "log": "all"}, **more)
    assert_same(plain, ours)  # the last step has one micro-batch
    first = ours.trainer.state.log_history[0]
    assert {"elixir/micro_batches", "elixir/loads"} < set(first)
    assert not {"elixir/network_bytes", "elixir/waited_for_disk_s"} & set(first)  # of lanes that it does not use
    module = ours.trainer.elixir.module
    assert module.plan.pass_size == 2
    assert module.last_report.micro_batches == 1  # one pass, with one backward
    module.close()


@pytest.mark.sampled
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["tight", "resident"])
def test_flattened_batches_train_as_without_a_plan(name: str, checkpointed: bool, tmp_path: Path) -> None:
    """Documents of other lengths lie in each row; the largest row was planned."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=checkpointed, return_tensors="pt")
    documents = [{key: row[key] for key in ("input_ids", "labels")} for row in rows(14, 0)]
    runs = {}
    for kind, more in ((PLAIN, {}), (ElixirTrainer, {"elixir": PLANS[name]})):
        folder = tmp_path / kind.__name__
        args = arguments(folder, **SHORT_ARGUMENTS, gradient_checkpointing=checkpointed)
        trainer = kind(model=llama(), args=args, train_dataset=documents, data_collator=collator, **more)
        trainer.train()
        trainer.save_model(str(folder / "final"))
        runs[kind] = (logged(trainer), folder / "final", trainer)
    (plain, saved, _), (mine, ours, trainer) = runs.values()
    assert plain == mine
    assert same(saved, ours)
    module = trainer.elixir.module
    longest = sorted(len(row["input_ids"]) for row in documents)[-2:]
    assert (module.plan.step.packed, module.plan.step.tokens) == ("2", sum(longest))
    assert any(not chunk.resident for chunk in module.plan.chunks) == (name == "tight")
    module.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_goes_on_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"gradient_checkpointing": True} if name == "tight" else {}
    plain = train(PLAIN, tmp_path / "plain", **more)
    ours = train(ElixirTrainer, tmp_path / "ours", elixir=PLANS[name], **more)
    if name == "tight":
        assert any(not chunk.resident for chunk in ours.trainer.elixir.module.plan.chunks)
    assert_same(plain, ours)
    again = llama()
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "ours" / "final")
    again.load_state_dict(load_file(tmp_path / "plain" / "final" / "model.safetensors"), strict=False)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), again.parameters(), strict=True))
    for part in ("plain", "ours"):
        shutil.copytree(tmp_path / part / "checkpoint-2", tmp_path / f"from-{part}" / "checkpoint-2")
        checkpoint = str(tmp_path / f"from-{part}" / "checkpoint-2")
        # Also from a plain Trainer's, whose optimizer states are in one file.
        resumed = train(ElixirTrainer, tmp_path / f"from-{part}", elixir=PLANS[name], resume=checkpoint, **more)
        assert resumed.history == plain.history
        assert same(tmp_path / "plain" / "final", tmp_path / f"from-{part}" / "final")


@pytest.mark.slow
def test_a_plain_trainer_goes_on_once_it_has_the_states(tmp_path: Path) -> None:
    """The order of calls is that of docs/integrations.md."""
    plain = train(PLAIN, tmp_path / "plain")
    train(ElixirTrainer, tmp_path / "ours", elixir=ON_HOST)
    checkpoint = tmp_path / "again" / "checkpoint-2"
    shutil.copytree(tmp_path / "ours" / "checkpoint-2", checkpoint)
    with elixir.open_checkpoint(checkpoint / "elixir") as saved:
        torch.save(saved.optimizer_state_dict(), checkpoint / "optimizer.pt")
    assert train(PLAIN, tmp_path / "again", resume=str(checkpoint)).history == plain.history


@pytest.mark.slow
def test_a_model_on_meta_is_resumed_with_its_weights(tmp_path: Path) -> None:
    ours = train(ElixirTrainer, tmp_path / "ours", elixir=ON_HOST)
    with torch.device("meta"):
        model = llama()
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    resumed = train(ElixirTrainer, tmp_path / "again", model=model, elixir=ON_HOST, resume=checkpoint)
    assert resumed.history[2:] == ours.history[2:]


@pytest.mark.slow
def test_adapters_are_saved_and_equal(tmp_path: Path) -> None:
    plain = train(PLAIN, tmp_path / "plain", lora=True)
    ours = train(ElixirTrainer, tmp_path / "ours", lora=True, elixir=ON_HOST)
    frozen = [chunk for chunk in ours.trainer.elixir.module.plan.chunks if not chunk.trainable]
    assert frozen
    assert any(not chunk.resident for chunk in frozen)
    assert_same(plain, ours)
    assert same(tmp_path / "plain" / "final", tmp_path / "ours" / "final", "adapter_model.safetensors")
    trained = load_file(tmp_path / "ours" / "final" / "adapter_model.safetensors")
    assert all(value.abs().sum() > 0 for value in trained.values())
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    resumed = train(ElixirTrainer, tmp_path / "ours", lora=True, elixir=ON_HOST, resume=checkpoint)
    assert resumed.history == plain.history


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"label_smoothing_factor": 0.1}, {"neftune_noise_alpha": 5.0}, {"max_grad_norm": 0.0}], ids=str
)
def test_other_losses_are_traced_as_they_are(more: dict[str, Any], tmp_path: Path) -> None:
    plain = train(PLAIN, tmp_path / "plain", **SHORT, **more)
    trainer = make(ElixirTrainer, tmp_path / "ours", elixir=ON_HOST, **SHORT, **more)
    before = drawn_next()
    trainer.plan()  # draws nothing, and leaves nothing that changes training
    assert drawn_next() == before
    trainer.train()
    assert logged(trainer) == [entry for entry in plain.history if "test_loss" not in entry]


class OwnLoss:
    """A Trainer's own loss."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class PlainOwn(OwnLoss, Trainer):
    pass


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(rows(10, 0))


@pytest.mark.slow
def test_a_derived_trainer_over_a_stream(tmp_path: Path) -> None:
    more = {**SHORT, "max_steps": 3, "train_dataset": Stream()}
    runs = [
        train(PlainOwn, tmp_path / "plain", **more),
        train(with_elixir(PlainOwn), tmp_path / "ours", elixir=ON_HOST, **more),
        train(PlainOwn, tmp_path / "after", **more),  # nothing global has changed
    ]
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


@pytest.mark.slow
def test_bfloat16_is_the_dtype_of_the_plan(tmp_path: Path) -> None:
    plain = train(PLAIN, tmp_path / "plain", **SHORT, bf16=True)
    ours = train(ElixirTrainer, tmp_path / "ours", elixir=ON_HOST, **SHORT, bf16=True)
    assert ours.trainer.elixir.module.plan.dtype == "bfloat16"
    assert ours.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], abs=0.02)
    assert {value.dtype for value in load_file(tmp_path / "ours" / "final" / "model.safetensors").values()} == {
        torch.float32
    }


@pytest.mark.slow
def test_a_step_that_overflows_moves_no_schedule(tmp_path: Path) -> None:
    ours = train(
        ElixirTrainer, tmp_path, elixir={**ON_HOST, "initial_scale": 2.0**40}, **SHORT, fp16=True, warmup_steps=0
    )
    rates = [entry["learning_rate"] for entry in ours.history if "learning_rate" in entry]
    assert ours.trainer.elixir.optimizers[0].loss_scale < 2.0**40
    assert len(set(rates)) == 1


@pytest.mark.slow
def test_a_second_run_and_a_new_model_are_wrapped(tmp_path: Path) -> None:
    trainer = make(ElixirTrainer, tmp_path, elixir=ON_HOST, **SHORT)
    assert trainer.evaluate()["eval_loss"] > 0  # before training: the plain model
    trainer.train()
    first = trainer.elixir
    trainer.train()
    assert trainer.elixir is first
    again = make(ElixirTrainer, tmp_path / "again", elixir=ON_HOST, **SHORT)
    again.model_init = lambda: llama()
    again.train()
    before = again.elixir.module
    again.train()
    assert again.elixir.module is not before


@pytest.mark.parametrize(
    ("elixir", "more", "says"),
    [
        ({"accumulation": 4}, {}, "comes from gradient_accumulation_steps"),
        ({"dtype": "bf16"}, {}, "comes from bf16 or fp16"),
        ({"device_memroy": "1GiB"}, {}, "did you mean device_memory"),
        ("nowhere.json", {}, "nowhere.json: cannot be read"),
        ({"log": "some"}, {}, "log is 'brief', or 'all' for the whole report"),
        ({}, {"auto_find_batch_size": True}, "elixir fit"),
        ({}, {"bf16_full_eval": True}, "the plan's dtype"),
        ({}, {"optim": "adamw_bnb_8bit"}, "'8bit'"),
        ({}, {"optim": "paged_adamw_8bit"}, "'8bit'} for moments in 8 bits, which round to other bits"),
        ({}, {"optim": "paged_adamw_32bit"}, "use optim='adamw_torch', whose states the plan places"),
    ],
    ids=str,
)
def test_refuses_before_planning(elixir: Any, more: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises((ArtifactError, InputError, InputTypeError), match=says):
        make(ElixirTrainer, tmp_path, elixir=elixir, **SHORT, **more)


def test_refuses_a_model_on_meta_whose_weights_are_not_there(tmp_path: Path) -> None:
    with torch.device("meta"):
        models = llama(), llama(lora=True)
    trainer, adapters = (make(ElixirTrainer, tmp_path, model=model, elixir=ON_HOST, **SHORT) for model in models)
    with pytest.raises(InputError, match="evaluation needs weights"):
        trainer.evaluate()
    with pytest.raises(InputError, match="adapters cannot be resumed over a base on meta"):
        adapters._load_from_checkpoint(str(tmp_path))


def test_uses_one_gpu_of_several(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path, **SHORT_ARGUMENTS)
    args._n_gpu = 4
    with caplog.at_level("WARNING", "elixir"):
        trainer = make(ElixirTrainer, tmp_path, args=args, elixir=ON_HOST)
    assert trainer.args.n_gpu == 1
    assert "4 GPUs are visible, one is used: start one process for each" in caplog.text


def test_options_come_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "elixir.json"
    file.write_text(json.dumps(ON_HOST))
    parser = HfArgumentParser(ElixirTrainingArguments)
    for given in (str(file), json.dumps(ON_HOST)):
        (found,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--elixir", given, "--use_cpu"])
        assert found.elixir == ON_HOST
    args = arguments(tmp_path, ElixirTrainingArguments, elixir=ON_HOST)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(accelerate, "dry_run", lambda model, optimizers, **options: asked.update(options))
    make(ElixirTrainer, tmp_path, args=args, elixir={"replan": False}).plan()
    assert asked.items() >= {**ON_HOST, "replan": False}.items()
    with pytest.raises(InputError, match="derived from"):
        with_elixir(dict)


class Gathering(Trainer):
    in_loss = False

    def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
        loss = model(**inputs).loss
        gathered = self.accelerator.gather({"loss": loss, "rows": loss[None]})
        assert [tuple(value.shape) for value in gathered.values()] == [(3,), (3,)]
        assert self.accelerator.reduce(loss, "mean").shape == loss.shape
        return gathered["loss"].mean() if self.in_loss else loss


def test_rank_0_traces_a_step_that_gathers_without_waiting_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(with_elixir(Gathering), tmp_path, elixir=ON_HOST, **SHORT)
    for name, value in {"use_distributed": True, "num_processes": 3}.items():
        monkeypatch.setattr(type(trainer.accelerator), name, value)
    trainer.plan()
    trainer.in_loss = True  # no gradient goes through a collective of an Accelerator
    with pytest.raises(TraceError, match="does not require grad"):
        trainer.plan()


class Measures(Trainer):
    """Keeps a metric of each step, and counts them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.measured: list[float] = []
        self.counted = {"steps": 0}

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        self.measured.append((outputs.logits.argmax(-1) == inputs["input_ids"]).float().mean().item())
        self.counted["steps"] += 1
        return (loss, outputs) if return_outputs else loss
