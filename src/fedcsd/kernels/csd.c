/* FedCSD's loss, its gradient and the entropy of its target, for rows of C classes, on one thread.

LANES samples lie side by side, so that a sum over classes is made in one order and a sample's result does
not depend on the others. What is not finite stays so, as no maximum and no mask hides it.

For a sample with logits z, teacher's logits t, prototypes P and label y:
    δ = softmax_c(cos(z, P_c)) · scale, or 1 without similarity
    q = softmax(δ ⊙ t / τ), or 1/C if the target is uniform
    loss = −log softmax(z)_y + μ · kept · τ² · −Σ_c q_c log softmax(z / τ)_c
    slope = softmax(z) − onehot(y) + μ · kept · τ · (softmax(z / τ) − q)
    entropy = −Σ_c q_c log q_c / log C */

#define SHORT
#include "lanes.h"

enum { ADAPTIVE, FORCIBLE, ALL };

/* N rows, of which `each` one after another share their prototypes. */
typedef struct { int64_t N, each, C, similarity, mask, uniform; float scale, mu, tau; } problem;

/* Bytes of working memory, aligned to 64: five vectors a class, and the length of its prototype. */
int64_t csd_scratch_size(const problem *s) { return s->C * (5 * sizeof(vec) + sizeof(float)); }

/* e^x for x ≤ 0 to the last bits: 2^n by the exponent's bits and e^r by its series, |r| ≤ ln 2 / 2. Exactly 1
at 0, and 0 where it would be less than the least normal number. */
INLINE vec exponential(vec x) {
    const float shift = 12582912.f;  /* 3 · 2^22, to which n is added in the last bits */
    vec t = x * 1.44269504f + shift, n = t - shift;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec e = splat(1.f / 5040);
    e = e * r + 1.f / 720, e = e * r + 1.f / 120, e = e * r + 1.f / 24, e = e * r + 1.f / 6;
    e = e * r + 0.5f, e = e * r + 1.f, e = e * r + 1.f;
    return pick(x < splat(-87.3365f), splat(0), e * (vec)(((ivec)t << 23) + 0x3f800000));
}

/* log x for x ≥ 1: the exponent, and 2 artanh((m − 1) / (m + 1)) for the rest m between √½ and √2. */
INLINE vec logarithm(vec x) {
    ivec n = ((ivec)x - 0x3f3504f3) >> 23;
    vec m = (vec)((ivec)x - (n << 23)), f = (m - 1.f) / (m + 1.f), s = f * f;
    vec series = f * (2.f + s * (2.f / 3 + s * (2.f / 5 + s * (2.f / 7 + s * (2.f / 9)))));
    return pick(x != x, x, __builtin_convertvector(n, vec) * 0.693147181f + series);
}

INLINE vec greatest(const vec *a, int64_t C) {
    vec most = a[0];
    for (int64_t c = 1; c < C; c++) most = pick(a[c] > most, a[c], most);
    return most;
}

/* e = exp((a − most) · by), and its sum. */
INLINE vec exponentials(const vec *a, int64_t C, vec most, float by, vec *e) {
    vec total = splat(0);
    for (int64_t c = 0; c < C; c++) total += e[c] = exponential((a[c] - most) * by);
    return total;
}

/* 1 / max(√v, 10⁻¹²), as F.normalize has it. */
INLINE float inverse_length(float v) {
    float length = __builtin_sqrtf(v);
    return 1.f / (length < 1e-12f ? 1e-12f : length);
}

INLINE vec inverse_lengths(vec v) {
    for (int i = 0; i < LANES; i++) v[i] = inverse_length(v[i]);
    return v;
}

static void measure_prototypes(const float *P, int64_t C, float *inverse) {
    for (int64_t c = 0; c < C; c++, P += C) {
        vec squares = splat(0), some;
        int64_t k = 0;
        for (; k + LANES <= C; k += LANES) memcpy(&some, P + k, sizeof some), squares += some * some;
        float rest = 0;
        for (; k < C; k++) rest += P[k] * P[k];
        inverse[c] = inverse_length(sum(squares) + rest);
    }
}

/* delta = z · P_c / |P_c| for `J` classes at once, so that sums need not wait for one another. */
INLINE void products(const int J, const vec *z, const float *P, const float *inverse, int64_t C, vec *delta) {
    vec acc[8];
    UNROLL for (int j = 0; j < J; j++) acc[j] = splat(0);
    for (int64_t k = 0; k < C; k++)
        UNROLL for (int j = 0; j < J; j++) acc[j] += z[k] * P[j * C + k];
    UNROLL for (int j = 0; j < J; j++) delta[j] = acc[j] * inverse[j];
}

/* The teacher's logits t weighted by the similarity of z to the prototypes, in their place. */
INLINE void refine(const problem *s, const vec *z, const float *P, const float *inverse, vec *unit, vec *delta, vec *t) {
    int64_t C = s->C, c = 0;
    vec squares = splat(0);
    for (int64_t k = 0; k < C; k++) squares += z[k] * z[k];
    vec by = inverse_lengths(squares);
    for (int64_t k = 0; k < C; k++) unit[k] = z[k] * by;
    for (; c + 8 <= C; c += 8) products(8, unit, P + c * C, inverse + c, C, delta + c);
    for (; c + 2 <= C; c += 2) products(2, unit, P + c * C, inverse + c, C, delta + c);
    for (; c < C; c++) products(1, unit, P + c * C, inverse + c, C, delta + c);
    vec share = s->scale / exponentials(delta, C, greatest(delta, C), 1, delta);
    for (int64_t k = 0; k < C; k++) t[k] *= delta[k] * share;
}

/* 1 where the teacher's soft label is kept, else 0; `true_t` is the teacher's logit of the label. */
INLINE vec keep(const problem *s, const vec *t, vec true_t, ivec label) {
    int64_t C = s->C;
    ivec kept = {0};
    if (s->mask == ADAPTIVE) {
        vec most = greatest(t, C), odds = splat(0);
        for (int64_t c = 0; c < C; c++) odds += exponential(t[c] - most);
        kept = exponential(true_t - most) * (float)C > odds;
    } else if (s->mask == FORCIBLE) {  /* the first of equals wins, and NaN over everything */
        vec most = t[0];
        ivec which = {0};
        for (int64_t c = 1; c < C; c++) {
            ivec more = (t[c] > most) | ((t[c] != t[c]) & (most == most));
            most = pick(more, t[c], most);
            which = (which & ~more) | (more & (int32_t)c);
        }
        kept = which == label;
    } else kept = ~kept;
    return pick(kept, splat(1), splat(0));
}

/* n ≤ LANES rows. `slope` is null where nobody asks. */
static void block(const problem *s, int64_t n, const float *logits, const float *teacher, const float *P,
                  const float *inverse, const int64_t *labels, float *loss, float *entropy, float *slope, vec *scratch) {
    int64_t C = s->C;
    vec *z = scratch, *t = z + C, *p = t + C, *soft = p + C, *q = soft + C;
    gather(logits, n, C, z);
    gather(teacher, n, C, t);
    ivec label = {0};
    vec true_z, true_t;
    for (int i = 0; i < n; i++) label[i] = (int32_t)labels[i];
    for (int i = 0; i < LANES; i++) true_z[i] = z[label[i]][i], true_t[i] = t[label[i]][i];

    vec kept = keep(s, t, true_t, label), wanted, spread;
    float cool = 1.f / s->tau;
    if (s->uniform) {
        for (int64_t c = 0; c < C; c++) q[c] = splat(1);
        wanted = splat(C), spread = splat(1);
    } else {
        if (s->similarity) refine(s, z, P, inverse, p, q, t);
        vec most = greatest(t, C), energy = splat(0);
        wanted = exponentials(t, C, most, cool, q);
        for (int64_t c = 0; c < C; c++) energy += pick(q[c] > splat(0), q[c] * (t[c] - most), splat(0));
        spread = (logarithm(wanted) - energy * cool / wanted) / logarithm(splat(C));
    }

    vec most = greatest(z, C), energy = splat(0);
    vec hard_total = exponentials(z, C, most, 1, p), soft_total = exponentials(z, C, most, cool, soft);
    for (int64_t c = 0; c < C; c++) energy += q[c] * (z[c] - most);
    vec distance = logarithm(soft_total) - energy * cool / wanted;
    vec total = logarithm(hard_total) - (true_z - most) + s->mu * (kept * (s->tau * s->tau) * distance);
    memcpy(loss, &total, n * sizeof(float));
    memcpy(entropy, &spread, n * sizeof(float));
    if (!slope) return;

    vec weight = s->mu * s->tau * kept, hard = 1 / hard_total;
    vec softened = weight / soft_total, target = weight / wanted;
    for (int64_t c = 0; c < C; c++) {
        vec own = pick(label == (int32_t)c, splat(1), splat(0));
        p[c] = p[c] * hard - own + (soft[c] * softened - q[c] * target);
    }
    scatter(p, n, C, slope);
}

/* logits, teacher, slope [N, C], prototypes [N / each, C, C], labels, loss, entropy [N]; prototypes are read
for the similarity only. Returns −1, or the first row whose label is no class: then nothing is computed. */
int64_t csd(const problem *s, const float *logits, const float *teacher, const float *prototypes,
            const int64_t *labels, float *loss, float *entropy, float *slope, void *scratch) {
    float *inverse = (float *)((vec *)scratch + 5 * s->C);
    for (int64_t n = 0; n < s->N; n++) if (labels[n] < 0 || labels[n] >= s->C) return n;
    for (int64_t first = 0; first < s->N; first += s->each) {
        const float *P = prototypes + first / s->each * s->C * s->C;
        if (s->similarity && !s->uniform) measure_prototypes(P, s->C, inverse);
        for (int64_t n = first; n < first + s->each; n += LANES) {
            int64_t left = first + s->each - n, at = n * s->C;
            block(s, left < LANES ? left : LANES, logits + at, teacher + at, P, inverse, labels + n, loss + n,
                  entropy + n, slope ? slope + at : 0, scratch);
        }
    }
    return -1;
}

/* loss = −log softmax(z)_y and its slope softmax(z) − onehot(y) (null where nobody asks): logits, slope [N, C],
labels, loss [N]. Returns as `csd` does. */
int64_t cross_entropy(int64_t N, int64_t C, const float *logits, const int64_t *labels, float *loss, float *slope,
                      vec *scratch) {
    for (int64_t n = 0; n < N; n++) if (labels[n] < 0 || labels[n] >= C) return n;
    vec *z = scratch, *p = z + C;
    for (int64_t first = 0; first < N; first += LANES) {
        int64_t n = N - first < LANES ? N - first : LANES;
        gather(logits + first * C, n, C, z);
        ivec label = {0};
        vec true_z, most = greatest(z, C);
        for (int i = 0; i < n; i++) label[i] = (int32_t)labels[first + i];
        for (int i = 0; i < LANES; i++) true_z[i] = z[label[i]][i];
        vec total = exponentials(z, C, most, 1, p), result = logarithm(total) - (true_z - most);
        memcpy(loss + first, &result, n * sizeof(float));
        if (!slope) continue;
        vec share = 1 / total;
        for (int64_t c = 0; c < C; c++) p[c] = p[c] * share - pick(label == (int32_t)c, splat(1), splat(0));
        scatter(p, n, C, slope + first * C);
    }
    return -1;
}
