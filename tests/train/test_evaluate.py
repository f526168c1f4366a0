"""Scoring against a plain loop over single images, and a frozen backbone that reads each image once."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score

from patchgen.config import Config
from patchgen.data.augment import normalize
from patchgen.data.images import ImageStore
from patchgen.data.table import read_table
from patchgen.methods import make_method
from patchgen.methods.build import build_model
from patchgen.model.device import SingleDevice
from patchgen.model.losses import mask_health
from patchgen.train import evaluate
from patchgen.train.evaluate import Evaluator, Reader

SIZE = 28  # 2 x 2 patches of the tiny backbone


class CountingStore(ImageStore):
    """Counts how often each row was asked for."""

    def load(self, rows: np.ndarray) -> torch.Tensor:  # type: ignore[override]
        self.asked = getattr(self, "asked", Counter())
        self.asked.update(np.asarray(rows).tolist())
        return super().load(rows)


def make(folder: Path, method: str, batch: int = 128) -> Evaluator:
    table = read_table(folder)
    config = Config(data=str(folder), unseen="studio", backbone="tiny", image_size=SIZE, method=method)
    model = build_model(config, make_method(config), len(table.classes))
    store = CountingStore([table.file(i) for i in range(len(table))], SIZE, None)
    fabric = SingleDevice("cpu")
    return Evaluator(Reader(fabric, model, store), table.label, len(table.classes), batch)


ROWS = np.array([0, 4, 11, 29, 33, 41, 55, 60, 71, 89, 17])


@pytest.mark.parametrize("method", ["lp", "lp-ln", "patchgen"])
@pytest.mark.parametrize("batch", [4, 128])
def test_scores_equal_a_plain_loop(method: str, batch: int, image_folder: Path) -> None:
    evaluator = make(image_folder, method, batch)
    model, store = evaluator.reader.model, evaluator.reader.store
    confusion, losses, health, answers = np.zeros((3, 3), dtype=int), [], [], []
    for row in ROWS.tolist():
        image = normalize(store.load(np.array([row])).float() / 255, model.backbone.mean, model.backbone.std)
        with torch.no_grad():
            out = model(image)
        true = int(evaluator.label[row])
        answers.append((true, int(out.logits[0].argmax())))
        confusion[answers[-1]] += 1
        losses.append(-float(out.logits[0].log_softmax(0)[true]))
        health.append({k: float(v) for k, v in mask_health(out.mask).items()} if out.mask is not None else {})
    ticks: list[int] = []
    found = evaluator(ROWS, ticks.append)
    assert found.confusion.tolist() == confusion.tolist() and found.confusion.dtype == np.int64
    assert found.means()["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert set(found.mask) == set(health[0])
    for name, value in found.mask.items():
        assert value == pytest.approx(np.mean([h[name] for h in health]), abs=1e-5)
    assert sum(ticks) == len(ROWS) and max(ticks) <= batch
    assert found.record() == {
        "accuracy": pytest.approx(np.trace(confusion) / len(ROWS)),
        "balanced_accuracy": pytest.approx(balanced_accuracy_score(*zip(*answers, strict=True))),
        "macro_f1": pytest.approx(f1_score(*zip(*answers, strict=True), average="macro")),
        "f1": pytest.approx(f1_score(*zip(*answers, strict=True), average="macro")),
        "images": len(ROWS), "loss": found.means()["loss"], **({"mask": found.mask} if found.mask else {}),
    }  # fmt: skip


@pytest.mark.parametrize(("method", "times"), [("lp", 1), ("lp-ln", 3)])
def test_a_frozen_backbone_reads_each_image_once(method: str, times: int, image_folder: Path) -> None:
    evaluator = make(image_folder, method, batch=4)
    first = evaluator(ROWS)
    evaluator(ROWS[::-1])
    again = evaluator(ROWS)
    store = evaluator.reader.store
    assert isinstance(store, CountingStore) and store.asked == dict.fromkeys(ROWS.tolist(), times)
    assert again.confusion.tolist() == first.confusion.tolist() and again.means()["loss"] == pytest.approx(
        first.means()["loss"], abs=1e-6
    )


def test_repeated_rows_are_read_once_and_in_their_order(image_folder: Path) -> None:
    reader = make(image_folder, "lp").reader
    features = reader(np.array([7, 3, 7, 7]))
    assert isinstance(reader.store, CountingStore) and reader.store.asked == {3: 1, 7: 1}
    assert torch.equal(features[0], features[2]) and torch.equal(features[0], features[3])
    torch.testing.assert_close(reader(np.array([3, 7])), features[[1, 0]], rtol=0, atol=0)
    torch.testing.assert_close(features[1:2], reader.model.read(reader.images(np.array([3]))), atol=1e-5, rtol=0)


def test_memory_is_limited(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "MEMORY", 64 * 4 * 3)  # bytes of three float32 vectors: the second batch fills it
    evaluator = make(image_folder, "lp", batch=2)
    assert evaluator(ROWS).confusion.tolist() == evaluator(ROWS).confusion.tolist()
    assert evaluator.reader.store.asked == {row: 1 if row in ROWS[:4] else 2 for row in ROWS.tolist()}  # type: ignore[attr-defined]


def test_no_rows_score_nothing(image_folder: Path) -> None:
    found = make(image_folder, "patchgen")(np.array([], dtype=np.int64))
    assert found.confusion.sum() == 0 and found.means()["loss"] == 0 and found.record()["images"] == 0


def test_masks_are_scored_against_the_truth_and_can_be_replaced_by_it(image_folder: Path) -> None:
    evaluator = make(image_folder, "patchgen")
    evaluator.truth = np.random.default_rng(0).random((90, 4)) < 0.5
    evaluator.truth[ROWS[0]] = True  # ranking is undefined there: AUROC leaves it out
    learned, given = evaluator(ROWS), evaluator(ROWS, mask="true")
    assert set(learned.mask) == {"mean", "spread", "weak", "strong", "auroc", "iou", "error", "kept"}
    perfect = {"auroc": 1, "error": 0}
    assert {name: given.mask[name] for name in perfect} == pytest.approx(perfect)
    inside = evaluator.truth[ROWS].mean()
    assert given.mask["mean"] == pytest.approx(inside) and learned.mask["mean"] != pytest.approx(inside)
    random = evaluator.given_mask(ROWS, "random")
    assert random is not None and random.sum(1).tolist() == evaluator.truth[ROWS].sum(1).tolist()
    assert torch.equal(random, evaluator.given_mask(ROWS, "random"))  # type: ignore[arg-type]
