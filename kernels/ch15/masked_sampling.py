"""Greedy sampling under a grammar: the most likely of the tokens that a packed mask allows.

A mask has one bit per token: bit i of its word w belongs to token 32 w + i. Each program handles
one sequence and reads each of its logits and each word of its mask once. Each thread keeps the best
allowed logits of its columns and their tokens; a reduction at the end finds the best of all.

masks_on_host  The host looks up the states, gathers their masks and copies these to the GPU.
masks_on_gpu   The host looks up the states and copies their numbers; the kernel finds the masks.
decode         The kernel looks up the next state as well (ADVANCE).
compiled       The same on the GPU, with a step of torch operations that torch.compile fuses.
"""

import torch
import triton
import triton.language as tl

WORDS, WARPS = 128, 16
"""Words of the mask per iteration, and warps: each thread has two 16-byte loads in flight."""


@triton.jit
def _sample(  # noqa: PLR0917  a Triton launch passes arguments by position
    logits, masks, rows, tokens, transitions, vocabulary, words,
    ADVANCE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sequence)
    bit = tl.arange(0, 32)[None, :]
    best = tl.full((WORDS, 32), float("-inf"), tl.float32)
    best_token = tl.zeros((WORDS, 32), tl.int32)
    for start in range(0, words, WORDS):
        word = start + tl.arange(0, WORDS)
        packed = tl.load(masks + row * words + word, mask=word < words, other=0)
        token = word[:, None] * 32 + bit
        inside = token < vocabulary
        logit = tl.load(logits + sequence * vocabulary + token, mask=inside, other=float("-inf"))
        is_allowed = ((packed[:, None] >> bit) & 1) == 1
        is_better = is_allowed & (logit > best)
        best = tl.where(is_better, logit, best)
        best_token = tl.where(is_better, token, best_token)
    highest = tl.max(tl.max(best, 1), 0)
    candidates = tl.where(best == highest, best_token, vocabulary)
    sampled = tl.min(tl.min(candidates, 1), 0)  # of equal logits the first, as torch.argmax
    tl.store(tokens + sequence, sampled.to(tl.int64))
    if ADVANCE:
        following = tl.load(transitions + row * vocabulary + sampled)
        tl.store(rows + sequence, following.to(tl.int64))


def sample(logits, masks, rows, tokens, transitions=None):
    """Write the best allowed token of each sequence into ``tokens``.

    ``rows`` selects each sequence's mask. With ``transitions`` (states x vocabulary) it holds the
    states, which advance in place.
    """
    _sample[(len(logits),)](
        logits, masks, rows, tokens, transitions, logits.shape[1], masks.shape[1],
        ADVANCE=transitions is not None, WORDS=WORDS, num_warps=WARPS,
    )  # fmt: skip


def decode(logits, masks, transitions, start):
    """Decode all steps on the GPU: the host only launches them."""
    states, tokens = start.clone(), start.new_empty(len(logits), len(start))
    for step, step_logits in enumerate(logits):
        sample(step_logits, masks, states, tokens[step], transitions)
    return tokens, states


def decode_with_host(send, transitions, start):
    """Return a decoder that looks up the next states on the host.

    ``send(states)`` copies to the GPU what the step needs, and returns the masks and their rows.
    """
    next_states, first = transitions.cpu(), start.cpu()
    sampled = torch.empty(len(start), dtype=torch.int64, pin_memory=start.is_cuda)

    def run(logits, *_):
        states, tokens = first, start.new_empty(len(logits), len(start))
        for step, step_logits in enumerate(logits):
            sample(step_logits, *send(states), tokens[step])
            sampled.copy_(tokens[step])  # waits for the step
            states = next_states[states, sampled].long()
        return tokens, states.to(start.device)

    return run


def masks_on_host(_logits, masks, transitions, start):
    """Gather the masks on the host, in pinned memory, and copy them to the GPU in each step."""
    table, rows = masks.cpu(), torch.arange(len(start), device=start.device)
    shape = len(start), masks.shape[1]
    pinned = torch.empty(shape, dtype=masks.dtype, pin_memory=masks.is_cuda)
    packed = masks.new_empty(shape)

    def send(states):
        torch.index_select(table, 0, states, out=pinned)
        return packed.copy_(pinned, non_blocking=True), rows

    return decode_with_host(send, transitions, start)


def masks_on_gpu(_logits, masks, transitions, start):
    """Keep the masks on the GPU, and copy only the number of each sequence's state in each step."""
    pinned = torch.empty(len(start), dtype=start.dtype, pin_memory=start.is_cuda)
    rows = torch.empty_like(start)

    def send(states):
        pinned.copy_(states)
        return masks, rows.copy_(pinned, non_blocking=True)

    return decode_with_host(send, transitions, start)


@torch.compile(dynamic=False)
def _torch_step(logits, masks, transitions, states):
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    is_allowed = (masks[states][:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]] == 1
    tokens = torch.where(is_allowed, logits, float("-inf")).argmax(1)
    return tokens, transitions[states, tokens].long()


def compiled(logits, masks, transitions, start):
    """Decode on the GPU as decode() does, with a compiled step instead of the kernel."""
    states, tokens = start, []
    for step_logits in logits:
        sampled, states = _torch_step(step_logits, masks, transitions, states)
        tokens.append(sampled)
    return torch.stack(tokens), states
