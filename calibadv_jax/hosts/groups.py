"""Every process writes its share of the groups, and all get all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait

from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.hosts.exchange import Hosts

LOOK = 1.0  # seconds between two exchanges of what is complete, where groups run ahead


class SharedGroups:
    """Begins the groups whose number falls to this process, and exchanges those that are complete.

    All processes ask for the same groups in the same order, so that nobody need say which ones.

    Args:
        begin: starts the rollout of (number, question) in this process.
        run_ahead: whether there are groups that later steps train. Else a step waits for all of its own, and
            so they are exchanged once.
    """

    def __init__(self, begin: Callable[[int, Question], Future[Group]], hosts: Hosts, run_ahead: bool):
        self._begin, self._hosts, self._run_ahead = begin, hosts, run_ahead
        self._mine: dict[int, Future[Group]] = {}
        self._asked: dict[int, Future[Group]] = {}  # of all processes

    def begin(self, number: int, question: Question) -> Future[Group]:
        """A future that all processes fulfil in the same call of `wait`, whoever writes the group.

        If it is cancelled, the group is not written to its end.
        """
        asked = self._asked[number] = Future()
        if number % self._hosts.count == self._hosts.index:
            mine = self._mine[number] = self._begin(number, question)
            asked.add_done_callback(lambda future: future.cancelled() and mine.cancel())
        return asked

    def wait(self, _: list[Future[Group]]) -> None:
        """Waits until all groups are there or, where some run ahead, until one is.

        Raises:
            The error of a rollout, or that of another process; see `Hosts.exchange`.
        """
        seconds, until = (LOOK, FIRST_COMPLETED) if self._run_ahead else (None, ALL_COMPLETED)
        while True:
            wait(self._mine.values(), seconds, until)
            written = {number: future.result() for number, future in self._mine.items() if future.done()}
            self._mine = {number: future for number, future in self._mine.items() if number not in written}
            completed = self._hosts.exchange("groups", written)
            for number, group in (item for groups in completed for item in groups.items()):
                self._asked.pop(number).set_result(group)
            if any(completed):
                return
