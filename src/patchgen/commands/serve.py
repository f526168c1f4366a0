"""patchgen serve MODEL_OR_RUNS...: a page on this machine that shows predictions, masks and runs."""

import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal

import tyro

from patchgen.commands.options import LoadOptions

CONNECTIONS = 200  # maximum at once; processes typically have about a thousand file descriptors


@dataclass(frozen=True)
class ServeArguments(LoadOptions):
    """Open models and runs in the browser: predictions, masks, rankings, models and runs side by side."""

    folders: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_RUNS...")]
    """Model folders, run folders, or folders that contain them."""
    port: int = 8000
    """The port; 0 uses any free one."""
    host: str = "127.0.0.1"
    """The address to listen on. Any other than localhost lets others use the viewer, which has no password."""
    open: bool = False
    """Open the page in the browser."""
    runtime: Literal["auto", "torch", "onnx", "openvino"] = "torch"
    """Runtime of predictions and masks; rankings and removed patches always use torch."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ValueError: the port is in use, or the address is not one of this machine."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        hint = "choose another --port, or 0 for any free one" if port else "is --host an address of this machine?"
        raise ValueError(f"cannot listen at {host}, port {port} ({error.strerror or error}); {hint}") from error


def serve(arguments: ServeArguments) -> None:
    missing = [name for name in ("fastapi", "uvicorn", "python_multipart") if find_spec(name) is None]
    if missing:
        raise ValueError(f"the viewer needs {', '.join(missing)}; install it with: pip install 'patchgen[viewer]'")
    import webbrowser

    import uvicorn

    from patchgen.viewer.app import create_app
    from patchgen.viewer.guard import LOCAL, HeaderTimeout, Hosts
    from patchgen.viewer.library import Library, find_items

    items = find_items(arguments.folders)
    library = Library(items, arguments.runtime, checkpoint=arguments.checkpoint, **arguments.how)
    if len(library.items) == 1:  # report a loading error here, not in the browser
        library.predictor(next(iter(library.items)))
    app = create_app(library, Hosts(arguments.host, also=socket.gethostname()))
    with listen(arguments.host, arguments.port) as listener:
        host = arguments.host
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        address = f"http://{name}:{listener.getsockname()[1]}/"
        if host not in LOCAL:
            print(
                f"patchgen serve: WARNING: listening at {host}: everybody who can reach this machine can use "
                "the viewer and see these runs; there is no password and no encryption",
                file=sys.stderr,
            )
        print(address, flush=True)
        if arguments.open:
            webbrowser.open(address)
        config = uvicorn.Config(
            app, http=HeaderTimeout, log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=3, limit_concurrency=CONNECTIONS,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listener])


COMMAND = serve
