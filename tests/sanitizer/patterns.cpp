// Runs the CPU kernels over the length patterns of fastops.testing, on exactly sized heap arrays, for AddressSanitizer and
// UndefinedBehaviorSanitizer to watch. It needs no torch. Sums, extrema, orders and broadcasts are compared with plain loops, so
// that a kernel that does nothing does not pass. test_sanitizer.py builds and runs it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "kernels.h"

using namespace fastops;
namespace kernels = FASTOPS_CPU_NAMESPACE;

namespace {

int failures = 0;

void expect(bool ok, const char* what, const char* pattern, int64_t inner) {
  if (ok) return;
  std::printf("wrong: %s, pattern %s, %lld columns\n", what, pattern, static_cast<long long>(inner));
  ++failures;
}

// Two threads, so that ranges begin inside segments.
const cpu::Pool pool{2, [](int64_t tasks, void (*body)(void*, int64_t), void* context) {
                       std::vector<std::thread> threads;
                       for (int64_t task = 0; task < tasks; ++task) threads.emplace_back(body, context, task);
                       for (auto& thread : threads) thread.join();
                     }};

struct Grouping {
  const char* name;
  std::vector<int64_t> lengths;
};

std::vector<Grouping> patterns() {
  std::vector<Grouping> all{{"none", {}},        {"one_empty", {0}},     {"all_empty", {0, 0, 0, 0}},
                            {"one_row", {1}},    {"trailing", {3, 0, 4, 0, 0}}};
  for (int64_t base : {4, 32, 128, 512, 1024, 2048, 4096}) all.push_back({"around", {base - 1, base, base + 1}});
  all.push_back({"uniform", std::vector<int64_t>(200, 16)});
  all.push_back({"tiny", std::vector<int64_t>(5000, 2)});
  Grouping giant{"giant", std::vector<int64_t>(300, 1)};
  giant.lengths[150] = 20000;
  all.push_back(giant);
  giant.lengths[150] = 70000;  // which is sorted by all threads
  all.push_back(giant);
  return all;
}

// Memory that ends where the array ends.
struct Array {
  std::unique_ptr<char[]> bytes;
  explicit Array(int64_t size) : bytes(new char[size]) {}
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(bytes.get());
  }
};

template <class Id>
void run(const Grouping& grouping, int64_t inner, bool shuffled, int damage) {
  std::mt19937 random(7);
  const int64_t segments = int64_t(grouping.lengths.size());
  const int64_t rows = std::accumulate(grouping.lengths.begin(), grouping.lengths.end(), int64_t{0});
  if (rows * inner > 150000) return;
  Array offsets_array((segments + 1) * sizeof(Id)), order_array(rows * sizeof(Id)), index_array(rows * sizeof(Id));
  Id *offsets = offsets_array.as<Id>(), *order = order_array.as<Id>(), *index = index_array.as<Id>();
  offsets[0] = 0;
  for (int64_t s = 0, r = 0; s < segments; ++s) {
    offsets[s + 1] = Id(offsets[s] + grouping.lengths[s]);
    for (; r < offsets[s + 1]; ++r) index[r] = Id(s);
  }
  if (shuffled) std::shuffle(index, index + rows, random);
  {
    Array grouped((segments + 1) * sizeof(Id));
    kernels::group({{index, sizeof(Id) == 8}, grouped.as<Id>(), shuffled ? order : nullptr, segments, rows}, pool);
    expect(std::equal(offsets, offsets + segments + 1, grouped.as<Id>()), "group", grouping.name, inner);
    if (!shuffled) std::iota(order, order + rows, Id{0});
  }
  if (damage) {  // offsets and rows that nobody checked: any result, but no access outside
    std::uniform_int_distribution<int64_t> any(-3, 2 * rows + 3);
    for (int64_t i = 0; i <= segments; i += damage) offsets[i] = Id(any(random));
    for (int64_t i = 0; i < rows; i += damage) order[i] = index[i] = Id(any(random));
  }
  SegmentsView view;
  view.offsets = {offsets, sizeof(Id) == 8};
  if (shuffled) view.order = {order, sizeof(Id) == 8}, view.index = {index, sizeof(Id) == 8};
  view.num_segments = segments;
  view.num_rows = view.num_positions = rows;

  for (DType dtype : {DType::u8, DType::i8, DType::i16, DType::i32, DType::i64, DType::f16, DType::bf16, DType::f32, DType::f64}) {
    Array data(rows * inner * size_of(dtype));
    for (int64_t i = 0; i < rows * inner; ++i) {
      const int x = int(random() % 9) - 4;
      switch (dtype) {
        case DType::f16: data.as<Half>()[i] = to_half(float(x)); break;
        case DType::bf16: data.as<BFloat16>()[i] = to_bfloat16(float(x)); break;
        case DType::f32: data.as<float>()[i] = float(x); break;
        case DType::f64: data.as<double>()[i] = x; break;
        case DType::i64: data.as<int64_t>()[i] = x; break;
        case DType::i32: data.as<int32_t>()[i] = x; break;
        case DType::i16: data.as<int16_t>()[i] = int16_t(x); break;
        default: data.as<int8_t>()[i] = int8_t(x);
      }
    }
    const bool floating = size_of(dtype) == 2 ? dtype != DType::i16 : dtype == DType::f32 || dtype == DType::f64;
    Array out(segments * inner * 8), extra(segments * inner * 8);
    for (Reduction reduction : {Reduction::sum, Reduction::mean, Reduction::prod, Reduction::amax, Reduction::amin, Reduction::max,
                                Reduction::min, Reduction::amax_count, Reduction::amin_count, Reduction::any, Reduction::all,
                                Reduction::prod_parts, Reduction::logsumexp, Reduction::moments}) {
      const bool counts = reduction == Reduction::amax_count || reduction == Reduction::amin_count || reduction == Reduction::prod_parts;
      const bool only_floating = counts || reduction == Reduction::mean || reduction == Reduction::logsumexp || reduction == Reduction::moments;
      if (only_floating && !floating) continue;
      const bool with_extra = counts || reduction == Reduction::max || reduction == Reduction::min;
      ReduceCall call{reduction, dtype, false, data.bytes.get(), out.bytes.get(), with_extra ? extra.as<int64_t>() : nullptr,
                      0, 0, -1, reduction == Reduction::moments && !shuffled ? extra.bytes.get() : nullptr, 1, false, {}, view, 1, inner};
      kernels::reduce(call, pool);
      if (damage || dtype != DType::f32 || (reduction != Reduction::sum && reduction != Reduction::amin)) continue;
      bool same = true;
      for (int64_t s = 0; s < segments; ++s) {
        for (int64_t c = 0; c < inner; ++c) {
          float want = 0;  // small integers: exact in any order
          for (int64_t p = offsets[s]; p < offsets[s + 1]; ++p) {
            const float x = data.as<float>()[order[p] * inner + c];
            want = reduction == Reduction::sum ? want + x : p == offsets[s] ? x : std::min(want, x);
          }
          same &= out.as<float>()[s * inner + c] == want;
        }
      }
      expect(same, reduction == Reduction::sum ? "sum" : "amin", grouping.name, inner);
    }
    Array sorted(rows * inner * size_of(dtype)), origins(rows * inner * 8);
    for (bool descending : {false, true}) {
      kernels::sort({Sorted::rows, dtype, descending, data.bytes.get(), sorted.bytes.get(), origins.as<int64_t>(), nullptr, 0, view, 1, inner},
                    pool);
      if (damage || dtype != DType::f32) continue;
      bool same = true;
      std::vector<int64_t> members;
      for (int64_t s = 0; s < segments; ++s) {
        for (int64_t c = 0; c < inner; ++c) {
          const auto at = [&](int64_t row) { return data.as<float>()[row * inner + c]; };
          members.assign(order + offsets[s], order + offsets[s + 1]);
          std::stable_sort(members.begin(), members.end(), [&](int64_t a, int64_t b) { return descending ? at(b) < at(a) : at(a) < at(b); });
          for (int64_t p = offsets[s]; p < offsets[s + 1]; ++p) {
            const int64_t row = members[p - offsets[s]];
            same &= origins.as<int64_t>()[p * inner + c] == row && sorted.as<float>()[p * inner + c] == at(row);
          }
        }
      }
      expect(same, "sort", grouping.name, inner);
    }
    {
      Array modes(segments * inner * size_of(dtype)), mode_rows(segments * inner * 8), counts(segments * inner * 8);
      SortCall call{Sorted::mode, dtype, false, data.bytes.get(), modes.bytes.get(), mode_rows.as<int64_t>(), counts.as<int64_t>(), 0, view,
                    1, inner};
      kernels::sort(call, pool);
      call.wanted = Sorted::nunique;
      kernels::sort(call, pool);
      bool same = true;
      for (int64_t s = 0; s < (damage || dtype != DType::f32 ? 0 : segments); ++s) {
        for (int64_t c = 0; c < inner; ++c) {
          int64_t number[9] = {}, first[9], best = 0, different = 0;  // of the values from -4 on
          for (int64_t p = offsets[s + 1]; p-- > offsets[s];) {
            const int x = int(data.as<float>()[order[p] * inner + c]) + 4;
            ++number[x], first[x] = order[p];
          }
          for (int x = 0; x < 9; ++x) {
            different += number[x] > 0;
            if (number[x] > number[best]) best = x;
          }
          const bool none = offsets[s + 1] == offsets[s];
          same &= counts.as<int64_t>()[s * inner + c] == different && mode_rows.as<int64_t>()[s * inner + c] == (none ? -1 : first[best]);
          same &= modes.as<float>()[s * inner + c] == (none ? 0 : float(best - 4));
        }
      }
      expect(same, "mode", grouping.name, inner);
    }
    Array running(rows * inner * 8), numbers(rows * inner * 8);
    for (Scan kind : {Scan::sum, Scan::prod, Scan::max, Scan::min, Scan::logsumexp, Scan::linear}) {
      if (!floating && (kind == Scan::logsumexp || kind == Scan::linear)) continue;
      const bool has_rows = kind == Scan::max || kind == Scan::min;
      if (!floating && !has_rows && size_of(dtype) < 4) continue;  // widened by the host
      for (int way = 0; way < 4; ++way) {
        const bool exclusive = way % 2 == 1, reverse = way / 2 == 1;
        kernels::scan({kind, dtype, data.bytes.get(), kind == Scan::linear ? data.bytes.get() : nullptr, running.bytes.get(),
                       has_rows ? numbers.as<int64_t>() : nullptr, exclusive, reverse, view, 1, inner}, pool);
        if (damage || dtype != DType::f32 || kind != Scan::sum) continue;
        bool same = true;
        for (int64_t s = 0; s < segments; ++s) {
          for (int64_t c = 0; c < inner; ++c) {
            float sum = 0;  // small integers: exact in any order
            for (int64_t i = 0, n = offsets[s + 1] - offsets[s]; i < n; ++i) {
              const int64_t at = order[reverse ? offsets[s + 1] - 1 - i : offsets[s] + i] * inner + c;
              const float before = sum;
              sum += data.as<float>()[at];
              same &= running.as<float>()[at] == (exclusive ? before : sum);
            }
          }
        }
        expect(same, "cumsum", grouping.name, inner);
      }
    }
    for (Selection selection : {Selection::median, Selection::top}) {
      const int64_t count = selection == Selection::top ? 3 : 1;
      Array selected(segments * count * inner * size_of(dtype)), selected_rows(segments * count * inner * 8);
      SelectCall call{};
      call.selection = selection;
      call.dtype = dtype;
      call.data = data.bytes.get();
      call.count = count;
      call.largest = call.sorted = true;
      call.values = selected.bytes.get();
      call.indices = selected_rows.as<int64_t>();
      call.segments = view;
      call.outer = 1;
      call.inner = inner;
      kernels::select(call, pool);
    }
    for (bool last : {false, true}) {
      Array ends(segments * inner * size_of(dtype)), back(rows * inner * size_of(dtype));
      std::memset(back.bytes.get(), 0, rows * inner * size_of(dtype));
      kernels::copy_ends({last, false, dtype, data.bytes.get(), ends.bytes.get(), 0, view, 1, inner}, pool);
      kernels::copy_ends({last, true, dtype, ends.bytes.get(), back.bytes.get(), 0, view, 1, inner}, pool);
      if (damage || dtype != DType::f32) continue;
      bool same = true;
      for (int64_t s = 0; s < segments; ++s) {
        for (int64_t p = offsets[s]; p < offsets[s + 1]; ++p) {
          const bool is_end = p == (last ? offsets[s + 1] - 1 : offsets[s]);
          for (int64_t c = 0; c < inner; ++c) {
            const float x = data.as<float>()[order[p] * inner + c];
            same &= back.as<float>()[order[p] * inner + c] == (is_end ? x : 0) && (!is_end || ends.as<float>()[s * inner + c] == x);
          }
        }
      }
      expect(same, last ? "last" : "first", grouping.name, inner);
    }
    if (!floating) continue;
    Array values(segments * inner * 8), result(segments * inner * 8), counts(segments * inner * 8),
        back(rows * inner * size_of(dtype));
    std::memset(values.bytes.get(), 0x3c, segments * inner * 8);
    std::memset(result.bytes.get(), 0x3c, segments * inner * 8);
    std::fill(counts.as<int64_t>(), counts.as<int64_t>() + segments * inner, int64_t{1});
    for (RowMap map : {RowMap::broadcast, RowMap::mean, RowMap::select, RowMap::extremum, RowMap::prod, RowMap::logsumexp,
                       RowMap::variance}) {
      std::memset(back.bytes.get(), 0, rows * inner * size_of(dtype));
      kernels::map_rows({map, dtype, data.bytes.get(), back.bytes.get(), {values.bytes.get(), result.bytes.get(), counts.as<int64_t>(), 1.0, {}},
                         view, 1, inner}, pool);
      if (map != RowMap::broadcast || damage) continue;
      expect(std::memcmp(back.bytes.get(), values.bytes.get(), std::min(rows, segments) * inner * size_of(dtype)) == 0, "broadcast",
             grouping.name, inner);
    }
    const int64_t size = size_of(dtype) == 8 ? 8 : 4;  // of what is computed in
    for (int64_t per_head : {int64_t{1}, inner % 4 == 0 ? int64_t{4} : inner, inner}) {
      if (per_head == 0) continue;
      const int64_t heads = inner / per_head;
      Array weights(rows * heads * size), sums(segments * inner * 8), towards(rows * heads * size);
      std::memset(weights.bytes.get(), 0x3c, rows * heads * size);
      ReduceCall call{Reduction::sum, dtype, false, data.bytes.get(), sums.bytes.get(), nullptr, 0, 0, 0, nullptr, 0, false, {}, view, 1, inner};
      call.weights = {weights.bytes.get(), heads, per_head};
      kernels::reduce(call, pool);
      RowMapCall back_call{RowMap::weighted, dtype, nullptr, back.bytes.get(), {values.bytes.get(), nullptr, nullptr, 0, call.weights}, view, 1, inner};
      kernels::map_rows(back_call, pool);
      kernels::dot_rows({dtype, values.bytes.get(), data.bytes.get(), towards.bytes.get(), heads, per_head, view, 1, inner}, pool);
      if (damage || dtype != DType::f32) continue;
      const float weight = rows * heads > 0 ? weights.as<float>()[0] : 0;
      bool same = true;
      for (int64_t s = 0; s < segments; ++s) {
        for (int64_t c = 0; c < inner; ++c) {
          float want = 0;
          for (int64_t p = offsets[s]; p < offsets[s + 1]; ++p) want += data.as<float>()[order[p] * inner + c];
          same &= std::abs(sums.as<float>()[s * inner + c] - want * weight) <= 1e-5f * float(offsets[s + 1] - offsets[s]);
        }
      }
      expect(same, "weighted sum", grouping.name, inner);
    }
    for (Normalise kind : {Normalise::softmax, Normalise::log_softmax, Normalise::softmax_backward, Normalise::log_softmax_backward}) {
      kernels::normalise({kind, dtype, data.bytes.get(), is_derivative(kind) ? data.bytes.get() : nullptr, back.bytes.get(), view, 1, inner},
                         pool);
      if (damage || dtype != DType::f32 || kind != Normalise::softmax) continue;
      double total = 0, filled = 0;
      for (int64_t i = 0; i < rows * inner; ++i) total += back.as<float>()[i];
      for (int64_t s = 0; s < segments; ++s) filled += offsets[s + 1] > offsets[s];
      expect(std::abs(total - filled * inner) <= 1e-4 * filled * inner, "softmax", grouping.name, inner);
    }
  }
}

}  // namespace

int main() {
  for (const Grouping& grouping : patterns()) {
    for (int64_t inner : {0, 1, 3, 4, 8, 64, 129}) {
      for (bool shuffled : {false, true}) {
        for (int damage : {0, 1, 3}) {
          run<int64_t>(grouping, inner, shuffled, damage);
          if (inner == 3) run<int32_t>(grouping, inner, shuffled, damage);
        }
      }
    }
  }
  std::printf("%d wrong\n", failures);
  return failures != 0;
}
