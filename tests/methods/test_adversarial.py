"""DANN and CDANN: the domain loss with one sign of its gradient for the network and the other for the features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from patchgen.methods.adversarial import domain_network, positions
from patchgen.model.losses import pseudo_labels

PLACE = torch.tensor([0, 0, 0, 1, 1, 1])  # of the scene's domains among the sources


def test_the_network_and_its_targets() -> None:
    assert positions(torch.tensor([7, 3, 3, 5]), (3, 5, 7)).tolist() == [2, 0, 0, 1]
    layers = [tuple(p.shape) for p in domain_network(10, 4).parameters()]
    assert layers == [(256, 10), (256,), (256, 256), (256,), (4, 256), (4,)]


@pytest.mark.parametrize("name", ["dann", "cdann"])
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_the_network_gets_the_gradient_and_the_features_its_opposite(
    name: str, penalty: float, scene: Callable[..., Any]
) -> None:
    s = scene(name, sources=(0, 2), hparams={"dann": 0.3, "penalty": penalty})
    x = s.forward().features.detach().requires_grad_()
    out = s.forward()._replace(features=x)
    found = s.method.losses(out, s.batch)
    domain = found["L_dann"] + found["L_slope"] if penalty else found["L_dann"]
    own = list(s.method.parameters())
    got = torch.autograd.grad(domain, [x, *own], allow_unused=True)

    # the same without any reversal
    plain, target = x.detach().clone().requires_grad_(), pseudo_labels(out.logits, s.batch.label)
    read = plain + s.method.class_vectors(target) if name == "cdann" else plain * 1
    each = F.cross_entropy(s.method.discriminator(read), PLACE, reduction="none")
    share = [1 / sum(int(t == other) for other in target) / len(set(target.tolist())) for t in target]
    loss = (each * torch.tensor(share)).sum() if name == "cdann" else each.sum() / 6
    if penalty:
        [slope] = torch.autograd.grad(each.sum(), read, create_graph=True)
        loss = loss + penalty * sum(row @ row for row in slope) / 6
    wanted = torch.autograd.grad(loss, [plain, *own], allow_unused=True)

    torch.testing.assert_close(domain, loss)
    torch.testing.assert_close(got[0], -0.3 * wanted[0])
    assert wanted[0].abs().max() > 0
    for mine, theirs in zip(got[1:], wanted[1:], strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs)
