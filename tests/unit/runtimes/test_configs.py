"""The tools' own parsers take what is written for them, and read the setting back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elixir.errors import InputError
from elixir.runtimes import Prediction, Setting, config_text

GIB = 2**30


def written(folder: Path, name: str, **setting: Any) -> Path:
    ranks = setting.pop("ranks", 2)
    made = Prediction(Setting(micro=2, accumulation=4, **setting), GIB, {"activations": GIB}, 0, {"compute": 1.0})
    path = folder / name
    path.write_text(config_text(made, name, layer="LlamaDecoderLayer", world_size=ranks, hosts=1))
    assert "redicted" in path.read_text()
    return path


@pytest.mark.parametrize(("offload", "keep"), [(False, False), (True, True)])
def test_accelerate_reads_an_fsdp2_file(tmp_path: Path, offload: bool, keep: bool) -> None:
    config = pytest.importorskip("accelerate.commands.config")
    found = config.load_config_from_file(
        str(written(tmp_path, "fsdp.yaml", runtime="fsdp2", offload=offload, keep=keep, checkpoint=True))
    )
    assert (found.distributed_type.value, found.num_processes, found.mixed_precision) == ("FSDP", 2, "bf16")
    assert found.fsdp_config["fsdp_version"] == 2
    assert found.fsdp_config["fsdp_offload_params"] is offload
    assert found.fsdp_config["fsdp_reshard_after_forward"] is not keep
    assert found.fsdp_config["fsdp_activation_checkpointing"] is True
    assert found.fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"


def test_accelerate_reads_a_file_for_ddp_that_says_the_rest(tmp_path: Path) -> None:
    config = pytest.importorskip("accelerate.commands.config")
    path = written(tmp_path, "ddp.yaml", runtime="ddp", checkpoint=True)
    assert config.load_config_from_file(str(path)).distributed_type.value == "MULTI_GPU"
    first = path.read_text().splitlines()[0]
    assert "gradient_checkpointing_enable()" in first
    assert "4 micro-batches of 2" in first


@pytest.mark.parametrize("runtime", ["fsdp2", "ddp"])
def test_trainer_reads_its_arguments(tmp_path: Path, runtime: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = written(tmp_path, "args.json", runtime=runtime, offload=runtime == "fsdp2", checkpoint=True)
    here = {**json.loads(path.read_text()), "use_cpu": True, "output_dir": str(tmp_path)}
    path.write_text(json.dumps(here))
    (found,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_json_file(str(path))
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps, found.bf16) == (2, 4, True)
    if runtime == "fsdp2":
        assert found.fsdp_plugin_args["fsdp_version"] == 2
        assert found.fsdp_plugin_args["cpu_offload"] is True
        assert found.fsdp_plugin_args["transformer_cls_names_to_wrap"] == "LlamaDecoderLayer"
    else:
        assert found.gradient_checkpointing is True


def test_deepspeed_reads_its_file(tmp_path: Path) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    path = written(tmp_path, "ds.json", runtime="deepspeed", stage=2, offload=True)
    found = config.DeepSpeedConfig(str(path))
    assert (found.zero_config.stage, found.train_micro_batch_size_per_gpu) == (2, 2)
    assert found.zero_config.offload_optimizer.device == "cpu"


def test_axolotl_and_torchtitan_have_their_keys(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(written(tmp_path, "axolotl.yaml", runtime="fsdp2", offload=True).read_text())
    assert (found["micro_batch_size"], found["fsdp_version"], found["fsdp_config"]["offload_params"]) == (2, 2, True)
    text = written(tmp_path, "titan.toml", runtime="fsdp2", keep=True).read_text()
    assert 'fsdp_reshard_after_forward = "never"' in text
    assert "global_batch_size = 16" in text


def test_a_name_that_says_no_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.json"):
        written(tmp_path, "config.ini", runtime="fsdp2")
    for name in ("ds.toml", "ds.yaml"):
        with pytest.raises(InputError, match="--deepspeed_config_file"):
            written(tmp_path, name, runtime="deepspeed", stage=1)


FSDP = {
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "reshard_after_forward": True, "offload_params": False, "activation_checkpointing": True,
    "cpu_ram_efficient_loading": True, "state_dict_type": "SHARDED_STATE_DICT",
}  # fmt: skip
MACHINE = {"mixed_precision": "bf16", "num_machines": 1, "num_processes": 2, "machine_rank": 0}
MACHINE |= {"main_training_function": "main", "use_cpu": False}
FUSED, CHECKPOINT = "AdamW(fused=True)", "switch activation checkpointing on (model.gradient_checkpointing_enable())"
ZERO = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
ON_HOST = {"device": "cpu", "pin_memory": True}


def parallel(shards: int, replicas: int) -> dict[str, Any]:
    degrees = {"data_parallel_shard_degree": shards, "data_parallel_replicate_degree": replicas}
    return degrees | {"fsdp_reshard_after_forward": "always"}


@pytest.mark.parametrize(
    ("name", "setting", "expected", "left"),
    [
        ("axolotl.yml", {"runtime": "fsdp2", "checkpoint": True}, {"fsdp_version": 2, "fsdp_config": FSDP}, FUSED),
        ("axolotl.yml", {"runtime": "ddp", "checkpoint": True}, {"gradient_checkpointing": True}, FUSED),
        ("axolotl.yml", {"runtime": "ddp"}, {"gradient_checkpointing": False}, FUSED),
        ("ddp.yaml", {"runtime": "ddp", "ranks": 1}, {"num_processes": 1}, f"4 micro-batches of 2, {FUSED}"),
        ("ddp.yaml", {"runtime": "ddp", "checkpoint": True}, {"distributed_type": "MULTI_GPU", **MACHINE}, f"{CHECKPOINT}, 4 micro-batches of 2, {FUSED}"),
        ("x.yml", {"runtime": "fsdp2", "offload": True}, {"distributed_type": "FSDP"}, "4 micro-batches of 2"),
        ("x.toml", {"runtime": "fsdp2"}, {"parallelism": parallel(2, 1), "activation_checkpoint": {"mode": "none"}}, FUSED),
        ("x.toml", {"runtime": "ddp", "checkpoint": True}, {"parallelism": parallel(1, 2), "activation_checkpoint": {"mode": "full"}}, FUSED),
        ("x.json", {"runtime": "fsdp2", "checkpoint": True}, {"gradient_checkpointing": False, "fsdp": "full_shard"}, None),
        ("ds.json", {"runtime": "deepspeed", "stage": 2}, {"zero_optimization": ZERO | {"stage": 2}}, FUSED),
        ("ds.json", {"runtime": "deepspeed", "stage": 3, "offload": True, "weights_offload": True, "ratio": 0.5, "checkpoint": True},
         {"zero_optimization": {**ZERO, "offload_optimizer": ON_HOST | {"ratio": 0.5}, "offload_param": ON_HOST, "stage3_gather_16bit_weights_on_model_save": True}},
         f"{CHECKPOINT}, DeepSpeedCPUAdam"),
        ("ds.json", {"runtime": "deepspeed", "stage": 2, "offload": True}, {"zero_optimization": ZERO | {"stage": 2, "offload_optimizer": ON_HOST}}, "DeepSpeedCPUAdam"),
    ],
)  # fmt: skip
def test_files_say_the_setting_and_their_heads_what_they_cannot(
    tmp_path: Path, name: str, setting: dict[str, Any], expected: dict[str, Any], left: str | None
) -> None:
    text = written(tmp_path, name, **setting).read_text()
    if name.endswith(".json"):
        found, head = json.loads(text), json.loads(text).get("_comment")
    else:
        toml = name.endswith(".toml")
        read = pytest.importorskip("tomllib").loads if toml else pytest.importorskip("yaml").safe_load
        found, head = read(text), text.splitlines()[0]
    assert {key: found[key] for key in expected} == expected
    assert head is left is None or head.endswith(f"; in your script: {left}")
    if name.startswith("axolotl"):
        assert found["gradient_checkpointing"] is (setting == {"runtime": "ddp", "checkpoint": True})
        assert ("fsdp_config" in found) is (setting["runtime"] == "fsdp2")
    if name == "ddp.yaml":  # YAML reads NO without quotes as a bool
        assert found["distributed_type"] == ("NO" if setting.get("ranks") == 1 else "MULTI_GPU")
