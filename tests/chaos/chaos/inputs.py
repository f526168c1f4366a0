"""Bad input by the thousand, through the real commands: no traceback, no hang, nothing half in the place of a whole.

Inputs are drawn by hypothesis from a seed and go to a warm child some at a time; where a child fails, its inputs are
tried one by one, so that each is blamed for itself alone.
"""

import contextlib
import csv
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from chaos import pictures, texts
from chaos.children import problem, run
from chaos.faults import damage
from chaos.ground import RUN, Line, words_of

Try = Callable[[Path, Any], str]  # a folder of its own, an input -> what went wrong, or "" or REFUSED
REFUSED = "refused"
AT_ONCE = 25
SLOWEST = 10.0  # seconds of the processor for an input; what only waits is ended as a hang
MOST_MEMORY = 3 << 30  # bytes of a process


class Kind(NamedTuple):
    inputs: SearchStrategy[Any]
    attempt: Try
    share: int  # of every hundred inputs


def draw(strategy: SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """So many values of a strategy, the same for the same seed."""
    values: list[Any] = []
    limits = settings(max_examples=max(1, count), database=None, deadline=None, phases=[Phase.generate],
                      suppress_health_check=list(HealthCheck))  # fmt: skip

    @seed(number)
    @limits
    @given(strategy)
    def collect(value: Any) -> None:
        values.append(value)

    collect()
    return values[:count]


def some_inputs(name: str, kind: Kind, count: int, part: slice, ground: Path, number: int) -> Line:
    """A part of so many inputs of a kind."""
    line, drawn = Line("inputs", name), draw(kind.inputs, count, number)[part]
    for start in range(0, len(drawn), AT_ONCE):
        for text in _tried(ground, kind.attempt, drawn[start : start + AT_ONCE], line):
            line.tried += 1
            line.hit += text == REFUSED
            line.wrong += [text] if text not in ("", REFUSED) else []
    return line


def _tried(ground: Path, attempt: Try, some: Sequence[Any], line: Line) -> list[str]:
    """What came of each input; also time and memory are bounded."""
    place = ground / "inputs"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    answers = place / "answers"

    def work() -> None:
        for i, one in enumerate(some):
            (place / str(i)).mkdir()
            os.chdir(place / str(i))
            for name in ("photos", "model", "recipe.yaml", "shapes", "stages.yaml", "backbone", "fitted"):
                os.symlink(ground / name, name)
            began = _worked()
            answer = attempt(place / str(i), one).replace("\n", " | ")
            with open(answers, "a") as file:
                file.write(f"{_worked() - began:.2f} {answer}\n")

    ended = run(work, limit=20.0 * len(some) + 60)
    lines = [text.split(" ", 1) for text in answers.read_text().split("\n")[:-1]] if answers.exists() else []
    seconds = max((float(text) for text, _ in lines), default=0.0)
    whole = ended.code == 0 and len(lines) == len(some) and ended.peak <= MOST_MEMORY and seconds <= SLOWEST
    if len(some) > 1 and not whole:
        return [text for one in some for text in _tried(ground, attempt, [one], line)]
    line.slowest, line.peak = max(line.slowest, seconds), max(line.peak, ended.peak)
    if whole:
        return [text for _, text in lines]
    said = problem(ended, codes=(0,)) or f"{seconds:.0f} s and {ended.peak / 2**30:.1f} GB"
    return [f"{some[0]!r:.300}: {said}"]


def _worked() -> float:
    """Seconds of the processor that this process and its children have had."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _command(*words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command in this process; a traceback counts as an error's text."""
    from patchgen.cli import main

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(list(words))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except Exception:  # noqa: BLE001  what a user would see
            code = 70
            traceback.print_exc(file=sys.stderr)
    return code, out.getvalue(), errors.getvalue()


def _judged(what: Any, code: int, out: str, errors: str) -> str:
    if "Traceback (most recent call last)" in errors:
        places = re.findall(r'File "[^"]*/(patchgen/[^"]*)", line (\d+)', errors)
        where = f" at {':'.join(places[-1])}" if places else ""
        return f"{what!r:.400}: traceback {errors.strip().splitlines()[-1]:.200}{where}"
    if code not in (0, 1, 2):
        return f"{what!r:.300}: exit code {code}"
    if code == 2 and not errors.strip() + out.strip():
        return f"{what!r:.300}: refused without a word"
    return REFUSED if code else ""


def _run_folder() -> str:
    return str(next(Path("model").iterdir()))


def _picture(place: Path, description: dict[str, Any]) -> str:
    return _predicted(place, description, *pictures.build(description))


def _predicted(place: Path, description: dict[str, Any], name: str, content: bytes) -> str:
    """Beside a good image, which must be predicted whatever the other one is."""
    (place / "given").mkdir()
    (place / "given" / name).write_bytes(content)
    shutil.copy(Path("photos/studio/circle/00.png").resolve(), place / "given" / "good.png")
    code, out, errors = _command("predict", _run_folder(), "given", "--csv", "found.csv")
    if said := _judged(description, code, out, errors):
        return said
    rows = list(csv.reader(open("found.csv", newline=""))) if Path("found.csv").exists() else []  # noqa: SIM115
    lost = re.search(r"(\d+) of (\d+) images could not be read", errors)
    count = len(rows) - 1 + (int(lost[1]) if lost else 0)
    return f"{description!r}: {count} of 2 images are accounted for" if count != 2 else REFUSED if lost else ""


def _doctor(place: Path, description: dict[str, Any]) -> str:
    name, content = pictures.build(description)
    shutil.copytree(Path("photos").resolve(), place / "data")
    (place / "data" / "field" / "circle" / name).write_bytes(content)
    return _judged(description, *_command("doctor", "data", "--json"))


def _called(what: Any, call: Callable[[], object], needle: str = "") -> str:
    """Functions of the library: a value, or a ValueError or OSError with a text that names what is meant."""
    try:
        call()
    except (ValueError, OSError) as error:
        return REFUSED if str(error) and needle in str(error) else f"{what!r:.300}: the error says only {error!s:.200}"
    except Exception as error:  # noqa: BLE001  what a caller would see
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{what!r:.300}: {type(error).__name__}: {error} at {Path(frame.filename).name}:{frame.lineno}"
    return ""


def _manifest(place: Path, content: bytes) -> str:
    """Splits of it, or an error; an older file stays as it was where there is an error."""
    (place / "m.csv").write_bytes(content)
    Path("splits.csv").write_text("old")
    code, out, errors = _command("doctor", "m.csv", "--splits", "splits.csv")
    kept = Path("splits.csv").read_text() == "old"
    if kept != (code != 0):
        return f"{content!r:.300}: code {code}, but the old file is {'kept' if kept else 'gone'}"
    return _judged(content, code, out, errors)


def _yaml(words: str) -> Try:
    """A command with a file of that text."""

    def attempt(place: Path, text: str) -> str:
        (place / "c.yaml").write_text(text, encoding="utf-8", errors="replace")
        return _judged(text, *_command(*words.split(), "c.yaml"))

    return attempt


def _schedule(place: Path, text: str) -> str:
    from patchgen.ccd.stages import get_schedule

    (place / "s.yaml").write_text(text, encoding="utf-8", errors="replace")
    return _called(text, lambda: get_schedule(str(place / "s.yaml")).group_of(list("abc")), needle="s.yaml")


def _backbone(place: Path, drawn: dict[str, Any]) -> str:
    """A transformers folder with a damaged file or a setting that is none."""
    from patchgen.model.backbone import load_backbone

    folder, rng = place / "weights", random.Random(drawn["seed"])
    shutil.copytree(Path("backbone").resolve(), folder)
    config = json.loads((folder / "config.json").read_text())
    if drawn["change"] == "settings":
        (folder / "config.json").write_text(json.dumps({**config, **drawn["settings"]}))
    elif drawn["change"] == "pickle":
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": _Touches(str(place / "touched"))}))
    elif drawn["change"] == "pipe":
        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / "model.safetensors")
    elif drawn["change"] == "normalisation":
        (folder / "preprocessor_config.json").write_text(json.dumps(drawn["normalisation"]))
    else:
        damage(folder / drawn["change"], rng)
    said = _called(drawn, lambda: load_backbone(str(folder)))
    return f"{drawn!r:.300}: a pickle was run" if (place / "touched").exists() else said


class _Touches:
    """What a pickle must never do: it makes a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


def _words(place: Path, words: list[str]) -> str:
    (place / "spoilt").mkdir()
    (place / "spoilt" / "config.yaml").write_text("data: x\nunseen: y\n")
    given = [_run_folder() if word == "RUN" else word for word in words]
    more = {"train": words_of({k: v for k, v in RUN.items() if "--" + k.replace("_", "-") not in given})}
    more["sweep"] = ["--dry-run"]  # nothing is to be started
    return _judged(words, *_command(*given, *more.get(words[0], [])))


def _known(place: Path, names: str) -> str:
    return _judged(names, *_command("train", "photos", *words_of({**RUN, "steps": 1}), "--task", "mdg_gcd",
                                    f"--known={names}", "--quiet"))  # fmt: skip


KINDS: dict[str, Kind] = {
    "images to predict": Kind(pictures.pictures, _picture, 20),
    "images before the doctor": Kind(pictures.pictures, _doctor, 9),
    "backbone folders": Kind(texts.backbones, _backbone, 4),
    "manifests": Kind(texts.manifests(), _manifest, 13),
    "settings files": Kind(texts.setting_files, _yaml("train --quiet --config"), 14),
    "command lines": Kind(texts.command_lines(), _words, 9),
    "recipes": Kind(texts.recipes, _yaml("sweep --dry-run"), 5),
    "schedules": Kind(texts.schedules, _schedule, 4),
    "known classes": Kind(texts.known_names, _known, 2),
}
