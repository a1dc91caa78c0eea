"""`windtunnel completion SHELL`: prints a script that calls the hidden command `windtunnel _complete`.

Commands, flags, groups and choices are read from the config folders in milliseconds. Only keys below a dot
(`batching.max_`) need the composed config, and therefore Hydra.
"""

import argparse
import importlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.app.settings.config_groups import CONFIG_DIR, find_groups, key_comments

_HYDRA = ("defaults", "hydra")  # keys of a root config that belong to Hydra
FLAGS = ("--help", "--multirun", "--config-dir", "--cfg", "--traceback")

# bash splits words at `=`, so the words are taken from the line, and the text before the last `=` is cut
# from the answers. The user types on after a key: no space after `=` and `.`.
BASH = r"""
_windtunnel() {
    local line="${COMP_LINE:0:COMP_POINT}" current words
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    current="${words[-1]}"
    local IFS=$'\n'
    COMPREPLY=($("${words[0]}" _complete "${words[@]:1}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -gt 0 && "${COMPREPLY[0]}" == *[=.] ]] && compopt -o nospace
    if [[ "$current" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*=}"}"}")
    fi
}
complete -F _windtunnel windtunnel
"""

ZSH = r"""
#compdef windtunnel
_windtunnel() {
    local -a answers open closed
    answers=("${(@f)$("${words[1]}" _complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    open=(${(M)answers:#*[=.]})
    closed=(${answers:#*[=.]})
    (( $#open )) && compadd -S '' -- $open
    (( $#closed )) && compadd -- $closed
}
compdef _windtunnel windtunnel
"""

FISH = r"""
function __windtunnel_complete
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    $before[1] _complete $before[2..-1] "$current" 2>/dev/null
end
complete -c windtunnel -f -a '(__windtunnel_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

HOW_TO_LOAD = """\
bash: echo 'eval "$(windtunnel completion bash)"' >> ~/.bashrc
zsh:  echo 'eval "$(windtunnel completion zsh)"' >> ~/.zshrc      (after compinit)
fish: windtunnel completion fish > ~/.config/fish/completions/windtunnel.fish"""


def main(arguments: Sequence[str]) -> None:
    """Prints the completion script of a shell."""
    parser = argparse.ArgumentParser(
        prog="windtunnel completion",
        description="Print a script that completes commands, groups, choices and keys.",
        epilog=HOW_TO_LOAD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SCRIPTS)
    print(SCRIPTS[parser.parse_args(arguments).shell].strip())


def candidates(
    words: Sequence[str],
    commands: Sequence[str],
    config_names: Mapping[str, str],
    config_dir: Path = CONFIG_DIR,
) -> list[str]:
    """Returns the possible completions of the last of `words`, the words after `windtunnel`.

    `config_names` maps each command that has a root config to its name. Never raises for wrong input: a
    wrong word has no completions.
    """
    *before, current = words or [""]
    if not before:
        return _starting_with(current, commands)
    command = before[0]
    if command == "completion":
        return _starting_with(current, SCRIPTS)
    dirs = _dirs(before, config_dir)
    groups = find_groups(dirs)
    if command == "list":
        return _starting_with(current, groups)
    if command not in config_names:
        return []
    if current.startswith("-"):
        return _starting_with(current, FLAGS)
    key, equals, value = current.partition("=")
    config_name, overrides = config_names[command], before[1:]
    if equals and key in groups:
        return _values(key, value, [choice.name for choice in groups[key]])
    if equals:
        is_switch = isinstance(_node(key, overrides, config_name, dirs), bool)
        return _values(key, value, ["true", "false"] if is_switch else [])
    if "." in current:
        return _nested_keys(current, overrides, config_name, dirs)
    root_keys = _root_keys(config_name, dirs[0], groups)
    return _starting_with(current, [*(f"{group}=" for group in groups), *root_keys])


def _dirs(before: Sequence[str], config_dir: Path) -> list[Path]:
    own = [Path(word) for flag, word in itertools.pairwise(before) if flag == "--config-dir"]
    return [config_dir, *(folder.resolve() for folder in own if folder.is_dir())]


def _values(key: str, value: str, choices: Sequence[str]) -> list[str]:
    """Returns `key=choice` for the choices that begin with the text after the last comma of the value."""
    given, comma, unfinished = value.rpartition(",")
    return [f"{key}={given}{comma}{name}" for name in choices if name.startswith(unfinished)]


def _root_keys(config_name: str, config_dir: Path, groups: Iterable[str]) -> list[str]:
    """Returns the keys of the root config file, and the sections and groups that have keys below them."""
    found = [
        key for key in key_comments(config_dir / f"{config_name}.yaml") if key.split(".")[0] not in _HYDRA
    ]
    sections = dict.fromkeys(key.partition(".")[0] for key in found if "." in key)
    plain = [f"{key}=" for key in found if "." not in key and key not in sections]
    return plain + [f"{name}." for name in [*sections, *groups] if "/" not in name]


def _nested_keys(current: str, overrides: Sequence[str], config_name: str, dirs: Sequence[Path]) -> list[str]:
    """Returns the keys one level below the last dot of `current`."""
    parent, _, _ = current.rpartition(".")
    node = _node(parent, overrides, config_name, dirs)
    names = [name for name in node if name != "_target_"] if isinstance(node, dict) else []
    found = [f"{parent}.{name}{'.' if isinstance(node[name], dict) else '='}" for name in names]
    return _starting_with(current, found)


def _node(key: str, overrides: Sequence[str], config_name: str, dirs: Sequence[Path]) -> Any:
    """Returns the value of a dotted key in the config with the groups chosen so far, None if it has none."""
    source = importlib.import_module("experiments.app.settings.compose").ConfigSource(
        config_name=config_name, dirs=dirs
    )
    chosen = [word for word in overrides if re.fullmatch(r"[\w/]+=[\w-]+", word)]
    try:
        node = source.compose_plain(chosen)
    except Exception:  # a line that cannot be composed yet completes as if it had no overrides
        node = source.compose_plain([])
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _starting_with(prefix: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(prefix)]
