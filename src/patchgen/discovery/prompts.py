"""Prompts from a mixture: the means of an image's likeliest components join its tokens at the input.

    with torch.no_grad():
        query = backbone(images).cls                                  # prompt-free
    prompts = choose_prompts(mixture, query, k=5)                     # (B, 5, D), constants
    tokens = prompted(backbone, images, prompts)                      # the same contract as backbone(images)

The sequence is [CLS, prompts, registers if any, patches]. A prompt carries the position of CLS, as in PromptCCD (ECCV
2024), and no norm or projection of its own; without prompts the backbone sees its plain sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from patchgen.discovery.mixture import SphericalMixture
from patchgen.model.backbone import Backbone, Tokens


def choose_prompts(mixture: SphericalMixture, query: Tensor, k: int = 5) -> Tensor:
    """The means (B, k, D) of the k components most responsible for each query (B, D), the first one first."""
    return mixture.means[mixture.nearest(query, k)].to(query.dtype)


def prompted(backbone: Backbone, images: Tensor, prompts: Tensor) -> Tokens:
    """The backbone's tokens in the presence of prompts (B, k, D); the prompts' own outputs are dropped."""
    _check_prompts(backbone, images, prompts)
    embeddings: nn.Module = backbone.model.embeddings
    position = _cls_position(embeddings)  # (D,)

    def insert(module: nn.Module, arguments: Any, output: Any) -> Any:
        sequence = output[0] if isinstance(output, tuple) else output  # (B, 1 + R + P, D); MAE adds its mask and order
        placed = (prompts + position).to(sequence.dtype)
        longer = torch.cat([sequence[:, :1], placed, sequence[:, 1:]], dim=1)
        return (longer, *output[1:]) if isinstance(output, tuple) else longer

    with embeddings.register_forward_hook(insert):
        tokens = backbone(images)
    # the backbone drops as many leading tokens as it has prefix tokens of its own; the patches are the last P
    return tokens._replace(patches=tokens.patches[:, prompts.shape[1] :])


def _cls_position(embeddings: nn.Module) -> Tensor:
    """The position vector (D,) that the backbone adds to its CLS token."""
    learned = getattr(embeddings, "position_embeddings", None)  # (1, 1 + P, D)
    return learned[0, 0] if learned is not None else embeddings.get_parameter("position_embedding.weight")[0]  # CLIP


def _check_prompts(backbone: Backbone, images: Tensor, prompts: Tensor) -> None:
    if backbone.family.convolutional:
        raise ValueError(f"prompts are tokens, and {backbone.source!r} is convolutional: use a vision transformer")
    if prompts.ndim != 3 or prompts.shape[0] != images.shape[0] or prompts.shape[2] != backbone.dim:
        expected = f"({images.shape[0]}, k, {backbone.dim})"
        raise ValueError(f"prompts must be {expected}, one set for each image, got {tuple(prompts.shape)}")
