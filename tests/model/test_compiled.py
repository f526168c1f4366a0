"""Compiled blocks: the same training, no evaluation compiled, and a run that goes on where compiling fails.

The back end here is `aot_eager`, which traces and differentiates as the usual one does and leaves out the machine code.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from patchgen.config import Config
from patchgen.model import device
from patchgen.model.backbone import Backbone, load_backbone
from patchgen.model.device import compile_blocks
from patchgen.model.tuning import set_tuning
from patchgen.runs.folder import RunFolder
from patchgen.runs.tensors import load_tensors
from patchgen.train.lifecycle import train


class Traced:
    """A back end that counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, example)


@pytest.fixture()
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    torch.compiler.reset()
    backend = Traced()
    monkeypatch.setattr(device, "BACKEND", backend)
    return backend


def tuned(tune: str = "layernorm") -> Backbone:
    backbone = load_backbone("tiny")
    set_tuning(backbone, tune)
    return backbone


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 28, 28, generator=torch.Generator().manual_seed(1))


def gradients(backbone: Backbone) -> list[torch.Tensor]:
    learned = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(backbone(images()).patches.square().sum(), learned))


@pytest.mark.parametrize("tune", ["layernorm", "last_block", "full"])
def test_gradients_and_names_are_the_same(tune: str, traced: Traced) -> None:
    plain, backbone = tuned(tune), tuned(tune)
    state = torch.random.get_rng_state()
    assert compile_blocks(backbone, images(), print) and traced.graphs
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in backbone.parameters())
    assert backbone.state_dict().keys() == plain.state_dict().keys() and backbone.digest() == plain.digest()
    torch.testing.assert_close(gradients(backbone), gradients(plain), rtol=1e-5, atol=1e-5)


def test_evaluations_are_not_compiled(traced: Traced) -> None:
    backbone = tuned()
    compile_blocks(backbone, images(), print)
    first = traced.graphs
    assert first == 2  # in front of the first block nothing learns: its input needs no gradient
    with torch.no_grad():
        backbone(images(5)), backbone(images())
    gradients(backbone)
    assert traced.graphs == first


def test_a_hook_behind_it_is_heard(traced: Traced) -> None:
    backbone = tuned()
    compile_blocks(backbone, images(), print)
    heard: list[torch.Size] = []
    last = backbone.model.get_submodule(backbone.family.blocks)[-1]
    last.register_forward_hook(lambda module, given, output: heard.append(output.shape))
    gradients(backbone)
    assert heard == [(2, 9, 64)]  # CLS, four registers, 2 x 2 patches


def test_a_copy_has_its_own_weights(traced: Traced) -> None:
    backbone = tuned("full")
    compile_blocks(backbone, images(), print)
    other = copy.deepcopy(backbone)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.zero_()
    torch.testing.assert_close(other(images()).patches, tuned("full")(images()).patches)


def fails(graph: Any, example: Any) -> Any:
    raise OSError("no compiler\nand pages of its output")


def half_fails(graph: Any, example: Any) -> Any:
    """Forward passes alone."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda module, given: module.forward, bw_compiler=fails)(graph, example)


@pytest.mark.parametrize("backend", [fails, half_fails])
def test_a_failing_back_end_leaves_the_backbone_as_it_was(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(device, "BACKEND", backend)
    backbone, said = tuned(), []
    assert not compile_blocks(backbone, images(), said.append)
    assert said == ["--compile: OSError: no compiler; continuing without it"]
    torch.testing.assert_close(gradients(backbone), gradients(tuned()), rtol=0, atol=0)


# Runs


def tensors(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_tensors(run.checkpoint("selected"))[0] | load_tensors(run.checkpoint("swad"))[0]


def records(run: RunFolder) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if "seconds" not in k} for record in run.records()]


def test_a_run_whose_back_end_fails_is_the_plain_one(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "BACKEND", fails)
    plain = train(Config(**tiny_settings), tmp_path, quiet=True)
    run = train(Config(**tiny_settings, compile=True), tmp_path)
    assert run.path.name != plain.path.name and records(run) == records(plain)
    assert capsys.readouterr().err.count("--compile: ") == 1
    torch.testing.assert_close(tensors(run), tensors(plain), rtol=0, atol=0)


@pytest.mark.parametrize("more", [
    {"micro_batch": 4, "precision": "bf16-mixed"},
    {"checkpoint_activations": True},
    {"method": "patchgen+mixstyle"},
], ids=str)  # fmt: skip
def test_a_run_follows_the_plain_one(
    more: dict[str, Any], tiny_settings: dict[str, Any], tmp_path: Path, traced: Traced
) -> None:
    settings = {**tiny_settings, **more, "steps": 3, "threads": 1}
    runs = [train(Config(**settings, compile=on), tmp_path, quiet=True) for on in (False, True)]
    assert traced.graphs == 2  # at the set-up, and none in the loop
    torch.testing.assert_close(tensors(runs[1]), tensors(runs[0]), rtol=0, atol=1e-6)


def test_kept_features_are_not_compiled_for(
    tiny_settings: dict[str, Any], tmp_path: Path, traced: Traced, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**tiny_settings, "method": "lp", "augment": False, "steps": 1}
    train(Config(**settings, compile=True), tmp_path)
    assert "its features are cached; continuing without it" in capsys.readouterr().err and not traced.graphs


@pytest.mark.slow
def test_machine_code_follows_the_plain_run(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    torch.compiler.reset()
    runs = [train(Config(**tiny_settings, threads=1, compile=on), tmp_path, quiet=True) for on in (False, True)]
    torch.testing.assert_close(tensors(runs[1]), tensors(runs[0]), rtol=1e-3, atol=1e-4)
