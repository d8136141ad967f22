"""Skew of ranks at collectives, from one trace per rank."""

import json

import pytest

from pytest_aiperf.profilers import command, skew, tools

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"


def kernel(start_us, name=ALL_REDUCE, **args):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start_us, "dur": 5, "args": args}


def write(folder, rank, *events, base=0):
    file = folder / f"{rank}.pt.trace.json"
    file.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
    return file


def ranks(folder, first, second, **bases):
    files = enumerate((first, second))
    return {
        f"rank {rank}": write(folder, rank, *events, base=bases.get(f"base{rank}", 0))
        for rank, events in files
    }


def test_the_rank_that_arrives_last_is_named(tmp_path):
    found = skew.of(
        ranks(
            tmp_path,
            [kernel(100), kernel(50, "gemm"), kernel(200), kernel(300, "ncclDevKernel_SendRecv()")],
            [kernel(130), kernel(210)],
        )
    )
    assert found.collectives == 2
    assert found.mean == pytest.approx(20e-6)
    assert found.largest == pytest.approx(30e-6)
    assert found.waits == pytest.approx({"rank 0": 40e-6, "rank 1": 0})
    assert str(found) == (
        "ranks arrive 20.00 µs apart on average, at most 30.00 µs at "
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL (collectives: 2); rank 1 is the last one at "
        "100 % of them"
    )


def test_times_of_two_processes_have_different_starts(tmp_path):
    found = skew.of(ranks(tmp_path, [kernel(100)], [kernel(10)], base0=1000, base1=95_000))
    assert found.mean == pytest.approx(4e-6)
    assert found.last == "rank 1"


@pytest.mark.parametrize("is_numbered", [True, False])
def test_a_collective_that_one_rank_did_not_record(tmp_path, is_numbered):
    first, second = ([3, 100], [4, 200]), ([4, 206], [5, 300], [6, 400])
    found = skew.of(
        ranks(
            tmp_path,
            *([kernel(us, **{"Seq": n} if is_numbered else {}) for n, us in r]
              for r in (first, second)),
        )
    )  # fmt: skip
    if not is_numbered:  # which ones belong together is unknown
        assert found is None
        return
    assert found.collectives == 1
    assert found.mean == pytest.approx(6e-6)


def test_groups_are_counted_apart(tmp_path):
    found = skew.of(
        ranks(
            tmp_path,
            [kernel(1, **{"Process Group Name": "tp"}), kernel(9, **{"Process Group Name": "dp"})],
            [kernel(3, **{"Process Group Name": "dp"}), kernel(4, **{"Process Group Name": "tp"})],
        )
    )
    assert found.waits == pytest.approx({"rank 0": 3e-6, "rank 1": 6e-6})


def test_a_single_rank_has_no_skew(tmp_path):
    assert skew.of({"rank 0": write(tmp_path, 0, kernel(1))}) is None


def test_a_capture_of_ranks_shows_what_each_waits_for(tmp_path):
    request = command.CommandRequest(tools.TOOLS["torch"], "minimal", tmp_path, ())
    ranks(tmp_path, [kernel(100)], [kernel(130)])
    (_, _, first), (_, _, second) = command._readings(request, tmp_path, None)
    assert first.figures["waits for ranks"] == (pytest.approx(30e-6), "s")
    assert second.figures["waits for ranks"][0] == 0
    assert "rank 1 is the last one at 100 % of them" in first.notes[-1]
