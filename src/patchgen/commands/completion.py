"""patchgen completion bash|zsh|fish: tyro's script, which completes commands, options and their values.

The script holds all words: completion starts Python, but imports none of this package.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, Union

import tyro
from tyro.conf import subcommand
from tyro.extras import SubcommandApp

from patchgen import commands
from patchgen.sweep.recipe import recipes


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
        module = import_module(f"patchgen.commands.{name}")
        command = getattr(module, "COMMAND", {})  # none: what commands share
        words = command if isinstance(command, Mapping) else {}
        if name == "sweep":  # tyro completes no positional words, but the names of subcommands
            words = dict.fromkeys(recipes(), command)
        own = command.get(getattr(module, "DEFAULT", "")) if isinstance(command, Mapping) else command
        if words:
            whole.command(with_words(own, words), name=name)
        elif own:
            whole.command(commands.options_of(own), name=name)
    return whole


def with_words(own: Callable[..., Any] | None, words: Mapping[str, Callable[..., Any]]) -> Any:
    """Words, each with its options, and if possible the options of the command without one."""
    kinds = {word: commands.options_of(action) for word, action in words.items()}
    if own and isinstance(options := commands.options_of(own), type):
        field = ("word", Union[tuple(Annotated[kind, subcommand(word)] for word, kind in kinds.items())])  # noqa: UP007
        return make_dataclass(own.__name__, [field], bases=(options,), frozen=True, kw_only=True)  # type: ignore[arg-type]
    nested = SubcommandApp()
    for word, kind in kinds.items():
        nested.command(kind, name=word)
    return nested


COMMAND = completion
