"""The models Elixir knows by name: their shapes as data, their parameter counts, their transformers configs.

Nothing is downloaded or built here, and transformers is not needed. Every shape names its publication.
"""

from __future__ import annotations

import os
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
    """Its transformers model type, such as ``opt`` or ``qwen3_moe``."""
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
    head_width: int | None = None
    """Elements of a head; None: `hidden` over `heads`."""
    tied: bool = False
    """Whether a decoder of `_DECODERS` uses its token embedding as output matrix too."""
    config: tuple[tuple[str, Any], ...] = ()
    """Further values of its transformers config, of which `parameters` knows what it needs."""
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
    """The shape of a named model, or None where the name is none of ours.

    ``Qwen/Qwen2.5-7B``, as Hugging Face has it, is ``qwen2.5-7b``, unless there is such a path here.
    """
    known = _SHAPES.get(name.lower())
    if known is None and name.count("/") == 1 and not os.path.exists(name):
        known = _SHAPES.get(name.lower().split("/")[1])
    return known


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


def _mixtral_parameters(shape: ModelShape) -> int:
    h = shape.hidden
    block = _rotary_attention(shape) + shape.experts * (3 * h * shape.ffn + h) + 2 * h  # h per expert: the router
    return 2 * shape.vocabulary * h + shape.layers * block + h


@dataclass(frozen=True)
class _Decoder:
    """Parts in which the decoders of today differ from Llama."""

    query_bias: bool = False
    """Biases of the query, key and value projections."""
    head_norm: bool = False
    """Queries and keys are normed head by head, with one weight per element of a head."""
    whole_norm: bool = False
    """Queries and keys are normed as a whole."""
    norms: int = 2
    """Norms of a layer, `head_norm` and `whole_norm` not counted."""


_DECODERS = {
    "mistral": _Decoder(),
    "phi3": _Decoder(),
    "qwen2": _Decoder(query_bias=True),
    "qwen3": _Decoder(head_norm=True),
    "qwen3_moe": _Decoder(head_norm=True),
    "gemma2": _Decoder(norms=4),
    "gemma3_text": _Decoder(head_norm=True, norms=4),
    "olmo2": _Decoder(whole_norm=True),
}


def _decoder_parameters(shape: ModelShape) -> int:
    h, parts = shape.hidden, _DECODERS.get(shape.family, _Decoder())
    head = shape.head_width or h // shape.heads
    queries, keys = head * shape.heads, head * shape.kv_heads
    attention = 2 * h * queries + 2 * h * keys
    attention += (queries + 2 * keys) * parts.query_bias + 2 * head * parts.head_norm
    attention += (queries + keys) * parts.whole_norm
    feed_forward = max(shape.experts, 1) * 3 * h * shape.ffn + shape.experts * h
    block = attention + feed_forward + parts.norms * h
    return (1 if shape.tied else 2) * shape.vocabulary * h + shape.layers * block + h


def _deepseek_v2_parameters(shape: ModelShape) -> int:
    h, more = shape.hidden, dict[str, int](shape.config)
    rank, rope, value = more["kv_lora_rank"], more["qk_rope_head_dim"], more["v_head_dim"]
    nope = more["qk_nope_head_dim"]
    attention = h * shape.heads * (nope + rope) + h * (rank + rope) + rank
    attention += rank * shape.heads * (nope + value) + shape.heads * value * h
    dense = more["first_k_dense_replace"]
    routed = (shape.experts + more["n_shared_experts"]) * 3 * h * shape.ffn + shape.experts * h
    blocks = shape.layers * (attention + 2 * h) + dense * 3 * h * more["intermediate_size"]
    return 2 * shape.vocabulary * h + blocks + (shape.layers - dense) * routed + h


def _phi_parameters(shape: ModelShape) -> int:
    h = shape.hidden
    block = _biased_block(shape) - 2 * h  # one norm, before attention and feed-forward, which run side by side
    return 2 * shape.vocabulary * h + shape.vocabulary + shape.layers * block + 2 * h


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


def _decoder_config(shape: ModelShape) -> dict[str, Any]:
    """The config of a decoder of today, `ModelShape.config` included."""
    own: dict[str, Any] = {"tie_word_embeddings": shape.tied}
    if shape.family != "llama":
        own["rms_norm_eps"] = 1e-6
    if shape.head_width is not None:
        own["head_dim"] = shape.head_width
    if shape.experts:
        own |= {"num_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
        own["moe_intermediate_size"] = shape.ffn
    return _llama_config(shape) | own | dict(shape.config)


def _phi_config(shape: ModelShape) -> dict[str, Any]:
    own = {"vocab_size": shape.vocabulary, "max_position_embeddings": shape.positions, "use_cache": False}
    return _encoder_config(shape) | own | dict(shape.config)


def _deepseek_v2_config(shape: ModelShape) -> dict[str, Any]:
    own = {"n_routed_experts": shape.experts, "tie_word_embeddings": False}
    return _decoder_config(shape) | own


_T5_BUCKETS = 32  # rows of T5's table of relative positions (arXiv:1910.10683, section 2.1)

_FAMILIES: MappingProxyType[str, tuple[Callable[[ModelShape], int], Callable[[ModelShape], dict[str, Any]]]] = (
    MappingProxyType(
        {
            "opt": (_opt_parameters, _opt_config),
            "gpt2": (_gpt2_parameters, _gpt2_config),
            "llama": (_decoder_parameters, _decoder_config),
            "bert": (_bert_parameters, _bert_config),
            "t5": (_t5_parameters, _t5_config),
            "vit": (_vit_parameters, _vit_config),
            "mixtral": (_mixtral_parameters, _mixtral_config),
            **dict.fromkeys(_DECODERS, (_decoder_parameters, _decoder_config)),
            "deepseek_v2": (_deepseek_v2_parameters, _deepseek_v2_config),
            "phi": (_phi_parameters, _phi_config),
        }
    )
)


# Named shapes -------------------------------------------------------------------------------------------------------


_IN_LITGPT = "compared with litgpt/config.py of Lightning-AI/litgpt"
_UNSCALED = {"rope_type": "default"}


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


def _llama_3_extended(
    name: str, layers: int, hidden: int, heads: int, ffn: int, factor: float = 8.0, **more: Any
) -> ModelShape:
    """Llama 3.1 and later: positions beyond 8192 by scaled rotations."""
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return ModelShape(
        name=name, family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocabulary=128256,
        positions=131072, rope_theta=500000.0, config=(("rope_scaling", scaling),),
        source=f"Grattafiori et al. 2024, arXiv:2407.21783, table 3; the configs of Llama 3.1 to 3.3, {_IN_LITGPT}",
        **more,
    )  # fmt: skip


def _decoder(
    name: str, family: str, source: str, sizes: tuple[int, ...], vocabulary: int, positions: int,
    **more: Any,
) -> ModelShape:  # fmt: skip
    """Sizes are layers, hidden, heads, heads of keys and values, and the feed-forward's width."""
    layers, hidden, heads, kv_heads, ffn = sizes
    return ModelShape(
        name=name, family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn,
        vocabulary=vocabulary, positions=positions, source=source, **more,
    )  # fmt: skip


def _qwen25(
    size: str, *sizes: int, positions: int = 131072, tied: bool = False, epsilon: float = 1e-6
) -> ModelShape:  # fmt: skip
    source = f"Qwen Team 2024, arXiv:2412.15115, table 1; the rest from the configs of the base models, {_IN_LITGPT}"
    return _decoder(
        f"qwen2.5-{size}", "qwen2", source, sizes, 151936 if tied else 152064, positions,
        rope_theta=1e6, tied=tied, config=(("rms_norm_eps", epsilon),),
    )  # fmt: skip


def _qwen3(size: str, *sizes: int, **more: Any) -> ModelShape:
    source = f"Qwen Team 2025, arXiv:2505.09388, tables 1 and 2; widths of the released configs, {_IN_LITGPT}"
    family = "qwen3_moe" if "experts" in more else "qwen3"
    return _decoder(f"qwen3-{size}", family, source, sizes, 151936, 40960, rope_theta=1e6, head_width=128, **more)


def _gemma2(size: str, *sizes: int, head: int, scalar: int) -> ModelShape:
    source = "Gemma Team 2024, arXiv:2408.00118, table 1; gemma/config.py of google/gemma_pytorch"
    more = (("query_pre_attn_scalar", scalar), ("sliding_window", 4096))
    return _decoder(f"gemma-2-{size}", "gemma2", source, sizes, 256000, 8192, head_width=head, tied=True, config=more)


def _gemma3(size: str, *sizes: int, head: int, scalar: int, vocabulary: int = 262208, **more: Any) -> ModelShape:
    """The language model alone; from 4b on its vocabulary is padded for the image tokens, and its positions extended
    by a scaling of those layers that attend to all."""
    source = "Gemma Team 2025, arXiv:2503.19786, table 1; gemma/config.py of google/gemma_pytorch; released vocabulary"
    extended = vocabulary != 262144
    rotations = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_theta": 1e6} | ({"rope_type": "linear", "factor": 8.0} if extended else _UNSCALED),
    }
    values = (("query_pre_attn_scalar", scalar), ("rope_parameters", rotations), *more.items())
    positions = 131072 if extended else 32768
    return _decoder(
        f"gemma-3-{size}", "gemma3_text", source, sizes, vocabulary, positions,
        head_width=head, tied=True, config=values,
    )  # fmt: skip


def _olmo2(size: str, *sizes: int) -> ModelShape:
    source = "OLMo Team 2025, arXiv:2501.00656, table 1; nn/transformer/config.py of allenai/OLMo-core"
    return _decoder(f"olmo-2-{size}", "olmo2", source, sizes, 100352, 4096, rope_theta=500000.0)


_MISTRAL = f"Jiang et al. 2023, arXiv:2310.06825, table 1; later releases by their configs, 7B {_IN_LITGPT}"
_PHI3 = f"Abdin et al. 2024, arXiv:2404.14219, section 2, and arXiv:2412.08905; configs of 4k context, {_IN_LITGPT}"
_PHI3_WINDOW = (("rms_norm_eps", 1e-5), ("sliding_window", 2047))
_DEEPSEEK_V2_LITE = (
    ("kv_lora_rank", 512), ("q_lora_rank", None), ("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64),
    ("v_head_dim", 128), ("n_shared_experts", 2), ("first_k_dense_replace", 1), ("intermediate_size", 10944),
    ("norm_topk_prob", False), ("head_dim", 64),
    ("rope_scaling", {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    }),
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
            _llama_3_extended("llama-3.1-8b", 32, 4096, 32, 14336),
            _llama_3_extended("llama-3.1-70b", 80, 8192, 64, 28672),
            _llama_3_extended("llama-3.1-405b", 126, 16384, 128, 53248),
            _llama_3_extended("llama-3.2-1b", 16, 2048, 32, 8192, factor=32.0, tied=True, head_width=64),
            _llama_3_extended("llama-3.2-3b", 28, 3072, 24, 8192, factor=32.0, tied=True, head_width=128),
            _llama_3_extended("llama-3.3-70b", 80, 8192, 64, 28672),
            _qwen25("0.5b", 24, 896, 14, 2, 4864, positions=32768, tied=True),
            _qwen25("1.5b", 28, 1536, 12, 2, 8960, tied=True),
            _qwen25("3b", 36, 2048, 16, 2, 11008, positions=32768, tied=True),
            _qwen25("7b", 28, 3584, 28, 4, 18944),
            _qwen25("14b", 48, 5120, 40, 8, 13824, epsilon=1e-5),
            _qwen25("32b", 64, 5120, 40, 8, 27648, epsilon=1e-5),
            _qwen25("72b", 80, 8192, 64, 8, 29568, epsilon=1e-5),
            _qwen3("0.6b", 28, 1024, 16, 8, 3072, tied=True),
            _qwen3("1.7b", 28, 2048, 16, 8, 6144, tied=True),
            _qwen3("4b", 36, 2560, 32, 8, 9728, tied=True),
            _qwen3("8b", 36, 4096, 32, 8, 12288),
            _qwen3("14b", 40, 5120, 40, 8, 17408),
            _qwen3("32b", 64, 5120, 64, 8, 25600),
            _qwen3("30b-a3b", 48, 2048, 32, 4, 768, experts=128, experts_per_token=8),
            _qwen3("235b-a22b", 94, 4096, 64, 4, 1536, experts=128, experts_per_token=8),
            _decoder(
                "mistral-7b-v0.1", "mistral", _MISTRAL, (32, 4096, 32, 8, 14336), 32000, 32768,
                config=(("sliding_window", 4096), ("rms_norm_eps", 1e-5)),
            ),
            _decoder(
                "mistral-7b-v0.3", "mistral", _MISTRAL, (32, 4096, 32, 8, 14336), 32768, 32768,
                rope_theta=1e6, config=(("sliding_window", None), ("rms_norm_eps", 1e-5)),
            ),
            _decoder(
                "mistral-nemo-12b", "mistral", _MISTRAL, (40, 5120, 32, 8, 14336), 131072, 128000,
                rope_theta=1e6, head_width=128, config=(("sliding_window", None), ("rms_norm_eps", 1e-5)),
            ),
            _decoder(
                "mistral-small-24b", "mistral", _MISTRAL, (40, 5120, 32, 8, 32768), 131072, 32768,
                rope_theta=1e8, head_width=128, config=(("sliding_window", None), ("rms_norm_eps", 1e-5)),
            ),
            _gemma2("2b", 26, 2304, 8, 4, 9216, head=256, scalar=256),
            _gemma2("9b", 42, 3584, 16, 8, 14336, head=256, scalar=256),
            _gemma2("27b", 46, 4608, 32, 16, 36864, head=128, scalar=144),
            _gemma3("1b", 26, 1152, 4, 1, 6912, head=256, scalar=256, vocabulary=262144, sliding_window=512),
            _gemma3("4b", 34, 2560, 8, 4, 10240, head=256, scalar=256, sliding_window=1024),
            _gemma3("12b", 48, 3840, 16, 8, 15360, head=256, scalar=256, sliding_window=1024),
            _gemma3("27b", 62, 5376, 32, 16, 21504, head=128, scalar=168, sliding_window=1024),
            ModelShape(
                name="phi-2", family="phi", layers=32, hidden=2560, heads=32, kv_heads=32, ffn=10240, vocabulary=51200,
                positions=2048, config=(("partial_rotary_factor", 0.4),),
                source="Javaheripi and Bubeck 2023, Phi-2: The surprising power of small language models; its config",
            ),
            _decoder(
                "phi-3-mini", "phi3", _PHI3, (32, 3072, 32, 32, 8192), 32064, 4096, config=_PHI3_WINDOW
            ),
            _decoder(
                "phi-3-medium", "phi3", _PHI3, (40, 5120, 40, 10, 17920), 32064, 4096, config=_PHI3_WINDOW
            ),
            _decoder(
                "phi-4", "phi3", _PHI3, (40, 5120, 40, 10, 17920), 100352, 16384,
                rope_theta=250000.0, config=(("rms_norm_eps", 1e-5),),
            ),
            ModelShape(
                name="deepseek-v2-lite", family="deepseek_v2", layers=27, hidden=2048, heads=16, kv_heads=16, ffn=1408,
                vocabulary=102400, positions=163840, experts=64, experts_per_token=6, config=_DEEPSEEK_V2_LITE,
                source="DeepSeek-AI 2024, arXiv:2405.04434, appendix B; deepseek2-16b.yml of AI-Hypercomputer/maxtext",
            ),
            _olmo2("1b", 16, 2048, 16, 16, 8192),
            _olmo2("7b", 32, 4096, 32, 32, 11008),
            _olmo2("13b", 40, 5120, 40, 40, 13824),
            _olmo2("32b", 64, 5120, 40, 8, 27648),
        )
    }
)  # fmt: skip
