"""Importing `elixir`, and starting its command line, stays light."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.samples import make_plan, make_trace

HEAVY = ("transformers", "scipy", "pandas", "matplotlib", "rich", "safetensors", "xformers", "lightning")


def modules_after(code: str, beyond: str = "") -> set[str]:
    """Top-level names in sys.modules after `code` ran in a fresh interpreter, but for those that `beyond` loads."""
    script = f"{beyond}\nimport sys, json\nknown = {{m.split('.')[0] for m in sys.modules}} if {beyond!r} else set()\n"
    script += f"{code}\nsys.stdout.flush()\nprint()\n"
    script += "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules} - known)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_import_elixir_takes_neither_torch_nor_anything_heavy() -> None:
    loaded = modules_after("import elixir")
    assert loaded.isdisjoint({"torch", "numpy", *HEAVY})


@pytest.mark.parametrize("package", ["elixir", "elixir.models"])
def test_a_name_that_is_not_public_is_no_attribute(package: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = importlib.import_module(package).nothing


@pytest.mark.sampled
@pytest.mark.parametrize(
    "code",
    [
        "import elixir; [getattr(elixir, name) for name in elixir.__all__]",
        "import elixir.search, elixir.tracer, elixir.models.loading, elixir.hardware.profile, elixir.microbench, "
        "elixir.schedule\n"
        "import elixir.show.memory_curve, elixir.show.tables, elixir.cli.commands, torch\n"
        "assert not torch.cuda.is_initialized()",
        "from elixir import wrap\nimport gc, sys\n"
        "assert gc.isenabled() and {'elixir.microbench', 'elixir.tracer'}.isdisjoint(sys.modules)",
    ],
)
def test_libraries_for_pictures_tables_and_models_wait_for_their_use(code: str) -> None:
    # What torch itself takes, where it is installed, is not ours to judge.
    assert modules_after(code, beyond="import torch").isdisjoint(HEAVY)


def test_help_and_what_is_known_already_need_no_torch(tmp_path: Path) -> None:
    plan, trace = (str(made.save(tmp_path / f"{type(made).__name__}.json")) for made in (make_plan(), make_trace()))
    commands = (["models"], ["hardware"], ["hardware", "--show", "h200"], ["compare", plan, plan])
    code = f"""from elixir.cli import main
try: main(["profile", "--help"])
except SystemExit: pass
for words in {[*commands, ["show", plan], ["show", trace]]}: assert main(words) == 0"""
    assert modules_after(code).isdisjoint({"torch", "numpy", *HEAVY} - {"rich"})


def test_every_public_name_is_listed_and_found() -> None:
    import elixir

    assert set(elixir.__all__) <= set(dir(elixir))
    assert elixir.Plan.__name__ == "Plan"
    with pytest.raises(AttributeError, match="no_such_name"):
        elixir.no_such_name  # noqa: B018
