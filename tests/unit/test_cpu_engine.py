"""The CPU engine against the specification, the reference and transformers; its threads, its memory, its bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st

from calmnb.checkpoint import open_calm
from calmnb.config import ModelConfig
from calmnb.engine import cpu as cpu_module
from calmnb.engine import open_engine
from calmnb.engine.base import PromptStopped, Weights
from calmnb.engine.cpu import CpuEngine
from calmnb.engine.cpu_blas import one_blas_thread
from calmnb.engine.reference import ReferenceEngine
from calmnb.errors import BusyError, ConfigError, ContextError
from tests.engine_models import SPEC, SPEC_CONFIG, random_weights, spec_weights
from tests.unit.test_reference import Recording, transformers_case

WIDE = SPEC_CONFIG.replace(dim=64, hidden_dim=96, vocab_size=40, n_heads=4, n_kv_heads=2, max_seq_len=512)


@pytest.fixture
def opened() -> Iterator[Callable[..., CpuEngine]]:
    """``opened(weights, **arguments)``: an engine that is closed after the test."""
    engines: list[CpuEngine] = []

    def open_one(weights: Weights, **arguments: Any) -> CpuEngine:
        engines.append(CpuEngine(weights, **{"threads": 2, **arguments}))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


Open = Callable[..., CpuEngine]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of at most 16 tokens, and as few as 2."""
    monkeypatch.setattr(cpu_module, "BATCH", 16)
    monkeypatch.setattr(cpu_module, "_MIN_BATCH", 2)


# -- the specification, transformers, the reference ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SPEC)
def test_specification_logits_step_by_step(name: str, opened: Open) -> None:
    _, tokens, argmaxes, logits, arguments = SPEC[name]
    engine = opened(spec_weights(name), **arguments)
    steps = [engine.step(token, pos).copy() for pos, token in enumerate(tokens)]
    if argmaxes:
        assert [int(step.argmax()) for step in steps] == argmaxes
    np.testing.assert_allclose(steps[-1], logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SPEC)
@pytest.mark.usefixtures("small_batches")
def test_specification_logits_from_a_batch(name: str, opened: Open) -> None:
    _, tokens, _, logits, arguments = SPEC[name]
    np.testing.assert_allclose(opened(spec_weights(name), **arguments).prefill(tokens), logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["A", "B", "C", "F"])
def test_specification_logits_from_a_mapped_file(name: str, spec_model: Callable[[str], Path], opened: Open) -> None:
    _, tokens, _, logits, arguments = SPEC[name]
    with open_calm(spec_model(name)) as file:
        engine = opened(file.weights, **arguments)
        got = [engine.step(token, pos).copy() for pos, token in enumerate(tokens)][-1]
        engine.close()
    np.testing.assert_allclose(got, logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("Llama", {"head_dim": 24}),
        ("Llama", {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}),
        ("Mistral", {"sliding_window": 5, "head_dim": 8}),
        ("Qwen2", {}),
    ],
    ids=str,
)
@pytest.mark.usefixtures("small_batches")
def test_agrees_with_transformers(kind: str, changes: dict[str, Any], opened: Open) -> None:
    weights, ids, expected = transformers_case(kind, changes)
    engine = opened(weights)
    np.testing.assert_allclose(engine.prefill(ids, all_logits=True), expected, rtol=0, atol=1e-4)
    engine.reset()
    steps = np.stack([engine.step(token, pos).copy() for pos, token in enumerate(ids)])
    np.testing.assert_allclose(steps, expected, rtol=0, atol=1e-4)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "heads 8 to 1": ({"n_heads": 8, "n_kv_heads": 1}, {}),
    "heads 6 to 3": ({"n_heads": 6, "n_kv_heads": 3}, {}),
    "seven heads share one": ({"n_heads": 7, "n_kv_heads": 1}, {}),
    "every head its own": ({"n_heads": 4, "n_kv_heads": 4}, {"kv_dtype": "fp8"}),
    "sizes that no vector divides": ({"dim": 37, "hidden_dim": 53, "head_dim": 10, "rotary_dim": 6, "vocab_size": 41}, {}),
    "odd head": ({"dim": 20, "hidden_dim": 19, "head_dim": 5, "rotary_dim": 4, "n_heads": 3, "n_kv_heads": 1}, {}),
    "no rotary embedding": ({"rotary_dim": 0}, {}),
    "fp8 tails": ({"dtype": "fp8", "dim": 50, "hidden_dim": 35}, {}),
    "gf4 words that no vector divides": ({"dtype": "gf4", "dim": 72, "hidden_dim": 40, "head_dim": 8, "rotary_dim": 8}, {}),
    "gf4 wider than a vector of words": ({"dtype": "gf4", "dim": 264, "hidden_dim": 392}, {}),
    "window": ({"sliding_window": 20}, {}),
    "window longer than a chunk": ({"sliding_window": 70}, {"kv_dtype": "fp8"}),
    "eight experts, three active": ({"n_experts": 8, "n_experts_active": 3, "dtype": "gf4"}, {}),
    "parallel block": ({"norm_type": "layernorm_par", "act_type": "gelu", "dim": 41}, {}),
    "context that no block divides": ({}, {"seq_len": 149}),
}


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_reference_past_two_chunks(case: str, opened: Open) -> None:
    changes, arguments = CASES[case]
    weights = random_weights(WIDE.replace(**changes), bias="window" in case)
    tokens = np.random.default_rng(3).integers(0, weights.config.vocab_size, 149).tolist()
    expected = ReferenceEngine(weights, **arguments).prefill(tokens, all_logits=True)
    engine = opened(weights, **arguments)
    batch = engine.prefill(tokens, all_logits=True)
    np.testing.assert_allclose(batch, expected, rtol=0, atol=2e-3, err_msg="batch")
    engine.reset()
    steps = np.stack([engine.step(token, pos).copy() for pos, token in enumerate(tokens)])
    np.testing.assert_allclose(steps, expected, rtol=0, atol=2e-3, err_msg="steps")
    # A value that falls on the other side of a rounding boundary of the cache moves a few logits; most must be exact.
    assert np.median(np.abs(batch - expected)) < 1e-4
    assert np.median(np.abs(steps - expected)) < 1e-4


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(["fp16", "fp8", "gf4"]),
    group=st.integers(1, 5),
    n_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    dim=st.integers(1, 9),
    hidden=st.integers(1, 9),
    kv_dtype=st.sampled_from(["fp16", "fp8"]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_agrees_with_the_reference_whatever_the_sizes(
    dtype: Any, group: int, n_kv_heads: int, head_dim: int, dim: int, hidden: int, kv_dtype: Any, threads: int, seed: int
) -> None:
    unit = 8 if dtype == "gf4" else 3  # gf4 stores eight weights a word
    config = ModelConfig("llama", dtype, unit * dim, unit * hidden, 8 * head_dim if dtype == "gf4" else 2 * head_dim, 2,
                         group * n_kv_heads, n_kv_heads, 13, max_seq_len=8, rotary_dim=2 * head_dim)  # fmt: skip
    weights = random_weights(config, seed)
    expected = ReferenceEngine(weights, kv_dtype=kv_dtype).prefill([1, 2, 3, 4, 5], all_logits=True)
    engine = CpuEngine(weights, kv_dtype=kv_dtype, threads=threads)
    try:
        got = np.stack([engine.step(token, token - 1).copy() for token in (1, 2, 3, 4, 5)])
    finally:
        engine.close()
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.05 if kv_dtype == "fp8" else 5e-3)
    assert np.median(np.abs(got - expected)) < 1e-3


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_every_finite_weight_is_decoded_exactly(dtype: Any, opened: Open) -> None:
    """Subnormals included: a library loaded with fast-math would flush them to zero."""
    if dtype == "fp16":
        codes: np.ndarray = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
        codes = codes[np.isfinite(codes)]
        values = codes.astype(np.float64)
    else:
        codes = np.array([b for b in range(256) if b & 0x7C != 0x7C], dtype=np.uint8)
        values = (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    # One layer that adds nothing, an output matrix whose row r holds one weight: logit r is weight r times the input.
    weights = random_weights(SPEC_CONFIG.replace(dtype=dtype, n_layers=1, vocab_size=len(codes), dim=16))
    layer = weights.layers[0]
    zeros = {name: np.zeros_like(getattr(layer, name)) for name in ("wo", "w2")}
    output = np.zeros((len(codes), 16), dtype=codes.dtype)
    output[:, 3] = codes
    one = 1.0 if dtype == "fp16" else 0x3C
    embed = np.full_like(weights.embed, one)
    changed = Weights(
        weights.config.replace(norm_eps=0.0), embed, (type(layer)(**{**vars(layer), **zeros}),), np.ones(16, np.float32), output
    )
    np.testing.assert_array_equal(opened(changed).step(0, 0).astype(np.float64), values)


def test_decoding_without_conversion_hardware_gives_the_same_numbers() -> None:
    from numba import njit

    from calmnb.engine import cpu_simd as simd

    @njit
    def both(halves: int, hard: int, soft: int, count: int) -> None:
        for i in range(0, count, 16):
            simd.vstore(hard + 4 * i, simd.vload_f16(halves + 2 * i))
            simd.vstore(soft + 4 * i, simd.vload_f16_soft(halves + 2 * i))

    halves = np.arange(1 << 16, dtype=np.uint16)
    hard, soft = np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.float32)
    both(halves.ctypes.data, hard.ctypes.data, soft.ctypes.data, 1 << 16)
    finite = np.isfinite(halves.view(np.float16))
    np.testing.assert_array_equal(hard[finite], halves.view(np.float16).astype(np.float32)[finite])
    np.testing.assert_array_equal(soft[finite].view(np.uint32), hard[finite].view(np.uint32))


@pytest.mark.parametrize("kv_dtype", ["fp16", "fp8"])
def test_cache_stores_round_to_nearest_even_and_saturate(kv_dtype: str) -> None:
    import ml_dtypes
    from numba import njit

    from calmnb.engine import cpu_ops

    kind = 0 if kv_dtype == "fp16" else 1
    target: Any = np.float16 if kv_dtype == "fp16" else ml_dtypes.float8_e5m2
    largest = float(np.finfo(np.float16).max) if kv_dtype == "fp16" else 57344.0

    @njit
    def store(values: np.ndarray, out: int) -> None:
        for i in range(len(values)):
            cpu_ops.store_rounded(kind, out, i, values[i])

    rng = np.random.default_rng(0)
    exact = np.arange(1 << 15, dtype=np.uint16).view(np.float16)[:0x7C00].astype(np.float32)
    ties = (exact[1:] + exact[:-1]) / 2
    values = np.concatenate([exact, ties, np.exp(rng.uniform(-25, 12, 20000)).astype(np.float32), [1e9, 65520.0, 61440.0]])
    values = np.concatenate([values, -values]).astype(np.float32)
    out = np.zeros(len(values), dtype=target)
    store(values, out.ctypes.data)
    expected = np.clip(values, -largest, largest).astype(target)
    np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))


def test_huge_activations_stay_finite(opened: Open) -> None:
    weights = random_weights(WIDE)
    layer = weights.layers[0]
    loud = type(layer)(**{**vars(layer), "attn_norm": layer.attn_norm * np.float32(1e5)})
    engine = opened(Weights(weights.config, weights.embed, (loud, weights.layers[1]), weights.final_norm, weights.output))
    assert np.isfinite(engine.step(1, 0)).all()
    assert np.isfinite(engine.step(2, 1)).all()


# -- batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33])
@pytest.mark.usefixtures("small_batches")
def test_batches_of_any_length_equal_steps(length: int, opened: Open) -> None:
    weights = random_weights(WIDE)
    tokens = [(7 * i + 3) % 40 for i in range(length)]
    by_step, by_batch = opened(weights), opened(weights)
    for pos, token in enumerate(tokens):
        expected = by_step.step(token, pos)
    np.testing.assert_allclose(by_batch.prefill(tokens), expected, rtol=0, atol=2e-3)
    np.testing.assert_allclose(by_batch.step(5, length), by_step.step(5, length), rtol=0, atol=2e-3)


@pytest.mark.parametrize("patience", [0, 1, 5, 12])
def test_a_batch_can_be_left_halfway_and_begun_again(patience: int, opened: Open) -> None:
    weights = random_weights(WIDE)
    tokens = [(5 * i + 1) % 40 for i in range(40)]
    engine, asked = opened(weights, threads=1), 0
    engine.prefill(tokens[:8])

    def tired() -> bool:
        nonlocal asked
        asked += 1
        return asked > patience

    engine.should_stop = tired
    with pytest.raises(PromptStopped):
        engine.prefill(tokens[8:], 8)
    engine.should_stop = None
    with pytest.raises(ContextError):
        engine.step(1, 20)  # nothing of the batch counts as cached
    fresh = opened(weights, threads=1)
    fresh.prefill(tokens[:8])
    np.testing.assert_array_equal(engine.prefill(tokens[8:], 8), fresh.prefill(tokens[8:], 8))


@pytest.mark.usefixtures("small_batches")
def test_a_batch_may_continue_and_go_back(opened: Open) -> None:
    weights = random_weights(WIDE)
    tokens = [(5 * i + 1) % 40 for i in range(40)]
    engine = opened(weights)
    engine.prefill([9] * 30)
    engine.prefill(tokens[:20])
    got = engine.prefill(tokens[20:], 20)
    np.testing.assert_allclose(got, opened(weights).prefill(tokens), rtol=0, atol=2e-3)


@pytest.mark.usefixtures("small_batches")
def test_a_prompt_that_rolls_equals_the_reference(opened: Open) -> None:
    weights = random_weights(WIDE)
    tokens = [(5 * i + 1) % 40 for i in range(60)]
    expected = ReferenceEngine(weights, seq_len=37, on_full="roll").prefill(tokens, all_logits=True)
    got = opened(weights, seq_len=37, on_full="roll").prefill(tokens, all_logits=True)
    assert np.median(np.abs(got - expected)) < 1e-4
    np.testing.assert_allclose(got, expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("length", [63, 64])
def test_a_prompt_may_fill_the_context(length: int, opened: Open) -> None:
    assert np.isfinite(opened(random_weights(WIDE), seq_len=64).prefill([1] * length)).all()


def test_a_prompt_longer_than_the_context_is_refused_with_numbers(opened: Open) -> None:
    with pytest.raises(ContextError, match="positions 0 to 64 do not fit in a context of 64"):
        opened(random_weights(WIDE), seq_len=64).prefill([1] * 65)


# -- bits and threads ----------------------------------------------------------------------------------------------------


def greedy(engine: CpuEngine, count: int) -> list[bytes]:
    token, out = 3, []
    for pos in range(count):
        logits = engine.step(token, pos)
        out.append(logits.tobytes())
        token = int(logits.argmax())
    return out


@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
def test_greedy_decoding_gives_the_same_bits_every_time(dtype: Any, opened: Open) -> None:
    engine = opened(random_weights(WIDE.replace(dtype=dtype)))
    first = greedy(engine, 40)
    for _ in range(19):
        assert greedy(engine, 40) == first


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_the_thread_count_changes_no_bit(threads: int, opened: Open) -> None:
    weights = random_weights(WIDE.replace(dtype="gf4", n_experts=4, n_experts_active=2))
    assert greedy(opened(weights, threads=threads), 70) == greedy(opened(weights, threads=2), 70)


def test_works_from_a_thread_that_did_not_create_it(opened: Open) -> None:
    weights = spec_weights("A")
    engine = opened(weights)
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(lambda: engine.step(3, 0).copy()).result(timeout=60)
    np.testing.assert_array_equal(got, opened(weights).step(3, 0))


def test_several_engines_run_at_once(opened: Open) -> None:
    weights = random_weights(WIDE)
    expected = greedy(opened(weights), 40)
    engines = [opened(weights) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda e: greedy(e, 40), engines)) == [expected] * 3


def test_two_callers_at_once_are_refused_not_garbled(opened: Open) -> None:
    engine = opened(spec_weights("A"))
    with engine._running(), pytest.raises(BusyError, match="another thread"):
        engine.step(3, 0)
    engine.step(3, 0)


def test_closing_twice_is_harmless_and_ends_the_threads() -> None:
    before = threading.active_count()
    engine = CpuEngine(spec_weights("A"), threads=3)
    assert threading.active_count() == before + 2
    engine.close()
    engine.close()
    assert threading.active_count() == before
    with pytest.raises(ConfigError, match="closed"):
        engine.step(3, 0)


def test_threads_of_a_batch_end_with_the_engine() -> None:
    before = threading.active_count()
    engine = CpuEngine(random_weights(WIDE), threads=3)
    engine.prefill([1] * 20)
    assert threading.active_count() == before + 4
    engine.close()
    assert threading.active_count() == before


def blas_threads() -> set[int]:
    return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}


def test_blas_is_held_to_one_thread_until_the_last_batch_is_done() -> None:
    before = blas_threads()
    with one_blas_thread():
        with one_blas_thread():
            assert blas_threads() == {1}
        assert blas_threads() == {1}
    assert blas_threads() == before


def test_a_forgotten_engine_ends_its_threads() -> None:
    before = threading.active_count()
    engine = CpuEngine(spec_weights("A"), threads=3)
    engine.step(3, 0)
    del engine
    assert threading.active_count() == before


@pytest.mark.timed
def test_idle_threads_use_no_processor_time(opened: Open) -> None:
    engine = opened(spec_weights("A"), threads=4)
    engine.step(3, 0)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1


def step_forever(engine: CpuEngine) -> None:
    while True:
        for pos in range(50):
            engine.step(3, pos)


def test_an_interrupt_leaves_the_engine_usable(opened: Open) -> None:
    weights = random_weights(WIDE)
    expected = greedy(opened(weights), 5)
    engine = opened(weights)
    for delay in (0.003, 0.011, 0.023, 0.031):
        engine.reset()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer = threading.Timer(delay, lambda: signal.raise_signal(signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            step_forever(engine)
        timer.join()
    engine.reset()
    assert greedy(engine, 5) == expected


# -- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="uses mprotect")
@pytest.mark.parametrize("dtype", ["fp16", "fp8", "gf4"])
@pytest.mark.parametrize("sizes", [(72, 40), (40, 72), (24, 136)])
def test_reads_nothing_past_the_end_of_a_matrix(dtype: Any, sizes: tuple[int, int]) -> None:
    """Each matrix ends at a page that may not be touched; run in a child, since a failure is a crash."""
    code = f"""
import ctypes, mmap, numpy as np
from calmnb.engine.cpu import CpuEngine
from calmnb.engine.cpu_blas import one_blas_thread
from calmnb.engine.base import PromptStopped, Weights
from tests.engine_models import random_weights
from tests.unit.test_cpu_engine import WIDE
libc = ctypes.CDLL(None, use_errno=True)
keep = []
def guarded(a):
    size = -(-a.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, size + mmap.PAGESIZE)
    keep.append(area)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    raw = np.frombuffer(area, np.uint8)
    raw[size - a.nbytes:size] = a.view(np.uint8).ravel()
    assert libc.mprotect(ctypes.c_void_p(base + size), mmap.PAGESIZE, 0) == 0
    return raw[size - a.nbytes:size].view(a.dtype).reshape(a.shape)
w = random_weights(WIDE.replace(dtype={dtype!r}, dim={sizes[0]}, hidden_dim={sizes[1]}, head_dim=24, rotary_dim=24))
layers = tuple(type(l)(**{{k: v if v is None else guarded(v) for k, v in vars(l).items()}}) for l in w.layers)
g = Weights(w.config, guarded(w.embed), layers, guarded(w.final_norm), guarded(w.output))
plain, fenced = CpuEngine(w, threads=2), CpuEngine(g, threads=2)
for pos in range(3):
    assert np.array_equal(plain.step(39, pos), fenced.step(39, pos))
fenced.prefill([39] * 20, 3)
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "fine", f"exit {done.returncode}: {done.stderr[-2000:]}"


def test_cache_takes_the_bytes_it_says(opened: Open) -> None:
    config = WIDE.replace(head_dim=32, rotary_dim=32)
    engine = opened(random_weights(config), seq_len=512, kv_dtype="fp8")
    assert engine._state is not None
    assert engine._state.kv_cache.nbytes == config.kv_bytes_per_token("fp8") * 512


def test_refuses_a_matrix_of_another_shape() -> None:
    weights = spec_weights("A")
    layer = type(weights.layers[0])(**{**vars(weights.layers[0]), "wo": weights.layers[0].wo[:, :-1]})
    with pytest.raises(ConfigError, match=r"layer 0 wo: found float16 \(32, 31\); expected contiguous float16 \(32, 32\)"):
        CpuEngine(Weights(weights.config, weights.embed, (layer, weights.layers[1]), weights.final_norm, weights.output))


@pytest.mark.parametrize("threads", [0, -1, 5000])
def test_refuses_thread_counts_out_of_range(threads: int) -> None:
    with pytest.raises(ConfigError, match="threads is"):
        CpuEngine(spec_weights("A"), threads=threads)


def test_a_forked_child_is_refused_rather_than_left_waiting(opened: Open) -> None:
    engine = opened(spec_weights("A"))
    engine._state._pid = os.getpid() + 1  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="process that opened it"):
        engine.step(3, 0)


# -- recording -----------------------------------------------------------------------------------------------------------


def test_records_stages_in_order_on_the_clock_of_perf_counter(opened: Open) -> None:
    engine = opened(spec_weights("A"))
    engine.recorder = recording = Recording()
    start = time.perf_counter()
    engine.step(3, 0)
    end = time.perf_counter()
    (step,) = recording.steps
    layer = ["matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down"]
    assert [k.stage for k in step["kernels"]] == ["embed", *layer, *layer, "output"]
    assert [k.layer for k in step["kernels"]] == [-1, *[0] * 5, *[1] * 5, -1]
    assert start <= step["start"] == step["starts"][0]
    assert step["ends"][-1] == step["end"] <= end
    assert (step["starts"] <= step["ends"]).all()
    np.testing.assert_array_equal(step["starts"][1:], step["ends"][:-1])


@pytest.mark.usefixtures("small_batches")
def test_records_a_batch_as_one_step(opened: Open) -> None:
    engine = opened(spec_weights("Fh"))
    engine.recorder = recording = Recording()
    engine.prefill([1] * 18)
    engine.recorder = None
    engine.step(1, 18)
    assert [(s["phase"], s["pos"], s["n"], s["kv_len"]) for s in recording.steps] == [
        ("prefill", 0, 16, 16),
        ("prefill", 16, 2, 18),
    ]
    assert all(len(s["starts"]) == len(s["kernels"]) == 12 for s in recording.steps)


def test_open_engine_gives_a_cpu_engine(opened: Open) -> None:
    engine = open_engine(spec_weights("A"), device="cpu", threads=2)
    try:
        assert (engine.info.engine, engine.info.threads) == ("cpu", 2)
        np.testing.assert_array_equal(engine.step(3, 0), opened(spec_weights("A")).step(3, 0))
    finally:
        engine.close()


def test_pages_are_touched_only_when_positions_are_used() -> None:
    """A long context must not cost memory before it is filled."""
    import psutil

    before = psutil.Process().memory_info().rss
    engine = CpuEngine(random_weights(WIDE.replace(max_seq_len=200_000)), seq_len=200_000, threads=1)
    engine.step(1, 0)
    grown = psutil.Process().memory_info().rss - before
    size = engine._state.kv_cache.nbytes  # type: ignore[union-attr]
    engine.close()
    assert size > 40e6
    assert grown < size / 2
