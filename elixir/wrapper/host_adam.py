"""The lane of the host's Adam gets its threads and cores."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING

import torch

from elixir.host_threads import core_list, rank_threads
from elixir.own_threads import use_threads

if TYPE_CHECKING:
    from elixir.wrapper.module import ElixirModule

logger = logging.getLogger(__name__)


def _all_cores() -> list[int] | None:
    """Those that this thread, and so the process but for its lanes, may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def set_host_threads(module: ElixirModule, asked: int | None) -> int:
    """Have what steps on the host run on `asked` threads, or on as many as the rule gives; how many.

    The lane is the module's: of several optimizers the last one says.

    Raises:
        InputError: ``ELIXIR_BIND`` makes no sense.
    """
    share = module.host_share
    compute_threads = torch.get_num_threads() if module.device.type == "cpu" else 0
    threads, cores = rank_threads(share, compute_threads, asked)
    # An earlier optimizer may have bound the lane.
    module._lanes.host_adam.submit(partial(use_threads, threads, cores or _all_cores()))
    if any(chunk.plan.trainable and chunk.plan.state_home == "host" for chunk in module.chunks):
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
