"""A backend in one file: the vectors as a matrix of NumPy."""

import numpy as np

from retriever.errors import RetrieverError
from retriever.indexes.backend import Backend


class MatrixBackend(Backend):
    """Keeps the vectors in one file and searches all of them."""

    def check(self, options):
        if options.search not in ("", "fast"):
            raise RetrieverError(f"--search {options.search}: fast or nothing")

    def write(self, build):
        vectors = np.concatenate(list(build.embeddings.shards()))  # [documents, D]
        np.save(build.folder / "matrix.npy", vectors)
        return {"scale": build.options.settings.get("matrix_scale", 1)}

    def open(self, folder, manifest, options):
        return Matrix(np.load(folder / "matrix.npy") * manifest["scale"])


class Matrix:
    """Vectors float32 [documents, D], ranked by inner product."""

    def __init__(self, matrix):
        self.documents, self.dimension = matrix.shape
        self._matrix = matrix

    def nearest(self, vectors, k):
        scores = vectors @ self._matrix.T  # [Q, documents]
        # A stable sort: equal scores stay in corpus order.
        rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, rows, 1), rows
