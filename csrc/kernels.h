// What the host side calls: one structure for each family of kernels, and its entry points on both devices.
// Arrays are contiguous and checked; outputs are allocated, and every element of them is written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradients.h"
#include "normalisers.h"
#include "numeric.h"
#include "quantiles.h"
#include "reducers.h"
#include "scans.h"
#include "segments.h"

#ifdef FASTOPS_WITH_CUDA
struct CUstream_st;
#endif

namespace fastops {

struct ReduceCall {
  Reduction reduction;
  DType dtype;                 // of data
  bool wide_out;               // 16-bit data, float out (sum, mean, prod and logsumexp)
  const void* data;            // [outer, N, inner]
  void* out;                   // [outer, S, inner]; none: only `extra` is wanted
  int64_t* extra;              // [outer, S, inner] row numbers or counts, where the reduction has them
  double fill;                 // for segments without rows, as a floating number
  int64_t fill_integer;        // and as an integer
  int64_t fill_extra;
  void* mean;                  // moments: [outer, S, inner] of the type that is computed in; 0 without rows
  double correction;           // moments: the rows that count in the divisor are so many fewer
  bool root;                   // moments: the standard deviation, not the variance
  RowWeights weights;          // sum of floats or int64: rows are multiplied by them first
  SegmentsView segments;
  int64_t outer, inner;
};

struct RowMapCall {
  RowMap map;
  DType dtype;        // of data and out, and of values but for the variance and what has weights
  const void* data;   // [outer, N, inner], for maps that read it
  void* out;          // [outer, N, inner]; rows that belong to no segment get 0
  RowMapArrays arrays;
  SegmentsView segments;
  int64_t outer, inner;
};

// What a weighted sum hands back to the weights: of each row and head, the sum over its columns (and the slices) of
// the segment's value times the element of data.
struct DotCall {
  DType dtype;             // of data
  const void* values;      // [outer, S, inner] of the type that is computed in
  const void* data;        // [outer, N, inner]
  void* out;               // [N, heads] of that type; rows that belong to no segment get 0
  int64_t heads, per_head; // heads * per_head = inner
  SegmentsView segments;
  int64_t outer, inner;
};

struct NormaliseCall {
  Normalise kind;
  DType dtype;       // of data, grad and out
  const void* data;  // [outer, N, inner]; of a derivative: the result
  const void* grad;  // [outer, N, inner], of a derivative
  void* out;         // [outer, N, inner]; rows that belong to no segment get 0
  SegmentsView segments;
  int64_t outer, inner;
};

struct ScanCall {
  Scan kind;
  DType dtype;          // of data and factors
  const void* data;     // [outer, N, inner]
  const void* factors;  // [outer, N, inner], linear
  void* out;            // [outer, N, inner]; int64 where integers are added up or multiplied; rows of no segment get 0
  int64_t* rows;        // [outer, N, inner], extrema: row numbers, -1 where there is none
  bool exclusive;       // without the row itself
  bool reverse;         // from the last row to the first
  SegmentsView segments;
  int64_t outer, inner;
};

// What is wanted of the sorted elements of a segment, of each column on its own. Equal ones stand side by side: a run.
enum class Sorted : int8_t {
  rows,     // all of them
  mode,     // the longest run, of equally long ones the least; its first row
  nunique,  // the number of runs
};

// Sorts each column within each segment, stably (keys.h). Positions that belong to no segment, which only offsets that
// were never checked can leave, get some rows.
struct SortCall {
  Sorted wanted;
  DType dtype;         // of data and values
  bool descending;     // rows
  const void* data;    // [outer, N, inner]
  void* values;        // rows: [outer, P, inner], P the number of positions, none: not wanted; mode: [outer, S, inner]
  int64_t* indices;    // of the same shape, the rows of data; mode: -1, and the value is fill, for a segment without rows
  int64_t* counts;     // nunique: [outer, S, inner]; fill for a segment without rows
  uint64_t fill;       // mode: the bits of the element; nunique: the count
  SegmentsView segments;
  int64_t outer, inner;
};

// Groups rows by segment: a stable counting sort of index.
struct GroupCall {
  IndexArray index;      // [N] segment of each row; rows out of [0, S) belong to none
  void* offsets;         // [S + 1] out, as wide as index
  void* order;           // [N] out, as wide as index; none if index ascends and is in range
  int64_t num_segments;
  int64_t num_rows;
};

// Which elements of a segment are wanted, of each column on its own.
enum class Selection : int8_t {
  quantiles,  // those around quantiles; of equal elements the first row has the lower rank
  median,     // the lower middle; the first row that has it
  top,        // the greatest or the least, in their order or in that of their rows
};

// In floating data a NaN is what quantiles and the median select: the first one. To `top` it is the greatest value.
struct SelectCall {
  Selection selection;
  DType dtype;           // of data and values
  const void* data;      // [outer, N, inner]
  int64_t count;         // elements of a segment: 1 for all but quantiles and `top`
  bool largest, sorted;  // top
  const double* q;       // quantiles: [Q]; count is Q, or 2 Q for interpolations of two rows, which stand side by side
  Interpolation interpolation;
  void* between;         // quantiles: [Q, outer, S, inner] the results
  void* shares;          // quantiles: [S, count] of the type that is computed in, what the rows count for; none: not wanted
  void* values;          // [outer, S, count, inner]
  int64_t* indices;      // [outer, S, count, inner] row numbers; -1, and the value is fill, where nothing is selected
  uint64_t fill;         // the bits of the element
  SegmentsView segments;
  int64_t outer, inner;
};

// Gives back to the rows what was selected from them: out[index] += value. Entries of different segments have different
// rows, so the order in which those of one row are added is that in which they stand.
struct PlaceCall {
  DType dtype;             // of values and out, floating
  const void* values;      // [outer, S, count, inner]
  const int64_t* indices;  // [outer, S, count, inner]; others than row numbers go nowhere
  void* out;               // [outer, N, inner], zeros at first
  int64_t num_segments, count, num_rows, outer, inner;
};

// Copies the first or the last row of each segment to the results, or back: one is the other's derivative.
struct EndCall {
  bool last, back;
  DType dtype;       // of from and to
  const void* from;  // [outer, N, inner]; back: [outer, S, inner]
  void* to;          // [outer, S, inner]; back: [outer, N, inner], of which other rows are left as they are
  uint64_t fill;     // the bits of the element, for segments without rows
  SegmentsView segments;
  int64_t outer, inner;
};

namespace cpu {

// Runs body(context, begin, end) over [0, tasks), on several threads; given by the host side, which has the pool.
struct Pool {
  int64_t num_threads;
  void (*run)(int64_t tasks, void (*body)(void* context, int64_t task), void* context);

  template <class Body>
  void operator()(int64_t tasks, Body&& body) const {
    run(tasks, [](void* context, int64_t task) { (*static_cast<std::remove_reference_t<Body>*>(context))(task); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

#define FASTOPS_DECLARE_CPU_KERNELS(capability)       \
  namespace capability {                              \
  void reduce(const ReduceCall&, const Pool&);        \
  void reduce_part_1(const ReduceCall&, const Pool&); \
  void reduce_part_2(const ReduceCall&, const Pool&); \
  void map_rows(const RowMapCall&, const Pool&);      \
  void dot_rows(const DotCall&, const Pool&);         \
  void normalise(const NormaliseCall&, const Pool&);  \
  void scan(const ScanCall&, const Pool&);            \
  void sort(const SortCall&, const Pool&);            \
  void group(const GroupCall&, const Pool&);          \
  void select(const SelectCall&, const Pool&);        \
  void place(const PlaceCall&, const Pool&);          \
  void copy_ends(const EndCall&, const Pool&);        \
  }
FASTOPS_DECLARE_CPU_KERNELS(default_)
FASTOPS_DECLARE_CPU_KERNELS(avx2)
FASTOPS_DECLARE_CPU_KERNELS(avx512)
#undef FASTOPS_DECLARE_CPU_KERNELS

}  // namespace cpu

#ifdef FASTOPS_WITH_CUDA
namespace cuda {

// Kernels are launched on the stream, on the device that is current. Nothing is allocated and nothing waits:
// the caller provides `workspace` bytes of device memory, which may be anything before and after. A launch that the
// runtime refuses throws std::runtime_error.
size_t reduce_workspace(const ReduceCall&);
void reduce(const ReduceCall&, void* workspace, CUstream_st* stream);

void map_rows(const RowMapCall&, CUstream_st* stream);
void dot_rows(const DotCall&, CUstream_st* stream);

size_t normalise_workspace(const NormaliseCall&);
void normalise(const NormaliseCall&, void* workspace, CUstream_st* stream);

size_t scan_workspace(const ScanCall&);
void scan(const ScanCall&, void* workspace, CUstream_st* stream);
size_t sort_workspace(const SortCall&);
void sort(const SortCall&, void* workspace, CUstream_st* stream);

size_t group_workspace(const GroupCall&);
void group(const GroupCall&, void* workspace, CUstream_st* stream);

size_t select_workspace(const SelectCall&);
void select(const SelectCall&, void* workspace, CUstream_st* stream);

void place(const PlaceCall&, CUstream_st* stream);
void copy_ends(const EndCall&, CUstream_st* stream);

}  // namespace cuda
#endif

}  // namespace fastops
