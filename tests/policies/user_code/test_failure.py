"""Methods of a user's class are compared with the interface before a run."""

from typing import Protocol

from policies.user_code import signature_lack


class Traffic(Protocol):
    """An interface whose method takes keywords only."""

    def source(self, *, seed: int, max_model_len: int) -> object: ...


class ByKeyword:
    def source(self, *, seed, max_model_len):
        return seed, max_model_len


class ByPosition:
    def source(self, seed, max_model_len):
        return seed, max_model_len


class LacksOne:
    def source(self, *, seed):
        return seed


def test_arguments_that_are_keywords_only_are_accepted():
    assert signature_lack(ByKeyword, Traffic, ["source"]) == ("", "")
    assert signature_lack(ByPosition, Traffic, ["source"]) == ("", "")


def test_a_missing_keyword_is_named():
    lack, name = signature_lack(LacksOne, Traffic, ["source"])
    assert lack == "has source(seed), which must be source(seed, max_model_len)"
    assert name == "source"
