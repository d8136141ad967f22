"""Each guard is proven: with it a fault is refused, and without it the fault's test turns red."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytest_aiperf.build import nvcc
from pytest_aiperf.claim import correctness, explanation, inputs, sampler, tensors
from pytest_aiperf.device import cuda, device
from pytest_aiperf.errors import Misuse
from pytest_aiperf.machine import nvml
from pytest_aiperf.profilers import capture
from pytest_aiperf.records import expectations, results, yaml_file
from pytest_aiperf.report import formatting
from pytest_aiperf.rules import validity
from tests.cheats.case import Arms, assert_caught
from tests.cheats.dishonest import CHEATS
from tests.plugin import (
    test_clock,
    test_cuda,
    test_expectations,
    test_guards,
    test_profile,
    test_report,
    test_results,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """What puts a guard out of action, and the test that must then turn red."""

    off: Mapping[tuple[object, str], object]
    red: Callable[[Path, pytest.MonkeyPatch], object]


def nothing(*_a: object, **_k: object) -> None:
    return None


def returning(value):
    return lambda *_a, **_k: value


def caught(name):
    return lambda _p, _m: assert_caught(CHEATS[name])


def calls(test, *args):
    return lambda _p, _m: test(*args)


def in_file(test, *args):
    return lambda path, _m: test(*args, path / "expectations.yaml")


def trap(name):
    where = test_expectations.test_each_trap_is_refused_at_its_line
    return lambda path, _m: where(name, path / "expectations.yaml", None)


def on_a_fake_driver(test):
    def red(_path, patch):
        made = test_cuda.FakeCuda()
        patch.setitem(sys.modules, "torch", made.torch)
        patch.delitem(sys.modules, "cupy", raising=False)  # it would know the stream for a fake
        for room in (device, cuda):
            patch.setattr(room, "now", lambda: round(made.host * 1e9))
        test(made)

    return red


def a_compiler_at_work(_path, patch):
    counters = {"frames": Counter()}
    patch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))

    def words():
        def compiling(x):
            counters["frames"]["total"] += 1
            return x * 2

        return {"baseline": compiling}

    assert_caught(Arms("compiling", words, "torch.compile, which compiled meanwhile"))


def refused_flags(_path, patch):
    patch.setattr(nvcc, "find_nvcc", lambda: ("nvcc", ""))
    with pytest.raises(Misuse, match="is not allowed"):
        nvcc._nvcc("sm_90a", ["--options-file=x"])


def refused_architecture(path, patch):
    patch.setattr(nvcc, "_nvcc", lambda target, _flags: sys.exit(f"would build for {target}"))
    (path / "x.cu").touch()
    with pytest.raises(Misuse, match="is no architecture"):
        nvcc.build(path / "x.cu", "sm_90,code=x", cache=path)


def refused_devices(_path, _patch):
    with pytest.raises(Misuse, match="does not name one more GPU"):
        nvml._chosen("0,0", ["GPU-a", "GPU-b"])


def a_drift(_path, _patch):
    """A mirrored round cancels a drift that makes the second block of two slower."""
    one = sampler.Timed.__new__(sampler.Timed)
    now = [1.0]

    def run():
        now[0] += 0.01
        return now[0]

    one.trial = SimpleNamespace(random=SimpleNamespace(shuffle=nothing))
    one.clock = SimpleNamespace(sense=test_guards.senses, peers=SimpleNamespace(agree=bool))
    one.calls = 1
    stands = {n: SimpleNamespace(ready=SimpleNamespace(run=run)) for n in ("optimized", "baseline")}
    done, _, _ = one._round(stands, test_guards.senses())
    means = [np.mean(done.seconds[name]) for name in stands]
    assert means[0] == pytest.approx(means[1])


def looked_up_late():
    return device.time.perf_counter_ns()


def any_subclass(name):
    own = tensors.LIBRARIES[name](sys.modules[name])
    kind = torch.Tensor if name == "torch" else np.ndarray
    return dataclasses.replace(own, has=lambda x: isinstance(x, kind))


GUARDS = {
    # does the result come from the work, and is it right
    "the oracle": Guard({(correctness, "verify"): returning([])}, caught("constant")),
    "outputs are poisoned": Guard({(tensors, "poison"): nothing}, caught("last_tile_unwritten")),
    "inputs are left alone": Guard({(tensors, "changed"): returning(())}, caught("inputs_zeroed")),
    "arms give the same form": Guard(
        {(correctness, "form"): returning("")}, caught("another_dtype")
    ),
    "views are no results": Guard(
        {(correctness, "_hold_made"): nothing}, caught("a_view_for_a_copy")
    ),
    "the reference is fp64": Guard(
        {(correctness, "_check_reference"): returning(1.0)},
        caught("a_reference_of_no_more_precision"),
    ),
    "arrays are plain": Guard({(tensors, "_library"): any_subclass}, caught("a_lazy_array")),
    "fields hold their values": Guard(
        {(tensors, "_holds_fields"): dataclasses.is_dataclass}, caught("a_lazy_dataclass")
    ),
    "the same seed gives the same": Guard(
        {(correctness, "learn"): returning(correctness.Contract((), ()))},
        caught("inputs_of_no_seed"),
    ),
    "another seed gives others": Guard(
        {(inputs.Trial, "_hold_seeded"): nothing}, caught("inputs_of_a_fixed_seed")
    ),
    "the baseline's own error is the yardstick": Guard(
        {(correctness, "K"): 1e9, (correctness, "BUDGET"): dict.fromkeys(correctness.BUDGET, 1e9)},
        caught("a_short_series"),
    ),
    "the baseline is held to reason": Guard(
        {(correctness, "SANITY_CAP"): 1e9, (correctness, "SANITY"): 1e18},
        caught("a_baseline_that_is_wrong"),
    ),
    # is it the same work as in the clock
    "timed results are verified": Guard(
        {(sampler.Timed, "_verify"): nothing}, caught("the_first_hundred_calls")
    ),
    "calls in a row are looked at": Guard(
        {(sampler, "IN_A_ROW"): 1}, caught("every_second_call_into_its_buffer")
    ),
    "values change under the timed arms": Guard(
        {(inputs.Trial, "other"): lambda self, seed, _: (self.make(seed), [])},
        caught("by_address_of_a_tensor"),
    ),
    "results are taken at once": Guard(
        {
            (sampler.Timed, "challenge"): nothing,
            (sampler.Timed, "_verify"): nothing,
        },
        caught("a_thread_that_is_late_once_it_is_timed"),
    ),
    "prepared arms get fresh inputs": Guard(
        {(inputs, "overwrite"): nothing, (sampler, "overwrite"): nothing},
        caught("done_while_preparing"),
    ),
    "not everything is static": Guard(
        {(inputs.Trial, "live"): lambda self, seed: list(range(len(self._raw(seed))))},
        caught("everything_static"),
    ),
    "arms take the inputs": Guard(
        {(inputs, "_check_signature"): nothing}, caught("arms_for_other_inputs")
    ),
    # is the machine what it was
    "settings stay": Guard({(inputs.Trial, "hold_settings"): nothing}, caught("threads_of_torch")),
    "torch's switches stay": Guard({(validity, "_FLAGS"): ()}, caught("precision_of_products")),
    "variables stay": Guard({(validity, "_VARIABLES"): ()}, caught("threads_of_openmp")),
    "timers and judges stay": Guard({(validity, "_OURS"): ()}, caught("the_event_timer")),
    "the environment is no debugger's": Guard(
        {(validity, "environment_problem"): nothing}, caught("a_debugging_environment")
    ),
    "no profiler looks on": Guard(
        {(validity, "_PROFILED"): validity.re.compile("$^")}, caught("a_profiler_beside_it")
    ),
    "rounds are undisturbed": Guard(
        {(validity, "round_problem"): returning(None)}, caught("a_gpu_that_is_never_calm")
    ),
    "a throttle is known by its bits": Guard(
        {(validity, "_REASONS"): {}},
        calls(test_guards.test_a_throttled_side_drops_the_round, 0x40),
    ),
    "a throttle is known by its counters": Guard(
        {(validity, "_COUNTERS"): ()},
        calls(test_guards.test_a_throttle_that_ended_within_the_round_shows_in_the_counters),
    ),
    "clocks are the same on both sides": Guard(
        {(validity, "SAME_CLOCK"): 9.0},
        calls(
            test_guards.test_clocks_that_differ_between_the_sides_drop_the_round, 1980, 1870, True
        ),
    ),
    "calls do nothing beside their work": Guard(
        {(validity, "extra_problem"): returning(None)}, a_compiler_at_work
    ),
    "rounds are mirrored": Guard({(sampler, "reversed"): list}, a_drift),
    "no garbage is collected in a block": Guard(
        {(device, "undisturbed"): contextlib.nullcontext},
        calls(test_clock.test_no_garbage_is_collected_within_a_block, True),
    ),
    "the timer is held from import on": Guard(
        {(device, "now"): looked_up_late},
        lambda _p, patch: test_clock.test_a_patched_timer_changes_nothing(patch),
    ),
    "cold inputs span the cache": Guard(
        {(validity, "rotation"): returning(3)},
        calls(test_guards.test_inputs_too_small_to_be_kept_cold_are_misuse, 4096),
    ),
    "nothing is faster than physics": Guard(
        {(explanation, "hold_limits"): nothing}, caught("bytes_that_do_not_pass")
    ),
    "strays end the measurement": Guard(
        {(cuda.CudaClock, "_refuse_strays"): nothing},
        on_a_fake_driver(test_cuda.test_work_that_outlives_its_stream_is_refused),
    ),
    "a backlog never runs dry": Guard(
        {(cuda.CudaClock, "held_back"): lambda self, work, hold, **_: (self.timed(work)[0], hold)},
        on_a_fake_driver(test_cuda.test_a_call_that_synchronises_is_refused_in_backlog),
    ),
    # is what is written down what was measured
    "anchors, aliases and tags are refused": Guard(
        {(yaml_file, "_check_events"): nothing}, trap("anchor")
    ),
    "nesting has an end": Guard({(yaml_file, "MAX_DEPTH"): 1000}, trap("deep")),
    "files have an end": Guard(
        {(yaml_file, "MAX_BYTES"): 1 << 30},
        in_file(test_expectations.test_large_files_and_folders_are_refused),
    ),
    "scalars mean what they show": Guard(
        {(yaml_file, "_scalar"): lambda _p, node, _w: node.value}, trap("octal")
    ),
    "ids are ids": Guard({(expectations, "is_claim_id"): returning(True)}, trap("claim id")),
    "json is strict": Guard(
        {(results, "_strict"): nothing},
        calls(
            test_results.test_a_figure_that_json_cannot_hold_is_named_with_its_place,
            {"floor": float("nan")},
            r"\.floor: nan",
        ),
    ),
    "files are replaced as a whole": Guard(
        {(results, "atomic_write"): lambda path, text: path.write_text(text)},
        lambda path, _m: test_results.test_a_file_is_replaced_as_a_whole_or_not_at_all(path),
    ),
    "only good results are accepted": Guard(
        {(expectations, "acceptable"): returning("")},
        in_file(
            test_expectations.test_each_refusal_leaves_the_file_alone,
            "quick",
            test_expectations.Outcome.PASSED,
        ),
    ),
    "reports are harmless": Guard(
        {(formatting, "clean"): str}, calls(test_report.test_nothing_hostile_reaches_the_terminal)
    ),
    "names stay in their folder": Guard(
        {(capture, "safe"): str}, calls(test_profile.test_ids_of_claims_become_names_of_folders)
    ),
    "nvcc's flags come from a list": Guard({(nvcc, "_ALLOWED"): (".*",)}, refused_flags),
    "architectures are architectures": Guard({(nvcc, "_target"): str}, refused_architecture),
    "devices are named once": Guard({(nvml, "_chosen"): lambda spec, _: [spec]}, refused_devices),
}

RED = (Exception, SystemExit, pytest.fail.Exception)


@pytest.mark.parametrize("name", GUARDS)
def test_off_it_turns_its_test_red(name, tmp_path, monkeypatch):
    guard = GUARDS[name]
    folders = [tmp_path / word for word in ("on", "off")]
    for folder in folders:
        folder.mkdir()
    with monkeypatch.context() as patch:
        guard.red(folders[0], patch)
    with monkeypatch.context() as patch:
        for (owner, attribute), instead in guard.off.items():
            patch.setattr(owner, attribute, instead, raising=attribute != "reversed")
        with pytest.raises(RED):
            guard.red(folders[1], patch)


def test_a_guard_that_is_on_does_not_turn_anything_red():
    """The check itself is proven: a patch that changes nothing leaves a test green."""
    with pytest.raises(pytest.fail.Exception), pytest.raises(RED):
        assert_caught(CHEATS["constant"])
