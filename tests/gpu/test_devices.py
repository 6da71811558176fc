"""Models, optimizers, inputs and streams on a CUDA device, as users have them there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.errors import InputError, StepError
from elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.common import gpu, inside
from tests.common.early import chain
from tests.common.failing import fails_at
from tests.common.gpu import needs_gpu, needs_pretended_gpu, pretended
from tests.common.parity import MODES, Case, Pair, adamw, case, make_plan, report_of, square_loss, take_step
from tests.common.twins import step_alike
from tests.cuda_emulator.races import watching

pytestmark = needs_gpu

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "default": lambda p: torch.optim.AdamW(p),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "rate on the host": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "rate on the device": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3, device="cuda"), foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_and_an_optimizer_made_on_the_device(mode: str, name: str) -> None:
    it = case("opt", layers=1)
    plan = make_plan(it, mode)
    it.model.cuda()
    with Pair(it, plan, optimizer=lambda model: OPTIMIZERS[name](list(model.parameters())), after=False) as pair:
        (group,) = pair.plain_optimizer.param_groups  # the twin is stepped with the number that a tensor holds
        group["lr"] = float(group["lr"])
        pair.train(4)


@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_states_move_between_device_and_host(way: str) -> None:
    it = case("opt", layers=1)
    plans = [make_plan(it, mode) for mode in MODES]
    with Pair(it, plans[0], optimizer=lambda model: OPTIMIZERS[way](list(model.parameters()))) as pair:
        for plan in [*plans, *plans]:
            pair.module.rehome(plan)
            pair.train(2)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_could_be_captured(mode: str, on_device: bool) -> None:
    """It is stepped as one that cannot, which the host's shards need."""

    def captured(model: nn.Module) -> torch.optim.Optimizer:
        rate = torch.tensor(1e-3, device="cuda" if on_device else "cpu")
        return torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, foreach=True)

    it = case("opt", layers=1)
    plan = make_plan(it, mode)
    it.model.cuda()
    with Pair(it, plan) as pair:
        # The twin is stepped with the number that the tensor holds.
        plain = torch.optim.AdamW(pair.plain.parameters(), lr=torch.tensor(1e-3).item())
        pair.plain_optimizer = step_alike(plain, pair.module, dict(pair.plain.named_parameters()))
        inside.steppers(pair.module).clear()
        pair.optimizer = ElixirOptimizer(pair.module, captured(pair.module))
        pair.audited = False  # the first optimizer's states stay counted
        pair.train(3)
        pair.optimizer.param_groups[0]["lr"].mul_(0.5)  # as schedulers do
        pair.plain_optimizer.param_groups[0]["lr"] *= 0.5
        pair.train(3)


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", torch.device("cuda")])
def test_inputs_on_the_host_are_moved(device: torch.device | str | None) -> None:
    it = case("opt", layers=1)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device=device)
    assert module.device == torch.device("cuda", 0)
    optimizer = ElixirOptimizer(module, adamw(module), max_norm=1.0)
    loss = module(**it.inp).loss
    assert loss.device == module.device
    optimizer.backward(loss)
    assert module.clip_grad_norm_(1.0).device == module.device
    optimizer.step()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_with_a_default_device(dtype: str, tmp_path: Path) -> None:
    """Runs under `torch.set_default_device("cuda")`, where tensors that name no device are made on CUDA."""
    losses = []
    for default in ("cpu", "cuda"):
        with torch.device(default):
            it = case("opt", layers=1)
            it.model.cpu()
            module = ElixirModule(it.model, make_plan(it, "mixed", unified_dtype=dtype), device="cuda")
            optimizer = ElixirOptimizer(module, adamw(module), max_norm=1.0)
            for _ in range(3):
                loss = it.loss(module, it.inp)
                take_step(optimizer, loss)
                losses.append(loss.item())
            module.load_state_dict(module.state_dict())
            state = {"model": module, "optimizer": optimizer}
            save_checkpoint(tmp_path / default, state, wait=True)
            load_checkpoint(tmp_path / default, state)
            optimizer.load_state_dict(optimizer.state_dict())
            losses.append(it.loss(module, it.inp).item())
            module.close()
    assert losses[:4] == losses[4:]


@pytest.mark.parametrize("mode", MODES)
def test_the_bits_do_not_depend_on_where_gradients_are(mode: str) -> None:
    it = case("opt")
    with Pair(it, make_plan(it, mode), max_norm=0.05) as pair:
        pair.train(4)


@needs_pretended_gpu
def test_clipped_steps_of_a_cpu_are_compared_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are compared to the bit, on a GPU as well, since the twin is stepped on the host with them."""
    monkeypatch.setattr(gpu, "pretended", lambda: False)
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed"), alike=False) as pair:
        pair.train(2)
        assert pair.exact
        states = [pair.plain_optimizer.state[each]["exp_avg"] for each in pair.plain.parameters()]
        assert all(each.device.type == "cpu" for each in states)
        assert all(each.is_cuda for each in pair.plain.parameters())
        pair.max_norm = pair.optimizer.max_norm = 0.05
        pair.plain_optimizer.param_groups[0]["lr"] *= 1 + 1e-4
        pair.train(4)
        assert not pair.exact
        pair.assert_same_weights()
        pair.plain_optimizer.param_groups[0]["lr"] *= 8
        pair.train(1)
        with pytest.raises(AssertionError, match="weights are"):
            pair.assert_same_weights()


@needs_pretended_gpu
@pytest.mark.parametrize("mode", ["streamed", "mixed"])
def test_a_forward_on_another_stream_comes_behind_the_last(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain PyTorch needs no order between streams for evaluation, but the blocks are shared."""
    it = case("opt")
    plan = make_plan(it, mode)
    inp = {name: value.cuda() for name, value in it.inp.items()}
    with watching(monkeypatch) as races:
        module = ElixirModule(it.model, plan, device="cuda")
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        with torch.no_grad():
            for stream in streams * 2:
                with torch.cuda.stream(stream):
                    module(**inp)
        torch.cuda.synchronize()
        module.close()
    assert not races.found


@needs_pretended_gpu
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_a_training_on_a_stream_of_the_users(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of a step elsewhere, with the waits that plain PyTorch needs and no others."""
    it = case("opt")
    plan = make_plan(it, "streamed")
    inp = {name: value.cuda() for name, value in it.inp.items()}
    with watching(monkeypatch) as races:
        module = ElixirModule(it.model, plan, device="cuda")
        optimizer = ElixirOptimizer(module, adamw(module), max_norm=1.0)
        own, usual = torch.cuda.Stream(), torch.cuda.current_stream()
        for _ in range(3):
            loss: list[torch.Tensor] = []
            parts = {
                "forward": lambda loss=loss: loss.append(it.loss(module, inp)),
                "backward": lambda loss=loss: optimizer.backward(loss[0]),
                "step": lambda: (optimizer.step(), optimizer.zero_grad()),
            }
            for name, part in parts.items():
                if name == where:
                    own.wait_stream(usual)
                    with torch.cuda.stream(own):
                        part()
                    usual.wait_stream(own)
                else:
                    part()
        module.close()
    assert not races.found


class Remembering(nn.Module):
    """Keeps what its layers' activations and copies gave, and computes the rest again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [torch.ops.aten.tanh.default, torch.ops.aten.copy_.default]
        context_fn = partial(create_selective_checkpoint_contexts, kept)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)
        return x


def test_selective_checkpoints_keep_nothing_of_what_lanes_do() -> None:
    it = Case(Remembering(), {"x": torch.randn(3, 32)}, square_loss)
    with Pair(it, make_plan(it, "streamed")) as pair:
        pair.train(3)


@pytest.mark.skipif(pretended(), reason="the pretended device has the CPU's random numbers")
def test_random_numbers_are_those_of_plain_pytorch() -> None:
    it = case("opt", layers=1)
    it.model.config.dropout = 0.1
    losses = []
    for wrapped in (False, True):
        model = case("opt", layers=1).model.cuda()
        for layer in model.modules():
            if hasattr(layer, "dropout"):
                layer.dropout = 0.1
        torch.cuda.manual_seed(0)
        run = ElixirModule(model, make_plan(it, "streamed")) if wrapped else model
        losses.append([it.loss(run, {n: v.cuda() for n, v in it.inp.items()}).item() for _ in range(3)])
    assert losses[0] == losses[1]


def test_a_device_that_is_not_there_is_refused() -> None:
    it = case("opt", layers=1)
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(InputError, match=f"{missing}.*there are {torch.cuda.device_count()}"):
        ElixirModule(it.model, make_plan(it, "streamed"), device=missing)


def test_a_gradient_that_cannot_leave_for_the_host_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    it = chain()
    with Pair(it, make_plan(it, "streamed", split_number=4)) as pair:
        pair.train(1)
        fails_at(inside.lane(pair.module, "offload"), 3, monkeypatch)
        with pytest.raises(MemoryError, match="no memory on the way"):
            pair.optimizer.backward(pair.case.loss(pair.module, pair.case.inp))
        monkeypatch.undo()
        with pytest.raises(StepError, match="training has ended.*no memory on the way"):
            pair.case.loss(pair.module, pair.case.inp)
        pair.assert_same_weights()


def test_what_the_device_held_before_the_first_step_is_not_the_peak_of_a_step() -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "streamed")) as pair:
        torch.empty(2**28, dtype=torch.uint8, device=gpu.DEVICE)  # such as that of an evaluation
        pair.train(2)
        report = report_of(pair.module)
        assert "device_peak" not in report.observed
        torch.cuda.reset_peak_memory_stats()
        pair.train(1)
        assert 0 < pair.module.last_report.observed["device_peak"] < 2**28  # type: ignore[union-attr]
