"""Measured figures in README and docs are those of the newest rows in benchmark/results, and no other figure claims a
speed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmark import quoted
from benchmark.quoted import QuoteError, documents, quoted_in, value_of

ROOT = Path(__file__).parents[3]


def has_rules_or_bars(document: Path) -> bool:
    """Whether it is a page of constants and thresholds: they are in the code, and nothing there is said to be measured."""
    return document.parent.name == "appendix" and not document.name.startswith("measurements")


CLAIM = re.compile(r"(?<![\w.-])\d[\d,.]*\s?(?:%|s|ms|µs|seconds?|times|GB/s)(?![\w/])")
"""A share, a time or a ratio."""
NOT_MEASURED = (
    "within 0.2 %",
    "outside 0.2 %",
    "80 % of cases",
    "off by more than 35 %",
    "differs by more than 5 %",
    "fewest threads that reach 95 %",
    "take 0.2 to 2 times as long",
)
"""Thresholds and inputs, as the pages have them."""


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_quoted_figures_are_those_of_the_newest_rows(document: Path) -> None:
    stale = [
        f"line {figure.line}: {figure.figure}, now {figure.newest} ({figure.row})"
        for figure in quoted_in(document)
        if figure.stale
    ]
    assert stale == [], "run `make figures`, and read what the text says about them"


def test_readme_and_measurements_quote_figures() -> None:
    counts = {document.name: len(list(quoted_in(document))) for document in documents()}
    assert counts["README.md"] >= 10
    assert sum(count for name, count in counts.items() if name.startswith("measurements")) >= 50


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_figure_is_without_a_row(document: Path) -> None:
    if has_rules_or_bars(document):
        return
    text = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"\s+", " ", quoted._QUOTED.sub("", text))
    for phrase in NOT_MEASURED:
        text = text.replace(phrase, "")
    assert CLAIM.findall(text) == []


def test_a_value_is_computed_from_left_to_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "overlap_speed.csv").write_text("figure,p50\na,1.5\nb,3.0\na,1.25\n")
    monkeypatch.setattr(quoted, "RESULTS", tmp_path)
    quoted.newest_rows.cache_clear()
    try:
        assert value_of("overlap_speed figure=a: p50") == 1.25, "the last row of a case counts"
        assert value_of("overlap_speed: max p50 - 1 * 100") == 200.0
        assert value_of("overlap_speed p50<=2: count p50") == 1.0
        for row in (
            "overlap_speed: p50",
            "overlap_speed figure=c: p50",
            "overlap_speed: p20",
            "overlap_speed",
            "nothing: p50",
        ):
            with pytest.raises(QuoteError):
                value_of(row)
    finally:
        quoted.newest_rows.cache_clear()


def test_figures_are_written_with_their_decimals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quoted, "value_of", lambda row: 1234.567)
    page = tmp_path / "page.md"
    page.write_text("about 1.0 s<!-- row a: b --> and 7,000 B<!-- row a: b -->, of 3<!-- row a: b -->\n")
    assert quoted.rewrite(page) == 3
    assert (
        page.read_text() == "about 1234.6 s<!-- row a: b --> and 1,235 B<!-- row a: b -->, of 1235<!-- row a: b -->\n"
    )
    assert quoted.rewrite(page) == 0


def test_a_comment_without_a_figure_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("fast <!-- row a: b -->\n")
    with pytest.raises(QuoteError, match="page.md:1"):
        list(quoted_in(page))
