"""Controls of an evaluation: which documents they show."""

import asyncio

from evaluation_rig import QUESTIONS

from calibadv_jax.core.trajectory import Document
from calibadv_jax.evaluation.methods import RandomDocuments


class Overlapping:
    """Finds a document of its own for each query, and one that every query finds."""

    async def search(self, queries):
        return [[Document(f"{query}/0", "t", "x"), Document("shared", "t", "x")] for query in queries]


def test_random_documents_never_are_what_the_query_finds():
    """Half of what other questions find, the query finds too: it is left out, and others are drawn."""
    control = RandomDocuments(Overlapping(), QUESTIONS, seed=0)
    for question in QUESTIONS:
        ((first, second),) = asyncio.run(control.search([question.text]))
        assert first.id != second.id
        assert not {"shared", f"{question.text}/0"} & {first.id, second.id}
