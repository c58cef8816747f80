"""Completion scripts for shells, made of the commands and flags that there are.

source <(teneral completion bash)          # or zsh, in .bashrc or .zshrc
teneral completion fish | source           # in config.fish
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from .cli_flags import COMMANDS
from .cli_parser import Parser


def completion(shell: str) -> str:
    """The script for bash, zsh or fish."""
    flags = {name: _flags_of(name) for name in COMMANDS}
    if shell == "fish":
        return _fish(flags)
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + _bash(flags)


def _flags_of(name: str) -> dict[str, str]:
    """A command's flags, and words before them (actions), each with its help in one line."""
    command = Parser(prog=name)
    command.shows_all = True
    COMMANDS[name][1](command)
    found: dict[str, str] = {}
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= dict.fromkeys(action.choices, "")
        for option in action.option_strings:
            if option.startswith("--"):
                found[option] = str(action.help or "").replace("%%", "%").split("\n")[0]
    return found


def _bash(flags: Mapping[str, Mapping[str, str]]) -> str:
    cases = "\n".join(f'    {name}) words="{" ".join(own)}" ;;' for name, own in flags.items())
    return f"""_teneral() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(flags)} --help --version"; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  case "$word" in -*) ;; *) [ "$COMP_CWORD" -eq 1 ] || COMPREPLY+=($(compgen -f -- "$word")) ;; esac
}}
complete -o filenames -F _teneral teneral
"""


def _fish(flags: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for name, own in flags.items():
        lines.append(
            f"complete -c teneral -n __fish_use_subcommand -f -a {name} -d {_quoted(COMMANDS[name][0])}"
        )
        for word, help_text in own.items():
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
            lines.append(
                f"complete -c teneral -n '__fish_seen_subcommand_from {name}' {kind} -d {_quoted(help_text)}"
            )
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
