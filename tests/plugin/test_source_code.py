"""A report shows the code of the claim's arms, and no other code."""

from __future__ import annotations

import functools
import importlib.util
import os
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
    codes = source_code.arms(result(sources=sources), root).get("optimized", ())
    return {code.where: code.text for code in codes}


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
    assert [code.where for code in arms["library"]] == ["provenance_of_a_test/other.py"]


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


def test_long_code_is_clipped_and_counts_the_rest():
    clipped = source_code.clip(source_code.Code("x\n" * 200, "cuda", "k.cu"))
    assert clipped.text.splitlines()[-1] == "// ... 60 more lines"


@pytest.mark.parametrize("language", ["python", "cuda"])
def test_highlighted_code_is_escaped_and_complete(language):
    code = source_code.Code('return x < 1; // "</pre>" & 2', language, "k")
    html = source_code.highlight(code)
    assert "</pre>" not in html
    assert '<span class="k">return</span>' in html
    assert "x &lt; " in html


def test_a_run_records_where_its_arms_are(project):
    file = project.tests(
        '@pytest.mark.parametrize("rung", ["b", "a"])\n'
        "def test_it(compare, rung): compare(**usual)\n"
    )
    project.run("--gpu").assert_outcomes(passed=2)
    records = [from_json(Result, project.results()[f"ch07/it[{rung}]"]) for rung in "ba"]

    assert [record.rung_index for record in records] == [0, 1]
    (code,) = source_code.arms(records[0], project.path)["optimized"]
    assert code.where == file.relative_to(project.path).as_posix()
    assert code.text.startswith("def doubling(microseconds):\n    def double(x):")
    assert code.text.endswith("    return double")
