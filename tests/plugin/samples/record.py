"""Records the samples beside this file on a machine with a GPU and the profilers.

From the repository's root: ``PYTHONPATH=src python tests/plugin/samples/record.py [FOLDER]``. Each
tool runs this file again with the name of what it is to do. A tool that is missing is told of and
its samples are left as they are; $NSYS may say where nsys is.
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
from pytest_aiperf.profilers.ncu import NCU_SECTIONS, ncu_metrics
from pytest_aiperf.profilers.timeline import RANGE

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "kernels"


def call() -> Callable[[], object]:
    """Make the call that is captured: copies and tile turns, each badly and well, and a softmax."""
    import torch

    nvcc = Nvcc(roots=[KERNELS], archs=[visible()[0].arch])
    copy, turn = nvcc("ch07/copy.cu"), nvcc("ch06/bank_conflicts.cu")
    n = 1 << 22
    host = torch.randn(n).pin_memory()
    a = torch.empty(n, device="cuda")
    out = torch.empty_like(a)

    def run() -> object:
        a.copy_(host, non_blocking=True)
        copy["strided"](a, out, n)
        copy["vector"](a, out, n)
        turn["conflicted"](a, out, n // 1024, 3)
        turn["padded"](a, out, n // 1024, 3)
        return torch.softmax(a.view(-1, 1024), -1)

    run()
    torch.cuda.synchronize()
    return run


def ranged() -> None:
    import torch

    run = call()
    torch.cuda.cudart().cudaProfilerStart()
    with torch.cuda.nvtx.range(RANGE):
        run()
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def faulty() -> None:
    import torch

    out = torch.empty(1 << 22, device="cuda")  # an allocation of its own, with nothing behind it
    Nvcc(roots=[HERE], archs=[visible()[0].arch])("faulty.cu")["beyond"](out, out.numel())
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()


def torch_cuda(folder: Path) -> None:
    import torch

    run = call()

    def finished() -> None:
        run()
        torch.cuda.synchronize()

    traced(finished, folder / "torch_cuda.json.gz")


def torch_host(folder: Path) -> None:
    """Trace what needs no GPU (by itself: ``record.py torch_host FOLDER``)."""
    import torch

    a = torch.randn(64, 64)
    traced(lambda: torch.softmax(a @ a, -1), folder / "torch_host.json.gz")


def traced(run: Callable[[], object], to: Path) -> None:
    import torch
    from torch.profiler import profile, record_function

    with profile() as profiler:
        torch.ones(3).sin()  # outside of the range
        with record_function(RANGE):
            run()
        profiler.add_metadata_json("graph_breaks", "1")
    with tempfile.TemporaryDirectory() as scratch:
        profiler.export_chrome_trace(f"{scratch}/trace.json")
        trace = json.loads(Path(scratch, "trace.json").read_bytes(), strict=False)
    trace["host_name"] = ""  # nobody's business
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
    """Zero what nothing reads: the device code of an ncu report, megabytes, and people's paths."""
    blank, at = bytearray(report), 0
    while (at := blank.find(b"\x7fELF", at)) >= 0:
        (headers,) = struct.unpack_from("<Q", blank, at + 0x28)
        size, count = struct.unpack_from("<HH", blank, at + 0x3A)
        end = at + headers + size * count
        blank[at:end] = bytes(end - at)
    return re.sub(rb"/(?:root|home|tmp|work)/[ -~]*", lambda m: b" " * len(m[0]), bytes(blank))


def shrink(database: Path) -> None:
    """Leave of an nsys export what is read: the machine's environment and processes go."""
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


def under(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=False)


def record(folder: Path, scratch: Path) -> None:
    me = (sys.executable, __file__)
    if ncu := shutil.which("ncu"):
        asked = ",".join(ncu_metrics(visible()[0].arch))
        scope = ("--nvtx", "--nvtx-include", f"{RANGE}/", "--clock-control", "none")
        sections = [part for section in NCU_SECTIONS for part in ("--section", section)]
        under(ncu, *scope, *sections, "--metrics", asked, "-o", scratch / "ncu", *me, "ranged")
        report = blanked((scratch / "ncu.ncu-rep").read_bytes())
        (folder / "ncu.ncu-rep.gz").write_bytes(gzip.compress(report, mtime=0))
    if nsys := os.environ.get("NSYS") or shutil.which("nsys"):
        only = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--sample=none")
        under(nsys, "profile", "--trace=cuda,nvtx", *only, "-o", scratch / "nsys", *me, "ranged")
        database = folder / "nsys.sqlite"
        made = ("--force-overwrite=true", f"--output={database}", scratch / "nsys.nsys-rep")
        under(nsys, "export", "--type=sqlite", *made)
        shrink(database)
    if sanitizer := shutil.which("compute-sanitizer"):
        Nvcc(roots=[HERE], archs=[visible()[0].arch], load=False)("faulty.cu")  # before it looks on
        for what in ("ranged", "faulty"):
            saved = folder / f"{what}.memcheck.xml"
            under(sanitizer, "--tool", "memcheck", "--xml", "--save", saved, *me, what)
            # whose folders they are is nobody's business
            saved.write_text(re.sub(r"(?:/[\w.+-]+)+/(?=[\w.+-]+</)", "", saved.read_text()))
    under(*me, "torch_cuda", folder)
    under(*me, "proton", folder)
    missing = [tool for tool, there in (("ncu", ncu), ("nsys", nsys)) if not there]
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
