"""What a server says when it is ready."""

from __future__ import annotations

from infer.server.config import ServerConfig
from infer.types import EngineInfo


def banner(info: EngineInfo, config: ServerConfig, port: int, seconds: float) -> str:
    """Model, device, KV cache and addresses, in a few lines."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{port}"
    tokens = info.num_blocks * info.block_size
    kv_bytes = tokens * info.kv_bytes_per_token
    key_hint = " (any user name; the API key is the password)" if config.api_key else ""
    ranks = f", {info.tp_size} ranks" if info.tp_size > 1 else ""
    rows = {
        "model": f"{info.model_name} ({info.architecture}, {info.dtype}, "
        f"{_size(info.weight_bytes)} of weights)",
        "device": f"{info.device}{ranks}, attention {info.attention_backend}, "
        + ("compiled" if info.compiled else "eager"),
        "KV cache": f"{info.num_blocks} blocks of {info.block_size}, {tokens} tokens, "
        f"{_size(kv_bytes)}",
        "limits": f"{info.max_num_seqs} sequences at once, {info.max_model_len} tokens each, "
        f"{info.max_num_batched_tokens} a step",
        "API": f"{url}/v1 ({'with the API key' if config.api_key else 'no key needed'})",
        "metrics": f"{url}/metrics",
        **({"chat": f"{url}/ui/{key_hint}"} if config.dashboard else {}),
    }
    lines = [f"  {name:<9} {text}" for name, text in rows.items()]
    version = info.versions.get("purestep")
    title = f"purestep {version}" if version else "purestep"
    return "\n".join([f"{title} is ready after {seconds:.1f} s", *lines, ""])


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1024:.1f} KiB"
