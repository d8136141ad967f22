"""Record the samples beside this file, on a machine with a GPU and the profilers.

From the repository's root: ``PYTHONPATH=src python tests/plugin/samples/record.py [FOLDER]``. Each
tool runs this file again with the name of one of its functions. If a tool is missing, its samples
stay as they are. $NSYS may be the path of nsys.
"""

import contextlib
import gzip
import json
import os
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from pytest_aiperf.build.nvcc import Nvcc
from pytest_aiperf.machine.nvml import visible
from pytest_aiperf.profilers.ncu import ncu_metrics
from pytest_aiperf.profilers.timeline import RANGE

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "kernels"


def call() -> Callable[[], object]:
    """Make the captured call: slow and fast copies, slow and fast tile rotations, a softmax."""
    import torch

    nvcc = Nvcc(roots=[KERNELS], archs=[visible()[0].arch])
    copy, rotate = nvcc("ch07/copy.cu"), nvcc("ch06/bank_conflicts.cu")
    n = 1 << 22
    host = torch.randn(n).pin_memory()
    a = torch.empty(n, device="cuda")
    out = torch.empty_like(a)

    def run() -> object:
        a.copy_(host, non_blocking=True)
        copy["strided"](a, out, n)
        copy["vector"](a, out, n)
        rotate["conflicted"](a, out, n // 1024, 3)
        rotate["padded"](a, out, n // 1024, 3)
        return torch.softmax(a.view(-1, 1024), -1)

    run()
    torch.cuda.synchronize()
    return run


def ranged() -> None:
    """Run the call inside the profiled range."""
    import torch

    run = call()
    torch.cuda.cudart().cudaProfilerStart()
    marked = torch.cuda.nvtx.range_start(RANGE)
    run()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_end(marked)
    torch.cuda.cudart().cudaProfilerStop()


def faulty() -> None:
    import torch

    out = torch.empty(1 << 22, device="cuda")  # 16 MiB: has an allocation of its own
    Nvcc(roots=[HERE], archs=[visible()[0].arch])("faulty.cu")["beyond"](out, out.numel())
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()


def torch_cuda(folder: Path) -> None:
    import torch

    run = call()

    def run_and_wait() -> None:
        run()
        torch.cuda.synchronize()

    traced(run_and_wait, folder / "torch_cuda.json.gz")


def torch_host(folder: Path) -> None:
    """Record the sample that needs no GPU: ``record.py torch_host FOLDER``."""
    import torch

    a = torch.randn(64, 64)
    traced(lambda: torch.softmax(a @ a, -1), folder / "torch_host.json.gz")


def traced(run: Callable[[], object], to: Path) -> None:
    import torch
    from torch.profiler import profile, record_function

    with profile() as profiler:
        torch.ones(3).sin()  # before the range: must not be counted
        with record_function(RANGE):
            run()
        profiler.add_metadata_json("graph_breaks", "1")
    with tempfile.TemporaryDirectory() as scratch:
        profiler.export_chrome_trace(f"{scratch}/trace.json")
        trace = json.loads(Path(scratch, "trace.json").read_bytes(), strict=False)
    trace["host_name"] = ""  # private: not published
    to.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))


def proton(folder: Path) -> None:
    import torch
    import triton.profiler

    run = call()
    triton.profiler.start(str(folder / "proton"))
    with triton.profiler.scope(RANGE):
        run()
    torch.cuda.synchronize()
    triton.profiler.finalize()


def blanked(report: bytes) -> bytes:
    """Zero the device code of an ncu report, which is megabytes, and blank private paths."""
    content, at = bytearray(report), 0
    while (at := content.find(b"\x7fELF", at)) >= 0:
        (headers,) = struct.unpack_from("<Q", content, at + 0x28)
        size, count = struct.unpack_from("<HH", content, at + 0x3A)
        end = at + headers + size * count
        content[at:end] = bytes(end - at)
    return re.sub(rb"/(?:root|home|tmp|work)/[ -~]*", lambda m: b" " * len(m[0]), bytes(content))


def shrink(database: Path) -> None:
    """Remove what no parser reads from an nsys export, such as the machine's environment."""
    with contextlib.closing(sqlite3.connect(database)) as db:
        tables = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            if not table.startswith("CUPTI_") and table not in ("StringIds", "NVTX_EVENTS"):
                db.execute(f'DROP TABLE "{table}"')
        db.execute(
            "DELETE FROM StringIds WHERE id NOT IN ("
            " SELECT nameId FROM CUPTI_ACTIVITY_KIND_RUNTIME UNION"
            " SELECT demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL UNION"
            " SELECT textId FROM NVTX_EVENTS WHERE textId IS NOT NULL)"
        )
        db.commit()
        db.execute("VACUUM")


def run_tool(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=False)


def record(folder: Path, scratch: Path) -> None:
    this = (sys.executable, __file__)
    if ncu := shutil.which("ncu"):
        metrics = ",".join(ncu_metrics(visible()[0].arch))
        scope = ("--nvtx", "--nvtx-include", RANGE, "--clock-control", "none")
        options = (*scope, "--metrics", metrics, "-o", scratch / "ncu")
        run_tool(ncu, *options, *this, "ranged")
        report = blanked((scratch / "ncu.ncu-rep").read_bytes())
        (folder / "ncu.ncu-rep.gz").write_bytes(gzip.compress(report, mtime=0))
    if nsys := os.environ.get("NSYS") or shutil.which("nsys"):
        only = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--sample=none")
        options = ("--trace=cuda,nvtx", *only, "-o", scratch / "nsys")
        run_tool(nsys, "profile", *options, *this, "ranged")
        database = folder / "nsys.sqlite"
        files = (f"--output={database}", scratch / "nsys.nsys-rep")
        run_tool(nsys, "export", "--type=sqlite", "--force-overwrite=true", *files)
        shrink(database)
    if sanitizer := shutil.which("compute-sanitizer"):
        # compile here, so that the sanitizer only loads the library
        Nvcc(roots=[HERE], archs=[visible()[0].arch], load=False)("faulty.cu")
        for what in ("ranged", "faulty"):
            saved = folder / f"{what}.memcheck.xml"
            run_tool(sanitizer, "--tool", "memcheck", "--xml", "--save", saved, *this, what)
            # folders are private
            saved.write_text(re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-]+</)", "", saved.read_text()))
    run_tool(*this, "torch_cuda", folder)
    run_tool(*this, "proton", folder)
    missing = [tool for tool, path in (("ncu", ncu), ("nsys", nsys)) if not path]
    print("not found, samples left as they are:", *missing or ["none"])


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or [str(HERE)]
    if what in ("ranged", "faulty"):
        globals()[what]()
    elif what in ("torch_cuda", "torch_host", "proton"):
        globals()[what](Path(rest[0]))
    else:
        Path(what).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch_:
            record(Path(what).absolute(), Path(scratch_))
