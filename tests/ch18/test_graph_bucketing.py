"""Padding decode batches to the sizes of a few CUDA graphs beats eager steps of the exact size.

With continuous batching, the batch size changes between decode steps. The baseline launches each
step eagerly, for exactly the rows of the batch. That fits any batch size and needs no setup, but a
step of this model is 107 launches. Eight steps take 21 to 25 ms beside an H200, and kernels run for
only 4.0 ms: the GPU is idle for four fifths of the time. The host needs 24 to 29 us per launch,
while a kernel takes 4.7 us on average.

A CUDA graph is a single launch, but has the batch size of its capture. Inference engines capture a
graph for each of a few sizes (buckets), here 1, 2, 4 and the multiples of 8 up to 64, and pad each
batch to the next of them. A step copies its rows to the graph's input, marks the rest as padding,
replays the graph and copies the result: three or four launches, 30 instead of 857 in eight steps.
They take 4.6 ms, and kernels run for 4.1 ms of it. The gain of 4.6x to 5.5x depends on the host: at
8 us per launch, the baseline would take 6.9 ms, and the gain would be 1.5x. The 11 graphs are
captured in the untimed setup, as by a server when it starts, and use one memory pool
(shared_graph_mempool). The setup's time and memory were not measured. Timed calls capture nothing:
they make 38 calls of the CUDA API, the baseline 857.

The library arm is the bound: graphs of exactly the eight batch sizes of this test, which it is
told. A server would need all 64. The sizes are the middles of eight equal parts of the logarithmic
scale from 1 to 64; five of them need padding, and 118 rows become 143. Padding costs no measurable
time (1.00x): it appends nothing to the paged KV cache, attends to one key, and shares the weights
with the other rows. torch.compile with mode="reduce-overhead" also captures a graph per size, when
it first meets it; it was not compared. Requests are chosen at random for each step, from 64 with
contexts of 64 to 448 tokens. Pages never pass to another request here, so the test would not notice
if padding appended an earlier step's tokens again.

The claim is judged on wall time, because only the CPU overhead shrinks. The graphs reach 28 % of
the read rate: products with the weights take 2.2 ms, attention 0.9, and small kernels the rest. No
gain remains where kernels take longer than their launches, as with a larger model, longer contexts
or hundreds of rows; these were not measured. A step that waits for the host, or whose grids the
host chooses from the lengths, cannot be captured as a whole (piecewise_graphs).
"""

import torch

from kernels.ch15.oracle import normalized
from kernels.ch18 import graph_buckets
from kernels.ch18.graph_buckets import GROUP, HEAD_DIM, LENGTH, PAGE, SLOT, TOKEN
from pytest_aiperf import Bench, Compare, Work, evidence, prepared, static

State = tuple[graph_buckets.Model, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]


def steps(bench: Bench) -> State:
    """Make a model, a paged cache with the requests' contexts, and a batch for each step.

    Contexts and pages are the same for all seeds: an arm's cache keeps the tokens that its earlier
    calls have appended, and these must never be part of a context.
    """
    layers, width = bench.size(8, check=2), bench.size(2048, check=512)
    count, requests, vocabulary = bench.size(8, check=3), bench.size(64, check=9), 1000
    shortest, longest = bench.size(64, check=13), bench.size(448, check=70)
    options = {"device": bench.device, "dtype": torch.float16}  # as in test_paged_attention.py
    model = graph_buckets.random_model(layers, width, vocabulary, **options)

    context = torch.linspace(shortest, longest, requests).long()
    pages_of = -(-(context + count) // PAGE)
    pages, columns = int(pages_of.sum()), int(pages_of.max())
    ids = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    table = torch.zeros(requests, columns, dtype=torch.long)
    for row, pages_of_request in zip(table, ids.split(pages_of.tolist()), strict=True):
        row[: len(pages_of_request)] = pages_of_request
    shape = layers, width // GROUP // HEAD_DIM, pages, PAGE, HEAD_DIM
    keys, values = torch.randn(2, *shape, **options)

    # the middles of equal parts of the logarithmic scale, in an order that mixes small and large
    parts = sorted(range(count), key=lambda part: 3 * part % count)
    sizes = tuple(round(requests ** ((part + 0.5) / count)) for part in parts)
    batches = torch.zeros(count, requests, columns + 3, dtype=torch.long)
    length = context.clone()
    for batch, size in zip(batches, sizes, strict=True):
        chosen = torch.randperm(requests)[:size]
        page = table[chosen, length[chosen] // PAGE]
        batch[:size, :SLOT] = table[chosen]
        batch[:size, SLOT] = page * PAGE + length[chosen] % PAGE
        batch[:size, TOKEN] = torch.randint(vocabulary, (size,))
        length[chosen] += 1
        batch[:size, LENGTH] = length[chosen]
    return static(model), static(keys), static(values), batches.to(bench.device), sizes


def in_fp64(model, keys, values, batches, sizes):
    """Run all new tokens of a request at once, with a causal mask, without writing to a cache."""
    model = graph_buckets.Model(*(weight.double() for weight in model))
    hidden = model.embedding.new_zeros(*batches.shape[:2], model.embedding.shape[1])
    places: dict[int, list[tuple[int, int]]] = {}
    first_pages = batches[:, :, 0].tolist()
    for step, size in enumerate(sizes):
        for row in range(size):
            places.setdefault(first_pages[step][row], []).append((step, row))
    for places_of_request in places.values():
        rows = torch.stack([batches[place] for place in places_of_request])
        pages, end = rows[0, :SLOT], int(rows[-1, LENGTH])
        begin = end - len(rows)
        hidden_keys = torch.ones(len(rows), end, dtype=torch.bool, device=rows.device)
        hidden_keys = hidden_keys.triu(begin + 1)
        x = model.embedding[rows[:, TOKEN]]
        for qkv, out, up, down, *pools in zip(*model[1:], keys, values, strict=True):
            heads = (normalized(x) @ qkv).unflatten(1, (-1, HEAD_DIM)).transpose(0, 1)
            groups = len(pools[0])
            q, *new = heads.split([GROUP * groups, groups, groups])
            context = [pool[:, pages].flatten(1, 2)[:, :begin].double() for pool in pools]
            k, v = (
                torch.cat(parts, 1).repeat_interleave(GROUP, 0)
                for parts in zip(context, new, strict=True)
            )
            scores = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(hidden_keys, -torch.inf)
            x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ out
            up_x = normalized(x) @ up
            x = x + up_x * (1 + torch.erf(up_x / 2**0.5)) / 2 @ down
        for place, result in zip(places_of_request, x, strict=True):
            hidden[place] = result
    return hidden


def traffic(model, keys, _values, batches, sizes):
    """Count weights once per step, and the keys and values of each row's length."""
    weights = sum(kind.nbytes for kind in model[1:])
    rows = [batch[:size] for batch, size in zip(batches, sizes, strict=True)]
    token_bytes = 2 * keys[:, :, 0, 0].nbytes
    read = len(sizes) * weights + token_bytes * sum(float(r[:, LENGTH].sum()) for r in rows)
    flops = sum(sizes) * sum(kind.numel() for kind in model[1:]) * 2
    hidden_bytes = len(sizes) * model.embedding[: batches.shape[1]].nbytes
    return Work(read=read, written=hidden_bytes, flops=flops, dtype="fp16")


def test_graph_bucketing(compare: Compare) -> None:
    compare(
        baseline=prepared(graph_buckets.eager),
        optimized=prepared(graph_buckets.buckets),
        library=prepared(graph_buckets.exact),
        inputs=steps,
        work=traffic,
        reference=in_fp64,
        metric="wall",
        cache="warm",  # makes no difference: a step reads many times the L2 capacity
        evidence=[
            # at most 4 per step instead of 107
            evidence.launches(max=0.05, per="baseline"),
            evidence.api_calls(max=0.1, per="baseline"),
        ],
    )
