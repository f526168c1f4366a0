"""Every subject of `patchgen bench all` in order, and one table: what was measured, what was wanted, reached or missed.

    found = measure_all(report=print)
    for row in table(found): print(row.subject, row.what, row.value, row.target, row.verdict)

Values are ratios and exponents within one run, which mean the same on every machine; only the start and compiling are
in seconds, and what the modes gain is this machine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from patchgen.diagnose import (
    cost,
    cost_fold,
    cost_grouping,
    cost_growth,
    cost_input,
    cost_modes,
    cost_probe,
    cost_rate,
    cost_start,
)

Found = Mapping[str, Any]
SUBJECTS: dict[str, Callable[..., dict[str, Any]]] = {
    "rate": cost_rate.measure_rates,
    "modes": cost_modes.measure_modes,
    "memory": cost.measure_memory,
    "input": cost_input.measure_input,
    "fold": cost_fold.measure_folds,
    "probe": cost_probe.measure_probe,
    "grouping": cost_grouping.measure_grouping,
    "growth": cost_growth.measure_growth,
    "start": cost_start.measure_start,
}
SMALL: dict[str, dict[str, Any]] = {
    "rate": {"sources": ("tiny",), "image_size": 56, "batch": 2, "repeats": 1},
    "modes": {"source": "tiny", "image_size": 28, "batch": 2, "repeats": 1, "backend": "aot_eager"},
    "memory": {"dim": 64, "patches": (64, 256)},
    "input": {"images": 8, "pixels": 64, "size": 56, "repeats": 1},
    "fold": {"policies": {"tiny": cost_fold.Policy(0.1, 10)}, "source": "tiny", "image_size": 28, "pixels": 32},
    "probe": {"source": "tiny", "image_size": 28, "images": 8},
    "grouping": {"points": 300, "dim": 16, "classes": 5, "repeats": 1},
    "growth": {"repeats": 1},
    "start": {"repeats": 1},
}


class Row(NamedTuple):
    """A line of the table; `reached` is None where nothing was promised."""

    subject: str
    what: str
    value: str
    target: str = ""
    reached: bool | None = None

    @property
    def verdict(self) -> str:
        return "" if self.reached is None else "reached" if self.reached else "missed"


def measure_all(
    subjects: Sequence[str] = tuple(SUBJECTS), *, small: bool = False, report: Callable[[str], None] = lambda _: None
) -> dict[str, dict[str, Any]]:
    """What each subject found, by name; `report` gets one line per piece of work."""
    found = {}
    for name in subjects:
        settings = SMALL[name] if small else {}
        found[name] = SUBJECTS[name](**settings, report=lambda line, name=name: report(f"{name}: {line}"))
    return found


def table(found: Mapping[str, Found]) -> list[Row]:
    """The rows of all subjects that were measured."""
    return [Row(name, *line) for name, each in found.items() for line in LINES[name](each)]


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table for the docs."""
    lines = ["| subject | measured | value | target | |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join((*row[:4], row.verdict))} |" for row in rows)]) + "\n"


Line = tuple[str, str] | tuple[str, str, str, bool]


def _rate(found: Found) -> list[Line]:
    lines: list[Line] = []
    for source, methods in found["backbones"].items():
        where = f"{source}, {found['image_size']} px"
        for name, each in methods.items():
            share, step = f"{each['share']:.2f}", f"{each['step']:.3f} (floor {each['floor']:.3f})"
            what = f"{where}: {name}, share of the matmul rate"
            wanted = found["share_target"]
            lines.append((what, share, f">= {wanted}", each["share"] >= wanted) if name == "lp-ln" else (what, share))
            what, most = f"{where}: {name}, step / LP+LN's", found["step_target"]
            lines.append((what, step, f"<= {most}", each["step"] <= most) if name == "patchgen" else (what, step))
    return lines


def _modes(found: Found) -> list[Line]:
    lines: list[Line] = []
    for name, each in found["modes"].items():
        if name == cost_modes.PLAIN:
            continue
        value = f"{each['faster']:.2f} ({each['lowest']:.2f}-{each['highest']:.2f})"
        if each["fell_back"]:
            value += ", not compiled"
        elif each["compile_seconds"] is not None:
            value += f", after {each['compile_seconds']:.0f} s of compiling"
        what = f"{found['backbone']}, {found['image_size']} px, {found['device']}: LP+LN step, {name}"
        lines.append((f"{what}: times as fast as {cost_modes.PLAIN}", value))
    return lines


def _memory(found: Found) -> list[Line]:
    sizes: list[Line] = [
        (f"module at P = {row['patches']:,}: bytes / explicit P x P", f"{row['patchgen'] / row['explicit']:.3f}")
        for row in found["bytes"][:-1]
    ]
    largest, wanted = found["of_explicit_at_largest"], found["target"]
    last = f"module at P = {found['bytes'][-1]['patches']:,}: bytes / explicit P x P"
    growth = found["exponent"]
    return [
        *sizes,
        (last, f"{largest:.3f}", f"<= {wanted}", largest <= wanted),
        ("peak bytes over P: exponent (explicit)", f"{growth['patchgen']:.2f} ({growth['explicit']:.2f})"),
    ]


def _input(found: Found) -> list[Line]:
    ratio, where = found["ratio"], f"{found['pixels']} px files"
    return [
        (f"{where}, cold: images/s / plain pipeline's", f"{ratio['cold']:.2f}"),
        (f"{where}, cached: images/s / plain pipeline's", f"{ratio['cached']:.2f}",
         f">= {found['target']:g}", found["reached"]),
    ]  # fmt: skip


def _fold(found: Found) -> list[Line]:
    lines: list[Line] = []
    for name, each in found["policies"].items():
        ours, plain = each["counts"]["ours"], each["counts"]["plain"]
        what = (
            f"evaluated as often as {name}: plain loop / ours ({plain['trained']:,} images trained on, "
            f"{plain['scored']:,} / {ours['scored']:,} scored)"
        )
        value = f"{each['ratio']:.2f} (arithmetic alone {each['arithmetic']:.2f})"
        lines.append((what, value, f">= {found['target']:g}", each["reached"]))
    return lines


def _probe(found: Found) -> list[Line]:
    ratio = found["ratio"]
    return [
        (f"LP, no augmentation, {found['passes']} passes: without / with kept features", f"{ratio['run']:.0f}",
         f">= {found['target']:g}", found["reached"]),
        ("a step that finds its features", f"{ratio['step']:.0f}"),
    ]  # fmt: skip


def _grouping(found: Found) -> list[Line]:
    names = {"kmeans": "k-means pass / by broadcasting", "mixture": "mixture / scikit-learn's",
             "hungarian": "Hungarian match / counted sample by sample"}  # fmt: skip
    return [(f"{what}: times faster", f"{found[name]['ratio']:.1f}") for name, what in names.items()]


def _growth(found: Found) -> list[Line]:
    return [(f"{row['cost']} over {row['over']}: exponent", f"{row['exponent']:.2f}") for row in found["rows"]]


def _start(found: Found) -> list[Line]:
    return [
        (f"`{name}`", f"{found['seconds'][name]:.2f} s", f"< {target} s", found["reached"][name])
        for name, target in found["target"].items()
    ]


LINES: dict[str, Callable[[Found], list[Line]]] = {
    "rate": _rate, "modes": _modes, "memory": _memory, "input": _input, "fold": _fold, "probe": _probe,
    "grouping": _grouping, "growth": _growth, "start": _start,
}  # fmt: skip
