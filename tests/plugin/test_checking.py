"""`pytest` checks what can be checked: transcripts of runs that time nothing."""

import os
import subprocess
import sys

import pytest

from tests.plugin.test_evidence import TRITON

CU = """\
extern "C" int copy(float *to, const float *from, int n, cudaStream_t stream) { return 0; }
extern "C" int again(float *to, const float *from, int n, cudaStream_t stream) { return 0; }
"""


def test_gpu_without_a_gpu_is_a_usage_error_of_one_sentence(project):
    project.tests("def test_it(compare): compare(**usual)")
    project.fake(gpus=0)
    done = project.run("--gpu")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert not done.outlines
    (message,) = filter(None, done.errlines)
    assert message.startswith("ERROR: --gpu needs an NVIDIA GPU: ")
    assert not (project.path / ".aiperf").exists()


def test_a_profile_without_a_gpu_names_the_tool_for_the_host(project):
    project.tests("def test_it(compare): compare(**usual)")
    project.fake(gpus=0)
    (message,) = filter(None, project.run("--profile=ncu").errlines)
    assert message.startswith("ERROR: --profile=ncu profiles the GPU, and needs an NVIDIA GPU: ")
    assert message.endswith("`pytest --profile=perf` profiles the host claims")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--quick",), "--quick only affects measuring: add --gpu or --cpu"),
        (
            ("--budget", "9q", "--gpu"),
            "argument --budget: '9q' is not a time: write 90, 90s, 20m or 2h",
        ),
        (("--gpu", "-n1", "--dist=loadgroup"), "--dist loadgroup loses or hangs tests"),
        (("--gpu", "-oaiperf_deadline=soon"), "aiperf_deadline = soon: give seconds"),
    ],
)
def test_contradictory_options_are_usage_errors(project, words, message):
    done = project.run(*words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"*{message}*"])


@pytest.mark.parametrize("figures", ["{library: 0.9}", "{speedup: 1.5, h100: {library: 0.9}}"])
def test_a_required_library_arm_is_missed_without_measuring(project, figures):
    project.tests("def test_it(compare): compare(**usual)\n"
                  "def test_with(compare): compare(**usual, library=lambda x: x + x)")  # fmt: skip
    entries = "".join(f"  ch07/{name}:\n    require: {figures}\n" for name in ("it", "with"))
    project.write("expectations.yaml", f"schema: 1\nclaims:\n{entries}")
    done = project.run()
    done.assert_outcomes(passed=1, failed=1)
    message = "expectations.yaml requires a ratio to the library of ch07/it, but compare() has no *"
    done.stdout.fnmatch_lines([message])


@pytest.mark.parametrize(
    ("marker", "figures", "why"),
    [
        ("", "{share: 0.8}", "compare() has no work=: add it, or remove `share` from `require`"),
        ("", "{h100: {share: 0.8}}", "compare() has no work=: add it, or remove `share` from *"),
        ("@pytest.mark.host\n", "{share: 0.8}", "hosts have no limit: remove `share` from *"),
    ],
)
def test_a_required_share_without_a_limit_is_missed_without_measuring(
    project, marker, figures, why
):
    metric = ", metric='wall'" if marker else ""
    project.tests(f"{marker}def test_it(compare): compare(**usual{metric})")
    project.write("expectations.yaml", f"schema: 1\nclaims:\n  ch07/it:\n    require: {figures}\n")
    done = project.run()
    done.assert_outcomes(failed=1)
    message = f"expectations.yaml requires a share of the limit of ch07/it, but {why}"
    done.stdout.fnmatch_lines([message])


def test_collecting_needs_no_gpu_and_leaves_nothing(project):
    project.tests("def test_it(compare): compare(**usual)")
    project.fake(gpus=0)
    done = project.run("--collect-only", "-q")
    done.stdout.fnmatch_lines(["ch07/test_double.py::test_it", "*1 test collected*"])
    project.fake(gpus=1)
    assert project.run("--collect-only", "-q", "--gpu").ret == 0
    assert not (project.path / ".aiperf").exists()


@pytest.mark.parametrize("words", [(), ("--gpu",), ("--gpu", "-n2")])
def test_folders_give_markers_which_select(project, words):
    project.write("pytest.ini", "[pytest]\naiperf_folder_markers = ch07 ch12\n")
    for file in ("ch07/test_7.py", "ch12/deep/test_12.py", "other/test_ch12.py"):
        project.tests(
            "def test_it(compare, request):\n"
            "    assert [m.name for m in request.node.iter_markers()] == ['ch12']\n"
            "    compare(**usual)",
            f"tests/{file}",
        )
    done = project.run("--strict-markers", "--strict-config", "-m", "ch12", "-v", *words)
    deselected = {} if "-n2" in words else {"deselected": 2}
    done.assert_outcomes(passed=1, **deselected)
    done.stdout.fnmatch_lines(["*tests/ch12/deep/test_12.py*"])


def test_wrong_use_gets_one_sentence_each(project):
    path = project.tests(
        """
def test_twice(compare):
    compare(**usual)
    compare(**usual)

def test_never(compare):
    pass

def test_signature(compare):
    compare(**usual | {"optimized": lambda x, y: x})

def test_changed_input(compare):
    def sly(x):
        x += 1
        return (x - 1) * 2
    compare(**usual | {"optimized": sly})

def test_wrong(compare):
    compare(**usual | {"optimized": lambda x: x * 2.5})

def test_metric(compare):
    compare(**usual, metric="speed")

def test_against(compare):
    compare(**usual, against="nobody")

def test_cache(compare):
    compare(**usual, cache="tepid")

def test_no_arm(compare):
    compare(**usual | {"baseline": 3})

@pytest.mark.parametrize("n", [1, 2])
def test_good(compare, n):
    compare(**usual)
"""
    )
    line = path.read_text().splitlines().index("def test_never(compare):") + 1
    done = project.run("-q")
    done.assert_outcomes(passed=2, failed=9)
    done.stdout.fnmatch_lines(
        [
            "a test is one claim: call compare() once",
            "the test requests compare but never calls it: it claims nothing; call compare(...), *",
            f"ch07/test_double.py:{line}",
            "*optimized=<lambda>(x, y) does not take the 1 value that inputs() returns*",
            "*changed*",
            "*optimized*",
            "compare(metric='speed'): use one of device, wall, memory, score",
            "compare(against='nobody'): use one of idiomatic, library, previous rung, naive",
            "compare(cache='tepid'): use one of cold, warm",
            "baseline= must be the callable to beat, not 3",
        ],
        consecutive=False,
    )
    done.stdout.no_fnmatch_line("*During handling*")
    done.stdout.no_fnmatch_line("*Traceback*")


def test_a_test_file_in_another_encoding(project):
    """Python reads it as its coding line says; so must each part of a session that reads it."""
    path = project.tests("# Größe\ndef test_it(compare, nvcc): compare(**usual)")
    path.write_bytes(f"# coding: latin-1\n{path.read_text()}".encode("latin-1"))
    project.run().assert_outcomes(passed=1)
    project.run("--gpu").assert_outcomes(passed=1)
    assert project.results()["ch07/it"]["code"]


def test_two_claims_of_one_name_are_checked_but_not_measured(project):
    claim = "def test_it(compare): compare(**usual)\n"
    project.tests(f"{claim}class TestMore:\n    def test_it(self, compare): compare(**usual)")
    message = "two claims are called ch07/it: *::test_it and *::TestMore::test_it; rename one"
    for options in ((), ("-n2",)):
        done = project.run(*options)
        done.assert_outcomes(passed=2, warnings=len(options) + 1)
        done.stdout.fnmatch_lines([f"*PytestWarning: {message} before you measure them"])
    for options in (("--gpu",), ("-Werror",)):
        done = project.run(*options)
        assert done.ret == pytest.ExitCode.USAGE_ERROR
        done.stderr.fnmatch_lines([f"ERROR: {message}*"])
    done = project.run("--gpu", "-n1")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines([f"{message}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "@pytest.mark.gpu(2)\ndef test_it(compare): pass",
            "*::test_it: @pytest.mark.gpu takes count=, *, not 2",
        ),
        (
            "@pytest.mark.host\n@pytest.mark.sm90\ndef test_it(compare): pass",
            "*::test_it: a claim is either for the host or for GPUs*",
        ),
    ],
)
def test_claims_that_cannot_be_collected(project, text, message):
    project.tests(text)
    done = project.run()
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([message])
    done = project.run("-n1")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines([message])
    done.stdout.no_fnmatch_line("*INTERNALERROR*")


RENAMED = """\
schema: 1
claims:
  ch07/good:
    require: {speedup: 1.5}
  ch07/slope[vector]:
    require: {speedup: 1.5}
  ch09/chain: {}
"""


@pytest.mark.parametrize("words", [(), ("--gpu",), ("-k", "nothing"), ("ch07",), ("ch07", "ch08")])
def test_a_claim_that_the_expectations_file_alone_knows_is_an_error(project, words):
    project.tests("""
def test_good(compare): compare(**usual)

@pytest.mark.parametrize("rung", ["vector"])
def test_slopes(compare, rung): compare(**usual)
""")
    path = project.write("expectations.yaml", RENAMED)
    project.write("ch08/test_nothing.py", "")
    project.write("ch07/__pycache__/test_double.cpython-311.pyc", "")  # pytest leaves it out
    done = project.run(*words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    errors = [
        f"ERROR: {path}:5: no test is called ch07/slope[vector]: did you mean ch07/slopes[vector]?",
        f"{path}:7: no test is called ch09/chain: remove it",
    ]
    # if folders are named, there may be a ch09, too
    assert list(filter(None, done.errlines)) == errors[: 1 if "ch07" in words else 2]


@pytest.mark.parametrize(
    ("words", "complete"),
    [
        (("ch07/test_double.py",), False),
        (("ch07", "--ignore=ch07/test_more.py"), False),
        (("more",), False),  # more/ch07 is there, and ch07 is not
        (("more", "ch07"), True),
    ],
)
def test_claims_of_a_folder_that_was_collected_in_part_may_exist(project, words, complete):
    project.tests("def test_good(compare): compare(**usual)")
    project.tests("def test_other(compare): compare(**usual)", "more/ch07/test_other.py")
    project.write(".hidden/ch07/test_copy.py", "")
    project.write("expectations.yaml", RENAMED)
    done = project.run(*words)
    expected = pytest.ExitCode.USAGE_ERROR if complete else pytest.ExitCode.OK
    assert done.ret == expected


def test_files_without_a_failure_are_not_missed_by_last_failed(project):
    project.tests("def test_slope(compare): assert 0")
    project.tests("def test_good(compare): compare(**usual)", "ch09/test_chain.py")
    project.write("expectations.yaml", "schema: 1\nclaims:\n  ch09/good: {}\n")
    project.run("-pcacheprovider").assert_outcomes(passed=1, failed=1)
    project.run("-pcacheprovider", "--last-failed").assert_outcomes(failed=1)


@pytest.mark.parametrize("text", ["import pytest\npytest.importorskip('no_such')", "1 / 0"])
def test_claims_of_a_module_that_is_not_collected_may_exist(project, text):
    project.tests("def test_good(compare): compare(**usual)")
    project.write("ch09/test_chain.py", text)
    project.write("ch07/test_slopes.py", text)
    project.write("expectations.yaml", RENAMED)
    done = project.run("--continue-on-collection-errors")
    assert done.parseoutcomes()["passed"] == 1


@pytest.mark.parametrize("folder", ["ch09", "ch09/test_chain.py"])
def test_claims_of_files_that_a_conftest_leaves_out_may_exist(project, folder):
    project.tests("def test_good(compare): compare(**usual)")
    project.tests("def test_slope(compare): compare(**usual)", "ch07/test_slopes.py")
    project.tests("def test_chain(compare): compare(**usual)", "ch09/test_chain.py")
    project.write("conftest.py", f"collect_ignore = ['ch07/test_slopes.py', {folder!r}]\n")
    project.write("expectations.yaml", RENAMED)
    project.run().assert_outcomes(passed=1)


def test_a_mistake_in_the_expectations_file_is_an_error_of_the_check(project):
    project.tests("def test_good(compare): compare(**usual)")
    path = project.write("expectations.yaml", "schema: 1\nclaims:\n  ch07/good: {requires: {}}\n")
    done = project.run("ch07/test_double.py")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"ERROR: {path}:3:*requires*"])


def test_marks_and_fixtures_of_others_are_left_alone(project):
    project.tests(
        "@pytest.mark.gpu('a100')\n@pytest.mark.host\ndef test_it(): pass\n"
        "@pytest.fixture\ndef theirs(): return 1\n"
        "def test_other(theirs): assert theirs"
    )
    project.run().assert_outcomes(passed=2)


def test_a_users_own_fixtures_of_our_names_are_left_alone(project):
    project.write(
        "ch07/conftest.py",
        """
import pytest

from tests.plugin.test_evidence import TRITON

@pytest.fixture
def clock():
    return "mine"

@pytest.fixture
def compare():
    return "mine"
""",
    )
    text = """
@pytest.mark.gpu("a100")
@pytest.mark.parametrize("n", [1, 2])
def test_theirs(clock, compare, n):
    assert (clock, compare) == ("mine", "mine")

class TestOurs:
    @pytest.fixture
    def gpu(self, gpu):
        return gpu.name

    def test_it(self, gpu):
        assert gpu == "Fake H200"
"""
    project.tests(text)
    project.run("-k", "theirs").assert_outcomes(passed=2, deselected=1)
    project.run("--gpu").assert_outcomes(passed=1, deselected=2)
    assert not list(project.path.glob(".aiperf/*/results.json"))


def test_a_check_returns_a_record(project):
    project.tests("""
def test_it(compare):
    result = compare(**usual)
    assert (result.claim, str(result.outcome), result.timing) == ("ch07/it", "PASSED", None)
    assert {error.arm for error in result.agreement} == {"baseline", "optimized"}
""")
    project.run().assert_outcomes(passed=1)


def test_wrong_use_of_what_only_a_measurement_calls_is_found_by_the_check(project):
    project.write("kernels/copy.cu", CU)
    project.tests("""
import torch
from pytest_aiperf import Work

work = {"work": lambda x: Work(read=x.nbytes, written=x.nbites)}

def test_work(compare):
    compare(**usual | work)

def test_no_work(compare):
    compare(**usual, work=lambda x: x.nbytes)

def test_work_of_two(compare):
    compare(**usual, work=lambda x, y: Work(read=1, written=1))

def test_reference(compare):
    compare(**usual | {"reference": lambda x, y: x})

def claim(nvcc, inputs, **words):
    copy, again = (nvcc("copy.cu")[name] for name in ("copy", "again"))
    claim = {"baseline": copy, "optimized": again, "reference": lambda to, source, n: source}
    return claim | {"inputs": inputs} | words

def copies(bench):
    return torch.empty(8), torch.rand(8), 8

@pytest.mark.sm90
def test_built(compare, nvcc):
    assert compare(**claim(nvcc, copies)).notes == ()

@pytest.mark.sm90
def test_built_work(compare, nvcc):
    compare(**claim(nvcc, copies, work=lambda to, source, n: Work(read=source.bytes)))

@pytest.mark.sm90
def test_dtype(compare, nvcc):
    compare(**claim(nvcc, lambda bench: (torch.empty(8), torch.ones(8).half(), 8)))

@pytest.mark.sm90
def test_count(compare, nvcc):
    compare(**claim(nvcc, lambda bench: copies(bench)[:2]))

@pytest.mark.sm90
def test_no_inputs(compare, nvcc):
    def inputs(bench):
        raise RuntimeError("no GPU here")
    (note,) = compare(**claim(nvcc, inputs)).notes
    assert note == "inputs() fails without a GPU, so no call is checked: no GPU here"

@pytest.mark.sm90
def test_silent_failure(compare, nvcc):
    def inputs(bench):
        raise NotImplementedError
    (note,) = compare(**claim(nvcc, inputs)).notes
    assert note == "inputs() fails without a GPU, so no call is checked: NotImplementedError"

@pytest.mark.sm90
def test_inputs_on_the_gpu(compare, nvcc):
    def inputs(bench):
        return torch.empty(8, device="cuda"), torch.rand(8, device="cuda"), 8
    (note,) = compare(**claim(nvcc, inputs)).notes
    assert "needs a GPU" in note

@pytest.mark.sm90
def test_no_return(compare, nvcc):
    compare(**claim(nvcc, lambda bench: copies(bench) and None))
""")
    done = project.run("-q")
    built = done.parseoutcomes()
    assert (built["failed"], built["built"]) == (8, 4)
    done.stdout.fnmatch_lines(
        [
            "*AttributeError: * has no attribute 'nbites'",
            "work() must return a Work, not 64",
            "work=<lambda>(x, y) does not take the 1 value that inputs() returns: missing *'y'",
            "reference=<lambda>(x, y) does not take the 1 value that inputs() returns: missing*",
            "*AttributeError: 'Tensor' object has no attribute 'bytes'",
            "argument 2 'from' of copy() is float[*], got torch.float16",
            "copy() takes 3 arguments (the stream is added to them), not 2: int copy(*",
            "inputs() returns None: return the arguments of one call of an arm",
        ]
    )


def test_kernels_are_built_for_architectures_with_the_features(project):
    project.write("kernels/copy.cu", CU)
    project.tests(
        """
@pytest.mark.gpu(features=("tcgen05",))
def test_built(nvcc):
    nvcc("copy.cu")
    assert [built.arch for built in nvcc.used] == ["sm_100a", "sm_103a"]
"""
    )
    project.run().assert_outcomes(passed=1)


def test_kernels_are_built_and_reported(project):
    project.write("kernels/copy.cu", CU)
    project.tests(
        """
def copies(bench):
    import torch
    return torch.empty(8), torch.rand(8), 8

@pytest.mark.sm90
def test_built(compare, nvcc):
    copy, again = (nvcc("copy.cu")[name] for name in ("copy", "again"))
    reference = lambda to, source, n: source
    compare(baseline=copy, optimized=again, inputs=copies, reference=reference)

@pytest.mark.sm90
def test_unknown(compare, nvcc):
    nvcc("copy.cu")["cpoy"]

@pytest.mark.parametrize("scale", [1, 1.5])
def test_called_by_a_function(compare, nvcc, scale):
    copy = nvcc("copy.cu")["copy"]
    compare(
        baseline=lambda to, source, n: to.copy_(source),
        optimized=lambda to, source, n: copy(to, source, n * scale),
        inputs=copies,
        reference=lambda to, source, n: source,
    )

@pytest.mark.gpu
def test_nothing_to_build(compare):
    compare(**usual)

def test_gpu(gpu):
    pass
"""
    )
    done = project.run("-rs")
    done.stdout.fnmatch_lines(
        [
            "no launcher 'cpoy' in kernels/copy.cu*functions are copy*",
            "argument 3 'n' of copy() is int, got float: pass an int",
            "aiperf: the kernels of 2 claims were compiled, but not run: `pytest --gpu` *",
            "SKIPPED*: its results need a GPU, and it has nothing to build: run with --gpu",
            "SKIPPED*: needs a GPU: run with --gpu",
            "*2 failed, 2 skipped, 2 built*",
        ]
    )


WITH_GPU = """
from pathlib import Path
from pytest_aiperf import plugin

plugin.NVIDIA_DEVICE = Path(__file__)
"""


@pytest.mark.parametrize("interpret", [True, False])
def test_a_check_on_a_machine_with_a_gpu_interprets_triton_kernels(project, interpret):
    project.write("with_gpu.py", WITH_GPU)
    project.monkeypatch.setenv("PYTHONPATH", str(project.path), prepend=os.pathsep)
    project.write("own.py", TRITON)
    project.tests("""
import own

def test_double(compare):
    claim = {"baseline": lambda x: x * 2, "reference": lambda x: 2 * x.double()}
    compare(optimized=own.double, inputs=lambda bench: own.torch.randn(1024), **claim)
""")
    done = project.run("-pwith_gpu", "-opythonpath=.", f"-oaiperf_interpret={interpret}".lower())
    header = "*Triton runs in its interpreter (on the GPU with aiperf_interpret = false)*"
    if interpret:
        done.assert_outcomes(passed=1)
        done.stdout.fnmatch_lines([header])
    else:
        done.assert_outcomes(failed=1)
        done.stdout.no_fnmatch_line(header)
        done.stdout.fnmatch_lines(
            ["optimized launches a Triton kernel on tensors of the CPU, *set aiperf_interpret = *"]
        )


def test_errors_of_arms_name_the_arm_and_what_to_do(project):
    project.write("own.py", TRITON.replace("tl.program_id(0) * TILE", "tl.program_id(0) * TIL"))
    project.tests("""
import own

def claim(compare, arm):
    words = {"baseline": lambda x: x * 2, "reference": lambda x: 2 * x.double()}
    compare(optimized=arm, inputs=lambda bench: own.torch.randn(1024), **words)

def test_typo(compare):
    claim(compare, own.double)

def test_gpu_only(compare):
    claim(compare, lambda x: x.to("cuda:0") * 2)
""")
    done = project.run("-opythonpath=.")
    done.assert_outcomes(failed=2)
    done.stdout.fnmatch_lines(
        [
            "optimized, in Triton's interpreter: own.py:7: NameError: name 'TIL' is not defined",
            "optimized needs a GPU (*): mark the test @pytest.mark.gpu, and the check skips it",
        ]
    )
    assert "GridExecutor" not in done.stdout.str()


def test_a_cu_file_is_no_arm(project):
    project.write("kernels/part/copy.cu", CU)
    project.tests(
        "def test_it(compare, nvcc):\n"
        '    copy = nvcc("part/copy.cu")\n'
        '    compare(**{**usual, "optimized": copy})'
    )
    done = project.run()
    done.assert_outcomes(failed=1)
    message = (
        "optimized= must be the callable that should be faster, not a .cu file: name one of its "
        'functions, nvcc("part/copy.cu")[[]"again"] (copy, again)'
    )
    done.stdout.fnmatch_lines([message])


def test_compile_errors_show_the_compiler_and_the_command(project):
    project.write("kernels/bad.cu", CU.replace("return 0;", "return nothing;"))
    project.tests('@pytest.mark.sm90\ndef test_it(compare, nvcc):\n    nvcc("bad.cu")')
    done = project.run()
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(
        [
            "*nvcc could not build*bad.cu*",
            '*bad.cu(1): error: *"nothing" is undefined',
            "*/nvcc *code=sm_90a*/kernels/bad.cu",
        ]
    )


@pytest.mark.parametrize(
    ("condition", "hint"),
    [("__CUDA_ARCH__ != 900", "; if it is for sm90 only, mark the test @pytest.mark.sm90"),
     ("__CUDA_ARCH__ >= 1030",
      "; if it is for sm90, sm100 only, mark the test @pytest.mark.sm90, @pytest.mark.sm100"),
     ("1", "")],
)  # fmt: skip
def test_a_kernel_for_some_architectures_gets_the_hint_to_mark_them(condition, hint, project):
    guard = f"#if defined(__CUDA_ARCH__) && {condition}\n#error not here\n#endif\n"
    project.write("kernels/some.cu", guard + CU)
    project.tests('def test_it(compare, nvcc):\n    nvcc("some.cu")')
    done = project.run()
    done.assert_outcomes(failed=1)
    first = {"1": "90a", "__CUDA_ARCH__ != 900": "100a"}.get(condition, "103a")
    done.stdout.fnmatch_lines([f"*nvcc could not build kernels/some.cu for sm_{first}{hint}"])


def test_without_nvcc_the_claim_says_what_to_install(project, monkeypatch):
    project.write("kernels/copy.cu", CU)
    project.tests('def test_it(compare, nvcc):\n    nvcc("copy.cu")')
    project.write(
        "conftest.py",
        "import cuda.pathfinder\ncuda.pathfinder.find_nvidia_binary_utility = lambda name: None\n",
    )
    for variable in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", os.fspath(project.path))
    done = project.run()
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*no nvcc: install the extra *toolchain*"])


def test_loading_the_plugin_without_claims_imports_little():
    process = subprocess.run(
        [sys.executable, "-c", "import sys, pytest_aiperf.plugin; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    )
    loaded = set(process.stdout.split())
    assert not loaded & {"torch", "numpy", "scipy", "cupy", "triton", "yaml", "pynvml"}
    plugin_modules = {name for name in loaded if name.startswith("pytest_aiperf.")}
    names = ("plugin", "options", "session", "machine", "errors")
    names += ("machine.requirements", "machine.distributed")
    assert plugin_modules == {f"pytest_aiperf.{name}" for name in names}


@pytest.mark.parametrize(
    ("words", "measured"),
    [
        (("--gpu",), {"ch07/device"}),
        (("--cpu",), {"ch07/host"}),
        (("--gpu", "--cpu"), {"ch07/device", "ch07/host"}),
        (("--gpu", "--cpu", "-n1"), {"ch07/device", "ch07/host"}),
    ],
)
def test_each_option_measures_its_kind_of_claims(project, words, measured):
    project.tests("""
import pytest

def test_device(compare):
    compare(**usual)

@pytest.mark.host
def test_host(compare):
    compare(**usual, metric="wall")
""")
    assert project.run("--quick", *words).ret == 0
    results = project.results()
    assert results.keys() == measured
    assert all(
        record["key"] == ("cpu" if "host" in claim else "fake") for claim, record in results.items()
    )


def test_host_claims_alone_are_no_claims_for_a_gpu(project):
    project.tests("""
import pytest

@pytest.mark.host
def test_host(compare):
    compare(**usual, metric="wall")
""")
    done = project.run("--gpu")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: --gpu measures GPU claims, and all selected *"])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            "x + 1",
            "an arm returns exactly one Score(value, unit, better) beside its results, not 0",
        ),
        ("(x + 1, Score(2.0, 'ms', 'less'))", "Score(better='less'): use 'higher' or 'lower'"),
        ("(x + 1, Score(2.0, None))", "Score(unit=None): name the unit of the figure"),
        ("(x + 1, Score('2', 'ms'))", "Score(value='2'): give a number"),
    ],
)
def test_a_claim_without_a_valid_score_fails_its_check(project, returned, message):
    project.tests(f"""
from pytest_aiperf import Score

def test_it(compare):
    arm = lambda x: {returned}
    words = usual | {{"baseline": arm, "optimized": lambda x: arm(x)}}
    compare(**words | {{"metric": "score", "reference": lambda x: x + 1}})
""")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(f"*{message}*")


def test_evidence_of_a_gpu_is_refused_for_a_claim_on_the_host(project):
    project.tests("""
import pytest
from pytest_aiperf import evidence

@pytest.mark.host
def test_it(compare):
    compare(**usual | {"metric": "wall", "evidence": evidence.launches(max=1)})
""")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("*evidence.launches() is about a GPU*use one of page_faults, *")
