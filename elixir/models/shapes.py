"""The models Elixir knows by name: their shapes as data, their parameter counts, their transformers configs.

Nothing is downloaded or built here, and transformers is not needed. Every shape names its publication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from elixir.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers from which the size of a named model follows."""

    name: str
    family: str
    """Its transformers model type: ``opt``, ``gpt2``, ``llama``, ``bert``, ``t5``, ``vit`` or ``mixtral``."""
    layers: int
    """Blocks; of an encoder-decoder, in each of the two stacks."""
    hidden: int
    heads: int
    kv_heads: int
    """Heads of keys and values; fewer than `heads` where queries share them."""
    ffn: int
    """Inner width of the feed-forward part, of one expert if there are several."""
    vocabulary: int
    """Rows of the token embedding; for an image classifier, its classes."""
    positions: int | None
    """Longest sequence; None where positions are relative. An image classifier has one per patch, and one more."""
    source: str
    """Publication the shape was taken from."""
    embedding: int | None = None
    """Width of the token embedding where it is not `hidden` but projected to it."""
    post_norm: bool = False
    """OPT only: norms after each block instead of before it, and none at the end."""
    rope_theta: float = 10000.0
    """Base of the rotary positions, for models that have them."""
    experts: int = 0
    experts_per_token: int = 0
    image_size: int = 0
    """Edge of the square input image, pixels."""
    patch_size: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameter elements, tied ones counted once, by formula."""
        return _FAMILIES[self.family][0](self)


def model_names() -> tuple[str, ...]:
    """Every name that `describe` and `elixir.models.loading.build` know, families together, small to large."""
    return tuple(_SHAPES)


def describe(name: str) -> ModelShape:
    """The shape of a named model; `InputError` with the nearest names for an unknown one."""
    shape = find(name)
    if shape is None:
        raise unknown_name("model", name, _SHAPES)
    return shape


def find(name: str) -> ModelShape | None:
    """The shape of a named model, or None where the name is none of ours."""
    return _SHAPES.get(name.lower())


def config_values(shape: ModelShape) -> dict[str, Any]:
    """Keyword arguments for the transformers config class of the shape's family."""
    return _FAMILIES[shape.family][1](shape)


# Parameter counts ---------------------------------------------------------------------------------------------------


def _biased_block(shape: ModelShape) -> int:
    """One block of OPT, GPT-2, BERT or ViT: four projections and two feed-forward layers with bias, two norms."""
    h, f = shape.hidden, shape.ffn
    return 4 * (h * h + h) + (2 * h * f + f + h) + 2 * 2 * h


def _rotary_attention(shape: ModelShape) -> int:
    """Query and output projections, and narrower ones for keys and values; no bias."""
    kv_width = shape.hidden // shape.heads * shape.kv_heads
    return 2 * shape.hidden * shape.hidden + 2 * shape.hidden * kv_width


def _opt_parameters(shape: ModelShape) -> int:
    h, width = shape.hidden, shape.embedding or shape.hidden
    positions = ((shape.positions or 0) + 2) * h  # OPT's position table keeps two rows in front, for padding
    projections = 2 * width * h if width != h else 0
    final_norm = 0 if shape.post_norm else 2 * h
    return shape.vocabulary * width + positions + projections + shape.layers * _biased_block(shape) + final_norm


def _gpt2_parameters(shape: ModelShape) -> int:
    h = shape.hidden
    return (shape.vocabulary + (shape.positions or 0)) * h + shape.layers * _biased_block(shape) + 2 * h


def _bert_parameters(shape: ModelShape) -> int:
    h = shape.hidden
    embeddings = (shape.vocabulary + (shape.positions or 0) + 2) * h + 2 * h  # two token types, one norm
    head = h * h + h + 2 * h + shape.vocabulary  # its output matrix is the embedding, its bias is its own
    return embeddings + shape.layers * _biased_block(shape) + head


def _vit_parameters(shape: ModelShape) -> int:
    h, tokens = shape.hidden, (shape.image_size // shape.patch_size) ** 2 + 1
    patches = 3 * shape.patch_size**2 * h + h
    head = shape.vocabulary * h + shape.vocabulary
    return h + tokens * h + patches + shape.layers * _biased_block(shape) + 2 * h + head


def _t5_parameters(shape: ModelShape) -> int:
    h = shape.hidden
    attention, feed_forward = 4 * h * h, 2 * h * shape.ffn
    encoder = attention + feed_forward + 2 * h
    decoder = 2 * attention + feed_forward + 3 * h
    relative_positions = 2 * _T5_BUCKETS * shape.heads  # one table per stack, shared by its layers
    return shape.vocabulary * h + shape.layers * (encoder + decoder) + relative_positions + 2 * h


def _llama_parameters(shape: ModelShape) -> int:
    h = shape.hidden
    block = _rotary_attention(shape) + 3 * h * shape.ffn + 2 * h
    return 2 * shape.vocabulary * h + shape.layers * block + h


def _mixtral_parameters(shape: ModelShape) -> int:
    h = shape.hidden
    block = _rotary_attention(shape) + shape.experts * (3 * h * shape.ffn + h) + 2 * h  # h per expert: the router
    return 2 * shape.vocabulary * h + shape.layers * block + h


# transformers configs -----------------------------------------------------------------------------------------------


def _opt_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "ffn_dim": shape.ffn,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.positions,
        "word_embed_proj_dim": shape.embedding or shape.hidden,
        "do_layer_norm_before": not shape.post_norm,
        "use_cache": False,
    }


def _gpt2_config(shape: ModelShape) -> dict[str, Any]:
    last_token = shape.vocabulary - 1  # begin and end of text are the last entry of GPT-2's vocabulary
    return {
        "vocab_size": shape.vocabulary,
        "n_positions": shape.positions,
        "n_embd": shape.hidden,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.ffn,
        "bos_token_id": last_token,
        "eos_token_id": last_token,
        "use_cache": False,
    }


def _encoder_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
    }


def _bert_config(shape: ModelShape) -> dict[str, Any]:
    own = {"vocab_size": shape.vocabulary, "max_position_embeddings": shape.positions, "use_cache": False}
    return _encoder_config(shape) | own


def _vit_config(shape: ModelShape) -> dict[str, Any]:
    own = {"image_size": shape.image_size, "patch_size": shape.patch_size, "num_labels": shape.vocabulary}
    return _encoder_config(shape) | own


def _t5_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "d_model": shape.hidden,
        "d_kv": shape.hidden // shape.heads,
        "d_ff": shape.ffn,
        "num_layers": shape.layers,
        "num_heads": shape.heads,
        "relative_attention_num_buckets": _T5_BUCKETS,
        "decoder_start_token_id": 0,  # T5 begins its output with the padding token
        "use_cache": False,
    }


def _llama_config(shape: ModelShape) -> dict[str, Any]:
    return _encoder_config(shape) | {
        "vocab_size": shape.vocabulary,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-5,
        "use_cache": False,
    }


def _mixtral_config(shape: ModelShape) -> dict[str, Any]:
    own = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
    return _llama_config(shape) | own


_T5_BUCKETS = 32  # rows of T5's table of relative positions (arXiv:1910.10683, section 2.1)

_FAMILIES: MappingProxyType[str, tuple[Callable[[ModelShape], int], Callable[[ModelShape], dict[str, Any]]]] = (
    MappingProxyType(
        {
            "opt": (_opt_parameters, _opt_config),
            "gpt2": (_gpt2_parameters, _gpt2_config),
            "llama": (_llama_parameters, _llama_config),
            "bert": (_bert_parameters, _bert_config),
            "t5": (_t5_parameters, _t5_config),
            "vit": (_vit_parameters, _vit_config),
            "mixtral": (_mixtral_parameters, _mixtral_config),
        }
    )
)


# Named shapes -------------------------------------------------------------------------------------------------------


def _opt(size: str, layers: int, hidden: int, heads: int, **more: Any) -> ModelShape:
    source = "Zhang et al. 2022, arXiv:2205.01068, table 1; vocabulary and positions of the released configs"
    return ModelShape(
        name=f"opt-{size}", family="opt", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden,
        vocabulary=50272, positions=2048, source=source, **more,
    )  # fmt: skip


def _gpt2(name: str, layers: int, hidden: int, heads: int, source: str) -> ModelShape:
    return ModelShape(
        name=name, family="gpt2", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden,
        vocabulary=50257, positions=1024, source=source,
    )  # fmt: skip


def _llama_2(size: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelShape:
    source = "Touvron et al. 2023, arXiv:2307.09288, table 1; widths of the released configs"
    return ModelShape(
        name=f"llama-2-{size}", family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
        vocabulary=32000, positions=4096, source=source,
    )  # fmt: skip


def _llama_3(size: str, layers: int, hidden: int, heads: int, ffn: int) -> ModelShape:
    source = "Grattafiori et al. 2024, arXiv:2407.21783, table 3; positions and vocabulary of the April 2024 configs"
    return ModelShape(
        name=f"llama-3-{size}", family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn,
        vocabulary=128256, positions=8192, rope_theta=500000.0, source=source,
    )  # fmt: skip


def _bert(size: str, layers: int, hidden: int, heads: int) -> ModelShape:
    source = "Devlin et al. 2018, arXiv:1810.04805, section 3; uncased vocabulary"
    return ModelShape(
        name=f"bert-{size}", family="bert", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden,
        vocabulary=30522, positions=512, source=source,
    )  # fmt: skip


def _t5(size: str, layers: int, hidden: int, heads: int) -> ModelShape:
    source = "Raffel et al. 2019, arXiv:1910.10683, section 3.7; vocabulary padded as in the released configs"
    return ModelShape(
        name=f"t5-{size}", family="t5", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden,
        vocabulary=32128, positions=None, source=source,
    )  # fmt: skip


def _vit(size: str, layers: int, hidden: int, heads: int) -> ModelShape:
    source = "Dosovitskiy et al. 2020, arXiv:2010.11929, table 1; patches of 16, images of 224, 1000 ImageNet classes"
    return ModelShape(
        name=f"vit-{size}", family="vit", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden,
        vocabulary=1000, positions=(224 // 16) ** 2 + 1, image_size=224, patch_size=16, source=source,
    )  # fmt: skip


_GPT2_PAPER = "Radford et al. 2019, Language Models are Unsupervised Multitask Learners, table 2"
_GPT2_GRID = "benchmark grid of the original Elixir, arXiv:2212.05339"

_SHAPES: MappingProxyType[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            # The released 350M model differs from the paper's family: narrow embeddings, norms after the blocks.
            _opt("125m", 12, 768, 12),
            _opt("350m", 24, 1024, 16, embedding=512, post_norm=True),
            _opt("1.3b", 24, 2048, 32),
            _opt("2.7b", 32, 2560, 32),
            _opt("6.7b", 32, 4096, 32),
            _opt("13b", 40, 5120, 40),
            _opt("30b", 48, 7168, 56),
            _opt("66b", 64, 9216, 72),
            _opt("175b", 96, 12288, 96),
            _gpt2("gpt2", 12, 768, 12, _GPT2_PAPER),
            _gpt2("gpt2-medium", 24, 1024, 16, _GPT2_PAPER),
            _gpt2("gpt2-large", 36, 1280, 20, _GPT2_PAPER),
            _gpt2("gpt2-xl", 48, 1600, 25, _GPT2_PAPER),
            _gpt2("gpt2-4b", 32, 3072, 24, _GPT2_GRID),
            _gpt2("gpt2-10b", 48, 4096, 32, _GPT2_GRID),
            _gpt2("gpt2-15b", 18, 8192, 64, _GPT2_GRID),
            _gpt2("gpt2-20b", 24, 8192, 64, _GPT2_GRID),
            _gpt2("gpt2-30b", 36, 8192, 64, _GPT2_GRID),
            _llama_2("7b", 32, 4096, 32, 32, 11008),
            _llama_2("13b", 40, 5120, 40, 40, 13824),
            _llama_2("70b", 80, 8192, 64, 8, 28672),
            _llama_3("8b", 32, 4096, 32, 14336),
            _llama_3("70b", 80, 8192, 64, 28672),
            _bert("base", 12, 768, 12),
            _bert("large", 24, 1024, 16),
            _t5("small", 6, 512, 8),
            _t5("base", 12, 768, 12),
            _t5("large", 24, 1024, 16),
            _vit("base", 12, 768, 12),
            _vit("large", 24, 1024, 16),
            ModelShape(
                name="mixtral-8x7b", family="mixtral", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336,
                vocabulary=32000, positions=32768, rope_theta=1e6, experts=8, experts_per_token=2,
                source="Jiang et al. 2024, arXiv:2401.04088, table 1",
            ),
        )
    }
)  # fmt: skip
