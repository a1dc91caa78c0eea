"""Environments of clients that cannot share ours.

`make clients` makes the environments, .venv-clients/NAME; a test of a client that is not there is skipped.
"""

import json
import os
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).resolve().parents[4]
CLIENTS = Path(os.environ.get("WINDTUNNEL_CLIENTS", ROOT / ".venv-clients"))
WORDS = "the and of to in is that it was for on are as with his they at be this have from"


@pytest.fixture(scope="session")
def program():
    """Returns the path of a program of a client's environment, or skips the test."""

    def find(environment, name):
        path = CLIENTS / environment / "bin" / name
        if not path.is_file():
            pytest.skip(f"{path} is missing; `make clients` installs it")
        return str(path)

    return find


@pytest.fixture(scope="session")
def tokenizer_folder():
    """Yields the folder of a small byte-level tokenizer, which clients and server load.

    It is none of pytest's, of which other sessions remove old ones.
    """
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = []
    for word in WORDS.split():
        piece = "Ġ"
        for char in word:
            if piece + char not in vocab:
                vocab[piece + char] = len(vocab)
                merges.append((piece, char))
            piece += char
    vocab["<|eos|>"] = len(vocab)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>"])
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eos|>",
        "model_max_length": 131072,
        "chat_template": template,
    }
    with TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        yield folder


class Punctuality:
    """A context that watches how late the machine wakes a thread that asks for it; late_s: the most."""

    INTERVAL_S = 0.01
    ALLOWED_S = 0.02

    def __enter__(self):
        self.late_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _watch(self):
        before_s = time.monotonic()
        while not self._is_over.wait(self.INTERVAL_S):
            now_s = time.monotonic()
            self.late_s = max(self.late_s, now_s - before_s - self.INTERVAL_S)
            before_s = now_s

    def skip_if_late(self):
        """Skips the rest of the test, which compares times, if the machine was too busy to tell them."""
        if self.late_s > self.ALLOWED_S:
            pytest.skip(
                f"counts are right; times are not compared, as the machine was late by {self.late_s:.3f} s"
            )
