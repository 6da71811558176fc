"""Activation checkpointing of Hugging Face models: off, of all layers, or of the first few."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elixir.errors import InputError, InputTypeError, unknown_name

if TYPE_CHECKING:
    from torch import nn

CHECKPOINT_FORMS = ("none", "non-reentrant", "reentrant")
"""Off, or which of the two forms of `torch.utils.checkpoint`."""


def parse_checkpoint(text: object) -> tuple[str, int | None]:
    """Form and number of layers of a text such as ``non-reentrant`` (all layers) or ``non-reentrant:12`` (the first
    12).

    Raises:
        InputError, InputTypeError: it is no such text.
    """
    if not isinstance(text, str):
        raise InputTypeError(f"checkpoint must be a text such as 'non-reentrant' or 'non-reentrant:12', got {text!r}")
    form, colon, count = text.partition(":")
    if form not in CHECKPOINT_FORMS:
        raise unknown_name("checkpoint mode", form, CHECKPOINT_FORMS)
    if not colon:
        return form, None
    if form == "none" or not count.isdecimal():
        raise InputError(
            f"checkpoint must be a form, or a form and how many layers, as 'non-reentrant:12', got {text!r}"
        )
    return form, int(count)


def enable_checkpointing(model: nn.Module, checkpoint: str) -> None:
    """Turns on the activation checkpointing of a Hugging Face model.

    Args:
        model: with `gradient_checkpointing_enable`, unless `checkpoint` is ``none``.
        checkpoint: see `parse_checkpoint`. A number checkpoints the first layers, since activations of the last ones
            live shortest.

    Raises:
        InputError: the model cannot checkpoint, or has fewer layers that can be checkpointed one by one.
    """
    form, count = parse_checkpoint(checkpoint)
    if form == "none":
        return
    # transformers 5 renames the method and warns about the old name, which 4.57 and models outside it still have.
    kinds = ("activation", "gradient")
    kind = next((kind for kind in kinds if getattr(model, f"{kind}_checkpointing_enable", None)), None)
    if kind is None:
        raise InputError(
            f"{type(model).__name__} has no gradient_checkpointing_enable; "
            "checkpoint inside the model and pass checkpoint='none'"
        )
    try:
        enable: Any = getattr(model, f"{kind}_checkpointing_enable")
        enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": form == "reentrant"}})
    except (NotImplementedError, ValueError) as error:
        raise InputError(f"{type(model).__name__} cannot checkpoint activations: {error}") from None
    if count is None:
        return
    layers = checkpointable_layers(model)
    if count > len(layers):
        raise InputError(
            f"{type(model).__name__} has {len(layers)} layers that can be checkpointed one by one, but {count} are "
            "asked for"
        )
    for layer in layers[count:]:
        layer.gradient_checkpointing = False  # type: ignore[assignment]


def checkpointable_layers(model: nn.Module) -> list[nn.Module]:
    """Layers whose checkpointing can be switched one by one, in the model's order; none without transformers."""
    try:
        from transformers.modeling_layers import GradientCheckpointingLayer
    except ImportError:
        return []
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
