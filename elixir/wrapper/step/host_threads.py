"""Gives the lane of CPU Adam its threads and cores."""

from __future__ import annotations

import logging
import os
from functools import partial

import torch

from elixir.hardware.host_share import core_list, rank_threads
from elixir.hardware.own_threads import use_threads
from elixir.wrapper.engine import Engine

logger = logging.getLogger(__name__)


def _all_cores() -> list[int] | None:
    """The cores that this thread may use, and so the process except for its lanes."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def set_host_threads(engine: Engine, asked: int | None) -> int:
    """Makes CPU Adam run on `asked` threads, or by default on this rank's part of the cores; returns their number.

    All optimizers of an engine share the lane: the last one decides.

    Raises:
        InputError: ``ELIXIR_BIND`` makes no sense.
    """
    share = engine.host_share
    compute_threads = torch.get_num_threads() if engine.device.type == "cpu" else 0
    threads, cores = rank_threads(share, compute_threads, asked, enough=engine.plan.host_threads)
    # An earlier optimizer may have bound the lane.
    engine.lanes.host_adam.submit(partial(use_threads, threads, cores or _all_cores()))
    if any(chunk.plan.trainable and chunk.plan.update_home == "host" for chunk in engine.chunks):
        where = f"bound to cores {core_list(cores)}" if cores is not None else "not bound"
        logger.info("the host's Adam runs on %d thread%s, %s", threads, "s" if threads > 1 else "", where)
        if threads > share.all_cores:
            logger.warning(
                "host_threads=%d is more than the %d cores that this process may use; its threads will wait for each "
                "other: give fewer, or None",
                threads,
                share.all_cores,
            )
    return threads
