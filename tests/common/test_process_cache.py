"""What runs of one process share: made once for a key, never outside of `process_cache`."""

from __future__ import annotations

from patchgen.common.reading import cached, is_caching, process_cache


def test_a_value_is_made_once_for_its_key_and_only_the_last_is_kept() -> None:
    made: list[int] = []

    def value(key: int) -> int:
        return cached("kind", key, lambda: made.append(key) or 10 * key)  # type: ignore[func-returns-value]

    with process_cache():
        assert [value(1), value(1), value(2), value(1)] == [10, 10, 20, 10]
    assert made == [1, 2, 1]


def test_nothing_is_kept_outside_and_inner_blocks_share_the_outer_one() -> None:
    made: list[str] = []

    def value() -> None:
        cached("kind", 0, lambda: made.append("made"))

    value()
    value()
    assert len(made) == 2 and not is_caching()
    with process_cache():
        with process_cache():
            value()
        value()
        assert is_caching()
    assert len(made) == 3 and not is_caching()


def test_a_value_that_is_out_of_date_is_made_again() -> None:
    with process_cache():
        assert cached("kind", 0, lambda: "old") == "old"
        assert cached("kind", 0, lambda: "new", lambda value: value != "old") == "new"
        assert cached("kind", 0, lambda: "newer", lambda value: True) == "new"
