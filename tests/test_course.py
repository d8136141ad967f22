"""The accepted records of the course: evidence was looked at, tells the arms apart, and ladders."""

import re
from pathlib import Path

import pytest

from pytest_aiperf.model import Against, Metric
from pytest_aiperf.records.results import read_results
from pytest_aiperf.rules import evidence

ROOT = Path(__file__).parents[1]
RECORDS = [r for r in read_results(ROOT / "results" / "h200.json") if r.timing is not None]
FILES = sorted(
    file for folder in ("ch??", "labs") for file in ROOT.glob(f"tests/{folder}/test_*.py")
)
UNCOUNTABLE = {
    "ch01/test_batched_matmul_host.py": "calls of NumPy: a tracer that counts them slows them",
    "ch02/test_cache_loop_order_host.py": "cache misses need the CPU's hardware counters",
    "ch03/test_thread_oversubscription_host.py": "the waits are in worker processes that stay",
    "ch06/test_branchless_host.py": "mispredicted branches need the CPU's hardware counters",
    "ch07/test_contiguous_access_host.py": "cache misses need the CPU's hardware counters",
    "ch08/test_ilp_accumulators_host.py": "instructions per clock need the CPU's counters",
    "ch13/test_vectorized_collate_host.py": "calls of NumPy: a tracer that counts them slows them",
    "ch20/test_kernel_search_host.py": "loads and stores need the CPU's hardware counters",
}
"""Claims on the host that state no evidence, and why none can be counted."""


def by_ladder():
    ladders = {}
    for result in RECORDS:
        if result.ladder:
            ladders.setdefault((result.key, result.ladder), []).append(result)
    return {key: rungs for key, rungs in ladders.items() if len(rungs) > 1}


def test_each_folder_of_claims_has_a_marker(pytestconfig):
    assert {file.parent.name for file in FILES} == {*pytestconfig.getini("aiperf_folder_markers")}


@pytest.mark.parametrize("result", RECORDS, ids=lambda r: r.claim)
def test_evidence_was_looked_at_and_tells_the_arms_apart(result):
    assert not evidence.not_looked_at(result.evidence)
    # the ratio of bytes or of scores is itself the mechanism
    is_its_own_proof = result.timing.metric in (Metric.MEMORY, Metric.SCORE)
    assert is_its_own_proof or any(f.held and f.baseline_held is False for f in result.evidence)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_claim_states_evidence_unless_none_can_be_counted(file):
    text = file.read_text(encoding="utf-8")
    is_its_own_proof = re.search(r'metric=\(?"(score|memory)"', text)
    if "compare(" in text and not is_its_own_proof:
        assert ("evidence=" in text) != (f"{file.parent.name}/{file.name}" in UNCOUNTABLE)


@pytest.mark.parametrize("ladder", by_ladder().values(), ids=lambda rungs: rungs[0].ladder)
def test_the_rungs_of_a_ladder_were_timed_in_the_same_rounds(ladder):
    firsts = {}  # by seed: a second attempt is another measurement
    for rung in ladder:
        if any(note.startswith("timed by itself") for note in rung.notes):
            continue  # the ladder could not be timed, for example for lack of memory
        role = "baseline" if rung.first is None else "first"
        blocks = [b.seconds[role] for r in rung.timing.replicates for b in r.rounds]
        firsts.setdefault(rung.seed, []).append(blocks)
    assert all(blocks == same[0] for same in firsts.values() for blocks in same)


@pytest.mark.parametrize("ladder", by_ladder().values(), ids=lambda rungs: rungs[0].ladder)
def test_an_arm_that_several_rungs_use_was_timed_once(ladder):
    optimized = {}
    for rung in sorted(ladder, key=lambda rung: rung.rung_index):
        earlier = optimized.setdefault(rung.seed, [])
        blocks = {
            role: [b.seconds[role] for r in rung.timing.replicates for b in r.rounds]
            for role in ("baseline", "optimized")
        }
        if earlier and rung.against is Against.PREVIOUS_RUNG:
            assert blocks["baseline"] in earlier
        earlier.append(blocks["optimized"])


def test_there_are_records():
    assert len(RECORDS) > 110
    assert len(by_ladder()) > 30
    assert len(FILES) > 80
