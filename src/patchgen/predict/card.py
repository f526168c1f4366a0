"""The model card: what users must know before trusting a model, from the facts in its config.json."""

from importlib.resources import files
from typing import Any

import yaml

from patchgen.draw.overlay import NOTICE
from patchgen.methods import method_class

MARKUP = {ord(sign): f"&#{ord(sign)};" for sign in "<>&`|[]*"}
LICENCES = {"Apache-2.0": "apache-2.0", "MIT": "mit", "CC-BY-NC-4.0": "cc-by-nc-4.0"}  # names that hubs know
SAME = 1e-3  # threshold of the flag, in standard deviations: that of real images is about the root of their features


def card(facts: dict[str, Any]) -> str:
    """The text of README.md: a header that hubs read, then the card, in which names from data are never markup."""
    from jinja2 import Environment, StrictUndefined

    threshold, licence = facts["unlike_threshold"], facts["backbone"]["licence"]
    header = {
        "library_name": "patchgen",
        "pipeline_tag": "image-classification",
        "tags": ["patchgen", "domain-generalization", "image-classification"],
        "license": LICENCES.get(licence, "other"),
        **({} if licence in LICENCES else {"license_name": str(licence)}),
    }
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["code"] = "`{}`".format
    text = files("patchgen.predict").joinpath("card.md").read_text(encoding="utf-8") + "\n"
    return environment.from_string(text).render(
        {"choice": None, "stain": None, **_escaped(facts)},
        header=yaml.safe_dump(header, sort_keys=False),
        identical=threshold is not None and threshold < SAME,
        selects=method_class(facts["settings"]["method"]).pool == "select",
        notice=NOTICE,
        sentence=comparison_sentence,
        listed=lambda names: " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])),
    )


def _escaped(value: Any) -> Any:
    """All texts and names in a value as plain text of Markdown and HTML."""
    if isinstance(value, dict):
        return {_escaped(name): _escaped(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_escaped(member) for member in value)
    return " ".join(value.translate(MARKUP).split()) if isinstance(value, str) else value


def comparison_sentence(comparison: dict[str, Any], images: int) -> str:
    """One comparison of two methods, and whether a difference was shown."""
    verdict = "{method} is better" if comparison["shown"] else "no advantage shown"
    return (
        "{method} against {against}: {points:+.1f} points on average over the left-out sites (right in {better} images "
        "where the other is wrong, wrong in {worse} where it is right, of {images:,}; more than {most:.1f} points are "
        f"needed): {verdict}."
    ).format(images=images, points=100 * comparison["difference"], most=100 * comparison["needed"], **comparison)
