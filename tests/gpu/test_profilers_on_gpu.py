"""The profilers on a real GPU: they capture what any thread of the call launches."""

import pytest
import torch


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_kernels_that_autograds_threads_launch_are_captured(capture, tool):
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    gradient = torch.randn_like(x)
    profile = capture(lambda: torch.softmax(x, -1).backward(gradient), tool=tool)
    names = [name.lower() for name in profile.kernels if "softmax" in name.lower()]
    assert any("forward" in name for name in names), profile.kernels
    assert any("backward" in name for name in names), profile.kernels
