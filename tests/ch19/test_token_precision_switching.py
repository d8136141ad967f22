"""Scoring the vocabulary in bf16, and only the leading tokens again in fp32, gives the fp32 tokens.

Greedy decoding wants the token with the largest logit, and needs accuracy only where the first few
are close. The bf16 copy of the output matrix halves the bytes and reaches the tensor cores, which
fp32 products do not use; its errors, about a sixteenth at logits of 16, swap the first two tokens
where their margin is smaller. So the four best are scored again with rows of the fp32 matrix: 512
rows at most instead of 32768. The tokens are those of fp32, exactly.

That holds as long as the fp32 winner is among the four, that is, no more than three others lie
within bf16's error of it; a fifth that comes so close calls for more of them. The bf16 copy takes
half the matrix's memory again. For one sequence, the limit is the ratio of bytes, 2x; for many,
that of the arithmetic.
"""

import torch

from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

LEADING = 4


def last_hidden(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Make hidden states whose best two tokens are known, many of them close together."""
    count, width = bench.size(32768, check=1000), bench.size(4096, check=256)
    batch = bench.size(128, check=16)
    weight = torch.nn.functional.normalize(torch.randn(count, width, device=bench.device))
    first, second = torch.randperm(count, device=bench.device)[: 2 * batch].view(2, batch)
    margin = 10 ** (-3 * torch.rand(batch, 1, device=bench.device))  # from 1 down to 0.001
    return 16 * (weight[first] + (1 - margin) * weight[second]), static(weight)


def in_fp32(hidden, weight):
    return (hidden @ weight.T).argmax(1)


def switched(_, weight):
    small = weight.bfloat16()

    def tokens(hidden, weight):
        leading = (hidden.bfloat16() @ small.T).topk(LEADING).indices
        logits = weight[leading] @ hidden[:, :, None]
        return leading.gather(1, logits[:, :, 0].argmax(1, keepdim=True))[:, 0]

    return tokens


def in_fp64(hidden, weight):
    parts = [hidden.double() @ rows.double().T for rows in weight.split(8192)]
    return torch.cat(parts, 1).argmax(1)


def test_token_precision_switching(compare: Compare) -> None:
    compare(
        baseline=in_fp32,
        optimized=prepared(switched),
        inputs=last_hidden,
        work=lambda hidden, weight: Work(flops=2 * len(hidden) * weight.numel(), dtype="bf16"),
        reference=in_fp64,
        evidence=[evidence.counter("dram__bytes.sum", most=0.6, per="baseline")],
    )
