"""Sentence templates for class names, and words for domains.

spoken("traffic_light")                        # "traffic light"
fill(PHOTO, ["dog", "traffic light"])          # ["a photo of a dog.", "a photo of a traffic light."]
"""

from __future__ import annotations

from collections.abc import Sequence

PHOTO = "a photo of a {}."
STYLE = "a {} style of a"  # PromptStyler: the braces stand for one learned word

# DUPRG's domain words; the empty one leaves "a photo of a ..."
DOMAINS = ("", "photo", "art", "cartoon", "sketch", "clipart", "infograph", "painting", "quickdraw", "real", "product")
MORE_DOMAINS = (
    "realistic", "pixel style", "abstract", "fantasy", "mysterious", "science fiction", "blurry", "geometric", "hazy",
    "mosaic", "doodle", "graffiti", "art nouveau", "expressionism", "cubism", "fauvism", "futurism", "surrealism",
    "minimalism",
)  # fmt: skip
BANKS = {1: DOMAINS[:1], 11: DOMAINS, 30: (*DOMAINS, *MORE_DOMAINS)}  # by their number of words

# The eighty templates that CLIP's authors published for ImageNet
_PHOTOS = (
    "a bad photo of a", "a photo of many", "a photo of the hard to see", "a low resolution photo of the",
    "a bad photo of the", "a cropped photo of the", "a photo of a hard to see", "a bright photo of a",
    "a photo of a clean", "a photo of a dirty", "a dark photo of the", "a photo of my", "a photo of the cool",
    "a close-up photo of a", "a black and white photo of the", "a pixelated photo of the", "a bright photo of the",
    "a cropped photo of a", "a photo of the dirty", "a jpeg corrupted photo of a", "a blurry photo of the",
    "a photo of the", "a good photo of the", "a photo of one", "a close-up photo of the", "a photo of a",
    "a low resolution photo of a", "a photo of the clean", "a photo of a large", "a photo of a nice",
    "a photo of a weird", "a blurry photo of a", "a pixelated photo of a", "a jpeg corrupted photo of the",
    "a good photo of a", "a photo of the nice", "a photo of the small", "a photo of the weird",
    "a photo of the large", "a black and white photo of a", "a dark photo of a", "a photo of a cool",
    "a photo of a small",
)  # fmt: skip
_WORKS = (
    "a sculpture of a", "a rendering of a", "graffiti of a", "a tattoo of a", "a drawing of a", "a doodle of a",
    "a painting of a", "a sketch of a", "a origami", "a rendition of a", "a sculpture of the", "a rendering of the",
    "graffiti of the", "a tattoo of the", "a drawing of the", "a doodle of the", "a painting of the",
    "a sketch of the", "the origami", "a rendition of the", "the embroidered", "a embroidered", "a plushie", "art of a",
    "art of the", "a cartoon", "the cartoon", "the plushie", "the plastic", "a plastic", "a toy", "the toy",
)  # fmt: skip
IMAGENET = (
    *(f"{words} {{}}." for words in (*_PHOTOS, *_WORKS)),
    "the {} in a video game.", "a {} in a video game.", "itap of a {}.", "itap of my {}.", "itap of the {}.",
)  # fmt: skip


def spoken(name: str) -> str:
    """A class name in words: `_` becomes a space."""
    return name.replace("_", " ")


def fill(template: str, names: Sequence[str]) -> list[str]:
    """One sentence per name."""
    return [template.format(name) for name in names]


def in_domain(domain: str, name: str) -> str:
    """DUPRG's sentence: "a sketch photo of a dog"."""
    return f"a {domain} photo of a {name}" if domain else f"a photo of a {name}"
