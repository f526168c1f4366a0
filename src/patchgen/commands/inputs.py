"""Images that are named on the command line, and the report of those that could not be read."""

import os
import sys
from collections.abc import Mapping, Sequence
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.common.files import expanded
from patchgen.common.text import printable

if TYPE_CHECKING:
    from patchgen.predict.predictor import Unreadable
    from patchgen.slides.slide import UnreadableSlide


def find_images(words: Sequence[str]) -> list[Path]:
    """Files as they are, images below folders, matches of patterns: each once, in the order of the words.

    Files of a folder or pattern that are not images are counted and named on stderr.

    Raises:
        ValueError: an argument that matches no image.
    """
    from patchgen.data.listing import skipped_line

    found: dict[Path, None] = {}
    for word in words:
        images, skipped, problem = _images_of(word)
        if not images:
            raise ValueError(f"no image found: {problem}" + (f"; {skipped_line(skipped)}" if skipped else ""))
        if skipped:
            print(f"{printable(word)}: {printable(skipped_line(skipped))}", file=sys.stderr)
        found.update(dict.fromkeys(images))
    if not found:
        raise ValueError("no image given; name files, folders or patterns such as 'photos/**/*.jpg' after the model")
    return list(found)


def _images_of(word: str) -> tuple[list[Path], list[str], str]:
    """The images that an argument matches, the names of other files there, and what to say if there is no image."""
    from patchgen.data.listing import IMAGE_EXTENSIONS, is_image, list_files, list_matching

    path, endings = expanded(word), " ".join(IMAGE_EXTENSIONS)
    if not word.strip():  # Path("") would be the current folder
        return [], [], "a word is empty (an unset variable?)"
    if path.is_dir():
        files, problem = list_files(path), f"the folder {printable(word)} and its sub-folders hold none ({endings})"
        return [path / name for name in files.images], files.skipped, problem
    if path.exists():
        if not os.path.isfile(path):
            raise ValueError(f"{printable(word)} is a pipe or device, and an image is a file; save it to one first")
        return [path], [], ""
    if not has_magic(word):
        there = next(parent for parent in path.absolute().parents if parent.exists())
        return [], [], f"{printable(word)} does not exist (the path exists up to {printable(there)})"
    problem = f"no file with a known ending ({endings}) matches the pattern {printable(word)}"
    if "**" in path.parts:
        files = list_matching(path)
        return sorted(map(Path, files.images)), [os.path.basename(name) for name in files.skipped], problem
    matches = [path for path in sorted(map(Path, glob(str(path)))) if path.is_file()]
    images = [match for match in matches if is_image(match.name)]
    once = {os.path.realpath(image): image for image in reversed(images)}  # a link may lead to a parent folder
    return sorted(once.values()), [match.name for match in matches if not is_image(match.name)], problem


def report_unreadable(
    failed: "Sequence[Unreadable | UnreadableSlide]", total: int, strict: bool, what: str = "images could not be read"
) -> int:
    """List unreadable images on stderr; the exit code is 1 if all are unreadable or, with `strict`, any."""
    if failed:
        print(f"{len(failed)} of {total} {what}:", file=sys.stderr)
        for one in failed:
            print(f"  {printable(one.path)}: {printable(one.reason)}", file=sys.stderr)
    return 1 if failed and (strict or len(failed) == total) else 0


def report_slides(failures: Mapping[str, str], total: int, strict: bool) -> int:
    """The same for slides and the reasons why they could not be used."""
    from patchgen.slides.slide import UnreadableSlide

    unreadable = [UnreadableSlide(path, reason.removeprefix(f"cannot use slide {path}: ").strip().splitlines()[-1])
                  for path, reason in failures.items()]  # fmt: skip
    return report_unreadable(unreadable, total, strict, "slides could not be read")
