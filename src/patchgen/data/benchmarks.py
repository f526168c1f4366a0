"""The registered benchmarks: their layout on disk, their content, and the names of their classes.

An entry states only confirmed facts: a version lists only the domains with known counts.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from patchgen.common import plugins
from patchgen.common.text import did_you_mean, name_key
from patchgen.data.listing import visible_folders


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

    def find_root(self, folder: Path) -> Path:
        """The folder itself if it holds the domains, else the benchmark's folder inside it."""
        children = visible_folders(folder)
        if len({self.domain_of(child.name) for child in children} - {None}) >= 2:
            return folder
        for child in children:
            if self.is_called(child.name):
                return self.find_root(child)
        raise ValueError(
            f"'{folder}' does not hold {self.name}: neither a folder '{self.folder}' nor two of its domains "
            f"({', '.join(self.domains)}) are there. Source: {self.source}."
        )

    def class_folders(self, root: Path, options: Mapping[str, str]) -> tuple[dict[str, list[Path]], dict[str, str]]:
        """The folders that hold the class folders of each domain, in the benchmark's order, and the options used."""
        if unknown := [name for name in options if name not in self.options]:
            known, hint = ", ".join(self.options) or "none", did_you_mean(unknown[0], self.options)
            raise ValueError(f"{self.name} has no reading option '{unknown[0]}'{hint} (known: {known})")
        folders: dict[str, Path] = {}
        for folder in visible_folders(root):
            domain = self.domain_of(folder.name)
            if domain is not None and (other := folders.setdefault(domain, folder)) != folder:
                raise ValueError(
                    f"{self.name}: the folders '{other.name}' and '{folder.name}' both name the domain "
                    f"'{domain}'. Keep one of them, or put both inside one folder '{domain}'."
                )
        parts = {d: self._parts(d, folders[d], {**self.options, **options}) for d in self.domains if d in folders}
        used = {name: value for _, of_domain in parts.values() for name, value in of_domain.items()}
        return {domain: places for domain, (places, _) in parts.items()}, used

    def _parts(self, domain: str, folder: Path, options: Mapping[str, str]) -> tuple[list[Path], dict[str, str]]:
        """The folders that hold the class folders of a domain, and the options used to find them.

        A `+` in an option joins several parts. A folder that contains its class folders directly needs no part: its
        options are then recorded as `.`, a value that can be passed again.
        """
        if (template := self.parts.get(domain)) is None:
            return [folder], {}
        used = {name: value for name, value in options.items() if f"{{{name}}}" in template}
        children, parents = visible_folders(folder), []
        for choice in dict.fromkeys(itertools.product(*(value.split("+") for value in used.values()))):
            part = template.format(**dict(zip(used, choice, strict=True)))
            # archives often add a folder, and some folders are the part itself
            places = [folder / part, *(child / part for child in children)]
            places += [folder] * (name_key(folder.name) == name_key(part))
            if parent := next((place for place in places if place.is_dir()), None):
                parents.append(parent)
                continue
            names = [child.name for child in children]
            if any(map(self.class_of, names)) and all(self.options[name] == value for name, value in used.items()):
                return [folder], dict.fromkeys(used, ".")
            change = f", or choose another part with the option {' / '.join(used)}" if used else ""
            there = ", ".join(names) or "no folder"
            raise ValueError(f"{self.name}: '{folder}' holds no '{part}' (found: {there}). Unpack it there{change}.")
        return parents, used

    def groups_of(self, paths: Sequence[str]) -> tuple[str, ...] | None:
        """The patient of each file by `group_pattern`; None if neither the benchmark nor any file names one."""
        pattern = self.group_pattern
        patients = [re.search(pattern, Path(path).name) for path in paths] if pattern else []
        if not any(patients):
            return None
        if lost := [path for path, patient in zip(paths, patients, strict=True) if patient is None]:
            raise ValueError(
                f"{self.name}: {len(lost)} of {len(paths)} file names hold no patient ({pattern}), e.g. '{lost[0]}'. "
                "Restore the names, or pass a CSV manifest with a group column."
            )
        return tuple(patient.group(0).upper() for patient in patients if patient)


_DOMAIN_NET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_ENTRIES = (
    Benchmark(
        "pacs",
        "PACS",
        aliases=("kfold",),  # the folder name in the archive
        domains=("art_painting", "cartoon", "photo", "sketch"),
        classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        num_classes=7,
        counts={"9991": {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}},
        licence="research use",
        citation="Li et al., Deeper, Broader and Artier Domain Generalization, ICCV 2017",
        source="the authors' archive, which unpacks to kfold; place the folder yourself, public links change often",
    ),
    Benchmark(
        "vlcs",
        "VLCS",
        domains=("Caltech101", "LabelMe", "SUN09", "VOC2007"),
        classes=("bird", "car", "chair", "dog", "person"),
        num_classes=5,
        counts={"10729": {"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376}},
        citation="Fang et al., Unbiased Metric Learning, ICCV 2013",
        source="the archive used by DomainBed; place the folder yourself",
        swad_ratio=1.2,
        checkpoint_every=50,
        notes="SUN09 has 20 birds and 30 dogs: a 20 % hold-out keeps some 4 and 6 of them, so its scores are noisy.",
    ),
    Benchmark(
        "officehome",
        "office_home",
        aliases=("OfficeHomeDataset_10072016",),
        domains=("Art", "Clipart", "Product", "Real World"),
        num_classes=65,
        counts={"15588": {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}},
        citation="Venkateswara et al., Deep Hashing Network for Unsupervised Domain Adaptation, CVPR 2017",
        source="the authors' archive OfficeHomeDataset_10072016; place the folder yourself",
    ),
    Benchmark(
        "terraincognita",
        "terra_incognita",
        domains=("location_100", "location_38", "location_43", "location_46"),
        classes=("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"),
        num_classes=10,
        counts={
            "24788": {"location_100": 4879, "location_38": 9767, "location_43": 4020, "location_46": 6122},
            "24330": {"location_100": 4741, "location_38": 9736, "location_43": 3970, "location_46": 5883},
        },
        citation="Beery et al., Recognition in Terra Incognita, ECCV 2018",
        source="Caltech Camera Traps CCT20 (small images and five annotation files) on LILA, sorted into folders",
        notes="Most published numbers use 24,788 images, no longer obtainable; today's download has 24,330.",
    ),
    Benchmark(
        "domainnet",
        "domain_net",
        domains=_DOMAIN_NET,
        num_classes=345,
        counts={
            "586575": dict(zip(_DOMAIN_NET, (48129, 51605, 72266, 172500, 172947, 69128), strict=True)),
            "raw": dict(zip(_DOMAIN_NET, (48833, 53201, 75759, 172500, 175327, 70386), strict=True)),
        },
        citation="Peng et al., Moment Matching for Multi-Source Domain Adaptation, ICCV 2019",
        source="the authors' six archives (cleaned clipart and painting), minus DomainBed's list of 9,431 duplicates",
        steps=15001,
        checkpoint_every=500,
        notes="Published results use 586,575 images; 'raw' still holds the duplicates.",
    ),
    Benchmark(
        "histopantum",
        "HISTOPANTUM",
        domains=("colon", "ovarian", "stomach", "uterus"),
        classes=("non-tumour", "tumour"),
        num_classes=2,
        class_rules=((r".*(non|normal|benign).*", "non-tumour"), (r".*", "tumour")),
        counts={"14555794": {"colon": 27248}},  # 140,569 tiles in all; the other organs' counts are not confirmed
        group_pattern=r"(?i)TCGA-[A-Z0-9]+-[A-Z0-9]+",
        citation="Zamanitajeddin et al., Benchmarking DG Algorithms in Computational Pathology, 2024",
        source="Zenodo record 14555794",
        metric="f1",
        positive="tumour",
        checkpoint_every=200,
        notes="140,569 tiles of 224 px from TCGA slides. Tiles of a patient share its look: split by group.",
    ),
    Benchmark(
        "histocolon",
        "HISTOCOLON",
        domains=("CRC-TP", "K-16", "K-19"),
        domain_aliases={
            "K-16": ("Kather16", "Kather_texture_2016_image_tiles_5000"),
            "K-19": ("Kather19", "NCT-CRC-HE-100K", "NCT-CRC-HE-100K-NONORM", "CRC-VAL-HE-7K"),
        },
        classes=("ADI", "BACK", "DEB", "LYM", "MUC", "MUS", "NORM", "STR", "TUM", "CSTR"),
        num_classes=10,
        class_rules=(
            (r"(07)?adipose", "ADI"),
            (r"(08)?empty|background", "BACK"),
            (r"(05)?debris", "DEB"),
            (r"mucus", "MUC"),  # K-16's debris also holds mucus
            (r"(02)?stroma", "STR"),
            (r"muscle", "MUS"),  # K-16 keeps muscle inside its stroma
            (r"(04)?lympho|inflammatory", "LYM"),
            (r"(06)?mucosa|benign|normal", "NORM"),
            (r"(01)?tumou?r", "TUM"),
            (r"(03)?complex(stroma)?", "CSTR"),
        ),
        parts={
            "CRC-TP": "{crctp_fold}/{crctp_part}",
            "K-16": "Kather_texture_2016_image_tiles_5000",
            "K-19": "{k19_part}",
        },
        options={"crctp_fold": "Fold2", "crctp_part": "Training", "k19_part": "NCT-CRC-HE-100K"},
        counts={
            "100K": {"CRC-TP": 196000, "K-16": 5000, "K-19": 100000},
            "7K": {"CRC-TP": 196000, "K-16": 5000, "K-19": 7180},
            "100K+7K": {"CRC-TP": 196000, "K-16": 5000, "K-19": 107180},
        },
        licence="K-19: CC BY; the other parts: ask their owners",
        citation="Javed et al. 2020 (CRC-TP); Kather et al. 2016 (K-16); Kather et al. 2019 (K-19)",
        source="K-16: Zenodo record 53169; K-19: Zenodo record 1214456; CRC-TP is no longer public, supply your copy",
        checkpoint_every=200,
        notes="Domains share only part of the ten classes: with K-19 unseen, no source shows MUC.",
    ),
)

BENCHMARKS: dict[str, Benchmark] = {entry.name: entry for entry in _ENTRIES}
plugins.open_table("datasets", BENCHMARKS)


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
    known = {benchmark.domain_of(child.name) for child in visible_folders(folder)} - {None}
    return benchmark if len(known) >= 2 else None
