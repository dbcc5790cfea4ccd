/* Convolution with few channels, then max-pooling over S × S and ReLU, for many clients' images at once.

A block takes one image with its client's weights into shared memory and does the whole layer there.
Backward, only the pixel that won in pooling has a gradient: the sums over the image are sums over the
pooled places. Sizes are constants, put before this text: C, H, W, O, K, P, S, RELU, and
h = H + 2P − K + 1, q likewise, p = h / S, r = q / S. */

#define HP (H + 2 * P)
#define WP (W + 2 * P)
#define PR ((HP - K + 1) / S)
#define PC ((WP - K + 1) / S)
#define KK (K * K)
#define PATCH (K + S - 1)
#define WEIGHTS (O * C * KK)
#define NONE 255

__device__ void load_image(const float *x, float *xs) {
    for (int i = threadIdx.x; i < C * HP * WP; i += blockDim.x) {
        int c = i / (HP * WP), y = i / WP % HP - P, z = i % WP - P;
        xs[i] = y >= 0 && y < H && z >= 0 && z < W ? x[(c * H + y) * W + z] : 0.f;
    }
}

/* x [N, C, H, W], w [N / each, O, C, K, K], bias [N / each, O] -> out, winner [N, O, PR, PC] */
extern "C" __global__ void forward(const float *x, const float *w, const float *bias, float *out, unsigned char *winner, int each) {
    __shared__ float xs[C * HP * WP], ws[WEIGHTS];
    int n = blockIdx.x, k = n / each;
    load_image(x + (long long)n * C * H * W, xs);
    for (int i = threadIdx.x; i < WEIGHTS; i += blockDim.x) ws[i] = w[(long long)k * WEIGHTS + i];
    __syncthreads();
    for (int i = threadIdx.x; i < O / OC * PR * PC; i += blockDim.x) {
        int o = i / (PR * PC) * OC, y = i / PC % PR, z = i % PC;
        float sums[OC][S * S];
        for (int a = 0; a < OC; a++)
            for (int s = 0; s < S * S; s++) sums[a][s] = bias[k * O + o + a];
        for (int c = 0; c < C; c++) {
            float patch[PATCH][PATCH];
            const float *from = xs + (c * HP + y * S) * WP + z * S;
#pragma unroll
            for (int u = 0; u < PATCH; u++)
#pragma unroll
                for (int v = 0; v < PATCH; v++) patch[u][v] = from[u * WP + v];
#pragma unroll
            for (int a = 0; a < OC; a++)
#pragma unroll
                for (int u = 0; u < K; u++)
#pragma unroll
                    for (int v = 0; v < K; v++) {
                        float f = ws[((o + a) * C + c) * KK + u * K + v];
#pragma unroll
                        for (int s = 0; s < S * S; s++) sums[a][s] += f * patch[u + s / S][v + s % S];
                    }
        }
#pragma unroll
        for (int a = 0; a < OC; a++) {
            float best = sums[a][0];
            int which = 0;
#pragma unroll
            for (int s = 1; s < S * S; s++)
                if (sums[a][s] > best || sums[a][s] != sums[a][s]) best = sums[a][s], which = s;
            if (RELU && best <= 0.f) best = 0.f, which = NONE;
            long long place = ((long long)n * O + o + a) * PR * PC + y * PC + z;
            out[place] = best;
            winner[place] = which;
        }
    }
}

/* Gradients dx [N, C, H, W] and, summed over `images` images of a block, parts [blocks, WEIGHTS + O]. */
extern "C" __global__ void backward(const float *x, const float *w, const float *g, const unsigned char *winner, float *dx, float *parts, int each, int images) {
    __shared__ float xs[C * HP * WP], gs[O * PR * PC];
    __shared__ short at[O * PR * PC];
#if DX
    __shared__ float ds[C * HP * WP];
#endif
    int per = each / images, k = blockIdx.x / per;
    long long first = (long long)k * each + (long long)(blockIdx.x % per) * images;
    float sums[(WEIGHTS + O + THREADS - 1) / THREADS];
    for (int i = 0; i < (WEIGHTS + O + THREADS - 1) / THREADS; i++) sums[i] = 0.f;
    for (int image = 0; image < images; image++) {
        long long n = first + image;
        __syncthreads();
        load_image(x + n * C * H * W, xs);
        for (int i = threadIdx.x; i < O * PR * PC; i += THREADS) {
            int which = winner[n * O * PR * PC + i];
            float f = which == NONE ? 0.f : g[n * O * PR * PC + i];
            which = which == NONE ? 0 : which;
            gs[i] = f;
            at[i] = (i / PC % PR * S + which / S) * WP + i % PC * S + which % S;
        }
        __syncthreads();
        for (int i = threadIdx.x, t = 0; i < WEIGHTS + O; i += THREADS, t++) {
            int o = i < WEIGHTS ? i / (C * KK) : i - WEIGHTS;
            const float *from = xs + (i / KK % C) * HP * WP + i / K % K * WP + i % K;
            float sum = 0.f;
            if (i < WEIGHTS)
                for (int j = o * PR * PC; j < (o + 1) * PR * PC; j++) sum += gs[j] * from[at[j]];
            else
                for (int j = o * PR * PC; j < (o + 1) * PR * PC; j++) sum += gs[j];
            sums[t] += sum;
        }
#if DX
        /* A warp has a channel to itself, and its threads the places of the kernel: no two write to one
           place at once, and the order of the sums is always the same. */
        for (int i = threadIdx.x; i < C * HP * WP; i += THREADS) ds[i] = 0.f;
        __syncthreads();
        for (int c = threadIdx.x / 32; c < C; c += THREADS / 32)
            for (int j = 0; j < O * PR * PC; j++) {
                if (gs[j] == 0.f) continue;
                const float *f = w + (((long long)k * O + j / (PR * PC)) * C + c) * KK;
                for (int t = threadIdx.x % 32; t < KK; t += 32)
                    ds[c * HP * WP + at[j] + t / K * WP + t % K] += gs[j] * f[t];
                __syncwarp();
            }
        __syncthreads();
        for (int i = threadIdx.x; i < C * H * W; i += THREADS)
            dx[n * C * H * W + i] = ds[(i / (H * W) * HP + i / W % H + P) * WP + i % W + P];
#endif
    }
    for (int i = threadIdx.x, t = 0; i < WEIGHTS + O; i += THREADS, t++)
        parts[(long long)blockIdx.x * (WEIGHTS + O) + i] = sums[t];
}
