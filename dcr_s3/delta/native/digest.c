/* The state digest: per 32-bit word, a keyed Feistel network over (index, word) and two products of its halves. */
#include "cells.h"
#include "targets.h"

#define MIX_INDEX 0x9E3779B1u
#define MIX_HIGH 0xC2B2AE3Du
#define MIX_VALUE 0x85EBCA77u
#define MIX_SECOND 0x27D4EB2Fu
#define MIX_THIRD 0x165667B1u

#if defined(__x86_64__)
#define LEVELS 3
#else
#define LEVELS 1
#endif

#define LEVEL(name) name##_plain
#include "digest_level.h"
#undef LEVEL

#if LEVELS > 1
#include <immintrin.h>

BEGIN_TARGET("avx2")
#define LEVEL(name) name##_avx2
#define LANES 8
#define VECTOR __m256i
#define ZERO _mm256_setzero_si256()
#define OP(name) _mm256_##name##_si256
#define OP32(name) _mm256_##name##_epi32
#define OP64(name) _mm256_##name##_epi64
#define MULTIPLY _mm256_mul_epu32
#define LOAD_WORDS(at) _mm256_loadu_si256((const __m256i *)(at))
#define LOAD_SHORTS(at) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(at)))
#define LOAD_BYTES(at) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(at)))
#include "digest_level.h"
#undef LEVEL
#undef LANES
#undef VECTOR
#undef ZERO
#undef OP
#undef OP32
#undef OP64
#undef MULTIPLY
#undef LOAD_WORDS
#undef LOAD_SHORTS
#undef LOAD_BYTES
END_TARGET

BEGIN_TARGET("avx2,avx512f,avx512bw,avx512dq,avx512vl" WIDEST_VECTORS)
#define LEVEL(name) name##_avx512
#define LANES 16
#define VECTOR __m512i
#define ZERO _mm512_setzero_si512()
#define OP(name) _mm512_##name##_si512
#define OP32(name) _mm512_##name##_epi32
#define OP64(name) _mm512_##name##_epi64
#define MULTIPLY _mm512_mul_epu32
#define LOAD_WORDS(at) _mm512_loadu_si512(at)
#define LOAD_SHORTS(at) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(at)))
#define LOAD_BYTES(at) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(at)))
#include "digest_level.h"
END_TARGET
#endif

typedef void range_kernel(const uint32_t *, uint64_t, const uint8_t *, size_t, uint32_t, uint64_t *);
typedef void at_kernel(const uint32_t *, const uint64_t *, const uint8_t *, size_t, uint32_t, uint64_t *);

static range_kernel *const range_kernels[LEVELS] = {
    range_plain,
#if LEVELS > 1
    range_avx2,
    range_avx512,
#endif
};

static at_kernel *const at_kernels[LEVELS] = {
    at_plain,
#if LEVELS > 1
    at_avx2,
    at_avx512,
#endif
};

void digest_range(const uint32_t key[4], uint64_t start, const uint8_t *cells, size_t count, uint32_t cell_bytes,
                  uint64_t sums[2])
{
    sums[0] = sums[1] = 0;
    range_kernels[simd_level()](key, start, cells, count, cell_bytes, sums);
}

void digest_at(const uint32_t key[4], const uint64_t *indices, const uint8_t *cells, size_t count,
               uint32_t cell_bytes, uint64_t sums[2])
{
    sums[0] = sums[1] = 0;
    at_kernels[simd_level()](key, indices, cells, count, cell_bytes, sums);
}
