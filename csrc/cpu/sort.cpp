// Sorting within segments, stable, each column on its own.
//
// The rows of a segment and of a tile of columns are brought together column by column, as elements that are a key (keys.h)
// above the row's place in its segment: no two of them are equal, so that any way of sorting is stable. Short columns are
// sorted by counting how many elements are smaller, by vectors; longer ones by merging such runs, still longer ones digit by
// digit. Then the places say which rows stand where, or runs of equal keys are counted while they are in the cache. One thread
// takes one segment, but all take one together that is a large part of the whole. Elements take 8 bytes (16 if keys do not fit):
// the columns of a tile and one more, for each thread, of the longest segment that it takes; and those of a segment that all
// take, unless they find room in the result.
#include "cpu/capability.h"

#include "cpu/count.h"
#include "cpu/stage.h"
#include "cpu/vec.h"
#include "cpu/walk.h"
#include "dispatch.h"
#include "kernels.h"
#include "keys.h"

namespace FASTOPS_CPU_NAMESPACE {
namespace {

struct SortPolicy {
  static constexpr int64_t kTileBytes = 64;        // of a row: what comes from memory together
  static constexpr int64_t kMostColumns = 16;      // guess: so many places are written at once without evicting each other
  static constexpr int64_t kRunRows = 32;          // guess: of what is merged
  static constexpr int64_t kDigitRows = 32;        // measured: from so many rows for each digit on, digits are quicker than merges
  static constexpr int kDigitBits = 8;             // guess: so many places can be written to without missing the TLB
  static constexpr int64_t kLongRows = 1 << 16;    // guess: less is not worth several threads
  static constexpr int64_t kLongShare = 4;         // guess: a segment is for all threads if it is this part of one's work
  static constexpr int64_t kLongColumns = 8;       // guess: of such a segment, at once: 9 bytes for each element, or 17
  static constexpr int64_t kPartRows = 1 << 14;    // guess: of such a segment, for one thread at least
  // Measured with 2 MiB of the second-level cache and 32 of the third: in smaller buckets digits are sorted no quicker, and each
  // doubling of their number is a step more to find them.
  static constexpr int64_t kBucketRows = 1 << 18;
  static constexpr int kTaskBuckets = 4;           // guess: for each thread, so that none waits long for another
  static constexpr int kMostBuckets = 256;         // which a byte can tell apart
  static constexpr int64_t kSamples = 16;          // guess: for each bucket; few are twice as large as the others
  static constexpr int64_t kTaskBytes = 1 << 13;   // guess: below this a second thread costs more than it saves
};

// Key and place in one number that is not negative.
struct Packed {
  static constexpr bool kDistinct = true;
  static constexpr int kPlaceBits = 31;
  int64_t bits;

  static FASTOPS_HD Packed of(uint64_t key, int64_t place) { return {int64_t(key << kPlaceBits) | place}; }
  FASTOPS_HD uint64_t key() const { return uint64_t(bits) >> kPlaceBits; }
  FASTOPS_HD int64_t place() const { return bits & ((int64_t(1) << kPlaceBits) - 1); }
  FASTOPS_HD bool operator<(const Packed& other) const { return bits < other.bits; }
};

// And where they do not fit.
struct Wide {
  static constexpr bool kDistinct = false;  // as far as vectors compare them
  uint64_t high;
  int64_t low;

  static FASTOPS_HD Wide of(uint64_t key, int64_t place) { return {key, place}; }
  FASTOPS_HD uint64_t key() const { return high; }
  FASTOPS_HD int64_t place() const { return low; }
  FASTOPS_HD int64_t compared() const { return int64_t(high ^ (uint64_t(1) << 63)); }  // as vectors compare numbers, signed
  FASTOPS_HD bool operator<(const Wide& other) const { return (high < other.high) | ((high == other.high) & (low < other.low)); }
};

// Merges the sorted runs [0, middle) and [middle, n). Which of two elements is next cannot be predicted, so nothing branches
// on it.
template <class E>
void merge(const E* from, int64_t middle, int64_t n, E* to) {
  const E *a = from, *b = from + middle;
  const E *const a_end = b, *const b_end = from + n;
  while (a < a_end && b < b_end) {
    const bool second = *b < *a;
    const E* const next = second ? b : a;
    *to++ = *next;
    b += second;
    a += !second;
  }
  std::memcpy(to, a, (a_end - a) * sizeof(E));
  std::memcpy(to + (a_end - a), b, (b_end - b) * sizeof(E));
}

// Sorts n elements of `from`, and returns which of the two arrays they are in then.
template <class E>
E* sort_by_merging(E* from, E* to, int64_t n) {
  int64_t run = n <= kCountRows ? kCountRows : SortPolicy::kRunRows;
  for (int64_t i = 0; i < n; i += run) sort_by_counting(from + i, to + i, std::min(run, n - i));
  std::swap(from, to);
  for (; run < n; run *= 2) {
    for (int64_t i = 0; i < n; i += 2 * run) merge(from + i, std::min(run, n - i), std::min(2 * run, n - i), to + i);
    std::swap(from, to);
  }
  return from;
}

// The same digit by digit, from the lowest in which keys differ. Elements come in the order of their places.
template <class E>
E* sort_by_digits(E* from, E* to, int64_t n) {
  constexpr int64_t kDigits = int64_t(1) << SortPolicy::kDigitBits;
  uint64_t differ = 0;
  for (int64_t i = 0; i < n; ++i) differ |= from[i].key() ^ from[0].key();
  for (int shift = 0; shift < 64 && differ >> shift != 0;) {
    if ((differ >> shift & 1) == 0) {
      ++shift;
      continue;
    }
    const auto digit = [&](const E& element) FASTOPS_INLINE_LAMBDA { return element.key() >> shift & (kDigits - 1); };
    int64_t next[kDigits] = {}, total = 0;
    for (int64_t i = 0; i < n; ++i) ++next[digit(from[i])];
    for (int64_t& count : next) {
      const int64_t before = total;
      total += count;
      count = before;
    }
    for (int64_t i = 0; i < n; ++i) to[next[digit(from[i])]++] = from[i];
    std::swap(from, to);
    shift += SortPolicy::kDigitBits;
  }
  return from;
}

// Whichever is quicker for keys of so many bytes.
template <class E>
E* sort_elements(E* from, E* to, int64_t n, int64_t key_bytes) {
  const bool digits = n >= SortPolicy::kDigitRows * ceil_div(8 * key_bytes, SortPolicy::kDigitBits);
  return digits ? sort_by_digits(from, to, n) : sort_by_merging(from, to, n);
}

// The buckets of n elements, from their `last` elements, in order: how many of those are smaller. There is a power of two of
// buckets. Several searches go on at once, since each of them waits for memory at every step.
template <class E>
void find_buckets(const E* elements, int64_t n, const E* last, int buckets, uint8_t* found) {
  constexpr int kAtOnce = 16;
  for (int64_t i = 0; i < n; i += kAtOnce) {
    const int count = int(std::min<int64_t>(kAtOnce, n - i));
    int bucket[kAtOnce] = {};
    for (int half = buckets / 2; half > 0; half /= 2) {
      for (int k = 0; k < kAtOnce; ++k) bucket[k] += half & -int(last[bucket[k] + half - 1] < elements[i + std::min(k, count - 1)]);
    }
    for (int k = 0; k < count; ++k) found[i + k] = uint8_t(bucket[k]);
  }
}

// Equal elements that stand side by side: their key, the place of the first one, and how many there are.
struct Run {
  uint64_t key = 0;
  int64_t place = 0, length = 0;
};

// What is known of the runs of a part of a column. Of equally long ones the first is the longest.
struct Runs {
  int64_t count = 0;
  Run first, last, longest;

  void keep_longer(const Run& run) {
    if (run.length > longest.length) longest = run;
  }

  // Those of the part behind. The runs on either side of the seam may be one.
  void append(const Runs& next) {
    if (next.count == 0) return;
    const bool is_cut = count > 0 && last.key == next.first.key;
    if (is_cut) {
      last.length += next.first.length;
      keep_longer(last);
      if (count == 1) first = last;
    }
    if (count == 0) first = next.first;
    if (!is_cut || next.count > 1) last = next.last;
    keep_longer(next.longest);
    count += next.count - is_cut;
  }
};

template <class E>
int64_t count_runs(const E* elements, int64_t n) {
  int64_t count = n > 0;
  for (int64_t i = 1; i < n; ++i) count += elements[i].key() != elements[i - 1].key();
  return count;
}

template <class E>
Run longest_run(const E* elements, int64_t n) {
  if (n == 0) return {};
  // Only what is longer than the longest so far is looked for: that far behind its first element stands an equal one.
  int64_t longest = 1, begin = 0;
  for (int64_t i = 0; i + longest < n;) {
    if (elements[i].key() == elements[i + longest].key()) {
      begin = i;
      ++longest;
    } else {
      ++i;
    }
  }
  return {elements[begin].key(), elements[begin].place(), longest};
}

template <class E>
Runs find_runs(const E* elements, int64_t n) {
  if (n == 0) return {};
  const auto are_equal = [&](int64_t a, int64_t b) { return elements[a].key() == elements[b].key(); };
  int64_t first_end = 1, last_begin = n - 1;
  while (first_end < n && are_equal(first_end, 0)) ++first_end;
  while (last_begin > 0 && are_equal(last_begin - 1, n - 1)) --last_begin;
  return {count_runs(elements, n),
          {elements[0].key(), elements[0].place(), first_end},
          {elements[last_begin].key(), elements[last_begin].place(), n - last_begin},
          longest_run(elements, n)};
}

template <class K, class E>
class SortRows final : public Visitor {
  using Policy = SortPolicy;
  struct Long {
    Tile tile;
    Span span;
  };
  // Of one thread.
  struct Room {
    std::unique_ptr<E[]> elements;
    int64_t size = 0;
    std::vector<Long> found;

    E* of(int64_t wanted) {
      if (size < wanted) {
        elements.reset();
        elements.reset(new E[wanted + kBehind]);
        size = wanted;
      }
      return elements.get();
    }
  };

  const SortCall& call_;
  const SegmentsView& segments_;
  const KeyOrder<K> order_;
  std::vector<Room> rooms_;

 public:
  explicit SortRows(const SortCall& call) : call_(call), segments_(call.segments), order_(call.dtype, call.descending) {}

  void run(const Pool& pool) {
    constexpr int64_t kColumns = std::min(Policy::kMostColumns, Policy::kTileBytes / int64_t(sizeof(K)));
    const int64_t positions = segments_.num_positions;
    Cutting cut{call_.outer, call_.inner, kColumns, 0, Policy::kTaskBytes, sizeof(K)};
    const int64_t tasks = num_tasks(cut, segments_, pool), tiles = call_.outer * ceil_div(call_.inner, kColumns);
    cut.chunk_rows = std::max(Policy::kLongRows, tiles * positions / (Policy::kLongShare * tasks));
    rooms_.resize(tasks);
    walk(cut, segments_, pool, tasks, *this);
    for (Room& room : rooms_) {
      for (const auto& [tile, span] : room.found) {
        for (int64_t c = tile.first; c < tile.last; c += Policy::kLongColumns) {
          sort_long({tile.outer, c, std::min(c + Policy::kLongColumns, tile.last)}, span, pool);
        }
      }
    }
    if (call_.wanted != Sorted::rows) return;
    // Positions before the first segment or behind the last, which only offsets that were never checked can leave.
    const int64_t s = segments_.num_segments;
    const int64_t first = s > 0 ? segments_.begin(0) : positions, last = s > 0 ? segments_.clamped(s) : positions;
    for (int64_t outer = 0; outer < call_.outer; ++outer) {
      leave(outer, 0, first);
      leave(outer, last, positions);
    }
  }

  void whole(const Tile& tile, int64_t first, int64_t last, int64_t begin, int64_t, int64_t thread) override {
    for (int64_t s = first; s < last; ++s) {
      const int64_t end = segments_.end(s, begin);
      sort(tile, {s, begin, 0, end - begin}, rooms_[thread]);
      begin = end;
    }
  }

  void chunk(const Tile& tile, const Span& span, int64_t thread) override {
    if (span.first == 0) rooms_[thread].found.push_back({tile, span});
  }

 private:
  void sort(const Tile& tile, const Span& span, Room& room) {
    const int64_t width = tile.last - tile.first, length = span.length;
    E* spare = room.of((width + 1) * length);
    E* columns[Policy::kMostColumns];
    for (int64_t c = 0; c < width; ++c, spare += length) columns[c] = spare;
    gather(tile, span.begin, 0, length, columns);
    for (int64_t c = 0; c < width; ++c) {
      if (sort_elements(columns[c], spare, length, sizeof(K)) == spare) std::swap(columns[c], spare);
    }
    if (call_.wanted == Sorted::rows) return give(tile, span.begin, 0, length, columns);
    for (int64_t c = 0; c < width; ++c) {
      if (call_.wanted == Sorted::nunique) {
        give_count(tile, span, c, count_runs(columns[c], length));
      } else {
        give_mode(tile, span, c, longest_run(columns[c], length));
      }
    }
  }

  // One segment by all threads: a few of its elements, sorted, say where buckets of nearly the same size end; the elements go
  // to their buckets, in the order of their places; then each bucket is sorted by one thread, in its cache. Making elements
  // twice costs less than keeping them. Those of a single column are in their buckets where its indices will be. Where runs
  // are wanted, those of the buckets are joined in the end.
  void sort_long(const Tile& tile, const Span& span, const Pool& pool) {
    const bool with_rows = call_.wanted == Sorted::rows;
    const int64_t begin = span.begin, length = span.length;
    const int64_t width = tile.last - tile.first, tasks = std::min<int64_t>(length / Policy::kPartRows, rooms_.size());
    int buckets = 1;
    while (buckets < Policy::kMostBuckets && (buckets < tasks * Policy::kTaskBuckets || buckets * Policy::kBucketRows < length)) {
      buckets *= 2;
    }
    const std::unique_ptr<E[]> last(new E[width * buckets]);
    for (int64_t c = 0; c < width; ++c) choose_buckets(tile, c, begin, length, buckets, &last[c * buckets]);

    const std::unique_ptr<uint8_t[]> bucket_of(new uint8_t[width * length]);
    const std::unique_ptr<int64_t[]> counts(new int64_t[tasks * width * buckets]());
    // The elements of a task, some at a time: work(c, elements, first, end, counts of the buckets).
    const auto some_at_a_time = [&](int64_t task, auto&& work) FASTOPS_INLINE_LAMBDA {
      constexpr int64_t kSome = Visitor::kBatchRows;
      E* columns[Policy::kLongColumns];
      for (int64_t c = 0; c < width; ++c) columns[c] = rooms_[task].of(width * kSome) + c * kSome;
      const int64_t end = (task + 1) * length / tasks;
      for (int64_t first = task * length / tasks; first < end; first += kSome) {
        const int64_t next = std::min(end, first + kSome);
        gather(tile, begin, first, next, columns);
        for (int64_t c = 0; c < width; ++c) work(c, columns[c], first, next, &counts[(task * width + c) * buckets]);
      }
    };
    pool(tasks, [&](int64_t task) {
      some_at_a_time(task, [&](int64_t c, const E* elements, int64_t first, int64_t end, int64_t* count) FASTOPS_INLINE_LAMBDA {
        uint8_t* const found = &bucket_of[c * length];
        find_buckets(elements, end - first, &last[c * buckets], buckets, found + first);
        for (int64_t r = first; r < end; ++r) ++count[found[r]];
      });
    });
    const int64_t bounds = buckets + 1;
    const std::unique_ptr<int64_t[]> starts(new int64_t[width * bounds]);
    for (int64_t c = 0; c < width; ++c) {
      int64_t total = 0;
      for (int b = 0; b < buckets; ++b) {
        starts[c * bounds + b] = total;
        for (int64_t task = 0; task < tasks; ++task) {
          int64_t& count = counts[(task * width + c) * buckets + b];
          const int64_t before = total;
          total += count;
          count = before;
        }
      }
      starts[c * bounds + buckets] = total;
    }
    const bool in_place = with_rows && call_.inner == 1 && sizeof(E) == sizeof(int64_t);
    const std::unique_ptr<E[]> apart(in_place ? nullptr : new E[width * length]);
    E* const grouped = in_place ? reinterpret_cast<E*>(call_.indices + tile.outer * segments_.num_positions + begin) : apart.get();
    pool(tasks, [&](int64_t task) {
      some_at_a_time(task, [&](int64_t c, const E* elements, int64_t first, int64_t end, int64_t* next) FASTOPS_INLINE_LAMBDA {
        const uint8_t* const found = &bucket_of[c * length];
        for (int64_t r = first; r < end; ++r) grouped[c * length + next[found[r]]++] = elements[r - first];
      });
    });
    const std::unique_ptr<Runs[]> runs(with_rows ? nullptr : new Runs[width * buckets]);
    pool(tasks, [&](int64_t task) {
      for (int64_t b = task * buckets / tasks; b < (task + 1) * buckets / tasks; ++b) {
        for (int64_t c = 0; c < width; ++c) {
          const int64_t first = starts[c * bounds + b], end = starts[c * bounds + b + 1], count = end - first;
          E* const elements = rooms_[task].of(2 * count);
          std::memcpy(elements, grouped + c * length + first, count * sizeof(E));
          E* const sorted = sort_elements(elements, elements + count, count, sizeof(K));
          if (with_rows) {
            give({tile.outer, tile.first + c, tile.first + c + 1}, begin, first, end, &sorted);
          } else {
            runs[c * buckets + b] = find_runs(sorted, count);
          }
        }
      }
    });
    for (int64_t c = 0; c < (with_rows ? 0 : width); ++c) {
      Runs all;
      for (int b = 0; b < buckets; ++b) all.append(runs[c * buckets + b]);
      if (call_.wanted == Sorted::nunique) {
        give_count(tile, span, c, all.count);
      } else {
        give_mode(tile, span, c, all.longest);
      }
    }
  }

  // The last elements of all buckets but one.
  void choose_buckets(const Tile& tile, int64_t column, int64_t begin, int64_t length, int buckets, E* last) const {
    const int64_t samples = Policy::kSamples * buckets, step = length / samples;
    const K* data = data_of(tile) + column;
    std::vector<E> sample(2 * samples + kBehind);
    for (int64_t i = 0; i < samples; ++i) {
      // Not at even steps, which a period of the data could meet.
      const int64_t place = i * step + int64_t((uint64_t(i) * 0x9e3779b97f4a7c15u >> 32) % uint64_t(step));
      sample[i] = E::of(order_.key(data[segments_.row(begin + place) * call_.inner]), place);
    }
    const E* const sorted = sort_by_merging(sample.data(), sample.data() + samples, samples);
    for (int b = 0; b + 1 < buckets; ++b) last[b] = sorted[(b + 1) * Policy::kSamples - 1];
  }

  const K* data_of(const Tile& tile) const {
    return static_cast<const K*>(call_.data) + tile.outer * segments_.num_rows * call_.inner + tile.first;
  }

  // Rows [first, last) of a segment that begins at a position become elements.
  void gather(const Tile& tile, int64_t begin, int64_t first, int64_t last, E* const* columns) const {
    const K* data = data_of(tile);
    const int64_t inner = call_.inner, width = tile.last - tile.first, rows = last - first;
    const KeyOrder<K> order = order_;  // of its own, which no store can change
    if (width == 1 && !segments_.order) {
      E* const to = columns[0];
      data += (begin + first) * inner;
      for (int64_t i = 0; i < rows; ++i) to[i] = E::of(order.key(data[i * inner]), first + i);
      return;
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t position = begin + first + i;
      // A tile is too small a part of a row for the processor to see where the next one is.
      prefetch(data + segments_.row(std::min(position + kPrefetchRows, segments_.num_positions - 1)) * inner);
      const K* const row = data + segments_.row(position) * inner;
      for (int64_t c = 0; c < width; ++c) columns[c][i] = E::of(order.key(row[c]), first + i);
    }
  }

  // And sorted elements become rows [first, last) of the results.
  void give(const Tile& tile, int64_t begin, int64_t first, int64_t last, const E* const* columns) const {
    const int64_t inner = call_.inner, width = tile.last - tile.first, rows = last - first;
    const int64_t to = (tile.outer * segments_.num_positions + begin + first) * inner + tile.first;
    const K* const data = data_of(tile);
    int64_t* const indices = call_.indices + to;
    const auto each = [&](auto&& work) FASTOPS_INLINE_LAMBDA {
      if (width == 1) {
        for (int64_t i = 0; i < rows; ++i) work(i * inner, columns[0][i], 0);
        return;
      }
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; c < width; ++c) work(i * inner + c, columns[c][i], c);
      }
    };
    if (segments_.order) {
      each([&](int64_t at, const E& element, int64_t) FASTOPS_INLINE_LAMBDA { indices[at] = segments_.row(begin + element.place()); });
    } else {
      each([&](int64_t at, const E& element, int64_t) FASTOPS_INLINE_LAMBDA { indices[at] = begin + element.place(); });
    }
    if (!call_.values) return;
    K* const values = static_cast<K*>(call_.values) + to;
    const KeyOrder<K> order = order_;
    each([&](int64_t at, const E& element, int64_t c) FASTOPS_INLINE_LAMBDA {
      const K key = K(element.key());  // which saves a look at a row that is anywhere
      values[at] = order.is_shared(key) ? data[indices[at] * inner + c] : order.bits(key);
    });
  }

  // The results of one column of a segment.
  int64_t result_at(const Tile& tile, const Span& span, int64_t column) const {
    return (tile.outer * segments_.num_segments + span.segment) * call_.inner + tile.first + column;
  }
  void give_count(const Tile& tile, const Span& span, int64_t column, int64_t count) const {
    call_.counts[result_at(tile, span, column)] = count > 0 ? count : int64_t(call_.fill);
  }
  void give_mode(const Tile& tile, const Span& span, int64_t column, const Run& longest) const {
    const int64_t at = result_at(tile, span, column), row = longest.length > 0 ? segments_.row(span.begin + longest.place) : -1;
    call_.indices[at] = row;
    static_cast<K*>(call_.values)[at] = row < 0 ? K(call_.fill) : data_of(tile)[row * call_.inner + column];
  }

  // Positions [first, last) that are in no segment keep their rows.
  void leave(int64_t outer, int64_t first, int64_t last) const {
    const int64_t inner = call_.inner;
    for (int64_t p = first; p < last; ++p) {
      const int64_t row = segments_.row(p), to = (outer * segments_.num_positions + p) * inner;
      std::fill_n(call_.indices + to, inner, row);
      if (call_.values) {
        std::memcpy(static_cast<K*>(call_.values) + to, static_cast<const K*>(call_.data) + (outer * segments_.num_rows + row) * inner,
                    inner * sizeof(K));
      }
    }
  }
};

}  // namespace

void sort(const SortCall& call, const Pool& pool) {
  visit_width(call.dtype, [&](auto k) {
    using K = typename decltype(k)::type;
    if constexpr (sizeof(K) < 8) {
      if (call.segments.num_positions >> Packed::kPlaceBits == 0) return SortRows<K, Packed>(call).run(pool);
    }
    SortRows<K, Wide>(call).run(pool);
  });
}

}  // namespace FASTOPS_CPU_NAMESPACE
