"""The methods: their named and weighted losses, what they only watch, and where their gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import METHODS, make_method
from patchgen.methods.build import build_model
from patchgen.model.classifier import Classifier, Output

LABEL = torch.tensor([0, 2, 2, 1])


def config(**changes: Any) -> Config:
    return Config(data="photos", unseen="site_c", backbone="tiny", image_size=28, **changes)


def batch_of(label: Tensor = LABEL) -> Batch:
    return Batch(torch.empty(0), label, torch.zeros_like(label), torch.arange(len(label)))


def output() -> Output:
    g = torch.Generator().manual_seed(0)
    logits, features, rest = (torch.randn(4, n, generator=g) for n in (3, 5, 3))
    mask = torch.tensor([[0.1, 0.9], [0.2, 0.3], [0.8, 0.7], [0.05, 0.6]])
    return Output(logits.requires_grad_(), features.requires_grad_(), mask.requires_grad_(), rest)


def by_hand(out: Output, tau: float = 0.25) -> dict[str, float]:
    """The unweighted terms, with loops."""
    out = Output(*(part if part is None else part.detach() for part in out))  # type: ignore[arg-type]
    p = [[float(x) for x in row.softmax(0)] for row in out.logits]
    own = [p[i][y] for i, y in enumerate(LABEL.tolist())]
    weak = [float(m) for row in out.mask for m in row if m < tau]  # type: ignore[union-attr]
    unit = [row / row.norm() for row in out.features]
    pairs = {0: [(0, 0)], 1: [(3, 3)], 2: [(i, j) for i in (1, 2) for j in (1, 2)]}
    spread = [1 - sum(float(unit[i] @ unit[j]) for i, j in both) / len(both) for both in pairs.values()]
    return {
        "main": -sum(float(torch.tensor(x).log()) for x in own) / 4,
        "L_ms": sum(weak) / len(weak),
        "L_conf": -sum(own) / 4,
        "L_sim": sum(spread) / 3,
    }


PLAIN = ("lp", "lp-ln", "full", "all-labels")
OWN = ("patchgen", "patchgen-no-losses", "patchgen-true-mask")  # the others are host regularisers, with their own tests


@pytest.mark.parametrize("name", [*PLAIN, *OWN])
def test_losses_have_their_names_and_weights(name: str) -> None:
    c = config(method=name, lambda_ms=0.5, lambda_sim=2.0, lambda_conf=3.0)
    found = make_method(c).losses(output(), batch_of())
    shaped = name in ("patchgen", "patchgen-true-mask")
    weights = {"main": 1.0, "L_ms": 0.5, "L_conf": 3.0, "L_sim": 2.0} if shaped else {"main": 1.0}
    if name == "patchgen-true-mask":
        del weights["L_ms"]  # a mask that is given cannot learn
    assert list(found) == list(weights)
    for term, value in by_hand(output()).items():
        if term in weights:
            assert float(found[term].detach()) == pytest.approx(weights[term] * value, abs=1e-5), term
    total = sum(found.values())
    assert isinstance(total, Tensor) and total.shape == () and total.requires_grad


def test_tau_reaches_the_loss_and_the_watch() -> None:
    method = make_method(config(tau=0.65, lambda_ms=1.0))
    loss = method.losses(output(), batch_of())["L_ms"].detach()
    assert float(loss) == pytest.approx((0.1 + 0.2 + 0.3 + 0.05 + 0.6) / 5)
    assert float(method.watch(output(), batch_of())["weak_share"]) == pytest.approx(5 / 8)


def test_zero_weights_are_the_control() -> None:
    out, zero = output(), config(lambda_ms=0.0, lambda_sim=0.0, lambda_conf=0.0)
    control = make_method(config(method="patchgen-no-losses")).losses(out, batch_of())
    assert sum(make_method(zero).losses(out, batch_of()).values()) == control["main"]


def test_unlabelled_samples_take_their_arg_max_but_not_in_the_main_loss() -> None:
    out, some = output(), torch.tensor([0, 2, -1, -1])
    found = make_method(config()).losses(out, batch_of(some))
    short = Output(out.logits[:2], out.features[:2], out.mask, out.complementary_logits)
    torch.testing.assert_close(found["main"], make_method(config()).losses(short, batch_of(LABEL[:2]))["main"])
    own = torch.where(some < 0, out.logits.argmax(1), some)
    assert not torch.equal(own, LABEL)
    labelled = make_method(config()).losses(out, batch_of(own))
    for name in ("L_conf", "L_sim", "L_ms"):
        torch.testing.assert_close(found[name], labelled[name])


@pytest.mark.parametrize("name", ["patchgen", "patchgen-no-losses"])
def test_what_is_watched_trains_nothing(name: str) -> None:
    out = output()
    rest = out.complementary_logits.clone().requires_grad_()  # type: ignore[union-attr]
    found = make_method(config(method=name)).watch(out._replace(complementary_logits=rest), batch_of())
    assert list(found) == ["complementary_confidence", "L_neg", "weak_share"]
    assert not any(value.requires_grad for value in found.values())
    p = [float(row.softmax(0)[y]) for row, y in zip(rest.detach(), LABEL.tolist(), strict=True)]
    assert float(found["complementary_confidence"]) == pytest.approx(sum(p) / 4, abs=1e-6)
    assert float(found["L_neg"]) == pytest.approx(sum(p) / 4 + by_hand(out)["L_conf"], abs=1e-6)
    assert float(found["weak_share"]) == pytest.approx(3 / 8)


@pytest.mark.parametrize("name", ["lp", "lp-ln", "full"])
def test_plain_methods_watch_nothing(name: str) -> None:
    assert make_method(config(method=name)).watch(output(), batch_of()) == {}


# Gradients


def expected(model: Classifier, tune: str) -> set[str]:
    """Names of the parameters that learn, by the type of their module."""
    learn = {name for name, _ in model.named_parameters() if not name.startswith("backbone.")}
    for where, module in model.backbone.named_modules():
        if tune == "full" or (tune == "layernorm" and isinstance(module, nn.LayerNorm)):
            learn |= {f"backbone.{where}.{name}" for name, _ in module.named_parameters(recurse=False)}
    return {name.replace("backbone..", "backbone.") for name in learn}


@pytest.mark.parametrize(
    ("name", "pool", "tune"),
    [
        ("lp", "cls", "head"),
        ("lp-ln", "cls", "layernorm"),
        ("lp-ln", "mean", "layernorm"),
        ("full", "cls", "full"),
        ("patchgen", "patchgen", "layernorm"),
        ("patchgen", "patchgen", "head"),
        ("patchgen", "patchgen", "full"),
        ("patchgen-no-losses", "patchgen", "layernorm"),
    ],
)
def test_gradients_reach_exactly_the_right_parameters(name: str, pool: Any, tune: Any) -> None:
    settings = config(method=name, pool=pool, tune=tune, lambda_ms=1.0, tau=0.9)
    method = make_method(settings)
    model = build_model(settings, method, 3)
    images = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    out = model(images)
    sum(method.losses(out, batch_of()).values()).backward()  # type: ignore[union-attr]
    wanted = expected(model, tune)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == wanted
    reached = {n for n, p in model.named_parameters() if p.grad is not None}
    assert reached == wanted
    flat = {n for n in reached if not model.get_parameter(n).grad.any()}  # type: ignore[union-attr]
    assert all(n.endswith("key.bias") for n in flat)  # softmax does not see a constant added to all keys


# Choices


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_the_methods_own(name: str) -> None:
    method = make_method(config(method=name))
    frozen = ("lp", "clip", "coop", "duprg", "promptstyler", "dpl", "kadaptation", "kadaptation-moa")
    tuned = ("full", "clipood", "clipceil")
    tune = "head" if name in frozen else "full" if name in tuned else "layernorm"
    masked = name in (*OWN, "patchgen-attend") or name.startswith("ablation-")
    pool = "select" if "-select" in name else "patchgen" if masked else name if name == "patchgen-cls" else "cls"
    assert (method.chosen_pool, method.chosen_tune) == (pool, tune)
    assert METHODS[name].summary


def test_pool_and_tuning_can_be_chosen() -> None:
    method = make_method(config(method="lp-ln", pool="mean", tune="last_block"))
    assert (method.chosen_pool, method.chosen_tune) == ("mean", "last_block")


@pytest.mark.parametrize(("name", "pool"), [("lp", "patchgen"), ("patchgen", "cls"), ("patchgen-no-losses", "mean")])
def test_a_pool_that_does_not_fit_is_refused(name: str, pool: Any) -> None:
    with pytest.raises(ValueError, match=f"pool '{pool}' does not fit method '{name}'"):
        make_method(config(method=name, pool=pool))


@pytest.mark.parametrize(("word", "hint"), [("patchgne", "; did you mean 'patchgen'?"), ("zzz", " (known: lp, lp-ln")])
def test_an_unknown_method_gets_a_suggestion(word: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_method(config(method=word))
    assert f"unknown method {word!r}{hint}" in str(caught.value)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_hyper_parameters_are_not_negative(value: float) -> None:
    with pytest.raises(ValueError, match="miro must be a (non-negative )?number"):
        make_method(config(method="miro", hparams={"miro": value}))


def test_a_hyper_parameter_that_is_not_there_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="method 'gmdg' has no hyper-parameter 'domian'; did you mean 'domain'"):
        make_method(config(method="gmdg", hparams={"domian": 0.1}))


# Several devices


@pytest.mark.parametrize(
    ("method", "hparams"),
    [
        ("lp-ln+gmdg+lreg", {"ortho": 0.1, "shift": 1.0}),
        ("pim", {}),
        ("pim-lreg", {}),
        ("mdsdi", {"meta": 0.0}),
        ("coral", {}),
        ("mmd", {}),
        ("cdann", {"penalty": 0.5}),
        ("mtl", {}),
    ],
)
def test_two_devices_have_the_gradients_of_one(
    method: str, hparams: dict[str, float], two_devices: Callable[..., Any]
) -> None:
    wanted, found = two_devices(method=method, hparams=hparams)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=1e-6)


BOUNDS = [
    (name, parameter, bound)
    for name, method in METHODS.items()
    for parameter, bound in vars(method).get("bounds", {}).items()
]
OUTSIDE = {  # by what the hyper-parameter is
    "sma_start": 1.0, "share": 1.0, "anneal": 1.5, "blend": 0.0, "beta": 0.0, "context": 2.5, "width": 0, "bank": 5,
    "sentence_steps": 0, "decay": 1.0, "ema": 1.0, "mixup_alpha": 0.0, "rules": 0, "rank": 1.5, "meta_test": 1.5,
    "mixstyle": 1.5, "mixstyle_alpha": 0.0, "rsc_features": 1.5, "rsc_samples": 1.5, "styles": 1.5, "style_steps": 0,
    "epochs": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameter", "bound"), BOUNDS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_hyper_parameter_beyond_its_bound_is_refused(name: str, parameter: str, bound: Any) -> None:
    default = METHODS[name].all_defaults()[parameter]
    assert bound.allows(default)
    match = f"hyper-parameter {parameter} must be .*, not {OUTSIDE[parameter]:g}; its default is {default:g}"
    with pytest.raises(ValueError, match=match):
        make_method(config(method=name, hparams={parameter: OUTSIDE[parameter]}))


@pytest.mark.parametrize(("name", "hparams"), [("vrex", {"anneal": 1.5}), ("dann", {"lr_mult": -1.0})])
def test_bounds_of_base_classes_and_those_of_all_others(name: str, hparams: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="hyper-parameter .* must be a (share from 0 to 1|non-negative number), not"):
        make_method(config(method=name, hparams=hparams))
