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


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]) -> None:
    """Print a completion script; docs/use/quickstart.md says how to install it.

    Args:
        shell: The shell to complete in.
    """
    app().cli(prog="patchgen", args=["--tyro-print-completion", shell], config=(tyro.conf.OmitArgPrefixes,))


def app() -> SubcommandApp:
    """Every command with its options, as one program."""
    whole = SubcommandApp()
    for name in sorted(module.name for module in pkgutil.iter_modules(commands.__path__)):
        command = getattr(import_module(f"patchgen.commands.{name}"), "COMMAND", {})
        nested = SubcommandApp()
        for number, (word, action) in enumerate(command.items() if isinstance(command, dict) else ()):
            nested.command(commands.options_of(action), name=word, is_default=number == 0)
        if command:  # else what commands share
            whole.command(nested if isinstance(command, dict) else commands.options_of(command), name=name)
    return whole


COMMAND = completion
