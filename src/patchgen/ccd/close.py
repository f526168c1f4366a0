"""The end of a stage: score the last and the selected epoch, chain the clusters, fit the replay of the next stage.

Everything here depends only on the state after the last epoch, so a run killed here simply repeats it.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from patchgen.ccd.data import Stream
from patchgen.ccd.scores import Clusters, class_means, discover, forgetting, score
from patchgen.ccd.settings import StreamConfig
from patchgen.common.files import write_csv, write_text
from patchgen.common.text import markdown, plus_minus
from patchgen.discovery.kmeans import nearest
from patchgen.draw.sheet import Tile, contact_sheet, write_sheet
from patchgen.methods.build import load_trained
from patchgen.model.classifier import trained_tensors
from patchgen.model.losses import mask_health
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import backbone_of
from patchgen.runs.tensors import load_tensors, save_tensors

if TYPE_CHECKING:
    from PIL.Image import Image

    from patchgen.ccd.loop import StreamTrainer

SHOWN = 24  # images on a sheet
PARTS = {"transductive": "images of the stage itself", "held_out": "images never trained on"}
KEPT_BY = {
    "session-validation": "accuracy of the known classes on held-out images of the classes so far",
    "last": "the last epoch of each stage",
}


def close_stage(trainer: "StreamTrainer") -> None:
    """Score, select, chain, and continue with the next stage."""
    clock = time.monotonic()
    stage, kept, run = trainer.stage, trainer.kept, trainer.run
    last = trainer.config.epochs - 1
    records = []
    if kept != last:
        records.append(_Scorer(trainer, "last", last).record())
        load_trained(trainer.model, load_tensors(run.checkpoint("kept"))[0])
    if trainer.method.mixture:  # the selected weights get their own mixture: prompts and replay must fit them
        trainer.refit(trainer.stream.train[stage], stage)
    scorer = _Scorer(trainer, "kept", kept)
    records.insert(0, scorer.record())
    if kept == last:
        records.append(records[0] | {"checkpoint": "last"})
    if stage:
        records[0]["found"] = scorer.write()
    records[0]["seconds"] = round(time.monotonic() - clock, 2)
    for record in records:
        run.append(record)
    trainer.say(stage_line(records[0]))
    if stage:  # the labelled stage has classes and needs no clusters
        trainer.chain |= dict(zip(scorer.rows.tolist(), scorer.clusters.assignment.tolist(), strict=True))
    _save_stage(trainer, kept)
    write_text(run.path / "summary.md", summarize_stream(run, trainer.stream))
    trainer.next_stage()


def finish(trainer: "StreamTrainer") -> None:
    """Record averages over the unlabelled stages; the run is then complete."""
    for checkpoint in ("kept", "last"):
        trainer.run.append({"kind": "average", **averages(trainer.run, checkpoint)})
    trainer.run.finish(summarize_stream(trainer.run, trainer.stream))


def _save_stage(trainer: "StreamTrainer", epoch: int) -> None:
    """Save a complete checkpoint: the weights and the mixture that belongs to them."""
    tensors = {f"model.{k}": v for k, v in trained_tensors(trainer.model).items()}
    if trainer.pool.mixture is not None:
        tensors |= {f"mixture.{k}": v for k, v in trainer.pool.mixture.tensors().items()}
    facts = trainer.about | {"stage": trainer.stage, "epoch": epoch}
    save_tensors(trainer.run.checkpoint(f"stage-{trainer.stage}"), tensors, facts)


class _Scorer:
    """The clusters of a stage with the current model, and their scores."""

    def __init__(self, trainer: "StreamTrainer", checkpoint: str, epoch: int) -> None:
        self.trainer, self.checkpoint, self.epoch, self.stage = trainer, checkpoint, epoch, trainer.stage
        self.rows = trainer.stream.train[self.stage]
        self.features, self.mask = trainer.features(self.rows, trainer.config.test_prompts)
        self.clusters = self._cluster()

    def _cluster(self) -> Clusters:
        trainer, config = self.trainer, self.trainer.config
        known, count = len(trainer.stream.known), trainer.classes(self.stage)
        if trainer.model.prototypes is not None:  # learned centres, with the same ids in every stage
            centres = torch.nn.functional.normalize(trainer.model.prototypes.detach()[:count], dim=1).cpu()
            return Clusters(nearest(self.features.cpu(), centres)[1].numpy(), np.arange(count), centres)
        if self.stage == 0:
            target = trainer.target[self.rows]
            return Clusters(target, np.arange(known), class_means(self.features, target, known).cpu())
        first = trainer.stream.train[0]
        old = np.concatenate([first, np.array(list(trainer.chain), dtype=np.int64)])
        labels = np.concatenate([trainer.target[first], np.array(list(trainer.chain.values()), dtype=np.int64)])
        labelled, _ = trainer.features(old, config.test_prompts)
        return discover(self.features, labelled, labels, count, int(labels.max()) + 1, config.inits, config.seed)

    def record(self) -> dict[str, Any]:
        trainer, stream, stage = self.trainer, self.trainer.stream, self.stage
        entry = stream.stages.entry
        record: dict[str, Any] = {"kind": "stage", "stage": stage, "checkpoint": self.checkpoint, "epoch": self.epoch}
        record |= {"rule": trainer.config.selection, "classes": len(stream.stages.entered(stage))}
        record["clusters"] = len(self.clusters.ids)
        if stage:
            record["transductive"] = score(stream.label[self.rows], self.clusters.assignment, entry, stage)
        if len(held_out := stream.entered(trainer.scoring, stage)):
            features, _ = trainer.features(held_out, trainer.config.test_prompts)
            predicted = self.clusters.predict(features.cpu())
            record["held_out"] = score(stream.label[held_out], predicted, entry, stage)
        earlier = [past for past in trainer.run.records("stage") if past["checkpoint"] == "kept"]
        for part in PARTS:
            if part in record:
                record[part]["forgetting"] = forgetting([past[part] for past in earlier if part in past], record[part])
        if self.mask is not None:
            record["mask"] = {name: float(value.mean()) for name, value in mask_health(self.mask).items()}
        return record

    def write(self) -> dict[str, int]:
        """Write the cluster of each image, and a contact sheet of each new class; returns their numbers of images."""
        trainer, clusters, table = self.trainer, self.clusters, self.trainer.stream.table
        folder = trainer.run.path / f"stage-{self.stage}"
        folder.mkdir(exist_ok=True)
        known = trainer.stream.known
        names = {i: table.classes[c] for i, c in enumerate(known)}
        names |= {i: f"new-{i - len(known) + 1}" for i in clusters.ids.tolist() if i >= len(known)}
        centres = clusters.centres[np.searchsorted(clusters.ids, clusters.assignment)]
        distance = (self.features.cpu() - centres).norm(dim=1).numpy()
        rows = [
            (table.paths[row], names[cluster], "yes" if cluster < len(known) else "no", f"{gap:.4f}")
            for row, cluster, gap in zip(self.rows, clusters.assignment.tolist(), distance, strict=True)
        ]
        write_csv(folder / "assignments.csv", ("path", "group", "known_class", "distance"), rows, people=True)
        sizes = {}
        for cluster in sorted(set(clusters.assignment.tolist()) - {*range(len(known)), *trainer.chain.values()}):
            members = np.flatnonzero(clusters.assignment == cluster)
            members = members[np.argsort(distance[members], kind="stable")]
            write_sheet(folder / f"{names[cluster]}.png", self._sheet(names[cluster], members, distance))
            sizes[names[cluster]] = len(members)
        return sizes

    def _sheet(self, name: str, members: np.ndarray, distance: np.ndarray) -> "Image":
        """The images of a cluster, whose positions in the stage are ordered by their distance from its centre."""
        trainer = self.trainer
        masks = None if self.mask is None else self.mask.unflatten(1, trainer.model.grid).cpu().numpy()  # (N, h, w)
        tiles = []
        for i in members[:SHOWN]:
            pixels = trainer.images.centre(self.rows[i : i + 1])[0].permute(1, 2, 0).numpy()
            file = Path(trainer.stream.table.paths[self.rows[i]]).name
            tiles.append(Tile(pixels, file, f"distance {distance[i]:.2f}", None if masks is None else masks[i]))
        shown = f", the {SHOWN} most central first" if len(members) > SHOWN else ", central ones first"
        number = "1 image" if len(members) == 1 else f"{len(members)} images"
        return contact_sheet(name, tiles, subtitle=f"{number}{shown}")


# What a person reads: lines during training, and summary.md in the run folder


def averages(run: RunFolder, checkpoint: str) -> dict[str, Any]:
    """Plain means over the unlabelled stages: {"checkpoint", "transductive": {"all", ...}, "held_out": {...}}."""
    records = [r for r in run.records("stage") if r["checkpoint"] == checkpoint and r["stage"]]
    means: dict[str, Any] = {"checkpoint": checkpoint}
    for part in PARTS:
        if rows := [cells(record[part]) for record in records if part in record]:
            names = [name for name in rows[0] if all(name in row for row in rows)]
            means[part] = {name: float(np.mean([row[name]["accuracy"] for row in rows])) for name in names}
    return means


def cells(scores: dict[str, Any]) -> dict[str, dict[str, float]]:
    """all, known, unknown (hard) and soft_known, soft_unknown."""
    return {"all": scores["all"], **scores["hard"], **{f"soft_{name}": cell for name, cell in scores["soft"].items()}}


def epoch_line(record: dict[str, Any]) -> str:
    """One epoch in plain words."""
    words = [f"{name} {value:.3f}" for name, value in record["train"].items() if name in ("info_nce", "sup_con")]
    if "mixture" in record:
        words.append(f"mixture of {record['mixture']['components']} components")
    if "validation" in record:
        words.append(f"held-out known accuracy {record['validation']['known']:.3f}")
    return f"epoch {record['epoch']}: {', '.join(words)} ({record['seconds']:.0f} s)"


def stage_line(record: dict[str, Any]) -> str:
    """The scores of a stage in one line."""
    line = f"stage {record['stage']}: kept epoch {record['epoch']}"
    for part in [part for part in PARTS if part in record][:1]:
        accuracies = {"all": record[part]["all"], **record[part]["hard"]}
        line += f"; {PARTS[part]}: " + ", ".join(f"{name} {_percent(cell)}" for name, cell in accuracies.items())
    return line


def summarize_stream(run: RunFolder, stream: Stream) -> str:
    """The text of ``summary.md``, for the stages completed so far."""
    config, stages = run.settings, len(stream.stages) - 1
    assert isinstance(config, StreamConfig)
    done = max((record["stage"] for record in run.records("stage")), default=-1)
    more = ", ".join(f"{int((stream.stages.entry == stage).sum())} more" for stage in range(1, stages + 1))
    lines = [
        f"# {config.method} on a stream of {stages} unlabelled stages",
        "",
        f"- data: {len(stream.table)} images; {len(stream.known)} labelled classes, then {more}",
        f"- backbone {backbone_of(run)}, {config.image_size} px, tuned: {config.tune}; {config.epochs} epochs per "
        f"stage, batch {config.batch}, lr {config.lr:g}, seed {config.seed}",
        f"- epoch kept by: {KEPT_BY[config.selection]}",
        f"- number of clusters: {'estimated by the mixture' if config.components == 'grow' else 'given'}",
        *([f"- NOT FINISHED: {done} of {stages} unlabelled stages are done"] if done < stages else []),
        "",
        "Accuracy in per cent ± its binomial error, under one match of clusters to classes. A: all images; K and U: "
        "known = labelled classes of stage 0, U the rest; soft: known = classes of all earlier stages.",
    ]
    for part, meaning in PARTS.items():
        lines += ["", f"## {part.replace('_', ' ').capitalize()}: {meaning}", "", *_tables(run, part, stages)]
    return "\n".join(lines) + "\n"


def _tables(run: RunFolder, part: str, stages: int) -> list[str]:
    """The scores of each stage, and those of the classes by the stage at which they entered."""
    names, rows, groups = ("all", "known", "unknown", "soft_known", "soft_unknown"), [], []
    for record in (r for r in run.records("stage") if part in r):
        scores, falls = cells(record[part]), record[part]["forgetting"]
        shown = [str(record[name]) for name in ("stage", "checkpoint", "epoch", "clusters")]
        end = [f"{record[part]['nmi']:.3f}", str(scores["all"]["images"])]
        rows.append([*shown, *(_percent(scores.get(name)) for name in names), *end])
        fell = {group: f" (fell {100 * fall:.1f})" for group, fall in falls.items()}
        by_group = [_percent(record[part]["groups"].get(g)) + fell.get(g, "") for g in map(str, range(stages + 1))]
        groups += [[shown[0], *by_group]] if record["checkpoint"] == "kept" else []
    for record in (r for r in run.records("average") if part in r):
        means = [f"{100 * record[part][n]:.1f}" if n in record[part] else "" for n in names]
        rows.append(["mean", record["checkpoint"], "", "", *means, "", ""])
    head = ["stage", "checkpoint", "epoch", "clusters", "A", "K", "U", "K soft", "U soft", "NMI", "images"]
    text = "By the stage at which a class entered (kept epoch), and its fall from its best stage:"
    return [markdown(head, rows), "", text, "",
            markdown(["stage", *(f"entered at {g}" for g in range(stages + 1))], groups)]  # fmt: skip


def _percent(cell: dict[str, float] | None) -> str:
    return "" if cell is None else plus_minus(100 * cell["accuracy"], 100 * cell["error"])
