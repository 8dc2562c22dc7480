// Softmax within segments, its logarithm, and the derivatives of both (normalisers.h).
//
// Segments are cut into chunks (segments.h), and a block takes the chunks with keys in one tile: consecutive positions,
// in order or gathered, of up to 128 bytes of columns. It brings their rows to shared memory once:
//
//     memory          | segment | segment |   segment   | ...      16 bytes for each thread
//     up to 4 rows    thread 0    thread 1                         a thread for each segment and column
//     others                                lanes 0 to 3           4, 8, 16 or 32 lanes, which take the rows in turn
//     memory          | segment | segment |   segment   | ...      16 bytes for each thread
//
// Of a segment longer than a chunk the first launch only finds out what has to be known of each chunk, which goes to a
// slot. The second launch joins the slots of a segment, and the third one reads its rows again and writes them. What is
// added to what depends on the length of a segment only, so its neighbours and its place change nothing, nor does it
// matter whether its rows stand in order. Rows that belong to no segment get 0.
//
// Bytes moved for each element: sizeof(T) for the data, the gradient and the result; of long segments data and gradient
// twice, and for each chunk one State three times.
#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>

#include "cuda/launch.cuh"
#include "cuda/stacked.cuh"
#include "cuda/tile.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"
#include "kernels.h"

namespace fastops::cuda {
namespace {

// "Measured" means instructions, sectors of memory and the longest warp as benchmarks/cuda_traffic.py counts them.
struct NormalisePolicy {
  static constexpr int kThreads = kTileThreads;
  // Blocks of the first launch for which a multiprocessor has registers: shared memory is enough for four or five of
  // them. Measured: one more than this, and some architectures spill.
  static constexpr int kBlocks = 4;
  static constexpr int kDoubleBlocks = 3;
  static constexpr int kSearchLanes = 8;  // guess
  static constexpr int kFlight = 4;       // guess: pieces of 16 bytes that a thread has in flight

  // Bytes of the rows that the keys of a tile stand for, of which a chunk has half, unless that is too few rows:
  // 48 KB are what a block can have without asking. Measured, segments of 16 rows of 64 floats: 128 keys are seven and
  // a half of them, which is one or two columns for each thread; with 160 keys some threads have a third one, and the
  // longest warp has 7 % more to do for each key.
  static constexpr int kTileBytes = 16384;
  static constexpr int kMinChunk = 128;
  static constexpr int kMaxChunk = 1024;
  static constexpr int kMinKeys = 128;

  // Rows of a segment that a lane keeps in registers, and sizes of teams: kHeld lanes and twice as many each time, as
  // many as it takes to have no more rows for each. Shared memory is read and written once then, so that it does not
  // matter much where lanes meet in the same bank. Measured, for segments of 16 floats: 152 instructions for each if a
  // team of 8 goes over the rows three times.
  static constexpr int kHeld = 4;
  static constexpr int kTeams = 4;
  // Where this many columns lie side by side, one thread takes segments of up to kWideRun rows, and teams have no more
  // than kHeld << kWideSize lanes: a team has more to do for each row than one thread. Measured, segments of 16 rows of
  // 64 floats: 66 instructions for each and not 94.
  static constexpr int kNarrow = 8;
  static constexpr int kWideRun = 16;
  static constexpr int kWideSize = 1;

  // Joining: columns side by side at most, which make a sector of memory; windows of chunk positions that a block looks
  // through; chunks of a segment that one thread joins. Guesses.
  static constexpr int kJoinThreads = 256;
  static constexpr int kJoinColumns = 4;
  static constexpr int kJoinBatch = 64;
  static constexpr int kFew = 16;

  // The third launch: elements that a block takes, and at most as many windows.
  static constexpr int kApplyElements = 4096;
  static constexpr int kApplyWindows = 8;
};

struct NormaliseArgs {
  NormaliseCall call;
  StackedSegments stack;
  TileShape<NormalisePolicy> shape;
  void* partials;     // [slots, inner] States of chunks of long segments; of the first chunk, then, of all
  int64_t* covering;  // [windows] of chunk positions: the segment that stands at the last of them if it is long, or -1
  int64_t units;      // tiles of the first launch
  int64_t windows;    // 0 if no segment can be longer than a chunk
  int apply_windows;  // that a block of the third launch takes
  int join_columns;   // that a block of the second launch takes
};

// Rows lane, lane + team, ... of n rows of one column in shared memory, for one lane of a team of consecutive ones. All
// lanes get the same.
template <Normalise kind, class V>
struct ColumnRows {
  using N = Normaliser<kind, V>;
  using State = typename N::State;
  static constexpr int kHeld = NormalisePolicy::kHeld;
  static constexpr bool kDerivative = is_derivative(kind);
  V* x;
  const V* g;
  int stride, n, lane, team;
  unsigned mask;

  template <class R, class Join>
  __device__ __forceinline__ R all_lanes(R joined, Join join) const {
#pragma unroll 1
    for (int by = 1; by < team; by *= 2) joined = join(joined, shuffled(joined, [&](uint32_t word) { return __shfl_xor_sync(mask, word, by); }));
    return joined;
  }
  __device__ __forceinline__ State all_states(const State& state) const {
    return all_lanes(state, [](const State& a, const State& b) { return State::combine(a, b); });
  }
  __device__ __forceinline__ static State nothing() {
    State state{};
    if constexpr (kind == Normalise::log_softmax_backward) state.top = -infinity<V>();
    return state;
  }
  // The result, once x is what look() made of it: going forward, exp(x - top) or x - top.
  __device__ __forceinline__ static V finished(V x, V g, const Settled<V>& settled) {
    if constexpr (kDerivative) return N::apply(x, g, settled);
    return kind == Normalise::softmax ? x * settled.by : x - settled.by;
  }

  // Up to kHeld rows for each lane, kept in registers.
  struct Held {
    V x[kHeld], g[kHeld];
  };
  __device__ __forceinline__ State look(Held& held) const {
    const int first = lane * stride, step = team * stride;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const bool has = lane + k * team < n;
      held.x[k] = has ? x[first + k * step] : -infinity<V>();
      held.g[k] = kDerivative && has ? g[first + k * step] : V{};
    }
    if constexpr (kDerivative) {
      State state = nothing();
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {
        if (lane + k * team < n) state = State::combine(state, N::of(held.x[k], held.g[k]));
      }
      return all_states(state);
    } else {
      V top = held.x[0];
#pragma unroll
      for (int k = 1; k < kHeld; ++k) top = State::lead(top, held.x[k]);
      top = all_lanes(top, [](V a, V b) { return State::lead(a, b); });
      V total{};
#pragma unroll
      for (int k = 0; k < kHeld; ++k) {  // rows that there are not count only where all are -inf, and nothing counts
        const V less = below(held.x[k], top), power = Math<V>::exp(less);
        held.x[k] = kind == Normalise::softmax ? power : less;
        total += power;
      }
      return {top, all_lanes(total, [](V a, V b) { return a + b; })};
    }
  }
  __device__ __forceinline__ void write(const Held& held, const State& state) const {
    const Settled<V> settled = N::settle(state);
    const int first = lane * stride, step = team * stride;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (lane + k * team < n) x[first + k * step] = finished(held.x[k], held.g[k], settled);
    }
  }

  // Any number of rows.
  __device__ __forceinline__ State look() const {
    if constexpr (kDerivative) {
      State state = nothing();
#pragma unroll 4
      for (int r = lane; r < n; r += team) state = State::combine(state, N::of(x[r * stride], g[r * stride]));
      return all_states(state);
    } else {
      V top = -infinity<V>();
#pragma unroll 4
      for (int r = lane; r < n; r += team) top = State::lead(top, x[r * stride]);
      top = all_lanes(top, [](V a, V b) { return State::lead(a, b); });
      V total{};
#pragma unroll 4
      for (int r = lane; r < n; r += team) {
        const V less = below(x[r * stride], top), power = Math<V>::exp(less);
        x[r * stride] = kind == Normalise::softmax ? power : less;
        total += power;
      }
      return {top, all_lanes(total, [](V a, V b) { return a + b; })};
    }
  }
  __device__ __forceinline__ void write(const State& state) const {
    const Settled<V> settled = N::settle(state);
#pragma unroll 4
    for (int r = lane; r < n; r += team) x[r * stride] = finished(x[r * stride], g[r * stride], settled);
  }
};

template <Normalise kind, class T, int kVec>
__global__ void __launch_bounds__(NormalisePolicy::kThreads,
                                  sizeof(compute_t<T>) == 8 ? NormalisePolicy::kDoubleBlocks : NormalisePolicy::kBlocks)
    normalise_kernel(const __grid_constant__ NormaliseArgs args) {
  using V = compute_t<T>;
  using State = typename Normaliser<kind, V>::State;
  constexpr bool kDerivative = is_derivative(kind);
  constexpr int kThreads = NormalisePolicy::kThreads, kSearch = NormalisePolicy::kSearchLanes,
                kFlight = NormalisePolicy::kFlight / (kDerivative ? 2 : 1);
  constexpr int kHeld = NormalisePolicy::kHeld, kTeams = NormalisePolicy::kTeams;
  constexpr int kLong = 2 * NormalisePolicy::kTileBytes / NormalisePolicy::kMaxChunk;  // more than a tile has
  struct Work {
    TileEdges edges;
    int num_listed[kTeams];  // chunks for teams of each size
    int rows_written;        // rows before the long segment in which the tile ends, or all
    int num_long;
    int long_begin[kLong], long_end[kLong];  // elements in shared memory that this launch does not write
  };
  __shared__ Work work;
  extern __shared__ uint4 dynamic[];
  const TileShape<NormalisePolicy>& shape = args.shape;
  unsigned char* const shared = reinterpret_cast<unsigned char*>(dynamic);
  V* const x = reinterpret_cast<V*>(shared);
  V* const g = reinterpret_cast<V*>(shared + (kDerivative ? shape.array_bytes : 0));
  uint16_t* const starts = reinterpret_cast<uint16_t*>(shared + shape.starts_offset);  // first row of each segment
  const auto list_of = [&](int size) { return reinterpret_cast<int*>(shared + shape.list_offset[size]); };

  const NormaliseCall& call = args.call;
  const T* const data = static_cast<const T*>(call.data);
  const T* const grad = static_cast<const T*>(call.grad);
  T* const out = static_cast<T*>(call.out);
  const int columns = shape.columns, stride = shape.stride, chunk = shape.chunk, log2_chunk = shape.log2_chunk;
  const int64_t behind = call.segments.num_positions - call.segments.clamped(call.segments.num_segments);
#pragma unroll 1
  for (int64_t column = int64_t(blockIdx.y) * columns; column < call.inner; column += int64_t(gridDim.y) * columns) {
    if (behind > 0) fill_behind<NormaliseArgs, T, kVec>(args, behind, column, out, T{});
#pragma unroll 1
    for (int64_t unit = blockIdx.x; unit < args.units; unit += gridDim.x) {
      __syncthreads();  // the tile before is done with shared memory
      TileEdges found;
      if (threadIdx.x < 2 * kSearch && args.stack.find_tile<kSearch>(unit, shape.keys, chunk, found)) {
        work.edges = found;
        for (int size = 0; size < kTeams; ++size) work.num_listed[size] = 0;
        work.num_long = 0;
        work.rows_written = found.rows;
        starts[0] = 0;
      }
      __syncthreads();
      const int count = work.edges.count, rows = work.edges.rows;
      const int64_t first_segment = work.edges.segment, first_position = work.edges.position;
      args.stack.find_ends(work.edges, rows, starts);
      const Pieces<NormaliseArgs, T, kVec> pieces(args, first_position, rows, column);
      const int edge = pieces.edge();
      bring<kFlight, kDerivative>(pieces, data, x, grad, g);
      __syncthreads();

      const int whole_begin = work.edges.whole_begin, whole_end = work.edges.whole_end;
      const auto is_whole = [&](int i) { return i >= whole_begin && i < whole_end; };
      const bool gaps = behind > 0 && args.stack.outer > 1;  // positions of no segment, between slices
      const auto start_of = [&](int i) { return args.stack.start_in_tile(work.edges, starts, i, gaps); };
      const auto rows_of = [&](int start, int n, int in_tile, int lane, int team, unsigned mask) {
        const int at = pieces.shift + start * stride + in_tile;
        return ColumnRows<kind, V>{x + at, g + at, stride, n, lane, team, mask};
      };
#pragma unroll 1
      for (int item = threadIdx.x; item < count * columns; item += kThreads) {
        const int i = shape.by_columns(item), in_tile = item - i * columns;
        const int start = start_of(i), n = starts[i + 1] - start;
        const bool is_long = !is_whole(i) || n > chunk;
        if (is_long || n > shape.run) {
          if (in_tile > 0) continue;
          list_chunks(shape, work.num_listed, list_of, i, n);
          if (!is_long) continue;
          if (n > 0 && start + n == rows) work.rows_written = start;
          const int entry = atomicAdd(&work.num_long, 1);
          if (entry >= kLong) continue;
          work.long_begin[entry] = pieces.shift + start * stride;
          work.long_end[entry] = pieces.shift + (start + n) * stride;
        } else if (n > 0 && in_tile < pieces.width) {
          const auto own = rows_of(start, n, in_tile, 0, 1, 0);
          if (n <= kHeld) {
            typename ColumnRows<kind, V>::Held held;
            own.write(held, own.look(held));
          } else {
            own.write(own.look());
          }
        }
      }
      if (behind > 0) {  // the tile may have rows that belong to no segment
#pragma unroll 1
        for (int r = threadIdx.x; r < rows; r += kThreads) {
          const int64_t positions = call.segments.num_positions, position = first_position + r;
          if (position - args.stack.slice_of(position, positions) * positions < positions - behind) continue;
          for (int c = 0; c < pieces.width; ++c) x[pieces.shift + r * stride + c] = V{};
        }
      }
      if (args.windows > 0 && column == 0) {
        cover_windows(args.stack, work.edges, starts, log2_chunk, start_of, args.covering);
      }
      __syncthreads();

      int num_listed = 0;
      for (int size = 0; size < kTeams; ++size) num_listed |= work.num_listed[size];
      if (num_listed != 0) {
#pragma unroll 1
        for (int size = 0; size < kTeams; ++size) {
          const int items = min(work.num_listed[size], shape.list_room(size)) * columns;
          const int log2_team = 2 + size, team = kHeld << size;
          const int lane = threadIdx.x & (team - 1);
          const unsigned mask = (0xffffffffu >> (32 - team)) << (threadIdx.x % 32 - lane);
#pragma unroll 1
          for (int item = threadIdx.x >> log2_team; item < items; item += kThreads >> log2_team) {
            const int entry = shape.by_columns(item), in_tile = item - entry * columns;
            if (in_tile >= pieces.width) continue;
            const unsigned code = list_of(size)[entry];
            const int i = code / kTileChunks, skipped = code % kTileChunks << log2_chunk;
            const int begin = start_of(i), start = begin + skipped, length = starts[i + 1] - begin;
            const auto own = rows_of(start, min(chunk, length - skipped), in_tile, lane, team, mask);
            typename ColumnRows<kind, V>::Held held;
            const bool holds = own.n <= kHeld * team;
            const State state = holds ? own.look(held) : own.look();
            if (is_whole(i) && length <= chunk) {
              if (holds) {
                own.write(held, state);
              } else {
                own.write(state);
              }
            } else if (lane == 0 && args.windows > 0) {
              const bool is_first = skipped == 0 && (i > 0 || work.edges.first == 0);
              const int64_t to_slot = 2 * ((first_position + start) >> log2_chunk) + is_first;  // slot()
              static_cast<State*>(args.partials)[to_slot * call.inner + column + in_tile] = state;
            }
          }
        }
        __syncthreads();
      }

      const int num_long = min(work.num_long, kLong);
      // How many of the elements from `to` on this launch does not write. Tiles seldom have more than one long segment.
      const int long_begin = num_long > 0 ? work.long_begin[0] : 0, long_end = num_long > 0 ? work.long_end[0] : 0;
      const auto long_elements = [&](int to, int n) {
        int found = max(0, min(to + n, long_end) - max(to, long_begin));
#pragma unroll 1
        for (int k = 1; k < num_long; ++k) {
          found += max(0, min(to + n, work.long_end[k]) - max(to, work.long_begin[k]));
        }
        return found;
      };
      const int end = pieces.end_of(work.rows_written);
#pragma unroll 2
      for (auto cursor = pieces.first(); cursor.piece < end; pieces.advance(cursor)) {
        const int from = pieces.to(cursor);
        const int skipped = num_long == 0 ? 0 : long_elements(from, kVec);
        if (skipped == kVec) continue;
        T results[kVec];
        read_shared(x + from, results);
        T* const to = out + pieces.in_data(cursor);
        if (skipped == 0) {
          store_pack(to, results);
        } else if constexpr (kVec > 1) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) {
            if (long_elements(from + e, 1) == 0) to[e] = results[e];
          }
        }
      }
      if (edge >= 0 && long_elements(edge, 1) == 0) out[pieces.at + edge] = store_as<T>(x[edge]);
    }
  }
}

// The State of a chunk of a long segment; of its first chunk, once it is joined, that of all.
template <class State>
__device__ __forceinline__ State& state_of(const NormaliseArgs& args, int64_t begin, int64_t chunk, int64_t column) {
  const int64_t at = 2 * ((begin >> args.shape.log2_chunk) + chunk) + (chunk == 0);  // slot()
  return static_cast<State*>(args.partials)[at * args.call.inner + column];
}

// The second launch. In a window of one chunk of positions at most one long segment begins; a block looks through
// kJoinBatch windows, a thread for each:
//
//     few chunks    some threads, one for each column
//     many chunks   all threads: columns, and runs of chunks, joined in a tree
template <class State>
__global__ void __launch_bounds__(NormalisePolicy::kJoinThreads, 1)
    join_kernel(const __grid_constant__ NormaliseArgs args) {
  constexpr int kThreads = NormalisePolicy::kJoinThreads, kBatch = NormalisePolicy::kJoinBatch;
  __shared__ State shared[kThreads];
  __shared__ LongSegment few[kBatch], many[kBatch];
  __shared__ int num_few, num_many;
  const int columns = args.join_columns, run = threadIdx.x / columns, runs = kThreads / columns;
  const int log2_chunk = args.shape.log2_chunk;
  const auto chunks_of = [&](const LongSegment& of) { return (of.length + args.shape.chunk - 1) >> log2_chunk; };
#pragma unroll 1
  for (int64_t task = blockIdx.x; task * kBatch < args.windows; task += gridDim.x) {
    __syncthreads();  // the batch before is done with the lists
    if (threadIdx.x == 0) num_few = num_many = 0;
    __syncthreads();
    const int64_t window = task * kBatch + threadIdx.x;
    LongSegment found;
    if (threadIdx.x < kBatch && window < args.windows && find_long(args, window, found) &&
        found.begin >> log2_chunk == window) {
      if (chunks_of(found) <= NormalisePolicy::kFew) {
        few[atomicAdd(&num_few, 1)] = found;
      } else {
        many[atomicAdd(&num_many, 1)] = found;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int64_t tile = blockIdx.y; tile * columns < args.call.inner; tile += gridDim.y) {
      const int64_t column = tile * columns + threadIdx.x % columns;
      const bool has_column = column < args.call.inner;
      // Chunks [first, last) of a segment, one after the other.
      const auto join = [&](int64_t begin, int64_t first, int64_t last) {
        State joined = state_of<State>(args, begin, first, column);
#pragma unroll 4
        for (int64_t c = first + 1; c < last; ++c) {
          joined = State::combine(joined, state_of<State>(args, begin, c, column));
        }
        return joined;
      };
      if (has_column) {
#pragma unroll 1
        for (int i = run; i < num_few; i += runs) {
          state_of<State>(args, few[i].begin, 0, column) = join(few[i].begin, 0, chunks_of(few[i]));
        }
      }
#pragma unroll 1
      for (int i = 0; i < num_many; ++i) {
        const int64_t begin = many[i].begin, chunks = chunks_of(many[i]), length = ceil_div(chunks, int64_t(runs));
        const int busy = int(ceil_div(chunks, length));
        State joined;
        if (run < busy && has_column) {
          joined = join(begin, run * length, min(chunks, (run + 1) * length));
          shared[threadIdx.x] = joined;
        }
#pragma unroll 1
        for (int by = 1; by < busy; by *= 2) {
          __syncthreads();
          if (has_column && run % (2 * by) == 0 && run + by < busy) {
            joined = State::combine(joined, shared[threadIdx.x + by * columns]);
            shared[threadIdx.x] = joined;
          }
        }
        __syncthreads();  // before the next segment overwrites what is shared
        if (run == 0 && has_column) state_of<State>(args, begin, 0, column) = joined;
      }
    }
  }
}

// The third launch: rows of long segments, in windows of chunk positions. In each stands at most one that stands at the
// end of the window before, and one that stands at its own end:
//
//     windows    |         |         |         |
//     segments   0000000000011     22222222222233...        - segment q stands at the end of window q - 1
template <Normalise kind, class T, int kVec>
__global__ void __launch_bounds__(NormalisePolicy::kThreads, 1)
    apply_kernel(const __grid_constant__ NormaliseArgs args) {
  using V = compute_t<T>;
  using N = Normaliser<kind, V>;
  using State = typename N::State;
  constexpr bool kDerivative = is_derivative(kind);
  constexpr int kThreads = NormalisePolicy::kThreads, kFlight = NormalisePolicy::kFlight / (kDerivative ? 2 : 1);
  constexpr int kSegments = NormalisePolicy::kApplyWindows + 1;
  __shared__ int row_begin[kSegments], row_end[kSegments];
  __shared__ int64_t begins[kSegments];
  __shared__ int num_found;
  extern __shared__ uint4 dynamic[];
  Settled<V>* const settled = reinterpret_cast<Settled<V>*>(dynamic);  // [segments, columns]

  const NormaliseCall& call = args.call;
  const T* const data = static_cast<const T*>(call.data);
  const T* const grad = static_cast<const T*>(call.grad);
  T* const out = static_cast<T*>(call.out);
  const int columns = args.shape.columns, log2_chunk = args.shape.log2_chunk, most = args.apply_windows + 1;
#pragma unroll 1
  for (int64_t column = int64_t(blockIdx.y) * columns; column < call.inner; column += int64_t(gridDim.y) * columns) {
#pragma unroll 1
    for (int64_t unit = blockIdx.x; unit * args.apply_windows < args.windows; unit += gridDim.x) {
      __syncthreads();  // the windows before are done with shared memory
      if (threadIdx.x == 0) num_found = 0;
      __syncthreads();
      const int64_t first_window = unit * args.apply_windows, position = first_window << log2_chunk;
      const int rows = int(min(args.stack.num_positions() - position, int64_t(args.apply_windows) << log2_chunk));
      if (int(threadIdx.x) < most) {
        const int64_t window = first_window + threadIdx.x - 1;
        LongSegment found{};
        const bool has = window >= 0 && window < args.windows && find_long(args, window, found);
        const int64_t begin = found.begin - position, end = begin + found.length;
        const bool reaches = has && begin < rows && end > 0;
        row_begin[threadIdx.x] = reaches ? int(max(begin, int64_t(0))) : 0;
        row_end[threadIdx.x] = reaches ? int(min(end, int64_t(rows))) : 0;
        begins[threadIdx.x] = found.begin;
        if (reaches) num_found = 1;
      }
      __syncthreads();
      if (num_found == 0) continue;
      const Pieces<NormaliseArgs, T, kVec> pieces(args, position, rows, column);
#pragma unroll 1
      for (int item = threadIdx.x; item < most * columns; item += kThreads) {
        const int q = args.shape.by_columns(item), c = item - q * columns;
        if (row_end[q] == 0 || c >= pieces.width) continue;
        settled[item] = N::settle(state_of<State>(args, begins[q], 0, column + c));
      }
      __syncthreads();
      // The segment of a row, or -1.
      const auto segment_at = [&](int row) {
        const int q = row >> log2_chunk;
        if (row >= row_begin[q] && row < row_end[q]) return q;
        return row >= row_begin[q + 1] && row < row_end[q + 1] ? q + 1 : -1;
      };
      const auto result = [&](T from, T from_g, int of, int c) {
        return store_as<T>(N::apply(load_as<V>(from), load_as<V>(from_g), settled[of * columns + c]));
      };
#pragma unroll 1
      for (auto cursor = pieces.first(); cursor.piece < pieces.end;) {
        T from[kFlight][kVec], from_g[kFlight][kVec] = {};
        int64_t at[kFlight];
        int row[kFlight], c[kFlight], of[kFlight];  // of the first element
        bool own[kFlight];                          // whether all, or none, are in the same segment
#pragma unroll
        for (int f = 0; f < kFlight; ++f) {
          at[f] = -1;
          if (cursor.piece < pieces.end) {
            row[f] = cursor.row, c[f] = cursor.in_row;
            int last_row = row[f];
            if (args.shape.linear) {
              const int element = cursor.in_row - pieces.shift;
              row[f] = args.shape.by_columns(element);
              c[f] = element - row[f] * columns;
              last_row = args.shape.by_columns(element + kVec - 1);
            }
            of[f] = segment_at(row[f]);
            own[f] = last_row == row[f] || segment_at(last_row) == of[f];
            if (of[f] >= 0 || !own[f]) {
              at[f] = pieces.in_data(cursor);
              load_elements(data + at[f], from[f]);
              if constexpr (kDerivative) load_elements(grad + at[f], from_g[f]);
            }
          }
          pieces.advance(cursor);
        }
#pragma unroll
        for (int f = 0; f < kFlight; ++f) {
          if (at[f] < 0) continue;
          if (own[f]) {
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
              from[f][e] = result(from[f][e], from_g[f][e], of[f], c[f]);
              if (++c[f] == columns) c[f] = 0;
            }
            store_pack(out + at[f], from[f]);
          } else {
#pragma unroll
            for (int e = 0; e < kVec; ++e) {
              if (of[f] >= 0) out[at[f] + e] = result(from[f][e], from_g[f][e], of[f], c[f]);
              if (++c[f] == columns) {
                c[f] = 0;
                of[f] = segment_at(++row[f]);
              }
            }
          }
        }
      }
      if (const int edge = pieces.edge(); edge >= 0) {
        const int row = args.shape.by_columns(edge - pieces.shift), of = segment_at(row);
        const int64_t at = pieces.at + edge;
        if (of >= 0) {
          out[at] = result(data[at], kDerivative ? grad[at] : T{}, of, edge - pieces.shift - row * columns);
        }
      }
    }
  }
}

// How a call is run. The workspace holds the States and then the covering segments.
template <Normalise kind, class T>
struct NormaliseRows {
  using V = compute_t<T>;
  using State = typename Normaliser<kind, V>::State;
  static constexpr int kVec = kVectorBytes / int(sizeof(T));

  NormaliseArgs args{};
  bool vectors;
  size_t partial_bytes = 0;

  explicit NormaliseRows(const NormaliseCall& call) {
    args.call = call;
    args.stack = {call.segments, call.outer};
    TileShape<NormalisePolicy>& shape = args.shape;
    shape.set<T, V>(call.inner, is_derivative(kind) ? 2 : 1, bool(call.segments.order));
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; };
    vectors = aligned(call.data) && aligned(call.grad) && aligned(call.out) &&
              (shape.linear || (call.inner % kVec == 0 && shape.columns % kVec == 0));
    args.units = ceil_div(args.stack.num_keys(), shape.keys);
    if (call.segments.num_positions > shape.chunk) {
      args.windows = ceil_div(args.stack.num_positions(), shape.chunk);
      args.apply_windows = std::clamp(NormalisePolicy::kApplyElements / (shape.chunk * shape.columns), 1,
                                      NormalisePolicy::kApplyWindows);
      args.join_columns = NormalisePolicy::kJoinColumns;
      while (args.join_columns / 2 >= call.inner) args.join_columns /= 2;
      partial_bytes = num_slots(args.stack.num_positions(), shape.chunk) * call.inner * sizeof(State);
      partial_bytes = ceil_div(partial_bytes, 16) * 16;
    }
  }

  size_t workspace() const { return partial_bytes + args.windows * sizeof(int64_t); }

  void run(void* workspace, cudaStream_t stream) {
    args.partials = workspace;
    args.covering = reinterpret_cast<int64_t*>(static_cast<unsigned char*>(workspace) + partial_bytes);
    if (vectors) {
      launch<kVec>(stream);
    } else {
      launch<1>(stream);
    }
  }

  template <int kWidth>
  void launch(cudaStream_t stream) {
    constexpr int kThreads = NormalisePolicy::kThreads;
    const TileShape<NormalisePolicy>& shape = args.shape;
    const unsigned tiles = blocks_along_y(ceil_div(args.call.inner, shape.columns));
    normalise_kernel<kind, T, kWidth><<<dim3(blocks_for(args.units, 1), tiles), kThreads, shape.bytes, stream>>>(args);
    check(cudaGetLastError());
    if (args.windows == 0) return;
    const dim3 join_grid(blocks_for(args.windows, NormalisePolicy::kJoinBatch),
                         blocks_along_y(ceil_div(args.call.inner, args.join_columns)));
    join_kernel<State><<<join_grid, NormalisePolicy::kJoinThreads, 0, stream>>>(args);
    check(cudaGetLastError());
    const size_t settled = (args.apply_windows + 1) * shape.columns * sizeof(Settled<V>);
    apply_kernel<kind, T, kWidth>
        <<<dim3(blocks_for(args.windows, args.apply_windows), tiles), kThreads, settled, stream>>>(args);
    check(cudaGetLastError());
  }
};

// Calls visit(NormaliseRows<...>) for the kind and dtype of the call.
template <class Visit>
void visit_normaliser(const NormaliseCall& call, Visit&& visit) {
  visit_floating(call.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    switch (call.kind) {
      case Normalise::softmax:
        return visit(NormaliseRows<Normalise::softmax, T>(call));
      case Normalise::log_softmax:
        return visit(NormaliseRows<Normalise::log_softmax, T>(call));
      case Normalise::softmax_backward:
        return visit(NormaliseRows<Normalise::softmax_backward, T>(call));
      case Normalise::log_softmax_backward:
        return visit(NormaliseRows<Normalise::log_softmax_backward, T>(call));
    }
    unsupported();
  });
}

}  // namespace

size_t normalise_workspace(const NormaliseCall& call) {
  size_t bytes = 0;
  if (!nothing_to_do(call)) visit_normaliser(call, [&](auto normaliser) { bytes = normaliser.workspace(); });
  return bytes;
}

void normalise(const NormaliseCall& call, void* workspace, cudaStream_t stream) {
  const SegmentsView& segments = call.segments;
  if (nothing_to_do(call) || segments.num_positions < segments.num_rows) {  // rows that belong to no segment
    const int64_t bytes = call.outer * segments.num_rows * call.inner * size_of(call.dtype);
    if (bytes > 0) check(cudaMemsetAsync(call.out, 0, bytes, stream));
  }
  if (!nothing_to_do(call)) visit_normaliser(call, [&](auto normaliser) { normaliser.run(workspace, stream); });
}

}  // namespace fastops::cuda
