"""A model, a batch and a step of the user's, to be named on a command line."""

from __future__ import annotations

import torch

OWN_MODEL, OWN_INPUT, OWN_STEP = (f"{__name__}:own_{what}" for what in ("model", "input", "step"))


def own_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 8))


def own_input() -> torch.Tensor:
    return torch.ones(64, 256)


def own_step(model: torch.nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
