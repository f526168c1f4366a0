"""Images that are arrays already: pixels, classes, sites and patients go in, a fitted classifier comes out.

python examples/own_arrays.py
"""

import numpy as np
import tyro

from patchgen import PatchGenClassifier


def draw(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Stripes that lie or stand, from three sites with light of their own; four images per patient."""
    rng = np.random.default_rng(seed)
    sites = np.array(["lyon", "oslo", "turin"])[np.arange(count) % 3]
    labels = np.array(["lying", "standing"])[np.arange(count) // 3 % 2]
    patients = np.array([f"{site}-{i // 12}" for i, site in enumerate(sites)])
    light = {"lyon": (255, 220, 200), "oslo": (200, 220, 255), "turin": (220, 255, 210)}
    images = np.empty((count, 64, 64, 3), np.uint8)
    for i in range(count):
        wave = np.sin(np.arange(64) * rng.uniform(0.4, 0.8) + rng.uniform(0, 6)) * 0.4 + 0.5  # (64,)
        plane = np.tile(wave, (64, 1)) if labels[i] == "standing" else np.tile(wave[:, None], (1, 64))
        noise = rng.normal(0, 0.08, (64, 64))
        images[i] = np.clip((plane + noise)[..., None] * light[sites[i]], 0, 255)
    return images, labels, sites, patients


def main(count: int = 240, runs: str = "runs", backbone: str = "auto", image_size: int = 56, steps: int = 61) -> None:
    """Fit on generated arrays, leaving each site out in turn, and score further images.

    Args:
        count: How many images are drawn.
        runs: Folder of the trainings.
        backbone: Pretrained weights: a name, a folder or a .safetensors file.
        image_size: Pixels of the squares that the model reads.
        steps: Optimiser steps of each training.
    """
    images, labels, sites, patients = draw(count)
    model = PatchGenClassifier(backbone=backbone, image_size=image_size, steps=steps, runs=runs, split="group")
    model.fit(images, labels, domains=sites, groups=patients)  # a patient is never on both sides of a split
    print("expected accuracy at a new site:", model.expected_accuracy_)

    more, answers, _, _ = draw(24, seed=2)
    print("classes:", *model.classes_)
    print("probabilities of the first:", model.predict_proba(more[:1]).round(3))
    print("accuracy on further images of these sites:", model.score(more, answers))


if __name__ == "__main__":
    tyro.cli(main)
