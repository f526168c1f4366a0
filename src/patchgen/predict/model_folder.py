"""The model folder: a deployable model with everything needed to use it offline.

config.json        classes, settings, preprocessing, calibration, what to expect, and the digest of the tensors
model.safetensors  the weights (with the backbone's, unless it was left out)
README.md          the model card, with the header that model hubs read
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchgen import __version__
from patchgen.common.files import expanded, refuse_links, replacing_folder
from patchgen.common.plugins import require, used_by
from patchgen.common.text import did_you_mean, first_line, json_text
from patchgen.common.untrusted import filled, number, parse_tensors, read_json, shortly
from patchgen.config import Config, known_settings
from patchgen.data.stain import read_macenko
from patchgen.methods import make_method, method_class
from patchgen.methods.build import build_model, build_on, load_trained
from patchgen.methods.clip import Sentences
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, trained_tensors
from patchgen.model.clip import ClipHead, ClipText, Written
from patchgen.model.convert import Loaded, build
from patchgen.model.preprocessing import recorded_pixels
from patchgen.predict.predictor import Confidence, Familiar, Predictor, read_tile_scale, without_requests_of
from patchgen.runs.folder import MODEL_CONFIG, MODEL_FORMAT, is_model_folder
from patchgen.runs.tensors import under, write_tensors

VERSION = 1
WEIGHTS, CARD = "model.safetensors", "README.md"
FILES = (MODEL_CONFIG, WEIGHTS, CARD)
MODEL, FAMILIAR, CLIP = "model.", "familiar.", "clip."  # prefixes in the weight file
LARGEST_IMAGE = 4096  # pixels of a side
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)  # the last for BatchNorm's counters
LARGEST_NUMBER = 1e6  # maximum temperature, mean or std: far beyond any fitted value
ABOUT = ("data", "expected", "folds", "choice", "calibration", "run", "checkpoint", "backbone", "labels")
NOT_ARCHITECTURE = ("model_type", "transformers_version", "dtype", "torch_dtype", "architectures", "_name_or_path")


class Model(NamedTuple):
    predictor: Predictor
    about: dict[str, Any]


def backbone_facts(predictor: Predictor, header: Mapping[str, Any]) -> dict[str, Any]:
    """The facts needed to rebuild the backbone without its source; `header` is that of the run's checkpoint."""
    backbone = predictor.model.backbone
    settings = backbone.model.config.to_diff_dict()
    return {
        "source": backbone.source if not Path(backbone.source).exists() else Path(backbone.source).name,
        "resolved": backbone.resolved,
        "licence": backbone.licence,
        "note": backbone.note,
        "digest": header["digest"],
        "family": backbone.model_type,
        "architecture": {name: value for name, value in settings.items() if name not in NOT_ARCHITECTURE},
        **backbone.pixels.facts(),
    }


# Writing


def write_model(path: str | Path, model: Model, *, with_backbone: bool = True) -> Path:
    """Write a model folder, replacing an older one; without the backbone, loading it needs its source."""
    from patchgen.predict.card import card

    target = Path(path)
    check_target(target)
    check_method(model.predictor.config.method, with_backbone)
    tensors = {n: t.detach().cpu().contiguous().clone() for n, t in _tensors(model.predictor, with_backbone).items()}
    with replacing_folder(target) as temporary:
        weights = temporary / WEIGHTS
        write_tensors(weights, tensors, {"format": "pt"})
        weights.chmod(0o644)  # save_file makes it private, but models are meant to be shared
        facts = _facts(model, with_backbone, hashlib.sha256(weights.read_bytes()).hexdigest())
        (temporary / MODEL_CONFIG).write_text(json_text(facts) + "\n", encoding="utf-8")
        (temporary / CARD).write_text(card(facts), encoding="utf-8")
    return target


def check_target(target: Path) -> None:
    """Raise ValueError before training if the target exists and is not an older model folder."""
    if target.is_file():
        raise ValueError(f"{target} is a file; a model is a folder: choose another name")
    names = sorted(p.name for p in target.iterdir()) if target.exists() else []
    others = [name for name in names if name not in FILES or not is_model_folder(target)]
    if others:
        raise ValueError(f"{target} is not empty and not a model folder (it holds {others[0]}); choose another place")


def check_method(method: str, with_backbone: bool) -> None:
    """Reject methods that encode new sentences for every batch: a model folder has no text tower."""
    if with_backbone and {"text", "transductive"} <= set(method_class(method).needs):
        raise ValueError(f"method {method!r} needs CLIP's text tower, which a model folder does not hold: add "
                         "--no-with-backbone (with_backbone=False), and keep the CLIP folder")  # fmt: skip


def _tensors(predictor: Predictor, with_backbone: bool) -> dict[str, Tensor]:
    model, familiar = predictor.model, predictor.confidence.familiar
    tensors = {MODEL + name: t for name, t in (model.state_dict() if with_backbone else trained_tensors(model)).items()}
    if isinstance(model.head, ClipHead):  # stores its classes as vectors, without the text tower and its tokenizer
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(MODEL + "head.")}
        with torch.no_grad():
            tensors[CLIP + "classes"] = model.head.sentences()
        tensors |= {CLIP + "projection": model.head.projection.weight, CLIP + "scale": model.head.scale}
    if familiar:
        tensors |= {FAMILIAR + "centres": familiar.centres, FAMILIAR + "whitening": familiar.whitening}
    return tensors


def _facts(model: Model, with_backbone: bool, digest: str) -> dict[str, Any]:
    predictor, confidence = model.predictor, model.predictor.confidence
    settings = asdict(predictor.config)
    del settings["data"]  # the path of the images is private
    if with_backbone:
        settings["backbone"] = model.about["backbone"]["source"]
    used = used_by(predictor.config)
    return {
        "format": MODEL_FORMAT,
        "version": VERSION,
        "patchgen": __version__,
        "classes": list(predictor.classes),
        "image_size": predictor.config.image_size,
        "has_mask": predictor.model.has_mask,
        "temperature": confidence.temperature,
        "unlike_threshold": confidence.familiar.threshold if confidence.familiar else None,
        **model.about,
        "backbone": {**model.about["backbone"], "included": with_backbone},
        "settings": settings,
        "weights": {"file": WEIGHTS, "sha256": digest},
        **({"plugins": used} if used else {}),
        **({"stain": predictor.stain.facts()} if predictor.stain else {}),
        **({"tiles": predictor.tiles._asdict()} if predictor.tiles else {}),
    }


# Reading


def read_model(path: str | Path, *, backbone: str | None = None, allow_download: bool = False, **device: Any) -> Model:
    """The model of a folder; ValueError if it is none, of a later format, or damaged."""
    folder = Path(path)
    facts = _read_config(folder)
    tensors = _read_tensors(folder, facts)
    require(facts.get("plugins"), folder)
    file, checked = folder / MODEL_CONFIG, filled(Facts, facts, folder / MODEL_CONFIG)  # before anything is built
    names = checked.classes
    if len(names) < 2 or len(set(names)) < len(names) or "" in names:
        raise ValueError(f"{file}: classes must be two or more different names, not {shortly(names)}")
    if checked.settings.get("image_size") != checked.image_size:
        raise ValueError(f"{file}: settings.image_size must be image_size, {checked.image_size}; get the folder again")
    _check_tensors(folder / WEIGHTS, facts, tensors)
    try:
        config = Config(**known_settings(Config, {**facts["settings"], "data": ""}, str(file)))
        config = replace(config, backbone=backbone or config.backbone)
        with without_requests_of(folder, backbone, allow_download):
            model = _build(folder, facts, config, tensors)
        familiar, threshold = under(tensors, FAMILIAR), facts["unlike_threshold"]
        known = None if threshold is None else Familiar(familiar["centres"], familiar["whitening"], float(threshold))
    except (LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError, AssertionError) as error:
        reason = f"{type(error).__name__} {error!s:.200}"
        raise ValueError(f"{file} is damaged: {reason}; get the folder again") from error
    stain = read_macenko(facts.get("stain"), str(file)) if config.stain != "none" else None
    confidence = Confidence(float(facts["temperature"]), known)
    predictor = Predictor(model, tuple(facts["classes"]), config, confidence, stain, read_tile_scale(facts), **device)
    return Model(predictor, {name: facts[name] for name in ABOUT if name in facts})


@dataclass(frozen=True)
class BackboneFacts:
    source: str
    resolved: str
    licence: str
    note: str
    digest: str
    family: str
    architecture: dict[str, Any]  # checked where it is built
    included: bool
    mean: tuple[float, float, float] = number(-LARGEST_NUMBER, LARGEST_NUMBER)
    std: tuple[float, float, float] = number(1 / LARGEST_NUMBER, LARGEST_NUMBER)


@dataclass(frozen=True)
class ExpectedFacts:
    mean: float = number(0, 1)
    new_site: tuple[float, float] | None = number(-1, 2, None)


@dataclass(frozen=True)
class TrainingFacts:
    sites: list[str] = field(default_factory=list)
    unseen: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a model is built from and scored with; the other fields of config.json are for its readers."""

    classes: list[str]
    image_size: int = number(1, LARGEST_IMAGE)
    temperature: float = number(1 / LARGEST_NUMBER, LARGEST_NUMBER)
    unlike_threshold: float | None = number(-LARGEST_NUMBER, LARGEST_NUMBER)
    backbone: BackboneFacts = field()
    settings: dict[str, Any] = field()
    data: TrainingFacts | None = None
    expected: ExpectedFacts | None = None


def _check_tensors(file: Path, facts: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Check the values and types, and the shapes that no network will check."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{file}: {name:.100} is of type {tensor.dtype}, not float32; get the folder again")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{file}: {name:.100} holds values that are not finite")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    classes, head = len(facts["classes"]), shapes.get(MODEL + "head.weight")
    if MODEL + "head.bias" in shapes and head and (len(head) != 2 or head[0] != classes):  # else it reads sentences
        raise ValueError(f"{file}: head.weight has shape {head} for {classes} classes")
    if facts["unlike_threshold"] is None:
        return
    centres, whitening = (shapes.get(FAMILIAR + name, ()) for name in ("centres", "whitening"))
    width = next((shape[1] for shape in (head, whitening) if shape and len(shape) == 2), 0)
    if whitening != (width, width) or centres[1:] != (width,) or not 0 < centres[0] <= classes:
        raise ValueError(f"{file}: familiar.centres and familiar.whitening do not fit features of {width} numbers")


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / MODEL_CONFIG).is_file():
        there = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() and not folder.is_dir() else []
        hint = "; it is a run folder: `patchgen predict` takes it too" if (folder / "config.yaml").is_file() else ""
        raise ValueError(
            f"{folder} is not a model folder: it has no {MODEL_CONFIG}{hint}{did_you_mean(folder.name, there)}"
        )
    # the hub's cache holds snapshots/REVISION/FILE as links into blobs/
    refuse_links(folder, within=folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else None)
    facts = read_json(folder / MODEL_CONFIG)
    for name, value in (("format", MODEL_FORMAT), ("version", VERSION)):
        if facts.get(name) != value:
            raise ValueError(f"{folder} is not a model folder of this patchgen: its {MODEL_CONFIG} has {name} "
                             f"{facts.get(name)!s:.20}, not {value}; use the patchgen that wrote it")  # fmt: skip
    return facts


def _read_tensors(folder: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    if not file.is_file():
        raise ValueError(f"{folder} has no {WEIGHTS}; get the folder again")
    data, about = file.read_bytes(), facts.get("weights")  # the checked bytes are the ones that are used
    digest, stated = hashlib.sha256(data).hexdigest(), about.get("sha256") if isinstance(about, dict) else None
    if digest != stated:
        raise ValueError(f"{file} has sha256 {digest[:12]}..., but {MODEL_CONFIG} says {str(stated)[:12]}...: damaged "
                         "or exchanged; get the folder again")  # fmt: skip
    return parse_tensors(data, str(file))[0]


def _build(folder: Path, facts: dict[str, Any], config: Config, tensors: dict[str, Tensor]) -> Classifier:
    method, count = make_method(config), len(facts["classes"])
    if isinstance(method, Sentences) and not method.self_contained:
        method.read = _clip_head(folder, under(tensors, CLIP))
    tensors = method.saved = under(tensors, MODEL)
    if not facts["backbone"]["included"]:
        model = build_model(config, method, count, recorded=facts["backbone"])
        if model.backbone.digest() != facts["backbone"]["digest"]:
            raise ValueError(f"{folder} was not made on {model.backbone.resolved}: the digest differs; get a folder "
                             "that has its backbone")  # fmt: skip
        load_trained(model, tensors)
        return model
    model = build_on(_backbone(facts["backbone"], tensors), config, method, count)
    if isinstance(model.head, ClipHead):
        tensors |= {f"head.{name}": tensor for name, tensor in model.head.state_dict().items()}
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights do not fit the settings in {MODEL_CONFIG} ({error})") from error
    return model


def _clip_head(folder: Path, tensors: dict[str, Tensor]) -> ClipHead:
    """The head of `clip` and `coop` from the vectors of its classes (C, E)."""
    if not tensors:
        raise ValueError(f"{folder} has no vectors of its classes, as an earlier version wrote it; fit the model again")
    width, dim = tensors["projection"].shape
    projection = nn.Linear(dim, width, bias=False)
    projection.weight.data = tensors["projection"]
    text = ClipText(None, projection, tensors["scale"])  # type: ignore[arg-type]
    return ClipHead(text, Written(tensors["classes"]), len(tensors["classes"]))


def _backbone(facts: dict[str, Any], tensors: dict[str, Tensor]) -> Backbone:
    """The architecture, without weights."""
    with torch.random.fork_rng(devices=[]):
        network = build(facts["family"], facts["architecture"], tensors)
    loaded = Loaded(network, recorded_pixels(facts), facts["licence"], facts["note"])
    return Backbone(loaded, facts["source"], facts["resolved"])


def fetch_model(source: str | Path, revision: str | None = None) -> Path:
    """The folder itself, or a hub's `org/name` in the hub's local cache; only the three files are downloaded."""
    if Path(source).exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        return expanded(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=list(FILES)))
    except (OSError, HTTPError, ValueError) as error:
        raise ValueError(f"there is no folder {source}, and the hub gave no model of that name ({first_line(error)}); "
                         "check the spelling, or log in if it is private") from error  # fmt: skip


def push_model(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload a model folder to a hub's `org/name`; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=list(FILES),
                                 commit_message=f"patchgen {__version__}")  # fmt: skip
    except (OSError, HTTPError, ValueError) as error:
        raise ValueError(f"the hub did not take {repo!r} ({first_line(error)}); log in with `hf auth login`") from error
    return str(done)
