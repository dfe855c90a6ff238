"""A model ready to use: file, engine, tokenizer and chat template behind one object.

::

    model = calmnb.load("smollm2.calm")
    for token in model.generate([{"role": "user", "content": "Hello"}]):
        print(token.text, end="")
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from calmnb.config import KvDtype, ModelConfig
from calmnb.engine.base import Engine, FullPolicy, Recorder
from calmnb.errors import BusyError, ConfigError
from calmnb.generate import Generation, checked_stops
from calmnb.prefix import CachedPrefix
from calmnb.sampler import Sampling
from calmnb.tokenizer import Tokenizer, tokenizer_for

if TYPE_CHECKING:
    from calmnb.chat import ChatTemplate
    from calmnb.checkpoint import CalmFile

__all__ = ["END_OF_TURN", "Model", "Prompt", "load"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

#: Control tokens that end a turn wherever a vocabulary has them, because older files name only one stop id.
END_OF_TURN = (
    "<|eot_id|>",
    "<|end|>",
    "<|im_end|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|END_OF_TURN_TOKEN|>",
    "<|endoftext|>",
    "<|end_of_text|>",
)


def load(
    path: str | os.PathLike[str],
    *,
    device: Literal["auto", "cpu", "cuda", "reference"] = "auto",
    seq_len: int | None = None,
    kv_dtype: KvDtype = "fp16",
    on_full: FullPolicy = "stop",
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Model:
    """Open a `.calm` file and make it ready to generate.

    Parameters
    ----------
    path
        The file; `calmnb.convert` makes one.
    device, seq_len, kv_dtype, on_full, threads, progress
        See `calmnb.engine.open_engine`.

    Returns
    -------
    Model
        A context manager; closing it frees the engine and the file.

    Raises
    ------
    FormatError, TensorError, UnsupportedError
        If the file cannot be used.
    ConfigError, DeviceError
        If the engine cannot be opened as asked.
    """
    from calmnb.chat import template_for
    from calmnb.checkpoint import open_calm
    from calmnb.engine import open_engine

    file = open_calm(path)
    try:
        tokenizer = tokenizer_for(file)
        template = template_for(file, tokenizer)
        engine = open_engine(
            file.weights,
            device=device,
            seq_len=seq_len,
            kv_dtype=kv_dtype,
            on_full=on_full,
            threads=threads,
            progress=progress,
        )
    except BaseException:
        file.close()
        raise
    model = Model(file, engine, tokenizer, template)
    if engine.info.engine != "cuda":  # that one has copied the weights
        model._check_file = file.check_length
    return model


class Model:
    """Generates text with one engine, one sequence at a time. Made by `load`.

    Attributes
    ----------
    path : Path
    file : CalmFile
    config : ModelConfig
    tokenizer : Tokenizer
    template : ChatTemplate
    engine : Engine
    prefix : CachedPrefix
        What the engine's KV cache holds.
    n_ids : int
        Ids that may be chosen: ``min(tokenizer.vocab_size, config.vocab_size)``.
    stop_ids : tuple of int
        Ids that end an answer unless `generate` is told otherwise: the file's, BOS, and the usual end-of-turn tokens.
    prefill_chunk : int
        Prompt tokens computed together. A cancelled generation stops between two batches, or within one where the engine
        can.
    """

    def __init__(self, file: CalmFile, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.path: Path = file.path
        self.file = file
        self.config: ModelConfig = file.config
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.prefix = CachedPrefix(engine)
        self.n_ids = min(tokenizer.vocab_size, self.config.vocab_size)
        named = [tokenizer.specials[text] for text in END_OF_TURN if text in tokenizer.specials]
        ids = [*self.config.stop_ids, self.config.eos_token_id, tokenizer.bos_id, *named]
        self.stop_ids = tuple(dict.fromkeys(i for i in ids if i >= 0))
        self.prefill_chunk = _prefill_chunk(file.n_params, engine)
        self._guard = threading.RLock()  # re-entrant: collecting garbage may end a generation anywhere
        self._owner: Callable[[], object | None] = _nobody
        self._check_file: Callable[[], None] = _nobody  # that the engine may read the mapped file
        self._closed = False

    # -- generating ---------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        repetition_range: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_ids: int | Iterable[int] | None = None,
        recorder: Recorder | None = None,
        sampling: Sampling | None = None,
    ) -> Generation:
        """Answer a prompt, token by token.

        Nothing is computed before the first token is asked for. The keys and values that the prompt shares with the
        sequence before are reused.

        Parameters
        ----------
        prompt : str, sequence of int, or sequence of {"role": ..., "content": ...}
            A text to continue, token ids, or a conversation for the model's chat template.
        max_tokens : int
            Tokens to choose at most, >= 0. With 0 only the prompt is computed.
        temperature, top_k, top_p, min_p, repetition_penalty, repetition_range, seed
            See `calmnb.sampler.Sampling`; each left out, or None, takes the value of `sampling`, or else Sampling's default.
        stop : str or sequence of str
            The answer ends before the first of these texts to appear in it. A plain str is one stop string. What the
            prompt holds does not count. A control token's text ("<|im_end|>") stops at that token.
        stop_ids : int, iterable of int, or None
            Ids that end the answer; None means `stop_ids` of the model, ``()`` none.
        recorder : Recorder, optional
            Receives every step's times.
        sampling : Sampling, optional

        Returns
        -------
        Generation
            An iterator over `Token`.

        Raises
        ------
        ConfigError
            For an empty prompt, or an argument outside its range.
        TemplateError
            If the chat template refuses the messages.
        ContextError
            If the prompt does not fit in the context.
        """
        if self._closed:
            raise ConfigError(f"the model {self.path.name} was closed; load it again")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, (int, np.integer)) or max_tokens < 0:
            raise ConfigError(f"max_tokens is {max_tokens!r}; accepted is an integer >= 0")
        given: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "repetition_range": repetition_range,
            "seed": seed,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        base = sampling if sampling is not None else Sampling()
        if not isinstance(base, Sampling):
            raise ConfigError(
                f"sampling is {_shortened(base)}; accepted is a Sampling, as in sampling=Sampling(temperature=1.0)"
            )
        stops = checked_stops(stop)
        named = {self.tokenizer.specials[text] for text in stops if text in self.tokenizer.specials}
        ids = self.encode_prompt(prompt)
        self.prefix.check_length(len(ids))
        continues = not _is_chat(prompt) and not all(self.tokenizer.is_special(i) for i in ids)
        return Generation(
            self,
            ids,
            sampling=dataclasses.replace(base, **changes),
            max_tokens=int(max_tokens),
            stop=stops,
            stop_ids=frozenset(named.union(self._checked_stop_ids(stop_ids))),
            recorder=recorder,
            at_start=not continues,
        )

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; see `generate` for what a prompt may be.

        Raises
        ------
        ConfigError
            If it is empty, or holds ids outside the vocabulary.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            what = "the prompt is an empty text, and this model has no BOS token to start from"
        elif _is_chat(prompt):
            ids = self.template.encode(prompt)  # type: ignore[arg-type]
            what = "the chat template made no tokens of the messages"
        else:
            ids = self._checked_ids(prompt)
            what = "the prompt holds no tokens"
        if not ids:
            raise ConfigError(f"{what}; give it some text")
        if max(ids) >= self.config.vocab_size:
            raise ConfigError(
                f"token {max(ids)} of the prompt is outside the model's {self.config.vocab_size} embedding rows: the tokenizer "
                "does not belong to this model, or has tokens added that the model was not trained with"
            )
        return ids

    def _checked_ids(self, prompt: Sequence[Any]) -> list[int]:
        try:
            ids = token_ids(prompt)
        except TypeError:
            raise ConfigError(
                f"the prompt is {_shortened(prompt)}; accepted are a str, a sequence of token ids, or a sequence of messages "
                '{"role": ..., "content": ...}'
            ) from None
        bad = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if bad:
            raise ConfigError(f"token {bad[0]} of the prompt is outside the vocabulary (0 to {self.config.vocab_size - 1})")
        tokenizer = self.tokenizer
        if ids and tokenizer.adds_bos and tokenizer.bos_id >= 0 and ids[0] != tokenizer.bos_id:
            warnings.warn(
                f"the prompt's ids do not begin with BOS ({tokenizer.bos_id}), which this model expects; "
                "tokenizer.encode() adds it",
                UserWarning,
                stacklevel=4,
            )
        return ids

    def _checked_stop_ids(self, stop_ids: int | Iterable[int] | None) -> tuple[int, ...]:
        if stop_ids is None:
            return self.stop_ids
        try:
            ids = (stop_ids,) if isinstance(stop_ids, int) else tuple(operator.index(i) for i in stop_ids)
        except TypeError:
            raise ConfigError(f"stop_ids is {stop_ids!r}; accepted are token ids or None") from None
        bad = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if bad:
            raise ConfigError(f"stop id {bad[0]} is outside the vocabulary (0 to {self.config.vocab_size - 1})")
        return ids

    # -- who has the model --------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a generation has the model: begun, and neither ended nor closed."""
        return self._owner() is not None

    def acquire(self, owner: object) -> None:
        """Reserve the model for `owner` (held weakly).

        Raises
        ------
        BusyError
            If someone else has it.
        FormatError
            If the engine reads its file, and that became shorter: touching what is gone would end the process.
        """
        with self._guard:
            current = self._owner()
            if current is not None and current is not owner:
                raise BusyError(
                    f"the model {self.path.name} is busy ({current!r}); one model computes one sequence at a time. Wait "
                    "for it, close() the generation that has it, call stop() on the model, or load the file a second time"
                )
            self._check_file()
            self._owner = weakref.ref(owner)

    def release(self, owner: object) -> None:
        """Give the model back; does nothing if `owner` does not have it."""
        with self._guard:
            if self._owner() is owner:
                self._owner = _nobody

    @contextlib.contextmanager
    def exclusive(self, what: str) -> Iterator[None]:
        """Reserve the model for the length of a ``with`` statement; `what` is shown to those refused meanwhile."""
        owner = _Owner(what)
        self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    def stop(self) -> None:
        """End the generation that has the model, if any, whoever started it."""
        owner = self._owner()
        if isinstance(owner, Generation):
            owner.close()

    def reset(self) -> None:
        """Forget the cached sequence, so that the next prompt is computed from its first token.

        Raises
        ------
        BusyError
            If a generation is running.
        """
        with self.exclusive("reset"):
            self.prefix.forget()

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End what is running and free the engine and the file. Idempotent."""
        if self._closed:
            return
        self.stop()
        self._closed = True
        self.engine.close()
        self.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        c, e = self.config, self.engine
        state = "closed" if self._closed else f"{e.info.engine} on {e.info.device}, context {e.seq_len}, {e.kv_dtype} KV"
        return f"<Model {self.path.name}: {c.arch} {c.dtype}, {state}>"


class _Owner:
    def __init__(self, what: str) -> None:
        self._what = what

    def __repr__(self) -> str:
        return f"<{self._what}>"


def _nobody() -> None:
    return None


def token_ids(ids: Any) -> list[int]:
    """Plain integers of `ids`; a TypeError if they are none, or are bytes: those are a text, though they iterate as numbers."""
    if isinstance(ids, bytes | bytearray | memoryview):
        raise TypeError(f"{type(ids).__name__} are no token ids")
    return [operator.index(i) for i in ids]


def _prefill_chunk(n_params: int, engine: Engine) -> int:
    """Prompt tokens to compute between two looks at the cancel flag.

    Engines that look at it themselves, and GPUs, take long batches. Elsewhere 64 tokens of a 135M model take about 0.15 s,
    and Stop shall act within 0.2 s. A fixed rule, not a measured one: batches of another size round differently, and answers
    shall not depend on how busy the machine was.
    """
    if engine.info.engine == "cuda" or hasattr(engine, "should_stop"):
        return 512
    size = 64 * 150_000_000 // max(n_params, 1)
    return min(max(1 << max(size, 1).bit_length() - 1, 8), 128)


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
