"""The activations of a plan in words, and checks of what a plan may say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from elixir.errors import InputError
from elixir.plan.chunk_plan import must
from elixir.step_trace import INPUT, SAVED, Result, StepShape, Unit, UnitActivations


def activations_text(activations: Iterable[UnitActivations]) -> str:
    """The activations of units in words, those that do the same together.

    >>> units = [UnitActivations(f"layers.{n}", (Result("aten.mm.default", 0),)) for n in range(8)]
    >>> activations_text([*units, UnitActivations("layers.8", None)])
    '8 units keep mm and make the rest again, 1 unit keeps everything'
    """
    texts = []
    for way, count in Counter(map(way_of, activations)).items():
        s, units = ("s", "unit") if count == 1 else ("", "units")
        text = f"{count} {units} keep{s} {kept_text(way)}" + (f" and make{s} the rest again" if way.keep else "")
        texts.append(text + (f", with {result_names(way.swap)} on the host meanwhile" if way.swap else ""))
    return ", ".join(texts)


def way_of(activations: UnitActivations) -> UnitActivations:
    """The way of a unit's activations without the unit: units that do the same have the same one."""
    return replace(activations, unit="", swap_bytes=0)


def kept_text(activations: UnitActivations) -> str:
    """The results that a unit keeps, in words."""
    return "everything" if activations.keep is None else result_names(activations.keep) or "nothing"


def result_names(results: Iterable[Result]) -> str:
    """The operators, with how many of their results: ``mm x 3, silu``."""
    results = list(results)
    if any(result.operator == SAVED for result in results):
        return "all that is saved"
    names = (result.operator.removeprefix("aten.").partition(".")[0].strip("_") for result in results)
    counts = Counter("attention" if "attention" in name else name for name in names)
    return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in counts.items())


def passes_together(step: StepShape) -> bool:
    """Whether several micro-batches can pass the layers of a step together: some layers run again, all whose
    activations are chosen do so as a whole and are not compiled, and no module keeps anything for the next forward."""
    compiled = step.compiled
    again = bool(step.checkpointed) and step.changed_state is None
    return again and all(each.keep == () and each.unit not in compiled for each in step.activations)


def keeps_state(tensor: str) -> InputError:
    """The error for several micro-batches in a pass of a model whose forward changes a tensor of a module.

    Args:
        tensor: its name, as `StepShape.changed_state` has it.
    """
    module, _, name = tensor.rpartition(".")
    return InputError(
        f"{module or 'the model'} keeps {name!r} from one forward to what follows, and micro-batches that pass the "
        "layers together would read each other's; plan with pass_size=1"
    )


def check_activations(activations: Iterable[UnitActivations], units: Iterable[Unit]) -> None:
    """Refuses activations that no run can keep so.

    Args:
        activations: of units.
        units: all units of the step.

    Raises:
        InputError: a unit or a result comes twice, a unit is none of `units`, a compiled unit keeps some results or
            moves any, or a result is none.
    """
    seen, forms = set[str](), {unit.name: unit.form for unit in units}
    for each in activations:
        must(each.unit not in seen, "activations", "must name each unit once", f"{each.unit!r} twice")
        seen.add(each.unit)
        if each.unit not in forms:
            raise InputError(f"field 'activations': {each.unit!r} is no unit of the step; plan anew")
        if forms[each.unit] == "compiled" and (each.keep or each.swap):
            raise InputError(
                f"field 'activations': {each.unit!r} is compiled, so it is kept or recomputed whole, found results "
                "that are kept or moved; plan anew"
            )
        for name, results in (("keep", each.keep or ()), ("swap", each.swap)):
            _check_results(each, name, results)


def _check_results(each: UnitActivations, name: str, results: tuple[Result, ...]) -> None:
    names = f"of unit {each.unit!r} must name"
    must(len(set(results)) == len(results), name, f"{names} each result once", results)
    # A checkpoint has inputs alone outside of itself; what a unit without one saves moves as a whole.
    movable = SAVED if each.keep is None else INPUT
    for result in results:
        fits = result.operator == movable if name == "swap" else result.operator not in (INPUT, SAVED)
        expected = repr(movable) if name == "swap" else "results of operators"
        must(fits and result.occurrence >= 0, name, f"{names} {expected}, counted from 0", result)
