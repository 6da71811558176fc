"""An average of the weights (``ema=``) where the states live: the bits of `torch.optim.swa_utils.AveragedModel`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elixir
from elixir.checkpoint import load_checkpoint, save_checkpoint
from elixir.checkpoint_format.export import export_hf
from elixir.errors import InputError, readable_bytes
from elixir.plan.plan import Plan
from elixir.wrapper import ElixirModule, ElixirOptimizer
from elixir.wrapper.run_options import Debug
from tests.common import gpu, inside
from tests.common.audit import audit
from tests.common.early import all_early, chain
from tests.common.on_disk import on_disk
from tests.common.parity import Pair, case, make_plan, rehomed
from tests.common.resuming import Lion, Run, differing, two_groups
from tests.common.user_optimizers import Own

DECAY = 0.9


def planned(it: Any, homes: str, **options: Any) -> Plan:
    """A plan that counts an average, with states in some homes; `early`: the host steps all chunks early."""
    plan = make_plan(it, "streamed", **({"optimizer_type": "AdamW + EMA"} | options))
    if homes == "disk":
        return on_disk(plan, 2)
    return all_early(rehomed(plan, "states")) if homes == "early" else rehomed(plan, homes)


def averages(module: ElixirModule) -> dict[str, torch.Tensor]:
    """Copies of the averages that the model shows."""
    with module.gathered(ema=True):
        return {name: p.detach().clone() for name, p in module.module.named_parameters()}


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "Lion": lambda model: Lion(model.parameters(), lr=1e-2),
    "Own": lambda model: Own(model.parameters()),
}


@pytest.mark.parametrize("homes", ["resident", "mixed", "early", "disk"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_an_averaged_model(name: str, homes: str, tmp_path: Path) -> None:
    """A layer that is skipped at first, and later once more, is averaged in every step all the same."""
    it, options = chain(), {"disk_folder": tmp_path} if homes == "disk" else {}
    plan = planned(it, homes)
    with Pair(it, plan, optimizer=OPTIMIZERS[name], ema=DECAY, **options) as pair:
        reference = AveragedModel(pair.plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        reference.update_parameters(pair.plain)  # its first update copies: the weights before the first step
        for skip in (3, None, None, 1, None):
            pair.backward(it.inp | {"skip": skip})
            pair.step()
            reference.update_parameters(pair.plain)
            before = pair.module.state_dict()
            found = averages(pair.module)
            for key, expected in reference.module.named_parameters():
                assert torch.equal(found[key], expected), (key, skip)
            assert all(torch.equal(value, before[key]) for key, value in pair.module.state_dict().items())
        kept = inside.early_counts(pair.module)
        assert bool(kept[1]) == (homes == "early")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"unified_dtype": "bfloat16", "moments": "8bit"}, "AdamW"),
        ({"moments": "8bit"}, "AdamW"),
        ({"unified_dtype": "bfloat16", "moments": "bfloat16"}, "AdamW"),
        ({"unified_dtype": "float64"}, "AdamW"),
        ({"optimizer_type": "Muon + EMA"}, "Muon"),
    ],
    ids=lambda each: "-".join(each.values()) if isinstance(each, dict) else "",
)
def test_masters_are_averaged_whatever_else_is_kept(options: dict[str, Any], name: str) -> None:
    it = case("llama")
    plan = planned(it, "mixed", **options)
    module = ElixirModule(copy.deepcopy(it.model), plan, device="cpu", debug=Debug(poison=True))
    parameters = dict(module.module.named_parameters())
    whole = [parameters[each] for each in plan.matrices]
    rest = [each for each in parameters.values() if not any(each is one for one in whole)]
    given = [torch.optim.Muon(whole, lr=1e-2)] if whole else []
    given.append(torch.optim.AdamW(rest, lr=1e-2))
    steppers = [ElixirOptimizer(module, each, ema=DECAY) for each in given]
    expected = module.state_dict()
    for _ in range(3):
        steppers[0].backward(it.loss(module, it.inp))
        for each in steppers:
            each.step()
        module.zero_grad()
        now = module.state_dict()
        expected = {key: torch.lerp(value, now[key], 1 - DECAY) for key, value in expected.items()}
        module.rehome(rehomed(plan, "streamed"))  # averages move with their states
    with module.gathered(ema=True):
        found = module.state_dict()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    audit(module)
    module.close()


def run(homes: str = "mixed", *, ema: float | None = DECAY, **options: Any) -> Run:
    """Training with an average, or without."""
    it = case("opt")
    plan = planned(it, homes, **({} if ema else {"optimizer_type": "AdamW"}), **options)
    return Run(it, plan, two_groups(), ema=ema)


@pytest.mark.parametrize(
    ("homes", "options"),
    [("mixed", {}), ("early", {"unified_dtype": "bfloat16"}), ("streamed", {"moments": "8bit"})],
    ids=["float32", "bfloat16-early", "8bit"],
)
def test_a_checkpoint_has_the_average(
    homes: str, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with its bits, also elsewhere and by `state_dict`; a checkpoint or a run without one says so."""
    with run(homes, **options) as first:
        first.train(2)
        save_checkpoint(tmp_path / "run", first.state(), wait=True)
        model, states = first.module.state_dict(), first.optimizer.state_dict()
        with first.module.gathered(ema=True):
            expected = first.module.state_dict()
        first.train(2)
        whole = first.bits()
    assert any(key.startswith("ema_weights.") for key in whole)
    with run(homes, **options) as again:
        assert load_checkpoint(tmp_path / "run", again.state()).exact
        again.train(2)
        assert differing(whole, again.bits()) == []
    with run("resident", **options) as elsewhere:
        loaded = load_checkpoint(tmp_path / "run", elsewhere.state())
        assert loaded.exact, loaded.notes
        with elsewhere.module.gathered(ema=True):
            found = elsewhere.module.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    if "moments" not in options:  # a state dict has them rounded to what they stand for
        with run("resident", **options) as by_dict:
            by_dict.module.load_state_dict(model)
            by_dict.optimizer.load_state_dict(states)
            with by_dict.module.gathered(ema=True):
                found = by_dict.module.state_dict()
            assert all(torch.equal(found[name], value) for name, value in expected.items())
    out = export_hf(tmp_path / "run", tmp_path / "out", ema=True)
    exported = load_file(out / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in exported.items())
    with run(homes, ema=None, **options) as without:
        notes = load_checkpoint(tmp_path / "run", without.state()).notes
        assert [note for note in notes if "average" in note and "keeps none" in note]
        without.train(1)
        save_checkpoint(tmp_path / "plain", without.state(), wait=True)
        loaded_weights = without.module.state_dict()
        with caplog.at_level("INFO"):
            without.optimizer.load_state_dict(states)
        assert "load_state_dict() of an optimizer: the average of the weights that was saved is left out" in caplog.text
    with pytest.raises(InputError, match="holds no average"):
        export_hf(tmp_path / "plain", tmp_path / "none", ema=True)
    with run(homes, **options) as anew:
        anew.train(1)
        notes = load_checkpoint(tmp_path / "plain", anew.state()).notes
        assert [note for note in notes if "begins with the weights" in note]
        anew.train(1)
        now = anew.module.state_dict()
        with anew.module.gathered(ema=True):
            found = anew.module.state_dict()
        for name, value in loaded_weights.items():
            assert torch.equal(found[name], torch.lerp(value, now[name], 1 - DECAY)), name


def test_a_step_that_is_skipped_averages_nothing() -> None:
    with run(unified_dtype="float16") as it:
        it.train(2)
        before = averages(it.module)
        it.step(scale=1e38)
        assert it.optimizer.step_was_skipped
        assert all(torch.equal(value, before[name]) for name, value in averages(it.module).items())


def test_the_model_shows_averages_and_runs_with_them() -> None:
    """Evaluation, state dicts and a part of the weights; what would take averages for weights is refused."""
    with run("streamed", unified_dtype="bfloat16") as it:
        module, model = it.module, it.module.module
        with pytest.raises(InputError, match="no_grad"), module.gathered(ema=True):
            module(**it.case.inp)
        name, neighbour, *_ = next(
            [slot.name for slot in chunk.parameters] for chunk in module.plan.chunks if len(chunk.parameters) > 1
        )
        weight, other = (model.get_parameter(each) for each in (name, neighbour))
        it.train(3)
        now = model.state_dict()
        with torch.no_grad():
            trained = module(**it.case.inp).logits
            with module.gathered(ema=True):
                shown = module(**it.case.inp).logits
                state = {key: value.clone() for key, value in model.state_dict().items()}
            twin = gpu.there(copy.deepcopy(case("opt").model).to(torch.bfloat16))
            twin.load_state_dict(state)
            assert torch.equal(shown, twin(**it.case.inp).logits)
            assert not torch.equal(shown, trained)
            assert torch.equal(module(**it.case.inp).logits, trained)
            with module.gathered([weight], ema=True):
                assert torch.equal(weight.cpu(), state[name].cpu())
                assert torch.equal(other.cpu(), now[neighbour].cpu())  # of the same chunk
                assert not torch.equal(other.cpu(), state[neighbour].cpu())
                with pytest.raises(InputError, match="all its parameters"):
                    module(**it.case.inp)
                with pytest.raises(InputError, match="for reading"), module.gathered(write=True):
                    pass
        for outer, how in (({}, {"ema": True}), ({"ema": True}, {"ema": True})):
            with module.gathered(**outer), pytest.raises(InputError, match="outside"), module.gathered(**how):
                pass
        with pytest.raises(InputError, match="for reading"), module.gathered(write=True, ema=True):
            pass
        with module.gathered(ema=True), pytest.raises(InputError, match="inside gathered"):
            it.optimizer.step()
    with run(ema=None) as plain, pytest.raises(InputError, match="ema=0.999"), plain.module.gathered(ema=True):
        pass


@pytest.mark.parametrize("share", [1.0, 0.3], ids=["resident", "away"])
def test_wrap_plans_for_an_average(share: float) -> None:
    """A run takes the bytes that its plan counts; a plan and an optimizer that differ are refused."""
    it = case("opt")
    numel = sum(p.numel() for p in it.model.parameters())
    device = int(40 * numel * share) + 2**20
    asked = {"inp": it.inp, "hardware": "cpu", "device_memory": device, "host_budget": "1GiB", "replan": False}
    model = copy.deepcopy(it.model)
    module, optimizer = elixir.wrap(model, torch.optim.AdamW(model.parameters()), ema=DECAY, dtype="bfloat16", **asked)
    plan = module.plan
    assert (plan.optimizer, plan.state_size.block_bytes, optimizer.ema) == ("AdamW (for-loop) + EMA", 12, DECAY)
    for _ in range(2):
        optimizer.backward(it.loss(module, it.inp))
        optimizer.step()
        optimizer.zero_grad()
    parts = plan.predicted.device_parts, plan.predicted.host_parts
    for home, counted in zip(("device", "host"), parts, strict=True):
        assert inside.bytes_by_kind(module, home).get("optimizer_states", 0) == counted.get("optimizer_states", 0)
    assert sum(each.get("optimizer_states", 0) for each in parts) >= 16 * numel
    assert bool(parts[1].get("optimizer_states")) == (share < 1)
    module.close()
    model = copy.deepcopy(it.model)
    given = torch.optim.AdamW(model.parameters())
    with pytest.raises(InputError, match="give ema=0.999"):
        elixir.wrap(model, given, plan=plan)
    with pytest.raises(InputError, match="below 1"):
        elixir.wrap(model, given, ema=1.0, **asked)
    plain = make_plan(it, "streamed", optimizer_type="AdamW")
    wrapped = ElixirModule(model, plain, device="cpu")
    with pytest.raises(InputError, match=re.escape("optimizer_type='AdamW + EMA'")):
        ElixirOptimizer(wrapped, given, ema=DECAY)
    wrapped.close()


def test_a_large_gathered_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Weights that are shown together, but not one of them alone, beyond what the device's budget leaves."""
    it = chain(12)
    plan = replace(make_plan(it, "streamed", split_number=12), device_budget_bytes=2048)
    module = ElixirModule(it.model, plan, device="cpu")
    for name, parameter in module.module.named_parameters():
        with module.gathered([parameter]):
            assert parameter.numel(), name
    assert "gathered()" not in caplog.text
    for _ in range(2):
        with module.gathered():
            pass
    sizes = sum(chunk.weight_bytes for chunk in plan.chunks)
    said = [each.getMessage() for each in caplog.records if "gathered()" in each.getMessage()]
    assert len(said) == 1
    assert f"{readable_bytes(sizes, up=True)} of weights at once, and the device budget of 2.00 KiB leaves" in said[0]
    module.close()


@pytest.mark.parametrize("options", [{}, {"unified_dtype": "bfloat16"}], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("homes", ["streamed", "mixed", "disk"])
def test_averages_are_streamed_for_evaluation(homes: str, options: dict[str, Any], tmp_path: Path) -> None:
    """``gathered([], ema=True)``: the model and its state dicts have averages, with no more memory on the device, and
    whatever would take them for weights is refused; afterwards every bit is as before."""
    it = case("opt")
    wrap = {"disk_folder": tmp_path} if homes == "disk" else {}
    with Run(it, planned(it, homes, **options), two_groups(), ema=DECAY, wrap=wrap) as run:
        module = run.module
        run.train(2)
        before = run.bits()
        with module.gathered(ema=True), torch.no_grad():
            expected, precise = module(**run.case.inp).logits, module.state_dict()
            shown = {name: value.clone() for name, value in module.module.state_dict().items()}
        with torch.no_grad():
            trained = module(**run.case.inp).logits
        name = "model.decoder.layers.0.fc1.weight"
        weight = module.module.get_parameter(name)
        with module.gathered([], ema=True):
            assert [
                each.index for each in inside.chunks(module) if each.shown is not None and not each.plan.resident
            ] == []
            with torch.no_grad():
                assert torch.equal(module(**run.case.inp).logits, expected)
            for state, wanted in ((module.state_dict(), precise), (module.module.state_dict(), shown)):
                assert all(torch.equal(value.cpu(), wanted[key].cpu()) for key, value in state.items())
            with module.gathered([weight]):
                assert torch.equal(weight.cpu(), shown[name].cpu())
            with torch.no_grad():
                assert torch.equal(module(**run.case.inp).logits, expected)
            calls: list[Callable[[], object]] = [
                run.optimizer.step,
                module.close,
                lambda: module(**run.case.inp),
                lambda: module.rehome(module.plan),
                lambda: module.load_state_dict(precise),
                lambda: save_checkpoint(tmp_path / "run", run.state()),
            ]
            for call in calls:
                with pytest.raises(InputError):
                    call()
        assert differing(before, run.bits()) == []
        with torch.no_grad():
            assert torch.equal(module(**run.case.inp).logits, trained)
        run.train(1)
        audit(module)
