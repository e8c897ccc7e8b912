"""Process groups that belong to a value, not to the process: several may exist, none is the default.

Groups are made of torch.distributed's own parts and registered under their name, which is what the
functional collectives look up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

TIMEOUT = timedelta(minutes=30)  # a backstop: ranks watch each other much more closely
TEARDOWN_S = 3.0
# Errors are found and handled by the watch; NCCL's own threads would end the process instead.
NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def make(store: Any, rank: int, size: int, name: str, device: torch.device, *, local: bool) -> Any:
    """A group over NCCL for CUDA or Gloo for the CPU; all ranks call it together.

    ``local`` says that all ranks are on this host, so that Gloo may use the loopback interface.
    """
    own = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(own, rank, size)
    if device.type == "cuda":
        with _environment(NCCL_ENVIRONMENT):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            backend = dist.ProcessGroupNCCL(own, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        with _environment({"GLOO_SOCKET_IFNAME": "lo"} if local else {}):
            backend = dist.ProcessGroupGloo(own, rank, size, TIMEOUT)
        kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(device, kind, backend)
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)
    return group


def abort(group: Any) -> None:
    """Break off what the group is doing, so that whoever waits for it gets an error."""
    _bounded(group.abort)


def release(group: Any) -> None:
    """Free the group's connections and threads."""
    torch._C._distributed_c10d._unregister_process_group(group.group_name)
    _bounded(group.shutdown)


def _bounded(call: Any) -> None:
    """Call in a thread and wait for a few seconds only: teardown may hang on a dead peer."""

    def run() -> None:
        try:
            call()
        except RuntimeError:
            pass  # broken already

    thread = threading.Thread(target=run, name="teardown", daemon=True)
    thread.start()
    thread.join(TEARDOWN_S)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the time of the block, except those the user has set."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
