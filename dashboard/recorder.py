"""A ring of an engine's last steps, for the inspector's live view."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from dashboard.views import Timeline, block_map, step_brief, step_view

if TYPE_CHECKING:
    from infer.blocks import BlockPool
    from infer.report import Report
    from infer.sequences import Sequences
    from infer.state import EngineState


class StepRecorder:
    """Keeps references to the values of the last steps; the work is done when somebody looks.

    ``record`` costs less than a microsecond and belongs to the engine's thread. ``to_json`` may run
    in any other: what it reads are values that no later step changes. Prompts and token ids stay
    inside.
    """

    def __init__(self, num_steps: int = 240) -> None:
        self._reports: deque[Report] = deque(maxlen=num_steps)
        self._blocks: tuple[BlockPool, Sequences] | None = None

    def record(self, report: Report, state: EngineState) -> None:
        """Note a collected step and the state after it."""
        if report.plan.num_sequences:
            self._reports.append(report)
        self._blocks = (state.host.pool, state.host.seqs)

    def timeline(self, step: int | None = None) -> Timeline:
        """The last steps; ``step`` in detail, the newest when None or no longer kept."""
        reports = tuple(self._reports)
        chosen = next((r for r in reports if r.step == step), reports[-1] if reports else None)
        blocks = self._blocks
        return Timeline(
            block_size=chosen.plan.block_size if chosen else 0,
            steps=tuple(
                step_brief(r.plan, r.stats, [f.request_id for f in r.accepted.finished])
                for r in reports
            ),
            blocks=None if blocks is None else block_map(*blocks),
            detail=None if chosen is None else step_view(chosen.plan),
        )

    def to_json(self, step: int | None = None) -> str:
        """``timeline`` as JSON, which ``/debug/steps`` answers."""
        return msgspec.json.encode(self.timeline(step)).decode()
