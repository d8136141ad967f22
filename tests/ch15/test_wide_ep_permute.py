"""A counting sort and a row scatter pack tokens by expert faster than a radix sort and a gather.

Before the all-to-all of expert parallelism, each token is copied once per chosen expert into a send
buffer sorted by expert. Packing (permute) also returns the rows per expert and the row of each pair
of token and expert, which the combine step needs. The shape is DeepSeek-V3's, 8 of 256 experts and
a width of 7,168: 8,192 bf16 tokens are 117 MB, their packed rows 940 MB. On an H200 the baseline
takes 554 µs, "read_once" 407 (1.36x) and "counting_sort" 321 (1.27x; 1.73x in all). The library arm
is torch.compile with 16-bit keys and a scatter. It takes 372 µs, so it is faster than "read_once";
"counting_sort" is 1.16x as fast as this arm.

The baseline is the usual chain of PyTorch operations, as in torchtitan: a stable argsort of the
chosen experts, the counts, the inverse permutation, and a gather of rows. Between two reads of a
row, the gather moves about 200 MB, four times the L2 cache, so many of the 8 reads come from DRAM.
"read_once" keeps the sort, but loads each row once and stores it to its 8 places. This scatter is
coalesced, because a row is 14 KB. The arm reads 0.23 times as many bytes from DRAM. By this ratio,
the gather reads 0.5 to 0.6 GB, and L2 serves the rest of 0.94 GB. The scatter takes 288 µs, about
155 less than the gather. "counting_sort" finds the places with two kernels: with only 256 keys,
histograms and prefix sums replace a radix sort, which makes 8 passes over 64-bit keys, and the
operations after it. The order stays stable. The two kernels take 25 µs instead of about 85 in 16
kernels, and the gaps between launches shrink by another 25 µs.

"quantized_in_copy" packs fp8 with a scale per 128 elements, as DeepSeek-V3 does. Its baseline
quantizes the tokens, not the packed rows, and packs the codes with the kernels of "counting_sort".
Quantizing while copying saves a write and a read of the codes, 0.12 of 0.72 GB: at most 1.20x. It
gains 1.18x (228 to 193 µs). torch.compile takes 389 µs: it quantizes in the scatter, once per
packed row. So this baseline is the better alternative.

"counting_sort" moves 3.3 TB/s and "quantized_in_copy" 3.1. They are 72 and 69 % of the limit, which
counts most writes at the read rate; the rate of writes alone was not measured. Nor were few tokens,
as in decode, where launches should bind, grouped GEMMs that gather their rows, and sending rows to
other GPUs without a packed copy (DeepEP).
"""

import pytest
import torch

from kernels.ch15 import expert_permute
from pytest_aiperf import Bench, Compare, Work, evidence

Tokens = tuple[torch.Tensor, torch.Tensor, int]


def tokens(bench: Bench) -> Tokens:
    """Draw the tokens, the experts that a router chose for each, and the number of experts."""
    count, width = bench.size(8192, check=67), bench.size(7168, check=384)
    experts, top = bench.size(256, check=40), 8
    x = torch.randn(count, width, device=bench.device, dtype=torch.bfloat16)
    # the largest sums of log popularity and Gumbel noise: drawn by popularity, all different
    popularity = 0.3 * torch.randn(experts, device=bench.device)
    noise = -torch.empty(count, experts, device=bench.device).exponential_().log()
    return x, (popularity + noise).topk(top).indices, experts


def tokens_and_dtype(bench: Bench) -> tuple[*Tokens, torch.dtype]:
    # the check casts to fp16: Triton's interpreter, which it uses, rounds to fp8 wrongly
    return *tokens(bench), torch.float8_e4m3fn if bench.full else torch.float16


def by_expert(x, experts, expert_count):
    """Look up the tokens of one expert at a time, without sorting."""
    chosen = [(experts == expert).nonzero() for expert in range(expert_count)]
    token, choice = torch.cat(chosen).unbind(1)
    positions = torch.empty_like(experts)
    positions[token, choice] = torch.arange(len(token), device=x.device)
    return x[token], torch.tensor([*map(len, chosen)], device=x.device), positions


def quantized_in_fp64(x, experts, expert_count, _dtype):
    """Divide the rows by their scales, without rounding to fp8."""
    rows, counts, positions = by_expert(x, experts, expert_count)
    groups = rows.view(len(rows), -1, expert_permute.GROUP)
    largest = torch.maximum(groups.amax(2), -groups.amin(2)).double()
    codes = groups * (expert_permute.E4M3_MAX / largest[..., None])
    return codes.flatten(1), largest / expert_permute.E4M3_MAX, counts, positions


def copied_rows(x, experts, _expert_count):
    """Count one read of the tokens and their experts, and each packed row and its position."""
    return Work(
        read=x.nbytes + experts.nbytes, written=experts.shape[1] * x.nbytes + experts.nbytes
    )


def quantized_rows(x, experts, _expert_count, _dtype):
    """Count 1 byte per element of a packed row, and 4 per scale."""
    packed = experts.shape[1] * x.numel()
    return Work(
        read=x.nbytes + experts.nbytes,
        written=packed + 4 * packed // expert_permute.GROUP + experts.nbytes,
    )


RUNGS = {
    "read_once": (
        expert_permute.index_chain,
        expert_permute.read_once,
        # one read per token instead of 8: 1/8, or 0.36 if the L2 cache served 3 of 4 repeated
        # reads; on an H200 0.23, the reads of the sort included
        [evidence.counter("dram__bytes_read.sum", max=0.4, per="baseline")],
    ),
    "counting_sort": (
        expert_permute.read_once,
        expert_permute.counting_sort,
        # the counts, the positions, the copy
        [evidence.kernels(max=3), evidence.counter("dram__bytes.sum", max=1.1, per="work")],
    ),
    "quantized_in_copy": (
        expert_permute.quantized_first,
        expert_permute.quantized_in_copy,
        [
            evidence.kernels(max=3),
            # 2 bytes per element of a token instead of 2 and 1 for its code (ncu empties the L2
            # cache between kernels): 0.66
            evidence.counter("dram__bytes_read.sum", max=0.75, per="baseline"),
            evidence.counter("dram__bytes.sum", max=1.1, per="work"),
        ],
    ),
}


@pytest.mark.gpu(features=("fp8",), cpu=True)
@pytest.mark.parametrize("rung", RUNGS)
def test_wide_ep_permute(compare: Compare, rung: str) -> None:
    baseline, optimized, evidence_of_rung = RUNGS[rung]
    is_fp8 = rung == "quantized_in_copy"
    compare(
        baseline=baseline,
        optimized=optimized,
        library=expert_permute.compiled_fp8 if is_fp8 else expert_permute.compiled,
        against="previous rung" if rung == "counting_sort" else "idiomatic",
        inputs=tokens_and_dtype if is_fp8 else tokens,
        work=quantized_rows if is_fp8 else copied_rows,
        reference=quantized_in_fp64 if is_fp8 else by_expert,
        evidence=evidence_of_rung,
    )
