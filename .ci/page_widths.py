"""Says which pages of ``out/site`` are wider than a telephone: ``python .ci/page_widths.py [--width 390]``.

Needs a Chromium, such as Debian's: every page is laid out in a frame of that width, and asked how wide it is.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "out" / "site"
HARNESS = """<!doctype html><body><script>
const pages = PAGES, found = {};
async function measure(page) {
  const frame = document.createElement("iframe");
  frame.style = "width:WIDTHpx;height:800px;border:0";
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => { frame.onload = done; });
  const root = frame.contentDocument.documentElement;
  found[page] = Math.max(root.scrollWidth, frame.contentDocument.body.scrollWidth);
  frame.remove();
}
(async () => {
  for (const page of pages) await measure(page);
  document.body.textContent = "WIDTHS" + JSON.stringify(found) + "END";
})();
</script></body>"""


def widths(width: int) -> dict[str, int]:
    """Page -> pixels that it needs at that width of a window."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no chromium was found (Debian: apt-get install chromium)")
    pages = [page.as_uri() for page in sorted(SITE.glob("**/*.html"))]
    if not pages:
        raise SystemExit(f"no pages in {SITE}: make docs")
    with tempfile.TemporaryDirectory() as folder:
        harness = Path(folder) / "harness.html"
        harness.write_text(
            HARNESS.replace("PAGES", json.dumps(pages)).replace("WIDTH", str(width), 1), encoding="utf-8"
        )
        words = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-web-security",
            "--allow-file-access-from-files",
        ]
        words += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=600000", "--timeout=500000", "--dump-dom"]
        done = subprocess.run(
            [browser, *words, harness.as_uri()], capture_output=True, text=True, timeout=550, check=True
        )
    found = re.search(r"WIDTHS(\{.*?\})END", done.stdout)
    if found is None:
        raise SystemExit(f"the pages could not be measured: {done.stderr[-2000:]}")
    return {
        str(Path(page.removeprefix("file://")).relative_to(SITE)): size for page, size in json.loads(found[1]).items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=390, help="of the window, in pixels")
    width = parser.parse_args().width
    found = widths(width)
    wide = {page: size for page, size in found.items() if size > width}
    print(f"{len(found)} pages, {len(wide)} wider than {width} pixels")
    for page, size in wide.items():
        print(f"  {page}: {size}")
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
