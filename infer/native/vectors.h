// Vectors of the widest registers there are, by the compiler's own extensions: one source for AVX2,
// AVX-512 and NEON. Nothing here depends on how many rows a step has.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS = 14;  // rows of a tile: two accumulators each, and a few spare
#elif defined(__AVX__)
constexpr int LANES = 8, MAX_ROWS = 6;
#else
constexpr int LANES = 4, MAX_ROWS = 12;
#endif
constexpr int COLUMNS = 2 * LANES;  // of a panel: two vectors
constexpr int LINE = 64;            // bytes of memory that are fetched together

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

template <class T>
static inline T load(const void *from) {
    T x;
    memcpy(&x, from, sizeof x);
    return x;
}

template <class T>
static inline void store(void *to, T x) {
    memcpy(to, &x, sizeof x);
}

static inline Vec splat(float x) { return x - Vec{}; }

static inline Vec select(Ints mask, Vec yes, Vec no) {
    return (Vec)(((Words)yes & (Words)mask) | ((Words)no & ~(Words)mask));
}

// Of a word that holds two bfloat16 numbers: the low one and the high one.
static inline Vec low(Words pair) { return (Vec)(pair << 16); }
static inline Vec high(Words pair) { return (Vec)(pair & 0xffff0000u); }

static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    return load<float>(&bits);
}

static inline uint16_t narrow(float x) {  // to the nearest, ties to even
    uint32_t bits = load<uint32_t>(&x);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class Index, int... L>
static inline Words shuffled(Words a, Words b, Index, std::integer_sequence<int, L...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Index::at(L)...);
#else
    return __builtin_shuffle(a, b, Words{(uint32_t)Index::at(L)...});
#endif
}

using Lanes = std::make_integer_sequence<int, LANES>;

template <int STEP>
struct Rotated {
    static constexpr int at(int lane) { return (lane + STEP) % LANES; }
};
template <int STEP>
struct Upper {  // blocks of STEP lanes: a's even ones with b's even ones between
    static constexpr int at(int lane) { return lane & STEP ? LANES + lane - STEP : lane; }
};
template <int STEP>
struct Lower {
    static constexpr int at(int lane) { return lane & STEP ? LANES + lane : lane + STEP; }
};

template <int HALF>
struct Zipped {  // a half of each, taking turns
    static constexpr int at(int lane) { return lane % 2 * LANES + lane / 2 + HALF * (LANES / 2); }
};

template <int STEP = LANES / 2>
static inline float sum(Vec x) {
    if constexpr (STEP == 0) {
        return x[0];
    } else {
        return sum<STEP / 2>(x + (Vec)shuffled((Words)x, (Words)x, Rotated<STEP>{}, Lanes{}));
    }
}

static inline Vec larger(Vec a, Vec b) { return select(a > b, a, b); }

template <int STEP = LANES / 2>
static inline float maximum(Vec x) {
    if constexpr (STEP == 0) {
        return x[0];
    } else {
        Vec turned = (Vec)shuffled((Words)x, (Words)x, Rotated<STEP>{}, Lanes{});
        return maximum<STEP / 2>(larger(x, turned));
    }
}

// Transpose LANES x LANES words: swap the off-diagonal blocks of every size.
template <int STEP = LANES / 2>
static inline void transpose(Words *rows) {
    if constexpr (STEP > 0) {
        for (int i = 0; i < LANES; i++) {
            if (i & STEP) continue;
            Words a = rows[i], b = rows[i + STEP];
            rows[i] = shuffled(a, b, Upper<STEP>{}, Lanes{});
            rows[i + STEP] = shuffled(a, b, Lower<STEP>{}, Lanes{});
        }
        transpose<STEP / 2>(rows);
    }
}

// e^x to about 1 unit in the last place; exactly 0 below -87, at most e^88; NaN stays NaN.
static inline Vec exponential(Vec x) {
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves whole numbers
    Ints tiny = x < -87.0f;
    x = select(x > 88.0f, splat(88.0f), select(tiny, splat(-87.0f), x));
    Vec shifted = x * 1.44269504f + round;
    Vec whole = shifted - round;
    Vec r = x - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    Vec p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Ints exponent = ((Ints)shifted - 0x4b400000 + 127) << 23;
    return select(tiny, Vec{}, p * (Vec)exponent);
}
