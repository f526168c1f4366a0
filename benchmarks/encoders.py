"""Which encoders load from a folder, and how far their pixels are from those of the reference processor.

    python -m benchmarks.encoders                      # the table of docs/use/encoders.md

Each row is a tiny random network of its family, written as a folder and loaded by its path. Pixels are compared with
the image processor of transformers that reads the same folder, at the square that it is told to resize to; those of
timm, whose transforms need torchvision, with Pillow and float64 arithmetic. Nothing is fetched.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from patchgen.data.augment import normalize
from patchgen.data.images import decode
from patchgen.model.backbone import Backbone, load_backbone
from patchgen.model.generic import quiet_loading
from patchgen.model.selector import Selector

SIDE = 384  # of the square that images are resized to
WARPS = "ConvNextImageProcessor"  # to a square from 384 pixels on; below, it crops
Processor = Callable[[Image.Image, int], np.ndarray]  # image and side -> (3, side, side)
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8,
       "image_size": 32}  # fmt: skip
CONV = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
SWIN = {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "window_size": 2, "image_size": 64}
NO_POOL = {"use_mean_pooling": False, "use_relative_position_bias": True}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@dataclass(frozen=True)
class Example:
    """A family: its model type, settings of a tiny network, and its image processor."""

    name: str
    model_type: str
    config: Mapping[str, Any]
    processor: str  # class of transformers, without the ending that says it works on Pillow's images
    said: Mapping[str, Any] = field(default_factory=dict)  # what its published files say otherwise than that class


IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
EXAMPLES = (
    Example("ViT", "vit", VIT, "ViTImageProcessor"),
    Example("DINOv2", "dinov2", VIT, "BitImageProcessor", IMAGENET),
    Example("DINOv2 with registers", "dinov2_with_registers", VIT, "BitImageProcessor", IMAGENET),
    Example("DINOv3", "dinov3_vit", VIT, "ViTImageProcessor", IMAGENET),  # its own needs torchvision
    Example("MAE", "vit_mae", VIT, "ViTImageProcessor", IMAGENET),
    Example("CLIP", "clip", {"vision_config": VIT, "text_config": TEXT, "projection_dim": 16}, "CLIPImageProcessor"),
    Example("SigLIP, SigLIP 2", "siglip", {"vision_config": VIT, "text_config": TEXT}, "SiglipImageProcessor"),
    Example("SigLIP 2 NaFlex", "siglip2_vision_model", VIT, "Siglip2ImageProcessor"),
    Example("BEiT", "beit", VIT | NO_POOL, "BeitImageProcessor"),
    Example("data2vec", "data2vec-vision", VIT | NO_POOL, "BeitImageProcessor"),
    Example("DeiT", "deit", VIT, "DeiTImageProcessor", IMAGENET),
    Example("I-JEPA", "ijepa", VIT, "ViTImageProcessor", IMAGENET),
    Example("MSN", "vit_msn", VIT, "ViTImageProcessor", IMAGENET),
    Example("RADIO", "radio", VIT, "CLIPImageProcessor", {"do_normalize": False}),
    Example("TIPS v2", "tipsv2_vision_model", VIT, "ViTImageProcessor", {"do_normalize": False}),
    Example("ResNet", "resnet", CONV | {"embedding_size": 8}, "ConvNextImageProcessor", IMAGENET),
    Example("RegNet", "regnet", CONV | {"embedding_size": 8, "groups_width": 8}, "ConvNextImageProcessor", IMAGENET),
    Example("ConvNeXt", "convnext", CONV, "ConvNextImageProcessor", IMAGENET),
    Example("ConvNeXt V2", "convnextv2", CONV, "ConvNextImageProcessor", IMAGENET),
    Example("DINOv3 ConvNeXt", "dinov3_convnext", CONV, "ViTImageProcessor", IMAGENET),
    Example("Swin", "swin", SWIN, "ViTImageProcessor", IMAGENET),
    Example("Swin V2", "swinv2", SWIN, "ViTImageProcessor", IMAGENET),
    Example("Hiera", "hiera", {"embed_dim": 8, "num_heads": [1, 1, 2, 2]}, "BitImageProcessor", IMAGENET),
)


class Row(NamedTuple):
    """One line of the table."""

    name: str
    layout: str
    loaded: bool
    reason: str  # of a refusal
    difference: float | None  # largest, over both layouts of the processor's file
    selects: bool


def transformers_row(example: Example, folder: Path) -> Row:
    """Write the example as a folder, load it, and compare its pixels in both layouts of the processor's file."""
    write_transformers(example, folder)
    try:
        backbone = load_backbone(str(folder))
    except ValueError as error:
        return Row(example.name, "transformers", False, str(error), None, False)
    differences = []
    for nested in (False, True):
        write_processor(example, folder, nested)
        differences.append(pixel_difference(load_backbone(str(folder)), reference(example, folder), folder))
    return Row(example.name, "transformers", True, "", max(differences), selects(backbone))


def write_transformers(example: Example, folder: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(example.model_type, **example.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with quiet_loading():
            transformers.AutoModel.from_config(config).save_pretrained(folder)


def write_processor(example: Example, folder: Path, nested: bool) -> None:
    """The processor's file: flat, or inside that of a whole processor as newer versions write it."""
    import transformers

    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)
    kind = getattr(transformers, example.processor + "Pil")
    facts = json.loads(kind(**example.said).to_json_string())
    name = "processor_config.json" if nested else "preprocessor_config.json"
    (folder / name).write_text(json.dumps({"image_processor": facts} if nested else facts))


def reference(example: Example, folder: Path) -> Processor:
    """What transformers makes of images with the processor in a folder."""
    import transformers

    processor = getattr(transformers, example.processor + "Pil").from_pretrained(folder)

    def pixels(image: Image.Image, side: int) -> np.ndarray:
        square = {"shortest_edge": side} if example.processor == WARPS else {"height": side, "width": side}
        done = processor(image, size=square, do_center_crop=False, return_tensors="np")
        return np.asarray(done["pixel_values"][0])

    return pixels


def pixel_difference(backbone: Backbone, processor: Processor, folder: Path) -> float:
    """The largest difference over images of several shapes, in units of what the encoder reads."""
    differences = []
    for number, (height, width) in enumerate(((SIDE, SIDE), (97, 61), (500, 400))):
        values = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        file = folder / f"image{number}.png"
        Image.fromarray(values).save(file)
        ours = torch.from_numpy(decode(file, SIDE, backbone.interpolation)).permute(2, 0, 1)[None].float() / 255
        pixels = normalize(ours, backbone.mean, backbone.std)[0].numpy()
        differences.append(np.abs(pixels - processor(Image.fromarray(values), SIDE)).max())
        file.unlink()
    return float(np.max(differences))  # nan stays nan


def selects(backbone: Backbone) -> bool:
    """Whether `patchgen-select` can select on it."""
    side = 2 * backbone.patch_size
    try:
        mask = Selector(backbone)(backbone, torch.zeros(1, 3, side, side)).mask
    except ValueError:
        return False
    return mask.shape == (1, 4)


# timm


@dataclass(frozen=True)
class TimmVit:
    """Arguments of a plain ViT of timm that decide its tensors."""

    width: int
    depth: int
    heads: int
    hidden: int  # of the feed-forward layer; of a gated one both halves
    patch: int = 14
    image: int = 224
    registers: int = 0
    gated: bool = False  # SwiGLUPacked
    no_embed_class: bool = False
    layer_scale: bool = True
    architecture: str = "vit_base_patch14_reg4_dinov2"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors, under timm's names."""
        width, prefix = self.width, 0 if self.no_embed_class else 1 + self.registers
        shapes: dict[str, tuple[int, ...]] = {
            "cls_token": (1, 1, width), "pos_embed": (1, (self.image // self.patch) ** 2 + prefix, width),
            "patch_embed.proj.weight": (width, 3, self.patch, self.patch), "patch_embed.proj.bias": (width,),
            "norm.weight": (width,), "norm.bias": (width,),
        }  # fmt: skip
        if self.registers:
            shapes["reg_token"] = (1, self.registers, width)
        inner = self.hidden // 2 if self.gated else self.hidden
        layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width), "mlp.fc1": (self.hidden, width),
                  "mlp.fc2": (width, inner), "norm1": (width,), "norm2": (width,)}  # fmt: skip
        for block in range(self.depth):
            for name, shape in layers.items():
                shapes[f"blocks.{block}.{name}.weight"] = shape
                shapes[f"blocks.{block}.{name}.bias"] = shape[:1]
            if self.layer_scale:
                shapes |= {f"blocks.{block}.ls{number}.gamma": (width,) for number in (1, 2)}
        return shapes

    def about(self, **more: Any) -> dict[str, Any]:
        """The config.json of its folder."""
        arguments = {"img_size": self.image, "num_classes": 0, "num_heads": self.heads, "reg_tokens": self.registers}
        return {"architecture": self.architecture, "num_features": self.width, "model_args": arguments, **more}


SMALL = TimmVit(width=64, depth=3, heads=4, hidden=256, patch=8, image=32)
TISSUE_PIXELS = {"mean": [0.707223, 0.578729, 0.703617], "std": [0.211883, 0.230117, 0.177517]}
# full sizes, as the model cards and timm's table of architectures publish them
CARDS = {
    "uni": TimmVit(1024, 24, 16, 4096, patch=16, architecture="vit_large_patch16_224"),
    "uni2-h": TimmVit(1536, 24, 24, 8192, registers=8, gated=True, no_embed_class=True,
                      architecture="vit_giant_patch14_224"),
    "virchow": TimmVit(1280, 32, 16, 6832, gated=True, architecture="vit_huge_patch14_224"),
    "virchow2": TimmVit(1280, 32, 16, 6832, registers=4, gated=True, architecture="vit_huge_patch14_224"),
    "h-optimus-0": TimmVit(1536, 40, 24, 8192, registers=4, gated=True, no_embed_class=True,
                           architecture="vit_giant_patch14_reg4_dinov2"),
    "h-optimus-1": TimmVit(1536, 40, 24, 8192, registers=4, gated=True, no_embed_class=True,
                           architecture="vit_giant_patch14_reg4_dinov2"),
    "h0-mini": TimmVit(768, 12, 12, 4096, registers=4, gated=True, no_embed_class=True),
    "prov-gigapath": TimmVit(1536, 40, 24, 8192, patch=16, gated=True, architecture="vit_giant_patch14_dinov2"),
}  # fmt: skip
# the same kinds of networks, small
TIMM = {
    "UNI": SMALL,
    "UNI2-h, H-optimus, H0-mini": TimmVit(64, 3, 4, 352, 8, 32, registers=4, gated=True, no_embed_class=True),
    "Virchow": TimmVit(64, 3, 4, 352, 8, 32, gated=True),
    "Virchow2": TimmVit(64, 3, 4, 352, 8, 32, registers=4, gated=True),
    "Prov-GigaPath": TimmVit(64, 3, 4, 352, 8, 32, gated=True),
    "Lunit, Kaiko (plain ViT)": TimmVit(64, 3, 4, 256, 8, 32, layer_scale=False, architecture="vit_small_patch16_224"),
}
REFUSED = {
    "PE (Perception Encoder)": ("vit_pe_core_base_patch16_224", {}),
    "EVA-02": ("eva02_base_patch14_448", {}),
    "timm ConvNeXt, Swin": ("convnext_base", {}),
    "SigLIP of timm": ("vit_base_patch16_siglip_224", {"cls_token": None}),
    "CLIP of timm": ("vit_base_patch16_clip_224", {"norm_pre.weight": (64,)}),
}


def write_timm(
    vit: TimmVit, folder: Path, about: Mapping[str, Any] | None = None, changes: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """A random network as a folder in timm's layout; returns its tensors.

    Args:
        about: Goes into config.json beside what the network needs.
        changes: Shapes that are other than the network's, None for tensors that are left out.
    """
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shapes = {name: shape for name, shape in {**vit.shapes(), **(changes or {})}.items() if shape is not None}
    state = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(vit.about() | dict(about or {})))
    return state


def timm_row(name: str, vit: TimmVit, folder: Path) -> Row:
    """Load the network and compare its pixels with Pillow and float64 arithmetic."""
    said = TISSUE_PIXELS | {"interpolation": "bicubic"}
    write_timm(vit, folder, {"pretrained_cfg": said})
    backbone = load_backbone(str(folder))

    def pixels(image: Image.Image, side: int) -> np.ndarray:
        resized = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), np.float64) / 255
        return ((resized - np.array(said["mean"])) / np.array(said["std"])).transpose(2, 0, 1)

    return Row(name, "timm", True, "", pixel_difference(backbone, pixels, folder), selects(backbone))


def refused_row(name: str, folder: Path) -> Row:
    """A folder of timm that is no plain ViT."""
    architecture, changes = REFUSED[name]
    write_timm(SMALL, folder, {"architecture": architecture}, changes)
    try:
        load_backbone(str(folder))
    except ValueError as error:
        return Row(name, "timm", False, str(error), None, False)
    return Row(name, "timm", True, "", None, False)


def rows() -> Iterator[Row]:
    """The whole table."""
    with tempfile.TemporaryDirectory() as place:
        for number, example in enumerate(EXAMPLES):
            yield transformers_row(example, Path(place) / f"transformers{number}")
        for number, (name, vit) in enumerate(TIMM.items()):
            yield timm_row(name, vit, Path(place) / f"timm{number}")
        for number, name in enumerate(REFUSED):
            yield refused_row(name, Path(place) / f"refused{number}")


def line(row: Row) -> str:
    """A line of Markdown."""
    difference = "refused" if row.difference is None else f"{row.difference:.0e}" if row.difference else "0"
    return f"| {row.name} | {row.layout} | {difference} |"


def main() -> None:
    """Print the table."""
    print("| family | layout | largest pixel difference |\n|---|---|---|")
    for row in rows():
        print(line(row), flush=True)


if __name__ == "__main__":
    main()
