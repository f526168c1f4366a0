"""The base class of all methods: what a method defines and which hooks it can override.

``losses`` is the main function; everything else has a default. Terms call ``super().losses``, so ``patchgen+miro`` is a
class with both.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from patchgen.common.text import did_you_mean
from patchgen.config import Config
from patchgen.data.augment import send
from patchgen.data.loaders import Batch
from patchgen.model.classifier import MASKED, Classifier, Output
from patchgen.model.losses import cross_entropy
from patchgen.model.tuning import require_peft

if TYPE_CHECKING:
    from patchgen.train.loop import Step

NEEDS = {
    "text": "a CLIP backbone with its text tower, and meaningful class names",
    "source-free": "sentences only: no training images, and all folds have the same model",
    "transductive": "images to predict together: a prediction depends on the batch",
}


class Bound(NamedTuple):
    """The values that a hyper-parameter may have."""

    words: str  # after "must be"
    allows: Callable[[float], bool]


NOT_NEGATIVE = Bound("a non-negative number", lambda value: value >= 0)
POSITIVE = Bound("above 0", lambda value: value > 0)
SHARE = Bound("a share from 0 to 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Bound("a share from 0 to below 1", lambda value: 0 <= value < 1)
COUNT = Bound("a whole number, at least 1", lambda value: value >= 1 and value % 1 == 0)


class Method(nn.Module):
    """Cross-entropy on the labelled samples; the base class of all methods."""

    pool: ClassVar[str] = "cls"  # what the head reads
    attend: ClassVar[str] = "all"  # with the pool "patchgen": what its patches attend to
    start: ClassVar[str] = "xavier"  # with the pool "patchgen": its initial scores
    tune: ClassVar[str] = "layernorm"  # trained part of the backbone
    optimizer: ClassVar[str] = "adam"  # `--optimizer` changes it
    momentum: ClassVar[float] = 0.9  # for the optimiser "sgd"
    lr_schedule: ClassVar[str] = "constant"  # `--lr-schedule` changes it
    mask: ClassVar[str] = "learned"  # or "true": the known predictive patches replace the mask
    labels: ClassVar[str] = "given"  # or "all": an upper bound that sees the labels a task hides
    summary: ClassVar[str] = ""  # one line for `patchgen methods`
    reference: ClassVar[str] = ""  # the paper it comes from
    needs: ClassVar[tuple[str, ...]] = ()  # words of `NEEDS`, for `patchgen methods --needs`
    addable: ClassVar[bool] = False  # can follow a "+"; all other methods can precede one
    replaces_main: ClassVar[bool] = False  # "main" is not the mean cross-entropy of the labelled samples
    each_pass: ClassVar[str] = ""  # what it does at every pass, which cached features (lp --no-augment) would not have
    whole_batch: ClassVar[bool] = False  # in a training pass an image's output depends on the others
    linear_head: ClassVar[bool] = False  # reads the weight and the bias of the head
    idle_tunes: ClassVar[tuple[str, ...]] = ()  # tuning modes in which it has no effect, unless a mask is trained
    backbone_term: ClassVar[str] = ""  # the hyper-parameter of a term that has none even with a mask
    compared: ClassVar[bool] = True  # part of `--methods all`: no upper bound, variant or single-backbone method
    defaults: ClassVar[Mapping[str, float]] = {}  # own hyper-parameters; `--hparams name value` changes them
    bounds: ClassVar[Mapping[str, Bound]] = {}  # of those that have others than `NOT_NEGATIVE`
    learned: ClassVar[Mapping[str, str]] = {}  # own modules: the hyper-parameter that multiplies `--lr`, or ""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.hparams = self._hparams(config.hparams)
        self.class_names: tuple[str, ...] = ()  # names of the outputs, set before `extend`
        self.saved: Mapping[str, Tensor] | None = None  # a checkpoint's tensors, if the model is built for predictions
        self.sources: tuple[int, ...] = ()  # ids of the source domains, set before `setup`
        self.chosen_pool = config.pool or self.pool
        self.chosen_tune = config.tune or self.tune
        self.class_weights: Tensor | None  # (C,) for the main loss, set by the trainer if the settings ask for it
        self.register_buffer("class_weights", None)
        self.sample_weights: Tensor | None = None  # (N,) of the images by row of the table, for the main loss
        if config.class_weights:
            self.require_image_loss("class_weights apply", "leave --class-weights out")
        if self.each_pass and self.chosen_tune == "head" and not config.augment:
            raise ValueError(
                f"method {config.method!r} {self.each_pass} at every pass, but with tune 'head' and --no-augment "
                "features are computed once and cached; leave out --no-augment, or choose --tune layernorm"
            )
        term = self.backbone_term
        moves = self.hparams[term] == 0 if term else self.chosen_pool in MASKED
        if self.chosen_tune in self.idle_tunes and not moves:
            off = f", or switch it off with --hparams {term} 0" if term else ""
            raise ValueError(
                f"{config.method!r} acts on the backbone's features, but with tune {self.chosen_tune!r} and pool "
                f"{self.chosen_pool!r} nothing can move them; choose --tune layernorm or full{off}"
            )
        if self.chosen_tune == "lora":
            require_peft()
        if self.chosen_pool != self.pool and {self.chosen_pool, self.pool} & set(MASKED):
            raise ValueError(
                f"pool {self.chosen_pool!r} does not fit method {config.method!r}: "
                "the mask belongs to the patchgen methods, cls and mean to the others"
            )

    def require_image_loss(self, what: str, advice: str) -> None:
        """ValueError unless the main loss is a mean over images, which can be weighted."""
        if self.replaces_main or "source-free" in self.needs:
            raise ValueError(
                f"{what} to a cross-entropy over images, which is not the main loss of method "
                f"{self.config.method!r}; {advice}"
            )

    def use_sample_weights(self, weights: np.ndarray | None) -> None:
        """Weight the images in the main loss; ValueError if it is not a mean over them."""
        if weights is not None:
            self.require_image_loss("sample_weight applies", "leave the weights out, or choose another method")
            self.sample_weights = torch.from_numpy(weights)

    @classmethod
    def all_defaults(cls) -> dict[str, float]:
        """The default hyper-parameters of this method and of all its base classes."""
        return cls._of_all_bases("defaults")

    @classmethod
    def _of_all_bases(cls, table: str) -> dict[str, Any]:
        return {name: value for base in reversed(cls.__mro__) for name, value in vars(base).get(table, {}).items()}

    def _hparams(self, given: Mapping[str, float]) -> dict[str, float]:
        own, bounds = self.all_defaults(), self._of_all_bases("bounds")
        rates = [name for name in own if name.endswith("lr_mult")]
        if rates and "lr_mult" in given:  # applies to each part without a specific value
            others = {name: value for name, value in given.items() if name != "lr_mult"}
            given = dict.fromkeys(rates, given["lr_mult"]) | others
        for name, value in given.items():
            if name not in own:
                known = f"it has {', '.join(own)}" if own else "it has none"
                raise ValueError(
                    f"method {self.config.method!r} has no hyper-parameter {name!r}{did_you_mean(name, own)} ({known})"
                )
            bound = bounds.get(name, NOT_NEGATIVE)
            if not bound.allows(value):
                raise ValueError(
                    f"hyper-parameter {name} must be {bound.words}, not {value:g}; its default is {own[name]:g}"
                )
        return {**own, **given}

    def extend(self, model: Classifier) -> None:
        """Change the model itself, wherever it is built: modules added here are saved and used for predictions."""

    def setup(self, model: Classifier) -> None:
        """Create the method's parameters; the model has its pretrained weights, before the first step."""
        self._classifier = (model,)  # in a tuple, so that it is not registered as a submodule
        if self.linear_head:
            require_linear_head(self, model)

    @property
    def classifier(self) -> Classifier:
        """The model that ``setup`` was given."""
        return self._classifier[0]

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        """Named terms, already weighted: a step minimises their sum."""
        weights = self.image_weights(out, batch)
        terms = {"main": cross_entropy(out.logits, batch.label, weights)}
        if out.halves is not None:  # each vector must classify by itself, so that neither hides behind the other
            terms["halves"] = torch.stack([cross_entropy(half, batch.label, weights) for half in out.halves]).sum()
        return terms

    def image_weights(self, out: Output, batch: Batch) -> Tensor | None:
        """``weights`` (B,), times those of the classes and of the images, if there are any."""
        weights = self.weights(out, batch)
        if self.class_weights is not None:
            own = self.class_weights[batch.label.clamp(min=0)]
            weights = own if weights is None else own * weights
        if self.sample_weights is not None:
            own = send(self.sample_weights[batch.index], out.logits.device)
            weights = own if weights is None else own * weights
        return weights

    def weights(self, out: Output, batch: Batch) -> Tensor | None:
        """(B,) with a mean near 1, without gradient; None weights all labelled images equally."""
        return None

    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        """Named values to log in addition to the losses; they are not trained on."""
        return {}

    def rates(self) -> list[tuple[nn.Module, float]]:
        """The method's modules with their learning rates; they must cover all of its parameters."""
        factors = {name: self.hparams.get(factor, 1.0) for name, factor in self._of_all_bases("learned").items()}
        return [(getattr(self, name), self.config.lr * value) for name, value in factors.items() if hasattr(self, name)]

    def adjust_gradients(self, model: Classifier) -> None:
        """Change the gradients of the whole batch before the optimiser uses them."""

    def after_step(self, model: Classifier) -> None:
        """Called after each step, for example to update a moving average."""

    def predicting(self, model: Classifier) -> Mapping[str, Tensor] | None:
        """Tensors for predictions and checkpoints, named like the trained ones; None means the trained ones."""
        return None

    def begin_step(self, step: "Step") -> None:
        """Called before a step."""

    def blend(self, batch: Batch) -> Batch:
        """The batch that a step sees, made from the one that was drawn."""
        return batch

    def forward(self, network: nn.Module, batch: Batch, mask: Tensor | None = None) -> Output:
        """A training pass; ``network`` is the model, ``mask`` (B, P) replaces the learned one."""
        output: Output = network(batch.image, mask=mask)
        return output

    def update(self, step: "Step") -> bool:
        """Make the whole step in the method's own way and return True."""
        return False


class Term(Method):
    """A method with something to add to another one."""

    addable = True


# The matched baselines: cross-entropy only; they differ in what is tuned


class LinearProbe(Method):
    tune = "head"
    summary = "linear head on a frozen backbone (LP)"


class Erm(Method):
    summary = "linear head and LayerNorm tuning (LP+LN)"
    reference = "Vapnik 1998"


class Full(Method):
    tune = "full"
    summary = "linear head and full fine-tuning"


class AllLabels(Method):
    labels = "all"
    compared = False
    summary = "LP+LN with the labels that a task hides: an upper bound for mdg_gcd, not a result"


def take(owner: object, name: str) -> Any:
    """What a training pass left in this attribute; taken once, so that its graph can be freed."""
    value = getattr(owner, name)
    setattr(owner, name, None)
    assert value is not None, "the model runs before its losses"
    return value


def require_linear_head(method: Method, model: Classifier) -> None:
    """ValueError unless the head has a weight (C, D) and a bias (C,)."""
    if not (hasattr(model.head, "weight") and hasattr(model.head, "bias")):
        raise ValueError(
            f"method {method.config.method!r} needs a linear head, and the first part uses "
            f"{type(model.head).__name__}; add it to a method with a linear one, such as lp-ln or patchgen"
        )


def by_domain(batch: Batch, device: torch.device | str | None = None) -> list[Tensor]:
    """Positions of each source domain's samples in the batch, in the order of ids; all are in a part on each device."""
    device = device or batch.domain.device
    if batch.num_domains is not None:  # the batch records its layout: nothing has to be asked of the device
        return list(torch.arange(len(batch.domain), device=device).view(batch.num_domains, -1))
    ids = batch.domain.to(device)
    return [torch.nonzero(ids == domain).squeeze(1) for domain in torch.unique(ids)]
