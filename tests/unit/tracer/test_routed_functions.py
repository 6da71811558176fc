"""Functions that a trace routes elsewhere do what PyTorch's do where they can be compared: on numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_function

from elixir.hardware.profile import preset
from elixir.tracer.device import target_for
from elixir.tracer.device.routed_functions import quantised_kernels, routed

ROWS, WIDTH = 6, 8


def composed(function: Callable[..., torch.Tensor], *sizes: tuple[int, ...]) -> list[torch.fx.GraphModule]:
    """The graphs of a function's forward and backward that a compiler records in a trace for a GPU."""
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    given = [torch.empty(size, device="meta", requires_grad=True) for size in sizes]
    with routed(target_for(preset("h200"))):
        aot_function(function, fw_compiler=kept, bw_compiler=kept)(*given).sum().backward()
    return graphs


FUNCTIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "mish": (F.mish, ((ROWS, WIDTH),)),
    "RMS norm": (lambda x, weight: F.rms_norm(x, (WIDTH,), weight, 0.1), ((ROWS, WIDTH), (WIDTH,))),
    "RMS norm without a weight": (lambda x: F.rms_norm(x, (ROWS, WIDTH)), ((ROWS, WIDTH),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_composed_functions_and_their_gradients_are_those_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    function, sizes = FUNCTIONS[name]
    forward, backward = composed(function, *sizes)
    given = [torch.randn(size, requires_grad=True) for size in sizes]
    expected = function(*given)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    with torch.no_grad():
        result, *saved = forward(*given)
        slopes = backward(*saved, gradient)
    torch.testing.assert_close(result, expected)
    for slope, tensor in zip(slopes, given, strict=True):
        torch.testing.assert_close(slope, tensor.grad)


@pytest.mark.parametrize("nested", [False, True])
def test_products_with_packed_weights_are_those_with_the_unpacked(nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    if not quantised_kernels():
        pytest.skip("this bitsandbytes has no such operator")
    weight, x, bias = torch.randn(64, 64), torch.randn(3, 64), torch.randn(64)
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
    inner = (state.state2.absmax, state.absmax, state.state2.code, state.offset) if nested else (state.absmax,)
    found = quantised_kernels()["gemm_4bit"](x, packed, state.shape, inner[0], 64, "nf4", bias, *inner[1:])
    torch.testing.assert_close(found, F.linear(x, functional.dequantize_4bit(packed, state), bias))
