"""`windtunnel <command> --help`: the groups, their choices, and every setting with its value and meaning."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import Choice, find_groups, key_comments
from sim.report.config_text import yaml_text
from sim.settings.convert import shown

WIDTH = 110

FLAGS = """\
  -m, --multirun     one run for each combination of comma-separated values
  overwrite=true     replace the results of an earlier run in the same folder
  --from LINE        settings of a server's command line, or of a file with one: "vllm serve MODEL -tp 4"
  --from-ignore A,B  flags of that command to leave out, which are refused otherwise
  --config-dir DIR   a folder with your own configs, such as DIR/batching/mine.yaml
  --cfg job          print the composed config and exit (with --resolve, interpolations ${...} are filled in)
  --traceback        print the whole traceback of an error, for example in your own policy
  -h, --help         print this help, for the choices given on the command line"""


def print_help(
    command: str, summary: str, source: ConfigSource, overrides: Sequence[str], flags: str = FLAGS
) -> None:
    """Prints the help for the config with these overrides: each choice of a group has its own settings.

    Only groups that the config uses are listed. The settings of the root config come before those of groups.
    """
    cfg = source.compose(overrides, with_hydra=True)
    chosen = {key: name for key, name in cfg.hydra.runtime.choices.items() if "@" not in key}
    groups = {group: choices for group, choices in find_groups(source.dirs).items() if group in chosen}
    root = _root_comments(source.dirs[0] / f"{source.config_name}.yaml")
    comments = root | _group_comments(groups, chosen)
    print(f"usage: windtunnel {command} [group=choice ...] [key=value ...] [flags]\n\n{summary}\n\n{flags}\n")
    print("groups (* marks the current choice; `windtunnel list GROUP` describes the choices)")
    for group, choices in groups.items():
        print(_wrapped(group, [_marked(choice.name, chosen.get(group)) for choice in choices]))
    print("\nsettings")
    plain: Any = OmegaConf.to_container(cfg)
    for key, value in sorted(_settings(plain), key=lambda setting: setting[0] not in root):
        print(_line(f"{key}={value}", comments.get(key, "")))


def _root_comments(file: Path) -> dict[str, str]:
    """Returns dotted key -> comment of a root config and of the root configs that it extends."""
    loaded: Any = OmegaConf.to_container(OmegaConf.load(file))
    comments: dict[str, str] = {}
    for entry in loaded.get("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            comments |= _root_comments(file.with_name(f"{entry}.yaml"))
    return comments | key_comments(file)


def _group_comments(
    groups: Mapping[str, Sequence[Choice]], chosen: Mapping[str, str | None]
) -> dict[str, str]:
    comments: dict[str, str] = {}
    for group, choices in groups.items():
        for choice in choices:
            if choice.name == chosen.get(group):
                comments |= key_comments(choice.file, prefix=group.replace("/", "."))
    return comments


def _settings(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields every leaf below the node as (dotted key, value as on the command line)."""
    for name, value in node.items():
        if name == "_target_" or (name == "hydra" and not prefix):
            continue
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            text = shown(value) if isinstance(value, list) else yaml_text([value]).strip().removeprefix("- ")
            yield f"{prefix}{name}", textwrap.shorten(text.replace("\n", " "), width=48, placeholder="...")


def _marked(name: str, chosen: str | None) -> str:
    return f"{name}*" if name == chosen else name


def _wrapped(title: str, words: Sequence[str]) -> str:
    indent = " " * 22
    text = textwrap.fill(
        " ".join(words), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return f"  {title:20}" + text[22:]


def _line(setting: str, comment: str) -> str:
    return f"  {setting:52}  {comment}".rstrip()
