"""Divide a step's groups between the processes, and give every process all complete groups."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait

from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.distributed.process_group import ProcessGroup

EXCHANGE_SECONDS = 1.0  # longest wait between two exchanges of complete groups, if groups run ahead


class SharedGroups:
    """Begin the groups whose number falls to this process, and exchange complete groups.

    All processes begin the same groups in the same order.

    Args:
        begin: Starts the rollout of (number, question) in this process.
        process_group: The processes of the run.
        run_ahead: Whether groups of later steps are written meanwhile. If not, a step waits for all of its
            own groups, and exchanges them once.
    """

    def __init__(
        self, begin: Callable[[int, Question], Future[Group]], process_group: ProcessGroup, run_ahead: bool
    ):
        self._begin = begin
        self._process_group = process_group
        self._run_ahead = run_ahead
        self._rollouts: dict[int, Future[Group]] = {}  # groups that this process is writing, by number
        self._pending: dict[int, Future[Group]] = {}  # groups of all processes that are not complete yet

    def begin(self, number: int, question: Question) -> Future[Group]:
        """Begin a group in the process to which it falls.

        Args:
            number: Number of the group, which decides its process.
            question: Question of the group.

        Returns:
            A future that all processes fulfil in the same call of `wait`. Cancelling it cancels the rollout.
        """
        shared: Future[Group] = Future()
        self._pending[number] = shared
        if number % self._process_group.process_count == self._process_group.process_index:
            rollout = self._begin(number, question)
            self._rollouts[number] = rollout

            def cancel_rollout(future: Future[Group]) -> None:
                """Cancel the rollout if the shared future was cancelled."""
                if future.cancelled():
                    rollout.cancel()

            shared.add_done_callback(cancel_rollout)
        return shared

    def wait(self, _: list[Future[Group]]) -> None:
        """Wait until all groups are complete, or at least one if groups run ahead.

        The futures that `begin` returned for the complete groups are fulfilled in all processes.

        Args:
            _: Not used; `RolloutStream` passes the futures that are not done.

        Raises:
            Exception: The error of a rollout of this process, of any type.
            UserError: Another process stops with an error.
            SystemExit: Another process, or this one, stops after a signal.
        """
        while True:
            if self._run_ahead:
                wait(self._rollouts.values(), EXCHANGE_SECONDS, FIRST_COMPLETED)
            else:
                wait(self._rollouts.values(), None, ALL_COMPLETED)
            completed_here = {
                number: rollout.result() for number, rollout in self._rollouts.items() if rollout.done()
            }
            for number in completed_here:
                del self._rollouts[number]
            completed_by_process = self._process_group.all_gather("groups", completed_here)
            for groups in completed_by_process:
                for number, group in groups.items():
                    self._pending.pop(number).set_result(group)
            if any(completed_by_process):
                return
