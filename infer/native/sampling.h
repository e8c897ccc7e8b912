// One token a row, greedy or by Gumbel-max over the whole vocabulary: what infer/ops/sample.py
// does for rows that truncate nothing, with the random bits of infer/ops/noise.py.
#pragma once
#include "pool.h"
#include "vectors.h"

struct Sampling {
    const float *logits;  // [num_logits, vocab_size]
    const int32_t *sample_logits, *sample_rows, *positions;  // [num_samples]
    const float *temperature;  // by row of the engine, as all that follows
    const int32_t *seed;       // [rows, 2]
    const int32_t *choice;
    int32_t *tokens;  // [num_samples]
    float *scores;
    uint8_t *nan;
    int32_t num_samples, vocab_size;
    float greedy_below;
};

constexpr uint32_t GOLDEN = 0x9E3779B1, MUL_1 = 0x7FEB352D, MUL_2 = 0x846CA68B;
constexpr float SHARE = (1 - 1.0f / (1 << 23)) / 2147483648.0f, HALF_SHARE = 0.5f / 2147483648.0f;
constexpr int SAMPLE_CHUNK = 8192;  // vocabulary ids of a task

static inline uint32_t mixed(uint32_t bits) {
    bits = (bits ^ bits >> 16) * MUL_1;
    bits = (bits ^ bits >> 15) * MUL_2;
    return bits ^ bits >> 16;
}

// Natural logarithm of positive normal numbers, to about 1 unit in the last place.
static inline Vec logarithm(Vec x) {
    Ints bits = (Ints)x - 0x3f3504f3;  // sqrt(1/2): the mantissa will be around 1
    Ints exponent = bits >> 23;
    Vec m = (Vec)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    Vec p = m * 7.0376836292e-2f - 1.1514610310e-1f;  // Cephes' logf
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    Vec e = __builtin_convertvector(exponent, Vec), square = m * m;
    return e * 0.693359375f + (m + (p * m * square + e * -2.12194440e-4f - square * 0.5f));
}

// The logarithm of a standard exponential variate; see noise.py.
static inline Vec log_exponential(Ints bits) {
    Vec v = __builtin_convertvector(bits, Vec) * SHARE + HALF_SHARE;
    Vec series = v * (1.0f / 6) + 1.0f / 5;
    series = series * v + 1.0f / 4;
    series = series * v + 1.0f / 3;
    series = series * v + 1.0f / 2;
    series = (series * v + 1.0f) * v;
    Vec variate = select(v < 1.0f / 16, series, -logarithm(1.0f - v));
    return logarithm(variate);
}

struct Best {
    float score = -INFINITY;
    int32_t token = 0;
    bool nan = false;

    void add(const Best &other) {
        if (other.score > score) score = other.score, token = other.token;
        nan |= other.nan;
    }
};

struct Draw {  // of one sampling row
    bool greedy;
    float temperature;
    uint32_t first, second;  // noise.py's row_keys

    Draw(const Sampling &s, int sample) {
        int row = s.sample_rows[sample];
        temperature = s.temperature[row];
        greedy = temperature < s.greedy_below;
        uint32_t key = mixed((uint32_t)s.seed[2 * row] ^ GOLDEN);
        key = mixed(key + (uint32_t)s.seed[2 * row + 1]);
        key = mixed(key + (uint32_t)s.choice[row]);
        first = mixed(key + (uint32_t)s.positions[sample]);
        second = mixed(first + GOLDEN);
    }

    Vec scores(Vec logits, Ints ids) const {
        if (greedy) return logits;
        Words bits = (Words)ids * GOLDEN + first;
        bits = ((bits ^ (Words)((Ints)bits >> 16)) * MUL_1) ^ second;
        bits = (bits ^ (Words)((Ints)bits >> 15)) * MUL_2;
        bits = (bits ^ (Words)((Ints)bits >> 16)) & 0x7fffffffu;
        return logits / temperature - log_exponential((Ints)bits);
    }
};

// The best of ids begin .. end; of equal ones the lowest.
static Best best_of(const Draw &draw, const float *logits, int begin, int end) {
    Vec best = splat(-INFINITY);
    Ints token{}, ids{}, odd{};
    for (int i = 0; i < LANES; i++) token[i] = ids[i] = begin + i;
    for (int at = begin; at < end; at += LANES, ids += LANES) {
        Vec x = splat(-INFINITY);
        if (at + LANES <= end) {
            x = load<Vec>(logits + at);
        } else {
            memcpy(&x, logits + at, (end - at) * sizeof(float));
        }
        Vec score = draw.scores(x, ids);
        Ints better = score > best;
        odd |= x != x;
        best = select(better, score, best);
        token = (Ints)select(better, (Vec)ids, (Vec)token);
    }
    Best found{best[0], token[0], odd[0] != 0};
    for (int i = 1; i < LANES; i++) {
        bool first = best[i] > found.score || (best[i] == found.score && token[i] < found.token);
        if (first) found.score = best[i], found.token = token[i];
        found.nan |= odd[i] != 0;
    }
    return found;
}

static void sample(Pool &pool, const Sampling &s) {
    int chunks = (s.vocab_size + SAMPLE_CHUNK - 1) / SAMPLE_CHUNK;
    std::vector<Best> found((size_t)s.num_samples * chunks);
    pool.run((int)found.size(), [&](int task, int) {
        int sample = task / chunks, begin = task % chunks * SAMPLE_CHUNK;
        const float *logits = s.logits + (ptrdiff_t)s.sample_logits[sample] * s.vocab_size;
        int end = std::min(begin + SAMPLE_CHUNK, s.vocab_size);
        found[task] = best_of(Draw(s, sample), logits, begin, end);
    });
    for (int sample = 0; sample < s.num_samples; sample++) {
        Best best = found[(size_t)sample * chunks];
        for (int c = 1; c < chunks; c++) best.add(found[(size_t)sample * chunks + c]);
        s.tokens[sample] = best.token;
        s.scores[sample] = best.score;
        s.nan[sample] = best.nan;
    }
}
