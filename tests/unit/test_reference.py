"""The NumPy engine against the specification, against transformers, and against itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calmnb.checkpoint import open_calm
from calmnb.config import ModelConfig
from calmnb.engine.positions import Positions, rope_table
from calmnb.engine.reference import ReferenceEngine, activation, choose_experts, normalise, rotate
from calmnb.errors import ConfigError, ContextError
from tests.engine_models import SPEC, SPEC_CONFIG, from_transformers, random_weights, spec_weights

HEAD = ModelConfig("llama", "fp16", 4, 4, 4, 1, 1, 1, 4, rotary_dim=4)


class Recording:
    """Keeps what an engine reports."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def add(
        self, phase: Any, pos: int, kv_len: int, n_tokens: int, kernels: Any, starts: Any, ends: Any, start: float, end: float
    ) -> None:
        self.steps.append(
            {"phase": phase, "pos": pos, "kv_len": kv_len, "n": n_tokens, "kernels": kernels, "starts": starts.copy(),
             "ends": ends.copy(), "start": start, "end": end}
        )  # fmt: skip

    def sampled(self, pos: int, token: int, start: float, end: float) -> None:
        raise AssertionError("engines do not sample")


@pytest.mark.parametrize("name", SPEC)
def test_specification_logits_step_by_step(name: str) -> None:
    _, tokens, argmaxes, logits, arguments = SPEC[name]
    engine = ReferenceEngine(spec_weights(name), **arguments)
    steps = [engine.step(token, pos) for pos, token in enumerate(tokens)]
    if argmaxes:
        assert [int(step.argmax()) for step in steps] == argmaxes
    np.testing.assert_allclose(steps[-1], logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SPEC)
def test_specification_logits_from_a_batch(name: str) -> None:
    _, tokens, _, logits, arguments = SPEC[name]
    batch = ReferenceEngine(spec_weights(name), **arguments).prefill(tokens)
    np.testing.assert_allclose(batch, logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["A", "C", "E", "Fh"])
def test_specification_logits_from_a_file(name: str, spec_model: Callable[[str], Path]) -> None:
    _, tokens, _, logits, arguments = SPEC[name]
    with open_calm(spec_model(name)) as file:
        got = ReferenceEngine(file.weights, **arguments).prefill(tokens)
    np.testing.assert_allclose(got, logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("values", "changes", "pos", "expected"),
    [
        ([1, 2, 3, 4], {}, 3, [-1.2722325, -1.8388650, 2.8786681, 4.0881866]),
        ([1, 2, 3, 4], {"rotary_dim": 2}, 3, [-1.2722325, -1.8388650, 3, 4]),
        (
            [1, 0] * 4,
            {"head_dim": 8, "rotary_dim": 8, "rope_theta": 5e5},
            100,
            [0.8623189, -0.5063656, -0.8144530, -0.5802295, 0.9900167, 0.1409504, 0.9999859, 0.0053183],
        ),
    ],
)
def test_rotary_embedding(values: list[float], changes: dict[str, Any], pos: int, expected: list[float]) -> None:
    config = HEAD.replace(**changes)
    got = rotate(np.array(values, np.float32)[None, None], rope_table(config, [pos]))
    np.testing.assert_allclose(got.ravel(), expected, atol=2e-7)


@pytest.mark.parametrize(
    ("norm_type", "expected"),
    [("rmsnorm", [0.3651481, -0.7302963, 2.1908888, 0.7302963]), ("layernorm", [-0.2182177, -1.5275238, 1.3093061, 0.5455442])],
)
def test_norms(norm_type: str, expected: list[float]) -> None:
    config = HEAD.replace(norm_type=norm_type)
    got = normalise(np.array([1, -2, 3, 4], np.float32), np.array([1, 1, 2, 0.5], np.float32), config)
    np.testing.assert_allclose(got, expected, atol=2e-7)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("gelu", [-0.1588079, 0.3457141, 0.8411921, 1.9545978]), ("silu", [-0.2689414, 0.3112297, 0.7310586, 1.7615942])],
)
def test_activations(kind: str, expected: list[float]) -> None:
    np.testing.assert_allclose(activation(np.array([-1, 0.5, 1, 2], np.float32), kind), expected, atol=2e-6)


def test_silu_of_a_very_negative_number_is_zero_without_a_warning() -> None:
    assert activation(np.array([-1e4], np.float32), "silu")[0] == 0


@pytest.mark.parametrize(
    ("gate", "k", "experts", "shares"),
    [
        ([1, 3, 2, 0.5], 2, [1, 2], [0.7310586, 0.2689414]),
        ([2, 2, 1, 2], 2, [0, 1], [0.5, 0.5]),
        ([0.1, -1, 0.7, 0.7, 2, 1.9, -3, 0], 3, [4, 5, 2], [0.4592699, 0.4155646, 0.1251656]),
    ],
)
def test_expert_choice(gate: list[float], k: int, experts: list[int], shares: list[float]) -> None:
    chosen, weights = choose_experts(np.array(gate, np.float32), k)
    assert chosen.tolist() == experts
    np.testing.assert_allclose(weights, shares, atol=2e-7)


def test_ring_slots_keep_two_sinks() -> None:
    positions = Positions(SPEC_CONFIG, 8, "roll")
    assert {pos: positions.slot(pos) for pos in (7, 8, 9, 13, 14, 15, 20)} == {7: 7, 8: 2, 9: 3, 13: 7, 14: 2, 15: 3, 20: 2}
    assert [positions.rolls(pos) for pos in (7, 8)] == [False, True]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("Llama", {"head_dim": 24}),
        ("Llama", {"rope": {"rope_type": "linear", "factor": 2.0}}),
        ("Llama", {"rope": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                            "original_max_position_embeddings": 16}}),
        ("Llama", {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}),
        ("Mistral", {"sliding_window": None}),
        ("Mistral", {"sliding_window": 5, "head_dim": 8}),
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True}),
    ],
    ids=str,
)  # fmt: skip
def test_agrees_with_transformers(kind: str, changes: dict[str, Any]) -> None:
    weights, ids, expected = transformers_case(kind, changes)
    got = ReferenceEngine(weights).prefill(ids, all_logits=True)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def transformers_case(kind: str, changes: dict[str, Any]) -> tuple[Any, list[int], np.ndarray]:
    """A tiny random model of transformers, its weights for calmnb, 24 tokens, and its logits for them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

        changes = dict(changes)
        rope = {"rope_theta": 10000.0, "rope_type": "default", **changes.pop("rope", {})}
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "rope_parameters": rope,
                 "tie_word_embeddings": False}  # fmt: skip
        config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes}, attn_implementation="eager")
        torch.manual_seed(1)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif name.endswith("bias"):
                    parameter.normal_(std=0.2)
                else:  # exact in fp16, so that storage rounds nothing
                    parameter.copy_((parameter.normal_() * 0.4 / math.sqrt(parameter.shape[-1])).half().float())
            ids = torch.randint(0, 50, (24,), generator=torch.Generator().manual_seed(2)).tolist()

            class HalfCache(transformers.DynamicCache):  # type: ignore[misc]
                """Rounds keys and values as our cache does; without it fp16 storage alone costs 1e-3."""

                def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
                    return super().update(keys.half().float(), values.half().float(), *args, **kwargs)

            logits = model(torch.tensor([ids]), past_key_values=HalfCache(config=config)).logits[0].numpy()
    weights = from_transformers(model)
    return weights, ids, logits


@pytest.mark.parametrize("pos", range(8))
def test_window_hides_what_lies_before_it(pos: int) -> None:
    weights = random_weights(SPEC_CONFIG.replace(sliding_window=4, n_layers=1))
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    engine = ReferenceEngine(weights)
    engine.prefill(tokens)
    before = engine.step(7, 8)
    tokens[pos] = 11
    engine = ReferenceEngine(weights)
    engine.prefill(tokens)
    assert np.array_equal(before, engine.step(7, 8)) == (pos < 5)


def test_going_back_overwrites_what_was_cached() -> None:
    engine = ReferenceEngine(spec_weights("A"))
    engine.prefill([3, 1, 4])
    engine.prefill([9, 9], 1)
    fresh = ReferenceEngine(spec_weights("A")).prefill([3, 9, 9, 5])
    np.testing.assert_allclose(engine.step(5, 3), fresh, atol=1e-5)


def test_refuses_the_position_past_the_context() -> None:
    engine = ReferenceEngine(spec_weights("A"), seq_len=4)
    engine.prefill([1, 2, 3, 4])
    with pytest.raises(ContextError, match="do not fit in a context of 4"):
        engine.step(5, 4)


def test_refuses_a_gap() -> None:
    with pytest.raises(ContextError, match="the next is 0"):
        ReferenceEngine(spec_weights("A")).step(1, 5)


def test_starts_over_after_the_cache_has_rolled() -> None:
    engine = ReferenceEngine(spec_weights("A"), seq_len=4, on_full="roll")
    fresh = engine.prefill([3, 1, 4, 1, 5, 9])
    np.testing.assert_array_equal(engine.prefill([3, 1, 4, 1, 5, 9]), fresh)


def test_refuses_to_go_back_once_rolled() -> None:
    engine = ReferenceEngine(spec_weights("A"), seq_len=4, on_full="roll")
    engine.prefill([1, 2, 3, 4, 5])
    with pytest.raises(ContextError, match="after the cache rolled"):
        engine.step(1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 2, "on_full": "roll"}, "at least 3"),
        ({"seq_len": 0}, "at least 1"),
        ({"kv_dtype": "fp4"}, "fp16, fp8"),
        ({"on_full": "wrap"}, "'stop' and 'roll'"),
    ],
)
def test_refuses_arguments_out_of_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReferenceEngine(spec_weights("A"), **arguments)


def test_refuses_to_roll_a_sliding_window() -> None:
    with pytest.raises(ConfigError, match="sliding window"):
        ReferenceEngine(random_weights(SPEC_CONFIG.replace(sliding_window=4)), on_full="roll")


@pytest.mark.parametrize(
    ("tokens", "message"), [([], "no tokens"), ([12], "outside the vocabulary"), ([-1], "outside the vocabulary")]
)
def test_refuses_tokens_that_are_not(tokens: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReferenceEngine(spec_weights("A")).prefill(tokens)


def test_records_stages_in_order_with_times_inside_the_step() -> None:
    engine = ReferenceEngine(spec_weights("A"))
    engine.recorder = recording = Recording()
    engine.prefill([3, 1])
    engine.step(4, 2)
    first, second = recording.steps
    assert (first["phase"], first["pos"], first["kv_len"], first["n"]) == ("prefill", 0, 2, 2)
    assert (second["phase"], second["pos"], second["kv_len"], second["n"]) == ("decode", 2, 3, 1)
    layer = ["matmul_qkv", "attention", "matmul_attn", "matmul_ffn_up", "matmul_ffn_down"]
    assert [k.stage for k in second["kernels"]] == ["embed", *layer, *layer, "output"]
    assert (second["starts"] <= second["ends"]).all()
    assert second["start"] == second["starts"][0]
    assert second["end"] == second["ends"][-1]
