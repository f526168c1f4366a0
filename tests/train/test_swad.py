"""Weights are scalars, mostly the number of their step, so that an average tells which steps are in it."""

import json
import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchgen.train.swad import Swad, SwadResult


def scalar(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(float(value))}


def feed(swad: Swad, losses: Iterable[float], every: int = 1, trailing: int = 0, first: int = 1) -> Swad:
    """Steps 1, 2, ... with the step as the weight; `first` steps to the first evaluation, then `every`."""
    step = 0
    for i, loss in enumerate(losses):
        for _ in range(every if i else first):
            step += 1
            swad.update(scalar(step))
        swad.evaluate(loss, step)
    for _ in range(trailing):
        step += 1
        swad.update(scalar(step))
    return swad


def average(result: SwadResult) -> float:
    return float(result.average["w"])


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def history(*losses: float, **rule: float) -> SwadResult:
    """One step an evaluation: evaluation i is step i + 1."""
    return feed(Swad(**rule), losses).result()  # type: ignore[arg-type]


# The clean rule


# name: losses, options of `feed`, and (converged, start, end) of the steps averaged
CLEAN: dict[str, tuple[list[float], dict[str, int], tuple[bool, int, int]]] = {
    # ties count as lowest: t_s is evaluation 0, at step 4; steps 1-3 of its segment lie before the valley
    "flat": ([1.0] * 5, {"every": 4, "first": 4, "trailing": 3}, (True, 4, 23)),
    # windows: [5,4,3] [4,3,2] [3,2,2.2] no; [2,2.2,2.1] yes: t_s = 3, although 1.9 comes later
    "first lowest": ([5, 4, 3, 2, 2.2, 2.1, 1.9], {"every": 2, "first": 2}, (True, 8, 14)),
    "five above are not yet the end": ([1, 1, 1, 1.2, *[2] * 5], {"every": 2, "first": 2}, (True, 2, 18)),
    "ended": ([1, 1, 1, 1.2, *[2] * 6], {"every": 2, "first": 2}, (True, 2, 8)),  # t_e = 9 - 6 = evaluation 3
    # evaluations 2, 3, 4; no trailing steps
    "no valley": ([9, 8, 7, 6, 5], {"every": 3, "first": 3, "trailing": 2}, (False, 7, 15)),
    "fewer evaluations than a window": ([1, 2], {"every": 2, "first": 2, "trailing": 1}, (False, 1, 4)),
}


@pytest.mark.parametrize("case", CLEAN)
def test_the_average_is_over_the_valley(case: str) -> None:
    losses, options, (converged, start, end) = CLEAN[case]
    swad = feed(Swad(), losses, **options)
    result = swad.result()
    assert (result.converged, result.start_step, result.end_step) == (converged, start, end)
    assert result.count == end - start + 1 and average(result) == pytest.approx(mean(range(start, end + 1)))
    assert swad.ended == (case == "ended") and (result.threshold is not None) == converged
    if case == "first lowest":
        assert result.threshold == pytest.approx(1.3 * (2 + 2.2 + 2.1) / 3)
    assert case not in ("no valley", "ended") or case in result.note


def test_nothing_changes_after_the_end() -> None:
    swad = feed(Swad(n_tolerance=2), [1, 1, 1, 9, 9])
    before = swad.result()
    swad.update(scalar(100))
    swad.evaluate(0.1, 6)
    assert swad.result() == before and before.end_step == 3


def test_a_loss_that_is_not_finite_is_above_and_never_lowest() -> None:
    nan, inf = math.nan, math.inf
    assert not history(nan, nan, nan, nan).converged
    assert not history(inf, inf, inf).converged
    assert history(nan, 1, 2, 3).start_step == 2
    assert history(-inf, 1, 2, 3).start_step == 2
    late = history(1, nan, 3, inf, nan, n_tolerance=3)  # rim 1.3 (1 + 3) / 2 = 2.6: 3 is above it as well
    assert late.threshold == pytest.approx(2.6)
    assert (late.start_step, late.end_step, late.count) == (1, 1, 1)


def test_weights_are_kept_in_float32_and_not_by_reference() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    swad = Swad()
    for step in range(1, 5):
        with torch.no_grad():
            weight.fill_(step)
        swad.update({"w": weight})
        swad.evaluate(1.0, step)
    found = swad.result().average["w"]
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found, torch.full((3,), 2.5))
    found.zero_()
    torch.testing.assert_close(swad.result().average["w"], torch.full((3,), 2.5))


def obvious(
    weights: Sequence[float], evaluations: Sequence[tuple[int, float]], n_s: int, n_e: int, ratio: float
) -> tuple[float, bool, int, int]:
    """(average, converged, start, end) with every step in memory; step s has weights[s - 1]."""
    steps = [step for step, _ in evaluations]
    losses = [loss if math.isfinite(loss) else math.inf for _, loss in evaluations]
    windows = {i: losses[i : i + n_s] for i in range(len(losses) - n_s + 1)}
    starts = [i for i, window in windows.items() if window[0] < math.inf and window[0] == min(window)]
    if not starts:
        start, end = (steps[-n_s - 1] + 1 if len(steps) > n_s else 1), steps[-1]
    else:
        start, end = steps[starts[0]], len(weights)
        finite = [loss for loss in windows[starts[0]] if loss < math.inf]
        rim = ratio * sum(finite) / len(finite)
        for j in range(starts[0] + n_e, len(losses)):
            if all(loss > rim for loss in losses[j - n_e + 1 : j + 1]):
                end = steps[j - n_e]
                break
    return mean(weights[start - 1 : end]), bool(starts), start, end


LOSS, STEP = st.sampled_from([0.5, 1.0, 1.1, 1.2, 1.4, 2.0, 3.0, math.nan, math.inf]), st.integers(-50, 50)
SEGMENTS = st.lists(st.tuples(st.lists(STEP, min_size=1, max_size=4), LOSS), min_size=1, max_size=16)


@settings(max_examples=300, deadline=None)
@given(SEGMENTS, st.lists(STEP, max_size=3), st.integers(1, 4), st.integers(1, 6), st.sampled_from([1.0, 1.2, 1.3]))
def test_streaming_equals_the_obvious_version(
    segments: list[tuple[list[int], float]], trailing: list[int], n_s: int, n_e: int, ratio: float
) -> None:
    swad = Swad(n_s, n_e, ratio)
    weights: list[float] = []
    evaluations = []
    for values, loss in segments:
        for value in values:
            weights.append(value)
            swad.update(scalar(value))
        swad.evaluate(loss, len(weights))
        evaluations.append((len(weights), loss))
    for value in trailing:
        weights.append(value)
        swad.update(scalar(value))
    expected, converged, start, end = obvious(weights, evaluations, n_s, n_e, ratio)
    result = swad.result()
    assert (result.converged, result.start_step, result.end_step) == (converged, start, end)
    assert result.count == end - start + 1
    assert average(result) == pytest.approx(expected, abs=1e-4)


# compat: the original implementation. One step an evaluation unless said, so segment i is the number i + 1.


# name: losses, averaged segments (repeated as often as they count), and (start, end, count) where it tells more
COMPAT: dict[str, tuple[list[float], list[int], tuple[int, int, int] | None]] = {
    # converged at evaluation 5 on segment 3, rim 1.43; 0-2 are above it, so nothing is added backwards and the stand-in
    # has count 0 (quirk d): evaluation 8 has segment 3 as head and overwrites it, 9 adds 4, the end adds 5-9
    "no extension": ([9, 8, 7, 1, 1.1, 1.2, *[1.1] * 4], [3, 4, 5, 6, 7, 8, 9], (4, 10, 7)),
    # converged at evaluation 6 on segment 4, rim 1.43; memory is 1-6, its oldest four 1-4 are all within the rim.
    # (a) the first of them, 1, is skipped: 2, 3, 4 are added; (b) evaluation 9 has 4 as head and adds it again;
    # evaluation 10 adds 5, the end drops the head 5 and adds 6-10
    "extension": ([9, 1.2, 1.1, 1.3, 1.0, 1.1, 1.2, *[1.1] * 4], [2, 3, 4, 4, 5, 6, 7, 8, 9, 10], (3, 11, 10)),
    # as above but segment 1 is above the rim: of the remaining 2, 3, 4 the first is skipped again
    "cut extension": ([9, 2.0, 1.1, 1.3, 1.0, 1.1, 1.2, *[1.1] * 4], [3, 4, 4, 5, 6, 7, 8, 9, 10], None),
    # converged at evaluation 2 on segment 0 with only 0-2 in memory: the "extension" adds 1 and 2.
    # (c) evaluations 3, 4, 5 all have 0 as head: three times; evaluation 6 adds 1; the end drops it and adds 2-6
    "early": ([1, 1.1, 1.2, *[1.1] * 4], [1, 2, 0, 0, 0, 1, 2, 3, 4, 5, 6], (1, 7, 11)),
    # converged at the last evaluation 6: 2, 3, 4 are in; the end drops the head 1, never used, and adds 2-6
    "end after convergence": ([9, 1.2, 1.1, 1.3, 1.0, 1.1, 1.2], [2, 3, 4, 2, 3, 4, 5, 6], None),
    # evaluation 8 adds 3; the end adds 4 and 5, then 6-8 are all above the rim
    "bad tail": ([9, 8, 7, 1, 1.1, 1.2, 5, 5, 5], [3, 4, 5], None),
    # converged at evaluation 5 on segment 3, rim 1.3 x 7 = 9.1; at evaluation 9 memory is 4-9, all 10: dead.
    # (e) nothing later was added
    "dies at once": ([99, 98, 97, 1, 10, 10, 10, 10, 10, 10], [3], (4, 4, 1)),
    # converged on 3, rim 1.43; evaluations 8, 9, 10 add 3, 4, 5; at 11 memory is 6-11, all above
    "dies": ([9, 8, 7, 1, 1.1, 1.2, *[5] * 6], [3, 4, 5], None),
}


@pytest.mark.parametrize("case", COMPAT)
def test_compat_repeats_the_original_with_its_quirks(case: str) -> None:
    losses, segments, steps = COMPAT[case]
    swad = feed(Swad(compat=True), losses)
    result = swad.result()
    assert result.converged and average(result) == pytest.approx(mean(index + 1 for index in segments))
    if steps:
        assert (result.start_step, result.end_step, result.count) == steps
    assert swad.ended == case.startswith("dies")
    if swad.ended:  # and stays
        swad.update(scalar(1000))
        swad.evaluate(0.1, len(losses) + 1)
        assert swad.result() == result


def test_compat_without_convergence_returns_the_last_segment() -> None:
    result = feed(Swad(compat=True), [9, 8, 7, 6], every=3, trailing=2).result()
    assert not result.converged and "last segment" in result.note
    assert average(result) == mean([8, 9, 10]) and (result.start_step, result.end_step, result.count) == (8, 10, 3)


def test_compat_gives_segments_equal_weight_whatever_their_length() -> None:
    # the first segment is step 1 alone, the others two steps: means 1, 2.5, 4.5, 6.5, 8.5, 10.5, 12.5
    result = feed(Swad(compat=True), [1, 1.1, 1.2, *[1.1] * 4], every=2, first=1).result()
    values = [1, 2.5, 4.5, 6.5, 8.5, 10.5, 12.5]
    assert average(result) == pytest.approx(mean(values[i] for i in (1, 2, 0, 0, 0, 1, 2, 3, 4, 5, 6)))
    assert result.count == 3 * 1 + 8 * 2


# Resume, memory, errors

HISTORIES = {
    "valley": [5, 4, 1, 1.1, 1.2, 1.3, 2, 2, 1, *[3] * 6, 1],
    "extension": [9, 1.2, 1.1, 1.3, 1.0, 1.1, 1.2, *[1.1] * 4],
    "none": [9, 8, 7, math.nan, 5, 4],
    "early": [1, math.inf, 1.2, 1.1, 1.0, 1.0, 0.9, 5],
}


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("losses", HISTORIES.values(), ids=HISTORIES)
def test_resuming_anywhere_equals_going_through(losses: list[float], compat: bool) -> None:
    actions = [
        (step, loss if step % 2 == 0 else None) for step, loss in enumerate(sum(([x, x] for x in losses), []), 1)
    ]
    values = torch.rand(len(actions), 2, generator=torch.Generator().manual_seed(0))

    def run(swad: Swad, part: Sequence[tuple[int, float | None]], between: bool = False) -> Swad:
        for step, loss in part:
            swad.update({"a.weight": values[step - 1, 0], "b/c": values[step - 1]})
            if between:
                swad = resumed(swad)
            if loss is not None:
                swad.evaluate(loss, step)
        return swad

    def resumed(swad: Swad) -> Swad:
        tensors, scalars = swad.state()
        text = json.dumps(scalars, allow_nan=False)
        fresh = Swad(compat=compat)
        fresh.load_state(tensors, json.loads(text))
        return fresh

    whole = run(Swad(compat=compat), actions).result()
    results = [run(resumed(run(Swad(compat=compat), actions[:cut])), actions[cut:]) for cut in range(len(actions))]
    results.append(run(Swad(compat=compat), actions, between=True))  # also between update and evaluate
    for swad in results:
        found = swad.result()
        assert found.average.keys() == whole.average.keys() == {"a.weight", "b/c"}
        assert all(torch.equal(found.average[name], whole.average[name]) for name in whole.average)
        found.average = whole.average
        assert found == whole


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("slope", [-1.0, 1.0, 0.0])
def test_memory_does_not_grow_with_the_run(compat: bool, slope: float) -> None:
    swad = feed(Swad(compat=compat, ratio=1e6), [1000 + slope * i for i in range(200)], every=2)
    assert len(swad.state()[0]) <= 2 * 3 + 6 + 4


def test_misuse_is_explained() -> None:
    swad = Swad()
    with pytest.raises(ValueError, match="before the first evaluation"):
        swad.result()
    with pytest.raises(ValueError, match="update first"):
        swad.evaluate(1.0, 1)
    swad.update(scalar(1))
    with pytest.raises(ValueError, match="came or went: other"):
        swad.update(scalar(1) | {"other": torch.tensor(1.0)})


@pytest.mark.parametrize(
    "wrong",
    [{"n_converge": 0}, {"n_tolerance": 0}, {"ratio": 0.3}, {"ratio": math.nan}, {"n_tolerance": 2, "compat": True}],
)
def test_impossible_rules_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Swad(**wrong)
