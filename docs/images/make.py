"""Make the README's pictures from the accepted records: ``python docs/images/make.py``.

The picture of the report needs playwright and a Chromium.
"""

import html
import re
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from pytest_aiperf.cli import main
from pytest_aiperf.records.results import read_results
from pytest_aiperf.report import terminal

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "results" / "h200.json"
COMMAND = "pytest --gpu -m ch07 -k 'vectorized or transpose or reduction'"
SHOWN = ("ch07/vectorized_copy", "ch07/transpose_ladder", "ch07/reduction_ladder")
COLUMNS = 108
CELL, LINE, MARGIN = 8.4, 20, 18  # pixels: width of a character, height of a line, margin
COLOURS = {"FASTER": "#3fb950", "$": "#8b949e"}


def summary() -> list[str]:
    """Return what the command prints about some recorded claims."""
    results = [r for r in read_results(RESULTS) if r.claim.startswith(SHOWN)]
    return [f"$ {COMMAND}", "", *terminal.table(results, COLUMNS)]


def svg(lines: list[str]) -> str:
    """Draw lines of text as on a terminal."""
    width = max(map(len, lines)) * CELL + 2 * MARGIN
    height = len(lines) * LINE + 2 * MARGIN
    texts = []
    for number, line in enumerate(lines):
        marked = html.escape(line.replace(" ", "\N{NO-BREAK SPACE}"))  # SVG collapses spaces
        for word, colour in COLOURS.items():
            pattern = rf"(?<!\S){re.escape(word)}(?!\S)"
            marked = re.sub(pattern, f'<tspan fill="{colour}">{word}</tspan>', marked)
        y = MARGIN + LINE * (number + 0.75)
        # textLength keeps the columns aligned, whatever font the viewer has
        length = f'textLength="{len(line) * CELL:.1f}" lengthAdjust="spacingAndGlyphs"'
        if line:
            texts.append(f'<text x="{MARGIN}" y="{y:g}" {length}>{marked}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" role="img" font-size="14" fill="#e6edf3" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace">'
        f"<title>Output of {html.escape(COMMAND)}</title>"
        '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>' + "".join(texts) + "</svg>\n"
    )


def screenshot(path: Path) -> None:
    """Draw the part of the report that is about one ladder."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder, "report.html")
        main(["report", str(RESULTS), "-o", str(report)])
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 700})
        page.goto(report.as_uri())
        heading = page.get_by_role("heading", name="A transpose whose").first
        for _ in range(3):  # sections get their height when they are first drawn
            heading.evaluate("e => e.scrollIntoView()")
            page.wait_for_timeout(300)
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    (HERE / "terminal.svg").write_text(svg(summary()), encoding="utf-8")
    screenshot(HERE / "report.png")
