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


def bench_kmeans(
    points: int = 50_000,
    dim: int = 768,
    clusters: int = 100,
    repeats: int = 3,
    chunk_mb: int = 1000,
    json: bool = False,
) -> None:
    """Time an assignment pass of k-means by matrix products against broadcasting, and compare the answers.

    Args:
        points: N, rows of random features.
        dim: D, features a point.
        clusters: K, centres.
        repeats: Timed passes of each, in turn.
        chunk_mb: Megabytes that the broadcasting version may hold at once; its speed depends on it.
        json: Print JSON instead of a table.
    """
    from patchgen.diagnose import cost_discovery
    from patchgen.train.progress import Progress

    with Progress("bench kmeans", 2 * repeats) as bar:

        def report(line: str) -> None:
            bar.advance()
            bar.say(line)

        found = cost_discovery.measure_kmeans(
            points=points, dim=dim, clusters=clusters, repeats=repeats, chunk_mb=chunk_mb, report=report
        )
    if json:
        print(to_json.dumps(found, indent=2))
    else:
        _print_kmeans(found)


def _print_kmeans(found: Mapping[str, Any]) -> None:
    ratio, agreement, machine = found["ratio"], found["agreement"], found["machine"]
    print(
        f"one assignment of {found['points']:,} x {found['dim']} points to {found['clusters']} centres, "
        f"{machine['device']}, {machine['threads']} threads; broadcasting takes {found['chunk_rows']:,} rows at a time "
        f"({found['chunk_mb']:,} MB)"
    )
    rows = [
        (name, f"{m['median_seconds']:.3f}", f"{m['fastest_seconds']:.3f}", f"{m['median_cpu_seconds']:.3f}")
        for name, m in found["passes"].items()
    ]
    print_table(("version", "median s", "fastest s", "CPU s"), rows)
    print(
        f"broadcasting takes {ratio['of_medians']:.1f} times as long (neighbouring passes {ratio['lowest']:.1f}-"
        f"{ratio['highest']:.1f}; fastest {ratio['of_fastest']:.1f}; CPU seconds {ratio['of_cpu_medians']:.1f}; "
        f"target {ratio['target']:.0f}: {'reached' if ratio['reached'] else 'missed'})"
    )
    print(
        f"same centre for {agreement['same']:,} of {found['points']:,} points; {agreement['ties']} more are ties "
        f"within rounding, {agreement['wrong']} differ"
    )


def bench_discovery(
    backbone: str = "dinov2-small",
    image_size: int = 224,
    batch: int = 8,
    repeats: int = 3,
    labelled: int = 42_950,
    unlabelled: int = 7_050,
    dim: int = 768,
    classes: int = 100,
    inits: int = 10,
    json: bool = False,
) -> None:
    """Time the choice of prompts against a training step, and the scoring of a stage against plain k-means.

    Args:
        backbone: A name (its architecture, random weights), or a hub id, folder or .safetensors file.
        image_size: Pixels of the square images.
        batch: Images in a step, each in two views.
        repeats: Timed steps, after one that warms up.
        labelled: Images with a class or cluster; the default is the last stage of CIFAR-100.
        unlabelled: Images of the stage.
        dim: Features an image.
        classes: Clusters, and components of the mixture.
        inits: Starts of each k-means.
        json: Print JSON instead of tables.
    """
    from patchgen.diagnose import cost_stream
    from patchgen.train.progress import Progress

    with Progress("bench discovery", cost_stream.pieces(repeats)) as bar:

        def report(line: str) -> None:
            bar.advance()
            bar.say(line)

        found = cost_stream.measure_discovery(
            backbone, image_size=image_size, batch=batch, repeats=repeats, labelled=labelled, unlabelled=unlabelled,
            dim=dim, classes=classes, inits=inits, report=report,
        )  # fmt: skip
    if json:
        print(to_json.dumps(found, indent=2))
    else:
        _print_discovery(found)


def _print_discovery(found: Mapping[str, Any]) -> None:
    prompts, evaluation, machine = found["prompts"], found["evaluation"], found["machine"]
    print(
        f"{prompts['backbone']}, {prompts['image_size']} px, {prompts['batch']} images x 2 views, "
        f"{prompts['components']} components, {machine['device']}, {machine['threads']} threads"
    )
    names = {"query": "prompt-free pass", "choice": "choice of the prompts", "step": "whole training step"}
    whole = prompts["median_seconds"]["step"]
    rows = [(names[n], f"{1000 * s:.2f}", f"{s / whole:.2%}") for n, s in prompts["median_seconds"].items()]
    print_table(("part of a step", "median ms", "of the step"), rows)
    seconds = evaluation["seconds"]
    print(
        f"scoring a stage: {evaluation['labelled']:,} labelled and {evaluation['unlabelled']:,} unlabelled images, "
        f"{evaluation['dim']} features, {evaluation['classes']} clusters, {evaluation['inits']} starts"
    )
    times = [
        ("constrained k-means, ours", f"{seconds['ours']:.1f}"),
        ("plain k-means, scikit-learn", f"{seconds['sklearn']:.1f}"),
    ]
    print_table(("clustering", "seconds"), times)
    print(f"time ratio {evaluation['ratio']:.3f} (ours / scikit-learn's)")


SUBJECTS: dict[str, Callable[..., None]] = {"step": bench_step, "kmeans": bench_kmeans, "discovery": bench_discovery}


def main(argv: list[str]) -> int:
    subject, rest = choose(SUBJECTS, "bench", argv)
    try:
        if subject is not None:
            parse(subject, f"bench {argv[0]}", rest)
    except KeyboardInterrupt:
        print("patchgen bench: stopped before the end; nothing is reported", file=sys.stderr)
        return 130
    return 0
