"""The retrieval service as the trainer sees it."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.section import SECTION


@dataclass(frozen=True, config=SECTION)
class RetrieverConfig:
    url: str | list[str] = ""
    """Base URL of a running service, or a list of several that serve the same index: each query goes to one
    that is free, and those that fail are left out until they answer again. Empty: start a service as a child
    process from `corpus` and `index`. The environment variable RETRIEVER_TOKEN is the token of services that
    ask for one."""
    corpus: str = ""
    """JSONL (or .jsonl.gz) of {"id", "contents"} rows, for the child service."""
    index: str = ""
    """Folder of the index for the child service; built when missing."""
    encoder: str = "hashed"
    """Encoder of a newly built index; hashed needs no weights."""
    topk: PositiveInt = 3
    """Documents per query."""
    timeout: PositiveFloat = 30.0
    """Seconds one request may take; then it is repeated."""
    patience: PositiveFloat = 600.0
    """Seconds for which a search waits for a service that cannot be reached, is loading or is overloaded;
    then its trajectory fails (rollout.max_failed_share)."""
    start_timeout: PositiveFloat = 600.0
    """Seconds a child service may take to become ready."""
    threads: NonNegativeInt = 1
    """Cores that a child service uses, which shares the machine with the trainer; 0: all."""
