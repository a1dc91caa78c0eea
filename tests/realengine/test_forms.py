"""Outputs of a form: JSON that its schema accepts, matches, choices and grammars, with random weights."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("llguidance", reason="forms need the package llguidance")
pytest.importorskip("jsonschema")

import jsonschema
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from realengine.model.architecture import Architecture
from realengine.runner.token_masks import AllowedTokens
from realengine.serving.forms import FormError, Forms, StructuredOutputs
from realengine.serving.llm import LLM
from realengine.serving.model import Model
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.tokenizer import byte_tokenizer
from realengine.weights.load import load_weights
from tests.realengine.eager import eager_logits
from tests.realengine.serving.async_scenarios import CONFIG, SETTINGS

torch.set_num_threads(1)

SPEC = Architecture.from_hf(CONFIG | {"max_position_embeddings": 512})
EOS = SPEC.eos_token_ids[0]
GREEDY = SamplingParams(temperature=0, max_tokens=60)
FREE = replace(GREEDY, max_tokens=24, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICE = ("yes", "no é\n", "maybe", "maybe not")
FORMS = (
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex=r"[ab]{3}-[0-9]{1,4}x"),
    StructuredOutputs(choice=CHOICE),
    StructuredOutputs(grammar='root ::= "(" root ")" | "b"'),
)


def make(**own):
    model = Model(SPEC, None, byte_tokenizer(SPEC.vocab_size, SPEC.eos_token_ids))
    return LLM(model, **(SETTINGS | own))


@pytest.fixture(scope="module")
def llm():
    return make()


def served(llm, form, prompt=(1, 2, 3), **changes):
    (output,) = llm.generate([list(prompt)], replace(GREEDY, structured_outputs=form, **changes))
    assert output.error is None, output.error
    return output.outputs[0]


def assert_has_form(text):
    """Checks texts of FORMS, in their order."""
    document, match, choice, nested = text
    jsonschema.validate(json.loads(document), SCHEMA)
    assert re.fullmatch(r"[ab]{3}-[0-9]{1,4}x", match)
    assert choice in CHOICE
    assert re.fullmatch(r"(\()*b(\))*", nested)
    assert nested.count("(") == nested.count(")")


NAMES = st.sampled_from(["a", "b c", "é", 'q"', "long_name"])
VALUES = st.sampled_from(["x", "é\n", 3, None, True, [1], {"k": "v"}])


@st.composite
def leaves(draw):
    """Draws a schema of a value without parts."""
    least, more = draw(st.integers(-9, 9)), draw(st.integers(0, 99))
    return draw(
        st.sampled_from(
            [
                {"type": "string", "minLength": abs(least), "maxLength": abs(least) + more % 5},
                {"type": "integer", "minimum": least, "maximum": least + more},
                {"type": ["boolean", "null"]},
                {"type": "string", "format": "uuid"},
                {"type": "string", "pattern": "^[a-c]{1,3}\\.$"},
                {"enum": draw(st.lists(VALUES, min_size=1, max_size=3, unique_by=str))},
                {"const": draw(VALUES)},
            ]
        )
    )


@st.composite
def nested(draw, inner):
    """Draws a schema with parts."""
    parts, least = draw(st.dictionaries(NAMES, inner, max_size=3)), draw(st.integers(0, 2))
    return draw(
        st.sampled_from(
            [
                {
                    "type": "object",
                    "properties": parts,
                    "required": list(parts)[:least],
                    "additionalProperties": False,
                },
                {"type": "array", "items": draw(inner), "minItems": least, "maxItems": least + 2},
                {"anyOf": draw(st.lists(inner, min_size=1, max_size=2))},
            ]
        )
    )


@st.composite
def schemas(draw):
    """Draws a schema, the parts of an array by a reference in some."""
    part = draw(st.recursive(leaves(), nested, max_leaves=5))
    if draw(st.booleans()):
        return part
    return {"$defs": {"part": part}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas(), st.integers(0, 249), st.sampled_from([0.0, 1.0, 2.0]))
def test_json_of_any_small_schema_is_accepted_by_it(llm, schema, seed, temperature):
    form = StructuredOutputs(json=schema)
    output = served(llm, form, [seed, 7], seed=seed, temperature=temperature, max_tokens=480)
    assert (output.finish_reason, output.token_ids[-1]) == ("stop", EOS)
    jsonschema.validate(json.loads(output.text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    "pattern", ["a", "^(yes|no)$", r"\d{3}-\d{4}", "[^a-z\n]{2,5}", "é+ü{2}", "(a|b)*c", "", "a{0,3}"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_outputs_match_the_pattern(llm, pattern, temperature):
    for seed in range(3):
        output = served(
            llm, StructuredOutputs(regex=pattern), [seed], seed=seed, temperature=temperature, max_tokens=200
        )
        if output.finish_reason == "stop":
            assert re.fullmatch(pattern, output.text), output.text
        else:  # the likeliest token may be the same for ever
            assert (output.finish_reason, len(output.token_ids)) == ("length", 200)


def test_all_choices_come_and_nothing_else(llm):
    form = StructuredOutputs(choice=["a", "b", 'say "c"\n', ""])
    params = [replace(GREEDY, structured_outputs=form, seed=seed, temperature=1.0) for seed in range(60)]
    outputs = llm.generate([[1, 2, 3]] * 60, params)
    assert {output.outputs[0].text for output in outputs} == {"a", "b", 'say "c"\n', ""}


def test_the_likeliest_allowed_token_is_drawn(llm):
    """The definition: of the bytes with which a choice can go on, the one with the largest logit."""
    weights = load_weights(None, SPEC, torch.float32, torch.device("cpu"), seed=SETTINGS["seed"])
    tokenizer = byte_tokenizer(SPEC.vocab_size, SPEC.eos_token_ids)
    known = [[*tokenizer.encode(text), EOS] for text in CHOICE]
    prompt, drawn = [9, 8, 7], []
    while not drawn or drawn[-1] != EOS:
        allowed = sorted({each[len(drawn)] for each in known if each[: len(drawn)] == drawn})
        logits = eager_logits(SPEC, weights, torch.tensor(prompt + drawn))[-1]
        drawn.append(allowed[int(logits[allowed].argmax())])
    assert list(served(llm, FORMS[2], prompt).token_ids) == drawn


SMALL = replace(SPEC, num_layers=1)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
EAGLE = {"method": "eagle", "model": SMALL, "num_speculative_tokens": 2}
TREE = {"num_speculative_tokens": 4, "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1)]"}
WAYS = {
    "plain": {},
    "overlapped": {"overlap": True},
    "several iterations": {"max_iterations": 3},
    "small chunks": {"batching": Chunked(max_num_batched_tokens=6)},
    "little memory": {"num_kv_blocks": 6},
    "little memory, overlapped": {"num_kv_blocks": 6, "overlap": True},
    "ngram": {"speculative_config": NGRAM},
    "eagle": {"speculative_config": EAGLE},
    "eagle, overlapped": {"speculative_config": EAGLE, "overlap": True},
    "eagle, iterations": {"speculative_config": EAGLE, "max_iterations": 2},
    "tree": {"speculative_config": EAGLE | TREE},
    "draft model": {"speculative_config": EAGLE | {"method": "draft_model"}, "overlap": True},
}


def mixed(temperature):
    """Returns prompts and parameters, every other output with a form, and some of the free ones penalised."""
    generator = random.Random(4)
    prompts = [[generator.randrange(250) for _ in range(generator.randint(1, 30))] for _ in range(8)]
    seeded = {"temperature": temperature, "seed": 5 if temperature else None}
    params = [replace(GREEDY, structured_outputs=form, **seeded) for form in FORMS]
    free = [replace(FREE, presence_penalty=float(place % 2), **seeded) for place in range(4)]
    return prompts, [each for pair in zip(params, free, strict=True) for each in pair]


@pytest.fixture(scope="module")
def alone(llm):
    """Returns the outputs of each request by itself, by temperature."""
    found = {}
    for temperature in (0.0, 1.0):
        pairs = zip(*mixed(temperature), strict=True)
        found[temperature] = [llm.generate([prompt], each)[0].outputs[0] for prompt, each in pairs]
    return found


def test_outputs_in_a_batch_have_their_forms(alone):
    assert_has_form([output.text for output in alone[1.0][::2]])


@pytest.mark.sampled(fast=6, slow=12)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_draws_the_same(alone, way, temperature):
    prompts, params = mixed(temperature)
    expected = alone[temperature]
    engine = make(**WAYS[way])
    preempted, plan = [], engine.engine.core.plan

    def noted(now):
        found = plan(now)
        preempted.extend(found.preempted if found else ())
        return found

    engine.engine.core.plan = noted
    outputs = [output.outputs[0] for output in engine.generate(prompts, params)]
    assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
    assert [each.finish_reason for each in outputs] == [each.finish_reason for each in expected]
    assert bool(preempted) == ("little memory" in way)


def test_outputs_of_one_prompt_have_the_form_each(llm):
    (output,) = llm.generate(
        [[1, 2]], replace(GREEDY, n=4, temperature=1.0, seed=2, structured_outputs=FORMS[2])
    )
    assert {each.text for each in output.outputs} <= set(CHOICE)
    assert len({each.text for each in output.outputs}) > 1


def test_a_limit_cuts_the_form(llm):
    output = served(llm, FORMS[0], max_tokens=7)
    assert (output.finish_reason, len(output.token_ids)) == ("length", 7)
    assert output.text == '{"name"'


def test_an_output_that_ignores_the_end_has_nothing_behind_its_form(llm):
    output = served(llm, FORMS[2], max_tokens=20, ignore_eos=True)
    assert (output.finish_reason, len(output.token_ids)) == ("length", 20)
    assert output.text in CHOICE


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_output_leaves_its_slot_free(overlap):
    engine = make(max_num_seqs=1, overlap=overlap).engine
    expected = make(max_num_seqs=1).generate([[4, 5]], FREE)[0].outputs[0].token_ids
    answer = engine.add([1, 2], replace(GREEDY, structured_outputs=FORMS[0]))
    for _ in range(4):
        engine.step()
    engine.abort(answer.request_id)
    assert answer.outputs[0].finish_reason == "aborted"
    after = engine.add([4, 5], FREE)
    engine.run()
    assert tuple(after.outputs[0].tokens) == expected
    assert not engine.runner.has_forms


DEEP = {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, {"not": {"type": "null"}}]}}}
WRONG = {
    "keyword": ({"json": DEEP}, r'#/properties/a/anyOf/1: Unimplemented keys: \["not"\]'),
    "type": ({"json": {"type": "array", "items": {"type": "foo"}}}, "#/items: Invalid type: foo"),
    "reference": ({"json": {"items": {"$ref": "#/y"}}}, "#/items: Pointer '/y' does not exist"),
    "nothing": ({"json": False}, "the schema is false, which allows no value"),
    "pattern": ({"json": {"items": {"type": "string", "pattern": "("}}}, r"#/items: regex parse error:\n"),
    "regex": ({"regex": "(a"}, r'invalid regex "\(a".*unclosed group'),
    "lookahead": ({"regex": "a(?=b)"}, "look-around.*is not supported"),
    "lark": ({"grammar": 'start: "a" foo'}, 'unknown name: "foo"'),
    "gbnf": ({"grammar": "root ::= foo"}, "Rule 'foo' not found"),
    "no start": ({"grammar": "x"}, "Expected"),
    "recursion": ({"json": {"$ref": "#"}}, "no text has this form"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_form_is_said(llm, case):
    fields, message = WRONG[case]
    form = StructuredOutputs(**fields)
    with pytest.raises(FormError, match=re.compile(message, re.DOTALL)):
        llm.engine.forms.check(form)
    (output,) = llm.generate([[1]], replace(GREEDY, structured_outputs=form))
    assert re.search(message, output.error, re.DOTALL)


def levels(kind, number):
    schema = {"type": "integer"}
    for _ in range(number):
        schema = (
            {"type": "object", "properties": {"a": schema}} if kind == "json" else {kind: [schema, schema]}
        )
    return schema


def tower(number, width):
    """Returns a schema of `width ** number` values in `number` definitions."""
    defs = {
        f"d{n}": {
            "type": "object",
            "properties": {f"p{k}": {"$ref": f"#/$defs/d{n + 1}"} for k in range(width)},
        }
        for n in range(number)
    }
    return {"$defs": defs | {f"d{number}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


DOUBLED = [f"r{number}: r{number + 1} r{number + 1}\n" for number in range(40)]
HUGE = {
    "levels": {"json": levels("json", 900)},
    "all of all": {"json": levels("allOf", 10)},
    "any of any": {"json": levels("anyOf", 10)},
    "tower": {"json": tower(40, 3)},
    "long": {"json": {"enum": [f"value {number}" for number in range(20_000)]}},
    "many": {"json": {"type": "object", "properties": {f"k{number}": {} for number in range(3_000)}}},
    "items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "characters": {"json": {"type": "string", "minLength": 10**9, "maxLength": 10**9}},
    "repeats": {"regex": "((a{1,1000}){1,1000}b){1,1000}"},
    "states": {"regex": "(.*)(.)" * 30 + "x.{500}y"},
    "parentheses": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "nested grammar": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "nested gbnf": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "doubling": {"grammar": 'start: r0\nr40: "a"\n' + "".join(DOUBLED)},
    "choices": {"choice": [f"choice {number}" for number in range(5_000)]},
}  # fmt: skip


@pytest.mark.parametrize("case", HUGE)
def test_huge_forms_are_read_or_refused_soon(llm, case):
    began_s = time.perf_counter()
    try:
        form = StructuredOutputs(**HUGE[case])
        (output,) = llm.generate([[1]], replace(GREEDY, max_tokens=5, structured_outputs=form))
        assert output.error is None or len(output.error) < 1000
    finally:
        assert time.perf_counter() - began_s < 20


def test_a_form_that_gets_too_large_on_its_way_ends_its_request_only(llm):
    """The parser has a limit of parts in a step, which this schema reaches after its first tokens."""
    many = {"type": "object", "properties": {f"k{number}": {} for number in range(1_500)}}
    schema = {"type": "array", "prefixItems": [{"const": 1}, many], "minItems": 2}
    params = [replace(GREEDY, structured_outputs=StructuredOutputs(json=schema)), FREE]
    wrong, free = llm.generate([[1], [4, 5]], params)
    assert "cannot go on in its form" in wrong.error
    assert wrong.outputs[0].finish_reason == "error"
    assert free.outputs[0].token_ids == llm.generate([[4, 5]], FREE)[0].outputs[0].token_ids


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    engine = make()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    (output,) = engine.generate([[1]], replace(GREEDY, structured_outputs=FORMS[1]))
    assert (
        output.error
        == "needs the package llguidance, which is not installed: pip install 'windtunnel[engine]'"
    )
    assert engine.generate([[1]], FREE)[0].error is None


@pytest.mark.parametrize(
    ("tokenizer", "ends", "message"),
    [(None, [EOS], "the model has no tokenizer"), (byte_tokenizer(260), [], "no end-of-sequence token")],
)
def test_a_model_needs_a_tokenizer_and_an_end(tokenizer, ends, message):
    with pytest.raises(FormError, match=message):
        Forms(tokenizer, 260, ends).check(FORMS[1])


@pytest.mark.parametrize("rows", [255, 260, 300])
def test_the_logits_may_have_other_sizes_than_the_tokenizer(rows):
    """Tokens without a text are never allowed, and a mask may have more bits than there are logits."""
    form = Forms(byte_tokenizer(260), rows, [7]).begin(
        StructuredOutputs(regex="[ab]"), llm_output := FakeOutput()
    )
    allowed = AllowedTokens(np.array([1], np.int32), np.stack([form.allowed()]))
    logits = torch.zeros(3, rows)
    masked = allowed.masked(logits)
    encode = byte_tokenizer(260).encode
    assert torch.isfinite(masked[1]).nonzero().flatten().tolist() == sorted(encode("ab"))
    assert torch.isfinite(masked[[0, 2]]).all()
    llm_output.tokens += encode("a")
    assert np.flatnonzero(np.unpackbits(form.allowed().view(np.uint8), bitorder="little")).tolist() == [7]


class FakeOutput:
    finish_reason = None

    def __init__(self):
        self.tokens = []


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "choice": ["b"]}])
def test_a_form_is_one_of_four(fields):
    with pytest.raises(
        ValueError, match="structured_outputs: give exactly one of json, regex, choice and grammar"
    ):
        StructuredOutputs(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": "a+"}, "structured_outputs='a\\+': must be StructuredOutputs, or None"),
        (
            {"structured_outputs": FORMS[1], "min_tokens": 2},
            "min_tokens=2: must be 0 with structured_outputs",
        ),
        ({"logit_bias": {1: 101}}, "logit_bias=.*: must be at most 1024 numbers >= -100.0 and <= 100.0"),
        ({"logit_bias": {-1: 1}}, "logit_bias="),
        ({"logit_bias": {1: float("nan")}}, "logit_bias="),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias="),
        ({"logit_bias": [1]}, "logit_bias="),
    ],
)
def test_wrong_parameters_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize("way", ["plain", "overlapped", "several iterations", "ngram", "eagle, overlapped"])
def test_biases_are_added_to_the_logits(llm, way):
    """The definition: the largest of logit + bias; other requests keep their tokens."""
    weights = load_weights(None, SPEC, torch.float32, torch.device("cpu"), seed=SETTINGS["seed"])
    bias = {3: 0.25, 70: 0.5, 200: -0.5, EOS: -100.0}
    prompt, expected = [9, 8, 7], []
    for _ in range(12):
        logits = eager_logits(SPEC, weights, torch.tensor(prompt + expected))[-1]
        for token, value in bias.items():
            logits[token] += value
        expected.append(int(logits.argmax()))
    biased = replace(FREE, max_tokens=12, logit_bias=bias)
    one, other = make(**WAYS[way]).generate([prompt, prompt], [biased, FREE])
    assert list(one.outputs[0].token_ids) == expected
    plain = llm.generate([prompt], FREE)[0].outputs[0].token_ids
    assert other.outputs[0].token_ids == plain
    assert plain[:12] != tuple(expected)


def test_a_large_bias_decides_and_a_form_is_stronger(llm):
    (output,) = llm.generate([[1]], replace(FREE, logit_bias={42: 100.0}))
    assert set(output.outputs[0].token_ids) == {42}
    tokens = byte_tokenizer(260).encode("bz")
    bias = dict.fromkeys(tokens, 100.0)
    assert served(llm, StructuredOutputs(regex="[ab]{5}"), logit_bias=bias).text == "bbbbb"
    (output,) = llm.generate([[1]], replace(FREE, logit_bias={260: 1.0}))
    assert output.error == "logit_bias: token 260 must be < 260, the size of the vocabulary"
