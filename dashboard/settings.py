"""What the dashboard needs to know before it is built."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from infer.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where the engine answers and how the page is served.

    Raises:
        ConfigError: the URL or the path is not of the right form.
    """

    url: str = "http://127.0.0.1:8000"  # the engine's API, without /v1
    api_key: str | None = None
    path: str = "/ui"  # where the page is mounted
    # Redraws a second over all open pages; None: 30 beside an engine on a CPU, which shares its
    # cores with the pages, else 120.
    max_updates_per_s: float | None = None
    max_waiting: int = 64  # chat turns that may wait for a slot in the page's own queue

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"url is {self.url!r}; it must be the engine's address, "
                "for example http://127.0.0.1:8000"
            )
        if not self.path.startswith("/") or self.path == "/" or self.path.endswith("/"):
            raise ConfigError(
                f"path is {self.path!r}; it must begin with a slash and not end with one: "
                "the root belongs to the API"
            )
        updates = self.max_updates_per_s
        if (updates is not None and not updates > 0) or self.max_waiting < 1:
            raise ConfigError(
                f"max_updates_per_s is {updates} and max_waiting {self.max_waiting}; "
                "both must be positive"
            )

    @property
    def api(self) -> str:
        """The engine's URL without a slash or ``/v1`` at its end."""
        return self.url.rstrip("/").removesuffix("/v1")
