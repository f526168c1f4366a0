"""The end of a stage: score the last and the selected epoch, chain the clusters, fit the replay of the next stage.

Everything here depends only on the state after the last epoch, so a run killed here simply repeats it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from patchgen.ccd.scores import Clusters, class_means, discover, entered, forgetting, nearest_centre, score
from patchgen.ccd.summary import averages, stage_line, summarize_stream
from patchgen.common.files import write_csv, write_text
from patchgen.draw.sheet import Tile, contact_sheet, write_sheet
from patchgen.methods.build import load_trained
from patchgen.model.classifier import trained_tensors
from patchgen.model.losses import mask_health
from patchgen.runs.tensors import load_tensors, save_tensors

if TYPE_CHECKING:
    from patchgen.ccd.loop import StreamTrainer, UnitFeatures

SHOWN = 24  # images on a sheet
COLUMNS = ("path", "group", "known_class", "distance")


def close_stage(trainer: StreamTrainer) -> None:
    """Score, select, chain, and continue with the next stage."""
    clock = time.monotonic()
    stage, kept = trainer.stage, trainer.kept.epoch
    last = trainer.config.epochs - 1
    records = []
    if kept != last:
        records.append(_Scorer(trainer, "last", last).record())
        load_trained(trainer.model, load_tensors(trainer.run.checkpoint("kept"))[0])
    if trainer.method.mixture:  # the selected weights get their own mixture: prompts and replay must fit them
        trainer.refit(trainer.stream.train[stage], stage)
    scorer = _Scorer(trainer, "kept", kept)
    records.insert(0, scorer.record())
    if kept == last:
        records.append(records[0] | {"checkpoint": "last"})
    scorer.write(records[0])
    records[0]["seconds"] = round(time.monotonic() - clock, 2)
    for record in records:
        trainer.run.append(record)
    trainer.say(stage_line(records[0]))
    trainer.chain |= scorer.chained()
    _save_stage(trainer, kept)
    write_text(trainer.run.path / "summary.md", summarize_stream(trainer.run, trainer.stream))
    trainer.next_stage()


def finish(trainer: StreamTrainer) -> None:
    """Record averages over the unlabelled stages; the run is then complete."""
    for checkpoint in ("kept", "last"):
        trainer.run.append({"kind": "average", **averages(trainer.run, checkpoint)})
    trainer.run.finish(summarize_stream(trainer.run, trainer.stream))


def _save_stage(trainer: StreamTrainer, epoch: int) -> None:
    """Save a complete checkpoint: the weights and the mixture that belongs to them."""
    tensors = {f"model.{k}": v for k, v in trained_tensors(trainer.model).items()}
    if trainer.pool.mixture is not None:
        tensors |= {f"mixture.{k}": v for k, v in trainer.pool.mixture.tensors().items()}
    facts = trainer.about | {"stage": trainer.stage, "epoch": epoch}
    save_tensors(trainer.run.checkpoint(f"stage-{trainer.stage}"), tensors, facts)


class _Scorer:
    """The clusters of a stage with the current model, and their scores."""

    def __init__(self, trainer: StreamTrainer, checkpoint: str, epoch: int) -> None:
        self.trainer, self.checkpoint, self.epoch = trainer, checkpoint, epoch
        self.stage, stream = trainer.stage, trainer.stream
        self.now = stream.train[self.stage]
        self.old = np.concatenate([stream.train[0], np.array(list(trainer.chain), dtype=np.int64)])
        self.held_out = entered(stream, trainer.scoring, self.stage)
        prompts = trainer.config.test_prompts
        self.features: UnitFeatures = trainer.features(self.now, prompts)
        self.unseen = trainer.features(self.held_out, prompts).unit if len(self.held_out) else None
        self.clusters = self._cluster()

    def _cluster(self) -> Clusters:
        trainer, unit = self.trainer, self.features.unit
        known = len(trainer.stream.known)
        count = trainer.classes(self.stage)
        if trainer.method.prototypes:  # clusters have learned centres, with the same ids in every stage
            assert trainer.model.prototypes is not None
            centres = torch.nn.functional.normalize(trainer.model.prototypes.detach()[:count], dim=1).cpu()
            return Clusters(nearest_centre(unit.cpu(), centres).numpy(), np.arange(count), centres)
        if self.stage == 0:
            centres = class_means(unit, trainer.target[self.now], known).cpu()
            return Clusters(trainer.target[self.now], np.arange(known), centres)
        c, chained = trainer.config, np.array(list(trainer.chain.values()), dtype=np.int64)
        labels = np.concatenate([trainer.target[trainer.stream.train[0]], chained])
        labelled = trainer.features(self.old, c.test_prompts).unit
        return discover(unit, labelled, labels, count, int(labels.max()) + 1, c.inits, c.seed)

    def chained(self) -> dict[int, int]:
        """Row -> cluster of this stage's images; the labelled stage has classes and needs none."""
        return dict(zip(self.now.tolist(), self.clusters.assignment.tolist(), strict=True)) if self.stage else {}

    def record(self) -> dict[str, Any]:
        stream, stage = self.trainer.stream, self.stage
        record: dict[str, Any] = {"kind": "stage", "stage": stage, "checkpoint": self.checkpoint, "epoch": self.epoch}
        record |= {"rule": self.trainer.config.selection, "classes": len(stream.stages.entered(stage))}
        record["clusters"] = len(self.clusters.ids)
        if stage:
            record["transductive"] = score(stream.label[self.now], self.clusters.assignment, stream.entry, stage)
        if self.unseen is not None:
            predicted = self.clusters.predict(self.unseen.cpu())
            record["held_out"] = score(stream.label[self.held_out], predicted, stream.entry, stage)
        earlier = [past for past in self.trainer.run.records("stage") if past["checkpoint"] == "kept"]
        for part in ("transductive", "held_out"):
            if part in record:
                past = [before[part] for before in earlier if part in before]
                record[part]["forgetting"] = forgetting(past, record[part])
        if self.features.mask is not None:
            record["mask"] = {name: float(value.mean()) for name, value in mask_health(self.features.mask).items()}
        return record

    def write(self, record: dict[str, Any]) -> None:
        """Write the stage's folder: the cluster of each image, and a contact sheet of each new class."""
        if not self.stage:
            return
        trainer, known = self.trainer, len(self.trainer.stream.known)
        folder = trainer.run.path / f"stage-{self.stage}"
        folder.mkdir(exist_ok=True)
        names = [trainer.stream.table.classes[c] for c in trainer.stream.known]
        distance = (self.features.unit.cpu() - self.clusters.centres[self._positions()]).norm(dim=1).numpy()
        images = StageImages(
            [trainer.stream.table.paths[row] for row in self.now], self.clusters.assignment, distance, tuple(names)
        )
        write_assignments(folder / "assignments.csv", images)
        new = sorted(set(self.clusters.assignment.tolist()) - set(trainer.chain.values()) - set(range(known)))
        write_sheets(folder, images, new, self._pixels, self._masks())
        record["found"] = {images.name(cluster): int((self.clusters.assignment == cluster).sum()) for cluster in new}

    def _positions(self) -> np.ndarray:
        place = {int(cluster): i for i, cluster in enumerate(self.clusters.ids)}
        return np.array([place[int(cluster)] for cluster in self.clusters.assignment])

    def _pixels(self, position: int) -> np.ndarray:
        """(S, S, 3) uint8 of an image of the stage."""
        return self.trainer.images.centre(self.now[position : position + 1])[0].permute(1, 2, 0).numpy()

    def _masks(self) -> np.ndarray | None:
        """(N, h, w)."""
        mask = self.features.mask
        return None if mask is None else mask.unflatten(1, self.trainer.model.grid).cpu().numpy()


@dataclass(frozen=True, eq=False)
class StageImages:
    """The images of a stage with their clusters."""

    paths: Sequence[str]
    cluster: np.ndarray  # (N,) ids; those below the number of known classes are known classes
    distance: np.ndarray  # (N,) to the cluster's centre, between unit features
    known: tuple[str, ...]

    def name(self, cluster: int) -> str:
        """The displayed name of a cluster."""
        return self.known[cluster] if cluster < len(self.known) else f"new-{cluster - len(self.known) + 1}"


def write_assignments(path: Path, images: StageImages) -> None:
    """One line per image: its cluster, whether that is a labelled class, and its distance from the centre."""
    rows = (
        (images.paths[i], images.name(cluster), "yes" if cluster < len(images.known) else "no", f"{distance:.4f}")
        for i, (cluster, distance) in enumerate(zip(images.cluster.tolist(), images.distance.tolist(), strict=True))
    )
    write_csv(path, COLUMNS, rows, people=True)


def write_sheets(
    folder: Path,
    images: StageImages,
    clusters: Sequence[int],
    pixels: Callable[[int], np.ndarray],
    masks: np.ndarray | None = None,
) -> None:
    """`new-1.png`, ...: the most central images of each of the clusters first.

    Args:
        clusters: ids of those to draw.
        pixels: the image (S, S, 3) at a position.
        masks: (N, h, w), if the method has masks.
    """
    for cluster in clusters:
        members = np.flatnonzero(images.cluster == cluster)
        nearest = members[np.argsort(images.distance[members], kind="stable")][:SHOWN]
        tiles = [
            Tile(pixels(i), Path(images.paths[i]).name, f"distance {images.distance[i]:.2f}",
                 None if masks is None else masks[i])
            for i in nearest
        ]  # fmt: skip
        shown = f", the {len(nearest)} most central first" if len(members) > len(nearest) else ", central ones first"
        number = "1 image" if len(members) == 1 else f"{len(members)} images"
        sheet = contact_sheet(images.name(cluster), tiles, subtitle=f"{number}{shown}")
        write_sheet(folder / f"{images.name(cluster)}.png", sheet)
