// Loading and storing several elements at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstring>

#include "dispatch.h"
#include "numeric.h"

namespace fastops::cuda {

constexpr int kVectorBytes = 16;

// Bits are bits: rows are copied in the largest units that they consist of. Calls visit(Type<...>{}) for that of rows of so many
// bytes in two arrays.
template <class Visit>
void visit_unit(int64_t row_bytes, const void* from, const void* to, Visit&& visit) {
  const uint64_t common = uint64_t(row_bytes) | reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  if (common % sizeof(uint4) == 0) return visit(Type<uint4>{});
  if (common % sizeof(uint64_t) == 0) return visit(Type<uint64_t>{});
  if (common % sizeof(uint32_t) == 0) return visit(Type<uint32_t>{});
  if (common % sizeof(uint16_t) == 0) return visit(Type<uint16_t>{});
  visit(Type<uint8_t>{});
}

// kVec neighbouring elements as they stand in memory: one, or 16 bytes, in the registers that suit their type.
template <class T>
struct Vector {
  using type = uint4;
};
template <>
struct Vector<float> {
  using type = float4;
};
template <>
struct Vector<double> {
  using type = double2;
};
template <>
struct Vector<int64_t> {
  using type = longlong2;
};
template <>
struct Vector<uint64_t> {
  using type = ulonglong2;
};

template <class T, int kVec>
struct Pack {
  static_assert(sizeof(T) * kVec == kVectorBytes);
  typename Vector<T>::type vector;
  __device__ __forceinline__ T operator[](int e) const {
    if constexpr (sizeof(T) == 8) {
      return e == 0 ? vector.x : vector.y;
    } else {
      constexpr int kInWord = 4 / sizeof(T);
      const int w = e / kInWord;
      const auto word = w == 0 ? vector.x : w == 1 ? vector.y : w == 2 ? vector.z : vector.w;
      if constexpr (sizeof(T) == 4) {
        return bit_cast<T>(word);
      } else if constexpr (sizeof(T) == 2) {
        return bit_cast<T>(uint16_t(word >> (e % kInWord * 16)));
      } else {
        return bit_cast<T>(uint8_t(word >> (e % kInWord * 8)));
      }
    }
  }
};
template <class T>
struct Pack<T, 1> {
  T element;
  __device__ __forceinline__ T operator[](int) const { return element; }
};

template <class T, int kVec>
struct alignas(sizeof(T) * kVec) Piece {
  T element[kVec];
};

// kVec neighbouring elements, in pieces of 16 bytes if they are so many.
template <class T, int kVec>
__device__ __forceinline__ void store_pack(T* to, const T (&x)[kVec]) {
  if constexpr (kVec == 1) {
    *to = x[0];
  } else if constexpr (sizeof(T) * kVec < kVectorBytes) {
    Piece<T, kVec> piece;
#pragma unroll
    for (int e = 0; e < kVec; ++e) piece.element[e] = x[e];
    *reinterpret_cast<Piece<T, kVec>*>(to) = piece;
  } else if constexpr (sizeof(T) * kVec > kVectorBytes) {
    constexpr int kPiece = kVectorBytes / int(sizeof(T));
#pragma unroll
    for (int i = 0; i < kVec; i += kPiece) {
      T piece[kPiece];
#pragma unroll
      for (int e = 0; e < kPiece; ++e) piece[e] = x[i + e];
      store_pack(to + i, piece);
    }
  } else {
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      if constexpr (sizeof(T) == 8) {
        const uint64_t bits = bit_cast<uint64_t>(x[e]);
        words[2 * e] = uint32_t(bits);
        words[2 * e + 1] = uint32_t(bits >> 32);
      } else if constexpr (sizeof(T) == 4) {
        words[e] = bit_cast<uint32_t>(x[e]);
      } else if constexpr (sizeof(T) == 2) {
        words[e / 2] |= uint32_t(bit_cast<uint16_t>(x[e])) << (e % 2 * 16);
      } else {
        words[e / 4] |= uint32_t(bit_cast<uint8_t>(x[e])) << (e % 4 * 8);
      }
    }
    // Spelt out, because an assignment can end as four stores.
    __stwb(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// kVec neighbouring structures of whole words.
template <class S, int kVec>
__device__ __forceinline__ void store_words(S* to, const S (&x)[kVec]) {
  constexpr int kWords = sizeof(S) / 4;
  if constexpr (kVec == 1 || kWords * kVec % 4 != 0) {
#pragma unroll
    for (int e = 0; e < kVec; ++e) to[e] = x[e];
  } else {
    static_assert(sizeof(S) % 4 == 0);
    uint32_t words[kWords * kVec];
#pragma unroll
    for (int e = 0; e < kVec; ++e) memcpy(words + e * kWords, &x[e], sizeof(S));
#pragma unroll
    for (int i = 0; i < kWords * kVec; i += 4) {
      __stwb(reinterpret_cast<uint4*>(to) + i / 4, make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    }
  }
}

// A structure from another lane: `shuffle` moves one word of it.
template <class R, class Shuffle>
__device__ __forceinline__ R shuffled(const R& x, Shuffle&& shuffle) {
  constexpr int kWords = (sizeof(R) + 3) / 4;
  uint32_t words[kWords] = {};
  memcpy(words, &x, sizeof(R));
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = shuffle(words[i]);
  R moved;
  memcpy(&moved, words, sizeof(R));
  return moved;
}

// kVec neighbouring elements of any size, in pieces of 16 bytes.
template <class T, int kVec>
__device__ __forceinline__ void load_elements(const T* from, T (&x)[kVec]) {
  constexpr int kPiece = kVec == 1 ? 1 : kVectorBytes / int(sizeof(T));
#pragma unroll
  for (int i = 0; i < kVec; i += kPiece) {
    const auto piece = *reinterpret_cast<const Pack<T, kPiece>*>(from + i);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) x[i + j] = piece[j];
  }
}

}  // namespace fastops::cuda
