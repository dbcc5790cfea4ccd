/* Convolution with few channels, then 2×2 max-pooling and ReLU, forward and backward, on one thread.

LANES images lie side by side: a number of the network is a vector, one element for each image, so that
every multiplication is a full vector operation however few the channels are. A block of LANES images goes
through the whole layer while it lies in the cache; the convolution before pooling is never stored.

Shapes: x [B, C, H, W], w [O, C, K, K], bias [O], with P zeros around the image and stride 1;
h = H + 2P − K + 1 and q = W + 2P − K + 1; pooled p × r with p = h / S, r = q / S, S being 1 or 2.

An image's result does not depend on the other images of its batch. Sums over images (the gradients of
w and bias) are made block by block, in one order. */

#include "shape.h"

#define BAND 32768  /* bytes of the gradient that shall lie in the first cache */

/* What follows from a shape: the padded image, the convolution, the pooled result, and in numbers an
image, a padded image (0 without padding), a result and a kernel. `side` zeros stand beside each row of
the gradient, which makes it `wide`. */
typedef struct { int64_t Hp, Wp, h, q, p, r, plain, padded, result, kk, side, wide; } sizes;

const int lanes = LANES;

INLINE sizes measure(const shape *s) {
    sizes m;
    m.Hp = s->H + 2 * s->P, m.Wp = s->W + 2 * s->P;
    m.h = m.Hp - s->K + 1, m.q = m.Wp - s->K + 1;
    m.p = m.h / s->S, m.r = m.q / s->S;
    m.plain = s->C * s->H * s->W, m.padded = s->P ? s->C * m.Hp * m.Wp : 0;
    m.result = s->O * m.p * m.r, m.kk = s->K * s->K;
    m.side = s->K - 1, m.wide = m.q + 2 * m.side;
    return m;
}

/* Bytes of working memory that `forward` and `backward` need, aligned to 64. */
int64_t scratch_size(const shape *s) {
    sizes m = measure(s);
    int64_t forward = 4 * s->S * m.q, backward = s->O * m.h * m.wide + s->O * s->C * m.kk;
    return (m.plain + m.padded + m.result + (forward > backward ? forward : backward)) * sizeof(vec);
}

/* n images as vectors, with the zeros of the padding around them: [C, Hp, Wp]. */
static const vec *load(const float *x, int64_t n, const shape *s, const sizes *m, vec *plain, vec *padded) {
    gather(x, n, m->plain, plain);
    if (!s->P) return plain;
    memset(padded, 0, m->padded * sizeof(vec));
    for (int64_t c = 0; c < s->C; c++)
        for (int64_t y = 0; y < s->H; y++)
            memcpy(padded + (c * m->Hp + y + s->P) * m->Wp + s->P, plain + (c * s->H + y) * s->W,
                   s->W * sizeof(vec));
    return padded;
}

/* out[i][j] = start[i] + Σ_{a, ky, kx} w[i·wi + a·wa + ky·K + kx] · x[a·xa + ky·xy + kx·xx + j] */
typedef struct { const float *w; int64_t wi, wa, K, low, high; const vec *x; int64_t A, xa, xy, xx; } product;

/* The sums of I × J vectors, held in registers. The array is of literal size: one of variable length
would be kept in memory. */
INLINE void tile(const int I, const int J, const product *p, const float *start, vec *out, int64_t step) {
    vec acc[4][4];
    UNROLL for (int i = 0; i < I; i++) UNROLL for (int j = 0; j < J; j++)
        acc[i][j] = splat(start ? start[i] : 0);
    for (int64_t a = 0; a < p->A; a++)
        for (int64_t ky = p->low; ky < p->high; ky++) {
            const float *w = p->w + a * p->wa + ky * p->K;
            const vec *x = p->x + a * p->xa + ky * p->xy;
            for (int64_t kx = 0; kx < p->K; kx++, x += p->xx) {
                vec xs[4];
                UNROLL for (int j = 0; j < J; j++) xs[j] = x[j];
                UNROLL for (int i = 0; i < I; i++) {
                    vec f = splat(w[i * p->wi + kx]);
                    UNROLL for (int j = 0; j < J; j++) acc[i][j] += f * xs[j];
                }
            }
        }
    UNROLL for (int i = 0; i < I; i++) UNROLL for (int j = 0; j < J; j++) out[i * step + j] = acc[i][j];
}

INLINE void strip(const int I, product p, const float *start, int64_t width, vec *out, int64_t step) {
    const int J = REGISTERS == 32 ? 4 : 3;
    int64_t x = 0;
    for (; x + J <= width; x += J, p.x += J) tile(I, J, &p, start, out + x, step);
    for (; x + 2 <= width; x += 2, p.x += 2) tile(I, 2, &p, start, out + x, step);
    for (; x < width; x++, p.x++) tile(I, 1, &p, start, out + x, step);
}

/* One row of `width` for `I` ≤ 4 planes of the result. */
static void row(int64_t I, const product *p, const float *start, int64_t width, vec *out, int64_t step) {
    if (I == 4) strip(4, *p, start, width, out, step);
    else if (I == 3) strip(3, *p, start, width, out, step);
    else if (I == 2) strip(2, *p, start, width, out, step);
    else strip(1, *p, start, width, out, step);
}

/* The greatest of the 2 × 2 from v and the row below it, and which it was. As PyTorch has it, the first
of equals wins, and the last NaN wins over everything. */
INLINE vec greatest(const vec *v, int64_t below, ivec *which) {
    const vec others[3] = {v[1], v[below], v[below + 1]};
    vec best = v[0];
    UNROLL for (int k = 0; k < 3; k++) {
        ivec more = (others[k] > best) | (others[k] != others[k]);
        best = pick(more, others[k], best);
        *which = (*which & ~more) | (more & (k + 1));
    }
    return best;
}

/* One row of the convolution for I planes to one row of the result and its winners. */
INLINE void finish(int64_t S, int64_t relu, const vec *v, int64_t below, int64_t r, vec *out, uint8_t *win) {
    for (int64_t z = 0; z < r; z++) {
        ivec which = {0};
        vec best = S == 2 ? greatest(v + 2 * z, below, &which) : v[z];
        if (relu) {
            ivec off = best <= splat(0);  /* false for NaN, which stays */
            best = (vec)(~off & (ivec)best);
            which |= off & 255;
        }
        out[z] = best;
        if (win) {
            bvec bytes = __builtin_convertvector(which, bvec);
            memcpy(win + z * LANES, &bytes, LANES);
        }
    }
}

/* out [B, O, p, r]; winner [⌈B / LANES⌉, O, p, r, LANES]: which of the S × S was the greatest, or 255 where
ReLU made it zero; null where nobody asks. bias may be null. */
void forward(const shape *s, const float *x, const float *w, const float *bias, float *out, uint8_t *winner,
             vec *scratch) {
    sizes m = measure(s);
    vec *plain = scratch, *padded = plain + m.plain, *done = padded + m.padded, *rows = done + m.result;
    for (int64_t first = 0; first < s->B; first += LANES) {
        int64_t n = s->B - first < LANES ? s->B - first : LANES;
        const vec *in = load(x + first * m.plain, n, s, &m, plain, padded);
        uint8_t *win = winner ? winner + first * m.result : 0;
        for (int64_t y = 0; y < m.p; y++)  /* the few rows that are read lie in the cache for all planes */
            for (int64_t o = 0; o < s->O; o += 4) {
                int64_t I = s->O - o < 4 ? s->O - o : 4;
                for (int64_t k = 0; k < s->S; k++) {
                    product t = {w + o * s->C * m.kk, s->C * m.kk, m.kk, s->K, 0, s->K,
                                 in + (y * s->S + k) * m.Wp, s->C, m.Hp * m.Wp, m.Wp, 1};
                    row(I, &t, bias ? bias + o : 0, m.r * s->S, rows + k * m.q, s->S * m.q);
                }
                for (int64_t i = 0; i < I; i++) {
                    int64_t place = ((o + i) * m.p + y) * m.r;
                    finish(s->S, s->relu, rows + i * s->S * m.q, m.q, m.r, done + place,
                           win ? win + place * LANES : 0);
                }
            }
        scatter(done, n, m.result, out + first * m.result);
    }
}

/* The gradient g [O, p, r] back through ReLU and pooling: full [O, h, wide] with `side` zeros at both ends of
each row. What pooling left over is zero from the start. Adds to dbias. */
static void spread(const shape *s, const sizes *m, const vec *g, const uint8_t *win, vec *full, float *dbias) {
    for (int64_t o = 0; o < s->O; o++) {
        vec total = splat(0);
        for (int64_t y = 0; y < m->p; y++)
            for (int64_t z = 0; z < m->r; z++) {
                int64_t place = (o * m->p + y) * m->r + z;
                ivec which = {0};
                if (win) {
                    bvec bytes;
                    memcpy(&bytes, win + place * LANES, LANES);
                    which = __builtin_convertvector(bytes, ivec);
                }
                vec here = (vec)((which != 255) & (ivec)g[place]);
                vec *to = full + (o * m->h + y * s->S) * m->wide + z * s->S + m->side;
                total += here;
                if (s->S == 1) to[0] = here;
                else {
                    to[0] = (vec)((which == 0) & (ivec)here);
                    to[1] = (vec)((which == 1) & (ivec)here);
                    to[m->wide] = (vec)((which == 2) & (ivec)here);
                    to[m->wide + 1] = (vec)((which == 3) & (ivec)here);
                }
            }
        if (dbias) dbias[o] += sum(total);
    }
}

/* dw[i][j] += Σ_{y, z} g[i][y][z] · x[y][z + j] for I planes of g and J places of a kernel's row; dw is of
vectors, a sum for each of the images side by side. */
typedef struct { const vec *g; int64_t gi, gy; const vec *x; int64_t xy, h, q; vec *dw; int64_t wi; } correlation;

INLINE void dot(const int I, const int J, const correlation *c, int64_t i0, int64_t j0) {
    const vec *g = c->g + i0 * c->gi, *x = c->x + j0;
    vec *dw = c->dw + i0 * c->wi + j0, acc[4][5];
    UNROLL for (int i = 0; i < I; i++) UNROLL for (int j = 0; j < J; j++) acc[i][j] = dw[i * c->wi + j];
    for (int64_t y = 0; y < c->h; y++)
        for (int64_t z = 0; z < c->q; z++) {
            vec xs[5];
            UNROLL for (int j = 0; j < J; j++) xs[j] = x[y * c->xy + z + j];
            UNROLL for (int i = 0; i < I; i++) {
                vec f = g[i * c->gi + y * c->gy + z];
                UNROLL for (int j = 0; j < J; j++) acc[i][j] += f * xs[j];
            }
        }
    UNROLL for (int i = 0; i < I; i++) UNROLL for (int j = 0; j < J; j++) dw[i * c->wi + j] = acc[i][j];
}

INLINE void dots(const int I, int64_t K, const correlation *c) {
    int64_t k = 0;
    for (; k + 5 <= K; k += 5) {
        if (REGISTERS == 32 || I <= 2) dot(I, 5, c, 0, k);
        else {
            dot(2, 5, c, 0, k);
            dot(I - 2, 5, c, 2, k);
        }
    }
    for (; k + 3 <= K; k += 3) dot(I, 3, c, 0, k);
    for (; k < K; k++) dot(I, 1, c, 0, k);
}

/* Adds to dw [O, C, K, K] (vectors) what a block's gradient (as `spread` has it) and images give. A band of
rows of four planes, small enough for the first cache, meets all channels before the next. */
static void correlate(const shape *s, const sizes *m, const vec *full, const vec *in, vec *dw) {
    int64_t fit = BAND / (4 * m->wide * (int64_t)sizeof(vec)), band = fit ? fit : 1;
    for (int64_t y = 0; y < m->h; y += band)
        for (int64_t o = 0; o < s->O; o += 4)
            for (int64_t ch = 0; ch < s->C; ch++)
                for (int64_t ky = 0; ky < s->K; ky++) {
                    int64_t left = s->O - o, rows = m->h - y < band ? m->h - y : band;
                    correlation c = {full + (o * m->h + y) * m->wide + m->side, m->h * m->wide, m->wide,
                                     in + (ch * m->Hp + y + ky) * m->Wp, m->Wp, rows, m->q,
                                     dw + (o * s->C + ch) * m->kk + ky * s->K, s->C * m->kk};
                    if (left >= 4) dots(4, s->K, &c);
                    else if (left == 3) dots(3, s->K, &c);
                    else if (left == 2) dots(2, s->K, &c);
                    else dots(1, s->K, &c);
                }
}

/* Gradients dx [B, C, H, W], dw [O, C, K, K] and dbias [O], each of which may be null, from g [B, O, p, r].
winner as `forward` made it, null if there was neither pooling nor ReLU. */
void backward(const shape *s, const float *x, const float *w, const float *g, const uint8_t *winner, float *dx,
              float *dw, float *dbias, vec *scratch) {
    sizes m = measure(s);
    vec *plain = scratch, *padded = plain + m.plain, *given = padded + m.padded, *full = given + m.result;
    int64_t weights = s->O * s->C * m.kk;
    vec *sums = full + s->O * m.h * m.wide;
    memset(full, 0, s->O * m.h * m.wide * sizeof(vec));
    if (dw) memset(sums, 0, weights * sizeof(vec));
    if (dbias) memset(dbias, 0, s->O * sizeof(float));
    for (int64_t first = 0; first < s->B; first += LANES) {
        int64_t n = s->B - first < LANES ? s->B - first : LANES;
        gather(g + first * m.result, n, m.result, given);
        spread(s, &m, given, winner ? winner + first * m.result : 0, full, dbias);
        if (dw) correlate(s, &m, full, load(x + first * m.plain, n, s, &m, plain, padded), sums);
        if (!dx) continue;
        for (int64_t y = 0; y < s->H; y++)
            for (int64_t ch = 0; ch < s->C; ch += 4) {
                int64_t I = s->C - ch < 4 ? s->C - ch : 4, at = y + s->P;
                int64_t low = at - m.h + 1 > 0 ? at - m.h + 1 : 0, high = at < m.side ? at + 1 : s->K;
                product t = {w + ch * m.kk, m.kk, s->C * m.kk, s->K, low, high,
                             full + at * m.wide + m.side + s->P, s->O, m.h * m.wide, -m.wide, -1};
                row(I, &t, 0, s->W, plain + (ch * s->H + y) * s->W, s->H * s->W);
            }
        scatter(plain, n, m.plain, dx + first * m.plain);
    }
    if (dw) for (int64_t i = 0; i < weights; i++) dw[i] = sum(sums[i]);
}
