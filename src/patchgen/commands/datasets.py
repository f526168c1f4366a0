"""patchgen datasets [NAME]: the registered data sets, and everything known about one of them."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from patchgen.commands import cell_text, print_records
from patchgen.common.text import json_text

if TYPE_CHECKING:
    from patchgen.data.benchmarks import Benchmark

SHOWN = 12  # class names in the layout before the rest is a number


def show_datasets(name: Annotated[str | None, tyro.conf.Positional] = None, json: bool = False) -> None:
    """List the registered benchmarks, or describe one.

    Args:
        name: Name, folder name or alias of a benchmark; all are listed by default.
        json: Print JSON instead of text.
    """
    from patchgen.data.benchmarks import BENCHMARKS, get_benchmark

    if name is not None:
        entry = get_benchmark(name)
        facts = {**dataclasses.asdict(entry), "layout": _layout(entry)}
        print(json_text(facts) if json else _as_text(facts))
        return
    # most versions are named by their number of images
    rows = [
        {"name": entry.name, "domains": entry.domains, "classes": entry.num_classes, "versions": [*entry.counts],
         "licence": entry.licence, "source": entry.source}
        for entry in BENCHMARKS.values()
    ]  # fmt: skip
    print_records(rows, json)


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
    """The tree, then each fact as `name: value`, with the members of a mapping below it."""
    lines = [*facts.pop("layout"), ""]
    facts["licence"] = facts["licence"] or "not known, ask the owner"
    facts["class_rules"] = {f"/{pattern}/": name for pattern, name in facts["class_rules"]}
    for name, value in facts.items():
        title = name.replace("_", " ").capitalize()
        if isinstance(value, dict) and value:
            lines += [f"{title}:", *(f"  {key}: {cell_text(inner)}" for key, inner in value.items())]
        elif value:
            lines.append(f"{title}: {cell_text(value)}")
    return "\n".join(lines)


COMMAND = show_datasets
