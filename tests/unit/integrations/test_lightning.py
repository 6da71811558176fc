"""Lightning under a plan logs, validates, saves and resumes as its DDP strategy does on one device, to the bit."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from torch import nn

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
