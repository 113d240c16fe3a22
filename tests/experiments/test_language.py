"""experiments.language: perplexity of the thoughts that a run kept, under another model."""

import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from calibadv_jax.advantages.estimators import compute_advantages
from calibadv_jax.config import Config
from calibadv_jax.core.trajectory import Group, Question, Trajectory, Turn
from calibadv_jax.rollout_store.writer import RolloutWriter
from experiments import language

pytestmark = [pytest.mark.medium, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

THOUGHTS = ("I look it up.", "The café says œuvre 🙂", "Where is ", "")


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A random Llama over bytes, in a folder."""
    torch = pytest.importorskip("torch", reason="the judge runs in PyTorch")
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("judge")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(alphabet), bos_token_id=None, eos_token_id=None, **shape)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return folder, language.Judge(model, fast)


def make_trajectory(tokenizer, thoughts, opening=""):
    """A trajectory whose turns think so; all but the last one search."""

    def ids(text):
        return np.array(tokenizer(text)["input_ids"], np.int32)

    turns = []
    for number, thought in enumerate(thoughts, 1):
        kind = "answer" if number == len(thoughts) else "search"
        text = f"{'' if opening else 'é<think>'} {thought} </think> <{kind}>Oslo</{kind}>"
        logprobs = np.zeros(len(ids(text)), np.float32)
        observation = ids("" if kind == "answer" else "<information>Oslo</information>")
        turn = Turn(kind, ids(text), logprobs, text=text, think=thought.strip(), observation_ids=observation)
        turns.append(turn)
    question = Question("q", "Where is Oslo?", ("Oslo",), "test")
    return Trajectory(question, ids("Question: Where is Oslo?"), turns, opening=opening)


@pytest.mark.parametrize("opening", ["", "<think>"])
@pytest.mark.parametrize("spoken", [THOUGHTS, ("in", "think")])
def test_thoughts_are_found_token_by_token(judge, spoken, opening):
    """Also one that is a part of its tag: it is found behind it."""
    tokenizer = judge[1].tokenizer
    trajectory = make_trajectory(tokenizer, spoken, opening)
    sequence = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    spans = list(language.thoughts(tokenizer, trajectory))
    assert [text for _, text in spans] == [thought.strip() for thought in spoken if thought]
    for place, text in spans:
        assert tokenizer.decode(sequence[place]) == text
        assert tokenizer.decode(sequence[place.stop :]).lstrip().startswith("</think>")


def test_perplexities_are_those_of_the_judge(judge):
    """In their place and alone, by the loss that transformers computes."""
    import torch

    _, scorer = judge
    trajectory = make_trajectory(scorer.tokenizer, THOUGHTS[:2])
    window = language.Window()
    window.add(scorer, trajectory)
    sequence = torch.tensor(
        np.concatenate([trajectory.prompt_ids, trajectory.response_ids]), dtype=torch.int64
    )
    labels = torch.full_like(sequence, -100)
    losses, counts = [], []
    for place, text in language.thoughts(scorer.tokenizer, trajectory):
        labels[place] = sequence[place]
        ids = torch.tensor(scorer.tokenizer(text)["input_ids"])[None]
        losses.append(scorer.model(ids, labels=ids).loss.item())
        counts.append(ids.shape[1] - 1)
    in_place = scorer.model(sequence[None], labels=labels[None]).loss.item()
    assert language.perplexity(window.in_place) == pytest.approx(np.exp(in_place), rel=1e-4)
    alone = np.average(losses, weights=counts)
    assert language.perplexity(window.alone) == pytest.approx(np.exp(alone), rel=1e-4)


def test_table_of_a_run(judge, tmp_path, monkeypatch, capsys):
    folder, scorer = judge
    run = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["language", str(run), "--model", str(folder), "--window", "2"])
    with pytest.raises(SystemExit, match="run: no trajectories are kept there"):
        language.main()
    writer = RolloutWriter(run, Config(), 1)
    for step in (1, 2, 3):
        last = "Where is Oslo?" if step == 3 else "It says so."
        attempts = [make_trajectory(scorer.tokenizer, ("I look it up.", last))] * 2
        groups = [Group(attempts[0].question, attempts)]
        writer.write(step, groups, compute_advantages(groups, Config().advantage).credits, [[None, None]], 0)
    language.main()
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert "repeat the question" in header
    assert [line.split()[1:5] for line in lines] == [["1", "to", "2", "4"], ["3", "to", "3", "2"]]
    assert [line.split()[-1] for line in lines] == ["0.000", "1.000"]


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_thought_that_is_part_of_its_tag_ends_before_the_closing_tag(judge, opening):
    tokenizer = judge[1].tokenizer
    trajectory = make_trajectory(tokenizer, ("in", "think"), opening)
    sequence = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    for place, _ in language.thoughts(tokenizer, trajectory):
        assert tokenizer.decode(sequence[place.stop :]).startswith(" </think>")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--model", "{folder}", "--window", "0"], "'0': must be a whole number above 0"),
        (["--model", "{folder}", "--of-group", "0"], "'0': must be a whole number above 0"),
        (
            ["--model", "{folder}/none"],
            "none: no config.json there; give the HuggingFace folder of the judge",
        ),
    ],
)
def test_mistake_is_found_before_the_judge_is_loaded(tmp_path, monkeypatch, capsys, options, line):
    arguments = [option.format(folder=tmp_path) for option in options]
    monkeypatch.setattr(sys, "argv", ["language", str(tmp_path), *arguments])
    with pytest.raises(SystemExit):
        language.main()
    assert capsys.readouterr().err.rstrip().endswith(line)
