"""Text to token ids and back, whatever kind of tokenizer a model carries.

Three back ends stand behind one class: Hugging Face ``tokenizers`` (`calmnb.tokenizer_hf`), SentencePiece
(`calmnb.tokenizer_sp`) and calm's byte strings with scores (`calmnb.tokenizer_calm`). They differ in how they cut text
into ids. Going back is the same for all, and lives here: every id is a byte string, and text is the UTF-8 decoding of
the joined bytes. A stream therefore never shows half a character, and all its pieces joined are exactly the decoding
of all its ids.
"""

from __future__ import annotations

import codecs
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from calmnb.errors import CalmnbError, ConfigError, FormatError

if TYPE_CHECKING:
    from calmnb.checkpoint import CalmFile

__all__ = ["StreamDecoder", "Tokenizer", "library_errors", "split_at", "tokenizer_for"]

SpaceRule = Literal["keep", "start", "after_bos"]


class Tokenizer(ABC):
    """One model's vocabulary.

    Attributes
    ----------
    vocab_size : int
        One more than the largest id. It may differ from the rows of the model's embedding, either way.
    bos_id, eos_id : int
        -1 means none.
    adds_bos : bool
        Whether the model expects `bos_id` before a text.
    specials : dict of str to int
        Control tokens by their text (``"<|im_end|>"``): matched as one id in text, invisible in answers.
    space_rule : {"keep", "start", "after_bos"}
        Which leading space decoding drops: none, one at the very start (SentencePiece's dummy prefix), or one right
        after `bos_id` (calm).
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    adds_bos: bool
    specials: dict[str, int]
    space_rule: SpaceRule = "keep"

    @abstractmethod
    def _encode(self, text: str, specials: bool) -> list[int]:
        """Ids of `text` without BOS."""

    @abstractmethod
    def _bytes_of(self, token: int) -> bytes:
        """Bytes of a token within range."""

    @abstractmethod
    def id_of(self, text: str) -> int | None:
        """Id of the token that is written `text` in the vocabulary, or None."""

    def encode(self, text: str, *, bos: bool | None = None, specials: bool = True) -> list[int]:
        """Cut `text` into token ids.

        Parameters
        ----------
        text : str
        bos : bool or None
            Whether to put `bos_id` first; None follows the model's own rule. It is never doubled: a text that begins
            with the BOS token's own text gets no second one. A model without BOS gets none.
        specials : bool
            Whether the text of a control token stands for that token. False encodes it as ordinary characters, which
            is what text from a stranger wants.

        Returns
        -------
        list of int

        Raises
        ------
        ConfigError
            If `text` is not a string, or holds a lone surrogate, which UTF-8 cannot express.
        FormatError
            If the tokenizer turns out to be damaged.
        """
        if not isinstance(text, str):
            raise ConfigError(f"encode: text is a {type(text).__name__}; accepted is a str")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"encode: character {error.start} of the text is the lone surrogate U+{ord(text[error.start]):04X}, which is "
                "not a character; decode the text's source with the right encoding"
            ) from None
        ids = self._encode(text, specials)
        wanted = self.adds_bos if bos is None else bos
        if wanted and self.bos_id >= 0 and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_specials: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Raises
        ------
        ConfigError
            If an id is outside the vocabulary.
        """
        stream = self.stream(skip_specials=skip_specials)
        return "".join([stream.push(token) for token in ids]) + stream.flush()

    def token_bytes(self, token: int) -> bytes:
        """Bytes that one token stands for; for a control token, its name.

        Raises
        ------
        ConfigError
            If the id is outside the vocabulary.
        """
        token = operator.index(token)
        if not 0 <= token < self.vocab_size:
            raise ConfigError(f"token {token} is outside the tokenizer's {self.vocab_size} ids (0 to {self.vocab_size - 1})")
        return self._bytes_of(token)

    def is_special(self, token: int) -> bool:
        """Whether `token` is a control token."""
        return token in self._special_ids

    def stream(self, skip_specials: bool = True, *, at_start: bool = True) -> StreamDecoder:
        """Return a decoder that takes ids one by one.

        Parameters
        ----------
        skip_specials : bool
            Whether control tokens are left out.
        at_start : bool
            Whether a text begins here, so that a dummy leading space is dropped; False when the ids continue a text.
        """
        return StreamDecoder(self, skip_specials=skip_specials, at_start=at_start)

    @property
    def _special_ids(self) -> frozenset[int]:
        cached: frozenset[int] | None = self.__dict__.get("_special_id_set")
        if cached is None:
            cached = self.__dict__["_special_id_set"] = frozenset(self.specials.values())
        return cached


class StreamDecoder:
    """Decodes ids as they come, holding back bytes until they complete a character.

    Parameters
    ----------
    tokenizer : Tokenizer
    skip_specials, at_start : bool
        See `Tokenizer.stream`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_specials: bool, at_start: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_specials
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = at_start and tokenizer.space_rule == "start"

    def push(self, token: int) -> str:
        """Add one id and return the text it completes, possibly empty."""
        piece = self._tokenizer.token_bytes(token)
        special = self._tokenizer.is_special(token)
        if special and self._skip:
            piece = b""
        elif self._drop_space and piece:
            piece = piece.removeprefix(b" ")
            self._drop_space = False
        if self._tokenizer.space_rule == "after_bos":
            self._drop_space = token == self._tokenizer.bos_id
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """End the text: bytes still held back, part of a character that never came, become U+FFFD."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def split_at(text: str, pattern: re.Pattern[str] | None, tokens: Mapping[str, int]) -> list[str | int]:
    """Cut `text` at every match of `pattern`: strings between, ids (from `tokens`) for the matches; no empty strings."""
    if pattern is None:
        return [text] if text else []
    parts: list[str | int] = []
    end = 0
    for match in pattern.finditer(text):
        if match.start() > end:
            parts.append(text[end : match.start()])
        parts.append(tokens[match.group()])
        end = match.end()
    if end < len(text):
        parts.append(text[end:])
    return parts


def any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Pattern that matches any of `texts`, longer ones first; None when there are none."""
    ordered = sorted((t for t in texts if t), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


@contextmanager
def library_errors(problem: str, remedy: str) -> Iterator[None]:
    """Turn whatever the ``tokenizers`` library raises in the block into a `FormatError`: "problem (error); remedy".

    It raises bare Exception, and panics, which are no Exception, on files it does not check.
    """
    try:
        yield
    except (CalmnbError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise FormatError(f"{problem} ({error}); {remedy}") from error


def tokenizer_for(file: CalmFile) -> Tokenizer:
    """Return the best tokenizer that `file` carries: tokenizer.json, else tokenizer.model, else calm's byte strings.

    Raises
    ------
    FormatError
        If it carries none, or a damaged one.
    """
    config, settings = file.config, file.settings
    adds_bos = settings.get("add_bos_token")
    rule = adds_bos if isinstance(adds_bos, bool) else None
    if "tokenizer.json" in file.extras:
        from calmnb.tokenizer_hf import HfTokenizer

        return HfTokenizer(file.extras["tokenizer.json"], bos_id=config.bos_token_id, eos_id=config.eos_token_id, adds_bos=rule)
    if "tokenizer.model" in file.extras:
        from calmnb.tokenizer_sp import SpTokenizer

        texts = [piece.decode("utf-8", errors="replace") for piece in file.token_bytes]
        return SpTokenizer(
            file.extras["tokenizer.model"],
            bos_id=config.bos_token_id,
            eos_id=config.eos_token_id,
            adds_bos=rule,
            added=texts,
        )
    if file.token_bytes:
        from calmnb.tokenizer_calm import CalmTokenizer

        return CalmTokenizer(file.token_bytes, file.token_scores, bos_id=config.bos_token_id, eos_id=config.eos_token_id)
    raise FormatError(
        f"{file.path} carries no tokenizer, so text cannot be encoded; convert the model again from a folder with "
        "tokenizer.json or tokenizer.model, or pass token ids to an engine directly"
    )
