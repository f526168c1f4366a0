"""What `patchgen theory` shows and writes: tables of measured values next to their bounds, and a figure over s."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patchgen.common.files import replacing, write_text
from patchgen.common.text import json_text, markdown
from patchgen.draw.plots import PALETTE, new_figure, plain

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


def tables(measured: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Title -> lines with a cell for each of `HEADER`, and the premises as a note."""
    parts = {"rows": measured["rows"], "broken": measured["broken"]}
    parts |= {"run": measured["run"]["rows"]} if measured["run"] else {}
    return {TITLES[name]: [[*_cells(row), row["note"]] for row in rows] for name, rows in parts.items()}


def _cells(row: Mapping[str, Any]) -> list[str]:
    """One line of a table; the broken assumption follows the case."""
    broken = row["premises"].removeprefix("broken: ") if row["premises"].startswith("broken") else ""
    sign = "<=" if row["sense"] == "at most" else ">="
    tightness = "" if row["tightness"] is None else f"{row['tightness']:.3f}"
    return [
        str(row["size"] or ""), row["result"], row["quantity"], f"{row['case']} [{broken}]" if broken else row["case"],
        f"{row['measured']:.4g}", f"{sign} {row['bound']:.4g}", row["status"], tightness,
    ]  # fmt: skip


def write_theory(measured: Mapping[str, Any], out: Path) -> None:
    """Write theory.json, theory.md, theory.png and theory.svg, each atomically."""
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "theory.json", json_text(measured) + "\n")
    write_text(out / "theory.md", _page(measured))
    picture = _figure(measured["rows"])
    for kind in ("png", "svg"):
        with replacing(out / f"theory.{kind}") as temporary:
            picture.savefig(temporary, format=kind, dpi=150)


def _page(measured: Mapping[str, Any]) -> str:
    lines = ["# The theory, measured", "", SCOPE, ""]
    for title, rows in tables(measured).items():
        body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        lines += [f"## {title}", "", markdown((*HEADER, "note"), body), ""]
    if measured["run"]:
        lines += ["- " + ", ".join(f"{key}: {value}" for key, value in measured["run"]["facts"].items()), ""]
    return "\n".join([*lines, "![Measured value and bound over s](theory.png)", ""])


def _figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Measured value and bound over s, one panel per result."""
    drawn = new_figure(10.5, 6)
    for axes, wanted in zip(drawn.subplots(2, 3).flat, PANELS, strict=True):
        mine = sorted((r for r in rows if (r["result"], r["quantity"], r["case"]) == wanted), key=lambda r: r["size"])
        s = [r["size"] for r in mine]
        least = bool(mine) and mine[0]["sense"] == "at least"
        bound = "lower bound" if least else "upper bound"
        axes.plot(s, [r["bound"] for r in mine], color=PALETTE[5], linestyle="--", marker="s", label=bound)
        axes.plot(s, [r["measured"] for r in mine], color=PALETTE[0], marker="o", label="measured")
        axes.set(xscale="log", xlabel="s, predictive patches of 36", xticks=s, xticklabels=list(map(str, s)))
        if wanted[1].startswith("risk"):  # orders of magnitude apart
            axes.set_yscale("log")
        elif mine:
            values = [r[key] for r in mine for key in ("measured", "bound")]
            axes.set_ylim(1.1 * min(0.0, *values), 1.1 * max(values))
        axes.minorticks_off()
        axes.set_title(f"{wanted[0]}: {wanted[1]}\n({wanted[2]})", fontsize=9)
        plain(axes)
        axes.legend(frameon=False, fontsize=8)
    return drawn
