"""Groups of trajectories: one coroutine for each trajectory, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from calibadv_jax.config import RolloutConfig
from calibadv_jax.core.errors import EnvironmentFailure, RequestFailed, UserError
from calibadv_jax.core.seeds import random_state
from calibadv_jax.core.trajectory import Group, Question, Trajectory
from calibadv_jax.rollout.agent import Prefix, RolloutContext, failure_text, run_trajectory
from calibadv_jax.rollout.concurrency import gather

T = TypeVar("T")


def wait_for_any(futures: Collection[Future[Any]]) -> object:
    """Wait until one of the futures is done.

    Args:
        futures: futures of any results. Without any, the function returns at once.

    Returns:
        The futures that are done and those that are not; callers do not need them.
    """
    return wait(futures, return_when=FIRST_COMPLETED)


def _ignore_group(group: Group) -> None:
    """Take no notice of a complete group."""


def _publish_unchanged(version: int, params: dict[str, Any]) -> Any:
    """Return the parameters as the sampler's input."""
    return params


def _no_group_is_tied(groups: Sequence[Group]) -> list[bool]:
    return [False] * len(groups)


class FailureCount:
    """Counts failed trajectories as groups complete.

    Args:
        total: number of trajectories of all groups.
        max_share: share of them that may fail, in [0, 1].
    """

    def __init__(self, total: int, max_share: float):
        self.total = total
        self.max_share = max_share
        self._errors: Counter[str] = Counter()

    def add(self, group: Group) -> None:
        """Count the failed trajectories of a complete group.

        Args:
            group: a complete group; each group is added once.

        Raises:
            EnvironmentFailure: if more than `max_share` of all trajectories have failed; it says the most
                common reason.
        """
        self._errors.update(str(trajectory.error) for trajectory in group.failed)
        failed = self._errors.total()
        if failed > self.max_share * self.total:
            reason, count = self._errors.most_common(1)[0]
            raise EnvironmentFailure(
                f"{failed} of {self.total} trajectories failed, more than"
                f" rollout.max_failed_share={self.max_share:g}; the commonest reason ({count} times):"
                f" {reason}"
            )


def _no_demonstrations(question: Question, version: int, rng: np.random.Generator) -> list[Trajectory]:
    return []


def _no_near_misses(trajectories: Sequence[Trajectory], count: int) -> list[Prefix]:
    return []


@dataclass(frozen=True)
class GroupParts:
    """What a group of a training run holds beside trajectories from the prompt.

    `run.wiring.group_parts` makes it from the config, with the rules of `contrib.group_demonstrations` and
    `contrib.near_misses`.

    Attributes:
        demonstrations: Returns the demonstrations in a group, given its question, the version of the policy
            that begins it, and a generator that chooses among them. They are not scored.
        second_round: Trajectories that are sampled after the others of their group.
        near_misses: Returns at most so many prefixes for the second round, given the trajectories of the
            first one, failed ones included.
    """

    demonstrations: Callable[[Question, int, np.random.Generator], list[Trajectory]] = _no_demonstrations
    second_round: int = 0
    near_misses: Callable[[Sequence[Trajectory], int], list[Prefix]] = _no_near_misses


NO_PARTS = GroupParts()


async def collect_group(
    context: RolloutContext,
    question: Question,
    slots: asyncio.Semaphore,
    seed: int,
    name: str,
    parts: GroupParts = NO_PARTS,
    demonstrations: Sequence[Trajectory] = (),
) -> Group:
    """Write the trajectories of one question, `rollout.group_size` with its demonstrations.

    The second round begins when the first one has ended. Each trajectory of it continues a near miss, or
    begins with the prompt where there are not enough near misses.

    Args:
        context: services and settings.
        question: the question.
        slots: limits the trajectories of all groups that are written at the same time.
        seed: seed of the group.
        name: name of the group, unique among those in flight. The sessions at the sampler are ``name/index``.
        parts: the group's second round.
        demonstrations: fewer than the group has members; they get its last indices.

    Returns:
        The finished and the failed trajectories.

    Raises:
        UserError: as `run_trajectory`; the other trajectories are cancelled.
    """

    async def write(index: int, prefix: Prefix | None = None) -> Trajectory:
        """Write a trajectory once a slot is free, and count it as ended whatever happens."""
        try:
            async with slots:
                return await run_trajectory(context, question, index, seed, f"{name}/{index}", prefix)
        finally:
            context.work["ended"] += 1

    num_sampled = context.rollout.group_size - len(demonstrations)
    num_first = num_sampled - parts.second_round
    context.work["begun"] += num_sampled
    trajectories = await gather([write(index) for index in range(num_first)])
    if parts.second_round:
        prefixes: list[Prefix | None] = [*parts.near_misses(trajectories, parts.second_round)]
        prefixes += [None] * (parts.second_round - len(prefixes))
        second = [write(index, prefix) for index, prefix in enumerate(prefixes, num_first)]
        trajectories += await gather(second)
    judged = [_judged(context, demonstration) for demonstration in demonstrations]
    for index, demonstration in enumerate(await gather(judged), num_sampled):
        trajectories.append(replace(demonstration, index=index))
    return Group.from_attempts(question, trajectories)


async def _judged(context: RolloutContext, demonstration: Trajectory) -> Trajectory:
    """Return a demonstration with the judge's verdict on its answer, if answers are judged."""
    if context.judge is None or demonstration.answer is None:
        return demonstration
    try:
        return replace(demonstration, metrics=await context.judge.score(demonstration))
    except RequestFailed as error:
        return replace(demonstration, error=failure_text(error))


async def collect_groups(
    context: RolloutContext,
    questions: Sequence[Question],
    seed: int,
    name: str,
    complete: Callable[[Group], object] = _ignore_group,
) -> list[Group]:
    """Write a group for each question.

    Args:
        context: services and settings.
        questions: the questions.
        seed: seed of all groups.
        name: beginning of the groups' names, unique among those in flight.
        complete: called with each group as soon as it is complete.

    Returns:
        The groups, in the order of the questions.

    Raises:
        UserError: as `run_trajectory`; the other groups are cancelled.
        EnvironmentFailure: if more than `rollout.max_failed_share` of the trajectories failed.
    """
    rollout = context.rollout
    slots = asyncio.Semaphore(rollout.max_concurrency)
    failures = FailureCount(len(questions) * rollout.group_size, rollout.max_failed_share)

    async def collect(number: int, question: Question) -> Group:
        """Write the group of a question, report it, and count its failures."""
        group = await collect_group(context, question, slots, seed, f"{name}/{number}")
        complete(group)
        failures.add(group)
        return group

    return await gather([collect(number, question) for number, question in enumerate(questions)])


class Rollouts:
    """Writes trajectories on an event loop in a thread of its own; a context manager.

    The services of the context are used on that event loop only, and closed at the end of the block.

    Args:
        context: services and settings.
        seed: seed of the run.
        publish: turns the parameters of a version into the sampler's input. All processes of a run call it
            together. By default parameters are the input.

    Attributes:
        parts: what the groups of `begin` hold beside trajectories from the prompt.
        version: version of the newest parameters that `load` handed over: the number of trained steps.
    """

    def __init__(
        self,
        context: RolloutContext,
        seed: int,
        publish: Callable[[int, dict[str, Any]], Any] = _publish_unchanged,
    ):
        self.context = context
        self.seed = seed
        self.publish = publish
        self.parts = NO_PARTS
        self.version = 0
        self.collected: Counter[str] = Counter()  # work of `collect`; that of `begin` is in the context
        self._slots = asyncio.Semaphore(context.rollout.max_concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)

    def __enter__(self) -> Rollouts:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.run(self._finish())
        except UserError:
            if kind is None:  # otherwise it would hide the error that ends the block
                raise
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def load(self, version: int, published: Any) -> None:
        """Hand parameters to the sampler; after the return the parameters may be donated.

        Args:
            version: version of the policy; it ascends within a run.
            published: a result of `publish`.

        Raises:
            UserError: if the sampler refuses the parameters.
            RuntimeError: if the embedded sampler, which runs no rollout ahead of a step, still writes a
                completion.
        """
        self.run(self.context.sampler.load(version, published))
        self.version = version

    def begin(self, number: int, question: Question) -> Future[Group]:
        """Start the rollout of a group in the background.

        Args:
            number: number of the group in the run. It seeds the group, so that a question that comes twice
                gets other trajectories.
            question: the question.

        Returns:
            A future of the group. It raises the errors of `collect_group`; cancelling it cancels the rollout.
        """
        seed = int(random_state(self.seed, number, "group").integers(2**31))
        rng = random_state(self.seed, number, "demonstrations")
        demonstrations = self.parts.demonstrations(question, self.version, rng)
        return self.submit(
            collect_group(
                self.context, question, self._slots, seed, f"group{number}", self.parts, demonstrations
            )
        )

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop in the background.

        Args:
            coroutine: a coroutine that has not started.

        Returns:
            A future of its result or error. Cancelling the future cancels the coroutine.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def collect(
        self,
        questions: Sequence[Question],
        name: str,
        seed: int,
        complete: Callable[[Group], object] = _ignore_group,
        **changes: Any,
    ) -> list[Group]:
        """Write a group for each question, and wait for all of them.

        Args:
            questions: the questions.
            name: beginning of the groups' names, unique among those in flight.
            seed: seed of all groups.
            complete: called with each group as soon as it is complete, on the event loop.
            **changes: keys of the section `rollout` that have another value here.

        Returns:
            The groups, in the order of the questions.

        Raises:
            UserError: as `collect_groups`.
            EnvironmentFailure: as `collect_groups`.
        """
        rollout = replace(self.context.rollout, **changes)
        context = replace(self.context, rollout=rollout, work=self.collected)
        return self.run(collect_groups(context, questions, seed, name, complete))

    def progress(self, of_evaluation: bool = False) -> Callable[[], tuple[int, int, str]]:
        """Return a function for `Console.live` that measures the work from here on.

        Args:
            of_evaluation: whether to measure the trajectories of `collect`, rather than those of `begin`.

        Returns:
            A function that returns the number of trajectories that have ended since, the number of those that
            were running or have begun since, and the rates of searches and tokens in words.
        """
        work = self.collected if of_evaluation else self.context.work
        before = Counter(work)
        start = time.monotonic()

        def progress() -> tuple[int, int, str]:
            """Return the work since `before`."""
            seconds = time.monotonic() - start
            num_ended = work["ended"] - before["ended"]
            num_begun = work["begun"] - before["ended"]
            searches = (work["searches"] - before["searches"]) / seconds
            tokens = (work["tokens"] - before["tokens"]) / seconds
            return num_ended, num_begun, f"{searches:.1f} searches/s, {tokens:,.0f} sampled tok/s"

        return progress

    def metrics(self) -> dict[str, float]:
        """Return the sampler's counts since the program's start, by their names in metrics.jsonl.

        Returns:
            Name of the metric -> count; empty if the sampler counts nothing.
        """
        return self.context.sampler.metrics()

    def prompt_logprobs(self, token_ids: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the sampler's log-probabilities of given tokens, under each copy of the weights.

        Args:
            token_ids: ids of T tokens.

        Returns:
            Name of the copy, such as a vLLM worker's URL -> float32 [T - 1], the log-probabilities of tokens
            1 to T - 1 in nats. Empty if the sampler uses the learner's own weights.

        Raises:
            UserError: if the sampler refuses the request.
        """
        return self.run(self.context.sampler.prompt_logprobs(token_ids))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait for its result.

        Args:
            coroutine: a coroutine that has not started.

        Returns:
            The result of the coroutine.

        Raises:
            BaseException: the error of the coroutine, or the one that interrupts this thread, such as
                SystemExit after a signal. In the second case the coroutine is cancelled.
        """
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # if this thread is interrupted, the coroutine must not go on
            raise

    async def _finish(self) -> None:
        """Cancel running tasks, and close all services before an error is raised."""
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        context = self.context
        failures = []
        for service in (*context.actions, context.judge, context.retriever, context.sampler):
            if service is None:
                continue
            try:
                await service.close()
            except UserError as error:
                failures.append(error)
        if failures:
            raise failures[0]


@dataclass
class _Started:
    """A group whose rollout has begun."""

    number: int  # in the run
    question: Question
    step: int  # the step to train when it began
    future: Future[Group]


class RolloutStream:
    """Hands groups to the learner; rollouts run ahead by a bounded number of steps.

    Groups are numbered over the whole run, and not assigned to a step in advance. A group begins once the
    policy is new enough to train it within `max_staleness` steps, even if all others finish first. With
    `max_staleness` 0 training is on-policy: all groups of a step begin together, and the step waits for all
    of them.

    Args:
        begin: starts the rollout of a group in the background, given its number and question.
        questions: endless questions.
        config: the section `rollout`. `questions_per_step` groups are handed over at a time. `take` raises an
            error if more than `max_failed_share` of a step's trajectories failed. At most `dynamic_sampling`
            groups a step are replaced.
        are_tied: returns for each group whether it is tied, and so to be replaced. By default none is.
        wait_for: waits until one of the futures of running groups is done.
    """

    def __init__(
        self,
        begin: Callable[[int, Question], Future[Group]],
        questions: Iterator[Question],
        config: RolloutConfig,
        are_tied: Callable[[Sequence[Group]], Sequence[bool]] = _no_group_is_tied,
        wait_for: Callable[[list[Future[Group]]], object] = wait_for_any,
    ):
        self.config = config
        self.per_step = config.questions_per_step
        self._begin = begin
        self._questions = questions
        self._are_tied = are_tied
        self._wait_for = wait_for
        # Numbers of groups over the whole run.
        self._num_begun = 0
        self._num_trained = 0  # replaced groups count as trained
        # Groups of a resumed run that had begun before: they begin before all others.
        self._pending: deque[tuple[int, Question]] = deque()
        self._running: dict[int, _Started] = {}
        # Groups of the last `take`, and those that others replaced in it; both are empty after `commit`.
        self._training: list[_Started] = []
        self._replaced: list[_Started] = []

    @property
    def replaced(self) -> list[Group]:
        """Groups that others replaced in the last `take`; none after `commit`."""
        return [group.future.result() for group in self._replaced]

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` takes. Groups that are not trained yet will begin again.

        Returns:
            "asked": the number of questions taken so far; "pending": pairs of a group's number and the id of
            its question, by number.
        """
        pending: dict[int, str] = {}
        for group in (*self._training, *self._replaced, *self._running.values()):
            pending[group.number] = group.question.id
        for number, question in self._pending:
            pending[number] = question.id
        return {"asked": self._num_begun + len(self._pending), "pending": sorted(pending.items())}

    def restore(self, state: Mapping[str, Any], questions: Mapping[str, Question]) -> None:
        """Continue from a state, before any group begins.

        Args:
            state: a result of `state`.
            questions: all questions, by id.

        Raises:
            UserError: if a question of the state is missing.
        """
        for _, name in state["pending"]:
            if name not in questions:
                raise UserError(
                    f"data.train: question {name!r} of the checkpoint is missing; restore the file, or choose"
                    " another run.dir"
                )
        self._pending = deque((number, questions[name]) for number, name in state["pending"])
        self._num_begun = state["asked"] - len(self._pending)
        self._num_trained = self._num_begun

    def take(self, step: int) -> list[Group]:
        """Wait for the groups that a step trains, and begin as many others as may run meanwhile.

        If some of them are tied and may be replaced, groups that begin now take their place, whichever are
        complete first.

        Args:
            step: the step to train: the number of steps trained so far.

        Returns:
            The `per_step` oldest complete groups, once no other group must be waited for. Until `commit` they
            count as untrained.

        Raises:
            EnvironmentFailure: if too many trajectories failed; all other groups are cancelled.
            UserError: the error of a rollout; all other groups are cancelled.
        """
        self._begin_allowed(step)
        while True:
            complete = sorted(number for number, group in self._running.items() if group.future.done())
            oldest = complete[: self.per_step]
            try:
                groups = [self._running[number].future.result() for number in complete]
                self._check_failures(groups[: self.per_step])
            except BaseException:
                self.close()
                raise
            if len(complete) < self.per_step or not self._is_in_time(oldest, step):
                self._wait_for([group.future for group in self._running.values() if not group.future.done()])
            elif self._replace_tied(oldest):
                self._begin_allowed(step)
            else:
                break
        self._training = [self._running.pop(number) for number in oldest]
        return [group.future.result() for group in self._training]

    def _is_in_time(self, chosen: Sequence[int], step: int) -> bool:
        """Return whether later steps can train all groups but the chosen ones within `max_staleness`."""
        max_staleness = self.config.max_staleness
        waiting = self._running.keys() - set(chosen)
        last_steps = [self._running[number].step + max_staleness for number in waiting]
        for due in range(step, step + max_staleness + 1):
            num_due = sum(last <= due for last in last_steps)
            if num_due > (due - step) * self.per_step:
                return False
        return True

    def _replace_tied(self, numbers: Sequence[int]) -> bool:
        """Take out as many tied groups as may be replaced; return whether there was one."""
        room = self.config.dynamic_sampling - len(self._replaced)
        if room <= 0:
            return False
        are_tied = self._are_tied([self._running[number].future.result() for number in numbers])
        tied = [number for number, is_tied in zip(numbers, are_tied, strict=True) if is_tied][:room]
        self._replaced += [self._running.pop(number) for number in tied]
        return bool(tied)

    def commit(self) -> None:
        """Count the groups of the last `take` as trained."""
        self._num_trained += len(self._training) + len(self._replaced)
        self._training = []
        self._replaced = []

    def close(self) -> None:
        """Cancel all running groups."""
        for group in self._running.values():
            group.future.cancel()

    def _begin_allowed(self, step: int) -> None:
        """Begin as many groups as `max_staleness` allows."""
        # The bound is counted in groups, not in steps: a resumed run may have another number of them a step.
        num_done = self._num_trained + len(self._replaced)
        max_begun = num_done + (1 + self.config.max_staleness) * self.per_step
        while self._num_begun < max_begun:
            if not self._pending:
                self._pending.append((self._num_begun, next(self._questions)))
            # The group stays pending until it runs, so that `state` has it even if `_begin` is interrupted.
            number, question = self._pending[0]
            self._running[number] = _Started(number, question, step, self._begin(number, question))
            self._pending.popleft()
            self._num_begun += 1

    def _check_failures(self, groups: Sequence[Group]) -> None:
        """Raise EnvironmentFailure if too many trajectories of these groups failed, for a whole step."""
        group_size = max((len(group.attempts) for group in groups), default=0)
        failures = FailureCount(self.per_step * group_size, self.config.max_failed_share)
        for group in groups:
            failures.add(group)
