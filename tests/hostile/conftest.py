"""A model folder to attack."""

import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def fitted_model(tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from patchgen.config import Config
    from patchgen.fit.procedure import fit
    from patchgen.predict.model_folder import write_model

    home = tmp_path_factory.mktemp("fitted")
    config = Config(**{**tiny_settings, "method": "patchgen", "unseen": "none", "swad": False})
    return write_model(home / "model", fit(config, home / "runs", expecting=False, quiet=True))


@pytest.fixture
def model_folder(fitted_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    shutil.copytree(fitted_model, tmp_path / "model")
    return tmp_path / "model"
