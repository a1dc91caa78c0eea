"""The command line of a command whose settings Hydra composes: its help, its config, and its runs.

The help (`windtunnel <command> --help`) has the groups, their choices, and every setting with its value and
meaning.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.app.run_folder import overwrite_of
from experiments.app.runner import run_command
from experiments.app.settings.compose import ConfigSource, without_hydra
from experiments.app.settings.config_groups import (
    CONFIG_DIR,
    Choice,
    config_dirs,
    find_groups,
    key_comments,
    with_choice,
)
from experiments.app.settings.hydra_errors import COMPOSE_ERRORS, USER_ERRORS, explained
from experiments.app.settings.override import check_chosen_once
from experiments.app.settings.renamed import with_new_names
from sim.report.config_text import yaml_text
from sim.settings.build import shown
from sim.settings.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Application:
    """A command whose settings Hydra composes."""

    name: str  # of the command
    summary: str
    module: str  # defines prepare(cfg, composition), see `experiments.app.job`
    config_name: str
    config_dir: Path = CONFIG_DIR
    names_setting: str | None = None  # gets the words that are no overrides as a list; None: they are errors

    def overrides(self, words: Sequence[str]) -> list[str]:
        """Returns the words as overrides: those that are names become one override of `names_setting`.

        Raises ConfigError for an empty name, and for names beside that setting.
        """
        if self.names_setting is None:
            return list(words)
        names = [word for word in words if "=" not in word and not word.startswith("~")]
        if "" in names:
            raise ConfigError("'': a name is empty; leave it out, or give a name")
        if names and any(word.startswith(f"{self.names_setting}=") for word in words):
            raise ConfigError(f"{names[0]}: give names as words or by {self.names_setting}=, not both")
        others = [word for word in words if word not in names]
        return [*others, f"{self.names_setting}=[{','.join(names)}]"] if names else others

    def source(self, user_dir: Path | None) -> ConfigSource:
        """Returns the root config and the config folders, the user's included.

        Raises ConfigError if `user_dir` is not a folder.
        """
        return ConfigSource(config_name=self.config_name, dirs=config_dirs(user_dir, self.config_dir))


def launch(application: Application, arguments: Sequence[str]) -> None:
    """Prints help, shows the config, or runs the command, as the arguments say.

    Raises ConfigError for a wrong setting, UnsuccessfulError for a run without success, and
    KeyboardInterrupt after Ctrl-C.
    """
    options = parser_of(application).parse_intermixed_args(arguments)
    _check_flags(options)
    overwrite, given = overwrite_of(application.overrides(options.overrides))
    source = application.source(options.config_dir)
    overrides = with_new_names(given, source.dirs)
    check_chosen_once(overrides, find_groups(source.dirs))
    if options.help:
        with explained(source, overrides):
            print_help(application.name, application.summary, source, overrides)
        return
    # A user's own classes may be in the current folder; it comes last, so that they shadow no other module.
    sys.path.append(os.getcwd())
    is_shown = options.cfg or options.info
    try:
        with explained(source, overrides, COMPOSE_ERRORS if is_shown else USER_ERRORS):
            if is_shown:
                _show(source, options, overrides)
            else:
                module, multirun = application.module, options.multirun
                run_command(source, overrides, module, multirun=multirun, overwrite=overwrite)
    except ConfigError as error:
        raise with_choice(error, source.dirs)  # noqa: B904 (the same error)


def _show(source: ConfigSource, options: argparse.Namespace, overrides: list[str]) -> None:
    """Prints the composed config (--cfg) or Hydra's information about it (--info)."""
    if options.info:
        source.command_line([*source.as_read(overrides), "--info", options.info], _nothing)
        return
    cfg = source.compose(overrides, with_hydra=True)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_readonly(cfg.hydra, None)
    if options.cfg == "job":
        cfg = without_hydra(cfg)
    elif options.cfg == "hydra":
        cfg = OmegaConf.masked_copy(cfg, ["hydra"])
        with open_dict(cfg.hydra):
            del cfg.hydra["help"], cfg.hydra["hydra_help"]
    if options.resolve:
        OmegaConf.resolve(cfg)
    print(OmegaConf.to_yaml(cfg), end="")


def _nothing(_: DictConfig) -> None:
    """Does nothing: the task of a command line that runs none."""


def parser_of(application: Application) -> argparse.ArgumentParser:
    """Returns the parser of the flags of Hydra that are supported, and of the overrides."""
    parser = argparse.ArgumentParser(
        prog=f"windtunnel {application.name}",
        usage=f"windtunnel {application.name} [group=choice ...] [key=value ...] [--multirun] [--help]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--config-dir", type=Path)
    parser.add_argument("--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument(
        "--info", choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    )
    return parser


def _check_flags(options: argparse.Namespace) -> None:
    asked = [f"--{name}" for name in ("multirun", "cfg", "info") if getattr(options, name)]
    if len(asked) > 1:
        raise ConfigError(f"{' '.join(asked)}: only one of them can be given; leave out {asked[0]}")
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve: needs --cfg; add --cfg job, or leave out --resolve")


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
