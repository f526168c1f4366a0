"""Vision transformers of timm: `--backbone timm:vit_small_patch14_dinov2.lvd142m`, `timm:hf-hub:MahmoodLab/UNI`.

    pip install "patchgen[timm]" "torch==2.13.0+cpu"      # the torch that is installed, from its own index

A timm model gets the interface of a transformers model (a config, and a forward pass that returns `last_hidden_state`);
`patchgen.model.generic` then detects its parts as for any other model. timm is imported only when it is needed.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from patchgen.common.text import first_line
from patchgen.model.preprocessing import Pixels
from patchgen.model.weights import require_requests

PREFIX = "timm:"
MODEL_TYPE = "timm"
HUB = "hf-hub:"


class TimmVit(nn.Module):
    """A timm network with the interface of a transformers vision model; its name alone suffices to rebuild it."""

    def __init__(self, net: Any, name: str) -> None:
        super().__init__()
        self.net = net
        try:
            sizes = {"hidden_size": int(self.net.num_features), "patch_size": self.net.patch_embed.patch_size,
                     "num_hidden_layers": len(self.net.blocks)}  # fmt: skip
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"a timm backbone is a vision transformer with patch_embed and blocks, and {name!r} is none ({error}); "
                "choose one such as timm:vit_small_patch14_dinov2.lvd142m"
            ) from error
        self.config = SimpleNamespace(model_type=MODEL_TYPE, to_diff_dict=partial(dict, name=name), **sizes)
        cfg = dict(getattr(net, "pretrained_cfg", None) or {})
        self.licence = str(cfg.get("license") or "unknown")
        self.pixels = Pixels(tuple(cfg["mean"]), tuple(cfg["std"])) if "mean" in cfg and "std" in cfg else None

    def forward(self, images: Tensor) -> SimpleNamespace:
        """Images (B,3,H,W) -> `.last_hidden_state` (B, prefix + P, D)."""
        return SimpleNamespace(last_hidden_state=self.net.forward_features(images))


def build_timm(name: str, *, pretrained: bool) -> TimmVit:
    """The network `name` of timm, or of a hub as `hf-hub:ORG/NAME`, for images of any size."""
    if pretrained:
        require_requests(PREFIX + name)  # timm fetches them itself, and its cache has no index to look into
    timm = import_timm()
    try:
        net = timm.create_model(
            name, pretrained=pretrained, num_classes=0, dynamic_img_size=True, **_arguments(name, timm)
        )
    except TypeError as error:  # an architecture without that argument
        raise ValueError(f"timm's {name!r} is no vision transformer for images of any size ({error})") from error
    except Exception as error:  # an unknown name, no network, a gated repository: timm and its hub raise many types
        raise ValueError(
            f"timm cannot give {name!r} ({first_line(error)}); its names: timm.list_models(pretrained=True)"
        ) from error
    return TimmVit(net, name)


def import_timm() -> Any:
    try:
        import timm
    except Exception as error:  # a torchvision that does not fit torch fails with more than ImportError
        raise ValueError(
            f"a backbone timm:NAME needs timm and a torchvision built for torch {torch.__version__}: pip install "
            f'"patchgen[timm]" "torch=={torch.__version__}", from the index this torch came from ({error})'
        ) from error
    return timm


def _arguments(name: str, timm: Any) -> dict[str, Any]:
    """Extra arguments that pathology model cards require (UNI, UNI2-h, Virchow and Virchow2)."""
    card = name.removeprefix(HUB).lower() if name.startswith(HUB) else ""
    if card == "mahmoodlab/uni":
        return {"init_values": 1e-5}
    if card not in ("mahmoodlab/uni2-h", "paige-ai/virchow", "paige-ai/virchow2"):
        return {}
    gated = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU}
    if card != "mahmoodlab/uni2-h":
        return gated
    sizes = {"img_size": 224, "patch_size": 14, "depth": 24, "num_heads": 24, "embed_dim": 1536, "reg_tokens": 8}
    return gated | sizes | {"mlp_ratio": 2.66667 * 2, "init_values": 1e-5, "no_embed_class": True}
