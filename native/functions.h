/* Functions of one number, on vectors: at most 2 ulp off, the same on every machine with the instruction set. */
#ifndef TN_FUNCTIONS_H
#define TN_FUNCTIONS_H

#include "core.h"
#include "isa.h"

TN_INLINE vf vf_abs(vf x) { return vf_max(x, vf_sub(vf_zero(), x)); }

/* `value` >= 0 with the sign of x. */
TN_INLINE vf vf_with_sign(vf value, vf x) { return vf_if_less(x, vf_zero(), vf_sub(vf_zero(), value), value); }

/* Near 0 an odd polynomial of degree 13; elsewhere 1 - 2 / (e^2|x| + 1). */
TN_INLINE vf vf_tanh(vf x) {
    const vf size = vf_abs(x), square = vf_mul(x, x);
    vf p = vf_set(0x1.246dfcp-9f);
    p = vf_fma(p, square, vf_set(-0x1.0ee55cp-7f));
    p = vf_fma(p, square, vf_set(0x1.6418d8p-6f));
    p = vf_fma(p, square, vf_set(-0x1.b9fa8ap-5f));
    p = vf_fma(p, square, vf_set(0x1.11109ep-3f));
    p = vf_fma(p, square, vf_set(-0x1.555554p-2f));
    const vf near_zero = vf_fma(vf_mul(p, square), x, x);
    const vf grown = vf_add(vf_exp(vf_add(size, size)), vf_set(1.0f));
    const vf far_off = vf_sub(vf_set(1.0f), vf_div(vf_set(2.0f), grown));
    return vf_if_less(size, vf_set(0.6f), near_zero, vf_with_sign(far_off, x));
}

/* Near 0 an odd polynomial of degree 13; elsewhere 1 - e^-p(|x|), with p of degree 7 fitted to -log(erfc). */
TN_INLINE vf vf_erf(vf x) {
    const vf size = vf_min(vf_set(3.95f), vf_abs(x)), square = vf_mul(x, x);
    vf p = vf_set(0x1.5f9534p-14f);
    p = vf_fma(p, square, vf_set(-0x1.ab105ap-11f));
    p = vf_fma(p, square, vf_set(0x1.54df1ap-8f));
    p = vf_fma(p, square, vf_set(-0x1.b810e8p-6f));
    p = vf_fma(p, square, vf_set(0x1.ce2e24p-4f));
    p = vf_fma(p, square, vf_set(-0x1.812744p-2f));
    p = vf_fma(p, square, vf_set(0x1.06eba8p-3f)); /* 2 / sqrt(pi) - 1 */
    const vf near_zero = vf_fma(p, x, x);
    vf q = vf_set(0x1.60f9ccp-16f);
    q = vf_fma(q, size, vf_set(-0x1.c6de58p-12f));
    q = vf_fma(q, size, vf_set(0x1.112326p-8f));
    q = vf_fma(q, size, vf_set(-0x1.9b68d6p-6f));
    q = vf_fma(q, size, vf_set(0x1.bb74eep-4f));
    q = vf_fma(q, size, vf_set(0x1.4447cap-1f));
    q = vf_fma(q, size, vf_set(0x1.212772p+0f));
    q = vf_fma(q, size, vf_set(-0x1.6b502cp-13f));
    const vf far_off = vf_sub(vf_set(1.0f), vf_exp(vf_sub(vf_zero(), q)));
    return vf_if_less(size, vf_set(0.92f), near_zero, vf_with_sign(far_off, x));
}

/* x / (1 + e^-x) */
TN_INLINE vf vf_silu(vf x) { return vf_div(x, vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_zero(), x)))); }

/* x Φ(x) */
TN_INLINE vf vf_gelu(vf x) {
    const vf doubled = vf_add(vf_set(1.0f), vf_erf(vf_mul(x, vf_set(0x1.6a09e6p-1f))));
    return vf_mul(vf_mul(x, vf_set(0.5f)), doubled);
}

/* x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, in which 1 + tanh(y) = 2 / (1 + e^-2y). */
TN_INLINE vf vf_gelu_tanh(vf x) {
    const vf cubic = vf_mul(vf_set(0x1.6e4e26p-5f), vf_mul(vf_mul(x, x), x));
    const vf y = vf_mul(vf_add(x, cubic), vf_set(-0x1.988454p+0f)); /* -2 sqrt(2 / pi) */
    return vf_div(x, vf_add(vf_set(1.0f), vf_exp(y)));
}

/* x / (1 + e^-1.702x) */
TN_INLINE vf vf_gelu_quick(vf x) {
    return vf_div(x, vf_add(vf_set(1.0f), vf_exp(vf_mul(x, vf_set(-1.702f)))));
}

TN_INLINE vf vf_activation(int activation, vf x) {
    switch (activation) {
    case TN_SILU: return vf_silu(x);
    case TN_GELU: return vf_gelu(x);
    case TN_GELU_TANH: return vf_gelu_tanh(x);
    case TN_TANH: return vf_tanh(x);
    case TN_GELU_QUICK: return vf_gelu_quick(x);
    case TN_RELU2: return vf_mul(vf_max(vf_zero(), x), vf_max(vf_zero(), x));
    default: return vf_max(vf_zero(), x); /* ReLU; in this order, so that a NaN passes */
    }
}

#endif
