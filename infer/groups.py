"""Process groups that belong to a value, not to the process: none of them is the default.

Groups are made of torch.distributed's own parts and registered under their name, which is what the
functional collectives look up.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)
from torch.distributed.distributed_c10d import GroupName

from infer.parallel import TP, Scratch, lowest

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=30)  # a backstop: ranks watch each other much more closely
TEARDOWN_S = 3.0
SCRATCH_BYTES = 1 << 20  # over all ranks: what each reads of a small sum
# Errors are found and handled by the watch; NCCL's own threads would end the process instead.
NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def join(store: Any, rank: int, size: int, name: str, device: torch.device, *, local: bool) -> TP:
    """This rank's place in a new group, over NCCL for CUDA or Gloo for the CPU.

    All ranks call it together. ``local`` says that all are on one host: then Gloo uses the loopback
    interface, and GPUs read each other's memory for small sums.
    """
    own = PrefixStore(name, store)
    group = dist.ProcessGroup(own, rank, size)
    if device.type == "cuda":
        with _environment(NCCL_ENVIRONMENT):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            backend: Any = dist.ProcessGroupNCCL(own, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:
        with _environment({"GLOO_SOCKET_IFNAME": "lo"} if local else {}):
            backend = dist.ProcessGroupGloo(own, rank, size, TIMEOUT)
        kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(device, kind, backend)
    group._set_group_name(GroupName(name))
    _register_process_group(GroupName(name), group)
    tp = TP(rank, size, group)
    lowest(0, tp, device)  # NCCL connects at the first call, which must not be inside a capture
    if device.type == "cuda" and local:
        tp = replace(tp, scratch=_scratch(tp, PrefixStore("scratch", own), device))
    return tp


def _scratch(tp: TP, store: Any, device: torch.device) -> Scratch | None:
    """Memory for small sums; None, on all ranks alike, where GPUs cannot read each other's."""
    memory: Any = _SymmetricMemory
    name, made = tp.group.group_name, None
    try:
        with _environment({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}):
            memory.set_group_info(name, tp.rank, tp.size, store)
            size = (SCRATCH_BYTES // tp.size,)
            buffer = memory.empty_strided_p2p(size, (1,), torch.uint8, device)
            handle = memory.rendezvous(buffer, name)
        pads = [handle.get_signal_pad(rank).view(torch.int32) for rank in range(tp.size)]
        made = Scratch(buffer, tuple(pads))
    except (RuntimeError, AttributeError) as error:
        logger.info("rank %d: small sums go through NCCL: %s", tp.rank, error)
    return made if lowest(int(made is not None), tp, device) else None


def memory_in_use(device: torch.device) -> tuple[str, int]:
    """The device and the bytes this process has taken there, at most so far on a GPU."""
    if device.type == "cuda":
        return str(device), torch.cuda.max_memory_reserved(device)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return str(device), pages * os.sysconf("SC_PAGE_SIZE")


def abort(tp: TP) -> None:
    """Break off what the group is doing, so that whoever waits for it gets an error."""
    if tp.scratch is not None:
        _bounded(lambda: _let_go(tp))
    _bounded(tp.group.abort)


def _let_go(tp: TP) -> None:
    """Let kernels of small sums go on that wait for a dead rank: play its part in the flags.

    A kernel sets its flag with the others once that is down, and waits for theirs with it.
    """
    assert tp.scratch is not None
    deadline = time.monotonic() + TEARDOWN_S / 2
    stream = torch.cuda.Stream(tp.scratch.buffer.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        while time.monotonic() < deadline:
            for rank, pad in enumerate(tp.scratch.pads):
                pad.fill_(int(rank == tp.rank))
            stream.synchronize()


def release(tp: TP) -> None:
    """Free the group's connections and threads."""
    _unregister_process_group(tp.group.group_name)
    _bounded(tp.group.shutdown)


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
