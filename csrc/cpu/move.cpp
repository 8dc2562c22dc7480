// What each row receives from its segment (gradients.h).
//
// Rows in order are walked segment by segment, so that the segment's values stay in the first-level cache: each element
// of the output is written once, in order. Rows out of order are walked one after the other and look their segment up,
// which makes the values the random access and keeps the writes, the larger part, in order.
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
  static constexpr int64_t kTaskBytes = 1 << 16;  // guess: below this a second thread costs more than it saves
};

template <template <class> class Map, class T>
class MapRows final : public Visitor {
  using M = Map<T>;
  // Whether all rows of a segment get the same.
  static constexpr bool kRepeats = !M::kReadsData && !std::is_same_v<M, SelectMap<T>> && !std::is_same_v<M, WeightedMap<T>>;

  const RowMapCall& call_;
  const SegmentsView& segments_;
  std::vector<std::vector<T>> rows_;  // for each thread, a row to copy
  std::vector<M> maps_;               // [outer, S, inner] where rows look their segment up

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
    if constexpr (M::kReadsData) {
      const T* data = static_cast<const T*>(call_.data) + at;
      if (inner == 1 && !std::is_same_v<M, LogSumExpMap<T>>) {
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
      for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * inner, row, width * sizeof(T));
    }
  }

 private:
  static constexpr int64_t kColumnsAtOnce = 64;

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
      if constexpr (std::is_same_v<M, LogSumExpMap<T>>) {
        const int64_t together = kColumnsAtOnce / call_.inner;
        for (int64_t at = first; at < last && together > 0; at += together) narrow_rows(at, std::min(last, at + together));
        if (together > 0) return;
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

  // What rows look up is made once for each segment, not for each row.
  void tabulate(const Pool& pool, int64_t tasks) {
    const int64_t all = call_.outer * segments_.num_segments, inner = call_.inner;
    if (all == 0) return;
    maps_.assign(all * inner, M(call_.arrays, 0, 0, 0));
    pool(tasks, [&](int64_t task) {
      for (int64_t at = task * all / tasks; at < (task + 1) * all / tasks; ++at) {
        const int64_t s = at % segments_.num_segments, begin = segments_.begin(s), length = segments_.end(s, begin) - begin;
        for (int64_t column = 0; column < inner; ++column) maps_[at * inner + column] = M(call_.arrays, at * inner + column, column, length);
      }
    });
  }

  // Of `rows` rows, exp by vectors. Narrow rows are taken together, so that vectors are full.
  void powers(const T* data, T* out, const M* maps, int64_t width, int64_t rows) const {
    using V = compute_t<T>;
    const int64_t inner = call_.inner, together = width == inner ? std::min(rows, kColumnsAtOnce / width) : 1;
    V results[kColumnsAtOnce], grads[kColumnsAtOnce];
    if (width == 1) {
      std::fill_n(results, together, maps->result);
      std::fill_n(grads, together, maps->grad);
    } else {
      for (int64_t i = 0; i < width; ++i) results[i] = maps[i].result, grads[i] = maps[i].grad;
      for (int64_t i = width; i < together * width; ++i) results[i] = results[i - width], grads[i] = grads[i - width];
    }
    for (int64_t r = 0; r < rows; r += together, data += together * inner, out += together * inner) {
      powers(data, out, results, grads, std::min(together, rows - r) * width);
    }
  }

  // The same of rows [first, last) that look their segments up.
  void narrow_rows(int64_t first, int64_t last) const {
    using V = compute_t<T>;
    const int64_t inner = call_.inner;
    V results[kColumnsAtOnce], grads[kColumnsAtOnce];
    bool belong[kColumnsAtOnce], all_belong = true;
    for (int64_t at = first, outer = first / segments_.num_rows, r = first % segments_.num_rows; at < last; ++at, ++r) {
      if (r == segments_.num_rows) r = 0, ++outer;
      const int64_t s = segments_.index[r];
      const bool belongs = uint64_t(s) < uint64_t(segments_.num_segments);
      belong[at - first] = belongs;
      all_belong &= belongs;
      for (int64_t column = 0; column < inner; ++column) {
        const int64_t i = (at - first) * inner + column;
        results[i] = grads[i] = 0;
        if (!belongs) continue;
        const M& map = maps_[(outer * segments_.num_segments + s) * inner + column];
        results[i] = map.result, grads[i] = map.grad;
      }
    }
    T* const out = static_cast<T*>(call_.out) + first * inner;
    powers(static_cast<const T*>(call_.data) + first * inner, out, results, grads, (last - first) * inner);
    for (int64_t at = first; at < last && !all_belong; ++at) {
      if (!belong[at - first]) zero(at, at + 1);
    }
  }

  // n neighbours, kColumnsAtOnce at most.
  template <class V>
  static void powers(const T* data, T* out, const V* results, const V* grads, int64_t n) {
    constexpr int kWidth = kLanes<V>;
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      const vec<V> below = load<V>(data + i) - unaligned<vec<V>>(results + i);
      store(out + i, vec<V>(unaligned<vec<V>>(grads + i) * Math<vec<V>>::exp(below)));
    }
    if (i == n) return;
    vec<V> below{};
    for (int64_t k = i; k < n; ++k) replace(below, int(k - i), load_as<V>(data[k]) - results[k]);
    const vec<V> power = Math<vec<V>>::exp(below);
    for (int64_t k = i; k < n; ++k) out[k] = store_as<T>(grads[k] * lane(power, int(k - i)));
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
    if constexpr (std::is_same_v<M, LogSumExpMap<T>>) return powers(data, out, maps, width, rows);
    for (int64_t r = 0; r < rows; ++r, data += call_.inner, out += call_.inner) {
      for (int64_t column = 0; column < width; ++column) out[column] = maps[column](data[column], first + r);
    }
  }

  void row(int64_t outer, int64_t r) const {
    const int64_t inner = call_.inner, at = outer * segments_.num_rows + r, s = segments_.index[r];
    if (s < 0 || s >= segments_.num_segments) return zero(at, at + 1);
    const int64_t values = (outer * segments_.num_segments + s) * inner;
    T* out = static_cast<T*>(call_.out) + at * inner;
    if constexpr (std::is_same_v<M, BroadcastMap<T>>) {
      const T* const from = static_cast<const T*>(call_.arrays.values) + values;
      if (inner <= 2) {  // less than what a call costs
        out[0] = from[0];
        if (inner == 2) out[1] = from[1];
        return;
      }
      std::memcpy(out, from, inner * sizeof(T));
    } else if constexpr (std::is_same_v<M, WeightedMap<T>>) {
      weigh(out, values, 0, inner, r, 1);
    } else {
      const T* const data = M::kReadsData ? static_cast<const T*>(call_.data) + at * inner : nullptr;
      const M* const maps = &maps_[values];
      if constexpr (std::is_same_v<M, LogSumExpMap<T>>) {
        for (int64_t column = 0; column < inner; column += kColumnsAtOnce) {
          powers(data + column, out + column, maps + column, std::min(kColumnsAtOnce, inner - column), 1);
        }
      } else {
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
