// Softmax within segments, its logarithm, and the derivatives of both (normalisers.h).
//
// The rows of a segment are brought together in the first- or second-level cache, looked at there, and written out:
// every element is read once from memory and written once. Two layouts:
//
//     packed     | r0 c0 | r0 c1 | r1 c0 | r1 c1 | ...    columns that divide a vector: its lanes hold several rows
//     apart      | r0 c0 ... | r0 cW ... |                the vectors of each row, the last one with idle lanes
//
// A segment longer than a chunk is read twice: chunk by chunk for what has to be known of it, whose parts are joined in
// pairs, and again for the results.
#include "cpu/capability.h"

#include "cpu/math.h"
#include "cpu/stage.h"
#include "cpu/vec.h"
#include "cpu/walk.h"
#include "dispatch.h"
#include "kernels.h"

namespace FASTOPS_CPU_NAMESPACE {
namespace {

struct NormalisePolicy {
  static constexpr int64_t kTileVectors = 4;       // of a row
  static constexpr int64_t kChunkBytes = 1 << 16;  // guess: of a tile, so that it stays in the second-level cache
  static constexpr int64_t kLeastRows = 256;       // guess: partial results are at most 1/128 of the data
  static constexpr int64_t kMostRows = 2048;
  static constexpr int64_t kShortRows = 16;      // guess: of one column, where a vector would be half empty
  static constexpr int64_t kTaskBytes = 1 << 15;  // guess: below this a second thread costs more than it saves
};

template <Normalise kind, class T>
class NormaliseRows final : public Visitor {
  using V = compute_t<T>;
  using VV = vec<V>;
  using Vectors = Normaliser<kind, VV>;
  using Scalars = Normaliser<kind, V>;
  using State = typename Vectors::State;
  using Partial = typename Scalars::State;
  static constexpr int kWidth = kLanes<V>;
  static constexpr bool kDerivative = is_derivative(kind);
  static constexpr int64_t kMaxVectors = NormalisePolicy::kTileVectors;

  // The rows of a segment or chunk as they lie in the cache: `deep` times `across` vectors.
  struct Block {
    V *x, *g;
    int64_t deep, across, stride;
    bool packed;
    VV& at(int64_t i, int64_t v) const { return reinterpret_cast<VV*>(x)[i * across + v]; }
    VV grad(int64_t i, int64_t v) const { return kDerivative ? reinterpret_cast<VV*>(g)[i * across + v] : VV{}; }
  };
  struct Room {
    std::vector<V> x, g, power;
    // That many vectors, aligned as they must be.
    static V* of(std::vector<V>& memory, int64_t vectors) {
      constexpr uintptr_t kAlign = sizeof(VV);
      const size_t size = (vectors + 1) * sizeof(VV) / sizeof(V);
      if (memory.size() < size) memory.resize(size);
      return reinterpret_cast<V*>((reinterpret_cast<uintptr_t>(memory.data()) + kAlign - 1) / kAlign * kAlign);
    }
  };

  const NormaliseCall& call_;
  const SegmentsView& segments_;
  const Cutting cut_;
  const int64_t slots_;
  std::unique_ptr<Partial[]> partials_;  // [outer, slots, inner] of chunks whose segment has several
  std::vector<Room> rooms_;              // for each thread
  bool measures_ = true;                 // chunks are looked at, not yet written

 public:
  explicit NormaliseRows(const NormaliseCall& call)
      : call_(call),
        segments_(call.segments),
        cut_{call.outer, call.inner, kMaxVectors * kWidth,
             std::clamp<int64_t>(NormalisePolicy::kChunkBytes / (std::clamp<int64_t>(call.inner, 1, kMaxVectors * kWidth) * sizeof(V)),
                                 NormalisePolicy::kLeastRows, NormalisePolicy::kMostRows),
             NormalisePolicy::kTaskBytes, sizeof(T)},
        slots_(num_slots(segments_.num_positions, cut_.chunk_rows)) {
    if (segments_.num_positions > cut_.chunk_rows) partials_.reset(new Partial[call.outer * slots_ * call.inner]());
  }

  void run(const Pool& pool) {
    const int64_t tasks = num_tasks(cut_, segments_, pool);
    rooms_.resize(tasks);
    walk(cut_, segments_, pool, tasks, *this);
    if (segments_.num_positions > cut_.chunk_rows) {
      measures_ = false;
      walk(cut_, segments_, pool, tasks, *this);
    }
    for_rows_of_no_segment(segments_, call_.outer, [&](int64_t first, int64_t last) {
      std::fill(static_cast<T*>(call_.out) + first * call_.inner, static_cast<T*>(call_.out) + last * call_.inner, T{});
    });
  }

  void whole(const Tile& tile, int64_t first, int64_t last, int64_t begin, int64_t, int64_t thread) override {
    if (!measures_) return;
    for (int64_t s = first; s < last; ++s) {
      int64_t length = segments_.end(s, begin) - begin;
      if (call_.inner == 1 && length <= NormalisePolicy::kShortRows) {  // as many such segments as there are
        const int64_t from = begin, start = s;
        for (; s < last && length <= NormalisePolicy::kShortRows; length = ++s < last ? segments_.end(s, begin) - begin : 0) {
          begin += length;
        }
        --s;
        if (begin > from) short_ones(tile, start, s + 1, from, begin - from, thread);
      } else if (length > 0) {
        const Block block = bring(tile, begin, length, thread);
        State states[kMaxVectors];
        look(block, tile.last - tile.first, states);
        if constexpr (kDerivative) {
          apply(block, states);
        } else {
          scale(block, states);
        }
        write(tile, begin, length, block);
        begin += length;
      }
    }
  }

  // Short segments of one column, next to each other: exp runs over all of their n rows, whatever segment they are of.
  void short_ones(const Tile& tile, int64_t first, int64_t last, int64_t begin, int64_t n, int64_t thread) {
    const Block block = bring(tile, begin, n, thread);
    V* const x = block.x;
    V* power = x;  // exp(x - top), or exp(y)
    if (kind == Normalise::log_softmax || kind == Normalise::log_softmax_backward) {
      power = Room::of(rooms_[thread].power, block.deep);
    }
    const auto for_each_segment = [&](auto&& body) FASTOPS_INLINE_LAMBDA {
      for (int64_t s = first, at = 0; s < last; ++s) {
        const int64_t length = segments_.end(s, begin + at) - begin - at;
        if (length > 0) body(at, at + length);
        at += length;
      }
    };
    [[maybe_unused]] V* const tops = kDerivative ? nullptr : Room::of(rooms_[thread].g, block.deep);
    if constexpr (!kDerivative) {
      for_each_segment([&](int64_t from, int64_t to) FASTOPS_INLINE_LAMBDA {
        V best = x[from];
        for (int64_t i = from + 1; i < to; ++i) best = greater(best, x[i]);
        tops[from] = best;
        for (int64_t i = from; i < to; ++i) x[i] = below(x[i], best);
      });
    }
    if constexpr (kind != Normalise::softmax_backward) {
      for (int64_t i = 0; i < block.deep * kWidth; i += kWidth) store(power + i, Math<VV>::exp(unaligned<VV>(x + i)));
    }
    for_each_segment([&](int64_t from, int64_t to) FASTOPS_INLINE_LAMBDA {
      if constexpr (!kDerivative) {
        V total = power[from];
        for (int64_t i = from + 1; i < to; ++i) total += power[i];
        const V by = Scalars::settle({tops[from], total}).by;
        for (int64_t i = from; i < to; ++i) x[i] = kind == Normalise::softmax ? power[i] * by : x[i] - by;
      } else {
        Partial sum = Scalars::of(x[from], block.g[from]);
        for (int64_t i = from + 1; i < to; ++i) sum = Partial::combine(sum, Scalars::of(x[i], block.g[i]));
        const auto settled = Scalars::settle(sum);
        for (int64_t i = from; i < to; ++i) {
          if constexpr (kind == Normalise::softmax_backward) {
            x[i] = Scalars::apply(x[i], block.g[i], settled);
          } else {
            x[i] = settled.top == -infinity<V>() ? V{} : block.g[i] - power[i] * settled.by;
          }
        }
      }
    });
    write(tile, begin, n, block);
  }

  void chunk(const Tile& tile, const Span& span, int64_t thread) override {
    const int64_t rows = std::min(span.length - span.first, cut_.chunk_rows), position = span.begin + span.first;
    const int64_t width = tile.last - tile.first;
    const Block block = bring(tile, position, rows, thread);
    State states[kMaxVectors];
    if (measures_) {
      look(block, width, states);
      Partial* to = partial(tile, span, span.first);
      for (int64_t c = 0; c < width; ++c) to[c] = in_lane(states[c / kWidth], int(c % kWidth));
    } else {
      const Partial* from = partial(tile, span, 0);
      for (int64_t v = 0; v < block.across; ++v) {
        Partial lanes[kWidth];
        for (int l = 0; l < kWidth; ++l) {
          const int64_t c = block.packed ? l % width : v * kWidth + l;
          lanes[l] = from[std::min(c, width - 1)];
        }
        states[v] = of_lanes<State, Partial, V>(lanes);
      }
      apply(block, states);
      write(tile, position, rows, block);
    }
  }

  void join(const Tile& tile, const Span& span) override {
    if (!measures_) return;
    join_in_pairs<Partial>(ceil_div(span.length, cut_.chunk_rows), 0, tile.last - tile.first,
                           [&](int64_t c) { return partial(tile, span, c * cut_.chunk_rows); });
  }

 private:
  int64_t slice(const Tile& tile) const { return tile.outer * segments_.num_rows * call_.inner; }
  Partial* partial(const Tile& tile, const Span& span, int64_t first) {
    return &partials_[(tile.outer * slots_ + slot(span.begin, first, cut_.chunk_rows)) * call_.inner + tile.first];
  }

  static Partial in_lane(const State& state, int l) {
    return state.template at<V, V>([l](const auto& v) { return lane(v, l); }, 0);
  }
  Block bring(const Tile& tile, int64_t position, int64_t n, int64_t thread) {
    const int64_t width = tile.last - tile.first;
    Block block;
    block.packed = width <= kWidth && kWidth % width == 0;
    block.across = block.packed ? 1 : ceil_div(width, kWidth);
    block.deep = block.packed ? ceil_div(n * width, kWidth) : n;
    block.stride = block.packed ? width : block.across * kWidth;
    Room& room = rooms_[thread];
    const V idle = kind == Normalise::softmax_backward ? V{} : -infinity<V>();  // rows that there are not
    block.x = bring(room.x, static_cast<const T*>(call_.data), tile, position, n, block, idle);
    block.g = kDerivative ? bring(room.g, static_cast<const T*>(call_.grad), tile, position, n, block, V{}) : nullptr;
    return block;
  }

  V* bring(std::vector<V>& room, const T* from, const Tile& tile, int64_t position, int64_t n, const Block& block, V idle) {
    const int64_t width = tile.last - tile.first;
    V* to = Room::of(room, block.deep * block.across);
    if (block.packed) {
      store(to + (block.deep - 1) * kWidth, constant<VV>(idle));
    } else if (width % kWidth != 0) {  // lanes that no column has
      for (int64_t i = 0; i < n; ++i) store(to + ((i + 1) * block.across - 1) * kWidth, VV{});
    }
    stage_rows<V>(segments_, from + slice(tile), call_.inner, position, n, tile.first, width, to, block.stride);
    return to;
  }

  void write(const Tile& tile, int64_t position, int64_t n, const Block& block) {
    unstage_rows<V>(segments_, static_cast<T*>(call_.out) + slice(tile), call_.inner, position, n, tile.first,
                    tile.last - tile.first, block.x, block.stride);
  }

  // What has to be known of a block. Going forward, x becomes what is left to scale: exp(x - top) or x - top.
  void look(const Block& block, int64_t width, State* states) {
    for (int64_t v = 0; v < block.across; ++v) {
      if constexpr (kDerivative) {
        State state = Vectors::of(block.at(0, v), block.grad(0, v));
        for (int64_t i = 1; i < block.deep; ++i) state = State::combine(state, Vectors::of(block.at(i, v), block.grad(i, v)));
        if (block.packed) fold(state, width);
        states[v] = state;
      } else {
        VV top = block.at(0, v);
        int64_t r = 1;
        for (; r + 4 <= block.deep; r += 4) {  // short chains
          top = State::lead(top, State::lead(State::lead(block.at(r, v), block.at(r + 1, v)),
                                             State::lead(block.at(r + 2, v), block.at(r + 3, v))));
        }
        for (; r < block.deep; ++r) top = State::lead(top, block.at(r, v));
        if (block.packed) fold(top, width, greater);
        VV total{};
        for (int64_t i = 0; i < block.deep; ++i) {
          VV& x = block.at(i, v);
          x = below(x, top);
          const VV power = Math<VV>::exp(x);
          if constexpr (kind == Normalise::softmax) x = power;
          total += power;
        }
        if (block.packed) fold(total, width, [](V a, V b) { return a + b; });
        states[v] = {top, total};
      }
    }
  }

  // What is left of softmax and its logarithm, after look().
  static void scale(const Block& block, const State* states) {
    for (int64_t v = 0; v < block.across; ++v) {
      const VV by = Vectors::settle(states[v]).by;
      for (int64_t i = 0; i < block.deep; ++i) {
        VV& x = block.at(i, v);
        x = kind == Normalise::softmax ? x * by : x - by;
      }
    }
  }

  static void apply(const Block& block, const State* states) {
    for (int64_t v = 0; v < block.across; ++v) {
      const auto settled = Vectors::settle(states[v]);
      for (int64_t i = 0; i < block.deep; ++i) block.at(i, v) = Vectors::apply(block.at(i, v), block.grad(i, v), settled);
    }
  }

  static V greater(V a, V b) { return beats(b, a) ? b : a; }

  // Joins the lanes of a packed vector that belong to the same column, in all of them.
  template <class Op>
  static void fold(VV& x, int64_t width, Op op) {
    V lanes[kWidth], other[kWidth];
    store(lanes, x);
    for (int64_t by = kWidth / 2; by >= width; by /= 2) {
      for (int l = 0; l < kWidth; ++l) other[l] = lanes[l ^ by];
      for (int l = 0; l < kWidth; ++l) lanes[l] = op(lanes[l], other[l]);
    }
    x = unaligned<VV>(lanes);
  }
  static void fold(State& state, int64_t width) {
    fold(state.total, width, [](V a, V b) { return a + b; });
    if constexpr (kind == Normalise::log_softmax_backward) {
      fold(state.top, width, greater);
    }
  }
};

template <Normalise kind>
void floating(const NormaliseCall& call, const Pool& pool) {
  visit_floating(call.dtype, [&](auto t) { NormaliseRows<kind, typename decltype(t)::type>(call).run(pool); });
}

}  // namespace

void normalise(const NormaliseCall& call, const Pool& pool) {
  switch (call.kind) {
    case Normalise::softmax: return floating<Normalise::softmax>(call, pool);
    case Normalise::log_softmax: return floating<Normalise::log_softmax>(call, pool);
    case Normalise::softmax_backward: return floating<Normalise::softmax_backward>(call, pool);
    case Normalise::log_softmax_backward: return floating<Normalise::log_softmax_backward>(call, pool);
  }
  unsupported();
}

}  // namespace FASTOPS_CPU_NAMESPACE
