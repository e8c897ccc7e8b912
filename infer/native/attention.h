// Attention over paged keys and values: online softmax over blocks of KEYS positions that begin at
// multiples of KEYS. A query's result depends on its own position and context alone, bit for bit:
// neither on the other queries of its tile nor on where a prompt was cut.
#pragma once
#include "matrix.h"

constexpr int KEYS = 64;
constexpr int AHEAD = 2 * KEYS;    // positions from what is read to what is fetched
constexpr int MAX_TILE_ROWS = 96;  // (query, head) pairs that share keys once they are laid out
static_assert(KEYS % COLUMNS == 0, "a block of keys is a number of panels");

struct Pages {
    const char *keys, *values;  // [blocks, block_size, num_kv_heads, head_dim]
    const int32_t *table;       // the sequence's block numbers
    int32_t block_size;
    int32_t half;      // bfloat16, else float32
    ptrdiff_t stride;  // bytes from one position to the next

    // Where positions first .. end are, in bytes from `keys` or `values`.
    void find(int first, int end, ptrdiff_t *at) const {
        while (first < end) {
            int page = first / block_size, inside = first - page * block_size;
            int count = std::min(end - first, block_size - inside);
            ptrdiff_t from = ((ptrdiff_t)table[page] * block_size + inside) * stride;
            for (int i = 0; i < count; i++, from += stride) *at++ = from;
            first += count;
        }
    }
};

// What a thread will most likely attend to after this: positions begin .. end.
struct Upcoming {
    Pages pages;
    int begin, end;
};

struct AttentionScratch {
    float *q;       // [MAX_TILE_ROWS, head_dim], scaled
    float *out;     // [MAX_TILE_ROWS, padded]
    float *part;    // [MAX_TILE_ROWS, padded], of one block of keys
    float *scores;  // [MAX_TILE_ROWS, KEYS]
    char *keys;     // [KEYS / COLUMNS] panels
    char *values;   // [KEYS, padded], as they are stored
    float *maxima;  // [MAX_TILE_ROWS]
    float *factors;  // [MAX_TILE_ROWS]
    float *totals;   // [MAX_TILE_ROWS, LANES]

    static size_t floats(int head_dim) {
        size_t padded = (head_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
        return MAX_TILE_ROWS * (3 * padded + KEYS + LANES + 2) + 2 * KEYS * padded;
    }
    AttentionScratch(float *memory, int head_dim) {
        size_t padded = (head_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
        auto take = [&](size_t count) {
            float *part = memory;
            memory += count;
            return part;
        };
        q = take(MAX_TILE_ROWS * padded);
        out = take(MAX_TILE_ROWS * padded);
        part = take(MAX_TILE_ROWS * padded);
        scores = take(MAX_TILE_ROWS * KEYS);
        keys = (char *)take(KEYS * padded);
        values = (char *)take(KEYS * padded);
        totals = take(MAX_TILE_ROWS * LANES);
        maxima = take(MAX_TILE_ROWS);
        factors = take(MAX_TILE_ROWS);
    }
};

static inline int first_seen(int position, int window) {
    return window > 0 ? std::max(0, position - window + 1) : 0;
}

// COLUMNS keys of one head, transposed: float32 [head_dim, COLUMNS], or as PAIRS
// [head_dim / 2, COLUMNS]. Beyond `count` the last one is repeated: pages that are not the
// sequence's own stay unread.
static void lay_out_keys(const char *keys, const ptrdiff_t *at, const ptrdiff_t *next, int count,
                         int words, char *out) {
    int done = 0;
    for (; done + LANES <= words; done += LANES) {
        const char *from = keys + done * sizeof(float);
        for (int side = 0; side < COLUMNS; side += LANES) {
            Words square[LANES];
            for (int i = 0; i < LANES; i++) {
                int c = std::min(side + i, count - 1);
                square[i] = load<Words>(from + at[c]);
                __builtin_prefetch(from + next[c], 0, 2);
            }
            transpose(square);
            char *to = out + ((ptrdiff_t)done * COLUMNS + side) * sizeof(float);
            for (int i = 0; i < LANES; i++) store(to + i * COLUMNS * sizeof(float), square[i]);
        }
    }
    for (; done < words; done++) {
        for (int c = 0; c < COLUMNS; c++) {
            const char *from = keys + at[std::min(c, count - 1)] + done * sizeof(float);
            store(out + ((ptrdiff_t)done * COLUMNS + c) * sizeof(float), load<uint32_t>(from));
        }
    }
}

// `count` values of one head, one after the other, padded with zeros.
static void lay_out_values(const char *values, const ptrdiff_t *at, int count, int used, int padded,
                           char *out) {
    int whole = used / sizeof(Vec) * sizeof(Vec);
    for (int j = 0; j < count; j++, out += padded) {
        const char *from = values + at[j];
        for (int b = 0; b < whole; b += sizeof(Vec)) store(out + b, load<Vec>(from + b));
        if (whole < used) memcpy(out + whole, from + whole, used - whole);
        if (used < padded) memset(out + used, 0, padded - used);
    }
}

// Turn one row of scores into weights relative to the largest score seen so far. Returns the
// factor that brings what was summed before to the same scale. Positions outside of from .. to
// weigh nothing.
static inline float weigh(float *scores, int size, int from, int to, float &maximum_seen,
                          float *totals) {
    Vec best = splat(-INFINITY);
    Ints lane{};
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int at = 0; at < size; at += LANES) {
        Vec s = load<Vec>(scores + at);
        if (from > at || to < at + LANES) {
            Ints seen = (lane + at >= from) & (lane + at < to);
            s = select(seen, s, splat(-INFINITY));
            store(scores + at, s);
        }
        best = larger(s, best);
    }
    float most = std::max(maximum_seen, maximum(best));
    if (most == -INFINITY) {  // nothing visible yet
        for (int at = 0; at < size; at += LANES) store(scores + at, Vec{});
        return 1.0f;
    }
    Vec factor = splat(1.0f);
    if (most > maximum_seen) factor = exponential(splat(maximum_seen - most));
    maximum_seen = most;
    Vec total = load<Vec>(totals) * factor;
    for (int at = 0; at < size; at += LANES) {
        Vec weight = exponential(load<Vec>(scores + at) - most);
        total += weight;
        store(scores + at, weight);
    }
    store(totals, total);
    return factor[0];
}

// What attends together: queries at neighbouring positions of one sequence, some of its KV heads.
struct Queries {
    int32_t seq, token, count, position;  // the first one's token and position
    int32_t head, num_heads;              // KV heads
};

struct AttentionShape {
    int32_t group, head_dim, window;  // query heads of a KV head; 0: every position is visible
};

// Where the keys and values of a block are, and which to fetch meanwhile: bytes from the cache's
// start.
struct Block {
    int first, keys, unseen;
    ptrdiff_t at[KEYS], next[KEYS];
};

// One block of keys for the rows of one KV head, which begin at `row` of the scratch.
static void attend_block(const Pages &pages, const AttentionShape &shape, int head,
                         const Block &block, const Queries &part, const AttentionScratch &s,
                         int row) {
    int dim = shape.head_dim, size = pages.half ? 2 : 4, rows = part.count * shape.group;
    int padded = (dim + COLUMNS - 1) / COLUMNS * COLUMNS;
    int groups = (block.keys + COLUMNS - 1) / COLUMNS, words = dim * size / 4;
    ptrdiff_t offset = (ptrdiff_t)head * dim * size, panel_bytes = (ptrdiff_t)words * COLUMNS * 4;
    for (int i = 0; i < groups; i++) {
        int first = i * COLUMNS;
        lay_out_keys(pages.keys + offset, block.at + first, block.next + first, block.keys - first,
                     words, s.keys + i * panel_bytes);
    }
    float *scores = s.scores + row * KEYS;
    TileArgs score{s.q + row * dim, dim, s.keys, COLUMNS * 4, words, scores, KEYS, groups,
                   panel_bytes};
    pages.half ? in_tiles<PAIRS>(score, rows) : in_tiles<FLOATS>(score, rows);
    for (int r = 0; r < rows; r++) {
        int position = part.position + r / shape.group;
        int from = first_seen(position, shape.window) - block.first;
        int to = position + 1 - block.first;
        s.factors[r] = weigh(scores + r * KEYS, groups * COLUMNS, from, to, s.maxima[row + r],
                             s.totals + (row + r) * LANES);
    }
    TileArgs value{scores + block.unseen, KEYS, pages.values + offset, 0,
                   block.keys - block.unseen, s.part, padded, padded / COLUMNS, COLUMNS * size};
    value.at = block.at + block.unseen, value.next = block.next + block.unseen;
    ptrdiff_t copied[KEYS];
    if (padded > dim) {
        for (int i = 0; i < value.steps; i++) copied[i] = (ptrdiff_t)i * padded * size;
        lay_out_values(value.panel, value.at, value.steps, dim * size, padded * size, s.values);
        value.panel = s.values, value.at = value.next = copied;
    }
    pages.half ? in_tiles<HALVES, true>(value, rows) : in_tiles<FLOATS, true>(value, rows);
    for (int r = 0; r < rows; r++) {
        float *out = s.out + (row + r) * padded, *sums = s.part + r * padded;
        for (int d = 0; d < padded; d += LANES) {
            store(out + d, load<Vec>(out + d) * s.factors[r] + load<Vec>(sums + d));
        }
    }
}

// Scale a row of sums. A tile of bfloat16 leaves even columns in its first vector, odd ones in its
// second.
static void finish(const float *sums, int dim, bool half, float scale, float *out) {
    for (int first = 0; first < dim; first += COLUMNS, sums += COLUMNS) {
        Words a = (Words)(load<Vec>(sums) * scale), b = (Words)(load<Vec>(sums + LANES) * scale);
        float row[COLUMNS];
        store(row, half ? shuffled(a, b, Zipped<0>{}, Lanes{}) : a);
        store(row + LANES, half ? shuffled(a, b, Zipped<1>{}, Lanes{}) : b);
        memcpy(out + first, row, std::min(COLUMNS, dim - first) * sizeof(float));
    }
}

// Where the keys of `count` positions from `first` are; after this sequence's `end`, those that
// the thread will need next.
static void find_next(const Pages &pages, const Upcoming &next, int first, int count, int end,
                      ptrdiff_t *at) {
    int own = std::clamp(end - first, 0, count);
    pages.find(first, first + own, at);
    int from = next.begin + std::max(first - end, 0);
    int more = std::clamp(next.end - from, 0, count - own);
    next.pages.find(from, from + more, at + own);
    std::fill(at + own + more, at + count, own + more ? at[own + more - 1] : 0);
}

// q and out point at the first query's first head; strides are from token to token.
static void attend(const Pages &pages, const Upcoming &next, const AttentionShape &shape,
                   const Queries &part, const float *q, ptrdiff_t q_stride, float *out,
                   ptrdiff_t out_stride, const AttentionScratch &s) {
    int dim = shape.head_dim, padded = (dim + COLUMNS - 1) / COLUMNS * COLUMNS;
    int rows = part.count * shape.group, all = rows * part.num_heads;
    for (int h = 0, row = 0; h < part.num_heads; h++) {
        const float *from = q + (part.head + h) * shape.group * dim;
        for (int i = 0; i < part.count; i++, from += q_stride) {
            memcpy(s.q + row * dim, from, shape.group * dim * sizeof(float));
            row += shape.group;
        }
    }
    for (int row = 0; row < all; row++) {
        s.maxima[row] = -INFINITY;
        store(s.totals + row * LANES, Vec{});
    }
    memset(s.out, 0, (size_t)all * padded * sizeof(float));
    int begin = first_seen(part.position, shape.window), end = part.position + part.count;
    for (int block = begin / KEYS * KEYS; block < end; block += KEYS) {
        int keys = std::min(end - block, KEYS), unseen = std::max(begin - block, 0);
        Block b;
        b.first = block, b.keys = keys, b.unseen = unseen;
        pages.find(block, block + keys, b.at);
        find_next(pages, next, block + AHEAD, keys, end, b.next);
        for (int h = 0; h < part.num_heads; h++) {
            attend_block(pages, shape, part.head + h, b, part, s, h * rows);
        }
    }
    for (int h = 0, row = 0; h < part.num_heads; h++) {
        float *to = out + (part.head + h) * shape.group * dim;
        for (int i = 0; i < part.count; i++, to += out_stride) {
            for (int g = 0; g < shape.group; g++, row++) {
                float scale = 1.0f / sum(load<Vec>(s.totals + row * LANES));
                finish(s.out + row * padded, dim, pages.half, scale, to + g * dim);
            }
        }
    }
}
