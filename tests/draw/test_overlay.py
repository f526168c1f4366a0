"""What a map says of itself."""

import numpy as np
import pytest

from patchgen.draw.overlay import Explanation, mask_reading


@pytest.mark.parametrize(("mask", "text"), [
    (np.full((6, 6), 0.98), "36 of 36 patches selected: no selection to read (spread 0.000)"),
    (np.zeros((2, 2)), "0 of 4 patches selected: no selection to read (spread 0.000)"),
    (np.array([[0.5, 0.1], [0.9, 0.1]]), "2 of 4 patches selected, spread 0.332"),
])  # fmt: skip
def test_a_map_without_a_selection_says_so(mask: np.ndarray, text: str) -> None:
    assert mask_reading(mask) == text
    explanation = Explanation(None, np.zeros((56, 56, 3), np.uint8), mask.astype(np.float32), (("cat", 0.9),))
    assert explanation.reading == text
