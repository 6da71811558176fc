"""Predictions of a training step in other runtimes, and files that these read: FSDP2, DeepSpeed, DDP.

Arithmetic over a trace and a hardware profile; nothing here searches, trains or needs a GPU.
"""

from elixir.runtimes.choose import RUNTIMES, Choice, choices, predict
from elixir.runtimes.configs import by_hand, config_text
from elixir.runtimes.estimate import Estimate
from elixir.runtimes.work import Prediction, Setting, Work

__all__ = [
    "RUNTIMES",
    "Choice",
    "Estimate",
    "Prediction",
    "Setting",
    "Work",
    "by_hand",
    "choices",
    "config_text",
    "predict",
]
