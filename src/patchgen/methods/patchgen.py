"""PatchGen: cross-entropy on the selected representation z+ and the three mask-shaping losses of section 4."""

from torch import Tensor, no_grad

from patchgen.data.loaders import Batch
from patchgen.methods.method import Method, Rates
from patchgen.model.classifier import Output
from patchgen.model.losses import (
    class_similarity,
    label_probability,
    mask_suppression,
    pseudo_labels,
    selected_confidence,
)


class PatchGenWithoutLosses(Method):
    pool = "patchgen"
    small_rates = Rates(3e-3, module=1e-3)
    summary = "the mask module trained by cross-entropy alone (equal-parameter control, ablation row 3.1)"

    @no_grad()
    def watch(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        """The complementary reference p(y | z-) of the appendix, and L_neg = p(y | z-) - p(y | z+)."""
        assert out.complementary_logits is not None  # the pool makes them
        rest = label_probability(out.complementary_logits, batch.label)
        return {
            "complementary_confidence": rest,
            "L_neg": rest - label_probability(out.logits, batch.label),
            "weak_share": (out.selection() < self.config.tau).float().mean(),
        }


class PatchGenMethod(PatchGenWithoutLosses):
    summary = "the mask module with L_ms, L_conf and L_sim (the paper's method)"

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        c, mask = self.config, out.selection()
        logits, selected = self.selected(out)
        target = pseudo_labels(out.logits, batch.label)  # B-bar of Eq. 5: unlabelled images use their arg-max
        return super().losses(out, batch) | {
            "L_ms": c.lambda_ms * mask_suppression(mask, c.tau),
            "L_conf": c.lambda_conf * selected_confidence(logits, target),
            "L_sim": c.lambda_sim * class_similarity(selected, target, logits.shape[1]),
        }

    def selected(self, out: Output) -> tuple[Tensor, Tensor]:
        """The logits of z+ (B, C), and z+ itself (B, D)."""
        return out.logits, out.features


class PatchGenCls(PatchGenMethod):
    pool = "patchgen-cls"
    summary = "PatchGen whose head reads the class token beside z+ (our extension)"
    reference = "this project"

    def selected(self, out: Output) -> tuple[Tensor, Tensor]:
        assert out.halves is not None  # the pool makes them
        return out.halves[0], out.features.chunk(2, 1)[0]


class PatchGenTrueMask(PatchGenMethod):
    mask = "true"
    compared = False
    summary = "PatchGen with the true mask in place of the learned one (upper bound; oracle data only)"

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(out, batch)
        del terms["L_ms"]  # the true mask has no gradient
        return terms
