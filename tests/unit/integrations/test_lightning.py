"""Lightning under a plan logs, validates, saves and resumes as its DDP strategy does on one device, to the bit."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities import grad_norm
from torch import nn

import elixir.integrations.lightning as ours
from elixir.errors import InputError, TraceError
from elixir.integrations.lightning import ElixirStrategy
from tests.common.lit import ByHand, Checkpointed, Late, Module, data, fitted, same, states, trainer

ON_HOST = {"device_memory": "64MiB", "host_budget": "64MiB", "placement_policy": "cpu"}


class Asking(Module):
    """Asks its trainer for something."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return super().training_step(batch, index) * self.trainer.world_size


class Failing(Module):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        raise RuntimeError("an error of the model")


class Adafactor(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Norms(Module):
    """Logs its gradients' norms, as Lightning's documentation shows it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


class Two(ByHand):
    """Two optimizers, stepped by hand."""

    def training_step(self, batch: Any, index: int) -> None:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss, on_step=True)

    def configure_optimizers(self) -> Any:
        body, head = self.body.parameters(), self.head.parameters()
        return torch.optim.AdamW(body, lr=1e-2), torch.optim.AdamW(head, lr=1e-3)


class Muons(Two):
    """Muon over the matrices of the body, and AdamW over everything else."""

    def configure_optimizers(self) -> Any:
        matrices = [each for each in self.body.parameters() if each.ndim == 2]
        others = [*(each for each in self.body.parameters() if each.ndim < 2), *self.head.parameters()]
        return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)


class Level(Module):
    """Logs something that never becomes better."""

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        self.log("level", torch.tensor(1.0))


def by_hand(module: Any, batch: Any) -> None:
    nn.functional.cross_entropy(module(batch[0]), batch[1]).backward()


def callbacks(folder: Path) -> list[Any]:
    return [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1),
        LearningRateMonitor("step"),
        EarlyStopping("val_loss", patience=9),
    ]


def test_fits_and_is_resumed_with_the_same_bits(tmp_path: Path) -> None:
    plain, _ = fitted("ddp", tmp_path, callbacks=callbacks(tmp_path / "plain"))
    done, module = fitted(ElixirStrategy(**ON_HOST), tmp_path, callbacks=callbacks(tmp_path / "ours"))
    assert done.logger.plain() == plain.logger.plain()
    assert any("elixir/step_s" in row for row in done.logger.rows)
    assert done.strategy.elixir.module.plan.accumulation == 2
    assert (tmp_path / "ours" / "elixir_plan.json").exists()
    name = "step=4.ckpt"
    assert same(states(tmp_path / "plain" / name), states(tmp_path / "ours" / name))
    assert done.test(module, data(8), verbose=False) == plain.test(plain.lightning_module, data(8), verbose=False)
    predicted = [trainer.predict(trainer.lightning_module, data(8)) for trainer in (plain, done)]
    assert all(torch.equal(a, b) for a, b in zip(*predicted, strict=True))
    last = "step=6.ckpt"
    fitted("ddp", tmp_path, resume=tmp_path / "plain" / "step=2.ckpt", callbacks=callbacks(tmp_path / "again"))
    for folder in ("plain", "ours"):  # also from the other strategy's checkpoint
        checkpoint = tmp_path / folder / "step=2.ckpt"
        again, _ = fitted("elixir", tmp_path, resume=checkpoint, callbacks=callbacks(tmp_path / f"from-{folder}"))
        assert same(states(tmp_path / f"from-{folder}" / last), states(tmp_path / "again" / last))
        read = again.strategy.load_checkpoint(checkpoint)
        if "weights_only" in signature(again.strategy.checkpoint_io.load_checkpoint).parameters:  # not Lightning 2.4
            assert str(checkpoint) in Path("/proc/self/maps").read_text()  # in pages that ranks share
        del read
        again.strategy.elixir.module.close()


def test_a_list_of_micro_batches_passes_each_layer_together(tmp_path: Path) -> None:
    more: dict[str, Any] = {"max_epochs": 2, "val_check_interval": None}
    plain = trainer("ddp", tmp_path / "plain", **more)
    plain.fit(Checkpointed(), data(16))
    lists = trainer(ElixirStrategy(pass_size=2, **ON_HOST), tmp_path / "ours", **more, accumulate_grad_batches=1)
    lists.fit(Checkpointed(), data(16, micro_batches=2))
    module = lists.strategy.elixir.module
    assert (module.plan.accumulation, module.plan.pass_size) == (2, 2)
    assert module.last_report.demand_loads == 0
    assert same(states_of(plain), states_of(lists))
    logged = [[row["loss"] for row in each.logger.rows if "loss" in row] for each in (plain, lists)]
    assert logged[0] == logged[1]  # of the last micro-batch of a step
    with pytest.raises(InputError, match="each batch of the loader is a list of the micro-batches"):
        fitted(ElixirStrategy(pass_size=2, **ON_HOST), tmp_path, Checkpointed())


def states_of(done: Any) -> dict[str, torch.Tensor]:
    return done.strategy.lightning_module_state_dict()


@pytest.mark.slow
def test_a_second_fit_manual_optimization_and_meta(tmp_path: Path) -> None:
    plain, module = fitted("ddp", tmp_path)
    done, _ = fitted(ElixirStrategy(**ON_HOST), tmp_path)
    plain, _ = fitted("ddp", tmp_path, module)
    done, _ = fitted(done.strategy.__class__(**ON_HOST), tmp_path, done.strategy.elixir.module.release())
    assert done.logger.plain() == plain.logger.plain()

    more = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    for kind in (ByHand, Two, Muons):
        plain, _ = fitted("ddp", tmp_path, kind(), **more)
        done, _ = fitted(ElixirStrategy(step_fn=by_hand, **ON_HOST), tmp_path, kind(), **more)
        assert done.logger.plain() == plain.logger.plain()
        assert len(done.strategy.elixir.optimizers) == (1 if kind is ByHand else 2)
    meta, _ = fitted(ElixirStrategy(init_on_meta=True, **ON_HOST), tmp_path, Late())
    assert [row["val_loss"] for row in meta.logger.rows if "val_loss" in row][-1] < 2
    assert not any(value.is_meta for value in meta.strategy.elixir.module.release().parameters())


def test_gradients_are_out_of_reach_and_their_norm_is_logged(tmp_path: Path) -> None:
    more = {"max_epochs": 1, "val_check_interval": None, "enable_checkpointing": False}
    with pytest.raises(InputError, match=r"body\.0\.weight\.grad is None .* model\.clip_grad_norm_\(\)"):
        fitted(ElixirStrategy(**ON_HOST), tmp_path, Norms(), **more)
    plain, _ = fitted("ddp", tmp_path, Norms(), **more)
    done, _ = fitted(ElixirStrategy(**ON_HOST), tmp_path, **more)
    norms = [row["grad_2.0_norm_total"] for row in plain.logger.rows if "loss" in row]
    found = [row["elixir/grad_norm"] for row in done.logger.rows if "elixir/step_s" in row]
    assert found == pytest.approx(norms, rel=1e-6)


@pytest.mark.slow
def test_checkpoints_are_written_as_they_are_made_unless_the_user_has_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Writer(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            seen.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    strategies = ElixirStrategy(**ON_HOST), ElixirStrategy(**ON_HOST, checkpoint_io=Writer())
    found = []
    for number, strategy in enumerate(strategies):
        folder = tmp_path / str(number)
        if not number:
            monkeypatch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", lambda *_: seen.append("a copy"))
        fitted(strategy, folder, callbacks=[ModelCheckpoint(folder, "{step}")], max_steps=2)
        monkeypatch.undo()
        (path,) = folder.glob("*.ckpt")
        found.append(states(path))
    assert seen == [path.name]
    assert same(*found)


def test_stops_early_and_tests_the_best_weights(tmp_path: Path) -> None:
    outcomes = []
    for name, strategy in (("plain", "ddp"), ("ours", ElixirStrategy(**ON_HOST))):
        keep = ModelCheckpoint(tmp_path / name, "{step}", monitor="val_loss", save_top_k=1)
        stop = EarlyStopping("level", patience=1)
        done, module = fitted(strategy, tmp_path, Level(), callbacks=[stop, keep], max_epochs=9)
        tested = done.test(module, data(8), ckpt_path="best", verbose=False)
        outcomes.append((done.global_step, done.logger.plain(), Path(keep.best_model_path).name, tested))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] < 9  # of 27 steps


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_precision_is_the_dtype_of_the_plan(precision: str, tmp_path: Path) -> None:
    done, _ = fitted(ElixirStrategy(**ON_HOST), tmp_path, precision=precision, callbacks=callbacks(tmp_path / "x"))
    assert done.strategy.elixir.module.plan.dtype == {"bf16-true": "bfloat16", "16-true": "float16"}[precision]
    assert {value.dtype for value in states(tmp_path / "x" / "step=4.ckpt").values() if value.is_floating_point()} == {
        torch.float32
    }


def test_a_dry_run_and_refusals(tmp_path: Path) -> None:
    strategy = ElixirStrategy(**ON_HOST)
    plan = strategy.dry_run(trainer(strategy, tmp_path), Module(), train_dataloaders=data())
    assert (plan.placement, plan.accumulation, strategy.elixir) == ("cpu", 2, None)
    with pytest.raises(InputError, match="clipped by norm only"):
        fitted(ElixirStrategy(**ON_HOST), tmp_path, gradient_clip_algorithm="value")
    with pytest.raises(InputError, match="precision='64-true' is not known"):
        trainer(ElixirStrategy(**ON_HOST), tmp_path, precision="64-true")
    with pytest.raises(InputError, match="StochasticWeightAveraging"):
        fitted(ElixirStrategy(**ON_HOST), tmp_path, callbacks=[StochasticWeightAveraging(1e-2)])
    other = ElixirStrategy(**ON_HOST)
    trainer_of_it = trainer(other, tmp_path)
    with pytest.raises(InputError, match="Adafactor is not elementwise"):
        other.dry_run(trainer_of_it, Adafactor(), train_dataloaders=data())
    with pytest.raises(InputError, match="comes from Trainer"):
        ElixirStrategy(max_norm=1.0)
    with pytest.raises(InputError, match="sync_batchnorm"):
        fitted(ElixirStrategy(**ON_HOST), tmp_path, sync_batchnorm=True)
    fitted(ElixirStrategy(**ON_HOST), tmp_path, Asking())
    with pytest.raises(RuntimeError, match="of the model"):
        fitted(ElixirStrategy(**ON_HOST), tmp_path, Failing())
    with pytest.raises((InputError, TraceError), match="step_fn"):
        fitted(ElixirStrategy(**ON_HOST), tmp_path, ByHand(), accumulate_grad_batches=1, gradient_clip_val=None)


@pytest.mark.slow
def test_the_other_package_of_lightning_has_a_strategy_too(tmp_path: Path) -> None:
    import pytorch_lightning

    import elixir.integrations.pytorch_lightning as other

    assert not issubclass(other.ElixirStrategy, ours.ElixirStrategy)
    made = pytorch_lightning.Trainer(strategy="elixir", accelerator="cpu", devices=1, default_root_dir=str(tmp_path))
    assert isinstance(made.strategy, other.ElixirStrategy)


class Keeps(Module):
    """Keeps its losses, and counts."""

    steps = 0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.history.append(loss.item())
        self.steps += 1
        return loss


def test_what_a_training_step_keeps_is_as_before(tmp_path: Path) -> None:
    strategy, module = ElixirStrategy(**ON_HOST), Keeps()
    module.history = history = list[Any]()  # type: ignore[assignment]
    strategy.dry_run(trainer(strategy, tmp_path), module, train_dataloaders=data())
    assert (history, module.steps) == ([], 0)
