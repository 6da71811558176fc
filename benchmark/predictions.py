"""Predicted tokens per second, card against model, with the command of each row: docs/appendix/predictions.md.

    python benchmark/predictions.py [--models A,B] [--cards A,B] [--no-record]

Runs `elixir plan` for every card and model, and appends a row for each to ``results/predictions.csv``; a model that fits
under no plan is a row without seconds. `make figures` then fills the table in.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pandas as pd

from benchmark.common import Row, append_rows, conditions
from elixir.cli import main as elixir_main
from elixir.units import GIB

CARDS = ("rtx3090", "rtx4090", "rtx5090", "a6000", "a100", "h100", "h200")
MODELS = ("llama-3.1-8b", "qwen2.5-7b", "opt-13b", "qwen2.5-14b", "qwen2.5-32b", "mixtral-8x7b", "flux.1-dev LoRA")
STEP = "--batch 4 --seq 2048 --accumulation 4 --activation-checkpointing --fused-kernels"
HOST = {"mixtral-8x7b": "1TiB"}
"""Host memory that is offered; the column says how much of it the plan takes."""
USUAL_HOST = "512GiB"
OF_AN_EXAMPLE = {
    "flux.1-dev LoRA": "flux_lora:make_model --inp flux_lora:batch --step flux_lora:train_step --host-budget 64GiB"
}
"""Models that a file in ``example/`` makes (which need diffusers) -> the arguments of their command, from there."""
EXAMPLES = Path(__file__).resolve().parent.parent / "example"


def command(card: str, model: str) -> str:
    """The call whose answer is the row of a card and a model."""
    if model in OF_AN_EXAMPLE:
        return f"elixir plan {OF_AN_EXAMPLE[model]} --hardware {card}"
    return f"elixir plan {model} --hardware {card} --host-budget {HOST.get(model, USUAL_HOST)} {STEP}"


def row(card: str, model: str) -> Row:
    """One prediction."""
    before, out, errors = conditions(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = elixir_main([*shlex.split(command(card, model))[1:], "--json"])
    found: Row = {"card": card, "model": model, "command": command(card, model)}
    if status != 0:
        if "needed" not in errors.getvalue():
            raise SystemExit(f"{command(card, model)}: {errors.getvalue()}")
        return {**found, "tokens_per_s": "", "low": "", "high": "", "device_gib": "", "host_gib": "", **before}
    plan = json.loads(out.getvalue())
    predicted, step = plan["predicted"], plan["step"]
    tokens = plan["accumulation"] * (step["tokens"] or image_tokens()) * plan["world_size"]
    low_s, high_s = predicted["range_s"]
    return {
        **found,
        "tokens_per_s": round(tokens / predicted["seconds"]["total"], 1),
        "low": round(tokens / high_s, 1),
        "high": round(tokens / low_s, 1),
        "device_gib": round(predicted["device_peak_bytes"] / GIB, 2),
        "host_gib": round(predicted["host_peak_bytes"] / GIB, 2),
        **before,
    }


def image_tokens() -> int:
    """Tokens of the images of a micro-batch, 4,096 of 1024 x 1024 pixels each."""
    import flux_lora

    return int(flux_lora.SAMPLES * flux_lora.IMAGE_TOKENS)


def _rounded(value: float) -> str:
    """Two significant digits: the range allows no more."""
    digits = max(0, math.floor(math.log10(value)) - 1)
    return f"{round(value, -digits):,.0f}"


def table(rows: pd.DataFrame) -> str:
    """Models by cards, tokens/s with their range, then what each row needs, as Markdown."""
    cards = [card for card in CARDS if card in set(rows["card"])]
    models = [model for model in MODELS if model in set(rows["model"])]
    by_case = {(found["card"], found["model"]): found for found in rows.to_dict("records")}

    def cell(card: str, model: str) -> str:
        found = by_case.get((card, model))
        if found is None:
            return "not asked yet"
        if pd.isna(found["tokens_per_s"]):
            return "does not fit"
        low, middle, high = (_rounded(found[name]) for name in ("low", "tokens_per_s", "high"))
        return f"**{middle}** ({low} to {high}); {found['device_gib']:.0f} + {found['host_gib']:.0f} GiB"

    lines = [f"| tokens/s | {' | '.join(cards)} |", "|---" * (len(cards) + 1) + "|"]
    lines += [f"| {model} | {' | '.join(cell(card, model) for card in cards)} |" for model in models]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--no-record", action="store_true", help="do not append to the results")
    args = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    for model in args.models.split(","):
        for card in args.cards.split(","):
            found = row(card, model)
            print(
                {name: found[name] for name in ("card", "model", "tokens_per_s", "device_gib", "host_gib")}, flush=True
            )
            if not args.no_record:
                append_rows("predictions", [found])


if __name__ == "__main__":
    main()
