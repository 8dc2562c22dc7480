// What each row receives from its segment (gradients.h).
//
// Rows in order are walked segment by segment in equal ranges of keys (segments.h), so that the values of a segment are
// read once and all rows are written once, in order. Rows out of order are written one after the other and look up
// their segment, which makes the values the random access and keeps the writes, the larger part, in order. Bytes
// moved for each element: sizeof(T), twice that for maps that read the data.
#include <cuda_runtime.h>

#include <cub/block/block_scan.cuh>
#include <type_traits>
#include <utility>

#include "cuda/launch.cuh"
#include "cuda/stacked.cuh"
#include "cuda/vectors.cuh"
#include "dispatch.h"
#include "kernels.h"

namespace fastops::cuda {
namespace {

struct MovePolicy {
  // And at least one block: without that promise the compiler spills a few registers to fit one block more.
  static constexpr int kThreads = 128;
  static constexpr int kWideKeys = 64;   // guess: keys that a group of lanes walks
  static constexpr int kRowsAtOnce = 4;  // guess: rows that a group of lanes has in flight
  // Rows in order of fewer bytes than a sector of memory go through shared memory: bytes of it, or rows of less than a
  // word, that a block holds, and rows that one thread writes. Guesses, as much as a reduction holds.
  static constexpr int kNarrowBytes = 32;
  static constexpr int kNarrowThreads = 128;
  static constexpr int kSearchLanes = 8;
  static constexpr int kTileBytes = 16384;
  static constexpr int kTileRows = 8192;
  static constexpr int kRun = 32;
  static constexpr int kDotRows = 1024;  // guess: rows of a tile of dot_kernel at most
};

struct MoveArgs {
  RowMapCall call;
  StackedSegments stack;
  int64_t units;      // ranges or tiles
  int keys;           // of a range or tile
  int lanes;          // of a group
  int starts_offset;  // narrow: bytes of shared memory before the starts of segments,
  int list_offset;    // and before the list of pieces
};

// The maps of kVec neighbouring columns of a segment. They are made from registers, because one column at a time would
// read memory in pieces of an element.
template <class M, class T, int kVec>
struct Maps {
  static constexpr bool kHasExtra =
      std::is_same_v<M, SelectMap<T>> || std::is_same_v<M, ExtremumMap<T>> || std::is_same_v<M, ProductMap<T>>;
  static constexpr bool kHasResult = M::kReadsData && !std::is_same_v<M, ElementwiseMap<T>>;
  using Value = typename MapTypes<M, T>::Value;
  using Result = typename MapTypes<M, T>::Result;
  struct Columns {
    Value values[kVec];
    Result result[kVec];
    int64_t extra[kVec];
    double correction;
    RowWeights weights;
    __device__ __forceinline__ Columns(const RowMapArrays& arrays, int64_t at) {
      load_elements(static_cast<const Value*>(arrays.values) + at, values);
      correction = arrays.correction;
      weights = arrays.weights;
      if constexpr (kHasResult) load_elements(static_cast<const Result*>(arrays.result) + at, result);
      if constexpr (kHasExtra) load_elements(arrays.extra + at, extra);
    }
  };

  M maps[kVec];
  __device__ __forceinline__ Maps(const RowMapArrays& arrays, int64_t at, int64_t column, int64_t length)
      : Maps(Columns(arrays, at), column, length, std::make_integer_sequence<int, kVec>{}) {}
  template <int... e>
  __device__ __forceinline__ Maps(const Columns& columns, int64_t column, int64_t length, std::integer_sequence<int, e...>)
      : maps{M({columns.values, columns.result, columns.extra, columns.correction, columns.weights}, e, column + e, length)...} {}

  // kRows rows, which stand `inner` elements apart. All are read before the first is written, so that they are in
  // flight together.
  template <int kRows>
  __device__ __forceinline__ void write(const RowMapCall& call, int64_t at, int64_t row) const {
    T x[kRows][kVec] = {};
    if constexpr (M::kReadsData) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) load_elements(static_cast<const T*>(call.data) + at + r * call.inner, x[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int e = 0; e < kVec; ++e) x[r][e] = maps[e](x[r][e], row + r);
      store_pack(static_cast<T*>(call.out) + at + r * call.inner, x[r]);
    }
  }
};

// Rows in order, of a sector or more. A group of lanes walks a range of keys, each lane with kVec columns:
//
//     columns ->    | lane 0 | lane 1 | ... | lane G - 1 |     next group of lanes or blockIdx.y
//     range 0       rows of one segment after the other
//     range 1       the next group
template <class M, class T, int kVec>
__global__ void __launch_bounds__(MovePolicy::kThreads, 1) map_wide_kernel(const __grid_constant__ MoveArgs args) {
  constexpr int kRows = MovePolicy::kRowsAtOnce;
  const SegmentsView& segments = args.stack.one;
  const int64_t inner = args.call.inner;
  const int group = threadIdx.x / args.lanes, lane = threadIdx.x % args.lanes, groups = blockDim.x / args.lanes;
#pragma unroll 1
  for (int64_t tile = blockIdx.y; tile * args.lanes * kVec < inner; tile += gridDim.y) {
    const int64_t column = (tile * args.lanes + lane) * kVec;
    if (column >= inner) continue;
#pragma unroll 1
    for (int64_t unit = int64_t(blockIdx.x) * groups + group; unit < args.units; unit += int64_t(gridDim.x) * groups) {
      const Place place = args.stack.find(unit * args.keys, 1);
      int64_t slice = place.slice, segment = place.segment, begin = place.begin, first = place.first;
      // Keys until the end of the range, and of segments: offsets that descend must not make it longer.
      int64_t stop = (unit + 1) * args.keys - slice * args.stack.keys_of_slice(), last = segment + args.keys;
#pragma unroll 1
      for (; slice < args.stack.outer; ++slice) {
        last = min(last, segments.num_segments);
#pragma unroll 1
        while (segment < last && begin + segment + first < stop) {
          const int64_t next = segments.begin(segment + 1), length = next - begin;
          const int rows = int(max(int64_t(0), min(length - first, stop - (begin + segment + first))));
          if (rows > 0) {
            const Maps<M, T, kVec> maps(args.call.arrays, (slice * segments.num_segments + segment) * inner + column,
                                        column, length);
            const int64_t row = begin + first;
            int64_t at = (slice * segments.num_rows + row) * inner + column;
            int r = 0;
#pragma unroll 1
            for (; r + kRows <= rows; r += kRows, at += kRows * inner)
              maps.template write<kRows>(args.call, at, row + r);
#pragma unroll 1
            for (; r < rows; ++r, at += inner) maps.template write<1>(args.call, at, row + r);
          }
          if (rows < length - first) break;
          first = 0;
          begin = next;
          ++segment;
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

// Rows out of order, of any width. A group of lanes writes kRowsAtOnce consecutive rows, each lane kVec columns.
template <class M, class T, int kVec>
__global__ void __launch_bounds__(MovePolicy::kThreads, 1) map_ordered_kernel(const __grid_constant__ MoveArgs args) {
  constexpr int kRows = MovePolicy::kRowsAtOnce;
  const SegmentsView& segments = args.stack.one;
  const int64_t inner = args.call.inner, num_rows = args.stack.outer * segments.num_rows;
  const int group = threadIdx.x / args.lanes, lane = threadIdx.x % args.lanes, groups = blockDim.x / args.lanes;
#pragma unroll 1
  for (int64_t tile = blockIdx.y; tile * args.lanes * kVec < inner; tile += gridDim.y) {
    const int64_t column = (tile * args.lanes + lane) * kVec;
    if (column >= inner) continue;
#pragma unroll 1
    for (int64_t unit = blockIdx.x; unit < args.units; unit += gridDim.x) {
      // The groups of a block write neighbouring rows at a time, so that narrow rows make whole sectors.
      const auto row_at = [&](int k) { return (unit * kRows + k) * groups + group; };
      int64_t of_row[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int64_t stacked = row_at(k), slice = args.stack.slice_of(stacked, segments.num_rows);
        of_row[k] = stacked < num_rows ? segments.index[stacked - slice * segments.num_rows] : 0;
      }
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const int64_t stacked = row_at(k), at = stacked * inner + column, segment = of_row[k];
        if (stacked >= num_rows) continue;
        if (uint64_t(segment) < uint64_t(segments.num_segments)) {
          const int64_t slice = args.stack.slice_of(stacked, segments.num_rows);
          const int64_t begin = segments.begin(segment), length = segments.end(segment, begin) - begin;
          const Maps<M, T, kVec> maps(args.call.arrays, (slice * segments.num_segments + segment) * inner + column,
                                      column, length);
          maps.template write<1>(args.call, at, stacked - slice * segments.num_rows);
        } else {
          const T zeros[kVec] = {};
          store_pack(static_cast<T*>(args.call.out) + at, zeros);
        }
      }
    }
  }
}

// Pieces that a tile can have: their segments have more than kRun rows, but for the two that the tile cuts.
FASTOPS_HD int piece_room(int keys) {
  return 2 * (keys / MovePolicy::kRun + 1);
}

// Bytes that follow each line of 128 bytes of a tile.
template <class T>
constexpr int kTileUnit = sizeof(T) < 4 ? 4 : sizeof(T);

// Rows in order, of less than a sector. A block takes the rows with keys in one tile, which follow each other:
//
//     short    thread 0     thread 1            segments of at most kRun rows, each column, written to shared memory
//     long     thread 0     thread 1   ...      pieces of kRun rows of others
//     memory   | 16 bytes | 16 bytes | ...      then all of it, 16 bytes for each thread
//
// Maps that read the data find it where they write, brought in the same way.
template <class M, class T>
__global__ void __launch_bounds__(MovePolicy::kNarrowThreads, 1)
    map_narrow_kernel(const __grid_constant__ MoveArgs args) {
  constexpr int kThreads = MovePolicy::kNarrowThreads, kSearch = MovePolicy::kSearchLanes, kRun = MovePolicy::kRun;
  constexpr int kPieces = 512;  // more than a tile has of one segment
  const int room = piece_room(args.keys);
  constexpr int kStep = kThreads * kVectorBytes;
  struct Work {
    TileEdges edges;
    int num_pieces;
  };
  __shared__ Work work;
  extern __shared__ uint4 dynamic[];
  unsigned char* const tile = reinterpret_cast<unsigned char*>(dynamic);
  uint16_t* const starts = reinterpret_cast<uint16_t*>(tile + args.starts_offset);  // first row of each segment
  int* const pieces = reinterpret_cast<int*>(tile + args.list_offset);

  const SegmentsView& segments = args.stack.one;
  const int inner = int(args.call.inner), row_bytes = inner * int(sizeof(T));
  // Threads write runs that often begin a power of two apart, which would be the same bank for all of them.
  const auto padded = [&](unsigned byte) { return tile + byte + byte / 128 * kTileUnit<T>; };
#pragma unroll 1
  for (int64_t unit = blockIdx.x; unit < args.units; unit += gridDim.x) {
    __syncthreads();  // the tile before is done with shared memory
    TileEdges found;
    if (threadIdx.x < 2 * kSearch && args.stack.find_tile<kSearch>(unit, args.keys, 1, found)) {
      work = {found, 0};
      starts[0] = 0;
    }
    __syncthreads();
    const int count = work.edges.count, rows = min(work.edges.rows, args.keys);
    const int64_t first_segment = work.edges.segment, first_position = work.edges.position;
    args.stack.find_ends(work.edges, rows, starts);

    // Bytes of the tile are counted from the 128-byte line of the output in which its first row begins.
    unsigned char* const line = static_cast<unsigned char*>(args.call.out) + first_position * row_bytes;
    const int shift = int(reinterpret_cast<uintptr_t>(line) % 128), stop = shift + rows * row_bytes;
    const int first = (shift + kVectorBytes - 1) & -kVectorBytes, last = stop & -kVectorBytes;
    int own = threadIdx.x * kVectorBytes;
    if (own < first) own += kStep;
    // The element before the first vector or behind the last one that is this thread's, if there is one.
    const bool before = threadIdx.x < kVectorBytes;
    const int edge = (before ? shift : max(last, first) - kVectorBytes * int(sizeof(T))) + int(threadIdx.x * sizeof(T));
    const bool has_edge = threadIdx.x < 2 * kVectorBytes && edge < (before ? min(first, stop) : stop);

    if constexpr (M::kReadsData) {
      const unsigned char* const data =
          static_cast<const unsigned char*>(args.call.data) + (first_position * row_bytes - shift);
      if (reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0) {
#pragma unroll 4
        for (int at = own; at < last; at += kStep) {
          const uint4 x = *reinterpret_cast<const uint4*>(data + at);
          uint32_t* const words = reinterpret_cast<uint32_t*>(padded(at));
          words[0] = x.x;
          words[1] = x.y;
          words[2] = x.z;
          words[3] = x.w;
        }
        if (has_edge) *reinterpret_cast<T*>(padded(edge)) = *reinterpret_cast<const T*>(data + edge);
      } else {
#pragma unroll 4
        for (int at = shift + threadIdx.x * int(sizeof(T)); at < stop; at += kThreads * int(sizeof(T))) {
          *reinterpret_cast<T*>(padded(at)) = *reinterpret_cast<const T*>(data + at);
        }
      }
    }
    __syncthreads();

    const auto write_rows = [&](int i, int column, int start, int n) {
      const int64_t stacked = first_segment + i, slice = args.stack.slice_of(stacked, segments.num_segments);
      int64_t length = starts[i + 1] - starts[i];
      if (i < work.edges.whole_begin || i >= work.edges.whole_end) {
        const int64_t segment = stacked - slice * segments.num_segments, begin = segments.begin(segment);
        length = segments.end(segment, begin) - begin;
      }
      const M map(args.call.arrays, stacked * inner + column, column, length);
      const int64_t row = first_position + start - slice * segments.num_positions;
      int at = shift + start * row_bytes + column * int(sizeof(T));
#pragma unroll 4
      for (int r = 0; r < n; ++r, at += row_bytes) {
        T* const x = reinterpret_cast<T*>(padded(at));
        *x = map(M::kReadsData ? *x : T{}, row + r);
      }
    };
    const auto list_pieces = [&](int i, int first_piece, int step) {
      const int n = starts[i + 1] - starts[i];
#pragma unroll 1
      for (int p = first_piece; p * kRun < n; p += step) {
        const int entry = atomicAdd(&work.num_pieces, 1);   // in any order, for each is on its own
        if (entry < room) pieces[entry] = i * kPieces + p;  // or the offsets do not ascend
      }
    };
    // A segment that the tile cuts may be all of it: its pieces are listed by all threads.
    const int whole_begin = work.edges.whole_begin, whole_end = work.edges.whole_end;
    if (whole_begin > 0) list_pieces(0, threadIdx.x, kThreads);
    if (whole_end < count && whole_end >= whole_begin) list_pieces(count - 1, threadIdx.x, kThreads);
#pragma unroll 1
    for (int item = whole_begin * inner + threadIdx.x; item < whole_end * inner; item += kThreads) {
      const int i = inner == 1 ? item : item / inner, column = item - i * inner;
      const int start = starts[i], n = starts[i + 1] - start;
      if (n <= kRun) {
        if (n > 0) write_rows(i, column, start, n);
      } else if (column == 0) {
        list_pieces(i, 0, 1);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int item = threadIdx.x; item < min(work.num_pieces, room) * inner; item += kThreads) {
      const int entry = inner == 1 ? item : item / inner, column = item - entry * inner;
      const int i = pieces[entry] / kPieces, start = starts[i] + pieces[entry] % kPieces * kRun;
      write_rows(i, column, start, min(kRun, starts[i + 1] - start));
    }
    __syncthreads();

#pragma unroll 4
    for (int at = own; at < last; at += kStep) {
      const uint32_t* const words = reinterpret_cast<const uint32_t*>(padded(at));
      *reinterpret_cast<uint4*>(line - shift + at) = {words[0], words[1], words[2], words[3]};
    }
    if (has_edge) *reinterpret_cast<T*>(line - shift + edge) = *reinterpret_cast<const T*>(padded(edge));
  }
}

struct DotArgs {
  DotCall call;
  StackedSegments stack;  // of one slice
  int64_t units;          // tiles
  int keys;               // of a tile
  int lanes;              // of a row and head, a power of two
};

struct Later {
  __device__ __forceinline__ int operator()(int a, int b) const { return max(a, b); }
};

// Each row against its segment's values. A group of lanes takes a row and head after the other, consecutive groups
// consecutive ones:
//
//     columns of the head ->    | lane 0 | lane 1 | ... | lane G - 1 | lane 0 ...     then a tree, by shuffles
//
// The slices that share the weights are added up one after the other. Bytes moved: all of data, once.
template <class T, int kVec>
__global__ void __launch_bounds__(MovePolicy::kThreads, 1) dot_kernel(const __grid_constant__ DotArgs args) {
  using V = compute_t<T>;
  constexpr int kSearch = MovePolicy::kSearchLanes;
  const DotCall& call = args.call;
  const SegmentsView& segments = args.stack.one;
  const int64_t inner = call.inner, heads = call.heads, per_head = call.per_head;
  const int lanes = args.lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes, groups = blockDim.x / lanes;
  const unsigned members = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
  constexpr int kThreads = MovePolicy::kThreads, kEach = MovePolicy::kDotRows / kThreads;
  using Scan = cub::BlockScan<int, kThreads>;
  __shared__ TileEdges edges;
  __shared__ typename Scan::TempStorage scratch;
  __shared__ int of_row[MovePolicy::kDotRows];  // the segment of each row, counted from the tile's first
#pragma unroll 1
  for (int64_t unit = blockIdx.x; unit < args.units; unit += gridDim.x) {
    int64_t first_row = unit * args.keys;
    int rows = int(min(int64_t(args.keys), segments.num_rows - first_row));
    if (!segments.order) {
      __syncthreads();  // the tile before is done with shared memory
      TileEdges found;
      if (threadIdx.x < 2 * kSearch && args.stack.find_tile<kSearch>(unit, args.keys, 1, found)) {
        edges = found;
      }
      for (int r = threadIdx.x; r < args.keys; r += kThreads) of_row[r] = 0;
      __syncthreads();
      first_row = edges.position;
      rows = min(edges.rows, args.keys);
      // A segment's first row says so, and all others what the last one before them said.
      const auto end_of = [&](int i) { return max(int64_t(0), args.stack.end(edges.segment + i) - first_row); };
#pragma unroll 1
      for (int i = 1 + threadIdx.x; i < edges.count; i += kThreads) {
        const int64_t start = end_of(i - 1);
        if (start < rows && start < end_of(i)) atomicMax(of_row + start, i);
      }
      __syncthreads();
      int own[kEach];
      const int first = threadIdx.x * kEach;
#pragma unroll
      for (int k = 0; k < kEach; ++k) own[k] = first + k < rows ? of_row[first + k] : 0;
      Scan(scratch).InclusiveScan(own, own, Later{});
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (first + k < rows) of_row[first + k] = own[k];
      }
      __syncthreads();
    }
    const int64_t items = rows * heads;
#pragma unroll 1
    for (int64_t item = group; item < items; item += groups) {
      const int r = heads == 1 ? int(item) : items < UINT32_MAX ? int(uint32_t(item) / uint32_t(heads)) : int(item / heads);
      const int64_t row = first_row + r, head = item - r * heads;
      const int64_t segment = segments.order ? segments.index[row] : edges.segment + of_row[r];
      V total = 0;
      if (uint64_t(segment) < uint64_t(segments.num_segments)) {
#pragma unroll 1
        for (int64_t slice = 0; slice < call.outer; ++slice) {
          const V* const values = static_cast<const V*>(call.values) +
                                  (slice * segments.num_segments + segment) * inner + head * per_head;
          const T* const data =
              static_cast<const T*>(call.data) + (slice * segments.num_rows + row) * inner + head * per_head;
#pragma unroll 2
          for (int64_t column = lane * kVec; column < per_head; column += lanes * kVec) {
            T x[kVec];
            V value[kVec];
            load_elements(data + column, x);
            load_elements(values + column, value);
#pragma unroll
            for (int e = 0; e < kVec; ++e) total += value[e] * load_as<V>(x[e]);
          }
        }
      }
#pragma unroll 1
      for (int by = lanes / 2; by > 0; by /= 2) total += __shfl_down_sync(members, total, by);
      if (lane == 0) static_cast<V*>(call.out)[row * heads + head] = total;
    }
  }
}

template <class T, int kVec>
void run_dot(DotArgs& args, cudaStream_t stream) {
  const DotCall& call = args.call;
  args.lanes = 1;
  while (args.lanes < 32 && args.lanes * kVec < call.per_head) args.lanes *= 2;
  // Enough of them to be worth the search for the tile, and few enough for all of the device where rows are wide.
  constexpr int64_t kThreads = MovePolicy::kThreads;
  args.keys = int(std::clamp<int64_t>(8 * kThreads / (args.lanes * call.heads), 16, MovePolicy::kDotRows));
  args.units = ceil_div(call.segments.order ? call.segments.num_rows : args.stack.num_keys(), args.keys);
  dot_kernel<T, kVec><<<blocks_for(args.units, 1), kThreads, 0, stream>>>(args);
  check(cudaGetLastError());
}

template <class M, class T, int kVec = kVectorBytes / int(sizeof(T))>
struct MapRows {
  MoveArgs args{};

  explicit MapRows(const RowMapCall& call) {
    args.call = call;
    args.stack = {call.segments, call.outer};
  }

  void run(cudaStream_t stream) {
    const RowMapCall& call = args.call;
    const int64_t row_bytes = call.inner * int64_t(sizeof(T));
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; };
    const bool vectors = row_bytes % kVectorBytes == 0 && aligned(call.data) && aligned(call.out) &&
                         aligned(call.arrays.values) && aligned(call.arrays.result) && aligned(call.arrays.extra);
    if (call.segments.order) {
      if (vectors) {
        run_ordered<kVec>(stream);
      } else {
        run_ordered<1>(stream);
      }
    } else if (row_bytes < MovePolicy::kNarrowBytes) {
      run_narrow(stream);
    } else if (vectors) {
      run_wide<kVec>(stream);
    } else {
      run_wide<1>(stream);
    }
    check(cudaGetLastError());
  }

  // The lanes of a group and the groups of a block.
  int set_lanes(int vec) {
    args.lanes = int(std::min<int64_t>(MovePolicy::kThreads, ceil_div(args.call.inner, vec)));
    return MovePolicy::kThreads / args.lanes;
  }

  template <int kWidth>
  void run_wide(cudaStream_t stream) {
    const int groups = set_lanes(kWidth);
    args.keys = MovePolicy::kWideKeys;
    args.units = ceil_div(args.stack.num_keys(), args.keys);
    const dim3 grid(blocks_for(args.units, groups),
                    blocks_along_y(ceil_div(args.call.inner, int64_t(args.lanes) * kWidth)));
    map_wide_kernel<M, T, kWidth><<<grid, groups * args.lanes, 0, stream>>>(args);
  }

  template <int kWidth>
  void run_ordered(cudaStream_t stream) {
    const int groups = set_lanes(kWidth);
    args.units = ceil_div(args.call.outer * args.call.segments.num_rows, int64_t(groups) * MovePolicy::kRowsAtOnce);
    const dim3 grid(blocks_for(args.units, 1), blocks_along_y(ceil_div(args.call.inner, int64_t(args.lanes) * kWidth)));
    map_ordered_kernel<M, T, kWidth><<<grid, groups * args.lanes, 0, stream>>>(args);
  }

  void run_narrow(cudaStream_t stream) {
    const int row_bytes = int(args.call.inner * sizeof(T)),
              padded = (MovePolicy::kTileBytes + 128) / 128 * kTileUnit<T>;
    args.keys = std::min(MovePolicy::kTileRows, MovePolicy::kTileBytes / row_bytes);
    args.units = ceil_div(args.stack.num_keys(), args.keys);
    args.starts_offset = MovePolicy::kTileBytes + 128 + padded;
    args.list_offset = args.starts_offset + (args.keys + 2) / 2 * 4;
    map_narrow_kernel<M, T><<<blocks_for(args.units, 1), MovePolicy::kNarrowThreads,
                              args.list_offset + piece_room(args.keys) * int(sizeof(int)), stream>>>(args);
  }
};

template <template <class> class Map>
void map_floating(const RowMapCall& call, cudaStream_t stream) {
  visit_floating(call.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    MapRows<Map<T>, T>(call).run(stream);
  });
}

void broadcast(const RowMapCall& call, int64_t row_bytes, cudaStream_t stream) {
  visit_unit(row_bytes, call.arrays.values, call.out, [&](auto unit) {
    using T = typename decltype(unit)::type;
    RowMapCall whole = call;
    whole.inner = row_bytes / int64_t(sizeof(T));
    MapRows<BroadcastMap<T>, T, 1>(whole).run(stream);
  });
}

}  // namespace

void map_rows(const RowMapCall& call, cudaStream_t stream) {
  const int64_t row_bytes = call.inner * size_of(call.dtype), rows = call.outer * call.segments.num_rows;
  if (rows * row_bytes == 0) return;
  if (call.segments.num_segments == 0) {  // no row belongs to a segment
    check(cudaMemsetAsync(call.out, 0, rows * row_bytes, stream));
    return;
  }
  switch (call.map) {
    case RowMap::broadcast:
      return broadcast(call, row_bytes, stream);
    case RowMap::weighted:
      if (call.arrays.weights.per_head == 1 && call.outer == 1) {
        RowMapCall elementwise = call;
        elementwise.data = call.arrays.weights.data;
        if (call.dtype == DType::f32) return MapRows<ElementwiseMap<float>, float>(elementwise).run(stream);
        if (call.dtype == DType::f64) return MapRows<ElementwiseMap<double>, double>(elementwise).run(stream);
      }
      return map_floating<WeightedMap>(call, stream);
    case RowMap::mean:
      return map_floating<MeanMap>(call, stream);
    case RowMap::select:
      return map_floating<SelectMap>(call, stream);
    case RowMap::extremum:
      return map_floating<ExtremumMap>(call, stream);
    case RowMap::prod:
      return map_floating<ProductMap>(call, stream);
    case RowMap::logsumexp:
      return map_floating<LogSumExpMap>(call, stream);
    case RowMap::variance:
      return map_floating<VarianceMap>(call, stream);
  }
  unsupported();
}

void dot_rows(const DotCall& call, cudaStream_t stream) {
  DotArgs args{};
  args.call = call;
  args.stack = {call.segments, 1};
  if (call.segments.num_segments == 0) {
    const int64_t bytes = call.segments.num_rows * call.heads * std::max<int64_t>(size_of(call.dtype), sizeof(float));
    return check(cudaMemsetAsync(call.out, 0, bytes, stream));
  }
  visit_floating(call.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    constexpr int kVec = kVectorBytes / int(sizeof(T));
    const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; };
    if (call.per_head % kVec == 0 && aligned(call.data) && aligned(call.values)) {
      run_dot<T, kVec>(args, stream);
    } else {
      run_dot<T, 1>(args, stream);
    }
  });
}

}  // namespace fastops::cuda
