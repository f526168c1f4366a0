"""The mixture of a stream run: when and to what it is fitted, and the prompts and pseudo-labels it provides.

Components keep their ids between fits: the first ones are the labelled classes, and those of the last stage come before
the new ones.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from patchgen.ccd.mixture import SphericalMixture, grow
from patchgen.ccd.settings import StreamConfig
from patchgen.runs.tensors import under

GROW_BY = 0.07  # maximum new components per stage and labelled class: the host method's 5 of 70 and 10 of 140


class MixturePool:
    def __init__(self, config: StreamConfig, known: int) -> None:
        self.config, self.known = config, known
        self.mixture: SphericalMixture | None = None  # of this stage, once it is fitted
        self.last: SphericalMixture | None = None  # of the stage before, for replay and as a start
        self.class_means: Tensor | None = None  # (known, D), in the labelled stage

    def due(self, epoch: int) -> bool:
        """Whether a fit is due before this epoch."""
        behind = epoch - self.config.warm_up
        return behind >= 0 and behind % self.config.refit_every == 0

    def refit(self, features: Tensor, stage: int, classes: int) -> dict[str, Any]:
        """Fit the mixture to the features (N, D) of a stage; the facts go into the record."""
        config, count, replay = self.config, classes, None
        if stage and config.components == "half":
            count = classes // 2
        if stage and config.components == "grow" and self.last is not None:
            extra = max(2, round(GROW_BY * self.known))
            count = self.mixture.components if self.mixture is not None else self.last.components + extra
        if self.last is not None and config.replay:  # the same samples in every fit of a stage
            replay = self.last.sample(config.replay, torch.Generator().manual_seed(config.seed * 1_000_003 + stage))
        common: dict[str, Any] = {"replay": replay, "seed": config.seed}
        fitted = self.mixture or self.last
        start = self.class_means if fitted is None else fitted.means
        if start is not None and len(start) > count:
            start = None
        mixture = SphericalMixture.fit(features, count, start=start, tolerance=config.em_tolerance, **common)
        if stage and config.components == "grow":
            mixture = grow(features, mixture, known=self.known, **common)
        self.mixture = mixture.to(features.device)
        prompt_sets = self._likeliest(self.likely(features)).sort(1).values.unique(dim=0)
        return {
            "components": self.mixture.components,
            "log_likelihood": round(self.mixture.log_likelihood(features), 4),
            "prompt_sets": len(prompt_sets),  # 1 would mean that all images get the same prompts
        }

    def next_stage(self) -> None:
        self.last, self.mixture, self.class_means = self.mixture, None, None

    def _likeliest(self, likely: Tensor) -> Tensor:
        return likely.topk(min(self.config.prompts, likely.shape[1]), dim=1).indices

    def likely(self, query: Tensor) -> Tensor:
        """log p(component | x) of prompt-free features, (B, D) -> (B, K), once the mixture is active."""
        assert self.mixture is not None
        return self.mixture.log_responsibilities(query)

    def prompts(self, likely: Tensor) -> Tensor:
        """The means (B, k, D) of each image's most probable components (B, K), the first one first."""
        assert self.mixture is not None
        return self.mixture.means[self._likeliest(likely)]

    def labels(self, likely: Tensor) -> Tensor:
        """Pseudo-labels (2B,) of two views (2B, K): one per image."""
        first, second = likely.chunk(2)
        return ((first + second) / 2).argmax(1).repeat(2)

    def centres(self, stage: int) -> Tensor | None:
        """The centres (K, D) that labels and pseudo-labels refer to."""
        if stage == 0:
            return self.class_means
        return None if self.mixture is None or self.config.pseudo_labels == "none" else self.mixture.means

    def tensors(self) -> dict[str, Tensor]:
        mixtures = {"mixture": self.mixture, "last": self.last}
        tensors = {f"{name}.{k}": v for name, m in mixtures.items() if m is not None for k, v in m.tensors().items()}
        return tensors | ({"class_means": self.class_means} if self.class_means is not None else {})

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the result of `tensors`."""
        for name in ("mixture", "last"):
            saved = under(tensors, f"{name}.")
            setattr(self, name, SphericalMixture(**saved).to(device) if saved else None)  # type: ignore[arg-type]
        self.class_means = tensors["class_means"].to(device) if "class_means" in tensors else None
