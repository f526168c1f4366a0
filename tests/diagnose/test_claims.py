"""Verdicts on records written by hand, and the names of masks that choose nothing."""

from typing import Any

import pytest

from patchgen.diagnose.claims import claims
from patchgen.diagnose.measure import mask_verdict, mean_and_error, paired, summarise

RATIO = {"flops": 1.06, "peak_bytes": 1.02}
COST = {"methods": {"patchgen": {"module_of_backbone": 0.04, "ratio": RATIO}}}


def image(
    kept: bool, perturbed: bool, mask_insertion: float, selected: float = 0.5, mask: bool = True
) -> dict[str, Any]:
    """A record of a right answer: the mask's selection as given, the random one harmless both ways."""

    def answer(correct: bool) -> dict[str, Any]:
        return {"true": 0.9 * correct, "predicted": 0.9 * correct, "correct": correct}

    def curve(height: float) -> dict[str, Any]:
        rising = {which: [0.0, height, 1.0] for which in ("true", "predicted")}
        falling = {which: [1.0, 1 - height, 0.0] for which in ("true", "predicted")}
        return {"insertion": rising, "deletion": falling}

    names = {"mask": mask_insertion, "random": 0.5} if mask else {"random": 0.5, "attention": 0.6}
    sides = {"mask": (kept, perturbed), "random": (False, True), "attention": (False, True)}
    blur = {name: dict(zip(("keep", "perturb"), map(answer, sides[name]), strict=True)) for name in names}
    return {
        "correct": True,
        "selected": selected,
        **({"mask": {"min": 0.1, "mean": 0.5, "max": 0.9}} if mask else {}),
        "perturbation": {"blur": {"nothing": answer(True), "everything": answer(False), **blur}},
        "curves": {name: curve(height) for name, height in names.items()},
    }


def verdicts(records: list[dict[str, Any]], **more: Any) -> dict[str, str]:
    runs = {"patchgen": {**summarise(records, 4), "geometry": GEOMETRY[0]}, **more}
    found = claims({"runs": runs, "cost": COST, "classes": 4}, {"patchgen": records}, "patchgen")
    assert [claim["part"] for claim in found] == list("ABCDE") and all(c["measured"].endswith(".") for c in found)
    return {claim["part"]: claim["verdict"] for claim in found}


GEOMETRY = [
    {"silhouette_by_class": tight, "domain_separability": {"accuracy": apart, "chance": 0.25}}
    for tight, apart in ((0.5, 0.6), (0.3, 0.9))
]


def baseline(geometry: dict[str, Any]) -> dict[str, Any]:
    return {"lp-ln": {**summarise([image(True, True, 0, mask=False)] * 4, 4), "geometry": geometry}}


NEAR = {"silhouette_by_class": 0.499, "domain_separability": {"accuracy": 0.61, "chance": 0.25}}


@pytest.mark.parametrize(("record", "more", "wanted"), [
    (image(True, False, 0.9), {}, {"A": "yes", "B": "yes", "C": "not tested", "D": "not tested", "E": "yes"}),
    (image(False, True, 0.4), {}, {"A": "no", "B": "no"}),  # no better than the random ranking
    (image(True, True, 0.9), {}, {"A": "partly"}),  # sufficient, not needed
    (image(True, False, 0.9, selected=1.0), {}, {"A": "not tested"}),  # a constant mask
    (image(True, True, 0, mask=False), {}, {"A": "not tested", "B": "not tested"}),
    (image(True, False, 0.9), baseline(GEOMETRY[1]), {"C": "yes"}),
    (image(True, False, 0.9), baseline(NEAR), {"C": "no"}),  # a small difference is none
])  # fmt: skip
def test_verdicts(record: dict[str, Any], more: dict[str, Any], wanted: dict[str, str]) -> None:
    assert verdicts([record] * 10, **more).items() >= wanted.items()


def test_only_images_with_a_partial_selection_count() -> None:
    some, all_or_none = [image(True, False, 0.9)] * 10, [image(False, True, 0.9, selected=1.0)] * 30
    assert verdicts(some + all_or_none)["A"] == "yes"
    assert verdicts(some[:9] + all_or_none)["A"] == "not tested"


def test_a_classifier_at_chance_is_not_explained() -> None:
    wrong = {**image(True, False, 0.9), "correct": False}
    by_part = verdicts([image(True, False, 0.9)] * 2 + [wrong] * 6, **baseline(GEOMETRY[1]))  # 1 in 4 is chance
    assert by_part == {**dict.fromkeys("ABCD", "not tested"), "E": "yes"}


@pytest.mark.parametrize(
    ("full", "empty", "says"),
    [(10, 0, "all 1"), (0, 10, "all 0"), (6, 1, "mostly constant"), (1, 0, "selective, but"), (0, 0, "selective:")],
)
def test_constant_masks_are_named(full: int, empty: int, says: str) -> None:
    assert mask_verdict(full, empty, 10).startswith(says)


def test_means_and_differences_by_hand() -> None:
    assert mean_and_error([1.0, None, 3.0]) == {"mean": 2.0, "error": pytest.approx(1.0)}  # sd sqrt(2) / sqrt(2)
    assert mean_and_error([None]) is None
    same = paired([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])
    assert same == {"mean": 1.0, "error": 0.0, "clear": True}
    assert not paired([1.0, 0.0], [0.0, 1.0])["clear"]
