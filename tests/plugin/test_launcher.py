"""Launchers accept exactly the arguments of their C function and name each wrong one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pytest_aiperf.build import launcher
from pytest_aiperf.build.launcher import Kernels
from pytest_aiperf.claim.ladder import identity
from pytest_aiperf.errors import BuildError, LaunchError, NeedsGpu, UsageError

ZOO = r"""
// extern "C" int commented(cudaStream_t stream) {}
/* extern "C" int commented_too(cudaStream_t stream) {} */
#define LAUNCH(name) \
  extern "C" int name(cudaStream_t stream) {}
extern "C" int prototype(int n, cudaStream_t stream);
const char* text = "extern \"C\" int quoted(cudaStream_t stream) { \" }";
const char* ptx = R"(extern "C" int raw() { )";
extern "C" __global__ void a_kernel(float* a) { a[0] = '{'; }
extern "C" cudaError_t single(
    const float* __restrict__ a, /* in */ float out[], // out
    int n = 1'000'000, cudaStream_t stream = 0) {
  if (n) { return cudaSuccess; }
}
extern "C" {
struct Ignored { int x; };
static int hidden(cudaStream_t stream) { return 0; }
__attribute__((visibility("default"))) void first(void* any, cudaStream_t) { { } }
int second(unsigned long long big, std::size_t size, bool flag, unsigned, CUstream stream) { }
}
int cpp(cudaStream_t stream) {}
extern "C" int no_stream(float* a) { }
extern "C" float bad_return(cudaStream_t stream) { }
extern "C" int by_value(dim3 grid, cudaStream_t stream) { }
"""


def test_extern_c_definitions_are_launchers():
    assert launcher.declared(ZOO) == {
        "single": (
            "cudaError_t",
            "const float* __restrict__ a, float out[], int n = 1'000'000, cudaStream_t stream = 0",
        ),
        "first": ("void", "void* any, cudaStream_t"),
        "second": (
            "int",
            "unsigned long long big, std::size_t size, bool flag, unsigned, CUstream stream",
        ),
        "no_stream": ("int", "float* a"),
        "bad_return": ("float", "cudaStream_t stream"),
        "by_value": ("int", "dim3 grid, cudaStream_t stream"),
    }


@pytest.mark.parametrize(
    ("text", "ctype", "name"),
    [
        ("const float* __restrict__ a", "float*", "a"),
        ("float out[]", "float*", "out"),
        ("int n = 1", "int", "n"),
        ("cudaStream_t", "cudaStream_t", ""),
        ("std::size_t size", "size_t", "size"),
        ("unsigned long long big", "unsigned long long", "big"),
        ("unsigned", "unsigned", ""),
        ("int& n", "int&", "n"),
        ("", "", ""),
    ],
)
def test_a_parameter_is_a_type_and_a_name(text, ctype, name):
    assert launcher._parameter(text) == (ctype, name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_stream", r"no_stream\(\) must take a cudaStream_t as its last parameter"),
        ("bad_return", r"bad_return\(\) must return cudaError_t, int or void: float bad_return"),
        ("by_value", r"argument 1 'grid' of by_value\(\) is dim3, which Python cannot pass"),
    ],
)
def test_a_function_that_python_cannot_call_is_refused_with_the_reason(name, why):
    with pytest.raises(UsageError, match=why):
        Kernels("zoo.cu", ZOO, None)[name]


def test_the_rungs_of_a_ladder_share_the_arm_that_is_a_launcher():
    built, again, other = (Kernels("zoo.cu", ZOO, Path(p)) for p in ("a.so", "a.so", "b.so"))
    assert identity(built["single"]) == identity(again["single"])
    assert identity(built["single"]) != identity(other["single"])


@pytest.mark.parametrize(
    ("ctype", "dtypes"),
    [
        ("const double", {"float64"}),
        ("__half", {"float16"}),
        ("half2", {"float16"}),
        ("__nv_bfloat16", {"bfloat16"}),
        ("__nv_bfloat162", {"bfloat16"}),
        ("float4", {"float32"}),
        ("float2", {"float32"}),
        ("int", {"int32"}),
        ("unsigned", {"uint32", "int32"}),
        ("uint32_t", {"uint32", "int32"}),
        ("long long", {"int64"}),
        ("std::int64_t", {"int64"}),
        ("char", {"int8"}),
        ("unsigned char", {"uint8", "int8"}),
        ("unsigned short int", {"uint16", "int16"}),
        ("bool", {"bool"}),
        ("__nv_fp8_e4m3", {"float8_e4m3fn"}),
        ("void", set()),
        ("struct Plan", set()),
        ("float*", set()),
    ],
)
def test_pointers_name_their_dtypes(ctype, dtypes):
    pointer, name = launcher._parameter(f"{ctype} *p")
    assert (pointer[-1], name) == ("*", "p")
    assert launcher._pointee_dtypes(pointer[:-1]) == dtypes


def tensor(dtype="torch.float32", *, cuda=True, pinned=False, at=64):
    return SimpleNamespace(
        dtype=dtype, is_cuda=cuda, is_pinned=lambda: pinned, data_ptr=lambda: at, __index__=0
    )


def cupy_array(dtype="float32", at=128):
    return SimpleNamespace(dtype=dtype, data=SimpleNamespace(ptr=at), __cuda_array_interface__={})


HOST = r"""
extern "C" int mix(const float* a, void* out, int n, unsigned char small, size_t big, float x,
                   bool flag, long long* seen, cudaStream_t stream) {
  seen[0] = (long long)a; seen[1] = (long long)out; seen[2] = n; seen[3] = small;
  seen[4] = (long long)big; seen[5] = (long long)(2 * x); seen[6] = flag;
  seen[7] = (long long)stream;
  return n < 0 ? -n : 0;
}
extern "C" void nothing(cudaStream_t stream) {}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Launchers of a library built by the host compiler, so that calls need no GPU."""
    folder = tmp_path_factory.mktemp("host")
    stub = folder / "host.cpp"
    stub.write_text("#include <cstddef>\ntypedef void* cudaStream_t;\n" + HOST)
    library = folder / "host.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, stub], check=True)
    return Kernels("host.cu", HOST, library)


def call(host, **changed):
    seen = (ctypes.c_longlong * 8)()
    given = {
        "a": tensor(), "out": cupy_array(), "n": 3, "small": 255, "big": 2**40, "x": 1.5,
        "flag": True, "seen": tensor("torch.int64", at=ctypes.addressof(seen)),
    }  # fmt: skip
    assert host["mix"](*(given | changed).values()) is None
    return list(seen)


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cupy", None)


def test_arguments_arrive_as_c_sees_them(host):
    assert call(host) == [64, 128, 3, 255, 2**40, 3, 1, 0]
    assert call(host, x=2, flag=0, out=tensor("torch.int8", cuda=False, pinned=True)) == [
        64, 64, 3, 255, 2**40, 4, 0, 0,
    ]  # fmt: skip
    assert host["nothing"]() is None


def test_numpy_numbers_are_numbers(host):
    assert call(host, n=np.int64(7), x=np.float32(0.5))[2:6] == [7, 255, 2**40, 1]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"a": tensor("torch.float16")}, "argument 1 'a' of mix() is float*, got torch.float16"),
        ({"a": cupy_array("float64")}, "argument 1 'a' of mix() is float*, got float64"),
        ({"a": tensor(cuda=False)}, "is float*, got a tensor in CPU memory: allocate it on bench."),
        ({"a": 3}, "argument 1 'a' of mix() is float*, got int: pass a tensor on the GPU"),
        ({"a": None}, "is float*, got NoneType: pass a tensor on the GPU"),
        ({"out": "x"}, "argument 2 'out' of mix() is void*, got str: pass a tensor on the GPU"),
        ({"n": tensor()}, "argument 3 'n' of mix() is int, got a tensor: pass an int"),
        ({"n": 2**31}, "argument 3 'n' of mix() is int, which cannot hold 2147483648"),
        ({"n": -(2**31) - 1}, "is int, which cannot hold -2147483649"),
        ({"n": 3.0}, "argument 3 'n' of mix() is int, got float: pass an int"),
        ({"small": 256}, "argument 4 'small' of mix() is unsigned char, which cannot hold 256"),
        ({"big": -1}, "argument 5 'big' of mix() is size_t, which cannot hold -1"),
        ({"x": "1"}, "argument 6 'x' of mix() is float, got str: pass a number"),
        ({"x": cupy_array()}, "argument 6 'x' of mix() is float, got a tensor: pass a number"),
        ({"flag": 2}, "argument 7 'flag' of mix() is bool, which cannot hold 2"),
    ],
)
def test_a_wrong_argument_is_named(host, changed, why):
    with pytest.raises(UsageError) as caught:
        call(host, **changed)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_arguments_are_checked_without_a_gpu():
    mix = Kernels("host.cu", HOST, None)["mix"]
    on_cpu = tensor(cuda=False)
    args = [on_cpu, on_cpu, 3, 255, 2**40, 1.5, True, tensor("torch.int64", cuda=False)]
    mix.check(*args)
    with pytest.raises(UsageError, match=r"argument 1 'a' of mix\(\) is float\*, got torch.int64"):
        mix.check(args[-1], *args[1:])
    with pytest.raises(UsageError, match=r"argument 3 'n' of mix\(\) is int, got float"):
        mix.check(*args[:2], 3.0, *args[3:])
    with pytest.raises(UsageError, match=r"mix\(\) takes 8 arguments .*, not 7"):
        mix.check(*args[1:])


@pytest.mark.parametrize(
    ("strides", "number", "is_refused"),
    [
        ((8, 1), 8, False),  # the distance of rows with a gap is an argument
        ((8, 1), 4, True),
        ((1, 8), 8, True),  # swapped axes: 8 is probably the size
        ((8, 2), 8, True),
    ],
)
def test_a_tensor_whose_layout_the_function_cannot_know_is_refused(strides, number, is_refused):
    source = 'extern "C" int scale(float* a, int n, cudaStream_t s) {}'
    scale = Kernels("scale.cu", source, None)["scale"]
    view = tensor(cuda=False)
    view.is_contiguous, view.stride = lambda: False, lambda: strides
    whole = tensor(cuda=False)
    whole.is_contiguous = lambda: True
    scale.check(whole, number)
    expected = pytest.raises(UsageError, match=r"argument 1 of scale\(\) .*\.contiguous\(\)")
    with expected if is_refused else nullcontext():
        scale.check(view, number)


@pytest.mark.parametrize("count", [0, 7, 9])
def test_a_wrong_number_of_arguments_shows_the_signature(host, count):
    with pytest.raises(
        UsageError, match=rf"mix\(\) takes 8 arguments .*, not {count}: int mix\(const"
    ):
        host["mix"](*[0] * count)


def test_a_cuda_error_is_described(host):
    with pytest.raises(LaunchError, match=r"mix\(\) of .*host.cu: .*(700|IllegalAddress)"):
        call(host, n=-700)


def test_the_stream_is_the_one_that_torch_or_cupy_uses(host, monkeypatch):
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 1,
        current_stream=lambda: SimpleNamespace(cuda_stream=11),
    )
    torch = SimpleNamespace(cuda=cuda, _C=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch", torch)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=22)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert call(host)[7] == 11
    torch._C._cuda_getCurrentRawStream = lambda device: 30 + device
    assert call(host)[7] == 31
    cuda.is_initialized = lambda: False
    assert call(host)[7] == 22


def test_the_same_function_is_the_same_arm():
    kernels = Kernels("host.cu", HOST, None)
    assert kernels["mix"] is kernels["mix"]
    assert kernels["mix"] is not kernels["nothing"]


def test_an_unknown_launcher_lists_the_known_ones(host):
    with pytest.raises(
        UsageError,
        match=r"no launcher 'mixx' in host\.cu: its extern .C. functions are mix, nothing",
    ):
        host["mixx"]
    assert "mix" in host
    assert "mixx" not in host
    assert list(host) == ["mix", "nothing"]
    assert (host["mix"].name, host["mix"].needs_gpu) == ("mix", True)


def test_a_file_without_launchers_says_how_to_write_one():
    kernels = Kernels("mangled.cu", "int twice(int n) { return 2 * n; }", None)
    with pytest.raises(
        UsageError, match=r'^mangled\.cu has no extern "C" function: write .*twice\('
    ):
        kernels["twice"]


def test_a_launcher_excluded_by_an_if_is_named(host):
    text = '#if 0\nextern "C" int gone(cudaStream_t s) {}\n#endif\n'
    with pytest.raises(UsageError, match=r"gone\(\) is in less.cu, but an #if excluded it"):
        Kernels("less.cu", text, host["mix"]._library)["gone"]()


def test_a_library_that_does_not_load_is_named(tmp_path):
    with pytest.raises(BuildError, match=r"host.cu is built but does not load: .*none.so"):
        Kernels("host.cu", HOST, tmp_path / "none.so")["nothing"]()


def test_without_a_gpu_nothing_is_loaded():
    with pytest.raises(
        NeedsGpu, match=r"nothing\(\) is built, but its results can only be checked on a GPU"
    ):
        Kernels("host.cu", HOST, None)["nothing"]()
