"""Native kernels: what a position gets depends on nothing but its own sequence, bit for bit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.ops.sample import sample
from infer.ops.sampling import SampleFlags, SamplingRows
from tests.model.reference import (
    Driver,
    driver_of,
    prompt,
    reference_logits,
    relative_error,
    tiny_model,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads of the kernels: torch's when weights are laid out."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def native(model: Any, **options: Any) -> Driver:
    return driver_of(model, "native", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_bits_do_not_depend_on_the_batch(
    threads: int, dtype: torch.dtype, window: int | None
) -> None:
    model = tiny_model("qwen3", sliding_window=window).to(dtype)
    ids = prompt(230)
    whole = native(model).run([(0, ids)])[0]

    one_by_one = native(model)
    alone = torch.cat([one_by_one.run([(0, [token])])[0] for token in ids])
    assert torch.equal(alone, whole)

    chunked, done, parts = native(model, block_size=7, max_blocks=40), 0, []
    for count in (1, 63, 2, 14, 15, 65, 33, 37):
        others = [(row, prompt(5 + row, seed=row)) for row in range(1, 5)]
        chunk = (0, ids[done : done + count])
        parts.append(chunked.run([*others[:2], chunk, *others[2:]], pad=count % 3)[2])
        done += count
    assert done == len(ids)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 13, 14, 15, 27, 28, 29, 40])
def test_bits_do_not_depend_on_the_number_of_rows(threads: int, rows: int) -> None:
    driver = native(tiny_model("llama", biases=True), num_rows=40, max_blocks=8)
    ids = [prompt(20 + row, seed=row) for row in range(40)]
    before = driver.run(list(enumerate(ids)))
    alone = native(tiny_model("llama", biases=True), num_rows=40, max_blocks=8)
    for row in range(rows):
        assert torch.equal(alone.run([(row, ids[row])])[0], before[row])
    together = driver.run([(row, [7]) for row in range(rows)])
    for row in range(rows):
        assert torch.equal(alone.run([(row, [7])])[0], together[row])


@pytest.mark.parametrize("hidden", [96, 100, 33])
@pytest.mark.parametrize("heads", [(4, 2), (12, 1)])
def test_odd_sizes(threads: int, hidden: int, heads: tuple[int, int]) -> None:
    model = tiny_model("llama", heads=heads, head_dim=24)
    config = model.config
    config.hidden_size, config.intermediate_size, config.vocab_size = hidden, hidden + 7, 133
    torch.manual_seed(1)
    model = type(model)(config).eval()
    ids = prompt(180)
    driver = native(model)
    got = [driver.run([(0, part)])[0] for part in (ids[:150], ids[150:151], ids[151:])]
    assert relative_error(torch.cat(got), reference_logits(model, ids)) < 1e-4


def test_stale_pages_and_other_sequences_cannot_be_seen() -> None:
    model = tiny_model("mistral", sliding_window=40)
    ids = prompt(100)
    want = native(model).run([(0, ids)])[0]
    dirty = native(model)
    for cache in (*dirty.kv.k, *dirty.kv.v):
        cache.fill_(float("nan"))
    first = dirty.run([(0, ids[:70]), (3, prompt(9))])[0]
    rest = [dirty.run([(0, [token]), (3, [1])])[0] for token in ids[70:]]
    assert torch.equal(torch.cat([first, *rest]), want)


def test_a_nan_stays_in_its_own_sequence() -> None:
    model = tiny_model("llama")
    driver = native(model)
    poisoned = driver.tables[1, :2].tolist()
    driver.run([(0, prompt(20)), (1, prompt(20))])
    for cache in (*driver.kv.k, *driver.kv.v):
        cache[poisoned] = float("nan")
    clean, broken = driver.run([(0, [5]), (1, [5])])
    assert torch.isfinite(clean).all()
    assert torch.isnan(broken).all()


# --- sampling -------------------------------------------------------------------------------------


def sampling_rows(count: int, temperatures: Tensor) -> SamplingRows:
    torch.manual_seed(count)
    return SamplingRows(
        temperature=temperatures,
        top_k=torch.zeros(count, dtype=torch.int32),
        top_p=torch.ones(count),
        min_p=torch.zeros(count),
        seed=torch.randint(-(2**31), 2**31 - 1, (count, 2)).to(torch.int32),
        choice=torch.randint(0, 9, (count,)).to(torch.int32),
    )


@pytest.mark.parametrize("vocab", [3, 16, 131, 20_000])
def test_sampling_is_torchs(threads: int, vocab: int) -> None:
    weights: Any = native(tiny_model("llama")).weights
    params = sampling_rows(12, torch.rand(12) * 2 * (torch.arange(12) % 3 > 0))
    rows = torch.randint(0, 12, (40,)).to(torch.int32)
    positions = torch.randint(0, 5000, (40,)).to(torch.int32)
    sources = torch.randint(0, 6, (40,)).to(torch.int32)
    logits = torch.randn(6, vocab) * 3
    logits[1, : vocab // 2] = -torch.inf  # banned
    logits[2, 1:] = logits[2, 0]  # equal: the lowest id wins where nothing is random
    want = sample(logits, sources, positions, params.select(rows), SampleFlags())
    got = weights.sample(logits, sources, positions, rows, params, SampleFlags())
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.scores, want.scores, atol=2e-6, rtol=1e-6)
    assert not got.nan.any()


def test_sampling_reports_nan() -> None:
    weights: Any = native(tiny_model("llama")).weights
    logits, rows = torch.randn(3, 200), torch.arange(3, dtype=torch.int32)
    logits[1, 199] = torch.nan
    params = sampling_rows(3, torch.tensor([0.0, 0.0, 1.0]))
    got = weights.sample(logits, rows, rows, rows, params, SampleFlags())
    assert got.nan.tolist() == [False, True, False]
    assert ((got.tokens >= 0) & (got.tokens < 200)).all()


def test_rows_that_truncate_are_torchs(threads: int) -> None:
    weights: Any = native(tiny_model("llama")).weights
    params = sampling_rows(4, torch.tensor([0.0, 1.0, 1.0, 0.7]))
    params.top_k[2] = 5
    logits, rows = torch.randn(4, 131), torch.arange(4, dtype=torch.int32)
    flags = SampleFlags(top_k=True)
    got = weights.sample(logits, rows, rows, rows, params, flags)
    assert torch.equal(got.tokens, sample(logits, rows, rows, params, flags).tokens)
    assert torch.get_num_threads() == threads


# --- threads, processes -----------------------------------------------------------------------


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_threads_end_with_the_weights() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    native(tiny_model("llama")).run([(0, prompt(9))])  # whatever torch starts once is there
    gc.collect()
    count = count_threads()
    driver = native(tiny_model("llama"))
    driver.run([(0, prompt(40))])
    assert count_threads() == count + 2
    del driver
    gc.collect()
    assert count_threads() == count
    torch.set_num_threads(before)


def test_engines_run_side_by_side(threads: int) -> None:
    drivers = [native(tiny_model("llama", seed=seed)) for seed in range(3)]
    want = [native(tiny_model("llama", seed=seed)).run([(0, prompt(60))])[0] for seed in range(3)]
    got: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}

    def work(index: int) -> None:
        for row in range(8):
            got[index].append(drivers[index].run([(row, prompt(60))])[0])

    workers = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for index, outs in got.items():
        assert len(outs) == 8
        assert all(torch.equal(out, want[index]) for out in outs)


CHILD = """
import os, sys, time, torch
from tests.model.reference import driver_of, prompt, tiny_model
torch.set_num_threads(3)
driver = driver_of(tiny_model("llama"), "native")
want = driver.run([(0, prompt(60))])[0]
time.sleep(float(sys.argv[1]))  # long enough for the threads to lie down, or not
child = os.fork()
out = driver.run([(1, prompt(60))])[0]
del driver
if child == 0:
    os._exit(0 if torch.equal(out, want) else 1)
assert torch.equal(out, want)
assert os.waitpid(child, 0)[1] == 0
print("both")
"""


@pytest.mark.parametrize("pause", ["0", "0.1"])
def test_a_forked_child_runs_and_both_end(pause: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, pause]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "both\n"


# The thread calls nothing of torch's, which aborts where Python ends a thread inside of it.
BUSY = """
import threading, torch
from tests.model.reference import driver_of, prompt, tiny_model
torch.set_num_threads(2)
engine = driver_of(tiny_model("llama"), "native").weights.engine
hidden, rows, out = torch.ones(400, 96), torch.arange(400, dtype=torch.int32), torch.empty(400, 131)
started = threading.Event()

def work():
    while True:
        engine.logits(hidden, rows, out)
        started.set()

threading.Thread(target=work, daemon=True).start()
assert started.wait(60)
"""


def test_a_process_may_end_in_the_middle_of_a_step() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", BUSY], env=env, timeout=100)
        assert done.returncode == 0
