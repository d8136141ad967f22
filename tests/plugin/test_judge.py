"""The command `judge`: problems and solutions in three forms, honest and dishonest."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_aiperf import cli
from pytest_aiperf.judge import checks, forms, judging
from pytest_aiperf.judge.judging import EXIT, Options
from pytest_aiperf.model import Gpu, Interval, Verdict
from tests.plugin.conftest import PATIENCE_S, is_stopped, preparing_claim

GPU = Gpu("NVIDIA H200", "h200", "GPU-1", "sm90", 132, 60 << 20, 141 << 30, "580.1")
JUDGED = Path(__file__).parent / "judged"
EQUAL = "SAME or INCONCLUSIVE"
UNSURE = "SHORTCUT or WRONG"  # as the threads happen to run
CASES = {
    "kernelbench/row_softmax_solution_fast.py": ("FASTER", ""),
    "kernelbench/row_softmax_solution_constant.py": ("SHORTCUT", "the same result whatever"),
    "kernelbench/row_softmax_solution_patch.py": ("SHORTCUT", "replaces torch.stack"),
    "kernelbench/linear_gelu_solution_same.py": (EQUAL, ""),
    "kernelbench/linear_gelu_solution_renamed.py": (EQUAL, ""),
    "kernelbench/linear_gelu_solution_unequal.py": (
        "BROKEN", "linear_gelu_solution_unequal.py:5: ModelNew has no weights linear.weight, "),
    "kernelbench/linear_gelu_solution_bf16.py": ("WRONG", 'allows bf16 states: tolerance = "bf16"'),
    "kernelbench/positive_scale_solution_narrow.py": ("SHORTCUT", "not on 10 times the problem's"),
    "kernelbench/pairwise_solution_cached.py": ("SHORTCUT", "call 2 returns the result of call 1"),
    "gpumode/prefix_sum/submission.py": ("FASTER", ""),
    "gpumode/prefix_sum/submission_skipping.py": ("SHORTCUT", "call 5 returns the result of call"),
    "gpumode/running_mean/submission_float32.py": ("FASTER", ""),
    "gpumode/histogram/submission_slow.py": ("SLOWER", ""),
    "gpumode/sort_into/submission.py": (EQUAL, ""),
    "gpumode/sort_into/submission_wrong.py": ("WRONG", "refuses the result for size 100, seed 3"),
    "gpumode/grayscale/submission_zeros.py": ("SHORTCUT", "the same result whatever its inputs"),
    "gpumode/total/submission.py": (EQUAL, ""),
    "gpumode/total/submission_part.py": ("WRONG", "the solution disagrees with the reference"),
    "plain/polynomial/solution_horner.py": ("FASTER", ""),
    "plain/polynomial/solution_remembered.py": ("SHORTCUT", "call 9 returns the result of call 8"),
    "plain/dot/solution_partial.py": ("WRONG", "the solution disagrees with the reference"),
    "plain/dot/solution_crash.py": ("BROKEN", "ended with exit code 0 without a result"),
    "plain/dot/solution_raises.py": ("BROKEN", "solution_raises.py:3: ValueError: no total for"),
    "plain/norms/solution_same.py": (EQUAL, ""),
    "plain/norms/solution_settings.py": ("SHORTCUT", "torch.get_num_threads: 1 -> 3"),
    "plain/norms/solution_settings_in_a_call.py": (
        "SHORTCUT", "torch.get_float32_matmul_precision: highest -> medium"),
    "plain/norms/solution_timer.py": ("SHORTCUT", "replaces time.perf_counter_ns, on which the"),
    "plain/norms/solution_judge.py": ("SHORTCUT", "replaces pytest_aiperf.correctness.accuracy."),
    "plain/norms/solution_late.py": ("SHORTCUT", "right when it was checked, and wrong when timed"),
    "plain/norms/solution_thread.py": (UNSURE, "the solution disagrees with the reference"),
    "plain/norms/solution_lazy.py": ("SHORTCUT", "an object of the class Lazy"),
    "plain/constant_sum/solution_right.py": ("UNUSABLE", "the result for other inputs would pass"),
}  # fmt: skip
"""By solution: the status, and a part of the message."""

PROBLEM = """\
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x.exp()
def get_inputs():
    return [torch.randn(1000)]
"""
IN_PLACE = """\
class ModelNew:
    def __call__(self, x):
        return x.exp_().clone()
"""


@pytest.fixture(autouse=True, scope="module")
def locks(tmp_path_factory):
    """Locks of its own, and one thread: the host is shared with other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_AIPERF_LOCKS", str(tmp_path_factory.mktemp("locks")))
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.syspath_prepend(str(tmp_path_factory.mktemp("path")))  # undone at the end
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """All judgements, by the name of the solution; with a noise floor that other work leaves."""
    figures = tmp_path_factory.mktemp("figures")
    (figures / "floor-host.json").write_text("0.05")
    options = Options(device="cpu", quick=True, seed=11)
    found = judging.judge_all(judging.pairs(JUDGED), options, 2, lambda _: None, figures)
    return {str(Path(j.solution).relative_to(JUDGED)): j for j in found}


COMPUTING = """
import sys
from pathlib import Path
import torch
from pytest_aiperf.judge import judging

torch.set_num_threads(2)
torch.ones(2**22).sum()  # starts OpenMP's threads, which a fork does not have
pair = Path(sys.argv[1]), Path(sys.argv[2])
options = judging.Options(device="cpu", quick=True, seed=11)
print(*(j.status for j in judging.judge_all([pair, pair], options, 2, lambda _: None)))
"""


def test_solutions_are_judged_in_processes_though_this_one_has_computed_before(tmp_path):
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "solution.py").write_text(PROBLEM.replace("class Model", "class ModelNew"))
    arguments = [sys.executable, "-c", COMPUTING, tmp_path / "problem.py", tmp_path / "solution.py"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(arguments, env=environ, check=True, stdout=subprocess.PIPE, timeout=300)
    assert not {"BROKEN", "UNUSABLE"}.intersection(done.stdout.decode().split())


def test_every_pair_of_the_folder_is_judged(judged):
    assert judged.keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_status_of(name, judged):
    judgement, (status, message) = judged[name], CASES[name]
    if status == EQUAL:  # on a busy machine the interval may be wide
        assert judgement.status in ("SAME", "INCONCLUSIVE", "SLOWER", "FASTER")
        assert judgement.speedup.low < 1.6
        assert judgement.speedup.high > 0.6
    elif status == UNSURE:
        assert judgement.status in ("SHORTCUT", "WRONG")
    else:
        assert judgement.status == status, judgement.message
        assert judgement.exit_status == EXIT[status]
    assert message in judgement.message
    assert "\n" not in judgement.message
    assert json.dumps(judging.data(judgement), allow_nan=False)


def test_statuses_have_different_exits_by_what_to_do():
    groups = [{Verdict.SAME, Verdict.SLOWER, Verdict.INCONCLUSIVE}]
    singles = [Verdict.FASTER, "UNUSABLE", "WRONG", "SHORTCUT", "BROKEN", "INVALID"]
    assert len({EXIT[s] for s in singles}) == len(singles)
    assert [len({EXIT[s] for s in group}) for group in groups] == [1]
    assert EXIT["FASTER"] == 0


def test_what_is_known_about_a_faster_solution(judged):
    judgement = judged["gpumode/prefix_sum/submission.py"]
    assert [row.name for row in judgement.rows] == ["size 400", "size 800"]
    first, second = (row.speedup.value for row in judgement.rows)
    assert judgement.speedup.value == pytest.approx((first * second) ** 0.5)
    assert any(note.startswith("least speedup: ") for note in judgement.notes)
    assert (judgement.form, judgement.tolerance) == ("GPU MODE", "fp32")  # of rtol 1e-3
    text = "\n".join(judging.lines(judgement))
    assert text.startswith("FASTER ")
    assert "size 800: " in text
    assert "setup, not timed: loading " in text
    assert len(judgement.digests) == 2


def test_a_reference_in_fp64_is_converted_if_the_check_accepts_less(judged):
    notes = judged["gpumode/running_mean/submission_float32.py"].notes
    assert "ref_kernel returns float64: the baseline converts it to float32" in notes


def test_setup_is_timed_apart(judged):
    seconds = judged["kernelbench/linear_gelu_solution_same.py"].setup_s
    assert seconds.keys() == {"loading", "baseline", "solution"}
    assert all(s > 0 for s in seconds.values())


def test_weights_with_other_names_are_equal_if_their_values_are(judged):
    notes = judged["kernelbench/linear_gelu_solution_renamed.py"].notes
    assert any("other names than the model's, and the same values" in note for note in notes)


def test_the_command_prints_one_judgement_as_json(capfd):
    pair = (JUDGED / "plain/dot/problem.py", JUDGED / "plain/dot/solution_partial.py")
    status = cli.main(["judge", *map(str, pair), "--cpu", "--quick", "--json"])
    content = json.loads(capfd.readouterr().out)
    assert status == content["exit_status"] == 3
    assert (content["status"], content["form"], content["speedup"]) == ("WRONG", "plain", None)


def test_the_highest_status_of_a_folder_counts(capfd, tmp_path):
    for name in ("partial", "crash"):
        shutil.copy(JUDGED / f"plain/dot/solution_{name}.py", tmp_path)
    shutil.copy(JUDGED / "plain/dot/problem.py", tmp_path)
    assert cli.main(["judge", str(tmp_path), "--cpu", "--quick", "-n", "2"]) == 5
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == "2 judged: 1 BROKEN, 1 WRONG"


def test_a_tolerance_allows_a_lower_precision_up_to_the_cap(capfd):
    pair = (JUDGED / "kernelbench/linear_gelu.py",
            JUDGED / "kernelbench/linear_gelu_solution_bf16.py")  # fmt: skip
    words = [*map(str, pair), "--cpu", "--quick", "--tolerance", "bf16"]
    assert cli.main(["judge", *words]) in (0, 1)
    assert cli.main(["judge", *words, "--cap", "tf32"]) == 3
    assert "WRONG" in capfd.readouterr().out


def test_what_is_judged_is_printed_when_the_command_is_stopped(tmp_path):
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "solution_1.py").write_text("import time\ntime.sleep(600)\nModelNew = 1\n")
    (tmp_path / "solution_2.py").write_text("ModelNew = 1\n")
    words = ["judge", str(tmp_path), "--cpu", "-n", "2", "--json"]
    running = subprocess.Popen(
        [sys.executable, "-m", "pytest_aiperf", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    first = f"1 of 2: BROKEN {tmp_path / 'solution_2.py'}, "
    assert any(line.startswith(first) for line in running.stderr)
    os.killpg(running.pid, signal.SIGTERM)  # as `timeout` does
    out, err = running.communicate(timeout=PATIENCE_S)
    [judgement] = json.loads(out)
    assert judgement["solution"] == str(tmp_path / "solution_2.py")
    assert running.returncode == 130
    assert err.endswith("interrupted: 1 of 2 judged\n")


def test_one_pair_that_is_stopped_has_no_judgement(capfd, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(judging, "judge", stopped)
    words = ["judge", "problem.py", "solution.py", "--cpu", "--json"]
    assert cli.main(words) == 130
    assert capfd.readouterr() == ("", "interrupted: 0 of 1 judged\n")


def test_each_phase_has_its_time_without_that_of_waiting(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 13.0, 14.0, 15.0])
    monkeypatch.setattr(judging.time, "monotonic", lambda: next(times))
    phases = judging._Phases()
    for message in ({"kind": "progress", "phase": "checking results"}, {"kind": "waiting"},
                    {"kind": "working"}, {"kind": "progress", "phase": "measuring"}):  # fmt: skip
        phases.receive(message)
    assert phases.seconds() == {
        "starting": 1.0, "checking results": 3.0, judging.WAITING: 10.0, "measuring": 1.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("size", "cache", "note"),
    [(60, "warm", "warm caches for size 60: a set of inputs has 240.0 B and stays in the L2"),
     (30_000_000, "cold", None)],
)  # fmt: skip
def test_small_inputs_are_measured_with_warm_caches(size, cache, note, monkeypatch):
    # NVML does not know the size of the L2: the opened device does
    monkeypatch.setattr(judging.nvml, "visible", lambda: [replace(GPU, l2_bytes=0)])
    opened = SimpleNamespace(gpu=replace(GPU, l2_bytes=60 << 20))
    monkeypatch.setattr(judging, "open_device", lambda *_: (None, None, opened))
    pair = JUDGED / "plain/norms/problem.py", JUDGED / "plain/norms/solution_same.py"
    run = judging._Judging(
        forms.Problem(pair[0]), pair[1], Options(), judging.Judgement(*map(str, pair), "BROKEN"),
        figures=None, channel=None,
    )  # fmt: skip
    case = forms.Case(f"size {size}", abs, abs, lambda _: torch.empty(size), abs)
    notes = []
    assert run._cache(case, run._l2_bytes(), notes) == cache
    assert [n.partition(" of 60")[0] for n in notes] == ([note] if note else [])


def test_a_row_says_whether_caches_were_warm(judged):
    rows = judging.data(judged["plain/polynomial/solution_horner.py"])["rows"]
    assert [row["cache"] for row in rows] == ["cold"]


@pytest.mark.parametrize(
    ("tolerance", "precision"),
    [("bf16", "bf16"), (2e-2, "bf16"), (1e-2, "tf32"), (2e-3, "fp16"), (1e-4, "fp32")],
)
def test_a_tolerance_is_the_widest_precision_that_it_covers(tolerance, precision):
    assert forms.precision_of(tolerance, "problem.py") == precision


@pytest.mark.parametrize("tolerance", ["half", 2, -1, None])
def test_a_tolerance_that_means_nothing_is_refused(tolerance):
    with pytest.raises(forms.FileError, match=r"problem.py:1: the tolerance .* is neither"):
        forms.precision_of(tolerance, "problem.py")


MALFORMED = {
    "no problem": ("x = 1\n", "", 2, "problem.py:1: is no problem: it must define Model and get_"),
    "syntax": ("import torch\ndef f(:\n", "", 2, "problem.py:2: invalid syntax"),
    "half a problem": ("import torch\nclass Model: pass\n", "", 2,
                       "problem.py:2: a problem of the form KernelBench defines get_inputs, too"),
    "solution's depth": (PROBLEM, f"ModelNew = {'-' * 200_000}1\n", 5,
                         "solution.py:1: is nested too deeply"),
    "solution's syntax": (PROBLEM, "import torch\n\n)", 5, "solution.py:3: unmatched ')'"),
    "no ModelNew": (PROBLEM, "import torch\n", 5, "solution.py:1: defines no ModelNew, which"),
    "import fails": (PROBLEM, "import nothing_here\nModelNew = 1\n", 5,
                     "solution.py:1: ModuleNotFoundError: No module named 'nothing_here'"),
    "problem raises": (PROBLEM + "raise ValueError('no')\n", "class ModelNew: pass\n", 2,
                       "problem.py:7: ValueError: no"),
    "inputs raise": (PROBLEM.replace("randn(1000)", "randn(-1)"), "class ModelNew: pass\n", 2,
                     "problem.py:6: RuntimeError: "),
    "inputs are no list": (PROBLEM.replace("[torch.randn(1000)]", "torch.randn(9)"),
                           "class ModelNew: pass\n", 2,
                           "problem.py:5: get_inputs must return a list, not Tensor"),
    "constructor raises": (PROBLEM, "class ModelNew:\n    def __init__(self):\n        1 / 0\n", 5,
                           "solution.py:3: ZeroDivisionError: division by zero"),
    "tolerance": (PROBLEM + "tolerance = 'wide'\n", "class ModelNew: pass\n", 2,
                  "problem.py:1: the tolerance 'wide' is neither a relative error"),
    "changes its input": (PROBLEM, IN_PLACE, 3,
                          "the solution changed argument 'args[0]'"),
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_in_one_sentence(name, tmp_path, capfd):
    problem, solution, status, message = MALFORMED[name]
    (tmp_path / "problem.py").write_text(problem)
    (tmp_path / "solution.py").write_text(solution)
    words = [str(tmp_path / "problem.py"), str(tmp_path / "solution.py")]
    found = cli.main(["judge", *words, "--cpu", "--quick"])
    head, text = capfd.readouterr().out.splitlines()
    assert message in text
    assert found == status, head


def test_a_file_of_another_language_is_named_once(tmp_path, capfd):
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "solution.txt").write_text("class ModelNew: pass\n")
    words = [str(tmp_path / "problem.py"), str(tmp_path / "solution.txt")]
    assert cli.main(["judge", *words, "--cpu"]) == 5
    text = capfd.readouterr().out.splitlines()[1]
    assert text == f"    {tmp_path / 'solution.txt'}:1: is not a Python file"


def test_a_task_without_the_parameters_of_its_inputs_is_refused(tmp_path, capfd):
    folder = tmp_path / "sort"
    shutil.copytree(JUDGED / "gpumode/sort_into", folder)
    shutil.copy(JUDGED / "gpumode/utils.py", tmp_path)
    (folder / "task.yml").write_text("tests:\n  - {seed: 1}\n" + "files:\n"
        "  - {name: utils.py, source: ../utils.py}\n")  # fmt: skip
    assert cli.main(["judge", str(folder), str(folder / "submission.py"), "--cpu"]) == 2
    assert "reference.py:5: generate_input needs size, which task.yml" in capfd.readouterr().out
    (folder / "task.yml").write_text("tests: [\n")
    assert cli.main(["judge", str(folder), str(folder / "submission.py"), "--cpu"]) == 2
    assert "task.yml:2: " in capfd.readouterr().out


def test_a_hanging_solution_is_broken(tmp_path, capfd):
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "solution.py").write_text("import time\ntime.sleep(600)\nModelNew = 1\n")
    words = [str(tmp_path / "problem.py"), str(tmp_path / "solution.py")]
    assert cli.main(["judge", *words, "--cpu", "--deadline", "4"]) == 5
    out = capfd.readouterr().out
    assert "while loading the solution and constructing models: exceeded its deadline of 4" in out
    (tmp_path / "problem.py").write_text(f"import time\ntime.sleep(600)\n{PROBLEM}")
    assert cli.main(["judge", *words, "--cpu", "--deadline", "4"]) == 2
    assert "while running the problem's file: exceeded" in capfd.readouterr().out


def test_a_solution_that_ends_while_it_is_timed_leaves_no_claim_paused(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_AIPERF_LOCKS", str(tmp_path / "locks"))
    (tmp_path / "solution.py").write_text(
        "import os\nfrom tests.plugin.conftest import is_stopped\ndef solution(x, y):\n"
        "    if is_stopped(int(os.environ['OTHER'])):\n        os._exit(0)\n"
        "    return (x * y).sum()\n"
    )
    with preparing_claim(tmp_path / "locks") as other:
        monkeypatch.setenv("OTHER", str(other))
        words = [str(JUDGED / "plain" / "dot" / "problem.py"), str(tmp_path / "solution.py")]
        assert cli.main(["judge", *words, "--cpu", "--quick"]) == 5
        until = time.monotonic() + PATIENCE_S
        while is_stopped(other) and time.monotonic() < until:
            time.sleep(0.01)
        assert not is_stopped(other)


def test_a_wrong_result_is_wrong_though_the_search_for_its_reason_hangs(tmp_path, capfd):
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "solution.py").write_text(
        "import time\nimport torch\nclass ModelNew(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x * 0 + 5\n"
        "if not __name__.endswith('_1'):\n    time.sleep(600)\n"
    )
    words = [str(tmp_path / "problem.py"), str(tmp_path / "solution.py")]
    assert cli.main(["judge", *words, "--cpu", "--quick", "--deadline", "15"]) == 3
    text = capfd.readouterr().out.splitlines()[1]
    assert "disagrees with the reference" in text
    assert "(the search for the reason: exceeded its deadline of 15" in text


def test_a_machine_that_distorts_times_makes_no_judgement(capfd, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    pair = (JUDGED / "plain/norms/problem.py", JUDGED / "plain/norms/solution_same.py")
    assert cli.main(["judge", *map(str, pair), "--cpu", "--quick"]) == 6
    assert "CUDA_LAUNCH_BLOCKING=1: every launch waits" in capfd.readouterr().out


def test_a_gpu_that_is_not_there_is_refused(capfd, monkeypatch):
    monkeypatch.setattr(judging.nvml, "visible", list)
    pair = (JUDGED / "plain/norms/problem.py", JUDGED / "plain/norms/solution_same.py")
    assert cli.main(["judge", *map(str, pair), "--gpu"]) == 2
    assert "judge: there is no NVIDIA GPU here: " in capfd.readouterr().err


def test_without_a_gpu_the_host_is_measured_and_a_note_says_so(capfd, monkeypatch):
    monkeypatch.setattr(judging.nvml, "visible", list)
    pair = (JUDGED / "plain/norms/problem.py", JUDGED / "plain/norms/solution_same.py")
    words = ["judge", *map(str, pair), "--quick"]
    note = "    note: no GPU: measured on the host (wall time)\n"
    assert cli.main(words) in (0, 1)
    assert note in capfd.readouterr().out
    assert cli.main([*words, "--cpu"]) in (0, 1)
    assert note not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--seed", "-1"], "-1 is not a number from 0 to 2**63 - 1"),
        (["--seed", str(1 << 63)], "is not a number from 0 to 2**63 - 1"),
        (["--deadline", "0"], "0 is not a time above 0"),
        (["--deadline", "nan"], "nan is not a time above 0"),
        (["-n", "0"], "0 is not a number from 1 on"),
        (["-n", "many"], "many is not a number from 1 on"),
    ],
)
def test_a_number_that_no_solution_can_help_is_refused(words, why, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["judge", "problem.py", "solution.py", *words])
    assert why in capsys.readouterr().err


def test_the_host_and_the_gpu_exclude_each_other(capsys):
    assert cli.main(["judge", "problem.py", "solution.py", "--cpu", "--gpu"]) == 2
    assert "--cpu and --gpu exclude each other" in capsys.readouterr().err


def test_gpu_time_is_not_measured_on_the_host(capfd, monkeypatch):
    monkeypatch.setattr(judging.nvml, "visible", list)
    pair = (JUDGED / "plain/norms/problem.py", JUDGED / "plain/norms/solution_same.py")
    words = ["judge", *map(str, pair), "--quick", "--metric", "device"]
    assert cli.main(words) == 2
    text = "judge: --metric device is the time of a GPU, and there is none here: "
    assert text in capfd.readouterr().err
    assert cli.main([*words, "--cpu"]) == 2
    assert "is the time of a GPU: leave out this option, or --cpu" in capfd.readouterr().err


NEEDS_GPU = {
    "Triton": ("""
import torch
import triton

@triton.jit
def nothing(x):
    pass

def solution(x):
    nothing[(1,)](x)
    return x
""", "solution.py launches a Triton kernel, which needs an NVIDIA GPU; there is none here"),
    "CUDA": ("""
def solution(x):
    raise OSError("no CUDA")
""", "solution.py needs an NVIDIA GPU ({}/solution.py:3: OSError: no CUDA); there is none here"),
    "import": ("""
raise RuntimeError("0 active drivers ([]). There should only be one.")
def solution(x): ...
""", "solution.py launches a Triton kernel, which needs an NVIDIA GPU; there is none here"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDS_GPU)
def test_a_solution_that_needs_a_gpu_is_not_broken(name, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(judging.nvml, "visible", list)
    code, message = NEEDS_GPU[name]
    problem = JUDGED / "plain/norms/problem.py"
    (tmp_path / "solution.py").write_text(code)
    assert cli.main(["judge", str(problem), str(tmp_path / "solution.py"), "--quick"]) == 2
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"UNUSABLE      {tmp_path}/solution.py", f"    {message.format(tmp_path)}"]


def test_a_folder_without_pairs_is_refused(tmp_path, capsys):
    assert cli.main(["judge", str(tmp_path), "--cpu"]) == 2
    assert "has no problem with a solution" in capsys.readouterr().err
    assert cli.main(["judge", str(tmp_path / "none"), "--cpu"]) == 2
    assert capsys.readouterr().err == f"judge: {tmp_path / 'none'} does not exist\n"


def test_a_problem_without_its_solution_is_refused(tmp_path, capsys):
    problem = tmp_path / "problem.py"
    problem.write_text(PROBLEM)
    assert cli.main(["judge", str(problem), "--cpu"]) == 2
    assert capsys.readouterr().err.endswith(
        f"{problem} is a file: name the solution as well (judge {problem} solution.py), or give "
        "the folder\n"
    )
    assert cli.main(["judge", str(problem), str(tmp_path), "--cpu"]) == 2
    message = f"{problem} is a file, but {tmp_path} is a folder: name one of its files, or give the"
    assert message in capsys.readouterr().err


def test_solutions_in_a_folder_of_their_own(tmp_path):
    level = tmp_path / "level2"
    runs = tmp_path / "runs"
    level.mkdir()
    runs.mkdir()
    names = ("1_Square.py", "level_2_problem_1_sample_0_kernel.py", "level_2_problem_11_kernel.py")
    for path in (level / names[0], *(runs / name for name in names)):
        path.write_text("")
    found = judging.pairs(level, runs)
    assert [(p.name, s.name) for p, s in found] == [(names[0], names[0]), (names[0], names[1])]


def test_a_solution_belongs_to_the_longest_name_and_is_no_problem_itself(tmp_path):
    problems = ("softmax.py", "softmax_backward.py", "gelu[tanh].py")
    solutions = (*problems, "softmax_v2.py", "softmax_backward_v2.py", "gelu[tanh]_v2.py")
    (tmp_path / "solutions").mkdir()
    for path in (*problems, *(f"solutions/{name}" for name in solutions)):
        (tmp_path / path).write_text("")
    found = judging.pairs(tmp_path, tmp_path / "solutions")
    assert [(p.name, s.name) for p, s in found] == [
        ("gelu[tanh].py", "gelu[tanh].py"),
        ("gelu[tanh].py", "gelu[tanh]_v2.py"),
        ("softmax.py", "softmax.py"),
        ("softmax.py", "softmax_v2.py"),
        ("softmax_backward.py", "softmax_backward.py"),
        ("softmax_backward.py", "softmax_backward_v2.py"),
    ]


def test_bytes_that_the_result_depends_on_count_as_read():
    weight = torch.randn(50)

    def total(x, unused):
        return (x * weight).sum(dim=1) + 0 * unused.shape[0]

    case = forms.Case("", total, total, lambda _: (torch.randn(20, 50), torch.randn(1000)), total,
                      (weight,))  # fmt: skip
    work = checks.bytes_to_move(case, "cpu", 3)
    assert (work.read, work.written) == (20 * 50 * 4 + 50 * 4, 20 * 4)


def test_a_share_of_the_limit_and_the_diagnosis_are_shown():
    row = judging.Row("", {"baseline": 2e-3, "solution": 1e-3}, Interval(1.9, 2.0, 2.1), 0.71,
                      "copy", {"solution": "memory-bound"})  # fmt: skip
    judgement = judging.Judgement("p.py", "s.py", "FASTER", speedup=row.speedup, rows=(row,))
    text = list(judging.lines(judgement))
    assert text[0] == "FASTER        s.py  2.000x [1.900, 2.100] of p.py"
    assert text[1:3] == [
        "    2.000 ms -> 1.000 ms, 71 % of the copy rate", "      solution: memory-bound"
    ]  # fmt: skip


def test_code_that_does_not_run_in_fp64_is_its_own_reference():
    def narrow(x):
        return x.float().exp()

    reference, notes = forms.oracle(narrow, narrow, (torch.randn(10),))
    assert reference(torch.randn(10)).dtype == torch.float64
    [note] = notes
    assert note.endswith("does not run in fp64 (it gives float32): its own result is the reference")
    exact, notes = forms.oracle(torch.exp, torch.exp, (torch.randn(10),))
    assert exact(torch.randn(10)).dtype == torch.float64
    assert notes == []


def test_memory_for_results_that_the_reference_leaves_alone_is_found():
    def make():
        return torch.ones(3), torch.empty(2), [torch.empty(4), torch.empty(5, dtype=torch.int32)]

    def reference(data):
        data[2][0][...] = 1

    assert forms._unused_buffers(make, reference) == {1, 3}
    assert not torch.are_deterministic_algorithms_enabled()
    _, second, (third, _) = forms._replaced(make(), {1}, lambda x: x.new_zeros(x.shape))
    assert second.tolist() == [0, 0]
    assert third.shape == (4,)


def test_torch_compile_replaces_nothing_that_matters(tmp_path):
    problem = forms.load(JUDGED / "kernelbench/linear_gelu.py", "judged_here")
    before = checks.functions(problem)
    torch.compile(lambda x: x + 1, backend="eager")(torch.randn(3))
    assert checks.replaced(before, problem) == ""


@pytest.mark.parametrize(
    ("rtol", "precision"), [(1e-3, "fp32"), (1e-2, "tf32"), (5e-2, "bf16"), (1e-9, "fp64")]
)
def test_the_tolerance_of_a_check_is_the_widest_precision_that_it_accepts(rtol, precision):
    def check(data, output):
        return torch.allclose(output, data * 2, rtol=rtol, atol=0)

    data = torch.randn(1000, dtype=torch.float64)
    assert forms._accepted(check, data, data * 2) == precision


@pytest.mark.parametrize(
    ("found", "good"),
    [((True, ""), True), ((False, "no"), False), ("", True), ("no", False), (None, True),
     (False, False), (["no"], False)],
)  # fmt: skip
def test_a_check_may_return_a_flag_or_reasons_or_both(found, good):
    assert forms.is_accepted(found)[0] is good


def test_arms_of_a_model_record_no_gradients():
    call = forms.without_gradients(torch.nn.Linear(4, 4))
    assert not call(torch.randn(2, 4)).requires_grad


def test_a_process_that_cannot_be_started_costs_its_pair_only(monkeypatch):
    def judge(_problem, solution, *_):
        if solution.name == "s0.py":
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return judging.Judgement("p.py", str(solution), "SAME")

    monkeypatch.setattr(judging, "judge", judge)
    pairs = [(Path("p.py"), Path(f"s{n}.py")) for n in range(2)]
    found = judging.judge_all(pairs, judging.Options(device="cpu"), 1, lambda _: None)
    assert [each.status for each in found] == ["INVALID", "SAME"]
    assert found[0].message.endswith("Resource temporarily unavailable: judge it again")


def test_a_killed_process_of_the_command_costs_its_pair_only(monkeypatch):
    def one(job):
        index, (problem, solution), _ = job
        if index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return index, judging.Judgement(str(problem), str(solution), "SAME")

    jobs = ((n, (Path("p.py"), Path(f"s{n}.py")), None) for n in range(3))
    found = dict(judging._in_processes(one, jobs, 2))
    assert [found[n].status for n in range(3)] == ["INVALID", "SAME", "SAME"]
    assert found[0].solution == "s0.py"
    assert "killed from outside" in found[0].message
