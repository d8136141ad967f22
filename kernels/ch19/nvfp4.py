"""NVFP4: 4-bit numbers with one scale per 16, in the layout that Blackwell's tensor cores read.

A number is E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 or the negative of one of these. A byte holds two, the
first in the low half. 16 neighbors along k share an E4M3 scale, and the matrix has one fp32 scale:
value = number * scale * matrix scale. That is 4.5 bits per value, 3.56 times fewer than bf16.

Scales are stored in blocks of 512 bytes, each for 128 rows and 4 scales along k. In a block, the
scale (row, j) is byte (row % 32) * 16 + row // 32 * 4 + j: a lane of tensor memory gets the 16
contiguous bytes of its four rows. Blocks that are neighbors along k are contiguous.
"""

import torch

GROUP = 16
"""Values that share a scale."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The positive numbers, in the order of their codes 0 to 7; bit 3 of a code is the sign."""

E4M3_MAX = 448
"""Largest scale of a group (float8_e4m3fn)."""


def e2m1_codes(values):
    """Round to the nearest E2M1 numbers, ties to the even code."""
    numbers = torch.tensor(E2M1_VALUES, device=values.device)
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    magnitude = values.float().abs()
    lower = torch.searchsorted(midpoints, magnitude)  # on a tie, the lower neighbor
    upper = torch.searchsorted(midpoints, magnitude, right=True)
    code = torch.where(lower % 2 == 0, lower, upper)
    return (code + 8 * torch.signbit(values)).to(torch.uint8)


def matrix_scale(matrix):
    """Return the matrix scale that maps the largest group scale to E4M3's maximum."""
    return float(matrix.abs().max()) / (E2M1_VALUES[-1] * E4M3_MAX)


def to_blocked(scales):
    """Reorder rows x groups into the blocks of 512; needs rows % 128 == 0 and groups % 4 == 0."""
    rows, groups = scales.shape
    blocks = scales.view(rows // 128, 4, 32, groups // 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).contiguous().view(-1)


def from_blocked(blocked, rows, groups):
    blocks = blocked.view(rows // 128, groups // 4, 32, 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).reshape(rows, groups)


def quantize(matrix, scale):
    """Return the packed numbers (rows x k / 2 bytes) and the blocked scales (bytes)."""
    groups = matrix.float().view(len(matrix), -1, GROUP)
    scales = groups.abs().amax(2) / (E2M1_VALUES[-1] * scale)
    scales = scales.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    group_scales = scales.float() * scale
    numbers = groups / torch.where(group_scales == 0, 1, group_scales)[:, :, None]
    low, high = e2m1_codes(numbers).view(len(matrix), -1, 2).unbind(2)
    return low | high << 4, to_blocked(scales.view(torch.uint8))


def dequantize(packed, blocked, scale):
    codes = torch.stack([packed & 15, packed >> 4], 2).view(len(packed), -1).int()
    magnitudes = torch.tensor(E2M1_VALUES, device=packed.device)[codes & 7]
    numbers = magnitudes * (1 - 2 * (codes >> 3))
    scales = from_blocked(blocked, len(packed), codes.shape[1] // GROUP)
    group_scales = scales.view(torch.float8_e4m3fn).float() * scale
    return numbers * group_scales.repeat_interleave(GROUP, 1)
