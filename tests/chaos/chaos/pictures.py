"""Images as they should not be: every mode and format, then cut, flipped, forged, bombed or renamed.

name, content = build({"base": "palette.png", "change": "cut", "seed": 7})
"""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from forged import chunk
from hypothesis import strategies as st
from PIL import Image

Description = dict[str, Any]
ENDINGS = (".jpg", ".png", ".tif", ".bmp", ".webp", ".ppm")


def _noise(rng: random.Random, *shape: int, top: int = 256) -> np.ndarray:
    return np.random.default_rng(rng.getrandbits(32)).integers(0, top, shape)


def _saved(image: Image.Image, kind: str, **more: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **more)
    return target.getvalue()


def _rgb(rng: random.Random) -> Image.Image:
    return Image.fromarray(_noise(rng, rng.randint(1, 40), rng.randint(1, 40), 3).astype(np.uint8))


def _gray16(rng: random.Random) -> Image.Image:
    return Image.fromarray(_noise(rng, 20, 20, top=rng.choice([300, 4096, 65536])).astype(np.uint16))


def _exif(rng: random.Random) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = rng.randint(0, 12)  # orientation: 1 to 8 are right
    return _saved(_rgb(rng), "JPEG", exif=rng.choice([exif.tobytes(), b"Exif\0\0" + rng.randbytes(40)]))


def _animated(rng: random.Random, kind: str) -> bytes:
    frames = [Image.fromarray(_noise(rng, 16, 16, 3).astype(np.uint8)) for _ in range(3)]
    return _saved(frames[0], kind, save_all=True, append_images=frames[1:])


def _large(rng: random.Random) -> bytes:
    """A real bomb below the limit: 49 million pixels in some kilobytes."""
    return _saved(Image.new("1", (7000, 7000)), "PNG")


def _text_bomb(rng: random.Random) -> bytes:
    """A PNG whose compressed comment unpacks to 80 MB."""
    whole = _saved(_rgb(rng), "PNG")
    return whole[:33] + chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(80 << 20))) + whole[33:]


BASES: dict[str, Callable[[random.Random], bytes]] = {
    "rgb.png": lambda rng: _saved(_rgb(rng), "PNG"),
    "rgb.jpg": lambda rng: _saved(_rgb(rng), "JPEG"),
    "rgb.tif": lambda rng: _saved(_rgb(rng), "TIFF", compression=rng.choice([None, "tiff_lzw", "jpeg"])),
    "rgb.bmp": lambda rng: _saved(_rgb(rng), "BMP"),
    "rgb.webp": lambda rng: _saved(_rgb(rng), "WEBP", lossless=rng.random() < 0.5),
    "rgb.ppm": lambda rng: _saved(_rgb(rng), "PPM"),
    "progressive.jpg": lambda rng: _saved(_rgb(rng), "JPEG", progressive=True),
    "cmyk.jpg": lambda rng: _saved(_rgb(rng).convert("CMYK"), "JPEG"),
    "cmyk.tif": lambda rng: _saved(_rgb(rng).convert("CMYK"), "TIFF"),
    "alpha.png": lambda rng: _saved(Image.fromarray(_noise(rng, 9, 9, 4).astype(np.uint8)), "PNG"),
    "palette.png": lambda rng: _saved(_rgb(rng).quantize(8), "PNG", transparency=rng.randrange(8)),
    "gray16.png": lambda rng: _saved(_gray16(rng), "PNG"),
    "gray16.tif": lambda rng: _saved(_gray16(rng), "TIFF"),
    "gray16.pgm": lambda rng: _saved(_gray16(rng).convert("I"), "PPM"),
    "bilevel.png": lambda rng: _saved(_rgb(rng).convert("1"), "PNG"),
    "lab.tif": lambda rng: _saved(_rgb(rng).convert("LAB"), "TIFF"),
    "float.tif": lambda rng: _saved(Image.fromarray(_noise(rng, 9, 9).astype(np.float32)), "TIFF"),
    "pages.tif": lambda rng: _animated(rng, "TIFF"),
    "exif.jpg": _exif,
    "animated.webp": lambda rng: _animated(rng, "WEBP"),
    "animated.png": lambda rng: _animated(rng, "PNG"),
    "animated.gif": lambda rng: _animated(rng, "GIF"),
    "icon.ico": lambda rng: _saved(_rgb(rng).resize((16, 16)), "ICO"),
    "vector.eps": lambda rng: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n" + rng.randbytes(60),
    "text.txt": lambda rng: b"<html><body>404 Not Found</body></html>\n",
    "noise.bin": lambda rng: rng.randbytes(rng.randint(0, 400)),
    "large.png": _large,
    "comment.png": _text_bomb,
}


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8) if content else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flipped_header(content: bytes, rng: random.Random) -> bytes:
    return _flipped(content[:64], rng) + content[64:]


def _blanked(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.randint(1, 60))
    return content[:start] + bytes(end - start) + content[end:]


def _doubled(content: bytes, rng: random.Random) -> bytes:
    return _cut(content, rng) + content


def _huge(content: bytes, rng: random.Random) -> bytes:
    """The header claims a size that the pixels do not have."""
    width, height = (rng.choice([0, 1, 9000, 30_000, 65_535, 2**31 - 1]) for _ in range(2))
    if content.startswith(b"\x89PNG"):
        return content[:8] + chunk(b"IHDR", struct.pack(">II", width, height) + content[24:29]) + content[33:]
    if content.startswith(b"BM"):
        return content[:18] + struct.pack("<ii", width, -height if rng.random() < 0.3 else height) + content[26:]
    if content.startswith(b"GIF"):
        return content[:6] + struct.pack("<HH", width % 65536, height % 65536) + content[10:]
    if content.startswith(b"\xff\xd8"):
        frame = max(content.find(b"\xff\xc0"), content.find(b"\xff\xc2"))
        return content[: frame + 5] + struct.pack(">HH", height % 65536, width % 65536) + content[frame + 9 :]
    return content.replace(b"\n", b"\n%d %d\n" % (width, height), 1) if content.startswith(b"P") else content


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "none": lambda content, rng: content,
    "cut": _cut,
    "flipped": _flipped,
    "flipped header": _flipped_header,
    "blanked": _blanked,
    "doubled": _doubled,
    "huge": _huge,
    "empty": lambda content, rng: b"",
}
NAMES = (
    "plain",
    "two words",
    "ünï",
    "a\nb",
    "a\tb",
    "-dash",
    "--csv",
    "%s",
    "[x]",
    "a" * 200,
    "q'\"",
    "\x01\x7f",
    "📷",
)

pictures = st.fixed_dictionaries(
    {
        "base": st.sampled_from(sorted(BASES)),
        "change": st.sampled_from(sorted(CHANGES)),
        "name": st.sampled_from(NAMES),
        "right_ending": st.booleans(),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def build(description: Description) -> tuple[str, bytes]:
    """A file name with a known ending, right or wrong, and its content."""
    rng = random.Random(description["seed"])
    content = CHANGES[description["change"]](BASES[description["base"]](rng), rng)
    ending = "." + description["base"].rpartition(".")[2]
    right = description["right_ending"] and ending in ENDINGS
    return description["name"] + (ending if right else rng.choice(ENDINGS)), content
