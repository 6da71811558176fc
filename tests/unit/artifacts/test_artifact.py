"""Artifacts come back from JSON the same, or name the field that is wrong; files change whole or not at all."""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from pathlib import Path
from types import UnionType
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elixir.artifact import (
    Artifact,
    check_writable,
    write_atomically,
)
from elixir.errors import ArtifactError, InputError
from elixir.hardware.profile import HardwareProfile, Learned
from elixir.hardware.rate_fit import RateFit
from elixir.optimizer_states import StateSize
from elixir.plan.plan import Plan
from elixir.plan.prediction import LINKS, Prediction
from elixir.step_trace import StepTrace
from tests.common.samples import make_hardware, make_plan, make_trace

KINDS = (StepTrace, HardwareProfile, Plan)
LEARNED = Learned(date="2026-01-31", steps=8, factor=1.25, reports=("0123456789abcdef",))
SAMPLES = (make_trace(layers=2), dataclasses.replace(make_hardware(), learned=LEARNED), make_plan(3))
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation that the artifacts use; a new kind of field fails here, so it gets tested."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(hint)})
    if origin in (typing.Union, UnionType):
        return st.one_of(*(st.none() if arg is type(None) else values_of(arg) for arg in args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple and args[1:] == (Ellipsis,):
        return st.lists(values_of(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(arg) for arg in args))
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), values_of(args[1]), max_size=2)
    return {
        int: st.integers(1 - 2**60, 2**60 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=8),
        bool: st.booleans(),
    }[hint]


RATES = st.floats(1, 1e18)
SIZES = st.integers(1, 2**60 - 1)
SOME = st.floats(1e-9, 1e9)


SHARES = st.floats(0.01, 1.0)


def profiles() -> st.SearchStrategy[HardwareProfile]:
    """Hardware profiles that make sense; others refuse to be built."""
    hints = typing.get_type_hints(HardwareProfile)
    fields = {
        name: {int: SIZES, float: RATES}.get(hint, values_of(hint)) for name, hint in hints.items() if name in NAMES
    }
    fields |= {
        "name": st.text(min_size=1, max_size=8),
        "device_kind": st.just("cuda"),
        "compute_capability": st.tuples(st.integers(1, 20), st.integers(0, 9)),
        "flops_per_s": st.dictionaries(st.sampled_from(("bfloat16", "float32", "int8")), RATES, min_size=1),
        "matmul_efficiency": SHARES,
        "host_memory_bytes": st.none() | SIZES,
        "network_bytes_per_s": st.none() | RATES,
        "host_shared_bytes_per_s": st.none() | RATES,
        "host_pin_bytes_per_s": st.none() | RATES,
        "network_latency_s": st.none() | st.floats(0, 1e9),
        "contention": st.none() | st.floats(0, 1e9),
        "launch_s": st.none() | SOME,
        "sustained_flops_share": st.none() | SHARES,
        "sustained_memory_share": st.none() | SOME,
        "sustained_attention_share": st.none() | SHARES,
        "host_adam_least": st.none() | SHARES,
        "link_least": st.none() | SHARES,
        "early_kept": st.none() | SHARES,
        "early_steps": st.none() | SIZES,
        "step_range": st.none() | st.tuples(SOME, SOME).map(lambda pair: (min(pair), max(pair))),
        "disk_read_bytes_per_s": st.none() | RATES,
        "disk_write_bytes_per_s": st.none() | RATES,
        "disk_free_bytes": st.none() | SIZES,
        "measured_at": st.none() | st.dates().map(str),
        "fits": st.dictionaries(
            st.sampled_from(("host_to_device.both", "host_adam.2.bfloat16", "all_gather.8")),
            st.builds(
                RateFit,
                st.floats(0, 1e9),
                RATES,
                st.floats(0, 1),
                st.lists(st.tuples(RATES, RATES), max_size=2).map(tuple),
            ),
            max_size=2,
        ),
    }
    return st.builds(HardwareProfile, **fields)


NAMES = {field.name for field in dataclasses.fields(HardwareProfile)}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans that make sense: a sample with other words, budgets and predictions."""
    world_size = draw(st.sampled_from((1, 2, 8)))
    plan = make_plan(
        draw(st.integers(1, 4)), world_size=world_size, resident=draw(st.floats(0.3, 1.0)), frozen=draw(st.floats(0, 1))
    )
    counts, words = st.integers(0, 2**60 - 1), st.text(max_size=8)
    parts = draw(st.dictionaries(words, st.integers(0, 2**59 - 1), max_size=2))  # whose sum is a field, too
    seconds = st.floats(0, 1e9)
    predicted = Prediction(
        device_peak_bytes=sum(parts.values()),
        device_parts=parts,
        host_peak_bytes=sum(parts.values()),
        host_parts=parts,
        moved_bytes={link: draw(counts) for link in LINKS},
        loads=draw(counts),
        hits=draw(counts),
        seconds=draw(st.dictionaries(words, seconds, max_size=2)) | {"total": draw(seconds)},
    )
    return dataclasses.replace(
        plan,
        model_name=draw(words),
        model_fingerprint=draw(words),
        hardware_name=draw(words),
        hardware_fingerprint=draw(words),
        dtype=draw(st.sampled_from(("as built", "bfloat16", "float32"))),
        optimizer=draw(words),
        state_size=StateSize(draw(counts), draw(st.integers(1, 2**60 - 1))),
        overlap=draw(st.booleans()),
        placement=draw(st.sampled_from(("auto", "cuda", "cpu"))),
        may_update_early=draw(st.sampled_from((True, False, None))),
        clipping=draw(st.booleans()),
        block_numel=draw(counts),
        grad_block_count=draw(counts),
        device_budget_bytes=draw(counts),
        host_budget_bytes=draw(counts),
        predicted=predicted,
    )


@st.composite
def traces(draw: st.DrawFn) -> StepTrace:
    """Traces whose indices lead somewhere; others refuse to be built."""
    hints = typing.get_type_hints(StepTrace)
    fields = {field.name: draw(values_of(hints[field.name])) for field in dataclasses.fields(StepTrace)}
    inside = {
        name: st.lists(st.integers(0, len(fields[name]) - 1), max_size=2).map(tuple) if fields[name] else st.just(())
        for name in ("parameters", "operations")
    }
    fields["accesses"] = tuple(
        dataclasses.replace(
            access,
            parameters=draw(inside["parameters"]),
            operations=draw(inside["operations"]),
            pin_until=draw(st.integers(0, len(fields["accesses"]) - 1)),
        )
        for access in fields["accesses"]
    )
    last = len(fields["accesses"]) - 1
    fields["transfers"] = tuple(
        dataclasses.replace(each, nbytes=abs(each.nbytes), begins=draw(st.integers(0, last)), ends=last)
        for each in (fields["transfers"] if fields["accesses"] else ())
    )
    return StepTrace(**fields)


VALID = {HardwareProfile: profiles(), Plan: plans(), StepTrace: traces()}
"""Artifacts that refuse values which make no sense, so that not every value of the right type will do."""


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_json_round_trip_gives_the_same_artifact(kind: type[Artifact]) -> None:
    @FEW
    @given(VALID[kind] if kind in VALID else values_of(kind))
    def check(artifact: Artifact) -> None:
        text = artifact.to_json()
        back = kind.from_json(text)
        assert back == artifact
        assert back.to_json() == text

    check()


def leaves(data: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Every value of a JSON tree as (path, container, key)."""
    found: list[tuple[str, Any, Any]] = []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        here = f"{path}[{key}]" if isinstance(data, list) else f"{path}.{key}" if path else str(key)
        found.append((here, data, key))
        found += leaves(value, here)
    return found


# Objects whose keys are names, not fields: any key is allowed in them.
OPEN = ("flops_per_s", "sources", "predicted.device_parts", "predicted.host_parts", "predicted.moved_bytes")
OPEN_ALL = (*OPEN, "predicted.seconds")


@pytest.mark.parametrize("artifact", SAMPLES, ids=lambda sample: sample.artifact)
def test_every_missing_field_is_named(artifact: Artifact) -> None:
    paths = [path for path, container, _ in leaves(artifact.to_dict()) if isinstance(container, dict)]
    for wanted in paths:
        if wanted.rpartition(".")[0] in OPEN_ALL:
            continue
        data = artifact.to_dict()
        ((container, key),) = [(c, k) for path, c, k in leaves(data) if path == wanted]
        del container[key]
        with pytest.raises(ArtifactError) as caught:
            type(artifact).from_dict(data, source="a.json")
        assert f"'{wanted}' is missing" in str(caught.value)
        assert str(caught.value).startswith("a.json: ")


@pytest.mark.parametrize("artifact", SAMPLES, ids=lambda sample: sample.artifact)
def test_unknown_fields_are_named(artifact: Artifact) -> None:
    data = artifact.to_dict() | {"colour": 1}
    with pytest.raises(ArtifactError, match="'colour' is unknown"):
        type(artifact).from_dict(data)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    text = make_hardware().to_json().replace('"matmul_efficiency": 0.6', f'"matmul_efficiency": {number}')
    with pytest.raises(ArtifactError, match="'matmul_efficiency' must be a finite number"):
        HardwareProfile.from_json(text)


def test_a_number_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    trace = dataclasses.replace(make_trace(layers=1), trace_s=math.nan)
    with pytest.raises(InputError, match="cannot be saved"):
        trace.save(tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("field", "index"), [("operations", 10**18), ("operations", 5), ("parameters", -1)])
def test_an_index_that_leads_nowhere_is_refused(field: str, index: int) -> None:
    data = make_trace(layers=2).to_dict()
    data["accesses"][1][field] = [index]
    with pytest.raises(ArtifactError, match=rf"'accesses\[1\].{field}' must have indices below"):
        StepTrace.from_dict(data)


@pytest.mark.parametrize("artifact", SAMPLES, ids=lambda sample: sample.artifact)
def test_a_key_that_comes_twice_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    text = artifact.to_json().replace('"schema_version"', '"schema_version": 1, "schema_version"', 1)
    (tmp_path / "twice.json").write_text(text)
    for read in (lambda: type(artifact).from_json(text), lambda: type(artifact).load(tmp_path / "twice.json")):
        with pytest.raises(ArtifactError, match="has the key 'schema_version' twice"):
            read()


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "sparse.json").open("wb") as file:
        file.truncate(2**40)
    for path in (tmp_path / "sparse.json", "/dev/zero"):
        with pytest.raises(ArtifactError, match="has more than 128 MiB"):
            Plan.load(path)


VERSION = Plan.schema_version


@pytest.mark.parametrize("version", [0, 1, VERSION - 1, VERSION + 1, str(VERSION), True, float(VERSION), None])
def test_another_version_is_refused(version: Any) -> None:
    data = make_plan(3).to_dict() | {"schema_version": version}
    with pytest.raises(ArtifactError, match=r"'schema_version' is .* reads \d+; plan it anew with `elixir plan`"):
        Plan.from_dict(data, source="plan.json")


def test_causal_attention_measured_with_its_masked_half_gets_half_the_rate() -> None:
    fits = {key: RateFit(1e-6, 4e12, 0.1, ((8e9, 2e-3),)) for key in ("attention.bfloat16", "matmul.bfloat16.square")}
    profile = dataclasses.replace(make_hardware(), fits=fits)
    old = HardwareProfile.from_dict(profile.to_dict() | {"schema_version": 8})
    assert old.fits["matmul.bfloat16.square"] == fits["matmul.bfloat16.square"]
    assert old.fits["attention.bfloat16"] == RateFit(1e-6, 2e12, 0.1, ((4e9, 2e-3),))
    assert HardwareProfile.from_dict(profile.to_dict()) == profile


def test_any_truncation_is_an_artifact_error() -> None:
    text = make_hardware().to_json().rstrip()
    for length in range(len(text)):
        with pytest.raises(ArtifactError):
            HardwareProfile.from_json(text[:length])


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, "\ufeff{}"])
def test_text_that_is_no_artifact(text: str) -> None:
    with pytest.raises(ArtifactError):
        StepTrace.from_json(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.json", tmp_path, tmp_path / "binary", "a\0b"):
        with pytest.raises(ArtifactError):
            Plan.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_what_cannot_be_written_is_said_beforehand(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    for path in (
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "no" / "a",
        tmp_path / "file" / "a",
        tmp_path / ("x" * 300),
        "a\0b",
    ):
        with pytest.raises(InputError, match="cannot write"):
            check_writable(path)
        with pytest.raises(InputError, match="cannot write"):
            write_atomically(path, "")
    assert sorted(tmp_path.iterdir()) == before
