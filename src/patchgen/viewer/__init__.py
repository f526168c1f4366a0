"""The viewer: a local page with a model's predictions, its maps and the records of its run."""

from dataclasses import dataclass

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of one request, and of all together."""

    file_bytes: int = 24 * MEGABYTE
    request_bytes: int = 64 * MEGABYTE
    arriving_bytes: int = 256 * MEGABYTE  # bodies in memory at one time, over all requests
    json_bytes: int = MEGABYTE // 4
    images: int = 16  # files a request
    pixels: int = 50_000_000  # width x height of an image
    kept_bytes: int = 256 * MEGABYTE  # uploaded files
    kept_images: int = 64
    upload_seconds: float = 60.0
    send_seconds: float = 60.0  # until the client has taken an answer
    answer_seconds: float = 120.0
    waiting: int = 200  # jobs in the queue for the model


class RefusedRequest(Exception):
    """A refused request: an HTTP status and a sentence for the user."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
