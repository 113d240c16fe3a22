"""Packed rows in which samples that begin alike share the computed tokens.

Letters: T tokens of a sample, N nodes of a prefix tree, R rows of a batch, L columns of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from calibadv_jax.learner.batching import Batch, Plan, Rows, RowShape, Sample, SampleColumns, plan


@dataclass(frozen=True)
class PrefixTree:
    """A prefix tree of samples. Its nodes are numbered in depth-first order.

    Attributes:
        paths: int64 [T] for each sample, by its number: the node of each of its tokens.
        tokens: int32 [N], of each node.
        positions: int32 [N], of each node, from the root.
        ends: int32 [N], one past the last descendant of each node: the first node that does not see it.
        num_trained: columns that the samples' trained tokens take.
    """

    paths: dict[int, np.ndarray]
    tokens: np.ndarray
    positions: np.ndarray
    ends: np.ndarray
    num_trained: int


class PrefixSharedRows(Rows):
    """Packed rows in which tokens that several samples begin with are computed once.

    The trajectories of a group begin with one prompt, and often with one search and its documents. Each node
    of the tree of their tokens is computed once, in depth-first order, and sees its ancestors. The trained
    tokens of a sample have columns of their own beside the tree, each with the node whose state predicts it.
    Loss and gradient are those of `Rows`; only the order of sums differs. The common prefix of all samples
    stands once at the beginning of every row. `unpack` returns the values of trained tokens.

    Arguments and errors are those of `Rows`.

    Attributes:
        common: tokens of the common prefix of all samples.
        trees: prefix trees of all samples; each has one placement of the plan.
    """

    def _make_plan(self, shapes: Sequence[RowShape]) -> Plan:
        longest = max((len(sample.tokens) for sample in self.samples), default=0)
        if longest > shapes[0].length:
            return super()._make_plan(shapes)  # raises the ValueError
        self.common = _common_prefix_of_all(self.samples)
        self.trees = list(prefix_trees(self.samples, shapes[0].length, self.common))
        num_nodes = [len(tree.tokens) - self.common for tree in self.trees]
        lengths = []
        for count, tree in zip(num_nodes, self.trees, strict=True):
            lengths.append(max(count, tree.num_trained))
        # The common prefix takes the first columns of every row.
        shapes_beside_prefix = []
        for shape in shapes:
            if shape.length > self.common:
                shapes_beside_prefix.append(replace(shape, length=shape.length - self.common))
        beside_prefix = plan(lengths, shapes_beside_prefix)
        self.computed = sum(beside_prefix.num_rows) * self.common + sum(num_nodes)
        full_shapes = [replace(shape, length=shape.length + self.common) for shape in beside_prefix.shapes]
        return replace(beside_prefix, shapes=full_shapes)

    def _fill_inputs(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            batch.sources = np.zeros_like(batch.tokens)
            batch.ends = np.zeros_like(batch.tokens)
        prefix = slice(self.common)
        branches = slice(self.common, None)
        for tree, placement in zip(self.trees, self.plan.placements, strict=True):
            batch = batches[placement.batch]
            row = placement.row
            columns = slice(self.common + placement.start, len(tree.tokens) + placement.start)
            batch.tokens[row, prefix] = tree.tokens[prefix]
            batch.tokens[row, columns] = tree.tokens[branches]
            batch.positions[row, prefix] = tree.positions[prefix]
            batch.positions[row, columns] = tree.positions[branches]
            batch.ends[row, prefix] = batch.ends.shape[1]  # the whole row sees the common prefix
            batch.ends[row, columns] = tree.ends[branches] + placement.start
        self._fill_sources(batches)

    def _fill_sources(self, batches: Sequence[Batch]) -> None:
        """Write the computed column that predicts each target, and the sample that the target belongs to."""
        paths: dict[int, np.ndarray] = {}
        for tree in self.trees:
            paths.update(tree.paths)
        for part in self._sample_columns():
            batch = batches[part.placement.batch]
            targets = _trained_tokens(self.samples[part.index])
            nodes = paths[part.index][targets - 1]  # of the tokens before the targets
            is_in_prefix = nodes < self.common
            batch.sources[part.place] = np.where(is_in_prefix, nodes, nodes + part.placement.start)
            batch.segment_ids[part.place] = part.index + 1

    def _sample_columns(self) -> Iterator[SampleColumns]:
        """Yield the columns of each sample's trained tokens; a tree's samples follow one another."""
        for tree, placement in zip(self.trees, self.plan.placements, strict=True):
            start = placement.start
            for index in tree.paths:
                trained = _trained_tokens(self.samples[index])
                yield SampleColumns(index, placement, slice(start, start + len(trained)), trained)
                start += len(trained)


def prefix_trees(samples: Sequence[Sample], most: int, common: int) -> Iterator[PrefixTree]:
    """Group samples by prompt into prefix trees that fit a row.

    Args:
        samples: to group.
        most: columns of the widest row: the most nodes of a tree.
        common: tokens of the common prefix of all samples. A tree has at most `most` - `common` trained
            tokens.

    Yields:
        Trees; together they hold each sample once.
    """

    def token_bytes(index: int) -> bytes:
        """Return a sample's tokens as bytes that sort as the tokens do."""
        return samples[index].tokens.astype(">u4").tobytes()  # big-endian: bytes sort as the numbers do

    # In the order of their tokens, samples with a long common prefix are neighbours.
    order = sorted(range(len(samples)), key=token_bytes)
    # Of the tree so far: number of a sample -> tokens that it shares with the sample before it.
    shared: dict[int, int] = {}
    num_nodes = 0
    num_trained = 0
    previous: Sample | None = None
    for index in order:
        sample = samples[index]
        num_sample_trained = len(_trained_tokens(sample))
        num_shared = 0
        if previous is not None:
            num_shared = _common_prefix(previous.tokens, sample.tokens)
            shorter_prompt = min(len(previous.prompt_ids), len(sample.prompt_ids))
            has_other_prompt = num_shared < shorter_prompt
            num_nodes_with_sample = num_nodes + len(sample.tokens) - num_shared
            has_too_many_nodes = num_nodes_with_sample > most
            has_too_many_trained = num_trained + num_sample_trained > most - common
            if has_other_prompt or has_too_many_nodes or has_too_many_trained:
                yield _prefix_tree(samples, shared, num_trained)
                shared = {}
                num_nodes = 0
                num_trained = 0
                num_shared = 0
        shared[index] = num_shared
        num_nodes += len(sample.tokens) - num_shared
        num_trained += num_sample_trained
        previous = sample
    if shared:
        yield _prefix_tree(samples, shared, num_trained)


def _prefix_tree(samples: Sequence[Sample], shared: dict[int, int], num_trained: int) -> PrefixTree:
    """Make a tree of samples.

    Args:
        samples: all samples.
        shared: number of a sample -> tokens that it shares with the sample before it, in the order of their
            tokens.
        num_trained: columns that the samples' trained tokens take.
    """
    paths: dict[int, np.ndarray] = {}
    path = np.zeros(0, np.int64)
    num_nodes = 0
    for index, num_shared in shared.items():
        first_new = num_nodes
        num_nodes += len(samples[index].tokens) - num_shared
        path = np.concatenate([path[:num_shared], np.arange(first_new, num_nodes)])
        paths[index] = path
    tokens = np.zeros(num_nodes, np.int32)
    positions = np.zeros(num_nodes, np.int32)
    ends = np.zeros(num_nodes, np.int32)
    for index, path in paths.items():
        tokens[path] = samples[index].tokens
        positions[path] = np.arange(len(path))
        ends[path] = path[-1] + 1  # The last path through a node decides.
    return PrefixTree(paths, tokens, positions, ends, num_trained)


def _trained_tokens(sample: Sample) -> np.ndarray:
    """Return the numbers of the tokens with a column of the loss; nothing predicts the first token."""
    return np.flatnonzero(sample.mask[1:]) + 1


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Return how many tokens two sequences begin with in common."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(np.argmax(differs)) if differs.any() else length


def _common_prefix_of_all(samples: Sequence[Sample]) -> int:
    """Return how many tokens of their prompts all samples begin with; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0
    limits = []
    for sample in samples:
        limits.append(_common_prefix(samples[0].tokens, sample.tokens))
        limits.append(len(sample.prompt_ids))
        limits.append(len(sample.tokens) - 1)
    return min(limits)
