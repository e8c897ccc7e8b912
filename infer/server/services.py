"""What the routes share: one value, made by the application and never changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from infer.client import EngineClient
from infer.server.admission import Admission
from infer.server.config import ServerConfig
from infer.server.errors import ApiError
from infer.server.http import Record
from infer.server.workers import TextPool
from infer.tokenizer import Tokenizer
from infer.types import FailureKind, Observer, RejectionKind

RenderMetrics = Callable[[str | None], tuple[str, bytes]]  # Accept header -> content type, body

# Refusals by status: of any request, and of one that asks for an answer of the model.
_REJECTIONS = {
    401: RejectionKind.UNAUTHORIZED,
    403: RejectionKind.UNAUTHORIZED,
    413: RejectionKind.TOO_LARGE,
}
_GENERATION_REJECTIONS = _REJECTIONS | {
    400: RejectionKind.INVALID,
    404: RejectionKind.INVALID,
    415: RejectionKind.INVALID,
    429: RejectionKind.CAPACITY,
    503: RejectionKind.SHUTDOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """An engine, its tokenizer, and everything around them."""

    client: EngineClient
    tokenizer: Tokenizer
    config: ServerConfig
    pool: TextPool
    admission: Admission
    observers: tuple[Observer, ...]
    render_metrics: RenderMetrics | None
    created: int  # Unix seconds

    @classmethod
    def build(
        cls,
        client: EngineClient,
        tokenizer: Tokenizer,
        config: ServerConfig,
        observers: tuple[Observer, ...],
        render_metrics: RenderMetrics | None,
    ) -> Services:
        """Services with a fresh worker pool and an empty admission."""
        return cls(
            client=client,
            tokenizer=tokenizer,
            config=config,
            pool=TextPool(config.text_workers, config.text_timeout),
            admission=Admission(client.info.max_num_seqs, config.max_queue),
            observers=observers,
            render_metrics=render_metrics,
            created=int(time.time()),
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may use; the first is the one answers carry."""
        return self.config.served_model_name or (self.client.info.model_name,)

    def note(self, error: ApiError, record: Record | None) -> None:
        """Count an answer that is an error, and remember it for the log line."""
        if record is not None:
            record.error = error.code or error.kind
        failure = _failure(error)
        generates = record is not None and record.generates
        rejection = (_GENERATION_REJECTIONS if generates else _REJECTIONS).get(error.status)
        for observer in self.observers:
            if failure is not None:
                observer.on_failure(failure)
            elif rejection is not None:
                observer.on_rejection(rejection)


def _failure(error: ApiError) -> FailureKind | None:
    """The kind of a failure after acceptance. An engine's own are counted by its client."""
    if error.code == "deadline_exceeded":
        return FailureKind.DEADLINE
    if error.status == 500 and error.code != "engine_error":
        return FailureKind.INTERNAL
    return None
