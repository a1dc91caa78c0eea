"""The machine, the links and the engine that calibrate writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from experiments.calibrate.engine.collectives import SIZES, link_of, measure_link
from experiments.calibrate.engine.files import Files, engine_yaml, hardware_yaml
from experiments.calibrate.engine.host_time import host_of
from experiments.calibrate.engine.machine import Machine
from experiments.calibrate.engine.run import device_of
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.speculation.steps import DraftHost
from sim.settings.build import build
from sim.setup.engine_profile import EngineProfile

torch.set_num_threads(1)


MACHINE = Machine(
    name="a processor",
    copy_bytes_per_s=20e9,
    read_bytes_per_s=24e9,
    flops_per_s={"fp32": 91e9},
    memory_bytes=24 << 30,
    cache_bytes=32 << 20,
    num_sms=1,
    host_copy_bytes_per_s=10e9,
    host_copy_s=4e-6,
    launch_s=0.0,
    graph_replay_s=0.0,
)


def test_the_written_machine_is_a_device():
    device = device_of(hardware_yaml("cpu", MACHINE))
    assert (device.name, device.num_sms, device.l2_bytes) == ("cpu", 1, 32 << 20)
    assert device.memory_bandwidth_bytes_per_s == 24e9
    assert device.peak_flops_per_s == {"fp32": 91e9}
    assert device.pcie.bandwidth_bytes_per_s == 10e9


def test_a_link_comes_back_from_the_times_of_its_ring():
    """Four ranks, 2 us a hop and 100 GB/s: 6 hops and 1.5 times the bytes."""
    times = {size: 6 * 2e-6 + 1.5 * size / 100e9 for size in SIZES}
    link = link_of(4, times)
    assert link.latency_s == pytest.approx(2e-6)
    assert link.bandwidth_bytes_per_s == pytest.approx(100e9)
    device = device_of(hardware_yaml("node", MACHINE, link))
    assert (device.gpus_per_node, device.scale_up.bandwidth_bytes_per_s) == (4, 100e9)
    assert device_of(hardware_yaml("alone", MACHINE)).scale_up is None


@pytest.mark.slow
def test_two_processes_measure_their_link():
    link = measure_link("cpu", 2)
    assert set(link.by_bytes) == set(SIZES)
    assert 1e6 < link.bandwidth_bytes_per_s < 1e12


def test_the_written_engine_is_the_profile_that_it_was_written_from():
    profile = EngineProfile(
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        max_model_len=512,
        num_kv_blocks=100,
        host=HostOverhead(iteration_s=123e-6, sequence_s=1.5e-6, launch_s=0.0, graph_replay_s=0.0),
        cuda_graphs=CudaGraphs(enabled=False, max_capture_size=32),
    )
    node = OmegaConf.create(engine_yaml("cpu", profile, 16))
    node.pop("defaults")
    assert build(node, "engine") == profile
    node.pop("draft_host")  # as written before it was measured
    assert build(node, "engine") == profile
    for rule in ({"version": "0.11.0"}, {"gpu_memory_utilization": None, "memory_profile": "sglang"}):
        node = OmegaConf.create(engine_yaml("cpu", replace(profile, **rule), 16))
        node.pop("defaults")
        assert build(node, "engine") == replace(profile, **rule)
    draft_host = {"suffix": DraftHost(sequence_s=21e-6, token_s=3e-5), "others": DraftHost(iteration_s=2e-4)}
    profile = replace(profile, draft_host=draft_host)
    node = OmegaConf.create(engine_yaml("cpu", profile, 16))
    node.pop("defaults")
    assert build(node, "engine") == profile


def test_a_figure_that_the_measurements_do_not_determine_has_its_range_beside_it():
    alone = host_of({1: 250e-6})
    assert set(alone.undetermined) == {"iteration_s", "sequence_s"}
    host = HostOverhead(
        iteration_s=alone.iteration_s, sequence_s=alone.sequence_s, launch_s=0.0, graph_replay_s=0.0
    )
    drafts = {"ngram": DraftHost(token_s=3e-5)}
    profile = EngineProfile(
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_model_len=512,
        host=host,
        cuda_graphs=CudaGraphs(enabled=False),
        draft_host=drafts,
    )
    ranges = {f"host.{name}": ends for name, ends in alone.undetermined.items()}
    text = engine_yaml("cpu", profile, 16, ranges | {"draft_host.ngram.token_s": (0.0, 4e-5)})
    assert "\n  sequence_s: 0  # not determined: 0 to 250e-6 fit equally well\n" in text
    assert "\n    token_s: 30e-6  # not determined: 0 to 40e-6 fit equally well\n" in text
    node = OmegaConf.create(text)
    node.pop("defaults")
    assert build(node, "engine") == profile
    link = link_of(2, {4096: 3e-6})
    assert "not determined" in hardware_yaml("node", MACHINE, link)
    assert device_of(hardware_yaml("node", MACHINE, link)).scale_up is not None
    assert not link_of(4, {size: 6 * 2e-6 + 1.5 * size / 100e9 for size in SIZES}).undetermined


def test_files_are_named_after_machine_and_model(tmp_path):
    files = Files.under(tmp_path, "cpu", "HuggingFaceTB/SmolLM2-135M")
    assert files.latency == tmp_path / "latency" / "cpu_smollm2_135m.yaml"
    assert files.hardware == tmp_path / "hardware" / "cpu.yaml"
