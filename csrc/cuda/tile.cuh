// Tiles of rows and columns in shared memory, for kernels that read rows, work on them there and write as many: how they
// are cut, and the ways of their elements there and back.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/stacked.cuh"
#include "cuda/vectors.cuh"
#include "numeric.h"

namespace fastops::cuda {

constexpr int kTileThreads = 128;

// Dividing by a number known to the host, where the product of both is below 2^32.
struct Divider {
  unsigned by = 1, magic = 0;
  Divider() = default;
  explicit Divider(int by) : by(unsigned(by)), magic(unsigned(((uint64_t(1) << 32) + by - 1) / by)) {}
  __device__ __forceinline__ int operator()(int n) const { return by == 1 ? n : int(__umulhi(unsigned(n), magic)); }
};

// How rows are cut into tiles of rows and columns, and the shared memory of a tile: elements as they are computed with
// (twice where there are two of each), then starts of segments, then chunks for teams and for warps.
template <class Policy>
struct TileShape {
  int columns;
  int stride;  // elements from row to row
  int chunk;   // rows, a power of two
  int log2_chunk;
  int keys;
  int run, max_size;  // rows of a segment that one thread takes, and the largest size of a team
  bool linear;        // elements lie as in memory
  Divider by_columns;
  int array_bytes, starts_offset, list_offset[Policy::kTeams], bytes;
  __host__ __device__ int max_rows() const { return keys + chunk; }
  // A segment with a chunk in a list has more rows than smaller teams take, but for the two that the tile cuts.
  __host__ __device__ int list_room(int size) const {
    constexpr int kHeld = Policy::kHeld;
    const int smaller = size == 0 ? 0 : kHeld * kHeld << size >> 1;
    return size > max_size ? 0 : max_rows() / ((smaller > run ? smaller : run) + 1) + 3;
  }

  template <class T, class V>
  void set(int64_t inner, int arrays, bool ordered) {
    const int elements = Policy::kTileBytes / arrays / int(sizeof(V));
    const int sector = std::min(32 / int(sizeof(T)), elements / Policy::kMinChunk);
    const int most = elements / Policy::kMinChunk / sector * sector;
    const int64_t tiles = ceil_div(inner, most);
    columns = tiles == 1 ? int(inner) : int(ceil_div(ceil_div(inner, tiles), sector) * sector);
    // Eight rows of four columns are in different banks if rows are an odd number of 16 bytes apart.
    constexpr int kUnit = kVectorBytes / sizeof(V);
    stride = columns % (2 * kUnit) == 0 ? columns + kUnit : columns;
    linear = !ordered && tiles == 1 && stride == columns;
    chunk = Policy::kMinChunk;
    while (2 * chunk <= Policy::kMaxChunk && 4 * chunk * stride <= elements) chunk *= 2;
    while (1 << log2_chunk < chunk) ++log2_chunk;
    keys = std::max(Policy::kMinKeys, elements / stride);
    const bool narrow = columns < Policy::kNarrow;
    run = narrow ? Policy::kHeld : Policy::kWideRun;
    max_size = narrow ? Policy::kTeams - 1 : Policy::kWideSize;
    by_columns = Divider(columns);

    const int line = 128 / int(sizeof(T)), beyond = kVectorBytes / int(sizeof(T));
    array_bytes = int(ceil_div((line + max_rows() * stride + beyond) * int(sizeof(V)), 128) * 128);
    starts_offset = arrays * array_bytes;
    bytes = starts_offset + (keys + 3) / 2 * 4;
    for (int size = 0; size < Policy::kTeams; ++size) {
      list_offset[size] = bytes;
      bytes += list_room(size) * 4;
    }
  }
};

// Columns [column, column + width) of rows at the positions from `position` on, in pieces of kVec elements that are
// neighbours in memory and in shared memory. A thread takes every kThreads-th piece:
//
//     by rows    | piece | piece |   all that a row has, then the next row
//     linear     edge | piece | piece | edge     all rows as one, from the 128-byte line of memory in which they begin
//                                                on, so that requests are whole lines
template <class Args, class T, int kVec>
struct Pieces {
  static constexpr int kThreads = kTileThreads;
  const Args& args;
  int64_t position, column;
  int width;
  int shift;        // linear: elements before the first row in its line
  int stop;         // linear: and of all
  int limit;        // elements of a row, none if linear
  int begin, end;   // pieces
  int rows_pieces;  // by rows: of a row
  int64_t at;       // of the element before which the first row or its line begins
  int rows_on, on;  // from a piece to the next one of the same thread: rows, and elements beside

  __device__ __forceinline__ Pieces(const Args& args, int64_t position, int rows, int64_t column)
      : args(args), position(position), column(column) {
    const auto& shape = args.shape;
    width = int(min(int64_t(shape.columns), args.call.inner - column));
    at = position * args.call.inner + column;
    if (shape.linear) {
      shift = int((reinterpret_cast<uintptr_t>(args.call.data) + at * sizeof(T)) % 128 / sizeof(T));
      stop = shift + rows * width;
      at -= shift;
      limit = 1 << 30;
      begin = (shift + kVec - 1) / kVec;
      end = stop / kVec;
      rows_pieces = 0;
      rows_on = 0;
      on = kThreads * kVec;
    } else {
      rows_pieces = width / kVec;
      shift = stop = begin = 0;
      limit = width;
      end = rows * rows_pieces;
      rows_on = kThreads / rows_pieces;
      on = (kThreads - rows_on * rows_pieces) * kVec;
    }
  }

  // The piece after the last one with an element of the first `rows` rows.
  __device__ __forceinline__ int end_of(int rows) const {
    return args.shape.linear ? min(end, (shift + rows * width + kVec - 1) / kVec) : rows * rows_pieces;
  }

  struct Cursor {
    int piece, row, in_row;
  };
  __device__ __forceinline__ Cursor first() const {
    const int piece = int(threadIdx.x) < begin ? threadIdx.x + kThreads : threadIdx.x;
    const int row = args.shape.linear ? 0 : piece / rows_pieces;
    return {piece, row, piece * kVec - row * width};
  }
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    cursor.piece += kThreads;
    cursor.row += rows_on;
    cursor.in_row += on;
    if (cursor.in_row >= limit) {
      cursor.in_row -= limit;
      ++cursor.row;
    }
  }
  // Where it begins in shared memory, and in the data.
  __device__ __forceinline__ int to(const Cursor& cursor) const {
    return cursor.row * args.shape.stride + cursor.in_row;
  }
  __device__ __forceinline__ int64_t in_data(int row, int in_row) const {
    const SegmentsView& segments = args.stack.one;
    if (!segments.order) return at + (row * args.call.inner + in_row);
    const int64_t slice = args.stack.slice_of(position + row, segments.num_positions);
    const int64_t in_slice = segments.row(position + row - slice * segments.num_positions);
    return (slice * segments.num_rows + in_slice) * args.call.inner + column + in_row;
  }
  __device__ __forceinline__ int64_t in_data(const Cursor& cursor) const { return in_data(cursor.row, cursor.in_row); }

  // The element before the first piece or behind the last one that is this thread's, or -1: linear, from `at` on.
  __device__ __forceinline__ int edge() const {
    if (kVec == 1 || threadIdx.x >= 2 * kVec || !args.shape.linear) return -1;
    const int first = min(begin * kVec, stop), last = max(end * kVec, first);
    const int element = threadIdx.x < kVec ? shift + threadIdx.x : last + threadIdx.x - kVec;
    return element < (threadIdx.x < kVec ? first : stop) ? element : -1;
  }
};

// kVec elements from and to shared memory, where they are of the type that is computed in.
template <class T, class V, int kVec>
__device__ __forceinline__ void read_shared(const V* from, T (&x)[kVec]) {
  V values[kVec];
  load_elements(from, values);
#pragma unroll
  for (int e = 0; e < kVec; ++e) x[e] = store_as<T>(values[e]);
}
template <class T, class V, int kVec>
__device__ __forceinline__ void write_shared(V* to, const T (&x)[kVec]) {
  constexpr int kPiece = kVec == 1 ? 1 : kVectorBytes / int(sizeof(V));
#pragma unroll
  for (int e = 0; e < kVec; e += kPiece) {
    Piece<V, kPiece> piece;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) piece.element[i] = load_as<V>(x[e + i]);
    *reinterpret_cast<Piece<V, kPiece>*>(to + e) = piece;
  }
}

// Fills the last `behind` positions of each slice, which belong to no segment: an index that was never checked leads
// there.
template <class Args, class T, int kVec, class Out>
__device__ __noinline__ void fill_behind(const Args& args, int64_t behind, int64_t column, Out* out, Out x) {
  const int64_t positions = args.stack.one.num_positions, tiles = ceil_div(behind, int64_t(args.shape.keys));
#pragma unroll 1
  for (int64_t unit = blockIdx.x; unit < args.stack.outer * tiles; unit += gridDim.x) {
    const int64_t slice = unit / tiles, before = (unit - slice * tiles) * args.shape.keys;
    const Pieces<Args, T, kVec> pieces(args, (slice + 1) * positions - behind + before,
                                 int(min(behind - before, int64_t(args.shape.keys))), column);
    Out same[kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) same[e] = x;
#pragma unroll 1
    for (auto cursor = pieces.first(); cursor.piece < pieces.end; pieces.advance(cursor)) {
      store_pack(out + pieces.in_data(cursor), same);
    }
    if (pieces.edge() >= 0) out[pieces.at + pieces.edge()] = x;
  }
}

// Brings the rows of pieces to shared memory, and what goes with them (`second`) if there is any. kFlight pieces of each
// thread are in flight.
template <int kFlight, bool kTwo, class Args, class T, int kVec, class V>
__device__ __forceinline__ void bring(const Pieces<Args, T, kVec>& pieces, const T* data, V* x, const T* second_data, V* second) {
#pragma unroll 1
  for (auto cursor = pieces.first(); cursor.piece < pieces.end;) {
    T from[kFlight][kVec], from_second[kFlight][kVec];
    int to[kFlight];
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      to[f] = cursor.piece < pieces.end ? pieces.to(cursor) : -1;
      if (to[f] >= 0) {
        const int64_t at = pieces.in_data(cursor);
        load_elements(data + at, from[f]);
        if constexpr (kTwo) load_elements(second_data + at, from_second[f]);
      }
      pieces.advance(cursor);
    }
#pragma unroll
    for (int f = 0; f < kFlight; ++f) {
      if (to[f] < 0) continue;
      write_shared(x + to[f], from[f]);
      if constexpr (kTwo) write_shared(second + to[f], from_second[f]);
    }
  }
  if (const int edge = pieces.edge(); edge >= 0) {
    x[edge] = load_as<V>(data[pieces.at + edge]);
    if constexpr (kTwo) second[edge] = load_as<V>(second_data[pieces.at + edge]);
  }
}

constexpr int kTileChunks = 64;  // more than a tile has of one segment

// Lists the chunks of segment i of a tile, which has n rows there, each for the smallest team whose lanes get no more than
// kHeld rows, or for the largest. In any order, for each is on its own. More than there is room for only where offsets do
// not ascend.
template <class Policy, class ListOf>
__device__ __forceinline__ void list_chunks(const TileShape<Policy>& shape, int (&num_listed)[Policy::kTeams], ListOf&& list_of,
                                            int i, int n) {
  constexpr int kHeld = Policy::kHeld;
#pragma unroll 1
  for (int c = 0; c << shape.log2_chunk < n; ++c) {
    const int here = min(shape.chunk, n - (c << shape.log2_chunk));
    int size = 0;
    while (size < shape.max_size && here > kHeld * kHeld << size) ++size;
#pragma unroll
    for (int k = 0; k < Policy::kTeams; ++k) {  // the same address for all lanes, which the compiler makes one addition
      if (k != size) continue;
      const int entry = atomicAdd(&num_listed[k], 1);
      if (entry < shape.list_room(k)) list_of(k)[entry] = i * kTileChunks + c;
    }
  }
}

// A segment longer than a chunk as later launches meet it.
struct LongSegment {
  int64_t begin;  // position in the stack
  int64_t length;
};

// The long segment that stands at the end of a window, if there is one. What is read may be left from before where
// offsets do not ascend, so it is not believed.
template <class Args>
__device__ __forceinline__ bool find_long(const Args& args, int64_t window, LongSegment& found) {
  return args.stack.find_segment(args.covering[window], found.begin, found.length) && found.length > args.shape.chunk;
}

template <class Call>
bool nothing_to_do(const Call& call) {
  return call.outer == 0 || call.inner == 0 || call.segments.num_segments == 0 || call.segments.num_positions == 0;
}

}  // namespace fastops::cuda
