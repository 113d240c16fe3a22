"""Full training checkpoints: parameters, optimizer, data position, counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from calibadv_jax.errors import UserError


class CheckpointStore:
    """Checkpoints by step under one folder (Orbax; a checkpoint appears only when it is complete).

    Args:
        keep: newest checkpoints that stay.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder.absolute()
        self._manager = ocp.CheckpointManager(
            self.folder, options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        )

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Writes a checkpoint and waits until it is complete.

        Args:
            state: pytree of arrays.
            extra: plain JSON values.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra)),
        )
        self._manager.wait_until_finished()

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """The state in the shardings of `abstract_state`, which may be of another mesh, and the extra.

        Raises:
            UserError: the checkpoint is of another policy or optimizer.
        """
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state), extra=ocp.args.JsonRestore()
        )
        try:
            restored = self._manager.restore(step, args=arguments)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.folder / str(step)}: does not fit this policy and optimizer; start anew with"
                f" checkpoint.resume=false or another run.dir ({' '.join(str(error).split())[:300]})"
            ) from error
        return restored["state"], restored["extra"]

    def close(self) -> None:
        self._manager.close()


def restore_params(folder: Path, abstract_params: Any, step: int | None = None) -> tuple[Any, int]:
    """Only the parameters of a checkpoint, and its step; `step` None takes the newest.

    Raises:
        UserError: there is no such checkpoint, or it is of another policy.
    """
    with ocp.CheckpointManager(folder.absolute()) as manager:
        chosen = manager.latest_step() if step is None else step
        if chosen is None or chosen not in manager.all_steps():
            raise UserError(f"{folder}: no checkpoint {'' if step is None else step} there; train first")
        arguments = ocp.args.PyTreeRestore(
            item={"params": abstract_params},
            restore_args=ocp.checkpoint_utils.construct_restore_args({"params": abstract_params}),
            partial_restore=True,
        )
        try:
            restored = manager.restore(chosen, args=ocp.args.Composite(state=arguments))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{folder / str(chosen)}: does not fit the policy: {' '.join(str(error).split())[:300]}"
            ) from error
    return restored["state"]["params"], chosen
