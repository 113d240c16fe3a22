"""The rule of where a completion ends: the same for every sampler, whatever the engine behind it noticed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from calibadv_jax.core.files import read_json


class StopRule:
    """A completion ends at the token that completes a stop string, or at an end-of-text token (`end_ids`)."""

    def __init__(self, tokenizer: Any, end_ids: int | Iterable[int]):
        self.tokenizer = tokenizer
        self.end_ids = frozenset([end_ids] if isinstance(end_ids, int) else end_ids)

    def find(self, tokens: Sequence[int], stop: Sequence[str]) -> tuple[int, Literal["stop", "eos"]] | None:
        """Return (number of tokens up to the end of the completion, reason); None if it goes on."""
        end = next((index for index, token in enumerate(tokens) if token in self.end_ids), None)
        tokens = tokens if end is None else tokens[:end]
        if self._is_complete(tokens, stop):
            if not self._is_complete(tokens[:-1], stop):  # as a sampler that stops at once has it
                return len(tokens), "stop"
            counts = range(len(tokens))
            return bisect_left(counts, True, key=lambda n: self._is_complete(tokens[:n], stop)), "stop"
        return None if end is None else (end + 1, "eos")

    def remainders(self, tokens: Sequence[int], stop: Sequence[str]) -> list[str]:
        """Return the missing part of each stop string whose beginning ends the tokens."""
        text = self.text(tokens)
        parts = [(string[:length], string[length:]) for string in stop for length in range(1, len(string))]
        return [missing for part, missing in parts if text.endswith(part)]

    def may_end(self, token: int, stop: Sequence[str]) -> bool:
        """Return whether a completion can end at this token, which holds or ends a stop string."""
        text = self.text([token])
        is_part = "\ufffd" in text  # of a character: it may complete any that is not ASCII
        return token in self.end_ids or any(
            string in text or text.startswith(_ends(string)) or (is_part and not string.isascii())
            for string in stop
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Decode with every token shown, as the agent loop reads it."""
        return self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _is_complete(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        text = self.text(tokens) if stop else ""
        return any(string in text for string in stop)


@cache
def _ends(stop: str) -> tuple[str, ...]:
    return tuple(stop[start:] for start in range(1, len(stop)))


def end_of_text_ids(folder: str | Path, hf_config: dict[str, Any], tokenizer: Any) -> int | list[int]:
    """Return every end-of-text token of config, generation config and tokenizer, as one or ascending.

    The HuggingFace `folder` ("" for none) may lack generation_config.json; UserError if that is no object.
    """
    path = Path(folder) / "generation_config.json"
    generation = read_json(path, "fix or remove it") if folder and path.is_file() else {}
    end_ids: set[int] = {tokenizer.eos_token_id}
    for source in (hf_config, generation):
        ids = source.get("eos_token_id")
        end_ids |= {ids} if isinstance(ids, int) else set(ids or [])
    # An id that the policy cannot sample ends nothing, and vLLM would refuse it.
    size = hf_config.get("vocab_size", len(tokenizer))
    ids = sorted(token for token in end_ids if token < size)
    return ids[0] if len(ids) == 1 else ids
