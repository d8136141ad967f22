"""The example `examples/kernel_search.py`: candidates are judged together, and in generations."""

from types import SimpleNamespace

import pytest
import torch

from examples import kernel_search
from examples.kernel_search import Judged, fastest, judge, search
from kernels.ch20.row_tasks import TASKS

from .test_standalone import machine  # noqa: F401  measures on a fake GPU


def doubling(microseconds, result="x * 2"):
    return (
        "from tests.fake_gpu import spend\n"
        "results = {}\n"
        "def run(x):\n"
        f"    spend({microseconds}e-6)\n"
        f"    return {result}\n"
    )


CANDIDATES = {
    "fast": doubling(100),
    "faster": doubling(50),
    "slow": doubling(400),
    "wrong": doubling(50, "x * 3"),
    "caches": doubling(50, "results.setdefault(x.data_ptr(), x * 2)"),
    "wrong at full size": doubling(50, "x * (2 + (len(x) > 8))"),
    "raises": "def run(x): raise ZeroDivisionError",
    "no module": "def run(x:",
}


DOUBLE = SimpleNamespace(
    START=doubling(200),
    inputs=lambda bench: torch.randn(bench.size(64, check=8)),
    reference=lambda x: x.double() * 2,
)


def test_candidates_of_a_generation_are_judged_together(monkeypatch):
    measured = []
    measure_each = kernel_search.measure_each

    def counted(arms, **words):
        measured.append(len(arms))
        return measure_each(arms, **words)

    monkeypatch.setattr(kernel_search, "measure_each", counted)
    judged = {each.name: each for each in judge([*CANDIDATES.items()], DOUBLE, "cuda")}
    assert measured == [len(CANDIDATES)]
    speedups = {name: each.speedup for name, each in judged.items() if not each.rejected}
    assert speedups == pytest.approx({"fast": 2, "faster": 4, "slow": 0.5}, rel=0.05)
    assert judged["raises"].rejected.startswith("ZeroDivisionError")
    assert judged["no module"].rejected.startswith("SyntaxError")
    for name in ("wrong", "caches"):
        assert judged[name].rejected.startswith("AssertionError: Tensor-likes are not close!")
    assert judged["wrong at full size"].rejected.startswith("optimized disagrees")
    assert fastest([*judged.values()], DOUBLE.START).name == "faster"


def test_without_a_gpu_candidates_are_only_checked():
    judged = judge([*CANDIDATES.items()], DOUBLE, "cpu")
    assert {each.speedup for each in judged} == {None}
    agree = [each.name for each in judged if not each.rejected]
    assert agree == ["fast", "faster", "slow", "wrong at full size"]


@pytest.mark.parametrize("name", TASKS)
def test_the_search_of_a_row_kernel_follows_what_is_faster(name):
    task, seen = TASKS[name], []

    def judge_by_name(candidates):
        seen.append([each for each, _ in candidates])
        times = {"passes=1": 2.0, "passes=2": 1.5}
        return [
            Judged(each, source, rejected="wrong")
            if each.startswith("wrong")
            else Judged(each, source, times[each[:8]] + ("warps=16" in each) - ("hints" in each))
            for each, source in candidates
        ]

    history = search(task.generations, 100, judge_by_name)
    several = [f"passes={n}, tile=1024, warps=4" for n in range(len(task.passes[0]), 1, -1)]
    wrong = [f"wrong: {task.mistake[0]}", "wrong: cached results"]
    assert seen == [
        [*wrong, *several, "passes=1, tile=row, warps=4"],
        [f"passes=1, tile=row, warps={warps}" for warps in (8, 16, 32)],
        [
            "passes=1, tile=row, warps=16, hints",
            "passes=2, tile=2048, warps=16, hints",
            "passes=2, tile=4096, warps=16, hints",
        ],
    ]
    assert fastest(history, task.START).name == "passes=1, tile=row, warps=16"
    assert len(search(task.generations, 4, judge_by_name)) == 4
    assert sum(map(len, seen[3:])) == 4


def test_a_search_that_finds_nothing_faster_keeps_the_start():
    task = TASKS["softmax"]
    history = search(
        task.generations, 100, lambda candidates: [Judged(*each, 0.9) for each in candidates]
    )
    assert [judged.name for judged in history[-2:]] == [
        "passes=3, tile=4096, warps=4", "passes=3, tile=8192, warps=4"
    ]  # fmt: skip
    assert fastest(history, task.START).name == "start"


def test_a_search_that_an_error_ends_has_written_the_fastest_so_far(tmp_path, monkeypatch):
    def generations(_history):
        yield [("slow", CANDIDATES["slow"])]
        yield [("fast", CANDIDATES["fast"])]
        raise TimeoutError("the endpoint does not answer")

    task = SimpleNamespace(**vars(DOUBLE), PROMPT="", generations=generations)
    monkeypatch.setattr(kernel_search, "find_task", lambda _: task)
    with pytest.raises(TimeoutError):
        kernel_search.main(["task", "--device", "cuda", "--out", str(tmp_path / "fastest.py")])
    assert (tmp_path / "fastest.py").read_text() == CANDIDATES["fast"]


def test_candidates_in_a_subprocess(tmp_path, monkeypatch):
    start = ("start", TASKS["absmax"].START)
    words = {"task_name": "kernels.ch20.row_tasks:absmax", "device": "cpu"}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    judged = kernel_search.judge_in_subprocess(
        [start, ("raises", CANDIDATES["raises"])], timeout_s=300, **words
    )
    assert judged[0] == Judged(*start)
    assert judged[1].rejected.startswith("ZeroDivisionError")
    [crashed] = kernel_search.judge_in_subprocess(
        [("crash", "import os\nos.abort()")], timeout_s=300, **words
    )
    assert "SIGABRT" in crashed.rejected


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("kernels.ch20.no_tasks", "No module named 'kernels.ch20.no_tasks'"),
        ("kernels.ch20.row_tasks:sotfmax", "TASKS has "),
        ("kernels.ch20.row_tasks", "has no attribute 'START'"),
    ],
)
def test_what_is_no_task_is_a_usage_error(capsys, task, why):
    with pytest.raises(SystemExit, match="2"):
        kernel_search.main([task])
    error = capsys.readouterr().err
    assert f"{task} is no task: " in error
    assert why in error
