"""Plug-ins: methods, backbones and data sets defined outside the package, by entry points or in a single file.

A file is code, so it runs only if the user named it: with `--plugin`, with $PATCHGEN_PLUGINS, or in an earlier command
on this machine, which stored a copy under its digest. A run or model folder only records which plug-ins it needs.
"""

import hashlib
import importlib
import os
import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from patchgen.common.files import cache_dir, expanded, write_text
from patchgen.common.text import printable
from patchgen.common.untrusted import shortly

VARIABLE = "PATCHGEN_PLUGINS"  # files, separated by the system's path separator; inherited by child processes
GROUPS = {
    "methods": "methods:METHODS", "stream_methods": "ccd.methods:STREAM_METHODS", "backbones": "model.names:BACKBONES",
    "datasets": "data.benchmarks:BENCHMARKS", "tissue": "slides.tissue:TISSUE",
}  # fmt: skip


class Plugin(NamedTuple):
    name: str  # of a file, or of an installed package
    version: str  # sha256 of a file, or the package's version
    provides: frozenset[str]  # such as "methods:center"


_loaded: dict[str, Plugin] = {}  # by version for files, by name for packages


def table_of(group: str) -> dict[str, Any]:
    """The table of a group; its module is imported when a plug-in is loaded."""
    module, _, name = GROUPS[group].partition(":")
    table: dict[str, Any] = getattr(importlib.import_module(f"patchgen.{module}"), name)
    return table


def load(path: str | Path) -> Plugin:
    """Run a file that the user named, once, and store a copy for later commands; ValueError if it cannot be used."""
    file = expanded(path).absolute()
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ValueError(f"--plugin {path} cannot be read ({error.strerror}); give a Python file") from error
    if file.suffix != ".py":
        raise ValueError(f"--plugin {path}: a plug-in is one Python file, NAME.py")
    found = _run(file, source, file.name)
    kept = _copy_of(found.version)
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, source.decode("utf-8"))
    named = os.environ.get(VARIABLE, "").split(os.pathsep)
    if str(file) not in named:
        os.environ[VARIABLE] = os.pathsep.join(filter(None, [*named, str(file)]))
    return found


@cache
def load_all() -> None:
    """Load the plug-ins of installed packages and the files of $PATCHGEN_PLUGINS, once per process."""
    for group in GROUPS:
        for point in entry_points(group=f"patchgen.{group}"):
            package = point.dist.name if point.dist else point.value
            version = point.dist.version if point.dist else ""
            before = _loaded.get(package, Plugin(package, version, frozenset()))
            try:
                value = point.load()
                if table_of(group).setdefault(point.name, value) is not value:
                    raise ValueError(f"the name {point.name!r} is already taken")
            except Exception as error:  # anything may be wrong in it
                reason = f"{type(error).__name__}: {error}"
                raise ValueError(
                    f"the package {package} names {point.name!r} in patchgen.{group}, which fails ({reason}); fix it "
                    f"or pip uninstall {package}"
                ) from error
            _loaded[package] = before._replace(provides=before.provides | {f"{group}:{point.name}"})
    for file in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        load(file)


def used_by(config: Any) -> list[dict[str, str]]:
    """The plug-ins that a run's method, backbone or data set comes from, as a run folder records them."""
    kind = "stream_methods" if config.task == "ccd" else "methods"
    names = {f"{kind}:{part}" for part in config.method.split("+")} | {f"backbones:{config.backbone}"}
    names |= {f"datasets:{getattr(config, 'benchmark', None)}"}
    found = [plugin for plugin in _loaded.values() if plugin.provides & names]
    return [{"name": plugin.name, "version": plugin.version} for plugin in sorted(found)]


def require(recorded: Any, where: str | Path) -> None:
    """Load the plug-ins that a run or model folder recorded; ValueError for one that this machine does not know."""
    for one in recorded if isinstance(recorded, list) else []:
        facts = one if isinstance(one, dict) else {"name": shortly(one)}  # damaged or forged: refused below
        name, version = str(facts.get("name")), str(facts.get("version"))
        load_all()
        if name in _loaded or version in _loaded:
            continue
        kept = _copy_of(version)
        if name.endswith(".py") and re.fullmatch("[0-9a-f]{64}", version) and kept.is_file():
            source = kept.read_bytes()
            if hashlib.sha256(source).hexdigest() == version:
                _run(kept, source, name)
                continue
        is_file = name.endswith(".py")  # a folder's word is no reason to install a package: no command is suggested
        fix = "give it with --plugin FILE.py" if is_file else "if you trust it, install that package from its authors"
        what = f"{printable(name[:80])} ({f'sha256 {version[:12]}...' if is_file else printable(version[:40])})"
        raise ValueError(f"{where} was made with the plug-in {what}, which is not known on this machine; {fix}")


def _run(file: Path, source: bytes, name: str) -> Plugin:
    version = hashlib.sha256(source).hexdigest()
    if version in _loaded:
        return _loaded[version]
    before = {group: dict(table_of(group)) for group in GROUPS}
    try:
        exec(compile(source, file, "exec"), {"__name__": f"patchgen_plugin_{version[:12]}", "__file__": str(file)})
    except Exception as error:  # anything may be wrong in it
        raise ValueError(f"--plugin {file} fails: {type(error).__name__}: {error}") from error
    provides = set()
    for group, own in before.items():
        table = table_of(group)
        taken = [key for key, value in own.items() if table.get(key) is not value]
        if taken:
            table.update(own)
            raise ValueError(f"--plugin {file} uses the name {taken[0]!r}, which is already taken; choose another")
        provides |= {f"{group}:{key}" for key in table.keys() - own.keys()}
    _loaded[version] = Plugin(name, version, frozenset(provides))
    return _loaded[version]


def _copy_of(digest: str) -> Path:
    return cache_dir() / "plugins" / f"{digest}.py"


def take_options(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """A command's words without `--plugin FILE`, and those files."""
    rest, files, waiting = list[str](), list[str](), iter(words)
    for word in waiting:
        option, _, file = word.partition("=")
        if option != "--plugin":
            rest.append(word)
        elif file := file or next(waiting, ""):
            files.append(file)
        else:
            raise ValueError("--plugin needs a Python file: --plugin FILE.py")
    return rest, files
