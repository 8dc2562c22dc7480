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
// A segment longer than a chunk stands in many tiles, which find out in the same launch what comes before them: a tile makes
// known what each of its chunks comes to, waits for what earlier tiles make known, and writes results only then, so rows
// are read once. Chunks of a segment are numbered in the order in which they are met, and nodes stand for some of them:
//
//     level 2    |               0 to 15                |                 what the chunks of a node come to;
//     level 1    | 0 to 3 | 4 to 7 | 8 to 11 | 12 to 15 | 16 to 19 | ...  at the last level, the chunks before them, too
//     level 0    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | ...
//
// The tile with the last chunk of a node makes it. What is known before a chunk is joined from up to three nodes of each
// level and the one before of the last level: before chunk 22, from 0 to 15, 16 to 19, 20 and 21. So what is joined to what
// depends on the length of a segment only: its neighbours, its place and the order in which tiles come along change nothing,
// nor does it matter whether its rows stand in order. A scan that looks back for what it can find, be it of one tile or of
// all before (Merrill and Garland, "Single-pass parallel prefix scan with decoupled look-back", 2016; cub::ScanTileState),
// waits for less, but rounds otherwise each time.
//
// Tiles are taken in turns, so those that are waited for are at work already. Each says how far it is whatever offsets say:
// even if they were never checked, no tile waits for what does not come. Sums of float run in double, of which even the
// smallest devices can do as many as memory brings elements.
//
// Bytes moved for each element: sizeof(T) for the data and the result. Of a long segment also, for each chunk, one State
// written and some read, of which there are more the longer it is: measured, for 38000 rows of 64 floats, 6 to 9 % of the
// bytes of data and results.
#include <cuda_runtime.h>

#include <cstring>
#include <type_traits>
#ifndef __HIP_PLATFORM_AMD__
#include <cuda/atomic>
#endif

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
  // A chunk of a long segment is shared by at least that many lanes, as a power of two, or by as many as let half a block
  // take all columns at a time: more have more to do to tell each other than they have rows. Measured, a segment of 38000
  // rows of 64 floats: 166 instructions for each running maximum, and 184 by a whole block.
  static constexpr int kMinLog2Lanes = 2;
  // At most that many such chunks in a tile: its keys are up to four times the rows of a chunk, and for each chunk it may
  // have the last one of a segment, of one row, and the first one of the next.
  static constexpr int kLongRoom = 8;
  // Nodes of a level that one of the next stands for, as a power of two, and the last level. A node of the last level waits
  // for the one before, so all of them wait in a row, but each stands for 1024 chunks: 4 MB of data and more. If more nodes
  // made one, there would be fewer levels to wait for, and more nodes to read.
  static constexpr int kLog2Fan = 2;
  static constexpr int kLevels = 5;
  static constexpr int kJoinLanes = 4;  // that join the nodes before a chunk
};

template <class T>
using Wide = compute_t<T>;

struct ScanArgs {
  ScanCall call;
  StackedSegments stack;
  TileShape<ScanPolicy> shape;
  int64_t units;                // tiles, each of some columns
  unsigned long long* turns;    // [tiles of columns] how many units were taken; none if no segment can be longer than a chunk
  int* progress;                // [tiles of columns, units] levels of nodes that a unit has made known
  void* nodes;                  // [parts of a State, nodes, inner]
  int64_t num_nodes;            // nodes * inner
  int64_t level_begin[ScanPolicy::kLevels + 1];
  int log2_lanes;               // that share a chunk of a long segment
  int long_room;                // chunks of long segments in a tile
  int known_offset;             // in shared memory: [long_room, columns] States, what is known before these chunks
};

// A chunk of a long segment, and its place among the others in the order in which they are met.
struct LongChunk {
  int64_t begin, key;      // of the segment: its position in the stack, and the key of its first chunk
  int64_t number, chunks;  // chunks before it, and of the segment
  int64_t place;           // of its node of level 0
  int start, rows;         // in the tile
  int makes;               // the level of the node that it is the last chunk of and that later ones join, -1 if there are none
};

// The nodes of long segments, for the columns of a tile.
template <class State>
struct Nodes {
  static constexpr int kLevels = ScanPolicy::kLevels, kLog2Fan = ScanPolicy::kLog2Fan, kOthers = (1 << kLog2Fan) - 1;
  static constexpr int kSlots = 1 + kLevels * kOthers;  // nodes that are joined before a chunk, at most

  const ScanArgs& args;
  int64_t column, unit;
  int* progress;  // of the units of these columns

  __device__ __forceinline__ Nodes(const ScanArgs& args, int64_t column, int64_t unit)
      : args(args), column(column), unit(unit), progress(args.progress + column / args.shape.columns * args.units) {}

  __device__ __forceinline__ static int made_by(int64_t number, int64_t chunks) {
    const int64_t met = number + 1;
    if (met >= chunks) return -1;
    return min((__ffsll(met) - 1) / kLog2Fan, kLevels);
  }

  // The node of a slot, -1 if none, and its level. Slots are in the order of the rows that their nodes stand for.
  __device__ __forceinline__ static int64_t in_slot(int64_t number, int slot, int& level) {
    level = kLevels - (slot + kOthers - 1) / kOthers;
    const int64_t own = number >> level * kLog2Fan;
    if (slot == 0) return own - 1;
    const int before = int(own & kOthers), i = (slot - 1) % kOthers;
    return i < before ? own - before + i : -1;
  }

  // A node is kept at the position of its first row. Nodes of a level that others join have as many rows as each other, but
  // for one with the end of a segment, before which the next segment has a chunk that is in none: so each has a place.
  __device__ __forceinline__ int64_t place(const LongChunk& chunk, int level, int64_t node) const {
    const int log2_chunks = level * kLog2Fan, log2_chunk = args.shape.log2_chunk;
    const int64_t first = args.call.reverse ? chunk.chunks - ((node + 1) << log2_chunks) : node << log2_chunks;
    const int64_t row = args.level_begin[level] + ((chunk.begin + (first << log2_chunk)) >> (log2_chunk + log2_chunks));
    return row * args.call.inner + column;
  }
  // Nodes are read and written in as few parts as can be, each of which is next to that of the next column, and past the
  // first cache, which knows nothing of other blocks.
  using Part = std::conditional_t<sizeof(State) % 16 == 0, uint4, std::conditional_t<sizeof(State) % 8 == 0, uint2, unsigned>>;
  static constexpr int kParts = sizeof(State) / sizeof(Part);
  struct Parts {
    Part part[kParts];
  };
  __device__ __forceinline__ State get(int64_t place, int in_tile) const {
    const Part* const from = static_cast<const Part*>(args.nodes) + place + in_tile;
    Parts parts;
#pragma unroll
    for (int i = 0; i < kParts; ++i) parts.part[i] = __ldcg(from + i * args.num_nodes);
    return bit_cast<State>(parts);
  }
  __device__ __forceinline__ void put(int64_t place, int in_tile, const State& state) const {
    Part* const to = static_cast<Part*>(args.nodes) + place + in_tile;
    const Parts parts = bit_cast<Parts>(state);
#pragma unroll
    for (int i = 0; i < kParts; ++i) __stcg(to + i * args.num_nodes, parts.part[i]);
  }

  // The unit that makes a node, -1 if there is nothing to wait for: it is this one, or offsets do not ascend.
  __device__ __forceinline__ int64_t maker(const LongChunk& chunk, int level, int64_t node) const {
    const int64_t end = (node + 1) << level * kLog2Fan, last = args.call.reverse ? chunk.chunks - end : end - 1;
    const int64_t made_by = (chunk.key + (last << args.shape.log2_chunk)) / args.shape.keys;
    return (args.call.reverse ? made_by > unit : made_by < unit) ? made_by : -1;
  }
  // What was written before it was published can be read after this, by the whole block behind a barrier.
  __device__ __forceinline__ void await(int64_t maker, int level) const {
#ifdef __HIP_PLATFORM_AMD__
    while (__hip_atomic_load(progress + maker, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT) <= level) {
    }
#else
    const ::cuda::atomic_ref<int, ::cuda::thread_scope_device> made(progress[maker]);
    while (made.load(::cuda::memory_order_acquire) <= level) {
    }
#endif
  }
  // By one thread, behind a barrier after which all have written theirs.
  __device__ __forceinline__ void publish(int levels) const {
#ifdef __HIP_PLATFORM_AMD__
    __hip_atomic_store(progress + unit, levels, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
#else
    ::cuda::atomic_ref<int, ::cuda::thread_scope_device>(progress[unit]).store(levels, ::cuda::memory_order_release);
#endif
  }

  // What the nodes in slots from the first one on come to, to the first of kJoinLanes lanes; whether there are any.
  __device__ __forceinline__ bool join(const int64_t* places, int first_slot, int in_tile, State& state) const {
    constexpr int kLanes = ScanPolicy::kJoinLanes, kHeld = kSlots / kLanes;
    static_assert(kSlots % kLanes == 0);
    const int lane = threadIdx.x % kLanes;
    const unsigned mask = ((1u << kLanes) - 1) << (threadIdx.x % 32 - lane);
    State held[kHeld];
    bool is_held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t place = places[lane * kHeld + i];
      is_held[i] = place >= 0 && lane * kHeld + i >= first_slot;
      if (is_held[i]) held[i] = get(place, in_tile);
    }
    bool has = false;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (is_held[i]) state = has ? met(state, held[i], args.call.reverse) : held[i];
      has |= is_held[i];
    }
#pragma unroll
    for (int by = 1; by < kLanes; by *= 2) {
      const State after = shuffled(state, [&](uint32_t word) { return __shfl_down_sync(mask, word, by, kLanes); });
      if (__shfl_down_sync(mask, int(has), by, kLanes)) {
        state = has ? met(state, after, args.call.reverse) : after;
        has = true;
      }
    }
    return has;
  }
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
  __device__ __forceinline__ V see(V value) const {
    if constexpr (S::kHasRow) return mirrored(value, call.kind == Scan::min);
    return value;
  }

  // Row i; those after it are stepped to, which takes less than to find each.
  struct Cursor {
    V* x;
    const V* factor;
    int64_t* number;
  };
  __device__ __forceinline__ Cursor row(int i) const {
    const int place = first_place + i * step;
    return {x + place, factors + place, numbers + place};
  }
  __device__ __forceinline__ void advance(Cursor& at) const {
    at.x += step;
    if constexpr (S::kIsLinear) at.factor += step;
    if constexpr (S::kHasRow) at.number += step;
  }
  __device__ __forceinline__ State get(const Cursor& at) const {
    if constexpr (S::kIsLinear) {
      return State::of(*at.x, *at.factor);
    } else if constexpr (S::kHasRow) {
      return State::of(see(*at.x), *at.number);
    } else {
      return State::of(*at.x, 0);
    }
  }
  __device__ __forceinline__ void put(const Cursor& at, const State& state) const {
    *at.x = see(V(state.value(1)));
    if constexpr (S::kHasRow) *at.number = state.row;
  }
  __device__ __forceinline__ void put_nothing(const Cursor& at) const {
    *at.x = load_as<V>(nothing<typename S::Out, V>(call.kind, call.dtype));
    if constexpr (S::kHasRow) *at.number = -1;
  }

  // What rows [first, last) come to.
  __device__ __forceinline__ State total(int first, int last) const {
    Cursor at = row(first);
    if constexpr (kTwice<State>) {
      V joined = State::start(*at.x, V{}), sum{};
#pragma unroll 4
      for (int i = first + 1; i < last; ++i) {
        advance(at);
        joined = State::lead(joined, State::start(*at.x, V{}));
      }
      const V from = State::settle(joined, last - first);
      at = row(first);
#pragma unroll 4
      for (int i = first; i < last; ++i) {
        sum += State::term(*at.x, V{}, from);
        advance(at);
      }
      return State::part(from, sum, last - first);
    } else {
      State state = get(at);
#pragma unroll 4
      for (int i = first + 1; i < last; ++i) {
        advance(at);
        state = met(state, get(at), call.reverse);
      }
      return state;
    }
  }

  // Results of rows [first, last), given what is known before them, if anything.
  __device__ __forceinline__ void write(int first, int last, bool is_known, State state) const {
    Cursor at = row(first);
    int i = first;
    if (!is_known && i < last) {
      state = get(at);
      if (call.exclusive) {
        put_nothing(at);
      } else {
        put(at, state);
      }
      advance(at);
      ++i;
    }
#pragma unroll 4
    for (; i < last; ++i) {
      const State before = state;
      state = met(state, get(at), call.reverse);
      put(at, call.exclusive ? before : state);
      advance(at);
    }
  }

  // The same by a team of lanes, each with a run of rows. Runs of an odd number begin in different banks.
  __device__ __forceinline__ int run(int log2_team) const { return ((n + (1 << log2_team) - 1) >> log2_team) | 1; }

  // What the rows up to the last one of a lane come to.
  __device__ __forceinline__ State through(int lane, int log2_team, unsigned mask) const {
    const int team = 1 << log2_team, first = lane * run(log2_team), last = min(first + run(log2_team), n);
    State state{};
    if (first < last) state = total(first, last);
#pragma unroll 1
    for (int by = 1; by < team; by *= 2) {
      const State before = shuffled(state, [&](uint32_t word) { return __shfl_up_sync(mask, word, by, team); });
      if (lane >= by && first < last) state = met(before, state, call.reverse);
    }
    return state;
  }
  __device__ __forceinline__ bool has_last(int lane, int log2_team) const {
    return lane * run(log2_team) < n && (lane + 1) * run(log2_team) >= n;
  }

  __device__ __forceinline__ void share(int lane, int log2_team, unsigned mask, const State& through, bool is_known,
                                        const State& known) const {
    const int first = lane * run(log2_team), last = min(first + run(log2_team), n);
    State before = shuffled(through, [&](uint32_t word) { return __shfl_up_sync(mask, word, 1, 1 << log2_team); });
    if (is_known) before = lane > 0 ? met(known, before, call.reverse) : known;
    if (first < last) write(first, last, is_known || lane > 0, before);
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
  using Nodes = Nodes<State>;
  constexpr int kLevels = Nodes::kLevels, kSlots = Nodes::kSlots, kJoin = ScanPolicy::kJoinLanes;
  static_assert(ScanPolicy::kLongRoom * kSlots <= kThreads);
  struct Work {
    TileEdges edges;
    int64_t unit;
    int num_listed[kTeams];  // chunks for teams of each size
    int num_long;
    unsigned makes;  // levels above 0 of the nodes that the long chunks make, a bit each
    LongChunk long_chunks[ScanPolicy::kLongRoom];
    int64_t before[ScanPolicy::kLongRoom][kSlots];  // places of the nodes before each of them, -1 where there is none
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
  State* const known = reinterpret_cast<State*>(shared + args.known_offset);

  // What only some threads do begins at other warps than the first, which has found the tile.
  const int from_second = (threadIdx.x + kThreads - 32) % kThreads, from_last = threadIdx.x ^ (kThreads - 32);
  const ScanCall& call = args.call;
  const T* const data = static_cast<const T*>(call.data);
  const T* const factor_data = static_cast<const T*>(call.factors);
  Out* const out = static_cast<Out*>(call.out);
  const int columns = shape.columns, stride = shape.stride, chunk = shape.chunk, log2_chunk = shape.log2_chunk;
  const int64_t behind = call.segments.num_positions - call.segments.clamped(call.segments.num_segments);
#pragma unroll 1
  for (int64_t column = int64_t(blockIdx.y) * columns; column < call.inner; column += int64_t(gridDim.y) * columns) {
    if (behind > 0) {
      fill_behind<ScanArgs, T, kVec>(args, behind, column, out, Out{});
      if constexpr (S::kHasRow) fill_behind<ScanArgs, T, kVec>(args, behind, column, call.rows, int64_t(-1));
    }
#pragma unroll 1
    for (int64_t turn = blockIdx.x; turn < args.units; turn += gridDim.x) {
      __syncthreads();  // the tile before is done with shared memory
      if (threadIdx.x < 2 * kSearch) {
        int64_t taken = turn;
        if (args.turns && threadIdx.x == 0) taken = int64_t(atomicAdd(args.turns + column / columns, 1ull));
        if (args.turns) taken = __shfl_sync((1u << 2 * kSearch) - 1, taken, 0);
        const int64_t unit = call.reverse ? args.units - 1 - taken : taken;
        TileEdges found;
        if (args.stack.find_tile<kSearch>(unit, shape.keys, chunk, found)) {
          work.edges = found;
          work.unit = unit;
          for (int size = 0; size < kTeams; ++size) work.num_listed[size] = 0;
          work.num_long = work.makes = 0;
          starts[0] = 0;
        }
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
      const Nodes nodes(args, column, work.unit);
      // Lists the chunks of a long segment of the tile, in any order. More than there is room for, or with a wrong number,
      // only where offsets do not ascend.
      const auto list_long = [&](int i, int start, int n) {
        LongChunk own{};
        int64_t length = 0;
        args.stack.find_segment(first_segment + i, own.begin, length);
        own.key = own.begin + first_segment + i;
        own.chunks = (length + chunk - 1) >> log2_chunk;
        const int64_t before = (first_position + start - own.begin) >> log2_chunk;
#pragma unroll 1
        for (int c = 0; c << log2_chunk < n; ++c) {
          const int entry = atomicAdd(&work.num_long, 1);
          if (entry >= args.long_room) continue;
          own.number = call.reverse ? own.chunks - 1 - before - c : before + c;
          if (uint64_t(own.number) >= uint64_t(own.chunks)) own.number = own.chunks = 0;
          own.start = start + (c << log2_chunk);
          own.rows = min(chunk, n - (c << log2_chunk));
          own.makes = Nodes::made_by(own.number, own.chunks);
          own.place = nodes.place(own, 0, own.number);
          work.long_chunks[entry] = own;
          if (own.makes > 0) atomicOr(&work.makes, 1u << own.makes);
        }
      };
#pragma unroll 1
      for (int item = from_last; item < count * columns; item += kThreads) {
        const int i = shape.by_columns(item), in_tile = item - i * columns;
        const int start = start_of(i), n = starts[i + 1] - start;
        if (!is_whole(i) || n > chunk) {
          if (in_tile == 0) list_long(i, start, n);
        } else if (n > shape.run) {
          if (in_tile == 0) list_chunks(shape, work.num_listed, list_of, i, n);
        } else if (n > 0 && in_tile < pieces.width) {
          rows_of(start, n, in_tile).write(0, n, false, State{});
        }
      }
      if (behind > 0) {  // the tile may have rows that belong to no segment
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
      __syncthreads();

      const int num_long = args.turns ? min(work.num_long, args.long_room) : 0;
      const int own_slot = from_last % kSlots;
      const LongChunk& waiting = work.long_chunks[from_last / kSlots];
      int awaited_level = 0;
      int64_t awaited = -1;
      if (from_last < num_long * kSlots) {
        const int64_t node = Nodes::in_slot(waiting.number, own_slot, awaited_level);
        if (node >= 0) awaited = nodes.maker(waiting, awaited_level, node);
        work.before[from_last / kSlots][own_slot] = node < 0 ? -1 : nodes.place(waiting, awaited_level, node);
      }
      // The next level above one of which there are nodes to be made.
      const auto next_level = [&](int level) {
        const unsigned above = work.makes & (~0u << (level + 1));
        return above == 0 ? kLevels + 1 : __ffs(above) - 1;
      };
      const auto rows_of_long = [&](const LongChunk& own, int in_tile) { return rows_of(own.start, own.rows, in_tile); };
      const int log2_lanes = args.log2_lanes, long_step = kThreads >> log2_lanes, long_items = num_long * columns;
      const int long_lane = threadIdx.x & ((1 << log2_lanes) - 1);
      const unsigned long_mask = (0xffffffffu >> (32 - (1 << log2_lanes))) << (threadIdx.x % 32 - long_lane);
      State through{};  // of the last item
      int long_item = from_second >> log2_lanes;
#pragma unroll 1
      for (; long_item < long_items; long_item += long_step) {
        const int entry = shape.by_columns(long_item), in_tile = long_item - entry * columns;
        if (in_tile >= pieces.width) continue;
        const LongChunk& own = work.long_chunks[entry];
        const auto of = rows_of_long(own, in_tile);
        through = of.through(long_lane, log2_lanes, long_mask);
        if (own.makes >= 0 && of.has_last(long_lane, log2_lanes)) nodes.put(own.place, in_tile, through);
      }
      if (args.turns) {
        __syncthreads();
        if (from_last == 0) nodes.publish(next_level(0));
      }

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
            const int i = list_of(size)[entry] / kTileChunks, start = start_of(i);
            const auto own = rows_of(start, starts[i + 1] - start, in_tile);
            own.share(lane, log2_team, mask, own.through(lane, log2_team, mask), false, State{});
          }
        }
      }

      if (num_long > 0) {
        // Nodes of lower levels are made first, for those of higher ones and for what is known before the chunks. In each
        // of them the slots of lower levels are full.
        int level = 0;
        do {
          level = next_level(level);
          const bool all = level > kLevels;
          const int first_slot = level >= kLevels ? 0 : kSlots - level * Nodes::kOthers;
          if (awaited >= 0 && own_slot >= first_slot && (all || waiting.makes == level)) nodes.await(awaited, awaited_level);
          __syncthreads();
          const int from_idle = (from_second - (long_items << log2_lanes)) & (kThreads - 1);
#pragma unroll 1
          for (int item = from_idle / kJoin; item < long_items; item += kThreads / kJoin) {
            const int entry = shape.by_columns(item), in_tile = item - entry * columns;
            const LongChunk& own = work.long_chunks[entry];
            if (in_tile >= pieces.width || !(all || own.makes == level)) continue;
            State before{};
            const bool is_known = nodes.join(work.before[entry], first_slot, in_tile, before);
            if (threadIdx.x % kJoin > 0) continue;
            if (all) known[item] = before;
            if (own.makes != level) continue;
            const State last = nodes.get(own.place, in_tile);
            nodes.put(nodes.place(own, level, own.number >> level * Nodes::kLog2Fan), in_tile,
                      is_known ? met(before, last, call.reverse) : last);
          }
          __syncthreads();
          if (from_last == 0 && level <= kLevels) nodes.publish(next_level(level));
        } while (level <= kLevels);
        // The item that came last is at hand.
#pragma unroll 1
        for (int item = long_item - long_step; item >= 0; item -= long_step) {
          const int entry = shape.by_columns(item), in_tile = item - entry * columns;
          if (in_tile >= pieces.width) continue;
          const LongChunk& own = work.long_chunks[entry];
          const auto of = rows_of_long(own, in_tile);
          if (item + long_step < long_item) through = of.through(long_lane, log2_lanes, long_mask);
          of.share(long_lane, log2_lanes, long_mask, through, own.number > 0, known[item]);
        }
      }
      __syncthreads();

#pragma unroll 2
      for (auto cursor = pieces.first(); cursor.piece < pieces.end; pieces.advance(cursor)) {
        Out results[kVec];
        read_shared(x + pieces.to(cursor), results);
        store_pack(out + pieces.in_data(cursor), results);
      }
      if (edge >= 0) out[pieces.at + edge] = store_as<Out>(x[edge]);
      if constexpr (S::kHasRow) {  // 16 bytes for each thread, too, so that sectors are written as a whole
        constexpr int kPair = kVec == 1 ? 1 : 2;
        const Pieces<ScanArgs, T, kPair> pairs(args, first_position, rows, column);
#pragma unroll 2
        for (auto cursor = pairs.first(); cursor.piece < pairs.end; pairs.advance(cursor)) {
          int64_t own[kPair];
#pragma unroll
          for (int e = 0; e < kPair; ++e) own[e] = numbers[pairs.to(cursor) + e];
          store_pack(call.rows + pairs.in_data(cursor), own);
        }
        if (const int pair_edge = pairs.edge(); pair_edge >= 0) call.rows[pairs.at + pair_edge] = numbers[pair_edge];
      }
    }
  }
}

// How a call is run. The workspace holds turns and progress, which begin at 0, and nodes.
template <class Types>
struct ScanRows {
  using S = Scanned<Types>;
  using T = typename S::T;
  using State = typename S::State;

  ScanArgs args{};
  bool vectors;
  size_t shared_bytes, progress_bytes = 0;
  int64_t column_tiles;

  explicit ScanRows(const ScanCall& call) {
    args.call = call;
    args.stack = {call.segments, call.outer};
    TileShape<ScanPolicy>& shape = args.shape;
    shape.set<T, typename S::V>(call.inner, S::kArrays, bool(call.segments.order));
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; };
    vectors = aligned(call.data) && aligned(call.factors) && aligned(call.out) && aligned(call.rows) &&
              (shape.linear || (call.inner % S::kVec == 0 && shape.columns % S::kVec == 0));
    args.units = ceil_div(args.stack.num_keys(), shape.keys);
    column_tiles = ceil_div(call.inner, shape.columns);
    shared_bytes = shape.bytes;
    if (call.segments.num_positions <= shape.chunk) return;
    args.log2_lanes = ScanPolicy::kMinLog2Lanes;
    while (args.log2_lanes < 5 && shape.columns << (args.log2_lanes + 1) <= ScanPolicy::kThreads / 2) ++args.log2_lanes;
    args.long_room = int(std::min<int64_t>(2 * ceil_div(shape.keys, shape.chunk), ScanPolicy::kLongRoom));
    args.known_offset = int(ceil_div(shape.bytes, 16) * 16);
    shared_bytes = args.known_offset + args.long_room * shape.columns * sizeof(State);
    progress_bytes = column_tiles * (sizeof(*args.turns) + args.units * sizeof(*args.progress));
    progress_bytes = ceil_div(progress_bytes, 16) * 16;
    int64_t nodes = 0;
    for (int level = 0; level <= ScanPolicy::kLevels; ++level) {
      args.level_begin[level] = nodes;
      nodes += ceil_div(args.stack.num_positions(), int64_t(shape.chunk) << level * ScanPolicy::kLog2Fan);
    }
    args.num_nodes = nodes * call.inner;
  }

  size_t workspace() const { return progress_bytes + args.num_nodes * sizeof(State); }

  void run(void* workspace, cudaStream_t stream) {
    if (progress_bytes > 0) {
      check(cudaMemsetAsync(workspace, 0, progress_bytes, stream));
      args.turns = static_cast<unsigned long long*>(workspace);
      args.progress = reinterpret_cast<int*>(args.turns + column_tiles);
      args.nodes = static_cast<unsigned char*>(workspace) + progress_bytes;
    }
    if (vectors) {
      launch<S::kVec>(stream);
    } else {
      launch<1>(stream);
    }
  }

  template <int kWidth>
  void launch(cudaStream_t stream) {
    const dim3 grid(blocks_for(args.units, 1), blocks_along_y(column_tiles));
    scan_kernel<Types, kWidth><<<grid, ScanPolicy::kThreads, shared_bytes, stream>>>(args);
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
