"""Scoring the vocabulary in bf16 and the candidates in fp32 picks fp32's tokens sooner than TF32.

Greedy decoding needs the token with the largest logit, so precision matters only where logits are
close. In fp32 the product with the output matrix runs on the regular units and is bound by their
arithmetic: PyTorch's default, but not good practice. On tensor cores it is bound by reading the
matrix: four bytes per weight in TF32, two in bf16. Neither is sure to return the fp32 token: its
error may exceed the distance of the first two.

Rounded logits have a known bound on their error, the rounding unit times the norms of the factors.
Tokens further below the largest logit than twice the bound cannot win. All others are computed
again from the fp32 weights, in one kernel that reads the logits and only the rows it needs. Close
logits cost more rows, and never a wrong token. bf16's bound is four times TF32's, so it has more
candidates, but among 131072 tokens few come close.

"tf32" is compared with fp32, a naive baseline, and "bf16" with "tf32", which shares all the rest.
The inputs have 16 competitors per sequence, whose logits fall with the logarithm of their rank, as
frequencies of words do: steeply for some sequences and hardly for others. So no sequence has more
than 16 candidates; a model's logits have no such cap. Their hidden states also have a smaller
cosine with the best row than these (0.25), so that the bound is wider relative to the logits. How
many rows are read again is not reported. The bf16 copy adds half of the matrix's memory. The limit
is the ratio of bytes, 2x. There is less to gain where many sequences share the matrix, so that
arithmetic binds, or where logits are flat, so that many rows are read again.
"""

import pytest
import torch

from kernels.ch19 import exact_tokens
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

COMPETITORS = 16
ARMS = {
    "fp32": exact_tokens.fp32,
    "tf32": prepared(exact_tokens.tf32),
    "bf16": prepared(exact_tokens.bf16),
}
BASELINES = {"tf32": "fp32", "bf16": "tf32"}
EVIDENCE = {
    "tf32": evidence.counter(
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", max=0.05, per="baseline"
    ),
    "bf16": evidence.counter("dram__bytes.sum", max=0.65, per="baseline"),
}


def output_matrix(count: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of norm 1, the same for each seed, of which ``width`` are orthonormal; and those.

    New hidden states meet a matrix that stays, so it must not depend on the seed.
    """
    fixed = torch.Generator(device).manual_seed(1)
    options = {"device": device, "generator": fixed}
    weight = torch.nn.functional.normalize(torch.randn(count, width, **options))
    rows = torch.linalg.qr(torch.randn(width, width, **options)).Q
    weight[torch.randperm(count, **options)[:width]] = rows
    return weight, rows


def last_hidden(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw hidden states with 16 known leading logits: 16 - slope * ln(rank).

    Their tokens have orthonormal rows, so that the logits are these, up to rounding. The two
    largest differ by at least 0.0002, far more than the error of an fp32 product, but bf16 confuses
    some of them. All other logits are smaller.
    """
    count, width = bench.size(131072, check=1000), bench.size(4096, check=256)
    batch, device = bench.size(128, check=16), bench.device
    weight, rows = output_matrix(count, width, device)
    slope = 0.0003 + torch.empty(batch, 1, device=device).exponential_()
    logits = 16 - slope * torch.arange(1, COMPETITORS + 1, device=device).log()
    competitors = torch.rand(batch, width, device=device).argsort(1)[:, :COMPETITORS]
    hidden = (logits[:, None] @ rows[competitors])[:, 0]
    return hidden, static(weight)


def in_fp64(hidden, weight):
    parts = [hidden.double() @ rows.double().T for rows in weight.split(8192)]
    return torch.cat(parts, 1).argmax(1)


@pytest.mark.parametrize("rung", BASELINES)
def test_token_precision_switching(compare: Compare, rung: str) -> None:
    compare(
        baseline=ARMS[BASELINES[rung]],
        optimized=ARMS[rung],
        against="previous rung" if rung == "bf16" else "naive",
        inputs=last_hidden,
        work=lambda hidden, weight: Work(read=weight.nbytes / 2, written=8 * len(hidden)),
        reference=in_fp64,
        evidence=[EVIDENCE[rung]],
    )
