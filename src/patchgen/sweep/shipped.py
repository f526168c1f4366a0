"""The recipes included in the package, found by name wherever it is installed.

find_recipe("selection")        # also configs/small/selection.yaml where the current folder has no such file
"""

from __future__ import annotations

from pathlib import Path

from patchgen.common.text import did_you_mean
from patchgen.config import read_settings
from patchgen.sweep.recipe import is_recipe

PACKAGE = Path(__file__).parents[1]
SHIPPED = next((path for path in (PACKAGE / "configs", PACKAGE.parents[1] / "configs") if path.is_dir()), None)


def recipes() -> dict[str, str]:
    """Name -> description, the first line of its file."""
    files = sorted(SHIPPED.rglob("*.yaml")) if SHIPPED else []
    texts = {file: file.read_text(encoding="utf-8").splitlines()[0] for file in files if is_recipe(read_settings(file))}
    return {file.stem: line.removeprefix("# ") for file, line in texts.items()}


def find_recipe(word: str) -> Path:
    """The recipe file for an argument: an existing file, or the name of an included recipe.

    Raises:
        ValueError: it is neither.
    """
    path = Path(word)
    by_name = (path.parent == Path() or path.parts[0] == "configs") and path.suffix in ("", ".yaml")
    if not path.is_file() and by_name and SHIPPED:
        for ours in SHIPPED.rglob(f"{path.stem}.yaml"):  # names are unique over the folders
            return ours
    if not path.exists():
        near = did_you_mean(path.stem, recipes()) if by_name else ""
        raise ValueError(f"there is no recipe {word}{near} (`patchgen sweep --list` shows those of the package)")
    return path
