"""Several processes of a run as threads, with a key-value store in place of JAX's coordination service."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax

from calibadv_jax.distributed.process_group import MultiProcessGroup


class KeyValueStore:
    """The key-value store of JAX' coordination service, for threads."""

    def __init__(self):
        self.kept, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.kept, key
            self.kept[key] = value
            self.changed.notify_all()

    key_value_set_bytes = key_value_set

    def key_value_dir_get(self, prefix):
        with self.changed:
            return [(key, value) for key, value in self.kept.items() if key.startswith(prefix)]

    def key_value_delete(self, key):
        with self.changed:
            del self.kept[key]

    def blocking_key_value_get_bytes(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.kept, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.kept[key]


def run_all(work, count=2, left=0):
    """Do a function of a process group in several of them at once; return its result or error in each."""
    notes, made = KeyValueStore(), []

    def run_process(index):
        process_group = MultiProcessGroup(notes, index, count, timeout=60.0)
        made.append(process_group)
        try:
            return work(process_group), process_group.can_save_together
        except BaseException as error:
            return error, process_group.can_save_together

    try:
        with ThreadPoolExecutor(count) as threads:
            results = list(threads.map(run_process, range(count)))
    finally:
        for process_group in made:
            process_group.watchdog.close()
    kept = [key for key in notes.kept if key.startswith("calibadv_exchange")]
    assert len(kept) <= (left or count)  # of the last barrier alone
    return results
