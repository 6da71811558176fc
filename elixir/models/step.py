"""The step that a plan is made for when the caller gives none: one random batch, forward, loss, backward; for
generation, the prompt, then the last token with a full key-value cache. With the data of a training, its batch."""

from __future__ import annotations

import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from elixir.errors import InputError, InputTypeError, shortened
from elixir.models.packing import packed_batch
from elixir.models.user_code import GENERATORS, restored
from elixir.torch_private import tree_map

DEFAULT_BATCH = 1
"""Samples in the default input."""
DEFAULT_SEQUENCE = 1024
"""Tokens per sample in the default input, or the model's maximum where that is smaller."""

MOST_REAL_NUMEL = 1 << 24
"""Elements up to which the input of a traced step is made of real values: 128 MiB of token ids."""
_MOST = 1 << 40  # samples or tokens per sample; beyond, sizes in bytes are no numbers that torch can count with

LOOKED_AT = 64
"""Samples whose sizes are compared first."""
MOST_LOOKED_AT = 2048
"""Samples whose sizes are compared where the first ones differ, evenly spread over the dataset."""

_SEED = 0  # seed of the generator that draws the batch: the same batch every time

Step = Callable[[nn.Module, Mapping[str, Any]], None]


def default_input(
    model: nn.Module, *, batch: int = DEFAULT_BATCH, seq: int | None = None, packed: int | None = None
) -> dict[str, Any]:
    """A batch for a Hugging Face model: real tensors on the CPU, wherever the model is; the same on every call.

    * language models: ``input_ids`` and ``labels``, both (batch, seq), int64. Causal models get their input as
      labels, as in training; masked and encoder-decoder ones get separate labels (the decoder's input follows
      from them). No padding token is drawn, and there is no ``attention_mask``: the batch is full.
    * sequence and token classifiers: ``labels`` of (batch,) and (batch, seq);
    * image classifiers: ``pixel_values`` (batch, channels, height, width) in the model's dtype, ``labels`` (batch,).
    * causal models with `packed`: one row of all samples, as `elixir.models.packing.packed_batch` describes it.

    torch's global generators are not touched.

    Args:
        model: a transformers model that computes its loss, on meta or real.
        batch: samples; 1 unless given.
        seq: tokens per sample; ``min(1024, maximum positions)`` unless given, 1024 without a maximum.
        packed: documents in each sample; all samples then lie one after the other in one row.

    Raises:
        InputError: `batch`, `seq` or `packed` is below 1, `seq` above the model's maximum, or `packed` above `seq`; or
            the model is none whose input can be derived, in which case an `inp` of the caller's is needed.
    """
    _check_count("batch", batch)
    for name, count in (("seq", seq), ("packed", packed)):
        if count is not None:
            _check_count(name, count)
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise InputError(
            f"{type(model).__name__} is no transformers model: pass inp, a dict of its inputs, "
            "and step_fn unless its output has a loss"
        )
    if "labels" not in inspect.signature(model.forward).parameters:
        raise InputError(f"{type(model).__name__} takes no labels, so it has no loss: pass inp and step_fn")
    generator = torch.Generator(device="cpu").manual_seed(_SEED)
    # The generator lives on the CPU; without this a `torch.device` context of the caller's would move the batch.
    with torch.device("cpu"):
        if packed is not None and not _is_a(model, "ForCausalLM", "LMHeadModel"):
            raise InputError(f"{type(model).__name__} is no causal language model, which alone packs documents")
        if getattr(model, "main_input_name", "") == "pixel_values":
            return _image_batch(model, batch, seq, generator)
        made = _token_batch(model, batch, seq, generator)
        return made if packed is None else packed_batch(model, made["input_ids"], packed)


def input_to_trace(
    model: nn.Module, *, batch: int = DEFAULT_BATCH, seq: int | None = None, packed: int | None = None
) -> dict[str, Any]:
    """`default_input` for a step that is traced: where that would be very large, of the same shapes on meta.

    Raises:
        InputError: as `default_input`; or a packed batch, whose positions are needed, is as large.
    """
    _check_count("batch", batch)
    one = default_input(model, batch=1, seq=seq)
    if packed is not None:
        tokens = batch * one["input_ids"].numel()
        if tokens > MOST_REAL_NUMEL:
            raise InputError(
                f"a packed row has {MOST_REAL_NUMEL:,} tokens at most, found {tokens:,}; give a smaller batch"
            )
        return default_input(model, batch=batch, seq=seq, packed=packed)
    if batch * sum(value.numel() for value in one.values()) <= MOST_REAL_NUMEL:
        return default_input(model, batch=batch, seq=seq)
    with refused_overflow():
        return {
            name: torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device="meta")
            for name, value in one.items()
        }


@contextmanager
def refused_overflow() -> Iterator[None]:
    """Sizes that are no longer numbers for torch are the caller's mistake, wherever in a traced step they come up.

    Raises:
        InputError: they did.
    """
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        if "overflow" not in str(error).lower():
            raise
        raise InputError(
            f"the step's tensors are too large to count their bytes ({error}); give a smaller batch"
        ) from error


def with_tensors(function: Callable[[torch.Tensor], Any], batch: Any) -> Any:
    """A batch of any kind with each tensor replaced by what `function` makes of it; the batch itself stays as it is.

    Next to what `torch.utils._pytree` knows, that is a dataclass, or another mapping such as a tokenizer's: a copy of
    the object.
    """

    def replaced(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return function(item)
        if isinstance(item, (dict, UserDict)):
            made = copy.copy(item)
            for name in list(item):
                made[name] = with_tensors(function, item[name])
            return made
        if isinstance(item, Mapping):
            return {name: with_tensors(function, value) for name, value in item.items()}
        if is_dataclass(item) and not isinstance(item, type):
            copied = copy.copy(item)
            for field in fields(item):  # also of a frozen one
                object.__setattr__(copied, field.name, with_tensors(function, getattr(item, field.name)))
            return copied
        return item

    return tree_map(replaced, batch)


def check_batch(inp: Any, step_fn: object) -> None:
    """Refuses a batch that only a step of the user's could be given.

    Raises:
        InputTypeError: `inp` is no dict, and there is no `step_fn`.
    """
    if not isinstance(inp, Mapping) and step_fn is None:
        raise InputTypeError(
            f"inp must be a dict of the model's inputs, got {type(inp).__name__}; give step_fn(model, inp), which gets "
            "the batch as it is, or name the model's argument, such as inp={'x': batch}"
        )


def check_step(step_fn: object) -> None:
    """Refuses a step that is no function, with an `InputTypeError`."""
    if not callable(step_fn):
        raise InputTypeError(f"step_fn must be callable as step_fn(model, inp), got {type(step_fn).__name__}")


def default_step(model: nn.Module, inp: Mapping[str, Any]) -> None:
    """One forward on ``model(**inp)``, and backward from the output's ``loss``; a model without anything to train, or
    under `torch.no_grad`, stops there.

    Raises:
        InputTypeError: `inp` is no dict.
        InputError: the output has no loss, or no trainable parameter had a part in it.
    """
    if not isinstance(inp, Mapping):
        raise InputTypeError(f"inp must be a dict of the model's inputs, found {type(inp).__name__}")
    output = model(**inp)
    if not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters())):
        return
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"the output of {type(model).__name__} ({type(output).__name__}) has no loss: "
            "put labels into inp, or pass a step_fn that computes a loss"
        )
    if not loss.requires_grad:
        raise InputError(f"the loss of {type(model).__name__} depends on no trainable parameter: nothing to train")
    loss.backward()


def max_positions(model: nn.Module) -> int | None:
    """Longest sequence a transformers model takes; None where it has no limit (relative positions, images)."""
    limit = getattr(_text_config(model.config), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from after the padding row, so the table is longer than the sequence.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return limit


def _image_batch(model: nn.Module, batch: int, seq: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    name, config = type(model).__name__, model.config
    if not _is_a(model, "ForImageClassification"):
        raise InputError(f"no default input for {name}: pass inp, a dict of its inputs")
    if seq is not None:
        raise InputError(f"{name} takes images, whose number of patches its config fixes: leave out seq")
    size = getattr(config, "image_size", None)
    if size is None:
        raise InputError(f"the config of {name} has no image_size: pass inp, a dict of its inputs")
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(config, "num_channels", 3)
    dtypes = [param.dtype for param in model.parameters() if param.is_floating_point()]
    pixels = torch.randn(batch, channels, height, width, generator=generator, dtype=torch.float32)
    return {
        "pixel_values": pixels.to(dtypes[0] if dtypes else torch.float32),
        "labels": _class_labels(model, batch),
    }


def _token_batch(model: nn.Module, batch: int, seq: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    name, text = type(model).__name__, _text_config(model.config)
    vocabulary = getattr(text, "vocab_size", None)
    if getattr(model, "main_input_name", "input_ids") != "input_ids" or not isinstance(vocabulary, int):
        raise InputError(f"no default input for {name}: pass inp, a dict of its inputs")
    if vocabulary < 1:
        raise InputError(
            f"the config of {name} has a vocab_size of {vocabulary}; a model that reads tokens needs 1 or more"
        )
    length = _sequence_length(model, seq)
    padding = getattr(text, "pad_token_id", None)

    def tokens() -> torch.Tensor:
        # The padding token is left out, since it would change positions and masks.
        if not isinstance(padding, int) or not 0 <= padding < vocabulary or vocabulary < 2:
            return torch.randint(vocabulary, (batch, length), generator=generator)
        drawn = torch.randint(vocabulary - 1, (batch, length), generator=generator)
        return drawn + (drawn >= padding)

    input_ids = tokens()
    if _is_a(model, "ForSequenceClassification"):
        labels = _class_labels(model, batch)
    elif _is_a(model, "ForTokenClassification"):
        labels = _class_labels(model, batch * length).view(batch, length)
    elif _is_a(model, "ForMaskedLM", "ForConditionalGeneration"):
        labels = tokens()
    elif _is_a(model, "ForCausalLM", "LMHeadModel"):
        labels = input_ids.clone()
    else:
        raise InputError(f"no default input for {name}: pass inp, a dict of its inputs")
    return {"input_ids": input_ids, "labels": labels}


def _sequence_length(model: nn.Module, seq: int | None) -> int:
    limit = max_positions(model)
    if seq is None:
        return DEFAULT_SEQUENCE if limit is None else min(DEFAULT_SEQUENCE, limit)
    if limit is not None and seq > limit:
        raise InputError(
            f"seq {shortened(str(seq))} is longer than the {limit} positions of {type(model).__name__}: give a seq up "
            f"to {limit}, or a model with as many: --positions {shortened(str(seq))} for one by name, "
            f"max_position_embeddings={shortened(str(seq))} in its config otherwise"
        )
    return seq


def _class_labels(model: nn.Module, count: int) -> torch.Tensor:
    name, classes = type(model).__name__, getattr(model.config, "num_labels", 0)
    if classes < 2 or getattr(model.config, "problem_type", None) not in (None, "single_label_classification"):
        raise InputError(f"no default labels for {name} with {classes} classes: pass inp, a dict of its inputs")
    return torch.arange(count) % classes


def _is_a(model: nn.Module, *endings: str) -> bool:
    """Whether the class, or one it derives from, is named for one of these tasks."""
    return any(cls.__name__.endswith(endings) for cls in type(model).__mro__)


def _text_config(config: Any) -> Any:
    """The part of a config that describes the language model; the config itself for most."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} must be a whole number of 1 or more, found {shortened(repr(value))}")
    if value > _MOST:
        raise InputError(f"{name} must be {_MOST:,} or less, found {shortened(str(value))}")


def generation_input(model: nn.Module, *, batch: int, prompt: int, new: int) -> dict[str, torch.Tensor]:
    """Prompts of (batch, prompt) tokens, int64: real tensors, or on meta if they are very large.

    Args:
        model: a causal language model of transformers, on meta or real.
        batch: samples that are generated at once.
        prompt: tokens of each prompt.
        new: tokens to generate for each.

    Raises:
        InputError: the model is no causal language model of `transformers`, or `prompt` and `new` exceed its positions
            together.
    """
    name = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) or not hasattr(model, "generate"):
        raise InputError(
            f"generate= plans for causal language models of transformers, found {name}; give inp= and a step_fn= that "
            "runs one forward with its cache, and optimizer_type=None"
        )
    inputs = input_to_trace(model, batch=batch, seq=prompt)
    limit = max_positions(model)
    if limit is not None and prompt + new > limit:
        raise InputError(
            f"{prompt} + {new} tokens are more than the {limit} positions of {name}; generate fewer, or give it as "
            f"many: --positions {prompt + new} for a model by name, max_position_embeddings in its config otherwise"
        )
    return {"input_ids": inputs["input_ids"]}


def generation_step(prompt: int, new: int) -> Step:
    """A step of two calls of the model: the prompt, and the last new token after all others are in the cache.

    Each is as in the loop of `transformers`: the logits of one position, in float32.
    """

    def step(model: nn.Module, inp: Mapping[str, Any]) -> None:
        ids = inp["input_ids"]
        cache = _next_token(model, ids, None)
        if new > 1:
            _lengthen(cache, prompt + new - 2, model)
            _next_token(model, ids[:, -1:], cache)

    return step


def _next_token(model: nn.Module, ids: torch.Tensor, cache: Any) -> Any:
    """Runs the model on new tokens; returns its cache."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(input_ids=ids, past_key_values=cache, use_cache=True, **last)
    output.logits[:, -1, :].to(dtype=torch.float32, copy=True).argmax(-1)
    return getattr(output, "past_key_values", None)


def _lengthen(cache: Any, tokens: int, model: nn.Module) -> None:
    """Gives each layer of a cache memory for so many tokens, or for those of its window."""
    for layer in getattr(cache, "layers", [None]):
        keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
        if not (isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.dim() == 4):
            raise InputError(
                f"{type(model).__name__} keeps a cache of another kind ({type(layer or cache).__name__}) than keys and "
                "values by token; give inp= and a step_fn= that runs one forward with it, and optimizer_type=None"
            )
        kept = tokens
        if getattr(layer, "is_sliding", False):
            kept, layer.cumulative_length = min(tokens, layer.sliding_window - 1), tokens
        layer.keys = keys.new_empty((*keys.shape[:-2], kept, keys.shape[-1]))
        layer.values = values.new_empty((*values.shape[:-2], kept, values.shape[-1]))


def planning_batch(loader: Any, *, batch_size: int | None = None) -> Any:
    """The batch to plan for: the largest samples of a dataset, collated; of a stream the first ones.

    No sampler is asked, and the loader is not iterated, so that training sees the same batches as without this.

    Args:
        loader: a torch DataLoader, or one that accelerate made of it.
        batch_size: of one rank; None takes the loader's.

    Raises:
        InputError: the dataset is empty.
    """
    loader = getattr(loader, "base_dataloader", loader)
    sampler = getattr(loader, "batch_sampler", None)
    size = batch_size or getattr(sampler, "batch_size", None) or loader.batch_size
    with restored(*GENERATORS):  # looking at data must not change which data come
        samples = _largest(loader.dataset, size or 1)
        if not samples:
            raise InputError("the dataset to plan for is empty; give the options inp=, a batch")
        # Without a batch size, samples of a stream are collated one by one, as the loader does it.
        return loader.collate_fn(samples if size else samples[0])


def _largest(dataset: Any, count: int) -> list[Any]:
    stream = not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))
    if stream:
        return list(islice(iter(dataset), count))
    total = len(dataset)
    sizes: dict[int, int] = {}
    for most in (min(total, LOOKED_AT), min(total, MOST_LOOKED_AT)):
        if len(set(sizes.values())) != 1:
            spread = (number * total // most for number in range(most))
            sizes |= {index: elements(dataset[index]) for index in spread if index not in sizes}
    chosen = sorted(sizes, key=lambda index: (-sizes[index], index))[:count]
    more = (index for index in range(total) if index not in sizes)
    return [dataset[index] for index in [*chosen, *islice(more, count - len(chosen))]]


def elements(sample: Any) -> int:
    """Numbers in a sample, whatever holds them."""
    if isinstance(sample, Mapping):
        return sum(map(elements, sample.values()))
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return int(np.prod(sample.shape))
    if isinstance(sample, Sequence) and not isinstance(sample, (str, bytes)):
        # A list of numbers counts by its length; nested items are counted.
        return len(sample) if sample and isinstance(sample[0], (int, float)) else sum(map(elements, sample))
    return len(sample) if isinstance(sample, (str, bytes)) else 1
