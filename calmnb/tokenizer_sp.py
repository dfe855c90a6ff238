"""The SentencePiece back end: a tokenizer.model, and the tokens a fine-tune added past its end."""

from __future__ import annotations

from collections.abc import Sequence

import sentencepiece

from calmnb.errors import FormatError
from calmnb.tokenizer import Tokenizer, any_of, split_at

__all__ = ["SpTokenizer"]


class SpTokenizer(Tokenizer):
    """A SentencePiece model.

    Control tokens (``<s>``) and added tokens in a text are matched first, longest first; what stands between them goes
    to SentencePiece piece by piece, so each stretch gets the model's dummy leading space, as Llama-2's chats were made.

    Parameters
    ----------
    source : bytes
        Content of tokenizer.model.
    bos_id, eos_id : int
        From the model's configuration; -1 means none.
    adds_bos : bool or None
        Whether texts begin with BOS; None means yes if there is one, which is SentencePiece models' custom.
    added : sequence of str
        Text of every id from 0; those past the end of the SentencePiece model are its added tokens. Empty ones are
        unused ids.

    Raises
    ------
    FormatError
        If the content is not a SentencePiece model.
    """

    def __init__(
        self, source: bytes, *, bos_id: int = -1, eos_id: int = -1, adds_bos: bool | None = None, added: Sequence[str] = ()
    ) -> None:
        sp = sentencepiece.SentencePieceProcessor()
        try:
            if not source or not sp.LoadFromSerializedProto(source):
                raise RuntimeError("it is empty or damaged")
        except RuntimeError as error:
            raise FormatError(
                f"tokenizer.model cannot be read: {error}; convert the model again from an undamaged source"
            ) from error
        self._sp = sp
        n = sp.GetPieceSize()
        self._added = {i: text for i, text in enumerate(added) if i >= n and text}
        self.vocab_size = max(self._added, default=n - 1) + 1
        self.specials = {sp.IdToPiece(i): i for i in range(n) if sp.IsControl(i) or sp.IsUnknown(i)}
        self.specials.update({text: i for i, text in self._added.items()})
        self._pattern = any_of(self.specials)
        self.bos_id, self.eos_id = bos_id, eos_id
        self.adds_bos = bos_id >= 0 if adds_bos is None else adds_bos
        first = sp.EncodeAsPieces("a")[:1]
        self.space_rule = "start" if first and first[0].startswith("\u2581") else "keep"

    def _encode(self, text: str, specials: bool) -> list[int]:
        ids: list[int] = []
        for part in split_at(text, self._pattern if specials else None, self.specials):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._sp.EncodeAsIds(part))
        return ids

    def id_of(self, text: str) -> int | None:
        """Id of the piece that is written `text`, or None."""
        if text in self.specials:
            return self.specials[text]
        found = int(self._sp.PieceToId(text))
        return found if self._sp.IdToPiece(found) == text else None

    def _bytes_of(self, token: int) -> bytes:
        if token >= self._sp.GetPieceSize():
            return self._added.get(token, "").encode("utf-8")
        piece: str = self._sp.IdToPiece(token)
        if self._sp.IsByte(token):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode("utf-8")
