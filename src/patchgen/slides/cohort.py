"""Many slides at a glance: a CSV with a row per slide, and one page with their thumbnails and maps.

    page = write_cohort(out, [out / "a", out / "b"], {"c.svs": "cannot use slide c.svs: ..."})

All of it comes from the finished folders of the slides, so it can be made again at any time. A slide's numbers are
means and counts over its tiles; they are no diagnosis of the patient.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from patchgen.common.csv_files import write_csv
from patchgen.common.files import write_text
from patchgen.common.reading import read_json
from patchgen.common.text import printable
from patchgen.slides.heatmap import MASK, TILE_NOTICE, save_png
from patchgen.slides.scan import read_tiles
from patchgen.slides.tiles import TileGrid

TABLE, PAGE, THUMBNAIL = "cohort.csv", "index.html", "thumbnail.png"
SIDE = 512  # pixels of a thumbnail's longer side, at most


@dataclass(frozen=True)
class SlideSummary:
    """What a folder's tiles say together."""

    folder: Path
    slide: str
    model: str  # digest
    tiles: int
    tissue: float  # square millimetres
    classes: tuple[str, ...]
    shares: tuple[float, ...]  # of the tiles, by predicted class
    means: tuple[float, ...]  # of the tiles' probabilities
    unlike: float | None  # share of the tiles that are unlike the training images
    mask: float | None  # mean of the selection mask
    maps: dict[str, str]  # what -> picture

    @property
    def best(self) -> int:
        """The class with the largest mean probability."""
        return int(np.argmax(self.means))


def summarise(folder: Path) -> SlideSummary:
    """The summary of a finished slide's folder."""
    facts = read_json(folder / "slide.json")
    classes, tiles = tuple(facts["classes"]), list(read_tiles(folder / "tiles.csv", facts["classes"]))
    labels = [tile.label for tile in tiles]
    unlike = [tile.unlike_training for tile in tiles if tile.unlike_training is not None]
    masks = [tile.mask for tile in tiles if tile.mask is not None]
    area = (facts["tile"] * facts["mpp"] / 1000) ** 2  # of a tile
    return SlideSummary(
        folder, facts["slide"], facts["model"], len(tiles), sum(tile.tissue for tile in tiles) * area, classes,
        tuple(labels.count(name) / len(labels) for name in classes),
        tuple(float(p) for p in np.mean([tile.probabilities for tile in tiles], axis=0)),
        float(np.mean(unlike)) if unlike else None,
        float(np.mean(masks)) if masks else None,
        {name: files[0] for name, files in facts["files"].items()},
    )  # fmt: skip


def save_thumbnail(folder: Path, small: np.ndarray, grid: TileGrid) -> None:
    """The slide as a small picture that has the shape of its maps."""
    width, height = grid.map_size
    picture = Image.fromarray(small[:height, :width])
    picture.thumbnail((SIDE, SIDE))
    save_png(folder / THUMBNAIL, picture)


def write_cohort(out: Path, folders: Sequence[Path], failures: Mapping[str, str]) -> Path:
    """Write table and page of finished slides, and of those that failed why; returns the page."""
    slides = [summarise(folder) for folder in folders]
    classes = slides[0].classes
    header = ["slide", "folder", "tiles", "tissue_mm2", "label", "mean_probability", "mask_mean", "unlike_training",
              *(f"mean_p_{name}" for name in classes), *(f"share_{name}" for name in classes), "error"]  # fmt: skip
    empty = [""] * (len(header) - 2)
    rows = [[*_cells(slide), ""] for slide in slides]
    rows += [[Path(path).name, *empty, why.strip().splitlines()[-1]] for path, why in failures.items()]
    write_csv(out / TABLE, header, rows, people=True)
    write_text(out / PAGE, _page(slides, failures), "backslashreplace")
    return out / PAGE


def _cells(slide: SlideSummary) -> list[str]:
    optional = ["" if value is None else f"{value:.6f}" for value in (slide.mask, slide.unlike)]
    best = [slide.classes[slide.best], f"{slide.means[slide.best]:.6f}"]
    numbers = [f"{value:.6f}" for value in (*slide.means, *slide.shares)]
    return [slide.slide, slide.folder.name, str(slide.tiles), f"{slide.tissue:.4f}", *best, *optional, *numbers]


STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 100rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; overflow-wrap: anywhere; }
p { margin: .3rem 0; max-width: 60rem; } .pictures { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { margin: 0; width: min(18rem, 100%); } figcaption { font-size: .85rem; overflow-wrap: anywhere; }
.stack { position: relative; background: #fff; } .stack img { display: block; width: 100%; height: auto; }
.stack img + img { position: absolute; inset: 0; height: 100%; opacity: .75; image-rendering: pixelated; }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .15rem .7rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; overflow-wrap: anywhere; }
"""


def _page(slides: Sequence[SlideSummary], failures: Mapping[str, str]) -> str:
    title = f"{len(slides)} slide{'s' * (len(slides) > 1)}, model {_plain(slides[0].model)}"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("slide", "tiles", "mm²", *slides[0].classes))
    rows = "\n".join(map(_row, slides))
    failed = "".join(
        f"<li>{_plain(Path(path).name)}: {_plain(why.strip().splitlines()[-1])}</li>" for path, why in failures.items()
    )
    errors = f"<h2>Slides that could not be used</h2><ul>{failed}</ul>" if failed else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p>Mean probability of each class over the tiles of a slide; the same and more in <a href="{TABLE}">{TABLE}</a>. A map
has {TILE_NOTICE}; colours run from 0 (dark) to 1 (bright) in every map. Not for diagnosis.</p>
<table><tr>{head}</tr>
{rows}
</table>
{"".join(map(_section, slides))}{errors}
</body>
</html>
"""


def _row(slide: SlideSummary) -> str:
    name, folder = _plain(slide.slide), quote(slide.folder.name, errors="surrogateescape")
    means = "".join(
        f"<td>{'<b>' * (i == slide.best)}{mean:.3f}{'</b>' * (i == slide.best)}</td>"
        for i, mean in enumerate(slide.means)
    )
    return f'<tr><td><a href="#{folder}">{name}</a></td><td>{slide.tiles}</td><td>{slide.tissue:.2f}</td>{means}</tr>'


def _section(slide: SlideSummary) -> str:
    folder = quote(slide.folder.name, errors="surrogateescape")
    shares = ", ".join(f"{_plain(name)} {share:.1%}" for name, share in zip(slide.classes, slide.shares, strict=True))
    unlike = f"; {slide.unlike:.1%} unlike the training images" if slide.unlike is not None else ""
    ground = f'<img src="{folder}/{THUMBNAIL}" alt="{_plain(slide.slide)}" loading="lazy">'
    figures = [f'<figure><div class="stack">{ground}</div><figcaption>slide</figcaption></figure>']
    for name, file in slide.maps.items():
        source, title = f"{folder}/{quote(file)}", _plain("mean of the selection mask" if name == MASK else name)
        layer = f'<img src="{source}" alt="map: {title}" loading="lazy">'
        figures.append(f'<figure><div class="stack">{ground}{layer}</div><figcaption>{title}</figcaption></figure>')
    return (
        f'<h2 id="{folder}">{_plain(slide.slide)}</h2><p>{slide.tiles} tiles: {shares}{unlike}.</p>'
        f'<div class="pictures">{"".join(figures)}</div>\n'
    )


def _plain(text: Any) -> str:
    return html.escape(printable(text))
