"""Gradients live with the optimizer states: a caller that asks a parameter for one gets an answer, never a silent None."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elixir.checkpoint import save_checkpoint
from elixir.chunk.lanes import Emulation
from elixir.errors import InputError
from elixir.wrapper import Debug, ElixirModule, ElixirOptimizer
from elixir.wrapper.step.stepper import Stepper
from tests.common import gpu, inside
from tests.common.parity import MODES, Case, Pair, case, make_plan, square_loss
from tests.common.twins import step_alike


@pytest.fixture
def pair() -> Iterator[Pair]:
    it = case("gpt2", layers=1)
    with Pair(it, make_plan(it, "streamed")) as made:
        made.train(1)
        yield made


READERS: dict[str, Callable[[Pair], object]] = {
    "attribute": lambda pair: [parameter.grad for parameter in pair.module.parameters()],
    "clipping": lambda pair: torch.nn.utils.clip_grad_norm_(pair.module.parameters(), 1.0),
    "another optimizer": lambda pair: torch.optim.SGD(pair.module.parameters(), lr=0.1).step(),
}


@pytest.mark.parametrize("how", READERS)
def test_a_gradient_that_has_left_is_not_none(pair: Pair, how: str) -> None:
    pair.backward()
    with pytest.raises(InputError, match=r"clip_grad_norm_.*ElixirOptimizer"):
        READERS[how](pair)
    pair.step()
    READERS[how](pair)  # there is none now, as after zero_grad in plain PyTorch
    pair.train(1)


def test_hooks_on_parameters_see_their_gradients(pair: Pair) -> None:
    seen: list[torch.Tensor] = []
    for model in (pair.module.module, pair.plain):
        weight = model.transformer.h[0].mlp.c_fc.weight
        weight.register_hook(lambda gradient: gradient * 2)
        weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    pair.backward()
    assert torch.equal(seen[0], seen[1])
    pair.step()


def test_a_limit_may_be_a_tensor() -> None:
    """Ranks compare their limits, and must not see on which device one lies."""
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "mixed")) as pair:
        pair.backward()
        pair.optimizer.clip_grad_norm_(torch.tensor(0.125))  # type: ignore[arg-type]
        stepper = inside.stepper(pair.module)
        assert isinstance(stepper, Stepper)
        assert stepper.user.options_to_compare(stepper.norm.limit)["the limit of the norm"] == "0.125"
        torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.125)
        pair.step()


@pytest.mark.parametrize(
    ("max_norm", "limits"),
    [
        (None, (0.1, float("inf"))),
        (None, (0.3, 0.1)),
        (0.1, (float("inf"),)),
        (0.1, (5.0,)),
        (0.5, (0.1, 0.2)),
        (None, (0.0,)),
    ],
)
def test_of_several_limits_the_least_holds(max_norm: float | None, limits: tuple[float, ...]) -> None:
    """A second call, as for a log, does not take the first one back; nor what the optimizer was made with."""
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "mixed"), max_norm=max_norm) as pair:
        pair.backward()
        for limit in limits:
            pair.optimizer.clip_grad_norm_(limit)
        torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), min(*limits, max_norm or 9.0))
        pair.max_norm = None  # the twin is clipped
        pair.step()


def test_a_clip_does_not_outlive_the_gradients(pair: Pair) -> None:
    for clears in (pair.optimizer, pair.module):
        pair.backward()
        pair.module.clip_grad_norm_(1e-3)
        clears.zero_grad()
        pair.plain_optimizer.zero_grad()
        pair.train(1)
        pair.assert_same_weights()
    pair.assert_same_weights()
    pair.backward(scale=float("inf"))
    with pytest.raises(RuntimeError, match="norm"):
        pair.module.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_a_learning_rate_that_is_a_tensor_is_read_at_the_step() -> None:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)

    it = case("opt")
    with Pair(it, make_plan(it, "streamed"), optimizer=make, emulation=Emulation(delay_s=0.01)) as pair:
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (pair.optimizer, pair.plain_optimizer)]
        for _ in range(4):
            pair.train(1)
            for scheduler in schedulers:
                scheduler.step()


@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_keep_each_their_gradients(mode: str) -> None:
    it = case("opt")
    plan, plain = make_plan(it, mode), copy.deepcopy(it.model).to(gpu.DEVICE)
    module = ElixirModule(it.model, plan, device=gpu.DEVICE, debug=Debug(poison=True))
    inp = gpu.there(it.inp)

    def halves(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        parameters = list(model.parameters())
        return [torch.optim.AdamW(parameters[::2]), torch.optim.SGD(parameters[1::2], lr=0.1)]  # in the same chunks

    mine = [ElixirOptimizer(module, optimizer) for optimizer in halves(module.module)]
    theirs = [step_alike(half, module, dict(plain.named_parameters())) for half in halves(plain)]
    for number in range(4):
        for model, optimizers in ((module, mine), (plain, theirs)):
            it.loss(model, inp).backward()
            for optimizer in optimizers[: 1 + number % 2]:  # the second one adds up two backwards
                optimizer.step()
                optimizer.zero_grad()
    state = module.state_dict()
    assert all(torch.equal(state[name], value.cpu()) for name, value in plain.state_dict().items())
    it.loss(module, inp).backward()
    with pytest.raises(InputError, match=r"call zero_grad\(\), which drops gradients"):
        mine[0].zero_grad(set_to_none=False)
    assert len(inside.engine(module).unstepped) == 2


CLIPPERS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "norm": lambda weights: torch.nn.utils.clip_grad_norm_(weights, 1.0),
    "norm, each": lambda weights: torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=False),
    "value": lambda weights: torch.nn.utils.clip_grad_value_(weights, 0.1),
    "given norm": lambda weights: torch.nn.utils.clip_grads_with_norm_(weights, 1.0, torch.tensor(2.0)),
    "norm of what is read": lambda weights: torch.nn.utils.get_total_norm(weight.grad for weight in weights),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_functions_of_torch_clip_only_gradients_without_a_loss_scale(dtype: str) -> None:
    it = Case(nn.Linear(8, 4), {"input": torch.randn(2, 8)}, lambda model, inp: square_loss(model, inp).float())
    optimizer = ElixirOptimizer(
        module := ElixirModule(it.model, make_plan(it, "resident", unified_dtype=dtype), device=gpu.DEVICE),
        torch.optim.SGD(it.model.parameters(), lr=0.1),
        initial_scale=64.0,
    )
    optimizer.backward(it.loss(module, gpu.there(it.inp)))
    weights = list(module.parameters())
    before = [weight.grad.clone() for weight in weights if weight.grad is not None]  # may be read
    for clip in CLIPPERS.values() if dtype == "float16" else ():
        with pytest.raises(InputError, match=r"the loss scale until step\(\).*clip with max_norm= or model\.clip_grad"):
            clip(weights)
    if dtype == "bfloat16":
        torch.nn.utils.clip_grad_value_(weights, 0.0)
        assert not any(weight.grad.any() for weight in weights if weight.grad is not None)
        return
    assert all(map(torch.equal, before, [weight.grad for weight in weights if weight.grad is not None]))
    optimizer.step()
    optimizer.zero_grad()
    CLIPPERS["norm"](weights)  # there is none
    module.close()
    assert {type(weight) for weight in weights} == {nn.Parameter}
    assert not any(vars(weight) for weight in weights)


def test_clipping_needs_an_optimizer() -> None:
    it = case("opt", layers=1)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    with pytest.raises(InputError, match="needs an ElixirOptimizer"):
        module.clip_grad_norm_(1.0)


@pytest.mark.parametrize("mode", ["streamed", "resident"])
def test_zeros_in_the_place_of_gradients_are_refused_and_gradients_stay(mode: str) -> None:
    it = case("gpt2", layers=1)
    with Pair(it, make_plan(it, mode)) as pair:
        pair.backward()
        for each in (pair.module, pair.module.module, pair.optimizer):
            with pytest.raises(InputError, match=r"call zero_grad\(\), which drops gradients"):
                each.zero_grad(set_to_none=False)
        pair.step()
        pair.assert_same_weights()


def test_after_close_gradients_become_zeros_as_in_torch() -> None:
    it = case("gpt2", layers=1)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(it.model.parameters()))
    module.close()
    for each in (module, optimizer):
        it.loss(it.model, it.inp).backward()
        each.zero_grad(set_to_none=False)
        assert all(weight.grad is not None and not weight.grad.any() for weight in it.model.parameters())


DROPS: dict[str, Callable[[nn.Parameter], None]] = {
    "set to None": lambda parameter: setattr(parameter, "grad", None),
    "deleted": lambda parameter: delattr(parameter, "grad"),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("how", DROPS)
@pytest.mark.parametrize("mode", MODES)
def test_dropping_every_gradient_is_as_good_as_zero_grad(mode: str, how: str) -> None:
    it = case("gpt2", layers=1)
    with Pair(it, make_plan(it, mode)) as pair:
        for _ in range(4):
            pair.backward()
            pair.optimizer.step()
            pair.plain_optimizer.step()
            for model in (pair.module, pair.plain):
                for parameter in model.parameters():
                    DROPS[how](parameter)
            assert not inside.holds_gradients(pair.module)


@pytest.mark.parametrize("mode", MODES)
def test_dropping_some_gradients_leaves_the_others(mode: str) -> None:
    """AdamW stops without a gradient, and goes on with what comes after; twice, so that shards are added to."""
    it = case("gpt2", layers=1)
    with Pair(it, make_plan(it, mode, split_number=3)) as pair:
        for backwards_after in (0, 1, 2):
            pair.backward()
            pair.backward()
            for model in (pair.module, pair.plain):
                for parameter in list(model.parameters())[::2]:
                    parameter.grad = None
            if mode != "resident":
                assert inside.holds_gradients(pair.module)
            for _ in range(backwards_after):
                pair.backward()
            pair.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_hook_may_drop_the_gradient_that_has_just_come(mode: str) -> None:
    it = case("gpt2", layers=1)
    with Pair(it, make_plan(it, mode)) as pair:
        for model in (pair.module, pair.plain):
            for parameter in list(model.parameters())[::3]:
                parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        pair.train(3)


def test_a_dropped_gradient_is_none(pair: Pair) -> None:
    weights = list(pair.module.parameters())
    pair.backward()
    weights[0].grad = None
    assert weights[0].grad is None
    with pytest.raises(InputError, match="clip_grad_norm_"):
        weights[1].grad  # noqa: B018
    pair.module.zero_grad()


def test_a_forward_that_is_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    it = case("opt", layers=1)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        if gpu.DEVICE == "cpu":
            assert module(**it.inp).loss.isfinite()  # the graph is of something else
        inside.pretend_device(patched, module, torch.device("cuda"))
        with pytest.raises(InputError, match="CUDA graph"):
            module(**it.inp)


_LEFT_OPEN = """
import torch
from tests.common.parity import case, make_plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
it = case("opt", layers=1)
module = ElixirModule(it.model, make_plan(it, "streamed"), device="cpu")
optimizer = ElixirOptimizer(module, torch.optim.AdamW(module.parameters()))
optimizer.backward(it.loss(module, it.inp))
optimizer.step()
"""


@pytest.mark.slow
def test_a_program_may_end_without_closing() -> None:
    ended = subprocess.run([sys.executable, "-c", _LEFT_OPEN], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr.count("terminate")) == (0, 0), ended.stderr


def test_a_module_that_is_let_go_of_stops_its_lanes() -> None:
    def lanes() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("elixir ")}

    before = lanes()  # of earlier tests, which may end meanwhile
    it = case("opt", layers=1)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device=gpu.DEVICE)
    assert lanes() - before
    del module, it
    gc.collect()
    assert lanes() <= before


class _TwiceInCheckpoints(nn.Module):
    """One layer in two reentrant checkpoints, whose backwards each bring a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.layer, self.after = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=True)
        return self.after(x)


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_reentrant_backwards_are_added_as_in_plain_pytorch(mode: str) -> None:
    torch.manual_seed(0)
    it = Case(_TwiceInCheckpoints(), {"x": torch.randn(64, 16)}, square_loss)
    with Pair(it, make_plan(it, mode, split_number=1)) as pair:
        for _ in range(2):
            for _ in range(3):
                pair.backward()
            pair.step()


def test_gradients_that_a_failed_backward_left_may_be_given_up(tmp_path: Path) -> None:
    it = case("opt", layers=1)
    before = {name: value.clone() for name, value in it.model.state_dict().items()}
    module = ElixirModule(it.model, make_plan(it, "streamed"), device="cpu")
    weights = list(it.model.parameters())
    optimizers = [ElixirOptimizer(module, torch.optim.SGD(weights[at::2], lr=0.1)) for at in range(2)]
    state = {"model": module, "first": optimizers[0], "second": optimizers[1]}

    def fails() -> None:
        handle = weights[0].register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizers[0].backward(it.loss(module, it.inp))
        handle.remove()

    def is_as_before() -> bool:
        for optimizer in optimizers:
            optimizer.step()
        return all(torch.equal(value, before[name]) for name, value in module.state_dict().items())

    fails()
    module.zero_grad()
    save_checkpoint(tmp_path / "run", state, wait=True)
    fails()
    module.zero_grad()
    assert is_as_before()
    fails()
    optimizers[0].zero_grad()
    with pytest.raises(InputError, match=r"between backward and step\(\)"):
        save_checkpoint(tmp_path / "run", state)
    optimizers[1].zero_grad()
    save_checkpoint(tmp_path / "run", state, wait=True)
    fails()
    for optimizer in optimizers:
        optimizer.zero_grad()
    assert is_as_before()


def test_no_gradients_come_between_one_norm_of_several_optimizers_and_their_steps() -> None:
    it = case("opt", layers=1)
    module = ElixirModule(it.model, make_plan(it, "streamed"), device="cpu")
    weights, rest = [], []
    for parameter in it.model.parameters():
        (weights if parameter.dim() > 1 else rest).append(parameter)
    optimizers = [ElixirOptimizer(module, torch.optim.AdamW(each, lr=1e-3)) for each in (weights, rest)]
    first = optimizers[0]
    first.backward(it.loss(module, it.inp))
    module.clip_grad_norm_(0.1)
    first.step()
    with pytest.raises(InputError, match="step all of them"):
        first.backward(it.loss(module, it.inp))
