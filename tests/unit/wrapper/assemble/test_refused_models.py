"""Models that cannot run under a plan are refused in one sentence, by a search as well as when they are wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elixir
from elixir.errors import InputError
from elixir.search import simple_search
from elixir.tracer.trace import trace_step
from elixir.wrapper import ElixirModule
from tests.common.tracing import CPU

X = {"x": torch.ones(4, 16)}


class Quantised(torch.Tensor):
    """Codes and a scale under one shape, as torchao's tensors are."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[return-value]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Quantised:
        return Quantised(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return type(args[0])(args[0].codes, args[0].scale)
        plain = [arg.codes.to(arg.scale.dtype) * arg.scale if isinstance(arg, Quantised) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


class Named(torch.Tensor):
    """An unknown subclass that only has functions called differently."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Params4bit(nn.Parameter):
    """Named as bitsandbytes' class, before it is packed."""


class Announces(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class DTensor(Quantised):
    """Named as the class of torch.distributed.tensor."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def step(model: nn.Module, inp: dict[str, Any]) -> None:
    model(inp["x"]).square().mean().backward()


def quantised(kind: type[Quantised] = Quantised) -> torch.Tensor:
    return kind(torch.ones(16, 16, dtype=torch.int8), torch.ones(()))


SUBCLASSES: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "packed by a library": (quantised, r"test_refused_models\.Quantised, a tensor subclass of unknown memory"),
    "of other functions": (lambda: torch.ones(16, 16).as_subclass(Named), r"\.Named, a tensor subclass"),
    "4 bits": (lambda: Params4bit(torch.ones(16, 16), False), "a Params4bit that is not quantised yet"),
    "partitioned": (lambda: quantised(DTensor), r"a DTensor, .*full_tensor\(\)"),
    "with functions": (lambda: Announces(torch.ones(16, 16)), "a Announces with a __torch_function__"),
}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (name, place)
        for name in SUBCLASSES
        for place in ("parameter", "buffer")
        if (name, place) != ("packed by a library", "parameter")  # taken apart while a plan runs
    ],
)
def test_tensors_of_unknown_classes(name: str, place: str) -> None:
    make, said = SUBCLASSES[name]
    model = Net()
    plan = simple_search(model, 1, split_number=2, inp=X, step_fn=step, hardware="cpu").plan
    tensor = make()
    if place == "parameter":
        frozen = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        model.layer.register_parameter("odd", frozen)
    else:
        model.layer.register_buffer("odd", tensor)
    for refused in (
        lambda: trace_step(model, X, step, hardware=CPU),
        lambda: ElixirModule(model, plan, device="cpu"),
        lambda: elixir.wrap(model, torch.optim.AdamW([model.layer.bias]), inp=X, step_fn=step, hardware="cpu"),
    ):
        with pytest.raises(InputError, match=rf"^layer\.odd is .*{said}"):
            refused()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def replaced_layer(model: Any) -> None:
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")


def whole(model: Any) -> None:
    model.compile(backend="eager")


def planned(model: nn.Module, where: Any) -> Any:
    return simple_search(model, 1, split_number=3, shard_device=where, inp=X, step_fn=step, hardware="cpu").plan


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.parametrize("compiled", [replaced_layer, whole], ids=lambda each: each.__name__)
def test_compiled_code_put_into_a_wrapped_model(compiled: Callable[[Any], None]) -> None:
    later = ElixirModule(Blocks(), planned(Blocks(), "cpu"), device="cpu")
    compiled(later.module if compiled is not whole else later)
    said = r"was given to torch\.compile, which cannot run with weights that are streamed"
    if torch.__version__ < "2.12" and compiled is replaced_layer:  # its compiler fails before Elixir is asked
        said = "argument of type: <class 'torch.DispatchKey'>"
    with pytest.raises((InputError, torch._dynamo.exc.InternalTorchDynamoError), match=said):
        step(later, X)
    later.close()
