"""Contenders of the proof: Elixir with the kernels that it planned with, and peers in settings that change no
number."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark.proof import contenders
from benchmark.proof.place import Place

TOY: dict[str, Any] = {
    "model": "opt-125m",
    "changes": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocabulary": 4096, "positions": 64},
    "batch": 4, "seq": 16, "checkpoint": "non-reentrant", "precision": "fp32", "host_bytes": 10**9, "budget_bytes": 10**9,
}  # fmt: skip


@pytest.fixture
def _no_group_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_no_group_left")
def test_settings_of_peers_change_no_number(tmp_path: Path) -> None:
    """The chunked loss, and gradients that wait on the device until the last part of a batch."""
    place = Place(tmp_path, rehearse=True)
    fsdp = {"offload": True, "keep": False}
    settings: dict[str, dict[str, Any]] = {
        "plain": {}, "plain chunked": {"loss": "chunked"}, "fsdp2": fsdp, "fsdp2 chunked": {**fsdp, "loss": "chunked"},
        "fsdp2 sync-last": {**fsdp, "sync_last": True},
    }  # fmt: skip
    losses = {}
    for name, more in settings.items():
        running = contenders.PEERS[name.split()[0]]({**TOY, "micro": 2, **more}, place)
        torch.manual_seed(0)  # of dropout
        losses[name] = [float(running.step()) for _ in range(3)]
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert losses["plain"][2] < losses["plain"][0]
    for found in losses.values():
        assert found == pytest.approx(losses["plain"], rel=1e-5)


def test_deepspeed_is_configured_as_its_row_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed itself is pretended: it wants a CUDA device."""
    configured: list[dict[str, Any]] = []

    def initialize(*, config: dict[str, Any], model_parameters: Any, **_: Any) -> tuple[Any]:
        assert all(isinstance(each, torch.nn.Parameter) for each in model_parameters), "one group"
        configured.append(config["zero_optimization"])
        return (None,)

    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(initialize=initialize, __version__="0"))
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(contenders, "_join_group", lambda place: None)
    monkeypatch.setattr(Place, "device", torch.device("cpu"))
    knobs = {"ratio": 0.65, "super_offload": True, "sub_group_size": 10**8}
    for stage, more in ((2, {}), (3, knobs)):
        options = {**TOY, "micro": 4, "precision": "bf16", "stage": stage, **more}
        contenders.PEERS["deepspeed"](options, Place(tmp_path, host_bytes=10**9))
    plain, tuned = configured
    assert plain["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert tuned["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 0.65, "super_offload": True}
    assert ("sub_group_size" in plain, tuned["sub_group_size"]) == (False, 10**8)
