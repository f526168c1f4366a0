"""Models of transformers and timm that are no plain ViT: built without their code, their parts detected by observation.

A config.json can name code (`auto_map`), kernels to download (`_attn_implementation`), adapters and quantisers. None of
these reach a loader: only plain values of fields that the model type's own config class declares are used. Small passes
find the final LayerNorm and the parts that do not affect the tokens, (B, prefix + P, D) with one prefix for every P.
"""

import dataclasses
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from patchgen.common.text import first_line
from patchgen.common.untrusted import shortly
from patchgen.model.preprocessing import Pixels
from patchgen.model.vit import LAYOUTS, Vit
from patchgen.model.vit_files import check_sizes
from patchgen.model.weights import folder_tensors, require_requests

NORMS = ("layernorm", "norm", "post_layernorm", "fc_norm")  # names of a final norm
PROBES = ((4, 4), (4, 6))  # grids of the test passes: two, to detect pyramids by the length of their last level
LONGEST = 1000  # maximum length of a list in a config
TIMM = "timm"  # model type


@dataclass(frozen=True)
class Family:
    """Where to find the relevant parts of a network."""

    blocks: str
    final_norm: str = ""
    convolutional: bool = False
    norm_tokens: bool = False  # the model normalises only its pooled vector; here the tokens get the same final norm


CONVOLUTIONAL = {
    "resnet": Family("encoder.stages", convolutional=True),
    "regnet": Family("encoder.stages", convolutional=True),
    "convnext": Family("encoder.stages", "layernorm", convolutional=True, norm_tokens=True),
    "convnextv2": Family("encoder.stages", "layernorm", convolutional=True, norm_tokens=True),
    "dinov3_convnext": Family("model.stages", "layer_norm", convolutional=True),
}
FAMILIES = {name: Family(layout.blocks, layout.norm) for name, layout in LAYOUTS.items()} | CONVOLUTIONAL


Traits = tuple[Family, int, int, int]  # with the width, the patch size and the number of prefix tokens


def on_input(module: nn.Module, act: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Replace a module's first argument by ``act`` of it in every pass."""

    def hook(module: nn.Module, inputs: Any, named: Any) -> Any:
        if inputs:
            return (act(inputs[0]), *inputs[1:]), named
        first = next(iter(named))
        return inputs, {**named, first: act(named[first])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def on_tensor(module: nn.Module, act: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Call ``act`` with a module's output (or the first of a tuple) in every pass; what it returns replaces it."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        several = isinstance(output, tuple)
        changed = act(output[0] if several else output)
        return (changed, *output[1:]) if several and changed is not None else changed

    return module.register_forward_hook(hook)


def last_hidden(model: nn.Module, images: Tensor) -> Tensor:
    """The model's last hidden state (B, T, D), with resized position embeddings if the model offers that option."""
    resizes = "interpolate_pos_encoding" in inspect.signature(type(model).forward).parameters
    output: Any = model(images, interpolate_pos_encoding=True) if resizes else model(images)
    return output if isinstance(output, Tensor) else output.last_hidden_state  # type: ignore[no-any-return]


# transformers


@functools.cache
def hide_broken_torchvision() -> None:
    """Call before models of transformers are imported: a torchvision that does not fit torch counts as absent."""
    try:
        import torchvision  # noqa: F401
    except Exception:  # absent; or built for another torch, which fails with more than ImportError
        sys.modules["torchvision"] = None  # type: ignore[assignment]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence progress bars and load reports of transformers; missing tensors are reported by our own messages."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def allowed(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `given` with plain values that the config class `kind` declares itself, not its base class."""
    from transformers import PreTrainedConfig

    shared = {f.name for f in dataclasses.fields(PreTrainedConfig)}  # type: ignore[arg-type]
    own = {f.name for f in dataclasses.fields(kind)} | set(kind.attribute_map)
    names = {name for name in own - shared if not name.startswith("_")}
    return {name: value for name, value in given.items() if name in names and _is_plain(value)}


def _is_plain(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < 3 and len(value) <= LONGEST and all(_is_plain(member, depth + 1) for member in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int)) or (isinstance(value, str) and len(value) <= 100)


def _design(about: Mapping[str, Any]) -> tuple[Any, Any]:
    """Class and config of the vision model of a config.json; of a two-tower model, those of the image tower."""
    hide_broken_torchvision()
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    model_type, inner = about.get("model_type"), about.get("vision_config")
    if isinstance(inner, dict):
        known = CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None
        parts = known.sub_configs if known else {}
        usual = parts["vision_config"].model_type if "vision_config" in parts else ""
        model_type, about = str(inner.get("model_type") or usual), inner
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model type {str(model_type)[:60]!r}")
    for name, value in about.items():
        if name.endswith("_eps") and not (isinstance(value, (int, float)) and 0 < value <= 0.01):
            raise ValueError(f"{name} must be a number above 0 and at most 0.01, not {shortly(value)}")
    config = CONFIG_MAPPING[model_type](**allowed(CONFIG_MAPPING[model_type], about))
    if model_type not in CONVOLUTIONAL:
        _sizes(config)
    if type(config) not in MODEL_MAPPING:
        raise ValueError(f"transformers has no plain model of type {config.model_type!r}")
    kinds = MODEL_MAPPING[type(config)]
    return kinds[0] if isinstance(kinds, (list, tuple)) else kinds, config


def fill(kind: Any, config: Any, state: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Any]]:
    """A model with these tensors, including names of earlier transformers versions; also returns what is missing."""
    check_sizes(lambda: kind(config), config.to_dict(), state)
    return kind.from_pretrained(  # type: ignore[no-any-return]
        None, config=config, state_dict=state, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )


def open_folder(folder: Path, about: Mapping[str, Any]) -> nn.Module:
    """The vision model in a transformers folder with the config.json ``about``, without its unused parts."""
    try:
        kind, config = _design(about)
        with quiet_loading():
            model, info = fill(kind, config, folder_tensors(folder))
    except Exception as error:  # transformers raises many types on damaged files
        raise ValueError(
            f"model type must be one of {sorted(FAMILIES)}, or a vision transformer that transformers knows; {folder} "
            f"has {shortly(about.get('model_type'))} and cannot be read as one ({first_line(error)})"
        ) from error
    whole = set(model.state_dict())
    adopt(model)
    # transformers initialises missing tensors at random: only parts that are dropped may be missing
    dropped = whole - set(model.state_dict())
    if wrong := [*sorted(set(info["missing_keys"]) - dropped), *map(str, info["mismatched_keys"])]:
        name = type(model).__name__
        raise ValueError(f"{folder} does not fill a {name}; missing or misshapen: {', '.join(wrong[:5])}")
    return model


def build_generic(model_type: str, given: Mapping[str, Any], state: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A random model of any type known to transformers, without unused parts; its future tensors bound its size."""
    kind, config = _design({**given, "model_type": model_type})
    if state is not None:
        check_sizes(lambda: kind(config), config.to_dict(), state)
    model: nn.Module = kind._from_config(config)
    adopt(model)
    return model


# timm


class TimmVit(nn.Module):
    """A timm network with the interface of a transformers vision model; its name alone suffices to rebuild it."""

    def __init__(self, net: Any, name: str) -> None:
        super().__init__()
        self.net = net
        self.config = SimpleNamespace(
            model_type=TIMM,
            to_diff_dict=functools.partial(dict, name=name),
            hidden_size=getattr(net, "num_features", None),
            patch_size=getattr(getattr(net, "patch_embed", None), "patch_size", None),
            num_hidden_layers=len(getattr(net, "blocks", ())),
        )
        cfg = dict(getattr(net, "pretrained_cfg", None) or {})
        self.licence = str(cfg.get("license") or "unknown")
        self.pixels = Pixels(tuple(cfg["mean"]), tuple(cfg["std"])) if "mean" in cfg and "std" in cfg else None

    def forward(self, images: Tensor) -> SimpleNamespace:
        """Images (B,3,H,W) -> `.last_hidden_state` (B, prefix + P, D)."""
        return SimpleNamespace(last_hidden_state=self.net.forward_features(images))


def build_timm(name: str, *, pretrained: bool) -> TimmVit:
    """The network `name` of timm, or of a hub as `hf-hub:ORG/NAME`, for images of any size."""
    if pretrained:
        require_requests(f"timm:{name}")  # timm fetches them itself, and its cache has no index to look into
    timm = import_timm()
    arguments: dict[str, Any] = {}  # that pathology model cards require
    card = name.removeprefix("hf-hub:").lower() if name.startswith("hf-hub:") else ""
    if card in ("mahmoodlab/uni2-h", "paige-ai/virchow", "paige-ai/virchow2"):
        arguments = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU}
    if card == "mahmoodlab/uni2-h":
        arguments |= {"img_size": 224, "patch_size": 14, "depth": 24, "num_heads": 24, "embed_dim": 1536,
                      "reg_tokens": 8, "mlp_ratio": 2.66667 * 2, "no_embed_class": True}  # fmt: skip
    if card in ("mahmoodlab/uni", "mahmoodlab/uni2-h"):
        arguments["init_values"] = 1e-5
    try:
        net = timm.create_model(name, pretrained=pretrained, num_classes=0, dynamic_img_size=True, **arguments)
    except Exception as error:  # unknown, fixed in size, gated, no network: timm and its hub raise many types
        raise ValueError(
            f"timm cannot give {name!r} as a vision transformer for images of any size ({first_line(error)}); its "
            "names: timm.list_models(pretrained=True)"
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


# Detection


def adopt(model: nn.Module) -> Traits:
    """Find the parts of a model, and drop those that do not affect its tokens."""
    config: Any = model.config
    if isinstance(model, Vit):
        return FAMILIES[config.model_type], config.hidden_size, config.patch_size, 1 + config.num_register_tokens
    if config.model_type in CONVOLUTIONAL:
        patch_size = (getattr(config, "patch_size", None) or 4) * 2 ** (len(config.depths) - 1)
        return CONVOLUTIONAL[config.model_type], config.hidden_sizes[-1], patch_size, 0
    dim, patch_size, depth = _sizes(config)
    kind = type(model).__name__
    model.requires_grad_(True).eval()
    blocks = _blocks(model, depth)
    norms = {
        name: part
        for name, part in model.named_modules()
        if name.rpartition(".")[2] in NORMS
        and "embed" not in name
        and not name.startswith(blocks + ".")
        and getattr(getattr(part, "weight", None), "shape", None) == (dim,)
    }
    outputs: dict[str, list[torch.Size]] = {name: [] for name in norms}  # shapes
    with ExitStack() as hooks:
        for name, part in norms.items():
            hooks.enter_context(on_tensor(part, lambda output, name=name: outputs[name].append(output.shape)))  # type: ignore[misc]
        hidden, prefix = _look(model, dim, patch_size, PROBES[0])
    if _look(model, dim, patch_size, PROBES[1])[1] != prefix:
        raise ValueError(f"the number of prefix tokens of {kind} varies with the image size; it cannot be used")
    applied = [name for name in norms if hidden.shape in outputs[name]]  # to the tokens
    final = applied or [name for name in norms if outputs[name]] or list(norms)
    family = Family(blocks, final[-1] if final else "", norm_tokens=bool(final) and not applied)
    _drop_unused(model, model.get_submodule(family.final_norm)(hidden) if family.norm_tokens else hidden)
    again, _ = _look(model, dim, patch_size, PROBES[0])
    if again.device.type != "meta" and not torch.equal(again, hidden):
        raise ValueError(f"{kind} does not give the same tokens twice; it cannot be used as a backbone")
    return family, dim, patch_size, prefix


def _sizes(config: Any) -> tuple[int, int, int]:
    """hidden_size, patch_size and num_hidden_layers; a square patch size may be given as a pair."""
    sizes = {name: getattr(config, name, None) for name in ("hidden_size", "patch_size", "num_hidden_layers")}
    sides = sizes["patch_size"]
    if isinstance(sides, (list, tuple)) and len(set(sides)) == 1:
        sizes["patch_size"] = sides[0]
    odd = [name for name, value in sizes.items() if not isinstance(value, int)]
    if odd:
        raise ValueError(
            f"a vision transformer's config has hidden_size, patch_size and num_hidden_layers as whole numbers; that "
            f"of model type {getattr(config, 'model_type', None)!r} lacks {', '.join(odd)}"
        )
    return sizes["hidden_size"], sizes["patch_size"], sizes["num_hidden_layers"]  # type: ignore[return-value]


def _blocks(model: nn.Module, depth: int) -> str:
    """The name of the list of blocks: as many as there are layers, all of the same class."""
    for name, part in model.named_modules():
        alike = isinstance(part, (nn.ModuleList, nn.Sequential)) and len({type(block) for block in part}) == 1
        if alike and len(part) == depth and any(True for _ in part.parameters()):  # type: ignore[arg-type]
            return name
    raise ValueError(f"{type(model).__name__} has no list of {depth} blocks of one class, as a backbone must have")


def _look(model: nn.Module, dim: int, patch_size: int, grid: tuple[int, int]) -> tuple[Tensor, int]:
    """The last hidden state (2, prefix + P, D) of two images of h x w patches, and the number of prefix tokens."""
    kind, (rows, columns), patches = type(model).__name__, grid, grid[0] * grid[1]
    # no random numbers: the caller's generator is not advanced
    ramp = torch.arange(6 * patch_size**2 * patches, device=next(model.parameters()).device).sin()
    try:
        hidden: Any = last_hidden(model, ramp.view(2, 3, patch_size * rows, patch_size * columns))
    except Exception as error:  # libraries raise many types on image sizes they do not support
        raise ValueError(f"{kind} does not accept images of any size ({first_line(error)})") from error
    shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else None
    if shape is None or len(shape) != 3 or shape[2] != dim or shape[1] < patches:
        raise ValueError(
            f"a backbone's last_hidden_state is (B, prefix + P, {dim}) with P = {patches} for {rows} x {columns} "
            f"patches; that of {kind} is {shape}"
        )
    return hidden, shape[1] - patches


def _drop_unused(model: nn.Module, tokens: Tensor) -> None:
    """Modules that do not affect the tokens become the identity, single tensors None."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(tokens.square().sum(), list(named.values()), allow_unused=True)
    unused = {name for name, grad in zip(named, grads, strict=True) if grad is None}

    def put(name: str, part: nn.Module | None) -> None:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, part)

    for name, part in list(model.named_modules()):
        inside = {f"{name}.{inner}" for inner, _ in part.named_parameters()}
        if name and inside and inside <= unused:
            put(name, nn.Identity())
            unused -= inside
    for name in unused:
        put(name, None)
