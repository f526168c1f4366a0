"""A step trains by every term that it logs, or says which one it cannot train by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from patchgen.data.loaders import Batch
from patchgen.methods import METHODS
from patchgen.methods.patchgen import PatchGenWithoutLosses
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import label_probability


class OnReference(PatchGenWithoutLosses):
    """Would push p(y | z-) down, but reads the logits that are detached."""

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        assert out.complementary_logits is not None
        return super().losses(out, batch) | {"L_rest": label_probability(out.complementary_logits, batch.label)}


class OnComplement(PatchGenWithoutLosses):
    """The same on z- itself."""

    def setup(self, model: Classifier) -> None:
        super().setup(model)
        self.of_model = (model,)  # in a tuple: its weights are not this method's

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        assert out.complementary is not None
        rest = self.of_model[0].head(out.complementary)
        return super().losses(out, batch) | {"L_rest": label_probability(rest, batch.label)}


@pytest.fixture
def train_with(monkeypatch: pytest.MonkeyPatch, tiny_run: Callable[..., Any]) -> Callable[[type], Any]:
    def run(method: type) -> Any:
        monkeypatch.setitem(METHODS, method.__name__, method)
        return tiny_run(method.__name__, steps=3)

    return run


def test_a_term_without_gradient_is_refused_by_its_name(train_with: Callable[[type], Any]) -> None:
    with pytest.raises(ValueError, match=r"'OnReference'.*'L_rest' has no gradient.*complementary"):
        train_with(OnReference)


def test_the_complementary_representation_trains(train_with: Callable[[type], Any]) -> None:
    first, last = train_with(OnComplement).records("evaluation")
    assert last["train"]["L_rest"] != first["train"]["L_rest"]


def test_the_complement_reaches_the_mask(scene: Callable[..., Any]) -> None:
    s = scene("patchgen-no-losses")
    model, _ = s.reached(s.model.head(s.forward().complementary).square().mean())
    assert {"select.qkv.weight", "select.rho"} <= model
