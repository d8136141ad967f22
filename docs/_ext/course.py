"""Sphinx extension: fills the course's pages from the tests, the kernels and the records.

A comment marks where: ``<!-- claim ch07/vectorized_copy -->``, ``<!-- syllabus -->``,
``<!-- gpus -->``, ``<!-- results -->`` or ``<!-- proof -->``. No test is imported and nothing is
measured. A claim whose code has changed since all of its records is a warning, unless
``course_unmeasured`` lists it.
"""

import ast
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pytest
from aiperf_selfcheck import record as selfcheck
from docutils.nodes import make_id
from sphinx.application import Sphinx
from sphinx.util import logging

from pytest_aiperf.build.nvcc import read_sources
from pytest_aiperf.machine import requirements
from pytest_aiperf.model import ARMS, Against, Gpu, Result
from pytest_aiperf.records.results import read_results
from pytest_aiperf.report import aggregate, formatting, markdown, source_code, terminal, views
from pytest_aiperf.report.formatting import escape
from pytest_aiperf.rules import roofline, stats
from pytest_aiperf.sources import source_hash
from pytest_aiperf.text import si

FILES: Final = re.compile(r"<!-- files.*?<!-- end of files -->\n*", re.DOTALL)
"""What a page shows on GitHub in place of what this extension fills in."""
PLACE: Final = re.compile(r"^<!-- (claim|syllabus|gpus|results|proof) ?(\S*) -->$", re.MULTILINE)
GPUS: Final = [
    Gpu(name, arch, "", arch, 0, 0, 1 << 50, "")
    for arch, name in (
        *(("sm80", "A100"), ("sm86", "RTX 30"), ("sm89", "L40S, RTX 40"), ("sm90", "H100, H200")),
        *(("sm100", "B200"), ("sm103", "B300"), ("sm120", "RTX 50"), ("sm121", "DGX Spark")),
    )
]
"""Columns of the table of GPUs: one per architecture, with memory enough for every claim."""
WORDS: Final = "../glossary.md#words-of-the-project"
"""Where the glossary explains rungs, evidence and kinds of baselines."""
MEASURED: Final = "../glossary.md#words-of-the-measurement"
"""Where the glossary explains replicates and rounds."""
LIMIT: Final = "../reading.md#the-limit"
"""Where the guide explains what limits an arm."""
FIRST_ARM: Final = "first arm"
"""Name of a ladder's first arm if its test does not name it in a constant."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """A test function with the fixture ``compare``, as its file defines it."""

    root: Path
    path: str  #: The test file, relative to ``root``.
    function: ast.FunctionDef

    @property
    def name(self) -> str:
        """Id of the claim, without parameters."""
        return requirements.claim_id(f"{self.path}::{self.function.name}")

    @cached_property
    def requirements(self) -> requirements.Requirements:
        marks = []
        for node in self.function.decorator_list:
            call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
            name = ast.unparse(call.func).removeprefix("pytest.mark.")
            if name != "parametrize":
                values = {str(k.arg): constant(k.value) for k in call.keywords}
                marks.append(getattr(pytest.mark, name)(**values).mark)
        return requirements.requirements_of(marks)

    @cached_property
    def files(self) -> set[Path]:
        """The files that its hash is computed from: the test, what it imports and builds."""
        found: set[Path] = set()
        queue = [self.root / self.path]
        while queue:
            if (file := queue.pop()) in found:
                continue
            found.add(file)
            text = file.read_text("utf-8")
            for node in ast.walk(ast.parse(text)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}", *(f"{node.module}.{a.name}" for a in node.names)]
                modules = [self.root.joinpath(*n.split(".")).with_suffix(".py") for n in names]
                queue += [module for module in modules if module.is_file()]
            for source in re.findall(r'nvcc\("([^"]+)"', text):
                kernels = self.root / "kernels"
                found |= read_sources(kernels / source, [kernels / "include"]).keys()
        return found

    @cached_property
    def module(self) -> ast.Module:
        return ast.parse((self.root / self.path).read_text("utf-8"))

    @property
    def kernels(self) -> list[Path]:
        """The CUDA files that the test builds."""
        text = (self.root / self.path).read_text("utf-8")
        names = dict.fromkeys(re.findall(r'nvcc\("([^"]+)"', text))
        return [self.root / "kernels" / name for name in names]

    def argument(self, name: str) -> ast.expr | None:
        """Return an argument of the call of ``compare``."""
        for node in ast.walk(self.function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "compare":
                return next((k.value for k in node.keywords if k.arg == name), None)
        return None

    @property
    def first_arm(self) -> str:
        """Name of the first arm of the ladder, if a constant of the test has it."""
        for node in self.module.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LADDER":
                first = node.value.elts[0] if isinstance(node.value, ast.List) else None
                if isinstance(first, ast.Constant):
                    return str(first.value)
        baseline = self.argument("baseline")
        key = baseline.slice if isinstance(baseline, ast.Subscript) else None
        return str(key.value) if isinstance(key, ast.Constant) else FIRST_ARM

    @property
    def inputs(self) -> str:
        """Source of the function that makes the inputs; "" if it has no name."""
        name = ast.unparse(self.argument("inputs") or ast.Constant(""))
        text = (self.root / self.path).read_text("utf-8")
        for node in self.module.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return ast.get_source_segment(text, node) or ""
        return ""

    @property
    def without_gpu(self) -> str:
        """What pytest does with the claim on a machine without a GPU."""
        wants = self.requirements
        return "measured" if wants.host else "checked" if wants.checked_on_cpu else "built"

    def run(self) -> str:
        """Return how to run the claim, and what it needs."""
        wants = self.requirements
        if wants.host:
            return f"no GPU is needed.\n\n```console\n$ pytest --cpu {self.path}\n```"
        gpus = f"{wants.count} GPUs are" if wants.count > 1 else "a GPU is"
        archs = " or ".join(wants.archs) or f"sm{wants.min_sm or 80} or newer"
        return (
            f"{gpus} needed ({archs}). Without `--gpu` the claim is only {self.without_gpu}.\n\n"
            f"```console\n$ pytest --gpu {self.path}\n```"
        )


class Course:
    """The claims below ``root`` and their records, as Markdown."""

    def __init__(self, root: Path, unmeasured: Sequence[str] = ()) -> None:
        self.root = root
        self.unmeasured = unmeasured
        self.claims: dict[str, Claim] = {}
        for file in [*sorted(root.glob("tests/ch*/*.py")), *sorted(root.glob("tests/labs/*.py"))]:
            for node in ast.parse(file.read_text("utf-8")).body:
                arguments = node.args.args if isinstance(node, ast.FunctionDef) else []
                if "compare" in [argument.arg for argument in arguments]:
                    claim = Claim(root, file.relative_to(root).as_posix(), node)
                    self.claims[claim.name] = claim
        self.paths = sorted((root / "results").glob("*.json"))
        self.proofs = [path for path in self.paths if path.name.startswith("proof-")]
        kinds = ("proof-", "ceilings-")
        paths = [path for path in self.paths if not path.name.startswith(kinds)]
        self.results = [result for path in paths for result in read_results(path)]
        self.address = source_code.repository(root)

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the records: they are not those of the code."""
        stale = set()
        for name in sorted({result.claim.partition("[")[0] for result in self.results}):
            if name not in self.claims:
                yield f"there is a record of {name}, which is not a claim: remove it from results/"
                continue
            if self.stale(name) == self.records(name).keys():
                stale.add(name)
        for name in sorted(stale - {*self.unmeasured}):
            yield (
                f"{name} has not been measured since its code changed: measure and accept it, or "
                "list it in course_unmeasured (docs/conf.py)"
            )
        for name in sorted({*self.unmeasured} - stale):
            yield f"the record of {name} is not stale: remove it from course_unmeasured"

    def stale(self, name: str) -> set[str]:
        """Return the kinds of GPU on which a claim was measured with other code only."""
        code, records = source_hash.identity(self.claims[name].files), self.records(name)
        return {key for key, rungs in records.items() if any(r.code != code for r in rungs)}

    def records(self, name: str) -> dict[str, list[Result]]:
        """Return a claim's records by kind of GPU; rungs are in the order of the test."""
        rungs = [result for result in self.results if result.claim.partition("[")[0] == name]
        rungs.sort(key=lambda result: result.rung_index)
        return {key: [r for r in rungs if r.key == key] for key in sorted({r.key for r in rungs})}

    def prose(self, text: str) -> str:
        """Escape text for Markdown; options and words in backquotes are code, claims are links."""
        targets = {Path(claim.path).name: name for name, claim in self.claims.items()}
        targets |= {name: name for name in self.claims}
        words = re.split(r"(`[^`]+`|--\w[\w=-]*|[\w/]+(?:::\w+|\.py)*)", text)
        return "".join(
            f"[{targets[word].rpartition('/')[2]}](#{targets[word]})"
            if word in targets
            else (word if word[:1] == "`" else f"`{word}`" if word[:2] == "--" else escape(word))
            for word in words
        )

    def claim(self, name: str) -> str:
        """Return a claim's section: what was measured and why, where it stops, how to repeat it."""
        claim = self.claims[name]
        doc = ast.get_docstring(claim.module) or name
        title = self.prose(doc.partition("\n")[0].rstrip("."))
        mechanism, *limits = map(self.prose, source_code.explanation(claim.path, self.root))
        together = [each.name for each in self.claims.values() if each.path == claim.path]
        if len(together) > 1:
            title += f" ({escape(claim.function.name.removeprefix('test_'))})"
        if name != together[0]:  # its file's text is in the section of the first claim
            mechanism, limits = f"[{escape(together[0])}](#{together[0]}) has the mechanism.", []
        parts = [f"({name})=\n## {title}", mechanism]
        records = self.records(name)
        sections = {key: "\n\n".join(self.measured(rungs)) for key, rungs in records.items()}
        for key in self.stale(name):
            text = "Not measured since the code changed: the figures are those of the code before."
            sections[key] = f"```{{warning}}\n{text}\n```\n\n{sections[key]}"
        if len(sections) > 1:
            tabs = [
                f":::{{tab-item}} {k}\n:sync: {k}\n\n{text}\n:::" for k, text in sections.items()
            ]
            parts += [side_by_side(records), "\n".join(["::::{tab-set}", *tabs, "::::"])]
        else:
            parts += sections.values() or ["No result is recorded; the command below measures it."]
        parts += self.kernels(claim)
        panes = [
            dropdown(f"baseline and {aggregate.rung_name(result) or 'optimized'}", raw(code))
            for result in next(iter(records.values()), [])
            if (code := views.code(result, self.root, self.address))
        ]
        if panes and claim.inputs:
            panes.append(dropdown("inputs", listing(claim.inputs, "python")))
        parts += panes or self.whole_files(claim)
        if limits:
            parts += [f"**Conditions and limits.** {limits[0]}", *limits[1:]]
        source = f" ([test]({self.address}{claim.path}))" if self.address else ""
        return "\n\n".join([*parts, f"**Repeat it**{source}: {claim.run()}"])

    def kernels(self, claim: Claim) -> Iterator[str]:
        """Yield the comment at the top of each CUDA file of a claim, which explains its kernels."""
        for path in claim.kernels:
            file = path.relative_to(self.root).as_posix()
            link = f"[`{file}`]({self.address}{file})" if self.address else f"`{file}`"
            yield f"**The kernels**: {link}"
            for block in header(path.read_text("utf-8")):
                if block.startswith("  "):
                    text = textwrap.dedent(block)
                    yield f"```{{code-block}} text\n:class: narration\n\n{text}\n```"
                else:
                    yield self.prose(" ".join(block.split()))

    def whole_files(self, claim: Claim) -> Iterator[str]:
        """Yield the files of a claim that has no record of its arms' lines."""
        test = (self.root / claim.path).read_text("utf-8")
        doc = claim.module.body[0]
        body = "\n".join(test.split("\n")[doc.end_lineno or 0 :]).strip("\n")
        yield dropdown(claim.path, listing(body, "python"))
        for path in claim.kernels:
            code = re.sub(r"\A(//.*\n)+", "", path.read_text("utf-8")).strip("\n")
            yield dropdown(path.relative_to(self.root).as_posix(), listing(code, "cuda"))

    def diagnoses(self, result: Result) -> dict[str, str]:
        """Return what limits each arm by the present rules; a record keeps those of its day."""
        file = self.root / f"results/ceilings-{result.key}.json"
        ceilings = json.loads(file.read_text("utf-8"))["ceilings"] if file.is_file() else {}
        timings = (result.timing, *result.also)
        timing = next((t for t in timings if t and t.unit == "s"), None)
        return {
            arm: roofline.diagnose(
                result.limits.get(arm),
                result.traces.get(arm),
                stats.mean_call_s(timing.replicates, arm),
                ceilings=ceilings,
                sms=result.gpu.sms if result.gpu else 0,
            )
            for arm in ARMS
            if timing and arm in result.diagnosis
        }

    def measured(self, rungs: Sequence[Result]) -> Iterator[str]:
        """Yield what one kind of GPU showed: speedups, evidence, limits and conditions."""
        first_arm = self.claims[rungs[0].claim.partition("[")[0]].first_arm
        if len(rungs) > 1:
            yield raw(views.ladder(rungs, first_name=first_arm) or views.speedups(rungs))
        else:
            yield (
                f"Large dots are the speedups of the [replicates]({MEASURED}), small dots those of "
                "their rounds; the band is the 99 % interval:"
            )
            yield raw(views.replicates(rungs[0]))
        grid = terminal.grid(
            rungs, lambda r: aggregate.rung_name(r) or short_name(r), ("rate", "expected")
        )
        grid = grid.replace("| library |", "| over library |", 1)
        yield grid.replace("| claim |", f"| [rung]({WORDS}) |", 1) if rungs[0].ladder else grid
        if any(r.against is Against.NAIVE for r in rungs):
            yield rf"\* [naive baseline]({WORDS}): left out of geometric means"
        if evidence := views.evidence(rungs):
            yield f"**Why it is faster: the [evidence]({WORDS})**\n\n{raw(evidence)}"
        stops = [
            f"- {label(r, arm, first_arm)}: {self.prose(text)}"
            for arm in ARMS
            for r in rungs
            # a ladder's further rungs have the rung before, or the same, as their baseline
            if (arm == "optimized" or not r.ladder or r is rungs[0])
            and (text := self.diagnoses(r).get(arm))
        ]
        if stops:
            heading = f"**Where it stops** ([a rule of thumb]({LIMIT}))\n"
            yield "\n".join([heading, *stops])
        first = rungs[0]
        metric = first.timing.metric.value if first.timing else "no figure"
        judged = {"device": "device time", "wall": "wall time", "memory": "peak memory"}
        versions = (f"{name} {v}" for name, v in first.stack.items() if name != "processor")
        noisy = first.host and first.floor > 0
        noise = f" Identical arms differed by up to {first.floor:.1%}." if noisy else ""
        yield (
            f"{amount(rungs)}Judged on {judged.get(metric, metric)}; [baseline]({WORDS}): "
            f"{', '.join(dict.fromkeys(r.against for r in rungs))}. Recorded on "
            f"{first.started[:10]} on {escape(formatting.measured_on(first))} in "
            f"{sum(r.seconds for r in rungs):.0f} s ({escape(', '.join(versions))}).{noise}"
        )

    def gpus(self) -> str:
        """Return the table of what runs where, from the markers of the tests."""
        columns: dict[tuple[str, ...], list[Gpu]] = {}  # GPUs that run the same claims share one
        for gpu in GPUS:
            wants = [claim.requirements for claim in self.claims.values()]
            runs = (
                "0" if w.host else "" if w.missing([gpu] * w.count) else f"{w.count}" for w in wants
            )
            columns.setdefault(tuple(runs), []).append(gpu)
        heads = [", ".join(f"{gpu.name} ({gpu.arch})" for gpu in gpus) for gpus in columns.values()]
        rows = []
        for (name, claim), *counts in zip(self.claims.items(), *columns, strict=True):
            breakable = escape(name).replace("/", "/<wbr>").replace("_", "_<wbr>")
            rows.append([f"[{breakable}](#{name})", claim.without_gpu, *map(str, counts)])
        return table(["claim", "without a GPU", *heads], rows)

    def syllabus(self) -> str:
        """List the chapters, each with the first paragraph of its page."""
        rows = []
        for page in sorted((self.root / "docs/course").glob("[cl]*.md")):
            title, learn, *_ = page.read_text("utf-8").split("\n\n")
            count = sum(name.startswith(f"{page.stem}/") for name in self.claims)
            rows.append([f"[{title[2:]}]({page.name})", learn.replace("\n", " "), str(count)])
        return table(["chapter", "what you learn", "claims"], rows)


def constant(node: ast.expr) -> Any:
    """Return the value of a literal, or of a product or power of such, as in ``40 * 2**30``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Pow)):
        left, right = constant(node.left), constant(node.right)
        return left * right if isinstance(node.op, ast.Mult) else left**right
    return ast.literal_eval(node)


def short_name(result: Result) -> str:
    return aggregate.short_name(result.claim)


def label(result: Result, arm: str, first_arm: str) -> str:
    rung = aggregate.rung_name(result)
    if result.ladder:
        return {"optimized": f"`{rung}`", "baseline": f"`{first_arm}`"}.get(arm, arm)
    return f"`{rung}`, {arm}" if rung else arm


def page_of(result: Result) -> str:
    """Return the address of a claim's section, relative to the root of the site."""
    name = result.claim.partition("[")[0]
    return f"course/{aggregate.folder(result)}.html#{make_id(name)}"


def amount(rungs: Sequence[Result]) -> str:
    """Return the least that a call must do, if that is the same for all rungs."""
    work = rungs[0].work
    if work is None or any(r.work != work for r in rungs):
        return ""
    parts = [f"read {si(work.read, 'B')}"] * (work.read > 0)
    parts += [f"write {si(work.written, 'B')}"] * (work.written > 0)
    parts += [f"compute {work.flops:.3g} operations in {work.dtype}"] * (work.flops > 0)
    *others, last = parts or [""]
    return f"A call must {', '.join(others)}{' and ' * bool(others)}{last}. " if last else ""


def header(code: str) -> list[str]:
    """Return the blocks of the comment at the top of a CUDA file; listings keep their spaces."""
    lines = [line[3:] for line in (re.match(r"(//.*\n)*", code) or [""])[0].splitlines()]
    return [block.strip("\n") for block in re.split(r"\n\n+", "\n".join(lines)) if block.strip()]


def dropdown(title: str, content: str) -> str:
    return f":::{{dropdown}} Code: {escape(title)}\n{content}\n:::"


def listing(code: str, language: str) -> str:
    return f"``````{language}\n{code}\n``````"


def raw(html: str) -> str:
    return f"``````{{raw}} html\n{html}\n``````"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format cells that are Markdown already as a table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def side_by_side(records: Mapping[str, Sequence[Result]]) -> str:
    """Compare the speedups on several kinds of GPU."""
    by_rung = {
        key: {short_name(r): f"{r.speedup or ''} {aggregate.verdict(r)}" for r in rungs}
        for key, rungs in records.items()
    }
    names = dict.fromkeys(name for by in by_rung.values() for name in by)
    rows = [[escape(n), *(by.get(n, "-") for by in by_rung.values())] for n in names]
    return table(["speedup", *by_rung], rows)


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the comments of a page; a chapter ends with the claims that no comment places."""
    course: Course = app.course  # type: ignore[attr-defined]

    def text(place: re.Match[str]) -> str:
        kind, name = place.groups()
        paths = [*course.paths, Path(__file__), *Path(views.__file__).parent.glob("*.*")]
        if kind == "claim":
            if name not in course.claims:
                logger.warning("there is no claim %s", name, location=docname)
                return ""
            paths += course.claims[name].files
        for path in paths:  # the page is built again when one of them changes
            app.env.note_dependency(str(path), docname=docname)
        if kind == "claim":
            return course.claim(name)
        if kind == "proof":
            return "\n\n".join(selfcheck.section(selfcheck.read(p)) for p in course.proofs)
        if kind == "results":
            chart = raw(views.roofline(course.results, page_of))
            return f"{chart}\n\n{markdown.tables(course.results)}".replace("\n### ", "\n## ")
        return course.gpus() if kind == "gpus" else course.syllabus()

    folder = docname.removeprefix("course/")
    places = [f"<!-- claim {name} -->" for name in course.claims if name.startswith(f"{folder}/")]
    page = FILES.sub("", source[0])
    further = [place for place in places if place not in page]
    source[0] = PLACE.sub(text, "\n\n".join([page, *further]))


def load(app: Sphinx) -> None:
    course = Course(Path(app.confdir).parent, app.config.course_unmeasured)
    app.course = course  # type: ignore[attr-defined]
    for problem in course.problems():
        logger.warning("%s", problem)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("course_unmeasured", [], "env", types=[list])
    app.connect("builder-inited", load)
    app.connect("source-read", fill)
    package = files("pytest_aiperf.report")
    app.config.html_static_path += [str(package / name) for name in ("views.css", "views.js")]
    for name in ("views.css", "course.css"):
        app.add_css_file(name)
    app.add_js_file("views.js")
    return {"parallel_read_safe": True}
