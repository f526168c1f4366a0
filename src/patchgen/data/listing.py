"""Which files count as images, by name alone, and listing of folders."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from glob import has_magic
from pathlib import Path
from typing import NamedTuple

# Pillow's name of a format -> extensions. Pillow reads more formats, some by starting other programs.
FORMATS: dict[str, tuple[str, ...]] = {
    "JPEG": (".jpg", ".jpeg", ".jfif"),
    "PNG": (".png",),
    "PPM": (".ppm", ".pgm"),
    "BMP": (".bmp",),
    "DIB": (),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "GIF": (".gif",),  # the first frame
    "AVIF": (".avif",),
    "HEIF": (".heic", ".heif"),  # needs the extra `heic`
}
IMAGE_EXTENSIONS = tuple(ending for endings in FORMATS.values() for ending in endings)


class Files(NamedTuple):
    images: list[str]
    skipped: list[str]  # visible files that are not images


def is_visible(name: str) -> bool:
    """Whether a file or folder is used: not hidden, and not a leftover of an archive."""
    return not name.startswith(".") and name != "__MACOSX"


def visible_folders(folder: Path) -> list[Path]:
    """Visible sub-folders in code-point order of their names."""
    return sorted((p for p in folder.iterdir() if is_visible(p.name) and p.is_dir()), key=lambda p: p.name)


def is_image(name: str) -> bool:
    """Whether a file counts as an image: a visible name with a known extension, in any case."""
    return is_visible(name) and name.lower().endswith(IMAGE_EXTENSIONS)


def list_images(folder: Path) -> list[str]:
    """Images below a folder as relative posix paths, its own files before those of sub-folders (DomainBed's order).

    Links are followed, and a file with several names is listed once; ValueError for a link to a folder around it.
    """
    return list_files(folder).images


def list_files(folder: Path) -> Files:
    """`list_images`, and the other files that are not images."""
    files = list(_walk(folder, "", (os.path.realpath(folder),), None))
    images = sorted(file for file in files if is_image(file[1]))
    if any(linked for *_, linked in images):  # with links, real names come first
        first: dict[str, tuple[str, str, bool]] = {}
        for image in sorted(images, key=lambda image: image[2]):
            first.setdefault(os.path.realpath(folder / image[0] / image[1]), image)
        images = sorted(first.values())
    skipped = (file for file in files if not is_image(file[1]))
    return Files(*([f"{parent}/{name}".lstrip("/") for parent, name, _ in part] for part in (images, skipped)))


def _walk(
    folder: Path, parent: str, above: tuple[str, ...], visited: set[str] | None
) -> Iterator[tuple[str, str, bool]]:
    """(parent, name, reached through a link) of the visible files below a folder; `above`: its real parents."""
    # inside a link, the real folders visited there: links to links could double the work at each level
    behind: set[str] = set() if visited is None else visited
    with os.scandir(folder / parent) as entries:
        visible = sorted((entry for entry in entries if is_visible(entry.name)), key=lambda entry: entry.name)
    for entry in visible:
        link, name = entry.is_symlink(), entry.name
        if entry.is_dir():
            inner = f"{parent}/{name}".lstrip("/")
            real = os.path.realpath(entry.path) if link else os.path.join(above[-1], name)
            if link and any(path == real or path.startswith(real.rstrip(os.sep) + os.sep) for path in above):
                raise ValueError(f"'{entry.path}' links to '{real}', a folder that contains it; remove the link")
            if visited is None and not link:
                yield from _walk(folder, inner, (*above, real), None)
            elif real not in behind:
                behind.add(real)
                yield from _walk(folder, inner, (*above, real), behind)
        elif entry.is_file() or (link and is_image(name) and not os.path.exists(entry.path)):  # dangling: reported
            yield parent, name, link or visited is not None


def list_matching(pattern: Path) -> Files:
    """The files that a pattern with `**` matches, as paths; listed as by `list_files`, without link loops."""
    first = next(i for i, part in enumerate(pattern.parts) if has_magic(part))
    base, rest = Path(*pattern.parts[:first]), pattern.parts[first:]
    below = list_files(base) if base.is_dir() else Files([], [])
    return Files(*([str(base / name) for name in names if _matches(name.split("/"), rest)] for names in below))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern or not parts:
        return not parts and all(part == "**" for part in pattern)
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or _matches(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def skipped_line(names: Sequence[str]) -> str:
    kinds = Counter(os.path.splitext(name)[1].lower() or "without an ending" for name in names)
    text = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0])))
    files = "1 file" if len(names) == 1 else f"{len(names):,} files"
    return f"{files} skipped, no image by the ending: {text} (such as {names[0]})"


def finder(root: Path) -> Callable[[str], tuple[str, bool]]:
    """A function from a name to its real path, through links, and whether it is a file."""
    real_folder = cache(os.path.realpath)

    def find(name: str) -> tuple[str, bool]:
        file = os.path.join(root, name)
        folder, base = os.path.split(file)
        if "\0" in file:  # no path at all
            return file, False
        path = os.path.realpath(file) if os.path.islink(file) else os.path.join(real_folder(folder), base)
        return path, os.path.isfile(file)

    return find
