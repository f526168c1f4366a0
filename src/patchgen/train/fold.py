"""A training of a fold, on one device or several: what the loop (`patchgen.train.loop.fit`) needs, and its state.

Resuming a killed run from its last evaluation reproduces the uninterrupted run exactly.
"""

import math
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from patchgen.common.child_process import safe_children
from patchgen.common.files import cache_dir
from patchgen.common.machine import require_bf16, use_threads
from patchgen.common.progress import is_first, logger
from patchgen.config import Config
from patchgen.data.images import ImageStore
from patchgen.data.loaders import AUGMENTATIONS, Batch, DomainBatches, prepare
from patchgen.data.oracle import true_masks
from patchgen.data.stain import TILES, fit_macenko
from patchgen.methods import make_method
from patchgen.methods.build import build_model, describe, load_trained, recompute_activations
from patchgen.model.classifier import Classifier, trained_tensors
from patchgen.model.device import SingleDevice, compile_blocks, set_matmul_precision
from patchgen.runs.folder import ProcessDied, RunFolder
from patchgen.runs.scores import RULES
from patchgen.runs.tensors import under
from patchgen.tasks import Fold
from patchgen.train.close import UNTRAINED, close_run
from patchgen.train.evaluate import Evaluator, Reader, mask_record
from patchgen.train.lifecycle import Trainer, scores_without_each
from patchgen.train.loop import Divided, Step, fit, images_at_once, make_optimizer, take_step
from patchgen.train.swad import Swad
from patchgen.train.tokens import stored_tokens

if TYPE_CHECKING:
    from lightning_fabric import Fabric

SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")


def work(config: Config, run: RunFolder, fold: Fold, quiet: bool) -> None:
    """Train and score a fold, in this process or in several."""
    fabric = _fabric(config)
    if config.precision == "bf16-mixed" and fabric.device.type == "cpu":
        require_bf16()
    try:
        with nullcontext() if isinstance(fabric, SingleDevice) else safe_children():
            fabric.launch(partial(_work, config=config, run=run, fold=fold, quiet=quiet))
    except ProcessRaisedException as error:  # one of several processes failed: its last line says why
        raise ValueError(str(error).strip().splitlines()[-1]) from error
    except ProcessExitedException as error:  # one died; after `done` only the shutdown of its threads can fail
        if not run.done:
            raise ProcessDied(
                f"a process of {run.path} died ({error}); the same command resumes from the last evaluation"
            ) from error


def _fabric(config: Config) -> "SingleDevice | Fabric":
    """One device, several devices of this machine, or one process of a job that torchrun or Slurm started."""
    assert config.precision != "auto"  # resolved by `train`
    external = "TORCHELASTIC_RUN_ID" in os.environ or _is_slurm_task()
    if config.devices == 1 and not external:
        return SingleDevice(config.accelerator, config.precision)
    from lightning_fabric import Fabric  # imported late: it takes longer than many a training's start

    try:
        return Fabric(
            accelerator=config.accelerator,
            devices=config.devices,
            strategy="ddp" if external else "ddp_spawn",
            precision=config.precision,
        )
    except RuntimeError as error:
        raise ValueError(f"--accelerator {config.accelerator} with --devices {config.devices}: {error}") from error


def _is_slurm_task() -> bool:
    """True in a Slurm task; a variable left in the shell by a finished job is ignored."""
    if all(os.environ.get(name, "").isdigit() for name in SLURM):
        return True
    if os.environ.pop(SLURM[0], None) is not None:
        logger.warning(f"{SLURM[0]} is set, but this is not a Slurm task: ignored")
    return False


def _work(fabric: "SingleDevice | Fabric", config: Config, run: RunFolder, fold: Fold, quiet: bool) -> None:
    use_threads(config.threads)
    set_matmul_precision(config.precision)
    before = torch.get_deterministic_debug_mode()
    if config.deterministic:  # on a CPU all operations used here are anyway, for a given number of threads
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its first use
        torch.set_deterministic_debug_mode("warn")  # warns where no deterministic kernel exists
    try:
        trainer = FoldTrainer(fabric, config, run, fold, quiet)
        fit(trainer)
        close_run(trainer)
    finally:
        torch.set_deterministic_debug_mode(before)


class FoldTrainer(Trainer):
    model: Classifier

    def __init__(
        self, fabric: "SingleDevice | Fabric", config: Config, run: RunFolder, fold: Fold, quiet: bool = False
    ) -> None:
        super().__init__(run, fabric, quiet or not fabric.is_global_zero)
        self.config, self.fold = config, fold
        self.method = make_method(config)
        self.method.class_names = fold.classes
        self.model = build_model(config, self.method, len(fold.classes), self.say, run.recorded_backbone())
        if is_first(self.model.backbone.description):  # printed once for all trainings of a fit
            self.say(f"backbone: {self.model.backbone.description}")
        self.about = describe(self.model, fold.classes)
        if fold.table.tiles is not None:
            self.about["tiles"] = fold.table.tiles._asdict()
        self.model.to(fabric.device)
        store = self._images()
        augment = AUGMENTATIONS[config.augmentation]() if config.augment else None
        self.batches = DomainBatches(store, fold.target, fold.train, config.batch_per_domain, config.seed, augment)
        self.reader = Reader(fabric, self.model, store, self._tokens(store))
        # features are read once if nothing before them can change
        self.keeps_features = augment is None and (self.reader.tokens is not None or self.model.reads_frozen)
        self._prepare_model()
        self.micro_batch = self.batch_size if self.keeps_features else images_at_once(self)
        self.optimizer = make_optimizer(self.model, self.method)
        network = Divided(self.model, self.micro_batch) if self.micro_batch < self.batch_size else self.model
        if isinstance(fabric, SingleDevice):
            self.network = fabric.setup(network)
        else:
            self.network, self.optimizer = cast(Any, fabric.setup(network, self.optimizer))
        self.evaluate = Evaluator(
            self.reader, fold.truth, fold.size, truth=self._truth(), mask=self.method.mask, num_known=fold.num_known
        )
        self.swad: Swad | None = None
        if config.swad:
            usual = fold.benchmark.swad_ratio if fold.benchmark else 1.3
            self.swad = Swad(ratio=config.swad_ratio or usual, compat=config.swad_compat)
        self.start, self.last, self.best = 0, -1, -math.inf
        self.peak, self.without_gain = -math.inf, 0  # of source validation, for --patience
        self.resume()

    def _images(self) -> ImageStore:
        """Decoded images; stains are fitted on evenly spaced training images, the same on every rank."""
        config, interpolation = self.config, self.model.backbone.interpolation
        cache = cache_dir() if config.cache else None
        store = ImageStore(self.fold.table.files, config.image_size, cache, interpolation=interpolation)
        if config.stain != "none":
            rows = np.unique(np.concatenate(list(self.fold.train.values())))
            some = rows[np.linspace(0, len(rows) - 1, min(TILES, len(rows))).round().astype(int)]
            store.stain = fit_macenko(image.transpose(1, 2, 0) for image in store.images(some))
            self.about["stain"] = store.stain.facts()
        return store

    def _tokens(self, store: ImageStore) -> np.ndarray | None:
        """The stored tokens of the lower blocks, if they are frozen and images are not augmented."""
        if not self.model.reads_hidden or self.batches.augment is not None:
            return None
        with self.fabric.rank_zero_first():  # the other processes read what the first has written
            return stored_tokens(self.model, self.config, self.fold.table, store, self.fabric.device, self.quiet)

    def _prepare_model(self) -> None:
        """Each part needs the one before: the method may read the mask's start, and its hooks decide the last."""
        config, model, method, fold = self.config, self.model, self.method, self.fold
        if model.has_mask and not self.run.checkpoint("state").exists():
            # on the source images of the first step; the same on every rank
            rows = np.unique(self.batches.rows_at(0)[0])[:64]
            model.start(self.reader.images(rows) if self.reader.tokens is None else self.reader(rows))
        if config.compile and self.keeps_features:
            self.say("--compile: the backbone is frozen and its features are cached; continuing without it")
        elif config.compile:  # before the method's hooks, which should not see the trial
            count = min(config.images_at_once(self.batch_size) or self.batch_size, self.batch_size)
            with self.fabric.autocast():
                images = torch.zeros(count, 3, config.image_size, config.image_size, device=self.fabric.device)
                compile_blocks(model.backbone, images, self.say)
        method.sources = tuple(fold.train)
        method.use_sample_weights(fold.sample_weights())
        if config.class_weights:
            method.register_buffer("class_weights", torch.from_numpy(fold.balanced_weights()), persistent=False)
        with torch.random.fork_rng(devices=[]):  # its parameters depend on the seed alone
            torch.manual_seed(config.seed)
            method.setup(model)
        method.to(self.fabric.device)
        if config.checkpoint_activations:
            recompute_activations(model.backbone, config.method, model.pool == "select")

    @property
    def batch_size(self) -> int:
        """Images of a step on this device."""
        images, processes = self.config.batch_per_domain, self.fabric.world_size
        if images % processes:  # the settings know the devices of a node, not of a whole cluster
            raise ValueError(f"batch_per_domain {images} must be divisible by the number of processes, {processes}")
        return images * len(self.fold.train) // processes

    def _truth(self) -> np.ndarray | None:
        """The predictive patches (N, P), if the data provides them."""
        truth = true_masks(self.fold.table, self.model.grid) if self.model.has_mask else None
        if self.method.mask == "true" and (truth is None or self.config.augment):
            raise ValueError(
                f"method {self.config.method!r} needs data whose predictive patches are known (`patchgen oracle list`) "
                "and images without augmentation (--no-augment)"
            )
        return truth

    # A step

    def take_step(self, number: int) -> None:
        # dropout uses torch's default generator: a resumed run must have the same state as an uninterrupted one
        torch.manual_seed((self.config.seed * 1_000_003 + number) * 1009 + self.fabric.global_rank)

        def mask(batch: Batch) -> torch.Tensor | None:
            return self.evaluate.given_mask(batch.index.numpy(), self.method.mask)

        read, parts = partial(self._batch, number), (self.method, self.model, self.optimizer)
        take_step(Step(*parts, read, number, self.network, self.fabric, mask, self.values))

    def _batch(self, step: int) -> Batch:
        """Pixels, augmented and normalised on the device; or cached features, if nothing before them can change."""
        config, move, place = self.config, self.fabric.to_device, (self.fabric.global_rank, self.fabric.world_size)
        batch = self.batches.at(step, *place, images=not self.keeps_features)
        if self.keeps_features:
            image = self.reader(batch.index.numpy())
        else:
            if step + 1 < config.steps:
                self.batches.expect(step + 1, *place)
            pixels, backbone = move(batch.image), self.model.backbone
            draw = batch.draw.to(pixels.device) if batch.draw is not None else None
            image = prepare(pixels, draw, config.image_size, backbone.mean, backbone.std)
        return replace(batch, image=image, label=move(batch.label), domain=move(batch.domain), draw=None)

    def predicting(self) -> dict[str, torch.Tensor]:
        """The tensors used for predictions: the trained ones, unless the method has others."""
        return dict(self.method.predicting(self.model) or trained_tensors(self.model))

    # Evaluation and state

    def evaluation(self, step: int, seconds: float) -> dict[str, Any]:
        """Score the held-out parts, and write the record, the checkpoint and the state."""
        means = self.means(step, self._files)
        trained: dict[str, torch.Tensor] = {}
        if other := self.method.predicting(self.model):
            trained = {name: tensor.detach().clone() for name, tensor in trained_tensors(self.model).items()}
            load_trained(self.model, other)
        evaluations = {name: self.evaluate(rows) for name, rows in self.fold.validation.items()}
        unseen = self.evaluate(self.fold.test["out"]) if self.config.select == "oracle" else None
        if trained:
            load_trained(self.model, trained)
        record: dict[str, Any] = {"kind": "evaluation", "step": step, "train": means}
        record["validation"] = {name: result.record(self.fold.positive) for name, result in evaluations.items()}
        record |= mask_record(evaluations)
        if unseen is not None:
            record["oracle"] = self.fold.scores(unseen.confusion)
        if self.config.select == "leave-one-out":
            record["leave_one_out"] = scores_without_each(self.run, step, self.fold.metric)
        record["seconds"] = round(seconds, 2)
        self._keep(step, record)
        return record

    def _files(self, step: int) -> list[str]:
        return [str(self.fold.table.file(row)) for row in dict.fromkeys(self.batches.rows_at(step)[0].tolist())]

    def _keep(self, step: int, record: dict[str, Any]) -> None:
        """Write record, checkpoint and state, in an order that is safe if the run is killed in between."""
        score = RULES[self.config.select](record, self.fold.metric)
        better = score >= self.best
        self.best = max(score, self.best)
        validation = RULES["source-validation"](record, self.fold.metric)
        self.without_gain = 0 if validation > self.peak else self.without_gain + 1
        self.peak = max(validation, self.peak)
        if self.swad:
            losses = [domain["loss"] for domain in record["validation"].values()]
            self.swad.evaluate(sum(losses) / len(losses), step)
        if self.fabric.is_global_zero:
            if better:
                self.save("selected", self.predicting(), {"step": step, "rule": self.config.select})
            self.run.append(record)
            self.last = step
            self.save_state()
        self.fabric.barrier()

    def own_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {f"method.{k}": v for k, v in self.method.state_dict().items()}
        facts: dict[str, Any] = {name: getattr(self, name) for name in ("best", "peak", "without_gain")}
        facts["step"] = self.last
        if self.swad:
            averages, facts["swad"] = self.swad.state()
            tensors |= {f"swad.{k}": v for k, v in averages.items()}
        return tensors, facts

    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        self.method.load_state_dict(under(tensors, "method."))
        if self.swad:
            self.swad.load_state(self.fabric.to_device(under(tensors, "swad.")), facts["swad"])
        self.start, self.best = facts["step"] + 1, facts["best"]
        self.peak, self.without_gain = facts.get("peak", -math.inf), facts.get("without_gain", 0)

    def begin(self) -> None:
        """Keep the untrained mask until the end, to score it beside the trained one."""
        if self.fabric.is_global_zero and self.model.has_mask and self.fold.test:
            self.save(UNTRAINED, trained_tensors(self.model), {})
