"""Faults that are no kill: full disks, damaged files, a second process, a wrong clock, dying threads, NaN.

Each leaves either the right result or one clear sentence, and what was good before is good afterwards: once the fault
is gone, the same command ends with the numbers of an unbroken run.
"""

from __future__ import annotations

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from chaos.children import Ended, Work, command, count_file_events, problem, run
from chaos.ground import RUN, result, words_of
from chaos.ledger import Ledger, Line

NOBODY = 65534
UNFINISHED = ("state.safetensors", "selected.safetensors", "records.jsonl", "config.yaml", "splits.csv", "env.json")
FINISHED = ("selected.safetensors", "swad.safetensors", "records.jsonl", "config.yaml", "splits.csv", "env.json",
            "done", "summary.md")  # fmt: skip


class Faults:
    """A run to harm, stopped on its way and finished, and what it must become."""

    def __init__(self, ground: Path, seed: int, name: str) -> None:
        self.ground, self.rng, self.home = ground, random.Random(f"{seed} {name}"), ground / "faults" / name
        [self.finished] = (ground / "model").iterdir()
        self.unbroken = result(self.finished)
        self.count = 0

    def place(self) -> Path:
        self.count += 1
        found = self.home / str(self.count)
        found.mkdir(parents=True)
        return found

    def train(self, place: Path, *more: str) -> Work:
        return command("train", str(self.ground / "photos"), *words_of(RUN), *more, "--quiet", "--out", str(place))

    def result(self, place: Path) -> dict[str, str]:
        found = next(place.glob("[!.]*/"), None)
        return {k: v for k, v in result(found).items() if k != "diverged.json"} if found else {}

    def expect_whole(self, line: Line, place: Path, what: str, *more: str) -> None:
        """The same command without the fault gives the unbroken result."""
        ended = run(self.train(place, *more))
        expected = {**self.unbroken, "config.yaml": self.result(place).get("config.yaml")} if more else self.unbroken
        if ended.code or self.result(place) != expected:
            why = ended.said[-300:] if ended.code else "other results"
            line.wrong.append(f"{what}, then without the fault: {why}")

    def counted(self, line: Line, what: str, work: Work, codes: tuple[int, ...] = (0, 1, 2)) -> Ended:
        ended = run(work)
        line.tried += 1
        line.hit += ended.code != 0
        if said := problem(ended, codes):
            line.wrong.append(f"{what}: {said}")
        return ended

    def try_one(self, line: Line, what: str, work: Work, place: Path, needle: str = "") -> Ended:
        """Run with the fault: done all the same, or refused in one sentence that names what is needed."""
        ended = self.counted(line, what, work, (0, 2))
        if ended.code == 2 and needle not in ended.said:
            line.wrong.append(f"{what}: the error does not name {needle!r}: {ended.said[-200:]}")
        elif ended.code == 0 and (found := self.result(place)) and found != self.unbroken:
            line.wrong.append(f"{what}: done, with other results")
        return ended


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


def _damaged_unfinished(faults: Faults, line: Line, times: int) -> None:
    stopped = faults.place()
    events = count_file_events(faults.train(faults.place()))
    run(faults.train(stopped), kill_at=round(0.6 * events))
    [folder] = stopped.iterdir()
    if not (folder / "checkpoints" / "state.safetensors").exists() or (folder / "done").exists():
        line.wrong.append("the run to damage was not stopped on its way")
    for _ in range(times):
        place = faults.place()
        shutil.copytree(stopped, place, dirs_exist_ok=True)
        name = faults.rng.choice(UNFINISHED)
        [file] = place.rglob(name)
        what = damage(file, faults.rng)
        faults.try_one(line, what, faults.train(place), place, needle=folder.name)
        shutil.rmtree(place)


def _damaged_finished(faults: Faults, line: Line, times: int) -> None:
    photos, reference = str(faults.ground / "photos" / "studio"), faults.place()
    run(command("predict", str(faults.finished), photos, "--csv", str(reference / "found.csv")))
    expected = result(reference)
    for _ in range(times):
        place = faults.place()
        copy = place / faults.finished.name
        shutil.copytree(faults.finished, copy)
        name = faults.rng.choice(FINISHED)
        [file] = copy.rglob(name)
        what = damage(file, faults.rng)
        words: tuple[tuple[str, ...], ...] = (
            ("predict", str(copy), photos, "--csv", str(place / "found.csv")), ("runs", str(place)),
            ("report", str(place), "--out", str(place / "report")), ("runs", "diff", str(copy), str(faults.finished)),
        )  # fmt: skip
        chosen = words[0] if name == "selected.safetensors" else faults.rng.choice(words)
        ended = faults.counted(line, f"{what}, {chosen[0]}", command(*chosen))
        if chosen[0] == "predict" and not ended.code and {"found.csv": result(place)["found.csv"]} != expected:
            line.wrong.append(f"{what}: other predictions")
        shutil.rmtree(place)


# Disks and processes


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


def _full_disk(faults: Faults, line: Line, times: int) -> None:
    """A disk that is full at a random size; where none can be mounted, files that cannot grow beyond it."""
    need = sum(file.stat().st_size for file in faults.finished.rglob("*") if file.is_file()) // 1024
    for _ in range(times):
        place, size = faults.place(), faults.rng.randint(4, need)
        with _small_disk(place, size) as enlarge:
            work = faults.train(place) if enlarge else _with_small_files(faults.train(place), 512 * size)
            faults.try_one(line, f"{size} kB", work, place)
            if enlarge:
                enlarge(1 << 16)
            faults.expect_whole(line, place, f"a disk of {size} kB")


def _with_small_files(work: Work, size: int) -> Work:
    def limited() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return work()

    return limited


def _read_only(faults: Faults, line: Line, times: int) -> None:
    place = faults.place()
    place.chmod(0o555)

    def work() -> object:
        train = faults.train(place)
        if os.geteuid() == 0:  # for whom nothing is read-only
            import importlib.readers  # noqa: F401  later imports need it, and nobody may not read root's Python

            os.setuid(NOBODY)
        return train()

    for _ in range(times):
        if faults.try_one(line, "read-only", work, place).code != 2:
            line.wrong.append("a read-only folder was not refused")
    place.chmod(0o755)
    faults.expect_whole(line, place, "a read-only folder")


def _two_processes(faults: Faults, line: Line, times: int) -> None:
    for _ in range(times):
        place = faults.place()

        def work(place: Path = place) -> int:
            first = os.fork()
            if first == 0:
                os._exit(int(faults.train(place)() or 0))
            while not list(place.glob("*/env.json")):  # it holds the lock and has begun
                time.sleep(0.01)
            second = int(faults.train(place)() or 0)
            _, status = os.waitpid(first, 0)
            return os.waitstatus_to_exitcode(status) or second

        faults.try_one(line, "a second process", work, place, needle="is being trained by another process")
        if faults.result(place) != faults.unbroken:
            line.wrong.append("two processes: the first one's result is another")


# Inside a run


def _clock(faults: Faults, line: Line, times: int) -> None:
    for _ in range(times):
        place = faults.place()

        def work(place: Path = place) -> object:
            whole, began = time.time, time.time()
            time.time = lambda: 2 * began - whole() - 3600  # type: ignore[assignment]
            return faults.train(place)()

        if faults.try_one(line, "a clock that runs backwards", work, place).code:
            line.wrong.append("a clock that runs backwards stopped a run")
        future = time.time() + 1e6
        for file in place.rglob("*"):
            os.utime(file, (future, future))
        if said := problem(run(command("runs", str(place))), codes=(0,)):
            line.wrong.append(f"files from the future: {said}")


class Cause(NamedTuple):
    """A fault inside the process of a run."""

    what: str
    needle: str  # what the error must name
    cause: Callable[[], None]  # called in that process, before the run begins
    undo: Callable[[], object] = lambda: None
    words: tuple[str, ...] = ()


def _inside(draw: Callable[[Faults], Cause], faults: Faults, line: Line, times: int) -> None:
    """The run must stop and name the fault; without it, it must reach the unbroken result."""
    for _ in range(times):
        place, fault = faults.place(), draw(faults)

        def work(place: Path = place, fault: Cause = fault) -> object:
            fault.cause()
            return faults.train(place, *fault.words)()

        if faults.try_one(line, fault.what, work, place, fault.needle).code == 0:
            line.wrong.append(f"{fault.what}: not noticed")
        fault.undo()
        faults.expect_whole(line, place, fault.what, *fault.words)


def _around(owner: type, name: str, change: Callable[..., Any]) -> None:
    """Replace a method; `change` gets the old one and its arguments."""
    whole = getattr(owner, name)
    setattr(owner, name, lambda *args: change(whole, *args))


def _dying_thread(faults: Faults) -> Cause:
    call, calls = faults.rng.randint(2, 12), itertools.count(1)
    error = faults.rng.choice([MemoryError("no memory"), OSError(5, "Input/output error")])

    def dies(whole: Callable[..., Any], *args: Any) -> Any:
        if next(calls) == call:
            raise error
        return whole(*args)

    def cause() -> None:
        from patchgen.data.loaders import DomainBatches

        _around(DomainBatches, "_read", dies)

    return Cause(f"{type(error).__name__} in the reading thread, call {call}", "", cause)


def _vanishing_image(faults: Faults) -> Cause:
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
    return Cause("a folder of images vanishes", "cannot read image", cause, undo, ("--no-cache",))


def _not_a_number(faults: Faults) -> Cause:
    """The run names the images of the first bad step, and keeps its last good state."""
    bad = faults.rng.randint(1, int(RUN["steps"]) - 1)

    def batch(whole: Callable[..., Any], trainer: Any, step: int) -> Any:
        found = whole(trainer, step)
        return replace(found, image=found.image * float("nan")) if step == bad else found

    def cause() -> None:
        from patchgen.train.fold import FoldTrainer

        _around(FoldTrainer, "_batch", batch)

    return Cause(f"NaN at step {bad}", f"diverged at step {bad}:", cause)


Fault = Callable[[Faults, Line, int], None]
FAULTS: dict[str, tuple[Fault, Callable[[int], int]]] = {  # and how often, of so many damaged files in all
    "damaged files of an unfinished run": (_damaged_unfinished, lambda damages: damages // 2),
    "damaged files of a finished run": (_damaged_finished, lambda damages: damages - damages // 2),
    "full disk": (_full_disk, lambda damages: 2 * max(1, damages // 20)),
    "read-only folder": (_read_only, lambda damages: 1),
    "two processes on one run": (_two_processes, lambda damages: max(1, damages // 20)),
    "clock going back": (_clock, lambda damages: 1),
    "thread that reads images dies": (partial(_inside, _dying_thread), lambda damages: max(1, damages // 20)),
    "image vanishes in the middle": (partial(_inside, _vanishing_image), lambda damages: 1),
    "loss becomes NaN": (partial(_inside, _not_a_number), lambda damages: max(1, damages // 20)),
}


def do_fault(ground: Path, name: str, damages: int, seed: int, ledger: Ledger) -> None:
    """One kind of fault, as often as belongs to so many damaged files in all."""
    fault, often = FAULTS[name]
    line, times = ledger.line("faults", name), often(damages)
    fault(Faults(ground, seed, name), line, times)
    ledger.tell(line, times)
