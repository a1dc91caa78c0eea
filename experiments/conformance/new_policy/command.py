"""`windtunnel new policy FAMILY NAME`: writes a working policy, its config and its test."""

import argparse
import importlib.util
import keyword
from collections.abc import Sequence
from pathlib import Path

from experiments.app.run_folder import file_errors_reported
from experiments.app.settings.config_groups import CONFIG_DIR, config_dirs, find_groups
from sim.report.files import write_whole
from sim.settings.errors import ConfigError, nearest, suggest

TEMPLATES = Path(__file__).with_name("templates")
EXTRA = "windtunnel[conformance]"
"""Has what the written tests import. The dash of other extras has a pytest plugin that prints a warning."""
CONFIGS = "my_policies"
"""Folder of the config, for --config-dir."""

FAMILIES = {
    "batching": "batching={name}",
    "scheduling": "scheduling={name}",
    "caching": "caching={name}",
    "routing": "replicas=2 routing={name}",
    "admission": "admission={name}",
    "scaling": "replicas=2 scaling={name}",
    "prediction": "scheduling=shortest_job_first prediction={name}",
    "adapters": "workload=lora adapters={name}",
    "draft_length": "speculation=ngram draft_length={name}",
}
"""Family -> overrides of `windtunnel simulate` with which its policy makes a difference."""


WITHOUT_TEMPLATE = {
    "layout": "policies/parallelism/auto.py",
    "placing": "policies/placement/greedy.py",
    "roles": "policies/roles/balance.py",
}
"""Groups of policies without a template -> a policy to copy."""


def main(arguments: Sequence[str]) -> None:
    """Writes three files and prints the next commands. Raises ConfigError without having written any."""
    parser = argparse.ArgumentParser(
        prog="windtunnel new",
        description="Write a working policy of a family, its config and its test, as a template to change.",
        epilog=f"families: {', '.join(FAMILIES)}",
        allow_abbrev=False,
    )
    parser.add_argument("kind", metavar="policy", help="the word policy")
    parser.add_argument("family", help="family of the policy, such as batching")
    parser.add_argument("name", help="name of the module and of the choice, such as my_policy")
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder to write to; default: the current folder",
    )
    options = parser.parse_args(arguments)
    if options.kind != "policy":
        raise ConfigError(
            f"new {options.kind}: only a policy can be written: windtunnel new policy FAMILY NAME"
        )
    if options.family not in FAMILIES:
        raise ConfigError(_no_family(options.family))
    check_name(options.name, options.family, options.dir)
    files = contents(options.family, options.name)
    write(options.dir, files)
    print("\n".join(_next_steps(options.family, options.name, options.dir, files)))


def _no_family(name: str, own_dir: Path = CONFIG_DIR) -> str:
    """Returns the message for a family without a template, with the remedy."""
    if name in WITHOUT_TEMPLATE:
        return (
            f"{name}: has no template; start with a copy of {WITHOUT_TEMPLATE[name]} and of a file in "
            f"configs/{name}; families with templates: {', '.join(FAMILIES)}"
        )
    if name in find_groups([own_dir]):
        return (
            f"{name}: is a group of settings, not of policies; copy a file of configs/{name} to "
            f"{CONFIGS}/{name} and change it; families: {', '.join(FAMILIES)}"
        )
    return f"{name}: no such family; {suggest(name, FAMILIES)}"


def check_name(name: str, family: str, folder: Path, own_dir: Path = CONFIG_DIR) -> None:
    """Raises ConfigError if the name cannot be that of a module and of a new choice of the family."""
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or name.startswith("_"):
        valid = "".join(c if c.isascii() and c.isalnum() else "_" for c in name).strip("_").lower()
        better = valid if valid.isidentifier() and not keyword.iskeyword(valid) else f"my_{valid or 'policy'}"
        raise ConfigError(
            f"name={name}: must consist of letters, digits and _, and must not be a Python keyword; "
            f"nearest: {better}"
        )
    user_dir = folder / CONFIGS
    choices = find_groups(config_dirs(user_dir if user_dir.is_dir() else None, own_dir)).get(family, [])
    names = [choice.name for choice in choices]
    if name in names:
        raise ConfigError(f"name={name}: {family}={name} already exists; choose another name")
    if not (folder / f"{name}.py").exists() and importlib.util.find_spec(name) is not None:
        close = nearest(name, names)
        hint = f"; {family}={close} exists" if close else ""
        raise ConfigError(
            f"name={name}: there is already a Python module of that name; nearest: my_{name}{hint}"
        )


def contents(family: str, name: str) -> dict[Path, str]:
    """Returns the text of each file by its path in the folder."""
    templates = {
        Path(f"{name}.py"): TEMPLATES / f"{family}.py",
        Path(CONFIGS) / family / f"{name}.yaml": TEMPLATES / "configs" / f"{family}.yaml",
        Path(f"test_{name}.py"): TEMPLATES / "tests" / f"{family}.py",
    }
    return {path: _renamed(file.read_text("utf-8"), family, name) for path, file in templates.items()}


def write(folder: Path, files: dict[Path, str]) -> None:
    """Writes all files, or none of them.

    Raises ConfigError if one of them exists, and CannotWriteError if the folder cannot be written to.
    """
    for path in files:
        if (folder / path).exists():
            raise ConfigError(
                f"{folder / path}: already exists and is not overwritten; choose another name or --dir"
            )
    begun: list[Path] = []
    try:
        with file_errors_reported(folder, "choose another --dir"):
            for path, text in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                begun.append(folder / path)
                write_whole(begun[-1], text)
    except BaseException:
        for file in begun:
            file.unlink(missing_ok=True)
        raise


def class_name(name: str) -> str:
    """Returns the class name of a module name: my_policy -> MyPolicy."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _renamed(text: str, family: str, name: str) -> str:
    own_import = f"from experiments.conformance.new_policy.templates.{family} import MyPolicy\n"
    if own_import in text:  # a test: windtunnel is third-party code there, and the policy is first-party
        others, rest = text.replace(own_import, "").split("\n\n\n", 1)
        others = others.replace("import pytest\n\nfrom", "import pytest\nfrom")
        text = f"{others}\n\nfrom {name} import MyPolicy\n\n\n{rest}"
    text = text.replace("import NDArray\n\nfrom policies", "import NDArray\nfrom policies")  # the same there
    text = text.replace("MyPool", f"{class_name(name)}Pool")
    return text.replace("MyPolicy", class_name(name)).replace("my_policy", name)


def _next_steps(family: str, name: str, folder: Path, files: dict[Path, str]) -> list[str]:
    choice = FAMILIES[family].format(name=name)
    written = [f"wrote {folder / path}" for path in files]
    where = [] if folder == Path() else [f"  cd {folder}"]
    quiet = "-p no:dash " if importlib.util.find_spec("dash") else ""
    return [
        *written,
        "next steps:",
        *where,
        f"  windtunnel simulate --config-dir {CONFIGS} {choice}",
        f"  pip install '{EXTRA}'  # for the tests",
        f"  pytest {quiet}test_{name}.py",
        f"  pytest {quiet}--policy {name}.{class_name(name)}  # checks five times as many worlds",
    ]
