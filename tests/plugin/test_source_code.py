"""The code that a report shows is that of the claim's arms, and nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_aiperf.report import source_code
from pytest_aiperf.report.excerpt import excerpt

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
cudaError_t wide(const float* in, float* out) { copy<Wide><<<1, THREADS>>>(in, out); return {}; }
cudaError_t narrow(const float* in, float* out) {
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
import pytest
from kernels.ch01 import fused
from kernels.ch01.other import helper

SCALE = 2

def base(x):
    return x * SCALE

RUNGS = {"a": base, "b": lambda x: x + x}

@pytest.mark.parametrize("rung", ["wide", "narrow"])
def test_cuda(compare, nvcc, rung):
    built = nvcc("copy.cu")
    compare(baseline=built["narrow"], optimized=built[rung], inputs=list, reference=list)

@pytest.mark.parametrize("rung", RUNGS)
def test_table(compare, rung):
    compare(baseline=prepared(base), optimized=RUNGS[rung], library=helper)

@pytest.mark.parametrize("rung", ["one"])
def test_imported(compare, rung):
    compare(baseline=base, optimized=getattr(fused, rung))

LADDER = ["narrow", "wide"]

@pytest.mark.parametrize("rung", LADDER[1:])
def test_made(compare, nvcc, rung):
    built = nvcc("copy.cu")

    def arm(name):
        return lambda x, out: built[name](x, out)

    compare(baseline=arm("wide"), optimized=built[rung])

@pytest.mark.parametrize("rung", ["wide"])
def test_before(compare, nvcc, rung):
    built = nvcc("copy.cu")
    compare(baseline=built[LADDER[LADDER.index(rung) - 1]], optimized=built[rung])
'''


@pytest.fixture
def root(tmp_path):
    for name, text in {
        "tests/ch01/test_x.py": TEST,
        "kernels/copy.cu": CUDA,
        "kernels/ch01/fused.py": "STEP = 1\n\ndef one(x):\n    return x + STEP\n\ndef two(): 1\n",
        "kernels/ch01/other.py": "def helper(x):\n    return x\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def arms(root, name):
    found = source_code.source(f"tests/ch01/test_x.py::{name}", root).arms
    return {arm: [(code.where, code.text) for code in codes] for arm, codes in found.items()}


def test_a_launcher_comes_with_what_it_needs_and_no_more():
    wide = excerpt(CUDA, "wide")
    for needed in ("constexpr int THREADS = 256;  // a block", "struct Wide", "// What a thread"):
        assert needed in wide
    for other in ("Narrow", "TEXT", "TWICE", "narrow", "header", "namespace"):
        assert other not in wide
    assert "#define TWICE" in excerpt(CUDA, "narrow")
    assert excerpt(CUDA, "absent") is None


def test_the_explanation_is_the_docstring_after_its_title(root):
    found = source_code.source("tests/ch01/test_x.py::test_cuda[wide]", root)
    assert found.explanation == ("First, why it works.", "Then where not.")
    assert found.rungs == ("wide", "narrow")


def test_arms_of_a_cuda_claim_are_their_rungs(root):
    found = arms(root, "test_cuda[wide]")
    assert [where for where, _ in found["optimized"]] == ["kernels/copy.cu"]
    assert "struct Wide" in found["optimized"][0][1]
    assert "struct Narrow" in found["baseline"][0][1]


def test_arms_in_python_come_with_what_they_use(root):
    found = arms(root, "test_table[b]")
    where = "tests/ch01/test_x.py"
    base = "SCALE = 2\n\ndef base(x):\n    return x * SCALE"
    assert found["baseline"] == [(where, f"prepared(base)\n\n{base}")]
    assert found["optimized"] == [(where, "lambda x: x + x")]
    assert found["library"] == [("kernels/ch01/other.py", "def helper(x):\n    return x")]
    assert arms(root, "test_table[a]")["optimized"] == [(where, base)]


def test_an_imported_kernel_is_found_by_its_rung(root):
    found = arms(root, "test_imported[one]")["optimized"]
    assert found == [("kernels/ch01/fused.py", "STEP = 1\n\ndef one(x):\n    return x + STEP")]


def test_a_maker_in_the_test_comes_with_the_launcher_that_it_is_handed(root):
    found = arms(root, "test_made[wide]")
    made = 'arm("wide")\n\ndef arm(name):\n    return lambda x, out: built[name](x, out)'
    assert found["baseline"][0] == ("tests/ch01/test_x.py", made)
    assert "struct Wide" in found["baseline"][1][1]


def test_the_rung_before_is_worked_out(root):
    found = arms(root, "test_before[wide]")
    assert "struct Narrow" in found["baseline"][0][1]
    assert "struct Wide" in found["optimized"][0][1]


@pytest.mark.parametrize(
    "nodeid", ["../secret.py::test_x", "/etc/passwd::x", "", "gone.py::test_x"]
)
def test_files_outside_the_root_are_no_sources(root, nodeid):
    (root / "secret.py").write_text('"""T.\n\nA secret."""')
    assert source_code.source(nodeid, root / "tests") == source_code.Source()


def test_a_file_that_cannot_be_parsed_says_nothing(root):
    (root / "tests/ch01/test_x.py").write_text("def (")
    assert source_code.source("tests/ch01/test_x.py::test_cuda", Path(root)) == source_code.Source()


def test_long_code_is_clipped_and_says_so():
    clipped = source_code.clip(source_code.Code("x\n" * 200, "cuda", "k.cu"))
    assert clipped.text.splitlines()[-1] == "// ... 60 more lines"
