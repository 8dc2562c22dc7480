// The traversal of segments on the CPU, which every family shares. It knows nothing of types: a family implements
// Visitor, and pays one indirect call for each batch of short segments or chunk of a long one.
#pragma once

#include "cpu/capability.h"

#include "kernels.h"

namespace FASTOPS_CPU_NAMESPACE {

// Columns [first, last) of one outer slice.
struct Tile {
  int64_t outer, first, last;
};

// Rows [first, min(length, first + chunk)) of segment s, which begins at position `begin`.
struct Span {
  int64_t segment, begin, first, length;
};

class Visitor {
 public:
  virtual ~Visitor() = default;
  // Segments [first, last), none of them longer than a chunk; some may be empty. Their rows are those at positions
  // [begin, end), kBatchRows at most, unless it is one segment. `thread` numbers the tasks that run at once.
  virtual void whole(const Tile&, int64_t first, int64_t last, int64_t begin, int64_t end, int64_t thread) = 0;
  // A chunk of a longer segment.
  virtual void chunk(const Tile&, const Span&, int64_t thread) = 0;
  // After all chunks: joins those of a segment that has several.
  virtual void join(const Tile&, const Span&) {}

  static constexpr int64_t kBatchRows = 4096;  // guess: a call is then nothing beside its work
};

// Joins the columns [first, last) of what is known of each chunk, in pairs and then pairs of pairs, into that of chunk 0.
template <class Partial, class OfChunk>
void join_in_pairs(int64_t chunks, int64_t first, int64_t last, OfChunk&& of_chunk) {
  for (int64_t step = 1; step < chunks; step *= 2) {
    for (int64_t c = 0; c + step < chunks; c += 2 * step) {
      Partial *a = of_chunk(c), *b = of_chunk(c + step);
      for (int64_t i = first; i < last; ++i) a[i] = Partial::combine(a[i], b[i]);
    }
  }
}

// How the work is cut.
struct Cutting {
  int64_t outer, inner;      // slices and columns
  int64_t tile_columns;      // columns of a tile
  int64_t chunk_rows;
  int64_t task_bytes;        // of data: less than this is not worth a second thread
  int64_t bytes_per_column;  // of one row
};

// Threads that are worth starting.
static inline int64_t num_tasks(const Cutting& cut, const SegmentsView& segments, const Pool& pool) {
  const int64_t keys = segments.num_positions + segments.num_segments;
  return std::clamp<int64_t>(cut.outer * keys * cut.inner * cut.bytes_per_column / cut.task_bytes, 1, pool.num_threads);
}

// Visits every segment, in equal ranges of keys (segments.h), one for each of `tasks` threads.
static inline void walk(const Cutting& cut, const SegmentsView& segments, const Pool& pool, int64_t tasks, Visitor& visitor) {
  struct Several {
    Tile tile;
    Span span;
  };
  const int64_t tiles = ceil_div(cut.inner, cut.tile_columns), chunk = cut.chunk_rows;
  const int64_t keys = segments.num_positions + segments.num_segments, work = cut.outer * tiles * keys;
  if (work == 0 || segments.num_segments == 0) return;
  std::vector<std::vector<Several>> of_task(segments.num_positions > chunk ? tasks : 0);  // none can be longer

  // The chunks of a tile with keys in [key, last_key).
  const auto walk_tile = [&](const Tile& tile, int64_t key, int64_t last_key, int64_t task) {
    auto [s, first] = first_chunk(segments, key, chunk);
    if (s >= segments.num_segments) return;
    int64_t begin = segments.begin(s);
    while (s < segments.num_segments) {
      int64_t last = s, at = begin, length = 0;  // a batch: segments [s, last), positions [begin, at)
      for (; last < segments.num_segments; ++last) {
        length = segments.end(last, at) - at;
        const int64_t work_before = at - begin + last - s;
        if (first > 0 || length > chunk || at + last >= last_key) break;
        if (last > s && work_before + length >= Visitor::kBatchRows) break;
        at += length;
      }
      if (last > s) {
        visitor.whole(tile, s, last, begin, at, task);
      } else if (begin + s + first >= last_key) {
        return;
      } else {
        if (first == 0) of_task[task].push_back({tile, {s, begin, 0, length}});
        for (; first < length; first += chunk) {
          if (begin + s + first >= last_key) return;
          visitor.chunk(tile, {s, begin, first, length}, task);
        }
        first = 0;
        ++last;
        at += length;
      }
      s = last;
      begin = at;
    }
  };
  pool(tasks, [&](int64_t task) {
    for (int64_t at = task * work / tasks, end = (task + 1) * work / tasks; at < end;) {
      const int64_t slice = at / keys, key = at % keys;
      const int64_t last_key = std::min(keys, key + end - at);
      const int64_t first = slice % tiles * cut.tile_columns;
      walk_tile({slice / tiles, first, std::min(cut.inner, first + cut.tile_columns)}, key, last_key, task);
      at += last_key - key;
    }
  });

  std::vector<Several> several;
  for (const auto& some : of_task) several.insert(several.end(), some.begin(), some.end());
  if (!several.empty()) pool(int64_t(several.size()), [&](int64_t i) { visitor.join(several[i].tile, several[i].span); });
}

}  // namespace FASTOPS_CPU_NAMESPACE
