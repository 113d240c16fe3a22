"""All-gather of short values through the key-value store of JAX's coordination service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from calibadv_jax.distributed.serialization import from_bytes, to_bytes

POLL_MILLISECONDS = 2000  # longest wait for a key; between two waits the handler of a signal may run


class AllGather:
    """All-gather of short values; every call is a barrier.

    Args:
        client: Client of JAX's coordination service.
        root: Prefix of the keys; it must differ between the all-gathers of a run.
        index: Number of this process.
        count: Number of processes.
    """

    def __init__(self, client: Any, root: str, index: int, count: int):
        self._client = client
        self._root = root
        self._index = index
        self._count = count
        self._next_call = 0  # number of the next call, the same in all processes

    def __call__(self, value: Any, check: Callable[[], object]) -> list[Any]:
        """Return the values of all processes.

        Args:
            value: Value of this process; see `serialization.to_bytes`.
            check: Called whenever another process has been missing for POLL_MILLISECONDS. An error that it
                raises ends the wait.

        Returns:
            One value for each process, in the order of their numbers.

        Raises:
            jax.errors.JaxRuntimeError: The coordination service cannot be reached: process 0 has ended.
        """
        call = self._next_call
        self._next_call += 1
        self._client.key_value_set_bytes(self._key(call, self._index), to_bytes(value))
        values = [self._wait(self._key(call, index), check) for index in range(self._count)]
        if call > 0:
            # Every process has taken part in this call, so all have read the values of the previous call.
            self._client.key_value_delete(self._key(call - 1, self._index))
        return values

    def _key(self, call: int, index: int) -> str:
        return f"{self._root}/{call}/{index}"

    def _wait(self, key: str, check: Callable[[], object]) -> Any:
        while True:
            try:
                return from_bytes(self._client.blocking_key_value_get_bytes(key, POLL_MILLISECONDS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            check()
