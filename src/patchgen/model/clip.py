"""CLIP's other half: the text tower with its tokenizer, and a head that compares images with sentences.

    text = load_text(backbone)                            # from where the backbone, CLIP's vision tower, came from
    ids = text.tower.tokens(["a photo of a dog.", "a photo of a cat."])
    model.head = ClipHead(text, Written(text.tower(ids)))

    logits = exp(scale) * cos(projection(x), t_c),    x the CLS token after the final norm, t_c the sentence of class c

Nothing of CLIP learns here. The vision tower is the classifier's backbone and follows its tuning mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.common.files import expanded
from patchgen.common.reading import read_json
from patchgen.model import weights
from patchgen.model.architecture import allowed, fill, folder_tensors
from patchgen.model.backbone import BACKBONES, Backbone
from patchgen.model.convert import first_line
from patchgen.model.generic import quiet_loading

TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt")
FIRST_DEVIATION = 0.02  # of learned prompt vectors, as in CoOp


class TextTower(nn.Module):
    """Token ids (C, L) -> unit vectors (C, E), frozen; learned vectors may take the place of the first words."""

    def __init__(self, model: Any, projection: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.model, self.projection, self.tokenizer = model, projection, tokenizer
        self.requires_grad_(False).eval()

    @property
    def dim(self) -> int:
        """Length of a word's vector."""
        return int(self.model.config.hidden_size)

    def tokens(self, texts: Sequence[str], room: int = 0) -> Tensor:
        """Token ids (C, L) with start and end; ``room`` places behind the start are left for learned vectors."""
        ids = torch.tensor(self.tokenizer(list(texts), padding=True)["input_ids"])
        longest = self.model.config.max_position_embeddings
        if ids.shape[1] + room > longest:
            worst = max(texts, key=len)
            raise ValueError(
                f"CLIP reads at most {longest} tokens; {worst!r} with {room} learned vectors has "
                f"{ids.shape[1] + room}: shorten the class name, or lower --hparams context"
            )
        # the start's own id holds the places: the end is found by its id
        return torch.cat([ids[:, :1].expand(-1, 1 + room), ids[:, 1:]], 1)

    def forward(self, ids: Tensor, vectors: Tensor | None = None) -> Tensor:
        """Sentences as unit vectors; ``vectors`` (n, dim) stand behind the start, where ``tokens`` left room."""
        if vectors is None:
            return self._read(ids)

        def put(module: nn.Module, inputs: Any, words: Tensor) -> Tensor:  # words (C, L, dim)
            shared = vectors.to(words.dtype).expand(len(words), -1, -1)
            return torch.cat([words[:, :1], shared, words[:, 1 + len(vectors) :]], 1)

        handle = self.model.embeddings.token_embedding.register_forward_hook(put)
        try:
            return self._read(ids)
        finally:
            handle.remove()

    def _read(self, ids: Tensor) -> Tensor:
        # the tower looks back only, so that what pads a sentence behind its end changes nothing
        return F.normalize(self.projection(self.model(input_ids=ids).pooler_output).float(), dim=1)

    def train(self, mode: bool = True) -> TextTower:
        """Always in eval mode, as it is frozen."""
        return super().train(False)


class ClipText(NamedTuple):
    """What CLIP has beside its vision tower."""

    tower: TextTower
    projection: nn.Linear  # of images, D -> E
    scale: Tensor  # logarithm of what multiplies a cosine


class Written(nn.Module):
    """Sentences that stay as they are: read once, and their tower is not kept."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features: Tensor
        self.register_buffer("features", features.detach(), persistent=False)

    def forward(self) -> Tensor:
        """(C, E)"""
        return self.features


class Learned(nn.Module):
    """The same learned vectors before every class name, as in CoOp: [start] v_1 ... v_n name . [end]"""

    def __init__(self, tower: TextTower, names: Sequence[str], count: int) -> None:
        super().__init__()
        self.tower = tower
        self.vectors = nn.Parameter(FIRST_DEVIATION * torch.randn(count, tower.dim))
        self.ids: Tensor
        self.register_buffer("ids", tower.tokens([f"{name}." for name in names], room=count), persistent=False)
        self._read: tuple[Tensor, Tensor] | None = None  # the vectors of the last reading without gradients, its result

    def forward(self) -> Tensor:
        """(C, E); without gradients the tower is run only where the vectors have changed."""
        if torch.is_grad_enabled() and self.vectors.requires_grad:
            return self._texts()
        if self._read is None or not torch.equal(self._read[0], self.vectors):
            self._read = self.vectors.detach().clone(), self._texts().detach()
        return self._read[1]

    def _texts(self) -> Tensor:
        found: Tensor = self.tower(self.ids, self.vectors)
        return found


class ClipHead(nn.Module):
    """Features (B, D) -> exp(scale) * cosine with each class's sentence (B, C).

    Args:
        text: Whose projection and scale are used.
        sentences: A module that gives the unit vectors (C, E).
        num_classes: C.
    """

    def __init__(self, text: ClipText, sentences: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = text.projection.in_features, num_classes
        self.projection = text.projection.requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", text.scale.detach().clone(), persistent=False)
        self.sentences = sentences

    def forward(self, features: Tensor) -> Tensor:
        sentences = self.sentences().float()
        with torch.autocast(features.device.type, enabled=False):  # the scale is near 100: half digits would show
            image = F.normalize(self.projection(features.float()), dim=-1)
            return self.scale.exp() * image @ sentences.T


def load_text(backbone: Backbone) -> ClipText:
    """The text tower, tokenizer, projections and scale that belong to a CLIP backbone.

    Raises:
        ValueError: the backbone is no CLIP, or where it came from has no text tower or no tokenizer.
    """
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    if backbone.model_type != "clip_vision_model":
        raise ValueError(
            f"class names are compared with images by CLIP alone, and backbone {backbone.source!r} is a "
            f"{backbone.model_type}: choose --backbone clip-b16, a CLIP's hub id, or the folder of a whole CLIP"
        )
    folder = _folder(backbone.source)
    if not ((folder / TOKENIZER[0]).is_file() or all((folder / name).is_file() for name in TOKENIZER[1:])):
        raise ValueError(f"{folder} has no tokenizer: put CLIP's tokenizer.json (or vocab.json and merges.txt) there")
    try:
        with quiet_loading(), torch.random.fork_rng(devices=[]):
            about = read_json(folder / "config.json")
            parts: dict[str, Any] = {
                name: allowed(kind, about.get(name) or {}) for name, kind in CLIPConfig.sub_configs.items()
            }
            clip: Any
            clip, info = fill(CLIPModel, CLIPConfig(**allowed(CLIPConfig, about), **parts), folder_tensors(folder))
    except Exception as error:  # its readers raise many types on bad files, and all of them mean this folder
        raise ValueError(f"{folder} cannot be read as a whole CLIP: {first_line(error)}") from error
    missing = [*info["missing_keys"], *map(str, info["mismatched_keys"])]
    if missing:
        raise ValueError(
            f"{folder} is no whole CLIP: {missing[0]} and {len(missing) - 1} more are missing or misshapen. The vision "
            "tower alone cannot read class names; save the whole CLIPModel there"
        )
    tower = TextTower(clip.text_model, clip.text_projection, CLIPTokenizer.from_pretrained(folder))
    return ClipText(tower, clip.visual_projection, clip.logit_scale)


def _folder(source: str) -> Path:
    """Where a backbone's files are: the folder itself, or the hub's local copy with the tokenizer's files."""
    path = expanded(source)
    if source not in BACKBONES and path.is_dir():
        return path
    hub_id = BACKBONES[source].hub_id if source in BACKBONES else source
    folder = weights.hub_folder(hub_id)
    return folder if any((folder / name).is_file() for name in TOKENIZER) else _fetch_tokenizer(hub_id)


def _fetch_tokenizer(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(TOKENIZER)))
    except (OSError, HTTPError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise weights.WeightsError(
            f"the hub gave no tokenizer of {hub_id!r} ({reason}); try again with a connection, or give a local folder"
        ) from error
