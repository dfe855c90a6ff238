"""Loading a model, and the three kinds of prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calmnb.errors import ConfigError, FormatError, TemplateError
from calmnb.model import Model, load
from calmnb.perplexity import perplexity
from calmnb.sampler import Sampling
from tests.unit.fakes import VOCAB, FakeEngine, fake_model, ids_of, letters, says

HI = [{"role": "user", "content": "hi"}]


def test_load_gives_a_model_that_closes(spec_model: Callable[[str], Path]) -> None:
    with load(spec_model("A"), device="reference", seq_len=16) as model:
        assert (model.engine.seq_len, model.config.vocab_size, model.path.name) == (16, 12, "A.calm")
        assert "A.calm" in repr(model)
    assert "closed" in repr(model)
    with pytest.raises(ConfigError, match="closed"):
        model.generate("a")


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.calm"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(FormatError):
        load(path)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("use", [lambda m: list(m.generate("a", max_tokens=1)), lambda m: perplexity(m, "abc", window=4)])
def test_a_file_that_was_cut_while_open_is_an_error_and_no_crash(
    spec_model: Callable[[str], Path], tmp_path: Path, device: Any, use: Callable[[Model], Any]
) -> None:
    path = tmp_path / "cut.calm"
    path.write_bytes(data := spec_model("A").read_bytes())
    with load(path, device=device, seq_len=16, threads=1 if device == "cpu" else None) as model:
        path.open("wb").close()
        with pytest.raises(FormatError, match=r"cut\.calm became shorter while it was open.*Load it again"):
            use(model)
        assert not model.is_busy
        path.write_bytes(data)
        use(model)


def test_a_text_is_encoded_as_it_stands() -> None:
    assert fake_model().encode_prompt("a</s>b") == [*ids_of("a"), 1, *ids_of("b")]


def test_a_text_gets_bos_by_the_models_rule() -> None:
    assert fake_model(tokenizer=letters(bos=True)).encode_prompt("a") == [0, *ids_of("a")]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_ids_are_taken_as_they_are(kind: Callable[[Any], Any]) -> None:
    assert fake_model().encode_prompt(kind([5, 6, VOCAB - 1])) == [5, 6, VOCAB - 1]


def test_messages_go_through_the_template() -> None:
    model = fake_model(template="[{{ messages[0].content }}]")
    assert model.encode_prompt(HI) == ids_of("[hi]")


def test_bos_of_a_template_is_not_doubled() -> None:
    """Row 22."""
    model = fake_model(template="{{ bos_token }}{{ messages[0].content }}", tokenizer=letters(bos=True))
    assert model.encode_prompt(HI) == [0, *ids_of("hi")]


def test_an_empty_text_starts_from_bos_where_there_is_one() -> None:
    assert fake_model(tokenizer=letters(bos=True)).encode_prompt("") == [0]
    with pytest.raises(ConfigError, match="empty"):
        fake_model().encode_prompt("")


def test_no_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        fake_model().generate([])


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_ids_without_a_row_are_refused(bad: int) -> None:
    """Row 38."""
    with pytest.raises(ConfigError, match=str(bad)):
        fake_model().generate([5, bad])


def test_a_tokenizer_with_more_ids_than_rows_cannot_overrun_them() -> None:
    model = fake_model(FakeEngine(vocab=200))
    assert model.n_ids == 200
    with pytest.raises(ConfigError, match="200 embedding rows"):
        model.generate("a")


@pytest.mark.parametrize(
    ("path", "kind"), [(None, ConfigError), (3, ConfigError), (b"a.calm", ConfigError), ("a\0b", FormatError)]
)
def test_what_is_no_path_is_refused(path: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"accepted is|give the path"):
        load(path)


@pytest.mark.parametrize("bad", [3, ["a"], [1.5], None, b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_other_prompts_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        fake_model().generate(bad)


def test_ids_that_lack_an_expected_bos_get_a_warning() -> None:
    """Row 34."""
    model = fake_model(tokenizer=letters(bos=True))
    with pytest.warns(UserWarning, match="BOS"):
        model.encode_prompt([5])
    assert model.encode_prompt([0, 5]) == [0, 5]


def test_a_templates_refusal_reaches_the_caller() -> None:
    with pytest.raises(TemplateError, match="no system"):
        fake_model(template="{{ raise_exception('no system role') }}").generate(HI)


def test_arguments_override_the_sampling_they_come_with() -> None:
    model = fake_model()
    base = Sampling(temperature=9.0, min_p=0.0, seed=3)
    runs = [
        [t.id for t in model.generate("a", max_tokens=12, sampling=base)],
        [t.id for t in model.generate("a", max_tokens=12, temperature=9.0, min_p=0.0, seed=3)],
        [t.id for t in model.generate("a", max_tokens=12, sampling=base, temperature=0.0)],
    ]
    assert runs[0] == runs[1] != runs[2]
    assert runs[2] == [t.id for t in model.generate("a", max_tokens=12)]


def test_a_sampling_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="accepted is a Sampling"):
        fake_model().generate("a", sampling={"temperature": 1})  # type: ignore[arg-type]


def test_default_stop_ids_are_the_files_and_the_vocabularys() -> None:
    assert fake_model(tokenizer=letters(bos=True)).stop_ids == (1, 0, 2)


def test_closing_a_model_ends_what_runs() -> None:
    engine = FakeEngine(says("abc", 1))
    model = fake_model(engine)
    run = model.generate("z")
    next(run)
    model.close()
    model.close()
    assert engine.is_closed
    assert list(run) == []


def test_an_exclusive_user_keeps_others_out() -> None:
    model = fake_model()
    with model.exclusive("test"):
        assert model.is_busy
    assert not model.is_busy
