"""Model folders on a model hub: upload and download of their three files.

push_model(Path("tiles-model"), "org/tiles", private=True)
read_model(fetch_model("org/tiles"))
"""

from __future__ import annotations

from pathlib import Path

from patchgen import __version__
from patchgen.common.files import expanded
from patchgen.predict.model_folder import FILES


def fetch_model(source: str | Path, revision: str | None = None) -> Path:
    """The folder itself, or a hub's `org/name` in the hub's local cache; only the three files are downloaded."""
    if Path(source).exists() or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        return expanded(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=list(FILES)))
    except (OSError, HTTPError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"there is no folder {source}, and the hub gave no model of that name ({reason}); check the spelling, "
            "log in if it is private, or give a local folder"
        ) from error


def push_model(folder: Path, repo: str, *, private: bool = False) -> str:
    """Upload a model folder to a hub's `org/name`; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        done = api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=list(FILES),
                                 commit_message=f"patchgen {__version__}")  # fmt: skip
    except (OSError, HTTPError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"the hub did not take {repo!r} ({reason}); log in with `hf auth login` first") from error
    return str(done)
