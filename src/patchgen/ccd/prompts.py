"""Prompts from a mixture: the means of an image's likeliest components are added to its input tokens.

    check_promptable(backbone)                                        # once: ValueError if it does not support prompts
    with torch.no_grad():
        query = backbone(images).cls                                  # prompt-free
    prompts = choose_prompts(mixture, query, k=5)                     # (B, 5, D), constants
    tokens = prompted(backbone, images, prompts)                      # the same contract as backbone(images)

The sequence is [CLS, prompts, registers if any, patches]. A prompt carries the position of CLS, as in PromptCCD (ECCV
2024), and has no separate norm or projection; without prompts the backbone sees its plain sequence. If CLS has no
position (DINOv3 rotates only its patches) or there is no CLS (SigLIP, I-JEPA), a prompt has none either.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from patchgen.ccd.mixture import SphericalMixture
from patchgen.model.backbone import Backbone, Tokens
from patchgen.model.generic import on_tensor

SIDE = 4  # patches, of the image that tries prompts


def choose_prompts(mixture: SphericalMixture, query: Tensor, k: int = 5, likely: Tensor | None = None) -> Tensor:
    """The means (B, k, D) of the k components most responsible for each query (B, D), the first one first.

    Args:
        likely: (B, K) log-responsibilities of the query, where they are known.
    """
    chosen = mixture.nearest(query, k) if likely is None else likely.topk(k, dim=1).indices
    return mixture.means[chosen].to(query.dtype)


def prompted(
    backbone: Backbone, images: Tensor, prompts: Tensor, early: Callable[[Tensor], None] | None = None
) -> Tokens:
    """The backbone's tokens in the presence of prompts (B, k, D); the prompts' own outputs are dropped.

    Args:
        early: As in `Backbone.forward`.
    """
    _check_prompts(backbone, images, prompts)
    embeddings = _embeddings(backbone)
    has_cls = min(backbone.num_prefix_tokens, 1)
    position = _cls_position(embeddings) if has_cls else 0.0  # (D,)

    def insert(sequence: Tensor) -> Tensor:  # (B, prefix + P, D)
        placed = (prompts + position).to(sequence.dtype)
        return torch.cat([sequence[:, :has_cls], placed, sequence[:, has_cls:]], dim=1)

    with on_tensor(embeddings, insert):
        tokens = backbone(images, early)
    # the backbone drops as many leading tokens as it has prefix tokens of its own; the patches are the last P
    patches = tokens.patches[:, prompts.shape[1] :]
    return Tokens(patches, tokens.cls if has_cls else patches.mean(1), tokens.grid)


def check_promptable(backbone: Backbone) -> None:
    """ValueError unless this backbone supports prompts, tested with one black image."""
    fix = "choose another --backbone, such as DINOv2, ViT or CLIP, or --method gcd+patchgen, which has no prompts"
    _embeddings(backbone, fix)
    odd = "its attention has relative positions, which a prompt has none of" if _relative(backbone) else _try(backbone)
    if odd:
        name = f"{backbone.source!r} ({backbone.model_type})"
        raise ValueError(f"prompts are inserted between a backbone's own tokens, and {name} takes none ({odd}); {fix}")


def _relative(backbone: Backbone) -> bool:
    """BEiT and similar models would stretch their table over the longer sequence, and shift every patch's position."""
    return any("relative_position" in name for name, _ in backbone.model.named_parameters())


@torch.no_grad()
def _try(backbone: Backbone) -> str:
    """The problem with two prompts and one image; empty if there is none."""
    weight, side = next(backbone.parameters()), SIDE * backbone.patch_size
    images, prompts = weight.new_zeros(1, 3, side, side), weight.new_zeros(1, 2, backbone.dim)
    prompts[:, 0] = torch.arange(backbone.dim, device=weight.device).sin()  # moves no random generator
    try:
        one, other = (prompted(backbone, images, given).patches for given in (prompts, prompts.flip(1)))
    except Exception as error:  # models raise many types on unexpected numbers of tokens
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if one.shape[1] != SIDE**2:
        return f"of {SIDE**2} patches {one.shape[1]} remain after it"
    return "" if torch.allclose(one, other, rtol=1e-3, atol=1e-3) else "it gives them places, but they are a set"


def _embeddings(backbone: Backbone, fix: str = "use a vision transformer of transformers") -> nn.Module:
    """The module that makes the sequence of tokens."""
    if backbone.family.convolutional:
        raise ValueError(f"prompts are tokens, and {backbone.source!r} is convolutional: {fix}")
    module = getattr(backbone.model, "embeddings", None)
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"prompts are added to the tokens after a model's module `embeddings`, which {backbone.source!r} "
            f"({backbone.model_type}) lacks: {fix}"
        )
    return module


def _cls_position(embeddings: nn.Module) -> Tensor | float:
    """The position vector (D,) that the backbone adds to its CLS token; 0 where it adds none."""
    learned = getattr(embeddings, "position_embeddings", None)  # (1, 1 + P, D)
    if isinstance(learned, Tensor):
        return learned[0, 0]
    table = getattr(embeddings, "position_embedding", None)  # CLIP
    return table.weight[0] if isinstance(table, nn.Embedding) else 0.0


def _check_prompts(backbone: Backbone, images: Tensor, prompts: Tensor) -> None:
    if prompts.ndim != 3 or prompts.shape[0] != images.shape[0] or prompts.shape[2] != backbone.dim:
        expected = f"({images.shape[0]}, k, {backbone.dim})"
        raise ValueError(f"prompts must be {expected}, one set for each image, got {tuple(prompts.shape)}")
