"""A backend in one file: the vectors as a matrix of NumPy."""

import numpy as np

from retriever.errors import RetrieverError
from retriever.indexes.backend import Backend


class MatrixBackend(Backend):
    def check(self, options):
        if options.search not in ("", "fast"):
            raise RetrieverError(f"--search {options.search}: fast or nothing")

    def write(self, build):
        np.save(build.folder / "matrix.npy", np.concatenate(list(build.embeddings.shards())))
        return {"scale": build.options.settings.get("matrix_scale", 1)}

    def open(self, folder, manifest, options):
        return Matrix(np.load(folder / "matrix.npy") * manifest["scale"])


class Matrix:
    def __init__(self, matrix):
        self._matrix, (self.documents, self.dimension) = matrix, matrix.shape

    def nearest(self, vectors, k):
        scores = vectors @ self._matrix.T
        rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, rows, 1), rows
