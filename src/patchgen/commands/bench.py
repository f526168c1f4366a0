"""patchgen bench SUBJECT: measure this machine. A new subject is one function in `SUBJECTS`."""

from __future__ import annotations

import json as to_json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from patchgen.commands import choose, parse, print_table


def bench_step(
    backbone: str = "dinov2-small", image_size: int = 224, batch: int = 8, repeats: int = 5, json: bool = False
) -> None:
    """Time a training step of PatchGen against LP+LN, and compare the module's memory with an explicit P x P version.

    Args:
        backbone: A name (its architecture, random weights), or a hub id, folder or .safetensors file.
        image_size: Pixels of the square images.
        batch: Images in a step.
        repeats: Timed steps of each method, after one that warms up.
        json: Print JSON instead of tables.
    """
    from patchgen.diagnose import cost
    from patchgen.train.progress import Progress

    with Progress("bench step", cost.pieces(repeats, cost.PATCHES)) as bar:

        def report(line: str) -> None:
            bar.advance()
            bar.say(line)

        found = cost.measure_step(
            backbone, image_size=image_size, batch=batch, repeats=repeats, patches=cost.PATCHES, report=report
        )
    if json:
        print(to_json.dumps(found, indent=2))
    else:
        _print_step(found)


def _print_step(found: Mapping[str, Any]) -> None:
    ratio, module, memory, machine = found["ratio"], found["module"], found["memory"], found["machine"]
    print(
        f"{found['backbone']['resolved']}, {found['image_size']} px ({found['patches']} patches), batch "
        f"{found['batch']}, {machine['device']}, {machine['threads']} threads"
    )
    header = ("method", "median s", "fastest s", "CPU s", "GFLOPs an image", "trained parameters")
    rows = [
        (name, f"{m['median_seconds']:.3f}", f"{m['fastest_seconds']:.3f}", f"{m['median_cpu_seconds']:.3f}",
         f"{m['gflops_per_image']:.2f}", f"{m['trainable_parameters']:,}")
        for name, m in found["methods"].items()
    ]  # fmt: skip
    print_table(header, rows)
    low, high = ratio["lower_quartile"], ratio["upper_quartile"]
    print(
        f"time ratio {ratio['of_medians']:.3f} (quartiles {low:.3f}-{high:.3f}; fastest steps "
        f"{ratio['of_fastest']:.3f}; CPU seconds {ratio['of_cpu_medians']:.3f}; arithmetic floor "
        f"{ratio['floor']:.3f}; target {ratio['target']:.2f})"
    )
    if not ratio["conclusive"]:
        print("not conclusive: the quartiles lie too far apart; use more --repeats, or a machine with less to do")
    print(f"module: {module['parameters']:,} parameters, {module['of_backbone']:.1%} of the backbone")
    sizes = [
        (f"{row['patches']:,}", f"{row['patchgen'] / 1e6:.1f}", f"{row['explicit'] / 1e6:.1f}",
         f"{row['patchgen'] / row['explicit']:.3f}")
        for row in memory["bytes"]
    ]  # fmt: skip
    print_table(("patches", "PatchGen MB", "explicit P x P MB", "ratio"), sizes)
    growth = memory["exponent"]
    print(
        f"peak memory of one image, D = {memory['dim']}: grows as P^{growth['patchgen']:.2f}, "
        f"explicit as P^{growth['explicit']:.2f}"
    )


SUBJECTS: dict[str, Callable[..., None]] = {"step": bench_step}


def main(argv: list[str]) -> int:
    subject, rest = choose(SUBJECTS, "bench", argv)
    try:
        if subject is not None:
            parse(subject, f"bench {argv[0]}", rest)
    except KeyboardInterrupt:
        print("patchgen bench: stopped before the end; nothing is reported", file=sys.stderr)
        return 130
    return 0
