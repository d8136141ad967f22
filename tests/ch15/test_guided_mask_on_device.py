"""Grammar masks and states on the GPU beat masks that the host copies in each decoding step.

Structured output (guided or constrained decoding) makes a model follow a grammar. The grammar is
compiled to an automaton: its state determines which tokens are allowed, and the sampled token
determines the next state. The baseline does what vLLM does with xgrammar: masks have one bit per
token, and in each step the host waits for the sampled tokens, advances the states, gathers the
masks in pinned memory, and copies them to the GPU. For 256 sequences and 128,256 tokens these are
4.1 MB per step. Here the masks and transitions of all 256 states are computed beforehand, so that
the host only looks them up; xgrammar computes part of a mask in the step. All arms sample greedily,
with one kernel that reads the 131 MB of fp32 logits of a step once.

"masks_on_gpu" keeps the masks of all states on the GPU, 4.1 MB, and copies each sequence's state
number instead of its mask: 8 bytes instead of 16,032. The host need not gather masks any more, but
each step still waits for it: the GPU is idle until the host has received the tokens, looked up the
states, and launched the next step. "states_on_gpu" ends this round trip. The transitions are on the
GPU as well, and the kernel that samples a token also looks up the next state. The host launches all
steps ahead, and the limit is reading the logits. The library arm of this rung has the same tables
and loop, but torch.compile instead of the kernel. xgrammar itself is not measured.

The claim is judged on wall time for eight steps, because the waits are its subject. The logits are
given, so the gain is that of sampling and not of a decoding step with a model. An engine gathers
and copies the masks while the model runs, which hides this work if the model takes longer. The wait
for the tokens remains, because the host needs them to make the next masks. The automaton is random:
half of the states allow 7/8 of the tokens, as within a string, and half 1/32. This does not affect
the times, because the kernel also reads the logits of forbidden tokens.

The tables limit the idea: each state needs 16 KB of masks and 256 KB of transitions, which grouping
equivalent tokens into classes would reduce. Recursive grammars need a stack (pushdown automaton),
which a table of states cannot hold. The host also keeps an automaton with too many states to list.
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
