"""Every causal language model of transformers: our count of its default configuration, and its own modules'.

The configurations are those that transformers writes into a checkpoint. `make clients` makes the environment
with transformers.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from hwmodels.hf.config import from_hf_fields

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("WINDTUNNEL_CLIENTS", ROOT / ".venv-clients")) / "guidellm/bin/python"

REFUSED = {
    "no decoder alone": "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small "
    "camembert data2vec-text electra ernie marian mbart megatron-bert modernbert-decoder mvp pegasus plbart "
    "prophetnet rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xglm xlm xlm-roberta "
    "xlm-roberta-xl xlnet xmod",
    "no attention by default": "bamba falcon_mamba granitemoehybrid mamba mamba2 rwkv xlstm",
    "layers that are run several times": "dory hrm_text inkling2_loop_text",
    "fields that published checkpoints have and the default configuration has not": "cpmant ctrl deepseek_v2 "
    "glm4_moe gpt_neox_japanese openai-gpt recurrent_gemma",
    "other layers": "blt doge gemma4_unified_assistant gpt_neo mllama moshi zamba zamba2 zaya",
}
"""Reason -> kinds of models that are refused, with a message."""
OFF = {
    "git": "an image encoder whose configuration is not a tower's",
    "got_ocr2": "the class has the image encoder, too",
    "jetmoe": "experts of attention",
    "longcat_flash": "the default has more experts in memory than the published model",
    "moss_transcribe_diarize": "the class has the audio encoder, too",
    "phi4_multimodal": "the class has the encoders, too",
}
"""Models whose count is off by more than 0.5 %, with the reason."""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no environment with transformers: `make clients`")
def test_counts_are_those_of_transformers_modules():
    script = Path(__file__).with_name("transformers_counts.py")
    run = subprocess.run([PYTHON, script], capture_output=True, text=True, check=True, timeout=900)
    found = json.loads(run.stdout.strip().split("\n")[-1])
    if int(found["version"].partition(".")[0]) < 5:
        pytest.skip(f"transformers {found['version']} writes other fields")
    refused, off = {}, {}
    for kind, truth in found["models"].items():
        try:
            model = from_hf_fields(truth["config"], kind)
        except ValueError as error:
            refused[kind] = str(error)
            continue
        towers = sum(part.elements for part in model.other_weights if "tower" in part.name)
        counts = (model.num_parameters, model.num_parameters - towers)
        share = min(abs(count / truth["parameters"] - 1) for count in counts)
        if share > 0.005 and kind not in OFF:
            off[kind] = share
    assert off == {}
    expected = {kind for kinds in REFUSED.values() for kind in kinds.split()}
    assert {kind: why for kind, why in refused.items() if kind not in expected} == {}
    assert len(found["models"]) - len(refused) >= 110
