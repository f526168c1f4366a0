"""README and quick start keep their word: their commands and Python run, targets exist, links lead somewhere."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from patchgen.cli import COMMANDS, main
from patchgen.data.oracle import SUITE
from patchgen.methods import METHODS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "use" / "quickstart.md").read_text(encoding="utf-8")
MOST_LINES = 110  # of the README: two screens; the rest is in docs/
CHEAP = shlex.split("--backbone tiny --image-size 56 --steps 2 --eval-every 1 --batch-per-domain 2 --val-images 2")
# the network, which tests never use, and a server, which never ends: of these only the help is asked
ONLY_HELP = {"weights fetch", "serve MODEL"}
EXTRA = {"train": CHEAP, "compare": CHEAP, "fit": [*CHEAP, "--no-expect"]}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", f"{README}\n{START}", re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The words behind `program` of each command line in the shell blocks; one that both pages have, once."""
    lines = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines()]
    found = [tuple(words[1:]) for words in lines if words and words[0] == program]
    return [list(words) for words in dict.fromkeys(found)]


def test_something_is_checked() -> None:
    assert {words[0] for words in commands("patchgen")} >= {"doctor", "train", "predict", "explain", "compare"}
    assert {("demo",), ("test",)} == set(map(tuple, commands("make"))) and blocks("python")


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the line of both pages writes (it is run here), with ten images per class instead of a hundred."""
    write = next(words for words in commands("patchgen") if words[0] == "oracle")
    home = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setitem(SUITE, write[2], replace(SUITE[write[2]], per_class=10))
        assert main(write) == 0
    return home / "sample" / "images"


@pytest.fixture(scope="module")
def tiles(sample: Path) -> Path:
    """The sample as a table that names a patient for each image, five images each."""
    images = sorted(sample.glob("*/*/*"))
    rows = [f"{image},{image.parts[-3]},{image.parts[-2]},patient-{i // 5}" for i, image in enumerate(images)]
    table = sample.parent / "tiles.csv"
    table.write_text("\n".join(["path,domain,label,group", *rows]))
    return table


@pytest.fixture(scope="module")
def model(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("readme")
    assert main(["fit", str(sample), "--out", str(home / "m"), "--runs", str(home / "r"), *EXTRA["fit"]]) == 0
    return home / "m"


def test_the_sample_has_the_names_in_the_text(sample: Path) -> None:
    domains, classes = re.findall(r"four\s+domains (.+?), each with\s+the\s+classes (.+?), from", START, re.DOTALL)[0]
    found = {domain.name: sorted(kind.name for kind in domain.iterdir()) for domain in sample.iterdir()}
    assert sorted(found) == re.findall(r"`(\w+)`", domains)
    assert set(map(tuple, found.values())) == {tuple(re.findall(r"`(\w+)`", classes))}


@pytest.mark.parametrize("words", [words for words in commands("patchgen") if words[0] != "oracle"], ids=" ".join)
def test_command_runs(
    words: list[str], sample: Path, tiles: Path, model: Path, tiny_run: Callable[..., SimpleNamespace], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, spec in SUITE.items():
        monkeypatch.setitem(SUITE, name, replace(spec, per_class=4))
    if " ".join(words) in ONLY_HELP:
        with pytest.raises(SystemExit) as stop:
            main([*words, "--help"])
        assert stop.value.code == 0
        return
    run = tiny_run().path if "runs/RUN" in words or "runs" in words[1:] else Path()
    places = {"sample/images": sample, "tiles.csv": tiles, "configs/": f"{ROOT}/configs/"}
    places |= {"runs/RUN": run} if "runs/RUN" in words else {}
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    if words[0] != "fit":
        words = [str(model) if word == "MODEL" else word for word in words]
    words[1:] = [str(run.parent) if word == "runs" else word for word in words[1:]]
    assert main([*words, *EXTRA.get(words[0], [])]) == 0


def test_run_folder_holds_what_its_page_says(tiny_run: Callable[..., SimpleNamespace]) -> None:
    run = tiny_run().path
    page = (ROOT / "docs" / "study" / "mdg.md").read_text(encoding="utf-8")
    table = re.search(r"## The run folder\n(.*?)\n\n(?=Its|#)", page, re.DOTALL)
    assert table and "mdg.md#the-run-folder" in START
    for pattern in re.findall(r"^\| `([^`]+)`", table[1], re.MULTILINE):
        assert list(Path(run).glob(pattern)), pattern


def test_names_in_the_text_exist() -> None:
    assert f"{len(METHODS)} methods and controls" in README
    for name in re.findall(r"`patchgen ([a-z]+)", README + START):
        assert name in COMMANDS, name
    for name in ("patchgen-cls", "patchgen-select"):
        assert f"`{name}`" in README and name in METHODS


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[0] for words in commands("make")} | set(re.findall(r"`make ([a-z-]+)", README + START))
    assert named and named <= targets


@pytest.mark.parametrize("source", blocks("python"))
def test_python_runs(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(source, "quickstart.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([8, 256]) torch.Size([8, 384]) torch.Size([8, 384])\n"
