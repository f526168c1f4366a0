"""`--micro-batch`: the gradients of a divided batch against those of the whole one, for every method."""

import copy
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from patchgen.config import Config
from patchgen.data.loaders import Batch
from patchgen.methods import METHODS, Method, make_method
from patchgen.methods.build import build_on
from patchgen.model.backbone import load_backbone
from patchgen.model.classifier import Classifier
from patchgen.runs.folder import RunFolder, run_name
from patchgen.tasks import make_fold
from patchgen.train import loop
from patchgen.train.lifecycle import train
from patchgen.train.loop import Divided, Step, indivisible, largest_part, make_optimizer, take_step
from tests.methods.conftest import write_clip

LABEL, DOMAIN = (0, 2, 2, 1, 0, -1, 1, 0), (0, 0, 0, 0, 2, 2, 2, 2)
# methods that need the whole batch: they read or change activations inside, or compare images there
TOGETHER = {"arm", "clipceil", "dpl", "gmdg", "kadaptation", "kadaptation-moa", "miro", "mixstyle", "sagnet"}
NO_IMAGES = {"clip", "duprg", "promptstyler"}  # nothing is trained on images
LARGEST = 1e-5  # difference of gradients, relative to the largest in its tensor; measured: 2e-6
TRAINED = [name for name, method in METHODS.items() if name not in NO_IMAGES and method.labels != "all"]


@pytest.fixture(scope="module", autouse=True)
def clip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A small CLIP for the methods on sentences."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMALL_CLIP", str(write_clip(tmp_path_factory.mktemp("clip"))))
        yield


@functools.cache
def backbone(source: str) -> Any:
    return load_backbone(source)


def made(name: str, **settings: Any) -> tuple[Any, Classifier, torch.optim.Optimizer]:
    source = os.environ["SMALL_CLIP"] if "text" in METHODS.get(name, Method).needs else "tiny"
    config = Config("photos", "c", method=name, backbone=source, image_size=28, dropout=0.2, lr=0.01, **settings)
    method = make_method(config)
    method.class_names = ("one", "two", "three")
    model = build_on(copy.deepcopy(backbone(source)), config, method, 3)
    method.sources = (0, 2)
    torch.manual_seed(0)
    method.setup(model)
    return method, model, make_optimizer(model, method)


def batch() -> Batch:
    image = torch.randn(len(LABEL), 3, 28, 28, generator=torch.Generator().manual_seed(1))
    return Batch(image, torch.tensor(LABEL), torch.tensor(DOMAIN), torch.arange(len(LABEL)), num_domains=2)


def gradients(name: str, part: int | None, **settings: Any) -> dict[str, Tensor]:
    """Of a step; of all of the model's and the method's parameters. Dropout is off, for it differs by the shape."""
    method, model, optimizer = made(name, **settings)
    for module in [*model.modules(), *method.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    torch.manual_seed(3)
    step = Step(method, model, optimizer, batch, network=Divided(model, part) if part else None)
    found: dict[str, Tensor] = {}

    def apply() -> None:
        for whose, module in (("model", model), ("method", method)):
            for key, tensor in module.named_parameters():
                if tensor.grad is not None:
                    found[f"{whose}.{key}"] = tensor.grad.clone()
        Step.apply(step)

    step.apply = apply  # type: ignore[method-assign]
    take_step(step)
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_the_gradients_are_those_of_the_whole_batch_or_it_is_refused(name: str) -> None:
    assert indivisible(*made(name)[:2]) == (name in TOGETHER)
    if name in TOGETHER:
        return
    whole, divided = gradients(name, None), gradients(name, 3)
    assert whole.keys() == divided.keys()
    almost_none = 1e-2 * max(float(tensor.abs().max()) for tensor in whole.values())  # a key's bias has rounding alone
    for key, tensor in whole.items():
        assert (divided[key] - tensor).abs().max() <= LARGEST * max(float(tensor.abs().max()), almost_none), key


def test_the_page_lists_the_refusals() -> None:
    page = (Path(__file__).parents[2] / "docs" / "study" / "mdg.md").read_text()
    [listed] = re.findall(r"activations inside the backbone refuse it\s\(([^)]*)\)", page)
    assert set(re.findall("`([^`]+)`", listed)) == TOGETHER


def test_dropout_is_the_same_in_both_rounds() -> None:
    method, model, optimizer = made("patchgen")
    seen: list[Tensor] = []
    model.drop.register_forward_hook(lambda module, inputs, output: seen.append(output.detach() == 0))
    take_step(Step(method, model, optimizer, batch, network=Divided(model, 3)))
    masks = [mask.tolist() for mask in seen]
    assert len(masks) == 6 and seen[0].any() and sorted(masks[:3]) == sorted(masks[3:])


def test_the_largest_part_that_fits_is_found_by_halving() -> None:
    tried: list[int] = []

    def trial(size: int) -> None:
        tried.append(size)
        if size > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    assert largest_part(96, trial) == 12 and tried == [96, 48, 24, 12]
    with pytest.raises(RuntimeError, match="a shape"):
        largest_part(96, lambda size: (_ for _ in ()).throw(RuntimeError("a shape is wrong")))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_in_parts_follows_the_whole_one(precision: str, tiny_settings: dict[str, Any], tmp_path: Any) -> None:
    settings = {**tiny_settings, "steps": 3, "swad": False, "precision": precision}
    whole = train(Config(**settings), tmp_path / "whole", quiet=True)
    divided = train(Config(**settings, micro_batch=3), tmp_path / "parts", quiet=True)
    assert divided.path.name == whole.path.name
    sizes = [json.loads((run.path / "env.json").read_text())["micro_batch"] for run in (whole, divided)]
    assert sizes == [8, 3]
    near = 1e-4 if precision == "32-true" else 0.02
    for a, b in zip(whole.records("evaluation"), divided.records("evaluation"), strict=True):
        assert b["train"] == pytest.approx(a["train"], abs=near, rel=near)


def test_auto_is_what_a_gpu_reports_to_fit(
    tiny_settings: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fits(size: int, trial: Callable[[int], None]) -> int:
        trial(2)
        return 3

    monkeypatch.setattr(loop, "largest_part", fits)
    monkeypatch.setattr(loop, "has_limit", lambda device: True)
    monkeypatch.setattr("patchgen.train.lifecycle.other_weights", lambda run, backbone: f"not {backbone['resolved']}")
    settings = {**tiny_settings, "steps": 1, "swad": False, "accelerator": "cpu"}
    run = train(Config(**settings, micro_batch="auto"), tmp_path)
    said = capsys.readouterr().err
    assert "micro-batch: 3 of the 8 images" in said and "not tiny architecture" in said
    assert json.loads((run.path / "env.json").read_text())["micro_batch"] == 3
    whole = train(Config(**{**settings, "method": "miro"}, micro_batch="auto"), tmp_path, quiet=True)
    assert json.loads((whole.path / "env.json").read_text())["micro_batch"] == 8  # it needs the batch together


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "miro", "micro_batch": 3}, "micro_batch 3 divides the 8 images .* 'miro' needs them together"),
    ({"accelerator": "tpu"}, "--accelerator must be"),
    ({"data": "nowhere"}, "nowhere"),
    ({"unseen": "nowhere"}, "nowhere"),
]


@pytest.mark.parametrize(("more", "text"), REFUSED)
def test_a_refused_training_leaves_no_folder(
    more: dict[str, Any], text: str, tiny_settings: dict[str, Any], tmp_path: Any
) -> None:
    with pytest.raises((ValueError, OSError), match=text):
        train(Config(**{**tiny_settings, **more}), tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_refusal_leaves_the_folder_of_an_earlier_start(tiny_settings: dict[str, Any], tmp_path: Any) -> None:
    config = Config(**{**tiny_settings, "method": "miro"}, micro_batch=3)
    started = RunFolder.create(tmp_path, config, run_name(config, make_fold(config).fingerprint()))
    with pytest.raises(ValueError, match="needs them together"):
        train(config, tmp_path, quiet=True)
    assert (started.path / "config.yaml").exists()
