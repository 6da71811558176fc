"""The runtime says on which device it makes a tensor: `torch.set_default_device` decides where nobody does."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "elixir"
RUNTIME = ("access", "checkpoint", "checkpoint_format", "chunk", "kernels", "wrapper", "optimizer_states.py")
FACTORIES = frozenset(
    "arange empty empty_strided eye full linspace logspace ones rand randint randn tensor zeros".split()
)


def unnamed(source: str) -> list[int]:
    """Lines with a call such as ``torch.zeros(3)``, which names no device."""
    return [
        call.lineno
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in FACTORIES
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and not any(keyword.arg == "device" for keyword in call.keywords)
    ]


def test_every_tensor_of_the_runtime_is_made_on_a_named_device() -> None:
    files = [PACKAGE / name for name in RUNTIME if name.endswith(".py")]
    files += [path for name in RUNTIME for path in sorted((PACKAGE / name).rglob("*.py"))]
    assert len(files) > 50
    found = {path.relative_to(PACKAGE).as_posix(): unnamed(path.read_text(encoding="utf-8")) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_call_without_a_device_is_found() -> None:
    assert unnamed("a = torch.zeros(3)\nb = torch.ones(3, device='cpu')\nc = torch.zeros_like(b)") == [1]
