"""The bytes of a model against those that its checkpoint states."""

import json
import struct

import pytest

from hwmodels.hf.config import from_hf_config
from hwmodels.hf.fields import stored_size
from tests.hwmodels.hf.published import DEEPSEEK_V3, LLAMA


def folder_of(tmp_path, config, total_size=None):
    """Writes a config.json, and an index that states the size; returns the folder."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if total_size is not None:
        index = {"metadata": {"total_size": total_size}, "weight_map": {}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def safetensors(file, num_bytes):
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}})
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(num_bytes))


def test_a_count_that_the_index_confirms_has_no_note(tmp_path):
    size = round(from_hf_config(str(folder_of(tmp_path, LLAMA))).weight_bytes_per_rank())
    assert from_hf_config(str(folder_of(tmp_path, LLAMA, size))).notes == ()
    assert from_hf_config(str(folder_of(tmp_path, LLAMA, round(1.02 * size)))).notes == ()


def test_an_index_that_differs_is_named_with_both_sizes(tmp_path):
    size = from_hf_config(str(folder_of(tmp_path, LLAMA))).weight_bytes_per_rank()
    (note,) = from_hf_config(str(folder_of(tmp_path, LLAMA, round(size / 2)))).notes
    assert note.startswith(f"weights are counted as {size / 1e9:.4g} GB, but {size / 2e9:.4g} GB by ")
    assert "model.safetensors.index.json (+100 %)" in note
    # The user's own formats are no reason for a note.
    asked = from_hf_config(str(folder_of(tmp_path, LLAMA, round(size))), weights="fp8")
    assert (asked.weights, asked.notes) == ("fp8", ())


def test_a_float32_checkpoint_holds_twice_what_is_served(tmp_path):
    config = {**LLAMA, "torch_dtype": "float32"}
    size = round(from_hf_config(str(folder_of(tmp_path, config))).weight_bytes_per_rank())
    assert from_hf_config(str(folder_of(tmp_path, config, 2 * size))).notes == ()
    assert len(from_hf_config(str(folder_of(tmp_path, config, size))).notes) == 1


def test_modules_for_multi_token_prediction_may_be_in_the_files(tmp_path):
    """Public index of DeepSeek-V3: 688.6 GB with the module of multi-token prediction."""
    model = from_hf_config(str(folder_of(tmp_path, DEEPSEEK_V3, 688_586_727_753)))
    assert model.notes == ()


def test_the_files_themselves_are_measured_without_an_index(tmp_path):
    size = round(from_hf_config(str(folder_of(tmp_path, LLAMA))).weight_bytes_per_rank())
    assert stored_size(tmp_path) is None
    for number in (1, 2):
        safetensors(tmp_path / f"model-0000{number}-of-00002.safetensors", 1000)
    safetensors(tmp_path / "consolidated.safetensors", 1000)
    assert stored_size(tmp_path) == (2000, "2 safetensors files")
    (note,) = from_hf_config(str(tmp_path)).notes
    assert f"counted as {size / 1e9:.4g} GB, but 2e-06 GB by 2 safetensors files" in note


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", bytes(8)])
def test_files_that_are_no_safetensors_state_no_size(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert stored_size(tmp_path) is None


@pytest.mark.parametrize("metadata", [None, {}, {"total_size": "big"}, {"total_size": -1}])
def test_an_index_without_a_size_states_none(tmp_path, metadata):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata}))
    assert stored_size(tmp_path) is None
