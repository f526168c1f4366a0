"""Faults that are no kill: full disks, damaged files, a second process, a wrong clock, dying threads, NaN.

Each leaves either the right result or one clear sentence, and what was good before is good afterwards: once the fault
is gone, the same command ends with the numbers of an unbroken run.
"""

import itertools
import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from chaos.children import Ended, Work, command, count_file_events, problem, run
from chaos.ground import RUN, Line, result, words_of

NOBODY = 65534
UNFINISHED = ("state.safetensors", "selected.safetensors", "records.jsonl", "config.yaml", "splits.csv", "env.json")
FINISHED = ("selected.safetensors", "swad.safetensors", "records.jsonl", "config.yaml", "splits.csv", "env.json",
            "done", "summary.md")  # fmt: skip


class Faults:
    """A run to harm, stopped on its way and finished, and what it must become."""

    def __init__(self, ground: Path, seed: int, name: str) -> None:
        self.ground, self.rng, self.home = ground, random.Random(f"{seed} {name}"), ground / "faults" / name
        self.line = Line("faults", name)
        [self.finished] = (ground / "model").iterdir()
        self.unbroken = result(self.finished)
        self.places = (self.home / str(number) for number in itertools.count())

    def place(self) -> Path:
        place = next(self.places)
        place.mkdir(parents=True)
        return place

    def train(self, place: Path, *more: str) -> Work:
        return command("train", str(self.ground / "photos"), *words_of(RUN), *more, "--quiet", "--out", str(place))

    def result(self, place: Path) -> dict[str, str]:
        folder = next(place.glob("[!.]*/"), None)
        return {k: v for k, v in result(folder).items() if k != "diverged.json"} if folder else {}

    def expect_whole(self, place: Path, what: str, *more: str) -> None:
        """The same command without the fault gives the unbroken result."""
        ended = run(self.train(place, *more))
        expected = {**self.unbroken, "config.yaml": self.result(place).get("config.yaml")} if more else self.unbroken
        if ended.code or self.result(place) != expected:
            why = ended.said[-300:] if ended.code else "other results"
            self.line.wrong.append(f"{what}, then without the fault: {why}")

    def counted(self, what: str, work: Work, codes: tuple[int, ...] = (0, 1, 2)) -> Ended:
        ended = run(work)
        self.line.tried += 1
        self.line.hit += ended.code != 0
        if said := problem(ended, codes):
            self.line.wrong.append(f"{what}: {said}")
        return ended

    def try_one(self, what: str, work: Work, place: Path, needle: str = "") -> Ended:
        """Run with the fault: done all the same, or refused in one sentence that names what is needed."""
        ended = self.counted(what, work, (0, 2))
        if ended.code == 2 and needle not in ended.said:
            self.line.wrong.append(f"{what}: the error does not name {needle!r}: {ended.said[-200:]}")
        elif ended.code == 0 and (found := self.result(place)) and found != self.unbroken:
            self.line.wrong.append(f"{what}: done, with other results")
        return ended

    def must_stop(
        self, what: str, needle: str, cause: Callable[[], None], undo: Callable[[], object] = int, *more: str
    ) -> None:
        """A fault inside the run's process, which must stop and name it; without it, the result is the unbroken one."""
        place = self.place()

        def work() -> object:
            cause()
            return self.train(place, *more)()

        if self.try_one(what, work, place, needle).code == 0:
            self.line.wrong.append(f"{what}: not noticed")
        undo()
        self.expect_whole(place, what, *more)

    @cached_property
    def stopped(self) -> Path:
        """The run, killed on its way."""
        place = self.place()
        run(self.train(place), kill_at=round(0.6 * count_file_events(self.train(self.place()))))
        [folder] = place.iterdir()
        if not (folder / "checkpoints" / "state.safetensors").exists() or (folder / "done").exists():
            self.line.wrong.append("the run to damage was not stopped on its way")
        return folder

    @cached_property
    def predictions(self) -> dict[str, str]:
        place = self.place()
        photos = str(self.ground / "photos" / "studio")
        run(command("predict", str(self.finished), photos, "--csv", str(place / "found.csv")))
        return result(place)


# Damage


def damage(file: Path, rng: random.Random) -> str:
    """Truncate, flip a bit or empty; says what was done."""
    content = file.read_bytes()
    kind, at = rng.choice(("cut", "flip", "flip", "flip", "empty")), rng.randrange(max(1, len(content)))
    if kind == "flip" and content:
        changed = bytearray(content)
        changed[at] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
    else:
        file.write_bytes(content[:at] if kind == "cut" else b"")
    return f"{file.name}, {kind} at {at} of {len(content)}"


def _damaged_unfinished(faults: Faults) -> None:
    place = faults.place()
    shutil.copytree(faults.stopped, place / faults.stopped.name)
    [file] = place.rglob(faults.rng.choice(UNFINISHED))
    faults.try_one(damage(file, faults.rng), faults.train(place), place, needle=faults.stopped.name)
    shutil.rmtree(place)


def _damaged_finished(faults: Faults) -> None:
    expected, place = faults.predictions, faults.place()
    copy = place / faults.finished.name
    shutil.copytree(faults.finished, copy)
    name = faults.rng.choice(FINISHED)
    [file] = copy.rglob(name)
    what, photos = damage(file, faults.rng), str(faults.ground / "photos" / "studio")
    every: tuple[tuple[str, ...], ...] = (
        ("predict", str(copy), photos, "--csv", str(place / "found.csv")), ("runs", str(place)),
        ("report", str(place), "--out", str(place / "report")), ("runs", "diff", str(copy), str(faults.finished)),
    )  # fmt: skip
    words = every[0] if name == "selected.safetensors" else faults.rng.choice(every)
    ended = faults.counted(f"{what}, {words[0]}", command(*words))
    if words[0] == "predict" and not ended.code and {"found.csv": result(place)["found.csv"]} != expected:
        faults.line.wrong.append(f"{what}: other predictions")
    shutil.rmtree(place)


# Disks, processes and clocks


@contextmanager
def _small_disk(place: Path, kilobytes: int) -> Iterator[Callable[[int], object] | None]:
    """A small tmpfs at the place, and how to enlarge it; None where this user may not mount one."""

    def run(words: str) -> bool:
        return subprocess.run([*words.split(), str(place)], capture_output=True, check=False).returncode == 0

    if os.geteuid() or not run(f"mount -t tmpfs -o size={kilobytes}k none"):
        yield None
        return
    try:
        yield lambda size: run(f"mount -o remount,size={size}k")
    finally:
        run("umount -l")


def _full_disk(faults: Faults) -> None:
    """A disk that is full at a random size; where none can be mounted, files that cannot grow beyond it."""
    need = sum(file.stat().st_size for file in faults.finished.rglob("*") if file.is_file()) // 1024
    place, size = faults.place(), faults.rng.randint(4, need)
    with _small_disk(place, size) as enlarge:

        def work() -> object:
            if not enlarge:
                resource.setrlimit(resource.RLIMIT_FSIZE, (512 * size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            return faults.train(place)()

        faults.try_one(f"{size} kB", work, place)
        if enlarge:
            enlarge(1 << 16)
        faults.expect_whole(place, f"a disk of {size} kB")


def _read_only(faults: Faults) -> None:
    place = faults.place()
    place.chmod(0o555)

    def work() -> object:
        train = faults.train(place)
        if os.geteuid() == 0:  # for whom nothing is read-only
            import importlib.readers  # noqa: F401  later imports need it, and nobody may not read root's Python

            os.setuid(NOBODY)
        return train()

    if faults.try_one("read-only", work, place).code != 2:
        faults.line.wrong.append("a read-only folder was not refused")
    place.chmod(0o755)
    faults.expect_whole(place, "a read-only folder")


def _two_processes(faults: Faults) -> None:
    place = faults.place()

    def work() -> int:
        first = os.fork()
        if first == 0:
            os._exit(int(faults.train(place)() or 0))
        while not list(place.glob("*/env.json")):  # it holds the lock and has begun
            time.sleep(0.01)
        second = int(faults.train(place)() or 0)
        _, status = os.waitpid(first, 0)
        return os.waitstatus_to_exitcode(status) or second

    faults.try_one("a second process", work, place, needle="is being trained by another process")
    if faults.result(place) != faults.unbroken:
        faults.line.wrong.append("two processes: the first one's result is another")


def _clock(faults: Faults) -> None:
    place = faults.place()

    def work() -> object:
        whole, began = time.time, time.time()
        time.time = lambda: 2 * began - whole() - 3600  # type: ignore[assignment]
        return faults.train(place)()

    if faults.try_one("a clock that runs backwards", work, place).code:
        faults.line.wrong.append("a clock that runs backwards stopped a run")
    future = time.time() + 1e6
    for file in place.rglob("*"):
        os.utime(file, (future, future))
    if said := problem(run(command("runs", str(place))), codes=(0,)):
        faults.line.wrong.append(f"files from the future: {said}")


# Inside a run


def _around(owner: type, name: str, change: Callable[..., Any]) -> None:
    """Replace a method; `change` gets the old one and its arguments."""
    whole = getattr(owner, name)
    setattr(owner, name, lambda *args: change(whole, *args))


def _dying_thread(faults: Faults) -> None:
    call, calls = faults.rng.randint(2, 12), itertools.count(1)
    error = faults.rng.choice([MemoryError("no memory"), OSError(5, "Input/output error")])

    def dies(whole: Callable[..., Any], *args: Any) -> Any:
        if next(calls) == call:
            raise error
        return whole(*args)

    def cause() -> None:
        from patchgen.data.loaders import DomainBatches

        _around(DomainBatches, "_read", dies)

    faults.must_stop(f"{type(error).__name__} in the reading thread, call {call}", "", cause)


def _vanishing_image(faults: Faults) -> None:
    photos, aside = faults.ground / "photos" / "field", faults.ground / "photos" / ".field"
    number = faults.rng.randint(1, 9)

    def step(whole: Callable[..., Any], trainer: Any, current: int) -> Any:
        if current == number:
            os.rename(photos, aside)
        return whole(trainer, current)

    def cause() -> None:
        from patchgen.train.fold import FoldTrainer

        _around(FoldTrainer, "take_step", step)

    undo = partial(os.rename, aside, photos)
    faults.must_stop("a folder of images vanishes", "cannot read image", cause, undo, "--no-cache")


def _not_a_number(faults: Faults) -> None:
    """The run names the images of the first bad step, and keeps its last good state."""
    bad = faults.rng.randint(1, int(RUN["steps"]) - 1)

    def batch(whole: Callable[..., Any], trainer: Any, step: int) -> Any:
        found = whole(trainer, step)
        return replace(found, image=found.image * float("nan")) if step == bad else found

    def cause() -> None:
        from patchgen.train.fold import FoldTrainer

        _around(FoldTrainer, "_batch", batch)

    faults.must_stop(f"NaN at step {bad}", f"diverged at step {bad}:", cause)


FAULTS: dict[str, tuple[Callable[[Faults], None], float]] = {  # and how often, of all damaged files; at least once
    "damaged files of an unfinished run": (_damaged_unfinished, 0.5),
    "damaged files of a finished run": (_damaged_finished, 0.5),
    "full disk": (_full_disk, 0.1),
    "read-only folder": (_read_only, 0),
    "two processes on one run": (_two_processes, 0.05),
    "clock going back": (_clock, 0),
    "thread that reads images dies": (_dying_thread, 0.05),
    "image vanishes in the middle": (_vanishing_image, 0),
    "loss becomes NaN": (_not_a_number, 0.05),
}


def do_fault(name: str, damages: int, ground: Path, seed: int) -> Line:
    """One kind of fault, as often as belongs to so many damaged files in all."""
    (fault, share), faults = FAULTS[name], Faults(ground, seed, name)
    for _ in range(max(1, round(share * damages))):
        fault(faults)
    return faults.line
