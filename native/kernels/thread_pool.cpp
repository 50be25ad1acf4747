#include "octavo/thread_pool.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

namespace octavo {
namespace {

// About 50 us (a pause is 40 to 140 cycles): longer than the imbalance of any kernel, shorter than a time slice.
constexpr int kSpins = 1500;

// Returns once `value` differs from `old`.
void wait_change(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  // Best effort: a container may forbid it, and the pool works unpinned.
  (void)pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

ThreadPool::ThreadPool(int num_threads, std::vector<int> cpus) : num_threads_(num_threads) {
  for (int worker = 1; worker < num_threads; ++worker) {
    const int cpu = worker < static_cast<int>(cpus.size()) ? cpus[worker] : -1;
    threads_.emplace_back([this, worker, cpu] {
      if (cpu >= 0) pin(cpu);
      serve(worker);
    });
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true, std::memory_order_release);
  start();
  for (auto& thread : threads_) thread.join();
}

void ThreadPool::start() {
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
}

void ThreadPool::serve(int worker) {
  for (uint32_t seen = 0;;) {
    wait_change(generation_, seen);
    ++seen;  // run() returns only after all workers, so that no generation is skipped
    if (stopping_.load(std::memory_order_acquire)) return;
    call_(context_, worker);
    barrier();
  }
}

void ThreadPool::barrier() {
  if (num_threads_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
    num_arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
  } else {
    wait_change(phase_, phase);
  }
}

}  // namespace octavo
