"""The methods: their named and weighted losses, where their gradients go, and what they refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import ALIASES, METHODS, make_method, method_class
from patchgen.methods.build import build_model, build_on
from patchgen.methods.method import BELOW_ONE, COUNT, POSITIVE, SHARE
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import class_similarity, label_probability, mask_suppression, selected_confidence
from patchgen.train.loop import Step, make_optimizer

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


OWN = ("patchgen", "patchgen-no-losses", "patchgen-true-mask")  # the others are host regularisers, with their own tests


@pytest.mark.parametrize("name", ["lp", "lp-ln", "full", "all-labels", *OWN])
def test_losses_have_their_names_and_weights(name: str) -> None:
    out, c = output(), config(method=name, lambda_ms=0.5, lambda_sim=2.0, lambda_conf=3.0)
    wanted = {"main": nn.functional.cross_entropy(out.logits, LABEL)}
    if name == "patchgen":
        wanted["L_ms"] = 0.5 * mask_suppression(out.selection(), 0.25)  # not of a given mask, which cannot learn
    if name in ("patchgen", "patchgen-true-mask"):
        wanted["L_conf"] = 3 * selected_confidence(out.logits, LABEL)
        wanted["L_sim"] = 2 * class_similarity(out.features, LABEL)
    losses = make_method(c).losses(out, batch_of())
    assert list(losses) == list(wanted) and losses["main"].requires_grad
    for term, value in wanted.items():
        torch.testing.assert_close(losses[term], value)


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
    p, q = (logits.detach().softmax(1)[range(4), LABEL].mean() for logits in (rest, out.logits))
    torch.testing.assert_close(found["complementary_confidence"], p)
    torch.testing.assert_close(found["L_neg"], p - q)
    assert float(found["weak_share"]) == pytest.approx(3 / 8)


# Gradients


def expected(model: Classifier, tune: str) -> set[str]:
    """Names of the parameters that learn, by the type of their module."""
    learn = {name for name, _ in model.named_parameters() if not name.startswith("backbone.")}
    for where, module in model.backbone.named_modules():
        if tune == "full" or (tune == "layernorm" and isinstance(module, nn.LayerNorm)):
            learn |= {f"backbone.{where}.{name}" for name, _ in module.named_parameters(recurse=False)}
    return {name.replace("backbone..", "backbone.") for name in learn}


@pytest.mark.parametrize(("name", "pool", "tune"), [
    ("lp", "cls", "head"), ("lp-ln", "cls", "layernorm"), ("lp-ln", "mean", "layernorm"), ("full", "cls", "full"),
    ("patchgen", "patchgen", "layernorm"), ("patchgen", "patchgen", "head"), ("patchgen", "patchgen", "full"),
    ("patchgen-no-losses", "patchgen", "layernorm"),
])  # fmt: skip
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


TERMS = {  # what a gradient reaches, `own` for the method's modules: method, term, the hyper-parameter that weights it
    "backbone": [
        "coral L_coral coral", "mmd L_mmd mmd", "gmdg L_shift shift", "domain-moments L_moments moments",
        "lreg L_ortho ortho", "sagnet L_adv sagnet", "kadaptation-moa L_balance balance",
    ],
    "head": ["mdsdi L_meta meta"],
    "backbone head": [
        "rsc main", "mixstyle main", "groupdro main", "mixup main", "sma main", "gestur main", "sagnet main",
        "arm main", "lreg L_reg lreg", "pim L_pim pim", "pim L_marginal marginal", "entropy L_marginal marginal",
        "irm L_irm irm", "pim-lreg L_pseudo confidence", "mdsdi L_covariance covariance",
    ],
    "backbone select": ["patchgen+coral L_coral coral"],
    "backbone select head": [
        *(f"ablation-{row} main" for row in ("static", "channel", "attention", "attention-ms")),
        "patchgen+lreg L_reg lreg", "patchgen+vrex L_vrex vrex",
    ],
    "backbone own.variances": ["miro L_miro miro", "patchgen+miro L_miro miro", "gmdg L_miro miro"],
    "backbone own.discriminator": ["dann L_dann", "dann L_slope penalty"],
    "backbone select own.discriminator own.class_vectors": ["patchgen+cdann L_dann"],
    "backbone head own.shift": ["mtl main"],
    "backbone head own.projector": ["selfreg L_selfreg"],
    "backbone head own.adversary": ["mdsdi L_invariant"],
    "backbone head own.recogniser": ["mdsdi L_specific specific"],
    "own.expert": ["balance expert"],
    "own.embedding": ["gmdg L_label"],
    "own.predictor": ["pim-lreg L_error"],
    "own.style": ["sagnet L_style"],
}  # fmt: skip


@pytest.mark.parametrize(("row", "wanted"), [(row, wanted) for wanted, rows in TERMS.items() for row in rows])
def test_what_a_term_reaches_and_what_weights_it(row: str, wanted: str, scene: Callable[..., Any]) -> None:
    name, term, weight = (row + " ").split(" ")[:3]

    def value(**hparams: float) -> tuple[Any, Tensor]:
        fixed = {"rules": 16.0} if "kadaptation" in name else {"anneal": 0.0} if weight in ("irm", "vrex") else {}
        s = scene(name, sources=(0, 2), hparams=fixed | hparams)
        s.move()
        torch.manual_seed(1)
        return s, s.method.losses(s.forward(), s.batch)[term]

    s, loss = value(**({weight: 0.5} if weight else {}))
    model, own = s.reached(loss)
    reached = {name.split(".")[0] for name in model} | {f"own.{name.split('.')[0]}" for name in own}
    assert reached == set(wanted.split())
    if weight:
        torch.testing.assert_close(value(**{weight: 1.0})[1], 2 * loss)


# Choices


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "patchgne"}, r"unknown method 'patchgne'; did you mean 'patchgen'\?"),
    ({"method": "zzz"}, r"unknown method 'zzz' \(known: lp, lp-ln"),
    ({"method": "erm2"}, "unknown method 'erm2'; did you mean 'erm'"),
    ({"method": "lp", "pool": "patchgen"}, "pool 'patchgen' does not fit method 'lp'"),
    ({"method": "patchgen-no-losses", "pool": "mean"}, "pool 'mean' does not fit method 'patchgen-no-losses'"),
    ({"method": "gmdg", "hparams": {"domian": 0.1}}, "'gmdg' has no hyper-parameter 'domian'; did you mean 'domain'"),
    ({"method": "coral", "hparams": {"lr_mult": 3.0}}, "method 'coral' has no hyper-parameter 'lr_mult'"),
    ({"method": "miro", "hparams": {"miro": -0.1}}, "miro must be a non-negative number, not -0.1"),
    ({"method": "vrex", "hparams": {"anneal": 1.5}}, "anneal must be a share from 0 to 1, not 1.5"),
    *(({"method": name, "class_weights": "balanced"}, "leave --class-weights out")
      for name in ("mixup", "groupdro", "promptstyler")),
    *(({"method": name, "tune": "head"}, "with tune 'head' .*; choose --tune layernorm or full")
      for name in ("coral", "lp+mmd", "dann", "lp+cdann", "domain-moments", "miro", "gmdg")),
    ({"method": "sagnet", "tune": "last_block"}, "with tune 'last_block' .* --hparams sagnet 0"),
    *(({"method": name, "tune": "head", "augment": False, "hparams": hparams}, "computed once and cached; leave out")
      for name, hparams in (("mixstyle", {}), ("lp+mixup", {}), ("bfmix-like", {}), ("sagnet", {"sagnet": 0.0}))),
    ({"method": "patchgen-true-mask+mixup"}, "a blended image has no true mask"),
    ({"method": "patchgen-select+mldg"}, "Mldg and Balance cannot be combined"),
    ({"method": "patchgen-attend+fish"}, "Fish and Balance cannot be combined"),
    *(({"method": name, "task": "mdg_gcd"}, "reads the name of every class, and task 'mdg_gcd' hides some")
      for name in ("coop", "clipceil")),
    ({"method": "coop", "pool": "mean"}, "reads what CLIP projects: leave out --pool"),
    *(({"method": "clip", **more}, "'clip.*' does not train on images: leave out --tune")
      for more in ({"tune": "layernorm"}, {"method": "clip+lreg"}, {"devices": 2})),
    ({"method": "duprg", "tune": "full"}, "'duprg' does not train on images: leave out --tune"),
    *(({"method": name, "tune": "head"}, f"'{name}' tunes CLIP's image tower: leave out --tune head")
      for name in ("clipood", "clipceil")),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "rule"), REFUSED)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make_method(config(**settings))


OUTSIDE = {POSITIVE: 0.0, SHARE: 1.5, BELOW_ONE: 1.0, COUNT: 1.5}


@pytest.mark.parametrize("name", METHODS)
def test_a_hyper_parameter_beyond_its_bound_is_refused(name: str) -> None:
    defaults = METHODS[name].all_defaults()
    for parameter, bound in vars(METHODS[name]).get("bounds", {}).items():
        value = OUTSIDE.get(bound, 5.0)  # 5: not among the sizes of a bank
        match = f"hyper-parameter {parameter} must be .*, not {value:g}; its default is {defaults[parameter]:g}"
        with pytest.raises(ValueError, match=match):
            make_method(config(method=name, hparams={parameter: value}))


KRONECKER, ON_CLIP = ("kadaptation", "kadaptation-moa"), [name for name in METHODS if "text" in METHODS[name].needs]
UNFIT: list[tuple[str, str, dict[str, float], str]] = [
    *((name, "resnet50", {}, "has none that are known; choose a ViT") for name in (*KRONECKER, "bfmix-like")),
    *((name, "tiny", {"rules": 48.0}, "no 48 equal parts; try --hparams rules 16") for name in KRONECKER),
    *((name, "tiny", {}, "is a dinov2_with_registers: choose --backbone clip-b16") for name in ON_CLIP),
    ("fish", "tiny", {}, "needs at least two source domains"),
]


@pytest.mark.parametrize(("name", "backbone", "hparams", "rule"), UNFIT)
def test_a_model_that_does_not_fit_the_method_is_refused(
    name: str, backbone: str, hparams: dict[str, float], rule: str
) -> None:
    settings = Config("photos", "site_c", method=name, backbone=backbone, image_size=224, hparams=hparams)
    method = make_method(settings)
    method.class_names, method.sources = ("a", "b", "c"), (3,)
    with pytest.raises(ValueError, match=rule):
        method.setup(build_on(load_backbone(backbone, pretrained=False), settings, method, 3))


def test_an_alias_is_another_name_and_not_another_method(tiny_run: Callable[..., Any]) -> None:
    assert method_class("erm") is METHODS["lp-ln"]
    assert set(ALIASES.values()) <= set(METHODS) and not set(ALIASES) & set(METHODS)
    assert [base.__name__ for base in method_class("erm+irm").__bases__] == ["Irm", "Erm"]
    run = tiny_run("erm", steps=1)
    assert run.config.method == "erm" and run.path != tiny_run("lp-ln", steps=1).path
    assert (run.path / "summary.md").read_text().startswith("# erm with studio unseen")


# Several devices


@pytest.mark.parametrize(("method", "hparams"), [
    ("lp-ln+gmdg+lreg", {"ortho": 0.1, "shift": 1.0}), ("pim", {}), ("pim-lreg", {}), ("mdsdi", {"meta": 0.0}),
    ("coral", {}), ("mmd", {}), ("cdann", {"penalty": 0.5}), ("mtl", {}),
])  # fmt: skip
def test_two_devices_have_the_gradients_of_one(
    method: str, hparams: dict[str, float], two_devices: Callable[..., Any]
) -> None:
    wanted, found = two_devices(method=method, hparams=hparams)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-3, atol=1e-6)


# Terms on z-


def test_a_term_without_gradient_is_refused_by_its_name(scene: Callable[..., Any]) -> None:
    s = scene("patchgen-no-losses")
    step = Step(s.method, s.model, make_optimizer(s.model, s.method), lambda: s.batch)
    rest = label_probability(s.forward().complementary_logits, s.batch.label)
    with pytest.raises(ValueError, match=r"'patchgen-no-losses'.*'L_rest' has no gradient.*complementary"):
        step.backward(s.method.losses(s.forward(), s.batch) | {"L_rest": rest})


def test_the_complement_reaches_the_mask(scene: Callable[..., Any]) -> None:
    s = scene("patchgen-no-losses")
    model, _ = s.reached(s.model.head(s.forward().complementary).square().mean())
    assert {"select.qkv.weight", "select.rho"} <= model
