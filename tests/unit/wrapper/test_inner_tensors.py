"""Frozen parameters of tensor subclasses that hold others: taken apart, planned, streamed, saved and given back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.errors import InputError
from elixir.hardware.profile import preset
from elixir.torch_private import tree_map
from elixir.tracer.trace import trace_step
from tests.common import gpu
from tests.common.parity import MODES, Case, Pair, assert_as_planned, make_plan, square_loss

aten = torch.ops.aten


class _Holding(torch.Tensor):
    """Applies views, copies and the like to the tensors inside."""

    inside: tuple[str, ...] = ()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.inside), None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Any:
        return cls(*inner.values())

    def each(self, function: Any) -> Any:
        return type(self)(*(function(getattr(self, name)) for name in self.inside))


class Scales(_Holding):
    """A scale and a shift for each row."""

    inside = ("scale", "shift")

    @staticmethod
    def __new__(cls: Any, scale: torch.Tensor, shift: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, scale.shape, dtype=scale.dtype, device=scale.device)

    def __init__(self, scale: torch.Tensor, shift: torch.Tensor) -> None:
        self.scale, self.shift = scale, shift

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].each(lambda inner: func(inner, *args[1:], **(kwargs or {})))


class ScaledTensor(_Holding):
    """Whole numbers with a scale and a shift for each row; operators compute with the product."""

    inside = ("numbers", "inner")

    @staticmethod
    def __new__(cls: Any, numbers: torch.Tensor, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=inner.dtype, device=numbers.device)

    def __init__(self, numbers: torch.Tensor, inner: Scales) -> None:
        self.numbers, self.inner = numbers, inner

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.numbers.to(dtype) * self.inner.scale.to(dtype) + self.inner.shift.to(dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.t.default, aten.detach.default, aten.clone.default, aten.alias.default):
            return args[0].each(lambda inner: func(inner, *args[1:], **(kwargs or {})))
        if func is aten._to_copy.default:  # which may not change the numbers' dtype
            moved = {key: value for key, value in (kwargs or {}).items() if key != "dtype"}
            return args[0].each(lambda inner: func(inner, **moved))
        dtype = next(each.dtype for each in args if isinstance(each, torch.Tensor) and not isinstance(each, cls))
        return func(*tree_map(lambda each: each.dequantised(dtype) if isinstance(each, cls) else each, args))


def scaled(weight: torch.Tensor) -> ScaledTensor:
    """The weight in eight bits."""
    shift = weight.mean(1, keepdim=True)
    scale = (weight - shift).abs().amax(1, keepdim=True) / 127
    return ScaledTensor(((weight - shift) / scale).round().to(torch.int8), Scales(scale, shift))


def scaled_case(*, tied: bool = False) -> Case:
    """Linear layers with quantised weights that compute below autograd, so that it saves views of them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
        inp = {"input": torch.randn(3, 12)}
    for index in (0, 2):
        model[index].weight = nn.Parameter(scaled(model[index].weight.detach()), requires_grad=False)
    if tied:
        model[2].weight = model[0].weight
    return Case(model, inp, square_loss)


def step(model: nn.Module, inp: dict[str, Any]) -> None:
    square_loss(model, inp).backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tied", [False, True])
def test_steps_have_the_bits_of_plain_pytorch(mode: str, tied: bool) -> None:
    it = scaled_case(tied=tied)
    with Pair(it, make_plan(it, mode, split_number=3), max_norm=0.5) as pair:
        pair.train(4)
        pair.assert_same_weights()
        assert_as_planned(pair.module, ("loads",))


def test_state_dicts_have_the_whole(tmp_path: Any) -> None:
    it, other = scaled_case(), scaled_case()
    expected = {name: value.clone() for name, value in it.model.state_dict().items()}
    with torch.no_grad():
        for weight in (other.model[0].weight, other.model[2].weight):
            weight.numbers.zero_()
    plan = make_plan(it, "streamed")
    one, two = elixir.ElixirModule(it.model, plan), elixir.ElixirModule(other.model, plan)
    for given in (one.state_dict(), one.module.state_dict()):
        assert list(given) == list(expected)
        assert type(given["0.weight"]) is ScaledTensor
    two.load_state_dict(one.state_dict())
    for name, value in two.state_dict().items():
        assert torch.equal(_plain(value), _plain(expected[name])), name
    changed = dict(one.state_dict()) | {"0.weight": torch.zeros(12, 12)}
    with pytest.raises(RuntimeError, match=r"0\.weight is a ScaledTensor of another form"):
        two.load_state_dict(changed)
    with torch.no_grad(), two.gathered(two.module[0].weight, write=True):
        two.module[0].weight.elixir_held[0].data.zero_()
    save_checkpoint(tmp_path / "saved", {"model": one}, wait=True)
    assert not torch.equal(_plain(two.state_dict()["0.weight"]), _plain(expected["0.weight"]))
    load_checkpoint(tmp_path / "saved", {"model": two})
    weight = other.model[2].weight
    two.close()
    one.close()
    assert type(other.model[0]) is nn.Linear
    assert {name: type(value) for name, value in other.model.state_dict().items()} == {
        name: type(value) for name, value in expected.items()
    }
    assert type(weight) is not ScaledTensor, "while the plan ran, it was put together for each use"
    for name, value in other.model.state_dict().items():
        assert torch.equal(_plain(value), _plain(expected[name])), name


def test_a_failed_wrapping_puts_them_together() -> None:
    it, other = scaled_case(), scaled_case()
    weight = it.model[0].weight
    with pytest.raises(InputError):
        elixir.ElixirModule(it.model, make_plan(other, "streamed"), weights={"no": torch.zeros(1)})
    assert it.model[0].weight is weight
    assert torch.equal(_plain(weight), _plain(other.model[0].weight))


def test_one_that_trains_is_refused_by_name() -> None:
    it = scaled_case()
    it.model[2].weight.requires_grad_(True)
    with pytest.raises(InputError, match=r"2\.weight is a trained ScaledTensor.*freeze it"):
        trace_step(it.model, it.inp, step, hardware=preset("cpu"))


def test_writing_to_one_is_refused() -> None:
    it = scaled_case()
    module = elixir.ElixirModule(it.model, make_plan(it, "streamed"))
    with pytest.raises(InputError, match="zero_ writes to a ScaledTensor"):
        it.model[0].weight.zero_()
    module.close()


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.dequantised() if isinstance(value, ScaledTensor) else value


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_files_of_torchao_may_be_given(dtype: torch.dtype, tmp_path: Any) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    it, other = scaled_case(), scaled_case()
    values: dict[str, torch.Tensor] = {}
    for name, value in it.model.state_dict().items():
        if isinstance(value, ScaledTensor):
            path = name.replace("weight", "_weight")
            values[f"{path}_numbers"] = value.numbers.to(dtype)
            # torchao's own tensors hold ordinary ones alone, so the names of others' inner ones are ours
            values |= {f"{name}.inner.{own}": getattr(value.inner, own) for own in ("scale", "shift")}
        else:
            values[name] = value
    save_file(values, tmp_path / "model.safetensors")
    with torch.no_grad():
        other.model[0].weight.numbers.zero_()
    plan = make_plan(other, "streamed")
    if dtype is torch.uint8:
        with pytest.raises(InputError, match=r"0\._weight_numbers is of torch\.uint8.*torch\.int8 in the model"):
            elixir.ElixirModule(other.model, plan, weights=tmp_path)
        return
    module = elixir.ElixirModule(other.model, plan, weights=tmp_path)
    output = module(**it.inp)
    module.close()  # what it has read is in the model again
    assert torch.allclose(output.cpu(), it.model(**it.inp), atol=0 if gpu.has_cpu_kernels() else 1e-6)
    assert torch.equal(other.model(**it.inp), it.model(**it.inp))


def test_wrap_may_check_first_what_a_smaller_machine_refuses() -> None:
    it = scaled_case()
    optimizer = torch.optim.AdamW(it.model.parameters())
    small = {"hardware": "cpu", "device_memory": "1MiB", "host_budget": "64MiB", "placement": "cpu"}
    module, _ = elixir.wrap(it.model, optimizer, inp=it.inp, step_fn=step, strict=True, **small)
    weight = module.module[0].weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.dtype) == ((12, 12), torch.float32)
    assert repr(weight) == "ScaledTensor of shape [12, 12] and torch.float32, which a plan has taken apart"
