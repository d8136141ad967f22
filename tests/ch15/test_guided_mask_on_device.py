"""Grammar masks and states on the GPU beat masks that the host copies in each decoding step.

Structured output (guided or constrained decoding) makes a model follow a grammar. The grammar is
compiled to an automaton: its state determines which tokens are allowed, and the sampled token
determines the next state. On an H200, eight steps take 2.5 to 3.1 ms with masks from the host, 0.8
to 1.1 with masks on the GPU, and 0.32 to 0.36 with states there as well: gains of 2.85x and 3.1x,
then 2.7x and 2.8x. The library arm, torch.compile with masks and states on the GPU, takes 0.76 to
0.82 ms. It is faster than "masks_on_gpu", and takes 2.3 times as long as "states_on_gpu". It copies
nothing either, but its kernel takes 83 µs per step, and that of the other arms 35.

The baseline is organized as in vLLM with xgrammar: masks have one bit per token, and in each step
the host waits for the sampled tokens, advances the states, gathers the masks in pinned memory, and
copies them to the GPU: 4.1 MB for 256 sequences and 128,256 tokens. The host looks up masks and
transitions in tables; xgrammar, which was not measured, computes part of a mask in the step. All
arms sample greedily, and read the 131 MB of fp32 logits of a step once.

"masks_on_gpu" keeps the masks of all 256 states on the GPU and copies 8 bytes per sequence instead
of 16,032. Most of the gain is the copies' time, in traces 0.02 ms instead of 1.4 to 1.5. The masks
were copied at 22 to 23 GB/s, where large pinned copies reach 55; why was not examined. The GPU is
idle for 0.64 to 0.67 ms instead of 0.83 to 0.86: the host gathers no masks, but in each step it
still receives the tokens, looks up the states, and launches the next step, from Python.
"states_on_gpu" ends this round trip: the kernel that samples a token also looks up the next state,
and the host launches all steps ahead. The GPU is idle for 0.08 to 0.09 ms, and the eight steps read
logits at 68 to 71 % of the limit, the kernels alone at 82 %.

The claim is judged on wall time, because the waits are its subject. The logits are given: the gain
is that of sampling, not of a step with a model, and an engine may gather and copy the masks while
the model runs. The automaton is random; the kernel also reads the logits of forbidden tokens. Each
state needs 16 KB of masks and 256 KB of transitions, which classes of equivalent tokens would
reduce. Recursive grammars need a stack (pushdown automaton), which a table of states cannot hold.
"""

import numpy as np
import pytest
import torch

from kernels.ch15 import masked_sampling
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

STEPS = 8
Grammar = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def logits_and_automaton(bench: Bench) -> Grammar:
    """Draw logits, and an automaton with its packed masks and transitions and the first states."""
    count, vocabulary = bench.size(256, check=5), bench.size(128_256, check=4_999)
    states, device = bench.size(256, check=6), bench.device
    logits = torch.randn(STEPS, count, vocabulary, device=device)
    logits[..., -32:] += 2  # often the best, so that a kernel that omits the last ones is found out
    shape = 5, states, -(-vocabulary // 32)
    a, b, c, d, e = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
    masks = a | b | c  # 7/8 of the tokens, as in a string
    masks[::2] = (a & b & c & d & e)[::2]  # 1/32, as where syntax must follow
    transitions = torch.randint(states, (states, vocabulary), dtype=torch.int16, device=device)
    start = torch.randint(states, (count,), device=device)
    return logits, static(masks), static(transitions), static(start)


def from_allowed_tokens(logits, masks, transitions, states):
    """Unpack the masks with NumPy, and compare in fp64."""
    octets = masks.cpu().numpy().view(np.uint8)
    bits = np.unpackbits(octets, axis=1, bitorder="little", count=logits.shape[2])
    is_forbidden = torch.from_numpy(bits == 0).to(logits.device)
    tokens = []
    for step_logits in logits:
        allowed = step_logits.double().masked_fill(is_forbidden[states], -torch.inf)
        tokens.append(allowed.max(1).indices)
        states = transitions[states, tokens[-1]].long()
    return torch.stack(tokens), states


MASKS_ON_HOST = prepared(masked_sampling.masks_on_host)
MASKS_ON_GPU = prepared(masked_sampling.masks_on_gpu)
RUNGS = {
    "masks_on_gpu": (MASKS_ON_HOST, MASKS_ON_GPU),
    "states_on_gpu": (MASKS_ON_GPU, masked_sampling.decode),
}
EVIDENCE = {
    # 8 bytes per sequence instead of 16,032
    "masks_on_gpu": [evidence.copied_bytes("host to device", max=0.001, per="baseline")],
    "states_on_gpu": [
        evidence.copied_bytes("host to device", max=0),
        evidence.copied_bytes("device to host", max=0),
    ],
}


@pytest.mark.parametrize("rung", RUNGS)
def test_guided_mask_on_device(compare: Compare, rung: str) -> None:
    baseline, optimized = RUNGS[rung]
    compare(
        baseline=baseline,
        optimized=optimized,
        library=masked_sampling.compiled if rung == "states_on_gpu" else None,
        against="previous rung" if rung == "states_on_gpu" else "idiomatic",
        inputs=logits_and_automaton,
        reference=from_allowed_tokens,
        work=lambda logits, *_: Work(read=logits.nbytes, written=8 * logits[..., 0].numel()),
        metric="wall",
        evidence=EVIDENCE[rung],
    )
