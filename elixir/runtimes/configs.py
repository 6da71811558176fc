"""Files by which a runtime trains under a setting: of DeepSpeed, accelerate, Trainer, Axolotl or torchtitan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elixir.errors import InputError
from elixir.runtimes.work import Prediction, Setting
from elixir.units import format_bytes, format_seconds

COMMENT = "_comment"
"""The key of JSON files with the prediction: JSON has no comments."""


def config_text(
    prediction: Prediction, path: str | os.PathLike[str], *, layer: str, world_size: int, hosts: int
) -> str:
    """The text of a file for the runtime of a prediction, of the kind that its name says.

    ``.json``: DeepSpeed's own file for ``deepspeed``, which has no other; otherwise arguments of transformers' Trainer.
    ``.yaml``: of accelerate, or of Axolotl if ``axolotl`` is in the name. ``.toml``: of torchtitan.

    Args:
        prediction: of the setting.
        path: the file's name.
        layer: names of the classes of layers that are wrapped, between commas.
        world_size: ranks.
        hosts: machines.

    Raises:
        InputError: the runtime has no file of that kind.
    """
    setting, name = prediction.setting, Path(path).name.lower()
    said = f"Predicted by Elixir: {prediction}{by_hand(setting, path)}"
    if name.endswith(".json"):
        body = _deepspeed(setting) if setting.runtime == "deepspeed" else _trainer(setting, layer)
        # TrainingArguments refuse keys that they do not have; a name of the run may say anything, if it is short.
        short = (
            f"predicted {format_bytes(prediction.device_bytes)} a device, {format_seconds(prediction.step_s)} a step"
        )
        head = {COMMENT: said} if setting.runtime == "deepspeed" else {"run_name": short}
        return json.dumps({**head, **body}, indent=2) + "\n"
    if name.endswith((".yaml", ".yml")) and setting.runtime != "deepspeed":
        table = _axolotl(setting, layer) if "axolotl" in name else _accelerate(setting, layer, world_size, hosts)
        return _yaml(table, said)
    if name.endswith(".toml") and setting.runtime != "deepspeed":
        return _toml(_torchtitan(setting, world_size), said)
    kinds = ".yaml (accelerate; Axolotl with axolotl in its name), .json (Trainer) or .toml (torchtitan)"
    if setting.runtime == "deepspeed":
        kinds = ".json, which accelerate takes by --deepspeed_config_file, Trainer and Axolotl by deepspeed="
    raise InputError(f"{os.fspath(path)!r} is no name of a file for {setting.runtime}: end it in {kinds}")


def by_hand(setting: Setting, path: str | os.PathLike[str]) -> str:
    """The part of a setting that a file of that name cannot say, as words after a semicolon; may be empty."""
    left, name = list[str](), Path(path).name.lower()
    if setting.checkpoint and (setting.runtime == "deepspeed" or (setting.runtime == "ddp" and _is_accelerate(name))):
        left.append("switch activation checkpointing on (model.gradient_checkpointing_enable())")
    if _is_accelerate(name):
        left.append(f"{setting.accumulation} micro-batches of {setting.micro}")
    if setting.runtime == "ddp" or not setting.offload:
        left.append("AdamW(fused=True)")
    elif setting.runtime == "deepspeed":
        left.append("DeepSpeedCPUAdam")
    return f"; in your script: {', '.join(left)}" if left else ""


def _is_accelerate(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and "axolotl" not in name


def _deepspeed(setting: Setting) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": setting.stage, "overlap_comm": True, "contiguous_gradients": True}
    if setting.offload:
        partly = {"ratio": setting.ratio} if setting.ratio < 1 else {}
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, **partly}
    if setting.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if setting.weights_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": setting.micro,
        "gradient_accumulation_steps": setting.accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def _fsdp(setting: Setting, layer: str, prefix: str = "") -> dict[str, Any]:
    values = {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": layer,
        "reshard_after_forward": not setting.keep,
        "offload_params": setting.offload,
        "activation_checkpointing": setting.checkpoint,
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    return {f"{prefix}version": 2, **{f"{prefix}{key}": value for key, value in values.items()}}


def _accelerate(setting: Setting, layer: str, world_size: int, hosts: int) -> dict[str, Any]:
    own: dict[str, dict[str, Any]] = {
        "fsdp2": {"distributed_type": "FSDP", "fsdp_config": _fsdp(setting, layer, "fsdp_")},
        "ddp": {"distributed_type": "MULTI_GPU" if world_size > 1 else "NO"},
    }
    return {
        "compute_environment": "LOCAL_MACHINE",
        **own[setting.runtime],
        "mixed_precision": "bf16",
        "num_machines": hosts,
        "num_processes": world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }


def _trainer(setting: Setting, layer: str) -> dict[str, Any]:
    """Arguments of transformers' Trainer."""
    arguments: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": setting.micro,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_checkpointing": setting.checkpoint and setting.runtime == "ddp",
        "bf16": True,
        "optim": "adamw_torch_fused",
    }
    if setting.runtime == "fsdp2":
        own = {
            **_fsdp(setting, layer),
            "transformer_layer_cls_to_wrap": layer.split(","),
            "cpu_offload": setting.offload,
        }
        arguments |= {"fsdp": "full_shard", "fsdp_config": {k: v for k, v in own.items() if k != "offload_params"}}
    return arguments


def _axolotl(setting: Setting, layer: str) -> dict[str, Any]:
    table: dict[str, Any] = {
        "micro_batch_size": setting.micro,
        "gradient_accumulation_steps": setting.accumulation,
        "gradient_checkpointing": setting.checkpoint and setting.runtime != "fsdp2",
        "bf16": True,
        "optimizer": "adamw_torch_fused",
    }
    if setting.runtime == "fsdp2":
        table |= {"fsdp_version": 2, "fsdp_config": {k: v for k, v in _fsdp(setting, layer).items() if k != "version"}}
    return table


def _torchtitan(setting: Setting, world_size: int) -> dict[str, Any]:
    sharded = setting.runtime == "fsdp2"
    return {
        "training": {
            "local_batch_size": setting.micro,
            "global_batch_size": setting.micro * setting.accumulation * world_size,
            "enable_cpu_offload": setting.offload,
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "bfloat16",
        },
        "parallelism": {
            "data_parallel_shard_degree": world_size if sharded else 1,
            "data_parallel_replicate_degree": 1 if sharded else world_size,
            "fsdp_reshard_after_forward": "never" if setting.keep else "always",
        },
        "activation_checkpoint": {"mode": "full" if setting.checkpoint else "none"},
    }


def _yaml(table: Mapping[str, Any], said: str) -> str:
    lines = [f"# {said}"]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines.append(f"{key}:")
            lines += [f"  {inner}: {json.dumps(each)}" for inner, each in value.items()]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _toml(table: Mapping[str, Mapping[str, Any]], said: str) -> str:
    lines = [f"# {said}"]
    for section, values in table.items():
        lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"
