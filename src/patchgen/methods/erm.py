"""Empirical risk minimisation: cross-entropy only. The matched baselines differ only in what is tuned."""

from __future__ import annotations

from patchgen.methods.method import Method


class LinearProbe(Method):
    tune = "head"
    summary = "linear head on a frozen backbone (LP)"


class Erm(Method):
    summary = "linear head and LayerNorm tuning (LP+LN)"
    reference = "Vapnik 1998"


class Full(Method):
    tune = "full"
    summary = "linear head and full fine-tuning"


class AllLabels(Method):
    labels = "all"
    compared = False
    summary = "LP+LN with the labels that a task hides: an upper bound for mdg_gcd, not a result"
