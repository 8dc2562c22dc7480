// What each row receives from its segment (gradients.h).
//
// Rows in order are walked segment by segment, so that the segment's values stay in the first-level cache: each element
// of the output is written once, in order. Rows out of order are walked one after the other and look their segment up,
// which makes the values the random access and keeps the writes, the larger part, in order. Rows that are narrower than a
// vector are taken together, with what their segments have to say written out for each of them.
#include "cpu/capability.h"

#include "cpu/math.h"
#include "cpu/stage.h"
#include "cpu/vec.h"
#include "cpu/walk.h"
#include "dispatch.h"
#include "kernels.h"

namespace FASTOPS_CPU_NAMESPACE {
namespace {

struct MovePolicy {
  static constexpr int64_t kChunkRows = 512;      // guess
  static constexpr int64_t kTileColumns = 1024;   // guess: values of a tile stay in the first-level cache
  static constexpr int64_t kNarrowBytes = 64;     // guess: of rows; a batch of those stays in a cache
  static constexpr int64_t kTaskBytes = 1 << 16;  // guess: below this a second thread costs more than it saves
};

template <template <class> class Map, class T>
class MapRows final : public Visitor {
  using M = Map<T>;
  // Whether all rows of a segment get the same.
  static constexpr bool kRepeats = !M::kReadsData && !std::is_same_v<M, SelectMap<T>> && !std::is_same_v<M, WeightedMap<T>>;
  // Maps of an element and two numbers of its column, a level and a gain, are made by vectors. For logsumexp they are its result and
  // what is handed down, for an extremum what an element must be and what it gets then.
  static constexpr bool kTwoNumbers = std::is_same_v<M, LogSumExpMap<T>> || std::is_same_v<M, ExtremumMap<T>>;
  using V = compute_t<T>;

  const RowMapCall& call_;
  const SegmentsView& segments_;
  std::vector<std::vector<T>> rows_;     // for each thread, a row to copy
  std::vector<M> maps_;                  // [outer, S, inner] where rows look their segment up,
  std::unique_ptr<V[]> levels_, gains_;  // or these, of the same shape,
  std::unique_ptr<T[]> repeated_;        // or what all its rows get

 public:
  explicit MapRows(const RowMapCall& call) : call_(call), segments_(call.segments) {}

  void run(const Pool& pool) {
    const Cutting cut{call_.outer, call_.inner, MovePolicy::kTileColumns, MovePolicy::kChunkRows, MovePolicy::kTaskBytes, sizeof(T)};
    const int64_t tasks = num_tasks(cut, segments_, pool);
    rows_.resize(tasks);
    if (segments_.order) {
      if constexpr (std::is_same_v<M, SelectMap<T>>) return select(pool, tasks);
      if constexpr (!std::is_same_v<M, BroadcastMap<T>> && !std::is_same_v<M, WeightedMap<T>>) tabulate(pool, tasks);
      return look_up(pool, tasks);
    }
    walk(cut, segments_, pool, tasks, *this);
    for_rows_of_no_segment(segments_, call_.outer, [&](int64_t first, int64_t last) { zero(first, last); });
  }

  void whole(const Tile& tile, int64_t first, int64_t last, int64_t begin, int64_t end, int64_t thread) override {
    if constexpr (kRepeats) {
      if (call_.inner == 1) return runs(tile, first, last, begin, end);
    }
    if constexpr (kTwoNumbers) {
      if (call_.inner < kLanes<V>) {
        return for_narrow_rows(call_.inner, [&](auto elements) {
          constexpr int64_t kElements = decltype(elements)::value;
          if constexpr (kElements < kLanes<V>) in_narrow_rows<kElements>(tile, first, last, begin);
        });
      }
    }
    if constexpr (std::is_same_v<M, SelectMap<T>>) {
      if (call_.inner * int64_t(sizeof(T)) <= MovePolicy::kNarrowBytes) {
        const int64_t rows = tile.outer * segments_.num_rows;
        zero(rows + begin, rows + end);
        return select(tile.outer, first, last, begin);
      }
    }
    for (int64_t s = first; s < last; ++s) {
      const int64_t length = segments_.end(s, begin) - begin;
      if (length > 0) MapRows::chunk(tile, {s, begin, 0, length}, thread);
      begin += length;
    }
  }

  void chunk(const Tile& tile, const Span& span, int64_t thread) override {
    const int64_t inner = call_.inner, width = tile.last - tile.first;
    const int64_t first = span.begin + span.first, rows = std::min(span.length - span.first, MovePolicy::kChunkRows);
    const int64_t values = (tile.outer * segments_.num_segments + span.segment) * inner + tile.first;
    const int64_t at = (tile.outer * segments_.num_rows + first) * inner + tile.first;
    T* out = static_cast<T*>(call_.out) + at;
    if constexpr (kTwoNumbers) {
      V levels[MovePolicy::kTileColumns], gains[MovePolicy::kTileColumns];
      for (int64_t column = 0; column < width; ++column) {
        read(M(call_.arrays, values + column, tile.first + column, span.length), levels[column], gains[column]);
      }
      // Narrow rows are taken together, so that vectors are full.
      const int64_t together = width == inner && width % kLanes<V> != 0 ? std::clamp<int64_t>(kTogether / width, 1, rows) : 1;
      for (int64_t i = width; i < together * width; ++i) levels[i] = levels[i - width], gains[i] = gains[i - width];
      const T* data = static_cast<const T*>(call_.data) + at;
      for (int64_t r = 0; r < rows; r += together) {
        apply(data + r * inner, out + r * inner, levels, gains, std::min(together, rows - r) * width);
      }
    } else if constexpr (M::kReadsData) {
      const T* data = static_cast<const T*>(call_.data) + at;
      if (inner == 1) {
        const M map(call_.arrays, values, 0, span.length);
        for (int64_t r = 0; r < rows; ++r) out[r] = map(data[r], first + r);
        return;
      }
      for (int64_t column = 0; column < width; column += kColumnsAtOnce) {
        columns(data + column, out + column, values + column, tile.first + column, std::min(kColumnsAtOnce, width - column), rows, first,
                span.length);
      }
    } else if constexpr (std::is_same_v<M, SelectMap<T>>) {  // few rows are selected: the others are zeros
      if (width == inner) {
        std::memset(out, 0, rows * inner * sizeof(T));
      } else {
        for (int64_t r = 0; r < rows; ++r) std::memset(out + r * inner, 0, width * sizeof(T));
      }
      for (int64_t column = 0; column < width; ++column) {
        const M map(call_.arrays, values + column, tile.first + column, span.length);
        const int64_t r = map.selected - first;
        if (r >= 0 && r < rows) out[r * inner + column] = map({}, map.selected);
      }
    } else if constexpr (std::is_same_v<M, WeightedMap<T>>) {
      weigh(out, values, tile.first, tile.last, first, rows);
    } else {  // the same row again and again
      if (inner == 1) return void(std::fill(out, out + rows, M(call_.arrays, values, 0, span.length)({}, 0)));
      const T* row = static_cast<const T*>(call_.arrays.values) + values;
      if constexpr (!std::is_same_v<M, BroadcastMap<T>>) {
        auto& computed = rows_[thread];
        computed.resize(width);
        for (int64_t column = 0; column < width; ++column) {
          computed[column] = M(call_.arrays, values + column, tile.first + column, span.length)({}, 0);
        }
        row = computed.data();
      }
      for_narrow_rows(width, [&](auto elements) { copy_rows<decltype(elements)::value>(out, row, width, inner, rows); });
    }
  }

 private:
  static constexpr int64_t kColumnsAtOnce = 64;
  static constexpr int64_t kTogether = 64;  // elements of narrow rows

  // A row of kElements elements, or of `width` for 0, to `rows` rows.
  template <int64_t kElements>
  static FASTOPS_HD void copy_rows(T* out, const T* row, int64_t width, int64_t inner, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r, out += inner) {
      if constexpr (kElements == 0) {
        std::memcpy(out, row, width * sizeof(T));
      } else {
        std::memcpy(out, row, kElements * sizeof(T));
      }
    }
  }

  // Segments of one column, up to position `end`: what a vector writes behind a segment the next one writes again, so that
  // nothing depends on lengths that could not be predicted.
  FASTOPS_NOINLINE void runs(const Tile& tile, int64_t first, int64_t last, int64_t begin, int64_t end) const {
    constexpr int64_t kRun = kVectorBytes / sizeof(T);
    T* const out = static_cast<T*>(call_.out) + tile.outer * segments_.num_rows;
    for (int64_t s = first; s < last; ++s) {
      const int64_t next = segments_.end(s, begin);
      const T value = M(call_.arrays, tile.outer * segments_.num_segments + s, 0, next - begin)(T{}, 0);
      for (; begin < next && begin + kRun <= end; begin += kRun) std::fill_n(out + begin, kRun, value);
      for (; begin < next; ++begin) out[begin] = value;
      begin = next;
    }
  }

  // Rows in any order, one after the other.
  void look_up(const Pool& pool, int64_t tasks) const {
    const int64_t rows = segments_.num_rows, all = call_.outer * rows;
    if (all == 0) return;
    pool(tasks, [&](int64_t task) {
      const int64_t first = task * all / tasks, last = (task + 1) * all / tasks;
      if constexpr (kTwoNumbers) {
        const int64_t together = segments_.num_segments > 0 && call_.inner % kLanes<V> != 0 ? kTogether / call_.inner : 0;
        const auto rows_of = [&](auto elements) {
          for (int64_t at = first; at < last; at += together) narrow_rows<decltype(elements)::value>(at, std::min(last, at + together));
        };
        if (together > 1) return for_narrow_rows(call_.inner, rows_of);
      }
      for (int64_t at = first, outer = first / rows, r = first % rows; at < last; ++at, ++r) {
        if (r == rows) r = 0, ++outer;
        row(outer, r);
      }
    });
  }

  // Few rows are selected: all become zeros, and then each segment writes to its own. No two write to the same.
  void select(const Pool& pool, int64_t tasks) const {
    const int64_t rows = call_.outer * segments_.num_rows, all = call_.outer * segments_.num_segments, inner = call_.inner;
    pool(tasks, [&](int64_t task) { zero(task * rows / tasks, (task + 1) * rows / tasks); });
    pool(tasks, [&](int64_t task) {
      for (int64_t at = task * all / tasks; at < (task + 1) * all / tasks; ++at) {
        const int64_t outer = at / segments_.num_segments, s = at % segments_.num_segments;
        for (int64_t column = 0; column < inner; ++column) {
          const M map(call_.arrays, at * inner + column, column, 0);
          const int64_t r = map.selected;
          if (uint64_t(r) >= uint64_t(segments_.num_rows) || segments_.index[r] != s) continue;
          static_cast<T*>(call_.out)[(outer * segments_.num_rows + r) * inner + column] = map.value;
        }
      }
    });
  }

  // The same of segments in order, from position `begin` on, whose rows are zeros.
  void select(int64_t outer, int64_t first, int64_t last, int64_t begin) const {
    const int64_t inner = call_.inner;
    for (int64_t s = first, end; s < last; ++s, begin = end) {
      end = segments_.end(s, begin);
      for (int64_t column = 0; column < inner; ++column) {
        const M map(call_.arrays, (outer * segments_.num_segments + s) * inner + column, column, 0);
        if (map.selected < begin || map.selected >= end) continue;
        static_cast<T*>(call_.out)[(outer * segments_.num_rows + map.selected) * inner + column] = map.value;
      }
    }
  }

  // What rows look up is made once for each segment, not for each row.
  void tabulate(const Pool& pool, int64_t tasks) {
    const int64_t all = call_.outer * segments_.num_segments, inner = call_.inner;
    if (all == 0) return;
    if constexpr (kTwoNumbers) {
      levels_.reset(new V[all * inner]), gains_.reset(new V[all * inner]);
    } else if constexpr (kRepeats) {
      repeated_.reset(new T[all * inner]);
    } else {
      maps_.assign(all * inner, M(call_.arrays, 0, 0, 0));
    }
    pool(tasks, [&](int64_t task) {
      for (int64_t at = task * all / tasks; at < (task + 1) * all / tasks; ++at) {
        const int64_t s = at % segments_.num_segments, begin = segments_.begin(s), length = segments_.end(s, begin) - begin;
        for (int64_t column = 0; column < inner; ++column) {
          const M map(call_.arrays, at * inner + column, column, length);
          if constexpr (kTwoNumbers) {
            read(map, levels_[at * inner + column], gains_[at * inner + column]);
          } else if constexpr (kRepeats) {
            repeated_[at * inner + column] = map(T{}, 0);
          } else {
            maps_[at * inner + column] = map;
          }
        }
      }
    });
  }

  // Rows in order that are narrower than a vector, taken together so that vectors are full. Of one column, what a vector writes
  // behind a segment the next one writes again, so that nothing depends on lengths that could not be predicted.
  template <int64_t kElements>
  FASTOPS_NOINLINE void in_narrow_rows(const Tile& tile, int64_t first, int64_t last, int64_t begin) const {
    constexpr int64_t kRoom = 512;
    const int64_t inner = kElements > 0 ? kElements : call_.inner, most = kRoom / inner;
    V levels[kRoom + kLanes<V>], gains[kRoom + kLanes<V>], level[kLanes<V>], gain[kLanes<V>];
    const int64_t values = tile.outer * segments_.num_segments, rows = tile.outer * segments_.num_rows;
    const T* const data = static_cast<const T*>(call_.data) + rows * inner;
    T* const out = static_cast<T*>(call_.out) + rows * inner;
    int64_t start = begin, end = begin;  // rows [start, end) are filled in
    const auto finish = [&] {
      apply(data + start * inner, out + start * inner, levels, gains, (end - start) * inner);
      start = end;
    };
    for (int64_t s = first, next; s < last; ++s, begin = next) {
      next = segments_.end(s, begin);
      if (begin == next) continue;
      for (int64_t c = 0; c < inner; ++c) read(M(call_.arrays, (values + s) * inner + c, c, next - begin), level[c], gain[c]);
      while (end < next) {
        const int64_t stop = std::min(next, start + most);
        for (; end < stop; end += kElements == 1 ? kLanes<V> : 1) {
          for (int64_t i = 0; i < (kElements == 1 ? kLanes<V> : inner); ++i) {
            levels[(end - start) * inner + i] = level[kElements == 1 ? 0 : i];
            gains[(end - start) * inner + i] = gain[kElements == 1 ? 0 : i];
          }
        }
        end = stop;
        if (end == start + most) finish();
      }
    }
    finish();
  }

  // Rows [first, last) that look their segments up, kTogether elements at most. Their elements are kInner, or any number for 0.
  template <int64_t kInner>
  void narrow_rows(int64_t first, int64_t last) const {
    const int64_t inner = kInner > 0 ? kInner : call_.inner;
    V levels[kTogether], gains[kTogether];
    bool belong[kTogether], all_belong = true;
    for (int64_t at = first, outer = first / segments_.num_rows, r = first % segments_.num_rows; at < last; ++at, ++r) {
      if (r == segments_.num_rows) r = 0, ++outer;
      const int64_t s = segments_.index[r];
      const bool belongs = uint64_t(s) < uint64_t(segments_.num_segments);
      belong[at - first] = belongs;
      all_belong &= belongs;
      const int64_t values = belongs ? (outer * segments_.num_segments + s) * inner : 0;
      for (int64_t column = 0; column < inner; ++column) {
        levels[(at - first) * inner + column] = levels_[values + column];
        gains[(at - first) * inner + column] = gains_[values + column];
      }
    }
    apply(static_cast<const T*>(call_.data) + first * inner, static_cast<T*>(call_.out) + first * inner, levels, gains,
          (last - first) * inner);
    for (int64_t at = first; at < last && !all_belong; ++at) {
      if (!belong[at - first]) zero(at, at + 1);
    }
  }

  // n neighbours, each with the two numbers of its column.
  static void apply(const T* data, T* out, const V* levels, const V* gains, int64_t n) {
    constexpr int kWidth = kLanes<V>;
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      store(out + i, of_two_numbers(load<V>(data + i), unaligned<vec<V>>(levels + i), unaligned<vec<V>>(gains + i)));
    }
    if (i == n) return;
    vec<V> x{}, level{}, gain{};
    for (int64_t k = i; k < n; ++k) {
      replace(x, int(k - i), load_as<V>(data[k])), replace(level, int(k - i), levels[k]), replace(gain, int(k - i), gains[k]);
    }
    const vec<V> results = of_two_numbers(x, level, gain);
    for (int64_t k = i; k < n; ++k) out[k] = store_as<T>(lane(results, int(k - i)));
  }

  static FASTOPS_HD vec<V> of_two_numbers(const vec<V>& x, const vec<V>& level, const vec<V>& gain) {
    if constexpr (std::is_same_v<M, LogSumExpMap<T>>) {
      return gain * Math<vec<V>>::exp(x - level);
    } else {
      return (x == level) | ((x != x) & (level != level)) ? gain : vec<V>{};
    }
  }

  static void read(const M& map, V& level, V& gain) {
    if constexpr (std::is_same_v<M, LogSumExpMap<T>>) {
      level = map.result, gain = map.grad;
    } else {
      level = map.best, gain = load_as<V>(map.share);
    }
  }

  // `rows` rows from `row` on, columns [first, last): their segment's values times their weights.
  FASTOPS_NOINLINE void weigh(T* out, int64_t values, int64_t first, int64_t last, int64_t row, int64_t rows) const {
    using V = compute_t<T>;
    const auto [data, heads, per_head] = call_.arrays.weights;
    const V* from = static_cast<const V*>(call_.arrays.values) + values;
    const V* weights = static_cast<const V*>(data) + row * heads;
    if (call_.inner == 1) return scale_run(out, weights, *from, rows);
    for (int64_t r = 0; r < rows; ++r, out += call_.inner, weights += heads) {
      weigh_row(out, from, weights, first, last - first, per_head);
    }
  }

  void columns(const T* data, T* out, int64_t values, int64_t first_column, int64_t width, int64_t rows, int64_t first, int64_t length) {
    alignas(M) std::byte storage[kColumnsAtOnce * sizeof(M)];
    M* maps = reinterpret_cast<M*>(storage);
    for (int64_t column = 0; column < width; ++column) new (maps + column) M(call_.arrays, values + column, first_column + column, length);
    for (int64_t r = 0; r < rows; ++r, data += call_.inner, out += call_.inner) {
      for (int64_t column = 0; column < width; ++column) out[column] = maps[column](data[column], first + r);
    }
  }

  void row(int64_t outer, int64_t r) const {
    const int64_t inner = call_.inner, at = outer * segments_.num_rows + r, s = segments_.index[r];
    if (s < 0 || s >= segments_.num_segments) return zero(at, at + 1);
    const int64_t values = (outer * segments_.num_segments + s) * inner;
    T* out = static_cast<T*>(call_.out) + at * inner;
    if constexpr (kRepeats) {
      const T* const from = repeated_ ? &repeated_[values] : static_cast<const T*>(call_.arrays.values) + values;
      for_narrow_rows(inner, [&](auto elements) { copy_rows<decltype(elements)::value>(out, from, inner, inner, 1); });
    } else if constexpr (std::is_same_v<M, WeightedMap<T>>) {
      weigh(out, values, 0, inner, r, 1);
    } else {
      const T* const data = M::kReadsData ? static_cast<const T*>(call_.data) + at * inner : nullptr;
      if constexpr (kTwoNumbers) {
        apply(data, out, &levels_[values], &gains_[values], inner);
      } else {
        const M* const maps = &maps_[values];
        for (int64_t column = 0; column < inner; ++column) out[column] = maps[column](M::kReadsData ? data[column] : T{}, r);
      }
    }
  }

  void zero(int64_t first, int64_t last) const {
    std::memset(static_cast<T*>(call_.out) + first * call_.inner, 0, (last - first) * call_.inner * sizeof(T));
  }
};

// Each row against its segment's values: what hands a gradient back to weights (DotCall). Bytes: all of data, once.
template <class T>
class DotRows final : public Visitor {
  using V = compute_t<T>;
  const DotCall& call_;
  const SegmentsView& segments_;

 public:
  explicit DotRows(const DotCall& call) : call_(call), segments_(call.segments) {}

  void run(const Pool& pool) {
    const int64_t row = call_.outer * call_.inner;
    const Cutting cut{1, row, std::max<int64_t>(row, 1), MovePolicy::kChunkRows, MovePolicy::kTaskBytes, sizeof(T)};
    const int64_t tasks = num_tasks(cut, segments_, pool), rows = segments_.num_rows;
    if (segments_.order) {
      pool(tasks, [&](int64_t task) {
        for (int64_t r = task * rows / tasks; r < (task + 1) * rows / tasks; ++r) {
          const int64_t s = segments_.index[r];
          if (uint64_t(s) < uint64_t(segments_.num_segments)) {
            dot(s, r, r + 1);
          } else {
            zero(r, r + 1);
          }
        }
      });
      return;
    }
    walk(cut, segments_, pool, tasks, *this);
    for_rows_of_no_segment(segments_, 1, [&](int64_t first, int64_t last) { zero(first, last); });
  }

  void whole(const Tile&, int64_t first, int64_t last, int64_t begin, int64_t, int64_t) override {
    for (int64_t s = first; s < last; ++s) {
      const int64_t end = segments_.end(s, begin);
      dot(s, begin, end);
      begin = end;
    }
  }
  void chunk(const Tile&, const Span& span, int64_t) override {
    dot(span.segment, span.begin + span.first, span.begin + std::min(span.length, span.first + MovePolicy::kChunkRows));
  }

 private:
  void zero(int64_t first, int64_t last) const {
    std::memset(static_cast<V*>(call_.out) + first * call_.heads, 0, (last - first) * call_.heads * sizeof(V));
  }

  // Rows [first, last) of segment s.
  FASTOPS_NOINLINE void dot(int64_t s, int64_t first, int64_t last) const {
    const int64_t inner = call_.inner, heads = call_.heads, per_head = call_.per_head, outers = call_.outer;
    const V* values = static_cast<const V*>(call_.values) + s * inner;
    const T* data = static_cast<const T*>(call_.data) + first * inner;
    V* out = static_cast<V*>(call_.out) + first * heads;
    const int64_t next_values = segments_.num_segments * inner, next_data = segments_.num_rows * inner;
    if (inner == 1 && outers == 1) {
      for (int64_t r = 0; r < last - first; ++r) out[r] = *values * load_as<V>(data[r]);
      return;
    }
    for (int64_t r = first; r < last; ++r, data += inner, out += heads) {
      if (per_head == 1) {
        multiply_runs(out, data, values, heads);
        for (int64_t o = 1; o < outers; ++o) {
          for (int64_t h = 0; h < heads; ++h) out[h] += values[o * next_values + h] * load_as<V>(data[o * next_data + h]);
        }
        continue;
      }
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t column = h * per_head;
        V total = dot(values + column, data + column, per_head);
        for (int64_t o = 1; o < outers; ++o) total += dot(values + o * next_values + column, data + o * next_data + column, per_head);
        out[h] = total;
      }
    }
  }

  static FASTOPS_HD V dot(const V* a, const T* b, int64_t n) {
    constexpr int kWidth = kLanes<V>, kChains = 4;
    int64_t i = 0;
    V total = 0;
    if (n >= kWidth) {
      vec<V> sums[kChains] = {};
      for (; i + kChains * kWidth <= n; i += kChains * kWidth) {
        for (int k = 0; k < kChains; ++k) sums[k] += unaligned<vec<V>>(a + i + k * kWidth) * load<V>(b + i + k * kWidth);
      }
      for (; i + kWidth <= n; i += kWidth) sums[0] += unaligned<vec<V>>(a + i) * load<V>(b + i);
      total = sum_lanes<V, kWidth>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
#if FASTOPS_VECTOR_EXTENSION
    if constexpr (std::is_same_v<T, V> && kWidth > 2) {
      if (i + kWidth / 2 <= n) {
        using Half = typename Vector<V, kWidth / 2>::type;
        total += sum_lanes<V, kWidth / 2>(unaligned<Half>(a + i) * unaligned<Half>(b + i));
        i += kWidth / 2;
      }
    }
#endif
    for (; i < n; ++i) total += a[i] * load_as<V>(b[i]);
    return total;
  }
};

template <template <class> class Map>
void floating(const RowMapCall& call, const Pool& pool) {
  visit_floating(call.dtype, [&](auto t) { MapRows<Map, typename decltype(t)::type>(call).run(pool); });
}

}  // namespace

void map_rows(const RowMapCall& call, const Pool& pool) {
  if (call.inner == 0) return;
  switch (call.map) {
    case RowMap::broadcast:
      return visit_width(call.dtype, [&](auto k) { MapRows<BroadcastMap, typename decltype(k)::type>(call).run(pool); });
    case RowMap::weighted: return floating<WeightedMap>(call, pool);
    case RowMap::mean: return floating<MeanMap>(call, pool);
    case RowMap::select: return floating<SelectMap>(call, pool);
    case RowMap::extremum: return floating<ExtremumMap>(call, pool);
    case RowMap::prod: return floating<ProductMap>(call, pool);
    case RowMap::logsumexp: return floating<LogSumExpMap>(call, pool);
    case RowMap::variance: return floating<VarianceMap>(call, pool);
  }
  unsupported();
}

void dot_rows(const DotCall& call, const Pool& pool) {
  visit_floating(call.dtype, [&](auto t) { DotRows<typename decltype(t)::type>(call).run(pool); });
}

}  // namespace FASTOPS_CPU_NAMESPACE
