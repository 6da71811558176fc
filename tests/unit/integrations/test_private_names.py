"""The private names of frameworks on which the integrations lean: all are listed, few, and there."""

from __future__ import annotations

import ast
import importlib.util
import re
import tokenize
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

PRIVATE_NAMES: dict[str, tuple[str, ...]] = {
    "transformers": (
        "_has_mixed_mesh_grads",  # since 5.17 it reads every parameter's gradient
        "_load_from_checkpoint",  # a model on meta cannot take weights before it is wrapped
        "_load_optimizer_and_scheduler",
        "_move_model_to_device",
        "_n_gpu",  # more than one would mean nn.DataParallel
        "_save",
        "_save_optimizer_and_scheduler",
        "_wrap_model",
    ),
    "accelerate": ("_is_accelerate_prepared",),
    "trl": (
        "_calculate_rewards",  # functions of the user's, which a plan must not call
        "_prepare_inputs",  # a batch is generated there
    ),
    "lightning": (
        "_compiler_ctx",  # a LightningModule that was given to torch.compile as a whole, which is refused
        "_device",  # what training_step makes on self.device belongs on meta while it is traced
        "_layer_sync",  # sync_batchnorm, which is refused
        "_precision_plugin",  # the Trainer reads it of a strategy that it is given
    ),
}
"""Every name of a framework that begins with an underscore and on which an integration leans.

The tests look for each in the version that is installed, and for others in the sources.
"""
FOLDER = Path(__file__).parents[3] / "elixir" / "integrations"
MOST = {"transformers": 8, "accelerate": 4, "lightning": 5, "trl": 2}
MOST_LINES = 970
MOST_LINES_OF_AN_EXAMPLE = 40
WHERE = {
    "transformers": ("transformers/trainer.py", "transformers/training_args.py", "transformers/trainer_seq2seq.py"),
    "accelerate": ("accelerate/accelerator.py", "accelerate/optimizer.py"),
    "lightning": ("lightning/pytorch",),
    "trl": ("trl/trainer/grpo_trainer.py",),
}
"""Framework -> where its sources say the names."""
SINCE = {"_has_mixed_mesh_grads": Version("5.17")}
"""Names that transformers has got only after the oldest version that is allowed."""


def private_names(path: Path) -> set[str]:
    """Names with one underscore at the front that a source defines or uses as attributes, and text that looks so."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if re.fullmatch(r"_[a-z]\w*", name)}


def words_of(framework: str) -> set[str]:
    """Every word of the framework's sources."""
    spec = importlib.util.find_spec(framework)
    if spec is None and framework == "trl":
        pytest.skip("TRL is not installed")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parents[1]
    words: set[str] = set()
    for name in WHERE[framework]:
        path = root / name
        for source in [path] if path.is_file() else path.rglob("*.py"):
            words |= set(re.findall(r"\b_[a-z]\w*", source.read_text(encoding="utf-8")))
    return words


@pytest.mark.parametrize("framework", PRIVATE_NAMES)
def test_names_are_few_and_there(framework: str) -> None:
    names = set(PRIVATE_NAMES[framework])
    assert len(names) <= MOST[framework]
    later = {name for name, version in SINCE.items() if Version(metadata.version("transformers")) < version}
    assert names - words_of(framework) - later == set()


@pytest.mark.parametrize("framework", PRIVATE_NAMES)
def test_names_are_listed(framework: str) -> None:
    listed = {name for names in PRIVATE_NAMES.values() for name in names}
    used = {name for path in FOLDER.glob("*.py") for name in private_names(path)}
    assert (used & words_of(framework)) - listed == set()


def code_lines(path: Path) -> int:
    """Lines with code on them: no blank ones, comments or docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    texts = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    with path.open("rb") as source:
        empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
        tokens = [token for token in tokenize.tokenize(source.readline) if token.type not in empty]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - texts)


@pytest.mark.parametrize("name", ["trainer", "lora", "lightning_fit"])
def test_the_examples_are_short(name: str) -> None:
    assert code_lines(FOLDER.parents[1] / "example" / f"{name}.py") <= MOST_LINES_OF_AN_EXAMPLE


def test_the_integrations_are_small() -> None:
    assert sum(map(code_lines, FOLDER.glob("*.py"))) < MOST_LINES
