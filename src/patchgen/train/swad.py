"""SWAD: the mean of the weights over a valley of the source-validation loss (Cha et al., NeurIPS 2021).

    swad.update(trainable)                          # every step
    swad.evaluate(validation_loss, step)            # at some steps, after that step's update
    swad.result().average                           # float32 tensors

Evaluations i = 0, 1, ...: the valley starts at t_s, the first i whose loss is the lowest of its window [i, i+N_s-1].
Its rim is r times the mean loss of that window; it ends at t_e, the evaluation before the first N_e losses in a row
(all after t_s) above the rim, else with the training. The result is the mean over every step from t_s's to t_e's. A
loss that is not finite is above any rim, is never the lowest and is left out of the window's mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
SCALARS = ("above", "converge_step", "end_step", "last_step", "threshold", "ended")  # of a Swad's state


@dataclass
class SwadResult:
    average: Tensors  # float32 copies
    converged: bool
    start_step: int  # first step averaged
    end_step: int  # last step averaged
    count: int  # steps averaged (compat: with repetitions)
    threshold: float | None  # rim of the valley; None when there was none
    note: str  # how the result was obtained, for the record


@dataclass
class RunningMean:
    """Mean of named tensors in float32. A count of 0 with tensors is a stand-in that the first `add` replaces."""

    tensors: Tensors = field(default_factory=dict)
    count: int = 0

    def add(self, values: Mapping[str, Tensor], weight: int = 1) -> None:
        """Add `values`, the mean of `weight` samples."""
        if weight == 0:
            return
        if self.tensors and self.tensors.keys() != values.keys():
            odd = sorted(self.tensors.keys() ^ values.keys())
            raise ValueError(f"SWAD averages the same tensors at every step; these came or went: {', '.join(odd)}")
        self.count += weight
        if self.count == weight:
            self.tensors = _copy(values)
            return
        for name, mean in self.tensors.items():
            mean.lerp_(values[name].detach().to(mean.dtype), weight / self.count)


@dataclass
class Segment:
    """The steps up to an evaluation: its loss, the mean over them, and the weights at the last one."""

    step: int
    loss: float  # inf when it was not finite
    mean: RunningMean
    point: Tensors

    @property
    def span(self) -> tuple[int, int]:
        """First and last step of the mean."""
        return self.step - self.mean.count + 1, self.step


class Swad:
    """Streaming SWAD over named tensors.

    n_converge   N_s, evaluations in the window that decides the start
    n_tolerance  N_e, evaluations in a row above the rim that end the valley
    ratio        r, the rim over the window's mean loss (1.3; VLCS 1.2)
    compat       reproduces the original implementation: evaluation segments of equal weight, an extension to segments
                 before the start, repeated segments, the last segment when there is no valley
    """

    def __init__(self, n_converge: int = 3, n_tolerance: int = 6, ratio: float = 1.3, compat: bool = False) -> None:
        if not (n_converge >= 1 <= ratio < math.inf and n_tolerance >= (n_converge if compat else 1)):
            raise ValueError(
                f"SWAD needs n_converge and n_tolerance of at least 1 (compat: n_tolerance >= n_converge) and a finite "
                f"ratio of at least 1, got {n_converge}, {n_tolerance} and {ratio}"
            )
        self.n_converge, self.n_tolerance, self.ratio, self.compat = n_converge, n_tolerance, ratio, compat
        self.ended = False  # the valley: nothing further changes the result
        self.above = 0  # evaluations in `_pending`
        self.converge_step: int | None = None  # the step of t_s
        self.end_step = 0  # of `_average`
        self.last_step = -1  # of the last evaluation
        self.threshold: float | None = None
        self._open = RunningMean()  # steps since the last evaluation
        self._latest: Mapping[str, Tensor] = {}  # references to the weights of the last update
        self._recent: list[Segment] = []  # the last N_s evaluations before the valley (compat: always the last N_e)
        self._average = RunningMean()  # of the valley so far
        self._pending = RunningMean()  # steps after it, up to an evaluation above the rim
        self._added: list[tuple[int, int]] = []  # compat: spans of the segments in `_average`

    def update(self, params: Mapping[str, Tensor]) -> None:
        """Add the weights after an optimiser step; they must not change before `evaluate` of that step."""
        if not self.ended:
            self._open.add(params)
            self._latest = params

    def evaluate(self, loss: float, step: int) -> None:
        """Add the source-validation loss of the current weights, after `update` of `step`."""
        if self.ended:
            return
        if self._open.count == 0:
            raise ValueError(f"evaluate() at step {step} without an update() since the last evaluation: update first")
        point = {} if self.compat or self.converge_step is not None else _copy(self._latest)
        evaluation = Segment(step, float(loss) if math.isfinite(loss) else math.inf, self._open, point)
        self._open, self._latest, self.last_step = RunningMean(), {}, step
        if self.compat:
            self._follow_original(evaluation)
        elif self.converge_step is not None:
            self._extend(evaluation)
        else:
            self._recent = [*self._recent, evaluation][-self.n_converge :]
            if self._starts_valley(self._recent):
                first, *later = self._recent
                self._recent = []
                self._average.add(first.point)  # only the evaluated step of its segment is in the valley
                self.end_step = first.step
                for entry in later:
                    self._extend(entry)

    def result(self) -> SwadResult:
        """The average so far; at the end of training, the result."""
        if self.last_step < 0:
            raise ValueError("SWAD has no result before the first evaluation: call evaluate()")
        if self.compat:
            return self._original_result()
        if self.converge_step is None:
            note = f"{self._no_valley()}: mean over the last {len(self._recent)} evaluation windows"
            mean = _merged(*(entry.mean for entry in self._recent))
            return self._summary(mean, self._recent[0].span[0], self.last_step, note)
        if self.ended:
            note = f"valley ended after step {self.end_step}: {self.n_tolerance} losses in a row were above its rim"
            return self._summary(_merged(self._average), self.converge_step, self.end_step, note)
        mean = _merged(self._average, self._pending, self._open)
        end = self.last_step + self._open.count
        return self._summary(mean, self.converge_step, end, "valley open to the end of training")

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Everything for an exact resume: tensors with flat names, and a JSON-serialisable dict."""
        means = self._means()
        groups = {slot: mean.tensors for slot, mean in means.items()}
        groups |= {f"point{i}": entry.point for i, entry in enumerate(self._recent)} | {"latest": dict(self._latest)}
        tensors = {f"{slot}/{name}": value for slot, group in groups.items() for name, value in _copy(group).items()}
        scalars: dict[str, Any] = {name: getattr(self, name) for name in SCALARS}
        scalars["counts"] = {slot: mean.count for slot, mean in means.items()}
        scalars["recent"] = [[entry.step, entry.loss if entry.loss < math.inf else None] for entry in self._recent]
        scalars["added"] = [list(span) for span in self._added]
        return tensors, scalars

    def load_state(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> None:
        """Restore the `state()` of a Swad with the same rule; `tensors` are on the device of the parameters."""
        groups: dict[str, Tensors] = {}
        for key, value in _copy(tensors).items():
            slot, name = key.split("/", 1)
            groups.setdefault(slot, {})[name] = value
        for name in SCALARS:
            setattr(self, name, scalars[name])
        self._added = [(first, last) for first, last in scalars["added"]]
        self._latest = groups.get("latest", {})
        self._recent = [
            Segment(step, math.inf if loss is None else loss, RunningMean(), groups.get(f"point{i}", {}))
            for i, (step, loss) in enumerate(scalars["recent"])
        ]
        for slot, mean in self._means().items():
            mean.tensors, mean.count = groups.get(slot, {}), scalars["counts"][slot]

    def _means(self) -> dict[str, RunningMean]:
        recent = {f"recent{i}": entry.mean for i, entry in enumerate(self._recent)}
        return {"open": self._open, "average": self._average, "pending": self._pending} | recent

    def _summary(self, mean: RunningMean, start: int, end: int, note: str, count: int | None = None) -> SwadResult:
        steps = mean.count if count is None else count
        return SwadResult(mean.tensors, self.converge_step is not None, start, end, steps, self.threshold, note)

    def _no_valley(self) -> str:
        return f"no valley (no loss was the lowest of its window of {self.n_converge})"

    def _starts_valley(self, window: Sequence[Segment]) -> bool:
        """Whether the first of a full `window` has its lowest loss; then the rim is set."""
        losses = [entry.loss for entry in window]
        if len(window) < self.n_converge or losses[0] == math.inf or losses[0] > min(losses):
            return False
        finite = [loss for loss in losses if loss < math.inf]
        self.converge_step, self.threshold = window[0].step, self.ratio * sum(finite) / len(finite)
        return True

    def _exceeds(self, evaluation: Segment) -> bool:
        return self.threshold is not None and evaluation.loss > self.threshold

    def _extend(self, evaluation: Segment) -> None:
        """In the valley: a loss within the rim adds all steps up to it; N_e losses in a row above it end the valley."""
        if self.ended:
            return
        self._pending.add(evaluation.mean.tensors, evaluation.mean.count)
        self.above = self.above + 1 if self._exceeds(evaluation) else 0
        if self.above == 0:
            self._average.add(self._pending.tensors, self._pending.count)
            self.end_step = evaluation.step
        self.ended = self.above == self.n_tolerance
        if self.ended or self.above == 0:
            self._pending = RunningMean()

    # The original implementation: the head of the last N_e segments is averaged, N_e evaluations late, until all of
    # them are above the rim.

    def _follow_original(self, evaluation: Segment) -> None:
        self._recent = [*self._recent, evaluation][-self.n_tolerance :]
        if self.converge_step is None:
            window = self._recent[-self.n_converge :]
            if self._starts_valley(window):
                self._extend_backwards(window[0])
        elif self._recent[0].step >= self.converge_step:
            self.ended = all(map(self._exceeds, self._recent))
            if not self.ended:
                _add_segment(self._average, self._added, self._recent[0])

    def _extend_backwards(self, converged: Segment) -> None:
        """Also average the segments before t_s that follow the last one above the rim, except the first.

        The search assumes N_e segments in memory; with fewer it reaches past t_s, as the original does.
        """
        self._average, self._added = RunningMean(_copy(converged.mean.tensors), 0), [converged.span]
        if self.n_tolerance == self.n_converge:
            return
        oldest = self._recent[: self.n_tolerance - self.n_converge + 1]
        start = max((i + 1 for i, entry in enumerate(oldest) if self._exceeds(entry)), default=0)
        for entry in oldest[start + 1 :]:
            _add_segment(self._average, self._added, entry)

    def _original_result(self) -> SwadResult:
        """The head was used; the remaining segments are averaged while one of them is within the rim."""
        if self.converge_step is None:
            last = self._recent[-1]
            return self._summary(_merged(last.mean), *last.span, f"{self._no_valley()}: mean over the last segment")
        mean, added = RunningMean(_copy(self._average.tensors), self._average.count), list(self._added)
        rest = [] if self.ended else self._recent[1:]
        while not all(map(self._exceeds, rest)):
            _add_segment(mean, added, rest.pop(0))
        start, end = min(first for first, _ in added), max(last for _, last in added)
        note = "original implementation; valley " + ("ended" if self.ended else "open to the end of training")
        return self._summary(mean, start, end, note, count=sum(last - first + 1 for first, last in added))


def _copy(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: value.detach().to(torch.float32, copy=True) for name, value in tensors.items()}


def _merged(*means: RunningMean) -> RunningMean:
    merged = RunningMean()
    for mean in means:
        merged.add(mean.tensors, mean.count)
    return merged


def _add_segment(mean: RunningMean, spans: list[tuple[int, int]], segment: Segment) -> None:
    """Add `segment` as one sample, whatever its length; it replaces a stand-in of count 0."""
    if mean.count == 0:
        spans.clear()
    spans.append(segment.span)
    mean.add(segment.mean.tensors)
