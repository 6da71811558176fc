"""Puts the pages of the site together in ``out/pages``: ``make docs`` runs it before mkdocs.

The pages of ``docs`` are taken as they are, with three changes. Links to files that are no pages become plain text; the
first use of each word of the glossary on a page links to it; and there are further pages: README, the project's own,
the reference of the public names, from their docstrings, and that of the commands, from their parsers.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import elixir
from elixir.cli.options import COMMANDS, EXAMPLES, build_parser

PAGES = ROOT / "out" / "pages"
OTHERS = {
    "README.md": "index.md",
    "docs/index.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages that have another place on the site, whose front page is README."""
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plan": (
        "Plan",
        ("optimal_search", "minimum_waste_search", "simple_search", "Plan", "ChunkPlan", "StepTrace", "HardwareProfile",
         "PlanError", "TraceError", "InputError", "InputTypeError", "ArtifactError", "ElixirError"),
    ),
    "estimate": ("Estimate", ("estimate", "guard")),
    "train": ("Train", ("wrap", "together", "ElixirModule", "ElixirOptimizer", "HybridAdam", "StateError")),
    "save": (
        "Save",
        ("Checkpoints", "save_checkpoint", "load_checkpoint", "open_checkpoint", "export_hf", "Saving", "Loaded", "PerRank"),
    ),
}  # fmt: skip
"""Page -> its title and the public names on it."""
INTEGRATIONS = {
    "elixir.integrations.transformers": ("ElixirTrainer", "with_elixir"),
    "elixir.integrations.accelerate": ("ElixirAccelerator",),
    "elixir.integrations.lightning": ("ElixirStrategy",),
}
STYLE = """
/* Wide tables and drawings scroll within themselves, and long words break: no page is wider than a telephone. */
.md-typeset code { overflow-wrap: anywhere; }
.md-typeset pre > code { overflow-wrap: normal; }
.md-typeset table:not([class]) td { min-width: 6rem; overflow-wrap: normal; }
.md-typeset h1, .md-typeset h2, .md-typeset h3 { overflow-wrap: anywhere; }
"""
_OPTIONS = "\n::: elixir.search.request.SearchRequest\n"
"""Options of `wrap` and of the searches: its fields."""
_LINK = re.compile(r"(!?)\[([^\]\[]*)\]\(([^)\s]+)\)")
_TERM = re.compile(r"^\* \*\*([^*]+)\*\*", re.MULTILINE)
_LEFT_ALONE = re.compile(
    r"(```.*?```|`[^`\n]*`|\[[^\]]*\]\([^)]*\)|^#.*?$|<[^>]*>|\*\*[^*]*\*\*)", re.DOTALL | re.MULTILINE
)


def anchor(term: str) -> str:
    """The name of a term's place in the glossary."""
    return re.sub(r"[^\w]+", "-", term.lower()).strip("-")


def pages() -> dict[Path, Path]:
    """File -> the page of the site that it becomes."""
    sources = ROOT / "docs" / "src"
    inside = [page for page in sorted((ROOT / "docs").glob("**/*.md")) if not page.is_relative_to(sources)]
    found = {page: PAGES / page.relative_to(ROOT / "docs") for page in inside}
    return found | {ROOT / name: PAGES / other for name, other in OTHERS.items()}


def links_moved(text: str, source: Path, known: dict[Path, Path]) -> str:
    """The text of a page with links to other pages of the site, and no links to files that are none."""

    def moved(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        path, hash_mark, place = target.partition("#")
        if "://" in target or not path:
            return link[0]
        file = (source.parent / path).resolve()
        if file in known:
            there = os.path.relpath(known[file], known[source].parent)
        elif picture and file.is_relative_to(ROOT / "docs"):
            there = os.path.relpath(PAGES / file.relative_to(ROOT / "docs"), known[source].parent)
        else:
            return words
        return f"{picture}[{words}]({there}{hash_mark}{place})"

    return _LINK.sub(moved, text)


def glossary_linked(text: str, page: Path, terms: list[str]) -> str:
    """The text with the first use of each term linked, outside of code, links and headings."""
    there = os.path.relpath(PAGES / "glossary.md", page.parent)
    parts = _LEFT_ALONE.split(text)
    for term in sorted(terms, key=len, reverse=True):
        pattern = re.compile(rf"(?<![\w-]){re.escape(term)}s?(?![\w-])")
        for index in range(0, len(parts), 2):
            found = pattern.search(parts[index])
            if found:
                before, after = parts[index][: found.start()], parts[index][found.end() :]
                parts[index : index + 1] = [before, f"[{found[0]}]({there}#{anchor(term)})", after]
                break
    return "".join(parts)


def reference_pages() -> Iterator[tuple[str, str]]:
    """Name and text of the pages of public names."""
    for name, (title, members) in GROUPS.items():
        text = f"# {title}\n\n" + "\n\n".join(map(_documented, members)) + "\n"
        yield f"reference/{name}.md", text + (_OPTIONS if name == "plan" else "")
    text = "# Integrate\n\nThe names below are imported from the modules that their headings say.\n"
    for module, members in INTEGRATIONS.items():
        for member in members:
            text += f"\n::: {module}.{member}\n    options:\n      show_root_full_path: true\n"
    yield "reference/integrate.md", text


def _documented(name: str) -> str:
    return f"::: {elixir._HOMES[name]}.{name}"


def command_page() -> str:
    """All commands as their parsers describe them."""
    parser = build_parser()
    text = f"# Commands\n\n{parser.description}\n"
    for name, (description, _) in COMMANDS.items():
        command = parser.commands[name]
        usage = re.sub(r"\s+", " ", command.format_usage()).strip().removeprefix("usage: ")
        text += (
            f"\n## elixir {name}\n\n{description}\n\n```\n{_folded(usage)}\n```\n\n| argument | meaning |\n|---|---|\n"
        )
        for action in command._actions:
            if action.help == argparse.SUPPRESS:
                continue
            called = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.metavar or action.dest}`"
            value = "" if action.nargs == 0 or not action.option_strings else f" `{_value(action)}`"
            said = (action.help or "").replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
            text += f"| {called}{value.replace('|', chr(92) + '|')} | {said} |\n"
        text += "\n```\n" + "\n".join(EXAMPLES[name]) + "\n```\n"
    return text


def _value(action: argparse.Action) -> str:
    shown = action.metavar if isinstance(action.metavar, str) else None
    return shown or (",".join(map(str, action.choices)) if action.choices else action.dest.upper())


def _folded(usage: str, width: int = 100) -> str:
    lines = [""]
    for word in re.findall(r"\[[^\]]*\]|\S+", usage):
        if len(lines[-1]) + len(word) >= width:
            lines.append("      ")
        lines[-1] += f" {word}" if lines[-1].strip() else word
    return "\n".join(lines)


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    known = pages()
    terms = _TERM.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    made = [*reference_pages(), ("reference/commands.md", command_page()), ("site.css", STYLE)]
    for source, page in known.items():
        text = links_moved(source.read_text(encoding="utf-8"), source, known)
        if page.name == "glossary.md":
            text = _TERM.sub(lambda term: f'* <a id="{anchor(term[1])}"></a>**{term[1]}**', text)
        elif source.is_relative_to(ROOT / "docs"):
            text = glossary_linked(text, page, terms)
        made.append((page.relative_to(PAGES).as_posix(), text))
    for name, text in made:
        target = PAGES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "images", PAGES / "images")


if __name__ == "__main__":
    main()
