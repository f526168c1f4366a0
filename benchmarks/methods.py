"""What a training step of every method costs, as a multiple of LP+LN's.

    python -m benchmarks methods --csv src/patchgen/methods/cost.csv      # the column of `patchgen methods`
    measure(("coral", "patchgen"), source="tiny")["methods"]["coral"]["ratio"]

All methods share one kind of backbone, one batch and one process, and take their steps in turn, LP+LN before each of
them. What is timed is the whole step as the trainer makes it: forward passes, losses, gradients, the optimiser and what
a method does behind it. Seconds are the processor's.
"""

import statistics
from functools import partial
from operator import truediv
from typing import Annotated, Any

import torch
import tyro

from benchmarks.common import Line, device, report, step_seconds, take_turns, trained_step
from patchgen.common.files import write_text
from patchgen.diagnose.cost import BASELINE, DOMAINS, random_batch
from patchgen.methods import compared_methods
from patchgen.model.classifier import trained_tensors

SMALL = {"names": ("lp", "coral"), "source": "tiny", "image_size": 28, "per_domain": 2, "repeats": 1}


def measure(
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    source: str = "dinov2-small",
    image_size: int = 112,
    per_domain: int = 8,
    repeats: int = 5,
    csv: str | None = None,
) -> dict[str, Any]:
    """Time the steps of the named methods.

    Args:
        names: Methods, also `a+b`; all that fit the backbone when left out.
        source: A backbone; a name gets random weights.
        image_size: Pixels of the square images.
        per_domain: Images of each of three domains in a step.
        repeats: Timed pairs of steps, after one that warms up.
        csv: Write the ratios here as well.
    """
    if repeats < 1 or per_domain < 2:
        raise ValueError(f"repeats must be at least 1 and per_domain at least 2, not {repeats} and {per_domain}")
    batch, result = random_batch(per_domain * DOMAINS, image_size, device()), {}
    for name in compared_methods(names or ["all"]):
        theirs, own = (trained_step(each, source, image_size) for each in (BASELINE, name))
        works = {"theirs": partial(theirs, batch), "own": partial(own, batch)}
        seconds = take_turns(works, repeats, step_seconds)
        ratios = sorted(map(truediv, seconds["own"], seconds["theirs"]))
        result[name] = {
            "ratio": statistics.median(ratios),
            "lowest": ratios[0],
            "highest": ratios[-1],
            "trained_parameters": sum(t.numel() for t in trained_tensors(own.model).values()),
            "own_parameters": sum(p.numel() for p in own.method.parameters()),
        }
        report(f"{name:<24} {result[name]['ratio']:.2f} x {BASELINE}")
    if csv is not None:
        write_text(csv, "\n".join(["method,ratio", *(f"{name},{m['ratio']:.2f}" for name, m in result.items())]) + "\n")
    return {
        "backbone": source,
        "image_size": image_size,
        "per_domain": per_domain,
        "domains": DOMAINS,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "methods": result,
    }


def lines(result: dict[str, Any]) -> list[Line]:
    return [
        (
            f"{name}: step / LP+LN's ({each['trained_parameters']:,} trained parameters, "
            f"{each['own_parameters']:,} of the method's own)",
            f"{each['ratio']:.2f} ({each['lowest']:.2f}-{each['highest']:.2f})",
        )
        for name, each in result["methods"].items()
    ]
