"""Typed errors: each message names the value, the limit it broke and the remedy."""

from __future__ import annotations


class InferError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(InferError):
    """An engine or model option is wrong; found before anything is allocated."""


class RequestError(InferError):
    """A request can never run as it is written; the caller must change it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # the request field at fault, for error bodies


class ContextLengthError(RequestError):
    """A prompt, or it and the answer asked for, is longer than ``max_model_len``."""


class CapacityError(InferError):
    """The engine is full now; the same request can succeed later or on a larger engine."""


class CheckpointError(InferError):
    """A checkpoint is missing, damaged, or of a kind this package does not run."""


class StateError(InferError):
    """A state value was used after it had been advanced, or with a model it does not fit."""


class EngineError(InferError):
    """The engine failed, is stopping or has not started; the request was not the cause."""


class EngineUnavailable(EngineError):
    """The engine takes no requests: it has failed or is stopping."""
