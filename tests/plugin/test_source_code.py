"""A report shows the code of the claim's arms, and no other code."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aiperf import prepared
from pytest_aiperf.build.launcher import Kernels
from pytest_aiperf.model import Result, Source
from pytest_aiperf.report import source_code
from pytest_aiperf.schema import from_json, to_json
from pytest_aiperf.sources import provenance
from pytest_aiperf.sources.cuda_source import needed
from tests.plugin.records import result

CUDA = """// The header of the file.

#include <cuda_runtime.h>
#define TWICE(x) (2 * (x))

namespace {
constexpr int THREADS = 256;  // a block
const char* const TEXT = "}{;";  /* } */

struct Wide {
    static constexpr int FLOATS = 4;
};
struct Narrow { static constexpr int FLOATS = 1; };

// What a thread copies.
template <typename Layout, int N = 4>
__global__ void __launch_bounds__(THREADS) copy(const float* in, float* out) {
    for (int i = 0; i < Layout::FLOATS; ++i) { out[i] = in[i]; }
}
}  // namespace

extern "C" {
cudaError_t wide(const float* in, float* out, cudaStream_t) {
    copy<Wide><<<1, THREADS>>>(in, out);
    return {};
}
cudaError_t narrow(const float* in, float* out, cudaStream_t) {
    copy<Narrow><<<TWICE(1), THREADS>>>(in, out);
    return {};
}
}
"""
TEST = '''"""A title.

First, why
it works.

Then where not.
"""
import functools

from provenance_of_a_test import fused
from provenance_of_a_test.other import LIMIT, helper

SCALE = 2
UNUSED = 3

def base(x):
    return x * SCALE

def unused(x):
    return x

@functools.cache
def decorated(x):
    return helper(x)

class Model:
    def forward(self, x):
        return x * SCALE

    def backward(self, x):
        return x

    def __call__(self, x):
        return self.forward(x)

RUNGS = {"a": base, "b": lambda x: x + x, "c": lambda x: min(x, LIMIT)}
TWO = (lambda x: base(x), lambda x: helper(x))

def make_graph(x):
    graph = []
    return lambda x: graph.append(decorated(x))

def test_claim(compare, nvcc):
    built = nvcc("copy.cu")

    def arm(name):
        return lambda x, out: built[name](x, out)

    compare(
        launcher=built["wide"],
        made=arm("narrow"),
        calls=lambda x, out: built["wide"](x, out),
        imported=lambda x: fused.one(x),
    )
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
    package = "provenance_of_a_test"
    for name, text in {
        "tests/ch01/test_x.py": TEST,
        "kernels/copy.cu": CUDA,
        f"{package}/__init__.py": "",
        f"{package}/fused.py": "STEP = 1\n\n\ndef one(x):\n    return x + STEP\n\n\ndef two(): 1\n",
        f"{package}/other.py": "LIMIT = 5\n\ndef helper(x):\n    return x\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


@pytest.fixture
def module(root):
    """Import the test module; the arms of its claim become its attributes."""
    spec = importlib.util.spec_from_file_location("provenance_test_x", root / HERE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernels = Kernels(os.path.relpath(root / "kernels/copy.cu"), CUDA, None)
    module.test_claim(lambda **arms: vars(module).update(arms), lambda _: kernels)
    yield module
    del sys.modules[spec.name]


def shown(root, arm):
    """Return the code that a report shows of an arm, by file."""
    sources = provenance.locate({"optimized": arm}, root)
    texts = {}
    for before, line in itertools.pairwise(
        [None, *source_code.arms(result(sources=sources), root).get("optimized", ())]
    ):
        texts.setdefault(line.file, [])
        if before and before.file == line.file and line.number != before.number + 1:
            texts[line.file].append("")
        texts[line.file].append(line.text)
    return {file: "\n".join(text) for file, text in texts.items()}


def lines(spans):
    return "\n".join("\n".join(CUDA.splitlines()[a - 1 : b]) for a, b in spans)


HERE = "tests/ch01/test_x.py"
BASE = "SCALE = 2\n\ndef base(x):\n    return x * SCALE"


def test_a_launcher_comes_with_what_it_needs_and_no_more():
    wide = lines(needed(CUDA, "wide"))
    for part in ("constexpr int THREADS = 256;  // a block", "struct Wide", "// What a thread"):
        assert part in wide
    for other in ("Narrow", "TEXT", "TWICE", "narrow", "header", "namespace"):
        assert other not in wide
    assert "#define TWICE" in lines(needed(CUDA, "narrow"))
    assert needed(CUDA, "absent") == []


def test_macros_of_several_lines_and_declarations_are_pieces():
    text = (
        "#define TWICE(x) \\\n    (2 * (x))\n#if 0\nint f();\n#endif\n"
        "int g(int);\ntemplate <class T> struct Pair { T a, b; };\n"
        'extern "C" int f(Pair<int>* p) { return g(TWICE(p->a)); }\n'
    )
    assert needed(text, "f") == [(1, 2), (6, 6), (7, 7), (8, 8)]


def test_types_are_pieces_whatever_their_attributes():
    types = (
        "struct alignas(16) A { int a; };", "struct __align__(sizeof(int4)) A { int a; };",
        "enum class A : int { X };", "enum struct A { X };", "enum A { X };", "union A { int a; };",
    )  # fmt: skip
    for line in types:
        text = f'{line}\nint other;\nextern "C" int f(A* a) {{ return 0; }}\n'
        assert needed(text, "f") == [(1, 1), (3, 3)], line


def test_a_function_comes_with_what_it_uses(root, module):
    assert shown(root, module.base) == {HERE: BASE}
    other = {"provenance_of_a_test/other.py": "def helper(x):\n    return x"}
    decorated = "@functools.cache\ndef decorated(x):\n    return helper(x)"
    assert shown(root, module.decorated) == {HERE: decorated, **other}
    fused = "STEP = 1\n\n\ndef one(x):\n    return x + STEP"
    assert shown(root, module.imported) == {
        HERE: "imported=lambda x: fused.one(x),",
        "provenance_of_a_test/fused.py": fused,
    }


@pytest.mark.parametrize("head", ["\ufeff", "\f\n"])
def test_a_byte_order_mark_and_a_form_feed_shift_no_lines(root, head):
    file = root / "provenance_of_a_test/fused.py"
    file.write_text(head + file.read_text())
    fused = importlib.import_module("provenance_of_a_test.fused")
    [text] = shown(root, fused.one).values()
    assert text.removeprefix("\ufeff") == "STEP = 1\n\n\ndef one(x):\n    return x + STEP"


def test_a_lambda_is_its_own_line(root, module):
    rungs = 'RUNGS = {"a": base, "b": lambda x: x + x, "c": lambda x: min(x, LIMIT)}'
    assert shown(root, module.RUNGS["b"]) == {HERE: rungs}
    limit = {"provenance_of_a_test/other.py": "LIMIT = 5"}
    assert shown(root, module.RUNGS["c"]) == {HERE: rungs, **limit}
    assert "provenance_of_a_test/other.py" not in shown(root, module.TWO[0])
    assert "provenance_of_a_test/other.py" in shown(root, module.TWO[1])


def wrapped(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(x)

    return wrapper


def compiled(function):
    import torch

    return torch.compile(function)


def jitted(function):
    triton = pytest.importorskip("triton")
    return triton.jit(function)


@pytest.mark.parametrize(
    "wrap",
    [
        prepared,
        wrapped,
        compiled,
        jitted,
        lambda base: functools.partial(base, 1),
        lambda base: prepared(functools.partial(wrapped(base))),
        lambda base: [base, 1],
    ],
)
def test_wrappers_are_taken_off(root, module, wrap):
    assert shown(root, wrap(module.base)) == {HERE: BASE}


def test_methods_and_objects(root, module):
    scale = "SCALE = 2"
    method = "def forward(self, x):\n    return x * SCALE"
    assert shown(root, module.Model().forward) == {HERE: f"{scale}\n\n{method}"}
    assert "def backward" in shown(root, module.Model())[HERE]
    assert "def forward" in shown(root, module.Model)[HERE]


def test_a_function_that_another_one_makes_is_shown_as_its_maker(root, module):
    text = shown(root, module.make_graph(1))[HERE]
    assert text.startswith("@functools.cache\ndef decorated")
    assert "    graph = []\n    return lambda x: graph.append" in text


def test_launchers_are_found_where_functions_call_them(root, module):
    cuda = "kernels/copy.cu"
    assert [*shown(root, module.launcher)] == [cuda]
    maker = shown(root, module.made)
    assert maker[HERE] == "def arm(name):\n    return lambda x, out: built[name](x, out)"
    assert "struct Narrow" in maker[cuda]
    assert "struct Wide" not in maker[cuda]
    calls = shown(root, module.calls)
    assert calls[HERE] == 'calls=lambda x, out: built["wide"](x, out),'
    assert "struct Wide" in calls[cuda]


def test_code_of_libraries_and_of_the_plugin_is_not_shown(root, module):
    import pytest_aiperf

    for arm in (len, pytest.raises, os.path.join, SimpleNamespace(), 1, prepared(min)):
        assert shown(root, arm) == {}
    plugin = Path(pytest_aiperf.__file__).parent
    assert provenance.locate({"a": provenance.locate}, root=plugin) == {}


def test_sources_survive_in_a_record_and_older_records_have_none(root, module):
    sources = provenance.locate({"optimized": module.base}, root)
    record = to_json(result(sources=sources))
    assert from_json(Result, record).sources == sources
    del record["sources"]
    assert source_code.arms(from_json(Result, record), root) == {}


def test_lines_that_changed_since_are_not_shown(root, module):
    sources = provenance.locate({"optimized": module.base, "library": module.decorated}, root)
    file = root / HERE
    file.write_text(file.read_text().replace("x * SCALE", "x * SCALE * 1"))
    arms = source_code.arms(result(sources=sources), root)
    assert [*arms] == ["library"]
    file.unlink()
    arms = source_code.arms(result(sources=sources), root)
    assert {line.file for line in arms["library"]} == {"provenance_of_a_test/other.py"}


def test_a_form_feed_is_no_end_of_a_line(tmp_path):
    file = tmp_path / "form_feed.py"
    file.write_text("# one section\n\f\n# and\u2028 the next\n\ndef base(x):\n    return x\n")
    spec = importlib.util.spec_from_file_location("form_feed", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sources = provenance.locate({"optimized": module.base}, tmp_path)
    shown = source_code.arms(result(sources=sources), tmp_path)["optimized"]
    lines = [(line.number, line.text) for line in shown]
    assert lines == [(5, "def base(x):"), (6, "    return x")]


def test_lines_that_moved_are_found(root, module):
    sources = provenance.locate({"optimized": module.base}, root)
    before = source_code.arms(result(sources=sources), root)["optimized"]
    file = root / HERE
    file.write_text(f"# a comment\n{file.read_text()}")
    after = source_code.arms(result(sources=sources), root)["optimized"]
    assert [(line.number, line.text) for line in after] == [
        (line.number + 1, line.text) for line in before
    ]


def test_the_explanation_is_the_docstring_after_its_title(root):
    paragraphs = source_code.explanation(f"{HERE}::test_claim[wide]", root)
    assert paragraphs == ("First, why it works.", "Then where not.")


@pytest.mark.parametrize(
    "file", ["../secret.py", "/etc/passwd", "", "gone.py", "\0.py", "notes.txt"]
)
def test_files_outside_the_root_are_no_sources(root, file):
    (root / "secret.py").write_text('"""T.\n\nA secret."""')
    (root / "tests/notes.txt").write_text("secret")
    assert source_code.explanation(f"{file}::test_x", root / "tests") == ()
    content = (root / "secret.py").read_text().splitlines()
    secret = Source.of(file, 1, 3, content)
    assert source_code.arms(result(sources={"baseline": (secret,)}), root / "tests") == {}


def test_a_file_that_cannot_be_parsed_has_no_explanation(root):
    (root / HERE).write_text("def (")
    assert source_code.explanation(f"{HERE}::test_claim", root) == ()


def numbered(text, first=1, file="k.cu"):
    return [source_code.Line(file, n, line) for n, line in enumerate(text.split("\n"), first)]


def test_lines_of_both_arms_are_kept_apart_and_the_others_are_aligned():
    file = numbered("shared\n\none {\n  a;\n  b;\n}\n\ntwo {\n    a;\n  c;\n  d;\n}")
    shared, one, two = file[:2], file[2:7], file[7:]
    difference = source_code.difference([*shared, *one], [*shared, *two])
    assert [line.text for line in difference.shared] == ["shared"]
    rows = [(a and a.number, b and b.number, differs) for a, b, differs in difference.rows]
    assert rows == [
        (3, 8, True),
        (4, 9, False),  # its indentation differs
        (5, 10, True),
        (6, 11, True),
        (None, 12, True),
    ]


def test_gaps_within_a_file_are_one_line_without_a_number():
    arm = numbered("one\n\n\n\nthree\nfour\n")
    rows = source_code.difference(arm[:2] + arm[3:5] + arm[5:], []).rows
    assert [(a.number, a.text) for a, _, _ in rows] == [
        (1, "one"), (0, ""), (5, "three"), (6, "four"),
    ]  # fmt: skip


def test_files_of_both_arms_come_first_and_each_file_has_a_head():
    both, slow, fast = (numbered(name, 1, name) for name in ("both", "slow", "fast"))
    other = [source_code.Line("both", 2, "more")]
    rows = source_code.difference([*slow, *both], [*fast, *other]).rows
    assert [(a and a.text, b and b.text, differs) for a, b, differs in rows] == [
        ("both", "both", False),
        ("both", "more", True),
        ("slow", "fast", False),
        ("slow", "fast", True),
    ]
    assert [a.number for a, _, _ in rows] == [0, 1, 0, 1]


@pytest.mark.parametrize("file", ["k.cu", "k.py"])
def test_highlighted_code_is_escaped_and_complete(file):
    lines = numbered('return x < 1; // "</pre>" & 2\n/* a\nb */', file=file)
    html = source_code.highlight(lines)
    assert list(html) == lines
    assert "</pre>" not in "".join(html.values())
    assert '<span class="k">return</span>' in html[lines[0]]
    assert "x &lt; " in html[lines[0]]
    for text in html.values():  # a comment of two lines has tags in each of them
        assert text.count("<span") == text.count("</span>")


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/o/r.git", "https://github.com/o/r/blob/HEAD/"),
        ("https://user:secret@github.com/o/r", "https://github.com/o/r/blob/HEAD/"),
        ("git@github.com:o/r.git", "https://github.com/o/r/blob/HEAD/"),
        ("ssh://git@gitlab.example.org/a/b/r.git", "https://gitlab.example.org/a/b/r/-/blob/HEAD/"),
        ("/srv/git/github.com/r", ""),
        ("https://example.org/o/r", ""),
        ('https://github.com/o/r/x"><script>', ""),
    ],
)
def test_source_lines_are_linked_where_the_remote_is_known(tmp_path, remote, address):
    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert source_code.repository(tmp_path) == ""
    git("init")
    git("remote", "add", "origin", remote)
    assert source_code.repository(tmp_path) == address
    (tmp_path / "sub").mkdir()
    assert source_code.repository(tmp_path / "sub") == (address and f"{address}sub/")


def test_a_projects_url_goes_before_its_remote(tmp_path):
    urls = '[project.urls]\nIssues = "https://github.com/o/i"\nSource = "https://github.com/o/r"\n'
    (tmp_path / "pyproject.toml").write_text(urls)
    address = source_code.repository(tmp_path, "0123abc")
    assert address == "https://github.com/o/r/blob/0123abc/"
    lines = numbered("a\nb", 7, "src/a b.py")
    assert source_code.place(lines, address) == (
        "src/a b.py:7",
        "https://github.com/o/r/blob/0123abc/src/a%20b.py#L7-L8",
    )
    assert source_code.place(lines) == ("src/a b.py:7", "")


def test_a_run_records_where_its_arms_are(project):
    file = project.tests(
        '@pytest.mark.parametrize("rung", ["b", "a"])\n'
        "def test_it(compare, rung): compare(**usual)\n"
    )
    project.run("--gpu").assert_outcomes(passed=2)
    records = [from_json(Result, project.results()[f"ch07/it[{rung}]"]) for rung in "ba"]

    assert [record.rung_index for record in records] == [0, 1]
    lines = source_code.arms(records[0], project.path)["optimized"]
    assert {line.file for line in lines} == {file.relative_to(project.path).as_posix()}
    text = "\n".join(line.text for line in lines)
    assert text.startswith("def doubling(microseconds):\n    def double(x):")
    assert text.endswith("    return double")
