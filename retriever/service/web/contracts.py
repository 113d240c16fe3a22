"""The request contracts of ``POST /retrieve``, distinguished by their fields.

| client | fields | item of a query's list |
|---|---|---|
| Search-R1, verl, SkyRL | queries, topk, return_scores true | {"document": corpus row, "score"} |
| RLinf | queries, topk, return_scores false | the corpus row |
| CalibAdv authors | queries, topk_retrieval, topk_rerank, … | {"document": contents, "score"}, or contents |

An item of the last one has the row's id too: the authors' client ignores it, the trainer's needs it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from retriever.interfaces import Found, Row

MAX_QUERY_LENGTH = 8192  # characters; what comes after them is cut off
MAX_TOPK = 1000
MAX_URLS = 256

to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class RetrieveRequest(BaseModel):
    """Any of the three contracts."""

    model_config = ConfigDict(extra="forbid")

    queries: list[str]
    topk: int | None = Field(None, ge=1, le=MAX_TOPK)
    return_scores: bool = False
    topk_retrieval: int | None = Field(None, ge=1, le=MAX_TOPK)
    topk_rerank: int | None = Field(None, ge=1, le=MAX_TOPK)
    not_sort: bool = False

    @property
    def is_calibadv(self) -> bool:
        return self.topk_retrieval is not None or self.topk_rerank is not None

    def depth(self, default: int) -> int:
        """How many documents to look up per query."""
        return (self.topk_retrieval if self.is_calibadv else self.topk) or default


class AccessRequest(BaseModel):
    """RLinf's page access."""

    model_config = ConfigDict(extra="forbid")

    urls: list[str] = Field(min_length=1, max_length=MAX_URLS)


def render(request: RetrieveRequest, found: list[Found]) -> Iterator[str]:
    """The reply in the request's own contract, as the parts of its JSON.

    Raises:
        ValueError: a score is no finite number; before the first part.
    """
    if request.return_scores and not all(math.isfinite(score) for one in found for _, score in one):
        raise ValueError("a score is no finite number")
    yield '{"result":['
    for number, one in enumerate(found):
        yield ",[" if number else "["
        for rank, (row, score) in enumerate(one):
            yield ("," if rank else "") + to_json(_item(request, row, score))
        yield "]"
    yield "]}"


def render_pages(rows: list[Row | None]) -> Iterator[str]:
    """The reply of ``POST /access``, as the parts of its JSON."""
    yield '{"result":['
    for number, row in enumerate(rows):
        yield ("," if number else "") + to_json(row)
    yield "]}"


def error_reply(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """What every refusal and failure looks like."""
    return JSONResponse({"error": message}, status_code=status, headers=headers)


def _item(request: RetrieveRequest, row: Row, score: float) -> Any:
    if not request.is_calibadv:
        return {"document": row, "score": score} if request.return_scores else row
    contents = row["contents"]
    return {"document": contents, "score": score, "id": row.get("id")} if request.return_scores else contents
