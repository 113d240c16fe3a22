"""What a start says of the steps that lie in its folder: trained again, lost, or of another experiment."""

import errno
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from run_folder_rig import CALCULATOR, another_calculator, contents, make_run, trained, with_checkpoint
from safetensors.numpy import save_file

from calibadv_jax.config import dump_config, load_config
from calibadv_jax.core.errors import UserError
from calibadv_jax.run.folder import check_cold_start
from examples.own_tool import Calculator


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


@pytest.mark.parametrize("override", ["advantage.name=grpo", "run.seed=1", "data.shuffle=false"])
def test_binding_change_before_first_checkpoint_is_refused(run, override):
    run()
    trained(run, 8)
    before = contents(run.folder)
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=rf"holds another experiment: {key} changed"):
        run(override)
    assert contents(run.folder) == before


def test_kept_trajectories_mark_a_run_as_trained(run):
    run()
    (run.folder / "rollouts").mkdir()
    (run.folder / "rollouts/step_1.parquet").touch()
    with pytest.raises(UserError, match="run.seed changed"):
        run("run.seed=1")
    assert run() == "1 step is trained again: there is no checkpoint yet (checkpoint.every)"


def test_steps_trained_again_are_reported(run):
    run()
    trained(run, 8)
    assert run() == "8 steps are trained again: there is no checkpoint yet (checkpoint.every)"
    (run.folder / "checkpoints/6").mkdir(parents=True)
    output = run()
    assert output == "2 steps are trained again: the newest checkpoint is that of step 6 (checkpoint.every)"
    trained(run, 6)
    assert run() == ""


def test_rows_of_metrics_that_are_gone_are_said(run):
    with_checkpoint(run)
    path = run.folder / "metrics.jsonl"
    path.write_text(path.read_text().split("\n", 1)[1])
    assert run() == f"{path}: 1 of steps 1 to 3 have no row (lost, or removed) and will have none"
    path.unlink()
    assert run() == f"{path}: 3 of steps 1 to 3 have no row (lost, or removed) and will have none"


def test_damaged_metrics_are_refused_before_writing(run):
    with_checkpoint(run)
    (run.folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe\x00\n')
    before = contents(run.folder)
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not a row of metrics; remove the line"):
        run()
    assert contents(run.folder) == before


def test_truncated_start_is_skipped_and_reported(run):
    with_checkpoint(run)
    damaged = run.folder / "configs/1.yaml"
    damaged.touch()
    output = run()
    assert output.startswith(f"{damaged}: empty or cut off (was the disk full?); ")
    assert output.endswith("configs/0.yaml is compared instead")
    with pytest.raises(UserError, match="run.seed changed"):
        run("run.seed=1")
    for path in (run.folder / "configs").glob("*.yaml"):
        path.write_text("")
    with pytest.raises(UserError, match="2.yaml: empty or cut off .* and no older start is whole"):
        run()


def test_hashes_that_are_lost_can_be_done_without(run):
    with_checkpoint(run)
    (run.folder / "configs/0.json").write_text("")
    with pytest.raises(UserError, match=r"0.json is lost, .*allow_change=\[data.content, policy.config"):
        run()
    names = "data.content,policy.config,policy.vocabulary"
    assert "accepted" in run(f"checkpoint.allow_change=[{names}]")
    run()
    assert run() == ""


def test_full_disk_leaves_no_half_start(run, monkeypatch):
    with_checkpoint(run)
    write_text = Path.write_text

    def full(path, text, **more):
        if "learner:" in text:
            write_text(path, text[:100], **more)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_text(path, text, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device"):
            run()
    assert [path.name for path in (run.folder / "configs").glob("*.yaml")] == ["0.yaml"]
    assert run() == ""


def test_longer_run_under_falling_rate_is_refused(run):
    with_checkpoint(run)
    words = "learner.steps changed .*: the learning rate falls over learner.steps; with"
    with pytest.raises(UserError, match=f"{words} learner.optimizer.decay_updates=10 it falls as before"):
        run("learner.steps=20")
    assert "learner.steps" in run("learner.steps=20", "learner.optimizer.decay_updates=10")
    with pytest.raises(UserError, match="decay_updates changed"):
        run("learner.steps=20", "learner.optimizer.decay_updates=11")


def test_schedule_length_counts_minibatches_and_epochs(run):
    more = [
        "rollout.questions_per_step=4",
        "rollout.group_size=5",
        "learner.minibatch_size=8",
        "learner.epochs=2",
    ]
    run(*more)
    trained(run, 3)
    with pytest.raises(UserError, match="learner.optimizer.decay_updates=60 it falls as before"):
        run(*more, "learner.steps=20")
    assert "learner.steps" in run(*more, "learner.steps=20", "learner.optimizer.decay_updates=60")


def test_refusal_suggests_a_free_folder(run):
    with_checkpoint(run)
    run.folder.with_name("run-2").mkdir()
    with pytest.raises(UserError) as caught:
        run("advantage.name=grpo", "learner.optimizer.lr=0.5")
    assert str(caught.value).endswith(f"choose another folder, such as run.dir={run.folder}-3")


def test_policy_init_is_ignored_with_policy_path(run):
    path = f"policy.path={run.folder}"
    run(path, "policy.init={hidden_size: 8}")
    trained(run, 1)
    run(path, "policy.init={hidden_size: 16}")
    with pytest.raises(UserError, match="policy.path changed|policy.init changed"):
        run("policy.init={hidden_size: 32}")


@pytest.fixture
def weights(tmp_path):
    """Writes weights, and returns the key of their folder."""

    def write(value=1.0, name="model", **more):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        save_file({"w": np.full((3, 5), value, np.float32)} | more, folder / "model.safetensors")
        return f"policy.path={folder}"

    return write


def test_other_weights_are_another_reference(run, weights):
    kl = "loss.kl_coef=0.1"
    run(weights(), kl)
    trained(run, 1)
    with pytest.raises(UserError, match="policy.weights changed"):
        run(weights(2.0), kl)
    assert "policy.path" in run(weights(1.0, "moved"), kl), "the same weights at another place"
    assert "accepted" in run(weights(2.0), kl, "checkpoint.allow_change=[policy.weights]")


def test_weights_are_compared_only_as_reference(run, weights):
    run(weights())
    trained(run, 1)
    run(weights(2.0))
    run(weights(3.0), "loss.kl_coef=0.1", "checkpoint.allow_change=[loss.kl_coef]")
    run(weights(4.0), "checkpoint.allow_change=[loss.kl_coef, policy.weights]")


def test_another_text_for_the_judge_is_another_reward(run, tmp_path):
    prompt = tmp_path / "judge.txt"
    judged = f"reward.judge={{url: 'http://127.0.0.1:1/v1', model: m, prompt: {prompt}}}"
    prompt.write_text("Is the answer right?")
    run(judged)
    trained(run, 1)
    run(judged)
    prompt.write_text("Is the answer polite?")
    with pytest.raises(UserError, match="reward.judge.content changed"):
        run(judged)
    assert "accepted" in run(judged, "checkpoint.allow_change=[reward.judge.content]")


def test_changed_action_purpose_is_refused(run, monkeypatch):
    run(CALCULATOR)
    trained(run, 1)
    run(CALCULATOR)
    another_calculator(monkeypatch, "guess a number")
    with pytest.raises(UserError, match="tools.content changed"):
        run(CALCULATOR)
    assert "accepted" in run(CALCULATOR, "checkpoint.allow_change=[tools.content]")


def served(url, more="", **own):
    values = "".join(f", {name}: {value}" for name, value in own.items())
    return f"tools=[search, {{mcp: {{url: '{url}'{more}}}{values}}}]"


def test_keys_of_the_environment_are_kept_by_name(run, monkeypatch):
    monkeypatch.setattr("calibadv_jax.run.fingerprints.tools_hash", lambda config: "the same")
    server = ["tools=[search, {mcp: {command: 'srv --key ${oc.env:MY_KEY}'}}]"]
    for number, key in enumerate(("hunter2", "correct-horse")):
        monkeypatch.setenv("MY_KEY", key)
        assert "changed" not in run(*server)
        text = (run.folder / f"configs/{number}.yaml").read_text()
        assert key not in text and "command: srv --key ${oc.env:MY_KEY}" in text
        trained(run, 3)
    kept = load_config(run.folder / "configs/0.yaml")
    assert kept.tools[1].mcp.command == "srv --key correct-horse"
    for path in (run.folder / "configs").glob("*.yaml"):  # as earlier versions kept it
        path.write_text(path.read_text().replace("${oc.env:MY_KEY}", "correct-horse"))
    assert "changed" not in run(*server)
    other = "tools=[search, {mcp: {command: '${oc.env:MY_KEY}'}}]"
    output = run(other, "checkpoint.allow_change=[tools]")
    assert "accepted" in output and "correct-horse" not in output


@pytest.mark.parametrize(
    ("moved", "goes_on"),
    [
        (served("http://b/mcp", ", timeout: 9, patience: 9", timeout=9), True),
        (served("http://a/mcp", ", tools: [calculate]"), False),
        (served("http://a/mcp", max_length=9), False),
        ("tools=[search, {mcp: {command: serve}}]", False),
    ],
)
def test_tool_server_may_move_but_not_change(run, monkeypatch, moved, goes_on):
    monkeypatch.setattr("calibadv_jax.contrib.mcp_tools.mcp_actions", lambda *_: [Calculator()])
    run(served("http://a/mcp"))
    trained(run, 1)
    if goes_on:
        assert "accepted" in run(moved) and "refused" not in run(served("http://a/mcp"))
    else:
        with pytest.raises(UserError, match="another experiment: tools changed"):
            run(moved)
    config = load_config(run.folder / "configs/0.yaml", [])
    (run.folder / "sft.yaml").write_text(dump_config(config))
    cold = load_config(run.folder / "configs/0.yaml", [moved])
    with nullcontext() if goes_on else pytest.raises(UserError, match=r"other settings \(tools\)"):
        check_cold_start(cold)


def test_run_without_tools_hash_is_resumed(run):
    run(CALCULATOR)
    trained(run, 1)
    kept = run.folder / "configs/0.json"
    identity = json.loads(kept.read_text())
    del identity["tools.content"]
    kept.write_text(json.dumps(identity))
    run(CALCULATOR)
