// A small pinned pool: the caller is worker 0, the others wait for it. Owns threads and barriers; knows no kernels.
//
// Inside run(), workers meet at barrier(): they spin for some microseconds (a step has hundreds of short kernels), then
// sleep on a futex, so that a preempted worker does not cost the others a core. Between runs they sleep: an idle pool
// uses no CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

class ThreadPool {
 public:
  // `cpus`: the CPU that each worker but the caller is pinned to, by worker; empty: no pinning.
  explicit ThreadPool(int num_threads, std::vector<int> cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return num_threads_; }

  // Calls f(worker) once on each of size() threads and returns when all are done. f must not throw.
  template <class F>
  void run(F&& f) {
    call_ = [](void* context, int worker) { (*static_cast<std::remove_reference_t<F>*>(context))(worker); };
    context_ = &f;
    start();
    f(0);
    barrier();
  }

  // Inside run(): returns when all workers have called it.
  void barrier();

 private:
  void start();
  void serve(int worker);

  const int num_threads_;
  std::vector<std::thread> threads_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  // Each on a cache line of its own: they are written by different workers.
  alignas(64) std::atomic<uint32_t> generation_{0};  // counts runs; a change wakes the workers
  alignas(64) std::atomic<uint32_t> phase_{0};       // counts passed barriers
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<bool> stopping_{false};
};

}  // namespace octavo
