"""bf16 scores with an fp32 check of the candidates find fp32's tokens faster than TF32 scores do.

Greedy decoding needs the token with the largest logit, so precision matters only where logits are
close. In fp32 the product with the output matrix runs on the regular units and is bound by their
arithmetic: PyTorch's default, but not good practice. On tensor cores it is bound by reading the
matrix: four bytes per weight in TF32, two in bf16. Neither is sure to return the fp32 token: the
error may exceed the distance between the two largest logits.

Rounded logits have a known bound on their error: four rounding units times the norms of the
factors. Tokens further below the largest logit than twice the bound cannot win. All others are
candidates: one kernel lists them, and another computes their logits again from the fp32 weights.
Close logits cost more rows, and never a wrong token. bf16's bound is four times TF32's, so it has
more candidates: about ten per sequence, where TF32 has two. The second metric is their number: the
fp32 logits per sequence, counted once in the setup. For "fp32" that is the whole vocabulary.

Output matrix and hidden states are those of a language model that is trained for this claim, on the
source code of PyTorch (kernels/ch19/trained_logits.py). It has the vocabulary and the width of a
model with eight billion weights, but one layer and little training. A better model is surer of some
words and has other norms, so its number of candidates differs. The sequences are from files that it
was not trained on. Where fp32 itself cannot tell the two best tokens apart, the sequence is left
out.

"tf32" is compared with fp32, a naive baseline, so its bar is also a share of the read rate; "bf16"
is compared with "tf32", which shares all the rest. The bf16 copy adds half of the matrix's memory.
The limit is the ratio of bytes, 2x, as candidates are few. The bytes do fall by that, and the
product reaches it: on an H200 it reads the matrix at 3.9 TB/s in both arms, in 555 and 275 µs. The
rest, which finds the maximum, lists the candidates and computes them again, takes some 90 µs in
both, so the gain is 1.74x (1.8x on an H100). The library arm of "tf32" splits hidden states and
weights into two bf16 parts each and adds three of their four products, which is nearly as exact as
fp32. It reads as many bytes per weight as TF32, and takes 1.4 times as long on an H200. The same
with TF32 parts (3xTF32), which reads more, is not compared. There is less to gain where many
sequences share the matrix, so that arithmetic binds, or where logits are flat, so that many rows
are read again.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from kernels.ch19 import exact_tokens, trained_logits
from pytest_aiperf import Bench, Compare, Score, Work, evidence, prepared, static

GAP = 2e-4
"""Least difference of the two largest logits, in fp64: ten times the error of an fp32 product."""

Greedy = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def fp32_logits(count: float) -> Score:
    return Score(count, "fp32 logits per sequence", better="lower")


def rescoring(make: Callable[[torch.Tensor, torch.Tensor], Greedy]) -> object:
    """Count the candidates in the setup: reading their number in a call would wait for the GPU."""

    def setup(hidden, weight):
        greedy_tokens = make(hidden, weight)
        score = fp32_logits(greedy_tokens(hidden, weight)[1].item() / len(hidden))
        return lambda hidden, weight: (greedy_tokens(hidden, weight)[0], score)

    return prepared(setup)


def fp32(hidden, weight):
    return exact_tokens.fp32(hidden, weight), fp32_logits(len(weight))


ARMS = {
    "fp32": fp32,
    "tf32": rescoring(exact_tokens.tf32),
    "bf16": rescoring(exact_tokens.bf16),
}
SPLIT_BF16 = rescoring(exact_tokens.split_bf16)
BASELINES = {"tf32": "fp32", "bf16": "tf32"}
EVIDENCE = {
    "tf32": evidence.counter(
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum", max=0.05, per="baseline"
    ),
    "bf16": evidence.counter("dram__bytes.sum", max=0.65, per="baseline"),
}


@cache
def model_and_states(device: str, full: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Train the model; return its output matrix and the hidden states of unseen texts."""
    vocabulary, width, steps, batch = (131072, 4096, 200, 2048) if full else (1000, 256, 20, 64)
    text, unseen = trained_logits.texts(vocabulary, None if full else 40)
    model = trained_logits.train(vocabulary, width, text.to(device), steps, batch)
    ends = torch.linspace(trained_logits.CONTEXT, len(unseen) - 1, 4096 if full else 200).long()
    hidden = trained_logits.hidden_states(
        model, trained_logits.contexts_of(unseen, ends).to(device)
    )
    parts = [(hidden.double() @ rows.double().T).topk(2) for rows in model.output.split(8192)]
    largest = torch.cat([part.values for part in parts], 1).topk(2).values
    return model.output, hidden[largest[:, 0] - largest[:, 1] > GAP]


def last_hidden(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the hidden states of some texts; the output matrix stays the same."""
    weight, states = model_and_states(bench.device, bench.full)
    drawn = torch.randperm(len(states), device=bench.device)[: bench.size(128, check=16)]
    return states[drawn], static(weight)


def in_fp64(hidden, weight):
    parts = [hidden.double() @ rows.double().T for rows in weight.split(8192)]
    return torch.cat(parts, 1).argmax(1)


@pytest.mark.parametrize("rung", BASELINES)
def test_token_precision_switching(compare: Compare, rung: str) -> None:
    compare(
        baseline=ARMS[BASELINES[rung]],
        optimized=ARMS[rung],
        library=SPLIT_BF16 if rung == "tf32" else None,
        against="previous rung" if rung == "bf16" else "naive",
        inputs=last_hidden,
        work=lambda hidden, weight: Work(read=weight.nbytes / 2, written=8 * len(hidden)),
        reference=in_fp64,
        metric=("device", "score"),
        evidence=[EVIDENCE[rung]],
    )
