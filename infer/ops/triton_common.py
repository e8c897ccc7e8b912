"""What every Triton kernel here shares: dependent launch and small helpers.

Note [dependent launch]: the decode kernels are launched with programmatic dependent launch, so a
kernel starts while its predecessor still runs. Each one first lets its own successor start, then
reads what no kernel of the step writes (weights, KV of earlier positions, batch metadata), and only
then waits for its predecessor. No program writes before it has waited, and of every kernel some
wait, which makes the order transitive: a kernel is complete only when all its programs are. What a
kernel reads ahead of its wait must be complete before the last ordinary launch ahead of the chain,
or written by that launch, whose programs then end with a fence: nothing starts before they end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1.0e30)  # a score no real one reaches; finite, so that differences are too
GLUON = "3.6."  # Gluon changes from one Triton to the next: kernels in it are for this one


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on ``device`` may use programmatic dependent launch (Hopper and later)."""
    if interpreted() or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def hopper_gluon(device: torch.device) -> bool:
    """Whether kernels written in Gluon run on ``device``: all are for Hopper and one Triton."""
    if not dependent_launch(device) or not triton.__version__.startswith(GLUON):
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def launch_options(pdl: bool) -> dict[str, bool]:
    """Launch keywords for a kernel that takes ``PDL`` as a constant."""
    return {"launch_pdl": True} if pdl else {}


def dot_precision(dtype: torch.dtype) -> str:
    """What ``dot`` does with operands of ``dtype``: float32 stays float32."""
    if dtype == torch.float32:
        return "ieee"
    return "widen" if interpreted() else "tf32"


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``a @ b + acc`` in float32. The interpreter has no bfloat16 product, so it widens first."""
    if PRECISION == "widen":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def release_successor(PDL: tl.constexpr):
    """Let the next kernel start. See Note [dependent launch]."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def await_predecessor(PDL: tl.constexpr):
    """Wait until everything the previous kernel wrote is visible. See Note [dependent launch]."""
    if PDL:
        gdc_wait()


@gluon.jit
def indices(L: gl.constexpr, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr):
    """Indices along the three axes of a tensor ``[A, B, C]`` of layout L, for Gluon."""
    a = gl.arange(0, A, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    b = gl.arange(0, B, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    return a, b, c
