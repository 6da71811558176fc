"""The replicas of a model that a number of ranks can form, and what does not go with several."""

from __future__ import annotations

from elixir.errors import InputError


def check_replicas(replicas: int, world_size: int, name: str = "replicas") -> None:
    """Raises `InputError` unless so many ranks form so many replicas of two ranks or more each."""
    if replicas == 1:
        return
    most = max((r for r in range(1, world_size // 2 + 1) if world_size % r == 0), default=1)
    if replicas < 1 or world_size % replicas or replicas > most:
        raise InputError(
            f"{name} must divide the {world_size} ranks into replicas of two ranks or more, found {replicas}; give a "
            f"divisor of {world_size} from 1 to {most}"
        )


def refuse_with_replicas(replicas: int, *, matrices: bool, in_files: bool, forward: bool) -> None:
    """Raises `InputError` if several replicas are asked for together with what they cannot do yet.

    Args:
        replicas: of the model.
        matrices: whether parameters are stepped as whole matrices.
        in_files: whether frozen weights stay in their files.
        forward: whether the plan is for forwards alone.
    """
    if replicas == 1:
        return
    for found, what, remedy in (
        (matrices, "an optimizer of whole matrices such as Muon", "an elementwise one such as AdamW"),
        (in_files, "frozen_weights='files'", "frozen_weights='host'"),
        (forward, "a plan for evaluation or generation", "a plan for training"),
    ):
        if found:
            raise InputError(f"replicas={replicas} does not go with {what} yet; give replicas=1, or {remedy}")
