"""patchgen diagnose RUN [--against RUN ...]: does the mask decide? Records, figures and one page."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from patchgen.commands import check_folder, print_table
from patchgen.commands.options import ModelOptions
from patchgen.common.text import json_text


@dataclass(frozen=True, kw_only=True)
class DiagnoseArguments(ModelOptions):
    """Test whether a run's mask decides: perturbation, insertion and deletion, geometry, maps, cost.

    Every run can be diagnosed, with the rankings it has. Writes records.jsonl, diagnosis.json, index.html, and each
    figure as PNG, SVG and CSV.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Finished run folder, as `patchgen train` prints it."""
    against: tuple[str, ...] = ()
    """Runs of the same fold to compare with, such as the matched lp-ln."""
    data: str | None = None
    """Path of the run's data, if it has changed."""
    images: int = 200
    """Images of the unseen domain, evenly over the classes."""
    steps: int = 8
    """Steps of insertion and deletion."""
    operators: tuple[str, ...] = ("blur", "mean", "swap")
    """What perturbs a patch, of blur, mean and swap; the first also serves insertion and deletion."""
    rankings: tuple[str, ...] = ()
    """Rankings of the patches; by default all that a run supports."""
    projection: Literal["auto", "umap", "pca"] = "auto"
    """Projection of the features; `auto` is UMAP if it is installed."""
    out: str | None = None
    """Output folder; `diagnosis` in the run folder by default."""
    seed: int = 0
    """Seed of the choice of images and of the swapped partners."""
    json: bool = False
    """Print the diagnosis as JSON instead of a table."""


def diagnose(arguments: DiagnoseArguments) -> int:
    from patchgen.common.progress import Progress
    from patchgen.diagnose.diagnosis import examine, prepare
    from patchgen.diagnose.measure import Options

    options = Options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)})
    out = check_folder(arguments.out or Path(arguments.model) / "diagnosis")
    opened = prepare([arguments.model, *arguments.against], arguments.data, options, **arguments.how)
    with Progress("diagnosing", opened.work) as bar:
        diagnosis = examine(opened, bar.say, bar.tick)
    page = diagnosis.write(out)
    if arguments.json:
        print(json_text(diagnosis.facts))
    else:
        for name, run in diagnosis.facts["runs"].items():
            mask = run["mask"]["verdict"] if run["mask"] else "no mask"
            print(f"{name}: accuracy {run['accuracy']['mean']:.1%} on {run['images']} images; {mask}")
        claims = [list(claim.values()) for claim in diagnosis.facts["claims"]]
        print_table(("part", "claim", "appears", "measured"), claims)
        print(page.resolve())
    return 0


COMMAND = diagnose
