"""Distinguish data sets with the same name by the data fingerprint in each run folder.

    name_apart(runs)      # `data` and `other/data` with other images: "data" and "data (2)", each with its path

Folders of earlier versions have no fingerprint. For these, different rows mean different data, and the same rows at two
paths mean a data set that was moved, unless two runs with the same settings have different names there: a run's name is
a digest of its settings and its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from patchgen.runs.scores import Run


def name_apart(runs: Iterable[Run]) -> list[Run]:
    """The runs in their order; if several data sets have the same name, all but the first get a number.

    The first is the one whose path comes first alphabetically.
    """
    found = list(runs)
    places: dict[tuple[str, ...], list[Run]] = {}  # of one name, list of images, fingerprint and path
    sets: dict[str, list[list[Run]]] = {}
    for run in sorted(found, key=lambda run: (run.config.data, str(run.path))):
        places.setdefault((run.dataset, run.rows, run.data, _place(run)), []).append(run)
    for (name, *_), mine in places.items():
        alike = sets.setdefault(name, [])
        home = next((one for one in alike if _same_data(one, mine)), None)
        if home is None:
            alike.append(home := [])
        home += mine
    named = {run.path: run for run in found}
    for name, alike in ((name, alike) for name, alike in sets.items() if len(alike) > 1):
        for number, group in enumerate(alike, 1):
            title, place = name if number == 1 else f"{name} ({number})", _where(group, alike)
            named |= {run.path: replace(run, dataset=title, place=place) for run in group}
    return list(named.values())


def _same_data(some: Sequence[Run], others: Sequence[Run]) -> bool:
    """Whether the runs at two paths use the same data, judging by their folders."""
    known_data = {run.data for run in some if run.data}
    if known_data and others[0].data:
        return others[0].data in known_data
    names: dict[str, set[str]] = {}
    for run in some:
        names.setdefault(str(run.config.deciding()), set()).add(run.path.name)
    known = [(run.path.name, names.get(str(run.config.deciding()))) for run in others]
    return some[0].rows == others[0].rows and all(there is None or name in there for name, there in known)


def _where(group: Sequence[Run], alike: Sequence[Sequence[Run]]) -> str:
    """Its path; and some of its runs, if another data set was at that path as well."""
    place = group[0].config.data
    if sum(place == others[0].config.data for others in alike) == 1:
        return place
    names = sorted(run.path.name for run in group)
    return f"{place} in the runs {', '.join(names[:3])}{', ...' * (len(names) > 3)}"


def _place(run: Run) -> str:
    """The path of the data; a relative path is only meaningful together with its run."""
    data = PurePath(run.config.data)
    return str(data if data.is_absolute() else run.path.parent.resolve() / data)
