"""The parsers read the samples (see samples/record.py) and refuse empty or broken artifacts."""

import gzip
import json
import re
import sqlite3
import sys
import types
from contextlib import closing
from pathlib import Path

import pytest

from pytest_aiperf.device.trace import read as read_trace
from pytest_aiperf.errors import CaptureFailed
from pytest_aiperf.profilers import ncu, parsers
from pytest_aiperf.profilers.ncu import Kernel, aggregate, ncu_metrics, python_folders
from pytest_aiperf.profilers.parsers import read
from pytest_aiperf.profilers.timeline import Selection, torch_trace
from tests.plugin.nsys_export import Export

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("ncu") / "baseline.ncu-rep"
    path.write_bytes(gzip.decompress((SAMPLES / "ncu.ncu-rep.gz").read_bytes()))
    return path


def counted(report, metric, part):
    figures = read("ncu", report, "baseline", counters=[(metric, part)]).figures
    return figures[ncu.counter(metric, part)]


def test_an_ncu_report_gives_its_figures_in_base_units(report):
    profile = read("ncu", report, "baseline", ["copy_strided", "copy_vectors"])
    figures, units = profile.figures, profile.units

    assert (profile.tool, profile.arm, profile.artifact) == ("ncu", "baseline", str(report))
    assert 20e-6 < figures["duration"] < 1e-3
    assert units["duration"] == "s"
    for name in ("dram share", "l2 share", "l1 share", "sm share", "occupancy", "l2 hit rate"):
        assert 0 < figures[name] < 1, name
        assert units[name] == "share"
    assert figures["tensor share"] < 0.01  # none of the kernels multiplies matrices
    assert figures["registers"] >= 32
    assert figures["dram bytes"] > 3 * 4 * 2**22  # each kernel reads an array of 2**22 floats
    assert units["dram bytes"] == "B"


def test_the_top_stalls_are_named_the_longest_first(report):
    profile = read("ncu", report, "baseline")
    stalls = {name: v for name, v in profile.figures.items() if name.startswith("stall ")}

    assert len(stalls) == 3
    assert next(iter(stalls)) == "stall long scoreboard"  # the kernels wait for device memory
    assert list(stalls.values()) == sorted(stalls.values(), reverse=True)
    assert "stall selected" not in stalls


def test_ncu_counters_are_aggregated_over_the_named_kernels(report):
    sectors, requests = ncu.NCU_METRICS["sectors per load"]

    strided = counted(report, sectors, "copy_strided") / counted(report, requests, "copy_strided")
    vectors = counted(report, sectors, "copy_vectors") / counted(report, requests, "copy_vectors")
    assert strided == 32  # one sector per lane
    assert vectors == 16  # 16 bytes per lane
    assert counted(report, sectors, "") >= counted(report, sectors, "copy_") == 4194304 + 524288


def test_a_raw_counter_keeps_the_units_of_ncu(report):
    metric = "sm__warps_active.avg.pct_of_peak_sustained_active"
    profile = read("ncu", report, "baseline", counters=[(metric, ""), ("no__such.sum", "")])

    assert profile.figures[metric] == pytest.approx(100 * profile.figures["occupancy"])
    assert profile.units[metric] == "%"
    assert "no__such.sum" not in profile.figures


@pytest.mark.parametrize(
    ("metric", "unit"),
    [
        ("dram__bytes.sum.pct_of_peak_sustained_elapsed", "%"),
        ("dram__bytes.sum.per_second", "byte/second"),
        ("dram__bytes.sum", "byte"),
        ("gpu__time_duration.sum", "ns"),
        ("smsp__inst_executed.sum.per_cycle_active", ""),
    ],
)
def test_a_raw_counter_has_the_unit_of_its_submetric(metric, unit):
    assert ncu._unit(metric) == unit


def test_every_named_figure_is_read_from_an_ncu_report(report):
    profile = read("ncu", report, "baseline", ["copy_strided", "copy_vectors", "turn", "softmax"])
    conflicts = ncu.NCU_METRICS["bank conflicts"][0]
    first, second = sorted({k for k in profile.kernels if "turn<" in k})

    # of these the sample lacks the metrics
    missing = {"fma share", "local bytes", "dram bytes read", "dram bytes written"}
    assert set(ncu.NCU_METRICS) - set(profile.figures) <= missing
    apart = sorted(counted(report, conflicts, tile) for tile in (first, second))
    assert apart[1] > 10 * apart[0]  # the unpadded tile has conflicts, the padded one has few


def test_sums_are_added_and_shares_weighted_with_time():
    kernels = [
        Kernel("a", 3.0, {"x.sum": 1, "y.pct": 10, "launch__z": 16}),
        Kernel("b", 1.0, {"x.sum": 2, "y.pct": 50, "launch__z": 8}),
        Kernel("c", 9.0, {}),
    ]
    assert aggregate("x.sum", kernels) == 3
    assert aggregate("y.pct", kernels) == 20
    assert aggregate("launch__z", kernels) == 16
    assert aggregate("absent", kernels) is None


@pytest.mark.parametrize("whole", [True, False])
def test_a_share_is_that_of_the_busiest_part(monkeypatch, whole):
    """ncu's own throughput, which only some presets collect, covers more parts."""
    issued, alu = ncu.NCU_METRICS["sm share"][:2]
    throughput = {"sm__throughput.avg.pct_of_peak_sustained_elapsed": 80.0} if whole else {}
    rows = [Kernel("a", 1.0, {issued: 20.0, alu: 50.0, **throughput})]
    monkeypatch.setattr(ncu, "_kernels", lambda *_: rows)
    assert ncu.ncu(Path("a.ncu-rep"))[0] == {
        "kernels": (1, ""), "sm share": (pytest.approx(0.8 if whole else 0.5), "share"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "normalized"),
    [
        ("void copy<(int)4>(const float *)", "void copy<4>(const float *)"),
        ("turn<(bool)1, (unsigned long)2>(int)", "turn<1, 2>(int)"),
        ("void cast<int>((anonymous namespace)::x)", "void cast<int>((anonymous namespace)::x)"),
    ],
)
def test_names_of_kernels_are_those_of_compilers(name, normalized):
    assert ncu.normalize_name(name) == normalized


def test_the_second_tensor_pipe_is_collected_on_its_chips_only():
    assert not any("pipe_tc_" in metric for metric in ncu_metrics("sm90"))
    assert any("pipe_tc_" in metric for metric in ncu_metrics("sm100"))
    assert not any("stalled_gmma_" in metric for metric in ncu_metrics("sm100"))
    assert any("stalled_gmma_" in metric for metric in ncu_metrics("sm90"))
    assert ncu_metrics("sm90", ["extra.sum", "dram__bytes.sum"]).count("dram__bytes.sum") == 1
    assert ncu_metrics("sm90", ["extra.sum"])[-1] == "extra.sum"


def test_a_report_without_kernels_proves_nothing(tmp_path):
    empty = tmp_path / "baseline.ncu-rep"
    empty.write_bytes(b"NVR\0")
    with pytest.raises(CaptureFailed, match=r"holds no kernels.*older than the ncu"):
        read("ncu", empty, "baseline")
    with pytest.raises(CaptureFailed, match="ncu did not write"):
        read("ncu", tmp_path / "absent.ncu-rep", "baseline")


def test_an_expected_kernel_must_be_in_the_capture(report):
    with pytest.raises(CaptureFailed, match=r"lacks the kernel copy_unrolled: the optimized arm"):
        read("ncu", report, "optimized", ["copy_vectors", "copy_unrolled"])
    with pytest.raises(CaptureFailed, match="lacks the kernel copy_unrolled"):
        read("nsys", SAMPLES / "nsys.sqlite", "optimized", ["copy_unrolled"])


@pytest.mark.parametrize(
    "layout", ["extras", "nsight-compute-2025.3.1/extras", "nsight-compute/9/extras"]
)
def test_ncu_report_is_found_beside_the_binary(tmp_path, monkeypatch, layout):
    binary = tmp_path / "toolkit" / "bin" / "ncu"
    module = tmp_path / "toolkit" / layout / "python" / "ncu_report.py"
    for file in (binary, module):
        file.parent.mkdir(parents=True, exist_ok=True)
    binary.touch()
    module.write_text("def load_report(path): raise LookupError('this module')")

    assert module.parent in python_folders(str(binary))
    # as if the pip package were missing
    monkeypatch.delitem(sys.modules, "ncu_report", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    with pytest.raises(LookupError, match="this module"):
        ncu._ncu_report(str(binary)).load_report("")
    monkeypatch.delitem(sys.modules, "ncu_report")


def test_no_ncu_report_anywhere_is_a_sentence(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    with pytest.raises(SystemExit, match="pip install ncu-report"):
        ncu._ncu_report("/nowhere/at/all/ncu")


def test_what_crashes_the_reader_costs_that_capture_only(report, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CaptureFailed, match=r"cannot be read: its reader crashed with exit code 1"):
        read("ncu", report, "baseline")


def test_an_nsys_export_gives_launches_gaps_and_the_range():
    profile = read("nsys", SAMPLES / "nsys.sqlite", "baseline", ["copy_strided", "softmax"])
    figures = profile.figures

    assert figures["kernels"] == len(profile.kernels) >= 3
    assert figures["launches"] == figures["kernels"] + figures["copies"]
    assert figures["busy"] + figures["gaps"] == pytest.approx(figures["span"])
    assert 0 < figures["gap share"] == pytest.approx(figures["gaps"] / figures["span"])
    assert 0 < figures["api time"] < figures["range"] < 1
    assert profile.kernels[0].startswith("copy_strided")  # by far the slowest kernel
    assert profile.notes[0].startswith("copy_strided(const float *, float *, unsigned long): ")


def test_ncu_and_nsys_saw_the_same_call(report):
    seen = {
        tool: read(tool, path, "baseline")
        for tool, path in (("ncu", report), ("nsys", SAMPLES / "nsys.sqlite"))
    }
    assert set(seen["ncu"].kernels) == set(seen["nsys"].kernels)
    assert seen["ncu"].figures["kernels"] == seen["nsys"].figures["kernels"]


def exported(path, *, copies=(), ranged=True):
    """Write an nsys export: a kernel before the range, one in it, one that ends after it."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            """
            CREATE TABLE StringIds (id INTEGER, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL
                (start INTEGER, end INTEGER, correlationId INTEGER, demangledName INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
                (start INTEGER, end INTEGER, correlationId INTEGER, nameId INTEGER);
            CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER);
            INSERT INTO StringIds VALUES (1, 'cudaLaunchKernel_v7000'), (2, 'early(int)'),
                (3, 'late(int)'), (4, 'cudaMemcpyAsync_v3020'), (5, 'cudaLaunchHostFunc_v10000');
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (0, 10, 1, 1), (1000, 1100, 2, 1),
                (1200, 1300, 3, 1), (1300, 1350, 4, 4), (1350, 1360, 5, 5);
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 900, 1, 2), (1500, 1600, 2, 2),
                (1900, 9000, 3, 3);
            """
        )
        if ranged:
            db.execute("INSERT INTO NVTX_EVENTS VALUES (950, 2000, 'aiperf', NULL)")
        if copies:
            db.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER,"
                " correlationId INTEGER, copyKind INTEGER, bytes INTEGER)"
            )
            db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?)", copies)
        db.commit()
    return path


def test_what_the_range_launched_counts_also_when_it_runs_later(tmp_path):
    copies = [(1550, 1700, 4, 1, 4096), (10, 20, 1, 2, 77)]
    profile = read("nsys", exported(tmp_path / "b.sqlite", copies=copies), "baseline")
    figures = profile.figures

    assert (figures["kernels"], figures["launches"], figures["copies"]) == (2, 3, 1)
    assert profile.kernels == ("late(int)", "early(int)")
    assert figures["host to device bytes"] == 4096
    assert "device to host bytes" not in figures
    # busy from 1500 to 1700 (kernel and copy overlap) and from 1900 to 9000
    assert figures["span"] == pytest.approx(7500e-9)
    assert figures["busy"] == pytest.approx(7300e-9)
    assert figures["gaps"] == pytest.approx(200e-9)
    assert figures["api time"] == pytest.approx(260e-9)
    assert figures["range"] == pytest.approx(1050e-9)


def test_without_a_range_the_whole_capture_counts(tmp_path):
    figures = read("nsys", exported(tmp_path / "b.sqlite", ranged=False), "baseline").figures
    assert figures["kernels"] == 3
    assert "range" not in figures


def test_a_range_that_launched_nothing_proves_nothing(tmp_path):
    path = exported(tmp_path / "b.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE NVTX_EVENTS SET start = 5000, end = 6000")
        db.commit()
    with pytest.raises(CaptureFailed, match="nothing that ran on a GPU inside the range 'aiperf'"):
        read("nsys", path, "baseline")


def fake_nsys(tmp_path, body):
    tool = tmp_path / "nsys"
    tool.write_text(f"#!{sys.executable}\nimport sys, shutil\n{body}\n")
    tool.chmod(0o755)
    return str(tool)


def test_a_report_of_nsys_is_exported_once(tmp_path):
    export = exported(tmp_path / "export.sqlite")
    body = f"to = sys.argv[4].partition('=')[2]\nshutil.copy({str(export)!r}, to)"
    tool = fake_nsys(tmp_path, body)
    (report := tmp_path / "baseline.nsys-rep").touch()

    assert read("nsys", report, "baseline", binary=tool).figures["kernels"] == 2
    broken = fake_nsys(tmp_path, "sys.exit('called again')")
    assert read("nsys", report, "baseline", binary=broken).figures["kernels"] == 2


def test_a_part_of_an_export_does_not_pass_for_the_whole(tmp_path):
    (report := tmp_path / "baseline.nsys-rep").touch()
    export = exported(tmp_path / "export.sqlite")
    body = f"to = sys.argv[4].partition('=')[2]\nshutil.copy({str(export)!r}, to)"
    full = fake_nsys(tmp_path, f"{body}\nsys.exit('No space left on device')")
    for _ in range(2):
        with pytest.raises(CaptureFailed, match=r"could not export .*\(No space left on device\)"):
            read("nsys", report, "baseline", binary=full)
    assert {file.name for file in tmp_path.iterdir()} == {"export.sqlite", report.name, "nsys"}
    with pytest.raises(CaptureFailed, match=r"cannot be exported: .*absent"):
        read("nsys", report, "baseline", binary=str(tmp_path / "absent"))


def test_what_nsys_cannot_export_is_a_sentence(tmp_path):
    (report := tmp_path / "baseline.nsys-rep").touch()
    tool = fake_nsys(tmp_path, "sys.exit('unknown version')")
    with pytest.raises(CaptureFailed, match=r"could not export .*\(unknown version\)"):
        read("nsys", report, "baseline", binary=tool)
    with pytest.raises(CaptureFailed, match="cannot be read without nsys"):
        read("nsys", report, "baseline")
    with pytest.raises(CaptureFailed, match="nsys did not write"):
        read("nsys", tmp_path / "absent.nsys-rep", "baseline", binary=tool)
    (broken := tmp_path / "broken.sqlite").write_text("not a database, and long enough to tell")
    with pytest.raises(CaptureFailed, match="is not an export of an nsys report"):
        read("nsys", broken, "baseline")


def event(cat, name, ts, dur, external, **more):
    args = {"External id": external, "correlation": external, **more}
    where = {"pid": 0, "tid": 7} if cat in ("kernel", "gpu_memcpy") else {"pid": 9, "tid": 9}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args, **where}


def trace(*events, **metadata):
    return json.dumps({"schemaVersion": 1, **metadata, "traceEvents": list(events)})


CALL = (
    event("user_annotation", "aiperf", 100, 100, 90),
    event("cuda_runtime", "cudaLaunchKernel", 50, 5, 1),
    event("kernel", "warm_up", 60, 50, 1),
    event("cpu_op", "aten::linear", 110, 60, 2),
    event("cpu_op", "aten::addmm", 120, 40, 3),
    event("cuda_runtime", "cudaLaunchKernelExC", 130, 10, 3),
    event("kernel", "gemm<bf16>", 300, 50, 3),
    event("cpu_op", "aten::copy_", 180, 10, 4),
    event("cuda_runtime", "cudaMemcpyAsync", 181, 5, 4),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 360, 30, 4, bytes=512),
)


def test_a_torch_trace_gives_launches_gaps_and_operators(tmp_path):
    path = tmp_path / "baseline.json"
    path.write_text(
        trace({"ph": "M", "name": "process_name"}, *CALL, graph_breaks=2, recompilations=3)
    )
    profile = read("torch", path, "baseline", ["gemm"])
    figures = profile.figures

    assert profile.kernels == ("gemm<bf16>",)
    assert (figures["kernels"], figures["launches"], figures["copies"]) == (1, 2, 1)
    assert figures["device to host bytes"] == 512
    assert figures["gaps"] == pytest.approx(10e-6)
    assert figures["busy"] == pytest.approx(80e-6)
    assert figures["range"] == pytest.approx(100e-6)
    assert figures["api time"] == pytest.approx(15e-6)
    assert figures["operators"] == 3
    assert (figures["graph breaks"], figures["recompilations"]) == (2, 3)
    assert profile.notes[:3] == (
        "aten::addmm: 50.00 µs on the GPU, 40.00 µs on the host, 1 calls",
        "aten::copy_: 30.00 µs on the GPU, 10.00 µs on the host, 1 calls",
        "aten::linear: 0.000 s on the GPU, 20.00 µs on the host, 1 calls",
    )


def test_a_trace_without_kernels_of_a_program_that_launched_some_counts_none(tmp_path):
    path = tmp_path / "0.json"
    path.write_text(trace(*(each for each in CALL if each["cat"] not in ("kernel", "gpu_memcpy"))))
    profile = read("torch", path, "baseline")
    assert not {"kernels", "launches", "copies"} & profile.figures.keys()
    assert profile.notes[0].startswith(
        "no kernels were recorded, so GPU times are missing: the program launched work 3 times, "
    )
    assert profile.notes[1] == "aten::addmm: 40.00 µs on the host, 1 calls"


WAITS = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize_v3020", "cudaEventSynchronize", "cudaMemcpy",
    "cuCtxSynchronize", "cuStreamSynchronize_ptsz", "cuMemcpyDtoH_v2", "cudaMemcpy2D",
)  # fmt: skip
GOES_ON = (
    "cudaMemcpyAsync", "cuMemcpyDtoHAsync_v2", "cudaMemcpyPeerAsync_v4000", "cudaLaunchKernel",
    "cuMemcpyDtoD_v2", "cudaStreamWaitEvent", "cudaMalloc",
)  # fmt: skip


def test_waits_of_the_host_are_counted(tmp_path):
    names = WAITS + GOES_ON
    calls = [event("cuda_runtime", name, 130 + n, 1, 10 + n) for n, name in enumerate(names)]
    late = event("cuda_runtime", "cudaDeviceSynchronize", 250, 1, 99)  # outside of the range
    path = tmp_path / "trace.json"
    path.write_text(trace(*CALL, *calls, late))
    assert read("torch", path, "baseline").figures["synchronizations"] == len(WAITS)
    export = Export()
    export.launch(100, ("k", 200, 300))
    for n, name in enumerate(names):
        export.wait(1_000 + n, name)
    path = export.write(tmp_path / "nsys.sqlite")
    assert read("nsys", path, "baseline").figures["synchronizations"] == len(WAITS)


def product(name, dtype, *matrices):
    """Return the event of a product of matrices, each a pair of sizes and strides."""
    sizes, strides = zip(*matrices, strict=True)
    shapes = {"Input Dims": sizes, "Input Strides": strides, "Input type": [dtype] * len(matrices)}
    return event("cpu_op", name, 150, 1, 50, **shapes)


@pytest.mark.parametrize(
    ("name", "dtype", "matrices", "row"),
    [
        ("aten::mm", "c10::BFloat16", ([[64, 1000], [1000, 1]], [[1000, 1001], [1001, 1]]), 1001),
        ("aten::mm", "c10::BFloat16", ([[64, 1000], [1000, 1]], [[1000, 1001], [1, 1000]]), None),
        ("aten::mm", "c10::BFloat16", ([[64, 1001], [1008, 1]], [[1001, 64], [1, 1008]]), None),
        ("aten::mm", "c10::Half", ([[1, 1001], [1001, 1]], [[1001, 64], [64, 1]]), None),
        ("aten::bmm", "c10::Half", ([[2, 8, 17], [136, 17, 1]], [[2, 17, 24], [408, 24, 1]]), 17),
        ("aten::addmm", "c10::Half", ([[50257], [1]], [[8, 64], [64, 1]]), None),
        ("aten::mm", "float", ([[64, 1001], [1001, 1]], [[1001, 64], [64, 1]]), None),
        ("aten::add", "c10::Half", ([[64, 1001], [1001, 1]],), None),
    ],
)  # fmt: skip
def test_products_with_misaligned_rows_are_named(tmp_path, name, dtype, matrices, row):
    path = tmp_path / "trace.json"
    path.write_text(trace(*CALL, product(name, dtype, *matrices)))
    found = [n for n in read("torch", path, "baseline").notes if "misaligned" in n]
    assert len(found) == (row is not None)
    if row:
        padded = -(-row // 8) * 8
        assert f"{name} of" in found[0]
        assert f"a row has {row} values" in found[0]
        assert found[0].endswith(f"pad it to {padded}")


def waiting(*frames, launch=400, correlation=2):
    """Return the trace of two kernels with a gap of 300 µs, and the host's frames (name, times)."""
    return trace(
        event("cuda_runtime", "cudaLaunchKernel", 100, 5, 1),
        event("kernel", "first", 110, 90, 1),
        event("cuda_runtime", "cudaLaunchKernel", launch, 5, correlation),
        event("kernel", "second", 500, 100, 2),
        *(event(*frame, 0) for frame in frames),
    )


ITEM = "<built-in method item of Tensor object at 0x7f3647e87700>"
OTHER = (("user_annotation", "data", 10, 50),)
IN_ITEM = "<built-in method item of Tensor>"
STACK = (
    ("python_function", "train.py(7): step", 90, 400),
    ("python_function", "torch/_tensor.py(1): item", 205, 150),
    ("python_function", ITEM, 210, 130),
    ("user_annotation", "forward", 90, 400),
)


@pytest.mark.parametrize(
    ("frames", "launch", "host"),
    [
        (STACK, 400, f"the host was in {IN_ITEM}, called in train.py(7): step"),
        (STACK[:1], 400, "the host was in train.py(7): step"),
        (STACK[3:], 400, "the host was in forward"),
        (STACK[2:3], 250, f"the host was in {IN_ITEM}"),
        ((), 400, "its launch came late; ranges, or torch:deep_dive, show what the host did"),
        (OTHER, 400, "the host was outside of all ranges"),
        (STACK, 150, "its launch came in time"),
    ],
)  # fmt: skip
def test_a_gap_has_what_the_host_did_in_it(tmp_path, frames, launch, host):
    path = tmp_path / "trace.json"
    path.write_text(waiting(*frames, launch=launch))
    expected = "the GPU waits 300.0 µs before second (1 x): "
    assert expected + host in read("torch", path, "baseline").notes
    path.write_text(waiting(*frames, launch=launch, correlation=3))
    assert f"{expected}its launch was not recorded" in read("torch", path, "baseline").notes


def test_gaps_are_added_up_by_what_ends_them_and_small_ones_are_not_described(tmp_path):
    export = Export()
    for step in range(4):
        at = step * 1_000
        export.range("data", at, at + 400)
        export.launch(at + 410, ("copy", at + 500, at + 600))
        export.launch(at + 420, ("gemm", at + 650, at + 1_000))
    notes = read("nsys", export.write(tmp_path / "nsys.sqlite"), "baseline").notes
    assert [note for note in notes if "waits" in note] == [
        "the GPU waits 1.500 µs before copy (3 x): the host was in data",
        "the GPU waits 200.0 ns before gemm (4 x): its launch came in time",
    ]
    export = Export()
    export.launch(10, ("copy", 100, 200))
    export.launch(20, ("gemm", 205, 500))
    notes = read("nsys", export.write(tmp_path / "small.sqlite"), "baseline").notes
    assert not [note for note in notes if "waits" in note]


def test_modules_have_their_time_if_stacks_were_recorded(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(
        trace(
            event("python_function", "nn.Module: Block_0", 90, 200, 0),
            event("python_function", "torch/nn/modules/linear.py(9): forward", 95, 40, 0),
            event("python_function", "nn.Module: Linear_0", 96, 30, 0),
            event("cuda_runtime", "cudaLaunchKernel", 100, 5, 1),
            event("kernel", "gemm", 110, 90, 1),
            event("cuda_runtime", "cudaLaunchKernel", 150, 5, 2),
            event("kernel", "gelu", 200, 10, 2),
        )
    )
    rows = torch_trace(path).ranges
    assert [(row.name, row.depth, row.kernels) for row in rows] == [
        ("nn.Module: Block_0", 0, 2),
        ("nn.Module: Linear_0", 1, 1),
    ]
    assert rows[0].busy == pytest.approx(100e-6)
    assert torch_trace(path, Selection("nn.Module: Linear_0")).kernels == ["gemm"]


METRICS = {
    "SMs Active [Throughput %]": "sm active", "Tensor Active [Throughput %]": "tensor active",
    "DRAM Read Bandwidth [Throughput %]": "dram read",
}  # fmt: skip


def test_gpu_metrics_are_means_over_the_time_in_which_the_gpu_works(tmp_path):
    export = Export()
    export.launch(100, ("k", 200, 400))
    for metric in (*METRICS, "SMs Active [Cycles]", "PCIe RX Throughput [Throughput %]"):
        for at, value in ((150, 90), (200, 10), (300, 20), (400, 60), (500, 80)):
            export.sample(metric, at, value)
    figures = read("nsys", export.write(tmp_path / "nsys.sqlite"), "baseline").figures
    assert [figures[name] for name in METRICS.values()] == [pytest.approx(0.3)] * len(METRICS)
    assert "dram write" not in figures


def test_gpu_metrics_of_several_gpus_are_not_mixed(tmp_path):
    export = Export()
    export.launch(100, ("k", 200, 400))
    for gpu in (0, 1):
        export.sample("SMs Active [Throughput %]", 300, 50, gpu=gpu)
    figures = read("nsys", export.write(tmp_path / "nsys.sqlite"), "baseline").figures
    assert "sm active" not in figures


def test_gpu_metrics_without_a_sample_while_the_gpu_works_give_no_figure(tmp_path):
    export = Export()
    export.launch(100, ("k", 200, 400))
    export.sample("SMs Active [Throughput %]", 150, 90)
    assert "sm active" not in (
        read("nsys", export.write(tmp_path / "nsys.sqlite"), "baseline").figures
    )


def test_a_real_torch_trace_of_the_host_is_read():
    profile = read("torch", SAMPLES / "torch_host.json.gz", "baseline", [])

    assert profile.figures["graph breaks"] == 1
    assert profile.figures["kernels"] == profile.figures["launches"] == 0
    assert 0 < profile.figures["operators"] < 20
    assert any(re.match(r"aten::mm: [\d.]+ .?s on the host, ", note) for note in profile.notes)
    assert not any("aten::sin" in note for note in profile.notes)  # called before the range


@pytest.mark.skipif(
    not (SAMPLES / "torch_cuda.json.gz").exists(), reason="samples/record.py has not recorded it"
)
def test_a_real_torch_trace_of_a_gpu_is_read():
    figures = read("torch", SAMPLES / "torch_cuda.json.gz", "baseline", ["copy_strided"]).figures

    assert figures["kernels"] == 5
    assert figures["copies"] == 1
    assert figures["launches"] == 6
    assert figures["host to device bytes"] == 4 * 2**22
    assert 0 < figures["busy"] < figures["span"] < figures["range"]


def test_evidence_and_profiles_read_the_same_figures_from_a_trace():
    path = SAMPLES / "torch_cuda.json.gz"
    evidence = read_trace(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    figures = read("torch", path, "baseline").figures

    assert (evidence.launches, evidence.kernels, evidence.copies) == (6, 5, 1)
    for name in ("launches", "kernels", "copies", "busy", "span"):
        assert figures[name] == getattr(evidence, name)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (trace(), "no operators and no kernels: the call uses neither PyTorch nor a GPU; --p"),
        (trace(*CALL[:3]), "no operators and no kernels inside the range"),
        ("{", "is not a torch.profiler trace"),
        ("[]", "is not a torch.profiler trace"),
        ('{"traceEvents": null}', "is not a torch.profiler trace"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', r"torch.profiler trace \(KeyError"),
        ("[" * 100_000, "is not a torch.profiler trace"),
    ],
)
def test_a_torch_trace_without_the_call_proves_nothing(tmp_path, text, why):
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(CaptureFailed, match=why):
        read("torch", path, "baseline")


def test_a_damaged_archive_is_no_trace(tmp_path):
    damaged = bytearray(gzip.compress(b"{}" * 1000))
    damaged[12:16] = b"\xff" * 4
    (tmp_path / "a.json.gz").write_bytes(damaged)
    with pytest.raises(CaptureFailed, match=r"is not a torch.profiler trace"):
        read("torch", tmp_path / "a.json.gz", "baseline")


class Frame(list):
    """Stands in for a pandas data frame."""

    def to_dict(self, orient):
        assert orient == "records"
        return list(self)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Write the traces of two ranks and install a fake HTA that returns what the real one does."""
    for rank in (0, 1):
        (tmp_path / f"{rank}.json").write_text(trace(*CALL))
    (tmp_path / "notes.json").write_text("not a rank")

    class TraceAnalysis:
        kinds = Frame(
            [
                {"kernel_type": "COMPUTATION", "sum": 300, "percentage": 75.0},
                {"kernel_type": "COMMUNICATION", "sum": 100, "percentage": 25.0},
            ]
        )

        def __init__(self, traces):
            assert sorted(traces) == [0, 1]
            assert all(Path(path).is_absolute() for path in traces.values())

        def get_temporal_breakdown(self, visualize):
            return Frame(
                {"rank": r, "idle_time_pctg": 10.0 * r, "compute_time(us)": 100 + 100 * r,
                 "compute_time_pctg": 60.0, "non_compute_time_pctg": 40.0 - 10 * r}
                for r in (0, 1)
            )  # fmt: skip

        def get_gpu_kernel_breakdown(self, visualize):
            return self.kinds, None

        def get_comm_comp_overlap(self, visualize):
            return Frame([{"rank": r, "comp_comm_overlap_pctg": 70.0 + 20 * r} for r in (0, 1)])

    monkeypatch.setitem(sys.modules, "hta", types.ModuleType("hta"))
    module = types.ModuleType("hta.trace_analysis")
    module.TraceAnalysis = TraceAnalysis
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", module)
    return tmp_path


def test_hta_analyzes_all_ranks(ranks):
    profile = read("hta", ranks, "optimized", ["gemm"])
    assert profile.figures == pytest.approx(
        {
            "ranks": 2,
            "idle share": 0.05,
            "compute share": 0.6,
            "imbalance": 200 / 150,
            "computation time": 300e-6,
            "communication time": 100e-6,
            "hidden communication": 0.8,
        }
    )
    assert "rank 1: 60.0 % compute, 30.0 % communication and copies, 10.0 % idle" in profile.notes
    notes = " ".join(profile.notes)
    assert "communication-bound: in 35% of the time" in notes
    assert "computes 1.33 times the mean" in notes


def test_ranks_with_equal_work_and_hidden_communication_get_no_advice(ranks, monkeypatch):
    monkeypatch.setattr(parsers, "_MAX_EXPOSED", 0.36)
    monkeypatch.setattr(parsers, "_MAX_IMBALANCE", 1.34)
    assert all(note.startswith("rank ") for note in read("hta", ranks, "optimized").notes)


def test_hta_analyzes_no_overlap_without_communication(ranks, monkeypatch):
    kind = sys.modules["hta.trace_analysis"].TraceAnalysis
    monkeypatch.setattr(kind, "kinds", kind.kinds.__class__(kind.kinds[:1]))
    profile = read("hta", ranks, "optimized")
    assert "hidden communication" not in profile.figures
    assert "communication-bound" not in " ".join(profile.notes)


def test_hta_that_is_missing_or_fails_is_a_sentence(ranks, monkeypatch):
    kind = sys.modules["hta.trace_analysis"].TraceAnalysis
    monkeypatch.delattr(kind, "get_temporal_breakdown")
    with pytest.raises(CaptureFailed, match="HTA could not analyze"):
        read("hta", ranks, "optimized")
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)
    with pytest.raises(CaptureFailed, match=r"install the extra pytest-aiperf\[hta\]"):
        read("hta", ranks, "optimized")
    for path in ranks.glob("[01].json"):
        path.unlink()
    with pytest.raises(CaptureFailed, match="has no traces"):
        read("hta", ranks, "optimized")


def test_a_tree_of_proton_counts_from_the_scope_down():
    profile = read("proton", SAMPLES / "proton.hatchet", "baseline", ["softmax_warp_forward"])

    assert profile.figures["kernels"] >= 2
    assert 0 < profile.figures["duration"] < 1e-3
    assert not any("distribution" in kernel for kernel in profile.kernels)  # before the scope
    assert profile.notes[0].endswith(" µs aiperf")
    assert any(note.startswith("  ") and "softmax" in note for note in profile.notes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[{"frame": {"name": "ROOT"}, "metrics": {}, "children": []}, {}]', "holds no kernels"),
        ("[]", "holds no kernels"),
        ('[{"frame": {}}]', "is not a Proton hatchet tree"),
        ("", "is not a Proton hatchet tree"),
    ],
)
def test_a_tree_of_proton_without_kernels_proves_nothing(tmp_path, text, why):
    path = tmp_path / "baseline.hatchet"
    path.write_text(text)
    with pytest.raises(CaptureFailed, match=why):
        read("proton", path, "baseline")


def test_the_memory_of_a_call_is_read_in_bytes(tmp_path):
    path = tmp_path / "baseline.json"
    content = {"peak": 4096, "allocated": 1024, "allocations": 3, "reserved": 2**21}
    content |= {"inactive split": 512, "version": 1}
    path.write_text(json.dumps(content))
    profile = read("memory", path, "baseline", ["kernels are none of its business"])

    assert dict(profile.figures) == {
        "peak": 4096, "allocated": 1024, "allocations": 3, "reserved": 2**21,
        "inactive split": 512,
    }  # fmt: skip
    assert profile.units["peak"] == "B"
    assert not profile.units["allocations"]
    assert not profile.notes


@pytest.mark.parametrize("split", [2**18, 2**20])
def test_fragmented_memory_has_advice(tmp_path, split):
    path = tmp_path / "baseline.json"
    content = {"peak": 4096, "allocated": 1024, "allocations": 3, "reserved": 2**21}
    path.write_text(json.dumps(content | {"inactive split": split}))
    notes = " ".join(read("memory", path, "baseline").notes)
    assert ("fragmented: 50% of the reserved memory" in notes) == (split == 2**20)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({}, ""),
        ({"allocated": 2**30}, "temporary: 75% of the peak is free again at the end: compute act"),
        ({"peak": 4096, "allocated": 1024}, ""),
        ({"allocations": 6000, "calls": 3}, "2000 allocations per call: fuse small operations"),
        ({"allocations": 2000, "calls": 3}, ""),
        ({"allocations": 6000}, ""),  # a command
    ],
)
def test_memory_that_could_be_saved_has_advice(tmp_path, figures, words):
    path = tmp_path / "baseline.json"
    content = {"peak": 2**32, "allocated": 2**32, "allocations": 3, "reserved": 2**33}
    path.write_text(json.dumps(content | {"inactive split": 0} | figures))
    notes = read("memory", path, "baseline").notes
    assert notes[0].startswith(words) if words else not notes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '{"peak": 0, "allocated": 0, "allocations": 0, "reserved": 0, "inactive split": 0}',
            "has no allocation",
        ),
        ('{"peak": 1}', "not a record of PyTorch's allocator"),
        ("", "not a record of PyTorch's allocator"),
    ],
)
def test_an_empty_record_of_memory_is_refused(tmp_path, text, why):
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(CaptureFailed, match=why):
        read("memory", path, "baseline")


FINDING = """
<record><kind>Precise</kind><level>{level}</level>
  <what><text>Invalid __global__ write of size 4 bytes</text><size>4</size></what>
  <where><func>write_beyond(float *, int)</func><path>faulty.cu</path><line>6</line></where>
</record>"""
SAVED = (
    '<?xml version="1.0" encoding="utf-8"?>\n<ComputeSanitizerOutput>{}</ComputeSanitizerOutput>'
)


def test_a_clean_run_under_the_sanitizer_has_no_findings():
    profile = read("sanitizer", SAMPLES / "ranged.memcheck.xml", "baseline", ["any"])
    assert dict(profile.figures) == {"findings": 0, "memcheck findings": 0}


def test_findings_of_the_sanitizer_are_counted_for_each_tool(tmp_path):
    (tmp_path / "memcheck.xml").write_text(SAVED.format(2 * FINDING.format(level="Error")))
    hints = FINDING.format(level="Info") + FINDING.format(level="Warning")
    (tmp_path / "racecheck.xml").write_text(SAVED.format(hints))
    (tmp_path / "synccheck.xml").write_text(SAVED.format(""))
    profile = read("sanitizer", tmp_path, "optimized")

    assert dict(profile.figures) == {
        "findings": 3, "memcheck findings": 2, "racecheck findings": 1, "synccheck findings": 0,
    }  # fmt: skip
    assert profile.notes[0] == (
        "memcheck: Invalid __global__ write of size 4 bytes in write_beyond(float *, int) "
        "at faulty.cu:6"
    )


def test_a_recorded_finding_names_the_kernel_and_the_line():
    profile = read("sanitizer", SAMPLES / "faulty.memcheck.xml", "optimized")
    assert profile.figures["memcheck findings"] >= 1
    assert "write_beyond" in profile.notes[0]
    assert "faulty.cu:" in profile.notes[0]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "did the tool end early"),
        (SAVED.format(FINDING)[:-9], "did the tool end early"),
        ("<Other/>", "has an unknown element <Other>"),
        (SAVED.format("<hazard/>"), "has an unknown element <hazard>"),
    ],
)
def test_what_the_sanitizer_did_not_finish_is_not_clean(tmp_path, text, why):
    path = tmp_path / "memcheck.xml"
    path.write_text(text)
    with pytest.raises(CaptureFailed, match=why):
        read("sanitizer", path, "baseline")
    with pytest.raises(CaptureFailed, match="no XML file of compute-sanitizer"):
        (tmp_path / "empty").mkdir()
        read("sanitizer", tmp_path / "empty", "baseline")


PERF = """\
# To display the perf.data header info, please use --header/--header-only options.
#
# Samples: 2K of event 'cycles:Pu'
# Event count (approx.): 3412345678
#
{heading}
    {first}61.20%  python   libtorch_cpu.so       [.] at::native::softmax_kernel(float const*)
    {second}20.05%  python   [kernel.kallsyms]     [k] clear_page_erms
     {third}3.00%  pt_main  libc.so.6             [.] __memmove_avx512_unaligned_erms
"""


@pytest.mark.parametrize("inherited", [False, True], ids=["self", "children and self"])
def test_the_hot_spots_of_a_host_claim_are_read(tmp_path, inherited):
    more = ("99.00%   ", "30.00%   ", " 3.00%  ") if inherited else ("", "", "")
    path = tmp_path / "baseline.txt"
    path.write_text(PERF.format(heading="# Overhead", first=more[0], second=more[1], third=more[2]))
    profile = read("perf", path, "baseline")

    assert profile.figures == pytest.approx({"symbols": 3, "samples": 2000, "top symbol": 0.612})
    assert profile.notes[0] == "61.20 % at::native::softmax_kernel(float const*)"
    assert profile.notes[1] == "20.05 % clear_page_erms"


def test_perf_without_samples_proves_nothing(tmp_path):
    (empty := tmp_path / "baseline.txt").write_text("# Samples: 0 of event 'cycles'\n")
    with pytest.raises(CaptureFailed, match="has no symbols"):
        read("perf", empty, "baseline")
    with pytest.raises(CaptureFailed, match="perf did not write"):
        read("perf", tmp_path / "absent.txt", "baseline")


def test_nothing_heavy_is_imported_before_it_is_needed():
    assert not {"torch", "hta", "ncu_report"} & set(vars(parsers)) & set(vars(ncu))
