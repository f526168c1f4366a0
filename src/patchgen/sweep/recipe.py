"""A recipe: one YAML file that describes many runs; docs/study/sweep.md has the format."""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from patchgen.ccd.settings import StreamConfig, stream_preset
from patchgen.common.text import did_you_mean
from patchgen.common.untrusted import shortly
from patchgen.config import PRESETS, Config, known_settings, read_settings

Values = dict[str, Any]  # settings as a recipe has them
OWN_KEYS = ("preset", "grid", "rows", "random", "trials")
EVERY_DOMAIN = "all"
HPARAM = r"hparams\.\w+"
DomainsOf = Callable[[Values], Sequence[str]]
PACKAGE = Path(__file__).parents[1]
SHIPPED = next((path for path in (PACKAGE / "configs", PACKAGE.parents[1] / "configs") if path.is_dir()), None)


@dataclass(frozen=True)
class Recipe:
    path: Path
    preset: str | None
    shared: Values
    grid: dict[str, Any]  # a setting's name -> list; `unseen` may be "all"
    rows: dict[str, Values]  # name -> settings; one nameless row if there are none
    trials: list[Values]  # of a random search; one without settings if there is none


@dataclass(frozen=True)
class PlannedRun:
    row: str
    label: str  # distinguishes it from the recipe's other runs
    config: Config | StreamConfig


def is_recipe(settings: Mapping[str, Any]) -> bool:
    """Whether a file of settings has a grid, rows or a random search; without them it is for `--config`."""
    return not {"grid", "rows", "random"}.isdisjoint(settings)


@contextmanager
def errors_named(where: str) -> Iterator[None]:
    """A ValueError raised inside begins with `where`, once."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(where) else f"{where}: {text}") from error


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe and check everything that can be checked without the data."""
    with errors_named(str(path)):
        content = read_settings(path)
        if not is_recipe(content):
            raise ValueError("neither `grid` nor `rows` nor `random`: it is no recipe; `train --config` reads it")
        _check_names(content, "", OWN_KEYS)
        preset = content.get("preset")
        if preset is not None and preset not in PRESETS:
            near = did_you_mean(str(preset), PRESETS)
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, not {shortly(preset)}{near}")
        shared = {key: value for key, value in content.items() if key not in OWN_KEYS}
        grid, rows, trials = _grid(content.get("grid") or {}), _rows(content.get("rows")), _trials(content)
        for name, row in rows.items():
            if both := sorted(row.keys() & grid.keys()):
                raise ValueError(f"{both[0]} appears in row {shortly(name)} and in the grid; keep one of them")
            if both := sorted((shared | grid | row).keys() & trials[0].keys()):
                raise ValueError(f"{both[0]} is drawn at random and also given; keep one of them")
    return Recipe(Path(path), preset, shared, grid, rows, trials)


def _grid(grid: Any) -> dict[str, Any]:
    if not isinstance(grid, dict):
        raise ValueError(f"`grid` must hold `name: [values]` lines, found {type(grid).__name__}")
    _check_names(grid, "grid: ")
    for name, values in grid.items():
        if (name, values) != ("unseen", EVERY_DOMAIN) and (not isinstance(values, list) or not values):
            raise ValueError(f"grid: {name} must be a list with a value in it, such as [{shortly(values)}]")
    return grid


def _rows(rows: Any) -> dict[str, Values]:
    if rows is None:
        return {"": {}}
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) and row.get("name") for row in rows):
        raise ValueError("`rows` must be a list of settings, each with a name: - {name: A, method: lp}")
    named: dict[str, Values] = {}
    for row in rows:
        name = row["name"]
        if not isinstance(name, str) or name in named:
            raise ValueError(f"a row's name must be text (in quotes) that no other row has, not {shortly(name)}")
        _check_names(row, f"row {shortly(name)}: ", ("name",))
        named[name] = {key: value for key, value in row.items() if key != "name"}
    return named


def _trials(content: Values) -> list[Values]:
    """The draws of a random search: trial i is the same whatever the number of trials, for all rows and domains."""
    from patchgen.runs.scores import CHOSEN

    ranges, trials = content.get("random"), content.get("trials")
    if ranges is None and trials is None:
        return [{}]
    if not isinstance(ranges, dict) or not ranges or type(trials) is not int or trials < 1:
        raise ValueError("a random search needs both: random: {lr: [1.0e-5, 1.0e-3, log]} and trials: 20")
    for name, limits in ranges.items():
        if name not in CHOSEN and not re.fullmatch(HPARAM, str(name)):
            near = did_you_mean(str(name), CHOSEN)
            raise ValueError(f"random: {shortly(name)} is none of {', '.join(CHOSEN)} or hparams.NAME{near}")
        match limits:
            case [int() | float() as low, int() | float() as high] if low < high:
                pass
            case [int() | float() as low, int() | float() as high, "log"] if 0 < low < high:
                pass
            case _:
                raise ValueError(f"random: {name} must be [low, high] or [low, high, log], not {shortly(limits)}")
    seed = content.get("seed", Config.seed)
    return [_draw(ranges, np.random.default_rng([seed, trial])) for trial in range(trials)]


def _draw(ranges: Mapping[str, Sequence[Any]], random: np.random.Generator) -> Values:
    """A value of each range, uniform or log-uniform, to three digits."""
    values = {}
    for (name, (low, high, *log)), share in zip(ranges.items(), random.random(len(ranges)).tolist(), strict=True):
        value = low * (high / low) ** share if log else low + (high - low) * share
        values[name] = float(f"{value:.3g}")
    return values


def _check_names(settings: Mapping[str, Any], where: str, more: Sequence[str] = ()) -> None:
    fields = {f.name for kind in (Config, StreamConfig) for f in dataclasses.fields(kind)}
    known = [*more, *sorted(fields)]
    for key in settings:
        if key not in known and not re.fullmatch(HPARAM, str(key)):
            raise ValueError(f"{where}unknown setting {shortly(key)}{did_you_mean(str(key), known)}")


def expand(recipe: Recipe, domains_of: DomainsOf) -> Iterator[PlannedRun]:
    """Every run, row by row; `domains_of` returns the domains of the data in some settings, if `unseen` is `all`."""
    axes = [[values] if isinstance(values, str) else values for values in recipe.grid.values()]
    for name, row in recipe.rows.items():
        for *values, trial in itertools.product(*axes, recipe.trials):
            point = dict(zip(recipe.grid, values, strict=True)) | trial
            with errors_named(f"{recipe.path}" + (f": row {shortly(name)}" if name else "")):
                settings = {key: expand_variables(value) for key, value in (recipe.shared | row | point).items()}
                every = settings.get("unseen") == EVERY_DOMAIN
                for unseen in domains_of(settings) if every else (None,):
                    fold = {"unseen": unseen} if every else {}
                    words = [f"{key} {_short(value)}" for key, value in (point | fold).items()]
                    label = ", ".join([name, *words] if name else words)
                    yield PlannedRun(name, label, _config(recipe, settings | fold))


def _config(recipe: Recipe, settings: Values) -> Config | StreamConfig:
    """The settings over those of the preset; `hparams.miro: 0.1` is `hparams: {miro: 0.1}`."""
    from patchgen.methods.presets import method_settings, preset_settings, published

    dotted = {key.removeprefix("hparams."): value for key, value in settings.items() if re.fullmatch(HPARAM, key)}
    settings = {key: value for key, value in settings.items() if not re.fullmatch(HPARAM, key)}
    if dotted:
        settings["hparams"] = settings.get("hparams", {}) | dotted
    data, where = str(settings.get("data", "")), str(recipe.path)
    if settings.get("task") == "ccd":
        schedule = str(settings.get("schedule", ""))
        near = recipe.path.parent / schedule  # if the current folder has no such file
        if schedule.endswith((".yaml", ".yml")) and not Path(schedule).exists() and near.exists():
            settings["schedule"] = str(near)
        preset = stream_preset(recipe.preset, data) if recipe.preset else {}
        return StreamConfig(**known_settings(StreamConfig, preset | settings, where))
    label = settings.get("method", Config.method)
    if isinstance(label, str) and "@" in label:  # `lp-ln@mean`: with another pool or tuning mode
        settings |= method_settings(label)
    method = str(settings.get("method", Config.method))
    preset = preset_settings(recipe.preset or "", method, data, settings.get("benchmark"))
    if recipe.preset == "paper":
        names = {key: settings.get(key, getattr(Config, key)) for key in ("benchmark", "backbone", "task", "swad")}
        preset |= published(data, method=method, **names)
    whole = preset | settings | {"hparams": preset.get("hparams", {}) | settings.get("hparams", {})}
    return Config(**known_settings(Config, whole, where))


def expand_variables(value: Any) -> Any:
    """Expand `$NAME` from the environment; values other than text are unchanged."""
    if not isinstance(value, str):
        return value
    text = os.path.expandvars(value)
    if unset := re.search(r"\$\{?(\w+)", text):
        raise ValueError(f"{shortly(value)} needs the variable {unset[1]}, which is not set: export {unset[1]}=...")
    return text


def _short(value: Any) -> str:
    """A short form for labels: only the last part of a path."""
    return os.path.basename(value.rstrip("/")) if isinstance(value, str) and "/" in value else str(value)


def recipes() -> dict[str, str]:
    """Name -> description, the first line of its file."""
    files = sorted(SHIPPED.rglob("*.yaml")) if SHIPPED else []
    texts = {file: file.read_text(encoding="utf-8").splitlines()[0] for file in files if is_recipe(read_settings(file))}
    return {file.stem: line.removeprefix("# ") for file, line in texts.items()}


def find_recipe(word: str) -> Path:
    """The recipe file for an argument: an existing file, or the name of an included recipe."""
    path = Path(word)
    by_name = (path.parent == Path() or path.parts[0] == "configs") and path.suffix in ("", ".yaml")
    if not path.is_file() and by_name and SHIPPED:
        for ours in SHIPPED.rglob(f"{path.stem}.yaml"):  # names are unique over the folders
            return ours
    if not path.exists():
        near = did_you_mean(path.stem, recipes()) if by_name else ""
        raise ValueError(f"there is no recipe {word}{near} (`patchgen sweep --list` shows those of the package)")
    return path
