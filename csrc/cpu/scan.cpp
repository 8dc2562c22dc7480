// Running results of the rows of a segment (scans.h).
//
//     columns  ->     | vector 0 | vector 1 | ...     what is known so far, in the first-level cache
//     rows            each is read once, in order, and its result written
//
// A segment longer than a chunk is met twice: chunk by chunk for what all its rows come to, from which follows where each
// chunk begins, and again for the results. Where a chunk is cut depends on nothing but the place inside the segment, so
// results do not depend on threads or neighbours. float is summed and multiplied in double, as torch's scans on the CPU do.
#include "cpu/capability.h"

#include "cpu/math.h"
#include "cpu/stage.h"
#include "cpu/vec.h"
#include "cpu/walk.h"
#include "dispatch.h"
#include "kernels.h"

namespace FASTOPS_CPU_NAMESPACE {
namespace {

struct ScanPolicy {
  static constexpr int64_t kTileVectors = 16;        // guess: of what is computed in; states stay in the first-level cache
  static constexpr int64_t kChunkRows = 512;         // guess
  static constexpr int64_t kChunkRowsScalar = 4096;  // of one column
  static constexpr int64_t kShortRows = 32;          // measured: more are worth a branch that is not predicted
  static constexpr int kStrands = 2;                 // guess: as many steps as the processor waits for one
  static constexpr int64_t kStrandRows = 64;         // guess: of short segments in a row; what marks them stays in the cache
  static constexpr int64_t kTaskBytes = 1 << 15;     // guess: below this a second thread costs more than it saves
};

template <class T>
using Accumulated = std::conditional_t<std::is_same_v<T, float>, double, compute_t<T>>;
// Extrema are found in types of 64 bits: row numbers are as wide.
template <class T>
using Comparable = std::conditional_t<is_floating<T>, double, int64_t>;

template <template <class, class> class Reducer, class T, class V, class Out>
class ScanRows final : public Visitor {
  using I = lane_int<V>;
  using VV = vec<V>;
  using Vectors = Reducer<VV, vec<I>>;
  using Scalars = Reducer<V, I>;
  static constexpr int kWidth = kLanes<V>;
  static constexpr bool kHasRow = Scalars::kExtra == Extra::row;
  static constexpr bool kIsLinear = std::is_same_v<Scalars, Linear<V, I>>;
  static constexpr bool kIsCheap = std::is_same_v<Scalars, Sum<V, I>>;  // a step, while waiting for the one before is not
  static constexpr int kFew = FASTOPS_VECTOR_EXTENSION ? 16 / int(sizeof(V)) : 1;

  const ScanCall& call_;
  const SegmentsView& segments_;
  const V sign_;  // by which floats are multiplied, or bits that are flipped
  const Cutting cut_;
  const int64_t slots_;
  std::unique_ptr<Scalars[]> partials_;  // [outer, slots, inner] of chunks whose segment has several
  bool measures_ = true;                 // chunks are summed up, not yet written

 public:
  explicit ScanRows(const ScanCall& call)
      : call_(call),
        segments_(call.segments),
        sign_(sign(call.kind == Scan::min)),
        cut_{call.outer, call.inner, ScanPolicy::kTileVectors * kWidth,
             call.inner == 1 ? ScanPolicy::kChunkRowsScalar : ScanPolicy::kChunkRows, ScanPolicy::kTaskBytes, sizeof(T)},
        slots_(num_slots(segments_.num_positions, cut_.chunk_rows)) {
    // Zeros, since with offsets that were never checked some may be read that were not written.
    if (segments_.num_positions > cut_.chunk_rows) partials_.reset(new Scalars[call.outer * slots_ * call.inner]());
  }

  static V sign(bool mirror) { return is_floating<V> ? V(mirror ? -1 : 1) : V(-V(mirror)); }

  void run(const Pool& pool) {
    const int64_t tasks = num_tasks(cut_, segments_, pool);
    walk(cut_, segments_, pool, tasks, *this);
    if (segments_.num_positions > cut_.chunk_rows) {
      measures_ = false;
      walk(cut_, segments_, pool, tasks, *this);
    }
    for_rows_of_no_segment(segments_, call_.outer, [&](int64_t first, int64_t last) {
      std::fill(static_cast<Out*>(call_.out) + first * call_.inner, static_cast<Out*>(call_.out) + last * call_.inner, Out{});
      if (call_.rows) std::fill(call_.rows + first * call_.inner, call_.rows + last * call_.inner, int64_t(-1));
    });
  }

  void whole(const Tile& tile, int64_t first, int64_t last, int64_t begin, int64_t, int64_t) override {
    if (!measures_) return;
    if constexpr (kIsCheap) {
      if (call_.inner == 1) {
        const auto run = [&](auto exclusive) {
          segments_.order ? columns<exclusive, true>(tile, first, last, begin) : columns<exclusive, false>(tile, first, last, begin);
        };
        return call_.exclusive ? run(std::true_type{}) : run(std::false_type{});
      }
    }
    for (int64_t s = first; s < last; ++s) {
      const int64_t length = segments_.end(s, begin) - begin;
      if (length > 0) scan(tile, begin, length, nullptr);
      begin += length;
    }
  }

  void chunk(const Tile& tile, const Span& span, int64_t) override {
    const int64_t rows = std::min(span.length - span.first, cut_.chunk_rows), position = span.begin + span.first;
    Scalars* known = partial(tile, span, span.first);
    if (measures_) return total(tile, position, rows, known);
    const bool is_first = call_.reverse ? span.first + rows == span.length : span.first == 0;
    scan(tile, position, rows, is_first ? nullptr : known);
  }

  // Chunk by chunk, what all came to becomes what was known before.
  void join(const Tile& tile, const Span& span) override {
    if (!measures_) return;
    const int64_t chunks = ceil_div(span.length, cut_.chunk_rows), width = tile.last - tile.first;
    const std::unique_ptr<Scalars[]> known(new Scalars[width]());
    for (int64_t i = 0; i < chunks; ++i) {
      Scalars* of_chunk = partial(tile, span, (call_.reverse ? chunks - 1 - i : i) * cut_.chunk_rows);
      for (int64_t c = 0; c < width; ++c) {
        const Scalars now = i == 0 ? of_chunk[c] : met(known[c], of_chunk[c], call_.reverse);
        of_chunk[c] = known[c];
        known[c] = now;
      }
    }
  }

 private:
  Scalars* partial(const Tile& tile, const Span& span, int64_t first) {
    return &partials_[(tile.outer * slots_ + slot(span.begin, first, cut_.chunk_rows)) * call_.inner + tile.first];
  }

  template <class X>
  FASTOPS_HD X see(const X& x) const {
    if constexpr (!kHasRow) {
      return x;
    } else if constexpr (is_floating<V>) {
      return x * sign_;
    } else {
      return x ^ sign_;
    }
  }

  // The rows from a position on, in the order in which they are met.
  template <class Body>
  FASTOPS_HD void for_each_row(int64_t position, int64_t n, Body&& body) const {
    const int64_t step = call_.reverse ? -1 : 1;
    int64_t at = call_.reverse ? position + n - 1 : position;
    for (int64_t i = 0; i < n; ++i, at += step) {
      if (segments_.order) {
        const int64_t ahead = std::clamp<int64_t>(at + step * kPrefetchRows, 0, segments_.num_positions - 1);
        prefetch(static_cast<const T*>(call_.data) + segments_.row(ahead) * call_.inner);
      }
      body(segments_.row(at), i);
    }
  }

  // Where vector v begins; the last one overlaps its neighbour and comes to the same.
  static FASTOPS_HD int64_t column_of(int64_t v, int64_t width) { return std::min(v * kWidth, width - kWidth); }

  FASTOPS_HD Vectors vector_at(int64_t at, int64_t row) const {
    const VV x = see(load<V>(static_cast<const T*>(call_.data) + at));
    if constexpr (kIsLinear) {
      return Vectors::of(x, load<V>(static_cast<const T*>(call_.factors) + at));
    } else {
      return Vectors::of(x, constant<vec<I>>(I(row)));
    }
  }
  FASTOPS_HD Scalars scalar_at(int64_t at, int64_t row) const {
    const V x = see(load_as<V>(static_cast<const T*>(call_.data)[at]));
    if constexpr (kIsLinear) {
      return Scalars::of(x, load_as<V>(static_cast<const T*>(call_.factors)[at]));
    } else {
      return Scalars::of(x, I(row));
    }
  }

  FASTOPS_HD void write(int64_t at, const Vectors& known) const {
    store(static_cast<Out*>(call_.out) + at, see(known.value(1)));
    if constexpr (kHasRow) store(call_.rows + at, known.row);
  }
  FASTOPS_HD void write(int64_t at, const Scalars& known) const {
    static_cast<Out*>(call_.out)[at] = store_as<Out>(see(known.value(1)));
    if constexpr (kHasRow) call_.rows[at] = known.row;
  }
  FASTOPS_HD void write_nothing(int64_t at, int64_t count) const {
    std::fill_n(static_cast<Out*>(call_.out) + at, count, nothing<Out, V>(call_.kind, call_.dtype));
    if (call_.rows) std::fill_n(call_.rows + at, count, int64_t(-1));
  }

  // Segments of one column. Many short ones in a row are scanned as if they were one, which starts anew where a segment does:
  // no branch depends on their lengths, which could not be predicted.
  template <bool exclusive, bool ordered>
  FASTOPS_NOINLINE void columns(const Tile& tile, int64_t first, int64_t last, int64_t begin) const {
    constexpr int64_t kRows = ScanPolicy::kStrandRows, kStrands = ScanPolicy::kStrands;
    I starts[kStrands * (kRows + ScanPolicy::kShortRows) + 1] = {};  // all bits where a segment starts, none elsewhere
    for (int64_t s = first; s < last;) {
      int64_t strands[kStrands + 1] = {}, n = 0, length = 0;  // where each of them begins, and the last one ends
      for (int strand = 1; strand <= kStrands; ++strand) {
        for (; s < last && n < strand * kRows; ++s, n += length) {
          length = segments_.end(s, begin + n) - (begin + n);
          if (length > ScanPolicy::kShortRows) break;
          starts[n] = -1;
        }
        strands[strand] = n;
      }
      if (n > 0) {
        starts[n] = -1;
        short_columns<exclusive, ordered>(tile, begin, strands, starts);
        std::fill_n(starts, n + 1, I(0));
        begin += n;
      }
      starts[0] = 0;
      for (; s < last; ++s, begin += length) {
        length = segments_.end(s, begin) - begin;
        if (length <= ScanPolicy::kShortRows) break;
        column<ordered>(tile, begin, length, nullptr);
      }
    }
  }

  // Rows of short segments, in strands that have nothing to do with each other, so that none waits for its last step. A state
  // is the first lane of a small vector, of which lanes are chosen without a branch.
  template <bool exclusive, bool ordered>
  FASTOPS_HD void short_columns(const Tile& tile, int64_t position, const int64_t* strands, const I* starts) const {
    using Few = typename Vector<V, kFew>::type;
    using Masks = typename Vector<I, kFew>::type;
    constexpr int kStrands = ScanPolicy::kStrands;
    const int64_t slice = tile.outer * segments_.num_rows, reverse = call_.reverse, step = reverse ? -1 : 1;
    const Few none{};
    const auto in_first_lane = [](auto x, auto to) FASTOPS_INLINE_LAMBDA { return replace(to, 0, x), to; };
    const auto advance = [&](Few& state, int64_t p) FASTOPS_INLINE_LAMBDA {
      const int64_t row = ordered ? segments_.row(position + p) : position + p;
      const Few x = in_first_lane(scalar_at(slice + row, row).value(1), Few{}), before = state, sum = state + x;
      const Masks starts_here = in_first_lane(starts[p + reverse], Masks{});
      state = starts_here ? x : sum;
      write(slice + row, Scalars::of(lane(exclusive ? (starts_here ? none : before) : state, 0), I(row)));
    };
    int64_t together = strands[1], next[kStrands];
    Few states[kStrands] = {};
    for (int k = 0; k < kStrands; ++k) {
      together = std::min(together, strands[k + 1] - strands[k]);
      next[k] = reverse ? strands[k + 1] - 1 : strands[k];
    }
    for (int64_t i = 0; i < together; ++i) {
      unrolled<kStrands>([&](auto k) FASTOPS_INLINE_LAMBDA { advance(states[k], next[k] + i * step); });
    }
    for (int k = 0; k < kStrands; ++k) {
      const int64_t rest = strands[k + 1] - strands[k] - together;
      for (int64_t i = together; i < together + rest; ++i) advance(states[k], next[k] + i * step);
    }
  }

  // Rows of one column: a step for each, or four at a time, so that a result waits for the one four rows before it and not
  // for its neighbour. What is exclusive is written one row later.
  template <bool ordered>
  FASTOPS_NOINLINE void column(const Tile& tile, int64_t position, int64_t n, const Scalars* known) const {
    const int64_t slice = tile.outer * segments_.num_rows, step = call_.reverse ? -1 : 1, later = call_.exclusive;
    const int64_t start = call_.reverse ? position + n - 1 : position;
    const auto row = [&](int64_t i) FASTOPS_INLINE_LAMBDA {
      return ordered ? segments_.row(start + i * step) : start + i * step;
    };
    const auto at = [&](int64_t i) FASTOPS_INLINE_LAMBDA {
      const int64_t r = row(i);
      return scalar_at(slice + r, r);
    };
    const auto put = [&](int64_t i, const Scalars& x) FASTOPS_INLINE_LAMBDA { write(slice + row(i + later), x); };
    Scalars state;
    if (known) {
      if (later) put(-1, *known);
      state = met(*known, at(0), call_.reverse);
    } else {
      if (later) write_nothing(slice + row(0), 1);
      state = at(0);
    }
    if (later < n) put(0, state);
    int64_t i = 1;
    if constexpr (kIsCheap) {
      for (; n > ScanPolicy::kShortRows && i + 4 + later <= n; i += 4) {
        Scalars x[4] = {at(i), at(i + 1), at(i + 2), at(i + 3)};
        const Scalars pair = Scalars::combine(x[2], x[3]);
        x[1] = Scalars::combine(x[0], x[1]);
        x[2] = Scalars::combine(x[1], x[2]);
        x[3] = Scalars::combine(x[1], pair);
        for (int k = 0; k < 4; ++k) put(i + k, Scalars::combine(state, x[k]));
        state = Scalars::combine(state, x[3]);
      }
    }
    for (; i + later < n; ++i) {
      state = met(state, at(i), call_.reverse);
      put(i, state);
    }
  }

  // Results of n rows, given what is known before them, if anything.
  FASTOPS_NOINLINE void scan(const Tile& tile, int64_t position, int64_t n, const Scalars* known) const {
    if (call_.inner == 1) return segments_.order ? column<true>(tile, position, n, known) : column<false>(tile, position, n, known);
    const int64_t width = tile.last - tile.first, base = tile.outer * segments_.num_rows;
    const bool exclusive = call_.exclusive;
    const auto run = [&](auto& states, int64_t count, auto&& column, auto&& load) FASTOPS_INLINE_LAMBDA {
      for_each_row(position, n, [&](int64_t row, int64_t i) FASTOPS_INLINE_LAMBDA {
        const int64_t at = (base + row) * call_.inner + tile.first;
        if (i == 0 && !known) {
          if (exclusive) write_nothing(at, width);
          for (int64_t v = 0; v < count; ++v) {
            states[v] = load(at + column(v), row);
            if (!exclusive) write(at + column(v), states[v]);
          }
          return;
        }
        for (int64_t v = 0; v < count; ++v) {
          const auto before = states[v];
          states[v] = met(before, load(at + column(v), row), call_.reverse);
          write(at + column(v), exclusive ? before : states[v]);
        }
      });
    };
    if (width >= kWidth) {
      Vectors states[ScanPolicy::kTileVectors];
      const int64_t count = ceil_div(width, kWidth);
      if (known) {
        for (int64_t v = 0; v < count; ++v) states[v] = of_lanes<Vectors, Scalars, V>(known + column_of(v, width));
      }
      run(states, count, [&](int64_t v) FASTOPS_INLINE_LAMBDA { return column_of(v, width); },
          [&](int64_t at, int64_t row) FASTOPS_INLINE_LAMBDA { return vector_at(at, row); });
    } else {
      Scalars states[kWidth];
      if (known) std::copy(known, known + width, states);
      run(states, width, [](int64_t c) FASTOPS_INLINE_LAMBDA { return c; },
          [&](int64_t at, int64_t row) FASTOPS_INLINE_LAMBDA { return scalar_at(at, row); });
    }
  }

  // What n rows come to.
  FASTOPS_NOINLINE void total(const Tile& tile, int64_t position, int64_t n, Scalars* to) const {
    const int64_t width = tile.last - tile.first, base = tile.outer * segments_.num_rows;
    if (call_.inner == 1) return void(to[0] = total_of_column(base, position, n));
    if (width >= kWidth) {
      Vectors states[ScanPolicy::kTileVectors];
      const int64_t count = ceil_div(width, kWidth);
      for_each_row(position, n, [&](int64_t row, int64_t i) FASTOPS_INLINE_LAMBDA {
        const int64_t at = (base + row) * call_.inner + tile.first;
        for (int64_t v = 0; v < count; ++v) {
          const Vectors x = vector_at(at + column_of(v, width), row);
          states[v] = i == 0 ? x : met(states[v], x, call_.reverse);
        }
      });
      for (int64_t v = 0; v < count; ++v) to_lanes<V>(states[v], to + column_of(v, width));
    } else {
      for_each_row(position, n, [&](int64_t row, int64_t i) FASTOPS_INLINE_LAMBDA {
        const int64_t at = (base + row) * call_.inner + tile.first;
        for (int64_t c = 0; c < width; ++c) {
          const Scalars x = scalar_at(at + c, row);
          to[c] = i == 0 ? x : met(to[c], x, call_.reverse);
        }
      });
    }
  }

  // In quarters side by side: four short chains.
  Scalars total_of_column(int64_t base, int64_t position, int64_t n) const {
    const int64_t step = call_.reverse ? -1 : 1, start = call_.reverse ? position + n - 1 : position, quarter = n / 4;
    const auto at = [&](int64_t i) FASTOPS_INLINE_LAMBDA {
      const int64_t row = segments_.row(start + i * step);
      return scalar_at(base + row, row);
    };
    Scalars known = at(0);
    int64_t i = 1;
    if (quarter > 1) {
      Scalars of_quarter[4] = {known, at(quarter), at(2 * quarter), at(3 * quarter)};
      for (; i < quarter; ++i) {
        for (int q = 0; q < 4; ++q) of_quarter[q] = met(of_quarter[q], at(q * quarter + i), call_.reverse);
      }
      known = of_quarter[0];
      for (int q = 1; q < 4; ++q) known = met(known, of_quarter[q], call_.reverse);
      i = 4 * quarter;
    }
    for (; i < n; ++i) known = met(known, at(i), call_.reverse);
    return known;
  }
};

template <template <class, class> class Reducer, class T, class V, class Out>
void scan_as(const ScanCall& call, const Pool& pool, ReducerTypes<Reducer, T, V, Out>) {
  ScanRows<Reducer, T, V, Out>(call).run(pool);
}

}  // namespace

void scan(const ScanCall& call, const Pool& pool) {
  visit_scan<Accumulated, Comparable>(call.kind, call.dtype, [&](auto types) { scan_as(call, pool, types); });
}

}  // namespace FASTOPS_CPU_NAMESPACE
