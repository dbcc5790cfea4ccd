/* What a training step does besides the model: the batch's images, and the optimizer. */

#include <stdint.h>

/* A product and a sum with one rounding, where the processor has it; elsewhere it would be slow. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define FUSED(a, b, c) __builtin_fmaf(a, b, c)
#else
#define FUSED(a, b, c) ((a) * (b) + (c))
#endif

/* No others: each rounding is written down. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

/* out [N, C, P] from bytes x [·, C, P]: each pixel by its channel's table [C, 256], for the rows given. Returns
−1, or the first of them that is not among the `total` rows of x: then nothing is read. */
int64_t look_up(int64_t N, int64_t C, int64_t P, int64_t total, const uint8_t *x, const int64_t *rows,
                const float *table, float *out) {
    for (int64_t n = 0; n < N; n++) if (rows[n] < 0 || rows[n] >= total) return n;
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = 0; c < C; c++) {
            const uint8_t *from = x + (rows[n] * C + c) * P;
            const float *value = table + c * 256;
            float *to = out + (n * C + c) * P;
            for (int64_t p = 0; p < P; p++) to[p] = value[from[p]];
        }
    return -1;
}

/* v ← ρv + (g + λw), w ← w − ηv for N numbers; v is null without momentum. Rounded as PyTorch's operators do. */
void sgd(int64_t N, float lr, float momentum, float decay, const float *restrict g, float *restrict v,
         float *restrict w) {
    for (int64_t i = 0; i < N; i++) {
        float along = decay == 0 ? g[i] : FUSED(decay, w[i], g[i]);
        if (v) along = v[i] = momentum * v[i] + along;
        w[i] = FUSED(-lr, along, w[i]);
    }
}
