"""Messages name a policy as a user chooses it."""

import re
from pathlib import Path

import pytest

from policies.user_code import OTHERWISE_NAMED, name_of

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
TARGET = re.compile(r"^_target_: policies\.\S*\.(\w+)$", re.MULTILINE)


def choices_by_class():
    """Returns group and class of the shipped policies -> the names of their choices."""
    found = {}
    for file in sorted(CONFIGS.glob("*/*.yaml")):
        if target := TARGET.search(file.read_text(encoding="utf-8")):
            found.setdefault((file.parent.name, target[1]), []).append(file.stem)
    return found


def test_every_shipped_policy_is_named_by_a_choice_of_its_class():
    found = choices_by_class()
    assert len(found) > 60
    wrong = {key: names for key, names in found.items() if name_of(type(key[1], (), {})()) not in names}
    assert not wrong
    assert OTHERWISE_NAMED.keys() <= {name for _, name in found}


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("MyPolicy", "my_policy"),
        ("OneAtATime", "one_at_a_time"),
        ("Lru2Tiers", "lru2_tiers"),
        ("Mlfq", "mlfq"),
    ],
)
def test_a_class_name_becomes_the_words_of_a_choice(class_name, name):
    assert name_of(type(class_name, (), {})()) == name
