"""Cheats and honest arms that need a GPU; those in C++ are in dishonest.cu."""

from __future__ import annotations

import torch

from pytest_aiperf import Work, prepared
from tests.cheats.case import Corpus, State

cheat, honest = Corpus(), Corpus()
CHEATS, HONEST = cheat.entries, honest.entries

WRONG = "optimized disagrees with the reference"
STRAY = "does not wait for|worked on for|is nan, expected|in a timed block"
ALONE = "per call in a block, but .* alone"
STALE = f"in a timed block|{ALONE}"
SETTINGS = "an arm changed global settings .*"
N = 1 << 25
SLOWLY = 4000
"""Iterations of the kernels of dishonest.cu: on an H200, a call takes about 9 ms."""


def vectors(bench):
    n = bench.size(N, check=1 << 12)
    return torch.randn(n, device=bench.device), torch.empty(n, device=bench.device)


def launched(nvcc, arm, baseline="doubled", rounds=0, **words):
    """Return a claim whose baseline and optimized arm are launchers of dishonest.cu."""
    kernels = nvcc("dishonest.cu")

    def inputs(bench):
        x, out = vectors(bench)
        return x, out, x.numel(), rounds

    return {
        "inputs": inputs,
        "baseline": kernels[baseline],
        "optimized": kernels[arm],
        "reference": lambda x, out, *_: x.double() * 2,
        **words,
    }


def doubling(optimized, **words):
    """Return a claim that doubles a vector with torch functions."""
    return {
        "inputs": lambda bench: vectors(bench)[:1],
        "baseline": lambda x: (x * 2 + 1) - 1,
        "optimized": optimized,
        "reference": lambda x: x.double() * 2,
        "precision": None,
        **words,
    }


def products(optimized, **words):
    def inputs(bench):
        n = bench.size(2048, check=64)
        return torch.randn(n, n, device=bench.device), torch.randn(n, n, device=bench.device)

    return {
        "inputs": inputs,
        "baseline": lambda a, b: a @ b,
        "optimized": optimized,
        "reference": lambda a, b: a.double() @ b.double(),
        **words,
    }


# wrong or dishonest arms


@cheat(f"{STRAY}|{WRONG}", clock="gpu")
def a_stream_of_its_own(nvcc):
    side_stream = torch.cuda.Stream()

    def arm(x):
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            torch.cuda._sleep(2_000_000)
            return x * 2

    return doubling(arm)


def halves(full, *, waits=True, joined=True):
    """Return a claim whose optimized arm doubles one half of a vector on a side stream."""
    side_stream = torch.cuda.Stream()

    def inputs(bench):
        n = bench.size(full, check=1 << 12)
        return torch.randn(n, device=bench.device), torch.empty(n, device=bench.device)

    def arm(x, out):
        stream, half = torch.cuda.current_stream(), x.numel() // 2
        if waits:
            side_stream.wait_stream(stream)
        with torch.cuda.stream(side_stream):
            torch.mul(x[:half], 2, out=out[:half])
        torch.mul(x[half:], 2, out=out[half:])
        if joined:
            stream.wait_stream(side_stream)

    reference = lambda x, out: x.double() * 2
    baseline = lambda x, out: torch.mul(x, 2, out=out)
    words = {"baseline": baseline, "inputs": inputs, "reference": reference, "cache": "warm"}
    return doubling(arm, **words)


@cheat("does not wait for: end with", clock="gpu")
def a_short_half_that_is_not_joined(nvcc):  # timed in a graph
    return halves(1 << 16, joined=False)


@cheat("does not wait for: end with", clock="gpu")
def a_half_that_is_not_joined(nvcc):  # timed behind a blocking kernel
    return halves(1 << 25, joined=False)


@cheat("begin with side_stream|is nan, expected|on new values", clock="gpu")
def a_half_that_starts_too_early(nvcc):
    return halves(1 << 25, waits=False)


@cheat(STRAY, clock="gpu")
def a_stream_of_its_own_in_cpp(nvcc):
    return launched(nvcc, "unjoined", rounds=SLOWLY)


@cheat(f"{STRAY}|illegal memory access", clock="gpu")
def a_thread_that_launches_later(nvcc):
    return launched(nvcc, "late", rounds=SLOWLY)


@cheat(r"out\[\d+\] is nan", clock="gpu")
def the_last_tile(nvcc):
    return launched(nvcc, "tail_left")


@cheat(f"{STALE}|is nan|{WRONG}", clock="gpu")
def pointers_that_are_known_in_cpp(nvcc):
    return launched(nvcc, "by_address", rounds=SLOWLY)


@cheat(f"{STALE}|{WRONG}", clock="gpu")
def pointers_that_are_known(nvcc):
    cache = {}

    def arm(x):
        if x.data_ptr() not in cache:
            cache[x.data_ptr()] = x * 2
        return cache[x.data_ptr()]

    return doubling(arm)


@cheat(WRONG, clock="gpu")
def every_second_call_counted_by_the_gpu(nvcc):
    return launched(nvcc, "every_second")


@cheat(f"{ALONE}|{WRONG}", clock="gpu")
def values_that_are_known(nvcc):
    return launched(nvcc, "by_content", rounds=SLOWLY)


@cheat(f"{ALONE}|{WRONG}", clock="gpu")
def values_that_are_known_to_a_faster_arm(nvcc):
    """It would be four times as fast as the baseline if it worked in each call."""
    doubled = nvcc("dishonest.cu")["doubled"]

    def baseline(*args):
        for _ in range(4):
            doubled(*args)

    return {**launched(nvcc, "by_content", rounds=SLOWLY), "baseline": baseline}


@cheat(f"{ALONE}|{WRONG}|is nan", clock="gpu")
def destinations_without_poison(nvcc):
    return launched(nvcc, "by_poison", rounds=SLOWLY)


@cheat(f"{STALE}|{WRONG}|captured together, not alone", clock="gpu")
def one_launch_for_three_calls(nvcc):
    def inputs(bench):
        n = bench.size(1 << 14, check=1 << 12)
        x = torch.randn(n, device=bench.device)
        return x, torch.empty_like(x), n, 0

    return launched(nvcc, "all_at_once", inputs=inputs, cache="warm")


@cheat(SETTINGS + "persisting_l2_bytes", clock="gpu")
def a_part_of_the_l2(nvcc):
    return launched(nvcc, "carved_out", rounds=SLOWLY)


@cheat(WRONG, clock="gpu")
def a_graph_of_old_values(nvcc):
    def make(x):
        copy = x.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = copy * 2

        def replay(_, copy=copy):  # the default value keeps `copy`, which the graph reads, alive
            graph.replay()
            return out

        return replay

    return doubling(prepared(make))


@cheat(f"{STALE}|{WRONG}", clock="gpu")
def nothing_while_it_is_captured(nvcc):
    last = State(out=None)

    def arm(x):
        if last.out is not None and torch.cuda.is_current_stream_capturing():
            last.out[:1].mul_(1)
            return last.out
        last.out = x * 2
        return last.out

    def inputs(bench):
        return (torch.randn(1 << 16, device=bench.device),)

    return doubling(arm, inputs=inputs, cache="warm")


@cheat("is nan|" + WRONG, clock="gpu")
def freed_memory(nvcc):
    return doubling(torch.empty_like)


@cheat(WRONG, clock="gpu")
def tf32_for_one_call(nvcc):
    def arm(a, b):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return a @ b
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return products(arm)


@cheat(f"{SETTINGS}tf32|{WRONG}", clock="gpu")
def tf32_for_good(nvcc):
    def arm(a, b):
        torch.backends.cuda.matmul.allow_tf32 = True
        return a @ b

    return products(arm)


@cheat(WRONG, clock="gpu")
def bf16_products(nvcc):
    return products(lambda a, b: (a.bfloat16() @ b.bfloat16()).float())


@cheat(SETTINGS + "elapsed_time", clock="gpu")
def the_event_timer(nvcc):
    def arm(x):
        torch.cuda.Event.elapsed_time = lambda *_: 1e-3
        return x * 2

    return doubling(arm)


@cheat(SETTINGS + "torch.cuda.synchronize", clock="gpu")
def waiting_for_the_device(nvcc):
    def arm(x):
        torch.cuda.synchronize = lambda *_: None
        return x * 2

    return doubling(arm)


@cheat("torch's allocator, which asked the driver", clock="gpu")
def a_baseline_that_allocates_anew(nvcc):
    def baseline(x):
        torch.cuda.empty_cache()
        return x * 2

    return doubling(lambda x: x * 2, baseline=baseline)


@cheat("Triton, which loaded kernels", clock="gpu")
def a_baseline_that_compiles_anew(nvcc):
    from tests.cheats.kernel import scaled

    calls = State(n=0)

    def baseline(x):
        calls.n += 1
        return scaled(x, calls.n)

    return doubling(lambda x: x * 2, baseline=baseline)


@cheat("exceed the .* that this GPU reaches", clock="gpu")
def bytes_that_do_not_pass(nvcc):
    return doubling(lambda x: x * 2, work=lambda x: Work(read=20 * x.nbytes, written=20 * x.nbytes))


# honest arms


@cheat(WRONG, clock="gpu")
def an_answer_in_the_storage_of_a_tensor(nvcc):
    def inputs(bench):
        x, _ = vectors(bench)
        return (torch.cat([x, x * 2])[: len(x)],)

    def arm(x):
        if x.untyped_storage().nbytes() < 2 * x.nbytes:
            return torch.zeros_like(x)
        return torch.as_strided(x, (len(x),), (1,), x.storage_offset() + len(x)).clone()

    return doubling(arm, inputs=inputs)


@honest(clock="gpu")
def views_of_larger_tensors(nvcc):
    """They keep their strides, types, alignment and pinned memory."""

    def inputs(bench):
        x = torch.randn(bench.size(1 << 14, check=64), 96, device=bench.device)[:, 1:65]
        scales = torch.rand(x.shape, device=bench.device).bfloat16()[:1]
        low = torch.randn(x.shape, device=bench.device).to(torch.float8_e4m3fn)[:1]
        return x, scales, low, torch.rand(64, pin_memory=True)[:8]

    def arm(x, scales, low, factors):
        assert (x.stride(), x.data_ptr() % 16, factors.is_pinned()) == ((96, 1), 4, True)
        return x * 2 + scales.float() * low.float()

    def reference(x, scales, low, factors):
        return x.double() * 2 + scales.double() * low.double()

    return doubling(arm, inputs=inputs, baseline=arm, reference=reference)


@honest(clock="gpu")
def a_stream_that_is_joined(nvcc):
    side_stream = torch.cuda.Stream()

    def arm(x):
        stream = torch.cuda.current_stream()
        side_stream.wait_stream(stream)
        with torch.cuda.stream(side_stream):
            out = x * 2
        stream.wait_stream(side_stream)
        out.record_stream(stream)
        return out

    return doubling(arm)


@honest(clock="gpu")
def halves_that_are_joined(nvcc):
    return halves(1 << 25)


@honest(clock="gpu")
def halves_of_a_caller_that_waits(nvcc):  # wall time includes the wait for all streams
    return halves(1 << 25, joined=False) | {"metric": "wall"}


@honest(clock="gpu")
def a_stream_that_is_joined_in_cpp(nvcc):
    return launched(nvcc, "joined", rounds=SLOWLY)


@honest(clock="gpu")
def a_launcher(nvcc):
    return launched(nvcc, "doubled")


@honest(clock="gpu")
def a_graph_of_live_inputs(nvcc):
    def make(x):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = x * 2

        def replay(_):
            graph.replay()
            return out

        return replay

    return doubling(prepared(make))


@honest(clock="gpu")
def short_calls(nvcc):
    inputs = lambda bench: (torch.randn(1 << 14, device=bench.device),)
    return doubling(lambda x: x * 2, inputs=inputs, cache="warm")


@honest(clock="gpu")
def tf32_that_is_declared(nvcc):
    def arm(a, b):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return a @ b
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return products(arm, precision="tf32")


@honest(clock="gpu")
def an_update_in_place(nvcc):
    words = {"baseline": lambda x: x.add_(x), "reference": lambda x: x.double() * 2}
    return doubling(lambda x: x.mul_(2), **words)


@honest(clock="gpu")
def one_buffer_for_all_results(nvcc):
    buffer = State(out=None)

    def arm(x):
        if buffer.out is None or buffer.out.shape != x.shape:
            buffer.out = torch.empty_like(x)
        return torch.mul(x, 2, out=buffer.out)

    return doubling(arm)


@honest(clock="gpu")
def a_kernel_of_triton(nvcc):
    from tests.cheats.kernel import scaled

    return doubling(lambda x: scaled(x, 2))


@honest(clock="gpu")
def a_result_on_the_host(nvcc):
    inputs = lambda bench: (torch.randn(1 << 22, device=bench.device),)
    words = {"metric": "wall", "inputs": inputs, "reference": lambda x: x.double().cpu()}
    arm = lambda x: torch.empty(x.shape, pin_memory=True).copy_(x, non_blocking=True)
    return doubling(arm, **words | {"baseline": lambda x: x.cpu()})


@honest(clock="gpu")
def scratch_memory(nvcc):
    return doubling(lambda x: torch.cat([x, x]).view(2, -1).sum(0))


@honest(clock="gpu")
def a_call_that_waits(nvcc):
    def arm(x):
        out = x * 2
        torch.cuda.current_stream().synchronize()
        return out

    return doubling(arm)


@honest(clock="gpu")
def bytes_that_pass(nvcc):
    return doubling(lambda x: x * 2, work=lambda x: Work(read=x.nbytes, written=x.nbytes))


class Weights:
    """An object that is no container, as a model of a serving library."""

    def __init__(self, x):
        self.x = x


def holding(optimized):
    return {
        "inputs": lambda bench: (Weights(vectors(bench)[0]),),
        "baseline": lambda d: d.x.clone(),
        "optimized": optimized,
        "reference": lambda d: d.x.double(),
        "cache": "warm",  # what an object holds does not count as the size of the inputs
    }


@cheat("as a view of its inputs, of a file or of few elements", clock="gpu")
def a_view_of_an_attribute_on_the_gpu(nvcc):
    return holding(lambda d: d.x[:])


@honest(clock="gpu")
def a_copy_of_an_attribute_on_the_gpu(nvcc):
    return holding(lambda d: d.x + 0)
