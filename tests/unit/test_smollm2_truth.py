"""The real model, held against transformers on the same weights, and against answers stored before this code existed.

The fp16 file is decoded to float32, its q and k rows are put back into half-split order, and transformers runs them in
float32: a second opinion on every norm, head, rotation and row order. The stored ids were made from the float32 weights
of the GGUF file by a third program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from calmnb.model import Model, load
from calmnb.perplexity import perplexity, sample_text
from calmnb.quant import decode

pytestmark = [pytest.mark.model, pytest.mark.slow]

SKY = [{"role": "user", "content": "Write one sentence about why the sky is blue."}]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
# fmt: off
FRANCE_PROMPT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198, 1,
    4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
]
SKY_ANSWER = [
    504, 6376, 314, 4461, 975, 282, 260, 970, 260, 1205, 3323, 41993, 1420, 30, 1550, 8118, 9732, 653, 3925, 28, 357,
    13242, 5383, 6756, 282, 1512, 28, 527, 15802, 260,
]
# fmt: on
N_TEACHER = 500


@pytest.fixture(scope="module")
def model(smollm2: Callable[[str], Path]) -> Iterator[Model]:
    with load(smollm2("fp16"), device="cpu", seq_len=1024) as loaded:
        yield loaded


def half_split(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k from interleaved pairs (0, 1), (2, 3) ... back to halves."""
    per_head = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(per_head.transpose(0, 2, 1, 3).reshape(rows.shape))


@pytest.fixture(scope="module")
def oracle(model: Model) -> Any:
    """transformers' LlamaForCausalLM in float32 with the weights of the fp16 file."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    c, w = model.config, model.file.weights
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.dim,
        intermediate_size=c.hidden_dim,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_seq_len,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=w.is_tied,
        attn_implementation="eager",
    )
    state = {"model.embed_tokens.weight": decode(w.embed, c.dtype), "model.norm.weight": w.final_norm}
    if not w.is_tied:
        state["lm_head.weight"] = decode(w.output, c.dtype)
    for i, layer in enumerate(w.layers):
        p = f"model.layers.{i}."
        state[p + "self_attn.q_proj.weight"] = half_split(decode(layer.wq, c.dtype), c.n_heads)
        state[p + "self_attn.k_proj.weight"] = half_split(decode(layer.wk, c.dtype), c.n_kv_heads)
        state[p + "self_attn.v_proj.weight"] = decode(layer.wv, c.dtype)
        state[p + "self_attn.o_proj.weight"] = decode(layer.wo, c.dtype)
        state[p + "mlp.gate_proj.weight"] = decode(layer.w1, c.dtype)
        state[p + "mlp.down_proj.weight"] = decode(layer.w2, c.dtype)
        state[p + "mlp.up_proj.weight"] = decode(layer.w3, c.dtype)
        state[p + "input_layernorm.weight"] = layer.attn_norm
        state[p + "post_attention_layernorm.weight"] = layer.mlp_norm
    with torch.device("meta"):
        net = transformers.LlamaForCausalLM(config)
    net = net.to_empty(device="cpu").float().eval()
    net.model.rotary_emb = type(net.model.rotary_emb)(config)
    missing, unexpected = net.load_state_dict({k: torch.tensor(np.asarray(v)) for k, v in state.items()}, strict=False)
    assert unexpected == []
    assert set(missing) <= {"lm_head.weight"}
    net.tie_weights()
    return net


@pytest.fixture(scope="module")
def teacher_forced(model: Model, oracle: Any) -> tuple[NDArray[np.float32], NDArray[np.float32], list[int]]:
    """Logits of our engine and of transformers after each of 500 tokens of the sample text, and the tokens."""
    import torch

    ids = model.tokenizer.encode(sample_text()[:4000])[:N_TEACHER]
    model.reset()
    with model.exclusive("test"):
        ours = np.concatenate(
            [model.prefix.prefill(ids[at : at + 64], all_logits=True).copy() for at in range(0, len(ids), 64)]
        )
    with torch.inference_mode():
        theirs = oracle(torch.tensor([ids])).logits[0].numpy()
    return ours, theirs, ids


def test_top_1_of_500_tokens_is_transformers(
    teacher_forced: tuple[NDArray[np.float32], NDArray[np.float32], list[int]], record_property: Callable[[str, object], None]
) -> None:
    ours, theirs, ids = teacher_forced
    agreement = float((ours.argmax(axis=1) == theirs.argmax(axis=1)).mean())
    difference = float(np.abs(ours - theirs).mean())
    record_property("top_1_agreement", agreement)
    record_property("mean_abs_logit_difference", difference)
    print(f"\ntop-1 agreement {100 * agreement:.1f}% of {len(ids)}, mean |logit difference| {difference:.2e}")
    assert len(ids) == N_TEACHER
    assert agreement >= 0.99
    assert difference < 0.01


def test_decoding_step_by_step_gives_the_batchs_logits(
    model: Model, teacher_forced: tuple[NDArray[np.float32], NDArray[np.float32], list[int]]
) -> None:
    ours, _, ids = teacher_forced
    model.reset()
    with model.exclusive("test"):
        steps = np.stack([model.prefix.step(token).copy() for token in ids[:48]])
    assert np.abs(steps - ours[:48]).max() < 0.05


def test_greedy_text_is_transformers(model: Model, oracle: Any) -> None:
    import torch

    ids = model.encode_prompt(SKY)
    run = model.generate(ids, max_tokens=40)
    list(run)
    sequence = torch.tensor([ids + run.token_ids])
    with torch.inference_mode():
        theirs = oracle(sequence).logits[0, len(ids) - 1 : -1].argmax(dim=-1).tolist()
    assert run.token_ids == theirs


def test_greedy_ids_are_the_stored_ones(model: Model) -> None:
    run = model.generate(SKY, max_tokens=len(SKY_ANSWER))
    list(run)
    assert run.token_ids == SKY_ANSWER


def test_the_chat_template_gives_the_stored_prompt_and_answer(model: Model) -> None:
    run = model.generate(FRANCE)
    list(run)
    assert run.prompt_ids == FRANCE_PROMPT
    assert (run.text, run.stop_reason) == ("The capital of France is Paris.", "eos")


def test_greedy_decoding_repeats_bit_for_bit(model: Model) -> None:
    """Row 30."""
    seen = []
    for _ in range(3):
        model.reset()
        run = model.generate(SKY, max_tokens=8)
        seen.append([(t.id, t.logprob) for t in run])
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("1234567", [33, 34, 35, 36, 37, 38, 39]),
        ("'LL", [23, 16421]),
        ("\n\n\n", [16506]),
        ("a   b    c", [81, 256, 278, 333, 265]),
    ],
)
def test_text_is_cut_as_the_model_was_trained(model: Model, text: str, ids: list[int]) -> None:
    """Row 23: digits one by one, contractions, newlines and runs of spaces."""
    assert model.tokenizer.encode(text) == ids


def test_a_syllable_of_several_tokens_streams_whole(model: Model) -> None:
    """Row 2."""
    ids = model.tokenizer.encode("철🙂")
    stream = model.tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert len(ids) > 2
    assert "".join(pieces) == "철🙂"
    assert not any("\ufffd" in piece for piece in pieces)


def test_perplexity_is_transformers(
    model: Model, teacher_forced: tuple[NDArray[np.float32], NDArray[np.float32], list[int]]
) -> None:
    _, theirs, ids = teacher_forced
    logits = theirs[:-1].astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    expected = math.exp(-log_probabilities[np.arange(len(ids) - 1), ids[1:]].mean())
    assert perplexity(model, ids, window=N_TEACHER).value == pytest.approx(expected, rel=1e-3)
