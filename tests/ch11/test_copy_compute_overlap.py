"""Overlapping the copies and products of chunks on several streams beats one stream without chunks.

A GPU has a copy engine per direction, and PCIe is full duplex. In one stream (copy all rows to the
device, multiply, copy all rows back) two of the three stages are always idle. When the rows are
split into chunks, the stages overlap: while one chunk is multiplied, the next is copied to the
device and the one before back to the host.

"two_streams" gives the chunks to two streams in turn, each with buffers of its own. Stream order is
the order that a chunk needs, so no events are required, but two streams keep at most two of the
three stages busy. "three_streams" has a stream per stage, and three buffers per direction. Events
order what the streams share: a product waits for its rows and for a free output buffer, a copy to
the device for the product that used its buffer, a copy back for the product.

The limit is the sum over the maximum of the stage times, 3x where they are equal and 2.75x here.
They are nearly equal because the products are in fp32 without TF32: on the tensor cores a product
takes a fraction of a copy's time, and the limit is about 2x, that of the copies in both directions.
Three things keep the gain below the limit. With "three_streams" the copies take longer in all (8 %
on an H200, 11 % on an H100), because they run in both directions at once. A few percent of the wall
time pass before and after the GPU's work. During the first and the last chunk only some stages
work. More chunks would shorten that, but 2048 rows make 128 tiles of 256 x 128, just enough for 132
SMs. With chunks of half as many rows, cuBLAS has to split the sum of each tile between two blocks
(split-K), and the host launches twice as much; no arm measures that. Host memory must be pinned.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, evidence, prepared

CHUNKS, BUFFERS = 16, 3


def pinned_rows(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, width = bench.size(32768, check=128), bench.size(2048, check=16)
    rows = torch.randn(count, width, device=bench.device)
    weight = torch.randn(width, width, device=bench.device) * width**-0.5
    pinned = torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows)
    return pinned, weight, torch.empty_like(pinned, pin_memory=True)


def one_stream(rows, weight, out):
    out.copy_(rows.to(weight.device, non_blocking=True) @ weight, non_blocking=True)
    torch.cuda.current_stream().synchronize()  # so that the host can read the result


def streams_and_buffers(stream_count, buffer_count, rows, weight):
    """Return streams, and buffers on the device for chunks of rows and of products."""
    shape = buffer_count, len(rows) // CHUNKS, rows.shape[1]
    buffers = [torch.empty(shape, device=weight.device) for _ in range(2)]
    return [torch.cuda.Stream() for _ in range(stream_count)], *buffers


def chunks(rows, out):
    return zip(rows.chunk(CHUNKS), out.chunk(CHUNKS), strict=True)


def fork(streams):
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())


def join(streams):
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.current_stream().synchronize()


def two_streams(rows, weight, _):
    streams, row_buffers, product_buffers = streams_and_buffers(2, 2, rows, weight)

    def run(rows, weight, out):
        fork(streams)
        for i, (chunk, out_chunk) in enumerate(chunks(rows, out)):
            with torch.cuda.stream(streams[i % 2]):
                row_buffers[i % 2].copy_(chunk, non_blocking=True)
                torch.mm(row_buffers[i % 2], weight, out=product_buffers[i % 2])
                out_chunk.copy_(product_buffers[i % 2], non_blocking=True)
        join(streams)

    return run


def three_streams(rows, weight, _):
    streams, row_buffers, product_buffers = streams_and_buffers(3, BUFFERS, rows, weight)
    copy_in, multiply, copy_out = streams
    # of the last chunk in each buffer; waiting for an event that was never recorded is no wait
    arrived, multiplied, returned = ([torch.cuda.Event() for _ in range(BUFFERS)] for _ in streams)

    def run(rows, weight, out):
        fork(streams)
        for i, (chunk, out_chunk) in enumerate(chunks(rows, out)):
            b = i % BUFFERS
            with torch.cuda.stream(copy_in):
                copy_in.wait_event(multiplied[b])
                row_buffers[b].copy_(chunk, non_blocking=True)
                arrived[b].record()
            with torch.cuda.stream(multiply):
                multiply.wait_event(arrived[b])
                multiply.wait_event(returned[b])
                torch.mm(row_buffers[b], weight, out=product_buffers[b])
                multiplied[b].record()
            with torch.cuda.stream(copy_out):
                copy_out.wait_event(multiplied[b])
                out_chunk.copy_(product_buffers[b], non_blocking=True)
                returned[b].record()
        join(streams)

    return run


# with the least fraction of the copies' time in which a product runs as well: the products take
# about as long as the copies in one direction
RUNGS = {"two_streams": (two_streams, 0.3), "three_streams": (three_streams, 0.6)}


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS)
def test_copy_compute_overlap(compare: Compare, rung: str) -> None:
    make, hidden = RUNGS[rung]
    compare(
        baseline=one_stream,
        optimized=prepared(make),
        inputs=pinned_rows,
        reference=lambda rows, weight, out: rows.to(weight.device).double() @ weight.double(),
        metric="wall",
        evidence=[evidence.overlap(of="copies", min=hidden)],
    )
