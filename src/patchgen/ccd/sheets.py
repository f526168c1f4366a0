"""Human-readable results of a stage: a CSV of its images, and a contact sheet of each new class.

Clusters that belong to a labelled class have its name; the others are new-1, new-2, ..., and keep that name in all
later stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from patchgen.common.csv_files import write_csv
from patchgen.draw.sheet import Tile, contact_sheet, write_sheet

SHOWN = 24  # images on a sheet
COLUMNS = ("path", "group", "known_class", "distance")


@dataclass(frozen=True, eq=False)
class StageImages:
    """The images of a stage with their clusters."""

    paths: Sequence[str]
    cluster: np.ndarray  # (N,) ids; those below the number of known classes are known classes
    distance: np.ndarray  # (N,) to the cluster's centre, between unit features
    known: tuple[str, ...]

    def name(self, cluster: int) -> str:
        """The displayed name of a cluster."""
        return self.known[cluster] if cluster < len(self.known) else f"new-{cluster - len(self.known) + 1}"


def write_assignments(path: Path, images: StageImages) -> None:
    """One line per image: its cluster, whether that is a labelled class, and its distance from the centre."""
    rows = (
        (images.paths[i], images.name(cluster), "yes" if cluster < len(images.known) else "no", f"{distance:.4f}")
        for i, (cluster, distance) in enumerate(zip(images.cluster.tolist(), images.distance.tolist(), strict=True))
    )
    write_csv(path, COLUMNS, rows, people=True)


def write_sheets(
    folder: Path,
    images: StageImages,
    clusters: Sequence[int],
    pixels: Callable[[int], np.ndarray],
    masks: np.ndarray | None = None,
) -> None:
    """`new-1.png`, ...: the most central images of each of the clusters first.

    Args:
        clusters: ids of those to draw.
        pixels: the image (S, S, 3) at a position.
        masks: (N, h, w), if the method has masks.
    """
    for cluster in clusters:
        members = np.flatnonzero(images.cluster == cluster)
        nearest = members[np.argsort(images.distance[members], kind="stable")][:SHOWN]
        tiles = [
            Tile(pixels(i), Path(images.paths[i]).name, f"distance {images.distance[i]:.2f}",
                 None if masks is None else masks[i])
            for i in nearest
        ]  # fmt: skip
        shown = f", the {len(nearest)} most central first" if len(members) > len(nearest) else ", central ones first"
        number = "1 image" if len(members) == 1 else f"{len(members)} images"
        sheet = contact_sheet(images.name(cluster), tiles, subtitle=f"{number}{shown}")
        write_sheet(folder / f"{images.name(cluster)}.png", sheet)
