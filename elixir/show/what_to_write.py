"""The code that runs a plan: what a user writes for transformers' Trainer, for TRL, and in a training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from elixir.errors import readable_bytes
from elixir.models.model_shape import find
from elixir.models.packing import Packing
from elixir.optimizer_states import averages, without_average
from elixir.plan.plan import Plan
from elixir.search.request import FREE_HERE, SearchRequest
from elixir.units import parse_bytes

if TYPE_CHECKING:
    from elixir.search.advise.answer import Answer

_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "ForImageClassification": "AutoModelForImageClassification",
}
"""Ending of a class of transformers -> the class that loads such a model."""
_OTHER_FAMILIES = {
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}
"""Families among the models known by name that are no causal language models."""
_OPTIM = {"AdamW": None, "SGD": "sgd", "Adagrad": "adagrad", "RMSprop": "rmsprop"}
"""Optimizer -> Trainer's ``optim``; None: its default. Trainer takes others as objects."""
_SIZES = ("host_memory", "host_budget", "disk_memory", "host_reserve", "reserve")
_SAID_OTHERWISE = frozenset(
    """world_size optimizer_type matrices free chunks_of accumulation clipping activations device_memory device_reserve
    pass_size replicas moments""".split()
)
"""Fields of a request that the run settles, or that follow from the plan."""
_DECAY = 0.999
"""Share of an average of the weights that a step keeps, which no plan says."""
YOURS = "# yours: folder (the weights), dataset, batch (one of a rank), lr"
PARTS = {"trainer": "Trainer", "trl": "TRL", "loop": "your own loop"}


def what_to_write(answer: Answer, model_class: str = "", *, without: Collection[str] = ()) -> dict[str, str]:
    """The code for a training under a plan; empty if the plan trains nothing.

    It has a part ``model``, after which one of `PARTS` comes: two for Hugging Face models alone, and ``trl`` for
    language models. Names that the user has are those of `YOURS`; for other models ``model``, and ``step_fn`` as
    `elixir.wrap` takes it.

    Args:
        answer: the plan, and what was asked.
        model_class: name of the model's class, where it was built.
        without: fields of the request that were assumed, and not asked for.
    """
    plan, request = answer.plan, answer.question.request
    if plan.step.forward or plan.step.generate:
        return {}
    shape = find(plan.model_name)
    auto = next((auto for end, auto in _AUTO_CLASSES.items() if model_class.endswith(end)), None)
    if auto is None and shape is not None:
        auto = _OTHER_FAMILIES.get(shape.family, "AutoModelForCausalLM")
    if plan.step.checkpoint is None:
        auto = None  # its input or its step is the user's
    options = _options(plan, request, without)
    hardware = answer.question.hardware
    code = {"model": _model(plan, auto, options, hardware.ranks_per_host(plan.world_size))}
    arguments = _arguments(plan) | ({"use_cpu": True} if hardware.device_kind == "cpu" else {})
    if auto is not None:
        code["trainer"] = _trainer(plan, arguments)
    if auto == "AutoModelForCausalLM":
        code["trl"] = _trl(plan, arguments)
    return code | {"loop": _loop(plan, is_ours=auto is not None)}


def code_text(title: str, code: Mapping[str, str]) -> str:
    """The code under a title, a comment before each part."""
    parts = (f"# {label}\n{code[name]}" for name, label in PARTS.items() if name in code)
    return "\n".join((f"\n# {title}", code["model"], *parts))


def _options(plan: Plan, request: SearchRequest, without: Collection[str]) -> dict[str, Any]:
    """Arguments of `elixir.wrap`, which ``elixir=`` of a Trainer takes as well."""
    found: dict[str, Any] = {"device_memory": _size(plan.device_budget_bytes)}
    for field in dataclasses.fields(request):
        name, value = field.name, getattr(request, field.name)
        if name not in _SAID_OTHERWISE and name not in without and value not in (field.default, FREE_HERE):
            found[name] = _size(parse_bytes(value)) if name in _SIZES else value
    of_plan: dict[str, tuple[Any, Any]] = {
        "moments": (plan.moments, "float32"),
        "ema": (_DECAY if averages(plan.optimizer) else None, None),
        "activations": ("auto" if plan.step.activations else None, None),
        "pass_size": (plan.pass_size, 1),
        "replicas": (plan.replicas, 1),
        "use_fused_kernels": (plan.step.fused_kernels, False),
        "disk_folder": ("disk" if plan.uses_disk else None, None),
        "weights": ("weights" if plan.reads_files else None, None),
    }
    return found | {name: value for name, (value, default) in of_plan.items() if value != default}


def _size(nbytes: int) -> str:
    return readable_bytes(nbytes, up=True).replace(".00 ", " ").replace(" ", "")


def _call(name: str, *given: str, **arguments: Any) -> str:
    """A call, its arguments as Python writes them."""
    words = [
        *given,
        *(f"{key}={value if isinstance(value, _Code) else _text(value)}" for key, value in arguments.items()),
    ]
    return f"{name}({', '.join(words)})"


def _text(value: Any) -> str:
    return repr(value).replace("'", '"')


class _Code(str):
    """Text that is code, and no value."""


def _model(plan: Plan, auto: str | None, options: Mapping[str, Any], ranks_per_host: int) -> str:
    """The model and the options, for all three ways to train it."""
    step, dtype = plan.step, None if plan.dtype == "as built" else _Code(f"torch.{plan.dtype}")
    lines = ["import torch"]
    names = [*([auto] if auto else []), *(["BitsAndBytesConfig"] if step.quantised else [])]
    if names:
        lines.append(f"from transformers import {', '.join(names)}")
    loaded: dict[str, Any] = {"dtype": dtype or "auto"}
    packing = _packing(plan)
    if packing is not None and packing.flash:
        loaded["attn_implementation"] = "flash_attention_2"
    if step.quantised:
        loaded |= {"quantization_config": _Code("quantise"), "device_map": "cpu"}
    if step.lora and auto is not None:
        lines.append("from peft import LoraConfig, get_peft_model")
    if plan.world_size > 1:
        hosts = -(-plan.world_size // ranks_per_host)
        several = f"--nnodes {hosts} " if hosts > 1 else ""
        lines.insert(0, f"# start it with torchrun {several}--nproc-per-node {ranks_per_host}")
    if step.quantised:
        form: dict[str, Any] = {
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": dtype or _Code("torch.bfloat16"),
        }
        double = {"bnb_4bit_use_double_quant": True} if step.quantised == "nf4-double" else {}
        lines.append(f"quantise = {_call('BitsAndBytesConfig', load_in_4bit=True, **form, **double)}")
    if auto is not None:
        lines.append(f"model = {_call(f'{auto}.from_pretrained', 'folder', **loaded)}")
    if step.lora and auto is not None:
        task = {"AutoModelForCausalLM": "CAUSAL_LM", "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM"}.get(auto)
        kind: dict[str, Any] = {"r": step.lora, "target_modules": "all-linear"}
        lines.append(f"adapters = {_call('LoraConfig', **kind, **({'task_type': task} if task else {}))}")
    if "+" in _optimizer(plan):
        lines.append(f"# optimizer: yours, a list of {_optimizer(plan).replace(' + ', ' and ')}")
    return "\n".join((*lines, f"options = {_text(options)}"))


def _checkpointing(plan: Plan) -> list[str]:
    return [
        "from elixir.models.activation_checkpointing import enable_checkpointing",
        f"enable_checkpointing(model, {_text(plan.step.checkpoint)})",
    ]


def _of_some_layers(plan: Plan) -> list[str]:
    """Lines for a form of checkpointing that no training argument has."""
    return _checkpointing(plan) if ":" in (plan.step.checkpoint or "") else []


def _arguments(plan: Plan) -> dict[str, Any]:
    """Training arguments that mean the step of the plan."""
    step = plan.step
    checkpoint = step.checkpoint in ("non-reentrant", "reentrant")
    found: dict[str, Any] = {
        "per_device_train_batch_size": step.samples or 1,
        "gradient_accumulation_steps": plan.accumulation,
        "learning_rate": _Code("lr"),
        "gradient_checkpointing": checkpoint,
    }
    if checkpoint:
        found["gradient_checkpointing_kwargs"] = {"use_reentrant": step.checkpoint == "reentrant"}
    found |= {"bf16": True} if plan.dtype == "bfloat16" else {"fp16": True} if plan.dtype == "float16" else {}
    if not plan.clipping:
        found["max_grad_norm"] = 0.0
    if step.compiled:
        found["torch_compile"] = True
    optim = _OPTIM.get(_optimizer(plan))
    return found | ({"optim": optim} if optim else {})


def _optimizer(plan: Plan) -> str:
    return without_average(plan.optimizer).partition(" (")[0]


def _packing(plan: Plan) -> Packing | None:
    return None if plan.step.packed is None else Packing.read(plan.step.packed)


def _documents(plan: Plan) -> int:
    """Documents of a micro-batch; its samples if nothing is packed."""
    packing = _packing(plan)
    return (plan.step.samples or 1) * (1 if packing is None else packing.documents)


def _given_optimizer(plan: Plan) -> dict[str, Any]:
    name = _optimizer(plan)
    if name in _OPTIM:
        return {}
    made = "optimizer" if "+" in name else f"torch.optim.{name}(model.parameters(), lr=lr)"
    return {"optimizers": _Code(f"({made}, None)")}


def _trainer(plan: Plan, arguments: Mapping[str, Any]) -> str:
    given, packing = {**arguments, "per_device_train_batch_size": _documents(plan)}, _packing(plan)
    lines = [
        f"from transformers import {'DataCollatorWithFlattening, ' if packing else ''}TrainingArguments",
        "from elixir.integrations.transformers import ElixirTrainer",
        *_of_some_layers(plan),
        *(["model = get_peft_model(model, adapters)"] if plan.step.lora else []),
        f"args = {_call('TrainingArguments', _text('out'), **given)}",
    ]
    more = {"args": _Code("args"), "train_dataset": _Code("dataset"), "elixir": _Code("options")}
    if packing is not None:
        kernels = {"return_flash_attn_kwargs": True} if packing.flash else {}
        more["data_collator"] = _Code(_call("DataCollatorWithFlattening", **kernels))
    return "\n".join((*lines, f"trainer = {_call('ElixirTrainer', 'model', **more, **_given_optimizer(plan))}"))


def _trl(plan: Plan, arguments: Mapping[str, Any]) -> str:
    given = dict(arguments) if plan.dtype == "float16" else {"bf16": False, **arguments}  # TRL's default is True
    given |= {"packing": True} if plan.step.packed else {}
    lines = [
        "from trl import SFTConfig, SFTTrainer",
        "from elixir.integrations.transformers import with_elixir",
        *_of_some_layers(plan),
        f"args = {_call('SFTConfig', _text('out'), **given, max_length=plan.step.seq)}",
    ]
    more = {"args": _Code("args"), "train_dataset": _Code("dataset"), "elixir": _Code("options")}
    more |= {"peft_config": _Code("adapters")} if plan.step.lora else {}
    made = _call("with_elixir(SFTTrainer)", "model", **more, **_given_optimizer(plan))
    return "\n".join((*lines, f"trainer = {made}"))


def _loop(plan: Plan, *, is_ours: bool) -> str:
    step, lines = plan.step, ["import elixir"]
    if step.checkpoint not in (None, "none"):
        lines += _checkpointing(plan)
    if step.lora and is_ours:
        lines.append("model = get_peft_model(model, adapters)")
        if step.checkpoint != "none":
            lines.append("model.enable_input_require_grads()")
    if "+" not in _optimizer(plan):
        lines.append(f"optimizer = torch.optim.{_optimizer(plan)}(model.parameters(), lr=lr)")
    if step.packed:
        lines.append(f"# batch: {_documents(plan)} documents in one row, with position_ids that begin anew in each")
    more: dict[str, Any] = {"inp": _Code("batch")} | ({} if is_ours else {"step_fn": _Code("step_fn")})
    if plan.dtype != "as built":
        more["dtype"] = _Code(f"torch.{plan.dtype}")
    more |= {"accumulation": plan.accumulation} if plan.accumulation > 1 else {}
    more |= {"max_norm": 1.0} if plan.clipping else {}
    more |= {"compile": True} if step.compiled else {}
    lines.append(f"model, optimizer = {_call('elixir.wrap', 'model', 'optimizer', **more)[:-1]}, **options)")
    if plan.pass_size > 1:
        lines.append("# a step: losses = optimizer.accumulate(step_fn, batches); optimizer.step()")
    return "\n".join(lines)
