"""patchgen completion bash|zsh|fish: tyro's script, which completes commands, options and their values.

The script holds all words: completion starts Python, but imports none of this package.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Annotated, Literal

import tyro
from tyro.extras import SubcommandApp

from patchgen import commands

PARTS = {"slide": {"tiles": "slide_tiles"}}  # actions in modules of their own


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]) -> None:
    """Print a completion script; docs/use/quickstart.md says how to install it.

    Args:
        shell: The shell to complete in.
    """
    app().cli(prog="patchgen", args=["--tyro-print-completion", shell], config=(tyro.conf.OmitArgPrefixes,))


def app() -> SubcommandApp:
    """Every command with its options, as one program."""
    names = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    whole = SubcommandApp()
    for name in sorted(names - {part for parts in PARTS.values() for part in parts.values()}):
        command = getattr(import_module(f"patchgen.commands.{name}"), "COMMAND", None)
        if command is None:  # what commands share
            continue
        actions = {key: import_module(f"patchgen.commands.{part}").COMMAND for key, part in PARTS.get(name, {}).items()}
        if isinstance(command, dict):
            actions = command
        elif actions:
            actions = {"map": command, **actions}
        if not actions:
            whole.command(command, name=name)
            continue
        nested = SubcommandApp()
        for number, (action, function) in enumerate(actions.items()):
            nested.command(function, name=action, is_default=number == 0)
        whole.command(nested, name=name)
    return whole


COMMAND = completion
