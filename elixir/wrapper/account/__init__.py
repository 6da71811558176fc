"""The account of a step: counts, clock, report."""

from __future__ import annotations

from elixir.wrapper.account.counts import StepAccount
from elixir.wrapper.account.report import EarlyCounts, StepReport

__all__ = ["EarlyCounts", "StepAccount", "StepReport"]
