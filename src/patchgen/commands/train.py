"""patchgen train DATA --unseen NAME, or --task ccd: one run folder, its path as the last line."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from patchgen.ccd.settings import StreamConfig
from patchgen.commands import Maybe
from patchgen.commands.settings import StartOptions, parse_settings, settings_of, settings_schema
from patchgen.common.text import json_text
from patchgen.config import Config, Settings, config_class
from patchgen.train.track import Tracking


@dataclass(frozen=True, kw_only=True)
class TrainOptions(StartOptions):
    """Train one method with one domain unseen, select its checkpoint on the sources, score it on the unseen domain.

    `--task mdg_gcd` also groups unlabelled images of new classes. `--task ccd` learns labelled classes, then discovers
    new ones in stages of unlabelled images: `patchgen train --task ccd --help`.
    """

    command: ClassVar = "train"
    kinds: ClassVar = (Config, StreamConfig)

    out: str = "runs"
    """Parent of the run folder."""
    dry_run: bool = False
    """Train nothing; print time on this machine, arithmetic and memory, from a few steps on random pixels."""
    quiet: bool = False
    """No progress."""
    track: Maybe[Tracking] = None
    """Log each evaluation to TensorBoard (`--track` alone), W&B or MLflow; nothing is sent over the network."""
    json: bool = False
    """Print the run folder and its scores as one JSON object instead of the folder."""


COMMAND = settings_schema(TrainOptions)


def parsed(argv: list[str]) -> tuple[TrainOptions, Settings]:
    """The command's own options, and the settings of the run."""
    options, given = parse_settings(TrainOptions, argv)
    return options, settings_of(config_class(options.task(given)), options.layers(given), given)


def main(argv: list[str]) -> int:
    options, config = parsed(argv)
    if options.dry_run:
        if not isinstance(config, Config):
            raise ValueError("--dry-run is for runs that leave a domain out, not for --task ccd")
        from patchgen.diagnose.cost import cost_lines, measured_costs

        cost = measured_costs(config)
        print(json_text(cost) if options.json else "\n".join(cost_lines(cost)))
        return 0
    from patchgen.train.lifecycle import train

    finished = {file.parent.name for file in Path(options.out).glob("*/done")}
    run = train(config, options.out, quiet=options.quiet, track=options.track or False)
    if run.path.name in finished and not options.quiet:
        print("finished earlier: nothing to do", file=sys.stderr)
    if options.json:
        kinds = {"stage": "stage", "average": "average"} if config.task == "ccd" else {"tests": "test"}
        scores = {name: run.records(kind) for name, kind in kinds.items()}
        print(json_text({"run": str(run.path), **scores}))
        return 0
    if not options.quiet:
        print((run.path / "summary.md").read_text(), file=sys.stderr)
    print(run.path)
    return 0
