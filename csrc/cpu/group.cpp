// Grouping of an index: a stable counting sort.
//
// Each thread counts the ids of its own rows; a running total over segments, and inside a segment over threads, says
// where each thread's rows of each segment begin; then each thread places its rows. index is read twice, order written
// once at random.
#include "cpu/capability.h"

#include "kernels.h"

namespace FASTOPS_CPU_NAMESPACE {
namespace {

struct GroupPolicy {
  static constexpr int64_t kTaskRows = 1 << 14;  // guess: below this a second thread costs more than it saves
};

template <class Id>
void ascending(const GroupCall& call, const Id* ids, Id* offsets, const Pool& pool) {
  const int64_t n = call.num_rows;
  const auto clamped = [&](int64_t id) { return std::clamp<int64_t>(id, -1, call.num_segments); };
  const int64_t tasks = std::clamp<int64_t>(n / GroupPolicy::kTaskRows, 1, pool.num_threads);
  // Row i begins all segments after the one before it, up to its own.
  pool(tasks, [&](int64_t task) {
    for (int64_t i = task * n / tasks; i < (task + 1) * n / tasks; ++i) {
      const int64_t id = clamped(ids[i]), before = i == 0 ? -1 : clamped(ids[i - 1]);
      for (int64_t s = before + 1; s <= id; ++s) offsets[s] = Id(i);
    }
  });
  for (int64_t s = n == 0 ? 0 : clamped(ids[n - 1]) + 1; s <= call.num_segments; ++s) offsets[s] = Id(n);
}

template <class Id>
void counting_sort(const GroupCall& call, const Id* ids, Id* offsets, Id* order, const Pool& pool) {
  const int64_t n = call.num_rows, segments = call.num_segments;
  // The counts of all threads together take no more memory than a few copies of the index.
  const int64_t tasks = std::clamp<int64_t>(std::min(n / GroupPolicy::kTaskRows, 4 * n / (segments + 1)), 1, pool.num_threads);
  const std::unique_ptr<Id[]> counts(new Id[tasks * segments]());
  const auto in_range = [&](Id id) { return uint64_t(id) < uint64_t(segments); };  // a negative id is a huge one
  pool(tasks, [&](int64_t task) {
    Id* count = &counts[task * segments];
    for (int64_t i = task * n / tasks; i < (task + 1) * n / tasks; ++i) {
      if (in_range(ids[i])) ++count[ids[i]];
    }
  });
  Id total = 0;
  for (int64_t s = 0; s < segments; ++s) {
    offsets[s] = total;
    for (int64_t task = 0; task < tasks; ++task) {
      Id& count = counts[task * segments + s];
      const Id rows = count;
      count = total;
      total += rows;
    }
  }
  offsets[segments] = total;
  pool(tasks, [&](int64_t task) {
    Id* next = &counts[task * segments];
    for (int64_t i = task * n / tasks; i < (task + 1) * n / tasks; ++i) {
      if (in_range(ids[i])) order[next[ids[i]]++] = Id(i);
    }
  });
}

template <class Id>
void group_ids(const GroupCall& call, const Pool& pool) {
  const Id* ids = static_cast<const Id*>(call.index.data);
  Id* offsets = static_cast<Id*>(call.offsets);
  if (call.order) {
    counting_sort(call, ids, offsets, static_cast<Id*>(call.order), pool);
  } else {
    ascending(call, ids, offsets, pool);
  }
}

}  // namespace

void group(const GroupCall& call, const Pool& pool) {
  if (call.index.wide) {
    group_ids<int64_t>(call, pool);
  } else {
    group_ids<int32_t>(call, pool);
  }
}

}  // namespace FASTOPS_CPU_NAMESPACE
