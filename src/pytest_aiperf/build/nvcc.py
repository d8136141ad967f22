"""Compile .cu files to shared libraries, and keep these in a cache keyed by content."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pytest_aiperf.errors import AiperfError, BuildError, UsageError
from pytest_aiperf.machine.cache_folder import create_tagged
from pytest_aiperf.machine.file_lock import locked
from pytest_aiperf.machine.nvml import nvcc_arch
from pytest_aiperf.machine.process_group import run_in_group
from pytest_aiperf.model import KernelRecord

from .sass import cached, demangle, disassemble, find_in_packages

if TYPE_CHECKING:
    from .launcher import Kernels

DEADLINE_S: Final = 300.0  #: Time limit of a compilation: a hung nvcc must not block a session.
_DEFAULTS: Final = {"-O": "-O3", "-std": "-std=c++17", "-lineinfo": "-lineinfo"}
"""Default flags by prefix; a flag of the build with the same prefix replaces the default."""
_ALLOWED: Final = {
    "-O[0-3]": "-O0 to -O3",
    r"-std=c\+\+(14|17|20)": "-std=c++14, c++17 or c++20",
    r"-D[A-Za-z_]\w*(=[\w.+-]*)?": "-DNAME or -DNAME=VALUE",
    "-I.+": "-IFOLDER",
    "--?use_fast_math": "--use_fast_math",
    r"-maxrregcount=\d+": "-maxrregcount=N",
    "-lineinfo": "-lineinfo",
    "-rdc=true": "-rdc=true",
    "-l(cuda|cublas|cublasLt|cudadevrt)": "-lcuda, -lcublas, -lcublasLt, -lcudadevrt",
    "--expt-relaxed-constexpr": "--expt-relaxed-constexpr",
    "--extended-lambda": "--extended-lambda",
}
"""Patterns of allowed flags, and how messages show them. Other flags could run programs or write
files. The architecture comes from the GPU in use or from the claim's markers."""
_LIBRARY: Final = "library.so"
_RECORD: Final = "record.json"


@dataclass(frozen=True, slots=True)
class Build:
    """A source compiled for one architecture."""

    path: Path  #: The shared library.
    source: Path  #: The .cu file.
    arch: str  #: The architecture as nvcc names it: "sm_90a".
    include: tuple[Path, ...]  #: Folders of headers, without those of installed packages.
    kernels: tuple[KernelRecord, ...]  #: The resources of each kernel, as ptxas reports them.
    log: str  #: The output of the compiler.


@functools.cache
def find_nvcc() -> tuple[str, str]:
    """Return the path of nvcc and the output of ``nvcc --version``.

    It is looked up in this order: $CUDACXX, $CUDA_HOME, $CUDA_PATH, PATH, pip packages, conda.
    """
    cudacxx = os.environ.get("CUDACXX")
    homes = [f"{os.environ[v]}/bin" for v in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(v)]
    path = os.pathsep.join([*homes, os.environ.get("PATH", os.defpath)])
    nvcc = shutil.which(cudacxx or "nvcc", path=path)
    if nvcc is None and cudacxx:
        raise BuildError(f"CUDACXX is {cudacxx!r}, which is not an executable: unset or correct it")
    nvcc = nvcc or find_in_packages("nvcc")
    if nvcc is None:
        raise BuildError(
            "no nvcc: install the extra pytest-aiperf[toolchain], or put a CUDA toolkit on PATH"
        )
    try:
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:  # for example, it is for another processor
        raise BuildError(f"{nvcc} does not start: {error}") from None
    return nvcc, version.stdout


def build(
    source: Path | str,
    arch: str,
    *,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
    cache: Path | None = None,
    stop: threading.Event | None = None,
) -> Build:
    """Compile ``source`` for ``arch`` ("sm90", or nvcc's own "sm_100f") unless it is in the cache.

    Threads and processes may build the same source at once: one compiles, the others wait.
    Another thread ends the compilation by setting ``stop``.
    """
    source = Path(source).absolute()  # absolute: a name such as -x.cu would be read as a flag
    if not source.is_file():
        raise UsageError(f"there is no {display_path(source)} to build")
    target = _target(arch)
    cache = cache or default_cache()
    folders, packages, flags = _includes(source, flags)
    own = (*folders, *include)
    include = (*own, *packages)
    try:
        nvcc = _nvcc(target, flags)
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        while (log := _log(entry := cache / _key(nvcc, read_sources(source, include)))) is None:
            with _scratch_folder(entry) as scratch:
                if _log(entry) is not None:
                    continue  # another process or thread has built it
                headers = [f"-I{folder}" for folder in include]
                command = [*nvcc, *headers, "-o", _LIBRARY, str(source)]
                name = f"{display_path(source)} for {target}"
                _compile(command, name, scratch, stop or threading.Event())
                if entry.name != _key(nvcc, read_sources(source, include)):
                    continue  # the source was edited meanwhile: the library may match neither text
                shutil.rmtree(entry, ignore_errors=True)  # an incomplete one would block rename()
                scratch.rename(entry)  # atomic: readers see no incomplete entry
    except OSError as error:
        raise BuildError(
            f"cannot build {display_path(source)} in {cache} (PYTEST_AIPERF_CACHE moves it): "
            f"{error}"
        ) from error
    return Build(entry / _LIBRARY, source, target, own, _kernels(log, source, target), log)


def opcode_counts(built: Build) -> dict[str, dict[str, int]]:
    """Count the SASS opcodes of each kernel of a build, by demangled name."""
    functions = [kernel.function for kernel in built.kernels]
    codes = cached(built.path.parent, lambda: disassemble(built.path, functions, find_nvcc()[0]))
    return {name: code.opcodes for name, code in codes.items()}


def default_cache() -> Path:
    """Return the build cache: $PYTEST_AIPERF_CACHE, or a folder in the user's cache."""
    if folder := os.environ.get("PYTEST_AIPERF_CACHE"):
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-aiperf"


def read_sources(source: Path, include: Sequence[Path] = ()) -> dict[Path, bytes]:
    """Read a source and, recursively, the headers that it may include, in a fixed order.

    Headers that lie neither beside the including file nor in ``include`` belong to the compiler
    and are left out.
    """
    contents: dict[Path, bytes] = {}
    queue = [source]
    while queue:
        file = queue.pop(0)
        if file in contents:
            continue
        contents[file] = file.read_bytes()
        for name in re.findall(rb'(?m)^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)', contents[file]):
            headers = [(d / os.fsdecode(name)).resolve() for d in (file.parent, *include)]
            queue += [header for header in headers if header.is_file()]
    return contents


def _target(arch: str) -> str:
    if not re.fullmatch(r"sm\d{2,3}|sm_\d{2,3}[af]?", arch):
        raise UsageError(f"{arch!r} is not an architecture: use sm90, sm100 or nvcc's own sm_100f")
    return arch if "_" in arch else nvcc_arch(arch)


def _includes(source: Path, flags: Sequence[str]) -> tuple[list[Path], list[Path], Sequence[str]]:
    """Split flags into folders of headers, those of installed packages, and other flags.

    -IFOLDER is relative to the source's folder or to the current one. If there is none, it is the
    name of a package's headers, such as cutlass.
    """
    if isinstance(flags, str):
        raise UsageError(
            f'nvcc() takes flags as a list: nvcc("{source.name}", ["{flags}"]); a launcher is an '
            f'item of what it returns: nvcc("{source.name}")["NAME"]'
        )
    folders, packages = [], []
    for name in [flag[2:] for flag in flags if flag.startswith("-I")]:
        if folder := next((f for f in (source.parent / name, Path(name)) if f.is_dir()), None):
            folders.append(folder.resolve())
        elif found := _package_headers(name):
            packages.append(Path(found))
        else:
            raise UsageError(
                f"nvcc flag '-I{name}': there is no such folder in {display_path(source.parent)} "
                "or in the current folder, and no installed package has headers of that name"
            )
    return folders, packages, [flag for flag in flags if not flag.startswith("-I")]


def _package_headers(name: str) -> str | None:
    from cuda import pathfinder

    try:
        found: str | None = pathfinder.find_nvidia_header_directory(name)
    except RuntimeError:  # pathfinder knows no such headers
        return None
    return found


def _nvcc(target: str, flags: Sequence[str]) -> list[str]:
    """Return the path of nvcc and its options, without file names."""
    for flag in flags:
        if not re.fullmatch("|".join(_ALLOWED), flag, re.ASCII):
            near = get_close_matches(flag, _ALLOWED.values(), 1, 0.5)
            hint = f"use {near[0]}" if near else f"allowed are {', '.join(_ALLOWED.values())}"
            raise UsageError(f"nvcc flag {flag!r} is not allowed; {hint}")
    nvcc, _ = find_nvcc()
    defaults = [d for start, d in _DEFAULTS.items() if not any(f.startswith(start) for f in flags)]
    # unlike the nvcc of a toolkit, that of a pip package does not find its libraries
    pip = [f"-L{Path(nvcc).parents[1] / 'lib'}"] if "site-packages" in Path(nvcc).parts else []
    return [
        *(nvcc, "-shared", "-Xcompiler", "-fPIC", "-cudart=static", "--ptxas-options=-v"),
        *(f"-gencode=arch=compute_{target[3:]},code={target}", *defaults, *flags, *pip),
    ]


def _key(nvcc: Sequence[str], files: Mapping[Path, bytes]) -> str:
    """Hash all that determines the library: nvcc, its flags and the contents of ``files``."""
    names = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")  # nvcc reads flags from these
    environment = [os.environ.get(name, "") for name in names]
    digest = hashlib.sha256(json.dumps([nvcc, find_nvcc()[1], environment]).encode())
    for content in files.values():
        digest.update(b"%d:" % len(content) + content)
    return digest.hexdigest()[:32]


def _log(entry: Path) -> str | None:
    """Read the compiler's log of a cache entry; None if the entry is absent or incomplete."""
    try:
        record = json.loads((entry / _RECORD).read_text(encoding="utf-8"))
        complete = (entry / _LIBRARY).stat().st_size == record["size"]
        return str(record["log"]) if complete else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _scratch_folder(entry: Path) -> Iterator[Path]:
    """Lock a cache entry against other builders and create a folder to build it in."""
    scratch, locks = entry.with_suffix(".new"), entry.parent / "locks"
    create_tagged(locks, 0o700)
    with locked(locks / entry.name):
        shutil.rmtree(scratch, ignore_errors=True)  # a killed process may have left it
        create_tagged(scratch, 0o700)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _compile(command: Sequence[str], name: str, folder: Path, stop: threading.Event) -> None:
    """Run nvcc; write the library and its record to ``folder``, or raise BuildError."""
    # a killed nvcc leaves temporary files, which are removed with the folder
    environment = {**os.environ, "TMPDIR": str(folder)}
    output = folder / "log"
    status = run_in_group(command, output, DEADLINE_S, cwd=folder, env=environment, stop=stop)
    if stop.is_set():
        raise BuildError("the build was stopped")
    log = demangle(output.read_text(encoding="utf-8", errors="replace"))
    command_line = shlex.join(command)
    if status is None:
        raise BuildError(f"nvcc did not build {name} within {DEADLINE_S:g} s\n{command_line}")
    if status != 0 or not (folder / _LIBRARY).is_file():
        lines = log.strip().splitlines()
        error = r"(?i)\b(error|fatal)\s*:|^nvcc fatal|undefined reference|cannot find"
        causes = [line for line in lines if re.search(error, line)][:5] or lines[-5:]
        if status < 0 or not causes:
            causes.append(f"nvcc ended with status {status}")
        raise BuildError("\n".join([f"nvcc could not build {name}", *causes, command_line]))
    record = {"size": (folder / _LIBRARY).stat().st_size, "log": log}
    (folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")


def _kernels(log: str, source: Path, target: str) -> tuple[KernelRecord, ...]:
    entry = r"(?s)Compiling entry function '([^\n]+)' for '[^\n]+?'(.*?Used (\d+) registers[^\n]*)"
    return tuple(
        KernelRecord(
            source=display_path(source),
            arch=target,
            function=name,
            registers=int(registers),
            spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", usage))),
            shared_bytes=sum(map(int, re.findall(r"(\d+) bytes smem", usage))),
        )
        for name, usage, registers in re.findall(entry, log)
    )


def display_path(path: Path) -> str:
    """Return a path as text, relative to the current folder if it lies in there."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


class BuildRequest(NamedTuple):
    """One build that a session needs."""

    source: Path
    arch: str
    flags: Sequence[str] = ()


def build_parallel(
    requests: Sequence[BuildRequest],
    *,
    include: Sequence[Path] = (),
    progress: Callable[[int, int, Build | AiperfError], None] = lambda *_: None,
) -> list[Build | AiperfError]:
    """Build in one thread per core; return, in order, each build or the error that prevented it.

    The calling thread calls ``progress(done, total, latest)`` after each build.
    """
    from concurrent.futures import ThreadPoolExecutor, as_completed

    stop = threading.Event()

    def attempt(source: Path, arch: str, flags: Sequence[str]) -> Build | AiperfError:
        try:
            return build(source, arch, include=include, flags=flags, stop=stop)
        except AiperfError as error:
            return error  # raised later by the claim that needs this build

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = [pool.submit(attempt, *request) for request in requests]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                progress(done, len(requests), future.result())
        except BaseException:  # such as Ctrl-C: no compiler may outlive the session
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def nvcc_calls(text: str | bytes) -> list[tuple[str, tuple[str, ...]]]:
    """List the ``nvcc("...")`` calls of a test module that have literal arguments.

    Each is a pair of file name and flags. Python decodes bytes as the module's coding line says.
    """
    calls: dict[tuple[str, tuple[str, ...]], None] = {}
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(ast.Name("nvcc"), [ast.Constant(str(name)), *rest], keywords):
                flags = [*rest, *(keyword.value for keyword in keywords)] or [ast.Tuple([])]
                # raised for computed arguments: that file is built only when the test runs
                with suppress(TypeError, ValueError):
                    calls[name, tuple(map(str, ast.literal_eval(flags[0])))] = None
    return list(calls)


@dataclass(slots=True)
class Nvcc:
    """Build CUDA C++: the ``nvcc`` fixture."""

    roots: Sequence[Path]  #: Folders of .cu files, searched in order.
    archs: Sequence[str]  #: Architectures to build for; with ``load``, only that of the GPU in use.
    include: Sequence[Path] = ()  #: Folders of headers, as absolute paths.
    load: bool = True  #: Whether to load the library for calls; False without a GPU: only build.
    used: list[Build] = field(default_factory=list)  #: The builds so far.

    def __call__(self, name: str, flags: Sequence[str] = ()) -> Kernels:
        """Build a ``.cu`` file for the GPU in use.

        Without ``--gpu``, it is built for each architecture that the test's markers allow.

        Args:
            name: Path of the file, relative to a folder of the ini option ``aiperf_kernels`` or to
                the test's folder. Write it as a literal, so that all files are built in parallel
                before the tests run.
            flags: Further flags for nvcc, such as ``["-Iinclude", "-Icutlass"]``. If one is not
                allowed, the error lists those that are.

        Returns:
            The file's ``extern "C"`` functions by name, such as ``nvcc("scale.cu")["twice"]``.

        Raises:
            UsageError: There is no such file, or a flag is not allowed.
            BuildError: nvcc is missing or could not build the file.

        """
        from .launcher import Kernels  # imported late: it loads ctypes

        source = find_source(name, self.roots)
        if source is None:
            roots = ", ".join(display_path(Path(root).absolute()) for root in self.roots)
            where = f"these folders: {roots}" if roots else "any folder: none is configured"
            names = {str(f.relative_to(root)) for root in self.roots for f in root.rglob("*.cu")}
            near = " or ".join(get_close_matches(name, sorted(names)))
            hint = f"did you mean {near}?" if near else "the ini option aiperf_kernels lists them"
            raise UsageError(f"there is no {name} in {where}; {hint}")
        requests = [BuildRequest(source, arch, flags) for arch in self.archs]
        outcomes = build_parallel(requests, include=self.include)
        builds = [outcome for outcome in outcomes if isinstance(outcome, Build)]
        pairs = zip(self.archs, outcomes, strict=True)
        archs = [arch for arch, outcome in pairs if isinstance(outcome, Build)]
        for outcome in outcomes:
            if isinstance(outcome, BuildError) and archs:
                raise _for_fewer(outcome, archs)
            if not isinstance(outcome, Build):
                raise outcome
        self.used += (b for b in builds if b not in self.used)
        text = source.read_text(encoding="utf-8", errors="replace")
        library = builds[0].path if self.load else None
        return Kernels(display_path(source.absolute()), text, library, name)

    @property
    def sources(self) -> list[Path]:
        """The sources and headers of the builds so far."""
        return list({f: None for b in self.used for f in read_sources(b.source, b.include)})


def _for_fewer(error: BuildError, archs: Sequence[str]) -> BuildError:
    """Name the markers of the architectures for which a source could be built, unlike others."""
    head, *rest = str(error).splitlines()
    marks = ", ".join(f"@pytest.mark.{arch}" for arch in archs)
    head += f"; if it is for {', '.join(archs)} only, mark the test {marks}"
    return BuildError("\n".join([head, *rest]))


def find_source(name: str, roots: Sequence[Path]) -> Path | None:
    """Return the path of a .cu file in the first root that has it."""
    return next((root / name for root in roots if (root / name).is_file()), None)
