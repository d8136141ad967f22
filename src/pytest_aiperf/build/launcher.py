"""Call the extern "C" launchers of a CUDA source from Python, with tensors and numbers."""

import ctypes
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_aiperf.errors import BuildError, LaunchError, NeedsGpu, UsageError

Convert = Callable[[Any, bool], Any]
"""Checks an argument and converts it to a value for ctypes; the flag allows tensors on the CPU."""
Signature = tuple[str, str]  #: Return type and parameter list of a C function, as in the source.
_INTEGER_WORDS: Final = {"char", "short", "int", "long", "unsigned", "signed"}
_QUALIFIERS: Final = {"const", "volatile", "__restrict__", "__restrict", "restrict", "struct"}
_DTYPES: Final = {
    "bool": "bool", "float": "float32", "double": "float64", "size_t": "uint64",
    "half": "float16", "__half": "float16", "nv_bfloat16": "bfloat16", "__nv_bfloat16": "bfloat16",
    "__nv_fp8_e4m3": "float8_e4m3fn", "__nv_fp8_e5m2": "float8_e5m2",
}  # fmt: skip


def declared(text: str) -> dict[str, Signature]:
    """Find the ``extern "C"`` host functions of a CUDA source; macros are not expanded."""
    signatures = {}
    for head in _heads(_code_only(text)):
        function = re.search(r"([\w:]+[\s*]+)(\w+)\s*\(([^()]*)\)\s*(?:noexcept\s*)?$", head)
        if function and not re.search(r"\b(__global__|__device__|static)\b", head):
            returns, name, parameters = function.groups()
            signatures[name] = ("".join(returns.split()), " ".join(parameters.split()))
    return signatures


def _code_only(text: str) -> str:
    """Replace comments, directives and contents of literals by spaces: they may contain braces."""
    from pygments.lexers.c_cpp import CppLexer  # imported late: few claims need it
    from pygments.token import Comment, String

    def is_code(kind: Any, value: str) -> bool:
        if kind in String:
            return value in ('"', "C")  # the "C" of extern "C" stays
        # pygments marks the code in `#if 0` as a bare Comment; keep it, as if it were compiled
        return kind is Comment or kind not in Comment

    tokens = CppLexer(stripnl=False, ensurenl=False).get_tokens(text)
    return "".join(value if is_code(kind, value) else " " for kind, value in tokens)


def _heads(text: str) -> Iterator[str]:
    """Yield the text before the body of each function declared extern "C", singly or in a block."""
    c_blocks: list[bool] = []  # for each open brace: whether it opens an extern "C" block
    start = 0
    for mark in re.finditer(r'extern\s*"C"\s*\{|[{};]', text):
        head, start = text[start : mark.start()], mark.end()
        if mark[0] == "}":
            c_blocks = c_blocks[:-1]  # pop() could fail: #if and #else may close the same brace
        elif mark[0] != ";":
            if mark[0] == "{" and ('"C"' in head or (c_blocks and all(c_blocks))):
                yield head
            c_blocks.append(mark[0] != "{")


def _parameter(text: str) -> tuple[str, str]:
    """Split a parameter into its type without qualifiers and its name, which may be ""."""
    text = re.sub(r"\[[^\]]*\]", "*", text.partition("=")[0]).replace("std::", "")
    tokens = [t for t in re.findall(r"[\w:]+|[*&]", text) if t not in _QUALIFIERS]
    words = [t for t in tokens if t not in "*&"]
    pointers = "".join(t for t in tokens if t in "*&")
    named = len(words) > 1 and words[-1] not in _INTEGER_WORDS
    return " ".join(words[:-1] if named else words) + pointers, words[-1] if named else ""


def _dtype(ctype: str) -> str | None:
    """Return the name that torch and numpy give a C number type; None for any other type."""
    words = ctype.split()
    if words and set(words) <= _INTEGER_WORDS:
        sizes = {"char": 8, "short": 16, "long": 64}
        bits = next((b for word, b in sizes.items() if word in words), 32)
        return f"{'u' if 'unsigned' in words else ''}int{bits}"
    if re.fullmatch(r"u?int(8|16|32|64)_t", ctype):
        return ctype.removesuffix("_t")
    return _DTYPES.get(ctype)


def _pointee_dtypes(ctype: str) -> frozenset[str]:
    """Return the tensor dtypes that a pointer to ``ctype`` accepts; an empty set means any."""
    dtype = _dtype(ctype) or _dtype(re.sub(r"[1234]$", "", ctype))  # a float4 holds floats
    # torch supports few operations on unsigned types, so signed tensors are accepted too
    return frozenset({dtype, dtype.removeprefix("u")} if dtype else ())


class Launcher:
    """An ``extern "C"`` function of a .cu file as an arm, called with tensors and numbers."""

    needs_gpu: Final = True

    def __init__(self, name: str, signature: Signature, source: str, library: Path | None) -> None:
        """Refuse a signature that Python cannot call; without a ``library``, a call raises."""
        returns, parameters = signature
        self.name: Final = name
        self.text: Final = f"{returns} {name}({parameters})"
        self._returns = returns
        self.source = source
        self._library = library
        *arguments, (stream, _) = map(_parameter, parameters.split(","))
        if stream not in ("cudaStream_t", "CUstream"):
            raise UsageError(
                f"{name}() must take a cudaStream_t as its last parameter, so that it runs on the "
                f"stream that is timed: {self.text}"
            )
        if returns not in ("void", "int", "cudaError_t"):
            raise UsageError(f"{name}() must return cudaError_t, int or void: {self.text}")
        converters = [
            _converter(f"argument {number} {parameter!r} of {name}() is {ctype}", ctype)
            for number, (ctype, parameter) in enumerate(arguments, 1)
        ]
        self._converts = [convert for convert, _ in converters]
        self._argtypes = [*(kind for _, kind in converters), ctypes.c_void_p]

    def __call__(self, *args: Any) -> None:
        """Launch on the current stream of torch or, if torch does not use the GPU, of cupy.

        Args:
            args: The function's arguments without the stream: tensors on the GPU for pointers, and
                Python numbers.

        Raises:
            UsageError: The arguments do not fit the parameters: number, type, range or strides.
            BuildError: The library does not load.
            LaunchError: The function returned a CUDA error.

        """
        if self._library is None:
            self.check(*args)
            raise NeedsGpu(f"{self.name}() is built, but its results can only be checked on a GPU")
        self._check_count(args)
        self._refuse_unknown_strides(args)
        function = self._function
        values = [convert(arg, False) for convert, arg in zip(self._converts, args, strict=True)]
        if status := function(*values, _current_stream()):
            raise LaunchError(f"{self.name}() of {self.source}: {_cuda_error(status)}")

    def check(self, *args: Any) -> None:
        """Raise UsageError if a launch with these arguments, on the GPU, would be refused."""
        self._check_count(args)
        self._refuse_unknown_strides(args)
        for convert, arg in zip(self._converts, args, strict=True):
            convert(arg, True)

    def _check_count(self, args: Sequence[object]) -> None:
        if len(args) != len(self._converts):
            raise UsageError(
                f"{self.name}() takes {len(self._converts)} arguments (the stream is added to "
                f"them), not {len(args)}: {self.text}"
            )

    def _refuse_unknown_strides(self, args: Sequence[object]) -> None:
        """Refuse a tensor whose layout the function cannot know.

        It can know the distance of rows if that is an argument. An n x n tensor with swapped axes
        has the stride n, which looks like its size, so it is always refused.
        """
        numbers = {arg for arg in args if type(arg) is int}
        for number, arg in enumerate(args, 1):
            is_contiguous = getattr(arg, "is_contiguous", None)
            if is_contiguous is None or is_contiguous():
                continue
            strides: Sequence[int] = arg.stride()  # type: ignore[attr-defined]
            if strides[-1] != 1 or not numbers.intersection(strides[:-1]):
                raise UsageError(
                    f"argument {number} of {self.name}() is a tensor with the strides "
                    f"{tuple(strides)}, which a pointer does not carry: pass it .contiguous(), or "
                    f"pass the distance of its contiguous rows as well: {self.text}"
                )

    @functools.cached_property
    def _function(self) -> Any:
        try:
            function = getattr(ctypes.CDLL(str(self._library)), self.name)
        except OSError as error:
            raise BuildError(f"{self.source} is built but does not load: {error}") from error
        except AttributeError:
            problem = f"{self.name}() is in {self.source}, but an #if excluded it from this build"
            raise UsageError(problem) from None
        function.argtypes = self._argtypes
        function.restype = None if self._returns == "void" else ctypes.c_int
        return function


def _converter(where: str, ctype: str) -> tuple[Convert, Any]:
    """Return a converter for the arguments of a parameter, and the ctypes type it converts to."""
    if ctype.endswith("*"):
        return _pointer(where, _pointee_dtypes(ctype[:-1])), ctypes.c_void_p
    dtype = _dtype(ctype) or ""
    reals = {"float32": ctypes.c_float, "float64": ctypes.c_double}
    if dtype in reals:
        return _number(where, float, -math.inf, math.inf), reals[dtype]
    kind: Any = getattr(ctypes, f"c_{dtype}", None)
    if kind is None:
        raise UsageError(
            f"{where}, which Python cannot pass: use pointers, integers, floats or bool"
        )
    bits = 1 if dtype == "bool" else 8 * ctypes.sizeof(kind)
    low = -(1 << bits - 1) if dtype.startswith("int") else 0
    return _number(where, int, low, low + (1 << bits) - 1), kind


def _pointer(where: str, dtypes: frozenset[str]) -> Convert:
    accepted: set[object] = set()  # dtype objects: they hash faster than their names

    def convert(value: Any, on_cpu: bool) -> Any:
        if hasattr(value, "data_ptr"):
            # pinned host memory is allowed, because a kernel can access it
            if not (on_cpu or value.is_cuda or value.is_pinned()):
                raise UsageError(
                    f"{where}, got a tensor in CPU memory: allocate it on bench.device"
                )
            address = value.data_ptr()
        elif hasattr(value, "__cuda_array_interface__"):
            address = value.data.ptr
        else:
            raise UsageError(f"{where}, got {type(value).__name__}: pass a tensor on the GPU")
        if value.dtype not in accepted:
            if dtypes and str(value.dtype).removeprefix("torch.") not in dtypes:
                raise UsageError(f"{where}, got {value.dtype}")
            accepted.add(value.dtype)
        return address

    return convert


def _number(where: str, exact: type, low: float, high: float) -> Convert:
    method, kind = ("__index__", "an int") if exact is int else ("__float__", "a number")

    def convert(value: Any, _on_cpu: bool) -> Any:
        if type(value) is not exact:
            # a tensor of one element has __index__ too, but calling it would synchronize
            is_tensor = hasattr(value, "data_ptr") or hasattr(value, "__cuda_array_interface__")
            if is_tensor or not hasattr(value, method):
                got = "a tensor" if is_tensor else type(value).__name__
                raise UsageError(f"{where}, got {got}: pass {kind}")
            value = getattr(value, method)()
        if value < low or value > high:  # both are false for NaN, which is allowed
            raise UsageError(f"{where}, which cannot hold {value}")
        return value

    return convert


def _current_stream() -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # this private function, which Triton calls too, takes 0.2 us; the public one takes 4 us
        if raw := getattr(torch._C, "_cuda_getCurrentRawStream", None):  # noqa: SLF001
            return raw(torch.cuda.current_device())
        return torch.cuda.current_stream().cuda_stream
    cupy = sys.modules.get("cupy")
    return 0 if cupy is None else cupy.cuda.get_current_stream().ptr


def _cuda_error(status: int) -> str:
    """Describe a CUDA error with libcudart's own text, which needs no GPU."""
    from cuda import pathfinder

    try:
        cudart = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cudart").abs_path)
    except (OSError, pathfinder.DynamicLibNotFoundError):
        return f"CUDA error {status}"
    cudart.cudaGetErrorString.restype = ctypes.c_char_p
    return f"CUDA error {status}: {cudart.cudaGetErrorString(status).decode()}"


@functools.cache  # rungs of a ladder that use the same launcher share an arm, which is timed once
def _launcher(name: str, signature: Signature, source: str, library: Path | None) -> Launcher:
    return Launcher(name, signature, source, library)


class Kernels:
    """The ``extern "C"`` functions of one built .cu file, by name."""

    def __init__(self, source: str, text: str, library: Path | None, name: str = "") -> None:
        self.source = source
        self.name = name or Path(source).name  #: The file, as ``nvcc`` takes it.
        self._library = library
        self._declared = declared(text)

    def __getitem__(self, name: str) -> Launcher:
        """Return function ``name``; raise UsageError if it is missing or Python cannot call it."""
        if name not in self._declared:
            if not self._declared:
                raise UsageError(
                    f'{self.source} has no extern "C" function: write extern "C" cudaError_t '
                    f"{name}(..., cudaStream_t stream), which launches the kernel"
                )
            names = ", ".join(self._declared)
            raise UsageError(
                f'no launcher {name!r} in {self.source}: its extern "C" functions are {names}'
            )
        return _launcher(name, self._declared[name], self.source, self._library)

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)
