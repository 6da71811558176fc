"""Buffers of sums, against those that PyTorch 2.11 allocated on an H200 in steps of OPT, GPT-2 and ViT."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elixir.hardware.profile import preset
from elixir.tracer.device.cuda_target import held_by_sum
from elixir.tracer.trace import trace_step

HOPPER = (9, 0)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("rows", "columns", "sums", "counters"),
    [
        (6304, 1024, 51904512, 32),
        (6304, 4096, 138412032, 128),
        (12608, 1024, 103284736, 32),
        (12608, 4096, 138412032, 128),
        (8192, 768, 50331648, 24),
        (8192, 3072, 138412032, 96),
        (4096, 1600, 52428800, 52),
        (4096, 4800, 137625600, 152),
        (4096, 6400, 140902400, 200),
    ],
)
def test_sums_over_rows_hold_what_was_seen(rows: int, columns: int, sums: int, counters: int) -> None:
    assert held_by_sum(meta(rows, columns), [0], HOPPER) == sums + counters
    assert held_by_sum(meta(rows, columns, dtype=torch.float32), [0], HOPPER) == sums + counters


def test_layout_decides_and_not_the_order_of_dimensions() -> None:
    # A convolution's gradient whose channels lie innermost: the sum over images and positions, as it was seen.
    image = meta(32, 14, 14, 1024).permute(0, 3, 1, 2)
    assert held_by_sum(image, [0, 2, 3], HOPPER) == 51380224 + 32
    assert held_by_sum(image.contiguous(), [0, 2, 3], HOPPER) == 0
    assert held_by_sum(meta(32, 197, 1024), [-2, 0], HOPPER) == held_by_sum(meta(6304, 1024), [0], HOPPER)
    assert held_by_sum(meta(6304, 64, 16), [0], HOPPER) == held_by_sum(meta(6304, 1024), [0], HOPPER)


def test_columns_of_several_dimensions_are_read_as_their_memory_lies() -> None:
    whole = held_by_sum(meta(8192, 1536), [0], HOPPER)
    pairs = meta(8192, 512, 8)[..., :3]  # three of eight follow each other: one column at a time
    assert held_by_sum(meta(8192, 512, 3), [0], HOPPER) == whole
    assert held_by_sum(pairs, [0], HOPPER) != whole
    repeated = meta(1, 1).expand(8192, 1536)  # all is one number, and PyTorch takes the sum for one over rows
    assert held_by_sum(repeated, [0], HOPPER) == held_by_sum(pairs, [0], HOPPER)


def test_a_tensor_of_two_gib_is_halved_and_a_smaller_one_is_not() -> None:
    def held(rows: int) -> int:
        return held_by_sum(meta(rows, 64), [0], HOPPER)

    whole = 1 << 24  # 2 GiB
    assert held(whole) == held(whole // 2) < held(whole - 1)


def test_small_sums_and_those_over_the_fastest_dimension_hold_nothing() -> None:
    for tensor, dims in ((meta(512, 1024), [0]), (meta(6304, 1024), [1]), (meta(6304, 1024), []), (meta(0, 8), [0])):
        assert held_by_sum(tensor, dims, HOPPER) == 0
    assert held_by_sum(meta(6304, 1 << 20), [0], HOPPER) == 0  # columns enough for all multiprocessors
    assert held_by_sum(meta(), [], HOPPER) == 0


def test_smaller_devices_split_less_and_odd_columns_are_read_one_by_one() -> None:
    assert held_by_sum(meta(8192, 4096), [0], (8, 0)) < held_by_sum(meta(8192, 4096), [0], HOPPER)
    assert held_by_sum(meta(8192, 1023), [0], HOPPER) % (4 * 1023 * 32) == 4 * 32  # a warp wide, a counter per block
    whole, half = meta(2 << 20, 1024, dtype=torch.float32), meta(1 << 18, 1024, dtype=torch.float32)
    assert held_by_sum(whole, [0], HOPPER) == held_by_sum(half, [0], HOPPER)  # halved until 2 GiB are left


def test_a_step_holds_the_sum_of_a_bias_while_it_runs() -> None:
    def step(model: nn.Module, inp: dict[str, torch.Tensor]) -> None:
        model(inp["x"]).square().sum().backward()

    model = nn.Linear(1024, 1024, dtype=torch.bfloat16)
    trace = trace_step(model, {"x": meta(12608, 1024)}, step, hardware=preset("h200"))
    assert trace.peak_operator == "aten.sum.dim_IntList"
    expected = 2 * 2 * 12608 * 1024 + 103284736  # input, gradient, sums
    assert 0 < trace.activation_peak_bytes - trace.workspace_bytes - expected <= 2048  # the loss, the counters


@pytest.mark.parametrize("dims", [(), (0,), (-1,)])
def test_a_number_is_summed_without_a_buffer(dims: tuple[int, ...]) -> None:
    assert held_by_sum(torch.empty((), device="meta"), dims, (9, 0)) == 0
