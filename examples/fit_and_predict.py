"""From folders `site/class/*.jpg` to a model folder, what to expect at a new site, and predictions.

python examples/fit_and_predict.py $PATCHGEN_DATA/photos $PATCHGEN_DATA/new-images --out photos-model
"""

from pathlib import Path

import tyro

from patchgen import PatchGenClassifier
from patchgen.predict.predictor import Unreadable


def main(
    data: tyro.conf.Positional[str],
    images: tyro.conf.Positional[str],
    out: str = "photos-model",
    runs: str = "runs",
    backbone: str = "auto",
    image_size: int = 112,
    steps: int = 151,
) -> None:
    """Fit on DATA, predict the images of a folder.

    Args:
        data: Folder `site/class/*.jpg`, at least two classes, and two sites for an estimate.
        images: Folder of images to predict.
        out: The model folder to write.
        runs: Folder of the trainings; a stopped fit resumes from there.
        backbone: Pretrained weights: a name, a folder or a .safetensors file.
        image_size: Pixels of the squares that the model reads.
        steps: Optimiser steps of each training.
    """
    model = PatchGenClassifier(backbone=backbone, image_size=image_size, steps=steps, runs=runs).fit(data)
    print("expected accuracy at a new site:", model.expected_accuracy_)
    model.save(out)

    model = PatchGenClassifier.load(out)  # as somebody would on another machine
    for found in model.predictor.predict(sorted(Path(images).glob("*.*"))):  # one batch in memory at a time
        if isinstance(found, Unreadable):
            print(f"{found.path}\tunreadable: {found.reason}")
            continue
        odd = "\tunlike anything in training" if found.unlike_training else ""
        print(f"{found.path}\t{found.label}\t{found.confidence:.2f}{odd}")


if __name__ == "__main__":
    tyro.cli(main)
