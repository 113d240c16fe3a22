"""Groups of trajectories: order, concurrency, and one error that stops them all."""

import asyncio
import traceback
from collections import Counter
from dataclasses import replace

import pytest
from loop_fakes import ScriptedSampler, context_of

from calibadv_jax.core.errors import UserError
from calibadv_jax.core.trajectory import Question
from calibadv_jax.rollout.runner import collect_groups

QUESTIONS = [Question(f"q{number}", f"Who is {number}?", ("x",), "test") for number in range(3)]
SEARCH, ANSWER = "<search> ann </search>", "<answer> {} </answer>"


def script(session, turn):
    return SEARCH if turn == 0 else ANSWER.format(session)


def collect(sampler, tokenizer, questions=QUESTIONS, seed=0, work=None, **limits):
    async def run():
        try:
            context = context_of(sampler, tokenizer, **{"group_size": 2} | limits)
            context = replace(context, work=work or Counter())
            return await collect_groups(context, questions, seed, "step4")
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, "tasks were left running"

    return asyncio.run(run())


def test_groups_come_in_order_of_questions(byte_tokenizer):
    slow_first = ScriptedSampler(
        byte_tokenizer, script, delay=lambda session, _: 0.02 if session.startswith("step4/0") else 0.0
    )
    groups = collect(slow_first, byte_tokenizer, work=(work := Counter(begun=1)))
    tokens = sum(member.mask.sum() for group in groups for member in group.trajectories)
    assert work == {"begun": 7, "ended": 6, "searches": 6, "tokens": tokens}
    assert [group.question for group in groups] == QUESTIONS
    for number, group in enumerate(groups):
        assert [member.index for member in group.trajectories] == [0, 1]
        assert [member.answer for member in group.trajectories] == [f"step4/{number}/0", f"step4/{number}/1"]
        assert all(member.question is QUESTIONS[number] for member in group.trajectories)
    assert sorted(slow_first.released) == sorted(slow_first.written)


def test_trajectories_start_in_order_within_max_concurrency(byte_tokenizer):
    flying, most = set(), 0

    def watch(session, turn):
        nonlocal most
        flying.add(session)
        most = max(most, len(flying))
        return 0.001

    sampler = ScriptedSampler(byte_tokenizer, script, delay=watch)
    release = sampler.release
    sampler.release = lambda session: (flying.discard(session), release(session))
    collect(sampler, byte_tokenizer, max_concurrency=2)
    assert most == 2
    first_calls = list(dict.fromkeys(session for session, _, _ in sampler.calls))
    assert first_calls == [f"step4/{number}/{index}" for number in range(3) for index in range(2)]


def test_members_of_a_group_and_steps_draw_different_tokens(byte_tokenizer):
    def seeds(seed):
        sampler = ScriptedSampler(byte_tokenizer, script)
        collect(sampler, byte_tokenizer, seed=seed)
        return {(session, turn): call.seed for turn, (session, _, call) in enumerate(sampler.calls)}

    first = seeds(0)
    assert len(set(first.values())) == len(first) == 12
    assert seeds(0) == first
    assert not set(seeds(1).values()) & set(first.values())


def failing(tokenizer, error):
    """The second trajectory fails in its second turn; the others would wait for an hour."""

    def speak(session, turn):
        if session == "step4/0/1" and turn == 1:
            raise error
        return SEARCH

    def delay(session, turn):
        return 0.0 if session == "step4/0/1" or turn == 0 else 3600.0

    return ScriptedSampler(tokenizer, speak, delay=delay)


def test_error_stops_all_and_is_raised_unchanged(byte_tokenizer):
    cause = ConnectionError("refused")
    error = UserError("retriever is down")
    error.__cause__ = cause
    sampler = failing(byte_tokenizer, error)
    with pytest.raises(UserError) as caught:
        collect(sampler, byte_tokenizer)
    assert caught.value is error and error.__cause__ is cause
    assert "ExceptionGroup" not in "".join(traceback.format_exception(error))
    assert sorted(sampler.released) == sorted(sampler.written)
    assert len(sampler.released) == 6


def test_error_keeps_the_waiting_from_starting(byte_tokenizer):
    sampler = failing(byte_tokenizer, RuntimeError("engine"))
    with pytest.raises(RuntimeError, match="engine"):
        collect(sampler, byte_tokenizer, max_concurrency=2)
    assert len(sampler.released) <= 4 < 6
    assert sorted(sampler.released) == sorted(sampler.written)


def test_cancelling_the_collection_cancels_every_trajectory(byte_tokenizer):
    sampler = ScriptedSampler(byte_tokenizer, script, delay=lambda *_: 3600.0)

    async def run():
        task = asyncio.create_task(
            collect_groups(context_of(sampler, byte_tokenizer, group_size=2), QUESTIONS, 0, "step4")
        )
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(run())
    assert len(sampler.released) == 6
