"""A kernel that keeps its registers beats one whose launch bounds make it spill.

`__launch_bounds__(256, 8)` promises the compiler eight blocks on each multiprocessor, 2048 threads,
and leaves 32 of its 65536 registers to each. A thread that holds 64 values needs about 80; what
does not fit goes to local memory, which is device memory behind the caches: some 300 stores and 300
loads a thread, more than four times the traffic that the transform itself has. Without the bound,
or with one that fits, 512 to 768 threads are resident and none spills. They miss nothing: occupancy
is a means to hide latency, and 64 independent loads a thread hide more of it.

Bounds pay the other way round where a kernel misses the next block by a few registers that the
compiler can save at no cost. The limit is one read and one write at the speed of memory.
"""

import pytest
import torch

from pytest_aiperf import Bench, Compare, Nvcc, Work, evidence


def columns(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, int]:
    count = bench.size(2**20 + 100, check=300)
    a = torch.randn(64, count, device=bench.device)
    return a, torch.empty_like(a), count


def hadamard(a, out, count):
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    matrix = two
    for _ in range(5):
        matrix = torch.kron(matrix, two)
    return matrix.to(a.device) @ a.double()


@pytest.mark.parametrize("rung", ["unbounded", "matched"])
def test_launch_bounds_spills(compare: Compare, nvcc: Nvcc, rung: str) -> None:
    transform = nvcc("ch06/walsh_hadamard.cu")
    compare(
        baseline=transform["full_occupancy"],
        optimized=transform[rung],
        against="naive",  # no compiler leaves so few registers unless a bound demands it
        inputs=columns,
        work=lambda a, out, count: Work(bytes=2 * a.nbytes, flops=6 * a.numel(), dtype="fp32"),
        reference=hadamard,
        evidence=[
            evidence.opcode("STL", kernel="wht_full_occupancy", least=100),
            evidence.opcode("STL", kernel=f"wht_{rung}", most=0),
            evidence.spills(most=0, kernel=f"wht_{rung}"),
            # 512 threads fit, though nothing bounds it ("matched" leaves the compiler no choice)
            evidence.registers(most=128, kernel="wht_unbounded"),
        ],
    )
