"""Plans of earlier versions, as files have them."""

from __future__ import annotations

from typing import Any

from elixir.errors import ArtifactError
from elixir.step_trace import renewed_step


def renewed(data: dict[str, Any], source: str, anew: str) -> dict[str, Any]:
    """Completes the fields of a plan of an earlier version.

    Until version 16 the host could step chunks in place during backward, and until 17 ``speculates`` said what is
    updated early. Until 18 no plan was judged in scenarios, until 19 early updates had other names, until 20 no plan
    knew compiled modules, until 21 none knew optimizers of matrices, until 22 frozen weights were in memory, until 23
    all were for training, until 24 there was one replica, until 25 all units were compiled, until 26 each micro-batch
    was a pass, until 27 no model by name had adapters, until 28 activations were the model's own business, until 29 no
    plan said how weights were asked to be fetched, or what the program takes. Those of 31 have memory budgets of units.

    Args:
        data: the fields.
        source: where they were read.
        anew: how to make a plan anew.

    Raises:
        ArtifactError: the plan asks for something that is gone.
    """
    later: dict[str, Any] = {"frozen_weights": "host", "weight_files": [], "replicas": 1}
    data = later | {"pass_size": 1, "fetch_wanted": None, "reserve_bytes": 0} | data
    if isinstance(data["weight_files"], list):
        files = [{"modified_us": None} | each if isinstance(each, dict) else each for each in data["weight_files"]]
        data["weight_files"] = files
    if "step" in data:
        data = data | {"step": renewed_step(data["step"], source)}
    if "may_speculate" in data:
        data["may_update_early"] = data.pop("may_speculate")
    if isinstance(data.get("predicted"), dict):
        later = {"judgements": [], "regret_if_known": {}, "activation_bytes": 0}
        predicted = data["predicted"] = later | data["predicted"]
        if isinstance(predicted.get("moved_bytes"), dict):
            predicted["moved_bytes"] = {"replicas": 0} | predicted["moved_bytes"]
        if isinstance(predicted.get("host_parts"), dict):
            names = {"undo": "new_states"}
            predicted["host_parts"] = {names.get(k, k): part for k, part in predicted["host_parts"].items()}
    chunks = data.get("chunks")
    if not isinstance(chunks, list):
        return data
    found = [{"matrices": []} | chunk if isinstance(chunk, dict) else chunk for chunk in chunks]
    for chunk in found:
        if isinstance(chunk, dict) and chunk.pop("steps_in_backward", False):
            raise ArtifactError(
                f"{source}: field 'steps_in_backward' is true, but chunks are stepped in place during backward no "
                f"more, since new states made there are as fast; {anew}",
                field="steps_in_backward",
            )
        if isinstance(chunk, dict) and type(chunk.get("speculates")) is bool:
            chunk["update"] = "early" if chunk.pop("speculates") else "after_norm"
    return data | {"chunks": found}
