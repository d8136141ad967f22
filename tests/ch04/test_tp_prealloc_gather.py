"""Gathering shards into one tensor beats gathering into a list of tensors and concatenating.

In a tensor-parallel layer each rank computes its share of the rows and gathers the others. With
`all_gather` into a list, each layer allocates one tensor per rank, NCCL copies its result into
them, and `cat` copies them again. In "one_tensor", `all_gather_into_tensor` writes the shards in
rank order, which already is the concatenation: 48 launches instead of 96 save host time, and the
device avoids copies of a few megabytes per layer. "preallocated" also lets two buffers alternate
between the layers. It is judged against "one_tensor" and only required to be no slower, because
PyTorch's caching allocator makes an allocation cheap: what it saves is memory.

Weights are split by rows and activations kept as columns, so a shard is contiguous. Where the split
runs along the inner dimension, a copy is needed either way. The gain ends where the GEMM of a layer
takes longer than the host's work.
"""

import pytest
import torch
import torch.distributed as dist

from pytest_aiperf import Bench, Compare, evidence, prepared, static


def network(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    layers, width = bench.size(16, check=3), bench.size(4096, check=16)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    x = torch.randn(width, bench.size(256, check=8), **options)
    weights = torch.randn(layers, width, width, **options) * width**-0.5
    rows = width // dist.get_world_size()
    shard_weights = weights[:, dist.get_rank() * rows :][:, :rows].contiguous()
    return x, static(shard_weights)


def gather_list_and_cat(x, shard_weights):
    for weight in shard_weights:
        shard = torch.tanh(weight @ x)
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard)
        x = torch.cat(parts)
    return x


def one_tensor(x, shard_weights):
    for weight in shard_weights:
        gathered = torch.empty_like(x)
        dist.all_gather_into_tensor(gathered, torch.tanh(weight @ x))
        x = gathered
    return x


@prepared
def preallocated(x, shard_weights):
    buffers = torch.empty_like(x), torch.empty_like(x)

    def run(x, shard_weights):
        for layer, weight in enumerate(shard_weights):
            gathered = buffers[layer % 2]
            dist.all_gather_into_tensor(gathered, torch.tanh(weight @ x))
            x = gathered
        return x

    return run


def in_fp64(x, shard_weights):
    shards = [torch.empty_like(shard_weights) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, shard_weights)
    x = x.double()
    for weight in torch.cat(shards, 1):  # full weights: every rank runs the whole network
        x = torch.tanh(weight.double() @ x)
    return x


RUNGS = {
    "one_tensor": (
        gather_list_and_cat,
        one_tensor,
        "idiomatic",
        evidence.launches(max=0.8, per="baseline"),
    ),
    # only shards are allocated
    "preallocated": (
        one_tensor,
        preallocated,
        "previous rung",
        evidence.peak_memory(max=0.7, per="baseline"),
    ),
}


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("rung", RUNGS)
def test_tp_prealloc_gather(compare: Compare, rung: str) -> None:
    baseline, optimized, against, proof = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        against=against,
        inputs=network,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[proof],
    )
