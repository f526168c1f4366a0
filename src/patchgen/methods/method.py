"""The contract: what a method decides and what it may see."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.model.classifier import Output
from patchgen.model.losses import cross_entropy


class Method:
    """What a method decides: the pool its head reads, the tuning mode of the backbone, and its losses."""

    pool: ClassVar[str] = "cls"
    tune: ClassVar[str] = "layernorm"
    mask: ClassVar[str] = "learned"  # or "true": the known predictive patches take the mask's place
    summary: ClassVar[str] = ""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.chosen_pool = config.pool or self.pool
        self.chosen_tune = config.tune or self.tune
        if (self.chosen_pool == "patchgen") != (self.pool == "patchgen"):
            raise ValueError(
                f"pool {self.chosen_pool!r} does not fit method {config.method!r}: "
                "the mask belongs to the patchgen methods, cls and mean to the others"
            )

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        """Named terms, already weighted: their sum is what the step minimises."""
        return {"main": cross_entropy(out.logits, batch.label)}

    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        """Named values to log beside the losses; nothing is trained by them."""
        return {}
