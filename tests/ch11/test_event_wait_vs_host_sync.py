"""Events between streams order dependent kernels faster than synchronizing with the host.

Four simulations run on four streams, and after each round a kernel couples them: it needs the
results of all four, and the next round needs its result. In the baseline the host enforces this
order with cudaDeviceSynchronize, twice per round. Each time the GPU is idle from the end of the
last kernel until the host has woken up and its next launch has arrived. "events" records an event
behind each kernel that another stream depends on, and lets that stream wait for it
(cudaStreamWaitEvent). The host does not wait; its launches and events then set the pace, as the
gain of the next rung suggests. "graph" captures these launches: the events become edges of a CUDA
graph, which replaces the 100 kernel launches and the copy by one launch. Code that synchronizes
with the host cannot be captured.

The claim is judged on wall time, and both arms run the same 100 kernels. The gain ends where
kernels run much longer than the delay of a synchronization. The host still has to wait where it
needs a result to decide what comes next; even there, waiting for one event (cudaEventSynchronize)
does not wait for the other streams.
"""

from functools import partial

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

ROUNDS, STEPS = 20, 200
EVIDENCE = {
    "events": evidence.busy_share(min=0.75),
    "graph": evidence.launches(max=1),
}


def pendulums(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(4, 8192, device=bench.device)
    return angles, torch.empty_like(angles)


def run(launcher, angles, out):
    launcher(angles, out, ROUNDS, STEPS)


def captured(launch, *inputs):
    launch(*inputs)  # creates streams and events, which is not allowed in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(*inputs)
    return lambda *_: graph.replay()


def in_fp64(angles, out):
    angles = angles.double()
    for _ in range(ROUNDS):
        for _ in range(STEPS):
            angles = angles - 0.0005 * angles.sin()
        angles = 0.9 * angles + 0.1 * angles.mean(0)
    return angles


@pytest.mark.gpu
@pytest.mark.parametrize("rung", EVIDENCE)
def test_event_wait_vs_host_sync(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    simulate = nvcc("ch11/coupled_streams.cu")
    host_sync, events = (partial(run, simulate[name]) for name in ("host_sync", "events"))
    compare(
        baseline=events if rung == "graph" else host_sync,
        optimized=prepared(partial(captured, events)) if rung == "graph" else events,
        against="previous rung" if rung == "graph" else "idiomatic",
        inputs=pendulums,
        reference=in_fp64,
        metric="wall",
        cache="warm",
        evidence=[EVIDENCE[rung]],
    )
