// A step of a dense decoder on a CPU, from token ids to the residual stream and to logits.
//
// The structures and functions at the end are what infer/native/library.py declares.
#include <cstdlib>
#include <memory>

#include "attention.h"
#include "sampling.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

struct Layer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;
    Matrix qkv, o, gate_up, down;
};

struct Model {
    int32_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
    int32_t half;    // embedding in bfloat16, else float32
    int32_t window;  // 0: every earlier position is visible
    float eps, scale;
    const void *embed;
    const float *norm;
    const float *cos_sin;  // [positions, head_dim]
    Matrix lm_head;
    const Layer *layers;
};

struct Step {
    const int32_t *input_ids, *src_rows, *positions, *slot_mapping;  // [num_tokens]
    const int32_t *last_token;  // of every row; src_rows says where it counts
    const int32_t *seq_rows, *cu_seqlens_q, *context_lens;
    const int32_t *block_tables;  // rows of table_width
    void *const *k, *const *v;    // [num_layers]
    float *stream;                // [num_tokens, hidden_size]
    int32_t num_tokens, num_seqs, table_width, block_size;
    int32_t half;  // KV in bfloat16, else float32
};

struct Free {
    void operator()(float *memory) const { free(memory); }
};
using Memory = std::unique_ptr<float, Free>;

static Memory allocate(size_t count) {
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, (count + 16) * sizeof(float))) return nullptr;
    return Memory((float *)memory);
}

class Engine {
   public:
    Engine(const Model &model, int threads)
        : m_(model), layers_(model.layers, model.layers + model.num_layers), pool_(threads) {
        size_t floats = std::max<size_t>(BLOCK_ROWS * 2 * COLUMNS,
                                         AttentionScratch::floats(model.head_dim));
        for (int i = 0; i < pool_.size(); i++) {
            scratch_.push_back(allocate(floats));
            pointers_.push_back(scratch_.back().get());
            complete_ = complete_ && pointers_.back();
        }
    }

    bool complete() const { return complete_; }
    bool forked() const { return pool_.forked(); }

    bool layers(const Step &s) {
        if (!reserve(s.num_tokens)) return false;
        pool_.wake();
        embed(s);
        find_queries(s);
        for (int i = 0; i < m_.num_layers; i++) layer(layers_[i], s, (char *)s.k[i], (char *)s.v[i]);
        pool_.rest();
        return true;
    }

    bool logits(const float *hidden, const int32_t *rows, int count, float *out) {
        if (!reserve(count)) return false;
        pool_.wake();
        for (int i = 0; i < count; i++) {
            rms_norm(hidden + (ptrdiff_t)rows[i] * m_.hidden_size, m_.norm, m_.hidden_size,
                     normed_ + (ptrdiff_t)i * m_.hidden_size);
        }
        multiply(pool_, m_.lm_head, normed_, m_.hidden_size, count, out, m_.lm_head.outputs, false,
                 pointers_.data());
        pool_.rest();
        return true;
    }

    void sample(const Sampling &s) {
        pool_.wake();
        ::sample(pool_, s);
        pool_.rest();
    }

   private:
    int q_size() const { return m_.num_heads * m_.head_dim; }
    int qkv_size() const { return (m_.num_heads + 2 * m_.num_kv_heads) * m_.head_dim; }

    bool reserve(int tokens) {
        if (tokens <= reserved_) return true;
        size_t each = m_.hidden_size + qkv_size() + q_size() + m_.intermediate_size;
        workspace_ = allocate(each * tokens);
        reserved_ = workspace_ ? tokens : 0;
        if (!workspace_) return false;
        normed_ = workspace_.get();
        qkv_ = normed_ + (size_t)tokens * m_.hidden_size;
        heads_ = qkv_ + (size_t)tokens * qkv_size();
        gated_ = heads_ + (size_t)tokens * q_size();
        return true;
    }

    void embed(const Step &s) {
        int size = m_.hidden_size;
        for (int t = 0; t < s.num_tokens; t++) {
            float *to = s.stream + (ptrdiff_t)t * size;
            int source = s.src_rows[t];
            size_t row = (size_t)(source >= 0 ? s.last_token[source] : s.input_ids[t]) * size;
            if (m_.half) {
                const uint16_t *from = (const uint16_t *)m_.embed + row;
                for (int i = 0; i < size; i++) to[i] = widen(from[i]);
            } else {
                memcpy(to, (const float *)m_.embed + row, size * sizeof(float));
            }
        }
    }

    // Heads of a position lie side by side, so one thread takes them all where there is work
    // enough: every thread would fetch the others' share too.
    void find_queries(const Step &s) {
        queries_.clear();
        int kv_heads = m_.num_kv_heads, most = std::max(1, MAX_TILE_ROWS / (m_.num_heads / kv_heads));
        bool plenty = s.num_seqs >= 4 * pool_.size() && m_.num_heads <= MAX_TILE_ROWS;
        for (int seq = 0; seq < s.num_seqs; seq++) {
            int begin = s.cu_seqlens_q[seq], count = s.cu_seqlens_q[seq + 1] - begin;
            int position = s.context_lens[seq] - count;
            int heads = plenty && count == 1 ? kv_heads : 1;
            for (int i = 0; i < count; i += most) {
                for (int head = 0; head < kv_heads; head += heads) {
                    queries_.push_back(
                        {seq, begin + i, std::min(most, count - i), position + i, head, heads});
                }
            }
        }
        int covered = s.num_seqs ? s.cu_seqlens_q[s.num_seqs] : 0;
        for (int t = covered; t < s.num_tokens; t++) {  // padding: anything finite
            memset(heads_ + (ptrdiff_t)t * q_size(), 0, q_size() * sizeof(float));
        }
    }

    void layer(const Layer &w, const Step &s, char *k_cache, char *v_cache) {
        int tokens = s.num_tokens, hidden = m_.hidden_size;
        float *const *scratch = pointers_.data();
        norm_rows(s.stream, w.input_norm, tokens);
        multiply(pool_, w.qkv, normed_, hidden, tokens, qkv_, qkv_size(), false, scratch);
        in_groups(tokens, [&](int t) { rotate_and_store(w, s, t, k_cache, v_cache); });
        attention(s, k_cache, v_cache);
        multiply(pool_, w.o, heads_, q_size(), tokens, s.stream, hidden, true, scratch);
        norm_rows(s.stream, w.post_norm, tokens);
        multiply(pool_, w.gate_up, normed_, hidden, tokens, gated_, m_.intermediate_size, false,
                 scratch);
        multiply(pool_, w.down, gated_, m_.intermediate_size, tokens, s.stream, hidden, true,
                 scratch);
    }

    // A few tokens a task; so few that sharing them costs more stay with the leader.
    template <class Work>
    void in_groups(int tokens, const Work &work) {
        int size = 4, tasks = (tokens + size - 1) / size;
        pool_.run(tasks, [&](int task, int) {
            for (int t = task * size; t < std::min(tokens, (task + 1) * size); t++) work(t);
        });
    }

    void norm_rows(const float *x, const float *weight, int tokens) {
        int size = m_.hidden_size;
        in_groups(tokens, [&](int t) {
            rms_norm(x + (ptrdiff_t)t * size, weight, size, normed_ + (ptrdiff_t)t * size);
        });
    }

    void rms_norm(const float *x, const float *weight, int size, float *out) const {
        Vec squares{};
        int whole = size / LANES * LANES;
        for (int i = 0; i < whole; i += LANES) {
            Vec v = load<Vec>(x + i);
            squares += v * v;
        }
        float total = sum(squares);
        for (int i = whole; i < size; i++) total += x[i] * x[i];
        float scale = 1.0f / std::sqrt(total / size + m_.eps);
        for (int i = 0; i < whole; i += LANES) {
            store(out + i, load<Vec>(x + i) * scale * load<Vec>(weight + i));
        }
        for (int i = whole; i < size; i++) out[i] = x[i] * scale * weight[i];
    }

    void rotate(float *x, const float *cos_sin, float scale) const {
        int half = m_.head_dim / 2;
        for (int i = 0; i < half; i++) {
            float a = x[i] * scale, b = x[i + half] * scale;
            x[i] = a * cos_sin[i] - b * cos_sin[half + i];
            x[i + half] = b * cos_sin[i] + a * cos_sin[half + i];
        }
    }

    void rotate_and_store(const Layer &w, const Step &s, int t, char *k_cache, char *v_cache) const {
        int dim = m_.head_dim;
        float *heads = qkv_ + (ptrdiff_t)t * qkv_size();
        const float *angles = m_.cos_sin + (ptrdiff_t)s.positions[t] * dim;
        for (int h = 0; h < m_.num_heads + m_.num_kv_heads; h++) {
            bool query = h < m_.num_heads;
            float *x = heads + h * dim;
            const float *norm = query ? w.q_norm : w.k_norm;
            if (norm) rms_norm(x, norm, dim, x);
            rotate(x, angles, query ? m_.scale : 1.0f);
        }
        int size = m_.num_kv_heads * dim;
        size_t slot = (size_t)s.slot_mapping[t] * size;
        write(heads + q_size(), size, s.half, k_cache, slot);
        write(heads + q_size() + size, size, s.half, v_cache, slot);
    }

    static void write(const float *x, int size, bool half, char *cache, size_t at) {
        if (!half) {
            memcpy((float *)cache + at, x, size * sizeof(float));
            return;
        }
        uint16_t *to = (uint16_t *)cache + at;
        for (int i = 0; i < size; i++) to[i] = narrow(x[i]);
    }

    void attention(const Step &s, const char *k_cache, const char *v_cache) {
        AttentionShape shape{m_.num_heads / m_.num_kv_heads, m_.head_dim, m_.window};
        ptrdiff_t stride = (ptrdiff_t)m_.num_kv_heads * m_.head_dim * (s.half ? 2 : 4);
        auto pages = [&](const Queries &part) {
            const int32_t *table = s.block_tables + (ptrdiff_t)s.seq_rows[part.seq] * s.table_width;
            return Pages{k_cache, v_cache, table, s.block_size, s.half, stride};
        };
        int tasks = (int)queries_.size();
        pool_.run(tasks, [&](int task, int thread) {
            const Queries &part = queries_[task];
            int soon = task + pool_.size();
            const Queries &later = queries_[soon < tasks ? soon : task];
            int begin = first_seen(later.position, m_.window), end = later.position + later.count;
            attend(pages(part), {pages(later), begin, soon < tasks ? end : begin}, shape, part,
                   qkv_ + (ptrdiff_t)part.token * qkv_size(), qkv_size(),
                   heads_ + (ptrdiff_t)part.token * q_size(), q_size(),
                   AttentionScratch(pointers_[thread], m_.head_dim));
        });
    }

    Model m_;
    std::vector<Layer> layers_;
    Pool pool_;
    bool complete_ = true;
    std::vector<Memory> scratch_;
    std::vector<float *> pointers_;
    std::vector<Queries> queries_;
    Memory workspace_;
    int reserved_ = 0;
    float *normed_ = nullptr, *qkv_ = nullptr, *heads_ = nullptr, *gated_ = nullptr;
};

extern "C" {

size_t purestep_packed_bytes(const Matrix *matrix) { return matrix->bytes(); }

void purestep_pack(const Matrix *matrix, const void *weights, void *panels) {
    if (matrix->half) {
        pack(*matrix, (const uint16_t *)weights, (uint16_t *)panels);
    } else {
        pack(*matrix, (const float *)weights, (float *)panels);
    }
}

// Ask for large pages: weights are read from end to end in every step.
void purestep_large_pages(void *memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
    uintptr_t page = 4096, start = ((uintptr_t)memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t)memory + bytes) / page * page;
    if (start < end) madvise((void *)start, end - start, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

// Null when there is no memory.
Engine *purestep_engine(const Model *model, int32_t threads) {
    auto engine = std::make_unique<Engine>(*model, threads);
    return engine->complete() ? engine.release() : nullptr;
}

// A forked child has the engine's memory but not its threads: it can run steps, not end threads.
void purestep_free(Engine *engine) {
    if (!engine->forked()) delete engine;
}

// Both return 0 when there is no memory.
int32_t purestep_layers(Engine *engine, const Step *step) { return engine->layers(*step); }

int32_t purestep_logits(Engine *engine, const float *hidden, const int32_t *rows, int32_t count,
                        float *out) {
    return engine->logits(hidden, rows, count, out);
}

void purestep_sample(Engine *engine, const Sampling *sampling) { engine->sample(*sampling); }
}
