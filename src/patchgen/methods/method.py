"""The contract: what a method decides, what it sees, and where it may step in.

A method is a class with one verb, ``losses``. Everything else has a default:

    losses(out, batch)        named, weighted terms; their sum is what a step minimises
    weights(out, batch)       how much each labelled image counts in the main loss
    watch(out, batch)         named values to log
    extend(model)             change what predicts: another head, a part within the backbone
    setup(model)              make own parameters (they are attributes: a method is a module)
    rates()                   learning rates of those parameters
    adjust_gradients(model)   between backward and the optimiser's step
    after_step(model)         after it, for moving averages
    predicting(model)         the tensors that predict, where they are not the ones that are trained
    update(step)              the whole step, where none of the above is enough

``out`` has the logits, the features that the head read and, with PatchGen, the mask; ``batch`` has the images, labels
(-1 where there is none), domains and rows. Terms call ``super().losses``, so ``patchgen+miro`` is a class with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor, nn

from patchgen.common.text import did_you_mean
from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.model.classifier import MASKED, Classifier, Output
from patchgen.model.lora import require_peft
from patchgen.model.losses import cross_entropy

if TYPE_CHECKING:
    from patchgen.train.step import Step


NEEDS = {
    "text": "a CLIP backbone with its text tower, and class names that mean something",
    "source-free": "sentences alone: no image is trained on, and all folds have the same model",
    "transductive": "images to predict together: a prediction depends on the batch",
}


class Rates(NamedTuple):
    """Learning rates; what is None learns at the head's."""

    head: float
    backbone: float | None = None
    module: float | None = None


class Method(nn.Module):
    """Cross-entropy on the labelled samples; what other methods start from."""

    pool: ClassVar[str] = "cls"  # what the head reads
    attend: ClassVar[str] = "all"  # with the pool "patchgen": what its attention reads
    start: ClassVar[str] = "xavier"  # and how its scores begin
    tune: ClassVar[str] = "layernorm"  # what of the backbone learns
    optimizer: ClassVar[str] = "adam"  # `--optimizer` changes it
    momentum: ClassVar[float] = 0.9  # where the optimiser is "sgd"
    lr_schedule: ClassVar[str] = "constant"  # `--lr-schedule` changes it
    small_rates: ClassVar[Rates] = Rates(3e-3)  # of the preset `small`: docs/decisions.md
    mask: ClassVar[str] = "learned"  # or "true": the known predictive patches take the mask's place
    labels: ClassVar[str] = "given"  # or "all": an upper bound that sees the labels a task hides
    summary: ClassVar[str] = ""  # one line for `patchgen methods`
    reference: ClassVar[str] = ""  # the paper it comes from
    needs: ClassVar[tuple[str, ...]] = ()  # words of `NEEDS`, for `patchgen methods --needs`
    addable: ClassVar[bool] = False  # a term that may stand behind a "+"; every other method may stand before one
    replaces_main: ClassVar[bool] = False  # "main" is another loss than the mean cross-entropy of the labelled
    compared: ClassVar[bool] = True  # one of `--methods all`: not an upper bound, a variant, or for one backbone alone
    defaults: ClassVar[Mapping[str, float]] = {}  # own hyper-parameters; `--hparams name value` changes them

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.hparams = self._hparams(config.hparams)
        self.class_names: tuple[str, ...] = ()  # names of the outputs, known from `extend` on
        self.saved: Mapping[str, Tensor] | None = None  # a checkpoint's tensors, where a model is built to predict
        self.sources: tuple[int, ...] = ()  # ids of the source domains, known from `setup` on
        self.chosen_pool = config.pool or self.pool
        self.chosen_tune = config.tune or self.tune
        self.class_weights: Tensor | None  # (C,) of the main loss, set by the trainer where the settings ask for them
        self.register_buffer("class_weights", None)
        if config.class_weights and (self.replaces_main or "source-free" in self.needs):
            raise ValueError(
                f"class_weights weigh the classes of a cross-entropy over images, and the main loss of method "
                f"{config.method!r} is another; leave --class-weights out"
            )
        if self.chosen_tune == "lora":
            require_peft()
        if self.chosen_pool != self.pool and {self.chosen_pool, self.pool} & set(MASKED):
            raise ValueError(
                f"pool {self.chosen_pool!r} does not fit method {config.method!r}: "
                "the mask belongs to the patchgen methods, cls and mean to the others"
            )

    @classmethod
    def all_defaults(cls) -> dict[str, float]:
        """The hyper-parameters of this method and of all it is made of."""
        return {name: value for base in reversed(cls.__mro__) for name, value in vars(base).get("defaults", {}).items()}

    def _hparams(self, given: Mapping[str, float]) -> dict[str, float]:
        own = self.all_defaults()
        rates = [name for name in own if name.endswith("lr_mult")]
        if rates and "lr_mult" in given:  # the common name: for each part that has no value under its own
            others = {name: value for name, value in given.items() if name != "lr_mult"}
            given = dict.fromkeys(rates, given["lr_mult"]) | others
        for name, value in given.items():
            if name not in own:
                known = f"it has {', '.join(own)}" if own else "it has none"
                raise ValueError(
                    f"method {self.config.method!r} has no hyper-parameter {name!r}{did_you_mean(name, own)} ({known})"
                )
            if not 0 <= value < float("inf"):
                raise ValueError(f"hyper-parameter {name} must be a number that is not negative, not {value}")
        return {**own, **given}

    def extend(self, model: Classifier) -> None:
        """Change the model itself, wherever it is built: for training, for predictions, for maps.

        What it adds to the model is saved in checkpoints and predicts; what only helps to train belongs to ``setup``.
        """

    def setup(self, model: Classifier) -> None:
        """Make own parameters; the model has its pretrained weights and no step has been made."""

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        """Named terms, already weighted: their sum is what the step minimises."""
        return {"main": cross_entropy(out.logits, batch.label, self.image_weights(out, batch))}

    def image_weights(self, out: Output, batch: Batch) -> Tensor | None:
        """``weights`` (B,), times those of the classes where the settings ask for them."""
        weights = self.weights(out, batch)
        if self.class_weights is None:
            return weights
        own = self.class_weights[batch.label.clamp(min=0)]
        return own if weights is None else own * weights

    def weights(self, out: Output, batch: Batch) -> Tensor | None:
        """(B,) with a mean near 1, without gradient; None counts all labelled images alike."""
        return None

    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        """Named values to log beside the losses; nothing is trained by them."""
        return {}

    def rates(self) -> list[tuple[nn.Module, float]]:
        """Own modules with their learning rates; all own parameters must be in one of them."""
        return []

    def adjust_gradients(self, model: Classifier) -> None:
        """Change the gradients of a whole batch before the optimiser uses them."""

    def after_step(self, model: Classifier) -> None:
        """Follow the weights that a step has made."""

    def predicting(self, model: Classifier) -> Mapping[str, Tensor] | None:
        """Tensors to predict with and to save, named as the model's trained ones; None means those themselves."""
        return None

    def update(self, step: Step) -> None:
        """One optimiser step."""
        for batch in step.batches():
            out = step.forward(batch)
            step.backward(self.losses(out, batch), self.watch(out, batch))
        self.adjust_gradients(step.model)
        step.apply()
        self.after_step(step.model)


def refuse_fixed_features(method: Method) -> None:
    """A term on the features alone changes nothing where neither the backbone nor a mask in front of them learns."""
    if method.chosen_tune == "head" and method.chosen_pool not in MASKED:
        raise ValueError(
            f"{method.config.method!r} moves the features of the source domains, but with tune 'head' and pool "
            f"{method.chosen_pool!r} nothing can move them; choose --tune layernorm, last_block or full"
        )


def require_linear_head(method: Method, model: Classifier) -> None:
    """For what is computed from the head's weight (C, D) and bias (C,)."""
    if not (hasattr(model.head, "weight") and hasattr(model.head, "bias")):
        raise ValueError(
            f"method {method.config.method!r} needs a linear head, and the first part has brought "
            f"{type(model.head).__name__}; add it to a method with a linear one, such as lp-ln or patchgen"
        )
