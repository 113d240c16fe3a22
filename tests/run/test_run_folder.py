"""What a start may change of a run, what it reports and compares, and that checks come before any write."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from config_rig import changed
from run_folder_rig import (
    CALCULATOR,
    QUESTIONS,
    StandInModel,
    another_calculator,
    contents,
    make_run,
    trained,
    with_checkpoint,
    write_inputs,
)

from calibadv_jax.config import Config, dump_config, load_config
from calibadv_jax.config.trust import Trust
from calibadv_jax.core.errors import UserError
from calibadv_jax.metrics.console import Console
from calibadv_jax.run.fingerprints import ADAPTERS, REFERENCE, check_processes_agree
from calibadv_jax.run.folder import SERVICE_FILE, check_cold_start, check_service
from calibadv_jax.snapshots.mirror import open_mirror
from examples.own_tool import Calculator


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path)


def refuses(run, words, *overrides, **changes):
    """Whether a start is refused in one line with these words, and changes no file."""
    before = contents(run.folder)
    with pytest.raises(UserError, match=words) as refused:
        run(*overrides, **changes)
    return contents(run.folder) == before and "\n" not in str(refused.value)


def test_newest_of_many_starts_is_compared(run):
    """The eleventh start comes after the tenth, and after the third."""
    for number in range(11):
        run(f"run.seed={number}")  # no checkpoint yet: nothing that it could falsify
    (run.folder / "configs/notes.yaml").write_text("mine")
    (run.folder / "configs/1.yaml").unlink()
    trained(run, 3)
    (run.folder / "checkpoints" / "3").mkdir(parents=True)
    assert run("run.seed=10") == ""
    files = {path.stem: path for path in (run.folder / "configs").glob("*.yaml")}
    assert files.keys() == {"notes", *map(str, range(12))} - {"1"}
    assert [yaml.safe_load(files[name].read_text())["run"]["seed"] for name in ("0", "9", "11")] == [0, 9, 10]
    assert refuses(run, "run.seed changed", "run.seed=9")
    policy = run.folder / "policy"
    assert json.loads((policy / "config.json").read_text()) == {"model_type": "qwen2"}
    assert sorted(path.name for path in policy.iterdir()) == ["config.json", "tokenizer.json"]


DECAY = "learner.optimizer.decay_updates"
CRITIC = ["learner.optimizer.schedule=constant", "advantage.name=gae"]


@pytest.mark.parametrize(
    ("before", "change", "is_binding"),
    [
        ([], "run.seed=1", True),
        ([], "learner.optimizer.lr=0.001", True),
        ([], "sampler.name=vllm", True),
        ([], "data.weights={nq: 2, popqa: 1}", True),
        ([], "learner.steps=20", True),  # the cosine ends later
        ([f"{DECAY}=20"], f"{DECAY}=30", True),
        ([f"{DECAY}=20"], "learner.steps=20", False),
        (["learner.optimizer.schedule=constant"], "learner.steps=20", False),
        ([*CRITIC, "critic.optimizer.schedule=linear"], "learner.steps=20", True),
        (CRITIC, "learner.steps=20", False),
        ([], "data.train=elsewhere.jsonl", False),
        ([], "log.backends=[]", False),
        ([], "sampler.slots=3", False),
        ([], "checkpoint.every=9", False),
        (["policy.path=x", "policy.init={hidden_size: 8}"], "policy.init={hidden_size: 16}", False),
        (["policy.init={hidden_size: 8}"], "policy.init={hidden_size: 16}", True),
    ],
)
def test_change_of_a_key_is_refused_or_shown(run, before, change, is_binding):
    run(*before)
    trained(run, 3)
    key = change.partition("=")[0]
    if is_binding:
        words = f"another experiment: {key}.* changed.*choose another run.dir"
        assert refuses(run, words, *before, change)
        assert refuses(run, rf"checkpoint.allow_change=\[{key}\]", *before, change)
        before = [*before, f"checkpoint.allow_change=[{key}]"]
    assert any(key in line and "accepted" in line for line in run(*before, change).splitlines())
    assert "accepted" not in run(*before, change)


def test_allowed_change_accepts_no_other_change(run):
    with_checkpoint(run)
    changes = ("learner.epochs=2", "rollout.group_size=7")
    for allowed, refused in (
        ("checkpoint.every", "rollout.group_size, learner.epochs"),
        ("learner.epochs", "rollout.group_size"),
        ("rollout.group_size", "learner.epochs"),
    ):
        words = f"another experiment: {refused} changed"
        assert refuses(run, words, *changes, f"checkpoint.allow_change=[{allowed}]")
    assert "refused" not in run(*changes, "checkpoint.allow_change=[learner.epochs, rollout.group_size]")


@pytest.mark.parametrize(
    ("overrides", "changes", "words"),
    [
        ([], {"questions": QUESTIONS[:1]}, "holds another experiment: data.content changed"),
        (["run.seed=1"], {}, "holds another experiment: run.seed changed"),
        (["checkpoint.resume=false"], {}, "holds checkpoints, and checkpoint.resume is false"),
    ],
)
def test_other_experiment_in_the_mirror_is_not_fetched(run, tmp_path, overrides, changes, words):
    with_checkpoint(run)
    (run.folder / "checkpoints/3/state").write_text("weights")
    (run.folder / "hub.json").write_text("[]")
    mirror, elsewhere = f"run.mirror={tmp_path}/store", tmp_path / "elsewhere"
    assert refuses(run, words, *overrides, **changes)
    run(mirror)
    copied = contents(tmp_path / "store")
    with pytest.raises(UserError, match=words) as refused:
        run(mirror, f"run.dir={elsewhere}", *overrides, **changes)
    assert mirror in str(refused.value)
    assert contents(elsewhere) == {} and contents(tmp_path / "store") == copied
    run(mirror, f"run.dir={elsewhere}")
    assert (elsewhere / "checkpoints/3/state").read_text() == "weights"
    assert (elsewhere / "hub.json").read_text() == "[]"


def test_killed_rollback_is_finished_by_the_next_start(run):
    """Checkpoint 3 is of the time before the rollback, 4 is half deleted, and 5 was trained after it."""
    with_checkpoint(run)
    for step, rollbacks in ((2, 0), (3, 0), (4, None), (5, 1)):
        extra = run.folder / f"checkpoints/{step}/extra"
        extra.mkdir(parents=True, exist_ok=True)
        if rollbacks is not None:
            (extra / "metadata").write_text(json.dumps({"guards": {"rollbacks": rollbacks}}))
    (run.folder / "rollback.json").write_text('{"step": 2, "rollbacks": 1}')
    run()
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["2", "5"]


@pytest.mark.parametrize(
    ("history", "kept"),
    [
        # Checkpoints by their step; before a colon the rollbacks that were counted when it was saved.
        ([2, 4], ["1", "2", "4"]),  # 3 is of the time before the first rollback, 5 before the second
        ([4, 2], ["1", "2"]),
        ([], ["1", "2", "3", "4"]),  # as an earlier version noted it: the last rollback alone
    ],
)
def test_killed_run_with_two_rollbacks_drops_the_checkpoints_of_both(run, history, kept):
    with_checkpoint(run)
    for step, rollbacks in ((1, 0), (2, 0), (3, 0), (4, 1), (5, 1)):
        extra = run.folder / f"checkpoints/{step}/extra"
        extra.mkdir(parents=True, exist_ok=True)
        (extra / "metadata").write_text(json.dumps({"guards": {"rollbacks": rollbacks}}))
    rollback = {"step": history[-1] if history else 4, "rollbacks": 2} | (
        {"history": history} if history else {}
    )
    (run.folder / "rollback.json").write_text(json.dumps(rollback))
    run()
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == kept


@pytest.mark.parametrize(
    "text",
    ["{}", '{"step": 2}', '{"step": "a", "rollbacks": 1}', '{"step": 1, "rollbacks": 2, "history": [1]}'],
)
def test_damaged_note_of_a_rollback_is_one_line(run, text):
    with_checkpoint(run)
    (run.folder / "rollback.json").write_text(text)
    assert refuses(run, r"rollback.json: damaged; remove it")


def test_policy_inside_run_is_fetched_first(run, tmp_path):
    with_checkpoint(run)
    (run.folder / "checkpoints/3/state").write_text("weights")
    (run.folder / "sft").mkdir()
    (run.folder / "sft/config.json").write_text("{}")
    run(f"run.mirror={tmp_path}/store", "policy.path=${run.dir}/sft")
    elsewhere = tmp_path / "elsewhere"
    overrides = [f"run.mirror={tmp_path}/store", f"run.dir={elsewhere}"]
    mirror = open_mirror(load_config([], overrides), Console(progress=False))
    with mirror.inputs(f"{elsewhere}/sft", "") as count:
        assert count == 5  # two starts' configs and hashes beside it
        assert (elsewhere / "sft/config.json").is_file() and not (elsewhere / "checkpoints").exists()


def test_unknown_key_or_unusable_folder_is_refused(run):
    with_checkpoint(run)
    assert refuses(run, "'learner.lr', which is no key", "checkpoint.allow_change=[learner.lr]")
    damaged, metrics = run.folder / "configs/1.yaml", run.folder / "metrics.jsonl"
    damaged.touch()
    assert refuses(run, "1.yaml: empty or cut off .*; remove it")
    damaged.unlink()
    metrics.write_bytes(b'{"step": 1}\n\xff\xfe\x00\n')
    assert refuses(run, r"metrics.jsonl:2: not a row of metrics; remove the line")
    metrics.unlink()
    shutil.rmtree(run.folder / "configs")
    assert refuses(run, "holds trained steps, but their configs/ is lost")
    shutil.rmtree(run.folder)
    run.folder.write_text("a file")
    assert refuses(run, "cannot be written")


def test_files_of_a_policy_without_training_are_replaced(run):
    """As after a start with adapters of a policy with another tokenizer."""
    run()
    for name in ("base.json", "chat_template.jinja", "notes.txt"):
        (run.folder / "policy" / name).write_text("{}")
    run()
    names = sorted(path.name for path in (run.folder / "policy").iterdir())
    assert names == ["config.json", "notes.txt", "tokenizer.json"]


def without(path, *sections, key):
    """As a version wrote it that did not have the key yet."""
    values = section = yaml.safe_load(path.read_text())
    for name in sections:
        section = section[name]
    del section[key]
    path.write_text(yaml.safe_dump(values))


def test_older_configs_get_defaults_of_newer_keys(run, tmp_path):
    with_checkpoint(run)
    path = run.folder / "configs/0.yaml"
    without(path, "learner", key="epochs")
    without(path, "learner", "optimizer", key="eps")
    assert refuses(run, "learner.epochs changed", "learner.epochs=2")
    assert "learner.epochs" not in run("learner.epochs=1")
    path.with_name("1.yaml").write_text(path.read_text() + "pipeline: {size: 3}\n")  # a removed section
    assert refuses(run, "holds another experiment: pipeline changed")

    cold = changed(run={"dir": str(tmp_path)})
    check_cold_start(cold)  # there is none
    (tmp_path / "sft.yaml").write_text(dump_config(cold))
    without(tmp_path / "sft.yaml", "world", key="rumour")
    check_cold_start(cold)
    for other, key in (
        (changed(cold, world={"rumour": 0.5}), "world.rumour"),
        (changed(cold, run={"seed": 5}), "run.seed"),
    ):
        with pytest.raises(UserError, match=rf"other settings \({key}"):
            check_cold_start(other)


def test_steps_trained_again_are_reported(run):
    run()
    trained(run, 8)
    assert run() == "8 steps are trained again: there is no checkpoint yet (checkpoint.every)"
    (run.folder / "checkpoints/6").mkdir(parents=True)
    output = run()
    assert output == "2 steps are trained again: the newest checkpoint is that of step 6 (checkpoint.every)"
    trained(run, 6)
    assert run() == ""


def test_lost_hashes_can_be_accepted(run):
    run(CALCULATOR)
    trained(run, 1)
    path = run.folder / "configs/0.json"
    identity = json.loads(path.read_text())
    del identity["tools.content"]
    path.write_text(json.dumps(identity))
    run(CALCULATOR)  # as an older version left it
    (run.folder / "configs/1.json").unlink()
    names = "data.content, policy.config, policy.vocabulary"
    assert refuses(run, rf"1.json is lost, .*allow_change=\[{names}", CALCULATOR)
    assert "accepted" in run(CALCULATOR, f"checkpoint.allow_change=[{names}]")
    run(CALCULATOR)
    assert "changed" not in run(CALCULATOR)


KL, LORA, PATH = "loss.kl_coef=0.1", "policy.lora.rank=2", "policy.path={}/hf"
JUDGED = "reward.judge={{url: 'http://127.0.0.1:1/v1', model: m, prompt: {}/prompt.txt}}"
WHENCE = [QUESTIONS[0], replace(QUESTIONS[1], text="Whence?")]


def compared(folder, *keys, questions=QUESTIONS, hidden_size=4):
    """The values that a process compares with those of the others."""
    values, config = {}, load_config([], [f"run.dir={folder}/run", *keys])
    process_group = SimpleNamespace(assert_equal=lambda name, value: values.update({name: value()}))
    check_processes_agree(
        config, StandInModel(folder / "tokenizer", hidden_size=hidden_size), questions, process_group
    )
    return values


@pytest.mark.parametrize(
    ("keys", "change", "name"),
    [
        ([], {"questions": WHENCE}, "data.content"),
        ([], {"questions": QUESTIONS[:1]}, "data.content"),
        ([], {"hidden_size": 8}, "policy.config"),
        ([PATH, KL], {"scale": 2.0}, "policy.weights"),
        ([PATH, LORA], {"scale": 2.0}, "policy.weights"),
        ([PATH, LORA, KL, "policy.lora.init_from={}"], {"adapters": 2.0}, "policy.adapters"),
        ([JUDGED], {"prompt": "Judge mildly."}, "reward.judge.content"),
        (["teacher.policy={}/hf"], {"scale": 2.0}, "teacher.content"),
        ([CALCULATOR], {"purpose": "guess a number"}, "tools.content"),
        ([CALCULATOR], {"may_be_empty": True}, "tools.content"),
    ],
)
def test_contents_are_compared(run, tmp_path, monkeypatch, keys, change, name):
    """With the last start and among processes: of what a config only names."""
    overrides, processes = [key.format(tmp_path) for key in keys], []

    def start(*more, purpose="calculate", may_be_empty=False, questions=QUESTIONS, hidden_size=4, **files):
        write_inputs(tmp_path, **files)
        another_calculator(monkeypatch, purpose)
        monkeypatch.setattr(Calculator, "may_be_empty", may_be_empty)
        inputs = {"questions": questions, "hidden_size": hidden_size}
        processes.append(compared(tmp_path, *overrides, **inputs))
        return run(*overrides, *more, **inputs)

    start.folder = run.folder
    start()
    trained(run, 1)
    assert "changed" not in start()
    assert refuses(start, f"another experiment: {name} changed", **change)
    assert "accepted" in start(f"checkpoint.allow_change=[{name}]", **change)
    first, same, other, _ = processes
    assert first == same and [key for key in first if first[key] != other[key]] == [name]


OWN = {
    "reward": "reward.answer={{f1: 0.5, '{}:mine': 0.5}}",
    "advantage": "advantage.base={}:mine",
    "loss": "loss.name={}:mine",
    "tools": "tools=[search, '{}:Mine']",
}
OWN_SOURCE = """
from {helper} import WEIGHT
from examples.own_tool import Calculator as Mine

def mine(*arguments):
    return WEIGHT
"""


@pytest.mark.parametrize("section", OWN)
@pytest.mark.parametrize("edited", ["module", "helper"])
def test_edited_own_function_is_another_experiment(run, tmp_path, monkeypatch, section, edited):
    """Also where the edit is in a module of the user's own that the function's module imports."""
    monkeypatch.syspath_prepend(tmp_path)
    module = f"own_{section}_{edited}"
    files = {"module": tmp_path / f"{module}.py", "helper": tmp_path / f"{module}_helper.py"}
    files["module"].write_text(OWN_SOURCE.format(helper=f"{module}_helper"))
    files["helper"].write_text("WEIGHT = 1.0\n")
    override = OWN[section].format(module)
    run(override)
    trained(run, 1)
    assert "changed" not in run(override)
    files[edited].write_text(files[edited].read_text() + "OTHER = 2\n")
    words = rf"{section}.source changed.*the code of {module}:[mM]ine.* was edited; .*allow_change=\["
    assert refuses(run, words, override)
    assert "accepted" in run(override, f"checkpoint.allow_change=[{section}]")
    assert f"{section}.source" not in run(override)


def test_run_without_kept_source_hashes_is_resumed(run, tmp_path, monkeypatch):
    """As versions before 0.3 kept it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_of_earlier_version.py").write_text("def mine(trajectory):\n    return 1.0\n")
    override = "reward.answer=own_of_earlier_version:mine"
    run(override)
    trained(run, 1)
    path = run.folder / "configs/0.json"
    identity = json.loads(path.read_text())
    assert len(identity.pop("reward.source")) == 64
    path.write_text(json.dumps(identity))
    assert "changed" not in run(override)


def test_changed_argument_of_own_function_is_refused(run):
    own = ["reward.answer=examples.own_reward:short_way", "reward.args={cost: 0.1}"]
    run(*own)
    trained(run, 1)
    assert refuses(run, r"reward.args changed .*allow_change=\[reward.args\]", own[0], "reward.args.cost=0.2")
    assert "accepted" in run(own[0], "reward.args.cost=0.2", "checkpoint.allow_change=[reward.args]")


def test_only_weights_that_are_read_are_compared(tmp_path):
    """A checkpoint lacks the adapters' base; with a KL term the first adapters are the reference."""
    write_inputs(tmp_path)
    path, adapters = PATH.format(tmp_path), [LORA, f"policy.lora.init_from={tmp_path}"]
    before, adapted = compared(tmp_path, path), compared(tmp_path, path, *adapters)
    (tmp_path / "run/checkpoints/3").mkdir(parents=True)
    after, newest = compared(tmp_path, path), "newest checkpoint in run.dir"
    assert (before[newest], after[newest]) == (None, 3)
    assert before.keys() - after.keys() == {REFERENCE} and adapted.keys() - before.keys() == {ADAPTERS}
    assert compared(tmp_path, path, *adapters).keys() == before.keys()
    assert compared(tmp_path, path, *adapters, KL).keys() == adapted.keys()


def test_weights_are_compared_only_as_reference(run, tmp_path):
    path = PATH.format(tmp_path)
    write_inputs(tmp_path)
    run(path)
    trained(run, 1)
    write_inputs(tmp_path, scale=2.0)
    run(path)
    write_inputs(tmp_path, scale=3.0)
    run(path, KL, "checkpoint.allow_change=[loss.kl_coef]")


def served(url, more="", **own):
    values = "".join(f", {name}: {value}" for name, value in own.items())
    return f"tools=[search, {{mcp: {{url: '{url}'{more}}}{values}}}]"


def test_keys_of_the_environment_are_compared_by_name(run, monkeypatch):
    monkeypatch.setattr("calibadv_jax.run.fingerprints.tools_hash", lambda config: "the same")
    monkeypatch.setenv("MY_SCRATCH", str(run.folder.parent))
    server = [
        "run.dir=${oc.env:MY_SCRATCH}/run",
        "tools=[search, {mcp: {command: 'srv --key ${oc.env:MY_KEY}'}}]",
    ]
    for key in ("hunter2", "correct-horse"):
        monkeypatch.setenv("MY_KEY", key)
        assert "changed" not in run(*server)
        trained(run, 3)
    for path in (run.folder / "configs").glob("*.yaml"):  # as version 0.1 kept it
        path.write_text(path.read_text().replace("${oc.env:MY_KEY}", "correct-horse"))
    assert "changed" not in run(*server)
    output = run("tools=[search, {mcp: {command: '${oc.env:MY_KEY}'}}]", "checkpoint.allow_change=[tools]")
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
        assert refuses(run, "another experiment: tools changed", moved)
    trust = Trust(is_given=True)
    config = load_config(run.folder / "configs/0.yaml", [], trust=trust)
    (run.folder / "sft.yaml").write_text(dump_config(config))
    cold = load_config(run.folder / "configs/0.yaml", [moved], trust=trust)
    with nullcontext() if goes_on else pytest.raises(UserError, match=r"other settings \(tools\)"):
        check_cold_start(cold)


FIRST = {"status": "ready", "corpus_sha256": "c1", "encoder": "hashed", "documents": 7, "identity": "aa"}
C2 = {"corpus_sha256": "c2"}


def accepting(name):
    return changed(checkpoint={"allow_change": [name]})


@pytest.fixture
def indexed_run(tmp_path):
    """A folder with a checkpoint that was trained over FIRST."""
    check_service(Config(), tmp_path, FIRST)
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("accepted", ["retriever.content", "retriever"])
@pytest.mark.parametrize("state", [FIRST | C2, FIRST | {"encoder": "e5"}, FIRST | {"identity": "bb"}, {}])
def test_another_index_is_refused_until_it_is_accepted(indexed_run, state, accepted):
    check_service(Config(), indexed_run, FIRST | {"stage": "x"})  # the same one at another address
    kept = (indexed_run / SERVICE_FILE).read_text()
    for _ in range(2):  # a start that was refused leaves no trace
        with pytest.raises(UserError, match="another index .*instead of.*allow_change"):
            check_service(Config(), indexed_run, state)
        assert (indexed_run / SERVICE_FILE).read_text() == kept
    check_service(accepting(accepted), indexed_run, state)
    check_service(Config(), indexed_run, state)  # accepted once and for all
    if state:
        with pytest.raises(UserError, match="another index"):
            check_service(Config(), indexed_run, FIRST)


def test_unknown_last_index_is_accepted_unless_damaged(indexed_run):
    path = indexed_run / SERVICE_FILE
    path.unlink()  # as an earlier version left it
    check_service(Config(), indexed_run, FIRST)
    assert path.is_file()
    path.write_text("{")
    with pytest.raises(UserError, match=f"{SERVICE_FILE}: damaged"):
        check_service(Config(), indexed_run, FIRST)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=f"{SERVICE_FILE} cannot be written"):
        check_service(accepting("retriever.content"), indexed_run, FIRST)


@pytest.mark.parametrize("file", ["metrics.jsonl", "rollouts/step_000001.parquet"])
def test_trained_steps_count_without_a_checkpoint(tmp_path, file):
    for state in (FIRST | C2, FIRST):  # free before the first step
        check_service(Config(), tmp_path, state)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="another index than at the last start"):
        check_service(Config(), tmp_path, FIRST | C2)
