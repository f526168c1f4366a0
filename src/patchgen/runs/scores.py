"""One tidy frame of the scores of runs, with their provenance; and the rules by which a run's checkpoint is selected.

A row is one number of one run (`FACTS` and `SCORE` name the columns). Runs with the same `setup` share a table: all
settings that affect results except those that tables compare and those chosen on source validation. Two data sets with
the same name do not: the second is called `name (2)`.
"""

import csv
import dataclasses
import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from patchgen.common.text import first_line
from patchgen.common.untrusted import read_json
from patchgen.data.benchmarks import BENCHMARKS
from patchgen.runs.folder import UNREADABLE, RunFolder, run_folders

if TYPE_CHECKING:
    import pandas as pd

CHOSEN = ("lr", "lr_module", "lr_backbone", "weight_decay", "dropout", "hparams", "lambda_ms", "lambda_sim")
COMPARED = ("data", "unseen", "task", "method", "pool", "tune", "benchmark", "seed", "select", "schedule",
            "tau", "lambda_conf", "refine", "rho_start", "spread", "swad", "swad_ratio", "swad_compat")  # fmt: skip
METRICS = {  # beside accuracy, in all but the oldest records: name -> heading
    "balanced_accuracy": "balanced accuracy", "macro_f1": "macro F1", "auroc": "AUROC",
    "average_precision": "average precision", "calibration_error": "calibration error",
}  # fmt: skip
PARTS = {"in": "80 % of the unseen domain", "all": "the whole unseen domain"}
RECORDED = {"mask": "mask", "mask before level": "mask_before_level", "by name": "by_name"}  # of a test record
# Of the run: folder, its name, settings, their task, names of method and data, domains of the data (sessions of a
# stream), digest of the data's rows, fingerprint (empty in folders of earlier versions), path of the data if others
# have the same name, weights, setup as a key and in words, source validation of the selected checkpoint.
FACTS = ("path", "run", "config", "task", "method", "data", "domains", "rows", "fingerprint", "place", "backbone",
         "setup", "setup_text", "seed", "lr", "selected_by", "validation")  # fmt: skip
# Of the number: unseen domain or session; metric (accuracy | all | known | unknown | f1 | validation | of METRICS |
# "mask: auroc" | "by name: known"); selected | swad; in | all, in a stream transductive | held_out; share of one.
SCORE = ("unseen", "metric", "checkpoint", "part", "value", "images")
ROW = ("path", "domain", "label", "group", "stage")  # columns of splits.csv and stages.csv that describe the data
STREAM_DATA = {"cifar100binary": "CIFAR-100", "cifar100python": "CIFAR-100", "cifar100": "CIFAR-100",
               "cub2002011": "CUB", "cub": "CUB"}  # fmt: skip
PAPER_DATA = {"pacs": "PACS", "vlcs": "VLCS", "officehome": "OfficeHome", "terraincognita": "TerraIncognita",
              "domainnet": "DomainNet", "histopantum": "HISTOPANTUM", "histocolon": "HISTOCOLON"}  # fmt: skip
BACKBONES = {  # part of the weights' name -> the paper's (backbone, pretraining)
    "dinov2-small": ("ViT-S/14", "DINOv2"), "dinov2-base": ("ViT-B/14", "DINOv2"),
    "dinov2-large": ("ViT-L/14", "DINOv2"), "dino-vitb16": ("ViT-B/16", "DINO"), "vit-mae-base": ("ViT-B/16", "MAE"),
    "clip-vit-base-patch16": ("ViT-B/16", "CLIP"), "vit_tiny_patch16_224": ("ViT-Ti/16", "ImageNet"),
}  # fmt: skip


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


# Facts of one run folder


def backbone_of(run: RunFolder) -> str:
    """The weights that a run used, with `auto` resolved."""
    return str(read_json(run.path / "env.json")["backbone"]["resolved"])


def score_record(
    run: RunFolder, checkpoint: str = "selected", records: Iterable[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The test record of a reported checkpoint, among the records if already read; ValueError if there is none."""
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
    folder = RunFolder(run)
    if not folder.done or not (folder.path / "config.yaml").is_file() or folder.settings.task == "ccd":
        return {}
    mask = score_record(folder).get("mask", {})
    return {name: {"trained": mask[name], "untrained": untrained} for name in mask
            if (untrained := mask.get(f"untrained_{name}")) is not None}  # fmt: skip


def headline(run: RunFolder) -> float | None:
    """The main result of a run: accuracy on the whole unseen domain; for a stream All, the mean of its stages."""
    for record in run.records():
        if record["kind"] == "test" and record["checkpoint"] == "selected":
            return float(record["all"]["accuracy"])
        if record["kind"] == "average" and record["checkpoint"] == "kept":
            return float(record["transductive"]["all"])
    return None


# What runs, their data sets and their backbones are called in tables


def data_name(config: Any) -> str:
    """The paper's name of a data set, the oracle set's, or that of the folder."""
    path = PurePath(config.data)
    if oracle := re.search(r"(oracle-[a-z]+)(?:-[0-9a-f]{12})?(?:/images)?/?$", path.as_posix()):
        return oracle[1]
    if config.task == "ccd":
        name = STREAM_DATA.get(re.sub(r"[\W_]", "", path.name.casefold()), path.name)
        return name if config.schedule == "paper" else f"{name}, {PurePath(config.schedule).stem}"
    path = path.parent if path.name == "images" else path  # a set with masks next to the images
    known = config.benchmark or next((name for name, entry in BENCHMARKS.items() if entry.is_called(path.name)), "")
    return PAPER_DATA.get(known, known) or (path.stem if path.suffix == ".csv" else path.name)


def paper_backbone(resolved: str) -> tuple[str, str]:
    """The paper's names of a backbone and its pretraining; two empty strings for other backbones."""
    return next((names for part, names in BACKBONES.items() if part in resolved), ("", ""))


def backbone_name(resolved: str) -> str:
    """The paper's words for a backbone, or its own name."""
    return " ".join(filter(None, paper_backbone(resolved))) or resolved


def label_of(config: Any) -> str:
    """The label of a run in tables: `lp-ln@mean`, `patchgen@full`, `patchgen, no L_conf, tau 0.5`."""
    default = type(config)
    tune = config.tune if config.task != "ccd" else None  # all runs of a stream setup tune the same
    words = "".join(f"@{word}" for word in (config.pool, tune) if word)
    notes = []
    if "patchgen" in config.method and config.method != "patchgen-no-losses":
        names = ("lambda_ms", "lambda_conf", "lambda_sim")
        notes = [f"no L_{name.removeprefix('lambda_')}" for name in names if getattr(config, name) == 0]
        changed = [name for name in ("lambda_conf", "tau") if getattr(config, name) not in (0, getattr(default, name))]
        notes += [f"{name} {getattr(config, name):g}" for name in changed]
    for name, word in (("refine", "refine"), ("rho_start", "rho"), ("spread", "spread")):
        if getattr(config, name) != getattr(default, name):
            notes.append(f"{word} {getattr(config, name)}")
    if config.task != "ccd" and config.select != "source-validation":
        notes.append(f"checkpoint: {config.select}" + " (LOOKS AT THE UNSEEN DOMAIN)" * (config.select == "oracle"))
    return ", ".join([config.method + words, *notes])


def _setup(config: Any, backbone: str) -> tuple[str, str]:
    """What the runs of one table have in common, as a key and in words."""
    stream, name = config.task == "ccd", backbone_name(backbone)
    other = {*config.not_hashed, *COMPARED, *CHOSEN}
    if stream:
        other = (other | {"entropy_weight", "pseudo_labels"}) - {"tune"}
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in other}
    settings |= {"task": config.task, "backbone": backbone}
    if stream:
        words = f"tuned: {config.tune}, {config.epochs} epochs per stage, batch {config.batch}"
    else:
        budget = f"{config.steps} steps"
        if entry := BENCHMARKS.get(data_name(config).lower()):
            protocol = {"steps": entry.steps, "eval_every": entry.checkpoint_every}
            if all(settings[key] == value for key, value in protocol.items()):
                settings |= dict.fromkeys(protocol, "the data set's own")  # DomainNet's differ from the rest
                budget = "steps: the data set's own"
            elif config.steps == entry.steps:
                budget += f" evaluated every {config.eval_every}"
        words = f"{budget}, {config.batch_per_domain} images per domain" + ", no augmentation" * (not config.augment)
        words += f", {config.val_images} validation images per source" if config.val_images else ""
    return str(settings), f"{name}, {config.image_size} px, {words}"


# Reading


class Skipped(NamedTuple):
    path: Path
    reason: str


Facts = dict[str, Any]
Score = tuple[str, str, str, str, float, int]


def read_runs(folders: Iterable[str | Path]) -> "tuple[pd.DataFrame, list[Skipped]]":
    """The scores of all finished runs below the folders, each run once, and the folders that were skipped."""
    import pandas as pd

    runs: list[tuple[Facts, list[Score]]] = []
    skipped: list[Skipped] = []
    first: dict[tuple[str, str], Path] = {}
    folders = [Path(folder) for folder in folders]
    for path in run_folders(folders):
        run = _read_run(RunFolder(path))
        if isinstance(run, str):
            skipped.append(Skipped(path, run))
        elif (same := first.setdefault((path.name, str(run[0]["config"].result_settings())), path)) is not path:
            skipped.append(Skipped(path, f"the same run as {same}"))
        else:
            runs.append(run)
    if not runs and not skipped:
        named = ", ".join(map(str, folders)) or "nothing was given"
        raise ValueError(f"no run folder (with a config.yaml) below {named}; `patchgen train` makes one")
    _name_apart([facts for facts, _ in runs])
    rows = [(*facts.values(), *score) for facts, scores in runs for score in scores]
    return pd.DataFrame(rows, columns=[*FACTS, *SCORE]), skipped


def _read_run(run: RunFolder) -> tuple[Facts, list[Score]] | str:
    """The facts and scores of a finished run, or why it has none."""
    if not (run.path / "config.yaml").is_file():
        return "broken: it has no config.yaml"
    if not run.done:
        return "not finished: the command that made it resumes from its last evaluation"
    try:
        run.refuse_links()
        config, records, backbone = run.settings, run.records(), backbone_of(run)
        if config.task == "ccd":
            scores = _stream_scores(records)
            stages, validation = run.path / "stages.csv", 0.0
            domains = tuple(dict.fromkeys(score[0] for score in scores))
            rows = _image_list(stages.read_bytes())[1] if stages.is_file() else ""
        else:
            scores, validation = _fold_scores(run, config, records)
            domains, rows = _image_list((run.path / "splits.csv").read_bytes())
        fingerprint = str(read_json(run.path / "env.json").get("data", ""))
        facts = (run.path, run.path.name, config, config.task, label_of(config), data_name(config), domains, rows,
                 fingerprint, "", backbone, *_setup(config, backbone), config.seed, config.lr,
                 str(getattr(config, config.selection_rule)), validation)  # fmt: skip
        return dict(zip(FACTS, facts, strict=True)), scores
    except (*UNREADABLE, csv.Error) as error:
        return f"broken: {first_line(error)}"


def _fold_scores(run: RunFolder, config: Any, records: Sequence[dict[str, Any]]) -> tuple[list[Score], float]:
    """The numbers of a run's test records, and the score by which its checkpoint and settings are chosen."""
    metric = score_record(run, records=records).get("metric", "accuracy")
    evaluation = selected_evaluation(run, records)
    scores = [(config.unseen, "validation", "selected", "all", source_validation(evaluation, metric), 0)]
    for record in (r for r in records if r.get("kind") == "test"):
        scores += [(config.unseen, *score) for score in _test_scores(record)]
    return scores, (leave_one_out if config.select == "leave-one-out" else source_validation)(evaluation, metric)


def _test_scores(record: Mapping[str, Any]) -> Iterator[tuple[str, str, str, float, int]]:
    """The numbers of a test record: scores of both parts; of the whole, also the mask's statistics."""
    checkpoint = record["checkpoint"]
    for part in PARTS:
        scores, images = record[part], record[part]["images"]
        for name in ("accuracy", "f1", "known", "unknown", "taken_for_known", *METRICS):
            if scores.get(name) is not None:
                discovered = name == "accuracy" and scores.get("known") is not None
                yield "all" if discovered else name, checkpoint, part, scores[name], images
    more = {f"{kind}: {name}": value for kind, key in RECORDED.items() for name, value in record.get(key, {}).items()}
    more |= {f"mask: {name} mask": record[f"{name}_mask"]["accuracy"] for name in ("true", "random")
             if f"{name}_mask" in record}  # fmt: skip
    yield from ((name, checkpoint, "all", value, images) for name, value in more.items() if value is not None)


def _stream_scores(records: Iterable[dict[str, Any]]) -> list[Score]:
    """The numbers of every session of a stream."""
    scores: list[Score] = []
    for record in (r for r in records if r.get("kind") == "stage" and r["checkpoint"] == "kept" and r["stage"]):
        for part in ("transductive", "held_out"):
            cells = {"all": record[part]["all"], **record[part]["hard"]} if part in record else {}
            scores += [(f"session {record['stage']}", metric, "selected", part, cell["accuracy"], cell["images"])
                       for metric, cell in cells.items()]  # fmt: skip
    if not scores:
        raise ValueError("no stage of the stream is recorded")
    return scores


@lru_cache(16)  # runs on the same data have the same file
def _image_list(content: bytes) -> tuple[tuple[str, ...], str]:
    """The domains of a run's images, and a digest of the rows without their split."""
    rows = list(csv.DictReader(io.StringIO(content.decode("utf-8"), newline="")))
    digest = hashlib.sha256()
    for row in rows:
        digest.update("\0".join(row.get(name, "") for name in ROW).encode() + b"\n")
    return tuple(dict.fromkeys(row.get("domain", "") for row in rows)), digest.hexdigest()


def _name_apart(runs: Sequence[Facts]) -> None:
    """Number data sets of one name by path: told apart by their fingerprint, in older folders by the rows alone."""
    ordered = sorted(runs, key=lambda run: (run["config"].data, str(run["path"])))
    known = {(run["data"], run["rows"]): run["fingerprint"] for run in reversed(ordered) if run["fingerprint"]}
    sets: dict[str, dict[str, list[Facts]]] = defaultdict(lambda: defaultdict(list))  # name -> fingerprint -> runs
    for run in ordered:
        same = run["fingerprint"] or known.get((run["data"], run["rows"])) or run["rows"]
        sets[run["data"]][same].append(run)
    for name, groups in sets.items():
        paths = [group[0]["config"].data for group in groups.values()]
        for number, (group, place) in enumerate(zip(groups.values(), paths, strict=True), 1):
            if len(groups) > 1 and paths.count(place) > 1:
                folders = sorted(run["run"] for run in group)
                place += f" in the runs {', '.join(folders[:3])}{', ...' * (len(folders) > 3)}"
            for run in group if len(groups) > 1 else ():
                run.update(data=f"{name} ({number})" if number > 1 else name, place=place)
