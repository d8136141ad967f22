"""Batches of texts of similar length, or no padding at all, beat padding to the longest.

A batch is a rectangle: every text is padded to the longest one of its batch, and the padding runs
through all layers as if it were text. Lengths of real texts are spread widely; in the order of
arrival nearly every batch of 32 has a long one, and three quarters of the tokens are padding.
Sorting by length first ("bucketed") makes rectangles of texts that fit each other. Packing puts all
texts end to end: every layer but attention treats tokens alone and does not care, and attention
gets the bounds of the texts ("packed").

The limit is padded over real tokens, known beforehand: about 4x here. Sorting reorders answers and
needs all texts at hand; a stream is sorted in windows. Packing needs kernels for it, and fixed
shapes, as CUDA graphs want them, only come with a budget of tokens. Texts of like length gain
nothing. The mean over each text's own tokens is compared, so that padding must not leak into it.
"""

import pytest
import torch

from kernels.ch15.decoder import Decoder, attention, block, random_decoder
from kernels.ch17 import batches
from pytest_aiperf import Bench, Compare, evidence, static

RUNGS = {"bucketed": batches.bucketed, "packed": batches.packed}


def texts(bench: Bench) -> tuple[Decoder, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make texts of lognormal lengths, always the same ones, in another order."""
    count, longest = bench.size(256, check=40), bench.size(512, check=16)
    width, tokens = bench.size(1024, check=64), 1000
    model = random_decoder(2, width, tokens, device=bench.device, dtype=torch.bfloat16)
    ranks = (torch.randperm(count) + 0.5) / count
    lengths = (longest / 6 * torch.exp(0.9 * torch.special.ndtri(ranks))).ceil().long()
    lengths = lengths.clamp(max=longest)
    ids = torch.randint(tokens, (count, longest), device=bench.device)
    return static(model), ids, lengths.to(bench.device), lengths


def one_by_one(model, ids, limits, lengths):
    """Attend within each text on its own; all else treats tokens alone, and takes all at once."""
    model, counts = model.to(torch.float64), lengths.tolist()

    def attend(q, k, v):
        texts = zip(*(x.split(counts) for x in (q, k, v)), strict=True)
        return torch.cat([attention(*(x[None] for x in text))[0] for text in texts])

    x = model.embedding[torch.cat([row[:n] for row, n in zip(ids, counts, strict=True)])]
    for layer in model.layers():
        x = block(x, layer, attend)
    return torch.stack([text.mean(0) for text in x.split(counts)])


@pytest.mark.parametrize("rung", RUNGS)
def test_length_bucketed_batching(compare: Compare, rung: str) -> None:
    compare(
        baseline=batches.padded,
        optimized=RUNGS[rung],
        inputs=texts,
        reference=one_by_one,
        cache="warm",  # a call overwrites the cache many times over
        evidence=[evidence.counter("dram__bytes.sum", most=0.5, per="baseline")],
    )
