"""Support for other vision transformers: their parts are detected by observing a forward pass.

    traits = adopt(model)     # a transformers model, or a timm model wrapped by patchgen.model.timm
    hidden = last_hidden(model, images)

A model is supported if its config has hidden_size, patch_size and num_hidden_layers, and its `last_hidden_state` is
(B, prefix + P, D) with the same number of prefix tokens for every P. Two small passes determine the rest: the final
LayerNorm, whether it was applied to the tokens (if a model normalises only its pooled vector, the tokens get the same
norm, as with CLIP; if it has none, they are used unchanged), and the parts that do not affect the tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from patchgen.model.architecture import config_of, fill, folder_tensors, vision_part

NORMS = ("layernorm", "norm", "post_layernorm", "fc_norm")  # names of a final norm
PROBES = ((4, 4), (4, 6))  # grids of the test passes: two, to detect pyramids by the length of their last level


@dataclass(frozen=True)
class Family:
    """Where to find the relevant parts of a model type."""

    model: str
    blocks: str
    final_norm: str = ""
    unused: tuple[str, ...] = ()  # do not affect the tokens: dropped, so that every trainable tensor has a gradient
    convolutional: bool = False
    norm_tokens: bool = False  # the model normalises only its pooled vector; here the tokens get the same final norm

    @property
    def config(self) -> str:
        """Name of the configuration class."""
        return self.model.removesuffix("Model") + "Config"


class Traits(NamedTuple):
    """What was detected about a model."""

    family: Family
    dim: int
    patch_size: int
    num_prefix_tokens: int


def last_hidden(model: nn.Module, images: Tensor) -> Tensor:
    """The model's last hidden state (B, T, D), with resized position embeddings if the model offers that option."""
    kind: Any = type(model)
    request = {"interpolate_pos_encoding": True} if _resizes(kind) else {}
    hidden: Tensor = model(images, **request).last_hidden_state
    return hidden


@functools.cache
def _resizes(kind: type[nn.Module]) -> bool:
    return "interpolate_pos_encoding" in inspect.signature(kind.forward).parameters


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


def open_folder(folder: Path, about: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The vision model in a transformers folder (the image tower if it has two), and the loading report."""
    config = config_of(*vision_part(about))
    _sizes(config)
    with quiet_loading(), torch.random.fork_rng(devices=[]):
        return fill(_model_class(config), config, folder_tensors(folder))


def _model_class(config: Any) -> Any:
    from transformers import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        raise ValueError(f"transformers has no plain model of type {config.model_type!r}")
    found = MODEL_MAPPING[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found


def build_generic(model_type: str, config: dict[str, Any]) -> nn.Module:
    """A randomly initialised model of any type known to transformers, without its unused parts."""
    settings = config_of(model_type, config)
    _sizes(settings)
    model: nn.Module = _model_class(settings)._from_config(settings)
    adopt(model)
    return model


def adopt(model: nn.Module) -> Traits:
    """Detect the parts of a model and drop those that do not affect its tokens.

    Raises:
        ValueError: it is not a vision transformer with a single resolution.
    """
    dim, patch_size, depth = _sizes(model.config)
    model.requires_grad_(True).eval()
    blocks = _blocks(model, depth)
    norms = {name: part for name, part in model.named_modules() if _is_final_norm(name, part, blocks, dim)}
    hidden, said = _look(model, norms, patch_size, PROBES[0])
    prefix = _prefix(model, hidden, PROBES[0], dim)
    wider, _ = _look(model, norms, patch_size, PROBES[1])
    if _prefix(model, wider, PROBES[1], dim) != prefix:
        raise ValueError(f"the number of prefix tokens of {_name(model)} varies with the image size; it cannot be used")
    passed = [name for name in norms if hidden.shape in said[name]]
    final = passed or [name for name in norms if said[name]] or list(norms)
    family = Family(_name(model), blocks, final[-1] if final else "", norm_tokens=bool(final) and not passed)
    _drop_unused(model, family, hidden, patch_size)
    return Traits(family, dim, patch_size, prefix)


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _sizes(config: Any) -> tuple[int, int, int]:
    """hidden_size, patch_size and num_hidden_layers; a square patch size may be given as a pair."""
    found = {name: getattr(config, name, None) for name in ("hidden_size", "patch_size", "num_hidden_layers")}
    sides = found["patch_size"]
    if isinstance(sides, (list, tuple)) and len(set(sides)) == 1:
        found["patch_size"] = sides[0]
    odd = [name for name, value in found.items() if not isinstance(value, int)]
    if odd:
        raise ValueError(
            f"a vision transformer's config has hidden_size, patch_size and num_hidden_layers as whole numbers; that "
            f"of model type {getattr(config, 'model_type', None)!r} lacks {', '.join(odd)}"
        )
    return found["hidden_size"], found["patch_size"], found["num_hidden_layers"]  # type: ignore[return-value]


def _blocks(model: nn.Module, depth: int) -> str:
    """The name of the list of blocks: as many as there are layers, all of the same class."""
    for name, part in model.named_modules():
        alike = isinstance(part, (nn.ModuleList, nn.Sequential)) and len({type(block) for block in part}) == 1
        if alike and len(part) == depth and any(True for _ in part.parameters()):  # type: ignore[arg-type]
            return name
    raise ValueError(f"{_name(model)} has no list of {depth} blocks of one class; it cannot be used as a backbone")


def _is_final_norm(name: str, part: nn.Module, blocks: str, dim: int) -> bool:
    weight = getattr(part, "weight", None)
    fits = name.rpartition(".")[2] in NORMS and isinstance(weight, Tensor) and weight.shape == (dim,)
    return fits and not name.startswith(blocks + ".") and "embed" not in name


def _look(
    model: nn.Module, norms: dict[str, nn.Module], patch_size: int, grid: tuple[int, int]
) -> tuple[Tensor, dict[str, list[torch.Size]]]:
    """The last hidden state of two images, and the shapes of each norm's outputs."""
    said: dict[str, list[torch.Size]] = {name: [] for name in norms}
    hooks = [
        part.register_forward_hook(lambda module, inputs, output, name=name: said[name].append(output.shape))
        for name, part in norms.items()
    ]
    try:
        return last_hidden(model, _images(model, patch_size, grid)), said
    except Exception as error:  # libraries raise many types on image sizes they do not support
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ValueError(f"{_name(model)} does not accept images of any size, as a backbone must ({text})") from error
    finally:
        for hook in hooks:
            hook.remove()


def _images(model: nn.Module, patch_size: int, grid: tuple[int, int]) -> Tensor:
    device = next(model.parameters()).device
    count = 2 * 3 * patch_size**2 * grid[0] * grid[1]
    ramp = torch.arange(count, device=device).sin()  # no random numbers: the caller's generator is not advanced
    return ramp.view(2, 3, patch_size * grid[0], patch_size * grid[1])


def _prefix(model: nn.Module, hidden: Any, grid: tuple[int, int], dim: int) -> int:
    patches = grid[0] * grid[1]
    shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else None
    if shape is None or len(shape) != 3 or shape[2] != dim or shape[1] < patches:
        raise ValueError(
            f"a backbone's last_hidden_state is (B, prefix + P, {dim}) with P = {patches} for {grid[0]} x {grid[1]} "
            f"patches; that of {_name(model)} is {shape}"
        )
    return shape[1] - patches


def _drop_unused(model: nn.Module, family: Family, hidden: Tensor, patch_size: int) -> None:
    """Whole modules become the identity, single tensors None; the tokens must stay as they were."""
    read = model.get_submodule(family.final_norm)(hidden) if family.norm_tokens else hidden
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(read.square().sum(), list(named.values()), allow_unused=True)
    unused = {name for name, grad in zip(named, grads, strict=True) if grad is None}
    if not unused:
        return
    for name, part in list(model.named_modules()):
        own = {f"{name}.{inner}" for inner, _ in part.named_parameters()}
        if name and own and own <= unused:
            _put(model, name, nn.Identity())
            unused -= own
    for name in unused:
        _put(model, name, None)
    again, _ = _look(model, {}, patch_size, PROBES[0])
    if again.device.type != "meta" and not torch.equal(again, hidden):
        raise ValueError(f"{_name(model)} does not give the same tokens twice; it cannot be used as a backbone")


def _put(model: nn.Module, name: str, part: nn.Module | None) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, part)
