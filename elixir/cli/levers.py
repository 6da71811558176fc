"""What to change where nothing fits, in the command line's own words."""

from __future__ import annotations

import argparse

from elixir.cli.files import trace_in
from elixir.errors import Lever, PlanError

_OF_THE_STEP = {
    "batch": "halve the step: --batch or --seq",
    "checkpoint": "turn on activation checkpointing: --checkpoint",
}
"""Argument -> what settles it where the step is traced."""


def in_flags(error: PlanError, args: argparse.Namespace) -> str:
    """The message of `error`, whose levers name the flag of the command wherever it has one.

    Args:
        error: what the command ended with.
        args: what it was given.
    """
    return error.in_words(lambda lever: _action(lever, args))


def _action(lever: Lever, args: argparse.Namespace) -> str:
    if lever.argument not in vars(args) or (lever.argument == "batch" and args.inp):
        return lever.action
    if lever.argument in _OF_THE_STEP:
        again = " (of `elixir profile`: the trace has settled it)" if trace_in(args.model) is not None else ""
        return _OF_THE_STEP[lever.argument] + again
    flag = f"--{lever.argument.replace('_', '-')} {lever.value}".rstrip()
    named = f"{lever.argument} {lever.value!r}" if lever.value else lever.argument
    return lever.action.replace(named, flag) if named in lever.action else f"{lever.action}: {flag}"
