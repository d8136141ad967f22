"""Each guard is needed: its test passes with it and fails without it."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import gc
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pytest_aiperf.build import nvcc
from pytest_aiperf.claim import (
    bound_claim,
    buffers,
    explanation,
    ladder,
    passes,
    plausibility,
    result_copies,
    sampler,
    scores,
    search,
    side_effects,
)
from pytest_aiperf.claim.bound_claim import BoundClaim
from pytest_aiperf.correctness import (
    accuracy,
    agreement,
    argument_effects,
    contents,
    files,
    objects,
    own_memory,
    reach,
    references,
    stored,
    tensors,
)
from pytest_aiperf.correctness.argument_effects import ArgumentEffects
from pytest_aiperf.correctness.shortcuts import Shortcuts
from pytest_aiperf.correctness.tensors import Inputs
from pytest_aiperf.device import cuda, device
from pytest_aiperf.errors import UsageError
from pytest_aiperf.machine import nvml
from pytest_aiperf.profilers import capture
from pytest_aiperf.records import expectations, results, yaml_file
from pytest_aiperf.report import formatting
from pytest_aiperf.rules import validity
from tests.cheats import case
from tests.cheats.case import Entry, assert_caught, assert_marked
from tests.cheats.test_dishonest import CHEATS, MARKED
from tests.cheats.test_honest import HONEST
from tests.plugin import (
    test_capture,
    test_cuda,
    test_device,
    test_expectations,
    test_results,
    test_sampler,
    test_terminal,
    test_validity,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """One guard, how to switch it off, and a test that needs it."""

    off: Mapping[tuple[object, str], object]
    """Replacements that switch the guard off, by owner and attribute."""
    test: Callable[[Path, pytest.MonkeyPatch], object]
    """The test, which passes with the guard and fails without it."""


@dataclasses.dataclass(frozen=True, slots=True)
class OfCorpus:
    """A test of ``test_dishonest``, which runs it with the guard."""

    check: Callable[[Entry], None]
    entry: Entry

    def __call__(self, _path: Path, _patch: pytest.MonkeyPatch) -> None:
        self.check(self.entry)


def nothing(*_a: object, **_k: object) -> None:
    return None


def always(value):
    return lambda *_a, **_k: value


def from_two_lines(calls, keep):
    first = calls[0]()
    return [first, *[call() for call in calls[1:]]][keep]


def without(*names):
    """Return the settings of the process but for some."""
    return {name: read for name, read in validity._PROCESS.items() if name not in names}


def of_the_baseline(effects):
    """Read what the baseline refers to, and nothing else."""
    return effects.references["baseline"].states()


def caught(name):
    return OfCorpus(assert_caught, CHEATS[name])


def marked(name):
    return OfCorpus(assert_marked, MARKED[name])


def calls(test, *args):
    return lambda _p, _m: test(*args)


def in_file(test, *args):
    return lambda path, _m: test(*args, path / "expectations.yaml")


def trap(name):
    test = test_expectations.test_each_trap_is_refused_at_its_line
    return lambda path, _m: test(name, path / "expectations.yaml", None)


def on_a_fake_driver(test):
    def run(_path, patch):
        fake = test_cuda.FakeCuda()
        patch.setitem(sys.modules, "torch", fake.torch)
        patch.delitem(sys.modules, "cupy", raising=False)  # cupy would reject the fake stream
        for room in (device, cuda):
            patch.setattr(room, "now", lambda: round(fake.host * 1e9))
        test(fake)

    return run


def compilation_while_timed(_path, patch):
    counters = {"frames": Counter()}
    patch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))

    def make():
        def compiling(x):
            counters["frames"]["total"] += 1
            return x * 2

        return {"baseline": compiling}

    assert_caught(Entry("compiling", make, "torch.compile, which compiled during the round"))


def refused_flags(_path, patch):
    patch.setattr(nvcc, "find_nvcc", lambda: ("nvcc", ""))
    with pytest.raises(UsageError, match="is not allowed"):
        nvcc._nvcc("sm_90a", ["--options-file=x"])


def refused_architecture(path, patch):
    patch.setattr(nvcc, "_nvcc", lambda target, _flags: sys.exit(f"would build for {target}"))
    (path / "x.cu").touch()
    with pytest.raises(UsageError, match="is not an architecture"):
        nvcc.build(path / "x.cu", "sm_90,code=x", cache=path)


def refused_devices(_path, _patch):
    with pytest.raises(UsageError, match="does not name one more GPU"):
        nvml._select("0,0", ["GPU-a", "GPU-b"])


def a_drift(_path, _patch):
    """Check that a mirrored round cancels a drift: each block is slower than the one before."""
    timed = sampler.Sampler.__new__(sampler.Sampler)
    seconds = [1.0]

    def run():
        seconds[0] += 0.01
        return seconds[0]

    timed.bound = SimpleNamespace(random=SimpleNamespace(shuffle=nothing))
    timed.device = SimpleNamespace(
        telemetry=test_validity.gpu_state, ranks=SimpleNamespace(all=bool, count=1)
    )
    timed.metric = sampler.Metric.DEVICE
    timed.calls, timed._rotations = {"optimized": 1, "baseline": 1}, []
    timed._idle, timed._state = validity.IdleTime(), test_validity.gpu_state()
    timed.ladder = SimpleNamespace(letter=lambda name: name[0])
    timed._time = lambda *_, **__: run()
    round_, _ = timed._round(passes.Pass(dict.fromkeys(timed.calls), is_new=False))
    means = [np.mean(round_.seconds[name]) for name in timed.calls]
    assert means[0] == pytest.approx(means[1])


def set_order(timed, count):
    return [i % timed.builder.sets for i in range(count)]


def unbound_now():
    return device.time.perf_counter_ns()


def children_of_this_thread(_process):
    return set(Path("/proc/thread-self/children").read_text().split())


def labelled_by_repr(value):
    return sorted((repr(key), key, item) for key, item in value.items())


def fields_by_getattr(value):
    if not dataclasses.is_dataclass(type(value)):
        return None
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def own_copies(name):
    backend = tensors.BACKENDS[name](sys.modules[name])
    return dataclasses.replace(backend, copy=lambda x: getattr(x, "data", x).clone()
                               if name == "torch" else x.copy())  # fmt: skip


def any_subclass(name):
    backend = tensors.BACKENDS[name](sys.modules[name])
    kind = torch.Tensor if name == "torch" else np.ndarray
    return dataclasses.replace(backend, has=lambda x: isinstance(x, kind))


GUARDS = {
    # correctness
    "the reference": Guard({(accuracy, "judge"): always([])}, caught("constant")),
    "outputs are poisoned": Guard({(tensors, "poison"): nothing}, caught("last_tile_unwritten")),
    "inputs are not changed": Guard({(tensors, "changed"): always(())}, caught("inputs_zeroed")),
    "arms return the same structure": Guard(
        {(accuracy.Deviation, "signature"): ""}, caught("another_dtype")
    ),
    "views are not accepted as results": Guard(
        {(tensors, "is_deferred"): always(False), (reach.Hidden, "is_viewed_by"): always(False)},
        caught("a_view_for_a_copy"),
    ),
    "the reference is fp64": Guard(
        {(accuracy, "_check_reference"): always(1.0)},
        caught("a_reference_of_no_more_precision"),
    ),
    "arrays are plain": Guard({(tensors, "_backend"): any_subclass}, caught("a_lazy_array")),
    "fields are stored values": Guard(
        {(stored, "fields"): fields_by_getattr}, caught("a_field_that_is_computed")
    ),
    "fields are not computed": Guard(
        {(stored, "fields"): fields_by_getattr}, caught("a_lazy_dataclass")
    ),
    "attributes are read where they are stored": Guard(
        {(stored, "attributes"): vars}, caught("a_module_whose_attributes_are_computed")
    ),
    "attributes of dataclasses are read where they are stored": Guard(
        {(stored, "attributes"): vars}, caught("a_dataclass_whose_attributes_are_computed")
    ),
    "classes are not asked for": Guard(
        {(tensors, "type"): lambda value: value.__class__}, caught("a_class_that_is_computed")
    ),
    "types are compared by identity": Guard(
        {(stored, "is_one_of"): lambda kind, kinds: kind in kinds}, caught("a_type_that_computes")
    ),
    "keys are not written out": Guard(
        {(stored, "items"): labelled_by_repr}, caught("a_key_that_computes")
    ),
    "arrays are copied by their library": Guard(
        {(tensors, "_backend"): own_copies}, caught("a_memory_map_with_a_copy_of_its_own")
    ),
    "the same seed gives the same inputs": Guard(
        {(argument_effects, "infer_effects"): always(ArgumentEffects())},
        caught("inputs_of_no_seed"),
    ),
    "another seed gives other inputs": Guard(
        {(BoundClaim, "_refuse_constant_inputs"): nothing}, caught("inputs_of_a_fixed_seed")
    ),
    "errors are relative to the baseline's": Guard(
        {
            (accuracy, "MAX_ERROR_RATIO"): 1e9,
            (accuracy, "ERROR_BUDGETS"): dict.fromkeys(accuracy.ERROR_BUDGETS, 1e9),
            (accuracy, "RMS_BUDGETS"): dict.fromkeys(accuracy.RMS_BUDGETS, 1e9),
        },
        caught("a_short_series"),
    ),
    "the baseline's error is bounded": Guard(
        {(accuracy, "MAX_BASELINE_ERROR"): 1e9, (accuracy, "MAX_BASELINE_BUDGETS"): 1e18},
        caught("a_baseline_that_is_wrong"),
    ),
    "results need work": Guard({(Shortcuts, "_find"): nothing}, caught("a_length")),
    "results depend on the seed in most elements": Guard(
        {(Shortcuts, "_refuse_constant_part"): nothing},
        caught("a_part_that_no_seed_changes"),
    ),
    "integers depend on the seed as well": Guard(
        {(Shortcuts, "_refuse_constant_part"): nothing},
        caught("integers_that_no_seed_changes"),
    ),
    "contents beside arrays are compared": Guard(
        {(agreement, "compare_contents"): always(())}, caught("a_set_that_is_not_filled")
    ),
    "results are verified where the baseline is slow": Guard(
        {(search.Search, "slow_seeds"): always([])},
        calls(test_sampler.test_results_on_inputs_on_which_the_baseline_is_slow_are_verified, True),
    ),
    "arms are not slow for few inputs": Guard(
        {(search.Search, "_slow_in_all"): always(())},
        calls(
            test_sampler.test_an_arm_that_is_slow_on_few_inputs_is_told, 200e-6, 20e-3, 2.0, True
        ),
    ),
    "arms are timed with garbage collection as well": Guard(
        {(search.Search, "_slow_while_collecting"): always(())},
        marked("an_arm_that_makes_many_objects"),
    ),
    "contents are drawn or static": Guard(
        {(BoundClaim, "_read_contents"): nothing}, marked("a_dict_for_all_seeds")
    ),
    "decimals and slices are values": Guard(
        {
            (stored, "VALUES"): (str, bytes),
            (contents._InC, "state"): always({}),
            (contents._InC, "attributes"): always({}),
        },
        marked("decimals_for_all_seeds"),
    ),
    "files are read": Guard({(stored, "head"): always(b"")}, marked("a_file_for_all_seeds")),
    "hashes are compared": Guard(
        {(contents, "_hash_of_digest"): always(())}, caught("a_hash_that_is_not_updated")
    ),
    "states in C are read": Guard(
        {(stored, "own_member"): nothing}, marked("seeds_that_are_not_spawned")
    ),
    "attributes of module objects are read": Guard(
        {(contents, "_LEFT_OUT"): contents._LEFT_OUT_OF_OBJECTS},
        marked("an_attribute_of_a_module_object"),
    ),
    "items of queues are the inputs' own": Guard(
        {(objects, "_sequence"): lambda value: value if type(value) is list else None},
        caught("bytes_of_the_inputs_in_a_queue"),
    ),
    "arrays of texts, objects and records are poisoned": Guard(
        {(tensors, "can_be_filled"): always(value=False)},
        caught("padding_of_texts_that_is_not_written"),
    ),
    "no bytes between values are compared": Guard(
        {(contents, "_parts_of_array"): lambda array: (array.tobytes(),)},
        calls(case.assert_honest, HONEST["long_doubles_with_other_bytes_between"]),
    ),
    "attributes are not overwritten": Guard(
        {(BoundClaim, "overwrite"): lambda _, inputs, fresh, at: inputs.overwrite(fresh(), at)},
        marked("an_attribute_of_a_module_in_the_setup"),
    ),
    "the mask of an array is compared": Guard(
        {(contents, "_parts_of_masked"): always(())}, caught("a_mask_that_is_not_set")
    ),
    "elements of XML are compared": Guard(
        {(contents, "_parts_of_element"): always(())}, caught("elements_that_are_not_added")
    ),
    "new values take as long as known ones": Guard(
        {(plausibility.PlausibilityChecks, "_find_kept_work"): nothing},
        marked("a_part_of_the_work_kept_by_value"),
    ),
    "counters of memory are kept": Guard(
        {(device, "refuse_changed_counters"): nothing}, caught("a_peak_that_is_reset")
    ),
    "calls need as much memory without a tracer": Guard(
        {(scores, "MORE_UNTRACED"): math.inf}, caught("less_memory_while_it_is_traced")
    ),
    "an OrderedDict's order is compared": Guard(
        {(stored, "keys"): always([])}, caught("a_cache_whose_order_is_not_kept")
    ),
    "contents that timed calls leave are compared": Guard(
        {(ladder.Ladder, "_verify_left"): nothing},
        caught("bytes_that_are_written_until_it_is_timed"),
    ),
    "objects that calls change are compared": Guard(
        {(ArgumentEffects, "left"): property(lambda effects: effects.exact)},
        marked("an_attribute_that_is_not_written"),
    ),
    "objects that timed calls change are compared": Guard(
        {(ladder.Ladder, "_verify_left"): nothing},
        marked("an_attribute_that_is_written_until_it_is_timed"),
    ),
    "classes of arguments are read": Guard(
        {(contents._Reader, "_class"): nothing}, marked("a_list_of_the_class_that_is_not_filled")
    ),
    "states of objects in C are read": Guard(
        {(contents._InC, "state"): always({}), (contents._InC, "attributes"): always({})},
        marked("flags_of_a_context_that_are_not_set"),
    ),
    "open files are compared": Guard(
        {(files, "opened"): always({})}, marked("a_log_that_is_not_written")
    ),
    "log records are counted": Guard(
        {(side_effects, "_counting_records"): lambda _: contextlib.nullcontext()},
        marked("records_that_are_not_logged"),
    ),
    "rewritten assert statements are named": Guard(
        {(references, "_OF_ASSERTS"): "no name"}, marked("assert_statements_that_pytest_rewrites")
    ),
    "objects in C that show nothing are named": Guard(
        {(contents, "_is_in_c"): always(value=False)}, marked("values_that_are_not_compressed")
    ),
    "what objects lead to is read": Guard(
        {(stored, "referents"): always([])}, marked("a_list_behind_a_mapping_proxy")
    ),
    "weak references are followed": Guard(
        {(stored, "referents"): gc.get_referents}, marked("a_list_behind_a_weak_reference")
    ),
    "keys are read": Guard(
        {(stored, "is_plain_key"): always(value=True)}, marked("a_list_in_a_key")
    ),
    "structures of C are compared": Guard(
        {(contents, "_codes"): always({"P"})}, caught("a_structure_of_c_that_is_not_written")
    ),
    "arguments are read to the same place": Guard(
        {(stored, "position"): nothing}, caught("a_file_in_memory_that_is_not_read")
    ),
    "hooks of modules in results are counted": Guard(
        {(tensors, "hooks"): always(0)}, marked("hooks_that_are_not_registered")
    ),
    "tensors that require grad are compared": Guard(
        {(tensors, "requires_grad"): always(value=False)},
        caught("an_argument_that_does_not_require_grad"),
    ),
    "hooks of tensors are compared": Guard(
        {(tensors, "has_hooks"): always(value=False)}, caught("a_hook_that_is_not_registered")
    ),
    "attributes of results are named": Guard(
        {(Shortcuts, "changes_beside"): always(())}, marked("an_attribute_of_a_module")
    ),
    "results share no memory": Guard(
        {(tensors, "shared_bytes"): always(0)}, caught("one_array_for_many_copies")
    ),
    "results lie in no table of the module": Guard(
        {(references.References, "holds"): always(value=False)}, marked("a_window_of_a_table")
    ),
    "results lie in no table of a context": Guard(
        {(references, "_VARIABLE"): None, (stored, "referents"): gc.get_referents},
        marked("a_window_of_a_context_that_the_first_call_fills"),
    ),
    "results lie in no table that the first call makes": Guard(
        {(references.References, "kept"): always(())},
        marked("a_window_of_a_context_that_the_first_call_fills"),
    ),
    "results lie in no table of a cached function": Guard(
        {(references, "_kept"): always([])}, marked("a_window_of_a_cached_table")
    ),
    "results can be written": Guard(
        {(tensors, "is_read_only"): always(value=False)}, caught("bytes_as_an_array")
    ),
    "inputs have many values": Guard(
        {(bound_claim, "MAX_REPEATED"): math.inf}, marked("one_of_few_numbers")
    ),
    "inputs are drawn or static": Guard(
        {(bound_claim, "MIN_VARIANTS"): math.inf}, marked("a_matrix_for_all_seeds")
    ),
    "work of processes that stay is named": Guard(
        {(validity.OtherProcesses, "do_work"): always(value=False)},
        marked("memory_of_a_child_that_stays"),
    ),
    "results repeat no list": Guard(
        {(tensors, "repeated_containers"): always(0)}, caught("one_list_for_many_rows")
    ),
    "results of the inputs' objects are named": Guard(
        {(tensors, "shared_containers"): always(0)}, marked("rows_that_are_not_copied")
    ),
    "integers are compared exactly": Guard(
        {(tensors, "_exact_or_doubles"): lambda _, numbers: numbers},
        caught("integers_that_are_rounded_to_doubles"),
    ),
    "memory inside of arguments is theirs": Guard(
        {(reach.Hidden, "is_viewed_by"): always(value=False)}, caught("a_view_of_an_attribute")
    ),
    "arguments repeat no list": Guard(
        {(objects, "_repeated_and_borrowed"): always((0, 0))},
        caught("one_row_many_times_in_an_argument"),
    ),
    "arguments share no list": Guard(
        {(objects, "_repeated_and_borrowed"): always((0, 0))},
        caught("rows_of_the_inputs_in_an_argument"),
    ),
    "arguments share no object": Guard(
        {(stored, "is_open_object"): always(value=False)},
        caught("objects_of_the_inputs_in_an_argument"),
    ),
    "items are changed in place by both arms": Guard(
        {(objects, "_have_same_contents"): always(value=True)}, caught("an_item_that_is_replaced")
    ),
    "items that only the arm changes in place are named": Guard(
        {(objects, "_have_same_contents"): always(value=True)},
        marked("an_item_that_is_changed_in_place"),
    ),
    "attributes of functions and classes are read": Guard(
        {(contents, "_attributes_of_code"): always({})},
        marked("an_attribute_of_a_class_that_is_not_written"),
    ),
    "arguments can be written as before": Guard(
        {(tensors, "is_read_only"): always(value=False)},
        caught("an_argument_that_is_left_read_only"),
    ),
    "buffers can be resized as before": Guard(
        {(objects, "_is_locked"): always(value=False)}, caught("a_bytearray_that_is_left_locked")
    ),
    "numbers are Python's own": Guard(
        {(tensors, "boxed_numbers"): always(0)}, caught("numbers_of_numpy_in_a_result")
    ),
    "results have the same mode of autograd": Guard(
        {(tensors, "autograd_trait"): always("")}, caught("an_inference_tensor")
    ),
    "memory behind a result is named": Guard(
        {(tensors, "storage"): tensors.span}, marked("a_window_of_a_large_array")
    ),
    "arrays are aligned": Guard(
        {(tensors, "is_unaligned"): always(value=False)}, caught("arrays_that_are_not_aligned")
    ),
    "arguments keep their memory": Guard(
        {(tensors, "view"): always(value=())}, caught("a_tensor_with_other_memory")
    ),
    "truth values are 0 or 1": Guard(
        {(tensors, "has_odd_truths"): always(value=False)}, caught("truth_values_of_many_bytes")
    ),
    "bytes are inputs as well": Guard(
        {(tensors, "as_buffer"): nothing, (reach.Hidden, "is_viewed_by"): always(value=False)},
        caught("a_view_of_a_bytearray"),
    ),
    "copies are not lazy": Guard(
        {(tensors, "is_lazy_copy"): always(False)},
        caught("a_copy_that_is_made_when_it_is_written"),
    ),
    "graphs are recorded by both arms": Guard(
        {(tensors, "has_graph"): always(False)}, caught("no_graph_for_the_gradient")
    ),
    "gradients that are not compared are named": Guard(
        {(tensors, "has_graph"): always(False)}, marked("a_gradient_of_zeros")
    ),
    "errors that are large beside the baseline's are named": Guard(
        {(accuracy, "coarse"): always(())}, marked("a_small_term_that_is_left_out")
    ),
    "states of generators are compared": Guard(
        {(contents, "_generator_state"): always(())}, marked("a_generator_that_does_not_go_on")
    ),
    "keys are results": Guard({(tensors, "table"): always({})}, caught("keys_that_are_wrong")),
    "None is counted": Guard(
        {(tensors, "MANY"): 10**6}, caught("a_list_of_none_that_the_reference_has")
    ),
    "no element hides the others": Guard(
        {(accuracy, "SMALLER_HALF"): math.inf}, caught("zeros_beside_one_large_element")
    ),
    "all arms get the same inputs": Guard(
        {(BoundClaim, "_refuse_unlike"): nothing}, caught("other_strides")
    ),
    "results have memory of their own": Guard(
        {(tensors, "_file_mappings"): always([])}, caught("a_file_that_is_not_read")
    ),
    "no conjugation is pending": Guard(
        {(tensors, "_is_pending"): always(value=False)}, caught("a_conjugate_that_is_only_marked")
    ),
    "numbers of Python are inputs": Guard(
        {(tensors, "as_array"): lambda x: (x,) if tensors.backend_of(x) else ()},
        caught("a_list_that_is_sorted_for_the_next_call"),
    ),
    # work of the timed calls
    "timed results are verified": Guard(
        {(ladder.Ladder, "verify_later"): nothing}, caught("the_first_hundred_calls")
    ),
    "any call of a block may be verified": Guard(
        {(sampler.Sampler, "_draw_order"): lambda self, _, n: (set_order(self, n), n - 1)},
        caught("calls_that_are_not_the_last_of_their_block"),
    ),
    "some blocks end early": Guard(
        {(sampler.Sampler, "_short_blocks"): always(())}, caught("work_left_to_a_guessed_last_call")
    ),
    "values change under the timed arms": Guard(
        {(buffers.BufferBuilder, "renew"): nothing}, caught("by_address_of_a_tensor")
    ),
    "calls are estimated on new values": Guard(
        {(buffers.BufferBuilder, "renew"): nothing},
        lambda _p, patch: test_sampler.test_an_arm_that_remembers_values_gets_no_longer_blocks(
            sampler.Metric.WALL, patch
        ),
    ),
    "lone calls are compared with the arm's own": Guard(
        {(plausibility, "LONE_CALL_TIMES"): math.inf},
        calls(test_sampler.test_an_arm_that_skips_values_that_return_in_a_block_is_refused, 0.4),
    ),
    "calls are timed alone as well": Guard(
        {(plausibility.PlausibilityChecks, "_compare_lone_calls"): nothing},
        caught("one_launch_for_all_calls_of_a_block"),
    ),
    "results are copied at once": Guard(
        {(ladder.Ladder, "verify_later"): nothing},
        caught("a_thread_that_is_late_once_it_is_timed"),
    ),
    "small results are copied first": Guard(
        {(result_copies, "SMALL_BYTES"): math.inf},
        lambda _p, patch: test_sampler.test_small_results_are_copied_before_large_ones(patch),
    ),
    "no work goes on between calls": Guard(
        {(validity.IdleTime, "refuse_work"): nothing}, caught("a_process_that_spins")
    ),
    "all threads of Python count": Guard(
        {(sys, "_current_frames"): lambda: [thread.ident for thread in threading.enumerate()]},
        caught("a_thread_that_threading_does_not_list"),
    ),
    "processes of all threads count": Guard(
        {(validity, "_children"): children_of_this_thread}, caught("a_process_of_another_thread")
    ),
    "processes of processes count": Guard(
        {(validity, "_children"): children_of_this_thread},
        caught("a_process_of_a_process_that_waits"),
    ),
    "baselines are timed before another arm has run": Guard(
        {(plausibility.PlausibilityChecks, "_find_slowed_baselines"): nothing},
        calls(test_sampler.test_a_baseline_that_is_slower_since_another_arm_has_run_is_told, 5),
    ),
    "baselines are not much slower than before another arm has run": Guard(
        {(plausibility, "SLOWED_BASELINE"): 2.0}, marked("a_table_that_becomes_longer")
    ),
    "baselines are timed with garbage collection as well": Guard(
        {(bound_claim, "gc"): SimpleNamespace(isenabled=always(value=False), freeze=nothing)},
        marked("a_baseline_that_is_slow_without_garbage_collection"),
    ),
    "what the baseline uses is compared": Guard(
        {(side_effects.SideEffects, "end"): nothing}, marked("a_list_of_handlers_that_grows")
    ),
    "what inputs() uses is compared": Guard(
        {(side_effects.SideEffects, "_read"): of_the_baseline},
        marked("values_that_are_sorted_once_an_arm_is_timed"),
    ),
    "what the reference uses is compared": Guard(
        {(side_effects.SideEffects, "_read"): of_the_baseline},
        marked("a_method_that_only_the_reference_uses"),
    ),
    "what context variables hold is compared": Guard(
        {(references, "_VARIABLE"): None},
        marked("an_answer_that_an_arm_leaves_for_the_reference"),
    ),
    "the callables' own code is compared": Guard(
        {(references.References, "_hold"): nothing},
        marked("code_of_inputs_that_an_arm_replaces"),
    ),
    "what the baseline uses is compared while it is timed": Guard(
        {(sampler.Sampler, "_observe"): nothing}, marked("a_handler_once_it_is_timed")
    ),
    "functions of libraries are their own": Guard(
        {(references, "_is_replaced"): always(value=False)},
        marked("a_wrong_function_that_the_reference_uses_as_well"),
    ),
    "libraries are searched for functions of others": Guard(
        {(side_effects, "replaced_functions"): set}, marked("a_slow_method_of_a_library")
    ),
    "settings of the test are named": Guard(
        {(validity, "changed_since_start"): list}, marked("allocations_that_the_test_traces")
    ),
    "inputs() does not slow the baseline": Guard(
        {(plausibility.PlausibilityChecks, "_find_slowing_inputs"): nothing},
        marked("a_cache_that_inputs_clears"),
    ),
    "results are finished before they are copied": Guard(
        {(plausibility.PlausibilityChecks, "_suspect_late_results"): nothing},
        caught("a_copying_function_that_fills_the_result"),
    ),
    "baselines are called by a thread as well": Guard(
        {(BoundClaim, "_time_in_thread"): always(math.inf)},
        marked("a_baseline_that_is_slow_where_the_harness_calls_it"),
    ),
    "nothing lies behind a view": Guard(
        {(own_memory, "give"): lambda args: args}, caught("an_answer_behind_a_view")
    ),
    "nothing lies in the storage of a tensor": Guard(
        {(own_memory, "give"): lambda args: args}, caught("an_answer_in_the_storage_of_a_tensor")
    ),
    "no array is passed twice": Guard(
        {(BoundClaim, "_repeated_arrays"): always(())}, marked("one_array_eight_times")
    ),
    "blocks after another arm are compared": Guard(
        {(plausibility.PlausibilityChecks, "_find_slowed_by_others"): nothing},
        marked("a_cache_of_the_library_that_is_emptied"),
    ),
    "files are written by both arms": Guard(
        {(side_effects, "_written_bytes"): always((0, 0))}, marked("a_file_that_is_not_written")
    ),
    "files among the arguments are compared": Guard(
        {(files, "read"): always({})}, marked("a_file_in_memory_that_is_not_there")
    ),
    "files count as memory": Guard(
        {(side_effects, "_written_bytes"): always((0, 0))}, marked("memory_of_a_file")
    ),
    "child processes are named where memory is measured": Guard(
        {
            (side_effects, "_pages_of_children"): always(0),
            (validity.OtherProcesses, "do_work"): always(value=False),
        },
        marked("memory_of_a_child"),
    ),
    "memory that the code refers to counts": Guard(
        {(references.References, "_arrays"): always(())},
        calls(
            test_sampler.test_peak_memory_includes_arrays_that_the_code_of_an_arm_refers_to,
            test_sampler.HOLDING[0],
        ),
    ),
    "memory of inputs has pages": Guard(
        {(tensors, "touch"): nothing},
        calls(test_sampler.test_peak_memory_does_not_include_pages_of_inputs),
    ),
    "memory that is held counts": Guard(
        {(BoundClaim, "held_bytes"): always(0)},
        calls(test_sampler.test_peak_memory_includes_what_an_arm_holds_after_its_calls, 0),
    ),
    "all calls are made from one line": Guard(
        {(device, "run_calls"): from_two_lines},
        calls(test_device.test_no_call_sees_by_its_caller_that_its_result_is_kept),
    ),
    "the call that is traced is verified": Guard(
        {(ladder.Ladder, "verify_later"): nothing}, caught("nothing_while_memory_is_traced")
    ),
    "prepared arms get new inputs": Guard(
        {(Inputs, "overwrite_in_place"): always([]), (Inputs, "overwrite"): always(())},
        caught("done_while_preparing"),
    ),
    "not everything is static": Guard(
        {(BoundClaim, "_refuse_all_static"): nothing},
        caught("everything_static"),
    ),
    "signatures match the inputs": Guard(
        {(bound_claim, "_check_signature"): nothing}, caught("arms_for_other_inputs")
    ),
    # the state of the machine
    "settings do not change": Guard(
        {(BoundClaim, "refuse_changed_settings"): nothing}, caught("threads_of_torch")
    ),
    "torch's settings do not change": Guard(
        {(validity, "_FLAGS"): ()}, caught("precision_of_products")
    ),
    "settings of the process do not change": Guard(
        {(validity, "_PROCESS"): {}}, caught("one_core")
    ),
    "the working folder does not change": Guard(
        {(validity, "_PROCESS"): without("working folder")}, caught("a_folder_of_its_own")
    ),
    "the umask does not change": Guard(
        {(validity, "_PROCESS"): without("umask")}, caught("files_that_nobody_else_reads")
    ),
    "resource limits do not change": Guard(
        {(validity, "_PROCESS"): without(*validity._LIMITS.values())},
        caught("few_files_at_a_time"),
    ),
    "settings of libraries do not change": Guard(
        {(validity, "_libraries"): always({})}, caught("small_buffers_of_numpy")
    ),
    "environment variables do not change": Guard(
        {(validity, "_VARIABLES"): ()}, caught("threads_of_openmp")
    ),
    "variables of the processes that an arm starts do not change": Guard(
        {(validity, "_PREFIXES"): ()}, caught("variables_of_the_next_processes")
    ),
    "modes of torch do not change": Guard(
        {(validity, "_FLAGS"): ()}, caught("a_device_by_default")
    ),
    "tracers are not switched on": Guard(
        {(validity, "_tracers"): always({})}, caught("a_profiler_of_python")
    ),
    "timers and comparisons are not patched": Guard(
        {(validity, "_FOREIGN"): (), (validity, "_WATCHED"): {}}, caught("the_event_timer")
    ),
    "no debugging environment": Guard(
        {(validity, "environment_problem"): nothing}, caught("a_debugging_environment")
    ),
    "no profiler is attached": Guard(
        {(validity, "_PROFILER_VARIABLE"): validity.re.compile("$^")},
        caught("a_profiler_beside_it"),
    ),
    "rounds are undisturbed": Guard(
        {(validity, "round_problem"): always(None)}, caught("a_gpu_that_is_never_calm")
    ),
    "throttling shows in event reasons": Guard(
        {(validity, "_REASONS"): {}},
        calls(test_validity.test_throttling_on_either_side_drops_the_round, 0x40),
    ),
    "throttling shows in counters": Guard(
        {(validity, "_COUNTERS"): ()},
        calls(test_validity.test_throttling_that_ended_within_the_round_shows_in_the_counters),
    ),
    "clocks agree before and after a round": Guard(
        {(validity, "MAX_CLOCK_CHANGE"): 9.0},
        calls(
            test_validity.test_clocks_that_differ_between_the_sides_drop_the_round, 1980, 1870, True
        ),
    ),
    "calls neither compile nor allocate": Guard(
        {(validity, "extra_problem"): always(None)}, compilation_while_timed
    ),
    "rounds are mirrored": Guard({(sampler, "reversed"): list}, a_drift),
    "no garbage collection in a block": Guard(
        {(device, "gc_disabled"): contextlib.nullcontext},
        calls(test_device.test_no_garbage_is_collected_within_a_block, True),
    ),
    "the timer is bound at import": Guard(
        {(device, "now"): unbound_now},
        lambda _p, patch: test_device.test_a_patched_timer_changes_nothing(patch),
    ),
    "cold inputs span the cache": Guard(
        {(validity, "rotation"): always(3)},
        calls(test_validity.test_inputs_too_small_to_be_kept_cold_are_refused, 4096),
    ),
    "no claim is faster than the limit": Guard(
        {(explanation, "refuse_impossible_times"): nothing}, caught("bytes_that_do_not_pass")
    ),
    "unsynced work ends the measurement": Guard(
        {(cuda.CudaDevice, "_refuse_unsynced_work"): nothing},
        on_a_fake_driver(test_cuda.test_work_that_outlives_its_stream_is_refused),
    ),
    "forked work is joined": Guard(
        {(cuda.CudaDevice, "refuse_unjoined"): nothing},
        on_a_fake_driver(test_cuda.test_forked_work_that_is_not_joined_is_refused_however_short),
    ),
    "work is ordered with the call's stream": Guard(
        {(cuda.CudaDevice, "refuse_unordered"): nothing},
        on_a_fake_driver(test_cuda.test_work_that_is_not_ordered_with_the_calls_stream_is_refused),
    ),
    "a backlog never runs empty": Guard(
        {
            (cuda.CudaDevice, "time_behind_blocking_kernel"): lambda self, work, spin, **_: (
                self.timed(work)[0],
                spin,
            )
        },
        on_a_fake_driver(test_cuda.test_a_call_that_synchronizes_is_refused_in_backlog),
    ),
    # records and files
    "anchors, aliases and tags are refused": Guard(
        {(yaml_file, "_check_events"): nothing}, trap("anchor")
    ),
    "nesting is limited": Guard({(yaml_file, "MAX_DEPTH"): 1000}, trap("deep")),
    "file size is limited": Guard(
        {(yaml_file, "MAX_BYTES"): 1 << 30},
        in_file(test_expectations.test_large_files_and_folders_are_refused),
    ),
    "scalars keep their type": Guard(
        {(yaml_file, "_scalar"): lambda _p, node, _w: node.value}, trap("octal")
    ),
    "claim ids are checked": Guard({(expectations, "is_claim_id"): always(True)}, trap("claim id")),
    "json is strict": Guard(
        {(results, "_strict"): nothing},
        calls(
            test_results.test_a_figure_that_json_cannot_hold_is_named_with_its_place,
            {"floor": float("nan")},
            r"\.floor: nan",
        ),
    ),
    "files are replaced atomically": Guard(
        {(results, "atomic_write"): lambda path, text: path.write_text(text)},
        lambda path, _m: test_results.test_a_file_is_replaced_as_a_whole_or_not_at_all(path),
    ),
    "only valid results are accepted": Guard(
        {(expectations, "acceptable"): always("")},
        in_file(
            test_expectations.test_each_refusal_leaves_the_file_alone,
            "quick",
            test_expectations.Outcome.PASSED,
        ),
    ),
    "reports are sanitized": Guard(
        {(formatting, "clean"): str}, calls(test_terminal.test_nothing_hostile_reaches_the_terminal)
    ),
    "file names stay in their folder": Guard(
        {(capture, "folder_name"): str},
        calls(test_capture.test_ids_of_claims_become_names_of_folders),
    ),
    "nvcc's flags come from a list": Guard({(nvcc, "_ALLOWED"): (".*",)}, refused_flags),
    "architectures are checked": Guard({(nvcc, "_target"): str}, refused_architecture),
    "devices are not repeated": Guard({(nvml, "_select"): lambda spec, _: [spec]}, refused_devices),
}

FAILURES = (Exception, SystemExit, pytest.fail.Exception)
OFF_TRIES = 3
"""On a busy machine another guard, which looks at times, may refuse an arm in one try."""


def fails(guard: Guard, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    folder.mkdir()
    try:
        guard.test(folder, monkeypatch)
    except FAILURES:
        return True
    return False


@pytest.mark.parametrize("name", GUARDS)
def test_without_the_guard_its_test_fails(name, tmp_path, monkeypatch):
    guard = GUARDS[name]
    folders = [tmp_path / word for word in ("on", "off")]
    for folder in folders:
        folder.mkdir()
    if not isinstance(guard.test, OfCorpus):
        with monkeypatch.context() as patch:
            guard.test(folders[0], patch)
    with monkeypatch.context() as patch:
        for (owner, attribute), replacement in guard.off.items():
            patch.setattr(owner, attribute, replacement, raising=attribute not in vars(builtins))
        patch.setattr(case, "HOST_TRIES", 1)
        assert any(fails(guard, folders[1] / str(i), patch) for i in range(OFF_TRIES))


def test_all_guarded_functions_exist():
    """A guard would no longer watch a function that has been renamed."""
    for name in validity._FOREIGN:
        assert validity._find(name) is not None, name
    for name, function in validity._WATCHED.items():
        assert validity._find(name) == function, name


def test_a_caught_cheat_is_not_a_failure(tmp_path, monkeypatch):
    """The test above relies on it."""
    guard = Guard({}, caught("constant"))
    assert not fails(guard, tmp_path / "passes", monkeypatch)
