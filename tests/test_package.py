"""What is published: the wheel and the sdist hold what they should, and nothing else."""

import re
import tarfile
import zipfile
from pathlib import Path

import pytest

hatchling = pytest.importorskip("hatchling.build", reason="needs patchgen[dev]")
pytest.importorskip("hatch_fancy_pypi_readme", reason="needs patchgen[dev]")

ROOT = Path(__file__).parents[1]


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_wheel_holds_the_package_and_the_recipes_alone(in_root: None, tmp_path: Path) -> None:
    wheel = tmp_path / hatchling.build_wheel(str(tmp_path))
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"patchgen"}
    kinds = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert kinds <= {".py", ".typed", ".yaml", ".toml", ".csv", ".html", ".md", ".css", ".js", ".svg"}
    assert {"patchgen/model/patchgen.py", "patchgen/predict/card.md"} <= set(names)
    recipes = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    assert {f"patchgen/configs/{name}" for name in recipes} <= set(names)
    page = metadata.partition("\n\n")[2]  # shown where the repository is not
    assert "# PatchGen" in page and not re.search(r"\]\((?!https?:)", page)


def test_the_sdist_can_build_the_documentation_and_run_the_tests(in_root: None, tmp_path: Path) -> None:
    archive = tmp_path / hatchling.build_sdist(str(tmp_path))
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    needed = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "LICENSE", "Makefile", "mkdocs.yml"]
    assert {*needed, "docs/site.py", "tests/conftest.py", "examples/own_method.py"} <= names
    assert not [name for name in names if name.startswith((".venv", "runs/", "site/", ".git/"))]
