"""The page is complete, loads and runs nothing from outside, and works in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pytest_aiperf.cli import main
from pytest_aiperf.model import (
    Against,
    Evidence,
    EvidenceKind,
    Finding,
    Interval,
    KernelRecord,
    Limit,
    Outcome,
    Profile,
    Replicate,
    Round,
    Source,
    Trace,
    Verdict,
    Work,
)
from pytest_aiperf.records.results import document
from pytest_aiperf.report import charts, markdown, page
from pytest_aiperf.rules.stats import mean_call_s
from pytest_aiperf.schema import to_json
from tests.plugin.records import ladder, result, timing

ROOT = Path(__file__).parents[2]
HOSTILE = "x\"'><script>alert(1)</script><img src=http://e.vil/x onerror=alert(2)>"
COMMAND = "\n::set-env name=A::b\n##[error]gone"
TEST = '''"""{title}

Because <script>alert("docstring")</script> & so on.
"""

def slow(x):
    return x + 0  # </pre><script>alert("code")</script>

def fast(x):
    return x

def test_double(compare):
    compare(baseline=slow, optimized=fast, inputs=list, reference=fast)
'''


def rich(claim="ch07/copy[vector]", speedup=2.0, **changes):
    """A result with something in every field that the page shows."""
    seconds = [(2e-3 * (1 + i / 500), 2e-3 / speedup * (1 - i / 700)) for i in range(8)]
    replicates = tuple(
        Replicate(i, (Round("ABBA", {"baseline": (b, b), "optimized": (o, o)}, 1980, 4),) * 3)
        for i, (b, o) in enumerate(seconds)
    )
    limit = Limit("copy", 3.1e12, 4.2e12, "B/s", 0.74)
    figures, units = {"dram share": 0.9, "time": 1e-3}, {"dram share": "share", "time": "s"}
    record = result(
        claim,
        title="Wide loads.",
        timing=timing(replicates=replicates),
        speedup=Interval(speedup * 0.99, speedup, speedup * 1.01),
        work=Work(read=1.5e09, written=1.5e09, flops=3e9, dtype="fp32"),
        limits={"baseline": dataclasses.replace(limit, share=0.3), "optimized": limit},
        diagnosis={"optimized": "memory-bound: only fewer bytes help"},
        evidence=(
            Finding(Evidence(EvidenceKind.OPCODE, "LDG.E.128", "copy", 1, 1), 1.0, held=True),
        ),
        traces={"optimized": Trace(1, 1, 0, 1e-3, 1e-3)},
        kernels=(KernelRecord("k.cu", "sm_90a", "copy", 32, 0, 0),),
        profiles=(
            Profile("ncu", "optimized", "artifacts/a b.ncu-rep", figures, units, notes=("n",)),
        ),
        notes=("A note.",),
    )
    return dataclasses.replace(record, **changes)


class Tags(HTMLParser):
    """Collects the tags of a page with their attributes, and the text of its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        (self.scripts if self.tags and self.tags[-1][0] == "script" else self.text).append(data)


def hundred():
    ends = [Verdict.FASTER] * 3 + [Verdict.SAME, Verdict.SLOWER]
    return [
        rich(
            f"ch{i // 10:02}/claim_{i // 3}[rung_{i}]",
            ladder=f"ch{i // 10:02}/claim_{i // 3}",
            rung_index=i,
            speedup=0.5 + i,
            verdict=ends[i % 5],
            against=Against.NAIVE if i % 7 == 0 else Against.IDIOMATIC,
        )
        for i in range(99)
    ] + [
        result(
            "ch11/absent",
            outcome=Outcome.SKIPPED,
            message="needs sm100",
            timing=None,
            speedup=None,
            verdict=None,
            library=None,
        )
    ]


@pytest.fixture(scope="module")
def written():
    return page.page(hundred(), {}, "Report")


def test_every_claim_has_a_section_and_a_hundred_are_small(written):
    results, text = hundred(), written
    sections = [a for tag, a in Tags(text).tags if tag == "section" and "id" in a]
    assert len({a["id"] for a in sections}) == len(results) == 100
    rows = [a for tag, a in Tags(text).tags if tag == "tr" and "data-claim" in a]
    assert {a["data-claim"] for a in rows} == {a["id"] for a in sections}
    assert len(text.encode()) < 3_000_000
    assert len(re.findall("<h5>Ladder", text)) == 33


def test_no_text_of_a_record_becomes_structure(tmp_path):
    file = tmp_path / "tests" / "ch07" / "test_x.py"
    file.parent.mkdir(parents=True)
    file.write_text(TEST.format(title=HOSTILE))
    lines = file.read_text().splitlines()
    slow = Source.of("tests/ch07/test_x.py", 1, len(lines), lines)
    hostile = rich(
        f"ch07/{HOSTILE}",
        nodeid="tests/ch07/test_x.py::test_double",
        title=HOSTILE + COMMAND,
        outcome=Outcome.FAILED,
        message=HOSTILE + COMMAND,
        notes=(HOSTILE,),
        key=HOSTILE,
        stack={HOSTILE: HOSTILE},
        diagnosis={HOSTILE: HOSTILE},
        profiles=(
            Profile(HOSTILE, HOSTILE, "javascript:alert(1)", {HOSTILE: 1.0}, {}, (), (HOSTILE,)),
        ),
        evidence=(
            Finding(Evidence(EvidenceKind.COUNTER, HOSTILE, HOSTILE, 1.0), 1.0, where=HOSTILE),
        ),
        sources={"baseline": (slow,), HOSTILE: (slow,)},
    )
    commit = {"commit": {"id": HOSTILE}}
    text = page.page([hostile], commit, HOSTILE, root=tmp_path)
    seen = Tags(text)
    assert [tag for tag, _ in seen.tags].count("script") == 1
    assert not [tag for tag, _ in seen.tags if tag in ("img", "iframe", "object", "base", "form")]
    assert not [a for _, attributes in seen.tags for a in attributes if a.startswith("on")]
    assert "alert(" not in "".join(seen.scripts)
    shown = "".join(seen.text)
    assert 'alert("docstring")' in shown
    assert 'alert("code")' in shown
    assert shown.count("alert(1)</script>") >= 8
    text = markdown.markdown([hostile], tmp_path)
    assert "<script" not in text
    assert not re.search(r"^\s*::|##\[", text, re.MULTILINE)


def test_the_page_asks_for_nothing_from_elsewhere():
    text = page.page([rich()], {}, "Report")
    for tag, attributes in Tags(text).tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            target = attributes.get(name) or ""
            assert not re.match(r"\s*(\w+:)?//|http|javascript", target), (tag, attributes)
    assert not re.search(r"url\(|@import|https?://", text)
    assert "default-src 'none'" in text


def test_artefacts_are_linked_from_where_the_page_lies(tmp_path):
    assert page._link("artifacts/a b.rep", Path("out")) == "./../artifacts/a%20b.rep"
    assert page._link("javascript:alert(1)", Path()) == ""
    assert page._link("//elsewhere.org/x", Path("/")).startswith("./")


def test_the_page_shows_what_was_measured_and_on_what():
    results = [
        rich(),
        rich("ch07/lost", outcome=Outcome.FAILED, verdict=Verdict.SLOWER, speedup=0.5),
        result("ch08/x", outcome=Outcome.SKIPPED, message="needs sm100", timing=None, verdict=None,
               speedup=None, library=None),
    ]  # fmt: skip
    commit = {"id": "0123456789abcdef", "dirty": True}
    text = " ".join(" ".join(Tags(page.page(results, {"commit": commit}, "Report")).text).split())
    for part in (
        "driver 580.159",
        "CUDA 13.0",
        "torch 2.11.0",
        "NVIDIA H200 (132 SMs, 150 GiB)",
        "1980 MHz (1980 to 1980)",
        "power cap in 48 of 48 rounds",
        "0.40% GPU",
        "0123456789ab (changed)",
        "2 claims, 1 failed",
        "1 FASTER",
        "1 SLOWER",
        "Skipped: needs sm100 (1)",
        "1.00x geometric mean of 2, without naive baselines",
        "74 % median share of the limit",
        "memory-bound: only fewer bytes help",
        "opcode LDG.E.128 in copy = 1: 1",
        "artifacts/a b.ncu-rep",
        "99 % interval",
    ):
        assert part in text, part


def limited(rungs, ceiling_s=5e-4):
    """Add the share of a ceiling that a call of ``ceiling_s`` seconds would reach."""
    for rung in rungs:
        limit = Limit(
            "copy", 1.0, 1.0, "B/s", ceiling_s / mean_call_s(rung.timing.replicates, "optimized")
        )
        yield dataclasses.replace(rung, limits={"optimized": limit})


def test_a_ladder_is_one_picture_with_its_library_and_its_limit():
    rungs = list(limited(ladder(two=4e-3, four=1e-3, library=2e-3)))
    picture = charts.ladder(rungs)
    assert [step.name for step in picture.steps] == [
        "baseline", "two", "four", "library", "limit: copy",
    ]  # fmt: skip
    heights = [step.height for step in picture.steps]
    assert heights == pytest.approx([1, 2, 8, 4, 16 * 1.1**0.5])
    for step, height in zip(picture.steps, heights, strict=True):
        assert picture.steps[0].figure / step.figure == pytest.approx(height)
    assert picture.steps[2].interval == rungs[1].first
    assert picture.remark == ""
    text = page.page(rungs, {}, "Report")
    assert text.count('class="chart ladder"') == 1
    lines = [a["class"] for tag, a in Tags(text).tags if tag == "line" and "class" in a]
    assert lines.count("lib") == lines.count("lim") == len(picture.steps)
    assert lines.count("whisker") == 2


def test_a_picture_of_rungs_measured_apart_says_so():
    two, four = ladder(two=4e-3, four=1e-3)
    apart = dataclasses.replace(four, timing=timing(4e-3, 1e-3), first=None)
    picture = charts.ladder([two, apart])
    assert [step.height for step in picture.steps] == pytest.approx([1, 2, 8])
    assert [step.figure is None for step in picture.steps] == [True, False, False]
    assert picture.steps[2].interval is None
    assert picture.remark == f"{charts.APART} {charts.CHAINED}"
    for text in (page.page([two, apart], {}, "Report"), markdown.markdown([two, apart], Path())):
        assert picture.remark in text
    three = ladder(two=4e-3, four=1e-3, six=5e-4)
    assert charts.ladder([*three[:2], apart]).remark.startswith(charts.APART)  # two are together
    assert charts.ladder(three).remark == ""
    alike = dataclasses.replace(apart, against=Against.IDIOMATIC)
    assert charts.ladder([two, alike]).remark == charts.APART


def test_parameters_that_are_no_rungs_are_no_ladder():
    assert charts.ladder([rich("ch07/x[a]"), rich("ch07/x[b]")]) is None
    assert charts.ladder(ladder(two=4e-3)) is None


def test_markdown_draws_a_ladder_too():
    text = markdown.markdown(ladder(two=4e-3, four=1e-3), Path())
    assert [line.split()[-2:] for line in text.split("\n") if line.endswith("##")] == [
        ["1.00x", "#" * 5],
        ["2.00x", "#" * 10],
        ["8.00x", "#" * 40],
    ]


def test_evidence_and_inconclusive_verdicts_say_what_is_known():
    piece = Evidence(EvidenceKind.LAUNCHES, max=1)
    findings = (
        Finding(piece),
        Finding(piece, 5.0, held=False),
        Finding(piece, 1.0, held=True, baseline_value=5.0, baseline_held=False),
        Finding(piece, 1.0, held=True, baseline_value=1.0, baseline_held=True),
    )
    unsure = rich(
        evidence=findings, verdict=Verdict.INCONCLUSIVE, message="9 % wide: measure again"
    )
    text = page.page([unsure], {}, "Report")
    for state, tone in (
        ("not looked at", "soft"),
        ("does not hold", "bad"),
        ("holds", "good"),
        ("condition (the baseline meets it, too)", "soft"),
    ):
        assert f'<span class="{tone}">{state}</span> launches &lt;= 1' in text
    assert "<b>1 (baseline 5)</b>" in text
    assert "not checked" not in text
    assert '<p class="message">9 % wide: measure again</p>' in text
    assert "measure again</p>" not in page.page([rich(message="measure again")], {}, "Report")


def test_unknown_ceilings_are_not_drawn():
    text = page.page([rich(limits={})], {}, "Report")
    assert 'id="roofline"' not in text
    assert 'id="shares"' not in text
    assert 'id="roofline"' in page.page([rich()], {}, "Report")


def test_a_folder_gets_the_page_and_the_same_as_markdown(tmp_path):
    path = page.write_report([rich(), rich("ch08/x")], {}, tmp_path / "out")
    assert path == tmp_path / "out" / "index.html"
    assert {p.name for p in path.parent.iterdir()} == {"index.html", "report.md"}
    lines = path.with_name("report.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("## ")] == ["## ch07", "## ch08"]


def test_the_command_writes_html_markdown_and_the_readmes_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content = document([rich()], {"gpus": 3}, datetime(2025, 1, 1, tzinfo=UTC))
    Path("r.json").write_text(json.dumps(to_json(content)))
    assert main(["report", "r.json"]) == 0
    assert 'id="claims"' in Path("report.html").read_text()
    assert main(["report", "r.json", "--format=md", "-o", "r.md"]) == 0
    assert "### Wide loads." in Path("r.md").read_text()
    readme = Path("README.md")
    readme.write_text("Before.\n<!-- results -->\nold\n<!-- /results -->\nAfter.\n")
    for _ in range(2):  # the second time changes nothing
        assert main(["report", "r.json", "--readme", "README.md"]) == 0
        text = readme.read_text()
    assert text.startswith("Before.\n<!-- results -->\n\n1 claim: 1 FASTER;")
    assert text.endswith("|\n\n<!-- /results -->\nAfter.\n")
    assert "old" not in text
    readme.write_text("No marks.")
    assert main(["report", "r.json", "--readme", "README.md"]) == 2
    assert "put a line <!-- results -->" in capsys.readouterr().err
    assert readme.read_text() == "No marks."


def test_records_with_gaps_still_make_a_page():
    gaps = [
        rich(timing=timing(replicates=())),
        dataclasses.replace(rich("a", timing=None, gpu=None), speedup=Interval(0.0, 0.5, 0.9)),
    ]
    text = page.page(gaps, {"commit": 3, "gpus": "x"}, "Report")
    assert text.count('<section class="claim"') == 2
    assert page.page([], {}, "Report").count("<table") == 1


def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    executable = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if executable is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    return sync.sync_playwright(), executable


@pytest.fixture(scope="module")
def chromium():
    started, executable = browser()
    quiet = ("--no-sandbox", "--disable-gpu", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--no-first-run")  # fmt: skip
    with started as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=list(quiet))
        yield running
        running.close()


@pytest.fixture
def opened(chromium, tmp_path, written):
    """Open the page of a hundred claims in a browser; record its errors and requests."""
    path = tmp_path / "report.html"
    path.write_text(written, encoding="utf-8")
    tab = chromium.new_page(viewport={"width": 1280, "height": 900})
    tab.complaints, tab.requests = [], []
    tab.on("console", lambda message: tab.complaints.append(message.text))
    tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
    tab.on("request", lambda request: tab.requests.append(request.url))
    tab.goto(path.as_uri())
    yield tab
    tab.close()


def names(tab):
    return tab.eval_on_selector_all(
        "#claims tbody tr",
        "all => all.filter(r => !r.hidden).map(r => r.cells[0].innerText.trim())",
    )


def test_a_browser_opens_it_without_an_error_or_a_request(opened):
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []
    assert len(opened.requests) == 1 + sum(url.startswith("data:") for url in opened.requests)
    assert opened.title() == "Report"


def test_clicking_a_column_sorts_by_what_it_means(opened):
    opened.click("#claims th:has-text('speedup') button")
    assert names(opened)[0].startswith("ch09/claim_32[rung_98]")
    opened.click("#claims th:has-text('speedup') button")
    assert names(opened)[0] == "ch11/absent"
    assert names(opened)[1].startswith("ch00/claim_0[rung_0]")
    opened.click("#claims th:has-text('claim') button")
    assert names(opened)[0].startswith("ch00/claim_0[rung_0]")
    assert opened.get_attribute("#claims th:has-text('claim')", "aria-sort") == "ascending"


def test_filters_narrow_the_table_the_charts_and_the_sections(opened):
    opened.fill("#words", "claim_3[")
    kept = [f"ch0{i // 10}/claim_3[rung_{i}]" for i in (9, 10, 11)]
    assert [name.removesuffix(" *") for name in names(opened)] == kept
    assert opened.inner_text("#count") == "3 of 100"
    assert opened.locator("section.claim:visible").count() == 3
    assert opened.locator("article:visible").count() == 2
    assert opened.locator(".chart .group:visible").count() == 2
    opened.fill("#words", "")
    opened.select_option("#verdict", "slower")
    assert len(names(opened)) == 19
    opened.select_option("#chapter", "ch00")
    assert len(names(opened)) == 2
    opened.fill("#words", "no such claim")
    assert names(opened) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_of_a_phone_or_a_screen(opened, width):
    opened.set_viewport_size({"width": width, "height": 844})
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


def test_the_readmes_tables_are_those_of_the_last_accepted_run(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = ("results/h200.json", "results/2xh200.json")
    command = f"python -m pytest_aiperf report --readme README.md {' '.join(files)}"
    (copy := tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert main(["report", "--readme", str(copy), *(str(ROOT / file) for file in files)]) == 0
    assert text == copy.read_text(encoding="utf-8"), f"run: {command}"
