"""Finds the commands that start servers in YAML manifests; nothing is executed.

Read are the `entrypoint`, `command` and `args` of a container in Compose and Kubernetes, a model of KServe or
of Ray Serve LLM, and the `run` of a SkyPilot task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from experiments.app.launch_lines.python_files import as_flags
from experiments.app.launch_lines.shell import (
    Command,
    commands_of_script,
    commands_of_words,
    plain_words,
    script_of,
    split_or_none,
    with_values,
)
from experiments.app.launch_lines.versions import IMAGES
from experiments.app.settings.bounded_yaml import NotTextError, TooLargeError, parse_yaml
from sim.settings.errors import ConfigError

CONTAINER = ("entrypoint", "command", "args")
"""Keys of a container with the words of its command."""


def commands_of_manifest(text: str, folder: Path) -> Iterator[Command]:
    """Yields the commands of the containers in YAML, of which there may be several documents."""
    for part in re.split(r"^---.*$", text, flags=re.M):
        try:
            whole = parse_yaml(part, "--from")
        except (TooLargeError, NotTextError) as error:
            raise ConfigError(str(error)) from None
        except (yaml.YAMLError, ValueError) as error:
            what = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise ConfigError(f"--from: not valid YAML: {what}") from error
        of_object = _copies(whole, "spec", "replicas")
        for node in _mappings(whole):
            for command in (*_of_container(node, folder), *_of_ray(node, folder), *_of_kserve(node, folder)):
                if of_object > 1:  # a Service picks one of its pods at random
                    yield replace(command, copies=of_object, routing="random")
                else:
                    yield command


def _copies(node: Any, *keys: str) -> int:
    """Returns the number below these keys; 1 if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, int) and not isinstance(node, bool) and node > 1 else 1


def _mappings(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
        for value in node.values():
            yield from _mappings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _mappings(value)


def _of_container(node: Mapping[str, Any], folder: Path) -> Iterator[Command]:
    """Yields the command of a mapping with command, args or run, and of a text with a script in it."""
    environment = _variables(node.get("environment", node.get("env", node.get("envs"))))
    if isinstance(node.get("run"), str):  # a task of SkyPilot, a step of a CI
        yield from commands_of_script(node["run"], folder, environment)
    parts = [part for key in CONTAINER if isinstance(part := node.get(key), str | list)]
    if not parts:
        return
    words: list[str] = []
    for number, part in enumerate(parts):
        if isinstance(part, list):
            words += [with_values(str(word), environment) for word in part if word is not None]
        elif isinstance(part, str) and script_of([*words[1:], "x"]) is not None:
            words.append(part)  # the script of sh -c
        elif isinstance(part, str) and not words and number == len(parts) - 1:
            found = list(commands_of_script(part, folder, environment))
            if found:
                yield from found
                return
            words += plain_words(split_or_none(part), environment)
        elif isinstance(part, str):
            words += plain_words(split_or_none(part), environment)
    found = list(commands_of_words(words, environment, {}, folder))
    image = node.get("image")
    if not found and isinstance(image, str):
        for engine, pattern in IMAGES.items():
            if pattern.search(image):
                found = [Command(engine=engine, tokens=tuple(words), environment=environment, folder=folder)]
                break
    copies = _copies(node, "deploy", "replicas")
    yield from (replace(command, copies=copies) for command in found)


def _of_ray(node: Mapping[str, Any], folder: Path) -> Iterator[Command]:
    """Yields the command of a model of Ray Serve LLM: `engine_kwargs` are vLLM's arguments."""
    model, arguments = node.get("model_loading_config"), node.get("engine_kwargs", {})
    if not isinstance(model, Mapping) or not isinstance(arguments, Mapping):
        return
    words = [str(model.get("model_source") or model.get("model_id") or ""), *as_flags(arguments)]
    copies = _copies(node, "deployment_config", "num_replicas")
    runtime = node.get("runtime_env")
    yield Command(
        engine="vllm",
        tokens=tuple(words),
        environment=_variables(runtime.get("env_vars") if isinstance(runtime, Mapping) else None),
        folder=folder,
        copies=copies,
        routing="power_of_two" if copies > 1 else None,
    )


def _of_kserve(node: Mapping[str, Any], folder: Path) -> Iterator[Command]:
    """Yields the command of a model of KServe whose runtime for Hugging Face models runs vLLM."""
    kind, words = node.get("modelFormat"), node.get("args", [])
    if not isinstance(kind, Mapping) or kind.get("name") != "huggingface" or not isinstance(words, list):
        return
    kept: list[str] = []
    for word in plain_words([str(word) for word in words], _variables(node.get("env"))):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name == "--backend" and value not in ("", "auto", "vllm"):
            return
        kept.append({"--model-id": "--model", "--model-name": "--served-model-name"}.get(name, name))
        kept[-1] += equals + value
    stored = str(node.get("storageUri", ""))
    if stored.startswith("hf://"):
        kept += ["--model", stored.removeprefix("hf://")]
    yield Command(engine="vllm", tokens=tuple(kept), environment=_variables(node.get("env")), folder=folder)


def _variables(node: Any) -> dict[str, str]:
    """Returns the variables of a container: a mapping, or a list of NAME=VALUE or {name, value}."""
    if isinstance(node, Mapping):
        return {str(name): str(value) for name, value in node.items() if value is not None}
    found = {}
    for entry in node if isinstance(node, list) else ():
        if isinstance(entry, Mapping) and entry.get("value") is not None:
            found[str(entry.get("name"))] = str(entry["value"])
        elif isinstance(entry, str) and "=" in entry:
            name, _, value = entry.partition("=")
            found[name] = value
    return found
