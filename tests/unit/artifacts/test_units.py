"""Sizes and dtypes as people write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elixir.errors import InputError
from elixir.units import GIB, dtype_bytes, dtype_name, format_bytes, is_dtype_name, parse_bytes, parse_dtype


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


@pytest.mark.parametrize("text", ["12XB", "", "GiB", "-1", "-1GiB", "1e9", "1,5GiB", "12 G B", "nan", "inf", "٣GiB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(InputError, match="no size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["56", " 64.5 ", "1048575"])
def test_a_small_number_lacks_its_unit(text: str) -> None:
    with pytest.raises(InputError, match=rf"write {text.strip()}GiB, or {text.strip()}B for bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [True, None, 1.5, -1, b"1", float("nan")])
def test_values_that_are_no_sizes(value: Any) -> None:
    with pytest.raises(InputError, match="size"):
        parse_bytes(value)


@given(st.integers(0, 2**50))
def test_whole_numbers_are_exact(size: int) -> None:
    assert parse_bytes(f"{size}B") == size
    assert parse_bytes(f"{size}KiB") == size * 1024


@given(st.integers(1, 2**55))
def test_shown_size_is_near(size: int) -> None:
    shown = format_bytes(size)
    assert abs(parse_bytes(shown.replace(" ", "")) - size) <= max(0.01 * size, 1)


def test_shown_units() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(GIB) == "1.00 GiB"
    # GiB until there are ten TiB: memories of one machine are compared in GiB.
    assert format_bytes(1301 * GIB) == "1301.00 GiB"
    assert format_bytes(20 * 1024 * GIB) == "20.00 TiB"


@pytest.mark.parametrize("name", ["bf16", "BF16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtypes(name: str | torch.dtype) -> None:
    assert parse_dtype(name) is torch.bfloat16


@pytest.mark.parametrize("name", ["bf17", "", "int8x", "none"])
def test_unknown_dtypes_are_named(name: str) -> None:
    with pytest.raises(InputError, match="unknown dtype"):
        parse_dtype(name)


def test_nearest_dtype_is_suggested() -> None:
    with pytest.raises(InputError, match="did you mean.*bf16"):
        parse_dtype("bf17")


def test_names_of_dtypes_lead_back() -> None:
    dtypes = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
    assert {name: dtype_bytes(name) for name in dtypes} == {name: each.itemsize for name, each in dtypes.items()}
    assert {name for name in dtypes if is_dtype_name(name)} == {dtype_name(each) for each in dtypes.values()}


@pytest.mark.parametrize("name", ["Tensor", "nn", "no_such", ""])
def test_what_is_no_dtype(name: str) -> None:
    with pytest.raises(InputError, match="no torch dtype"):
        dtype_bytes(name)


@pytest.mark.parametrize("value", [2**60 + 1, str(2**60 + 1), "1025PiB", "999999999TiB"])
def test_sizes_that_no_machine_has(value: Any) -> None:
    with pytest.raises(InputError, match="at most 1 EiB|no size"):
        parse_bytes(value)
