"""Which answers are being written, one a browser tab.

A turn goes through three events that the browser chains: the first begins it, the second lets the
answer grow, the third finishes it. A refused question starts such a chain too, and its tail may
arrive between the events of the next question. So a turn says how far it is, and an event that
comes too early or too late for it does nothing.

One event loop uses all of this.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dashboard import conversation as talks
from dashboard.conversation import Conversation, Message

PATIENCE_S = 5.0  # for a turn that was left and is about to end
MAX_ABANDONED = 64  # turns that are kept for a page that comes back


class Phase(Enum):
    """How far a turn is."""

    ASKED = "asked"
    GROWING = "growing"
    GROWN = "grown"


@dataclass(slots=True)
class Turn:
    """An answer being written for one tab."""

    asked: Conversation
    fields: Mapping[str, Any]
    state: Conversation  # with the answer so far
    phase: Phase = Phase.ASKED
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    before: Message | None = None  # the answer that goes on; ``asked`` ends before it
    instead: Conversation | None = None  # what the tab shows by now, if it was left
    kept: bool = True  # what was written before it was left


class Turns:
    """The turns of all tabs by their session."""

    def __init__(self) -> None:
        self._running: dict[str, Turn] = {}
        self._abandoned: OrderedDict[str, Turn] = OrderedDict()  # by conversation

    async def free(self, session: str) -> bool:
        """Whether a question may be asked; a turn that was left is given time to end."""
        turn = self._running.get(session)
        if turn is not None and turn.instead is not None:
            try:
                await asyncio.wait_for(turn.ended.wait(), PATIENCE_S)
            except TimeoutError:
                return False
        return session not in self._running

    def begin(
        self,
        session: str,
        asked: Conversation,
        fields: Mapping[str, Any],
        before: Message | None = None,
    ) -> Turn:
        """Begin a turn of a session that is ``free``; it may go on with the answer ``before``."""
        assert session not in self._running
        state = asked if before is None else talks.add(asked, before)
        turn = self._running[session] = Turn(asked, fields, state, before=before)
        return turn

    def take(self, session: str) -> Turn | None:
        """The turn whose answer shall grow now; None if there is none, or it grows already."""
        turn = self._running.get(session)
        if turn is None or turn.phase is not Phase.ASKED:
            return None
        turn.phase = Phase.GROWING
        return turn

    def finish(self, session: str) -> Turn | None:
        """End the turn whose answer has grown; None if there is none."""
        turn = self._running.get(session)
        if turn is None or turn.phase is not Phase.GROWN:
            return None
        del self._running[session]
        turn.ended.set()
        return turn

    def stop(self, session: str) -> None:
        """Let the answer end with what there is."""
        turn = self._running.get(session)
        if turn is not None:
            turn.stop.set()

    def leave(self, session: str, instead: Conversation, *, kept: bool = True) -> None:
        """The tab shows ``instead`` now; what was written so far is ``kept``, or not."""
        turn = self._running.get(session)
        if turn is not None:
            turn.instead, turn.kept = instead, kept
            turn.stop.set()

    def forget(self, session: str) -> None:
        """The tab was closed: nobody will finish its turn."""
        turn = self._running.get(session)
        if turn is not None:
            self.abandon(session, turn)

    def abandon(self, session: str, turn: Turn) -> None:
        """``turn`` ends here; another one that the session may have by now goes on."""
        turn.stop.set()
        turn.ended.set()
        if self._running.get(session) is turn:
            del self._running[session]
        if turn.kept:
            self._abandoned[turn.asked.id] = turn
            while len(self._abandoned) > MAX_ABANDONED:
                self._abandoned.popitem(last=False)

    def regained(self, stored: Conversation) -> Conversation:
        """``stored`` with what was written of its last answer when its page was gone."""
        turn = self._abandoned.pop(stored.id, None)
        left = None if turn is None else talks.left(turn.state)
        if turn is None or left is None:
            return stored
        length = len(turn.asked.messages) + (turn.before is not None)
        same = stored.messages[: len(turn.asked.messages)] == turn.asked.messages
        return left if same and len(stored.messages) == length else stored
