"""Random loads for the simulation, denser than a state machine's: a number makes a history."""

from __future__ import annotations

import random

from infer import host as hosts
from infer.errors import RequestError, StateError
from infer.types import Request, SamplingParams
from tests.host.simulation import EOS, Simulation, limits, photograph


def play(seed: int, *, invariants: bool = True, num_requests: int = 30) -> Simulation:
    """Run one history to its end; raises where a check or the reference disagrees."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 4)
    num_blocks = rng.randint(6, 24)
    seqs = rng.randint(1, 6)
    bounds = limits(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=min(num_blocks * block_size, rng.randint(6, 40)),
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.randint(0, 14),
        prefix_caching=rng.random() < 0.8,
        priority_span=rng.choice([2, 512]),
    )
    sim = Simulation(bounds, depth=rng.randint(0, 1), invariants=invariants)
    submitted = turns = idle = 0
    kept = []
    while submitted < num_requests or hosts.has_work(sim.host):
        turns += 1
        while submitted < num_requests and rng.random() < 0.4:
            submitted += 1
            sim.submit(_request(f"r{submitted}", bounds.max_model_len, seqs, rng))
        live = sim.live()
        if live and rng.random() < 0.06:
            sim.abort(rng.choice(live))
        if live and rng.random() < 0.15:
            try:
                sim.fork(rng.choice(live), f"f{turns}")
            except (RequestError, StateError):
                pass
        if rng.random() < 0.05:
            kept.append((sim.host, photograph(sim.host)))
        plan = sim.turn()
        idle = 0 if plan.num_sequences or not sim.live() else idle + 1
        assert idle < 20, "nothing moves any more"
    while sim.tickets:
        sim.collect()
    sim.check_end()
    for host, taken in kept:
        assert photograph(host) == taken, "an old state changed"
    return sim


def _request(name: str, max_model_len: int, seqs: int, rng: random.Random) -> Request:
    length = rng.randint(1, max_model_len - 1)
    prompt = [*rng.choice([(1, 2, 3), (1, 2, 2), (5,)]) * length][: length - 1]
    room = max_model_len - length
    max_tokens = rng.choice([None, *[rng.randint(1, room)] * 3])
    stop = rng.choice([(), (), ("ab", "c")])
    return Request(
        request_id=name,
        prompt_token_ids=(*prompt, rng.randrange(4)),
        params=SamplingParams(
            max_tokens=max_tokens,
            n=min(rng.choice([1, 1, 2, 3]), seqs),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.choice([None, 7]),
            min_tokens=0 if stop else min(rng.choice([0, 0, 3]), max_tokens or room),
            ignore_eos=rng.random() < 0.5,
            stop=stop,
            stop_token_ids=rng.choice([(), (), (3, 40), EOS]),
        ),
        priority=rng.choice([0, 0, 0, 1, -1]),
        cache_salt=rng.choice([None, None, "a"]),
    )
