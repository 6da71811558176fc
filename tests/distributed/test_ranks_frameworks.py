"""Trainer, Accelerate and Lightning on two ranks, and on two replicas of two, under a plan log what they do with DDP, briefly.

One start of ranks for all three, since the imports take most of the time; files, resuming, adapters and other plans are
in the slow tests of each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.common.spawn import as_launched, run_ranks

ON_HOST = {"device_memory": "64MiB", "host_budget": "64MiB", "placement": "cpu"}
TOLERANCE = 1e-6


def of_trainer(folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Both logs: a ragged accumulation, clipping and a schedule."""
    from elixir.integrations.transformers import ElixirTrainer
    from tests.common.trainers import PLAIN, logged, make

    more = {"samples": 14 * options["replicas"], "num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}
    more["load_best_model_at_end"] = False
    plain = make(PLAIN, folder / "plain", **more)
    plain.train()
    ours = make(ElixirTrainer, folder / "ours", elixir=options, **more)
    ours.train()
    assert ours.elixir.module.plan.replicas == options["replicas"]
    ours.elixir.module.close()
    return logged(plain), logged(ours)


def of_accelerate(folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Losses and norms of an epoch."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from elixir.integrations.accelerate import ElixirAccelerator
    from tests.common.accelerated import Loop

    found = []
    for kind, more in ((Accelerator, {}), (ElixirAccelerator, {"elixir": options})):
        AcceleratorState._reset_state(True)
        loop = Loop(kind(cpu=True, gradient_accumulation_steps=2, **more), samples=12 * options["replicas"])
        found.append([{"value": value} for value in loop.epoch()])
    assert loop.accelerator.elixir.module.plan.replicas == options["replicas"]
    loop.accelerator.elixir.module.close()
    return found[0], found[1]


def of_lightning(folder: Path, options: dict[str, Any]) -> tuple[Any, Any]:
    """Both logs: training, validation, the learning rate."""
    from elixir.integrations.lightning import ElixirStrategy
    from tests.common.lit import fitted

    found: list[Any] = []
    ranks = torch.distributed.get_world_size()
    more = {"devices": ranks, "max_epochs": 1, "enable_checkpointing": False, "val_check_interval": 6 // ranks}
    for strategy in ("ddp", ElixirStrategy(**options)):
        done, _ = fitted(strategy, folder, **more)
        found.append(done.logger.plain())
    assert strategy.elixir.module.plan.replicas == options["replicas"]
    strategy.elixir.module.close()
    return found[0], found[1]


def logs(rank: int, world_size: int, folder: Path, replicas: int) -> dict[str, tuple[Any, Any]]:
    as_launched(rank, world_size)
    options = ON_HOST | {"replicas": replicas}
    return {each.__name__: each(folder, options) for each in (of_trainer, of_accelerate, of_lightning)}


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_log_what_ddp_does(tmp_path: Path, replicas: int) -> None:
    for found in run_ranks(2 * replicas, logs, tmp_path, replicas, wait_s=600.0, group_timeout_s=600.0):
        for framework, (plain, ours) in found.items():
            assert len(plain) == len(ours) > 2, framework
            for one, other in zip(plain, ours, strict=True):
                assert other == pytest.approx(one, rel=0, abs=TOLERANCE), framework


# --- Trainer --------------------------------------------------------------------------------------------------------


ROOMY = {"device_memory": "64MiB", "host_budget": "64MiB"}
PLANS = {"on the host": {**ROOMY, "placement": "cpu"}, "resident": {**ROOMY, "placement": "cuda"}}


def trained(rank: int, world_size: int, folder: Path, elixir: dict[str, Any] | None, more: dict[str, Any]) -> Any:
    as_launched(rank, world_size)
    from elixir.integrations.transformers import ElixirTrainer
    from tests.common.trainers import PLAIN, train

    given = {} if elixir is None else {"elixir": elixir}
    done = train(PLAIN if elixir is None else ElixirTrainer, folder, **given, **more)
    if elixir is not None:
        done.trainer.elixir.module.close()
    return done.history


def close(one: Path, other: Path, name: str) -> bool:
    first, second = load_file(one / name), load_file(other / name)
    return first.keys() == second.keys() and all(
        torch.allclose(first[key], second[key], rtol=0, atol=TOLERANCE) for key in first
    )


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_train_as_ddp_does(name: str, lora: bool, tmp_path: Path) -> None:
    more = {"lora": lora, "samples": 14, "gradient_checkpointing": not lora}
    plain = run_ranks(2, trained, tmp_path / "plain", None, more, wait_s=600.0)[0]
    ours = run_ranks(2, trained, tmp_path / "ours", PLANS[name], more, wait_s=600.0)[0]
    assert [entry.keys() for entry in plain] == [entry.keys() for entry in ours]
    for one, other in zip(plain, ours, strict=True):
        assert other == pytest.approx(one, rel=0, abs=TOLERANCE)
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    assert close(tmp_path / "plain" / "final", tmp_path / "ours" / "final", file)
    checkpoint = str(tmp_path / "ours" / "checkpoint-2")
    resumed = run_ranks(2, trained, tmp_path / "ours", PLANS[name], {**more, "resume": checkpoint}, wait_s=600.0)[0]
    assert resumed == ours
    alone = {**more, "resume": checkpoint, "gradient_accumulation_steps": 4}  # as many samples a step as on two ranks
    fewer = run_ranks(1, trained, tmp_path / "fewer", PLANS[name], alone, wait_s=600.0)[0]
    steps = [[entry for entry in log if "loss" in entry] for log in (ours, fewer)]
    assert len(steps[0]) == len(steps[1]) == 4
    # The third step is the first one after the checkpoint, and the last one before two ranks fill up a ragged end.
    two, one = ({name: value for name, value in log[2].items() if name != "epoch"} for log in steps)
    assert one == pytest.approx(two, rel=0, abs=TOLERANCE)


def sft_logged(rank: int, world_size: int, folder: Path, elixir: dict[str, Any] | None) -> Any:
    as_launched(rank, world_size)
    from trl import SFTTrainer

    from elixir.integrations.transformers import with_elixir
    from tests.common.trainers import logged
    from tests.unit.integrations.test_trl import fine_tuned

    kind = SFTTrainer if elixir is None else with_elixir(SFTTrainer)
    done = fine_tuned(kind, folder, elixir=elixir)
    if elixir is not None:
        done.elixir.module.close()
    return logged(done)


@pytest.mark.slow
def test_two_ranks_gather_the_metrics_of_trl_as_ddp_does(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    plain = run_ranks(2, sft_logged, tmp_path / "plain", None, wait_s=600.0)[0]
    ours = run_ranks(2, sft_logged, tmp_path / "ours", PLANS["on the host"], wait_s=600.0)[0]
    assert [entry.keys() for entry in plain] == [entry.keys() for entry in ours]
    for one, other in zip(plain, ours, strict=True):
        assert other == pytest.approx(one, rel=0, abs=TOLERANCE)


# --- Seq2SeqTrainer -------------------------------------------------------------------------------------------------


def generated(rank: int, world_size: int, folder: Path, elixir: dict[str, Any] | None) -> Any:
    as_launched(rank, world_size)
    import torch
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from elixir.integrations.transformers import ElixirSeq2SeqTrainer
    from tests.common.trainers import TIMED, collate, rows

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=30,
        )
    )  # fmt: skip
    args = Seq2SeqTrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=1, max_steps=4,
        learning_rate=2e-2, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=3,
        predict_with_generate=True, generation_max_length=9,
    )  # fmt: skip
    given = {} if elixir is None else {"elixir": elixir}
    kind = Seq2SeqTrainer if elixir is None else ElixirSeq2SeqTrainer
    trainer = kind(model=model, args=args, train_dataset=rows(12, 0), data_collator=collate, **given)
    trainer.train()
    said = trainer.predict(rows(6, 1)).predictions
    log = [
        {name: value for name, value in entry.items() if not any(part in name for part in TIMED)}
        for entry in trainer.state.log_history
    ]
    if elixir is not None:
        trainer.elixir.module.close()
    return log, said.tolist()


@pytest.mark.slow
def test_two_ranks_generate_what_they_do_with_ddp(tmp_path: Path) -> None:
    plain = run_ranks(2, generated, tmp_path / "plain", None, wait_s=600.0)
    ours = run_ranks(2, generated, tmp_path / "ours", ON_HOST, wait_s=600.0)
    tokens = [sum(map(bool, row)) for row in ours[0][1]]
    assert len(set(tokens)) > 1  # a rank that is done goes on for the other one
    assert max(tokens) <= 8  # generation_max_length holds, less the token that starts
    for (log, said), (log_of_ours, said_of_ours) in zip(plain, ours, strict=True):
        assert said_of_ours == said
        for entry, entry_of_ours in zip(log, log_of_ours, strict=True):
            assert entry_of_ours == pytest.approx(entry, rel=0, abs=1e-6)


# --- Accelerate -----------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]


def looped(rank: int, world_size: int, folder: Path, options: dict[str, Any] | None) -> Any:
    """Losses and norms of two epochs, of one more from the checkpoint between them, and the weights after two."""
    as_launched(rank, world_size)
    from accelerate import Accelerator

    from elixir.integrations.accelerate import ElixirAccelerator
    from tests.common.accelerated import Loop

    more = {"cpu": True, "gradient_accumulation_steps": 2}
    accelerator = Accelerator(**more) if options is None else ElixirAccelerator(elixir=options, **more)
    loop = Loop(accelerator, samples=12)
    found = [loop.epoch()]
    accelerator.save_state(str(folder))
    found.append(loop.epoch())
    weights = {name: value.tolist() for name, value in loop.weights().items()}
    accelerator.load_state(str(folder))
    found.append(loop.epoch())
    if options is not None:
        accelerator.elixir.module.close()
    return found, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_two_ranks_loop_as_ddp_does(name: str, tmp_path: Path) -> None:
    plain = run_ranks(2, looped, tmp_path / "plain", None, wait_s=600.0)
    ours = run_ranks(2, looped, tmp_path / "ours", PLANS[name], wait_s=600.0)
    for (losses, _), (losses_of_ours, _) in zip(plain, ours, strict=True):
        assert losses_of_ours == [pytest.approx(epoch, rel=0, abs=TOLERANCE) for epoch in losses]
    weights = {name.removeprefix("module."): value for name, value in plain[0][1].items()}
    assert weights.keys() == ours[0][1].keys()
    for key, value in weights.items():
        assert torch.allclose(torch.tensor(ours[0][1][key]), torch.tensor(value), rtol=0, atol=TOLERANCE)


SCRIPT = """
from accelerate import Accelerator
from elixir.integrations.accelerate import ElixirAccelerator
from tests.common.accelerated import Loop

plain = Loop(Accelerator(cpu=True), samples=4).epoch()
ours = Loop(ElixirAccelerator(cpu=True, elixir={"device_memory": "64MiB", "host_budget": "64MiB"}), samples=4)
assert ours.accelerator.num_processes == 2
found = ours.epoch()
assert max(abs(one - other) for one, other in zip(found, plain, strict=True)) <= 1e-6, (found, plain)
print("the same on", ours.accelerator.process_index)
ours.accelerator.elixir.module.close()
ours.accelerator.end_training()
"""


@pytest.mark.slow
def test_accelerate_launches_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
    ]
    # Its kind for several processes of one machine; the script and the variable say that they have no GPU.
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [*launch, "0", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", str(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the same on") == 2


# --- Lightning ------------------------------------------------------------------------------------------------------


STRATEGIES = {"on the host": {**ROOMY, "placement_policy": "cpu"}, "resident": {**ROOMY, "placement_policy": "cuda"}}


def fit(rank: int, world_size: int, folder: Path, options: dict[str, Any] | None, resume: Path | None) -> Any:
    """The log, predictions, and the weights of the last checkpoint."""
    as_launched(rank, world_size)
    from lightning.pytorch.callbacks import ModelCheckpoint

    from elixir.integrations.lightning import ElixirStrategy
    from tests.common.lit import data, fitted, states

    strategy = "ddp" if options is None else ElixirStrategy(**options)
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    done, module = fitted(strategy, folder, callbacks=[keep], devices=world_size, resume=resume)
    predicted = torch.cat(done.predict(module, data(8)))
    torch.distributed.barrier()
    weights = states(Path(keep.best_model_path or folder / "step=2.ckpt"))
    if options is not None:
        done.strategy.elixir.module.close()
    return done.logger.plain(), predicted.tolist(), {name: value.tolist() for name, value in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_fit_as_ddp_does(name: str, tmp_path: Path) -> None:
    plain = run_ranks(2, fit, tmp_path / "plain", None, None, wait_s=600.0)
    ours = run_ranks(2, fit, tmp_path / "ours", STRATEGIES[name], None, wait_s=600.0)
    resumed = run_ranks(2, fit, tmp_path / "again", STRATEGIES[name], tmp_path / "ours" / "step=2.ckpt", wait_s=600.0)
    assert any("val_loss" in row for row in plain[0][0])
    for one, other, again in zip(plain, ours, resumed, strict=True):
        assert len(one[0]) == len(other[0])
        for row, row_of_ours in zip(one[0], other[0], strict=True):
            assert row_of_ours == pytest.approx(row, rel=0, abs=TOLERANCE)
        assert torch.tensor(other[1]) == pytest.approx(torch.tensor(one[1]), rel=0, abs=TOLERANCE)
        for key, value in one[2].items():
            assert torch.tensor(other[2][key]) == pytest.approx(torch.tensor(value), rel=0, abs=TOLERANCE)
        assert again[1] == other[1]  # resumed amid of it, to the bit


@pytest.mark.slow
def test_weights_come_back_from_ranks_that_were_spawned(tmp_path: Path) -> None:
    from elixir.integrations.lightning import ElixirStrategy
    from tests.common.lit import fitted

    more = {"devices": 2, "logger": False, "enable_checkpointing": False}
    _, plain = fitted("ddp_spawn", tmp_path, **more)
    _, ours = fitted(ElixirStrategy(start_method="spawn", **STRATEGIES["on the host"]), tmp_path, **more)
    found = dict(ours.named_parameters())
    assert all(torch.allclose(found[name], value, rtol=0, atol=TOLERANCE) for name, value in plain.named_parameters())
