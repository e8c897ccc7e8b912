"""What determines a traced run: a model, engine options, and which requests arrive when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from infer.config import EngineConfig, ModelConfig, RopeConfig
from infer.errors import ConfigError
from infer.loading import load
from infer.model import Model
from infer.types import Request, SamplingParams

TINY = "tiny"
# Two layers of random weights: what a trace shows does not depend on what the model says.
TINY_CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope=RopeConfig(),
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    qk_norm=True,
    dtype="float32",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request and the step before which it is submitted (or sooner, when nothing else runs)."""

    request: Request
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Enough to make the same run again."""

    model: str | None = TINY  # what infer.load takes; "tiny": the model above
    load: Mapping[str, Any] = field(default_factory=dict)  # options of infer.load
    engine: Mapping[str, Any] = field(default_factory=dict)  # options of EngineConfig
    arrivals: tuple[Arrival, ...] = ()
    case: str | None = None


def arrival(
    name: str, prompt: list[int] | range, max_tokens: int, step: int = 0, **params: Any
) -> Arrival:
    """A request of exactly ``max_tokens`` greedy tokens, unless ``params`` say otherwise."""
    chosen = {"temperature": 0.0, "ignore_eos": True, **params}
    return Arrival(
        step=step,
        request=Request(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, **chosen),
        ),
    )


def load_model(setup: Setup) -> Model:
    """The model of ``setup``."""
    options = {"progress": False, **setup.load}
    if setup.model != TINY:
        return load(setup.model, **options)
    options = {"device": "cpu", "dtype": "float32", **options, "load_format": "random"}
    return load(TINY, config=TINY_CONFIG, **options)


def engine_config(setup: Setup) -> EngineConfig:
    """Engine options of ``setup``. Traces step one at a time, so that every input is known."""
    return EngineConfig(**{**setup.engine, "pipeline_depth": 0})


def request_fields(request: Request) -> dict[str, Any]:
    """A request as JSON values, without what is at its default."""
    params = {
        f.name: value
        for f in fields(SamplingParams)
        if (value := getattr(request.params, f.name)) != f.default
    }
    if request.params.logit_bias:
        params["logit_bias"] = {str(k): v for k, v in request.params.logit_bias.items()}
    out: dict[str, Any] = {
        "request_id": request.request_id,
        "prompt_token_ids": list(request.prompt_token_ids),
        "params": params,
    }
    if request.priority:
        out["priority"] = request.priority
    if request.cache_salt is not None:
        out["cache_salt"] = request.cache_salt
    return out


def request_of(values: Mapping[str, Any]) -> Request:
    """The request that ``request_fields`` wrote.

    Raises:
        ConfigError: a field is missing or unknown.
    """
    try:
        params = dict(values["params"])
        if "logit_bias" in params:
            params["logit_bias"] = {int(k): v for k, v in params["logit_bias"].items()}
        return Request(
            request_id=values["request_id"],
            prompt_token_ids=tuple(values["prompt_token_ids"]),
            params=SamplingParams(**params),
            priority=values.get("priority", 0),
            cache_salt=values.get("cache_salt"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the trace has a damaged submitted event: {error}") from error


def header(setup: Setup, model: Model, config: EngineConfig) -> dict[str, Any]:
    """The first event of a trace; ``config`` is the engine's, with every choice decided."""
    return {
        "event": "trace",
        "format": 1,
        "case": setup.case,
        "model": setup.model,
        "load": {
            **{k: v for k, v in setup.load.items() if k not in ("progress", "threads")},
            "device": model.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "engine": asdict(config),
    }


def setup_of(head: Mapping[str, Any], arrivals: tuple[Arrival, ...]) -> Setup:
    """The run behind a trace's first event and its ``submitted`` events.

    Raises:
        ConfigError: it is no trace, or one of another format.
    """
    if head.get("event") != "trace" or head.get("format") != 1:
        raise ConfigError("this is no trace of format 1: its first line says otherwise")
    return Setup(
        model=head["model"],
        load=head["load"],
        engine=head["engine"],
        arrivals=arrivals,
        case=head.get("case"),
    )
