"""What `patchgen discover` writes: a contact sheet for each group of new images, assignments.csv and a page."""

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from patchgen.common.files import write_csv
from patchgen.common.text import printable
from patchgen.draw.overlay import NOTICE, original
from patchgen.draw.sheet import Tile, contact_sheet, write_sheet
from patchgen.pages.page import file_address, render, write_page
from patchgen.predict.discover import Groups

CENTRAL = 24  # images of a group that its sheet shows
CSV_HEADER = ("path", "group", "fits_known", "confidence", "nearest_known", "distance_ratio")


def describe_estimate(groups: Groups) -> str:
    """The number of new classes, and the score of every number that was tried; nothing if it was given."""
    if groups.estimate is None:
        return ""
    known = len(groups.known)
    curve = ", ".join(f"{k - known}: {score:.1%}" for k, score in groups.estimate.curve.items())
    number = groups.estimate.num_classes - known
    return (
        f"new classes: {number} (an estimate, often off by a few; --new-classes sets it)\n"
        f"  known images in the right cluster for each number tried: {curve}"
    )


def describe_rule(groups: Groups) -> str:
    """What made a group a known class, and what remains uncertain."""
    renamed = ", ".join(f"{count} of {name}" for name, count in groups.renamed.items())
    return (
        f"{groups.rule}."
        + (f" So the classifier named whole groups: {renamed}; a new site is not a new class." if renamed else "")
        + " A new class that the classifier takes confidently for a known one cannot be told from it, and a group may"
        " be a known class that looks different here: look at the sheets."
    )


def summarise(groups: Groups) -> list[dict[str, Any]]:
    """One row per group: the new ones, largest first, then the known classes with images."""
    rows = []
    for name in (*groups.new, *groups.known):
        members, new = groups.of(name), name in groups.new
        if members:
            near = [member.nearest_known for member in members]
            rows.append({
                "group": name,
                "images": len(members),
                "fits_known": not new,
                "confidence": median(member.confidence for member in members),
                "nearest_known": max(sorted(set(near)), key=near.count),
                "sheet": f"{name}.png" if new else None,
            })  # fmt: skip
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    fits = "yes" if row["fits_known"] else "no"
    return [row["group"], str(row["images"]), fits, f"{row['confidence']:.2f}", row["nearest_known"]]


def _render_page(title: str, groups: Groups, rows: list[dict[str, Any]]) -> str:
    """One HTML page next to the sheets."""
    new = sum(row["images"] for row in rows if not row["fits_known"])
    return render(
        "discover.html",
        title=title,
        lead=f"{len(groups.members)} images: {new} fit no known class (groups: {len(groups.new)}).",
        rows=list(map(cells, rows)),
        estimate=describe_estimate(groups),
        rule=describe_rule(groups),
        notice=NOTICE,
        sheets=[{"group": row["group"], "source": file_address(row["sheet"]),
                 "alt": f"Contact sheet of {row['group']}, {row['images']} images, the most central first"}
                for row in rows if row["sheet"]],
    )  # fmt: skip


def write(groups: Groups, rows: list[dict[str, Any]], title: str, out: Path) -> Path:
    """All files, the page last; returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    for row in rows:
        if row["sheet"]:
            members, count = groups.of(row["group"]), row["images"]
            tiles = [
                Tile(original(member.path), member.path.name, f"confidence {member.confidence:.2f}", member.mask)
                for member in members[:CENTRAL]
            ]
            part = f", the {len(tiles)} most central shown" if len(tiles) < count else ", most central first"
            caption = f"{count} image{'s' * (count > 1)} that fit no known class{part}"
            columns = 6 if members[0].mask is None else 4
            write_sheet(out / row["sheet"], contact_sheet(row["group"], tiles, columns, caption))
    lines = (
        [printable(member.path), member.group, "yes" if member.fits_known else "no", f"{member.confidence:.4f}",
         member.nearest_known, f"{member.distance_ratio:.4f}"] for member in groups.members
    )  # fmt: skip
    write_csv(out / "assignments.csv", CSV_HEADER, lines, people=True)
    return write_page(out / "index.html", _render_page(title, groups, rows))


def as_json(groups: Groups, rows: list[dict[str, Any]], page: Path) -> dict[str, Any]:
    known, estimate = len(groups.known), None
    if groups.estimate:
        curve = {str(k - known): score for k, score in groups.estimate.curve.items()}
        estimate = {"new_classes": groups.estimate.num_classes - known, "known_accuracy": curve}
    return {
        "groups": rows,
        "estimate": estimate,
        "rule": asdict(groups.rule) | {"named_by_classifier": groups.renamed},
        "unreadable": [{"path": str(image.path), "reason": image.reason} for image in groups.unreadable],
        "assignments": str(page.with_name("assignments.csv")),
        "page": str(page),
    }
