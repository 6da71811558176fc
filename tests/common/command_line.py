"""The command line, called in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from elixir.cli import main


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else -1
    out, err = capsys.readouterr()
    return status, out, err


def fails(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 2) -> str:
    """The one line that a command which fails leaves on standard error."""
    found, out, err = run(capsys, *argv)
    assert (found, out) == (status, "")
    assert "Traceback" not in err
    assert "internal" not in err or status != 2  # internal errors have another status
    assert err.startswith("elixir")
    assert err.count("\n") == 1
    return err


def page_data(path: Path) -> dict[str, Any]:
    """All that a page of ``--plot`` draws."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))
