// Work that threads take piece by piece.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/Parallel.h>

namespace te {

// Calls `work(i)` once for every i below `count`, on this thread and on up to `threads - 1` others; returns when all are
// done. `work` must not throw. at::parallel_for would need the OpenMP runtime that libtorch brings along under a name of its
// own. A thread that comes late finds nothing left, and nobody waits for it, so a pool whose threads are all busy costs
// time only.
template <typename F> void share(size_t count, int64_t threads, F work) {
  const int64_t helpers = std::min<int64_t>(threads, at::get_num_threads()) - 1;
  if (helpers <= 0) {
    for (size_t i = 0; i < count; ++i)
      work(i);
    return;
  }
  struct State {
    explicit State(size_t count, F &&work) : count(count), work(std::move(work)) {}
    void help() {
      // Several at a time, so that threads do not meet at the counter.
      constexpr size_t TURN = 4;
      for (;;) {
        const size_t begin = next.fetch_add(TURN), end = std::min(begin + TURN, count);
        if (begin >= end)
          return;
        for (size_t i = begin; i < end; ++i)
          work(i);
        if (done.fetch_add(end - begin) + (end - begin) == count)
          done.notify_all();
      }
    }
    const size_t count;
    const F work;
    std::atomic<size_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>(count, std::move(work));
  for (int64_t i = 0; i < helpers; ++i)
    at::launch([state] { state->help(); });
  state->help();
  for (size_t done = state->done.load(); done < count; done = state->done.load())
    state->done.wait(done);
}

} // namespace te
