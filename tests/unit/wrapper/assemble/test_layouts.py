"""Weights that lie in memory as their dimensions do not, channels last or transposed, keep that, and with it the bits."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.checkpoint_format.export import export_hf
from elixir.checkpoint_format.slice_reader import open_checkpoint
from elixir.wrapper import ElixirModule
from tests.common.file_faults import UnsyncedFiles
from tests.common.parity import Case, case, make_plan
from tests.common.resuming import Run, differing, two_groups

FILES = UnsyncedFiles()


def contiguous(it: Case) -> Case:
    """The same weights, lying as their dimensions do."""
    model = copy.deepcopy(it.model)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    return replace(it, model=model)


def test_states_of_another_run_come_by_their_dimensions() -> None:
    it = case("laid out")
    for other in (case("laid out"), contiguous(case("laid out"))):
        with (
            Run(it, make_plan(it, "mixed"), two_groups()) as run,
            Run(other, make_plan(it, "mixed"), two_groups()) as second,
        ):
            run.train(2)
            second.module.load_state_dict(run.module.state_dict())
            second.optimizer.load_state_dict(run.optimizer.state_dict())
            state = second.optimizer.state_dict()["state"]
            for number, kinds in run.optimizer.state_dict()["state"].items():
                assert all(torch.equal(value, state[number][kind]) for kind, value in kinds.items())
            mine, theirs = run.module.state_dict(), second.module.state_dict()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("mixed", {}),
        ("streamed", {"moments": "8bit"}),
        pytest.param("resident", {}, marks=pytest.mark.slow),
        pytest.param("mixed", {"unified_dtype": "bfloat16", "moments": "bfloat16"}, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_goes_on_with_the_same_bits_and_into_another_layout(
    mode: str, options: dict[str, Any], tmp_path: Path
) -> None:
    it = case("laid out")
    plan = make_plan(it, mode, **options)
    with Run(it, plan, two_groups()) as run:
        run.train(2)
        save_checkpoint(tmp_path / "run", run.state(), wait=True, files=FILES)
        wanted, states = run.bits(), run.optimizer.state_dict()["state"]
        weights = run.module.state_dict()
        losses = run.train(2)
    with Run(it, plan, two_groups()) as run:
        assert load_checkpoint(tmp_path / "run", run.state(), files=FILES).exact
        assert differing(wanted, run.bits()) == []
        assert run.train(2) == losses
    other = contiguous(it)
    with Run(other, plan, two_groups()) as run:
        notes = load_checkpoint(tmp_path / "run", run.state(), files=FILES).notes
        state = run.module.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in weights.items())
        for number, kinds in run.optimizer.state_dict()["state"].items():
            for kind, value in kinds.items():
                if options.get("moments") == "8bit" and kind != "step":
                    # Blocks have other elements: each is rounded anew, to 1/127 of the largest around it at most.
                    assert torch.allclose(
                        value, states[number][kind], atol=float(states[number][kind].abs().max()) / 64
                    )
                else:
                    assert torch.equal(value, states[number][kind]), (number, kind)
        assert bool(notes) is (options.get("moments") == "8bit")
        save_checkpoint(tmp_path / "back", run.state(), wait=True, files=FILES)
        again = run.bits()
    with Run(it, plan, two_groups()) as run:
        load_checkpoint(tmp_path / "back", run.state(), files=FILES)
        if options.get("moments") != "8bit":
            assert differing(wanted, run.bits()) == []
    assert again["groups"] == wanted["groups"]


def test_tools_read_a_checkpoint_by_dimensions(tmp_path: Path) -> None:
    it = case("laid out")
    with Run(it, make_plan(it, "streamed"), two_groups()) as run:
        run.train(1)
        save_checkpoint(tmp_path / "run", run.state(), wait=True, files=FILES)
        weights, states = run.module.state_dict(), run.optimizer.state_dict()["state"]
    with open_checkpoint(tmp_path / "run", files=FILES) as saved:
        assert any(each.order is not None for each in saved.index.tensors.values())
        read = saved.weights()
        assert all(torch.equal(read[name], value) for name, value in weights.items())
        for number, kinds in saved.optimizer_state_dict()["state"].items():
            assert all(torch.equal(value, states[number][kind]) for kind, value in kinds.items())
    safetensors = pytest.importorskip("safetensors.torch")
    exported = safetensors.load_file(export_hf(tmp_path / "run", tmp_path / "hf", files=FILES) / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in weights.items())


def test_weights_with_gaps_are_said_to_become_contiguous(caplog: pytest.LogCaptureFixture) -> None:
    it = case("laid out")
    dense = make_plan(it, "streamed")
    with caplog.at_level(logging.WARNING, logger="elixir"):
        ElixirModule(copy.deepcopy(it.model), dense, device="cpu").close()
        assert "contiguous" not in caplog.text
        model = copy.deepcopy(it.model)
        model[9].weight = nn.Parameter(torch.randn(10, 50)[:, :48])
        ElixirModule(model, dense, device="cpu").close()
    assert "9.weight: elements with gaps between them, or that overlap, become contiguous in a chunk" in caplog.text
