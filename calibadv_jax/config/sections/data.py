"""Questions, their prompt, and the generated encyclopedia."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from calibadv_jax.config.sections.section import SECTION, Mark, Section
from calibadv_jax.core.tags import OPEN_THINK

# The built-in template that is on by default.
DEFAULT_TEMPLATE = "paper"
# The value of prompt.template for prompts that stand in the data.
FROM_DATA = "from_data"
# Places of prompt.user and prompt.system that are filled in.
QUESTION_PLACE = "{question}"
ANSWER_FORMAT_PLACE = "{answer_format}"
SYSTEM_PROMPT = (
    "Answer the question of the user. Use the tools to find what you do not know for certain; use them again"
    " until you have all that you need. {answer_format}"
)


@dataclass(frozen=True, config=SECTION)
class ColumnsConfig:
    """Where the question and the answers are, in files of an unknown layout."""

    question: str = ""
    """Key of the question in files of a layout that docs/data.md does not list; dotted if it is inside an
    object, as in extra_info.question. Empty: question, where answer is set."""
    answer: str = ""
    """Key of the golden answer or answers. Empty: answer, where question is set."""
    separator: str = ""
    """Text between golden answers that are written as one text, such as |; empty: none."""


@dataclass(frozen=True, config=SECTION)
class DataConfig(Section):
    """Questions to train and to evaluate on."""

    train: Annotated[str | list[str] | dict[str, str], Mark.UNLEARNED] = ""
    """Training questions: a file, a list of files, or data_source: file (docs/data.md)."""
    eval: Annotated[str | list[str] | dict[str, str], Mark.UNLEARNED, Mark.PER_RUN] = ""
    """Held-out questions, in the same forms."""
    columns: Annotated[ColumnsConfig, Mark.UNLEARNED] = Field(default_factory=ColumnsConfig)
    """Keys of the rows of data.train and data.eval, where their layout is not a known one."""
    weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Share of each data_source in the training questions, in any unit; empty: all once an epoch."""
    eval_limit: Annotated[NonNegativeInt, Mark.UNLEARNED, Mark.PER_RUN] = 0
    """Questions to evaluate on, spread evenly over the data sources; 0: all questions."""
    overlong_prompts: Annotated[Literal["refuse", "leave_out"], Mark.UNLEARNED] = "refuse"
    """Prompts longer than rollout.max_prompt_length, and demonstrations longer than sft.pack_length. refuse:
    the command ends at its start; leave_out (verl: filter_overlong_prompts): it goes on without them."""
    shuffle: bool = True
    """Shuffle the training questions anew in every epoch."""
    rest_above: float = Field(default=1.0, ge=0, le=1)
    """Curriculum: a question whose last mean score, as a share of the largest reward, was higher is left out
    the next time; 1: none. A negative score counts as 0."""
    rest_below: float = Field(default=0.0, ge=0, le=1)
    """Curriculum: a question whose last mean score was lower is left out the next time; 0: none."""
    rest_after: PositiveInt = 1
    """Curriculum: epochs in a row with such a score, before a question is left out."""
    rest_for: PositiveInt = 1
    """Curriculum: epochs in which it is then left out. After that it is asked again; one more such score
    leaves it out again, any other score makes it a question like the others."""
    rest_share: float = Field(default=1.0, gt=0, le=1)
    """Curriculum: largest share of the questions that may be left out at the same time."""

    @property
    def has_curriculum(self) -> bool:
        """Whether questions are left out by their last mean score."""
        return self.rest_below > 0 or self.rest_above < 1

    def _faults(self) -> Iterator[str]:
        if self.rest_below >= self.rest_above:
            yield f"rest_below is {self.rest_below:g}, but must be below rest_above ({self.rest_above:g})"
        has_rests = self.rest_after > 1 or self.rest_for > 1 or self.rest_share < 1
        if has_rests and not self.has_curriculum:
            yield "rest_after, rest_for and rest_share do nothing: set rest_below or rest_above, or neither"


@dataclass(frozen=True, config=SECTION)
class PromptConfig(Section):
    """The prompt that a question is put into."""

    template: str = DEFAULT_TEMPLATE
    """Built-in template (paper, short), a text with {question}, or from_data: the prompt of each row."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Wrap the prompt in the tokenizer's chat template; auto: if the tokenizer has a template."""
    question_mark: bool = False
    """End every question with a question mark, as the data preparation of Search-R1 and CalibAdv does."""
    system: str = SYSTEM_PROMPT
    """rollout.protocol=tool_calls: text of the system message; {answer_format} is replaced by a sentence that
    says how to answer (reward.answer_from). Empty: no system message."""
    user: str = QUESTION_PLACE
    """rollout.protocol=tool_calls: text of the user's message, with {question}."""
    prepend_think: bool = False
    """Begin every turn with <think>, unless the prompt or chat template opens it already."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as {enable_thinking: false} for Qwen3's."""
    date_string: str = "26 Jul 2024"
    """Date for chat templates that show a date, by date_string or by strftime_now. It is fixed, so that a run
    over midnight keeps its prompt."""

    @property
    def opening(self) -> str:
        """Text before every turn; before the first turn the prompt may hold another."""
        return OPEN_THINK if self.prepend_think else ""

    def _faults(self) -> Iterator[str]:
        if QUESTION_PLACE not in self.user:
            yield f"user is {self.user!r}, but must contain {QUESTION_PLACE}"
        for name in ("messages", "conversation", "tools", "tokenize", "add_generation_prompt"):
            if name in self.chat_template_kwargs:
                yield f"chat_template_kwargs may not hold {name!r}: leave it out"
        for name in ("date_string", "strftime_now"):
            if name in self.chat_template_kwargs:
                yield f"chat_template_kwargs may not hold {name!r}: set prompt.date_string"


@dataclass(frozen=True, config=SECTION)
class WorldConfig(Section):
    """The generated encyclopedia, its questions and its demonstrations."""

    dir: Annotated[str, Mark.PER_RUN, Mark.OUTPUT] = ""
    """Folder of the generated encyclopedia; empty: none is made."""
    seed: Annotated[NonNegativeInt, Mark.PER_RUN] = 0
    """Seed of the generated encyclopedia; it does not depend on run.seed."""
    people: PositiveInt = 160
    """Number of fictional persons."""
    cities: PositiveInt = 50
    """Number of fictional cities."""
    works: PositiveInt = 40
    """Number of fictional books."""
    companies: PositiveInt = 50
    """Number of fictional companies."""
    train_questions: PositiveInt = 2000
    """Number of questions written to data.train."""
    eval_questions: PositiveInt = 200
    """Number of held-out questions written to data.eval."""
    one_hop: NonNegativeFloat = 0.25
    """Share of questions that one passage answers. The five shares need not sum to 1."""
    two_hop: NonNegativeFloat = 0.5
    """Share of questions that need one passage to find the next passage."""
    comparison: NonNegativeFloat = 0.25
    """Share of questions that compare two entities."""
    rumour: NonNegativeFloat = 0.0
    """Share of two-hop questions whose first passage states an answer that may be false."""
    age: NonNegativeFloat = 0.0
    """Share of questions for a person's age, the difference of two years, which needs a calculator."""
    rumour_truth: float = Field(default=0.5, ge=0, le=1)
    """Share of the rumours that are true: the reward of answering without the second search."""
    pages: bool = False
    """Write the facts to pages, which the policy has to open (tools: [search, access]), not to passages."""
    documents: PositiveInt = 3
    """Documents that a search returns in the demonstrations of the cold start; as many as retriever.topk."""
    detour: float = Field(default=0.1, ge=0, le=1)
    """Share of the cold start's look-ups that search for a similar name first."""
    hasty: float = Field(default=0.4, ge=0, le=1)
    """Share of the cold start's two-hop demonstrations that answer after the first search, and wrongly."""
    misread: float = Field(default=0.0, ge=0, le=1)
    """Share of demonstrations of the cold start that search beyond a rumour and answer with a wrong fact."""
    demonstrations: NonNegativeInt = 0
    """Number of training questions, from the first one on, for which demonstrations.jsonl in dir shows the
    whole way to the answer (for demonstrations.file); 0: no such file."""

    def _faults(self) -> Iterator[str]:
        shares = (self.one_hop, self.two_hop, self.comparison, self.rumour, self.age)
        if not any(shares):
            yield "one_hop, two_hop, comparison, rumour and age are all 0: give at least one a share"
        fewest_entities = min(self.people, self.cities, self.companies)
        if self.rumour and fewest_entities < 2:
            yield "rumours name others: people, cities and companies must be 2 or more"
        if self.demonstrations and (self.pages or self.age):
            yield "demonstrations show searches alone: set demonstrations=0, or leave pages and age out"
