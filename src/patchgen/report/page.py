"""One self-contained HTML page about a few runs on the same fold: scores, curves, and images with their masks.

Everything is inside the file: no script, no font, no image is fetched from anywhere.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from patchgen.runs.folder import RunFolder
from patchgen.runs.scores import chosen_evaluation, score_record
from patchgen.runs.selection import RULES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe-Ito: apart for every eye
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  --ink: #1c2024; --paper: #fff; --soft: #4b5560; --line: #dde1e6; --pale: #6b7280; --box: #f2f4f6;
  --right: #00714f; --wrong: #b3400a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --paper: #16191c; --soft: #a9b2bb; --line: #363c42;
  --pale: #939ca6; --box: #23282d; --right: #4cc79b; --wrong: #ff9a66; } }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin-top: 2.4rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .35rem .7rem; text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid; font-weight: 600; }
tbody td { border-bottom: 1px solid var(--line); } .best { font-weight: 700; }
.lead, .note { color: var(--soft); } .note { font-size: .88rem; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)); gap: 1.2rem; }
figure { margin: 0; overflow-wrap: anywhere; } figure img { width: 100%; border-radius: 4px; }
figcaption { font-size: .85rem; } summary { cursor: pointer; }
.right { color: var(--right); } .wrong { color: var(--wrong); } .paper, .paper td { color: var(--pale); }
.wide { overflow-x: auto; } .numbers td + td { white-space: nowrap; }
code, pre { font: .88rem ui-monospace, monospace; background: var(--box); border-radius: 4px; }
code { padding: .1rem .3rem; } pre { padding: .8rem 1rem; overflow-x: auto; }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 4px; }
"""


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """A page from (heading, HTML) sections."""
    body = "".join(f"<section><h2>{escape(head)}</h2>{html}</section>" for head, html in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f'<body><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{body}</body></html>\n'
    )


def scores(runs: Mapping[str, RunFolder]) -> list[dict[str, Any]]:
    """What the tables show, a row a run: in shares of one, None where a run has no such number."""
    rows = []
    for label, run in runs.items():
        test = score_record(run)
        chosen = chosen_evaluation(run)
        mask = test.get("mask", {})
        rows.append(
            {
                "method": label,
                "unseen": test["all"]["accuracy"],
                "sources": RULES["source-validation"](chosen, "accuracy"),
                **{name: mask.get(name) for name in ("mean", "spread", "auroc", "iou", "error", "kept")},
                "true_mask": test.get("true_mask", {}).get("accuracy"),
                "random_mask": test.get("random_mask", {}).get("accuracy"),
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], best: str | None = None) -> str:
    """An HTML table; numbers as per cent where the heading says %, the best of one column in bold."""
    top = max((row[best] for row in rows if row[best] is not None), default=None) if best else None
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in columns.values())
    body = ""
    for row in rows:
        body += "<tr>"
        for key, text in columns.items():
            value = row[key]
            mark = ' class="best"' if best == key and value == top else ""
            body += f"<td{mark}>{escape(show(value, '%' in text))}</td>"
        body += "</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def show(value: Any, percent: bool) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{100 * value:.1f}" if percent else f"{value:.2f}"


def curves(runs: Mapping[str, RunFolder]) -> str:
    """Training and validation loss over the steps, and the mask's AUROC where the truth is known: one SVG."""
    from matplotlib.figure import Figure

    with_truth = any("auroc" in r.get("mask", {}) for run in runs.values() for r in run.records("evaluation"))
    figure = Figure(figsize=(10.5 if with_truth else 7.5, 3), layout="constrained")
    panels = figure.subplots(1, 3 if with_truth else 2)
    for (label, run), colour in zip(runs.items(), COLOURS, strict=False):
        records = run.records("evaluation")
        steps = [r["step"] for r in records]
        panels[0].plot(steps, [r["train"]["main"] for r in records], color=colour, label=label)
        validation = [np.mean([d["loss"] for d in r["validation"].values()]) for r in records]
        panels[1].plot(steps, validation, color=colour)
        found = [(r["step"], r["mask"]["auroc"]) for r in records if "auroc" in r.get("mask", {})]
        if found:
            panels[2].plot(*zip(*found, strict=True), color=colour)
    for panel, name in zip(panels, ("training loss (cross-entropy)", "loss on source validation", ""), strict=False):
        panel.set(title=name, xlabel="step")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    if with_truth:
        panels[2].set(title="mask AUROC (sources)", ylim=(0, 1))
        panels[2].axhline(0.5, color="#9aa3ad", linewidth=0.8, linestyle=":")
    return svg(figure, "Loss curves of the runs over the training steps")


def bars(rows: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy on the sources and on the unseen domain, method by method: one SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 0.55 * len(rows) + 1.1), layout="constrained")
    axes = figure.subplots()
    place = np.arange(len(rows))[::-1]
    for shift, key, colour, label in (
        (0.2, "sources", "#c3cad1", "sources, held out"),
        (-0.2, "unseen", "#0072b2", "unseen domain"),
    ):
        values = [100 * row[key] for row in rows]
        drawn = axes.barh(place + shift, values, height=0.36, color=colour, label=label)
        axes.bar_label(drawn, fmt="%.1f", padding=3, fontsize=9)
    axes.set(yticks=place, yticklabels=[row["method"] for row in rows], xlim=(0, 112), xlabel="accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    return svg(figure, "Accuracy on held-out source images and on the unseen domain for each method")


def triptych(image: np.ndarray, truth: np.ndarray | None, mask: np.ndarray | None, scale: int = 2) -> str:
    """[image | truth | mask] side by side as a PNG inside a data address; masks on a fixed scale of 0 to 1."""
    from matplotlib import colormaps
    from PIL import Image

    height, width = image.shape[:2]
    gap = np.full((height, 4, 3), 255, dtype=np.uint8)
    parts = [image]
    for grid in (truth, mask):
        if grid is not None:
            colours = (colormaps["viridis"](grid.astype(float))[..., :3] * 255).astype(np.uint8)  # (h, w, 3)
            large = np.asarray(Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST))
            grey = image.mean(2, keepdims=True)
            parts += [gap, (0.65 * large + 0.35 * grey).astype(np.uint8)]
    joined = Image.fromarray(np.concatenate(parts, axis=1))
    joined = joined.resize((joined.width * scale, joined.height * scale), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    joined.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def gallery(figures: Sequence[tuple[str, str, str]]) -> str:
    """(data address, alternative text, caption as HTML) -> a grid of figures."""
    cells = (
        f'<figure><img src="{src}" alt="{escape(alt)}"><figcaption>{text}</figcaption></figure>'
        for src, alt, text in figures
    )
    return f'<div class="gallery">{"".join(cells)}</div>'


def svg(figure: Figure, description: str) -> str:
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": description}):  # the same figure gives the same bytes
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return f'<div role="img" aria-label="{escape(description)}">{text[text.index("<svg") :]}</div>'


def write_page(path: Path, html: str) -> Path:
    from patchgen.common.files import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    return path
