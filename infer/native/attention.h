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

    ptrdiff_t at(int position) const {
        int64_t slot = (int64_t)table[position / block_size] * block_size + position % block_size;
        return slot * stride + head;
    }
    int run(int position) const { return block_size - position % block_size; }  // contiguous
};

struct AttentionScratch {
    float *q;       // [MAX_TILE_ROWS, head_dim], scaled
    float *out;     // [MAX_TILE_ROWS, padded]
    float *scores;  // [MAX_TILE_ROWS, KEYS]
    float *keys;    // [KEYS / COLUMNS, head_dim, COLUMNS]
    char *values;   // [KEYS, padded] as they are stored, where head_dim is no multiple of COLUMNS
    float *maxima;  // [MAX_TILE_ROWS]
    float *totals;  // [MAX_TILE_ROWS, LANES]

    static size_t floats(int head_dim) {
        size_t padded = (head_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
        return MAX_TILE_ROWS * (2 * padded + KEYS + LANES + LANES) + 2 * KEYS * padded;
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
        scores = take(MAX_TILE_ROWS * KEYS);
        keys = take(KEYS * padded);
        values = (char *)take(KEYS * padded);
        totals = take(MAX_TILE_ROWS * LANES);
        maxima = take(MAX_TILE_ROWS);
    }
};

// Keys first .. first + COLUMNS of one head, transposed to float32 [head_dim, COLUMNS]. Positions
// from `end` on repeat the last one before it: pages that are not the sequence's own stay unread.
static void lay_out_keys(const Pages &pages, int first, int end, int head_dim, float *out) {
    const char *rows[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) rows[c] = pages.keys + pages.at(std::min(first + c, end - 1));
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

// Softmax of one row of scores against what it has seen so far; its earlier sums are rescaled.
static inline void weigh(float *scores, int groups, int from, int to, float &maximum_seen,
                         float *totals, float *out, int padded) {
    Vec best = splat(-INFINITY);
    Ints lane{};
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int at = 0; at < groups * COLUMNS; at += LANES) {
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
        for (int at = 0; at < groups * COLUMNS; at += LANES) store(scores + at, Vec{});
        return;
    }
    Vec total = load<Vec>(totals);
    if (most > maximum_seen) {
        Vec factor = exponential(splat(maximum_seen - most));
        total *= factor;
        for (int d = 0; d < padded; d += LANES) store(out + d, load<Vec>(out + d) * factor);
        maximum_seen = most;
    }
    for (int at = 0; at < groups * COLUMNS; at += LANES) {
        Vec weight = exponential(load<Vec>(scores + at) - most);
        total += weight;
        store(scores + at, weight);
    }
    store(totals, total);
}

// out += weights @ values, positions first .. end in order, page by page.
static void add_values(const Pages &pages, int first, int end, int block, int rows, int head_dim,
                       int padded, const AttentionScratch &s) {
    int size = pages.half ? 2 : 4;
    bool copied = padded != head_dim;
    while (first < end) {
        int count = std::min(end - first, pages.run(first));
        const char *from = pages.values + pages.at(first);
        ptrdiff_t stride = pages.stride;
        if (copied) {
            for (int j = 0; j < count; j++) {
                char *row = s.values + (ptrdiff_t)j * padded * size;
                memcpy(row, from + j * stride, head_dim * size);
                memset(row + head_dim * size, 0, (padded - head_dim) * size);
            }
            from = s.values, stride = (ptrdiff_t)padded * size;
        }
        for (int d = 0; d < padded; d += COLUMNS) {
            TileArgs args{s.scores + first - block, KEYS, from + d * size, stride, count,
                          s.out + d, padded, from, 0};
            pages.half ? rows_of_tiles<true, true>(args, rows)
                       : rows_of_tiles<false, true>(args, rows);
        }
        first += count;
    }
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
    int begin = window > 0 ? std::max(0, first - window + 1) : 0, end = first + count;
    for (int block = begin / KEYS * KEYS; block < end; block += KEYS) {
        int last = std::min(end, block + KEYS);
        int groups = (last - block + COLUMNS - 1) / COLUMNS;
        for (int g = 0; g < groups; g++) {
            lay_out_keys(pages, block + g * COLUMNS, last, head_dim, s.keys);
            TileArgs args{s.q, head_dim, (const char *)s.keys, COLUMNS * sizeof(float), head_dim,
                          s.scores + g * COLUMNS, KEYS, (const char *)s.keys, 0};
            rows_of_tiles<false, false>(args, rows);
        }
        for (int r = 0; r < rows; r++) {
            int position = first + r / group;
            int from = window > 0 ? position - window + 1 - block : 0;
            weigh(s.scores + r * KEYS, groups, from, position + 1 - block, s.maxima[r],
                  s.totals + r * LANES, s.out + (ptrdiff_t)r * padded, padded);
        }
        add_values(pages, std::max(block, begin), last, block, rows, head_dim, padded, s);
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
