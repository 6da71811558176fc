"""Usual actions on a model in training, and the bits of plain PyTorch all the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

from elixir.chunk.lanes import Emulation
from elixir.models.step import default_input
from tests.common import gpu
from tests.common.parity import Case, Pair, case, hf_loss, make_plan

MODES = ("streamed", "mixed")
WAYS = {  # mode, checkpointing, how it is run
    "streamed": ("streamed", "none", {}),
    "mixed, checkpointed": ("mixed", "non-reentrant", {}),
    "evicted, checkpointed": ("streamed", "reentrant", {"evict_always": True}),
    "resident": ("resident", "none", {}),
}


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    mode, checkpoint, options = WAYS[request.param]
    it = case("gpt2", checkpoint)
    with Pair(it, make_plan(it, mode), **options) as made:
        yield made


@pytest.mark.sampled(every=4)
def test_accumulates_gradients(pair: Pair) -> None:
    batches = [default_input(pair.plain, batch=n, seq=24) for n in (1, 2, 3)]
    for _ in range(4):
        for inp in batches:
            pair.backward(inp, scale=1 / 3)
        pair.step()


@pytest.mark.sampled(every=4)
def test_evaluates_and_generates_between_steps(pair: Pair) -> None:
    ids = pair.case.inp["input_ids"][:, :5]
    for _ in range(3):
        pair.train(1)
        for model in (pair.module, pair.plain):
            model.eval()
        with torch.no_grad():
            assert torch.equal(pair.case.loss(pair.module, pair.case.inp), pair.case.loss(pair.plain, pair.case.inp))
            mine = pair.module.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert torch.equal(mine, pair.plain.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0))
        for model in (pair.module, pair.plain):
            model.train()
    pair.train(1)


@pytest.mark.sampled(every=4)
def test_takes_batches_of_other_shapes(pair: Pair) -> None:
    for seq in (24, 9, 40, 24):
        pair.train(1, default_input(pair.plain, batch=3, seq=seq))


@pytest.mark.sampled(every=4)
def test_runs_forward_twice_before_backward(pair: Pair) -> None:
    other = gpu.there(default_input(pair.plain, batch=2, seq=11))
    for _ in range(4):
        for model, backward in ((pair.module, pair.optimizer.backward), (pair.plain, torch.Tensor.backward)):
            first, second = model(**pair.case.inp).logits, model(**other).logits
            backward((first[:, :11].softmax(-1) * second.softmax(-1)).sum())
        pair.step()


@pytest.mark.sampled(every=4)
def test_gradients_outlive_a_failed_forward(pair: Pair) -> None:
    """An exception in the user's code leaves the module usable."""
    pair.train(1)
    handle = pair.module.module.transformer.h[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            pair.module(**pair.case.inp)
    handle.remove()
    pair.train(2)


@pytest.mark.sampled(every=4)
def test_a_failed_backward_leaves_the_module_usable(pair: Pair) -> None:
    pair.train(1)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    for model in (pair.module.module, pair.plain):
        handle = model.transformer.h[1].mlp.register_forward_hook(
            lambda m, a, output: output.register_hook(fail) and None if output.requires_grad else None
        )
        with pytest.raises(ZeroDivisionError):
            hf_loss(pair.module if model is not pair.plain else model, pair.case.inp).backward()
        handle.remove()
    # What had arrived before the failure counts in both, as it does in PyTorch.
    pair.train(2)


def test_clips_the_global_norm() -> None:
    it = case("opt")
    with Pair(it, make_plan(it, "streamed"), max_norm=0.05) as pair:
        pair.train(6)


def test_the_norm_is_that_of_torch() -> None:
    it = case("opt")
    with Pair(it, make_plan(it, "mixed")) as pair:
        for _ in range(3):
            pair.backward()
            mine = pair.optimizer.clip_grad_norm_(0.1, error_if_nonfinite=True)
            assert torch.equal(mine, torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1))
            pair.step()


class Lion(torch.optim.Optimizer):
    """An optimizer as users write them."""

    def __init__(self, params: object, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                p.add_((average * fast + p.grad * (1 - fast)).sign(), alpha=-group["lr"])
                average.mul_(slow).add_(p.grad, alpha=1 - slow)


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, foreach=False),  # which rounds otherwise
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "own": lambda p: Lion(p, lr=1e-4),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer(name: str) -> None:
    it = case("opt", layers=1)
    with Pair(it, make_plan(it, "mixed"), optimizer=lambda model: OPTIMIZERS[name](list(model.parameters()))) as pair:
        pair.train(10)


def two_groups(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}],
        lr=1e-3,
        fused=fused,
    )


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_groups_and_schedulers(after: bool) -> None:
    it = case("gpt2")
    optimizer = partial(two_groups, fused=after)  # one call steps all of its chunks on the device
    with Pair(it, make_plan(it, "mixed"), optimizer=optimizer, after=after) as pair:
        schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            for optimizer in (pair.optimizer, pair.plain_optimizer)
        ]
        for _ in range(10):
            pair.train(1)
            for scheduler in schedulers:
                scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


class LoRA(nn.Module):
    """A frozen linear layer with two thin trained ones next to it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant"])
def test_trains_adapters_on_a_frozen_base(mode: str, checkpoint: str) -> None:
    it = case("opt", checkpoint)
    torch.manual_seed(0)
    it.model.requires_grad_(False)
    for layer in it.model.model.decoder.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    with Pair(it, make_plan(it, mode)) as pair:
        losses = pair.train(10)
        pair.assert_same_weights()
        assert losses[0] != losses[-1]


class Branches(nn.Module):
    """Uses one of two layers, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[2](self.layers[which](x).relu())


@pytest.mark.parametrize("mode", MODES)
def test_skips_parameters_without_gradient(mode: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    it = Case(Branches(), {"x": x, "which": 0}, lambda model, inp: model(**inp).square().mean())
    plan = make_plan(it, mode, split_number=3)
    # Delays, so that an update which nobody waits for is still under way when the next step begins.
    with Pair(it, plan, emulation=Emulation(delay_s=0.003, seed=1)) as pair:
        for which in (0, 1, 1, 0, 0, 0, 1, 1, 1, 0):
            pair.train(1, {"x": x, "which": which})


def test_two_models_take_turns() -> None:
    cases = [case("opt"), case("gpt2")]
    pairs = [Pair(it, make_plan(it, "streamed")) for it in cases]
    for _ in range(4):
        losses = []
        for pair in pairs:
            losses.append((pair.case.loss(pair.module, pair.case.inp), pair.case.loss(pair.plain, pair.case.inp)))
        (losses[0][0] * losses[1][0]).backward()
        (losses[0][1] * losses[1][1]).backward()
        for pair in pairs:
            pair.step()
    for pair in pairs:
        pair.assert_same_weights()
        pair.module.close()
