"""a @ b.T of fp8 matrices with two levels of accumulation, in Triton.

Hopper's tensor cores add fp8 products with about 14 bits: a long sum loses the low bits of each new
product. Two-level accumulation keeps only short sums in the tensor cores, of 128 products here, and
adds them to fp32 accumulators in registers (promotion). So a tile needs two sets of accumulators,
and 128 x 256 elements would not fit in the registers of eight warps.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.ch14.matmul_fp8 import _tile_origin

TILE_M, TILE_N, TILE_K = 128, 128, 128
SCHEDULE = {"TM": TILE_M, "TN": TILE_N, "TK": TILE_K, "GROUP_M": 8}


@triton.jit
def _promoted(  # noqa: PLR0917  a Triton launch passes arguments by position
    a, b, c, M, N, K, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, GROUP_M: tl.constexpr,
    LONGEST_SUM: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, TM) * tl.cdiv(N, TN), PROGRAMS, flatten=True):
        m, n = _tile_origin(tile, M, N, TM, TN, GROUP_M)
        accumulator = tl.zeros((TM, TN), tl.float32)
        for k in range(0, K, TK):
            accumulator = tl.dot(
                a.load([m, k]), b.load([n, k]).T, accumulator, max_num_imprecise_acc=LONGEST_SUM
            )
        c.store([m, n], accumulator.to(c.dtype))


def multiply(a, b, dtype, longest_sum=TILE_K):
    """Return a @ b.T; the tensor cores add up to ``longest_sum`` products."""
    (M, K), N = a.shape, len(b)
    c = torch.empty(M, N, device=a.device, dtype=dtype)
    blocks = (a, [TILE_M, TILE_K]), (b, [TILE_N, TILE_K]), (c, [TILE_M, TILE_N])
    descriptors = [TensorDescriptor.from_tensor(x, block) for x, block in blocks]
    programs = triton.cdiv(M, TILE_M) * triton.cdiv(N, TILE_N)
    if a.is_cuda:
        sm_count = torch.cuda.get_device_properties(a.device).multi_processor_count
        programs = min(programs, sm_count)
    _promoted[(programs,)](
        *descriptors, M, N, K, **SCHEDULE, LONGEST_SUM=longest_sum, PROGRAMS=programs,
        num_warps=8, num_stages=4,
    )  # fmt: skip
    return c
