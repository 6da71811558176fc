"""The imports that layers allow (docs/design/architecture.md). The checks read the sources, lazy and type-only imports
included."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "elixir"

LEAVES = frozenset(
    {
        "access", "artifact", "checkpoint_format", "errors", "extents", "files", "garbage", "hardware", "memory_order", "models",
        "optimizer_states", "plan", "schedule", "step_trace", "torch_private", "units",
    }
)  # fmt: skip
"""Modules on which everything may build: no CUDA, no process group, nothing of ours but each other."""

LAYERS: dict[str, frozenset[str]] = {
    **dict.fromkeys(LEAVES, LEAVES),
    "tracer": LEAVES | {"kernels"},
    "microbench": LEAVES,
    "search": LEAVES | {"tracer"},
    "chunk": LEAVES,
    "kernels": LEAVES,
    "wrapper": LEAVES | {"chunk", "kernels"},
    "checkpoint": LEAVES | {"chunk", "wrapper"},
    "show": LEAVES | {"search"},
    "runtimes": LEAVES,
}
"""Layer -> the other layers that it may import."""

INSIDE: dict[str, tuple[frozenset[str], ...]] = {
    "search": (
        frozenset({"question", "request"}),
        frozenset({"problem"}),
        frozenset({"simulator"}),
        frozenset({"propose"}),
        frozenset({"budgets"}),
        frozenset({"planner"}),
        frozenset({"advise"}),
        frozenset({"batches", "replan", "searches", "whatif"}),
    ),
    "wrapper": (
        frozenset(
            {
                "arrivals",
                "loss_scale",
                "phase",
                "run_options",
                "scope_uses",
                "views_of_engine",
                "weight_uses",
            }
        ),
        frozenset({"engine"}),
        frozenset({"account", "assemble", "calls", "one_pass", "step", "weights_io"}),
        frozenset({"module", "optimizer"}),
        frozenset({"training_states"}),
    ),
}
"""Package -> its rooms from the ground up: each may import those before it and its equals, none after it."""

TOP = frozenset({"", "__main__", "api", "check", "cli", "estimates", "integrations"})
"""May import everything. "" is elixir/__init__.py, whose names any layer below must take from their own modules."""

FORBIDDEN_IN_LEAVES = ("torch.cuda", "torch.distributed")

EXEMPT = {"elixir.hardware.memory": "torch.cuda"}
"""`free_device_bytes` asks the driver how much is free. It allocates nothing, and runs only when called."""


def layer_of(module: str) -> str:
    """``elixir.show.memory_curve`` -> ``search``; ``elixir`` -> ````."""
    return module.split(".")[1] if "." in module else ""


def dotted(node: ast.expr) -> str:
    """``torch.cuda`` for the expression that says so, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything `source` imports, relative and by `import_module` as well."""
    parts = module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                keep = len(parts) - node.level + is_package
                base = ".".join([*parts[:keep], *([node.module] if node.module else [])])
            # `from elixir import search` names a module, `from elixir.plan import Plan` does not; the walk over
            # layers needs no more than two parts, so the longer name serves for both.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
            for arg in node.args[:1]:
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
                    yield node.lineno, arg.value


def violations(sources: Mapping[str, str], packages: frozenset[str] = frozenset()) -> list[str]:
    """Imports that break the layers in `sources` (module name -> text); `packages` are those that are an
    ``__init__``."""
    known = {layer_of(module) for module in sources}
    found: list[str] = []
    for module, source in sorted(sources.items()):
        layer = layer_of(module)
        if layer in TOP:
            continue
        if layer not in LAYERS:
            found.append(f"{module}: no layer is declared for '{layer}'; add it to LAYERS")
            continue
        for line, name in imports(source, module, is_package=module in packages):
            if layer in LEAVES and name.startswith(FORBIDDEN_IN_LEAVES) and EXEMPT.get(module) != name:
                found.append(f"{module}:{line}: a leaf imports {name}")
            if name.split(".")[0] != "elixir":
                continue
            target = layer_of(name)
            if target not in known and target not in LAYERS:
                target = ""  # a name taken from elixir/__init__.py, which imports everything
            if target != layer and target not in LAYERS[layer]:
                found.append(f"{module}:{line}: {layer} may not import {name}")
        if layer in LEAVES:
            found += [
                f"{module}:{node.lineno}: a leaf uses {dotted(node)}"
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Attribute)
                and dotted(node) in FORBIDDEN_IN_LEAVES
                and EXEMPT.get(module) != dotted(node)
            ]
    return found


def our_sources() -> tuple[dict[str, str], frozenset[str]]:
    """All modules of the package, and which of them are packages."""
    sources, packages = {}, []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[module] = path.read_text(encoding="utf-8")
        if parts[-1] == "__init__":
            packages.append(module)
    return sources, frozenset(packages)


def order_inside(sources: Mapping[str, str], packages: frozenset[str]) -> list[str]:
    """Breaches of `INSIDE`: imports of a room that comes later, and rooms that the table does not know."""
    found: list[str] = []
    for module, source in sorted(sources.items()):
        parts = module.split(".")
        ranks = {room: rank for rank, rooms in enumerate(INSIDE.get(layer_of(module), ())) for room in rooms}
        if not ranks or len(parts) < 3:
            continue  # a package without an order, or its door
        if parts[2] not in ranks:
            found.append(f"{module}: no place is declared for it inside {parts[1]}; add it to INSIDE")
            continue
        for line, name in imports(source, module, is_package=module in packages):
            target = name.split(".")
            if target[:2] == parts[:2] and len(target) > 2 and ranks.get(target[2], -1) > ranks[parts[2]]:
                found.append(f"{module}:{line}: {parts[2]} may not import {name}")
    return found


def graph(sources: Mapping[str, str], packages: frozenset[str]) -> dict[str, set[str]]:
    """Module -> modules it imports, at any time: at the top, inside a function, or for type checkers only."""
    edges: dict[str, set[str]] = {}
    for module, source in sources.items():
        edges[module] = set()
        for _, name in imports(source, module, is_package=module in packages):
            target = name if name in sources else name.rpartition(".")[0]
            if target in sources and target != module:
                edges[module].add(target)
    return edges


def circles(edges: Mapping[str, set[str]]) -> list[str]:
    """Every circle of modules, each once, as a text; found one after the other by leaving out where it closes."""
    edges = {module: set(targets) for module, targets in edges.items()}
    found: list[str] = []
    while True:
        try:
            graphlib.TopologicalSorter(edges).prepare()
        except graphlib.CycleError as error:
            circle: list[str] = error.args[1][::-1]
            found.append(" -> ".join(circle))
            edges[circle[0]].discard(circle[1])
        else:
            return found


MOST_MODULES = {"elixir": 15, "elixir.search": 8}
"""Package -> how many modules it may have next to its rooms, its own ``__init__`` counted."""


def test_few_modules_are_outside_of_a_room() -> None:
    sources, packages = our_sources()
    outside = {
        name: [m for m in sources if m == name or (m not in packages and m.rpartition(".")[0] == name)]
        for name in MOST_MODULES
    }
    assert {name: modules for name, modules in outside.items() if len(modules) > MOST_MODULES[name]} == {}


def test_no_import_runs_in_a_circle() -> None:
    found = circles(graph(*our_sources()))
    assert found == []


def test_rooms_are_in_order() -> None:
    assert order_inside(*our_sources()) == []


def test_layers_hold() -> None:
    sources, packages = our_sources()
    assert len(sources) > 10
    assert violations(sources, packages) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("elixir.plan", "from elixir.search import optimal_search"),
        ("elixir.plan", "import elixir.tracer.trace"),
        ("elixir.plan", "from . import tracer"),
        ("elixir.plan", "from .wrapper import ElixirModule"),
        ("elixir.plan", "from elixir import Plan"),
        ("elixir.plan", "import elixir"),
        ("elixir.schedule", "def f():\n    from elixir.chunk import Block"),
        ("elixir.schedule", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import elixir.search"),
        ("elixir.schedule", "import importlib\nimportlib.import_module('elixir.chunk')"),
        ("elixir.schedule", "import torch.distributed as dist"),
        ("elixir.schedule", "from torch import cuda"),
        ("elixir.schedule", "import torch\nfree = torch.cuda.mem_get_info()"),
        ("elixir.tracer.run", "from elixir.search import x"),
        ("elixir.tracer.run", "from ..microbench import measure"),
        ("elixir.microbench.compute", "from elixir.tracer import trace_step"),
        ("elixir.search.pick", "from elixir.wrapper import ElixirModule"),
        ("elixir.search.pick", "from elixir import chunk"),
        ("elixir.chunk.pool", "from elixir.kernels import adam"),
        ("elixir.wrapper.module", "from elixir.search import plan_from_trace"),
        ("elixir.wrapper.module", "from elixir.tracer import trace_step"),
        ("elixir.wrapper.module", "from elixir.api import wrap"),
        ("elixir.surprise", "x = 1"),
    ],
)
def test_a_violation_is_found(module: str, source: str) -> None:
    (found,) = violations({module: source})
    assert found.startswith(module)
