"""Read the scores of run folders, with their provenance.

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
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from patchgen.common.untrusted import read_json
from patchgen.config import Settings
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.runs.datasets import name_apart
from patchgen.runs.folder import UNREADABLE, RunFolder, run_folders
from patchgen.runs.selection import RULES

if TYPE_CHECKING:
    import pandas as pd

CHOSEN = ("lr", "lr_module", "lr_backbone", "weight_decay", "dropout", "hparams", "lambda_ms", "lambda_sim")
COMPARED = ("data", "unseen", "task", "method", "pool", "tune", "benchmark", "seed", "select", "schedule",
            "tau", "lambda_conf", "refine", "rho_start", "spread", "swad", "swad_ratio", "swad_compat")  # fmt: skip
STREAM_DATA = {
    **dict.fromkeys(("cifar100binary", "cifar100python", "cifar100"), "CIFAR-100"),
    **dict.fromkeys(("cub2002011", "cub"), "CUB"),
}
PAPER_DATA = {"pacs": "PACS", "vlcs": "VLCS", "officehome": "OfficeHome", "terraincognita": "TerraIncognita",
              "domainnet": "DomainNet", "histopantum": "HISTOPANTUM", "histocolon": "HISTOCOLON"}  # fmt: skip
BACKBONES = (  # part of the weights' name -> the paper's (backbone, pretraining)
    ("dinov2-small", "ViT-S/14", "DINOv2"), ("dinov2-base", "ViT-B/14", "DINOv2"),
    ("dinov2-large", "ViT-L/14", "DINOv2"), ("dino-vitb16", "ViT-B/16", "DINO"), ("vit-mae-base", "ViT-B/16", "MAE"),
    ("clip-vit-base-patch16", "ViT-B/16", "CLIP"), ("vit_tiny_patch16_224", "ViT-Ti/16", "ImageNet"),
)  # fmt: skip


# In addition to accuracy, in records since scikit-learn computes them: name -> heading
METRICS = {
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
MOST_FILES = 1000  # number of cached digests of image lists
ROW = ("path", "domain", "label", "group", "stage")  # columns of splits.csv and stages.csv that describe the data


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
    validation: float = 0.0  # source validation of the chosen checkpoint
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
        kept = {k: v for k, v in dataclasses.asdict(self.config).items() if k not in _left_out(self.config)}
        kept |= {"task": self.config.task, "backbone": self.backbone}
        own = self._protocol()
        if own and all(kept[name] == value for name, value in own.items()):  # DomainNet's differ from the rest
            kept |= dict.fromkeys(own, "the data set's own")
        return tuple((name, str(value)) for name, value in kept.items())

    def _protocol(self) -> dict[str, int]:
        """Steps and evaluation interval specific to the data set; empty if there are none."""
        entry = None if self.config.task == "ccd" else BENCHMARKS.get(data_name(self.config).lower())
        return {"steps": entry.steps, "eval_every": entry.checkpoint_every} if entry else {}

    def setup_text(self) -> str:
        """The setup in readable form."""
        c, name = self.config, " ".join(filter(None, paper_backbone(self.backbone))) or self.backbone
        if c.task == "ccd":
            return f"{name}, {c.image_size} px, tuned: {c.tune}, {c.epochs} epochs per stage, batch {c.batch}"
        steps = dict(self.setup)["steps"]
        budget = f"{steps} steps" if steps.isdigit() else f"steps: {steps}"
        if c.steps == self._protocol().get("steps") and steps.isdigit():  # its interval alone is another
            budget += f" evaluated every {c.eval_every}"
        aug = "" if c.augment else ", no augmentation"
        cap = f", {c.val_images} validation images per source" if c.val_images else ""
        return f"{name}, {c.image_size} px, {budget}, {c.batch_per_domain} images per domain{aug}{cap}"


@dataclass(frozen=True)
class Skipped:
    path: Path
    reason: str


def backbone_of(run: RunFolder) -> str:
    """The weights that a run used, with `auto` resolved."""
    return str(read_json(run.path / "env.json")["backbone"]["resolved"])


def score_record(run: RunFolder, checkpoint: str = "selected") -> dict[str, Any]:
    """The test record of one of a finished run's reported checkpoints on the unseen domain.

    Raises:
        ValueError: it has no such record.
    """
    return _score_record(run, run.records(), checkpoint)


def _score_record(run: RunFolder, records: Iterable[dict[str, Any]], checkpoint: str = "selected") -> dict[str, Any]:
    for record in records:
        if record.get("kind") == "test" and record["checkpoint"] == checkpoint:
            return record
    raise ValueError(f"{run.path} has no test record of its checkpoint {checkpoint!r}")


def recorded_mask(run: str | Path) -> dict[str, dict[str, float]]:
    """Statistic -> the mask, trained and untrained, on the unseen domain; {} for a model folder or an older run."""
    folder = RunFolder(Path(run))
    if not folder.done or not (folder.path / "config.yaml").is_file():
        return {}
    mask = score_record(folder).get("mask", {}) if folder.config.task != "ccd" else {}
    pairs = {name: (mask[name], mask.get(f"untrained_{name}")) for name in mask if not name.startswith("untrained_")}
    return {name: {"trained": a, "untrained": b} for name, (a, b) in pairs.items() if b is not None}


def chosen_evaluation(run: RunFolder) -> dict[str, Any]:
    """The evaluation whose checkpoint was selected."""
    records = run.records()
    return _evaluation_at(_score_record(run, records)["step"], records)


def _evaluation_at(step: int, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return next(record for record in records if record.get("kind") == "evaluation" and record["step"] == step)


def headline(run: RunFolder) -> float | None:
    """The main result of a run: accuracy on the whole unseen domain; for a stream All, the mean of its stages."""
    for record in run.records():
        if record["kind"] == "test" and record["checkpoint"] == "selected":
            return float(record["all"]["accuracy"])
        if record["kind"] == "average" and record["checkpoint"] == "kept":
            return float(record["transductive"]["all"])
    return None


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


def read_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[Skipped]]:
    """All finished runs below the folders, each once, and those that were skipped.

    Raises:
        FileNotFoundError: a folder does not exist.
        ValueError: there is no run folder at all.
    """
    runs: list[Run] = []
    skipped: list[Skipped] = []
    given = [Path(folder) for folder in folders]
    first: dict[tuple[str, str], Path] = {}
    for path in run_folders(given):
        run = read_run(path)
        if isinstance(run, Skipped):
            skipped.append(run)
        elif (same := first.setdefault((path.name, str(run.config.deciding())), path)) is not path:
            skipped.append(Skipped(path, f"the same run as {same}"))
        else:
            runs.append(run)
    if not runs and not skipped:
        named = ", ".join(map(str, given)) or "nothing was given"
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
    selected = _score_record(run, records)
    evaluation = _evaluation_at(selected["step"], records)
    validation = RULES["source-validation"](evaluation, selected.get("metric", "accuracy"))
    scores = [Score(config.unseen, "validation", "selected", "all", validation, 0)]
    for record in (r for r in records if r.get("kind") == "test"):
        scores += _scores_of(record, config.unseen)
    domains, rows = _data_rows(run.path / "splits.csv")
    about = data_name(config), domains, backbone, tuple(scores), rows
    return Run(run.path, config, *about, validation=validation, data=_fingerprint(run))


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
    rows = _data_rows(stages)[1] if stages.is_file() else _digest([])
    about = data_name(config), tuple(sessions), backbone_of(run), tuple(scores), rows
    return Run(run.path, config, *about, data=_fingerprint(run))


def _fingerprint(run: RunFolder) -> str:
    file = run.path / "env.json"
    return str(read_json(file).get("data", "")) if file.is_file() else ""


_data_seen: dict[bytes, tuple[tuple[str, ...], str]] = {}  # digest of a file -> what `_data_rows` says of it


def _data_rows(path: Path) -> tuple[tuple[str, ...], str]:
    """The domains of a run's images, and a digest of the rows; runs on the same data have the same file."""
    content = path.read_bytes()
    key = hashlib.blake2b(content).digest()
    if key not in _data_seen:
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8"), newline="")))
        if len(_data_seen) >= MOST_FILES:
            _data_seen.clear()
        domains = () if path.name == "stages.csv" else (row["domain"] for row in rows)  # a stream has none
        _data_seen[key] = tuple(dict.fromkeys(domains)), _digest(rows)
    return _data_seen[key]


def _digest(rows: list[dict[str, str]]) -> str:
    """A digest of the data, not of its split."""
    lines = ["\0".join(row.get(name, "") for name in ROW) for row in rows]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def data_name(config: Any) -> str:
    """The paper's name of a data set, the oracle set's, or that of the folder."""
    path = PurePath(config.data)
    oracle = re.search(r"(oracle-[a-z]+)(?:-[0-9a-f]{12})?(?:/images)?/?$", path.as_posix())
    if oracle:
        return oracle[1]
    if config.task == "ccd":
        name = STREAM_DATA.get(re.sub(r"[\W_]", "", path.name.casefold()), path.name)
        return name if config.schedule == "paper" else f"{name}, {PurePath(config.schedule).stem}"
    path = path.parent if path.name == "images" else path  # a set with masks next to the images
    known = config.benchmark or next((name for name, entry in BENCHMARKS.items() if entry.is_called(path.name)), "")
    return PAPER_DATA.get(known, known) or (path.stem if path.suffix == ".csv" else path.name)


def paper_backbone(resolved: str) -> tuple[str, str]:
    """The paper's names of a backbone and its pretraining; two empty strings for other backbones."""
    names = ((name, way) for part, name, way in BACKBONES if part in resolved)
    return next(names, ("", ""))


def label_of(config: Any) -> str:
    """The label of a run in tables: `lp-ln@mean`, `patchgen@full`, `patchgen, no L_conf, tau 0.5`."""
    usual = type(config)
    words = "".join(f"@{word}" for word in (config.pool, _other_tune(config)) if word)
    notes = []
    if "patchgen" in config.method and config.method != "patchgen-no-losses":
        names = ("lambda_ms", "lambda_conf", "lambda_sim")
        notes = [f"no L_{name.removeprefix('lambda_')}" for name in names if getattr(config, name) == 0]
        odd = [name for name in ("lambda_conf", "tau") if getattr(config, name) not in (0, getattr(usual, name))]
        notes += [f"{name} {getattr(config, name):g}" for name in odd]
    for name, word in (("refine", "refine"), ("rho_start", "rho"), ("spread", "spread")):
        if getattr(config, name) != getattr(usual, name):
            notes.append(f"{word} {getattr(config, name)}")
    if config.task != "ccd" and config.select != "source-validation":
        notes.append(f"checkpoint: {config.select}" + " (LOOKS AT THE UNSEEN DOMAIN)" * (config.select == "oracle"))
    return ", ".join([config.method + words, *notes])


def _other_tune(config: Any) -> str | None:
    return config.tune if config.task != "ccd" else None  # all runs of a stream setup tune the same


def _left_out(config: Settings) -> tuple[str, ...]:
    """Settings that are not part of the setup: compared, chosen, or without effect on the results."""
    stream = config.task == "ccd"
    own = ("entropy_weight", "pseudo_labels") if stream else ()
    return (*config.not_hashed, *(n for n in COMPARED if not (stream and n == "tune")), *CHOSEN, *own)
