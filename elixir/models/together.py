"""`together`: several models under one plan, such as a policy and its reference, or a student and its teacher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from elixir.errors import InputError, InputTypeError


class Together(nn.Module):
    """Several models that one plan places and one budget holds; made by `together`.

    A step calls the models, not this module: ``models.policy(...)``. Under a plan each such call is a pass. Its own
    forward is that of the first model.
    """

    def __init__(self, models: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            setattr(self, name, model)

    @property
    def first(self) -> nn.Module:
        """The model that was given first."""
        return next(self.children())

    def models(self) -> Iterator[tuple[str, nn.Module]]:
        """The models by name, in the order in which they were given."""
        yield from self.named_children()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the first model."""
        return self.first(*args, **kwargs)

    def train(self, mode: bool = True) -> Together:
        """Switches the models that have something to train; a frozen one keeps its mode."""
        self.training = mode
        for model in self.children():
            if any(parameter.requires_grad for parameter in model.parameters()):
                model.train(mode)
        return self


def together(**models: nn.Module) -> Together:
    """Puts several models under one plan: the budget holds all of them, and all are traced in one step.

    >>> models = elixir.together(policy=policy, reference=reference)  # doctest: +SKIP
    >>> optimizer = torch.optim.AdamW(policy.parameters())  # doctest: +SKIP
    >>> model, optimizer = elixir.wrap(models, optimizer, inp=batch, step_fn=step)  # doctest: +SKIP

    ``step(models, batch)`` calls ``models.policy(...)`` and ``models.reference(...)``; after wrapping a step calls
    ``model.policy(...)`` and ``model.reference(...)``, or the models themselves.

    Args:
        models: by name; the one that is trained comes first. Freeze what is not trained, with
            ``requires_grad_(False)``. They may share parameters.

    Raises:
        InputError: there are no models, one is given twice or lies in another, or a name is one of `torch.nn.Module`.
        InputTypeError: one is no plain module.
    """
    if not models:
        raise InputError("together() takes models by name, such as together(policy=policy, reference=reference)")
    taken = set(dir(Together({}))) | {"module", "plan", "device"}
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise InputTypeError(f"together() takes modules, {name} is a {type(model).__name__}")
        if name in taken:
            raise InputError(f"{name!r} is an attribute of every wrapped module; call that model otherwise")
        around = next((other for other, each in models.items() if other != name and model in set(each.modules())), None)
        if around is not None:
            raise InputError(f"{name} is {around}, or a part of it, which has its weights; give each model once")
    return Together(models)
