"""Plans of earlier versions are read as what they meant, or say that they have to be made anew."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from elixir.artifact import Artifact
from elixir.errors import ArtifactError, InputError
from elixir.plan.plan import Plan
from elixir.plan.weight_file import WeightFile
from elixir.step_trace import StepTrace, Unit, UnitActivations
from tests.common.samples import make_plan, make_trace


def test_a_plan_that_stepped_in_place_during_backward_is_made_anew() -> None:
    """Plans had two fields for that until version 15."""
    plan = make_plan(3)
    data = plan.to_dict() | {"schema_version": 15, "may_step_in_backward": True}
    data["chunks"] = [chunk | {"steps_in_backward": False} for chunk in data["chunks"]]
    assert Plan.from_dict(data) == plan
    data["chunks"][1]["steps_in_backward"] = True
    with pytest.raises(ArtifactError, match="'steps_in_backward' is true, .* plan it anew"):
        Plan.from_dict(data)


def test_an_earlier_version_is_read_without_the_fields_that_it_lacks() -> None:
    for version, lacking in Plan.earlier.items():
        data = make_plan(3).to_dict() | {"schema_version": version}
        assert Plan.from_dict({key: data[key] for key in data if key not in lacking}) == make_plan(3)
        with pytest.raises(ArtifactError, match="'block_numel' is missing"):
            Plan.from_dict({key: data[key] for key in data if key != "block_numel"})


def test_early_updates_had_other_names_until_version_19() -> None:
    plan = make_plan(3)
    parts = {"new_states": plan.predicted.host_peak_bytes}
    predicted = dataclasses.replace(plan.predicted, host_parts=parts)
    plan = dataclasses.replace(plan, may_update_early=None, predicted=predicted)
    data = plan.to_dict() | {"schema_version": 19}
    data["may_speculate"] = data.pop("may_update_early")
    data["predicted"]["host_parts"] = {"undo": plan.predicted.host_peak_bytes}
    assert Plan.from_dict(data) == plan


def test_there_was_one_replica_until_version_24() -> None:
    plan = make_plan(3)
    data = plan.to_dict() | {"schema_version": 24}
    assert data.pop("replicas") == 1
    assert data["predicted"]["moved_bytes"].pop("replicas") == 0
    assert Plan.from_dict(data) == plan


@pytest.mark.parametrize("version", [15, 19])
@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": 3},
        {"chunks": [3]},
        {"predicted": 3},
        {"weight_files": 3},
        {"weight_files": [3]},
        {"step": 3},
        {"chunks": None},
    ],
    ids=str,
)
def test_what_is_no_plan_names_its_field(version: int, changes: dict[str, Any]) -> None:
    data = make_plan(3).to_dict() | {"schema_version": version} | changes
    with pytest.raises(ArtifactError, match=next(iter(changes))):
        Plan.from_dict(data)


def test_each_chunk_says_whether_it_was_updated_early() -> None:
    plan = make_plan(3)
    data = plan.to_dict() | {"schema_version": 19}
    for chunk in data["chunks"]:
        chunk["speculates"] = chunk.pop("update") == "early"
        del chunk["matrices"]
    assert Plan.from_dict(data) == plan
    early = (False, False, True)
    data["chunks"][2]["grad_entry"], data["may_speculate"] = 3, True
    del data["may_update_early"]
    data["chunks"] = [chunk | {"speculates": each} for chunk, each in zip(data["chunks"], early, strict=True)]
    assert tuple(chunk.update == "early" for chunk in Plan.from_dict(data).chunks) == early
    data["chunks"][0]["speculates"] = 1
    with pytest.raises(ArtifactError, match="update"):
        Plan.from_dict(data)


def test_a_weight_file_has_a_size() -> None:
    assert WeightFile("x", 0, "digest").nbytes == 0
    with pytest.raises(InputError, match="'nbytes' must be 0 or larger"):
        WeightFile("x", -1, "digest")


@pytest.mark.parametrize("kind", [Plan, StepTrace])
def test_memory_budgets_of_compiled_layers_are_refused_and_say_what_there_is_instead(kind: type[Artifact]) -> None:
    made = make_plan(3) if kind is Plan else make_trace(layers=1)
    step = dataclasses.replace(
        made.step,
        units=(Unit("layers.0", "compiled", "Layer", "one"),),
        activations=(UnitActivations("layers.0", None),),
    )
    made = dataclasses.replace(made, step=step)
    data = made.to_dict() | {"schema_version": kind.schema_version - 1}
    (unit,) = data["step"]["activations"]
    unit["budget"] = None
    assert kind.from_dict(data) == made
    unit["budget"] = 0.5
    with pytest.raises(
        ArtifactError, match=r"'budget' of 'layers.0' .* kept or recomputed whole; .*activations='auto'"
    ):
        kind.from_dict(data)
