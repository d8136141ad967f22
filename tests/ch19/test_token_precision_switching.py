"""Scoring the vocabulary in bf16 and four candidates again in fp32 beats scoring it all in fp32.

Greedy decoding needs the token with the largest logit, so accuracy matters only where the leading
logits are close. The bf16 copy of the output matrix halves the bytes and uses the tensor cores,
which IEEE fp32 products do not (TF32 would). Its errors, about a sixteenth at logits of 16, swap
the first two tokens where their margin is smaller. So the four best are scored again with rows of
the fp32 matrix: at most 512 rows instead of 32768.

The result is exact as long as the fp32 winner is among the four, that is, as long as no more than
three others lie within bf16's error of it. In these inputs two tokens compete. Arbitrary logits
would need a margin test that falls back to more candidates or to fp32. The bf16 copy adds half of
the matrix's memory. For one sequence the limit is the ratio of bytes, 2x; for many, the ratio of
the arithmetic rates.
"""

import torch

from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

CANDIDATES = 4


def last_hidden(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw hidden states, each close to two known tokens, with margins from 1 down to 0.001."""
    count, width = bench.size(32768, check=1000), bench.size(4096, check=256)
    batch = bench.size(128, check=16)
    weight = torch.nn.functional.normalize(torch.randn(count, width, device=bench.device))
    first, second = torch.randperm(count, device=bench.device)[: 2 * batch].view(2, batch)
    margin = 10 ** (-3 * torch.rand(batch, 1, device=bench.device))
    return 16 * (weight[first] + (1 - margin) * weight[second]), static(weight)


def in_fp32(hidden, weight):
    return (hidden @ weight.T).argmax(1)


def rescored(_, weight):
    weight_bf16 = weight.bfloat16()

    def greedy_tokens(hidden, weight):
        candidates = (hidden.bfloat16() @ weight_bf16.T).topk(CANDIDATES).indices
        logits = weight[candidates] @ hidden[:, :, None]
        return candidates.gather(1, logits[:, :, 0].argmax(1, keepdim=True))[:, 0]

    return greedy_tokens


def in_fp64(hidden, weight):
    parts = [hidden.double() @ rows.double().T for rows in weight.split(8192)]
    return torch.cat(parts, 1).argmax(1)


def test_token_precision_switching(compare: Compare) -> None:
    compare(
        baseline=in_fp32,
        optimized=prepared(rescored),
        inputs=last_hidden,
        work=lambda hidden, weight: Work(flops=2 * len(hidden) * weight.numel(), dtype="bf16"),
        reference=in_fp64,
        evidence=[evidence.counter("dram__bytes.sum", max=0.6, per="baseline")],
    )
