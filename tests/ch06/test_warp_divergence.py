"""Giving each warp elements of one kind beats a switch at which the lanes of a warp diverge.

Eight channels are interleaved, and each has a function of its own. A warp has one instruction
stream: at a switch it executes every case that any of its 32 lanes needs, with the other lanes
masked off (warp divergence). If a thread computes the element that it loads, each warp executes all
eight functions with four active lanes. If the block exchanges its tile through shared memory, warp
c computes channel c: one function, with all lanes active. Loads and stores are the same, and
coalesced.

The baseline is naive, because the divergence is the subject. As long as instructions set the time,
the gain is at most the number of channels, 8. Here memory limits it more: the baseline takes 470 µs
and a copy of the same bytes 125 on an H200, so the gain is at most 3.77x. It is 2.7x, at 72 % of
the copy rate. On an H100 a copy takes longer, and the gain is 2.4x at 90 % of the copy rate. What
takes the rest was not measured. The exchange costs two trips through shared memory, and warps with
cheap functions wait at its barrier for the most expensive one. A layout with one array per channel
needs no exchange. Cases of a few instructions are predicated and cost little. Where only
coefficients differ, a table of them needs no branch at all. The library arm is one PyTorch kernel
per channel, on strided views, and takes 3.2 times as long as the baseline on an H200. Each of the
eight moves the whole array, because a 32-byte sector holds all channels.
"""

import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence

ACTIVE_LANES = "smsp__thread_inst_executed_per_inst_executed.ratio"
FUNCTIONS = [
    torch.sin, torch.exp, torch.log1p, torch.erf,
    torch.tanh, torch.atan, torch.lgamma, torch.special.bessel_j0,
]  # fmt: skip


def channels(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    n = bench.size(2**26 + 1000, check=5003)  # with a partial tile
    x = 0.5 + 0.45 * torch.rand(n, device=bench.device)
    return x, torch.empty_like(x), n


def by_channel(x, out, n):
    for channel, function in enumerate(FUNCTIONS):
        function(x[channel::8], out=out[channel::8])


def in_fp64(x, out, n):
    result = x.double()
    for channel, function in enumerate(FUNCTIONS):
        result[channel::8] = function(result[channel::8])
    return result


def test_warp_divergence(compare: Compare, nvcc: Nvcc) -> None:
    apply = nvcc("ch06/interleaved_channels.cu")
    compare(
        baseline=apply["by_lane"],
        optimized=apply["by_warp"],
        library=by_channel,
        against="naive",
        inputs=channels,
        work=lambda x, out, n: Work(read=x.nbytes, written=out.nbytes),
        reference=in_fp64,
        evidence=[evidence.counter(ACTIVE_LANES, kernel="apply_by", min=24)],
    )
