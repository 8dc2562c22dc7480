// From run-time types to template arguments, for the kernels of both devices.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "kernels.h"
#include "numeric.h"
#include "reducers.h"

namespace fastops {

template <class T>
struct Type {
  using type = T;
};

// A reducer and the types it runs with: elements as it meets them, what it computes in, elements of the result.
template <template <class, class> class R, class T_, class V_, class Out_>
struct ReducerTypes {
  template <class V, class I>
  using Reducer = R<V, I>;
  using T = T_;
  using V = V_;
  using Out = Out_;
  using Source = T_;  // elements of data
  static constexpr bool kWeighted = false;
};

// A sum of elements that are multiplied by weights before it meets them.
template <class Source_>
struct WeightedSumTypes {
  template <class V, class I>
  using Reducer = Sum<V, I>;
  using V = std::conditional_t<is_floating<Source_>, compute_t<Source_>, uint64_t>;
  using T = V;
  using Out = Source_;
  using Source = Source_;
  static constexpr bool kWeighted = true;
};

// Inlined wherever it is called, since copies for several instruction sets must not be merged.
[[noreturn]]
#if defined(__GNUC__) || defined(__clang__)
__attribute__((always_inline))
#endif
inline void unsupported() {
  throw std::logic_error("fastops: no kernel for this reduction and dtype");
}

template <class Visit>
void visit_floating(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::f16: return visit(Type<Half>{});
    case DType::bf16: return visit(Type<BFloat16>{});
    case DType::f32: return visit(Type<float>{});
    case DType::f64: return visit(Type<double>{});
    default: unsupported();
  }
}

template <class Visit>
void visit_integer(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::b8:
    case DType::u8: return visit(Type<uint8_t>{});
    case DType::i8: return visit(Type<int8_t>{});
    case DType::i16: return visit(Type<int16_t>{});
    case DType::i32: return visit(Type<int32_t>{});
    case DType::i64: return visit(Type<int64_t>{});
    default: unsupported();
  }
}

constexpr bool is_floating_dtype(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
}

template <class Visit>
void visit_any(DType dtype, Visit&& visit) {
  if (is_floating_dtype(dtype)) {
    visit_floating(dtype, visit);
  } else {
    visit_integer(dtype, visit);
  }
}

// With the unsigned integers that are as wide: for kernels that only compare and move elements (keys.h).
template <class Visit>
void visit_width(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::b8:
    case DType::u8:
    case DType::i8: return visit(Type<uint8_t>{});
    case DType::f16:
    case DType::bf16:
    case DType::i16: return visit(Type<uint16_t>{});
    case DType::f32:
    case DType::i32: return visit(Type<uint32_t>{});
    case DType::f64:
    case DType::i64: return visit(Type<uint64_t>{});
  }
  unsupported();
}

// Calls visit(ReducerTypes<...>{}) for the reduction and dtype of a prepared call: the one list of what there is.
template <class Visit>
void visit_reducer(Reduction reduction, DType dtype, Visit&& visit) {
  // Integers add and multiply without a sign, where wrapping round is defined.
  switch (reduction) {
    case Reduction::sum:
      if (!is_floating_dtype(dtype)) {
        return visit_integer(dtype, [&](auto t) {
          visit(ReducerTypes<Sum, typename decltype(t)::type, uint64_t, int64_t>{});
        });
      }
      return visit_floating(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<Sum, T, compute_t<T>, T>{});
      });
    case Reduction::prod:
      if (!is_floating_dtype(dtype)) {
        return visit_integer(dtype, [&](auto t) {
          visit(ReducerTypes<Product, typename decltype(t)::type, uint64_t, int64_t>{});
        });
      }
      return visit_floating(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<FloatProduct, T, compute_t<T>, T>{});
      });
    case Reduction::mean:
      return visit_floating(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<Mean, T, compute_t<T>, T>{});
      });
    case Reduction::amax:
      return visit_any(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<Extremum::Value, T, compute_t<T>, T>{});
      });
    case Reduction::max:
      return visit_any(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<Extremum::WithRow, T, compute_t<T>, T>{});
      });
    case Reduction::amax_count:
      return visit_floating(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<Extremum::WithCount, T, compute_t<T>, T>{});
      });
    case Reduction::any:
    case Reduction::all:
      return visit_integer(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        if constexpr (!std::is_same_v<T, int8_t>) {
          if (reduction == Reduction::any) return visit(ReducerTypes<Truth<false>::Of, T, compute_t<T>, uint8_t>{});
          visit(ReducerTypes<Truth<true>::Of, T, compute_t<T>, uint8_t>{});
        }
      });
    case Reduction::amin:
    case Reduction::min:
    case Reduction::amin_count:
      break;  // these, and any and all of other types, run as something else: see PreparedReduce
    case Reduction::logsumexp:
      return visit_floating(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<LogSumExp, T, compute_t<T>, T>{});
      });
    case Reduction::moments:
      return visit_floating(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<Moments, T, compute_t<T>, T>{});
      });
    case Reduction::prod_parts:
      return visit_floating(dtype, [&](auto t) {
        visit(ReducerTypes<ProductParts, typename decltype(t)::type, double, double>{});
      });
  }
  unsupported();
}

// Calls visit(ReducerTypes<...>{}) for a scan: Wide<T> is what sums and products of floating T run in, and what extrema of
// all types are looked for in is Ordered<T>.
template <template <class> class Wide, template <class> class Ordered, class Visit>
void visit_scan(Scan kind, DType dtype, Visit&& visit) {
  switch (kind) {
    case Scan::sum:
    case Scan::prod:
      if (!is_floating_dtype(dtype)) {
        const auto visit_type = [&](auto t) {
          using T = typename decltype(t)::type;
          if (kind == Scan::sum) return visit(ReducerTypes<Sum, T, uint64_t, int64_t>{});
          visit(ReducerTypes<Product, T, uint64_t, int64_t>{});
        };
        if (dtype == DType::i32) return visit_type(Type<int32_t>{});
        if (dtype == DType::i64) return visit_type(Type<int64_t>{});
        unsupported();
      }
      return visit_floating(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        if (kind == Scan::sum) return visit(ReducerTypes<Sum, T, Wide<T>, T>{});
        visit(ReducerTypes<FloatProduct, T, Wide<T>, T>{});
      });
    case Scan::max:
    case Scan::min:
      return visit_any(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<Extremum::WithRow, T, Ordered<T>, T>{});
      });
    case Scan::logsumexp:
      return visit_floating(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<LogSumExp, T, compute_t<T>, T>{});
      });
    case Scan::linear:
      return visit_floating(dtype, [&](auto t) {
        using T = typename decltype(t)::type;
        visit(ReducerTypes<Linear, T, Wide<T>, T>{});
      });
  }
  unsupported();
}

// The call as kernels take it. What has none runs as something else: the smallest as the largest of mirrored elements,
// and whether elements are zero by their bits.
struct PreparedReduce {
  ReduceCall call;
  bool mirror = false;
  int64_t truth_mask = 0;

  FASTOPS_HD explicit PreparedReduce(const ReduceCall& original) : call(original) {
    switch (call.reduction) {
      case Reduction::amin:
        mirror = true, call.reduction = Reduction::amax;
        return;
      case Reduction::min:
        mirror = true, call.reduction = Reduction::max;
        return;
      case Reduction::amin_count:
        mirror = true, call.reduction = Reduction::amax_count;
        return;
      case Reduction::any:
      case Reduction::all:
        break;
      default:
        return;
    }
    truth_mask = -1;
    switch (call.dtype) {  // a zero may have a sign
      case DType::f16:
      case DType::bf16:
        call.dtype = DType::i16, truth_mask = INT16_MAX;
        return;
      case DType::f32:
        call.dtype = DType::i32, truth_mask = INT32_MAX;
        return;
      case DType::f64:
        call.dtype = DType::i64, truth_mask = INT64_MAX;
        return;
      case DType::i8:
        call.dtype = DType::u8;
        return;
      default:
        return;
    }
  }
};

}  // namespace fastops
