"""Shell completion for the command, written out of its parser: ``eval "$(jitkern completion bash)"``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

SHELLS = ("bash", "zsh", "fish")


def words(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Subcommand to what may follow it: options, and the choices of its arguments."""
    found: dict[str, list[str]] = {}
    for name, sub in _commands(parser).items():
        listed: list[str] = []
        for action in sub._actions:
            listed += action.option_strings
            listed += map(str, action.choices or ())
        found[name] = listed
    return found


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def script(shell: str, parser: argparse.ArgumentParser, kernels: list[str]) -> str:
    """The script for a shell.

    Args:
        shell: one of :data:`SHELLS`.
        parser: the command's.
        kernels: names that ``show``, ``warm`` and ``why`` take.
    """
    takers = ("show", "warm", "why")
    table = {name: listed + (kernels if name in takers else []) for name, listed in words(parser).items()}
    if shell == "fish":
        return _fish(table)
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    cases = "\n".join(f"    {name}) words={shlex.quote(' '.join(listed))} ;;" for name, listed in table.items())
    return (
        f"{head}_jitkern() {{\n"
        '  local current="${COMP_WORDS[COMP_CWORD]}" words\n'
        '  case "${COMP_WORDS[1]}" in\n'
        f"{cases}\n"
        f"    *) words={shlex.quote(' '.join([*table, '--help', '--version']))} ;;\n"
        "  esac\n"
        f'  if [ "$COMP_CWORD" -eq 1 ]; then words={shlex.quote(" ".join([*table, "--help", "--version"]))}; fi\n'
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))\n'
        "}\n"
        "complete -o default -F _jitkern jitkern\n"
    )


def _fish(table: Mapping[str, list[str]]) -> str:
    lines = [f"complete -c jitkern -n __fish_use_subcommand -a {shlex.quote(' '.join(table))}"]
    for name, listed in table.items():
        condition = f"'__fish_seen_subcommand_from {name}'"
        plain = [word for word in listed if not word.startswith("-")]
        lines += [f"complete -c jitkern -n {condition} -l {word[2:]}" for word in listed if word.startswith("--")]
        if plain:
            lines.append(f"complete -c jitkern -n {condition} -a {shlex.quote(' '.join(plain))}")
    return "\n".join(lines) + "\n"
