"""Losses and gradients against reference values from the public code of each method.

A reference value was computed by running the public function named in ``SOURCES`` (or, where the release has it inside
a training step, the formula of that step) in float64 on the small tensors below; of a gradient its first three entries
and its norm are kept. docs/study/methods.md has the largest differences as a table, which a test here holds.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.ccd.methods import Views, make_stream_method
from patchgen.ccd.mixture import SphericalMixture
from patchgen.ccd.settings import StreamConfig
from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.discovery import clustering_accuracy
from patchgen.methods import make_method
from patchgen.methods.alignment import kernel_distance, mean_of_classes, moment_distance, reverse_gradient
from patchgen.methods.features import kept_features, mix_deviations, mix_variances, swap_content
from patchgen.methods.invariance import GroupDro, domain_risks, irm_penalty
from patchgen.methods.lreg import (
    ErrorPredictor,
    contrast,
    logical_regularisation,
    prediction_loss,
    weighted_pseudo_loss,
)
from patchgen.methods.miro import ChannelVariance, explained_covariance, gaussian_nll, mean_of_domains
from patchgen.methods.mixup import MixedBatch, mixed_cross_entropy
from patchgen.model.classifier import Output

Found = tuple[Tensor, dict[str, Tensor]]  # a loss, and gradients by name

# method -> repository, file and what was run there
SOURCES = {
    "miro": "kakaobrain/miro, domainbed/algorithms/miro.py: VarianceEncoder and the loop of MIRO.update",
    "gmdg": "zhaorui-tan/GMDG_cvpr2024, domainbed/algorithms/gmdg.py: get_cond_shift, and GReg2 of GMDG.update",
    "gestur": "korts-lew/gestur, domainbed/algorithms/gestur.py: GESTUROpt._project_conflicting",
    "lreg": "zhaorui-tan/L-Reg_NeurIPS24, domainbed/algorithms/miro.py: the low_degree term of forward",
    "pim-lreg": "zhaorui-tan/L-Reg_NeurIPS24, domainbed/algorithms/miro.py: HatYConfidenceEstimitor and its two losses",
    "coral": "facebookresearch/DomainBed, domainbed/algorithms.py: AbstractMMD.mmd, mean_cov",
    "mmd": "facebookresearch/DomainBed, domainbed/algorithms.py: AbstractMMD.mmd, gaussian",
    "dann": "facebookresearch/DomainBed, domainbed/algorithms.py: formula of AbstractDANN.update",
    "cdann": "facebookresearch/DomainBed, domainbed/algorithms.py: formula of AbstractDANN.update",
    "irm": "facebookresearch/DomainBed, domainbed/algorithms.py: IRM._irm_penalty",
    "vrex": "facebookresearch/DomainBed, domainbed/algorithms.py: formula of VREx.update",
    "groupdro": "facebookresearch/DomainBed, domainbed/algorithms.py: formula of GroupDRO.update, two steps",
    "mixup": "facebookresearch/DomainBed, domainbed/algorithms.py: formula of Mixup.update",
    "rsc": "facebookresearch/DomainBed, domainbed/algorithms.py: formula of RSC.update",
    "selfreg": "facebookresearch/DomainBed, domainbed/algorithms.py: formula of SelfReg.update",
    "sagnet": "hyeonseobnam/sagnet, modules/randomizations.py: StyleRandomization, ContentRandomization",
    "mixstyle": "khanrc/swad, domainbed/models/mixstyle.py: MixStyle",
    "sma": "salesforce/ensemble-of-averages, domainbed/algorithms.py: MovingAvg.update_sma",
    "simgcd": "CVMI-Lab/SimGCD, model.py and train.py: all five terms",
    "gcd": "CVMI-Lab/SimGCD, model.py: info_nce_logits, SupConLoss",
}

REFERENCE: dict[str, tuple[float, dict[str, list[float]]]] = {
    "miro": (1.76184471, {"z": [-0.35061291, -0.00565314756, -0.0271292915, 1.21701604],
                          "bias": [-0.625618517, -0.339168294, -0.456218138, 1.01860602]}),
    "gmdg: shift": (2.80713072e-06, {"x": [-1.77751838e-06, 4.35492291e-06, 6.55302703e-07, 1.48140684e-05]}),
    "gmdg: domain": (-0.300456523, {"x": [0.0, 0.0, 0.0, 0.0],
                                    "bias": [-0.0028192246, -0.180056433, 0.0119754958, 0.257476307]}),
    "lreg": (-0.0564413151, {"logits": [0.00559566432, -0.0905916737, 0.0684196129, 0.195730157],
                             "features": [-0.0620806245, -0.0230688249, 0.0195595017, 0.193139347]}),
    "pim-lreg: pseudo": (0.0188212202, {"logits": [0.0, 0.0, 0.0, 0.0133437261]}),
    "pim-lreg: error": (0.547670117, {"w": [0.0, 0.0, 0.0, 0.911660692]}),
    "mmd": (2.22064817, {"one": [-0.25785666, 0.123021508, 0.0800958086, 0.410227515],
                         "other": [0.0580325314, -0.0537993859, 0.055017971, 0.346565703]}),
    "coral": (0.577196191, {"one": [-0.133226483, 0.12176773, -0.0257997075, 0.355011678],
                            "other": [0.198629886, 0.0261516178, 0.0812559114, 0.469199505]}),
    "irm": (0.112688218, {"logits": [0.106233352, -0.08334408, -0.0228892724, 0.57696785]}),
    "vrex": (0.0374887302, {"logits": [0.0518276366, -0.03405669, -0.0177709466, 0.146385021]}),
    "groupdro": (1.79536743, {"logits": [-0.105871875, 0.089122174, 0.0167497006, 0.425227827]}),
    "mixup": (1.1036629, {"logits": [-0.0257577425, -0.0430791822, 0.0688369247, 0.315136751]}),
    "dann": (0.585126924, {"generator": [-0.07977933, -0.05541081, -0.0250626151, 0.15648925]}),
    "cdann": (0.597161916, {"generator": [-0.0565243551, -0.0392590449, -0.0177570826, 0.165508319]}),
    "rsc": (1.14040299, {"features": [0.00341903013, 0.0, 0.0, 0.00950052074]}),
    "selfreg": (1.23008106, {"logits": [0.0862496858, 0.159987557, -0.0318644298, 0.996262088],
                             "features": [-0.0192091234, 0.00648872943, 0.0164650676, 0.143150667],
                             "projected": [0.0341945655, 0.018313764, 0.00216727975, 0.135110554]}),
    "sagnet: style": (-0.154770109, {"x": [0.0, 0.479425539, 0.841470985, 5.82183727]}),
    "sagnet: content": (0.892500516, {"x": [0.671163453, 0.480159619, 0.682317894, 3.36215656]}),
    "mixstyle": (-0.219297096, {"x": [0.0, 0.479257207, 0.841175535, 5.9154104]}),
    "simgcd": (4.1911402, {"proj": [0.188406309, 0.0581044553, -0.149564907, 0.658309177],
                           "logits": [-0.434961674, -0.336170153, 0.570828705, 2.78446039]}),
}  # fmt: skip


def wave(*shape: int, k: float = 1.0, s: float = 0.0) -> Tensor:
    """sin(k i + s) for i = 0, 1, ...: the same small tensors everywhere, without a random generator."""
    return torch.sin(k * torch.arange(math.prod(shape), dtype=torch.float64) + s).view(*shape)


def slopes(function: Callable[..., Tensor], **inputs: Tensor) -> Found:
    """The loss that a function of these inputs gives, and its gradients."""
    loss = function(**{name: tensor.requires_grad_() for name, tensor in inputs.items()})
    return loss, dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))


def two_domains(label: list[int]) -> Batch:
    count = len(label)
    return Batch(torch.zeros(count, 1), torch.tensor(label), torch.arange(count) * 2 // count, torch.arange(count))


DOMAIN, SIX, UNLABELLED = torch.tensor([0, 0, 0, 1, 1, 1]), [0, 2, 1, 1, 0, 2], torch.tensor([0, -1, 2, 1, -1])


def _miro() -> Found:
    variance = ChannelVariance(4).double()
    variance.bias.data += wave(4, k=0.9)
    pretrained = wave(2, 3, 4, k=0.7, s=1)
    return slopes(lambda z, bias: gaussian_nll(z, pretrained, variance()), z=wave(2, 3, 4, k=1.3), bias=variance.bias)


def _gmdg_domain() -> Found:
    variance = ChannelVariance(8).double()

    def loss(x: Tensor, bias: Tensor) -> Tensor:
        # the release averages the i-th samples of all domains, ours the domains' means: see the departures
        pair = torch.cat([x, wave(6, 4, k=0.45, s=0.3)], 1)
        means = [mean_of_domains(pair[[i, i + 3]], torch.tensor([0, 1])) for i in range(3)]
        return gaussian_nll(pair.detach(), torch.stack(means).repeat(2, 1), variance())

    return slopes(loss, x=wave(6, 4, k=1.7), bias=variance.bias)


def _predictor() -> ErrorPredictor:
    predictor = ErrorPredictor(3)
    for parameter in predictor.parameters():
        parameter.data = (wave(*parameter.shape, k=1.1, s=0.9) + 0.4).float()
    return predictor


def _pim_pseudo(logits: Tensor) -> Tensor:
    confidence = 1 - _predictor()(logits.detach()).detach().mean(1)
    return weighted_pseudo_loss(logits, UNLABELLED < 0, confidence)


def _pim_error() -> Found:
    predictor, logits = _predictor(), wave(5, 3, k=2.1)
    weight = cast(nn.Linear, predictor.layers[2]).weight
    return slopes(lambda w: prediction_loss(predictor(logits), logits, UNLABELLED), w=weight)


def _groupdro() -> Found:
    method = make_method(Config("photos", "x", method="groupdro", hparams={"groupdro": 0.5}))
    assert isinstance(method, GroupDro)
    method.register_buffer("q", torch.full((2,), 0.5))
    for k in (1.4, 2.4):
        found = slopes(lambda logits: method.losses(Output(logits, logits), two_domains(SIX))["main"],
                       logits=wave(6, 3, k=k))  # fmt: skip
    assert method.q.tolist() == pytest.approx([0.453683966, 0.546316034], abs=1e-6)
    return found


def _mixup(logits: Tensor) -> Tensor:
    labels, share = torch.tensor([[0, 2, 1, 1], [1, 1, 0, 2]]), torch.tensor([0.3, 0.3, 0.9, 0.9])
    batch = MixedBatch(torch.zeros(4, 1), labels[0], labels[0], torch.arange(4), labels=labels, share=share)
    return mixed_cross_entropy(logits, batch)


def _dann(generator: Tensor) -> Tensor:
    return F.cross_entropy(reverse_gradient(generator, 0.7) @ wave(2, 4, k=0.33).T, DOMAIN)


def _cdann(generator: Tensor) -> Tensor:
    target = torch.tensor([0, 0, 1, 2, 0, 1])
    told = (reverse_gradient(generator, 0.7) + wave(3, 4, k=2.2)[target]) @ wave(2, 4, k=0.33).T
    return mean_of_classes(F.cross_entropy(told, DOMAIN, reduction="none"), target, 3)


def _rsc(features: Tensor) -> Tensor:
    head = nn.Linear(6, 3, dtype=torch.float64)
    head.weight.data, head.bias.data = wave(3, 6, k=1.05), wave(3, k=0.4)
    kept = kept_features(features, torch.tensor(SIX), head, 1 / 3, 1 / 3)
    assert kept.int().tolist() == [[1, 0, 0, 1, 1, 1], [1] * 6, [1] * 6, [1] * 6, [1, 0, 0, 1, 1, 1], [1] * 6]
    return F.cross_entropy(head(features * kept), torch.tensor(SIX))


def _selfreg(logits: Tensor, features: Tensor, projected: Tensor) -> Tensor:
    return contrast(logits, features, projected, torch.tensor([1, 0, 3, 2]), torch.tensor([0, 1, 3, 2]), 0.25)


def _styled(mix: Callable[..., Tensor], order: list[int], *share: float) -> Found:
    """Maps (3, 4, 2, 3) as positions (3, 6, 4), mixed, and a weighted sum of the result."""
    shares = [torch.tensor(share, dtype=torch.float64)] if share else []

    def mixed(x: Tensor) -> Tensor:
        positions = mix(x.flatten(2).transpose(1, 2), torch.tensor(order), *shares)
        return (positions.transpose(1, 2).reshape(3, 4, 2, 3) * wave(3, 4, 2, 3, k=0.5)).sum()

    return slopes(mixed, x=wave(3, 4, 2, 3, k=1.6))


def _simgcd_terms() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Terms of epoch 2 of a warm-up of 4 epochs, on given projections and logits."""
    inputs = {"proj": wave(8, 5, k=1.23).requires_grad_(), "logits": (0.5 * wave(8, 4, k=0.81)).requires_grad_()}
    model: Any = SimpleNamespace(
        head=lambda features: F.normalize(inputs["proj"], dim=1), classify=lambda features, count: inputs["logits"]
    )
    method = make_stream_method(StreamConfig("x", method="simgcd", warm_up=4, entropy_weight=4.0))
    label = torch.tensor([0, 1, 1, 0]).repeat(2)
    none = torch.zeros(8, 0)
    return method.losses(model, Views(Output(none, none), label, label, None, 4, 2, labelled=True)), inputs


def _simgcd() -> Found:
    terms, inputs = _simgcd_terms()
    return slopes(lambda **_: torch.stack(list(terms.values())).sum(), **inputs)


PAIR = {"one": wave(4, 3, k=1.9), "other": wave(5, 3, k=0.6, s=1.5)}
CASES: dict[str, Callable[[], Found]] = {
    "miro": _miro,
    "gmdg: shift": lambda: slopes(
        lambda x: explained_covariance(x, wave(6, 4, k=0.45, s=0.3)), x=wave(6, 4, k=1.7)),
    "gmdg: domain": _gmdg_domain,
    "lreg": lambda: slopes(logical_regularisation, logits=wave(5, 3, k=2.1), features=wave(5, 6, k=0.8, s=2)),
    "pim-lreg: pseudo": lambda: slopes(_pim_pseudo, logits=wave(5, 3, k=2.1)),
    "pim-lreg: error": _pim_error,
    "coral": lambda: slopes(moment_distance, **PAIR),
    "mmd": lambda: slopes(kernel_distance, **PAIR),
    "irm": lambda: slopes(lambda logits: irm_penalty(logits, two_domains(SIX)), logits=wave(6, 3, k=1.4)),
    "vrex": lambda: slopes(
        lambda logits: domain_risks(logits, two_domains(SIX)).var(correction=0), logits=wave(6, 3, k=1.4)),
    "groupdro": _groupdro,
    "mixup": lambda: slopes(_mixup, logits=wave(4, 3, k=1.4)),
    "dann": lambda: slopes(_dann, generator=wave(6, 4, k=1.2)),
    "cdann": lambda: slopes(_cdann, generator=wave(6, 4, k=1.2)),
    "rsc": lambda: slopes(_rsc, features=wave(6, 6, k=0.77)),
    "selfreg": lambda: slopes(
        _selfreg, logits=wave(4, 3, k=1.4), features=wave(4, 5, k=0.9), projected=wave(4, 5, k=0.35, s=1)),
    "sagnet: style": lambda: _styled(
        mix_variances, [0, 2, 1], 0.8852923701860037, 0.6715475054338559, 0.664679492131691),
    "sagnet: content": lambda: _styled(swap_content, [0, 2, 1]),
    "mixstyle": lambda: _styled(
        mix_deviations, [2, 1, 0], 0.8250527867031997, 0.9098770947583826, 0.3259623077417088),
    "simgcd": _simgcd,
}  # fmt: skip


def differences(name: str) -> tuple[float, float]:
    """Largest difference of the loss, and of a gradient's entries and norm; relative to a loss below 1e-3."""
    value, gradients = REFERENCE[name]
    loss, found = CASES[name]()
    small = 1 / abs(value) if abs(value) < 1e-3 else 1.0
    parts = [
        abs(ours - theirs) * small
        for part, expected in gradients.items()
        for ours, theirs in zip([*found[part].flatten()[:3].tolist(), float(found[part].norm())], expected, strict=True)
    ]
    return abs(float(loss.detach()) - value) * small, max(parts)


@pytest.mark.parametrize("name", REFERENCE)
def test_loss_and_gradient_are_those_of_the_release(name: str) -> None:
    loss, gradient = differences(name)
    assert loss < 2e-6 and gradient < 2e-6


def test_the_parts_of_gcd_and_simgcd() -> None:
    terms, _ = _simgcd_terms()
    expected = {"info_nce": 0.65 * 1.98790449876, "sup_con": 0.35 * 2.82960586823, "distil": 0.65 * 1.46061520880,
                "entropy": 0.65 * 4 * 0.00569929279, "classes": 0.35 * 2.69834906902}  # fmt: skip
    assert {name: float(term.detach()) for name, term in terms.items()} == pytest.approx(expected, rel=1e-5)


class Parts(nn.Module):
    """A model of a backbone with four numbers and a head with two."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ParameterDict({"w": torch.zeros(4, dtype=torch.float64)})
        self.head = nn.ParameterDict({"w": torch.zeros(2, dtype=torch.float64)})


def test_gestur_merges_gradients_as_released() -> None:
    model, method = Parts(), make_method(Config("photos", "x", method="gestur", hparams={"gestur": 0.2}))
    method.setup(cast(Any, model))
    model.backbone["w"].data = wave(4, k=0.7, s=1)  # how far it is from its average
    inner = wave(6, k=1.3)
    model.backbone["w"].grad, model.head["w"].grad = inner[:4].clone(), inner[4:].clone()
    method.adjust_gradients(cast(Any, model))
    found = [*model.backbone["w"].grad.tolist(), *model.head["w"].grad.tolist()]
    assert found == pytest.approx(
        [0.090640334673, 0.588597785124, 0.330509235938, -0.339404154915, -0.88345465572, 0.215119988088], abs=1e-9
    )


def test_sma_averages_as_released() -> None:
    """`sma_start_iter` 4: copies until the third update, then the mean from there on."""
    model, method = Parts(), make_method(Config("p", "x", method="sma", steps=8, hparams={"sma_start": 0.5}))
    model.head["w"].data.fill_(0.5)
    method.setup(cast(Any, model))
    found = []
    for number in range(1, 9):
        model.head["w"].data.fill_(math.sin(1.1 * number))
        method.after_step(cast(Any, model))
        found.append(float(method.predicting(cast(Any, model))["head.w"][0]))  # type: ignore[index]
    assert found == pytest.approx(
        [0.8912073601, 0.8084964038, -0.1577456941, -0.554673884, -0.6049626979, -0.3758366825, -0.1030356992,
         0.0116231161], abs=1e-7,
    )  # fmt: skip


def test_accuracy_is_the_strict_one_of_the_field() -> None:
    """CVMI-Lab/SimGCD, util/cluster_and_log_utils.py: split_cluster_acc_v2 on these twelve images."""
    found = clustering_accuracy([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3], [1, 1, 2, 2, 2, 0, 0, 3, 3, 3, 0, 4], [0, 1])
    assert (found.all, found.known, found.unknown) == pytest.approx((2 / 3, 0.8, 4 / 7))


def test_prompts_are_those_of_the_largest_responsibilities() -> None:
    """PromptCCD asks pycave for softmax_k [log w_k + log N(x; m_k, v_k)], by its formula, and takes the top k."""
    means, variances = 0.6 * wave(5, 3, k=1.9), torch.tensor([0.05, 0.2, 0.1, 0.4, 0.15], dtype=torch.float64)
    weights = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)
    x = F.normalize(wave(4, 3, k=0.8, s=0.5), dim=1)
    joint = torch.stack([
        weight.log() + torch.distributions.MultivariateNormal(mean, variance * torch.eye(3).double()).log_prob(x)
        for mean, variance, weight in zip(means, variances, weights, strict=True)
    ], 1)  # fmt: skip
    mixture = SphericalMixture(means, variances, weights)
    torch.testing.assert_close(mixture.log_responsibilities(x).exp(), joint.softmax(1).float())
    assert torch.equal(mixture.nearest(x, 2), joint.softmax(1).topk(2).indices)


def test_the_table_of_the_documentation_holds() -> None:
    """Every method of this file is in the table, with bounds that its differences keep."""
    text = (
        (Path(__file__).parents[2] / "docs" / "study" / "methods.md")
        .read_text()
        .partition("## Parity with the releases")[2]
    )
    rows = {name: (source, float(loss), float(gradient)) for name, source, loss, gradient in re.findall(
        r"^\| `([\w-]+)` \| ([^|]+?) \| ([\d.e-]+) \| ([\d.e-]+) \|", text, re.M)}  # fmt: skip
    assert rows.keys() == {name.partition(":")[0] for name in REFERENCE}
    for name in REFERENCE:
        source, loss, gradient = rows[name.partition(":")[0]]
        assert source.split(",")[0] == SOURCES[name.partition(":")[0]].split(",")[0]
        ours = differences(name)
        assert ours[0] <= loss and ours[1] <= gradient, (name, ours)
