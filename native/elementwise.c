/* Functions of each element by itself. */
#include "core.h"
#include "isa.h"

void tn_exp(const float *from, float *to, int64_t count) {
    int64_t place = 0;
    for (; place + TN_LANES <= count; place += TN_LANES) vf_store(to + place, vf_exp(vf_load(from + place)));
    const int left = (int)(count - place);
    if (left) vf_store_part(to + place, vf_exp(vf_load_part(from + place, left)), left);
}
