"""Graphs of the pieces between attentions serve prompts of any length; a graph of all serves one.

A small model on a short prompt is bound by its launches, 68 of them here, and a CUDA graph would
take them away. But a graph is made for one length, and prompts have any: a graph for each new one
("recapture") costs more than it saves. Only attention must know the length. All the rest treats
each token alone and may work on some tokens too many, so it is captured in pieces, for 64, 128 and
256 tokens, when the model is loaded. A prompt uses the next larger size, and attention between the
pieces is launched eagerly, for exactly its tokens.

What the caller waits (wall) is judged, for prompts whose lengths nobody knew before. There are 7
pieces for 6 layers, so that 21 captures replace one for each of 256 lengths. The gain over eager
launches ends where kernels outlast their launches, from about a thousand tokens, and rounding up
the tokens then costs what it adds. Padding attention as well allows whole graphs, for the price of
a mask and of keys that nobody asked for.
"""

import pytest
import torch

from kernels.ch15.decoder import Decoder, forward, random_decoder
from kernels.ch16 import pieces
from pytest_aiperf import Bench, Compare, evidence, prepared, static

BASELINES = {
    "eager": (pieces.eager, "idiomatic"),
    "recapture": (prepared(pieces.recapture), "naive"),
}


def requests(bench: Bench) -> tuple[Decoder, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make prompts of at most 256 tokens; their lengths lie on the host, as requests do."""
    count, width, layers = 4, bench.size(512, check=64), bench.size(6, check=2)
    model = random_decoder(layers, width, 1000, device=bench.device, dtype=torch.bfloat16)
    prompts = torch.randint(1000, (count, 256), device=bench.device)
    lengths = torch.randint(1, 257, (count,))
    return static(model), prompts, lengths, model.embedding.new_empty(count, width)


def in_fp64(model, prompts, lengths, out):
    rows = zip(prompts, lengths.tolist(), strict=True)
    model = model.to(torch.float64)
    return torch.stack([forward(model, row[None, :length])[0, -1] for row, length in rows])


@pytest.mark.parametrize("over", BASELINES)
def test_piecewise_graphs(compare: Compare, over: str) -> None:
    baseline, against = BASELINES[over]
    compare(
        baseline=baseline,
        optimized=prepared(pieces.piecewise),
        against=against,
        inputs=requests,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(most=0.5, per="baseline")],
    )
