"""Measured figures in README and docs are those of the newest rows in benchmark/results, and no other figure claims a
speed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmark.quoted import PLACE, documents, filled_in, rows, sources

ROOT = Path(__file__).parents[3]


RULES_AND_BARS = (
    "appendix/formulas.md",
    "appendix/proofs.md",
    "appendix/gpu_bars.md",
    "design/tracer.md",
    "proof/README.md",
)
"""Pages of constants and thresholds, which are in the code, and that of the GPU, which has a test with `proof`."""
CLAIM = re.compile(r"(?<![\w.-])\d[\d,.]*\s?(?:%|s|ms|µs|seconds?|times|GB/s)(?![\w/])")
"""A share, a time or a ratio."""
NOT_MEASURED = (
    "within 0.2 %",
    "less than 0.001 %",
    "off by more than 35 %",
    "fewest threads that reach 95 %",
)
"""Thresholds and inputs, as the pages have them."""


@pytest.mark.parametrize("source", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_pages_are_what_their_sources_make_with_the_newest_rows(source: Path) -> None:
    page = sources()[source].read_text(encoding="utf-8").splitlines()
    assert page == filled_in(source).splitlines(), "edit the source, run `make figures`, and read what the text says"


def test_readme_and_measurements_quote_figures() -> None:
    counts = {source.name: len(PLACE.findall(source.read_text(encoding="utf-8"))) for source in sources()}
    assert {name for name, count in counts.items() if count >= 10} == {
        "README.md",
        "measurements.md",
        "other_runtimes.md",
        "gpu_results.md",
    }


def test_every_row_is_quoted() -> None:
    quoted_names = {
        place["name"] for source in sources() for place in PLACE.finditer(source.read_text(encoding="utf-8"))
    }
    assert set(rows()) - quoted_names == set()


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_figure_is_without_a_row(document: Path) -> None:
    if document.as_posix().endswith(RULES_AND_BARS):
        return
    source = {page: source for source, page in sources().items()}.get(document, document)
    text = re.sub(r"```.*?```|`[^`\n]*`", "", source.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"\s+", " ", PLACE.sub("", text))
    for phrase in NOT_MEASURED:
        text = text.replace(phrase, "")
    assert CLAIM.findall(text) == []
