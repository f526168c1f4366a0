"""Requests that must not reach the viewer: other sites, rebound names, too large, too slow, of the wrong kind."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from patchgen.viewer import Limits
from patchgen.viewer.guard import HEADERS, Guard, Hosts
from tests.viewer.conftest import png

FORM = "multipart/form-data; boundary=x"


def body_of(*parts: tuple[str, str, bytes]) -> bytes:
    lines = b""
    for name, disposition, data in parts:
        lines += f'--x\r\nContent-Disposition: form-data; name="{name}"{disposition}\r\n\r\n'.encode() + data + b"\r\n"
    return lines + b"--x--\r\n"


# Names and origins


def test_names_that_are_served() -> None:
    assert all(Hosts().serves(name) for name in ("127.0.0.1", "localhost", "::1"))
    assert not any(Hosts().serves(name) for name in ("evil.example", "10.0.0.7", "", "127.0.0.1.evil.example"))
    everywhere = Hosts("0.0.0.0", also="Workstation")
    assert everywhere.serves("10.0.0.7") and everywhere.serves("workstation") and not everywhere.serves("evil.example")
    assert Hosts("10.0.0.7").serves("10.0.0.7") and not Hosts("10.0.0.7").serves("10.0.0.8")


@pytest.mark.parametrize("host", ["LOCALHOST:8000", "[::1]:80", "127.0.0.1:"])
def test_its_own_names_are_served_at_any_port(client: Any, host: str) -> None:
    assert client.get("/api/health", headers={"host": host, "origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.", "user@localhost", "127.0.0.1?x",
    "127.0.0.1#x", "localhost?.evil.org", "[::1", "::1]", "localhost:x", "localhost:99999", "localhost/x",
    "localhost\\x", "local host", "[localhost]", "[::1]x",
])  # fmt: skip
def test_a_rebound_or_malformed_name_is_refused(client: Any, host: str) -> None:
    for path in ("/", "/api/models"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421 and "error" in answer.json()


@pytest.mark.parametrize("origin", [
    "http://evil.example", "null", "http://localhost:8000", "http://127.0.0.1:3000", "", "http://[", "http://[::1",
    "http://127.0.0.1:8000.evil.example", "javascript:1", "//127.0.0.1:8000", "http://a b", "http://\u00e9",
])  # fmt: skip
def test_a_page_of_another_site_is_refused(client: Any, origin: str) -> None:
    headers = {"origin": origin.encode("latin-1")}
    answers = [client.get("/api/health", headers=headers), client.post("/api/perturb", headers=headers, json={})]
    answers.append(client.post("/api/predict", headers=headers, data={"model": "1"}, files={"image": png()}))
    assert all(answer.status_code == 403 and "other sites" in answer.json()["error"] for answer in answers)


def test_pictures_and_answers_are_not_for_other_pages(client: Any) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert client.get("/api/models", headers={"sec-fetch-site": site}).status_code == status
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # somebody followed a link
    answer = client.options("/api/perturb", headers={"origin": "http://evil.example"})
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    form = {"data": {"model": "1"}, "files": {"image": ("a.png", png())}}
    assert client.post("/api/predict", headers={"origin": "http://127.0.0.1:8000"}, **form).status_code == 200


def test_a_header_that_stands_twice_is_refused(client: Any) -> None:
    answer = client.get("/", headers=[("host", "127.0.0.1"), ("host", "evil.example")])
    assert answer.status_code in (400, 421)


# Headers and addresses


@pytest.mark.parametrize("path", ["/", "/page.js", "/api/models", "/nothing", "/api/images/x"])
def test_every_answer_has_the_security_headers(client: Any, path: str) -> None:
    answer = client.get(path)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", [
    "/../page.html", "/%2e%2e/%2e%2e/etc/passwd", "/page.html", "/..%2fguard.py", "/docs", "/openapi.json",
    "/api/../../cli.py", "/static/page.js", "/page.js/..%5c..%5capp.py",
])  # fmt: skip
def test_nothing_else_is_served(client: Any, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "error" in answer.json()


def test_the_page_needs_nothing_from_elsewhere_and_sets_no_markup() -> None:
    folder = Path(__file__).parents[2] / "src/patchgen/viewer/static"
    texts = {file.name: file.read_text() for file in folder.iterdir()}
    script = "".join(text for name, text in texts.items() if name.endswith(".js"))
    for text in texts.values():
        assert not re.findall(r"(https?:)?//(?!www\.w3\.org/)[a-z]", text)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "cookie"):
        assert word not in script
    assert not re.findall(r"<style|\son[a-z]+=|\sstyle=", texts["page.html"])


# Bodies


@pytest.mark.parametrize("charset", ["punycode", "rot13", '"utf-7"', "no such"])
def test_other_charsets_are_refused(client: Any, charset: str) -> None:
    body = body_of(("model", "", b"a" * 100))
    for path, kind in (("/api/predict", FORM), ("/api/score", "application/json")):
        answer = client.post(path, content=body, headers={"content-type": f"{kind}; Charset = {charset}"})
        assert answer.status_code == 415 and answer.json() == {"error": "the body must be UTF-8"}


@pytest.mark.parametrize(("path", "kind"), [
    ("/api/predict", "application/json"), ("/api/predict", "text/plain"), ("/api/predict", "image/png"),
    ("/api/predict", "application/x-www-form-urlencoded"), ("/api/perturb", "text/plain"), ("/api/perturb", FORM),
    ("/api/score", ""),
])  # fmt: skip
def test_a_wrong_content_type_is_refused(client: Any, path: str, kind: str) -> None:
    answer = client.post(path, content=b"{}", headers={"content-type": kind})
    assert answer.status_code == 415 and "takes" in answer.json()["error"]


@pytest.mark.parametrize("body", [
    b"", b"--x", b"garbage", body_of(("model", "", b"1")), body_of(("image", '; filename="a.png"', b"x")),
    body_of(("model", "", b"1"), ("image", "", b"no file")), body_of(("model", '; filename="m"', b"1")),
])  # fmt: skip
def test_a_broken_form_is_one_sentence(client: Any, body: bytes) -> None:
    answer = client.post("/api/predict", content=body, headers={"content-type": FORM})
    assert answer.status_code == 400 and answer.json()["error"]
    no_boundary = client.post("/api/predict", content=body, headers={"content-type": "multipart/form-data"})
    assert no_boundary.status_code == 400


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"null", b'{"model": 1, "image": 2}', b"\xff\xfe", b"[" * 100_000]
)
def test_broken_json_is_one_sentence(client: Any, body: bytes) -> None:
    answer = client.post("/api/score", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422) and answer.json()["error"]


def test_too_large_is_refused_with_and_without_a_length(make_client: Callable[..., Any]) -> None:
    client = make_client(request_bytes=5000)
    body = body_of(("model", "", b"1"), ("image", '; filename="a.png"', b"x" * 6000))
    pieces = (body[i : i + 1000] for i in range(0, len(body), 1000))  # chunked: no content-length
    for content in (body, pieces):
        answer = client.post("/api/predict", content=content, headers={"content-type": FORM})
        assert answer.status_code == 413 and "at most" in answer.json()["error"]
    json_body = json.dumps({"model": "1", "image": "x", "off": [1] * 200_000})
    answer = client.post("/api/perturb", content=json_body, headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_large_file_and_many_files_are_refused(make_client: Callable[..., Any]) -> None:
    client = make_client(file_bytes=2000, images=2)
    file = ("image", ("a.png", png()))
    one, many = (client.post("/api/predict", data={"model": "1"}, files=[file] * count) for count in (1, 3))
    assert "at most" in one.json()["images"][0]["error"] and "MB" in one.json()["images"][0]["error"]
    assert many.status_code == 400 and "at most 2 images" in many.json()["error"]


def call(guard: Guard, messages: AsyncIterator[dict[str, Any]], headers: dict[str, str]) -> list[dict[str, Any]]:
    """What a guard sends for a POST whose body comes from an iterator."""
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        async def receive() -> dict[str, Any]:
            return await anext(messages)

        async def send(message: Any) -> None:
            sent.append(message)

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await guard({"type": "http", "method": "POST", "path": "/api/predict", "headers": raw}, receive, send)

    asyncio.run(run())
    return sent


def swallow(log: list[int]) -> Callable[..., Any]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        log.append(len((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    return app


HEAD = {"host": "127.0.0.1", "content-type": FORM}


def test_a_slow_upload_ends_in_time() -> None:
    async def drip() -> AsyncIterator[dict[str, Any]]:
        while True:
            yield {"type": "http.request", "body": b"x", "more_body": True}
            await asyncio.sleep(0.02)

    log: list[int] = []
    guard = Guard(swallow(log), Hosts(), Limits(upload_seconds=0.1))
    sent = call(guard, drip(), HEAD)
    assert sent[0]["status"] == 408 and b"0.1 seconds" in sent[1]["body"] and log == [] and guard.arriving == 0


def test_a_client_that_goes_away_leaves_nothing() -> None:
    async def cut() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "http.request", "body": b"x" * 10, "more_body": True}
        yield {"type": "http.disconnect"}

    log: list[int] = []
    guard = Guard(swallow(log), Hosts(), Limits())
    assert call(guard, cut(), HEAD) == [] and log == [] and guard.arriving == 0


def test_all_uploads_together_are_bounded() -> None:
    async def whole() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "http.request", "body": b"x" * 10, "more_body": False}

    log: list[int] = []
    guard = Guard(swallow(log), Hosts(), Limits(arriving_bytes=15))
    guard.arriving = 6  # another upload is in memory
    assert call(guard, whole(), HEAD)[0]["status"] == 503 and guard.arriving == 6
    guard.arriving = 5
    assert call(guard, whole(), HEAD)[0]["status"] == 200 and log == [10] and guard.arriving == 5
