"""Bodies of requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field

# Largest numbers of documents for each query, and of URLs of a request.
MAX_TOPK = 1000
MAX_URLS = 256


class RetrieveRequest(BaseModel):
    """A request of POST /retrieve, in any of the three contracts."""

    model_config = ConfigDict(extra="forbid")

    # The texts to search for. FailFast: one error, not one for each of a million items.
    queries: Annotated[list[str], FailFast()]
    # Search-R1 and RLinf: documents for each query; None for the number of the service.
    topk: int | None = Field(None, ge=1, le=MAX_TOPK)
    # All contracts: whether each document comes with its score.
    return_scores: bool = False
    # CalibAdv: documents to retrieve for each query, and those that the reranker keeps.
    topk_retrieval: int | None = Field(None, ge=1, le=MAX_TOPK)
    topk_rerank: int | None = Field(None, ge=1, le=MAX_TOPK)
    # CalibAdv: no reranking.
    not_sort: bool = False

    @property
    def is_calibadv(self) -> bool:
        """Whether it is a request of CalibAdv's contract, whose documents are texts."""
        return self.topk_retrieval is not None or self.topk_rerank is not None


class AccessRequest(BaseModel):
    """A request of POST /access, RLinf's page access."""

    model_config = ConfigDict(extra="forbid")

    urls: Annotated[list[str], FailFast(), Field(min_length=1, max_length=MAX_URLS)]
