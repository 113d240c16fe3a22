"""The retrieval service: where it runs, what it serves, and how its client waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section, credential_faults

# The url of evaluation methods that never search; no connection is made to it.
NO_RETRIEVER_URL = "http://no-retriever.invalid"
# Encoders that have no weights, so that `model` cannot be set.
ENCODERS_WITHOUT_MODEL = ("hashed", "bm25")
# Paths of the service's endpoints, which the client appends to the base URL.
SEARCH_ROUTE = "/retrieve"
PAGE_ROUTE = "/access"


@dataclass(frozen=True, config=SECTION)
class RetrieverConfig(Section):
    """The retrieval service, running already or started as a child process."""

    url: Annotated[str | list[str], Mark.PER_RUN, Mark.NO_ANSWER] = ""
    """Base URL of a running service, or of several with the same index, which share the queries; a failing
    service gets no queries until it answers again. Empty: start a child process from `corpus` and `index`.
    The environment variable RETRIEVER_TOKEN is sent as the token."""
    corpus: str = ""
    """Corpus of the child service: JSONL of {"id", "contents"}, or csv, tsv or parquet; also gzipped."""
    index: Annotated[str, Mark.NO_ANSWER, Mark.OUTPUT] = ""
    """Folder of the child service's index; it is built if it is missing."""
    kind: str = ""
    """Kind of the child service's index; empty: that of the index, or faiss for a new one. An index of a kind
    of your own, package.module:Class, or of the kind qdrant in a folder runs code when it is opened. It is
    opened only if its kind stands here."""
    pages: str = ""
    """Pages of the child service, which the action `access` reads: JSONL of {"url", "contents"} rows."""
    page_address: Annotated[str, Mark.LEARNED] = "{}"
    """URL of a page for the action `access`; {} stands for the policy's text, which may be a title only:
    https://en.wikipedia.org/w/index.php?title={}."""
    encoder: Annotated[str, Mark.LEARNED] = "hashed"
    """Encoder of a new index: bm25 and hashed have no weights; e5, bge and dense load a model."""
    model: Annotated[str, Mark.LEARNED] = ""
    """Model of the child service's encoder: folder or hub name; empty: the model of the index or, for a new
    index, the encoder's usual model."""
    topk: Annotated[PositiveInt, Mark.LEARNED] = 3
    """Documents per query that the policy is shown."""
    rerank_candidates: Annotated[NonNegativeInt | None, Mark.LEARNED] = None
    """Documents per query among which the service's reranker chooses the topk best (the paper: 20). 0:
    nothing is reranked, even if the service has a reranker; null: the same, but a service with a reranker is
    refused."""
    reranker: Annotated[str, Mark.LEARNED] = ""
    """Cross-encoder of the child service: folder or hub name. A running service has its own, or none."""
    timeout: Annotated[PositiveFloat, Mark.NO_ANSWER] = 30.0
    """Seconds for one request, to the last byte of its reply; then it is repeated."""
    patience: Annotated[PositiveFloat, Mark.NO_ANSWER] = 600.0
    """Seconds that the start of a run, and later a search, waits for an unreachable, loading or overloaded
    service. Then the start ends, or the search's trajectory fails (rollout.max_failed_share)."""
    start_timeout: Annotated[PositiveFloat, Mark.NO_ANSWER] = 600.0
    """Seconds for a child service to become ready."""
    threads: Annotated[NonNegativeInt, Mark.NO_ANSWER] = 1
    """Cores of the child service, which shares the machine with the trainer; 0: all cores."""

    def at(self, url: str | list[str]) -> RetrieverConfig:
        """Return a config of the same searches for running services.

        Args:
            url: Base URL of the service, or of several with the same index.

        Returns:
            A copy without `kind`, `model` and `reranker`, which are only for a service that is started here.
        """
        return replace(self, url=url, kind="", model="", reranker="")

    def _faults(self) -> Iterator[str]:
        yield from credential_faults("url", self.url, "RETRIEVER_TOKEN")
        yield from self._url_faults()
        if self.model and self.encoder in ENCODERS_WITHOUT_MODEL:
            yield f"model: the encoder {self.encoder} has none; set encoder=dense, or leave model out"
        if self.page_address.count("{}") != 1:
            yield f"page_address is {self.page_address!r}, but must contain {{}} once"
        yield from self._reranker_faults()

    def _url_faults(self) -> Iterator[str]:
        urls = [self.url] if isinstance(self.url, str) else self.url
        for url in urls:
            address = url.rstrip("/")
            base = address.removesuffix(SEARCH_ROUTE)
            if base != address:
                yield f"url is {url}, but must be the base URL: drop {SEARCH_ROUTE}, so that it is {base}"
        for key, option in (("kind", "kind"), ("model", "retriever_model"), ("reranker", "reranker_model")):
            if self.url and getattr(self, key):
                yield (
                    f"{key} is for a service that is started here, but url is {self.url}: "
                    f"start that service with --{option}, or leave out one of the two keys"
                )

    def _reranker_faults(self) -> Iterator[str]:
        candidates = self.rerank_candidates or 0
        if 0 < candidates < self.topk:
            yield (
                f"rerank_candidates is {candidates}, below topk = {self.topk}: "
                "raise the first (the paper: 20 candidates for 3 documents) or lower the second"
            )
        if self.reranker and not candidates:
            yield (
                f"reranker {self.reranker!r} would be without effect: set rerank_candidates, or leave it out"
            )
        starts_service = self.corpus and not self.url
        if candidates and starts_service and not self.reranker:
            yield (
                f"rerank_candidates is {candidates}, but the service has no reranker: "
                "set reranker to a cross-encoder"
            )
