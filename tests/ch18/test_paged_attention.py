"""Attention that reads through the block table beats gathering the pages first.

A cache in pages has no holes, and no text must know its final length (ch15). But the pages of
a text are scattered, and PyTorch's attention wants one array a sequence. Gathering them reads the
whole cache and writes it, at the length of the longest text, for attention to read it again: three
passes and more, and the memory of a second cache, for every token. A kernel that looks up the page
of each key needs one pass. A page is a piece of contiguous memory, of 4 kB a head with 16 tokens
and 16 kB with 64, so that the lookup costs next to nothing.

By the bytes the limit is 3x, times the longest text over the mean. It ends where prompts are
processed: there arithmetic binds, and a gather is read by thousands of queries. Texts of very
different lengths leave some blocks running alone; those are split as well (split_kv_decode).
"""

import pytest
import torch

from kernels.ch18 import paged
from pytest_aiperf import Bench, Compare, Work, evidence

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def pool(page: int):
    def make(bench: Bench) -> State:
        """Make queries, pages of keys and values in random order, block table and lengths."""
        sequences, heads = bench.size(128, check=3), bench.size(8, check=2)
        longest = bench.size(4096, check=128)
        kind = {"device": bench.device, "dtype": torch.float16}  # the interpreter is wrong in bf16
        order = torch.randperm(sequences * longest // page, device=bench.device)
        keys, values = torch.randn(2, heads, len(order), page, 128, **kind)
        spread = torch.randperm(sequences, device=bench.device)  # the same lengths, in any order
        lengths = longest - spread * (longest // 2) // sequences
        q = 3 * torch.randn(sequences, heads, 4, 128, **kind)
        return q, keys, values, order.view(sequences, -1), lengths

    return make


def in_fp64(q, keys, values, table, lengths):
    out = torch.empty_like(q, dtype=torch.float64)
    for at, (pages, length) in enumerate(zip(table, lengths.tolist(), strict=True)):
        k, v = (x[:, pages].flatten(1, 2)[:, :length].double() for x in (keys, values))
        out[at] = torch.softmax(q[at].double() @ k.mT * q.shape[3] ** -0.5, 2) @ v
    return out


def traffic(q, keys, values, table, lengths):
    share = float(lengths.double().mean()) / (table.shape[1] * keys.shape[2])
    total = share * 2 * keys.nbytes
    # a key and its value are 4 D bytes, and 4 D operations for each query of their group
    return Work(total + 2 * q.nbytes, q.shape[2] * total, "fp16", q.nbytes)


@pytest.mark.parametrize("page", [16, 64])
def test_paged_attention(compare: Compare, page: int) -> None:
    compare(
        baseline=paged.gather,
        optimized=paged.in_place,
        inputs=pool(page),
        work=traffic,
        reference=in_fp64,
        evidence=[
            evidence.kernels(most=1),
            evidence.spills(kernel="_attend"),
            evidence.peak_memory(most=0.05, per="baseline"),
            evidence.counter("dram__bytes.sum", most=1.1, per="work"),
        ],
    )
