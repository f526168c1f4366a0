"""Every field and tensor of a model folder, spoiled in many ways: a sentence or a model, in bounded memory and time."""

import copy
import hashlib
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from patchgen.predict.predictor import load_predictor

VALUES: list[Any] = [None, True, -1, 0, 10**6, 10**30, 1.5, float("nan"), float("inf"), "", "64", "x" * 200_000, [],
                     [1], [0, 0, 0], {}, {"a": 1}]  # fmt: skip
SECONDS, BYTES = 10.0, 1 << 30


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all fields of an object, nested ones included."""
    for name, member in value.items():
        yield (*path, name)
        if isinstance(member, dict):
            yield from places(member, (*path, name))


def spoiled_facts(facts: dict[str, Any], count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """`count` copies of the facts with one field replaced or removed, evenly over fields and values."""
    everywhere = list(places(facts))
    for number in range(count):
        path = everywhere[number % len(everywhere)]
        changed = copy.deepcopy(facts)
        inner = changed
        for name in path[:-1]:
            inner = inner[name]
        choice = (number // len(everywhere) * 5 + number) % (len(VALUES) + 1)
        if choice == len(VALUES):
            del inner[path[-1]]
        else:
            inner[path[-1]] = VALUES[choice]
        yield f"{'.'.join(map(str, path))} {choice}", changed


def spoiled_tensors(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    names = [*[name for name in tensors if "familiar" in name or "head" in name], *list(tensors)[:20:2]]
    changes = {
        "removed": None, "0-d": torch.zeros(()), "empty": torch.zeros(0), "long": torch.zeros(1 << 20),
        "float64": torch.zeros(3, dtype=torch.float64), "bool": torch.ones(3, dtype=torch.bool),
        "nan": torch.full((3,), torch.nan),
    }  # fmt: skip
    for name in names:
        for kind, tensor in changes.items():
            rest = {n: t for n, t in tensors.items() if n != name}
            yield f"{name} {kind}", rest | ({} if tensor is None else {name: tensor})
    yield "a deep block", tensors | {"model.backbone.model.encoder.layer.20000.norm1.weight": torch.zeros(64)}
    yield "1e38", {name: torch.full_like(tensor, 1e38) for name, tensor in tensors.items()}


def survey(cases: Iterator[tuple[str, Any]], write: Any, folder: Path, images: Path) -> int:
    """The number of cases; each must end as a model that answers or in a sentence, in bounded time and memory."""
    image, wrong, count = min(images.rglob("*.png")), list[str](), 0
    for name, content in cases:
        count += 1
        write(folder, content)
        before, start, text = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time(), ""
        try:
            list(load_predictor(folder).predict([image]))
        except ValueError as error:
            text = str(error)
        except Exception as error:  # noqa: BLE001  any other error is what this test is about
            wrong.append(f"{name}: {type(error).__name__} {error!s:.200}")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if grown > BYTES or time.process_time() - start > SECONDS or len(text) > 1000:
            wrong.append(f"{name}: {grown >> 20} MB, {time.process_time() - start:.0f} s, {text:.80}")
    assert not wrong, "\n".join(wrong)
    return count


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(facts))


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")
    facts = json.loads((folder / "config.json").read_text())
    facts["weights"]["sha256"] = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    write_facts(folder, facts)


@pytest.mark.parametrize("count", [20, pytest.param(360, marks=pytest.mark.slow)])
def test_a_spoiled_field_is_a_sentence(count: int, model_folder: Path, image_folder: Path) -> None:
    facts = json.loads((model_folder / "config.json").read_text())
    assert survey(spoiled_facts(facts, count), write_facts, model_folder, image_folder) == count


@pytest.mark.slow
def test_a_spoiled_tensor_is_a_sentence(model_folder: Path, image_folder: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(model_folder / "model.safetensors").items()}
    assert survey(spoiled_tensors(tensors), write_tensors, model_folder, image_folder) > 80
