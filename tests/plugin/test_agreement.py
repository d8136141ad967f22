"""Effects of the baseline on its arguments, and agreement with the reference."""

import collections
import gc
import re
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.ch19 import nvfp4
from pytest_aiperf.correctness import accuracy, agreement, argument_effects, tensors
from pytest_aiperf.correctness.argument_effects import ArgumentEffects
from pytest_aiperf.correctness.shortcuts import Shortcuts
from pytest_aiperf.correctness.tensors import Inputs
from pytest_aiperf.errors import UsageError, WrongResult
from pytest_aiperf.model import Prepared, Score, prepared


def vector(dtype=torch.float32, n=64):
    """Inputs of most tests: a source and an uninitialized destination."""

    def make():
        torch.manual_seed(7)
        return torch.randn(n, dtype=torch.float64).to(dtype), torch.empty(n, dtype=dtype)

    return make


def double(a, out):
    torch.mul(a, 2, out=out)


def as_inputs(make):
    return lambda: Inputs(args=make(), dynamic=(), seed=0)


def preparing(arm):
    return lambda inputs: arm.make(*inputs.args) if isinstance(arm, Prepared) else arm


def infer_effects(call, make, names=()):
    return argument_effects.infer_effects(preparing(call), as_inputs(make), names)


def judge(optimized, baseline=double, *, make=None, reference=None, **words):
    make = make or vector()
    effects = infer_effects(baseline, make, ("a", "out"))
    reference = reference or (lambda a, out: a.double() * 2)
    arms = {"baseline": preparing(baseline), "optimized": preparing(optimized)}
    return agreement.agree(arms, as_inputs(make), reference, effects, **words)


def wrong(message, error=WrongResult):
    return pytest.raises(error, match=re.escape(message))


def test_no_garbage_is_collected_while_an_arm_prepares_or_runs():
    seen = []

    def make(a, out):
        seen.append(gc.isenabled())
        return lambda a, out: seen.append(gc.isenabled()) or double(a, out)

    judge(prepared(make))
    assert seen == [False, False]
    assert gc.isenabled()


# effects of the baseline on its arguments


def test_a_destination_is_write_only_and_an_update_is_not():
    def make():
        torch.manual_seed(0)
        return torch.randn(8), torch.randn(8), torch.empty(8)

    def call(a, total, out):
        total += a
        torch.neg(a, out=out)

    effects = infer_effects(call, make, ["a", "total", "out"])
    assert effects == ArgumentEffects(("args[1]", "args[2]"), ("args[2]",), ("a", "total", "out"))


def test_many_tensors_of_one_argument_are_checked_together():
    def make():
        torch.manual_seed(0)
        many = [torch.randn(4) for _ in range(20)]
        return many, [torch.empty(4) for _ in many], [torch.randn(4), torch.empty(4)]

    def call(parameters, doubled, mixed):
        calls.append(1)
        for parameter, out in zip(parameters, doubled, strict=True):
            torch.mul(parameter, 2, out=out)
            parameter.add_(1)
        mixed[0] += 1
        torch.neg(mixed[0], out=mixed[1])

    calls = []
    effects = infer_effects(call, make)
    assert len(effects.mutated) == 42
    assert set(effects.write_only) == {f"args[1][{i}]" for i in range(20)} | {"args[2][1]"}
    # one finds what is changed, and one is for each argument. Of the two that are not written only,
    # each takes another, with finite values, and two are for the short mixed one, as NaN spreads
    assert len(calls) == 1 + 3 + 2 + 2


@pytest.mark.parametrize("is_cleared", [False, True])
def test_one_array_of_many_that_is_read_does_not_exempt_the_others(is_cleared):
    def make():
        torch.manual_seed(0)
        return torch.randn(4), [torch.zeros(4) for _ in range(9)]

    def call(a, outs):
        calls.append(1)
        for out in outs[1:]:
            if is_cleared:
                accumulate_after_clearing(a, out)
            else:
                torch.neg(a, out=out)
        outs[0] += 1

    calls = []
    effects = infer_effects(call, make)
    assert set(effects.write_only) == {f"args[1][{i}]" for i in range(1, 9)}
    assert set(effects.cleared) == (set(effects.write_only) if is_cleared else set())
    # one finds what is changed; NaN is put into all, and into all but the first, if that may help;
    # then finite values of both signs, of which the first is enough to see that one is read
    assert len(calls) == (1 + 1 + 2 + 2 if is_cleared else 1 + 2 + 1)


def accumulate_after_clearing(a, out):
    out *= 0
    out += a


def keep_the_smaller(a, out):
    np.minimum(a, out, out=out)


def keep_the_larger(a, out):
    np.maximum(a, out, out=out)


@pytest.mark.parametrize(
    ("call", "cleared"),
    [(accumulate_after_clearing, ("args[1]",)), (keep_the_smaller, ()), (keep_the_larger, ())],
)
def test_what_a_call_clears_by_arithmetic_is_given_finite_values(call, cleared):
    def make():
        return np.random.default_rng(0).random(8), np.random.default_rng(1).random(8)

    effects = infer_effects(call, make)
    assert (effects.write_only, effects.cleared) == (cleared, cleared)
    args = make()
    effects.poison(args)
    assert (args[1] == 256).all() == bool(cleared)
    assert (args[0] < 1).all()


def test_integers_that_inputs_set_are_not_poisoned():
    def make():
        return torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.empty(4, dtype=torch.int64)

    def call(a, counters, out):
        seen.extend(counters.tolist())
        counters.copy_(a)
        out.copy_(a)

    seen = []
    effects = infer_effects(call, make)
    assert effects == ArgumentEffects(("args[1]", "args[2]"), ("args[2]",))
    assert not any(seen), "a kernel would hang"


def test_numpy_does_not_show_unset_integers(monkeypatch):
    monkeypatch.setattr(np, "empty_like", np.zeros_like)  # freed memory may contain zeros

    def call(a, counters):
        counters[...] = a

    assert infer_effects(call, lambda: (np.arange(4), np.zeros(4, int))).write_only == ()


def test_inferring_effects_leaves_torch_as_it_was():
    infer_effects(double, vector())
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_destination_is_found_although_it_already_has_the_right_result():
    for _ in range(3):
        a, out = vector(n=1000)()
        double(a, out)
        del a, out
    assert infer_effects(double, vector(n=1000)).mutated == ("args[1]",)


def test_arrays_that_inputs_keeps_are_not_changed(tmp_path):
    weights = np.ones(8)
    table = np.memmap(tmp_path / "table", np.float64, "w+", shape=8)
    infer_effects(
        lambda w, t: w + t, lambda: (weights, np.memmap(table.filename, np.float64, "r+"))
    )
    assert weights.tolist() == [1] * 8
    assert not table.any()


def test_inputs_must_follow_the_seed():
    with wrong(
        "inputs() gives different values for the same seed: a (all arms must get the same inputs. "
        "np.random.rand and torch.randn are seeded; a generator of your own takes its seed from "
        "bench: np.random.default_rng(bench.seed). If it is an array from np.empty or torch.empty",
        UsageError,
    ):
        infer_effects(double, lambda: (torch.rand(4), torch.empty(4)), ("a", "out"))


def test_an_updated_input_must_follow_the_seed():
    with wrong("different values for the same seed: a", UsageError):
        infer_effects(lambda a: a.mul_(2), lambda: (torch.rand(4),), ("a",))


def test_a_call_must_do_something():
    with wrong("returns nothing and changes none", UsageError):
        infer_effects(lambda a, out: None, vector())


@pytest.mark.parametrize("returned", [Score(2.0, "req/s", "higher"), (Score(2.0, "s", "lower"),)])
def test_a_score_alone_is_no_result(returned):
    message = "the baseline returns only its Score, so no result can be checked: also return the"
    with wrong(message, UsageError):
        infer_effects(lambda a, out: returned, vector())


def test_names_come_from_a_signature():
    assert argument_effects.parameter_names(lambda a, out, *rest, key=1: a) == ("a", "out")
    assert argument_effects.parameter_names("".join) == ()
    assert argument_effects.parameter_names(ArgumentEffects().label) == ("path",)


# agreement of the arms with the reference


def test_equal_work_agrees():
    errors = judge(lambda a, out: torch.add(a, a, out=out))
    assert [(e.arm, e.output, e.error) for e in errors] == [
        ("baseline", "out", 0.0),
        ("optimized", "out", 0.0),
    ]


def test_a_kernel_that_does_nothing_fails_over_the_right_answer():
    out = torch.zeros(64)  # the same buffer for every call: it holds the right result

    def make():
        return vector()()[0], out

    with wrong("optimized disagrees with the reference: out[0] is nan, expected"):
        judge(lambda a, out: None, make=make)


def test_an_arm_is_not_repaired_by_a_later_one():
    kept = torch.zeros(64)

    def baseline(a, out):
        kept.copy_(a * 2)
        return kept

    with wrong("optimized disagrees with the reference: result[27] is 0, expected"):
        judge(lambda a, out: kept.zero_(), baseline)


def test_the_baseline_runs_after_the_others_and_the_reference_last():
    ran = []

    def arm(name):
        return lambda a, out: ran.append(name) or a * 2

    def reference(a, out):
        ran.append("reference")
        return a.double() * 2

    arms = {name: preparing(arm(name)) for name in ("baseline", "library", "optimized")}
    agreement.agree(arms, as_inputs(vector()), reference, ArgumentEffects())
    assert ran == ["optimized", "library", "baseline", "reference"]


def test_an_unwritten_tail_fails():
    with wrong("out[63] is nan, expected"):
        judge(lambda a, out: double(a[:-1], out[:-1]))


def test_an_unwritten_tail_of_a_strided_destination_fails():
    def make():
        torch.manual_seed(1)
        return torch.randn(8, 4), torch.empty(4, 8).t()

    def baseline(a, out):
        out.copy_(a * 2)

    def optimized(a, out):
        out[:7].copy_(a[:7] * 2)
        out[7, :3].copy_(a[7, :3] * 2)

    assert judge(baseline, baseline, make=make)
    with wrong("out[7, 3] is nan"):
        judge(optimized, baseline, make=make)


@pytest.mark.parametrize("returned", [True, False])
def test_an_update_in_place_counts_once_returned_or_not(returned):
    def make():
        return vector()()[:1]

    def optimized(a):
        a.mul_(2)
        return a if returned else None

    def wide(a):
        return a.double() * 2

    assert len(judge(optimized, lambda a: a.add_(a), make=make, reference=wide)) == 2
    with wrong("optimized disagrees with the reference: a[27] is"):
        judge(lambda a: None, lambda a: a.add_(a), make=make, reference=wide)


def test_an_arm_must_not_touch_its_inputs():
    def optimized(a, out):
        double(a, out)
        a.zero_()

    with wrong("optimized changed argument 'a', which the baseline", UsageError):
        judge(optimized)


def rows():
    torch.manual_seed(3)
    return (torch.rand(32, 4096),)


def row_sums(a):
    return a.double().sum(1)


def test_a_sum_in_another_order_agrees():
    errors = judge(
        lambda a: a.flip(1).cumsum(1)[:, -1], lambda a: a.sum(1), make=rows, reference=row_sums
    )
    assert 0 < errors[1].error <= errors[1].allowed


def test_a_sum_in_bf16_is_caught_unless_declared():
    def optimized(a):
        return a.bfloat16().sum(1).float()

    with wrong("optimized disagrees with the reference: result["):
        judge(optimized, lambda a: a.sum(1), make=rows, reference=row_sums)
    assert judge(optimized, lambda a: a.sum(1), make=rows, reference=row_sums, precision="bf16")


def test_fp16_has_a_budget_of_its_own():
    make = vector(torch.float16)
    assert judge(lambda a, out: out.copy_(a.float() * 2.001), make=make)
    with wrong("optimized disagrees"):
        judge(lambda a, out: out.copy_(a.float() * 2.02), make=make)


def test_fp8_results():
    make = vector(torch.float8_e4m3fn)

    def arm(factor):
        return lambda a, out: out.copy_(a.float() * factor)

    assert judge(arm(2.05), arm(2.0), make=make)
    with wrong("optimized disagrees"):
        judge(arm(4.0), arm(2.0), make=make)


@pytest.mark.parametrize(
    ("precision", "factor"), [("bf16", 0.985), ("fp8_e5m2", 0.75), ("fp8", 0.75), ("nvfp4", 0.5)]
)
def test_a_scaled_result_fails_in_low_precision(monkeypatch, precision, factor):
    make = vector(torch.bfloat16, n=4096)

    def scaled(a, out):
        out.copy_(a * 2 * factor)

    with wrong(
        f"optimized disagrees with the reference: out has a relative RMS error of {1 - factor:.2g}"
    ):
        judge(scaled, make=make, precision=precision)
    monkeypatch.setattr(accuracy, "RMS_BUDGETS", dict.fromkeys(accuracy.RMS_BUDGETS, 1.0))
    assert judge(scaled, make=make, precision=precision), "no element has too large an error"


def test_an_fp8_result_is_held_to_the_rms_error_of_fp8():
    def arm(factor):
        return lambda a, out: out.copy_(a.float() * factor)

    with wrong("out has a relative RMS error of 0.25 (allowed 0.065, baseline's 0)"):
        judge(arm(1.5), arm(2.0), make=vector(torch.float8_e4m3fn, n=4096))


@pytest.mark.parametrize(
    ("precision", "quantize"),
    [
        ("fp8", lambda x: x.to(torch.float8_e4m3fn).float()),
        ("fp8_e5m2", lambda x: x.to(torch.float8_e5m2).float()),
        ("bf16", lambda x: x.bfloat16().float()),
        ("fp16", lambda x: x.half().float()),
        ("tf32", lambda x: (x.view(torch.int32) & -(1 << 13)).view(torch.float32)),
        (
            "nvfp4",
            lambda x: nvfp4.dequantize(
                *nvfp4.quantize(x, nvfp4.matrix_scale(x)), nvfp4.matrix_scale(x)
            ),
        ),
    ],
)
def test_a_product_of_quantized_matrices_passes(precision, quantize):
    def make():
        torch.manual_seed(6)
        return torch.randn(2, 256, 512)

    def optimized(a, b):
        return quantize(a) @ quantize(b).T

    _, error = judge(
        optimized,
        lambda a, b: a @ b.T,
        make=lambda: tuple(make()),
        reference=lambda a, b: a.double() @ b.double().T,
        precision=precision,
    )
    assert error.rms_allowed == accuracy.RMS_BUDGETS[precision]
    assert 0.2 * error.rms_allowed < error.rms < error.rms_allowed


def test_the_rms_error_may_be_twice_the_baselines():
    def arm(factor):
        return lambda a, out: out.copy_(a * 2 * factor)

    baseline, optimized = judge(arm(0.97), arm(0.98), make=vector(torch.bfloat16, n=4096))
    assert optimized.rms == pytest.approx(0.03, rel=0.02)
    assert optimized.rms_allowed == 2 * baseline.rms
    with wrong("allowed 0.04, "):
        judge(arm(0.955), arm(0.98), make=vector(torch.bfloat16, n=4096))


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_no_baseline_admits_a_scaled_result(precision):
    """A baseline with a larger error is refused."""
    budget = accuracy.RMS_BUDGETS[precision]
    worst_baseline = max(accuracy.MAX_BASELINE_ERROR, budget)
    assert accuracy.MAX_RMS_RATIO * worst_baseline < {"fp8": 0.25, "nvfp4": 0.5}[precision]
    with wrong("baseline and reference disagree, one of them is wrong: out has a relative RMS"):
        too_small = 1 - 1.1 * worst_baseline
        judge(
            double,
            lambda a, out: out.copy_(a * 2 * too_small),
            make=vector(torch.bfloat16, n=4096),
            precision=precision,
        )


def test_integers_have_no_rms_error():
    make = lambda: (torch.arange(5), torch.empty(5, dtype=torch.int64))
    arm = lambda a, out: out.copy_(a + 1)
    errors = judge(arm, arm, make=make, reference=lambda a, out: a + 1)
    assert [(e.rms, e.rms_allowed) for e in errors] == [(0, 0)] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_results_must_be_finite(bad):
    def optimized(a, out):
        double(a, out)
        out[5] = bad

    with wrong(f"out[5] is {bad}, expected"):
        judge(optimized)
    with wrong(f"the reference is {bad} at out[3]: choose inputs", UsageError):
        judge(
            double,
            reference=lambda a, out: (
                torch.full((64,), 1.0).index_fill(0, torch.tensor([3]), bad).double()
            ),
        )


@pytest.mark.parametrize("kind", [">f4", ">f8", ">i4", ">c16"])
def test_arrays_with_swapped_bytes_are_compared(kind):
    def make():
        numbers = np.random.default_rng(1).integers(1, 1000, 64)
        return numbers.astype(kind), np.empty(64, kind)

    def double(a, out):
        np.multiply(a, 2, out=out)
        return a * a

    def reference(a, out):
        exact = a.astype({"i": "i8", "f": "f8", "c": "c16"}[kind[1]])
        return exact * exact, 2 * exact

    effects = infer_effects(double, make)
    assert effects.mutated == effects.write_only == ("args[1]",)
    assert judge(double, double, make=make, reference=reference)

    def wrong_sum(a, out):
        np.multiply(a, 3, out=out)
        return a * a

    with wrong("optimized disagrees with the reference: "):
        judge(wrong_sum, double, make=make, reference=reference)


def test_packed_numbers_of_four_bits_are_compared_as_bytes():
    def make():
        torch.manual_seed(1)
        return torch.randint(256, (64,), dtype=torch.uint8).view(torch.float4_e2m1fn_x2), 1

    flip = lambda a, out: (a.view(torch.uint8) ^ 0x88).view(a.dtype)
    reference = lambda a, out: a.view(torch.uint8) ^ 0x88
    assert judge(flip, flip, make=make, reference=reference)
    with wrong("optimized disagrees with the reference: result["):
        judge(lambda a, out: flip(flip(a, out), out), flip, make=make, reference=reference)

    def flip_in_place(a, out):
        a.view(torch.uint8).bitwise_xor_(0x88)
        return flip(a, out)

    with wrong("optimized changed argument 'a', which the baseline left unchanged", UsageError):
        judge(flip_in_place, flip, make=make, reference=reference)


@pytest.mark.filterwarnings("error")
def test_a_result_whose_squares_overflow_is_refused_without_a_warning():
    huge = np.full(9, 1e200)
    with wrong("choose inputs whose results, and their squares, are finite", UsageError):
        accuracy.verify({"baseline": [("result", huge)]}, huge)


def test_the_message_names_the_worst_element():
    def make():
        return torch.full((4, 32), 1.25), torch.empty(4, 32)

    def optimized(a, out):
        double(a, out)
        out[1, 2] = 2.49
        out[3, 17] = 1.25

    with wrong(
        "optimized disagrees with the reference: out[3, 17] is 1.25, expected 2.5 "
        "(relative error 0.25, allowed 7.6e-06, baseline's 0; relative to |expected| + 2.5)"
    ):
        judge(optimized, make=make)


def test_a_wrong_baseline_is_noticed():
    with wrong("baseline and reference disagree, one of them is wrong: out["):
        judge(double, reference=lambda a, out: a.double() * 2.01)
    with wrong(
        "out[0] is 2.5, expected 2 (relative error 0.12, allowed 0.00049; "
        "relative to |expected| + 2)"
    ):
        judge(
            double,
            make=lambda: (torch.full((64,), 1.25), torch.empty(64)),
            reference=lambda a, out: a.double() * 1.6,
        )
    with wrong("baseline and reference disagree"):
        judge(
            lambda a, out: out.zero_(),
            lambda a, out: out.zero_(),
            make=vector(torch.bfloat16),
        )


def test_signatures_must_be_the_same():
    with wrong(
        "optimized gives float32[64, 1] on cpu for result, the baseline float32[64] on cpu: all "
        "arms must return the same shapes and dtypes; convert it in the arm"
    ):
        judge(lambda a, out: (a * 2)[:, None], lambda a, out: a * 2)
    with wrong("optimized gives float64[64] on cpu for result"):
        judge(lambda a, out: a.double() * 2, lambda a, out: a * 2)
    results = {
        arm: [accuracy.Deviation("result", "float32", (4,), device, 0.0, 0.0)]
        for arm, device in {"baseline": "cuda:0", "optimized": "cpu"}.items()
    }
    with wrong("return the same shapes and dtypes, on the same device; convert it in the arm"):
        accuracy.judge(results, accuracy.expect(torch.ones(4, dtype=torch.float64)))
    with wrong("returns nothing and changes no argument: is a return missing?"):
        judge(lambda a, out: None, lambda a, out: a * 2)


def keeping(compute):
    """An arm that returns the result of its first inputs, computed anew, for all inputs."""
    first = []

    def arm(a, out):
        first.append(a.clone())
        return compute(first[0])

    return arm


KEPT = "; it is the result for earlier inputs: the arm keeps it"
WRONG_SECOND = {
    "kept": (keeping(lambda a: a * 2), torch.randn, KEPT),
    "kept, rounded otherwise": (keeping(lambda a: (a / 3) * 6), torch.randn, KEPT),
    "other": (lambda a, out: a * 2 if len(CALLS) < 2 else a * 3, torch.randn, ""),
    "integers": (keeping(lambda a: a * 2), lambda n: torch.randint(99, (n,)), ""),
    "zeros": (lambda a, out: a * 0, lambda n: torch.full((n,), len(CALLS) - 1.0), ""),
}
CALLS = []  # one element for each seed


@pytest.mark.parametrize("name", WRONG_SECOND)
def test_the_result_for_earlier_inputs_is_recognized(name):
    arm, draw, explanation = WRONG_SECOND[name]
    CALLS.clear()
    shortcuts = Shortcuts()
    arms = {"baseline": preparing(lambda a, out: a + a), "optimized": preparing(arm)}

    def make():
        torch.manual_seed(len(CALLS))
        return draw(64), torch.empty(64)

    def agree():
        CALLS.append(None)
        reference = lambda a, out: a.double() * 2
        agreement.agree(arms, as_inputs(make), reference, ArgumentEffects(), shortcuts=shortcuts)

    agree()
    with pytest.raises(WrongResult) as error:
        agree()
    assert "optimized disagrees with the reference: " in str(error.value)
    assert str(error.value).partition(")")[2] == explanation


def test_the_reference_returns_as_many_tensors_as_the_call():
    with wrong(
        "the reference returns (reference[0], reference[1]), but the baseline's result is (out): "
        "the values that a call returns, followed by the arguments that it changes; let the "
        "reference return as many, in the same order",
        UsageError,
    ):
        judge(double, reference=lambda a, out: (a, a))
    with wrong("returns nothing, but the baseline's result is (out)", UsageError):
        judge(double, reference=lambda a, out: None)
    with wrong("let the reference return a list of 10 numbers", UsageError):
        judge(*[lambda a, out: a[:10].tolist()] * 2, reference=lambda a, out: a[:10].double())
    with wrong(
        "the reference gives float64[1, 64] on cpu for out, the baseline float32[64]", UsageError
    ):
        judge(double, reference=lambda a, out: a.double()[None] * 2)


def test_the_reference_is_fp64_or_exact():
    assert judge(double, reference=lambda a, out: a * 2)
    with wrong("compute the reference in fp64: for out it gives float32", UsageError):
        judge(double, reference=lambda a, out: a * 2.0000005)
    with wrong("compute the reference in fp64", UsageError):
        judge(double, reference=lambda a, out: (a * 2).half())


def test_integers_are_exact():
    big = 2**60

    def make():
        return torch.arange(5) + big, torch.empty(5, dtype=torch.int64)

    def baseline(a, out):
        torch.add(a, 1, out=out)

    assert judge(baseline, baseline, make=make, reference=lambda a, out: a + 1)
    with wrong(f"out[0] is {big}, expected {big + 1} (error 1, allowed 0, baseline's 0)"):
        judge(lambda a, out: out.copy_(a), baseline, make=make, reference=lambda a, out: a + 1)


def test_python_numbers_are_compared():
    def baseline(n):
        return 0.1 + 0.2 + n

    assert judge(lambda n: 0.3 + n, baseline, make=lambda: (3,), reference=lambda n: 3.3)
    with wrong("result is nan, expected 3.3"):
        judge(lambda n: float("nan"), baseline, make=lambda: (3,), reference=lambda n: 3.3)


def test_complex_results():
    def make():
        torch.manual_seed(2)
        return torch.randn(8, dtype=torch.complex64), torch.empty(8, dtype=torch.complex64)

    def optimized(a, out):
        double(a, out)
        out[6] += 1j

    def reference(a, out):
        return a.to(torch.complex128) * 2

    assert judge(double, make=make, reference=reference)
    with wrong("out[6, 1] is"):
        judge(optimized, make=make, reference=reference)


def test_numpy_arms_and_a_torch_reference():
    def make():
        return np.random.default_rng(0).random(100, dtype=np.float32), np.empty(100, np.float32)

    def baseline(a, out):
        np.multiply(a, 2, out=out)

    def reference(a, out):
        return torch.from_numpy(a).double() * 2

    for _ in range(3):  # numpy reuses the memory of small arrays, which may hold right results
        assert infer_effects(baseline, make).write_only == ("args[1]",)
    assert judge(baseline, make=make, baseline=baseline, reference=reference)
    with wrong("out[0] is nan"):
        judge(lambda a, out: None, make=make, baseline=baseline, reference=reference)


def test_a_numpy_reference_of_torch_arms():
    assert judge(double, reference=lambda a, out: a.double().numpy()[::-1][::-1] * 2)


def test_modules_and_dicts_are_arguments():
    def make():
        torch.manual_seed(4)
        return torch.nn.Linear(4, 4), {"x": torch.randn(2, 4), "out": torch.empty(2, 4)}

    @torch.no_grad()
    def baseline(model, io):
        io["out"].copy_(model(io["x"]))

    def optimized(model, io):
        baseline(model, io)
        with torch.no_grad():
            model.bias.zero_()

    def reference(model, io):
        return model.double()(io["x"].double())

    words = {"baseline": baseline, "make": make, "reference": reference}
    assert infer_effects(baseline, make).write_only == ("args[1]['out']",)
    assert judge(baseline, **words)[1].output == "out['out']"
    with wrong("optimized changed argument 'a.bias'", UsageError):
        judge(optimized, **words)


def test_gradients_are_part_of_the_result():
    def make():
        torch.manual_seed(5)
        return (torch.randn(6, requires_grad=True),)

    def baseline(a):
        (a * a).sum().backward()

    def reference(a):
        return 2 * a.double()

    words = {"baseline": baseline, "make": make, "reference": reference}
    assert judge(lambda a: (a**2).sum().backward(), **words)[0].output == "a.grad"
    with wrong("optimized disagrees with the reference: a.grad["):
        judge(lambda a: (a**3).sum().backward(), **words)


def test_a_prepared_arm_prepares_before_the_poison():
    def make(a, out):
        double(a, out)
        return lambda a, out: None  # make() has already done the work

    with wrong("out[0] is nan"):
        judge(prepared(make))
    assert judge(prepared(lambda a, out: double))


# What makes the result, and what the message calls it.
UNCOMPARED = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "Tensor"),
    "meta": (lambda: torch.empty(3, device="meta"), "Tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "Tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "Tensor"),
    "longdouble": (
        lambda: np.ones(3, np.longdouble),
        f"ndarray of {np.dtype(np.longdouble)}",
    ),
    "clongdouble": (
        lambda: np.ones(3, np.clongdouble),
        f"ndarray of {np.dtype(np.clongdouble)}",
    ),
    "text": (lambda: "text", "str"),
    "an array of text": (lambda: np.array(["text"]), "ndarray of <U4"),
    "bytes": (lambda: b"bytes", "bytes"),
    "complex numbers beside a large integer": (lambda: [1j] * 99 + [2**64], "list"),
}


@pytest.mark.filterwarnings("ignore")  # quantized and nested tensors warn of their future
@pytest.mark.parametrize(("make", "name"), UNCOMPARED.values(), ids=UNCOMPARED)
def test_a_result_that_cannot_be_compared_is_named(make, name):
    odd = make()
    with wrong(f"a result of type {name} cannot be compared", UsageError):
        judge(lambda a, out: odd, lambda a, out: odd, reference=lambda a, out: odd)
    effects = infer_effects(lambda x, a, out: double(a, out), lambda: (odd, *vector()()))
    assert effects.mutated == ("args[2]",), "such values may be inputs"


@pytest.mark.parametrize(
    "numbers",
    [2**64, [*range(99), 2**64], [-1, *range(20), 2**63], [np.int64(-1), *[np.uint64(2**63)] * 20]],
)
def test_integers_that_numpy_would_round_are_compared_exactly(numbers):
    def check(result):
        results = iter([result, numbers])  # the optimized arm runs first
        arm = lambda a, out: next(results)
        arms = {"baseline": preparing(arm), "optimized": preparing(arm)}
        reference = lambda a, out: numbers
        return agreement.agree(arms, as_inputs(vector()), reference, ArgumentEffects(returned=1))

    assert check(numbers)
    larger = [*numbers[:-1], int(numbers[-1]) + 1] if isinstance(numbers, list) else numbers + 1
    with wrong("optimized disagrees with the reference: result["):
        check(larger)


def test_doubles_beside_a_large_integer_are_compared_as_doubles():
    numbers = [0.5] * 20 + [2**70]
    (array,) = tensors.as_array(numbers)
    assert array.tolist() == numbers


def test_a_result_that_contains_itself_is_refused():
    odd = [1.0]
    odd.append(odd)
    with wrong("result is nested too deep, or contains itself", UsageError):
        judge(lambda a, out: odd, lambda a, out: odd)


def test_large_tensors_are_compared_in_chunks(monkeypatch):
    monkeypatch.setattr(tensors, "HOST_CHUNK", 10)

    def optimized(a, out):
        double(a, out)
        out[47] = 100

    assert judge(double)
    with wrong("out[47] is 100"):
        judge(optimized)
    array = SimpleNamespace(device="cuda:0")
    sizes = [tensors.chunk(x) for x in (np.ones(1), torch.ones(1), array)]
    assert sizes == [10, 10, tensors.CHUNK]


def test_arrays_are_split_alike_whatever_their_strides(monkeypatch):
    monkeypatch.setattr(tensors, "HOST_CHUNK", 10)

    def make():
        torch.manual_seed(8)
        return (torch.randn(23, 7),)

    def optimized(a):
        result = a.t().contiguous()
        result[4, 21] = 9
        return result

    words = {"make": make, "reference": lambda a: a.t().double()}
    assert judge(lambda a: a.t().contiguous(), lambda a: a.t().clone(), **words)
    with wrong("result[4, 21] is 9"):
        judge(optimized, lambda a: a.t().clone(), **words)


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that exist."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.live.values()))
        return result


LARGE, PART = 1 << 17, 1 << 11
"""Elements of an input and of the parts in which it is read: about ten temporaries of a part's size
exist at a time."""


def in_place():
    torch.manual_seed(9)
    return (torch.randn(2 * LARGE),)


def into_an_output():
    torch.manual_seed(9)
    return torch.randn(LARGE), torch.empty(LARGE)


def transposed():
    torch.manual_seed(9)
    return torch.randn(LARGE >> 10, 1 << 10), torch.empty(1 << 10, LARGE >> 10)


def integers():
    torch.manual_seed(9)
    return torch.randint(9, (LARGE,)), torch.empty(LARGE, dtype=torch.int64)


LARGE_CLAIMS = {  # the last item is the size of a result in sets of inputs
    "in place": (in_place, lambda x: x.neg_(), lambda x: x.neg(), 1),
    "into an output": (
        into_an_output,
        lambda x, out: torch.neg(x, out=out),
        lambda x, out: x.neg(),
        0.5,
    ),
    "transposed": (
        transposed,
        lambda x, out: out.copy_(x.t()),
        lambda x, out: x.t().clone(),
        0.5,
    ),
    "integers": (integers, lambda x, out: torch.neg(x, out=out), lambda x, out: -x, 0.5),
}


@pytest.mark.parametrize(
    ("make", "arm", "reference", "share"), LARGE_CLAIMS.values(), ids=LARGE_CLAIMS
)
def test_large_inputs_exist_at_most_twice(monkeypatch, make, arm, reference, share):
    monkeypatch.setattr(tensors, "HOST_CHUNK", PART)
    size = tensors.nbytes(make())
    with Memory() as memory:
        effects = infer_effects(arm, make)
    assert effects.nbytes == size
    assert memory.peak == pytest.approx((1 + share) * size, rel=0.2)
    arms = {name: preparing(arm) for name in ("baseline", "optimized")}
    # results that are kept: one of each arm, beside the reference's
    for kept_bytes, results in ((size - 1, 1), (size, 3)):
        with Memory() as memory:
            agreement.agree(arms, as_inputs(make), reference, effects, kept_bytes=kept_bytes)
        assert memory.peak == pytest.approx((1 + results * share) * size, rel=0.2)


def test_the_reference_of_large_inputs_runs_first():
    ran = []

    def arm(a, out):
        ran.append("arm")
        double(a, out)

    def reference(a, out):
        ran.append("reference")
        return a.double() * 2

    effects = infer_effects(double, vector(), ("a", "out"))
    arms = {name: preparing(arm) for name in ("baseline", "optimized")}
    (_, error) = agreement.agree(arms, as_inputs(vector()), reference, effects, kept_bytes=0)
    assert ran == ["reference", "arm", "arm"]
    assert error.index == (0,)
    arms["optimized"] = preparing(lambda a, out: None)
    with wrong("optimized disagrees with the reference: out[0] is nan, expected"):
        agreement.agree(arms, as_inputs(vector()), reference, effects, kept_bytes=0)


def test_empty_results_agree():
    assert judge(lambda a, out: a[:0], lambda a, out: a[:0], reference=lambda a, out: a[:0])


def test_results_are_verified_after_timing():
    a, _ = vector()()
    good, bad = (argument_effects.outputs_of(a * f, (), ArgumentEffects()) for f in (2, 3))
    truth = a.double() * 2
    assert accuracy.verify({"optimized": good, "baseline": good}, truth)[0].arm == "baseline"
    (error,) = accuracy.verify({"baseline": good}, truth, located=False)
    assert (error.index, error.error) == ((), 0)
    with wrong("the reference: result["):  # an error is located even with located=False
        accuracy.verify({"baseline": good, "optimized": bad}, truth, located=False)
    with wrong("optimized disagrees with the reference after timing: result["):
        accuracy.verify({"baseline": good, "optimized": bad}, truth, when="after timing")


# results that need no work


def agree_on_two_seeds(arm, make, reference, *, mutated=(), write_only=(), precision=None):
    """Check both seeds with one arm; ``make`` draws values from the seed that is set."""
    effects = ArgumentEffects(mutated, write_only, returned=0 if mutated else 1)
    arms = {name: preparing(arm) for name in ("baseline", "optimized")}
    shortcuts = Shortcuts(precision)
    for seed in (1, 2):

        def seeded(seed=seed):
            torch.manual_seed(seed)
            return Inputs(args=make(), dynamic=(), seed=seed)

        agreement.agree(arms, seeded, reference, effects, precision, shortcuts=shortcuts)


def easy(name, output="result"):
    return wrong(f"{name} would pass for {output}, so an arm could skip the work", UsageError)


def test_a_result_that_is_the_same_for_all_inputs_is_refused():
    with easy("the result for other inputs"):
        agree_on_two_seeds(len, lambda: (torch.rand(9),), len)
    with easy("the result for other inputs"):
        agree_on_two_seeds(lambda x: x[:0] * 2, lambda: (torch.rand(9),), lambda x: x[:0])
    with easy("the result for other inputs", "result[1]"):
        agree_on_two_seeds(
            lambda x: (x * 2, x.sum() + 1e9),
            lambda: (torch.rand(9),),
            lambda x: (x.double() * 2, x.double().sum() + 1e9),
        )


def test_an_integer_beside_a_result_may_be_the_same_for_all_inputs():
    agree_on_two_seeds(
        lambda x: (x * 2, len(x), x >= 0),
        lambda: (torch.rand(9),),
        lambda x: (x.double() * 2, 9, x >= 0),
    )


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 0.02), (torch.float8_e4m3fn, 0.2)])
def test_a_result_that_a_constant_approximates_is_refused(monkeypatch, dtype, spread):
    """Results of two seeds differ by more than what is allowed, but their mean does not."""
    monkeypatch.setitem(accuracy.ERROR_BUDGETS, "bf16", 1.0)
    monkeypatch.setitem(accuracy.RMS_BUDGETS, "bf16", 1.25 * spread)
    make = lambda: ((1 + spread * torch.randn(64)).to(dtype),)
    with easy("a constant"):
        agree_on_two_seeds(torch.clone, make, lambda x: x.double(), precision="bf16")


def test_an_input_that_approximates_the_result_is_refused_and_a_copy_is_not():
    make = lambda: (torch.randn(4, 1 << 16),)
    norm = lambda x: torch.nn.functional.layer_norm(x, x.shape[1:])
    with easy("args[0]"):
        agree_on_two_seeds(norm, make, lambda x: norm(x.double()), precision="bf16")
    agree_on_two_seeds(norm, make, lambda x: norm(x.double()))
    agree_on_two_seeds(torch.clone, make, torch.clone, precision="bf16")


def test_an_update_that_changes_too_little_is_refused():
    def arm(w, g):
        w -= 1e-4 * g

    make = lambda: (torch.randn(64), torch.randn(64))
    words = {"reference": lambda w, g: w.double() - 1e-4 * g, "mutated": ("args[0]",)}
    with easy("args[0]", "args[0]"):
        agree_on_two_seeds(arm, make, precision="bf16", **words)
    agree_on_two_seeds(arm, make, **words)


def test_a_constant_that_must_be_written_is_work_where_nothing_is_read():
    destination = {"mutated": ("args[0]",), "write_only": ("args[0]",)}
    sevens = lambda out: torch.full((64,), 7.0)
    agree_on_two_seeds(lambda out: out.fill_(7), lambda: (torch.empty(64),), sevens, **destination)
    with easy("the result for other inputs"):
        agree_on_two_seeds(lambda out: torch.full((64,), 7.0), lambda: (torch.empty(64),), sevens)


@pytest.mark.parametrize("precision", accuracy.RMS_BUDGETS)
def test_neither_zeros_nor_half_the_result_are_ever_allowed(precision):
    budget = accuracy.RMS_BUDGETS[precision]
    largest = accuracy.MAX_RMS_RATIO * max(accuracy.MAX_BASELINE_ERROR, budget)
    assert max(largest, budget) < 0.5


# one large element does not hide the others


def scale(values):
    (expected,) = accuracy.expect(values)
    return expected.scale, expected.rms


@pytest.mark.parametrize("count", [1, 3, 9, 100, 1000, 300_000])
@pytest.mark.parametrize("module", [np, torch], ids=["numpy", "torch"])
def test_the_scale_of_ordinary_values_is_their_rms(module, count):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, count))
    for values in (a, a.clip(0), a * b, a**2 + 1, rng.random(count), np.zeros(count)):
        found, rms = scale(module.asarray(values.reshape(-1, 1 if count % 3 else 3)))
        assert found == rms


def test_the_scale_is_that_of_the_smaller_half():
    values = np.ones(100_000)
    values[::3] = 1e9
    found, rms = scale(values)
    assert found == accuracy.SMALLER_HALF
    assert rms > 1e8
    assert scale(np.array([1e9, 3.0]))[0] == 3 * 32 * accuracy.SMALLER_HALF
    assert scale(np.array([[0, 1e9], [0, 2.0]]))[0] == 2 * 16 * accuracy.SMALLER_HALF


def test_values_that_nearly_underflow_have_no_scale_of_their_own():
    values = np.full(1000, 1e-40)
    values[::3] = 0.5
    found, rms = scale(values)
    assert found == accuracy.NEGLIGIBLE * rms


def test_both_errors_refer_to_the_scale():
    want = np.ones(1000)
    want[7] = 1e9
    (expected,) = accuracy.expect(want)
    got = np.where(want > 1, want, 0.0)
    error, rms, locate = accuracy._worst(got, expected)
    assert error == pytest.approx(1 / (1 + accuracy.SMALLER_HALF))
    assert rms == pytest.approx(error, rel=0.01)
    assert locate() == ((0,), 0, 1)


# lists of numbers


def test_a_long_list_of_numbers_is_one_output():
    numbers = list(np.random.default_rng(1).random(1000))
    errors = judge(
        lambda a, out: [float(2 * x) for x in numbers],
        lambda a, out: [float(x + x) for x in numbers],
        reference=lambda a, out: 2 * np.array(numbers),
    )
    assert [error.output for error in errors] == ["result", "result"]
    with wrong("optimized disagrees with the reference: result[7] is 9"):
        judge(
            lambda a, out: [9.0 if i == 7 else float(2 * x) for i, x in enumerate(numbers)],
            lambda a, out: [2 * x for x in numbers],
            reference=lambda a, out: 2 * np.array(numbers),
        )


def test_numbers_of_python_that_an_arm_changes_are_seen():
    def make():
        return {
            "few": [3.0, 1.0],
            "many": [float(-i) for i in range(99)],
            "n": 5,
            "b": bytearray(3),
        }

    make_args = lambda: (make(),)
    changes = {
        "a['few'][0]": lambda d: d["few"].sort(),
        "a['many']": lambda d: d["many"].sort(),
        "a['n']": lambda d: d.update(n=6),
        "a['b']": lambda d: d["b"].reverse() or d["b"].append(1),
    }
    for path, change in changes.items():
        with wrong(f'optimized changed argument "{path}"', UsageError):
            judge(
                lambda d, change=change: change(d) or 1.0,
                lambda d: 1.0,
                make=make_args,
                reference=lambda d: 1.0,
            )


def test_a_list_that_the_baseline_changes_is_part_of_the_result():
    def make():
        torch.manual_seed(3)
        return (torch.rand(99).tolist(),)

    def unsorted(x):
        x.reverse()

    assert judge(list.sort, list.sort, make=make, reference=sorted)[0].output == "a"
    with wrong("optimized disagrees with the reference: a["):
        judge(unsorted, list.sort, make=make, reference=sorted)


def test_the_memory_of_arguments_is_read_once_for_all_arrays_of_a_result(monkeypatch):
    calls = []
    read = tensors._file_mappings
    monkeypatch.setattr(tensors, "_file_mappings", lambda: calls.append(1) or read())
    rows = lambda a, out: list(a.double().view(16, 4))
    assert judge(rows, rows, reference=lambda a, out: [row.clone() for row in rows(a, out)])
    assert len(calls) == 2  # one for each arm


def filled(word, keys):
    """An arm that puts texts under keys that depend on the values, and so on the seed."""

    def call(x, d):
        for key in keys(x):
            d[key].append(word)
        return x * 2

    return call


def check_filled(optimized, baseline):
    make = lambda seed: lambda: (torch.full((8,), seed), collections.defaultdict(list))
    effects = infer_effects(baseline, make(7.0), ("x", "d"))
    arms = {"baseline": preparing(baseline), "optimized": preparing(optimized)}
    return agreement.agree(arms, as_inputs(make(20.0)), lambda x, d: x.double() * 2, effects)


def test_texts_may_be_added_under_other_keys_for_each_seed():
    by_seed = lambda x: [int(x[0]) + i for i in range(20)]
    baseline = filled("a", by_seed)
    assert check_filled(filled("a", by_seed), baseline)
    missing = filled("a", lambda x: by_seed(x)[:-1])
    for optimized in (filled("b", by_seed), missing, lambda x, d: x * 2):
        with wrong("optimized leaves other contents in d than the baseline"):
            check_filled(optimized, baseline)
    with wrong("optimized changed argument 'd[100][0]', which the baseline left", UsageError):
        check_filled(filled("a", lambda x: [*by_seed(x), 100]), baseline)


def test_numbers_that_are_added_for_some_seeds_are_not_compared():
    more = filled(1.5, lambda x: [int(x[0]) + i for i in range(20)])
    with wrong("'d[34][0]', and 5 more, which the baseline changes for some", UsageError) as error:
        check_filled(more, more)
    assert len(str(error.value)) < 300


def test_a_changed_argument_may_be_returned_for_an_array_of_its_own():
    def make():
        torch.manual_seed(4)
        return (torch.randn(8, requires_grad=True),)

    def gradient(w):
        (w * w).sum().backward()
        return w.grad

    wide = lambda w: (2 * w.detach().double(),) * 2
    errors = judge(gradient, lambda w: gradient(w).clone(), make=make, reference=wide)
    assert [error.output for error in errors[1::2]] == ["result", "a.grad"]
