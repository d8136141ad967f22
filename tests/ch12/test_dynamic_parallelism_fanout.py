"""Keeping the loop over a tree's levels on the GPU beats a host round trip per level.

The size of a level is known only when the level above is finished. The host loop copies the count
back, waits, and launches a grid of that size: 20 short levels cost 20 round trips. With dynamic
parallelism ("device_launch") the last block of a level launches the next grid, which starts when
this one has finished (a tail launch). A persistent cooperative grid ("persistent") launches nothing
more and uses a grid barrier after each level. Here it is four times as fast as the device launches;
it suits trees for which one grid size is good enough.

The claim is judged on wall time. All trees have the same level sizes, each 1.7 times the one
before; parents and labels are random. A tail launch saves only a part of the round trip, because it
costs more than a short level's work: on an H200, 20 levels take 262 µs instead of 423, and the
kernel of a level runs for about 2.3 µs of its 13. "persistent" takes 60 µs in all. A graph that
launches itself again from the device is not measured here, nor is a host that launches grids of a
fixed size for several levels and reads the count later (test_conditional_graph.py). Levels that run
longer than a host round trip gain little. Launches nest at most 24 deep, and the code must be
relocatable (-rdc=true).
"""

from functools import partial

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, evidence, prepared

LEVELS = 20


def tree(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw each node's parent in the level above, and label all nodes but the root at random."""
    growth, device = bench.size(17, check=12) / 10, bench.device
    widths = [int(growth**level) for level in range(LEVELS)]
    count = sum(widths)
    starts = [sum(widths[:level]) for level in range(LEVELS)]
    labels = torch.cat([torch.zeros(1), 1 + torch.randperm(count - 1)]).to(device, torch.int64)
    levels = zip(starts, widths, widths[1:], strict=False)
    parent = torch.cat([start + torch.randint(above, (width,)) for start, above, width in levels])
    parent, order = labels[parent.to(device)].sort()
    first = torch.searchsorted(parent, torch.arange(count + 1, device=device))
    children = labels[1:][order]
    return first.int(), children.int(), torch.empty(count, dtype=torch.int32, device=device)


def depths_of(first, children, depths):
    count = len(depths)
    parent = torch.zeros(count, dtype=torch.int64, device=first.device)
    parent[children.long()] = torch.arange(count, device=first.device).repeat_interleave(
        first.diff().long()
    )
    depth, ancestor = torch.zeros_like(parent), torch.arange(count, device=first.device)
    for _ in range(LEVELS):
        depth, ancestor = depth + (ancestor > 0), parent[ancestor]
    return depth


def arm(launcher):
    return prepared(partial(allocate, launcher))


def allocate(launcher, _first, _children, depths):
    count = len(depths)
    frontier, scratch = depths.new_empty(2 * count), depths.new_empty(65)
    pinned = torch.empty(1, dtype=torch.int32).pin_memory()
    return lambda *tree: launcher(*tree, frontier, count, scratch, pinned)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", ["device_launch", "persistent"])
def test_dynamic_parallelism_fanout(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    expand = nvcc("ch12/dynamic_parallelism_fanout.cu", ["-rdc=true", "-lcudadevrt"])
    compare(
        baseline=arm(expand["host_loop"]),
        optimized=arm(expand[rung]),
        inputs=tree,
        reference=depths_of,
        metric="wall",
        cache="warm",
        evidence=[evidence.launches(max=0.1, per="baseline")],
    )
