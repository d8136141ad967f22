"""A counting sort and a row scatter pack tokens by expert faster than a radix sort and a gather.

Before the all-to-all of expert parallelism, each token is copied once per chosen expert into a send
buffer sorted by expert. Packing (permute) also returns the rows per expert and the row of each pair
of token and expert, which the combine step needs. The shape is DeepSeek-V3's, 8 of 256 experts and
a width of 7,168: 8,192 bf16 tokens are 117 MB, their packed rows 940 MB. The baseline is the usual
chain of PyTorch operations, as in torchtitan: a stable argsort of the chosen experts, the counts,
the inverse permutation, and a gather of rows. The gather passes over the tokens once per expert.
Between two reads of a row it moves about 200 MB, several times the L2 cache, so most of a row's 8
reads come from DRAM: up to 1.88 GB in all.

"read_once" keeps the sort, but loads each row once and stores it to its 8 places: 1.06 GB. Such a
scatter is coalesced, because a row is 14 KB. It makes the copy at most 1.78x as fast.
"counting_sort" finds the places with two kernels: with only 256 keys, histograms and prefix sums
replace a radix sort, which makes 8 passes over 64-bit keys, and the operations after it. The order
stays stable. "quantized_in_copy" packs fp8 with a scale per 128 elements, as DeepSeek-V3 does. Its
baseline quantizes the tokens, not the packed rows, and packs the codes with the kernels of
"counting_sort". Quantizing while copying saves a write and a read of the codes, 0.12 of 0.72 GB: at
most 1.2x. That fp8 moves 0.60 GB instead of bf16's 1.06 GB is no part of this gain.

The library arms are torch.compile with 16-bit keys (2 passes of the sort) and a scatter, with which
it fuses the quantization. They too read a token from DRAM once, or twice in fp8. The limit is the
bandwidth of writes. With few tokens, as in decode, launches bind, and the rows stay in the L2
cache. The experts' popularity (lognormal, sigma 0.3) changes the order but not the bytes. There is
no all-to-all here. Sending rows to other GPUs without a packed copy (DeepEP) and grouped GEMMs that
gather their rows were not measured.
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
        # one read per token instead of 8: 1/8, or 0.36 if the L2 cache served 3 of 4 repeated reads
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
