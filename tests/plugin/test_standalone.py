"""`pytest_aiperf.measure`: the arms of a claim, outside pytest."""

import functools
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

import pytest_aiperf
from pytest_aiperf import Outcome, UsageError, Verdict, Work, prepared
from pytest_aiperf.claim import measure
from pytest_aiperf.machine.gpu_lock import GpuLock
from pytest_aiperf.session import standalone
from pytest_aiperf.session.figures import SharedFigures
from pytest_aiperf.session.fixtures import refuse_identical_arms
from pytest_aiperf.session.session import Session
from tests.fake_gpu import FAKE_GPU, FakeMachine, Noise

from .claims import doubling, vectors
from .conftest import PATIENCE_S, STEADY

USUAL = {
    "baseline": doubling(200),
    "optimized": doubling(100),
    "inputs": vectors,
    "reference": lambda x: x + x,
}


class Engine:
    def step(self, x):
        return x


slow, engine = doubling(200), Engine()


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A fake machine with one GPU, and its own locks and caches."""
    monkeypatch.setenv("PYTEST_AIPERF_LOCKS", str(tmp_path / "locks"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # set by the outer pytest run
    machine = FakeMachine(noise=Noise(**STEADY))
    monkeypatch.setattr(standalone, "CudaMachine", lambda: machine)
    caches = (standalone._figures, standalone.open_device)
    for cache in caches:
        cache.cache_clear()
    yield machine
    for cache in caches:
        cache.cache_clear()


def test_under_a_tracer_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(sys, "gettrace", lambda: "coverage")
    result = pytest_aiperf.measure(**USUAL, quick=True)
    assert result.outcome is Outcome.INVALID
    assert result.message.startswith("sys.settrace is 'coverage'")


def test_the_record_of_a_comparison_on_the_gpu():
    result = pytest_aiperf.measure(**USUAL, quick=True, seed=7)
    assert (result.outcome, result.verdict) == (Outcome.PASSED, Verdict.FASTER)
    assert result.speedup.value == pytest.approx(2, rel=0.01)
    assert (result.claim, result.key, result.gpu, result.seed) == ("double", "fake", FAKE_GPU, 7)
    assert result.floor > 0
    assert result.code


@pytest.mark.parametrize(
    ("words", "outcome", "message"),
    [
        ({"optimized": doubling(200)}, Outcome.FAILED, "SAME where FASTER is claimed"),
        ({"optimized": lambda x: x * 3}, Outcome.FAILED, "optimized"),
        ({"work": lambda _: Work(read=1e12)}, Outcome.INVALID, "that this GPU reaches"),
    ],
    ids=["not faster", "wrong", "faster than the limit"],
)
def test_what_a_test_would_fail_for_is_in_the_record(words, outcome, message):
    result = pytest_aiperf.measure(**USUAL | words, quick=True)
    assert result.outcome is outcome
    assert message in result.message


@pytest.mark.parametrize(
    ("arm", "same"),
    [
        (slow, slow),
        (prepared(slow), prepared(slow)),
        (functools.partial(slow, 1), functools.partial(slow, 1)),
        (engine.step, engine.step),
    ],
)
def test_the_same_callable_as_both_arms_is_refused(arm, same):
    with pytest.raises(UsageError, match="are the same callable"):
        refuse_identical_arms(arm, same)


def test_arms_that_only_look_alike_are_not_refused():
    for one, other in (
        (doubling(200), doubling(200)),
        (engine.step, Engine().step),
        (functools.partial(slow, 1), functools.partial(slow, 2)),
        (functools.partial(slow, x=1), functools.partial(slow, y=1)),
        (prepared(slow), slow),
    ):
        refuse_identical_arms(one, other)
    with pytest.raises(UsageError, match="are the same callable"):
        pytest_aiperf.measure(**USUAL | {"optimized": USUAL["baseline"]})


def test_a_debugging_environment_is_in_the_record(monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    result = pytest_aiperf.measure(**USUAL)
    assert result.outcome is Outcome.INVALID
    assert "CUDA_LAUNCH_BLOCKING" in result.message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"metric": "speed"}, "one of device, wall, memory, score"),
        ({"metric": ()}, "metric"),
        ({"optimized": 3}, "optimized= must be the callable"),
        ({"optimized": lambda x, y: x}, "does not take the 1 value"),
        ({"device": "tpu"}, "use 'cuda' or 'cpu'"),
        ({"quik": True}, r"measure\(\) has no keyword 'quik'; did you mean quick\?"),
    ],
)
def test_wrong_use_is_raised(words, message):
    with pytest.raises(UsageError, match=message):
        pytest_aiperf.measure(**USUAL | words)


def test_an_exception_of_an_arm_is_raised():
    def broken(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pytest_aiperf.measure(**USUAL | {"optimized": broken})


def test_an_exception_that_a_test_would_explain_is_raised_unchanged():
    def needs_gpu(x):
        raise RuntimeError("Found no NVIDIA driver")

    words = {"optimized": needs_gpu, "metric": "wall", "device": "cpu"}
    with pytest.raises(RuntimeError, match=r"^Found no NVIDIA driver$"):
        pytest_aiperf.measure(**USUAL | words)


def test_noise_floor_and_ceilings_are_measured_once(machine, monkeypatch):
    measured = []
    noise_floor, ceilings = measure.noise_floor, machine.ceilings
    monkeypatch.setattr(
        measure, "noise_floor", lambda *words: measured.append("floor") or noise_floor(*words)
    )
    monkeypatch.setattr(
        machine, "ceilings", lambda *words: measured.append("ceilings") or ceilings(*words)
    )
    work = {"work": lambda x: Work(read=x.nbytes)}
    for words in ({}, {}, work, work):
        assert pytest_aiperf.measure(**USUAL, **words, quick=True).outcome is Outcome.PASSED
    assert measured == ["floor", "ceilings"]


def test_a_machine_without_a_gpu_measures_on_the_host(machine, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ())
    with pytest.raises(UsageError, match="needs an NVIDIA GPU"):
        pytest_aiperf.measure(**USUAL, device="cuda")
    with pytest.raises(UsageError, match='has no time on the GPU: write metric="wall"'):
        pytest_aiperf.measure(**USUAL)
    result = pytest_aiperf.measure(**USUAL, metric="wall", quick=True)
    assert (result.key, result.host, result.gpu) == ("cpu", True, None)


def test_the_host_is_chosen_where_there_is_a_gpu():
    result = pytest_aiperf.measure(**USUAL, metric="wall", device="cpu", quick=True)
    assert (result.key, result.gpu) == ("cpu", None)


def test_candidates_are_timed_in_the_same_rounds_against_one_baseline():
    candidates = [doubling(100), doubling(50), slow]
    baseline = {"baseline": slow, "inputs": vectors, "reference": USUAL["reference"]}
    results = pytest_aiperf.measure_each(candidates, **baseline, quick=True, seed=7)
    assert [r.outcome for r in results] == [Outcome.PASSED, Outcome.PASSED, Outcome.FAILED]
    assert [round(r.speedup.value, 1) for r in results] == [2, 4, 1]
    times = {
        tuple(round_.seconds["baseline"] for part in r.timing.replicates for round_ in part.rounds)
        for r in results
    }
    assert len(times) == 1
    assert pytest_aiperf.measure_each([], **baseline) == []


def test_a_candidate_that_fails_costs_only_itself():
    def broken(x):
        raise ZeroDivisionError("by zero")

    def unlike(x, y):
        return x

    others = {name: arm for name, arm in USUAL.items() if name != "optimized"}
    candidates = [broken, lambda x: x * 3, unlike, doubling(100)]
    results = pytest_aiperf.measure_each(candidates, **others, quick=True)
    errors = [Outcome.ERROR, Outcome.FAILED, Outcome.ERROR, Outcome.PASSED]
    assert [result.outcome for result in results] == errors
    assert results[0].message == "ZeroDivisionError: by zero"
    assert "does not take the 1 value" in results[2].message
    with pytest.raises(UsageError, match="one of device, wall, memory, score"):
        pytest_aiperf.measure_each(candidates, **others, metric="speed")
    with pytest.raises(UsageError, match="no keyword 'metrics'; did you mean metric"):
        pytest_aiperf.measure_each(candidates, **others, metrics="wall")


@pytest.fixture
def current(monkeypatch):
    """Let this process be that of a claim; return the messages that it sends."""
    sent = []

    class Current:
        figures = SharedFigures(None, noise_floor=0.125)

        def send(self, kind, **_fields):
            sent.append(kind)

    monkeypatch.setattr(Session, "current", Current())
    return sent


def test_in_a_claims_process_each_wait_for_the_gpu_is_reported(current, monkeypatch, tmp_path):
    for _ in range(2):  # the first call also opens the device
        with ExitStack() as theirs:
            theirs.enter_context(GpuLock([FAKE_GPU.uuid], tmp_path / "locks").exclusive_gpu())

            def send(kind, theirs=theirs, **_fields):
                current.append(kind)
                theirs.close()

            monkeypatch.setattr(Session.current, "send", send)
            result = pytest_aiperf.measure(**USUAL, quick=True)
        assert result.outcome is Outcome.PASSED
        assert current[:2] == ["waiting", "working"]
        current.clear()


def test_in_a_claims_process_the_noise_floor_of_its_session_is_used(current):
    assert pytest_aiperf.measure(**USUAL, quick=True).floor == 0.125


def test_a_claim_that_measures_may_wait_longer_than_its_deadline(project):
    """This test holds the host until the clock has jumped beyond the deadline."""
    project.write(
        "conftest.py",
        "import time\n"
        "from pathlib import Path\n"
        "from types import SimpleNamespace\n"
        "from pytest_aiperf.machine import isolation\n"
        "update = isolation._Deadline.update\n"
        "def noted(deadline, kind):\n"
        "    update(deadline, kind)\n"
        "    Path(kind).touch()\n"
        "def monotonic():\n"
        "    return time.monotonic() + 1000 * Path('late').exists()\n"
        "isolation._Deadline.update = noted\n"
        "isolation.time = SimpleNamespace(monotonic=monotonic)\n",
    )
    project.tests(
        "@pytest.mark.host\n"
        "def test_it(compare):\n"
        "    import pytest_aiperf\n"
        "    pytest_aiperf.measure(**usual, metric='wall', device='cpu', quick=True)\n"
        "    compare(**usual, metric='wall')\n"
    )
    patience = time.monotonic() + PATIENCE_S
    with GpuLock([], project.path / "locks").exclusive_host():
        running = project.start("--cpu", "-oaiperf_deadline=500")
        while not (project.path / "waiting").exists():
            assert time.monotonic() < patience
            assert running.poll() is None
            time.sleep(0.02)
        (project.path / "late").touch()
    assert running.wait(PATIENCE_S) == 0, (project.path / "out").read_text()
    assert project.results()["ch07/it"]["outcome"] == "PASSED"


def test_a_prepared_arm_gives_the_result_its_name():
    def ready(x):
        """Double without delay."""
        return doubling(50)

    result = pytest_aiperf.measure(**USUAL | {"optimized": prepared(ready)}, quick=True)
    assert (result.claim, result.title) == ("ready", "Double without delay.")


def test_a_script_measures_on_this_host(tmp_path):
    script = tmp_path / "sort.py"
    script.write_text(
        "import numpy as np\n"
        "import pytest_aiperf as p\n"
        "result = p.measure(\n"
        "    baseline=lambda x: np.array(sorted(x)),\n"
        "    optimized=np.sort,\n"
        "    inputs=lambda bench: (np.random.rand(bench.size(20_000, check=100)),),\n"
        "    reference=lambda x: np.sort(x),\n"
        "    metric='wall', device='cpu', quick=True)\n"
        "assert result.outcome in (p.Outcome.PASSED, p.Outcome.FAILED)  # a busy host is noisy\n"
        "print(result.claim, result.speedup.value > 2)\n"
    )
    shown = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "sort True\n"
    assert list(Path(tmp_path).iterdir()) == [script, tmp_path / "locks"]


def test_everything_exported_exists():
    for name in pytest_aiperf.__all__:
        assert getattr(pytest_aiperf, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pytest_aiperf.nothing
    assert np.isfinite(float(pytest_aiperf.__version__.split(".")[0]))


@pytest.mark.parametrize(
    ("module", "wrong", "right"),
    [
        (pytest_aiperf.evidence, "page_fault", "page_faults"),
        (pytest_aiperf.scores, "percentil", "percentile"),
    ],
)
def test_a_misspelled_name_is_answered_with_the_right_one(module, wrong, right):
    with pytest.raises(AttributeError, match=rf"no attribute '{wrong}'; did you mean {right}\?$"):
        getattr(module, wrong)


def test_the_package_has_a_version_without_an_installation(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert pytest_aiperf.__version__ == "0+unknown"
