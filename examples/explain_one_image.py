"""Why this class? The selection map of one image, and whether the patches it names matter.

python examples/explain_one_image.py photos-model a.jpg --out map.png
"""

import numpy as np
import tyro

from patchgen import load_predictor


def main(model: tyro.conf.Positional[str], image: tyro.conf.Positional[str], out: str = "map.png") -> None:
    """Write the map of IMAGE, and take away the patches it selects.

    Args:
        model: Model folder of `patchgen fit`, or run folder of `patchgen train`; its method must have a mask.
        image: The image file.
        out: The picture to write.
    """
    predictor = load_predictor(model)
    found = predictor.explain(image)  # .image (S, S, 3) uint8, .mask (h, w) in 0..1, .top classes
    found.overlay(threshold=0.5).save(out)
    label, confidence = found.top[0]
    print(f"{label} {confidence:.3f}; the mask has mean {found.mask.mean():.2f}, spread {found.mask.std():.3f}")
    if (found.mask >= 0.5).all() or (found.mask < 0.5).all():
        print("it selects all patches or none: there is no choice to read in it")

    # The half of the patches with the highest mask, the half with the lowest, and a random half.
    column = predictor.classes.index(label)
    ranks = found.mask.ravel().argsort().argsort().reshape(found.mask.shape)
    shuffled = np.random.default_rng(1).permutation(ranks.ravel()).reshape(ranks.shape)
    half = ranks.size // 2
    for name, away in {"highest": ranks >= half, "lowest": ranks < half, "random": shuffled < half}.items():
        [scores] = predictor.score([without(found.image, away)])
        print(f"without the {name} half of the patches: {label} {scores.probabilities[column]:.3f}")
    print("a selection map, not an annotation")


def without(image: np.ndarray, away: np.ndarray) -> np.ndarray:
    """The image (S, S, 3) with its mean colour in the place of the patches `away` (h, w) bool."""
    rows = np.arange(image.shape[0]) * away.shape[0] // image.shape[0]
    columns = np.arange(image.shape[1]) * away.shape[1] // image.shape[1]
    pixels = away[rows][:, columns, None]  # (S, S, 1)
    return np.where(pixels, image.mean((0, 1)).round().astype(np.uint8), image)


if __name__ == "__main__":
    tyro.cli(main)
