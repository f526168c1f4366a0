"""patchgen completion bash|zsh: a script that completes commands, their options and the options' values.

The script is plain shell and contains all words: completion does not start Python.
"""

from __future__ import annotations

import ast
import contextlib
import io
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, Literal

import tyro

from patchgen import commands
from patchgen.commands import parse

SPEC = "COMPLETION_SPEC = "  # the line of tyro's script with its data
SCRIPT = """\
# patchgen {version}: completion for {shell}, made by `patchgen completion {shell}`
{start}_patchgen() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} words=""
  local at="${{COMP_WORDS[1]}}" first="${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}"
  case "$first" in {pairs}) at="$first";; esac
  if [[ $COMP_CWORD -eq 1 ]]; then
    words="{commands}"
  elif [[ $cur == -* ]]; then
    case "$at" in
{options}
    esac
  else
    case "$at $prev" in
{values}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _patchgen patchgen
"""


def completion(shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]) -> None:
    """Print a completion script; docs/use/quickstart.md explains how to install it.

    Args:
        shell: The shell to complete in: bash or zsh.
    """
    print(script(shell), end="")


def script(shell: str) -> str:
    """The script: the completions of commands (and their actions) and of options."""
    from patchgen import __version__
    from patchgen.sweep.shipped import recipes

    options, values = list[str](), list[str]()
    actions = {name: list(_actions(name)) for name in _commands()}
    for name in actions:
        following = [*actions[name], *(recipes() if name == "sweep" else ())]
        values += _case(f"{name} {name}", following)
        for words in ([name], *([name, action] for action in actions[name])):
            found = _options(words)
            place = " ".join(words)
            options += _case(place, [flag for option in found for flag in option["flags"]])
            for option in found:
                chosen = [choice for choice in option.get("choices", ()) if choice != "None"]
                for flag in option["flags"]:
                    values += _case(f"{place} {flag}", chosen)
    pairs = [f'"{name} {action}"' for name, own in actions.items() for action in own]
    start = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return SCRIPT.format(
        version=__version__, shell=shell, start=start, pairs="|".join(pairs), commands=" ".join(actions),
        options="\n".join(options), values="\n".join(values),
    )  # fmt: skip


def _case(place: str, words: list[str]) -> list[str]:
    return [f'      "{place}") words="{" ".join(words)}";;'] if words else []


def _commands() -> list[str]:
    """Every module of this folder that is a command; one named after another, as `slide_tiles`, is its action."""
    names = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    own = sorted(name for name in names if name.rpartition("_")[0] not in names)
    return [name for name in own if hasattr(import_module(f"patchgen.commands.{name}"), "main")]


def _actions(command: str) -> Iterator[str]:
    """The words that may come first, such as `diff` of `patchgen runs`."""
    module = import_module(f"patchgen.commands.{command}")
    for table in ("ACTIONS", "SUBJECTS"):
        yield from getattr(module, table, ())


def _options(words: list[str]) -> list[dict[str, Any]]:
    """Flags and choices from tyro; none for commands that only choose between actions."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit, ValueError):
        import_module(f"patchgen.commands.{words[0]}").main([*words[1:], "--tyro-print-completion", "bash"])
    line = next((line for line in page.getvalue().splitlines() if line.startswith(SPEC)), f"{SPEC}{{'options': []}}")
    options: list[dict[str, Any]] = ast.literal_eval(line.removeprefix(SPEC))["options"]
    return options


def main(argv: list[str]) -> int:
    parse(completion, "completion", argv)
    return 0
