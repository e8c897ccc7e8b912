"""Run by ``test_kernelcache`` in a process of its own, where kernels compile and nothing runs.

Prints one JSON object: how many kernels were wanted, whether all were compiled, and whether this
process then found each of them on disk.
"""

from __future__ import annotations

import json

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from infer import kernelcache
from infer.ops import triton_norm, triton_sample
from infer.ops.sampling import SamplingRows


class Pretended(kernelcache.CompileOnly):
    """A GPU that is asked for its stream as well, since launches begin with that."""

    def get_current_stream(self, device: int) -> int:
        return 0


def launches() -> None:
    for width in (64, 64, 128, 192):
        x = torch.zeros(4, width, dtype=torch.bfloat16)
        triton_norm.silu_mul(x)
        triton_norm.add_rms_norm(x, None, torch.ones(width, dtype=torch.bfloat16), 1e-6)
    # Kernels that call functions with constants of their module.
    rows = torch.zeros(9, dtype=torch.int32)
    floats = torch.zeros(9)
    params = SamplingRows(
        temperature=floats,
        top_k=rows,
        top_p=floats,
        min_p=floats,
        seed=torch.zeros(9, 2, dtype=torch.int32),
        choice=rows,
    )
    triton_sample.sample_rows(torch.zeros(8, 2048), rows[:8], rows[:8], params)


def main() -> None:
    driver.set_active(Pretended(0, GPUTarget("cuda", 90, 32)))
    wanted, _ = kernelcache.rehearse(launches)
    count = kernelcache.compilations()
    complete = kernelcache.compile_all(wanted)
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    for kernel in wanted:
        kernel.function.preload(kernel.variant)
    # All are compiled in this process now: another rehearsal wants none, and launches none either,
    # for which this GPU would lack the means.
    again, _ = kernelcache.rehearse(launches)
    found = {"wanted": len(wanted), "complete": complete, "hits": hits, "counted": count.count}
    found["again"] = len(again)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
