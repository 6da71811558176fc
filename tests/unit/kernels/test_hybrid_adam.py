"""HybridAdam as an optimizer: torch's numbers, whole states, the manners of `torch.optim.Optimizer`."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.kernels import HybridAdam

SHAPES = ((7, 5), (11,), (256, 257), ())
KINDS = ("float32", "bfloat16", "8bit")


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that depend on the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def flat(tensors: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def distance(found: list[nn.Parameter], expected: list[nn.Parameter]) -> float:
    return float((flat(found) - flat(expected)).norm() / flat(expected).norm())


@pytest.mark.parametrize("adamw", [True, False])
def test_a_hundred_steps_are_those_of_torch(adamw: bool) -> None:
    mine, theirs = parameters(), parameters()
    train(HybridAdam(mine, lr=1e-2, weight_decay=0.1, adamw_mode=adamw), range(100))
    cls = torch.optim.AdamW if adamw else torch.optim.Adam
    train(cls(theirs, lr=1e-2, weight_decay=0.1), range(100))
    assert distance(mine, theirs) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_and_loading_midway_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    straight = parameters(dtype)
    train(HybridAdam(straight, lr=1e-2, moments=kind), range(10))

    broken = parameters(dtype)
    first = HybridAdam(broken, lr=1e-2, moments=kind)
    train(first, range(5))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in broken]
    second = HybridAdam(resumed, lr=0.5)  # what was saved wins, as in torch
    second.load_state_dict(torch.load(file, weights_only=True))
    train(second, range(5, 10))
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)


def test_state_dicts_go_to_and_from_torch() -> None:
    def torchs(own: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(own, lr=1e-2, weight_decay=0.0)

    def ours(own: list[nn.Parameter]) -> torch.optim.Optimizer:
        return HybridAdam(own, lr=1e-2)

    straight = parameters()
    train(torchs(straight), range(10))
    for first_make, second_make in ((torchs, ours), (ours, torchs)):
        own = parameters()
        first = first_make(own)
        train(first, range(5))
        second = second_make(own)
        saved = first.state_dict()
        if second_make is torchs:  # which has options that ours lacks
            options = torchs(parameters()).state_dict()["param_groups"]
            saved = {"state": saved["state"], "param_groups": options}
        second.load_state_dict(saved)
        train(second, range(5, 10))
        assert distance(own, straight) < 1e-6


def test_groups_schedulers_and_missing_gradients_are_followed_as_by_torch() -> None:
    """Bias corrections go by a parameter's own steps, whatever order its elements have in memory."""

    def run(cls: Any) -> list[nn.Parameter]:
        own = [*parameters(), nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))]
        optimizer = cls([{"params": own[:2], "lr": 1e-2, "weight_decay": 0.1}], lr=1e-3, weight_decay=0.0)
        optimizer.add_param_group({"params": own[2:], "betas": (0.5, 0.9), "maximize": True})
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            for index, parameter in enumerate(own):
                gradient = torch.randn(parameter.shape, generator=generator)
                parameter.grad = gradient if (step + index) % 3 else None
            optimizer.step()
            scheduler.step()
        return own

    assert distance(run(HybridAdam), run(torch.optim.AdamW)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_rounded_float32_training_with_what_is_written_in_between(dtype: torch.dtype) -> None:
    """Steps are below half a last bit, which weights without masters would never take."""
    mine = parameters(dtype)
    theirs = [nn.Parameter(parameter.detach().float()) for parameter in mine]
    first, second = HybridAdam(mine, lr=1e-5), torch.optim.AdamW(theirs, lr=1e-5, weight_decay=0.0)
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(mine, theirs, strict=True):
            one.grad = torch.rand(one.shape, generator=generator).to(dtype)
            other.grad = one.grad.float()
        if step == 20:
            with torch.no_grad():
                mine[0].fill_(3.0), theirs[0].fill_(3.0)
                mine[2].copy_(mine[2].clone())  # which its master rounds to: the bits below the last stay
        first.step()
        second.step()
    masters = [first.state[parameter]["master"] for parameter in mine]
    assert distance(masters, theirs) < 1e-6
    assert all(torch.equal(one, master.to(dtype)) for one, master in zip(mine, masters, strict=True))


def test_autograd_notices_a_step_that_a_kernel_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir.kernels.adam.hybrid_adam.adam_step", lambda *_: None)
    weight = nn.Parameter(torch.ones(3))
    output = (weight * weight).sum()
    weight.grad = torch.ones(3)
    HybridAdam([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_the_factor_and_the_closure() -> None:
    one, other = parameters(), parameters()
    first, second = HybridAdam(one, eps=1e-3), HybridAdam(other, eps=1e-3)
    for own, scale in ((one, 1.0), (other, 8.0)):
        for parameter in own:
            parameter.grad = torch.full_like(parameter, scale)
    assert first.step(lambda: 7) == 7
    second.step(factor=1 / 8)
    assert torch.equal(flat(one), flat(other))


def test_it_can_be_copied_and_pickled() -> None:
    own = parameters(torch.bfloat16)
    optimizer = HybridAdam(own)
    train(optimizer, range(2))
    again = pickle.loads(pickle.dumps(optimizer))
    train(optimizer, range(2, 4))
    train(again, range(2, 4))
    assert torch.equal(flat(again.param_groups[0]["params"]), flat(own))


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"betas": 0.9}, {"eps": -1e-8}, {"moments": "4bit"}, {"amsgrad": True}],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises((InputError, InputTypeError)):
        HybridAdam(parameters(), **options)


def test_what_cannot_be_stepped_is_refused() -> None:
    with pytest.raises(InputError, match="float64"):
        HybridAdam([nn.Parameter(torch.ones(2, dtype=torch.float64))])
    with pytest.raises(InputError, match="must be strided, got torch.sparse_coo; use SparseAdam"):
        HybridAdam([nn.Parameter(torch.eye(2).to_sparse())])
    overlapping = nn.Parameter(torch.ones(1).expand(4))
    overlapping.grad = torch.ones(4)
    with pytest.raises(InputError, match="without overlap"):
        HybridAdam([overlapping]).step()
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError, match="dense gradients"):
        HybridAdam(embedding.parameters()).step()
    amsgrad = torch.optim.AdamW(parameters(), amsgrad=True)
    momentum = torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    for other, match in ((amsgrad, "amsgrad"), (momentum, "lacks betas")):
        train(other, range(1))
        with pytest.raises(InputError, match=match):
            HybridAdam(parameters()).load_state_dict(other.state_dict())


@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_states_that_are_not_adams_are_refused(key: str) -> None:
    own = parameters()
    optimizer = HybridAdam(own)
    train(optimizer, range(1))
    saved = optimizer.state_dict()
    del saved["state"][0][key]
    with pytest.raises(InputError, match="step, exp_avg and exp_avg_sq"):
        HybridAdam(own).load_state_dict(saved)


def test_states_of_another_shape_are_refused() -> None:
    own = parameters()
    optimizer = HybridAdam(own)
    train(optimizer, range(1))
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(3)
    with pytest.raises(InputError, match=r"shape \(3,\)"):
        HybridAdam(own).load_state_dict(saved)
