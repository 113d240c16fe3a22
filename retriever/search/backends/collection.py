"""A Qdrant collection served as it is: its payloads are the rows, so no corpus and no index folder is needed.

RLinf's collections are of this form: one vector a point, cosine, and the corpus row as payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retriever.encoders.factory import make_encoder
from retriever.encoders.probe import cosine
from retriever.errors import RetrieverError
from retriever.interfaces import Found, Row
from retriever.search.backends.qdrant import Connection, search_params
from retriever.search.manifest import BM25

LEAST_COSINE = 0.5  # of one point's vector to what the encoder makes of its text


@dataclass(frozen=True)
class CollectionOptions:
    """The fields are named as the service's options."""

    qdrant_url: str
    qdrant_collection: str
    retriever_name: str
    retriever_model: str = ""
    qdrant_text: str = "contents"  # field of the payload that holds title and text
    qdrant_search: str = ""  # as for `search_params`


class Collection:
    """Implements `interfaces.Searcher`. Any number of threads may call it.

    Raises:
        RetrieverError: no such server or collection, no text in its payload, or vectors of another encoder.
    """

    def __init__(self, options: CollectionOptions):
        name, self._text = options.retriever_name, options.qdrant_text
        if name in ("hashed", BM25):
            raise RetrieverError(
                f"--retriever_name {name}: its counts lie in an index's folder; name --index_path, or e5, bge"
                " or dense"
            )
        self._params = search_params(options.qdrant_search)
        self._connection = Connection(Path(), options.qdrant_url, options.qdrant_collection)
        self._encoder = make_encoder(name, options.retriever_model, ())
        self.manifest = {
            "kind": "qdrant",
            "documents": self._connection.documents,
            "encoder": self._encoder.name,
            "model": self._encoder.model,
            "dimension": self._connection.dimension,
            "url": options.qdrant_url,
            "collection": options.qdrant_collection,
        }
        if options.qdrant_search:
            self.manifest["search"] = options.qdrant_search
        self._check()

    def search(self, queries: Sequence[str], k: int) -> list[Found]:
        """The k best rows of each query with their scores, best first.

        Raises:
            RetrieverError: a row without text.
            Unavailable: the server did not answer.
        """
        vectors = self._encoder.encode_queries(queries)
        answers = self._connection.query(vectors, k, self._params, with_payload=True)
        return [[(self._row(point), float(point.score)) for point in answer.points] for answer in answers]

    def _row(self, point: Any) -> Row:
        payload: Row = point.payload or {}
        text = payload.get(self._text)
        if not isinstance(text, str):
            fields = ", ".join(payload) or "no field"
            raise RetrieverError(
                f"{self._connection.where}: point {point.id} has no text in {self._text!r} (it has {fields});"
                " set --qdrant_text"
            )
        return payload | {"id": str(payload.get("id", point.id)), "contents": text}

    def _check(self) -> None:
        where, dimension = self._connection.where, self._encoder.dimension
        if self._connection.dimension != dimension:
            raise RetrieverError(
                f"{where}: holds vectors of dimension {self._connection.dimension}, and {self._encoder.model}"
                f" makes {dimension}; set --retriever_model to the model that built it"
            )
        point = self._connection.first()
        likeness = cosine(point.vector, self._encoder.encode_passages([self._row(point)])[0])
        if likeness < LEAST_COSINE:
            raise RetrieverError(
                f"{where}: the vector of point {point.id} is not what {self._encoder.model} makes of its text"
                f" (cosine {likeness:.2f}); set --retriever_name and --retriever_model to the encoder that"
                " built it"
            )
