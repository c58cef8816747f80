/* Functions of each element by itself. */
#include "core.h"
#include "functions.h"
#include "isa.h"

void tn_exp(const float *from, float *to, int64_t count) {
    int64_t place = 0;
    for (; place + TN_LANES <= count; place += TN_LANES) vf_store(to + place, vf_exp(vf_load(from + place)));
    const int left = (int)(count - place);
    if (left) vf_store_part(to + place, vf_exp(vf_load_part(from + place, left)), left);
}

TN_INLINE vf scaled_and_capped(vf x, float scale, float cap) {
    const vf scaled = vf_mul(x, vf_set(scale));
    return cap == 0.0f ? scaled : vf_mul(vf_tanh(vf_div(scaled, vf_set(cap))), vf_set(cap));
}

void tn_scale_and_cap(float *x, int64_t count, float scale, float cap) {
    int64_t place = 0;
    for (; place + TN_LANES <= count; place += TN_LANES)
        vf_store(x + place, scaled_and_capped(vf_load(x + place), scale, cap));
    const int left = (int)(count - place);
    if (left) vf_store_part(x + place, scaled_and_capped(vf_load_part(x + place, left), scale, cap), left);
}
