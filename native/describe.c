/* What a library says of itself, for the caller to compare with its own declarations. */
#include <stdio.h>

#include "core.h"

#if !defined(TN_ISA)
#error "build_native.py defines TN_ISA, the name of the instruction set"
#endif

#define TEXT_(tokens) #tokens
#define TEXT(macro) TEXT_(macro)
#define SIZE(struct) #struct " %zu\n"

const char *tn_describe(void) {
    static char text[1024]; /* each call writes the same */
    snprintf(text, sizeof text, "version " TEXT(TN_VERSION) "\nisa " TEXT(TN_ISA) "\n" 
             SIZE(tn_matrix) SIZE(tn_linear_args) SIZE(tn_merge_args) SIZE(tn_interleave_args),
             sizeof(tn_matrix), sizeof(tn_linear_args), sizeof(tn_merge_args), sizeof(tn_interleave_args));
    return text;
}
