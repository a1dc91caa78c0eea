"""Finds the commands that start servers in YAML manifests; nothing is executed.

Read are the `entrypoint`, `command` and `args` of a container in Compose and Kubernetes (also inside
LeaderWorkerSet and NVIDIA Dynamo's graphs), the models of KServe, KubeAI, Ray Serve LLM, llm-d's modelservice
and vLLM's production stack, and the `run` of a SkyPilot task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from experiments.app.launch_lines.python_files import as_flags
from experiments.app.launch_lines.shell import (
    Command,
    Role,
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
ROLES: Mapping[str, Role] = {"prefill": "prefill", "decode": "decode"}
ROLE_KEYS = ("subComponentType", "llm-d.ai/role")
"""Keys and labels whose value is the role of what is below them."""
ROUTERS = {"round-robin": "round_robin", "random": "random", "kv": "prefix_index"}
"""Value of --router-mode of Dynamo's front end -> choice of `routing`."""


@dataclass(frozen=True, slots=True)
class Place:
    """The copies, the routing and the role that the objects around a container state."""

    copies: int = 1
    routing: str | None = None
    """How requests are distributed over the copies; None: it is not known."""
    role: Role | None = None

    def around(self, command: Command) -> Command:
        """Returns the command with what its place says."""
        copies = command.copies * self.copies
        return replace(
            command,
            copies=copies,
            routing=(self.routing if self.copies > 1 else None) or command.routing,
            role=command.role or self.role,
        )

    def inside(self, node: Mapping[str, Any]) -> Place:
        """Returns the place of what is below a mapping."""
        labels = _below(node, "metadata", "labels")
        said = [
            role
            for each in (node, labels)
            for key in ROLE_KEYS
            if (role := ROLES.get(str(each.get(key)))) is not None
        ]
        return replace(self, copies=self.copies * _copies(node, "replicas"), role=[*said, self.role][0])

    def below(self, key: str) -> Place:
        """Returns the place of the value of a key; one that is named after a role has it."""
        words = {
            word for word in re.split(r"[^a-z]+", re.sub("([A-Z])", r" \1", key).lower()) if word in ROLES
        }
        return replace(self, role=ROLES[words.pop()]) if len(words) == 1 and self.role is None else self


def commands_of_manifest(text: str, folder: Path) -> Iterator[Command]:
    """Yields the commands of the containers in YAML, of which there may be several documents."""
    parts = [(part, _parsed(part)) for part in re.split(r"^---.*$", text, flags=re.M)]
    files = {
        str(name): content
        for _, whole in parts
        if isinstance(whole, Mapping) and whole.get("kind") == "ConfigMap"
        for name, content in _below(whole, "data").items()
        if isinstance(content, str)
    }
    for part, whole in parts:
        routing = "random"  # a Service picks one of its pods at random
        if isinstance(whole, Mapping) and whole.get("kind") == "DynamoGraphDeployment":
            mode = re.search(r"--router-mode[ =\"',\n-]+(kv|random|round-robin)\b", part)
            routing = ROUTERS[mode[1] if mode else "round-robin"]
        for command in _commands(whole, folder, Place(routing=routing)):
            yield replace(command, files={**files, **command.files})


def _parsed(text: str) -> Any:
    """Returns the content of a YAML document. Raises ConfigError."""
    try:
        return parse_yaml(text, "--from")
    except (TooLargeError, NotTextError) as error:
        raise ConfigError(str(error)) from None
    except (yaml.YAMLError, ValueError) as error:
        what = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"--from: not valid YAML: {what}") from error


def _commands(node: Any, folder: Path, place: Place) -> Iterator[Command]:
    """Yields the commands of a node and of all below it."""
    if isinstance(node, list):
        for one in node:
            yield from _commands(one, folder, place)
    if not isinstance(node, Mapping):
        return
    place = place.inside(node)
    for kind in KINDS:
        if (found := kind(node, folder)) is not None:
            yield from map(place.around, found)
            return
    yield from map(place.around, _of_container(node, folder))
    for key, value in node.items():
        yield from _commands(value, folder, place.below(str(key)))


def _below(node: Any, *keys: str) -> Mapping[str, Any]:
    """Returns the mapping below these keys; an empty one if there is none."""
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def _copies(node: Mapping[str, Any], *keys: str) -> int:
    """Returns the number below these keys; 1 if there is none."""
    count = _below(node, *keys[:-1]).get(keys[-1])
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 1 else 1


def _words(node: Any) -> list[str]:
    """Returns a list of words, or of flags by their names, as words; none for other values."""
    if isinstance(node, Mapping):
        return as_flags(node)
    return [str(word) for word in node if word is not None] if isinstance(node, list) else []


def _of_container(node: Mapping[str, Any], folder: Path) -> Iterator[Command]:
    """Yields the command of a mapping with command, args or run, and of a text with a script in it."""
    environment = _variables(node.get("environment", node.get("env", node.get("envs"))))
    if isinstance(node.get("run"), str):  # a task of SkyPilot, a step of a CI
        yield from commands_of_script(node["run"], folder, environment)
    parts = [part for key in CONTAINER if isinstance(part := node.get(key), str | list)]
    if not parts:
        return
    copies = _copies(node, "deploy", "replicas")
    words: list[str] = []
    for number, part in enumerate(parts):
        if isinstance(part, list) and not words and len(part) == 1 and number == len(parts) - 1:
            part = str(part[0])  # a whole command as one word
        if isinstance(part, list):
            words += [with_values(str(word), environment) for word in part if word is not None]
        elif script_of([*words[1:], "x"]) is not None:
            words.append(part)  # the script of sh -c
        elif not words and number == len(parts) - 1:
            found = list(commands_of_script(part, folder, environment))
            if found:
                yield from (replace(command, copies=copies) for command in found)
                return
            words += plain_words(split_or_none(part), environment)
        else:
            words += plain_words(split_or_none(part), environment)
    found = list(commands_of_words(words, environment, {}, folder))
    image = node.get("image")
    if not found and isinstance(image, str):
        for engine, pattern in IMAGES.items():
            if pattern.search(image):
                found = [Command(engine=engine, tokens=tuple(words), environment=environment, folder=folder)]
                break
    yield from (replace(command, copies=copies) for command in found)


def _of_ray(node: Mapping[str, Any], folder: Path) -> list[Command] | None:
    """Returns the command of a model of Ray Serve LLM: `engine_kwargs` are vLLM's arguments."""
    model, arguments = node.get("model_loading_config"), node.get("engine_kwargs", {})
    if not isinstance(model, Mapping) or not isinstance(arguments, Mapping):
        return None
    words = [str(model.get("model_source") or model.get("model_id") or ""), *as_flags(arguments)]
    copies = _copies(node, "deployment_config", "num_replicas")
    environment = _variables(_below(node, "runtime_env", "env_vars"))
    routing = "power_of_two" if copies > 1 else None
    return [_vllm(words, environment, folder, copies=copies, routing=routing)]


def _of_kserve(node: Mapping[str, Any], folder: Path) -> list[Command] | None:
    """Returns the command of a model of KServe whose runtime for Hugging Face models runs vLLM."""
    kind, words = node.get("modelFormat"), node.get("args", [])
    if not isinstance(kind, Mapping) or kind.get("name") != "huggingface" or not isinstance(words, list):
        return None
    environment = _variables(node.get("env"))
    kept: list[str] = []
    for word in plain_words([str(word) for word in words], environment):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name == "--backend" and value not in ("", "auto", "vllm"):
            return None
        kept.append({"--model-id": "--model", "--model-name": "--served-model-name"}.get(name, name))
        kept[-1] += equals + value
    stored = str(node.get("storageUri", ""))
    if stored.startswith("hf://"):
        kept += ["--model", stored.removeprefix("hf://")]
    return [_vllm(kept, environment, folder)]


def _of_kubeai(node: Mapping[str, Any], folder: Path) -> list[Command] | None:
    """Returns the command of a model of KubeAI: `url` and vLLM's `args`."""
    stored, engine = str(node.get("url", "")), node.get("engine")
    if not stored.startswith(("hf://", "pvc://")) or engine != "VLLM":
        return None
    words = [stored.partition("://")[2], *_words(node.get("args"))]
    copies = _copies(node, "minReplicas")
    routing = "least_outstanding" if copies > 1 else None
    return [_vllm(words, _variables(node.get("env")), folder, copies=copies, routing=routing)]


PRODUCTION_STACK = {
    "maxModelLen": "--max-model-len",
    "dtype": "--dtype",
    "tensorParallelSize": "--tensor-parallel-size",
    "pipelineParallelSize": "--pipeline-parallel-size",
    "maxNumSeqs": "--max-num-seqs",
    "maxNumBatchedTokens": "--max-num-batched-tokens",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
    "maxLoras": "--max-loras",
}
"""Key of `vllmConfig` in the Helm values of vLLM's production stack -> flag."""


def _of_production_stack(node: Mapping[str, Any], folder: Path) -> list[Command] | None:
    """Returns the command of a model in the Helm values of vLLM's production stack.

    As its chart has it, the prefix cache is off unless `enablePrefixCaching` is true.
    """
    url, config = node.get("modelURL"), _below(node, "vllmConfig")
    if not isinstance(url, str):
        return None
    words = [url, *(["--enable-lora"] if node.get("enableLoRA") else [])]
    if "vllmConfig" in node:
        words.append(f"--{'' if config.get('enablePrefixCaching') else 'no-'}enable-prefix-caching")
    if "enableChunkedPrefill" in config:
        words.append(f"--{'' if config['enableChunkedPrefill'] else 'no-'}enable-chunked-prefill")
    for key, flag in PRODUCTION_STACK.items():
        if key in config:
            words += [flag, str(config[key])]
    words += _words(config.get("extraArgs"))
    environment = _variables(node.get("env"))
    cache = _below(node, "lmcacheConfig")
    if cache.get("enabled"):
        role = {"kv_connector": "LMCacheConnectorV1", "kv_role": str(cache.get("kvRole", "kv_both"))}
        words += ["--kv-transfer-config", json.dumps(role)]
        sizes = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "cpu", "LMCACHE_MAX_LOCAL_DISK_SIZE": "disk"}
        given = {name: cache.get(f"{where}OffloadingBufferSize") for name, where in sizes.items()}
        environment |= {name: str(size) for name, size in given.items() if size not in (None, 0, "0")}
    copies = _copies(node, "replicaCount")
    routing = "round_robin" if copies > 1 else None
    return [_vllm(words, environment, folder, copies=copies, routing=routing)]


def _of_llm_d(node: Mapping[str, Any], folder: Path) -> list[Command] | None:
    """Returns the commands of the Helm values of llm-d's modelservice, of prefill and decode servers."""
    model = str(_below(node, "modelArtifacts").get("uri", ""))
    if not model.startswith(("hf://", "pvc://", "oci://")):
        return None
    found: list[Command] = []
    for name, role in ROLES.items():
        part = _below(node, name)
        if not part or part.get("create") is False or part.get("replicas") == 0:
            continue
        layout = _below(part, "parallelism")
        sizes = (("tensor", "--tensor-parallel-size"), ("data", "--data-parallel-size"))
        flags = [word for key, flag in sizes if key in layout for word in (flag, str(layout[key]))]
        containers = part.get("containers")
        for container in containers if isinstance(containers, list) else ():
            if not isinstance(container, Mapping):
                continue
            environment = _variables(container.get("env"))
            if container.get("modelCommand") == "vllmServe":
                words = [model.partition("://")[2], *flags, *_words(container.get("args"))]
                commands = [_vllm(words, environment, folder)]
            else:
                commands = list(_of_container(container, folder))
            copies = _copies(part, "replicas")
            found += [replace(one, copies=copies, routing="prefix_index", role=role) for one in commands]
    has_both = {one.role for one in found} == set(ROLES.values())
    return found if has_both else [replace(one, role=None) for one in found]


KINDS: Sequence[Callable[[Mapping[str, Any], Path], list[Command] | None]] = (
    _of_ray,
    _of_kserve,
    _of_kubeai,
    _of_production_stack,
    _of_llm_d,
)
"""What reads a mapping with everything below it; None: the mapping is of another kind."""


def _vllm(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    *,
    copies: int = 1,
    routing: str | None = None,
) -> Command:
    """Returns the command of a server of vLLM with these words behind its program."""
    return Command(
        engine="vllm",
        tokens=tuple(words),
        environment=environment,
        folder=folder,
        copies=copies,
        routing=routing,
    )


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
