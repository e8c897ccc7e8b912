"""The events of a turn in every order in which a browser's chains can bring them."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

from dashboard import conversation as talks
from dashboard.conversation import Message
from dashboard.turns import Phase, Turns

pytestmark = pytest.mark.anyio
ASKED = talks.add(talks.new(), Message(role="user", text="hello"))


async def test_the_tail_of_a_refused_question_takes_no_turn_apart() -> None:
    # The refused question's chain brings a take and a finish in this order; so does the accepted
    # one's. Whatever comes between them, one take gets the turn and one finish after it ends it.
    merged = sorted({
        order for order in permutations(["take a", "end a", "take b", "end b"])
        if order.index("take a") < order.index("end a")
        and order.index("take b") < order.index("end b")
    })  # fmt: skip
    assert len(merged) == 6
    for order in merged:
        turns = Turns()
        turns.begin("tab", ASKED, {})
        taken, ended = [], []
        for event in order:
            kind, chain = event.split()
            if kind == "take":
                turn = turns.take("tab")
                if turn is not None:
                    taken.append(chain)
                    turn.phase = Phase.GROWN
            elif turns.finish("tab") is not None:
                ended.append(chain)
        assert len(taken) == len(ended) == 1, order
        assert await turns.free("tab")


async def test_a_turn_ends_only_when_its_answer_has_grown() -> None:
    turns = Turns()
    turns.begin("tab", ASKED, {})
    assert turns.finish("tab") is None
    turn = turns.take("tab")
    assert turn is not None and turns.take("tab") is None
    assert turns.finish("tab") is None
    assert not await turns.free("tab")
    assert await turns.free("another tab")
    turn.phase = Phase.GROWN
    assert turns.finish("tab") is turn


async def test_a_question_waits_for_the_turn_that_was_left() -> None:
    turns = Turns()
    turns.begin("tab", ASKED, {})
    turn = turns.take("tab")
    assert turn is not None
    turns.leave("tab", talks.new(), kept=False)
    assert turn.stop.is_set() and not turn.kept
    waiting = asyncio.ensure_future(turns.free("tab"))
    await asyncio.sleep(0)
    assert not waiting.done()
    turn.phase = Phase.GROWN
    turns.finish("tab")
    assert await waiting


async def test_what_an_abandoned_turn_leaves_does_not_reach_the_next() -> None:
    turns = Turns()
    turns.begin("tab", ASKED, {})
    first = turns.take("tab")
    assert first is not None
    turns.forget("tab")
    turns.begin("tab", ASKED, {})
    turns.abandon("tab", first)
    assert not await turns.free("tab")
    assert turns.take("tab") is not first
