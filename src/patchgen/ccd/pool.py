"""The mixture of a stream run: when and to what it is fitted, and the prompts and pseudo-labels it provides.

Each stage begins with a warm-up without the mixture. After that it is fitted every few epochs to the features of the
stage's images and to replay, features sampled from the last stage's mixture. Components keep their ids between fits:
the first ones are the labelled classes, and those of the last stage come before the new ones.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from patchgen.ccd.grow import grow
from patchgen.ccd.mixture import SphericalMixture
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
        mixture = SphericalMixture.fit(
            features, count, start=self._start(count), tolerance=config.em_tolerance, **common
        )
        if stage and config.components == "grow":
            mixture = grow(features, mixture, known=self.known, **common)
        self.mixture = mixture.to(features.device)
        prompt_sets = self.mixture.nearest(features, self._prompt_count(self.mixture)).sort(1).values.unique(dim=0)
        return {
            "components": self.mixture.components,
            "log_likelihood": round(self.mixture.log_likelihood(features), 4),
            "prompt_sets": len(prompt_sets),  # 1 would mean that all images get the same prompts
        }

    def _start(self, count: int) -> Tensor | None:
        """Initial means: the last fit's, the last stage's, or the labelled classes'; None if they are too many."""
        fitted = self.mixture or self.last
        means = self.class_means if fitted is None else fitted.means
        return means if means is not None and len(means) <= count else None

    def next_stage(self) -> None:
        self.last, self.mixture, self.class_means = self.mixture, None, None

    def _prompt_count(self, mixture: SphericalMixture) -> int:
        return min(self.config.prompts, mixture.components)

    def likely(self, query: Tensor) -> Tensor:
        """log p(component | x) of prompt-free features, (B, D) -> (B, K), once the mixture is active.

        Non-finite values show up in the losses: a check here would synchronise the device at every step.
        """
        assert self.mixture is not None
        return self.mixture.log_responsibilities(query, check=False)

    def prompts(self, likely: Tensor) -> Tensor:
        """The means (B, k, D) of each image's most probable components (B, K), the first one first."""
        assert self.mixture is not None
        return self.mixture.means[likely.topk(self._prompt_count(self.mixture), dim=1).indices]

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
