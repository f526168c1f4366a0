"""L-Reg: each class relies on few feature dimensions, and all classes together on many.

    A     = softmax over j of (logits^T features)_cj          (C, D), from the whole batch, labelled or not
    L_reg = lreg * ( sum_j A_j log A_j + mean_c[ -sum_j A_cj log A_cj ] ),   A_j the mean over classes
    L_ortho = ortho * mean square of (F^T F - 1)              F features of unit length; off by default

Difference from the released code: on several devices the product spans the global batch; with gradient accumulation,
a micro-batch. The published weight is 0.1, and 0.5 for VLCS (`presets.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from patchgen.data.loaders import Batch
from patchgen.methods.method import Method
from patchgen.model.classifier import Output
from patchgen.model.losses import sum_over_ranks

LEAST = 1e-12  # inside the logarithms


class LReg(Method):
    summary = "L-Reg: few feature dimensions per class, many for all classes together"
    reference = "Tan et al., Interpret Your Decision: Logical Reasoning Regularization for Generalization, NeurIPS 2024"
    addable = True
    defaults = {"lreg": 0.1, "ortho": 0.0}

    def losses(self, out: Output, batch: Batch) -> dict[str, Tensor]:
        found = super().losses(out, batch)
        found["L_reg"] = self.hparams["lreg"] * logical_regularisation(out.logits, out.features)
        if self.hparams["ortho"]:
            found["L_ortho"] = self.hparams["ortho"] * orthogonality(out.features)
        return found


def logical_regularisation(logits: Tensor, features: Tensor) -> Tensor:
    """Logits (B, C) before the softmax, features (B, D)."""
    share = sum_over_ranks(logits.float().T @ features.float()).softmax(1)  # (C, D)
    together = share.mean(0)  # (D,)
    spread = (together * (together + LEAST).log()).sum()
    focus = -((share + LEAST) * (share + LEAST).log()).sum(1).mean()
    return spread + focus


def orthogonality(features: Tensor) -> Tensor:
    """Deviation of the dimensions of unit-length features (B, D) from orthonormality."""
    unit = F.normalize(features.float(), dim=1)
    products = sum_over_ranks(unit.T @ unit)  # (D, D)
    return (products - torch.eye(len(products), device=products.device)).square().mean()
