"""Inputs of up to 40 % of the GPU's memory are measured."""

import pytest
import torch

from pytest_aiperf import measure
from pytest_aiperf.model import Verdict

# The references return exactly the arms' result, in its dtype: fp64 would take twice the memory.
CLAIMS = {
    "in place": {
        "inputs": lambda n: (torch.randn(n, device="cuda"),),
        "baseline": lambda x: torch.neg(x, out=x),
        "optimized": lambda x: x.neg_(),
        "reference": lambda x: x.neg(),
    },
    "into an output": {
        "inputs": lambda n: (
            torch.randn(n // 2, device="cuda"),
            torch.empty(n // 2, device="cuda"),
        ),
        "baseline": lambda x, out: torch.neg(x, out=out),
        "optimized": lambda x, out: torch.mul(x, -1, out=out),
        "reference": lambda x, out: x.neg(),
    },
}


@pytest.mark.parametrize("gib", [4, 16, 40, 56])
@pytest.mark.parametrize("kind", CLAIMS)
def test_identical_arms_on_large_inputs_are_the_same(gpu, kind, gib):
    if gib << 30 > 0.41 * gpu.memory_bytes:
        pytest.skip(f"{gib} GiB are more than 40 % of this GPU's memory")
    claim = CLAIMS[kind]
    elements = (gib << 30) // 4
    torch.cuda.empty_cache()
    result = measure(
        **{**claim, "inputs": lambda bench: claim["inputs"](elements)}, quick=True, seed=1
    )
    print(kind, gib, result.verdict, result.speedup, f"{result.seconds:.1f} s")
    assert result.verdict in {Verdict.SAME, Verdict.INCONCLUSIVE}, result.message
    assert {error.error for error in result.agreement} == {0.0}
