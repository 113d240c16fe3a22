"""How many trajectories may fail before the run stops."""

from __future__ import annotations

from collections import Counter

from calibadv_jax.core.errors import EnvironmentFailure
from calibadv_jax.core.trajectory import Group


class FailureCount:
    """Counts the trajectories that failed as groups complete, and does not wait for the rest of them.

    Args:
        total: trajectories of all groups, complete or not.
        max_share: `rollout.max_failed_share`.
    """

    def __init__(self, total: int, max_share: float):
        self.total, self.max_share = total, max_share
        self._errors: Counter[str] = Counter()

    def add(self, group: Group) -> None:
        """
        Raises:
            EnvironmentFailure: more than `max_share` of `total` have failed; it names the commonest reason.
        """
        self._errors.update(str(one.error) for one in group.failed)
        failed = self._errors.total()
        if failed > self.max_share * self.total:
            ((reason, count),) = self._errors.most_common(1)
            limit = f"more than rollout.max_failed_share={self.max_share:g}"
            raise EnvironmentFailure(
                f"{failed} of {self.total} trajectories failed, {limit}; the commonest reason"
                f" ({count} times): {reason}"
            )
