"""Reference of the Python interfaces, made from signatures and docstrings."""

import ast

from experiments.site.docstrings import (
    definition,
    docstring,
    fields_of,
    is_property,
    public_methods,
    signature,
)
from experiments.site.settings_pages import cell

PAGES = {
    "reference/python.md": (
        "Python interface",
        "`from sim import simulate` runs what `windtunnel simulate` runs.",
        (
            "experiments.app.api.simulate",
            "sim.api.Result",
            "sim.settings.errors.ConfigError",
            "sim.cluster.attached.AttachedFleet",
            "sim.cluster.attached.AttachedReplica",
            "sim.cluster.attached.AttachedGateway",
        ),
    ),
    "reference/policy_interfaces.md": (
        "Interfaces of policies",
        "The method of each family, and the views that it gets. [policies.md](../policies.md) explains them.",
        (
            "policies.batching.Batching",
            "policies.core.view.StepView",
            "policies.core.step.StepBuilder",
            "policies.core.sequence.SequenceView",
            "policies.core.request.Request",
            "policies.scheduling.Scheduling",
            "policies.caching.pool.Caching",
            "policies.routing.Routing",
            "policies.routing.ReplicaView",
            "policies.admission.Admission",
            "policies.scaling.Scaling",
            "policies.scaling.PoolView",
            "policies.prediction.LengthPredictor",
            "policies.adapters.AdapterServing",
            "policies.speculation.DraftLength",
            "policies.core.engine.EngineCore",
            "policies.core.plan.StepPlan",
            "policies.core.plan.StepOutcome",
        ),
    ),
    "reference/models_and_traces.md": (
        "Interfaces of hardware models and workloads",
        "What a source of iteration times, a device, a model, and a source of traffic have.",
        (
            "hwmodels.iterations.IterationModel",
            "hwmodels.iterations.IterationShape",
            "hwmodels.levels.LatencyLevel",
            "hwmodels.device.Device",
            "hwmodels.device.Link",
            "hwmodels.model.ModelSpec",
            "sim.workload.base.Workload",
            "sim.workload.base.Source",
            "sim.workload.base.Arrival",
            "sim.workload.distributions.Distribution",
        ),
    ),
    "reference/engine_interface.md": (
        "Interface of the real engine",
        "`from realengine.serving.llm import LLM`, on a CPU or a GPU. [engine.md](../engine.md) explains it.",
        (
            "realengine.serving.llm.LLM",
            "realengine.serving.llm.RequestOutput",
            "realengine.serving.sampling_params.SamplingParams",
            "realengine.settings.EngineSettings",
        ),
    ),
}


def python_pages() -> dict[str, str]:
    """Returns the pages by their place in the site. Raises ValueError for a name that does not exist."""
    return {
        place: "\n".join([f"# {title}\n", f"{introduction}\n", *map(described, names)])
        for place, (title, introduction, names) in PAGES.items()
    }


def described(target: str) -> str:
    """Returns the section of a class or function: its docstring, its fields and its public methods."""
    node = definition(target)
    if node is None:
        raise ValueError(
            f"{target}: no such class or function; correct the list in experiments/site/python_pages.py"
        )
    module, _, name = target.rpartition(".")
    parts = [f"## {name}\n", f"`{module}.{name}`\n"]
    if not isinstance(node, ast.ClassDef):
        return "\n".join([*parts, f"```python\n{signature(node)}\n```\n", f"{text(docstring(node))}\n"])
    parts.append(f"{text(docstring(node))}\n")
    fields = {name: field for name, field in fields_of(target).items() if not name.startswith("_")}
    if fields:
        parts.append("| field | type | default | meaning |\n| --- | --- | --- | --- |")
        parts += [
            f"| `{name}` | {code(f.annotation)} | {code(f.default)} | {cell(f.meaning)} |"
            for name, f in fields.items()
        ]
        parts.append("")
    properties = [method for method in public_methods(node) if is_property(method)]
    if properties:
        parts.append("| property | type | meaning |\n| --- | --- | --- |")
        for method in properties:
            kind = ast.unparse(method.returns) if method.returns else ""
            parts.append(f"| `{method.name}` | {code(kind)} | {cell(docstring(method))} |")
        parts.append("")
    for method in public_methods(node):
        if not is_property(method):
            section = f"```python\n{signature(method)}\n```\n\n{text(docstring(method))}\n"
            parts.append(f"### {name}.{method.name}\n\n{section}")
    return "\n".join(parts)


def text(docstring: str) -> str:
    """Returns a docstring as Markdown: its indented parts are blocks of code, and lists keep their lines."""
    lines = []
    for paragraph in docstring.split("\n\n"):
        if paragraph and all(line.startswith("    ") for line in paragraph.splitlines()):
            lines.append(f"```text\n{paragraph}\n```")
        else:
            lines.append(lines_of(paragraph))
    return "\n\n".join(lines)


def lines_of(paragraph: str) -> str:
    """Returns a paragraph whose lines of the form `name: meaning` begin on lines of their own."""
    joined: list[str] = []
    for line in paragraph.replace("<", "&lt;").splitlines():
        begins = line.partition(":")[0].replace(", ", "").replace("_", "").isalnum() and ": " in line
        joined.append(f"- {line}" if begins and not line.startswith(("-", " ")) else line)
    listed = any(line.startswith("- ") for line in joined)
    return "\n" + "\n".join(joined) if listed else "\n".join(joined)


def code(text: str) -> str:
    """Returns a text as code in a cell of a table."""
    return f"`{text}`".replace("|", "\\|").replace("\n", " ") if text else ""
