"""Splitting the cache among blocks lets a single request use the whole GPU.

Attention is usually parallel over sequences, heads and blocks of queries. While one text is being
decoded there is one query a head, and keys and values are shared by groups of heads: 8 blocks for
132 multiprocessors, each of which fetches 33 MB on its own. Splitting the cache gives 512 blocks.
Each leaves the mean of its values, its largest score and its sum of weights, and a second, tiny
kernel merges them; a softmax over parts is exact.

The baseline is the same kernel with one part a head: that shows what splitting gives, but nobody
has to start there. PyTorch's attention, the library arm, splits the cache as well, and is about an
eighth faster. The cache is read once in every arm, so the limit is its bytes over the memory's
bandwidth; as long as that is far off, time falls with the number of blocks. Batches bring blocks of
their own: from some 64 key heads and sequences on, nothing is gained, and short caches do not repay
the second kernel.
"""

from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.ch18 import split_kv
from pytest_aiperf import Bench, Compare, Work, evidence

Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cache(bench: Bench) -> Cache:
    """Make the query of each head, and what 65536 tokens left in the cache."""
    heads, length = bench.size(8, check=2), bench.size(65536 - 40, check=200)
    kind = {"device": bench.device, "dtype": torch.float16}  # the interpreter is wrong in bf16
    k, v = torch.randn(2, heads, length, 128, **kind)
    return 3 * torch.randn(heads, 4, 128, **kind), k, v


def library(q, k, v):
    queries = q.view(1, -1, 1, q.shape[2])
    out = scaled_dot_product_attention(queries, k[None], v[None], enable_gqa=True)
    return out.view_as(q)


def in_fp64(q, k, v):
    weights = torch.softmax(q.double() @ k.double().mT * q.shape[2] ** -0.5, 2)
    return weights @ v.double()


def test_split_kv_decode(compare: Compare) -> None:
    compare(
        baseline=partial(split_kv.attend, parts=1),
        optimized=partial(split_kv.attend, parts=64),
        library=library,
        against="naive",
        inputs=cache,
        work=lambda q, k, v: Work(2 * k.nbytes, 4 * q.shape[1] * k.numel(), "fp16", q.nbytes),
        reference=in_fp64,
        evidence=[
            evidence.spills(kernel="_part"),
            evidence.kernels(most=2),
            evidence.counter("launch__grid_size", least=2 * 132),
            evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        ],
    )
