"""One process at a time writes into a place, whoever dies, and it says who has it."""

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from calibadv_jax.commands import sft, train
from calibadv_jax.config import Config, RunConfig, SftConfig, SftPhase
from calibadv_jax.core.errors import EnvironmentFailure, UserError
from calibadv_jax.core.locking import locked_output, locked_run

HOLD = """
import subprocess, sys, time
from pathlib import Path
from calibadv_jax.core.locking import locked_run
with locked_run(Path(sys.argv[1]), print):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    time.sleep(60)
"""


def silent(_):
    pytest.fail("nothing is wrong with this file system")


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def holder(tmp_path):
    """A process that holds tmp_path/run, and the id of a child service of it."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    yield process, child
    process.kill()
    process.communicate()
    with suppress(ProcessLookupError):
        os.kill(child, 9)


def test_second_process_reads_the_owner(tmp_path, holder):
    owner = f"process {holder[0].pid} on {os.uname().nodename} since 2.*\\(-c "
    with pytest.raises(EnvironmentFailure, match=f"^run.dir={tmp_path}/run is in use by {owner}") as caught:
        locked_run(tmp_path / "run", silent).__enter__()
    assert "wait until it has ended, stop it, or choose another folder" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_death_of_owner_releases_the_lock(tmp_path, holder):
    process, child = holder
    process.kill()
    process.wait()
    os.kill(child, 0)  # raises where it is gone
    with locked_run(tmp_path / "run", silent):
        assert f"process {os.getpid()} " in (tmp_path / "run/.lock").read_text()
    assert not (tmp_path / "run/.lock").exists()


def test_forked_copy_neither_holds_nor_releases(tmp_path):
    context = multiprocessing.get_context("fork")
    go_on = context.Event()

    with locked_run(tmp_path, silent):
        process = context.Process(target=go_on.wait, args=(30,))
        process.start()
    with locked_run(tmp_path, silent):  # while the copy lives
        other = context.Process(target=lambda: None)  # its end does not free the original's lock
        other.start()
        other.join()
        file = os.open(tmp_path / ".lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(file)
    go_on.set()
    process.join()
    assert process.exitcode == other.exitcode == 0


def test_outermost_block_releases(tmp_path):
    with locked_run(tmp_path, silent):
        with suppress(ValueError), locked_run(tmp_path, silent):
            raise ValueError
        assert (tmp_path / ".lock").exists()
    assert not any(tmp_path.iterdir())


def test_lock_file_that_is_seen_is_locked(tmp_path, monkeypatch):
    """Up to its removal: another process that opened it earlier would hold a file without a name."""
    unlink, removals = Path.unlink, []

    def unlink_locked(path, **options):
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        removals.append(path)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink_locked)
    with locked_run(tmp_path, silent):
        pass
    assert removals == [tmp_path / ".lock"] and not any(tmp_path.iterdir())


def test_error_in_the_block_releases(tmp_path):
    with pytest.raises(ValueError, match="broken"), locked_run(tmp_path, silent):
        raise ValueError("broken")
    assert not (tmp_path / ".lock").exists()
    with locked_run(tmp_path, silent):
        assert (tmp_path / ".lock").exists()


def test_files_and_folders_of_the_block_stay(tmp_path):
    with locked_run(tmp_path / "run", silent):
        (tmp_path / "run/metrics.jsonl").touch()
    (tmp_path / "existing").mkdir()
    with locked_run(tmp_path / "existing", silent):
        pass
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert names == {"run", "run/metrics.jsonl", "existing"}


def test_outputs_of_one_folder_have_their_own_locks(tmp_path):
    with locked_output(tmp_path / "hf", "export.output", silent):
        with locked_output(tmp_path / "other", "export.output", silent):
            names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [".hf.lock", ".other.lock"]
    assert not any(tmp_path.iterdir())


def test_output_is_locked_beside_its_name_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with locked_output(tmp_path / "hf", "export.output", silent):
        assert [path.name for path in tmp_path.iterdir()] == [".hf.lock"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_warns(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    warnings = []
    with locked_run(tmp_path, warnings.append):
        (warning,) = warnings
    assert warning.startswith(f"run.dir={tmp_path}: its file system has no locks") and "\n" not in warning


def test_other_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run.dir=.*file cannot be written \(.*\); choose another folder"):
        locked_run(tmp_path / "file", silent).__enter__()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(fcntl, "flock", failing(errno.EIO))
        locked_run(tmp_path, silent).__enter__()
    with locked_run(tmp_path, silent), pytest.raises(BlockingIOError), (tmp_path / ".lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_replaced_lock_file_is_locked_again(tmp_path, monkeypatch):
    path, flock = tmp_path / "run/.lock", fcntl.flock

    def late(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()  # by its owner; another process has made the next one
        path.touch()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked_run(path.parent, silent), path.open() as other, pytest.raises(BlockingIOError):
        flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("command", [train, sft])
def test_second_start_changes_nothing(tmp_path, holder, command):
    folder = tmp_path / "run"
    (folder / "checkpoints/3.orbax-checkpoint-tmp-0").mkdir(parents=True)  # of the first one, in flight
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    config = Config(run=RunConfig(dir=str(folder)), sft=SftConfig(phases=[SftPhase(1)]))
    with pytest.raises(UserError, match=f"is in use by process {holder[0].pid} "):
        command.run(config)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    """A folder from somebody else may hold one; the owner would be written into the file that it names."""
    notes = tmp_path / "notes"
    notes.write_text("mine")
    (tmp_path / ".report.html.lock").symlink_to(notes)
    with pytest.raises(UserError, match=r"^--output=.*report.html cannot be written .*report.html.lock"):
        locked_output(tmp_path / "report.html", "--output", silent).__enter__()
    assert notes.read_text() == "mine"
