"""Named backbones: the source of their weights, their licence and their architecture.

"gated" in a note means that the hub asks for consent to the terms first, unless you pass a folder of your own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from patchgen.model import weights
from patchgen.model.convert import Loaded
from patchgen.model.preprocessing import HALF, IMAGENET, Pixels


@dataclass(frozen=True)
class Spec:
    """A named backbone: the source of its weights, and its architecture for `pretrained=False`."""

    hub_id: str
    family: str
    licence: str
    config: dict[str, Any]
    note: str = ""
    make: Callable[[], Loaded] | None = None  # builds it with its weights, if a plug-in does that itself
    pixels: Pixels | None = None  # from its model card, for files that leave them out


def _vit(dim: int, depth: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"hidden_size": dim, "num_hidden_layers": depth, "num_attention_heads": heads, **more}


def _tissue(
    hub_id: str, licence: str, dims: tuple[int, int, int], registers: int, note: str, pixels: Pixels, **more: Any
) -> Spec:
    """A pathology encoder in timm's layout, loaded as a DINOv2."""
    config = _vit(*dims, num_register_tokens=registers, **(_TILE | _GATED | more))
    return Spec(hub_id, "dinov2_with_registers", licence, config, f"tissue; gated, {note}", pixels=pixels)


_SIZES = {"small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
_P14 = {"patch_size": 14, "image_size": 518}
_B16 = _vit(768, 12, 12, intermediate_size=3072, patch_size=16, image_size=224)

_GATED = {"use_swiglu_ffn": True}  # a gated feed-forward layer (SwiGLU)
_TILE = {"patch_size": 14, "image_size": 224}
_BICUBIC = IMAGENET._replace(interpolation="bicubic")
_BIOPTIMUS = Pixels((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517), "bicubic")
_NC = "CC-BY-NC-ND-4.0"

BACKBONES: dict[str, Spec] = {
    **{f"dinov2-{size}": Spec(f"facebook/dinov2-{size}", "dinov2", "Apache-2.0", _vit(*dims, **_P14))
       for size, dims in _SIZES.items()},
    **{f"dinov2-{size}-reg": Spec(f"facebook/dinov2-with-registers-{size}", "dinov2_with_registers", "Apache-2.0",
                                  _vit(*dims, **_P14)) for size, dims in _SIZES.items()},
    **{f"dinov3-{size}": Spec(
        f"facebook/dinov3-vit{size[0]}16-pretrain-lvd1689m", "dinov3_vit", "DINOv3 License",
        _vit(*dims, intermediate_size=4 * dims[0], patch_size=16, image_size=224, num_register_tokens=4,
             key_bias=False), "gated") for size, dims in _SIZES.items()},
    "dino-b16": Spec("facebook/dino-vitb16", "vit", "Apache-2.0", _B16),
    "mae-b16": Spec("facebook/vit-mae-base", "vit_mae", "CC-BY-NC-4.0", _B16, "non-commercial licence"),
    "clip-b16": Spec("openai/clip-vit-base-patch16", "clip_vision_model", "MIT", _B16),
    "openclip-b16": Spec("laion/CLIP-ViT-B-16-laion2B-s34B-b88K", "clip_vision_model", "MIT",
                         {**_B16, "hidden_act": "gelu"}, "OpenCLIP, LAION-2B"),
    "siglip2-b16": Spec("google/siglip2-base-patch16-224", "siglip_vision_model", "Apache-2.0", _B16,
                        "no class token"),
    "siglip2-so400m": Spec("google/siglip2-so400m-patch14-224", "siglip_vision_model", "Apache-2.0",
                           _vit(1152, 27, 16, intermediate_size=4304, patch_size=14, image_size=224),
                           "no class token"),
    "pe-core-b16": Spec("timm/vit_pe_core_base_patch16_224.fb", "timm", "Apache-2.0",
                        {"name": "vit_pe_core_base_patch16_224.fb"}, "Perception Encoder; needs patchgen[timm]"),
    "convnext-tiny": Spec("facebook/convnext-tiny-224", "convnext", "Apache-2.0", {}),
    "resnet50": Spec("microsoft/resnet-50", "resnet", "Apache-2.0", {}),
    "regnety-16gf": Spec("facebook/regnet-y-160", "regnet", "Apache-2.0",
                         {"hidden_sizes": [224, 448, 1232, 3024], "depths": [2, 4, 11, 1], "groups_width": 112},
                         "ImageNet-1k weights: not the SWAG weights of the host methods"),
    "uni": _tissue("MahmoodLab/UNI", _NC, (1024, 24, 16), 0, "ViT-L/16", IMAGENET, patch_size=16, use_swiglu_ffn=False),
    "uni2-h": _tissue("MahmoodLab/UNI2-h", _NC, (1536, 24, 24), 8, "ViT-H/14", IMAGENET),
    "virchow": _tissue("paige-ai/Virchow", "Apache-2.0", (1280, 32, 16), 0, "ViT-H/14", _BICUBIC),
    "virchow2": _tissue("paige-ai/Virchow2", _NC, (1280, 32, 16), 4, "ViT-H/14", _BICUBIC),
    "h-optimus-0": _tissue("bioptimus/H-optimus-0", "Apache-2.0", (1536, 40, 24), 4, "ViT-g/14", _BIOPTIMUS),
    "h-optimus-1": _tissue("bioptimus/H-optimus-1", _NC, (1536, 40, 24), 4, "ViT-g/14", _BIOPTIMUS),
    "h0-mini": _tissue("bioptimus/H0-mini", _NC, (768, 12, 12), 4, "ViT-B/14", _BIOPTIMUS),
    "prov-gigapath": _tissue("prov-gigapath/prov-gigapath", "Apache-2.0", (1536, 40, 24), 0, "tile encoder, ViT-g/16",
                             _BICUBIC, patch_size=16),
    "phikon": Spec("owkin/phikon", "vit", "Owkin non-commercial", _B16, "tissue; non-commercial licence, ViT-B/16",
                   pixels=IMAGENET),
    "phikon-v2": Spec("owkin/phikon-v2", "dinov2", "Owkin non-commercial",
                      _vit(1024, 24, 16, patch_size=16, image_size=224), "tissue; non-commercial licence, ViT-L/16",
                      pixels=IMAGENET),
    "midnight": Spec("kaiko-ai/midnight", "dinov2", "MIT", _vit(1536, 40, 24, **_TILE, **_GATED), "tissue; ViT-g/14",
                     pixels=HALF),
    "registry": Spec("", "dinov2_with_registers", weights.REGISTRY.licence,
                     _vit(384, 12, 6, **_P14), weights.REGISTRY.note),
    "tiny": Spec("", "dinov2_with_registers", "none", _vit(64, 2, 1, patch_size=14, image_size=112),
                 "random weights: for tests and smoke runs"),
}  # fmt: skip


def card_of(folder: str, config: Any) -> Spec | None:
    """The named backbone in a copied folder, recognised by its name on the hub and its architecture."""
    for spec in BACKBONES.values():
        sizes = {name: spec.config.get(name) for name in ("hidden_size", "num_hidden_layers", "patch_size")}
        same = spec.config and all(getattr(config, name, None) == size for name, size in sizes.items())
        if same and spec.hub_id.rpartition("/")[2].lower() == folder.lower():
            return spec
    return None
