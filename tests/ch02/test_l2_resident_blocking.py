"""Filtering signals in chunks that fit the L2 cache beats running each pass over all signals.

A filter in the frequency domain takes several passes that no compiler fuses: a transform, a
product with the filter's response, a copy (cuFFT overwrites its input), the transform back, and a
scaling. Over 512 MiB of signals, each pass reads and writes device memory, because the L2 cache no
longer holds the beginning of an array when its end is written. Signals do not depend on each other,
so all passes can run for one chunk before the next chunk begins. What a pass writes is then still
in the L2 cache when the next one reads it; device memory only delivers the signals and takes the
results. Chunks also reuse their intermediate arrays, which otherwise take several times the memory
of the signals.

Both arms run the same operations as a CUDA graph, because launches of a hundred chunks from Python
would take longer than the kernels. The limit is what the L2 cache delivers: on an H200 about twice
the bandwidth of device memory. Chunks that are too large leave the cache; if they are too small,
kernels no longer fill the GPU, and their starts and ends become a larger part of the time. Where
passes can be fused into a kernel, that saves more, since the values stay in registers
(ch12/fusion_vs_graph).
"""

from functools import partial

import pytest
import torch
from torch.fft import irfft, rfft

from kernels.ch15.decoder import capture_graph
from pytest_aiperf import Bench, Compare, Work, evidence, prepared

ROWS = {"chunks_32mib": 2048, "chunks_16mib": 1024, "chunks_8mib": 512}
"""Signals of 16 KiB per chunk. The arrays of a chunk take about four times its size."""


def signals(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    n = bench.size(4096, check=60)
    x = torch.randn(bench.size(32768, check=2500), n, device=bench.device)
    return x, torch.randn(n, device=bench.device) * n**-0.5


def filtered(x, taps):
    return irfft(rfft(x) * rfft(taps), n=len(taps))


def in_chunks(rows, x, taps):
    out, response = torch.empty_like(x), rfft(taps)
    for part, result in zip(x.split(rows), out.split(rows), strict=True):
        spectrum = rfft(part)
        result.copy_(irfft(spectrum.mul_(response), n=len(taps)))
    return out


def captured(run, x, taps):
    """Capture the passes in a CUDA graph; on the CPU, run them as they are."""
    if not x.is_cuda:
        return run
    outputs = {}

    def step():
        outputs["out"] = None  # frees the result of the call before the capture
        outputs["out"] = run(x, taps)

    graph = capture_graph(step)

    def replay(_x, _taps):
        graph.replay()
        return outputs["out"]

    return replay


def circular_convolution(x, taps):
    """Convolve in fp64 as a product with the circulant matrix of the taps."""
    n = len(taps)
    i = torch.arange(n, device=x.device)
    circulant = taps.double()[(i[:, None] - i) % n]
    return torch.cat([part.double() @ circulant.T for part in x.split(8192)])


WHOLE = prepared(partial(captured, filtered))


@pytest.mark.parametrize("rung", ROWS)
def test_l2_resident_blocking(compare: Compare, rung: str) -> None:
    compare(
        baseline=WHOLE,
        optimized=prepared(partial(captured, partial(in_chunks, ROWS[rung]))),
        inputs=signals,
        work=lambda x, taps: Work(read=x.nbytes + taps.nbytes, written=x.nbytes),
        reference=circular_convolution,
        evidence=[evidence.counter("dram__bytes.sum", max=0.6, per="baseline")],
    )
