/* A matrix and ReLU for few rows, forward and backward, on one thread: x [B, C], w [O, C], out [B, O].

Products of small matrices take less time than a library needs to prepare for them. A row's result does not
depend on the other rows of its batch, and sums over rows are made in their order. */

#include "shape.h"

#define TOGETHER 4  /* blocks of LANES rows that share what is read of w */

int64_t dense_scratch_size(const shape *s) {
    int64_t forward = TOGETHER * (s->C + s->O) * sizeof(vec), backward = (s->B * s->O + LANES) * sizeof(float);
    return forward > backward ? forward : backward;
}

/* out[j][i] = bias[i] + Σ_c w[i][c] · x[j][c] for I of the O rows of w and J blocks. */
INLINE void corner(const int I, const int J, const float *w, const float *bias, const vec *x, int64_t C, int64_t O,
                   vec *out) {
    vec acc[16];
    UNROLL for (int i = 0; i < I; i++) UNROLL for (int j = 0; j < J; j++)
        acc[i * J + j] = splat(bias ? bias[i] : 0);
    for (int64_t c = 0; c < C; c++)
        UNROLL for (int i = 0; i < I; i++) {
            vec f = splat(w[i * C + c]);
            UNROLL for (int j = 0; j < J; j++) acc[i * J + j] += f * x[j * C + c];
        }
    UNROLL for (int i = 0; i < I; i++) UNROLL for (int j = 0; j < J; j++) out[j * O + i] = acc[i * J + j];
}

INLINE void corners(const int J, const shape *s, const float *w, const float *bias, const vec *x, vec *out) {
    const int I = (REGISTERS == 32 ? 16 : 8) / J;
    int64_t o = 0;
#define SOME(I) for (; o + (I) <= s->O; o += (I)) corner(I, J, w + o * s->C, bias ? bias + o : 0, x, s->C, s->O, out + o)
    SOME(I);
    SOME(2);
    SOME(1);
#undef SOME
}

/* bias may be null. */
void dense_forward(const shape *s, const float *x, const float *w, const float *bias, float *out, vec *scratch) {
    vec *in = scratch, *done = in + TOGETHER * s->C;
    for (int64_t first = 0; first < s->B; first += TOGETHER * LANES) {
        int64_t n = s->B - first, J = n > (TOGETHER - 1) * LANES ? TOGETHER : (n + LANES - 1) / LANES;
        for (int64_t j = 0; j < J; j++) {
            int64_t left = n - j * LANES;
            gather(x + (first + j * LANES) * s->C, left < LANES ? left : LANES, s->C, in + j * s->C);
        }
        if (J == 4) corners(4, s, w, bias, in, done);
        else if (J == 1) corners(1, s, w, bias, in, done);
        else {
            corners(2, s, w, bias, in, done);
            if (J == 3) corners(1, s, w, bias, in + 2 * s->C, done + 2 * s->O);
        }
        if (s->relu)  /* NaN stays */
            for (int64_t k = 0; k < J * s->O; k++) done[k] = (vec)(~(done[k] <= splat(0)) & (ivec)done[k]);
        for (int64_t j = 0; j < J; j++) {
            int64_t left = n - j * LANES;
            scatter(done + j * s->O, left < LANES ? left : LANES, s->O, out + (first + j * LANES) * s->O);
        }
    }
}

/* out[m][n] = Σ_k a[m · am + k · ak] · b[k][n], for k < K, m < M and n < N */
typedef struct { const float *a; int64_t am, ak; const float *b; int64_t K, M, N; float *out; } product;

/* I rows and J vectors of columns from (m, n) on. */
INLINE void piece(const int I, const int J, const product *p, int64_t m, int64_t n) {
    vec acc[16];
    UNROLL for (int t = 0; t < I * J; t++) acc[t] = splat(0);
    const float *a = p->a + m * p->am, *b = p->b + n;
    for (int64_t k = 0; k < p->K; k++, a += p->ak, b += p->N) {
        vec bs[4];
        UNROLL for (int j = 0; j < J; j++) memcpy(&bs[j], b + j * LANES, sizeof(vec));
        UNROLL for (int i = 0; i < I; i++) {
            vec f = splat(a[i * p->am]);
            UNROLL for (int j = 0; j < J; j++) acc[i * J + j] += f * bs[j];
        }
    }
    float *out = p->out + m * p->N + n;
    UNROLL for (int i = 0; i < I; i++) UNROLL for (int j = 0; j < J; j++)
        memcpy(out + i * p->N + j * LANES, &acc[i * J + j], sizeof(vec));
}

INLINE void column(const int J, const product *p, int64_t n) {
    const int I = REGISTERS == 32 ? 4 : 2;
    int64_t m = 0;
    for (; m + I <= p->M; m += I) piece(I, J, p, m, n);
    for (; m < p->M; m++) piece(1, J, p, m, n);
}

static void multiply(const product *p) {
    int64_t n = 0;
    if (p->N < LANES) {
        for (int64_t m = 0; m < p->M; m++)
            for (n = 0; n < p->N; n++) {
                float total = 0;
                for (int64_t k = 0; k < p->K; k++) total += p->a[m * p->am + k * p->ak] * p->b[k * p->N + n];
                p->out[m * p->N + n] = total;
            }
        return;
    }
    for (; n + 4 * LANES <= p->N; n += 4 * LANES) column(4, p, n);
    for (; n + LANES <= p->N; n += LANES) column(1, p, n);
    if (n < p->N) column(1, p, p->N - LANES);  /* some columns again, with the same result */
}

/* Gradients dx [B, C], dw [O, C] and dbias [O], each of which may be null, from g [B, O]; `out` is what
`dense_forward` gave. */
void dense_backward(const shape *s, const float *x, const float *w, const float *out, const float *g, float *dx,
                    float *dw, float *dbias, vec *scratch) {
    if (s->relu) {
        float *passed = (float *)scratch;
        for (int64_t k = 0; k < s->B * s->O; k++) passed[k] = out[k] <= 0 ? 0 : g[k];
        g = passed;
    }
    if (dbias) {
        memset(dbias, 0, s->O * sizeof(float));
        for (int64_t b = 0; b < s->B; b++)
            for (int64_t o = 0; o < s->O; o++) dbias[o] += g[b * s->O + o];
    }
    if (dw) multiply(&(product){g, 1, s->O, x, s->B, s->O, s->C, dw});
    if (dx) multiply(&(product){g, s->O, 1, w, s->O, s->B, s->C, dx});
}
