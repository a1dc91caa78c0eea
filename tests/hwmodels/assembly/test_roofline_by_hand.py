"""The roofline against closed forms: memory, FLOPs, CUDA graphs, launches and the host."""

from dataclasses import replace

import pytest
from hypothesis import given

from hwmodels.assembly.roofline import Roofline
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations import causal_pairs
from hwmodels.iterations.layout import ParallelLayout
from tests.hwmodels.assembly.drawn_iterations import NO_HOST, drawn_shapes, few


def test_a_memory_bound_decode_is_bytes_over_the_bandwidth_reached(models, devices, make_shape):
    """Nothing can be faster than bytes over bandwidth, and kernels reach more than 70 % of it."""
    model, device = models["llama2_7b"], devices["a100_80gb_sxm"]
    roofline = Roofline(model=model, device=device, host=NO_HOST)
    shape = make_shape([2000])
    num_bytes = 2 * model.num_matmul_parameters + 2000 * 524_288
    assert roofline.bytes_moved(shape) == num_bytes
    assert 0.7 * roofline.seconds(shape) < num_bytes / 2.039e12 < roofline.seconds(shape)


def test_a_long_prefill_of_a_large_model_is_flops_over_the_peak_reached(models, devices, make_shape):
    roofline = Roofline(model=models["llama3_1_70b"], device=devices["b200_sxm"], host=NO_HOST)
    shape = make_shape(chunks=[(8192, 0)])
    ideal_s = roofline.flops(shape) / 2250e12
    assert 0.6 * roofline.seconds(shape) < ideal_s < roofline.seconds(shape)


@few
@given(drawn=drawn_shapes)
def test_no_iteration_beats_the_data_sheet(models, devices, make_shape, drawn):
    """One device, a dense model: every FLOP and every byte at full speed is a lower bound."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"], host=NO_HOST)
    shape = make_shape(*drawn)
    compute_s = roofline.flops(shape) / roofline.peak_flops_per_s
    memory_s = roofline.bytes_moved(shape) / roofline.peak_bytes_per_s
    assert roofline.seconds(shape) >= max(compute_s, memory_s)


def test_a_7b_model_at_100_tokens_a_second_uses_70_percent_of_2_tb_a_second(models, devices, make_shape):
    """The textbook's MBU, 14e9 bytes x 100 / 2e12; the model is 13.5e9, its embedding table is not read."""
    device = replace(devices["a100_80gb_sxm"], memory_bandwidth_bytes_per_s=2e12)
    roofline = Roofline(model=models["llama2_7b"], device=device)
    mbu = roofline.bytes_moved(make_shape([1])) * 100 / roofline.peak_bytes_per_s
    assert mbu == pytest.approx(0.70, abs=0.04)


def test_flops_are_2nd_plus_attention(models, devices, make_shape):
    model = models["llama3_1_8b"]
    roofline = Roofline(model=model, device=devices["h100_sxm"])
    shape = make_shape([100, 200], [(50, 10)])
    layers = 2 * (model.num_matmul_parameters - model.embedding_elements) * 52
    head = 2 * model.embedding_elements * 3
    attention = 4 * 32 * 32 * 128 * (300 + causal_pairs(50, 10))
    assert roofline.flops(shape) == layers + head + attention


def test_work_and_peaks_are_those_of_the_whole_replica(kind, roofline, make_shape):
    """However a model is cut: FLOPs and bytes stay, peaks are those of all devices."""
    shape = make_shape([100] * 30, [(50, 10)])
    alone = Roofline(**{**kind, "layout": ParallelLayout()})
    assert roofline.flops(shape) == alone.flops(shape)
    assert roofline.bytes_moved(shape) == alone.bytes_moved(shape)
    count = kind["layout"].num_devices
    assert roofline.peak_flops_per_s == pytest.approx(count * alone.peak_flops_per_s)
    assert roofline.peak_bytes_per_s == pytest.approx(count * kind["device"].memory_bandwidth_bytes_per_s)


def test_padding_is_not_counted_as_work(models, devices, make_shape):
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"])
    eager = Roofline(
        model=models["llama3_1_8b"], device=devices["h100_sxm"], cuda_graphs=CudaGraphs(enabled=False)
    )
    nine = make_shape([100] * 9)
    assert roofline.flops(nine) == eager.flops(nine)
    assert roofline.bytes_moved(nine) == eager.bytes_moved(nine)


def operator_seconds(roofline, shape):
    found = {}
    for op, seconds in roofline.operator_seconds(shape):
        found[op.name] = found.get(op.name, 0.0) + float(seconds)
    return found


def test_a_decode_is_padded_to_the_captured_size(models, devices, make_shape):
    """9 sequences run as 16: the same GEMMs, elementwise operators; attention and LM head see only 9."""
    roofline = Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"])
    nine, sixteen = (operator_seconds(roofline, make_shape([9000] * n)) for n in (9, 16))
    assert nine["gate_up_proj"] == sixteen["gate_up_proj"]
    assert nine["rotary"] == sixteen["rotary"]
    assert nine["attention_decode"] < sixteen["attention_decode"]
    assert nine["sampling"] < sixteen["sampling"]


def test_a_batch_beyond_the_graphs_or_with_a_chunk_is_not_padded(models, devices, make_shape):
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"], "host": NO_HOST}
    graphed = Roofline(**asked, cuda_graphs=CudaGraphs(max_capture_size=16))
    eager = Roofline(**asked, cuda_graphs=CudaGraphs(enabled=False))
    for shape in (make_shape([9] * 17), make_shape([9] * 9, [(5, 0)]), make_shape([9] * 16)):
        assert graphed.seconds(shape) == eager.seconds(shape)
    assert graphed.seconds(make_shape([9] * 9)) > eager.seconds(make_shape([9] * 9))


def test_each_device_pads_its_own_share(models, devices, make_shape):
    """Attention data parallel: 9 sequences on each of 4 devices run as 16; all 36 tokens meet the experts."""
    asked = {"model": models["qwen3_30b_a3b"], "device": devices["h100_sxm"]}
    layout = ParallelLayout(attention_data_parallel_size=4)
    spread = operator_seconds(Roofline(**asked, layout=layout), make_shape([100] * 36))
    alone = operator_seconds(Roofline(**asked), make_shape([100] * 16))
    assert spread["qkv_proj"] == alone["qkv_proj"]


def test_a_small_model_waits_for_its_launches_without_graphs(models, devices, make_shape):
    """SmolLM2-135M, 30 layers of 10: norm, QKV, rotary, KV write, attention, O, norm, up, activation, down;
    embedding, final norm, LM head, 4 of sampling: 307 launches of 20 us.
    """
    host = HostOverhead(iteration_s=700e-6, sequence_s=4e-6, launch_s=20e-6, graph_replay_s=10e-6)
    asked = {"model": models["smollm2_135m"], "device": devices["h100_sxm"], "host": host}
    shape = make_shape([100])
    eager, graphed = Roofline(**asked, cuda_graphs=CudaGraphs(enabled=False)), Roofline(**asked)
    assert eager.seconds(shape) == pytest.approx(307 * 20e-6 + 704e-6)
    assert eager.breakdown(shape)["launch"] > 0
    assert graphed.breakdown(shape)["launch"] == 0
    assert graphed.breakdown(shape)["host"] == pytest.approx(704e-6)
    assert graphed.seconds(shape) < eager.seconds(shape)


def test_an_overlapped_host_hides_behind_the_gpu(models, devices, make_shape):
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    shape = make_shape([1000] * 8)
    gpu_s = Roofline(**asked, host=NO_HOST).seconds(shape)
    fast = HostOverhead(iteration_s=1e-4, sequence_s=1e-6, graph_replay_s=1e-5, overlapped=True)
    slow = replace(fast, iteration_s=0.1)
    assert Roofline(**asked, host=fast).seconds(shape) == gpu_s
    assert Roofline(**asked, host=slow).seconds(shape) == pytest.approx(0.1 + 8e-6 + 1e-5)
    waiting = replace(fast, overlapped=False)
    assert Roofline(**asked, host=waiting).seconds(shape) == pytest.approx(gpu_s + 1e-4 + 8e-6)


def test_the_lm_head_costs_nothing_where_no_prompt_completes(roofline, make_shape):
    assert roofline.breakdown(make_shape(chunks=[(512, 0)], completed=False))["lm_head"] == 0
    assert roofline.breakdown(make_shape(chunks=[(512, 0)]))["lm_head"] > 0


def test_t4_prices_a_bf16_checkpoint_in_fp16(models, devices):
    roofline = Roofline(model=models["qwen3_8b"], device=devices["t4"])
    assert roofline.model.dtype == roofline.compute_dtype == "fp16"
    assert roofline.peak_flops_per_s == 65e12


def test_rejects_what_the_layout_rejects(models, devices):
    layout = ParallelLayout(tensor_parallel_size=16)
    with pytest.raises(ValueError, match="tensor_parallel_size=16: must be 1 to 8"):
        Roofline(model=models["llama3_1_70b"], device=devices["rtx_4090"], layout=layout)
