"""CLIP's text tower with its tokenizer: turns sentences into vectors.

    text = load_text(backbone)                            # from the same source as the backbone, CLIP's vision tower
    text.tower.read(["a photo of a dog.", "a photo of a cat."])       # (2, E) unit vectors; each sentence is read once

Sources are those of a CLIP backbone: `clip-b16`, `openclip-b16` (LAION-2B), any hub id or folder with a complete
`CLIPModel` and its tokenizer. OpenCLIP's checkpoints are published in that form too; timm's have no text tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.common.files import expanded, refuse_pipe
from patchgen.common.untrusted import read_json
from patchgen.model import weights
from patchgen.model.backbone import BACKBONES, Backbone
from patchgen.model.generic import allowed, fill, first_line, hide_broken_torchvision, quiet_loading
from patchgen.model.local import folder_tensors

TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt")
BATCH = 256  # sentences per batch


class TextTower(nn.Module):
    """Token ids (C, L) -> unit vectors (C, E), frozen; learned vectors may replace the first words."""

    def __init__(self, model: Any, projection: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.model, self.projection, self.tokenizer = model, projection, tokenizer
        self._vectors: dict[str, Tensor] = {}  # cache of encoded sentences
        self.requires_grad_(False).eval()

    @property
    def dim(self) -> int:
        """Length of a word's vector."""
        return int(self.model.config.hidden_size)

    def tokens(self, texts: Sequence[str], room: int = 0) -> Tensor:
        """Token ids (C, L) with start and end; ``room`` positions after the start are reserved for learned vectors."""
        ids = torch.tensor(self.tokenizer(list(texts), padding=True)["input_ids"])
        longest = self.model.config.max_position_embeddings
        if ids.shape[1] + room > longest:
            worst = max(texts, key=len)
            raise ValueError(
                f"CLIP reads at most {longest} tokens; {worst!r} with {room} learned vectors has "
                f"{ids.shape[1] + room}: shorten the class name, or lower --hparams context"
            )
        # the start token's id fills the reserved positions, because the end is located by its id
        return torch.cat([ids[:, :1].expand(-1, 1 + room), ids[:, 1:]], 1)

    @torch.no_grad()
    def read(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors (N, E) of fixed sentences, without gradients; each sentence is encoded once."""
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        for start in range(0, len(new), BATCH):
            part = new[start : start + BATCH]
            self._vectors.update(zip(part, self(self.tokens(part).to(self.device)).cpu().unbind(), strict=True))
        return torch.stack([self._vectors[text] for text in texts]).to(self.device)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, ids: Tensor, vectors: Tensor | None = None, at: int = 1) -> Tensor:
        """Sentences (C, L) as unit vectors (C, E).

        Args:
            vectors: (n, dim) for all sentences, or (C, n, dim), replacing the words from position ``at`` on;
                position 0 is the start, and the next ones are those that ``tokens`` reserves.
        """
        if vectors is None:
            return self._read(ids)

        def put(module: nn.Module, inputs: Any, words: Tensor) -> Tensor:  # words (C, L, dim)
            given = vectors.to(words.dtype).expand(len(words), -1, -1)
            return torch.cat([words[:, :at], given, words[:, at + given.shape[1] :]], 1)

        handle = self.model.embeddings.token_embedding.register_forward_hook(put)
        try:
            return self._read(ids)
        finally:
            handle.remove()

    def _read(self, ids: Tensor) -> Tensor:
        # attention in the tower is causal, so padding after the end of a sentence changes nothing
        return F.normalize(self.projection(self.model(input_ids=ids).pooler_output).float(), dim=1)

    def train(self, mode: bool = True) -> TextTower:
        """Always in eval mode, as it is frozen."""
        return super().train(False)


class ClipText(NamedTuple):
    """The parts of CLIP other than its vision tower."""

    tower: TextTower
    projection: nn.Linear  # of images, D -> E
    scale: Tensor  # logarithm of the factor on the cosine


def load_text(backbone: Backbone) -> ClipText:
    """The text tower, tokenizer, projections and scale that belong to a CLIP backbone.

    Raises:
        ValueError: the backbone is not a CLIP, or its source has no text tower or no tokenizer.
    """
    hide_broken_torchvision()
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    if backbone.model_type != "clip_vision_model":
        raise ValueError(
            f"only CLIP can compare class names with images, and backbone {backbone.source!r} is a "
            f"{backbone.model_type}: choose --backbone clip-b16, a CLIP's hub id, or the folder of a complete CLIP"
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
            for file in folder.iterdir():  # the tokenizer reads several
                refuse_pipe(file)
            tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many types on damaged files
        raise ValueError(f"{folder} cannot be read as a complete CLIP: {first_line(error)}") from error
    missing = [*info["missing_keys"], *map(str, info["mismatched_keys"])]
    if missing:
        raise ValueError(
            f"{folder} is not a complete CLIP: {missing[0]} and {len(missing) - 1} more are missing or misshapen. The "
            "vision tower alone cannot read class names; save the complete CLIPModel there"
        )
    tower = TextTower(clip.text_model, clip.text_projection, tokenizer)
    return ClipText(tower, clip.visual_projection, clip.logit_scale)


def _folder(source: str) -> Path:
    """The folder of a backbone's files: a local one, or the hub's cached copy with the tokenizer's files."""
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


# Sentence templates for class names, and words for domains

PHOTO = "a photo of a {}."
STYLE = "a {} style of a"  # PromptStyler: the braces stand for one learned word

# DUPRG's domain words; the empty one leaves "a photo of a ..."
DOMAINS = ("", "photo", "art", "cartoon", "sketch", "clipart", "infograph", "painting", "quickdraw", "real", "product")
MORE_DOMAINS = (
    "realistic", "pixel style", "abstract", "fantasy", "mysterious", "science fiction", "blurry", "geometric", "hazy",
    "mosaic", "doodle", "graffiti", "art nouveau", "expressionism", "cubism", "fauvism", "futurism", "surrealism",
    "minimalism",
)  # fmt: skip
BANKS = {1: DOMAINS[:1], 11: DOMAINS, 30: (*DOMAINS, *MORE_DOMAINS)}  # by their number of words

# The eighty templates that CLIP's authors published for ImageNet
_PHOTOS = (
    "a bad photo of a", "a photo of many", "a photo of the hard to see", "a low resolution photo of the",
    "a bad photo of the", "a cropped photo of the", "a photo of a hard to see", "a bright photo of a",
    "a photo of a clean", "a photo of a dirty", "a dark photo of the", "a photo of my", "a photo of the cool",
    "a close-up photo of a", "a black and white photo of the", "a pixelated photo of the", "a bright photo of the",
    "a cropped photo of a", "a photo of the dirty", "a jpeg corrupted photo of a", "a blurry photo of the",
    "a photo of the", "a good photo of the", "a photo of one", "a close-up photo of the", "a photo of a",
    "a low resolution photo of a", "a photo of the clean", "a photo of a large", "a photo of a nice",
    "a photo of a weird", "a blurry photo of a", "a pixelated photo of a", "a jpeg corrupted photo of the",
    "a good photo of a", "a photo of the nice", "a photo of the small", "a photo of the weird",
    "a photo of the large", "a black and white photo of a", "a dark photo of a", "a photo of a cool",
    "a photo of a small",
)  # fmt: skip
_WORKS = (
    "a sculpture of a", "a rendering of a", "graffiti of a", "a tattoo of a", "a drawing of a", "a doodle of a",
    "a painting of a", "a sketch of a", "a origami", "a rendition of a", "a sculpture of the", "a rendering of the",
    "graffiti of the", "a tattoo of the", "a drawing of the", "a doodle of the", "a painting of the",
    "a sketch of the", "the origami", "a rendition of the", "the embroidered", "a embroidered", "a plushie", "art of a",
    "art of the", "a cartoon", "the cartoon", "the plushie", "the plastic", "a plastic", "a toy", "the toy",
)  # fmt: skip
IMAGENET = (
    *(f"{words} {{}}." for words in (*_PHOTOS, *_WORKS)),
    "the {} in a video game.", "a {} in a video game.", "itap of a {}.", "itap of my {}.", "itap of the {}.",
)  # fmt: skip


def spoken(name: str) -> str:
    """A class name in words: `_` becomes a space."""
    return name.replace("_", " ")


def sentences(template: str, names: Sequence[str]) -> list[str]:
    """One sentence per name."""
    return [template.format(name) for name in names]


def in_domain(domain: str, name: str) -> str:
    """DUPRG's sentence: "a sketch photo of a dog"."""
    return f"a {domain} photo of a {name}" if domain else f"a photo of a {name}"
