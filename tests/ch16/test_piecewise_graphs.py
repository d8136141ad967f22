"""CUDA graphs of the pieces between attentions beat eager launches for prompts of any length.

Launches are the limit for a small model on a short prompt, and a CUDA graph removes them. But a
graph fits one length, and prompts have any length; capturing a graph per prompt ("recapture") costs
more than it saves. Only attention needs the exact length. All other layers treat each token alone
and may run on padding, so they are captured in pieces for 64, 128 and 256 tokens when the model is
loaded. A prompt uses the smallest size that fits, and attention between the pieces is launched
eagerly for exactly its tokens.

The claim is judged on wall time, for prompts of random lengths. 6 layers have 7 pieces, so 21
captures replace one for each of 256 lengths. The gain over eager launches ends where kernels take
longer than their launches; there the padded tokens cost their full time. The alternative is to pad
attention as well: that allows whole graphs, at the price of a mask and of unneeded keys.
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
    """Make prompts of at most 256 tokens; their lengths are on the host, as in a server."""
    count, width, layers = 4, bench.size(512, check=64), bench.size(6, check=2)
    model = random_decoder(layers, width, 1000, device=bench.device, dtype=torch.bfloat16)
    prompts = torch.randint(1000, (count, 256), device=bench.device)
    lengths = torch.randint(1, 257, (count,))
    return static(model), prompts, lengths, model.embedding.new_empty(count, width)


def in_fp64(model, prompts, lengths, out):
    pairs = zip(prompts, lengths.tolist(), strict=True)
    model = model.to(torch.float64)
    return torch.stack([forward(model, prompt[None, :length])[0, -1] for prompt, length in pairs])


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
        evidence=[evidence.launches(max=0.5, per="baseline")],
    )
