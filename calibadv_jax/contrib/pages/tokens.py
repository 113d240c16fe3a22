"""The text of each token, for a page that shows them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from calibadv_jax.core.errors import UserError

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
_LONGEST_CHARACTER = 4  # bytes of UTF-8, each of which may be a token of its own


class Pieces:
    """Cuts the text of token ids into one piece a token.

    Args:
        folder: with the tokenizer.json of the policy.

    Raises:
        UserError: no such file, or it cannot be loaded.
    """

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{path}: no such file; the page needs the run's tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{path}: no tokenizer can be loaded ({' '.join(str(error).split())})") from error

    def text(self, ids: Sequence[int]) -> str:
        """Text of `ids` with special tokens shown."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One piece a token; together they are `text(ids)`.

        A character that several tokens make belongs to the last of them; the others are empty.
        """
        whole = self.text(ids)
        alone = self._tokenizer.decode_batch([[one] for one in ids], skip_special_tokens=False)
        return alone if "".join(alone) == whole else self._in_context(list(ids), whole)

    def _in_context(self, ids: list[int], whole: str) -> list[str]:
        """As TGI and vLLM stream text: a token's piece is what it adds to the text of the few before it."""
        pieces: list[str] = []
        known, end = 0, 0  # ids[known:end] has been shown, and ids[known:] is decoded together
        for place in range(len(ids)):
            before = self.text(ids[known:end])
            after = self.text(ids[known : place + 1])
            is_open = after.endswith(_REPLACEMENT) and place + 1 - end < _LONGEST_CHARACTER
            if is_open or len(after) <= len(before):
                pieces.append("")
                continue
            pieces.append(after[len(before) :])
            known, end = end, place + 1
        return pieces if "".join(pieces) == whole else _cut(whole, pieces)


def _cut(whole: str, pieces: Sequence[str]) -> list[str]:
    """`whole` in pieces of the same lengths, the rest in the last: where a decoder looks further back."""
    cut: list[str] = []
    start = 0
    for piece in pieces:
        cut.append(whole[start : start + len(piece)])
        start += len(piece)
    return [*cut[:-1], cut[-1] + whole[start:]]
