"""Passages, and a searcher that counts."""

import json
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from retriever.backends import IndexOptions
from retriever.corpus.passages import load_corpus
from retriever.errors import RetrieverError

NAMES = [f"{a} {b}" for a in ("ada", "bo", "cy", "di") for b in ("almson", "berkson", "carlson", "dorn")]
TOWNS = {
    "adara almson": "adara almson lives in port elton.",
    "adara berkson": "adara berkson knows adara almson of port elton, adara almson herself.",
    "port elton": "port elton has the mayor brulen falkski.",
    "Zürich": "Zürich is a city on the river Limmat.",
}


def refuses(message, work, *arguments, **options):
    """The call raises a RetrieverError in which the pattern is."""
    with pytest.raises(RetrieverError, match=message):
        work(*arguments, **options)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def people_corpus(path, count, words=""):
    """Passages of so many people, who live in seven towns."""
    rows = [{"id": i, "contents": f'"Person {i}"\nlives in town {i % 7}{words}.'} for i in range(count)]
    return load_corpus(write_rows(path, rows))


def town_rows():
    return [
        {"id": str(i), "contents": f'"{title}"\n{text}', "url": f"u{i}"}
        for i, (title, text) in enumerate(TOWNS.items())
    ]


def write_flat(path, vectors):
    """A flat FAISS file of float32 [documents, dimension], as FAISS itself writes it."""
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, str(path))
    return path


def opened(corpus, folder, **options):
    from retriever.indexes.index import open_index

    return open_index(folder, load_corpus(corpus), IndexOptions(**options))


def ids(hits):
    """The ids of the rows of each query."""
    return [[row["id"] for row, _ in hits_of_query] for hits_of_query in hits]


def bm25_scores(terms, texts):
    """Lucene's BM25 of each text, a list of words, with k1 = 0.9 and b = 0.4."""
    mean = sum(map(len, texts)) / len(texts)
    scores = np.zeros(len(texts))
    for term in terms:
        counts = np.array([text.count(term) for text in texts])
        frequency = np.count_nonzero(counts)
        idf = np.log1p((len(texts) - frequency + 0.5) / (frequency + 0.5))
        scores += idf * counts / (counts + 0.9 * (0.6 + 0.4 * np.array([*map(len, texts)]) / mean))
    return scores


def brute_force_ids(encoder, corpus, queries, k):
    scores = encoder.encode_queries(queries) @ encoder.encode_passages(corpus[:]).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return [[corpus[i]["id"] for i in row] for row in order.tolist()]


class Counting:
    """A real index that notes the size of every search, and can be slowed down."""

    def __init__(self, index, seconds=0.0):
        self.index, self.seconds, self.batches, self.queries = index, seconds, [], []
        self.manifest = index.manifest

    def search(self, queries, k):
        self.batches.append((len(queries), k))
        self.queries += queries
        time.sleep(self.seconds)
        return self.index.search(queries, k)


class Held(Counting):
    """An index whose searches end when `go_on` is set."""

    def __init__(self, index):
        super().__init__(index)
        self.go_on = threading.Event()

    def search(self, queries, k):
        self.batches.append((len(queries), k))
        self.queries += queries
        self.go_on.wait()
        return self.index.search(queries, k)


@contextmanager
def served(app, max_connections=100, seconds=30.0, loop="auto"):
    """(host, port) of a server over a real socket, with the service's own limits of connections."""
    from retriever.service.protocol import bounded_protocol
    from retriever.service.server import Server, listen, make_config

    with listen("127.0.0.1", 0) as listener:
        protocol = bounded_protocol(max_connections, seconds)
        config = make_config(app, protocol)
        config.loop = loop
        server = Server(config)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()
