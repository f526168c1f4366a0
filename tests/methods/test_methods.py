"""The methods: their named and weighted losses, where their gradients go, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import ALIASES, METHODS, make_method, method_class
from patchgen.methods.build import build_model
from patchgen.methods.patchgen import PatchGenWithoutLosses
from patchgen.model.classifier import Classifier, Output
from patchgen.model.losses import label_probability

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
    "backbone select head": ["ablation-attention-ms main", "patchgen+lreg L_reg lreg", "patchgen+vrex L_vrex vrex"],
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
    ({"method": "miro", "hparams": {"miro": math.nan}}, "hparams must be `name: value` pairs, each a finite number"),
    ({"method": "vrex", "hparams": {"anneal": 1.5}}, "anneal must be a share from 0 to 1, not 1.5"),
    *(({"method": name, "class_weights": "balanced"}, "leave --class-weights out")
      for name in ("mixup", "groupdro", "promptstyler")),
    *(({"method": name, "tune": "head"}, "nothing can move them; choose --tune layernorm")
      for name in ("coral", "lp+mmd", "dann", "lp+cdann", "domain-moments")),
    *(({"method": name, "tune": "head"}, "none of it can drift; choose --tune layernorm") for name in ("miro", "gmdg")),
    *(({"method": "sagnet", "tune": tune}, f"with tune '{tune}' none of them") for tune in ("head", "last_block")),
    *(({"method": name, "tune": "head", "augment": False, "hparams": hparams}, "computed once and cached; leave out")
      for name, hparams in (("mixstyle", {}), ("lp+mixup", {}), ("bfmix-like", {}), ("sagnet", {"sagnet": 0.0}))),
    ({"method": "patchgen-true-mask+mixup"}, "a blended image has no true mask"),
    ({"method": "patchgen-select+mldg"}, "Mldg and Balance cannot be combined"),
    ({"method": "patchgen-attend+fish"}, "Fish and Balance cannot be combined"),
    *(({"method": name, "task": "mdg_gcd"}, "reads the name of every class, and task 'mdg_gcd' hides some")
      for name in ("coop", "clipceil")),
    ({"method": "coop", "pool": "mean"}, "reads what CLIP projects: leave out --pool"),
    *(({"method": "clip", **more}, "'clip' trains nothing: leave out --tune")
      for more in ({"tune": "layernorm"}, {"method": "clip+lreg"}, {"devices": 2})),
    ({"method": "duprg", "tune": "full"}, "'duprg' learns from sentences alone: leave out --tune"),
    *(({"method": name, "tune": "head"}, f"'{name}' tunes CLIP's image tower: leave out --tune head")
      for name in ("clipood", "clipceil")),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "rule"), REFUSED)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make_method(config(**settings))


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


def test_an_alias_is_another_name_and_not_another_method(tiny_run: Callable[..., Any]) -> None:
    assert method_class("erm") is METHODS["lp-ln"]
    assert set(ALIASES.values()) <= set(METHODS) and not set(ALIASES) & set(METHODS)
    assert [base.__name__ for base in method_class("erm+irm").__bases__] == ["Irm", "Erm"]
    run = tiny_run("erm", steps=1)
    assert run.config.method == "erm" and run.path != tiny_run("lp-ln", steps=1).path
    assert (run.path / "summary.md").read_text().startswith("# erm with studio unseen")


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


# A step trains by every term that it logs, or says which one it cannot train by


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
