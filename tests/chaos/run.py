"""Faults on purpose, seeded and bounded: `python tests/chaos/run.py --seed 1 --kills 300 --inputs 5000 --jobs 2`.

Prints the table of docs/develop/reliability.md, and with --json writes it with every case that went wrong. Exit code 1
when any did. `--table FILE` prints the table of such a file, and tries nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"  # before torch is imported: a pool of threads would not survive a fork
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow, where installed: its allocator starts one
sys.path[:0] = [str(Path(__file__).parents[level] / name) for level, name in ((0, ""), (1, ""), (2, "src"))]


def prepare(ground: Path) -> None:
    """Images, settings and one finished run to work on."""
    from chaos.children import command, run, warm
    from chaos.ground import FIT, RUN, words_of, write_photos, write_stream

    def need(what: str, work: object) -> None:
        ended = run(work)  # type: ignore[arg-type]
        if ended.code:
            raise SystemExit(f"no {what}: {ended.said}")

    os.environ["PATCHGEN_CACHE"] = str(ground / "cache")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")  # of a sweep's workers
    os.chdir(ground)
    photos = write_photos(ground / "photos")
    write_stream(ground / "shapes")
    shared = {**RUN, "swad": "false", "method": "lp", "data": photos}
    lines = [f"{name}: {value}" for name, value in shared.items()]
    (ground / "recipe.yaml").write_text("\n".join([*lines, "grid: {seed: [1, 2]}"]) + "\n")
    warm()
    from patchgen.model.backbone import load_backbone

    need("backbone", lambda: load_backbone("tiny").model.save_pretrained(ground / "backbone"))
    need("run", command("train", str(photos), *words_of(RUN), "--quiet", "--out", str(ground / "model")))
    for name, seed in (("older", "7"), ("newer", "0")):
        words = ["fit", str(photos), *words_of(FIT), "--seed", seed, "--no-expect", "--quiet"]
        out = ["--runs", str(ground / "fitted" / "runs"), "--out", str(ground / "fitted" / name)]
        need("fitted model", command(*words, *out))
    shutil.copytree(ground / "fitted" / "older", ground / "fitted" / "before" / "model")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--faults", type=int, default=120, help="damaged files, besides the other faults")
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--only", default="", help="one kind by its name in the table, such as 'image bombs'")
    parser.add_argument("--small", action="store_true", help="leave out what starts slowly (sweep, export)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--json", type=Path, help="write the table and what went wrong here")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and end")
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    from chaos.ledger import page

    if arguments.table:
        print(page(json.loads(arguments.table.read_text())))
        return 0
    from chaos.work import shared_work

    target = arguments.json.absolute() if arguments.json else None
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        found = shared_work(arguments, Path(folder), prepare)
    print(page(found))
    wrong = [f"{line['name']}: {text}" for line in found["lines"] for text in line["wrong"]] + found["stopped"]
    for text in wrong:
        print(f"WRONG: {text}")
    if target:
        target.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
