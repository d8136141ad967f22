"""Small requests wait far less for a persistent kernel on SMs of their own than with priority.

A background job launches persistent kernels, which fill every SM from their start to their end, as
GEMM and attention kernels do. A request of three small kernels arrives after each of these
launches. Its stream has a higher priority, so its blocks are the next to start
(ch11/stream_priority). But blocks that run are not interrupted, and these run for the whole kernel:
priority does not help. Green contexts divide the SMs of a GPU within a process ("SM partition"):
requests get eight of them, the background job all others, and a request finds its SMs free. On an
H100, a request takes 0.09 ms instead of 0.40, and on H200s 0.05 to 0.09 ms instead of 0.38 to 0.41,
depending on the host. With priority, most of that time is the wait for a background kernel. The aim
was a fifth of the latency. Most runs on H200s reach it. Where a request takes 0.09 ms even on SMs
of its own, as on the H100, it is missed. The ratio is that of this load: a background kernel takes
0.47 ms, and a request arrives just after its start, when most of it is left to wait for. With
longer kernels the gain grows; with shorter ones it vanishes.

The score is the 95th percentile of the latencies of 24 requests, from the first launch until the
host knows the result. The cost of the isolation is judged as well. The background job loses eight
SMs, 6 % of an H100's, even when no request comes. The wall time of a call, until the job and all
requests have ended, may grow by a quarter; it grows by 5 to 6 % (on an H100 from 11.3 ms to 11.9).
The library arm needs no green contexts: with priority, it launches the background kernels with only
as many blocks as all SMs but eight hold, so that the blocks of a request should find room. On H200s
its requests still take 0.34 to 0.36 ms, 9 to 16 % less than with priority alone, and its calls as
long as with the partition (12.0 and 11.9 ms). This does not fit the explanation above: 64 places
for blocks are free and a request needs 32, but its requests still wait for most of the background
kernel. So free places alone do not explain the wait; the cause was not examined. The library arm
also needs kernels whose grid can be chosen, and the room is not reserved: blocks of any other work
may take it. The partitions share the L2 cache and the memory bandwidth; a job that is limited by
these slows the requests down as before. A kernel that launches as many blocks as the whole GPU
holds needs a second wave on a partition: size its grid for the SMs that it has. MIG partitions
memory as well, but between processes, and only an administrator can change it. If blocks are short,
priority is enough, and leaves all SMs to the job.
"""

import time
from functools import partial
from statistics import fmean

import pytest
import torch

from kernels.ch03 import sm_partition
from pytest_aiperf import Bench, Compare, Gpu, Nvcc, scores

REQUESTS, KERNELS = 24, 3
BACKGROUND_STEPS, REQUEST_STEPS = 100, 20

MAX_PRICE = 1.25
"""Most that a call, which ends when job and requests have ended, may take longer."""

MIN_WAIT = 0.5
"""Least latency with priority, in background kernels: nearly a whole one is left to wait for."""

Job = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def job_and_requests(bench: Bench) -> Job:
    """Draw the angles of the job, make room for its result, and draw those of the requests."""
    job = torch.randn(bench.size(2**22, check=1000), device=bench.device)
    return job, torch.empty_like(job), torch.randn(REQUESTS, 8192, device=bench.device)


def serve(streams, swing, job, job_result, requests):
    background, foreground, background_sms = streams()
    results = torch.empty_like(requests)
    latencies = []
    torch.cuda.current_stream().synchronize()
    for request, result in zip(requests, results, strict=True):
        with torch.cuda.stream(background):
            swing(job, job_result, len(job), BACKGROUND_STEPS, background_sms)
        begin = time.perf_counter()
        with torch.cuda.stream(foreground):
            source = request
            for _ in range(KERNELS):
                swing(source, result, len(result), REQUEST_STEPS, background_sms)
                source = result
        foreground.synchronize()
        latencies.append(time.perf_counter() - begin)
    background.synchronize()
    return results, scores.latency(latencies, percent=95)


def in_fp64(job, job_result, requests):
    return swung(requests, KERNELS * REQUEST_STEPS), swung(job, BACKGROUND_STEPS)


def swung(angles, steps):
    angles = angles.double()
    for _ in range(steps):
        angles.sub_(torch.sin(angles), alpha=5e-4)
    return angles


def means_by_arm(timing):
    """Return the mean seconds of each arm, per call or as a score."""
    blocks = [block.seconds for r in timing.replicates for block in r.rounds]
    return {arm: fmean(s for block in blocks for s in block[arm]) for arm in blocks[0]}


@pytest.mark.gpu(min_sm=90)
def test_green_context_isolation(compare: Compare, nvcc: Nvcc) -> None:
    swing = nvcc("ch03/persistent_swing.cu")["swing"]
    result = compare(
        baseline=partial(serve, sm_partition.by_priority, swing),
        optimized=partial(serve, sm_partition.by_partition, swing),
        library=partial(serve, sm_partition.by_smaller_grid, swing),
        inputs=job_and_requests,
        reference=in_fp64,
        metric=("score", "wall"),
    )
    assert result.also or result.timing is None  # the price was measured, too, if anything was
    for walls in result.also:
        wall, latency = means_by_arm(walls), means_by_arm(result.timing)
        assert wall["optimized"] <= MAX_PRICE * wall["baseline"]
        assert latency["baseline"] >= MIN_WAIT * wall["baseline"] / REQUESTS


@pytest.mark.gpu(min_sm=90)
def test_the_partitions_share_no_sm(gpu: Gpu, nvcc: Nvcc) -> None:
    sm_ids = nvcc("ch03/persistent_swing.cu")["sm_ids"]
    background, foreground, background_sms = sm_partition.by_partition()
    used = []
    for stream in background, foreground:
        ids = torch.full((64 * gpu.sms,), -1, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            sm_ids(ids, len(ids))
        stream.synchronize()
        used.append(set(ids.tolist()))
    assert used[0].isdisjoint(used[1])
    assert len(used[0]) == background_sms
    assert len(used[1]) >= sm_partition.REQUEST_SMS
