"""Says what a release of this version lacks: ``make release-check``. The exit status is 1 if anything is missing.

It reads the archives in ``dist`` that ``make wheel`` made, since those are what is uploaded, and changes nothing.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).resolve().parents[1]
LICENCES = ("LICENSE",)
WANTED_URLS = ("Source", "Documentation", "Changelog", "Issues")


def version() -> str:
    """The one place: ``elixir/__init__.py``."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "elixir" / "__init__.py").read_text(encoding="utf-8"), re.M)
    if found is None:
        raise SystemExit('elixir/__init__.py has no line __version__ = "..."')
    return found[1]


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def of_git(wanted: str) -> Iterator[str]:
    """The tag, and a tree without changes."""
    if git("status", "--porcelain"):
        yield "git: there are changes that are not committed"
    tag = f"v{wanted}"
    if not git("tag", "--list", tag):
        yield f"git: there is no tag {tag} (git tag --annotate {tag})"
    elif git("rev-list", "-1", tag) != git("rev-parse", "HEAD"):
        yield f"git: the tag {tag} is of another commit"


def of_texts(wanted: str) -> Iterator[str]:
    """The changelog and the citation."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(rf"^## .*\b{re.escape(wanted)}\b.*$", changelog, re.M)
    if heading is None:
        yield f"CHANGELOG.md: no section for {wanted}"
    elif "Unreleased" in heading[0] or not re.search(r"\d{4}-\d\d-\d\d", heading[0]):
        today = datetime.date.today().isoformat()
        yield f"CHANGELOG.md: {heading[0]!r} is not dated (## {wanted} - {today})"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    if not re.search(rf'^version: "?{re.escape(wanted)}"?$', citation, re.M):
        yield f'CITATION.cff: no line version: "{wanted}"'
    if not re.search(r"^date-released: ", citation, re.M):
        yield "CITATION.cff: no date-released"


def of_archives(wanted: str) -> Iterator[str]:
    """Checks the archives to upload: names, metadata, licence files, and links of the description that lead somewhere."""
    wheel = ROOT / "dist" / f"torch_elixir-{wanted}-py3-none-any.whl"
    source = ROOT / "dist" / f"torch_elixir-{wanted}.tar.gz"
    for path in (wheel, source):
        if not path.exists():
            yield f"dist: {path.name} is missing (make wheel)"
    for path in sorted((ROOT / "dist").glob("*")):
        if path not in (wheel, source):
            yield f"dist: {path.name} is of another version"
    if source.exists():
        with tarfile.open(source) as archive:
            inside = {name.partition("/")[2] for name in archive.getnames()}
        yield from (f"{source.name}: {name} is missing" for name in (*LICENCES, "README.md") if name not in inside)
    if wheel.exists():
        yield from _of_wheel(wheel, wanted)


def _of_wheel(wheel: Path, wanted: str) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        try:
            metadata = Metadata.from_email(archive.read(path), validate=True)
        except Exception as error:
            yield from (f"{wheel.name}: {each}" for each in getattr(error, "exceptions", (error,)))
            return
    if str(metadata.version) != wanted:
        yield f"{wheel.name}: its metadata says version {metadata.version}"
    for name in LICENCES:
        if name not in (metadata.license_files or []):
            yield f"{wheel.name}: no licence file {name}"
    if not (metadata.author or metadata.author_email or metadata.maintainer or metadata.maintainer_email):
        yield "pyproject.toml: no authors or maintainers"
    urls = metadata.project_urls or {}
    yield from (f"pyproject.toml: [project.urls] has no {name}" for name in WANTED_URLS if name not in urls)
    relative = re.findall(r"\]\((?!https?://|#)([^)\s]+)", metadata.description or "")
    if relative:
        yield (
            f"README.md: {len(relative)} relative links, such as {relative[0]}, lead nowhere on a package index "
            "(they can be made absolute once the project has an address)"
        )


def main() -> int:
    wanted = version()
    lacking = [*of_git(wanted), *of_texts(wanted), *of_archives(wanted)]
    print(f"torch-elixir {wanted}: " + (f"{len(lacking)} things are missing" if lacking else "ready to be released"))
    for line in lacking:
        print(f"  {line}")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
