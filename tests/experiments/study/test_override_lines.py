"""Lines of overrides: their names, their words, and what is not allowed in them."""

import pytest

from experiments.study.override_lines import by_name, check_lines, split


def test_overrides_are_parted_at_blanks_outside_of_brackets_and_quotes():
    assert split("a=1  b={c: 2, d: [3, 4]} e='f g'") == ("a=1", "b={c: 2, d: [3, 4]}", "e='f g'")
    assert by_name(["two words: a=1 b=2", "a=1", "x: "]) == {
        "two words": ("a=1", "b=2"),
        "a=1": ("a=1",),
        "x": (),
    }


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a=1", "load"], r"arms\[1\]=load: must be key=value"),
        (["mine: ++seed=1"], r"arms\[0\]=seed: must not be set here; seeds name them"),
        (["x: seed@y=1"], r"arms\[0\]=seed@y: must not be set here"),
        (["x: a=1", "x: a=2"], "arms=.* must have different names"),
    ],
)
def test_rejects_lines_that_are_no_overrides_of_the_study(lines, message):
    with pytest.raises(ValueError, match=message):
        check_lines("arms", lines, {"seed": "seeds name them"})


def test_accepts_deletions_and_keys_that_only_begin_like_a_reserved_one():
    """The message names the third line, so the two before it were accepted."""
    allowed, reserved = ["~lora", "seed_of_mine=1"], {"seed": "seeds name them"}
    check_lines("arms", allowed, reserved)
    with pytest.raises(ValueError, match=r"arms\[2\]=seed: must not be set here"):
        check_lines("arms", [*allowed, "x: seed=1"], reserved)
