"""A kernel that keeps its values in registers beats one whose launch bounds make it spill.

`__launch_bounds__(256, 8)` requires eight resident blocks per SM, 2048 threads, and so leaves 32 of
the SM's 65536 registers to each thread. A thread that holds 64 values needs about 80. The rest goes
to local memory, which is device memory behind the caches: more than a kilobyte of spill stores and
as much of spill loads per thread, where the transform itself moves 512 bytes. Without a bound, or
with one that fits, 512 to 768 threads are resident and none spills. They lose nothing: occupancy
serves to hide latency, and 64 independent loads per thread hide it as well.

Tight bounds pay off where a kernel misses the next resident block by a few registers that the
compiler can save at no cost. The limit is one read and one write at memory bandwidth.
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
        against="naive",  # without the bound no compiler would use so few registers
        inputs=columns,
        work=lambda a, out, count: Work(
            read=a.nbytes, written=out.nbytes, flops=6 * a.numel(), dtype="fp32"
        ),
        reference=hadamard,
        evidence=[
            evidence.opcode("STL", kernel="wht_full_occupancy", min=100),
            evidence.opcode("STL", kernel=f"wht_{rung}", max=0),
            evidence.spills(kernel=f"wht_{rung}"),
            # so 512 threads per SM fit even without a bound; "matched" guarantees that
            evidence.registers(max=128, kernel="wht_unbounded"),
        ],
    )
