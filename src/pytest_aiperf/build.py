"""A .cu file to a shared library, and its extern "C" launchers to typed Python callables."""

from __future__ import annotations

import ast
import ctypes
import difflib
import functools
import hashlib
import json
import operator
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import fasteners

from .errors import AiperfError, BuildError, LaunchError, Misuse
from .gpu import nvcc_arch
from .model import KernelRecord, from_json, to_json

DEADLINE: Final = 300.0
"""Seconds after which a compilation is killed."""

# --- the compiler --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Which nvcc builds, and what it needs on every command line to link."""

    nvcc: Path
    version: str
    flags: tuple[str, ...] = ()


@functools.cache
def find_nvcc() -> Toolchain:
    """Find nvcc: $CUDACXX, $CUDA_HOME, $CUDA_PATH, PATH, then conda and pip packages."""
    nvcc = next(filter(None, _places()), None)
    if nvcc is None:
        raise BuildError(
            "no nvcc: pip install 'pytest-aiperf[toolchain]', or put a CUDA toolkit on PATH"
        )
    try:
        asked = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{nvcc} does not answer --version: {error}") from error
    release = re.search(r"release .*", asked.stdout)
    version = release[0].strip() if release else asked.stdout.strip()
    libraries = nvcc.parent.parent / "lib"  # of a pip package; a toolkit's nvcc knows its own
    pip = "site-packages" in nvcc.parts and libraries.is_dir()
    return Toolchain(nvcc, version, (f"-L{libraries}",) if pip else ())


def _places() -> Iterator[Path | None]:
    if chosen := os.environ.get("CUDACXX"):
        if (found := shutil.which(chosen)) is None:
            raise BuildError(f"CUDACXX is {chosen!r}, which is not an executable: unset or mend it")
        yield Path(found)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield _executable(Path(home, "bin", "nvcc"))
    yield _executable(shutil.which("nvcc"))
    from cuda import pathfinder

    # pathfinder 1.2 finds libraries only
    if search := getattr(pathfinder, "find_nvidia_binary_utility", None):
        yield _executable(search("nvcc"))
    for folder in sys.path:
        for nvcc in sorted(Path(folder).glob("nvidia/cu*/bin/nvcc")):
            yield _executable(nvcc)


def _executable(path: Path | str | None) -> Path | None:
    found = path and shutil.which(path)
    return Path(found) if found else None


# --- one build -----------------------------------------------------------------------------------

_DEFAULTS: Final = ("-O3", "-std=c++17", "-lineinfo")
# Anything else could run a program, or read and write files of its author's choice.
_ALLOWED: Final = re.compile(
    r"-O[0-3]|-std=c\+\+(14|17|20)|-D[A-Za-z_]\w*(=[\w.+-]*)?|-lineinfo|--use_fast_math"
    r"|-maxrregcount=\d+|-rdc=true|-l(cuda|cublas|cublasLt|cudadevrt)"
    r"|--expt-relaxed-constexpr|--extended-lambda",
    re.ASCII,
)
_ALLOWED_SHOWN: Final = (
    "-O0..3, -std=c++14|17|20, -DNAME[=value], -lineinfo, --use_fast_math, -maxrregcount=N, "
    "-rdc=true, -lcuda, -lcublas, -lcublasLt, -lcudadevrt, --expt-relaxed-constexpr, "
    "--extended-lambda"
)
_INCLUDE: Final = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.MULTILINE)
_ENTRY: Final = re.compile(
    r"Compiling entry function '([^']+)' for '[^']+'(.*?Used (\d+) registers[^\n]*)", re.DOTALL
)
_ERROR_LINE: Final = re.compile(
    r"\b(error|fatal)\s*:|^nvcc fatal|undefined reference|cannot find", re.IGNORECASE
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


@dataclass(frozen=True, slots=True)
class _Record:
    """What lies beside a library in the cache; ``size`` tells a torn library from a whole one."""

    size: int
    command: tuple[str, ...]
    kernels: tuple[KernelRecord, ...]
    log: str


def build(
    source: Path | str,
    arch: str,
    *,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
    cache: Path | None = None,
    deadline: float = DEADLINE,
    stop: threading.Event | None = None,
) -> Build:
    """Compile ``source`` for ``arch`` ("sm90", or nvcc's own "sm_100f"), unless the cache has it.

    The cache is keyed by content: source, every header of ours that it reaches, flags,
    architecture and compiler. Several threads and processes may ask at once: one compiles.
    ``stop`` ends a compilation from another thread.
    """
    source = Path(source).absolute()  # so that no file's name can be read as a flag
    if not source.is_file():
        raise Misuse(f"there is no {_shown(source)} to build")
    folders = tuple(Path(folder).absolute() for folder in include)
    order = _Order(source, _target(arch), folders, _options(flags), find_nvcc())
    cache = cache or default_cache()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        while (made := _made(order, cache, deadline, stop)) is None:
            continue  # edited while it compiled: what came out belongs to no one content
    except OSError as error:
        raise BuildError(
            f"cannot build {_shown(source)} in {cache} (PYTEST_AIPERF_CACHE moves it): {error}"
        ) from error
    return made


@dataclass(frozen=True, slots=True)
class _Order:
    """Everything that decides what comes out of the compiler."""

    source: Path
    target: str
    include: tuple[Path, ...]
    options: tuple[str, ...]
    toolchain: Toolchain

    def key(self) -> str:
        # nvcc takes flags from these as well
        names = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")
        ambient = [os.environ.get(name, "") for name in names]
        said = json.dumps([self.target, self.options, self.toolchain.version, ambient])
        digest = hashlib.sha256(said.encode())
        for content in reached(self.source, self.include).values():
            digest.update(b"%d:" % len(content) + content)
        return digest.hexdigest()[:32]

    def command(self) -> tuple[str, ...]:
        return (
            *(str(self.toolchain.nvcc), "-shared", "-Xcompiler", "-fPIC", "-cudart=static"),
            "--ptxas-options=-v",
            f"-gencode=arch=compute_{self.target[3:]},code={self.target}",
            *self.options,
            *(f"-I{folder}" for folder in self.include),
            *self.toolchain.flags,
            *("-o", _LIBRARY, str(self.source)),
        )

    def built(self, entry: Path, record: _Record) -> Build:
        # the same content may lie in many places: the record names the one that was asked for
        kernels = tuple(replace(k, source=_shown(self.source)) for k in record.kernels)
        return Build(entry / _LIBRARY, self.source, self.target, kernels, record.log)


def _made(
    order: _Order, cache: Path, deadline: float, stop: threading.Event | None
) -> Build | None:
    """Take a build from the cache or compile it there; None when its source changed meanwhile."""
    key = order.key()
    entry = cache / key
    if record := _record(entry):
        return order.built(entry, record)
    # InterProcessLock is POSIX's: it does not keep the threads of one process apart
    with _thread_lock(key), fasteners.InterProcessLock(cache / f"{key}.lock"):
        if record := _record(entry):
            return order.built(entry, record)
        for left in cache.glob(f"{key}.*/"):  # by a killed run: this lock's holder is its only user
            shutil.rmtree(left, ignore_errors=True)
        scratch = tempfile.TemporaryDirectory(
            prefix=f"{key}.", dir=cache, ignore_cleanup_errors=True
        )
        with scratch as work:
            room = Path(work, "entry")
            room.mkdir(mode=0o700)
            record = _compile(order, room, deadline, stop)
            if order.key() != key:
                return None
            _publish(room, entry)
    return order.built(entry, record)


def default_cache() -> Path:
    """Where builds are kept: $PYTEST_AIPERF_CACHE, or the user's own cache folder."""
    if chosen := os.environ.get("PYTEST_AIPERF_CACHE"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-aiperf"


def reached(source: Path, include: Sequence[Path] = ()) -> dict[Path, bytes]:
    """Read a source and, recursively, every header of ours that it includes, in a fixed order.

    A header that lies neither beside its includer nor in ``include`` is the compiler's.
    """
    found: dict[Path, bytes] = {}
    waiting = [source]
    while waiting:
        file = waiting.pop(0)
        if file in found:
            continue
        found[file] = file.read_bytes()
        for bracket, name in _INCLUDE.findall(found[file]):
            beside = () if bracket == b"<" else (file.parent,)
            headers = ((d / os.fsdecode(name)).resolve() for d in (*beside, *include))
            waiting += [h for h in headers if h.is_file()][:1]
    return found


def _options(flags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(flags, str):
        raise Misuse(f"flags= takes a list: [{flags!r}]")
    for flag in flags:
        if not _ALLOWED.fullmatch(flag):
            raise Misuse(f"nvcc flag {flag!r} is not allowed (allowed: {_ALLOWED_SHOWN})")
    kinds = {flag[:3] for flag in flags} | {flag[:2] for flag in flags if flag[:2] == "-O"}
    kept = (d for d in _DEFAULTS if d[:3] not in kinds and d[:2] not in kinds)
    return (*kept, *flags)


def _target(arch: str) -> str:
    if re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        return arch
    if re.fullmatch(r"sm\d{2,3}", arch):
        return nvcc_arch(arch)
    raise Misuse(f"{arch!r} is no architecture: sm90, sm100 or nvcc's own sm_100f are")


_locks: Final[dict[str, threading.Lock]] = {}


def _thread_lock(key: str) -> threading.Lock:
    return _locks.setdefault(key, threading.Lock())


def _record(entry: Path) -> _Record | None:
    """Read what the cache says of an entry; None when it is absent or torn, to be built anew."""
    try:
        record = from_json(_Record, json.loads((entry / _RECORD).read_text(encoding="utf-8")))
        whole = (entry / _LIBRARY).stat().st_size == record.size
    except (OSError, ValueError):
        return None
    return record if whole else None


def _publish(room: Path, entry: Path) -> None:
    try:
        room.rename(entry)  # atomic: the first one wins
    except OSError:
        if _record(entry):
            return
        entry.rename(room.with_name("torn"))
        room.rename(entry)


def _compile(order: _Order, room: Path, deadline: float, stop: threading.Event | None) -> _Record:
    """Run nvcc in ``room``; leave there the library and its record, or raise."""
    spoken = room.with_name("log")
    with spoken.open("wb") as file:
        process = subprocess.Popen(
            order.command(),
            cwd=room,
            env={**os.environ, "TMPDIR": str(room.parent)},  # a killed nvcc leaves nothing behind
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _supervise(process, deadline, stop)
    log = spoken.read_text(encoding="utf-8", errors="replace")
    library = room / _LIBRARY
    shown = shlex.join(order.command())
    what = f"{_shown(order.source)} for {order.target}"
    if status is None:
        raise BuildError(f"nvcc did not build {what} within {deadline:g} s\n{shown}")
    if status != 0 or not library.is_file():
        lines = log.strip().splitlines()
        why = [line for line in lines if _ERROR_LINE.search(line)][:5] or lines[-5:]
        if status < 0 or not why:
            why.append(f"nvcc ended with status {status}")
        raise BuildError("\n".join([f"nvcc could not build {what}", *why, shown]))
    kernels = _kernels(log, order.source, order.target)
    record = _Record(library.stat().st_size, order.command(), kernels, log)
    (room / _RECORD).write_text(json.dumps(to_json(record), indent=1), encoding="utf-8")
    return record


def _supervise(
    process: subprocess.Popen[bytes], deadline: float, stop: threading.Event | None
) -> int | None:
    """Wait for the exit status; None when the deadline came first. Nothing outlives this call."""
    until = time.monotonic() + deadline
    try:
        while time.monotonic() < until:
            if stop and stop.is_set():
                raise BuildError("the build was stopped")
            try:
                return process.wait(timeout=min(0.5, max(0.0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                continue
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # nvcc's own children too
            process.wait()


def _kernels(log: str, source: Path, target: str) -> tuple[KernelRecord, ...]:
    found = _ENTRY.findall(log)
    names = _demangled([name for name, _, _ in found])
    return tuple(
        KernelRecord(
            source=_shown(source),
            arch=target,
            function=name,
            registers=int(registers),
            spill_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", said))),
            shared_bytes=sum(map(int, re.findall(r"(\d+) bytes smem", said))),
        )
        for name, (_, said, registers) in zip(names, found, strict=True)
    )


def _demangled(names: list[str]) -> list[str]:
    tool = shutil.which("c++filt")
    if not (tool and names):
        return names
    done = subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=False
    )
    plain = done.stdout.splitlines()
    return plain if len(plain) == len(names) else names


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# --- many builds ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """One build that a session will need."""

    source: Path
    arch: str
    flags: tuple[str, ...] = ()


def build_all(
    wants: Sequence[Want],
    *,
    include: Sequence[Path] = (),
    cache: Path | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int, Build | AiperfError], None] | None = None,
) -> list[Build | AiperfError]:
    """Build in parallel; give back, in the order of ``wants``, each build or why there is none.

    ``progress(done, total, latest)`` is called in the caller's own thread.
    """
    stop = threading.Event()

    def one(want: Want) -> Build | AiperfError:
        try:
            return build(
                want.source, want.arch, include=include, flags=want.flags, cache=cache, stop=stop
            )
        except AiperfError as error:
            return error  # it is told by the claim that asks for this build, and costs no other

    workers = jobs or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(max(1, min(workers, len(wants)))) as pool:
        futures = [pool.submit(one, want) for want in wants]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                if progress:
                    progress(done, len(wants), future.result())
        except BaseException:  # Ctrl-C: no compiler may outlive the session
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def nvcc_names(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """List what a test module builds as (file, flags): its ``nvcc("...")`` calls with literals."""
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    for call in ast.walk(ast.parse(text)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        given = {k.arg: k.value for k in call.keywords}
        given |= dict(zip(("name", "flags"), call.args, strict=False))
        if call.func.id != "nvcc" or "name" not in given:
            continue
        try:
            name = ast.literal_eval(given["name"])
            flags = ast.literal_eval(given["flags"]) if "flags" in given else ()
        except ValueError:
            continue  # only known when the test runs: it is built then
        if isinstance(name, str) and isinstance(flags, (list, tuple)):
            found[name, tuple(map(str, flags))] = None
    return list(found)


# --- C signatures --------------------------------------------------------------------------------

_WORDS: Final = {
    "bool": "bool", "float": "float32", "double": "float64",
    "int8_t": "int8", "int16_t": "int16", "int32_t": "int32", "int64_t": "int64",
    "uint8_t": "uint8", "uint16_t": "uint16", "uint32_t": "uint32", "uint64_t": "uint64",
    "uchar": "uint8", "ushort": "uint16", "uint": "uint32", "ulong": "uint64",
    "longlong": "int64", "ulonglong": "uint64", "size_t": "uint64", "ssize_t": "int64",
    "ptrdiff_t": "int64", "intptr_t": "int64", "uintptr_t": "uint64",
}  # fmt: skip
# numbers that only a pointer can stand for: ctypes cannot pass them by value
_POINTED: Final = {
    "half": "float16", "__half": "float16",
    "nv_bfloat16": "bfloat16", "__nv_bfloat16": "bfloat16",
    "__nv_fp8_e4m3": "float8_e4m3fn", "__nv_fp8x2_e4m3": "float8_e4m3fn",
    "__nv_fp8x4_e4m3": "float8_e4m3fn", "__nv_fp8_e5m2": "float8_e5m2",
    "__nv_fp8x2_e5m2": "float8_e5m2", "__nv_fp8x4_e5m2": "float8_e5m2",
    "__nv_fp8_e8m0": "float8_e8m0fnu", "__nv_fp8_storage_t": "uint8",
    "__nv_fp4x2_e2m1": "float4_e2m1fn_x2",
}  # fmt: skip
# torch's unsigned types can do little but be stored, so their signed twins are taken as well
_ALSO: Final = {
    "uint16": "int16", "uint32": "int32", "uint64": "int64",
    "float2": "complex64", "double2": "complex128",
}  # fmt: skip
_SCALARS: Final[dict[str, Any]] = {
    **{f"int{b}": getattr(ctypes, f"c_int{b}") for b in (8, 16, 32, 64)},
    **{f"uint{b}": getattr(ctypes, f"c_uint{b}") for b in (8, 16, 32, 64)},
    "float32": ctypes.c_float, "float64": ctypes.c_double, "bool": ctypes.c_bool,
}  # fmt: skip
_INTEGER_WORDS: Final = {"char", "short", "int", "long", "unsigned", "signed"}
_QUALIFIERS: Final = {"const", "volatile", "__restrict__", "__restrict", "restrict", "struct"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a launcher; ``ctype`` is normalised ("float*", "int64_t")."""

    ctype: str
    name: str


@dataclass(frozen=True, slots=True)
class Signature:
    """A launcher as C declares it."""

    name: str
    returns: str
    parameters: tuple[Parameter, ...]
    text: str


def signatures(text: str) -> dict[str, Signature]:
    """Read the ``extern "C"`` host functions that a CUDA source defines (macros define none)."""
    text = _blanked(text)
    found: dict[str, Signature] = {}
    for mark in re.finditer(r'extern\s*"C"\s*', text):
        for head in _heads(text, mark.end()):
            if signature := _signature(head):
                found.setdefault(signature.name, signature)
    return found


def _blanked(text: str) -> str:
    """Take out comments, directives and literals, whose braces and words mean nothing here."""
    token = re.compile(
        r'//(?:\\\n|[^\n])*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
        r"|(?<!\w)'(?:\\.|[^'\\\n])+'",
        re.DOTALL,
    )
    text = token.sub(lambda m: m[0] if m[0] == '"C"' else " ", text)
    return re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", " ", text, flags=re.MULTILINE)


def _closing(text: str, opening: int) -> int:
    depth = 0
    for brace in re.finditer(r"[{}]", text[opening:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return opening + brace.start()
    return len(text)


def _heads(text: str, at: int) -> Iterator[str]:
    """Yield what stands before each body: one function's, or those of a whole block."""
    block = text.startswith("{", at)
    end = _closing(text, at) if block else len(text)
    at += block
    while stop := re.compile(r"[;{]").search(text, at, end):
        body = stop[0] == "{"
        if body:
            yield text[at : stop.start()]
        if not block:
            return
        at = _closing(text, stop.start()) + 1 if body else stop.end()


def _signature(head: str) -> Signature | None:
    attribute = r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)|\[\[.*?\]\]"
    head = re.sub(rf'extern\s*"C"|{attribute}', " ", head)
    shape = re.fullmatch(r"\s*([\w\s:*]+?)\s*\b(\w+)\s*\(([^()]*)\)\s*(?:noexcept)?\s*", head)
    if not shape or re.search(r"\b(__global__|__device__|static|namespace)\b", shape[1]):
        return None
    returns = " ".join(w for w in shape[1].split() if w not in ("inline", "__host__"))
    inside = " ".join(shape[3].split())
    parts = [] if inside in ("", "void") else inside.split(",")
    text = f"{returns} {shape[2]}({inside})"
    return Signature(shape[2], returns, tuple(map(_parameter, parts)), text)


def _parameter(text: str) -> Parameter:
    text = re.sub(r"\[[^\]]*\]", "*", text.partition("=")[0]).replace("std::", "")
    tokens = [t for t in re.findall(r"[\w:]+|[*&]", text) if t not in _QUALIFIERS]
    words = [t for t in tokens if t not in "*&"]
    marks = "".join(t for t in tokens if t in "*&")
    named = len(words) > 1 and words[-1] not in _INTEGER_WORDS
    return Parameter(" ".join(words[:-1] if named else words) + marks, words[-1] if named else "")


def _dtype(ctype: str) -> str | None:
    """Name the dtype of a C number as torch and numpy do; None when it is no number."""
    words = ctype.split()
    if words and set(words) <= _INTEGER_WORDS:
        sizes = {"char": 8, "short": 16, "long": 64}
        bits = next((b for word, b in sizes.items() if word in words), 32)
        return f"{'u' if 'unsigned' in words else ''}int{bits}"
    return _WORDS.get(ctype)


def _pointed(ctype: str) -> frozenset[str]:
    """Name the dtypes that a pointer to ``ctype`` may be given; none means any."""
    for word in (ctype, re.sub(r"[1234]$", "", ctype)):  # float4 is four of float
        if dtype := _dtype(word) or _POINTED.get(word):
            return frozenset({dtype, _ALSO.get(dtype, dtype), _ALSO.get(ctype, dtype)})
    return frozenset()


# --- launchers -----------------------------------------------------------------------------------

Convert = Callable[[Any], Any]


class Launcher:
    """An ``extern "C"`` function of a .cu file, called with tensors and numbers: an arm."""

    __slots__ = ("_argtypes", "_converts", "_function", "_library", "name", "signature", "source")

    needs_gpu: Final = True

    def __init__(self, signature: Signature, source: Path, library: Path | None) -> None:
        """Refuse what Python cannot call; without a ``library`` every call is refused."""
        *given, stream = signature.parameters or (Parameter("", ""),)
        if stream.ctype not in ("cudaStream_t", "CUstream"):
            raise Misuse(
                f"{signature.name}() must take a cudaStream_t as its last parameter, so that it "
                f"runs where it is timed: {signature.text}"
            )
        if signature.returns not in ("void", "int", "cudaError_t"):
            raise Misuse(
                f"{signature.name}() must return cudaError_t, int or void: {signature.text}"
            )
        self.name: Final = signature.name
        self.signature: Final = signature
        self.source: Final = source
        self._library = library
        self._function: Callable[..., int | None] | None = None
        made = [_convert(f"{self.name}()", at, p) for at, p in enumerate(given, 1)]
        self._converts = [convert for convert, _ in made]
        self._argtypes = [*(kind for _, kind in made), ctypes.c_void_p]

    def __repr__(self) -> str:
        return f"<launcher {self.signature.text}>"

    def __call__(self, *args: Any) -> None:
        """Launch on the current stream of torch (of cupy, where torch is not in use)."""
        if len(args) != len(self._converts):
            raise Misuse(
                f"{self.name}() takes {len(self._converts)} arguments before the stream, which "
                f"is filled in, not {len(args)}: {self.signature.text}"
            )
        function = self._function or self._load()
        values = [convert(arg) for convert, arg in zip(self._converts, args, strict=True)]
        if status := function(*values, _current_stream()):
            raise LaunchError(f"{self.name}() of {_shown(self.source)}: {_cuda_error(status)}")

    def _load(self) -> Callable[..., int | None]:
        if self._library is None:
            raise Misuse(f"{self.name}() is built, but its agreement needs a GPU to be checked")
        try:
            function = getattr(ctypes.CDLL(str(self._library)), self.name)
        except OSError as error:
            raise BuildError(
                f"{_shown(self.source)} is built but does not load: {error}"
            ) from error
        except AttributeError:
            raise Misuse(
                f"{self.name}() is in {_shown(self.source)}, but an #if kept it out of this build"
            ) from None
        function.argtypes = self._argtypes
        function.restype = None if self.signature.returns == "void" else ctypes.c_int
        self._function = function
        return typing.cast("Callable[..., int | None]", function)


def _convert(function: str, at: int, parameter: Parameter) -> tuple[Convert, Any]:
    """Make, once, what turns one argument into what ctypes passes, and its ctypes type."""
    ctype = parameter.ctype
    where = f"argument {at} {parameter.name!r} of {function} is {ctype}"
    if ctype.endswith("*"):
        return _pointer(where, _pointed(ctype[:-1])), ctypes.c_void_p
    dtype = _dtype(ctype)
    if dtype is None:
        raise Misuse(f"{where}, which Python cannot pass: pointers, integers, floats and bool can")
    kind = _SCALARS[dtype]
    if dtype.startswith("float"):
        return _real(where), kind
    bits = 1 if dtype == "bool" else 8 * ctypes.sizeof(kind)
    if dtype.startswith("int"):
        return _integer(where, -(1 << bits - 1), (1 << bits - 1) - 1), kind
    return _integer(where, 0, (1 << bits) - 1), kind


def _pointer(where: str, wanted: frozenset[str]) -> Convert:
    accepted: set[object] = set()  # dtype objects: to hash one is cheaper than to name it

    def convert(value: Any) -> int:
        if hasattr(value, "data_ptr"):
            # pinned host memory is the GPU's to read
            if not (value.is_cuda or value.is_pinned()):
                raise Misuse(f"{where}, got a tensor in CPU memory: allocate it on bench.device")
            address = value.data_ptr()
        elif hasattr(value, "__cuda_array_interface__"):
            address = value.data.ptr
        else:
            raise Misuse(f"{where}, got {_said(value)}: pass a tensor on the GPU")
        if value.dtype not in accepted:
            if wanted and str(value.dtype).removeprefix("torch.") not in wanted:
                raise Misuse(f"{where}, got {value.dtype}")
            accepted.add(value.dtype)
        return typing.cast("int", address)

    return convert


def _integer(where: str, low: int, high: int) -> Convert:
    def convert(value: Any) -> int:
        number = value
        if type(value) is not int:
            try:
                number = operator.index(_number(where, value))
            except TypeError:
                raise Misuse(f"{where}, got {_said(value)}: pass an int") from None
        if not low <= number <= high:
            raise Misuse(f"{where}, which cannot hold {number}")
        return typing.cast("int", number)

    return convert


def _real(where: str) -> Convert:
    def convert(value: Any) -> float:
        if type(value) is float:
            return value
        if not hasattr(_number(where, value), "__float__"):
            raise Misuse(f"{where}, got {_said(value)}: pass a number")
        return float(value)

    return convert


def _number(where: str, value: Any) -> Any:
    # a tensor of one element would pass for a number, at the price of a synchronisation
    if hasattr(value, "data_ptr") or hasattr(value, "__cuda_array_interface__"):
        raise Misuse(f"{where}, got a tensor: pass a number")
    return value


def _said(value: object) -> str:
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def _current_stream() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # 0.2 us instead of 4 us a call; what Triton's launcher asks too, but no public name
        if raw := getattr(torch._C, "_cuda_getCurrentRawStream", None):  # noqa: SLF001
            return typing.cast("int", raw(torch.cuda.current_device()))
        return typing.cast("int", torch.cuda.current_stream().cuda_stream)
    cupy = sys.modules.get("cupy")
    return 0 if cupy is None else typing.cast("int", cupy.cuda.get_current_stream().ptr)


def _cuda_error(status: int) -> str:
    """Put a CUDA error into words: libcudart's own, which needs no GPU for that."""
    from cuda import pathfinder

    try:
        runtime = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cudart").abs_path)
    except (OSError, pathfinder.DynamicLibNotFoundError):
        return f"CUDA error {status}"
    said = []
    for ask in (runtime.cudaGetErrorName, runtime.cudaGetErrorString):
        ask.restype = ctypes.c_char_p
        said.append(ask(status).decode())
    return ": ".join(said)


# --- the fixture's value -------------------------------------------------------------------------


class Kernels(Mapping[str, Launcher]):
    """The launchers of one built .cu file, by name."""

    def __init__(self, builds: Sequence[Build], *, load: bool) -> None:
        self.builds: Final = tuple(builds)
        self._source = builds[0].source
        self._library = builds[0].path if load else None
        text = self._source.read_text(encoding="utf-8", errors="replace")
        self._signatures = signatures(text)
        self._launchers: dict[str, Launcher] = {}

    def __getitem__(self, name: str) -> Launcher:
        if name not in self._signatures:
            near = difflib.get_close_matches(name, self._signatures, 1)
            raise Misuse(
                f"no launcher {name!r} in {_shown(self._source)}"
                + (f", did you mean {near[0]!r}?" if near else "")
                + f' (its extern "C" functions: {", ".join(self._signatures) or "none"})'
            )
        if name not in self._launchers:
            signature = self._signatures[name]
            self._launchers[name] = Launcher(signature, self._source, self._library)
        return self._launchers[name]

    def __contains__(self, name: object) -> bool:
        return name in self._signatures

    def __iter__(self) -> Iterator[str]:
        return iter(self._signatures)

    def __len__(self) -> int:
        return len(self._signatures)


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
    cache: Path | None = None
    used: list[Build] = field(default_factory=list)

    def __call__(self, name: str, flags: Sequence[str] = ()) -> Kernels:
        """Build the file ``name`` of the first root that has it, for every architecture."""
        source = find_source(name, self.roots)
        if source is None:
            tried = ", ".join(_shown(Path(root).absolute()) for root in self.roots)
            raise Misuse(
                f"there is no {name} in {tried or 'any folder: no kernel folder is known'}"
            )
        wants = [Want(source, arch, tuple(flags)) for arch in self.archs]
        builds = []
        for made in build_all(wants, include=self.include, cache=self.cache):
            if not isinstance(made, Build):
                raise made
            builds.append(made)
        self.used += (b for b in builds if b not in self.used)
        return Kernels(builds, load=self.load)

    @property
    def sources(self) -> list[Path]:
        """The files that ``used`` was built from, headers included."""
        folders = [Path(folder).absolute() for folder in self.include]
        return list({f: None for b in self.used for f in reached(b.source, folders)})


def find_source(name: str, roots: Sequence[Path]) -> Path | None:
    """Find a .cu file in the first root that has it."""
    return next((root / name for root in roots if (root / name).is_file()), None)
