"""Every figure of a diagnosis: the picture for a page or for print, and the numbers it shows (`draw/plots.py`)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.diagnose.faithfulness import OPERATORS, shares
from patchgen.draw.overlay import COLOURS as MAP_COLOURS
from patchgen.draw.overlay import OPACITY, upsample
from patchgen.draw.plots import MARKERS, PALETTE, Drawn, Row, new_figure, plain, side_legend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTICE = "selection maps: patches read more than others; not annotations, not a diagnosis"
STYLES: dict[str, tuple[str, str, str]] = {  # colour, dash, marker
    "truth": ("#000000", "-", "*"),
    "mask": ("#0072b2", "-", "o"),
    "attention": ("#e69f00", "-", "s"),
    "rollout": ("#d55e00", "--", "D"),
    "grad-cam": ("#009e73", "-", "^"),
    "gradient-x-input": ("#cc79a7", "--", "v"),
    "random": ("#777777", ":", "x"),
    "centre": ("#56b4e9", ":", "P"),
}


def perturbation(run: str, summary: Mapping[str, Any], name: str) -> Drawn:
    """A: accuracy with the selection kept (filled) and perturbed (hollow), a panel per operator, a line per ranking."""
    operators = summary["perturbation"]
    rankings = list(next(iter(operators.values()))["rankings"])
    figure = new_figure(2.15 * len(operators) + 1.3, 0.3 * len(rankings) + 2.0)
    panels = figure.subplots(1, len(operators), sharey=True, squeeze=False)[0]
    places = np.arange(len(rankings))[::-1]
    rows: list[Row] = []
    for axes, (operator, values) in zip(panels, operators.items(), strict=True):
        for place, ranking in zip(places, rankings, strict=True):
            colour = STYLES[ranking][0]
            for side, face, shift in (("keep", colour, 0.14), ("perturb", "white", -0.14)):  # equal values stay apart
                value = values["rankings"][ranking][side]["accuracy"]
                axes.errorbar(100 * value["mean"], place + shift, xerr=100 * value["error"], color=colour, marker="o",
                              markerfacecolor=face, markersize=6, elinewidth=0.8)  # fmt: skip
                rows.append((run, operator, ranking, side, value["mean"], value["error"]))
        for end, dash in (("nothing", "--"), ("everything", ":")):
            value = values[end]["accuracy"]
            axes.axvline(100 * value["mean"], color="0.45", linestyle=dash, linewidth=0.9, zorder=0)
            rows.append((run, operator, "", f"{end} perturbed", value["mean"], value["error"]))
        level = "pixels" if operator in OPERATORS else "tokens"
        axes.set(xlim=(-3, 103), xlabel="accuracy (%)")
        axes.set_title(f"{operator} ({level})", fontsize=10)
        plain(axes)
    panels[0].set(yticks=places, yticklabels=rankings, ylim=(-0.6, len(rankings) - 0.4))
    figure.suptitle(run, fontsize=11, weight="bold", parse_math=False)
    dot: dict[str, Any] = {"color": "0.3", "marker": "o", "linestyle": "", "markersize": 6}
    line: dict[str, Any] = {"color": "0.45"}
    handles = [  # lines without points, for the legend alone
        *panels[0].plot([], [], **dot, label="selection kept"),
        *panels[0].plot([], [], **dot, markerfacecolor="white", label="selection perturbed"),
        *panels[0].plot([], [], **line, linestyle="--", label="nothing perturbed"),
        *panels[0].plot([], [], **line, linestyle=":", label="everything"),
    ]
    columns = 4 if len(operators) > 2 else 2
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    text = f"Accuracy of {run} when the selected patches are kept, and when they are perturbed"
    return Drawn(name, text, figure, ("run", "operator", "ranking", "side", "accuracy", "standard_error"), rows)


def curves(runs: Mapping[str, Any], operator: str) -> Drawn:
    """B: probability of the predicted class while patches are inserted and deleted, one line of panels a run."""
    figure = new_figure(9.2, 2.9 * len(runs) + 0.5)
    panels = figure.subplots(len(runs), 2, sharex=True, sharey=True, squeeze=False)
    rows: list[Row] = []
    ways = (("insertion", "higher", "shown"), ("deletion", "lower", "perturbed"))
    for line, (run, summary) in zip(panels, runs.items(), strict=True):
        for axes, (way, better, patches) in zip(line, ways, strict=True):
            for ranking, values in summary["curves"].items():
                colour, dash, marker = STYLES[ranking]
                curve = values[way]["predicted"]
                share = shares(summary["patches"], len(curve) - 1)
                area = values[f"{way}_auc"]["predicted"]["mean"]
                axes.plot(100 * share, curve, color=colour, linestyle=dash, marker=marker, markersize=4,
                          label=f"{ranking}  {area:.3f}")  # fmt: skip
                points = zip(share, curve, values[way]["true"], strict=True)
                rows += [(run, way, ranking, *point) for point in points]
            axes.set_title(f"{run}: {way} ({better} is better)", fontsize=10, parse_math=False)
            axes.set(xlabel=f"patches {patches} (%)", ylim=(-0.02, 1.02))
            side_legend(axes, fontsize=7.5, title="area", title_fontsize=8)
            plain(axes)
        line[0].set_ylabel("p(predicted class)")
    text = f"Insertion and deletion curves ({operator}) of each run and ranking"
    header = ("run", "way", "ranking", "share_of_patches", "p_predicted", "p_true")
    return Drawn("curves", text, figure, header, rows)


def geometry(points: Mapping[str, np.ndarray], label: np.ndarray, domain: np.ndarray, unseen: str, way: str) -> Drawn:
    """C: each run's features twice, coloured by class and by domain."""
    figure = new_figure(9.2, 3.4 * len(points) + 0.2)
    panels = figure.subplots(len(points), 2, squeeze=False)
    rows: list[Row] = []
    seen = sorted(set(domain.tolist()) - {unseen})
    for line, (run, flat) in zip(panels, points.items(), strict=True):
        _scatter(line[0], flat, label, {name: name for name in sorted(set(label.tolist()))})
        _scatter(line[1], flat, domain, {name: name for name in seen} | {unseen: f"{unseen} (unseen)"})
        for axes, what in zip(line, ("class", "domain"), strict=True):
            axes.set_title(f"{run}: {way} of the features by {what}", fontsize=10, parse_math=False)
        rows += [(run, x, y, c, d) for (x, y), c, d in zip(flat.tolist(), label, domain, strict=True)]
    text = f"{way} of the features of each run, by class and by domain"
    return Drawn("geometry", text, figure, ("run", "x", "y", "class", "domain"), rows)


def _scatter(axes: "Axes", points: np.ndarray, group: np.ndarray, titles: Mapping[str, str]) -> None:
    for i, (name, title) in enumerate(titles.items()):
        marker = MARKERS[(i + i // len(PALETTE)) % len(MARKERS)]  # a second round of colours gets other markers
        x, y = points[group == name].T
        axes.scatter(x, y, s=13, color=PALETTE[i % len(PALETTE)], marker=marker, linewidths=0,
                     alpha=0.8, label=title)  # fmt: skip
    axes.set(xticks=[], yticks=[])
    if len(titles) <= 24:
        side_legend(axes, fontsize=8, ncols=1 if len(titles) <= 12 else 2)


def overlays(images: np.ndarray, titles: Sequence[str], maps: Sequence[Mapping[str, np.ndarray]]) -> Drawn:
    """D: images (N,S,S,3) down, maps across ("run: ranking" -> (h,w), absolute for masks), one colour bar for all."""
    columns = list(dict.fromkeys(name for each in maps for name in each))
    figure = new_figure(1.45 * (len(columns) + 1) + 1.1, 1.62 * len(images) + 0.9)
    panels = figure.subplots(len(images), len(columns) + 1, squeeze=False)
    rows: list[Row] = []
    drawn = None
    for line, image, title, of_image in zip(panels, images, titles, maps, strict=True):
        line[0].imshow(image)
        line[0].set_ylabel(title, fontsize=7.5, parse_math=False)
        for axes, column in zip(line[1:], columns, strict=True):
            axes.imshow(image.mean(2), cmap="gray", vmin=0, vmax=1)
            if column in of_image:
                values = of_image[column].astype(np.float32)
                absolute = column.rpartition(" ")[2] in ("mask", "truth")  # others are scaled within the image
                low, span = (0.0, 1.0) if absolute else (values.min(), np.ptp(values) or 1.0)
                large = upsample((values - low) / span, *image.shape[:2])
                drawn = axes.imshow(large, cmap=MAP_COLOURS, vmin=0, vmax=1, alpha=OPACITY)
                rows += [(title, column, y, x, float(v)) for (y, x), v in np.ndenumerate(of_image[column])]
    for axes, column in zip(panels[0], ["image", *columns], strict=True):
        axes.set_title(column.replace(": ", "\n"), fontsize=8, parse_math=False)
    for axes in panels.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    if drawn is not None:
        bar = figure.colorbar(drawn, ax=panels[:, -1], shrink=0.75 if len(images) > 1 else 1.0, pad=0.02)
        bar.ax.set_facecolor("0.55")  # the bar's colours lie on gray as they do on the images
        bar.ax.tick_params(labelsize=7.5)
        scale = "mask and truth: 0 left out, 1 selected\nother maps: lowest to highest in the image"
        bar.set_label(scale, fontsize=7.5)
    figure.supxlabel(NOTICE, fontsize=9, color="0.35", style="italic")
    header = ("image", "map", "row", "column", "value")
    return Drawn("overlays", "Images of the unseen domain with the maps of each run", figure, header, rows)


def costs(cost: Mapping[str, Any]) -> Drawn:
    """E: trained parameters, arithmetic and peak memory of LP+LN and of the method with a mask."""
    kinds = {
        "trainable_parameters": ("trained parameters (thousands)", 1e3),
        "gflops_per_image": ("GFLOPs of a step, per image", 1.0),
        "peak_bytes": ("peak memory of a step (MB)", 1e6),
    }
    figure = new_figure(9.2, 1.75)
    rows: list[Row] = []
    for axes, (key, (title, unit)) in zip(figure.subplots(1, 3, sharey=True), kinds.items(), strict=True):
        values = [method[key] / unit for method in cost["methods"].values()]
        bars = axes.barh(list(cost["methods"]), values, color=("#999999", "#0072b2"), height=0.6)
        axes.bar_label(bars, fmt="%.4g", padding=3, fontsize=8.5)
        axes.set(xlim=(0, 1.3 * max(values)), ylim=(1.5, -0.5))
        axes.set_title(title, fontsize=10)
        plain(axes)
        rows += [(name, key, method[key]) for name, method in cost["methods"].items()]
    return Drawn("cost", "Cost of a training step with and without the mask", figure, ("method", "what", "value"), rows)
