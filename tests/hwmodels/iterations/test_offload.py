"""Weights in host memory: memory plans and prices in closed form."""

from dataclasses import replace

import numpy as np
import pytest

from hwmodels.assembly.roofline import Roofline
from hwmodels.host import GIB, Offload
from hwmodels.iterations import IterationShape
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import plan_memory

SPLIT = Offload(n_gpu_layers=24)


@pytest.fixture
def llama(models):
    return models["llama3_1_8b"]


@pytest.fixture
def priced(llama, devices):
    """Makes the Roofline of Llama-3.1-8B on an H100 with an offload."""

    def make(offload=None, **layout):
        return Roofline(
            model=llama, device=devices["h100_sxm"], layout=ParallelLayout(**layout), offload=offload
        )

    return make


def shapes(make_shape):
    return [make_shape(contexts=[500] * 4), make_shape(contexts=[500], chunks=[(300, 0)])]


def test_a_pass_reads_the_offloaded_weights_once(priced, make_shape):
    """8 GiB over 0.5 of 64e9 bytes/s: 268.4 ms more in every pass, whatever its batch."""
    plain, offloaded = priced(), priced(Offload(cpu_offload_gb=8, pcie_share=0.5))
    for shape in shapes(make_shape):
        gpu_s = [
            sum(v for k, v in r.breakdown(shape).items() if k not in ("launch", "host"))
            for r in (plain, offloaded)
        ]
        assert gpu_s[1] - gpu_s[0] == pytest.approx(8 * GIB / 32e9)


def test_every_stage_of_a_pipeline_reads_its_own(priced, make_shape):
    one, two = (
        priced(offload, pipeline_parallel_size=2)
        for offload in (None, Offload(cpu_offload_gb=4, pcie_share=1.0))
    )
    shape = make_shape(contexts=[500])
    assert two.seconds(shape) - one.seconds(shape) == pytest.approx(2 * 4 * GIB / 64e9, rel=0.05)


def test_offloaded_weights_leave_room_for_kv(llama, devices):
    device = devices["rtx_4090"]
    plain = plan_memory(model=llama, device=device)
    less = plan_memory(model=llama, device=device, offload=Offload(cpu_offload_gb=4))
    assert plain.weights_bytes - less.weights_bytes == pytest.approx(4 * GIB)
    block_bytes = plain.block_size * plain.kv_bytes_per_token
    assert less.num_blocks - plain.num_blocks == pytest.approx(4 * GIB / block_bytes, abs=1)


def test_no_more_than_the_layers_is_offloaded(llama, devices):
    plan = plan_memory(model=llama, device=devices["rtx_4090"], offload=Offload(cpu_offload_gb=1000))
    tables = 2 * llama.vocab_size * llama.hidden_size * 2
    assert plan.weights_bytes == pytest.approx(tables)


def test_a_model_that_does_not_fit_fits_with_offloading(models, devices):
    """Llama-3.1-70B in bf16 on one H100."""
    model, device = models["llama3_1_70b"], devices["h100_sxm"]
    with pytest.raises(ValueError, match=r"needs .* GiB on each"):
        plan_memory(model=model, device=device)
    assert plan_memory(model=model, device=device, offload=Offload(cpu_offload_gb=70)).num_blocks > 0


def test_split_layers_keep_weights_and_kv_where_they_run(llama, devices):
    """24 of 32 layers on the GPU: three quarters of the layers and of the KV; no table of the vocabulary."""
    device = devices["rtx_4090"]
    plain, split = (plan_memory(model=llama, device=device, offload=o) for o in (None, SPLIT))
    table = llama.vocab_size * llama.hidden_size * 2
    assert split.weights_bytes == pytest.approx(0.75 * (plain.weights_bytes - 2 * table))
    assert split.kv_bytes_per_token == pytest.approx(0.75 * plain.kv_bytes_per_token)


def test_one_layer_more_than_the_model_has_is_the_lm_head(llama, devices):
    plain, whole = (
        plan_memory(model=llama, device=devices["rtx_4090"], offload=o)
        for o in (None, Offload(n_gpu_layers=33))
    )
    table = llama.vocab_size * llama.hidden_size * 2
    assert plain.weights_bytes - whole.weights_bytes == pytest.approx(table)


def test_layers_on_the_cpu_take_the_time_of_its_memory(priced, make_shape, llama):
    """A quarter of the layers reads its weights and KV from host memory, and so does the head."""
    shape = make_shape(contexts=[1000])
    roofline = priced(Offload(n_gpu_layers=24, cpu_bytes_per_s=1e9, cpu_flops_per_s=1e15))
    on_cpu_s = sum(line.seconds for line in roofline.explain(shape) if line.operator.startswith("cpu "))
    layers = sum(m.elements for m in llama.layer_matrices(roofline.site.ranks)) * 2
    kv = 1000 * llama.kv_bytes_per_token(1)
    head = llama.vocab_size * llama.hidden_size * 2
    assert on_cpu_s == pytest.approx((0.25 * (layers + kv) + head) / 1e9, rel=0.01)


def test_layers_on_the_gpu_take_their_share(priced, make_shape):
    """All layers on the GPU, the head too, cost what they cost without the setting."""
    shape = make_shape(contexts=[1000] * 3)
    assert priced(Offload(n_gpu_layers=33)).seconds(shape) == pytest.approx(priced().seconds(shape))
    by_name = [{x.operator: x.seconds for x in priced(o).explain(shape)} for o in (None, SPLIT)]
    for name in ("qkv_proj", "attention_decode", "down_proj"):
        assert by_name[1][name] == pytest.approx(0.75 * by_name[0][name])


@pytest.mark.parametrize("offload", [SPLIT, Offload(cpu_offload_gb=3)], ids=["split", "streamed"])
def test_leaps_equal_single_iterations(priced, offload):
    roofline = priced(offload)
    contexts = np.arange(100, 160, 3)
    many = roofline.seconds(IterationShape(3, contexts, 0, 0, 0, 0, 3))
    one_by_one = [roofline.seconds(IterationShape(3, int(c), 0, 0, 0, 0, 3)) for c in contexts]
    assert many.tolist() == one_by_one


def test_without_offloading_nothing_changes(priced, make_shape):
    for shape in shapes(make_shape):
        assert priced(Offload()).seconds(shape) == priced().seconds(shape)


def test_rejects_a_split_over_several_devices(priced):
    with pytest.raises(ValueError, match=r"n_gpu_layers=24: .* the replica has 2 devices"):
        priced(SPLIT, tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"cpu_offload_gb": -1.0}, "cpu_offload_gb=-1"),
        ({"n_gpu_layers": 0}, "n_gpu_layers=0: .* hardware=xeon_8480"),
        ({"n_gpu_layers": 3, "cpu_offload_gb": 1.0}, "must not both be set"),
        ({"pcie_share": 1.5}, "pcie_share=1.5"),
    ],
)
def test_rejects_impossible_settings(wrong, match):
    with pytest.raises(ValueError, match=match):
        replace(Offload(), **wrong)
