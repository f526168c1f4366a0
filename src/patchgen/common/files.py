"""Atomic writes of files and folders, safe against kills: a temporary name next to the target, then a rename.

A link to a file is followed; devices and pipes are written to directly. A temporary name is locked by its process:
unlocked ones were left by a kill, and are removed when a process first writes to that folder again.
"""

import csv
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from patchgen.common.text import csv_cell

LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}\.(?P<kind>tmp|old)", re.DOTALL)
LONGEST_NAME = 60  # characters of the target's name in a temporary one: a name has at most 255 bytes
AT_FDCWD, EXCHANGE = -100, 2
SYSTEM = ("/dev/", "/proc/")
_cleaned: set[str] = set()


# Files


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary name that replaces `path` if the block succeeds; it is removed in any case."""
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
        lock(descriptor)
        yield temporary
        with open(temporary, "rb+") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, target)
        _sync(target.absolute().parent)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def is_replaceable(path: str | Path) -> bool:
    """False for existing paths that are not regular files: a device, a pipe, a terminal; also through a link."""
    # a name such as /dev/stdout may refer to a regular file that other processes hold open
    return not os.path.exists(path) or (os.path.isfile(path) and not os.path.abspath(path).startswith(SYSTEM))


def check_writable(path: str | Path, name: str) -> None:
    """ValueError, with the option's name, if a file or folder cannot be written; checked before any work."""
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
    """A hidden, unique name next to the target, even if several machines share the folder."""
    name = target.name if kind == "old" else target.name[:LONGEST_NAME]  # an old folder may have to be restored
    return target.with_name(f".{name}.{secrets.token_hex(6)}.{kind}")


# Folders


@contextmanager
def replacing_folder(path: str | Path, *, sync: bool = True) -> Iterator[Path]:
    """An empty folder that replaces `path` if the block succeeds, always complete; `sync` flushes its files before."""
    target = Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))
    with working_folder(target) as temporary:
        yield temporary
        for folder, _, names in os.walk(temporary) if sync else ():
            for name in names:
                with open(os.path.join(folder, name), "rb+") as handle:
                    os.fsync(handle.fileno())
            _sync(Path(folder))
        if not target.exists() or not any(target.iterdir()):
            os.replace(temporary, target)
        elif not _exchange(temporary, target):
            old = temporary_name(target, "old")  # after a kill before the second rename, `clean` restores it
            os.replace(target, old)
            os.replace(temporary, target)
            shutil.rmtree(old, ignore_errors=True)
        _sync(target.parent)


@contextmanager
def working_folder(target: Path) -> Iterator[Path]:
    """A hidden folder next to the target, removed with its content at the end, or by `clean` after a kill."""
    target.parent.mkdir(parents=True, exist_ok=True)
    clean(target.parent)
    while True:  # before its lock is held, another process may `clean` it away
        temporary = temporary_name(target)
        temporary.mkdir()
        with suppress(FileNotFoundError):
            descriptor = os.open(temporary, os.O_RDONLY)
            if lock(descriptor) and temporary.exists():
                break
            os.close(descriptor)
    try:
        yield temporary
    finally:
        os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)  # after an exchange this is the old one


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False if the system or the file system does not support it."""
    import ctypes  # takes longer than all other imports of this module

    try:
        library = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return bool(library.renamex_np(os.fsencode(one), os.fsencode(other), EXCHANGE) == 0)
        return bool(library.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), EXCHANGE) == 0)
    except (OSError, AttributeError, TypeError):
        return False


# Leftovers of killed processes


def clean(folder: Path) -> None:
    """Remove temporary files of dead processes, once per process and folder."""
    if str(folder) in _cleaned:
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
    """Take the lock until the file is closed; False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# Links


def refuse_pipe(path: str | Path) -> None:
    """ValueError for a pipe or device where a file is expected: reading could block forever; `<(...)` is allowed."""
    asked = os.path.abspath(path).startswith(SYSTEM)
    if os.path.exists(path) and not os.path.isdir(path) and not os.path.isfile(path) and not asked:
        raise ValueError(f"{path} is a pipe or device, and must be a file; remove it, or name another")


def not_through_links(path: str, flags: int) -> int:
    """An opener that rejects links and does not wait for pipes: links in untrusted folders may lead elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def refuse_links(*paths: Path, within: Path | None = None) -> None:
    """ValueError for folders with links, but to files `within` a folder, or with pipes or devices."""
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
    """The path with `~` and `~user` resolved; ValueError: no such user, or no home folder is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path} begins with ~, and there is no such home folder; write the path out") from error


# CSV


def write_csv(path: str | Path, header: Sequence[str], rows: Iterable[Sequence[str]], people: bool = False) -> None:
    """Write a CSV file; for `people`, who open it in a spreadsheet, no cell is a formula."""
    if people:
        header, rows = [csv_cell(cell) for cell in header], ([csv_cell(str(cell)) for cell in row] for row in rows)
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def read_csv(path: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Header (stripped, lower case) and rows as (line number, cells) of a UTF-8 CSV file."""
    rows: list[tuple[int, dict[str, str]]] = []
    refuse_pipe(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, strict=True)
            header = [name.strip().lower() for name in next(reader, [])]
            for cells in filter(None, reader):
                if len(cells) != len(header):
                    raise ValueError(
                        f"'{path}', line {reader.line_num}: {len(cells)} cells where the header has {len(header)}. "
                        "Put a cell that contains a comma between double quotes."
                    )
                rows.append((reader.line_num, dict(zip(header, cells, strict=True))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"'{path}' cannot be read as CSV ({error}). Save it as comma-separated UTF-8.") from error
    return header, rows
