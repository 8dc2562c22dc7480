// Elements of given rank, and the greatest or least ones, of each segment and column: by selection, without sorting.
//
// A segment's elements are brought together as keys (keys.h), a column behind the other. The key of a rank is found bit by
// bit from the top, by counting how many keys are less than a trial: passes of vectors over keys that stay in the caches, as
// many as it takes to tell one key from the others. Many keys are first made few by a histogram of their leading bits. What
// has that key, or less, is then looked up in the order of rows. A thread takes segments; a very long one is taken by all
// threads. Bytes moved for each element: it is read once, and the rest happens in the caches unless the segment is long.
#include "cpu/capability.h"

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
template <class T>
using Key = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

template <class I>
inline constexpr std::make_unsigned_t<I> kSignOf = std::make_unsigned_t<I>(1) << (8 * sizeof(I) - 1);

template <class T>
FASTOPS_HD Key<T> make_key(T x, bool descending) {
  return Key<T>(std::make_unsigned_t<Key<T>>(key_of(x, descending)) ^ kSignOf<Key<T>>);
}

// What a NaN becomes, of which nothing is greater.
template <class T>
inline constexpr Key<T> kNanKey = Key<T>(std::make_unsigned_t<Key<T>>(key_t<T>(~key_t<T>(0))) ^ kSignOf<Key<T>>);

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

template <class T>
class Select {
  using I = Key<T>;
  using U = std::make_unsigned_t<I>;

  struct Entry {
    I key;
    int64_t position;
    bool operator<(const Entry& other) const { return key < other.key || (key == other.key && position < other.position); }
  };

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
  const bool descending_;
  const int64_t tile_columns_;
  const T fill_;

 public:
  explicit Select(const SelectCall& call)
      : call_(call),
        segments_(call.segments),
        descending_(call.selection == Selection::top && call.largest),
        tile_columns_(std::min<int64_t>(call.inner, SelectPolicy::kTileBytes / int64_t(sizeof(T)))),
        fill_(fill_of(call)) {}

  void run(const Pool& pool) {
    const int64_t keys = segments_.num_positions + segments_.num_segments;
    const int64_t tiles = tile_columns_ == 0 ? 0 : ceil_div(call_.inner, tile_columns_), work = call_.outer * tiles * keys;
    if (work == 0 || segments_.num_segments == 0 || call_.count == 0) return;
    const Cutting cut{call_.outer, call_.inner, tile_columns_, SelectPolicy::kLongRows, SelectPolicy::kTaskBytes, sizeof(T)};
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
  static T fill_of(const SelectCall& call) {
    if constexpr (is_floating<T>) {
      return store_as<T>(compute_t<T>(call.fill));
    } else {
      return T(call.fill_integer);
    }
  }

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
    if (one.length == 0 || call_.selection == Selection::first || call_.selection == Selection::last) {
      const int64_t position = one.length == 0 ? -1 : call_.selection == Selection::first ? 0 : one.length - 1;
      for (int64_t column = first; column < first + width; ++column) {
        for (int64_t i = 0; i < call_.count; ++i) put(one, column, i, position);
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
    const T* data = static_cast<const T*>(call_.data) + one.outer * segments_.num_rows * inner + first;
    I* keys = scratch.keys.get();
    scratch.facts.assign(crew.parts * width, Facts());
    crew(one.length, [&](int64_t part, int64_t begin, int64_t end) {
      if (width == 1) {
        Facts facts;
        const auto add = [&](int64_t i, T x) FASTOPS_INLINE_LAMBDA { facts.add(keys[i] = make_key(x, descending_)); };
        if (inner == 1 && !segments_.order) {
          for (int64_t i = begin; i < end; ++i) add(i, data[one.begin + i]);
        } else {
          for (int64_t i = begin; i < end; ++i) add(i, data[segments_.row(one.begin + i) * inner]);
        }
        scratch.facts[part] = facts;
        return;
      }
      for (int64_t i = begin; i < end; ++i) {
        const T* row = data + segments_.row(one.begin + i) * inner;
        for (int64_t c = 0; c < width; ++c) keys[c * stride + i] = make_key(row[c], descending_);
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
    if (is_floating<T> && greatest == kNanKey<T>) {
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
    auto& entries = scratch.entries;
    entries.clear();
    if (one.length <= kLanes<I> && call_.sorted) {
      I ranks[kLanes<I>];
      rank_together(keys, ranks);
      for (int64_t i = 0; i < one.length; ++i) {
        if (ranks[i] < count) put(one, column, ranks[i], i);
      }
      for (int64_t i = count; i < call_.count; ++i) put(one, column, i, -1);
      return;
    }
    if (count == one.length) {
      for (int64_t i = 0; i < count; ++i) entries.push_back({keys.at[i], i});
    } else if (!list_few(keys, count, entries)) {
      const Rank<I> last = find_rank(keys, count - 1, crew);
      int64_t equal = count - last.below;
      list_up_to(keys, last.key, [&](I key, int64_t i) FASTOPS_INLINE_LAMBDA {
        if (key < last.key || equal-- > 0) entries.push_back({key, i});
        return int64_t(entries.size()) < count;
      });
    }
    if (call_.sorted) std::sort(entries.begin(), entries.end());
    for (int64_t i = 0; i < call_.count; ++i) put(one, column, i, i < count ? entries[i].position : -1);
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

  // The least `count` keys, if there are few of them: none is greater than the greatest of the least ones that as many lanes
  // meet, and in most orders not many others are less than that. Reads the keys twice. False if there were many.
  bool list_few(const Keys<I>& keys, int64_t count, std::vector<Entry>& entries) {
    constexpr int64_t kLimit = 4 * kLanes<I>;  // guess: sorting more takes longer than finding the rank
    if (count > kLanes<I> / 2 || keys.count <= kLanes<I>) return false;
    vec<I> least = unaligned<vec<I>>(keys.at);
    for (int64_t i = kLanes<I>; i < keys.count; i += kLanes<I>) {
      const vec<I> x = unaligned<vec<I>>(keys.at + i);
      least = x < least ? x : least;
    }
    I of_lanes[kLanes<I>], ranks[kLanes<I>];
    store(of_lanes, least);
    rank_together(Keys<I>{of_lanes, kLanes<I>, 0, 0}, ranks);
    int lane = 0;
    while (ranks[lane] != count - 1) ++lane;
    list_up_to(keys, of_lanes[lane], [&](I key, int64_t i) FASTOPS_INLINE_LAMBDA {
      entries.push_back({key, i});
      return int64_t(entries.size()) < kLimit;
    });
    const bool is_few = int64_t(entries.size()) < kLimit;
    if (is_few) {
      std::sort(entries.begin(), entries.end());
      entries.resize(count);
      if (!call_.sorted) std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.position < b.position; });
    } else {
      entries.clear();
    }
    return is_few;
  }

  // What is at a position of the segment, or nothing, as element i of its results.
  void put(const Long& one, int64_t column, int64_t i, int64_t position) {
    const int64_t at = ((one.outer * segments_.num_segments + one.segment) * call_.count + i) * call_.inner + column;
    T* values = static_cast<T*>(call_.values);
    if (position < 0) {
      values[at] = fill_;
      if (call_.indices) call_.indices[at] = -1;
      return;
    }
    const int64_t row = segments_.row(one.begin + position);
    values[at] = static_cast<const T*>(call_.data)[(one.outer * segments_.num_rows + row) * call_.inner + column];
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

}  // namespace

void select(const SelectCall& call, const Pool& pool) {
  visit_any(call.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    Select<T>(call).run(pool);
    if constexpr (is_floating<T>) {
      if (call.selection == Selection::quantiles) interpolate<T>(call, pool);
    }
  });
}

void place(const PlaceCall& call, const Pool& pool) {
  visit_floating(call.dtype, [&](auto t) { place_rows<typename decltype(t)::type>(call, pool); });
}

}  // namespace FASTOPS_CPU_NAMESPACE
