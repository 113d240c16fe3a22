"""Packed rows in which tokens that several samples begin with are computed once.

The trajectories of a group begin with one prompt, and often with one search and its documents. Their tokens
are a tree: each node is computed once, in depth-first order, and sees its ancestors. The trained tokens of a
sample stand in columns of its own beside the tree, each with the node whose state predicts it. Loss and
gradient are those of the samples laid end to end; only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibadv_jax.learner.batching import Batch, Rows, Sample
from calibadv_jax.learner.packing import Placement, Plan, RowShape, plan


@dataclass(frozen=True)
class Tree:
    """Samples that begin alike. Its nodes are numbered in depth-first order."""

    samples: list[int]  # their numbers
    paths: list[np.ndarray]  # int64 [T] of each sample: the node of each of its tokens
    tokens: np.ndarray  # int32 [N]
    positions: np.ndarray  # int32 [N], from the root
    ends: np.ndarray  # int32 [N], one past the last node below this one: the first that does not see it
    num_trained: int  # columns that the samples' trained tokens take


class SharedRows(Rows):
    """As `Rows`, but the columns that are computed are not those of the loss.

    The common prefix of all samples stands once at the beginning of every row. The rest of the trees is
    packed.
    """

    def _planned(self, shapes: Sequence[RowShape]) -> Plan:
        if max(map(len, (sample.tokens for sample in self.samples)), default=0) > shapes[0].length:
            return super()._planned(shapes)  # which says so
        self.common = _shared_by_all(self.samples)
        self.trees = list(trees(self.samples, shapes[0].length, self.common))
        needed = [max(len(tree.tokens) - self.common, tree.num_trained) for tree in self.trees]
        own = [_longer(shape, -self.common) for shape in shapes if shape.length > self.common]
        packing = plan(needed, own)
        return replace(packing, shapes=[_longer(shape, self.common) for shape in packing.shapes])

    @property
    def computed(self) -> int:
        own = sum(len(tree.tokens) - self.common for tree in self.trees)
        return sum(self.plan.num_rows) * self.common + own

    def batches(self, factors: Sequence[np.ndarray] | None = None) -> list[Batch]:
        batches = self._empty(factors)
        for batch in batches:
            batch.sources, batch.ends = np.zeros_like(batch.tokens), np.zeros_like(batch.tokens)
        for tree, at in zip(self.trees, self.plan.placements, strict=True):
            batch, row, own = batches[at.batch], at.row, slice(self.common, None)
            here = slice(self.common + at.start, len(tree.tokens) + at.start)
            for of_rows, of_tree in ((batch.tokens, tree.tokens), (batch.positions, tree.positions)):
                of_rows[row, : self.common] = of_tree[: self.common]
                of_rows[row, here] = of_tree[own]
            batch.ends[row, : self.common] = batch.ends.shape[1]
            batch.ends[row, here] = tree.ends[own] + at.start
        for index, before, trained, at, here in self._columns():
            batch, row = batches[at.batch], at.row
            batch.sources[row, here] = np.where(before < self.common, before, before + at.start)
            batch.segment_ids[row, here] = index + 1
            self._fill(batch, row, here, index, trained, factors)
        return batches

    def taken(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """As `Rows.taken`, of the trained tokens. Entries of others are 0."""
        taken = [np.zeros(len(sample.tokens), values[0].dtype) for sample in self.samples]
        for index, _, trained, at, here in self._columns():
            taken[index][trained] = values[at.batch][at.row, here]
        return taken

    def _columns(self) -> Iterator[tuple[int, np.ndarray, np.ndarray, Placement, slice]]:
        """Of each sample: its number; the nodes before its trained tokens, and these tokens; where its tree
        lies; the columns of the loss that its trained tokens take.
        """
        for tree, at in zip(self.trees, self.plan.placements, strict=True):
            start = at.start
            for index, path in zip(tree.samples, tree.paths, strict=True):
                trained = _trained(self.samples[index])
                end = start + len(trained)
                yield index, path[trained - 1], trained, at, slice(start, end)
                start = end


def trees(samples: Sequence[Sample], most: int, common: int) -> Iterator[Tree]:
    """Group samples by prefix: those of one prompt are one tree, or several of up to `most` nodes.

    Args:
        common: tokens that all samples begin with. A tree's trained tokens and these are `most` at most, too.
    """
    order = sorted(range(len(samples)), key=lambda index: samples[index].tokens.astype(">u4").tobytes())
    chosen: list[int] = []
    begins: list[int] = []
    nodes = trained = 0
    for index in order:
        sample, more, same = samples[index], len(_trained(samples[index])), 0
        if chosen:
            last = samples[chosen[-1]]
            same = _shared(last.tokens, sample.tokens)
            is_other = same < min(len(last.prompt_ids), len(sample.prompt_ids))
            if is_other or nodes + len(sample.tokens) - same > most or trained + more > most - common:
                yield _tree(samples, chosen, begins, trained)
                chosen, begins, nodes, trained, same = [], [], 0, 0, 0
        chosen.append(index)
        begins.append(same)
        nodes += len(sample.tokens) - same
        trained += more
    if chosen:
        yield _tree(samples, chosen, begins, trained)


def _tree(samples: Sequence[Sample], chosen: list[int], shared: list[int], num_trained: int) -> Tree:
    """Of samples in the order of their tokens; each shares so many of them with the one before it."""
    paths: list[np.ndarray] = []
    last, count = np.zeros(0, np.int64), 0
    for index, same in zip(chosen, shared, strict=True):
        new = len(samples[index].tokens) - same
        last = np.concatenate([last[:same], np.arange(count, count + new)])
        paths.append(last)
        count += new
    tokens, positions, ends = np.zeros((3, count), np.int32)
    for index, path in zip(chosen, paths, strict=True):
        tokens[path] = samples[index].tokens
        positions[path] = np.arange(len(path))
        ends[path] = path[-1] + 1  # of the last one that passes here
    return Tree(chosen, paths, tokens, positions, ends, num_trained)


def _longer(shape: RowShape, tokens: int) -> RowShape:
    return replace(shape, length=shape.length + tokens)


def _trained(sample: Sample) -> np.ndarray:
    """Numbers of the tokens that have a column of the loss; the first token has none."""
    return np.flatnonzero(sample.mask[1:]) + 1


def _shared(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the common prefix."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(np.argmax(differs)) if differs.any() else length


def _shared_by_all(samples: Sequence[Sample]) -> int:
    """Tokens of their prompts that all samples begin with; 0 where sharing them is no gain."""
    if len(samples) < 2:
        return 0
    first = samples[0].tokens
    shared = min(_shared(first, sample.tokens) for sample in samples)
    return min(shared, *(min(len(sample.prompt_ids), len(sample.tokens) - 1) for sample in samples))
