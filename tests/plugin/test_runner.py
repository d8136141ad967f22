"""`pytest --gpu` on the fake GPU: verdicts, records, expectations."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from pytest_aiperf.machine import gpu_memory
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.records.journal import read_manifest
from pytest_aiperf.records.results import read_results
from tests.fake_gpu import FAKE_GPU

from .conftest import PATIENCE_S, STEADY, by_claim

TWO = """
def test_faster(compare):
    compare(**usual)

def test_same(compare):
    compare(**usual | {"optimized": doubling(200)})
"""


def test_why_a_claim_is_undecided_is_explained_once(project):
    project.tests('def test_near(compare):\n    compare(**usual | {"optimized": doubling(199)})\n')
    project.fake(noise=STEADY | {"layout": 0.2})
    done = project.run("--gpu", "--quick", "--reproducible")
    done.assert_outcomes(failed=1)
    text = done.stdout.str()
    advice = "the interval contains 1 and is too wide for SAME"
    assert text.count(advice) == 1
    short = "undecided: INCONCLUSIVE where FASTER is claimed: *x [[]*, *]"
    done.stdout.fnmatch_lines(
        [short, f"{advice}*", f"ch07/near: {short}", f"FAILED ch07/*::test_near - {short}"]
    )
    assert advice in project.results()["ch07/near"]["message"]


def test_a_claim_that_holds_and_one_that_does_not(project):
    project.tests(TWO)
    done = project.run("--gpu", "-v")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(
        [
            "aiperf: measuring on Fake H200 (fake, driver 0); seed *",
            "*::test_faster FASTER *x *",
            "*::test_same FAILED *",
            "SAME where FASTER is claimed: *x [[]*, *]",
            "results: *results.json",
            "  faster * µs * µs  *x [[]*, *] * FASTER *",
            "2 claims, 1 failed: 1 FASTER, 1 SAME (lost); geometric mean 1.4*x",
            "ch07/same: SAME where FASTER is claimed*",
            "measure again:  pytest --gpu -v ch07/test_double.py::test_same",
            "write a report: python -m pytest_aiperf report .aiperf/latest/results.json",
        ]
    )
    # on a busy machine the first attempt may be too noisy for SAME
    assert re.search(r"second attempt; the first: \w+ where FASTER is claimed", done.stdout.str())
    manifest = read_manifest(project.path / ".aiperf" / "latest")
    assert manifest.settings["aiperf_kernels"] == "kernels"
    assert manifest.settings["aiperf_deadline"]
    faster, same = project.results().values()
    assert faster["outcome"] == "PASSED"
    assert faster["title"] == "Half the work takes half the time."
    assert same["attempts"] == 2  # a failure is confirmed in a new process
    rounds = [{len(r["rounds"]) for r in each["timing"]["replicates"]} for each in (faster, same)]
    assert rounds == [{2}, {3}]  # the median of three leaves a disturbed one out
    timing = faster["timing"]
    assert len(timing["replicates"]) >= 6
    blocks = timing["replicates"][0]["rounds"][0]["seconds"]
    assert blocks["baseline"][0] == pytest.approx(200e-6, rel=0.1)
    assert blocks["optimized"][1] == pytest.approx(100e-6, rel=0.1)


def test_a_worker_skips_what_its_own_gpu_lacks(project):
    project.fake(gpus=[{}, {"name": "Fake A100", "key": "a100", "arch": "sm80"}])
    project.tests(
        "@pytest.mark.gpu(min_sm=90)\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_it(compare, n): compare(**usual)\n"
    )
    project.run("--gpu", "-n2")
    records = project.results().values()
    assert {(r["key"], r["outcome"]) for r in records} == {("fake", "PASSED"), ("a100", "SKIPPED")}
    reasons = {r["message"] for r in records if r["outcome"] == "SKIPPED"}
    assert reasons == {"needs sm90 or newer, Fake A100 is sm80"}


@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_runs_go_to_the_folder_of_the_setting(project, workers):
    project.tests("def test_faster(compare): compare(**usual)")
    done = project.run("--gpu", "-oaiperf_runs=kept/runs", *workers)
    done.assert_outcomes(passed=1)
    assert not (project.path / ".aiperf").exists()
    assert read_results(project.path / "kept" / "runs" / "latest" / "results.json")
    done.stdout.fnmatch_lines(["write a report: *report kept/runs/latest/results.json"])


def test_workers_come_to_the_same_verdicts(project):
    project.tests(TWO)
    project.fake(gpus=2)
    done = project.run("--gpu", "-n2")
    done.assert_outcomes(passed=1, failed=1)
    outcomes = {claim: (r["verdict"], r["attempts"]) for claim, r in project.results().items()}
    assert outcomes == {"ch07/faster": ("FASTER", 1), "ch07/same": ("SAME", 2)}


def test_quick_noisy_and_slower(project):
    project.tests(
        """
def test_noise(compare):
    compare(**usual | {"optimized": doubling(200)})

def test_slower(compare):
    compare(**usual | {"optimized": doubling(1000)})
"""
    )
    project.fake(noise={"white": 0.15})
    project.run("--gpu", "--quick", "--reproducible").assert_outcomes(failed=2)
    noise, slower = project.results().values()
    assert (noise["verdict"], slower["verdict"]) == ("INCONCLUSIVE", "SLOWER")
    assert (noise["quick"], noise["attempts"]) == (True, 1)


def test_skips_are_counted_by_reason(project):
    project.tests(
        """
@pytest.mark.sm100
def test_arch(compare): compare(**usual)

@pytest.mark.sm103
@pytest.mark.sm100
def test_archs(compare): compare(**usual)

@pytest.mark.gpu(count=2)
def test_two(compare): compare(**usual)

@pytest.mark.gpu(count=2)
def test_two_more(compare): compare(**usual)

@pytest.mark.gpu(memory=200 << 30)
def test_memory(compare): compare(**usual)

@pytest.mark.gpu(min_sm=100)
def test_newer(compare): compare(**usual)

@pytest.mark.gpu(features=("tma", "tcgen05"))
def test_feature(compare): compare(**usual)
"""
    )
    done = project.run("--gpu")
    done.assert_outcomes(skipped=7)
    totals = " ".join(line.strip() for line in done.outlines)
    assert "0 claims; 7 skipped (" in totals
    for reason in (
        "needs 2 GPUs, this machine has 1: 2",
        "needs sm100, Fake H200 is sm90: 1",
        "needs sm100 or sm103, Fake H200 is sm90: 1",
        "needs 200 GiB of GPU memory, Fake H200 has 141 GiB: 1",
        "needs sm100 or newer, Fake H200 is sm90: 1",
        "needs tcgen05, Fake H200 is sm90: 1",
    ):
        assert reason in totals


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_the_options_of_pytest_benchmark(project, workers):
    project.tests("def test_faster(compare): compare(**usual)")
    done = project.run("--gpu", workers, "--benchmark-json=out.json", "--benchmark-save=first")
    done.assert_outcomes(passed=1)
    document = json.loads((project.path / "out.json").read_text())
    (entry,) = document["benchmarks"]
    assert entry["fullname"] == "ch07/test_double.py::test_faster"
    assert entry["stats"]["median"] == pytest.approx(100e-6, rel=0.05)
    assert document["machine_info"]["gpus"] == [{"name": "Fake H200", "driver": "0"}]
    assert by_claim(document) == project.results()
    done = project.run("--gpu", workers, "--benchmark-compare")
    done.stdout.fnmatch_lines(["*benchmark 'ch07/faster': 2 tests*", "*test_faster (*"])


@pytest.mark.parametrize("wanted", [False, True], ids=["not asked for", "asked for"])
def test_a_failure_does_not_show_what_torch_traces(project, monkeypatch, wanted):
    if wanted:
        monkeypatch.setenv("TORCH_TRACE", str(project.path))
    project.tests("""
import logging

def test_wrong(compare):
    logging.getLogger("torch.__trace").warning("a %s", "frame")
    logging.getLogger("mine").warning("my own")
    raise ZeroDivisionError
""")
    done = project.run("--gpu")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*my own*"])
    assert ("a frame" in done.stdout.str()) is wanted


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_worker_compiles_without_a_pool_of_compilers(project, monkeypatch, workers):
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.delenv(name, raising=False)
    wanted = "1" if workers == "-n2" else None
    project.tests(f"""
import os

def test_env(compare):
    assert os.environ.get({name!r}) == {wanted!r}
    compare(**usual)
""")
    project.run("--gpu", workers).assert_outcomes(passed=1)


def test_expectations_from_their_first_writing_to_a_loss(project):
    text = "def test_faster(compare): compare(**usual)"
    path = project.tests(text)
    done = project.run("--update-expectations")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["+*ch07/faster:", "+*fake*: {speedup: [[]*, runs: 1, code: *"])
    expected = project.path / "expectations.yaml"
    first = expected.read_text()
    accepted = by_claim(json.loads((project.path / "results" / "fake.json").read_text()))
    measured = project.results()
    measured["ch07/faster"]["gpu"]["uuid"] = ""  # accepted results do not identify the GPU
    assert accepted == measured

    project.run("--gpu").assert_outcomes(passed=1)
    assert project.results()["ch07/faster"]["expectation"]["stale"] is False
    assert expected.read_text() == first

    path.write_text(path.read_text().replace("doubling(100)", "doubling(120)"))
    done = project.run("--gpu", "-v")  # -v keeps every column
    done.assert_outcomes(passed=1)  # changed code is not compared
    done.stdout.fnmatch_lines(["* FASTER * stale"])

    code = project.results()["ch07/faster"]["code"]
    expected.write_text(re.sub(r'code: "?\w+"?', f'code: "{code}"', first))
    done = project.run("--gpu")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["speedup 1.6*x [[]*] has dropped below the recorded *x * of fake"])
    assert project.results()["ch07/faster"]["attempts"] == 2

    # wall time depends on the host, and another host may have recorded it
    path.write_text(path.read_text().replace("(**usual)", "(**usual, metric='wall')"))
    project.run("--gpu").assert_outcomes(passed=1)
    code = project.results()["ch07/faster"]["code"]
    expected.write_text(re.sub(r'code: "?\w+"?', f'code: "{code}"', first))
    project.run("--gpu").assert_outcomes(passed=1)
    assert project.results()["ch07/faster"]["expectation"]["stale"] is False


def test_the_code_of_a_claim_includes_the_fixtures_that_it_uses(project):
    """Two files are called conftest.py: the claim uses a fixture of one of them."""

    def code(arm, other):
        unused = f"import pytest\n@pytest.fixture\ndef other(): return {other}"
        project.write("conftest.py", unused)
        project.write(
            "ch07/conftest.py",
            f"""
import pytest
from tests.fake_gpu import spend

def double(x):
    spend({arm}e-6)
    return x * 2

@pytest.fixture
def arm(): return double
""",
        )
        project.run("--gpu", "--quick").assert_outcomes(passed=1)
        return project.results()["ch07/it"]["code"]

    project.tests("def test_it(compare, arm): compare(**usual | {'optimized': arm})")
    first = code(100, 1)
    assert code(100, 2) == first
    assert code(50, 2) != first


def test_what_a_human_requires_is_held(project):
    project.tests(
        "def test_low(compare): compare(**usual)\n"
        "def test_high(compare): compare(**usual)\n"
        "def test_library(compare): compare(**usual, library=fast)\n"
    )
    project.write(
        "expectations.yaml",
        "schema: 1\nclaims:\n  ch07/low: {require: {speedup: 1.9}}\n"
        "  ch07/high: {require: {speedup: 2.5}}\n  ch07/library: {require: {library: 1.5}}\n",
    )
    done = project.run("--gpu", "--quick")
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(
        [
            "speedup *: its lower end is below the 2.5x that expectations.yaml requires",
            "library ratio *: its lower end is below the 1.5x that expectations.yaml requires",
        ]
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("claims:\n  a/b: {}\n  a/b: {}\n", "expectations.yaml:4:*twice*"),
        ("claims:\n  a/b: {require: {speedup: .nan}}\n", "expectations.yaml:3:*nan*"),
        ("claims:\n  a/b: !!python/object:os.system {}\n", "expectations.yaml:3:*tag*"),
        ("claims:\n  a/b: {require: {speedup: 1", "expectations.yaml:*"),
        ("claims: {}\n", "expectations.yaml:1:9: *newer*(schema 2)*"),
    ],
    ids=["twice", "nan", "tag", "truncated", "newer"],
)
def test_a_bad_expectations_file_is_reported_before_anything_runs(project, text, said):
    project.tests("def test_it(compare): compare(**usual)")
    schema = "schema: 2\n" if "newer" in said else "schema: 1\n"
    project.write("expectations.yaml", schema + text)
    done = project.run("--gpu")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, done.errlines)
    assert not done.outlines
    pytest.LineMatcher([line]).fnmatch_lines([f"ERROR: *{said}"])


def test_what_does_not_fit_the_budget_is_listed(project):
    # the budget is spent once the first claim has begun, however busy the machine is
    project.write(
        "conftest.py",
        "import time\n"
        "from pathlib import Path\n"
        "from types import SimpleNamespace\n"
        "from pytest_aiperf.session import session\n"
        "clock = lambda: time.time() + 1000 * Path('begun').exists()\n"
        "session.time = SimpleNamespace(time=clock)\n",
    )
    project.tests(
        "def test_first(compare):\n    open('begun', 'w').close()\n    compare(**usual)\n"
        "def test_second(compare): compare(**usual)\n"
        "def test_third(compare): compare(**usual)\n"
    )
    done = project.run("--gpu", "--budget", "500s")
    assert done.ret == 0
    done.assert_outcomes(passed=1, skipped=2)
    done.stdout.fnmatch_lines(
        ["not run: ch07/second, ch07/third (the session's budget of 500 s is spent)"]
    )
    outcomes = [r["outcome"] for r in project.results().values()]
    assert outcomes == ["PASSED", "NOT_RUN", "NOT_RUN"]


def test_a_run_that_stops_at_a_failure_and_an_expected_failure(project):
    project.tests(
        "same = usual | {'optimized': doubling(200)}\n"
        "@pytest.mark.xfail\ndef test_expected(compare): compare(**same)\n"
        "def test_lost(compare): compare(**same)\n"
        "def test_never(compare): compare(**usual)\n"
    )
    done = project.run("--gpu", "--quick", "-x")
    done.assert_outcomes(xfailed=1, failed=1)
    done.stdout.fnmatch_lines(["not run: ch07/never (stopped at a failure)"])
    outcomes = [r["outcome"] for r in project.results().values()]
    assert outcomes == ["FAILED", "FAILED", "NOT_RUN"]


def test_reproducible_runs_have_the_same_seeds_and_others_do_not(project):
    project.tests("def test_it(compare): compare(**usual)")
    project.fake(session_seed=None)
    seeds = []
    for words in (["--reproducible"], ["--reproducible"], [], []):
        project.run("--gpu", "--quick", *words).assert_outcomes(passed=1)
        record = project.results()["ch07/it"]
        seeds.append([record["seed"], *(r["seed"] for r in record["timing"]["replicates"][:5])])
    assert seeds[0] == seeds[1]
    assert len({claim for claim, *_ in seeds}) == 3


def test_a_reproducible_run_says_what_it_set_and_is_not_compared_with_recorded_figures(project):
    project.tests(
        """
import torch

def deterministic(microseconds):
    def double(x):
        spend(microseconds * 1e-6)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        return x * 2
    return double

def test_it(compare):
    compare(**usual | {"baseline": deterministic(200), "optimized": deterministic(100)})
"""
    )
    recorded = "{speedup: [8.9, 9, 9.1], runs: 1, code: %s, stack: torch, recorded: '2026-01-01'}"
    project.run("--gpu", "--quick", "--reproducible").assert_outcomes(passed=1)
    entry = recorded % json.dumps(project.results()["ch07/it"]["code"])
    project.write("expectations.yaml", f"schema: 1\nclaims:\n  ch07/it:\n    fake: {entry}\n")
    ran = project.run("--gpu", "--quick", "--reproducible")
    ran.assert_outcomes(passed=1)
    text = "session seed 0, torch's deterministic algorithms, CUBLAS_WORKSPACE_CONFIG=:4096:8"
    ran.stdout.fnmatch_lines(
        ["aiperf: measuring on * --reproducible; seed 0; *", f"--reproducible: {text}", "claim *"]
    )
    record = project.results()["ch07/it"]
    assert record["conditions"] == {"reproducible": text}
    assert record["expectation"]["recorded"]["speedup"] == [8.9, 9, 9.1]


def test_a_cold_start_begins_with_empty_build_caches_and_removes_them(project):
    variables = ("PYTEST_AIPERF_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    project.tests(
        f"""
@pytest.mark.parametrize("n", [1, 2])
def test_it(compare, n):
    folders = [os.environ[name] for name in {variables}]
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
        open(os.path.join(folder, f"built-{{n}}"), "x").close()  # nothing of an earlier run
    with open("folders", "a") as file:
        print(*folders, file=file)
    compare(**usual)
"""
    )
    for words in ([], ["-n2"]):
        ran = project.run("--gpu", "--quick", "--cold-start", *words)
        ran.assert_outcomes(passed=2)
    folders = (project.path / "folders").read_text().split()
    assert len(folders) == 12
    assert len(set(folders[:6])) == len(set(folders[6:])) == 3  # one for all processes of a run
    assert not set(folders[:6]) & set(folders[6:])
    assert not any(Path(folder).parent.exists() for folder in folders)
    ran.stdout.fnmatch_lines(["--cold-start: build caches empty at the start: nvcc, Triton, *"])
    [condition] = {str(r["conditions"]) for r in project.results().values()}
    assert "build caches empty at the start" in condition


def test_the_clock_fixture_and_the_gpu_fixture(project):
    project.tests(
        """
def test_clock(clock, gpu):
    assert gpu.name == "Fake H200"
    seconds = clock(slow, np.zeros(3))
    assert seconds.low <= seconds.value <= seconds.high
    assert 150e-6 < seconds.value < 250e-6
    assert str(seconds).count(" µs") == 3
"""
    )
    project.run("--gpu").assert_outcomes(passed=1)


def test_host_claims_are_measured_without_a_gpu(project):
    project.tests(
        """
@pytest.mark.host
def test_host(compare): compare(**usual, metric="wall")

def test_device(compare): compare(**usual)
"""
    )
    project.fake(gpus=0)
    done = project.run("--cpu")
    done.assert_outcomes(passed=1, deselected=1)
    host = project.results()["ch07/host"]
    assert host["key"] == "cpu"
    assert host["stack"]["processor"].endswith(f"{len(os.sched_getaffinity(0))} logical CPUs")


def test_a_host_claim_is_recorded_but_judged_by_its_requirements_only(project):
    project.tests('@pytest.mark.host\ndef test_host(compare): compare(**usual, metric="wall")')
    project.fake(gpus=0)
    done = project.run("--update-expectations")
    lines = ["accepted ch07/host on cpu: *", "+    cpu: {speedup: *logical CPUs*"]
    done.stdout.fnmatch_lines(lines)
    accepted = by_claim(json.loads((project.path / "results" / "cpu.json").read_text()))
    assert accepted == project.results()

    expected = project.path / "expectations.yaml"
    text = re.sub(r"(speedup: )[^]]*", r"\1[50.0, 51.0, 52.0", expected.read_text())
    for require, outcome in ((1.5, "passed"), (3, "failed")):
        expected.write_text(f"{text}    require: {{speedup: {require}}}\n")
        project.run("--cpu").assert_outcomes(**{outcome: 1})


THREADS = """
import os
import torch
from threadpoolctl import threadpool_info

def test_threads(compare):
    seen = set()
    def optimized(x):
        pools = threadpool_info()
        seen.update(pool["num_threads"] for pool in pools if pool["user_api"] == "blas")
        return usual["optimized"](x)
    compare(**usual | {"optimized": optimized})
    cores = len(os.sched_getaffinity(0))
    assert seen == {max(1, cores // WORKERS), cores}

def test_settings(compare):
    def optimized(x):
        torch.set_num_threads(1 + torch.get_num_threads())
        return usual["optimized"](x)
    compare(**usual | {"optimized": optimized})
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_the_cores_until_they_time(project, workers):
    project.tests(THREADS.replace("WORKERS", str(workers)))
    done = project.run("--gpu", f"-n{workers}")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*an arm changed global settings (*torch.get_num_threads: *"])


TIMEOUT = """
import signal
import pytest

class Hooks:
    @pytest.hookspec(firstresult=True)
    def pytest_timeout_set_timer(self, item, settings): ...

def pytest_addhooks(pluginmanager):
    pluginmanager.add_hookspecs(Hooks)

def fail(*_):
    pytest.fail("Timeout")

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    mark = item.get_closest_marker("timeout")
    signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, mark.args[0] if mark else 0.1)
    result = yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    return result
"""


def test_pytest_timeout_ends_no_session(project):
    project.write("conftest.py", TIMEOUT)  # like pytest-timeout with `timeout = 0.1`
    project.tests("""
@pytest.mark.timeout(0.2)
def test_it(compare):
    time.sleep(1)
    compare(**usual)
""")
    project.run("--gpu", "--quick").assert_outcomes(passed=1)


def test_a_noisy_machine_is_reported_with_its_first_claim_and_in_the_summary(project):
    project.tests("def test_1(compare): compare(**usual)\ndef test_2(compare): compare(**usual)")
    project.fake(noise={"layout": 0.5})
    for words in ((), ("-n2",)):
        done = project.run("--gpu", "--quick", *words)
        lines = [line for line in done.outlines if re.match("noisy: two |=+ claims =", line)]
        assert [line[0] for line in lines] == ["n", "=", "n"]


def test_a_wait_for_another_pytest_is_printed_without_a_terminal(project):
    project.tests("def test_it(compare): compare(**usual)")
    out = project.path / "out"
    with GpuLock([FAKE_GPU.uuid], project.path / "locks").exclusive_gpu():
        process = project.start("--gpu", "--quick")
        end = time.monotonic() + PATIENCE_S
        while "ch07/it is waiting for " not in out.read_text() and time.monotonic() < end:
            time.sleep(0.1)
        shown = out.read_text()
    assert process.wait(PATIENCE_S) == 0
    assert shown.count("ch07/it is waiting for ") == 1, "not until the wait was over"
    assert out.read_text().count("ch07/it is waiting for ") == 1


def test_a_claim_begins_when_no_other_has_the_host_for_itself(project):
    project.tests("""
from pathlib import Path

def test_it(compare):
    Path("began").touch()
    compare(**usual)
""")
    out = project.path / "out"
    with GpuLock([], project.path / "locks").exclusive_host():
        process = project.start("--gpu", "--quick")
        end = time.monotonic() + PATIENCE_S
        while "ch07/it is waiting for the host" not in out.read_text() and time.monotonic() < end:
            time.sleep(0.1)
        assert not (project.path / "began").exists()
    assert process.wait(PATIENCE_S) == 0
    (log,) = (project.path / ".aiperf" / "latest").glob("phases-*.jsonl")
    phases = [json.loads(line) for line in log.read_text().splitlines()]
    assert [p["phase"] for p in phases[:3]] == [
        "starting",
        "waiting for the host, which another claim holds",
        "starting",
    ]
    assert {p.get("alone", "") for p in phases if p["phase"] == "checking results"} == {""}
    assert "GPU" in {p.get("alone") for p in phases if p["phase"] == "measuring"}


@pytest.mark.parametrize("where", ["inputs", "before compare"])
def test_a_claim_that_runs_out_of_memory_is_measured_again_with_all_of_it(project, where):
    project.tests(f"""
import os
from pathlib import Path

class OutOfMemoryError(RuntimeError):
    pass

def lack():
    from pytest_aiperf.machine.gpu_lock import default_folder

    entries = [p for p in default_folder().glob("memory-*") if not p.suffix]  # no gate, no turn
    with open("reserved", "a") as file:
        print(os.getpid(), sum(int(p.read_text().split()[0]) for p in entries), file=file)
    if Path("reserved").read_text().split()[0] == str(os.getpid()):
        raise OutOfMemoryError("tried to allocate 4 GiB")

def inputs(bench):
    if {where!r} == "inputs" and bench.full:
        lack()
    return usual["inputs"](bench)

def test_it(compare):
    if {where!r} == "before compare":
        lack()
    compare(**{{**usual, "inputs": inputs}})
""")
    done = project.run("--gpu")
    done.assert_outcomes(passed=1)
    (record,) = project.results().values()
    assert (record["outcome"], record["attempts"]) == ("PASSED", 2)
    *_, reserved = (project.path / "reserved").read_text().split()
    assert int(reserved) == int(gpu_memory.USABLE_SHARE * record["gpu"]["memory_bytes"])


def test_a_claim_that_runs_out_of_an_unknown_amount_of_memory_is_measured_again(project):
    project.fake(gpus=[{"memory_bytes": 0}])  # NVML does not report that of a GB10
    project.tests(
        "from pathlib import Path\n"
        "def test_it(compare):\n"
        "    if not Path('first').exists():\n"
        "        Path('first').touch()\n"
        "        raise RuntimeError('CUDA error: out of memory')\n"
        "    compare(**usual)\n"
    )
    project.run("--gpu").assert_outcomes(passed=1)
    (record,) = project.results().values()
    assert (record["outcome"], record["attempts"]) == ("PASSED", 2)


def test_a_record_that_no_file_can_hold_costs_only_its_claim(project):
    project.tests(
        "from pytest_aiperf.session import SESSION\n"
        "@pytest.mark.parametrize('record', [{'title': float('nan')}, {'title': 5}])\n"
        "def test_bad(compare, request, record):\n"
        "    nodeid = request.node.nodeid\n"
        "    request.config.stash[SESSION].send('result', result={'nodeid': nodeid, **record})\n"
        "def test_good(compare): compare(**usual)\n"
    )
    project.run("--gpu").assert_outcomes(passed=1, failed=2)
    messages = [r["message"] for r in project.results().values() if r["outcome"] == "ERROR"]
    assert messages == [
        "its record is invalid: Result.title: nan is not a finite number",
        "its record is invalid: Result: claim is missing",
    ]


def test_properties_of_a_test_may_be_any_objects(project):
    project.tests(
        "from pathlib import Path\n"
        "def test_it(compare, record_property):\n"
        "    record_property('file', Path('a/b'))\n"
        "    record_property('figure', np.float32(0.5))\n"
        "    compare(**usual)\n"
    )
    project.run("--gpu", "--junitxml=junit.xml").assert_outcomes(passed=1)
    text = (project.path / "junit.xml").read_text()
    assert '<property name="file" value="a/b"' in text
    assert '<property name="figure" value="0.5"' in text
