// Products with packed weights. Every output is one sum over k in ascending order, in float32,
// whatever the number of rows: a row's results do not depend on the other rows of a step.
#pragma once
#include <algorithm>

#include "pool.h"
#include "vectors.h"

// How a panel holds its COLUMNS columns. HALVES: bfloat16, column i in the low and column i + LANES
// in the high half of word i. PAIRS: bfloat16, one word a column, an even k in the low and the next
// in the high half.
enum Form { FLOATS, HALVES, PAIRS };

// Outputs of all rows from `panels` panels, `panel_stride` bytes apart. A step is one k, of PAIRS
// two; the numbers of step i are `stride` * i bytes from the panel's start or, where it is
// `scattered`, at[i].
//
// What will be read soon is fetched meanwhile: `pace` bytes of `ahead` a step, or next[i].
struct TileArgs {
    const float *x;
    ptrdiff_t x_stride;
    const char *panel;
    ptrdiff_t stride;
    int steps;
    float *out;
    ptrdiff_t out_stride;
    int panels = 1;
    ptrdiff_t panel_stride = 0;
    const char *ahead = nullptr;
    int pace = 0;
    const ptrdiff_t *at = nullptr, *next = nullptr;
};

template <int ROWS, int VECTORS>
static inline void accumulate(Vec (&acc)[ROWS][VECTORS], const Vec (&weights)[VECTORS],
                              const float *x, ptrdiff_t x_stride) {
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < VECTORS; c++) acc[r][c] += weights[c] * x[r * x_stride];
    }
}

template <int ROWS, int PANELS, Form FORM, bool SCATTERED>
static void tile(const TileArgs &a) {
    constexpr int VECTORS = 2 * PANELS;
    Vec acc[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < VECTORS; c++) acc[r][c] = Vec{};
    }
    const char *panel = a.panel, *ahead = a.ahead;
#pragma GCC unroll 4  // fewer instructions, so more steps in flight while memory is slow
    for (int i = 0; i < a.steps; i++) {
        Vec weights[VECTORS];
        Words pairs[VECTORS];
        const char *row = SCATTERED ? panel + a.at[i] : panel;
        for (int p = 0; p < PANELS; p++) {
            const char *from = row + p * a.panel_stride;
            if constexpr (FORM == HALVES) {
                Words pair = load<Words>(from);
                weights[2 * p] = low(pair), weights[2 * p + 1] = high(pair);
            } else if constexpr (FORM == PAIRS) {
                for (int c = 2 * p; c < 2 * p + 2; c++, from += sizeof(Vec)) {
                    pairs[c] = load<Words>(from);
                    weights[c] = low(pairs[c]);
                }
            } else {
                weights[2 * p] = load<Vec>(from);
                weights[2 * p + 1] = load<Vec>(from + sizeof(Vec));
            }
            if constexpr (SCATTERED) {
                const char *soon = panel + a.next[i] + p * a.panel_stride;
                for (int b = 0; b < (FORM == FLOATS ? 8 : 4) * LANES; b += LINE) {
                    __builtin_prefetch(soon + b, 0, 2);
                }
            }
        }
        if constexpr (!SCATTERED) __builtin_prefetch(ahead, 0, 2);
        const float *x = a.x + (FORM == PAIRS ? 2 * i : i);
        accumulate(acc, weights, x, a.x_stride);
        if constexpr (FORM == PAIRS) {
            for (int c = 0; c < VECTORS; c++) weights[c] = high(pairs[c]);
            accumulate(acc, weights, x + 1, a.x_stride);
        }
        if constexpr (!SCATTERED) panel += a.stride, ahead += a.pace;
    }
    for (int r = 0; r < ROWS; r++) {
        for (int c = 0; c < VECTORS; c++) store(a.out + r * a.out_stride + c * LANES, acc[r][c]);
    }
}

using Tile = void (*)(const TileArgs &);

template <int PANELS, Form FORM, bool SCATTERED, int... R>
static Tile pick(int rows, std::integer_sequence<int, R...>) {
    static constexpr Tile tiles[] = {tile<R + 1, PANELS, FORM, SCATTERED>...};
    return tiles[rows - 1];
}

// Any number of rows, cut into tiles of about equal size. A few rows take two panels at once: one
// panel's additions would wait for each other.
template <Form FORM, bool SCATTERED = false>
static void in_tiles(TileArgs a, int rows) {
    using Few = std::make_integer_sequence<int, MAX_ROWS / 2>;
    using Many = std::make_integer_sequence<int, MAX_ROWS>;
    int count = (rows + MAX_ROWS - 1) / MAX_ROWS;
    a.pace /= count;
    for (int i = 0; i < count; i++) {
        int first = rows * i / count, size = rows * (i + 1) / count - first;
        TileArgs part = a;
        part.x += first * a.x_stride;
        part.out += first * a.out_stride;
        part.ahead += (ptrdiff_t)i * a.steps * a.pace;
        for (int p = 0; p < a.panels;) {
            int together = size <= MAX_ROWS / 2 && p + 1 < a.panels ? 2 : 1;
            (together == 2 ? pick<2, FORM, SCATTERED>(size, Few{})
                           : pick<1, FORM, SCATTERED>(size, Many{}))(part);
            part.panel += together * a.panel_stride;
            part.out += together * COLUMNS;
            p += together;
        }
    }
}

// Weights as panels one after the other, columns padded with zeros. With `paired`, the first half
// of the outputs (gate) and the second (up) take turns: a gate panel, its up panel, and so on.
struct Matrix {
    const char *panels;
    const float *bias;  // or null; in the order of the outputs, not of the panels
    int32_t outputs;
    int32_t inputs;
    int32_t half;  // bfloat16, else float32
    int32_t paired;

    size_t panel_bytes() const { return (size_t)inputs * COLUMNS * (half ? 2 : 4); }
    int groups() const {  // what a task computes: a panel, or a pair of them
        int columns = paired ? outputs / 2 : outputs;
        return (columns + COLUMNS - 1) / COLUMNS;
    }
    size_t bytes() const { return groups() * panel_bytes() * (paired ? 2 : 1); }
};

template <class Number>
static void pack_panel(const Number *weights, int first, int outputs, int inputs, Number *panel) {
    for (int c = 0; c < COLUMNS; c++) {
        int place = sizeof(Number) == 2 ? c % LANES * 2 + c / LANES : c;
        const Number *row = weights + (size_t)(first + c) * inputs;
        for (int k = 0; k < inputs; k++) {
            panel[(size_t)k * COLUMNS + place] = first + c < outputs ? row[k] : Number{};
        }
    }
}

template <class Number>
static void pack(const Matrix &m, const Number *weights, Number *panels) {
    int columns = m.paired ? m.outputs / 2 : m.outputs, parts = m.paired ? 2 : 1;
    size_t size = (size_t)m.inputs * COLUMNS;
    for (int group = 0; group < m.groups(); group++) {
        for (int part = 0; part < parts; part++) {
            const Number *from = weights + (size_t)part * columns * m.inputs;
            Number *to = panels + (group * parts + part) * size;
            pack_panel(from, group * COLUMNS, columns, m.inputs, to);
        }
    }
}

constexpr int BLOCK_ROWS = 8 * MAX_ROWS;  // rows whose inputs stay in a core's second-level cache

static inline Vec biased(const float *row, const float *bias, int column) {
    Vec x = load<Vec>(row);
    return bias ? x + load<Vec>(bias + column) : x;
}

// out = x @ weights.T + bias; with `add` on top of what is there; with paired weights
// silu(gate) * up. Sums meet in `scratch` of a thread, BLOCK_ROWS * 2 * COLUMNS numbers.
static void multiply(Pool &pool, const Matrix &m, const float *x, ptrdiff_t x_stride, int rows,
                     float *out, ptrdiff_t out_stride, bool add, float *const *scratch) {
    int groups = m.groups(), blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int parts = m.paired ? 2 : 1, columns = m.outputs / parts, width = parts * COLUMNS;
    size_t group_bytes = parts * m.panel_bytes();
    int k_bytes = COLUMNS * (m.half ? 2 : 4);
    pool.run(groups * blocks, [&](int number, int thread) {
        int block = number / groups, group = number % groups;
        int first = (int)((int64_t)rows * block / blocks);
        int count = (int)((int64_t)rows * (block + 1) / blocks) - first;
        float *sums = scratch[thread];
        for (int part = 0; part < parts; part++) {
            const char *panel = m.panels + group * group_bytes + part * m.panel_bytes();
            // Most likely this thread's next task; past the end, the next matrix in memory.
            const char *ahead = panel + pool.size() * group_bytes;
            TileArgs args{x + first * x_stride, x_stride, panel, k_bytes, m.inputs,
                          sums + part * COLUMNS, width};
            args.ahead = ahead, args.pace = k_bytes;
            m.half ? in_tiles<HALVES>(args, count) : in_tiles<FLOATS>(args, count);
        }
        int column = group * COLUMNS, filled = std::min(COLUMNS, columns - column);
        for (int r = 0; r < count; r++) {
            float *row = sums + r * width, *to = out + (first + r) * out_stride + column;
            if (filled < COLUMNS) {  // the last panel: number by number
                for (int c = 0; c < filled; c++) {
                    float value = row[c] + (m.bias ? m.bias[column + c] : 0.0f);
                    if (m.paired) {
                        float up = row[COLUMNS + c];
                        if (m.bias) up += m.bias[columns + column + c];
                        value = value / (1.0f + exponential(splat(-value))[0]) * up;
                    }
                    to[c] = add ? to[c] + value : value;
                }
                continue;
            }
            for (int c = 0; c < COLUMNS; c += LANES) {
                Vec value = biased(row + c, m.bias, column + c);
                if (m.paired) {
                    Vec up = biased(row + COLUMNS + c, m.bias, columns + column + c);
                    value = value / (1.0f + exponential(-value)) * up;
                }
                if (add) value += load<Vec>(to + c);
                store(to + c, value);
            }
        }
    });
}
