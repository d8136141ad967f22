"""NVFP4: numbers of 4 bits, 16 of them to a scale, as the tensor cores of Blackwell read it.

A number is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two to a byte, the first in the
low half. 16 neighbours along k share a scale in E4M3, and a matrix has one scale in fp32 beside:
value = number * scale * matrix scale. 4.5 bits a value, 3.56 times less than bf16.

The scales lie in blocks of 512 bytes, for 128 rows and 4 scales along k: the scale (row, j) of a
block at byte (row % 32) * 16 + row // 32 * 4 + j. So 16 bytes of it serve a lane of tensor memory
for four rows. Blocks that follow each other along k follow each other in memory.
"""

import torch

GROUP = 16
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest(values):
    """Give the codes of the nearest E2M1 numbers, ties to the even code."""
    grid = torch.tensor(GRID, device=values.device)
    middle = (grid[1:] + grid[:-1]) / 2
    size = values.float().abs()
    below = torch.searchsorted(middle, size)  # on a middle: the lower one
    above = torch.searchsorted(middle, size, right=True)
    code = torch.where(below % 2 == 0, below, above)
    return (code + 8 * torch.signbit(values)).to(torch.uint8)


def matrix_scale(matrix):
    """Give the scale at which the largest scale of 16 values just fits into E4M3."""
    return float(matrix.abs().max()) / (6 * 448)


def block_scales(scales):
    """Order a rows x groups array as the tensor cores read it; rows % 128 and groups % 4 are 0."""
    rows, groups = scales.shape
    blocks = scales.view(rows // 128, 4, 32, groups // 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).contiguous().view(-1)


def unblock_scales(blocked, rows, groups):
    blocks = blocked.view(rows // 128, groups // 4, 32, 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).reshape(rows, groups)


def quantize(matrix, scale):
    """Return the packed numbers (rows x k / 2 bytes) and the blocked scales (bytes)."""
    groups = matrix.float().view(len(matrix), -1, GROUP)
    scales = (groups.abs().amax(2) / (6 * scale)).clamp(max=448).to(torch.float8_e4m3fn)
    each = scales.float() * scale
    numbers = groups / torch.where(each == 0, 1, each)[:, :, None]
    low, high = nearest(numbers).view(len(matrix), -1, 2).unbind(2)
    return low | high << 4, block_scales(scales.view(torch.uint8))


def dequantize(packed, blocked, scale):
    codes = torch.stack([packed & 15, packed >> 4], 2).view(len(packed), -1).int()
    numbers = torch.tensor(GRID, device=packed.device)[codes & 7] * (1 - 2 * (codes >> 3))
    scales = unblock_scales(blocked, len(packed), codes.shape[1] // GROUP)
    each = scales.view(torch.float8_e4m3fn).float() * scale
    return numbers * each.repeat_interleave(GROUP, 1)
