"""Claim ids and requirements of a collected item."""

from dataclasses import replace

import pytest

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import requirements
from pytest_aiperf.model import Gpu

H200 = Gpu("NVIDIA H200", "h200", "GPU-1", "sm90", 132, 60 << 20, 141 << 30, "580")


@pytest.mark.parametrize(
    ("nodeid", "claim"),
    [
        (
            "tests/ch07/test_coalesced_copy.py::test_coalesced_copy[vector]",
            "ch07/coalesced_copy[vector]",
        ),
        ("tests/labs/test_a.py::test_scan", "labs/scan"),
        ("test_add.py::test_add", "add/add"),
        ("tests/ch01/test_a.py::TestGroup::test_b[1-x/y]", "ch01/b[1-x/y]"),
    ],
)
def test_claim_ids(nodeid, claim):
    assert requirements.claim_id(nodeid) == claim


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (pytest.mark.sm100, "needs sm100, NVIDIA H200 is sm90"),
        (pytest.mark.gpu(count=2), "needs 2 GPUs, this machine has 1"),
        (pytest.mark.gpu(min_sm=100), "needs sm100 or newer, NVIDIA H200 is sm90"),
        (pytest.mark.gpu(memory=200 << 30), "needs 200 GiB of GPU memory, NVIDIA H200 has 141 GiB"),
        (pytest.mark.sm90, None),
        (pytest.mark.gpu(min_sm=90), None),
        (pytest.mark.host, None),
    ],
)
def test_missing_requirements_are_described(mark, words):
    assert requirements.requirements_of([mark.mark]).missing([H200]) == words


def test_several_architectures_mean_any_of_them():
    needed = requirements.requirements_of([pytest.mark.sm90.mark, pytest.mark.sm100.mark])
    assert needed.missing([H200]) is None
    assert needed.missing([replace(H200, arch="sm121", name="GB10")]) == (
        "needs sm100 or sm90, GB10 is sm121"
    )


@pytest.mark.parametrize("mark", [pytest.mark.gpu(2), pytest.mark.gpu(cores=3)])
def test_invalid_arguments_of_the_gpu_mark_are_refused(mark):
    with pytest.raises(UsageError, match="count=, min_sm="):
        requirements.requirements_of([mark.mark])


def test_host_and_gpu_exclude_each_other():
    with pytest.raises(UsageError, match="either for the host or for GPUs"):
        requirements.requirements_of([pytest.mark.host.mark, pytest.mark.sm90.mark])


def test_duplicate_ids_are_found():
    found = requirements.duplicates(
        [("a/b", "x::1"), ("a/b", "y::1"), ("a/c", "x::2"), ("a/b", "x::1")]
    )
    assert found == [("a/b", "x::1", "y::1")]
