"""Another repository, with this package installed and nothing configured."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.plugin.conftest import by_claim

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
NUMPY = '''\
"""Adding in place saves an allocation."""

import numpy as np


def vectors(bench):
    n = bench.size(1 << 16, check=1000)
    return np.random.rand(n), np.random.rand(n)


def in_place(x, y):
    z = x + y
    z *= 2
    return z


def test_add(compare):
    compare(
        baseline=lambda x, y: (x + y) * 2,
        optimized=in_place,
        inputs=vectors,
        reference=lambda x, y: 2 * x + 2 * y,
    )


def test_of_their_own():
    assert vectors
'''


def test_the_readmes_example_is_checked(project):
    (example,) = re.findall(
        r"```python\n# test_addcmul\.py\n(.*?)```", README.read_text(), re.DOTALL
    )
    project.write("test_addcmul.py", example)
    project.run().assert_outcomes(passed=1)
    assert not (project.path / ".aiperf").exists()


def test_it_is_measured_on_the_host(project):
    text = NUMPY.replace("def test_add", "import pytest\n@pytest.mark.host\ndef test_add")
    project.write("test_add.py", text)
    refused = project.run()
    refused.assert_outcomes(passed=1, failed=1)
    refused.stdout.fnmatch_lines(
        ['a claim on the host has no time on the GPU: write metric="wall"']
    )
    project.write("test_add.py", text.replace("compare(\n", 'compare(metric="wall",\n'))
    done = project.pytester.runpytest_subprocess("--cpu", "--quick", "-pno:cacheprovider")
    done.stdout.fnmatch_lines(["add (cpu)", "  add *µs*", "1 claim*"])
    (record,) = project.results().values()
    assert record["claim"] == "add/add"
    assert record["outcome"] in ("PASSED", "FAILED")  # depends on the host
    assert record["verdict"]


def test_it_is_measured_on_a_gpu_and_their_other_tests_are_not_run(project):
    spending = "    from tests.fake_gpu import spend\n    spend({} * 1e-6)\n"
    text = NUMPY.replace("    z = x + y\n", spending.format(100) + "    z = x + y\n")
    text = text.replace("baseline=lambda x, y: (x + y) * 2", "baseline=twice")
    project.write(
        "test_add.py",
        text + f"\n\ndef twice(x, y):\n{spending.format(200)}    return (x + y) * 2\n",
    )
    done = project.run("--gpu")
    done.assert_outcomes(passed=1, deselected=1)
    done.stdout.fnmatch_lines(["add (fake)", "  add *µs*µs*x *FASTER*"])


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_project_that_does_not_use_the_plugin_is_left_alone(project, workers):
    project.write(
        "test_theirs.py", "import os\ndef test_it(tmp_path): assert not os.listdir(tmp_path)"
    )
    done = project.pytester.runpytest_subprocess("-pno:cacheprovider", workers)
    done.assert_outcomes(passed=1)
    assert not (project.path / ".aiperf").exists()


OWN_OPTIONS = """\
def pytest_addoption(parser):
    parser.addoption("--gpu", default="0")  # takes a value
    parser.addoption("--quick", action="store_true")


def pytest_report_header(config):
    return f"own: {config.option.gpu} {config.option.quick}"
"""


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_options_of_their_own_keep_their_names(project, workers):
    project.write("conftest.py", OWN_OPTIONS)
    project.tests("def test_it(compare): compare(**usual)")
    checked = project.run("--gpu", "1", "--quick")
    checked.assert_outcomes(passed=1)
    checked.stdout.fnmatch_lines(
        ["aiperf: checking on the CPU (--aiperf-gpu measures *, --cpu *", "own: 1 True"]
    )
    done = project.run("--aiperf-gpu", "--aiperf-quick", "--budget=1h", workers)
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["aiperf: measuring*", "own: 0 False"])
    assert project.results()["ch07/it"]["quick"]


def test_the_help_shows_each_option_once_by_its_short_name(project):
    text = project.run("--help").stdout.str()
    assert "\n  --gpu " in text
    assert "write --aiperf-gpu instead of --gpu" in text
    assert "\n  --aiperf-gpu" not in text


def test_the_plugin_may_be_loaded_by_a_conftest(project, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    project.write("conftest.py", 'pytest_plugins = ["pytest_aiperf.plugin"]\n')
    project.tests("def test_it(compare): compare(**usual)")
    project.run("--aiperf-gpu").assert_outcomes(passed=1)


@pytest.mark.parametrize("autoload", [True, False])
@pytest.mark.parametrize(
    ("arguments", "conftest"),
    [
        (("-p", "pytest_aiperf.plugin"), ""),
        (("-p", "aiperf"), ""),
        ((), 'pytest_plugins = ["pytest_aiperf.plugin"]'),
        (("-p", "aiperf", "-p", "pytest_aiperf.plugin"), "pytest_plugins = 'pytest_aiperf.plugin'"),
    ],
)
def test_an_installed_plugin_may_be_loaded_again(arguments, conftest, autoload, tmp_path):
    done = _markers(tmp_path, *arguments, conftest=conftest, autoload=autoload)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("@pytest.mark.gpu") == 1


def test_an_installed_plugin_can_be_blocked(tmp_path):
    done = _markers(tmp_path, "-p", "no:aiperf")
    assert done.returncode == 0, done.stderr
    assert "@pytest.mark.gpu" not in done.stdout


def _markers(folder, *arguments, conftest="", autoload=True):
    """List pytest's markers where a package with this one's entry points is installed."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = (f"{name} = {module}" for name, module in entry_points["pytest11"].items())
    installed = folder / "installed" / "pytest_aiperf_again-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-aiperf-again\n")
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    (folder / "conftest.py").write_text(conftest)
    path = os.pathsep.join([str(installed.parent), *filter(None, sys.path)])
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environ |= {"PYTHONPATH": path}
    environ |= {} if autoload else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", *arguments, "--markers", "-c/dev/null"]
    command.append(f"--rootdir={folder}")
    return subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_report_that_cannot_be_written_is_refused_before_measuring(project):
    project.tests("def test_it(compare): compare(**usual)")
    project.write("taken", "")
    done = project.run("--gpu", "--aiperf-report=taken/report")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(
        ["ERROR: cannot write taken/report: Not a directory; a file has that name: remove*"]
    )
    assert not (project.path / ".aiperf").exists()


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_a_refused_run_leaves_no_folder(project, workers):
    project.tests("def test_it(compare): compare(**usual)")
    project.write("expectations.yaml", "schema: 1\nclaims:\n  ch07/gone: {}\n")
    assert project.run("--gpu", workers).ret != pytest.ExitCode.OK
    assert not [path for path in (project.path / ".aiperf").glob("*") if path.is_dir()]


def test_a_report_that_fails_at_the_end_leaves_the_table_and_the_results(project):
    project.tests("def test_it(compare): compare(**usual)\nwork = os.mkdir('report/index.html')")
    done = project.run("--gpu", "--aiperf-report=report")
    assert done.ret == pytest.ExitCode.INTERNAL_ERROR
    done.stdout.fnmatch_lines(["ERROR: cannot write report/index.html: *", "1 claim: 1 FASTER*"])
    assert project.results()["ch07/it"]["outcome"] == "PASSED"


def test_a_run_without_claims_leaves_the_latest_results(project):
    project.tests("def test_it(compare): compare(**usual)\ndef test_other(clock): clock(slow, 1.0)")
    project.run("--gpu", "--quick")
    assert project.run("--gpu", "-k", "nothing").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    project.run("--gpu", "-k", "other").assert_outcomes(passed=1, deselected=1)
    assert list(project.results()) == ["ch07/it"]


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_cpu_without_a_host_claim_tells_how_to_mark_one(project, workers):
    project.tests("def test_it(compare): compare(**usual)")
    done = project.run("--cpu", workers)
    assert done.ret != 0
    why = "*no selected claim is marked @pytest.mark.host: mark those *or use --gpu*"
    (done.stderr if workers == "-n0" else done.stdout).fnmatch_lines([why])


def test_claims_that_are_left_out_are_counted_with_what_measures_them(project):
    project.tests("""
def test_unmarked(compare): compare(**usual)

@pytest.mark.host
def test_host(compare): compare(**usual, metric="wall")
""")
    for option, marked, other in (("--cpu", "without", "--gpu"), ("--gpu", "with", "--cpu")):
        done = project.run(option, "--collect-only")
        line = f"aiperf: 1 claim {marked} @pytest.mark.host is left out: add {other}"
        assert line in done.stdout.lines
    assert "left out" not in project.run("--gpu", "--cpu", "--collect-only").stdout.str()
    assert "left out" not in project.run("--collect-only").stdout.str()


def test_an_update_without_a_gpu_names_what_it_measures(project):
    project.tests("def test_it(compare): compare(**usual)")
    project.fake(gpus=0)
    done = project.run("--update-expectations", "--collect-only")
    done.stdout.fnmatch_lines(["aiperf: measuring on this host (no GPU: host claims only); *"])


FIGURES = """
from pytest_aiperf import Score

def scoring(value):
    return lambda x: (Score(value, "tok/s"), x + 1)

@pytest.mark.parametrize("rung", ["lost", "met"])
def test_times(compare, rung):
    compare(**usual | {"optimized": fast if rung == "met" else doubling(200)})

def test_score(compare):
    compare(baseline=scoring(10.0), optimized=scoring(40.0), inputs=vectors, metric="score",
            reference=lambda x: x + 1)
"""


@pytest.mark.parametrize("workers", ["-n0", "-n1"])
def test_other_tools_get_times_as_times_and_every_claim_with_its_ratio(project, workers):
    project.tests(FIGURES)
    files = ("--benchmark-json=b.json", "--junit-xml=j.xml")
    done = project.run("--gpu", "--quick", *files, workers)
    done.assert_outcomes(passed=2, failed=1)
    content = json.loads((project.path / "b.json").read_text())
    assert {b["name"] for b in content["benchmarks"]} == {"test_times[lost]", "test_times[met]"}
    records = by_claim(content)
    assert sorted(records) == ["ch07/score", "ch07/times[lost]", "ch07/times[met]"]
    cases = ET.parse(project.path / "j.xml").getroot().iter("testcase")
    properties = {
        case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")}
        for case in cases
    }
    low, high = (f"{records['ch07/score']['speedup'][k]:.3f}" for k in ("low", "high"))
    assert properties["test_score"] == {
        "verdict": "FASTER",
        "ratio": str(records["ch07/score"]["speedup"]["value"]),
        "interval": f"[{low}, {high}]",
    }
    assert properties["test_times[lost]"]["verdict"] == "SAME"


@pytest.mark.parametrize("selected", ["score", "wide"])
def test_a_run_without_conclusive_times_writes_its_file_for_pytest_benchmark(project, selected):
    wide = "\ndef test_wide(compare): compare(**usual | {'optimized': doubling(170)})\n"
    project.tests(FIGURES + wide)
    project.fake(noise={"layout": 0.5})
    done = project.run("--gpu", "--quick", "--benchmark-json=b.json", "-k", selected)
    done.stdout.no_fnmatch_line("*Not saving anything*")
    [record] = by_claim(json.loads((project.path / "b.json").read_text())).values()
    assert record == project.results()[f"ch07/{selected}"]
    assert record["verdict"] == {"score": "FASTER", "wide": "INCONCLUSIVE"}[selected]


MISTAKES = {
    "optimised=fast": "compare() has no keyword 'optimised'; did you mean optimized?",
    "optimized=slow": "baseline= and optimized= are the same callable, so the claim compares *",
    "baseline=None": "baseline= must be the callable to beat, not None",
    "inputs=np.zeros((99, 99))": (
        "inputs= must be a function of the Bench that returns the arguments of one call, not "
        "array([[0., 0...*"
    ),
    "work=12": (
        "work= must be a function of the same arguments, such as lambda a: Work(read=a.nbytes), "
        "not 12"
    ),
    "evidence=7": "evidence= must be made with functions of pytest_aiperf.evidence, not 7",
    "evidence='LDG'": (
        "evidence= must be made with functions of pytest_aiperf.evidence, not 'LDG': "
        'evidence.opcode("LDG")'
    ),
    "evidence=['LDG.E']": "evidence= must be made with *, not 'LDG.E': *",
    "work=lambda x: x.nbytes": "work() must return a Work, not 64",
    "work=lambda x: Work(flops=1, dtype='float16')": "Work(dtype='float16'): use one of fp64, *",
    "work=lambda x: Work(flops=1)": (
        "Work(flops=...) needs the precision of the operations, *: write Work(flops=..., "
        'dtype="fp32"), or another of fp64, *'
    ),
    "work=lambda x: Work(read='8')": "Work(read='8'): give a finite number that is at least 0",
    "work=lambda x: Work(read=8, written=-1)": "Work(written=-1): give a finite number *",
    "work=lambda x: Work(read=x)": "Work(read=array(*): give a finite number *",
    "work=lambda x: Work(reads=8)": "Work() has no field 'reads'; did you mean read?",
    "work=lambda: Work()": "work=<lambda>() does not take the 1 value that inputs() returns: *",
    "reference=lambda x, y: x": "reference=<lambda>(x, y) does not take the 1 value *",
    "inputs=lambda bench: [0.0, 1.0], optimized=lambda x, y: x": (
        "optimized=<lambda>(x, y) does not take the 1 value that inputs() returns, a list: return "
        "a tuple for several arguments"
    ),
    "inputs=lambda: ()": "inputs() must take one argument, the Bench",
    "inputs=lambda bench: np.random.default_rng(0).random(64)": (
        "inputs() gives the same values for every seed, and an arm that caches its result would "
        "pass: draw random values (np.random.rand and torch.randn are seeded; a generator of your "
        "own takes its seed from bench: np.random.default_rng(bench.seed))"
    ),
    "inputs=lambda bench: None": "inputs() returns None: return the arguments of one call *",
    "inputs=on_gpu": "inputs() needs a GPU (no CUDA here): allocate on bench.device, which *",
    "inputs=lambda bench: bench.size(3)": "bench.size() takes the size to measure *",
    "optimized=lambda x: None": "optimized returns nothing and changes no argument: is a return *",
}
RAISED = {
    "optimized=lambda x: x.nope()": "AttributeError: * has no attribute 'nope'",
    "reference=lambda x: 1 / 0": "ZeroDivisionError: division by zero",
}
CLAIM = """
from pytest_aiperf import Work

def on_gpu(bench):
    raise RuntimeError("no CUDA here")

@pytest.mark.parametrize("i", range({}))
def test_it(compare, i):
"""


def claims_with(words):
    calls = "".join(f"    if i == {i}: compare(**usual | dict({w}))\n" for i, w in enumerate(words))
    return CLAIM.format(len(words)) + calls


def test_a_mistake_is_one_sentence_with_its_line(project):
    path = project.tests(claims_with(MISTAKES))
    lines = path.read_text().splitlines()
    done = project.run()
    done.assert_outcomes(failed=len(MISTAKES))
    for words, sentence in MISTAKES.items():
        number = next(i for i, line in enumerate(lines, 1) if f"dict({words})" in line)
        place = f"ch07/test_double.py:{number}"
        done.stdout.fnmatch_lines([sentence.replace("[", "[[]"), place], consecutive=True)
        done.stdout.fnmatch_lines([f"FAILED *test_it* - {sentence[:40].replace('[', '[[]')}*"])
    done.stdout.no_fnmatch_line("*pytest_aiperf/*")


def test_missing_arguments_are_one_sentence_with_their_line(project):
    path = project.tests(
        """
def test_one(compare):
    compare(baseline=slow, optimized=fast, inputs=vectors)  # 1

def test_two(compare):
    compare(baseline=slow, optimized=fast)  # 2

def test_by_position(compare):
    compare(slow, fast, vectors)  # 3
"""
    )
    sentences = (
        "compare() needs reference=, a function of the same arguments that returns the correct *",
        "compare() needs inputs=, a function of the Bench * and reference=, *",
        "compare() takes its arguments by name: compare(baseline=..., optimized=..., ...)",
    )
    done = project.run()
    done.assert_outcomes(failed=3)
    lines = path.read_text().splitlines()
    for number, sentence in enumerate(sentences, 1):
        line = next(i for i, text in enumerate(lines, 1) if text.endswith(f"# {number}"))
        done.stdout.fnmatch_lines([sentence, f"ch07/test_double.py:{line}"], consecutive=True)
    done.stdout.no_fnmatch_line("*TypeError*")


def test_an_error_in_the_users_code_shows_only_that_code(project):
    project.tests(claims_with(RAISED))
    done = project.run()
    done.assert_outcomes(failed=len(RAISED))
    for error in RAISED.values():
        done.stdout.fnmatch_lines([f"E   {error}"])
    done.stdout.no_fnmatch_line("*pytest_aiperf/*")
    project.run("--full-trace", "-k", "0").stdout.fnmatch_lines(["*pytest_aiperf/claim/*"])
