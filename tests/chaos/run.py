"""Faults on purpose, seeded and bounded: `python tests/chaos/run.py --seed 1 --kills 300 --inputs 5000 --jobs 2`.

Prints the table of docs/develop/reliability.md, and with --json writes it with every case that went wrong. Exit code 1
when any did.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"  # before torch is imported: a pool of threads would not survive a fork
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow, where installed: its allocator starts one
sys.path[:0] = [str(Path(__file__).parents[level] / name) for level, name in ((0, ""), (1, ""), (2, "src"))]


def main() -> int:
    from chaos.work import page, shared_work

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--faults", type=int, default=120, help="damaged files, besides the other faults")
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--only", default="", help="one kind by its name in the table, such as 'image bombs'")
    parser.add_argument("--small", action="store_true", help="leave out what starts slowly (sweep, export)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the work")
    parser.add_argument("--json", type=Path, help="write the table and what went wrong here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        results = shared_work(arguments, Path(folder))
    print(page(results))
    wrong = [f"{line['name']}: {text}" for line in results["lines"] for text in line["wrong"]] + results["stopped"]
    for text in wrong:
        print(f"WRONG: {text}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
