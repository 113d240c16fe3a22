"""The rule of where a completion ends: the same for every sampler, whatever the engine behind it noticed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from calibadv_jax.core.files import read_json

REPLACEMENT = "\ufffd"  # what decoding shows for a token that is only a part of a character


class StopRule:
    """A completion ends at the token that completes a stop string, or at an end-of-text token.

    Attributes:
        tokenizer: decodes tokens; a HuggingFace tokenizer, or an object with its `decode` and `get_vocab`.
        end_ids: the end-of-text token ids.
    """

    def __init__(self, tokenizer: Any, end_ids: int | Iterable[int]):
        """Make the rule of a tokenizer.

        Args:
            tokenizer: see the attribute.
            end_ids: one end-of-text token id, or several.
        """
        self.tokenizer = tokenizer
        self.end_ids = frozenset([end_ids] if isinstance(end_ids, int) else end_ids)

    @property
    def num_ids(self) -> int:
        """One more than the tokenizer's highest token id; it has fewer tokens if ids are left out."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def find(self, tokens: Sequence[int], stop: Sequence[str]) -> tuple[int, Literal["stop", "eos"]] | None:
        """Return where and why a completion ends.

        Args:
            tokens: token ids of the completion so far, and possibly tokens that follow its end.
            stop: the stop strings.

        Returns:
            The number of tokens up to the end, which it includes, and the reason: "stop" for a stop string,
            "eos" for an end-of-text token. None if the completion goes on.
        """
        end = self._first_end_of_text(tokens)
        if end is not None:
            tokens = tokens[:end]
        if self._is_complete(tokens, stop):
            if not self._is_complete(tokens[:-1], stop):
                # The usual case: the sampler stopped at the token that completes the stop string.
                return len(tokens), "stop"
            lengths = range(len(tokens))
            count = bisect_left(lengths, True, key=lambda length: self._is_complete(tokens[:length], stop))
            return count, "stop"
        if end is not None:
            return end + 1, "eos"
        return None

    def remainders(self, tokens: Sequence[int], stop: Sequence[str]) -> list[str]:
        """Return the missing part of each stop string whose beginning ends the tokens.

        Args:
            tokens: token ids of a completion that was cut.
            stop: the stop strings.

        Returns:
            The parts, the longest of each stop string first; empty if no stop string has begun.
        """
        text = self.text(tokens)
        missing_parts = []
        for string in stop:
            for length in range(1, len(string)):
                if text.endswith(string[:length]):
                    missing_parts.append(string[length:])
        return missing_parts

    def may_end(self, token: int, stop: Sequence[str]) -> bool:
        """Return whether a completion can end at this token.

        Args:
            token: a token id.
            stop: the stop strings.

        Returns:
            True for an end-of-text token, and for one that holds a stop string or can complete it.
        """
        text = self.text([token])
        if token in self.end_ids:
            return True
        is_part_of_character = REPLACEMENT in text  # it may complete any character that is not ASCII
        for string in stop:
            if string in text or text.startswith(_ends(string)):
                return True
            if is_part_of_character and not string.isascii():
                return True
        return False

    def text(self, tokens: Sequence[int]) -> str:
        """Decode token ids with every token shown, as the agent loop reads them.

        Args:
            tokens: token ids; an incomplete character at either end is allowed.

        Returns:
            The text, special tokens included; REPLACEMENT stands for the part of a character.
        """
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _first_end_of_text(self, tokens: Sequence[int]) -> int | None:
        for index, token in enumerate(tokens):
            if token in self.end_ids:
                return index
        return None

    def _is_complete(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Return whether the text of the tokens holds a stop string."""
        if not stop:
            return False
        text = self.text(tokens)
        return any(string in text for string in stop)


@cache
def _ends(stop: str) -> tuple[str, ...]:
    """Return every proper suffix of a stop string."""
    return tuple(stop[start:] for start in range(1, len(stop)))


def end_of_text_ids(folder: str | Path, hf_config: dict[str, Any], tokenizer: Any) -> int | list[int]:
    """Return every end-of-text token of config, generation config and tokenizer.

    Args:
        folder: a HuggingFace folder, whose generation_config.json is read if it exists; "": none.
        hf_config: fields of config.json.
        tokenizer: a HuggingFace tokenizer.

    Returns:
        The id if there is one only, else all ids, ascending.

    Raises:
        UserError: generation_config.json is not a JSON object.
    """
    path = Path(folder) / "generation_config.json"
    generation_config: dict[str, Any] = {}
    if folder and path.is_file():
        generation_config = read_json(path, "fix or remove it")
    end_ids: set[int] = {tokenizer.eos_token_id}
    for source in (hf_config, generation_config):
        ids = source.get("eos_token_id")
        if isinstance(ids, int):
            end_ids.add(ids)
        elif ids:
            end_ids.update(ids)
    # An id that the policy cannot sample ends nothing, and vLLM would refuse it.
    vocab_size = hf_config.get("vocab_size", len(tokenizer))
    ids = sorted(token for token in end_ids if token < vocab_size)
    return ids[0] if len(ids) == 1 else ids
