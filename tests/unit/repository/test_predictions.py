"""The page of predictions: every row's command is one that parses, and cells say what a row has."""

from __future__ import annotations

import shlex

import pandas as pd
import pytest

from benchmark.predictions import CARDS, MODELS, command, table
from benchmark.quoted import newest_rows
from elixir.cli.options import build_parser, normalise
from elixir.hardware.profile import preset_names


@pytest.mark.parametrize("model", MODELS)
def test_commands_parse_and_name_presets(model: str) -> None:
    assert set(CARDS) <= set(preset_names())
    for card in CARDS:
        parsed = build_parser().parse_args(normalise(shlex.split(command(card, model))[1:]))
        assert parsed.model in (model, "flux_lora:make_model")
        assert parsed.hardware == card


def test_rows_have_their_commands_and_ranges_around_them() -> None:
    rows = newest_rows("predictions")
    assert len(rows) >= len(CARDS)
    for found in rows.to_dict("records"):
        assert found["command"] == command(found["card"], found["model"])
        if not pd.isna(found["tokens_per_s"]):
            assert found["low"] <= found["tokens_per_s"] <= found["high"]


def test_a_cell_says_speed_range_and_peaks_or_that_nothing_fits() -> None:
    numbers = {"tokens_per_s": 3142.0, "low": 1049.0, "high": 5180.0, "device_gib": 22.1, "host_gib": 131.4}
    empty = dict.fromkeys(numbers, float("nan"))
    rows = pd.DataFrame(
        [
            {"card": "rtx4090", "model": "opt-13b", **numbers},
            {"card": "h100", "model": "opt-13b", **empty},
        ]
    )
    assert table(rows).splitlines() == [
        "| tokens/s | rtx4090 | h100 |",
        "|---|---|---|",
        "| opt-13b | **3,100** (1,000 to 5,200); 22 + 131 GiB | does not fit |",
    ]
