"""patchgen bench SUBJECT: measure this machine. A new subject is one function in `SUBJECTS`."""

from __future__ import annotations

import json as to_json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from patchgen.commands import choose, parse, print_table
from patchgen.commands.bench_table import (
    bench_all,
    bench_fold,
    bench_grouping,
    bench_growth,
    bench_input,
    bench_modes,
    bench_probe,
    bench_rate,
    bench_start,
)
from patchgen.common.files import write_text


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
    from patchgen.common.progress import Progress
    from patchgen.diagnose import cost

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
    from patchgen.common.progress import Progress
    from patchgen.diagnose import cost_discovery

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
    from patchgen.common.progress import Progress
    from patchgen.diagnose import cost_stream

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


def bench_methods(
    *names: str,
    backbone: str = "dinov2-small",
    image_size: int = 112,
    per_domain: int = 8,
    repeats: int = 5,
    csv: str | None = None,
    json: bool = False,
) -> None:
    """Time a training step of every method against LP+LN, in turn within one process.

    Args:
        names: Methods, also `a+b`; all that fit the backbone when left out.
        backbone: A name (its architecture, random weights), or a hub id, folder or .safetensors file.
        image_size: Pixels of the square images.
        per_domain: Images of each of three domains in a step.
        repeats: Timed pairs of steps, after one that warms up.
        csv: Write the ratios here as well.
        json: Print JSON instead of a table.
    """
    from patchgen.common.progress import Progress
    from patchgen.diagnose import cost_methods
    from patchgen.methods import compared_methods

    chosen = compared_methods(names or ["all"])
    with Progress("bench methods", len(chosen)) as bar:

        def report(line: str) -> None:
            bar.advance()
            bar.say(line)

        found = cost_methods.measure_methods(
            chosen, backbone, image_size=image_size, per_domain=per_domain, repeats=repeats, report=report
        )
    rows = [
        (name, f"{m['ratio']:.2f}", f"{m['lowest']:.2f}", f"{m['highest']:.2f}", f"{m['trained_parameters']:,}",
         f"{m['own_parameters']:,}")
        for name, m in found["methods"].items()
    ]  # fmt: skip
    if csv is not None:
        lines = ["method,ratio", *(f"{row[0]},{row[1]}" for row in rows)]
        write_text(csv, "\n".join(lines) + "\n")
    if json:
        print(to_json.dumps(found, indent=2))
        return
    print(
        f"{backbone}, {image_size} px, {found['domains']} x {per_domain} images, {found['threads']} threads; "
        f"{repeats} pairs of steps each"
    )
    print_table(("method", "step / LP+LN", "lowest", "highest", "trained parameters", "own parameters"), rows)


def bench_sweep(runs: int = 200, workers: int = 2, json: bool = False) -> None:
    """Time the bookkeeping of a sweep: runs without any work, on the local engine.

    Args:
        runs: No-op runs.
        workers: Processes.
        json: Print JSON instead of a line.
    """
    from patchgen.diagnose.cost_sweep import measure_sweep

    found = measure_sweep(runs=runs, workers=workers, quiet=True)
    if json:
        print(to_json.dumps(found, indent=2))
    else:
        print(
            f"{found['done']} of {runs} no-op runs on {workers} workers: {found['seconds_per_run']:.4f} s a run "
            f"({found['seconds']:.1f} s in all; starting the workers took {found['start_seconds']:.1f} s)"
        )


SUBJECTS: dict[str, Callable[..., None]] = {
    "all": bench_all,
    "step": bench_step,
    "rate": bench_rate,
    "modes": bench_modes,
    "input": bench_input,
    "fold": bench_fold,
    "probe": bench_probe,
    "grouping": bench_grouping,
    "growth": bench_growth,
    "start": bench_start,
    "methods": bench_methods,
    "kmeans": bench_kmeans,
    "discovery": bench_discovery,
    "sweep": bench_sweep,
}


def main(argv: list[str]) -> int:
    subject, rest = choose(SUBJECTS, "bench", argv)
    try:
        if subject is not None:
            parse(subject, f"bench {argv[0]}", rest)
    except KeyboardInterrupt:
        print("patchgen bench: stopped before the end; nothing is reported", file=sys.stderr)
        return 130
    return 0
