"""The whole state of an engine as one value, and the ticket of a launched step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from infer.config import EngineConfig, Limits
from infer.host import Host
from infer.kv import KVCache
from infer.lockstep import Outside
from infer.plan import Plan
from infer.report import LogprobArrays
from infer.rows import RowState

if TYPE_CHECKING:
    from infer.runtime import Pending, Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Everything an engine knows between two transitions.

    The state is linear: ``kv`` and ``rows`` are donated to the next transition, so a state can be
    launched from or collected into once. Its host half stays readable for ever.
    """

    host: Host
    kv: KVCache = field(repr=False)  # to print it would copy it from the device
    rows: RowState = field(repr=False)
    runtime: Runtime = field(repr=False)
    limits: Limits
    config: EngineConfig  # with every open choice decided
    generation: int = 0  # must equal the runtime's; an older state was already advanced
    outside: Outside | None = None  # what ranks that follow this one have yet to hear
    # parts of prompt log-probabilities by request id: (first position, values)
    prompt_parts: Mapping[str, tuple[tuple[int, LogprobArrays], ...]] = field(default_factory=dict)

    @property
    def pipeline_depth(self) -> int:
        """Steps the engine loop launches ahead of collect."""
        return self.config.pipeline_depth or 0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step: give it to ``collect``, in the order of the launches."""

    step: int
    plan: Plan
    pending: Pending  # the values, once the device has them
    launched: float  # monotonic seconds
    host_s: float  # host time of schedule, build and launch
