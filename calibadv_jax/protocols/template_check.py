"""Whether a rollout's tokens are those of the chat template's own rendering, and where they are not.

A rollout keeps what was sampled. A chat template that renders the whole conversation may write earlier turns
in another way: it drops their thoughts, for example. The check plays conversations and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.tool_calls import AssistantMessage, ToolCall
from calibadv_jax.protocols.call_format import CallFormat
from calibadv_jax.protocols.chat_template import ConversationTemplate
from calibadv_jax.protocols.rendering import (
    ChatMessage,
    TemplateFailure,
    tool_message,
    user_message,
)

# Characters of a text that a message quotes.
_QUOTED_LENGTH = 60


class Cause(StrEnum):
    """Why a chat template's rendering differs from the rollout."""

    DROPS_THOUGHT = "it drops the thought of the turn"
    ADDS_EMPTY_THOUGHT = "it writes an empty thought into the turn"
    DROPS_EMPTY_THOUGHT = "it drops the empty thought of the turn"
    CHANGES_MESSAGE = "it changes or drops a part of the turn"
    SPELLS_OTHERWISE = "it spells the turn in another way"
    ENVIRONMENT = "it writes the answer of a tool in another way"
    PROMPT = "it writes the prompt in another way"
    TOKENS = "the tokenizer joins the beginning of the turn with the text before it"
    REFUSAL = "it refuses the conversation"


@dataclass(frozen=True)
class Exchange:
    """A turn of the policy, and the answers to its calls.

    Attributes:
        message: The turn.
        answers: The answer to each call; empty behind a turn without calls.
    """

    message: AssistantMessage
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Segment:
    """A piece of a conversation, which the rollout tokenizes on its own.

    Attributes:
        text: The text.
        token_ids: Its N token ids.
        is_sampled: Whether the policy has sampled it.
        opening: The end of an environment's text that begins the next turn.
    """

    text: str
    token_ids: tuple[int, ...]
    is_sampled: bool
    opening: str = ""


@dataclass(frozen=True)
class Difference:
    """A place where the template's rendering differs from the rollout.

    Attributes:
        cause: Why.
        turn: Number of the turn, from 1; 0: the prompt.
        in_rollout: The text of the rollout.
        in_template: The text of the template.
    """

    cause: Cause
    turn: int
    in_rollout: str = ""
    in_template: str = ""


@dataclass(frozen=True)
class Case:
    """A conversation that was compared.

    Attributes:
        title: What distinguishes it.
        differences: Where the renderings differ; empty: nowhere.
    """

    title: str
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class TemplateCheck:
    """The result of the check of a chat template.

    Attributes:
        title: What messages call the template.
        format_name: Name of the tool-call format.
        cases: The conversations.
        lacks_thoughts: Whether the template shows no thoughts, so that only conversations without thoughts
            were compared.
    """

    title: str
    format_name: str
    cases: tuple[Case, ...]
    lacks_thoughts: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the rollout's tokens are those of the template in every conversation."""
        return not any(case.differences for case in self.cases)

    def lines(self) -> list[str]:
        """Return the result in sentences, one a line."""
        lines = [f"{self.title} writes tool calls in the format {self.format_name}"]
        for case in self.cases:
            if not case.differences:
                lines.append(f"{case.title}: the rollout has the tokens of the template's own rendering")
            lines += _described(case)
        if self.lacks_thoughts:
            lines.append("with thoughts: not compared, since the template has no place for them")
        if not self.is_exact:
            lines.append(
                "What is sampled stays in the context and is trained. A service that renders the conversation"
                " anew at every turn shows the policy the other text (tool_calls.history)"
            )
        return lines


def check_template(template: ConversationTemplate) -> TemplateCheck:
    """Compare rollouts in a chat template with the template's own rendering.

    Conversations without and with thoughts are compared before their last turn, and behind it; those with
    thoughts only if the template shows thoughts.

    Args:
        template: The template.
    """
    lacks_thoughts = template.style.thought_tags is not None
    # The template itself may close the thought before the turn.
    may_think = not lacks_thoughts and template.call_format.thought_tags[1] not in template.opening
    thoughts = {"without thoughts": ""}
    if may_think:
        thoughts["with thoughts"] = "I look it up."
    cases = []
    for title, thought in thoughts.items():
        exchanges = _example(template, thought)
        for when, part in (("before the answer", exchanges[:-1]), ("with the answer", exchanges)):
            differences = compare(template, [user_message("Who painted it?")], part)
            cases.append(Case(f"{title}, {when}", tuple(differences)))
    return TemplateCheck(template.renderer.title, template.call_format.name, tuple(cases), lacks_thoughts)


def require_exact(check: TemplateCheck) -> None:
    """Refuse a chat template that writes earlier turns in another way, for `tool_calls.history` "refuse".

    Args:
        check: The check of the template.

    Raises:
        UserError: The template differs from the rollout.
    """
    for case in check.cases:
        for difference in case.differences:
            raise UserError(
                f"tool_calls.history is refuse, but {check.title} differs from the rollout in turn"
                f" {difference.turn} of a conversation {case.title}: {difference.cause}; choose"
                " tool_calls.history=keep, or another chat template"
            )


def rollout_segments(
    template: ConversationTemplate, prompt: Sequence[ChatMessage], exchanges: Sequence[Exchange]
) -> list[Segment]:
    """Return a conversation as a rollout writes it, if the policy writes turns as the template would.

    Args:
        template: The template.
        prompt: Messages before the first turn.
        exchanges: The turns, and the answers to their calls.

    Returns:
        The prompt, and for each turn what the policy samples and what the environment adds.

    Raises:
        UserError: The template refuses the prompt.
        TemplateFailure: It refuses the conversation.
    """
    text, opening = template.prompt(prompt)
    segments = [Segment(text, tuple(template.renderer.encode(text)), False, opening)]
    history = list(prompt)
    for exchange in exchanges:
        history.append(template.chat_message(exchange.message))
        before = segments[-1]
        end = template.end_of_call if exchange.message.calls else template.end_of_answer
        sampled = _spelled_turn(template, history, before, exchange.message, end) + end
        ids = template.renderer.encode(sampled, behind=before.text)
        segments.append(Segment(sampled, tuple(ids), True))
        if not exchange.message.calls:
            continue
        for index, (call, answer) in enumerate(zip(exchange.message.calls, exchange.answers, strict=True)):
            history.append(tool_message(call, index, answer))
        reply = template.reply(exchange.message.calls, exchange.answers, end)
        reply_ids = template.encode(reply, end)
        segments.append(Segment(reply, tuple(reply_ids), False, template.opening))
    return segments


def compare(
    template: ConversationTemplate, prompt: Sequence[ChatMessage], exchanges: Sequence[Exchange]
) -> list[Difference]:
    """Return where a template's rendering of a conversation differs from the rollout.

    Args:
        template: The template.
        prompt: Messages before the first turn.
        exchanges: The turns. The answers to their calls must differ from each other.
    """
    try:
        segments = rollout_segments(template, prompt, exchanges)
        whole = template.renderer.render(
            _chat_messages(template, prompt, exchanges), opens_turn=bool(exchanges[-1].answers)
        )
    except TemplateFailure as failure:
        return [Difference(Cause.REFUSAL, len(exchanges), in_template=str(failure))]
    text = "".join(segment.text for segment in segments)
    # Behind the last turn, the template may write what belongs to the next message, or leave to it what ends
    # the turn.
    if whole.startswith(text) or whole == text.removesuffix(template.end_of_answer):
        return _compare_tokens(template, segments, text)
    return list(_compare_texts(template, segments, exchanges, whole))


def _chat_messages(
    template: ConversationTemplate, prompt: Sequence[ChatMessage], exchanges: Sequence[Exchange]
) -> list[ChatMessage]:
    """Return a whole conversation as messages for the chat template."""
    messages = list(prompt)
    for exchange in exchanges:
        messages.append(template.chat_message(exchange.message))
        for index, (call, answer) in enumerate(zip(exchange.message.calls, exchange.answers, strict=True)):
            messages.append(tool_message(call, index, answer))
    return messages


def _spelled_turn(
    template: ConversationTemplate,
    history: Sequence[ChatMessage],
    before: Segment,
    message: AssistantMessage,
    end: str,
) -> str:
    """Return a turn as the template spells it while it is the newest, without what ends it.

    If that is not the whole turn, the format writes it.
    """
    newest = template.renderer.render(history)
    place = newest.rfind(before.text)
    if place >= 0:
        spelled, _, _ = newest[place + len(before.text) :].partition(end)
        parsed = template.parse(spelled, before.opening)
        if (parsed.thought, parsed.content, parsed.calls) == (
            message.thought,
            message.content,
            message.calls,
        ):
            return spelled
    return template.call_format.write_turn(message, before.opening)


def _compare_texts(
    template: ConversationTemplate, segments: Sequence[Segment], exchanges: Sequence[Exchange], whole: str
) -> Iterator[Difference]:
    """Yield the differences of a rendering whose text is not the rollout's."""
    opening = segments[0].opening
    prompt = segments[0].text.removesuffix(opening)
    if not whole.startswith(prompt):
        yield Difference(Cause.PROMPT, 0, prompt, whole[: len(prompt)])
        return
    position = len(prompt)
    remaining = list(segments[1:])
    for number, exchange in enumerate(exchanges, 1):
        turn = opening + remaining.pop(0).text
        end = len(whole)
        if exchange.message.calls:
            reply = remaining.pop(0)
            # The opening that the reply ends with belongs to the next turn.
            answer = reply.text.removesuffix(reply.opening)
            end = whole.find(answer, position)
            if end < 0:
                yield Difference(Cause.ENVIRONMENT, number, answer, whole[position:])
                return
        rendered = whole[position:end]
        is_same = rendered == turn
        if not exchange.message.calls:
            is_same = rendered.startswith(turn) or rendered == turn.removesuffix(template.end_of_answer)
        if not is_same:
            yield Difference(_cause_of(template.call_format, turn, rendered), number, turn, rendered)
        if exchange.message.calls:
            position = end + len(answer)
            opening = reply.opening


def _cause_of(call_format: CallFormat, turn: str, rendered: str) -> Cause:
    """Return why a template writes a turn in another way.

    Args:
        call_format: Reads both.
        turn: The turn of the rollout, with its opening and its end.
        rendered: The template's text.
    """
    close_tag = call_format.thought_tags[1]
    in_rollout = call_format.parse(turn, "")
    in_template = call_format.parse(rendered, "")
    if in_rollout.thought and not in_template.thought:
        return Cause.DROPS_THOUGHT
    if in_rollout.thought == in_template.thought == "":
        if close_tag in rendered and close_tag not in turn:
            return Cause.ADDS_EMPTY_THOUGHT
        if close_tag in turn and close_tag not in rendered:
            return Cause.DROPS_EMPTY_THOUGHT
    if in_rollout.calls != in_template.calls or in_rollout.thought != in_template.thought:
        return Cause.CHANGES_MESSAGE
    return Cause.SPELLS_OTHERWISE


def _compare_tokens(
    template: ConversationTemplate, segments: Sequence[Segment], text: str
) -> list[Difference]:
    """Return a difference if a text becomes other tokens as a whole than piece by piece."""
    whole_ids = template.renderer.encode(text)
    position = 0
    turn = 0
    for segment in segments:
        turn += segment.is_sampled
        ids = tuple(whole_ids[position : position + len(segment.token_ids)])
        if ids != segment.token_ids:
            return [Difference(Cause.TOKENS, turn if segment.is_sampled else turn + 1)]
        position += len(ids)
    return []


def _example(template: ConversationTemplate, thought: str) -> list[Exchange]:
    """Return a conversation with calls in two turns, two in the second if the template allows it."""
    name = next(iter(template.tools))
    first = ToolCall(name, {"probe": "painter"})
    second = ToolCall(name, {"probe": "year"})
    third = ToolCall(name, {"probe": "place"})
    together = (second, third) if template.allows_several_calls else (second,)
    answers = ("In 1889.", "In a museum.")[: len(together)]
    return [
        Exchange(AssistantMessage(thought, "", (first,)), ("A painter.",)),
        Exchange(AssistantMessage(thought, "", together), answers),
        Exchange(AssistantMessage(thought, "It was Ann.", ())),
    ]


def _described(case: Case) -> Iterator[str]:
    """Yield a line for each cause of a conversation's differences, with the first as an example."""
    for cause in dict.fromkeys(difference.cause for difference in case.differences):
        differences = [difference for difference in case.differences if difference.cause == cause]
        first = differences[0]
        places = ", ".join(
            f"turn {difference.turn}" if difference.turn else "prompt" for difference in differences
        )
        texts = ""
        if first.in_rollout or first.in_template:
            texts = f": {_quoted(first.in_rollout)} became {_quoted(first.in_template)}"
        yield f"{case.title}, {places}: {cause}{texts}"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _QUOTED_LENGTH else text[:_QUOTED_LENGTH] + "…")
