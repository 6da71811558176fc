"""Buffers of sums, against those that PyTorch 2.11 allocated on an H200 in steps of OPT, GPT-2 and ViT."""

from __future__ import annotations

import pytest
import torch

from elixir.tracer.device.cuda_target import held_by_sum

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


def test_a_tensor_of_two_gib_is_halved_and_a_smaller_one_is_not() -> None:
    def held(rows: int) -> int:
        return held_by_sum(meta(rows, 64), [0], HOPPER)

    whole = 1 << 24  # 2 GiB
    assert held(whole) == held(whole // 2) < held(whole - 1)
