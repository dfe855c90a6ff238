"""The CUDA engine's host side, driven against a stand-in that records launches."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calmnb.config import ModelConfig
from calmnb.engine import cuda, cuda_graphs, cuda_ops, cuda_prefill
from calmnb.engine.cuda_matvec import Device, MatvecArgs
from calmnb.engine.cuda_memory import RESERVE, MemoryPlan
from calmnb.engine.cuda_ops import plan_attention, state_words
from calmnb.engine.cuda_program import StepProgram, make_plans
from calmnb.engine.cuda_weights import ALIGNMENT, Layout, random_regions, upload, weight_regions
from calmnb.engine.positions import Positions
from calmnb.errors import CalmnbError, ConfigError, ContextError, DeviceError, UnsupportedError
from calmnb.kernels import CompiledKernel, KernelSpec, Resources, kernels_dir
from calmnb.sampler import Sampling
from calmnb.shapes import SHAPES, shape_config
from tests.engine_models import random_weights
from tests.fake_gpu import FakeGpu, deliver

CONFIG = ModelConfig("llama", "fp16", 64, 128, 16, 2, 4, 2, 96, rotary_dim=16)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled in test_kernels_compile; here their names suffice."""

    def compile_all(specs: Any, arch: str) -> dict[KernelSpec, CompiledKernel]:
        return {s: CompiledKernel(s, arch, b"", Resources(32, 0, 0, 0), "", True) for s in specs}

    monkeypatch.setattr(cuda_graphs, "compile_all", compile_all)


def open_engine(config: ModelConfig = CONFIG, gpu: FakeGpu | None = None, **options: Any) -> cuda.CudaEngine:
    options = {"seq_len": 32, **options}
    return cuda.open_cuda_engine(random_weights(config), gpu=gpu or FakeGpu(), **options)


def sampling_gpu() -> FakeGpu:
    gpu = FakeGpu()
    gpu.on_run = lambda launches: deliver(launches, lambda pos: pos * 7 % 96)
    return gpu


def args_of(program: StepProgram, name: str) -> Iterator[Any]:
    return (one.args[0] for one in program.launches if one.kernel.name == name)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_refused_before_any_is_taken() -> None:
    gpu = FakeGpu(free=200 << 20)
    with pytest.raises(DeviceError, match=r"0\.20 GiB free of 16\.00, but this model needs .* seq_len=\d+ or less"):
        open_engine(gpu=gpu, seq_len=1 << 22)
    assert gpu.held == {}


def test_advice_names_the_context_that_fits() -> None:
    plan = MemoryPlan(weights=1000, cache=64 * 1000, work=10, prefill=10)
    free = RESERVE + 1020 + 64 * 100
    with pytest.raises(DeviceError, match="seq_len=100 or less"):
        plan.check(free, 1 << 40, "GPU", seq_len=1000, kv_dtype="fp16", bytes_per_token=64)


def test_model_too_large_for_any_context_gets_other_advice() -> None:
    plan = MemoryPlan(weights=1 << 40, cache=64, work=10, prefill=10)
    with pytest.raises(DeviceError, match="convert the model to a smaller dtype"):
        plan.check(1 << 30, 1 << 34, "GPU", seq_len=1, kv_dtype="fp16", bytes_per_token=64)


def test_plan_is_what_gets_allocated() -> None:
    gpu = FakeGpu()
    engine = open_engine(gpu=gpu)
    device_bytes = sum(a.nbytes for a in gpu.held.values()) - sum(
        x.nbytes for x in (engine._states, engine._small, engine._logits)
    )
    assert device_bytes == engine.memory_plan.total + ctypes.sizeof(engine._ring)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_layout_pieces_are_aligned_and_apart(sizes: list[int]) -> None:
    layout = Layout((str(i), n) for i, n in enumerate(sizes))
    ends = 0
    for i, n in enumerate(sizes):
        at = layout.offsets[str(i)]
        assert at % ALIGNMENT == 0
        assert at >= ends
        ends = at + n
    assert layout.nbytes >= ends


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "gf4"}, {"n_experts": 4, "n_experts_active": 2}, {"norm_type": "layernorm_par"}]
)
def test_random_regions_are_a_models(changes: dict[str, Any]) -> None:
    config = CONFIG.replace(**changes)
    for tied in (False, True):
        real = weight_regions(random_weights(config, tied=tied))
        sizes = [(r.name, r.nbytes, r.bits) for r in random_regions(config, is_tied=tied)]
        assert sorted(sizes) == sorted((r.name, r.nbytes, r.bits) for r in real)


def test_upload_copies_every_byte_through_small_buffers() -> None:
    gpu = FakeGpu()
    regions = weight_regions(random_weights(CONFIG.replace(dtype="fp8"), bias=True))
    layout = Layout((r.name, r.nbytes) for r in regions)
    base = gpu.allocate(layout.nbytes)
    before = set(gpu.held)
    seen: list[tuple[int, int]] = []
    upload(gpu, regions, layout.at(base), progress=lambda done, total, name: seen.append((done, total)), staging_bytes=100)
    memory = gpu.held[base]
    for region in regions:
        expected = b"".join(np.ascontiguousarray(a).tobytes() for a in region.arrays)
        at = layout.offsets[region.name]
        assert memory[at : at + region.nbytes].tobytes() == expected, region.name
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert seen[-1] == (sum(r.nbytes for r in regions),) * 2
    assert set(gpu.held) == before, "staging buffers were not released"


# -- one step ---------------------------------------------------------------------------------------------------------


def test_step_has_five_kernels_a_layer() -> None:
    program = open_engine().program("logits")
    layers = [k.stage for k in program.kernels if k.layer >= 0]
    assert layers == ["matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down"] * CONFIG.n_layers
    assert [k.stage for k in program.kernels if k.layer < 0] == ["embed", "output"]
    assert [one.dependent for one in program.launches] == [False] + [True] * (len(program.launches) - 1)


@pytest.mark.parametrize(("has_pdl", "overlap", "waits"), [(True, True, True), (True, False, False), (False, True, False)])
def test_only_a_kernel_that_starts_early_holds_its_copies_back(has_pdl: bool, overlap: bool, waits: bool) -> None:
    gpu = sampling_gpu()
    gpu.has_pdl = has_pdl
    engine = open_engine(CONFIG.replace(dtype="fp8", hidden_dim=8192), gpu)  # rows of Llama-3.2-1B's down projection
    engine._steps.overlap = overlap
    list(engine.decode_many(1, 0, 2))
    delays = [one.args[0].delay for one in gpu.graphs[-1] if isinstance(one.args[0], MatvecArgs)]
    assert delays.count(0) == len(delays) - CONFIG.n_layers * waits
    assert next(one.args[0].delay for one in engine.program("greedy").launches[5:]) > 0, "the program itself is as planned"


@pytest.mark.parametrize(("ending", "tail"), [("none", []), ("greedy", ["sample_max"]), ("draw", ["sample_draw"])])
def test_endings(ending: Any, tail: list[str]) -> None:
    names = [one.kernel.name for one in open_engine().program(ending).launches]
    assert [n for n in names if n.startswith("sample")] == tail
    assert ("matvec_rows" in names) == (ending != "none")


@pytest.mark.parametrize("changes", [{}, {"norm_type": "layernorm_par"}, {"n_experts": 4, "n_experts_active": 2}])
def test_every_norm_gets_the_partial_sums_of_its_producer(changes: dict[str, Any]) -> None:
    engine = open_engine(CONFIG.replace(**changes))
    program = engine.program("logits")
    producer = cuda_ops.embed_grid(CONFIG) - 1
    for one in program.launches[1:]:
        args = one.args[0]
        if one.kernel.name.startswith("matvec") and args.part:
            assert args.n_part == producer, one.kernel.name
        if getattr(args, "part_next", None):
            producer = one.grid[0]


def test_parallel_block_reads_the_residual_that_attention_did_not_touch() -> None:
    engine = open_engine(CONFIG.replace(norm_type="layernorm_par"))
    residual = list(args_of(engine.program("logits"), "matvec_residual"))
    (gateup, *_) = args_of(engine.program("logits"), "matvec_gateup")
    out, down = residual[:2]
    assert out.y32 != out.res == gateup.x32
    assert (down.res, down.y32) == (out.y32, out.res)


def test_layers_have_their_own_cache() -> None:
    engine = open_engine(kv_dtype="fp8")
    found = [(a.k, a.v) for a in args_of(engine.program("logits"), "attention")]
    half = 32 * CONFIG.kv_dim
    assert [v - k for k, v in found] == [half, half]
    assert found[1][0] - found[0][0] == 2 * half
    assert found[-1][1] + half - found[0][0] == engine.memory_plan.cache


def test_rolling_turns_the_sinks_first() -> None:
    names = [one.kernel.name for one in open_engine(on_full="roll").program("logits").launches]
    assert names[:2] == ["embed", "rotate_sinks"]
    assert "rotate_sinks" not in [one.kernel.name for one in open_engine().program("logits").launches]


def test_stamped_kernels_have_a_slot_each() -> None:
    program = open_engine().program("draw", stamped=True)
    *timed, collect = program.launches
    slots = [one.args[0].stamp for one in timed]
    assert slots == [slots[0] + 16 * i for i in range(len(program.kernels))]
    assert collect.args[0].n == len(program.kernels)
    assert all(dict(one.kernel.spec.defines).get("CALMNB_STAMPS") == 3 for one in timed)


@pytest.mark.parametrize("name", list(SHAPES))
def test_pointers_lie_inside_their_allocations(name: str) -> None:
    config = shape_config(name, "gf4").replace(n_layers=1, vocab_size=64)
    gpu = FakeGpu()
    with cuda.open_random_engine(config, is_tied=True, seq_len=8, gpu=gpu) as engine:
        spans = [(a, a + array.nbytes) for a, array in gpu.held.items()]
        for one in engine.program("draw").launches:
            for field, kind in one.args[0]._fields_:
                value = getattr(one.args[0], field)
                if kind in (ctypes.c_uint64, ctypes.c_void_p) and value:
                    assert any(low <= value < high for low, high in spans), f"{one.kernel.name}.{field}"


STRUCTS = {
    "attention.cu": {"AttentionArgs": cuda_ops.AttentionArgs},
    "embed.cu": {"EmbedArgs": cuda_ops.EmbedArgs},
    "sample.cuh": {
        "SampleArgs": cuda_ops.SampleArgs, "SampleParams": cuda_ops.SampleParams, "HostToken": cuda_ops.HostToken,
    },
    "cache.cu": {"SinkArgs": cuda_ops.SinkArgs, "CollectArgs": cuda_ops.CollectArgs},
    "prefill.cu": {"QkvRowsArgs": cuda_prefill._QkvArgs},
    "attention_prefill.cu": {"PrefillAttentionArgs": cuda_prefill._AttentionArgs},
}  # fmt: skip
C_TYPES = {"int": ctypes.c_int32, "float": ctypes.c_float, "double": ctypes.c_double, "long long": ctypes.c_int64}


@pytest.mark.parametrize(("source", "name"), [(s, n) for s, structs in STRUCTS.items() for n in structs])
def test_argument_structures_mirror_the_kernels(source: str, name: str) -> None:
    text = (kernels_dir() / source).read_text()
    body = re.search(rf"struct {name} \{{(.*?)\}};", text, re.S)
    assert body
    fields: list[tuple[str, Any]] = []
    for line in re.sub(r"//.*", "", body[1]).split(";"):
        declared = re.match(r"\s*(?:const )?(long long|\w+)(\**)(?: \*)?\s+(.*)", line.strip(), re.S)
        if not declared:
            continue
        kind = ctypes.c_uint64 if declared[2] or declared[1] in ("u64",) else C_TYPES[declared[1]]
        fields += [(n.strip(), kind) for n in declared[3].split(",")]
    assert [(n, k) for n, k in STRUCTS[source][name]._fields_] == fields


# -- attention's geometry ---------------------------------------------------------------------------------------------


@given(
    st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256]),
    st.sampled_from([1, 2, 3, 4, 6, 7, 8, 16, 71]),
    st.sampled_from([1, 2, 3, 8, 32]),
    st.sampled_from(["fp16", "fp8"]),
    st.sampled_from([(132, 228), (108, 164), (128, 100)]),
)
def test_attention_covers_all_heads_within_the_limits(
    head_dim: int, per_kv: int, n_kv: int, kv: str, device: tuple[int, int]
) -> None:
    sms, shared_kb = device
    config = ModelConfig("llama", "fp16", 64, 64, head_dim, 1, per_kv * n_kv, n_kv, 32)
    plan = plan_attention(config, kv, sms, shared_per_sm=shared_kb << 10)
    assert 1 <= plan.heads <= 8
    assert plan.heads * plan.groups_per_kv >= per_kv > plan.heads * (plan.groups_per_kv - 1)
    assert plan.groups == n_kv * plan.groups_per_kv
    assert plan.grid == plan.splits * plan.groups <= max(sms, plan.groups)
    filled = plan_attention(config, kv, sms, shared_per_sm=shared_kb << 10, fill=True)
    assert filled.grid == max(sms, plan.groups)
    assert plan.shared <= (shared_kb - 1 << 10)
    assert plan.short_max >= 16


def test_rows_that_no_copy_suits_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"head_dim 18 .* kv_dtype='fp16'"):
        plan_attention(CONFIG.replace(head_dim=18, rotary_dim=2), "fp8", 132)


# -- positions --------------------------------------------------------------------------------------------------------


@given(st.integers(3, 50), st.integers(0, 500))
def test_state_follows_the_rolling_rule(seq_len: int, pos: int) -> None:
    positions = Positions(CONFIG, seq_len, "roll")
    token, at, slot, length, sinks, *_ = state_words(5, pos, seq_len)
    assert (token, at, slot, length) == (5, pos, positions.slot(pos), positions.length(pos))
    assert (sinks > 0) == positions.rolls(pos)


def test_step_writes_state_and_moves_on() -> None:
    gpu = FakeGpu()
    engine = open_engine(gpu=gpu)
    seen: list[list[int]] = []
    gpu.on_run = lambda launches: seen.append(list((ctypes.c_int32 * 4).from_address(launches[0].args[0].state)))
    for pos, token in enumerate([5, 6, 7]):
        assert engine.step(token, pos).shape == (CONFIG.vocab_size,)
    assert seen == [[5, 0, 0, 1], [6, 1, 1, 2], [7, 2, 2, 3]]
    with pytest.raises(ContextError):
        engine.step(1, 5)


def test_prompt_tokens_skip_the_output() -> None:
    gpu = FakeGpu()
    engine = open_engine(gpu=gpu)
    runs: list[bool] = []
    gpu.on_run = lambda launches: runs.append(any(one.kernel.name == "matvec_rows" for one in launches))
    engine.prefill([1, 2, 3])
    assert runs == [False, False, True]


def test_long_prompts_go_in_batches() -> None:
    gpu = FakeGpu()
    engine = open_engine(gpu=gpu, seq_len=700)
    engine.prefill(list(range(90)) * 7)
    assert len(gpu.products) == 2 * 5 * CONFIG.n_layers
    assert {p[3] for p in gpu.products} == {512, 118}
    assert engine._positions.end == 630


def test_experts_go_step_by_step() -> None:
    gpu = FakeGpu()
    engine = open_engine(CONFIG.replace(n_experts=4, n_experts_active=2), gpu=gpu)
    engine.prefill([1] * 20)
    assert gpu.products == []


@pytest.mark.parametrize(
    ("arch", "sm_count"),
    [("sm_80", 108), ("sm_86", 28), ("sm_86", 82), ("sm_89", 24), ("sm_89", 128), ("sm_90", 132), ("sm_120", 170)],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_plan_asks_for_more_shared_memory_than_there_is(arch: str, sm_count: int, shape: str) -> None:
    most = Device.of_arch(arch).shared_per_block
    for dtype, kv_dtype in itertools.product(("fp16", "fp8", "gf4"), ("fp16", "fp8")):
        plans = make_plans(shape_config(shape, dtype), kv_dtype, 4096, "stop", arch, sm_count)  # type: ignore[arg-type]
        matvecs = [plan.smem for plan in plans.matvec.values()]
        assert max(*matvecs, plans.attention.shared, plans.short_attention.shared, plans.sampling.max_shared) <= most
        assert plans.sampling.can_draw


# -- tokens chosen on the device --------------------------------------------------------------------------------------


def test_tokens_arrive_in_order() -> None:
    engine = open_engine(gpu=sampling_gpu())
    assert [(d.token, d.pos) for d in engine.decode_many(3, 0, 20)] == [(p * 7 % 96, p) for p in range(1, 21)]
    assert engine._positions.end == 20


@pytest.mark.parametrize("ahead", [0, 1, 8])
def test_run_ahead_is_bounded(ahead: int) -> None:
    gpu, launched = FakeGpu(), []
    gpu.on_run = lambda launches: (launched.append(1), deliver(launches, lambda pos: 1))[1]
    engine = open_engine(gpu=gpu)
    run = engine.decode_many(3, 0, 20, ahead=ahead)
    for i in range(5):
        next(run)
        assert len(launched) == i + 1 + ahead
    run.close()
    assert engine._positions.end == 5


def test_a_caller_slower_than_the_gpu_loses_no_token() -> None:
    """However far it may run ahead, no step writes over a token that was not read."""
    engine = open_engine(gpu=sampling_gpu(), seq_len=700)
    assert [d.pos for d in engine.decode_many(3, 0, 600, ahead=300)] == list(range(1, 601))


def test_closing_in_the_middle_of_decoding_is_told() -> None:
    engine = open_engine(gpu=sampling_gpu())
    run = engine.decode_many(3, 0, 20)
    next(run)
    engine.close()
    with pytest.raises(ConfigError, match="was closed while it decoded"):
        next(run)


def test_up_and_gate_are_one_kernel_wide_if_either_is() -> None:
    for wide in ("0.w1", "0.w3"):
        plans = make_plans(CONFIG, "fp16", 64, "stop", "sm_90", 132, wide=frozenset({wide}))
        assert plans.plan("gateup", "0.w1").wide
        assert not plans.plan("gateup", "1.w1").wide
        assert not plans.plan("down", "0.w2").wide


def test_nothing_runs_ahead_of_the_caller_once_the_cache_rolls() -> None:
    gpu, launched = FakeGpu(), []
    gpu.on_run = lambda launches: (launched.append(1), deliver(launches, lambda pos: 1))[1]
    engine = open_engine(gpu=gpu, seq_len=8, on_full="roll")
    run = engine.decode_many(3, 0, 30)
    counts = []
    for _ in range(12):
        next(run)
        counts.append(len(launched))
    assert counts == [8, 8, 8, 8, 8, 8, 8, 8, 9, 10, 11, 12]


def test_decoding_stops_at_the_end_of_the_context() -> None:
    engine = open_engine(gpu=sampling_gpu(), seq_len=8)
    assert len(list(engine.decode_many(3, 0, 100))) == 8


def test_overflowed_logits_are_an_error() -> None:
    gpu = FakeGpu()
    gpu.on_run = lambda launches: deliver(launches, lambda pos: -5)
    with pytest.raises(CalmnbError, match="logit of token 4"):
        next(open_engine(gpu=gpu).decode_many(3, 0, 5))


def test_step_that_gives_no_token_is_noticed() -> None:
    with pytest.raises(DeviceError, match="without a token"):
        next(open_engine().decode_many(3, 0, 5))


def test_a_vocabulary_too_large_to_draw_from_is_told_before_any_launch() -> None:
    gpu = FakeGpu(arch="sm_86", sm_count=4)  # 4 blocks of 99 KB
    engine = open_engine(CONFIG.replace(vocab_size=40_000), gpu=gpu)
    assert engine.chooses(Sampling())
    assert not engine.chooses(Sampling(temperature=1.0))
    with pytest.raises(UnsupportedError, match="no room to draw from 40000 ids"):
        next(engine.decode_many(3, 0, 5, sampling=Sampling(temperature=1.0)))
    assert open_engine(CONFIG.replace(vocab_size=39_000), gpu=gpu).chooses(Sampling(temperature=1.0))


def test_sampling_settings_reach_the_device() -> None:
    gpu = sampling_gpu()
    engine = open_engine(gpu=gpu)
    sampling = Sampling(temperature=0.5, top_k=7, top_p=0.9, min_p=0.25, repetition_penalty=1.5, repetition_range=9)
    list(engine.decode_many(4, 3 - 3, 1, sampling=sampling, rng_state=77, history=[4], n_ids=50))
    p = cuda_ops.SampleParams.from_address(engine._work["params"])
    assert (p.temperature, p.top_k, p.top_p, p.penalty, p.penalty_range) == (0.5, 7, 0.9, 1.5, 9)
    assert (p.rng, p.n_ids) == (77, 50)
    assert p.min_p_offset == pytest.approx(np.log(0.25) * 0.5)


def test_penalty_sees_the_history_by_position() -> None:
    gpu = sampling_gpu()
    engine = open_engine(gpu=gpu, seq_len=8)
    engine._positions.end = 3
    list(engine.decode_many(13, 3, 1, sampling=Sampling(repetition_penalty=1.2), history=[10, 11, 12, 13]))
    history = (ctypes.c_int32 * 8).from_address(engine._work["history"])
    assert list(history)[:4] == [10, 11, 12, 13]


# -- closing ----------------------------------------------------------------------------------------------------------


def test_close_frees_everything_and_may_be_repeated() -> None:
    gpu = FakeGpu()
    engine = open_engine(gpu=gpu)
    engine.close()
    engine.close()
    assert gpu.closed
    assert gpu.held == {}
    with pytest.raises(ConfigError, match="closed"):
        engine.step(1, 0)


def test_failure_while_opening_frees_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()

    def fail(*args: object, **options: object) -> None:
        raise DeviceError("no")

    monkeypatch.setattr(cuda, "upload", fail)
    with pytest.raises(DeviceError, match="no"):
        open_engine(gpu=gpu)
    assert gpu.closed


def test_launches_can_be_copied_field_by_field() -> None:
    launch = open_engine().program("logits").launches[0]
    assert dataclasses.replace(launch, dependent=True).grid == launch.grid


def test_short_and_long_contexts_have_their_own_graph() -> None:
    gpu, used = sampling_gpu(), []
    run = gpu.on_run

    def note(launches: Any) -> None:
        used.append(next(one.grid for one in launches if one.kernel.name == "attention"))
        run(launches)

    gpu.on_run = note
    engine = open_engine(gpu=gpu, seq_len=2000)
    plan, short = engine._plans.attention, engine._plans.short_attention
    engine._positions.end = plan.short_max - 3
    list(engine.decode_many(1, plan.short_max - 3, 6))
    assert used == [(short.grid, 1)] * 3 + [(plan.grid, 1)] * 3
    assert (short.splits, short.groups) == (1, CONFIG.n_kv_heads)
    assert len(gpu.graphs) == 2


def test_sliding_window_keeps_the_short_form() -> None:
    engine = open_engine(CONFIG.replace(sliding_window=40), seq_len=9000)
    assert engine._plans.is_short(8999)
    assert not open_engine(seq_len=9000)._plans.is_short(8999)


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("kv_dtype", ["fp16", "fp8"])
def test_attention_leaves_room_for_a_weight_kernel(name: str, kv_dtype: str) -> None:
    per_sm, block = 228 << 10, 84 << 10
    for short in (False, True):
        plan = plan_attention(shape_config(name), kv_dtype, 132, short=short, fill=True)
        static = 16 * (plan_head_dim(name) + 8) * 2 + 1024
        assert plan.shared + static + 1024 + block + 1024 <= per_sm
        assert 2 * (plan.shared + static + 1024) > per_sm, "two attention blocks could share a multiprocessor"
        assert plan.grid == 132


def plan_head_dim(name: str) -> int:
    return shape_config(name).head_dim


def test_experts_share_the_plans_of_their_kernels() -> None:
    config = CONFIG.replace(n_experts=8, n_experts_active=3)
    program = open_engine(config).program("logits")
    (gateup, *_) = args_of(program, "matvec_gateup")
    assert (gateup.rows, gateup.n_experts, gateup.n_active) == (2 * CONFIG.hidden_dim * 3, 8, 3)
    stages = [k.stage for k in program.kernels if k.layer == 0]
    assert stages == ["matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_up", "matmul_ffn_down"]
    specs = {one.kernel.name: dict(one.kernel.spec.defines) for one in program.launches}
    assert specs["matvec_gateup"]["K_MOE"] == 1


def test_too_many_experts_a_token_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="up to 64"):
        open_engine(CONFIG.replace(n_experts=70, n_experts_active=65))


# -- the whole way from a file ----------------------------------------------------------------------------------------


def test_a_model_generates_on_the_gpu(spec_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import calmnb

    gpu = FakeGpu()

    def run(launches: Any) -> None:
        if any(one.kernel.name.startswith("sample") for one in launches):
            deliver(launches, lambda pos: 1 + pos % 7)

    gpu.on_run = run
    monkeypatch.setattr("calmnb.engine._cuda_problem", lambda: "")
    monkeypatch.setattr(cuda, "CudaDevice", lambda **options: gpu)
    with calmnb.load(spec_model("A"), device="auto", seq_len=40) as model:
        assert model.engine.info.engine == "cuda"
        first = [t.id for t in model.generate([1, 2, 3], max_tokens=6, stop_ids=())]
        # The first token is chosen from the prompt's logits (all zero here); then the device chooses.
        assert first == [0] + [1 + pos % 7 for pos in range(4, 9)]
        answer = model.generate([1, 2, 3, *first[:3], 5], max_tokens=4, stop_ids=())
        assert [t.id for t in answer] == [0] + [1 + pos % 7 for pos in range(8, 11)]
        assert answer.n_reused == 6
    assert gpu.closed
