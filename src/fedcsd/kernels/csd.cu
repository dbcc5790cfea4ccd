/* FedCSD's loss, its gradient and the entropy of its target, for many clients' samples at once: see csd.c.

A warp has a row, and a thread of it every 32nd class. Constants, put before this text: C classes, SIMILARITY,
MASK (0 adaptive, 1 forcible, 2 all), UNIFORM, SCALE, MU, TAU, SLOPE (whether the gradient is wanted) and WARPS
of a block. */

#define OWN ((C + 31) / 32)
#define ALL 0xffffffffu
#define EACH_OWN _Pragma("unroll") for (int i = 0, c = threadIdx.x % 32; i < OWN; i++, c += 32) if (c < C)

/* Every thread of the warp gets the same bits: additions and maxima are the same both ways round. */
__device__ float sum(float v) {
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(ALL, v, d);
    return v;
}

__device__ float greatest(const float *a) {
    float most = -__int_as_float(0x7f800000);
    EACH_OWN most = fmaxf(most, a[i]);
    for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, d));
    return most;
}

/* e = exp((a − most) · by), and its sum. */
__device__ float exponentials(const float *a, float most, float by, float *e) {
    float total = 0.f;
    EACH_OWN total += e[i] = expf((a[i] - most) * by);
    return sum(total);
}

__device__ float length(float squares) {
    float root = sqrtf(squares);
    return root < 1e-12f ? 1e-12f : root;
}

/* Whether the teacher's soft label is kept. */
__device__ bool keep(const float *t, float true_t, int label) {
#if MASK == 0
    float most = greatest(t), odds[OWN];
    float total = exponentials(t, most, 1.f, odds);
    return expf(true_t - most) * C > total;
#elif MASK == 1
    /* No class is ranked above the label: none is greater, no earlier one equal, and NaN is greatest. */
    bool other = false, unknown = true_t != true_t;
    EACH_OWN {
        bool nan = t[i] != t[i];
        other |= c < label ? nan || (!unknown && t[i] >= true_t) : c > label && !unknown && (nan || t[i] > true_t);
    }
    return !__any_sync(ALL, other);
#else
    return true;
#endif
}

/* logits, teacher, slope [rows, C], prototypes [rows / each, C, C], labels, loss, entropy [rows]. A label that
is no class gives NaN. */
extern "C" __global__ void csd(const float *logits, const float *teacher, const float *prototypes, const long long *labels, float *loss, float *entropy, float *slope, int rows, int each) {
    int n = blockIdx.x * WARPS + threadIdx.x / 32;
    if (n >= rows) return;
    const float *z_row = logits + (long long)n * C, *t_row = teacher + (long long)n * C;
    long long given = labels[n];
    bool valid = given >= 0 && given < C;
    int label = valid ? (int)given : 0;
    float true_z = valid ? z_row[label] : __int_as_float(0x7fffffff);
    float z[OWN], t[OWN], q[OWN];
    EACH_OWN z[i] = z_row[c], t[i] = t_row[c];
    float kept = keep(t, t_row[label], label) ? 1.f : 0.f;

#if UNIFORM
    float wanted = C, spread = 1.f;
    EACH_OWN q[i] = 1.f;
#else
#if SIMILARITY
    __shared__ float units[WARPS][C];
    float *unit = units[threadIdx.x / 32], squares = 0.f;
    EACH_OWN squares += z[i] * z[i];
    float by = 1.f / length(sum(squares));
    EACH_OWN unit[c] = z[i] * by;
    __syncwarp();
    const float *P = prototypes + (long long)(n / each) * C * C;
    EACH_OWN {
        float dot = 0.f, own = 0.f;
        for (int k = 0; k < C; k++) {
            float f = P[c * C + k];
            dot += unit[k] * f;
            own += f * f;
        }
        q[i] = dot / length(own);
    }
    float share = SCALE / exponentials(q, greatest(q), 1.f, q);
    EACH_OWN t[i] *= q[i] * share;
#endif
    float t_most = greatest(t), wanted = exponentials(t, t_most, 1.f / TAU, q), t_energy = 0.f;
    EACH_OWN if (q[i] > 0.f) t_energy += q[i] * (t[i] - t_most);
    float spread = (logf(wanted) - sum(t_energy) / TAU / wanted) / logf(C);
#endif

    float hard[OWN], soft[OWN], most = greatest(z), energy = 0.f;
    float hard_total = exponentials(z, most, 1.f, hard), soft_total = exponentials(z, most, 1.f / TAU, soft);
    EACH_OWN energy += q[i] * (z[i] - most);
    float distance = logf(soft_total) - sum(energy) / TAU / wanted;
    if (threadIdx.x % 32 == 0) {
        loss[n] = logf(hard_total) - (true_z - most) + MU * (kept * (TAU * TAU) * distance);
        entropy[n] = spread;
    }
#if SLOPE
    float weight = MU * TAU * kept;
    EACH_OWN slope[(long long)n * C + c] = hard[i] / hard_total - (c == label ? 1.f : 0.f) + weight * (soft[i] / soft_total - q[i] / wanted);
#endif
}
