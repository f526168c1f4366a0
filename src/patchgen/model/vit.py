"""A plain pre-norm vision transformer: DINOv2 (also with registers), DINO and other ViTs, MAE, CLIP's image tower.

The families differ in the names and order of their parts, LayerScale, registers and how positions are resized. Names
and order are those of transformers, since checkpoints and digests contain them; results equal theirs bit for bit.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from patchgen.common.files import write_text
from patchgen.common.untrusted import filled, number

ACTIVATIONS = {"gelu": F.gelu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "relu": F.relu, "silu": F.silu}
SPREAD = 0.02  # standard deviation of random weights


@dataclass(frozen=True)
class VitConfig:
    """The architecture, in the words of transformers' config.json."""

    model_type: Literal["dinov2", "dinov2_with_registers", "vit", "vit_mae", "clip_vision_model"]
    patch_size: int = number(1, 1024)
    layer_norm_eps: float = number(1e-15, 1e-2)
    hidden_size: int = number(1, 1 << 16, 768)
    num_hidden_layers: int = number(1, 1 << 12, 12)
    num_attention_heads: int = number(1, 1 << 10, 12)
    image_size: int = number(1, 1 << 15, 224)  # sets the grid of learned positions; other sizes resize them
    intermediate_size: int | None = number(1, 1 << 18, None)
    mlp_ratio: float = number(1e-3, 1e3, 4)  # where there is no intermediate_size
    hidden_act: Literal["gelu", "quick_gelu", "relu", "silu"] = "gelu"
    qkv_bias: bool = True
    use_swiglu_ffn: bool = False
    num_register_tokens: int = number(0, 1 << 12, 0)

    @classmethod
    def read(cls, family: str, given: Mapping[str, Any], where: object) -> "VitConfig":
        """The config of a family from a config.json's fields; those that the family does not have are ignored."""
        defaults = LAYOUTS[family].defaults
        named = {name: _side(value) for name, value in given.items() if name in COMMON or name in defaults}
        config = filled(cls, {"model_type": family, **defaults, **named}, where)
        if config.hidden_size % config.num_attention_heads or config.image_size < config.patch_size:
            raise ValueError(
                f"{where}: hidden_size {config.hidden_size} must be a multiple of num_attention_heads "
                f"{config.num_attention_heads}, image_size {config.image_size} at least patch_size {config.patch_size}"
            )
        return config

    def to_diff_dict(self) -> dict[str, Any]:
        """The fields from which `read` makes this config again."""
        names = {"model_type", *COMMON, *LAYOUTS[self.model_type].defaults}
        return {name: value for name, value in asdict(self).items() if name in names}


COMMON = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "hidden_act")


class Layout(NamedTuple):
    """Names of a family's parts, in the order in which their tensors are registered."""

    blocks: str
    block: Mapping[str, str]  # part -> its name in a block
    projections: tuple[str, str, str, str]  # of attention; the last one is its output
    norm: str
    first_norm: str = ""  # before the first block
    antialias: bool = False  # when positions are resized
    defaults: Mapping[str, Any] = {}  # of fields that are not COMMON, and CLIP's activation


_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
_VIT_BLOCK = {"attention": "attention", "norm1": "layernorm_before", "norm2": "layernorm_after", "mlp": "mlp"}
_VIT_DEFAULTS = {"layer_norm_eps": 1e-12, "patch_size": 16, "intermediate_size": 3072, "qkv_bias": True}
_VIT = Layout("layers", _VIT_BLOCK, _QKVO, "layernorm", defaults=_VIT_DEFAULTS)
_DINO_BLOCK = {"norm1": "norm1", "attention": "attention", "scale1": "layer_scale1", "norm2": "norm2", "mlp": "mlp",
               "scale2": "layer_scale2"}  # fmt: skip
_DINO_DEFAULTS = {"layer_norm_eps": 1e-6, "mlp_ratio": 4, "qkv_bias": True, "use_swiglu_ffn": False}
_CLIP_BLOCK = {"attention": "self_attn", "norm1": "layer_norm1", "mlp": "mlp", "norm2": "layer_norm2"}
LAYOUTS: dict[str, Layout] = {
    "dinov2": Layout("encoder.layer", _DINO_BLOCK, _QKVO, "layernorm", defaults=_DINO_DEFAULTS | {"patch_size": 14}),
    "dinov2_with_registers": Layout("encoder.layer", _DINO_BLOCK, _QKVO, "layernorm", antialias=True,
                                    defaults=_DINO_DEFAULTS | {"patch_size": 16, "num_register_tokens": 4}),
    "vit": _VIT,
    "vit_mae": _VIT,
    "clip_vision_model": Layout(
        "encoder.layers", _CLIP_BLOCK, ("k_proj", "v_proj", "q_proj", "out_proj"), "post_layernorm", "pre_layrnorm",
        defaults={"layer_norm_eps": 1e-5, "patch_size": 32, "intermediate_size": 3072, "hidden_act": "quick_gelu"}),
}  # fmt: skip


def gated_width(width: int) -> int:
    """The width of a gated layer in place of a plain one: two thirds of it, rounded up to a multiple of eight."""
    return (int(width * 2 / 3) + 7) // 8 * 8


def _side(value: Any) -> Any:
    """A square size given as a pair, as one number."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1] else value


def _drawn(*shape: int) -> Tensor:
    """Normal random numbers; none on the meta device, where drawing would import torch's compiler (a second)."""
    empty = torch.empty(shape)
    return empty if empty.is_meta else empty.normal_()


class Embeddings(nn.Module):
    """Images (B, 3, H, W) -> class token, registers and patches with their positions (B, 1 + R + P, D)."""

    register_tokens: Tensor | None

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        layout, dim, patch = LAYOUTS[config.model_type], config.hidden_size, config.patch_size
        self.antialias, self.side = layout.antialias, config.image_size // patch
        self.clip = config.model_type == "clip_vision_model"
        if self.clip:
            self.class_embedding = nn.Parameter(_drawn(dim))
            self.patch_embedding = nn.Conv2d(3, dim, patch, patch, bias=False)
            self.position_embedding = nn.Embedding.from_pretrained(_drawn(1 + self.side**2, dim), freeze=False)
        else:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
            projection = nn.Conv2d(3, dim, patch, patch)
            self.position_embeddings = nn.Parameter(_drawn(1, 1 + self.side**2, dim))
            self.patch_embeddings = nn.Sequential(OrderedDict(projection=projection))
        registers = nn.Parameter(torch.zeros(1, config.num_register_tokens, dim))
        self.register_parameter("register_tokens", registers if "num_register_tokens" in layout.defaults else None)

    def forward(self, images: Tensor) -> Tensor:
        if self.clip:
            cls, positions = self.class_embedding.view(1, 1, -1), self.position_embedding.weight.unsqueeze(0)
        else:
            cls, positions = self.cls_token, self.position_embeddings  # (1, 1, D), (1, 1 + P, D)
        projection: Any = self.patch_embedding if self.clip else self.patch_embeddings.projection
        patches = projection(images.to(cls.dtype))  # (B, D, h, w)
        grid = (patches.shape[2], patches.shape[3])
        tokens = torch.cat([cls.expand(images.shape[0], -1, -1), patches.flatten(2).transpose(1, 2)], 1)
        tokens = tokens + self._resized(positions, grid)
        if self.register_tokens is None:
            return tokens
        return torch.cat([tokens[:, :1], self.register_tokens.expand(images.shape[0], -1, -1), tokens[:, 1:]], 1)

    def _resized(self, positions: Tensor, grid: tuple[int, int]) -> Tensor:
        """The positions (1, 1 + h * w, D) on a grid; the class token keeps its own."""
        if grid == (self.side, self.side):
            return positions
        square = positions[:, 1:].unflatten(1, (self.side, self.side)).permute(0, 3, 1, 2)  # (1, D, side, side)
        resized = F.interpolate(
            square.float(), size=grid, mode="bicubic", align_corners=False, antialias=self.antialias
        ).to(positions.dtype)
        return torch.cat([positions[:, :1], resized.flatten(2).transpose(1, 2)], 1)


class Attention(nn.Module):
    """Self-attention (B, T, D) -> (B, T, D) with H heads; q, k and v are three products, as in transformers."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        dim, names = config.hidden_size, LAYOUTS[config.model_type].projections
        for name in names:
            self.add_module(name, nn.Linear(dim, dim, bias=config.qkv_bias or name == names[-1]))
        self.heads, self.out = config.num_attention_heads, names[-1]

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (
            getattr(self, name)(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, d)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mixed = F.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)
        return getattr(self, self.out)(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """The feed-forward layer (B, T, D) -> (B, T, D), plain or gated (SwiGLU)."""

    fc1: nn.Linear
    fc2: nn.Linear
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        dim, width = config.hidden_size, config.intermediate_size or int(config.hidden_size * config.mlp_ratio)
        self.gated, self.activation = config.use_swiglu_ffn, config.hidden_act
        width = gated_width(width) if self.gated else width
        widths = {"gate_proj": (dim, width), "up_proj": (dim, width), "down_proj": (width, dim)}
        for name, sizes in (widths if self.gated else {"fc1": (dim, width), "fc2": (width, dim)}).items():
            self.add_module(name, nn.Linear(*sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.gated:
            return self.down_proj(F.silu(self.gate_proj(tokens)) * self.up_proj(tokens))  # type: ignore[no-any-return]
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(tokens)))  # type: ignore[no-any-return]


class LayerScale(nn.Module):
    """A learned factor for each channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.ones(dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens * self.lambda1


class Block(nn.Module):
    """x + scale1(attention(norm1(x))), then the same with the feed-forward layer."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.names, dim = LAYOUTS[config.model_type].block, config.hidden_size
        kinds = {"norm": lambda: nn.LayerNorm(dim, eps=config.layer_norm_eps), "scale": lambda: LayerScale(dim),
                 "attention": lambda: Attention(config), "mlp": lambda: Mlp(config)}  # fmt: skip
        for part, name in self.names.items():
            self.add_module(name, kinds[part.rstrip("12")]())

    def forward(self, tokens: Tensor) -> Tensor:
        part = {part: getattr(self, name) for part, name in self.names.items()}
        for norm, layer, scale in (("norm1", "attention", "scale1"), ("norm2", "mlp", "scale2")):
            change = part[layer](part[norm](tokens))
            tokens = tokens + (part[scale](change) if scale in part else change)
        return tokens


class Vit(nn.Module):
    """Images (B, 3, H, W), sides multiples of the patch size -> tokens (B, 1 + R + P, D) after the final LayerNorm.

    CLIP applies its final norm to the class token only; here the patches get it, too.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config, self.layout = config, LAYOUTS[config.model_type]
        self.embeddings = Embeddings(config)
        if self.layout.first_norm:
            self.add_module(self.layout.first_norm, nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps))
        blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        parent, _, leaf = self.layout.blocks.rpartition(".")
        self.add_module(parent or leaf, nn.ModuleDict({leaf: blocks}) if parent else blocks)
        self.add_module(self.layout.norm, nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps))
        if not next(self.parameters()).is_meta:
            self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Random weights, drawn in transformers' order: blocks first, each weight twice."""
        for parent in (self.get_submodule(self.layout.blocks), self.embeddings):
            for layer in parent.modules():
                if isinstance(layer, (nn.Linear, nn.Conv2d)):
                    nn.init.normal_(layer.weight, std=SPREAD)
                    nn.init.trunc_normal_(layer.weight, std=SPREAD)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)
        for name in ("position_embeddings", "cls_token"):
            if hasattr(self.embeddings, name):
                nn.init.trunc_normal_(getattr(self.embeddings, name), std=SPREAD)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, which `load_backbone` and transformers read."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_text(Path(folder) / "config.json", json.dumps(self.config.to_diff_dict(), indent=2) + "\n")
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embeddings(images)
        if self.layout.first_norm:
            tokens = self.get_submodule(self.layout.first_norm)(tokens)
        for block in self.get_submodule(self.layout.blocks):  # type: ignore[attr-defined]
            tokens = block(tokens)
        return self.get_submodule(self.layout.norm)(tokens)  # type: ignore[no-any-return]
