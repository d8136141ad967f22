"""On GitHub, each page of the course lists its claims with their files.

``python tests/docs/test_course_files.py`` writes the lists. The built pages leave them out, because
they show each claim itself.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs/course").glob("ch??.md")), ROOT / "docs/course/labs.md"]
LIST = re.compile(r"<!-- files.*?<!-- end of files -->\n\n", re.DOTALL)
BEGIN = "<!-- files: written by tests/docs/test_course_files.py, left out of the built pages -->"


def link(path):
    """Return a link from a page of the course to a file of the repository."""
    assert (ROOT / path).is_file(), path
    return f"[`{path}`](../../{path})"


def kernels(text):
    """Return the CUDA files that a test names, and the modules with kernels that it imports."""
    for name in re.findall(r'nvcc\("([^"]+)"', text):
        yield f"kernels/{name}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("kernels."):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            paths = (f"{name.replace('.', '/')}.py" for name in names)
            yield from (path for path in paths if (ROOT / path).is_file())


def claims(folder):
    """Yield the path and the text of each test of a folder that states a claim."""
    for path in sorted((ROOT / "tests" / folder).glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^def test_\w+\([^)]*\bcompare\b", text, re.MULTILINE):
            yield path, text


def files(page):
    """Return the list of a page: each claim's test, title and kernels, in the order of the page."""
    places = re.findall(rf"^<!-- claim {page.stem}/(\w+) -->$", page.read_text(), re.MULTILINE)
    rows = {}
    for path, text in claims(page.stem):
        names = re.findall(r"^def test_(\w+)\([^)]*\bcompare\b", text, re.MULTILINE)
        title = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        places_of = [places.index(name) for name in names if name in places]
        used = ", ".join(map(link, dict.fromkeys(kernels(text))))
        row = f"* {title} {link(path.relative_to(ROOT))}{used and f', {used}'}"
        rows[min(places_of, default=len(places)), path.name] = row
    lines = [
        BEGIN,
        "The claims, with their tests and kernels:",
        "",
        *dict(sorted(rows.items())).values(),
    ]
    return "\n".join(
        [
            *lines,
            "",
            "`make docs` builds this page with results and code.",
            "<!-- end of files -->",
            "",
            "",
        ]
    )


def written(page):
    """Return the text of a page with the list that its files give."""
    text = LIST.sub("", page.read_text(encoding="utf-8"))
    before, comment, after = text.partition("<!-- claim ")
    return f"{before}{files(page)}{comment}{after}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_lists_all_its_claims_with_their_files(page):
    text = page.read_text(encoding="utf-8")
    assert text == written(page), f"run: python {Path(__file__).relative_to(ROOT)}"
    folder = ROOT / "tests" / page.stem
    tests = [p.name for p in folder.glob("test_*.py") if "compare(" in p.read_text("utf-8")]
    assert [name for name in tests if f"tests/{page.stem}/{name}" not in text] == []


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(written(each), encoding="utf-8")
    sys.exit()
