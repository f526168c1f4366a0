"""Methods on CLIP's sentences: losses in closed form, averages by hand, and checkpoints that are complete."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.cli import main
from patchgen.data.loaders import Batch
from patchgen.methods import make_method
from patchgen.methods.build import build_model, load_trained
from patchgen.methods.clip import beta_shares, direction_loss, group_variance
from patchgen.methods.source_free import PLACE, arcface, autoencoder, learn_styles, style_loss, unified_loss
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import trained_tensors
from patchgen.model.clip import BANKS, IMAGENET, TextTower, in_domain, load_text
from patchgen.train.loop import make_optimizer, plain_step

NAMES = ("circle", "cross", "round square")
SHORT: dict[str, dict[str, float]] = {  # the same methods in seconds
    "duprg": {"sentence_steps": 5},
    "promptstyler": {"styles": 2, "style_steps": 2, "epochs": 2},
    "dpl": {"context": 3, "width": 16},
}
Scenes = Callable[..., Any]


def step(s: Any, number: int = 0) -> None:
    plain_step(s.method, s.model, make_optimizer(s.model, s.method), s.batch, number)


def cosines(s: Any, vectors: Tensor) -> Tensor:
    """Zero-shot logits with these sentences (C, E)."""
    text = load_text(s.model.backbone)
    image = F.normalize(text.projection(s.model.read(s.batch.image)), dim=1)
    return text.scale.exp() * image @ F.normalize(vectors, dim=1).T


@pytest.fixture(scope="module")
def tower(clip_folder: Path) -> TextTower:
    return load_text(load_backbone(str(clip_folder))).tower


# The tower and its sentences


def test_a_vector_of_a_real_word_in_any_place_gives_the_written_sentence(tower: TextTower) -> None:
    """As PromptStyler puts its style: behind "a". Vectors may differ by sentence."""
    words = tower.model.embeddings.token_embedding.weight
    ids = tower.tokens(["a q style of a"])
    vector = words[tower.tokens(["z"])[0, 1:2]]
    torch.testing.assert_close(tower(ids, vector, PLACE), tower(tower.tokens(["a z style of a"])))
    assert not torch.allclose(tower(ids), tower(ids, vector, PLACE), atol=1e-3)
    own = words[tower.tokens(["bat", "fog"])[:, 1:2]]  # (2, 1, dim)
    torch.testing.assert_close(tower(tower.tokens(["cat", "dog"]), own), tower(tower.tokens(["bat", "fog"])))


def test_there_are_eighty_templates_and_three_banks() -> None:
    assert len(set(IMAGENET)) == 80 and all(text.count("{}") == 1 and text.endswith(".") for text in IMAGENET)
    assert {size: len(set(bank)) for size, bank in BANKS.items()} == {1: 1, 11: 11, 30: 30}
    assert (in_domain("", "dog"), in_domain("sketch", "dog")) == ("a photo of a dog", "a sketch photo of a dog")


# DUPRG


def test_the_loss_at_the_sentences_themselves() -> None:
    t = F.normalize(torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0)), dim=-1)  # (C, M, E)
    pairs = [float(t[c, d] @ t[k, d]) for d in range(3) for c in range(4) for k in range(4) if c != k]
    lengths = [float(t[c].mean(0).norm() ** 2) for c in range(4)]
    expected = -1 - 0.5 * sum(lengths) / 4 + 0.05 * sum(pairs) / len(pairs)
    assert float(unified_loss(t, t, 0.5, 0.05)) == pytest.approx(expected, abs=1e-6)


def test_one_domain_word_and_an_identity_give_zero_shot(
    clip_scene: Scenes, tower: TextTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(p.numel() for p in autoencoder(512).parameters()) == 1_313_536  # as published
    identity = nn.Linear(24, 24)
    identity.weight.data, identity.bias.data = torch.eye(24), torch.zeros(24)
    monkeypatch.setattr("patchgen.methods.source_free.autoencoder", lambda dim: identity)
    s = clip_scene("duprg", hparams={"bank": 1, "sentence_steps": 1, "sentence_lr": 0.0})
    step(s)
    wanted = tower.read([f"a photo of a {name}" for name in NAMES])
    torch.testing.assert_close(s.forward().logits, cosines(s, wanted), atol=1e-4, rtol=1e-5)


# PromptStyler


def test_contents_of_orthonormal_sentences() -> None:
    t = torch.eye(6)[:4]
    found = style_loss(torch.eye(6)[4:5], t, torch.empty(0, 6), t)
    assert float(found) == pytest.approx(math.log(1 + 3 / math.e), abs=1e-6)
    near = F.normalize(torch.tensor([[0.0, 0, 0, 0, 3, -4]]), dim=1)
    both = style_loss(near, t, torch.eye(6)[4:6], t) - found
    assert float(both) == pytest.approx((0.6 + 0.8) / 2, abs=1e-6)  # absolute cosines, their mean


def test_arcface_of_two_unit_vectors() -> None:
    angles = torch.tensor([[math.cos(0.7), math.cos(1.1)]])
    found = arcface(angles, torch.tensor([1]), 5.0, 0.5)
    torch.testing.assert_close(found, 5 * torch.tensor([[math.cos(0.7), math.cos(1.6)]]))
    torch.testing.assert_close(arcface(angles, torch.tensor([0]), 5.0, 0.0), 5 * angles, atol=1e-5, rtol=1e-5)


def test_a_style_that_is_learned_leaves_the_earlier_ones_as_they_are(tower: TextTower) -> None:
    def styles(count: int) -> Tensor:
        torch.manual_seed(3)
        return learn_styles(tower, ["circle", "cross"], count, 3)

    first, both = styles(1), styles(2)
    assert both.shape == (2, 2, 24) and torch.equal(first[0], both[0]) and not torch.equal(both[0], both[1])


@pytest.mark.parametrize("name", ["duprg", "promptstyler"])
def test_the_images_play_no_part_in_source_free_methods(name: str, clip_scene: Scenes) -> None:
    def learned(flip: bool) -> Tensor:
        s = clip_scene(name, hparams=SHORT[name])
        if flip:
            s.batch.image[:] = s.batch.image.flip(0)
        torch.manual_seed(0)
        step(s)
        first: Tensor = s.model.head.vectors.clone()
        step(s, 1)  # nothing is left to learn
        assert torch.equal(first, s.model.head.vectors) and not any(p.requires_grad for p in s.model.parameters())
        return first

    assert torch.equal(learned(False), learned(True))


# DPL


def test_a_prompt_that_hears_no_image_is_coops(clip_scene: Scenes) -> None:
    s, coop = (clip_scene(name, hparams={"context": 3}) for name in ("dpl", "coop"))
    vectors = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        s.model.head.layers[-1].weight.zero_()
        s.model.head.layers[-1].bias.copy_(vectors.flatten())
        coop.model.head.sentences.vectors.copy_(vectors)
        for image in (s.batch.image[:1], s.batch.image):
            torch.testing.assert_close(s.model(image).logits, coop.model(image).logits, atol=1e-4, rtol=1e-5)


def dpl_loss(s: Any, rows: list[int], domain: list[int]) -> Tensor:
    """As a step makes it, without dropout."""
    part = Batch(s.batch.image[rows], torch.tensor([0, 1, 2, 0, 1, 2])[rows], torch.tensor(domain), torch.tensor(rows))
    out = s.method.forward(s.model.eval(), part)
    loss: Tensor = s.method.losses(out, part)["main"].detach()
    return loss


def test_each_domain_reads_the_prompt_that_it_wrote(clip_scene: Scenes) -> None:
    """By domain, one after the other; a label offset or a common prompt would give another number."""
    s = clip_scene("dpl", hparams=SHORT["dpl"])
    apart = dpl_loss(s, [0, 1, 2], [0] * 3), dpl_loss(s, [3, 4, 5], [2] * 3)
    both = dpl_loss(s, [*range(6)], [0, 0, 0, 2, 2, 2])
    torch.testing.assert_close(both, (apart[0] + apart[1]) / 2)
    assert not torch.allclose(dpl_loss(s, [*range(6)], [0, 2, 0, 2, 0, 2]), both, atol=1e-5)


def test_the_network_has_the_published_size_and_start(clip_scene: Scenes) -> None:
    s = clip_scene("dpl", hparams={"context": 16, "width": 512})
    sizes = [(24, 512), (512, 512), (512, 16 * 32)]  # the tiny CLIP has E 24, words of 32
    trained = trained_tensors(s.model)
    assert sum(t.numel() for t in trained.values()) == sum(a * b + b for a, b in sizes)
    assert 2 * (512 * 512 + 512) + 512 * 16 * 512 + 16 * 512 == 4_727_808  # the published one, by the same rule
    assert all((t == 0.01).all() for name, t in trained.items() if name.endswith("bias"))
    assert all(name.startswith("head.layers.") for name in trained)
    optimizer = make_optimizer(s.model, s.method)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["momentum"] == 0.1


# CLIPood


def test_margins_are_the_published_ones_up_to_a_constant(clip_scene: Scenes) -> None:
    """s (cos + margin (1 - <t_y, t_c>)) has the same cross-entropy."""
    s = clip_scene("clipood", hparams={"margin": 0.3})
    out, label, t = s.forward(), s.batch.label[:5], s.model.head.vectors
    rows = [out.logits[i] + s.model.head.scale.exp() * 0.3 * (1 - t[y] @ t.T) for i, y in enumerate(label.tolist())]
    expected = F.cross_entropy(torch.stack(rows), label)
    torch.testing.assert_close(s.method.losses(out, s.batch)["main"], expected, atol=1e-4, rtol=1e-5)
    plain = clip_scene("clipood", hparams={"margin": 0}).method.losses(out, s.batch)["main"]
    torch.testing.assert_close(plain, F.cross_entropy(out.logits[:5], label))


SHARES = (0.25580, 0.16746, 0.15348, 0.16746, 0.25580)  # Beta(1/2, 1/2) at five points


def test_the_weights_of_the_average_are_betas() -> None:
    for shares, wanted in ((beta_shares(4, 0.5), SHARES), (beta_shares(6, 1.0), [1 / 7] * 7)):
        found: list[float] = []  # weights of all points in the average that is updated by these shares
        for share in shares.tolist():
            found = [weight * (1 - share) for weight in found] + [share]
        assert found == pytest.approx(list(wanted), abs=1e-5)
    assert float((1 - beta_shares(5000, 0.5).double()[1:]).prod()) == pytest.approx(0.0064007, abs=1e-6)


def test_the_average_of_the_way_predicts(clip_scene: Scenes) -> None:
    s = clip_scene("clipood", steps=4, lr=1e-2)
    way = [{name: t.detach().clone() for name, t in trained_tensors(s.model).items()}]
    optimizer = make_optimizer(s.model, s.method)
    assert isinstance(optimizer, torch.optim.AdamW)
    for number in range(4):
        plain_step(s.method, s.model, optimizer, s.batch, number)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * (1 + math.cos(math.pi * number / 4)) / 2)
        way.append({name: t.detach().clone() for name, t in trained_tensors(s.model).items()})
    average = s.method.predicting(s.model)
    assert average.keys() == way[0].keys() >= {"head.weight", "head.constants.vectors"}
    for name, tensor in average.items():
        wanted = sum(w * point[name] for w, point in zip(SHARES, way, strict=True))
        torch.testing.assert_close(tensor, wanted, atol=2e-5, rtol=1e-4)
    assert not torch.equal(average["head.weight"], way[-1]["head.weight"])


# CLIPCEIL++


def test_clipceil_begins_as_clip_with_eighty_sentences_and_reads_earlier_depths(
    clip_scene: Scenes, tower: TextTower
) -> None:
    s = clip_scene("clipceil")
    vectors = torch.stack([tower.read([t.format(name) for t in IMAGENET]).mean(0) for name in NAMES])
    torch.testing.assert_close(s.forward().logits, cosines(s, vectors), atol=1e-4, rtol=1e-5)
    head = s.model.head
    with torch.no_grad():
        head.project[-1].weight.normal_()
        before = s.forward().logits
        features = s.model.read(s.batch.image)
        [tokens] = head._taps._seen
        torch.testing.assert_close(head(features), before)
        head._taps._seen = [tokens.flip(0)]
        assert not torch.allclose(head(features), before, atol=1e-4)


def test_equal_means_of_domains_have_no_variance() -> None:
    z = torch.tensor([[1.0, 2], [3, 4], [3, 4], [1, 2]])
    assert float(group_variance(z, torch.tensor([0, 0, 5, 5]))) == pytest.approx(0, abs=1e-7)
    assert float(group_variance(z, torch.tensor([0, 1, 1, 0]))) == pytest.approx(1 + 1)  # means 1, 3 and 2, 4


def test_images_at_their_sentences_have_the_right_directions() -> None:
    t, label, domain = torch.eye(6)[:3], torch.tensor([0, 1, 2, 0, -1]), torch.tensor([0, 1, 2, 2, 1])
    z = t[label.clamp(min=0)]
    assert float(direction_loss(z, t, label, domain)) == pytest.approx(0, abs=1e-6)
    assert float(direction_loss(-z, t, label, domain)) == pytest.approx(2, abs=1e-6)
    assert float(direction_loss(z, t, label, torch.zeros(5))) == 0  # one domain: no pairs


# Checkpoints


@pytest.mark.parametrize("name", ["duprg", "clipood", "clipceil"])
def test_a_checkpoint_alone_gives_the_trained_logits(name: str, clip_scene: Scenes) -> None:
    s = clip_scene(name, hparams=SHORT.get(name, {}))
    step(s)
    saved = {key: tensor.detach().clone() for key, tensor in trained_tensors(s.model).items()}
    other = make_method(s.method.config)
    other.saved = saved
    again = build_model(s.method.config, other, 3)
    load_trained(again, saved)
    torch.testing.assert_close(again(s.batch.image).logits, s.forward().logits)
    assert not any(isinstance(module, TextTower) for module in again.modules())


def test_a_folder_of_a_method_that_writes_prompts_is_refused_at_once(
    clip_folder: Path, image_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fit", str(image_folder), "--out", str(tmp_path / "m"), "--method", "dpl", "--backbone", str(clip_folder)]
    assert main(words) != 0
    assert "needs CLIP's text tower" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
