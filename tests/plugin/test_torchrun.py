"""A multi-GPU claim runs in one rank per GPU, and the exits of its ranks become one exit."""

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pytest_aiperf.machine import isolation, torchrun
from pytest_aiperf.model import Outcome, Result, Verdict
from pytest_aiperf.report.page import page
from pytest_aiperf.rules import stats
from pytest_aiperf.schema import from_json, to_json

BLANK = Result("ch04/sum", "n", "", Outcome.ERROR, "2xfake", "run", "now", 1)

CLAIMS = """
import torch
import torch.distributed as dist

RANK = int(os.environ.get("RANK", 0))

def shares(bench):
    torch.manual_seed(10 * bench.seed + dist.get_rank())
    return (torch.randn(bench.size(64, check=8)),)

def total(x):
    y = x.clone()
    dist.all_reduce(y)
    return y

def gathered(x):
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return sum(every)

def truth(x):
    return gathered(x.double())

sums = {"baseline": gathered, "optimized": total, "inputs": shares, "reference": truth}
in_two = pytest.mark.gpu(count=2)

"""


@pytest.fixture
def two(project):
    def write(text):
        project.tests(CLAIMS + text, "ch04/test_sum.py")

    project.fake(gpus=2, noise="none")
    project.two = write
    project.monkeypatch.delenv("RANK", raising=False)
    return project


def test_ranks_measure_a_ladder_together(two):
    two.two(
        """
@in_two
@pytest.mark.parametrize("rung", [1, 2])
def test_sum(compare, rung):
    def faster(x):
        spend(20e-6 / rung)
        return total(x)

    def slower(x):
        spend(100e-6)
        return total(x)

    compare(**sums | {"baseline": slower, "optimized": faster})
"""
    )
    two.run("--gpu", "--quick").assert_outcomes(passed=2)
    results = two.results()
    blocks = [
        results[f"ch04/sum[{rung}]"]["timing"]["replicates"][0]["rounds"][0]["seconds"]
        for rung in (1, 2)
    ]
    assert blocks[0]["baseline"] == blocks[1]["baseline"]
    assert all(not result["notes"] for result in results.values())


def test_a_rung_that_fails_in_one_rank_does_not_affect_the_others(two):
    two.two(
        """
@in_two
@pytest.mark.parametrize("rung", [1, 2])
def test_sum(compare, rung):
    def faster(x):
        spend(20e-6)
        return total(x) + (rung == 2 and RANK == 1)

    def slower(x):
        spend(100e-6)
        return total(x)

    compare(**sums | {"baseline": slower, "optimized": faster})
"""
    )
    two.run("--gpu", "--quick").assert_outcomes(passed=1, failed=1)
    results = two.results()
    assert "rank 1: optimized disagrees" in results["ch04/sum[2]"]["message"]
    [note] = results["ch04/sum[1]"]["notes"]
    assert note.startswith("measured by itself, because the ranks of its ladder failed: rank 1: ")


def test_a_time_is_that_of_the_slowest_rank(two):
    two.write(
        "conftest.py",
        """
from pytest_aiperf.session.cuda_machine import CudaMachine

def pytest_aiperf_machine():
    return CudaMachine()  # whose host clock is real
""",
    )
    two.two("""
@in_two
def test_sum(compare, clock):
    took = clock(lambda: time.sleep(0.02 * RANK))
    compare(**sums)
    assert "RANK" not in os.environ or took.low >= 0.02, took

@pytest.mark.gpu(count=2, cpu=False)
def test_cuda(compare): compare(**sums)
""")
    done = two.run("-rs")
    done.assert_outcomes(passed=1, skipped=1)
    done.stdout.fnmatch_lines(["*its results need a GPU*"])


@pytest.mark.parametrize(("renews", "seconds"), [(True, 0.03), (False, 0.12)])
def test_ranks_make_the_same_calls_though_one_draws_its_inputs_slowly(two, renews, seconds):
    """Otherwise they would call different arms, and wait for each other in their collectives."""
    two.write("conftest.py", f"import tests.fake_gpu\ntests.fake_gpu.FakeDevice.renews = {renews}")
    two.two(f"""
def slowly(bench):
    time.sleep({seconds} * RANK)
    return shares(bench)

def twice(x):
    spend(100e-6)
    return (total(x) + total(x)) / 2

def once(x):
    spend(50e-6)
    return total(x)

@in_two
def test_sum(compare):
    compare(**sums | dict(baseline=twice, optimized=once, inputs=slowly))
""")
    two.run("--gpu", "--quick", "-o", "aiperf_deadline=40").assert_outcomes(passed=1)


def test_one_rank_that_goes_wrong_is_named_and_costs_its_claim_only(two):
    two.two("""
def halves(x):
    y = total(x)
    return y / 2 if RANK == 1 else y

def leaves(x):
    if RANK == 1:
        print("gone for good", flush=True)
        os._exit(0)
    return total(x)

@in_two
def test_wrong(compare): compare(**sums | {"optimized": halves})

@in_two
def test_gone(compare): compare(**sums | {"optimized": leaves})

def test_next(compare): compare(**usual)
""")
    done = two.run()
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines([
        "*rank 1: optimized disagrees with the reference*",
        "*rank 1: its process ended without a result*",
        "*gone for good*",
    ])  # fmt: skip
    assert not two.processes()


def test_the_record_of_rank_0_is_that_of_the_claim(two):
    two.two("""
from pytest_aiperf.claim.sampler import Sampler

choose_mode = Sampler._choose_mode  # rank 1 has a slow host
Sampler._choose_mode = lambda *args: choose_mode(*args) + 0.2 * RANK

def spending(call, microseconds):
    def arm(x):
        spend(microseconds[RANK] * 1e-6)
        return call(x)
    return arm

arms = {"baseline": spending(gathered, (100, 400)), "optimized": spending(total, (200, 100))}

@in_two
def test_sum(compare): compare(**sums | arms)

@pytest.mark.gpu(count=3)
def test_three(compare): compare(**sums)
""")
    two.fake(gpus=2)
    done = two.run("--gpu", "--quick")
    done.assert_outcomes(passed=1, skipped=1)
    record = two.results()["ch04/sum"]
    assert (record["key"], record["verdict"]) == ("2xfake", "FASTER")
    # the slowest rank counts
    assert record["speedup"]["value"] == pytest.approx(2, rel=0.02)
    floor = two.path / ".aiperf/latest/floor-fake-0-fake-1.json"
    assert json.loads(floor.read_text()) == record["floor"]


def test_a_rank_that_cannot_leave_costs_no_deadline(two):
    two.two("""
from pytest_aiperf.machine import torchrun

torchrun.EXIT_GRACE_S = 0.1
dist.destroy_process_group = lambda: time.sleep(600)

def spending(call, microseconds):
    def arm(x):
        spend(microseconds * 1e-6)
        return call(x)
    return arm

arms = {"baseline": spending(gathered, 400), "optimized": spending(total, 200)}

@in_two
def test_sum(compare): compare(**sums | arms)
""")
    two.fake(gpus=2)
    done = two.run("--gpu", "--quick")
    done.assert_outcomes(passed=1)
    assert two.results()["ch04/sum"]["verdict"] == "FASTER"


def test_every_rank_is_captured_by_a_tool_that_knows_ranks(two):
    two.two("@in_two\ndef test_sum(compare): compare(**sums)\n")
    done = two.run("--profile=torch")
    done.assert_outcomes(passed=1)
    [folder] = two.path.glob("artifacts/*/ch04*")
    stems = ("baseline", "baseline.rank1", "optimized", "optimized.rank1")
    names = {f"{stem}.pt.trace.json" for stem in stems}
    assert names <= {p.name for p in folder.iterdir()}
    first, second = two.results()["ch04/sum"]["profiles"]
    assert second["figures"]["operators"] > 0, (first, second)


def test_a_tool_for_one_process_skips_ranks(two):
    two.two("@in_two\ndef test_sum(compare): compare(**sums)\n")
    done = two.run("--profile=proton", "-rs")
    done.assert_outcomes(skipped=1)
    done.stdout.fnmatch_lines(["*proton profiles one process, try nsys, torch, hta*"])


def test_ranks_that_wait_forever_meet_the_deadline(project, monkeypatch, capsys):
    monkeypatch.chdir(project.path)
    code = """
import subprocess, time
print("so far", subprocess.Popen(["sleep", "600"], start_new_session=True) and "", flush=True)
time.sleep(600)
"""
    log, wait = project.path / "log", isolation.wait

    def monotonic():  # the deadline passes as soon as the ranks have written
        return time.monotonic() + 1000.0 * (log.exists() and log.stat().st_size > 0)

    def wait_or_look(sources, timeout=None):  # at the clock, while the deadline is far
        return wait(sources, 0.02 if timeout and timeout > 100 else timeout)

    monkeypatch.setattr(isolation, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(isolation, "wait", wait_or_look)
    monkeypatch.setattr(torchrun, "command", lambda *_: (sys.executable, "-c", code))
    combined = torchrun.run(torchrun.RankJob(str(project.path), (BLANK,)), 2, (), 500.0, {})
    assert combined.message.startswith("exceeded its deadline of 500 s")
    assert combined.results[0].outcome is Outcome.ERROR
    assert "so far" in capsys.readouterr().out
    assert not project.processes()


# how exits are combined

MEASURED = replace(BLANK, outcome=Outcome.PASSED)
SLOWER = replace(BLANK, outcome=Outcome.FAILED, verdict=Verdict.SLOWER, message="SLOWER: 0.5x")


def launcher_exit(status="exited", code=1):
    return isolation.ProcessExit((), status, code, 1.0, 0, 30.0)


@pytest.mark.parametrize(
    ("exits", "launcher", "message"),
    [
        (
            [torchrun.RankExit((MEASURED,)), torchrun.RankExit((MEASURED,))],
            launcher_exit(code=0),
            "",
        ),
        (
            [torchrun.RankExit((SLOWER,), SLOWER.message, is_cause=True)] * 2,
            launcher_exit(),
            "SLOWER: 0.5x",
        ),
        (
            [
                torchrun.RankExit((MEASURED,)),
                torchrun.RankExit(message="wrong", is_cause=True, at_s=2.0),
            ],
            launcher_exit(),
            "rank 1: wrong",
        ),
        (
            [
                torchrun.RankExit(message="b", is_cause=True, at_s=3.0),
                torchrun.RankExit(message="a", is_cause=True, at_s=2.0),
            ],
            launcher_exit(),
            "rank 1: a",
        ),
        (
            [torchrun.RankExit(message="Connection closed by peer", at_s=1.0), "lost"],
            launcher_exit(),
            "rank 1: its process ended without a result (os._exit, or a crash?)",
        ),
        (
            [
                torchrun.RankExit(message="Connection closed by peer", at_s=3.0),
                torchrun.RankExit(message="e", at_s=2.0),
            ],
            launcher_exit(),
            "rank 1: e",
        ),
        (
            [torchrun.RankExit(message="ValueError: 1", at_s=1.0), "stopped"],
            launcher_exit(),
            "rank 0: ValueError: 1",
        ),
        (["stopped", "stopped"], launcher_exit("timeout"), "exceeded its deadline of 30 s"),
        (["never", "never"], launcher_exit(), "ended with exit code 1 without a result"),
    ],
)
def test_the_first_rank_that_fails_gives_the_message(tmp_path, exits, launcher, message):
    job = torchrun.RankJob(str(tmp_path), (BLANK,))
    for rank, rank_exit in enumerate(exits):
        if isinstance(rank_exit, torchrun.RankExit):
            (tmp_path / f"rank-{rank}.json").write_text(json.dumps(to_json(rank_exit)))
        if rank_exit != "never":
            trace = "Current thread" if rank_exit == "stopped" else ""
            (tmp_path / f"rank-{rank}.trace").write_text(trace)
    combined = torchrun._combine_exits(job, len(exits), launcher)
    assert combined.message.startswith(message)
    assert bool(combined.message) == bool(message)
    assert [result.message for result in combined.results] == [combined.message]


def test_a_missed_deadline_tells_what_each_rank_was_doing(tmp_path):
    for rank, line in ((0, 57), (1, 63)):
        (tmp_path / f"rank-{rank}.trace").write_text(
            'Thread 0x1 (most recent call first):\n  File "/lib/threading.py", line 1 in wait\n\n'
            "Current thread 0x2 (most recent call first):\n"
            '  File "/lib/site-packages/torch/c10d.py", line 9 in barrier\n'
            f'  File "/course/test_p2p.py", line {line} in staged\n'
        )
    (tmp_path / "rank-1.phase").write_text("checking results")
    job = torchrun.RankJob(str(tmp_path), (BLANK,))
    combined = torchrun._combine_exits(job, 2, launcher_exit("timeout"))
    assert combined.message.endswith(
        "; rank 0: in barrier (c10d.py:9), in staged (test_p2p.py:57)"
        "; rank 1: checking results, in barrier (c10d.py:9), in staged (test_p2p.py:63)"
    )


def test_a_rank_keeps_its_last_phase_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torchrun.faulthandler, "register", lambda *_, **__: None)
    rank = torchrun.Rank(torchrun.RankJob(str(tmp_path), (BLANK,)))
    rank.receive("working", phase="building inputs")
    rank.receive("step")
    assert (tmp_path / "rank-1.phase").read_text() == "building inputs"


def test_a_skip_in_the_ranks_is_a_skip(tmp_path):
    for rank in (0, 1):
        rank_exit = torchrun.RankExit(message="no such library", is_cause=True, skipped=True)
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(to_json(rank_exit)))
    combined = torchrun._combine_exits(
        torchrun.RankJob(str(tmp_path), (BLANK,)), 2, launcher_exit(code=0)
    )
    assert combined.skipped
    assert combined.message == "no such library"


def test_ranks_check_a_claim_on_the_cpu(two):
    two.two("""
@in_two
def test_sum(compare):
    print(f"[rank {RANK} of {dist.get_world_size()}]" if dist.is_initialized() else "parent")
    compare(**sums | {"optimized": lambda x: total(x) + (dist.get_world_size() == 3)})
""")
    ran = two.run("--ranks=2,3")
    ran.assert_outcomes(passed=1, failed=1)
    ran.stdout.fnmatch_lines(["*test_sum[[]ranks=3[]]*"])
    two.run("--ranks=0").stderr.fnmatch_lines(["*--ranks: '0' is not a whole number of at least 1"])


def test_ranks_are_refused_where_only_host_claims_are_measured(two):
    two.fake(gpus=0)
    for option in ("--cpu", "--update-expectations", "--profile=perf"):
        ran = two.run(option, "--ranks=2")
        assert ran.ret == pytest.ExitCode.USAGE_ERROR
        ran.stderr.fnmatch_lines(["*--ranks is for claims for several GPUs, and*: use --gpu, or *"])


def test_the_next_command_of_a_run_has_its_numbers_of_ranks(two):
    two.two("""
@in_two
def test_sum(compare):
    compare(**sums | {"optimized": lambda x: total(x) + 1})
""")
    lines = two.run("--gpu", "--quick", "--ranks=1").stdout
    command = "pytest --gpu --ranks=1 -v 'ch04/test_sum.py::test_sum[[]ranks=1[]]'"
    lines.fnmatch_lines([f"measure again:  {command}"])


SCALED = """
@in_two
@pytest.mark.parametrize("rung", [1, 2])
def test_sum(compare, rung):
    def faster(x):
        spend(20e-6 / rung * (1 + dist.get_world_size()))
        return total(x)

    def slower(x):
        spend(100e-6 * (1 + dist.get_world_size()))
        return total(x)

    compare(**sums | {"baseline": slower, "optimized": faster})
"""


def test_ranks_run_a_claim_in_several_numbers_of_ranks(two):
    two.two(SCALED + "def test_one(compare):\n    compare(**usual)\n")
    two.fake(gpus=3, noise="none")
    two.run("--gpu", "--quick", "--ranks=1,2,4").assert_outcomes(passed=5, skipped=2)
    document = json.loads((two.path / ".aiperf/latest/results.json").read_text())
    results = [from_json(Result, entry["aiperf"]) for entry in document["benchmarks"]]
    keys = [(r.claim, r.ladder, r.rung_index, r.key, r.nodeid.partition("::")[2]) for r in results]
    assert keys == [
        ("ch04/sum[1]", "ch04/sum", 0, "1xfake", "test_sum[1-ranks=1]"),
        ("ch04/sum[1]", "ch04/sum", 0, "2xfake", "test_sum[1]"),
        ("ch04/sum[2]", "ch04/sum", 1, "1xfake", "test_sum[2-ranks=1]"),
        ("ch04/sum[2]", "ch04/sum", 1, "2xfake", "test_sum[2]"),
        ("ch04/one", "", 0, "fake", "test_one"),
    ]
    times = {r.key: stats.mean_call_s(r.timing.replicates, "baseline") for r in results[:2]}
    assert times == pytest.approx({"1xfake": 200e-6, "2xfake": 300e-6}, rel=0.05)
    command = "pytest --gpu --ranks=1 &#39;ch04/test_sum.py::test_sum[1-ranks=1]&#39;"
    assert command in page(results, {}, "title")
    skipped = {(r["key"], r["message"]) for r in document["aiperf_untimed"]}
    assert skipped == {("4xfake", "needs 4 GPUs, this machine has 3")}
