"""Folders, images and links that somebody made to do harm: bombs, loops, pipes, nonsense, forged slides.

Whatever they are, a command ends soon and in words, what is good among them is still used, and nothing outside of the
given folders is written.
"""

import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forged
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from chaos.faults import damage
from chaos.ground import RUN, words_of
from chaos.inputs import REFUSED, Kind, _command, _judged, _predicted, _run_folder

SEEDS = st.integers(0, 2**32 - 1)
PRECIOUS = "precious"


def _with_seed(**choices: tuple[Any, ...]) -> SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"seed": SEEDS, **{name: st.sampled_from(values) for name, values in choices.items()}})


# Bombs


def _scans(rng: random.Random) -> bytes:
    return forged.progressive(rng.choice([3, 60, 99, 3000]), rng.choice([64, 500, 3000, 6000]))


def _scans_in_tiff(rng: random.Random) -> bytes:
    side, tile = rng.choice([64, 500, 3000, 8000]), rng.random() < 0.5
    part = forged.progressive(rng.choice([3, 60, 99, 3000]), side)
    return forged.tiff(part, side, 7, *([(322, side), (323, side)] if tile else []))


def _tile(rng: random.Random) -> bytes:
    part, side = zlib.compress(bytes(rng.choice([10, 10**8])), 1), rng.choice([10, 4000])
    tile = rng.choice([16, 4096, 1 << 15, 1 << 20, (1 << 31) - 16])
    return forged.tiff(part, side, 8, (322, tile), (323, tile))


def _long_png(rng: random.Random) -> bytes:
    size = rng.choice([(1, 89_000_000), (89_000_000, 1), (60_000, 1_400), (1, 65_536), (30_000, 30_000)])
    return forged.png(*size, rng.choice([10, 10**6, 10**8]), rng.choice([0, 2, 6]))


BOMBS: dict[str, Callable[[random.Random], bytes]] = {
    "scans.jpg": _scans,
    "scans.tif": _scans_in_tiff,
    "tile.tif": _tile,
    "parts.tif": lambda rng: forged.parts(rng.choice([1, 2, 1000, 100_000])),
    "long.png": _long_png,
}
bombs = _with_seed(base=tuple(BOMBS))


def _bomb(place: Path, drawn: dict[str, Any]) -> str:
    return _predicted(place, drawn, drawn["base"], BOMBS[drawn["base"]](random.Random(drawn["seed"])))


# Links and pipes among images

ENTRIES = ("loop", "up", "root", "dangling", "other class", "same file", "pipe", "pipe.png", "folder.png", "chain",
           "control\x1b[2J.png", "=cmd.png", "device.png", "precious")  # fmt: skip
data_trees = st.fixed_dictionaries(
    {"entries": st.lists(st.sampled_from(ENTRIES), min_size=1, max_size=4, unique=True), "seed": SEEDS,
     "command": st.sampled_from(("splits", "doctor", "predict", "pattern", "train"))}
)  # fmt: skip


def _add_entry(root: Path, kind: str, rng: random.Random) -> None:
    folder = rng.choice([path for path in sorted(root.rglob("*")) if path.is_dir() and not path.is_symlink()])
    target = folder / f"{rng.randrange(1000)}-{kind}"
    links = {"loop": ".", "up": "../..", "root": "/proc", "dangling": "nowhere",
             "other class": root / "field" / "cross", "same file": root / "field" / "cross" / "00.png",
             "device.png": "/dev/zero", "precious": root.parent / PRECIOUS}  # fmt: skip
    if kind in links:
        target.symlink_to(links[kind])
    elif kind.startswith("pipe"):
        os.mkfifo(target)
    elif kind == "folder.png":
        target.mkdir()
    elif kind == "chain":
        for level in range(30):
            (target / f"{level}").mkdir(parents=True)
            for name in "ab":
                (target / f"{level}" / name).symlink_to(f"../{level + 1}")
    else:
        shutil.copy(root / "field" / "cross" / "00.png", target)


def _tree(place: Path, drawn: dict[str, Any]) -> str:
    root = place / "data"
    shutil.copytree(Path("photos").resolve(), root)
    (place / PRECIOUS).write_text(PRECIOUS)
    rng = random.Random(drawn["seed"])
    for kind in drawn["entries"]:
        _add_entry(root, kind, rng)
    words = {"splits": ["doctor", "data", "--splits", "s.csv"], "doctor": ["doctor", "data"],
             "predict": ["predict", _run_folder(), "data", "--csv", "found.csv"],
             "pattern": ["predict", _run_folder(), "data/**/*.png", "--csv", "found.csv"],
             "train": ["train", "data", *words_of({**RUN, "steps": 1, "swad": False}), "--quiet"]}  # fmt: skip
    said = _judged(drawn, *_command(*words[drawn["command"]]))
    return said if (place / PRECIOUS).read_text() == PRECIOUS else f"{drawn!r:.300}: a file outside was changed"


# Run folders

NONSENSE = (b"", b"[]", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 3000, b"null", b"9" * 5000,
            forged.LAUGHS.encode(), b'{"error": 5}', b"'<img src=x onerror=alert(1)>': 1\n", b"x" * 100_000,
            b"a: !!python/object:os.system x")  # fmt: skip
run_folders = _with_seed(
    file=("config.yaml", "records.jsonl", "env.json", "splits.csv", "done", "failed.json", "summary.md", ".lock",
          "checkpoints", "checkpoints/selected.safetensors", "checkpoints/state.safetensors"),
    change=("link", "pipe", "damage", "nonsense", "folder", "gone"),
    command=("runs", "report", "predict", "train", "explain", "diff"), nonsense=NONSENSE,
)  # fmt: skip


def _spoil(folder: Path, drawn: dict[str, Any], outside: Path) -> None:
    """One file of a folder becomes a link to a file outside, a pipe, a folder, or holds what it should not."""
    target = folder / drawn["file"]
    if drawn["change"] == "damage" and target.is_file():
        damage(target, random.Random(drawn["seed"]))
        return
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    target.parent.mkdir(exist_ok=True)
    if drawn["change"] == "link":
        target.symlink_to(outside)
    elif drawn["change"] == "pipe":
        os.mkfifo(target)
    elif drawn["change"] == "folder":
        target.mkdir()
    elif drawn["change"] == "nonsense":
        target.write_bytes(drawn["nonsense"])


def _beside(place: Path, drawn: dict[str, Any]) -> str:
    """Beside a good run, which `runs` must still list."""
    home, source = place / "runs", Path(_run_folder()).resolve()
    bad = home / source.name
    shutil.copytree(source, bad)
    shutil.copytree(source, home / "good")
    (place / PRECIOUS).write_text(PRECIOUS)
    _spoil(bad, drawn, place / PRECIOUS)
    image = "photos/studio/circle/00.png"
    words = {"runs": ["runs", "runs"], "report": ["report", "runs", "--out", "out"],
             "predict": ["predict", str(bad), image],
             "train": ["train", "photos", *words_of(RUN), "--quiet", "--out", "runs"],
             "explain": ["explain", str(bad), image, "--out", "maps"], "diff": ["runs", "diff", str(bad), "runs/good"],
             }  # fmt: skip
    code, out, errors = _command(*words[drawn["command"]])
    if (place / PRECIOUS).read_text() != PRECIOUS:
        return f"{drawn!r:.300}: a file outside was changed"
    if drawn["command"] == "runs" and "good" not in out:
        return f"{drawn!r:.300}: the good run is not listed"
    return _judged(drawn, code, out, errors)


# Slides

slides = _with_seed(change=("tile", "side", "flip", "cut", "scale", "offsets", "none"))


def _slide(place: Path, drawn: dict[str, Any]) -> str:
    """Before a good slide, which must be predicted whatever the first one is: its directories lie, or it is damaged."""
    bad, good = (forged.write_slide(place / f"{name}.tif") for name in ("bad", "good"))
    rng, change = random.Random(drawn["seed"]), drawn["change"]
    tags = {"tile": (322, 323), "side": (256, 257), "offsets": (324, 325), "scale": (282, 283)}
    lies = (0, 1, 16, 8192, 1 << 15, 1 << 24, (1 << 32) - 16)
    forged.forge(bad, tags.get(change, ()), lambda: rng.choice(lies) if rng.random() < 0.7 else None)
    data = bytearray(bad.read_bytes())
    for _ in range(rng.randint(1, 40) if change == "flip" else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    bad.write_bytes(data[: rng.randrange(len(data))] if change == "cut" else data)
    code, out, errors = _command(
        "slide", _run_folder(), bad.name, good.name, "--tile", "64", "--mpp", "0.5", "--out", "out"
    )
    if not (place / "out" / "good" / "tiles.csv").is_file():
        return f"{drawn!r:.300}: the good slide is lost: {errors[-200:]}"
    return _judged(drawn, code, out, errors) or (REFUSED if "could not be" in errors else "")


HOSTILE: dict[str, Kind] = {
    "image bombs": Kind(bombs, _bomb, 6),
    "links and pipes among images": Kind(data_trees, _tree, 5),
    "hostile run folders": Kind(run_folders, _beside, 8),
    "forged slides": Kind(slides, _slide, 1),
}
