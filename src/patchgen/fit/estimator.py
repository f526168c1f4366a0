"""A classifier with the interface of scikit-learn, for images from several sites."""

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from patchgen.config import NO_DOMAIN, PRESETS, Config, Pool, Refine, RhoStart, Selection, SplitRule, Tune
from patchgen.data.inputs import squares
from patchgen.data.table import read_table
from patchgen.draw.overlay import Explanation
from patchgen.fit import BEST, COMPARED
from patchgen.fit.expect import Expected
from patchgen.fit.inputs import as_data, paths_of
from patchgen.methods.presets import method_settings, own_hparams, preset_settings
from patchgen.predict.answers import collect, rows_of_sites
from patchgen.predict.evaluate import RESAMPLES, check_options, evaluate
from patchgen.predict.model_folder import Model, fetch_model, push_model, read_model, write_model
from patchgen.predict.predictor import Prediction, Predictor
from patchgen.predict.runtime import RuntimeName

BATCH = 64
NO_PARAMETERS = ("data", "unseen", "task", "method", "backbone", "known", "unlabelled", "labelled_share", "num_classes")
SETTINGS = tuple(f.name for f in dataclasses.fields(Config) if f.name not in NO_PARAMETERS)


class PatchGenClassifier(ClassifierMixin, BaseEstimator):
    """An image classifier with the interface of scikit-learn, and an estimate of its accuracy at the next site.

    Args:
        method: A name of `patchgen methods`, to train only this one. None compares `methods`, or trains patchgen-cls
            with `unseen` or `expect=False`.
        methods: Names to compare at left-out sites, simplest first: a later one is selected if it is better by more
            than chance (results in ``choice_``).
        backbone: Alias, hub id, local folder, .safetensors file, or `auto`.
        preset: `small` (minutes on two cores), `paper` (the usual 5001 steps at 224 px) or `quick` (a first model).
        runs: Folder of the trainings. A stopped fit is resumed from there when it is called again.
        expect: Leave each site out in turn first; False trains once, without an estimate for a new site.
        track: Log every training to `tensorboard` (or True), `wandb` or `mlflow`.
        quiet: No progress.
        runtime: Inference runtime after `fit` or `load`: `torch`, `onnx`, `openvino` or `auto`.
        minutes: Choose methods, steps and image size such that `fit` ends in about this time.
        random_state: The same as `seed`.

    All further parameters are the settings of a training, `patchgen.config.Config`; None takes the preset's.

    After `fit` or `load`: ``classes_``, ``domains_`` (those it was trained on), ``expected_accuracy_`` (`Expected`, or
    None), ``folds_`` (a dict per site), ``choice_`` (the comparison of methods, or None), ``temperature_``,
    ``calibration_``; after `fit` also ``history_``, the evaluations, and ``run_``.
    """

    def __init__(
        self, *, method: str | None = None, methods: tuple[str, ...] = COMPARED, backbone: str = "auto",
        preset: str = "small", runs: str = "runs", expect: bool = True, track: str | bool = False, quiet: bool = False,
        runtime: RuntimeName = "torch", minutes: float | None = None, random_state: int | None = None,
        # the data
        benchmark: str | None = None, options: dict[str, str] | None = None, split: SplitRule | None = None,
        holdout: float | None = None, val_images: int | None = None, image_size: int | None = None,
        normalization: Literal["backbone", "imagenet"] | None = None, stain: Literal["none", "macenko"] | None = None,
        augment: bool | None = None, augmentation: Literal["natural", "crop-flip", "histology"] | None = None,
        cache: bool | None = None,
        # the method
        pool: Pool | None = None, tune: Tune | None = None, lora_rank: int | None = None, dropout: float | None = None,
        hparams: dict[str, float] | None = None, lambda_ms: float | None = None, lambda_sim: float | None = None,
        lambda_conf: float | None = None, tau: float | None = None, refine: Refine | None = None,
        rho_start: RhoStart | None = None, spread: float | None = None,
        # the training
        steps: int | None = None, batch_per_domain: int | None = None, eval_every: int | None = None,
        patience: int | None = None, select: Selection | None = None, lr: float | None = None,
        lr_module: float | None = None, lr_backbone: float | None = None, weight_decay: float | None = None,
        optimizer: Literal["adam", "adamw", "sgd"] | None = None,
        lr_schedule: Literal["constant", "cosine"] | None = None, warmup: int | None = None,
        class_weights: Literal["balanced"] | None = None, clip_gradients: float | None = None, swad: bool | None = None,
        swad_ratio: float | None = None, swad_compat: bool | None = None, seed: int | None = None,
        # the machine
        accelerator: str | None = None, devices: int | None = None, threads: int | None = None,
        precision: Literal["32-true", "bf16-mixed", "auto"] | None = None, accumulate: int | None = None,
        micro_batch: Literal["auto"] | int | None = None, checkpoint_activations: bool | None = None,
        compile: bool | None = None, deterministic: bool | None = None,
    ) -> None:  # fmt: skip
        values = locals()
        for name in self._get_param_names():
            setattr(self, name, values[name])

    @property
    def _settings(self) -> dict[str, Any]:
        """The settings that are not left to the preset."""
        settings = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
        if self.random_state is not None and settings.setdefault("seed", self.random_state) != self.random_state:
            raise ValueError(f"seed {self.seed} and random_state {self.random_state} differ; give one of them")
        return settings

    def config(self, data: str, unseen: str | None = None, method: str | None = None) -> Config:
        """The settings of a training of `method`: the preset's, overridden by the given ones."""
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {self.preset!r}")
        of_method: dict[str, Any] = {**method_settings(method or self.method or BEST)}
        settings: dict[str, Any] = {"backbone": self.backbone, **self._settings}
        if method and "hparams" in settings:
            settings["hparams"] = own_hparams(settings["hparams"], of_method["method"])
        settings = {**preset_settings(self.preset, of_method["method"]), **settings, **of_method}
        return Config(**{**settings, "data": data, "unseen": unseen or NO_DOMAIN})

    def _configs(self, data: str, unseen: str | None) -> list[Config]:
        """The settings of each method to compare, or of the single one."""
        if self.method or ((unseen or not self.expect or self.preset == "quick") and tuple(self.methods) == COMPARED):
            return [self.config(data, unseen)]
        configs = [self.config(data, unseen, method) for method in self.methods]
        if unknown := set(self.hparams or {}).difference(*(config.hparams for config in configs)):
            raise ValueError(f"hparams {min(unknown)}: none of the methods {', '.join(self.methods)} has it")
        return configs

    def fit(
        self, data: Any, y: Any = None, *, domains: Any = None, groups: Any = None, unseen: str | None = None,
        sample_weight: Any = None,
    ) -> Self:  # fmt: skip
        """Train, after leaving each site out in turn with each method, to select one and to estimate its accuracy.

        Args:
            data: Folder `site/class/*.png`, CSV manifest (path, domain, label, optional group), DataFrame with such
                columns (`site` or `domain`), or images: a list of paths or PIL images, an array or tensor, a torch
                `Dataset` of (image, label).
            y: The class of each image, if `data` does not name it: names, whole numbers or booleans.
            domains: Its site; without it, all images are of one site, and nothing can be said of a new one.
            groups: Its patient or slide; the split is then by `group` unless `split` says otherwise.
            sample_weight: Its weight in the cross-entropy; equal weights change nothing.
            unseen: Leave only this site out, score it, and keep the model that was trained without it.
        """
        from patchgen.fit.procedure import fit
        from patchgen.runs.folder import RunFolder

        path, kind = as_data(data, y, domains, groups, self.runs, sample_weight)
        configs = self._configs(path, unseen)
        model = fit(configs, self.runs, expecting=self.expect, split_given=self.split is not None, quiet=self.quiet,
                    track=self.track, minutes=self.minutes, fixed=self._settings)  # fmt: skip
        if kind:
            model.about["labels"] = kind
        self._take(model)
        run = RunFolder.open(Path(self.runs) / model.about["run"])
        self.run_, self.history_ = str(run.path), run.records("evaluation")
        return self

    def _take(self, model: Model) -> None:
        """Set the attributes that are available after a fit and after loading."""
        model.predictor.use(self.runtime)
        self.model_, about, names = model, model.about, np.array(model.predictor.classes)
        kind = about.get("labels")
        self.classes_ = names.astype(int) if kind == "int" else names == "True" if kind == "bool" else names
        self.domains_ = tuple(site for site in about["data"]["sites"] if site != about["data"]["unseen"])
        self.choice_: dict[str, Any] | None = about.get("choice")
        self.folds_: list[dict[str, Any]] = about["folds"]
        self.calibration_: dict[str, Any] = about["calibration"]
        self.temperature_ = model.predictor.confidence.temperature
        expected: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in (about["expected"] or {}).items()
        }
        self.expected_accuracy_ = Expected(**expected) if expected else None

    @property
    def predictor(self) -> Predictor:
        """The underlying predictor: files in, predictions out, one batch in memory at a time."""
        return self._fitted().predictor

    def _fitted(self) -> Model:
        check_is_fitted(self, "model_", msg="this %(name)s is not fitted yet; call fit, or load a model folder")
        return self.model_

    def _predictions(self, images: Any) -> Iterator[Prediction]:
        predictor = self.predictor
        if hasattr(images, "columns"):
            images = paths_of(images)
        pixels = squares(images, predictor.config.image_size, predictor.interpolation)
        while batch := list(islice(pixels, BATCH)):
            yield from predictor.score(batch)

    def predict_proba(self, images: Any) -> np.ndarray:
        """Calibrated probabilities (N, C), columns in the order of ``classes_``.

        Args:
            images: A file, a folder, a PIL image, an array or tensor (N, H, W, 3), (N, 3, H, W) or (N, H, W), a list
                or a `Dataset` of images, or a DataFrame with the column `path`.
        """
        return np.stack([prediction.probabilities for prediction in self._predictions(images)])

    def decision_function(self, images: Any) -> np.ndarray:
        """Log-probabilities (N, C); with two classes (N,), that of the second minus that of the first."""
        log: np.ndarray = np.log(np.maximum(self.predict_proba(images), np.finfo(np.float32).tiny))
        return log[:, 1] - log[:, 0] if log.shape[1] == 2 else log

    def transform(self, images: Any) -> np.ndarray:
        """The features (N, D) that the classifier's head reads."""
        return np.stack([prediction.features for prediction in self._predictions(images)])

    def predict(self, images: Any) -> np.ndarray:
        """The likeliest class of each image: (N,)."""
        best = self.predict_proba(images).argmax(1)  # raises if nothing is fitted yet
        return self.classes_[best]

    def unlike_training(self, images: Any) -> np.ndarray:
        """(N,) bool: farther from the training images, in features, than 99 % of source validation."""
        return np.array([bool(prediction.unlike_training) for prediction in self._predictions(images)])

    def score(self, images: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Accuracy on images with classes `y`, or on all labelled images of a folder or manifest."""
        if y is None and hasattr(images, "columns") and "label" in images.columns:
            y = images["label"]
        if y is None:
            if not isinstance(images, (str, os.PathLike)):
                raise ValueError("score needs y=, the class of each image, unless the data is a folder or manifest")
            table = read_table(os.fspath(images))
            rows = np.flatnonzero(table.label >= 0).tolist()
            images, y = [table.file(i) for i in rows], [table.label_name(i) for i in rows]
        right = self.predict(images).astype(str) == np.asarray(y).astype(str)
        return float(np.average(right, weights=sample_weight))

    def evaluate(
        self, data: str | Path, *, positive: str | None = None, sites: Sequence[str] = (), resamples: int = RESAMPLES,
        batch: int = BATCH,
    ) -> dict[str, Any]:  # fmt: skip
        """All metrics on a labelled folder or manifest, with intervals: what `patchgen evaluate` writes as JSON.

        Args:
            positive: Also score this class against all others.
            sites: Score only these sites of the data.
            resamples: Bootstrap resamples; 0 for no intervals.
        """
        table = read_table(os.fspath(data), for_scoring=True)
        check_options(positive, resamples, self.predictor.classes)
        answers = collect(self.predictor, table, rows_of_sites(table, sites), batch)
        expected = self._fitted().about.get("expected")
        return evaluate(answers, positive, resamples, sorted(self.domains_), expected=expected)

    def explain(self, image: Any) -> Explanation:
        """Which patches of an image (path, PIL image or array) are read more than others, and its likeliest classes."""
        return self.predictor.explain(image)

    def save(self, folder: str | Path, *, with_backbone: bool = True) -> Path:
        """Write a model folder: safetensors, JSON and a model card; small, but not self-contained without backbone."""
        return write_model(folder, self._fitted(), with_backbone=with_backbone)

    @classmethod
    def load(cls, folder: str | Path, *, runtime: RuntimeName = "torch") -> Self:
        """The estimator of a model folder, including its settings."""
        model = read_model(folder)
        config, usual = model.predictor.config, Config("", "")
        settings = {name: getattr(config, name) for name in SETTINGS if getattr(config, name) != getattr(usual, name)}
        settings["normalization"] = config.normalization  # the only setting that the preset would change
        estimator = cls(method=config.method, backbone=config.backbone, preset="paper", runtime=runtime, **settings)
        estimator._take(model)
        return estimator

    @classmethod
    def from_pretrained(cls, source: str | Path, *, revision: str | None = None) -> Self:
        """The estimator of a model folder, or of a hub's `org/name`."""
        return cls.load(fetch_model(source, revision))

    def push_to_hub(self, repo: str, *, private: bool = False, with_backbone: bool = True) -> str:
        """Upload the model folder to a hub's `org/name`; returns the address."""
        with tempfile.TemporaryDirectory() as place:
            return push_model(self.save(Path(place) / "model", with_backbone=with_backbone), repo, private=private)
