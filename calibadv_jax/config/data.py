"""Questions, the prompt they are put into, and the generated encyclopedia."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from calibadv_jax.config.section import SECTION


@dataclass(frozen=True, config=SECTION)
class DataConfig:
    train: str | list[str] | dict[str, str] = ""
    """Questions: a file, a list of files, or data_source: file. Layouts and hub addresses: docs/data.md."""
    eval: str | list[str] | dict[str, str] = ""
    """Held-out questions, likewise."""
    weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Share of each data_source in the training questions, in any unit; empty: every question once an
    epoch."""
    eval_limit: NonNegativeInt = 0
    """Evaluate on this many questions, evenly spread over data sources, the same ones for every run.seed; 0:
    all."""
    overlong_prompts: Literal["refuse", "leave_out"] = "refuse"
    """Questions whose prompt is longer than rollout.max_prompt_length, in training and evaluation, and among
    the demonstrations of a file; of these also whole ones longer than sft.row_length. They are looked for
    before anything is asked or trained. refuse: the command ends; leave_out: it goes on without them and says
    how many (verl: data.filter_overlong_prompts)."""
    shuffle: bool = True
    """Shuffle training questions again in every epoch."""


@dataclass(frozen=True, config=SECTION)
class PromptConfig:
    template: str = "paper"
    """Name of a built-in template (paper, short), a text that contains {question}, or from_data: the prompt
    that each row of the data carries."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Wrap the prompt in the tokenizer's chat template; auto: where it has one."""
    question_mark: bool = False
    """Ends every question with a question mark, as the data preparation of Search-R1 and CalibAdv does."""
    prepend_think: bool = False
    """The environment opens every turn with <think>."""
    date_string: str = "26 Jul 2024"
    """Given to chat templates that show a date. Llama 3.2's would take today's, and a run over midnight would
    change its prompt."""


@dataclass(frozen=True, config=SECTION)
class WorldConfig:
    dir: str = ""
    """Folder the generated encyclopedia is written to; empty: none is made."""
    seed: NonNegativeInt = 0
    """Seed of the world; it does not depend on run.seed."""
    people: PositiveInt = 160
    """Fictional persons."""
    cities: PositiveInt = 50
    """Fictional cities."""
    works: PositiveInt = 40
    """Fictional books."""
    companies: PositiveInt = 50
    """Fictional companies."""
    train_questions: PositiveInt = 2000
    """Questions written to data.train."""
    eval_questions: PositiveInt = 200
    """Held-out questions."""
    one_hop: NonNegativeFloat = 0.25
    """Share of questions that one passage answers."""
    two_hop: NonNegativeFloat = 0.5
    """Share of questions that need a passage to find the next."""
    comparison: NonNegativeFloat = 0.25
    """Share of questions that compare two entities."""
    rumour: NonNegativeFloat = 0.0
    """Share of two-hop questions whose first passage already says an answer, which may be false. The four
    shares need not sum to 1."""
    rumour_truth: float = Field(default=0.5, ge=0, le=1)
    """Share of the rumours that are true: what answering without the second search earns."""
    misread: float = Field(default=0.0, ge=0, le=1)
    """Share of the cold start's demonstrations that look further than a rumour, and then answer with another
    fact than the one that was asked for."""

    @model_validator(mode="after")
    def _can_be_drawn(self) -> WorldConfig:
        if self.one_hop + self.two_hop + self.comparison + self.rumour == 0:
            raise ValueError("one_hop, two_hop, comparison and rumour are all 0: give at least one a share")
        if self.rumour and min(self.people, self.cities, self.companies) < 2:
            raise ValueError(
                "a false rumour names another one: people, cities and companies must be 2 or more"
            )
        return self
