"""The NVFP4 codec agrees with its definition, memory layout included.

The Blackwell kernel (nvfp4_linear.cu) reads what this codec writes, so the layout is checked here,
without a GPU.
"""

import pytest
import torch

from kernels.ch19 import nvfp4


def test_numbers_of_the_grid_are_kept_and_ties_go_to_even_codes():
    numbers = torch.tensor(nvfp4.E2M1_VALUES)
    assert nvfp4.e2m1_codes(torch.cat([numbers, -numbers])).tolist() == list(range(16))
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    assert nvfp4.e2m1_codes(midpoints).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert nvfp4.e2m1_codes(torch.tensor([0.26, 1.24, 2.6, 4.9, 5.1, 99.0])).tolist() == [
        *(1, 2, 5, 6, 7, 7)
    ]


def test_scales_lie_where_the_tensor_cores_read_them():
    rows, groups = 256, 8
    scales = torch.randint(0, 126, (rows, groups), dtype=torch.uint8)
    blocked = nvfp4.to_blocked(scales)
    for row in range(rows):
        for group in range(groups):
            block = row // 128 * (groups // 4) + group // 4
            offset = row % 32 * 16 + row % 128 // 32 * 4 + group % 4
            assert blocked[512 * block + offset] == scales[row, group]
    assert torch.equal(nvfp4.from_blocked(blocked, rows, groups), scales)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_value_comes_back_within_half_a_step(size):
    matrix = size * torch.randn(128, 256)
    scale = nvfp4.matrix_scale(matrix)
    packed, blocked = nvfp4.quantize(matrix, scale)
    decoded = nvfp4.dequantize(packed, blocked, scale)
    assert packed.numel() + blocked.numel() == matrix.numel() * 4.5 / 8
    group_max = matrix.view(128, -1, 16).abs().amax(2).repeat_interleave(16, 1)
    # half of the widest step (4 to 6), plus the rounding error of the scale
    assert (abs(decoded - matrix) <= group_max * (1 / 6 + 1 / 16)).all()
    assert (decoded - matrix).norm() / matrix.norm() < 0.12


def test_rows_of_one_grid_survive_unchanged():
    codes = torch.randint(0, 16, (128, 64))
    codes[:, ::16] = 7  # every group contains a 6, so its scale is exact
    values = torch.tensor(nvfp4.E2M1_VALUES)[codes & 7] * (1 - 2 * (codes >> 3))
    decoded = nvfp4.dequantize(*nvfp4.quantize(4 * values, 0.25), 0.25)
    assert torch.equal(decoded, 4 * values)
