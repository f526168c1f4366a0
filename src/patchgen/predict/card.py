"""The model card: what users must know before trusting a model, from the facts in its config.json."""

from __future__ import annotations

from typing import Any

import yaml

from patchgen.draw.overlay import NOTICE
from patchgen.methods import method_class

# names that hubs know; everything else is "other"
MARKUP = {ord(sign): f"&#{ord(sign)};" for sign in "<>&`|[]*"}
LICENCES = {"Apache-2.0": "apache-2.0", "MIT": "mit", "CC-BY-NC-4.0": "cc-by-nc-4.0"}

QUICK = (
    "\n\n**A quick model**: only the last third of the backbone was tuned, on images without augmentation. A full fit "
    "usually does better at a new site."
)


SAME = 1e-3  # threshold of the flag, in standard deviations: that of real images is about the root of their features


def card(facts: dict[str, Any]) -> str:
    """The text of README.md: a header that hubs read, then the card, in which names from data are never markup."""
    header, facts = _header(facts), _escaped(facts)
    parts = (_title, _use, _expected, _choice, _data, _confidence, _limits, _licence)
    text = "\n\n".join(filter(None, (part(facts) for part in parts)))
    return f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n{text}\n"


def _escaped(value: Any) -> Any:
    """All texts and names in a value as plain text of Markdown and HTML."""
    if isinstance(value, dict):
        return {_escaped(name): _escaped(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(member) for member in value]
    return " ".join(value.translate(MARKUP).split()) if isinstance(value, str) else value


def _header(facts: dict[str, Any]) -> dict[str, Any]:
    licence = facts["backbone"]["licence"]
    header: dict[str, Any] = {
        "library_name": "patchgen",
        "pipeline_tag": "image-classification",
        "tags": ["patchgen", "domain-generalization", "image-classification"],
        "license": LICENCES.get(licence, "other"),
    }
    return header | ({} if licence in LICENCES else {"license_name": str(licence)})


def _title(facts: dict[str, Any]) -> str:
    data, settings = facts["data"], facts["settings"]
    trained = [site for site in data["sites"] if site != data["unseen"]]
    most = "at most " if settings.get("patience") else ""
    return (
        f"# Image classifier: {_list(facts['classes'])}\n\n"
        f"Method `{settings['method']}` on {facts['backbone']['resolved']}, {facts['image_size']} px, "
        f"{most}{settings['steps']} steps, trained on {data['trained_on']} images of {_list(trained)}."
        f"{QUICK if settings.get('tune') == 'upper-layernorm' else ''}"
    )


def _use(facts: dict[str, Any]) -> str:
    explain = '\nmodel.explain("image.png").overlay().save("map.png")' if facts["has_mask"] else ""
    return f"""## Use

```python
from patchgen import PatchGenClassifier

model = PatchGenClassifier.load("this-folder")
model.predict(["image.png"]), model.predict_proba(["image.png"]){explain}
```"""


def _expected(facts: dict[str, Any]) -> str:
    expected, head = facts["expected"], "## What to expect at a new site\n\n"
    if expected is None and len(facts["data"]["sites"]) == 1:
        return head + (
            "Not known, and the accuracy on held-out images below does not tell: all images come from one site, "
            f"{facts['data']['sites'][0]}. Score the model at a second site before use "
            "(`patchgen evaluate`)."
        )
    if expected is None:
        return head + "Not known: no site was left out when this model was made."
    rows = [
        f"| {f['site']} | {f['accuracy']:.3f} | {f['images']} | {f['validation']:.3f} | {', '.join(f['uncovered'])} |"
        for f in facts["folds"]
    ]
    table = "\n".join(
        [
            "| site left out | accuracy there | images | accuracy at its training sites | classes no other site has |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )
    return f"{head}{_sentence(facts)}\n\n{table}"


def _sentence(facts: dict[str, Any]) -> str:
    expected = facts["expected"]
    if facts["data"]["unseen"]:
        return (
            f"Accuracy **{expected['mean']:.3f}** at {facts['data']['unseen']}, which this model never saw. One site "
            "gives no interval: another site may differ by much more than chance."
        )
    if expected["interval"] is None:
        return f"Accuracy **{expected['mean']:.3f}**; a single site gives no interval."
    (a, b), (c, d) = expected["new_site"], expected["interval"]
    return (
        f"Accuracy **{expected['mean']:.3f}** on average; one new site is expected between {a:.3f} and {b:.3f} and the "
        f"mean over many sites between {c:.3f} and {d:.3f} (95 % t-intervals over {len(facts['folds'])} sites, for "
        "sites that differ as these do). Each figure below is of a model trained without that site; the model in this "
        "folder was then trained on all of them and has itself been scored on none."
    )


def comparison_sentence(found: dict[str, Any], images: int) -> str:
    """One comparison of two methods, and whether a difference was shown."""
    verdict = f"{found['method']} is better" if found["shown"] else "no advantage shown"
    return (
        f"{found['method']} against {found['against']}: {100 * found['difference']:+.1f} points on average over the "
        f"left-out sites (right in {found['better']} images where the other is wrong, wrong in {found['worse']} where "
        f"it is right, of {images:,}; more than {100 * found['needed']:.1f} points are needed): {verdict}."
    )


def _choice(facts: dict[str, Any]) -> str:
    """What was compared, and how the estimate accounts for the choice."""
    choice = facts.get("choice")
    if not choice:
        return ""
    methods, sites = list(choice["accuracy"]), list(choice["counted"])
    scores = {site: " | ".join(f"{choice['accuracy'][m][site]:.3f}" for m in methods) for site in sites}
    rows = [f"| {site} | {scores[site]} | {choice['counted'][site]} |" for site in sites]
    table = [f"| site left out | {' | '.join(methods)} | counted above |", "|---|" + "---|" * (len(methods) + 1), *rows]
    own = sum(choice["accuracy"][choice["chosen"]].values()) / len(sites)
    nested = (
        "The expected accuracy above is corrected for this choice: each site counts with the method that the same rule "
        "would choose from the scores at the *other* sites only (last column), so that no site influences the choice "
        "of the method it is scored with. It estimates the accuracy of choosing and training together, and is "
        f"pessimistic with few sites. Without the correction `{choice['chosen']}` has {own:.3f}. (As usual in "
        "leave-one-out, the models scored at the other sites were trained on images of this site.)"
    )
    lines = [comparison_sentence(one, choice["images"]) for one in choice["comparisons"]]
    return "\n".join(
        [
            "## How the method was chosen\n",
            f"{len(methods)} methods were compared, simplest first: {_list([f'`{m}`' for m in methods])}. Each was "
            "trained without each site in turn. A later one is kept only if it is better on the same left-out images "
            "by more than chance (one-sided, 5 % over all comparisons, sites and images both counted).\n",
            *table,
            "",
            *lines,
            f"\nKept: `{choice['chosen']}`. {nested}",
        ]
    )


def _data(facts: dict[str, Any]) -> str:
    data, classes = facts["data"], facts["classes"]
    rows = [f"| {site} | {' | '.join(str(row[c]) for c in classes)} |" for site, row in data["counts"].items()]
    groups = f" {data['groups']} groups (patients, slides) are named." if data["groups"] else ""
    weighted = " Training images were weighted (`sample_weight`)." if data.get("weighted") else ""
    rule = {
        "group": "A group was never on both sides of the split into training and validation.",
        "domainbed": "The split into training and validation was by image"
        + (", so a group may be on both sides." if data["groups"] else "."),
    }
    stain = " The stains of every image are normalised to those of the training images (Macenko), here and in use."
    return "\n".join(
        [
            "## Images\n",
            f"| site | {' | '.join(classes)} |",
            "|---|" + "---|" * len(classes),
            *rows,
            f"\n{rule[data['split']]}{groups}{weighted}{stain if facts.get('stain') else ''}",
        ]
    )


def _confidence(facts: dict[str, Any]) -> str:
    found = facts["calibration"]
    same = facts["unlike_threshold"] is not None and facts["unlike_threshold"] < SAME
    warning = (
        "\n\n**All training images look the same to this model: neither confidence nor the flag means anything.**"
        * same
    )
    return f"""## Confidence

Probabilities are softmax(logits / {facts["temperature"]:.4f}). On the {found["images"]} source validation images that
this temperature was fitted on (accuracy {found["accuracy"]:.3f}) the expected calibration error went from
{found["ece_before"]:.4f} to {found["ece_after"]:.4f}. At a new site, probabilities tend to be overconfident.

`unlike_training` is true for images whose features are farther from every class than {found["quantile"]:.0%} of source
validation. It does not mean that the prediction is wrong, and images without this flag may still be
unusual.{warning}"""


def _limits(facts: dict[str, Any]) -> str:
    if method_class(facts["settings"]["method"]).pool == "select":
        shows = (
            "patches that the classifier reads more than others, not where something is. The classifier reads only "
            "what is bright; the backbone's own mixing remains"
        )
    else:
        shows = "patches that the module weighted up, after attention has mixed all of them, not where something is"
    mask = f"A mask is a {NOTICE}: it shows {shows}.\n" * facts["has_mask"]
    return f"""## Limits

{mask}The classifier knows the classes above and will name one of them for any image. It was made from the images above
and holds, if at all, for images taken in the same way. It is not a medical device and decides nothing by itself."""


def _licence(facts: dict[str, Any]) -> str:
    backbone = facts["backbone"]
    note = f" ({backbone['note']})" if backbone["note"] else ""
    inside = "are in this folder" if backbone["included"] else "are not in this folder and are loaded from their source"
    return f"""## Licence

The backbone's weights, {backbone["resolved"]}{note}, {inside}; their licence: {backbone["licence"]}. The trained part
may be used as far as that licence and the rights to the training images allow."""


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
