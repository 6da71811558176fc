"""Two ranks train in accelerate's FSDP2 by a file that was written for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from elixir.runtimes import Prediction, Setting, config_text
from tests.common.spawn import run_ranks
from tests.common.tiny_models import tiny


def _trains(rank: int, world_size: int, path: str) -> tuple[str, str, bool, float]:
    """In the environment that ``accelerate launch`` makes of the file; it knows FSDP on CUDA alone, so its kind of run is
    set by hand."""
    from accelerate import Accelerator
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, "train.py"]))
    made = prepare_multi_gpu_env(args)
    os.environ.update({key: value for key, value in made.items() if key.startswith(("FSDP", "ACCELERATE"))})
    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16")
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = tiny("llama")
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.arange(16).reshape(2, 8)
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    sharded = type(next(model.parameters())).__name__
    return type(model).__name__, sharded, bool(plugin.activation_checkpointing), float(loss)


def test_two_ranks_start_from_the_file(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", minversion="1.6")  # knows FSDP2
    made = Prediction(Setting(runtime="fsdp2", checkpoint=True), 2**30, {}, 0, {"compute": 1.0})
    path = tmp_path / "fsdp.yaml"
    path.write_text(config_text(made, path, layer="LlamaDecoderLayer", world_size=2, hosts=1))
    first, second = run_ranks(2, _trains, str(path))
    assert first[:3] == second[:3] == ("FSDPLlamaForCausalLM", "DTensor", True)
    assert first[3] == pytest.approx(second[3])
