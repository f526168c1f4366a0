"""How the oracle benchmark's pictures are drawn: integers only, so that every machine draws the same pixels.

All pixels are int64 until `to_uint8`; divisions are floor divisions.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

DRAW_VERSION = 1  # increase it when any pixel changes: folders of older versions are then ignored
Colour = tuple[int, int, int]
Field = np.ndarray  # (S,S) integers


class Dice:
    """Integers from the raw PCG64 stream of a key: numpy freezes that stream, but not `Generator.integers`."""

    def __init__(self, *key: int) -> None:
        self.bits = np.random.PCG64(np.random.SeedSequence(key))

    def below(self, bound: int) -> int:
        return (int(self.bits.random_raw()) >> 32) * bound >> 32

    def between(self, low: int, high: int) -> int:
        """One integer in [low, high]."""
        return low + self.below(high - low + 1)

    def field(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Integers in [low, high], int64."""
        raw = np.asarray(self.bits.random_raw(int(np.prod(shape))), dtype=np.uint64) >> np.uint64(32)
        return low + ((raw * np.uint64(high - low + 1)) >> np.uint64(32)).astype(np.int64).reshape(shape)

    def order(self, n: int) -> np.ndarray:
        """A permutation of range(n)."""
        return np.argsort(np.asarray(self.bits.random_raw(n), dtype=np.uint64), kind="stable")


LAYOUT_ATTEMPTS = 1000  # a layout of several groups can get stuck and is then drawn again


def layout(dice: Dice, grid: int, size: int, groups: int) -> np.ndarray:
    """All patches (P,) in a random order whose first `size` are C*: `groups` connected groups that do not touch.

    Groups grow by random neighbours from a start that is uniform over the free patches. Border patches have fewer
    neighbours, so they get a larger weight: C* is nearly uniform over the grid.
    """
    for _ in range(LAYOUT_ATTEMPTS):
        if patches := _grow_groups(dice, grid, [size // groups + (g < size % groups) for g in range(groups)]):
            rest = np.setdiff1d(np.arange(grid * grid), patches)
            return np.concatenate([np.array(patches), rest[dice.order(len(rest))]])
    raise ValueError(f"{groups} separate groups of {size} patches in all do not fit in {grid} x {grid} patches")


def _grow_groups(dice: Dice, grid: int, sizes: list[int]) -> list[int] | None:
    free, patches = set(range(grid * grid)), []
    for size in sizes:
        group: list[int] = []
        urn = sorted(free)
        for _ in range(size):
            if not urn:
                return None
            group.append(urn[dice.below(len(urn))])
            edge = {n for p in group for n in neighbours(p, grid)} & free - set(group)
            urn = [n for n in sorted(edge) for _ in range(12 // len(neighbours(n, grid)))]
        patches += group
        free -= set(group) | edge
    return patches


def neighbours(patch: int, grid: int) -> list[int]:
    y, x = divmod(patch, grid)
    around = ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1))
    return [a * grid + b for a, b in around if 0 <= a < grid and 0 <= b < grid]


# Motifs: (u, v, period) -> bool field. u runs right, v down. Each is its own mirror image up to the random phase, since
# training flips images: "/" and "\" are therefore one class.


def _centred(u: Field, v: Field, period: int) -> tuple[Field, Field]:
    """Twice the distance to the middle of the cell, for even and odd periods alike."""
    return 2 * (u % period) - period + 1, 2 * (v % period) - period + 1


def _dots(u: Field, v: Field, period: int) -> Field:
    x, y = _centred(u, v, period)
    return 2 * (x * x + y * y) <= period * period


def _rings(u: Field, v: Field, period: int) -> Field:
    wide = 2 * period
    x, y = _centred(u, v, wide)
    radius = 16 * (x * x + y * y)  # in units of wide^2 / 16: dark rings end at 0.25, 0.5 and 0.75, 1 of the half-width
    return (radius < wide * wide) | ((radius >= 4 * wide * wide) & (radius < 10 * wide * wide))


def _crosses(u: Field, v: Field, period: int) -> Field:
    wide = period + 2
    x, y = _centred(u, v, wide)
    arm, thick = wide - 3, 1 - wide % 2  # arms one pixel thick in odd cells, two in even ones
    return ((abs(x) <= thick) & (abs(y) <= arm)) | ((abs(y) <= thick) & (abs(x) <= arm))


MOTIFS: dict[str, Callable[[Field, Field, int], Field]] = {
    "bars": lambda u, v, period: v % period < period // 2,
    "rings": _rings,
    "checks": lambda u, v, period: (u // (period // 2) + v // (period // 2)) % 2 == 0,
    "crosses": _crosses,
    "pillars": lambda u, v, period: u % period < period // 2,
    "dots": _dots,
    "zigzag": lambda u, v, period: (v + abs(u % (2 * period) - period)) % period < period // 2,
    "diamonds": lambda u, v, period: np.minimum((u + v) % (period + 3), (u - v) % (period + 3)) < 2,
    "slopes": lambda u, v, period: (u + v) % period < period // 2,
    "net": lambda u, v, period: (u % period < 1) | (v % period < 1),
}
DARKS: tuple[Colour, ...] = (
    (24, 20, 44), (70, 16, 30), (16, 56, 36), (18, 36, 92), (84, 40, 10), (64, 18, 84), (14, 62, 74), (40, 40, 40),
)  # fmt: skip
LIGHTS: tuple[Colour, ...] = (
    (250, 244, 226), (255, 214, 92), (158, 232, 255), (255, 176, 186), (176, 246, 152), (224, 192, 255),
    (255, 190, 128), (228, 232, 236),
)  # fmt: skip


def two_colours(inside: Field, dice: Dice) -> np.ndarray:
    """A bool field (S,S) in a dark and a light colour, whichever is inside: colour says nothing about the class."""
    pair = np.array([DARKS[dice.below(len(DARKS))], LIGHTS[dice.below(len(LIGHTS))]])
    return pair[inside.astype(np.int64) ^ dice.below(2)]


def motif(name: str, dice: Dice, size: int, patch: int) -> np.ndarray:
    """The texture of a class over the whole image (S,S,3), with a random phase, mirror, period and pair of colours."""
    y, x = np.mgrid[:size, :size]
    period = dice.between(5 * patch // 14, patch // 2)
    u = (x if dice.below(2) else -x) + dice.below(12 * period)
    return two_colours(MOTIFS[name](u, y + dice.below(12 * period), period), dice)


def distractor(dice: Dice, patch: int) -> np.ndarray:
    """A patch (p,p,3) in motif colours whose pattern belongs to no class: specks, camouflage, one edge or one disc."""
    y, x = np.mgrid[:patch, :patch] - patch // 2
    patterns: list[Callable[[int, int], Field]] = [
        lambda a, b: dice.field(0, 1, patch, patch)[y // 2, x // 2] == 1,
        lambda a, b: soft_noise(dice, patch, patch // 3, patch // 3) > 127,
        lambda a, b: (a * x + b * y if a or b else x) > 0,
        lambda a, b: 9 * ((x - a) ** 2 + (y - b) ** 2) < patch * patch,
    ]
    pattern = patterns[dice.below(len(patterns))]
    return two_colours(pattern(dice.between(-3, 3), dice.between(-3, 3)), dice)


# Backgrounds: a soft texture 0..255 between two near colours of one hue


def soft_noise(dice: Dice, size: int, tall: int, wide: int) -> Field:
    """Smooth random hills 0..255 on a grid of tall x wide pixels."""
    hills = dice.field(0, 255, size // tall + 2, size // wide + 2)
    return _blend(_blend(hills, size, tall).T, size, wide).T


def _blend(values: np.ndarray, size: int, cell: int) -> np.ndarray:
    """Rows of `values` spread to `size` rows by an integer smoothstep."""
    at, t = np.arange(size) // cell, np.arange(size) % cell
    weight = (t * t * (3 * cell - 2 * t) // (cell * cell))[:, None]
    return (values[at] * (cell - weight) + values[at + 1] * weight) // cell


def _bricks(dice: Dice, size: int) -> Field:
    tall, wide = max(4, size // 7), max(8, 2 * size // 7)
    y, x = np.mgrid[:size, :size] + np.array([dice.below(tall), dice.below(wide)])[:, None, None]
    row = y // tall
    x = x + row % 2 * (wide // 2)
    shade = dice.field(90, 210, size // tall + 3, size // wide + 3)[row, x // wide]
    return np.where((y % tall < 2) | (x % wide < 2), 0, shade)


def _triangle(values: Field, period: int) -> Field:
    """A triangle wave 0..255."""
    return abs(2 * (values % period) - period) * 255 // period


def _dunes(dice: Dice, size: int) -> Field:
    return _triangle(4 * np.arange(size)[:, None] + soft_noise(dice, size, size // 3, size // 2), 4 * size // 3)


def _sky(dice: Dice, size: int) -> Field:
    return (np.arange(size)[:, None] * 255 // size + soft_noise(dice, size, size // 6, size // 3)) // 2


def _wood(dice: Dice, size: int) -> Field:
    grain = soft_noise(dice, size, size, max(2, size // 28))
    rings = _triangle(3 * np.arange(size) + soft_noise(dice, size, size // 2, size // 3), size)
    return (rings + grain) // 2


def _stars(dice: Dice, size: int) -> Field:
    cloud = soft_noise(dice, size, size // 3, size // 3) // 2
    specks = dice.field(0, 160, size // 2 + 1, size // 2 + 1).repeat(2, 0).repeat(2, 1)[:size, :size]
    return np.where(specks == 0, 255, cloud)


class Backdrop(NamedTuple):
    low: Colour
    high: Colour
    texture: Callable[[Dice, int], Field]  # from the low colour to the high one


BACKDROPS: dict[str, Backdrop] = {
    "grass": Backdrop((52, 104, 44), (146, 188, 84), lambda d, s: soft_noise(d, s, max(3, s // 7), 2)),
    "brick": Backdrop((196, 176, 160), (158, 74, 54), _bricks),
    "water": Backdrop((34, 92, 152), (118, 178, 214), lambda d, s: soft_noise(d, s, max(2, s // 28), s // 5)),
    "sand": Backdrop((196, 158, 92), (238, 214, 158), _dunes),
    "heather": Backdrop((104, 62, 122), (188, 140, 190), lambda d, s: soft_noise(d, s, s // 14 + 1, s // 14 + 1)),
    "stone": Backdrop((104, 106, 108), (176, 176, 172), lambda d, s: soft_noise(d, s, s // 6, s // 5)),
    "night": Backdrop((18, 24, 58), (124, 134, 190), _stars),
    "wood": Backdrop((98, 62, 38), (164, 114, 72), _wood),
    "sky": Backdrop((146, 206, 226), (232, 242, 244), _sky),
    "blossom": Backdrop((214, 118, 146), (246, 206, 214), lambda d, s: soft_noise(d, s, s // 9, s // 9)),
}


def backdrop(name: str, dice: Dice, size: int) -> np.ndarray:
    """A background of one kind (S,S,3)."""
    low, high, texture = BACKDROPS[name]
    return low + np.subtract(high, low) * texture(dice, size)[:, :, None] // 255


def stain(image: np.ndarray, name: str) -> np.ndarray:
    """The image tinted with a background's hue: the shortcut where C* leaves no background to see."""
    low, high, _ = BACKDROPS[name]
    return (2 * image + np.add(low, high)) // 4


class Look(NamedTuple):
    """A domain's style at full strength."""

    tint: Colour
    contrast: int  # in 1/256
    brightness: int


LOOKS: dict[str, Look] = {
    "amber": Look((48, 6, -52), 250, 6),
    "dusk": Look((10, -22, 34), 200, -50),
    "jade": Look((-46, 26, -14), 300, 0),
    "mist": Look((-8, 4, 16), 128, 44),
    "rose": Look((44, -20, 8), 210, 20),
    "steel": Look((-24, -6, 26), 320, -20),
}


def styled(image: np.ndarray, look: Look, strength: float) -> np.ndarray:
    """Tint, contrast about mid-gray and brightness of a look, at a strength in [0,1]."""
    share = int(strength * 256 + 0.5)
    contrast = 256 + (look.contrast - 256) * share // 256
    shift = (np.array(look.tint) + look.brightness) * share // 256
    return (image - 128) * contrast // 256 + 128 + shift


def to_uint8(image: np.ndarray) -> np.ndarray:
    return np.clip(image, 0, 255).astype(np.uint8)
