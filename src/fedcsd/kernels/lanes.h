/* Vectors of LANES numbers, one for each of LANES rows (images, samples) that are worked on side by side. */

#pragma once

#include <stdint.h>
#include <string.h>

/* As many rows side by side as a register holds, and how many registers there are. The widest vectors lower the
processor's clock for a while: a source that has little to do defines SHORT before it includes this. */
#if defined(__AVX512F__) && !defined(SHORT)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 16
#elif defined(__ARM_NEON)
#define LANES 4
#define REGISTERS 32
#else
#error "this processor has neither AVX nor NEON: PyTorch's own operators are faster"
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint8_t bvec __attribute__((vector_size(LANES)));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

INLINE vec splat(float f) { return f - (vec){0}; }

INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)((mask & (ivec)yes) | (~mask & (ivec)no)); }

INLINE float sum(vec v) {
    float s[LANES];
    memcpy(s, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

/* m[n][0 … LANES − 1] for LANES images n to LANES vectors of one pixel each, and back: the same operation. */
#if LANES == 16 && !defined(__clang__)
INLINE void transpose(vec m[LANES]) {
    vec t[LANES];
#define SWAP(from, to, step, low, high)                                      \
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & step)) {                \
        to[i] = __builtin_shuffle(from[i], from[i + step], (ivec)low);       \
        to[i + step] = __builtin_shuffle(from[i], from[i + step], (ivec)high); \
    }
#define LIST(...) {__VA_ARGS__}
    SWAP(m, t, 8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
         LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    SWAP(t, m, 4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
         LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    SWAP(m, t, 2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
         LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    SWAP(t, m, 1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
         LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}
#else
INLINE void transpose(vec m[LANES]) {
    float from[LANES][LANES], to[LANES][LANES];
    memcpy(from, m, sizeof from);
    UNROLL for (int i = 0; i < LANES; i++) UNROLL for (int j = 0; j < LANES; j++) to[j][i] = from[i][j];
    memcpy(m, to, sizeof to);
}
#endif

/* n ≤ LANES images of `size` numbers each to `size` vectors; missing images are zeros. */
static void gather(const float *x, int64_t n, int64_t size, vec *out) {
    for (int64_t p = 0; p < size; p += LANES) {
        vec m[LANES];
        UNROLL for (int i = 0; i < LANES; i++) m[i] = splat(0);
        if (p + LANES <= size) {
            for (int64_t i = 0; i < n; i++) memcpy(&m[i], x + i * size + p, sizeof(vec));
            transpose(m);
            UNROLL for (int i = 0; i < LANES; i++) out[p + i] = m[i];
        } else {
            for (int64_t i = 0; i < n; i++) memcpy(&m[i], x + i * size + p, (size - p) * sizeof(float));
            transpose(m);
            memcpy(out + p, m, (size - p) * sizeof(vec));
        }
    }
}

static void scatter(const vec *in, int64_t n, int64_t size, float *x) {
    for (int64_t p = 0; p < size; p += LANES) {
        vec m[LANES];
        if (p + LANES <= size) {
            UNROLL for (int i = 0; i < LANES; i++) m[i] = in[p + i];
            transpose(m);
            for (int64_t i = 0; i < n; i++) memcpy(x + i * size + p, &m[i], sizeof(vec));
        } else {
            memset(m, 0, sizeof m);
            memcpy(m, in + p, (size - p) * sizeof(vec));
            transpose(m);
            for (int64_t i = 0; i < n; i++) memcpy(x + i * size + p, &m[i], (size - p) * sizeof(float));
        }
    }
}
