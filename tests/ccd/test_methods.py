"""Stream methods: their terms against explicit loops, which parameters these reach, and settings that do not fit."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from patchgen.ccd.loop import make_stream_optimizer
from patchgen.ccd.methods import STREAM_METHODS, Views, info_nce, make_stream_method, supervised_contrastive
from patchgen.ccd.model import ProjectionHead, StreamModel, build_stream_model
from patchgen.ccd.settings import StreamConfig
from patchgen.model.losses import class_similarity, mask_suppression

SETTINGS: dict[str, Any] = {
    "data": "none", "backbone": "tiny", "image_size": 28, "projection_hidden": 16, "projection_bottleneck": 8,
    "projection_out": 12,
}  # fmt: skip
CLASSES = 4


def setting(name: str, **more: Any) -> tuple[StreamConfig, StreamModel]:
    config = StreamConfig(**SETTINGS, method=name, **more)
    method = make_stream_method(config)
    return config, build_stream_model(config, method.pool, CLASSES if method.prototypes else 0)


def see(model: StreamModel, labelled: bool) -> Views:
    images = torch.randn(8, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    label = torch.tensor([0, 1, 1, 0]).repeat(2)
    none = torch.full_like(label, -1)
    middle = torch.randn(CLASSES, 64, generator=torch.Generator().manual_seed(2))
    return Views(model.read(images), label if labelled else none, label, middle, CLASSES, epoch=0, labelled=labelled)


@pytest.mark.parametrize("name", STREAM_METHODS)
@pytest.mark.parametrize("labelled", [True, False])
def test_every_trained_tensor_gets_a_gradient(name: str, labelled: bool) -> None:
    config, model = setting(name)
    losses = make_stream_method(config).losses(model, see(model, labelled))
    assert ("sup_con" in losses) == labelled
    torch.stack(list(losses.values())).sum().backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without and all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_patchgen_terms_by_hand() -> None:
    config, model = setting("promptccd+patchgen", lambda_ms=2.0, lambda_sim=3.0, lambda_conf=5.0, tau=0.6)
    views = see(model, labelled=False)
    losses = make_stream_method(config).losses(model, views)
    z, mask = views.out.features, views.out.mask
    assert views.centres is not None and mask is not None
    p = (F.cosine_similarity(z[:, None], views.centres[None], dim=2) / 0.1).softmax(1)
    torch.testing.assert_close(losses["L_conf"], -5 * p[torch.arange(8), views.pseudo].mean())
    torch.testing.assert_close(losses["L_ms"], 2 * mask_suppression(mask, 0.6))
    torch.testing.assert_close(losses["L_sim"], 3 * class_similarity(z, views.pseudo))
    assert not views.centres.requires_grad


def test_simgcd_terms_by_hand() -> None:
    config, model = setting("simgcd", entropy_weight=4.0)
    views = see(model, labelled=True)
    losses = {k: v.detach() for k, v in make_stream_method(config).losses(model, views).items()}
    cosines = model.classify(views.out.features, CLASSES).detach()
    p = (cosines / 0.1).softmax(1)
    teacher = (cosines / 0.07).softmax(1)
    distil = -sum(float((teacher[(i + 4) % 8] * p[i].log()).sum()) for i in range(8)) / 8
    mean = p.mean(0)
    assert float(losses["distil"]) == pytest.approx(0.65 * distil, rel=1e-4)
    expected = 0.65 * 4 * (math.log(CLASSES) + float((mean * mean.log()).sum()))
    assert float(losses["entropy"]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert float(losses["classes"]) == pytest.approx(
        0.35 * float(F.cross_entropy(cosines / 0.1, views.target)), rel=1e-4
    )


def test_simgcds_teacher_reaches_its_temperature_with_the_last_epoch_of_the_warm_up() -> None:
    def temperatures(warm_up: int) -> list[float]:
        method = make_stream_method(StreamConfig(**SETTINGS, method="simgcd", warm_up=warm_up))
        return [method._teacher(epoch) for epoch in range(6)]  # type: ignore[attr-defined]

    # the release: np.linspace(0.07, 0.04, warm_up), then 0.04
    assert temperatures(4) == pytest.approx([0.07, 0.06, 0.05, 0.04, 0.04, 0.04])
    assert temperatures(1) == pytest.approx([0.07, *[0.04] * 5]) and temperatures(0) == pytest.approx([0.04] * 6)


def test_simgcd_contrasts_in_the_bottleneck_and_spares_vectors_from_decay() -> None:
    config, model = setting("simgcd", weight_decay=0.5)
    assert model.head.directions is None and model.head(torch.randn(3, 64)).shape == (3, 8)
    assert model.prototypes is not None and float(model.prototypes.detach().abs().max()) <= 64**-0.5
    method = make_stream_method(config)
    groups = make_stream_optimizer(model, config, method.decays_vectors).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    learned = [p for p in model.parameters() if p.requires_grad]
    assert len(decay) == len(learned) and all(decay[id(p)] == (0.5 if p.ndim > 1 else 0.0) for p in learned)
    host = make_stream_method(StreamConfig(**SETTINGS, method="promptccd"))
    groups = make_stream_optimizer(model, config, host.decays_vectors).param_groups
    assert [group["weight_decay"] for group in groups] == [0.5]


@pytest.mark.parametrize(("settings", "text"), [
    ({"method": "prompccd"}, "did you mean 'promptccd'"),
    ({"method": "gcd", "components": "grow"}, "needs a mixture"),
    ({"method": "gcd", "test_prompts": True}, "needs prompts"),
    ({"method": "promptccd+patchgen", "pool": "mean"}, "which has a mask"),
])  # fmt: skip
def test_settings_that_do_not_fit(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_stream_method(StreamConfig(**SETTINGS, **settings))


# The contrastive losses, and the head


def unit(rows: int, dim: int = 7, seed: int = 0) -> torch.Tensor:
    return F.normalize(
        torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=1
    )


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_info_nce_equals_its_definition(temperature: float) -> None:
    z, count = unit(10), 5
    total = 0.0
    for i in range(2 * count):
        other = (i + count) % (2 * count)
        weight = [math.exp(float(z[i] @ z[j]) / temperature) for j in range(2 * count) if j != i]
        total -= math.log(math.exp(float(z[i] @ z[other]) / temperature) / sum(weight))
    assert float(info_nce(z, temperature)) == pytest.approx(total / (2 * count), rel=1e-10)


@pytest.mark.parametrize("label", [[0, 1, 0, 0, 1, 0], [2, -1, 2, 2, -1, 2], [0, 1, 2, 0, 1, 5]])
def test_supervised_contrast_equals_its_definition(label: list[int]) -> None:
    z, t = unit(6), 0.07
    rows = [i for i in range(6) if label[i] >= 0]
    anchors = []
    for i in rows:
        positives = [j for j in rows if j != i and label[j] == label[i]]
        if positives:
            base = math.log(sum(math.exp(float(z[i] @ z[j]) / t) for j in rows if j != i))
            anchors.append(-sum(float(z[i] @ z[j]) / t - base for j in positives) / len(positives))
    found = supervised_contrastive(z, torch.tensor(label), t)
    assert float(found) == pytest.approx(sum(anchors) / len(anchors), rel=1e-9)


@pytest.mark.parametrize("label", [[-1, -1, -1, -1], [0, 1, 2, 3], [0, -1, -1, -1]])
def test_nothing_to_compare_gives_zero_with_a_gradient(label: list[int]) -> None:
    z = unit(4).requires_grad_()
    loss = supervised_contrastive(z, torch.tensor(label))
    loss.backward()
    assert float(loss.detach()) == 0 and z.grad is not None and bool(z.grad.isfinite().all())


def test_the_head_gives_unit_vectors_and_ignores_the_length_of_its_directions() -> None:
    head = ProjectionHead(7, hidden=16, bottleneck=5, out=11)
    x = unit(3).float()
    before = head(x)
    assert before.shape == (3, 11)
    torch.testing.assert_close(before.norm(dim=1), torch.ones(3))
    with torch.no_grad():
        head.directions *= torch.rand(11, 1) + 0.5
    torch.testing.assert_close(head(x), before)
