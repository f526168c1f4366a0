"""Files and folders that are whole or not there, also after a kill: a temporary name beside the target, then a rename.

    write_text(path, text)
    with replacing(path) as temporary: picture.save(temporary, "PNG")
    with replacing_folder(path) as temporary: write_text(temporary / "config.json", text)

A link to a file is followed; into a device or a pipe the content is written. A temporary name is locked by its
process: what nobody holds was left by a kill, and goes when a process first writes to that folder again.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.(?P<kind>tmp|old)", re.DOTALL)
LONGEST_NAME = 60  # characters of the target's name in a temporary one: a name has at most 255 bytes
AT_FDCWD, EXCHANGE = -100, 2
_cleaned: set[str] = set()


# Files


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name whose content becomes that of `path` when the block ends well; it is removed in any case."""
    if not is_replaceable(path):
        with tempfile.TemporaryDirectory(prefix="patchgen-") as folder:
            yield Path(folder) / "content"
            with open(Path(folder) / "content", "rb") as content, open(path, "wb") as stream:
                shutil.copyfileobj(content, stream)
        return
    target = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    clean(target.absolute().parent)
    temporary = temporary_name(target)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    try:
        with _locked(descriptor):
            yield temporary
            with open(temporary, "rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(temporary, target)
            _sync(target.absolute().parent)
    finally:
        temporary.unlink(missing_ok=True)


def is_replaceable(path: str | Path) -> bool:
    """False for what is there and no regular file: a device, a pipe, a terminal; also through a link."""
    try:
        found = os.stat(path)
    except OSError:  # not there yet, or a link to nowhere, which creates its file
        return True
    # behind a name such as /dev/stdout there may be a regular file, which others hold open
    return stat.S_ISREG(found.st_mode) and not os.path.abspath(path).startswith(("/dev/", "/proc/"))


def check_writable(path: str | Path, name: str) -> None:
    """Refuse a file or folder that could not be written, before any work is done for it; nothing is left behind.

    Args:
        name: What the user calls it, such as `--out`.

    Raises:
        ValueError: the first folder on the way that exists is a file, or nothing can be made in it.
    """
    target = Path(os.path.realpath(path))
    place = target if target.is_dir() else next(parent for parent in target.parents if os.path.lexists(parent))
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"{name} {path} cannot be written: in {place} nothing can be made ({error.strerror or error}); choose "
            "another place, or change its permissions"
        ) from error


def write_text(path: str | Path, text: str, errors: str = "strict") -> None:
    """Text as UTF-8; `errors` as in `str.encode`."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", errors))


def temporary_name(target: Path, kind: str = "tmp") -> Path:
    """A hidden name beside the target, of this call alone, also where machines share the folder."""
    name = target.name if kind == "old" else target.name[:LONGEST_NAME]  # an old one may have to go back
    return target.with_name(f".{name}.{secrets.token_hex(6)}.{kind}")


# Folders


@contextmanager
def replacing_folder(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """An empty folder that takes the place of `path` when the block ends well; there is a whole one at any moment.

    Args:
        sync: bring all of its files to the disk first; a cache of many files does without.
    """
    target = Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))
    with working_folder(target) as temporary:
        yield temporary
        for folder, _, names in os.walk(temporary) if sync else ():
            for name in names:
                with open(os.path.join(folder, name), "rb+") as handle:
                    os.fsync(handle.fileno())
            _sync(Path(folder))
        _take_place(temporary, target)
        _sync(target.parent)


@contextmanager
def working_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside the target, removed with all that is in it at the end, or after a kill by `clean`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    clean(target.parent)
    temporary = temporary_name(target)
    temporary.mkdir()
    try:
        with _locked(os.open(temporary, os.O_RDONLY) if os.name == "posix" else -1):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after an exchange it is the older one


def _take_place(new: Path, target: Path) -> None:
    if not target.exists() or not (any(target.iterdir()) or os.name == "nt"):
        os.replace(new, target)
    elif not _exchange(new, target):
        old = temporary_name(target, "old")  # a kill before the second rename: `clean` puts it back
        os.replace(target, old)
        os.replace(new, target)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return bool(library.renamex_np(os.fsencode(one), os.fsencode(other), EXCHANGE) == 0)
        return bool(library.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), EXCHANGE) == 0)
    except (OSError, AttributeError, TypeError):
        return False


# What a kill leaves


def clean(folder: Path) -> None:
    """Remove what dead processes left of their temporary names, once a process and folder."""
    if os.name != "posix" or str(folder) in _cleaned:
        return
    _cleaned.add(str(folder))
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            if found := LEFTOVER.fullmatch(entry.name):
                _remove_unheld(Path(entry.path), folder / found["name"], found["kind"])


def _remove_unheld(leftover: Path, target: Path, kind: str) -> None:
    with suppress(OSError):
        descriptor = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not lock(descriptor):
                return
            if kind == "old" and not target.exists():
                os.replace(leftover, target)
            elif stat.S_ISDIR(os.fstat(descriptor).st_mode):
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink()
        finally:
            os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Take the lock until the file is closed; False where another process has it."""
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Hold the lock meanwhile; where open files cannot be renamed, without it."""
    if os.name != "posix":
        if descriptor >= 0:
            os.close(descriptor)
        yield
        return
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if os.name == "posix":
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


# Links


def regular(path: str | Path) -> bool:
    """True for a plain file, also through links: nothing that waits for a writer, such as a pipe."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):  # not there, or no path at all
        return False


def refuse_pipe(path: str | Path) -> None:
    """Refuse a pipe or device where a file is read: it could wait for ever, or never end; `<(...)` is asked for.

    Raises:
        ValueError: names it.
    """
    asked = os.path.abspath(path).startswith(("/dev/", "/proc/"))
    if os.path.exists(path) and not os.path.isdir(path) and not regular(path) and not asked:
        raise ValueError(f"{path} is a pipe or device, and must be a file; remove it, or name another")


def not_through_links(path: str, flags: int) -> int:
    """An opener that refuses links and waits for no pipe: a folder of others may hold one that leads elsewhere."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)


def refuse_links(*paths: Path, within: Path | None = None) -> None:
    """Refuse folders that hold links, pipes or devices: written through, they would change files elsewhere.

    Args:
        within: a folder whose files may be linked to.

    Raises:
        ValueError: names the first one.
    """
    for path in paths:
        with suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(path):
                plain = entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)
                linked = within and Path(os.path.realpath(entry.path)).is_relative_to(os.path.realpath(within))
                if not plain and not linked:
                    kind = "a link" if entry.is_symlink() else "a pipe or device"
                    raise ValueError(
                        f"{path} holds {kind}, {entry.name[:100]!r}, and must hold plain files alone; remove it, or "
                        "copy the folder with `cp -rL`"
                    )


def cache_dir() -> Path:
    """`$PATCHGEN_CACHE`, else `$XDG_CACHE_HOME/patchgen`, else `~/.cache/patchgen`."""
    if chosen := os.environ.get("PATCHGEN_CACHE"):
        return expanded(chosen)
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "patchgen"


def expanded(path: str | Path) -> Path:
    """The path with `~` and `~user` resolved.

    Raises:
        ValueError: no such user, or no home folder is known.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path} begins with ~, and there is no such home folder; write the path out") from error
