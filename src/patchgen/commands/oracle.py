"""patchgen oracle list | write NAME --out DIR | compose DATA --out DIR: data sets with known predictive patches."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated

import tyro

from patchgen.commands import print_table
from patchgen.common.files import expanded
from patchgen.common.progress import Progress
from patchgen.common.text import json_text


def list_sets(json: bool = False) -> None:
    """List the suite: classes, size of C*, distractors, and how strongly backgrounds correlate with the class.

    Args:
        json: Print every parameter as JSON instead of a table.
    """
    from patchgen.data.oracle import SUITE, Oracle

    if json:
        print(json_text({name: asdict(spec) for name, spec in SUITE.items()}))
        return
    head = ("name", "classes", "held out", "C*", "objects", "distractors", "correlation", "unseen", "local", "images")
    rows = []
    for name, spec in SUITE.items():
        laws = ", ".join(f"{d.name} {d.correlation:g}{' (turned)' * d.turned}" for d in spec.domains)
        patches, local = f"{spec.predictive} of {spec.grid**2}", "yes" if spec.local else "no"
        rows.append((name, spec.classes, spec.held_out, patches, spec.objects, spec.distractors, laws, spec.unseen,
                     local, len(Oracle(spec))))  # fmt: skip
    print_table(head, [list(map(str, row)) for row in rows])


def write_set(
    name: Annotated[str, tyro.conf.Positional], out: str, seed: int | None = None, quiet: bool = False
) -> None:
    """Write images, masks and oracle.json into a folder; the last line printed is the images folder.

    Args:
        name: A name of `patchgen oracle list`.
        out: The folder to create; one that already holds this set is left as it is.
        seed: Draw other images of the same kind, for choosing settings. The suite's default seed, 1, is for reporting.
        quiet: No progress bar.
    """
    from patchgen.data.oracle import Oracle, suite_spec

    spec = suite_spec(name)
    oracle = Oracle(spec if seed is None else replace(spec, seed=seed))
    with Progress(f"writing {name}", len(oracle), quiet=quiet) as bar:
        folder = oracle.write(out, bar.advance)
    print(folder / "images")


def compose_set(
    data: Annotated[str, tyro.conf.Positional],
    out: str,
    domain: str | None = None,
    classes: str | None = None,
    num_classes: int = 4,
    correlation: str = "0.99,0.97,0.95",
    per_class: int = 60,
    object: int = 48,
    image_size: int = 112,
    seed: int = 1,
    quiet: bool = False,
) -> None:
    """Place objects of your photographs on backgrounds that follow the class in the source domains only.

    Args:
        data: A folder class/image or domain/class/image, or the official CUB_200_2011.
        out: The folder to create; one that already holds this set is left as it is.
        domain: The domain of DATA whose photographs are used, if it has several.
        classes: Names separated by commas; "Gull=*Gull|*Tern" merges the folders that match.
        num_classes: Number of classes without --classes: the first ones alphabetically.
        correlation: Share of images on the class's own background in amber, dusk and jade.
        per_class: Images per domain and class; a class needs four times as many photographs.
        object: Longer side of the object in pixels.
        image_size: Side of an image in pixels.
        seed: Seed of photographs, positions, backgrounds and noise.
        quiet: No progress bar.
    """
    from patchgen.data.compose import compose

    names = None if classes is None else [name.strip() for name in classes.split(",")]
    try:
        shares = [float(word) for word in correlation.split(",")]
    except ValueError:
        raise ValueError(f"--correlation must be numbers separated by commas, got {correlation!r}") from None
    composition = compose(
        data, domain=domain, classes=names, num_classes=num_classes, correlation=shares,
        per_class=per_class, object_size=object, image_size=image_size, seed=seed,
    )  # fmt: skip
    if expanded(out).absolute().is_relative_to(composition.root):
        raise ValueError(f"--out '{out}' is inside '{composition.root}' and would be read as photographs next time")
    with Progress("composing", len(composition), quiet=quiet) as bar:
        folder = composition.write(out, bar.advance)
    print(folder / "images")


COMMAND: dict[str, Callable[..., None]] = {"list": list_sets, "write": write_set, "compose": compose_set}
