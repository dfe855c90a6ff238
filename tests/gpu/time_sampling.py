"""What choosing a token adds to a step, and whether the tokens are right: ``python -m tests.gpu.time_sampling``.

For two vocabularies, prints the microseconds that each way of sampling adds to a step of one layer (graphs queued back to back,
minus the same step that ends with the logits; median of several rounds taken in turn), the most likely token also without
its rehearsal. Then compares tokens drawn from made-up logits with calmnb/sampler.py's.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from calmnb.engine.cuda import open_random_engine
from calmnb.engine.cuda_ops import sample_params, state_words
from calmnb.sampler import Sampler, Sampling, XorShift64
from calmnb.shapes import TIED, shape_config
from tests.gpu.launcher import Launcher
from tests.gpu.sample_case import SampleCase, exact_draw, penalised

STEPS, ROUNDS = 100, 9


def variants(spread: float) -> dict[str, Sampling]:
    """Ways to sample, with temperatures that make logits of standard deviation `spread` fall like a language model's."""
    t = spread / 2.5
    return {
        "greedy": Sampling(),
        "greedy, penalty 1.3": Sampling(repetition_penalty=1.3),
        "temperature": Sampling(temperature=t, min_p=0.0),
        "min-p 0.1": Sampling(temperature=t, min_p=0.1),
        "top-k 40": Sampling(temperature=t, top_k=40, min_p=0.0),
        "top-p 0.9": Sampling(temperature=t, top_p=0.9, min_p=0.0),
        "top-k 40, top-p 0.9, min-p 0.05": Sampling(temperature=t, top_k=40, top_p=0.9, min_p=0.05),
        "the same, penalty 1.1": Sampling(temperature=t, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1),
        "top-p 0.9, flat (temperature x 20)": Sampling(temperature=20 * t, top_p=0.9, min_p=0.0),
    }


def seconds_a_step(engine: Any, ending: Any, sampling: Sampling) -> float:
    """Queue `STEPS` steps back to back."""
    pos, vocab = 8, engine.config.vocab_size
    engine.graphs.prepare(ending, 0, pos)
    engine._put(engine._work["params"], np.frombuffer(bytes(sample_params(sampling, 7, vocab)), np.uint8))
    engine._put(engine._work["state"], np.array(state_words(1, pos, engine.seq_len), np.int32).view(np.uint8))

    def queue() -> None:
        for i in range(STEPS):
            engine.graphs.run(ending, 0, pos + i)

    return float(engine.gpu.time_call(queue)) / STEPS


def rehearse(engine: Any, on: bool) -> None:
    """Build the step anew, with or without the rehearsal."""
    graphs = engine.graphs
    plan = dataclasses.replace(graphs._plans.sampling, rehearse=on)
    graphs._plans = dataclasses.replace(graphs._plans, sampling=plan)
    graphs._programs.clear()
    graphs._graphs.clear()


def time_shape(shape: str, dtype: Any) -> None:
    config = shape_config(shape, dtype).replace(n_layers=1)
    with open_random_engine(config, is_tied=shape in TIED, seq_len=512) as engine:
        logits = engine.step(1, 0).copy()
        ways = variants(float(logits.std()))
        print(f"{shape} {dtype}, one layer, vocabulary {config.vocab_size}, logits of standard deviation {logits.std():.3g}")
        for on in (True, False):
            rehearse(engine, on)
            times: dict[str, list[float]] = {name: [] for name in (ways if on else ("greedy",))}
            bases = []
            for _ in range(ROUNDS):
                bases.append(seconds_a_step(engine, "logits", Sampling()))
                for name, seen in times.items():
                    ending = "greedy" if ways[name].is_greedy else "draw"
                    seen.append(seconds_a_step(engine, ending, ways[name]) - bases[-1])
            print(f"  {'with' if on else 'without'} rehearsal; the step without sampling {1e6 * np.median(bases):.2f} us")
            for name, found in times.items():
                low, middle, high = 1e6 * np.percentile(found, (20, 50, 80))
                print(f"    {name:36} {middle:6.2f} us ({low:.2f} to {high:.2f})", flush=True)


def check_tokens(gpu: Launcher, vocab: int) -> int:
    """Draw on the device and by calmnb/sampler.py; print and return what cannot be the rounding of a sum."""
    rng = np.random.default_rng(vocab)
    wrong = same = drawn = 0
    for spread in (0.05, 0.5, 2.5, 8.0):
        logits = (rng.standard_normal(vocab) * spread).astype(np.float32)
        case = SampleCase(gpu, logits, best_blocks=264, history_cap=512)
        for name, sampling in variants(spread).items():
            for _ in range(6):
                history = rng.integers(0, vocab, 300).tolist()
                seed = int(rng.integers(1, 1 << 62))
                sampler = Sampler(sampling, n_ids=vocab)
                sampler.rng.state = seed
                expected = sampler.sample(logits, history)
                case.set(sampling, seed, history)
                token = case.run()[0].token
                drawn += 1
                same += token == expected
                if sampling.is_greedy:
                    bad = token != expected
                else:
                    draw = exact_draw(sampling, penalised(sampling, logits, history), XorShift64(seed).coin())
                    bad = draw.distance(token) > 1e-6
                if bad:
                    wrong += 1
                    print(f"  {name}, spread {spread}, seed {seed}: token {token}, calmnb/sampler.py {expected}")
    print(f"vocabulary {vocab}: {same} of {drawn} tokens equal calmnb/sampler.py's; {wrong} are not due to its float32 sum")
    return wrong


def main() -> None:
    began = time.perf_counter()
    for shape, dtype in (("llama-3.2-1b", "fp8"), ("mistral-7b", "fp8")):
        time_shape(shape, dtype)
    gpu = Launcher()
    wrong = sum(check_tokens(gpu, vocab) for vocab in (128256, 32000))
    print(f"sampling: {'all tokens agree' if not wrong else f'{wrong} TOKENS ARE WRONG'}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
