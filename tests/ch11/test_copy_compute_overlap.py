"""In chunks on three streams, the copy there, the product and the copy back run at the same time.

A GPU has engines of its own for copies in each direction, and PCIe carries both at once. Used in
turn (all rows there, one product, all rows back) two of the three always idle. Cut into chunks, and
dealt out to streams, they work side by side: while one chunk is multiplied the next one arrives and
the last one leaves. No events are needed within a stream, since its own order is the one that a
chunk needs; each stream's memory is used again by its own next chunk.

With two streams at most two of the three stages are at work; three are enough. The limit is sum
over maximum of the stages, 3x where they are equal, less one chunk's way in and out, and less what
the two directions take from each other. Host memory must be pinned. Chunks must be large enough to
fill copies and products (4 MiB here), and many enough that first and last do not count.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, prepared

CHUNKS = 16


def pinned_rows(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, width = bench.size(8192, check=64), bench.size(2048, check=16)
    rows = torch.randn(count, width, device=bench.device)
    weight = torch.randn(width, width, device=bench.device) * width**-0.5
    pinned = torch.empty_like(rows, device="cpu", pin_memory=True).copy_(rows)
    return pinned, weight, torch.empty_like(pinned, pin_memory=True)


def there_and_back(rows, weight, out):
    product = rows.to(weight.device, non_blocking=True) @ weight
    out.copy_(product, non_blocking=True)


def in_turn(rows, weight, out):
    there_and_back(rows, weight, out)
    torch.cuda.current_stream().synchronize()  # the host wants to read what arrives in its memory


def overlapped(count):
    def make(*_):
        streams = [torch.cuda.Stream() for _ in range(count)]

        def run(rows, weight, out):
            here = torch.cuda.current_stream()
            for stream in streams:
                stream.wait_stream(here)
            chunks = zip(rows.chunk(CHUNKS), out.chunk(CHUNKS), strict=True)
            for i, (part, answer) in enumerate(chunks):
                with torch.cuda.stream(streams[i % count]):
                    there_and_back(part, weight, answer)
            for stream in streams:
                here.wait_stream(stream)
            here.synchronize()

        return run

    return prepared(make)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["two_streams", "three_streams"])
def test_copy_compute_overlap(compare: Compare, rung: str) -> None:
    compare(
        baseline=in_turn,
        optimized=overlapped(2 if rung == "two_streams" else 3),
        inputs=pinned_rows,
        reference=lambda rows, weight, out: rows.to(weight.device).double() @ weight.double(),
        metric="wall",
    )
