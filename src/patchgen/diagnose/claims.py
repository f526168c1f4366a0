"""The paper's five claims about patch selection, each compared with the measurements of a run.

Verdicts are `yes`, `partly`, `no`, `not tested`, each with a sentence that gives the numbers. "Clear" is a difference
over the same images of more than two standard errors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from patchgen.common.text import plus_minus
from patchgen.diagnose.cost import of_module
from patchgen.diagnose.faithfulness import OPERATORS, area
from patchgen.diagnose.measure import Record, paired

SMALLEST = 0.02  # difference of silhouettes, or of domain accuracies, that counts: one run of each has no error bar
FEWEST = 10  # images with some patches selected and some not, below which a selection is not tested
STATED = {
    "A": "Keeping the selected patches preserves accuracy; perturbing them destroys it.",
    "B": "The mask's insertion AUC is higher and its deletion AUC lower than those of other rankings.",
    "C": "Classes are tighter and domains less apart than in the baseline's features.",
    "D": "The maps cover the patches that carry the label.",
    "E": "About 4 % more parameters, about 8 % more time, comparable memory.",
}
Verdict = tuple[str, str]  # and what was measured


def claims(diagnosis: Mapping[str, Any], records: Mapping[str, Sequence[Record]], main: str) -> list[dict[str, str]]:
    """Part, claim, verdict and what was measured, of the run `main`; `records` has each run's images."""
    runs = diagnosis["runs"]
    baseline = next((name for name, run in runs.items() if name != main and run["mask"] is None), None)
    verdicts = {
        "A": _perturbation(runs[main], records[main]),
        "B": _curves(runs, records[main], main, baseline),
        "C": _geometry(runs, main, baseline),
        "D": _maps(runs, main, baseline),
        "E": _cost(diagnosis["cost"]),
    }
    accuracy, chance = runs[main]["accuracy"], 1 / diagnosis["classes"]
    if accuracy["mean"] - 2 * accuracy["error"] <= chance:  # a mask cannot explain guesses
        reason = (
            f"The accuracy on these images, {accuracy['mean']:.1%} ± {accuracy['error']:.1%}, is no better than chance "
            f"({chance:.1%}): there is no decision to explain."
        )
        verdicts |= {part: ("not tested", reason) for part in "ABCD" if verdicts[part][0] != "not tested"}
    return [
        {"part": part, "claim": STATED[part], "verdict": verdict, "measured": measured}
        for part, (verdict, measured) in verdicts.items()
    ]


def _of_two(first: bool, second: bool) -> str:
    return "yes" if first and second else "partly" if first or second else "no"


def _perturbation(run: Mapping[str, Any], records: Sequence[Record]) -> Verdict:
    if run["mask"] is None or "mask" not in run["curves"]:
        return "not tested", "This run has no mask, or its ranking was left out."
    # otherwise the two sets are "everything" and "nothing"
    selective = [r for r in records if 0 < r["selected"] < 1]
    count, images = len(selective), len(records)
    if count < FEWEST:
        few = f"{count} images have some patches selected and some not; a test needs {FEWEST}"
        return "not tested", f"The mask is {run['mask']['verdict']}. Here {few}."
    operators = [name for name in run["perturbation"] if name in OPERATORS]

    def right(record: Record, ranking: str, side: str) -> float:
        return sum(record["perturbation"][op][ranking][side]["correct"] for op in operators) / len(operators)

    def difference(side: str, other: str | None = None) -> Record:
        with_mask = [right(r, "mask", side) for r in selective]
        return paired(with_mask, [right(r, other, side) if other else r["correct"] for r in selective])

    keep, lose = difference("keep"), difference("perturb")
    where = "" if count == images else f" on the {count} of {images} images with a selection"
    text = f"Accuracy{where} changes by {_points(keep)} when the rest is perturbed"
    text += f", by {_points(lose)} when the selection is"
    # "small" against "sharp": at most half of the other drop
    sufficient, needed = keep["mean"] >= lose["mean"] / 2, lose["mean"] < 0 and lose["clear"]
    if "random" in run["curves"]:
        above, below = difference("keep", "random"), difference("perturb", "random")
        text += f"; against random sets of the same size {_points(above)} and {_points(below)}"
        sufficient &= above["mean"] > 0 and above["clear"]
        needed &= below["mean"] < 0 and below["clear"]
    return _of_two(sufficient, needed), f"{text} (mean over {', '.join(operators)})."


def _points(difference: Mapping[str, Any]) -> str:
    return f"{plus_minus(100 * difference['mean'], 100 * difference['error'], sign='+')} points"


def _curves(runs: Mapping[str, Any], records: Sequence[Record], main: str, baseline: str | None) -> Verdict:
    curves, patches = runs[main]["curves"], runs[main]["patches"]
    rivals = [name for name in curves if name not in ("mask", "truth")]
    if "mask" not in curves or not rivals:
        return "not tested", "There is no mask, or no other ranking to compare it with."
    wins, parts = [], []
    for way, sign in (("insertion", 1), ("deletion", -1)):
        best = max(rivals, key=lambda name: sign * curves[name][f"{way}_auc"]["predicted"]["mean"])
        mask, other = (
            [float(area(r["curves"][name][way]["predicted"], patches)) for r in records] for name in ("mask", best)
        )
        difference = paired(mask, other)
        wins.append(sign * difference["mean"] > 0 and difference["clear"])
        gap = plus_minus(difference["mean"], difference["error"], 3, "+")
        mean = curves["mask"][f"{way}_auc"]["predicted"]["mean"]
        parts.append(f"{way} AUC {mean:.3f}, {gap} to the best other ranking ({best})")
    if baseline and "attention" in runs[baseline]["curves"]:
        curve = runs[baseline]["curves"]["attention"]
        inserted, deleted = (curve[f"{way}_auc"]["predicted"]["mean"] for way in ("insertion", "deletion"))
        parts.append(f"{baseline} by its own attention: {inserted:.3f} and {deleted:.3f}")
    text = "; ".join(parts)
    return _of_two(*wins), f"{text[0].upper()}{text[1:]}."


def _geometry(runs: Mapping[str, Any], main: str, baseline: str | None) -> Verdict:
    if baseline is None:
        return "not tested", "Needs a baseline: --against its run."
    numbers = [runs[name]["geometry"] for name in (main, baseline)]
    tight = [g["silhouette_by_class"] for g in numbers]
    apart = [g["domain_separability"] and g["domain_separability"]["accuracy"] for g in numbers]
    if None in tight or None in apart:
        return "not tested", "Too few images for the numbers."
    text = (
        f"Silhouette by class {tight[0]:.3f} against {tight[1]:.3f} of {baseline}; domains told apart by a linear "
        f"classifier {apart[0]:.1%} against {apart[1]:.1%}. One run of each has no error bar: differences of at most "
        f"{SMALLEST} count as none."
    )
    return _of_two(tight[0] - tight[1] > SMALLEST, apart[1] - apart[0] > SMALLEST), text


def _maps(runs: Mapping[str, Any], main: str, baseline: str | None) -> Verdict:
    known = runs[main]["auroc"]
    if known is None or "mask" not in known or known["mask"] is None:
        return "not tested", "No truth is known here: the maps must be looked at, and nobody has annotated them."
    rivals = {"its own attention": known.get("attention")}
    if baseline:
        rivals[f"the attention of {baseline}"] = runs[baseline]["auroc"].get("attention")
    rivals = {name: value for name, value in rivals.items() if value}
    mask = known["mask"]
    text = f"AUROC of the mask for the true patches {mask['mean']:.3f}"
    text += "".join(f", of {name} {value['mean']:.3f}" for name, value in rivals.items())
    if "auroc" in runs[main].get("untrained", {}):
        text += f", of the untrained mask {runs[main]['untrained']['auroc']:.3f} on all unseen images"
    above_chance = mask["mean"] - 2 * mask["error"] > 0.5
    return _of_two(above_chance, all(mask["mean"] > value["mean"] for value in rivals.values())), f"{text}."


def _cost(cost: Mapping[str, Any]) -> Verdict:
    module = of_module(cost)
    more, flops, peak = module["module_of_backbone"], module["ratio"]["flops"], module["ratio"]["peak_bytes"]
    text = f"{more:.1%} of the backbone's parameters more, arithmetic of a step x {flops:.2f}, peak memory x {peak:.2f}"
    return _of_two(more <= 0.05, flops <= 1.1 and peak <= 1.1), f"{text}, counted: a step is not timed here."
