// Reduction of segments.
//
// A segment, or a chunk of a long one (segments.h), is met block by block, and a block in strips of vectors:
//
//     columns  ->     | vector 0 | ... | vector K - 1 |    a strip: K accumulators, in registers over the block
//     rows 0 to 3     ((r0, r1), (r2, r3))                 one link of the block's chain: short chains, small errors
//     rows 4 to 7     ...
//     block           kBlockRows rows, then joined to the chunk's accumulators in the first-level cache
//     chunk           chunks of a longer segment are joined in pairs at the end
//
// Rows are read where they stand. Rows out of order, and 16-bit floats and small integers, are first brought together
// in the type that is computed in, a block at a time, so that the loops above exist for four types only.
// The order of the additions depends on nothing but the place inside the segment: not on threads, neighbours, or
// the width of a vector. A single column has its lanes along the rows instead. Every element of data is read once,
// in order: sizeof(T) bytes of traffic per element.
#include "cpu/capability.h"

#include "cpu/vec.h"
#include "cpu/walk.h"
#include "dispatch.h"
#include "kernels.h"

namespace FASTOPS_CPU_NAMESPACE {
namespace {

struct ReducePolicy {
  static constexpr int64_t kBlockRows = 32;          // guess: chains of 8 in a block, of 16 in a chunk
  static constexpr int64_t kChunkRows = 512;         // guess: partial results are at most 1/256 of the data
  static constexpr int64_t kChunkRowsScalar = 2048;  // one column: 64 additions in each of kScalarLanes
  static constexpr int kScalarLanes = 32;            // on every instruction set, so that all give the same bits
  static constexpr int64_t kTileVectors = 64;        // accumulators of a tile: 2 to 4 KiB a field
  static constexpr int64_t kPrefetchRows = 32;       // guess: gathered rows asked for ahead
  // Into the second level: measured on Zen 4 with rows of 64 to 1024 bytes, against 0, 2 and 8 KiB and the first level.
  static constexpr int64_t kPrefetchBytes = 4096;
  static constexpr int64_t kTaskBytes = 1 << 16;     // guess: below this a second thread costs more than it saves
};

// Rows at [position, position + n) of the sequence, columns [column, column + width), one behind the other as V.
template <class V, class T>
void stage_rows(const SegmentsView& segments, const T* data, int64_t inner, int64_t position, int64_t n, int64_t column,
                int64_t width, V* to) {
  if (segments.order) {
    const int64_t last = std::min(position + n + ReducePolicy::kPrefetchRows, segments.num_positions);
    for (int64_t at = std::max(position, last - n); at < last; ++at) {  // as many rows as are taken
      const T* row = data + segments.row(at) * inner + column;
      for (int64_t c = 0; c < width; c += 64 / int64_t(sizeof(T))) prefetch(row + c);
    }
  }
  for (int64_t i = 0; i < n; ++i, to += width) {
    const T* from = data + segments.row(position + i) * inner + column;
    int64_t c = 0;
    for (; c + kLanes<V> <= width; c += kLanes<V>) store(to + c, load<V>(from + c));
    for (; c < width; ++c) to[c] = load_as<V>(from[c]);
  }
}

template <class V>
using Stage = void (*)(const SegmentsView&, const void*, int64_t inner, int64_t position, int64_t n, int64_t column,
                       int64_t width, V* to);

// Writes `count` results that were computed as V where the element `at` of the output is.
template <class V>
using Write = void (*)(void* out, int64_t at, const V* values, int64_t count);

template <class V, class Out>
void write_values(void* out, int64_t at, const V* values, int64_t count) {
  Out* to = static_cast<Out*>(out) + at;
  if (count == kLanes<V>) return store(to, unaligned<vec<V>>(values));
  for (int64_t i = 0; i < count; ++i) to[i] = store_as<Out>(values[i]);
}

DType out_dtype(const ReduceCall& call) {
  if (call.wide_out) return DType::f32;
  switch (call.reduction) {
    case Reduction::sum:
    case Reduction::prod: return is_floating_dtype(call.dtype) ? call.dtype : DType::i64;
    case Reduction::any:
    case Reduction::all: return DType::u8;
    case Reduction::prod_parts: return DType::f64;
    default: return call.dtype;
  }
}

template <int K, class Body>
FASTOPS_HD void unrolled(Body&& body) {
  [&]<int... k>(std::integer_sequence<int, k...>) FASTOPS_INLINE_LAMBDA {
    (body(std::integral_constant<int, k>{}), ...);
  }(std::make_integer_sequence<int, K>{});
}

template <template <class, class> class Reducer, class V>
class Reduce final : public Visitor {
  using I = lane_int<V>;
  using Vectors = Reducer<vec<V>, vec<I>>;
  using Scalars = Reducer<V, int64_t>;  // rows are counted from the segment's first
  using Value = decltype(std::declval<Scalars>().value(0));
  using Result = std::conditional_t<std::is_same_v<Value, int64_t> && !std::is_same_v<V, int64_t>, I, Value>;
  static constexpr int kWidth = kLanes<V>;
  static constexpr bool kIsMean = std::is_same_v<Scalars, Mean<V, int64_t>>;
  // Vectors of accumulators in registers. More than one pays where a step is a load and an operation, and only there:
  // elsewhere it would be code to compile.
  static constexpr int kStrip = sizeof(Vectors) == sizeof(vec<V>) ? 4 : 1;

  const ReduceCall& call_;
  const SegmentsView& segments_;
  const Stage<V> stage_;
  const Write<Result> write_;
  const int64_t element_size_;
  const bool in_place_;  // rows can be read where they stand
  const DType out_dtype_;
  const Cutting cut_;
  const int64_t slots_;
  std::unique_ptr<Scalars[]> partials_;  // [outer, slots, inner] of chunks whose segment has several
  std::vector<std::vector<V>> staged_;   // for each thread

 public:
  Reduce(const ReduceCall& call, Stage<V> stage, Write<Result> write, int64_t element_size, bool same_type)
      : call_(call),
        segments_(call.segments),
        stage_(stage),
        write_(write),
        element_size_(element_size),
        in_place_(same_type && !call.segments.order),
        out_dtype_(out_dtype(call)),
        cut_{call.outer, call.inner, ReducePolicy::kTileVectors * kWidth,
             call.inner == 1 ? ReducePolicy::kChunkRowsScalar : ReducePolicy::kChunkRows, ReducePolicy::kTaskBytes, element_size},
        slots_(num_slots(segments_.num_positions, cut_.chunk_rows)) {
    // Zeros, since with offsets that were never checked some may be read that were not written.
    if (segments_.num_positions > cut_.chunk_rows) partials_.reset(new Scalars[call.outer * slots_ * call.inner]());
  }

  void run(const Pool& pool) {
    const int64_t tasks = num_tasks(cut_, segments_, pool);
    const int64_t last_tile = call_.inner % cut_.tile_columns;  // its columns: fewer than a vector's may be staged
    if (!in_place_ || (last_tile > 0 && last_tile < kWidth)) staged_.resize(tasks);
    walk(cut_, segments_, pool, tasks, *this);
  }

  void whole(const Tile& tile, int64_t first, int64_t last, int64_t begin, int64_t end, int64_t thread) override {
    const int64_t width = tile.last - tile.first;
    if (call_.inner == 1) {
      const V* rows = end > begin ? one_column(tile, begin, end - begin, thread) : nullptr;
      for (int64_t s = first, from = begin; s < last; ++s) {
        const int64_t length = segments_.end(s, from) - from;
        if (length == 0) {
          fill(tile, s);
        } else {
          finish(tile, {s, from, 0, length}, 0, column(rows + (from - begin), length));
        }
        from += length;
      }
      return;
    }
    Vectors joined[ReducePolicy::kTileVectors];
    for (int64_t s = first, from = begin; s < last; ++s) {
      const int64_t length = segments_.end(s, from) - from;
      if (length == 0) {
        fill(tile, s);
        continue;
      }
      join_rows(tile, from, length, thread, joined);
      finish(tile, {s, from, 0, length}, width, joined);
      from += length;
    }
  }

  void chunk(const Tile& tile, const Span& span, int64_t thread) override {
    const int64_t rows = std::min(span.length - span.first, cut_.chunk_rows), position = span.begin + span.first;
    Scalars* to = partial(tile, span) + tile.first;
    if (call_.inner == 1) {
      to[0] = column(one_column(tile, position, rows, thread), rows)
                  .template at<V, int64_t>([](auto x) { return x; }, span.first);
      return;
    }
    Vectors joined[ReducePolicy::kTileVectors];
    join_rows(tile, position, rows, thread, joined);
    const int64_t width = tile.last - tile.first;
    for (int64_t v = 0; v * kWidth < width; ++v) {
      for (int l = 0; l < kWidth && l < width; ++l) to[column_of(v, width) + l] = in_lane(joined[v], l, span.first);
    }
  }

  // In pairs, then pairs of pairs.
  void join(const Tile& tile, const Span& span) override {
    const int64_t chunks = ceil_div(span.length, cut_.chunk_rows);
    const auto of_chunk = [&](int64_t c) { return partial(tile, {span.segment, span.begin, c * cut_.chunk_rows, span.length}); };
    for (int64_t step = 1; step < chunks; step *= 2) {
      for (int64_t c = 0; c + step < chunks; c += 2 * step) {
        Scalars *a = of_chunk(c), *b = of_chunk(c + step);
        for (int64_t i = tile.first; i < tile.last; ++i) a[i] = Scalars::combine(a[i], b[i]);
      }
    }
    const Scalars* joined = of_chunk(0);
    for (int64_t i = tile.first; i < tile.last; ++i) finish(tile, span, i, joined[i]);
  }

 private:
  const void* data(const Tile& tile) const {
    return static_cast<const char*>(call_.data) + tile.outer * segments_.num_rows * call_.inner * element_size_;
  }
  Scalars* partial(const Tile& tile, const Span& span) {
    return &partials_[(tile.outer * slots_ + slot(span.begin, span.first, cut_.chunk_rows)) * call_.inner];
  }
  V* room(int64_t thread, int64_t size) {
    auto& staged = staged_[thread];
    if (int64_t(staged.size()) < size) staged.resize(size);
    return staged.data();
  }

  const V* one_column(const Tile& tile, int64_t position, int64_t rows, int64_t thread) {
    if (in_place_) return static_cast<const V*>(data(tile)) + position;
    V* to = room(thread, rows);
    stage_(segments_, data(tile), 1, position, rows, 0, 1, to);
    return to;
  }

  // Where vector v begins; the last one overlaps its neighbour and computes the same bits again.
  static FASTOPS_HD int64_t column_of(int64_t v, int64_t width) {
    return width <= kWidth ? 0 : std::min(v * kWidth, width - kWidth);
  }

  // Joins n > 0 rows from a position on, block by block, in strips of vectors that stay in registers over a block.
  FASTOPS_NOINLINE void join_rows(const Tile& tile, int64_t position, int64_t n, int64_t thread, Vectors* joined) {
    const int64_t width = tile.last - tile.first, inner = call_.inner;
    // A vector of a row that is narrower reads on into the rows behind: not where the data ends.
    const int64_t readable = call_.outer * segments_.num_rows * inner - (tile.outer * segments_.num_rows + position + n) * inner;
    const bool direct = in_place_ && (width >= kWidth || readable >= kWidth);
    for (int64_t r = 0; r < n; r += ReducePolicy::kBlockRows) {
      const int64_t rows = std::min(n - r, ReducePolicy::kBlockRows);
      const V* block;
      int64_t stride;
      if (direct) {
        block = static_cast<const V*>(data(tile)) + (position + r) * inner + tile.first;
        stride = inner;
      } else {
        V* to = room(thread, rows * width + kWidth);
        stage_(segments_, data(tile), inner, position + r, rows, tile.first, width, to);
        block = to;
        stride = width;
      }
      int64_t v = 0;
      if constexpr (kStrip > 1) {
        for (; (v + kStrip) * kWidth <= width; v += kStrip) join_strip<kStrip>(block + v * kWidth, stride, rows, r, joined + v);
      }
      for (; v * kWidth < width; ++v) join_strip<1>(block + column_of(v, width), stride, rows, r, joined + v);
    }
  }

  // Joins n rows, of which the first is row `number` of its chunk, to what went before.
  template <int K>
  static FASTOPS_HD void join_strip(const V* rows, int64_t stride, int64_t n, int64_t number, Vectors* joined) {
    const auto one = [&](int64_t i, int k) FASTOPS_INLINE_LAMBDA {
      return Vectors::of(load<V>(rows + i * stride + k * kWidth), constant<vec<I>>(I(number + i)));
    };
    const auto four = [&](int64_t i, int k) FASTOPS_INLINE_LAMBDA {
      if (k * kVectorBytes % 64 == 0) {  // strips jump from row to row, which hides from the processor that all is read
        const V* ahead = rows + i * stride + k * kWidth + ReducePolicy::kPrefetchBytes / int64_t(sizeof(V));
        for (int64_t r = 0; r < 4; ++r) prefetch_far(ahead + r * stride);
      }
      return Vectors::combine(Vectors::combine(one(i, k), one(i + 1, k)), Vectors::combine(one(i + 2, k), one(i + 3, k)));
    };
    Vectors strip[K];
    int64_t i = n >= 4 ? 4 : 1;
    if (n >= 4) {
      unrolled<K>([&](auto k) FASTOPS_INLINE_LAMBDA { strip[k] = four(0, k); });
    } else {
      unrolled<K>([&](auto k) FASTOPS_INLINE_LAMBDA { strip[k] = one(0, k); });
    }
    for (; i + 4 <= n; i += 4) {
      unrolled<K>([&](auto k) FASTOPS_INLINE_LAMBDA { strip[k] = Vectors::combine(strip[k], four(i, k)); });
    }
    for (; i < n; ++i) {
      unrolled<K>([&](auto k) FASTOPS_INLINE_LAMBDA { strip[k] = Vectors::combine(strip[k], one(i, k)); });
    }
    unrolled<K>([&](auto k) FASTOPS_INLINE_LAMBDA { joined[k] = number == 0 ? strip[k] : Vectors::combine(joined[k], strip[k]); });
  }

  static FASTOPS_HD Scalars in_lane(const Vectors& vectors, int l, int64_t rows_before) {
    return vectors.template at<V, int64_t>([l](const auto& v) { return lane(v, l); }, rows_before);
  }

  // Rows of one column, one behind the other: short ones in fours, as in a strip.
  static FASTOPS_HD Scalars column(const V* from, int64_t n) {
    if (n >= ReducePolicy::kScalarLanes) return along(from, n);
    const auto one = [&](int64_t i) FASTOPS_INLINE_LAMBDA { return Scalars::of(from[i], i); };
    const auto four = [&](int64_t i) FASTOPS_INLINE_LAMBDA {
      return Scalars::combine(Scalars::combine(one(i), one(i + 1)), Scalars::combine(one(i + 2), one(i + 3)));
    };
    int64_t i = n >= 4 ? 4 : 1;
    Scalars joined = n >= 4 ? four(0) : one(0);
    for (; i + 4 <= n; i += 4) joined = Scalars::combine(joined, four(i));
    for (; i < n; ++i) joined = Scalars::combine(joined, one(i));
    return joined;
  }

  // kScalarLanes rows or more of one column, joined in as many lanes whatever the width of a vector.
  static FASTOPS_NOINLINE Scalars along(const V* from, int64_t n) {
    constexpr int kAll = ReducePolicy::kScalarLanes, K = kAll / kWidth;
    vec<I> numbers{};
    if constexpr (kWidth > 1) {
      for (int i = 0; i < kWidth; ++i) numbers[i] = I(i);
    }
    const auto at = [&](int64_t i, int k) FASTOPS_INLINE_LAMBDA {
      return Vectors::of(load<V>(from + i + k * kWidth), numbers + constant<vec<I>>(I(i + k * kWidth)));
    };
    Vectors lanes[K];
    unrolled<K>([&](auto k) FASTOPS_INLINE_LAMBDA { lanes[k] = at(0, k); });
    int64_t i = kAll;
    for (; i + kAll <= n; i += kAll) {
      unrolled<K>([&](auto k) FASTOPS_INLINE_LAMBDA { lanes[k] = Vectors::combine(lanes[k], at(i, k)); });
    }
    for (int half = K / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) lanes[k] = merge(lanes[k], lanes[k + half]);
    }
    Scalars each[kWidth];
    for (int l = 0; l < kWidth; ++l) each[l] = in_lane(lanes[0], l, 0);
    for (int half = kWidth / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) each[l] = merge(each[l], each[l + half]);
    }
    for (; i < n; ++i) each[0] = Scalars::combine(each[0], Scalars::of(from[i], i));
    return each[0];
  }

  FASTOPS_NOINLINE void fill(const Tile& tile, int64_t segment) {
    const int64_t base = (tile.outer * segments_.num_segments + segment) * call_.inner;
    const int64_t first = base + tile.first, last = base + tile.last;
    if (call_.out) {
      visit_any(out_dtype_, [&](auto t) {
        using Out = typename decltype(t)::type;
        Out* out = static_cast<Out*>(call_.out);
        std::fill(out + first, out + last, is_floating<Out> ? store_as<Out>(call_.fill) : store_as<Out>(call_.fill_integer));
      });
    }
    if (call_.extra) std::fill(call_.extra + first, call_.extra + last, call_.fill_extra);
  }

  // The result of a whole segment, for the vectors of a tile.
  FASTOPS_NOINLINE void finish(const Tile& tile, const Span& span, int64_t width, const Vectors* joined) {
    const int64_t base = (tile.outer * segments_.num_segments + span.segment) * call_.inner + tile.first;
    const int64_t count = std::min<int64_t>(width, kWidth);
    for (int64_t v = 0; v * kWidth < width; ++v) {
      const int64_t first = column_of(v, width), at = base + first;
      if (call_.out) {
        auto value = joined[v].value(span.length);
        if constexpr (kIsMean) {
          const auto finite = value - value == 0;
          for (int64_t l = 0; l < count; ++l) {
            if (!lane(finite, int(l))) replace(value, int(l), again(tile, span, tile.first + first + l));
          }
        }
        if (!write_ && count == kWidth) {
          store(static_cast<Result*>(call_.out) + at, value);
        } else {
          Result lanes[kWidth];
          store(lanes, value);
          put(at, lanes, count);
        }
      }
      if constexpr (Vectors::kExtra != Extra::none) {
        for (int64_t l = 0; l < count; ++l) call_.extra[at + l] = number(lane(joined[v].extra(), int(l)), span);
      }
    }
  }

  // And for one column.
  FASTOPS_HD void finish(const Tile& tile, const Span& span, int64_t column, const Scalars& joined) {
    const int64_t at = (tile.outer * segments_.num_segments + span.segment) * call_.inner + column;
    if (call_.out) {
      Result value = Result(joined.value(span.length));
      if constexpr (kIsMean) {
        if (!(value - value == 0)) value = again(tile, span, column);
      }
      put(at, &value, 1);
    }
    if constexpr (Scalars::kExtra != Extra::none) call_.extra[at] = number(joined.extra(), span);
  }

  FASTOPS_HD void put(int64_t at, const Result* values, int64_t count) const {
    if (write_) return write_(call_.out, at, values, count);
    std::memcpy(static_cast<Result*>(call_.out) + at, values, count * sizeof(Result));
  }

  int64_t number(int64_t extra, const Span& span) const {
    return Scalars::kExtra == Extra::row ? segments_.row(span.begin + extra) : extra;
  }

  // A mean whose total is not finite.
  FASTOPS_NOINLINE V again(const Tile& tile, const Span& span, int64_t column) {
    return scaled_mean<V>(span.length, [&](int64_t i) {
      V x;
      stage_(segments_, data(tile), call_.inner, span.begin + i, 1, column, 1, &x);
      return x;
    });
  }
};

template <class V, class T>
constexpr Stage<V> stage_of() {
  return [](const SegmentsView& segments, const void* data, int64_t inner, int64_t position, int64_t n, int64_t column,
            int64_t width, V* to) { stage_rows<V>(segments, static_cast<const T*>(data), inner, position, n, column, width, to); };
}

// The same bits in memory: int64_t is added up without a sign.
template <class A, class B>
constexpr bool same_bits = std::is_same_v<A, B> || (sizeof(A) == 8 && sizeof(B) == 8 && !is_floating<A> && !is_floating<B>);

template <template <class, class> class Reducer, class T, class V, class Out>
void reduce_as(const ReduceCall& call, const Pool& pool, ReducerTypes<Reducer, T, V, Out>) {
  using Vectors = Reducer<vec<V>, vec<lane_int<V>>>;
  using Result = scalar_of<decltype(std::declval<Vectors>().value(0))>;
  Write<Result> write = same_bits<Result, Out> ? nullptr : write_values<Result, Out>;
  if (call.wide_out) write = same_bits<Result, float> ? nullptr : write_values<Result, float>;
  Reduce<Reducer, V>(call, stage_of<V, T>(), write, sizeof(T), same_bits<T, V>).run(pool);
}

}  // namespace

void reduce(const ReduceCall& call, const Pool& pool) {
  visit_reducer(call.reduction, call.dtype, [&](auto types) { reduce_as(call, pool, types); });
}

}  // namespace FASTOPS_CPU_NAMESPACE
