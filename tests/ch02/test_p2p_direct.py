"""Sending a tensor to another GPU over NVLink beats staging it in pinned host memory.

A process keeps a layer's activations on one GPU, and the next layer is on another: 256 MiB go there
and as much comes back, as in a model that is split over the GPUs of one process. "staged" is the
only way where GPUs cannot reach each other: each transfer is a copy to pinned host memory and a
second one from there. So 256 MiB cross PCIe four times, one after the other. At 55 GB/s that is 20
ms, and on two H200s it takes 20. In "direct" one GPU writes into the other's memory (peer access),
as PyTorch's `copy_` does by default. It takes 1.6 ms. In a trace the copies take 1.37 ms and the
layer between them 0.13. Over the NVLink of an H200, a copy in one direction reaches 392 GB/s, and
copies in both directions at once 773 GB/s together, so the limit of the copies is 1.4 ms.

Two processes do that at the same time, one per GPU, so both directions of each link are in use.
Nothing waits on the host in any arm: events between the streams of the GPUs order the copies. The
library arm is what an expert writes without peer access: it stages each transfer in 16 chunks, so
that while one GPU reads a chunk from host memory, the other writes the next. By the bytes, it could
take half as long as "staged". On two H200s it takes 16 ms, 0.8 of it: the copies overlap in part
only, and in the trace they reach 46 GB/s on average. The comparison does not hold for GPUs that are
connected by PCIe alone, where direct copies cross it once instead of twice.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from pytest_aiperf import Bench, Compare, evidence, prepared

CHUNKS = 16
"""Chunks per transfer, of 16 MiB: long enough for the rate of PCIe, short beside the transfer."""


def activations(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw what this rank sends; make room for what comes back."""
    torch.manual_seed(bench.seed * 100 + dist.get_rank())
    x = torch.randn(bench.size(2**26, check=1000), device=bench.device)
    return x, torch.empty_like(x)


def on_next_gpu(x):
    """Return an empty tensor like ``x`` on the next GPU; without GPUs, on the CPU."""
    if not x.is_cuda:
        return torch.empty_like(x)
    return torch.empty_like(x, device=f"cuda:{(x.device.index + 1) % dist.get_world_size()}")


def wait(waiting, other):
    """Let the stream of a tensor's GPU wait for the stream of another tensor's."""
    if waiting.is_cuda:
        stream = torch.cuda.current_stream(waiting.device)
        stream.wait_stream(torch.cuda.current_stream(other.device))


def through_host(chunks, x, _out):
    host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
    remote = on_next_gpu(x)

    def send(source, target):
        parts = zip(source.chunk(chunks), host.chunk(chunks), target.chunk(chunks), strict=True)
        for sent, buffer, received in parts:
            buffer.copy_(sent, non_blocking=True)
            wait(target, source)
            received.copy_(buffer, non_blocking=True)

    def run(x, out):
        send(x, remote)
        remote.relu_()
        send(remote, out)

    return run


@prepared
def direct(x, _out):
    remote = on_next_gpu(x)

    def run(x, out):
        remote.copy_(x)
        remote.relu_()
        out.copy_(remote)

    return run


@pytest.mark.gpu(count=2)
def test_p2p_direct(compare: Compare) -> None:
    compare(
        baseline=prepared(partial(through_host, 1)),
        optimized=direct,
        library=prepared(partial(through_host, CHUNKS)),
        inputs=activations,
        reference=lambda x, out: x.clamp(min=0),
        metric="wall",
        cache="warm",  # makes no difference: the copies are many times the L2 capacity
        evidence=[
            evidence.copied_bytes("device to host", max=0),
            evidence.copied_bytes("host to device", max=0),
        ],
    )
