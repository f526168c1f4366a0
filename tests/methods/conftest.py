"""A method with its model, a batch and the model's output: what the trainer has before it asks for the losses."""

import json
import os
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import Method, make_method
from patchgen.methods.build import build_model, build_on
from patchgen.model.backbone import Backbone
from patchgen.model.classifier import Classifier, Output, trained_tensors
from patchgen.model.convert import Loaded, build

LABEL = (0, 2, 2, 1, 0, -1)
DOMAIN = (0, 0, 0, 2, 2, 2)


class Scene(NamedTuple):
    method: Method
    model: Classifier
    batch: Batch

    def forward(self) -> Output:
        out: Output = self.model(self.batch.image)
        return out

    def move(self) -> None:
        """Change every trained tensor, as steps would."""
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for tensor in trained_tensors(self.model).values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=generator)

    def reached(self, loss: Tensor) -> tuple[set[str], set[str]]:
        """Names of the model's and the method's tensors whose gradient the loss changes."""
        for module in (self.model, self.method):
            module.zero_grad()
        loss.backward()
        return _touched(self.model), _touched(self.method)


def _touched(module: torch.nn.Module) -> set[str]:
    return {name for name, tensor in module.named_parameters() if tensor.grad is not None and tensor.grad.any()}


def small_resnet() -> Backbone:
    torch.manual_seed(3)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 1, 1]}
    return Backbone(Loaded(build("resnet", sizes)), "small", "small")


def make_scene(method: str, sources: tuple[int, ...] = (), network: Backbone | None = None, **changes: Any) -> Scene:
    settings: dict[str, Any] = {"backbone": "tiny", "image_size": 28} | changes
    config = Config(data="photos", unseen="site_c", method=method, **settings)
    chosen = make_method(config)
    chosen.class_names = ("circle", "cross", "round_square")
    model = build_on(network, config, chosen, 3) if network else build_model(config, chosen, 3)
    torch.manual_seed(0)
    chosen.sources = sources
    chosen.setup(model)
    size = config.image_size
    image = torch.randn(len(LABEL), 3, size, size, generator=torch.Generator().manual_seed(1))
    batch = Batch(image, torch.tensor(LABEL), torch.tensor(DOMAIN), torch.arange(len(LABEL)))
    return Scene(chosen, model, batch)


@pytest.fixture
def scene() -> Callable[..., Scene]:
    """`scene(method, **settings)`; with `sources=(0, 2)` the method knows the domains of the batch."""
    return make_scene


@pytest.fixture
def resnet_scene() -> Callable[..., Scene]:
    """The same on a small ResNet."""
    return lambda method, **changes: make_scene(method, network=small_resnet(), image_size=64, **changes)


@pytest.fixture
def clip_scene(clip_folder: Path) -> Callable[..., Scene]:
    """The same on a small CLIP."""
    settings = {"backbone": str(clip_folder), "image_size": 56}
    return lambda method, **changes: make_scene(method, **{**settings, **changes})


def gradients(rows: list[int], settings: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients and buffers after the losses of these rows of a batch, by name."""
    method, model, _ = make_scene(**settings, sources=(0, 2))
    for module in method.modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()  # it would draw differently on each device
    image = torch.randn(8, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    label, domain = torch.tensor([0, 1, -1, -1, 2, 1, 0, -1]), torch.tensor([0, 0, 0, 0, 2, 2, 2, 2])
    batch = Batch(image[rows], label[rows], domain[rows], torch.tensor(rows))
    torch.stack(list(method.losses(model(batch.image), batch).values())).sum().backward()
    named = [*model.named_parameters(), *method.named_parameters(prefix="method")]
    found = {name: tensor.grad for name, tensor in named if tensor.grad is not None}
    return found | {name: tensor for name, tensor in method.named_buffers() if tensor.is_floating_point()}


WORKER = """
import json, os, sys
from safetensors.torch import save_file
from torch import distributed as dist
from conftest import gradients

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
for line in sys.stdin:
    found = gradients([[0, 1, 4, 5], [2, 3, 6, 7]][rank], json.loads(line))
    for tensor in found.values():  # what DDP does with the model's and the step with the method's
        dist.all_reduce(tensor)
        tensor /= 2
    if rank == 0:
        save_file(found, f"{folder}/found.safetensors")
    print("saved", flush=True)
os._exit(0)  # gloo's threads may abort an interpreter that ends in the usual way
"""


@pytest.fixture(scope="session")
def two_devices(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    """`two_devices(method=..., **settings)`: gradients and buffers on one device, and on two that share its batch."""
    folder = tmp_path_factory.mktemp("devices")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(folder)],
            env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip

    def run(**settings: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        for rank in ranks:
            assert rank.stdin is not None
            print(json.dumps(settings), file=rank.stdin, flush=True)
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "saved\n"
        return gradients(list(range(8)), settings), load_file(folder / "found.safetensors")

    yield run
    for rank in ranks:
        rank.communicate(timeout=60)  # an empty standard input ends it


def write_clip(folder: Path) -> Path:
    """A CLIP of two small towers, and a tokenizer that knows letters: no word is longer than it looks."""
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

    symbols = [*string.ascii_lowercase, ".", "<|startoftext|>", "<|endoftext|>"]
    vocab = {name: i for i, name in enumerate([*(s + "</w>" for s in symbols[:27]), *symbols])}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ends = {"bos_token_id": vocab["<|startoftext|>"], "eos_token_id": vocab["<|endoftext|>"]}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**small, **ends, "vocab_size": len(vocab), "max_position_embeddings": 40},
        vision_config={**small, "hidden_size": 48, "image_size": 56, "patch_size": 14},
        projection_dim=24,
    )
    model = CLIPModel(config)
    with torch.no_grad():  # as it comes, all sentences are nearly the same
        for name, tensor in model.named_parameters():
            if "embedding" in name or "projection" in name:
                tensor.normal_(std=0.5)
    model.save_pretrained(folder)
    CLIPTokenizer(vocab=vocab, merges=[]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))
