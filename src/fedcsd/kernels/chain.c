/* Layers one after another, each with few channels: forward and backward in one call. */

#include "shape.h"

INLINE int64_t inputs(const shape *s) { return s->C * s->H * s->W; }

INLINE int64_t outputs(const shape *s) {
    int64_t h = s->H + 2 * s->P - s->K + 1, q = s->W + 2 * s->P - s->K + 1;
    return s->O * (h / s->S) * (q / s->S);
}

INLINE int64_t rounded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

/* Bytes of `winners` that a layer fills. */
INLINE int64_t winners_size(const shape *s) {
    return !is_dense(s) && (s->S == 2 || s->relu) ? rounded(s->B) * outputs(s) : 0;
}

/* Numbers of the largest result between two layers. */
static int64_t between(const shape *s, int64_t layers) {
    int64_t most = 0;
    for (int64_t l = 0; l < layers; l++) if (s[l].B * inputs(s + l) > most) most = s[l].B * inputs(s + l);
    return rounded(most);
}

/* What is needed: sizes[0] bytes of working memory, aligned to 64; sizes[1] numbers for the results of
all layers but the last two, sizes[2] bytes for the winners. */
void chain_sizes(const shape *s, int64_t layers, int64_t sizes[3]) {
    int64_t most = 0;
    sizes[1] = sizes[2] = 0;
    for (int64_t l = 0; l < layers; l++) {
        int64_t size = is_dense(s + l) ? dense_scratch_size(s + l) : scratch_size(s + l);
        if (size > most) most = size;
        if (l < layers - 2) sizes[1] += s[l].B * outputs(s + l);
        sizes[2] += winners_size(s + l);
    }
    sizes[0] = most + 2 * between(s, layers) * sizeof(float);
}

INLINE void layer(const shape *s, const float *x, const float *const *parameters, float *out, uint8_t *winner,
                  vec *scratch) {
    if (is_dense(s)) dense_forward(s, x, parameters[0], parameters[1], out, scratch);
    else forward(s, x, parameters[0], parameters[1], out, winner, scratch);
}

/* Where the result of a layer goes: the last one's to `out`, the one's before to `features`, else to `kept`. */
INLINE float *place(int64_t l, int64_t layers, float *kept, float *features, float *out) {
    return l == layers - 1 ? out : l == layers - 2 ? features : kept;
}

/* x [B, …] through two or more layers, whose weight and bias (or null) are in `parameters`, in turn. Results
that do not go to `features` or `out` go to `kept`, one after another; `winners` are as `forward` makes them. */
void chain_forward(const shape *s, int64_t layers, const float *x, const float *const *parameters, float *kept,
                   uint8_t *winners, float *features, float *out, vec *scratch) {
    for (int64_t l = 0; l < layers; l++, s++, parameters += 2) {
        float *to = place(l, layers, kept, features, out);
        layer(s, x, parameters, to, winners, scratch);
        winners += winners_size(s);
        kept += s->B * outputs(s);
        x = to;
    }
}

/* The same where no gradient will be asked for: s->B images at a time, of N, so that all lies in the cache.
Results between the first layers are not kept. */
void chain_apply(const shape *shapes, int64_t layers, int64_t N, const float *x, const float *const *parameters,
                 float *features, float *out, vec *scratch) {
    int64_t room = between(shapes, layers), most = shapes->B;
    float *buffers = (float *)scratch;
    for (int64_t first = 0; first < N; first += most) {
        const float *in = x + first * inputs(shapes);
        for (int64_t l = 0; l < layers; l++) {
            shape s = shapes[l];
            if (N - first < most) s.B = N - first;
            int64_t at = first * outputs(&s);
            float *to = place(l, layers, buffers + l % 2 * room, features + at, out + at);
            layer(&s, in, parameters + 2 * l, to, 0, (vec *)(buffers + 2 * room));
            in = to;
        }
    }
}

/* Gradients of the parameters (null for those that want none) from that of the result, g, and that of the
features, `also` (null for none); the rest is as `chain_forward` left it. Layers below `lowest` want none. */
void chain_backward(const shape *s, int64_t layers, int64_t lowest, const float *x, const float *const *parameters,
                    float *kept, const uint8_t *winners, float *features, float *out, const float *g,
                    const float *also, float *const *gradients, vec *scratch) {
    int64_t room = between(s, layers);
    float *buffers = (float *)scratch;
    for (int64_t l = 0; l < layers; l++) winners += winners_size(s + l), kept += s[l].B * outputs(s + l);
    for (int64_t l = layers - 1; l >= lowest; l--) {
        const shape *m = s + l;
        kept -= m->B * outputs(m), winners -= winners_size(m);
        const float *made = place(l, layers, kept, features, out);
        const float *in = l ? place(l - 1, layers, kept - m->B * inputs(m), features, out) : x;
        float *to = l == lowest ? 0 : buffers + l % 2 * room, *dw = gradients[2 * l], *dbias = gradients[2 * l + 1];
        vec *rest = (vec *)(buffers + 2 * room);
        if (is_dense(m)) dense_backward(m, in, parameters[2 * l], made, g, to, dw, dbias, rest);
        else backward(m, in, parameters[2 * l], g, winners_size(m) ? winners : 0, to, dw, dbias, rest);
        if (to && also && l == layers - 1)
            for (int64_t k = 0; k < m->B * inputs(m); k++) to[k] += also[k];
        g = to;
    }
}
