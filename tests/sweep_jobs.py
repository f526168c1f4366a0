"""Jobs that many of these tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patchgen.runs.folder import RunFolder
from patchgen.sweep.jobs import Job


@pytest.fixture
def plain() -> Callable[[RunFolder], list[dict[str, Any]]]:
    """Records without what the clock decides."""
    return lambda run: [{k: v for k, v in record.items() if k != "seconds"} for record in run.records()]


@pytest.fixture
def no_ops(tmp_path: Path) -> Callable[[int], list[Job]]:
    from benchmarks.sweep import no_op_jobs

    return lambda count: no_op_jobs(count, tmp_path / "runs")


@pytest.fixture
def write_recipe(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text("# a header\n" + text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def tiny_recipe(write_recipe: Callable[[str], Path], tiny_settings: dict[str, object]) -> Callable[[str], Path]:
    """`tiny_recipe("grid: ...")`: runs of seconds on the shared images."""
    shared = {**tiny_settings, "method": "lp", "image_size": 28, "swad": "false", "threads": 1}
    lines = "".join(f"{name}: {value}\n" for name, value in shared.items())
    return lambda text: write_recipe(lines + text)
