/* A layer as the kernels see it: a convolution with 2×2 max-pooling and ReLU, or a matrix with ReLU. */

#pragma once

#include "lanes.h"

/* B images [C, H, W] to [O, p, r] with kernels K × K, padding P, pooling S × S (S is 1 or 2) and ReLU or not. */
typedef struct { int64_t B, C, H, W, O, K, P, S, relu; } shape;

int64_t scratch_size(const shape *s);
void forward(const shape *s, const float *x, const float *w, const float *bias, float *out, uint8_t *winner,
             vec *scratch);
void backward(const shape *s, const float *x, const float *w, const float *g, const uint8_t *winner, float *dx,
              float *dw, float *dbias, vec *scratch);

/* A matrix is a convolution of images of one pixel. */
INLINE int is_dense(const shape *s) { return s->H == 1 && s->W == 1 && s->K == 1 && s->S == 1 && s->P == 0; }

int64_t dense_scratch_size(const shape *s);
void dense_forward(const shape *s, const float *x, const float *w, const float *bias, float *out, vec *scratch);
void dense_backward(const shape *s, const float *x, const float *w, const float *out, const float *g, float *dx,
                    float *dw, float *dbias, vec *scratch);
