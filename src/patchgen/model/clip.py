"""CLIP beyond its vision tower: the text tower with its tokenizer, heads that compare images with sentences, templates.

    logits = exp(scale) * cos(projection(x), t_c),    x the CLS token after the final norm, t_c the sentence of class c

The source is that of the CLIP backbone (timm's have no text tower). The vision tower follows the tuning mode; the text
tower is always frozen.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.common.files import expanded, refuse_pipe
from patchgen.common.text import first_line
from patchgen.common.untrusted import read_json
from patchgen.model import weights
from patchgen.model.backbone import BACKBONES, Backbone
from patchgen.model.classifier import Saved
from patchgen.model.generic import allowed, fill, hide_broken_torchvision, on_tensor, quiet_loading

TOKENIZER = ("tokenizer.json", "vocab.json", "merges.txt")
BATCH = 256  # sentences per batch
FIRST_DEVIATION = 0.02  # initial standard deviation of learned prompt vectors, as in CoOp


class TextTower(nn.Module):
    """Token ids (C, L) -> unit vectors (C, E), always frozen and in eval mode."""

    def __init__(self, model: Any, projection: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.model, self.projection, self.tokenizer = model, projection, tokenizer
        self.dim = int(model.config.hidden_size)  # of a word's vector
        self.requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def tokens(self, texts: Sequence[str], room: int = 0) -> Tensor:
        """Token ids (C, L) with start and end; ``room`` positions after the start are reserved for learned vectors."""
        ids = torch.tensor(self.tokenizer(list(texts), padding=True)["input_ids"])
        longest = self.model.config.max_position_embeddings
        if ids.shape[1] + room > longest:
            raise ValueError(
                f"CLIP reads at most {longest} tokens; {max(texts, key=len)!r} with {room} learned vectors has "
                f"{ids.shape[1] + room}: shorten the class name, or lower --hparams context"
            )
        # the start token's id fills the reserved positions, because the end is located by its id
        return torch.cat([ids[:, :1].expand(-1, 1 + room), ids[:, 1:]], 1)

    @torch.no_grad()
    def read(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors (N, E) of fixed sentences, without gradients."""
        starts = range(0, len(texts), BATCH)
        return torch.cat([self(self.tokens(texts[start : start + BATCH]).to(self.device)) for start in starts])

    def forward(self, ids: Tensor, vectors: Tensor | None = None, at: int = 1) -> Tensor:
        """Sentences (C, L) as unit vectors (C, E); ``vectors`` ((C,) n, dim) replace the words from ``at`` on.

        Position 0 is the start, and the next ones are those that ``tokens`` reserves.
        """

        def put(words: Tensor) -> Tensor | None:  # (C, L, dim)
            if vectors is None:
                return None
            learned = vectors.to(words.dtype).expand(len(words), -1, -1)
            return torch.cat([words[:, :at], learned, words[:, at + learned.shape[1] :]], 1)

        # attention in the tower is causal, so padding after the end of a sentence changes nothing
        with on_tensor(self.model.embeddings.token_embedding, put):
            return F.normalize(self.projection(self.model(input_ids=ids).pooler_output).float(), dim=1)

    def train(self, mode: bool = True) -> "TextTower":
        return super().train(False)


class ClipText(NamedTuple):
    """The parts of CLIP other than its vision tower."""

    tower: TextTower
    projection: nn.Linear  # of images, D -> E
    scale: Tensor  # logarithm of the factor on the cosine


def load_text(backbone: Backbone) -> ClipText:
    """The text tower, tokenizer, projections and scale that belong to a CLIP backbone."""
    hide_broken_torchvision()
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    if backbone.model_type != "clip_vision_model":
        raise ValueError(
            f"only CLIP can compare class names with images, and backbone {backbone.source!r} is a "
            f"{backbone.model_type}: choose --backbone clip-b16, a CLIP's hub id, or the folder of a complete CLIP"
        )
    folder = expanded(backbone.source)
    if backbone.source in BACKBONES or not folder.is_dir():
        named = BACKBONES.get(backbone.source)
        folder = weights.hub_folder(named.hub_id if named else backbone.source, also=TOKENIZER)
    if not ((folder / TOKENIZER[0]).is_file() or all((folder / name).is_file() for name in TOKENIZER[1:])):
        raise ValueError(f"{folder} has no tokenizer: put CLIP's tokenizer.json (or vocab.json and merges.txt) there")
    try:
        with quiet_loading(), torch.random.fork_rng(devices=[]):
            about = read_json(folder / "config.json")
            parts: dict[str, Any] = {
                name: allowed(kind, about.get(name) or {}) for name, kind in CLIPConfig.sub_configs.items()
            }
            clip: Any
            config = CLIPConfig(**allowed(CLIPConfig, about), **parts)
            clip, info = fill(CLIPModel, config, weights.folder_tensors(folder))
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


class Written(nn.Module):
    """Fixed sentences (C, E), after which the text tower is not needed."""

    features: Tensor

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.register_buffer("features", features.detach(), persistent=False)

    def forward(self) -> Tensor:
        return self.features


class Learned(nn.Module):
    """The same learned vectors before every class name, as in CoOp: [start] v_1 ... v_n name . [end]"""

    def __init__(self, tower: TextTower, names: Sequence[str], count: int) -> None:
        super().__init__()
        self.tower = tower
        self.vectors = nn.Parameter(FIRST_DEVIATION * torch.randn(count, tower.dim))
        self.ids: Tensor
        self.register_buffer("ids", tower.tokens([f"{name}." for name in names], room=count), persistent=False)
        self._read: tuple[Tensor, Tensor] | None = None  # last vectors encoded without gradients, and the result

    def forward(self) -> Tensor:
        """(C, E); without gradients, the tower runs only if the vectors have changed."""
        if torch.is_grad_enabled() and self.vectors.requires_grad:
            return self.tower(self.ids, self.vectors)  # type: ignore[no-any-return]
        if self._read is None or not torch.equal(self._read[0], self.vectors):
            self._read = self.vectors.detach().clone(), self.tower(self.ids, self.vectors).detach()
        return self._read[1]


def _products(features: Tensor, weight: Tensor, scale: Tensor, vectors: Tensor) -> Tensor:
    """exp(scale) <f, v_c> (B, C) of features (B, D), projected by (E, D) and normalised, and vectors (C, E)."""
    with torch.autocast(features.device.type, enabled=False):  # the scale is near 100: half precision would show
        image = F.normalize(F.linear(features.float(), weight.float()), dim=-1)
        return scale.exp() * image @ vectors.T


class ClassVectors(nn.Module):
    """Features (B, D) -> exp(scale) * <f, v_c> (B, C), with f the unit image vector and v_c of any length.

    Checkpoints contain the whole head, so a trained run predicts without the text tower.
    """

    def __init__(self, projection: nn.Linear, scale: Tensor, vectors: Tensor, *, tuned: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = projection.in_features, len(vectors)
        weight = projection.weight.detach().clone()
        self.weight = nn.Parameter(weight) if tuned else None
        self.constants = Saved({"scale": scale, "vectors": vectors} | ({} if tuned else {"weight": weight}))

    @classmethod
    def like(cls, saved: Mapping[str, Tensor]) -> "ClassVectors":
        """A head with the shapes of a checkpoint's tensors, into which they are then loaded like any others."""
        tuned = "head.weight" in saved
        weight = saved["head.weight" if tuned else "head.constants.weight"]
        projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        return cls(projection, torch.zeros(()), torch.zeros_like(saved["head.constants.vectors"]), tuned=tuned)

    @property
    def vectors(self) -> Tensor:
        return self.constants["vectors"]

    @property
    def scale(self) -> Tensor:
        return self.constants["scale"]

    def forward(self, features: Tensor) -> Tensor:
        weight = self.constants["weight"] if self.weight is None else self.weight
        return _products(features, weight, self.scale, self.vectors)


class ClipHead(nn.Module):
    """Features (B, D) -> exp(scale) * cosine with each class's sentence (B, C); ``sentences()`` are unit (C, E)."""

    def __init__(self, text: ClipText, sentences: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.in_features, self.out_features = text.projection.in_features, num_classes
        self.projection = text.projection.requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", text.scale.detach().clone(), persistent=False)
        self.sentences = sentences

    def forward(self, features: Tensor) -> Tensor:
        return _products(features, self.projection.weight, self.scale, self.sentences().float())


# Sentences of class names

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


def sentences(template: str, names: Sequence[str]) -> list[str]:
    return [template.format(name) for name in names]


def in_domain(domain: str, name: str) -> str:
    """DUPRG's sentence: "a sketch photo of a dog"."""
    return f"a {domain} photo of a {name}" if domain else f"a photo of a {name}"
