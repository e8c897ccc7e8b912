"""The built-in lessons: which requests run on which engine, and what to look at in every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request that is submitted before step ``step``."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A walk on a private engine. ``notes[i]`` is about the state after i steps."""

    key: str
    title: str
    intro: str
    arrivals: tuple[Arrival, ...]
    notes: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    block_size: int = 256
    num_blocks: int = 8
    max_num_seqs: int = 2
    max_num_batched_tokens: int = 512
    prefix_caching: bool = True


ONE_REQUEST = Lesson(
    key="one",
    title="1 · One request: a prefill and two decodes",
    intro=(
        "A prompt of three tokens asks for three more. Before you step: how many steps will there "
        "be, and how many positions does each compute?"
    ),
    arrivals=(Arrival(name="R1", prompt=(100, 200, 300), max_tokens=3),),
    notes=(
        "The request waits. Three tokens are known, no position has KV, and no block is taken.",
        (
            "Prefill: all three prompt positions in one step. Their K and V go to slots 0, 1 and 2 "
            "of the request's block. The last position's logits gave the fourth token: it is known "
            "now, but has no KV yet, so known is cached + 1."
        ),
        (
            "Decode: the one position that is new, 3, with the fourth token as its input. "
            "Attention reads the KV of positions 0 to 3, so context_lens is 4. It gave the fifth."
        ),
        (
            "Decode again: position 4, context 5. The sixth token is the third output and reaches "
            "the limit, so the request ends and its block goes back. It never enters the model, "
            "and never gets KV."
        ),
    ),
    questions=(
        (
            "Why do three generated tokens take only two decode steps?",
            (
                "The prefill gave the first one: computing the last prompt position is what "
                "predicts the token after it."
            ),
        ),
        (
            "Why is there always one known token more than cached positions?",
            (
                "A token that was just sampled has not been through the model. Its K and V are made"
                " by the step that has it as input."
            ),
        ),
        (
            "Why is nothing cached after the last step?",
            (
                "The request ended and gave its block back. The numbers in it were not erased; only"
                " nobody refers to them any more."
            ),
        ),
    ),
)

TWO_REQUESTS = Lesson(
    key="two",
    title="2 · Two requests, one of which ends early",
    intro=(
        "R1 has three prompt tokens and wants two more, R2 has four and wants five. They arrive "
        "together. Will it take 2 + 5 = 7 steps?"
    ),
    arrivals=(
        Arrival(name="R1", prompt=(100, 200, 300), max_tokens=2),
        Arrival(name="R2", prompt=(400, 500, 600, 700), max_tokens=5),
    ),
    notes=(
        "Both wait. The pool is empty.",
        (
            "One step prefills both: 3 + 4 = 7 positions in one batch. cu_seqlens_q says where each"
            " sequence begins: 0, 3, 7. Every sequence writes into a block of its own, and each got"
            " its first token."
        ),
        (
            "One decode position each, in one batch. R1 has its two tokens and leaves: its block is"
            " free again. R2 goes on."
        ),
        (
            "The batch is R2 alone. Nothing waited for it, and it waited for nothing: batches are "
            "put together anew at every step. That is continuous batching."
        ),
        "R2 again: one position, one token.",
        "R2 has its five tokens and leaves. The pool is as it was at the beginning.",
    ),
    questions=(
        (
            "Why five steps and not seven?",
            (
                "A step advances every running sequence by one token. The longest request decides: "
                "R2's five tokens take five steps, and R1 rode along in two of them."
            ),
        ),
        (
            "R1 ended in step 2. Why does that step's plan still show it?",
            (
                "A plan is the decision before the step. That R1 is done is known only after its "
                "token was sampled; the next plan does not have it."
            ),
        ),
    ),
)

BOUNDARY = Lesson(
    key="boundary",
    title="3 · The block boundary: where token 257 goes",
    intro=(
        "A block holds 256 positions and the prompt is exactly 256 tokens long. The prefill "
        "predicts token 257. When does the request need a second block?"
    ),
    arrivals=(Arrival(name="R1", prompt=tuple(range(100, 356)), max_tokens=3),),
    notes=(
        "The request waits with 256 known tokens: one block's worth, to the last slot.",
        (
            "The prefill wrote positions 0 to 255 and filled the block. 257 tokens are known, 256 "
            "have KV, and the block table still has one entry: token 257 has not been through the "
            "model, so it needs no slot yet."
        ),
        (
            "Position 256 is the first that does not fit: 256 // 256 = 1, so a second block was "
            "taken. Its slot is block_tables[1] × 256 + 0. Logical position 256 is not physical "
            "slot 256, unless the pool happens to hand out neighbours. context_lens is 257."
        ),
        (
            "Position 257 goes to the next slot of the same block. The third token ends the "
            "request, and both blocks are given back. The full one stays findable by its content "
            "until somebody needs the space: the same prompt would not be computed again."
        ),
    ),
    questions=(
        (
            "257 tokens are known after the prefill. Why is one block enough?",
            "Blocks hold KV, not tokens. Token 257 gets its KV in the next step.",
        ),
        (
            "Why does the second step take a block, and the third does not?",
            "Position 256 opens block 1 of the sequence; position 257 is its second slot.",
        ),
        (
            "Why does the last token, the 259th, have no KV?",
            "It was sampled and the request ended. Nobody computed a position with it as input.",
        ),
    ),
)

_SHARED = tuple(range(200, 232))
PREFIX = Lesson(
    key="prefix",
    title="4 · A shared beginning",
    intro=(
        "R2 comes one step after R1 and has the same first 32 tokens. Blocks hold 16 positions "
        "here. How many positions does R2's prefill compute?"
    ),
    arrivals=(
        Arrival(name="R1", prompt=(*_SHARED, 300, 301), max_tokens=4),
        Arrival(name="R2", prompt=(*_SHARED, 400, 401, 402), max_tokens=3, step=1),
    ),
    notes=(
        "R1 waits; R2 has not arrived.",
        (
            "R1's prefill computed 34 positions in three blocks. The two full ones were entered "
            "into the prefix index under a hash of their tokens and of everything before them. Then"
            " R2 arrived."
        ),
        (
            "R1 decodes and R2 prefills, in the same batch. R2 found its first two blocks in the "
            "index: 32 of its positions were cached before it began, and it computed three. The two"
            " blocks are held twice now, which is what the hatching shows."
        ),
        "Both decode. Their tables begin with the same blocks and end with blocks of their own.",
        (
            "The last step: both end. What they shared stays cached, dim in the map, until its "
            "space is needed."
        ),
    ),
    questions=(
        (
            "Could R2 have shared the third block too?",
            "No. It is not full, and its tokens differ. Only full blocks are entered.",
        ),
    ),
    block_size=16,
    num_blocks=12,
)

PREEMPTION = Lesson(
    key="preemption",
    title="5 · Too few blocks: preemption",
    intro=(
        "Five blocks of four positions, and two requests that each grow to twelve positions, three "
        "blocks. Both fit at first. What happens when the pool runs dry?"
    ),
    arrivals=(
        Arrival(name="R1", prompt=(100, 101, 102, 103, 104, 105), max_tokens=6),
        Arrival(name="R2", prompt=(200, 201, 202, 203, 204, 205), max_tokens=6),
    ),
    notes=(
        (
            "Both wait. Each will need two blocks to begin with, and three in the end: six, and "
            "there are five."
        ),
        "Both prefills fit: six positions in two blocks each. One block is left.",
        "Both decode into the second half of their last blocks.",
        (
            "Position 7 filled the last slot of both. The next positions need a new block each, and"
            " there is one."
        ),
        (
            "R1 came first and takes the last block. R2 is preempted: it gives both of its blocks "
            "back at once, keeps its nine tokens and waits. Nothing of it is in this step's batch."
        ),
        (
            "R1 alone. R2 could have one more block than it had, but the engine does not let it in "
            "on less than what it needs now."
        ),
        "R1 ends and the pool is empty.",
        (
            "R2 is back. Its nine known tokens, three of them generated, are computed in one step, "
            "as if they were a prompt: cached was 0, scheduled is 9. Its next token is the one it "
            "would have got without the interruption."
        ),
        "R2 decodes as before.",
        "R2 ends, with the same six tokens as if it had run alone.",
    ),
    questions=(
        (
            "Is anything lost when a request is preempted?",
            (
                "Its KV is, and is computed again when there is room. Its tokens stay, so the "
                "answer is the same as if it had never been interrupted."
            ),
        ),
    ),
    block_size=4,
    num_blocks=5,
    prefix_caching=False,
)

LESSONS = (ONE_REQUEST, TWO_REQUESTS, BOUNDARY, PREFIX, PREEMPTION)
