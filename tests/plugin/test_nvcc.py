"""Builds are keyed by content and published atomically, even when several processes race."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aiperf.build import nvcc as nvcc_module
from pytest_aiperf.build.nvcc import BuildRequest, Nvcc, build, build_parallel, nvcc_calls
from pytest_aiperf.errors import BuildError, UsageError
from pytest_aiperf.machine import process_group
from pytest_aiperf.machine.cache_folder import is_tagged

SCALE = """
#include "factor.h"
__global__ void scale_kernel(const float* a, float* out, int n) {
  __shared__ float tile[64];
  int i = blockIdx.x * 64 + threadIdx.x;
  tile[threadIdx.x] = i < n ? a[i] : 0;
  __syncthreads();
  if (i < n) out[i] = FACTOR * tile[63 - threadIdx.x];
}
extern "C" cudaError_t scale(const float* a, float* out, int n, cudaStream_t stream) {
  scale_kernel<<<(n + 63) / 64, 64, 0, stream>>>(a, out, n);
  return cudaGetLastError();
}
"""
ARCHS = ("sm90", "sm100", "sm103", "sm121")


@pytest.fixture
def source(tmp_path):
    """A kernel with a header, in a folder with a space in its name."""
    folder = tmp_path / "my kernels"
    folder.mkdir()
    (folder / "factor.h").write_text("#define FACTOR 2.0f\n")
    (folder / "scale.cu").write_text(SCALE)
    return folder / "scale.cu"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Set a temporary folder as the default build cache."""
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_nvcc(tmp_path, monkeypatch):
    """A compiler that counts its runs and executes the shell lines of the test."""

    def make(lines, release="99.9"):
        script = tmp_path / "nvcc"
        script.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then echo "release {release}"; exit; fi\n'
            f"echo run >> {tmp_path}/runs\n{lines}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("CUDACXX", str(script))
        nvcc_module.find_nvcc.cache_clear()
        return lambda: len((tmp_path / "runs").read_text().split())

    yield make
    nvcc_module.find_nvcc.cache_clear()


def published(cache):
    return [p for p in cache.iterdir() if p.is_dir() and p.name != "locks"]


# the real compiler


def test_a_build_has_its_launcher_and_the_output_of_ptxas(source, cache):
    built = build(source, "sm90", cache=cache)
    assert ctypes.CDLL(str(built.path)).scale
    assert built.arch == "sm_90a"
    assert built.source == source
    (kernel,) = built.kernels
    assert kernel.function == "scale_kernel(float const*, float*, int)"
    assert kernel.registers >= 8
    assert (kernel.spill_bytes, kernel.shared_bytes) == (0, 256)
    assert kernel.source == str(source)
    assert "sm_90a" in built.log
    assert (cache.stat().st_mode & 0o777, len(published(cache))) == (0o700, 1)
    assert is_tagged(built.path.parent)
    assert is_tagged(cache / "locks")


def test_four_architectures_build_in_parallel_beside_one_that_cannot(source, cache):
    bad = source.with_name("-bad.cu")
    bad.write_text('extern "C" int f(cudaStream_t stream) {\n  return nonsense;\n}\n')
    requests = [BuildRequest(source, arch) for arch in ARCHS] + [
        BuildRequest(bad, "sm90"),
        BuildRequest(bad, "sm90", ("-x",)),
    ]
    steps = []
    *four, broken, refused = build_parallel(requests, progress=lambda *step: steps.append(step))
    assert [b.arch for b in four] == ["sm_90a", "sm_100a", "sm_103a", "sm_121a"]
    assert len({b.path for b in four}) == 4
    assert [(done, total) for done, total, _ in steps] == [(i, 6) for i in range(1, 7)]
    assert isinstance(refused, UsageError)

    assert isinstance(broken, BuildError)
    head, why, command = str(broken).splitlines()
    assert head == f"nvcc could not build {bad} for sm_90a"
    assert why == f'{bad}(2): error: identifier "nonsense" is undefined'
    assert shlex.split(command)[-1] == str(bad)
    assert len(published(cache)) == 4


def test_racing_processes_publish_one_build(source, cache):
    script = (
        "import sys; from pathlib import Path; from pytest_aiperf.build.nvcc import build\n"
        "print(build(sys.argv[1], 'sm90', cache=Path(sys.argv[2])).path)"
    )
    command = [sys.executable, "-c", script, str(source), str(cache)]
    env = {**os.environ, "PYTHONPATH": str(Path(nvcc_module.__file__).parents[2])}
    racers = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    paths = {racer.communicate()[0] for racer in racers}
    assert paths == {f"{published(cache)[0] / 'library.so'}\n"}
    assert len(published(cache)) == 1


# the build cache

WRITES = 'while [ "$1" != -o ]; do shift; done; echo library > "$2"'


def test_a_cached_build_is_not_compiled_again(source, cache, fake_nvcc):
    runs = fake_nvcc(WRITES)
    first = build(source, "sm90", cache=cache)
    copy = source.with_name("copy.cu")
    copy.write_bytes(source.read_bytes())
    assert build(source, "sm90", cache=cache) == first
    assert build(copy, "sm90", cache=cache).path == first.path
    assert runs() == 1


@pytest.mark.parametrize("how", ["header", "deep header", "source", "flags", "arch", "nvcc", "env"])
def test_everything_that_determines_the_build_determines_the_entry(
    how, source, cache, fake_nvcc, monkeypatch
):
    runs = fake_nvcc(WRITES)
    include = source.parent / "include"
    (include / "deep").mkdir(parents=True)
    (include / "deep" / "er.h").write_text("")
    source.with_name("factor.h").write_text("#include <deep/er.h>\n#include <vector>\n")
    first = build(source, "sm90", include=[include], cache=cache)
    arch, flags = "sm90", ()
    if how == "header":
        source.with_name("factor.h").write_text("#include <deep/er.h>\n#define FACTOR 3.0f\n")
    elif how == "deep header":
        (include / "deep" / "er.h").write_text("#define DEEPER\n")
    elif how == "source":
        source.write_text(SCALE + "// more\n")
    elif how == "flags":
        flags = ("-DN=4",)
    elif how == "nvcc":
        fake_nvcc(WRITES, release="99.10")
    elif how == "env":
        monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DN=5")
    else:
        arch = "sm100"
    second = build(source, arch, include=[include], flags=flags, cache=cache)
    assert second.path != first.path
    assert runs() == 2


@pytest.mark.parametrize(
    "torn", ["record.json", "library.so", "other record", "missing record", "missing library"]
)
def test_an_incomplete_entry_is_built_again(torn, source, cache, fake_nvcc):
    runs = fake_nvcc(WRITES)
    first = build(source, "sm90", cache=cache)
    if torn.startswith("missing"):
        name = "record.json" if torn.endswith("record") else "library.so"
        first.path.with_name(name).unlink()
    elif torn == "other record":  # of another version of this plugin
        first.path.with_name("record.json").write_text('{"bytes": 8}')
    else:
        whole = first.path.with_name(torn)
        whole.write_bytes(whole.read_bytes()[:4])
    assert build(source, "sm90", cache=cache) == first
    assert first.path.read_text() == "library\n"
    assert json.loads(first.path.with_name("record.json").read_text())["size"] == 8
    assert runs() == 2
    assert len(published(cache)) == 1


def test_threads_of_one_process_compile_once(source, cache, fake_nvcc, monkeypatch):
    runs = fake_nvcc(f"sleep 0.2; {WRITES}")
    monkeypatch.setattr(nvcc_module.os, "sched_getaffinity", lambda _: range(4))
    built = build_parallel([BuildRequest(source, "sm90")] * 4)
    assert len(set(built)) == 1
    assert runs() == 1


def test_leftovers_of_a_killed_run_are_cleared(source, cache, fake_nvcc):
    fake_nvcc(WRITES)
    built = build(source, "sm90", cache=cache)
    key = built.path.parent.name
    built.path.unlink()
    (cache / f"{key}.new" / "tmp").mkdir(parents=True)
    build(source, "sm90", cache=cache)
    assert [p.name for p in published(cache)] == [key]


def test_a_source_edited_while_it_compiles_is_compiled_again(source, cache, fake_nvcc):
    edit = f'echo "// $(wc -l < {source.parent.parent}/runs)" >> "{source}"'
    runs = fake_nvcc(f"[ $(wc -l < {source.parent.parent}/runs) = 1 ] && {edit}\n{WRITES}")
    built = build(source, "sm90", cache=cache)
    assert runs() == 2
    assert build(source, "sm90", cache=cache) == built
    assert runs() == 2
    assert len(published(cache)) == 1


def test_a_cache_that_cannot_be_written_is_named(source, tmp_path, fake_nvcc):
    fake_nvcc(WRITES)
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match=r"cannot build .*PYTEST_AIPERF_CACHE moves it"):
        build(source, "sm90", cache=tmp_path / "file" / "cache")


def test_the_cache_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_AIPERF_CACHE", str(tmp_path))
    assert nvcc_module.default_cache() == tmp_path
    monkeypatch.delenv("PYTEST_AIPERF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert nvcc_module.default_cache() == Path("/somewhere/pytest-aiperf")


# compilers that fail


def alive(pid):
    """Whether a process still runs, after up to a minute for a killed one to end."""
    for _ in range(6_000):
        try:
            if "(zombie)" in Path(f"/proc/{pid}/status").read_text():
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.01)
    return True


def test_a_compiler_that_hangs_is_killed_with_its_children(
    source, cache, fake_nvcc, tmp_path, monkeypatch
):
    fake_nvcc(f"sleep 60 & : > {tmp_path}/child.$!; wait")
    calls = []

    def monotonic():  # the deadline passes as soon as the compiler has a child process
        calls.append(None)
        return 1000.0 if len(calls) > 1 and any(tmp_path.glob("child.*")) else 0.0

    monkeypatch.setattr(process_group, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(nvcc_module, "DEADLINE_S", 0.1)
    with pytest.raises(BuildError, match=r"did not build .* within 0.1 s\n.*-gencode"):
        build(source, "sm90", cache=cache)
    assert published(cache) == []
    (child,) = tmp_path.glob("child.*")
    assert not alive(child.suffix[1:])


def test_a_compiler_that_dies_halfway_publishes_nothing(source, cache, fake_nvcc):
    fake_nvcc(f"echo compiling\n{WRITES}\nkill -SEGV $$")
    with pytest.raises(BuildError, match=r"compiling\nnvcc ended with status -11\n"):
        build(source, "sm90", cache=cache)
    assert published(cache) == []


def test_the_first_five_errors_are_shown(source, cache, fake_nvcc):
    fake_nvcc(
        'for i in 1 2 3 4 5 6 7; do echo "note $i"; echo "x.cu($i): error: e$i"; done; exit 2'
    )
    with pytest.raises(BuildError) as caught:
        build(source, "sm90", cache=cache)
    assert str(caught.value).splitlines()[1:-1] == [f"x.cu({i}): error: e{i}" for i in range(1, 6)]


def test_a_build_can_be_stopped(source, cache, fake_nvcc):
    fake_nvcc("sleep 60")
    stop = threading.Event()
    stop.set()
    with pytest.raises(BuildError, match="the build was stopped"):
        build(source, "sm90", cache=cache, stop=stop)
    assert published(cache) == []


def test_ctrl_c_ends_every_compiler(source, cache, fake_nvcc, tmp_path, monkeypatch):
    fake_nvcc(f'case "$*" in *sm_90a*) {WRITES};; *) : > {tmp_path}/slow.$$; exec sleep 60;; esac')

    def interrupted(*_):
        while not any(tmp_path.glob("slow.*")):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(nvcc_module.os, "sched_getaffinity", lambda _: range(2))
    requests = [
        BuildRequest(source, "sm90"),
        BuildRequest(source, "sm100"),
        BuildRequest(source, "sm103"),
    ]
    with pytest.raises(KeyboardInterrupt):
        build_parallel(requests, progress=interrupted)
    assert not any(alive(slow.suffix[1:]) for slow in tmp_path.glob("slow.*"))
    assert len(published(cache)) == 1


# the toolchain


def test_without_nvcc_the_error_names_the_package(monkeypatch):
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda _: None)
    nvcc_module.find_nvcc.cache_clear()
    with pytest.raises(
        BuildError, match=r"no nvcc: install the extra pytest-aiperf\[toolchain\], or"
    ):
        nvcc_module.find_nvcc()


def test_cudacxx_comes_first_and_must_exist(fake_nvcc, tmp_path, monkeypatch):
    fake_nvcc("")
    assert nvcc_module.find_nvcc() == (str(tmp_path / "nvcc"), "release 99.9\n")
    monkeypatch.setenv("CUDACXX", "/nowhere/nvcc")
    nvcc_module.find_nvcc.cache_clear()
    with pytest.raises(BuildError, match="CUDACXX is '/nowhere/nvcc'"):
        nvcc_module.find_nvcc()


def test_an_nvcc_that_does_not_start_is_named(source, cache, fake_nvcc, tmp_path):
    fake_nvcc("")
    (tmp_path / "nvcc").write_bytes(b"for another processor")
    nvcc_module.find_nvcc.cache_clear()
    with pytest.raises(BuildError, match=r"^/\S+/nvcc does not start: .*Exec format error"):
        build(source, "sm90", cache=cache)


def test_a_toolkit_in_the_environment_comes_before_path(fake_nvcc, tmp_path, monkeypatch):
    fake_nvcc("")
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    named = (tmp_path / "nvcc").rename(tmp_path / "toolkit" / "bin" / "nvcc")
    monkeypatch.delenv("CUDACXX")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert nvcc_module.find_nvcc()[0] == str(named)


def test_a_pip_nvcc_gets_the_folder_of_its_libraries(
    source, cache, fake_nvcc, tmp_path, monkeypatch
):
    fake_nvcc(f"echo $*\n{WRITES}")
    root = tmp_path / "site-packages" / "nvidia" / "cu13"
    (root / "bin").mkdir(parents=True)
    nvcc = (tmp_path / "nvcc").rename(root / "bin" / "nvcc")
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    which = nvcc_module.shutil.which
    monkeypatch.setattr(
        nvcc_module.shutil, "which", lambda name, **k: which(name) if not k else None
    )
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda _: str(nvcc))
    assert f"-L{root / 'lib'}" in build(source, "sm90", cache=cache).log.split()


# flags and architectures

HOSTILE = [
    "-ccbin=/tmp/x", "--compiler-bindir=x", "-Xcompiler=-fplugin=x", "-Xlinker=x", "-Xptxas=-v",
    "--run", "-run", "-o", "-o=x", "--options-file=x", "-optf", "@flags", "-include=x", "-include",
    "-isystem=x", "-L/tmp", "-lfoo", "-lm", "-keep", "--keep-dir=/tmp", "-dryrun",
    "--dryrun", "-D", "-DA=;id", "-DA=$(id)", "-DA=`id`", '-DA="x"', "-DA=b,c", "-DA=b\u00a0c",
    "-std=c++11", "-O4", "-O", "-maxrregcount=", "-maxrregcount=a", "-rdc=false", "-rdc",
    "-gencode=x", "-arch=sm_80", "x.cu", "-lcuda;id", "-M", "-MF=x", "-E", "-c", "-ptx", "-x=cu",
    "--version", "-Wno-x", "-UFOO", "-odir=/", "-time=x", "-G", "-pg", "-DA=../x",
]  # fmt: skip


@pytest.mark.parametrize("flag", [*HOSTILE, "", " -O2", "-O2\n", "-DA=1\n", "-O2 -o x"])
def test_a_flag_outside_the_list_is_refused_and_nothing_is_created(flag, source, cache):
    with pytest.raises(UsageError, match=r"is not allowed; (use -\S.*|allowed are -O0 .*)$"):
        build(source, "sm90", flags=[flag], cache=cache)
    assert not cache.exists()


def test_the_nearest_allowed_flag_is_named(source, cache):
    with pytest.raises(UsageError, match=r"^nvcc flag '-std=c\+\+11' is not allowed; use -std="):
        build(source, "sm90", flags=["-std=c++11"], cache=cache)


def test_allowed_flags_reach_nvcc_and_replace_the_defaults(source, cache, fake_nvcc):
    fake_nvcc(f"echo $*\n{WRITES}")
    flags = ["-O1", "-std=c++20", "-DA", "-DB=1.5", "--use_fast_math", "-maxrregcount=32", "-lcuda"]
    flags += ["-rdc=true", "-lineinfo", "--extended-lambda", "--expt-relaxed-constexpr"]
    flags += ["-use_fast_math"]
    words = build(source, "sm_100f", flags=flags, cache=cache).log.split()
    assert set(flags) <= set(words)
    assert "-gencode=arch=compute_100f,code=sm_100f" in words
    assert not {"-O3", "-std=c++17"} & set(words)
    assert words.count("-lineinfo") == 1


def test_folders_of_headers_are_searched_and_their_headers_belong_to_the_build(
    source, cache, fake_nvcc, tmp_path, monkeypatch
):
    fake_nvcc(f"echo $*\n{WRITES}")
    monkeypatch.chdir(tmp_path)
    headers = [
        source.parent / "beside" / "a.h",
        tmp_path / "here" / "b.h",
        tmp_path / "pkg" / "c.h",
    ]
    for header in headers:
        header.parent.mkdir()
        header.write_text("")
    source.write_text("".join(f"#include <{header.name}>\n" for header in headers))
    monkeypatch.setattr(nvcc_module, "_package_headers", {"cutlass": str(tmp_path / "pkg")}.get)
    fixture = Nvcc([source.parent], ["sm90"], load=False)
    for header in (None, *headers):  # a changed header is built anew
        if header is not None:
            header.write_text("// changed")
        fixture("scale.cu", ["-Ibeside", "-Ihere", "-Icutlass"])
    assert len({b.path for b in fixture.used}) == 4
    assert " ".join(f"-I{header.parent}" for header in headers) in fixture.used[-1].log
    assert fixture.sources == [source, *headers[:2]]  # a package's headers are not the claim's code
    with pytest.raises(UsageError, match=r"'-Iabsent': there is no such folder in .* no installed"):
        fixture("scale.cu", ["-Iabsent"])


def test_headers_of_packages_are_known_by_name():
    assert nvcc_module._package_headers("no_such_headers") is None
    for name in ("cutlass", "cccl"):
        assert (found := nvcc_module._package_headers(name)) is None or Path(found).is_dir()


def test_flags_are_a_list(source, cache):
    with pytest.raises(UsageError, match=r'flags as a list: nvcc\("scale.cu", \["-O2"\]\)'):
        Nvcc([source.parent], ["sm90"])("scale.cu", flags="-O2")


@pytest.mark.parametrize("arch", ["hopper", "sm_90a,code=x", "compute_90", "sm90 ", ""])
def test_an_unknown_architecture_is_refused(arch, source):
    with pytest.raises(UsageError, match="is not an architecture"):
        build(source, arch)


# the value of the fixture `nvcc`


def test_nvcc_finds_builds_and_records_a_source(source, cache, fake_nvcc, tmp_path):
    fake_nvcc(WRITES)
    nvcc = Nvcc([tmp_path / "none", source.parent], ARCHS, load=False)
    kernels = nvcc("scale.cu")
    assert [b.arch for b in nvcc.used] == ["sm_90a", "sm_100a", "sm_103a", "sm_121a"]
    nvcc("scale.cu")
    assert len(nvcc.used) == 4
    assert nvcc.sources == [source, source.with_name("factor.h")]
    with pytest.raises(UsageError, match=r"argument 1 'a' of scale\(\) is float\*, got int: "):
        kernels["scale"](1, 2, 3)


def test_nvcc_lists_the_folders_it_searched(tmp_path):
    with pytest.raises(
        UsageError, match=rf"no ch99/x.cu in these folders: {tmp_path}/a, {tmp_path}/b"
    ):
        Nvcc([tmp_path / "a", tmp_path / "b"], ["sm90"])("ch99/x.cu")


def test_a_similar_name_is_offered(source):
    nvcc = Nvcc([source.parent], ["sm90"])
    with pytest.raises(UsageError, match=r"there is no scael.cu in .*; did you mean scale.cu\?"):
        nvcc("scael.cu")


def test_nvcc_raises_the_error_of_the_build(source, cache, fake_nvcc):
    fake_nvcc("exit 1")
    nvcc = Nvcc([source.parent], ["sm90"])
    with pytest.raises(BuildError, match="could not build"):
        nvcc("scale.cu")
    assert nvcc.used == []


def test_calls_are_read_from_a_test_module_without_running_it():
    text = textwrap.dedent("""
        raise SystemExit
        def test_a(nvcc, rung):
            a = nvcc("ch07/copy.cu")["vector"]
            b = nvcc("ch07/copy.cu", flags=["-DN=4"])
            c = nvcc("ch06/x.cu", ("-O2",)), nvcc("ch07/copy.cu")
            d = nvcc(f"{rung}.cu"), nvcc("y.cu", flags=rung), other("z.cu"), nvcc.used, nvcc()
            e = nvcc("y.cu", None), nvcc("y.cu", flags=[rung])
            # nvcc("no.cu")
    """)
    assert sorted(nvcc_calls(text)) == [
        ("ch06/x.cu", ("-O2",)),
        ("ch07/copy.cu", ()),
        ("ch07/copy.cu", ("-DN=4",)),
    ]
