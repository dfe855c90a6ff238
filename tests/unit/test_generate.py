"""The token loop: text, stops, limits, cancelling, interrupts, and what the KV cache holds afterwards."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from calmnb.engine.base import PromptStopped
from calmnb.errors import BusyError, CalmnbError, ConfigError, ContextError
from calmnb.generate import StopText
from calmnb.model import load
from tests.unit.fakes import ChoosingEngine, FakeEngine, fake_model, ids_of, says

# --- calm's own vectors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("min_p", "seed", "text", "reason"),
    [
        (0.1, 1, "deggaagggdggaagggaadgdaga", "length"),
        (0.1, 2, "dhbggagdaggaaggggagheggga", "length"),
        (0.1, 42, "deggjggadagddgaagaajaagda", "length"),
        (0.5, 42, "dhhhhhaaaagaahaagaaaaagaa", "length"),
        (0.0, 42, "deggjggadagddgaagcb", "eos"),
        (1.0, 42, "dh" + "a" * 23, "length"),
    ],
)
def test_sampled_text_is_calms(spec_model: Callable[[str], Path], min_p: float, seed: int, text: str, reason: str) -> None:
    with load(spec_model("T"), device="reference") as model:
        run = model.generate("d", max_tokens=24, temperature=1.0, min_p=min_p, seed=seed)
        assert "d" + "".join(token.text for token in run) == text
        assert (run.text, run.stop_reason) == (text[1:], reason)


def test_greedy_text_is_calms(spec_model: Callable[[str], Path]) -> None:
    with load(spec_model("A"), device="reference") as model:
        run = model.generate("dbe", max_tokens=3)
        assert [token.text for token in run] == ["g", "g", "g"]


# --- tokens and text -------------------------------------------------------------------------------------------------


def test_tokens_say_what_where_and_how_likely() -> None:
    model = fake_model(FakeEngine(says("hi", 2)))
    before = time.perf_counter()
    tokens = list(model.generate("ab"))
    assert [t.text for t in tokens] == ["h", "i", ""]
    assert [t.pos for t in tokens] == [2, 3, 4]
    assert [t.id for t in tokens] == [*ids_of("hi"), 1]
    expected = 5 - np.log(np.exp(5) + model.n_ids - 1)
    assert [t.logprob for t in tokens] == pytest.approx([expected] * 3, rel=1e-5)
    times = [before, *(t.time_s for t in tokens), time.perf_counter()]
    assert times == sorted(times)


def test_characters_of_several_tokens_come_out_whole() -> None:
    text = "철🙂a"
    run = fake_model(FakeEngine(says(text, 2))).generate("ab")
    pieces = [t.text for t in run]
    assert "".join(pieces) == run.text == text
    assert pieces.count("") == len("철🙂".encode()) - 2 + 1


def test_an_answer_cut_inside_a_character_shows_no_broken_one() -> None:
    run = fake_model(FakeEngine(says("a🙂", 2))).generate("ab", max_tokens=3)
    assert "".join(t.text for t in run) == run.text == "a"


def test_timings_leave_out_the_consumers_time() -> None:
    run = fake_model(FakeEngine(says("hello", 1))).generate("a")
    for _ in run:
        time.sleep(0.02)
    assert 0 < run.prefill_s < 0.02
    assert 0 < run.decode_s < 0.05
    assert run.tok_per_s == pytest.approx(5 / run.decode_s)


# --- stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("lo", "hel", "stop"),
        (["wor", "lo"], "hel", "stop"),
        (("o w",), "hell", "stop"),
        ("hello world", "", "stop"),
        ("ol", "hello world", "eos"),
        ("worldx", "hello world", "eos"),
        ("d", "hello worl", "stop"),
        ((), "hello world", "eos"),
    ],
)
def test_answers_end_before_a_stop_string(stop: Any, text: str, reason: str) -> None:
    """Row 28: one string is one stop string, found across token borders."""
    run = fake_model(FakeEngine(says("hello world", 2))).generate("ab", stop=stop)
    assert "".join(t.text for t in run) == text
    assert (run.text, run.stop_reason) == (text, reason)


def test_a_stop_string_inside_the_prompt_is_ignored() -> None:
    run = fake_model(FakeEngine(says("cd", 2))).generate("ab", stop=["ab", "bc"])
    list(run)
    assert run.text == "cd"


def test_text_that_may_begin_a_stop_string_is_held_back_then_shown() -> None:
    run = fake_model(FakeEngine(says("xabaabc", 1))).generate("z", stop="abc", max_tokens=6)
    assert [t.text for t in run] == ["x", "", "", "ab", "a", "ab"]
    assert run.stop_reason == "length"


def test_text_held_back_when_cancelled_is_in_the_answer() -> None:
    run = fake_model(FakeEngine(says("xab", 1))).generate("z", stop="abc")
    for _ in range(3):
        next(run)
    run.cancel()
    assert list(run) == []
    assert (run.text, run.stop_reason) == ("xab", "cancelled")


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
)
def test_stop_strings_are_found_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    watch, shown, met = StopText(stops), "", False
    for piece in pieces:
        text, met = watch.push(piece)
        shown += text
        if met:
            break
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert met == bool(found)
    if not found:
        assert shown + watch.flush() == whole
    else:
        # Which stop string is met first depends on where it ends, so the cut may only be at one of them.
        assert any(whole.startswith(shown + stop) for stop in stops)
        assert not any(stop in shown for stop in stops)


def test_a_control_tokens_text_stops_at_the_token() -> None:
    run = fake_model(FakeEngine(says("ab", 1, end=0))).generate("z", stop="<s>", stop_ids=())
    list(run)
    assert (run.text, run.stop_reason) == ("ab", "eos")


@pytest.mark.parametrize("end", [1, 2])
def test_every_end_of_turn_token_of_the_vocabulary_stops(end: int) -> None:
    """Row 21."""
    run = fake_model(FakeEngine(says("ab", 1, end=end))).generate("z")
    assert [t.id for t in run][-1] == end
    assert run.stop_reason == "eos"


def test_stop_ids_can_be_replaced_or_switched_off() -> None:
    model = fake_model(FakeEngine(says("abc", 1)))
    run = model.generate("z", stop_ids=ids_of("b"))
    list(run)
    assert (run.text, run.stop_reason) == ("a", "eos")
    run = model.generate("z", stop_ids=(), max_tokens=6)
    list(run)
    assert (run.text, run.stop_reason, len(run.token_ids)) == ("abc", "length", 6)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_max_tokens_counts_the_answer_only(n: int) -> None:
    run = fake_model(FakeEngine(says("hello", 2))).generate("ab", max_tokens=n)
    assert len(list(run)) == n
    assert run.stop_reason == "length"


@pytest.mark.parametrize(
    "kw",
    [
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": b"a"},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"stop_ids": [-1]},
        {"stop_ids": ["a"]},
        {"stop_ids": 10**9},
        {"temperature": -1.0},
        {"seed": "x"},
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(kw: dict[str, Any]) -> None:
    engine = FakeEngine()
    with pytest.raises(ConfigError, match=next(iter(kw)).split("_")[0]):
        fake_model(engine).generate("a", **kw)
    assert engine.log == []


def test_nan_logits_are_an_error_and_leave_the_model_usable() -> None:
    engine = FakeEngine()
    model = fake_model(engine)
    reply = engine.prefill
    engine.prefill = lambda *a, **k: reply(*a, **k) * np.float32(np.nan)  # type: ignore[method-assign]
    with pytest.raises(CalmnbError, match="nan"):
        next(model.generate("ab"))
    engine.prefill = reply  # type: ignore[method-assign]
    assert not model.is_busy
    assert len(list(model.generate("ab", max_tokens=2))) == 2


def test_rows_that_no_token_owns_are_never_chosen() -> None:
    """Row 10."""
    engine = FakeEngine(lambda cache: engine.config.vocab_size - 1)
    model = fake_model(engine)
    ids = [t.id for t in model.generate("a", max_tokens=20, temperature=5.0, min_p=0.0, seed=1)]
    assert max(ids) < model.tokenizer.vocab_size < engine.config.vocab_size


def test_the_same_seed_gives_the_same_answer() -> None:
    model = fake_model()
    runs = [[t.id for t in model.generate("a", max_tokens=20, temperature=9.0, min_p=0.0, seed=s)] for s in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_an_open_seed_can_be_read_back_and_used_again() -> None:
    model = fake_model()
    run = model.generate("a", max_tokens=20, temperature=9.0, min_p=0.0)
    again = model.generate("a", max_tokens=20, temperature=9.0, min_p=0.0, seed=run.seed)
    assert [t.id for t in run] == [t.id for t in again]


# --- the context -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 8])
def test_a_prompt_may_fill_the_context(n: int) -> None:
    """Row 26: the answer ends where no further token can be fed."""
    run = fake_model(FakeEngine(seq_len=8)).generate("a" * n)
    tokens = list(run)
    assert run.stop_reason == "context"
    assert len(tokens) == 8 - n + 1


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    engine = FakeEngine(seq_len=8)
    with pytest.raises(ContextError, match=r"9 tokens.*8"):
        fake_model(engine).generate("a" * 9)
    assert engine.log == []


def test_rolling_goes_on_past_the_context() -> None:
    engine = FakeEngine(seq_len=8, on_full="roll")
    run = fake_model(engine).generate("abc", max_tokens=30)
    assert len(list(run)) == 30
    assert run.stop_reason == "length"
    assert [pos for pos, _ in engine.log] == [0, *range(3, 32)]


def test_a_long_prompt_rolls_too() -> None:
    run = fake_model(FakeEngine(seq_len=8, on_full="roll")).generate("abcdefghijklmnop", max_tokens=3)
    assert len(list(run)) == 3


# --- reuse of the cache ----------------------------------------------------------------------------------------------


def fresh(prompt: list[int], n: int) -> list[int]:
    return [t.id for t in fake_model().generate(prompt, max_tokens=n)]


def test_only_what_is_new_in_a_prompt_is_computed() -> None:
    """Row 35: A, then A+B; then with the last token edited."""
    engine = FakeEngine()
    model = fake_model(engine)
    list(model.generate("hello", max_tokens=0))
    engine.log.clear()
    run = model.generate("hello world", max_tokens=0)
    list(run)
    assert engine.log == [(5, ids_of(" world"))]
    assert run.n_reused == 5
    engine.log.clear()
    list(model.generate("hello worlx", max_tokens=0))
    assert engine.log == [(10, ids_of("x"))]


def test_the_next_turn_reuses_the_answer() -> None:
    engine = FakeEngine()
    model = fake_model(engine)
    run = model.generate("hello", max_tokens=4)
    answer = [t.id for t in run]
    engine.log.clear()
    prompt = [*ids_of("hello"), *answer, *ids_of("next")]
    again = [t.id for t in model.generate(prompt, max_tokens=3)]
    assert engine.log[0] == (8, [answer[-1], *ids_of("next")])
    assert again == fresh(prompt, 3)


def test_the_same_prompt_again_computes_one_token_and_answers_the_same() -> None:
    """Row 39: a second run, then a longer one."""
    engine = FakeEngine()
    model = fake_model(engine)
    first = [t.id for t in model.generate("hello", max_tokens=5)]
    engine.log.clear()
    assert [t.id for t in model.generate("hello", max_tokens=5)] == first
    assert engine.log[0] == (4, ids_of("o"))
    assert [t.id for t in model.generate("hello hello", max_tokens=5)] == fresh(ids_of("hello hello"), 5)


@given(data=st.data())
def test_whatever_came_before_an_answer_is_that_of_a_fresh_model(data: st.DataObject) -> None:
    model = fake_model(FakeEngine(seq_len=24, on_full=data.draw(st.sampled_from(["stop", "roll"]))))
    for _ in range(data.draw(st.integers(1, 5))):
        prompt = data.draw(st.text("ab", min_size=1, max_size=20))
        taken = data.draw(st.integers(0, 12))
        with model.generate(prompt, max_tokens=12) as run:
            got = [t.id for t, _ in zip(run, range(taken), strict=False)]
        expected = [
            t.id for t in fake_model(FakeEngine(seq_len=24, on_full=model.engine.on_full)).generate(prompt, max_tokens=12)
        ]
        assert got == expected[: len(got)]


@pytest.mark.parametrize("on_full", ["stop", "roll"])
@pytest.mark.parametrize("at", [0, 1, 3, 9])
@pytest.mark.parametrize("error", [KeyboardInterrupt, CalmnbError])
def test_an_interrupt_leaves_the_model_usable_and_its_cache_right(error: type[BaseException], at: int, on_full: str) -> None:
    engine = FakeEngine(seq_len=10, on_full=on_full)
    model = fake_model(engine)
    calls = iter(range(100))

    def interrupt() -> None:
        if next(calls) == at:
            raise error

    engine.on_call = interrupt
    run = model.generate("abcd", max_tokens=20)
    if on_full == "stop" and at == 9:
        list(run)
        return
    with pytest.raises(error):
        list(run)
    assert not model.is_busy
    assert list(run) == []
    assert run.stop_reason == ("cancelled" if error is KeyboardInterrupt else None)
    engine.on_call = lambda: None
    for prompt in ("abcd", "abcx", "abcdef"):
        expected = [t.id for t in fake_model(FakeEngine(seq_len=10, on_full=on_full)).generate(prompt, max_tokens=12)]
        assert [t.id for t in model.generate(prompt, max_tokens=12)] == expected


def test_reset_forgets_what_is_cached() -> None:
    engine = FakeEngine()
    model = fake_model(engine)
    list(model.generate("hello", max_tokens=1))
    model.reset()
    engine.log.clear()
    list(model.generate("hello", max_tokens=1))
    assert engine.log[0] == (0, ids_of("hello"))


# --- stopping from outside -------------------------------------------------------------------------------------------


def test_long_prompts_are_fed_in_batches() -> None:
    """Row 25: one batch less, exactly, and one more."""
    for n in (3, 4, 5, 8, 9):
        engine = FakeEngine()
        model = fake_model(engine)
        model.prefill_chunk = 4
        first = next(model.generate("abcdefghijkl"[:n]))
        assert [len(ids) for _, ids in engine.log] == [4] * (n // 4) + ([n % 4] if n % 4 else [])
        assert first.id == fresh(ids_of("abcdefghijkl"[:n]), 1)[0]


def test_cancel_reaches_into_a_batch_of_an_engine_that_can_leave_it() -> None:
    class Patient(FakeEngine):
        should_stop: Callable[[], bool] | None = None

        def prefill(self, tokens: Sequence[int], pos: int = 0, *, all_logits: bool = False) -> NDArray[np.float32]:
            run.cancel()
            assert self.should_stop is not None
            if self.should_stop():
                raise PromptStopped
            return super().prefill(tokens, pos, all_logits=all_logits)

    engine = Patient()
    model = fake_model(engine)
    run = model.generate("a" * 40)
    assert list(run) == []
    assert run.stop_reason == "cancelled"
    assert engine.should_stop is None
    assert not model.is_busy
    assert model.prefix.ids == []


def test_cancel_ends_a_long_prompt_between_batches() -> None:
    engine = FakeEngine()
    model = fake_model(engine)
    model.prefill_chunk = 4
    run = model.generate("a" * 40)
    engine.on_call = lambda: run.cancel() if len(engine.log) == 2 else None
    assert list(run) == []
    assert (run.stop_reason, len(engine.log)) == ("cancelled", 3)
    assert not model.is_busy


def test_cancel_from_another_thread_ends_the_loop() -> None:
    engine = FakeEngine(seq_len=10**6)
    engine.on_call = lambda: time.sleep(0.001)
    run = fake_model(engine).generate("a", max_tokens=10**6)
    threading.Timer(0.1, run.cancel).start()
    began = time.perf_counter()
    assert len(list(run)) > 1
    assert run.stop_reason == "cancelled"
    assert time.perf_counter() - began < 5


def test_cancel_before_the_start_computes_nothing() -> None:
    engine = FakeEngine()
    run = fake_model(engine).generate("a")
    run.cancel()
    assert list(run) == []
    assert (run.stop_reason, engine.log) == ("cancelled", [])


def test_leaving_a_with_block_gives_the_model_back() -> None:
    model = fake_model()
    with model.generate("a") as run:
        next(run)
        assert model.is_busy
    assert not model.is_busy
    assert run.stop_reason == "cancelled"
    assert list(run) == []


def test_a_loop_left_with_break_gives_the_model_back() -> None:
    model = fake_model()
    for _ in model.generate("a"):
        break
    gc.collect()
    assert not model.is_busy


def test_the_last_token_gives_the_model_back_before_it_is_asked_for_more() -> None:
    model = fake_model()
    run = model.generate("a", max_tokens=1)
    next(run)
    assert not model.is_busy
    assert run.is_done


def test_close_is_idempotent_and_keeps_the_reason() -> None:
    run = fake_model(FakeEngine(says("a", 1))).generate("z")
    list(run)
    run.close()
    run.close()
    assert run.stop_reason == "eos"


# --- one at a time ---------------------------------------------------------------------------------------------------


def test_a_second_generation_is_refused_while_one_runs() -> None:
    """Row 27."""
    model = fake_model()
    first, second = model.generate("abc", max_tokens=3), model.generate("abd", max_tokens=3)
    next(first)
    with pytest.raises(BusyError, match="busy"):
        next(second)
    assert len(list(first)) == 2
    assert [t.id for t in second] == fresh(ids_of("abd"), 3)


def test_threads_that_generate_at_once_are_refused_or_right() -> None:
    engine = FakeEngine()
    engine.on_call = lambda: time.sleep(0.0005)
    model = fake_model(engine)
    expected = {p: fresh(ids_of(p), 8) for p in ("abc", "xyz", "abx")}
    wrong: list[Any] = []
    done: list[str] = []

    def work(prompt: str) -> None:
        for _ in range(20):
            try:
                if [t.id for t in model.generate(prompt, max_tokens=8)] != expected[prompt]:
                    wrong.append(prompt)
                done.append(prompt)
            except BusyError:
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(p,)) for p in expected]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert done


def test_stop_ends_whoever_has_the_model() -> None:
    model = fake_model()
    run = model.generate("abc")
    next(run)
    model.stop()
    assert not model.is_busy
    assert list(run) == []


# --- engines that choose tokens themselves ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kw",
    [
        {},
        {"temperature": 9.0, "min_p": 0.0, "seed": 5},
        {"temperature": 9.0, "min_p": 0.0, "seed": 5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.5},
        {"max_tokens": 1},
        {"max_tokens": 0},
        {"stop": "x"},
        {"stop_ids": ids_of("k")},
    ],
)
@pytest.mark.parametrize("on_full", ["stop", "roll"])
def test_an_engine_that_chooses_itself_gives_the_same_answer(kw: dict[str, Any], on_full: str) -> None:
    kw = {"max_tokens": 40, **kw}
    runs = []
    for kind in (FakeEngine, ChoosingEngine):
        engine = kind(seq_len=24, on_full=on_full)
        run = fake_model(engine).generate("abc", **kw)
        tokens = [(t.id, t.text, t.pos) for t in run]
        runs.append((tokens, run.text, run.stop_reason))
        assert getattr(engine, "n_open", 0) == 0
    assert runs[0] == runs[1]


def test_what_an_engine_cannot_choose_is_chosen_here(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_tokens": 12, "temperature": 9.0, "min_p": 0.0, "seed": 5}
    expected = [t.id for t in fake_model(FakeEngine()).generate("abc", **settings)]
    monkeypatch.setattr(ChoosingEngine, "chooses", lambda self, sampling: sampling.is_greedy)
    monkeypatch.setattr(ChoosingEngine, "decode_many", None)
    assert [t.id for t in fake_model(ChoosingEngine()).generate("abc", **settings)] == expected


@given(data=st.data())
def test_an_engine_that_ran_ahead_is_left_with_a_right_cache(data: st.DataObject) -> None:
    on_full = data.draw(st.sampled_from(["stop", "roll"]))
    engine = ChoosingEngine(seq_len=16, on_full=on_full)
    model = fake_model(engine)
    for _ in range(data.draw(st.integers(1, 4))):
        prompt = data.draw(st.text("ab", min_size=1, max_size=14))
        taken = data.draw(st.integers(0, 12))
        with model.generate(prompt, max_tokens=12) as run:
            got = [t.id for t, _ in zip(run, range(taken), strict=False)]
        expected = [t.id for t in fake_model(FakeEngine(seq_len=16, on_full=on_full)).generate(prompt, max_tokens=12)]
        assert got == expected[: len(got)]
        assert engine.n_open == 0


def test_an_interrupt_while_the_engine_chooses_leaves_the_model_usable() -> None:
    engine = ChoosingEngine()
    model = fake_model(engine)
    run = model.generate("abc")
    next(run)
    next(run)
    engine.on_call = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        list(run)
    engine.on_call = lambda: None
    assert (model.is_busy, engine.n_open) == (False, 0)
    assert [t.id for t in model.generate("abcd", max_tokens=5)] == fresh(ids_of("abcd"), 5)


# --- recording -------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.times: list[float] = []

    def add(self, *args: Any) -> None:
        del args

    def sampled(self, pos: int, token: int, start: float, end: float) -> None:
        self.rows.append((pos, token))
        self.times += [start, end]


def test_the_recorder_is_the_engines_during_the_run_and_hears_of_every_choice() -> None:
    engine = FakeEngine(says("hi", 2))
    model = fake_model(engine)
    mine, theirs = Recorder(), Recorder()
    engine.recorder = theirs
    run = model.generate("ab", recorder=mine)
    list(run)
    assert engine.recorders == [mine] * 3
    assert engine.recorder is theirs
    assert mine.rows == [(2, run.token_ids[0]), (3, run.token_ids[1]), (4, 1)]
    assert mine.times == sorted(mine.times)


@pytest.mark.parametrize("how", ["close", "interrupt"])
def test_the_recorder_is_taken_back_however_a_run_ends(how: str) -> None:
    engine = FakeEngine()
    run = fake_model(engine).generate("ab", recorder=Recorder())
    next(run)
    if how == "close":
        run.close()
    else:
        engine.on_call = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            next(run)
    assert engine.recorder is None
