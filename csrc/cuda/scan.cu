// Running results of the rows of a segment (scans.h).
//
// Segments are cut into chunks (segments.h), and a block takes the chunks with keys in one tile: consecutive positions,
// in order or gathered. It brings their rows to shared memory once, where results take the place of the rows:
//
//     memory          | segment | segment |   segment   | ...      16 bytes for each thread
//     short ones      thread 0    thread 1                         a thread for each segment and column
//     others                        lane 0 | lane 1 | ...          4, 8, 16 or 32 lanes, each with a run of rows
//     memory          | segment | segment |   segment   | ...      16 bytes for each thread
//
// Of a segment longer than a chunk the first launch only finds out what each chunk comes to, which goes to a slot. The
// second launch turns the slots of a segment into what is known before each chunk, and the third one reads its rows again
// and writes their results. What is joined to what depends on the length of a segment only, so its neighbours and its
// place change nothing, nor does it matter whether its rows stand in order. Sums of float run in double, of which even
// the smallest devices can do as many as memory brings elements.
//
// Bytes moved for each element: sizeof(T) for the data and the result; of long segments the data twice.
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

// Guesses where nothing else is said: those of NormalisePolicy, whose tiles these are.
struct ScanPolicy {
  static constexpr int kThreads = kTileThreads;
  static constexpr int kSearchLanes = 8;
  static constexpr int kFlight = 4;  // pieces of 16 bytes that a thread has in flight
  static constexpr int kTileBytes = 16384;
  static constexpr int kMinChunk = 128;
  static constexpr int kMaxChunk = 1024;
  static constexpr int kMinKeys = 128;
  // Rows of a segment that one thread takes, and lanes of the smallest team, which has up to as many rows for each; of a
  // chunk of kMaxChunk rows a lane of the largest has 33.
  static constexpr int kHeld = 4;
  static constexpr int kTeams = 4;
  static constexpr int kNarrow = 8;
  static constexpr int kWideRun = 16;
  static constexpr int kWideSize = 1;
  // Joining: columns side by side at most; windows of chunk positions that a block looks through; chunks of a segment that
  // one thread goes through.
  static constexpr int kJoinThreads = 256;
  static constexpr int kJoinColumns = 4;
  static constexpr int kJoinBatch = 64;
  static constexpr int kFew = 16;
};

template <class T>
using Wide = compute_t<T>;

struct ScanArgs {
  ScanCall call;
  StackedSegments stack;
  TileShape<ScanPolicy> shape;
  void* partials;           // [slots, inner] what chunks of long segments come to; then what is known before them
  int64_t* covering;        // [windows] of chunk positions: the segment that stands at the last of them if it is long, or -1
  unsigned char* has_long;  // [units] whether a tile has rows of a long segment
  int64_t units;            // tiles
  int64_t windows;          // 0 if no segment can be longer than a chunk
  int join_columns;         // that a block of the second launch takes
  bool applies;             // the third launch
};

// The types that a scan works with. Elements lie in shared memory as V; sums of float run in double.
template <class Types>
struct Scanned {
  using T = typename Types::T;
  using V = typename Types::V;
  using Out = typename Types::Out;
  template <class X>
  using Reducer = typename Types::template Reducer<X, int64_t>;
  static constexpr bool kWidens = std::is_same_v<Reducer<V>, Sum<float, int64_t>>;
  using State = Reducer<std::conditional_t<kWidens, double, V>>;
  static constexpr bool kHasRow = State::kExtra == Extra::row;
  static constexpr bool kIsLinear = std::is_same_v<State, Linear<V, int64_t>>;
  // Arrays of V in shared memory: rows, then factors or row numbers.
  static constexpr int kArrays = 1 + kIsLinear + (kHasRow ? 8 / int(sizeof(V)) : 0);
  static constexpr int kVec = sizeof(T) == 1 ? 1 : kVectorBytes / int(sizeof(T));
};

// n rows of one column in shared memory, in the order in which they are met.
template <class Types>
struct ColumnRows {
  using S = Scanned<Types>;
  using V = typename S::V;
  using State = typename S::State;
  const ScanCall& call;
  V* x;
  const V* factors;
  int64_t* numbers;  // of rows, which results take the place of
  int first_place, step, n;  // elements from the first of them, and from one to the next

  __device__ __forceinline__ ColumnRows(const ScanCall& call, V* x, const V* factors, int64_t* numbers, int stride, int n)
      : call(call), x(x), factors(factors), numbers(numbers), first_place(call.reverse ? (n - 1) * stride : 0),
        step(call.reverse ? -stride : stride), n(n) {}
  __device__ __forceinline__ int place(int i) const { return first_place + i * step; }
  __device__ __forceinline__ V see(V value) const {
    if constexpr (S::kHasRow) return mirrored(value, call.kind == Scan::min);
    return value;
  }
  __device__ __forceinline__ State at(int i) const {
    const int from = place(i);
    if constexpr (S::kIsLinear) {
      return State::of(x[from], factors[from]);
    } else if constexpr (S::kHasRow) {
      return State::of(see(x[from]), numbers[from]);
    } else {
      return State::of(x[from], 0);
    }
  }
  __device__ __forceinline__ void put(int i, const State& state) const {
    const int to = place(i);
    x[to] = see(V(state.value(1)));
    if constexpr (S::kHasRow) numbers[to] = state.row;
  }
  __device__ __forceinline__ void put_nothing(int i) const {
    x[place(i)] = load_as<V>(nothing<typename S::Out, V>(call.kind, call.dtype));
    if constexpr (S::kHasRow) numbers[place(i)] = -1;
  }

  // What rows [first, last) come to.
  __device__ __forceinline__ State total(int first, int last) const {
    State state = at(first);
#pragma unroll 4
    for (int i = first + 1; i < last; ++i) state = met(state, at(i), call.reverse);
    return state;
  }

  // Results of rows [first, last), given what is known before them, if anything.
  __device__ __forceinline__ void write(int first, int last, bool is_known, State state) const {
    int i = first;
    if (!is_known && i < last) {
      state = at(i);
      if (call.exclusive) {
        put_nothing(i);
      } else {
        put(i, state);
      }
      ++i;
    }
#pragma unroll 4
    for (; i < last; ++i) {
      const State before = state;
      state = met(state, at(i), call.reverse);
      put(i, call.exclusive ? before : state);
    }
  }

  // The same by a team of lanes, each with a run of rows. Runs of an odd number begin in different banks. Returns what all
  // rows come to, to the last lane that has any.
  __device__ __forceinline__ State share(int lane, int team, unsigned mask, bool writes, bool is_known, const State& known,
                                         bool& is_last) const {
    const int run = ((n + team - 1) / team) | 1, first = min(lane * run, n), last = min(first + run, n);
    const int busy = (n + run - 1) / run;
    State state{};
    if (first < last) state = total(first, last);
#pragma unroll 1
    for (int by = 1; by < team; by *= 2) {
      const State before = shuffled(state, [&](uint32_t word) { return __shfl_up_sync(mask, word, by, team); });
      if (lane >= by && first < last) state = met(before, state, call.reverse);
    }
    is_last = lane == busy - 1;
    State before = shuffled(state, [&](uint32_t word) { return __shfl_up_sync(mask, word, 1, team); });
    if (is_known) before = lane > 0 ? met(known, before, call.reverse) : known;
    if (writes && first < last) write(first, last, is_known || lane > 0, before);
    return state;
  }
};

template <class Types, int kVec>
__global__ void __launch_bounds__(ScanPolicy::kThreads, 1) scan_kernel(const __grid_constant__ ScanArgs args) {
  using S = Scanned<Types>;
  using T = typename S::T;
  using V = typename S::V;
  using Out = typename S::Out;
  using State = typename S::State;
  constexpr int kThreads = ScanPolicy::kThreads, kSearch = ScanPolicy::kSearchLanes;
  constexpr int kFlight = ScanPolicy::kFlight / (S::kIsLinear ? 2 : 1);
  constexpr int kHeld = ScanPolicy::kHeld, kTeams = ScanPolicy::kTeams;
  constexpr int kLong = 2 * ScanPolicy::kTileBytes / ScanPolicy::kMaxChunk;  // more than a tile has
  struct Work {
    TileEdges edges;
    int num_listed[kTeams];  // chunks for teams of each size
    int num_long;
    int long_begin[kLong], long_end[kLong];  // elements in shared memory that belong to long segments
  };
  __shared__ Work work;
  extern __shared__ uint4 dynamic[];
  const TileShape<ScanPolicy>& shape = args.shape;
  unsigned char* const shared = reinterpret_cast<unsigned char*>(dynamic);
  V* const x = reinterpret_cast<V*>(shared);
  V* const factors = reinterpret_cast<V*>(shared + (S::kIsLinear ? shape.array_bytes : 0));
  int64_t* const numbers = reinterpret_cast<int64_t*>(shared + (S::kHasRow ? shape.array_bytes : 0));
  uint16_t* const starts = reinterpret_cast<uint16_t*>(shared + shape.starts_offset);  // first row of each segment
  const auto list_of = [&](int size) { return reinterpret_cast<int*>(shared + shape.list_offset[size]); };

  const ScanCall& call = args.call;
  const T* const data = static_cast<const T*>(call.data);
  const T* const factor_data = static_cast<const T*>(call.factors);
  Out* const out = static_cast<Out*>(call.out);
  const int columns = shape.columns, stride = shape.stride, chunk = shape.chunk, log2_chunk = shape.log2_chunk;
  const int64_t behind = call.segments.num_positions - call.segments.clamped(call.segments.num_segments);
#pragma unroll 1
  for (int64_t column = int64_t(blockIdx.y) * columns; column < call.inner; column += int64_t(gridDim.y) * columns) {
    if (behind > 0 && !args.applies) {
      fill_behind<ScanArgs, T, kVec>(args, behind, column, out, Out{});
      if constexpr (S::kHasRow) fill_behind<ScanArgs, T, kVec>(args, behind, column, call.rows, int64_t(-1));
    }
#pragma unroll 1
    for (int64_t unit = blockIdx.x; unit < args.units; unit += gridDim.x) {
      if (args.applies && !args.has_long[unit]) continue;
      __syncthreads();  // the tile before is done with shared memory
      TileEdges found;
      if (threadIdx.x < 2 * kSearch && args.stack.find_tile<kSearch>(unit, shape.keys, chunk, found)) {
        work.edges = found;
        for (int size = 0; size < kTeams; ++size) work.num_listed[size] = 0;
        work.num_long = 0;
        starts[0] = 0;
      }
      __syncthreads();
      const int count = work.edges.count, rows = work.edges.rows;
      const int64_t first_segment = work.edges.segment, first_position = work.edges.position;
      args.stack.find_ends(work.edges, rows, starts);
      const Pieces<ScanArgs, T, kVec> pieces(args, first_position, rows, column);
      const int edge = pieces.edge();
      bring<kFlight, S::kIsLinear>(pieces, data, x, factor_data, factors);
      if constexpr (S::kHasRow) {
#pragma unroll 1
        for (int item = threadIdx.x; item < rows * columns; item += kThreads) {
          const int r = shape.by_columns(item), c = item - r * columns;
          const int64_t position = first_position + r, positions = call.segments.num_positions;
          numbers[pieces.shift + r * stride + c] =
              call.segments.row(position - args.stack.slice_of(position, positions) * positions);
        }
      }
      __syncthreads();

      const int whole_begin = work.edges.whole_begin, whole_end = work.edges.whole_end;
      const auto is_whole = [&](int i) { return i >= whole_begin && i < whole_end; };
      const bool gaps = behind > 0 && args.stack.outer > 1;  // positions of no segment, between slices
      const auto start_of = [&](int i) { return args.stack.start_in_tile(work.edges, starts, i, gaps); };
      const auto rows_of = [&](int start, int n, int in_tile) {
        const int at = pieces.shift + start * stride + in_tile;
        return ColumnRows<Types>(call, x + at, factors + at, numbers + at, stride, n);
      };
#pragma unroll 1
      for (int item = threadIdx.x; item < count * columns; item += kThreads) {
        const int i = shape.by_columns(item), in_tile = item - i * columns;
        const int start = start_of(i), n = starts[i + 1] - start;
        const bool is_long = !is_whole(i) || n > chunk;
        if (is_long || n > shape.run) {
          if (in_tile > 0 || is_long < args.applies) continue;
          list_chunks(shape, work.num_listed, list_of, i, n);
          if (!is_long) continue;
          const int entry = atomicAdd(&work.num_long, 1);
          if (entry >= kLong) continue;
          work.long_begin[entry] = pieces.shift + start * stride;
          work.long_end[entry] = pieces.shift + (start + n) * stride;
        } else if (n > 0 && in_tile < pieces.width && !args.applies) {
          rows_of(start, n, in_tile).write(0, n, false, State{});
        }
      }
      if (behind > 0 && !args.applies) {  // the tile may have rows that belong to no segment
#pragma unroll 1
        for (int r = threadIdx.x; r < rows; r += kThreads) {
          const int64_t positions = call.segments.num_positions, position = first_position + r;
          if (position - args.stack.slice_of(position, positions) * positions < positions - behind) continue;
          for (int c = 0; c < pieces.width; ++c) {
            x[pieces.shift + r * stride + c] = V{};
            if constexpr (S::kHasRow) numbers[pieces.shift + r * stride + c] = -1;
          }
        }
      }
      if (args.windows > 0 && column == 0 && !args.applies) {
        cover_windows(args.stack, work.edges, starts, log2_chunk, start_of, args.covering);
      }
      __syncthreads();
      if (args.windows > 0 && column == 0 && !args.applies && threadIdx.x == 0) args.has_long[unit] = work.num_long > 0;

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
            const auto own = rows_of(start, min(chunk, length - skipped), in_tile);
            const bool is_long = !(is_whole(i) && length <= chunk);
            State* slot = nullptr;
            bool is_first = false;  // of the chunks of its segment, in the order in which they are met
            if (is_long && args.windows > 0) {
              const bool begins = skipped == 0 && (i > 0 || work.edges.first == 0);
              const int64_t to_slot = 2 * ((first_position + start) >> log2_chunk) + begins;  // slot()
              slot = static_cast<State*>(args.partials) + (to_slot * call.inner + column + in_tile);
              if (args.applies) {
                int64_t segment_begin = 0, segment_length = 0;
                args.stack.find_segment(first_segment + i, segment_begin, segment_length);
                is_first = call.reverse ? first_position + start + own.n >= segment_begin + segment_length : begins;
              }
            }
            const bool is_known = args.applies && slot && !is_first;
            bool is_last = false;
            const State state = own.share(lane, team, mask, !is_long || args.applies, is_known, is_known ? *slot : State{}, is_last);
            if (is_last && slot && !args.applies) *slot = state;
          }
        }
        __syncthreads();
      }

      const int num_long = min(work.num_long, kLong);
      // How many of the elements from `to` on belong to long segments. Tiles seldom have more than one of them.
      const auto long_elements = [&](int to, int n) {
        int long_ones = 0;
#pragma unroll 1
        for (int k = 0; k < num_long; ++k) long_ones += max(0, min(to + n, work.long_end[k]) - max(to, work.long_begin[k]));
        return long_ones;
      };
      const auto is_written = [&](int to) { return (long_elements(to, 1) > 0) == args.applies; };
#pragma unroll 2
      for (auto cursor = pieces.first(); cursor.piece < pieces.end; pieces.advance(cursor)) {
        const int from = pieces.to(cursor), long_ones = num_long == 0 ? 0 : long_elements(from, kVec);
        const int written = args.applies ? long_ones : kVec - long_ones;
        if (written == 0) continue;
        Out results[kVec];
        read_shared(x + from, results);
        const int64_t at = pieces.in_data(cursor);
        if (written == kVec) {
          store_pack(out + at, results);
        } else if constexpr (kVec > 1) {
#pragma unroll
          for (int e = 0; e < kVec; ++e) {
            if (is_written(from + e)) out[at + e] = results[e];
          }
        }
      }
      if (edge >= 0 && is_written(edge)) out[pieces.at + edge] = store_as<Out>(x[edge]);
      if constexpr (S::kHasRow) {  // 16 bytes for each thread, too, so that sectors are written as a whole
        constexpr int kPair = kVec == 1 ? 1 : 2;
        const Pieces<ScanArgs, T, kPair> pairs(args, first_position, rows, column);
#pragma unroll 2
        for (auto cursor = pairs.first(); cursor.piece < pairs.end; pairs.advance(cursor)) {
          const int from = pairs.to(cursor);
          int64_t own[kPair];
          bool all = true;
#pragma unroll
          for (int e = 0; e < kPair; ++e) {
            own[e] = numbers[from + e];
            all = all && (num_long == 0 ? !args.applies : is_written(from + e));
          }
          const int64_t at = pairs.in_data(cursor);
          if (all) {
            store_pack(call.rows + at, own);
          } else {
#pragma unroll
            for (int e = 0; e < kPair; ++e) {
              if (is_written(from + e)) call.rows[at + e] = own[e];
            }
          }
        }
        if (const int pair_edge = pairs.edge(); pair_edge >= 0 && is_written(pair_edge)) {
          call.rows[pairs.at + pair_edge] = numbers[pair_edge];
        }
      }
    }
  }
}

// The second launch. In a window of one chunk of positions at most one long segment begins; a block looks through
// kJoinBatch windows, a thread for each:
//
//     few chunks    some threads, one for each column
//     many chunks   all threads: columns, and runs of chunks, whose totals are scanned first
template <class State>
__global__ void __launch_bounds__(ScanPolicy::kJoinThreads, 1) join_kernel(const __grid_constant__ ScanArgs args) {
  constexpr int kThreads = ScanPolicy::kJoinThreads, kBatch = ScanPolicy::kJoinBatch;
  __shared__ State shared[kThreads];
  __shared__ LongSegment few[kBatch], many[kBatch];
  __shared__ int num_few, num_many;
  const int columns = args.join_columns, run = threadIdx.x / columns, runs = kThreads / columns;
  const int log2_chunk = args.shape.log2_chunk;
  const bool reverse = args.call.reverse;
  const auto chunks_of = [&](const LongSegment& of) { return (of.length + args.shape.chunk - 1) >> log2_chunk; };
#pragma unroll 1
  for (int64_t task = blockIdx.x; task * kBatch < args.windows; task += gridDim.x) {
    __syncthreads();  // the batch before is done with the lists
    if (threadIdx.x == 0) num_few = num_many = 0;
    __syncthreads();
    const int64_t window = task * kBatch + threadIdx.x;
    LongSegment found;
    if (threadIdx.x < kBatch && window < args.windows && find_long(args, window, found) && found.begin >> log2_chunk == window) {
      if (chunks_of(found) <= ScanPolicy::kFew) {
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
      // Chunk i of a segment in the order in which they are met.
      const auto chunk_at = [&](const LongSegment& segment, int64_t i) -> State& {
        const int64_t chunk = reverse ? chunks_of(segment) - 1 - i : i;
        const int64_t at = 2 * ((segment.begin >> log2_chunk) + chunk) + (chunk == 0);  // slot()
        return static_cast<State*>(args.partials)[at * args.call.inner + column];
      };
      const auto total = [&](const LongSegment& segment, int64_t first, int64_t last) {
        State known = chunk_at(segment, first);
#pragma unroll 4
        for (int64_t i = first + 1; i < last; ++i) known = met(known, chunk_at(segment, i), reverse);
        return known;
      };
      // What is known before each of them; the first chunk of all has nothing before it.
      const auto write = [&](const LongSegment& segment, int64_t first, int64_t last, State known, bool is_known) {
#pragma unroll 1
        for (int64_t i = first; i < last; ++i) {
          const State of_chunk = chunk_at(segment, i);
          if (is_known) chunk_at(segment, i) = known;
          known = is_known ? met(known, of_chunk, reverse) : of_chunk;
          is_known = true;
        }
      };
      if (has_column) {
#pragma unroll 1
        for (int i = run; i < num_few; i += runs) write(few[i], 0, chunks_of(few[i]), State{}, false);
      }
#pragma unroll 1
      for (int i = 0; i < num_many; ++i) {
        const LongSegment segment = many[i];
        const int64_t of_run = ceil_div(chunks_of(segment), int64_t(runs)), first = run * of_run;
        const int64_t last = min(chunks_of(segment), first + of_run);
        const bool has = has_column && first < last;
        State known{};
        if (has) known = total(segment, first, last);
#pragma unroll 1
        for (int by = 1; by < runs; by *= 2) {
          shared[threadIdx.x] = known;
          __syncthreads();
          if (has && run >= by) known = met(shared[threadIdx.x - by * columns], known, reverse);
          __syncthreads();
        }
        shared[threadIdx.x] = known;
        __syncthreads();
        if (has) write(segment, first, last, run > 0 ? shared[threadIdx.x - columns] : State{}, run > 0);
        __syncthreads();  // before the next segment overwrites what is shared
      }
    }
  }
}

// How a call is run. The workspace holds what is known of chunks, the covering segments, and which tiles have long ones.
template <class Types>
struct ScanRows {
  using S = Scanned<Types>;
  using T = typename S::T;
  using State = typename S::State;

  ScanArgs args{};
  bool vectors;
  size_t partial_bytes = 0;

  explicit ScanRows(const ScanCall& call) {
    args.call = call;
    args.stack = {call.segments, call.outer};
    TileShape<ScanPolicy>& shape = args.shape;
    shape.set<T, typename S::V>(call.inner, S::kArrays, bool(call.segments.order));
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; };
    vectors = aligned(call.data) && aligned(call.factors) && aligned(call.out) && aligned(call.rows) &&
              (shape.linear || (call.inner % S::kVec == 0 && shape.columns % S::kVec == 0));
    args.units = ceil_div(args.stack.num_keys(), shape.keys);
    if (call.segments.num_positions > shape.chunk) {
      args.windows = ceil_div(args.stack.num_positions(), shape.chunk);
      args.join_columns = ScanPolicy::kJoinColumns;
      while (args.join_columns / 2 >= call.inner) args.join_columns /= 2;
      partial_bytes = num_slots(args.stack.num_positions(), shape.chunk) * call.inner * sizeof(State);
      partial_bytes = ceil_div(partial_bytes, 16) * 16;
    }
  }

  size_t workspace() const { return args.windows == 0 ? 0 : partial_bytes + args.windows * sizeof(int64_t) + args.units; }

  void run(void* workspace, cudaStream_t stream) {
    args.partials = workspace;
    args.covering = reinterpret_cast<int64_t*>(static_cast<unsigned char*>(workspace) + partial_bytes);
    args.has_long = reinterpret_cast<unsigned char*>(args.covering + args.windows);
    if (vectors) {
      launch<S::kVec>(stream);
    } else {
      launch<1>(stream);
    }
  }

  template <int kWidth>
  void launch(cudaStream_t stream) {
    const TileShape<ScanPolicy>& shape = args.shape;
    const dim3 grid(blocks_for(args.units, 1), blocks_along_y(ceil_div(args.call.inner, shape.columns)));
    scan_kernel<Types, kWidth><<<grid, ScanPolicy::kThreads, shape.bytes, stream>>>(args);
    check(cudaGetLastError());
    if (args.windows == 0) return;
    const dim3 join_grid(blocks_for(args.windows, ScanPolicy::kJoinBatch),
                         blocks_along_y(ceil_div(args.call.inner, args.join_columns)));
    join_kernel<State><<<join_grid, ScanPolicy::kJoinThreads, 0, stream>>>(args);
    check(cudaGetLastError());
    args.applies = true;
    scan_kernel<Types, kWidth><<<grid, ScanPolicy::kThreads, shape.bytes, stream>>>(args);
    check(cudaGetLastError());
  }
};

template <class Visit>
void visit(const ScanCall& call, Visit&& visit) {
  visit_scan<Wide, compute_t>(call.kind, call.dtype, [&](auto types) { visit(ScanRows<decltype(types)>(call)); });
}

}  // namespace

size_t scan_workspace(const ScanCall& call) {
  size_t bytes = 0;
  if (!nothing_to_do(call)) visit(call, [&](auto scanned) { bytes = scanned.workspace(); });
  return bytes;
}

void scan(const ScanCall& call, void* workspace, cudaStream_t stream) {
  const SegmentsView& segments = call.segments;
  if (nothing_to_do(call) || segments.num_positions < segments.num_rows) {  // rows that belong to no segment
    const bool counts = !is_floating_dtype(call.dtype) && (call.kind == Scan::sum || call.kind == Scan::prod);
    const int64_t elements = call.outer * segments.num_rows * call.inner;
    if (elements > 0) {
      check(cudaMemsetAsync(call.out, 0, elements * (counts ? 8 : size_of(call.dtype)), stream));
      if (call.rows) check(cudaMemsetAsync(call.rows, 0xff, elements * 8, stream));
    }
  }
  if (!nothing_to_do(call)) visit(call, [&](auto scanned) { scanned.run(workspace, stream); });
}

}  // namespace fastops::cuda
