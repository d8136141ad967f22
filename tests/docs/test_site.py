"""The documentation builds without a warning, its links lead somewhere and its commands exist."""

import ast
import html.parser
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.parse
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pytest_aiperf import cli
from pytest_aiperf.records.results import read_results

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [p for p in sorted(DOCS.rglob("*.md")) if "_build" not in p.parts]
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
LAUNCHERS = {"numactl", "srun", "sudo", "taskset", "torchrun"}
CLAIM = "ch07/vectorized_copy"


def build(docs, output, *options):
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    strict = ("--nitpicky", "--fail-on-warning", "--keep-going", "--quiet")
    command = [sys.executable, "-m", "sphinx", *strict, *options, str(docs), str(output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


class Links(html.parser.HTMLParser):
    """The targets of a page, and the places that it links to."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id"))
        self.links |= {values[name] for name in ("href", "src") if values.get(name)}


def dead_links(folder):
    pages = {path.resolve(): Links(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlsplit(link)
            if url.scheme or url.netloc:
                continue
            place = urllib.parse.unquote(url.path)
            target = (path.parent / place).resolve() if place else path
            anchor = urllib.parse.unquote(url.fragment)
            if not target.exists() or (anchor and anchor not in pages[target].ids):
                yield f"{path.name}: {link}"


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path):
    process = build(DOCS, tmp_path / "html")
    assert process.returncode == 0, process.stderr
    assert len(list(tmp_path.glob("html/course/ch*.html"))) == 20
    assert list(dead_links(tmp_path / "html")) == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")), ids=lambda p: p.stem)
def test_links_between_files_lead_to_files(path):
    links = re.findall(r"\]\(([^)#:\s]+)[)#]", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_dead_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text("<p id=x><a href='b.html#y'><a href='#x'><a href='#z'>")
    (tmp_path / "b.html").write_text("<img src=c.png><a href='https://example.com/d'>")
    dead = ["a.html: #z", "a.html: b.html#y", "b.html: c.png"]
    assert sorted(dead_links(tmp_path)) == dead


def blocks(path, *languages):
    for match in FENCE.finditer(path.read_text(encoding="utf-8")):
        if match[2] in languages:
            yield match[3]


def commands(path):
    """Yield the commands of a page's console and bash blocks as lists of words."""
    for language, prompt in (("console", "$ "), ("bash", ""), ("sh", "")):
        for block in blocks(path, language):
            for line in block.replace("\\\n", " ").splitlines():
                if not line.strip().startswith(prompt) or not line.strip():
                    continue
                lexer = shlex.shlex(line.strip()[len(prompt) :], posix=True, punctuation_chars=True)
                lexer.whitespace_split = True
                part = []
                for word in [*lexer, ";"]:
                    if re.fullmatch(r"[;&|]+", word):
                        yield from [part] if part else []
                        part = []
                    else:
                        part.append(word)


def without_prefix(words):
    """Drop what may stand before a command: variables, and a launcher with its options."""
    while words and re.match(r"[A-Z]\w*=", words[0]):
        words = words[1:]
    if words[:1] and words[0] in LAUNCHERS:
        words = words[next(i for i, w in enumerate(words) if w in ("pytest", "python", "make")) :]
    return words


def refused(words, config):
    """Return why a command of this project would be refused; "" if it is none or is accepted."""
    words = without_prefix(words)
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    if words[:1] == ["make"]:
        rules = re.findall(r"^([\w./-]+):", MAKEFILE, re.MULTILINE)
        names = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        return ", ".join(name for name in names if name not in rules)
    try:
        if words[:1] == ["pytest"]:
            left_out = r"[<>]+|\$\{?\w+\}?|@\S+"  # redirections, variables, files with arguments
            cleaned = [word for word in words[1:] if not re.fullmatch(left_out, word)]
            given, unknown = config._parser.parse_known_and_unknown_args(cleaned)
            paths = [word.partition("::")[0] for word in given.file_or_dir]
            missing = [p for p in paths if p.startswith("tests/") and not list(ROOT.glob(p))]
            return ", ".join([*unknown, *missing])
        if words[:1] in (["pytest_aiperf"], ["pytest-aiperf"]):
            given, _ = cli._split(words[1:])
            cli._parser(given[0] if given else "")[0].parse_args(given)
    except SystemExit as error:
        return "" if error.code in (None, 0) else f"exit status {error.code}"
    except pytest.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_commands_have_options_and_files_that_exist(path, pytestconfig):
    wrong = [f"{shlex.join(c)}: {why}" for c in commands(path) if (why := refused(c, pytestconfig))]
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("pytest --gpuu tests/ch07", "--gpuu"),
        ("pytest tests/ch77", "tests/ch77"),
        ("python -m pytest_aiperf reprot", "exit status 2"),
        ("make documents", "documents"),
        ("CUDA_VISIBLE_DEVICES=0 pytest --gpu tests/ch07/test_coalesced_copy.py", ""),
        ("python -m pytest_aiperf report results.json", ""),
        ("make docs PYTHON=python3.12", ""),
        ("python -m pytest_aiperf capture nsys --nvtx step -- python train.py --lr 0.1", ""),
        ("python -m pytest_aiperf capture nsys --nvvtx step -- python train.py", "exit status 2"),
    ],
)
def test_wrong_commands_are_found(command, why, pytestconfig, capsys):
    assert refused(shlex.split(command), pytestconfig) == why


def unknown_names(code):
    """Return the names that a piece of Python takes from this package and that do not exist."""
    names = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("pytest_aiperf."):
            names |= {(node.module, alias.name): None for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "evidence":
            names["pytest_aiperf.evidence", node.attr] = None
    import pytest_aiperf

    modules = {"pytest_aiperf.evidence": pytest_aiperf.evidence}
    return [
        name
        for module, name in names
        if not hasattr(modules.get(module) or importlib.import_module(module), name)
    ]


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.stem)
def test_python_compiles_and_imports_what_exists(path):
    for block in blocks(path, "python", "py"):
        assert unknown_names(block) == []


def test_unknown_names_are_found():
    code = (
        "from pytest_aiperf import Work, Wrok, evidence\nevidence.opcode('x')\nevidence.opcodes()"
    )
    assert unknown_names(code) == ["Wrok", "opcodes"]


# the extension, on a copy of one claim


@pytest.fixture
def site(tmp_path):
    """Return a function that builds a course of one claim and returns errors and the page."""
    for file in ("tests/ch07/test_vectorized_copy.py", "kernels/ch07/copy.cu"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    content = json.loads((ROOT / "results/h200.json").read_text(encoding="utf-8"))
    records = content["benchmarks"]
    content["benchmarks"] = [r for r in records if r["aiperf"]["claim"].startswith(CLAIM)]
    content["aiperf_untimed"] = []
    (tmp_path / "results").mkdir()
    (tmp_path / "results/h200.json").write_text(json.dumps(content))
    docs = tmp_path / "docs/course"
    docs.mkdir(parents=True)
    (docs.parent / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(DOCS / '_ext')!r})\n"
        "extensions = ['myst_parser', 'sphinx_design', 'course']\nsmartquotes = False\n"
        "myst_heading_anchors = 3\n"
    )
    pages = "glossary\nreading\ncourse/ch07"
    (docs.parent / "index.md").write_text(f"# Index\n\n```{{toctree}}\n{pages}\n```\n")
    (docs.parent / "reading.md").write_text("# Reading\n\n## The limit\n\nA share.\n")
    (docs.parent / "glossary.md").write_text("# Glossary\n\n## Words of the project\n\nRung.\n")
    (docs / "ch07.md").write_text(f"# 7. Memory\n\nLearn.\n\n<!-- claim {CLAIM} -->\n")

    def run(*options):
        # pseudoxml: the nodes of the page, without a theme
        process = build(docs.parent, tmp_path / "out", "-b", "pseudoxml", "-E", *options)
        page = tmp_path / "out/course/ch07.pseudoxml"
        return process.stderr, page.read_text(encoding="utf-8") if page.exists() else ""

    run.root = tmp_path
    return run


def test_a_page_shows_ladder_evidence_code_limit_and_command(site):
    records = read_results(ROOT / "results/h200.json")
    [vector] = [record for record in records if record.claim == f"{CLAIM}[vector]"]
    errors, page = site()
    assert errors == ""
    for text in (
        "A copy with 16-byte accesses per thread beats one with 4-byte accesses",
        "By Little's law", "Why it is faster", "LDG.E.128", "Where it stops", "memory-bound",
        str(vector.speedup), "Conditions and limits", "Recorded on 2026-", "NVIDIA H200",
        "vector_unrolled    Four 16-byte loads", "def floats(", "read 512.0 MiB and write 512.0",
        "kernels/ch07/copy.cu", "<svg", "pytest --gpu tests/ch07/test_vectorized_copy.py",
    ):  # fmt: skip
        assert text in page
    assert page.count('refuri="../glossary#words-of-the-project"') == 3  # rung, evidence, baseline


def test_a_record_of_other_code_fails_the_build_unless_it_is_listed(site):
    kernel = site.root / "kernels/ch07/copy.cu"
    kernel.write_text(kernel.read_text().replace("THREADS = 256", "THREADS = 128"))
    errors, _ = site()
    assert f"{CLAIM} has not been measured since its code changed" in errors
    errors, page = site("-D", f"course_unmeasured={CLAIM}")
    assert errors == ""
    assert "Not measured since the code changed" in page


def test_comments_do_not_make_a_record_stale(site):
    kernel = site.root / "kernels/ch07/copy.cu"
    kernel.write_text(f"// a new comment\n{kernel.read_text()}")
    assert site()[0] == ""


def test_a_claim_that_was_measured_again_must_leave_the_list(site):
    errors, _ = site("-D", f"course_unmeasured={CLAIM}")
    assert f"the record of {CLAIM} is not stale" in errors


def test_a_record_without_a_claim_fails_the_build(site):
    test = site.root / "tests/ch07/test_vectorized_copy.py"
    test.write_text(test.read_text().replace("def test_vectorized_copy", "def test_wide_copy"))
    (site.root / "docs/course/ch07.md").write_text("# 7. Memory\n")
    errors, page = site()
    assert f"there is a record of {CLAIM}, which is not a claim" in errors
    assert "No result is recorded" in page  # of ch07/wide_copy, which no comment places
    assert "def test_wide_copy(" in page  # the whole files, because no record names their lines
    assert "__global__ void copy_coalesced(" in page


def test_a_comment_that_names_no_claim_fails_the_build(site):
    (site.root / "docs/course/ch07.md").write_text("# 7. Memory\n\n<!-- claim ch07/copy -->\n")
    assert "there is no claim ch07/copy" in site()[0]


def test_another_gpu_is_shown_beside_the_first(site):
    content = (site.root / "results/h200.json").read_text()
    content = content.replace('"key": "h200"', '"key": "b200"').replace(
        "NVIDIA H200", "NVIDIA B200"
    )
    (site.root / "results/b200.json").write_text(content)
    errors, page = site()
    assert errors == ""
    table = page[page.index("<table") : page.index("</table") if "</table" in page else None]
    assert table.index("b200") < table.index("h200")
    assert "NVIDIA B200" in page
    assert "NVIDIA H200" in page


def test_a_host_claim_is_shown_with_its_processor_and_noise(site):
    file = site.root / "results/h200.json"
    content = json.loads(file.read_text())
    host = {"host": True, "key": "cpu", "gpu": None, "floor": 0.0312}
    for record in content["benchmarks"]:
        record["aiperf"] |= host | {
            "stack": {"python": "3.12.3", "processor": "EPYC, 2 logical CPUs"}
        }
    file.with_name("cpu.json").write_text(json.dumps(content))
    file.unlink()
    errors, page = site()
    assert errors == ""
    text = " ".join(page.split())
    assert "on EPYC, 2 logical CPUs in" in text
    assert "s (python 3.12.3). Identical arms differed by up to 3.1%." in text


@pytest.fixture
def course(monkeypatch):
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    monkeypatch.syspath_prepend(DOCS / "_ext")
    return importlib.import_module("course").Course(ROOT)


def test_words_of_a_docstring_become_links_and_code(course):
    text = "`a_b` and --gpu: see ch07/vectorized_copy, test_bank_conflicts.py, x_y, a::b and 2 * 3."
    assert course.prose(text) == (
        "`a_b` and `--gpu`: see [vectorized_copy](#ch07/vectorized_copy), "
        r"[bank_conflicts](#ch06/bank_conflicts), x\_y, a::b and 2 \* 3."
    )


def test_the_first_bar_of_a_ladder_has_the_name_of_its_arm(course):
    names = {name: course.claims[f"ch07/{name}"].first_arm for name in (
        "reduction_ladder", "transpose_ladder", "aos_to_soa"
    )}  # fmt: skip
    assert [*names.values()] == ["tree", "conflicted", "first arm"]


def test_a_diagnosis_follows_the_present_rules(course):
    claim = "ch07/transpose_ladder[padded]", "h200"
    [result] = [r for r in course.results if (r.claim, r.key) == claim]
    old = replace(result, diagnosis={"optimized": "what an older rule said"})
    line = course.diagnoses(old)["optimized"]
    assert re.fullmatch(
        r"memory-bound: 8\d % of the copy rate; up to \d+ % faster with the same bytes", line
    )


def test_a_naive_baseline_is_explained_below_its_table(course):
    [naive, *_] = [r for r in course.results if r.against == "naive" and not r.host]
    [usual, *_] = [r for r in course.results if r.claim.startswith(CLAIM)]
    assert [
        "left out of geometric means" in "".join(course.measured([r])) for r in (naive, usual)
    ] == [
        True,
        False,
    ]


def test_the_table_of_gpus_says_where_a_claim_runs(course):
    head, _, *rows = course.gpus().splitlines()
    cells = {
        row.split("](")[0].lstrip("| [").replace("\\", "").replace("<wbr>", ""): row.split(" | ")[
            1:
        ]
        for row in rows
    }
    old, hopper, blackwell = (
        next(i for i, text in enumerate(head.split(" | ")[2:]) if arch in text)
        for arch in ("sm80", "sm90", "sm100")
    )
    runs = {name: [bool(c.strip("| ")) for c in row[1:]] for name, row in cells.items()}
    assert runs["ch07/vectorized_copy"] == [True] * len(runs["ch07/vectorized_copy"])
    assert [runs["ch10/wgmma_ladder"][i] for i in (old, hopper, blackwell)] == [False, True, False]
    assert [runs["ch19/nvfp4_linear"][i] for i in (old, hopper, blackwell)] == [False, False, True]
    assert cells["ch04/bucketed_all_reduce"][:2] == ["checked", "2"]
    assert cells["ch10/tile_scheduler_host"][:2] == ["measured", "0"]


def test_requirements_are_those_that_pytest_collects(course):
    """The extension reads markers from the source; pytest is the judge of what they mean."""
    program = (
        "import json, sys, pytest\n"
        "from dataclasses import asdict\n"
        "class Plugin:\n"
        "    def pytest_collection_finish(self, session):\n"
        "        from pytest_aiperf.machine.requirements import REQUIREMENTS, claim_id, is_claim\n"
        "        found = {claim_id(i.nodeid).partition('[')[0]: asdict(i.stash[REQUIREMENTS])\n"
        "                 for i in session.items if is_claim(i)}\n"
        "        print('\\n' + json.dumps(found, sort_keys=True))\n"
        "folders = sys.argv[1:]\n"
        "pytest.main(['--collect-only', '-qq', '-n0', *folders], plugins=[Plugin()])\n"
    )
    folders = [str(p) for p in sorted(ROOT.glob("tests/ch*")) if p.is_dir()]
    process = subprocess.run(
        [sys.executable, "-c", program, *folders, str(ROOT / "tests/labs")],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    collected = json.loads(next(line for line in process.stdout.splitlines() if line[:1] == "{"))
    read = {name: asdict(claim.requirements) for name, claim in course.claims.items()}
    assert json.loads(json.dumps(read)) == collected
    assert len(read) > 80
