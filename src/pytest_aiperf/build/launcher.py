"""The extern "C" launchers of a CUDA source as Python callables that take tensors and numbers."""

from __future__ import annotations

import ctypes
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import BuildError, LaunchError, UsageError

Convert = Callable[[Any], Any]
Shape = tuple[str, str]
"""What a function returns and what it takes, as C says it."""

_INTEGER_WORDS: Final = {"char", "short", "int", "long", "unsigned", "signed"}
_QUALIFIERS: Final = {"const", "volatile", "__restrict__", "__restrict", "restrict", "struct"}
_DTYPES: Final = {
    "bool": "bool", "float": "float32", "double": "float64", "size_t": "uint64",
    "half": "float16", "__half": "float16", "nv_bfloat16": "bfloat16", "__nv_bfloat16": "bfloat16",
    "__nv_fp8_e4m3": "float8_e4m3fn", "__nv_fp8_e5m2": "float8_e5m2",
}  # fmt: skip


def declared(text: str) -> dict[str, Shape]:
    """Read the ``extern "C"`` host functions that a CUDA source defines (macros define none)."""
    found = {}
    for head in _heads(_blanked(text)):
        shape = re.search(r"([\w:]+[\s*]+)(\w+)\s*\(([^()]*)\)\s*(?:noexcept\s*)?$", head)
        if shape and not re.search(r"\b(__global__|__device__|static)\b", head):
            found[shape[2]] = ("".join(shape[1].split()), " ".join(shape[3].split()))
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


def _heads(text: str) -> Iterator[str]:
    """Yield what stands before the body of each extern "C" function, alone or in a block."""
    inside: list[bool] = []  # of each open brace, whether it is an extern "C" block's
    start = 0
    for mark in re.finditer(r'extern\s*"C"\s*\{|[{};]', text):
        head, start = text[start : mark.start()], mark.end()
        if mark[0] == "}":
            inside = inside[:-1]  # there may be none: #if and #else may open one brace twice
        elif mark[0] != ";":
            if mark[0] == "{" and ('"C"' in head or (inside and all(inside))):
                yield head
            inside.append(mark[0] != "{")


def _parameter(text: str) -> tuple[str, str]:
    """Split a parameter into its type, without qualifiers, and its name, where it has one."""
    text = re.sub(r"\[[^\]]*\]", "*", text.partition("=")[0]).replace("std::", "")
    tokens = [t for t in re.findall(r"[\w:]+|[*&]", text) if t not in _QUALIFIERS]
    words = [t for t in tokens if t not in "*&"]
    marks = "".join(t for t in tokens if t in "*&")
    named = len(words) > 1 and words[-1] not in _INTEGER_WORDS
    return " ".join(words[:-1] if named else words) + marks, words[-1] if named else ""


def _dtype(ctype: str) -> str | None:
    """Name the dtype of a C number as torch and numpy do; None when they have no such number."""
    words = ctype.split()
    if words and set(words) <= _INTEGER_WORDS:
        sizes = {"char": 8, "short": 16, "long": 64}
        bits = next((b for word, b in sizes.items() if word in words), 32)
        return f"{'u' if 'unsigned' in words else ''}int{bits}"
    if re.fullmatch(r"u?int(8|16|32|64)_t", ctype):
        return ctype.removesuffix("_t")
    return _DTYPES.get(ctype)


def _pointed(ctype: str) -> frozenset[str]:
    """Name the dtypes that a pointer to ``ctype`` may be given; none means any."""
    dtype = _dtype(ctype) or _dtype(re.sub(r"[1234]$", "", ctype))  # float4 is four of float
    # torch's unsigned types can do little but be stored, so their signed twins are taken as well
    return frozenset({dtype, dtype.removeprefix("u")} if dtype else ())


class Launcher:
    """An ``extern "C"`` function of a .cu file, called with tensors and numbers: an arm."""

    needs_gpu: Final = True

    def __init__(self, name: str, shape: Shape, source: str, library: Path | None) -> None:
        """Refuse what Python cannot call; without a ``library`` every call is refused."""
        returns, takes = shape
        self.name: Final = name
        self.text: Final = f"{returns} {name}({takes})"
        self._returns = returns
        self._source = source
        self._library = library
        *given, (stream, _) = map(_parameter, takes.split(","))
        if stream not in ("cudaStream_t", "CUstream"):
            raise UsageError(
                f"{name}() must take a cudaStream_t as its last parameter, so that it runs where "
                f"it is timed: {self.text}"
            )
        if returns not in ("void", "int", "cudaError_t"):
            raise UsageError(f"{name}() must return cudaError_t, int or void: {self.text}")
        made = [
            _argument(f"argument {at} {parameter!r} of {name}() is {ctype}", ctype)
            for at, (ctype, parameter) in enumerate(given, 1)
        ]
        self._converts = [convert for convert, _ in made]
        self._argtypes = [*(kind for _, kind in made), ctypes.c_void_p]

    def __call__(self, *args: Any) -> None:
        """Launch on the current stream of torch (of cupy, where torch is not in use)."""
        if len(args) != len(self._converts):
            raise UsageError(
                f"{self.name}() takes {len(self._converts)} arguments before the stream, which is "
                f"filled in, not {len(args)}: {self.text}"
            )
        function = self._function
        values = [convert(arg) for convert, arg in zip(self._converts, args, strict=True)]
        if status := function(*values, _current_stream()):
            raise LaunchError(f"{self.name}() of {self._source}: {_cuda_error(status)}")

    @functools.cached_property
    def _function(self) -> Any:
        if self._library is None:
            raise UsageError(f"{self.name}() is built, but its agreement needs a GPU to be checked")
        try:
            function = getattr(ctypes.CDLL(str(self._library)), self.name)
        except OSError as error:
            raise BuildError(f"{self._source} is built but does not load: {error}") from error
        except AttributeError:
            why = f"{self.name}() is in {self._source}, but an #if kept it out of this build"
            raise UsageError(why) from None
        function.argtypes = self._argtypes
        function.restype = None if self._returns == "void" else ctypes.c_int
        return function


def _argument(where: str, ctype: str) -> tuple[Convert, Any]:
    """Make, once, what turns an argument into what ctypes passes, and its ctypes type."""
    if ctype.endswith("*"):
        return _pointer(where, _pointed(ctype[:-1])), ctypes.c_void_p
    dtype = _dtype(ctype) or ""
    reals = {"float32": ctypes.c_float, "float64": ctypes.c_double}
    if dtype in reals:
        return _number(where, float, -math.inf, math.inf), reals[dtype]
    kind: Any = getattr(ctypes, f"c_{dtype}", None)
    if kind is None:
        raise UsageError(
            f"{where}, which Python cannot pass: pointers, integers, floats and bool can"
        )
    bits = 1 if dtype == "bool" else 8 * ctypes.sizeof(kind)
    low = -(1 << bits - 1) if dtype.startswith("int") else 0
    return _number(where, int, low, low + (1 << bits) - 1), kind


def _pointer(where: str, wanted: frozenset[str]) -> Convert:
    accepted: set[object] = set()  # dtype objects: to hash one is cheaper than to name it

    def convert(value: Any) -> Any:
        if hasattr(value, "data_ptr"):
            # pinned host memory is the GPU's to read
            if not (value.is_cuda or value.is_pinned()):
                raise UsageError(
                    f"{where}, got a tensor in CPU memory: allocate it on bench.device"
                )
            address = value.data_ptr()
        elif hasattr(value, "__cuda_array_interface__"):
            address = value.data.ptr
        else:
            raise UsageError(f"{where}, got {type(value).__name__}: pass a tensor on the GPU")
        if value.dtype not in accepted:
            if wanted and str(value.dtype).removeprefix("torch.") not in wanted:
                raise UsageError(f"{where}, got {value.dtype}")
            accepted.add(value.dtype)
        return address

    return convert


def _number(where: str, exact: type, low: float, high: float) -> Convert:
    method, wanted = ("__index__", "an int") if exact is int else ("__float__", "a number")

    def convert(value: Any) -> Any:
        if type(value) is not exact:
            # a tensor of one element would pass for a number, at the price of a synchronisation
            tensor = hasattr(value, "data_ptr") or hasattr(value, "__cuda_array_interface__")
            if tensor or not hasattr(value, method):
                got = "a tensor" if tensor else type(value).__name__
                raise UsageError(f"{where}, got {got}: pass {wanted}")
            value = getattr(value, method)()
        if value < low or value > high:  # which NaN is not
            raise UsageError(f"{where}, which cannot hold {value}")
        return value

    return convert


def _current_stream() -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # 0.2 us instead of 4 us a call; what Triton's launcher asks too, but no public name
        if raw := getattr(torch._C, "_cuda_getCurrentRawStream", None):  # noqa: SLF001
            return raw(torch.cuda.current_device())
        return torch.cuda.current_stream().cuda_stream
    cupy = sys.modules.get("cupy")
    return 0 if cupy is None else cupy.cuda.get_current_stream().ptr


def _cuda_error(status: int) -> str:
    """Put a CUDA error into words: libcudart's own, which needs no GPU for that."""
    from cuda import pathfinder

    try:
        tell = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cudart").abs_path).cudaGetErrorString
    except (OSError, pathfinder.DynamicLibNotFoundError):
        return f"CUDA error {status}"
    tell.restype = ctypes.c_char_p
    return f"CUDA error {status}: {tell(status).decode()}"


class Kernels:
    """The launchers of one built .cu file, by name."""

    def __init__(self, source: str, text: str, library: Path | None) -> None:
        self._source = source
        self._library = library
        self._declared = declared(text)

    def __getitem__(self, name: str) -> Launcher:
        if name not in self._declared:
            known = ", ".join(self._declared) or "none"
            what = f"no launcher {name!r} in {self._source}"
            raise UsageError(f'{what}: its extern "C" functions are {known}')
        return Launcher(name, self._declared[name], self._source, self._library)

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)
