"""Read the scores of run folders, with their provenance, and select the checkpoint that a run reports.

    runs, skipped = read_runs(["runs"])       # any depth; broken and unfinished folders are in `skipped`, with a reason

A run belongs to a *setup*: all settings that affect its results except those that tables compare (method, data, unseen
domain, seed) and those chosen on source validation (learning rates, loss weights of the grid, hyper-parameters).
Results of two setups never share a table. Nor do two data sets with the same name: the second is called `name (2)`.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.common.untrusted import read_json
from patchgen.config import Settings
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.runs.folder import UNREADABLE, RunFolder, run_folders
from patchgen.runs.names import backbone_name, data_name, label_of, name_apart

if TYPE_CHECKING:
    import pandas as pd

CHOSEN = ("lr", "lr_module", "lr_backbone", "weight_decay", "dropout", "hparams", "lambda_ms", "lambda_sim")
COMPARED = ("data", "unseen", "task", "method", "pool", "tune", "benchmark", "seed", "select", "schedule",
            "tau", "lambda_conf", "refine", "rho_start", "spread", "swad", "swad_ratio", "swad_compat")  # fmt: skip
METRICS = {  # beside accuracy, in records since scikit-learn computes them: name -> heading
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "auroc": "AUROC",
    "average_precision": "average precision",
    "calibration_error": "calibration error",
}
PARTS = {"in": "80 % of the unseen domain", "all": "the whole unseen domain"}
RECORDED = {"mask": "mask", "mask before level": "mask_before_level", "by name": "by_name"}  # of a test record
TIDY = ("run", "method", "data", "seed", "lr", "backbone", "validation", "selected_by", "unseen", "metric",
        "checkpoint", "part", "value", "images")  # fmt: skip
ROW = ("path", "domain", "label", "group", "stage")  # columns of splits.csv and stages.csv that describe the data


# Rules that select a checkpoint: the evaluation with the highest score wins


def source_validation(record: Mapping[str, Any], metric: str) -> float:
    """Mean of the metric over the source domains' held-out parts: the usual default, without the unseen domain."""
    scores = [domain[metric] for domain in record["validation"].values()]
    return sum(scores) / len(scores)


def leave_one_out(record: Mapping[str, Any], metric: str) -> float:
    """Mean over the source domains of the metric on each, of a training without it and without the unseen domain."""
    scores = record["leave_one_out"].values()
    return float(sum(scores) / len(scores))


RULES: dict[str, Callable[[Mapping[str, Any], str], float]] = {
    "source-validation": source_validation,
    "leave-one-out": leave_one_out,
    "last": lambda record, metric: float(record["step"]),
    "oracle": lambda record, metric: float(record["oracle"][metric]),  # the UNSEEN domain: an upper bound, no result
}


def best(records: list[dict[str, Any]], rule: str, metric: str) -> dict[str, Any]:
    """The evaluation that a rule selects; ties keep the most recent."""
    return max(reversed(records), key=lambda record: RULES[rule](record, metric))


# Runs


@dataclass(frozen=True)
class Score:
    """One number of one run, as a share of one."""

    domain: str  # the unseen domain, or the session of a stream
    metric: str  # accuracy | all | known | unknown | f1 | validation | of METRICS; "mask: auroc", "by name: known"
    checkpoint: str  # selected | swad
    part: str  # in | all; transductive | held_out in a stream
    value: float
    images: int


@dataclass(frozen=True)
class Run:
    """A finished run and its numbers."""

    path: Path
    config: Any  # the settings of its task
    dataset: str
    domains: tuple[str, ...]  # all domains of the data; the sessions of a stream
    backbone: str  # the weights that were taken
    scores: tuple[Score, ...]
    rows: str  # digest of the data's rows: paths, domains, classes, groups
    validation: float = 0.0  # source validation of the selected checkpoint, or its score by leave-one-out
    data: str = ""  # fingerprint of the data, rows and files; empty in folders of earlier versions
    place: str = ""  # path of the data, if others have the same name

    @cached_property
    def label(self) -> str:
        return label_of(self.config)

    @property
    def selected_by(self) -> str:
        """The rule that selected the checkpoint."""
        return str(getattr(self.config, self.config.selection_rule))

    @cached_property
    def setup(self) -> tuple[tuple[str, str], ...]:
        """What two runs must have in common to be in the same table."""
        settings = {k: v for k, v in dataclasses.asdict(self.config).items() if k not in _not_in_setup(self.config)}
        settings |= {"task": self.config.task, "backbone": self.backbone}
        protocol = self._protocol()
        if protocol and all(settings[name] == value for name, value in protocol.items()):
            settings |= dict.fromkeys(protocol, "the data set's own")  # DomainNet's differ from the rest
        return tuple((name, str(value)) for name, value in settings.items())

    def _protocol(self) -> dict[str, int]:
        """Steps and evaluation interval specific to the data set; empty if there are none."""
        entry = None if self.config.task == "ccd" else BENCHMARKS.get(data_name(self.config).lower())
        return {"steps": entry.steps, "eval_every": entry.checkpoint_every} if entry else {}

    def setup_text(self) -> str:
        """The setup in readable form."""
        c, name = self.config, backbone_name(self.backbone)
        if c.task == "ccd":
            return f"{name}, {c.image_size} px, tuned: {c.tune}, {c.epochs} epochs per stage, batch {c.batch}"
        steps = dict(self.setup)["steps"]
        budget = f"{steps} steps" if steps.isdigit() else f"steps: {steps}"
        if c.steps == self._protocol().get("steps") and steps.isdigit():  # its interval alone is another
            budget += f" evaluated every {c.eval_every}"
        aug = "" if c.augment else ", no augmentation"
        cap = f", {c.val_images} validation images per source" if c.val_images else ""
        return f"{name}, {c.image_size} px, {budget}, {c.batch_per_domain} images per domain{aug}{cap}"


def _not_in_setup(config: Settings) -> tuple[str, ...]:
    """Settings that are compared, chosen, or without effect on the results."""
    if config.task == "ccd":
        compared = tuple(name for name in COMPARED if name != "tune")
        return (*config.not_hashed, *compared, *CHOSEN, "entropy_weight", "pseudo_labels")
    return (*config.not_hashed, *COMPARED, *CHOSEN)


@dataclass(frozen=True)
class Skipped:
    path: Path
    reason: str


def tidy(runs: Iterable[Run]) -> pd.DataFrame:
    """One row per number of the runs, with everything that a table selects, groups or cites."""
    import pandas as pd

    rows = [
        (str(run.path), run.label, run.dataset, run.config.seed, run.config.lr, run.backbone, run.validation,
         run.selected_by, *vars(score).values())
        for run in runs
        for score in run.scores
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=list(TIDY))


# Facts of one run folder


def backbone_of(run: RunFolder) -> str:
    """The weights that a run used, with `auto` resolved."""
    return str(read_json(run.path / "env.json")["backbone"]["resolved"])


def score_record(
    run: RunFolder, checkpoint: str = "selected", records: Iterable[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The test record of one of a finished run's reported checkpoints on the unseen domain.

    Args:
        records: Those of the run, if already read.

    Raises:
        ValueError: it has no such record.
    """
    for record in run.records() if records is None else records:
        if record.get("kind") == "test" and record["checkpoint"] == checkpoint:
            return record
    raise ValueError(f"{run.path} has no test record of its checkpoint {checkpoint!r}")


def selected_evaluation(run: RunFolder, records: Iterable[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The evaluation whose checkpoint was selected."""
    records = run.records() if records is None else records
    step = score_record(run, records=records)["step"]
    return next(record for record in records if record.get("kind") == "evaluation" and record["step"] == step)


def recorded_mask(run: str | Path) -> dict[str, dict[str, float]]:
    """Statistic -> the mask, trained and untrained, on the unseen domain; {} for a model folder or an older run."""
    folder = RunFolder(Path(run))
    if not folder.done or not (folder.path / "config.yaml").is_file():
        return {}
    mask = score_record(folder).get("mask", {}) if folder.config.task != "ccd" else {}
    pairs = {name: (mask[name], mask.get(f"untrained_{name}")) for name in mask if not name.startswith("untrained_")}
    return {name: {"trained": a, "untrained": b} for name, (a, b) in pairs.items() if b is not None}


def headline(run: RunFolder) -> float | None:
    """The main result of a run: accuracy on the whole unseen domain; for a stream All, the mean of its stages."""
    for record in run.records():
        if record["kind"] == "test" and record["checkpoint"] == "selected":
            return float(record["all"]["accuracy"])
        if record["kind"] == "average" and record["checkpoint"] == "kept":
            return float(record["transductive"]["all"])
    return None


# Reading


def read_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[Skipped]]:
    """All finished runs below the folders, each once, and those that were skipped.

    Raises:
        FileNotFoundError: a folder does not exist.
        ValueError: there is no run folder at all.
    """
    runs: list[Run] = []
    skipped: list[Skipped] = []
    folders = [Path(folder) for folder in folders]
    first: dict[tuple[str, str], Path] = {}
    for path in run_folders(folders):
        run = read_run(path)
        if isinstance(run, Skipped):
            skipped.append(run)
        elif (same := first.setdefault((path.name, str(run.config.result_settings())), path)) is not path:
            skipped.append(Skipped(path, f"the same run as {same}"))
        else:
            runs.append(run)
    if not runs and not skipped:
        named = ", ".join(map(str, folders)) or "nothing was given"
        raise ValueError(f"no run folder (with a config.yaml) below {named}; `patchgen train` makes one")
    return name_apart(runs), skipped


def read_run(path: Path) -> Run | Skipped:
    """The scores of a run folder, or why it has none."""
    run = RunFolder(path)
    if not (path / "config.yaml").is_file():
        return Skipped(path, "broken: it has no config.yaml")
    if not run.done:
        return Skipped(path, "not finished: the command that made it resumes from its last evaluation")
    try:
        run.refuse_links()
        config = run.settings
        return _read_stream(run, config) if config.task == "ccd" else _read_fold(run, config)
    except (*UNREADABLE, csv.Error) as error:
        text = str(error).strip().splitlines()[0][:500] if str(error).strip() else "records are missing"
        return Skipped(path, f"broken: {type(error).__name__}: {text}")


def _read_fold(run: RunFolder, config: Any) -> Run:
    records, backbone = run.records(), backbone_of(run)
    metric = score_record(run, records=records).get("metric", "accuracy")
    evaluation = selected_evaluation(run, records)
    scores = [Score(config.unseen, "validation", "selected", "all", source_validation(evaluation, metric), 0)]
    choose = leave_one_out if config.select == "leave-one-out" else source_validation
    for record in (r for r in records if r.get("kind") == "test"):
        scores += _scores_of(record, config.unseen)
    domains, rows = _image_list(run.path / "splits.csv")
    about = data_name(config), domains, backbone, tuple(scores), rows
    return Run(run.path, config, *about, validation=choose(evaluation, metric), data=_fingerprint(run))


def _scores_of(record: Mapping[str, Any], domain: str) -> Iterator[Score]:
    """The numbers of a test record: scores of both parts; of the whole, also the mask's statistics."""
    checkpoint, images = record["checkpoint"], record["all"]["images"]
    for part in PARTS:
        for name in ("accuracy", "f1", "known", "unknown", "taken_for_known", *METRICS):
            value = record[part].get(name)
            if value is not None:
                discovered = name == "accuracy" and record[part].get("known") is not None
                yield Score(domain, "all" if discovered else name, checkpoint, part, value, record[part]["images"])
    facts = {f"{kind}: {name}": value for kind, key in RECORDED.items() for name, value in record.get(key, {}).items()}
    facts |= {f"mask: {name} mask": record[f"{name}_mask"]["accuracy"] for name in ("true", "random")
              if f"{name}_mask" in record}  # fmt: skip
    for metric, value in facts.items():
        if value is not None:
            yield Score(domain, metric, checkpoint, "all", value, images)


def _read_stream(run: RunFolder, config: Any) -> Run:
    scores, sessions = [], []
    for record in (r for r in run.records("stage") if r["checkpoint"] == "kept" and r["stage"]):
        sessions.append(f"session {record['stage']}")
        for part in ("transductive", "held_out"):
            cells = {"all": record[part]["all"], **record[part]["hard"]} if part in record else {}
            scores += [Score(sessions[-1], metric, "selected", part, cell["accuracy"], cell["images"])
                       for metric, cell in cells.items()]  # fmt: skip
    if not scores:
        raise ValueError("no stage of the stream is recorded")
    stages = run.path / "stages.csv"
    rows = _image_list(stages)[1] if stages.is_file() else ""
    about = data_name(config), tuple(sessions), backbone_of(run), tuple(scores), rows
    return Run(run.path, config, *about, data=_fingerprint(run))


def _fingerprint(run: RunFolder) -> str:
    file = run.path / "env.json"
    return str(read_json(file).get("data", "")) if file.is_file() else ""


_image_lists: dict[bytes, tuple[tuple[str, ...], str]] = {}  # runs on the same data have the same file


def _image_list(path: Path) -> tuple[tuple[str, ...], str]:
    """The domains of a run's images, and a digest of the rows without their split."""
    content = path.read_bytes()
    key = hashlib.blake2b(content).digest()
    if key not in _image_lists:
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8"), newline="")))
        digest = hashlib.sha256()
        for row in rows:
            digest.update("\0".join(row.get(name, "") for name in ROW).encode() + b"\n")
        _image_lists[key] = tuple(dict.fromkeys(row.get("domain", "") for row in rows)), digest.hexdigest()
    return _image_lists[key]
