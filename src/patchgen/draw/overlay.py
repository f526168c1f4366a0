"""The mask as a picture: the image, the map over it, and a colour bar."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageOps

from patchgen.common.text import did_you_mean
from patchgen.data.image_files import open_image
from patchgen.data.images import decode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST = 1024  # pixels of the longer side of the original in a picture
COLOURS = "viridis"  # perceptually uniform, and readable with colour blindness
OPACITY = 0.6  # of the colours over the image
NOTICE = "selection map, not an annotation"
MASK = "mask"
AFTERWARDS = "of the predicted class, computed afterwards: not a selection that the classifier made"
UNSELECTIVE = "no selection to read"
SELECTED = 0.5  # mask value from which a patch counts as selected


@dataclass(frozen=True, eq=False)
class Explanation:
    """The mask of an image with its likeliest classes."""

    path: Path | None  # None if the image was not a file
    image: np.ndarray  # (S, S, 3) uint8: what the model saw
    mask: np.ndarray  # (h, w) float32 in [0, 1]
    top: tuple[tuple[str, float], ...]  # (class, probability), likeliest first
    kind: str = MASK  # or a map of another kind, computed afterwards for a model without a mask

    @property
    def mask_statistics(self) -> dict[str, float]:
        return {"min": float(self.mask.min()), "mean": float(self.mask.mean()), "max": float(self.mask.max())}

    @property
    def reading(self) -> str:
        """The number of selected patches and the spread of the mask, in words."""
        return mask_reading(self.mask) if self.kind == MASK else f"{self.kind}: stretched to this image's range"

    @property
    def notice(self) -> str:
        """What the map is, for its reader."""
        return NOTICE if self.kind == MASK else f"{self.kind} {AFTERWARDS}"

    def overlay(
        self, threshold: float | None = None, *, relative: bool = False, colours: str = COLOURS,
        opacity: float = OPACITY,
    ) -> Image.Image:  # fmt: skip
        """A picture: the original image, the mask over it, and the colour bar.

        Args:
            threshold: Also outline where the mask exceeds this value in (0, 1).
            relative: Stretch the colours to the mask's own range; the picture then says so.
            colours: A colour map of matplotlib, such as `viridis`, `cividis` or `gray`.
            opacity: Of the colours over the image: 0 shows the image alone, 1 the map alone.
        """
        if threshold is not None and not 0 < threshold < 1:
            raise ValueError(f"threshold is a mask value between 0 and 1, not {threshold}")
        check_colours(colours, opacity)
        photo = original(self.path) if self.path else self.image
        mask = upsample(self.mask, *photo.shape[:2])
        low, high, label = _scale(self.mask, relative) if self.kind == MASK else (0.0, 1.0, f"{self.kind}, RELATIVE")
        figure, left, right = panels(photo, mask, (low, high), label, colours, opacity)
        m, outline = self.mask_statistics, ""
        if threshold is not None and m["min"] < threshold < m["max"]:
            outline = f", outline at {threshold:g}"
            for colour, line in (("black", 3.2), ("white", 1.4)):  # visible on bright and dark colours
                right.contour(mask, levels=[threshold], colors=colour, linewidths=line)
        elif threshold is not None:
            outline = f", none crosses {threshold:g}"
        (name, confidence), *_ = self.top
        # names are never interpreted as formulas
        figure.suptitle(f"{_short(name)}  {confidence:.1%}", fontsize=15, weight="bold", parse_math=False)
        left.set_title(_short(self.path.name if self.path else ""), fontsize=9, color="0.35", parse_math=False)
        numbers = f"{self.kind} min {m['min']:.2f}, mean {m['mean']:.2f}, max {m['max']:.2f}{outline}"
        right.set_title(numbers, fontsize=9, color="0.35")
        right.set_xlabel(f"{self.reading}\n{self.notice}", fontsize=8, color="0.35", style="italic")
        return as_picture(figure)


def check_colours(colours: str, opacity: float) -> None:
    """ValueError for an unknown colour map of matplotlib, or an opacity outside [0, 1]."""
    from matplotlib import colormaps

    if not 0 <= opacity <= 1:
        raise ValueError(f"opacity is a share from 0 to 1, not {opacity}")
    if colours not in colormaps:
        raise ValueError(f"matplotlib has no colour map {colours!r}{did_you_mean(colours, colormaps)}")


def mask_reading(mask: np.ndarray) -> str:
    """The number of selected patches of a mask (h, w), and a warning if all or none are selected."""
    selected, total = int((mask >= SELECTED).sum()), mask.size
    text, spread = f"{selected} of {total} patches selected", f"spread {float(mask.std()):.3f}"
    return f"{text}: {UNSELECTIVE} ({spread})" if selected in (0, total) else f"{text}, {spread}"


def original(path: Path) -> np.ndarray:
    """(H, W, 3) uint8 of a readable image: upright, its aspect kept, the longer side at most LONGEST."""
    with open_image(path) as image:
        image.draft(None, (LONGEST, LONGEST))
        width, height = ImageOps.exif_transpose(image).size
    longest = min(LONGEST, max(width, height))
    # `decode` handles transparency, 16 bits and limits, but makes squares: the aspect is restored here
    square = Image.fromarray(decode(path, longest))
    return np.array(square.resize(scaled(width, height, longest), Image.Resampling.BILINEAR))


def scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    scale = longest / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def upsample(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    """(h, w) -> (height, width), without interpolation: each patch keeps its single value."""
    return np.asarray(Image.fromarray(mask.astype(np.float32)).resize((width, height), Image.Resampling.NEAREST))


def panels(
    photo: np.ndarray, values: np.ndarray, bounds: tuple[float, float] = (0, 1), label: str = "",
    colours: str = COLOURS, opacity: float = OPACITY,
) -> "tuple[Figure, Axes, Axes]":  # fmt: skip
    """[photo | values over it in grey] with a colour bar; both arrays are (height, width, ...)."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shape = min(max(photo.shape[0] / photo.shape[1], 0.4), 2.5)  # limits the aspect of very long images
    layout = ConstrainedLayoutEngine(h_pad=0.09)  # inches between title and edge
    figure = Figure(figsize=(9.4, 4.1 * shape + 0.95), dpi=110, facecolor="white", layout=layout)
    left, right = figure.subplots(1, 2)
    left.imshow(photo)
    right.imshow(np.asarray(Image.fromarray(photo).convert("L")), cmap="gray", vmin=0, vmax=255)
    painted = right.imshow(values, cmap=colours, vmin=bounds[0], vmax=bounds[1], alpha=opacity, interpolation="nearest")
    beside = right.inset_axes((1.03, 0, 0.045, 1))  # as high as the panel, whatever its shape
    bar = figure.colorbar(painted, cax=beside)
    beside.set_facecolor("0.55")  # gray behind the semi-transparent colours, as on the image
    ticks = np.linspace(*bounds, 5)
    digits = 2 if ticks[-1] - ticks[0] > 0.05 else 4
    bar.set_ticks(ticks.tolist(), labels=[f"{tick:.{digits}f}" for tick in ticks])
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_label(label, fontsize=8.5)
    for axes in (left, right):
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    return figure, left, right


def as_picture(figure: "Figure") -> Image.Image:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _scale(mask: np.ndarray, relative: bool) -> tuple[float, float, str]:
    """Range of the colour scale, and its label."""
    low, high = float(mask.min()), float(mask.max())
    if relative and high - low > 1e-4:
        return low, high, "mask, RELATIVE: stretched to this image's range"
    # a constant mask is never stretched: rounding errors would look like structure
    return 0.0, 1.0, "mask: 0 left out, 1 selected" + (" (constant: not stretched)" if relative else "")


def _short(text: str, most: int = 44) -> str:
    """The end of a text distinguishes long names."""
    printable = text.encode("utf-8", "backslashreplace").decode()
    return printable if len(printable) <= most else "…" + printable[1 - most :]
