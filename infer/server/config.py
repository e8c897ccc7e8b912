"""Every option of the server, checked before anything is bound or loaded."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Literal

from infer.errors import ConfigError
from infer.streams import STEP_TIMEOUT_S
from infer.types import MAX_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen, whom to answer and how much to accept.

    Raises:
        ConfigError: a value is out of range, or a non-loopback address without an API key.
    """

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_key: str | None = None  # asked for on every route but /health
    allowed_hosts: tuple[str, ...] = ()  # Host headers beside the address itself, for proxies
    allowed_origins: tuple[str, ...] = ()  # web origins that may call from a browser; *: any
    served_model_name: tuple[str, ...] = ()  # empty: the model's own name; the first is canonical
    engine_process: bool | None = None  # a process of its own; None: on CUDA
    dashboard: bool = True  # the chat page, at /ui
    max_queue: int = 256  # sequences that may wait beside max_num_seqs running ones
    max_body_bytes: int = 4 << 20
    max_messages: int = 1024
    max_prompts: int = 256  # prompts of one completion request
    max_n: int = 16
    max_stop: int = 16
    max_tools: int = 128
    max_logprobs: int = MAX_LOGPROBS
    request_timeout: float = (
        600.0  # seconds from arrival to the last byte; a request may ask for less
    )
    body_timeout: float = 30.0  # seconds to receive a body
    text_timeout: float = 10.0  # seconds for one tokenization or template
    step_timeout: float = STEP_TIMEOUT_S  # seconds without a step that mean the engine hangs
    text_workers: int = 2
    shutdown_timeout: float = 30.0  # seconds for running requests at SIGTERM
    log_format: Literal["text", "json"] = "text"

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}, it must be from 0 (any free one) to 65535")
        for name in ("max_body_bytes", "max_messages", "max_prompts", "max_n", "max_stop"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_queue", "max_tools", "max_logprobs"):
            _at_least(name, getattr(self, name), 0)
        _at_least("text_workers", self.text_workers, 1)
        for name in (
            *("request_timeout", "body_timeout", "text_timeout", "step_timeout"),
            "shutdown_timeout",
        ):
            value = getattr(self, name)
            low = 0.0 if name == "shutdown_timeout" else 1e-3
            if not (math.isfinite(value) and value >= low):
                raise ConfigError(f"{name} is {value}, it must be a number of seconds above 0")
        if self.max_logprobs > MAX_LOGPROBS:
            raise ConfigError(
                f"max_logprobs is {self.max_logprobs}, the engine gives at most {MAX_LOGPROBS}"
            )
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format is {self.log_format!r}; choose text or json")
        if self.api_key is not None:
            _check_key(self.api_key)
        elif not self.loopback:
            raise ConfigError(
                f"host {self.host!r} can be reached from other machines, which needs an API key; "
                "set api_key (or PURESTEP_API_KEY), or use host 127.0.0.1"
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _at_least(name: str, value: int, low: int) -> None:
    if not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} is {value!r}, it must be a whole number of at least {low}")


def _check_key(key: str) -> None:
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the API key has {len(key)} characters; it must have at least 8 printable ASCII "
            "characters without spaces, for example the output of `openssl rand -hex 24`"
        )
