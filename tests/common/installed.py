"""A wheel in an environment that holds nothing but what the wheel says that it needs, outside of the repository.

    python -m tests.common.installed --from-index    # takes dist/*.whl and, from the package index, what it needs

Tests need no index: `linked` gives the environment those distributions of the running one that the wheel requires, and
theirs in turn, so that an import of anything else fails there as it would for a user.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRA = "hf"
TEN_STEPS = """
import elixir
import torch

tokens = torch.arange(64).reshape(4, 16)

class Trained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Embedding(96, 64), torch.nn.Linear(64, 96))

    def forward(self, tokens):
        return torch.nn.functional.cross_entropy(self.inner(tokens).flatten(0, 1), tokens.flatten())

trained = Trained()
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
trained, optimizer = elixir.wrap(trained, optimizer, inp={"tokens": tokens}, step_fn=lambda m, inp: m(**inp).backward())
losses = []
for _ in range(10):
    loss = trained(tokens)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
assert losses[-1] < losses[0], losses
print("ten steps:", losses)
"""


def run(*words: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONUNBUFFERED")}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=own, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def required(wheel: Path) -> set[str]:
    """Names of the distributions that the wheel with its extra requires, and of those that they require."""
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(path).decode()
    lines = [line.partition(": ")[2] for line in text.split("\n\n")[0].splitlines() if line.startswith("Requires-Dist")]
    found: set[str] = set()
    open_ones = [(Requirement(line), {EXTRA}) for line in lines]
    while open_ones:
        requirement, extras = open_ones.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            continue
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        needs = importlib.metadata.distribution(name).requires or []
        open_ones += [(Requirement(line), requirement.extras) for line in needs]
    return found


def linked(names: set[str], site: Path) -> None:
    """Links the files of installed distributions into another environment's folder of packages."""
    for name in names:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))


def environment(wheel: Path, folder: Path, *, from_index: bool) -> Path:
    """Installs the wheel into a new environment; gives its folder of commands."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    if not from_index:
        linked(required(wheel), site)
    pip = (sys.executable, "-m", "pip", "--python", python)
    where = ("--constraint", ROOT / "requirements.txt") if from_index else ("--no-index",)
    run(*pip, "install", "-q", *where, f"{wheel}[{EXTRA}]", cwd=folder)
    checked = run(*pip, "check", cwd=folder)
    assert "No broken requirements found." in checked, checked
    return folder / "bin"


def commands_run(commands: Path, cwd: Path) -> None:
    """`elixir profile`, `elixir plan` and ten training steps run in that environment, and import nothing from here."""
    python, elixir = commands / "python", commands / "elixir"
    where = run(python, "-c", "import elixir; print(elixir.__file__)", cwd=cwd)
    assert str(commands.parent) in where, where
    profiled = run(elixir, "profile", "opt-125m", "--seq", "64", "--brief", cwd=cwd)
    assert "opt-125m" in profiled, profiled
    words = ("opt-125m", "--seq", "64", "--host-budget", "64GiB", "--brief")
    for command in ((python, "-m", "elixir"), (elixir,)):
        planned = run(*command, "plan", *words, cwd=cwd)
        assert "opt-125m (bfloat16) on 1 x h200" in planned, planned
    assert "ten steps:" in run(python, "-c", TEN_STEPS, cwd=cwd)


def main() -> None:
    wheels = sorted((ROOT / "dist").glob("torch_elixir-*.whl"))
    if len(wheels) != 1:
        raise SystemExit(f"expected one wheel in {ROOT / 'dist'}, found {len(wheels)}; make wheel")
    with tempfile.TemporaryDirectory() as folder:
        commands = environment(wheels[0], Path(folder) / "env", from_index="--from-index" in sys.argv)
        commands_run(commands, Path(folder))
    print(f"{wheels[0].name}: installed, pip check clean; profile, plan and ten steps ran")


if __name__ == "__main__":
    main()
