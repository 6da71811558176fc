"""The command line: what it prints, what it checks before working, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elixir.artifact import Artifact
from elixir.cli import main
from elixir.errors import InputError, Lever, PlanError, StateError, unknown_name
from elixir.hardware.profile import preset
from elixir.hardware.rate_fit import RateFit
from elixir.plan.plan import Plan
from elixir.plan.process_need import ProcessNeed
from elixir.search.request import SearchRequest
from elixir.step_trace import StepTrace
from tests.common.command_line import fails, run
from tests.common.samples import make_hardware, make_plan, make_trace

PROFILE_KEYS = {
    "parameters", "param_bytes", "grad_bytes", "optimizer_bytes", "buffer_bytes", "activation_peak_bytes",
    "backward_peak_bytes", "step_peak_bytes", "peak_module", "peak_operator", "accesses", "operators", "trace_s",
}  # fmt: skip


class Stub:
    """Replaces what the commands call, and remembers how it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        self.results: dict[str, Any] = {
            "build": nn.Identity(),
            "input_to_trace": {"input_ids": None},
            "trace_step": make_trace(),
            "plan_from_trace": types.SimpleNamespace(
                plan=make_plan(5),
                levers=tuple,
                question=types.SimpleNamespace(hardware=make_hardware(), request=SearchRequest(world_size=2)),
                process_need=ProcessNeed({"program": 2**30}),
            ),
            "load_hardware": make_hardware(),
            "measure": make_hardware("here"),
            "config_of": None,
        }
        modules: dict[str, tuple[str, ...]] = {
            "elixir.models.loading": ("build",),
            "elixir.models.step": ("input_to_trace",),
            "elixir.tracer.trace": ("trace_step",),
            "elixir.search": ("plan_from_trace",),
            "elixir.microbench": ("measure",),
            "elixir.cli.commands": ("config_of", "load_hardware"),
            "elixir.cli.files": ("load_hardware",),
            "elixir.cli.show": ("load_hardware",),
        }
        for module, names in modules.items():
            for name in names:
                monkeypatch.setattr(f"{module}.{name}", self._function(name), raising=False)

    def _function(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = {"args": args, **kwargs}
            result = self.results[name]
            if isinstance(result, BaseException):
                raise result
            return result

        return call


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    return Stub(monkeypatch)


# ------------------------------------------------------------------------------------------------------------- profile


def test_profile_json_is_one_object_with_the_promised_keys(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "profile", "opt-125m", "--json")
    assert (status, err) == (0, "")
    record = json.loads(out)
    trace = stub.results["trace_step"]
    assert set(record) >= PROFILE_KEYS
    assert record["parameters"] == sum(param.numel for param in trace.parameters)
    assert record["accesses"] == len(trace.accesses)
    for key in PROFILE_KEYS - {"parameters", "accesses"}:
        assert record[key] == getattr(trace, key)


def test_a_plan_remembers_the_files_of_frozen_weights(
    stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    out = tmp_path / "plan.json"
    stub.results["load_hardware"] = dataclasses.replace(
        stub.results["load_hardware"], disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=1e9
    )
    asked = ("plan", "x", "--hardware", "a100", "--weights", str(tmp_path), "--out", str(out))
    assert run(capsys, *asked, "--host-budget", "8GiB", "--frozen-weights", "files")[0] == 0
    assert [(each.name, each.nbytes) for each in Plan.load(out).weight_files] == [
        ("model.safetensors", (tmp_path / "model.safetensors").stat().st_size)
    ]
    assert run(capsys, *asked)[0] != 0


def test_commands_pass_on_what_was_asked(stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    step = "--activation-checkpointing opt-13b --batch 8 --seq 2048 --dtype fp16 --positions 4096 --fused-kernels"
    out = tmp_path / "trace.json"
    argv = f"profile {step} --optimizer SGD --optimizer-kernel fused --device a100 --out {out}"
    status, text, _ = run(capsys, *argv.split())
    assert status == 0
    assert StepTrace.load(out) == stub.results["trace_step"]
    assert str(out) in text
    assert stub.calls["load_hardware"]["args"] == ("a100",)
    built, given, traced = (stub.calls[name] for name in ("build", "input_to_trace", "trace_step"))
    assert built["args"] == ("opt-13b",)
    assert (built["dtype"], built["checkpoint"], built["max_positions"]) == (torch.float16, "non-reentrant", 4096)
    assert (given["batch"], given["seq"]) == (8, 2048)
    assert (traced["optimizer"], traced["optimizer_kernel"], traced["model_name"]) == ("SGD", "fused", "opt-13b")
    assert traced["use_fused_kernels"]
    assert traced["hardware"] is stub.results["load_hardware"]

    argv = "plan opt-13b --hardware h100 --world-size 16 --host-budget 1TiB --device-memory 70GB --placement cpu"
    more = "--no-overlap --network 50GB --replicas 4 --devices-per-host 4 --moments 8bit --optimizer Adam"
    assert run(capsys, *argv.split(), *more.split())[0] == 0
    assert not stub.calls["trace_step"]["use_fused_kernels"]
    trace, hardware, request = stub.calls["plan_from_trace"]["args"]
    assert (hardware.network_bytes_per_s, hardware.devices_per_host) == (50e9, 4)
    assert (trace, hardware.name) == (stub.results["trace_step"], stub.results["load_hardware"].name)
    assert request == SearchRequest(
        world_size=16, host_budget=2**40, device_memory=70 * 10**9, placement="cpu", overlap=False, replicas=4,
        moments="8bit", optimizer_type="Adam",
    )  # fmt: skip
    loop = ("--optimizer-kernel", "for-loop")
    for words, optimizer in ((), "AdamW"), (loop, "AdamW (for-loop)"), ((*loop, "--fused-kernels"), "AdamW"):
        assert run(capsys, "plan", "opt-13b", *words)[0] == 0
        assert stub.calls["plan_from_trace"]["args"][2].optimizer_type == optimizer
    for command in ("profile", "plan"):
        long, short = (run(capsys, command, "x", *flags)[1].splitlines() for flags in ((), ("--brief",)))
        assert [line for line in long if line in short] == short
        assert len(short) < 15 < len(long)


PLAIN_MODEL = """
import torch
def model(): return torch.nn.Linear(64, 32)
def inp(): return {"x": torch.ones(16, 64)}
def step(model, inp): model(inp["x"]).sum().backward()
def fails(): return 1 / 0
"""


def test_profile_of_a_plain_module(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing, without stubs: a module with an input and a step, found in the working folder."""
    (tmp_path / "plain_model.py").write_text(PLAIN_MODEL)
    monkeypatch.chdir(tmp_path)
    argv = ("profile", "plain_model:model", "--dtype", "fp32", "--inp", "plain_model:inp", "--json")
    status, out, err = run(capsys, *argv, "--step", "plain_model:step")
    assert (status, err) == (0, "")
    record = json.loads(out)
    assert record["parameters"] == 64 * 32 + 32
    assert record["param_bytes"] == record["grad_bytes"] == 4 * (64 * 32 + 32)
    assert "--inp module:function" in fails(capsys, "profile", "plain_model:model")
    assert "division by zero" in fails(capsys, "profile", "plain_model:model", "--inp", "plain_model:fails")
    assert "no function lost" in fails(capsys, *argv, "--step", "plain_model:lost")
    assert "cannot import lost" in fails(capsys, *argv, "--step", "lost:step")
    assert "expected module:function" in fails(capsys, *argv, "--step", "plain_model")
    assert "leave out --batch" in fails(capsys, *argv, "--batch", "2")


# ---------------------------------------------------------------------------------------------------------------- plan


def test_a_size_without_a_unit_is_refused(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, "plan", "opt-13b", "--hardware", "h100", "--host-memory", "56")
    assert "--host-memory: a size of 56 without a unit would be 56 bytes; write 56GiB" in said


def test_plan_json_is_a_plan_that_can_be_loaded(stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    _, text, _ = run(capsys, "plan", "opt-13b", "--json", "--out", str(out), "--plot", str(tmp_path / "plan.pdf"))
    assert Plan.from_json(text) == Plan.load(out) == stub.results["plan_from_trace"].plan
    assert (tmp_path / "plan.pdf").read_bytes().startswith(b"%PDF")


def test_plan_takes_a_saved_trace(stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = make_trace("saved", 3)
    path = str(saved.save(tmp_path / "trace.json"))
    assert run(capsys, "plan", path)[0] == 0
    assert stub.calls["plan_from_trace"]["args"][0] == saved
    assert "trace_step" not in stub.calls
    assert "--batch, --dtype" in fails(capsys, "plan", path, "--batch", "8", "--dtype", "bf16")


def test_plan_of_a_plan_is_refused(stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(make_plan(2).save(tmp_path / "plan.json"))
    assert "expected a trace, found a plan" in fails(capsys, "plan", path)


def test_what_cannot_fit_says_what_to_change(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    levers = [Lever("turn on checkpointing", 2**30)]
    stub.results["plan_from_trace"] = PlanError("too small", needed_bytes=2**31, available_bytes=2**30, levers=levers)
    status, out, err = run(capsys, "plan", "opt-13b")
    assert (status, out) == (2, "")
    assert "needed 2.00 GiB, available 1.00 GiB" in err
    assert "turn on checkpointing" in err


# ------------------------------------------------------------------------------------------- show, compare, hardware


@pytest.mark.parametrize("artifact", [make_plan(3), make_trace(layers=2), make_hardware()], ids=lambda a: a.artifact)
def test_show_takes_every_artifact(artifact: Artifact, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(artifact.save(tmp_path / "a.json"))
    status, out, _ = run(capsys, "show", path)
    assert status == 0
    assert "h200" in out
    status, out, _ = run(capsys, "show", path, "--json")
    assert isinstance(json.loads(out), dict)


def test_hardware_measure_saves(stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "hw.json"
    assert run(capsys, "hardware", "--measure", "--quick", "--out", str(out))[0] == 0
    assert json.loads(out.read_text())["name"] == "here"
    assert stub.calls["measure"]["quick"] is True
    assert "start `elixir hardware --measure` with torchrun" in fails(capsys, "hardware", "--measure", "--no-spawn")


def test_doubtful_rates_are_shown_and_said_where_a_plan_is_made(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = str(
        dataclasses.replace(preset("l4"), fits={"host_to_device.both": RateFit(1e-5, 1e10, 0.42)}).save(
            tmp_path / "hw.json"
        )
    )
    out = run(capsys, "hardware", "--show", path)[1]
    assert "doubtful: 1 of the rates: fits.host_to_device.both (its fit is off by up to 42%)" in out
    assert "measure again" in out
    assert "doubtful" not in run(capsys, "hardware", "--show", "cpu")[1]
    plan = ("plan", "opt-125m", "--hardware", path, "--host-budget", "64GiB", "--out", str(tmp_path / "plan.json"))
    for words in (
        (*plan, "--brief"),
        ("explain", str(tmp_path / "plan.json"), "--hardware", path, "--no-levers"),
        ("sweep", "opt-125m", "--hardware", path),
    ):
        caplog.clear()
        assert run(capsys, *words)[0] == 0
        assert "fits.host_to_device.both: its fit is off by up to 42%" in caplog.text


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("plan opt-13b --world-size 0", "at least 1, found 0"),
        ("plan opt-13b --world-size two", "whole number"),
        ("plan opt-13b --host-budget 12XB", "12XB"),
        ("plan opt-13b --device-memory -1", "--device-memory"),
        ("plan opt-13b --placement gpu", "'gpu'"),
        ("profile opt-13b --batch 0", "at least 1"),
        ("profile opt-13b --batch 1000000001", "at most 1,000,000,000"),
        ("profile opt-13b --batch 9999999999999999999999999999", "at most 1,000,000,000"),
        ("profile opt-13b --seq 1.5", "whole number"),
        ("profile opt-13b --checkpoint=maybe", "'maybe'"),
        ("profile opt-13b --dtype bf17", "did you mean bf16"),
        ("profile opt-13b --optimizer adamx", "did you mean"),
        ("profile opt-13b --optimizer PagedAdamW8bit", "adamw with moments in 8 bits is --moments 8bit"),
        ("profile opt-13b --optimizer-kernel slow", "'slow'"),
        ("profile opt-13b --plot mem.gif", ".png, .pdf or .svg"),
        ("profile opt-13b --out no/such/folder/a.json", "cannot write"),
        ("profile opt-13b --plot no/such/folder/a.png", "cannot write"),
        ("plan opt-13b --out a.png --plot a.png", "two outputs"),
        ("profile", "MODEL"),
        ("profile opt-13b --unknown", "--unknown"),
        ("profle opt-13b", "profle"),
        ("show no-such-file.json", "No such file"),
        ("compare no-such-file.json b.json", "No such file"),
    ],
)
def test_bad_input_is_one_clear_line(
    argv: str,
    said: str,
    stub: Stub,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in fails(capsys, *argv.split())
    assert "trace_step" not in stub.calls, "the work started before the input was checked"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"artifact": "cake"}', '{"artifact": ["plan"]}', "\0"])
def test_files_that_are_nothing_of_ours(content: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert "a.json" in fails(capsys, "show", str(path))


def test_the_nearest_name_is_suggested(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.results["build"] = unknown_name("model", "opt-31b", ["opt-13b", "opt-30b"])
    assert "did you mean" in fails(capsys, "profile", "opt-31b")


@pytest.mark.parametrize("error", [InputError("no"), ValueError("no"), OSError(13, "no", "a.json")])
def test_a_callers_mistake_is_status_2(error: Exception, stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.results["trace_step"] = error
    assert "no" in fails(capsys, "profile", "x")


@pytest.mark.parametrize("error", [RuntimeError("a\nb"), KeyError(), StateError("broken"), AssertionError()])
def test_a_defect_of_ours_is_status_1(error: Exception, stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.results["trace_step"] = error
    assert "internal error" in fails(capsys, "profile", "x", status=1)


@pytest.mark.parametrize("error", [InputError("why"), KeyboardInterrupt("why")])
@pytest.mark.parametrize("argv", [("--debug", "profile", "x"), ("profile", "x", "--debug")])
def test_debug_raises(argv: tuple[str, ...], error: BaseException, stub: Stub) -> None:
    stub.results["trace_step"] = error
    with pytest.raises(type(error), match="why"):
        main(argv)


def test_interrupted_is_130(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.results["load_hardware"] = KeyboardInterrupt()
    assert "interrupted" in fails(capsys, "profile", "x", status=130)


def test_models_lists_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    from elixir.models.model_shape import model_names

    out = run(capsys, "models")[1]
    record = json.loads(run(capsys, "models", "--json")[1])
    assert list(record) == list(model_names())
    assert all(name in out for name in record)
    assert list(json.loads(run(capsys, "models", "QWEN", "instruct", "7b", "--json")[1])) == ["qwen2.5-7b"]
    out = run(capsys, "models", "Llama-4", "16e")[1]
    assert "llama-4-scout: meta-llama/Llama-4-Scout-17B-16E," in out
    assert "opt-125m" not in out
    assert "did you mean qwen" in fails(capsys, "models", "quen")


@pytest.mark.parametrize("model", ["no-such-model", "missing.json"])
def test_a_model_that_is_missing_is_named_before_memory(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for machine in ("", " --hardware h200"):  # whose host memory nobody gave
        said = fails(capsys, *f"plan {model}{machine}".split())
        assert model in said
        assert "memory" not in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("opt-125m --search-batch --activations auto", "leave out --activations"),
        ("opt-125m --search-batch --allow kernels", "leave out --allow"),
        ("opt-125m --search-batch --accumulation 2", "leave out --accumulation"),
        ("opt-125m --search-batch --inp module:function", "leave out --search-batch"),
        ("TRACE --search-batch", "has settled the batch; name the model"),
        ("TRACE", "which is no preset; give --hardware"),
        ("opt-125m --forward --optimizer SGD", "--forward trains nothing; leave out --optimizer"),
        ("opt-125m --generate 512", "expected PROMPT+NEW tokens"),
        ("opt-125m --generate 4+4 --packed 2", "settles the step; leave out packed="),
        ("opt-125m --packed none", "documents in each sample, 1 or more, such as 8 or 8:flash, found 'none'"),
        ("opt-125m --packed 2 --inp module:function", "leave out --batch, --seq and --packed"),
        ("TRACE --hardware h200 --packed 2", "has settled --packed"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = dataclasses.replace(make_trace(layers=2), device="mine").save(tmp_path / "trace.json")
    assert says in fails(capsys, "plan", *flags.replace("TRACE", str(trace)).split())
