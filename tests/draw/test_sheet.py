"""Contact sheets: everything is where it should be, and the colours say the mask's own values."""

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageFont

from patchgen.draw.overlay import OPACITY
from patchgen.draw.sheet import HEADER, MARGIN, WIDTH, Tile, contact_sheet, fit_text

RED, GREEN, BLUE = (200, 0, 0), (0, 200, 0), (0, 0, 200)


def plain(colour: tuple[int, int, int], height: int = 30, width: int = 30) -> np.ndarray:
    return np.full((height, width, 3), colour, np.uint8)


def spots(sheet: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Box of the pixels of a colour: left, top, right, bottom."""
    rows, columns = np.nonzero((np.abs(np.asarray(sheet).astype(int) - colour) < 3).all(2))
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def test_tiles_stand_in_reading_order() -> None:
    tiles = [Tile(plain(colour), "x") for colour in (RED, GREEN, BLUE)]
    sheet = contact_sheet("three", tiles, columns=2)
    red, green, blue = (spots(sheet, colour) for colour in (RED, GREEN, BLUE))
    side = (WIDTH - 2 * MARGIN - 16) // 2
    assert sheet.width == WIDTH and red == (MARGIN, HEADER, MARGIN + side, HEADER + side)
    assert green[1] == red[1] and green[0] > red[2]
    assert blue[0] == red[0] and blue[1] > red[3] and blue[3] < sheet.height


def test_aspect_is_kept() -> None:
    sheet = contact_sheet("wide", [Tile(plain(RED, 20, 60), "x"), Tile(plain(GREEN, 60, 20), "y")], columns=4)
    left, top, right, bottom = spots(sheet, RED)
    assert (right - left) / (bottom - top) == pytest.approx(3, abs=0.1)
    left, top, right, bottom = spots(sheet, GREEN)
    assert (bottom - top) / (right - left) == pytest.approx(3, abs=0.1)


def test_the_map_stands_beside_its_image() -> None:
    mask = np.array([[1.0, 0.0], [1.0, 0.0]])  # the left half is selected
    sheet = contact_sheet("map", [Tile(plain(RED), "x", "note", mask)])
    left, top, right, bottom = spots(sheet, RED)
    side, pixels = right - left, np.asarray(sheet).astype(float)
    grey = np.asarray(Image.fromarray(plain(RED)).convert("L"))[0, 0]
    for value, column in ((1.0, right + 8), (0.0, right + side - 4)):
        expected = OPACITY * 255 * np.array(matplotlib.colormaps["viridis"](value)[:3]) + (1 - OPACITY) * grey
        assert np.abs(pixels[(top + bottom) // 2, column] - expected).max() < 4


def test_the_notice_is_there_only_with_maps() -> None:
    def header(mask: np.ndarray | None) -> np.ndarray:
        return np.asarray(contact_sheet("t", [Tile(plain(RED), "x", "", mask)]))[:HEADER, WIDTH // 2 :]

    assert (header(None) == 255).all() and (header(np.ones((2, 2))) < 200).any()


def test_text_fits_and_keeps_its_end() -> None:
    font = ImageFont.load_default(14)
    assert fit_text("short.png", font, 200) == "short.png"
    cut = fit_text("a" * 200 + "_17.png", font, 150)
    assert cut.startswith("…") and cut.endswith("_17.png") and font.getlength(cut) <= 150
    assert fit_text("a\nb\udcff", font, 200) == "a?b?"
    assert fit_text("wide", font, 1) == "…"


def test_odd_names_do_not_break_a_sheet() -> None:
    tiles = [Tile(plain(RED), name, "n" * 300) for name in ("", "a\nb", "x\udcff.png", "名前.png", "w" * 300)]
    assert contact_sheet("title " * 60, tiles, columns=12, subtitle="s" * 400).width == WIDTH
