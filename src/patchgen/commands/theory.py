"""patchgen theory [--run RUN] [--out DIR]: the paper's inequalities where their premises hold, and on a run."""

from __future__ import annotations

import json as to_json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patchgen.commands import announce, check_folder, print_table
from patchgen.common.files import replacing, write_text

HEADER = ("s", "result", "quantity", "case", "measured", "bound", "verdict", "tightness")
TITLES = {
    "rows": "Premises hold by construction (oracle-local, patch-local encoder)",
    "broken": "One assumption broken in each row: a violation is expected",
    "run": "A trained run: premises only approximate",
}
SCOPE = (
    "These results speak of an oracle subset C* and of masks near it. None bounds the learned selector, and none says "
    "that training finds C*. Vacuous: the bound is true but trivial."
)
PANELS = (  # result, quantity, case
    ("Prop. 3.1", "Rademacher complexity", "C*"),
    ("Prop. 3.1", "Rademacher complexity", "all"),
    ("Cor. C.1", "true minus empirical risk", "C*"),
    ("Lemma C.2", "risk, learned minus oracle mask", "noisy"),
    ("Prop. 3.2", "risk between two domains", "noisy"),
    ("Prop. 3.3", "distance between classes", "noisy, G = pooled"),
)
MEASURED, PROMISED = "#0072b2", "#d55e00"  # Okabe-Ito; marker and line differ too


def theory(
    run: str | None = None,
    sizes: tuple[int, ...] = (1, 4, 12, 36),
    images: int = 400,
    seed: int = 1,
    json: bool = False,
    out: str | None = None,
) -> None:
    """Measure every inequality of the paper's theory on images whose predictive patches are known.

    Args:
        run: A PatchGen run on data with true masks: the same rows there, where premises are only approximate.
        sizes: Numbers s of predictive patches, of 36.
        images: Images for fitting, and as many again for measuring, at each size.
        seed: Seed of images, masks and random signs.
        json: Print JSON instead of tables.
        out: Folder for theory.json, theory.md and the figure (PNG and SVG).
    """
    announce()
    if out is not None:
        check_folder(out)
    measured = _measure(run, sizes, images, seed)
    if out is not None:
        _write(measured, Path(out))
    if json:
        print(to_json.dumps(measured, indent=2))
        return
    for name, rows in _tables(measured).items():
        print(f"\n{TITLES[name]}")
        print_table(HEADER, [_cells(row) for row in rows])
    print(f"\n{SCOPE}")
    if out is not None:
        print(out)


def _measure(run: str | None, sizes: Sequence[int], images: int, seed: int) -> dict[str, Any]:
    """The content of theory.json; `run` is None if none was requested."""
    from patchgen.common.progress import Progress
    from patchgen.theory.measure import check_arguments, measure_oracle, measure_run

    trained = None
    total = check_arguments(sizes, images, seed)
    if run:  # first, so that a wrong folder fails early
        with Progress("theory, run", 2 * images) as bar:
            trained = measure_run(run, images, bar.advance)
    with Progress("theory", total) as bar:
        measured = measure_oracle(sizes, images, seed, bar.advance)
        bar.say("measured")
    settings = {"sizes": list(sizes), "images": images, "seed": seed}
    return {"settings": settings, "scope": SCOPE, **measured, "run": trained}


def _tables(measured: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Title key -> rows."""
    parts = {"rows": measured["rows"], "broken": measured["broken"]}
    return parts | ({"run": measured["run"]["rows"]} if measured["run"] else {})


def _cells(row: Mapping[str, Any]) -> list[str]:
    """One line of a table; the broken assumption follows the case."""
    broken = row["premises"].removeprefix("broken: ") if row["premises"].startswith("broken") else ""
    sign = "<=" if row["sense"] == "at most" else ">="
    tightness = "" if row["tightness"] is None else f"{row['tightness']:.3f}"
    return [
        str(row["size"] or ""), row["result"], row["quantity"], f"{row['case']} [{broken}]" if broken else row["case"],
        f"{row['measured']:.4g}", f"{sign} {row['bound']:.4g}", row["status"], tightness,
    ]  # fmt: skip


def _write(measured: Mapping[str, Any], out: Path) -> None:
    """Write theory.json, theory.md, theory.png and theory.svg, each atomically."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "theory.json", to_json.dumps(measured, indent=2) + "\n")
    write_text(out / "theory.md", _page(measured))
    picture = _figure(measured["rows"])
    for kind in ("png", "svg"):
        with replacing(out / f"theory.{kind}") as temporary:
            picture.savefig(temporary, format=kind, dpi=150)


def _page(measured: Mapping[str, Any]) -> str:
    """The tables as Markdown, with the premises of each row."""
    from patchgen.common.text import markdown

    lines = ["# The theory, measured", "", SCOPE, ""]
    for name, rows in _tables(measured).items():
        body = [[cell.replace("|", "\\|") for cell in (*_cells(row), row["note"])] for row in rows]
        lines += [f"## {TITLES[name]}", "", markdown((*HEADER, "note"), body), ""]
    if measured["run"]:
        lines += ["- " + ", ".join(f"{key}: {value}" for key, value in measured["run"]["facts"].items()), ""]
    lines += ["![Measured value and bound over s](theory.png)", ""]
    return "\n".join(lines)


def _figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Measured value and bound over s, one panel per result."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10.5, 6), layout="constrained")
    for axes, wanted in zip(drawn.subplots(2, 3).flat, PANELS, strict=True):
        mine = sorted((r for r in rows if (r["result"], r["quantity"], r["case"]) == wanted), key=lambda r: r["size"])
        s = [r["size"] for r in mine]
        least = bool(mine) and mine[0]["sense"] == "at least"
        bound = "lower bound" if least else "upper bound"
        axes.plot(s, [r["bound"] for r in mine], color=PROMISED, linestyle="--", marker="s", label=bound)
        axes.plot(s, [r["measured"] for r in mine], color=MEASURED, marker="o", label="measured")
        axes.set(xscale="log", xlabel="s, predictive patches of 36", xticks=s, xticklabels=list(map(str, s)))
        if wanted[1].startswith("risk"):  # orders of magnitude apart
            axes.set_yscale("log")
        elif mine:
            values = [r[key] for r in mine for key in ("measured", "bound")]
            axes.set_ylim(1.1 * min(0.0, *values), 1.1 * max(values))
        axes.minorticks_off()
        axes.set_title(f"{wanted[0]}: {wanted[1]}\n({wanted[2]})", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return drawn


COMMAND = theory
