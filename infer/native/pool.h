// A few threads that run the numbered tasks of one phase after the other with their leader.
//
// Of `size` threads, thread i begins with tasks i, i + size, i + 2 * size, ... (where its cache
// expects them) and then helps the others. Tasks are claimed one by one, so a thread whose core is
// busy elsewhere delays only what it has claimed; if no thread ever comes, the leader does
// everything. That also holds in a forked child, which has no threads.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

static inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
   public:
    explicit Pool(int size) : process_(getpid()), shares_(std::max(size, 1)) {
        try {
            for (int id = 1; id < size; id++) threads_.emplace_back([this, id] { work(id); });
        } catch (const std::system_error &) {
            // The system allows no more threads: these must do.
        }
    }

    ~Pool() {  // in the process that made it
        {
            std::lock_guard<std::mutex> lock(mutex_);
            ending_ = true;
        }
        awake_.notify_all();
        for (auto &thread : threads_) thread.join();
    }

    int size() const { return (int)threads_.size() + 1; }
    bool forked() const { return getpid() != process_; }

    // Before the first phase of a step: who sleeps gets up, and nobody sleeps until `rest`.
    void wake() {
        if (threads_.empty() || forked()) return;
        resting_.store(false, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(mutex_);
            awake_.notify_all();
        }
    }

    void rest() { resting_.store(true, std::memory_order_relaxed); }

    // Call task(number, thread) for each number below count; done when all have returned.
    template <class Task>
    void run(int count, const Task &task) {
        if (count <= 1 || threads_.empty()) {
            for (int number = 0; number < count; number++) task(number, 0);
            return;
        }
        call_ = [](const void *t, int number, int id) { (*(const Task *)t)(number, id); };
        task_ = &task;
        done_.store(0, std::memory_order_relaxed);
        phase_++;
        stride_ = size();
        for (int id = stride_ - 1; id >= 0; id--) {
            uint64_t share = (count - id + stride_ - 1) / stride_;
            shares_[id].ticket.store(phase_ << 40 | share << 20, std::memory_order_release);
        }
        help(0);
        int spins = 0;
        while (done_.load(std::memory_order_acquire) < count) wait(spins);
    }

   private:
    static constexpr uint64_t LIMIT = (1 << 20) - 1;
    static constexpr int SPINS = 4000;

    // A ticket is (phase, tasks, next task) in one word: claiming it proves that the phase has not
    // ended, and then it cannot end before this task has been counted.
    struct alignas(64) Share {
        std::atomic<uint64_t> ticket{0};
    };

    // Whether there was anything to do.
    bool help(int id) {
        int done = 0, all = (int)shares_.size();
        for (int i = 0; i < all; i++) {
            int owner = (id + i) % all;
            std::atomic<uint64_t> &ticket = shares_[owner].ticket;
            uint64_t seen = ticket.load(std::memory_order_acquire);
            while ((seen & LIMIT) < (seen >> 20 & LIMIT)) {
                if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel))
                    continue;
                call_(task_, owner + (int)(seen & LIMIT) * stride_, id);
                done++;
                seen = ticket.load(std::memory_order_acquire);
            }
        }
        if (done) done_.fetch_add(done, std::memory_order_release);
        return done > 0;
    }

    static void wait(int &spins) {
        if (spins < SPINS) {
            spins++;
            relax();
        } else {
            sched_yield();
        }
    }

    void work(int id) {
        using Clock = std::chrono::steady_clock;
        const auto patience = std::chrono::milliseconds(2);
        int spins = 0;
        auto since = Clock::now();
        while (true) {
            if (help(id)) {
                spins = 0;
                since = Clock::now();
                continue;
            }
            wait(spins);
            if (spins < SPINS || !resting_.load(std::memory_order_relaxed)) continue;
            if (Clock::now() - since < patience) continue;
            std::unique_lock<std::mutex> lock(mutex_);
            asleep_.fetch_add(1, std::memory_order_seq_cst);
            awake_.wait(lock, [this] { return ending_ || !resting_.load(); });
            asleep_.fetch_sub(1);
            if (ending_) return;
            spins = 0;
            since = Clock::now();
        }
    }

    const pid_t process_;
    uint64_t phase_ = 0;
    void (*call_)(const void *, int, int) = nullptr;
    const void *task_ = nullptr;
    int stride_ = 1;  // threads there are
    std::vector<Share> shares_;
    alignas(64) std::atomic<int> done_{0};
    alignas(64) std::atomic<bool> resting_{true};
    std::atomic<int> asleep_{0};
    bool ending_ = false;
    std::mutex mutex_;
    std::condition_variable awake_;
    std::vector<std::thread> threads_;
};
