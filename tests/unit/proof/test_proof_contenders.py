"""Contenders of the proof: Elixir with the kernels that it planned with, and peers in settings that change no
number."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmark.proof import contenders, ours
from benchmark.proof.place import Place
from elixir.hardware.profile import preset
from tests.common import inside

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


def test_a_peer_without_clipping_steps_without_a_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, limit: limits.append(limit))
    for options in ({}, {"max_norm": None}, {"max_norm": contenders.CLIPPED_NORM}):
        contenders.PEERS["plain"]({**TOY, "micro": 4, **options}, Place(tmp_path, rehearse=True)).step()
    assert limits == [contenders.MAX_NORM, contenders.CLIPPED_NORM]


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


def test_plain_is_compiled_where_its_pair_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda model: compiled.append(model))
    for asked in (False, True):
        contenders.PEERS["plain"]({**TOY, "micro": 4, "compile": asked}, Place(tmp_path, rehearse=True))
        assert len(compiled) == asked


@pytest.mark.parametrize("asked", [True, False, ours.PLAIN_LOSS, None])
def test_what_is_planned_with_a_kernel_runs_with_it(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, wrapped = [], []
    answer_to, module = ours.answer_to, ours.ElixirModule

    def answering(step: Any, *args: Any, **options: Any) -> Any:
        traced.append(step.use_fused_kernels)
        return answer_to(step, *args, **options)

    def wrapping(*args: Any, **options: Any) -> Any:
        wrapped.append(options["use_fused_kernels"])
        return module(*args, **options)

    monkeypatch.setattr(ours, "answer_to", answering)
    monkeypatch.setattr(ours, "ElixirModule", wrapping)
    options = {**TOY, "micros": [4], "fused_kernels": asked}
    running = ours.run(options, Place(tmp_path, rehearse=True), tmp_path / "saved")
    assert math.isfinite(running.step())
    assert traced == ([True, ours.PLAIN_LOSS] if asked is None else [asked])
    assert wrapped == [running.facts["fused_kernels"]]
    assert wrapped[0] in traced


def test_the_loss_and_the_micro_batch_are_chosen_by_predicted_time() -> None:
    """Computing logits twice costs time if all of them fit; otherwise only the chunked loss fits."""
    hardware = preset("h200")
    options = {**TOY, "micros": [4, 2], "batch": 4, "precision": "bf16"}
    roomy = ours.choose(options, hardware, 10**9, 10**9)
    times = {name: float(text.split()[0]) for name, text in roomy.tried.items()}
    assert len(times) >= 3
    best = min(times, key=lambda name: times[name])
    assert best == f"{roomy.micro}, {'plain' if roomy.kernels == ours.PLAIN_LOSS else 'chunked'} loss"
    changes = {**TOY["changes"], "vocabulary": 50000, "positions": 512}
    large = {**options, "changes": changes, "seq": 512}
    least = {
        str(kernels): ours.step_of(large, 4, kernels).trace(hardware).backward_peak_bytes
        for kernels in (True, ours.PLAIN_LOSS)
    }
    assert least["True"] < least[str(ours.PLAIN_LOSS)], "the plan knows what the chunked loss saves"


def _early(limit: float) -> dict[str, Any]:
    """Options of a toy whose states are on the host, with new ones made in backward."""
    return {**TOY, "micros": [4], "planned_device_bytes": 2_800_000, "early_states": True, "max_norm": limit, "seq": 8}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_row_says_what_became_of_states_made_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_COMPILE", "0")
    found = {}
    for limit in (contenders.MAX_NORM, contenders.CLIPPED_NORM):
        running = ours.run(_early(limit), Place(tmp_path, rehearse=True), tmp_path / "saved")
        for _ in range(6):
            running.step()
        found[limit] = running.account(3)
    free, clipped = found.values()
    assert free["early_states_kept"] == free["early_states_made"] > 0
    assert list(free["host_adam_forms"]) == ["one pass"]
    assert (clipped["early_states_kept"], clipped["clipped_steps"], free["clipped_steps"]) == (0, 3, 0)
    assert free["busy_s_per_step"]["host_adam"] > 0


def test_a_timed_run_without_the_kernel_fails_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.forget(monkeypatch, "Adam kernels")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no one-pass kernel .* CPU Adam would copy"):
        ours.run(_early(contenders.MAX_NORM), Place(tmp_path, rehearse=True), tmp_path / "saved")
