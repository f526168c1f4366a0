"""Images as they should not be: every mode and format, then cut, flipped, forged, bombed or renamed.

name, content = build({"base": "palette.png", "change": "cut", "seed": 7})
"""

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

ENDINGS = (".jpg", ".png", ".tif", ".bmp", ".webp", ".ppm")
Write = Callable[[random.Random], bytes]


def _noise(rng: random.Random, *shape: int, top: int = 256) -> np.ndarray:
    return np.random.default_rng(rng.getrandbits(32)).integers(0, top, shape)


def _image(rng: random.Random, *shape: int) -> Image.Image:
    shape = shape or (rng.randint(1, 40), rng.randint(1, 40), 3)
    return Image.fromarray(_noise(rng, *shape).astype(np.uint8))


def _saved(image: Image.Image, kind: str, **more: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, kind, **more)
    return target.getvalue()


def _as(kind: str, mode: str = "RGB", **more: Any) -> Write:
    return lambda rng: _saved(_image(rng).convert(mode), kind, **more)


def _gray16(kind: str, mode: str = "I;16") -> Write:
    def write(rng: random.Random) -> bytes:
        values = _noise(rng, 20, 20, top=rng.choice([300, 4096, 65536])).astype(np.uint16)
        return _saved(Image.fromarray(values).convert(mode), kind)

    return write


def _exif(rng: random.Random) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = rng.randint(0, 12)  # orientation: 1 to 8 are right
    return _saved(_image(rng), "JPEG", exif=rng.choice([exif.tobytes(), b"Exif\0\0" + rng.randbytes(40)]))


def _animated(kind: str) -> Write:
    return lambda rng: _saved(
        _image(rng, 16, 16, 3), kind, save_all=True, append_images=[_image(rng, 16, 16, 3) for _ in range(2)]
    )


def _text_bomb(rng: random.Random) -> bytes:
    """A PNG whose compressed comment unpacks to 80 MB."""
    whole = _saved(_image(rng), "PNG")
    return whole[:33] + chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(80 << 20))) + whole[33:]


BASES: dict[str, Write] = {
    "rgb.png": _as("PNG"),
    "rgb.jpg": _as("JPEG"),
    "rgb.tif": lambda rng: _as("TIFF", compression=rng.choice([None, "tiff_lzw", "jpeg"]))(rng),
    "rgb.bmp": _as("BMP"),
    "rgb.webp": lambda rng: _as("WEBP", lossless=rng.random() < 0.5)(rng),
    "rgb.ppm": _as("PPM"),
    "progressive.jpg": _as("JPEG", progressive=True),
    "cmyk.jpg": _as("JPEG", "CMYK"),
    "cmyk.tif": _as("TIFF", "CMYK"),
    "alpha.png": lambda rng: _saved(_image(rng, 9, 9, 4), "PNG"),
    "palette.png": lambda rng: _saved(_image(rng).quantize(8), "PNG", transparency=rng.randrange(8)),
    "gray16.png": _gray16("PNG"),
    "gray16.tif": _gray16("TIFF"),
    "gray16.pgm": _gray16("PPM", "I"),
    "bilevel.png": _as("PNG", "1"),
    "lab.tif": _as("TIFF", "LAB"),
    "float.tif": lambda rng: _saved(Image.fromarray(_noise(rng, 9, 9).astype(np.float32)), "TIFF"),
    "pages.tif": _animated("TIFF"),
    "exif.jpg": _exif,
    "animated.webp": _animated("WEBP"),
    "animated.png": _animated("PNG"),
    "animated.gif": _animated("GIF"),
    "icon.ico": lambda rng: _saved(_image(rng, 16, 16, 3), "ICO"),
    "vector.eps": lambda rng: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n" + rng.randbytes(60),
    "text.txt": lambda rng: b"<html><body>404 Not Found</body></html>\n",
    "noise.bin": lambda rng: rng.randbytes(rng.randint(0, 400)),
    "large.png": lambda rng: _saved(Image.new("1", (7000, 7000)), "PNG"),  # 49 million pixels: a bomb below the limit
    "comment.png": _text_bomb,
}


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8) if content else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _blanked(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.randint(1, 60))
    return content[:start] + bytes(end - start) + content[end:]


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
    "flipped header": lambda content, rng: _flipped(content[:64], rng) + content[64:],
    "blanked": _blanked,
    "doubled": lambda content, rng: _cut(content, rng) + content,
    "huge": _huge,
    "empty": lambda content, rng: b"",
}
NAMES = ("plain", "two words", "ünï", "a\nb", "a\tb", "-dash", "--csv", "%s", "[x]", "a" * 200, "q'\"", "\x01\x7f",
         "📷")  # fmt: skip

_choices = {"base": sorted(BASES), "change": sorted(CHANGES), "name": NAMES, "right_ending": [False, True]}
_draws = {name: st.sampled_from(choices) for name, choices in _choices.items()}
pictures = st.fixed_dictionaries({**_draws, "seed": st.integers(0, 2**32 - 1)})


def build(description: dict[str, Any]) -> tuple[str, bytes]:
    """A file name with a known ending, right or wrong, and its content."""
    rng = random.Random(description["seed"])
    content = CHANGES[description["change"]](BASES[description["base"]](rng), rng)
    ending = "." + description["base"].rpartition(".")[2]
    right = description["right_ending"] and ending in ENDINGS
    return description["name"] + (ending if right else rng.choice(ENDINGS)), content
