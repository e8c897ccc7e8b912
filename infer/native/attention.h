// Attention over paged keys and values: online softmax over blocks of KEYS positions that begin at
// multiples of KEYS. A query's result depends on its own position and context alone, bit for bit:
// neither on the other queries of its tile nor on where a prompt was cut.
#pragma once
#include "matrix.h"

constexpr int KEYS = 64;
constexpr int MAX_TILE_ROWS = 96;  // (query, head) pairs that share keys once they are laid out
static_assert(KEYS % COLUMNS == 0, "a block of keys is a number of panels");

struct Pages {
    const char *keys, *values;  // [blocks, block_size, num_kv_heads, head_dim]
    const int32_t *table;       // the sequence's block numbers
    int32_t block_size;
    int32_t half;      // bfloat16, else float32
    ptrdiff_t stride;  // bytes from one position to the next
    ptrdiff_t head;    // bytes from a position's first head to the one wanted

    // Where positions first .. end are, in bytes from `keys` or `values`.
    void find(int first, int end, ptrdiff_t *at) const {
        while (first < end) {
            int page = first / block_size, inside = first - page * block_size;
            int count = std::min(end - first, block_size - inside);
            ptrdiff_t from = ((ptrdiff_t)table[page] * block_size + inside) * stride + head;
            for (int i = 0; i < count; i++, from += stride) *at++ = from;
            first += count;
        }
    }
};

struct AttentionScratch {
    float *q;       // [MAX_TILE_ROWS, head_dim], scaled
    float *out;     // [MAX_TILE_ROWS, padded]
    float *part;    // [MAX_TILE_ROWS, padded], of one block of keys
    float *scores;  // [MAX_TILE_ROWS, KEYS]
    float *keys;    // [KEYS / COLUMNS, head_dim, COLUMNS]
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
        keys = take(KEYS * padded);
        values = (char *)take(KEYS * padded);
        totals = take(MAX_TILE_ROWS * LANES);
        maxima = take(MAX_TILE_ROWS);
        factors = take(MAX_TILE_ROWS);
    }
};

// Fetch what `find` found, while something else is computed.
static void fetch(const Pages &pages, const ptrdiff_t *at, int count, int head_dim) {
    constexpr int LINE = 64;
    int bytes = head_dim * (pages.half ? 2 : 4);
    for (int j = 0; j < count; j++) {
        for (int b = 0; b < bytes; b += LINE) {
            __builtin_prefetch(pages.keys + at[j] + b, 0, 2);
            __builtin_prefetch(pages.values + at[j] + b, 0, 2);
        }
    }
}

static inline int first_seen(int position, int window) {
    return window > 0 ? std::max(0, position - window + 1) : 0;
}

// COLUMNS keys of one head, transposed to float32 [head_dim, COLUMNS]. Beyond `count` the last one
// is repeated: pages that are not the sequence's own stay unread.
static void lay_out_keys(const Pages &pages, const ptrdiff_t *at, int count, int head_dim,
                         float *out) {
    const char *rows[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) rows[c] = pages.keys + at[std::min(c, count - 1)];
    int per_word = pages.half ? 2 : 1, words = head_dim / per_word, done = 0;
    for (; done + LANES <= words; done += LANES) {
        for (int side = 0; side < 2; side++) {
            Words square[LANES];
            for (int i = 0; i < LANES; i++) {
                square[i] = load<Words>(rows[side * LANES + i] + done * sizeof(float));
            }
            transpose(square);
            for (int i = 0; i < LANES; i++) {
                float *to = out + (ptrdiff_t)(done + i) * per_word * COLUMNS + side * LANES;
                if (pages.half) {
                    store(to, low(square[i]));
                    store(to + COLUMNS, high(square[i]));
                } else {
                    store(to, square[i]);
                }
            }
        }
    }
    for (int d = done * per_word; d < head_dim; d++) {
        for (int c = 0; c < COLUMNS; c++) {
            out[d * COLUMNS + c] = pages.half ? widen(load<uint16_t>(rows[c] + d * sizeof(uint16_t)))
                                              : load<float>(rows[c] + d * sizeof(float));
        }
    }
}

// `count` values of one head, one after the other, padded with zeros.
static void lay_out_values(const Pages &pages, const ptrdiff_t *at, int count, int head_dim,
                           int padded, char *out) {
    int size = pages.half ? 2 : 4, used = head_dim * size, whole = used / sizeof(Vec) * sizeof(Vec);
    for (int j = 0; j < count; j++, out += padded * size) {
        const char *from = pages.values + at[j];
        for (int b = 0; b < whole; b += sizeof(Vec)) store(out + b, load<Vec>(from + b));
        memcpy(out + whole, from + whole, used - whole);
        memset(out + used, 0, padded * size - used);
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

// Queries at positions first .. first + count of one sequence, the `group` heads of one KV head.
// q and out point at the first query's first head; strides are from token to token.
static void attend(const Pages &pages, const float *q, ptrdiff_t q_stride, float *out,
                   ptrdiff_t out_stride, int first, int count, int group, int head_dim, int window,
                   const AttentionScratch &s) {
    int rows = count * group, padded = (head_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
    for (int r = 0; r < rows; r++) {
        memcpy(s.q + r * head_dim, q + r / group * q_stride + r % group * head_dim,
               head_dim * sizeof(float));
        s.maxima[r] = -INFINITY;
        store(s.totals + r * LANES, Vec{});
    }
    memset(s.out, 0, (size_t)rows * padded * sizeof(float));
    int begin = first_seen(first, window), end = first + count;
    int size = pages.half ? 2 : 4;
    ptrdiff_t at[KEYS], next[KEYS];
    pages.find(begin / KEYS * KEYS, std::min(begin / KEYS * KEYS + KEYS, end), next);
    for (int block = begin / KEYS * KEYS; block < end; block += KEYS) {
        int keys = std::min(end - block, KEYS), groups = (keys + COLUMNS - 1) / COLUMNS;
        int following = std::min(end - block - keys, KEYS);
        memcpy(at, next, sizeof at);
        pages.find(block + KEYS, block + KEYS + following, next);
        fetch(pages, next, following, head_dim);
        for (int g = 0; g < groups; g++) {
            lay_out_keys(pages, at + g * COLUMNS, keys - g * COLUMNS, head_dim,
                         s.keys + g * COLUMNS * head_dim);
        }
        in_tiles<false>({s.q, head_dim, (const char *)s.keys, COLUMNS * sizeof(float), head_dim,
                         s.scores, KEYS, groups, (ptrdiff_t)sizeof(float) * COLUMNS * head_dim},
                        rows);
        for (int r = 0; r < rows; r++) {
            int position = first + r / group;
            int from = window > 0 ? position - window + 1 - block : 0;
            s.factors[r] = weigh(s.scores + r * KEYS, groups * COLUMNS, from, position + 1 - block,
                                 s.maxima[r], s.totals + r * LANES);
        }
        int unseen = std::max(begin - block, 0);  // outside of every query's window
        lay_out_values(pages, at + unseen, keys - unseen, head_dim, padded, s.values);
        TileArgs args{s.scores + unseen, KEYS, s.values, (ptrdiff_t)padded * size, keys - unseen,
                      s.part, padded, padded / COLUMNS, COLUMNS * size};
        pages.half ? in_tiles<true>(args, rows) : in_tiles<false>(args, rows);
        for (int r = 0; r < rows; r++) {
            float *out = s.out + (ptrdiff_t)r * padded, *part = s.part + (ptrdiff_t)r * padded;
            for (int d = 0; d < padded; d += LANES) {
                store(out + d, load<Vec>(out + d) * s.factors[r] + load<Vec>(part + d));
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        float scale = 1.0f / sum(load<Vec>(s.totals + r * LANES));
        const float *from = s.out + (ptrdiff_t)r * padded;
        float *to = out + r / group * out_stride + r % group * head_dim;
        for (int d = 0; d < head_dim; d++) {
            // A tile of bfloat16 leaves even columns in its first vector, odd ones in its second.
            int place = pages.half ? d / COLUMNS * COLUMNS + d % COLUMNS / 2 + d % 2 * LANES : d;
            to[d] = from[place] * scale;
        }
    }
}
