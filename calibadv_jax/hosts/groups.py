"""Every process writes its share of a step's groups, and all get all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from calibadv_jax.core.trajectory import Group, Question
from calibadv_jax.hosts.exchange import Hosts


class SharedGroups:
    """Begins the groups whose number falls to this process, and exchanges them when all of these are there.

    All processes ask for the same groups in the same order, so that nobody need say which ones.

    Args:
        begin: starts the rollout of (number, question) in this process.
    """

    def __init__(self, begin: Callable[[int, Question], Future[Group]], hosts: Hosts):
        self._begin, self._hosts = begin, hosts
        self._mine: dict[int, Future[Group]] = {}
        self._asked: dict[int, Future[Group]] = {}  # of all processes

    def begin(self, number: int, question: Question) -> Future[Group]:
        """A future that all processes fulfil in the same call of `wait`, whoever writes the group."""
        if number % self._hosts.count == self._hosts.index:
            self._mine[number] = self._begin(number, question)
        self._asked[number] = Future()
        return self._asked[number]

    def wait(self, _: list[Future[Group]]) -> None:
        """Waits until this process' groups are there, and then until all are.

        Raises:
            The error of a rollout, or that of another process; see `Hosts.exchange`.
        """
        while running := [future for future in self._mine.values() if not future.done()]:
            wait(running, None, FIRST_COMPLETED)
        written = {number: future.result() for number, future in self._mine.items()}
        self._mine.clear()
        for groups in self._hosts.exchange("groups", written):
            for number, group in groups.items():
                self._asked.pop(number).set_result(group)
