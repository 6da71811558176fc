"""Probes: what they write can be read again, and says what was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.proof import probes
from benchmark.proof.place import Place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_torchs_adam_come_back_from_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """On any device: here on the CPU, whose fused step contracts other operations than a GPU's."""
    row = probes.adam_bits({"numel": 1000, "steps": 3}, Place(tmp_path, rehearse=True))
    assert "bfloat16: p1 " in row["outcome"]
    name = str(dtype).removeprefix("torch.")
    states = probes.read_adam_bits(tmp_path / probes.BITS_FILE.format(name), dtype)
    weights, *gradients = probes.adam_inputs(1000, 3, dtype)
    parameter = torch.nn.Parameter(weights.clone())
    o = probes.OPTIONS
    optimizer = torch.optim.AdamW(
        [parameter], lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True
    )
    for gradient, found in zip(gradients, states[1:], strict=True):
        parameter.grad = gradient
        optimizer.step()
        kept = optimizer.state[parameter]
        for mine, theirs in zip(found, (parameter.data, kept["exp_avg"], kept["exp_avg_sq"]), strict=True):
            assert torch.equal(mine, theirs)


def test_tests_that_failed_last_run_first_and_are_named(tmp_path: Path) -> None:
    """Then the others, in the time that is left."""
    here = tmp_path / "test_it.py"
    here.write_text("def test_good(): pass\ndef test_bad(): assert False\n", encoding="utf-8")
    others = tmp_path / "test_others.py"
    others.write_text("def test_other(): pass\n", encoding="utf-8")
    flags = ["--noconftest", "-p", "no:hypothesispytest"]
    options: dict[str, Any] = {"seconds": 60, "flags": flags, "all": [str(tmp_path)], "tests": [str(here)]}
    place = Place(tmp_path, rehearse=True)
    first = probes.tests(options, place)
    assert first["outcome"] == f"{here}: 1 failed, 1 passed"
    second = probes.tests({**options, "tests": [str(others)]}, place)
    assert second["outcome"] == f"--lf {tmp_path}: 1 failed; {others}: 1 passed"
    assert [name.rpartition("::")[2] for name in second["failed"]] == ["test_bad"]
    assert json.loads((tmp_path / "pytest_cache" / "v" / "cache" / "lastfailed").read_text(encoding="utf-8"))
