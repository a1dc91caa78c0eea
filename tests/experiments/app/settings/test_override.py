"""An override is split into the parts that Hydra gives it."""

import pytest

from experiments.app.settings.override import Override, about, keys_overlap, not_about


@pytest.mark.parametrize(
    ("text", "prefix", "key", "package", "value", "root"),
    [
        ("engine.max_num_seqs=64", "", "engine.max_num_seqs", "", "64", "engine"),
        ("++pools.large={replicas: 2}", "++", "pools.large", "", "{replicas: 2}", "pools"),
        ("+workload/arrivals=gamma", "+", "workload/arrivals", "", "gamma", "workload"),
        ("routing@decode_routing=power_of_two", "", "routing", "decode_routing", "power_of_two", "routing"),
        ("~lora", "~", "lora", "", None, "lora"),
        ("note='a=b@c/d.e'", "", "note", "", "'a=b@c/d.e'", "note"),
        ("seed=", "", "seed", "", "", "seed"),
    ],
)
def test_the_parts_of_an_override(text, prefix, key, package, value, root):
    found = Override.parse(text)
    assert (found.prefix, found.key, found.package, found.value) == (prefix, key, package, value)
    assert (found.root, found.is_whole) == (root, True)


def test_a_text_without_a_value_is_not_whole():
    assert not Override.parse("engine").is_whole
    assert not Override.parse("+engine").is_whole


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=12", 12),
        ("a=-0.5", -0.5),
        ("a=null", None),
        ("a=[1,b]", [1, "b"]),
        ("a='12'", "12"),
        ("a=007", "007"),
    ],
)
def test_values_are_those_of_hydra(text, value):
    assert Override.parse(text).typed_value() == value


def test_overrides_are_distinguished_by_the_root_of_their_key():
    given = ["hydra/launcher=joblib", "+hydra.run.dir=out", "seed=1", "hydration=2"]
    assert about(given, "hydra") == given[:2]
    assert not_about(given, "hydra") == given[2:]


def test_keys_overlap_where_one_lies_below_the_other():
    assert keys_overlap("slo", "slo.ttft_ms")
    assert keys_overlap("slo.ttft_ms", "slo")
    assert not keys_overlap("slo.ttft_ms", "slo.ttft")
