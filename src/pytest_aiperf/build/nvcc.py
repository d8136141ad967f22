"""A .cu file to a shared library, kept in a cache that is keyed by content."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_aiperf.errors import AiperfError, BuildError, UsageError
from pytest_aiperf.machine.file_lock import locked
from pytest_aiperf.machine.nvml import nvcc_arch
from pytest_aiperf.model import KernelRecord

from .sass import KEPT, demangled, kept, packaged, read

if TYPE_CHECKING:
    from .launcher import Kernels

DEADLINE: Final = 300.0
"""Seconds after which a compilation is killed."""

# What begins like one of a build's own flags gives way to it.
_DEFAULTS: Final = {"-O": "-O3", "-std": "-std=c++17", "-lineinfo": "-lineinfo"}
# Anything else could run a program, or read and write files of its author's choice.
_ALLOWED: Final = (
    *("-O[0-3]", r"-std=c\+\+(14|17|20)", r"-D[A-Za-z_]\w*(=[\w.+-]*)?", "-lineinfo"),
    *("--use_fast_math", r"-maxrregcount=\d+", "-rdc=true", "-l(cuda|cublas|cublasLt|cudadevrt)"),
    *("--expt-relaxed-constexpr", "--extended-lambda"),
)
_LIBRARY: Final = "library.so"
_RECORD: Final = "record.json"


@dataclass(frozen=True, slots=True)
class Build:
    """A source as a shared library for one architecture, and what the compiler said."""

    path: Path
    source: Path
    arch: str
    kernels: tuple[KernelRecord, ...]
    log: str


@functools.cache
def find_nvcc() -> tuple[str, str]:
    """Find nvcc, and what it says of its version.

    The first of $CUDACXX, $CUDA_HOME, $CUDA_PATH, PATH, pip packages and conda that has it.
    """
    chosen = os.environ.get("CUDACXX")
    homes = [f"{os.environ[v]}/bin" for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    path = os.pathsep.join([*homes, os.environ.get("PATH", os.defpath)])
    nvcc = shutil.which(chosen or "nvcc", path=path)
    if nvcc is None and chosen:
        raise BuildError(f"CUDACXX is {chosen!r}, which is not an executable: unset or mend it")
    if nvcc is None:
        nvcc = packaged("nvcc")
    if nvcc is None:
        raise BuildError(
            "no nvcc: pip install 'pytest-aiperf[toolchain]', or put a CUDA toolkit on PATH"
        )
    asked = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    return nvcc, asked.stdout


def build(
    source: Path | str,
    arch: str,
    *,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
    cache: Path | None = None,
    stop: threading.Event | None = None,
) -> Build:
    """Compile ``source`` for ``arch`` ("sm90", or nvcc's own "sm_100f"), unless the cache has it.

    Of several threads and processes that ask, one compiles; ``stop`` ends it from another thread.
    """
    source = Path(source).absolute()  # so that no file's name can be read as a flag
    if not source.is_file():
        raise UsageError(f"there is no {shown(source)} to build")
    target = _target(arch)
    folders = [Path(folder).absolute() for folder in include]
    cache = cache or default_cache()
    try:
        nvcc = _nvcc(target, flags)
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        while (log := _log(entry := cache / _key(nvcc, reached(source, folders)))) is None:
            with _alone(entry) as scratch:
                if _log(entry) is not None:
                    continue  # another process or thread was faster
                includes = [f"-I{folder}" for folder in folders]
                command = [*nvcc, *includes, "-o", _LIBRARY, str(source)]
                what = f"{shown(source)} for {target}"
                _compile(command, what, scratch, stop or threading.Event())
                if entry.name != _key(nvcc, reached(source, folders)):
                    continue  # edited while it compiled: what came out belongs to no one content
                shutil.rmtree(entry, ignore_errors=True)  # it may be there, torn
                scratch.rename(entry)  # atomic: nobody sees half an entry
    except OSError as error:
        raise BuildError(
            f"cannot build {shown(source)} in {cache} (PYTEST_AIPERF_CACHE moves it): {error}"
        ) from error
    return Build(entry / _LIBRARY, source, target, _kernels(log, source, target), log)


def sass(made: Build) -> dict[str, dict[str, int]]:
    """Count the opcodes of each kernel of a build, by demangled name; kept beside the library."""
    functions = [kernel.function for kernel in made.kernels]
    codes = kept(made.path.with_name(KEPT), lambda: read(made.path, functions, find_nvcc()[0]))
    return {name: code.opcodes for name, code in codes.items()}


def default_cache() -> Path:
    """Where builds are kept: $PYTEST_AIPERF_CACHE, or the user's own cache folder."""
    if chosen := os.environ.get("PYTEST_AIPERF_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-aiperf"


def reached(source: Path, include: Sequence[Path] = ()) -> dict[Path, bytes]:
    """Read a source and, recursively, every header of ours that it may include, in a fixed order.

    A header that lies neither beside its includer nor in ``include`` is the compiler's.
    """
    found: dict[Path, bytes] = {}
    waiting = [source]
    while waiting:
        file = waiting.pop(0)
        if file in found:
            continue
        found[file] = file.read_bytes()
        for name in re.findall(rb'(?m)^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)', found[file]):
            headers = [(d / os.fsdecode(name)).resolve() for d in (file.parent, *include)]
            waiting += [header for header in headers if header.is_file()]
    return found


def _target(arch: str) -> str:
    if not re.fullmatch(r"sm\d{2,3}|sm_\d{2,3}[af]?", arch):
        raise UsageError(f"{arch!r} is no architecture: sm90, sm100 or nvcc's own sm_100f are")
    return arch if "_" in arch else nvcc_arch(arch)


def _nvcc(target: str, flags: Sequence[str]) -> list[str]:
    """Give the compiler and its options: all but the files."""
    if isinstance(flags, str):
        raise UsageError(f"flags= takes a list: [{flags!r}]")
    for flag in flags:
        if not re.fullmatch("|".join(_ALLOWED), flag, re.ASCII):
            raise UsageError(f"nvcc flag {flag!r} is not allowed (allowed: {', '.join(_ALLOWED)})")
    nvcc, _ = find_nvcc()
    given = tuple(flags)
    kept = [d for start, d in _DEFAULTS.items() if not any(f.startswith(start) for f in given)]
    # a toolkit's nvcc knows where its libraries are
    pip = [f"-L{Path(nvcc).parents[1] / 'lib'}"] if "site-packages" in Path(nvcc).parts else []
    return [
        *(nvcc, "-shared", "-Xcompiler", "-fPIC", "-cudart=static", "--ptxas-options=-v"),
        *(f"-gencode=arch=compute_{target[3:]},code={target}", *kept, *given, *pip),
    ]


def _key(nvcc: Sequence[str], files: Mapping[Path, bytes]) -> str:
    """Hash all that decides what comes out of the compiler; where a file lies does not."""
    names = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")  # nvcc takes flags from these
    ambient = [os.environ.get(name, "") for name in names]
    digest = hashlib.sha256(json.dumps([nvcc, find_nvcc()[1], ambient]).encode())
    for content in files.values():
        digest.update(b"%d:" % len(content) + content)
    return digest.hexdigest()[:32]


def _log(entry: Path) -> str | None:
    """Read what the compiler said of an entry; None when it is absent or torn, to be built anew."""
    try:
        record = json.loads((entry / _RECORD).read_text(encoding="utf-8"))
        whole = (entry / _LIBRARY).stat().st_size == record["size"]
        return str(record["log"]) if whole else None
    except (OSError, ValueError):
        return None


@contextmanager
def _alone(entry: Path) -> Iterator[Path]:
    """Wait until nobody else builds an entry; give a folder to build it in."""
    scratch = entry.with_suffix(".new")
    with locked(entry.with_suffix(".lock")):
        shutil.rmtree(scratch, ignore_errors=True)  # a killed run left it
        scratch.mkdir(mode=0o700)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _compile(command: Sequence[str], what: str, room: Path, stop: threading.Event) -> None:
    """Run nvcc; leave in ``room`` the library and its record, or raise."""
    status = _run(command, room, stop)
    log = demangled((room / "log").read_text(encoding="utf-8", errors="replace"))
    shown = shlex.join(command)
    if status is None:
        raise BuildError(f"nvcc did not build {what} within {DEADLINE:g} s\n{shown}")
    if status != 0 or not (room / _LIBRARY).is_file():
        lines = log.strip().splitlines()
        error = r"(?i)\b(error|fatal)\s*:|^nvcc fatal|undefined reference|cannot find"
        why = [line for line in lines if re.search(error, line)][:5] or lines[-5:]
        if status < 0 or not why:
            why.append(f"nvcc ended with status {status}")
        raise BuildError("\n".join([f"nvcc could not build {what}", *why, shown]))
    record = {"size": (room / _LIBRARY).stat().st_size, "log": log}  # the size tells a torn library
    (room / _RECORD).write_text(json.dumps(record), encoding="utf-8")


def _run(command: Sequence[str], room: Path, stop: threading.Event) -> int | None:
    """Run to the exit status; None when the deadline came first. Nothing outlives this call."""
    with (room / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=room,
            env={**os.environ, "TMPDIR": str(room)},  # a killed nvcc leaves nothing elsewhere
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until = time.monotonic() + DEADLINE
    try:
        while (status := process.poll()) is None and time.monotonic() < until:
            if stop.wait(0.02):
                raise BuildError("the build was stopped")
        return status
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # nvcc's own children too
            process.wait()


def _kernels(log: str, source: Path, target: str) -> tuple[KernelRecord, ...]:
    entry = r"(?s)Compiling entry function '([^\n]+)' for '[^\n]+?'(.*?Used (\d+) registers[^\n]*)"
    return tuple(
        KernelRecord(
            source=shown(source),
            arch=target,
            function=name,
            registers=int(registers),
            spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", said))),
            shared_bytes=sum(map(int, re.findall(r"(\d+) bytes smem", said))),
        )
        for name, said, registers in re.findall(entry, log)
    )


def shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


@dataclass(frozen=True, slots=True)
class Want:
    """One build that a session will need."""

    source: Path
    arch: str
    flags: Sequence[str] = ()


def build_all(
    wants: Sequence[Want],
    *,
    include: Sequence[Path] = (),
    progress: Callable[[int, int, Build | AiperfError], None] = lambda *_: None,
) -> list[Build | AiperfError]:
    """Build in parallel; give back, in the order of ``wants``, each build or why there is none.

    ``progress(done, total, latest)`` is called in the caller's own thread.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    stop = threading.Event()
    make = functools.partial(build, include=include, stop=stop)

    def one(want: Want) -> Build | AiperfError:
        try:
            return make(want.source, want.arch, flags=want.flags)
        except AiperfError as error:
            return error  # it is told by the claim that asks for this build, and costs no other

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = [pool.submit(one, want) for want in wants]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                progress(done, len(wants), future.result())
        except BaseException:  # Ctrl-C: no compiler may outlive the session
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def nvcc_names(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """List what a test module builds as (file, flags): its ``nvcc("...")`` calls with literals."""
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(ast.Name("nvcc"), [ast.Constant(str(name)), *rest], keywords):
                flags = [*rest, *(keyword.value for keyword in keywords)] or [ast.Tuple([])]
            case _:
                continue
        try:
            found[name, tuple(map(str, ast.literal_eval(flags[0])))] = None
        except (TypeError, ValueError):
            continue  # only known when the test runs: it is built then
    return list(found)


@dataclass(slots=True)
class Nvcc:
    """Builds a .cu file and gives its launchers; the value of the ``nvcc`` fixture.

    With ``load`` false nothing is loaded and the launchers cannot be called; with it, ``archs``
    is the architecture of the GPU in use. ``used`` are the builds made so far.
    """

    roots: Sequence[Path]
    archs: Sequence[str]
    include: Sequence[Path] = ()
    load: bool = True
    used: list[Build] = field(default_factory=list)

    def __call__(self, name: str, flags: Sequence[str] = ()) -> Kernels:
        """Build the file ``name`` of the first root that has it, for every architecture."""
        from .launcher import Kernels  # with ctypes, which no other pytest run should load

        source = find_source(name, self.roots)
        if source is None:
            tried = ", ".join(shown(Path(root).absolute()) for root in self.roots)
            raise UsageError(
                f"there is no {name} in {tried or 'any folder: no kernel folder is known'}"
            )
        wants = [Want(source, arch, flags) for arch in self.archs]
        builds = []
        for made in build_all(wants, include=self.include):
            if not isinstance(made, Build):
                raise made
            builds.append(made)
        self.used += (b for b in builds if b not in self.used)
        text = source.read_text(encoding="utf-8", errors="replace")
        return Kernels(shown(source.absolute()), text, builds[0].path if self.load else None)

    @property
    def sources(self) -> list[Path]:
        """The files that ``used`` was built from, headers included."""
        folders = [Path(folder).absolute() for folder in self.include]
        return list({f: None for b in self.used for f in reached(b.source, folders)})


def find_source(name: str, roots: Sequence[Path]) -> Path | None:
    """Find a .cu file in the first root that has it."""
    return next((root / name for root in roots if (root / name).is_file()), None)
