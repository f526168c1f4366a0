"""The folder tree is the architecture: imports go one way along the packages, lazy ones included."""

import ast
from collections.abc import Iterator
from pathlib import Path

import patchgen

SOURCE = Path(patchgen.__file__).parent
# A package imports from the packages above it and from its own line.
ORDER = (
    ("common",),
    ("config", "data"),
    ("draw",),
    ("pages",),
    ("model",),
    ("discovery",),
    ("methods",),
    ("tasks",),
    ("runs",),
    ("train",),
    ("ccd",),  # classes over time: imported by name for its own runs alone
    ("predict",),
    ("fit", "sweep"),
    ("report",),
    ("diagnose", "theory", "viewer", "slides"),
    ("commands",),
    ("cli", "__main__"),
)
LEVEL = {package: level for level, packages in enumerate(ORDER) for package in packages}


def package_of(module: str) -> str:
    """`patchgen.train.loop` -> `train`; the package itself -> ``."""
    return (module.split(".") + [""])[1]


def imports_of(file: Path) -> Iterator[str]:
    """Modules of the package that a file imports when it runs; what only a type checker reads does not count."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if package_of(alias.name) and alias.name.startswith("patchgen.")
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "patchgen":
            assert node.level == 0, f"{file}: imports are absolute"
            yield from ([node.module or ""] if package_of(node.module or "") else
                        [f"patchgen.{alias.name}" for alias in node.names if alias.name != "__version__"])  # fmt: skip


def test_every_package_has_a_place() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert found - {"__init__"} == set(LEVEL)


def test_imports_go_one_way() -> None:
    back = [
        f"{file.relative_to(SOURCE)} imports {module}"
        for file in sorted(SOURCE.rglob("*.py"))
        for module in imports_of(file)
        if (package := file.relative_to(SOURCE).with_suffix("").parts[0]) != "__init__"
        and LEVEL[package_of(module)] > LEVEL[package]
    ]
    assert not back, "\n".join(back)


def test_only_runs_of_task_ccd_import_its_package() -> None:
    """Other runs load its settings at most: the rest is imported inside the functions that streams reach."""
    for file in set(SOURCE.rglob("*.py")) - set((SOURCE / "ccd").glob("*.py")):
        statements = ast.parse(file.read_text(encoding="utf-8")).body
        modules = {node.module or "" for node in statements if isinstance(node, ast.ImportFrom)}
        assert {m for m in modules if m.startswith("patchgen.ccd")} <= {"patchgen.ccd.settings"}, file
