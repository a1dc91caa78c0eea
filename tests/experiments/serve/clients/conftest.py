"""Environments of clients that cannot share ours, and a server process for each test.

`make clients` makes the environments, .venv-clients/NAME; a test of a client that is not there is skipped.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

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
def tokenizer_folder(tmp_path_factory):
    """Returns the folder of a small byte-level tokenizer, which clients and server load."""
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
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|eos|>",
        "model_max_length": 131072,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


class ServerProcess:
    """A running `windtunnel serve`, and its run folder once it has stopped."""

    def __init__(self, url, process, folder):
        self.url = url
        self.process = process
        self.folder = folder

    def summary(self):
        """Stops the server and returns the figures of its run."""
        self.process.terminate()
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture
def server(tmp_path):
    """Starts servers: `with server(*overrides) as running`."""

    @contextmanager
    def start(*overrides):
        folder = tmp_path / "run"
        command = [sys.executable, "-m", "experiments.app.cli", "serve", "port=0", "output.report=false"]
        settings = ["metrics.dialect=all", f"hydra.run.dir={folder}", *overrides]
        process = subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        try:
            yield ServerProcess(process.stdout.readline().split()[0], process, folder)
        finally:
            process.kill()
            process.communicate()

    return start
