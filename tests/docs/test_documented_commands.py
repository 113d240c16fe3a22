"""The commands that README and docs show for a finished run work: from another folder, on a moved copy."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from http.server import ThreadingHTTPServer
from itertools import chain
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from calibadv_jax import cli
from calibadv_jax.config import load_config
from calibadv_jax.contrib.cli import quickstart
from calibadv_jax.core.errors import INPUT_STATUS

pytest.importorskip("faiss")
pytest.importorskip("fastapi")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*.md")])]
TINY = [
    *("world.people=20", "world.cities=8", "world.companies=8", "world.train_questions=40"),
    *("world.eval_questions=6", "policy.init.hidden_size=32", "policy.init.intermediate_size=32"),
    *("policy.init.num_hidden_layers=1", "policy.init.head_dim=16", "rollout.questions_per_step=4"),
    *("rollout.group_size=4", "rollout.max_turn_length=8", "rollout.max_length=64", "sampler.slots=16"),
    *("sampler.decode_chunk=8", "learner.pack_length=64", "learner.microbatch_rows=8", "learner.steps=2"),
    *("sft.rows=8", "sft.phases=[{steps: 2, kind: lookups}]", "evaluate.resamples=100", "log.backends=[]"),
    "advantage.probes=[current,initial]",
]
RUNS = ("quickstart-calibadv/seed-0", "quickstart-calibadv/seed-4", "quickstart-grpo/seed-0")
RUNS += ("a", "b", "grpo", "paper", "seed-0")  # names that the pages use, below runs/

BEGINS = ("train", "sft", "quickstart", "prepare-data")  # commands that need no finished run
EXCEPTIONS = {  # words of a command -> why it is not run here
    "--config configs/own_data.yaml": "needs a 3B policy and a running service",
    "--config configs/one_gpu.yaml": "needs a 1.5B policy and a running service",
    "--config configs/own_data_7b.yaml": "needs a 7B policy and a running service",
    "--config configs/real_two_searches.yaml": "needs a 0.5B policy",
    "--tokens 4000": "planned by tests/docs/test_paper_docs.py with the shipped configs",
    "policy.path=PeterJinGo/": "downloads a policy from the hub",
    "rollout.protocol=tool_calls": "needs a tokenizer whose chat template shows tools",
    "plan --config configs/paper/qwen2.5-7b.yaml": "compiles for TPUs and GPUs",
}
REFUSED = {  # a word of a command -> how it is refused
    "select-rollouts": "no trajectory with a score",  # this policy has learned nothing
    "demonstrate": "40 longer than rollout.max_turn_length",  # its turns are short
    "init-tokens": "'<tool_call>', '</tool_call>': no added token",  # this tokenizer has words for tags
    "--adapter": "no checkpoint with adapters",  # it trains all parameters
}
STAND_INS = (  # what a reader has and this run has not -> what stands for it
    (r" (policy\.path|data\.train|data\.eval|retriever\.corpus)=\S+", ""),
    (r"init-tokens runs/model", "init-tokens runs/a/sft"),
    (r"checkpoints/\d+", "checkpoints/2"),
    (r"--step \d+", "--step 2"),
    (r"\bRUN\b", "runs/a"),
    (r"--config FILE\b", "--config configs/paper/qwen2.5-3b.yaml"),
)


def commands(text: str) -> list[str]:
    """Those of `calibadv` in the bash blocks of a page; variables filled in, comments gone."""
    expanded, variables = [], {}
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if assigned := re.fullmatch(r'(\w+)="(.*)"', line.strip()):
                variables[assigned[1]] = assigned[2]
            for part in re.split(r"&&|&(?=\s|$)", re.sub(r"\s+#.*", "", line)):
                command = re.sub(r"^(\w+=\S+ )+", "", part.strip())  # variables of the environment
                if command.startswith("calibadv "):
                    expanded.append(re.sub(r"\$(\w+)", lambda name: variables[name[1]], command))
    return expanded


SHOWN = [(page, command) for page in PAGES for command in commands(page.read_text(encoding="utf-8"))]
AFTERWARDS = [
    pytest.param(command, id=f"{page.stem}: {command[:60]}")
    for page, command in SHOWN
    if command.split()[1] not in BEGINS and not any(words in command for words in EXCEPTIONS)
]


def test_no_command_is_forgotten():
    names = {param.values[0].split()[1] for param in AFTERWARDS}
    assert names == {"help", *cli.COMMANDS, *cli.TOOLS} - set(BEGINS)
    assert all(any(words in command for _, command in SHOWN) for words in EXCEPTIONS)


def test_every_command_of_a_block_is_found():
    """The reader of the blocks sees as many commands as a plain search for their names.

    Commands within a container are not run.
    """
    names = "|".join(["help", *cli.COMMANDS, *cli.TOOLS])
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    blocks = [block for text in texts for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)]
    shown = re.compile(rf"^(?!docker )[^#\n]*?\bcalibadv (?:{names})(?:\s|$)", re.MULTILINE)
    counts = [len(shown.findall(block)) for block in blocks]
    assert len(SHOWN) == sum(counts)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder with a quickstart's run below the names of the pages, and what the run printed last.

    The run was made in another place, which is gone.
    """
    begun, folder = tmp_path_factory.mktemp("begun"), tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.chdir(begun)
        patch.setattr("calibadv_jax.metrics.console.Console.say", lambda _, text: printed.append(text))
        quickstart.run(load_config(ROOT / "configs/quickstart.yaml", TINY))
    for name in RUNS:
        shutil.copytree(begun / "runs/quickstart-calibadv/seed-0", folder / "runs" / name)
    begun.rename(begun.with_name("gone"))
    config = folder / "configs/paper/qwen2.5-3b.yaml"  # the pages' config of a real run: here the same run's
    config.parent.mkdir(parents=True)
    above = {"base": str(ROOT / "configs/quickstart.yaml"), "run": {"dir": "runs/paper"}}
    OmegaConf.save(OmegaConf.merge(OmegaConf.from_dotlist(TINY), above), config)
    return folder, begun, printed


async def ended(server, sockets):
    """As a server that a signal ended at once."""


@pytest.fixture
def run(elsewhere, monkeypatch, capsys):
    """Runs the arguments of `calibadv` in the folder; what it printed."""
    folder, _, _ = elsewhere
    monkeypatch.chdir(folder)
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: None)  # inspect's, until Ctrl-C
    monkeypatch.setattr("uvicorn.Server.serve", ended)  # serve's
    monkeypatch.setattr("sys.stdin", io.StringIO("who is it?\n"))

    def run(arguments):
        expanded = [sorted(map(str, Path().glob(word))) if "*" in word else [word] for word in arguments]
        words = list(chain.from_iterable(expanded))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.calibadv(words)
        output, errors = capsys.readouterr()
        refusals = [printed for word, printed in REFUSED.items() if word in words]
        assert end.value.code == (INPUT_STATUS if refusals else 0), errors
        assert all(printed in errors for printed in refusals)
        return output

    return run


@pytest.mark.parametrize("command", AFTERWARDS)
def test_command_of_the_pages(command, run):
    for pattern, instead in STAND_INS:
        command = re.sub(pattern, instead, command)
    run(shlex.split(command)[1:])


def test_last_commands_of_the_quickstart(elsewhere, run):
    folder, begun, printed = elsewhere
    lines = printed[printed.index("next:") + 1 :]
    commands = [line.split("   # ")[0].strip().rpartition(" && ")[2] for line in lines]
    # The report has been written already.
    assert [shlex.split(command)[1:][0] for command in commands] == ["inspect", "ask"]
    for command in commands:
        program, *arguments = shlex.split(command.replace("/runs/quickstart-calibadv/seed-0", "/runs/a"))
        assert Path(program).is_file()
        run([word.replace(str(begun), str(folder)) for word in arguments])


def test_moved_run_answers(run):
    printed = run(["ask", "--policy", "runs/a/hf", "who is it?"])
    assert printed.splitlines()[-1].startswith(("answer", "no answer"))
