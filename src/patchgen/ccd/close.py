"""The end of a stage: score the last and the selected epoch, chain the clusters, fit the replay of the next stage.

Everything here depends only on the state after the last epoch, so a run killed here simply repeats it.
"""

from __future__ import annotations

import time
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
    from PIL.Image import Image

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
        trainer, clusters = self.trainer, self.clusters
        folder = trainer.run.path / f"stage-{self.stage}"
        folder.mkdir(exist_ok=True)
        table, known = trainer.stream.table, trainer.stream.known
        names = {i: table.classes[c] for i, c in enumerate(known)}
        names |= {i: f"new-{i - len(known) + 1}" for i in clusters.ids.tolist() if i >= len(known)}
        place = {cluster: i for i, cluster in enumerate(clusters.ids.tolist())}
        centres = clusters.centres[[place[cluster] for cluster in clusters.assignment.tolist()]]
        distance = (self.features.unit.cpu() - centres).norm(dim=1).numpy()
        paths = [table.paths[row] for row in self.now]
        rows = [(path, names[cluster], "yes" if cluster < len(known) else "no", f"{gap:.4f}")
                for path, cluster, gap in zip(paths, clusters.assignment.tolist(), distance, strict=True)]  # fmt: skip
        write_csv(folder / "assignments.csv", COLUMNS, rows, people=True)
        record["found"] = {}
        old = {*range(len(known)), *trainer.chain.values()}
        for cluster in sorted(set(clusters.assignment.tolist()) - old):
            members = np.flatnonzero(clusters.assignment == cluster)
            members = members[np.argsort(distance[members], kind="stable")]
            sheet = self._sheet(names[cluster], members, distance)
            write_sheet(folder / f"{names[cluster]}.png", sheet)
            record["found"][names[cluster]] = len(members)

    def _sheet(self, name: str, members: np.ndarray, distance: np.ndarray) -> Image:
        """The images of a cluster, whose positions in the stage are ordered by their distance from its centre."""
        trainer, mask = self.trainer, self.features.mask
        masks = None if mask is None else mask.unflatten(1, trainer.model.grid).cpu().numpy()  # (N, h, w)
        tiles = []
        for i in members[:SHOWN]:
            pixels = trainer.images.centre(self.now[i : i + 1])[0].permute(1, 2, 0).numpy()
            file = Path(trainer.stream.table.paths[self.now[i]]).name
            tiles.append(Tile(pixels, file, f"distance {distance[i]:.2f}", None if masks is None else masks[i]))
        shown = f", the {SHOWN} most central first" if len(members) > SHOWN else ", central ones first"
        number = "1 image" if len(members) == 1 else f"{len(members)} images"
        return contact_sheet(name, tiles, subtitle=f"{number}{shown}")
