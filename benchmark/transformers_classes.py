"""How many classes of transformers can be traced, and trained under a streamed plan with the bits of plain PyTorch.

    python benchmark/transformers_classes.py --list              tries all classes of the tasks below in plain PyTorch
    python benchmark/transformers_classes.py [--only bert opt] [--resume]
                                                         judges those on the list, and appends a row for each


Both go on where they were stopped: the list with ``--list``, the rows with ``--resume``. Rows name the processor, and the
instruction set if ``ONEDNN_MAX_CPU_ISA`` limits oneDNN to one.

A class is built with a tiny config of two to four layers. It is on the list if plain PyTorch trains it twice with the
same bits; all others are listed with the reason. Judging it asks four things:

* traced: `trace_step` for target ``cpu`` in fp32, and for an H200 in bf16 if plain PyTorch trains the class in bf16;
* peak: predicted on the CPU, less observed; expert choices are those of the real step;
* bits: three steps of AdamW under a streamed plan, with the losses and weights of plain PyTorch.

The list is `results/transformers_classes.json`; rows go to `results/transformers_classes.csv`. Each class runs in a
process that is forked for it.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import itertools
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

from benchmark.common import Row, append_rows, conditions, onednn_limit
from benchmark.observe import observe_step
from elixir.cli.trial import quiet_profiler
from elixir.errors import ElixirError
from elixir.hardware.profile import preset
from elixir.search import simple_search
from elixir.tracer.trace import trace_step
from elixir.tracer.values.expert_choice import RecordedRouting, RoutingRecorder
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.account.step_report import StepReport

LIST = Path(__file__).parent / "results" / "transformers_classes.json"
ROWS = LIST.with_suffix(".csv")
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
"""Task -> the table of transformers that names its classes."""
PEFT = "peft"
"""The task of classes that peft adapts."""
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 100}),
    "VeRA": ("VeraConfig", {"r": 4}),
    "LoHa": ("LoHaConfig", {"r": 4}),
    "LoKr": ("LoKrConfig", {"r": 4}),
    "OFT": ("OFTConfig", {"r": 4, "oft_block_size": 0}),
    "HRA": ("HRAConfig", {"r": 4}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 50}),
    "IA3": ("IA3Config", {}),
    "norms": ("LNTuningConfig", {}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "prompt encoder": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 32}),
}
"""Adapter -> its config in peft, and options."""
ADAPTED = {
    "llama": ("LlamaForCausalLM", "CAUSAL_LM"),
    "opt": ("OPTForCausalLM", "CAUSAL_LM"),
    "t5": ("T5ForConditionalGeneration", "SEQ_2_SEQ_LM"),
}
"""Model type -> the class that is adapted, and its task in peft."""

COLUMNS = (
    "class", "task", "traced", "identical", "refused", "predicted_bytes", "observed_bytes", "difference_percent", "notes",
    "plain_bf16", "traced_h200_bf16", "refused_h200_bf16", "error", "cpu_s",
)  # fmt: skip
"""Columns of a row, before the conditions under which it was made; `cpu_s` is the time that judging the class took."""
STEPS, BATCH, LENGTH, VOCABULARY = 3, 2, 16, 128
MOST_NUMEL = 5_000_000
SECONDS = 120
"""A class that takes longer is given up."""
NOT_TRIED = "not tried for lack of time"
AGAIN = (NOT_TRIED, f"took more than {SECONDS} s")
"""Reasons of classes that the next run tries again: the machine was busy."""

_SIZES: dict[str, int] = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "model_dim", "embedding_size"], 64),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_decoder_layers", "num_encoder_layers", "attention_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads"], 4),
    **dict.fromkeys(["intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"], 128),
    **dict.fromkeys(["ffn_hidden_size", "d_inner", "hidden_dim", "mlp_dim", "shared_intermediate_size"], 128),
    **dict.fromkeys(["moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts"], 1),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "v_head_dim", "head_dim", "d_kv"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_source_positions"], 64),
    **dict.fromkeys(["max_target_positions", "max_sequence_length"], 64),
    **dict.fromkeys(["vocab_size", "src_vocab_size", "tgt_vocab_size", "entity_vocab_size", "shape_vocab_size"], VOCABULARY),
    **dict.fromkeys(["pronunciation_vocab_size", "vocab_size_per_layer_input", "encoder_hash_byte_group_vocab"], VOCABULARY),
    **dict.fromkeys(["emb_dim", "d_latents", "num_latents", "projection_dim", "hidden_size_per_layer_input"], 32),
    **dict.fromkeys(["shape_embed_dim", "pronunciation_embed_dim", "entity_emb_size"], 16),
    **dict.fromkeys(["num_self_attends_per_block", "num_blocks", "attn_layer_period"], 2),
    "mamba_chunk_size": 16, "mamba_d_state": 16, "rotary_dim": 8, "attn_layer_offset": 1, "num_kv_shared_layers": 0, "num_experts_per_layer": 4, "zero_expert_num": 4,
    "num_key_value_heads": 2, "image_size": 32, "patch_size": 8,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2,
}  # fmt: skip
_LISTS: dict[str, list[int]] = {
    "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3], "attn_layer_indices": [1],
    "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32],
}  # fmt: skip
_STAGES: dict[str, Callable[[int], int]] = {
    **dict.fromkeys(["depths", "num_blocks", "layers_per_stage"], lambda depth: min(depth, 1)),
    **dict.fromkeys(["hidden_sizes", "embed_dims", "neck_hidden_sizes"], lambda width: max(8, width // 4)),
    "num_heads": lambda heads: 4,
}
"""Lists with one entry for each stage of a network that grows narrower -> what becomes of an entry."""
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 4, "num_layers": 4, "n_layer": 4},
    {"head_dim": None, "d_kv": None},
    {"hidden_size": None, "intermediate_size": None, "embed_dim": None, "num_attention_heads": None, "num_heads": None},
    {"image_size": 64, "patch_size": 4, "window_size": 2},
    {"image_size": 64, "patch_size": None},
)
"""Tried one after the other until a class can be built; None leaves a size as it is."""


def tiny_config(kind: str, variant: dict[str, Any]) -> Any:
    """A config of a model type with its sizes shrunk, dropout off, and special tokens inside the vocabulary."""
    cls = configuration_auto.CONFIG_MAPPING[kind]
    default = cls().to_dict()
    wanted = _shrunk(default, variant)
    if default.get("pad_token_id") is None:
        wanted["pad_token_id"] = 0
    if default.get("is_encoder_decoder") and default.get("decoder_start_token_id") is None:
        wanted["decoder_start_token_id"] = 0
    if "num_experts_per_tok" in default and default["num_experts_per_tok"] is None:
        wanted["num_experts_per_tok"] = 2
    if default.get("languages"):
        wanted["default_language"] = default["languages"][0]
    return cls(**wanted)


def _shrunk(default: dict[str, Any], variant: dict[str, Any]) -> dict[str, Any]:
    """Values to change in a config, those of the configs inside it included."""
    layers = next(
        (default[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(default.get(n), int)), 0
    )
    if any(isinstance(default.get(name), (list, tuple)) and len(default[name]) == layers for name in _STAGES):
        layers = 0  # lists of this length are of stages
    left = variant.get("num_hidden_layers", 2)
    wanted: dict[str, Any] = {}
    for name, value in default.items():
        size = variant.get(name, _SIZES.get(name))
        if isinstance(value, dict) and "model_type" in value:
            wanted[name] = value | _shrunk(value, variant)
        elif isinstance(value, int) and not isinstance(value, bool) and size is not None:
            wanted[name] = size
        elif name in _LISTS and isinstance(value, (list, tuple)):
            wanted[name] = _LISTS[name]
        elif name in _STAGES and isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            wanted[name] = [_STAGES[name](each) for each in value]
        elif isinstance(value, float) and ("drop" in name or name.startswith("mask_")):
            wanted[name] = 0.0
        elif name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
            wanted[name] = 3
        elif isinstance(value, list) and layers and len(value) == layers:
            value = [_SIZES[name]] if name in _SIZES and isinstance(value[0], int) else value
            kinds = list(dict.fromkeys(value))[:2]
            wanted[name] = [kinds[-1 - place % 2 if len(kinds) == 2 else 0] for place in range(left)][::-1]
        elif name == "per_layer_config" and isinstance(value, dict):
            wanted[name] = {index: each for index, each in value.items() if int(index) < left}
    return wanted


def new_batch(model: nn.Module, task: str) -> dict[str, torch.Tensor]:
    config = model.config
    ids = torch.randint(5, VOCABULARY - 5, (BATCH, LENGTH))
    if task == "image":
        size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
        return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.arange(BATCH)}
    if task == "ctc":
        labels = torch.randint(5, 30, (BATCH, 6))
        if model.main_input_name == "input_features":
            width = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 80)
            return {"input_features": torch.randn(BATCH, 64, width), "labels": labels}
        return {"input_values": torch.randn(BATCH, 1600), "labels": labels}
    if task == "tokens":
        return {"input_ids": ids, "labels": ids % 2}
    return {"input_ids": ids, "labels": ids.clone()}


def build(task: str, kind: str, name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny model of a class with its batch; the error of the first variant if none can be built and run."""
    error: Exception | None = None
    base, _, adapter = name.partition(" + ")
    for variant in _VARIANTS:
        try:
            config = tiny_config(kind, variant)
            cls = getattr(transformers, base)
            if cls.config_class is not None and not isinstance(config, cls.config_class):
                config = config.get_text_config()  # the language model of one that sees or hears as well
            with torch.device("meta"):
                if sum(p.numel() for p in cls(copy.deepcopy(config)).parameters()) > MOST_NUMEL:
                    raise ValueError(f"more than {MOST_NUMEL:,} parameters after shrinking")
            torch.manual_seed(0)
            model = cls(config).train().float()
            if adapter:
                model = _adapted(model, kind, adapter)
            inp = new_batch(model, task)
            if not torch.isfinite(model(**inp).loss):
                raise ValueError("the loss is not finite")
            return model, inp
        except Exception as found:
            error = error or found
    assert error is not None
    raise error


def _adapted(model: nn.Module, kind: str, adapter: str) -> nn.Module:
    import peft

    config, options = ADAPTERS[adapter]
    adapted: nn.Module = peft.get_peft_model(model, getattr(peft, config)(task_type=ADAPTED[kind][1], **options))
    return adapted.train()


def step(model: nn.Module, inp: dict[str, Any]) -> None:
    """Forward and backward, with the same random numbers every time."""
    torch.manual_seed(1)
    model(**inp).loss.backward()


def trained(model: nn.Module, inp: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after three steps in plain PyTorch."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for index in range(STEPS):
        torch.manual_seed(index)
        loss = model(**inp).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def trained_under_a_plan(
    model: nn.Module, inp: dict[str, Any]
) -> tuple[tuple[list[float], dict[str, torch.Tensor]], StepReport]:
    """The same under a plan that streams most weights, and the report of the last step."""
    plan = simple_search(
        model, 1, split_number=6, allocate_factor=0.6, shard_device="cpu", inp=inp, step_fn=step, optimizer_type="AdamW",
        hardware="cpu",
    ).plan  # fmt: skip
    module, losses = ElixirModule(model, plan, device="cpu"), []
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for index in range(STEPS):
        torch.manual_seed(index)
        loss = module(**inp).loss
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state, report = module.state_dict(), module.last_report
    assert report is not None
    module.close()
    return (losses, state), report


def same(one: tuple[list[float], dict[str, torch.Tensor]], other: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
    """Whether losses and weights have the same bits."""
    return one[0] == other[0] and all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def plain(task: str, kind: str, name: str) -> Row:
    """Whether plain PyTorch trains a class, twice with the same bits."""
    model, inp = build(task, kind, name)
    twin = copy.deepcopy(model)
    if not same(trained(model, inp), trained(twin, inp)):
        raise ValueError("plain PyTorch differs from itself")
    return {}


def judge(task: str, kind: str, name: str) -> Row:
    """One row."""
    model, inp = build(task, kind, name)
    twin = copy.deepcopy(model)
    probe = copy.deepcopy(model)  # a step moves the statistics of batch norms on
    row: Row = {"traced": False, "identical": False, "refused": ""}
    try:
        with quiet_profiler():
            observed = observe_step(probe, inp, step).peak_bytes
        with RoutingRecorder() as recorded:
            step(probe, inp)
        trace = trace_step(
            model, inp, step, hardware=preset("cpu"), optimizer=None, routing=RecordedRouting(recorded.choices)
        )
        predicted = trace.backward_peak_bytes - trace.resting_bytes
        row |= {
            "traced": True,
            "predicted_bytes": predicted,
            "observed_bytes": observed,
            "difference_percent": round(100 * (predicted / observed - 1), 4),
            "notes": "; ".join(trace.assumptions),
        }
        row["identical"] = same(trained(model, inp), trained_under_a_plan(twin, inp)[0])
    except ElixirError as error:
        row["refused"] = str(error).split("\n")[0]
    row |= _in_bf16(task, kind, name)
    return row


def _in_bf16(task: str, kind: str, name: str) -> Row:
    model, inp = build(task, kind, name)
    half = {key: value.bfloat16() if value.is_floating_point() else value for key, value in inp.items()}
    try:
        step(copy.deepcopy(model).bfloat16(), half)
    except (RuntimeError, ValueError, NotImplementedError):
        return {"plain_bf16": False, "traced_h200_bf16": None}
    try:
        trace_step(model, inp, step, hardware=preset("h200"), dtype=torch.bfloat16)
    except ElixirError as error:
        return {"plain_bf16": True, "traced_h200_bf16": False, "refused_h200_bf16": str(error).split("\n")[0]}
    return {"plain_bf16": True, "traced_h200_bf16": True}


def apart(call: Callable[..., Row], *args: str) -> Row:
    """`call` in a forked process; ``{"error": ...}`` if it raises, dies or takes too long."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, call, args), daemon=True)
    process.start()
    theirs.close()
    found: Row = {"error": f"took more than {SECONDS} s"}
    if ours.poll(SECONDS):
        try:
            found = ours.recv()
        except EOFError:
            found = {"error": "the process died"}
    process.kill()
    process.join()
    return found


def _answer(pipe: Any, call: Callable[..., Row], args: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        found = call(*args)
        pipe.send(found | {"cpu_s": round(time.process_time(), 2)})  # of this process, which was forked for the class
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).split("\n")[0]
        pipe.send({"error": f"{type(error).__name__}: {text[:150]}"})


def prepare() -> None:
    """Import what all classes need, so that no forked process has to, and spare their garbage collection this much."""
    build("causal", "bloom", "BloomForCausalLM")
    gc.freeze()


def candidates() -> Iterator[tuple[str, str, str]]:
    """(task, model type, class) of all that transformers names for the tasks, each class once; adapters of peft."""
    seen: set[str] = set()
    for task, table in TASKS.items():
        for kind, names in getattr(modeling_auto, table).items():
            name = names if isinstance(names, str) else names[0]
            if name not in seen:
                seen.add(name)
                yield task, kind, name
    for kind, (name, _) in ADAPTED.items():
        for adapter in ADAPTERS:
            yield PEFT, kind, f"{name} + {adapter}"


def listed() -> list[tuple[str, str, str]]:
    """(task, model type, class) of those that plain PyTorch trains."""
    return [tuple(entry) for entry in json.loads(LIST.read_text(encoding="utf-8"))["classes"]]  # type: ignore[misc]


def make_list(limit_s: float) -> None:
    """Tries every class in plain PyTorch, and writes down which train and why the others do not.

    Goes on where an earlier run with the same transformers ended, and turns from task to task, so that a list that was
    cut short has classes of all of them. The list is written after each class.
    """
    classes: list[list[str]] = []
    skipped: dict[str, str] = {}
    known = json.loads(LIST.read_text(encoding="utf-8")) if LIST.exists() else {}
    if known.get("transformers") == transformers.__version__:
        classes = known["classes"]
        skipped = {name: why for name, why in known["skipped"].items() if why not in AGAIN}
    order = [*TASKS, PEFT]
    settled = {entry[2] for entry in classes} | set(skipped)
    by_task = [[entry for entry in candidates() if entry[0] == task and entry[2] not in settled] for task in order]
    left = [entry for turn in itertools.zip_longest(*by_task) for entry in turn if entry is not None]
    started = time.monotonic()
    for index, (task, kind, name) in enumerate(left):
        late = time.monotonic() - started > limit_s
        found: Row = {"error": NOT_TRIED} if late else apart(plain, task, kind, name)
        if "error" in found:
            skipped[name] = found["error"]
        else:
            classes.append([task, kind, name])
        if not late or index == len(left) - 1:
            classes.sort(key=lambda entry: (order.index(entry[0]), entry[1]))
            lists = {
                "transformers": transformers.__version__,
                "classes": classes,
                "skipped": dict(sorted(skipped.items())),
            }
            LIST.write_text(json.dumps(lists, indent=1) + "\n", encoding="utf-8")
            print(f"{len(classes):4} {name}: {found.get('error', 'trains')}", flush=True)


def judged(path: Path) -> set[str]:
    """Classes that have a row by this version of transformers, with the same limit of oneDNN's instruction set."""
    if not path.exists():
        return set()
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        same = [row for row in rows if row["transformers"] == transformers.__version__ and not row["error"]]
        return {
            row["class"] for row in same if row["device"].partition(", oneDNN")[2] == onednn_limit()[len(", oneDNN") :]
        }


def main() -> int:
    """The whole benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="make the list, or go on with it")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which no further class is begun")
    parser.add_argument("--resume", action="store_true", help="leave out classes that have a row")
    parser.add_argument("--only", nargs="+", help="model types")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, PEFT], choices=[*TASKS, PEFT])
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    prepare()
    if args.list:
        make_list(args.limit)
        return 0
    rows, done = [], judged(ROWS) if args.resume else set()
    started = time.monotonic()
    for task, kind, name in listed():
        if name in done or task not in args.tasks or not (args.only is None or kind in args.only):
            continue
        if time.monotonic() - started > args.limit:
            break
        row = dict.fromkeys(COLUMNS) | {"class": name, "task": task, **conditions()} | apart(judge, task, kind, name)
        row["transformers"] = transformers.__version__
        rows.append(row)
        said = row["error"] or row["refused"] or f"{row['difference_percent']:+.3f} %, same bits: {row['identical']}"
        print(f"{name}: {said}; H200 bf16: {row['traced_h200_bf16']} {row['refused_h200_bf16'] or ''}", flush=True)
        if not args.no_record:
            append_rows("transformers_classes", [row])
    for what in ("traced", "identical"):
        print(f"{what}: {sum(bool(row[what]) for row in rows)} of {len(rows)}")
    half = [row for row in rows if row["plain_bf16"]]
    print(f"traced for an H200 in bf16: {sum(bool(row['traced_h200_bf16']) for row in half)} of {len(half)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
