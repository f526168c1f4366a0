"""Human-readable output of a stream run: one line per stage during training, and ``summary.md`` in its folder."""

from __future__ import annotations

from typing import Any

import numpy as np

from patchgen.ccd.data import Stream
from patchgen.ccd.settings import StreamConfig
from patchgen.common.text import markdown, plus_minus
from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import backbone_of

PARTS = {"transductive": "images of the stage itself", "held_out": "images never trained on"}
KEPT_BY = {
    "session-validation": "accuracy of the known classes on held-out images of the classes so far",
    "last": "the last epoch of each stage",
}


def averages(run: RunFolder, checkpoint: str) -> dict[str, Any]:
    """Plain means over the unlabelled stages: {"checkpoint", "transductive": {"all", ...}, "held_out": {...}}."""
    records = [r for r in run.records("stage") if r["checkpoint"] == checkpoint and r["stage"]]
    means: dict[str, Any] = {"checkpoint": checkpoint}
    for part in PARTS:
        rows = [{name: cell["accuracy"] for name, cell in cells(r[part]).items()} for r in records if part in r]
        if rows:
            names = [name for name in rows[0] if all(name in row for row in rows)]
            means[part] = {name: float(np.mean([row[name] for row in rows])) for name in names}
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
    for part, meaning in PARTS.items():
        if part in record:
            accuracies = {"all": record[part]["all"], **record[part]["hard"]}
            return f"{line}; {meaning}: " + ", ".join(f"{name} {_percent(c)}" for name, c in accuracies.items())
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
        lines += ["", f"## {part.replace('_', ' ').capitalize()}: {meaning}", "", _table(run, part)]
        lines += ["", "By the stage at which a class entered (kept epoch), and its fall from its best stage:", ""]
        lines.append(_groups(run, part, stages))
    return "\n".join(lines) + "\n"


def _table(run: RunFolder, part: str) -> str:
    names, rows = ("all", "known", "unknown", "soft_known", "soft_unknown"), []
    for record in (r for r in run.records("stage") if part in r):
        scores = cells(record[part])
        shown = [str(record[name]) for name in ("stage", "checkpoint", "epoch", "clusters")]
        end = [f"{record[part]['nmi']:.3f}", str(scores["all"]["images"])]
        rows.append([*shown, *(_percent(scores.get(name)) for name in names), *end])
    for record in (r for r in run.records("average") if part in r):
        means = [f"{100 * record[part][n]:.1f}" if n in record[part] else "" for n in names]
        rows.append(["mean", record["checkpoint"], "", "", *means, "", ""])
    head = ["stage", "checkpoint", "epoch", "clusters", "A", "K", "U", "K soft", "U soft", "NMI", "images"]
    return markdown(head, rows)


def _groups(run: RunFolder, part: str, stages: int) -> str:
    rows = []
    for record in (r for r in run.records("stage") if part in r and r["checkpoint"] == "kept"):
        groups, falls = record[part]["groups"], record[part]["forgetting"]
        row = [str(record["stage"])]
        for group in map(str, range(stages + 1)):
            row.append(_percent(groups.get(group)) + (f" (fell {100 * falls[group]:.1f})" if group in falls else ""))
        rows.append(row)
    return markdown(["stage", *(f"entered at {g}" for g in range(stages + 1))], rows)


def _percent(cell: dict[str, float] | None) -> str:
    return "" if cell is None else plus_minus(100 * cell["accuracy"], 100 * cell["error"])
