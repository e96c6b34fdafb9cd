"""Profiles: the table adds up, is right for a hand-made trace, and a run writes it."""

import pytest
import torch

from thoughtbubbles.train.loop import train
from thoughtbubbles.train.profile import kind_of, markdown, profile_steps, read_trace, summarize
from thoughtbubbles.train.watch import ALL, WARM_UP
from train.runs import assert_same_bits, losses, small_run

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NTN", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
        ("_attend", "attention"),
        ("triton_per_fused_add_native_layer_norm_0", "norms and elementwise"),
        ("triton_red_fused_cumsum_where_1", "fork layers"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<int>", "fork layers"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<4>>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies and casts"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("aten::addmm", "matrix products"),
        ("aten::_fused_adamw_", "optimizer"),
        ("something_new", "other"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_a_trace_of_a_gpu():
    """Two steps of 10 ms. Kernels of 3, 2 and 4 ms, of which 1 ms overlaps: 8 ms of 20 are busy."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "nvjet_a", "ts": 1000.0, "dur": 3000.0, "tid": 7},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 3000.0, "dur": 2000.0, "tid": 8},
        {"ph": "X", "cat": "kernel", "name": "nvjet_a", "ts": 9000.0, "dur": 4000.0, "tid": 7},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#1", "ts": 0.0, "dur": 20000.0, "tid": 7},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 500.0, "tid": 1},
    ]
    found = summarize(events, on_gpu=True, steps=2, milliseconds=20.0)
    assert found.ms == 10
    assert found.kinds == (
        ("matrix products", 3.5, 0.35, 1.0),
        ("copies and casts", 0.5, 0.05, 0.5),
        ("idle", 6.0, 0.6, 0),
    )
    assert found.top[0] == ("nvjet_a", 3.5, 0.35, 1.0)


def test_a_trace_of_a_cpu():
    """The time of an operator excludes the operators it calls."""
    spans = [("aten::linear", 0, 100), ("aten::addmm", 10, 80), ("aten::copy_", 20, 30), ("aten::add", 200, 50)]
    events = [{"ph": "X", "cat": "cpu_op", "name": n, "ts": ts, "dur": dur, "tid": 1} for n, ts, dur in spans]
    found = summarize(events, on_gpu=False, steps=1, milliseconds=0.5)
    assert {row.name: row.ms for row in found.top} == pytest.approx(
        {"aten::linear": 0.02, "aten::addmm": 0.05, "aten::copy_": 0.03, "aten::add": 0.05}
    )
    assert found.kinds[-1] == pytest.approx(("idle", 0.35, 0.7, 0))


def test_any_step_can_be_profiled(tmp_path):
    weight, calls = torch.randn(64, 64, requires_grad=True), []

    def step():
        calls.append(1)
        (weight @ weight).sum().backward()

    path = tmp_path / "deep" / "trace.json.gz"
    found = profile_steps(step, steps=3, device=CPU, trace=path)
    assert len(calls) == 4  # one to warm up the profiler
    products = next(row for row in found.kinds if row.name == "matrix products")
    assert products.launches == 4  # three products, and aten::matmul that calls one
    assert sum(row.ms for row in found.kinds) == pytest.approx(found.ms)
    assert sum(row.share for row in found.kinds) == pytest.approx(1)
    assert [event for event in read_trace(path) if event.get("name") == "aten::mm"]
    assert profile_steps(step, steps=1, device=CPU).kinds
    assert "| matrix products |" in markdown(found, {"ms per step": "1"})


@pytest.mark.slow
def test_a_run_leaves_a_profile_and_is_the_same_run(tmp_path, capfd):
    steps = WARM_UP + ALL + 2
    still = {"steps": steps, "save_every": 0, "eval_every": 0}
    train(small_run(tmp_path / "plain", **still))
    assert "matrix products" not in capfd.readouterr().err
    train(small_run(tmp_path / "watched", profile=True, **still))
    assert losses(tmp_path / "plain") == losses(tmp_path / "watched")
    last = f"step-{steps:08d}"
    assert_same_bits(tmp_path / "plain" / last, tmp_path / "watched" / last)
    folder = tmp_path / "watched" / "profile"
    assert {path.name for path in folder.iterdir()} == {"trace.json.gz", "table.md"}
    table = (folder / "table.md").read_text()
    assert all(word in table for word in ("tokens/s", "TFLOP/s", "optimizer", "attention", "idle", "aten::"))
    said = capfd.readouterr().err
    assert "matrix products" in said
    assert str(folder) in said


def test_a_run_too_short_to_profile_says_so(tmp_path, capfd):
    train(small_run(tmp_path / "run", profile=True, steps=8, eval_sample_tokens=0))
    assert "raise --save.every and --eval.every" in capfd.readouterr().err
    assert not (tmp_path / "run" / "profile").exists()
