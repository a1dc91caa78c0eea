"""A served model: a folder without a tokenizer serves token ids."""

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from safetensors.torch import save_file

from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from tests.realengine.checkpoints import LLAMA, random_checkpoint, write_config


def test_a_folder_without_tokenizer_json_serves_token_ids(tmp_path):
    write_config(tmp_path, LLAMA)
    save_file(random_checkpoint(LLAMA), tmp_path / "model.safetensors")
    llm = LLM(tmp_path, device="cpu", num_kv_blocks=20)
    (output,) = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3
    assert output.outputs[0].text == ""
    with pytest.raises(ValueError, match="the model has no tokenizer; give token ids"):
        llm.generate(["text"])
    (refused,) = llm.generate([[3]], SamplingParams(stop=("x",)))
    assert refused.error == "stop: the model has no tokenizer; use stop_token_ids"
