"""One kernel for Q/K norm, RoPE and the cache write beats PyTorch operations on whole arrays.

Between the QKV projection and attention, a Qwen3-like model normalizes each head of q and k
(RMSNorm), rotates it by the token's position (RoPE), and writes k and v to the token's slot in a
paged KV cache. There is little arithmetic, so the bytes count: each element of qkv has to be read
once and written once. The sizes are those of Qwen3-8B, 32 query and 8 key heads of 128 channels, in
a prefill step of 16,384 tokens: 201 MB each way. On an H200 the fused kernel takes 0.102 ms. It is
14.6 times as fast as the PyTorch operations, and 4.0 times as fast as torch.compile makes them.

The baseline is the usual PyTorch code: 21 kernels, with RMSNorm as one operation. They read or
write an element of q or k 13 times: 2 in a copy, because RMSNorm takes contiguous input, 2 in
RMSNorm, 4 in products, 3 in sum and difference, 2 in the concatenation. Writing k or v to the cache
adds 2. On average that is 11.5 per element instead of 2, or 5.75 times the bytes. Counters show 5.9
times the DRAM traffic of the fused kernel. The other factor, 2.5, is bandwidth: the baseline moves
1.5 TB/s. Its products, on halves of heads, take the most time, in PyTorch's kernel without
vectorized accesses; how much these would gain was not measured.

The fused kernel holds a token in registers from the loads to the stores. It reaches 93 % of the
copy rate, although slots are scattered by page: the keys of a token are 2 KiB in a row.

The library arm, torch.compile of the baseline, takes 0.40 ms in 10 kernels. Half of that goes to
two kernels that read q and k for the norm's sums, at 0.84 TB/s; why so slowly was not examined. Two
more read q and k again and rotate. A sixth goes to copies of both caches to new arrays and back,
because PyTorch 2.11 does not write in place through a view (flatten) of an input. They are longer
for a larger cache. Without them a gain of 3.3 would be left, by the trace; indexing the cache by
page and row should avoid them, but was not timed. Kernels of serving engines were not compared
(vLLM: Q/K norm and RoPE in one, the cache write in another). Nor was a decode step measured.
"""

import torch

from kernels.ch18 import rope_cache
from kernels.ch18.rope_cache import EPSILON, HEADS, KV_HEADS, D
from pytest_aiperf import Bench, Compare, Work, evidence, static

THETA, POSITIONS = 1e6, 32_768  # as in Qwen3
PAGE = 16  # tokens per page of the cache


def frequencies(device: torch.device | str) -> torch.Tensor:
    pair = torch.arange(D // 2, device=device, dtype=torch.float64)
    return THETA ** (-2 * pair / D)


def step(bench: Bench) -> tuple[torch.Tensor, ...]:
    """Make a step of chunked prefill: some tokens of each prompt, from a random page on."""
    prompts, length = bench.size(16, check=3), bench.size(1024, check=2 * PAGE)
    tokens = prompts * length
    # fp16 in the check: Triton's interpreter computes bf16 wrongly
    options = {"device": bench.device, "dtype": torch.bfloat16 if bench.full else torch.float16}
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * D, **options)
    qkv *= 0.5 + torch.rand(tokens, 1, **options)  # so that a missing norm changes the result
    q_weight, k_weight = 0.5 + torch.rand(2, D, **options)

    first = PAGE * torch.randint((POSITIONS - length) // PAGE, (prompts, 1), device=bench.device)
    positions = (first + torch.arange(length, device=bench.device)).flatten()
    # fp32 would miss the angle of a late position by up to 0.002
    position = torch.arange(POSITIONS, device=bench.device, dtype=torch.float64)
    angles = position[:, None] * frequencies(bench.device)
    table = torch.cat((angles.cos(), angles.sin()), 1).to(**options)

    pages = torch.randperm(tokens // PAGE, device=bench.device)
    slots = (PAGE * pages[:, None] + torch.arange(PAGE, device=bench.device)).flatten()
    caches = (torch.empty(len(pages), PAGE, KV_HEADS, D, **options) for _ in range(2))
    return qkv, q_weight, k_weight, static(table), positions, slots, *caches


def in_fp64(  # noqa: PLR0917  a reference gets the inputs by position
    qkv, q_weight, k_weight, _table, positions, slots, key_cache, value_cache
):
    """Rotate pairs as complex numbers, with angles that do not come from the table."""
    q, k, v = qkv.double().unflatten(1, (-1, D)).split((HEADS, KV_HEADS, KV_HEADS), 1)
    angles = positions[:, None, None] * frequencies(qkv.device)
    rotation = torch.polar(torch.ones_like(angles), angles)

    def rotated(x, weight):
        x = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
        pairs = torch.complex(*x.chunk(2, -1)) * rotation
        return torch.cat((pairs.real, pairs.imag), -1)

    token = slots.argsort()  # of each slot
    keys, values = rotated(k, k_weight)[token], v[token]
    return rotated(q, q_weight), keys.view_as(key_cache), values.view_as(value_cache)


def traffic(qkv, _q_weight, _k_weight, table, positions, slots, *_caches):
    rows = len(positions.unique())  # prompts at the same position share a row of the table
    read = qkv.nbytes + positions.nbytes + slots.nbytes + rows * table[0].nbytes
    return Work(read=read, written=qkv.nbytes)


def test_fused_rope_cache(compare: Compare) -> None:
    compare(
        baseline=rope_cache.vectorized,
        optimized=rope_cache.fused,
        library=torch.compile(rope_cache.vectorized, fullgraph=True, dynamic=False),
        inputs=step,
        work=traffic,
        reference=in_fp64,
        evidence=[
            evidence.kernels(max=1),
            evidence.counter("dram__bytes.sum", max=1.1, per="work"),
            # half of the work's bytes are written
            evidence.counter("dram__bytes_write.sum", max=0.55, per="work"),
            evidence.spills(kernel="_norm_rope_cache"),
        ],
    )
