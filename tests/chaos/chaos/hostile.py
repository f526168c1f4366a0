"""Folders, images and links that somebody made to do harm: bombs, loops, pipes, nonsense, forged slides.

Whatever they are, a command ends soon and in words, what is good among them is still used, and nothing outside of the
given folders is written.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from PIL import Image

from chaos.faults import damage
from chaos.ground import RUN, words_of
from chaos.inputs import REFUSED, Kind, _command, _judged, _predicted

SEEDS = st.integers(0, 2**32 - 1)
PRECIOUS = "precious"


def _with_seed(**choices: tuple[str, ...]) -> SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"seed": SEEDS, **{name: st.sampled_from(values) for name, values in choices.items()}})


# Bombs


def repeated_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG of one colour, whose last scan is repeated."""
    target = io.BytesIO()
    Image.new("L", (side, side), 77).save(target, "JPEG", progressive=True)
    data = target.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * scans + data[-2:]


def one_part_tiff(part: bytes, side: int, compression: int, tile: int) -> bytes:
    """A gray TIFF of one strip, or of one tile of that side."""
    place = (
        [(322, tile), (323, tile), (324, 8), (325, len(part))] if tile else [(273, 8), (278, side), (279, len(part))]
    )
    tags = [(256, side), (257, side), (258, 8), (259, compression), (262, 1), (277, 1), *place]
    part += b"\0" * (len(part) % 2)
    rows = b"".join(struct.pack("<HHLL", tag, 4, 1, number) for tag, number in sorted(tags))
    return struct.pack("<2sHL", b"II", 42, 8 + len(part)) + part + struct.pack("<H", len(tags)) + rows + bytes(4)


def long_png(rng: random.Random) -> bytes:
    """A PNG of one colour, long or large."""
    width, height = rng.choice([(1, 89_000_000), (89_000_000, 1), (60_000, 1_400), (1, 65_536), (30_000, 30_000)])

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, rng.choice([0, 2, 6]), 0, 0, 0)
    body = zlib.compress(bytes(rng.choice([10, 10**6, 10**8])), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def _scans(rng: random.Random) -> bytes:
    return repeated_scans(rng.choice([64, 500, 3000, 6000]), rng.choice([3, 60, 99, 3000]))


def _scans_in_tiff(rng: random.Random) -> bytes:
    side = rng.choice([64, 500, 3000, 8000])
    return one_part_tiff(repeated_scans(side, rng.choice([3, 60, 99, 3000])), side, 7, rng.choice([0, side]))


def _tile(rng: random.Random) -> bytes:
    part = zlib.compress(bytes(rng.choice([10, 10**8])), 1)
    return one_part_tiff(part, rng.choice([10, 4000]), 8, rng.choice([16, 4096, 1 << 15, 1 << 20, (1 << 31) - 16]))


def _parts(rng: random.Random) -> bytes:
    """A TIFF of many JPEGs that begin at one place and have no length."""
    count, part = rng.choice([1, 2, 1000, 100_000]), repeated_scans(8, 0)
    end = 8 + len(part) + len(part) % 2
    tags = [(256, 1, 8), (257, 1, 8), (258, 1, 8), (259, 1, 7), (262, 1, 1), (273, count, end if count > 1 else 8),
            (277, 1, 1), (278, 1, 8), (279, count, end + 4 * count if count > 1 else 0)]  # fmt: skip
    rows = b"".join(struct.pack("<HHLL", tag, 4, length, number) for tag, length, number in tags)
    head = struct.pack("<2sHL", b"II", 42, end + 8 * count) + part
    places = struct.pack(f"<{count}L", *[8] * count) + bytes(4 * count)
    return head.ljust(end, b"\0") + places + struct.pack("<H", len(tags)) + rows + bytes(4)


BOMBS: dict[str, Callable[[random.Random], bytes]] = {
    "scans.jpg": _scans,
    "scans.tif": _scans_in_tiff,
    "tile.tif": _tile,
    "parts.tif": _parts,
    "long.png": long_png,
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
             "predict": ["predict", _model(), "data", "--csv", "found.csv"],
             "pattern": ["predict", _model(), "data/**/*.png", "--csv", "found.csv"],
             "train": ["train", "data", *words_of({**RUN, "steps": 1, "swad": False}), "--quiet"]}  # fmt: skip
    said = _judged(drawn, *_command(*words[drawn["command"]]))
    return said if _untouched(place) else f"{drawn!r:.300}: a file outside was changed"


def _model() -> str:
    return str(next(Path("model").iterdir()))


def _untouched(place: Path) -> bool:
    return (place / PRECIOUS).read_text() == PRECIOUS


# Run folders

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
NONSENSE = (b"", b"[]", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 3000, b"null", b"9" * 5000, LAUGHS.encode(),
            b'{"error": 5}', b"'<img src=x onerror=alert(1)>': 1\n", b"x" * 100_000,
            b"a: !!python/object:os.system x")  # fmt: skip
run_folders = st.fixed_dictionaries(
    {
        "file": st.sampled_from(
            ("config.yaml", "records.jsonl", "env.json", "splits.csv", "done", "failed.json", "summary.md", ".lock",
             "checkpoints", "checkpoints/selected.safetensors", "checkpoints/state.safetensors")
        ),
        "change": st.sampled_from(("link", "pipe", "damage", "nonsense", "folder", "gone")),
        "command": st.sampled_from(("runs", "report", "predict", "train", "explain", "diff")),
        "nonsense": st.sampled_from(NONSENSE),
        "seed": SEEDS,
    }
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


def _run_folder(place: Path, drawn: dict[str, Any]) -> str:
    """Beside a good run, which `runs` must still list."""
    home, source = place / "runs", Path(_model()).resolve()
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
    if not _untouched(place):
        return f"{drawn!r:.300}: a file outside was changed"
    if drawn["command"] == "runs" and "good" not in out:
        return f"{drawn!r:.300}: the good run is not listed"
    return _judged(drawn, code, out, errors)


# Model folders

FIELDS = ("temperature", "classes", "backbone", "settings", "method", "unlike_threshold", "weights", "sha256", "format",
          "calibration", "expected", "auto_map", "plugins")  # fmt: skip
VALUES: tuple[Any, ...] = (None, 0, -1, 1e-30, float("nan"), float("inf"), "x", [], {}, True, ["a", "a"], [[[]]],
                           {"AutoModel": "evil.py"}, ["evil.py"], "../../x", 10**30, "<script>",
                           "x" * 10_000)  # fmt: skip
model_folders = st.fixed_dictionaries(
    {
        "file": st.sampled_from(("config.json", "config.json", "model.safetensors", "README.md", "evil.py")),
        "change": st.sampled_from(("field", "field", "inner", "link", "pipe", "damage", "nonsense", "folder", "gone")),
        "field": st.sampled_from(FIELDS),
        "value": st.sampled_from(VALUES),
        "nonsense": st.sampled_from(NONSENSE),
        "seed": SEEDS,
    }
)


def _model_folder(place: Path, drawn: dict[str, Any]) -> str:
    folder = place / "given"
    shutil.copytree(Path("fitted/newer").resolve(), folder)
    (place / PRECIOUS).write_text(PRECIOUS)
    if drawn["change"] in ("field", "inner"):
        facts = json.loads((folder / "config.json").read_text())
        rng = random.Random(drawn["seed"])
        inner = [value for value in facts.values() if isinstance(value, dict) and value]
        holder = rng.choice(inner) if drawn["change"] == "inner" else facts
        holder[rng.choice(sorted(holder)) if drawn["change"] == "inner" else drawn["field"]] = drawn["value"]
        (folder / "config.json").write_text(json.dumps(facts))
    else:
        _spoil(folder, drawn, place / PRECIOUS)
    code, out, errors = _command("predict", str(folder), "photos/studio/circle/00.png")
    return _judged(drawn, code, out, errors) if _untouched(place) else f"{drawn!r:.300}: a file outside was changed"


# Slides

slides = _with_seed(change=("tile", "side", "flip", "cut", "scale", "offsets", "none"))


def _forge(data: bytearray, change: str, rng: random.Random) -> bytes:
    """A pyramid TIFF whose directories lie, or whose bytes are damaged."""
    tags = {"tile": (322, 323), "side": (256, 257), "offsets": (324, 325), "scale": (282, 283)}
    offset = struct.unpack_from("<I", data, 4)[0]
    while offset and change in tags:
        count = struct.unpack_from("<H", data, offset)[0]
        for entry in range(offset + 2, offset + 2 + 12 * count, 12):
            if struct.unpack_from("<H", data, entry)[0] in tags[change] and rng.random() < 0.7:
                struct.pack_into("<I", data, entry + 8, rng.choice([0, 1, 16, 8192, 1 << 15, 1 << 24, (1 << 32) - 16]))
        offset = struct.unpack_from("<I", data, offset + 2 + 12 * count)[0]
    if change == "flip":
        for _ in range(rng.randint(1, 40)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data[: rng.randrange(len(data))] if change == "cut" else data)


def _slide(place: Path, drawn: dict[str, Any]) -> str:
    """Before a good slide, which must be predicted whatever the first one is."""
    from patchgen.slides.pyramid import write_pyramid

    pixels = np.full((600, 600, 3), 244, np.uint8)
    pixels[100:500, 100:500] = np.random.default_rng(0).integers(90, 190, (400, 400, 3))
    for name in ("bad", "good"):
        write_pyramid(place / f"{name}.tif", pixels, (0.5, 0.5))
    content = bytearray((place / "bad.tif").read_bytes())
    (place / "bad.tif").write_bytes(_forge(content, drawn["change"], random.Random(drawn["seed"])))
    code, out, errors = _command("slide", _model(), "bad.tif", "good.tif", "--tile", "64", "--out", "out")
    if not (place / "out" / "good" / "tiles.csv").is_file():
        return f"{drawn!r:.300}: the good slide is lost: {errors[-200:]}"
    return _judged(drawn, code, out, errors) or (REFUSED if "could not be" in errors else "")


HOSTILE: dict[str, Kind] = {
    "image bombs": (bombs, _bomb, 6),
    "links and pipes among images": (data_trees, _tree, 5),
    "hostile run folders": (run_folders, _run_folder, 5),
    "hostile model folders": (model_folders, _model_folder, 3),
    "forged slides": (slides, _slide, 1),
}
