"""The retrieval service as the trainer sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, refuse_credentials

NO_RETRIEVER = "http://no-retriever.invalid"  # the url of what never searches: no service is opened or asked

NO_MODEL = ("hashed", "bm25")  # encoders without weights

ROUTE, PAGE_ROUTE = "/retrieve", "/access"  # of the service, which the client adds


@dataclass(frozen=True, config=SECTION)
class RetrieverConfig:
    url: Annotated[str | list[str], Mark.PER_RUN, Mark.NO_ANSWER] = ""
    """Base URL of a running service, or a list of the URLs of several services with the same index: each
    query goes to a service that is free, and services that fail are left out until they answer again. Empty:
    start a service as a child process from `corpus` and `index`. If a service asks for a token, it is taken
    from the environment variable RETRIEVER_TOKEN."""
    corpus: str = ""
    """Corpus of the child service: JSONL of {"id", "contents"} rows, or csv, tsv or parquet of id, title and
    text; also gzipped."""
    index: Annotated[str, Mark.NO_ANSWER, Mark.OUTPUT] = ""
    """Folder of the child service's index; it is built if it is missing."""
    pages: str = ""
    """Pages of the child service, which the action `access` reads: JSONL of {"url", "contents"} rows."""
    page_address: Annotated[str, Mark.LEARNED] = "{}"
    """How the action `access` makes a page's url of what the policy writes, which stands for {}: a policy
    that knows titles only may need https://en.wikipedia.org/w/index.php?title={}."""
    encoder: Annotated[str, Mark.LEARNED] = "hashed"
    """Encoder with which a missing index is built: bm25 and hashed need no weights; e5, bge and dense (any
    sentence-transformers model, see `model`) have some."""
    model: Annotated[str, Mark.LEARNED] = ""
    """Model of the child service's encoder: a folder or a hub name of sentence-transformers. Empty: the
    index's, or the usual one of e5 and bge."""
    topk: Annotated[PositiveInt, Mark.LEARNED] = 3
    """Documents per query, if nothing is reranked."""
    retrieval_topk: Annotated[NonNegativeInt, Mark.LEARNED] = 0
    """Documents per query that are looked up for the reranker (the paper: 20); 0: nothing is reranked."""
    rerank_topk: Annotated[NonNegativeInt | None, Mark.LEARNED] = None
    """Documents per query that the reranker keeps (the paper: 3). 0: nothing is reranked, even if the service
    has a reranker; null: the same, but a service with a reranker is refused, because its reranker would have
    no effect."""
    reranker: Annotated[str, Mark.LEARNED] = ""
    """Cross-encoder of the child service: a folder or a hub name. A running service (`url`) has a reranker of
    its own, or none."""
    timeout: Annotated[PositiveFloat, Mark.NO_ANSWER] = 30.0
    """Seconds that one request may take, to the last byte of its reply; then it is repeated."""
    patience: Annotated[PositiveFloat, Mark.NO_ANSWER] = 600.0
    """Seconds for which the start of a run, and later a search, waits for a service that cannot be reached,
    or that is loading, broken or overloaded. After that the start ends, or the trajectory of the search fails
    (rollout.max_failed_share)."""
    start_timeout: Annotated[PositiveFloat, Mark.NO_ANSWER] = 600.0
    """Seconds that a child service may take to become ready."""
    threads: Annotated[NonNegativeInt, Mark.NO_ANSWER] = 1
    """Number of cores for the child service, which shares the machine with the trainer; 0: all cores."""

    @model_validator(mode="after")
    def _url_is_the_base(self) -> RetrieverConfig:
        for url in [self.url] if isinstance(self.url, str) else self.url:
            refuse_credentials("url", url, "RETRIEVER_TOKEN")
            if url.rstrip("/").endswith(ROUTE):
                base = url.rstrip("/").removesuffix(ROUTE)
                raise ValueError(
                    f"url is {url}, but must be the base URL: drop {ROUTE}, so that it is {base}"
                )
        return self

    def at(self, url: str | list[str]) -> RetrieverConfig:
        """The same searches, answered by a service that is running: without what only a start needs."""
        return replace(self, url=url, model="", reranker="")

    @model_validator(mode="after")
    def _model_has_an_effect(self) -> RetrieverConfig:
        if self.model and self.url:
            raise ValueError(
                f"model is for a service that is started here, but url names {self.url}: start that service"
                " with --retriever_model, or leave out one of the two keys"
            )
        if self.model and self.encoder in NO_MODEL:
            raise ValueError(
                f"model {self.model!r} would be without effect: the encoder {self.encoder} has none; set"
                " encoder=dense, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _page_address_has_a_place(self) -> RetrieverConfig:
        if self.page_address.count("{}") != 1:
            raise ValueError(f"page_address is {self.page_address!r}, but must contain {{}} once")
        return self

    @model_validator(mode="after")
    def _reranker_has_an_effect(self) -> RetrieverConfig:
        keep = self.rerank_topk or 0
        if bool(self.retrieval_topk) != bool(keep):
            raise ValueError(
                f"retrieval_topk is {self.retrieval_topk} and rerank_topk is {self.rerank_topk}: to rerank,"
                " set both (the paper: retrieval_topk=20, rerank_topk=3); else leave both out"
            )
        if keep > self.retrieval_topk:
            raise ValueError(
                f"rerank_topk is {keep}, but only retrieval_topk = {self.retrieval_topk} documents are looked"
                " up: raise the second or lower the first"
            )
        if self.reranker and not keep:
            raise ValueError(
                f"reranker {self.reranker!r} would be without effect: set retrieval_topk=20 and"
                " rerank_topk=3, or leave it out"
            )
        if self.reranker and self.url:
            raise ValueError(
                f"reranker is for a service that is started here, but url names {self.url}: start that"
                " service with --reranker_model, or leave out one of the two keys"
            )
        if keep and not self.url and self.corpus and not self.reranker:
            raise ValueError(
                "rerank_topk is set, but the service that is started here has no reranker: set reranker to a"
                " cross-encoder, such as cross-encoder/ms-marco-MiniLM-L12-v2"
            )
        return self
