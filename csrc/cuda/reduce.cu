// Reduction of segments.
//
// A segment is cut into chunks (segments.h), and a kernel takes equal ranges of keys, so equal work. A chunk that is a
// whole segment becomes a result at once. The partial result of a chunk of a longer segment goes to its slot, and a
// second launch combines those (a third, where a segment has more of them than a block takes). No launch waits for the
// host, no result depends on atomics, and how rows are associated depends on their place in the segment only:
//
//     rows      ((r0, r1), (r2, r3)), one four after the other     one thread
//     runs      in a tree, by shuffles                             narrow rows: one chunk, a team of lanes
//     partials  runs of chunks, then a tree                        one block
//
// Bytes moved for each element of data: sizeof(T), and for each chunk of a long segment one partial result, twice.
#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/stacked.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"
#include "kernels.h"

namespace fastops::cuda {
namespace {

// "Measured" means instructions, sectors of memory and the longest warp as benchmarks/cuda_traffic.py counts them.
struct ReducePolicy {
  // And at least one block: without that promise the compiler spills a few registers to fit one block more.
  static constexpr int kThreads = 128;

  // Rows of fewer bytes than a sector of memory go through shared memory. Measured: read directly, rows of 16 bytes
  // cost twice their size.
  static constexpr int kNarrowBytes = 32;

  // Wide rows: bytes of a column in a chunk. Measured: the partial results of 64 rows of floats add 3 % to the traffic
  // of one long segment; half as many rows save nothing and add 6 %.
  static constexpr int kWideChunk = 256;
  // Chunks of keys that a group of lanes walks. Measured: with 1 the longest warp beside a giant segment has 1.66 times
  // the work of those in a uniform input, with 2 it has 1.35.
  static constexpr int kWideRange = 2;

  // Narrow rows: bytes of rows that a block can hold, and of a chunk; twice as many where rows are vectors, and no more
  // rows than these where they are shorter than a word. Measured: the search for a tile of 16 KB is 3 % of its traffic;
  // guess: larger tiles leave too few blocks.
  static constexpr int kTileBytes = 18432;
  static constexpr int kChunkBytes = 2048;
  static constexpr int kTileRows = 9216;
  static constexpr int kMaxChunk = 1024;
  // Threads of a block, half as many where rows are vectors. Measured: with 256 the work that each thread has whatever
  // the tile is doubles the instructions.
  static constexpr int kNarrowThreads = 128;
  static constexpr int kSearchLanes = 8;  // guess
  // One thread takes a segment of up to an eighth of a chunk (kRuns); teams of kMinTeam, twice or four times as many
  // threads take others, so that no thread has more than a sixteenth of a chunk then. Measured, segments of 100 floats:
  // 17 instructions for each, 29 with teams of 16 only.
  static constexpr int kRuns = 8;
  static constexpr int kMinTeam = 4;

  // Combining: columns side by side at most; chunks of a segment that one block takes at least, and for each of the
  // threads that share a column; chunks that one of those threads takes alone; windows of as many chunks for which a
  // block of the last launch looks. All guesses.
  static constexpr int kCombineThreads = 128;
  static constexpr int kColumns = 32;
  static constexpr int kFan = 128;
  static constexpr int kFanRun = 8;
  static constexpr int kFew = 16;
  static constexpr int kLastBatch = 8;
};

// How narrow rows are cut, and the shared memory of a tile: rows, then starts of segments, then chunks for teams of
// each size.
struct NarrowShape {
  int row_bytes;
  int gap;    // bytes between lines of the tile
  int chunk;  // rows, a power of two
  int log2_chunk;
  int run;                                   // rows of a segment that one thread takes at most
  int keys;                                  // of a tile
  int starts_offset, list_offset[3], bytes;  // from the beginning

  template <class Tile>
  static constexpr FASTOPS_HD NarrowShape make(int row_bytes, bool vectors) {
    using P = ReducePolicy;
    NarrowShape shape{};
    shape.row_bytes = row_bytes;
    shape.gap = Tile::gap(row_bytes);
    const int scale = vectors ? 2 : 1;
    while (2 << shape.log2_chunk <= P::kMaxChunk && (row_bytes << 1 << shape.log2_chunk) <= P::kChunkBytes * scale)
      ++shape.log2_chunk;
    shape.chunk = 1 << shape.log2_chunk;
    shape.run = shape.chunk / P::kRuns;
    const int held = P::kTileBytes * scale / row_bytes, rows = held < P::kTileRows ? held : P::kTileRows;
    shape.keys = rows - shape.chunk;
    shape.starts_offset =
        ((Tile::kLine + 128 + rows * row_bytes + Tile::kLine - 1) / Tile::kLine * (Tile::kLine + shape.gap) + 3) / 4 *
        4;
    shape.bytes = shape.starts_offset + (shape.keys + 3) / 2 * 4;
    for (int size = 0; size < 3; ++size) {
      shape.list_offset[size] = shape.bytes;
      shape.bytes += shape.list_room(size) * 4;
    }
    return shape;
  }
  // A segment with a chunk in a list has at least so many rows, but for the two that the tile cuts.
  constexpr FASTOPS_HD int list_room(int size) const { return (keys + chunk) / (run << size) + 2; }
};

struct ReduceArgs {
  ReduceCall call;
  StackedSegments stack;
  void* partials;     // [slots, inner]
  int64_t* covering;  // [windows] of chunk positions: the segment that stands at the last of them if it is long, or -1
  int64_t units;      // ranges or tiles
  int chunk;          // rows, a power of two
  int log2_chunk;
  int keys;            // of a range
  int lanes;           // of a group
  int covers;          // whether a segment can be longer than a chunk
  bool mirror;         // of extrema: look for the smallest
  int64_t truth_mask;  // of any and all: the bits of an element that can make it true
  NarrowShape narrow;
};

// What combining needs to know, which does not depend on the type of elements.
template <class V_, class Kept_, class Total_, bool kIsLargest_>
struct Combined {
  using V = V_;
  using Kept = Kept_;    // the partial result of a chunk of a long segment
  using Total = Total_;  // of many, with wider row numbers and counts
  static constexpr bool kIsLargest = kIsLargest_;
};

// The reducers that a kernel works with. Row numbers are counted from the chunk's first, and fit in 32 bits.
template <class Types>
struct Reducers {
  using V = typename Types::V;
  template <template <class, class> class R>
  static constexpr bool is = std::is_same_v<typename Types::template Reducer<V, int>, R<V, int>>;
  static constexpr bool kIsMean = is<Mean>;
  static constexpr bool kIsLargest =
      is<Extremum::Value> || is<Extremum::WithRow> || is<Extremum::WithCount>;
  static constexpr bool kIsTruth = is<Truth<true>::Of> || is<Truth<false>::Of>;

  using Joined = typename Types::template Reducer<V, int>;
  using Kept = std::conditional_t<kIsMean, ScaledMean<V, int>, Joined>;
  using Total = std::conditional_t<kIsMean, ScaledMean<V, int64_t>, typename Types::template Reducer<V, int64_t>>;
  using Combine = Combined<V, Kept, Total, kIsLargest>;

};

// An element as the reducer is to see it.
template <class Types>
__device__ __forceinline__ typename Types::V load_element(typename Types::T x, const ReduceArgs& args) {
  using V = typename Types::V;
  if constexpr (Reducers<Types>::kIsLargest) {
    return mirrored(load_as<V>(x), args.mirror);
  } else if constexpr (Reducers<Types>::kIsTruth) {
    return load_as<V>(x) & V(args.truth_mask);
  } else {
    return load_as<V>(x);
  }
}

// Where the rows of a chunk come from: load(j) is row j from here, and advance(n) goes n rows on.
template <class T, int kVec>
struct StraightRows {
  static constexpr int kFours = 2;  // times four rows in flight
  const T* at;
  int64_t stride;
  __device__ __forceinline__ Pack<T, kVec> load(int j) const {
    return *reinterpret_cast<const Pack<T, kVec>*>(at + j * stride);
  }
  __device__ __forceinline__ void advance(int n) { at += n * stride; }
};

template <class T, int kVec>
struct OrderedRows {
  static constexpr int kFours = 2;
  const T* slice;
  int64_t stride;
  IndexArray order;
  int64_t num_rows;
  int64_t position;
  __device__ __forceinline__ Pack<T, kVec> load(int j) const {
    const int64_t row = order[position + j];
    if (uint64_t(row) >= uint64_t(num_rows)) return {};
    return *reinterpret_cast<const Pack<T, kVec>*>(slice + row * stride);
  }
  __device__ __forceinline__ void advance(int n) { position += n; }
};

template <class V>
__device__ __forceinline__ V multiply(V a, V b) {
  if constexpr (std::is_same_v<V, float>) {  // never a part of fma, whatever is around it: all ways to a row give the same bits
    return __fmul_rn(a, b);
  } else if constexpr (std::is_same_v<V, double>) {
    return __dmul_rn(a, b);
  } else {
    return a * b;
  }
}

// Rows times their weights. The columns of a lane have one weight, or each has its own.
template <class S, class V, int kVec>
struct WeightedRows {
  static constexpr int kFours = 1;
  struct Products {
    V x[kVec];
    __device__ __forceinline__ V operator[](int e) const { return x[e]; }
  };
  const S* slice;
  int64_t stride;
  const SegmentsView& segments;
  int64_t position;
  const V* weights;  // of row 0
  int64_t heads;
  bool own;
  __device__ __forceinline__ Products load(int j) const {
    const int64_t row = segments.order ? segments.order[position + j] : position + j;
    Products products{};
    if (uint64_t(row) >= uint64_t(segments.num_rows)) return products;
    const Pack<S, kVec> x = *reinterpret_cast<const Pack<S, kVec>*>(slice + row * stride);
    const V* const of_row = weights + row * heads;
#pragma unroll
    for (int e = 0; e < kVec; ++e) products.x[e] = multiply(load_as<V>(x[e]), of_row[own ? e : 0]);
    return products;
  }
  __device__ __forceinline__ void advance(int n) { position += n; }
};

// Joins `rows` > 0 rows, the first of which has the number `number`. The first four start what others are joined to,
// because there is no identity to start from.
template <class Types, int kVec, class R, class Rows>
__device__ __forceinline__ void join_rows(const ReduceArgs& args, Rows from, int number, int rows, R (&joined)[kVec]) {
  decltype(from.load(0)) x[4];
  int left = rows;
  const auto row = [&](int j, int e) { return R::of(load_element<Types>(x[j][e], args), number + (rows - left) + j); };
  const auto four = [&](int e) {
    return R::combine(R::combine(row(0, e), row(1, e)), R::combine(row(2, e), row(3, e)));
  };
  if (rows >= 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = from.load(j);
#pragma unroll
    for (int e = 0; e < kVec; ++e) joined[e] = four(e);
    from.advance(4);
#pragma unroll Rows::kFours
    for (left -= 4; left >= 4; left -= 4, from.advance(4)) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = from.load(j);
#pragma unroll
      for (int e = 0; e < kVec; ++e) joined[e] = R::combine(joined[e], four(e));
    }
  }
  if (left == 0) return;
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (j < left) x[j] = from.load(j);
  }
#pragma unroll
  for (int e = 0; e < kVec; ++e) joined[e] = rows >= 4 ? R::combine(joined[e], row(0, e)) : row(0, e);
#pragma unroll
  for (int j = 1; j < 3; ++j) {
    if (j < left) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) joined[e] = R::combine(joined[e], row(j, e));
    }
  }
}

// The row at a position, num_rows if there is none: offsets that do not ascend lead to positions that do not exist.
__device__ __forceinline__ int64_t row_at(const SegmentsView& segments, int64_t position) {
  return uint64_t(position) < uint64_t(segments.num_positions) ? segments.row(position) : segments.num_rows;
}

// Rows of one column whose plain sum is not finite. Out of line: it hardly ever runs.
template <class T>
__device__ __noinline__ compute_t<T> scaled_total(const T* slice, int64_t stride, IndexArray order, int64_t num_rows,
                                                  int64_t num_positions, int64_t position, int rows) {
  SegmentsView segments;
  segments.order = order;
  segments.num_rows = num_rows;
  segments.num_positions = num_positions;
  compute_t<T> total = 0;
#pragma unroll 1
  for (int r = 0; r < rows; ++r) {
    const int64_t row = row_at(segments, position + r);
    if (row < num_rows) total += load_as<compute_t<T>>(slice[row * stride]) * ScaledMean<compute_t<T>, int>::kScale;
  }
  return total;
}

// Where a chunk stands: in its slice the first of its rows is at `position`, and has `first` rows of its segment
// before it.
struct Span {
  int64_t slice, position, first;
};

// The scaled total beside a total (reducers.h). The rows are read once more if that is not finite.
template <class T, class Where>
__device__ __forceinline__ ScaledMean<compute_t<T>, int> with_scaled(const ReduceArgs& args, int rows, int64_t column,
                                                                     compute_t<T> total, Where&& where) {
  using Scaled = ScaledMean<compute_t<T>, int>;
  if (Scaled::finite(total)) return {total, total * Scaled::kScale};
  const SegmentsView& segments = args.stack.one;
  const Span span = where();
  const T* slice = static_cast<const T*>(args.call.data) + span.slice * segments.num_rows * args.call.inner + column;
  return {total, scaled_total<T>(slice, args.call.inner, segments.order, segments.num_rows, segments.num_positions,
                                 span.position, rows)};
}

// Segments without a result.
template <class Types, int kVec>
__device__ __forceinline__ void finish_empty(const ReduceCall& call, int64_t at) {
  using R = typename Reducers<Types>::Joined;
  using Source = typename Types::Source;
  using Out = typename Types::Out;
  if (R::kExtra == Extra::none || call.out) {
    if (sizeof(Source) == 2 && is_floating<Source> && call.wide_out) {
      float x[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[e] = float(call.fill);
      store_pack(static_cast<float*>(call.out) + at, x);
    } else {
      Out x[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e)
        x[e] = is_floating<Out> ? store_as<Out>(call.fill) : store_as<Out>(call.fill_integer);
      store_pack(static_cast<Out*>(call.out) + at, x);
    }
  }
  if constexpr (R::kExtra == Extra::mean) {
    using V = typename Types::V;
    const V x[kVec] = {};
    if (call.mean) store_pack(static_cast<V*>(call.mean) + at, x);
  } else if constexpr (R::kExtra != Extra::none) {
    int64_t x[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) x[e] = call.fill_extra;
    store_pack(call.extra + at, x);
  }
}

// Brings the joined rows of a chunk, kVec columns of them, where they belong: element `at` of the results if the chunk
// is a whole segment, else its slot. where() says its Span, which most have no need to know.
template <class Types, int kVec, class R, class Where>
__device__ __forceinline__ void finish(const ReduceArgs& args, bool whole, int64_t at, int64_t column, int rows,
                                       const R (&joined)[kVec], Where&& where) {
  using T = typename Types::T;
  using Source = typename Types::Source;
  using V = typename Types::V;
  using Out = typename Types::Out;
  const ReduceCall& call = args.call;
  const SegmentsView& segments = args.stack.one;
  if (whole) {
    if constexpr (R::kExtra == Extra::mean) {
      if (!(double(rows) > call.correction)) return finish_empty<Types, kVec>(call, at);
    }
    if (R::kExtra == Extra::none || call.out) {
      const auto value = [&](int e) {
        if constexpr (Reducers<Types>::kIsMean) {
          return with_scaled<T>(args, rows, column + e, joined[e].total, where).value(rows);
        } else if constexpr (Reducers<Types>::kIsLargest) {
          return mirrored(joined[e].value(rows), args.mirror);
        } else if constexpr (R::kExtra == Extra::mean) {
          return joined[e].spread(double(rows) - call.correction, call.root);
        } else {
          return joined[e].value(rows);
        }
      };
      if (sizeof(Source) == 2 && is_floating<Source> && call.wide_out) {
        float x[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) x[e] = store_as<float>(value(e));
        store_pack(static_cast<float*>(call.out) + at, x);
      } else {
        Out x[kVec];
#pragma unroll
        for (int e = 0; e < kVec; ++e) x[e] = store_as<Out>(value(e));
        store_pack(static_cast<Out*>(call.out) + at, x);
      }
    }
    if constexpr (R::kExtra == Extra::mean) {
      V x[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[e] = joined[e].extra();
      if (call.mean) store_pack(static_cast<V*>(call.mean) + at, x);
    } else if constexpr (R::kExtra != Extra::none) {
      int64_t x[kVec];
#pragma unroll
      for (int e = 0; e < kVec; ++e) {
        x[e] = R::kExtra == Extra::row ? row_at(segments, where().position + joined[e].extra())
                                       : int64_t(joined[e].extra());
      }
      store_pack(call.extra + at, x);
    }
  } else {
    const Span span = where();
    const int64_t to_slot =
        slot(span.slice * segments.num_positions + span.position - span.first, span.first, args.chunk);
    using Kept = typename Reducers<Types>::Kept;
    Kept kept[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if constexpr (Reducers<Types>::kIsMean) {
        kept[e] = with_scaled<T>(args, rows, column + e, joined[e].total, where);
      } else {
        kept[e] = joined[e];
      }
    }
    store_words(static_cast<Kept*>(args.partials) + to_slot * call.inner + column, kept);
  }
}

// Notes which segment stands at the end of a window of chunk positions, if that is one of [begin, end): no more than a
// chunk of them, so one window at the most, beside the last one, which may be shorter.
__device__ __forceinline__ void cover(const ReduceArgs& args, int64_t begin, int64_t end, int64_t segment) {
  const int64_t window = end >> args.log2_chunk;
  if (window > begin >> args.log2_chunk) args.covering[window - 1] = segment;
  if (end == args.stack.num_positions() && (window << args.log2_chunk) < end) args.covering[window] = segment;
}

// Rows of a sector or more. A group of lanes walks a range of keys, each lane with kVec columns:
//
//     columns ->    | lane 0 | lane 1 | ... | lane G - 1 |     next group of lanes or blockIdx.y
//     range 0       rows of the chunks with keys [0, keys), eight in flight
//     range 1       the next group
//
// Lanes never exchange anything, so that a group may have any number of lanes and cross warps.
template <class Types, int kVec>
__global__ void __launch_bounds__(ReducePolicy::kThreads, 1)
    reduce_wide_kernel(const __grid_constant__ ReduceArgs args) {
  using T = typename Types::Source;
  using R = typename Reducers<Types>::Joined;
  const SegmentsView& segments = args.stack.one;
  const int64_t inner = args.call.inner;
  const int group = threadIdx.x / args.lanes, lane = threadIdx.x % args.lanes, groups = blockDim.x / args.lanes;
#pragma unroll 1
  for (int64_t tile = blockIdx.y; tile * args.lanes * kVec < inner; tile += gridDim.y) {
    const int64_t column = (tile * args.lanes + lane) * kVec;
    if (column >= inner) continue;
    const bool covers = column == 0 && args.covers;
#pragma unroll 1
    for (int64_t unit = int64_t(blockIdx.x) * groups + group; unit < args.units; unit += int64_t(gridDim.x) * groups) {
      Place at_first = args.stack.find(unit * args.keys, args.chunk);
      int64_t slice = at_first.slice, segment = at_first.segment, begin = at_first.begin, first = at_first.first;
      // Keys until the end of the range, and of segments: offsets that descend must not make it longer.
      int64_t stop = (unit + 1) * args.keys - slice * args.stack.keys_of_slice(), last = segment + args.keys;
#pragma unroll 1
      for (; slice < args.stack.outer; ++slice) {
        const T* const data = static_cast<const T*>(args.call.data) + slice * segments.num_rows * inner + column;
        last = min(last, segments.num_segments);
        int64_t at = (slice * segments.num_segments + segment) * inner + column;
#pragma unroll 1
        while (segment < last && begin + segment + first < stop) {
          const int64_t next = segments.begin(segment + 1), left = next - begin - first;
          const bool whole = next - begin <= args.chunk;
          const int rows = int(max(int64_t(0), min(left, int64_t(args.chunk))));
          if (rows > 0) {
            const int64_t position = begin + first;
            R joined[kVec];
            if constexpr (Types::kWeighted) {
              using V = typename Types::V;
              const auto& [weights, heads, per_head] = args.call.weights;
              const V* const of_column = static_cast<const V*>(weights) + args.call.weights.head(column);
              join_rows<Types>(args, WeightedRows<T, V, kVec>{data, inner, segments, position, of_column, heads, per_head == 1}, 0,
                               rows, joined);
            } else if (segments.order) {
              join_rows<Types>(args, OrderedRows<T, kVec>{data, inner, segments.order, segments.num_rows, position}, 0,
                               rows, joined);
            } else {
              join_rows<Types>(args, StraightRows<T, kVec>{data + position * inner, inner}, 0, rows, joined);
            }
            finish<Types>(args, whole, at, column, rows, joined, [&] { return Span{slice, position, first}; });
            if (covers) {
              const int64_t stacked = slice * segments.num_positions + position;
              cover(args, stacked, stacked + rows, whole ? -1 : slice * segments.num_segments + segment);
            }
          } else {
            finish_empty<Types, kVec>(args.call, at);
          }
          first += args.chunk;
          if (left > args.chunk) continue;
          first = 0;
          begin = next;
          ++segment;
          at += inner;
        }
        if (segment < segments.num_segments) break;
        stop -= args.stack.keys_of_slice();
        last = args.keys;
        segment = 0;
        begin = segments.begin(0);
      }
    }
  }
}

template <int n>
constexpr int kLog2 = 1 + kLog2<n / 2>;
template <>
constexpr int kLog2<1> = 0;

// Where rows are vectors there is less to do for each byte.
template <int kVec>
constexpr int narrow_threads = kVec > 1 ? ReducePolicy::kNarrowThreads / 2 : ReducePolicy::kNarrowThreads;

// Rows in shared memory, in lines of 256 bytes. Threads walk runs that often begin a power of two apart; an odd number
// of units from line to line keeps them out of each other's banks. A line is followed by what comes first in the next
// one, so that four rows are always at a fixed distance from each other.
template <class T, int kVec>
struct TileRows {
  static constexpr int kFours = 1;
  static constexpr int kUnit = kVec > 1 ? kVectorBytes : sizeof(T) < 4 ? 4 : int(sizeof(T));
  static constexpr int kLine = 256;
  // Bytes that are repeated, whole vectors, and bytes between lines.
  static constexpr FASTOPS_HD int repeated(int row_bytes) { return (3 * row_bytes + kVectorBytes - 1) & -kVectorBytes; }
  static constexpr FASTOPS_HD int gap(int row_bytes) {
    const int bytes = repeated(kVec > 1 ? kVectorBytes : row_bytes);
    return (kLine + bytes) / kUnit % 2 == 1 ? bytes : bytes + kUnit;
  }

  const unsigned char* tile;
  int at;  // bytes, before lines are set apart
  int gap_;
  int stride;  // bytes of a row
  const unsigned char* row;
  __device__ __forceinline__ TileRows(const unsigned char* tile, int at, int gap, int stride)
      : tile(tile), at(at), gap_(gap), stride(stride) {
    advance(0);
  }
  __device__ __forceinline__ Pack<T, kVec> load(int j) const {
    return *reinterpret_cast<const Pack<T, kVec>*>(row + j * stride);
  }
  __device__ __forceinline__ void advance(int n) {
    at += n * stride;
    row = tile + at + (unsigned(at) / kLine) * gap_;
  }
};

// 16 bytes as they come from memory, to the shared memory of a tile.
template <class T, int kVec>
__device__ __forceinline__ void stage_vector(unsigned char* to, const uint4& x) {
  if constexpr (TileRows<T, kVec>::kUnit == 16) {
    *reinterpret_cast<uint4*>(to) = x;
  } else if constexpr (TileRows<T, kVec>::kUnit == 8) {
    reinterpret_cast<uint2*>(to)[0] = {x.x, x.y};
    reinterpret_cast<uint2*>(to)[1] = {x.z, x.w};
  } else {
    uint32_t* words = reinterpret_cast<uint32_t*>(to);
    words[0] = x.x;
    words[1] = x.y;
    words[2] = x.z;
    words[3] = x.w;
  }
}

// Rows of less than a sector. A block takes the chunks with keys in one tile, and with them consecutive rows:
//
//     memory   | segment | segment |     segment     | ...       16 bytes for each thread, to shared memory
//     short    thread 0    thread 1                              segments of at most shape.run rows, each column
//     long                             lanes 0 to 7              chunks of others: a team, in consecutive runs
//
// Rows are read once whatever the segments are; results of neighbouring segments are written by neighbouring threads.
template <class Types, int kVec>
__global__ void __launch_bounds__(narrow_threads<kVec>, 1)
    reduce_narrow_kernel(const __grid_constant__ ReduceArgs args) {
  using T = typename Types::T;
  using R = typename Reducers<Types>::Joined;
  using Tile = TileRows<T, kVec>;
  constexpr int kThreads = narrow_threads<kVec>, kSearch = ReducePolicy::kSearchLanes;
  constexpr int kMinTeam = ReducePolicy::kMinTeam, kTeams = 3;  // sizes: kMinTeam threads, twice, four times as many
  constexpr int kChunks = 64;                                   // more than a tile has of one segment
  struct Work {
    TileEdges edges;
    int shift;             // bytes of the tile before the rows
    int num_long[kTeams];  // chunks for teams of each size
  };
  __shared__ Work work;
  extern __shared__ uint4 dynamic[];
  unsigned char* const tile = reinterpret_cast<unsigned char*>(dynamic);
  // Constants where rows are vectors.
  constexpr NarrowShape kVectorShape = NarrowShape::make<Tile>(kVectorBytes, true);
  const NarrowShape& shape = kVec > 1 ? kVectorShape : args.narrow;
  uint16_t* const starts = reinterpret_cast<uint16_t*>(tile + shape.starts_offset);  // first row of each segment

  const SegmentsView& segments = args.stack.one;
  const int inner = int(args.call.inner), columns = kVec > 1 ? 1 : inner;
  const int row_bytes = shape.row_bytes, gap = shape.gap;
  const int log2_chunk = shape.log2_chunk, chunk = 1 << log2_chunk;
#pragma unroll 1
  for (int64_t unit = blockIdx.x; unit < args.units; unit += gridDim.x) {
    __syncthreads();  // the tile before is done with shared memory
    TileEdges found;
    if (threadIdx.x < 2 * kSearch && args.stack.find_tile<kSearch>(unit, shape.keys, chunk, found)) {
      // Bytes of the tile are counted from the 128-byte line of memory in which its first row begins, so that requests
      // are whole lines; they stand behind a line of shared memory for what the next one repeats.
      const uintptr_t from = reinterpret_cast<uintptr_t>(args.call.data) + found.position * row_bytes;
      const int in_line = segments.order || Types::kWeighted ? 0 : int(from % 128);
      work = {found, Tile::kLine + in_line, {}};
      starts[0] = 0;
    }
    __syncthreads();
    const int count = work.edges.count, rows = work.edges.rows, shift = work.shift;
    const int64_t first_segment = work.edges.segment, first_position = work.edges.position;

    args.stack.find_ends(work.edges, rows, starts);
    // Between slices there may be rows of no segment, if an index was never checked.
    const bool gaps = segments.order && args.stack.outer > 1;
    const auto start_of = [&](int i) { return args.stack.start_in_tile(work.edges, starts, i, gaps); };
    const auto place_of = [&](unsigned byte) { return tile + byte + byte / Tile::kLine * gap; };
    const unsigned repeated = Tile::repeated(row_bytes);
    const auto stage_element = [&](unsigned byte, T x) {
      *reinterpret_cast<T*>(place_of(byte)) = x;
      if (byte % unsigned(Tile::kLine) < repeated) *reinterpret_cast<T*>(place_of(byte) - gap) = x;
    };
    if constexpr (Types::kWeighted) {
      using Source = typename Types::Source;
#pragma unroll 2
      for (int i = threadIdx.x; i < rows * inner; i += kThreads) {
        const int r = i / inner, column = i - r * inner;
        const int64_t position = first_position + r, slice = args.stack.slice_of(position, segments.num_positions);
        const int64_t row = segments.row(position - slice * segments.num_positions);
        T x{};
        if (row < segments.num_rows) {
          const RowWeights& weights = args.call.weights;
          x = multiply(
              load_as<T>(static_cast<const Source*>(args.call.data)[(slice * segments.num_rows + row) * inner + column]),
              static_cast<const T*>(weights.data)[row * weights.heads + weights.head(column)]);
        }
        stage_element(shift + i * int(sizeof(T)), x);
      }
    } else if (segments.order) {
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * inner; i += kThreads) {
        const int r = i / inner;
        const int64_t position = first_position + r, slice = args.stack.slice_of(position, segments.num_positions);
        const int64_t row = segments.row(position - slice * segments.num_positions);
        T x{};
        if (row < segments.num_rows) {
          x = static_cast<const T*>(args.call.data)[(slice * segments.num_rows + row) * inner + (i - r * inner)];
        }
        stage_element(shift + i * int(sizeof(T)), x);
      }
    } else {
      constexpr int kFlight = 8, kStep = kThreads * kVectorBytes;
      const unsigned char* const line =
          static_cast<const unsigned char*>(args.call.data) + (first_position * row_bytes - shift);
      const int stop = shift + rows * row_bytes;
      const int first = (shift + kVectorBytes - 1) & -kVectorBytes, last = stop & -kVectorBytes;
      int at = Tile::kLine + threadIdx.x * kVectorBytes;
      if (at < first) at += kStep;
      int steps = (last - at + kStep - 1) >> kLog2<kStep>;
      const unsigned char* from = line + at;
      unsigned char* to = place_of(at);
      const int to_next = kStep + kStep / Tile::kLine * gap;
      const auto copy = [&](auto has) {
        uint4 x[kFlight];
#pragma unroll
        for (int k = 0; k < kFlight; ++k) {
          if (has(k)) x[k] = *reinterpret_cast<const uint4*>(from + k * kStep);
        }
#pragma unroll
        for (int k = 0; k < kFlight; ++k) {
          if (has(k)) stage_vector<T, kVec>(to + k * to_next, x[k]);
        }
        if (unsigned(at) % Tile::kLine < repeated) {
#pragma unroll
          for (int k = 0; k < kFlight; ++k) {
            if (has(k)) stage_vector<T, kVec>(to + k * to_next - gap, x[k]);
          }
        }
      };
#pragma unroll 1
      for (; steps >= kFlight; steps -= kFlight, from += kFlight * kStep, to += kFlight * to_next)
        copy([](int) { return true; });
      if (steps > 0) copy([&](int k) { return k < steps; });
      if (kVec == 1 && threadIdx.x < 2 * kVectorBytes) {  // elements before the first vector and behind the last one
        const bool before = threadIdx.x < kVectorBytes;
        const int b =
            (before ? shift : max(last, first) - kVectorBytes * int(sizeof(T))) + int(threadIdx.x * sizeof(T));
        if (b < (before ? min(first, stop) : stop)) stage_element(b, *reinterpret_cast<const T*>(line + b));
      }
    }
    __syncthreads();

    // The rows of the tile from `start` on, in one column.
    const auto rows_from = [&](int start, int column) {
      return Tile(tile, shift + start * row_bytes + column * int(sizeof(T)), gap, row_bytes);
    };
    const auto finish_chunk = [&](bool whole, int i, int column, int start, int n, const R(&joined)[kVec]) {
      const int64_t at = (first_segment * columns + (i * columns + column)) * kVec;
      finish<Types>(args, whole, at, column, n, joined, [&] {
        const int64_t slice = args.stack.slice_of(first_segment + i, segments.num_segments);
        const int64_t before = i == 0 ? work.edges.first : 0;
        return Span{slice, first_position + start - slice * segments.num_positions, before + start - start_of(i)};
      });
    };
    // A chunk goes to the list for the smallest team whose threads get no more than a sixteenth of the largest chunk.
    const auto list_of = [&](int size) {
      return reinterpret_cast<int*>(tile + (size == 0   ? shape.list_offset[0]
                                            : size == 1 ? shape.list_offset[1]
                                                        : shape.list_offset[2]));
    };
    const auto list_chunks = [&](int i, int first_chunk, int step) {
      const int n = starts[i + 1] - start_of(i);
#pragma unroll 1
      for (int c = first_chunk; c << log2_chunk < n; c += step) {
        const int here = min(chunk, n - (c << log2_chunk)), size = here > chunk >> 1 ? 2 : here > chunk >> 2 ? 1 : 0;
        const int entry = atomicAdd(&work.num_long[size], 1);  // in any order, for each is on its own
        if (entry < shape.list_room(size)) list_of(size)[entry] = i * kChunks + c;  // or the offsets do not ascend
      }
    };
    // Segments that the tile cuts are no results yet, whatever is left of them.
    const int whole_begin = work.edges.whole_begin, whole_end = work.edges.whole_end;
    if (whole_begin > 0) list_chunks(0, threadIdx.x, kThreads);
    if (whole_end < count && whole_end >= whole_begin) list_chunks(count - 1, threadIdx.x, kThreads);
#pragma unroll 1
    for (int item = whole_begin * columns + threadIdx.x; item < whole_end * columns; item += kThreads) {
      const int i = columns == 1 ? item : item / columns, column = item - i * columns;
      const int start = start_of(i), n = starts[i + 1] - start;
      if (n > shape.run) {
        if (column == 0) list_chunks(i, 0, 1);
      } else if (n > 0) {
        R joined[kVec];
        join_rows<Types>(args, rows_from(start, column), 0, n, joined);
        finish_chunk(true, i, column, start, n, joined);
      } else {
        finish_empty<Types, kVec>(args.call, (first_segment * columns + item) * kVec);
      }
    }
    if (args.covers) cover_windows(args.stack, work.edges, starts, log2_chunk, start_of, args.covering);
    __syncthreads();

    if ((work.num_long[0] | work.num_long[1] | work.num_long[2]) == 0) continue;
#pragma unroll 1
    for (int size = 0; size < kTeams; ++size) {
      if (work.num_long[size] == 0) continue;
      const int items = min(work.num_long[size], shape.list_room(size)) * columns;
      const int shift_team = kLog2<kMinTeam> + size, threads = 1 << shift_team;
      const int in_warp = threadIdx.x % 32, lane = in_warp & (threads - 1);
      const unsigned team = ((1u << threads) - 1) << (in_warp - lane);
      // Teams are numbered across warps, so that a few of them keep all warps busy.
      const int own_team = (in_warp >> shift_team) * (kThreads / 32) + int(threadIdx.x / 32);
#pragma unroll 1
      for (int item = own_team; item < items; item += kThreads >> shift_team) {
        const int entry = columns == 1 ? item : item / columns, column = item - entry * columns;
        const unsigned code = list_of(size)[entry];
        const int i = code / kChunks, skipped = code % kChunks << log2_chunk;
        const int begin = start_of(i), start = begin + skipped, length = starts[i + 1] - begin;
        const int n = min(chunk, length - skipped), run = (n + threads - 1) >> shift_team;
        const int busy = (n + run - 1) / run;          // lanes with rows
        const int before = min(lane, busy - 1) * run;  // rows of lanes before this one
        R joined[kVec];
        join_rows<Types>(args, rows_from(start + before, column), before, min(run, n - before), joined);
#pragma unroll 1
        for (int by = 1; by < threads; by *= 2) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) {
            const R other = shuffled(joined[e], [&](uint32_t word) { return __shfl_down_sync(team, word, by); });
            if (lane + by < busy) joined[e] = R::combine(joined[e], other);
          }
        }
        if (lane > 0) continue;
        const bool whole = length <= chunk && i >= whole_begin && i < whole_end;
        // Without segments of several chunks there is nowhere to keep a part; offsets that do not ascend can make one.
        finish_chunk(whole || !args.covers, i, column, start, n, joined);
      }
    }
  }
}

struct CombineArgs {
  ReduceArgs reduce;
  int64_t windows;      // of chunk positions
  int64_t batches;      // of `batch` windows
  int64_t fan_windows;  // of `fan` chunks, 0 if no segment can have as many
  int batch;            // windows that a block looks through
  int fan;              // chunks of a segment that a block combines
  int columns;          // of a block, a power of two
  DType out;            // elements of the results, where the type of partial results does not tell
};

template <class V>
__device__ __forceinline__ void store_value(const CombineArgs& args, int64_t at, V x) {
  void* out = args.reduce.call.out;
  if constexpr (std::is_same_v<V, float>) {
    switch (args.out) {
      case DType::f16:
        static_cast<Half*>(out)[at] = store_as<Half>(x);
        return;
      case DType::bf16:
        static_cast<BFloat16*>(out)[at] = store_as<BFloat16>(x);
        return;
      default:
        static_cast<float*>(out)[at] = x;
    }
  } else if constexpr (sizeof(V) == 8) {
    if (args.out == DType::u8) {
      static_cast<uint8_t*>(out)[at] = uint8_t(x);
    } else {
      static_cast<V*>(out)[at] = x;
    }
  } else {
    switch (args.out) {
      case DType::u8:
        static_cast<uint8_t*>(out)[at] = uint8_t(x);
        return;
      case DType::i8:
        static_cast<int8_t*>(out)[at] = int8_t(x);
        return;
      case DType::i16:
        static_cast<int16_t*>(out)[at] = int16_t(x);
        return;
      default:
        static_cast<int32_t*>(out)[at] = int32_t(x);
    }
  }
}

// A long segment as the second and the third launch meet it.
struct LongSegment {
  int64_t segment;  // of the stack
  int64_t begin;    // position in the stack
  int64_t length;
  int64_t chunks;
};

// The long segment that stands at the end of a window, if there is one. What is read may be left from before where
// offsets do not ascend, so it is not believed.
__device__ __forceinline__ bool find_long(const CombineArgs& args, int64_t window, LongSegment& found) {
  found.segment = args.reduce.covering[window];
  if (!args.reduce.stack.find_segment(found.segment, found.begin, found.length)) return false;
  found.chunks = ceil_div(found.length, int64_t(args.reduce.chunk));
  return found.length > args.reduce.chunk;
}

// The partial result of a chunk. Its rows are counted from the first row of the chunk.
template <class Kept>
__device__ __forceinline__ Kept* kept_of(const ReduceArgs& args, const LongSegment& of, int64_t chunk, int64_t column) {
  // slot() for a chunk that many chunks behind the first
  const int64_t at = slot(of.begin, 0, args.chunk) - 1 + 2 * chunk + (chunk == 0);
  return static_cast<Kept*>(args.partials) + at * args.call.inner + column;
}

// The same with rows counted from the first row of chunk `first`.
template <class Types>
__device__ __forceinline__ typename Types::Total total_of(const ReduceArgs& args, const LongSegment& of, int64_t first,
                                                          int64_t chunk, int64_t column) {
  return kept_of<typename Types::Kept>(args, of, chunk, column)
      ->template at<typename Types::V, int64_t>([](auto x) { return x; }, (chunk - first) * args.chunk);
}

template <class Types>
__device__ __forceinline__ void store_total(const CombineArgs& args, const LongSegment& of, int64_t column,
                                            const typename Types::Total& total) {
  const ReduceCall& call = args.reduce.call;
  const int64_t at = of.segment * call.inner + column;
  if constexpr (Types::Total::kExtra == Extra::mean) {
    using V = typename Types::V;
    const bool has_result = double(of.length) > call.correction;
    store_value(args, at, has_result ? total.spread(double(of.length) - call.correction, call.root) : V(call.fill));
    if (call.mean) static_cast<V*>(call.mean)[at] = has_result ? total.extra() : V{};
  } else if (call.out) {
    if constexpr (Types::kIsLargest) {
      store_value(args, at, mirrored(total.value(of.length), args.reduce.mirror));
    } else {
      store_value(args, at, total.value(of.length));
    }
  }
  if constexpr (Types::Total::kExtra == Extra::row) {
    call.extra[at] = row_at(call.segments, of.begin % call.segments.num_positions + total.extra());
  } else if constexpr (Types::Total::kExtra == Extra::count) {
    call.extra[at] = total.extra();
  }
}

template <class Types>
__device__ __forceinline__ void keep_total(const ReduceArgs& args, const LongSegment& of, int64_t first, int64_t column,
                                           const typename Types::Total& total) {
  using Kept = typename Types::Kept;
  *kept_of<Kept>(args, of, first, column) = total.template at<typename Types::V, int>([](auto x) { return x; }, 0);
}

// Chunks first, first + step, ... (n of them) of one column, in equal runs for the threads of that column and then in a
// tree. The thread of the first run returns true and has the result.
template <class Types>
__device__ __forceinline__ bool combine_in_block(const CombineArgs& args, const LongSegment& of, int64_t first,
                                                 int64_t step, int64_t n, int64_t column, typename Types::Total* shared,
                                                 typename Types::Total& joined) {
  using Total = typename Types::Total;
  const ReduceArgs& reduce = args.reduce;
  const int run = threadIdx.x / args.columns, runs = ReducePolicy::kCombineThreads / args.columns;
  const int64_t rows = ceil_div(n, int64_t(runs));
  const int busy = int(ceil_div(n, rows));
  const bool has_column = column < reduce.call.inner;
  if (run < busy && has_column) {
    const int64_t last = min(n, (run + 1) * rows);
    joined = total_of<Types>(reduce, of, first, first + run * rows * step, column);
#pragma unroll 4
    for (int64_t i = run * rows + 1; i < last; ++i) {
      joined = Total::combine(joined, total_of<Types>(reduce, of, first, first + i * step, column));
    }
    shared[threadIdx.x] = joined;
  }
#pragma unroll 1
  for (int by = 1; by < busy; by *= 2) {
    __syncthreads();
    if (has_column && run % (2 * by) == 0 && run + by < busy) {
      joined = Total::combine(joined, shared[threadIdx.x + by * args.columns]);
      shared[threadIdx.x] = joined;
    }
  }
  __syncthreads();  // before the next segment overwrites what is shared
  return run == 0 && has_column;
}

// Chunks [first, first + n) of a segment, for a block to combine.
struct ManyChunks {
  LongSegment segment;
  int64_t first;
};

// The second launch. In a window of one chunk of positions at most one long segment begins; where args.fan windows end,
// at most one segment goes on with its next args.fan chunks. A block looks through args.batch windows, a thread for
// each:
//
//     few chunks    some threads, one for each column
//     many chunks   all threads: columns, and runs of chunks
//
// Results of up to args.fan chunks are final, others replace the first of their partial results.
template <class Types>
__global__ void __launch_bounds__(ReducePolicy::kCombineThreads, 1)
    combine_kernel(const __grid_constant__ CombineArgs args) {
  constexpr int kFew = ReducePolicy::kFew, kThreads = ReducePolicy::kCombineThreads;
  using Total = typename Types::Total;
  __shared__ Total shared[kThreads];
  __shared__ LongSegment few[kThreads];
  constexpr int kMany = kThreads / kFew + 2;
  __shared__ ManyChunks many[kMany];
  __shared__ int num_few, num_many;
  const ReduceArgs& reduce = args.reduce;
  const int64_t chunk = reduce.chunk, fan = args.fan;
  const int run = threadIdx.x / args.columns, runs = kThreads / args.columns;
#pragma unroll 1
  for (int64_t task = blockIdx.x; task < args.batches; task += gridDim.x) {
    __syncthreads();  // the batch before is done with the lists
    if (threadIdx.x == 0) num_few = num_many = 0;
    __syncthreads();
    const int64_t window = task * args.batch + threadIdx.x;
    const auto list_many = [&](const LongSegment& segment, int64_t first) {
      const int entry = atomicAdd(&num_many, 1);
      if (entry < kMany) many[entry] = {segment, first};  // or the offsets do not ascend
    };
    LongSegment found;
    if (int(threadIdx.x) < args.batch && window < args.windows && find_long(args, window, found)) {
      if (found.begin >= window * chunk) {
        if (found.chunks <= kFew) {
          few[atomicAdd(&num_few, 1)] = found;
        } else {
          list_many(found, 0);
        }
      }
      if ((window + 1) % fan == 0) {
        const int64_t first = ceil_div((window + 1) * chunk - found.begin, fan * chunk) * fan;
        if (first < found.chunks) list_many(found, first);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int64_t tile = blockIdx.y; tile * args.columns < reduce.call.inner; tile += gridDim.y) {
      const int64_t column = tile * args.columns + threadIdx.x % args.columns;
      Total joined;
      if (column < reduce.call.inner) {
#pragma unroll 1
        for (int i = run; i < num_few; i += runs) {
          const LongSegment of = few[i];
          joined = total_of<Types>(reduce, of, 0, 0, column);
#pragma unroll 1
          for (int64_t c = 1; c < of.chunks; ++c) {
            joined = Total::combine(joined, total_of<Types>(reduce, of, 0, c, column));
          }
          store_total<Types>(args, of, column, joined);
        }
      }
#pragma unroll 1
      for (int i = 0; i < min(num_many, kMany); ++i) {
        const auto [of, first] = many[i];
        if (!combine_in_block<Types>(args, of, first, 1, min(fan, of.chunks - first), column, shared, joined)) continue;
        if (of.chunks <= fan) {
          store_total<Types>(args, of, column, joined);
        } else {
          keep_total<Types>(reduce, of, first, column, joined);
        }
      }
    }
  }
}

// The third launch: segments of more than args.fan chunks, of which at most one begins in as many windows. A block
// looks at kLastBatch times as many windows and combines what it finds, one segment after the other.
template <class Types>
__global__ void __launch_bounds__(ReducePolicy::kCombineThreads, 1)
    combine_last_kernel(const __grid_constant__ CombineArgs args) {
  constexpr int kBatch = ReducePolicy::kLastBatch;
  using Total = typename Types::Total;
  __shared__ Total shared[ReducePolicy::kCombineThreads];
  __shared__ LongSegment segments[kBatch];
  __shared__ int num_segments;
  const int64_t fan = args.fan;
#pragma unroll 1
  for (int64_t task = blockIdx.x; task * kBatch < args.fan_windows; task += gridDim.x) {
    __syncthreads();  // the batch before is done with the list
    if (threadIdx.x == 0) num_segments = 0;
    __syncthreads();
    const int64_t window = task * kBatch + threadIdx.x;
    LongSegment found;
    if (threadIdx.x < kBatch && window < args.fan_windows &&
        find_long(args, min((window + 1) * fan, args.windows) - 1, found) && found.chunks > fan &&
        found.begin >= window * fan * args.reduce.chunk) {
      segments[atomicAdd(&num_segments, 1)] = found;
    }
    __syncthreads();
#pragma unroll 1
    for (int64_t tile = blockIdx.y; tile * args.columns < args.reduce.call.inner; tile += gridDim.y) {
      const int64_t column = tile * args.columns + threadIdx.x % args.columns;
#pragma unroll 1
      for (int i = 0; i < num_segments; ++i) {
        Total joined;
        const int64_t n = ceil_div(segments[i].chunks, fan);
        if (combine_in_block<Types>(args, segments[i], 0, fan, n, column, shared, joined)) {
          store_total<Types>(args, segments[i], column, joined);
        }
      }
    }
  }
}

// How a call is run. The workspace holds the partial results and then the covering segments.
template <class Types>
struct Reduce {
  using T = typename Types::T;
  using Source = typename Types::Source;
  static constexpr int kVec = kVectorBytes / int(sizeof(Source));
  using Combine = typename Reducers<Types>::Combine;

  // Integers whose rows have the size of a vector are rare, and so are weights of them: they make do with the kernel for
  // other rows.
  static constexpr bool kNarrowVectors = is_floating<T> && !Types::kWeighted;

  ReduceArgs args{};
  bool narrow, vectors;
  int64_t windows = 0;
  size_t partial_bytes = 0;

  Reduce(const ReduceCall& call, bool mirror, int64_t truth_mask) {
    args.mirror = mirror;
    args.truth_mask = truth_mask;
    const int64_t row_bytes = call.inner * int64_t(sizeof(Source)), tile_bytes = call.inner * int64_t(sizeof(T));
    args.call = call;
    args.stack = {call.segments, call.outer};
    narrow = tile_bytes < ReducePolicy::kNarrowBytes;
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; };
    vectors = (!narrow || kNarrowVectors) && row_bytes % kVectorBytes == 0 && aligned(call.data) && aligned(call.out) &&
              aligned(call.extra) && aligned(call.mean);
    if constexpr (Types::kWeighted) vectors = vectors && (call.weights.per_head == 1 || call.weights.per_head % kVec == 0);
    if (narrow) {
      if constexpr (kNarrowVectors) {
        if (vectors) args.narrow = NarrowShape::make<TileRows<T, kVec>>(int(row_bytes), true);
      }
      if (!vectors) args.narrow = NarrowShape::make<TileRows<T, 1>>(int(tile_bytes), false);
      args.chunk = args.narrow.chunk;
      args.keys = args.narrow.keys;
    } else {
      args.chunk = std::max(ReducePolicy::kWideChunk / int(sizeof(T)), 64);
      args.keys = ReducePolicy::kWideRange * args.chunk;
      args.lanes = int(std::min<int64_t>(ReducePolicy::kThreads, ceil_div(call.inner, vectors ? kVec : 1)));
    }
    while (1 << args.log2_chunk < args.chunk) ++args.log2_chunk;
    args.units = ceil_div(args.stack.num_keys(), args.keys);
    args.covers = call.segments.num_positions > args.chunk;
    if (args.covers) {
      windows = ceil_div(args.stack.num_positions(), args.chunk);
      partial_bytes = num_slots(args.stack.num_positions(), args.chunk) * call.inner * sizeof(typename Combine::Kept);
      partial_bytes = ceil_div(partial_bytes, 16) * 16;
    }
  }

  size_t workspace() const { return partial_bytes + windows * sizeof(int64_t); }

  void run(void* workspace, cudaStream_t stream) {
    args.partials = workspace;
    args.covering = reinterpret_cast<int64_t*>(static_cast<unsigned char*>(workspace) + partial_bytes);
    if (narrow) {
      if constexpr (kNarrowVectors) {
        if (vectors) run_narrow<kVec>(stream);
      }
      if (!vectors) run_narrow<1>(stream);
    } else if (vectors) {
      run_wide<kVec>(stream);
    } else {
      run_wide<1>(stream);
    }
    check(cudaGetLastError());
    if (windows > 0) run_combine(stream);
  }

  template <int kWidth>
  void run_narrow(cudaStream_t stream) {
    reduce_narrow_kernel<Types, kWidth>
        <<<blocks_for(args.units, 1), narrow_threads<kWidth>, args.narrow.bytes, stream>>>(args);
  }

  template <int kWidth>
  void run_wide(cudaStream_t stream) {
    const int groups = ReducePolicy::kThreads / args.lanes;
    const dim3 grid(blocks_for(args.units, groups),
                    blocks_along_y(ceil_div(args.call.inner, int64_t(args.lanes) * kWidth)));
    reduce_wide_kernel<Types, kWidth><<<grid, groups * args.lanes, 0, stream>>>(args);
  }

  void run_combine(cudaStream_t stream) {
    CombineArgs combine{};
    combine.reduce = args;
    combine.windows = windows;
    combine.columns = ReducePolicy::kColumns;
    while (combine.columns / 2 >= args.call.inner) combine.columns /= 2;
    constexpr int kThreads = ReducePolicy::kCombineThreads;
    combine.batch = std::clamp(4 * kThreads / combine.columns, 32, kThreads);
    combine.batches = ceil_div(windows, combine.batch);
    combine.fan = std::max(ReducePolicy::kFan, ReducePolicy::kFanRun * kThreads / combine.columns);
    if (args.call.segments.num_positions > int64_t(args.chunk) * combine.fan) {
      combine.fan_windows = ceil_div(windows, combine.fan);
    }
    using Out = typename Types::Out;
    combine.out = std::is_same_v<Out, uint8_t> ? DType::u8 : std::is_same_v<Out, Source> ? args.call.dtype : DType::i64;
    if (sizeof(Source) == 2 && args.call.wide_out) combine.out = DType::f32;
    const unsigned tiles = blocks_along_y(ceil_div(args.call.inner, combine.columns));
    combine_kernel<Combine><<<dim3(blocks_for(combine.batches, 1), tiles), kThreads, 0, stream>>>(combine);
    check(cudaGetLastError());
    if (combine.fan_windows == 0) return;
    combine_last_kernel<Combine>
        <<<dim3(blocks_for(combine.fan_windows, ReducePolicy::kLastBatch), tiles), kThreads, 0, stream>>>(combine);
    check(cudaGetLastError());
  }
};

bool nothing_to_do(const ReduceCall& call) {
  return call.outer == 0 || call.inner == 0 || call.segments.num_segments == 0;
}

// The call as a kernel takes it.
struct Prepared : PreparedReduce {
  using PreparedReduce::PreparedReduce;

  template <class Visit>
  void visit(Visit&& visit) const {
    if (call.weights.data) {
      const auto weighted = [&](auto t) { visit(Reduce<WeightedSumTypes<typename decltype(t)::type>>(call, false, 0)); };
      if (call.dtype == DType::i64) return weighted(Type<int64_t>{});
      return visit_floating(call.dtype, weighted);
    }
    visit_reducer(call.reduction, call.dtype,
                  [&](auto types) { visit(Reduce<decltype(types)>(call, mirror, truth_mask)); });
  }
};

}  // namespace

size_t reduce_workspace(const ReduceCall& call) {
  size_t bytes = 0;
  if (!nothing_to_do(call)) Prepared(call).visit([&](auto reduce) { bytes = reduce.workspace(); });
  return bytes;
}

void reduce(const ReduceCall& call, void* workspace, cudaStream_t stream) {
  if (!nothing_to_do(call)) Prepared(call).visit([&](auto reduce) { reduce.run(workspace, stream); });
}

}  // namespace fastops::cuda
