"""A folder of others never causes a request: neither the hub nor pip is asked unless the user says so now."""

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml

from patchgen.commands import options_of
from patchgen.common.files import cache_dir
from patchgen.predict.model_folder import read_model, write_model
from patchgen.predict.predictor import Prediction, load_predictor
from patchgen.viewer.library import Library, find_items

OPENING = ("predict", "evaluate", "explain", "embed", "export", "discover", "diagnose", "theory", "serve")
WORDS = [*OPENING, "slide map", "slide embed"]
OTHERS = ["dinov2-small", "auto", "registry", "timm:hf-hub:someorg/model", "timm:resnet50"]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Attempts to reach the network or to start pip; each raises. Nothing is cached."""
    attempts: list[str] = []

    def refuse(name: str) -> Callable[..., Any]:
        def attempt(*words: object, **_: object) -> None:
            attempts.append(f"{name} {words}")
            raise OSError("no network in this test")

        return attempt

    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    for owner in ("socket.getaddrinfo", "socket.socket.connect", "subprocess.run", "subprocess.Popen"):
        monkeypatch.setattr(owner, refuse(owner))
    return attempts


@pytest.fixture(params=["model", "run"])
def strange(request: pytest.FixtureRequest, fitted_model: Path, tiny_run: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a folder whose settings name a backbone that it does not hold."""

    def make(backbone: str) -> Path:
        folder = tmp_path / "strange"
        if request.param == "run":
            shutil.copytree(tiny_run("lp").path, folder)
            settings = yaml.safe_load((folder / "config.yaml").read_text()) | {"backbone": backbone}
            (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        else:
            write_model(folder, read_model(fitted_model), with_backbone=False)
            facts = json.loads((folder / "config.json").read_text())
            facts["settings"]["backbone"] = backbone
            (folder / "config.json").write_text(json.dumps(facts))
        return folder

    return make


@pytest.mark.parametrize(
    "backbone", ["someorg/model", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_no_folder_causes_a_request(backbone: str, strange: Callable[[str], Path], requests: list[str]) -> None:
    folder = strange(backbone)
    with pytest.raises(ValueError, match="not on this machine.*--allow-download.*--backbone"):
        load_predictor(folder)
    assert not requests and not cache_dir().joinpath("weights").exists()


def test_the_user_may_allow_it_or_name_a_copy(
    strange: Callable[[str], Path], requests: list[str], image_folder: Path
) -> None:
    folder = strange("someorg/model")
    [image, *_] = sorted((image_folder / "studio").rglob("*.png"))
    [found] = load_predictor(folder, backbone="tiny").predict([image])
    assert isinstance(found, Prediction) and not requests
    viewed = Library(find_items([folder]), backbone="tiny").predictor("1")
    assert viewed.classes == load_predictor(folder, backbone="tiny").classes and not requests
    with pytest.raises(ValueError, match="hub"):
        load_predictor(folder, allow_download=True)
    assert requests


@pytest.mark.parametrize("command", WORDS)
def test_every_command_has_the_options_that_the_refusal_names(command: str) -> None:
    name, _, word = command.partition(" ")
    action = import_module(f"patchgen.commands.{name}").COMMAND
    options = signature(options_of(action[word] if word else action)).parameters
    assert {"backbone", "allow_download"} <= options.keys()
