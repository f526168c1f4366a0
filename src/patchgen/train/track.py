"""A run's numbers for TensorBoard: `RUN/tensorboard`, made from the records alone.

    patchgen train ... --track          tensorboard --logdir runs

The first record of a process writes everything recorded so far into a fresh file, so that a resumed run shows one
unbroken line, without the values that a kill had taken back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from patchgen.runs.folder import RunFolder

KINDS = ("evaluation", "epoch")
SHOWN = ("train", "validation", "mask", "oracle", "lr")


class Tracker:
    """Listens to a run folder (`RunFolder.listeners`)."""

    def __init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise ValueError('--track needs TensorBoard, which is not installed: pip install "patchgen[track]"')
        self.writer: SummaryWriter | None = None  # opened by the process that records, which may be a child of this one
        self.written = 0

    def __call__(self, run: RunFolder) -> None:
        if self.writer is None:
            self.writer = _fresh_writer(run)
        found = [record for record in run.records() if record["kind"] in KINDS]
        for number in range(self.written, len(found)):
            step = found[number].get("step", number)  # epochs are counted through all stages
            for name, value in scalars(found[number]):
                self.writer.add_scalar(name, value, step)
        self.written = len(found)
        self.writer.flush()


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """`validation/art/accuracy` and its like, of one evaluation or epoch."""
    for name in SHOWN:
        yield from _leaves(name, record.get(name))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}/{key}", inner)
    elif isinstance(value, (int, float)):
        yield name, float(value)


def _fresh_writer(run: RunFolder) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "tensorboard"
    for old in folder.glob("events.*"):
        old.unlink()
    return SummaryWriter(str(folder))
