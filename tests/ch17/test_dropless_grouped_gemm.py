"""A grouped GEMM beats padding all experts to the size of the fullest one if the router is skewed.

A router sends different numbers of tokens to the experts of a layer, but a batched product (bmm)
needs matrices of equal size. The baseline pads every expert to the size of the fullest one, the
smallest capacity that drops no token (`drop_tokens=False` in DeepSpeed). In "skewed" the fullest
expert has about twice the mean, so half of all rows are padding, which costs as much as tokens. A
grouped GEMM computes the tiles of all experts in one kernel, which reads the ends of the groups on
the GPU: no padded rows. On an H200 the layer takes 2.5 to 2.6 ms instead of 3.8 to 4.2, depending
on the draw: 1.57x in both sessions, [1.51, 1.63] in the last one.

The gain is that of the skew. In "skewed", popularity is lognormal with sigma 0.3, an assumption. In
"even", all experts are equally likely, and padding wins: the grouped GEMM takes 9 % longer, 2.52 ms
instead of 2.32: 0.919x [0.915, 0.923]. Only chance makes the fullest expert larger than the mean,
by 7 % in the trace. Partly empty tiles cost the grouped GEMM more: rounding each expert up to 256
rows adds 12 %. A bmm is also faster per row: its kernels take 1.80 ms, the grouped kernels 2.04. By
interpolation between the two routers, both arms take equally long at 1.2 times the mean.

In "skewed", the gain is less than the ratio of padded to routed rows, 2.07 and 2.06 in two traces,
because the grouped GEMM is slower per row. The bmm kernels take 3.1 and 3.3 ms there, with
different tiles: 820 and 770 TFLOP/s with padding, 1.00 and 0.92 of the measured bf16 limit. The
grouped kernels take 2.1 ms, at 0.71 of it. Partly empty tiles explain a part; 12 % fits the tensor
cores' operations, 0.54 of the baseline's. The rest was not examined, nor whether a bmm gains from
rows of padding that are all equal. Gathering the rows and the gate take 0.40 ms instead of 0.72 ms;
the weighted sum takes 0.14 ms in both. With these steps the arms reach 0.59 and 0.37 of the limit.

The layer has the shape of Qwen3-30B-A3B's (128 experts, 8 per token, width 2048, inner width 768)
and runs a prefill of 16,384 tokens: 1.2 TFLOP, and 1.2 GB of weights. Routing and sorting are done
beforehand. The baseline gets the sizes of the groups on the host for free; a real caller waits for
the router there, or pads to a fixed capacity.

A loop of one product per expert has no padding either, but at this rate its 256 products take 8 µs
each, too short to hide the host's work for each. It is no arm here (labs/moe_ladder has one).
Kernels that gather rows inside the product (fused_moe in vLLM) were not measured. With few tokens,
as in decode, reading the weights binds. PyTorch's grouped GEMM needs bf16 and sm90 or sm100;
elsewhere it is itself a loop.
"""

from functools import partial

import pytest
import torch

from kernels.ch17 import expert_layouts
from pytest_aiperf import Bench, Compare, Work, evidence

Inputs = tuple[torch.Tensor, torch.Tensor, expert_layouts.Routing, torch.Tensor, torch.Tensor]

SIGMAS = {"skewed": 0.3, "even": 0.0}


def routed_tokens(bench: Bench, sigma: float) -> Inputs:
    """Draw the tokens, the weights of their experts, the experts by popularity, and matrices."""
    tokens, width = bench.size(16384, check=21), bench.size(2048, check=64)
    experts, top = bench.size(128, check=8), bench.size(8, check=2)
    inner = bench.size(768, check=32)
    options = {"device": bench.device, "dtype": torch.bfloat16}
    ranks = (torch.randperm(experts, device=bench.device) + 0.5) / experts
    # the largest sums of log popularity and Gumbel noise: drawn by popularity, all different
    noise = -torch.empty(tokens, experts, device=bench.device).exponential_().log()
    chosen = (sigma * torch.special.ndtri(ranks) + noise).topk(top).indices
    sizes = chosen.flatten().bincount(minlength=experts)
    ends = sizes.cumsum(0)
    order = chosen.flatten().argsort(stable=True)
    first_rows = (ends - sizes).repeat_interleave(sizes)
    in_order = torch.arange(len(order), device=bench.device) - first_rows
    positions = torch.empty_like(order).scatter_(0, order, in_order).view_as(chosen)
    gate_up = torch.randn(experts, width, 2 * inner, **options).mul_(width**-0.5)
    down = torch.randn(experts, inner, width, **options).mul_(inner**-0.5)
    weights = torch.randn(tokens, top, device=bench.device).softmax(1)
    routing = expert_layouts.Routing(chosen, positions, ends.int(), sizes.cpu())
    return torch.randn(tokens, width, **options), weights, routing, gate_up, down


def in_fp64(x, weights, routing, gate_up, down):
    """Look up the tokens of one expert at a time, without sorting."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert, (w_gate_up, w_down) in enumerate(zip(gate_up, down, strict=True)):
        token, choice = (routing.experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ w_gate_up.double()).tensor_split(2, 1)
        results = gate / (1 + (-gate).exp()) * up @ w_down.double()
        out.index_add_(0, token, weights[token, choice, None].double() * results)
    return out


def expert_products(x, weights, routing, gate_up, down):
    """Count three products of width x inner per choice, and all matrices."""
    return Work(
        read=x.nbytes + gate_up.nbytes + down.nbytes,
        written=x.nbytes,
        flops=6 * weights.numel() * down.shape[1] * down.shape[2],
        dtype="bf16",
    )


@pytest.mark.gpu(cpu=True)
@pytest.mark.sm90
@pytest.mark.sm100
@pytest.mark.sm103
@pytest.mark.parametrize("router", SIGMAS)
def test_dropless_grouped_gemm(compare: Compare, router: str) -> None:
    # 1.12 times the routed rows instead of 2.08 times: 0.54, and room for other tiles
    less_work = evidence.counter(
        "sm__ops_path_tensor_src_bf16_dst_fp32.sum", max=0.65, per="baseline"
    )
    compare(
        baseline=expert_layouts.padded,
        optimized=expert_layouts.grouped,
        inputs=partial(routed_tokens, sigma=SIGMAS[router]),
        work=expert_products,
        reference=in_fp64,
        evidence=[
            # CUTLASS's grouped GEMM: one kernel for each of the two products of all experts
            evidence.kernel_name("GroupProblemShape", min=2, max=2),
            *([less_work] if router == "skewed" else []),
        ],
    )
