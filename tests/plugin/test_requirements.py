"""Claim ids and requirements of a collected item."""

import re
from dataclasses import replace

import pytest

from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import requirements
from pytest_aiperf.model import FEATURES, Gpu

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
        ("tests/ch01/test_a.py::TestGroup::test_b[aten::mm]", "ch01/b[aten::mm]"),
        ("tests/ch01/test_a.py::test_b[ranks=4]", "ch01/b"),
        ("tests/ch01/test_a.py::test_b[x-ranks=4]", "ch01/b[x]"),
        ("tests/ch01/test_a.py::test_b[ranks=4-x]", "ch01/b[ranks=4-x]"),
    ],
)
def test_claim_ids(nodeid, claim):
    assert requirements.claim_id(nodeid) == claim


def test_the_number_of_ranks_is_part_of_the_id_in_a_run():
    assert requirements.run_id("tests/ch01/test_a.py::test_b[x-ranks=4]") == "ch01/b[x][ranks=4]"
    assert requirements.run_id("tests/ch01/test_a.py::test_b[x]") == "ch01/b[x]"


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (pytest.mark.sm100, "needs sm100, NVIDIA H200 is sm90"),
        (pytest.mark.gpu(count=2), "needs 2 GPUs, this machine has 1"),
        (pytest.mark.gpu(min_sm=100), "needs sm100 or newer, NVIDIA H200 is sm90"),
        (pytest.mark.gpu(memory=200 << 30), "needs 200 GiB of GPU memory, NVIDIA H200 has 141 GiB"),
        (pytest.mark.sm90, None),
        (pytest.mark.gpu(min_sm=90), None),
        (pytest.mark.gpu(features=("tma", "dsmem")), None),
        (pytest.mark.gpu(features="fp4"), "needs fp4, NVIDIA H200 is sm90"),
        (
            pytest.mark.gpu(features=("tcgen05", "tma", "fp4")),
            "needs fp4 and tcgen05, NVIDIA H200 is sm90",
        ),
        (
            pytest.mark.gpu(features=("tma",), min_sm=100),
            "needs sm100 or newer, NVIDIA H200 is sm90",
        ),
        (pytest.mark.gpu(shared_memory=227 << 10), None),
        (pytest.mark.host, None),
    ],
)
def test_missing_requirements_are_described(mark, words):
    assert requirements.requirements_of([mark.mark]).missing([H200]) == words


def test_a_block_that_needs_more_shared_memory_than_a_gb10_has_is_skipped_there():
    mark = pytest.mark.gpu(features="tma", shared_memory=128 << 10).mark
    needed = requirements.requirements_of([mark])
    assert needed.build_archs == ("sm90", "sm100", "sm103")
    assert needed.missing([replace(H200, arch="sm121", name="GB10")]) == (
        "needs 128 KiB of shared memory per block, GB10 is sm121"
    )
    assert needed.missing([replace(H200, arch="sm140")]) is None  # newer than the table


def test_several_architectures_mean_any_of_them():
    needed = requirements.requirements_of([pytest.mark.sm90.mark, pytest.mark.sm100.mark])
    assert needed.missing([H200]) is None
    assert needed.missing([replace(H200, arch="sm121", name="GB10")]) == (
        "needs sm100 or sm90, GB10 is sm121"
    )


@pytest.mark.parametrize(
    ("marks", "checked"),
    [
        ([], True),
        ([pytest.mark.host], True),
        ([pytest.mark.sm90], False),
        ([pytest.mark.gpu(min_sm=89)], False),
        ([pytest.mark.gpu(min_sm=89, cpu=True)], True),
        ([pytest.mark.sm90, pytest.mark.gpu(cpu=True)], True),
        ([pytest.mark.gpu(cpu=True), pytest.mark.gpu(cpu=False)], False),
        ([pytest.mark.gpu(count=2)], True),
        ([pytest.mark.gpu(count=2, cpu=False)], False),
    ],
)
def test_who_is_checked_on_the_cpu(marks, checked):
    assert requirements.requirements_of([m.mark for m in marks]).checked_on_cpu is checked


@pytest.mark.parametrize(
    ("arch", "features"),
    [
        ("sm80", set()),
        ("sm89", {"fp8"}),
        ("sm90", {"fp8", "tma", "clusters", "dsmem", "pdl", "wgmma"}),
        ("sm100", {"fp8", "tma", "clusters", "dsmem", "pdl", "tcgen05", "fp4"}),
        ("sm103", {"fp8", "tma", "clusters", "dsmem", "pdl", "tcgen05", "fp4"}),
        ("sm121", {"fp8", "tma", "clusters", "dsmem", "pdl", "fp4"}),
        ("sm140", {"fp8", "tma", "clusters", "dsmem", "pdl"}),  # newer than the table
    ],
)
def test_features_of_an_architecture(arch, features):
    gpu = replace(H200, arch=arch)
    assert set(gpu.features) == features
    for name in FEATURES:
        reason = requirements.requirements_of([pytest.mark.gpu(features=(name,)).mark]).missing(
            [gpu]
        )
        assert (reason is None) is (name in features)


def test_features_of_several_marks_add_up():
    marks = [pytest.mark.gpu(features=("tma",)).mark, pytest.mark.gpu(features=("fp8",)).mark]
    needed = requirements.requirements_of(marks)
    assert needed.features == ("fp8", "tma")
    assert needed.min_sm == 90
    assert requirements.requirements_of([*marks, pytest.mark.gpu(min_sm=100).mark]).min_sm == 100


@pytest.mark.parametrize(
    ("marks", "archs"),
    [
        ([], ("sm90", "sm100", "sm103", "sm121")),
        ([pytest.mark.gpu(features=("pdl",))], ("sm90", "sm100", "sm103", "sm121")),
        ([pytest.mark.gpu(features=("tcgen05",))], ("sm100", "sm103")),
        ([pytest.mark.gpu(features=("fp4",))], ("sm100", "sm103", "sm121")),
        ([pytest.mark.gpu(features=("fp4",)), pytest.mark.sm121], ("sm121",)),
        ([pytest.mark.gpu(min_sm=89)], ("sm90", "sm100", "sm103", "sm121")),
        ([pytest.mark.gpu(min_sm=100)], ("sm100", "sm103", "sm121")),
        ([pytest.mark.gpu(min_sm=130)], ("sm121",)),
    ],
)
def test_kernels_are_built_for_architectures_that_the_markers_allow(marks, archs):
    assert requirements.requirements_of([m.mark for m in marks]).build_archs == archs


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ([pytest.mark.gpu(features=("wmma",))], "knows fp8, tma, .* not 'wmma'"),
        ([pytest.mark.gpu(features="tcgen5")], "not 'tcgen5'"),
        ([pytest.mark.gpu(features=90)], "not 90"),
        ([pytest.mark.gpu(features=("wgmma", "tcgen05"))], "has tcgen05 and wgmma"),
        ([pytest.mark.gpu(shared_memory=1 << 20)], "has 1024 KiB of shared memory per block"),
        ([pytest.mark.sm90, pytest.mark.gpu(features=("fp4",))], "no architecture of sm90 has fp4"),
    ],
)
def test_features_that_no_gpu_has_are_refused(marks, words):
    with pytest.raises(UsageError, match=words):
        requirements.requirements_of([m.mark for m in marks])


@pytest.mark.parametrize("mark", [pytest.mark.gpu(2), pytest.mark.gpu(cores=3)])
def test_invalid_arguments_of_the_gpu_mark_are_refused(mark):
    with pytest.raises(UsageError, match="count=, min_sm="):
        requirements.requirements_of([mark.mark])


@pytest.mark.parametrize(
    "given",
    [{"min_sm": "sm90"}, {"min_sm": 9.0}, {"memory": "40GB"}, {"count": "2"}, {"count": 1.5},
     {"shared_memory": "100k"}],
)  # fmt: skip
def test_what_is_no_number_is_refused(given):
    [(name, value)] = given.items()
    words = re.escape(f"@pytest.mark.gpu({name}={value!r}): give a number, such as count=2")
    with pytest.raises(UsageError, match=words):
        requirements.requirements_of([pytest.mark.gpu(**given).mark])


def test_of_several_marks_the_highest_requirement_counts():
    high, low = pytest.mark.gpu(min_sm=100, memory=80e9), pytest.mark.gpu(min_sm=80, memory=4e9)
    for marks in ((high, low), (low, high)):  # of the test and its module
        needed = requirements.requirements_of([m.mark for m in marks])
        assert (needed.min_sm, needed.memory) == (100, 80e9)


def test_the_defaults_of_the_gpu_mark_may_be_given():
    mark = pytest.mark.gpu(count=1, min_sm=None, memory=None, shared_memory=0, cpu=None)
    for marks in ([mark], [pytest.mark.gpu(cpu=True), mark]):
        needed = requirements.requirements_of([m.mark for m in marks])
        assert needed == requirements.requirements_of([marks[0].mark])
    count = pytest.mark.gpu(count=2, cpu=None)
    assert requirements.requirements_of([count.mark]).checked_on_cpu


def test_host_and_gpu_exclude_each_other():
    with pytest.raises(UsageError, match="either for the host or for GPUs"):
        requirements.requirements_of([pytest.mark.host.mark, pytest.mark.sm90.mark])


def test_duplicate_ids_are_found():
    found = requirements.duplicates(
        [("a/b", "x::1"), ("a/b", "y::1"), ("a/c", "x::2"), ("a/b", "x::1")]
    )
    assert found == [("a/b", "x::1", "y::1")]
