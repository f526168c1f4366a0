"""The training loop over a stream: stages and their epochs, on one device; the end of a stage is in `close.py`.

A stage starts from the selected weights of the previous one and does not see its images again. The whole state is saved
after each epoch, and resuming reproduces the uninterrupted run exactly.
"""

import math
import time
from collections.abc import Mapping
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.ccd.close import close_stage, epoch_line, finish
from patchgen.ccd.data import Stream
from patchgen.ccd.images import StreamImages, epoch_parts, num_steps
from patchgen.ccd.methods import Gcd, Views, make_stream_method
from patchgen.ccd.model import StreamModel, build_stream_model, check_promptable
from patchgen.ccd.pool import MixturePool
from patchgen.ccd.scores import class_means, halve_held_out, validation_score
from patchgen.ccd.settings import StreamConfig
from patchgen.common.files import cache_dir
from patchgen.common.machine import require_bf16, use_threads
from patchgen.common.progress import Progress
from patchgen.data.augment import send
from patchgen.discovery import SemiSupervisedKMeans
from patchgen.model.classifier import Output, trained_tensors
from patchgen.model.device import SingleDevice, convert, set_matmul_precision
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import save_tensors, under
from patchgen.tasks.mdg import at_most
from patchgen.train.lifecycle import Trainer
from patchgen.train.loop import in_parts, require_gradients, what_fits

LOWEST = 1e-3  # final learning rate of the cosine, relative to the initial one
VALIDATION_INITS = 10  # maximum k-means initialisations in a validation, as in the host method


def work(config: StreamConfig, run: RunFolder, stream: Stream, quiet: bool) -> None:
    """Train and score all stages."""
    use_threads(config.threads)
    set_matmul_precision(config.precision)
    StreamTrainer(config, run, stream, quiet).fit()


class StreamTrainer(Trainer):
    model: StreamModel
    best: float  # validation score of the epoch that is kept

    def __init__(self, config: StreamConfig, run: RunFolder, stream: Stream, quiet: bool = False) -> None:
        super().__init__(run, SingleDevice(config.accelerator, config.precision), quiet)
        self.device = self.fabric.device
        if self.fabric.half and self.device.type == "cpu":
            require_bf16()
        self.config, self.stream = config, stream
        self.choosing, self.scoring = halve_held_out(stream)
        if config.selection == "session-validation" and not len(stream.entered(self.choosing, 0)):
            text = "--selection session-validation needs two held-out images of a known class"
            raise ValueError(f"{text}; raise --holdout, or give --selection last")
        for note in stream.notes:
            self.say(f"data: {note}")
        self.method: Gcd = make_stream_method(config)
        prototypes = len(stream.stages.entered(len(stream.stages) - 1)) if self.method.prototypes else 0
        pool = config.pool or self.method.pool
        self.model = build_stream_model(config, pool, prototypes, self.say, run.recorded_backbone())
        backbone = self.model.backbone
        if self.method.prompts:
            check_promptable(backbone)
        self.about = {
            "known_classes": [stream.table.classes[c] for c in stream.known],
            "pool": pool,
            "grid": list(self.model.grid),
            "backbone": backbone.record(),
        }
        self.say(f"backbone: {backbone.description}")
        self.model.to(self.device)
        cache = cache_dir() if config.cache else None
        self.images = StreamImages(stream.table, backbone, config.image_size, self.device, cache, config.keep_aspect)
        self.pool = MixturePool(config, len(stream.known))
        self.chain: dict[int, int] = {}  # row -> cluster, of the unlabelled stages so far
        self.target = np.full(len(stream.table), -1)  # labels visible to training: positions among the known classes
        first = stream.train[0]
        self.target[first] = np.searchsorted(stream.known, stream.label[first])
        self._start_stage(0)
        self.micro_batch = what_fits(self, 2 * config.batch, self.model.read)
        self.resume()

    def classes(self, stage: int) -> int:
        """Number of classes up to a stage: given, or estimated if the mixture may grow."""
        if self.config.components == "grow" and stage:
            mixture = self.pool.mixture or self.pool.last
            return mixture.components if mixture is not None else len(self.stream.known)
        return len(self.stream.stages.entered(stage))

    # The loop

    def fit(self) -> None:
        stages, epochs = len(self.stream.stages), self.config.epochs
        while self.stage < stages:
            rows = self.stream.train[self.stage]
            steps = num_steps(len(rows), self.config.batch)
            title = f"{self.config.method}, stage {self.stage} of {stages - 1}"
            with Progress(title, epochs * steps, self.epoch * steps, self.quiet) as bar:
                while self.epoch < epochs:
                    bar.say(epoch_line(self._run_epoch(rows, bar)))
            close_stage(self)
        finish(self)

    def _run_epoch(self, rows: np.ndarray, bar: Progress) -> dict[str, Any]:
        clock = time.monotonic()
        fitted: dict[str, Any] = {}
        due = self.method.mixture and self.pool.due(self.epoch)
        if due or (self.method.pool == "patchgen" and self.stage == 0 and self.pool.class_means is None):
            fitted = self.refit(rows, self.stage, mixture=due)
        share = LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * self.epoch / self.config.epochs)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share
        rate = float(self.optimizer.param_groups[0]["lr"])
        seed = (self.config.seed, self.stage, self.epoch)
        parts = epoch_parts(rows, self.config.batch, seed)
        for step, views in enumerate(self.images.views(parts, seed)):
            self.values.append((step, self._step(parts[step], views)))
            bar.advance()
        file, place = self.stream.table.file, {"stage": self.stage, "epoch": self.epoch}
        means = self.means(len(parts) - 1, lambda step: [str(file(row)) for row in parts[step].tolist()], **place)
        record: dict[str, Any] = {"kind": "epoch", "stage": self.stage, "epoch": self.epoch, "lr": rate, "train": means}
        if fitted:
            record["mixture"] = fitted
        last = self.epoch == self.config.epochs - 1
        if last or (self.epoch + 1) % self.config.val_every == 0:
            record |= self._validate(last)
        record["seconds"] = round(time.monotonic() - clock, 2)
        self.epoch += 1
        self.run.append(record)
        self.save_state()
        return record

    def refit(self, rows: np.ndarray, stage: int, mixture: bool = True) -> dict[str, Any]:
        """Class means in the labelled stage, and the mixture, from the current model."""
        features, _ = self.features(rows)
        if stage == 0:
            self.pool.class_means = class_means(features, self.target[rows], len(self.stream.known))
        return self.pool.refit(features, stage, len(self.stream.stages.entered(stage))) if mixture else {}

    def _step(self, rows: np.ndarray, images: Tensor) -> dict[str, Tensor]:
        """One optimiser step on two views (2B, 3, S, S); returns the named values, detached."""
        views = self._see(rows, images)
        losses = self.method.losses(self.model, views)
        require_gradients(losses, self.config.method)
        self.optimizer.zero_grad(set_to_none=True)
        self.fabric.backward(torch.stack(list(losses.values())).sum())
        self.optimizer.step()
        return {name: value.detach() for name, value in (losses | self.method.watch(views)).items()}

    def _see(self, rows: np.ndarray, images: Tensor) -> Views:
        """The views, with prompts if there are any and with labels or pseudo-labels."""
        likely, prompts = None, None
        if self.method.prompts and self.pool.mixture is not None:
            with torch.no_grad():
                likely = self.pool.likely(self._read(images).features)
            prompts = self.pool.prompts(likely)
        out = in_parts(self._read, self.micro_batch, images, prompts)
        target = send(torch.from_numpy(self.target[rows]), self.device).repeat(2)
        pseudo, centres = target, self.pool.centres(self.stage)
        if self.stage and centres is not None and self.method.pool == "patchgen":
            pseudo = self.pool.labels(self.pool.likely(out.features) if likely is None else likely)
        classes = len(self.stream.stages.entered(self.stage))
        return Views(out, target, pseudo, centres, classes, self.epoch, labelled=self.stage == 0)

    def _read(self, images: Tensor, prompts: Tensor | None = None) -> Output:
        """The model's output, computed in the run's precision."""
        with self.fabric.autocast():
            out = self.model.read(images, prompts)
        return cast(Output, convert(out, torch.float32)) if self.fabric.half else out

    # Without gradients

    @torch.no_grad()
    def features(self, rows: np.ndarray, prompts: bool = False) -> tuple[Tensor, Tensor | None]:
        """Unit features (N, D) of the centre crops, and masks (N, P) if any; with prompts if requested and active."""
        features, masks = [], []
        for images in self.images.plain(rows):
            out = self._read(images)
            if prompts and self.pool.mixture is not None:
                out = self._read(images, self.pool.prompts(self.pool.likely(out.features)))
            features.append(F.normalize(out.features.float(), dim=1))
            masks += [out.mask.float()] if out.mask is not None else []
        return torch.cat(features), torch.cat(masks) if masks else None

    def _validate(self, last: bool) -> dict[str, Any]:
        """Known accuracy on held-out images of the classes so far; keeps the best epoch (ties: the most recent)."""
        rows = self._at_most(self.stream.entered(self.choosing, self.stage))
        score = validation_score(self.stream.label[rows], self._clusters(rows), self.stream.known) if len(rows) else 0.0
        if last if self.config.selection == "last" else score >= self.best:
            self.best, self.kept = score, self.epoch
            save_tensors(self.run.checkpoint("kept"), trained_tensors(self.model), {"epoch": self.epoch})
        return {"validation": {"known": score, "images": len(rows)}} if len(rows) else {}

    def _clusters(self, rows: np.ndarray) -> np.ndarray:
        """Plain clusters (N,) of rows, computed together with the stage's images, because the rows may be too few."""
        count, config = self.classes(self.stage), self.config
        if self.method.prototypes:
            return self.model.classify(self.features(rows)[0], count).argmax(1).cpu().numpy()
        together = np.concatenate([rows, self._at_most(self.stream.train[self.stage])])
        inits = min(config.inits, VALIDATION_INITS)
        kmeans = SemiSupervisedKMeans(min(count, len(together)), inits=inits, seed=config.seed)
        features, _ = self.features(together, config.test_prompts)
        return kmeans.fit(features).assignment[: len(rows)].cpu().numpy()

    def _at_most(self, rows: np.ndarray) -> np.ndarray:
        return at_most(rows, self.config.val_images, [self.config.seed, self.stage])

    # State

    def own_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"pool.{k}": v for k, v in self.pool.tensors().items()}
        tensors["chain"] = torch.from_numpy(np.array(list(self.chain.items()), dtype=np.int64).reshape(-1, 2))
        return tensors, {"stage": self.stage, "epoch": self.epoch, "kept": [self.best, self.kept]}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self.pool.load(under(tensors, "pool."), self.device)
        self.chain = dict(tensors["chain"].tolist())
        self.stage, self.epoch, (self.best, self.kept) = facts["stage"], facts["epoch"], facts["kept"]

    def begin(self) -> None:
        """Calibrate the mask on some images of the first stage."""
        if self.model.select is not None:
            for images in self.images.plain(at_most(self.stream.train[0], 64, [self.config.seed])):
                self.model.start(images)

    def next_stage(self) -> None:
        """Start the next stage with the current model."""
        self.pool.next_stage()
        self._start_stage(self.stage + 1)
        self.save_state()

    def _start_stage(self, stage: int) -> None:
        self.stage, self.epoch = stage, 0
        self.best, self.kept = -math.inf, -1
        self.optimizer = make_stream_optimizer(self.model, self.config, self.method.decays_vectors)


def make_stream_optimizer(model: StreamModel, config: StreamConfig, decays_vectors: bool = True) -> torch.optim.SGD:
    """SGD for a stage; the PatchGen module has its own rate.

    As in the releases, PromptCCD and GCD decay all trained tensors; SimGCD exempts biases and norms.
    """
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    own = config.lr if config.lr_module is None else config.lr_module
    for in_module, decayed in product((False, True), (True, False)):
        rate, decay = own if in_module else config.lr, config.weight_decay if decayed else 0.0
        groups[in_module, decayed] = {"params": [], "lr": rate, "peak": rate, "weight_decay": decay}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name.startswith("select."), parameter.ndim > 1 or decays_vectors]["params"].append(parameter)
    filled = [group for group in groups.values() if group["params"]]
    return torch.optim.SGD(filled, lr=config.lr, momentum=config.momentum)
