// Reduction of segments.
//
// A segment, or a chunk of a long one (segments.h), is met block by block:
//
//     columns  ->     | vector 0 | ... | vector K - 1 |    K accumulators, in registers if the row has no more
//     rows 0 to 3     ((r0, r1), (r2, r3))                 one link of the block's chain: short chains, small errors
//     rows 4 to 7     ...
//     block           kBlockRows rows, then joined to the chunk's accumulators in the first-level cache
//     chunk           chunks of a longer segment are joined in pairs at the end
//
// Rows are read where they stand. Rows out of order, and most narrower types in the type that is computed in, are first
// brought together, a block at a time, so that the loops above exist for few types only; of rows that are narrower than a
// vector, those of many segments at once. A vector of such a row reads on into the rows behind, and its other lanes are left.
// The order of the additions depends on nothing but the place inside the segment: not on threads, neighbours, or
// the width of a vector (but for what meets rows twice, see reducers.h). A single column has its lanes along the rows
// instead. Every element of data is read once,
// in order: sizeof(T) bytes of traffic per element.
#include "cpu/capability.h"

#include "cpu/math.h"
#include "cpu/stage.h"
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
  // Into the second level: measured on Zen 4 with rows of 64 to 1024 bytes, against 0, 2 and 8 KiB and the first level.
  static constexpr int64_t kPrefetchBytes = 4096;
  static constexpr int64_t kStreamBytes = 1 << 25;   // guess: what no cache holds. Measured on 128 MB: 36 ms, not 54
  static constexpr int64_t kTaskBytes = 1 << 16;     // guess: below this a second thread costs more than it saves
};

// Brings together rows of one outer slice as the reducer is to see them, `width` apart.
template <class E>
using Stage = void (*)(const ReduceCall&, int64_t outer, int64_t position, int64_t n, int64_t column, int64_t width, E* to);

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

// Computes in V; the rows it walks over, where they stand or brought together, are of E.
template <template <class, class> class Reducer, class V, class E>
class Reduce final : public Visitor {
  using I = lane_int<V>;
  using Vectors = Reducer<vec<V>, vec<I>>;
  using Scalars = Reducer<V, int64_t>;  // rows are counted from the segment's first
  using Value = decltype(std::declval<Scalars>().value(0));
  using Result = std::conditional_t<std::is_same_v<Value, int64_t> && !std::is_same_v<V, int64_t>, I, Value>;
  // What sums of 16-bit floats are stored as, unless in float.
  using Stored = std::conditional_t<sizeof(E) == 2 && is_floating<E>, E, Result>;
  static constexpr int kWidth = kLanes<V>;
  // A mean is a sum that is divided at the end.
  static constexpr bool kHasMean = std::is_same_v<Scalars, Sum<V, int64_t>> && is_floating<V>;
  static constexpr bool kHasBase = Scalars::kExtra == Extra::mean;
  // Vectors of accumulators in registers. More than one pays where a step is a load and an operation, and only there:
  // elsewhere it would be code to compile.
  static constexpr int kStrip = sizeof(Vectors) == sizeof(vec<V>) ? 4 : 1;

  // An element is seen as it is, mirrored, or without the sign of a zero (dispatch.h).
  static constexpr bool kMirrors =
      std::is_same_v<Scalars, Extremum::Value<V, int64_t>> ||
      std::is_same_v<Scalars, Extremum::WithRow<V, int64_t>> ||
      std::is_same_v<Scalars, Extremum::WithCount<V, int64_t>>;
  static constexpr bool kMasks = std::is_same_v<Value, int64_t> && Scalars::kExtra == Extra::none && !std::is_same_v<V, uint64_t> && !kMirrors;

  const ReduceCall& call_;
  const V sign_;  // kMirrors: by which floats are multiplied; or bits that are flipped; kMasks: bits that count
  const SegmentsView& segments_;
  const Stage<E> stage_;
  const Write<Result> write_;
  const int64_t element_size_;
  const bool in_place_;  // rows can be read where they stand, in order or not
  const bool stream_;    // results go past the caches
  const DType out_dtype_;
  const Cutting cut_;
  const int64_t slots_;
  std::unique_ptr<Scalars[]> partials_;  // [outer, slots, inner] of chunks whose segment has several
  std::vector<std::vector<E>> staged_;   // for each thread: rows of a segment,
  std::vector<std::vector<E>> batches_;  // and narrow rows of several

 public:
  Reduce(const PreparedReduce& prepared, Stage<E> stage, Write<Result> write, int64_t element_size, bool in_place)
      : call_(prepared.call),
        sign_(sign(prepared)),
        segments_(call_.segments),
        stage_(stage),
        write_(write),
        element_size_(element_size),
        in_place_(in_place),
        stream_(segments_.order && is_large(call_)),
        out_dtype_(out_dtype(call_)),
        cut_{call_.outer, call_.inner, ReducePolicy::kTileVectors * kWidth,
             call_.inner == 1 ? ReducePolicy::kChunkRowsScalar : ReducePolicy::kChunkRows, ReducePolicy::kTaskBytes, element_size},
        slots_(num_slots(segments_.num_positions, cut_.chunk_rows)) {
    // Zeros, since with offsets that were never checked some may be read that were not written.
    if (segments_.num_positions > cut_.chunk_rows) partials_.reset(new Scalars[call_.outer * slots_ * call_.inner]());
  }

  static V sign(const PreparedReduce& prepared) {
    if constexpr (kMirrors && is_floating<V>) return V(prepared.mirror ? -1 : 1);
    if constexpr (kMirrors) return V(-V(prepared.mirror));
    return V(prepared.truth_mask);
  }

  template <class X>
  FASTOPS_HD X see(const X& x) const {
    if constexpr (kMirrors && is_floating<V>) {
      return x * sign_;
    } else if constexpr (kMirrors) {
      return x ^ sign_;
    } else if constexpr (kMasks) {
      return x & sign_;
    } else {
      return x;
    }
  }

  // Where rows come from all over, the caches are for them: written past the caches, large results need not be read
  // first, and the memory does not turn from reading to writing and back with every segment.
  static bool is_large(const ReduceCall& call) {
    return call.outer * call.segments.num_segments * call.inner * int64_t(sizeof(Result)) >= ReducePolicy::kStreamBytes &&
           call.inner % kWidth == 0 && reinterpret_cast<uintptr_t>(call.out) % kVectorBytes == 0;
  }

  void run(const Pool& pool) {
    const int64_t tasks = num_tasks(cut_, segments_, pool);
    staged_.resize(tasks);
    batches_.resize(tasks);
    walk(cut_, segments_, pool, tasks, *this);
  }

  void whole(const Tile& tile, int64_t first, int64_t last, int64_t begin, int64_t end, int64_t thread) override {
    const int64_t width = tile.last - tile.first;
    if (call_.inner == 1) {
      const E* rows = end > begin ? one_column(tile, begin, end - begin, thread) : nullptr;
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
    if constexpr (Vectors::kExtra == Extra::none || Vectors::kExtra == Extra::mean) {
      const bool as_stored = std::is_same_v<Stored, Result> ? !write_ : !call_.wide_out;
      const bool straight = in_place_ && !segments_.order;
      const bool narrow = call_.inner < kWidth;
      if (!call_.mean && as_stored && (straight || narrow)) {
        const E* rows = straight ? static_cast<const E*>(data(tile)) + begin * call_.inner + tile.first : batch(tile, begin, end, thread);
        if (narrow) return whole_in_registers<1, true>(tile, first, last, begin, rows, straight, thread);
        if (width == kWidth) return whole_in_registers<1, false>(tile, first, last, begin, rows, true, thread);
        if (kStrip > 1 && width == kStrip * kWidth) return whole_in_registers<kStrip, false>(tile, first, last, begin, rows, true, thread);
      }
    }
    whole_rows(tile, first, last, begin, thread);
  }

  void whole_rows(const Tile& tile, int64_t first, int64_t last, int64_t begin, int64_t thread) {
    const int64_t width = tile.last - tile.first;
    Vectors joined[ReducePolicy::kTileVectors];
    Window window;
    for (int64_t s = first, from = begin; s < last; ++s) {
      const int64_t length = segments_.end(s, from) - from;
      if (length == 0) {
        fill(tile, s);
        continue;
      }
      join_rows(tile, from, from, length, thread, window, joined);
      finish(tile, {s, from, 0, length}, width, joined);
      from += length;
    }
    if (stream_) fence_stores();
  }

  // Segments of rows of K vectors, or of less than one, whose results are stored as they are: nothing but the rows, one behind the
  // other from `rows` on, and the result touches memory. The same bits as from whole_rows(). Of narrow rows, what a vector reads of
  // the rows behind is thrown away, and what it writes behind a result the next one writes again.
  template <int K, bool kIsNarrow>
  FASTOPS_NOINLINE void whole_in_registers(const Tile& tile, int64_t first, int64_t last, int64_t begin, const E* rows, bool in_place,
                                           int64_t thread) {
    const int64_t inner = call_.inner;
    const bool divides = kHasMean && call_.reduction == Reduction::mean;
    Stored* out = static_cast<Stored*>(call_.out) + (tile.outer * segments_.num_segments + first) * inner + tile.first;
    const Stored* const out_end = out + (last - first) * inner;
    // Elements from `rows` on, without a last vector of them.
    const int64_t readable = in_place ? ((call_.outer - tile.outer) * segments_.num_rows - begin) * inner - kWidth
                                      : std::numeric_limits<int64_t>::max();
    const int lanes = kIsNarrow ? int(inner) : kWidth;
    for (int64_t s = first, from = begin; s < last; ++s, out += inner) {
      const int64_t length = segments_.end(s, from) - from;
      if (length == 0 || is_undefined(length)) {
        fill(tile, s);
        rows += length * inner;
        from += length;
        continue;
      }
      constexpr int64_t kBlock = ReducePolicy::kBlockRows;
      bool done = (!kHasBase || std::is_same_v<E, V> || length <= kBlock) &&
                  (!kIsNarrow || (from - begin + length - 1) * inner <= readable);
      if (done) {
        using Rows = std::conditional_t<kIsNarrow, Narrow, Straight>;
        const V* base = nullptr;
        if constexpr (kHasBase && std::is_same_v<E, V>) base = rows;
        Vectors joined[K];
        join_strip<K>(Rows{rows, inner}, std::min(length, kBlock), 0, joined, 0, base);
        for (int64_t r = kBlock; r < length; r += kBlock) {
          join_strip<K>(Rows{rows + r * inner, inner}, std::min(length - r, kBlock), r, joined, 0, base);
        }
        unrolled<K>([&](auto k) FASTOPS_INLINE_LAMBDA {
          auto value = result(joined[k], length);
          if constexpr (kHasMean) {
            if (divides) {
              value = value / V(length);
              vec<V> wild = value - value;  // 0, or NaN where the sum overflowed
              V sum = 0;
              for (int l = 0; l < lanes; ++l) sum += lane(wild, l);
              done = done && sum == 0;
            }
          }
          if (!kIsNarrow || out + kWidth <= out_end) return store(out + k * kWidth, value);
          Stored ends[kWidth];
          store(ends, value);
          std::copy_n(ends, lanes, out);
        });
      }
      if (!done) whole_rows(tile, s, s + 1, from, thread);
      rows += length * inner;
      from += length;
    }
  }

  void chunk(const Tile& tile, const Span& span, int64_t thread) override {
    const int64_t rows = std::min(span.length - span.first, cut_.chunk_rows), position = span.begin + span.first;
    Scalars* to = partial(tile, span) + tile.first;
    if (call_.inner == 1) {
      if constexpr (kHasBase) {
        to[0] = column_twice(one_column(tile, position, rows, thread), rows, first_of(tile, span.begin, 0));
        return;
      }
      to[0] = column(one_column(tile, position, rows, thread), rows)
                  .template at<V, int64_t>([](auto x) { return x; }, span.first);
      return;
    }
    Vectors joined[ReducePolicy::kTileVectors];
    Window window;
    join_rows(tile, span.begin, position, rows, thread, window, joined);
    const int64_t width = tile.last - tile.first;
    for (int64_t v = 0; v * kWidth < width; ++v) {
      for (int l = 0; l < kWidth && l < width; ++l) to[column_of(v, width) + l] = in_lane(joined[v], l, span.first);
    }
  }

  void join(const Tile& tile, const Span& span) override {
    const int64_t chunks = ceil_div(span.length, cut_.chunk_rows);
    const auto of_chunk = [&](int64_t c) { return partial(tile, {span.segment, span.begin, c * cut_.chunk_rows, span.length}); };
    join_in_pairs<Scalars>(chunks, tile.first, tile.last, of_chunk);
    const Scalars* joined = of_chunk(0);
    for (int64_t i = tile.first; i < tile.last; ++i) finish(tile, span, i, joined[i]);
  }

 private:
  // The columns of a tile in the first row of a segment, to be read in whole vectors.
  struct FirstRow {
    V columns[kHasBase ? (ReducePolicy::kTileVectors + 1) * kWidth : 1];
    const V* load(const Reduce& reduce, const Tile& tile, int64_t begin) {
      const int64_t width = tile.last - tile.first;
      reduce.stage_(reduce.call_, tile.outer, begin, 1, tile.first, width, columns);
      std::fill(columns + width, columns + width + kWidth, V{});
      return columns;
    }
  };

  // An element of it.
  V first_of(const Tile& tile, int64_t begin, int64_t column) const {
    E x;
    stage_(call_, tile.outer, begin, 1, column, 1, &x);
    return load_as<V>(x);
  }

  const void* data(const Tile& tile) const {
    return static_cast<const char*>(call_.data) + tile.outer * segments_.num_rows * call_.inner * element_size_;
  }
  Scalars* partial(const Tile& tile, const Span& span) {
    return &partials_[(tile.outer * slots_ + slot(span.begin, span.first, cut_.chunk_rows)) * call_.inner];
  }
  E* room(int64_t thread, int64_t size) {
    auto& staged = staged_[thread];
    if (int64_t(staged.size()) < size) staged.resize(size);
    return staged.data();
  }

  // The rows of a batch, with room to read a vector from each.
  const E* batch(const Tile& tile, int64_t begin, int64_t end, int64_t thread) {
    const int64_t size = (end - begin) * call_.inner + kWidth;
    auto& rows = batches_[thread];
    if (int64_t(rows.size()) < size) rows.resize(size);
    stage_(call_, tile.outer, begin, end - begin, 0, call_.inner, rows.data());
    return rows.data();
  }

  const E* one_column(const Tile& tile, int64_t position, int64_t rows, int64_t thread) {
    if (in_place_ && !segments_.order) return static_cast<const E*>(data(tile)) + position;
    E* to = room(thread, rows);
    stage_(call_, tile.outer, position, rows, 0, 1, to);
    return to;
  }

  // Where vector v begins; the last one overlaps its neighbour and computes the same bits again.
  static FASTOPS_HD int64_t column_of(int64_t v, int64_t width) {
    return width <= kWidth ? 0 : std::min(v * kWidth, width - kWidth);
  }

  // Rows `stride` apart.
  struct Straight {
    const E* rows;
    int64_t stride;
    FASTOPS_HD const E* operator()(int64_t i) const { return rows + i * stride; }
    // Strips jump from row to row, which hides from the processor that all is read.
    FASTOPS_HD void ask_ahead(const E* at, int64_t, int64_t) const {
      prefetch_far(at + ReducePolicy::kPrefetchBytes / int64_t(sizeof(E)));
    }
  };

  // Rows of a vector or less, one behind the other: the processor sees by itself that all is read.
  struct Narrow {
    const E* rows;
    int64_t stride;
    FASTOPS_HD const E* operator()(int64_t i) const { return rows + i * stride; }
    FASTOPS_HD void ask_ahead(const E*, int64_t, int64_t) const {}
  };

  // A block of rows, wherever they are, and of those to ask for meanwhile.
  struct Listed {
    const E* const* rows;
    const E* const* ahead;
    FASTOPS_HD const E* operator()(int64_t i) const { return rows[i]; }
    FASTOPS_HD void ask_ahead(const E*, int64_t i, int64_t column) const { prefetch_far(ahead[i] + column); }
  };

  // Where the rows of some positions are, for a while: segments are short and rows to ask for are those of the next ones.
  struct Window {
    static constexpr int64_t kRows = 256;
    const E* rows[kRows + kPrefetchRows];
    int64_t first = 0, last = 0;  // positions [first, last)

    Listed list(const SegmentsView& segments, const E* column, int64_t inner, int64_t position, int64_t n) {
      if (position < first || position + n > last) {
        const int64_t end = segments.num_positions;
        first = position;
        last = std::min(position + kRows, end);
        for (int64_t i = 0; i < last - first + kPrefetchRows; ++i) rows[i] = column + segments.row(std::min(first + i, end - 1)) * inner;
      }
      return {rows + (position - first), rows + (position - first) + kPrefetchRows};
    }
  };

  // Joins n > 0 rows from a position on, block by block.
  FASTOPS_NOINLINE void join_rows(const Tile& tile, int64_t begin, int64_t position, int64_t n, int64_t thread, Window& window, Vectors* joined) {
    const int64_t width = tile.last - tile.first, inner = call_.inner;
    // A vector of a row that is narrower reads on into the rows behind: not where the data ends.
    const int64_t readable = call_.outer * segments_.num_rows * inner - (tile.outer * segments_.num_rows + position + n) * inner;
    const bool direct = in_place_ && (width >= kWidth || (readable >= kWidth && !segments_.order));
    const E *at[ReducePolicy::kBlockRows], *ahead[ReducePolicy::kBlockRows];
    [[maybe_unused]] FirstRow first_row;
    const V* base = nullptr;  // the first row of the segment, where that is not the first of the block
    if constexpr (kHasBase) {
      if (n > ReducePolicy::kBlockRows || position != begin) base = first_row.load(*this, tile, begin);
    }
    for (int64_t r = 0; r < n; r += ReducePolicy::kBlockRows) {
      const int64_t rows = std::min(n - r, ReducePolicy::kBlockRows);
      Listed block{at, ahead};
      if (direct && segments_.order) {
        block = window.list(segments_, static_cast<const E*>(data(tile)) + tile.first, inner, position + r, rows);
      } else {
        const E* first = static_cast<const E*>(data(tile)) + (position + r) * inner + tile.first;
        int64_t stride = inner;
        if (!direct) {
          E* to = room(thread, rows * width + kWidth);
          stage_(call_, tile.outer, position + r, rows, tile.first, width, to);
          first = to;
          stride = width;
        }
        if (width <= kWidth) {
          join_strip<1>(Narrow{first, stride}, rows, r, joined, 0, base);
          continue;
        }
        for (int64_t i = 0; i < rows; ++i) {
          at[i] = first + i * stride;
          ahead[i] = at[i] + (kTwice<Vectors> ? ReducePolicy::kBlockRows * stride : ReducePolicy::kPrefetchBytes / int64_t(sizeof(E)));
        }
      }
      if constexpr (kTwice<Vectors>) {
        if (width > kWidth) {
          join_wide_twice(block, base, width, rows, r, joined);
          continue;
        }
      }
      if constexpr (kStrip > 1) {
        if (width > kStrip * kWidth) {
          join_wide(block, width, rows, r, joined);
          continue;
        }
        if (width == kStrip * kWidth) {
          join_strip<kStrip>(block, rows, r, joined);
          continue;
        }
      }
      for (int64_t v = 0; v * kWidth < width; ++v) join_strip<1>(block, rows, r, joined + v, column_of(v, width), base);
    }
  }

  // The same for rows of many vectors, four rows at a time from left to right: memory is read in order, which matters
  // more than that the accumulators are in the first-level cache.
  void join_wide(const Listed& rows, int64_t width, int64_t n, int64_t number, Vectors* joined) const {
    Vectors block[ReducePolicy::kTileVectors];
    Vectors* to = number == 0 ? joined : block;
    const int64_t vectors = ceil_div(width, kWidth);
    const auto one = [&](int64_t i, int64_t v) FASTOPS_INLINE_LAMBDA {
      const int64_t column = column_of(v, width);
      const E* at = rows(i) + column;
      rows.ask_ahead(at, i, column);
      return Vectors::of(see(load<V>(at)), constant<vec<I>>(I(number + i)));
    };
    const auto four = [&](int64_t i, int64_t v) FASTOPS_INLINE_LAMBDA {
      return Vectors::combine(Vectors::combine(one(i, v), one(i + 1, v)), Vectors::combine(one(i + 2, v), one(i + 3, v)));
    };
    int64_t i = n >= 4 ? 4 : 1;
    if (n >= 4) {
      for (int64_t v = 0; v < vectors; ++v) to[v] = four(0, v);
    } else {
      for (int64_t v = 0; v < vectors; ++v) to[v] = one(0, v);
    }
    for (; i + 4 <= n; i += 4) {
      for (int64_t v = 0; v < vectors; ++v) to[v] = Vectors::combine(to[v], four(i, v));
    }
    for (; i < n; ++i) {
      for (int64_t v = 0; v < vectors; ++v) to[v] = Vectors::combine(to[v], one(i, v));
    }
    if (number == 0) return;
    for (int64_t v = 0; v < vectors; ++v) joined[v] = Vectors::combine(joined[v], block[v]);
  }

  void join_wide_twice(const Listed& rows, const V* first_row, int64_t width, int64_t n, int64_t number, Vectors* joined) const {
    if constexpr (kTwice<Vectors>) {
      constexpr int64_t kMost = ReducePolicy::kTileVectors;
      vec<V> base[kMost], from[kMost], sum[kMost];
      const int64_t vectors = ceil_div(width, kWidth);
      const auto at = [&](int64_t i, int64_t v) FASTOPS_INLINE_LAMBDA { return load<V>(rows(i) + column_of(v, width)); };
      for (int64_t v = 0; v < vectors; ++v) {
        base[v] = first_row ? load<V>(first_row + column_of(v, width)) : at(0, v);
        from[v] = Vectors::start(at(0, v), base[v]);
      }
      for (int64_t i = 1; i < n; ++i) {
        for (int64_t v = 0; v < vectors; ++v) {
          from[v] = Vectors::lead(from[v], Vectors::start(at(i, v), base[v]));
        }
      }
      const auto term = [&](int64_t i, int64_t v) FASTOPS_INLINE_LAMBDA {
        rows.ask_ahead(nullptr, i, column_of(v, width));
        return Vectors::term(at(i, v), base[v], from[v]);
      };
      for (int64_t v = 0; v < vectors; ++v) {
        from[v] = Vectors::settle(from[v], n);
        sum[v] = term(0, v);
      }
      int64_t i = 1;
      for (; i + 4 <= n; i += 4) {
        for (int64_t v = 0; v < vectors; ++v) sum[v] += (term(i, v) + term(i + 1, v)) + (term(i + 2, v) + term(i + 3, v));
      }
      for (; i < n; ++i) {
        for (int64_t v = 0; v < vectors; ++v) sum[v] += term(i, v);
      }
      for (int64_t v = 0; v < vectors; ++v) {
        const Vectors part = Vectors::part(from[v], sum[v], n);
        joined[v] = number == 0 ? part : Vectors::combine(joined[v], part);
      }
    }
  }

  // Joins n rows, of which the first is row `number` of its chunk, to what went before.
  template <int K, class From>
  FASTOPS_HD void join_strip(const From& rows, int64_t n, int64_t number, Vectors* joined, int64_t column = 0,
                             [[maybe_unused]] const V* base = nullptr) const {
    if constexpr (kTwice<Vectors>) {
      // Those ahead are asked for in the second pass, which is the one that memory can work beside.
      const auto first = [&](int64_t i) FASTOPS_INLINE_LAMBDA { return load<V>(rows(i) + column); };
      const auto second = [&](int64_t i) FASTOPS_INLINE_LAMBDA {
        rows.ask_ahead(rows(i) + column, i, column);
        return first(i);
      };
      const Vectors strip = twice(first, second, base ? load<V>(base + column) : first(0), n);
      joined[0] = number == 0 ? strip : Vectors::combine(joined[0], strip);
      return;
    }
    const auto one = [&](int64_t i, int k) FASTOPS_INLINE_LAMBDA {
      const E* at = rows(i) + column + k * kWidth;
      if (k * kWidth * int(sizeof(E)) % 64 == 0) rows.ask_ahead(at, i, column + k * kWidth);
      return Vectors::of(see(load<V>(at)), constant<vec<I>>(I(number + i)));
    };
    const auto four = [&](int64_t i, int k) FASTOPS_INLINE_LAMBDA {
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

  // A block of rows that is met twice, n vectors of it.
  template <class First, class Second>
  static FASTOPS_HD Vectors twice(First&& first, Second&& second, const vec<V>& base, int64_t n) {
    const auto start = [&](int64_t i) FASTOPS_INLINE_LAMBDA { return Vectors::start(first(i), base); };
    const auto four = [&](int64_t i) FASTOPS_INLINE_LAMBDA {
      return Vectors::lead(Vectors::lead(start(i), start(i + 1)), Vectors::lead(start(i + 2), start(i + 3)));
    };
    int64_t met = n >= 4 ? 4 : 1;
    vec<V> lead = n >= 4 ? four(0) : start(0);
    for (; met + 4 <= n; met += 4) lead = Vectors::lead(lead, four(met));
    for (; met < n; ++met) lead = Vectors::lead(lead, start(met));
    const vec<V> from = Vectors::settle(lead, n);
    const auto term = [&](int64_t i) FASTOPS_INLINE_LAMBDA { return Vectors::term(second(i), base, from); };
    int64_t i = n % 4 == 0 ? 4 : n % 4;
    vec<V> sum = term(0);
    for (int64_t j = 1; j < i; ++j) sum += term(j);
    for (; i < n; i += 4) sum += (term(i) + term(i + 1)) + (term(i + 2) + term(i + 3));
    return Vectors::part(from, sum, n);
  }

  static FASTOPS_HD Scalars in_lane(const Vectors& vectors, int l, int64_t rows_before) {
    return vectors.template at<V, int64_t>([l](const auto& v) { return lane(v, l); }, rows_before);
  }

  // Rows of one column, one behind the other: short ones in fours, as in a strip.
  FASTOPS_HD Scalars column(const E* from, int64_t n) const {
    if constexpr (kTwice<Scalars>) return column_twice(from, n, load_as<V>(from[0]));
    if (n >= ReducePolicy::kScalarLanes) return along(from, n);
#if FASTOPS_VECTOR_EXTENSION
    if constexpr (kMirrors && Scalars::kExtra == Extra::none && std::is_same_v<E, V>) {
      if (n >= kQuad) return column_in_fours(from, n);
    }
#endif
    const auto one = [&](int64_t i) FASTOPS_INLINE_LAMBDA { return Scalars::of(see(load_as<V>(from[i])), i); };
    const auto four = [&](int64_t i) FASTOPS_INLINE_LAMBDA {
      return Scalars::combine(Scalars::combine(one(i), one(i + 1)), Scalars::combine(one(i + 2), one(i + 3)));
    };
    int64_t i = n >= 4 ? 4 : 1;
    Scalars joined = n >= 4 ? four(0) : one(0);
    for (; i + 4 <= n; i += 4) joined = Scalars::combine(joined, four(i));
    for (; i < n; ++i) joined = Scalars::combine(joined, one(i));
    return joined;
  }

#if FASTOPS_VECTOR_EXTENSION
  // Of which rows may be met twice: the last four overlap the ones before, so nothing is done row by row.
  static constexpr int kQuad = std::min(4, kWidth);
  FASTOPS_HD Scalars column_in_fours(const E* from, int64_t n) const {
    using Four = typename Vector<V, kQuad>::type;
    using Numbers = typename Vector<I, kQuad>::type;
    using Quad = Reducer<Four, Numbers>;
    const auto at = [&](int64_t i) FASTOPS_INLINE_LAMBDA { return Quad::of(see(unaligned<Four>(from + i)), Numbers{}); };
    Quad joined = at(n - kQuad);
    for (int64_t i = 0; i + kQuad < n; i += kQuad) joined = Quad::combine(joined, at(i));
    const auto in = [&](int l) FASTOPS_INLINE_LAMBDA {
      return joined.template at<V, int64_t>([l](const auto& v) { return v[l]; }, 0);
    };
    if constexpr (kQuad == 2) {
      return Scalars::combine(in(0), in(1));
    } else {
      return Scalars::combine(Scalars::combine(in(0), in(1)), Scalars::combine(in(2), in(3)));
    }
  }
#endif

  // The same for what is met twice: as many lanes as a vector has, the last of which may have nothing to say.
  static FASTOPS_NOINLINE Scalars column_twice(const E* rows, int64_t n, V base) {
    const auto at = [&](int64_t i) FASTOPS_INLINE_LAMBDA {
      if (i + kWidth <= n) return load<V>(rows + i);
      V lanes[kWidth];  // the first row again changes no maximum
      for (int l = 0; l < kWidth; ++l) lanes[l] = load_as<V>(rows[i + l < n ? i + l : 0]);
      return unaligned<vec<V>>(lanes);
    };
    const auto heard = [&](vec<V> terms, int64_t i) FASTOPS_INLINE_LAMBDA {  // none of rows that there are not
      for (int64_t l = std::min<int64_t>(n - i, kWidth); l < kWidth; ++l) replace(terms, int(l), V{});
      return terms;
    };
    constexpr bool kIsSum = Scalars::kExtra == Extra::mean;  // what pass one joins
    const vec<V> bases = constant<vec<V>>(base);
    const auto start = [&](int64_t i) FASTOPS_INLINE_LAMBDA {
      const vec<V> x = Vectors::start(at(i), bases);
      return kIsSum ? heard(x, i) : x;
    };
    vec<V> lead = start(0);
    for (int64_t i = kWidth; i < n; i += kWidth) lead = Vectors::lead(lead, start(i));
    V leads[kWidth];
    store(leads, lead);
    for (int half = kWidth / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) leads[l] = Scalars::lead(leads[l], leads[l + half]);
    }
    const V from = Scalars::settle(leads[0], n);
    vec<V> sum{};
    const auto term = [&](int64_t i) FASTOPS_INLINE_LAMBDA { return Vectors::term(at(i), bases, constant<vec<V>>(from)); };
    int64_t i = 0;
    for (; i + 8 * kWidth <= n; i += 8 * kWidth) {  // short chains: small errors
      vec<V> pairs[4];
      for (int p = 0; p < 4; ++p) pairs[p] = term(i + 2 * p * kWidth) + term(i + (2 * p + 1) * kWidth);
      sum += (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
    }
    for (; i < n; i += kWidth) sum += heard(term(i), i);
    return Scalars::part(from, sum_lanes<V, kWidth>(sum), n);
  }

  // kScalarLanes rows or more of one column, joined in as many lanes whatever the width of a vector.
  FASTOPS_NOINLINE Scalars along(const E* from, int64_t n) const {
    constexpr int kAll = ReducePolicy::kScalarLanes, K = kAll / kWidth;
    vec<I> numbers{};
    if constexpr (kWidth > 1) {
      for (int i = 0; i < kWidth; ++i) numbers[i] = I(i);
    }
    const auto at = [&](int64_t i, int k) FASTOPS_INLINE_LAMBDA {
      return Vectors::of(see(load<V>(from + i + k * kWidth)), numbers + constant<vec<I>>(I(i + k * kWidth)));
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
    for (; i < n; ++i) each[0] = Scalars::combine(each[0], Scalars::of(see(load_as<V>(from[i])), i));
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
    if (call_.mean) std::fill(static_cast<V*>(call_.mean) + first, static_cast<V*>(call_.mean) + last, V{});
  }

  // Whether so many rows have no result.
  bool is_undefined(int64_t length) const { return Scalars::kExtra == Extra::mean && !(double(length) > call_.correction); }

  template <class R>
  FASTOPS_HD auto result(const R& joined, int64_t length) const {
    if constexpr (R::kExtra == Extra::mean) {
      return joined.spread(double(length) - call_.correction, call_.root);
    } else if constexpr (kMirrors) {
      return see(joined.value(length));
    } else {
      return joined.value(length);
    }
  }

  // The result of a whole segment, for the vectors of a tile.
  FASTOPS_NOINLINE void finish(const Tile& tile, const Span& span, int64_t width, const Vectors* joined) {
    if (is_undefined(span.length)) return fill(tile, span.segment);
    const int64_t base = (tile.outer * segments_.num_segments + span.segment) * call_.inner + tile.first;
    const int64_t count = std::min<int64_t>(width, kWidth);
    [[maybe_unused]] FirstRow first_row;
    if constexpr (kHasBase) {
      if (call_.mean) first_row.load(*this, tile, span.begin);
    }
    for (int64_t v = 0; v * kWidth < width; ++v) {
      const int64_t first = column_of(v, width), at = base + first;
      if (call_.out) {
        auto value = result(joined[v], span.length);
        if constexpr (kHasMean) {
          if (call_.reduction == Reduction::mean) {
            value = value / V(span.length);
            const auto finite = value - value == 0;
            for (int64_t l = 0; l < count; ++l) {
              if (!lane(finite, int(l))) replace(value, int(l), again(tile, span, tile.first + first + l));
            }
          }
        }
        if (!write_ && count == kWidth) {
          if (stream_) {
            store_past_caches(static_cast<Result*>(call_.out) + at, value);
          } else {
            store(static_cast<Result*>(call_.out) + at, value);
          }
        } else {
          Result lanes[kWidth];
          store(lanes, value);
          put(at, lanes, count);
        }
      }
      if constexpr (Vectors::kExtra == Extra::mean) {
        if (call_.mean) {
          V lanes[kWidth];
          store(lanes, joined[v].extra() + load<V>(first_row.columns + first));
          std::memcpy(static_cast<V*>(call_.mean) + at, lanes, count * sizeof(V));
        }
      } else if constexpr (Vectors::kExtra != Extra::none) {
        for (int64_t l = 0; l < count; ++l) call_.extra[at + l] = number(lane(joined[v].extra(), int(l)), span);
      }
    }
  }

  // And for one column.
  FASTOPS_HD void finish(const Tile& tile, const Span& span, int64_t column, const Scalars& joined) {
    if (is_undefined(span.length)) return fill({tile.outer, column, column + 1}, span.segment);
    const int64_t at = (tile.outer * segments_.num_segments + span.segment) * call_.inner + column;
    if (call_.out) {
      Result value = Result(result(joined, span.length));
      if constexpr (kHasMean) {
        if (call_.reduction == Reduction::mean) {
          value = value / V(span.length);
          if (!(value - value == 0)) value = again(tile, span, column);
        }
      }
      put(at, &value, 1);
    }
    if constexpr (Scalars::kExtra == Extra::mean) {
      if (call_.mean) static_cast<V*>(call_.mean)[at] = joined.extra() + first_of(tile, span.begin, column);
    } else if constexpr (Scalars::kExtra != Extra::none) {
      call_.extra[at] = number(joined.extra(), span);
    }
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
      E x;
      stage_(call_, tile.outer, span.begin + i, 1, column, 1, &x);
      return load_as<V>(x);
    });
  }
};

template <class E, class T>
void stage_plain(const ReduceCall& call, int64_t outer, int64_t position, int64_t n, int64_t column, int64_t width, E* to) {
  const T* slice = static_cast<const T*>(call.data) + outer * call.segments.num_rows * call.inner;
  stage_rows<E>(call.segments, slice, call.inner, position, n, column, width, to, width);
}

// Rows in order are multiplied on their way, others when they are together.
template <class E, class T>
void stage_weighted(const ReduceCall& call, int64_t outer, int64_t position, int64_t n, int64_t column, int64_t width, E* to) {
  const SegmentsView& segments = call.segments;
  const auto [data, heads, per_head] = call.weights;
  const E* weights = static_cast<const E*>(data);
  if (segments.order) {
    stage_plain<E, T>(call, outer, position, n, column, width, to);
    for (int64_t i = 0; i < n; ++i) weigh_row(to + i * width, to + i * width, weights + segments.row(position + i) * heads, column, width, per_head);
    return;
  }
  const T* from = static_cast<const T*>(call.data) + (outer * segments.num_rows + position) * call.inner + column;
  weights += position * heads;
  if (per_head == 1 && width == call.inner) return multiply_runs(to, from, weights, n * width);  // as many, as close together
  for (int64_t i = 0; i < n; ++i, to += width, from += call.inner, weights += heads) weigh_row(to, from, weights, column, width, per_head);
}

// The same bits in memory: int64_t is added up without a sign.
template <class A, class B>
constexpr bool same_bits = std::is_same_v<A, B> || (sizeof(A) == 8 && sizeof(B) == 8 && !is_floating<A> && !is_floating<B>);

template <template <class, class> class Reducer, class T, class V, class Out>
void reduce_as(const PreparedReduce& prepared, const Pool& pool, ReducerTypes<Reducer, T, V, Out>) {
  if constexpr (std::is_same_v<Reducer<V, int64_t>, Mean<V, int64_t>>) {
    reduce_as(prepared, pool, ReducerTypes<Sum, T, V, Out>{});
  } else {
    using Vectors = Reducer<vec<V>, vec<lane_int<V>>>;
    using Result = scalar_of<decltype(std::declval<Vectors>().value(0))>;
    Write<Result> write = same_bits<Result, Out> ? nullptr : write_values<Result, Out>;
    if (prepared.call.wide_out) write = same_bits<Result, float> ? nullptr : write_values<Result, float>;
    constexpr bool kIsSum = std::is_same_v<Reducer<V, int64_t>, Sum<V, int64_t>>;
    if constexpr (kIsSum && (is_floating<T> || sizeof(T) == 8)) {
      if (prepared.call.weights.data) {
        return Reduce<Reducer, V, V>(prepared, stage_weighted<V, T>, write, sizeof(T), false).run(pool);
      }
    }
    // Sums of 16-bit floats read the rows where they stand: half the bytes of float32 in less than its time.
    using E = std::conditional_t<kIsSum && is_floating<T>, T, V>;
    Reduce<Reducer, V, E>(prepared, stage_plain<E, T>, write, sizeof(T), std::is_same_v<T, E> || same_bits<T, E>).run(pool);
  }
}

template <class Types>
constexpr int part_of() {
  using V = typename Types::V;
  if (!is_floating<V>) return 2;
  using R = typename Types::template Reducer<V, int64_t>;
  return std::is_same_v<R, Sum<V, int64_t>> || std::is_same_v<R, Mean<V, int64_t>> || kTwice<R> ? 0 : 1;
}

template <int part>
void reduce_part(const ReduceCall& call, const Pool& pool) {
  const PreparedReduce prepared(call);
  visit_reducer(prepared.call.reduction, prepared.call.dtype, [&](auto types) {
    using Types = decltype(types);
    if constexpr (part_of<Types>() == part) reduce_as(prepared, pool, types);
  });
}

}  // namespace

// FASTOPS_PARTS 3: the build compiles this file so often, side by side, with FASTOPS_PART counting.
#if !defined(FASTOPS_PART) || FASTOPS_PART == 0
void reduce(const ReduceCall& call, const Pool& pool) {
  reduce_part<0>(call, pool);
  reduce_part_1(call, pool);
  reduce_part_2(call, pool);
}
#endif
#if !defined(FASTOPS_PART) || FASTOPS_PART == 1
void reduce_part_1(const ReduceCall& call, const Pool& pool) { reduce_part<1>(call, pool); }
#endif
#if !defined(FASTOPS_PART) || FASTOPS_PART == 2
void reduce_part_2(const ReduceCall& call, const Pool& pool) { reduce_part<2>(call, pool); }
#endif

}  // namespace FASTOPS_CPU_NAMESPACE
