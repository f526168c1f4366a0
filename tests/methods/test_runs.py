"""Runs of methods with terms or a state of their own: interrupted and resumed, and with the terms that they log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PENALTY, AVERAGE, ANNEAL = {"penalty": 0.1}, {"ema": 0.5}, {"anneal": 0.6}  # ANNEAL: changes at step 3, the resumed one
INTERRUPTED: list[tuple[str, dict[str, float]]] = [
    ("dann", PENALTY), ("patchgen+cdann", PENALTY), ("arm", {}), ("sma", {"sma_start": 0.3}), ("gestur", {}),
    ("gmdg", {}), ("irm", ANNEAL), ("vrex", ANNEAL), ("groupdro", {}), ("patchgen+mdsdi", {}), ("mixup", {}),
    ("mldg", {}), ("fish", {}), ("patchgen+mtl", AVERAGE), ("patchgen+selfreg", {}), ("sagnet", {}),
    ("patchgen+mixstyle", {}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "hparams"), INTERRUPTED)
def test_an_interrupted_run_gives_the_same_numbers(
    method: str,
    hparams: dict[str, float],
    tiny_run: Callable[..., Any],
    interrupted: Callable[..., Any],
    same_run: Callable[..., bool],
) -> None:
    assert same_run(interrupted(method=method, hparams=hparams), tiny_run(method, hparams=hparams))


PATCHGEN = {"L_ms", "L_conf", "L_sim"}
GMDG = {"L_miro", "L_label", "L_shift", "L_domain"}
HIDDEN = {"task": "mdg_gcd"}
TRAINED: list[tuple[str, dict[str, Any], set[str]]] = [
    ("cdann", {}, {"L_dann"}), ("patchgen+dann", {}, {"L_dann"}),
    *[(f"{first}{name}", {}, {f"L_{name}"}) for name in ("coral", "mmd") for first in ("", "patchgen+")],
    ("patchgen+gmdg", {"precision": "bf16-mixed"}, GMDG), ("gmdg", HIDDEN, GMDG),
    ("lreg", HIDDEN, {"L_reg"}), ("patchgen+lreg", {}, {"L_reg"}),
    *[(f"{first}pim", HIDDEN, {"L_pim", "L_marginal"}) for first in ("", "patchgen+")],
    *[(f"{first}pim-lreg", HIDDEN, {"L_pseudo", "L_error"}) for first in ("", "patchgen+")],
    *[(f"{first}entropy", HIDDEN, {"L_marginal"}) for first in ("", "patchgen+")],
    *[(f"{first}rsc", {"dropout": 0.1}, set()) for first in ("", "patchgen+")],
    ("selfreg", {}, {"L_selfreg"}), ("patchgen+irm", {}, PATCHGEN | {"L_irm"}),
    ("patchgen+vrex", {}, PATCHGEN | {"L_vrex"}),
    *[(f"patchgen+{name}", {}, PATCHGEN) for name in ("groupdro", "fish", "mixup", "sma")],
]  # fmt: skip


@pytest.mark.parametrize(("method", "settings", "terms"), TRAINED)
def test_a_run_logs_its_terms(
    method: str, settings: dict[str, Any], terms: set[str], tiny_run: Callable[..., Any]
) -> None:
    values = tiny_run(method, steps=3, **settings).records("evaluation")[-1]["train"]
    assert {"main"} | terms <= values.keys()
    assert all(values[term] != 0 for term in terms - {"L_ms"})  # L_ms is 0 where no entry of the mask is weak
