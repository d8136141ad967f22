"""GPU work counts to the ranges in which the host launched it, for nsys and for PyTorch."""

import json
import math

import pytest

from pytest_aiperf.device.trace import Activity
from pytest_aiperf.errors import CaptureFailed
from pytest_aiperf.profilers import command, parsers, ranges, summary, timeline
from pytest_aiperf.profilers.parsers import read
from pytest_aiperf.profilers.ranges import ApiCall, Range, enclosing, times
from pytest_aiperf.profilers.timeline import Selection
from tests.plugin.nsys_export import DOMAIN, MARK, START_END, Export

MICRO = 1_000  # nanoseconds


@pytest.fixture
def step(tmp_path):
    """Write the export of a training step.

    A copy in `data`, kernels in `forward`, two in `backward` that another thread launches, a graph
    in `optimizer`, and a kernel that no range launches.
    """
    export = Export()
    us = MICRO
    export.range("step", 0, 900 * us)
    export.range("data", 10 * us, 90 * us)
    export.copy(20 * us, 30 * us, 80 * us, 4096)
    export.range("forward", 100 * us, 200 * us, text=False)
    export.launch(110 * us, ("gemm(int)", 150 * us, 250 * us))
    export.launch(120 * us, ("relu(int)", 260 * us, 280 * us))
    export.range("backward", 210 * us, 500 * us)
    export.launch(220 * us, ("gemm_t(int)", 300 * us, 400 * us), tid=11)
    export.launch(230 * us, ("gemm_n(int)", 400 * us, 500 * us), tid=11)
    export.range("optimizer", 510 * us, 600 * us)
    export.launch(520 * us, ("adam(int)", 600 * us, 620 * us), ("norm(int)", 640 * us, 650 * us))
    export.launch(950 * us, ("print(int)", 960 * us, 970 * us))
    export.range("a mark", 15 * us, None, kind=MARK)
    return export.write(tmp_path / "step.sqlite")


def rows(reading):
    return {row.name: row for row in reading.ranges}


def test_a_table_has_the_work_of_each_phase(step):
    found = rows(timeline.nsys(step))
    assert list(found) == ["step", "data", "forward", "backward", "optimizer", ""]
    assert [row.depth for row in found.values()] == [0, 1, 1, 1, 1, 0]
    data, forward, backward = found["data"], found["forward"], found["backward"]
    assert (data.copies, data.copied_bytes, data.kernels) == (1, 4096, 0)
    assert data.busy == pytest.approx(50e-6)
    assert (forward.kernels, forward.launches, forward.copies) == (2, 2, 0)
    assert forward.seconds == pytest.approx(100e-6)  # the host leaves before its kernels have run
    assert forward.busy == pytest.approx(120e-6)
    assert forward.gaps == pytest.approx(10e-6)
    assert backward.kernels == 2
    assert backward.gaps == pytest.approx(0.0)
    outside = found[""]
    assert (outside.kernels, outside.gaps) == (1, 0)


def test_a_graph_is_one_launch_of_all_its_kernels(step):
    optimizer = rows(timeline.nsys(step))["optimizer"]
    assert (optimizer.kernels, optimizer.launches) == (2, 1)
    assert optimizer.gaps == pytest.approx(20e-6)


def test_the_outer_range_has_the_work_of_the_inner_ones(step):
    outer = rows(timeline.nsys(step))["step"]
    assert (outer.kernels, outer.copies) == (6, 1)
    assert outer.busy == pytest.approx((50 + 120 + 200 + 30) * 1e-6)


@pytest.mark.parametrize(
    ("selection", "kernels", "names"),
    [
        (Selection("backward"), 2, ["backward"]),
        (Selection("step"), 6, ["step", "data", "forward", "backward", "optimizer"]),
        (Selection("step", "gemm"), 3, ["step", "data", "forward", "backward", "optimizer"]),
        (Selection(kernel="^gemm_[nt]"), 2, ["step", "data", "forward", "backward", "optimizer"]),
    ],
)
def test_a_range_and_kernels_can_be_selected(step, selection, kernels, names):
    reading = timeline.nsys(step, selection=selection)
    assert reading.figures["kernels"] == (kernels, "")
    assert list(rows(reading)) == names


def test_a_range_of_a_library_in_the_backward_pass_belongs_to_it(tmp_path):
    """CCCL names its algorithms, also on the thread in which autograd calls them."""
    export = Export()
    us = MICRO
    export.range("CCCL", 0, None, kind=DOMAIN, domain=3)
    export.range("backward", 0, 500 * us)
    export.range("cub::DeviceReduce::Sum", 100 * us, 200 * us, tid=11, domain=3)
    export.launch(50 * us, ("gemm(int)", 60 * us, 90 * us), tid=11)
    export.launch(110 * us, ("reduce(int)", 120 * us, 160 * us), tid=11)
    export.range("optimizer", 510 * us, 600 * us)
    export.launch(520 * us, ("adam(int)", 530 * us, 540 * us))
    path = export.write(tmp_path / "library.sqlite")
    found = rows(timeline.nsys(path))
    counts = {name: row.kernels for name, row in found.items()}
    assert counts == {"backward": 2, "CCCL:cub::DeviceReduce::Sum": 1, "optimizer": 1}
    selected = timeline.nsys(path, selection=Selection("backward"))
    assert selected.figures["kernels"] == (2, "")


def test_copies_and_long_gaps_have_figures(tmp_path):
    export = Export()
    ms = 1000 * MICRO
    export.copy(0, 0, 30 * ms, 1 << 20)
    export.copy(1 * ms, 10 * ms, 40 * ms, 1 << 20, kind=2)
    export.copy(2 * ms, 40 * ms, 41 * ms, 1 << 20, kind=8)
    export.launch(60 * ms, ("first(int)", 61 * ms, 62 * ms))
    export.launch(63 * ms, ("second(int)", 64 * ms, 65 * ms))
    figures = timeline.nsys(export.write(tmp_path / "copies.sqlite")).figures
    assert figures["host copy time"] == (pytest.approx(0.04), "s")
    assert figures["long gaps"] == (pytest.approx(0.02), "s")
    assert figures["gaps"] == (pytest.approx(0.022), "s")


def test_long_names_of_kernels_are_whole_in_the_record_only(tmp_path):
    export = Export()
    name = "void kernel<" + "int, " * 60 + "float>(float*)"
    export.launch(0, ("first(int)", 0, 100 * MICRO))
    export.launch(300 * MICRO, (name, 500 * MICRO, 900 * MICRO))
    path = export.write(tmp_path / "long.sqlite")
    profile = read("nsys", path, "call")
    assert name in profile.kernels
    assert any(note.startswith("the GPU waits") for note in profile.notes)
    assert not any(name in note for note in profile.notes)


def test_an_unknown_range_or_kernel_names_what_there_is(step):
    with pytest.raises(CaptureFailed, match=r"no range 'eval': its ranges are step, data, forward"):
        timeline.nsys(step, selection=Selection("eval"))
    with pytest.raises(CaptureFailed, match="no kernel with 'conv' in its name"):
        timeline.nsys(step, selection=Selection(kernel="conv"))


def test_processes_and_gpus_are_told_apart(tmp_path):
    """Correlation ids count from 1 in every process, so they alone say nothing."""
    export = Export()
    for rank in (0, 1):
        export.range("forward", 0, 100 * MICRO, pid=50 - rank)
        end = (20 + 10 * rank) * MICRO
        export.launch(5 * MICRO, ("gemm(int)", 10 * MICRO, end), pid=50 - rank, gpu=rank)
    path = export.write(tmp_path / "ranks.sqlite")
    found = timeline.nsys_by_gpu(path)
    assert list(found) == ["GPU 0", "GPU 1"]
    assert [reading.figures["kernels"][0] for reading in found.values()] == [1, 1]
    busy = [rows(reading)["forward"].busy for reading in found.values()]
    assert busy == pytest.approx([10e-6, 20e-6])
    both = timeline.nsys(path)
    assert (both.figures["kernels"][0], rows(both)["forward"].count) == (2, 2)


def test_processes_on_one_gpu_are_named_by_their_ids(tmp_path):
    export = Export()
    for pid in (50, 60):
        export.launch(5 * MICRO, ("gemm(int)", 10 * MICRO, 20 * MICRO), pid=pid)
    found = timeline.nsys_by_gpu(export.write(tmp_path / "two.sqlite"))
    assert list(found) == ["GPU 0 (pid 50)", "GPU 0 (pid 60)"]


def test_a_single_process_has_no_name(step):
    assert list(timeline.nsys_by_gpu(step)) == [""]


def test_a_gpu_without_work_in_the_selected_range_is_left_out(tmp_path):
    export = Export()
    export.range("forward", 0, 100 * MICRO, pid=50)
    export.launch(5 * MICRO, ("gemm(int)", 10 * MICRO, 20 * MICRO), pid=50)
    export.launch(5 * MICRO, ("gemm(int)", 10 * MICRO, 20 * MICRO), pid=60, gpu=1)
    path = export.write(tmp_path / "two.sqlite")
    assert list(timeline.nsys_by_gpu(path, selection=Selection("forward"))) == ["GPU 0"]
    with pytest.raises(CaptureFailed, match="no range 'eval'"):
        timeline.nsys_by_gpu(path, selection=Selection("eval"))


def test_a_range_of_a_domain_has_the_domains_name(tmp_path):
    export = Export()
    export.range("NCCL", 0, None, kind=DOMAIN, domain=3)
    export.range("ncclAllReduce", 1 * MICRO, 9 * MICRO, domain=3)
    export.launch(5 * MICRO, ("reduce(int)", 10 * MICRO, 20 * MICRO))
    assert list(rows(timeline.nsys(export.write(tmp_path / "a.sqlite")))) == ["NCCL:ncclAllReduce"]


def test_a_range_that_a_crash_left_open_counts_to_the_end(tmp_path):
    export = Export()
    export.range("train", 1 * MICRO, None, kind=START_END)
    export.launch(5 * MICRO, ("gemm(int)", 10 * MICRO, 21 * MICRO))
    [row] = timeline.nsys(export.write(tmp_path / "a.sqlite")).ranges
    assert (row.name, row.kernels) == ("train", 1)
    assert row.seconds == pytest.approx(20e-6)


def test_claims_have_the_ranges_as_notes(step):
    notes = read("nsys", step, "baseline").notes
    assert "range forward: 1 x, 120.0 µs on the GPU, 10.00 µs gaps, 2 kernels" in notes
    assert any(note.startswith("range data: 1 x") and "1 copies (4.000 KiB)" in note
               for note in notes)  # fmt: skip
    assert notes[-1] == "outside of all ranges: 10.00 µs on the GPU, 1 kernels"


# which range a call counts to


@pytest.mark.parametrize(
    ("thread", "inside"),
    [("main", ["whole", "a"]), ("autograd", ["whole", "a"]), ("other", ["whole", "a", "b"])],
)
def test_a_call_counts_to_the_thread_that_waits_for_it(thread, inside):
    """With a thread of its own range, the main thread's range counts as well."""
    named = [
        Range("whole", 0, 9, thread=None),
        Range("a", 1, 8, thread="main"),
        *([Range("b", 2, 7, thread="other")] if thread == "other" else []),
        Range("elsewhere", 0, 9, process=1, thread="main"),
    ]
    [found] = enclosing([ApiCall(3, 4, 1, thread=thread)], named, {0: "main"})
    assert [named[index].name for index in found] == inside


def test_where_several_threads_may_wait_the_main_thread_counts():
    named = [Range("a", 1, 8, thread="main"), Range("b", 1, 8, thread="loader")]
    call = [ApiCall(3, 4, 1, thread="autograd")]
    assert enclosing(call, named, {0: "main"}) == [[0]]
    assert enclosing(call, named, {0: "another"}) == [[]]


def test_a_range_inside_one_of_its_name_is_a_part_of_it():
    named = [Range("f", 0, 9, thread=1), Range("f", 2, 5, thread=1), Range("f", 20, 21, thread=1)]
    work = [Activity("kernel", "k", 3, 4, 1), Activity("kernel", "k", 6, 7, 2)]
    calls = [ApiCall(3, 3, 1, thread=1), ApiCall(6, 6, 2, thread=1)]
    [row] = times(work, calls, named, {})
    assert (row.count, row.kernels, row.busy, row.seconds) == (2, 2, 2, 10)


@pytest.mark.parametrize("count", [ranges.MAX_NUMBERED, ranges.MAX_NUMBERED + 1])
def test_very_many_numbered_ranges_are_one_row(count):
    named = [Range(f"step {n}", n, n + 0.5, thread=1) for n in range(count)]
    table = times([], [], named, {})
    names = ["step *"] if count > ranges.MAX_NUMBERED else [f"step {n}" for n in range(count)]
    assert [row.name for row in table] == names
    assert sum(row.count for row in table) == count


def test_without_ranges_there_is_no_table():
    assert times([Activity("kernel", "k", 3, 4, 1)], [], [], {}) == ()


def test_work_of_an_unknown_call_is_outside():
    table = times([Activity("kernel", "k", 3, 4, 1)], [], [Range("a", 0, math.inf, 0, 1)], {})
    assert [(row.name, row.kernels) for row in table] == [("a", 0), ("", 1)]


# PyTorch


def event(category, name, start, dur, correlation=0, *, tid=9):
    gpu = category in ("kernel", "gpu_memcpy")
    where = {"pid": 0, "tid": 7} if gpu else {"pid": 9, "tid": tid}
    args = {"External id": correlation, "correlation": correlation}
    times_us = {"ts": start, "dur": dur}
    return {"ph": "X", "cat": category, "name": name, "args": args, **where, **times_us}


def test_a_torch_trace_has_the_table_too(tmp_path):
    events = [
        event("user_annotation", "forward", 0, 100),
        event("cuda_runtime", "cudaLaunchKernel", 10, 5, 1),
        event("kernel", "gemm", 50, 40, 1),
        event("user_annotation", "backward", 110, 100),
        event("cpu_op", "aten::mm", 120, 20, 2, tid=33),
        event("cuda_runtime", "cudaLaunchKernel", 125, 5, 2, tid=33),
        event("kernel", "gemm_t", 150, 30, 2),
    ]
    path = tmp_path / "0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = rows(timeline.torch_trace(path))
    assert {name: row.kernels for name, row in found.items()} == {"forward": 1, "backward": 1}
    assert found["backward"].busy == pytest.approx(30e-6)
    only = timeline.torch_trace(path, Selection("backward"))
    assert only.kernels == ["gemm_t"]
    assert only.figures["operators"] == (1, "")
    assert only.figures["range"][0] == pytest.approx(100e-6)


def test_a_table_without_kernels_has_no_zeros(tmp_path):
    events = [
        event("user_annotation", "forward", 0, 100),
        event("cpu_op", "aten::mm", 5, 20, 1),
        event("cuda_runtime", "cudaLaunchKernel", 10, 5, 1),
    ]
    path = tmp_path / "0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    reading = timeline.torch_trace(path)
    part = command.Part(parsers.profile("torch", path, "command", reading), reading.ranges)
    [row] = summary._range_rows(part)
    assert row == ["forward", "1", "100.0 µs", *["-"] * 7]
