"""Log a run to TensorBoard, Weights & Biases or MLflow, from its records.

The first record of a process writes everything recorded so far into a new file, so that a resumed run shows one
continuous line, without values that were dropped on resume. Nothing is sent over the network unless the environment
asks for it: WANDB_MODE=online, or MLFLOW_TRACKING_URI with the address of a server.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

from patchgen.common.untrusted import read_json

if TYPE_CHECKING:
    from patchgen.runs.folder import RunFolder

Tracking = Literal["tensorboard", "wandb", "mlflow"]
KINDS = ("evaluation", "epoch")
SHOWN = ("train", "validation", "mask", "oracle", "lr")


class Tracker:
    """Listens to a run folder (`RunFolder.listeners`) and writes for TensorBoard; subclasses override three methods."""

    package: ClassVar[str] = "tensorboard"
    title: ClassVar[str] = "TensorBoard"
    extra: ClassVar[str] = "track"

    def __init__(self) -> None:
        if find_spec(self.package) is None:
            raise ValueError(f'--track needs {self.title}, which is missing: pip install "patchgen[{self.extra}]"')
        self.writer: Any = None  # opened by the recording process, which may be a child of this one
        self.written = 0

    def __call__(self, run: "RunFolder") -> None:
        if self.writer is None:
            self.writer = self.open(run)
        records = [record for record in run.records() if record["kind"] in KINDS]
        for number, record in enumerate(records[self.written :], self.written):
            values = {name: value for shown in SHOWN for name, value in scalars(shown, record.get(shown))}
            self.write(values, record.get("step", number))  # epochs are counted through all stages
        self.written = len(records)

    def open(self, run: "RunFolder") -> Any:
        """A new, empty writer."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.path / "tensorboard"
        for old in folder.glob("events.*"):
            old.unlink()
        return SummaryWriter(str(folder))

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write the named numbers of one evaluation or epoch, and flush them to disk."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Called after the last record."""
        if self.writer is not None:
            self.writer.close()


class WandbTracker(Tracker):
    """`RUN/wandb`, offline unless WANDB_MODE says otherwise; does not collect errors, machine, code or packages."""

    package, title, extra = "wandb", "Weights & Biases", "wandb"

    def open(self, run: "RunFolder") -> Any:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
        import wandb

        for old in (run.path / "wandb").glob("offline-run-*"):
            shutil.rmtree(old)
        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, save_code=False, x_disable_stats=True,
            x_disable_meta=True, x_disable_machine_info=True, x_save_requirements=False,
            symlink=False,  # run folders contain no links
        )  # fmt: skip
        name = run.path.name
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "patchgen"), id=name, name=name, dir=str(run.path), resume="allow",
            mode=cast(Any, os.environ.get("WANDB_MODE", "offline")), config=run.settings.result_settings(),
            settings=settings, reinit="create_new",
        )  # fmt: skip

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.writer.log(dict(values), step=step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.finish()


class MlflowTracker(Tracker):
    """`mlruns` next to the run folders, shared by all of them, unless MLFLOW_TRACKING_URI names another store."""

    package, title, extra = "mlflow", "MLflow", "mlflow"

    def open(self, run: "RunFolder") -> Any:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # these two are read when mlflow is imported
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        store = (run.path.parent / "mlruns").resolve().as_uri()
        client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", store))
        shared = client.get_experiment_by_name("patchgen")
        experiment = shared.experiment_id if shared else client.create_experiment("patchgen")
        note = run.path / "mlflow.json"  # an earlier MLflow run is identified by its id: names may be shared
        if note.is_file():
            with suppress(MlflowException):  # the store may have changed
                client.delete_run(read_json(note)["run_id"])
        self.id = client.create_run(experiment, run_name=run.path.name).info.run_id
        run.write_json(note.name, {"run_id": self.id})
        for name, value in run.settings.result_settings().items():
            client.log_param(self.id, name, value)
        return client

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.log_metric(self.id, name, value, step=step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.set_terminated(self.id)


TRACKERS: dict[str, type[Tracker]] = dict(zip(get_args(Tracking), (Tracker, WandbTracker, MlflowTracker), strict=True))


def make_tracker(name: str | bool) -> Tracker:
    """A tracker by name; True is TensorBoard. ValueError for an unknown name, or if its extra is not installed."""
    name = "tensorboard" if name is True else str(name)
    if name not in TRACKERS:
        raise ValueError(f"track must be one of {', '.join(TRACKERS)}, not {name!r}")
    return TRACKERS[name]()


def scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Names such as `validation/art/accuracy` and their values, of one part of a record."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from scalars(f"{name}/{key}", inner)
    elif isinstance(value, (int, float)):
        yield name, float(value)
