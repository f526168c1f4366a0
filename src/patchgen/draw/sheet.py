"""Contact sheets: many small images, each with its selection map, a name and a note, on one picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from PIL import Image, ImageDraw, ImageFont

from patchgen.common.files import replacing
from patchgen.draw.overlay import COLOURS, NOTICE, OPACITY, scaled, upsample

WIDTH = 1200
MARGIN, GAP = 24, 16  # at the edges of the sheet, between tiles
INSIDE = 4  # between an image and its map
HEADER = 92
LINE = 19  # height of a line of text below a tile
INK, GREY, BLANK = (28, 32, 36), (75, 85, 96), (255, 255, 255)
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
_font = cache(ImageFont.load_default)


@dataclass(frozen=True, eq=False)
class Tile:
    image: np.ndarray  # (H, W, 3) uint8
    name: str
    note: str = ""
    mask: np.ndarray | None = None  # (h, w) in [0, 1]


def contact_sheet(title: str, tiles: Sequence[Tile], columns: int = 4, subtitle: str = "") -> Image.Image:
    """Tiles in reading order under a header; a tile with a mask is [image | mask over it], else the image alone."""
    with_masks = any(tile.mask is not None for tile in tiles)
    cell = (WIDTH - 2 * MARGIN - (columns - 1) * GAP) // columns
    side = (cell - INSIDE) // 2 if with_masks else cell  # side of the square for an image
    height = side + 2 * LINE + GAP
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (WIDTH, HEADER + rows * height + MARGIN - GAP), BLANK)
    _header(sheet, title, subtitle, with_masks)
    for i, tile in enumerate(tiles):
        corner = MARGIN + i % columns * (cell + GAP), HEADER + i // columns * height
        _tile(sheet, tile, corner, cell, side)
    return sheet


def write_sheet(path: Path, sheet: Image.Image) -> None:
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG")


def mask_over(image: Image.Image, mask: np.ndarray) -> Image.Image:
    """The mask's colours over the image in grey."""
    grey = np.asarray(image.convert("L"), dtype=float)[..., None]
    colours = 255 * colormaps[COLOURS](upsample(mask, image.height, image.width))[..., :3]
    return Image.fromarray((OPACITY * colours + (1 - OPACITY) * grey).round().astype(np.uint8))


def side_by_side(image: Image.Image, masks: Sequence[np.ndarray], gap: int) -> Image.Image:
    """[image | mask over it | ...], with white gaps of some pixels."""
    panels = [image, *(mask_over(image, mask.astype(float)) for mask in masks)]
    joined = Image.new("RGB", (len(panels) * (image.width + gap) - gap, image.height), BLANK)
    for number, panel in enumerate(panels):
        joined.paste(panel, (number * (image.width + gap), 0))
    return joined


def fit_text(text: str, font: Font, width: float) -> str:
    """One printable line no wider than `width`; the end is kept, because it distinguishes long names."""
    line = "".join(letter if letter.isprintable() else "?" for letter in text)
    if font.getlength(line) <= width:
        return line
    while line and font.getlength("…" + line) > width:
        line = line[1:]
    return "…" + line


def _header(sheet: Image.Image, title: str, subtitle: str, with_masks: bool) -> None:
    draw = ImageDraw.Draw(sheet)
    room = WIDTH - 2 * MARGIN - (340 if with_masks else 0)
    for text, size, colour, top in ((title, 28, INK, 16), (subtitle, 16, GREY, 54)):
        draw.text((MARGIN, top), fit_text(text, _font(size), room), colour, _font(size))
    if not with_masks:
        return
    width, height, font = 150, 12, _font(14)  # of the colour bar
    left, middle = WIDTH - MARGIN - 75 - width, 32
    ramp = Image.new("RGB", (width, height), (128, 128, 128))  # grey behind the colours, as on the image
    sheet.paste(mask_over(ramp, np.linspace(0, 1, width)[None]), (left, middle - height // 2))
    draw.text((left - 8, middle), "0 left out", GREY, font, anchor="rm")
    draw.text((left + width + 8, middle), "1 selected", GREY, font, anchor="lm")
    draw.text((WIDTH - MARGIN, 62), NOTICE, GREY, font, anchor="rm")


def _tile(sheet: Image.Image, tile: Tile, corner: tuple[int, int], cell: int, side: int) -> None:
    left, top = corner
    image = Image.fromarray(tile.image)
    image = image.resize(scaled(*image.size, side), Image.Resampling.LANCZOS)
    right, down = left + (side - image.width) // 2, top + (side - image.height) // 2
    sheet.paste(image, (right, down))
    if tile.mask is not None:
        sheet.paste(mask_over(image, tile.mask), (right + side + INSIDE, down))
    font, draw = _font(14), ImageDraw.Draw(sheet)
    for i, (text, colour) in enumerate(((tile.name, INK), (tile.note, GREY))):
        draw.text((left, top + side + 3 + i * LINE), fit_text(text, font, cell), colour, font)
