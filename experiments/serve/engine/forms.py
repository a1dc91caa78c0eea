"""The forms of outputs that requests ask for, as the real engine takes them."""

from __future__ import annotations

import json

from experiments.serve.backend import Function, Structure
from experiments.serve.http.tool_calls import CLOSE, OPEN
from realengine.serving.forms import LAYOUT, FormError, Forms, StructuredOutputs


def form_of(structure: Structure | None) -> StructuredOutputs | None:
    """Returns the form that an output must have; None: any, as that of one that may call tools or not."""
    if structure is None:
        return None
    if structure.kind == "tools":
        return StructuredOutputs(grammar=_call_grammar(structure.value)) if structure.must_call else None
    return StructuredOutputs(**{structure.kind: structure.value})


def check_functions(forms: Forms, functions: tuple[Function, ...]) -> None:
    """Raises FormError with the name of the first function whose parameters are no form."""
    for function in functions:
        try:
            forms.check(StructuredOutputs(json=_parameters(function)))
        except FormError as error:
            raise FormError(f"the parameters of the function {function.name}: {error}") from None


def _call_grammar(functions: tuple[Function, ...]) -> str:
    """Returns the grammar of one call in Hermes' form, as `ToolCallParser` reads it."""
    calls, rules = [], []
    for place, function in enumerate(functions):
        head = json.dumps(f'{OPEN}\n{{"name": "{function.name}", "arguments": ')
        calls.append(f"{head} arguments{place}")
        schema = json.dumps(_parameters(function) | {"x-guidance": LAYOUT}, ensure_ascii=False)
        rules.append(f"arguments{place}: %json {schema}")
    end = json.dumps(f"}}\n{CLOSE}")
    return "\n".join([f"start: ({' | '.join(calls)}) {end}", *rules])


def _parameters(function: Function) -> dict[str, object]:
    """Returns the schema of the arguments, which are an object."""
    schema = dict(function.schema) if isinstance(function.schema, dict) else {}
    return schema or {"type": "object"}
