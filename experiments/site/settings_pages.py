"""Reference of the settings: a page for the root settings and one for each group, made from the config files.

A setting has its key, its default, its unit (from the end of its name), its limits (those of the field that
it sets), and its meaning: the comment behind it, or else the docstring of the field. The source of a choice
is in its first lines, in its setting `source`, and in the docstring of its class.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR, Choice, find_groups, key_comments
from experiments.site.docstrings import definition, docstring, fields_of
from fieldlimits import limits_of
from sim.report.files import yaml_text
from sim.settings.build import locate, shown
from sim.setup.combinations import FEATURES, RULES
from sim.setup.scenario import Scenario

ROOTS = ("scenario", "simulate")
UNITS = {
    "_bytes_per_s": "bytes/s", "_flops_per_s": "FLOP/s", "_tokens_per_s": "tokens/s", "_per_s": "1/s",
    "_usd_per_hour": "USD/hour", "_usd": "USD", "_ms": "ms", "_us": "us", "_s": "s", "_hours": "hours",
    "_minutes": "minutes", "_bytes": "bytes", "_gib": "GiB", "_flops": "FLOPs", "_hz": "Hz", "_w": "W",
    "_j": "J", "_share": "0 to 1", "_tokens": "tokens", "_tokens_per_minute": "tokens/minute",
    "_per_minute": "1/minute",
    "_percent": "%", "_kwh": "kWh",
}  # fmt: skip
"""Ends of names -> units; the longest end counts."""
CONTENTS = {
    "batching": "policies of an engine: which sequences take part in an iteration, and with how many tokens",
    "scheduling": "policies of an engine: the order of waiting requests, and which ones are preempted",
    "caching": "policies of an engine: how KV memory is allocated, shared between prompts, and evicted",
    "adapters": "policies of an engine: which LoRA adapters are in GPU memory",
    "prediction": "policies of an engine: predictions of output lengths, for scheduling and routing",
    "routing": "policies of a cluster: the replica of each request",
    "migration": "policies of a cluster: which running requests move to another replica",
    "admission": "policies of a cluster: which requests are refused on arrival",
    "scaling": "policies of a cluster: the number of replicas over time",
    "roles": "policies of a cluster: which replicas prefill and which decode",
    "pools": "replicas of different kinds in one fleet, such as prefill and decode, or two GPUs",
    "network": "links between replicas and nodes",
    "failures": "crashes, slow replicas, lost links and bad releases",
    "recovery": "what becomes of the requests of a replica that has failed",
    "cold_start": "the start time of a replica",
    "layout": "how a replica's model is parallelised: as set, or chosen by a search",
    "placing": "algorithms that place models on GPUs (`windtunnel place`)",
    "model": "shapes of models, by the fields of their `config.json`",
    "model/transform": "changes of a model: pruned, distilled, sparse",
    "hardware": "data sheets of GPUs and other devices, and their prices",
    "engine": "profiles of serving engines: their host times, kernels and default limits",
    "latency": "sources of iteration times: roofline, tables, recorded times",
    "latency/jitter": "random scatter of iteration times",
    "calibration": "parameters of the roofline, fitted to operators measured on a GPU",
    "workload": "traffic: generated, or read from a trace",
    "client": "load generator of a measurement, whose own time is part of TTFT",
    "workload/arrivals": "arrival processes of generated traffic",
    "workload/lengths": "distributions of prompt and output lengths of generated traffic",
    "retries": "what clients do when a request is refused or takes too long",
    "speculation": "speculative decoding: what proposes draft tokens",
    "speculation/tree": "speculative decoding: shapes of draft trees",
    "speculation/draft": "speculative decoding: shapes of published draft heads and models",
    "draft_length": "speculative decoding: how many tokens are drafted",
    "acceptance": "speculative decoding: how many draft tokens are accepted",
    "slo": "service level objectives: limits on latencies, and the share of requests that must meet them",
    "tariff": "prices of an API, per token",
    "experiment": "comparisons for `windtunnel compare`",
    "whatif": "lists of changes for `windtunnel whatif`",
    "suite": "cases of a validation of the real engine",
    "thresholds": "largest errors at which a validation passes",
    "launcher": "what runs the simulations of a study: local processes, Ray or Slurm",
}
"""Group -> its content. The reference needs a line for every group."""
_LONGEST_VALUE = 200
_FIRST_LARGE = 1e6


def unit(key: str) -> str:
    """Returns the unit that the end of a key, or of a key above it, names; an empty text if none does."""
    for name in reversed(key.split(".")):
        ends = sorted((end for end in UNITS if f"_{name}".endswith(end)), key=len)
        if ends:
            return UNITS[ends[-1]]
    return ""


def settings_pages() -> dict[str, str]:
    """Returns the pages of the root settings, of all groups, and their list, by their place in the site."""
    groups = find_groups([CONFIG_DIR])
    composed = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose([], with_hydra=True)
    defaults = {key: name for key, name in composed.hydra.runtime.choices.items() if name is not None}
    pages = {
        "reference/settings.md": _root_page(),
        "reference/groups.md": _list_of_groups(groups, defaults),
        "reference/combinations.md": combinations_page(),
    }
    return pages | {_place(group): _group_page(group, choices, defaults) for group, choices in groups.items()}


def combinations_page() -> str:
    """Returns the page of the features that exclude each other: the table of `sim.setup.combinations`."""
    rows = [
        f"| `{FEATURES[rule.one].example}` | `{FEATURES[rule.other].example}` | {cell(rule.reason)} |"
        for rule in RULES
    ]
    return (
        "# Combinations that cannot be\n\nThe first two columns have one example each of a setting with the "
        "feature. A run with both is refused, with this reason and what to choose instead.\n\n"
        "| setting | excludes | because |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )


def settings_table(file: Path, prefix: str = "", skip: Iterable[str] = (), cls: Any = None) -> str:
    """Returns the table of the settings of a YAML file.

    skip: first parts of keys that are left out. cls: the dataclass of the settings; None: the file names it.
    """
    loaded: Any = read_yaml(file) or {}
    comments = key_comments(file)
    meanings, rules = dict(_field_meanings(loaded)), dict(_rules(loaded, "", cls))
    rows = []
    for key, value in _leaves(loaded):
        if key.partition(".")[0] in skip:
            continue
        meaning = comments.get(key) or meanings.get(key, "")
        rule = cell(rules.get(key, ""))
        rows.append(f"| `{prefix}{key}` | {_code(_value(value))} | {unit(key)} | {rule} | {cell(meaning)} |")
    head = "| setting | default | unit | allowed | meaning |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *rows]) + "\n" if rows else ""


def cell(text: str) -> str:
    """Returns a text as it can stand in a cell of a table."""
    return text.replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")


def _root_page() -> str:
    tables = [
        f"## Settings of {name}\n\n"
        + settings_table(CONFIG_DIR / f"{root}.yaml", skip=("defaults", "hydra"), cls=Scenario)
        for root, name in zip(ROOTS, ("a simulated run", "windtunnel simulate"), strict=True)
    ]
    return (
        "# Settings of a run\n\nThese settings are given as `key=value`; [groups](groups.md) have choices "
        "with settings of their own. Commands that simulate accept all of them; [commands](commands.md) has "
        "what each adds. [Combinations](combinations.md) has what excludes each other.\n\n"
        + "\n".join(tables)
    )


def _list_of_groups(groups: Mapping[str, list[Choice]], defaults: Mapping[str, str]) -> str:
    rows = []
    for group, choices in groups.items():
        link = f"[`{group}`]({_place(group).removeprefix('reference/')})"
        default = _code(defaults.get(group, ""))
        rows.append(f"| {link} | {default} | {len(choices)} | {CONTENTS[group]} |")
    text = (
        "# Groups\n\nA group is chosen by name: `batching=sarathi`. `windtunnel list GROUP` prints its "
        "choices. Where the table has no default, a command or another choice selects the group.\n\n"
    )
    head = ["| group | default | choices | content |", "| --- | --- | ---: | --- |"]
    return text + "\n".join([*head, *rows]) + "\n"


def _group_page(group: str, choices: list[Choice], defaults: Mapping[str, str]) -> str:
    default = f"The default is `{defaults[group]}`. " if group in defaults else ""
    head = (
        f"# {group}\n\n{default}Choose with `{group}=NAME`; keys begin with `{group.replace('/', '.')}.`\n\n"
    )
    summary = "".join(f"| [`{c.name}`](#{c.name}) | {cell(c.description)} |\n" for c in choices)
    return head + f"| choice | |\n| --- | --- |\n{summary}\n" + "\n".join(_choice(group, c) for c in choices)


def _choice(group: str, choice: Choice) -> str:
    loaded: Any = read_yaml(choice.file) or {}
    parts = [f"## {choice.name}\n", "\n".join(map(cell, _first_comments(choice.file))) + "\n"]
    target = loaded.get("_target_", "")
    if target:
        summary = docstring(definition(target)).partition("\n\n")[0]
        parts.append(f"`{target}`: {cell(summary)}\n" if summary else f"`{target}`\n")
    selected = list(_selected(loaded.get("defaults", [])))
    if selected:
        parts.append("Selects " + ", ".join(f"`{entry}`" for entry in selected) + ".\n")
    parts.append(settings_table(choice.file, prefix=group.replace("/", ".") + ".", skip=("defaults",)))
    return "\n".join(part for part in parts if part.strip())


def _selected(entries: Iterable[Any]) -> Iterator[str]:
    """Yields `group=choice` of the list of defaults of a choice."""
    for entry in entries:
        if isinstance(entry, dict):
            for key, value in entry.items():
                yield f"{key.removeprefix('override ').partition('@')[0].lstrip('/')}={value}"
        elif entry != "_self_":
            yield str(entry)


def _first_comments(file: Path) -> Iterator[str]:
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            return
        if not line.startswith("# @package"):
            yield line.lstrip("# ")


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif name != "_target_":
            yield f"{prefix}{name}", value


def _field_meanings(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields (key, docstring of the field) of every node that names its class."""
    if "_target_" in node:
        yield from ((prefix + name, field.meaning) for name, field in fields_of(node["_target_"]).items())
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _field_meanings(value, f"{prefix}{name}.")


def _rules(node: Mapping[str, Any], prefix: str, cls: Any) -> Iterator[tuple[str, str]]:
    """Yields (key, rule) of the settings whose fields declare limits. cls: the class of the node, or any."""
    if "_target_" in node:
        cls = locate(node["_target_"], prefix)
    is_class = isinstance(cls, type) and is_dataclass(cls)
    limits, hints = (limits_of(cls), get_type_hints(cls)) if is_class else ({}, {})
    for name, value in node.items():
        if name in limits:
            limit = limits[name].element or limits[name]
            yield f"{prefix}{name}", limits[name].rule or f"each {limit.rule}"
        if isinstance(value, dict):
            yield from _rules(value, f"{prefix}{name}.", hints.get(name))


def _value(value: Any) -> str:
    if isinstance(value, float) and abs(value) >= _FIRST_LARGE:
        return f"{value:.10g}".replace("e+", "e")
    text = shown(value) if isinstance(value, list) else yaml_text([value]).strip().removeprefix("- ")
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _place(group: str) -> str:
    return f"reference/groups/{group.replace('/', '_')}.md"
