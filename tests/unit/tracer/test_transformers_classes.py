"""Classes of transformers: traced, and trained under a streamed plan with the bits of plain PyTorch."""

from __future__ import annotations

import pytest

from benchmark.transformers_classes import apart, judge, listed, prepare

SAMPLE = ("BloomForCausalLM", "ArceeForCausalLM")
"""Classes on the list that every run of the tests judges."""
TRACED, IDENTICAL = 0.97, 0.96
"""Shares of the list that have to be."""
BAR_PERCENT = 1.0


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_is_traced_and_trains_with_the_same_bits(name: str) -> None:
    (entry,) = [entry for entry in listed() if entry[2] == name]
    row = judge(*entry)
    assert row["traced"], row["refused"]
    assert row["identical"], row["refused"]
    assert abs(row["difference_percent"]) <= BAR_PERCENT
    assert row["traced_h200_bf16"], row


@pytest.mark.slow
def test_of_all_classes_on_the_list() -> None:
    prepare()
    rows = {entry[2]: apart(judge, *entry) for entry in listed()}
    for what, share in (("traced", TRACED), ("identical", IDENTICAL)):
        missing = {name: row.get("error") or row["refused"] for name, row in rows.items() if not row.get(what)}
        assert len(missing) <= (1 - share) * len(rows), f"not {what}: {missing}"
    far = {name: row["difference_percent"] for name, row in rows.items() if row.get("traced") and not row["notes"]}
    assert [name for name, percent in far.items() if abs(percent) > BAR_PERCENT] == []
