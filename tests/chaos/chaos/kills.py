"""kill -9 at random moments, then the same command again: the result must be that of an unbroken run.

A life is a fresh folder in which a command is killed some times and then let go to its end. Half of the kills come
after a random time, half right before a random file operation (an open for writing, a rename, an exchange of folders, a
truncation). At the end nothing hidden may be left over.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos.children import Work, command, count_file_events, problem, run
from chaos.ground import FIT, RUN, STREAM, Line, broken_files, result, words_of

MOST_KILLS = 4  # in a life
SIDE = 448  # pixels of cached images: large enough that a kill meets a write
Result = dict[str, str]


@dataclass(frozen=True)
class Scenario:
    """A command that works in a folder of its own, and what it leaves there."""

    work: Callable[[Path], Work]
    share: int  # of every hundred kills
    result: Callable[[Path], Result]
    broken: Callable[[Path, Result], list[str]]  # after a kill: what stands half under a real name
    forks: bool = True  # False: its work is done in other processes, whose file operations are not seen


def _runs(place: Path) -> Result:
    return {name: digest for name, digest in result(place / "runs").items() if not name.endswith("failed.json")}


def _broken_runs(place: Path, _: Result) -> list[str]:
    return [text for run in (place / "runs").glob("[!.]*/") for text in broken_files(run)]


def _files(place: Path) -> Result:
    return result(place / "made")


def _broken_files(place: Path, unbroken: Result) -> list[str]:
    """A file under its own name is whole at any moment."""
    return [name for name, digest in _files(place).items() if unbroken.get(name) != digest]


def _hidden(place: Path) -> set[str]:
    """Hidden files and folders; those that a whole command does not leave are left-overs."""
    found = (path.relative_to(place) for path in place.rglob("*"))
    return {path.as_posix() for path in found if any(part.startswith(".") for part in path.parts)} - {".result"}


def _fit(ground: Path) -> Scenario:
    """`fit` whose runs are finished: there is a whole model at any moment, the older one or the new one."""
    words = ["fit", str(ground / "photos"), *words_of(FIT), "--quiet", "--no-expect", "--runs"]

    def work_in(place: Path) -> Work:
        if not (place / "runs").exists():
            shutil.copytree(ground / "fitted" / "runs", place / "runs")
            shutil.copytree(ground / "fitted" / "older", place / "made" / "model")
        return command(*words, str(place / "runs"), "--out", str(place / "made" / "model"))

    def broken(place: Path, unbroken: Result) -> list[str]:
        found = _files(place)
        whole = found in (unbroken, result(ground / "fitted" / "before"))
        return [] if whole else [f"the model folder holds {', '.join(found) or 'nothing'}"]

    return Scenario(work_in, 16, _files, broken)


def _cache(photos: Path) -> Scenario:
    """The images that the cache gives are those in the files, whatever a kill left in it."""
    files = sorted(photos.rglob("*.png"))

    def work_in(place: Path) -> Work:
        def work() -> None:
            from patchgen.data.images import ImageStore

            ImageStore(files, SIDE, place / "cache").load(range(len(files)))

        return work

    def right(place: Path) -> Result:
        import numpy as np

        from patchgen.data.images import ImageStore, decode

        images = ImageStore(files, SIDE, place / "cache", threads=1).images(range(len(files)))
        pairs = zip(images, files, strict=True)
        same = (np.array_equal(image.transpose(1, 2, 0), decode(file, SIDE)) for image, file in pairs)
        return {"images": str(sum(same))}

    return Scenario(work_in, 8, right, lambda place, _: [])


def scenarios(ground: Path) -> dict[str, Scenario]:
    """`ground` holds `photos`, `shapes`, `stages.yaml`, `recipe.yaml` and a finished run below `model`."""
    photos, model = ground / "photos", str(next((ground / "model").glob("*"), ground / "model"))
    train = ["train", str(photos), *words_of(RUN), "--quiet", "--out"]
    stream = ["train", str(ground / "shapes"), "--schedule", str(ground / "stages.yaml"), *words_of(STREAM), "--quiet"]
    sweep = ["sweep", str(ground / "recipe.yaml"), "--workers", "1", "--retries", "9", "--quiet", "--out"]

    def runs(words: list[str], share: int, forks: bool = True) -> Scenario:
        return Scenario(lambda place: command(*words, str(place / "runs")), share, _runs, _broken_runs, forks)

    def files(words: list[str], name: str, share: int) -> Scenario:
        def work_in(place: Path) -> Work:
            (place / "made").mkdir(exist_ok=True)
            return command(*words, str(place / "made" / name))

        return Scenario(work_in, share, _files, _broken_files)

    return {
        "train with SWAD": runs(train, 40),
        "train a stream of stages": runs([*stream, "--out"], 10),
        "fill the image cache": _cache(photos),
        "predict to CSV": files(["predict", model, str(photos), "--batch", "2", "--csv"], "found.csv", 8),
        "replace a model folder": _fit(ground),
        "report": files(["report", str(ground / "model"), "--out"], "", 8),
        "sweep, launcher and worker": runs(sweep, 6, forks=False),
        "export to ONNX": files(["export", model, "--count", "2", "--out"], "model.onnx", 4),
    }


def shares(kills: int, small: bool = False) -> dict[str, int]:
    """How many kills each scenario gets; a small run leaves out what starts slowly."""
    parts = {name: s.share for name, s in scenarios(Path()).items() if not small or s.share >= 8}
    counts = {name: kills * share // sum(parts.values()) for name, share in parts.items()}
    counts[next(iter(counts))] += kills - sum(counts.values())
    return counts


def kill_some(name: str, kills: int, ground: Path, seed: int) -> Line:
    """So many kills of one scenario."""
    rng, line, scenario = random.Random(f"{seed} {name}"), Line("kills", name), scenarios(ground)[name]

    def fresh() -> Path:
        place = ground / "lives" / f"{rng.getrandbits(48):012x}"
        place.mkdir(parents=True)
        return place

    place = fresh()
    whole = run(scenario.work(place))
    unbroken, hidden = _read(scenario, place), _hidden(place)
    events = count_file_events(scenario.work(fresh())) if scenario.forks else 0
    line.wrong += [f"the unbroken command failed: {whole.said[-300:]}"] if whole.code else []
    while not whole.code and line.hit < kills and line.tried < 3 * kills:  # a kill that comes too late is no kill
        place, times = fresh(), min(kills - line.hit, rng.randint(1, MOST_KILLS))
        for _ in range(times):
            event = rng.randint(1, events) if events and rng.random() < 0.5 else None
            seconds = rng.uniform(0, whole.seconds) if event is None else None
            ended = run(scenario.work(place), kill_at=event, kill_after=seconds)
            line.tried += 1
            line.hit += ended.code == -9
            if said := problem(ended, codes=(0, -9)):
                line.wrong.append(f"killed at operation {event} or {seconds} s: {said}")
            line.wrong += [f"half a file after a kill: {text}" for text in scenario.broken(place, unbroken)]
        ended = run(scenario.work(place))
        if ended.code:
            line.wrong.append(f"the same command failed after {times} kills: {ended.said[-300:]}")
            continue
        if odd := sorted({name for name, _ in unbroken.items() ^ _read(scenario, place).items()}):
            line.wrong.append(f"other results after {times} kills: {', '.join(odd[:5])}")
        if left := _hidden(place) - hidden:
            line.wrong.append(f"left over after {times} kills: {', '.join(sorted(left)[:5])}")
        shutil.rmtree(place)
    return line


def _read(scenario: Scenario, place: Path) -> Result:
    """The result, read in a child: this process must stay without threads."""
    answer = place / ".result"

    def work() -> None:
        lines = scenario.result(place)
        answer.write_text("\n".join(f"{name}\t{digest}" for name, digest in lines.items()))

    ended = run(work)
    if ended.code:
        return {"unreadable": ended.said[-300:]}
    return dict(line.split("\t", 1) for line in answer.read_text().splitlines())  # type: ignore[misc]
