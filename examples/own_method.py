"""A method of your own in a few lines: one named term beside those of another, trained and scored like any other.

python examples/own_method.py $PATCHGEN_DATA/photos --unseen studio
"""

import tyro
from torch import Tensor

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import METHODS, Method
from patchgen.methods.presets import preset_settings
from patchgen.model.classifier import Output
from patchgen.train.lifecycle import train


class SmallLogits(Method):
    """L_small: logits stay small, so that no image is fitted beyond need."""

    summary = "mean square of the logits"
    addable = True  # may be added with a "+"
    defaults = {"small": 0.01}  # --hparams small 0.1

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        penalty = out.logits.square().mean()  # logits (B, C)
        return super().losses(out, batch) | {"L_small": self.hparams["small"] * penalty}


METHODS["small-logits"] = SmallLogits


def main(
    data: tyro.conf.Positional[str],
    unseen: str,
    out: str = "runs",
    backbone: str = "auto",
    image_size: int = 112,
    steps: int = 151,
) -> None:
    """Compare PatchGen with and without the term: same data, steps, seed and splits."""
    for method in ("patchgen", "patchgen+small-logits"):
        given = {"backbone": backbone, "image_size": image_size, "steps": steps}
        run = train(
            Config(**{**preset_settings("small", method), **given}, data=data, unseen=unseen, method=method), out
        )
        losses = run.records("evaluation")[-1]["train"]  # the named terms, averaged since the evaluation before
        [test] = run.records("test")
        print(f"{method}: {test['all']['accuracy']:.3f} on {unseen};", {k: round(v, 4) for k, v in losses.items()})


if __name__ == "__main__":
    tyro.cli(main)
