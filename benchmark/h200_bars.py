"""Draws README's picture of the H200: tokens/s of Elixir and its peers in 20 GB, unclipped and clipped.

    python -m benchmark.h200_bars

Reads the newest rows of ``results/gpu_proof_h200.jsonl`` and writes ``docs/images/h200.png``.
"""

from __future__ import annotations

from pathlib import Path

from benchmark.quoted import newest_rows
from elixir.show import style

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "h200.png"
CASE = "gpt2-4b 16x1024 in 20 GB"
CASES = {"no step clipped": CASE, "every step clipped": f"{CASE}, clipped in every step"}
CONTENDERS = {
    "elixir": ("Elixir", style.BLUE),
    "zero-3 offload chunked-loss, micro-batch 16": ("DeepSpeed ZeRO-3 offload", style.ORANGE),
    "zero-offload chunked-loss, micro-batch 16": ("DeepSpeed ZeRO-2 offload", style.YELLOW),
    "fsdp2 offload keep chunked-loss, micro-batch 16": ("FSDP2 offload", style.GREY),
}


def speeds() -> dict[str, dict[str, float]]:
    """Case -> contender -> tokens/s, of those that ran."""
    rows = newest_rows("gpu_proof_h200")
    rows = rows[(rows.part == "offload") & rows.contender.isin(CONTENDERS) & (rows.status == "ok")]
    return {
        name: {row.contender: row.tokens_per_s for row in rows[rows.case == case].itertuples()}
        for name, case in CASES.items()
    }


def main() -> None:
    figure = style.new_figure(2.1)
    axes = figure.add_subplot()
    ticks, at = {}, 0.0
    for case, found in speeds().items():
        first = at
        for contender, (label, colour) in CONTENDERS.items():
            if contender in found:
                axes.barh([-at], [found[contender]], height=0.86, color=colour)
                axes.text(
                    found[contender] + 120,
                    -at,
                    f"{label}  {found[contender]:,.0f}",
                    va="center",
                    fontsize=style.SMALL_PT,
                )
                at += 1
        ticks[-(first + at - 1) / 2] = case
        at += 0.6
    axes.set_yticks([*ticks], [*ticks.values()])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 19_500)
    axes.set_xlabel("tokens/s", fontsize=style.TEXT_PT, labelpad=2)
    style.finish(figure, PICTURE, "GPT-2 4B held to 20 GB of one H200, 16 sequences of 1,024 tokens a step")


if __name__ == "__main__":
    main()
