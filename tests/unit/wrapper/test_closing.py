"""A model is an ordinary one with its weights after `close`; models that share a module without weights never meet."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from elixir.errors import InputError
from elixir.hardware import promises
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.step.shard import SteppedShards
from tests.common import gpu, inside
from tests.common.parity import MODES, Case, Pair, adamw, case, make_plan, mixed, square_loss


def assert_plain(model: nn.Module) -> None:
    """Nothing of ours is left on it."""
    for module in model.modules():
        assert not [name for name in vars(module) if callable(getattr(type(module), name, None))]
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert not hasattr(parameter, "elixir_listener")
        assert not hasattr(parameter, "elixir_lends")
        assert not parameter._post_accumulate_grad_hooks
        assert parameter.untyped_storage().nbytes() == parameter.nbytes  # separate memory


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["cnn", "gpt2"])
def test_a_closed_model_is_an_ordinary_one(family: str, mode: str) -> None:
    it = case(family)
    with Pair(it, make_plan(it, mode), use_fused_kernels=False) as pair:
        pair.train(2)
        model, plain = pair.module.release(), pair.plain
        assert model is it.model
        pair.module.close()  # once more
    assert_plain(model)
    plain.to("cpu")
    for left, right in (
        (model.state_dict(), plain.state_dict()),
        (copy.deepcopy(model).state_dict(), plain.state_dict()),
    ):
        assert list(left) == list(right)
        assert all(torch.equal(left[name], right[name]) for name in right)
    assert pickle.loads(pickle.dumps(model)).state_dict().keys() == model.state_dict().keys()
    torch.save(model, io.BytesIO())
    for call in (pair.module.state_dict, lambda: pair.module(**it.inp), pair.optimizer.step, pair.module.settle):
        with pytest.raises(InputError, match="closed"):
            call()  # type: ignore[operator]
    # It trains by itself, to the bit, ...
    optimizers = [adamw(model), adamw(plain)]
    for _ in range(2):
        losses = [it.loss(each, it.inp) for each in (model, plain)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    # ... can be moved, is traced and wrapped again, more than once.
    model.to(torch.float64).to(torch.float32)
    plain.to(torch.float64).to(torch.float32)
    for other in ("mixed", "streamed"):
        again = Case(model, it.inp, it.loss)
        with Pair(again, make_plan(again, other), plain=plain) as pair:
            pair.train(2)
        plain.to("cpu")


def _bytes_in_tensors() -> int:
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.device.type != "meta":
            with contextlib.suppress(RuntimeError):  # those of other tests may be fake
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


def test_states_in_transit_are_free_after_a_move_that_failed_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: SteppedShards) -> None:
        raise InputError("these states do not arrive")

    it = case("gpt2")
    plan = make_plan(it, "streamed")
    module = ElixirModule(it.model, plan)
    optimizer = ElixirOptimizer(module, adamw(it.model))
    it.loss(module, it.inp).backward()
    optimizer.step()
    optimizer.zero_grad()
    module.settle()
    states = [weakref.ref(shard.states) for shard in inside.shards(optimizer)]
    monkeypatch.setattr(SteppedShards, "arrive", fails)
    with pytest.raises(InputError, match="do not arrive"):
        module.rehome(mixed(plan))
    assert "since they cannot be moved: these states do not arrive" in caplog.text
    assert "chunks cannot go back either" in caplog.text
    gc.collect()
    assert [each() for each in states] == [None] * len(states) != []
    with pytest.raises(InputError, match="closed"):
        optimizer.step()


@pytest.mark.parametrize("mode", ["mixed", "disk"])
def test_its_memory_is_free_though_the_wrapper_and_its_optimizer_stay(mode: str, tmp_path: Path) -> None:
    it = case("gpt2")
    numel = sum(each.numel() for each in it.model.parameters())
    model, plan = copy.deepcopy(it.model), make_plan(it, "mixed" if mode == "mixed" else "streamed")
    if mode == "disk":
        plan = replace(plan, chunks=tuple(replace(chunk, state_home="disk") for chunk in plan.chunks))
    before = _bytes_in_tensors()
    module = ElixirModule(model, plan, disk_folder=tmp_path)
    optimizer = ElixirOptimizer(module, adamw(model))
    it.loss(module, it.inp).backward()
    optimizer.step()
    it.loss(module, it.inp).backward()  # gradients, too
    held = _bytes_in_tensors()
    module.close()
    optimizer.zero_grad()
    freed = held - _bytes_in_tensors()
    # A gradient and, unless they are on a disk, two moments, in float32.
    assert freed > 0.9 * (4 if mode == "disk" else 12) * numel
    assert _bytes_in_tensors() == before
    for call in (
        optimizer.state_dict,
        lambda: optimizer.clip_grad_norm_(1.0),
        lambda: optimizer.backward(torch.ones(())),
    ):
        with pytest.raises(InputError, match="closed"):
            call()  # type: ignore[operator]
    it.loss(model, it.inp).backward()
    optimizer.zero_grad()
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("error", [InputError("too late"), KeyboardInterrupt()])
def test_a_model_whose_wrapping_fails_in_the_end_has_its_own_code_and_no_memory_of_weights(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = case("llama", layers=1)
    plan, kept = make_plan(it, "mixed", unified_dtype="bfloat16"), copy.deepcopy(it.model)
    before, threads = _bytes_in_tensors(), threading.active_count()
    monkeypatch.setattr(promises, "enter", mock.Mock(side_effect=error))
    with contextlib.suppress(type(error)):
        ElixirModule(it.model, plan, device="cpu", use_fused_kernels=True)
    error.with_traceback(None)
    assert not any("forward" in vars(each) or each._forward_hooks for each in it.model.modules())
    assert all(type(each) is nn.Parameter for each in it.model.parameters())
    for found, expected in zip(it.model.buffers(), kept.buffers(), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype is expected.dtype
    weights_bytes = sum(each.nbytes for each in kept.parameters())
    assert (_bytes_in_tensors(), threading.active_count()) == (before - weights_bytes, threads)


@pytest.mark.parametrize("mode", ["streamed", "mixed"])
def test_a_backward_that_comes_too_late_says_so(mode: str) -> None:
    it = case("gpt2")
    with Pair(it, make_plan(it, mode)) as pair:
        loss = it.loss(pair.module, it.inp)
        pair.module.close()
        with pytest.raises(InputError, match="closed"):
            loss.backward()  # type: ignore[no-untyped-call]


# --- modules that several models share -----------------------------------------------------------------------------

gelu = nn.GELU()
dropless = nn.Sequential(nn.Identity(), nn.Flatten(1))


class Rotary(nn.Module):
    """Buffers alone, as in a table of angles."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0, 1, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles.cos()  # type: ignore[operator]


class Model(nn.Module):
    def __init__(self, table: Rotary) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act, self.flat, self.table = gelu, dropless, table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.table(self.flat(self.act(self.first(x)))))  # type: ignore[no-any-return]


def shared_case(table: Rotary, seed: int) -> Case:
    torch.manual_seed(seed)
    return Case(Model(table), {"x": torch.randn(4, 8)}, square_loss)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("modes", [("streamed", "streamed"), ("resident", "streamed"), ("mixed", "resident")])
def test_models_that_share_modules_without_weights(modes: tuple[str, str], order: str) -> None:
    table = Rotary()
    pairs: list[Pair] = []
    for seed, mode in enumerate(modes):  # the second is traced, copied and wrapped while the first runs
        it = shared_case(table, seed)
        pairs.append(Pair(it, make_plan(it, mode)))
        pairs[-1].train(1)
    for _ in range(2):
        for pair in pairs:
            pair.backward()
        for pair in reversed(pairs):
            pair.step()
            pair.assert_same_weights()
    copy.deepcopy([gelu, dropless, table])
    closed, left = (pairs[0], pairs[1]) if order == "first" else (pairs[1], pairs[0])
    model = closed.module.release()
    left.train(1)
    left.assert_same_weights()
    assert all(
        torch.equal(p.cpu(), q.cpu()) for p, q in zip(model.parameters(), closed.plain.parameters(), strict=True)
    )
    left.module.close()
    for pair in pairs:
        assert_plain(pair.module.module)
    it = shared_case(table, 2)
    with Pair(it, make_plan(it, "streamed")) as third:
        third.train(1)


def test_a_module_with_weights_is_in_one_model() -> None:
    layer = nn.Linear(8, 8)
    for mode in MODES:
        models = [nn.Sequential(layer, nn.Linear(8, 8)) for _ in range(2)]
        cases = [Case(model, {"input": torch.randn(2, 8)}, square_loss) for model in models]
        plans = [make_plan(it, mode) for it in cases]
        module = ElixirModule(models[0], plans[0], device=gpu.DEVICE)
        with pytest.raises(InputError, match=r"run by another ElixirModule already \(0\)"):
            ElixirModule(models[1], plans[1], device=gpu.DEVICE)
        module.close()
        ElixirModule(models[1], plans[1], device=gpu.DEVICE).close()
