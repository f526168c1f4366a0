"""The registered benchmarks, from `benchmarks.toml`: their layout on disk, their content, and their class names."""

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchgen.common import plugins
from patchgen.common.text import did_you_mean, name_key
from patchgen.data.image_files import visible_folders


@dataclass(frozen=True)
class Benchmark:
    """One data set with fixed domains. `counts` maps the name of an accepted version to images per domain."""

    name: str
    folder: str
    domains: tuple[str, ...]
    num_classes: int
    counts: Mapping[str, Mapping[str, int]]
    citation: str
    source: str
    classes: tuple[str, ...] | None = None  # None: the sorted class folders of all domains together
    aliases: tuple[str, ...] = ()  # other names of the folder
    domain_aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_rules: tuple[tuple[str, str], ...] = ()  # (pattern on name_key(folder), class): the first full match wins
    parts: Mapping[str, str] = field(default_factory=dict)  # domain -> sub-folder holding its class folders
    options: Mapping[str, str] = field(default_factory=dict)  # the names used in `parts`, with their defaults
    group_pattern: str | None = None  # the part of the file name that identifies the patient
    licence: str | None = None  # None: not known, ask the data's owner
    metric: str = "accuracy"
    positive: str | None = None  # the class whose F1 the protocol reports; None: the mean over classes
    swad_ratio: float = 1.3
    steps: int = 5001
    checkpoint_every: int = 100
    notes: str = ""

    def is_called(self, name: str) -> bool:
        return name_key(name) in map(name_key, (self.name, self.folder, *self.aliases))

    def domain_of(self, name: str) -> str | None:
        """The registered domain that a folder or manifest name stands for; None if it is not one of them."""
        keys = {name_key(n): d for d in self.domains for n in (d, *self.domain_aliases.get(d, ()))}
        return keys.get(name_key(name))

    def class_of(self, name: str) -> str | None:
        """The class that a folder or manifest name stands for; None if it is not a class of this benchmark."""
        if self.classes is None:
            return name
        exact = {name_key(c): c for c in self.classes}
        merged = (c for pattern, c in self.class_rules if re.fullmatch(pattern, name_key(name)))
        return exact.get(name_key(name)) or next(merged, None)

    def has_domains(self, folder: Path) -> bool:
        """Whether a folder contains at least two of the domains."""
        return len({self.domain_of(child.name) for child in visible_folders(folder)} - {None}) >= 2

    def find_root(self, folder: Path) -> Path:
        """The folder itself if it holds the domains, else the benchmark's folder inside it."""
        if self.has_domains(folder):
            return folder
        for child in visible_folders(folder):
            if self.is_called(child.name):
                return self.find_root(child)
        rule = f"neither a folder '{self.folder}' nor two of its domains ({', '.join(self.domains)}) are there"
        raise ValueError(f"'{folder}' does not hold {self.name}: {rule}. Source: {self.source}.")

    def class_folders(self, root: Path, options: Mapping[str, str]) -> tuple[dict[str, list[Path]], dict[str, str]]:
        """The folders that hold the class folders of each domain, in the benchmark's order, and the options used."""
        if unknown := [name for name in options if name not in self.options]:
            known, hint = ", ".join(self.options) or "none", did_you_mean(unknown[0], self.options)
            raise ValueError(f"{self.name} has no reading option '{unknown[0]}'{hint} (known: {known})")
        folders: dict[str, Path] = {}
        for folder in visible_folders(root):
            domain = self.domain_of(folder.name)
            if domain is not None and (other := folders.setdefault(domain, folder)) != folder:
                fix = f"Keep one of them, or put both inside one folder '{domain}'."
                both = f"the folders '{other.name}' and '{folder.name}' both name the domain '{domain}'"
                raise ValueError(f"{self.name}: {both}. {fix}")
        used: dict[str, str] = {}
        parts = {d: self._parts(d, folders[d], {**self.options, **options}, used) for d in self.domains if d in folders}
        return parts, used

    def _parts(self, domain: str, folder: Path, options: Mapping[str, str], used: dict[str, str]) -> list[Path]:
        """The folders that hold the class folders of a domain; options that choose them are added to `used`.

        A `+` in an option joins several parts. A folder that contains its class folders directly needs no part: its
        options are then recorded as `.`, a value that can be passed again.
        """
        if (template := self.parts.get(domain)) is None:
            return [folder]
        own = {name: value for name, value in options.items() if f"{{{name}}}" in template}
        used |= own
        children, parents = visible_folders(folder), []
        for choice in dict.fromkeys(itertools.product(*(value.split("+") for value in own.values()))):
            part = template.format(**dict(zip(own, choice, strict=True)))
            # archives often add a folder, and some folders are the part itself
            places = [folder / part, *(child / part for child in children)]
            places += [folder] * (name_key(folder.name) == name_key(part))
            if parent := next((place for place in places if place.is_dir()), None):
                parents.append(parent)
                continue
            names = [child.name for child in children]
            if any(map(self.class_of, names)) and all(self.options[name] == value for name, value in own.items()):
                used |= dict.fromkeys(own, ".")
                return [folder]
            change = f", or choose another part with the option {' / '.join(own)}" if own else ""
            there = ", ".join(names) or "no folder"
            raise ValueError(f"{self.name}: '{folder}' holds no '{part}' (found: {there}). Unpack it there{change}.")
        return parents

    def groups_of(self, paths: Sequence[str]) -> tuple[str, ...] | None:
        """The patient of each file by `group_pattern`; None if neither the benchmark nor any file names one."""
        pattern = self.group_pattern
        patients = [re.search(pattern, Path(path).name) for path in paths] if pattern else []
        if not any(patients):
            return None
        if lost := [path for path, patient in zip(paths, patients, strict=True) if patient is None]:
            fix = "Restore the names, or pass a CSV manifest with a group column."
            problem = f"{len(lost)} of {len(paths)} file names hold no patient ({pattern}), e.g. '{lost[0]}'"
            raise ValueError(f"{self.name}: {problem}. {fix}")
        return tuple(patient.group(0).upper() for patient in patients if patient)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


with Path(__file__).with_suffix(".toml").open("rb") as _stream:
    BENCHMARKS = {name: Benchmark(name, **_tuples(fields)) for name, fields in tomllib.load(_stream).items()}


def get_benchmark(name: str) -> Benchmark:
    """The registered benchmark of that name, folder name or alias; a ValueError with the nearest one otherwise."""
    for load in (lambda: None, plugins.load_all):
        load()
        for benchmark in BENCHMARKS.values():
            if benchmark.is_called(name):
                return benchmark
    hint = did_you_mean(name, BENCHMARKS)
    raise ValueError(f"Unknown benchmark '{name}'{hint} (known: {', '.join(BENCHMARKS)})")


def match_benchmark(folder: Path) -> Benchmark | None:
    """The benchmark that a folder is named after, if it contains at least two of its domains."""
    try:
        benchmark = get_benchmark(folder.absolute().name)
    except ValueError:
        return None
    return benchmark if benchmark.has_domains(folder) else None
