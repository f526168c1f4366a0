"""Images per second: rates by hand, and what is timed is what `predict` says and every file once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import throughput
from patchgen.predict.predictor import Predictor


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return throughput.untrained_predictor("tiny", "patchgen-select", 28)


def test_rates_by_hand() -> None:
    found = throughput.rates_of({"model": [1.0, 1.1, 1.05], "predict": [4.0, 4.2, 4.1]}, 42)
    assert found["images_per_second"] == {"model": 42 / 1.05, "predict": 42 / 4.1}
    assert found["predict_over_model"] == pytest.approx(1.05 / 4.1)
    assert found["spread"] == pytest.approx({"model": 0.1, "predict": 0.05}) and found["conclusive"]


def test_measures_each_batch_size(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    sizes: list[int] = []
    predict = Predictor.predict

    def counted(self: Predictor, paths: list[Path], batch: int = 64, tick: None = None) -> list:
        found = list(predict(self, paths, batch, tick))
        asked.append((len({one.path for one in found}), batch))
        return found

    monkeypatch.setattr(Predictor, "predict", counted)
    predictor.model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    lines: list[str] = []
    found = throughput.measure_predict(predictor, images=6, pixels=32, batches=(1, 4), repeats=2, report=lines.append)
    assert json.loads(json.dumps(found)) == found and len(lines) == 4
    assert asked == [(6, 1)] * 3 + [(6, 4)] * 3  # one warms up
    assert sizes == [1] * 6 * 6 + [4, 2] * 6  # the model alone and within predict, three times each
    first, second = found["batches"]
    assert first["model_over_first"] == 1
    assert second["model_over_first"] == second["images_per_second"]["model"] / first["images_per_second"]["model"]
