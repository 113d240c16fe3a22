"""Signals: the first one stops in order, work that is held ends whole, a second one ends at once."""

import os
import signal
import subprocess
import sys

import pytest

from calibadv_jax.stopping import Stop


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_raises_with_its_status(number, status):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as stop, Stop():
        os.kill(os.getpid(), number)
        pytest.fail("went on")
    assert stop.value.code == status
    assert signal.getsignal(number) is before


def test_held_work_ends_whole_before_the_run_stops():
    done = []
    with pytest.raises(SystemExit) as end, Stop() as stop:
        with stop.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("update")
        done.append("next step")
    assert end.value.code == 143 and done == ["update"]


def test_an_error_in_held_work_is_not_hidden_by_a_signal():
    with pytest.raises(ValueError, match="broken"), Stop() as stop, stop.held():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("broken")


def test_a_second_signal_ends_the_process_at_once():
    program = (
        "import os, signal, sys\nfrom calibadv_jax.stopping import Stop\nwith Stop() as stop, stop.held():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('held', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    print('went on', flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (130, "held\n")
