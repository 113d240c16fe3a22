"""A small own corpus and a search by common words, for demonstrations and coverage."""

from __future__ import annotations

import json
from pathlib import Path

from http_rig import Handler, serving
from rows_rig import write_rows

from calibadv_jax.contrib.cli.prepare_data import question_key
from calibadv_jax.core.trajectory import Document

PASSAGES = [
    Document("p0", "Silent Garden (novel)", "Silent Garden is a novel. It was written by Ada Berk in Rome."),
    Document(
        "p1", "Ada Berk", "Ada Berk is an author. She was born in Oslo in 1901! Her father was a baker."
    ),
    Document("p2", "Loud Garden", "Loud Garden is a garden in Paris. Many people visit it every year."),
    Document("p3", "Bo Dorn", "Bo Dorn is a painter. Bo Dorn was born in Lima."),
    Document("p4", "Cy Emm", "Cy Emm is a painter from Quito. He died young."),
    Document("p5", "Oslo", "Oslo is a city in Norway."),
    Document("p6", "Norway", "Norway is a country in Europe. Its capital is Oslo."),
]
BY_ID = {document.id: document for document in PASSAGES}


def find(query: str, topk: int) -> list[Document]:
    """Those with most words of the query first; a word of the title counts twice. Ties as in the corpus."""
    query_words = set(question_key(query).split())

    def score(document: Document) -> int:
        words = [set(question_key(text).split()) for text in (document.title, document.text)]
        return 2 * len(query_words & words[0]) + len(query_words & words[1])

    return sorted(PASSAGES, key=score, reverse=True)[:topk]


def row(name, text, answers, supporting, source="test"):
    question = {"id": name, "question": text, "golden_answers": answers}
    return question | {"data_source": source, "supporting_ids": supporting}


def as_row(document: Document) -> dict[str, str]:
    return {"id": document.id, "contents": f'"{document.title}"\n{document.text}'}


def write_corpus(path: Path) -> None:
    write_rows(path, *map(as_row, PASSAGES))


def shelf_service():
    """Base URL of a retrieval service over the passages; refuses queries of more than 200 characters."""

    class Service(Handler):
        def do_POST(self):
            request = json.loads(self.body())
            if any(len(query) > 200 for query in request["queries"]):
                return self.reply(422, {"detail": "too long"})
            documents = [find(query, request["topk"]) for query in request["queries"]]
            hits = [
                [{"document": as_row(document), "score": 1.0} for document in ranked] for ranked in documents
            ]
            self.reply(200, {"result": hits})

        def do_GET(self):
            self.reply(200, {"status": "ready"})

    return serving(Service)
