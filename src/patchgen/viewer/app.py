"""The viewer's routes. Requests name things by id; responses are JSON, an image or the page.

app = create_app(Library(find_items(["runs"])))
GET  /api/health  /api/models  /api/models/ID  /api/models/ID/examples  /api/runs  /api/runs/ID  /api/images/ID
POST /api/predict (multipart: model, image, image, ...)  /api/score  /api/example  /api/rankings  /api/perturb
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import lru_cache
from importlib import resources
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser

from patchgen.data.images import UnreadableImage
from patchgen.draw.overlay import NOTICE
from patchgen.viewer import Limits, RefusedRequest, answers
from patchgen.viewer.guard import Guard, Hosts
from patchgen.viewer.library import Library, detail, hide_paths, overview
from patchgen.viewer.uploads import Upload, UploadStore, clean_name

MEDIA = {"html": "text/html", "css": "text/css", "svg": "image/svg+xml", "js": "text/javascript"}
Id = Field(max_length=64)
T = TypeVar("T")
log = logging.getLogger("patchgen.viewer")


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
        asyncio.get_running_loop().set_exception_handler(_log_in_one_line)
        yield
        viewer.worker.close()

    # no pages of FastAPI's own: they would load scripts from the network
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=life)
    # the page's files under fixed names: no part of a URL is ever looked up on disk
    for file in resources.files("patchgen.viewer").joinpath("static").iterdir():
        response = Response(file.read_bytes(), media_type=MEDIA[file.name.rpartition(".")[2]])
        app.add_route("/" if file.name == "page.html" else f"/{file.name}", _constant(response))
    for kind in (RefusedRequest, RequestValidationError, HTTPException, ValueError, Exception):
        app.add_exception_handler(kind, _error)
    for route, handler in viewer.routes().items():
        method, path = route.split()
        app.add_api_route(path, handler, methods=[method], response_model=None)
    return Guard(app, hosts or Hosts(), limits)


def _constant(response: Response) -> Callable[[Request], Response]:
    return lambda request: response


async def _error(request: Request, error: Exception) -> Response:
    """Errors are JSON objects with one sentence; unexpected ones are logged, and their details not shown."""
    match error:
        case RefusedRequest():
            status, message = error.status, error.message
        case RequestValidationError():
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"] if part != "body")
            status, message = 422, f"{place or 'the body'}: {first['msg']}"
        case HTTPException():
            status, message = error.status_code, str(error.detail)
        case ValueError():
            status, message = 422, hide_paths(str(error))[:500]
        case _:
            log.error("%s failed", request.url.path, exc_info=error)
            status, message = 500, "the viewer failed at this request; its terminal says more"
    return JSONResponse({"error": message}, status)


def _log_in_one_line(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error outside of requests, such as a lack of file descriptors for new connections."""
    error = context.get("exception")
    reason = f"{type(error).__name__}: {error}" if error else "no reason given"
    _warn_once(f"{context.get('message', '')} ({reason})".replace("\n", " ")[:300])


@lru_cache(maxsize=16)  # where no connection can be accepted, the loop tries thousands of times a second
def _warn_once(line: str) -> None:
    log.warning("%s", line)


class ModelThread:
    """Runs jobs in order of arrival: at most `waiting` in the queue, and `seconds` for each, waiting included."""

    def __init__(self, seconds: float, waiting: int) -> None:
        self.seconds, self.waiting = seconds, waiting
        self.queued = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    async def run(self, job: Callable[..., T], *arguments: Any) -> T:
        """The job's result; RefusedRequest if the queue is full, or the time is up: a waiting job is then cancelled."""
        if self.queued >= self.waiting:
            raise RefusedRequest(503, f"{self.queued} requests are waiting for the model; try again in a moment")
        self.queued += 1
        try:
            async with asyncio.timeout(self.seconds):
                return await asyncio.get_running_loop().run_in_executor(self._thread, job, *arguments)
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
        examples = await self.worker.run(self.library.examples, model)
        rows = [{"example": i, "name": example.name, "label": example.label} for i, example in enumerate(examples)]
        return {"examples": rows}

    def runs(self) -> dict[str, Any]:
        return {"runs": [overview(item) for item in self.library.items.values()]}

    def run(self, run: str) -> dict[str, Any]:
        return detail(self.library.item(run))

    async def image(self, image: str) -> Response:
        upload = self.uploads.get(image)
        return Response(await self.worker.run(lambda: upload.preview), media_type="image/jpeg")

    async def predict(self, request: Request) -> dict[str, Any]:
        """A prediction, or the reason why there is none, for each file."""
        model, files = await self._form(request)
        self.library.item(model)
        return {"images": [await self.worker.run(self._predict, model, name, data) for name, data in files]}

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

    def _predict(self, model: str, name: str, data: bytes, truth: str | None = None) -> dict[str, Any]:
        self.library.predictor(model)  # a model that cannot be loaded is the first thing to say
        try:
            upload = self.uploads.add(name, data, truth)
        except UnreadableImage as error:
            return {"name": clean_name(name), "error": error.reason}
        try:
            return self._scored(model, upload)
        except UnreadableImage as error:  # a good header before damaged pixels
            self.uploads.drop(upload.id)
            return {"name": upload.name, "error": error.reason}

    def _scored(self, model: str, upload: Upload) -> dict[str, Any]:
        scores = self._ask(model, upload.id, answers.scored)
        return {"model": model, "image": upload.id, "name": upload.name, "truth": upload.truth, **scores}

    def _ask(self, model: str, image: str, answer: Callable[..., dict[str, Any]], *more: Any) -> dict[str, Any]:
        upload, predictor = self.uploads.get(image), self.library.predictor(model)
        return answer(predictor, upload.pixels(predictor.config.image_size, predictor.interpolation), *more)

    async def score(self, ask: ImageRequest) -> dict[str, Any]:
        """An uploaded image with another model."""
        return await self.worker.run(self._scored, ask.model, self.uploads.get(ask.image))

    async def example(self, ask: ChooseExample) -> dict[str, Any]:
        examples = await self.worker.run(self.library.examples, ask.model)
        if not 0 <= ask.example < len(examples):
            raise RefusedRequest(404, "there is no such example; reload the page")
        name, label, file = examples[ask.example]
        try:
            return await self.worker.run(lambda: self._predict(ask.model, name, file.read_bytes(), label))
        except OSError as error:
            raise RefusedRequest(404, f"{name} cannot be read ({error.strerror})") from error

    async def rankings(self, ask: Rankings) -> dict[str, Any]:
        return await self.worker.run(self._ask, ask.model, ask.image, answers.ranked, ask.names)

    async def perturb(self, ask: Perturb) -> dict[str, Any]:
        return await self.worker.run(self._ask, ask.model, ask.image, answers.perturbed, ask.off, ask.operator)
