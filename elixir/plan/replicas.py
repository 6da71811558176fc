"""The replicas of a model that a number of ranks can form."""

from __future__ import annotations

from elixir.errors import InputError


def check_replicas(replicas: int, world_size: int, name: str = "replicas") -> None:
    """Raises `InputError` unless so many ranks form so many replicas of two ranks or more each."""
    if replicas == 1:
        return
    most = max((r for r in range(1, world_size // 2 + 1) if world_size % r == 0), default=1)
    if not 1 <= replicas <= most or world_size % replicas:
        raise InputError(
            f"{name} must divide the {world_size} ranks into replicas of two ranks or more, found {replicas}; give a "
            f"divisor of {world_size} from 1 to {most}"
        )


def divisions(world_size: int, ranks_per_host: int) -> tuple[int, ...]:
    """Numbers of replicas that fit the machines, rising from 1: a replica takes a part of a machine or whole ones.

    >>> divisions(16, 8)
    (1, 2, 4, 8)

    Args:
        world_size: ranks of all replicas.
        ranks_per_host: how many of them share a machine.
    """
    shards = (world_size // replicas for replicas in range(1, world_size // 2 + 1) if world_size % replicas == 0)
    fitting = [each for each in shards if each % ranks_per_host == 0 or ranks_per_host % each == 0]
    return tuple(dict.fromkeys((1, *(world_size // each for each in fitting))))
