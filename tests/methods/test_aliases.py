"""Names that people know a method by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from patchgen.config import Config
from patchgen.methods import ALIASES, METHODS, make_method, method_class


def test_an_alias_is_another_name_and_not_another_method() -> None:
    assert method_class("erm") is METHODS["lp-ln"]
    assert set(ALIASES.values()) <= set(METHODS) and not set(ALIASES) & set(METHODS)
    assert [base.__name__ for base in method_class("erm+irm").__bases__] == ["Irm", "Erm"]


def test_a_run_keeps_the_name_that_was_written(tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("erm", steps=1)
    assert run.config.method == "erm" and run.path != tiny_run("lp-ln", steps=1).path
    assert (run.path / "summary.md").read_text().startswith("# erm with studio unseen")


def test_a_misspelt_alias_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="unknown method 'erm2'; did you mean 'erm'"):
        make_method(Config(data="photos", unseen="site_c", method="erm2"))
