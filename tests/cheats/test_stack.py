"""Misuses of pytest and of its hooks: a test passes only if the record of its claim does."""

from __future__ import annotations

import textwrap

import pytest

TESTS = """
import contextlib
from pytest_aiperf import ClaimNotMet

not_faster = {**usual, "optimized": doubling(200)}
wrong = {**usual, "optimized": lambda x: fast(x) + 1}
no_claim = {**usual, "metric": "speed"}


def test_caught(compare):
    try:
        compare(**not_faster)
    except Exception:
        pass

def test_suppressed(compare):
    with contextlib.suppress(AssertionError):
        compare(**wrong)

def test_expected_to_raise(compare):
    with pytest.raises(ClaimNotMet):
        compare(**not_faster)

def test_all_caught(compare):
    try:
        compare(**wrong)
    except BaseException:
        return

def test_skipped_when_slower(compare):
    try:
        compare(**not_faster)
    except AssertionError:
        pytest.skip("a busy machine")

def test_skipped_when_wrong(compare):
    try:
        compare(**wrong)
    finally:
        pytest.skip("a busy machine")

def test_refused_and_caught(compare):
    with contextlib.suppress(Exception):
        compare(**no_claim)

def test_called_is_set(compare):
    compare.called = True

def test_another_compare_after_a_failure(compare):
    with contextlib.suppress(Exception):
        compare(**wrong)
    type(compare)(compare._context)(**usual)

def test_another_compare_after_a_success(compare):
    compare(**usual)
    with contextlib.suppress(Exception):
        type(compare)(compare._context)(**{**usual, "optimized": doubling(10)})

def test_exit(compare):
    with contextlib.suppress(Exception):
        compare(**not_faster)
    pytest.exit("done", returncode=0)

def test_end_of_the_process(compare):
    with contextlib.suppress(Exception):
        compare(**not_faster)
    os._exit(0)

@pytest.mark.parametrize("rung", ["a", "b"])
def test_caught_in_a_ladder(compare, rung):
    with contextlib.suppress(Exception):
        compare(**not_faster)

@pytest.fixture
def forgiving(compare):
    def run(**words):
        with contextlib.suppress(Exception):
            return compare(**words)
    return run

def test_caught_in_a_fixture(forgiving):
    forgiving(**not_faster)
"""
MISUSES = {  # the outcome of each record; its test must fail
    "caught": "FAILED",
    "suppressed": "FAILED",
    "expected_to_raise": "FAILED",
    "all_caught": "FAILED",
    "skipped_when_slower": "FAILED",
    "skipped_when_wrong": "FAILED",
    "refused_and_caught": "ERROR",
    "called_is_set": "ERROR",
    "another_compare_after_a_failure": "FAILED",
    "another_compare_after_a_success": "ERROR",
    "exit": "FAILED",
    "end_of_the_process": "FAILED",
    "caught_in_a_ladder[a]": "FAILED",
    "caught_in_a_ladder[b]": "FAILED",
    "caught_in_a_fixture": "FAILED",
}
HONEST_TESTS = """
import contextlib
from pytest_aiperf import ClaimNotMet

not_faster = {**usual, "optimized": doubling(200)}


def test_skipped_before_it_compares(compare):
    pytest.skip("needs a licence")

def test_raised_again(compare):
    try:
        compare(**not_faster)
    except ClaimNotMet as error:
        raise AssertionError("tune it") from error

@pytest.mark.xfail(strict=False)
def test_caught_and_expected_to_fail(compare):
    with contextlib.suppress(Exception):
        compare(**not_faster)

@pytest.mark.xfail(reason="slow on this GPU")
def test_marked_as_an_expected_failure(compare):
    compare(**not_faster)

def test_declared_an_expected_failure(compare):
    try:
        compare(**not_faster)
    except ClaimNotMet:
        pytest.xfail("slow on this GPU")

def test_another_exception_is_caught(compare):
    with contextlib.suppress(ZeroDivisionError):
        1 / 0
    compare(**usual)

def test_cleaned_up(compare):
    try:
        result = compare(**usual)
    finally:
        open("cleaned", "w").close()
    assert result.outcome == "PASSED"

def test_skipped_after_a_success(compare):
    compare(**usual)
    pytest.skip("the rest needs a licence")

@pytest.mark.parametrize("rung", ["a", "b"])
def test_ladder_in_a_block(compare, rung):
    with contextlib.suppress(ZeroDivisionError):
        compare(**usual)
"""
HONEST = {  # the outcome of each record, and what pytest says
    "skipped_before_it_compares": ("SKIPPED", "SKIPPED"),
    "raised_again": ("FAILED", "FAILED"),
    "caught_and_expected_to_fail": ("FAILED", "XFAIL"),
    "marked_as_an_expected_failure": ("FAILED", "XFAIL"),
    "declared_an_expected_failure": ("FAILED", "XFAIL"),
    "another_exception_is_caught": ("PASSED", "FASTER"),
    "cleaned_up": ("PASSED", "FASTER"),
    "skipped_after_a_success": ("SKIPPED", "SKIPPED"),
    "ladder_in_a_block[a]": ("PASSED", "FASTER"),
    "ladder_in_a_block[b]": ("PASSED", "FASTER"),
}


@pytest.fixture(scope="module")
def run_once(request):
    """Return a function that runs a file once per process; it returns words and records by test."""
    done = {}

    def run(project, text, *words):
        if (text, words) not in done:
            project.tests(text)
            outcome = project.run("-v", *words)
            rows = [line.split("::test_")[1] for line in outcome.outlines if "%]" in line]
            said = dict(row.split(" ")[:2] for row in rows)
            records = project.results() if words else {}
            done[text, words] = outcome.ret, said, records
        return done[text, words]

    return run


@pytest.mark.parametrize("name", MISUSES)
def test_it_is_refused(name, project, run_once):
    status, said, records = run_once(project, TESTS, "--gpu", "--quick")
    assert (said[name], records[f"ch07/{name}"]["outcome"]) == ("FAILED", MISUSES[name])
    assert records[f"ch07/{name}"]["message"]
    assert status == pytest.ExitCode.TESTS_FAILED
    assert said.keys() == MISUSES.keys()


@pytest.mark.parametrize(
    "name",
    [
        *("suppressed", "all_caught", "skipped_when_wrong", "refused_and_caught", "called_is_set"),
        *("another_compare_after_a_failure", "another_compare_after_a_success"),
    ],
)
def test_it_is_refused_by_the_check(name, project, run_once):
    text = TESTS.replace("os._exit(0)", "").replace('pytest.exit("done", returncode=0)', "")
    _, said, _ = run_once(project, text)
    assert said[name] == "FAILED"


@pytest.mark.parametrize("name", HONEST)
def test_it_is_accepted(name, project, run_once):
    _, said, records = run_once(project, HONEST_TESTS, "--gpu", "--quick")
    assert (records[f"ch07/{name}"]["outcome"], said[name]) == HONEST[name]


CLAIM = "def test_it(compare): compare(**usual | {'optimized': doubling(200)})"
HOOKS = {
    "reports_that_pass": """
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.outcome, report.longrepr = "passed", None
            return report
    """,
    "reports_that_are_shown_as_passed": """
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_logreport(report):
            report.outcome, report.longrepr = "passed", None
            return (yield)
    """,
    "exceptions_that_a_hook_catches": """
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_call(item):
            try:
                return (yield)
            except BaseException:
                return None
    """,
    "tests_that_do_not_run": """
        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            return True
    """,
    "an_exit_status_of_success": """
        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(session):
            session.exitstatus = 0
    """,
    "an_exit_in_a_hook": """
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(report):
            if report.when == "call":
                report.outcome = "passed"
                pytest.exit("done", returncode=0)
    """,
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_conftest_cannot_hide_it(name, project):
    project.pytester.makeconftest("import pytest\n" + textwrap.dedent(HOOKS[name]))
    project.tests(CLAIM)
    done = project.run("--gpu", "--quick")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    outcome = project.results()["ch07/it"]["outcome"]
    assert outcome in ("FAILED", "ERROR", "NOT_RUN")


def test_honest_hooks_change_nothing(project):
    project.pytester.makeconftest("""
        import pytest

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.sections.append(("note", "seen"))
            return report

        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(session):
            session.config.finished = True
    """)
    project.tests("def test_it(compare): compare(**usual)")
    project.run("--gpu", "--quick").assert_outcomes(passed=1)


MACHINES = {
    "a_subclass": "class Mine(CudaMachine):\n    pass\n",
    "another_class": (
        "class Mine:\n    gpus = CudaMachine().gpus\n    open_device = CudaMachine().open_device\n"
        "    ceilings = CudaMachine().ceilings\n"
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_of_the_users_is_named_and_not_accepted(name, project):
    project.pytester.makeconftest(
        "from pytest_aiperf.session.cuda_machine import CudaMachine\n"
        f"{MACHINES[name]}\n\ndef pytest_aiperf_machine():\n    return Mine()\n"
    )
    project.tests("@pytest.mark.host\ndef test_it(compare): compare(**usual, metric='wall')")
    done = project.pytester.runpytest_subprocess("--cpu", "--quick", "-pno:cacheprovider")
    done.stdout.fnmatch_lines(["aiperf: * (not checked: the clock of conftest.Mine); seed *"])
    assert project.results()["ch07/it"]["unchecked"] == ["the clock of conftest.Mine"]


def test_an_instance_of_the_usual_machine_has_no_methods_of_its_own():
    from pytest_aiperf.session.cuda_machine import CudaMachine

    with pytest.raises(AttributeError):
        CudaMachine().open_device = None


TIMERS = {
    "a_timer": "time.perf_counter_ns = lambda: 0",
    "a_timer_with_the_usual_name": """
        class Timer:
            def __repr__(self): return "<built-in function perf_counter_ns>"
            def __call__(self): return 0
        time.perf_counter_ns = Timer()
    """,
    "another_timer_of_python": "time.perf_counter_ns = time.thread_time_ns",
    "a_timer_while_the_plugin_is_imported": """
        usual = time.perf_counter_ns
        time.perf_counter_ns = lambda: 2 * usual()
        import pytest_aiperf.device.device
        time.perf_counter_ns = usual
    """,
    "the_plugins_timer": """
        import pytest_aiperf.device.device
        pytest_aiperf.device.device.now = time.process_time_ns
    """,
    "the_events_of_torch": """
        import torch
        torch.cuda.Event.elapsed_time = lambda self, end: 1.0
    """,
}


@pytest.mark.parametrize("name", TIMERS)
def test_a_timer_replaced_by_a_conftest_is_refused(name, project):
    project.pytester.makeconftest("import time\n" + textwrap.dedent(TIMERS[name]))
    project.tests("@pytest.mark.host\ndef test_it(compare): compare(**usual, metric='wall')")
    # the fake machine would import the plugin before the conftest.py
    done = project.pytester.runpytest_subprocess("--cpu", "--quick", "-pno:cacheprovider")
    done.assert_outcomes(failed=1)
    record = project.results()["ch07/it"]
    assert record["outcome"] == "INVALID"
    assert "was replaced" in record["message"]


SCORES = {
    "another_unit": "lambda x: (fast(x), Score(3.0, 'ktokens/s'))",
    "another_direction": "lambda x: (fast(x), Score(0.5, 'tokens/s', 'lower'))",
    "no_direction": "lambda x: (fast(x), Score(3.0, 'tokens/s', 'bigger'))",
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_different_kinds_are_refused(name, project):
    project.tests(f"""
from pytest_aiperf import Score

def test_it(compare):
    baseline = lambda x: (fast(x), Score(2.0, 'tokens/s'))
    compare(**usual | {{"baseline": baseline, "optimized": {SCORES[name]}}}, metric="score")
""")
    project.run("--gpu", "--quick").assert_outcomes(failed=1)
    record = project.results()["ch07/it"]
    assert record["outcome"] == "ERROR"
    assert "'higher' or 'lower'" in record["message"]
