"""The guides quote messages that the code has, claims that exist and figures of the records."""

import ast
import json
import re
from pathlib import Path

import pytest

from pytest_aiperf.machine.requirements import claim_id
from pytest_aiperf.rules import advice, roofline

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
ANY = "…"  # stands for a part that differs
LINK = re.compile(r"\[((?:ch\d\d|labs)/\w+)\]\(\.\./course/(\w+)\.md\)(?:,? (\d[\d.]*)x)?")
TOLERANCE = 0.15
"""Relative difference between a quoted and a recorded speedup: sessions differ by some percent, and
the guides round."""
HOST_TOLERANCE = 0.35  #: The same for wall time, which depends on the speed of the host.


def messages() -> set[str]:
    """Return the first line of each text of the package, ``ANY`` for what is formatted into it."""
    texts, inner = set(), set()
    for file in (ROOT / "src/pytest_aiperf").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", ANY) for part in node.values]
                texts.add("".join(p if isinstance(p, str) else ANY for p in parts))
                inner |= {*node.values}
            elif node not in inner and isinstance(getattr(node, "value", None), str):
                texts.add(re.sub(r"\{\w*\}", ANY, node.value))
    return {text.partition("\n")[0] for text in texts}


def quotes() -> list[str]:
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split(ANY))))


def not_printed(lines: list[str]) -> list[str]:
    """Return the lines that match no message.

    A message may be a part of a line, of about half of it at least, or a line a part of a message.
    """
    texts = {text: pattern(text) for text in messages()}

    def matches(line: str, text: str) -> bool:
        length, of_line = len(text.replace(ANY, "")), len(line.replace(ANY, ""))
        return bool(
            (length > 0.45 * of_line and texts[text].search(line)) or pattern(line).search(text)
        )

    return [line for line in lines if not any(matches(line, text) for text in texts)]


def test_quoted_messages_exist():
    lines = quotes()
    assert len(lines) > 50
    assert not_printed(lines) == []


def test_a_message_that_the_code_lacks_is_found():
    changed = [line.replace("identical", "equal") for line in quotes() if "identical" in line]
    assert changed
    assert not_printed(changed) == changed


def recorded() -> dict[str, list[tuple[float, float]]]:
    """Return the recorded speedups of each claim, without parameters, and their tolerances."""
    speedups: dict[str, list[tuple[float, float]]] = {}
    for name in ("h200", "2xh200"):
        content = json.loads((ROOT / f"results/{name}.json").read_text(encoding="utf-8"))
        for record in (benchmark["aiperf"] for benchmark in content["benchmarks"]):
            claim = record["claim"].partition("[")[0]
            ratios = (record["speedup"], record["library"])
            tolerance = HOST_TOLERANCE if record["timing"]["metric"] == "wall" else TOLERANCE
            speedups.setdefault(claim, []).extend((r["value"], tolerance) for r in ratios if r)
    return speedups


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_linked_claims_exist_with_these_figures(guide):
    claims = {
        claim_id(f"{file.relative_to(ROOT)}::{name}")
        for file in (ROOT / "tests").glob("*/test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    speedups = recorded()
    links = LINK.findall(guide.read_text(encoding="utf-8"))
    assert links
    for claim, page, figure in links:
        assert claim in claims
        assert page == claim.partition("/")[0]
        if figure:
            near = (abs(float(figure) / s - 1) < within for s, within in speedups[claim])
            assert any(near), claim


def test_the_roofline_table_is_that_of_the_recorded_ceilings():
    text = (ROOT / "docs/guides/debugging.md").read_text(encoding="utf-8")
    row = r"^\| (\w+).*?\| ([\d.,]+) T\S+ \| ([\d.,]+) T\S+ \| (\d+) % \|$"
    rows = re.findall(row, text, re.MULTILINE)
    ceilings = json.loads((ROOT / "results/ceilings-h200.json").read_text())["ceilings"]
    assert len(rows) == 6
    for name, *cells in rows:
        measured, sheet, share = (float(cell.replace(",", "")) for cell in cells)
        assert measured * 1e12 == pytest.approx(ceilings[name], rel=0.01)
        assert sheet * 1e12 == pytest.approx(roofline.DATASHEET["h200"][name], rel=0.01)
        assert share == round(100 * ceilings[name] / roofline.DATASHEET["h200"][name])


def test_the_advice_table_has_the_claim_of_each_rule():
    text = (ROOT / "docs/guides/profiling.md").read_text(encoding="utf-8")
    section = text.partition("### Advice\n")[2].partition("\n```")[0]
    shown = {claim for claim, _, _ in LINK.findall(section)}
    rules = [rule for rule in advice.RULES if not any("top stall" in name for name in rule.when)]
    assert len(rules) > 15
    assert {rule.claim for rule in rules} <= shown
