"""Predicts README's rows: what cards that people have can do with models of today, by ``elixir fit``.

    python -m benchmark.card_table

Appends to ``results/card_table.csv`` one row for each method: settings, bytes, and tokens/s with their range. A row has
what others have published for the same model, method and card, with its source; their settings differ as it says.
"""

from __future__ import annotations

import contextlib
import io
import json

from benchmark.common import append_rows, conditions
from elixir.cli import main as elixir
from elixir.units import GIB

JOBS = (
    ("llama-3.1-8b", "rtx4090", "64GiB", 2048, "full,lora,qlora"),
    ("llama-3.1-8b", "rtx4090", "256GiB", 2048, "full"),
    ("gpt-oss-20b", "rtx4090", "128GiB", 2048, "lora"),
    ("llama-3.1-8b", "h100", "256GiB", 2048, "full,lora"),
    ("llama-3.3-70b", "h100", "512GiB", 2048, "qlora"),
)
"""Model, card, memory of the machine, tokens a sample, methods."""
TORCHTUNE = "torchtune's README of autumn 2024: batches of 2 x 2,048 packed tokens, compiled"
PUBLISHED = {
    ("llama-3.1-8b", "full", "rtx4090", "64GiB"): (
        1650,
        f"{TORCHTUNE}; weights in bfloat16 without masters, 8-bit Adam",
    ),
    ("llama-3.1-8b", "lora", "rtx4090", "64GiB"): (3083, TORCHTUNE),
    ("llama-3.1-8b", "qlora", "rtx4090", "64GiB"): (2413, TORCHTUNE),
    ("llama-3.1-8b", "full", "rtx4090", "256GiB"): (3142, "RoundPipe, arXiv 2604.27085: weights one step old"),
}
"""Model, method, card and memory -> tokens/s that were published, and where."""


def main() -> None:
    began, rows = conditions(), []
    for model, card, host, seq, methods in JOBS:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            elixir(
                [
                    "fit",
                    model,
                    "--hardware",
                    card,
                    "--host-memory",
                    host,
                    "--seq",
                    str(seq),
                    "--methods",
                    methods,
                    "--json",
                ]
            )
        for row in json.loads(text.getvalue())["rows"]:
            tokens, source = PUBLISHED.get((model, row["method"], card, host), (None, ""))
            rows.append(
                {
                    "model": model,
                    "method": row["method"],
                    "card": card,
                    "host_memory": host,
                    "seq": seq,
                    "fits": row["fits"],
                    **{
                        name: row.get(name)
                        for name in ("batch", "accumulation", "pass_size", "checkpoint", "activations", "moments")
                    },
                    "device_gib": round(row["device_peak_bytes"] / GIB, 2) if row["fits"] else None,
                    "host_gib": round(row["host_peak_bytes"] / GIB, 2) if row["fits"] else None,
                    "tokens_per_s": round(row["tokens_per_s"], 1) if row["fits"] else None,
                    "least_tokens_per_s": round(row["tokens_per_s"] * row["step_s"] / row["slowest_s"], 1)
                    if row["fits"]
                    else None,
                    "most_tokens_per_s": round(row["tokens_per_s"] * row["step_s"] / row["fastest_s"], 1)
                    if row["fits"]
                    else None,
                    "published_tokens_per_s": tokens,
                    "published_by": source,
                    **began,
                }
            )
            print({name: rows[-1][name] for name in ("model", "method", "card", "fits", "device_gib", "tokens_per_s")})
    append_rows("card_table", rows)


if __name__ == "__main__":
    main()
