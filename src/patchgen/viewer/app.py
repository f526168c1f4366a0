"""The viewer's routes. Requests name things by id; responses are JSON, an image or the page.

app = create_app(Library(find_items(["runs"])))
GET  /api/health  /api/models  /api/models/ID  /api/models/ID/examples  /api/runs  /api/runs/ID  /api/images/ID
POST /api/predict (multipart: model, image, image, ...)  /api/score  /api/example  /api/rankings  /api/perturb
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser

from patchgen.data.images import UnreadableImage
from patchgen.draw.overlay import NOTICE
from patchgen.predict.predictor import Predictor
from patchgen.viewer import answers, runs
from patchgen.viewer.guard import Guard, Hosts, Limits, RefusedRequest
from patchgen.viewer.library import Library, hide_paths
from patchgen.viewer.uploads import Upload, UploadStore, clean_name

MEDIA = {"html": "text/html", "css": "text/css", "svg": "image/svg+xml", "js": "text/javascript"}
Id = Field(max_length=64)
T = TypeVar("T")
log = logging.getLogger("patchgen.viewer")
QUIET = 10.0  # seconds


class ImageRequest(BaseModel):
    model: str = Id
    image: str = Id


class Rankings(ImageRequest):
    names: list[str] = Field(max_length=16)


class Perturb(ImageRequest):
    off: list[int] = Field(max_length=16_384)
    operator: str = Field("blur", max_length=16)


class ChooseExample(BaseModel):
    model: str = Id
    example: int


class InMemory(MultiPartParser):
    """Starlette's own parser would put large files into a temporary file."""

    spool_max_size = Limits().request_bytes


def create_app(library: Library, hosts: Hosts | None = None, limits: Limits | None = None) -> Guard:
    """The viewer as an ASGI application."""
    limits = limits or Limits()
    viewer = Viewer(library, limits)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(_OneLine())
        yield
        viewer.worker.close()

    # no pages of FastAPI's own: they would load scripts from the network
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    _add_page(app)
    _add_errors(app)
    for route, handler in viewer.routes().items():
        method, path = route.split()
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return Guard(app, hosts or Hosts(), limits)


class _OneLine:
    """Logs errors outside of requests, such as a lack of file descriptors for new connections, in one line.

    The loop retries thousands of times a second; the same line is logged once in `QUIET` seconds.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        reason = f"{type(error).__name__}: {error}" if error else "no reason given"
        line = f"{context.get('message', '')} ({reason})".replace("\n", " ")[:300]
        if loop.time() - self.last.get(line, -QUIET) >= QUIET:
            self.last = {line: loop.time()}
            log.warning("%s", line)


class ModelThread:
    """Runs jobs one at a time, in order of arrival.

    Args:
        seconds: Time limit of a request, waiting included.
        waiting: Maximum jobs in the queue.
    """

    def __init__(self, seconds: float, waiting: int) -> None:
        self.seconds, self.waiting = seconds, waiting
        self.queued = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result.

        Raises:
            RefusedRequest: the queue is full, or the time is up (a job that has not started is then cancelled).
        """
        if self.queued >= self.waiting:
            raise RefusedRequest(503, f"{self.queued} requests are waiting for the model; try again in a moment")
        self.queued += 1
        try:
            async with asyncio.timeout(self.seconds):
                return await asyncio.get_running_loop().run_in_executor(self._thread, job)
        except TimeoutError:
            raise RefusedRequest(503, f"no answer within {self.seconds:g} s: the model is busy or too slow") from None
        finally:
            self.queued -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Viewer:
    """The handlers of the routes."""

    def __init__(self, library: Library, limits: Limits) -> None:
        self.library, self.limits = library, limits
        self.uploads = UploadStore(limits)
        self.worker = ModelThread(limits.answer_seconds, limits.waiting)

    def routes(self) -> dict[str, Callable[..., Any]]:
        return {
            "GET /api/health": self.health,
            "GET /api/models": self.models,
            "GET /api/models/{model}": self.model,
            "GET /api/models/{model}/examples": self.examples,
            "GET /api/runs": self.runs,
            "GET /api/runs/{run}": self.run,
            "GET /api/images/{image}": self.image,
            "POST /api/predict": self.predict,
            "POST /api/score": self.score,
            "POST /api/example": self.example,
            "POST /api/rankings": self.rankings,
            "POST /api/perturb": self.perturb,
        }

    async def health(self) -> dict[str, Any]:
        return {"status": "ok", "waiting": self.worker.queued}

    # Models and runs

    def models(self) -> dict[str, Any]:
        """The models that can be chosen; loads none of them."""
        names = ("id", "name", "kind", "method", "unseen", "seed", "task", "done", "error")
        limits = {name: getattr(self.limits, name) for name in ("file_bytes", "pixels", "images")}
        models = [{name: row[name] for name in names if name in row} for row in self.runs()["runs"]]
        return {"models": models, "limits": limits, "notice": NOTICE}

    async def model(self, model: str) -> dict[str, Any]:
        item = self.library.item(model)
        facts = await self.worker.run(lambda: answers.describe(self.library.predictor(model)))
        return {"id": item.id, "name": item.name, "kind": item.kind, **facts}

    async def examples(self, model: str) -> dict[str, Any]:
        examples = await self.worker.run(lambda: self.library.examples(model))
        rows = [{"example": i, "name": example.name, "label": example.label} for i, example in enumerate(examples)]
        return {"examples": rows}

    def runs(self) -> dict[str, Any]:
        return {"runs": [runs.overview(item) for item in self.library.items.values()]}

    def run(self, run: str) -> dict[str, Any]:
        return runs.detail(self.library.item(run))

    # Pictures

    async def image(self, image: str) -> Response:
        picture = self.uploads.get(image)
        return Response(await self.worker.run(picture.preview), media_type="image/jpeg")

    async def predict(self, request: Request) -> dict[str, Any]:
        """A prediction, or the reason why there is none, for each file."""
        model, files = await self._form(request)
        self.library.item(model)
        return {"images": [await self.worker.run(lambda f=file: self._predict(model, *f)) for file in files]}  # type: ignore[misc]

    def _predict(self, model: str, name: str, data: bytes, truth: str | None = None) -> dict[str, Any]:
        predictor = self.library.predictor(model)
        try:
            picture = self.uploads.add(name, data, truth)
        except UnreadableImage as error:
            return {"name": clean_name(name), "error": error.reason}
        try:
            return self._answer(model, picture, answers.scored(predictor, _pixels(picture, predictor)))
        except UnreadableImage as error:  # a good header before damaged pixels
            self.uploads.drop(picture)
            return {"name": picture.name, "error": error.reason}

    def _answer(self, model: str, picture: Upload, scores: dict[str, Any]) -> dict[str, Any]:
        return {"model": model, "image": picture.id, "name": picture.name, "truth": picture.truth, **scores}

    async def _form(self, request: Request) -> tuple[str, list[tuple[str, bytes]]]:
        most = self.limits.images
        try:
            form = await InMemory(request.headers, request.stream(), max_files=most, max_fields=4).parse()
        except MultiPartException as error:
            raise RefusedRequest(400, f"{error.message.rstrip('.')}; at most {most} images per request") from error
        uploads = [upload for upload in form.getlist("image") if isinstance(upload, UploadFile)]
        model, files = form.get("model"), [(upload.filename or "", await upload.read()) for upload in uploads]
        if not isinstance(model, str) or not files:
            raise RefusedRequest(400, "the form needs the field `model` and at least one file `image`")
        return model, files

    async def score(self, ask: ImageRequest) -> dict[str, Any]:
        """An uploaded image with another model."""
        picture = self.uploads.get(ask.image)
        scores = await self.worker.run(lambda: self._with(ask, answers.scored))
        return self._answer(ask.model, picture, scores)

    async def example(self, ask: ChooseExample) -> dict[str, Any]:
        examples = await self.worker.run(lambda: self.library.examples(ask.model))
        if not 0 <= ask.example < len(examples):
            raise RefusedRequest(404, "there is no such example; reload the page")
        name, label, file = examples[ask.example]
        try:
            return await self.worker.run(lambda: self._predict(ask.model, name, file.read_bytes(), label))
        except OSError as error:
            raise RefusedRequest(404, f"{name} cannot be read ({error.strerror})") from error

    async def rankings(self, ask: Rankings) -> dict[str, Any]:
        return await self.worker.run(lambda: self._with(ask, answers.ranked, ask.names))

    async def perturb(self, ask: Perturb) -> dict[str, Any]:
        return await self.worker.run(lambda: self._with(ask, answers.perturbed, ask.off, ask.operator))

    def _with(self, ask: ImageRequest, answer: Callable[..., dict[str, Any]], *more: Any) -> dict[str, Any]:
        picture, predictor = self.uploads.get(ask.image), self.library.predictor(ask.model)
        return answer(predictor, _pixels(picture, predictor), *more)


def _pixels(picture: Upload, predictor: Predictor) -> np.ndarray:
    return picture.pixels(predictor.config.image_size, predictor.interpolation)


def _add_page(app: FastAPI) -> None:
    """The files of static/ under fixed names: no part of a URL is ever looked up on disk."""
    for file in resources.files("patchgen.viewer").joinpath("static").iterdir():
        path = "/" if file.name == "page.html" else f"/{file.name}"
        app.add_route(path, _constant(file.read_text(encoding="utf-8"), MEDIA[file.name.rpartition(".")[2]]))


def _constant(text: str, kind: str) -> Callable[[Request], Any]:
    async def page(request: Request) -> Response:
        return Response(text, media_type=kind)

    return page


def _add_errors(app: FastAPI) -> None:
    """Errors are JSON objects with one sentence; unexpected exceptions are logged, and their details not shown."""

    def invalid(error: RequestValidationError) -> tuple[int, str]:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return 422, f"{place or 'the body'}: {first['msg']}"

    sentences: dict[type[Exception], Callable[[Any], tuple[int, str]]] = {
        RefusedRequest: lambda error: (error.status, error.message),
        ValueError: lambda error: (422, hide_paths(str(error))[:500]),
        RequestValidationError: invalid,
        HTTPException: lambda error: (error.status_code, str(error.detail)),
        Exception: lambda error: (500, "the viewer failed at this request; its terminal says more"),
    }

    def add(kind: type[Exception], sentence: Callable[[Any], tuple[int, str]]) -> None:
        @app.exception_handler(kind)
        async def answer(request: Request, error: Exception) -> JSONResponse:
            status, message = sentence(error)
            if status == 500:
                log.error("%s failed", request.url.path, exc_info=error)
            return JSONResponse({"error": message}, status)

    for kind, sentence in sentences.items():
        add(kind, sentence)
