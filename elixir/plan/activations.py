"""The activations of a plan in words, and checks of what a plan may say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from elixir.errors import InputError
from elixir.step_trace import INPUT, SAVED, Result, UnitActivations


def activations_text(activations: Iterable[UnitActivations]) -> str:
    """The activations of units in words, those that do the same together.

    >>> units = [UnitActivations(f"layers.{n}", (Result("aten.mm.default", 0),)) for n in range(8)]
    >>> activations_text([*units, UnitActivations("layers.8", None)])
    '8 units keep mm and make the rest again, 1 unit keeps everything'
    """
    alike = Counter((each.keep, each.swap) for each in activations)
    texts = []
    for (keep, swap), count in alike.items():
        s, units = ("s", "unit") if count == 1 else ("", "units")
        text = f"{count} {units} keep{s} {kept_text(keep)}" + (f" and make{s} the rest again" if keep else "")
        texts.append(text + (f", with {result_names(swap)} on the host meanwhile" if swap else ""))
    return ", ".join(texts)


def kept_text(keep: tuple[Result, ...] | None) -> str:
    """The results that a unit keeps, in words."""
    return "everything" if keep is None else result_names(keep) or "nothing"


def result_names(results: Iterable[Result]) -> str:
    """The operators, with how many of their results: ``mm x 3, silu``."""
    results = list(results)
    if any(result.operator == SAVED for result in results):
        return "all that is saved"
    names = (result.operator.removeprefix("aten.").partition(".")[0].strip("_") for result in results)
    counts = Counter("attention" if "attention" in name else name for name in names)
    return ", ".join(name if count == 1 else f"{name} x {count}" for name, count in counts.items())


def check_activations(activations: Iterable[UnitActivations], able: Iterable[str]) -> None:
    """Refuses activations that no run can keep so.

    Args:
        activations: of units.
        able: names of the units that are not compiled.

    Raises:
        InputError: a unit or a result comes twice, a unit is none of `able`, or a result is none.
    """
    seen, known = set[str](), set(able)
    for each in activations:
        if each.unit in seen:
            raise InputError(f"field 'activations' must name each unit once, found {each.unit!r} twice")
        seen.add(each.unit)
        if each.unit not in known:
            raise InputError(f"field 'activations': {each.unit!r} is no unit of the step, or a compiled one; plan anew")
        for name, results in (("keep", each.keep or ()), ("swap", each.swap)):
            if len(set(results)) < len(results):
                raise InputError(f"field '{name}' of unit {each.unit!r} must name each result once, found {results}")
            # A checkpoint has inputs alone outside of itself; what a unit without one saves moves as a whole.
            movable = SAVED if each.keep is None else INPUT
            for result in results:
                fits = result.operator == movable if name == "swap" else result.operator not in (INPUT, SAVED)
                if result.occurrence < 0 or not fits:
                    expected = repr(movable) if name == "swap" else "results of operators"
                    raise InputError(
                        f"field '{name}' of unit {each.unit!r} must name {expected}, counted from 0, found {result}"
                    )
