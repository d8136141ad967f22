"""CUDA graphs of a few sizes beat one with padding, and graphs of pieces beat eager launches.

Launches are the limit where a batch has few tokens, and a CUDA graph removes them. But a graph fits
one number of tokens, and batches of prompts have any. The naive baseline of "buckets" has one graph
for the largest batch, so each batch costs 1,024 tokens. "buckets" captures whole graphs for 128,
256, 512 and 1,024 tokens when the model is loaded, and a batch uses the smallest that fits: 1.7x as
fast on an H100 and 1.8x to 1.9x on H200s with the batches below. "pieces" is for models whose
attention cannot be captured. Here it can, and "pieces" loses to "buckets", which takes 9 % less
time on an H100 and 8 to 11 % less on H200s.

Attention can be captured here because FlashAttention 2 reads the offsets of the prompts on the GPU,
so one capture with the largest grid serves all batches. Where the host chooses the grid, the splits
or a plan from the lengths, only what lies between two attentions can be captured: all other layers
treat each token alone and may run on padding. "pieces" captures them for the same four sizes, and
launches variable-length attention between the pieces for exactly the batch's prompts (vLLM's
piecewise CUDA graphs). 6 layers have 7 pieces, so 28 captures, which are not timed, serve all
batches. It is compared with eager launches, and its library arm is "buckets", which has fewer
launches. Attention that cannot be captured was not measured.

The claim is judged on wall time, for 32 batches of one to eight packed prompts. Prompts have 16 to
128 tokens, spread evenly on a logarithmic scale. The model has width 2048 and heads of 128
channels. The gain over eager launches depends on how fast the host launches: it is 1.8x on an H100
(1.6x to 2.1x) and 1.7x to 2.7x on H200s (1.5x to 3.4x). It ends where kernels take longer than
their launches, with more tokens or a larger model. The GPU itself works longer, because it also
computes padding: in traces on H200s, the kernels take 16 ms in the eager model, 17 to 18 in
"buckets" and 17 to 19 in "pieces". The gain of "buckets" over one graph ends where most batches
need the largest graph.
"""

import pytest
import torch

from kernels.ch15 import oracle
from kernels.ch15.decoder import Decoder, random_decoder
from kernels.ch16 import pieces
from pytest_aiperf import Bench, Compare, evidence, prepared, static

RUNGS = {
    "buckets": (
        {"baseline": prepared(pieces.padded), "optimized": prepared(pieces.bucketed)},
        "naive",
        evidence.counter("smsp__inst_executed.sum", max=0.6, per="baseline"),
    ),
    "pieces": (
        {
            "baseline": pieces.eager,
            "optimized": prepared(pieces.piecewise),
            "library": prepared(pieces.bucketed),
        },
        "idiomatic",
        evidence.launches(max=0.5, per="baseline"),
    ),
}


def requests(bench: Bench) -> tuple[Decoder, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make prompts of different lengths; the lengths are on the host, as in a server."""
    count, longest = bench.size(4 * sum(pieces.SIZES), check=8), bench.size(128, check=16)
    shortest, layers = bench.size(16, check=2), bench.size(6, check=2)
    width = bench.size(2048, check=128)
    model = random_decoder(layers, width, 1000, device=bench.device, dtype=torch.bfloat16)
    prompts = torch.randint(1000, (count, longest), device=bench.device)
    quantiles = (torch.randperm(count) + torch.rand(count)) / count
    lengths = (shortest * (longest / shortest) ** quantiles).long()
    return static(model), prompts, lengths, model.embedding.new_empty(count, width)


def in_fp64(model, prompts, lengths, out):
    """Compute all prompts, padded to the longest."""
    return oracle.hidden_states(model, prompts)[torch.arange(len(prompts)), lengths - 1]


@pytest.mark.parametrize("rung", RUNGS)
def test_piecewise_graphs(compare: Compare, rung: str) -> None:
    arms, against, proof = RUNGS[rung]
    compare(
        **arms,
        against=against,
        inputs=requests,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[proof],
    )
