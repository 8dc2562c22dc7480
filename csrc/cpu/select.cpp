// Elements of given rank, and the greatest or least ones, of each segment and column: by selection, without sorting.
//
// A segment's elements are brought together as keys (keys.h), a column behind the other. The key of a rank is found bit by
// bit from the top, by counting how many keys are less than a trial: passes of vectors over keys that stay in the caches, as
// many as it takes to tell one key from the others. Many keys are first made few by a histogram of their leading bits. What
// has that key, or less, is then looked up in the order of rows. The few least keys are found without a rank, in one pass in
// which each lane keeps its own least ones. A thread takes segments; a very long one is taken by all threads. Bytes moved for
// each element: it is read once, and the rest happens in the caches unless the segment is long.
#include "cpu/capability.h"

#include "cpu/count.h"
#include "cpu/vec.h"
#include "cpu/walk.h"
#include "dispatch.h"
#include "kernels.h"
#include "keys.h"

namespace FASTOPS_CPU_NAMESPACE {
namespace {

struct SelectPolicy {
  static constexpr int64_t kTileBytes = 64;         // of a row, brought together at once: a line of the cache
  static constexpr int64_t kFewKeys = 1 << 13;      // guess: as many are searched bit by bit, from the second-level cache
  static constexpr int kDigitBits = 11;             // guess: a histogram fits in the first-level cache
  static constexpr int64_t kLongRows = 1 << 16;     // guess: a longer segment is taken by all threads
  static constexpr int64_t kTaskBytes = 1 << 14;    // guess: selecting takes several times as long as reading
  static constexpr int64_t kCopyBytes = 1 << 16;    // guess: of whole rows; below this a second thread costs more than it saves
  static constexpr int kLeast = 8;                  // guess: so many are found without a rank; less would not need half of it
  static constexpr int64_t kLookAtAll = 128;        // guess: among more, a bound is found first
  static constexpr int64_t kUnitsOfThread = 8;      // guess: parts of the work that a thread fetches, one by one
};

// Threads for a segment, each for a part of its rows.
struct Crew {
  const Pool& pool;
  int64_t parts;

  template <class Body>
  void operator()(int64_t n, Body&& body) const {
    pool(parts, [&](int64_t part) { body(part, part * n / parts, (part + 1) * n / parts); });
  }
};

// Keys of 32 or 64 bits with the sign bit turned, since vectors compare signed numbers everywhere.
template <class K>
using Key = std::conditional_t<sizeof(K) == 8, int64_t, int32_t>;

template <class I>
inline constexpr std::make_unsigned_t<I> kSignOf = std::make_unsigned_t<I>(1) << (8 * sizeof(I) - 1);

template <class K>
FASTOPS_HD Key<K> make_key(const KeyOrder<K>& order, K bits) {
  return Key<K>(std::make_unsigned_t<Key<K>>(order.key(bits)) ^ kSignOf<Key<K>>);
}

template <class I>
constexpr int64_t padded(int64_t n) {
  return ceil_div(n, kLanes<I>) * kLanes<I>;
}

// The keys of one column of a segment, in the order of rows. Behind them, up to a whole vector, stand greatest ones.
template <class I>
struct Keys {
  const I* at;
  int64_t count;
  std::make_unsigned_t<I> all, any;  // bits that all keys have, and that some have, with the sign bit as in key_of
};

// A key, and how many are less and equal.
template <class I>
struct Rank {
  I key;
  int64_t below, equal;
};

template <class I, class Holds>
FASTOPS_HD int64_t count_keys(const I* keys, int64_t n, Holds&& holds) {
  const vec<I> zero{}, one = zero + I(1);
  vec<I> lanes{};
  for (int64_t i = 0; i < n; i += kLanes<I>) lanes += holds(unaligned<vec<I>>(keys + i)) ? one : zero;
  return sum_lanes<I, kLanes<I>>(lanes);
}

// The key of a rank among n, which have the bits of `known` and differ in those of `varying` at most.
template <class I>
Rank<I> search_bits(const I* keys, int64_t n, std::make_unsigned_t<I> known, std::make_unsigned_t<I> varying, int64_t rank) {
  using U = std::make_unsigned_t<I>;
  int64_t low = 0, high = n;  // ranks of the keys that begin as `known` does
  for (U bit = kSignOf<I>; bit > 0; bit >>= 1) {
    if (!(varying & bit)) continue;
    const U above = ~(bit - 1), trial = (known & above) | bit;
    const I bound = I(trial ^ kSignOf<I>);
    const int64_t less = count_keys(keys, padded<I>(n), [&](const vec<I>& x) FASTOPS_INLINE_LAMBDA { return x < bound; });
    if (less <= rank) {
      known |= bit, low = less;
    } else {
      high = less;
    }
    if (high - low > 1) continue;
    for (int64_t i = 0; i < n; ++i) {  // the only one left
      if (((U(keys[i]) ^ kSignOf<I> ^ known) & above) == 0) return {keys[i], low, 1};
    }
  }
  return {I(known ^ kSignOf<I>), low, high - low};
}

// The key of a rank among any number. Those that lead to it by their next bits are copied until they are few.
template <class I>
Rank<I> find_rank(const Keys<I>& keys, int64_t rank, const Crew& crew) {
  using U = std::make_unsigned_t<I>;
  constexpr int kDigits = 1 << SelectPolicy::kDigitBits;
  U known = keys.all, varying = keys.all ^ keys.any;
  if (keys.count <= SelectPolicy::kFewKeys) return search_bits(keys.at, keys.count, known, varying, rank);
  std::unique_ptr<I[]> few;
  const I* from = keys.at;
  int64_t n = keys.count, below = 0;
  const std::unique_ptr<int64_t[]> histograms(new int64_t[crew.parts * kDigits]);
  while (n > SelectPolicy::kFewKeys && varying != 0) {
    int top = 8 * int(sizeof(I)) - 1;
    while (!(varying >> top & 1)) --top;
    const int shift = std::max(0, top + 1 - SelectPolicy::kDigitBits);
    const auto digit = [&](I key) FASTOPS_INLINE_LAMBDA { return int((U(key) ^ kSignOf<I>) >> shift & (kDigits - 1)); };
    crew(n, [&](int64_t part, int64_t begin, int64_t end) {
      int64_t* histogram = &histograms[part * kDigits];
      std::fill(histogram, histogram + kDigits, 0);
      for (int64_t i = begin; i < end; ++i) ++histogram[digit(from[i])];
    });
    int wanted = 0;
    int64_t before = 0, chosen = 0;
    for (;; ++wanted) {
      chosen = 0;
      for (int64_t part = 0; part < crew.parts; ++part) chosen += histograms[part * kDigits + wanted];
      if (rank < before + chosen || wanted == kDigits - 1) break;
      before += chosen;
    }
    std::unique_ptr<I[]> copied(new I[padded<I>(chosen) + 1]);
    crew(n, [&](int64_t part, int64_t begin, int64_t end) {
      I* to = copied.get();
      for (int64_t p = 0; p < part; ++p) to += histograms[p * kDigits + wanted];
      I* const last = to + histograms[part * kDigits + wanted];
      for (int64_t i = begin; i < end && to < last; ++i) {  // written whether it is wanted or not, which needs no branch
        *to = from[i];
        to += digit(from[i]) == wanted;
      }
    });
    std::fill(copied.get() + chosen, copied.get() + padded<I>(chosen), std::numeric_limits<I>::max());
    few = std::move(copied);
    from = few.get(), n = chosen, below += before, rank -= before;
    const U rest = (U(1) << shift) - 1;
    known = (known & rest) | ((U(from[0]) ^ kSignOf<I>) & ~rest);
    varying &= rest;
  }
  Rank<I> found = varying == 0 ? Rank<I>{I(known ^ kSignOf<I>), 0, n} : search_bits(from, n, known, varying, rank);
  found.below += below;
  return found;
}

// The position of the key that has `before` equal ones before it.
template <class I>
int64_t find_equal(const Keys<I>& keys, I key, int64_t before) {
  constexpr int64_t kBlock = 16 * kLanes<I>;
  for (int64_t begin = 0; begin < keys.count; begin += kBlock) {
    const int64_t end = std::min(keys.count, begin + kBlock);
    const auto is_equal = [&](const vec<I>& x) FASTOPS_INLINE_LAMBDA { return x == key; };
    const int64_t equal = count_keys(keys.at + begin, padded<I>(end - begin), is_equal);
    if (before >= equal) {  // the last block may count keys that only fill it, but then it has the one that is wanted
      before -= equal;
      continue;
    }
    for (int64_t i = begin; i < end; ++i) {
      if (keys.at[i] == key && before-- == 0) return i;
    }
  }
  return 0;
}

// A key of 32 bits above its position, so that no two are equal: what few of many are looked for among.
FASTOPS_HD vec<int64_t> with_positions(const int32_t* keys, int64_t first) {
  vec<int64_t> lane_number{};
  for (int l = 0; l < kLanes<int64_t>; ++l) replace(lane_number, l, int64_t(l));
  return (load<int64_t>(keys + first) << 32) | (lane_number + first);
}

// The least `count` of n different numbers, kDepth at most, in order; at(i) is the vector of those from i on. Each lane keeps
// its own least ones, sorted: a number goes down their row, and what is greater at each step goes on in its place.
template <int kDepth, class At>
FASTOPS_HD void find_least(int64_t n, At&& at, int64_t count, int64_t* least) {
  constexpr int kWidth = kLanes<int64_t>;
  vec<int64_t> kept[kDepth];
  unrolled<kDepth>([&](auto d) FASTOPS_INLINE_LAMBDA { kept[d] = vec<int64_t>{} + std::numeric_limits<int64_t>::max(); });
  for (int64_t i = 0; i < n; i += kWidth) {
    vec<int64_t> x = at(i);
    unrolled<kDepth>([&](auto d) FASTOPS_INLINE_LAMBDA {
      const vec<int64_t> less = x < kept[d] ? x : kept[d];
      x = x < kept[d] ? kept[d] : x;
      kept[d] = less;
    });
  }
  for (int64_t i = 0; i < count; ++i) {
    least[i] = min_lanes<int64_t, kWidth>(kept[0]);
    const auto is_taken = kept[0] == vec<int64_t>{} + least[i];
    unrolled<kDepth - 1>([&](auto d) FASTOPS_INLINE_LAMBDA { kept[d] = is_taken ? kept[d + 1] : kept[d]; });
  }
}

// The ranks of keys that fit in a vector, each compared with all.
template <class I>
void rank_together(const Keys<I>& keys, I* ranks) {
  const vec<I> all = unaligned<vec<I>>(keys.at), zero{}, one = zero + I(1);
  vec<I> number{}, counts{};
  for (int l = 0; l < kLanes<I>; ++l) replace(number, l, I(l));
  for (int64_t i = 0; i < keys.count; ++i) {
    const vec<I> key = zero + keys.at[i];
    counts += (all > key) | ((all == key) & (number > zero + I(i))) ? one : zero;
  }
  store(ranks, counts);
}

template <class K>
class Select {
  using I = Key<K>;
  using U = std::make_unsigned_t<I>;

  // A key and its position, in one number where both fit.
  struct Wide {
    static constexpr bool kDistinct = false;
    int64_t key, low;

    static Wide of(int64_t key, int64_t position) { return {key, position}; }
    int64_t position() const { return low; }
    int64_t compared() const { return key; }
    bool operator<(const Wide& other) const { return key < other.key || (key == other.key && low < other.low); }
  };
  struct Packed {
    static constexpr bool kDistinct = true;
    int64_t bits;

    static Packed of(int32_t key, int64_t position) { return {int64_t(key) * (int64_t(1) << 32) + position}; }
    int64_t position() const { return bits & UINT32_MAX; }
    bool operator<(const Packed& other) const { return bits < other.bits; }  // called by the library: not inlined
  };
  using Entry = std::conditional_t<sizeof(I) == 4, Packed, Wide>;

  // What is common to the keys of a column.
  struct Facts {
    I all = -1, any = 0, greatest = std::numeric_limits<I>::min();

    FASTOPS_HD void add(I key) { all &= key, any |= key, greatest = std::max(greatest, key); }
    void add(const Facts& other) { all &= other.all, any |= other.any, greatest = std::max(greatest, other.greatest); }
  };

  // What a thread works with.
  struct Scratch {
    std::unique_ptr<I[]> keys;  // of a tile
    int64_t size = 0;
    std::vector<Facts> facts;  // of each column of it, for each part of the crew
    std::vector<Entry> entries;
  };

  struct Long {
    int64_t outer, tile, segment, begin, length;
  };

  const SelectCall& call_;
  const SegmentsView& segments_;
  const KeyOrder<K> order_;
  const int64_t tile_columns_;

 public:
  explicit Select(const SelectCall& call)
      : call_(call),
        segments_(call.segments),
        order_(call.dtype, call.selection == Selection::top && call.largest),
        tile_columns_(std::min<int64_t>(call.inner, SelectPolicy::kTileBytes / int64_t(sizeof(K)))) {}

  void run(const Pool& pool) {
    const int64_t keys = segments_.num_positions + segments_.num_segments;
    const int64_t tiles = tile_columns_ == 0 ? 0 : ceil_div(call_.inner, tile_columns_), work = call_.outer * tiles * keys;
    if (work == 0 || segments_.num_segments == 0 || call_.count == 0) return;
    const Cutting cut{call_.outer, call_.inner, tile_columns_, SelectPolicy::kLongRows, SelectPolicy::kTaskBytes, sizeof(K)};
    const int64_t threads = num_tasks(cut, segments_, pool);
    const int64_t units = threads == 1 ? 1 : threads * SelectPolicy::kUnitsOfThread;
    std::vector<std::vector<Long>> of_thread(threads);
    std::atomic<int64_t> next{0};
    pool(threads, [&](int64_t thread) {
      Scratch scratch;
      for (int64_t unit = next++; unit < units; unit = next++) {
        for (int64_t at = unit * work / units, end = (unit + 1) * work / units; at < end;) {
          const int64_t slice = at / keys, key = at % keys, last_key = std::min(keys, key + end - at);
          visit(slice / tiles, slice % tiles, key, last_key, scratch, of_thread[thread], pool);
          at += last_key - key;
        }
      }
    });
    Scratch scratch;
    for (const auto& some : of_thread) {
      for (const Long& one : some) take(one, scratch, {pool, pool.num_threads});
    }
  }

 private:
  // The segments with keys (segments.h) in a range.
  void visit(int64_t outer, int64_t tile, int64_t key, int64_t last_key, Scratch& scratch, std::vector<Long>& later, const Pool& pool) {
    constexpr int64_t kWhole = int64_t(1) << 62;  // no segment is cut here
    int64_t s = first_chunk(segments_, key, kWhole).segment;
    if (s >= segments_.num_segments) return;
    for (int64_t begin = segments_.begin(s); s < segments_.num_segments && begin + s < last_key; ++s) {
      const int64_t length = segments_.end(s, begin) - begin;
      const Long one{outer, tile, s, begin, length};
      if (length > SelectPolicy::kLongRows) {
        later.push_back(one);
      } else {
        take(one, scratch, {pool, 1});
      }
      begin += length;
    }
  }

  void take(const Long& one, Scratch& scratch, const Crew& crew) {
    const int64_t first = one.tile * tile_columns_, width = std::min(tile_columns_, call_.inner - first);
    if (one.length == 0) {
      for (int64_t column = first; column < first + width; ++column) {
        for (int64_t i = 0; i < call_.count; ++i) put(one, column, i, -1);
      }
      return;
    }
    // An odd number of lines apart, so that the columns of a row do not share a set of the cache.
    const int64_t stride = (ceil_div(padded<I>(one.length) * sizeof(I), 64) | 1) * 64 / sizeof(I);
    if (scratch.size < width * stride) {
      scratch.size = std::max(width * stride, 2 * scratch.size);
      scratch.keys.reset(new I[scratch.size]);
    }
    bring(one, first, width, stride, scratch, crew);
    for (int64_t c = 0; c < width; ++c) {
      const Facts& facts = scratch.facts[c];
      // All have a sign if none lacks it, and in these keys it is turned.
      const U rest = U(~kSignOf<I>), all = (U(facts.all) & rest) | (U(~facts.any) & kSignOf<I>);
      const U any = (U(facts.any) & rest) | (U(~facts.all) & kSignOf<I>);
      const Keys<I> keys{&scratch.keys[c * stride], one.length, all, any};
      if (call_.selection == Selection::top) {
        take_top(one, first + c, keys, scratch, crew);
      } else {
        take_ranks(one, first + c, keys, facts.greatest, crew);
      }
    }
  }

  // Keys of a tile to scratch, and what is common to those of a column.
  void bring(const Long& one, int64_t first, int64_t width, int64_t stride, Scratch& scratch, const Crew& crew) {
    const int64_t inner = call_.inner;
    const K* data = static_cast<const K*>(call_.data) + one.outer * segments_.num_rows * inner + first;
    const KeyOrder<K> order = order_;  // of its own, which no store can change
    I* keys = scratch.keys.get();
    scratch.facts.assign(crew.parts * width, Facts());
    crew(one.length, [&](int64_t part, int64_t begin, int64_t end) {
      if (width == 1) {
        Facts facts;
        const auto add = [&](int64_t i, K x) FASTOPS_INLINE_LAMBDA { facts.add(keys[i] = make_key(order, x)); };
        if (inner == 1 && !segments_.order) {
          for (int64_t i = begin; i < end; ++i) add(i, data[one.begin + i]);
        } else {
          for (int64_t i = begin; i < end; ++i) add(i, data[segments_.row(one.begin + i) * inner]);
        }
        scratch.facts[part] = facts;
        return;
      }
      for (int64_t i = begin; i < end; ++i) {
        const K* row = data + segments_.row(one.begin + i) * inner;
        for (int64_t c = 0; c < width; ++c) keys[c * stride + i] = make_key(order, row[c]);
      }
      for (int64_t c = 0; c < width; ++c) {
        Facts facts;
        for (int64_t i = begin; i < end; ++i) facts.add(keys[c * stride + i]);
        scratch.facts[part * width + c] = facts;
      }
    });
    for (int64_t c = 0; c < width; ++c) {
      for (int64_t i = one.length; i < padded<I>(one.length); ++i) keys[c * stride + i] = std::numeric_limits<I>::max();
      for (int64_t part = 1; part < crew.parts; ++part) scratch.facts[c].add(scratch.facts[part * width + c]);
    }
  }

  void take_ranks(const Long& one, int64_t column, const Keys<I>& keys, I greatest, const Crew& crew) {
    const bool is_median = call_.selection == Selection::median;
    if (order_.is_nan(K(U(greatest) ^ kSignOf<I>))) {
      const int64_t position = find_equal(keys, greatest, 0);
      for (int64_t i = 0; i < call_.count; ++i) put(one, column, i, position);
      return;
    }
    const bool is_short = one.length <= kLanes<I>;
    I ranks[kLanes<I>];
    if (is_short) rank_together(keys, ranks);
    Rank<I> found{0, 0, 0};  // the last one: the next rank is often its neighbour
    for (int64_t i = 0; i < call_.count; ++i) {
      const int64_t rank = is_median ? (one.length - 1) / 2 : rank_of(i, one.length);
      if (rank < 0) {
        put(one, column, i, -1);
        continue;
      }
      if (is_short) {
        int64_t position = 0;
        while (ranks[position] != rank) ++position;
        if (is_median) position = find_equal(keys, keys.at[position], 0);
        put(one, column, i, position);
        continue;
      }
      if (rank < found.below || rank >= found.below + found.equal) {
        found = found.equal > 0 && rank == found.below + found.equal ? next(keys, found) : find_rank(keys, rank, crew);
      }
      put(one, column, i, find_equal(keys, found.key, is_median ? 0 : rank - found.below));
    }
  }

  int64_t rank_of(int64_t i, int64_t length) const {
    if (!takes_two(call_.interpolation)) return QuantilePlace(call_.q[i], length, call_.interpolation).low;
    const QuantilePlace place(call_.q[i / 2], length, call_.interpolation);
    return i % 2 == 0 ? place.low : place.high;
  }

  // The least key above one.
  static Rank<I> next(const Keys<I>& keys, const Rank<I>& found) {
    I least = std::numeric_limits<I>::max();
    for (int64_t i = 0; i < keys.count; ++i) least = std::min(least, keys.at[i] > found.key ? keys.at[i] : std::numeric_limits<I>::max());
    int64_t equal = 0;
    for (int64_t i = 0; i < keys.count; ++i) equal += keys.at[i] == least;
    return {least, found.below + found.equal, equal};
  }

  void take_top(const Long& one, int64_t column, const Keys<I>& keys, Scratch& scratch, const Crew& crew) {
    const int64_t count = std::min(call_.count, one.length);
    for (int64_t i = count; i < call_.count; ++i) put(one, column, i, -1);
    if constexpr (sizeof(I) == 4) {
      if (count <= SelectPolicy::kLeast && take_least(one, column, keys, count)) return;
    }
    auto& entries = scratch.entries;
    entries.clear();
    if (count == one.length || (call_.sorted && one.length <= kCountRows)) {
      for (int64_t i = 0; i < one.length; ++i) entries.push_back(Entry::of(keys.at[i], i));
    } else {
      const Rank<I> last = find_rank(keys, count - 1, crew);
      int64_t equal = count - last.below;
      list_up_to(keys, last.key, [&](I key, int64_t i) FASTOPS_INLINE_LAMBDA {
        if (key < last.key || equal-- > 0) entries.push_back(Entry::of(key, i));
        return int64_t(entries.size()) < count;
      });
    }
    if (call_.sorted) sort_entries(entries);
    for (int64_t i = 0; i < count; ++i) put(one, column, i, entries[i].position());
  }

  static void sort_entries(std::vector<Entry>& entries) {
    const int64_t n = int64_t(entries.size());
    if (n > kCountRows) return std::sort(entries.begin(), entries.end());
    Entry sorted[kCountRows];  // those of equal keys are listed in order
    entries.resize(n + kBehind);
    sort_by_counting(entries.data(), sorted, n);
    std::copy_n(sorted, n, entries.data());
  }

  // Calls add(key, position) for the keys up to a bound, in the order of rows, until it has enough.
  template <class Add>
  static FASTOPS_HD void list_up_to(const Keys<I>& keys, I bound, Add&& add) {
    constexpr int64_t kBlock = 4 * kLanes<I>;
    for (int64_t begin = 0; begin < keys.count; begin += kBlock) {
      const int64_t end = std::min(keys.count, begin + kBlock);
      const auto is_within = [&](const vec<I>& x) FASTOPS_INLINE_LAMBDA { return x <= bound; };
      if (count_keys(keys.at + begin, padded<I>(end - begin), is_within) == 0) continue;
      for (int64_t i = begin; i < end; ++i) {
        if (keys.at[i] <= bound && !add(keys.at[i], i)) return;
      }
    }
  }

  // The few least keys. Of many keys only those are looked at that are not greater than the greatest of the least ones that as
  // many lanes meet: in most orders there are not many of them. False if there are.
  bool take_least(const Long& one, int64_t column, const Keys<int32_t>& keys, int64_t count) {
    constexpr int kHalf = SelectPolicy::kLeast / 2;
    const auto find = [&](int64_t n, auto&& at, int64_t* least) FASTOPS_INLINE_LAMBDA {
      count <= kHalf ? find_least<kHalf>(n, at, count, least) : find_least<SelectPolicy::kLeast>(n, at, count, least);
    };
    int64_t least[SelectPolicy::kLeast];
    if (keys.count <= SelectPolicy::kLookAtAll || count > kLanes<int32_t>) {
      find(keys.count, [&](int64_t i) FASTOPS_INLINE_LAMBDA { return with_positions(keys.at, i); }, least);
    } else {
      constexpr int64_t kLimit = 4 * kLanes<int32_t>;  // guess: there are seldom more
      int64_t few[kLimit + kLanes<int64_t>], n = 0;
      list_up_to(keys, bound_of_least(keys, count), [&](int32_t key, int64_t i) FASTOPS_INLINE_LAMBDA {
        few[n++] = Entry::of(key, i).bits;
        return n < kLimit;
      });
      if (n == kLimit) return false;
      std::fill_n(few + n, kLanes<int64_t>, std::numeric_limits<int64_t>::max());
      find(n, [&](int64_t i) FASTOPS_INLINE_LAMBDA { return unaligned<vec<int64_t>>(few + i); }, least);
    }
    for (int64_t i = 0; i < count; ++i) least[i] &= UINT32_MAX;  // the position
    if (!call_.sorted) std::sort(least, least + count);
    for (int64_t i = 0; i < count; ++i) put(one, column, i, least[i]);
    return true;
  }

  // As many keys as are wanted, or more, are not greater. There are lanes enough.
  static int32_t bound_of_least(const Keys<int32_t>& keys, int64_t count) {
    constexpr int kWidth = kLanes<int32_t>;
    vec<int32_t> least = unaligned<vec<int32_t>>(keys.at);
    for (int64_t i = kWidth; i < keys.count; i += kWidth) {
      const auto x = unaligned<vec<int32_t>>(keys.at + i);
      least = x < least ? x : least;
    }
    int32_t of_lanes[kWidth], ranks[kWidth];
    store(of_lanes, least);
    rank_together(Keys<int32_t>{of_lanes, kWidth, 0, 0}, ranks);
    int lane = 0;
    while (ranks[lane] != count - 1) ++lane;
    return of_lanes[lane];
  }

  // What is at a position of the segment, or nothing, as element i of its results.
  void put(const Long& one, int64_t column, int64_t i, int64_t position) {
    const int64_t at = ((one.outer * segments_.num_segments + one.segment) * call_.count + i) * call_.inner + column;
    K* values = static_cast<K*>(call_.values);
    if (position < 0) {
      values[at] = K(call_.fill);
      if (call_.indices) call_.indices[at] = -1;
      return;
    }
    const int64_t row = segments_.row(one.begin + position);
    values[at] = static_cast<const K*>(call_.data)[(one.outer * segments_.num_rows + row) * call_.inner + column];
    if (call_.indices) call_.indices[at] = row;
  }
};

// From the rows that were selected to what lies between them.
template <class T>
void interpolate(const SelectCall& call, const Pool& pool) {
  using V = compute_t<T>;
  const int64_t per_quantile = takes_two(call.interpolation) ? 2 : 1, quantiles = call.count / per_quantile;
  const int64_t segments = call.segments.num_segments, all = call.outer * segments, row = call.count * call.inner;
  const int64_t tasks = std::clamp<int64_t>(all * row * int64_t(sizeof(T)) / SelectPolicy::kTaskBytes, 1, pool.num_threads);
  pool(tasks, [&](int64_t task) {
    for (int64_t at = task * all / tasks; at < (task + 1) * all / tasks; ++at) {
      const int64_t s = at % segments, begin = call.segments.begin(s), length = call.segments.end(s, begin) - begin;
      for (int64_t i = 0; i < quantiles; ++i) {
        const QuantilePlace place(call.q[i], length, call.interpolation);
        const T* a = static_cast<const T*>(call.values) + at * row + i * per_quantile * call.inner;
        const T* b = a + (per_quantile - 1) * call.inner;
        T* out = static_cast<T*>(call.between) + (i * all + at) * call.inner;
        const V share = V(place.share);
        for (int64_t c = 0; c < call.inner; ++c) out[c] = store_as<T>(between(load_as<V>(a[c]), load_as<V>(b[c]), share));
        if (call.shares && at < segments) {
          V* shares = static_cast<V*>(call.shares) + s * call.count + i * per_quantile;
          shares[0] = 1 - share;
          if (per_quantile == 2) shares[1] = share;
        }
      }
    }
  });
}

template <class T>
void place_rows(const PlaceCall& call, const Pool& pool) {
  const int64_t segments = call.outer * call.num_segments, row = call.count * call.inner;
  const int64_t tasks = std::clamp<int64_t>(segments * row * int64_t(sizeof(T)) / SelectPolicy::kTaskBytes, 1, pool.num_threads);
  using V = compute_t<T>;
  pool(tasks, [&](int64_t task) {
    for (int64_t at = task * segments / tasks; at < (task + 1) * segments / tasks; ++at) {
      const int64_t begin = at * row, slice = at / call.num_segments * call.num_rows;
      T* out = static_cast<T*>(call.out) + slice * call.inner;
      const T* values = static_cast<const T*>(call.values) + begin;
      const int64_t* indices = call.indices + begin;
      for (int64_t i = 0; i < call.count; ++i) {
        for (int64_t c = 0; c < call.inner; ++c, ++values, ++indices) {
          if (uint64_t(*indices) >= uint64_t(call.num_rows)) continue;
          T& to = out[*indices * call.inner + c];
          to = store_as<T>(V(load_as<V>(to) + load_as<V>(*values)));
        }
      }
    }
  });
}

template <class K, bool back>
void copy_ends(const EndCall& call, const Pool& pool) {
  const int64_t all = call.outer * call.segments.num_segments, inner = call.inner, row_bytes = inner * int64_t(sizeof(K));
  const int64_t tasks = std::clamp<int64_t>(all * std::max<int64_t>(row_bytes, 64) / SelectPolicy::kCopyBytes, 1, pool.num_threads);
  pool(tasks, [&](int64_t task) {
    const SegmentsView view = call.segments;  // of its own, which no store can change
    const K* const from = static_cast<const K*>(call.from);
    K* const to = static_cast<K*>(call.to);
    const K fill = K(call.fill);
    const bool last = call.last;
    for (int64_t at = task * all / tasks, stop = (task + 1) * all / tasks; at < stop;) {
      const int64_t slice = at / view.num_segments, s = at % view.num_segments, stop_here = std::min(stop, at - s + view.num_segments);
      const int64_t rows_before = slice * view.num_rows;
      for (int64_t begin = view.begin(s), next = s + 1; at < stop_here; ++at, ++next) {
        const int64_t after = view.begin(next), end = std::max(begin, after);
        if (begin < end) {
          const int64_t in_data = (rows_before + view.row(last ? end - 1 : begin)) * inner;
          const int64_t source = back ? at * inner : in_data, target = back ? in_data : at * inner;
          if (inner == 1) {  // less than what a call costs
            to[target] = from[source];
          } else {
            std::memcpy(to + target, from + source, row_bytes);
          }
        } else if (!back) {
          std::fill_n(to + at * inner, inner, fill);
        }
        begin = after;
      }
    }
  });
}

}  // namespace

void select(const SelectCall& call, const Pool& pool) {
  visit_width(call.dtype, [&](auto k) { Select<typename decltype(k)::type>(call).run(pool); });
  if (call.selection == Selection::quantiles) {
    visit_floating(call.dtype, [&](auto t) { interpolate<typename decltype(t)::type>(call, pool); });
  }
}

void place(const PlaceCall& call, const Pool& pool) {
  visit_floating(call.dtype, [&](auto t) { place_rows<typename decltype(t)::type>(call, pool); });
}

void copy_ends(const EndCall& call, const Pool& pool) {
  if (call.outer * call.segments.num_segments * call.inner == 0) return;
  visit_width(call.dtype, [&](auto k) {
    using K = typename decltype(k)::type;
    call.back ? copy_ends<K, true>(call, pool) : copy_ends<K, false>(call, pool);
  });
}

}  // namespace FASTOPS_CPU_NAMESPACE
