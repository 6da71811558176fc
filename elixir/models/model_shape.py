"""The models that Elixir knows by name: a ``config.json`` each in ``configs/``, and an index with the size, the source
and the names on the Hugging Face hub of each.

Nothing is downloaded or built here, and transformers is not needed.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elixir.errors import InputError, unknown_name

logger = logging.getLogger(__name__)

_CONFIGS = Path(__file__).parent / "configs"

_KEYS = {
    "layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "heads": ("num_attention_heads", "num_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("moe_intermediate_size", "intermediate_size", "ffn_dim", "d_ff", "n_inner"),
    "vocabulary": ("vocab_size", "num_labels"),
    "positions": ("max_position_embeddings", "n_positions"),
}
"""Our word for a size -> the keys that the configs of transformers have for it; the first of them counts."""

_FORM = re.compile(
    r"-(?:(?P<whole>bf16)|fp8(?:-dynamic)?|awq|gguf|gptq(?:-int[48])?|(?:unsloth-)?bnb-[48]bit|[48]bit|quantized\.w\d+a\d+)$"
)
"""The end of a hub name that says in which form a copy holds the weights of a model: its sizes are the model's."""

_NO_ORGANISATION = ("", ".", "..", "~")
"""The part before the slash of a path that is no name on the hub."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A named model, or one that was made of it with other sizes."""

    name: str
    config: Mapping[str, Any]
    """Its ``config.json``."""
    source: str
    """Publication the sizes were taken from."""
    parameters: int | None
    """Number of parameter elements, tied ones counted once; None for changed sizes: build the model and count."""
    hub: tuple[str, ...] = ()
    """Names on the Hugging Face hub of models with these sizes and at most these positions; none for changed sizes."""

    layers: int = field(init=False)
    """Blocks; of an encoder-decoder, in each of the two stacks."""
    hidden: int = field(init=False)
    """Width of the hidden states."""
    heads: int = field(init=False)
    """Heads of the queries."""
    kv_heads: int = field(init=False)
    """Heads of keys and values; fewer than `heads` if queries share them."""
    ffn: int = field(init=False)
    """Inner width of the feed-forward part, of one expert if there are several."""
    vocabulary: int = field(init=False)
    """Rows of the token embedding; for an image classifier, its classes."""
    positions: int | None = field(init=False)
    """Longest sequence, None if positions are relative; an image classifier has one per patch, and one more."""

    def __post_init__(self) -> None:
        config = self.config
        sizes = {word: next((config[key] for key in keys if key in config), None) for word, keys in _KEYS.items()}
        sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
        if "image_size" in config:
            sizes["positions"] = (config["image_size"] // config["patch_size"]) ** 2 + 1
        vars(self).update(sizes)

    @property
    def family(self) -> str:
        """Its transformers model type, such as ``opt`` or ``qwen3_moe``."""
        return str(self.config["model_type"])

    def changed(self, *, name: str | None = None, **sizes: Any) -> ModelShape:
        """The same model with other sizes, by our words or by keys of its config.

        A size that the config does not have, such as `kv_heads` of OPT, changes nothing.
        """
        config = dict(self.config)
        for word, value in sizes.items():
            keys = [key for key in _KEYS[word] if key in config] if word in _KEYS else [word]
            config |= dict.fromkeys(keys, value)
        return replace(self, name=name or self.name, config=config, parameters=None, hub=())


def model_names() -> tuple[str, ...]:
    """Every name that `describe` and `elixir.models.loading.build` know, families together, small to large."""
    return tuple(_index())


def describe(name: str) -> ModelShape:
    """The shape of a named model; `InputError` with the nearest names for an unknown one."""
    shape = find(name)
    if shape is None:
        raise unknown_model(name)
    return shape


def unknown_model(name: str) -> InputError:
    """An `InputError` for a name of no model that is known, with the nearest ones."""
    return unknown_name("model", name, _index(), _written())


def find(name: str) -> ModelShape | None:
    """The shape of a named model, or None for another name.

    ``Qwen/Qwen2.5-7B-Instruct``, as the hub has it, is ``qwen2.5-7b``, unless there is such a path here. So are the
    name without its organisation, that of another organisation, and those of copies in other forms (``...-bnb-4bit``).
    """
    own: str | None = name.lower()
    if own not in _index():
        own = own_name(name.lower().rpartition("/")[2]) if is_hub_name(name) else None
    if own is None:
        return None
    known = _index()[own] | {"hub": tuple(_index()[own]["hub"])}
    return ModelShape(name=own, config=read_config(_CONFIGS / f"{own}.json"), **known)


def is_hub_name(name: str) -> bool:
    """Whether a text may be a model's name on the hub, with its organisation or without: it is no path on this disk."""
    organisation, slash, _ = name.rpartition("/")
    is_path = "/" in organisation or (slash and organisation in _NO_ORGANISATION)
    return not (is_path or os.path.exists(name))


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object of a config file, or of the ``config.json`` in a folder; it has a ``model_type``."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read as a model config: {error.strerror}; nothing is downloaded: give a config.json "
            "that is on this disk, or a name that `elixir models` lists"
        ) from None
    except ValueError as error:
        raise InputError(f"{file}: no valid JSON: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InputError(f"{file}: no Hugging Face model config: expected an object with 'model_type'")
    if values.get("quantization_config"):
        logger.warning("%s: quantization_config is ignored; weights are built in full precision", file)
        del values["quantization_config"]
    return values


@functools.cache
def _index() -> dict[str, dict[str, Any]]:
    """The name of each model -> its parameter elements and source."""
    found: dict[str, dict[str, Any]] = json.loads((_CONFIGS / "index.json").read_text(encoding="utf-8"))
    return found


@functools.cache
def _written() -> dict[str, str]:
    """Each way to write a model's name, in small letters and without an organisation -> our name of it."""
    names = {name: name for name in _index()}
    return names | {hub.lower().rpartition("/")[2]: name for name in names for hub in _index()[name]["hub"]}


@functools.cache
def own_name(written: str) -> str | None:
    """Our name of a model, by a way to write it or by that of a copy; None for another."""
    if written in _written():
        return _written()[written]
    form = _FORM.search(written)
    own = None if form is None else _written().get(written[: form.start()])
    if own is not None and form is not None and form["whole"] is None:
        logger.warning("%s is taken for %s with its weights in full precision; see quantised=", written, own)
    return own
