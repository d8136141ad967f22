"""The page is complete, loads and runs nothing from outside, and works in a browser."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from pytest_aiperf.cli import main
from pytest_aiperf.model import (
    Against,
    Evidence,
    EvidenceKind,
    Expectation,
    Finding,
    Interval,
    KernelRecord,
    Limit,
    Outcome,
    Profile,
    Recorded,
    Replicate,
    Round,
    Source,
    Trace,
    Verdict,
    Work,
)
from pytest_aiperf.records.results import document
from pytest_aiperf.report import aggregate, charts, markdown, page, side_by_side, source_code, views
from pytest_aiperf.rules.stats import mean_call_s
from pytest_aiperf.schema import to_json
from tests.plugin.records import HOST, ladder, result, timing

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
        Replicate(i, (Round("OBBO", {"baseline": (b, b), "optimized": (o, o)}, 1980, 4),) * 3)
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
    assert {unquote(a["data-claim"]) for a in rows} == {a["id"] for a in sections}
    assert len(text.encode()) < 3_000_000
    assert text.count("<h4>Ladder") == 33


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
    assert [tag for tag, _ in seen.tags].count("script") == 2
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


def test_a_tile_counts_only_claims_that_are_met_as_faster():
    results = [
        rich("a/1"),
        rich("a/2", outcome=Outcome.FAILED, message="speedup lost"),
        rich("a/3", outcome=Outcome.FAILED, message="undecided: too wide"),
    ]
    text = page.page(results, {}, "Report")
    tiles = re.findall(r'<div class="tile"><b[^>]*>(\d+)</b><span>(FASTER[^<]*)', text)
    assert tiles == [("1", "FASTER"), ("1", "FASTER, undecided"), ("1", "FASTER, lost")]
    assert '<span class="tag t-faster undecided">FASTER, undecided' in text
    assert '<span class="tag t-undecided">UNDECIDED</span>' in text


def test_artifacts_are_linked_from_where_the_page_lies(tmp_path):
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
        "opcode LDG.E.128 in copy = 1 - 1 holds",
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
        "first arm", "two", "four", "library", "limit: copy",
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
    legend = 1
    assert lines.count("lib") == lines.count("lim") == len(picture.steps) + legend
    assert lines.count("whisker") == 2 + legend


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


@pytest.mark.parametrize(("limit_s", "drawn"), [(5.2e-4, True), (2e-3, False)])
def test_a_limit_that_differs_between_rungs_measured_apart_is_not_drawn(limit_s, drawn):
    two, four = ladder(two=4e-3, four=1e-3)
    apart = dataclasses.replace(four, timing=timing(4e-3, 1e-3), first=None)
    picture = charts.ladder([*limited([two], 5e-4), *limited([apart], limit_s)])
    assert ("limit: copy" in [step.name for step in picture.steps]) == drawn


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
    for state, tone, figures in (
        ("not looked at", "soft", "--"),
        ("does not hold", "bad", "-5"),
        ("holds", "good", "51"),
        ("condition (the baseline meets it, too)", "soft", "11"),
    ):
        baseline, optimized = figures
        cells = f'<td>{baseline}</td><td>{optimized}</td><td class="l {tone}">{state}</td>'
        assert f'<td class="l">launches &lt;= 1</td>{cells}' in text
    assert "not checked" not in text
    assert '<p class="message">9 % wide: measure again</p>' in text
    assert "measure again</p>" not in page.page([rich(message="measure again")], {}, "Report")


def test_unknown_ceilings_are_not_drawn():
    text = page.page([rich(limits={})], {}, "Report")
    assert 'id="roofline"' not in text
    assert 'id="shares"' not in text
    assert 'id="roofline"' in page.page([rich()], {}, "Report")


def in_ranks(count, seconds, work=None, key="{}xh200", claim="ch04/sum"):
    nodeid = "tests/ch04/test_x.py::test_sum" + f"[ranks={count}]" * (count != 2)
    each = timing(baseline=2 * seconds, optimized=seconds)
    return result(claim, nodeid=nodeid, key=key.format(count), timing=each, work=work)


def test_scaling_is_the_rate_per_gpu_over_that_of_the_smallest_number():
    strong = [in_ranks(n, s, Work(flops=8e9 / n)) for n, s in ((1, 8e-3), (2, 5e-3), (8, 1e-3))]
    [by_ranks] = aggregate.by_ranks(strong[::-1])
    chart = charts.scaling(by_ranks)
    points = chart.curves["optimized"]
    assert [point.ranks for point in points] == [1, 2, 8]
    assert [point.efficiency for point in points] == pytest.approx([1, 0.8, 1])
    assert [point.y for point in points][::2] == pytest.approx(chart.ideal)
    assert points[1].y > chart.ideal[0] + (chart.ideal[1] - chart.ideal[0]) / 3
    weak = charts.scaling({n: in_ranks(n, s) for n, s in ((2, 5e-3), (4, 10e-3))})
    assert weak.is_weak
    assert [point.efficiency for point in weak.curves["baseline"]] == pytest.approx([1, 0.5])


def test_only_claims_in_several_numbers_of_ranks_are_drawn_as_curves():
    rows = [
        *(in_ranks(n, 5e-3) for n in (2, 4)),
        in_ranks(2, 5e-3, key="{}xb200"),  # another kind of GPU
        in_ranks(2, 5e-3, key="{}x4xh200"),  # eight, on two nodes
        result("ch04/alone"),
    ]
    assert [list(ranks) for ranks in aggregate.by_ranks(rows)] == [[2, 4, 8]]
    text = page.page(rows, {}, "Report")
    assert 'id="scaling"' in text
    assert "The work per GPU is taken to be the same" in text
    assert '<a href="#ch04/sum%402x4xh200">2x4xh200</a></td><td>10.00 ms</td><td>100 %' in text
    assert 'id="scaling"' not in page.page(rows[3:], {}, "Report")


def test_a_folder_gets_the_page_and_the_same_as_markdown(tmp_path):
    data = [tmp_path / "run" / "results.json"]
    path = page.write_report([rich(), rich("ch08/x")], {}, tmp_path / "out", data)
    assert '<a href="./../run/results.json">results.json</a>' in path.read_text(encoding="utf-8")
    assert path == tmp_path / "out" / "index.html"
    assert {p.name for p in path.parent.iterdir()} == {"index.html", "report.md"}
    lines = path.with_name("report.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("## ")] == ["## ch07", "## ch08"]


def test_the_command_writes_html_and_markdown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = document([result(title="Wide loads.")], {"gpus": 3}, datetime(2025, 1, 1, tzinfo=UTC))
    Path("r.json").write_text(json.dumps(to_json(content)))
    assert main(["report", "r.json"]) == 0
    assert 'id="claims"' in Path("report.html").read_text()
    assert main(["report", "r.json", "--format=md", "-o", "r.md"]) == 0
    assert "### Wide loads." in Path("r.md").read_text()


def test_records_with_gaps_still_make_a_page():
    gaps = [
        rich(timing=timing(replicates=())),
        dataclasses.replace(rich("a", timing=None, gpu=None), speedup=Interval(0.0, 0.5, 0.9)),
    ]
    text = page.page(gaps, {"commit": 3, "gpus": "x"}, "Report")
    assert text.count('<section class="claim"') == 2
    assert page.page([], {}, "Report").count("<table") == 1


def test_failures_come_first_then_unclear_verdicts_then_the_biggest_changes():
    def recorded(claim, speedup, *, lowest=None, **changes):
        entry = Recorded((1.98, 2.0, 2.02), 3, "1a2b3c4d5e6f", "", "2025-01-01", lowest=lowest)
        expectation = Expectation(recorded=entry, stale=changes.pop("stale", False))
        return rich(claim, speedup, expectation=expectation, **changes)

    results = [
        recorded("a/same", 2.02),
        recorded("a/better", 2.3),
        recorded("a/stale", 4.0, stale=True),
        recorded("a/worse", 1.5),
        recorded("a/as_slow_before", 1.5, lowest=1.52),
        rich("b/unclear", verdict=Verdict.INCONCLUSIVE, message="9 % wide"),
        rich("b/slow", verdict=Verdict.SLOWER, outcome=Outcome.FAILED, message="not\nfaster"),
        rich("b/crash", outcome=Outcome.ERROR, message="signal 11"),
        rich("b/skipped", outcome=Outcome.SKIPPED, message="needs sm100"),
    ]
    text = page.page(results, {}, "Report")
    (first,) = re.findall('<ul class="first">.*?</ul>', text, re.DOTALL)
    items = [item.replace("<wbr>", "") for item in re.findall("<li.*?</li>", first)]
    assert [" ".join(re.sub("<[^>]*>", " ", item).split()) for item in items] == [
        "ERROR b/crash signal 11",
        "FAILED b/slow not",
        "INCONCLUSIVE b/unclear 9 % wide",
        "REGRESSED a/worse 1.500x, expected 2.00x: a ratio of 0.750x [0.739, 0.761]",
        "IMPROVED a/better 2.300x, expected 2.00x: a ratio of 1.150x [1.134, 1.166]",
    ]
    assert text.index('class="first"') < text.index('id="speedups"')
    assert 'id="first"' not in page.page([recorded("a/same", 2.02)], {}, "Report")


def test_anchors_are_the_chapters_name_and_the_claims_id():
    two = [rich("ch05/a b[x]"), rich("ch05/c"), rich("ch05/c", key="b200")]
    tags = Tags(page.page(two, {}, "Report")).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"ch05", "ch05/a_b[x]", "ch05/c@h200", "ch05/c@b200"} <= set(ids)
    targets = {a["href"] for tag, a in tags if tag == "a" and a.get("href", "").startswith("#")}
    assert {unquote(target)[1:] for target in targets} <= set(ids)
    assert "#ch05/a_b%5Bx%5D" in targets


def test_a_noisy_host_is_a_warning_and_its_cpu_is_shown():
    calm, noisy = (rich("ch05/x", host=True, key="cpu", floor=floor) for floor in (0.19, 0.947))
    machine = {"cpu": {"brand_raw": "EPYC 9654", "count": 16}}
    text = page.page([noisy], machine, "Report")
    assert '<p class="warning">Noisy host: two identical arms differ by 95%, so' in text
    assert "EPYC 9654, 16 logical CPUs" in text
    named = page.page(
        [rich("ch05/x", **HOST | {"stack": {"processor": "Xeon"}})], machine, "Report"
    )
    assert "<dd>Xeon</dd>" in named
    assert "EPYC 9654" not in named
    assert 'class="warning"' not in page.page([calm], {"cpu": "?"}, "Report")


def test_source_lines_and_records_are_linked(tmp_path):
    file = tmp_path / "tests" / "ch07" / "test_x.py"
    file.parent.mkdir(parents=True)
    file.write_text(TEST.format(title="T."))
    lines = file.read_text().splitlines()
    sources = {
        arm: (Source.of("tests/ch07/test_x.py", first, first + 1, lines),)
        for arm, first in (("baseline", 6), ("optimized", 9))
    }
    record = rich(nodeid="tests/ch07/test_x.py::test_double", sources=sources)
    address = "https://github.com/o/r/blob/HEAD/"
    data = [tmp_path / "in" / "r.json"]
    text = page.page([record], {}, "R", root=tmp_path, folder=tmp_path, data=data, address=address)
    links = {a["href"] for tag, a in Tags(text).tags if tag == "a"}
    assert {
        "./in/r.json",
        f"{address}tests/ch07/test_x.py",
        f"{address}tests/ch07/test_x.py#L6-L7",
        f"{address}tests/ch07/test_x.py#L9-L10",
    } <= links
    assert 'class="cut" data-n="6"' in text
    assert 'class="add" data-n="10"' in text
    plain = page.page([record], {}, "R", root=tmp_path)
    assert "https://" not in plain
    assert '<span class="mono">tests/ch07/test_x.py:6</span>' in plain


def test_code_that_both_arms_use_is_shown_once(tmp_path):
    (tmp_path / "k.py").write_text("shared = 1\n\nslow = 2\n\nfast = 3\n")
    lines = (tmp_path / "k.py").read_text().splitlines()
    shared, slow, fast = (Source.of("k.py", n, n, lines) for n in (1, 3, 5))
    record = rich(sources={"baseline": (shared, slow), "optimized": (shared, fast)})
    html = views.code(record, tmp_path)
    assert html.count("shared") == 1
    assert "Code of both arms, 1 line<" in html
    assert re.findall(r'<span class="(\w+)" data-n="(\d)"', html) == [("cut", "3"), ("add", "5")]
    alike = views.code(rich(sources=dict.fromkeys(("baseline", "optimized"), (shared,))), tmp_path)
    assert "<details open>" in alike
    assert "cut" not in alike
    only = views.code(rich(sources={"optimized": (fast,)}), tmp_path)
    assert 'class="add"' not in only
    assert 'data-n="5"' in only
    assert views.code(rich(), tmp_path) == ""


def test_long_code_says_how_many_lines_are_left_out(tmp_path):
    text = "\n".join(f"x{i} = {i}" for i in range(200))
    (tmp_path / "k.py").write_text(text)
    source = Source.of("k.py", 1, 200, text.splitlines())
    html = views.code(rich(sources={"optimized": (source,)}), tmp_path)
    assert html.count("data-n=") == source_code.MAX_LINES == 140
    assert "... 60 more lines" in html


def test_the_line_of_a_share_joins_all_arms():
    limit = Limit("copy", 1.0, 2.0, "B/s", 0.5)
    shares = {"baseline": 0.6, "optimized": 0.8, "library": 0.4}
    limits = {arm: dataclasses.replace(limit, share=share) for arm, share in shares.items()}
    html = views.shares([rich(limits=limits)])
    (line,) = re.findall('<line class="join" x1="(.*?)%" x2="(.*?)%" y1="9"', html)
    assert [float(end) for end in line] == pytest.approx([40 / 1.05, 80 / 1.05], abs=0.01)
    assert "library: 40 % of copy" in html


@pytest.mark.parametrize("view", [views.roofline, views.shares])
@pytest.mark.parametrize("outcome", [Outcome.INVALID, Outcome.ERROR])
def test_claims_that_were_not_judged_have_no_place_below_a_limit(view, outcome):
    limit = Limit("copy", 9e12, 4.2e12, "B/s", 2.1)
    wrong = rich("ch07/wrong", outcome=outcome, verdict=None, limits={"optimized": limit})
    failed = rich(outcome=Outcome.FAILED)
    assert view([wrong]) == ""
    assert view([failed, wrong]) == view([failed]) != ""


def test_ceilings_close_to_each_other_share_a_label():
    def at(name, limit, unit="FLOP/s"):
        return Limit(name, limit / 2, limit, unit, 0.5)

    ceilings = [at("fp16", 7.9e14), at("bf16", 8.1e14), at("fp32", 6e13), at("copy", 4e12, "B/s")]
    chart = charts.roofline([rich(limits={"optimized": ceiling}) for ceiling in ceilings])
    assert [label.text for label in chart.labels] == [
        "bf16 810.0 TFLOP/s, fp16 790.0 TFLOP/s",
        "fp32 60.00 TFLOP/s",
        "copy 4.000 TB/s",
    ]
    ends = sorted(label.y for label in chart.labels)
    assert all(b - a > charts.LABEL_HEIGHT for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize(
    "view", [views.speedups, views.ladder, views.roofline, views.shares, views.evidence]
)
def test_a_view_without_figures_is_empty(view):
    bare = rich(speedup=1.0, timing=None, limits={}, evidence=())
    assert view([dataclasses.replace(bare, speedup=None)]) == ""
    assert views.replicates(bare) == ""


def test_colors_of_text_contrast_with_both_pages():
    colors = dict(re.findall(r"(--\w+): light-dark\((#\w+, #\w+)\)", views.style()))

    def luminance(color):
        digits = color[1:] if len(color) == 7 else "".join(c * 2 for c in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for name in ("text", "soft", "good", "bad", "warn", "library", "link", *"kscnfp"):
        for ground in (
            ("page", "card", "add", "cut") if name in (*"kscnfp", "text") else ("page", "card")
        ):
            for ink, paper in zip(
                *(colors[f"--{n}"].split(", ") for n in (name, ground)), strict=True
            ):
                low, high = sorted((luminance(ink), luminance(paper)))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, ground, ink, paper)


def test_two_runs_are_shown_side_by_side_the_changed_claims_first(tmp_path, monkeypatch, capsys):
    old = [rich("a/same"), rich("a/worse"), rich("a/code"), rich("a/gone")]
    new = [rich("a/same"), rich("a/worse", 1.5), rich("a/code", code="ffff"), rich("a/new")]
    new[0] = dataclasses.replace(new[0], stack={**new[0].stack, "torch": "2.12.0"})
    text = side_by_side.page(old, new)
    rows = re.findall(r'<tr data-claim="(.*?)" data-verdict="(.*?)".*?</tr>', text, re.DOTALL)
    assert rows == [
        ("h200/a/worse", "regressed"),
        ("h200/a/gone", "gone"),
        ("h200/a/code", "stale"),
        ("h200/a/new", "new"),
        ("h200/a/same", "same"),
    ]
    worse = text[text.index('data-verdict="regressed"') : text.index('data-verdict="gone"')]
    assert "0.750x" in worse
    assert "0.739 to 0.761" in worse
    assert "2.000x" in worse
    assert "1.500x" in worse
    assert worse.count("1a2b3c4d5e6f") == 1
    stale = text[text.index('data-verdict="stale"') : text.index('data-verdict="new"')]
    assert '1a2b3c4d5e6f<div class="warn">ffff</div>' in stale
    assert "Differs: torch 2.11.0 -&gt; 2.11.0, 2.12.0" in text
    assert text.count('<svg height="26"') == 3
    monkeypatch.chdir(tmp_path)
    document_of = document([result()], {}, datetime(2025, 1, 1, tzinfo=UTC))
    Path("r.json").write_text(json.dumps(to_json(document_of)))
    assert main(["compare", "r.json", "r.json", "--html", "out/c.html"]) == 0
    assert 'data-verdict="same"' in Path("out/c.html").read_text()


def test_runs_without_a_common_claim_are_shown_side_by_side():
    hostile = rich(f"a/{HOSTILE}", stack={HOSTILE: HOSTILE}, code=HOSTILE)
    text = side_by_side.page([hostile], [])
    assert 'data-verdict="gone"' in text
    assert "alert(1)</script>" not in text
    assert not [tag for tag, _ in Tags(text).tags if tag == "img"]
    assert "<tbody>" in side_by_side.page([], [])


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


def tip(tab):
    shown = tab.locator("#aiperf-tip:visible")
    return shown.inner_text() if shown.count() else None


def test_a_marks_figures_are_shown_on_hover_and_on_focus(opened):
    assert tip(opened) is None
    row = opened.locator(".chart .tr").first
    row.locator("svg").hover()
    assert tip(opened).startswith("ch00/claim_0[rung_0]: 0.500x [0.495, 0.505]")
    assert "baseline 2.014 ms, optimized 3.980 ms" in tip(opened)
    opened.keyboard.press("Escape")
    assert tip(opened) is None
    opened.locator("#verdict").focus()
    opened.keyboard.press("Tab")
    row.locator("a").focus()
    assert tip(opened).startswith("ch00/claim_0[rung_0]: 0.500x")
    named = opened.eval_on_selector_all("svg[role=img]", "all => all.every(s => s.ariaLabel)")
    assert named
    assert opened.locator("svg title").count() == 0


def test_a_tap_shows_a_marks_figures_and_the_second_tap_follows_it(chromium, tmp_path, written):
    path = tmp_path / "report.html"
    path.write_text(written, encoding="utf-8")
    phone = chromium.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    tab = phone.new_page()
    tab.goto(path.as_uri())
    tab.locator(".chart .tr svg").nth(1).tap()
    assert tip(tab).startswith("ch00/claim_0[rung_1]")
    box = tab.locator("#aiperf-tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    dot = tab.locator("#roofline ~ div a circle").last
    dot.tap()
    assert "FLOP/B" in tip(tab)
    assert "#" not in tab.url
    dot.tap()
    assert "#ch" in tab.url
    phone.close()


def test_a_phone_shows_names_verdicts_and_speedups_without_scrolling(opened):
    opened.set_viewport_size({"width": 390, "height": 844})
    ends = opened.eval_on_selector_all(
        "#claims tbody tr:first-child td", "all => all.map(c => c.getBoundingClientRect().right)"
    )
    assert ends[2] <= 390
    opened.eval_on_selector(".scroll:has(#claims)", "element => element.scrollLeft = 200")
    left = opened.eval_on_selector("#claims tbody td", "c => c.getBoundingClientRect().left")
    assert left == pytest.approx(14, abs=1)  # the name stays


def test_the_contents_stay_in_view(opened):
    opened.evaluate("window.scrollTo(0, 5000)")
    assert opened.eval_on_selector("nav", "nav => nav.getBoundingClientRect().top") == 0
    opened.click("nav a:has-text('ch07')")
    top = opened.eval_on_selector("#ch07", "head => head.getBoundingClientRect().top")
    bottom = opened.eval_on_selector("nav", "nav => nav.getBoundingClientRect().bottom")
    assert bottom <= top < 300


def test_the_page_has_landmarks_and_headings_in_order(opened):
    assert opened.locator("main, nav, body > header, footer").count() == 4
    levels = opened.eval_on_selector_all("h1, h2, h3, h4, h5", "all => all.map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    ids = opened.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
    unnamed = opened.eval_on_selector_all(
        "a, button, input, select, [tabindex]",
        "all => all.filter(e => !(e.ariaLabel || e.textContent.trim())).length",
    )
    assert unnamed == 0
