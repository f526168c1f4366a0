"""Balance against loops: who contradicts its context, what that is worth, and what the expert reaches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.balance import Balance, balanced
from patchgen.methods.build import build_model
from patchgen.model.losses import generalized_cross_entropy

LABEL = torch.tensor([0, 2, 2, 1, -1])


def made(method: str = "lp-ln+balance", **more: Any) -> tuple[Balance, Any]:
    config = Config(data="photos", unseen="c", backbone="tiny", image_size=28, method=method, **more)
    found = make_method(config)
    model = build_model(config, found, 3)
    torch.manual_seed(0)
    found.setup(model)
    assert isinstance(found, Balance)
    return found, model


def batch(label: Tensor = LABEL) -> Batch:
    images = torch.randn(len(label), 3, 28, 28, generator=torch.Generator().manual_seed(3))
    return Batch(images, label, torch.zeros_like(label), torch.arange(len(label)))


def test_weights_are_those_of_the_formula() -> None:
    method, model = made()
    label = torch.tensor([0] * 9 + [1, 1, 2] + [-1])
    given = batch(label)
    with torch.no_grad():
        method.expert.weight.mul_(0.1)
        method.expert.bias.copy_(torch.tensor([2.0, 0.0, -1.0]))  # it believes in class 0, so three images contradict
    out = model(given.image)
    belief, p = method.expert(out.context).softmax(1).tolist(), out.logits.softmax(1).tolist()
    c = [1 - row[y] / max(row) for row, y in zip(belief, label.tolist(), strict=True) if y >= 0]
    q, s = sum(c) / len(c), 0.3
    assert 0.1 < q < s
    expected = [1 + x * p[i][label[i]] * (s / q - 1) for i, x in enumerate(c)] + [1.0]
    weight = method.weights(out, given)
    torch.testing.assert_close(weight, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert not weight.requires_grad and max(expected) > 1.1
    torch.testing.assert_close(float(method.contradiction), q, rtol=1e-4, atol=1e-6)
    method.weights(out, given)
    torch.testing.assert_close(float(method.contradiction), q, rtol=1e-4, atol=1e-6)  # of equal batches it stays


def test_contradicting_images_have_their_share_once_their_class_is_read() -> None:
    c, right = torch.tensor([1.0] * 3 + [0.0] * 97), torch.ones(100)
    weight = balanced(c, right, c.mean(), 0.3)
    torch.testing.assert_close(weight[:3].sum() / 100, torch.tensor(0.3))
    assert weight[3:].eq(1).all()
    assert balanced(c, 1 - right, c.mean(), 0.3).eq(1).all()  # hard images: no evidence against the context
    often = torch.tensor([1.0] * 40 + [0.0] * 60)
    assert balanced(often, right, often.mean(), 0.3).eq(1).all()  # they have their share anyway
    assert balanced(torch.zeros(4), right[:4], torch.tensor(0.0), 0.3).isfinite().all()


def test_main_is_the_weighted_mean_over_the_labelled() -> None:
    method, model = made()
    given = batch()
    out = model(given.image)
    losses = method.losses(out, given)
    weight = method.weights(out, given).tolist()
    log_p = out.logits.log_softmax(1).tolist()
    by_hand = -sum(w * row[y] for w, row, y in zip(weight, log_p, LABEL.tolist(), strict=True) if y >= 0) / 4
    assert set(losses) == {"main", "expert"}
    torch.testing.assert_close(float(losses["main"]), by_hand, rtol=1e-4, atol=1e-5)


def test_the_expert_reaches_nothing_but_itself() -> None:
    method, model = made()
    given = batch()
    method.losses(model(given.image), given)["expert"].backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in method.expert.parameters())


@pytest.mark.parametrize("q", [0.1, 0.7, 1.0])
def test_generalised_cross_entropy(q: float) -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(1)
    by_hand = sum((1 - float(p[i, y]) ** q) / q for i, y in enumerate(LABEL.tolist()) if y >= 0) / 4
    torch.testing.assert_close(float(generalized_cross_entropy(logits, LABEL, q)), by_hand, rtol=1e-5, atol=1e-6)


def test_a_share_of_nothing_is_plain_cross_entropy() -> None:
    method, model = made(hparams={"share": 0.0})
    given = batch()
    assert method.weights(model(given.image), given).eq(1).all()


@pytest.mark.parametrize(
    "method", ["lp-ln+balance", "lp+balance", "patchgen+balance", "patchgen-select", "patchgen-attend"]
)
def test_runs_train_and_resume_to_the_same_bytes(
    method: str, tiny_run: Callable[..., Any], tiny_settings: dict[str, Any], tmp_path: Any, monkeypatch: Any
) -> None:
    from patchgen.train.fold import FoldTrainer
    from patchgen.train.lifecycle import train

    whole = tiny_run(method)
    step = FoldTrainer.take_step

    def breaks(self: Any, number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt
        step(self, number)

    config = Config(**{**tiny_settings, "method": method})
    monkeypatch.setattr(FoldTrainer, "take_step", breaks)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, quiet=True)
    monkeypatch.setattr(FoldTrainer, "take_step", step)
    again = train(config, tmp_path, quiet=True)
    for name in ("selected", "swad"):
        assert again.checkpoint(name).read_bytes() == whole.checkpoint(name).read_bytes()
    assert 0 <= whole.records("evaluation")[-1]["train"]["contradiction"] <= 1


def test_unlabelled_images_have_weight_one_in_mdg_gcd(tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("patchgen-select+entropy", task="mdg_gcd", known="circle,cross", swad=False)
    assert run.done and run.records("test")


def test_recomputed_activations_are_refused_for_a_mask_inside_the_backbone(tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="'patchgen-select' reads or changes activations inside the backbone"):
        tiny_run("patchgen-select", checkpoint_activations=True, seed=9)  # a run of its own: a finished one is kept
    plain, again = (tiny_run("lp-ln+balance", checkpoint_activations=on, swad=False) for on in (False, True))
    assert plain.path == again.path  # not a part of the run's name: it changes no number


def test_accumulation_gives_the_labelled_mean(tiny_run: Callable[..., Any]) -> None:
    assert tiny_run("patchgen-select", micro_batch=5, swad=False).done
