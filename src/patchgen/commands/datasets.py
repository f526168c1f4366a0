"""patchgen datasets [NAME]: the registered data sets, and everything known about one of them."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from patchgen.commands import print_table
from patchgen.common.text import json_text

if TYPE_CHECKING:
    from patchgen.data.benchmarks import Benchmark

SHOWN = 12  # class names in the layout and the text before the rest is a number


def show_datasets(name: Annotated[str | None, tyro.conf.Positional] = None, json: bool = False) -> None:
    """List the registered benchmarks, or describe one.

    Args:
        name: Name, folder name or alias of a benchmark; all are listed by default.
        json: Print JSON instead of text.
    """
    from patchgen.data.benchmarks import BENCHMARKS, get_benchmark

    if name is not None:
        entry = get_benchmark(name)
        facts = dataclasses.asdict(entry) | {"layout": _layout(entry)}
        print(json_text(facts) if json else _as_text(facts))
        return
    rows = [_summary(entry) for entry in BENCHMARKS.values()]
    if json:
        print(json_text(rows))
    else:
        print_table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])


def _summary(entry: "Benchmark") -> dict[str, Any]:
    """One line of the list; `versions` are the accepted ones, most of them named by their number of images."""
    return {"name": entry.name, "domains": list(entry.domains), "classes": entry.num_classes,
            "versions": list(entry.counts), "licence": entry.licence, "source": entry.source}  # fmt: skip


def _layout(entry: "Benchmark") -> list[str]:
    """The folder tree that is read with the default options."""
    classes = list(entry.classes or ()) or [f"<one of {entry.num_classes} classes>"]
    shown = classes if len(classes) <= SHOWN else [*classes[:SHOWN], f"<{len(classes) - SHOWN} more>"]
    lines = [f"{entry.folder}/"]
    for domain in entry.domains:
        part = entry.parts.get(domain, "").format(**entry.options)
        lines.append(f"  {domain}/" + (f"{part}/" if part else ""))
        # with rules, folders and classes have different names
        lines += ["    <class>/<image>"] if entry.class_rules else [f"    {name}/<image>" for name in shown]
    return lines


def _as_text(facts: dict[str, Any]) -> str:
    """The facts as paragraphs: the tree, counts with one version per line, the rest as `name: value`."""
    lines = [f"{facts['name']}: {facts['citation']}", "", "Layout", *(f"  {line}" for line in facts["layout"]), ""]
    lines += ["Images"]
    for version, images in facts["counts"].items():
        lines.append(f"  version {version}: " + ", ".join(f"{domain} {n:,}" for domain, n in images.items()))
    lines += ["", f"Classes ({facts['num_classes']})", f"  {', '.join(facts['classes'] or ['the class folders'])}"]
    if facts["class_rules"]:
        lines += ["", "Class folders, by the first pattern that fits their letters and digits"]
        lines += [f"  {pattern} -> {name}" for pattern, name in facts["class_rules"]]
    names = {
        "licence": "Licence", "source": "Where to get it", "notes": "Notes", "aliases": "Other folder names",
        "domain_aliases": "Other domain names", "options": "Reading options", "group_pattern": "Patient in file names",
        "metric": "Metric", "swad_ratio": "SWAD ratio", "steps": "Steps", "checkpoint_every": "Evaluation every",
    }  # fmt: skip
    lines += [""] + [f"{title}: {_cell(facts[key])}" for key, title in names.items() if facts[key] or key == "licence"]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} = {_cell(what)}" for name, what in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "not known, ask the owner" if value is None else str(value)


COMMAND = show_datasets
