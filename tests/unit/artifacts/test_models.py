"""Named, configured and made models: right sizes, no initialisation, one deterministic default step, clear errors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.errors import InputError, InputTypeError
from elixir.models import model_shape
from elixir.models.adapters import adapted
from elixir.models.flash_attention import attend_by_document
from elixir.models.layer_units import check_compile, layers_compiled
from elixir.models.loading import build
from elixir.models.model_shape import describe, find, model_names
from elixir.models.model_tensors import fingerprint
from elixir.models.packing import Packing
from elixir.models.step import default_input, default_step, input_to_trace, planning_batch, refused_overflow
from tests.common.tiny_models import FAMILIES, tiny, tiny_shape

# Elements of the released checkpoints with their training head, tied ones once: Hugging Face's checkpoint metadata
# for all language models; torchvision's `num_params` for ViT.
PUBLISHED = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "vit-base": 86_567_656,
    "vit-large": 304_326_632,
    "mixtral-8x7b": 46_702_792_704,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "deepseek-v2-lite": 15_706_484_224,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # without the biases of its routers, which transformers has as buffers
}
# Only a rounded size is published for the rest, in billions; of Gemma 4 E2B and E4B and of Llama 4 with towers for other
# inputs, which their text models lack: 0.45 and 0.9.
NOMINAL = {
    "opt-13b": 13, "opt-30b": 30, "opt-66b": 66, "opt-175b": 174.6,
    "gemma-3-4b": 3.88, "gemma-3-12b": 11.77, "gemma-3-27b": 27.01, "olmo-2-7b": 7.3,
    "gpt2-4b": 4, "gpt2-10b": 10, "gpt2-15b": 15, "gpt2-20b": 20, "gpt2-30b": 30,
    "qwen3.5-0.8b": 0.8, "qwen3.5-2b": 2, "qwen3.5-4b": 4, "qwen3.5-9b": 9, "qwen3.5-27b": 27, "qwen3.5-35b-a3b": 35,
    "qwen3.5-122b-a10b": 122, "qwen3.5-397b-a17b": 397, "gemma-4-e2b": 5.1 - 0.45, "gemma-4-e4b": 8 - 0.45,
    "gemma-4-26b-a4b": 25.2, "gemma-4-31b": 30.7, "glm-4.5-air": 106, "llama-4-scout": 109 - 0.9,
}  # fmt: skip


def count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


# Named models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert describe(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", NOMINAL)
def test_parameter_count_is_near_the_published_size(name: str) -> None:
    assert describe(name).parameters == pytest.approx(NOMINAL[name] * 1e9, rel=0.06)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", model_names())
def test_built_model_is_what_describe_says(name: str) -> None:
    model = build(name, dtype=torch.bfloat16)
    assert count(model) == describe(name).parameters
    in_float32 = getattr(model, "_keep_in_fp32_modules_strict", None) or ()  # as transformers loads them, too
    for name, param in model.named_parameters():
        kept = any(word in name for word in in_float32)
        assert param.is_meta
        assert param.dtype == (torch.float32 if kept else torch.bfloat16)
    assert model.training
    assert not getattr(model.config, "use_cache", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_takes_other_sizes(family: str) -> None:
    sizes = {"layers": 3, "hidden": 96, "heads": 6, "vocabulary": 101, "positions": 48}
    shape = tiny_shape(family, **sizes)
    assert shape.parameters is None
    found = {word: getattr(shape, word) for word in sizes}
    assert found == sizes | {"positions": {"t5": None, "vit": 17}.get(family, 48)}
    config = tiny(family, device="meta", **sizes).config  # has every family's sizes by the names of most
    words = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    assert [getattr(config, word) for word in words] == [3, 96, 6]


def test_every_model_has_a_published_size() -> None:
    assert {*PUBLISHED, *NOMINAL} == set(model_names())


def test_names_on_the_hub_find_the_model_of_their_sizes() -> None:
    seen = set(model_names())
    for own in map(describe, model_names()):
        sizes = set(re.findall(r"\be?[\d.x]+[bm]\b", own.name))
        for hub in own.hub:
            name = hub.lower().partition("/")[2]
            assert name == own.name or name not in seen, "a name of two models"
            seen.add(name)
            assert not sizes or set(re.findall(r"\be?[\d.x]+[bm]\b", name)) <= sizes, (hub, own.name)
            for form in ("", "-unsloth-bnb-4bit", "-GPTQ-Int4"):
                assert describe(f"{hub}{form}").name == own.name
            assert describe(name).name == describe(f"unsloth/{name}").name == own.name


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", "qwen2.5-7b"),
        ("Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.3"),
        ("google/gemma-3n-E4B-it", "gemma-4-e4b"),
        ("microsoft/Phi-3-mini-128k-instruct", "phi-3-mini"),
        ("unsloth/Llama-3.2-11B-Vision-Instruct-bnb-4bit", "llama-3.2-1b"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek-v3"),
    ],
)
def test_models_of_other_sizes_are_not_taken_for_known_ones(name: str, nearest: str) -> None:
    assert find(name) is None
    with pytest.raises(InputError, match=f"unknown model '{name}'; did you mean [^?]*{nearest}.*nothing is downloaded"):
        build(name)


def test_a_path_wins_over_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen/Qwen2.5-7B", "Qwen2.5-7B-Instruct"):
        assert describe(name).name == "qwen2.5-7b"
        (tmp_path / name).mkdir(parents=True)
    for name in ("Qwen/Qwen2.5-7B", "Qwen2.5-7B-Instruct", "./gpt2", "~/gpt2", "/gpt2", "a/b/gpt2"):
        assert find(name) is None
        with pytest.raises(InputError, match="cannot be read as a model config"):
            build(name)


def test_a_copy_in_fewer_bits_is_planned_whole_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model_shape.own_name.cache_clear()
    assert describe("unsloth/gpt-oss-20b-BF16").name == "gpt-oss-20b"
    assert describe("gpt-oss-20b").name == "gpt-oss-20b"
    assert not caplog.text
    assert describe("unsloth/Llama-3.2-1B-Instruct-bnb-4bit").name == "llama-3.2-1b"
    assert "llama-3.2-1b with its weights in full precision" in caplog.text


def test_max_positions_grows_the_learned_table() -> None:
    grown = build("gpt2", max_positions=4096)
    assert count(grown) == describe("gpt2").parameters + (4096 - 1024) * 768
    assert default_input(grown, seq=4096)["input_ids"].shape == (1, 4096)


@pytest.mark.parametrize("name", ["t5-small", "vit-base"])
def test_max_positions_is_refused_where_there_is_no_such_thing(name: str) -> None:
    with pytest.raises(InputError, match="leave out max_positions"):
        build(name, max_positions=2048)


def test_unknown_name_suggests_the_nearest() -> None:
    for call in (build, describe):
        with pytest.raises(InputError, match=r"unknown model 'opt-175'; did you mean .*opt-175b"):
            call("opt-175")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, "dtype must be float32"),
        ({"checkpoint": "full"}, "unknown checkpoint mode 'full'"),
        ({"device": "warp"}, "'warp' is no device"),
        ({"max_positions": 0}, "max_positions must be 1 or more"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build("opt-125m", **options)


def test_a_module_in_place_of_a_name_is_a_type_error() -> None:
    with pytest.raises(InputTypeError, match="found Linear"):
        build(nn.Linear(1, 1))  # type: ignore[arg-type]


# Checkpointing ------------------------------------------------------------------------------------------------------


# config.json --------------------------------------------------------------------------------------------------------


def write_config(folder: Path, values: object) -> Path:
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_config_file_gives_the_same_model_as_the_name(family: str, tmp_path: Path) -> None:
    named = tiny(family, device="meta")
    path = write_config(tmp_path, named.config.to_dict())
    for place in (path, tmp_path):
        read = build(str(place))
        assert type(read) is type(named)
        assert fingerprint(read) == fingerprint(named)


BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}


def test_config_chooses_architecture_and_dtype(tmp_path: Path) -> None:
    values = BERT | {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "dtype": "bfloat16"}
    model = build(str(write_config(tmp_path, values)))
    assert type(model).__name__ == "BertForSequenceClassification"
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    assert default_input(model, batch=3, seq=4)["labels"].tolist() == [0, 1, 0]
    assert {param.dtype for param in build(str(tmp_path), dtype=torch.float16).parameters()} == {torch.float16}


def test_config_of_a_family_without_a_name_is_built_and_stepped(tmp_path: Path) -> None:
    values = BERT | {"model_type": "roberta", "max_position_embeddings": 34, "pad_token_id": 1}
    model = build(str(write_config(tmp_path, values)), device="cpu")
    assert type(model).__name__ == "RobertaForMaskedLM"
    # Its positions start after the padding row: a table of 34 holds sequences of 32.
    inp = default_input(model)
    assert inp["input_ids"].shape == (1, 32)
    default_step(model, inp)


def test_encoder_decoder_config_without_a_start_token_can_be_stepped(tmp_path: Path) -> None:
    values = tiny("t5", device="meta").config.to_dict() | {"architectures": ["T5EncoderModel"]}
    values.pop("decoder_start_token_id", None)
    model = build(str(write_config(tmp_path, values)), device="cpu")
    assert type(model).__name__ == "T5ForConditionalGeneration"
    default_step(model, default_input(model, seq=8))


def test_quantisation_of_a_config_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = tiny("opt", device="meta").config.to_dict() | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert count(build(str(write_config(tmp_path, values)))) == count(tiny("opt", device="meta"))
    assert "quantization_config is ignored" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no valid JSON"),
        ({"model_type": "whisper"}, "no language model or image classifier for 'whisper'"),
        ({"model_type": "opt", "dtype": "float3"}, "values do not make a OPTConfig: .*float3"),
        ([], "expected an object with 'model_type'"),
        ({"hidden_size": 8}, "expected an object with 'model_type'"),
        ({"model_type": "warp-drive"}, "knows no architecture 'warp-drive'"),
        ({"model_type": "opt", "architectures": ["OPTForWarp"]}, "no architecture 'OPTForWarp'"),
        ({"model_type": "opt", "hidden_size": "wide"}, "values do not make a OPTConfig"),
        ({"model_type": "opt", "hidden_size": 10, "num_attention_heads": 3}, "cannot build OPTForCausalLM"),
    ],
)
def test_unusable_config_says_what_is_wrong(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        build(str(write_config(tmp_path, content)))


# module:function ----------------------------------------------------------------------------------------------------

FACTORIES = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()

def number():
    return 3

def broken():
    raise RuntimeError("out of ideas")

class Zoo:
    cat = mlp
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "factories_for_test.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "factories_for_test", raising=False)
    return "factories_for_test"


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("number", {}, "returned int"),
        ("broken", {}, r"the function failed: RuntimeError: out of ideas \(.*factories_for_test.py:\d+\)"),
        ("absent", {}, "has no function absent"),
        ("mlp", {"checkpoint": "reentrant"}, "has no gradient_checkpointing_enable"),
        ("mlp", {"max_positions": 8}, "set it inside the function"),
    ],
)
def test_unusable_function_says_what_is_wrong(
    factories: str, function: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build(f"{factories}:{function}", **options)


# Default input and step ---------------------------------------------------------------------------------------------


def test_pixels_follow_the_dtype_of_the_model() -> None:
    inp = default_input(build("vit-base", dtype=torch.bfloat16), batch=2)
    assert inp["pixel_values"].shape == (2, 3, 224, 224)
    assert inp["pixel_values"].dtype == torch.bfloat16
    assert inp["labels"].tolist() == [0, 1]


def test_sequence_beyond_the_positions_names_both() -> None:
    with pytest.raises(
        InputError, match=r"seq 4096 is longer than the 2048 positions .*--positions 4096 for one by name"
    ):
        default_input(build("opt-125m"), seq=4096)


@pytest.mark.parametrize("argument", ["batch", "seq", "packed"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_counts_below_one_are_refused(argument: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{argument} must be a whole number of 1 or more"):
        default_input(tiny("opt", device="meta"), **{argument: value})


def test_models_without_a_derivable_input_ask_for_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pass inp"):
        default_input(nn.Linear(2, 2))
    with pytest.raises(InputError, match="takes no labels"):
        default_input(tiny("opt", device="meta").model)
    values = BERT | {"model_type": "bert", "architectures": ["BertForMultipleChoice"]}
    with pytest.raises(InputError, match="no default input for BertForMultipleChoice"):
        default_input(build(str(write_config(tmp_path, values))))
    with pytest.raises(InputError, match="leave out seq"):
        default_input(tiny("vit", device="meta"), seq=17)


def test_step_without_a_loss_is_refused_and_one_with_nothing_to_train_ends_after_forward() -> None:
    model = tiny("opt")
    inp = default_input(model, seq=8)
    with pytest.raises(InputError, match="has no loss"):
        default_step(model, {"input_ids": inp["input_ids"]})
    with pytest.raises(InputTypeError, match="inp must be a dict"):
        default_step(model, inp["input_ids"])  # type: ignore[arg-type]
    default_step(model.requires_grad_(False), inp)
    assert all(parameter.grad is None for parameter in model.parameters())
    default_step(model, {"input_ids": inp["input_ids"]})  # to evaluate needs no loss

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": x.sum()}

    with pytest.raises(InputError, match="nothing to train"):
        default_step(Apart(), {"x": torch.ones(1)})


class Nothing(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> int:
        raise IndexError(index)


def too_large() -> None:
    with refused_overflow():
        torch.empty(2**62, 2**62, device="meta")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: build("opt-125m", lora=0), InputError, "rank of the adapters, 1 or more, found 0"),
        (lambda: build("opt-125m", lora=4, quantised="int3"), InputError, "int3"),
        (lambda: build("opt-125m", quantised="nf4", device="cpu"), InputError, "quantised= plans on meta"),
        (lambda: adapted(nn.Sequential(nn.ReLU()), lora=4), InputError, "no linear layers"),
        (lambda: check_compile("yes"), InputTypeError, "compile must be True, False or a dict"),
        (lambda: layers_compiled(nn.ReLU(), True, keep=False).__enter__(), InputError, "ReLU has none"),
        (lambda: planning_batch(torch.utils.data.DataLoader(Nothing(), batch_size=2, shuffle=False)), InputError, "is empty"),
        (too_large, InputError, "too large to count their bytes"),
        (lambda: default_input(tiny("bert", device="meta"), packed=2), InputError, "no causal language model, which alone packs"),
        (lambda: default_input(tiny("llama", device="meta"), seq=8, packed=9), InputError, "9 documents do not fit into a sample of 8"),
        (lambda: input_to_trace(tiny("llama", device="meta"), batch=2**20, packed=2), InputError, "a packed row has 16,777,216 tokens at most"),
        (lambda: Packing.read(True), InputTypeError, "such as 8 or '8:flash', got True"),
        *((lambda value=value: Packing.read(value), InputError, "1 or more, such as 8 or 8:flash") for value in (0, "0", "x", "8:", "8:slow", "٣")),
        (lambda: attend_by_document(tiny("t5", device="meta", attn_implementation="eager")), InputError, "no flash attention for T5"),
        (lambda: torch.ops.elixir.unpack(torch.ones(2), torch.ones(1), [4], torch.float32), NotImplementedError, "on meta"),
    ],
)  # fmt: skip
def test_what_makes_no_model_or_batch_is_refused(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(
    "sample",
    [torch.zeros, lambda n: [0.5] * n, lambda n: [[1, 2]] * n, lambda n: ("x" * n,), lambda n: {"ids": [7] * n, "label": 1}],
)  # fmt: skip
def test_a_batch_to_plan_with_has_the_largest_samples(sample: Any) -> None:
    loader = torch.utils.data.DataLoader([sample(n) for n in (2, 7, 1, 5)], batch_size=2, collate_fn=list)
    assert str(planning_batch(loader)) == str([sample(7), sample(5)])
