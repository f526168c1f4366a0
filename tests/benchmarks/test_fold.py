"""The plain loop of the bench: the same classifier and splits, the host projects' counts of images."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fold as bench
from patchgen.config import Config
from patchgen.model.classifier import Classifier
from patchgen.tasks import make_fold


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    data = bench.write_domains(tmp_path_factory.mktemp("fold"), 10, 32)
    return Config(
        str(data), "d0", method="lp-ln", backbone="tiny", image_size=28, steps=4, batch_per_domain=2, eval_every=2
    )


def test_the_plain_loop_trains_the_same_model_class(config: Config) -> None:
    loop = bench.PlainLoop(config, make_fold(config))
    before = bench.build_model(config, bench.make_method(config), 3, lambda _: None).state_dict()
    model = loop.run()
    assert isinstance(model, Classifier) and model.pool == "cls"
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and all("norm" in name or name.startswith("head") for name in moved)
    assert loop.trained == 4 * 3 * 2
    assert loop.scored == 3 * 40  # steps 0, 2 and the last
    assert loop.accuracy.keys() == bench.every_split(make_fold(config)).keys()


def test_our_counts_are_those_of_a_run(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"trained": 0, "scored": 0}

    def forward(model: Classifier, images: torch.Tensor, mask: Any = None) -> Any:
        seen["trained" if torch.is_grad_enabled() else "scored"] += len(images)
        return model.classify(model.read(images), mask)

    monkeypatch.setattr(Classifier, "forward", forward)
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path))
    bench.train(config, tmp_path / "runs", quiet=True)
    assert seen == bench.our_counts(config, make_fold(config))


@pytest.mark.parametrize("steps_each", [0.4, 1.0, 7.0, 12.0, 100.0])
def test_a_short_run_has_as_many_steps_for_each_evaluation_as_a_long_one(steps_each: float) -> None:
    steps, every = bench.schedule(steps_each)
    count = bench.evaluations(steps, every)
    assert count == bench.EVALUATIONS
    assert steps / count == pytest.approx(max(1.0, steps_each), abs=0.5)
