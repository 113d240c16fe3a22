"""Real processes that join: what they exchange, what is refused, and with which status each ends."""

import json
import socket
import subprocess
import sys

import hosts_rig
import pytest

# The imports take longest: every process is a fork of one program, before it has a device.
PROGRAM = """
import json, os, signal, sys, threading
import jax, numpy as np
from jax.experimental import multihost_utils
from calibadv_jax.cli import end
from calibadv_jax.config import Config, DistributedConfig, RunConfig
from calibadv_jax.core.errors import UserError
from calibadv_jax.hosts import joining, watch

watch.PERIOD, watch.LAST_WORDS, joining.MARGIN = 0.1, 0.5, 2.0
SLURM = {"STEP_NODELIST": "127.0.0.1", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "JOB_ID": "1"}

def refuse():
    raise UserError("run.dir=x holds another experiment")

def work(name, index, port):
    count = 3 if name in ("signal", "kill") else 2  # "signal": of which the last one never comes
    place = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": count, "process_id": index}
    if name == "signal" and index:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    if name in ("slurm", "undetected"):
        place = {"coordinator_address": "auto"}
    if name == "slurm":
        os.environ |= {f"SLURM_{key}": value for key, value in SLURM.items()}
    jax.config.update("jax_num_cpu_devices", 1 + index * (name == "devices"))
    section = DistributedConfig(**place, timeout=5.0)
    with joining.joined(Config(distributed=section, run=RunConfig(seed=index * (name == "config")))) as hosts:
        if name == "fault" and index:
            raise ValueError("a fault")
        if name == "disk" and index:
            raise OSError(28, "No space left on device", "metrics.jsonl")
        if name == "first":
            hosts.first("folder", refuse)
        if name == "kill":  # while the others wait for it in a program of all devices
            if index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            multihost_utils.process_allgather(np.zeros(9))
        values = hosts.exchange("values", np.full(5 + 9995 * index, index))  # a short and a long one
        sys.stderr.write(f"{hosts.count} of {[(len(each), int(each.sum())) for each in values]}")

places, statuses = {}, {}
for name, index, port, path in json.loads(sys.argv[1]):
    if pid := os.fork():
        places[pid] = path
    else:
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), 2)
        end(lambda: work(name, index, port))
while places:
    pid, status = os.wait()
    statuses[places.pop(pid)] = os.waitstatus_to_exitcode(status)
print(json.dumps(statuses))
"""
BOTH = "2 of [(5, 0), (10000, 10000)]"
AGAIN = "start all processes again"
LOST = "error: process 1 (HOST) is lost: no sign of life for"
ENDS = {  # of each process: its status, and the end of what it says
    "agree": [(0, BOTH), (0, BOTH)],
    "config": [
        (2, "process 1 (HOST) has another section 'run' in its config than process 0 (HOST): start"),
        (2, "process 0 (HOST) has another section 'run' in its config than process 1 (HOST): start"),
    ],
    "devices": [(2, "the processes have [1, 2] devices")] * 2,
    "fault": [(75, f"process 1 (HOST) has ended: ValueError a fault; {AGAIN}"), (1, "ValueError: a fault")],
    "disk": [(75, "process 1 (HOST) has ended: OSError"), (75, "error: metrics.jsonl: No space left")],
    "first": [(2, "error: run.dir=x"), (2, "process 0 (HOST) has ended: run.dir=x")],
    "signal": [(75, "error: process 1 ended before all had started"), (143, "stopped")],
    "kill": [(75, LOST), (-9, ""), (75, LOST)],
    "slurm": [(0, "1 of [(5, 0)]")],
    "undetected": [(75, "could not join the job's processes (auto)")],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Status and standard error of each process of ENDS, by its name and number."""
    folder = tmp_path_factory.mktemp("pairs")
    starts = []
    for name, expected in ENDS.items():
        port = hosts_rig.free_port()
        starts += [(name, index, port, str(folder / f"{name}{index}")) for index in range(len(expected))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(starts)],
        cwd=hosts_rig.ROOT,
        env=hosts_rig.environment(1),
        text=True,
        capture_output=True,
        timeout=100,
    )
    statuses = json.loads(done.stdout.splitlines()[-1])
    return {path.name: (statuses[str(path)], path.read_text()) for path in folder.iterdir()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ENDS)
def test_processes_end_together_with_their_status(ended, name):
    for index, (status, words) in enumerate(ENDS[name]):
        actual, errors = ended[f"{name}{index}"]
        assert actual == status and words in errors.replace(f"({socket.gethostname()})", "(HOST)"), errors
