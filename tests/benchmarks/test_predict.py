"""`predict` and the model alone on several runtimes: each file once, in turn, and the same answers."""

import json

import pytest

from benchmarks import predict


@pytest.mark.slow
def test_runtimes_are_compared_over_the_same_files() -> None:
    found = predict.measure(**predict.SMALL | {"runtimes": ("torch", "auto")})
    assert json.loads(json.dumps(found)) == found and found["images"] == 6
    first, second = found["runtimes"].values()
    assert first["speed"]["median"] == 1 and second["same_class"] == 1 and second["masks"] < 0.02
    assert [line[0].rpartition(": ")[2] for line in predict.lines(found)] == [
        "`predict` / the model alone", "times as fast as torch", "beside torch's answers", "`predict` / the model alone"
    ]  # fmt: skip


def test_ratios_by_hand() -> None:
    ratio = predict.ratio_of([4.0, 4.2, 4.4], [2.0, 2.0, 2.0])
    assert ratio == {"median": pytest.approx(2.1), "quartiles": pytest.approx([2.05, 2.15]), "conclusive": True}
    assert not predict.ratio_of([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])["conclusive"]
