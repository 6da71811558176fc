"""Plans OPT-13B on one H200 with 128 GiB of host memory, from Python, and saves the plan.

    python example/search.py            # prints the plan and writes plan.json, plan.png

The model lives on the meta device, so it takes no memory here, and no GPU is needed. Everything passed below except the
model and the world size can be left out for a Hugging Face model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elixir import Plan
from elixir.hardware.profile import preset
from elixir.models import build, default_input
from elixir.search import optimal_search
from elixir.show.plan_map import plot_plan
from elixir.units import GIB

WORLD_SIZE = 1


def train_step(model: nn.Module, batch: dict[str, Any]) -> None:
    """One training step up to its gradients: this is what the search watches."""
    loss = model(**batch).loss
    loss.backward()


def main() -> None:
    """Builds, searches, saves, loads."""
    model = build("opt-13b", dtype=torch.bfloat16, checkpoint="non-reentrant")
    batch = default_input(model, batch=8, seq=1024)
    sr = optimal_search(
        model,
        WORLD_SIZE,
        unified_dtype=torch.bfloat16,
        optimizer_type="Adam",
        overlap=True,
        inp=batch,
        step_fn=train_step,
        hardware=preset("h200"),
        host_memory=128 * GIB,
    )
    print(sr)

    sr.save("plan.json")
    plot_plan(sr, "plan.png")
    # The file is all that a run needs; it is refused for any other model.
    if Plan.load("plan.json") != sr:
        raise SystemExit("the plan did not survive the way through its file")
    print("written: plan.json, plan.png")


if __name__ == "__main__":
    main()
