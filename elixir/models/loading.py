"""Models by name, by Hugging Face ``config.json`` or by ``module:function``, and a default training step for them.

Nothing is ever downloaded. On ``meta`` no weight exists and none is initialised, so OPT-175B takes a moment. Only
the transformers module of the one architecture is imported; all of it that is avoidable stays out of the process.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from elixir.errors import InputError, InputTypeError, shortened
from elixir.models.activation_checkpointing import enable_checkpointing, parse_checkpoint
from elixir.models.model_shape import ModelShape, find, is_hub_name, read_config, unknown_model
from elixir.models.user_code import called, imported, restored
from elixir.units import parse_dtype

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_MOST_LAYERS = 10_000
"""Most layers of a config: each is built, on meta too, and a hundredth of it is more than the deepest model known
has."""

_FACTORY = re.compile(r"(?P<module>[A-Za-z_][\w.]*):(?P<function>[A-Za-z_][\w.]*)")


def build(
    model: str | ModelShape | Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    checkpoint: str = "none",
    device: str = "meta",
    max_positions: int | None = None,
    lora: int | None = None,
    quantised: str | None = None,
) -> nn.Module:
    """The model, in train mode, its cache for generation off.

    Args:
        model: one of `model_names()`, or a shape such as ``describe("opt-13b").changed(layers=2)``; or a Hugging Face
            ``config.json``, a folder with one, or its values; or ``module:function``, a function without arguments that
            returns an `nn.Module`. A name wins over a file.
        dtype: of the parameters at construction. None: the dtype in ``config.json`` if it has one, else torch's
            default. A ``module:function`` that chooses a dtype itself keeps it.
        checkpoint: activation checkpointing by the model's own `gradient_checkpointing_enable`: ``none``,
            ``non-reentrant``, ``reentrant``, or as in ``non-reentrant:12`` of the first layers only.
        device: ``meta`` initialises nothing; ``cpu`` and others build a real model with random weights.
        max_positions: longest sequence instead of the model's own; learned position tables grow with it.
        lora: rank of adapters over all linear layers; the rest is frozen. See `elixir.models.adapters`.
        quantised: form in which the frozen weights of linear layers are held, on meta alone.

    Raises:
        InputError: the name is unknown, the file or the function cannot be used, or transformers is missing.

    Example:
        >>> build("opt-125m", dtype=torch.bfloat16).config.num_hidden_layers
        12
    """
    if quantised is not None and device != "meta":
        raise InputError("quantised= plans on meta; for a real model load it with bitsandbytes")
    config = config_of(model)
    _check_options(dtype, checkpoint, max_positions)
    if config is not None:
        built = _from_config(config, dtype, device, max_positions)
    elif max_positions is not None:
        raise InputError(f"max_positions (--positions) cannot be set for {model}; set it inside the function")
    else:
        built = _call_factory(str(model), dtype, device)
    enable_checkpointing(built, checkpoint)
    if lora is None and quantised is None:
        return built.train()
    from elixir.models.adapters import adapted  # late, since torch takes long to register its operator

    first = next(built.parameters(), None)
    with _constructing(dtype, "meta" if first is None else str(first.device)):
        made = adapted(built.train(), lora=lora, quantised=quantised)
    if lora is not None and checkpoint != "none" and hasattr(built, "enable_input_require_grads"):
        built.enable_input_require_grads()  # type: ignore[operator]  # as peft does
    return made


def config_of(model: str | ModelShape | Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The values of a model's ``config.json``; None for ``module:function``, which is not called.

    Raises:
        InputError: the name is unknown, or the file cannot be read.
    """
    if isinstance(model, ModelShape):
        return model.config
    if isinstance(model, Mapping):
        return model
    if not isinstance(model, str):
        raise InputTypeError(f"model must be a name, a path or 'module:function', found {type(model).__name__}")
    path, shape = Path(model).expanduser(), find(model)
    if shape is not None:
        return shape.config
    if (model and path.exists()) or path.suffix == ".json" or not is_hub_name(model):
        return read_config(path)
    if _FACTORY.fullmatch(model):
        return None
    raise InputError(
        f"{unknown_model(model)} (a model is a name that `elixir models` lists, a config.json, or module:function; "
        "nothing is downloaded)"
    )


def _from_config(
    values: Mapping[str, Any], dtype: torch.dtype | None, device: str, max_positions: int | None
) -> nn.Module:
    """The model of the values of a ``config.json``.

    The class is the first of ``architectures`` if that one computes a loss, else the family's language model or
    image classifier.
    """
    family = values["model_type"]
    config = _make_config(family, values)
    if max_positions is not None:
        if getattr(config, "max_position_embeddings", None) is None:
            raise InputError(
                f"{family} has no maximum number of positions to change; leave out max_positions (here: --positions)"
            )
        config.max_position_embeddings = max_positions
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if _is_encoder_decoder(config) and getattr(config, "decoder_start_token_id", None) is None:
        # Older config files leave it out, and without it the labels cannot be shifted into the decoder's input.
        config.decoder_start_token_id = config.pad_token_id
    model_class = _model_class(family, config)
    if dtype is None and getattr(config, "dtype", None) is not None:
        dtype = parse_dtype(config.dtype)
    if dtype is not None:
        config.dtype = dtype
    with _constructing(dtype, device):
        try:
            built: nn.Module = model_class(config)
        except Exception as error:  # transformers raises what it likes on values that do not go together
            raise InputError(f"transformers cannot build {model_class.__name__} from this config: {error}") from error
    if model_class.__name__.endswith("LMHeadModel") and getattr(built, "loss_type", "") is None:
        built.loss_type = "ForCausalLM"  # type: ignore[assignment]  # as transformers does, after a warning
    return built


def _check_options(dtype: torch.dtype | None, checkpoint: str, max_positions: int | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise InputError(f"dtype must be float32, bfloat16, float16 or float64, found {dtype!r}")
    parse_checkpoint(checkpoint)
    if max_positions is not None and (not isinstance(max_positions, int) or max_positions < 1):
        raise InputError(f"max_positions must be 1 or more, found {max_positions!r}")


@contextmanager
def _constructing(dtype: torch.dtype | None, device: str) -> Iterator[None]:
    """New tensors are of `dtype` and on `device`. On meta, torch's and transformers' initialisation costs nothing."""
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"{device!r} is no device of torch; use meta or cpu: {error}") from None
    with restored((torch.get_default_dtype, torch.set_default_dtype)), target:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield


def _make_config(family: str, values: Mapping[str, Any]) -> Any:
    known = _transformers("models.auto.configuration_auto").CONFIG_MAPPING
    if family not in known:
        raise InputError(
            f"transformers {_transformers().__version__} knows no architecture {family!r}; "
            "install a version that does, or give the model as module:function"
        )
    try:
        config = known[family].from_dict(dict(values))
    except Exception as error:  # transformers and its validators raise many types for a bad value
        raise InputError(f"values do not make a {known[family].__name__}: {shortened(str(error), 300)}") from error
    for name in _LAYER_COUNTS:
        layers = getattr(config, name, None)
        if isinstance(layers, int) and layers > _MOST_LAYERS:
            raise InputError(f"{name} must be {_MOST_LAYERS:,} or less, found {shortened(str(layers))}")
    return config


def _model_class(family: str, config: Any) -> Any:
    """The transformers class to train: the one that the config names if it has a loss, otherwise the usual one."""
    architectures = getattr(config, "architectures", None) or [None]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str | None):
        raise InputError(
            f"the config's architectures must be a list of names, found {shortened(repr(architectures))}; name a class "
            "of transformers in it, or leave it out"
        )
    if architectures[0] is not None:
        named = getattr(_transformers(), architectures[0], None)
        if not (inspect.isclass(named) and issubclass(named, nn.Module)):
            raise InputError(f"transformers {_transformers().__version__} has no architecture {architectures[0]!r}")
        if "labels" in inspect.signature(named.forward).parameters:
            return named
    # Encoders such as RoBERTa are in the causal table as well: ask for the masked form first.
    kinds = (
        ("SEQ_TO_SEQ_CAUSAL_LM",) if _is_encoder_decoder(config) else ("MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")
    )
    auto = _transformers("models.auto.modeling_auto")
    for table in (getattr(auto, f"MODEL_FOR_{kind}_MAPPING") for kind in kinds):
        if type(config) in table:
            found = table[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise InputError(
        f"no language model or image classifier for {family!r} in transformers: "
        "name a class with a loss in 'architectures', or give the model as module:function"
    )


def _is_encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def _transformers(module: str = "") -> ModuleType:
    """A module of transformers by its path inside the package, or the package itself for an empty path."""
    try:
        package = importlib.import_module("transformers")
        return importlib.import_module(f"transformers.{module}") if module else package
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            raise InputError(
                "named models and config.json need transformers: pip install 'transformers>=5.0'"
            ) from None
        if str(error.name).startswith("transformers."):
            raise InputError(f"this transformers has no {error.name}: pip install --upgrade transformers") from None
        raise


def _call_factory(text: str, dtype: torch.dtype | None, device: str) -> nn.Module:
    factory = imported(text)
    with _constructing(dtype, device):
        built = called(text, factory)
    if not isinstance(built, nn.Module):
        raise InputError(f"{text}: expected an nn.Module, the function returned {type(built).__name__}")
    return built
