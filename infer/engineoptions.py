"""The options of loading a model and of its engine, as every command takes them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infer import options
from infer.config import EngineConfig

TABLES = ("load", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What ``infer.load`` takes, as far as a command line can say it."""

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    threads: int | None = None
    tp: int | None = None


LOAD_TEXTS = {
    "model": "preset, checkpoint folder, .gguf file or hub name; default: the embedded model",
    "device": "auto, cpu, cuda or cuda:N",
    "dtype": "auto, float32, bfloat16 or float16",
    "load_format": "auto, safetensors, gguf or random",
    "threads": "CPU threads of each rank of the engine",
    "tp": "ranks (GPUs) that share the model; default: 1, or all that torchrun started",
}
ENGINE_TEXTS = {
    "max_model_len": "tokens a sequence may reach; default: the model's, capped to the KV pool",
    "max_num_seqs": "sequences that run at once; default: 16 on CPU, 256 on CUDA",
    "max_num_batched_tokens": "positions a step computes; default: by device",
    "block_size": "positions a KV block holds",
    "num_blocks": "KV blocks; default: from the memory there is",
    "gpu_memory_utilization": "share of the GPU's memory for weights, work and KV",
    "prefix_caching": "reuse the KV of equal prompt beginnings",
    "attention_backend": "kernels; auto: native on a CPU, triton on CUDA",
    "compile": "compile the model; default: on CUDA",
    "cuda_graphs": "replay decode steps as CUDA graphs",
    "pipeline_depth": "steps launched ahead of reading tokens, 0 or 1",
    "seed": "seeds requests that bring no seed",
}


def add_engine_options(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """Add ``--config``, and every option of loading and of the engine but those ``without``."""
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with tables [load] and [engine]"
    )
    options.add_options(parser, "model", LoadOptions, LOAD_TEXTS)
    texts = {name: text for name, text in ENGINE_TEXTS.items() if name not in without}
    options.add_options(parser, "engine", EngineConfig, texts)


def llm_options(
    args: argparse.Namespace, *, without: tuple[str, ...] = ()
) -> tuple[str | None, Mapping[str, Any]]:
    """The model's name and the keyword options of ``LLM``; the command line wins over the file.

    Raises:
        ConfigError: an option is unknown, of the wrong type or out of range.
    """
    tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    if args.config is not None:
        tables = options.read_options(args.config, TABLES)
    load = {**tables["load"], **options.given(args, LoadOptions)}
    given = options.given(args, EngineConfig)
    engine = {**tables["engine"], **{k: v for k, v in given.items() if k not in without}}
    options.build(LoadOptions, load)
    options.build(EngineConfig, engine)
    model = load.pop("model", None)
    return model, {**load, **engine}
