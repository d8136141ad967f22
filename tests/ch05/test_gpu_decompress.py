"""Sending compressed ids and decoding them on the GPU beats sending plain ids over PCIe.

Sorted ids (of documents, of neighbours in a graph) are stored as the gaps between them, four bits
each instead of 32: delta coding with bit packing, in frames that have their own start (frame of
reference). PCIe is the slowest link of their path to the GPU, and the compressed ids take an eighth
of its time. Decoding on the GPU adds little: one block unpacks a frame of 1024 gaps and computes
their prefix sum with warp shuffles, far faster than PCIe. (nvCOMP is a library of such codecs for
GPUs.)

In the baseline of "plain", the ids lie decoded in pinned memory and a single copy sends them: no
decoder on the CPU, however many cores it uses, delivers them faster than that. The gain is the
compression ratio, here 7.94 with the start of each frame, less the time of the decoding kernel. In
the baseline of "one_thread", the naive form, a C loop decodes on one core into pinned memory, in
slices; each slice's transfer overlaps the decoding of the next one. Frames must be independent, as
here by their own start, or blocks cannot decode in parallel. The data are drawn to fit four bits;
wider gaps gain less. There is no gain where the CPU needs the ids as well.
"""

import pytest
import torch

from kernels.ch05 import gap_codec
from pytest_aiperf import Bench, Compare, evidence, prepared

BASELINES = {
    "plain": (gap_codec.send_plain, "idiomatic"),
    "one_thread": (prepared(gap_codec.decode_on_cpu), "naive"),
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def frames(bench: Bench) -> Inputs:
    """Draw gaps; return the packed gaps, the frames' starts and the ids on the host, and a buffer.

    The full size is 128 MiB of ids. The few launches of a call take little of that time.
    """
    count, half = bench.size(32768, check=20), gap_codec.FRAME // 2
    gaps = torch.randint(0, 16, (count, half, 2), device=bench.device, dtype=torch.uint8)
    ids = gaps.flatten().cumsum(0, dtype=torch.int32).view(count, gap_codec.FRAME)
    starts = (ids[:, 0] - gaps[:, 0, 0]).int()
    packed = gaps[..., 0] | gaps[..., 1] << 4
    return on_host(packed), on_host(starts), on_host(ids), torch.empty_like(ids)


def on_host(x):
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


def prefix_sums(packed, starts, _ids, out):
    packed = packed.to(out.device)
    gaps = torch.stack([packed % 16, packed // 16], 2).flatten().long()
    return (starts[0].item() + gaps.cumsum(0)).view(out.shape)


@pytest.mark.parametrize("baseline", BASELINES)
def test_gpu_decompress(compare: Compare, baseline: str) -> None:
    call, against = BASELINES[baseline]
    compare(
        baseline=call,
        optimized=gap_codec.decode_on_gpu,
        against=against,
        inputs=frames,
        reference=prefix_sums,
        metric="wall",
        cache="warm",
        evidence=[
            evidence.copied_bytes("host to device", memory="pinned", max=0.13, per="baseline"),
            evidence.opcode("SHFL.UP", kernel="_decode"),  # the prefix sum
        ],
    )
