"""Overlapping the copies and products of chunks on several streams beats one stream without chunks.

A GPU has a copy engine per direction, and PCIe is full duplex. In one stream (copy all rows to the
device, multiply, copy all rows back) two of the three stages are always idle. When the rows are
split into chunks that go to the streams in turn, the stages overlap: while one chunk is multiplied,
the next is copied to the device and the one before back to the host. Stream order is the order that
a chunk needs, so no events are required inside a stream.

Two streams keep at most two of the three stages busy; three streams are enough. The limit is the
sum over the maximum of the stage times, 3x where they are equal. The measured gain stays well below
it. One reason is in the trace: a chunk of 512 rows has too few tiles to fill the GPU, so cuBLAS
uses split-K with a reduction kernel per chunk. Pipeline fill and drain, and a PCIe link shared by
both directions, cost time as well. Host memory must be pinned, and there must be enough chunks that
the first and the last do not matter.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared

CHUNKS = 16


def pinned_rows(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, width = bench.size(8192, check=64), bench.size(2048, check=16)
    rows = torch.randn(count, width, device=bench.device)
    weight = torch.randn(width, width, device=bench.device) * width**-0.5
    pinned = torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows)
    return pinned, weight, torch.empty_like(pinned, pin_memory=True)


def copy_multiply_copy(rows, weight, out):
    product = rows.to(weight.device, non_blocking=True) @ weight
    out.copy_(product, non_blocking=True)


def one_stream(rows, weight, out):
    copy_multiply_copy(rows, weight, out)
    torch.cuda.current_stream().synchronize()  # so that the host can read the result


def overlapped(count):
    def make(*_):
        streams = [torch.cuda.Stream() for _ in range(count)]

        def run(rows, weight, out):
            current = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(current)
            chunks = zip(rows.chunk(CHUNKS), out.chunk(CHUNKS), strict=True)
            for i, (chunk, out_chunk) in enumerate(chunks):
                with torch.cuda.stream(streams[i % count]):
                    copy_multiply_copy(chunk, weight, out_chunk)
            for stream in streams:
                current.wait_stream(stream)
            current.synchronize()

        return run

    return prepared(make)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["two_streams", "three_streams"])
def test_copy_compute_overlap(compare: Compare, rung: str) -> None:
    compare(
        baseline=one_stream,
        optimized=overlapped(2 if rung == "two_streams" else 3),
        inputs=pinned_rows,
        reference=lambda rows, weight, out: rows.to(weight.device).double() @ weight.double(),
        metric="wall",
        # the products take about 2/3 of the copies' time; at least half of that is hidden
        evidence=[evidence.overlap(of="copies", min=0.3)],
    )
