"""Sizes and dtypes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elixir.errors import InputError
from elixir.units import dtype_bytes, dtype_name, is_dtype_name, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("128GiB", 128 * 2**30),
        ("80GB", 80 * 10**9),
        ("512M", 512 * 2**20),
        ("1.5 TiB", 3 * 2**39),
        (" 7k ", 7168),
        ("1048576", 2**20),
        ("12b", 12),
        (12, 12),
        ("0", 0),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("value", [True, None, 1.5, -1, b"1", float("nan")])
def test_values_that_are_no_sizes(value: Any) -> None:
    with pytest.raises(InputError, match="size"):
        parse_bytes(value)


def test_names_of_dtypes_lead_back() -> None:
    dtypes = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
    assert {name: dtype_bytes(name) for name in dtypes} == {name: each.itemsize for name, each in dtypes.items()}
    assert {name for name in dtypes if is_dtype_name(name)} == {dtype_name(each) for each in dtypes.values()}


@pytest.mark.parametrize("value", [2**60 + 1, str(2**60 + 1), "1025PiB", "999999999TiB"])
def test_sizes_that_no_machine_has(value: Any) -> None:
    with pytest.raises(InputError, match="at most 1 EiB|no size"):
        parse_bytes(value)
