"""Advice what to write in place of an override that cannot be read as key=value."""

import re

from sim.settings.override import Override

_SWEEP = re.compile(r"(?P<call>(?:range|choice|glob|interval)\([^()]*\))(?P<rest>.+)")


def cure(override: Override, *, is_list: bool) -> str:
    """Returns what to write in place of an override. is_list: whether its setting is a list."""
    value = override.value or ""
    if missing := _unclosed(value):
        return f"add what is missing at the end: '{override.text}{missing}'"
    key = f"{override.prefix}{override.name}"
    if found := _SWEEP.fullmatch(value):
        return f"remove {found['rest']} at the end: '{key}={found['call']}'"
    if is_list or value.startswith("["):
        parts = value.removeprefix("[").removesuffix("]").split(",")
        items = ",".join("'{}'".format(part.strip(" '\"")) for part in parts)
        return f'write each text of the list in quotes: "{key}=[{items}]"'
    return f"quote special characters: '{key}=\"{value}\"'"


def _unclosed(value: str) -> str:
    """Returns the brackets that are open at the end of a value, closed in their order; empty if none is."""
    missing = ""
    for char in value:
        if char in "([{":
            missing = ")]}"["([{".index(char)] + missing
        elif missing and char == missing[0]:
            missing = missing[1:]
    return missing
